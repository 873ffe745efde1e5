// attnforge_fwd_cpu_bf16_d128_spans_a4_m48_n64_h8_l16_r8_c3_p1
// Generated from templates/cpu/forward.cpp.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch cpu --dtype bf16 --head-dim 128 --mask spans --align 4
//     --set tile_m=48 --set tile_n=64 --set heads=8 --set lanes=16 --set rows=8
//     --set cols=3 --set pairs=1
//
//   tile_m   48   query rows per tile, a multiple of lanes * cols
//   tile_n   64   keys per tile
//   heads     8   query heads of one kv head that share each packed K and V tile
//   lanes    16   floats of one vector register
//   rows      8   rows of the register block
//   cols      3   vector registers per row of the register block
//   pairs     1   1: multiply pairs of bf16 (vdpbf16ps) instead of widening to fp32

#include <algorithm>
#include <cmath>

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
    const int* starts;  // (seq_k) spans: key j is visible to queries starts[j] <= i < ends[j]
    const int* ends;  // (seq_k)
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
    int* tile_count;  // (mask_planes, tiles) visited tiles of each owned tile
    int* tile_order;  // (mask_planes, tiles) owned tiles in launch order, or with lists that are cut, pieces of them
    int* tile_list;  // (mask_planes, tiles, list_stride) visited tile << row groups | a bit for each with hidden pairs
    int batch;
    int heads_q;
    int heads_kv;  // divides heads_q
    int seq_q;
    int seq_k;
    int tiles_m;  // ceil(seq_q / tile_m)
    int tiles_n;  // ceil(seq_k / tile_n)
    int list_stride;  // entries per row of tile_list
    int threads;  // CPU threads to use
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;  // columns of q and k
constexpr int kHeadDimV = 128;  // columns of v and out
constexpr int kTileM = 48;  // queries of a tile
constexpr int kTileN = 64;  // keys of a tile
constexpr int kLanes = 16;  // floats of a vector
constexpr int kRows = 8;  // register block: kRows x kCols vectors
constexpr int kCols = 3;
constexpr int kPanel = kCols * kLanes;  // owned rows of a panel: one per vector lane
// Columns in whole register blocks, zeros past the head dims.
constexpr int kColumnsV = (kHeadDimV + kRows - 1) / kRows * kRows;
constexpr int kDepth = (kHeadDim + 1) / 2;  // words of a row: pairs of bf16
constexpr int kHeads = 8;  // query heads of a task, at most
constexpr int kPanels = kHeads * kTileM / kPanel;
constexpr int kScratchBytes = 349696;  // of a thread

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

// sum[d][lane] = sum[d][lane] * decay[lane] + sum over steps of x[step][d] * weight[step][lane], d below kColumnsV.
static inline void accumulate_panel(const word* x, int steps, const word* weight, const vec* decay, float* sum) {
    for (int d = 0; d < kColumnsV; d += kRows) {
        vec acc[kRows][kCols] = {};  // of this tile: a short sum that is added to the long one rounds less
        for (int step = 0; step < steps; ++step) {
            const word* a = x + step * kColumnsV + d;
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
                store(at, load(at) * decay[i] + acc[r][i]);
            }
        }
    }
}

// ---- Packing -------------------------------------------------------------------------------------------------------

typedef unsigned short element;  // bits of a bf16

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

