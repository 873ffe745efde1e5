// The attention operators: check, choose a variant, allocate, launch; and their autograd formula. Policy (which
// variant, what to say about a bad argument) is Python's: `resolve` and `complain` are called on a miss only.

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "arguments.h"

namespace attnforge {
namespace {

using ForwardResult = std::tuple<Tensor, Tensor>;
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;

// ---- Operators ------------------------------------------------------------------------------------------------------

ForwardResult forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& starts,
                      const OptionalTensor& ends, int64_t mask, std::optional<double> scale, bool /*deterministic*/,
                      int64_t visible, const OptionalTensor& dense, int64_t variant_handle) {
    const Call call{q, k, v, starts, ends, mask, scale, dense, visible};
    if (!acceptable(call)) {
        complain(call);
    }
    const c10::DeviceGuard guard(q.device());
    const int64_t align = row_alignment({&q, &k, &v});
    const Variant& variant = choose(call, false, false, align, variant_handle);
    Tensor out = output(q, v);
    Tensor lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));
    Params params = make_params(call, variant, out, lse);
    launch(call, variant, params);
    return {out, lse};
}

BackwardResult backward(const Tensor& dout_any, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out_any, const Tensor& lse_any, const OptionalTensor& starts,
                        const OptionalTensor& ends, int64_t mask, std::optional<double> scale, bool deterministic,
                        int64_t visible, const OptionalTensor& dense, int64_t variant_handle) {
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
    Params params = make_params(call, variant, out, lse);
    ATTNFORGE_SET(params, dout, dout);
    ATTNFORGE_SET(params, dq, dq);
    ATTNFORGE_SET(params, dk, dk);
    ATTNFORGE_SET(params, dv, dv);
    const auto f32 = q.options().dtype(at::kFloat);
    const Tensor delta = at::empty({q.size(0), q.size(1), params.padded_q, 2}, f32);
    params.delta = delta.mutable_data_ptr<float>();
    Tensor dq_accum;
    if (variant.dq_accum) {
        dq_accum = at::empty({q.size(0), q.size(1), params.padded_q, variant.columns}, f32);
        params.dq_accum = dq_accum.mutable_data_ptr<float>();
    }
    Tensor dkv_accum;
    if (variant.dkv_accum) {
        dkv_accum = at::empty({k.size(0), k.size(1), params.padded_k, variant.columns + variant.columns_v}, f32);
        params.dkv_accum = dkv_accum.mutable_data_ptr<float>();
    }
    Tensor turns_taken;
    if (variant.ordered) {
        const int64_t turns = q.size(1) * params.tiles_m + k.size(1) * params.tiles_n;
        turns_taken = at::empty({q.size(0), turns}, q.options().dtype(at::kInt));
        params.turns_taken = turns_taken.mutable_data_ptr<int>();
    }
    launch(call, variant, params);
    return {dq, dk, dv};
}

// As the dispatcher has them: in a trace `visible` may stand for a number that changes from pack to pack.
const auto& forward_op() {
    static const auto op =
        find_op<ForwardResult(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                              int64_t, std::optional<double>, bool, c10::SymInt, const OptionalTensor&, int64_t)>(
            "attnforge::forward");
    return op;
}

const auto& backward_op() {
    static const auto op =
        find_op<BackwardResult(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               const OptionalTensor&, const OptionalTensor&, int64_t, std::optional<double>, bool,
                               c10::SymInt, const OptionalTensor&, int64_t)>("attnforge::backward");
    return op;
}

// ---- Autograd -------------------------------------------------------------------------------------------------------

struct Attention : torch::autograd::Function<Attention> {
    using Context = torch::autograd::AutogradContext;
    using Variables = torch::autograd::variable_list;

