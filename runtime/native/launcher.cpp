// The operators of attention, registered with torch. Which variant runs a call, and the text of errors, is decided in
// Python: `resolve` and `complain` are called on a miss only.

// torch's headers then include the operators that they use, not all: less to read.
#define AT_PER_OPERATOR_HEADERS
#include <torch/library.h>

#include "autograd.h"
#include "functions.h"
#include "mask_makers.h"

namespace attnforge {
namespace {

// ---- Registration --------------------------------------------------------------------------------------------------

#define ATTNFORGE_SCORE_TENSORS "Tensor? score0=None, Tensor? score1=None, Tensor? score2=None, Tensor? score3=None"
TORCH_LIBRARY(attnforge, m) {
    const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
    m.def("forward(Tensor q, Tensor k, Tensor v, Tensor? mask, int kind, float? scale, bool deterministic=False, "
          "SymInt visible=0, int variant=0, str score=\"\", "
          ATTNFORGE_SCORE_TENSORS ", str mask_mod=\"\") -> (Tensor out, Tensor lse)", tags);
    m.def("backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, int kind, "
          "float? scale, bool deterministic=False, SymInt visible=0, Tensor? dlse=None, int variant=0, str score=\"\", "
          ATTNFORGE_SCORE_TENSORS ", str mask_mod=\"\") "
          "-> (Tensor dq, Tensor dk, Tensor dv)", tags);
    m.def("score_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, int kind, "
          "float? scale, bool deterministic=False, SymInt visible=0, Tensor? dlse=None, int variant=0, str score=\"\", "
          ATTNFORGE_SCORE_TENSORS ", str mask_mod=\"\") -> Tensor[]", tags);
    m.def("attend(Tensor q, Tensor k, Tensor v, float? scale, bool deterministic=False, int kind=0, "
          "Tensor? mask=None, SymInt visible=0) -> Tensor", tags);
    m.def("attend_full(Tensor q, Tensor k, Tensor v, float? scale=None) -> Tensor", tags);
    m.def("attend_causal(Tensor q, Tensor k, Tensor v, float? scale=None) -> Tensor", tags);
    m.def("attend_spans(Tensor q, Tensor k, Tensor v, Tensor mask, int visible, float? scale=None) -> Tensor", tags);
    // The data of masks, see masks.h.
    m.def("mask_of_spans(Tensor starts, Tensor ends) -> Tensor", tags);
    m.def("mask_of_pairs(Tensor visible) -> Tensor", tags);
    m.def("mask_of_documents(Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt seq_q, SymInt seq_k, int left, "
          "int right) -> Tensor", tags);
    m.def("mask_of_splits(int[] ends, int[] firsts, int[] lasts, int limit, Device device) -> Tensor", tags);
    m.def("mask_of_function(int seq_k, Device device) -> Tensor", tags);
    m.def("mask_of_data(Tensor data) -> Tensor", tags);
    // Called from C++, implemented in Python.
    m.def("complain(Tensor q, Tensor k, Tensor v, Tensor? mask, int kind, float? scale, int visible, Tensor? dout, "
          "Tensor? out, Tensor? lse, Tensor? dlse, str score=\"\", "
          ATTNFORGE_SCORE_TENSORS ", str mask_mod=\"\") -> ()");
    m.def("resolve(bool backward, ScalarType dtype, int head_dim, int head_dim_v, int kind, int heads_q, int heads_kv, "
          "int seq_q, int seq_k, int align, Device device, bool deterministic, int visible, int intervals, "
          "bool planes, str score=\"\", str mask_mod=\"\", int split_rows=0, int rounds=8) -> int");
    m.def("load_mask_kernels(Device device) -> ()");
    // Called from Python.
    m.def("route(Tensor q, Tensor k, Tensor v, Tensor? mask, int kind, bool deterministic, int visible, Tensor? dout, "
          "Tensor? out, str score=\"\", " ATTNFORGE_SCORE_TENSORS ", str mask_mod=\"\") -> int");
    m.def("add_variant(str description, Device device, Tensor binary, str path) -> int");
    m.def("add_mask_kernels(Tensor binary, Device device) -> ()");
    m.def("add_function(str symbol, Device device, Tensor binary, str path) -> int");
    m.def("launch_function(int function, int blocks, int threads, Tensor argument) -> ()");
    m.def("forget_routes() -> ()", [] { router().clear(); });
    m.def("schedule_count(Tensor? mask=None) -> int", schedule_count);  // of a mask, else of all masks
    m.def("forget_schedules(Tensor? mask=None) -> ()", forget_schedules);
    m.def("limit_bits(int bytes) -> int", limit_bits);  // of partial visits in a schedule; returns the limit before
}

#define ATTNFORGE_IMPLEMENT(key)                             \
    TORCH_LIBRARY_IMPL(attnforge, key, m) {                  \
        m.impl("forward", forward);                          \
        m.impl("backward", backward);                        \
        m.impl("score_backward", score_backward);            \
        m.impl("mask_of_spans", mask_of_spans);              \
        m.impl("mask_of_pairs", mask_of_pairs);              \
        m.impl("mask_of_documents", mask_of_documents);      \
        m.impl("mask_of_data", mask_of_data);                \
    }
ATTNFORGE_IMPLEMENT(CPU)
ATTNFORGE_IMPLEMENT(CUDA)

TORCH_LIBRARY_IMPL(attnforge, CompositeImplicitAutograd, m) {
    m.impl("attend", attend);
    m.impl("attend_full", attend_full);
    m.impl("attend_causal", attend_causal);
    m.impl("attend_spans", attend_spans);
}

TORCH_LIBRARY_IMPL(attnforge, CompositeExplicitAutograd, m) {
    m.impl("route", route);
    m.impl("add_variant", add_variant);
    m.impl("add_mask_kernels", add_mask_kernels);
    m.impl("add_function", add_function);
    m.impl("launch_function", launch_function);
    m.impl("mask_of_splits", mask_of_splits);
    m.impl("mask_of_function", mask_of_function);
}

TORCH_LIBRARY_IMPL(attnforge, Autograd, m) {
    m.impl("forward", forward_autograd);
    m.impl("backward", backward_autograd);
    m.impl("score_backward", score_backward_autograd);
}

TORCH_LIBRARY_IMPL(attnforge, AutocastCPU, m) {
    m.impl("forward", forward_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(attnforge, AutocastCUDA, m) {
    m.impl("forward", forward_autocast<c10::DeviceType::CUDA>);
}

}  // namespace
}  // namespace attnforge
