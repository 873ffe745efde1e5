// attnforge_bwd_sm80_fp32_d128_spans_a16_m32_n64_w8_s1_a2_c4_d2_p1_b1_h0_o0
// Generated from templates/sm80/backward_fp32.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction bwd --arch sm80 --dtype fp32 --head-dim 128 --mask spans --align 16
//     --set tile_m=32 --set tile_n=64 --set warps=8 --set stages=1 --set warps_sdp=2
//     --set warps_dkv=4 --set warps_dq=2 --set grad_splits=1 --set blocks=1
//     --set split_heads=0 --set deterministic=0
//
//   tile_m          32   query rows per step of the main loop
//   tile_n          64   keys per block
//   warps            8   warps per block
//   stages           1   shared-memory buffers for Q and for dO
//   warps_sdp        2   warps along the queries in S and dP; the rest split the keys
//   warps_dkv        4   warps along the keys in dK and dV; the rest split head_dim
//   warps_dq         2   warps along the queries in dQ; the rest split head_dim
//   grad_splits      1   groups of a warp's columns of dK, dV and dQ that a step computes one after the other
//   blocks           1   resident blocks per multiprocessor, for which registers are limited
//   split_heads      0   1: a block per q head (dK, dV summed in memory), not per kv head
//   deterministic    0   1: blocks add to dQ, dK and dV in a fixed order: the same bits on every run

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
    int padded_q;  // tiles_m * tile_m
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;
constexpr int kHeadDimV = 128;
constexpr int kTileM = 32;  // query rows of a step
constexpr int kTileN = 64;  // keys of a block
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kStages = 1;  // buffers of Q and of dO
constexpr int kStepsD = 16;   // k8 steps of Q K^T, the last one filled up with zeros
constexpr int kStepsDV = 16;  // of dO V^T
constexpr int kPitch = 132;  // floats between rows of Q and K in shared memory
constexpr int kPitchV = 132;  // of V and dO
constexpr int kPitchS = kTileN + 4;  // of P and dS
constexpr int kQBytes = kTileM * kPitch * 4;
constexpr int kDoBytes = kTileM * kPitchV * 4;
constexpr int kScoreBytes = kTileM * kPitchS * 4;
constexpr int kStatBytes = kTileM * 8;
constexpr float kNoGradients = 1e38f;  // in place of the lse of a row without gradients: infinity has no fraction
// S and dP: warps are a kSdpM x kSdpN grid over (queries, keys).
constexpr int kSdpM = 2;
constexpr int kSdpN = kWarps / kSdpM;
constexpr int kSdpFragsM = kTileM / kSdpM / 16;
constexpr int kSdpFragsN = kTileN / kSdpN / 8;
// dK and dV: warps are a kDkvN x 2 grid over (keys, head_dim).
constexpr int kDkvN = 4;
constexpr int kDkvFragsN = kTileN / kDkvN / 16;
constexpr int kDkFragsD = 8;
constexpr int kDvFragsD = 8;
// dQ: warps are a kDqM x 4 grid over (queries, head_dim).
constexpr int kDqM = 2;
constexpr int kDqFragsM = kTileM / kDqM / 16;
constexpr int kDqFragsD = 4;
// Fragments of a row of dK, dV and dQ in a split of their columns: those are summed at a time.
constexpr int kDkSplit = 8;
constexpr int kDvSplit = 8;
constexpr int kDqSplit = 4;
// Shared memory. What lies behind a tile may be read as columns past head_dim, whose results are dropped.
constexpr int kOffsetK = 0;
constexpr int kOffsetV = kOffsetK + kTileN * kPitch * 4;
constexpr int kOffsetQ = kOffsetV + kTileN * kPitchV * 4;
constexpr int kOffsetDo = kOffsetQ + kStages * kQBytes;
constexpr int kOffsetP = kOffsetDo + kStages * kDoBytes;
constexpr int kOffsetDs = kOffsetP + kScoreBytes;
constexpr int kOffsetStats = kOffsetDs + kScoreBytes;
constexpr int kOffsetSpans = kOffsetStats + kStages * kStatBytes;
constexpr int kSharedBytes = kOffsetSpans + kTileN * 8;
static_assert(kSharedBytes == 119552, "codegen/families/sm80_fp32.py disagrees");

// ---- PTX: one instruction per function -----------------------------------------------------------------------------

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Thread: copy `bytes` of 16 bytes to shared memory in the background and fill up with zeros; 0 reads nothing.
__device__ __forceinline__ void cp_async(unsigned dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// Thread: copy 8 bytes (lse and delta of one row) to shared memory in the background.
__device__ __forceinline__ void cp_async_stat(unsigned dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
}

// Thread: close the group of copies issued since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Thread: wait until at most 0 of this thread's groups are in flight.
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Thread: wait for all its groups.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Warp: four matrices of 8 rows x 4 floats; lane l gives the address of row l % 8 of matrix l / 8 and gets element
// (l / 4, l % 4) of each. To ldmatrix a float is two 16-bit elements.
__device__ __forceinline__ void ldmatrix(float (&x)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address)
                 : "memory");
}

// Warp: d += a b for a 16x8, b 8x8 of tf32 values; fragments as in the PTX manual. Not volatile: removed if unused.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Thread: the smaller of x and y, NaN if one of them is.
__device__ __forceinline__ float min_or_nan(float x, float y) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
    return least;
}

// Thread: 2^x, about 2 ulp.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- Shared-memory tiles -------------------------------------------------------------------------------------------

constexpr int kWide = 4;  // floats of one copy: as many as the alignment of rows allows

