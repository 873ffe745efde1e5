// attnforge_qk_norm_rope_bwd_sm90a_bf16_d128_wbf16_tfp32_a16_v8_l16_r4_w4_b4_p1
// Generated from templates/prologue/prologue.cu.jinja; do not edit.
// Regenerate: python cli.py render --prologue qk_norm_rope_bwd_sm90a_bf16_d128_wbf16_tfp32_a16_v8_l16_r4_w4_b4_p1
//
//   vector        8   bytes that a lane loads at once
//   lanes        16   lanes that share a head
//   rows          4   heads that a lane holds at once
//   warps         4   warps per block; each takes its own tokens
//   blocks        4   resident blocks per multiprocessor, for which registers are limited
//   persistent    1   0: a block for every few tokens; else as many as the device holds, 1: strided, 2: adjacent tokens
//
// Gradients of the projections and of the norms' weights, from those of the rotated heads.
//
//   symbol    shape         meaning
//   x         head_dim      a head of q or k as its projection wrote it
//   w         head_dim      the norm's weight of the token's expert
//   scale                   1 / sqrt(mean(x^2) + eps)
//   n         head_dim      w x scale
//   c, s      head_dim / 2  cosine and sine of the token's angles
//   y         head_dim      y0 = n0 c - n1 s, y1 = n1 c + n0 s; 0 and 1 are the halves of a head
//   dn        head_dim      dn0 = dy0 c + dy1 s, dn1 = dy1 c - dy0 s
//   dx        head_dim      scale (w dn - x scale^2 mean(w dn x))
//   dw        head_dim      sum of dn x scale over the heads of the expert's tokens
//
// kShare warps take one token at a time, a team of kLanes lanes one head. A lane has the same columns of both halves of
// every head, so that rotation needs no other lane, and a warp reads angles and weights once for its heads of a token.
// Weight gradients of a token are added up in registers, of a warp's tokens in shared memory, of a block in `sums`. The
// second kernel adds those, always in the same order: gradients have the same bits on every run.

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
constexpr int kRows = 4;      // heads that a team holds at once
constexpr int kWarps = 4;
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

// ---- Backward ------------------------------------------------------------------------------------------------------

// Team: dy of a head, whose x is given, becomes dx; its part of dw is added to `dw`.
__device__ __forceinline__ void rotate_back(const Params& p, const Floats& w, const Angles& angles,
                                            const Part& x_part, Part& part, Floats& dw) {
    Floats x;
    Floats d;
    widen_part(x, x_part);
    widen_part(d, part);
    float squares = 0.0f;
    float products = 0.0f;  // w dn x
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const float dy0 = d[j][0][i];
            const float dy1 = d[j][1][i];
            d[j][0][i] = dy0 * angles.cos[j][i] + dy1 * angles.sin[j][i];
            d[j][1][i] = dy1 * angles.cos[j][i] - dy0 * angles.sin[j][i];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                squares += x[j][h][i] * x[j][h][i];
                products += w[j][h][i] * d[j][h][i] * x[j][h][i];
            }
        }
    }
    const float scale = rsqrtf(team_sum(squares) * (1.0f / kHeadDim) + p.eps);
    const float mean = team_sum(products) * (1.0f / kHeadDim) * scale;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                const float scaled = x[j][h][i] * scale;
                dw[j][h][i] += d[j][h][i] * scaled;
                d[j][h][i] = scale * (w[j][h][i] * d[j][h][i] - scaled * mean);
            }
        }
    }
    narrow_part(part, d);
}

// Warp: all heads of q (kind 0) or k (kind 1) of a token.
template <int kind>
__device__ __forceinline__ void rotate_heads_back(const Params& p, const Token& token, Floats& dw) {
    const Element* from = row_of(p.packed[kind], token.index);
    const Heads& gradient = p.gradient[token.expert][kind];
    Element* to = row_of(gradient, token.row);
    const int heads = p.heads[kind];
    int first = first_head(p, kind);
    if (first >= heads) {
        return;
    }
    const Heads& source = p.source[token.expert][kind];
    const Element* x_from = row_of(source, token.row);
    Angles angles;
    load_angles(angles, p, token.index);
    Floats w;
    load_weight(w, p.weight[token.expert][kind]);
    for (; first < heads; first += kShare * kChunk) {
        Part d[kRows];
        Part x[kRows];
        load_chunk(d, from, p.packed[kind].head, first, heads, true);
        load_chunk(x, x_from, source.head, first, heads, true);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (first + i * kTeams < heads) {  // the same in the whole warp
                const int head = head_of(first, i);
                rotate_back(p, w, angles, x[i], d[i], dw);
                store(to + head * gradient.head, d[i], head < heads);
            }
        }
    }
}

