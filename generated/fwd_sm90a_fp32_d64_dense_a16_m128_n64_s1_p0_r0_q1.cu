// attnforge_fwd_sm90a_fp32_d64_dense_a16_m128_n64_s1_p0_r0_q1
// Generated from templates/sm90a/forward_fp32.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch sm90a --dtype fp32 --head-dim 64 --mask dense --align 16
//     --set tile_m=128 --set tile_n=64 --set stages=1 --set ping_pong=0
//     --set persistent=0 --set q_in_regs=1
//
//   tile_m      128   query rows per tile, 64 for each consumer warpgroup
//   tile_n       64   keys per step of the main loop
//   stages        1   shared-memory buffers for K and for V
//   ping_pong     0   1: warpgroup ordering barrier: the softmax of one overlaps the products of another
//   persistent    0   1: one block per multiprocessor walks many tiles
//   q_in_regs     1   1: keep the fragments of Q in registers
//
// S = Q K^T (tile_m x tile_n), P = exp(scale (S - row_max)), O = sum of P V; out = O / row_sum,
// lse = ln(sum exp(scale S)).
// Every float is the sum of three bf16: big, middle and small, and a product of two is that of six: big big, big
// middle, middle big, big small, small big, middle middle; what is left out is about 2^-24 of it. Tensor cores round
// sums towards zero, at the size of the sum. So the smallest products come first, S and each tile's share of O are
// summed from zero, and O itself with additions.
// A kernel before this one (_preprocess) writes K and V in splits. One producer thread copies tiles of them; each
// consumer warpgroup owns 64 query rows of a tile, splits their Q, and P as it is computed.
// Fragments: element i of a thread is row warp*16 + lane/4 + (i/2%2)*8, column i/4*8 + lane%4*2 + i%2.

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
    float* dkv_accum;  // (batch, heads_kv, padded_k, columns) fp32 sums of dk, then those of dv
    unsigned* bits;  // (mask_planes, padded_q or padded_k, bits_row) dense mask, 32 pairs a word
    int* tile_count;  // (mask_planes, tiles) visited tiles of each owned tile
    int* tile_order;  // (mask_planes, tiles) owned tiles in launch order, or with lists that are cut, pieces of them
    int* tile_list;  // (mask_planes, tiles, list_stride) visited tile << row groups | a bit for each with hidden pairs
    int* kv_range;  // (mask_planes, tiles_m, 4, 2) visits [x, y) that a 64-row group of queries needs
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
constexpr int kTileM = 128;  // query rows of a tile
constexpr int kTileN = 64;  // keys of a step
constexpr int kConsumers = 2;  // warpgroups, 64 query rows each
constexpr int kRowGroups = kConsumers;  // row groups of a query tile: each warpgroup skips what is hidden from its rows
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kPreprocessThreads = 256;
constexpr int kStages = 1;  // buffers of K and of V
constexpr int kSteps = 4;  // k16 steps of Q K^T, the last one filled up with zeros
constexpr int kColumnsOut = 64;  // of O that are computed
constexpr int kSwizzleBytes = 128;  // bytes of a row of a panel of Q and K
constexpr int kSwizzleBytesV = 128;
constexpr int kSplitBytesK = kTileN * 64 * 2;
constexpr int kSplitBytesV = kTileN * 64 * 2;
constexpr int kSplits = 3;  // bf16 that a float is the sum of
constexpr int kTileBytesK = kSplits * kSplitBytesK;
constexpr int kTileBytesV = kSplits * kSplitBytesV;
constexpr int kOffsetK = 0;
constexpr int kOffsetV = (kOffsetK + kStages * kTileBytesK + 1023) / 1024 * 1024;
constexpr int kOffsetBounds = kOffsetV + kStages * kTileBytesV;
constexpr int kFullK = kOffsetBounds;
// Barriers: full = the tile has landed (the producer's arrival and the bytes that it announced), empty = all warps of
// consumers are done with it.
constexpr int kEmptyK = kFullK + 8 * kStages;
constexpr int kFullV = kEmptyK + 8 * kStages;
constexpr int kEmptyV = kFullV + 8 * kStages;
constexpr int kSharedBytes = kEmptyV + 8 * kStages;
static_assert(kSharedBytes == 49184, "codegen/families/sm90_fp32.py disagrees");

