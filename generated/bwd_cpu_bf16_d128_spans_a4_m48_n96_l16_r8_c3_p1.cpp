// attnforge_bwd_cpu_bf16_d128_spans_a4_m48_n96_l16_r8_c3_p1
// Generated from templates/cpu/backward.cpp.jinja; do not edit.
// Regenerate: python cli.py render --direction bwd --arch cpu --dtype bf16 --head-dim 128 --mask spans --align 4
//     --set tile_m=48 --set tile_n=96 --set lanes=16 --set rows=8 --set cols=3
//     --set pairs=1
//
//   tile_m   48   query rows per tile
//   tile_n   96   keys per tile, a multiple of lanes * cols
//   lanes    16   floats of one vector register
//   rows      8   rows of the register block
//   cols      3   vector registers per row of the register block
//   pairs     1   1: multiply pairs of bf16 (vdpbf16ps) instead of widening to fp32

#include <algorithm>
#include <cmath>
#include <sched.h>
#include <vector>

// A tensor (batch, heads, seq, head_dim): its address, and strides in elements. Rows are contiguous.
struct TensorRef {
    void* data;
    long long batch, head, row;
};

struct Params {
    TensorRef q;  // (batch, heads_q, seq_q, head_dim)
    TensorRef k;  // (batch, heads_kv, seq_k, head_dim)
    TensorRef v;  // (batch, heads_kv, seq_k, head_dim_v)
    TensorRef out;  // (batch, heads_q, seq_q, head_dim_v)
    TensorRef dout;  // gradient of out
    TensorRef dq;  // gradients, shaped as q, k, v
    TensorRef dk;
    TensorRef dv;
    const int* starts;  // (seq_k) spans: key j is visible to queries starts[j] <= i < ends[j]
    const int* ends;  // (seq_k)
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
    const float* dlse;  // (batch, heads_q, seq_q) gradient of lse, null if there is none
    float* delta;  // per row: sum(dout * out) - dlse; on GPUs with lse beside it, 2 or 8 floats a row
    float* dq_accum;  // (batch, heads_q, padded_q, columns) fp32 sums of dq, in the kernel's order
    int* tile_count;  // (mask_planes, tiles) visited tiles of each owned tile
    int* tile_order;  // (mask_planes, tiles) owned tiles in launch order, or with lists that are cut, pieces of them
    int* tile_list;  // (mask_planes, tiles, list_stride) visited tile << row groups | a bit for each with hidden pairs
    int* dq_order;  // (mask_planes, tiles, list_stride) deterministic dq: each visit's rank in its sum
    int* dq_semaphore;  // (batch, heads_q, tiles_m) of dq, (batch, heads_kv, tiles_n) of dk, dv: sums done so far
    int batch;
    int heads_q;
    int heads_kv;  // divides heads_q
    int seq_q;
    int seq_k;
    int tiles_m;  // ceil(seq_q / tile_m)
    int tiles_n;  // ceil(seq_k / tile_n)
    int list_stride;  // entries per row of tile_list
    int padded_q;  // tiles_m * tile_m
    int threads;  // CPU threads to use
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;  // columns of q and k
constexpr int kHeadDimV = 128;  // columns of v and out
constexpr int kTileM = 48;  // queries of a tile
constexpr int kTileN = 96;  // keys of a tile
constexpr int kLanes = 16;  // floats of a vector
constexpr int kRows = 8;  // register block: kRows x kCols vectors
constexpr int kCols = 3;
constexpr int kPanel = kCols * kLanes;  // owned rows of a panel: one per vector lane
// Columns in whole register blocks, zeros past the head dims.
constexpr int kColumns = (kHeadDim + kRows - 1) / kRows * kRows;
constexpr int kColumnsV = (kHeadDimV + kRows - 1) / kRows * kRows;
constexpr int kDepth = (kHeadDim + 1) / 2;  // words of a row: pairs of bf16
constexpr int kDepthV = (kHeadDimV + 1) / 2;
constexpr int kPanels = kTileN / kPanel;
constexpr int kColsDq = 2;  // register block of dQ: kRows x kColsDq vectors, lanes along head_dim
constexpr int kWidth = 128;  // columns of dQ: head_dim in whole register blocks
constexpr int kScratchBytes = 279488;  // of a thread

// ---- Vectors -------------------------------------------------------------------------------------------------------

// Vectors may be wider than this CPU's. Only static functions take them, so no calling convention matters.
#pragma GCC diagnostic ignored "-Wpsabi"

typedef float vec __attribute__((vector_size(kLanes * 4), may_alias));
typedef int ivec __attribute__((vector_size(kLanes * 4), may_alias));
typedef unsigned word;  // two bf16 adjacent in depth, the first one in the low half
typedef unsigned wvec __attribute__((vector_size(kLanes * 4), may_alias));

constexpr float kInfinity = __builtin_inff();

// S is multiplied by the sign of the scale only. The magnitude multiplies S - row_max or S - lse, which rounds less
// than scaling S; it is kept above 0, so that -inf stays -inf.
static inline float scale_sign(const Params* p) { return p->scale < 0.0f ? -1.0f : 1.0f; }
static inline float scale_magnitude_log2(const Params* p) { return std::fmax(std::fabs(p->scale_log2), 1e-37f); }

static inline vec splat(float x) { return x - vec{}; }
static inline vec load(const float* x) { return *reinterpret_cast<const vec*>(x); }
static inline void store(float* x, vec y) { *reinterpret_cast<vec*>(x) = y; }
static inline vec max(vec a, vec b) { return a > b ? a : b; }  // b if one is NaN
static inline vec min(vec a, vec b) { return a < b ? a : b; }  // b if one is NaN
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

// 2^x for x < 128, relative error below 3e-6; exactly 0 from x = -127 down, -inf included; NaN for NaN.
static inline vec exp2(vec x) {
    x = max(splat(-127.0f), x);
    const vec shifted = x + 12582912.0f;  // 1.5 * 2^23: the sum has round(x) in its low bits
    const vec f = x - (shifted - 12582912.0f);
    vec y = f * 9.5828532e-3f + 5.5906426e-2f;  // minimax on [-1/2, 1/2]
    y = y * f + 2.4024099e-1f;
    y = y * f + 6.9312419e-1f;
    y = y * f + 1.0f;
    return reinterpret_cast<vec>(reinterpret_cast<ivec>(y) + (reinterpret_cast<ivec>(shifted) << 23));
}

// The nearest bf16 in the high halves, ties away from zero.
static inline wvec round_high(vec x) { return reinterpret_cast<wvec>(x) + 0x8000u; }

static inline wvec pair(vec low, vec high) {
    return round_high(low) >> 16 | (round_high(high) & 0xffff0000u);
}

// Adjacent rows of x[row][lane] as words for accumulate_panel; the partner of a last odd row is 0.
static inline void pair_rows(const float* x, int rows, word* out) {
    for (int row = 0; row < rows; row += 2) {
        for (int i = 0; i < kPanel; i += kLanes) {
            const vec high = row + 1 < rows ? load(x + (row + 1) * kPanel + i) : vec{};
            *reinterpret_cast<wvec*>(out + row / 2 * kPanel + i) = pair(load(x + row * kPanel + i), high);
        }
    }
}

// Adjacent lanes of x[row][lane] as words for multiply_rows.
static inline void pair_columns(const float* x, int rows, word* out) {
    typedef unsigned short halves __attribute__((vector_size(kLanes * 2), may_alias));
    for (int at = 0; at < rows * kPanel; at += kLanes) {
        *reinterpret_cast<halves*>(out + at / 2) = __builtin_convertvector(round_high(load(x + at)) >> 16, halves);
    }
}

// ---- Products of packed rows with one panel: kRows x kCols vectors of sums stay in registers -----------------------

// acc += both products of the pairs.
static inline void multiply_add(vec& acc, word a, wvec b) {
#ifdef __AVX512BF16__
    // Without immintrin.h, which takes a third of a second to parse.
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a - wvec{}), "v"(b));
    return;