// Block: copy kTileM rows of a (seq, kHeadDim) matrix; rows from `valid` on become zeros. What follows a row in shared
// memory, up to a multiple of 8 columns, is zero before and after.
__device__ __forceinline__ void load_q_tile(unsigned tile, const float* src, long long stride, int valid) {
    constexpr int row_threads = 32;
    constexpr int row_step = kThreads / row_threads;
    const int first_row = threadIdx.x / row_threads;
    const int first_copy = threadIdx.x % row_threads;
    tile += (first_row * kPitch + first_copy * kWide) * 4;
    src += first_row * stride + first_copy * kWide;
#pragma unroll
    for (int i = 0; i < (kTileM + row_step - 1) / row_step; ++i) {
        const int row = first_row + i * row_step;
#pragma unroll
        for (int copy = 0; copy < 32; copy += row_threads) {
            const int left = kHeadDim - (first_copy + copy) * kWide;  // columns of the row from here on
            if ((kTileM % row_step == 0 || row < kTileM) && (32 % row_threads == 0 || left > 0)) {
                const int bytes = kHeadDim % kWide == 0 ? kWide * 4 : min(left, kWide) * 4;
                const unsigned target = tile + (i * row_step * kPitch + copy * kWide) * 4;
                cp_async(target, src + copy * kWide, row < valid ? bytes : 0);
            }
        }
        src += row_step * stride;
    }
}

// Block: copy kTileM rows of a (seq, kHeadDimV) matrix; rows from `valid` on become zeros. What follows a row in shared
// memory, up to a multiple of 8 columns, is zero before and after.
__device__ __forceinline__ void load_do_tile(unsigned tile, const float* src, long long stride, int valid) {
    constexpr int row_threads = 32;
    constexpr int row_step = kThreads / row_threads;
    const int first_row = threadIdx.x / row_threads;
    const int first_copy = threadIdx.x % row_threads;
    tile += (first_row * kPitchV + first_copy * kWide) * 4;
    src += first_row * stride + first_copy * kWide;
#pragma unroll
    for (int i = 0; i < (kTileM + row_step - 1) / row_step; ++i) {
        const int row = first_row + i * row_step;
#pragma unroll
        for (int copy = 0; copy < 32; copy += row_threads) {
            const int left = kHeadDimV - (first_copy + copy) * kWide;  // columns of the row from here on
            if ((kTileM % row_step == 0 || row < kTileM) && (32 % row_threads == 0 || left > 0)) {
                const int bytes = kHeadDimV % kWide == 0 ? kWide * 4 : min(left, kWide) * 4;
                const unsigned target = tile + (i * row_step * kPitchV + copy * kWide) * 4;
                cp_async(target, src + copy * kWide, row < valid ? bytes : 0);
            }
        }
        src += row_step * stride;
    }
}

// Block: copy kTileN rows of a (seq, kHeadDim) matrix; rows from `valid` on become zeros. What follows a row in shared
// memory, up to a multiple of 8 columns, is zero before and after.
__device__ __forceinline__ void load_k_tile(unsigned tile, const float* src, long long stride, int valid) {
    constexpr int row_threads = 32;
    constexpr int row_step = kThreads / row_threads;
    const int first_row = threadIdx.x / row_threads;
    const int first_copy = threadIdx.x % row_threads;
    tile += (first_row * kPitch + first_copy * kWide) * 4;
    src += first_row * stride + first_copy * kWide;
#pragma unroll
    for (int i = 0; i < (kTileN + row_step - 1) / row_step; ++i) {
        const int row = first_row + i * row_step;
#pragma unroll
        for (int copy = 0; copy < 32; copy += row_threads) {
            const int left = kHeadDim - (first_copy + copy) * kWide;  // columns of the row from here on
            if ((kTileN % row_step == 0 || row < kTileN) && (32 % row_threads == 0 || left > 0)) {
                const int bytes = kHeadDim % kWide == 0 ? kWide * 4 : min(left, kWide) * 4;
                const unsigned target = tile + (i * row_step * kPitch + copy * kWide) * 4;
                cp_async(target, src + copy * kWide, row < valid ? bytes : 0);
            }
        }
        src += row_step * stride;
    }
}

// Block: copy kTileN rows of a (seq, kHeadDimV) matrix; rows from `valid` on become zeros. What follows a row in shared
// memory, up to a multiple of 8 columns, is zero before and after.
__device__ __forceinline__ void load_v_tile(unsigned tile, const float* src, long long stride, int valid) {
    constexpr int row_threads = 32;
    constexpr int row_step = kThreads / row_threads;
    const int first_row = threadIdx.x / row_threads;
    const int first_copy = threadIdx.x % row_threads;
    tile += (first_row * kPitchV + first_copy * kWide) * 4;
    src += first_row * stride + first_copy * kWide;
#pragma unroll
    for (int i = 0; i < (kTileN + row_step - 1) / row_step; ++i) {
        const int row = first_row + i * row_step;
#pragma unroll
        for (int copy = 0; copy < 32; copy += row_threads) {
            const int left = kHeadDimV - (first_copy + copy) * kWide;  // columns of the row from here on
            if ((kTileN % row_step == 0 || row < kTileN) && (32 % row_threads == 0 || left > 0)) {
                const int bytes = kHeadDimV % kWide == 0 ? kWide * 4 : min(left, kWide) * 4;
                const unsigned target = tile + (i * row_step * kPitchV + copy * kWide) * 4;
                cp_async(target, src + copy * kWide, row < valid ? bytes : 0);
            }
        }
        src += row_step * stride;
    }
}

// Thread: write x and y to columns `column` (even) and `column + 1` of a row of `width`, as far as it has them.
__device__ __forceinline__ void store_pair(float* row, int column, int width, float x, float y) {
    if (column < width) {
        *reinterpret_cast<float2*>(row + column) = make_float2(x, y);
    }
}

// ---- Products ------------------------------------------------------------------------------------------------------
// x = big + small, both tf32: big holds the upper 11 bits of the significand, rounded, and small the other 12 but for
// the last one at times. A product is big * big and the rest, small * big + big * small. Tensor cores round sums
// towards zero: the rest has sums of its own (`rest`), or comes first.

constexpr int kTerms = 3;
constexpr int kChain = 2;  // k8 steps of S and dP that tensor cores sum on their own

struct Left {  // 16 x 8: big, small
    unsigned split[2][4];
};

struct Right {  // 8 x 8: big, small
    unsigned split[2][2];
};

