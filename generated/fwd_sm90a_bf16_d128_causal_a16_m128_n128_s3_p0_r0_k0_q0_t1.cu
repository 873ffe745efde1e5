// attnforge_fwd_sm90a_bf16_d128_causal_a16_m128_n128_s3_p0_r0_k0_q0_t1
// Generated from templates/sm90a/forward_split.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch sm90a --dtype bf16 --head-dim 128 --mask causal --align
//     16 --set tile_m=128 --set tile_n=128 --set stages=3 --set ping_pong=0
//     --set persistent=0 --set dynamic=0 --set q_in_regs=0 --set splits=1
//
//   tile_m      128   query rows per tile, 64 for each consumer warpgroup
//   tile_n      128   keys per step of the main loop
//   stages        3   shared-memory buffers for K and for V
//   ping_pong     0   1: warpgroup ordering barrier: the softmax of one overlaps the products of another
//   persistent    0   1: one block per multiprocessor walks many tiles
//   dynamic       0   1: dynamic tile scheduler: a block takes its next work tile from tile_counter
//   q_in_regs     0   1: keep the fragments of Q in registers
//   splits        1   1: for few queries: blocks split the keys, and the q heads of a kv head are rows of one tile
//
// Attention forward of short queries. A producer thread loads key tiles with TMA; 2 consumer warpgroups
// multiply them with wgmma. Blocks of a cluster combine the results of their ranges, a second kernel
// those of splits.
//
// symbol      shape                 meaning
//   Q         kTileM x kHeadDim     packed rows: query * group + q head of the group; 64 for each consumer warpgroup
//   K, V      kTileN x kHeadDim     key and value tile of a visit
//   S         64 x kTileN           Q K^T of a warpgroup, fp32, in registers
//   P         64 x kTileN           2^(scale log2(e) (S - row_max)), 16-bit, in registers: the A operand of P V
//   O         64 x kHeadDim         sum of P V over the visits, fp32, in registers; out = O / row_sum
//   row_max   64                    row maximum of S over the visits so far, not always the latest
//   row_sum   64                    row sum of P
//   lse       64                    ln(sum exp(scale S)) = scale row_max + ln(row_sum)
//   group                           q heads of a kv head
//   split                           a part of the key tiles that the rows see, for one cluster
//   range                           a part of the key tiles of a split, for one block
//   visit     0 to visits - 1       one key tile of the range
//
// Fragments: element i of a thread is row warp*16 + lane/4 + (i/2%2)*8, column i/4*8 + lane%4*2 + i%2.

typedef unsigned short element;  // bf16, only ever moved as bits

// A tensor (batch, heads, seq, head_dim): its address, and strides in elements. Rows are contiguous.
struct TensorRef {
    void* data;
    long long batch, head, row;
};