// ---- PTX: one instruction per function -----------------------------------------------------------------------------

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Thread: set up a barrier for `count` arrivals per phase.
__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Thread: make initialised barriers visible to TMA.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Thread: arrive.
__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Thread: arrive and announce `bytes` of copies that must land before the phase ends.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Thread: wait until the phase of this parity has ended. On a fresh barrier, parity 1 does not wait.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// Warpgroup: order register and shared-memory accesses before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Warpgroup: close the group of wgmma issued since the last commit.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Thread: no use of the accumulator `d` may move before this point. Costs nothing.
template <int n>
__device__ __forceinline__ void accumulator_fence(float (&d)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

// Thread: start copying consecutive bytes (16-byte aligned, a multiple of 16) to shared memory.
__device__ __forceinline__ void bulk_load(unsigned dst, const void* src, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(barrier)
        : "memory");
}

// Warpgroup: wait until no group is in flight.
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Thread: 2^x, about 2 ulp.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Thread: round two floats to bf16; `low` takes the lower half of the word.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Thread: the two bf16 of a word.
__device__ __forceinline__ float2 unpack(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Warpgroup: S (64 x 64) = or += a split of Q times one of K over 16 columns, Q from registers.
__device__ __forceinline__ void wgmma_scores(float (&d)[kTileN / 2], const unsigned (&a)[4], unsigned long long b,
                                             int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: O (64 x 64) = or += a split of P times one of V over 16 keys, P from registers.
__device__ __forceinline__ void wgmma_out(float (&d)[kColumnsOut / 2], const unsigned (&a)[4], unsigned long long b,
                                          int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    // clang-format on
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

// Visit number `index`: key tile << kRowGroups, and a bit for each row group of the query tile that misses some pairs.
__device__ __forceinline__ int visit(const Params& p, int plane, int tile, int index) {
    return __ldg(p.tile_list + entry_of(p, plane, tile) * p.list_stride + index);
}

// The visits in which row group `group` of the tile sees some pair: [x, y).
__device__ __forceinline__ int2 kv_range_of(const Params& p, int plane, int tile, int group) {
    return __ldg(reinterpret_cast<const int2*>(p.kv_range) + entry_of(p, plane, tile) * 4 + group);
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
attnforge_fwd_sm90a_fp32_d64_dense_a16_m128_n64_s1_p0_r0_q1_pack(const __grid_constant__ Params p) {
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
attnforge_fwd_sm90a_fp32_d64_dense_a16_m128_n64_s1_p0_r0_q1_schedule(const __grid_constant__ Params p) {
    __shared__ unsigned votes[kScheduleThreads / 32];
    __shared__ int2 kv_range[kRowGroups];
    if (threadIdx.x < kRowGroups) {
        kv_range[threadIdx.x] = make_int2(p.tiles_n, 0);
    }
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
        // The visits of a warp lie side by side: take the first and the last in which a row group sees some pair.
#pragma unroll
        for (int group = 0; group < kRowGroups; ++group) {
            const unsigned shows = __ballot_sync(~0u, kind >> group & 1);
            const bool first = (shows & ((2u << threadIdx.x % 32) - 1)) == 1u << threadIdx.x % 32;
            const bool last = shows >> threadIdx.x % 32 == 1;
            if (first) {
                atomicMin(&kv_range[group].x, slot);
            }
            if (last) {
                atomicMax(&kv_range[group].y, slot + 1);
            }
        }
    }
    if (threadIdx.x == 0) {
        p.tile_count[tile] = total;
    }
    __syncthreads();
    if (threadIdx.x < kRowGroups) {
        const int2 found = kv_range[threadIdx.x];
        reinterpret_cast<int2*>(p.kv_range)[tile * 4 + threadIdx.x] = found.y > 0 ? found : make_int2(0, 0);
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
attnforge_fwd_sm90a_fp32_d64_dense_a16_m128_n64_s1_p0_r0_q1_order(const __grid_constant__ Params p) {
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

// ---- bf16 splits ---------------------------------------------------------------------------------------------------

// The splits of two floats, the largest first, each a pair of bf16.
struct Split {
    unsigned pairs[kSplits];
};

// x = big + middle + small: 8 bits of the significand each, so that nothing is left of its 24.
__device__ __forceinline__ Split split(float x0, float x1) {
    Split result;
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
        result.pairs[i] = pack(x0, x1);
        const float2 rounded = unpack(result.pairs[i]);
        x0 -= rounded.x;
        x1 -= rounded.y;
    }
    return result;
}

// Columns `column` (even) and the next one of a row, zeros past its `width`.
__device__ __forceinline__ float2 load_pair(const float* row, int column, int width) {
    return column < width ? __ldg(reinterpret_cast<const float2*>(row + column)) : make_float2(0.0f, 0.0f);
}

// Byte offset of 16-byte chunk `chunk` of row `row` of a split of `rows` rows, stored in panels of `swizzle_bytes`:
// [panel][row][chunk], the chunk's number XORed with the place of the row in the pattern, as wgmma expects.
__device__ __forceinline__ constexpr int chunk_at(int row, int chunk, int rows, int swizzle_bytes) {
    const int chunks = swizzle_bytes / 16;
    return (chunk / chunks * rows + row) * swizzle_bytes + (chunk % chunks ^ row / (128 / swizzle_bytes) % chunks) * 16;
}

// wgmma descriptor of a split of `rows` rows in panels of `swizzle_bytes`, whether columns or rows are what it sums
// over (where it is columns, the distance of panels is ignored).
__device__ __forceinline__ unsigned long long split_at(unsigned tile, int rows, int swizzle_bytes) {
    const unsigned code = swizzle_bytes == 128 ? 1 : swizzle_bytes == 64 ? 2 : 3;  // of the swizzle (PTX ISA, wgmma)
    const unsigned low = (tile & 0x3ffff) >> 4 | rows * swizzle_bytes >> 4 << 16;
    return static_cast<unsigned long long>(8 * swizzle_bytes >> 4 | code << 30) << 32 | low;
}

// Where k16 step `step` along the columns of such a split starts, in units of a descriptor's address.
__device__ __forceinline__ constexpr int step_at(int step, int rows, int swizzle_bytes) {
    return (step * 32 / swizzle_bytes * rows * swizzle_bytes + step * 32 % swizzle_bytes) >> 4;
}

// The splits of tile number `place` of all heads' tiles of K, and of V, in the workspace.
__device__ __forceinline__ unsigned char* keys_at(const Params& p, int place) {
    return reinterpret_cast<unsigned char*>(p.dkv_accum) + static_cast<long long>(place) * kTileBytesK;
}
__device__ __forceinline__ unsigned char* values_at(const Params& p, int place) {
    unsigned char* values = keys_at(p, p.batch * p.heads_kv * p.tiles_n);
    return values + static_cast<long long>(place) * kTileBytesV;
}

// Block: the splits of kTileN rows of a matrix of `width` columns, of which `valid` are there; the rest is zeros.
__device__ __forceinline__ void write_splits(unsigned char* splits, const float* rows, long long stride, int valid,
                                            int width, int split_bytes, int swizzle_bytes) {
    const int chunks = split_bytes / (kTileN * 16);
    for (int i = threadIdx.x; i < kTileN * chunks; i += kPreprocessThreads) {
        const int row = i / chunks;
        const int chunk = i % chunks;
        Split four[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float2 x = load_pair(rows + row * stride, chunk * 8 + pair * 2, row < valid ? width : 0);
            four[pair] = split(x.x, x.y);
        }
        unsigned char* to = splits + chunk_at(row, chunk, kTileN, swizzle_bytes);
#pragma unroll
        for (int split = 0; split < kSplits; ++split) {
            *reinterpret_cast<uint4*>(to + split * split_bytes) =
                make_uint4(four[0].pairs[split], four[1].pairs[split], four[2].pairs[split], four[3].pairs[split]);
        }
    }
}

// Grid: tiles_n x batch x heads_kv blocks, head by head: a tile of K and of V in splits, as they are laid out in shared
// memory.
extern "C" __global__ void __launch_bounds__(kPreprocessThreads)
attnforge_fwd_sm90a_fp32_d64_dense_a16_m128_n64_s1_p0_r0_q1_preprocess(const __grid_constant__ Params p) {
    const int tile = blockIdx.x % p.tiles_n;
    const int head = blockIdx.x / p.tiles_n % p.heads_kv;
    const int batch = blockIdx.x / p.tiles_n / p.heads_kv;
    const long long key0 = static_cast<long long>(tile) * kTileN;
    const int valid = p.seq_k - tile * kTileN;
    const float* k = static_cast<const float*>(p.k.data) + batch * p.k.batch + head * p.k.head + key0 * p.k.row;
    const float* v = static_cast<const float*>(p.v.data) + batch * p.v.batch + head * p.v.head + key0 * p.v.row;
    write_splits(keys_at(p, blockIdx.x), k, p.k.row, valid, kHeadDim, kSplitBytesK, kSwizzleBytes);
    write_splits(values_at(p, blockIdx.x), v, p.v.row, valid, kHeadDimV, kSplitBytesV, kSwizzleBytesV);
}

// ---- Work ----------------------------------------------------------------------------------------------------------

// A work tile: a query tile of a head.
struct Work {
    int tile, head, batch;
    int plane;  // of the mask
};

// Work number `index`.
__device__ __forceinline__ Work work_at(const Params& p, int index) {
    const Place place = place_of(p, index);
    const int plane = mask_plane(p, place.batch, place.head);
    return {owned_tile(p, plane, place.rank), place.head, place.batch, plane};
}

// Work tiles, those that see nothing included.
__device__ __forceinline__ int count_work(const Params& p) {
    return p.tiles_m * p.heads_q * p.batch;
}

// The work of this block in round `round`, or -1. Rounds alternate direction, so that no block gets the larger
// work tile every time.
__device__ __forceinline__ int work_index(const Params& p, int round) {
    const int total = count_work(p);
    const int index = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    return index < total ? index : -1;
}

// A place in the ring of kStages buffers; the phase of their barriers flips at every wrap.
struct Ring {
    unsigned stage, phase;
};

__device__ __forceinline__ void advance(Ring& ring) {
    if (++ring.stage == kStages) {
        ring.stage = 0;
        ring.phase ^= 1;
    }
}

// ---- Producer ------------------------------------------------------------------------------------------------------

// Thread: copy the tiles of K and V that the consumers of this block take.
__device__ __forceinline__ void produce(const Params& p, unsigned base) {
    Ring ring = {0, 0};
    for (int round = 0, index = work_index(p, 0); index >= 0; index = work_index(p, ++round)) {
        const Work work = work_at(p, index);
        const int place = (work.batch * p.heads_kv + work.head / (p.heads_q / p.heads_kv)) * p.tiles_n;
        const int count = visits(p, work.plane, work.tile);
#pragma unroll 1  // registers are few
        for (int i = 0; i < count; ++i) {
            const int entry = visit(p, work.plane, work.tile, i);
            const int tile = entry >> kRowGroups;
            barrier_wait(base + kEmptyK + ring.stage * 8, ring.phase ^ 1);
            barrier_expect(base + kFullK + ring.stage * 8, kTileBytesK);
            bulk_load(base + kOffsetK + ring.stage * kTileBytesK, keys_at(p, place + tile), kTileBytesK,
                      base + kFullK + ring.stage * 8);
            barrier_wait(base + kEmptyV + ring.stage * 8, ring.phase ^ 1);
            barrier_expect(base + kFullV + ring.stage * 8, kTileBytesV);
            bulk_load(base + kOffsetV + ring.stage * kTileBytesV, values_at(p, place + tile), kTileBytesV,
                      base + kFullV + ring.stage * 8);
            advance(ring);
        }
    }
}

// ---- Softmax -------------------------------------------------------------------------------------------------------

// Warpgroup: hide what the mask hides in the key tile that starts at `key0`; `row` is the thread's first query.
__device__ __forceinline__ void apply_mask(const Params& p, int plane, float (&s)[kTileN / 2], int row, int key0) {
    const float hidden = __int_as_float(0xff800000);
#pragma unroll
    for (int word = 0; word < kTileN / 32; ++word) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned seen = seen_keys(p, plane, row + half * 8, key0 + word * 32) >> threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& value = s[word * 16 + i / 2 * 4 + half * 2 + i % 2];
                value = seen >> (i / 2 * 8 + i % 2) & 1 ? value : hidden;
            }
        }
    }
}

// The two query rows of a thread.
struct Rows {
    float row_max[2];  // of S so far
    float row_sum[2];  // of P so far, this thread's columns only
};

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

// Warp: P = 2^(scale log2(e) (S - row_max)) in splits, as wgmma takes them for its A operand. Updates the rows' maxima
// and sums; O must be multiplied by `factor`.
__device__ __forceinline__ void softmax(float (&s)[kTileN / 2], unsigned (&splits)[kSplits][kTileN / 16][4],
                                        Rows& rows, float scale_log2, float (&factor)[2]) {
    float next[2];
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = s[half * 2];
#pragma unroll
        for (int i = half * 2; i < kTileN / 2; i += 4) {
            most = fmaxf(most, fmaxf(s[i], s[i + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        next[half] = fmaxf(rows.row_max[half], most);
    }
    // If some row of the warp has a large maximum, maxima are subtracted from S.
    const float largest = fmaxf(fabsf(finite(next[0])), fabsf(finite(next[1])));
    const bool large = __any_sync(~0u, largest * scale_log2 > kLarge);
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        base[half] = base_of(next[half], large, scale_log2);
        factor[half] = rescale_of(rows.row_max[half], next[half], large, scale_log2);
        rows.row_max[half] = next[half];
    }
    if (large) {
#pragma unroll
        for (int i = 0; i < kTileN / 2; ++i) {
            s[i] -= finite(next[i / 2 % 2]);
        }
    }
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 2) {
        const int half = i / 2 % 2;
        const float left = exp2_approx(s[i] * scale_log2 - base[half]);
        const float right = exp2_approx(s[i + 1] * scale_log2 - base[half]);
        sum[half] += left + right;
        const Split pair = split(left, right);
#pragma unroll
        for (int split = 0; split < kSplits; ++split) {
            splits[split][i / 8][i / 2 % 4] = pair.pairs[split];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows.row_sum[half] = rows.row_sum[half] * factor[half] + sum[half];
    }
}

// ---- Products ------------------------------------------------------------------------------------------------------

// The splits that are multiplied, the smallest products first: 2 0, 1 1, 0 2, 1 0, 0 1, 0 0.
constexpr int kProducts = 6;
__device__ __forceinline__ constexpr int left_split(int i) { return i < 3 ? 2 - i : i == 3 ? 1 : 0; }
__device__ __forceinline__ constexpr int right_split(int i) { return i < 3 ? i : i == 4 ? 1 : 0; }

// Warp: its 16 rows of Q in splits, as fragments of wgmma's A. `q` is the head's Q, `row` the thread's first query.
__device__ __forceinline__ void load_q(const Params& p, const float* q, int row,
                                       unsigned (&splits)[kSplits][kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int query = row + i % 2 * 8;
            const int column = step * 16 + i / 2 * 8 + threadIdx.x % 4 * 2;
            const float2 x = load_pair(q + query * p.q.row, column, query < p.seq_q ? kHeadDim : 0);
            const Split pair = split(x.x, x.y);
#pragma unroll
            for (int split = 0; split < kSplits; ++split) {
                splits[split][step][i] = pair.pairs[split];
            }
        }
    }
}

// Warpgroup: start S = Q K^T.
__device__ __forceinline__ void start_scores(float (&s)[kTileN / 2], const unsigned (&q)[kSplits][kSteps][4],
                                             unsigned k) {
    const unsigned long long b = split_at(k, kTileN, kSwizzleBytes);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            wgmma_scores(s, q[left_split(i)][step],
                         b + (right_split(i) * kSplitBytesK >> 4) + step_at(step, kTileN, kSwizzleBytes), i + step > 0);
        }
    }
}

// Warpgroup: start the product of P and a tile of V.
__device__ __forceinline__ void start_out(float (&share)[kColumnsOut / 2], const unsigned (&p)[kSplits][kTileN / 16][4],
                                          unsigned v) {
    const unsigned long long b = split_at(v, kTileN, kSwizzleBytesV);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
#pragma unroll
        for (int step = 0; step < kTileN / 16; ++step) {
            wgmma_out(share, p[left_split(i)][step],
                      b + (right_split(i) * kSplitBytesV + step * 16 * kSwizzleBytesV >> 4), i + step > 0);
        }
    }
}

// ---- Epilogue ------------------------------------------------------------------------------------------------------

// Thread: write x and y to columns `column` (even) and the next one of a row of O, as far as it has them.
__device__ __forceinline__ void store_pair(float* row, int column, float x, float y) {
    if (column < kHeadDimV) {
        *reinterpret_cast<float2*>(row + column) = make_float2(x, y);
    }
}

// Warp: write its rows of O, divided by their sums, and their lse. `row` is the thread's first query.
__device__ __forceinline__ void store(const Params& p, const Work& work, const Rows& rows,
                                      const float (&o)[kColumnsOut / 2], int row) {
    float* out = static_cast<float*>(p.out.data) + work.batch * p.out.batch + work.head * p.out.head;
    float* lse = p.lse + (static_cast<long long>(work.batch) * p.heads_q + work.head) * p.seq_q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = rows.row_sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int query = row + half * 8;
        if (query < p.seq_q) {
            if (threadIdx.x % 4 == 0) {
                const float ln2 = 0.6931471805599453f;
                const float empty = __int_as_float(0xff800000);
                const float log = __fmul_rn(rows.row_max[half], p.scale_log2) * ln2 + logf(sum);
                lse[query] = sum == 0.0f ? empty : log;
            }
#pragma unroll
            for (int i = half * 2; i < kColumnsOut / 2; i += 4) {
                store_pair(out + query * p.out.row, i * 2 - half * 4 + threadIdx.x % 4 * 2, o[i] * inverse,
                           o[i + 1] * inverse);
            }
        }
    }
}

