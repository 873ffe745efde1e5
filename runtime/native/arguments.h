// From a call to the arguments of its kernels, the tensors that they write, and their launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include "call.h"
#include "schedules.h"

namespace attnforge {

inline TensorRef ref(const Tensor& x) {
    return {const_cast<void*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

inline void set_planes(Params& p, const Tensor& mask) {
    p.mask_batches = static_cast<int>(mask.size(0));
    p.mask_heads = static_cast<int>(mask.size(1));
    p.mask_planes = p.mask_batches * p.mask_heads;
}

inline void set_spans(Params& p, at::TensorList mask) {
    if (mask[0].dim() == 5) {
        set_planes(p, mask[0]);
        p.spans = mask[0].const_data_ptr<int>();
        return;
    }
    p.starts = mask[0].const_data_ptr<int>();
    p.ends = mask.size() == 2 ? mask[1].const_data_ptr<int>() : p.starts + mask[0].size(1);
}

inline void set_dense(Params& p, const Tensor& mask) {
    if (mask.dim() == 4) {
        set_planes(p, mask);
    }
    if (mask.scalar_type() == at::kBool) {
        p.dense = {static_cast<const unsigned char*>(mask.const_data_ptr()), p.mask_batches > 1 ? mask.stride(0) : 0,
                   p.mask_heads > 1 ? mask.stride(1) : 0, mask.stride(-2), mask.stride(-1)};
    } else {
        p.mask_bits = reinterpret_cast<const unsigned*>(mask.const_data_ptr<int>());
        p.mask_words = static_cast<int>(mask.size(3));
    }
}

inline ScoreRef score_ref(const Tensor& x) {
    ScoreRef found{x.const_data_ptr(), {0, 0, 0, 0}, {1, 1, 1, 1}};
    for (int64_t axis = 0; axis < x.dim(); ++axis) {
        found.stride[axis] = x.size(axis) == 1 ? 0 : x.stride(axis);  // of one element it may be anything
        found.size[axis] = static_cast<int>(x.size(axis));
    }
    return found;
}

// Sets the tensors that the variant's formulas read. Raises ValueError for one whose dtype or dimensions are not those
// that the formula declares.
inline void set_score(Params& p, const Variant& variant, at::TensorList tensors) {
    ScoreRef* const places[] = {&p.score0, &p.score1, &p.score2, &p.score3};
    TORCH_CHECK_VALUE(tensors.size() == variant.score_tensors.size(), "score, mask_mod: got ", tensors.size(),
                      " tensors, but the formulas have ", variant.score_tensors.size());
    // codegen/int_bounds.py takes indices for less than 2^30, also those behind the last one in its tile.
    TORCH_CHECK_VALUE(std::max({p.batch, p.heads_q, p.seq_q, p.seq_k}) <= 1 << 29,
                      "score, mask_mod: got batch ", p.batch, ", heads_q ", p.heads_q, ", seq_q ", p.seq_q, ", seq_k ",
                      p.seq_k, ", each may be up to 2^29");
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& x = tensors[i];
        const auto dtype = x.scalar_type();
        const std::string name = dtype == at::kFloat ? "float32" : dtype == at::kInt ? "int32" : "bfloat16";
        const std::string kind = name + "[" + std::to_string(x.dim()) + "]";
        TORCH_CHECK_VALUE(kind == variant.score_tensors[i], "score, mask_mod: tensor ", i, " is ", kind,
                          ", but the formulas have ", variant.score_tensors[i]);
        *places[i] = score_ref(x);
        for (const int64_t stride : places[i]->stride) {  // GPU kernels multiply them as 32-bit words
            TORCH_CHECK_VALUE(variant.device.is_cpu() || stride * x.element_size() < int64_t{1} << 32,
                              "score, mask_mod: tensor ", i, " has a stride of ", stride,
                              " elements, expected less than 4 GiB");
        }
    }
}

// Sets the tensors in which a backward accumulates the gradients of those that the formula declares with " grad".
inline void set_score_gradients(Params& p, const Score& score, at::TensorList gradients) {
    ScoreRef* const places[] = {&p.dscore0, &p.dscore1, &p.dscore2, &p.dscore3};
    size_t next = 0;
    for (size_t i = 0; i < score.tensors.size(); ++i) {
        if (wants_gradient(score.text, i)) {
            *places[i] = score_ref(gradients[next++]);
        }
    }
}

// The scale that kernels get. Some divide lse by it, all multiply it by log2(e), and both must stay finite. Beyond the
// bounds it makes no difference to a softmax in float32 unless scores exceed 1e22, or differ by less than 1e-36.
inline double softmax_scale(std::optional<double> scale, int64_t head_dim) {
    return std::clamp(scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim))), 1e-30, 2e38);
}