// Thread: big and small of x. The tensor cores cut off what tf32 has no bits for.
__device__ __forceinline__ void split(float x, unsigned& big, unsigned& small) {
    big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    small = __float_as_uint(x - __uint_as_float(big));
}

__device__ __forceinline__ Left split_left(float x0, float x1, float x2, float x3) {
    Left a;
    split(x0, a.split[0][0], a.split[1][0]);
    split(x1, a.split[0][1], a.split[1][1]);
    split(x2, a.split[0][2], a.split[1][2]);
    split(x3, a.split[0][3], a.split[1][3]);
    return a;
}

__device__ __forceinline__ Right split_right(float x0, float x1) {
    Right b;
    split(x0, b.split[0][0], b.split[1][0]);
    split(x1, b.split[0][1], b.split[1][1]);
    return b;
}

// Warp: d += the products of one term; see kTerms.
__device__ __forceinline__ void multiply(float (&d)[4], const Left& a, const Right& b, int term) {
    mma(d, a.split[term == 2], b.split[term == 1]);
}

// Warp: sum[i][j] + rest[i][j] += a[i] b[j]: big * big goes to `sum`, the small terms to `rest`. Term after term, so
// that no product waits for the one before.
template <int rows, int columns>
__device__ __forceinline__ void add_products(float (&sum)[rows][columns][4], float (&rest)[rows][columns][4],
                                             const Left (&a)[rows], const Right (&b)[columns]) {
#pragma unroll
    for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
        for (int i = 0; i < rows; ++i) {
#pragma unroll
            for (int j = 0; j < columns; ++j) {
                multiply(term == 0 ? sum[i][j] : rest[i][j], a[i], b[j], term);
            }
        }
    }
}

// Warp: acc = left right^T, for S and dP; `acc` comes in as zeros. Both operands lie row after row in shared memory,
// `pitch` floats apart, `steps` k8 steps long; `left` and `right` are the warp's ldmatrix addresses. What kChain steps
// give is summed from zero, the small terms first, so that it is cut off only as often and while it is small; `acc` is
// rounded. What is cut off of S matters most: it comes back as a factor of P.
template <int steps, int pitch, int rows, int columns>
__device__ __forceinline__ void multiply_rows(float (&acc)[rows][columns][4], unsigned left, unsigned right) {
    constexpr int pair = columns == 1 ? 1 : 2;  // n8 fragments that are read at a time
#pragma unroll
    for (int first = 0; first < steps; first += kChain) {
        Left a[kChain][rows];
#pragma unroll
        for (int c = 0; c < kChain && first + c < steps; ++c) {
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                float x[4];
                ldmatrix(x, left + (first + c) * 32 + i * 16 * pitch * 4);
                a[c][i] = split_left(x[0], x[1], x[2], x[3]);
            }
        }
#pragma unroll
        for (int j0 = 0; j0 < columns; j0 += pair) {
            Right b[kChain][2];
#pragma unroll
            for (int c = 0; c < kChain && first + c < steps; ++c) {
                float x[4];
                ldmatrix(x, right + (first + c) * 32 + j0 * 8 * pitch * 4);
                b[c][0] = split_right(x[0], x[1]);
                b[c][1] = split_right(x[2], x[3]);
            }
            float sum[rows][pair][4] = {};
#pragma unroll
            for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
                for (int c = 0; c < kChain && first + c < steps; ++c) {
#pragma unroll
                    for (int i = 0; i < rows; ++i) {
#pragma unroll
                        for (int j = 0; j < pair; ++j) {
                            multiply(sum[i][j], a[c][i], b[c][j], term);
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < rows; ++i) {
#pragma unroll
                for (int j = 0; j < pair; ++j) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        acc[i][j0 + j][e] += sum[i][j][e];
                    }
                }
            }
        }
    }
}

// ---- Mask: spans ---------------------------------------------------------------------------------------------------

// The queries that see key `key` are [x, y).
__device__ __forceinline__ int2 span_of(const Params& p, int key) {
    return key < p.seq_k ? make_int2(__ldg(p.starts + key), __ldg(p.ends + key)) : make_int2(0, 0);
}

// The key tile of the block with this rank; tiles with most work have the lowest rank.
__device__ __forceinline__ int owned_tile(const Params& p, int rank) {
    return __ldg(p.tile_order + rank);
}

// How many query tiles key tile `tile` visits.
__device__ __forceinline__ int visits(const Params& p, int tile) {
    return __ldg(p.tile_count + tile);
}

// Visit number `index`: query tile * 2 + (1 if some of its pairs are hidden).
__device__ __forceinline__ int visit(const Params& p, int tile, int index) {
    return __ldg(p.tile_list + static_cast<long long>(tile) * p.list_stride + index);
}

// ---- Order of the work ---------------------------------------------------------------------------------------------

// Bytes of the L2 cache that Q, dO and the sums of dQ of a section of heads may take.
// The L2 cache of an H200 has 50 MB. How the value was chosen: docs/experiments.md, 11 and 89.
constexpr long long kCacheBytes = 40 << 20;

// Which tile of which head; rank 0 is the tile with most work.
struct Place {
    int rank, head, batch;
};

// Work starts in the order of its index. Heads come in sections whose operands fit the L2 cache together; in a section
// all heads' largest tiles come first.
__device__ __forceinline__ Place place_of(const Params& p, int index) {
    const int heads = p.heads_kv;
    const int together = 1;
    const long long bytes = 16LL * kHeadDim * p.seq_q;
    const long long planes = static_cast<long long>(heads / together) * p.batch;
    const int fits = static_cast<int>(min(max(kCacheBytes / bytes, 1LL), planes));
    const int section = fits * together;
    const int first = index / (section * p.tiles_n) * section;
    const int width = min(section, heads * p.batch - first);  // the last section may be narrower
    const int rest = index - first * p.tiles_n;
    const int plane = first + rest % width;
    return {rest / width, plane % heads, plane / heads};
}

// ---- Tile schedule from starts/ends: built once per mask on the device, shared by all layers and heads -------------

