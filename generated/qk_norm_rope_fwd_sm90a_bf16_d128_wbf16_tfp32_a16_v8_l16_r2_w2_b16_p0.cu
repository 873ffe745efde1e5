// attnforge_qk_norm_rope_fwd_sm90a_bf16_d128_wbf16_tfp32_a16_v8_l16_r2_w2_b16_p0
// Generated from templates/prologue/prologue.cu.jinja; do not edit.
// Regenerate: python cli.py render --prologue qk_norm_rope_fwd_sm90a_bf16_d128_wbf16_tfp32_a16_v8_l16_r2_w2_b16_p0
//
//   vector        8   bytes that a lane loads at once
//   lanes        16   lanes that share a head
//   rows          2   heads that a lane holds at once
//   warps         2   warps per block; each takes its own tokens
//   blocks       16   resident blocks per multiprocessor, for which registers are limited
//   persistent    0   0: a block for every few tokens; else as many as the device holds, 1: strided, 2: adjacent tokens
//
// RMSNorm of each head of q and k, then rotary embedding; v is copied.
//
//   symbol    shape         meaning
//   x         head_dim      a head of q or k as its projection wrote it
//   w         head_dim      the norm's weight of the token's expert
//   scale                   1 / sqrt(mean(x^2) + eps)
//   n         head_dim      w x scale
//   c, s      head_dim / 2  cosine and sine of the token's angles
//   y         head_dim      y0 = n0 c - n1 s, y1 = n1 c + n0 s; 0 and 1 are the halves of a head
//
// kShare warps take one token at a time, a team of kLanes lanes one head. A lane has the same columns of both halves of
// every head, so that rotation needs no other lane, and a warp reads angles and weights once for its heads of a token.

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

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;
constexpr int kHalf = kHeadDim / 2;
constexpr int kValues = 4;    // of a vector
constexpr int kVectors = 1;   // of half a head that a lane has
constexpr int kLanes = 16;     // of a team
constexpr int kTeams = 32 / kLanes;
constexpr int kRows = 2;      // heads that a team holds at once
constexpr int kWarps = 2;
constexpr int kThreads = kWarps * 32;
constexpr int kShare = 1;     // warps of a token
constexpr int kTokens = kWarps / kShare;  // of a block at a time
constexpr int kChunk = kTeams * kRows;  // heads that a warp holds at once
constexpr int kNobody = -2147483647 - 1;

// ---- Values --------------------------------------------------------------------------------------------------------

// Thread: the two bf16 of a word.
__device__ __forceinline__ float2 unpack(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Thread: round two floats to bf16; `low` takes the lower half of the word.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

struct alignas(8) VectorBf16 {
    unsigned word[kValues / 2];  // two values each, the first one in the low half
};

__device__ __forceinline__ void to_floats(float (&x)[kValues], const VectorBf16& from) {
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
        const float2 pair = unpack(from.word[i / 2]);
        x[i] = pair.x;
        x[i + 1] = pair.y;
    }
}

struct alignas(16) VectorFp32 {
    float word[kValues];
};

__device__ __forceinline__ void to_floats(float (&x)[kValues], const VectorFp32& from) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        x[i] = from.word[i];
    }
}

typedef unsigned short Element;
typedef VectorBf16 Vector;
typedef float TableElement;
typedef VectorFp32 TableVector;
typedef unsigned short WeightElement;
typedef VectorBf16 WeightVector;

// A lane's part of a head: [j][h][i] is column column_of(j) + i of half h.
typedef Vector Part[kVectors][2];
typedef float Floats[kVectors][2][kValues];

__device__ __forceinline__ int column_of(int j) { return (j * kLanes + threadIdx.x % kLanes) * kValues; }

// Thread: whether it has columns there. kLanes is a power of two; half a head need not be a multiple of it.
__device__ __forceinline__ bool has_column(int j) { return true; }

// Thread: its part of the head at `head`; zeros if not `valid`.
__device__ __forceinline__ void load(Part& part, const Element* head, bool valid) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            part[j][h] = Vector{};
            if (valid && has_column(j)) {
                part[j][h] = *reinterpret_cast<const Vector*>(head + h * kHalf + column_of(j));
            }
        }
    }
}