    static Variables forward(Context* context, const Tensor& q, const Tensor& k, const Tensor& v,
                             const OptionalTensor& starts, const OptionalTensor& ends, int64_t mask,
                             std::optional<double> scale, bool deterministic, const c10::SymInt& visible,
                             const OptionalTensor& dense, int64_t variant) {
        const at::AutoDispatchBelowADInplaceOrView below;
        auto [out, lse] = forward_op().call(q, k, v, starts, ends, mask, scale, deterministic, visible, dense, variant);
        Variables saved{q, k, v, out, lse};
        for (const OptionalTensor* x : {&starts, &ends, &dense}) {  // spans are two, a dense mask is one
            if (x->has_value()) {
                saved.push_back(**x);
            }
        }
        context->save_for_backward(std::move(saved));
        // What is as by default is left out: each entry costs an allocation or two.
        auto& data = context->saved_data;
        if (mask != kFull) {
            data["mask"] = mask;
        }
        if (scale) {
            data["scale"] = scale;
        }
        if (deterministic) {
            data["deterministic"] = true;
        }
        if (visible.is_symbolic() || visible.expect_int() != 0) {
            data["visible"] = visible;
        }
        context->mark_non_differentiable({lse});
        context->set_materialize_grads(false);
        return {out, lse};
    }

    static Variables backward(Context* context, Variables gradients) {
        Variables result(11);
        if (!gradients[0].defined()) {
            return result;
        }
        const auto saved = context->get_saved_variables();
        const auto given = [&](const char* name) {  // None if it was left out
            const auto found = context->saved_data.find(name);
            return found == context->saved_data.end() ? c10::IValue() : found->second;
        };
        const c10::IValue mask = given("mask"), deterministic = given("deterministic"), visible = given("visible");
        const bool spans = saved.size() == 7, dense = saved.size() == 6;
        std::tie(result[0], result[1], result[2]) = backward_op().call(
            gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4],
            spans ? OptionalTensor(saved[5]) : std::nullopt, spans ? OptionalTensor(saved[6]) : std::nullopt,
            mask.isNone() ? int64_t{kFull} : mask.toInt(), given("scale").toOptional<double>(), !deterministic.isNone(),
            visible.isNone() ? c10::SymInt(0) : visible.toSymInt(),
            dense ? OptionalTensor(saved[5]) : std::nullopt, 0);
        return result;
    }
};

ForwardResult forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& starts,
                               const OptionalTensor& ends, int64_t mask, std::optional<double> scale,
                               bool deterministic, c10::SymInt visible, const OptionalTensor& dense, int64_t variant) {
    if (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad())) {
        auto results = Attention::apply(q, k, v, starts, ends, mask, scale, deterministic, visible, dense, variant);
        return {results[0], results[1]};
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward_op().call(q, k, v, starts, ends, mask, scale, deterministic, std::move(visible), dense, variant);
}

BackwardResult backward_autograd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& out, const Tensor& lse, const OptionalTensor& starts,
                                 const OptionalTensor& ends, int64_t mask, std::optional<double> scale,
                                 bool deterministic, c10::SymInt visible, const OptionalTensor& dense,
                                 int64_t variant) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled() ||
            !(dout.requires_grad() || q.requires_grad() || k.requires_grad() || v.requires_grad()),
        "attnforge: second derivatives of attention are not implemented; call backward without create_graph=True");
    const at::AutoDispatchBelowADInplaceOrView below;
    return backward_op().call(dout, q, k, v, out, lse, starts, ends, mask, scale, deterministic, std::move(visible),
                              dense, variant);
}

// `forward` without the lse. Its caller would make a Python object of it, only to drop it; and optional arguments come
// last, in the order in which masks need them: what is not passed is not converted. Traces see `forward` instead.
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale, bool deterministic,
              int64_t mask, const OptionalTensor& starts, const OptionalTensor& ends, c10::SymInt visible,
              const OptionalTensor& dense) {
    return std::get<0>(
        forward_op().call(q, k, v, starts, ends, mask, scale, deterministic, std::move(visible), dense, 0));
}

