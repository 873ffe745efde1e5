// attnforge_qk_norm_rope_fwd_cpu_bf16_d128_wbf16_tfp32_a16_c64
// Generated from templates/prologue/prologue.cpp.jinja; do not edit.
// Regenerate: python cli.py render --prologue qk_norm_rope_fwd_cpu_bf16_d128_wbf16_tfp32_a16_c64
//
//   chunk   64   tokens of a task, and of a partial sum of weight gradients
//
// RMSNorm of each head of q and k, then rotary embedding; v is copied.
// The symbols are those of prologue.cu.jinja, which has a glossary.

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

// ---- Forward -------------------------------------------------------------------------------------------------------

// The heads of q (kind 0) or k (kind 1) of a token: normalised, rotated and written to `packed`.
static void rotate_heads(const Params* p, const Token& token, const Angles& angles, int kind) {
    float w[kHeadDim];
    read(w, static_cast<const WeightElement*>(p->weight[token.expert][kind]), kHeadDim);
    for (int head = 0; head < p->heads[kind]; ++head) {
        float x[kHeadDim];
        read(x, head_of(p->source[token.expert][kind], token.row, head), kHeadDim);
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int i = 0; i < kHeadDim; ++i) {
            squares += x[i] * x[i];
        }
        const float scale = 1.0f / std::sqrt(squares * (1.0f / kHeadDim) + p->eps);
        for (int i = 0; i < kHeadDim; ++i) {
            x[i] *= scale * w[i];
        }
        Element* to = head_of(p->packed[kind], token.index, head);
        for (int i = 0; i < kHalf; ++i) {
            narrow(to[i], x[i] * angles.cos[i] - x[i + kHalf] * angles.sin[i]);
            narrow(to[i + kHalf], x[i + kHalf] * angles.cos[i] + x[i] * angles.sin[i]);
        }
    }
}

static void forward_token(const Params* p, int index) {
    const Token token = find_token(p, index);
    if (!token.present) {
        for (int kind = 0; kind < 3; ++kind) {
            for (int head = 0; head < p->heads[kind]; ++head) {
                std::memset(head_of(p->packed[kind], index, head), 0, kHeadDim * sizeof(Element));
            }
        }
        return;
    }
    Angles angles;
    read_angles(angles, p, index);
    rotate_heads(p, token, angles, 0);
    rotate_heads(p, token, angles, 1);
    for (int head = 0; head < p->heads[2]; ++head) {
        const Element* from = head_of(p->source[token.expert][2], token.row, head);
        std::memcpy(head_of(p->packed[2], index, head), from, kHeadDim * sizeof(Element));
    }
}

extern "C" void attnforge_qk_norm_rope_fwd_cpu_bf16_d128_wbf16_tfp32_a16_c64(const Params* p) {
#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
    for (int first = 0; first < p->tokens; first += kChunk) {
        for (int index = first; index < min(first + kChunk, p->tokens); ++index) {
            forward_token(p, index);
        }
    }
}