// ---- Consumers -----------------------------------------------------------------------------------------------------

// Warp: it has read the tile of K or V in buffer `stage`, whose `empty` barriers these are.
__device__ __forceinline__ void release(unsigned empty, unsigned stage) {
    if (threadIdx.x % 32 == 0) {
        barrier_arrive(empty + stage * 8);
    }
}

// Warpgroup: release tiles of which its rows see nothing, after they have landed. Its place in the order of warpgroups,
// for S, is taken already.
__device__ __forceinline__ void skip_tiles(unsigned base, int group, const Ring& ring) {
    __syncwarp();
    release(base + kEmptyK, ring.stage);
    barrier_wait(base + kFullV + ring.stage * 8, ring.phase);
    __syncwarp();
    release(base + kEmptyV, ring.stage);
}

// Warpgroup: the work tiles of this block, 64 rows of each.
__device__ __forceinline__ void consume(const Params& p, unsigned base, int group) {
    const int row_in_tile = group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    Ring ring = {0, 0};
    for (int round = 0, index = work_index(p, 0); index >= 0; index = work_index(p, ++round)) {
        const Work work = work_at(p, index);
        const int row = work.tile * kTileM + row_in_tile;
        const int count = visits(p, work.plane, work.tile);
        const int2 kv_range = count > 0 ? kv_range_of(p, work.plane, work.tile, group) : make_int2(0, 0);
        int entry = count > 0 ? visit(p, work.plane, work.tile, 0) : 0;
        const float* head = static_cast<const float*>(p.q.data) + work.batch * p.q.batch + work.head * p.q.head;
        unsigned q[kSplits][kSteps][4];
        load_q(p, head, row, q);
        float o[kColumnsOut / 2] = {};
        Rows rows = { {__int_as_float(0xff800000), __int_as_float(0xff800000)}, {0.0f, 0.0f} };
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int next = i + 1 < count ? visit(p, work.plane, work.tile, i + 1) : 0;
            barrier_wait(base + kFullK + ring.stage * 8, ring.phase);
            if (i < kv_range.x || i >= kv_range.y) {
                skip_tiles(base, group, ring);
                advance(ring);
                entry = next;
                continue;
            }
            float s[kTileN / 2];
            wgmma_fence();
            start_scores(s, q, base + kOffsetK + ring.stage * kTileBytesK);
            wgmma_commit();
            wgmma_wait();
            accumulator_fence(s);
            if (entry >> group & 1) {
                apply_mask(p, work.plane, s, row, (entry >> kRowGroups) * kTileN);
            }
            __syncwarp();
            release(base + kEmptyK, ring.stage);
            unsigned splits[kSplits][kTileN / 16][4];
            float factor[2];
            softmax(s, splits, rows, p.scale_log2, factor);
            barrier_wait(base + kFullV + ring.stage * 8, ring.phase);
            float share[kColumnsOut / 2];
            wgmma_fence();
            start_out(share, splits, base + kOffsetV + ring.stage * kTileBytesV);
            wgmma_commit();
            wgmma_wait();
            accumulator_fence(share);
            release(base + kEmptyV, ring.stage);
#pragma unroll
            for (int j = 0; j < kColumnsOut / 2; ++j) {
                o[j] = o[j] * factor[j / 2 % 2] + share[j];
            }
            advance(ring);
            entry = next;
        }
        store(p, work, rows, o, row);
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------------------

// Grid: tiles_m x batch x heads_q work tiles, a block each.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
attnforge_fwd_sm90a_fp32_d64_dense_a16_m128_n64_s1_p0_r0_q1(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = shared_address(shared);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // warp-uniform, also for ptxas
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(base + kFullK + i * 8, 1);
            barrier_init(base + kEmptyK + i * 8, kConsumers * 4);
            barrier_init(base + kFullV + i * 8, 1);
            barrier_init(base + kEmptyV + i * 8, kConsumers * 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    // All warps of a warpgroup take part in setmaxnreg; then one thread of the first goes on.
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            produce(p, base);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(p, base, group - 1);
    }
}
