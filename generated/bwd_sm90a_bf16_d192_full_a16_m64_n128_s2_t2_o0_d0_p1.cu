// attnforge_bwd_sm90a_bf16_d192_full_a16_m64_n128_s2_t2_o0_d0_p1
// Generated from templates/sm90a/backward_pair.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction bwd --arch sm90a --dtype bf16 --head-dim 192 --mask full --align 16
//     --set tile_m=64 --set tile_n=128 --set stages=2 --set stages_dout=2
//     --set deterministic=0 --set descending=0 --set pair=1
//
//   tile_m          64   query rows per step of the main loop; always 64, the rows of a product for dQ
//   tile_n         128   keys per block, a multiple of 16; each consumer computes S and dP of half of them
//   stages           2   shared-memory buffers for Q
//   stages_dout      2   shared-memory buffers for dO
//   deterministic    0   blocks add to dQ in a fixed order: the same bits on every run
//   descending       0   blocks start with the last key tile, not that with most work (deterministic ones always do)
//   pair             1   two blocks share a key tile and dQ
//
// Attention backward for wide heads: dQ, dK and dV from Q, K, V, O, dO and the forward's lse.
//
//     S  = scale Q K^T    P  = exp(S - lse)    delta = rowsum(dO * O) - dlse
//     dP = dO V^T         dS = P * (dP - delta)
//     dV = P^T dO         dK = scale dS^T Q    dQ = scale dS K
//
// symbol        shape                meaning
//   K, V        kKeys x kHeadDim(V)  the block's keys, in shared memory
//   peer K      kKeys x kDqColumns   the other block's keys, the columns of dQ that this block computes
//   Q, dO       kTileM x kHeadDim(V) query tile of a step, in rings of kStagesQ and kStagesDo buffers
//   S, P        kKeys x kTileM       transposed: S without the scale, less lse / scale; then P. fp32, in registers
//   dP, dS      kKeys x kTileM       transposed: dP less delta; then dS
//   dK, dV      kKeys x kHeadDim(V)  sums over the steps, fp32, in registers
//   dQ          kTileM x kDqColumns  part of the pair's kTileN keys, fp32; then added to dq_accum
//   dq_accum    all of dQ            fp32 sums in device memory, in the order of fragments
//   lse         a query              ln(sum exp S), from the forward
//   dlse        a query              gradient of lse, if there is one
//   row_stats   2 x kTileM           -lse / scale of the queries of a tile, then their -delta
//   visit       int                  a query tile that sees the key tile: number * 2 + (1 if some pairs are hidden)
//   step                             a visit of one q head: an iteration of the main loop
//   plane       int                  batch entry * heads + head
//
// A cluster of two blocks computes a key tile of one kv head, half of the keys each: it visits the query tiles that see
// it, for every q head of the group. The blocks send each other their dS, and each computes half of the columns of dQ
// for all keys of the tile. So only half as much is added to device memory, whose rate of float32 additions would
// limit a block of its own.
// Consumers: two warpgroups with a product of scores, a sum and a share of dQ each. The first computes S, P and dV. It
// passes P on to the second, which computes dP, dS and dK. P and dS are operands of dV and dK in the registers where
// they arise; dS goes to shared memory for dQ alone.
// dQ goes through shared memory, from where TMA adds it to dq_accum: consumers do not wait for additions to be issued.
// Producer warpgroup: its first warp loads K, V, Q, row_stats and dO, its second one sends dS,
// the others add dQ.
// Fragments: element i of a thread is row warp*16 + lane/4 + (i/2%2)*8, column i/4*8 + lane%4*2 + i%2.
//
// Kernels: _preprocess (row_stats, zeros for sums), the main kernel, _postprocess (dQ).
// Programmatic dependent launch: all but _preprocess may start while the kernel before them runs. Each of their blocks
// calls griddepcontrol_wait, on every path, before it touches what any of these kernels writes. _preprocess starts
// after everything before it in the stream, so inputs, mask and schedule may be read without a wait. A block of the
// main kernel lets _postprocess start after its last load.

typedef unsigned short element;  // bf16, only ever moved as bits

// A tensor (batch, heads, seq, head_dim): its address, and strides in elements. Rows are contiguous.
struct TensorRef {
    void* data;
    long long batch, head, row;
};

