// attnforge_fwd_sm90a_bf16_d128_full_a16_m192_n80_s3_p0_r1_k0_q0_b32_c1
// Generated from templates/sm90a/forward.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch sm90a --dtype bf16 --head-dim 128 --mask full --align 16
//     --set tile_m=192 --set tile_n=80 --set stages=3 --set ping_pong=0
//     --set persistent=1 --set dynamic=0 --set q_in_regs=0 --set cache_mb=32
//     --set multicast=1
//
//   tile_m      192   query rows per tile, 64 for each consumer warpgroup
//   tile_n       80   keys per step of the main loop
//   stages        3   shared-memory buffers for K and for V
//   ping_pong     0   1: warpgroup ordering barrier: the softmax of one overlaps the products of another
//   persistent    1   1: one block per multiprocessor walks many tiles
//   dynamic       0   1: dynamic tile scheduler: a block takes its next work tile from tile_counter
//   q_in_regs     0   1: keep the fragments of Q in registers
//   cache_mb     32   MiB of the L2 cache for the operands of a section of heads
//   multicast     1   1: two blocks that visit the same key tiles load K and V once for both
//
// Attention forward. A producer thread loads tiles with TMA, those of K and V for both blocks of a cluster;
// 3 consumer warpgroups multiply them with wgmma.
//
// symbol      shape                 meaning
//   Q         kTileM x kHeadDim     query tile of a work tile; each consumer warpgroup owns 64 of its rows
//   K, V      kTileN x kHeadDim     key and value tile of a visit
//   S         64 x kTileN           Q K^T of a warpgroup, fp32, in registers
//   P         64 x kTileN           2^(scale log2(e) (S - row_max)), 16-bit, in registers: the A operand of P V
//   O         64 x kHeadDim         sum of P V over the visits, fp32, in registers; out = O / row_sum
//   row_max   64                    row maximum of S over the visits so far, not always the latest
//   row_sum   64                    row sum of P
//   lse       64                    ln(sum exp(scale S)) = scale row_max + ln(row_sum)
//   work tile                       one query tile of one head
//   visit     0 to visit_count - 1  one key tile of a work tile
//   kv_range  [begin, end)          the visits in which a warpgroup's rows see a key
//
// Fragments: element i of a thread is row warp*16 + lane/4 + (i/2%2)*8, column i/4*8 + lane%4*2 + i%2.

typedef unsigned short element;  // bf16, only ever moved as bits

struct Params {
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
    int batch;
    int heads_q;
    int heads_kv;  // divides heads_q
    int seq_q;
    int seq_k;
    int tiles_m;  // ceil(seq_q / tile_m)
    int tiles_n;  // ceil(seq_k / tile_n)
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// TMA descriptors of the tensors, encoded by the host for each call.
struct TensorMaps {
    TensorMap q, k, v, out;
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;
// A tile is stored in panels of kColumns columns, [panel][row][column], 16-byte chunks swizzled within kSwizzleBytes.
constexpr int kColumns = 64;
constexpr int kSwizzleBytes = kColumns * 2;
constexpr unsigned kSwizzle = 1;  // wgmma's code for it
constexpr int kPanels = 2;
constexpr int kMain = kColumns * kPanels;  // columns of a stored row
constexpr int kRowBytes = kMain * 2;
constexpr int kSteps = (kHeadDim + 15) / 16;  // k16 steps of wgmma along head_dim
constexpr int kTileM = 192;  // query rows of a work tile
constexpr int kTileN = 80;  // keys of a visit
constexpr int kConsumers = 3;  // warpgroups, 64 query rows each
constexpr int kThreads = (kConsumers + 1) * 128;
// Row maxima are exact in the first kExact visits of a warpgroup, in masked ones, and while a row has none: there P is
// 1 at most. Elsewhere they are updated only when the average of P over a thread's columns passes 1.25. P is rounded:
// a row whose largest P is not 1 loses accuracy. What these two numbers cost: docs/experiments.md, 24.
constexpr int kExact = 3;
constexpr float kLimit = kTileN / 4 * 1.25f;  // of the sum over a thread's columns
constexpr int kStages = 3;  // buffers of K and of V
constexpr int kTileBytesM = kTileM * kRowBytes;
constexpr int kTileBytesN = kTileN * kRowBytes;
constexpr int kBuffersQ = 2;  // O is stored through the buffer of its Q
constexpr int kOffsetQ = 0;
constexpr int kOffsetK = kOffsetQ + kBuffersQ * kTileBytesM;
constexpr int kOffsetV = kOffsetK + kStages * kTileBytesN;
constexpr int kOffsetBounds = kOffsetV + kStages * kTileBytesN;
constexpr int kOffsetBarriers = kOffsetBounds;
// Barriers in shared memory, one of each kind a buffer. Full: the tile has landed, that is the producer has arrived and
// the bytes that it announced are there. Empty: all consumers have released the buffer. One thread arrives for its
// warpgroup, after it has waited for a wgmma, which is one operation of all four warps.
// At the empty barriers of K and V it arrives in both blocks of the cluster, as each one loads into buffers of both.
// Empty Q: O has been stored through the buffer.
constexpr int kFullQ = kOffsetBarriers;
constexpr int kEmptyQ = kFullQ + 8 * kBuffersQ;
constexpr int kFullK = kEmptyQ + 8 * kBuffersQ;
constexpr int kEmptyK = kFullK + 8 * kStages;
constexpr int kFullV = kEmptyK + 8 * kStages;
constexpr int kEmptyV = kFullV + 8 * kStages;
// The work tile of each buffer of Q, which the producer broadcasts: tile, head, batch, visit_count (0: none is left).
// 16 bytes each.
constexpr int kBroadcast = kEmptyV + 8 * kStages;
constexpr int kBroadcastBytes = 16;
static_assert(kBroadcast % 16 == 0, "read and written 16 bytes at a time");
constexpr int kSharedBytes = kBroadcast + kBroadcastBytes * kBuffersQ;
static_assert(kSharedBytes == 221344, "codegen/families/sm90.py disagrees");

// Named barriers, one of each kind for each consumer warpgroup; 0 is __syncthreads.
//   kWarpgroupBarrier  the four warps of the warpgroup
enum NamedBarrier { kOrderBarrier = 1, kWarpgroupBarrier = 1 + kConsumers };

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

// Warp: wait for all warps of the cluster. What they did to shared memory and barriers before is done.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Thread: arrive if `condition`; no branch, as divergence would make ptxas take the wgmma around it one by one.
__device__ __forceinline__ void barrier_arrive_if(bool condition, unsigned barrier) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %0, 0;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [%1];\n"
        "}" ::"r"(static_cast<int>(condition)), "r"(barrier)
        : "memory");
}