struct Params {
    TensorRef q;  // (batch, heads_q, seq_q, head_dim)
    TensorRef out;  // (batch, heads_q, seq_q, head_dim_v)
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
    float* out_accum;  // fp32 out and lse of splits of keys, (kv_splits, batch, heads_q, seq_q, columns), or of pieces
    int batch;
    int heads_q;
    int heads_kv;  // divides heads_q
    int seq_q;
    int seq_k;
    int tiles_m;  // ceil(seq_q / tile_m)
    int tiles_n;  // ceil(seq_k / tile_n)
    int tiles_packed;  // ceil(seq_q * heads_q / heads_kv / tile_m)
    int kv_splits;  // parts that the keys of each query tile are split into, of a block or a cluster
    int cluster_size;  // blocks of a cluster, which share a part of the keys, 1 to 8
    int combine_warps;  // warps that combine the results of a row's splits: 1, 2, 4 or 8
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// TMA descriptors of the tensors, encoded by the host for each call.
struct TensorMaps {
    TensorMap k, v;
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
constexpr int kTileM = 128;  // packed rows of a block
constexpr int kTileN = 128;  // keys of a visit
constexpr int kConsumers = 2;  // warpgroups, 64 packed rows each
constexpr int kThreads = (kConsumers + 1) * 128;
// Named barriers: of all threads, of consumers, of each warpgroup, and to order warpgroups.
constexpr int kReady = 1;
constexpr int kAll = 2;
constexpr int kWarpgroup = 3;
constexpr int kOrder = kWarpgroup + kConsumers;
constexpr int kCombineWarps = 256 / 32;
// Row maxima are exact in the first kExact visits, in masked ones, and while a row has none: there P is 1 at most.
// Elsewhere they are updated only when the average of P over a thread's columns passes 1.25 (docs/experiments.md, 24).
constexpr int kExact = 3;
constexpr float kLimit = kTileN / 4 * 1.25f;  // of the sum over a thread's columns
constexpr int kStages = 3;  // buffers of K and of V
constexpr int kTileBytesM = kTileM * kRowBytes;
constexpr int kTileBytesN = kTileN * kRowBytes;
constexpr int kOffsetQ = 0;
constexpr int kOffsetK = kOffsetQ + kTileBytesM;
constexpr int kOffsetV = kOffsetK + kStages * kTileBytesN;
constexpr int kOffsetBounds = kOffsetV + kStages * kTileBytesN;
constexpr int kFullK = kOffsetBounds;
// Barriers in shared memory, one of each kind a buffer. Full: the tile has landed, that is the producer has arrived and
// the bytes that it announced are there. Empty: all warps of consumers have released the buffer.
constexpr int kEmptyK = kFullK + 8 * kStages;
constexpr int kFullV = kEmptyK + 8 * kStages;
constexpr int kEmptyV = kFullV + 8 * kStages;
constexpr int kSharedBytes = kEmptyV + 8 * kStages;
static_assert(kSharedBytes == 229472, "codegen/families/sm90.py disagrees");
// Results of the range, fp32, in the place of Q, K and V: rows of out, then their lse. Rows are 32 bytes longer than
// their columns, so that eight of them are in different banks.
constexpr int kResultBytes = (kHeadDim + 7) / 8 * 32 + 32;  // of a row of out
constexpr int kOffsetLse = kTileM * kResultBytes;
constexpr int kOffsetWeights = kOffsetLse + kTileM * 4;  // of ranges, for each row that this block combines
static_assert(kOffsetWeights + kTileM * 16 <= kOffsetBounds, "results must fit where Q, K and V were");

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

// Thread: if `condition`, read a float, or four consecutive ones, at this place in block `block_rank` of the cluster.
// No branch, so that several loads are in flight.
__device__ __forceinline__ void cluster_load_if(bool condition, float& x, unsigned address, unsigned block_rank) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .b32 there;\n"
        "setp.ne.b32 p, %3, 0;\n"
        "@p mapa.shared::cluster.u32 there, %1, %2;\n"
        "@p ld.shared::cluster.f32 %0, [there];\n"
        "}"
        : "+f"(x)
        : "r"(address), "r"(block_rank), "r"(static_cast<int>(condition)));
}
__device__ __forceinline__ void cluster_load_if(bool condition, float4& x, unsigned address, unsigned block_rank) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .b32 there;\n"
        "setp.ne.b32 p, %6, 0;\n"
        "@p mapa.shared::cluster.u32 there, %4, %5;\n"
        "@p ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n"
        "}"
        : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
        : "r"(address), "r"(block_rank), "r"(static_cast<int>(condition)));
}

