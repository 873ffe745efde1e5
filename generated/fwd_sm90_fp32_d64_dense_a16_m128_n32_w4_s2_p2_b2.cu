// attnforge_fwd_sm90_fp32_d64_dense_a16_m128_n32_w4_s2_p2_b2
// Generated from templates/sm80/forward_fp32.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch sm90 --dtype fp32 --head-dim 64 --mask dense --align 16
//     --set tile_m=128 --set tile_n=32 --set warps=4 --set stages=2 --set o_splits=2
//     --set blocks=2
//
//   tile_m    128   query rows per block
//   tile_n     32   keys per step of the main loop
//   warps       4   warps per block; each owns tile_m / warps query rows
//   stages      2   shared-memory buffers for K and for V
//   o_splits    2   groups of columns of O that a step computes one after the other; 0: FP32 cores, no tensor cores
//   blocks      2   resident blocks per multiprocessor, for which registers are limited

// A tensor (batch, heads, seq, head_dim): its address, and strides in elements. Rows are contiguous.
struct TensorRef {
    void* data;
    long long batch, head, row;
};

// A bool mask (batch, heads_q, seq_q, seq_k): its address, and strides, 0 where an axis is expanded.
struct MaskRef {
    const unsigned char* data;
    long long batch, head, row, col;
};