struct Params {
    TensorRef out;  // (batch, heads_q, seq_q, head_dim_v)
    TensorRef dout;  // gradient of out
    TensorRef dq;  // gradients, shaped as q, k, v
    TensorRef dk;
    TensorRef dv;
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
    const float* dlse;  // (batch, heads_q, seq_q) gradient of lse, null if there is none
    float* delta;  // 2 or 8 floats a row: row sums of dout * out less dlse, on GPUs with lse
    float* dq_accum;  // (batch, heads_q, padded_q, columns) fp32 sums of dq, in the kernel's order
    int batch;
    int heads_q;
    int heads_kv;  // divides heads_q
    int seq_q;
    int seq_k;
    int tiles_m;  // ceil(seq_q / tile_m)
    int tiles_n;  // ceil(seq_k / tile_n)
    int padded_q;  // tiles_m * tile_m
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// What TMA needs to know of each tensor; encoded by the host for each call.
struct TensorMaps {
    TensorMap q, dout, k, v, dk, dv;
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 192;
// A tile is stored in panels of kColumns columns, [panel][row][column], 16-byte chunks swizzled within kSwizzleBytes.
constexpr int kColumns = 64;
constexpr int kSwizzleBytes = kColumns * 2;
constexpr unsigned kSwizzle = 1;  // wgmma's code for it
constexpr int kPanels = 3;
constexpr int kMain = kColumns * kPanels;  // columns of a stored row
constexpr int kRowBytes = kMain * 2;
constexpr int kSteps = (kHeadDim + 15) / 16;  // k16 steps of wgmma along head_dim
constexpr int kHeadDimV = kHeadDim;  // columns of V and O
constexpr int kRowBytesV = kRowBytes;
constexpr int kTileM = 64;  // query rows of a step
constexpr int kTileN = 128;  // keys of a cluster
constexpr int kCluster = 2;  // blocks that share a key tile
constexpr int kKeys = kTileN / kCluster;  // keys of a block
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kHelperThreads = 256;  // of a block of _preprocess and _postprocess
constexpr int kStagesQ = 2;  // buffers of Q
constexpr int kStagesDo = 2;  // buffers of dO
// Columns of dQ: the first block computes the first half of them, its first consumer the first kDqOfFirst. In the other
// block it is the other way round, so that no consumer's columns cross a panel's edge.
constexpr int kDqColumns = kHeadDim / 2;
constexpr int kDqOfFirst = 64;
constexpr int kDqOfSecond = kDqColumns - kDqOfFirst;
constexpr int kPeerPanels = 2;  // of the peer's K
// P in fp32, as fragments: [4 elements' index][thread][4 elements]. dS as [key][query], first the block's keys, then
// the peer's; 16-byte chunks swizzled within rows of 128 bytes.
constexpr int kBytesP = kKeys * kTileM * 4;
// dQ on its way to memory, as fragments. That of the second consumer takes the place of P, of which each thread has
// read what it overwrites.
constexpr int kBytesDqOfFirst = kDqOfFirst * kTileM * 4;
static_assert(kDqOfSecond * kTileM * 4 <= kBytesP, "the dQ of the second consumer takes the place of P");
constexpr int kScoreRowBytes = kTileM * 2;
constexpr int kScoreBytes = kKeys * kScoreRowBytes;
constexpr int kBuffersDs = 2;
constexpr int kTileBytesQ = kTileM * kRowBytes;
constexpr int kTileBytesDo = kTileM * kRowBytesV;
constexpr int kTileBytesK = kKeys * kRowBytes;
constexpr int kTileBytesV = kKeys * kRowBytesV;
constexpr int kPeerBytesK = kPeerPanels * kKeys * kSwizzleBytes;
constexpr int kRowStatsFloats = 2;  // of a query
constexpr int kRowStatsBytes = kTileM * kRowStatsFloats * 4;
// Shared memory.
constexpr int kOffsetK = 0;
constexpr int kOffsetV = kOffsetK + kTileBytesK;
constexpr int kOffsetPeerK = kOffsetV + kTileBytesV;
constexpr int kOffsetQ = kOffsetPeerK + kPeerBytesK;
constexpr int kOffsetDo = kOffsetQ + kStagesQ * kTileBytesQ;
constexpr int kOffsetDs = kOffsetDo + kStagesDo * kTileBytesDo;
constexpr int kOffsetP = kOffsetDs + kBuffersDs * kCluster * kScoreBytes;
constexpr int kOffsetDq = kOffsetP + kBytesP;  // of the first consumer
constexpr int kOffsetRowStats = kOffsetDq + kBytesDqOfFirst;
constexpr int kOffsetVisit = kOffsetRowStats + kStagesQ * kRowStatsBytes;
constexpr int kOffsetBarriers = kOffsetVisit + kStagesQ * 8;  // a visit, and its query tile's number among all planes'
// Barriers: full = the data is there, empty = its readers have finished. Copies complete a full barrier with the bytes
// that were announced; other barriers count warps. K and V stay.
constexpr int kFullK = kOffsetBarriers;
constexpr int kFullV = kFullK + 8;
constexpr int kFullQ = kFullV + 8;
constexpr int kEmptyQ = kFullQ + 8 * kStagesQ;
constexpr int kFullDo = kEmptyQ + 8 * kStagesQ;
constexpr int kEmptyDo = kFullDo + 8 * kStagesDo;
constexpr int kFullP = kEmptyDo + 8 * kStagesDo;
constexpr int kFullDs = kFullP + 8;  // the block's own
constexpr int kFullPeerDs = kFullDs + 8 * kBuffersDs;
constexpr int kEmptyDs = kFullPeerDs + 8 * kBuffersDs;  // the block's own, in both blocks; so it has been sent, too
constexpr int kFullDq = kEmptyDs + 8 * kBuffersDs;  // of each consumer
constexpr int kEmptyDq = kFullDq + 8 * kConsumers;  // that of the second consumer: of P, too
constexpr int kSharedBytes = kEmptyDq + 8 * kConsumers;
static_assert(kSharedBytes == 230584, "the plan of this kernel disagrees");

// Named barriers; 0 is __syncthreads.
enum NamedBarrier { kTilesRead = 1, kStoreOfFirst = 2 };

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

// Thread: wait until the phase of this parity has ended. A fresh barrier counts as past parity 1.
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

// Thread: arrive at the barrier at this place in block `rank` of the cluster. It hands over no writes: .release.cluster
// would wait until all that the thread has written is in memory.
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, unsigned rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier), "r"(rank)
        : "memory");
}

// Warp: wait for all warps of the cluster. What they did to shared memory and barriers before is done.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Thread: start fetching a descriptor, which the first copy would wait for.
__device__ __forceinline__ void prefetch_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
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

// Thread: start copying consecutive bytes (16-byte aligned, a multiple of 16) to shared memory.
__device__ __forceinline__ void bulk_load(unsigned dst, const void* src, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(barrier)
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

// Warpgroup: wait until at most `groups` groups are in flight.
template <int groups>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Warps: named barrier `id` for `threads` threads: wait for all.
// Unlike with bar.sync, warps may wait at different instructions.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Thread: 2^x, about 2 ulp. Volatile: it must stay before the wait for the product it overlaps with.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// Thread: wait until the kernel before has ended and its writes are there. Nothing to wait for if launched after that.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Thread: for its block, the next kernel may start.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Thread: start adding consecutive floats (16-byte aligned, a multiple of 16 bytes) to device memory.
__device__ __forceinline__ void bulk_reduce(float* target, unsigned src, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target), "r"(src), "r"(bytes)
                 : "memory");
}

