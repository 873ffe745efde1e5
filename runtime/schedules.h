// Tile schedules of spans and dense masks: built on the device once per mask and tile shape, owned by the mask.
#pragma once

#include <exception>
#include <thread>

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include "masks.h"
#include "variants.h"

namespace attnforge {

// An int tensor that outlives the call. A thread of its own allocates it: while torch warms up a CUDA graph
// (torch.compile's mode "reduce-overhead") and inside torch.cuda.use_mem_pool, what this thread allocates goes into
// a pool in which nothing may stay behind.
inline Tensor empty_to_keep(int64_t size, const at::TensorOptions& options, const c10::Stream& stream) {
    Tensor result;
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

// The parts of a schedule's memory, in ints. codegen/params.py says what is in each.
struct ScheduleLayout {
    int64_t tiles, bounds, bits, reach, lists, counters;

    ScheduleLayout(const Variant& variant, Params& p) {
        const bool of_keys = variant.bits == Bits::kOfKeys;
        p.bits_row = variant.bits == Bits::kNone ? 0 : ((of_keys ? p.padded_k : p.padded_q) + 31) / 32;
        p.list_stride = variant.owner_n ? p.tiles_m : p.tiles_n;
        tiles = int64_t{p.mask_planes} * (variant.owner_n ? p.tiles_n : p.tiles_m);
        bounds = variant.bounds ? int64_t{2} * p.padded_k : 0;
        bits = int64_t{p.mask_planes} * (of_keys ? p.padded_q : p.padded_k) * p.bits_row;
        reach = variant.parts > 1 ? 8 * tiles : 0;
        lists = tiles * (2 + p.list_stride * (variant.ordered ? 2 : 1));
        counters = variant.bounds ? 2 : 0;
    }

    int64_t size() const { return bounds + bits + reach + lists + counters; }

    void point(const Variant& variant, Params& p, int* memory) const {
        p.bounds = memory;  // first, where the allocator aligns it for TMA
        p.bits = reinterpret_cast<unsigned*>(p.bounds + bounds);
        p.reach = p.bounds + bounds + bits;
        p.tile_count = p.reach + reach;
        p.tile_order = p.tile_count + tiles;
        p.tile_list = p.tile_order + tiles;
        p.turn = variant.ordered ? p.tile_list + tiles * p.list_stride : nullptr;
        p.pieces = memory + size() - counters;
    }
};

// What keeps the tables of a call's schedule until its kernels are in the stream.
struct Attached {
    std::shared_ptr<Schedule> schedule;
    Tensor tables;
    Tensor counters;
};

// Fills the tables on the current stream.
inline void build_schedule(const Variant& variant, const ScheduleLayout& layout, const Tensor& tables, Params& params,
                           void* stream) {
    layout.point(variant, params, tables.mutable_data_ptr<int>());
    run(variant, variant.schedule, params, stream);
}

// The schedule that `state` has for `key`; built now if this is its first use. Whoever comes meanwhile waits.
inline std::shared_ptr<Schedule> schedule_of(MaskState& state, const ScheduleKey& key, const Variant& variant,
                                             const ScheduleLayout& layout, Params& params, void* stream) {
    const std::lock_guard lock(state.mutex);
    if (auto found = state.find(key)) {
        return found;
    }
    auto made = std::make_shared<Schedule>(key);
    made->stream = current_stream_of(variant.device);
    const auto options = state.memory.options();
    const c10::InferenceMode normal(false);
    // A captured graph builds its schedules in its own memory, at every replay.
    made->tables = made->stream && key.capture == 0 ? empty_to_keep(layout.size(), options, *made->stream)
                                                    : at::empty({layout.size()}, options);
    build_schedule(variant, layout, made->tables, params, stream);
    if (made->stream) {
        made->built.emplace(made->stream->device_type());
        made->built->record(*made->stream);
    }
    state.schedules.push_back(made);
    return made;
}

// Points `params` at the schedule of the mask `data` for `variant`, built on `stream` if there is none yet.
// The caller keeps the result until its kernels are in the stream.
inline Attached attach_schedule(const Variant& variant, const Tensor& data, Params& params, void* stream) {
    const ScheduleLayout layout(variant, params);
    Attached result;
    MaskState* const state = state_of(data);
    if (state == nullptr) {
        result.tables = at::empty({layout.size()}, data.options().dtype(at::kInt));
        build_schedule(variant, layout, result.tables, params, stream);
        return result;
    }
    const int64_t group = variant.grouped && params.mask_heads > 1 ? params.heads_q / params.heads_kv : 1;
    const ScheduleKey key{variant.schedule_kind, params.seq_q, group, capture_id(stream)};
    result.schedule = schedule_of(*state, key, variant, layout, params, stream);
    result.tables = result.schedule->tables;
    layout.point(variant, params, result.tables.mutable_data_ptr<int>());
    const auto here = current_stream_of(variant.device);
    if (!here) {
        return result;
    }
    if (!same_stream(*here, *state->stream)) {
        keep_for(state->memory, *here);
    }
    if (!same_stream(*here, *result.schedule->stream)) {
        result.schedule->built->block(*here);
        keep_for(result.tables, *here);
        if (layout.counters > 0) {
            // Launches in one stream come one after the other and leave the counter at zero; others need their own.
            result.counters = at::zeros({layout.counters}, result.tables.options());
            params.pieces = result.counters.mutable_data_ptr<int>();
        }
    }
    return result;
}

}  // namespace attnforge
