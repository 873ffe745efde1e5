// Checks of the arguments of the operators. The texts of errors are in runtime/inputs.py.
#pragma once

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cstdlib>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "call.h"

namespace attnforge {

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Batch and lengths may be 0. The stride of an axis of size 1 is never used.
inline bool is_input(const Tensor& x, const Tensor& q) {
    return x.dim() == 4 && x.device() == q.device() && x.scalar_type() == q.scalar_type() && x.size(1) > 0 &&
           x.size(3) > 0 && (x.stride(3) == 1 || x.size(3) == 1 || x.numel() == 0);
}

constexpr int64_t kMaxIntervals = 4;  // as MAX_INTERVALS of codegen/spec.py

inline bool is_mask_data(const Tensor& x, const Call& c) {
    if (x.scalar_type() != at::kInt || x.device() != c.q.device() || !x.is_contiguous()) {
        return false;
    }
    const int64_t seq_q = c.q.size(2), seq_k = c.k.size(2);
    if (c.kind == kSpans && x.dim() == 5) {
        return (x.size(0) == 1 || x.size(0) == c.q.size(0)) &&
               (x.size(1) == 1 || x.size(1) == c.q.size(1) || x.size(1) == c.k.size(1)) && x.size(2) >= 1 &&
               x.size(2) <= kMaxIntervals && x.size(3) == 2 && x.size(4) == seq_k;
    }
    if (c.kind == kSpans) {
        return x.dim() == 2 && x.size(0) == 2 && x.size(1) == seq_k;
    }
    if (!c.score.mask_mod.empty()) {
        return x.dim() == 1 && x.size(0) == 1;
    }
    return x.dim() == 4 && (x.size(0) == 1 || x.size(0) == c.q.size(0)) &&
           (x.size(1) == 1 || x.size(1) == c.q.size(1)) && x.size(2) == seq_q && x.size(3) == (seq_k + 31) / 32;
}

inline bool is_mask(const Call& c) {
    if (!c.score.mask_mod.empty() && c.kind != kDense) {
        return false;
    }
    switch (c.kind) {
        case kFull:
        case kCausal:
            return c.mask.empty();
        case kSpans:
        case kDense:
            return c.mask.size() == 1 && is_mask_data(c.mask[0], c);
        default:
            return false;
    }
}

// Whether they are what the formula reads is checked against the variant: see set_score in arguments.h.
inline bool is_score(const Call& c) {
    const auto readable = [&](const Tensor& x) {
        const auto dtype = x.scalar_type();
        return (dtype == at::kFloat || dtype == at::kInt || dtype == at::kBFloat16) && x.device() == c.q.device() &&
               x.dim() >= 1 && x.dim() <= 4 && x.numel() > 0;
    };
    return std::all_of(c.score.tensors.begin(), c.score.tensors.end(), readable);
}

// As inputs.is_scale: the kernels compute in float32, in which the scale must be neither 0 nor infinite.
inline bool is_scale(double scale) { return scale >= 0x1p-149 && scale <= FLT_MAX; }

constexpr int64_t kMaxHeadDim = 512;

inline bool acceptable(const Call& c) {
    const auto dtype = c.q.scalar_type();
    return (dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat) && is_input(c.q, c.q) &&
           is_input(c.k, c.q) && is_input(c.v, c.q) && c.k.sizes().slice(0, 3) == c.v.sizes().slice(0, 3) &&
           c.q.size(0) == c.k.size(0) && c.q.size(3) == c.k.size(3) && c.q.size(3) <= kMaxHeadDim &&
           c.v.size(3) <= kMaxHeadDim && c.q.size(1) % c.k.size(1) == 0 && c.q.size(2) <= INT_MAX / 2 &&
           c.k.size(2) <= INT_MAX / 2 && c.q.size(0) * c.q.size(1) <= INT_MAX && is_mask(c) && is_score(c) &&
           (!c.scale || is_scale(*c.scale)) && std::abs(c.visible_keys) <= INT_MAX;
}

// Has x the shape of the call's output, dtype and device of q?
inline bool is_output(const Tensor& x, const Call& c) {
    return x.dim() == 4 && x.sizes().slice(0, 3) == c.q.sizes().slice(0, 3) && x.size(3) == c.v.size(3) &&
           x.device() == c.q.device() && x.scalar_type() == c.q.scalar_type();
}

// Is x float32 (batch, heads_q, seq_q), as the lse and its gradient are?
inline bool is_row_value(const Tensor& x, const Call& c) {
    return x.dim() == 3 && x.sizes() == c.q.sizes().slice(0, 3) && x.device() == c.q.device() &&
           x.scalar_type() == at::kFloat;
}

inline bool acceptable_gradients(const Gradients& g, const Call& c) {
    return is_output(g.dout, c) && is_output(g.out, c) && is_row_value(g.lse, c) &&
           (!g.dlse || is_row_value(*g.dlse, c));
}

// Raises the error of runtime/inputs.py that names the argument.
inline void complain(const Call& c, const OptionalTensor& dout = {}, const OptionalTensor& out = {},
                     const OptionalTensor& lse = {}, const OptionalTensor& dlse = {}) {
    static const auto op =
        find_op<void(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t, std::optional<double>,
                     int64_t, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                     const OptionalTensor&, std::string_view, const OptionalTensor&, const OptionalTensor&,
                     const OptionalTensor&, const OptionalTensor&, std::string_view)>("attnforge::complain");
    const at::AutoDispatchBelowAutograd below;
    const OptionalTensor mask = c.mask.empty() ? OptionalTensor() : c.mask[0];
    op.call(c.q, c.k, c.v, mask, c.kind, c.scale, c.visible_keys, dout, out, lse, dlse, c.score.text, c.score.tensor(0),
            c.score.tensor(1), c.score.tensor(2), c.score.tensor(3), c.score.mask_mod);
    TORCH_INTERNAL_ASSERT(false, "attnforge: inputs were refused, but runtime/inputs.py finds nothing wrong");
}

}  // namespace attnforge