// Thread: an integer to and from shared memory.
__device__ __forceinline__ void store_int(unsigned address, int x) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ int load_int(unsigned address) {
    int x;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

// Thread: two consecutive floats from shared memory.
__device__ __forceinline__ float2 load_pair(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

// Thread: a float of shared memory.
__device__ __forceinline__ float load_float(unsigned address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}

// Thread: four consecutive floats to shared memory.
__device__ __forceinline__ void store_quad(unsigned address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Thread: four consecutive floats from shared memory.
__device__ __forceinline__ float4 load_quad(unsigned address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
    return x;
}

// Thread: both elements of a register as floats.
__device__ __forceinline__ float2 unpack(unsigned packed) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000));
}

// Thread: start copying consecutive bytes of shared memory to the place `dst` of block `rank`; they count towards
// `barrier` there.
__device__ __forceinline__ void bulk_send(unsigned dst, unsigned src, int bytes, unsigned barrier, unsigned rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there, full;\n"
        "mapa.shared::cluster.u32 there, %0, %4;\n"
        "mapa.shared::cluster.u32 full, %3, %4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, [full];\n"
        "}" ::"r"(dst),
        "r"(src), "r"(bytes), "r"(barrier), "r"(rank)
        : "memory");
}

// Warpgroup: S or dP, transposed (64 keys x 64 queries) = or += A B^T over 16 columns.
__device__ __forceinline__ void wgmma_scores(float (&d)[kTileM / 2], unsigned long long a, unsigned long long b,
                                             int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: dK or dV (64 keys x columns) = or += A B over 16 queries.
__device__ __forceinline__ void wgmma_sums(float (&d)[96], const unsigned (&a)[4], unsigned long long b,
                                           int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %101, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, {%96, %97, %98, %99}, %100, add, 1, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: dQ (64 queries x columns) = or += A^T B over 16 keys.
__device__ __forceinline__ void wgmma_dq(float (&d)[32], unsigned long long a, unsigned long long b,
                                         int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add));
    // clang-format on
}

__device__ __forceinline__ void wgmma_dq(float (&d)[16], unsigned long long a, unsigned long long b,
                                         int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add, 1, 1, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "l"(a), "l"(b), "r"(add));
    // clang-format on
}

// ---- Mask: full ----------------------------------------------------------------------------------------------------

// Is key `key` visible to query `query`?
__device__ __forceinline__ bool visible(const Params& p, int query, int key) { return key < p.seq_k; }

// The key tile of the block with this rank; tiles with most work have the lowest rank.
__device__ __forceinline__ int owned_tile(const Params& p, int rank) {
    return rank;
}

// How many query tiles key tile `tile` visits.
__device__ __forceinline__ int visits(const Params& p, int tile) {
    return p.tiles_m;
}

// Visit number `index`: query tile * 2 + (1 if some of its pairs are hidden).
__device__ __forceinline__ int visit(const Params& p, int tile, int index) {
    return index * 2 + ((tile + 1) * kTileN > p.seq_k);
}

// ---- Order of the work ---------------------------------------------------------------------------------------------

// Bytes of the L2 cache that Q, dO and the sums of dQ of the heads in work may take. An H200 has 50 MB; what
// sections gain, and why not all of it: docs/experiments.md, 11 and 89.
constexpr long long kCacheBytes = 16 << 20;

// Which tile of which head; rank 0 is the tile with most work.
struct Place {
    int rank, head, batch;
};