template <c10::DeviceType type>
ForwardResult forward_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& starts,
                               const OptionalTensor& ends, int64_t mask, std::optional<double> scale,
                               bool deterministic, c10::SymInt visible, const OptionalTensor& dense, int64_t variant) {
    const c10::impl::ExcludeDispatchKeyGuard once(at::autocast::get_autocast_dispatch_key_from_device_type(type));
    const auto cast = [dtype = at::autocast::get_autocast_dtype(type)](const Tensor& x) {
        return at::autocast::cached_cast(dtype, x, type);
    };
    return forward_op().call(cast(q), cast(k), cast(v), starts, ends, mask, scale, deterministic, std::move(visible),
                             dense, variant);
}

// ---- Registration --------------------------------------------------------------------------------------------------

TORCH_LIBRARY(attnforge, m) {
    const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
    m.def("forward(Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor? ends, int mask, float? scale, "
          "bool deterministic=False, SymInt visible=0, Tensor? dense=None, int variant=0) -> (Tensor out, Tensor lse)",
          tags);
    m.def("backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? starts, Tensor? ends, "
          "int mask, float? scale, bool deterministic=False, SymInt visible=0, Tensor? dense=None, int variant=0) "
          "-> (Tensor dq, Tensor dk, Tensor dv)", tags);
    m.def("attend(Tensor q, Tensor k, Tensor v, float? scale, bool deterministic=False, int mask=0, "
          "Tensor? starts=None, Tensor? ends=None, SymInt visible=0, Tensor? dense=None) -> Tensor", tags);
    m.def("snapshot(Tensor x) -> Tensor", tags);
    // Called from C++, implemented in Python.
    m.def("complain(Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor? ends, int mask, float? scale, "
          "Tensor? dense, int visible, Tensor? dout, Tensor? out, Tensor? lse) -> ()");
    m.def("resolve(bool backward, ScalarType dtype, int head_dim, int head_dim_v, int mask, int heads_q, int heads_kv, "
          "int seq_q, int seq_k, int align, Device device, bool deterministic, int visible) -> int");
    // Called from Python.
    m.def("add_variant(Tensor binary, str path, str name, Device device, bool backward, ScalarType dtype, "
          "int head_dim, int head_dim_v, int mask, int align, int tile_m, int tile_n, bool owner_n, int parts, "
          "bool dq_accum, bool dkv_accum, bool ordered, int columns, int columns_v, bool bounds, str bits, "
          "bool deterministic, str[] symbols, str[] grids, int[] threads, int[] shared_bytes, int[] persistent, "
          "int[] cluster, int launches, str[] mapped, int[] boxes) -> int");
    m.def("forget_routes() -> ()", [] { router().clear(); });
    m.def("schedule_count() -> int", [] { return schedules().size(); });
    m.def("forget_schedules() -> ()", [] { schedules().clear(); });
}

Tensor snapshot(const Tensor& x) {
    return x.clone(at::MemoryFormat::Contiguous);
}

#define ATTNFORGE_IMPLEMENT(key)       \
    TORCH_LIBRARY_IMPL(attnforge, key, m) { \
        m.impl("forward", forward);    \
        m.impl("backward", backward);  \
        m.impl("snapshot", snapshot);  \
    }
ATTNFORGE_IMPLEMENT(CPU)
ATTNFORGE_IMPLEMENT(CUDA)

TORCH_LIBRARY_IMPL(attnforge, CompositeImplicitAutograd, m) {
    m.impl("attend", attend);
}

TORCH_LIBRARY_IMPL(attnforge, CompositeExplicitAutograd, m) {
    m.impl("add_variant", add_variant);
}

TORCH_LIBRARY_IMPL(attnforge, Autograd, m) {
    m.impl("forward", forward_autograd);
    m.impl("backward", backward_autograd);
}

TORCH_LIBRARY_IMPL(attnforge, AutocastCPU, m) {
    m.impl("forward", forward_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(attnforge, AutocastCUDA, m) {
    m.impl("forward", forward_autocast<c10::DeviceType::CUDA>);
}

}  // namespace
}  // namespace attnforge
