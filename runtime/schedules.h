// Tile schedules of spans and dense masks: built on the device once per mask and tile geometry, shared by all layers.
#pragma once

#include <array>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include "variants.h"

namespace attnforge {

// What a schedule depends on. Storages are compared through weak references: an address that is used again by a
// later tensor does not match, and a detached alias (activation checkpointing makes those) does.
struct ScheduleKey {
    std::array<const void*, 2> data;
    std::array<int64_t, 2> versions;
    c10::Device device;
    void* stream;
    bool owner_n, ordered, bounds;
    Bits bits;
    std::array<int64_t, 6> sizes;      // tile_m, tile_n, parts, seq_q, seq_k, launches (not all order their tiles)
    std::array<long long, 7> strides;  // and planes of a dense mask; heads per kv head

    bool operator==(const ScheduleKey& o) const {
        return data == o.data && versions == o.versions && device == o.device && stream == o.stream &&
               owner_n == o.owner_n && ordered == o.ordered && bounds == o.bounds && bits == o.bits &&
               sizes == o.sizes && strides == o.strides;
    }
};

// What a mask is made of: `starts` and `ends` of spans, or a dense mask as both.
struct MaskTensors {
    const at::Tensor& first;
    const at::Tensor& second;
};

class ScheduleCache {
public:
    // Schedule tensor for `key`, or an undefined tensor. Drops entries whose mask is gone: they never match again.
    at::Tensor find(const ScheduleKey& key) {
        const std::lock_guard lock(mutex_);
        at::Tensor found;
        for (auto entry = entries_.begin(); entry != entries_.end();) {
            if (entry->first.expired() || entry->second.expired()) {
                entry = entries_.erase(entry);
                continue;
            }
            if (entry->key == key) {
                found = entry->schedule;
            }
            ++entry;
        }
        return found;
    }

    void insert(const ScheduleKey& key, const MaskTensors& mask, const at::Tensor& schedule) {
        const std::lock_guard lock(mutex_);
        if (entries_.size() >= kCapacity) {
            entries_.pop_front();
        }
        entries_.push_back(
            {key, mask.first.storage().getWeakStorageImpl(), mask.second.storage().getWeakStorageImpl(), schedule});
    }

    int64_t size() {
        const std::lock_guard lock(mutex_);
        return static_cast<int64_t>(entries_.size());
    }

    void clear() {
        const std::lock_guard lock(mutex_);
        entries_.clear();
    }

private:
    struct Entry {
        ScheduleKey key;
        c10::weak_intrusive_ptr<c10::StorageImpl> first;
        c10::weak_intrusive_ptr<c10::StorageImpl> second;
        at::Tensor schedule;
    };
    // A few masks, each with a handful of tile geometries, live at a time; more would only hold memory.
    static constexpr size_t kCapacity = 64;
    std::mutex mutex_;
    std::list<Entry> entries_;
};

inline ScheduleCache& schedules() {
    static auto* cache = new ScheduleCache;  // never destroyed: the allocator may be gone at exit
    return *cache;
}

// An int tensor that outlives the call. A thread of its own allocates it: while torch warms up a CUDA graph
// (torch.compile's mode "reduce-overhead") and inside torch.cuda.use_mem_pool, what this thread allocates goes into
// a pool in which nothing may stay behind.
inline at::Tensor empty_to_keep(int64_t size, const at::TensorOptions& options) {
    if (options.device().is_cpu()) {
        return at::empty({size}, options);
    }
    const c10::Stream stream = c10::impl::VirtualGuardImpl(options.device().type()).getStream(options.device());
    at::Tensor result;
    std::exception_ptr error;
    std::thread([&] {
        try {
            const c10::StreamGuard guard(stream);
            result = at::empty({size}, options);
        } catch (...) {
            error = std::current_exception();
        }
    }).join();
    if (error) {
        std::rethrow_exception(error);
    }
    return result;
}

inline ScheduleKey schedule_key(const Variant& variant, const MaskTensors& mask, const Params& p, void* stream) {
    return {{mask.first.const_data_ptr(), mask.second.const_data_ptr()},
            {static_cast<int64_t>(mask.first._version()), static_cast<int64_t>(mask.second._version())},
            variant.device,
            stream,
            variant.owner_n,
            variant.ordered,
            variant.bounds,
            variant.bits,
            {variant.tile_m, variant.tile_n, variant.parts, p.seq_q, p.seq_k,
             static_cast<int64_t>(variant.schedule.size())},
            {p.dense_batch, p.dense_head, p.dense_row, p.dense_col, p.mask_batches, p.mask_heads,
             p.mask_heads > 1 ? p.heads_q / p.heads_kv : 1}};
}

// Points `params` at the schedule of `mask` for `variant`, building it on `stream` if there is none yet.
// The returned tensor owns the memory: the caller keeps it until its kernels are enqueued.
inline at::Tensor attach_schedule(const Variant& variant, const MaskTensors& mask, Params& params, void* stream) {
    const int64_t tiles = int64_t{params.mask_planes} * (variant.owner_n ? params.tiles_n : params.tiles_m);
    const int64_t bounds = variant.bounds ? int64_t{2} * params.padded_k : 0;
    const int64_t counters = variant.bounds ? 2 : 0;
    const int64_t reach = variant.parts > 1 ? 8 * tiles : 0;
    const bool of_keys = variant.bits == Bits::kOfKeys;
    params.bits_row = variant.bits == Bits::kNone ? 0 : ((of_keys ? params.padded_k : params.padded_q) + 31) / 32;
    const int64_t bits = int64_t{params.mask_planes} * (of_keys ? params.padded_q : params.padded_k) * params.bits_row;
    params.list_stride = variant.owner_n ? params.tiles_m : params.tiles_n;
    // Inference tensors have no version counter: a change in place would go unseen. A CUDA graph builds its own,
    // in its own memory, from what the mask holds at each replay.
    const bool cacheable = !mask.first.is_inference() && !mask.second.is_inference() && !is_capturing(stream);
    std::optional<ScheduleKey> key;
    at::Tensor schedule;
    if (cacheable) {
        key = schedule_key(variant, mask, params, stream);
        schedule = schedules().find(*key);
    }
    const bool build = !schedule.defined();
    if (build) {
        const int64_t lists = tiles * (2 + params.list_stride * (variant.ordered ? 2 : 1));
        const int64_t size = bounds + bits + reach + lists + counters;
        const auto options = mask.first.options().dtype(at::kInt);
        schedule = cacheable ? empty_to_keep(size, options) : at::empty({size}, options);
    }
    params.bounds = schedule.mutable_data_ptr<int>();  // first, where the allocator aligns it for TMA
    params.bits = reinterpret_cast<unsigned*>(params.bounds + bounds);
    params.reach = params.bounds + bounds + bits;
    params.tile_count = params.reach + reach;
    params.tile_order = params.tile_count + tiles;
    params.tile_list = params.tile_order + tiles;
    params.turn = variant.ordered ? params.tile_list + tiles * params.list_stride : nullptr;
    // Launches that share a schedule are in one stream, so one at a time counts.
    params.pieces = schedule.mutable_data_ptr<int>() + schedule.numel() - counters;
    if (build) {
        run(variant, variant.schedule, params, stream);
        if (cacheable) {
            schedules().insert(*key, mask, schedule);
        }
    }
    return schedule;
}

}  // namespace attnforge