// Work starts in the order of its index. Heads come in sections whose operands fit the L2 cache together; in a section
// all heads' largest tiles come first.
__device__ __forceinline__ Place place_of(const Params& p, int index) {
    const int heads = p.heads_kv;
    const int together = 1;
    const long long bytes = 8LL * kHeadDim * p.seq_q;
    const long long planes = static_cast<long long>(heads / together) * p.batch;
    const int fits = static_cast<int>(min(max(kCacheBytes / bytes, 1LL), planes));
    const int section = fits * together;
    const int first = index / (section * p.tiles_n) * section;
    const int width = min(section, heads * p.batch - first);  // the last section may be narrower
    const int rest = index - first * p.tiles_n;
    const int plane = first + rest % width;
    return {rest / width, plane % heads, plane / heads};
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

// ---- Work ----------------------------------------------------------------------------------------------------------

// Position in a ring of buffers: the phase of its barriers flips at every wrap.
struct Ring {
    unsigned stage, phase;
    __device__ __forceinline__ void advance(unsigned stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// The work of a block: a key tile of a head, its visits, the q heads it serves.
struct Work {
    int tile, head_kv, batch;
    int visits;             // for each q head
    int first_head, heads;  // q heads
};

// The work of block `block` of the grid.
__device__ __forceinline__ Work work_of(const Params& p, int block) {
    const Place place = place_of(p, block);
    Work work;
    work.head_kv = place.head;
    work.heads = p.heads_q / p.heads_kv;
    work.first_head = work.head_kv * work.heads;
    work.batch = place.batch;
    work.tile = owned_tile(p, place.rank);
    work.visits = visits(p, work.tile);
    return work;
}

// Visit `index` of a q head.
__device__ __forceinline__ int visit_of(const Params& p, const Work& work, int index) {
    return visit(p, work.tile, index);
}

// The plane of the first q head among those of q and dO.
__device__ __forceinline__ long long first_plane(const Params& p, const Work& work) {
    return static_cast<long long>(work.batch) * p.heads_q + work.first_head;
}

// ---- Loads and sends -----------------------------------------------------------------------------------------------

// Thread: its index. Read where it is used: what ptxas computes from threadIdx before the main loop stays in registers.
__device__ __forceinline__ int thread() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// Thread: the number of its block in the cluster, read where it is used likewise.
__device__ __forceinline__ int rank() {
    int number;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(number));
    return number;
}

// The first key of block `rank`.
__device__ __forceinline__ int first_key(const Work& work, int rank) { return work.tile * kTileN + rank * kKeys; }

// The first panel of the peer's K that block `rank` takes.
__device__ __forceinline__ int first_peer_panel(int rank) { return rank * (kPanels - kPeerPanels); }

// Thread: start copying `panels` panels of K, from panel `first` and key `key0` on.
__device__ __forceinline__ void load_panels(unsigned tile, const TensorMaps& maps, unsigned barrier, int first,
                                            int panels, int key0, const Work& work) {
    for (int i = 0; i < panels; ++i) {
        tma_load(tile + i * kKeys * kSwizzleBytes, maps.k, barrier, (first + i) * kColumns, key0, 0, work.head_kv,
                 work.batch);
    }
}

// Warp: load K and V, then for each step Q, row_stats, the visit and dO. Only lane 0, the leader, issues.
__device__ __forceinline__ void produce(const Params& p, const TensorMaps& maps, unsigned base, const Work& work) {
    const bool leader = threadIdx.x % 32 == 0;
    if (leader) {
        barrier_expect(base + kFullK, kTileBytesK + kPeerBytesK);
        load_panels(base + kOffsetK, maps, base + kFullK, 0, kPanels, first_key(work, rank()), work);
        load_panels(base + kOffsetPeerK, maps, base + kFullK, first_peer_panel(rank()), kPeerPanels,
                    first_key(work, rank() ^ 1), work);
        barrier_expect(base + kFullV, kTileBytesV);
        load_tile(base + kOffsetV, maps.v, base + kFullV, first_key(work, rank()), work.head_kv, work.batch, kKeys);
    }
    griddepcontrol_wait();  // for row_stats; consumers add to dQ only after they have these
    Ring q_ring = {0, 1}, do_ring = {0, 1};  // fresh barriers count as empty
    for (int head = work.first_head; head < work.first_head + work.heads; ++head) {
        const int first_tile = (work.batch * p.heads_q + head) * p.tiles_m;  // of the plane
#pragma unroll 1
        for (int i = 0; i < work.visits; ++i) {
            const int visit = visit_of(p, work, i);
            const int query0 = (visit >> 1) * kTileM;
            const unsigned full_q = base + kFullQ + q_ring.stage * 8;
            barrier_wait(base + kEmptyQ + q_ring.stage * 8, q_ring.phase);
            if (leader) {
                store_int(base + kOffsetVisit + q_ring.stage * 8, visit);
                const int tile = first_tile + (visit >> 1);
                barrier_expect(full_q, kTileBytesQ + kRowStatsBytes);
                load_tile(base + kOffsetQ + q_ring.stage * kTileBytesQ, maps.q, full_q, query0, head, work.batch,
                          kTileM);
                bulk_load(base + kOffsetRowStats + q_ring.stage * kRowStatsBytes,
                          p.delta + static_cast<long long>(tile) * kTileM * kRowStatsFloats, kRowStatsBytes, full_q);
            }
            q_ring.advance(kStagesQ);
            const unsigned full_do = base + kFullDo + do_ring.stage * 8;
            barrier_wait(base + kEmptyDo + do_ring.stage * 8, do_ring.phase);
            if (leader) {
                barrier_expect(full_do, kTileBytesDo);
                load_tile(base + kOffsetDo + do_ring.stage * kTileBytesDo, maps.dout, full_do, query0, head, work.batch,
                          kTileM);
            }
            do_ring.advance(kStagesDo);
        }
    }
    griddepcontrol_launch_dependents();
}

// Warp: send the dS of each step to the other block. Its buffer there is empty when it is here.
__device__ __forceinline__ void send(unsigned base, int steps) {
    Ring ring = {0, 0};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const unsigned ds = base + kOffsetDs + ring.stage * kCluster * kScoreBytes;
        barrier_wait(base + kFullDs + ring.stage * 8, ring.phase);
        if (threadIdx.x % 32 == 0) {
            proxy_fence();
            bulk_send(ds + kScoreBytes, ds, kScoreBytes, base + kFullPeerDs + ring.stage * 8, rank() ^ 1);
        }
        ring.advance(kBuffersDs);
    }
}

// The first column of dQ that consumer `group` of block `rank` computes.
__device__ __forceinline__ int first_dq_column(int group, int rank) {
    if (group) {
        return rank ? kHeadDim - kDqColumns : kDqOfFirst;
    }
    return rank ? kHeadDim - kDqOfFirst : 0;
}

// Warp: add the dQ that consumer `kGroup` has put into shared memory to device memory, for each step.
template <int kGroup>
__device__ __forceinline__ void add_staged_dq(const Params& p, unsigned base, const Work& work) {
    constexpr int kBytes = (kGroup ? kDqOfSecond : kDqOfFirst) * kTileM * 4;
    int step = 0;
    griddepcontrol_wait();
    for (int head = work.first_head; head < work.first_head + work.heads; ++head) {
        const int first_tile = (work.batch * p.heads_q + head) * p.tiles_m;  // of the plane
#pragma unroll 1
        for (int i = 0; i < work.visits; ++i) {
            const long long tile = first_tile + (visit_of(p, work, i) >> 1);
            barrier_wait(base + kFullDq + kGroup * 8, step & 1);
            if (threadIdx.x % 32 == 0) {
                proxy_fence();
                bulk_reduce(p.dq_accum + (tile * kHeadDim + first_dq_column(kGroup, rank())) * kTileM,
                            base + (kGroup ? kOffsetP : kOffsetDq), kBytes);
                tma_store_commit();
                tma_store_wait();  // it has been read
                barrier_arrive(base + kEmptyDq + kGroup * 8);
            }
            ++step;
        }
    }
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Warpgroup: start S^T += K Q^T or dP^T += V dO^T, `kCount` k16 steps.
template <int kCount>
__device__ __forceinline__ void start_scores(float (&x)[kTileM / 2], unsigned keys, unsigned queries) {
    asm volatile("" : "+r"(keys), "+r"(queries));  // else ptxas keeps the descriptors of all steps, and spills them
    const unsigned long long a = descriptor(keys, 0, 8 * kSwizzleBytes, kSwizzle);
    const unsigned long long b = descriptor(queries, 0, 8 * kSwizzleBytes, kSwizzle);
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
        wgmma_scores(x, a + step_at(step, kKeys), b + step_at(step, kTileM), 1);
    }
    wgmma_commit();
}

// Warpgroup: start dV += P dO or dK += dS Q, whose P or dS is transposed; the first step overwrites.
template <int kCount>
__device__ __forceinline__ void start_sums(float (&sums)[kCount], const unsigned (&scores)[kTileM / 16][4],
                                           unsigned queries, int add) {
    const unsigned long long b = descriptor(queries, kTileM * kSwizzleBytes, 8 * kSwizzleBytes, kSwizzle);
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) {
        wgmma_sums(sums, scores[step], b + (step * 16 * kSwizzleBytes >> 4), step > 0 ? 1 : add);
    }
    wgmma_commit();
}

