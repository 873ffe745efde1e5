// attnforge_fwd_cpu_bf16_d128_spans_a4_m32_n128_h8_l16_r32_c2_p1_x1
// Generated from templates/cpu/forward.cpp.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch cpu --dtype bf16 --head-dim 128 --mask spans --align 4
//     --set tile_m=32 --set tile_n=128 --set heads=8 --set lanes=16 --set rows=32
//     --set cols=2 --set pairs=1 --set amx=1
//
//   tile_m   32   query rows per tile, a multiple of lanes * cols
//   tile_n  128   keys per tile
//   heads     8   query heads of one kv head that share each packed K and V tile
//   lanes    16   floats of one vector register
//   rows     32   rows of the register block
//   cols      2   vector registers per row of the register block
//   pairs     1   1: multiply pairs of bf16 (vdpbf16ps) instead of widening to fp32
//   amx       1   1: multiply in tile registers of 16 x 16 words (tdpbf16ps)

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
constexpr int kTileM = 32;  // queries of a tile
constexpr int kTileN = 128;  // keys of a tile
constexpr int kLanes = 16;  // floats of a vector
constexpr int kRows = 32;  // register block: kRows x kCols vectors
constexpr int kCols = 2;
constexpr int kPanel = kCols * kLanes;  // owned rows of a panel: one per vector lane
// Columns in whole register blocks, zeros past the head dims.
constexpr int kColumnsV = (kHeadDimV + kRows - 1) / kRows * kRows;
constexpr int kTileWords = 16;  // words of a row of a tile register, each a pair of bf16
constexpr int kDepth = (kHeadDim + 31) / 32 * kTileWords;  // words of a row, in whole tile registers
constexpr int kHeads = 8;  // query heads of a task, at most
constexpr int kPanels = kHeads * kTileM / kPanel;
constexpr int kScratchBytes = 289280;  // of a thread

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

// Zeros behind the first `steps` rows of words[step][lane], up to a whole tile register.
static inline void fill_tile_register(word* words, int steps) {
    for (; steps % kTileWords != 0; ++steps) {
        __builtin_memset(words + steps * kPanel, 0, kPanel * sizeof(word));
    }
}

// The nearest bf16 in the high halves, ties away from zero.
static inline wvec round_high(vec x) { return reinterpret_cast<wvec>(x) + 0x8000u; }

static inline wvec pair(vec low, vec high) {
    return round_high(low) >> 16 | (round_high(high) & 0xffff0000u);
}

// ---- Products in tile registers: kRows x kPanel sums stay in tmm0 to tmm3 ------------------------------------------

// What ldtilecfg reads (Intel SDM, volume 1, "Programming with Intel AMX"): 8 registers of 16 rows x 64 bytes.
struct alignas(64) TileConfig {
    unsigned char palette = 1;
    unsigned char start_row = 0;
    unsigned char reserved[14] = {};
    unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The tile registers of the calling thread, usable while this object lives.
struct TileRegisters {
    TileRegisters() {
        const TileConfig config;
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~TileRegisters() { asm volatile("tilerelease"); }
};

template <int kRegister>
static inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kRegister));
}

// 16 rows of 16 words, `stride` words apart.
template <int kRegister>
static inline void tile_load(const void* at, long stride) {
    asm volatile("tileloadd (%0,%1,4), %%tmm%c2" : : "r"(at), "r"(stride), "i"(kRegister) : "memory");
}

template <int kRegister>
static inline void tile_store(float* at, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,4)" : : "r"(at), "r"(stride), "i"(kRegister) : "memory");
}

// sum[row][lane] += sum over 16 words of rows[row][word] * lanes[word][lane].
template <int kSum, int kRow, int kLane>
static inline void tile_multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRow), "i"(kLane));
}

static inline void zero_sums() {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
}

static inline void store_sums(float* sums, long stride) {
    tile_store<0>(sums, stride);
    tile_store<1>(sums + 16, stride);
    tile_store<2>(sums + 16 * stride, stride);
    tile_store<3>(sums + 16 * stride + 16, stride);
}

// Adds the products of x[row][word] and y[word][lane], 16 words deep.
static inline void add_products(const word* x, long stride_x, const word* y, long stride_y) {
    tile_load<6>(y, stride_y);
    tile_load<7>(y + 16, stride_y);
    tile_load<4>(x, stride_x);
    tile_multiply_add<0, 4, 6>();
    tile_multiply_add<1, 4, 7>();
    tile_load<5>(x + 16 * stride_x, stride_x);
    tile_multiply_add<2, 5, 6>();
    tile_multiply_add<3, 5, 7>();
}

