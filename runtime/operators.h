// The attention operators of a backend: check, choose a variant, allocate, launch.
#pragma once

#include <ATen/Context.h>

#include "arguments.h"

namespace attnforge {

using ForwardResult = std::tuple<Tensor, Tensor>;
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;

// The lse is undefined where it is not wanted.
inline ForwardResult run_forward(const Call& call, int64_t variant_handle, bool with_lse) {
    if (!acceptable(call)) {
        complain(call);
    }
    const Tensor& q = call.q;
    const c10::DeviceGuard guard(q.device());
    const int64_t align = row_alignment({&q, &call.k, &call.v});
    const Variant& variant = choose(call, false, false, align, variant_handle);
    const int64_t heads = q.size(1), rows = q.size(2);
    Tensor out = output(q, call.v), lse;
    Scratch unwanted;
    if (with_lse) {
        lse = new_tensor(q, q.sizes().slice(0, 3), {heads * rows, rows, 1}, at::kFloat);
    } else {
        unwanted = Scratch(q, q.size(0) * heads * rows * 4);
    }
    Params params =
        make_params(call, variant, out, with_lse ? lse.const_data_ptr<float>() : unwanted.data<float>());
    const Scratch parts = dkv_accum_of(call.k, variant, params);
    launch(call, variant, params);
    return {std::move(out), std::move(lse)};
}

inline ForwardResult forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& starts,
                             const OptionalTensor& ends, int64_t mask, std::optional<double> scale,
                             bool /*deterministic*/, int64_t visible, const OptionalTensor& dense,
                             int64_t variant_handle) {
    return run_forward({q, k, v, starts, ends, mask, scale, dense, visible}, variant_handle, true);
}

inline BackwardResult backward(const Tensor& dout_any, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& out_any, const Tensor& lse_any, const OptionalTensor& starts,
                               const OptionalTensor& ends, int64_t mask, std::optional<double> scale,
                               bool deterministic, int64_t visible, const OptionalTensor& dense,
                               int64_t variant_handle) {
    const Call call{q, k, v, starts, ends, mask, scale, dense, visible};
    if (!acceptable(call) || !acceptable_gradient(dout_any, out_any, lse_any, call)) {
        complain(call, dout_any, out_any, lse_any);
    }
    const c10::DeviceGuard guard(q.device());
    // Gradients come in any layout: sum() sends an expanded scalar.
    const Tensor dout = dout_any.stride(3) == 1 ? dout_any : dout_any.contiguous();
    const Tensor out = out_any.stride(3) == 1 ? out_any : out_any.contiguous();
    const Tensor lse = lse_any.contiguous();
    const int64_t align = row_alignment({&q, &k, &v, &dout, &out});
    deterministic = deterministic || at::globalContext().deterministicAlgorithms();
    const Variant& variant = choose(call, true, deterministic, align, variant_handle);
    Tensor dq = like(q), dk = like(k), dv = like(v);
    Params params = make_params(call, variant, out, lse.const_data_ptr<float>());
    ATTNFORGE_SET(params, dout, dout);
    ATTNFORGE_SET(params, dq, dq);
    ATTNFORGE_SET(params, dk, dk);
    ATTNFORGE_SET(params, dv, dv);
    const int64_t rows_q = q.size(0) * q.size(1) * params.padded_q;
    const Scratch delta(q, rows_q * variant.statistics * 4);
    params.delta = delta.data<float>();
    const Scratch dkv_accum = dkv_accum_of(k, variant, params);
    Scratch dq_accum, turns_taken;
    if (variant.dq_accum) {
        dq_accum = Scratch(q, rows_q * variant.columns * 4);
        params.dq_accum = dq_accum.data<float>();
    }
    if (variant.ordered) {
        turns_taken = Scratch(q, q.size(0) * (q.size(1) * params.tiles_m + k.size(1) * params.tiles_n) * 4);
        params.turns_taken = turns_taken.data<int>();
    }
    launch(call, variant, params);
    return {std::move(dq), std::move(dk), std::move(dv)};
}

}  // namespace attnforge
