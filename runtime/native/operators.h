// The attention operators of a backend: check, choose a variant, allocate, launch.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

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

// The lse is undefined unless `with_lse`.
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
                             int64_t kind, std::optional<double> scale, bool /*deterministic*/, int64_t visible_keys,
                             int64_t variant_handle, std::string_view score, const OptionalTensor& score0,
                             const OptionalTensor& score1, const OptionalTensor& score2, const OptionalTensor& score3,
                             std::string_view mask_mod) {
    const Score given(score, {score0, score1, score2, score3}, mask_mod);
    return run_forward({q, k, v, mask_list(mask), kind, scale, visible_keys, given}, variant_handle, true);
}

// torch's own warning, word for word: filters look for it. Once per name, as each of torch's operators warns once.
template <int>
void warn_that_order_varies(const char* name) {
    TORCH_WARN_ONCE(name,
                    " defaults to a non-deterministic algorithm. To explicitly enable determinism call "
                    "torch.use_deterministic_algorithms(True, warn_only=False). "
                    "(attnforge; or pass deterministic=True)");
}

// Named after the first backend that sdpa_kernel() enables; attnforge's kernels run for any of them.
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
    const Tensor &q = call.q, &k = call.k, &v = call.v;
    if (!acceptable(call) || !acceptable_gradients(given, call)) {
        complain(call, given.dout, given.out, given.lse, given.dlse);
    }
    TORCH_CHECK_VALUE(call.score.wanted() == call.score_gradients.size(),
                      "score: gradients of its tensors are results of score_backward");
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
    if (!variant.deterministic && at::globalContext().deterministicAlgorithms()) {
        warn_that_order_varies();  // with warn_only=True: without it `deterministic` is set
    }
    return differentiate_with(variant, call, {dout, out, lse, dlse}, current_stream(q.device()));
}

// Must a backward be deterministic? As torch's own kernels: with warn_only they only warn.
inline bool in_order(bool deterministic) {
    const at::Context& torch = at::globalContext();
    return deterministic || (torch.deterministicAlgorithms() && !torch.deterministicAlgorithmsWarnOnly());
}

inline BackwardResult backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& out, const Tensor& lse, const OptionalTensor& mask, int64_t kind,
                               std::optional<double> scale, bool deterministic, int64_t visible_keys,
                               const OptionalTensor& dlse, int64_t variant_handle, std::string_view score,
                               const OptionalTensor& score0, const OptionalTensor& score1, const OptionalTensor& score2,
                               const OptionalTensor& score3, std::string_view mask_mod) {
    const Score given(score, {score0, score1, score2, score3}, mask_mod);
    return run_backward({q, k, v, mask_list(mask), kind, scale, visible_keys, given}, {dout, out, lse, dlse},
                        in_order(deterministic), variant_handle);
}

// As `backward`; its results are followed by the gradients of the tensors that the formula declares with " grad".
inline std::vector<Tensor> score_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                          const Tensor& out, const Tensor& lse, const OptionalTensor& mask,
                                          int64_t kind, std::optional<double> scale, bool deterministic,
                                          int64_t visible_keys, const OptionalTensor& dlse, int64_t variant_handle,
                                          std::string_view score, const OptionalTensor& score0,
                                          const OptionalTensor& score1, const OptionalTensor& score2,
                                          const OptionalTensor& score3, std::string_view mask_mod) {
    const Score given(score, {score0, score1, score2, score3}, mask_mod);
    std::vector<Tensor> sums;
    for (size_t i = 0; i < given.tensors.size(); ++i) {
        if (wants_gradient(score, i)) {
            const Tensor& x = given.tensors[i];
            sums.push_back(at::zeros(x.sizes(), x.options().dtype(at::kFloat)));
        }
    }
    auto [dq, dk, dv] = run_backward({q, k, v, mask_list(mask), kind, scale, visible_keys, given, sums},
                                     {dout, out, lse, dlse}, in_order(deterministic), variant_handle);
    std::vector<Tensor> results{std::move(dq), std::move(dk), std::move(dv)};
    for (size_t i = 0, next = 0; i < given.tensors.size(); ++i) {
        if (wants_gradient(score, i)) {
            results.push_back(sums[next++].to(given.tensors[i].scalar_type()));
        }
    }
    return results;
}

// The handle of the variant that runs such a call, of the backward if `dout` and `out` are given. For messages.
inline int64_t route(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask, int64_t kind,
                     bool deterministic, int64_t visible_keys, const OptionalTensor& dout, const OptionalTensor& out,
                     std::string_view text, const OptionalTensor& score0, const OptionalTensor& score1,
                     const OptionalTensor& score2, const OptionalTensor& score3, std::string_view mask_mod) {
    const Score score(text, {score0, score1, score2, score3}, mask_mod);
    const Call call{q, k, v, mask_list(mask), kind, {}, visible_keys, score};
    const bool backward = dout.has_value();
    const int64_t align = backward ? row_alignment({&q, &k, &v, &*dout, &*out}) : row_alignment({&q, &k, &v});
    return router().choose(call, backward, deterministic, align);
}

}  // namespace attnforge
