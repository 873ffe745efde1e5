// One attention call: its arguments, what makes them acceptable, and the choice of the variant that runs it.
#pragma once

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
    const OptionalTensor& starts;
    const OptionalTensor& ends;
    int64_t mask;
    std::optional<double> scale;
    const OptionalTensor& dense;
    int64_t visible;  // keys that a query sees on average, as the mask's maker says; 0: not said
};

// ---- Checks ---------------------------------------------------------------------------------------------------------

inline bool is_input(const Tensor& x, const Tensor& q) {
    return x.dim() == 4 && x.device() == q.device() && x.scalar_type() == q.scalar_type() && x.numel() > 0 &&
           x.stride(3) == 1;
}

inline bool is_span_vector(const OptionalTensor& x, const Tensor& k) {
    return x.has_value() && x->dim() == 1 && x->scalar_type() == at::kInt && x->device() == k.device() &&
           x->size(0) == k.size(2) && x->is_contiguous();
}

inline bool is_dense_mask(const OptionalTensor& x, const Tensor& q, const Tensor& k) {
    return x.has_value() && (x->dim() == 2 || x->dim() == 4) && x->scalar_type() == at::kBool &&
           x->device() == q.device() && x->size(-2) == q.size(2) && x->size(-1) == k.size(2) &&
           (x->dim() == 2 || ((x->size(0) == 1 || x->size(0) == q.size(0)) &&
                              (x->size(1) == 1 || x->size(1) == q.size(1))));
}

inline bool is_mask(const Call& c) {
    switch (c.mask) {
        case kFull:
        case kCausal:
            return !c.starts && !c.ends && !c.dense;
        case kSpans:
            return is_span_vector(c.starts, c.k) && is_span_vector(c.ends, c.k) && !c.dense;
        case kDense:
            return !c.starts && !c.ends && is_dense_mask(c.dense, c.q, c.k);
        default:
            return false;
    }
}

constexpr int64_t kMaxHeadDim = 256;

inline bool acceptable(const Call& c) {
    const auto dtype = c.q.scalar_type();
    return (dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat) && is_input(c.q, c.q) &&
           is_input(c.k, c.q) && is_input(c.v, c.q) && c.k.sizes().slice(0, 3) == c.v.sizes().slice(0, 3) &&
           c.q.size(0) == c.k.size(0) && c.q.size(3) == c.k.size(3) && c.q.size(3) <= kMaxHeadDim &&
           c.v.size(3) <= kMaxHeadDim && c.q.size(1) % c.k.size(1) == 0 && c.q.size(2) <= INT_MAX / 2 &&
           c.k.size(2) <= INT_MAX / 2 && c.q.size(0) * c.q.size(1) <= INT_MAX && is_mask(c) &&
           (!c.scale || (std::isfinite(*c.scale) && *c.scale > 0)) && c.visible >= 0;
}

// Has x the shape of the call's output, dtype and device of q?
inline bool is_output(const Tensor& x, const Call& c) {
    return x.dim() == 4 && x.sizes().slice(0, 3) == c.q.sizes().slice(0, 3) && x.size(3) == c.v.size(3) &&
           x.device() == c.q.device() && x.scalar_type() == c.q.scalar_type();
}

inline bool acceptable_gradient(const Tensor& dout, const Tensor& out, const Tensor& lse, const Call& c) {
    return is_output(dout, c) && is_output(out, c) && lse.dim() == 3 && lse.sizes() == c.q.sizes().slice(0, 3) &&
           lse.device() == c.q.device() && lse.scalar_type() == at::kFloat;
}

// Raises the error that names the argument; the wording lives in runtime/inputs.py.
inline void complain(const Call& c, const OptionalTensor& dout = {}, const OptionalTensor& out = {},
              const OptionalTensor& lse = {}) {
    static const auto op =
        find_op<void(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                     std::optional<double>, const OptionalTensor&, int64_t, const OptionalTensor&,
                     const OptionalTensor&, const OptionalTensor&)>("attnforge::complain");
    const at::AutoDispatchBelowAutograd below;
    op.call(c.q, c.k, c.v, c.starts, c.ends, c.mask, c.scale, c.dense, c.visible, dout, out, lse);
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
                static_cast<uint64_t>(align) << 16 | static_cast<uint64_t>(c.mask) << 8 | deterministic * 2u |
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
            resolve.call(backward, c.q.scalar_type(), c.q.size(3), c.v.size(3), c.mask, c.q.size(1), c.k.size(1),
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
                          v.head_dim_v == c.v.size(3) && v.mask == c.mask && v.device == c.q.device() &&
                          align % v.align == 0 && (v.deterministic || !deterministic),
                      "variant: ", v.name, " on ", v.device, " does not fit this call (", backward ? "bwd" : "fwd",
                      ", ", c.q.scalar_type(), ", head_dim ", c.q.size(3), " and of v ", c.v.size(3), ", mask ", c.mask,
                      ", rows aligned to ", align, " bytes, ", c.q.device(), deterministic ? ", deterministic" : "",
                      ")");
    return v;
}

}  // namespace attnforge
