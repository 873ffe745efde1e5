// The operators above the backends: autograd, autocast, and the short ways from Python to them.
#pragma once

#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "operators.h"

// From <ATen/autocast_mode.h>, which includes all of torch's operators and takes a compiler long to read.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace attnforge {

// As the dispatcher has them: in a trace `visible_keys` may stand for a number that changes from pack to pack.
inline const auto& forward_op() {
    static const auto op =
        find_op<ForwardResult(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t,
                              std::optional<double>, bool, c10::SymInt, int64_t, std::string_view,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, std::string_view)>("attnforge::forward");
    return op;
}

inline const auto& backward_op() {
    static const auto op =
        find_op<BackwardResult(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               const OptionalTensor&, int64_t, std::optional<double>, bool, c10::SymInt,
                               const OptionalTensor&, int64_t, std::string_view, const OptionalTensor&,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               std::string_view)>("attnforge::backward");
    return op;
}

inline const auto& score_backward_op() {
    static const auto op =
        find_op<std::vector<Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                    const Tensor&, const OptionalTensor&, int64_t, std::optional<double>, bool,
                                    c10::SymInt, const OptionalTensor&, int64_t, std::string_view,
                                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                    const OptionalTensor&, std::string_view)>("attnforge::score_backward");
    return op;
}