constexpr int kScheduleThreads = 128;
constexpr int kRowGroups = 1;  // row groups of a query tile
constexpr unsigned kSomeRowGroups = (1u << kRowGroups) - 1;

// Block: `total` plus the number of threads before this one in which `mine` is true. `total` grows by the number in the
// whole block; `votes` holds a ballot for each warp.
__device__ __forceinline__ int count_before(bool mine, unsigned (&votes)[kScheduleThreads / 32], int& total) {
    const int warp = threadIdx.x / 32;
    __syncthreads();  // the previous votes have been read
    const unsigned own = __ballot_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) {
        votes[warp] = own;
    }
    __syncthreads();
    int before = total + __popc(own & ((1u << threadIdx.x % 32) - 1));
    for (int w = 0; w < kScheduleThreads / 32; ++w) {
        before += w < warp ? __popc(votes[w]) : 0;
        total += __popc(votes[w]);
    }
    return before;
}

constexpr int kUnit = kTileM / kRowGroups;  // query rows of a row group
constexpr int kKeysOfThread = (kTileN + kScheduleThreads - 1) / kScheduleThreads;

// The keys of a tile, as the threads of a block hold them.
struct Keys {
    int2 units[kKeysOfThread];  // row groups with queries that see the key: [x, y)
    int latest, earliest;       // the latest start and the earliest end of all keys of the tile
};

// Block: the keys of a tile.
__device__ __forceinline__ Keys load_keys(const Params& p, int key_tile) {
    __shared__ int latest[kScheduleThreads / 32];
    __shared__ int earliest[kScheduleThreads / 32];
    Keys keys;
    keys.latest = 0;
    keys.earliest = p.seq_q;
#pragma unroll
    for (int i = 0; i < kKeysOfThread; ++i) {
        const int in_tile = i * kScheduleThreads + threadIdx.x;
        keys.units[i] = make_int2(0, 0);
        if (in_tile < kTileN) {
            const int2 span = span_of(p, key_tile * kTileN + in_tile);
            keys.latest = max(keys.latest, span.x);
            keys.earliest = min(keys.earliest, span.y);
            const int first = max(span.x, 0);
            const int last = min(span.y, p.seq_q);
            if (first < last) {
                keys.units[i] = make_int2(first / kUnit, (last - 1) / kUnit + 1);
            }
        }
    }
    latest[threadIdx.x / 32] = __reduce_max_sync(~0u, keys.latest);
    earliest[threadIdx.x / 32] = __reduce_min_sync(~0u, keys.earliest);
    __syncthreads();
    for (int warp = 0; warp < kScheduleThreads / 32; ++warp) {
        keys.latest = max(keys.latest, latest[warp]);
        keys.earliest = min(keys.earliest, earliest[warp]);
    }
    return keys;
}

// Block: how query tile `base` + threadIdx.x sees the keys: a bit for each row group that sees some pair, then one for
// each that misses some; 0 if none is seen. `seen` is how many keys the last row group before `base` sees; it advances.
__device__ __forceinline__ unsigned find_kind(const Params& p, const Keys& keys, int base, int& seen) {
    constexpr int units = kScheduleThreads * kRowGroups;
    __shared__ int changes[units];  // how many more keys a row group sees than the one before it
    __shared__ int sums[kScheduleThreads / 32];
    for (int i = threadIdx.x; i < units; i += kScheduleThreads) {
        changes[i] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeysOfThread; ++i) {
        const unsigned first = keys.units[i].x - base * kRowGroups;
        const unsigned last = keys.units[i].y - base * kRowGroups;
        if (first < units && first != last) {
            atomicAdd(&changes[first], 1);
        }
        if (last < units && first != last) {
            atomicAdd(&changes[last], -1);
        }
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    int sum = 0;
    int group_keys[kRowGroups];
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
        sum += changes[threadIdx.x * kRowGroups + group];
        group_keys[group] = sum;
    }
    int before = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, before, distance);
        before += lane >= distance ? other : 0;
    }
    if (lane == 31) {
        sums[threadIdx.x / 32] = before;
    }
    __syncthreads();
    before += seen - sum;
    for (int warp = 0; warp < kScheduleThreads / 32; ++warp) {
        before += warp < threadIdx.x / 32 ? sums[warp] : 0;
        seen += sums[warp];
    }
    unsigned kind = 0;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
        const int first = (base + threadIdx.x) * kTileM + group * kUnit;
        const int last = min(first + kUnit, p.seq_q);
        kind |= (before + group_keys[group] > 0) << group;
        kind |= (keys.latest > first || keys.earliest < last) << kRowGroups + group;
    }
    return kind & kSomeRowGroups ? kind : 0;
}

// One block per owned tile: list the tiles it must visit, in ascending order.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_bwd_sm80_fp32_d128_spans_a16_m32_n64_w8_s1_a2_c4_d2_p1_b1_h0_o0_schedule(const __grid_constant__ Params p) {
    __shared__ unsigned votes[kScheduleThreads / 32];
    const int tile = blockIdx.x;
    int* list = p.tile_list + static_cast<long long>(tile) * p.list_stride;
    const Keys keys = load_keys(p, tile);
    int seen = 0;
    int total = 0;
    for (int base = 0; base < p.tiles_m; base += kScheduleThreads) {
        const int visited = base + threadIdx.x;
        const unsigned kind = find_kind(p, keys, base, seen);
        const int slot = count_before(kind != 0, votes, total);
        if (kind != 0) {
            list[slot] = visited << kRowGroups | kind >> kRowGroups;
        }
    }
    if (threadIdx.x == 0) {
        p.tile_count[tile] = total;
    }
}

// One block per owned tile: its rank is the number of tiles with more work, earlier tiles winning ties.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_bwd_sm80_fp32_d128_spans_a16_m32_n64_w8_s1_a2_c4_d2_p1_b1_h0_o0_order(const __grid_constant__ Params p) {
    const int tile = blockIdx.x;
    const int work = p.tile_count[tile];
    int rank = 0;
    for (int base = 0; base < p.tiles_n; base += kScheduleThreads) {
        const int other = base + threadIdx.x;
        const int theirs = other < p.tiles_n ? p.tile_count[other] : -1;
        rank += __syncthreads_count(theirs > work || (theirs == work && other < tile));
    }
    if (threadIdx.x == 0) {
        p.tile_order[rank] = tile;
    }
}

