// Masks as values. A mask is one int32 tensor, its data: spans are (2, seq_k), starts and ends, and unions of up to 4
// intervals (batch or 1, heads_q, heads_kv or 1, intervals, 2, seq_k); a dense mask is
// (batch or 1, heads_q or 1, seq_q, ceil(seq_k / 32)), a bit for each pair, the lowest for the first key; one whose
// pairs are given by a function is (1), 0: its tensors are arguments of calls, and its data only owns schedules.
//
// The storage of that tensor owns the mask's tile schedules: the context of its DataPtr is a MaskState. So every alias
// of the tensor leads to the same schedules (layers, checkpoints, saved tensors, inputs of compiled code), and they are
// freed with the last one. Nothing is looked up by address or version. A tensor of the same layout with another storage
// (such as a copy in the static memory of a CUDA graph) is a mask, too; its schedules are made anew for each call.
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
    int64_t kind;   // Variant::schedule_number: tile shape and what else the schedule kernels are rendered from
    int64_t seq_q;  // spans do not determine it
    int64_t group;  // q heads that share an order of tiles
    int64_t seq_k, batches, heads;  // nor does a function determine these: planes of batch entries and heads
    int64_t slots;                  // visits whose bits there is memory for
    int64_t order;                  // ScheduleLayout::order: few heads have more pieces of lists

    bool operator==(const ScheduleKey& o) const {
        return kind == o.kind && seq_q == o.seq_q && group == o.group && seq_k == o.seq_k && batches == o.batches &&
               heads == o.heads && slots == o.slots && order == o.order;
    }
};

inline std::atomic<int64_t>& live_schedules() {
    static std::atomic<int64_t> count{0};
    return count;
}

// The tables of one schedule, built on `stream`. Other streams wait for `built` before they read them.
struct Schedule {
    ScheduleKey key;
    Tensor memory;  // that the tables are in
    int* tables = nullptr;
    std::optional<c10::Stream> stream;
    std::optional<c10::Event> built;

    explicit Schedule(ScheduleKey k) : key(k) { ++live_schedules(); }
    Schedule(const Schedule&) = delete;
    Schedule& operator=(const Schedule&) = delete;
    ~Schedule() { --live_schedules(); }
};

// What the storage of a mask's data owns. `mutex` guards what follows it; a schedule in the list does not change.
struct MaskState {
    Tensor memory;  // of the data, and behind it room for schedules
    int64_t size = 0;  // of the data, in ints
    std::optional<c10::Stream> stream;
    std::mutex mutex;
    int64_t used = 0;  // ints of `memory`
    std::vector<std::shared_ptr<const Schedule>> schedules;

    std::shared_ptr<const Schedule> find(const ScheduleKey& key) const {
        for (const auto& schedule : schedules) {
            if (schedule->key == key) {
                return schedule;
            }
        }
        return nullptr;
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
    return data.numel() == state->size ? state : nullptr;
}

inline std::optional<c10::Stream> current_stream_of(c10::Device device) {
    if (device.is_cpu()) {
        return std::nullopt;
    }
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

constexpr int64_t kScheduleAlign = 128;  // ints: tables are read by TMA

inline int64_t aligned(int64_t ints) { return (ints + kScheduleAlign - 1) / kScheduleAlign * kScheduleAlign; }

// Room for a forward and a backward schedule of usual tiles, in ints, as far as that is little: see new_mask.
inline int64_t room_for_schedules(int64_t seq_k) {
    constexpr int64_t kMost = 1 << 20, kPairsOfEntry = 4096;  // two lists of tiles of 64 x 128 pairs
    const int64_t room = seq_k * seq_k / kPairsOfEntry + 8 * seq_k + 4 * kScheduleAlign;
    return seq_k < (1 << 20) && room <= kMost ? room : 0;
}

// The same for a mask by a function, whose schedules on a GPU have bits of partial visits, too: 32 pairs an int, twice.
inline int64_t room_for_bits(int64_t seq_k) {
    constexpr int64_t kMost = 1 << 20, kTile = 128;
    // 1/16 of the pairs, and the lists.
    const int64_t room = (seq_k + kTile) * (seq_k + kTile) / 15 + 8 * seq_k + 4 * kScheduleAlign;
    return seq_k < (1 << 20) && room <= kMost ? room : 0;
}

// Uninitialised data of a mask, with a state of its own. Never an inference tensor: a later step that is recorded for
// backward may save it. `room`: ints behind the data, in which schedules are built. They could be allocated when they
// are, but while torch warms up a CUDA graph (torch.compile's mode "reduce-overhead") and inside
// torch.cuda.use_mem_pool, what a call allocates goes into a pool in which nothing of it may stay behind.
inline Tensor new_mask(at::IntArrayRef sizes, c10::Device device, int64_t room = 0) {
    const c10::InferenceMode normal(false);
    auto state = std::make_unique<MaskState>();
    state->size = c10::multiply_integers(sizes);
    state->used = aligned(state->size);
    state->memory = at::empty({state->used + room}, at::TensorOptions().dtype(at::kInt).device(device));
    state->stream = current_stream_of(device);
    const size_t bytes = static_cast<size_t>(state->size) * sizeof(int);
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

// Is `stream` none of torch's? Its handle may be given to a new stream while its work is pending, and it may be gone
// when memory that it used is given back. Ids of such streams are their handles, which are even; those of torch's are
// odd, but for the default stream's, 0 (c10/cuda/CUDAStream.cpp).
inline bool is_external(const c10::Stream& stream) { return stream.id() != 0 && stream.id() % 2 == 0; }

}  // namespace attnforge