// Would the dispatcher call the backend's kernel next, with at most autograd in between and no dispatch mode active?
inline bool is_plain(std::initializer_list<const Tensor*> tensors, const OptionalTensor& mask) {
    c10::DispatchKeySet keys;
    for (const Tensor* x : tensors) {
        keys = keys | x->key_set();
    }
    if (mask.has_value()) {
        keys = keys | mask->key_set();
    }
    const auto local = c10::impl::tls_local_dispatch_key_set();
    keys = ((keys | local.included_) - local.excluded_) - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    keys = keys.remove(c10::DispatchKey::BackendSelect);  // always on, and nothing to operators that take tensors
    const auto highest = keys.highestPriorityTypeId();
    return (highest == c10::DispatchKey::CPU || highest == c10::DispatchKey::CUDA) &&
           !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

// ---- Autograd -------------------------------------------------------------------------------------------------------

// What the forward takes besides q, k and v: nothing that could need a gradient.
struct Rest {
    const OptionalTensor& mask;
    int64_t kind;
    std::optional<double> scale;
    bool deterministic;
    c10::SymInt visible_keys;
    int64_t variant;
    bool plain;  // is_plain of them all, and `visible_keys` is a number
    const Score& score = no_score();
};

// The forward below autograd; through the dispatcher unless the call is `plain` (see is_plain).
inline ForwardResult forward_below(const Tensor& q, const Tensor& k, const Tensor& v, const Rest& r, bool with_lse) {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (r.plain) {
        return run_forward({q, k, v, mask_list(r.mask), r.kind, r.scale, r.visible_keys.expect_int(), r.score},
                           r.variant, with_lse);
    }
    const Score& s = r.score;
    return forward_op().call(q, k, v, r.mask, r.kind, r.scale, r.deterministic, r.visible_keys, r.variant, s.text,
                             s.tensor(0), s.tensor(1), s.tensor(2), s.tensor(3), s.mask_mod);
}

// The lse is an output of the graph's node only if the operator returns it; a tensor that is saved need not be one.
template <bool with_lse>
struct Attention : torch::autograd::Function<Attention<with_lse>> {
    using Context = torch::autograd::AutogradContext;
    using Variables = torch::autograd::variable_list;

    static Variables forward(Context* context, const Tensor& q, const Tensor& k, const Tensor& v, const Rest& rest) {
        auto [out, lse] = forward_below(q, k, v, rest, true);
        Variables saved{q, k, v, out, lse};
        if (rest.mask.has_value()) {
            saved.push_back(*rest.mask);
        }
        saved.insert(saved.end(), rest.score.tensors.begin(), rest.score.tensors.end());
        context->save_for_backward(std::move(saved));
        // Attributes with default values are not stored: each costs an allocation or two.
        auto& data = context->saved_data;
        if (rest.kind != kFull) {
            data["kind"] = rest.kind;
        }
        if (rest.scale) {
            data["scale"] = rest.scale;
        }
        if (rest.deterministic) {
            data["deterministic"] = true;
        }
        if (!rest.score.text.empty()) {
            data["score"] = std::string(rest.score.text);
        }
        if (!rest.score.mask_mod.empty()) {
            data["mask_mod"] = std::string(rest.score.mask_mod);
        }
        if (!rest.score.tensors.empty()) {
            data["score_tensors"] = static_cast<int64_t>(rest.score.tensors.size());
        }
        if (rest.visible_keys.is_symbolic() || rest.visible_keys.expect_int() != 0) {
            data["visible_keys"] = rest.visible_keys;
        }
        context->set_materialize_grads(false);
        if constexpr (with_lse) {
            return {out, lse};
        }
        return {out};
    }

    // With P the weights, d lse / d S = P: the gradient of the lse only changes the row's delta, see Params::dlse.
    static Variables backward(Context* context, Variables gradients) {
        const auto given = [&](const char* name) {  // None if it was left out
            const auto found = context->saved_data.find(name);
            return found == context->saved_data.end() ? c10::IValue() : found->second;
        };
        const c10::IValue wanted = given("wanted");
        Variables result(wanted.isNone() ? 4 : 8);
        const OptionalTensor dlse = with_lse && gradients[1].defined() ? OptionalTensor(gradients[1]) : std::nullopt;
        if (!gradients[0].defined() && !dlse) {
            return result;
        }
        const auto saved = context->get_saved_variables();
        const Tensor dout = gradients[0].defined() ? gradients[0] : at::zeros_like(saved[3]);
        const c10::IValue kind = given("kind"), deterministic = given("deterministic");
        const c10::IValue visible_keys = given("visible_keys");
        const c10::IValue score = given("score"), mask_mod = given("mask_mod"), count = given("score_tensors");
        const size_t others = 5 + (count.isNone() ? 0 : count.toInt());  // than the mask
        const auto text_of = [](const c10::IValue& x) { return x.isNone() ? std::string_view() : x.toStringView(); };
        const auto score_tensor = [&](size_t i) {
            const size_t place = saved.size() - (others - 5) + i;
            return place < saved.size() ? OptionalTensor(saved[place]) : std::nullopt;
        };
        const auto differentiate = [&](const auto& op, std::string_view text) {
            return op.call(dout, saved[0], saved[1], saved[2], saved[3], saved[4],
                           saved.size() > others ? OptionalTensor(saved[5]) : std::nullopt,
                           kind.isNone() ? int64_t{kFull} : kind.toInt(), given("scale").template toOptional<double>(),
                           !deterministic.isNone(), visible_keys.isNone() ? c10::SymInt(0) : visible_keys.toSymInt(),
                           dlse, 0, text, score_tensor(0), score_tensor(1), score_tensor(2), score_tensor(3),
                           text_of(mask_mod));
        };
        if (wanted.isNone()) {
            std::tie(result[0], result[1], result[2]) = differentiate(backward_op(), text_of(score));
            return result;
        }
        const std::vector<Tensor> found = differentiate(score_backward_op(), wanted.toStringView());
        std::copy(found.begin(), found.begin() + 3, result.begin());
        for (size_t i = 0, next = 3; i < others - 5; ++i) {
            if (wants_gradient(wanted.toStringView(), i)) {
                result[3 + i] = found[next++];
            }
        }
        return result;
    }
};

// With captured tensors that require gradients.
struct ScoredAttention : torch::autograd::Function<ScoredAttention> {
    using Context = Attention<true>::Context;
    using Variables = Attention<true>::Variables;

    static Variables forward(Context* context, const Tensor& q, const Tensor& k, const Tensor& v,
                             const OptionalTensor& /*score0*/, const OptionalTensor& /*score1*/,
                             const OptionalTensor& /*score2*/, const OptionalTensor& /*score3*/, const Rest& rest,
                             const std::string& wanted) {
        Variables results = Attention<true>::forward(context, q, k, v, rest);
        context->saved_data["wanted"] = wanted;
        return results;
    }
    static Variables backward(Context* context, Variables gradients) {
        Variables result = Attention<true>::backward(context, std::move(gradients));
        result.resize(9);
        return result;
    }
};

// The text of a score with " grad" in the declarations of those tensors that require gradients; empty if none does.
inline std::string wanted_of(const Score& score) {
    std::string text(score.text);
    bool any = false;
    for (size_t i = score.tensors.size(); i-- > 0;) {  // from the last one on: places of earlier ones stay
        const size_t end = end_of_tensor(text, i);  // those of a mask are not in the text: a bool has no gradient
        if (end != std::string::npos && score.tensors[i].requires_grad() && !wants_gradient(text, i)) {
            text.insert(end, " grad");
            any = true;
        }
    }
    return any ? text : std::string();
}

// Raises if a tensor has a tangent, also outside of grad mode: forward-mode derivatives are not implemented.
inline void refuse_tangents(std::initializer_list<const Tensor*> tensors) {
    for (const Tensor* x : tensors) {
        TORCH_CHECK_NOT_IMPLEMENTED(
            !x->defined() || !x->_fw_grad(0).defined(),
            "attnforge: derivatives of attention in forward mode are not implemented; use backward");
    }
}

// Is the call to be recorded?
inline bool records(const Tensor& q, const Tensor& k, const Tensor& v) {
    refuse_tangents({&q, &k, &v});
    return at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad()) &&
           !c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
}

