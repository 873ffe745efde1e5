// Tile schedules of spans, dense masks and functions: built on the device once per mask and tile shape, owned by it.
#pragma once

#include <exception>
#include <thread>

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include "launch.h"
#include "masks.h"
#include "schedule_layout.h"

namespace attnforge {

// An int tensor that outlives the call, where new_mask left no room. Another thread allocates it, since this
// thread's allocations may go to the pool of a CUDA graph, which must not keep them.
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

// What keeps the tables of a call's schedule until its kernels are in the stream.
struct Attached {
    std::shared_ptr<const Schedule> schedule;
    Tensor tables;
    Tensor counter;
};

// Memory for the tables of `made`: behind the mask's data if there is room.
inline void allocate(MaskState& state, Schedule& made, int64_t size) {
    if (state.used + size <= state.memory.numel()) {
        made.memory = state.memory;
        made.tables = made.memory.mutable_data_ptr<int>() + state.used;
        state.used += aligned(size);
        return;
    }
    const c10::InferenceMode normal(false);
    const auto options = state.memory.options();
    made.memory = made.stream ? empty_to_keep(size, options, *made.stream) : at::empty({size}, options);
    made.tables = made.memory.mutable_data_ptr<int>();
}

// The schedule that `state` has for `key`; built now if this is its first use; other threads wait for it.
inline std::shared_ptr<const Schedule> schedule_of(MaskState& state, const ScheduleKey& key, const Variant& variant,
                                                   const ScheduleLayout& layout, Params& params, void* stream) {
    const std::lock_guard lock(state.mutex);
    if (auto found = state.find(key)) {
        return found;
    }
    const auto made = std::make_shared<Schedule>(key);
    made->stream = current_stream_of(variant.device);
    allocate(state, *made, layout.size());
    layout.point(variant, params, made->tables);
    run(variant, variant.schedule, params, stream);
    if (made->stream) {
        made->built.emplace(made->stream->device_type());
        made->built->record(*made->stream);
    }
    state.schedules.push_back(made);
    return made;
}

// Does the mask keep the schedule of a call on this stream? A CUDA graph builds its own, in its own memory, at every
// replay; so does each call on a stream that is not torch's, see is_external.
inline bool keeps_schedules(const MaskState* state, const std::optional<c10::Stream>& here, void* stream) {
    return state != nullptr && (!here || (!is_external(*here) && !is_capturing(stream)));
}

// Makes `here`, another stream than the one that built the schedule, ready to read it.
inline void share(const ScheduleLayout& layout, const c10::Stream& here, Params& params, Attached& attached) {
    const Schedule& schedule = *attached.schedule;
    schedule.built->block(here);
    keep_for(schedule.memory, here);
    if (layout.counter > 0) {
        // Launches in one stream come one after the other and leave the counter at zero; others need their own.
        attached.counter = at::zeros({layout.counter}, schedule.memory.options());
        params.tile_counter = attached.counter.mutable_data_ptr<int>();
    }
}

// Points `params` at a schedule of the mask `data` for `variant`, built on `stream` if there is none yet.
// The caller keeps the result until its kernels are in the stream.
inline Attached attach_schedule(const Variant& variant, const Tensor& data, Params& params, void* stream) {
    const ScheduleLayout layout(variant, params);
    const auto here = current_stream_of(variant.device);
    MaskState* const state = state_of(data);
    Attached result;
    if (!keeps_schedules(state, here, stream)) {
        result.tables = at::empty({layout.size()}, data.options().dtype(at::kInt));
        layout.point(variant, params, result.tables.mutable_data_ptr<int>());
        run(variant, variant.schedule, params, stream);
        return result;
    }
    const bool own = params.mask_heads > params.heads_kv;  // has each q head of a group a plane of its own?
    const int64_t group = variant.grouped && own ? params.heads_q / params.heads_kv : 1;
    const ScheduleKey key{variant.schedule_number, params.seq_q,      group,            params.seq_k,
                          params.mask_batches,     params.mask_heads, params.bit_slots, layout.order};
    result.schedule = schedule_of(*state, key, variant, layout, params, stream);
    layout.point(variant, params, result.schedule->tables);
    if (here && *here != *result.schedule->stream) {
        share(layout, *here, params, result);
    }
    if (here && *here != *state->stream) {
        keep_for(state->memory, *here);
    }
    return result;
}

}  // namespace attnforge