// Thread: arrive at the barrier at this place in the other block of the cluster if `condition`, without a branch.
__device__ __forceinline__ void barrier_arrive_there_if(bool condition, unsigned barrier) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .b32 there;\n"
        "setp.ne.b32 p, %0, 0;\n"
        "mov.u32 there, %%cluster_ctarank;\n"
        "xor.b32 there, there, 1;\n"
        "mapa.shared::cluster.u32 there, %1, there;\n"
        "@p mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(static_cast<int>(condition)), "r"(barrier)
        : "memory");
}

// Thread: write, read 16 bytes of shared memory.
__device__ __forceinline__ void shared_store(unsigned address, int4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ int4 shared_load(unsigned address) {
    int4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// Thread: start copying a box to shared memory; its bytes count towards `barrier`.
__device__ __forceinline__ void tma_load(unsigned dst, const TensorMap& map, unsigned barrier, int column, int row,
                                         int panel, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(dst),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(panel), "r"(head), "r"(batch)
        : "memory");
}

// Thread: the same to this place in both blocks of the cluster; the bytes count towards the barrier of each.
__device__ __forceinline__ void tma_multicast(unsigned dst, const TensorMap& map, unsigned barrier, int column, int row,
                                              int panel, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(panel), "r"(head), "r"(batch),
        "h"(static_cast<unsigned short>(3))  // a bit for each block
        : "memory");
}

// Thread: start copying a box from shared memory; elements outside the tensor are dropped.
__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned src, int column, int row, int panel, int head,
                                          int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
        "r"(src), "r"(column), "r"(row), "r"(panel), "r"(head), "r"(batch)
        : "memory");
}

// Thread: close the group of stores issued since the last commit.
__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Thread: wait until the sources of all its stores may be overwritten.
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Thread: order shared-memory writes, its own and those that it has waited for, before later reads by TMA or wgmma.
// Readers call it, not writers: these would wait until their writes are done, which products in flight delay.
__device__ __forceinline__ void proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Warpgroup: wait until no group, or at most one, is in flight.
__device__ __forceinline__ void wgmma_wait_all() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
__device__ __forceinline__ void wgmma_wait_all_but_one() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// Warps: named barrier `id` for `threads` threads: wait for all.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Thread: 2^x, about 2 ulp.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Thread: log2(x).
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Thread: round two floats to bf16; `low` takes the lower half of the register.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Warp: write four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Thread: hide x's value from ptxas, so that it keeps x in a register instead of computing it again. No instruction.
template <class Word>
__device__ __forceinline__ void pin(Word& x) {
    asm volatile("" : "+r"(x));
}

// ---- Mask: full ----------------------------------------------------------------------------------------------------

// Is key `key` visible to query `query`?
__device__ __forceinline__ bool visible(const Params& p, int query, int key) { return key < p.seq_k; }

// The query tile of the block with this rank; tiles with most work have the lowest rank.
__device__ __forceinline__ int owned_tile(const Params& p, int rank) {
    return rank;
}

// How many key tiles query tile `tile` visits.
__device__ __forceinline__ int visits(const Params& p, int tile) {
    return p.tiles_n;
}

// Visit number `index`: key tile * 2 + (1 if some of its pairs are hidden).
__device__ __forceinline__ int visit(const Params& p, int tile, int index) {
    return index * 2 + ((index + 1) * kTileN > p.seq_k);
}

// ---- Order of the work ---------------------------------------------------------------------------------------------