inline ForwardResult forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                                      int64_t kind, std::optional<double> scale, bool deterministic,
                                      c10::SymInt visible_keys, int64_t variant, std::string_view text,
                                      const OptionalTensor& score0, const OptionalTensor& score1,
                                      const OptionalTensor& score2, const OptionalTensor& score3,
                                      std::string_view mask_mod) {
    const Score score(text, {score0, score1, score2, score3}, mask_mod);
    const Rest rest{mask, kind, scale, deterministic, std::move(visible_keys), variant, false, score};
    for (const Tensor& x : score.tensors) {
        refuse_tangents({&x});
    }
    if (at::GradMode::is_enabled() && !c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset)) {
        if (const std::string wanted = wanted_of(score); !wanted.empty()) {
            records(q, k, v);  // refuses forward mode
            auto results = ScoredAttention::apply(q, k, v, score0, score1, score2, score3, rest, wanted);
            return {results[0], results[1]};
        }
    }
    if (records(q, k, v)) {
        auto results = Attention<true>::apply(q, k, v, rest);
        return {results[0], results[1]};
    }
    return forward_below(q, k, v, rest, true);
}

// Raises in grad mode (create_graph=True) if an input requires grad, and in any mode if one has a tangent. Its second
// derivative would count as zero, which a loss with other terms hides.
template <typename... Optional>
void refuse_second_derivatives(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Optional&... others) {
    refuse_tangents({&dout, &q, &k, &v});
    (..., (others ? refuse_tangents({&*others}) : void()));
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled() ||
            !(dout.requires_grad() || q.requires_grad() || k.requires_grad() || v.requires_grad() ||
              (... || (others && others->requires_grad()))),
        "attnforge: second derivatives of attention are not implemented; call backward without create_graph=True");
}