inline Params make_params(const Call& c, const Variant& variant, const Tensor& out, const float* lse) {
    Params p{};
    p.q = ref(c.q);
    p.k = ref(c.k);
    p.v = ref(c.v);
    p.out = ref(out);
    p.lse = const_cast<float*>(lse);
    p.batch = static_cast<int>(c.q.size(0));
    p.heads_q = static_cast<int>(c.q.size(1));
    p.heads_kv = static_cast<int>(c.k.size(1));
    p.seq_q = static_cast<int>(c.q.size(2));
    p.seq_k = static_cast<int>(c.k.size(2));
    p.tiles_m = static_cast<int>((p.seq_q + variant.tile_m - 1) / variant.tile_m);
    p.tiles_n = static_cast<int>((p.seq_k + variant.tile_n - 1) / variant.tile_n);
    // Cutting lists of visits makes at most so many more pieces than tiles, see _order of schedule.cuh.jinja. Few heads
    // need more of them to fill the GPU (docs/experiments.md, 137).
    p.blocks_n = p.tiles_n + (p.tiles_n + 7) / 8 - 1;
    const int for_few = std::min(p.tiles_m / 4, 64 / std::max(p.batch * p.heads_q, 1));
    p.blocks_m = p.tiles_m + std::max((p.tiles_m + 15) / 16 - 1, for_few);
    p.piece_slots = 2 * (p.blocks_m - p.tiles_m);
    p.padded_q = static_cast<int>(p.tiles_m * variant.tile_m);
    p.padded_k = static_cast<int>(p.tiles_n * variant.tile_n);
    p.mask_batches = p.mask_heads = p.mask_planes = 1;
    if (c.kind == kSpans) {
        set_spans(p, c.mask);
    } else if (!c.score.mask_mod.empty()) {
        p.mask_batches = variant.mod_of_batch ? p.batch : 1;
        p.mask_heads = variant.mod_of_head ? p.heads_q : 1;
        p.mask_planes = p.mask_batches * p.mask_heads;
    } else if (c.kind == kDense) {
        set_dense(p, c.mask[0]);
    }
    if (!c.score.text.empty() || !c.score.mask_mod.empty()) {
        set_score(p, variant, c.score.tensors);
    }
    p.threads = at::get_num_threads();
    const double scale = softmax_scale(c.scale, c.q.size(3));
    p.scale = static_cast<float>(scale);
    p.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
    return p;
}

inline void launch(const Call& c, const Variant& variant, Params& params, void* stream) {
    if (!variant.device.is_cpu()) {
        ensure_context(variant.device);
    }
    Attached schedule;
    if (!variant.schedule.empty()) {
        schedule = attach_schedule(variant, c.mask[0], params, stream);
    }
    run(variant, variant.launches, params, stream);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

// torch's allocator for x's device where x shows that it is in use, else null: for memory from elsewhere, or from a
// pluggable allocator, which is not registered under its device.
inline c10::Allocator* allocator_of(const Tensor& x) {
    c10::Allocator* const found = x.storage().allocator();
    return found == c10::GetAllocator(x.device().type()) ? found : nullptr;
}

// A new tensor on x's device, which is the current one. at::empty_strided does the same at twice the price: it is
// dispatched, sets the device, and fills the tensor in deterministic mode, while ours are written whole.
inline Tensor new_tensor(const Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
    if (c10::Allocator* const allocator = allocator_of(x)) {
        const c10::DispatchKeySet keys(x.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
        return Tensor(at::detail::empty_strided_generic(sizes, strides, allocator, keys, dtype));
    }
    return at::empty_strided(sizes, strides, x.options().dtype(dtype));
}

// Memory for one call. It may be given back as soon as the kernels are in the stream, as that of any tensor.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Tensor& x, int64_t bytes) {
        if (c10::Allocator* const allocator = allocator_of(x)) {
            memory_ = allocator->allocate(static_cast<size_t>(bytes));
        } else {
            tensor_ = at::empty({bytes}, x.options().dtype(at::kByte));
        }
    }
    template <typename T>
    T* data() const {
        return static_cast<T*>(tensor_.defined() ? tensor_.mutable_data_ptr() : memory_.get());
    }

private:
    c10::DataPtr memory_;
    Tensor tensor_;
};