// out = a block of kRows x kPanel sums of the products of x[row][word] and y[word][lane], `words` words deep.
static inline void multiply_block(const word* x, long stride_x, int words, const word* y, long stride_y, float* out) {
    zero_sums();
    for (int at = 0; at < words; at += kTileWords) {
        add_products(x + at, stride_x, y + at * stride_y, stride_y);
    }
    store_sums(out, kPanel);
}

constexpr int kSteps = kTileN / 2;  // words along the sum of accumulate_panel

// out[row][lane] = sign * sum over d of x[row][d] * panel[d][lane], kDepth words deep. Rows are computed kRows at a
// time: up to kRows - 1 rows beyond `rows` are written, with values that are not used.
static inline void multiply_panel(const word* x, int rows, const word* panel, float sign, float* out) {
    for (int row = 0; row < rows; row += kRows) {
        multiply_block(x + row * kDepth, kDepth, kDepth, panel, kPanel, out + row * kPanel);
    }
    if (sign != 1.0f) {
        for (int at = 0; at < rows * kPanel; at += kLanes) {
            store(out + at, load(out + at) * sign);
        }
    }
}

// sum[d][lane] = sum[d][lane] * decay[lane] + sum over steps of x[d][step] * weight[step][lane], d below kColumnsV.
static inline void accumulate_panel(const word* x, int steps, const word* weight, const vec* decay, float* sum) {
    // Of this tile: a short sum that is added to the long one rounds less. To load the long one into tile registers
    // costs more than this addition.
    alignas(64) float block[kRows * kPanel];
    for (int d = 0; d < kColumnsV; d += kRows) {
        multiply_block(x + d * kSteps, kSteps, steps, weight, kPanel, block);
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
            for (int i = 0; i < kCols; ++i) {
                float* at = sum + (d + row) * kPanel + i * kLanes;
                store(at, load(at) * decay[i] + load(block + row * kPanel + i * kLanes));
            }
        }
    }
}

// ---- Packing -------------------------------------------------------------------------------------------------------

typedef unsigned short element;  // bits of a bf16

// Rows of `columns` elements as operands of multiply_panel: out[row][depth], `width` words apart, zeros behind the row.
static inline void pack_rows(const element* x, long long stride, int rows, int columns, int width, word* out) {
    for (int row = 0; row < rows; ++row) {
        const element* from = x + row * stride;
        __builtin_memcpy(out + row * width, from, columns / 2 * sizeof(word));
        if (columns % 2 != 0) {
            out[row * width + columns / 2] = from[columns - 1];
        }
        for (int d = (columns + 1) / 2; d < width; ++d) {
            out[row * width + d] = 0;
        }
    }
}

typedef element halves __attribute__((vector_size(16 * sizeof(element)), aligned(sizeof(element)), may_alias));

// Rounded to nearest even, in words; NaN stays NaN.
static inline wvec narrow(vec x) {
    const wvec bits = reinterpret_cast<wvec>(x);
    const wvec rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return x != x ? wvec{} + 0x7fffu : rounded;
}

// t[i][j] and t[j][i] change places.
static inline void transpose(wvec (&t)[16]) {
    {
        constexpr int step = 1;  // blocks of step x step: the right one of row i, the left one of row i + step
        const wvec left = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
        const wvec right = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
#pragma GCC unroll 16
        for (int n = 0; n < 8; ++n) {
            const int i = n / step * 2 * step + n % step;
            const wvec low = t[i];
            t[i] = __builtin_shuffle(low, t[i + step], left);
            t[i + step] = __builtin_shuffle(low, t[i + step], right);
        }
    }
    {
        constexpr int step = 2;  // blocks of step x step: the right one of row i, the left one of row i + step
        const wvec left = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
        const wvec right = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
#pragma GCC unroll 16
        for (int n = 0; n < 8; ++n) {
            const int i = n / step * 2 * step + n % step;
            const wvec low = t[i];
            t[i] = __builtin_shuffle(low, t[i + step], left);
            t[i + step] = __builtin_shuffle(low, t[i + step], right);
        }
    }
    {
        constexpr int step = 4;  // blocks of step x step: the right one of row i, the left one of row i + step
        const wvec left = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
        const wvec right = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
#pragma GCC unroll 16
        for (int n = 0; n < 8; ++n) {
            const int i = n / step * 2 * step + n % step;
            const wvec low = t[i];
            t[i] = __builtin_shuffle(low, t[i + step], left);
            t[i + step] = __builtin_shuffle(low, t[i + step], right);
        }
    }
    {
        constexpr int step = 8;  // blocks of step x step: the right one of row i, the left one of row i + step
        const wvec left = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
        const wvec right = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
#pragma GCC unroll 16
        for (int n = 0; n < 8; ++n) {
            const int i = n / step * 2 * step + n % step;
            const wvec low = t[i];
            t[i] = __builtin_shuffle(low, t[i + step], left);
            t[i + step] = __builtin_shuffle(low, t[i + step], right);
        }
    }
}

