// attnforge_bwd_sm90a_bf16_d160_full_a16_m64_n96_s2_t2_o0_u2
// Generated from templates/sm90a/backward_wide.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction bwd --arch sm90a --dtype bf16 --head-dim 160 --mask full --align 16
//     --set tile_m=64 --set tile_n=96 --set stages=2 --set stages_dout=2
//     --set deterministic=0 --set dq_of_second=2
//
//   tile_m          64   query rows per step of the main loop; always 64, the rows of a product for dQ
//   tile_n          96   keys per block, a multiple of 16; each consumer computes S and dP of half of them
//   stages           2   shared-memory buffers for Q
//   stages_dout      2   shared-memory buffers for dO
//   deterministic    0   1: blocks add to dQ in a fixed order: the same bits on every run
//   dq_of_second     2   units of 64 columns of dQ that the consumer of dK computes; 0: balanced
//
// Attention backward for wide heads: dQ, dK and dV from Q, K, V, O, dO and the forward's lse.
//
//     S  = scale Q K^T    P  = exp(S - lse)    delta = rowsum(dO * O) - dlse
//     dP = dO V^T         dS = P * (dP - delta)
//     dV = P^T dO         dK = scale dS^T Q    dQ = scale dS K
//
// symbol        shape                meaning
//   K, V        kTileN x kHeadDim(V) the block's key tile, in shared memory
//   Q, dO       kTileM x kHeadDim(V) query tile of a step, in rings of kStagesQ and kStagesDo buffers
//   S, P        kTileM x kTileN      S without the scale, less lse / scale; then P. fp32, in registers
//   dP, dS      kTileM x kTileN      dP less delta; then dS
//   dK, dV      kTileN x kHeadDim(V) sums over the steps, fp32, in registers, transposed: columns x keys
//   dQ          kTileM x kHeadDim    this key tile's part of it, fp32; then added to dq_accum
//   dq_accum    all of dQ            fp32 sums in device memory, in the order of fragments
//   lse         a query              ln(sum exp S), from the forward
//   dlse        a query              gradient of lse, if there is one
//   row_stats   2 x kTileM           -lse / scale of the queries of a tile, then their -delta
//   visit       int                  a query tile that sees the key tile: number * 2 + (1 if some pairs are hidden)
//   step                             a visit of one q head: an iteration of the main loop
//   plane       int                  batch entry * heads + head
//
// A block computes a key tile of one kv head: it visits the query tiles that see it, for every q head of the group.
// Consumers: two warpgroups. Each computes S and dP of half of the keys and puts P and dS into shared memory, as both
// need all of them: the first sums dV and computes 64 columns of dQ, the second sums dK and computes 128.
// Producer warpgroup: its first warp loads K, V, Q, row_stats and dO.
// The next two issue additions of dQ, one warp for each consumer: a consumer stores dQ to shared memory, from where TMA
// adds it to dq_accum. So additions do not hold up the consumers.
// Shared memory has room for 40 of each 64 columns. Consumers add the others from registers.
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
    float* delta;  // per row: sum(dout * out) - dlse; on GPUs with lse beside it, 2 or 8 floats a row
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

