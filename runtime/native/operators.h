// The attention operators of a backend: check, choose a variant, allocate, launch.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/full.h>

#include "attention.h"
#include "router.h"
#include "stream.h"

namespace attnforge {

// Results of a call without any pair of a query and a key.
inline ForwardResult empty_forward(const Call& call, bool with_lse) {
    const Tensor& q = call.q;
    Tensor lse;
    if (with_lse) {
        lse = at::full(q.sizes().slice(0, 3), -INFINITY, q.options().dtype(at::kFloat));
    }
    return {output(q, call.v).zero_(), std::move(lse)};
}

// The lse is undefined where it is not wanted.
inline ForwardResult run_forward(const Call& call, int64_t variant_handle, bool with_lse) {
    if (!acceptable(call)) {
        complain(call);
    }
    const Tensor& q = call.q;
    const c10::DeviceGuard guard(q.device());
    if (call.is_empty()) {
        return empty_forward(call, with_lse);
    }
    const int64_t align = row_alignment({&q, &call.k, &call.v});
    const Variant& variant = choose(call, false, false, align, variant_handle);
    return attend_with(variant, call, with_lse, current_stream(q.device()));
}

inline ForwardResult forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                             int64_t kind, std::optional<double> scale, bool /*deterministic*/, int64_t visible,
                             int64_t variant_handle) {
    return run_forward({q, k, v, mask_list(mask), kind, scale, visible}, variant_handle, true);
}

inline BackwardResult run_backward(const Call& call, const Gradients& given, bool deterministic,
                                   int64_t variant_handle) {
    const Tensor &q = call.q, &k = call.k, &v = call.v;
    if (!acceptable(call) || !acceptable_gradients(given, call)) {
        complain(call, given.dout, given.out, given.lse, given.dlse);
    }
    const c10::DeviceGuard guard(q.device());
    if (call.is_empty()) {
        return {like(q).zero_(), like(k).zero_(), like(v).zero_()};
    }
    // Gradients come in any layout: sum() sends an expanded scalar.
    const auto rows_of = [](const Tensor& x) {
        return x.stride(3) == 1 || x.size(3) == 1 ? x : x.contiguous();
    };
    const Tensor dout = rows_of(given.dout), out = rows_of(given.out), lse = given.lse.contiguous();
    const OptionalTensor dlse = given.dlse ? OptionalTensor(given.dlse->contiguous()) : std::nullopt;
    const int64_t align = row_alignment({&q, &k, &v, &dout, &out});
    const Variant& variant = choose(call, true, deterministic, align, variant_handle);
    return differentiate_with(variant, call, {dout, out, lse, dlse}, current_stream(q.device()));
}

inline BackwardResult backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& out, const Tensor& lse, const OptionalTensor& mask, int64_t kind,
                               std::optional<double> scale, bool deterministic, int64_t visible,
                               const OptionalTensor& dlse, int64_t variant_handle) {
    deterministic = deterministic || at::globalContext().deterministicAlgorithms();
    return run_backward({q, k, v, mask_list(mask), kind, scale, visible}, {dout, out, lse, dlse}, deterministic,
                        variant_handle);
}

}  // namespace attnforge