inline BackwardResult backward_autograd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Tensor& out, const Tensor& lse, const OptionalTensor& mask, int64_t kind,
                                        std::optional<double> scale, bool deterministic, c10::SymInt visible_keys,
                                        const OptionalTensor& dlse, int64_t variant, std::string_view score,
                                        const OptionalTensor& score0, const OptionalTensor& score1,
                                        const OptionalTensor& score2, const OptionalTensor& score3,
                                        std::string_view mask_mod) {
    refuse_second_derivatives(dout, q, k, v, dlse, score0, score1, score2, score3);
    const at::AutoDispatchBelowADInplaceOrView below;
    return backward_op().call(dout, q, k, v, out, lse, mask, kind, scale, deterministic, std::move(visible_keys), dlse,
                              variant, score, score0, score1, score2, score3, mask_mod);
}

inline std::vector<Tensor> score_backward_autograd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const OptionalTensor& mask, int64_t kind, std::optional<double> scale, bool deterministic,
    c10::SymInt visible_keys, const OptionalTensor& dlse, int64_t variant, std::string_view score,
    const OptionalTensor& score0, const OptionalTensor& score1, const OptionalTensor& score2,
    const OptionalTensor& score3, std::string_view mask_mod) {
    refuse_second_derivatives(dout, q, k, v, dlse, score0, score1, score2, score3);
    const at::AutoDispatchBelowADInplaceOrView below;
    return score_backward_op().call(dout, q, k, v, out, lse, mask, kind, scale, deterministic, std::move(visible_keys),
                                    dlse, variant, score, score0, score1, score2, score3, mask_mod);
}

// `forward` without the lse. Its caller would make a Python object of it, only to drop it; and what an operator does
// not have is not converted: hence those with the arguments of one mask. Where only autograd lies between here and the
// kernels, they do what the dispatcher would, without calling it. Modes, subclasses, autocast, profilers
// and the like see `forward`, as they would if it had been called.
inline Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale, bool deterministic,
                     int64_t kind, const OptionalTensor& mask, c10::SymInt visible_keys) {
    if (visible_keys.is_symbolic() || !is_plain({&q, &k, &v}, mask)) {
        return std::get<0>(forward_op().call(q, k, v, mask, kind, scale, deterministic, std::move(visible_keys), 0, {},
                                             {}, {}, {}, {}, {}));
    }
    const Rest rest{mask, kind, scale, deterministic, std::move(visible_keys), 0, true};
    return records(q, k, v) ? std::move(Attention<false>::apply(q, k, v, rest)[0])
                            : std::get<0>(forward_below(q, k, v, rest, false));
}

inline Tensor attend_full(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale) {
    return attend(q, k, v, scale, false, kFull, {}, 0);
}

inline Tensor attend_causal(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale) {
    return attend(q, k, v, scale, false, kCausal, {}, 0);
}

inline Tensor attend_spans(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, int64_t visible_keys,
                           std::optional<double> scale) {
    return attend(q, k, v, scale, false, kSpans, mask, visible_keys);
}

template <c10::DeviceType type>
ForwardResult forward_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                               int64_t kind, std::optional<double> scale, bool deterministic, c10::SymInt visible_keys,
                               int64_t variant, std::string_view score, const OptionalTensor& score0,
                               const OptionalTensor& score1, const OptionalTensor& score2,
                               const OptionalTensor& score3, std::string_view mask_mod) {
    static_assert(type == c10::DeviceType::CPU || type == c10::DeviceType::CUDA);
    const c10::impl::ExcludeDispatchKeyGuard once(
        type == c10::DeviceType::CPU ? c10::DispatchKey::AutocastCPU : c10::DispatchKey::AutocastCUDA);
    const auto cast = [dtype = at::autocast::get_autocast_dtype(type)](const Tensor& x) {
        return at::autocast::cached_cast(dtype, x, type);
    };
    return forward_op().call(cast(q), cast(k), cast(v), mask, kind, scale, deterministic, std::move(visible_keys),
                             variant, score, score0, score1, score2, score3, mask_mod);
}

}  // namespace attnforge