struct Params {
    TensorRef q;  // (batch, heads_q, seq_q, head_dim)
    TensorRef k;  // (batch, heads_kv, seq_k, head_dim)
    TensorRef v;  // (batch, heads_kv, seq_k, head_dim_v)
    TensorRef out;  // (batch, heads_q, seq_q, head_dim_v)
    MaskRef dense;  // dense mask as bytes, 1 where query i sees key j; or mask_bits
    const unsigned* mask_bits;  // (mask_planes, seq_q, mask_words) dense mask as bits; or dense
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
    unsigned* bits;  // (mask_planes, padded_q or padded_k, bits_row) dense mask, 32 pairs a word
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
    int mask_batches;  // batch if each entry has a plane of its own, else 1
    int mask_heads;  // heads if each q head (of spans also: kv head) has a plane of its own, else 1
    int mask_words;  // words per row of mask_bits, ceil(seq_k / 32)
    int bits_row;  // words per row of bits
    int padded_q;  // tiles_m * tile_m
    float scale_log2;  // scale * log2(e)
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 64;
constexpr int kHeadDimV = 64;
constexpr int kTileM = 128;  // query rows of a block
constexpr int kTileN = 32;  // keys of a step
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kStages = 2;  // buffers of K and of V
constexpr int kStepsD = 8;  // k8 steps of Q K^T, the last one filled up with zeros
constexpr int kPitch = 68;  // floats between rows of Q and K in shared memory
constexpr int kPitchV = 68;
constexpr int kFragsM = kTileM / kWarps / 16;  // m16 fragments of a warp
constexpr int kFragsN = kTileN / 8;            // n8 fragments of S
constexpr int kFragsD = 8;  // n8 fragments of O
constexpr int kFragsSplit = 4;  // of them in each of the o_splits; what exceeds the last one is dropped
constexpr int kTileBytesN = kTileN * kPitch * 4;
constexpr int kTileBytesV = kTileN * kPitchV * 4;
constexpr int kOffsetQ = 0;
constexpr int kOffsetK = kTileM * kPitch * 4;
constexpr int kOffsetV = kOffsetK + kStages * kTileBytesN;
constexpr int kSharedBytes = kOffsetV + kStages * kTileBytesV;
static_assert(kSharedBytes == 69632, "codegen/families/sm80_fp32.py disagrees");

// ---- PTX: one instruction per function -----------------------------------------------------------------------------

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Thread: copy `bytes` of 16 bytes to shared memory in the background and fill up with zeros; 0 reads nothing.
__device__ __forceinline__ void cp_async(unsigned dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
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
    constexpr int row_threads = 16;
    constexpr int row_step = kThreads / row_threads;
    const int first_row = threadIdx.x / row_threads;
    const int first_copy = threadIdx.x % row_threads;
    tile += (first_row * kPitch + first_copy * kWide) * 4;
    src += first_row * stride + first_copy * kWide;
#pragma unroll
    for (int i = 0; i < (kTileM + row_step - 1) / row_step; ++i) {
        const int row = first_row + i * row_step;
#pragma unroll
        for (int copy = 0; copy < 16; copy += row_threads) {
            const int left = kHeadDim - (first_copy + copy) * kWide;  // columns of the row from here on
            if ((kTileM % row_step == 0 || row < kTileM) && (16 % row_threads == 0 || left > 0)) {
                const int bytes = kHeadDim % kWide == 0 ? kWide * 4 : min(left, kWide) * 4;
                const unsigned target = tile + (i * row_step * kPitch + copy * kWide) * 4;
                cp_async(target, src + copy * kWide, row < valid ? bytes : 0);
            }
        }
        src += row_step * stride;
    }
}

// Block: copy kTileN rows of a (seq, kHeadDim) matrix; rows from `valid` on become zeros. What follows a row in shared
// memory, up to a multiple of 8 columns, is zero before and after.
__device__ __forceinline__ void load_k_tile(unsigned tile, const float* src, long long stride, int valid) {
    constexpr int row_threads = 16;
    constexpr int row_step = kThreads / row_threads;
    const int first_row = threadIdx.x / row_threads;
    const int first_copy = threadIdx.x % row_threads;
    tile += (first_row * kPitch + first_copy * kWide) * 4;
    src += first_row * stride + first_copy * kWide;
#pragma unroll
    for (int i = 0; i < (kTileN + row_step - 1) / row_step; ++i) {
        const int row = first_row + i * row_step;
#pragma unroll
        for (int copy = 0; copy < 16; copy += row_threads) {
            const int left = kHeadDim - (first_copy + copy) * kWide;  // columns of the row from here on
            if ((kTileN % row_step == 0 || row < kTileN) && (16 % row_threads == 0 || left > 0)) {
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
    constexpr int row_threads = 16;
    constexpr int row_step = kThreads / row_threads;
    const int first_row = threadIdx.x / row_threads;
    const int first_copy = threadIdx.x % row_threads;
    tile += (first_row * kPitchV + first_copy * kWide) * 4;
    src += first_row * stride + first_copy * kWide;
#pragma unroll
    for (int i = 0; i < (kTileN + row_step - 1) / row_step; ++i) {
        const int row = first_row + i * row_step;
#pragma unroll
        for (int copy = 0; copy < 16; copy += row_threads) {
            const int left = kHeadDimV - (first_copy + copy) * kWide;  // columns of the row from here on
            if ((kTileN % row_step == 0 || row < kTileN) && (16 % row_threads == 0 || left > 0)) {
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

// ---- Mask: dense ---------------------------------------------------------------------------------------------------

// The plane of the mask of q head `head`.
__device__ __forceinline__ int mask_plane(const Params& p, int batch, int head) {
    return (p.mask_batches > 1 ? batch * p.mask_heads : 0) + (p.mask_heads > 1 ? head : 0);
}

// Bit i: does query `query` (below padded_q) see key `key0 + i`? `key0` is a multiple of 32 below padded_k.
__device__ __forceinline__ unsigned seen_keys(const Params& p, int plane, int query, int key0) {
    return __ldg(p.bits + (static_cast<long long>(plane) * p.padded_q + query) * p.bits_row + key0 / 32);
}

// Where the tables of the schedule hold owned tile `tile`.
__device__ __forceinline__ long long entry_of(const Params& p, int plane, int tile) {
    return static_cast<long long>(plane) * p.tiles_m + tile;
}

// The query tile of the block with this rank; tiles with most work have the lowest rank.
__device__ __forceinline__ int owned_tile(const Params& p, int plane, int rank) {
    return __ldg(p.tile_order + entry_of(p, plane, rank));
}

// How many key tiles query tile `tile` visits.
__device__ __forceinline__ int visits(const Params& p, int plane, int tile) {
    return __ldg(p.tile_count + entry_of(p, plane, tile));
}

// Visit number `index`: key tile * 2 + (1 if some of its pairs are hidden).
__device__ __forceinline__ int visit(const Params& p, int plane, int tile, int index) {
    return __ldg(p.tile_list + entry_of(p, plane, tile) * p.list_stride + index);
}

// ---- Order of the work ---------------------------------------------------------------------------------------------

// Bytes of the L2 cache that K and V of a section of heads may take.
// The L2 cache of an H200 has 50 MB. How the value was chosen: docs/experiments.md, 11 and 89.
constexpr long long kCacheBytes = 32 << 20;

// Which tile of which head; rank 0 is the tile with most work.
struct Place {
    int rank, head, batch;
};

// Work starts in the order of its index. Heads come in sections whose K and V fit the L2 cache together; in a section
// all heads' largest tiles come first, and the q heads that share K and V lie side by side.
__device__ __forceinline__ Place place_of(const Params& p, int index) {
    const int heads = p.heads_q;
    const int together = heads / p.heads_kv;  // q heads with the same K and V
    const long long bytes = 8LL * kHeadDim * p.seq_k;
    const long long planes = static_cast<long long>(heads / together) * p.batch;
    const int fits = static_cast<int>(min(max(kCacheBytes / bytes, 1LL), planes));
    const int section = fits * together;
    const int first = index / (section * p.tiles_m) * section;
    const int width = min(section, heads * p.batch - first);  // the last section may be narrower
    const int rest = index - first * p.tiles_m;
    const int plane = first + rest % width;
    return {rest / width, plane % heads, plane / heads};
}

// ---- Tile schedule from the dense mask: built once per mask on the device, shared by all layers and heads ----------

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

// Warp: the columns of 32 x 32 bits. Row i and column i are lane i's, their lowest bit is the first.
__device__ __forceinline__ unsigned transpose_bits(unsigned row) {
    unsigned column = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const unsigned bits = __ballot_sync(~0u, row >> i & 1);
        column = threadIdx.x % 32 == i ? bits : column;
    }
    return column;
}

// Warp: of the 32 x 32 pairs from (query0, key0) on, those of query query0 + lane, a bit each; 0 outside of the mask.
__device__ __forceinline__ unsigned pairs_of(const Params& p, int plane, int query0, int key0) {
    const int lane = threadIdx.x % 32;
    if (p.mask_bits != nullptr) {
        const long long query = static_cast<long long>(plane) * p.seq_q + query0 + lane;
        const bool inside = query0 + lane < p.seq_q && key0 < p.seq_k;
        const unsigned keys = inside ? __ldg(p.mask_bits + query * p.mask_words + key0 / 32) : 0;
        return keys;
    }
    const int rows = min(p.seq_q - query0, 32);
    if (rows <= 0) {
        return 0;
    }
    const unsigned char* mask = p.dense.data + plane / p.mask_heads * p.dense.batch +
                                plane % p.mask_heads * p.dense.head + query0 * p.dense.row +
                                min(key0 + lane, p.seq_k - 1) * p.dense.col;
    // Pairs outside read the last query or key: with conditions fewer loads are in flight at once.
    unsigned queries = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        queries |= static_cast<unsigned>(mask[min(i, rows - 1) * p.dense.row] != 0) << i;
    }
    queries = key0 + lane < p.seq_k ? queries & ~0u >> (32 - rows) : 0;
    return transpose_bits(queries);
}

// One block per tile, grid tiles_n x tiles_m x mask_planes, the first fastest. Packs the tile's pairs and writes to its
// place of the list a bit for each row group that sees some pair, then for each that misses some; or 0.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90_fp32_d64_dense_a16_m128_n32_w4_s2_p2_b2_pack(const __grid_constant__ Params p) {
    const int key_tile = blockIdx.x % p.tiles_n;
    const int query_tile = blockIdx.x / p.tiles_n % p.tiles_m;
    const int plane = blockIdx.x / p.tiles_n / p.tiles_m;
    const int lane = threadIdx.x % 32;
    static_assert(kTileM / kRowGroups % 32 == 0 && kTileN % 32 == 0, "squares of 32 pairs, each in one row group");
    constexpr int squares_n = kTileN / 32;
    unsigned found = 0;
    for (int i = threadIdx.x / 32; i < kTileM / 32 * squares_n; i += kScheduleThreads / 32) {
        const int query0 = query_tile * kTileM + i / squares_n * 32;
        const int key0 = key_tile * kTileN + i % squares_n * 32;
        const unsigned word = pairs_of(p, plane, query0, key0);
        const int query = query0 + lane;
        p.bits[(static_cast<long long>(plane) * p.padded_q + query) * p.bits_row + key0 / 32] = word;
        const int group = i / squares_n * 32 / (kTileM / kRowGroups);
        found |= (word != 0) << group | (word != ~0u && query < p.seq_q) << kRowGroups + group;
    }
    unsigned kind = 0;
#pragma unroll
    for (int i = 0; i < kRowGroups * 2; ++i) {
        kind |= (__syncthreads_or(found >> i & 1) != 0) << i;
    }
    if (threadIdx.x == 0) {
        const long long row = entry_of(p, plane, query_tile);
        p.tile_list[row * p.list_stride + key_tile] = kind & kSomeRowGroups ? kind : 0;
    }
}

// One block per owned tile and plane: list the tiles it must visit, in ascending order.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90_fp32_d64_dense_a16_m128_n32_w4_s2_p2_b2_schedule(const __grid_constant__ Params p) {
    __shared__ unsigned votes[kScheduleThreads / 32];
    const int tile = blockIdx.x;  // of all planes: plane * tiles_m + tile
    int* list = p.tile_list + static_cast<long long>(tile) * p.list_stride;
    int total = 0;
    for (int base = 0; base < p.tiles_n; base += kScheduleThreads) {
        const int visited = base + threadIdx.x;
        // What _pack wrote. Entries are overwritten only after every thread has read its own.
        const unsigned kind = visited < p.tiles_n ? list[visited] : 0;
        const int slot = count_before(kind != 0, votes, total);
        if (kind != 0) {
            list[slot] = visited << kRowGroups | kind >> kRowGroups;
        }
    }
    if (threadIdx.x == 0) {
        p.tile_count[tile] = total;
    }
}

// Work of the blocks that own `tile` for the q heads with plane `plane`.
__device__ __forceinline__ int work_of(const Params& p, int plane, int tile) {
    int work = 0;
    for (int i = 0; i < 1; ++i) {
        work += p.tile_count[entry_of(p, plane + i, tile)];
    }
    return work;
}

// One block per owned tile and plane: its rank is the number of tiles with more work, earlier tiles winning ties.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90_fp32_d64_dense_a16_m128_n32_w4_s2_p2_b2_order(const __grid_constant__ Params p) {
    const int tile = blockIdx.x % p.tiles_m;
    const int plane = blockIdx.x / p.tiles_m;
    const int work = work_of(p, plane, tile);
    int rank = 0;
    for (int base = 0; base < p.tiles_m; base += kScheduleThreads) {
        const int other = base + threadIdx.x;
        const int theirs = other < p.tiles_m ? work_of(p, plane, other) : -1;
        rank += __syncthreads_count(theirs > work || (theirs == work && other < tile));
    }
    if (threadIdx.x == 0) {
        p.tile_order[entry_of(p, plane, rank)] = tile;
    }
}

// Warp: set S to -infinity where the mask hides a pair. `query0` is the thread's first query, `key0` the
// warp's first key.
__device__ __forceinline__ void apply_mask(const Params& p, int plane, float (&s)[kFragsM][kFragsN][4],
                                           int query0, int key0) {
    const int lane = threadIdx.x % 32;
    const float hidden = __int_as_float(0xff800000);
    constexpr int frags = kFragsN % 4 == 0 ? 4 : kFragsN % 2 == 0 ? 2 : 1;  // whose keys share a word of the mask
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = query0 + i * 16 + half * 8;
#pragma unroll
            for (int j0 = 0; j0 < kFragsN; j0 += frags) {
                const int key = key0 + j0 * 8;
                const unsigned seen = seen_keys(p, plane, query, key) >> key % 32;
#pragma unroll
                for (int j = 0; j < frags; ++j) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float& value = s[i][j0 + j][half * 2 + c];
                        value = seen >> (j * 8 + lane % 4 * 2 + c) & 1 ? value : hidden;
                    }
                }
            }
        }
    }
}