// ---- Work of a block -----------------------------------------------------------------------------------------------

// A key tile of a kv head, for all q heads that share it.
struct Work {
    int batch, head_kv, tile;
    int group;  // q heads of the kv head
    int visits;  // query tiles of each q head
    int steps;  // query tiles to visit, head after head
};

__device__ __forceinline__ Work work_at(const Params& p, int index) {
    const Place place = place_of(p, index);
    Work work;
    work.batch = place.batch;
    work.head_kv = place.head;
    work.group = p.heads_q / p.heads_kv;
    work.tile = owned_tile(p, place.rank);
    work.visits = visits(p, work.tile);
    work.steps = work.visits * work.group;
    return work;
}

// What a step visits.
struct QueryTile {
    int head, tile;
    bool masked;  // does the mask hide some pairs?
};

__device__ __forceinline__ QueryTile query_tile_at(const Params& p, const Work& work, int step) {
    QueryTile query;
    const int index = step % work.visits;
    query.head = work.head_kv * work.group + step / work.visits;
    const int entry = visit(p, work.tile, index);
    query.tile = entry >> 1;
    query.masked = entry & 1;
    return query;
}

// Warp: dS = P * (dP - delta), in the registers of dP. `stats` holds (lse, delta) of the tile's rows.
__device__ __forceinline__ void subtract_delta(float (&dp)[kSdpFragsM][kSdpFragsN][4],
                                               const float (&p)[kSdpFragsM][kSdpFragsN][4], const float2* stats) {
    const int row0 = threadIdx.x / 32 % kSdpM * kSdpFragsM * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < kSdpFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float delta = stats[row0 + i * 16 + half * 8].y;
#pragma unroll
            for (int j = 0; j < kSdpFragsN; ++j) {
#pragma unroll
                for (int e = half * 2; e < half * 2 + 2; ++e) {
                    dp[i][j][e] = p[i][j][e] * (dp[i][j][e] - delta);
                }
            }
        }
    }
}

// Warp: set P to 0 where the mask hides a pair. `query0` is the thread's first query, `key0` the
// warp's first key; `spans` are those of its keys, in shared memory.
__device__ __forceinline__ void apply_mask(const Params& p, float (&s)[kSdpFragsM][kSdpFragsN][4],
                                           const int2* spans, int query0, int key0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kSdpFragsN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = j * 8 + lane % 4 * 2 + c;
            const int2 span = spans[column];
#pragma unroll
            for (int i = 0; i < kSdpFragsM; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int query = query0 + i * 16 + half * 8;
                    const bool seen = query >= span.x && query < span.y;
                    s[i][j][half * 2 + c] = seen ? s[i][j][half * 2 + c] : 0.0f;
                }
            }
        }
    }
}

// ---- Products of tiles ---------------------------------------------------------------------------------------------

// Warp: dV += P^T dO. `left` and `right` are the thread's first elements of the two tiles: row lane % 4 * 2, and of the
// first the column of key lane / 4, of the second column lane / 4. Index t of a product is query 2t, t + 4 is 2t + 1.
__device__ __forceinline__ void add_dv(float (&acc)[kDkvFragsN][kDvFragsD][4], const float* left,
                                       const float* right) {
#pragma unroll
    for (int first = 0; first < kDvFragsD; first += kDvSplit) {
        float share[kDkvFragsN][kDvSplit][4] = {};
        float rest[kDkvFragsN][kDvSplit][4] = {};
#pragma unroll
        for (int step = 0; step < kTileM / 8; ++step) {
            Left a[kDkvFragsN];
#pragma unroll
            for (int i = 0; i < kDkvFragsN; ++i) {
                const float* x = left + step * 8 * kPitchS + i * 16;
                a[i] = split_left(x[0], x[8], x[kPitchS], x[kPitchS + 8]);
            }
            Right b[kDvSplit];
#pragma unroll
            for (int j = 0; j < kDvSplit; ++j) {
                const float* x = right + step * 8 * kPitchV + (first + j) * 8;
                b[j] = split_right(x[0], x[kPitchV]);
            }
            add_products(share, rest, a, b);
        }
#pragma unroll
        for (int i = 0; i < kDkvFragsN; ++i) {
#pragma unroll
            for (int j = 0; j < kDvSplit; ++j) {
#pragma unroll
                for (int e = 0; e < 4 && first + j < kDvFragsD; ++e) {
                    acc[i][first + j][e] += share[i][j][e] + rest[i][j][e];
                }
            }
        }
    }
}

// Warp: dK += dS^T Q. `left` and `right` are the thread's first elements of the two tiles: row lane % 4 * 2, and of the
// first the column of key lane / 4, of the second column lane / 4. Index t of a product is query 2t, t + 4 is 2t + 1.
__device__ __forceinline__ void add_dk(float (&acc)[kDkvFragsN][kDkFragsD][4], const float* left,
                                       const float* right) {
#pragma unroll
    for (int first = 0; first < kDkFragsD; first += kDkSplit) {
        float share[kDkvFragsN][kDkSplit][4] = {};
        float rest[kDkvFragsN][kDkSplit][4] = {};
#pragma unroll
        for (int step = 0; step < kTileM / 8; ++step) {
            Left a[kDkvFragsN];
#pragma unroll
            for (int i = 0; i < kDkvFragsN; ++i) {
                const float* x = left + step * 8 * kPitchS + i * 16;
                a[i] = split_left(x[0], x[8], x[kPitchS], x[kPitchS + 8]);
            }
            Right b[kDkSplit];
#pragma unroll
            for (int j = 0; j < kDkSplit; ++j) {
                const float* x = right + step * 8 * kPitch + (first + j) * 8;
                b[j] = split_right(x[0], x[kPitch]);
            }
            add_products(share, rest, a, b);
        }
#pragma unroll
        for (int i = 0; i < kDkvFragsN; ++i) {
#pragma unroll
            for (int j = 0; j < kDkSplit; ++j) {
#pragma unroll
                for (int e = 0; e < 4 && first + j < kDkFragsD; ++e) {
                    acc[i][first + j][e] += share[i][j][e] + rest[i][j][e];
                }
            }
        }
    }
}