// Bytes of the L2 cache that K and V of a section of heads may take.
// The L2 cache of an H200 has 50 MB. How the value was chosen: docs/experiments.md, 11 and 89.
constexpr long long kCacheBytes = 32 << 20;

// Tiles of a head that the blocks of a cluster take two at a time: all that are full, but for an odd one.
__device__ __forceinline__ int paired_tiles(const Params& p) { return p.seq_q / kTileM / 2 * 2; }

// Which tile of which head; rank 0 is the tile with most work.
struct Place {
    int rank, head, batch;
};

// Work starts in the order of its index. Heads come in sections whose K and V fit the L2 cache together; in a section
// all heads' largest tiles come first, and the q heads that share K and V lie side by side.
// Two paired tiles of a head follow each other. The others come after all of these, first those with the lower rank.
__device__ __forceinline__ Place place_of(const Params& p, int index) {
    const int heads = p.heads_q;
    const int paired = paired_tiles(p);
    const int last = index - paired * heads * p.batch;
    if (last >= 0) {
        const int plane = last % (heads * p.batch);
        return {paired + last / (heads * p.batch), plane % heads, plane / heads};
    }
    const int together = heads / p.heads_kv;  // q heads with the same K and V
    const long long bytes = 4LL * kHeadDim * p.seq_k;
    const long long planes = static_cast<long long>(heads / together) * p.batch;
    const int fits = static_cast<int>(min(max(kCacheBytes / bytes, 1LL), planes));
    const int section = fits * together;
    const int first = index / (section * paired) * section;
    const int width = min(section, heads * p.batch - first);  // the last section may be narrower
    const int rest = index - first * paired;
    const int plane = first + rest / 2 % width;
    return {rest / (2 * width) * 2 + rest % 2, plane % heads, plane / heads};
}

// ---- Tiles ---------------------------------------------------------------------------------------------------------

// wgmma descriptor of panels; `leading` and `stride` are byte distances, `code` names the swizzle (PTX ISA, wgmma).
__device__ __forceinline__ unsigned long long descriptor(unsigned address, int leading, int stride, unsigned code) {
    const unsigned low = (address & 0x3ffff) >> 4 | leading >> 4 << 16;
    return static_cast<unsigned long long>(stride >> 4 | code << 30) << 32 | low;
}

// Where k16 step `step` along the columns of a tile of `rows` rows starts, in units of a descriptor's address.
__device__ __forceinline__ constexpr int step_at(int step, int rows) {
    return (step / (kColumns / 16) * rows * kSwizzleBytes + step % (kColumns / 16) * 32) >> 4;
}

// Thread: start copying `rows` rows of a head, from `row` on, to a tile.
__device__ __forceinline__ void load_tile(unsigned tile, const TensorMap& map, unsigned barrier, int row, int head,
                                          int batch, int rows) {
    tma_load(tile, map, barrier, 0, row, 0, head, batch);
}

// Thread: the same panel by panel. If `shared`, the two blocks of a cluster load the tile together: this one loads
// every other panel, from `first` on, to both blocks.
__device__ __forceinline__ void load_panels(unsigned tile, const TensorMap& map, unsigned barrier, int row, int head,
                                            int batch, int rows, int panels, bool shared, int first) {
#pragma unroll
    for (int panel = 0; panel < panels; ++panel) {
        const unsigned at = tile + panel * rows * kSwizzleBytes;
        if (!shared) {
            tma_load(at, map, barrier, panel * kColumns, row, 0, head, batch);
        } else if (panel % 2 == first) {
            tma_multicast(at, map, barrier, panel * kColumns, row, 0, head, batch);
        }
    }
}