// ---- Softmax -------------------------------------------------------------------------------------------------------

typedef float Scores[kFragsM][kFragsN][4];  // of S, then of P

// What a thread keeps of its rows: [i][half] is query first + i * 16 + half * 8.
struct Rows {
    int first;
    float o[kFragsM][kFragsD][4];
    float row_max[kFragsM][2];  // of S so far
    float row_sum[kFragsM][2];  // of P so far, this thread's columns only
};

// Thread: rows that have seen no key.
__device__ __forceinline__ Rows empty_rows(int first) {
    Rows rows = {};
    rows.first = first;
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
        rows.row_max[i][0] = rows.row_max[i][1] = __int_as_float(0xff800000);
    }
    return rows;
}

// P is 2^(c S - base), where base is c times the row maximum: the exponent takes one FMA. Where base is above kLarge,
// its rounding error would change P noticeably. There the row maximum is subtracted from S first; the difference is
// exact wherever P is not 0.
constexpr float kLarge = 65536.0f;

// A row maximum, or 0 for -infinity, that of a row that has seen nothing.
__device__ __forceinline__ float finite(float row_max) {
    return row_max == __int_as_float(0xff800000) ? 0.0f : row_max;
}

// What the exponents of a row are relative to; 0 if maxima are `large`, as S is relative to them then.
// Rounded once, never fused: P, O and the row sums must have the same, or the sums drift away.
__device__ __forceinline__ float base_of(float row_max, bool large, float scale_log2) {
    return large ? 0.0f : __fmul_rn(finite(row_max), scale_log2);
}