// The first `rows` lanes of panel[d][lane] * factor[lane] as rows of `columns` elements.
static inline void unpack_panel(const float* panel, const float* factor, int rows, int columns, element* out,
                                long long stride) {
    for (int lane = 0; lane < rows; ++lane) {
        for (int d = 0; d < columns; ++d) {
            out[lane * stride + d] = narrow(panel[d * kPanel + lane] * factor[lane]);
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

// The query tile of a rank, most work first; how many tiles it visits; visit `index` as visited tile * 2 + masked.
static inline int query_tile(const Walk& w, int rank) { return w.order[rank]; }
static inline int query_visits(const Walk& w, int tile) { return w.count[tile]; }
static inline int query_visit(const Walk& w, int tile, int index) {
    return w.list[static_cast<long long>(tile) * w.stride + index];
}

static inline ivec lane_index() {
    ivec index = {};
    for (int i = 0; i < kLanes; ++i) {
        index[i] = i;
    }
    return index;
}

// scores[row][lane] = -inf where query `first_query + lane` does not see key `first_key + row`.
static inline void apply_mask(const Params* p, int first_query, int first_key, int rows, float* scores) {
    for (int row = 0; row < rows; ++row) {
        const int from = p->starts[first_key + row];
        const int to = p->ends[first_key + row];
        for (int i = 0; i < kCols; ++i) {
            const ivec query = lane_index() + (first_query + i * kLanes);
            float* at = scores + row * kPanel + i * kLanes;
            store(at, ((query >= from) & (query < to)) ? load(at) : splat(-kInfinity));
        }
    }
}

// ---- Tile schedule from starts/ends: built once per mask, shared by all layers and heads ---------------------------

// 0 if no pair of (query tile, key tile) is visible, 1 if some, 2 if all.
static int classify(const Params* p, int query_tile, int key_tile) {
    const int first = query_tile * kTileM;
    const int last = min(first + kTileM, p->seq_q);
    int some = 0;
    int all = 1;
    for (int j = key_tile * kTileN; j < min((key_tile + 1) * kTileN, p->seq_k); ++j) {
        some |= max(p->starts[j], first) < min(p->ends[j], last);
        all &= (p->starts[j] <= first) & (p->ends[j] >= last);
    }
    return some + (some & all);
}

// Fills tile_count, tile_list and tile_order for the query tiles.
extern "C" void attnforge_fwd_cpu_bf16_d128_spans_a4_m48_n64_h8_l16_r8_c3_p1_schedule(const Params* p) {
#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
    for (int tile = 0; tile < p->tiles_m; ++tile) {
        int* list = p->tile_list + static_cast<long long>(tile) * p->list_stride;
        int count = 0;
        for (int other = 0; other < p->tiles_n; ++other) {
            const int kind = classify(p, tile, other);
            if (kind != 0) {
                list[count++] = other * 2 + (kind == 1);
            }
        }
        p->tile_count[tile] = count;
    }
    for (int tile = 0; tile < p->tiles_m; ++tile) {
        p->tile_order[tile] = tile;
    }
    std::sort(p->tile_order, p->tile_order + p->tiles_m, [p](int a, int b) {  // std::stable_sort compiles for longer
        const int more = p->tile_count[a] - p->tile_count[b];
        return more != 0 ? more > 0 : a < b;
    });
}

// ---- Kernel --------------------------------------------------------------------------------------------------------

// kPanel query rows of one head and their state of the online softmax.
struct alignas(64) Panel {
    word q[kDepth * kPanel];        // transposed: words of head_dim x queries
    float out[kColumnsV * kPanel];  // O, relative to row_max
    float row_max[kPanel];          // of S so far, -inf if no key was visible
    float row_sum[kPanel];          // of P so far
    int head;                       // query head
    int row;                        // first query
    int rows;                       // queries, at most kPanel
};

// Working memory of a thread.
struct alignas(64) Scratch {
    Panel panels[kPanels];
    float scores[kTileN * kPanel];  // S of a key tile and a panel
    word weights[kTileN / 2 * kPanel];  // P, two keys a word
    word k[kTileN * kDepth];  // the packed key tile, shared by all panels
    word v[kTileN / 2 * kColumnsV];
};
static_assert(sizeof(Scratch) == kScratchBytes, "codegen/families/cpu.py disagrees");

// Prologue of a panel: pack the query rows from `row` on of head `head`; O, row_max and row_sum of no keys.
static void init_panel(const Params* p, int batch, int head, int row, Panel& panel) {
    panel.head = head;
    panel.row = row;
    panel.rows = min(kPanel, p->seq_q - row);
    const element* q = static_cast<const element*>(p->q.data);
    q += batch * p->q.batch + head * p->q.head + row * p->q.row;
    pack_panel(q, p->q.row, panel.rows, kHeadDim, kDepth, panel.q);
    for (int i = 0; i < kColumnsV * kPanel; ++i) {
        panel.out[i] = 0.0f;
    }
    for (int i = 0; i < kPanel; ++i) {
        panel.row_max[i] = -kInfinity;
        panel.row_sum[i] = 0.0f;
    }
}

// Online softmax of `keys` keys: updates row_max, computes P from S, and updates row_sum. `decay` is the factor
// exp(|scale| (old row_max - new row_max)) by which the caller rescales O.
static void softmax_step(Panel& panel, const float* scores, int keys, float scale_log2, word* weights, vec* decay) {
    vec even[kCols], odd[kCols];  // maxima of every second key: several at a time hide the latency of each
    for (int i = 0; i < kCols; ++i) {
        even[i] = odd[i] = load(panel.row_max + i * kLanes);
    }
    for (int j = 0; j < keys; j += 2) {
        const float* next = scores + min(j + 1, keys - 1) * kPanel;
#pragma GCC unroll 16
        for (int i = 0; i < kCols; ++i) {
            even[i] = max(even[i], load(scores + j * kPanel + i * kLanes));
            odd[i] = max(odd[i], load(next + i * kLanes));
        }
    }
    for (int i = 0; i < kCols; ++i) {
        const float* column = scores + i * kLanes;
        const vec before = load(panel.row_max + i * kLanes);
        const vec row_max = max(even[i], odd[i]);
        store(panel.row_max + i * kLanes, row_max);
        // Rows without a visible key so far: 0 in place of -inf, since -inf - -inf is NaN.
        const vec base = row_max == -kInfinity ? vec{} : row_max;
        decay[i] = exp2((before - base) * scale_log2);
        vec row_sum = {};  // of this key tile
        for (int j = 0; j < keys; j += 2) {
            const vec low = exp2((load(column + j * kPanel) - base) * scale_log2);
            const vec high = j + 1 < keys ? exp2((load(column + (j + 1) * kPanel) - base) * scale_log2) : vec{};
            row_sum += low + high;
            *reinterpret_cast<wvec*>(weights + j / 2 * kPanel + i * kLanes) = pair(low, high);
        }
        store(panel.row_sum + i * kLanes, load(panel.row_sum + i * kLanes) * decay[i] + row_sum);
    }
}

// Epilogue of a panel: out = O / row_sum, and lse; 0 and -inf for rows without a visible key.
static void store_out(const Params* p, int batch, const Panel& panel) {
    float* lse = p->lse + (static_cast<long long>(batch) * p->heads_q + panel.head) * p->seq_q + panel.row;
    const double scale = std::fabs(static_cast<double>(p->scale));
    alignas(64) float inverse[kPanel] = {};
    for (int i = 0; i < panel.rows; ++i) {
        const bool empty = panel.row_max[i] == -kInfinity;
        inverse[i] = empty ? 0.0f : 1.0f / panel.row_sum[i];
        lse[i] = empty ? -kInfinity : static_cast<float>(panel.row_max[i] * scale + std::log(double{panel.row_sum[i]}));
    }
    element* out = static_cast<element*>(p->out.data);
    out += batch * p->out.batch + panel.head * p->out.head + panel.row * p->out.row;
    unpack_panel(panel.out, inverse, panel.rows, kHeadDimV, out, p->out.row);
}

// Packs K and V of one key tile into scratch; returns how many keys it has.
static int load_kv_tile(const Params* p, int batch, int head_kv, int first_key, Scratch& s) {
    const int keys = min(kTileN, p->seq_k - first_key);
    const element* k = static_cast<const element*>(p->k.data);
    const element* v = static_cast<const element*>(p->v.data);
    k += batch * p->k.batch + head_kv * p->k.head + first_key * p->k.row;
    v += batch * p->v.batch + head_kv * p->v.head + first_key * p->v.row;
    pack_rows(k, p->k.row, keys, kHeadDim, kDepth, s.k);
    pack_row_pairs(v, p->v.row, keys, kHeadDimV, kColumnsV, s.v);
    return keys;
}

// One step of the main loop: a panel and a packed key tile. `masked`: the mask hides some of their pairs.
static void attend_tile(const Params* p, Panel& panel, int first_key, int keys,
                        bool masked, Scratch& s) {
    vec decay[kCols];
    multiply_panel(s.k, keys, panel.q, scale_sign(p), s.scores);
    if (masked) {
        apply_mask(p, panel.row, first_key, keys, s.scores);
    }
    softmax_step(panel, s.scores, keys, scale_magnitude_log2(p), s.weights, decay);
    accumulate_panel(s.v, (keys + 1) / 2, s.weights, decay, panel.out);
}

// Query tile `tile` of the query heads [head, head + heads) of one kv head.
static void forward_task(const Params* p, int tile, int batch, int head, int heads, Scratch& s) {
    const Walk& walk = walk_of(p);
    int panels = 0;
    for (int h = head; h < head + heads; ++h) {
        for (int row = tile * kTileM; row < min((tile + 1) * kTileM, p->seq_q); row += kPanel) {
            init_panel(p, batch, h, row, s.panels[panels++]);
        }
    }
    const int head_kv = head / (p->heads_q / p->heads_kv);
    const int count = query_visits(walk, tile);
    for (int index = 0; index < count; ++index) {
        const int visit = query_visit(walk, tile, index);
        const int first_key = visit / 2 * kTileN;
        const int keys = load_kv_tile(p, batch, head_kv, first_key, s);
        for (int i = 0; i < panels; ++i) {
            attend_tile(p, s.panels[i], first_key, keys, visit % 2, s);
        }
    }
    for (int i = 0; i < panels; ++i) {
        store_out(p, batch, s.panels[i]);
    }
}

// Tasks (rank of the query tile, batch, kv head, chunk of its query heads), the last index fastest. Rank 0 is the tile
// with most work; threads take tasks dynamically.
extern "C" void attnforge_fwd_cpu_bf16_d128_spans_a4_m48_n64_h8_l16_r8_c3_p1(const Params* p) {
    const Walk& walk = walk_of(p);
    const int group = p->heads_q / p->heads_kv;
    const long long tiles = static_cast<long long>(p->tiles_m) * p->batch * p->heads_kv;
    int chunk = min(kHeads, group);
    while (chunk > 1 && tiles * ((group + chunk - 1) / chunk) < 4 * p->threads) {
        chunk = (chunk + 1) / 2;  // small problems: more tasks, fewer heads that share a tile
    }
    const int chunks = (group + chunk - 1) / chunk;
    const long long heads = static_cast<long long>(p->batch) * p->heads_kv * chunks;
#pragma omp parallel num_threads(p->threads)
    {
        Scratch s;
#pragma omp for schedule(dynamic)
        for (long long task = 0; task < p->tiles_m * heads; ++task) {
            const int first = static_cast<int>(task % chunks) * chunk;
            const int head_kv = static_cast<int>(task / chunks % p->heads_kv);
            const int batch = static_cast<int>(task / chunks / p->heads_kv % p->batch);
            const int tile = query_tile(walk, static_cast<int>(task / heads));
            forward_task(p, tile, batch, head_kv * group + first, min(chunk, group - first), s);
        }
    }
}