// TMA descriptors of the tensors, encoded by the host for each call.
struct TensorMaps {
    TensorMap q, dout, k, v, dk, dv;
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 160;
// A tile is stored in panels of kColumns columns, [panel][row][column], 16-byte chunks swizzled within kSwizzleBytes.
constexpr int kColumns = 64;
constexpr int kSwizzleBytes = kColumns * 2;
constexpr unsigned kSwizzle = 1;  // wgmma's code for it
constexpr int kPanels = 3;
constexpr int kMain = kColumns * kPanels;  // columns of a stored row, zeros past head_dim
constexpr int kRowBytes = kMain * 2;
constexpr int kSteps = (kHeadDim + 15) / 16;  // k16 steps of wgmma along head_dim
constexpr int kHeadDimV = kHeadDim;  // columns of V and O
constexpr int kRowBytesV = kRowBytes;
constexpr int kMainV = kRowBytesV / 2;  // columns of a stored row of V and dO, zeros past kHeadDimV
constexpr int kStepsV = (kHeadDimV + 15) / 16;  // k16 steps of wgmma along head_dim of V
constexpr int kTileM = 64;  // query rows of a step
constexpr int kTileN = 96;  // keys of a block
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kHelperThreads = 256;  // of a block of _preprocess and _postprocess
constexpr int kStagesQ = 2;  // buffers of Q
constexpr int kStagesDo = 2;  // buffers of dO
constexpr int kHalf = kTileN / 2;  // keys of which a consumer computes S and dP
constexpr int kDqUnit = 64;  // columns of dQ of one product
constexpr int kDqUnitsOfFirst = 1;  // of the first consumer
constexpr int kDqUnitsOfSecond = 2;
// P and dS are stored as [key][query], 16-byte chunks swizzled within rows of 128 bytes. Consumers write those of a
// step after both have arrived with dS of the step before. By then dV of that step is complete, and so is what takes dS
// of the step before that: a buffer of P and two of dS suffice, without a barrier for empty ones.
constexpr int kScoreRowBytes = kTileM * 2;
constexpr int kScoreBytes = kTileN * kScoreRowBytes;
constexpr int kBuffersDs = 2;
constexpr int kTileBytesQ = kTileM * kRowBytes;
constexpr int kTileBytesDo = kTileM * kRowBytesV;
constexpr int kTileBytesK = kTileN * kRowBytes;
constexpr int kTileBytesV = kTileN * kRowBytesV;
constexpr int kStagedColumns = 40;  // of a unit of dQ, the first ones, in the order of dq_accum
constexpr int kStagedBytes = kStagedColumns * kTileM * 4;
constexpr int kRowStatsFloats = 2;  // of a query
constexpr int kRowStatsBytes = kTileM * kRowStatsFloats * 4;
// Shared memory.
constexpr int kOffsetK = 0;
constexpr int kOffsetV = kOffsetK + kTileBytesK;
constexpr int kOffsetQ = kOffsetV + kTileBytesV;
constexpr int kOffsetDo = kOffsetQ + kStagesQ * kTileBytesQ;
constexpr int kOffsetP = kOffsetDo + kStagesDo * kTileBytesDo;
constexpr int kOffsetDs = kOffsetP + kScoreBytes;
constexpr int kOffsetStagedDq = kOffsetDs + kBuffersDs * kScoreBytes;  // of each consumer
constexpr int kOffsetRowStats = kOffsetStagedDq + kConsumers * kStagedBytes;
constexpr int kOffsetVisit = kOffsetRowStats + kStagesQ * kRowStatsBytes;
constexpr int kOffsetBarriers = kOffsetVisit + kStagesQ * 8;
// Barriers: full = the data is there, empty = its readers have finished. Loads complete a full barrier with the bytes
// that the producer announced. Consumer warps arrive at empty barriers of Q and dO; K and V stay.
// Staged dQ: the four warps of a consumer arrive at its full barrier, the thread that adds dQ at its empty one.
constexpr int kFullK = kOffsetBarriers;
constexpr int kFullV = kFullK + 8;
constexpr int kFullQ = kFullV + 8;
constexpr int kEmptyQ = kFullQ + 8 * kStagesQ;
constexpr int kFullDo = kEmptyQ + 8 * kStagesQ;
constexpr int kEmptyDo = kFullDo + 8 * kStagesDo;
constexpr int kFullDq = kEmptyDo + 8 * kStagesDo;  // of each consumer
constexpr int kEmptyDq = kFullDq + 8 * kConsumers;
// Of each consumer: the number of the staged unit in all of dq_accum * 2 + (1 if more follow).
constexpr int kStagedUnit = kEmptyDq + 8 * kConsumers;
constexpr int kSharedBytes = kStagedUnit + 8 * kConsumers;
static_assert(kSharedBytes == 230544, "the plan of this kernel disagrees");

// Named barriers; 0 is __syncthreads.
enum NamedBarrier { kPStored = 1, kDsStored = 2, kStoreOfFirst = 3 };

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

// Warps: named barrier `id` for `threads` threads: wait for all, or only report.
// Unlike with bar.sync, warps may wait at different instructions.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

// Thread: wait until the kernel before has ended and its writes are visible. Returns at once if it had ended.
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

// Thread: add four consecutive floats to device memory.
__device__ __forceinline__ void add_to(float* target, float x, float y, float z, float w) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
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

// Thread: the two bf16 of a word.
__device__ __forceinline__ float2 unpack(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Warp: write four 8x8 matrices of 16-bit elements, transposed; lane l gives the address of row l % 8 of
// matrix l / 8, a column of the fragments.
__device__ __forceinline__ void stmatrix_transposed(unsigned address, unsigned r0, unsigned r1, unsigned r2,
                                                    unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Warpgroup: S or dP (64 queries x 48 keys) = or += A B^T over 16 columns.
__device__ __forceinline__ void wgmma_scores(float (&d)[kHalf / 2], unsigned long long a, unsigned long long b,
                                             int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %26, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, add, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
                 : "l"(a), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: 64 columns of dK or dV, transposed (64 columns x 96 keys) = or += A^T B^T over 16 queries.
__device__ __forceinline__ void wgmma_dkv(float (&d)[kTileN / 2], unsigned long long a, unsigned long long b,
                                          int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, %48, %49, add, 1, 1, 1, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
                 : "l"(a), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: dQ (64 queries x 64 columns) = or += A^T B over 16 keys.
__device__ __forceinline__ void wgmma_dq(float (&d)[kDqUnit / 2], unsigned long long a, unsigned long long b,
                                         int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
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

// Bytes of the L2 cache that Q, dO and the sums of dQ of a section of heads may take.
// The L2 cache of an H200 has 50 MB. How the value was chosen: docs/experiments.md, 11 and 89.
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
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        tma_load(tile + panel * rows * kSwizzleBytes, map, barrier, panel * kColumns, row, 0, head, batch);
    }
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

// ---- Threads and keys of a block -----------------------------------------------------------------------------------

// Thread: its index. Read where it is used: what ptxas computes from threadIdx before the main loop stays in registers.
__device__ __forceinline__ int thread() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// How many of `count` columns of dQ from `first` on belong to head_dim; others are zeros, which are not added.
__device__ __forceinline__ int columns_inside(int first, int count) {
    return kHeadDim - first < count ? kHeadDim - first : count;
}

// Block: zeros in its rows of dK or dV, which begin at `key0`, as no query sees these keys.
__device__ __forceinline__ void store_no_dkv(const TensorRef& tensor, const Params& p, const Work& work, int key0,
                                             int columns) {
    element* rows = static_cast<element*>(tensor.data) + work.batch * tensor.batch + work.head_kv * tensor.head;
    for (int i = threadIdx.x; i < kTileN * columns / 8; i += kThreads) {
        const int row = key0 + i / (columns / 8);
        if (row < p.seq_k) {
            *reinterpret_cast<uint4*>(rows + row * tensor.row + i % (columns / 8) * 8) = make_uint4(0, 0, 0, 0);
        }
    }
}

// ---- Producer ------------------------------------------------------------------------------------------------------

// Warp: load K and V, then for each step Q, row_stats, the visit and dO. Only lane 0, the leader, issues.
__device__ __forceinline__ void produce(const Params& p, const TensorMaps& maps, unsigned base, const Work& work) {
    const bool leader = threadIdx.x % 32 == 0;
    if (leader) {
        barrier_expect(base + kFullK, kTileBytesK);
        load_tile(base + kOffsetK, maps.k, base + kFullK, work.tile * kTileN, work.head_kv, work.batch,
                  kTileN);
    }
    griddepcontrol_wait();  // for row_stats; nothing is added to dQ before consumers have these
    Ring q_ring = {0, 1}, do_ring = {0, 1};  // fresh barriers count as empty
    for (int h = 0; h < work.heads; ++h) {
        const int head = work.first_head + h;
        const float* row_stats = p.delta + (first_plane(p, work) + h) * p.padded_q * kRowStatsFloats;
#pragma unroll 1
        for (int i = 0; i < work.visits; ++i) {
            const int visit = visit_of(p, work, i);
            const int query0 = (visit >> 1) * kTileM;
            const unsigned full_q = base + kFullQ + q_ring.stage * 8;
            barrier_wait(base + kEmptyQ + q_ring.stage * 8, q_ring.phase);
            if (leader) {
                store_int(base + kOffsetVisit + q_ring.stage * 8, visit);
                barrier_expect(full_q, kTileBytesQ + kRowStatsBytes);
                load_tile(base + kOffsetQ + q_ring.stage * kTileBytesQ, maps.q, full_q, query0, head, work.batch,
                          kTileM);
                bulk_load(base + kOffsetRowStats + q_ring.stage * kRowStatsBytes, row_stats + query0 * kRowStatsFloats,
                          kRowStatsBytes, full_q);
                if (h + i == 0) {  // after the first Q, with which the consumers begin
                    barrier_expect(base + kFullV, kTileBytesV);
                    load_tile(base + kOffsetV, maps.v, base + kFullV, work.tile * kTileN, work.head_kv, work.batch,
                              kTileN);
                }
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

// Warp: have TMA add what consumer `kGroup` stages to dq_accum, up to its last unit. Only lane 0 takes part. The
// consumer has had row_stats, so _preprocess has ended. All additions are complete when the kernel has ended, for which
// _postprocess waits.
template <int kGroup>
__device__ __forceinline__ void add_staged_dq(const Params& p, unsigned base) {
    bool more = (kGroup ? kDqUnitsOfSecond : kDqUnitsOfFirst) > 0 && threadIdx.x % 32 == 0;
#pragma unroll 1
    for (int count = 0; more; ++count) {
        barrier_wait(base + kFullDq + kGroup * 8, count & 1);
        proxy_fence();
        const int staged = load_int(base + kStagedUnit + kGroup * 8);
        float* sums = p.dq_accum + static_cast<long long>(staged >> 1) * (kTileM * kDqUnit);
        more = staged & 1;
        const int columns = columns_inside((staged >> 1) % kPanels * kDqUnit, kStagedColumns);
        bulk_reduce(sums, base + kOffsetStagedDq + kGroup * kStagedBytes, columns * kTileM * 4);
        tma_store_commit();
        tma_store_wait();  // it has been read
        barrier_arrive(base + kEmptyDq + kGroup * 8);
    }
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Warpgroup: start S += Q K^T or dP += dO V^T, `kCount` k16 steps; `keys` are its own rows of K or V.
template <int kCount>
__device__ __forceinline__ void start_scores(float (&s)[kHalf / 2], unsigned queries, unsigned keys) {
    asm volatile("" : "+r"(keys));  // else ptxas keeps the descriptors of all steps, and spills them
    const unsigned long long a = descriptor(queries, 0, 8 * kSwizzleBytes, kSwizzle);
    const unsigned long long b = descriptor(keys, 0, 8 * kSwizzleBytes, kSwizzle);
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
        wgmma_scores(s, a + step_at(step, kTileM), b + step_at(step, kTileN), 1);
    }
    wgmma_commit();
}

// Warpgroup: start dV^T += dO^T P or dK^T += Q^T dS, all `kBlocks` blocks of 64 columns; the first step overwrites.
template <int kBlocks>
__device__ __forceinline__ void start_dkv(float (&sums)[kBlocks][kTileN / 2], unsigned queries, unsigned scores,
                                          int add) {
    const unsigned long long b = descriptor(scores, 0, 8 * kScoreRowBytes, kSwizzle);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        const unsigned panel = queries + block * kTileM * kSwizzleBytes;
        const unsigned long long a = descriptor(panel, 0, 8 * kSwizzleBytes, kSwizzle);
#pragma unroll
        for (int step = 0; step < kTileM / 16; ++step) {
            wgmma_dkv(sums[block], a + (step * 16 * kSwizzleBytes >> 4), b + step * 2, step > 0 ? 1 : add);
        }
    }
    wgmma_commit();
}

// Warpgroup: start dQ = dS K, the 64 columns whose panel of K is at `k`.
__device__ __forceinline__ void start_dq(float (&dq)[kDqUnit / 2], unsigned ds, unsigned k) {
    const unsigned long long a = descriptor(ds, 0, 8 * kScoreRowBytes, kSwizzle);
    const unsigned long long b = descriptor(k, kTileN * kSwizzleBytes, 8 * kSwizzleBytes, kSwizzle);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
        wgmma_dq(dq, a + (step * 16 * kScoreRowBytes >> 4), b + (step * 16 * kSwizzleBytes >> 4), step > 0);
    }
    wgmma_commit();
}

// ---- Softmax and where its results go ------------------------------------------------------------------------------

// Warpgroup: P = 0 where the mask hides; `query` and `key` are the thread's first.
__device__ __forceinline__ void apply_mask(const Params& p, float (&s)[kHalf / 2], int query, int key) {
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) {
        s[i] = visible(p, query + i / 2 % 2 * 8, key + i / 4 * 8 + i % 2) ? s[i] : 0.0f;
    }
}

// Warpgroup: store the 64 rows of a fragment, times `factor`, transposed: element (row, column) goes to row `column` of
// the tile at `tile`, whose rows are 128 bytes, swizzled.
template <int kCount>
__device__ __forceinline__ void store_transposed(unsigned tile, const float (&x)[kCount], float factor) {
    const int lane = thread() % 32;
    const int chunk = thread() / 32 % 4 * 2 + lane / 8 % 2;
    const unsigned place = tile + (lane / 16 * 8 + lane % 8) * 128 + (chunk ^ lane % 8) * 16;
#pragma unroll
    for (int i = 0; i + 7 < kCount; i += 8) {
        stmatrix_transposed(place + i * 256, pack(x[i] * factor, x[i + 1] * factor),
                            pack(x[i + 2] * factor, x[i + 3] * factor),
                            pack(x[i + 4] * factor, x[i + 5] * factor), pack(x[i + 6] * factor, x[i + 7] * factor));
    }
}

// Warpgroup: add 64 columns of dQ to their sums, in fragment order: [4 elements' index][thread][4 elements].
// Staged columns come first; TMA adds them.
__device__ __forceinline__ void add_dq(float* sums, const float (&dq)[kDqUnit / 2], int columns) {
#pragma unroll
    for (int i = kStagedColumns / 2; i < kDqUnit / 2; i += 4) {
        if (i * 2 < columns) {
            add_to(sums + i * 128 + thread() % 128 * 4, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
        }
    }
}

// ---- Consumer ------------------------------------------------------------------------------------------------------

// A consumer warpgroup: it sums dK if `kOfKeys`, else dV.
template <bool kOfKeys>
struct Consumer {
    static constexpr int kGroup = kOfKeys;  // number of the warpgroup
    static constexpr int kBlocks = (kOfKeys ? kMain : kMainV) / 64;
    static constexpr int kFirstUnit = kOfKeys ? kDqUnitsOfFirst : 0;
    static constexpr int kUnits = kOfKeys ? kDqUnitsOfSecond : kDqUnitsOfFirst;  // of dQ

    const Params& p;
    const TensorMaps& maps;
    const unsigned base;  // of shared memory
    Ring q_ring = {0, 0}, do_ring = {0, 0};
    float sums[kBlocks][kTileN / 2];  // dK or dV, transposed
    float s[kHalf / 2];  // S less lse / scale; then P
    int visit;  // that of P and dS

    __device__ __forceinline__ Consumer(const Params& p, const TensorMaps& maps, unsigned base)
        : p(p), maps(maps), base(base) {}

    // Arrive for this warp.
    __device__ __forceinline__ void arrive(unsigned barrier) {
        if (thread() % 32 == 0) {
            barrier_arrive(barrier);
        }
    }

    __device__ __forceinline__ void run(const Work& work) {
        const int steps = work.visits * work.heads;
        barrier_wait(base + kFullK, 0);
        next_s(true);
        barrier_wait(base + kFullV, 0);
        wgmma_wait<0>();
        accumulator_fence(s);
        long long plane = first_plane(p, work);
        int index = 0;  // of the visit
#pragma unroll 1
        for (int step = 0;; ++step) {
            if (step > 0) {
                products(step - 1, step < steps, plane);
                if (++index == work.visits) {
                    index = 0;
                    ++plane;
                }
            }
            if (step == steps) {
                break;
            }
            scores(step, work.tile * kTileN);
        }
        epilogue(work_of(p, blockIdx.x));  // anew: in registers for so long it would make ptxas spill
    }

    // From S, which is complete, to P and dS in shared memory; the first consumer also adds to dV.
    __device__ __forceinline__ void scores(int step, int key0) {
        const unsigned dout = base + kOffsetDo + do_ring.stage * kTileBytesDo;
        const unsigned ds_tile = base + kOffsetDs + (step & 1) * kScoreBytes;
        const unsigned empty_q = base + kEmptyQ + q_ring.stage * 8;
        const unsigned empty_do = base + kEmptyDo + do_ring.stage * 8;
        visit = load_int(base + kOffsetVisit + q_ring.stage * 8);

        float dp[kHalf / 2];  // dP less delta
        start_from(dp, base + kOffsetRowStats + q_ring.stage * kRowStatsBytes + kTileM * 4);
        barrier_wait(base + kFullDo + do_ring.stage * 8, do_ring.phase);
        do_ring.advance(kStagesDo);
        accumulator_fence(s);
        accumulator_fence(dp);
        wgmma_fence();
        start_scores<kStepsV>(dp, dout, base + kOffsetV + kGroup * kHalf * kSwizzleBytes);
        softmax(key0);
        store_transposed(base + kOffsetP + kGroup * kHalf * kScoreRowBytes, s, 1.0f);
        if constexpr (kOfKeys) {
            named_arrive(kPStored, kConsumers * 128);
            wgmma_wait<0>();  // dP is complete
        } else {
            named_sync(kPStored, kConsumers * 128);
            proxy_fence();
            wgmma_fence();
            start_dkv(sums, dout, base + kOffsetP, step > 0);  // dV, while dS is computed, so that dO is free early
            wgmma_wait<1>();  // dP is complete
        }
        accumulator_fence(dp);
#pragma unroll
        for (int i = 0; i < kHalf / 2; ++i) {
            dp[i] *= s[i];
        }
        store_transposed(ds_tile + kGroup * kHalf * kScoreRowBytes, dp, 1.0f);
        if constexpr (kOfKeys) {
            arrive(empty_do);  // stmatrix has joined the warp
        } else {
            arrive(empty_q);
            wgmma_wait<0>();  // dV is complete
            arrive(empty_do);
        }
    }

    // What takes dS: this consumer's columns of dQ, the second consumer's dK. Then S of the next step is complete, too.
    __device__ __forceinline__ void products(int step, bool more, long long plane) {
        const unsigned q = base + kOffsetQ + q_ring.stage * kTileBytesQ;
        const unsigned ds_tile = base + kOffsetDs + (step & 1) * kScoreBytes;
        const unsigned empty_q = base + kEmptyQ + q_ring.stage * 8;
        const long long query0 = plane * p.padded_q + (visit >> 1) * kTileM;
        float* dq_sums = p.dq_accum + query0 * kMain + kFirstUnit * kTileM * kDqUnit;
        const unsigned k_panel = base + kOffsetK + kFirstUnit * kTileN * kSwizzleBytes;
        float dq[kDqUnit / 2];
        q_ring.advance(kStagesQ);
        named_sync(kDsStored, kConsumers * 128);
        proxy_fence();
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            wgmma_fence();
            start_dq(dq, ds_tile, k_panel + unit * kTileN * kSwizzleBytes);
            if (unit > 0) {
                wgmma_wait<0>();
            } else if constexpr (kOfKeys) {
                start_dkv(sums, q, ds_tile, step > 0);
                wgmma_wait<1>();
            } else {
                wgmma_wait<0>();
            }
            accumulator_fence(dq);
            if (unit == kUnits - 1) {
                next_s(more);
            }
            stage_dq(dq_sums + unit * kTileM * kDqUnit, dq, step * kUnits + unit, more || unit < kUnits - 1);
            add_dq(dq_sums + unit * kTileM * kDqUnit, dq, columns_inside((kFirstUnit + unit) * kDqUnit, kDqUnit));
        }
        if constexpr (kUnits == 0) {
            if constexpr (kOfKeys) {
                wgmma_fence();
                start_dkv(sums, q, ds_tile, step > 0);
            }
            next_s(more);
        }
        if constexpr (kOfKeys) {
            wgmma_wait<1>();  // dK is complete
            arrive(empty_q);
        }
        wgmma_wait<0>();
        accumulator_fence(s);
    }

    // Stage columns of a unit of dQ, once TMA has read those of the unit before. `sums`: the unit's place in dq_accum;
    // `count`: its number among this consumer's; `more`: whether others follow.
    __device__ __forceinline__ void stage_dq(float* sums, const float (&dq)[kDqUnit / 2], int count, bool more) {
        const unsigned place = base + kOffsetStagedDq + kGroup * kStagedBytes + thread() % 128 * 16;
        barrier_wait(base + kEmptyDq + kGroup * 8, (count & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < kStagedColumns / 2; i += 4) {
            store_quad(place + i * 512, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
        }
        if (thread() % 128 == 0) {
            const int unit = (sums - p.dq_accum) / (kTileM * kDqUnit);
            store_int(base + kStagedUnit + kGroup * 8, unit * 2 + more);
        }
        __syncwarp();
        arrive(base + kFullDq + kGroup * 8);
    }

    // Issue S less lse / scale of the step where the rings stand; after the last step on stale data.
    __device__ __forceinline__ void next_s(bool more) {
        if (more) {
            barrier_wait(base + kFullQ + q_ring.stage * 8, q_ring.phase);
        }
        start_from(s, base + kOffsetRowStats + q_ring.stage * kRowStatsBytes);
        accumulator_fence(s);
        wgmma_fence();
        start_scores<kSteps>(s, base + kOffsetQ + q_ring.stage * kTileBytesQ,
                             base + kOffsetK + kGroup * kHalf * kSwizzleBytes);
    }

    // What S or dP starts from: the value at `row_stats` of each of the thread's two queries.
    __device__ __forceinline__ void start_from(float (&x)[kHalf / 2], unsigned row_stats) {
        const unsigned row = row_stats + (thread() / 32 % 4 * 16 + thread() % 32 / 4) * 4;
        const float value[2] = {load_float(row), load_float(row + 32)};
#pragma unroll
        for (int i = 0; i < kHalf / 2; ++i) {
            x[i] = value[i / 2 % 2];
        }
    }

    // From S to P.
    __device__ __forceinline__ void softmax(int key0) {
#pragma unroll
        for (int i = 0; i < kHalf / 2; ++i) {
            s[i] = exp2_approx(s[i] * p.scale_log2);
        }
        if (visit & 1) {
            const int query = (visit >> 1) * kTileM + thread() / 32 % 4 * 16 + thread() % 32 / 4;
            apply_mask(p, s, query, key0 + kGroup * kHalf + thread() % 4 * 2);
        }
    }

    // Store dK or dV by TMA, through the shared memory of K or V.
    __device__ __forceinline__ void epilogue(const Work& work) {
        const unsigned tile = base + (kOfKeys ? kOffsetK : kOffsetV);
        const int key0 = work.tile * kTileN;
        named_sync(kDsStored, kConsumers * 128);  // K and V have been read
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            accumulator_fence(sums[block]);
            store_transposed(tile + block * kTileN * kSwizzleBytes, sums[block], kOfKeys ? p.scale : 1.0f);
        }
        named_sync(kStoreOfFirst + kGroup, 128);
        if (thread() % 128 == 0) {
            proxy_fence();
#pragma unroll
            for (int panel = 0; panel < kBlocks; ++panel) {
                tma_store(kOfKeys ? maps.dk : maps.dv, tile + panel * kTileN * kSwizzleBytes, panel * kColumns, key0, 0,
                          work.head_kv, work.batch);
            }
            tma_store_commit();
            tma_store_wait();
        }
    }
};

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
attnforge_bwd_sm90a_bf16_d160_full_a16_m64_n96_s2_t2_o0_u2_preprocess(const __grid_constant__ Params p) {
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
    float4* dq = reinterpret_cast<float4*>(p.dq_accum + (plane * p.padded_q + tile * kTileM) * kMain);
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
attnforge_bwd_sm90a_bf16_d160_full_a16_m64_n96_s2_t2_o0_u2_postprocess(const __grid_constant__ Params p) {
    __shared__ __align__(16) unsigned rows[kTileM][kPitch];
    const int head = blockIdx.x % p.heads_q;
    const int batch = blockIdx.x / p.heads_q % p.batch;
    const int query0 = blockIdx.x / (p.heads_q * p.batch) * kTileM;
    const long long plane = static_cast<long long>(batch) * p.heads_q + head;
    const float* sums = p.dq_accum + (plane * p.padded_q + query0) * kMain;
    griddepcontrol_wait();
    gather_dq(p, rows, sums);
    __syncthreads();
    element* dq = static_cast<element*>(p.dq.data) + batch * p.dq.batch + head * p.dq.head + query0 * p.dq.row;
    scatter(dq, p.dq.row, rows, min(kTileM, p.seq_q - query0));
}

// ---- Main kernel ---------------------------------------------------------------------------------------------------

// Thread: set up all barriers of the block.
__device__ __forceinline__ void init_barriers(unsigned base) {
    barrier_init(base + kFullK, 1);
    barrier_init(base + kFullV, 1);
    for (int i = 0; i < kStagesQ; ++i) {
        barrier_init(base + kFullQ + i * 8, 1);
        barrier_init(base + kEmptyQ + i * 8, kConsumers * 4);  // warps
    }
    for (int i = 0; i < kStagesDo; ++i) {
        barrier_init(base + kFullDo + i * 8, 1);
        barrier_init(base + kEmptyDo + i * 8, kConsumers * 4);
    }
    for (int i = 0; i < kConsumers; ++i) {
        barrier_init(base + kFullDq + i * 8, 4);
        barrier_init(base + kEmptyDq + i * 8, 1);
    }
    barrier_init_fence();
}

// Grid: tiles_n x batch x heads_kv blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
attnforge_bwd_sm90a_bf16_d160_full_a16_m64_n96_s2_t2_o0_u2(
    const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = shared_address(shared);
    if (threadIdx.x < sizeof(maps) / 128) {
        prefetch_map(reinterpret_cast<const char*>(&maps) + threadIdx.x * 128);
    }
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // warp-uniform, also for ptxas
    const Work work = work_of(p, blockIdx.x);
    if (work.visits == 0) {
        griddepcontrol_wait();
        store_no_dkv(p.dk, p, work, work.tile * kTileN, kHeadDim);
        store_no_dkv(p.dv, p, work, work.tile * kTileN, kHeadDimV);
        return;
    }
    if (threadIdx.x == 0) {
        init_barriers(base);
    }
    __syncthreads();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);  // warp-uniform, else it spills
        if (warp == 0) {
            produce(p, maps, base, work);
        } else if (warp == 1) {
            add_staged_dq<0>(p, base);
        } else if (warp == 2) {
            add_staged_dq<1>(p, base);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        if (group == 1) {
            Consumer<false>(p, maps, base).run(work);
        } else {
            Consumer<true>(p, maps, base).run(work);
        }
    }
}