// Thread: start copying 16 bytes to shared memory, zeros unless `inside`; wait for all such copies.
__device__ __forceinline__ void cp_async(unsigned dst, const void* src, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
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

// Warps: named barrier `id` for `threads` threads: wait for all, or only report.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

// ---- Mask: causal --------------------------------------------------------------------------------------------------

// Is key `key` visible to query `query`? Bottom-right aligned: the last query sees the last key.
__device__ __forceinline__ bool visible(const Params& p, int query, int key) {
    return key < min(p.seq_k, query + 1 + p.seq_k - p.seq_q);
}

// The query tile of the block with this rank; tiles with most work have the lowest rank.
__device__ __forceinline__ int owned_tile(const Params& p, int rank) {
    return p.tiles_m - 1 - rank;
}

// How many key tiles query tile `tile` visits.
__device__ __forceinline__ int visits(const Params& p, int tile) {
    const int keys = (tile + 1) * kTileM + p.seq_k - p.seq_q;
    return keys <= 0 ? 0 : min(p.tiles_n, (keys + kTileN - 1) / kTileN);
}

// Visit number `index`: key tile * 2 + (1 if some of its pairs are hidden).
__device__ __forceinline__ int visit(const Params& p, int tile, int index) {
    const int keys = min(p.seq_k, tile * kTileM + 1 + p.seq_k - p.seq_q);
    return index * 2 + ((index + 1) * kTileN > keys);
}

// ---- Order of the work ---------------------------------------------------------------------------------------------

// Bytes of the L2 cache that K and V of a section of heads may take.
// The L2 cache of an H200 has 50 MB. How the value was chosen: docs/experiments.md, 11 and 89.
constexpr long long kCacheBytes = 16 << 20;

// Which tile of which head; rank 0 is the tile with most work.
struct Place {
    int rank, head, batch;
};

// Work starts in the order of its index. Heads come in sections whose K and V fit the L2 cache together; in a section
// all heads' largest tiles come first, and the q heads that share K and V lie side by side.
__device__ __forceinline__ Place place_of(const Params& p, int index) {
    const int heads = p.heads_q;
    const int together = heads / p.heads_kv;  // q heads with the same K and V
    const long long bytes = 4LL * kHeadDim * p.seq_k;
    const long long planes = static_cast<long long>(heads / together) * p.batch;
    const int fits = static_cast<int>(min(max(kCacheBytes / bytes, 1LL), planes));
    const int section = fits * together;
    const int first = index / (section * p.tiles_m) * section;
    const int width = min(section, heads * p.batch - first);  // the last section may be narrower
    const int rest = index - first * p.tiles_m;
    const int plane = first + rest % width;
    return {rest / width, plane % heads, plane / heads};
}

// ---- Ranges of keys ------------------------------------------------------------------------------------------------

constexpr int kOutColumns = (kHeadDim + 7) / 8 * 8;  // of a row of partial results

// A work tile: kTileM packed rows of one kv head, and a range of the key tiles that they see.
struct Work {
    int head_kv, batch;
    int row0;   // first packed row
    int tile;   // query tile that has these rows
    int split;  // part of the key tiles of the cluster
    int rank;   // of the block in the cluster, which has as many ranges as blocks
    int first_visit, visits;
};

// Query heads of a kv head.
__device__ __forceinline__ int group_of(const Params& p) { return p.heads_q / p.heads_kv; }

// The query of a packed row.
__device__ __forceinline__ int query_of(const Params& p, int row) { return row / group_of(p); }

// Work tile number `index`: ranges of a cluster fastest, then packed tiles, splits, kv heads, batch entries.
__device__ __forceinline__ Work work_at(const Params& p, int index) {
    Work work;
    work.rank = index % p.cluster_size;
    index /= p.cluster_size;
    const int tile = index % p.tiles_packed;
    index /= p.tiles_packed;
    work.split = index % p.kv_splits;
    index /= p.kv_splits;
    work.head_kv = index % p.heads_kv;
    work.batch = index / p.heads_kv;
    work.row0 = tile * kTileM;
    work.tile = tile / group_of(p);
    const long long all = visits(p, work.tile);
    const int ranges = p.kv_splits * p.cluster_size;
    const int range = work.split * p.cluster_size + work.rank;
    work.first_visit = static_cast<int>(all * range / ranges);
    work.visits = static_cast<int>(all * (range + 1) / ranges) - work.first_visit;
    return work;
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

// ---- Products ------------------------------------------------------------------------------------------------------

// Warpgroup: S (64 x 128) = or += Q K^T over 16 columns of head_dim, both from shared memory.
__device__ __forceinline__ void wgmma_scores(float (&d)[kTileN / 2], unsigned long long a, unsigned long long b,
                                             int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, add, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
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

// ---- Softmax -------------------------------------------------------------------------------------------------------

// Warpgroup: hide what the mask hides in the key tile that starts at `key0`; `row`, `row_below`: the thread's queries.
__device__ __forceinline__ void apply_mask(const Params& p, float (&s)[kTileN / 2], int row, int row_below, int key0) {
    const float hidden = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 4) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int key = key0 + i * 2 + threadIdx.x % 4 * 2 + c;
            s[i + c] = visible(p, row, key) ? s[i + c] : hidden;
            s[i + 2 + c] = visible(p, row_below, key) ? s[i + 2 + c] : hidden;
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

// ---- Results of ranges ---------------------------------------------------------------------------------------------

// An lse, 0 in the place of -infinity.
__device__ __forceinline__ float finite(float x) { return x == __int_as_float(0xff800000) ? 0.0f : x; }

// Columns `column` (even) and the next one of a row of out.
__device__ __forceinline__ void store_pair(element* row, int column, float x, float y) {
    *reinterpret_cast<unsigned*>(row + column) = pack(x, y);
}

// Rows of out of a call, and the number of one of them.
__device__ __forceinline__ long long count_rows(const Params& p) {
    return static_cast<long long>(p.batch) * p.heads_q * p.seq_q;
}
__device__ __forceinline__ long long row_at(const Params& p, int batch, int head, int query) {
    return (static_cast<long long>(batch) * p.heads_q + head) * p.seq_q + query;
}

// The lse of each split, after the outs of all.
__device__ __forceinline__ float* lse_accum(const Params& p) {
    return p.out_accum + p.kv_splits * count_rows(p) * kOutColumns;
}

// Of several ranges: the greatest lse, and the sum of exp(lse_i - most).
struct LseSum {
    float most, sum;
};

// exp(lse - most); of no keys at all, whose `most` is -inf, 0.
__device__ __forceinline__ float weight_of(float lse, float most) {
    const float log2e = 1.44269504f;
    return exp2_approx((lse - finite(most)) * log2e);
}

__device__ __forceinline__ float lse_of(LseSum all) {
    return all.most + (all.sum == 0.0f ? 0.0f : log2_approx(all.sum) * 0.6931471805599453f);
}

// Warp: of `count` ranges. `lse` is that of the first one, others follow `stride` floats apart.
__device__ __forceinline__ LseSum combine_lse(const float* lse, long long stride, int count) {
    const int lane = threadIdx.x % 32;
    float most = __int_as_float(0xff800000);
    for (int i = lane; i < count; i += 32) {
        most = fmaxf(most, lse[i * stride]);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
    }
    float sum = 0.0f;
    for (int i = lane; i < count; i += 32) {
        sum += weight_of(lse[i * stride], most);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
    }
    return {most, sum};
}

// Thread: four columns of the outs of four ranges of `count`, every `step`-th one from `first` on; past the end zeros.
__device__ __forceinline__ void load_outs(float4 (&outs)[4], const float* out, long long stride, int first, int count,
                                          int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        outs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i * step < count) {
            outs[i] = *reinterpret_cast<const float4*>(out + (first + i * step) * stride);
        }
    }
}

// Thread: four columns of the sum of exp(lse_i - lse) out_i over every `step`-th of `count` ranges, from `first` on.
// `outs`: of the first four, which are loaded before the weights are known.
__device__ __forceinline__ float4 weigh(float4 (&outs)[4], const float* out, long long out_stride, const float* lses,
                                        long long lse_stride, LseSum all, int first, int count, int step) {
    const float inverse = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (; first < count; first += 4 * step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int range = min(first + i * step, count - 1);  // of those past the end, outs are 0
            const float weight = weight_of(lses[range * lse_stride], all.most) * inverse;
            sum.x += weight * outs[i].x;
            sum.y += weight * outs[i].y;
            sum.z += weight * outs[i].z;
            sum.w += weight * outs[i].w;
        }
        load_outs(outs, out, out_stride, first + 4 * step, count, step);
    }
    return sum;
}