// Descriptor of the rows from `row` on of a tile of `rows` rows, whether wgmma sums over columns or over rows (over
// columns it ignores the distance of panels).
__device__ __forceinline__ unsigned long long panels_at(unsigned tile, int rows, int row) {
    return descriptor(tile + row * kSwizzleBytes, rows * kSwizzleBytes, 8 * kSwizzleBytes, kSwizzle);
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows. TMA swizzles: it XORs the chunk's number
// with the row's place in the pattern.
__device__ __forceinline__ unsigned chunk_at(int row, int chunk, int rows) {
    const int place = chunk % 8 ^ row % 8;
    return chunk / 8 * rows * kSwizzleBytes + row * kSwizzleBytes + place * 16;
}

// Thread: store 64 rows, from `from` on, of a tile of `rows` rows as rows `row` and following of a head; rows past its
// end are dropped.
__device__ __forceinline__ void store_rows(const TensorMap& map, unsigned tile, int from, int row, int head, int batch,
                                           int rows) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        tma_store(map, tile + (panel * rows + from) * kSwizzleBytes, panel * kColumns, row, 0, head, batch);
    }
    tma_store_commit();
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Warpgroup: S (64 x 80) = or += Q K^T over 16 columns of head_dim, both from shared memory.
__device__ __forceinline__ void wgmma_scores(float (&d)[kTileN / 2], unsigned long long a, unsigned long long b,
                                             int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %42, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, %40, %41, add, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
                 : "l"(a), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: O (64 x 128) = or += P V over 16 keys, P from registers, V as it lies in memory.
__device__ __forceinline__ void wgmma_out(float (&d)[kHeadDim / 2], const unsigned (&a)[4], unsigned long long b,
                                          int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: S = Q K^T for the 64 rows of Q from row `row` of its tile on, asynchronously.
__device__ __forceinline__ void multiply_qk(float (&s)[kTileN / 2], unsigned q, int row, unsigned k) {
    const unsigned long long a = panels_at(q, kTileM, row);
    const unsigned long long b = panels_at(k, kTileN, 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        wgmma_scores(s, a + step_at(step, kTileM), b + step_at(step, kTileN), step > 0);
    }
}

// Warpgroup: O += P V, asynchronously; O = P V unless `accumulate`.
__device__ __forceinline__ void multiply_pv(float (&o)[kHeadDim / 2], const unsigned (&p)[kTileN / 16][4], unsigned v,
                                            bool accumulate) {
    const unsigned long long b = panels_at(v, kTileN, 0);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
        wgmma_out(o, p[step], b + (step * 16 * kSwizzleBytes >> 4), step > 0 || accumulate);
    }
}

// ---- Work tiles ----------------------------------------------------------------------------------------------------

// A place in a ring of `depth` buffers, and the parity of the barrier phase to wait for there.
template <int depth>
struct PipelineState {
    unsigned stage = 0;
    unsigned phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == depth) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// A work tile: a query tile of a head.
struct Work {
    int tile, head, batch;
};

// Work number `index`.
__device__ __forceinline__ Work work_at(const Params& p, int index) {
    const Place place = place_of(p, index);
    return {owned_tile(p, place.rank), place.head, place.batch};
}

// Work tiles, those that see nothing included.
__device__ __forceinline__ int count_work(const Params& p) {
    return p.tiles_m * p.heads_q * p.batch;
}

// The work of this block in round `round`, or -1. Rounds alternate direction, so that no block gets the larger
// work tile every time.
// The two blocks of a cluster have consecutive numbers. The last one may be a tile behind all others, without rows.
__device__ __forceinline__ int work_index(const Params& p, int round) {
    const int clusters = gridDim.x / 2;
    const int cluster = blockIdx.x / 2;
    const int first = (round * clusters + (round & 1 ? clusters - 1 - cluster : cluster)) * 2;
    const int index = first + static_cast<int>(blockIdx.x % 2);
    return first < count_work(p) ? index : -1;
}

// The first query row of a work tile.
__device__ __forceinline__ int first_row(const Params& p, const Work& work) {
    return work.tile * kTileM;
}

// How many key tiles a work tile visits.
__device__ __forceinline__ int visits_of(const Params& p, const Work& work) {
    return visits(p, work.tile);
}

// Visit `index` of a work tile: its key tile, and whether it is masked (`visit` says how the two are packed).
__device__ __forceinline__ int visit_of(const Params& p, const Work& work, int index) {
    return visit(p, work.tile, index);
}

// ---- Softmax -------------------------------------------------------------------------------------------------------

// Warpgroup: hide what the mask hides in the key tile that starts at `key0`; `row` is the thread's first query.
__device__ __forceinline__ void apply_mask(const Params& p, float (&s)[kTileN / 2], int row, int key0) {
    const float hidden = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 4) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int key = key0 + i * 2 + threadIdx.x % 4 * 2 + c;
            s[i + c] = visible(p, row, key) ? s[i + c] : hidden;
            s[i + 2 + c] = visible(p, row + 8, key) ? s[i + 2 + c] : hidden;
        }
    }
}

// Statistics of the two query rows of a thread.
struct RowStats {
    float row_max[2];  // the maximum of S that P is relative to: of the visits so far, not always the latest
    float row_sum[2];  // of P so far, this thread's columns only
    bool ordinary;     // whether all rows of the warp have a maximum, and none a large one

    __device__ __forceinline__ void reset() {
        row_max[0] = row_max[1] = __int_as_float(0xff800000);
        row_sum[0] = row_sum[1] = 0.0f;
        ordinary = false;
    }
};

// P is 2^(c S - base), where base is c times the row maximum: the exponent takes one FMA. Where base is above kLarge,
// its rounding error would change P noticeably. There the row maximum is subtracted from S first; the difference is
// exact wherever P is not 0.
constexpr float kLarge = 4096.0f;

// Warp: if the maximum of a row has grown, move all rows to their new maxima; then the result is true and O must be
// multiplied by `rescale`.
__device__ __forceinline__ bool update_row_max(const float (&s)[kTileN / 2], RowStats& stats, float scale_log2,
                                               float2& rescale) {
    const float empty = __int_as_float(0xff800000);
    float found[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        found[half] = s[half * 2];
#pragma unroll
        for (int i = half * 2; i < kTileN / 2; i += 4) {
            found[half] = fmaxf(found[half], fmaxf(s[i], s[i + 1]));
        }
        found[half] = fmaxf(found[half], __shfl_xor_sync(~0u, found[half], 1));
        found[half] = fmaxf(found[half], __shfl_xor_sync(~0u, found[half], 2));
    }
    if (!__any_sync(~0u, found[0] > stats.row_max[0] || found[1] > stats.row_max[1])) {
        return false;
    }
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(stats.row_max[half], found[half]);
        factor[half] = next == empty ? 1.0f : exp2_approx((stats.row_max[half] - next) * scale_log2);
        stats.row_max[half] = next;
        stats.row_sum[half] *= factor[half];
    }
    rescale = make_float2(factor[0], factor[1]);
    const float larger = fmaxf(fabsf(stats.row_max[0]), fabsf(stats.row_max[1]));  // infinite if one has no maximum
    stats.ordinary = __all_sync(~0u, larger * scale_log2 <= kLarge);
    return true;
}

