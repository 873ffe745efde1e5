// One attention call: its tensors, and how its rows are aligned.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "variant_fields.h"

namespace attnforge {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ForwardResult = std::tuple<Tensor, Tensor>;           // out, lse
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;  // dq, dk, dv

// What a score function reads: the first ones that are there.
struct ScoreTensors {
    const OptionalTensor &x0, &x1, &x2, &x3;
};

// Where the declaration `tI: dtype[dims]` of tensor `i` of a formula ends, npos if there is none. " grad" there means
// that the backward computes its gradient.
inline size_t end_of_tensor(std::string_view text, size_t i) {
    const size_t begin = text.substr(0, text.find(')')).find("t" + std::to_string(i) + ":");
    const size_t end = begin == std::string_view::npos ? begin : text.find(']', begin);
    return end == std::string_view::npos ? end : end + 1;
}
inline bool wants_gradient(std::string_view text, size_t i) {
    const size_t end = end_of_tensor(text, i);
    return end != std::string_view::npos && text.substr(end, 5) == " grad";
}

// Functions of a score and of a dense mask: their texts (codegen/formula.py), empty for none, and the tensors of the
// score, then those of the mask.
struct Score {
    std::string_view text = {};
    std::string_view mask_mod = {};
    std::vector<Tensor> tensors = {};

    Score() = default;
    Score(std::string_view text_, const ScoreTensors& given, std::string_view mask_mod_)
        : text(text_), mask_mod(mask_mod_) {
        for (const OptionalTensor* x : {&given.x0, &given.x1, &given.x2, &given.x3}) {
            if (x->has_value()) {
                tensors.push_back(**x);
            }
        }
    }
    // The number of tensors that are declared with " grad".
    size_t wanted() const {
        size_t count = 0;
        for (size_t i = 0; i < tensors.size(); ++i) {
            count += wants_gradient(text, i);
        }
        return count;
    }
    // As an operator takes it.
    OptionalTensor tensor(size_t i) const { return i < tensors.size() ? OptionalTensor(tensors[i]) : std::nullopt; }
};

inline const Score& no_score() {
    static const Score none;
    return none;
}

// The arguments that forward and backward share. The tensors are the caller's.
struct Call {
    const Tensor& q;
    const Tensor& k;
    const Tensor& v;
    // Of spans: their data, see masks.h, or starts and ends (seq_k). Of a dense mask: its data, or a bool tensor
    // (seq_q, seq_k) or (batch or 1, heads_q or 1, seq_q, seq_k), or data without pairs, (1), where score.mask_mod says
    // which are visible. Else none.
    at::TensorList mask;
    int64_t kind;
    std::optional<double> scale;
    int64_t visible_keys = 0;  // keys that a query sees on average, 0: unknown; < 0: few keys far more
    const Score& score = no_score();
    at::TensorList score_gradients = {};  // float32 sums, of zeros at first, for the tensors whose gradients are wanted

    // Of spans: are they unions of intervals, or in planes, as data of 5 dimensions is?
    bool is_union() const { return kind == kSpans && mask[0].dim() == 5; }
    int64_t intervals() const { return is_union() ? mask[0].size(2) : 1; }
    bool planes() const { return is_union() && mask[0].size(0) * mask[0].size(1) > 1; }

    // No pair of a query and a key at all: there is nothing to launch.
    bool is_empty() const { return q.numel() == 0 || k.size(2) == 0; }
};

inline at::TensorList mask_list(const OptionalTensor& mask) {
    return mask.has_value() ? at::TensorList(*mask) : at::TensorList();
}

// What the backward takes besides what the forward took. `dlse` is the gradient of the lse.
struct Gradients {
    const Tensor& dout;
    const Tensor& out;
    const Tensor& lse;
    const OptionalTensor& dlse;
};

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

}  // namespace attnforge