// Thread: four columns of a row of out.
__device__ __forceinline__ void store_out(const Params& p, int batch, int head, int query, int col, float4 x) {
    element* row = static_cast<element*>(p.out.data) + batch * p.out.batch + head * p.out.head + query * p.out.row;
    store_pair(row, col, x.x, x.y);
    store_pair(row, col + 2, x.z, x.w);
}

// Where a packed row of a work tile goes: to out and lse, or of one of several splits to where _combine reads it.
struct RowTarget {
    element* out;
    float* out_accum;  // null: out
    float* lse;
};

__device__ __forceinline__ RowTarget row_target(const Params& p, const Work& work, int row) {
    const int group = group_of(p);
    const int query = (work.row0 + row) / group;
    const int head = work.head_kv * group + (work.row0 + row) % group;
    const long long number = row_at(p, work.batch, head, query);
    RowTarget target;
    target.out = static_cast<element*>(p.out.data) + work.batch * p.out.batch + head * p.out.head + query * p.out.row;
    target.out_accum = p.kv_splits == 1 ? nullptr : p.out_accum + (work.split * count_rows(p) + number) * kOutColumns;
    target.lse = (p.kv_splits == 1 ? p.lse : lse_accum(p) + work.split * count_rows(p)) + number;
    return target;
}

