// attnforge_qk_norm_rope_bwd_cpu_bf16_d128_wbf16_tfp32_a16_c64
// Generated from templates/prologue/prologue.cpp.jinja; do not edit.
// Regenerate: python cli.py render --prologue qk_norm_rope_bwd_cpu_bf16_d128_wbf16_tfp32_a16_c64
//
//   chunk   64   tokens of a task, and of a partial sum of weight gradients
//
// Gradients of the projections and of the norms' weights, from those of the rotated heads.
// The symbols are those of prologue.cu.jinja, which has a glossary.
// A task adds up the weight gradients of its tokens in its own row of `sums`, and the rows are added up in their order:
// gradients do not depend on the number of threads.

#include <climits>
#include <cmath>
#include <cstring>

// Rows of heads: strides in elements, columns are adjacent.
struct Heads {
    const void* data;  // at head 0 of row 0
    long long row;
    long long head;
};

struct Params {
    Heads source[2][3];  // q, k, v as the projections of both experts wrote them
    Heads packed[3];  // q, k, v in the order of tokens; in a backward their gradients
    Heads gradient[2][3];  // backward: of `source`
    const void* weight[2][2];  // (head_dim) of both experts, for q and k
    void* weight_gradient[2][2];  // backward: of `weight`; null: none
    const void* cos;  // (tokens, head_dim / 2)
    const void* sin;  // (tokens, head_dim / 2)
    long long cos_row;
    long long sin_row;
    const int* rows;  // (tokens) r: row of the first expert, ~r: of the second, INT_MIN: none; null: token
    float* sums;  // backward: (blocks, 2, 2, head_dim), of the weights' gradients
    int heads[3];  // of q, k, v
    int tokens;
    int blocks;  // backward: rows of `sums`
    int threads;  // CPU threads to use
    float eps;  // added to the mean square of a head
};

constexpr int kHeadDim = 128;
constexpr int kHalf = kHeadDim / 2;
constexpr int kChunk = 64;  // tokens of a task
constexpr int kNobody = INT_MIN;

typedef unsigned short Element;
typedef float TableElement;
typedef unsigned short WeightElement;

// ---- Values --------------------------------------------------------------------------------------------------------

static inline int min(int a, int b) { return a < b ? a : b; }
static inline float widen(float x) { return x; }
static inline float widen(unsigned short x) { return __builtin_bit_cast(float, static_cast<unsigned>(x) << 16); }
// The nearest bf16, ties to even; NaN stays NaN.
static inline void narrow(unsigned short& to, float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    const unsigned rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    to = static_cast<unsigned short>(x != x ? bits >> 16 | 0x40u : rounded);
}

template <typename T>
static inline void read(float* to, const T* from, int count) {
    for (int i = 0; i < count; ++i) {
        to[i] = widen(from[i]);
    }
}

// Where a token's heads come from.
struct Token {
    int index;
    int expert;
    int row;  // of the expert's projections
    bool present;
};

static inline Token find_token(const Params* p, int index) {
    const int row = p->rows == nullptr ? index : p->rows[index];
    const bool present = row != kNobody;
    return {index, row < 0 && present, row < 0 ? ~row : row, present};
}

static inline Element* head_of(const Heads& heads, long long row, int head) {
    return const_cast<Element*>(static_cast<const Element*>(heads.data)) + row * heads.row + head * heads.head;
}

struct Angles {
    float cos[kHalf];
    float sin[kHalf];
};

static inline void read_angles(Angles& angles, const Params* p, int token) {
    read(angles.cos, static_cast<const TableElement*>(p->cos) + token * p->cos_row, kHalf);
    read(angles.sin, static_cast<const TableElement*>(p->sin) + token * p->sin_row, kHalf);
}

// ---- Backward ------------------------------------------------------------------------------------------------------

// The gradients of the heads of q (kind 0) or k (kind 1) of a token; adds to the weight's gradient `dw`.
static void rotate_heads_back(const Params* p, const Token& token, const Angles& angles, int kind, float* dw) {
    float w[kHeadDim];
    read(w, static_cast<const WeightElement*>(p->weight[token.expert][kind]), kHeadDim);
    for (int head = 0; head < p->heads[kind]; ++head) {
        float dy[kHeadDim];
        float dn[kHeadDim];
        read(dy, head_of(p->packed[kind], token.index, head), kHeadDim);
        for (int i = 0; i < kHalf; ++i) {
            dn[i] = dy[i] * angles.cos[i] + dy[i + kHalf] * angles.sin[i];
            dn[i + kHalf] = dy[i + kHalf] * angles.cos[i] - dy[i] * angles.sin[i];
        }
        float x[kHeadDim];
        read(x, head_of(p->source[token.expert][kind], token.row, head), kHeadDim);
        float squares = 0.0f;
        float products = 0.0f;
#pragma omp simd reduction(+ : squares, products)
        for (int i = 0; i < kHeadDim; ++i) {
            squares += x[i] * x[i];
            products += w[i] * dn[i] * x[i];
        }
        const float scale = 1.0f / std::sqrt(squares * (1.0f / kHeadDim) + p->eps);
        const float mean = products * (1.0f / kHeadDim) * scale;
        for (int i = 0; i < kHeadDim; ++i) {
            const float scaled = x[i] * scale;
            dw[i] += dn[i] * scaled;
            dn[i] = scale * (w[i] * dn[i] - scaled * mean);
        }
        Element* to = head_of(p->gradient[token.expert][kind], token.row, head);
        for (int i = 0; i < kHeadDim; ++i) {
            narrow(to[i], dn[i]);
        }
    }
}

static void backward_token(const Params* p, int index, float (&dw)[2][2][kHeadDim]) {
    const Token token = find_token(p, index);
    if (!token.present) {
        return;
    }
    Angles angles;
    read_angles(angles, p, index);
    rotate_heads_back(p, token, angles, 0, dw[token.expert][0]);
    rotate_heads_back(p, token, angles, 1, dw[token.expert][1]);
    for (int head = 0; head < p->heads[2]; ++head) {
        const Element* from = head_of(p->packed[2], index, head);
        std::memcpy(head_of(p->gradient[token.expert][2], token.row, head), from, kHeadDim * sizeof(Element));
    }
}

extern "C" void attnforge_qk_norm_rope_bwd_cpu_bf16_d128_wbf16_tfp32_a16_c64(const Params* p) {
#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
    for (int first = 0; first < p->tokens; first += kChunk) {
        float dw[2][2][kHeadDim] = {};
        for (int index = first; index < min(first + kChunk, p->tokens); ++index) {
            backward_token(p, index, dw);
        }
        std::memcpy(p->sums + first / kChunk * (4LL * kHeadDim), dw, sizeof(dw));
    }
}

// Adds up the `blocks` rows of `sums`.
extern "C" void attnforge_qk_norm_rope_bwd_cpu_bf16_d128_wbf16_tfp32_a16_c64_sums(const Params* p) {
    float dw[4 * kHeadDim] = {};
    for (int row = 0; row < p->blocks; ++row) {
        for (int i = 0; i < 4 * kHeadDim; ++i) {
            dw[i] += p->sums[row * (4LL * kHeadDim) + i];
        }
    }
    for (int of = 0; of < 4; ++of) {
        auto* const to = static_cast<WeightElement*>(p->weight_gradient[of / 2][of % 2]);
        for (int i = 0; to != nullptr && i < kHeadDim; ++i) {
            narrow(to[i], dw[of * kHeadDim + i]);
        }
    }
}
