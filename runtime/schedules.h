// Tile schedules of `spans` masks: built on the device once per mask and tile geometry, then shared by all layers.
#pragma once

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
    const void* starts;
    const void* ends;
    int64_t starts_version;
    int64_t ends_version;
    c10::Device device;
    void* stream;
    bool owner_n, ordered, bounds;
    int64_t tile_m, tile_n, seq_q, seq_k;

    bool operator==(const ScheduleKey& o) const {
        return starts == o.starts && ends == o.ends && starts_version == o.starts_version &&
               ends_version == o.ends_version && device == o.device && stream == o.stream && owner_n == o.owner_n &&
               ordered == o.ordered && bounds == o.bounds && tile_m == o.tile_m && tile_n == o.tile_n &&
               seq_q == o.seq_q && seq_k == o.seq_k;
    }
};

class ScheduleCache {
public:
    // Schedule tensor for `key`, or an undefined tensor. Drops entries whose mask is gone: they never match again.
    at::Tensor find(const ScheduleKey& key) {
        const std::lock_guard lock(mutex_);
        at::Tensor found;
        for (auto entry = entries_.begin(); entry != entries_.end();) {
            if (entry->starts.expired() || entry->ends.expired()) {
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

    void insert(const ScheduleKey& key, const at::Tensor& starts, const at::Tensor& ends, const at::Tensor& schedule) {
        const std::lock_guard lock(mutex_);
        if (entries_.size() >= kCapacity) {
            entries_.pop_front();
        }
        entries_.push_back({key, starts.storage().getWeakStorageImpl(), ends.storage().getWeakStorageImpl(), schedule});
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
        c10::weak_intrusive_ptr<c10::StorageImpl> starts;
        c10::weak_intrusive_ptr<c10::StorageImpl> ends;
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

// Points `params` at the schedule of (starts, ends) for `variant`, building it on `stream` if there is none yet.
// The returned tensor owns the memory: the caller keeps it until its kernels are enqueued.
inline at::Tensor attach_schedule(const Variant& variant, const at::Tensor& starts, const at::Tensor& ends,
                                  Params& params, void* stream) {
    const int64_t tiles = variant.owner_n ? params.tiles_n : params.tiles_m;
    const int64_t bounds = variant.bounds ? int64_t{2} * params.padded_k : 0;
    params.list_stride = variant.owner_n ? params.tiles_m : params.tiles_n;
    // Inference tensors have no version counter: a change in place would go unseen. A CUDA graph builds its own,
    // in its own memory, from what the mask holds at each replay.
    const bool cacheable = !starts.is_inference() && !ends.is_inference() && !is_capturing(stream);
    std::optional<ScheduleKey> key;
    at::Tensor schedule;
    if (cacheable) {
        key = ScheduleKey{starts.const_data_ptr(), ends.const_data_ptr(), static_cast<int64_t>(starts._version()),
                          static_cast<int64_t>(ends._version()), variant.device, stream, variant.owner_n,
                          variant.ordered, variant.bounds, variant.tile_m, variant.tile_n, params.seq_q, params.seq_k};
        schedule = schedules().find(*key);
    }
    const bool build = !schedule.defined();
    if (build) {
        const int64_t size = bounds + tiles * (2 + params.list_stride * (variant.ordered ? 2 : 1));
        schedule = cacheable ? empty_to_keep(size, starts.options()) : at::empty({size}, starts.options());
    }
    params.bounds = schedule.mutable_data_ptr<int>();  // first, where the allocator aligns it for TMA
    params.tile_count = params.bounds + bounds;
    params.tile_order = params.tile_count + tiles;
    params.tile_list = params.tile_order + tiles;
    params.turn = variant.ordered ? params.tile_list + tiles * params.list_stride : nullptr;
    if (build) {
        run(variant, variant.schedule, params, stream);
        if (cacheable) {
            schedules().insert(*key, starts, ends, schedule);
        }
    }
    return schedule;
}

}  // namespace attnforge