// Warp: P = 2^(scale log2(e) (S - row_max)) in the registers and precision that wgmma takes as its A operand. The
// result is that of `update_row_max`. Unless `exact`, P is first computed from the maxima of earlier visits: that saves
// the search for new ones, except where row sums show that P became large. From S with a large maximum that maximum is
// subtracted first, which is exact wherever P is not 0.
__device__ __forceinline__ bool softmax_step(float (&s)[kTileN / 2], unsigned (&p)[kTileN / 16][4], RowStats& stats,
                                             bool exact, float scale_log2, float2& rescale) {
    const float empty = __int_as_float(0xff800000);
    bool moved = false;
    float sum[2];
    for (bool again = true; again;) {
        float base[2] = {stats.row_max[0] * scale_log2, stats.row_max[1] * scale_log2};
        if (exact) {
            moved = update_row_max(s, stats, scale_log2, rescale);
            const float finite[2] = {stats.row_max[0] == empty ? 0.0f : stats.row_max[0],
                                     stats.row_max[1] == empty ? 0.0f : stats.row_max[1]};
            base[0] = finite[0] * scale_log2;
            base[1] = finite[1] * scale_log2;
            if (!stats.ordinary && __any_sync(~0u, fmaxf(fabsf(base[0]), fabsf(base[1])) > kLarge)) {
#pragma unroll
                for (int i = 0; i < kTileN / 2; ++i) {
                    s[i] -= finite[i / 2 % 2];
                }
                base[0] = base[1] = 0.0f;
            }
        }
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < kTileN / 2; i += 2) {
            const float left = exp2_approx(s[i] * scale_log2 - base[i / 2 % 2]);
            const float right = exp2_approx(s[i + 1] * scale_log2 - base[i / 2 % 2]);
            sum[i / 2 % 2] += left + right;
            p[i / 8][i / 2 % 4] = pack(left, right);
        }
        again = !exact && __any_sync(~0u, !(sum[0] <= kLimit && sum[1] <= kLimit));
        exact = true;
    }
    stats.row_sum[0] += sum[0];
    stats.row_sum[1] += sum[1];
    return moved;
}

// ---- Producer ------------------------------------------------------------------------------------------------------

// One thread, which loads the tiles of the block's work tiles with TMA as soon as buffers are empty.
struct Producer {
    const Params& p;
    const TensorMaps& maps;
    const unsigned smem;  // start of shared memory
    PipelineState<kBuffersQ> q_pipe;
    PipelineState<kStages> kv_pipe;

    __device__ __forceinline__ void wait_empty_q() const {
        barrier_wait(smem + kEmptyQ + q_pipe.stage * 8, q_pipe.phase ^ 1);
    }

    __device__ __forceinline__ void load_q(const Work& work) {
        barrier_expect(smem + kFullQ + q_pipe.stage * 8, kTileBytesM);
        load_tile(smem + kOffsetQ + q_pipe.stage * kTileBytesM, maps.q, smem + kFullQ + q_pipe.stage * 8,
                  first_row(p, work), work.head, work.batch, kTileM);
        q_pipe.advance();
    }

    __device__ __forceinline__ void load_k(int key0, int head_kv, int batch, bool shared) const {
        barrier_wait(smem + kEmptyK + kv_pipe.stage * 8, kv_pipe.phase ^ 1);
        barrier_expect(smem + kFullK + kv_pipe.stage * 8, kTileBytesN);
        load_panels(smem + kOffsetK + kv_pipe.stage * kTileBytesN, maps.k, smem + kFullK + kv_pipe.stage * 8, key0,
                    head_kv, batch, kTileN, kPanels, shared, blockIdx.x % 2);
    }

    __device__ __forceinline__ void load_v(int key0, int head_kv, int batch, bool shared) {
        barrier_wait(smem + kEmptyV + kv_pipe.stage * 8, kv_pipe.phase ^ 1);
        barrier_expect(smem + kFullV + kv_pipe.stage * 8, kTileBytesN);
        load_panels(smem + kOffsetV + kv_pipe.stage * kTileBytesN, maps.v, smem + kFullV + kv_pipe.stage * 8, key0,
                    head_kv, batch, kTileN, kPanels, shared, blockIdx.x % 2 ^ 1);
        kv_pipe.advance();
    }

    // Consumers read this once Q is full: the arrival that announces Q releases these writes.
    __device__ __forceinline__ void broadcast(const Work& work, int count) const {
        const unsigned words = smem + kBroadcast + q_pipe.stage * kBroadcastBytes;
        shared_store(words, make_int4(work.tile, work.head, work.batch, count));
    }