// Thread: add a float to device memory.
__device__ __forceinline__ void add_to(float* target, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(target), "f"(x) : "memory");
}

// Thread: add x and y to columns `column` (even) and `column + 1` of a row of `width`, as far as it has them.
__device__ __forceinline__ void add_pair(float* row, int column, int width, float x, float y) {
    if (column < width) {
        add_to(row + column, x);
    }
    if (column + 1 < width) {
        add_to(row + column + 1, y);
    }
}

// Warp: dQ += scale * dS K for the first `rows` rows of the tile at `dq`. `left` is the warp's ldmatrix address in dS,
// `right` the thread's first element of K: row lane % 4 * 2, column lane / 4 of the warp's columns, from `column0`.
__device__ __forceinline__ void add_dq(float* dq, long long stride, int rows, float scale, unsigned left,
                                       const float* right, int row0, int column0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < kDqFragsD; first += kDqSplit) {
        float share[kDqFragsM][kDqSplit][4] = {};
        float rest[kDqFragsM][kDqSplit][4] = {};
#pragma unroll
        for (int step = 0; step < kTileN / 8; ++step) {
            Left a[kDqFragsM];
#pragma unroll
            for (int i = 0; i < kDqFragsM; ++i) {
                float x[4];
                ldmatrix(x, left + step * 32 + i * 16 * kPitchS * 4);
                a[i] = split_left(x[0], x[1], x[2], x[3]);
            }
            Right b[kDqSplit];
#pragma unroll
            for (int j = 0; j < kDqSplit; ++j) {
                const float* x = right + step * 8 * kPitch + (first + j) * 8;
                b[j] = split_right(x[0], x[kPitch]);
            }
            add_products(share, rest, a, b);
        }
#pragma unroll
        for (int i = 0; i < kDqFragsM; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row0 + lane / 4 + i * 16 + half * 8;
                if (row < rows) {
#pragma unroll
                    for (int j = 0; j < kDqSplit && first + j < kDqFragsD; ++j) {
                        const int column = column0 + (first + j) * 8 + lane % 4 * 2;
                        const float* x = share[i][j] + half * 2;
                        const float* y = rest[i][j] + half * 2;
                        add_pair(dq + row * stride, column, kHeadDim, (x[0] + y[0]) * scale, (x[1] + y[1]) * scale);
                    }
                }
            }
        }
    }
}

// ---- Steps of the main loop ----------------------------------------------------------------------------------------

// Warp: P = 2^(S - lse), 0 where hidden. `stats` holds (lse, delta) of the tile's rows. Both S and lse are split into
// whole powers of two, which are exact, and what remains: a float has no bits for the fractions of numbers near 10.
// Where S is so large that it has none either, what remains is anything, and the bounds keep P finite.
__device__ __forceinline__ void probabilities(const Params& p, float (&s)[kSdpFragsM][kSdpFragsN][4],
                                              const QueryTile& query, const float2* stats,
                                              const int2* spans, int key0) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row0 = warp % kSdpM * kSdpFragsM * 16 + lane / 4;
    const float log2e = 1.44269502f;
    const float log2e_rest = 1.92596303e-8f;
    const float rounder = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
#pragma unroll
    for (int i = 0; i < kSdpFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float lse = stats[row0 + i * 16 + half * 8].x;
            const float whole = rintf(lse * log2e);
            const float rest = fmaf(lse, log2e, -whole) + lse * log2e_rest;
            // Of a row without gradients (_preprocess) P is 0 even where S is larger than what stands for its lse.
            const float most = lse == kNoGradients ? __int_as_float(0xff800000) : 2.0f;
#pragma unroll
            for (int j = 0; j < kSdpFragsN; ++j) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& value = s[i][j][half * 2 + c];
                    const float power = fmaf(value, p.scale_log2, rounder) - rounder;
                    const float fraction = min_or_nan(fmaf(value, p.scale_log2, -power) - rest, 2.0f);
                    value = exp2_approx(fraction) * exp2_approx(fminf(power - whole, most));
                }
            }
        }
    }
    if (query.masked) {
        const int column0 = warp / kSdpM * kSdpFragsN * 8;
        apply_mask(p, s, spans + column0, query.tile * kTileM + row0, key0 + column0);
    }
}

// Column of shared memory in which P and dS keep key `key`: even keys of each 8 come first. ldmatrix then reads keys
// 2t and 2t + 1 as index t and t + 4.
__device__ __forceinline__ int score_column(int key) { return key / 8 * 8 + key % 2 * 4 + key % 8 / 2; }

// Warp: put a (queries x keys) fragment grid into shared memory at `tile`.
__device__ __forceinline__ void store_scores(float* tile, const float (&s)[kSdpFragsM][kSdpFragsN][4]) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row = warp % kSdpM * kSdpFragsM * 16 + lane / 4;
    float* target = tile + row * kPitchS + warp / kSdpM * kSdpFragsN * 8 + lane % 4;
#pragma unroll
    for (int i = 0; i < kSdpFragsM; ++i) {
#pragma unroll
        for (int j = 0; j < kSdpFragsN; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                target[(i * 16 + e / 2 * 8) * kPitchS + j * 8 + e % 2 * 4] = s[i][j][e];
            }
        }
    }
}

// Warp: write dk of the key tile's first `keys` keys, times `factor`.
__device__ __forceinline__ void store_dk(float* out, long long stride, const float (&acc)[kDkvFragsN][kDkFragsD][4],
                                         float factor, int keys) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row0 = warp % kDkvN * kDkvFragsN * 16 + lane / 4;
    const int col0 = warp / kDkvN * kDkFragsD * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDkvFragsN; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + i * 16 + half * 8;
            if (row < keys) {
#pragma unroll
                for (int j = 0; j < kDkFragsD; ++j) {
                    const float* x = acc[i][j] + half * 2;
                    const int column = col0 + j * 8;
                    store_pair(out + row * stride, column, kHeadDim, x[0] * factor, x[1] * factor);
                }
            }
        }
    }
}