// Warpgroup: start dQ = dS K, of the block's own keys and of the peer's; both tiles of K begin at the columns of dQ.
template <int kCount>
__device__ __forceinline__ void start_dq(float (&dq)[kCount], unsigned ds, unsigned k, unsigned peer_k) {
    asm volatile("" : "+r"(ds));
    const unsigned long long a = descriptor(ds, 0, 8 * kScoreRowBytes, kSwizzle);
    const unsigned long long own = descriptor(k, 0, 8 * kSwizzleBytes, kSwizzle);
    const unsigned long long peer = descriptor(peer_k, 0, 8 * kSwizzleBytes, kSwizzle);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
        const unsigned long long b = step < kKeys / 16 ? own : peer;
        wgmma_dq(dq, a + (step * 16 * kScoreRowBytes >> 4), b + (step % (kKeys / 16) * 16 * kSwizzleBytes >> 4),
                 step > 0);
    }
    wgmma_commit();
}

// Thread: its first row of a fragment.
__device__ __forceinline__ int first_row() { return thread() / 32 % 4 * 16 + thread() % 32 / 4; }

// ---- Softmax and where its results go ------------------------------------------------------------------------------

// Warpgroup: P = 0 where the mask hides; `query` and `key` are the thread's first.
__device__ __forceinline__ void apply_mask(const Params& p, float (&x)[kTileM / 2], int query, int key) {
#pragma unroll
    for (int i = 0; i < kTileM / 2; ++i) {
        x[i] = visible(p, query + i / 4 * 8 + i % 2, key + i / 2 % 2 * 8) ? x[i] : 0.0f;
    }
}

// Thread: 8 elements of a fragment, 16 columns, times `factor`, as an operand of wgmma.
__device__ __forceinline__ void pack_operand(unsigned (&operand)[4], const float* x, float factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        operand[i] = pack(x[i * 2] * factor, x[i * 2 + 1] * factor);
    }
}

// Warpgroup: store columns 16 `step` to 16 `step` + 15 of a fragment, packed, to a panel, swizzled.
__device__ __forceinline__ void store_operand(unsigned panel, int step, const unsigned (&operand)[4]) {
    const int lane = thread() % 32;
    const int row = thread() / 32 % 4 * 16 + lane % 16;
    stmatrix(panel + row * 128 + ((step * 2 + lane / 16) ^ lane % 8) * 16, operand[0], operand[1], operand[2],
             operand[3]);
}