__device__ __forceinline__ void store(Element* head, const Part& part, bool valid) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (valid && has_column(j)) {
                *reinterpret_cast<Vector*>(head + h * kHalf + column_of(j)) = part[j][h];
            }
        }
    }
}

__device__ __forceinline__ void widen_part(Floats& x, const Part& part) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            to_floats(x[j][h], part[j][h]);
        }
    }
}

// Thread: round its part of a head.
__device__ __forceinline__ void narrow_part(Part& part, const Floats& x) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < kValues; i += 2) {
                part[j][h].word[i / 2] = pack(x[j][h][i], x[j][h][i + 1]);
            }
        }
    }
}

// Team: the sum over its lanes.
__device__ __forceinline__ float team_sum(float x) {
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        x += __shfl_xor_sync(~0u, x, lanes);
    }
    return x;
}

// Thread: its columns of a weight.
__device__ __forceinline__ void load_weight(Floats& w, const void* weight) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            WeightVector part = {};
            if (has_column(j)) {
                const WeightElement* from = static_cast<const WeightElement*>(weight) + h * kHalf + column_of(j);
                part = *reinterpret_cast<const WeightVector*>(from);
            }
            to_floats(w[j][h], part);
        }
    }
}

// ---- Tokens --------------------------------------------------------------------------------------------------------

// Where a token's heads come from.
struct Token {
    int index;
    int expert;
    int row;       // of the expert's projections
    bool present;  // whether it has an expert
};

// The entry of `rows`, or the token itself without `rows`. The result from `end` on is not used.
__device__ __forceinline__ int find_row(const Params& p, int index, int end) {
    return p.rows != nullptr && index < end ? p.rows[index] : index;
}

__device__ __forceinline__ Token make_token(int index, int row) {
    const bool present = row != kNobody;
    return {index, row < 0 && present, row < 0 ? ~row : row, present};
}

// Where head 0 of a row is.
__device__ __forceinline__ Element* row_of(const Heads& heads, long long row) {
    return const_cast<Element*>(static_cast<const Element*>(heads.data)) + row * heads.row;
}

// A token's angles in this lane's columns.
struct Angles {
    float cos[kVectors][kValues];
    float sin[kVectors][kValues];
};

__device__ __forceinline__ void load_table(float (&x)[kVectors][kValues], const void* table, long long offset) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
        TableVector part = {};
        if (has_column(j)) {
            const TableElement* from = static_cast<const TableElement*>(table) + offset + column_of(j);
            part = *reinterpret_cast<const TableVector*>(from);
        }
        to_floats(x[j], part);
    }
}

__device__ __forceinline__ void load_angles(Angles& angles, const Params& p, int token) {
    load_table(angles.cos, p.cos, token * p.cos_row);
    load_table(angles.sin, p.sin, token * p.sin_row);
}

// Heads of q (kind 0), k or v that a warp takes: chunks of kChunk, dealt to the token's warps in turn, q's before k's
// before v's.
__device__ __forceinline__ int first_head(const Params& p, int kind) {
    int chunks = 0;  // of the kinds before
#pragma unroll
    for (int i = 0; i < kind; ++i) {
        chunks += (p.heads[i] + kChunk - 1) / kChunk;
    }
    return (threadIdx.x / 32 % kShare + kShare - chunks % kShare) % kShare * kChunk;
}

__device__ __forceinline__ int head_of(int first, int i) { return first + i * kTeams + threadIdx.x % 32 / kLanes; }

// Warp: the heads of a chunk; zeros beyond the last one and if not `present`.
__device__ __forceinline__ void load_chunk(Part (&x)[kRows], const Element* from, long long stride, int first,
                                           int heads, bool present) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const int head = head_of(first, i);
        load(x[i], from + head * stride, head < heads && present);
    }
}