// Warp: write dv of the key tile's first `keys` keys, times `factor`.
__device__ __forceinline__ void store_dv(float* out, long long stride, const float (&acc)[kDkvFragsN][kDvFragsD][4],
                                         float factor, int keys) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row0 = warp % kDkvN * kDkvFragsN * 16 + lane / 4;
    const int col0 = warp / kDkvN * kDvFragsD * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDkvFragsN; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + i * 16 + half * 8;
            if (row < keys) {
#pragma unroll
                for (int j = 0; j < kDvFragsD; ++j) {
                    const float* x = acc[i][j] + half * 2;
                    const int column = col0 + j * 8;
                    store_pair(out + row * stride, column, kHeadDimV, x[0] * factor, x[1] * factor);
                }
            }
        }
    }
}

// ---- Main loop -----------------------------------------------------------------------------------------------------

// What a block keeps from step to step.
struct Gradients {
    float dk[kDkvFragsN][kDkFragsD][4];
    float dv[kDkvFragsN][kDvFragsD][4];
};

// Where this warp reads the operands of the products, relative to the tiles: ldmatrix addresses, in bytes, or the
// thread's first element, in floats.
struct Operands {
    unsigned q_left, do_left, k_right, v_right;  // S and dP: bytes
    int dkv_left, do_right, q_right;             // dV and dK: floats
    unsigned ds_left;                            // dQ: bytes
    int dq_right, dq_row, dq_column;             // floats; where the warp's share of dQ begins
};

__device__ __forceinline__ Operands operands_of(int warp, int lane) {
    const int left_row = warp % kSdpM * kSdpFragsM * 16 + (lane & 15);
    const int right_row = warp / kSdpM * kSdpFragsN * 8 + (lane >> 4) * 8 + (lane & 7);
    Operands at;
    at.q_left = (left_row * kPitch + (lane >> 4) * 4) * 4;
    at.do_left = (left_row * kPitchV + (lane >> 4) * 4) * 4;
    at.k_right = (right_row * kPitch + (lane >> 3 & 1) * 4) * 4;
    at.v_right = (right_row * kPitchV + (lane >> 3 & 1) * 4) * 4;
    at.dkv_left = lane % 4 * 2 * kPitchS + warp % kDkvN * kDkvFragsN * 16 + score_column(lane / 4);
    at.do_right = lane % 4 * 2 * kPitchV + warp / kDkvN * kDvFragsD * 8 + lane / 4;
    at.q_right = lane % 4 * 2 * kPitch + warp / kDkvN * kDkFragsD * 8 + lane / 4;
    at.dq_row = warp % kDqM * kDqFragsM * 16;
    at.dq_column = warp / kDqM * kDqFragsD * 8;
    at.ds_left = ((at.dq_row + (lane & 15)) * kPitchS + (lane >> 4) * 4) * 4;
    at.dq_right = lane % 4 * 2 * kPitch + at.dq_column + lane / 4;
    return at;
}

// Block: start copying Q, dO and their row_stats for step `step` into buffer `stage`.
__device__ __forceinline__ void load_step(const Params& p, const Work& work, unsigned base, int step, int stage) {
    const QueryTile query = query_tile_at(p, work, step);
    const int query0 = query.tile * kTileM;
    const float* q = static_cast<const float*>(p.q.data) + work.batch * p.q.batch + query.head * p.q.head;
    const float* dout = static_cast<const float*>(p.dout.data) + work.batch * p.dout.batch + query.head * p.dout.head;
    load_q_tile(base + kOffsetQ + stage * kQBytes, q + query0 * p.q.row, p.q.row, p.seq_q - query0);
    load_do_tile(base + kOffsetDo + stage * kDoBytes, dout + query0 * p.dout.row, p.dout.row, p.seq_q - query0);
    const long long plane = static_cast<long long>(work.batch) * p.heads_q + query.head;
    const float* stats = p.delta + (plane * p.padded_q + query0) * 2;
    for (int row = threadIdx.x; row < kTileM; row += kThreads) {
        cp_async_stat(base + kOffsetStats + stage * kStatBytes + row * 8, stats + row * 2);
    }
}

// Block: start copying K, V and the first step.
__device__ __forceinline__ void load_first(const Params& p, const Work& work, unsigned base) {
    if (work.steps > 0) {
        const int key0 = work.tile * kTileN;
        const float* k = static_cast<const float*>(p.k.data) + work.batch * p.k.batch + work.head_kv * p.k.head;
        const float* v = static_cast<const float*>(p.v.data) + work.batch * p.v.batch + work.head_kv * p.v.head;
        load_k_tile(base + kOffsetK, k + key0 * p.k.row, p.k.row, p.seq_k - key0);
        load_v_tile(base + kOffsetV, v + key0 * p.v.row, p.v.row, p.seq_k - key0);
        load_step(p, work, base, 0, 0);
    }
    cp_async_commit();
}

// Warp: its share of dQ = scale * dS K of this step, added in memory.
__device__ __forceinline__ void step_dq(const Params& p, const Work& work, int step, unsigned ds, const float* k,
                                        const Operands& at) {
    const QueryTile query = query_tile_at(p, work, step);  // again: to keep it in registers would spill others
    const int query0 = query.tile * kTileM;
    float* dq = static_cast<float*>(p.dq.data) + work.batch * p.dq.batch + query.head * p.dq.head + query0 * p.dq.row;
    add_dq(dq, p.dq.row, p.seq_q - query0, p.scale, ds + at.ds_left, k + at.dq_right, at.dq_row, at.dq_column);
}