// 16 words of adjacent elements; zeros from element `count` on.
static inline wvec load_words(const element* from, int count) {
    wvec words = {};
    if (count >= 32) {
        __builtin_memcpy(&words, from, sizeof(words));
    } else {
        __builtin_memcpy(&words, from, max(count, 0) * sizeof(element));
    }
    return words;
}

// 16 elements as words; zeros from `count` on.
static inline wvec widen_to_words(const element* from, int count) {
    if (count >= 16) {
        return __builtin_convertvector(*reinterpret_cast<const halves*>(from), wvec);
    }
    halves first = {};
    __builtin_memcpy(&first, from, max(count, 0) * sizeof(element));
    return __builtin_convertvector(first, wvec);
}

// Rows as operands of accumulate_panel: out[d][row / 2] pairs two rows, `width` words apart. Zeros behind rows and
// columns, up to the next multiples of 32 rows and 16 columns.
static inline void pack_columns(const element* x, long long stride, int rows, int columns, int width, word* out) {
    for (int row = 0; row < rows; row += 32) {
        for (int d = 0; d < columns; d += 16) {
            const element* from = x + row * stride + d;
            wvec words[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i, from += 2 * stride) {
                const int left = rows - row - 2 * i;
                const wvec low = widen_to_words(from, left > 0 ? columns - d : 0);
                words[i] = low | widen_to_words(from + stride, left > 1 ? columns - d : 0) << 16;
            }
            transpose(words);
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) {
                *reinterpret_cast<wvec*>(out + (d + i) * width + row / 2) = words[i];
            }
        }
    }
}

// Owned rows of `columns` elements as a panel: out[depth][lane], 0 in lanes from `rows` on and behind the row.
static inline void pack_panel(const element* x, long long stride, int rows, int columns, int depth, word* out) {
    for (int lane = 0; lane < kPanel; lane += 16) {
        for (int d = 0; d < depth; d += 16) {
            wvec words[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) {
                const bool inside = lane + i < rows;
                words[i] = load_words(inside ? x + (lane + i) * stride + 2 * d : x, inside ? columns - 2 * d : 0);
            }
            transpose(words);
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) {
                *reinterpret_cast<wvec*>(out + (d + i) * kPanel + lane) = words[i];
            }
        }
    }
}

// The first `rows` lanes of panel[d][lane] * factor[lane] as rows of `columns` elements.
static inline void unpack_panel(const float* panel, const float* factor, int rows, int columns, element* out,
                                long long stride) {
    for (int lane = 0; lane < rows; lane += 16) {
        for (int d = 0; d < columns; d += 16) {
            wvec words[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) {
                words[i] = narrow(load(panel + (d + i) * kPanel + lane) * load(factor + lane));
            }
            transpose(words);
            for (int i = 0; i < min(16, rows - lane); ++i) {
                const halves row = __builtin_convertvector(words[i], halves);
                element* to = out + (lane + i) * stride + d;
                if (d + 16 <= columns) {
                    __builtin_memcpy(to, &row, sizeof(row));
                } else {
                    __builtin_memcpy(to, &row, (columns - d) * sizeof(element));
                }
            }
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
extern "C" void attnforge_fwd_cpu_bf16_d128_spans_a4_m32_n128_h8_l16_r32_c2_p1_x1_schedule(const Params* p) {
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
    word v[kTileN / 2 * kColumnsV];  // by columns
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
    fill_tile_register(weights, (keys + 1) / 2);
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
    pack_columns(v, p->v.row, keys, kHeadDimV, kSteps, s.v);
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
extern "C" void attnforge_fwd_cpu_bf16_d128_spans_a4_m32_n128_h8_l16_r32_c2_p1_x1(const Params* p) {
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
        const TileRegisters registers;
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