// Thread: columns of a row from `column` on, two (even) or four.
__device__ __forceinline__ void store_columns(const RowTarget& target, int column, float x, float y) {
    if (target.out_accum == nullptr) {
        store_pair(target.out, column, x, y);
    } else {
        *reinterpret_cast<float2*>(target.out_accum + column) = make_float2(x, y);
    }
}
__device__ __forceinline__ void store_columns(const RowTarget& target, int column, float4 x) {
    if (target.out_accum == nullptr) {
        store_pair(target.out, column, x.x, x.y);
        store_pair(target.out, column + 2, x.z, x.w);
    } else {
        *reinterpret_cast<float4*>(target.out_accum + column) = x;
    }
}

// Rows of a work tile that are not past the end.
__device__ __forceinline__ int count_tile_rows(const Params& p, const Work& work) {
    return min(kTileM, p.seq_q * group_of(p) - work.row0);
}

// Consumers of a cluster of `most` blocks or fewer: combine the results of its ranges, which are at the same places in
// the shared memory of each block. Rows are shared out among blocks, columns among threads.
template <int most>
__device__ __forceinline__ void combine_cluster(const Params& p, const Work& work, unsigned char* shared) {
    constexpr int threads = kConsumers * 128;
    constexpr int quads = kOutColumns / 4;  // of a row
    const unsigned smem = shared_address(shared);
    float(*weights)[most] = reinterpret_cast<float(*)[most]>(shared + kOffsetWeights);
    const int thread = threadIdx.x - 128;
    const int rows = max(0, (count_tile_rows(p, work) - work.rank + p.cluster_size - 1) / p.cluster_size);
    if (thread < rows) {
        const int row = thread * p.cluster_size + work.rank;
        float lses[most];
        LseSum all = {__int_as_float(0xff800000), 0.0f};
#pragma unroll
        for (int i = 0; i < most; ++i) {
            lses[i] = __int_as_float(0xff800000);
            cluster_load_if(i < p.cluster_size, lses[i], smem + kOffsetLse + row * 4, i);
        }
#pragma unroll
        for (int i = 0; i < most; ++i) {
            all.most = fmaxf(all.most, lses[i]);
        }
#pragma unroll
        for (int i = 0; i < most; ++i) {
            lses[i] = weight_of(lses[i], all.most);
            all.sum += lses[i];
        }
        const float inverse = all.sum == 0.0f ? 0.0f : 1.0f / all.sum;
#pragma unroll
        for (int i = 0; i < most; ++i) {
            weights[thread][i] = lses[i] * inverse;
        }
        *row_target(p, work, row).lse = lse_of(all);
    }
    named_sync(kAll, threads);  // the weights are there
#pragma unroll 2
    for (int i = thread; i < rows * quads; i += threads) {
        const int row = i / quads * p.cluster_size + work.rank;
        const int col = i % quads * 4;
        float4 outs[most];
#pragma unroll
        for (int j = 0; j < most; ++j) {
            outs[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            cluster_load_if(j < p.cluster_size, outs[j], smem + row * kResultBytes + col * 4, j);
        }
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < most; ++j) {
            const float weight = weights[i / quads][j];
            sum.x += weight * outs[j].x;
            sum.y += weight * outs[j].y;
            sum.z += weight * outs[j].z;
            sum.w += weight * outs[j].w;
        }
        store_columns(row_target(p, work, row), col, sum);
    }
}

// ---- Producer ------------------------------------------------------------------------------------------------------

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

// One thread: load the key tiles of the range with TMA as soon as buffers are empty.
__device__ __forceinline__ void load_tiles(const Params& p, const TensorMaps& maps, unsigned smem, const Work& work) {
    PipelineState<kStages> kv_pipe;
    int entry = work.visits > 0 ? visit(p, work.tile, work.first_visit) : 0;
#pragma unroll 1  // registers are few
    for (int i = 0; i < work.visits; ++i) {
        const int key0 = (entry >> 1) * kTileN;
        if (i + 1 < work.visits) {
            entry = visit(p, work.tile, work.first_visit + i + 1);
        }
        const unsigned full_k = smem + kFullK + kv_pipe.stage * 8;
        const unsigned full_v = smem + kFullV + kv_pipe.stage * 8;
        barrier_wait(smem + kEmptyK + kv_pipe.stage * 8, kv_pipe.phase ^ 1);
        barrier_expect(full_k, kTileBytesN);
        load_tile(smem + kOffsetK + kv_pipe.stage * kTileBytesN, maps.k, full_k, key0, work.head_kv, work.batch,
                  kTileN);
        barrier_wait(smem + kEmptyV + kv_pipe.stage * 8, kv_pipe.phase ^ 1);
        barrier_expect(full_v, kTileBytesN);
        load_tile(smem + kOffsetV + kv_pipe.stage * kTileBytesN, maps.v, full_v, key0, work.head_kv, work.batch,
                  kTileN);
        kv_pipe.advance();
    }
}