// The factor of O and of a row sum when the maximum of the row grows from `before` to `row_max`.
__device__ __forceinline__ float rescale_of(float before, float row_max, bool large, float scale_log2) {
    const float small = __fmul_rn(before, scale_log2) - base_of(row_max, false, scale_log2);
    return exp2_approx(large ? (before - finite(row_max)) * scale_log2 : small);
}

// Warp: online softmax step. S becomes P; O and the row sums are rescaled to the new row maxima.
__device__ __forceinline__ void softmax(Scores& s, Rows& rows, float scale_log2) {
    float row_max[kFragsM][2];  // with this tile
    bool moved = false;
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& most = row_max[i][half];
            most = rows.row_max[i][half];
#pragma unroll
            for (int j = 0; j < kFragsN; ++j) {
                most = fmaxf(most, fmaxf(s[i][j][half * 2], s[i][j][half * 2 + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            moved |= most != rows.row_max[i][half];
        }
    }
    bool some = false;
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            some |= fabsf(finite(row_max[i][half]) * scale_log2) > kLarge;
        }
    }
    const bool large = __any_sync(~0u, some);  // then maxima are subtracted from S
    // Maxima rarely move after the first few tiles. With few rows a warp rescales always: the branch costs registers.
    if (kFragsM == 1 || __any_sync(~0u, moved)) {
#pragma unroll
        for (int i = 0; i < kFragsM; ++i) {
            float rescale[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                rescale[half] = rescale_of(rows.row_max[i][half], row_max[i][half], large, scale_log2);
                rows.row_sum[i][half] *= rescale[half];
            }
#pragma unroll
            for (int j = 0; j < kFragsD; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    rows.o[i][j][e] *= rescale[e / 2];
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
        rows.row_max[i][0] = row_max[i][0];
        rows.row_max[i][1] = row_max[i][1];
    }
    if (large) {
#pragma unroll
        for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
            for (int j = 0; j < kFragsN; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    s[i][j][e] -= finite(row_max[i][e / 2]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float base = base_of(row_max[i][half], large, scale_log2);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kFragsN; ++j) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& value = s[i][j][half * 2 + c];
                    value = exp2_approx(value * scale_log2 - base);
                    sum += value;
                }
            }
            rows.row_sum[i][half] += sum;
        }
    }
}