// Warp: copy the token's heads of v.
__device__ __forceinline__ void copy_heads(const Params& p, const Element* from, long long from_head, Element* to,
                                           long long to_head, bool present) {
    const int heads = p.heads[2];
    for (int first = first_head(p, 2); first < heads; first += kShare * kChunk) {
        Part x[kRows];
        load_chunk(x, from, from_head, first, heads, present);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int head = head_of(first, i);
            store(to + head * to_head, x[i], head < heads);
        }
    }
}

// Tokens of a warp: index, index + step, ... below `end`.
struct Tokens {
    int index;
    int step;
    int end;
};

__device__ __forceinline__ Tokens tokens_of(const Params& p) {
    const int warp = threadIdx.x / 32 / kShare;
    return {static_cast<int>(blockIdx.x) * kTokens + warp, static_cast<int>(gridDim.x) * kTokens, p.tokens};
}

// ---- Forward -------------------------------------------------------------------------------------------------------

// y0 = x0 a - x1 b, y1 = x1 c + x0 d, times the head's scale.
struct Factors {
    float a[kVectors][kValues];
    float b[kVectors][kValues];
    float c[kVectors][kValues];
    float d[kVectors][kValues];
};

__device__ __forceinline__ void load_factors(Factors& f, const Params& p, const Token& token, int kind) {
    Angles angles;
    load_angles(angles, p, token.index);
    Floats w;
    load_weight(w, p.weight[token.expert][kind]);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            f.a[j][i] = w[j][0][i] * angles.cos[j][i];
            f.b[j][i] = w[j][1][i] * angles.sin[j][i];
            f.c[j][i] = w[j][1][i] * angles.cos[j][i];
            f.d[j][i] = w[j][0][i] * angles.sin[j][i];
        }
    }
}

// Team: a head of x becomes y.
__device__ __forceinline__ void rotate(const Params& p, const Factors& f, Part& part) {
    Floats x;
    widen_part(x, part);
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            squares += x[j][0][i] * x[j][0][i] + x[j][1][i] * x[j][1][i];
        }
    }
    const float scale = rsqrtf(team_sum(squares) * (1.0f / kHeadDim) + p.eps);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const float x0 = x[j][0][i];
            const float x1 = x[j][1][i];
            x[j][0][i] = scale * (x0 * f.a[j][i] - x1 * f.b[j][i]);
            x[j][1][i] = scale * (x1 * f.c[j][i] + x0 * f.d[j][i]);
        }
    }
    narrow_part(part, x);
}

// Warp: all heads of q (kind 0) or k (kind 1) of a token.
template <int kind>
__device__ __forceinline__ void rotate_heads(const Params& p, const Token& token) {
    const Heads& source = p.source[token.expert][kind];
    const Element* from = row_of(source, token.row);
    Element* to = row_of(p.packed[kind], token.index);
    const int heads = p.heads[kind];
    int first = first_head(p, kind);
    if (first >= heads) {
        return;
    }
    Factors factors;
    load_factors(factors, p, token, kind);
    for (; first < heads; first += kShare * kChunk) {
        Part x[kRows];
        load_chunk(x, from, source.head, first, heads, token.present);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (first + i * kTeams < heads) {  // the same in the whole warp
                const int head = head_of(first, i);
                rotate(p, factors, x[i]);
                store(to + head * p.packed[kind].head, x[i], head < heads);
            }
        }
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------------------

// Grid: any number of blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 16)
attnforge_qk_norm_rope_fwd_sm90a_bf16_d128_wbf16_tfp32_a16_v8_l16_r2_w2_b16_p0(const __grid_constant__ Params p) {
    const Tokens mine = tokens_of(p);
    int row = find_row(p, mine.index, mine.end);
    for (int index = mine.index; index < mine.end; index += mine.step) {
        const Token token = make_token(index, row);
        row = find_row(p, index + mine.step, mine.end);
        rotate_heads<0>(p, token);
        rotate_heads<1>(p, token);
        const Heads& v = p.source[token.expert][2];
        copy_heads(p, row_of(v, token.row), v.head, row_of(p.packed[2], index), p.packed[2].head, token.present);
    }
}
