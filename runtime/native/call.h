// One attention call: its arguments, what makes them acceptable, and the choice of the variant that runs it.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <optional>
#include <unordered_map>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "variants.h"

namespace attnforge {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The arguments that forward and backward share. The tensors are the caller's.
struct Call {
    const Tensor& q;
    const Tensor& k;
    const Tensor& v;
    const OptionalTensor& mask;  // the data of spans or of a dense mask, see masks.h
    int64_t kind;
    std::optional<double> scale;
    int64_t visible;  // keys that a query sees on average, as the mask's maker says; 0: not said

    // No pair of a query and a key at all: there is nothing to launch.
    bool is_empty() const { return q.numel() == 0 || k.size(2) == 0; }
};

// ---- Checks ---------------------------------------------------------------------------------------------------------

// Batch and lengths may be 0. The stride of an axis of size 1 is never used.
inline bool is_input(const Tensor& x, const Tensor& q) {
    return x.dim() == 4 && x.device() == q.device() && x.scalar_type() == q.scalar_type() && x.size(1) > 0 &&
           x.size(3) > 0 && (x.stride(3) == 1 || x.size(3) == 1 || x.numel() == 0);
}

inline bool is_mask_data(const Tensor& x, const Call& c) {
    if (x.scalar_type() != at::kInt || x.device() != c.q.device() || !x.is_contiguous()) {
        return false;
    }
    const int64_t seq_q = c.q.size(2), seq_k = c.k.size(2);
    if (c.kind == kSpans) {
        return x.dim() == 2 && x.size(0) == 2 && x.size(1) == seq_k;
    }
    return x.dim() == 4 && (x.size(0) == 1 || x.size(0) == c.q.size(0)) &&
           (x.size(1) == 1 || x.size(1) == c.q.size(1)) && x.size(2) == seq_q && x.size(3) == (seq_k + 31) / 32;
}

inline bool is_mask(const Call& c) {
    switch (c.kind) {
        case kFull:
        case kCausal:
            return !c.mask.has_value();
        case kSpans:
        case kDense:
            return c.mask.has_value() && is_mask_data(*c.mask, c);
        default:
            return false;
    }
}

// As inputs.is_scale: the kernels compute in float32, in which the scale must be neither 0 nor infinite.
inline bool is_scale(double scale) { return scale >= 0x1p-149 && scale <= FLT_MAX; }

constexpr int64_t kMaxHeadDim = 256;

inline bool acceptable(const Call& c) {
    const auto dtype = c.q.scalar_type();
    return (dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat) && is_input(c.q, c.q) &&
           is_input(c.k, c.q) && is_input(c.v, c.q) && c.k.sizes().slice(0, 3) == c.v.sizes().slice(0, 3) &&
           c.q.size(0) == c.k.size(0) && c.q.size(3) == c.k.size(3) && c.q.size(3) <= kMaxHeadDim &&
           c.v.size(3) <= kMaxHeadDim && c.q.size(1) % c.k.size(1) == 0 && c.q.size(2) <= INT_MAX / 2 &&
           c.k.size(2) <= INT_MAX / 2 && c.q.size(0) * c.q.size(1) <= INT_MAX && is_mask(c) &&
           (!c.scale || is_scale(*c.scale)) && c.visible >= 0;
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

// What the backward takes besides what the forward took. `dlse` is the gradient of the lse.
struct Gradients {
    const Tensor& dout;
    const Tensor& out;
    const Tensor& lse;
    const OptionalTensor& dlse;
};

inline bool acceptable_gradients(const Gradients& g, const Call& c) {
    return is_output(g.dout, c) && is_output(g.out, c) && is_row_value(g.lse, c) &&
           (!g.dlse || is_row_value(*g.dlse, c));
}

// Raises the error that names the argument; the wording lives in runtime/inputs.py.
inline void complain(const Call& c, const OptionalTensor& dout = {}, const OptionalTensor& out = {},
                     const OptionalTensor& lse = {}, const OptionalTensor& dlse = {}) {
    static const auto op =
        find_op<void(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t, std::optional<double>,
                     int64_t, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                     const OptionalTensor&)>("attnforge::complain");
    const at::AutoDispatchBelowAutograd below;
    op.call(c.q, c.k, c.v, c.mask, c.kind, c.scale, c.visible, dout, out, lse, dlse);
    TORCH_INTERNAL_ASSERT(false, "attnforge: inputs were refused, but runtime/inputs.py finds nothing wrong");
}

// ---- Choice of the variant ------------------------------------------------------------------------------------------

// Bytes (16, 8, 4 or 2) that every row start of the tensors is a multiple of; 4 at most on the CPU.
inline int64_t row_alignment(std::initializer_list<const Tensor*> tensors) {
    uint64_t bits = 0;
    for (const Tensor* x : tensors) {
        bits |= reinterpret_cast<uint64_t>(x->const_data_ptr());
        for (int64_t axis = 0; axis < 3; ++axis) {
            if (x->size(axis) > 1) {
                bits |= static_cast<uint64_t>(x->stride(axis)) * x->element_size();
            }
        }
    }
    bits |= (*tensors.begin())->is_cpu() ? 4 : 16;
    return static_cast<int64_t>(bits & -bits);
}

// The problem class that a dispatch decision holds for.
struct Route {
    uint64_t sizes, kind;
    bool operator==(const Route& o) const { return sizes == o.sizes && kind == o.kind; }
};

struct RouteHash {
    size_t operator()(const Route& r) const {
        return (r.sizes ^ r.kind * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u >> 7;
    }
};

class Router {
public:
    int64_t choose(const Call& c, bool backward, bool deterministic, int64_t align) {
        const uint64_t octave = 63 - __builtin_clzll(static_cast<uint64_t>(c.q.size(2)));
        const uint64_t shown = c.visible > 0 ? 64 - __builtin_clzll(static_cast<uint64_t>(c.visible)) : 0;
        const uint64_t device = static_cast<uint8_t>(c.q.device().index()) * 2u + c.q.is_cpu();
        const Route route{
            static_cast<uint64_t>(c.q.size(3)) << 48 | static_cast<uint64_t>(c.v.size(3)) << 32 |
                static_cast<uint64_t>(c.q.size(1) / c.k.size(1)),
            shown << 56 | device << 40 | static_cast<uint64_t>(c.q.scalar_type()) << 32 | octave << 24 |
                static_cast<uint64_t>(align) << 16 | static_cast<uint64_t>(c.kind) << 8 | deterministic * 2u |
                backward};
        {
            const std::shared_lock lock(mutex_);
            const auto found = handles_.find(route);
            if (found != handles_.end()) {
                return found->second;
            }
        }
        static const auto resolve = find_op<int64_t(bool, at::ScalarType, int64_t, int64_t, int64_t, int64_t, int64_t,
                                                    int64_t, int64_t, int64_t, at::Device, bool, int64_t)>(
            "attnforge::resolve");
        const int64_t handle =
            resolve.call(backward, c.q.scalar_type(), c.q.size(3), c.v.size(3), c.kind, c.q.size(1), c.k.size(1),
                         c.q.size(2), c.k.size(2), align, c.q.device(), deterministic, c.visible);
        const std::unique_lock lock(mutex_);
        handles_[route] = handle;
        return handle;
    }

    void clear() {
        const std::unique_lock lock(mutex_);
        handles_.clear();
    }

private:
    std::shared_mutex mutex_;
    std::unordered_map<Route, int64_t, RouteHash> handles_;
};

inline Router& router() {
    static auto* instance = new Router;
    return *instance;
}

inline const Variant& choose(const Call& c, bool backward, bool deterministic, int64_t align, int64_t handle) {
    if (handle == 0) {
        return variants().at(router().choose(c, backward, deterministic, align));
    }
    const Variant& v = variants().at(handle);
    TORCH_CHECK_VALUE(v.backward == backward && v.dtype == c.q.scalar_type() && v.head_dim == c.q.size(3) &&
                          v.head_dim_v == c.v.size(3) && v.mask == c.kind && v.device == c.q.device() &&
                          align % v.align == 0 && (v.deterministic || !deterministic),
                      "variant: ", v.name, " on ", v.device, " does not fit this call (", backward ? "bwd" : "fwd",
                      ", ", c.q.scalar_type(), ", head_dim ", c.q.size(3), " and of v ", c.v.size(3), ", mask ", c.kind,
                      ", rows aligned to ", align, " bytes, ", c.q.device(), deterministic ? ", deterministic" : "",
                      ")");
    return v;
}

}  // namespace attnforge