// ---- Consumer ------------------------------------------------------------------------------------------------------

// Warpgroup: start copying its 64 packed rows of Q to shared memory. Rows past the end, and columns past kHeadDim,
// become zeros. Copies are in flight together; loads to registers would each wait for the store of the one before.
__device__ __forceinline__ void load_packed_q(const Params& p, const Work& work, unsigned smem, int warpgroup) {
    constexpr int chunks = kSteps * 2;  // of 16 bytes, of a row
    constexpr int step = 128 / chunks;  // rows that the warpgroup copies at a time
    const int chunk = threadIdx.x % 128 % chunks;
    int in_tile = threadIdx.x % 128 / chunks;
    if (in_tile == step) {
        return;  // threads that are left over
    }
    const int group = group_of(p);
    const int rows = count_tile_rows(p, work);
    const element* q = static_cast<const element*>(p.q.data) + work.batch * p.q.batch +
                       work.head_kv * group * p.q.head + chunk * 8;
    in_tile += warpgroup * 64;
    int head = (work.row0 + in_tile) % group;
    int query = (work.row0 + in_tile) / group;
    const int heads = step % group, queries = step / group;
#pragma unroll
    for (int i = 0; i < 64; i += step, in_tile += step) {
        if (64 % step == 0 || in_tile < warpgroup * 64 + 64) {
            const bool inside = in_tile < rows;
            const element* src = inside ? q + head * p.q.head + query * p.q.row : q;
            cp_async(smem + kOffsetQ + chunk_at(in_tile, chunk, kTileM), src, inside);
        }
        head += heads;
        query += queries + (head >= group);
        head -= head >= group ? group : 0;
    }
}

// Warpgroup: wait for them.
__device__ __forceinline__ void wait_for_packed_q(int warpgroup) {
    cp_async_wait();
    proxy_fence();  // before wgmma reads them
    named_sync(kWarpgroup + warpgroup, 128);
}

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

// One consumer warpgroup, which owns 64 packed rows. wgmma is asynchronous: S of visit i is in flight together with P V
// of visit i - 1, which also runs beside the softmax of visit i. For the rules of loops and branches around wgmma see
// sm90a/forward.cu.jinja, above Consumer.
struct Consumer {
    const Params& p;
    unsigned smem;          // start of shared memory
    const int warpgroup;    // 0 to kConsumers - 1

    PipelineState<kStages> kv_pipe;  // of K; V is used one visit later
    int entry;              // of the visit: its key tile, and whether it is masked
    int query;              // of the thread's first packed row
    int query_below;        // of its other one, 8 rows further down

    float s[kTileN / 2];
    float o[kHeadDim / 2];
    unsigned p_frags[kTileN / 16][4];  // P of the visit whose P V is next, or in flight
    unsigned next_p[kTileN / 16][4];   // P of the visit after it
    RowStats stats;

    __device__ __forceinline__ Consumer(const Params& p, unsigned smem, int warpgroup)
        : p(p), smem(smem), warpgroup(warpgroup) {}