    // No visits: the work has ended.
    __device__ __forceinline__ void broadcast_end() const {
        for (int i = 0; i < kBroadcastBytes; i += 16) {
            shared_store(smem + kBroadcast + q_pipe.stage * kBroadcastBytes + i, make_int4(0, 0, 0, 0));
        }
        barrier_arrive(smem + kFullQ + q_pipe.stage * 8);
    }

    __device__ __forceinline__ void run() {
        for (int round = 0, index = work_index(p, 0); index >= 0; index = work_index(p, ++round)) {
            const Work work = work_at(p, index);
            // Do both blocks load K and V together?
            const bool shared = index < paired_tiles(p) * p.heads_q * p.batch;
            const int head_kv = work.head / (p.heads_q / p.heads_kv);
            const int count = visits_of(p, work);
            if (count == 0) {
                continue;
            }
            wait_empty_q();
            broadcast(work, count);
            load_q(work);
            int entry = visit_of(p, work, 0);
#pragma unroll 1  // registers are few
            for (int i = 0; i < count; ++i) {
                const int key0 = (entry >> 1) * kTileN;
                if (i + 1 < count) {
                    entry = visit_of(p, work, i + 1);
                }
                load_k(key0, head_kv, work.batch, shared);
                load_v(key0, head_kv, work.batch, shared);
            }
        }
        wait_empty_q();
        broadcast_end();
    }
};

// ---- Epilogue ------------------------------------------------------------------------------------------------------

// Thread: O times the factors of its two rows.
__device__ __forceinline__ void rescale_out(float (&o)[kHeadDim / 2], float2 factor) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
        o[i] *= i / 2 % 2 ? factor.y : factor.x;
    }
}

// Thread: the sum of what the four threads of a row have.
__device__ __forceinline__ float sum_of_row(float sum) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

// ln(sum exp(scale S)) of a row.
__device__ __forceinline__ float lse_of(const Params& p, float row_max, float row_sum) {
    const float ln2 = 0.6931471805599453f;
    const float empty = __int_as_float(0xff800000);
    return row_sum == 0.0f ? empty : row_max * p.scale + log2_approx(row_sum) * ln2;
}

// Warpgroup: store out = O / row_sum and lse of its 64 rows, O through its rows of the buffer `q`.
__device__ __forceinline__ void store_out(const Params& p, const TensorMaps& maps, const Work& work,
                                          const RowStats& stats, float (&o)[kHeadDim / 2], unsigned q, int warpgroup) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int query0 = first_row(p, work) + warpgroup * 64;
    float* lse = p.lse + (static_cast<long long>(work.batch) * p.heads_q + work.head) * p.seq_q;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_row(stats.row_sum[half]);
        inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int row = query0 + warp * 16 + lane / 4 + half * 8;
        if (lane % 4 == 0 && row < p.seq_q) {
            lse[row] = lse_of(p, stats.row_max[half], sum);
        }
    }
    rescale_out(o, make_float2(inverse[0], inverse[1]));
    const int row = warpgroup * 64 + warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i + 7 < kHeadDim / 2; i += 8) {
        stmatrix(q + chunk_at(row, i / 4 + lane / 16, kTileM), pack(o[i], o[i + 1]), pack(o[i + 2], o[i + 3]),
                 pack(o[i + 4], o[i + 5]), pack(o[i + 6], o[i + 7]));
    }
    named_sync(kWarpgroupBarrier + warpgroup, 128);
    if (threadIdx.x % 128 == 0) {
        proxy_fence();  // before TMA reads the buffer, and, where no row is stored, before it loads the next Q there
        if (query0 < p.seq_q) {
            store_rows(maps.out, q, warpgroup * 64, query0, work.head, work.batch, kTileM);
        }
    }
}

// ---- Consumer ------------------------------------------------------------------------------------------------------

// Visits of a work tile, by their numbers: from the first on.
struct Range {
    static constexpr int begin = 0;
    int end;
};

// The end of a work tile after its last softmax: the last P V and the store of O.
struct TileTail {
    Work work;
    unsigned q_stage;  // the buffer of its Q, through which O is stored
    unsigned v_stage;  // of the last P V
    bool accumulate;   // whether there was a P V before it
    bool overlap;      // whether S of the next work tile is issued with the last P V
};

// One consumer warpgroup, which owns 64 query rows of every work tile. Its visit i is
//
//     S = Q K_i^T               issue_qk                                  wgmma, to s
//     P = 2^(scale log2(e) (S - row_max))   apply_mask_and_release_k, softmax_step   s to p_frags
//     O = O + P V_i             issue_pv                                  wgmma, to o
//
// wgmma is asynchronous. Inside a work tile, S of visit i is in flight together with P V of visit i - 1;
// at its end, S of the next work tile is in flight while O is stored.
//
// ptxas keeps wgmma asynchronous, and what descriptors depend on in uniform registers, only as long as
//   - no wgmma is in flight where a loop begins or ends, nor where two sides of a branch meet of which only one has
//     issued some: what a side issues it also waits for (else C7514, C7515: it waits for every wgmma by itself);
//   - no loop around wgmma ends in a divergent branch: predicate the one instruction in it, with barrier_arrive_if
//     (else all that the loop carries counts as divergent: R2UR before each wgmma, spills);
//   - all functions here are inlined, and accumulators indexed by constants (else they live in memory, and C7520).
struct Consumer {
    const Params& p;
    const TensorMaps& maps;
    unsigned smem;        // start of shared memory
    const int warpgroup;  // 0 to kConsumers - 1
    const bool leader;    // the one thread that acts for the warpgroup