// Warpgroup: store columns of dQ or P in the order of fragments: [4 elements' index][thread][4 elements].
template <int kCount>
__device__ __forceinline__ void store_fragments(unsigned tile, const float (&x)[kCount]) {
    const unsigned place = tile + thread() % 128 * 16;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        store_quad(place + i * 512, x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
}

// ---- Consumer ------------------------------------------------------------------------------------------------------

// A consumer warpgroup: dP, dS and dK if `kOfKeys`, else S, P and dV.
//
// In a step a consumer issues dQ of the step before, its sum, and S or dP of the next step; so the tensor cores have dQ
// to do while P or dS is computed, and dQ is added to memory while they work on the others. Nothing is in flight from
// one iteration to the next: ptxas would serialise all products (C7514).
template <bool kOfKeys>
struct Consumer {
    static constexpr int kGroup = kOfKeys;  // number of the warpgroup
    static constexpr int kColumnsOfSum = kOfKeys ? kHeadDim : kHeadDimV;
    static constexpr int kScoreSteps = kOfKeys ? kHeadDimV / 16 : kSteps;  // k16 steps of dP or S
    static constexpr int kColumnsOfDq = kOfKeys ? kDqOfSecond : kDqOfFirst;

    const Params& p;
    const TensorMaps& maps;
    const unsigned base;  // of shared memory
    float sums[kColumnsOfSum / 2];  // dK or dV
    float x[kTileM / 2];  // S less lse / scale, then P; or dP less delta, then dS
    unsigned scores[kTileM / 16][4];  // P or dS, packed
    float dq[kColumnsOfDq / 2];

    __device__ __forceinline__ Consumer(const Params& p, const TensorMaps& maps, unsigned base)
        : p(p), maps(maps), base(base) {}

    // Where the buffers and the barriers of a step are.
    static __device__ __forceinline__ int q_stage(int step) { return step % kStagesQ; }
    static __device__ __forceinline__ int do_stage(int step) { return step % kStagesDo; }
    static __device__ __forceinline__ int ds_stage(int step) { return step & kBuffersDs - 1; }
    __device__ __forceinline__ unsigned q(int step) const { return base + kOffsetQ + q_stage(step) * kTileBytesQ; }
    __device__ __forceinline__ unsigned dout(int step) const {
        return base + kOffsetDo + do_stage(step) * kTileBytesDo;
    }
    __device__ __forceinline__ unsigned ds(int step) const {
        return base + kOffsetDs + ds_stage(step) * kCluster * kScoreBytes;
    }
    __device__ __forceinline__ void wait_for_q(int step) {
        barrier_wait(base + kFullQ + q_stage(step) * 8, step / kStagesQ & 1);
    }
    __device__ __forceinline__ void wait_for_dout(int step) {
        barrier_wait(base + kFullDo + do_stage(step) * 8, step / kStagesDo & 1);
    }

    // Arrive for this warp, when all its lanes are done.
    __device__ __forceinline__ void arrive(unsigned barrier) {
        __syncwarp();
        if (thread() % 32 == 0) {
            barrier_arrive(barrier);
        }
    }

    // This warpgroup has read Q or dO of a step.
    __device__ __forceinline__ void release(bool is_q, int step) {
        arrive(base + (is_q ? kEmptyQ + q_stage(step) * 8 : kEmptyDo + do_stage(step) * 8));
    }

    // Arrive for this warp in both blocks; what it has read, it has waited for.
    __device__ __forceinline__ void arrive_at_both(unsigned barrier) {
        if (thread() % 32 == 0) {
            barrier_arrive(barrier);
            barrier_arrive_at(barrier, rank() ^ 1);
        }
    }

    __device__ __forceinline__ void run(const Work& work) {
        const int steps = work.visits * work.heads;
        barrier_wait(base + kFullK, 0);
        if constexpr (kOfKeys) {
            barrier_wait(base + kFullV, 0);
        }
        start_next(0, true);
        wgmma_wait<0>();
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            accumulator_fence(x);
            const int visit = load_int(base + kOffsetVisit + q_stage(step) * 8);
            release(!kOfKeys, step);
            next_dq(step - 1, step > 0);
            if constexpr (kOfKeys) {
                multiply_scores(step);
            } else {
                softmax(step, visit, work.tile);
                wait_for_dout(step);
            }
            accumulator_fence(sums);
            wgmma_fence();
            start_sums(sums, scores, kOfKeys ? q(step) : dout(step), step > 0);
            if constexpr (kOfKeys) {  // the next dO comes late
                wgmma_wait<1>();
            } else {
                start_next(step + 1, step + 1 < steps);
                wgmma_wait<2>();
            }
            if (step > 0) {
                finish_dq(step - 1);
            }
            if constexpr (kOfKeys) {
                start_next(step + 1, step + 1 < steps);
            }
            wgmma_wait<1>();  // the sum is complete
            release(kOfKeys, step);
            wgmma_wait<0>();  // S or dP is complete
        }
        next_dq(steps - 1, true);
        wgmma_wait<0>();
        finish_dq(steps - 1);
        epilogue(work_of(p, blockIdx.x / kCluster));  // anew: in registers for so long it would make ptxas spill
    }

    // Issue S or dP of a step, less lse / scale or delta; after the last step of old data.
    __device__ __forceinline__ void start_next(int step, bool more) {
        if (more) {
            wait_for_q(step);  // and for its row_stats
        }
        const unsigned row_stats =
            base + kOffsetRowStats + q_stage(step) * kRowStatsBytes + kGroup * kTileM * 4 + thread() % 4 * 8;
#pragma unroll
        for (int i = 0; i < kTileM / 2; i += 4) {
            const float2 pair = load_pair(row_stats + i / 4 * 32);
            x[i] = x[i + 2] = pair.x;
            x[i + 1] = x[i + 3] = pair.y;
        }
        if (kOfKeys && more) {
            wait_for_dout(step);
        }
        accumulator_fence(x);
        wgmma_fence();
        start_scores<kScoreSteps>(x, base + (kOfKeys ? kOffsetV : kOffsetK), kOfKeys ? dout(step) : q(step));
    }

    // From S to P, for this warpgroup and for the other one.
    __device__ __forceinline__ void softmax(int step, int visit, int key_tile) {
#pragma unroll
        for (int i = 0; i < kTileM / 2; ++i) {
            x[i] = exp2_approx(x[i] * p.scale_log2);
        }
        if (visit & 1) {
            const int query = (visit >> 1) * kTileM + thread() % 4 * 2;
            apply_mask(p, x, query, key_tile * kTileN + rank() * kKeys + first_row());
        }
        // The last P has been read: it has become the dS for which dQ has waited. dQ of the step before that was put in
        // its place.
        if (step > 0) {
            barrier_wait(base + kEmptyDq + 8, step & 1);  // at the second step nothing has been there
        }
        store_fragments(base + kOffsetP, x);
        arrive(base + kFullP);
#pragma unroll
        for (int i = 0; i < kTileM / 16; ++i) {
            pack_operand(scores[i], x + i * 8, 1.0f);
        }
    }

    // From dP to dS, in registers and in shared memory.
    __device__ __forceinline__ void multiply_scores(int step) {
        barrier_wait(base + kFullP, step & 1);
        const unsigned place = base + kOffsetP + thread() % 128 * 16;
#pragma unroll
        for (int i = 0; i < kTileM / 2; i += 4) {
            const float4 quad = load_quad(place + i * 512);
            x[i] *= quad.x;
            x[i + 1] *= quad.y;
            x[i + 2] *= quad.z;
            x[i + 3] *= quad.w;
        }
        barrier_wait(base + kEmptyDs + ds_stage(step) * 8, (step / kBuffersDs & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < kTileM / 16; ++i) {
            pack_operand(scores[i], x + i * 8, 1.0f);
            store_operand(ds(step), i, scores[i]);
        }
        arrive(base + kFullDs + ds_stage(step) * 8);
    }

    // Issue dQ of a step, when the dS of both blocks are there; before the first step of whatever is there.
    __device__ __forceinline__ void next_dq(int step, bool any) {
        if (any) {
            const int phase = step / kBuffersDs & 1;
            const unsigned full_peer = base + kFullPeerDs + ds_stage(step) * 8;
            barrier_wait(base + kFullDs + ds_stage(step) * 8, phase);
            barrier_wait(full_peer, phase);
            if (!kOfKeys && thread() % 128 == 0) {
                barrier_expect(full_peer, kScoreBytes);  // of the next phase
            }
            proxy_fence();
        }
        const int column = first_dq_column(kGroup, rank());
        const int peer_column = column - first_peer_panel(rank()) * kColumns;
        wgmma_fence();
        start_dq(dq, ds(step), base + kOffsetK + place_of_column(column),
                 base + kOffsetPeerK + place_of_column(peer_column));
    }

    // Where a column begins in a tile of K.
    static __device__ __forceinline__ int place_of_column(int column) {
        return column / kColumns * kKeys * kSwizzleBytes + column % kColumns * 2;
    }

    // Add dQ of a step, which is complete, to memory, or put it where that is done. Its dS has been read.
    __device__ __forceinline__ void finish_dq(int step) {
        arrive_at_both(base + kEmptyDs + ds_stage(step) * 8);
        accumulator_fence(dq);
        stage_dq(step);
    }

    // Put dQ of a step into shared memory, from where a warp of the producer's adds it. That of the second consumer
    // takes the place of P of the next step, or of this one if it is the last; this thread has read its share of it.
    __device__ __forceinline__ void stage_dq(int step) {
        barrier_wait(base + kEmptyDq + kGroup * 8, (step & 1) ^ 1);
        store_fragments(base + (kOfKeys ? kOffsetP : kOffsetDq), dq);
        arrive(base + kFullDq + kGroup * 8);
    }

    // Store dK or dV by TMA, through the shared memory of K or V.
    __device__ __forceinline__ void epilogue(const Work& work) {
        const unsigned tile = base + (kOfKeys ? kOffsetK : kOffsetV);
        named_sync(kTilesRead, kConsumers * 128);  // K and V have been read
        accumulator_fence(sums);
#pragma unroll
        for (int i = 0; i < kColumnsOfSum / 16; ++i) {
            unsigned packed[4];
            pack_operand(packed, sums + i * 8, kOfKeys ? p.scale : 1.0f);
            store_operand(tile + i / 4 * kKeys * kSwizzleBytes, i % 4, packed);
        }
        named_sync(kStoreOfFirst + kGroup, 128);
        if (thread() % 128 == 0) {
            proxy_fence();
            tma_store(kOfKeys ? maps.dk : maps.dv, tile, 0, first_key(work, rank()), 0, work.head_kv, work.batch);
            tma_store_commit();
            tma_store_wait();
        }
    }
};

// Block: zeros for keys that no query sees.
__device__ __forceinline__ void store_no_dkv(const TensorRef& tensor, const Params& p, const Work& work, int rank,
                                             int columns) {
    element* rows = static_cast<element*>(tensor.data) + work.batch * tensor.batch + work.head_kv * tensor.head;
    const int key0 = first_key(work, rank);
    for (int i = threadIdx.x; i < kKeys * columns / 8; i += kThreads) {
        const int row = key0 + i / (columns / 8);
        if (row < p.seq_k) {
            *reinterpret_cast<uint4*>(rows + row * tensor.row + i % (columns / 8) * 8) = make_uint4(0, 0, 0, 0);
        }
    }
}

// ---- Preprocess and postprocess kernels ----------------------------------------------------------------------------

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

// Thread: dot product of 8 elements.
__device__ __forceinline__ float dot(const element* a, const element* b) {
    const uint4 wide_a = *reinterpret_cast<const uint4*>(a);
    const uint4 wide_b = *reinterpret_cast<const uint4*>(b);
    const unsigned words_a[4] = {wide_a.x, wide_a.y, wide_a.z, wide_a.w};
    const unsigned words_b[4] = {wide_b.x, wide_b.y, wide_b.z, wide_b.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 x = unpack(words_a[i]);
        const float2 y = unpack(words_b[i]);
        sum += x.x * y.x + x.y * y.y;
    }
    return sum;
}

constexpr int kPitch = kHeadDim / 2 + 4;  // words between rows of the transposition buffer: 16 bytes more than a row

// Block: 64 x kWidth sums in fragment order, times `factor`, to rows and columns of the buffer.
template <int kWidth>
__device__ __forceinline__ void gather(unsigned (*rows)[kPitch], int column0, const float* sums, float factor) {
    for (int i = threadIdx.x; i < 64 * kWidth / 4; i += kHelperThreads) {
        const float4 x = reinterpret_cast<const float4*>(sums)[i];
        const int thread = i % 128;
        const int row = thread / 32 * 16 + thread % 32 / 4;
        const int word = column0 / 2 + i / 128 * 4 + thread % 4;
        rows[row][word] = pack(x.x * factor, x.y * factor);
        rows[row + 8][word] = pack(x.z * factor, x.w * factor);
    }
}

// Block: the first `count` rows of the buffer to device memory.
__device__ __forceinline__ void scatter(element* target, long long stride, const unsigned (*rows)[kPitch], int count) {
    for (int i = threadIdx.x; i < count * (kHeadDim / 8); i += kHelperThreads) {
        const int row = i / (kHeadDim / 8);
        const int chunk = i % (kHeadDim / 8);
        *reinterpret_cast<uint4*>(target + row * stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(&rows[row][chunk * 4]);
    }
}

// Grid: tiles_m x batch x heads_q. row_stats, zeros for sums.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
attnforge_bwd_sm90a_bf16_d192_full_a16_m64_n128_s2_t2_o0_d0_p1_preprocess(const __grid_constant__ Params p) {
    griddepcontrol_launch_dependents();
    constexpr int lanes = 32;  // threads that share a row
    const int head = blockIdx.x % p.heads_q;
    const int batch = blockIdx.x / p.heads_q % p.batch;
    const int tile = blockIdx.x / (p.heads_q * p.batch);
    const long long plane = static_cast<long long>(batch) * p.heads_q + head;
    const element* out = static_cast<const element*>(p.out.data) + batch * p.out.batch + head * p.out.head;
    const element* dout = static_cast<const element*>(p.dout.data) + batch * p.dout.batch + head * p.dout.head;
    float* stored = p.delta + (plane * p.padded_q + tile * kTileM) * kRowStatsFloats;
    for (int i = threadIdx.x / lanes; i < kTileM; i += kHelperThreads / lanes) {
        const int row = tile * kTileM + i;
        const int chunk = threadIdx.x % lanes;
        float sum = 0.0f;
        if (row < p.seq_q && chunk < kHeadDimV / 8) {
            sum = dot(out + row * p.out.row + chunk * 8, dout + row * p.dout.row + chunk * 8);
        }
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
        }
        if (chunk == 0) {
            // Rows without gradients get P = 0 by an lse that is huge but finite: an infinite one would make NaN.
            const float log2e = 1.4426950408889634f;
            const float2 stats = row_stats(p, plane, row, sum);
            const bool empty = stats.x == __int_as_float(0xff800000);
            stored[i] = empty ? -3e38f : -stats.x * log2e / p.scale_log2;
            stored[kTileM + i] = -stats.y;
        }
    }
    float4* dq = reinterpret_cast<float4*>(p.dq_accum + (plane * p.padded_q + tile * kTileM) * kHeadDim);
    for (int i = threadIdx.x; i < kTileM * kHeadDim / 4; i += kHelperThreads) {
        dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Block: the sums of dQ of a query tile, times the scale, to `rows`.
__device__ __forceinline__ void gather_dq(const Params& p, unsigned (*rows)[kPitch], const float* sums) {
    gather<kHeadDim>(rows, 0, sums, p.scale);
}

// Grid: tiles_m x batch x heads_q. dQ = scale * sums.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
attnforge_bwd_sm90a_bf16_d192_full_a16_m64_n128_s2_t2_o0_d0_p1_postprocess(const __grid_constant__ Params p) {
    __shared__ __align__(16) unsigned rows[kTileM][kPitch];
    const int head = blockIdx.x % p.heads_q;
    const int batch = blockIdx.x / p.heads_q % p.batch;
    const int query0 = blockIdx.x / (p.heads_q * p.batch) * kTileM;
    const long long plane = static_cast<long long>(batch) * p.heads_q + head;
    const float* sums = p.dq_accum + (plane * p.padded_q + query0) * kHeadDim;
    griddepcontrol_wait();
    gather_dq(p, rows, sums);
    __syncthreads();
    element* dq = static_cast<element*>(p.dq.data) + batch * p.dq.batch + head * p.dq.head + query0 * p.dq.row;
    scatter(dq, p.dq.row, rows, min(kTileM, p.seq_q - query0));
}

// ---- Main kernel ---------------------------------------------------------------------------------------------------

// Thread: set up all barriers of the block.
__device__ __forceinline__ void init_barriers(unsigned base) {
    constexpr int kReaders = kConsumers * 4;  // warps of Q and dO
    barrier_init(base + kFullK, 1);
    barrier_init(base + kFullV, 1);
    for (int i = 0; i < kStagesQ; ++i) {
        barrier_init(base + kFullQ + i * 8, 1);
        barrier_init(base + kEmptyQ + i * 8, kReaders);
    }
    for (int i = 0; i < kStagesDo; ++i) {
        barrier_init(base + kFullDo + i * 8, 1);
        barrier_init(base + kEmptyDo + i * 8, kReaders);
    }
    barrier_init(base + kFullP, 4);
    for (int i = 0; i < kConsumers; ++i) {
        barrier_init(base + kFullDq + i * 8, 4);
        barrier_init(base + kEmptyDq + i * 8, 1);
    }
    for (int i = 0; i < kBuffersDs; ++i) {
        barrier_init(base + kFullDs + i * 8, 4);
        barrier_init(base + kFullPeerDs + i * 8, 1);
        barrier_init(base + kEmptyDs + i * 8, kCluster * kConsumers * 4);
        barrier_expect(base + kFullPeerDs + i * 8, kScoreBytes);
    }
    barrier_init_fence();
}

// Grid: tiles_n x batch x heads_kv clusters of two blocks.
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
attnforge_bwd_sm90a_bf16_d192_full_a16_m64_n128_s2_t2_o0_d0_p1(
    const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = shared_address(shared);
    if (threadIdx.x < sizeof(maps) / 128) {
        prefetch_map(reinterpret_cast<const char*>(&maps) + threadIdx.x * 128);
    }
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // so ptxas knows that the warp agrees
    const Work work = work_of(p, blockIdx.x / kCluster);
    if (work.visits == 0) {  // in both blocks
        griddepcontrol_wait();
        store_no_dkv(p.dk, p, work, rank(), kHeadDim);
        store_no_dkv(p.dv, p, work, rank(), kHeadDimV);
        return;
    }
    if (threadIdx.x == 0) {
        init_barriers(base);
    }
    cluster_sync();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x < 32) {
            produce(p, maps, base, work);
        } else if (threadIdx.x < 64) {
            send(base, work.visits * work.heads);
        } else if (threadIdx.x < 96) {
            add_staged_dq<1>(p, base, work);
        } else {
            add_staged_dq<0>(p, base, work);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        if (group == 1) {
            Consumer<false>(p, maps, base).run(work);
        } else {
            Consumer<true>(p, maps, base).run(work);
        }
    }
    cluster_sync();  // until now the other block may have sent to this one or arrived at its barriers
}