// Block: the main loop over query tiles. Copies of K, V and the first step have been started.
__device__ __forceinline__ void walk(const Params& p, const Work& work, unsigned char* shared, unsigned base,
                                     const Operands& at, Gradients& sums) {
    const float* k_tile = reinterpret_cast<const float*>(shared + kOffsetK);
    float* p_tile = reinterpret_cast<float*>(shared + kOffsetP);
    float* ds_tile = reinterpret_cast<float*>(shared + kOffsetDs);
    const int2* spans = reinterpret_cast<const int2*>(shared + kOffsetSpans);
    for (int step = 0; step < work.steps; ++step) {
        const int stage = 0;
        const QueryTile query = query_tile_at(p, work, step);
        const float* q_tile = reinterpret_cast<const float*>(shared + kOffsetQ + stage * kQBytes);
        const float* do_tile = reinterpret_cast<const float*>(shared + kOffsetDo + stage * kDoBytes);
        const float2* stats = reinterpret_cast<const float2*>(shared + kOffsetStats + stage * kStatBytes);
        cp_async_wait();
        __syncthreads();  // Q and dO have arrived; P, dS and the other stage have been read

        float s[kSdpFragsM][kSdpFragsN][4] = {};
        multiply_rows<kStepsD, kPitch>(s, base + kOffsetQ + stage * kQBytes + at.q_left, base + kOffsetK + at.k_right);
        probabilities(p, s, query, stats, spans, work.tile * kTileN);
        store_scores(p_tile, s);

        float dp[kSdpFragsM][kSdpFragsN][4] = {};
        const unsigned do_left = base + kOffsetDo + stage * kDoBytes + at.do_left;
        multiply_rows<kStepsDV, kPitchV>(dp, do_left, base + kOffsetV + at.v_right);
        subtract_delta(dp, s, stats);
        store_scores(ds_tile, dp);
        __syncthreads();  // P and dS are complete

        step_dq(p, work, step, base + kOffsetDs, k_tile, at);
        add_dv(sums.dv, p_tile + at.dkv_left, do_tile + at.do_right);
        add_dk(sums.dk, ds_tile + at.dkv_left, q_tile + at.q_right);

        __syncthreads();  // Q and dO have been read
        if (step + 1 < work.steps) {
            load_step(p, work, base, step + 1, 0);
        }
        cp_async_commit();
    }
}

// ---- Kernels -------------------------------------------------------------------------------------------------------

// Rows with a larger |lse| get no gradients: float32 holds no fraction of such an lse, so exp(S - lse) is not P.
constexpr float kMaxLse = 4194304.0f;  // 2^22

// Thread: (lse, delta) of a query row; (-inf, 0) of one without gradients: past the end, without keys, or |lse| too
// large. `delta` is the row's sum of dO * O; the gradient of lse is taken off, for dS = P (dP - delta + dlse).
__device__ __forceinline__ float2 row_stats(const Params& p, long long plane, int row, float delta) {
    const float lse = row < p.seq_q ? p.lse[plane * p.seq_q + row] : __int_as_float(0xff800000);
    if (fabsf(lse) > kMaxLse) {
        return make_float2(__int_as_float(0xff800000), 0.0f);
    }
    return make_float2(lse, p.dlse == nullptr ? delta : delta - p.dlse[plane * p.seq_q + row]);
}

// Grid: tiles_m x batch x heads_q. row_stats (lse, delta), and zeros where others add.
extern "C" __global__ void __launch_bounds__(kThreads)
attnforge_bwd_sm80_fp32_d128_spans_a16_m32_n64_w8_s1_a2_c4_d2_p1_b1_h0_o0_preprocess(const __grid_constant__ Params p) {
    const int head = blockIdx.x % p.heads_q;
    const int batch = blockIdx.x / p.heads_q % p.batch;
    const int tile = blockIdx.x / (p.heads_q * p.batch);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const long long plane = static_cast<long long>(batch) * p.heads_q + head;
    const float* out = static_cast<const float*>(p.out.data) + batch * p.out.batch + head * p.out.head;
    const float* dout = static_cast<const float*>(p.dout.data) + batch * p.dout.batch + head * p.dout.head;
    float* dq = static_cast<float*>(p.dq.data) + batch * p.dq.batch + head * p.dq.head;
    float2* stats = reinterpret_cast<float2*>(p.delta) + plane * p.padded_q;
    for (int i = warp; i < kTileM; i += kWarps) {
        const int row = tile * kTileM + i;
        float sum = 0.0f;
        if (row < p.seq_q) {
            for (int column = lane; column < kHeadDimV; column += 32) {
                sum += out[row * p.out.row + column] * dout[row * p.dout.row + column];
            }
            for (int column = lane; column < kHeadDim; column += 32) {
                dq[row * p.dq.row + column] = 0.0f;
            }
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
        }
        if (lane == 0) {
            const float2 found = row_stats(p, plane, row, sum);
            stats[row] = make_float2(found.x == __int_as_float(0xff800000) ? kNoGradients : found.x, found.y);
        }
    }
}

// Grid: tiles_n x batch x heads_kv blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
attnforge_bwd_sm80_fp32_d128_spans_a16_m32_n64_w8_s1_a2_c4_d2_p1_b1_h0_o0(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const unsigned base = shared_address(shared);
    const Work work = work_at(p, blockIdx.x);
    const int key0 = work.tile * kTileN;
    Gradients sums = {};
    load_first(p, work, base);
    for (int i = threadIdx.x; i < kTileN; i += kThreads) {
        reinterpret_cast<int2*>(shared + kOffsetSpans)[i] = span_of(p, key0 + i);
    }
    walk(p, work, shared, base, operands_of(threadIdx.x / 32, threadIdx.x % 32), sums);
    cp_async_wait_all();
    float* dk = static_cast<float*>(p.dk.data) + work.batch * p.dk.batch + work.head_kv * p.dk.head + key0 * p.dk.row;
    float* dv = static_cast<float*>(p.dv.data) + work.batch * p.dv.batch + work.head_kv * p.dv.head + key0 * p.dv.row;
    store_dk(dk, p.dk.row, sums.dk, p.scale, p.seq_k - key0);
    store_dv(dv, p.dv.row, sums.dv, 1.0f, p.seq_k - key0);
}