    // Warp: release a buffer of K or V.
    __device__ __forceinline__ void release(unsigned barrier) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(barrier);
        }
    }

    // Warpgroup ordering barrier: one warpgroup issues its products while the other one is at its softmax. Without it
    // both wait for the same key tile, so that they would multiply, and then be at their softmax, at the same time.
    __device__ __forceinline__ void order_sync() const { named_sync(kOrder + warpgroup, 256); }

    __device__ __forceinline__ void order_arrive() const {
        named_arrive(kOrder + (warpgroup + 1) % kConsumers, 256);
    }

    // Start S = Q K^T.
    __device__ __forceinline__ void issue_qk() {
        barrier_wait(smem + kFullK + kv_pipe.stage * 8, kv_pipe.phase);
        wgmma_fence();
        multiply_qk(s, smem + kOffsetQ, warpgroup * 64, smem + kOffsetK + kv_pipe.stage * kTileBytesN);
        wgmma_commit();
    }

    // Start O += P V of the visit at `v_pipe`, or O = P V unless `accumulate`.
    __device__ __forceinline__ void issue_pv(const PipelineState<kStages>& v_pipe, bool accumulate) {
        barrier_wait(smem + kFullV + v_pipe.stage * 8, v_pipe.phase);
        wgmma_fence();
        multiply_pv(o, p_frags, smem + kOffsetV + v_pipe.stage * kTileBytesN, accumulate);
        wgmma_commit();
    }

    // Wait for P V, and release V.
    __device__ __forceinline__ void finish_pv(const PipelineState<kStages>& v_pipe) {
        wgmma_wait_all();  // P V is done
        accumulator_fence(o);
        release(smem + kEmptyV + v_pipe.stage * 8);
    }

    // p_frags = next_p, once P V is done. An `or` with 0, which ptxas does not know to be 0: else it would keep both in
    // the same registers and, as P would be written while P V is in flight, wait for each wgmma (its warning C7513).
    __device__ __forceinline__ void take_next_p() {
        const unsigned zero = p.batch >> 31;
#pragma unroll
        for (int i = 0; i < kTileN / 16; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                p_frags[i][j] = next_p[i][j] | zero;
            }
        }
    }

    // Mask S, which is complete, and release K.
    __device__ __forceinline__ void apply_mask_and_release_k() {
        accumulator_fence(s);
        if (entry & 1) {
            apply_mask(p, s, query, query_below, (entry >> 1) * kTileN);
        }
        release(smem + kEmptyK + kv_pipe.stage * 8);
    }

    // The thread's first row in the tile; its other one is 8 rows further down.
    __device__ __forceinline__ int first_row() const {
        return warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    }

    // O, row_max and row_sum over the range.
    __device__ __forceinline__ void attend(const Work& work) {
        const int row = work.row0 + first_row();
        query = query_of(p, row);
        query_below = query_of(p, row + 8);
        stats.reset();
        if (work.visits == 0) {
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; ++i) {
                o[i] = 0.0f;
            }
            return;
        }
        float2 rescale;
        entry = visit(p, work.tile, work.first_visit);
        if (warpgroup == kConsumers - 1) {
            order_arrive();  // the first warpgroup begins
        }
        order_sync();
        issue_qk();
        order_arrive();
        wgmma_wait_all();
        apply_mask_and_release_k();
        softmax_step(s, p_frags, stats, true, p.scale_log2, rescale);
        for (int i = 1; i < work.visits; ++i) {
            entry = visit(p, work.tile, work.first_visit + i);
            const PipelineState<kStages> v_pipe = kv_pipe;
            kv_pipe.advance();
            order_sync();
            issue_qk();
            issue_pv(v_pipe, i > 1);
            order_arrive();
            wgmma_wait_all_but_one();  // S is complete, P V may still run
            apply_mask_and_release_k();
            const bool exact = entry & 1 || i < kExact || !stats.ordinary;
            const bool moved = softmax_step(s, next_p, stats, exact, p.scale_log2, rescale);
            finish_pv(v_pipe);
            take_next_p();
            if (moved) {
                rescale_out(o, rescale);
            }
        }
        issue_pv(kv_pipe, work.visits > 1);
        wgmma_wait_all();
        accumulator_fence(o);
    }

    // O /= row_sum, whose parts in four threads are added.
    __device__ __forceinline__ void normalize() {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = sum_of_row(stats.row_sum[half]);
            inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
            stats.row_sum[half] = sum;
        }
        rescale_out(o, make_float2(inverse[0], inverse[1]));
    }

    // O and lse to shared memory, for the cluster.
    __device__ __forceinline__ void share(unsigned char* shared) const {
        const int lane = threadIdx.x % 32;
        named_sync(kAll, kConsumers * 128);  // all warpgroups have read Q, K and V
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row() + half * 8;
            if (lane % 4 == 0) {
                *reinterpret_cast<float*>(shared + kOffsetLse + row * 4) =
                    lse_of(p, stats.row_max[half], stats.row_sum[half]);
            }
            float* out = reinterpret_cast<float*>(shared + row * kResultBytes) + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; i += 4) {
                *reinterpret_cast<float2*>(out + i * 2) = make_float2(o[i + half * 2], o[i + half * 2 + 1]);
            }
        }
    }

    // O and lse to memory, without a cluster.
    __device__ __forceinline__ void store(const Work& work) const {
        const int lane = threadIdx.x % 32;
        const int rows = count_tile_rows(p, work);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row() + half * 8;
            if (row >= rows) {
                continue;
            }
            const RowTarget target = row_target(p, work, row);
            if (lane % 4 == 0) {
                *target.lse = lse_of(p, stats.row_max[half], stats.row_sum[half]);
            }
#pragma unroll
            for (int i = 0; i < kHeadDim / 2; i += 4) {
                store_columns(target, i * 2 + lane % 4 * 2, o[i + half * 2], o[i + half * 2 + 1]);
            }
        }
    }
};