// Weight gradients of a warp's tokens, by expert and kind.
typedef float Sums[2][2][kHeadDim];

// Warp: add its lanes' `dw` of one expert to `sums`, and begin anew.
__device__ __forceinline__ void flush(Floats (&dw)[2], float (&sums)[2][kHeadDim]) {
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int i = 0; i < kValues; ++i) {
                    float x = dw[kind][j][h][i];
                    dw[kind][j][h][i] = 0.0f;
#pragma unroll
                    for (int lanes = kLanes; lanes < 32; lanes *= 2) {  // lanes of the same columns
                        x += __shfl_xor_sync(~0u, x, lanes);
                    }
                    if (threadIdx.x % 32 < kLanes && has_column(j)) {
                        sums[kind][h * kHalf + column_of(j) + i] += x;
                    }
                }
            }
        }
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------------------

// Grid: `blocks` of Params.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
attnforge_qk_norm_rope_bwd_sm90a_bf16_d128_wbf16_tfp32_a16_v8_l16_r4_w4_b4_p1(const __grid_constant__ Params p) {
    __shared__ Sums sums[kWarps];
    float* const flat = &sums[0][0][0][0];
    for (int i = threadIdx.x; i < kWarps * 4 * kHeadDim; i += kThreads) {
        flat[i] = 0.0f;
    }
    __syncthreads();
    Floats dw[2] = {};
    int expert = 0;  // whose gradient dw holds
    const Tokens mine = tokens_of(p);
    int row = find_row(p, mine.index, mine.end);
    for (int index = mine.index; index < mine.end; index += mine.step) {
        const Token token = make_token(index, row);
        row = find_row(p, index + mine.step, mine.end);
        if (!token.present) {
            continue;
        }
        if (token.expert != expert) {
            flush(dw, sums[threadIdx.x / 32][expert]);
            expert = token.expert;
        }
        rotate_heads_back<0>(p, token, dw[0]);
        rotate_heads_back<1>(p, token, dw[1]);
        const Heads& v = p.gradient[token.expert][2];
        copy_heads(p, row_of(p.packed[2], index), p.packed[2].head, row_of(v, token.row), v.head, true);
    }
    flush(dw, sums[threadIdx.x / 32][expert]);
    __syncthreads();
    for (int i = threadIdx.x; i < 4 * kHeadDim; i += kThreads) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            sum += flat[warp * 4 * kHeadDim + i];
        }
        p.sums[blockIdx.x * (4LL * kHeadDim) + i] = sum;
    }
}

// Adds up `sums`. Grid: 4 head_dim / 32 blocks of 32 columns, a warp of each takes every 32nd row.
extern "C" __global__ void __launch_bounds__(1024)
attnforge_qk_norm_rope_bwd_sm90a_bf16_d128_wbf16_tfp32_a16_v8_l16_r4_w4_b4_p1_sums(const __grid_constant__ Params p) {
    __shared__ float sums[32][33];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < 4 * kHeadDim) {
#pragma unroll 4
        for (int row = warp; row < p.blocks; row += 32) {
            sum += p.sums[row * (4LL * kHeadDim) + column];
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    sum = sums[lane][warp];  // now the lanes have the rows of column `warp`
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    const int done = blockIdx.x * 32 + warp;
    if (lane == 0 && done < 4 * kHeadDim) {
        void* const to = p.weight_gradient[done / (2 * kHeadDim)][done / kHeadDim % 2];
        if (to != nullptr) {
            static_cast<unsigned short*>(to)[done % kHeadDim] = static_cast<unsigned short>(pack(sum, 0.0f));
        }
    }
}