#endif
    const float low = __builtin_bit_cast(float, a << 16);
    const float high = __builtin_bit_cast(float, a & 0xffff0000u);
    acc += low * reinterpret_cast<vec>(b << 16);
    acc += high * reinterpret_cast<vec>(b & 0xffff0000u);
}

// out[row][lane] = sign * sum over d of x[row][d] * panel[d][lane], kDepth words deep. Rows are computed kRows at a
// time: up to kRows - 1 rows beyond `rows` are written, with values that are not used.
static inline void multiply_panel(const word* x, int rows, const word* panel, float sign, float* out) {
    for (int row = 0; row < rows; row += kRows) {
        vec acc[kRows][kCols] = {};
        const word* a = x + row * kDepth;
        for (int d = 0; d < kDepth; ++d) {
            const wvec* b = reinterpret_cast<const wvec*>(panel + d * kPanel);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
                for (int i = 0; i < kCols; ++i) {
                    multiply_add(acc[r][i], a[r * kDepth + d], b[i]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
            for (int i = 0; i < kCols; ++i) {
                store(out + (row + r) * kPanel + i * kLanes, acc[r][i] * sign);
            }
        }
    }
}

// sum[d][lane] += sum over steps of x[step][d] * weight[step][lane], d below kColumns.
static inline void accumulate_panel(const word* x, int steps, const word* weight, float* sum) {
    for (int d = 0; d < kColumns; d += kRows) {
        vec acc[kRows][kCols] = {};  // of this tile: a short sum that is added to the long one rounds less
        for (int step = 0; step < steps; ++step) {
            const word* a = x + step * kColumns + d;
            const wvec* b = reinterpret_cast<const wvec*>(weight + step * kPanel);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
                for (int i = 0; i < kCols; ++i) {
                    multiply_add(acc[r][i], a[r], b[i]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
            for (int i = 0; i < kCols; ++i) {
                float* at = sum + (d + r) * kPanel + i * kLanes;
                store(at, load(at) + acc[r][i]);
            }
        }
    }
}

// sum[row][d] += sum over lanes of x[row][lane] * y[lane][d]: here the lanes of the vectors lie along head_dim.
// Writes up to kRows - 1 rows beyond `rows`, as multiply_panel does.
static inline void multiply_rows(const word* x, int rows, const word* y, float* sum) {
    constexpr int kSteps = kPanel / 2;
    for (int row = 0; row < rows; row += kRows) {
        for (int d = 0; d < kWidth; d += kColsDq * kLanes) {
            float* at = sum + row * kWidth + d;
            vec acc[kRows][kColsDq];
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
                for (int i = 0; i < kColsDq; ++i) {
                    acc[r][i] = load(at + r * kWidth + i * kLanes);
                }
            }
            for (int step = 0; step < kSteps; ++step) {
                const word* a = x + row * kSteps + step;
                const wvec* b = reinterpret_cast<const wvec*>(y + step * kWidth + d);
#pragma GCC unroll 16
                for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
                    for (int i = 0; i < kColsDq; ++i) {
                        multiply_add(acc[r][i], a[r * kSteps], b[i]);
                    }
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
                for (int i = 0; i < kColsDq; ++i) {
                    store(at + r * kWidth + i * kLanes, acc[r][i]);
                }
            }
        }
    }
}

// ---- Packing -------------------------------------------------------------------------------------------------------

typedef unsigned short element;  // bits of a bf16

static inline float widen(element x) { return __builtin_bit_cast(float, static_cast<unsigned>(x) << 16); }

// Rounds to nearest even; NaN stays NaN.
static inline element narrow(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    const unsigned rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<element>(x != x ? 0x7fffu : rounded);
}

// Rows of `columns` elements as operands of multiply_panel: out[row][depth], `width` words apart, zeros behind the row.
static inline void pack_rows(const element* x, long long stride, int rows, int columns, int width, word* out) {
    for (int row = 0; row < rows; ++row) {
        const element* from = x + row * stride;
        __builtin_memcpy(out + row * width, from, columns / 2 * sizeof(word));
        if (columns % 2 != 0) {
            out[row * width + columns / 2] = from[columns - 1];
        }
    }
}

// Rows as operands of accumulate_panel: out[row / 2][d] pairs two rows, `width` words apart, zeros behind them; a last
// odd row pairs with 0.
static inline void pack_row_pairs(const element* x, long long stride, int rows, int columns, int width, word* out) {
    for (int row = 0; row < rows; row += 2) {
        const element* low = x + row * stride;
        const element* high = low + (row + 1 < rows ? stride : 0);
        const word keep = row + 1 < rows ? 0xffff0000u : 0u;
        for (int d = 0; d < columns; ++d) {
            out[row / 2 * width + d] = low[d] | (static_cast<word>(high[d]) << 16 & keep);
        }
        for (int d = columns; d < width; ++d) {
            out[row / 2 * width + d] = 0;
        }
    }
}

// Owned rows of `columns` elements as a panel: out[depth][lane], 0 in lanes from `rows` on and behind the row.
static inline void pack_panel(const element* x, long long stride, int rows, int columns, int depth, word* out) {
    for (int lane = 0; lane < kPanel; ++lane) {
        const element* from = x + lane * stride;
        for (int d = 0; d < depth; ++d) {
            const word high = lane < rows && 2 * d + 1 < columns ? static_cast<word>(from[2 * d + 1]) << 16 : 0;
            out[d * kPanel + lane] = lane < rows ? from[2 * d] | high : 0;
        }
    }
}

// The first `rows` lanes of panel[d][lane] * factor as rows of `columns` elements.
static inline void unpack_panel(const float* panel, float factor, int rows, int columns, element* out,
                                long long stride) {
    for (int lane = 0; lane < rows; ++lane) {
        for (int d = 0; d < columns; ++d) {
            out[lane * stride + d] = narrow(panel[d * kPanel + lane] * factor);
        }
    }
}

// ---- Mask: spans ---------------------------------------------------------------------------------------------------

// Tile lists: which tiles each owned tile visits.
struct Walk {
    const int* count;
    const int* order;
    const int* list;
    int stride;
};

static inline Walk walk_of(const Params* p) { return {p->tile_count, p->tile_order, p->tile_list, p->list_stride}; }

// The key tile of a rank, most work first; how many tiles it visits; visit `index` as visited tile * 2 + masked.
static inline int key_tile(const Walk& w, int rank) { return w.order[rank]; }
static inline int key_visits(const Walk& w, int tile) { return w.count[tile]; }
static inline int key_visit(const Walk& w, int tile, int index) {
    return w.list[static_cast<long long>(tile) * w.stride + index];
}

// scores[row][lane] = -inf where query `first_query + row` does not see the key of the lane.
static inline void apply_mask(const int* starts, const int* ends, int first_query, int rows, float* scores) {
    for (int i = 0; i < kCols; ++i) {
        const ivec from = *reinterpret_cast<const ivec*>(starts + i * kLanes);
        const ivec to = *reinterpret_cast<const ivec*>(ends + i * kLanes);
        for (int row = 0; row < rows; ++row) {
            float* at = scores + row * kPanel + i * kLanes;
            const ivec seen = (from <= first_query + row) & (to > first_query + row);
            store(at, seen ? load(at) : splat(-kInfinity));
        }
    }
}

// ---- Tile schedule from starts/ends: built once per mask, shared by all layers and heads ---------------------------

// 0 if no pair of (query tile, key tile) is visible, 1 if some, 2 if all.
static int classify(const Params* p, int query_tile, int key_tile) {
    const int first = query_tile * kTileM;
    const int last = min(first + kTileM, p->seq_q);
    int some = 0;
    int all = (key_tile + 1) * kTileN <= p->seq_k;
    for (int j = key_tile * kTileN; j < min((key_tile + 1) * kTileN, p->seq_k); ++j) {
        some |= max(p->starts[j], first) < min(p->ends[j], last);
        all &= (p->starts[j] <= first) & (p->ends[j] >= last);
    }
    return some + (some & all);
}

// Fills tile_count, tile_list, tile_order and dq_order for the key tiles.
extern "C" void attnforge_bwd_cpu_bf16_d128_spans_a4_m48_n96_l16_r8_c3_p1_schedule(const Params* p) {
#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
    for (int tile = 0; tile < p->tiles_n; ++tile) {
        int* list = p->tile_list + static_cast<long long>(tile) * p->list_stride;
        int count = 0;
        for (int other = 0; other < p->tiles_m; ++other) {
            const int kind = classify(p, other, tile);
            if (kind != 0) {
                list[count++] = other * 2 + (kind == 1);
            }
        }
        p->tile_count[tile] = count;
    }
    for (int tile = 0; tile < p->tiles_n; ++tile) {
        p->tile_order[tile] = tile;
    }
    std::sort(p->tile_order, p->tile_order + p->tiles_n, [p](int a, int b) {  // std::stable_sort compiles for longer
        const int more = p->tile_count[a] - p->tile_count[b];
        return more != 0 ? more > 0 : a < b;
    });
    std::vector<int> before(p->tiles_m);  // how many tiles of lower rank visit each query tile
    for (int rank = 0; rank < p->tiles_n; ++rank) {
        const long long list = static_cast<long long>(p->tile_order[rank]) * p->list_stride;
        for (int index = 0; index < p->tile_count[p->tile_order[rank]]; ++index) {
            p->dq_order[list + index] = before[p->tile_list[list + index] / 2]++;
        }
    }
}

// ---- Preprocess and postprocess: delta, and dq from dq_accum -------------------------------------------------------

// First row of one head of a tensor of Params.
#define HEAD(x, b, h) (static_cast<element*>((x).data) + (b) * (x).batch + (h) * (x).head)

static inline long long plane(const Params* p, int batch, int head) {
    return static_cast<long long>(batch) * p->heads_q + head;
}

// Dot product of two rows of out or dout.
static inline float dot(const element* x, const element* y) {
    constexpr int whole = kHeadDimV / 8 * 8;
    float partial[8] = {};
    for (int d = 0; d < whole; d += 8) {
        for (int i = 0; i < 8; ++i) {
            partial[i] += widen(x[d + i]) * widen(y[d + i]);
        }
    }
    float sum = 0.0f;
    for (int i = 0; i < 8; ++i) {
        sum += partial[i];
    }
    return sum;
}

// One query tile: delta, and zeros in dq_accum and dq_semaphore.
static void preprocess(const Params* p, int tile, int batch, int head) {
    const element* out = HEAD(p->out, batch, head);
    const element* dout = HEAD(p->dout, batch, head);
    p->dq_semaphore[plane(p, batch, head) * p->tiles_m + tile] = 0;
    const float* dlse = p->dlse == nullptr ? nullptr : p->dlse + plane(p, batch, head) * p->seq_q;
    const long long first = plane(p, batch, head) * p->padded_q;
    for (int row = tile * kTileM; row < min((tile + 1) * kTileM, p->seq_q); ++row) {
        const float sum = dot(out + row * p->out.row, dout + row * p->dout.row);
        p->delta[first + row] = dlse == nullptr ? sum : sum - dlse[row];
        for (int d = 0; d < kHeadDim; ++d) {
            p->dq_accum[(first + row) * kHeadDim + d] = 0.0f;
        }
    }
}

// One query tile: dq = scale * dq_accum.
static void postprocess(const Params* p, int tile, int batch, int head) {
    const long long first = plane(p, batch, head) * p->padded_q;
    for (int row = tile * kTileM; row < min((tile + 1) * kTileM, p->seq_q); ++row) {
        element* dq = HEAD(p->dq, batch, head) + row * p->dq.row;
        for (int d = 0; d < kHeadDim; ++d) {
            dq[d] = narrow(p->dq_accum[(first + row) * kHeadDim + d] * p->scale);
        }
    }
}

// ---- Task: dK and dV of a key tile, and its part of dQ -------------------------------------------------------------

// kPanel keys of one kv head, and their gradients.
struct alignas(64) KeyPanel {
    word k[kDepth * kPanel];  // transposed: words of head_dim x keys
    word v[kDepthV * kPanel];
    float dk[kColumns * kPanel];
    float dv[kColumnsV * kPanel];
    word k_rows[kPanel / 2 * kWidth];  // for dQ: lanes along head_dim
    int starts[kPanel];  // the key of a lane is visible to queries starts <= i < ends
    int ends[kPanel];
    int row;   // first key
    int rows;  // keys, at most kPanel
};

// A packed query tile, and S, P, dP and dS of it and one panel. What is read as vectors comes first, for its alignment.
struct alignas(64) QueryTile {
    float weights[kTileM * kPanel];  // S, then P
    float ds[kTileM * kPanel];       // dP, then dS
    float dq[kTileM * kWidth];
    word weight_pairs[kTileM / 2 * kPanel];  // P, two queries a word
    word ds_pairs[kTileM / 2 * kPanel];      // dS, two queries a word
    word ds_words[kTileM * kPanel / 2];      // dS, two keys a word
    word q_pairs[kTileM / 2 * kColumns];
    word dout_pairs[kTileM / 2 * kColumnsV];
    word q[kTileM * kDepth];
    word dout[kTileM * kDepthV];
    float lse[kTileM];       // times log2(e); +inf for a query without gradients
    float lse_rest[kTileM];  // what rounding `lse` lost
    float delta[kTileM];
};

// Queries with a larger |lse| get no gradients: float32 holds no fraction of such an lse, so exp(S - lse) is not P.
constexpr float kMaxLse = 4194304.0f;  // 2^22

// Working memory of a thread.
struct Scratch {
    QueryTile queries;
    KeyPanel panels[kPanels];
};
static_assert(sizeof(Scratch) == kScratchBytes, "codegen/families/cpu.py disagrees");

// Prologue of a panel: pack K and V of the keys from `row` on; dK and dV are 0.
static void init_panel(const Params* p, int batch, int head_kv, int row, KeyPanel& panel) {
    panel.row = row;
    panel.rows = min(kPanel, p->seq_k - row);
    const element* k = HEAD(p->k, batch, head_kv) + row * p->k.row;
    const element* v = HEAD(p->v, batch, head_kv) + row * p->v.row;
    pack_panel(k, p->k.row, panel.rows, kHeadDim, kDepth, panel.k);
    pack_panel(v, p->v.row, panel.rows, kHeadDimV, kDepthV, panel.v);
    std::fill_n(panel.dk, kColumns * kPanel, 0.0f);
    std::fill_n(panel.dv, kColumnsV * kPanel, 0.0f);
    std::fill_n(panel.k_rows, sizeof(panel.k_rows) / sizeof(word), word{0});
    pack_row_pairs(k, p->k.row, panel.rows, kHeadDim, kWidth, panel.k_rows);
    for (int i = 0; i < kPanel; ++i) {
        const bool inside = i < panel.rows;  // keys past the end are visible to no query
        panel.starts[i] = inside ? p->starts[row + i] : 0;
        panel.ends[i] = inside ? p->ends[row + i] : 0;
    }
}

// Packs Q, dO, lse and delta of one query tile into scratch; returns how many queries it has.
static int load_query_tile(const Params* p, int batch, int head, int first_query, QueryTile& t) {
    const int queries = min(kTileM, p->seq_q - first_query);
    const element* q = HEAD(p->q, batch, head) + first_query * p->q.row;
    const element* dout = HEAD(p->dout, batch, head) + first_query * p->dout.row;
    pack_rows(q, p->q.row, queries, kHeadDim, kDepth, t.q);
    pack_rows(dout, p->dout.row, queries, kHeadDimV, kDepthV, t.dout);
    pack_row_pairs(q, p->q.row, queries, kHeadDim, kColumns, t.q_pairs);
    pack_row_pairs(dout, p->dout.row, queries, kHeadDimV, kColumnsV, t.dout_pairs);
    const float* lse = p->lse + plane(p, batch, head) * p->seq_q + first_query;
    const float* delta = p->delta + plane(p, batch, head) * p->padded_q + first_query;
    for (int i = 0; i < queries; ++i) {
        const double base_two = lse[i] * 1.4426950408889634;
        const bool empty = std::fabs(lse[i]) > kMaxLse;  // or the query sees no key: its lse is -inf
        t.lse[i] = empty ? kInfinity : static_cast<float>(base_two);
        t.lse_rest[i] = empty ? 0.0f : static_cast<float>(base_two - t.lse[i]);
        t.delta[i] = delta[i];
    }
    return queries;
}

// P from S, and dS from dP, in place. P is limited to 1, which rounding of a large S and lse may exceed.
static void softmax_backward_step(int queries, float scale_log2, QueryTile& t) {
    for (int row = 0; row < queries; ++row) {
        if (t.lse[row] == kInfinity) {
            std::fill_n(t.weights + row * kPanel, kPanel, 0.0f);
            std::fill_n(t.ds + row * kPanel, kPanel, 0.0f);
            continue;
        }
        for (int at = row * kPanel; at < (row + 1) * kPanel; at += kLanes) {
            const vec power = load(t.weights + at) * scale_log2 - t.lse[row] - t.lse_rest[row];
            const vec weight = exp2(min(vec{}, power));
            store(t.weights + at, weight);
            store(t.ds + at, weight * (load(t.ds + at) - t.delta[row]));
        }
    }
}

// One step of the main loop: a panel of keys and a packed query tile; adds to dK, dV and t.dq. `masked`: the mask hides
// some of their pairs.
static void attend_tile(const Params* p, KeyPanel& panel, int first_query, int queries,
                        bool masked, QueryTile& t) {
    multiply_panel(t.q, queries, panel.k, scale_sign(p), t.weights);
    multiply_panel(t.dout, queries, panel.v, 1.0f, t.ds);
    if (masked) {
        apply_mask(panel.starts, panel.ends, first_query, queries, t.weights);
    }
    softmax_backward_step(queries, scale_magnitude_log2(p), t);
    pair_rows(t.weights, queries, t.weight_pairs);
    pair_rows(t.ds, queries, t.ds_pairs);
    pair_columns(t.ds, queries, t.ds_words);
    accumulate_panel(t.dout_pairs, (queries + 1) / 2, t.weight_pairs, panel.dv);
    accumulate_panel(t.q_pairs, (queries + 1) / 2, t.ds_pairs, panel.dk);
    multiply_rows(t.ds_words, queries, panel.k_rows, t.dq);
}

// How many tasks add to the query tile of visit `index` of key tile `tile` before this one does.
static inline int dq_order_of(const Params* p, int tile, int index) {
    return p->dq_order[static_cast<long long>(tile) * p->list_stride + index];
}

// Adds t.dq to dq_accum after `order` other tasks. The wait is short: the task before is about one query tile ahead.
static void add_dq(const QueryTile& t, int queries, float* sum, int* semaphore, int order) {
    for (int tries = 0; __atomic_load_n(semaphore, __ATOMIC_ACQUIRE) != order; ++tries) {
        if (tries > 1000) {
            sched_yield();
        }
    }
    for (int row = 0; row < queries; ++row) {
        for (int d = 0; d < kHeadDim; ++d) {
            sum[row * kHeadDim + d] += t.dq[row * kWidth + d];
        }
    }
    __atomic_store_n(semaphore, order + 1, __ATOMIC_RELEASE);
}

// Key tile `tile` of one kv head, and all query heads that share it.
static void backward_task(const Params* p, const Walk& walk, int tile, int batch, int head_kv, Scratch& s) {
    int panels = 0;
    for (int row = tile * kTileN; row < min((tile + 1) * kTileN, p->seq_k); row += kPanel) {
        init_panel(p, batch, head_kv, row, s.panels[panels++]);
    }
    const int group = p->heads_q / p->heads_kv;
    const int count = key_visits(walk, tile);
    for (int head = head_kv * group; head < (head_kv + 1) * group; ++head) {
        for (int index = 0; index < count; ++index) {
            const int visit = key_visit(walk, tile, index);
            const int first_query = visit / 2 * kTileM;
            const int queries = load_query_tile(p, batch, head, first_query, s.queries);
            std::fill_n(s.queries.dq, queries * kWidth, 0.0f);
            for (int i = 0; i < panels; ++i) {
                attend_tile(p, s.panels[i], first_query, queries, visit % 2, s.queries);
            }
            float* sum = p->dq_accum + (plane(p, batch, head) * p->padded_q + first_query) * kHeadDim;
            int* semaphore = p->dq_semaphore + plane(p, batch, head) * p->tiles_m + visit / 2;
            add_dq(s.queries, queries, sum, semaphore, dq_order_of(p, tile, index));
        }
    }
    for (int i = 0; i < panels; ++i) {
        const KeyPanel& panel = s.panels[i];
        element* dk = HEAD(p->dk, batch, head_kv) + panel.row * p->dk.row;
        element* dv = HEAD(p->dv, batch, head_kv) + panel.row * p->dv.row;
        unpack_panel(panel.dk, p->scale, panel.rows, kHeadDim, dk, p->dk.row);
        unpack_panel(panel.dv, 1.0f, panel.rows, kHeadDimV, dv, p->dv.row);
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------------------

static inline long long next_task(long long& next) { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }

extern "C" void attnforge_bwd_cpu_bf16_d128_spans_a4_m48_n96_l16_r8_c3_p1(const Params* p) {
    const Walk& walk = walk_of(p);
    const long long heads_q = static_cast<long long>(p->batch) * p->heads_q;
    const long long heads_kv = static_cast<long long>(p->batch) * p->heads_kv;
    long long next = 0;
#pragma omp parallel num_threads(p->threads)
    {
        Scratch s;
#pragma omp for schedule(static)
        for (long long i = 0; i < p->tiles_m * heads_q; ++i) {
            const int row = static_cast<int>(i / p->tiles_m);
            preprocess(p, static_cast<int>(i % p->tiles_m), row / p->heads_q, row % p->heads_q);
        }
        // Tasks (rank of the key tile, batch, kv head), the last index fastest. Rank 0 is the tile with most work. A
        // task waits only for tasks that were taken before it.
        for (long long i = next_task(next); i < p->tiles_n * heads_kv; i = next_task(next)) {
            const int row = static_cast<int>(i % heads_kv);
            const int tile = key_tile(walk, static_cast<int>(i / heads_kv));
            backward_task(p, walk, tile, row / p->heads_kv, row % p->heads_kv, s);
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (long long i = 0; i < p->tiles_m * heads_q; ++i) {
            const int row = static_cast<int>(i / p->tiles_m);
            postprocess(p, static_cast<int>(i % p->tiles_m), row / p->heads_q, row % p->heads_q);
        }
    }
}