    PipelineState<kBuffersQ> q_pipe;
    PipelineState<kStages> kv_pipe;  // of K; V is used one visit later

    Work work;        // the work tile
    int visit_count;  // of the work tile; 0: none is left
    Range kv_range;   // the visits that show these rows anything
    int row;          // the thread's first query row; its other one is 8 further down
    int entry;        // of this visit: its key tile, and whether it is masked

    unsigned q;  // the buffer of Q
    float s[kTileN / 2];
    float o[kHeadDim / 2];
    unsigned p_frags[kTileN / 16][4];
    RowStats stats;

    __device__ __forceinline__ Consumer(const Params& p, const TensorMaps& maps, unsigned smem, int warpgroup)
        : p(p), maps(maps), smem(smem), warpgroup(warpgroup), leader(threadIdx.x % 128 == 0) {
        pin(this->smem);  // else the main loop reads it anew (S2UR)
    }

    // ---- Barriers ----

    __device__ __forceinline__ void wait_q() const { barrier_wait(smem + kFullQ + q_pipe.stage * 8, q_pipe.phase); }

    __device__ __forceinline__ void wait_k() const { barrier_wait(smem + kFullK + kv_pipe.stage * 8, kv_pipe.phase); }

    __device__ __forceinline__ void wait_v(const PipelineState<kStages>& v_pipe) const {
        barrier_wait(smem + kFullV + v_pipe.stage * 8, v_pipe.phase);
    }

    // If `condition`: arrive at an empty barrier of K or V for the warpgroup, in both blocks.
    __device__ __forceinline__ void release_if(bool condition, unsigned barrier) const {
        barrier_arrive_if(condition, barrier);
        barrier_arrive_there_if(condition, barrier);
    }
    __device__ __forceinline__ void release(unsigned barrier) const { release_if(leader, barrier); }

    // If `stored`: release the buffer of Q once O has been stored through it.
    __device__ __forceinline__ void release_q(unsigned stage, bool stored) const {
        tma_store_wait();
        barrier_arrive_if(stored && leader, smem + kEmptyQ + stage * 8);
    }

    // ---- Steps of a visit ----

    __device__ __forceinline__ void set_visit(int i) {
        entry = visit_of(p, work, i);
    }

    // Whether the mask hides any of the visit's pairs from these rows.
    __device__ __forceinline__ bool masked() const {
        return entry & 1;
    }

    // Start S = Q K^T.
    __device__ __forceinline__ void issue_qk() {
        wgmma_fence();
        multiply_qk(s, q, warpgroup * 64, smem + kOffsetK + kv_pipe.stage * kTileBytesN);
        wgmma_commit();
    }

    // Start O += P V, or O = P V unless `accumulate`.
    __device__ __forceinline__ void issue_pv(unsigned stage, bool accumulate) {
        wgmma_fence();
        multiply_pv(o, p_frags, smem + kOffsetV + stage * kTileBytesN, accumulate);
        wgmma_commit();
    }

    // Mask S, which is complete, and release K.
    __device__ __forceinline__ void apply_mask_and_release_k() {
        accumulator_fence(s);
        if (masked()) {
            const int key0 = (entry >> 1) * kTileN;
            apply_mask(p, s, row, key0);
        }
        release(smem + kEmptyK + kv_pipe.stage * 8);
    }

    // ---- Work tiles ----

    // The work tile that the producer has broadcast. All warps have read it before they release the buffer of Q: the
    // warpgroup's named barrier lies in between, in store_out or skip_visits.
    __device__ __forceinline__ void fetch_tile() {
        wait_q();
        const unsigned words = smem + kBroadcast + q_pipe.stage * kBroadcastBytes;
        const int4 tile = shared_load(words);
        work = {__shfl_sync(~0u, tile.x, 0), __shfl_sync(~0u, tile.y, 0), __shfl_sync(~0u, tile.z, 0)};
        visit_count = __shfl_sync(~0u, tile.w, 0);
        kv_range = {visit_count};
    }