// Does each pair of the call read an element of a score's tensor that no other pair reads? `axes`: see ScoreMod.axes of
// codegen/score.py.
inline bool has_own_elements(const std::string& axes, const Tensor& x, const Params& p) {
    const std::pair<char, int> sizes[] = {{'b', p.batch}, {'h', p.heads_q}, {'q', p.seq_q}, {'k', p.seq_k}};
    const bool of_pair = axes.find('q') != std::string::npos && axes.find('k') != std::string::npos;
    return of_pair && std::all_of(std::begin(sizes), std::end(sizes), [&](const auto& of_call) {
        const size_t axis = axes.find(of_call.first);
        return of_call.second <= (axis == std::string::npos ? 1 : x.size(static_cast<int64_t>(axis)));
    });
}

// Memory for exact sums of the gradients of a score's tensors, zeros at first. None if the variant has no such sums,
// and for a tensor whose elements get one addition each.
inline std::vector<Tensor> score_bins_of(const Variant& variant, const Score& score, Params& p) {
    unsigned long long** const places[] = {&p.score_bins0, &p.score_bins1, &p.score_bins2, &p.score_bins3};
    std::vector<Tensor> found;
    for (size_t i = 0; i < variant.score_axes.size(); ++i) {
        const Tensor& x = score.tensors[i];
        if (wants_gradient(score.text, i) && !has_own_elements(variant.score_axes[i], x, p)) {
            found.push_back(at::zeros({x.numel(), kScoreWords}, x.options().dtype(at::kLong)));
            *places[i] = static_cast<unsigned long long*>(found.back().mutable_data_ptr());
        }
    }
    return found;
}

// Memory for the sums of dk and dv, or in a forward for the bf16 splits of k and v; none if the variant needs none.
inline Scratch dkv_accum_of(const Tensor& k, const Variant& variant, Params& params) {
    if (!variant.dkv_accum) {
        return {};
    }
    Scratch memory(k, k.size(0) * k.size(1) * params.padded_k * (variant.columns + variant.columns_v) * 4);
    params.dkv_accum = memory.data<float>();
    return memory;
}

// Memory for the results of ranges of keys, or of pieces of lists; none if the variant does not split the keys, or into
// one range.
inline Scratch out_accum_of(const Tensor& q, const Variant& variant, Params& p) {
    if (variant.cut_lists) {
        const int64_t slots = int64_t{p.batch} * p.heads_q * p.piece_slots;
        Scratch memory(q, slots * variant.tile_m * (variant.columns_v + 2) * 4);  // O, row_max and row_sum
        p.out_accum = memory.data<float>();
        return memory;
    }
    set_kv_splits(variant, p);
    if (p.kv_splits <= 1) {
        return {};
    }
    const int64_t rows = int64_t{p.batch} * p.heads_q * p.seq_q;
    Scratch memory(q, p.kv_splits * rows * (variant.columns_v + 1) * 4);
    p.out_accum = memory.data<float>();
    return memory;
}

// A new tensor in x's layout. Kernels need a unit last stride, which some overlapping layouts do not keep.
inline Tensor like(const Tensor& x) {
    if (x.size(3) == 1) {
        return at::empty(x.sizes(), x.options());  // empty_like and its fake disagree about strides of such axes
    }
    if (x.stride(3) == 1 && x.is_non_overlapping_and_dense()) {
        return new_tensor(x, x.sizes(), x.strides(), x.scalar_type());  // the layout that empty_like chooses
    }
    Tensor y = at::empty_like(x);
    return y.stride(3) == 1 ? y : at::empty(x.sizes(), x.options());
}

// The output: in q's layout, with the rows of v. With another head_dim only the order of the axes can be kept.
inline Tensor output(const Tensor& q, const Tensor& v) {
    if (q.size(3) == v.size(3)) {
        return like(q);
    }
    const bool heads_inside = q.stride(1) < q.stride(2);  // (batch, seq, heads, dim) in memory
    const int64_t batch = q.size(0), heads = q.size(1), seq = q.size(2), dim = v.size(3);
    return heads_inside ? at::empty({batch, seq, heads, dim}, q.options()).transpose(1, 2)
                        : at::empty({batch, heads, seq, dim}, q.options());
}

}  // namespace attnforge