// ---- Kernels -------------------------------------------------------------------------------------------------------

// Grid: tiles_packed x kv_splits x heads_kv x batch clusters of cluster_size blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
attnforge_fwd_sm90a_bf16_d128_causal_a16_m128_n128_s3_p0_r0_k0_q0_t1(
    const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned smem = shared_address(shared);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // warp-uniform, also for ptxas
    const Work work = work_at(p, blockIdx.x);
    if (warpgroup == 0) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(smem + kFullK + i * 8, 1);
                barrier_init(smem + kEmptyK + i * 8, kConsumers * 4);
                barrier_init(smem + kFullV + i * 8, 1);
                barrier_init(smem + kEmptyV + i * 8, kConsumers * 4);
            }
            barrier_init_fence();
        }
        __syncwarp();
        named_arrive(kReady, kThreads);
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            load_tiles(p, maps, smem, work);
        }
    } else {
        load_packed_q(p, work, smem, warpgroup - 1);
        named_sync(kReady, kThreads);  // the producer, which does not wait for consumers, has initialized the barriers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wait_for_packed_q(warpgroup - 1);
        Consumer consumer(p, smem, warpgroup - 1);
        consumer.attend(work);
        consumer.normalize();
        if (p.cluster_size == 1) {
            consumer.store(work);
            return;
        }
        consumer.share(shared);
        cluster_sync();  // the results of all ranges are there; producers have exited or will
        if (p.cluster_size > 4) {
            combine_cluster<8>(p, work, shared);
        } else if (p.cluster_size > 2) {
            combine_cluster<4>(p, work, shared);
        } else {
            combine_cluster<2>(p, work, shared);
        }
        cluster_sync();  // until now other blocks may have read results here
    }
}

// Grid: combine_blocks. Of each row of out, in the order of lse, combine_warps warps combine the results of all splits.
extern "C" __global__ void __launch_bounds__(kCombineWarps * 32)
attnforge_fwd_sm90a_bf16_d128_causal_a16_m128_n128_s3_p0_r0_k0_q0_t1_combine(const __grid_constant__ Params p) {
    __shared__ float4 sums[kCombineWarps][kOutColumns / 4];
    asm volatile("griddepcontrol.wait;" ::: "memory");  // for the results of all splits
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int first = warp % p.combine_warps;  // split of the warp
    const long long rows = count_rows(p);
    const long long row = (static_cast<long long>(blockIdx.x) * kCombineWarps + warp) / p.combine_warps;
    const float* lses = lse_accum(p) + row;
    LseSum all = {};
    if (row < rows) {
        const long long stride = rows * kOutColumns;
        const float* out = p.out_accum + row * kOutColumns + lane * 4;
        float4 outs[4];
        load_outs(outs, out, stride, first, lane * 4 < kOutColumns ? p.kv_splits : 0, p.combine_warps);
        all = combine_lse(lses, rows, p.kv_splits);
        for (int col = lane * 4; col < kOutColumns; col += 128, out += 128) {
            if (col >= 128) {
                load_outs(outs, out, stride, first, p.kv_splits, p.combine_warps);
            }
            sums[warp][col / 4] = weigh(outs, out, stride, lses, rows, all, first, p.kv_splits, p.combine_warps);
        }
    }
    __syncthreads();
    if (row >= rows || first != 0) {
        return;
    }
    const int query = static_cast<int>(row % p.seq_q);
    const int head = static_cast<int>(row / p.seq_q % p.heads_q);
    const int batch = static_cast<int>(row / p.seq_q / p.heads_q);
    for (int col = lane * 4; col < kOutColumns; col += 128) {
        float4 sum = sums[warp][col / 4];
        for (int i = 1; i < p.combine_warps; ++i) {
            const float4 x = sums[warp + i][col / 4];
            sum.x += x.x;
            sum.y += x.y;
            sum.z += x.z;
            sum.w += x.w;
        }
        store_out(p, batch, head, query, col, sum);
    }
    if (lane == 0) {
        p.lse[row] = lse_of(all);
    }
}