// Warp: the epilogue. O divided by the row sums goes to `out`, the log-sum-exp of each row to `lse`.
__device__ __forceinline__ void store(const Params& p, const Rows& rows, float* out, float* lse) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = rows.row_sum[i][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int row = rows.first + i * 16 + half * 8;
            if (row >= p.seq_q) {
                continue;
            }
            if (lane % 4 == 0) {
                const float ln2 = 0.6931471805599453f;
                const float empty = __int_as_float(0xff800000);
                lse[row] = sum == 0.0f ? empty : __fmul_rn(rows.row_max[i][half], p.scale_log2) * ln2 + logf(sum);
            }
            float* target = out + row * p.out.row;
#pragma unroll
            for (int j = 0; j < kFragsD; ++j) {
                const float* x = rows.o[i][j] + half * 2;
                store_pair(target, j * 8 + lane % 4 * 2, kHeadDimV, x[0] * inverse, x[1] * inverse);
            }
        }
    }
}

// ---- Products of tiles ---------------------------------------------------------------------------------------------

// Where the products of a warp read the first stage: addresses for ldmatrix, of a left operand 16 rows x 8 columns, of
// a right one two tiles of 8 rows x 8 columns; of V the thread's first element, row lane % 4 * 2, column lane / 4.
struct Operands {
    unsigned q, k;
    const float* v;
};