    // Release K and V of `count` visits that show these rows nothing. No wgmma may be in flight.
    __device__ __forceinline__ void skip_visits(int count) {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            wait_k();  // to arrive earlier would count for the visit before
            named_sync(kWarpgroupBarrier + warpgroup, 128);  // all warps have seen this phase: it may end
            release_if(threadIdx.x % 128 == 0, smem + kEmptyK + kv_pipe.stage * 8);
            wait_v(kv_pipe);
            named_sync(kWarpgroupBarrier + warpgroup, 128);
            release_if(leader, smem + kEmptyV + kv_pipe.stage * 8);
            kv_pipe.advance();
        }
    }

    // Skip a work tile, and fetch the next.
    __device__ __forceinline__ void skip_tile() {
        skip_visits(visit_count);
        barrier_arrive_if(leader, smem + kEmptyQ + q_pipe.stage * 8);
        q_pipe.advance();
        fetch_tile();
    }

    // Whether a work tile is left. The first one without rows of this warpgroup is followed only by others like it.
    __device__ __forceinline__ bool next_visible_tile() const {
        return first_row(p, work) + warpgroup * 64 < p.seq_q && visit_count > 0;
    }

    // Start S of the work tile's first visit.
    __device__ __forceinline__ void begin_tile() {
        set_visit(kv_range.begin);
        q = smem + kOffsetQ + q_pipe.stage * kTileBytesM;
        wait_k();
        issue_qk();
    }

    // Go on to the next work tile.
    __device__ __forceinline__ TileTail leave_tile() {
        TileTail tail = {work, q_pipe.stage, kv_pipe.stage, kv_range.end - kv_range.begin > 1, false};
        wait_v(kv_pipe);
        kv_pipe.advance();
        q_pipe.advance();
        fetch_tile();
        tail.overlap = next_visible_tile();
        return tail;
    }

    // The last P V of a work tile, then its O. If `overlap`, O is stored while S of the next work tile is computed.
    // A template, not a parameter: what is in flight would differ where the sides of its branches meet.
    template <bool overlap>
    __device__ __forceinline__ void finish_tile(const TileTail& tail) {
        issue_pv(tail.v_stage, tail.accumulate);
        if constexpr (overlap) {
            begin_tile();
            wgmma_wait_all_but_one();  // O is complete, S may still run
        } else {
            wgmma_wait_all();
        }
        accumulator_fence(o);
        release(smem + kEmptyV + tail.v_stage * 8);
        store_out(p, maps, tail.work, stats, o, smem + kOffsetQ + tail.q_stage * kTileBytesM, warpgroup);
        if constexpr (overlap) {
            wgmma_wait_all();
        }
    }

    // ---- The loop over work tiles and visits ----

    __device__ __forceinline__ void run() {
        fetch_tile();
        if (next_visible_tile()) {
            begin_tile();
            wgmma_wait_all();
            TileTail tail = {};
            do {
                // The first visit.
                row = first_row(p, work) + warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
                stats.reset();
                float2 rescale;
                apply_mask_and_release_k();
                softmax_step(s, p_frags, stats, true, p.scale_log2, rescale);
                release_q(tail.q_stage, tail.overlap);

                // The others: S of visit i together with P V of visit i - 1.
                for (int i = kv_range.begin + 1; i < kv_range.end; ++i) {
                    set_visit(i);
                    const PipelineState<kStages> v_pipe = kv_pipe;
                    kv_pipe.advance();
                    wait_k();
                    issue_qk();
                    wait_v(v_pipe);
                    issue_pv(v_pipe.stage, i > kv_range.begin + 1);
                    wgmma_wait_all_but_one();  // S is complete, P V may still run
                    apply_mask_and_release_k();
                    wgmma_wait_all();
                    accumulator_fence(o);
                    release(smem + kEmptyV + v_pipe.stage * 8);
                    const bool exact = masked() || i < kv_range.begin + kExact || !stats.ordinary;
                    if (softmax_step(s, p_frags, stats, exact, p.scale_log2, rescale)) {
                        rescale_out(o, rescale);
                    }
                }

                tail = leave_tile();
                if (tail.overlap) {
                    finish_tile<true>(tail);
                }
            } while (tail.overlap);
            finish_tile<false>(tail);
            release_q(tail.q_stage, true);
        }
        while (visit_count > 0) {
            skip_tile();
        }
    }
};

// ---- Kernel --------------------------------------------------------------------------------------------------------

// Grid: tiles_m x batch x heads_q work tiles, walked by one block per multiprocessor.
// Two blocks are a cluster: they take two consecutive work tiles at a time.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
attnforge_fwd_sm90a_bf16_d128_full_a16_m192_n80_s3_p0_r1_k0_q0_b32_c1(
    const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned smem = shared_address(shared);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // warp-uniform, also for ptxas
    if (threadIdx.x == 0) {
        for (int i = 0; i < kBuffersQ; ++i) {
            barrier_init(smem + kFullQ + i * 8, 1);
            barrier_init(smem + kEmptyQ + i * 8, kConsumers);  // leaders of warpgroups
        }
        const int releases = kConsumers * 2;
        for (int i = 0; i < kStages; ++i) {
            barrier_init(smem + kFullK + i * 8, 1);
            barrier_init(smem + kEmptyK + i * 8, releases);
            barrier_init(smem + kFullV + i * 8, 1);
            barrier_init(smem + kEmptyV + i * 8, releases);
        }
        barrier_init_fence();
    }
    cluster_sync();  // the barriers of the other block are ready, too
    // All warps of a warpgroup take part in setmaxnreg; then one thread of the first goes on.
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == 0) {
            Producer{p, maps, smem}.run();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        Consumer(p, maps, smem, warpgroup - 1).run();
    }
    cluster_sync();  // until now the other block may have copied to this one, or arrived at its barriers
}
