// Masks as values. A mask is one int32 tensor, its data: spans are (2, seq_k), starts and ends; a dense mask is
// (batch or 1, heads_q or 1, seq_q, ceil(seq_k / 32)), a bit for each pair, the lowest for the first key.
//
// The storage of that tensor owns the mask's tile schedules: the context of its DataPtr is a MaskState. So every alias
// of the tensor leads to the same schedules (layers, checkpoints, saved tensors, inputs of compiled code), and they go
// when the last one goes. Nothing is looked up by address or version. A tensor of the same layout whose storage is
// somebody else's (a copy in the static memory of a CUDA graph, say) is a mask, too; its schedule serves one call.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "driver.h"

namespace attnforge {

using at::Tensor;

// What the tables of a schedule depend on, besides the mask.
struct ScheduleKey {
    int64_t kind;      // Variant::schedule_kind: tile shape and what else the schedule kernels are rendered from
    int64_t seq_q;     // spans say nothing of it
    int64_t group;     // q heads that share an order of tiles
    uint64_t capture;  // the CUDA graph being captured, 0 outside of any

    bool operator==(const ScheduleKey& o) const {
        return kind == o.kind && seq_q == o.seq_q && group == o.group && capture == o.capture;
    }
};

inline std::atomic<int64_t>& live_schedules() {
    static std::atomic<int64_t> count{0};
    return count;
}

// The tables of one schedule, built on `stream`. Other streams wait for `built` before they read them.
struct Schedule {
    ScheduleKey key;
    Tensor tables;
    std::optional<c10::Stream> stream;
    std::optional<c10::Event> built;

    explicit Schedule(ScheduleKey k) : key(k) { ++live_schedules(); }
    Schedule(const Schedule&) = delete;
    Schedule& operator=(const Schedule&) = delete;
    ~Schedule() { --live_schedules(); }
};

// What the storage of a mask's data owns. `mutex` guards the list; a schedule in it does not change.
struct MaskState {
    Tensor memory;  // of the data
    std::optional<c10::Stream> stream;
    std::mutex mutex;
    std::vector<std::shared_ptr<Schedule>> schedules;

    // The schedule for `key`, or null. Those of CUDA graphs that are no longer captured never match again and go.
    std::shared_ptr<Schedule> find(const ScheduleKey& key) {
        std::shared_ptr<Schedule> found;
        for (auto entry = schedules.begin(); entry != schedules.end();) {
            const uint64_t capture = (*entry)->key.capture;
            if (capture != 0 && key.capture != 0 && capture != key.capture) {
                entry = schedules.erase(entry);
                continue;
            }
            if ((*entry)->key == key) {
                found = *entry;
            }
            ++entry;
        }
        return found;
    }
};

inline void delete_mask_state(void* state) { delete static_cast<MaskState*>(state); }

// The state behind `data`, null if its storage is not that of a mask or it is not the whole mask.
inline MaskState* state_of(const Tensor& data) {
    const c10::DataPtr& pointer = data.storage().data_ptr();
    if (pointer.get_deleter() != &delete_mask_state || data.storage_offset() != 0) {
        return nullptr;
    }
    auto* const state = static_cast<MaskState*>(pointer.get_context());
    return data.numel() == state->memory.numel() ? state : nullptr;
}

inline std::optional<c10::Stream> current_stream_of(c10::Device device) {
    if (device.is_cpu()) {
        return std::nullopt;
    }
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Uninitialised data of a mask, with a state of its own. Never an inference tensor: a later step that is recorded for
// backward may save it.
inline Tensor new_mask(at::IntArrayRef sizes, c10::Device device) {
    const c10::InferenceMode normal(false);
    auto state = std::make_unique<MaskState>();
    state->memory = at::empty(sizes, at::TensorOptions().dtype(at::kInt).device(device));
    state->stream = current_stream_of(device);
    const size_t bytes = state->memory.nbytes();
    void* const memory = state->memory.mutable_data_ptr();
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                         c10::DataPtr(memory, state.release(), &delete_mask_state, device));
    const c10::DispatchKeySet keys(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
    Tensor data = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys,
                                                           c10::scalarTypeToTypeMeta(at::kInt));
    data.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return data;
}

// `stream` is about to read `memory`, which belongs to another one: it may be reused only after that.
inline void keep_for(const Tensor& memory, const c10::Stream& stream) {
    c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(memory.storage().data_ptr(), stream);
}

// Is work in `stream` ordered behind earlier work in `home` without an event? Handles of streams that are not torch's
// may be given to new streams while work of the old ones is pending. Their ids are their handles, which are even; ids
// of torch's streams are odd, but for the default stream's, 0 (c10/cuda/CUDAStream.cpp).
inline bool same_stream(const c10::Stream& stream, const c10::Stream& home) {
    return stream == home && (stream.id() == 0 || stream.id() % 2 != 0);
}

}  // namespace attnforge