// Warp: S = Q K^T, K of buffer `stage`; `s` comes in as zeros.
__device__ __forceinline__ void multiply_qk(Scores& s, const Operands& operands, int stage) {
    multiply_rows<kStepsD, kPitch>(s, operands.q, operands.k + stage * kTileBytesN);
}

// Warp: O += P V, V of buffer `stage`. The k index t of a product stands for key 2t and t + 4 for key 2t + 1: so the
// fragments of S are those of P as a left operand.
__device__ __forceinline__ void multiply_pv(float (&o)[kFragsM][kFragsD][4], const Scores& s, const Operands& operands,
                                            int stage) {
    const float* v = operands.v + stage * (kTileBytesV / 4);
#pragma unroll
    for (int first = 0; first < kFragsD; first += kFragsSplit) {
        float share[kFragsM][kFragsSplit][4] = {};
        float rest[kFragsM][kFragsSplit][4] = {};
#pragma unroll
        for (int step = 0; step < kFragsN; ++step) {
            Left a[kFragsM];
#pragma unroll
            for (int i = 0; i < kFragsM; ++i) {
                a[i] = split_left(s[i][step][0], s[i][step][2], s[i][step][1], s[i][step][3]);
            }
            Right b[kFragsSplit];
#pragma unroll
            for (int j = 0; j < kFragsSplit; ++j) {
                const float* x = v + step * 8 * kPitchV + (first + j) * 8;
                b[j] = split_right(x[0], x[kPitchV]);
            }
            add_products(share, rest, a, b);
        }
#pragma unroll
        for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
            for (int j = 0; j < kFragsSplit; ++j) {
#pragma unroll
                for (int e = 0; e < 4 && first + j < kFragsD; ++e) {
                    o[i][first + j][e] += share[i][j][e] + rest[i][j][e];
                }
            }
        }
    }
}

// ---- Main loop -----------------------------------------------------------------------------------------------------

// A work tile: kTileM query rows of one head.
struct Work {
    int head, batch, tile;
    int plane;  // of the mask
    int visits;  // how many key tiles its rows see
    const float *q, *k, *v;  // the first row of the tile; the first rows of the kv head
};

