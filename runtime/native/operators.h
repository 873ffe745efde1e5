// The attention operators of a backend: check, choose a variant, allocate, launch.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/full.h>

#include "arguments.h"

namespace attnforge {

using ForwardResult = std::tuple<Tensor, Tensor>;
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;

// What a call without a pair gives: nobody sees anything.
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

inline ForwardResult forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                             int64_t kind, std::optional<double> scale, bool /*deterministic*/, int64_t visible,
                             int64_t variant_handle) {
    return run_forward({q, k, v, mask, kind, scale, visible}, variant_handle, true);
}

// torch's own warning, word for word: filters look for it. Once per name, as each of torch's operators warns once.
template <int>
void warn_that_order_varies(const char* name) {
    TORCH_WARN_ONCE(name,
                    " defaults to a non-deterministic algorithm. To explicitly enable determinism call "
                    "torch.use_deterministic_algorithms(True, warn_only=False). "
                    "(attnforge; or pass deterministic=True)");
}

// By the name of the first backend that sdpa_kernel() leaves torch: what runs is ours, whichever it is.
inline void warn_that_order_varies() {
    const at::Context& torch = at::globalContext();
    if (torch.userEnabledFlashSDP()) {
        warn_that_order_varies<0>("Flash Attention");
    } else if (torch.userEnabledMemEfficientSDP()) {
        warn_that_order_varies<1>("Memory Efficient attention");
    } else {
        warn_that_order_varies<2>("cuDNN Attention");
    }
}

inline BackwardResult run_backward(const Call& call, const Gradients& given, bool deterministic,
                                   int64_t variant_handle) {
    const auto& [q, k, v, mask, kind, scale, visible] = call;
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
    const Tensor dlse = given.dlse ? given.dlse->contiguous() : Tensor();
    const int64_t align = row_alignment({&q, &k, &v, &dout, &out});
    const Variant& variant = choose(call, true, deterministic, align, variant_handle);
    if (!variant.deterministic && at::globalContext().deterministicAlgorithms()) {
        warn_that_order_varies();  // with warn_only=True: without it `deterministic` is set
    }
    Tensor dq = like(q), dk = like(k), dv = like(v);
    Params params = make_params(call, variant, out, lse.const_data_ptr<float>());
    params.dlse = dlse.defined() ? dlse.const_data_ptr<float>() : nullptr;
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

inline BackwardResult backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& out, const Tensor& lse, const OptionalTensor& mask, int64_t kind,
                               std::optional<double> scale, bool deterministic, int64_t visible,
                               const OptionalTensor& dlse, int64_t variant_handle) {
    const at::Context& torch = at::globalContext();  // as its own kernels: warn_only asks for a warning alone
    deterministic = deterministic || (torch.deterministicAlgorithms() && !torch.deterministicAlgorithmsWarnOnly());
    return run_backward({q, k, v, mask, kind, scale, visible}, {dout, out, lse, dlse}, deterministic, variant_handle);
}

}  // namespace attnforge