// Work tile number `index`.
__device__ __forceinline__ Work work_at(const Params& p, int index) {
    const Place place = place_of(p, index);
    Work work;
    work.head = place.head;
    work.batch = place.batch;
    work.plane = mask_plane(p, work.batch, work.head);
    work.tile = owned_tile(p, work.plane, place.rank);
    const int head_kv = work.head / (p.heads_q / p.heads_kv);
    const int query0 = work.tile * kTileM;
    work.q = static_cast<const float*>(p.q.data) + work.batch * p.q.batch + work.head * p.q.head + query0 * p.q.row;
    work.k = static_cast<const float*>(p.k.data) + work.batch * p.k.batch + head_kv * p.k.head;
    work.v = static_cast<const float*>(p.v.data) + work.batch * p.v.batch + head_kv * p.v.head;
    work.visits = visits(p, work.plane, work.tile);
    return work;
}

// Block: start copying the keys from `key0` on to buffer `stage` of K, and the same rows of V.
__device__ __forceinline__ void load_k(const Params& p, const Work& work, unsigned base, int stage, int key0) {
    load_k_tile(base + kOffsetK + stage * kTileBytesN, work.k + key0 * p.k.row, p.k.row, p.seq_k - key0);
}
__device__ __forceinline__ void load_v(const Params& p, const Work& work, unsigned base, int stage, int key0) {
    load_v_tile(base + kOffsetV + stage * kTileBytesV, work.v + key0 * p.v.row, p.v.row, p.seq_k - key0);
}

// Block: the main loop over all key tiles that the rows of `work` see. Copies of K and V run kStages - 1 tiles ahead.
__device__ __forceinline__ void attend(const Params& p, const Work& work, unsigned base, const Operands& operands,
                                       Rows& rows) {
    for (int index = 0; index < kStages - 1; ++index) {
        if (index < work.visits) {
            const int key0 = (visit(p, work.plane, work.tile, index) >> 1) * kTileN;
            load_k(p, work, base, index, key0);
            load_v(p, work, base, index, key0);
        }
        cp_async_commit();
    }
    int stage = 0;           // of the tile in use
    int fill = kStages - 1;  // of the tile being loaded
    for (int index = 0; index < work.visits; ++index) {
        const int entry = visit(p, work.plane, work.tile, index);
        cp_async_wait();
        __syncthreads();  // this tile has arrived; the stage that is filled next has been read
        if (index + kStages - 1 < work.visits) {
            const int key0 = (visit(p, work.plane, work.tile, index + kStages - 1) >> 1) * kTileN;
            load_k(p, work, base, fill, key0);
            load_v(p, work, base, fill, key0);
        }
        cp_async_commit();

        Scores s = {};
        multiply_qk(s, operands, stage);
        if (entry & 1) {
            apply_mask(p, work.plane, s, rows.first, (entry >> 1) * kTileN);
        }
        softmax(s, rows, p.scale_log2);
        multiply_pv(rows.o, s, operands, stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        fill = fill + 1 == kStages ? 0 : fill + 1;
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------------------

// Grid: tiles_m x batch x heads_q blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
attnforge_fwd_sm90_fp32_d64_dense_a16_m128_n32_w4_s2_p2_b2(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const unsigned base = shared_address(shared);
    const int warp_row = threadIdx.x / 32 * kFragsM * 16;  // of the tile, the warp's first
    const int lane = threadIdx.x % 32;
    const Work work = work_at(p, blockIdx.x);

    Operands operands;
    operands.q = base + kOffsetQ + ((warp_row + (lane & 15)) * kPitch + (lane >> 4) * 4) * 4;
    operands.k = base + kOffsetK + (((lane >> 4) * 8 + (lane & 7)) * kPitch + (lane >> 3 & 1) * 4) * 4;
    operands.v = reinterpret_cast<const float*>(shared + kOffsetV) + lane % 4 * 2 * kPitchV + lane / 4;
    Rows rows = empty_rows(work.tile * kTileM + warp_row + lane / 4);

    load_q_tile(base + kOffsetQ, work.q, p.q.row, p.seq_q - work.tile * kTileM);
    attend(p, work, base, operands, rows);
    cp_async_wait_all();

    float* out = static_cast<float*>(p.out.data) + work.batch * p.out.batch + work.head * p.out.head;
    store(p, rows, out, p.lse + (static_cast<long long>(work.batch) * p.heads_q + work.head) * p.seq_q);
}
