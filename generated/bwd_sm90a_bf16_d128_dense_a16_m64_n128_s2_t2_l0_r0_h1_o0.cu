// attnforge_bwd_sm90a_bf16_d128_dense_a16_m64_n128_s2_t2_l0_r0_h1_o0
// Generated from templates/sm90a/backward.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction bwd --arch sm90a --dtype bf16 --head-dim 128 --mask dense --align 16
//     --set tile_m=64 --set tile_n=128 --set stages=2 --set stages_dout=2 --set lag=0
//     --set in_regs=0 --set split_heads=1 --set deterministic=0
//
//   tile_m          64   query rows per step of the main loop; always 64, the rows of a product for dQ
//   tile_n         128   keys per block; always 128, 64 for each of two consumer warpgroups
//   stages           2   shared-memory buffers for Q
//   stages_dout      2   shared-memory buffers for dO
//   lag              0   1: consumers wait for each other every second step: dQ is two steps late, dP one step early
//   in_regs          0   operands that consumers keep in registers: 0 none, 1 K, 2 K and V
//   split_heads      1   1: a block per q head (dK, dV summed in fp32 memory), not per kv head
//   deterministic    0   1: blocks add to dQ, dK and dV in a fixed order: the same bits on every run
//
// Attention backward: dQ, dK and dV from Q, K, V, O, dO and the forward's lse.
//
//     S  = scale Q K^T    P  = exp(S - lse)    delta = rowsum(dO * O) - dlse
//     dP = dO V^T         dS = P * (dP - delta)
//     dV = P^T dO         dK = scale dS^T Q    dQ = scale dS K
//
// symbol        shape               meaning
//   K, V        kTileN x kHeadDim   the block's key tile, in shared memory
//   Q, dO       kTileM x kHeadDim   query tile of a step, in rings of kStagesQ and kStagesDo buffers
//   S, P        kTileN x kTileM     S without the scale, less lse / scale; then P. Transposed, fp32, in registers
//   dP, dS      kTileN x kTileM     dP less delta; then dS, which goes to shared memory for dQ
//   dK, dV      kTileN x kHeadDim   sums over the steps, fp32, in registers; then added to dkv_accum
//   dQ          kTileM x kHeadDim   this key tile's part of it, fp32; then added to dq_accum
//   dq_accum    all of dQ           fp32 sums in device memory, in the order of fragments; dkv_accum likewise
//   lse         a query             ln(sum exp S), from the forward
//   dlse        a query             gradient of lse, if there is one
//   row_stats   kTileM x 16         lse and delta as bf16 columns that continue Q and dO (see kRowStatsFloats)
//   visit       int                 a query tile that sees the key tile: its number * 2 + (1 if some pairs are hidden)
//   step                            a visit of one q head: an iteration of the main loop
//   plane       int                 batch entry * heads + head
//
// A block computes a key tile of one q head: it visits the query tiles that see it.
// Of a key tile with far more visits than others, a block computes a piece of them.
// Consumers: two warpgroups, each with 64 of the keys and a part of the columns of dQ. S and dP are
// transposed (keys x queries), so that P and dS arise in the registers that wgmma takes as A operands of dV and dK. dQ
// needs dS of all keys of the tile, which therefore goes through shared memory.
// Producer warpgroup: warp 0 loads K, V, Q, row_stats and dO, warps 2 and 3 add dQ to dq_accum.
// Fragments: element i of a thread is row warp*16 + lane/4 + (i/2%2)*8, column i/4*8 + lane%4*2 + i%2.
//
// Kernels: _preprocess (row_stats, zeros for sums), the main kernel, _postprocess (dQ), _postprocess_dkv (dK and dV).
// Programmatic dependent launch: all but _preprocess may start while the kernel before them runs. Each of their blocks
// calls griddepcontrol_wait, on every path, before it touches what any of these kernels writes. The wait covers the
// direct predecessor only; as that one has waited for its own predecessor, it covers all before it, too. _preprocess
// starts after everything before it in the stream, so inputs, mask and schedule may be read without a wait.
// The next kernel may start once each block has called griddepcontrol_launch_dependents or has ended. Its blocks then
// take resources that other blocks have released, never those of a running block, so waiting cannot deadlock.
// _preprocess and _postprocess call it first, being short. A block of the main kernel calls it after its last
// load: earlier, blocks of _postprocess would only wait and keep other streams from idle multiprocessors. The last
// kernel never calls it: what follows it in the stream may depend on more than its end.

typedef unsigned short element;  // bf16, only ever moved as bits

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
    TensorRef out;  // (batch, heads_q, seq_q, head_dim_v)
    TensorRef dout;  // gradient of out
    TensorRef dq;  // gradients, shaped as q, k, v
    TensorRef dk;
    TensorRef dv;
    MaskRef dense;  // dense mask as bytes, 1 where query i sees key j; or mask_bits
    const unsigned* mask_bits;  // (mask_planes, seq_q, mask_words) dense mask as bits; or dense
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
    const float* dlse;  // (batch, heads_q, seq_q) gradient of lse, null if there is none
    float* delta;  // per row: sum(dout * out) - dlse; on GPUs with lse beside it, 2 or 8 floats a row
    float* dq_accum;  // (batch, heads_q, padded_q, columns) fp32 sums of dq, in the kernel's order
    float* dkv_accum;  // (batch, heads_kv, padded_k, columns) fp32 sums of dk, then those of dv
    unsigned* bits;  // (mask_planes, padded_q or padded_k, bits_row) dense mask, 32 pairs a word
    int* tile_count;  // (mask_planes, tiles) visited tiles of each owned tile
    int* tile_order;  // (mask_planes, tiles) owned tiles in launch order, or with lists that are cut, pieces of them
    int* tile_pieces;  // (mask_planes, tiles_n) of a backward: pieces of each list, 0 if it is empty
    int* tile_list;  // (mask_planes, tiles, list_stride) visited tile << row groups | a bit for each with hidden pairs
    int batch;
    int heads_q;
    int heads_kv;  // divides heads_q
    int seq_q;
    int seq_k;
    int tiles_m;  // ceil(seq_q / tile_m)
    int tiles_n;  // ceil(seq_k / tile_n)
    int blocks_n;  // tiles_n + ceil(tiles_n / 8) - 1: blocks of a head where long lists are cut
    int list_stride;  // entries per row of tile_list
    int mask_batches;  // batch if each entry has a plane of its own, else 1
    int mask_heads;  // heads if each q head (of spans also: kv head) has a plane of its own, else 1
    int mask_words;  // words per row of mask_bits, ceil(seq_k / 32)
    int bits_row;  // words per row of bits
    int padded_q;  // tiles_m * tile_m
    int padded_k;  // tiles_n * tile_n
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// TMA descriptors of the tensors, encoded by the host for each call.
struct TensorMaps {
    TensorMap q, dout, k, v;
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
constexpr int kTileM = 64;  // query rows of a step
constexpr int kTileN = 128;  // keys of a block
constexpr int kConsumers = kTileN / 64;  // warpgroups, 64 keys each
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kHelperThreads = 256;  // of a block of _preprocess and _postprocess
constexpr int kStagesQ = 2;  // buffers of Q
constexpr int kStagesDo = 2;  // buffers of dO
constexpr int kDqColumns = 64;  // of dQ that a consumer computes: half of them, for all keys of the block
constexpr int kDqSecond = kDqColumns;  // the first column of the second consumer
constexpr int kDqBytes = 64 * kDqColumns * 4;  // of a consumer
// dS is stored as [key][query], 16-byte chunks swizzled within rows of 128 bytes.
constexpr int kDsRowBytes = 128;
constexpr unsigned kSwizzleDs = 1;
constexpr int kDsBytes = kTileM * kTileN * 2;
// A consumer writes dS of step i after both have arrived with dS of step i - 1. By then both have completed dQ of step
// i - 2: two buffers suffice, without a barrier for empty ones.
constexpr int kBuffersDs = 2;
constexpr int kTileBytesM = kTileM * kRowBytes;
constexpr int kTileBytesN = kTileN * kRowBytes;
// row_stats enter S and dP by one more k16 step of the product: a row of Q continues with 8 columns whose sum is
// -lse / scale, a row of dO with 8 whose sum is -delta, and rows of K and V with ones. Loading them from shared memory
// into registers instead would delay the products that read it.
constexpr int kRowStatsFloats = 8;  // of a row: 8 bf16 columns for lse, 8 for delta
constexpr int kRowStatsBytes = kTileM * kRowStatsFloats * 4;  // first lse of all rows, then delta
// Shared memory. row_stats come first: the last 8 columns of their product are the first 8 once more, and
// compute-sanitizer, which takes it to read 2048 bytes, would report those past the end.
constexpr int kOffsetRowStats = 0;
constexpr int kOffsetK = kOffsetRowStats + kStagesQ * kRowStatsBytes;
constexpr int kOffsetV = kOffsetK + kTileBytesN;
constexpr int kOffsetQ = kOffsetV + kTileBytesN;
constexpr int kOffsetDo = kOffsetQ + kStagesQ * kTileBytesM;
constexpr int kOffsetDs = kOffsetDo + kStagesDo * kTileBytesM;
constexpr int kOffsetDq = kOffsetDs + kBuffersDs * kDsBytes;
constexpr int kOffsetVisit = kOffsetDq + kTileM * kHeadDim * 4;
constexpr int kOffsetBarriers = kOffsetVisit + kStagesQ * 8;
// Barriers: full = the data is there, empty = its readers have finished. Loads complete a full barrier with the bytes
// that the producer announced. Consumer warps arrive at empty barriers of Q and dO; K and V stay. They also arrive at
// full dS, as dQ needs the keys of both consumers. Each consumer has a buffer of dQ: full
// with its four warps, empty when the warp that adds it to dq_accum has read it.
constexpr int kFullK = kOffsetBarriers;
constexpr int kFullV = kFullK + 8;
constexpr int kFullDs = kFullV + 8;
constexpr int kFullQ = kFullDs + 8;
constexpr int kEmptyQ = kFullQ + 8 * kStagesQ;
constexpr int kFullDo = kEmptyQ + 8 * kStagesQ;
constexpr int kEmptyDo = kFullDo + 8 * kStagesDo;
constexpr int kFullDq = kEmptyDo + 8 * kStagesDo;
constexpr int kEmptyDq = kFullDq + 8 * kConsumers;
constexpr int kSharedBytes = kEmptyDq + 8 * kConsumers;
static_assert(kSharedBytes == 200840, "the plan of this kernel disagrees");

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

// Thread: four consecutive floats to shared memory.
__device__ __forceinline__ void store_quad(unsigned address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// Thread: the two bf16 of a word.
__device__ __forceinline__ float2 unpack(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Warpgroup: S or dP (64 keys x 64 queries) = or += A B^T over 16 columns of head_dim, both from shared memory.
__device__ __forceinline__ void wgmma_scores(float (&d)[kTileM / 2], unsigned long long a, unsigned long long b,
                                             int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: S or dP (64 keys x 64 queries) = or += A B^T over 16 columns of row_stats.
__device__ __forceinline__ void wgmma_row_stats(float (&d)[kTileM / 2], const unsigned (&a)[4], unsigned long long b,
                                                int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: dK or dV (64 keys x head_dim) = or += A B over 16 queries, A from registers, B as it lies in memory.
__device__ __forceinline__ void wgmma_dkv(float (&d)[kHeadDim / 2], const unsigned (&a)[4], unsigned long long b,
                                          int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: dQ (64 queries x 64 columns) = or += dS K over 16 keys, both as they lie in memory.
__device__ __forceinline__ void wgmma_dq(float (&d)[kDqColumns / 2], unsigned long long a, unsigned long long b,
                                         int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add));
    // clang-format on
}

// ---- Mask: dense ---------------------------------------------------------------------------------------------------

// The plane of the mask of q head `head`.
__device__ __forceinline__ int mask_plane(const Params& p, int batch, int head) {
    return (p.mask_batches > 1 ? batch * p.mask_heads : 0) + (p.mask_heads > 1 ? head : 0);
}

// Bit i: is key `key` (below padded_k) seen by query `query0 + i`? `query0` is a multiple of 32 below padded_q.
__device__ __forceinline__ unsigned seen_by(const Params& p, int plane, int key, int query0) {
    return __ldg(p.bits + (static_cast<long long>(plane) * p.padded_k + key) * p.bits_row + query0 / 32);
}

// Where the tables of the schedule hold owned tile `tile`.
__device__ __forceinline__ long long entry_of(const Params& p, int plane, int tile) {
    return static_cast<long long>(plane) * p.tiles_n + tile;
}

// How many query tiles key tile `tile` visits.
__device__ __forceinline__ int visits(const Params& p, int plane, int tile) {
    return __ldg(p.tile_count + entry_of(p, plane, tile));
}

// Visit number `index`: query tile * 2 + (1 if some of its pairs are hidden).
__device__ __forceinline__ int visit(const Params& p, int plane, int tile, int index) {
    return __ldg(p.tile_list + entry_of(p, plane, tile) * p.list_stride + index);
}

// A piece of the list of key tile `tile`: `count` visits from number `begin` on.
struct Piece {
    int tile, begin, count;
};

// The piece of the work tile with this rank; those with most visits have the lowest rank. Where none is left, `tile` is
// -1 and `count` is 0. Its words are stored as they are used: after a division here, ptxas would not treat them as
// uniform.
__device__ __forceinline__ Piece piece_of(const Params& p, int plane, int rank) {
    const int* words = p.tile_order + (static_cast<long long>(plane) * p.blocks_n + rank) * 3;
    return {__ldg(words), __ldg(words + 1), __ldg(words + 2)};
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
    const int heads = p.heads_q;
    const int together = 1;
    const long long bytes = 8LL * kHeadDim * p.seq_q;
    const long long planes = static_cast<long long>(heads / together) * p.batch;
    const int fits = static_cast<int>(min(max(kCacheBytes / bytes, 1LL), planes));
    const int section = fits * together;
    const int first = index / (section * p.blocks_n) * section;
    const int width = min(section, heads * p.batch - first);  // the last section may be narrower
    const int rest = index - first * p.blocks_n;
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

// Warp: of the 32 x 32 pairs from (query0, key0) on, those of key key0 + lane, a bit each; 0 outside of the mask.
__device__ __forceinline__ unsigned pairs_of(const Params& p, int plane, int query0, int key0) {
    const int lane = threadIdx.x % 32;
    if (p.mask_bits != nullptr) {
        const long long query = static_cast<long long>(plane) * p.seq_q + query0 + lane;
        const bool inside = query0 + lane < p.seq_q && key0 < p.seq_k;
        const unsigned keys = inside ? __ldg(p.mask_bits + query * p.mask_words + key0 / 32) : 0;
        return transpose_bits(keys);
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
    return queries;
}

// One block per tile, grid tiles_n x tiles_m x mask_planes, the first fastest. Packs the tile's pairs and writes to its
// place of the list a bit for each row group that sees some pair, then for each that misses some; or 0.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_bwd_sm90a_bf16_d128_dense_a16_m64_n128_s2_t2_l0_r0_h1_o0_pack(const __grid_constant__ Params p) {
    const int key_tile = blockIdx.x % p.tiles_n;
    const int query_tile = blockIdx.x / p.tiles_n % p.tiles_m;
    const int plane = blockIdx.x / p.tiles_n / p.tiles_m;
    const int lane = threadIdx.x % 32;
    static_assert(kTileM % 32 == 0 && kTileN % 32 == 0, "squares of 32 pairs");
    constexpr int squares_n = kTileN / 32;
    unsigned found = 0;
    for (int i = threadIdx.x / 32; i < kTileM / 32 * squares_n; i += kScheduleThreads / 32) {
        const int query0 = query_tile * kTileM + i / squares_n * 32;
        const int key0 = key_tile * kTileN + i % squares_n * 32;
        const unsigned word = pairs_of(p, plane, query0, key0);
        const int key = key0 + lane;
        p.bits[(static_cast<long long>(plane) * p.padded_k + key) * p.bits_row + query0 / 32] = word;
        const int queries = p.seq_q - query0;
        found |= (word != 0) | (word != (queries >= 32 ? ~0u : queries > 0 ? (1u << queries) - 1 : 0u)) << 1;
    }
    unsigned kind = 0;
#pragma unroll
    for (int i = 0; i < kRowGroups * 2; ++i) {
        kind |= (__syncthreads_or(found >> i & 1) != 0) << i;
    }
    if (threadIdx.x == 0) {
        const long long row = entry_of(p, plane, key_tile);
        p.tile_list[row * p.list_stride + query_tile] = kind & kSomeRowGroups ? kind : 0;
    }
}

// One block per owned tile and plane: list the tiles it must visit, in ascending order.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_bwd_sm90a_bf16_d128_dense_a16_m64_n128_s2_t2_l0_r0_h1_o0_schedule(const __grid_constant__ Params p) {
    __shared__ unsigned votes[kScheduleThreads / 32];
    const int tile = blockIdx.x;  // of all planes: plane * tiles_n + tile
    int* list = p.tile_list + static_cast<long long>(tile) * p.list_stride;
    int total = 0;
    for (int base = 0; base < p.tiles_m; base += kScheduleThreads) {
        const int visited = base + threadIdx.x;
        // What _pack wrote. Entries are overwritten only after every thread has read its own.
        const unsigned kind = visited < p.tiles_m ? list[visited] : 0;
        const int slot = count_before(kind != 0, votes, total);
        if (kind != 0) {
            list[slot] = visited << kRowGroups | kind >> kRowGroups;
        }
    }
    if (threadIdx.x == 0) {
        p.tile_count[tile] = total;
    }
}

// Block: the sum of `mine` over its threads.
__device__ __forceinline__ long long sum_of_block(long long mine) {
    __shared__ long long all[kScheduleThreads];
    __syncthreads();  // the previous values have been read
    all[threadIdx.x] = mine;
    __syncthreads();
    long long sum = 0;
    for (int i = 0; i < kScheduleThreads; ++i) {
        sum += all[i];
    }
    return sum;
}

constexpr int kLeastVisits = 16;  // that are worth a block, which loads K and V and adds dK and dV to memory
constexpr int kMostPieces = 32;  // of a list: their blocks add to the same memory

// Into how many pieces a list of `visits` is cut, so that none has more than `most`, or more than an even share of
// kMostPieces; one piece if it is empty.
__device__ __forceinline__ int pieces_of(int visits, int most) {
    const int longest = max(most, (visits + kMostPieces - 1) / kMostPieces);
    return max(1, (visits + longest - 1) / longest);
}

// One block per owned tile and plane. Cuts lists that are long beside the others, as that of a tile with a key
// that all queries see: else a block would still walk it when all others have ended. Lists above `most` visits are
// cut; the blocks beyond tiles_n suffice for that. The pieces of the tile get their ranks: those with more visits
// come first, earlier tiles win ties.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_bwd_sm90a_bf16_d128_dense_a16_m64_n128_s2_t2_l0_r0_h1_o0_order(const __grid_constant__ Params p) {
    const int tile = blockIdx.x % p.tiles_n;
    const long long plane = blockIdx.x / p.tiles_n;
    const int* counts = p.tile_count + plane * p.tiles_n;
    int* order = p.tile_order + plane * p.blocks_n * 3;
    long long visits = 0;
    for (int other = threadIdx.x; other < p.tiles_n; other += kScheduleThreads) {
        visits += counts[other];
    }
    // Lists of up to one and a half times the mean stay whole. The blocks suffice: a cut list has fewer than
    // visits / most pieces beyond its first, and all of them together fewer than long_visits / most.
    const long long least = max(static_cast<long long>(kLeastVisits), 3 * sum_of_block(visits) / (2 * p.tiles_n));
    long long long_visits = 0;  // of lists that may be cut
    for (int other = threadIdx.x; other < p.tiles_n; other += kScheduleThreads) {
        long_visits += counts[other] > least ? counts[other] : 0;
    }
    const long long share = sum_of_block(long_visits) / (p.blocks_n - p.tiles_n + 1) + 1;
    const int most = static_cast<int>(max(least, share));
    const int pieces = pieces_of(counts[tile], most);
    const int length = (counts[tile] + pieces - 1) / pieces;
    long long all = 0;
    long long before = 0;
    for (int other = threadIdx.x; other < p.tiles_n; other += kScheduleThreads) {
        const int theirs = pieces_of(counts[other], most);
        const int their_length = (counts[other] + theirs - 1) / theirs;
        all += theirs;
        before += their_length > length || (their_length == length && other < tile) ? theirs : 0;
    }
    const int rank = static_cast<int>(sum_of_block(before));
    if (threadIdx.x == 0) {  // which kernels for heads without a group read, with the same lists
        p.tile_pieces[blockIdx.x] = counts[tile] > 0 ? pieces : 0;
    }
    for (int i = threadIdx.x; i < pieces; i += kScheduleThreads) {
        const int begin = min(counts[tile], i * length);
        int* words = order + (rank + i) * 3;
        words[0] = tile;
        words[1] = begin;
        words[2] = min(counts[tile], begin + length) - begin;
    }
    const int end = static_cast<int>(sum_of_block(all));
    for (int i = end + threadIdx.x; tile == 0 && i < p.blocks_n; i += kScheduleThreads) {
        order[i * 3] = -1;
        order[i * 3 + 1] = 0;
        order[i * 3 + 2] = 0;
    }
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

// The work of a block: a key tile of a head, its visits or a piece of them, the q heads it serves.
struct Work {
    int tile, head_kv, batch;
    int first_visit;        // in the list of the tile
    int visits;             // for each q head
    int first_head, heads;  // q heads
    int plane;  // of the mask
};

// The work of block `block` of the grid.
__device__ __forceinline__ Work work_of(const Params& p, int block) {
    const Place place = place_of(p, block);
    Work work;
    work.first_head = place.head;
    work.heads = 1;
    work.head_kv = work.first_head / (p.heads_q / p.heads_kv);
    work.batch = place.batch;
    work.plane = mask_plane(p, place.batch, place.head);
    const Piece piece = piece_of(p, work.plane, place.rank);
    work.tile = piece.tile;
    work.first_visit = piece.begin;
    work.visits = piece.count;
    return work;
}

// Visit `index` of a q head.
__device__ __forceinline__ int visit_of(const Params& p, const Work& work, int index) {
    return visit(p, work.plane, work.tile, work.first_visit + index);
}

// The plane of the first q head among those of q and dO.
__device__ __forceinline__ long long first_plane(const Params& p, const Work& work) {
    return static_cast<long long>(work.batch) * p.heads_q + work.first_head;
}

// ---- Producer ------------------------------------------------------------------------------------------------------

// Whole warps run these functions, which lets the compiler keep state in uniform registers (there are few others); only
// lane 0, the leader, issues. All warps go through the steps in the order of the consumers.

// Thread: start loading the block's key tile of K or V to `tile`.
__device__ __forceinline__ void load_keys(const TensorMap& map, unsigned tile, unsigned full, const Work& work) {
    barrier_expect(full, kTileBytesN);
    load_tile(tile, map, full, work.tile * kTileN, work.head_kv, work.batch, kTileN);
}

// Warp: load the visit, Q and row_stats (`row_stats`: of the head) of a step into the ring's next buffers.
__device__ __forceinline__ void load_q(const TensorMaps& maps, unsigned base, const Work& work, int head, int visit,
                                       const float* row_stats, Ring& ring, bool leader) {
    const int query0 = (visit >> 1) * kTileM;
    const unsigned full = base + kFullQ + ring.stage * 8;
    barrier_wait(base + kEmptyQ + ring.stage * 8, ring.phase);
    if (leader) {
        store_int(base + kOffsetVisit + ring.stage * 8, visit);
        barrier_expect(full, kTileBytesM + kRowStatsBytes);
        load_tile(base + kOffsetQ + ring.stage * kTileBytesM, maps.q, full, query0, head, work.batch, kTileM);
        row_stats += static_cast<long long>(query0) * kRowStatsFloats;
        bulk_load(base + kOffsetRowStats + ring.stage * kRowStatsBytes, row_stats, kRowStatsBytes, full);
    }
    ring.advance(kStagesQ);
}

// Warp: load dO of a step into the ring's next buffer.
__device__ __forceinline__ void load_dout(const TensorMaps& maps, unsigned base, const Work& work, int head, int visit,
                                          Ring& ring, bool leader) {
    const unsigned full = base + kFullDo + ring.stage * 8;
    barrier_wait(base + kEmptyDo + ring.stage * 8, ring.phase);
    if (leader) {
        barrier_expect(full, kTileBytesM);
        load_tile(base + kOffsetDo + ring.stage * kTileBytesM, maps.dout, full, (visit >> 1) * kTileM, head,
                  work.batch, kTileM);
    }
    ring.advance(kStagesDo);
}

// row_stats of q head `head` in device memory.
__device__ __forceinline__ const float* row_stats_of(const Params& p, const Work& work, int head) {
    return p.delta + (static_cast<long long>(work.batch) * p.heads_q + head) * p.padded_q * kRowStatsFloats;
}

// Warp 0: load K and V, then for each step Q, row_stats, the visit and dO.
__device__ __forceinline__ void produce(const Params& p, const TensorMaps& maps, unsigned base, const Work& work) {
    const bool leader = threadIdx.x % 32 == 0;
    if (leader) {
        load_keys(maps.k, base + kOffsetK, base + kFullK, work);
    }
    griddepcontrol_wait();  // for row_stats; consumers add to dK and dV only after they have these
    Ring q_ring = {0, 1}, do_ring = {0, 1};  // fresh barriers count as empty
    for (int h = 0; h < work.heads; ++h) {
        const int head = work.first_head + h;
        const float* row_stats = row_stats_of(p, work, head);
#pragma unroll 1
        for (int i = 0; i < work.visits; ++i) {
            const int visit = visit_of(p, work, i);
            load_q(maps, base, work, head, visit, row_stats, q_ring, leader);
            if (leader && h + i == 0) {  // after the first Q, with which the consumers begin
                load_keys(maps.v, base + kOffsetV, base + kFullV, work);
            }
            load_dout(maps, base, work, head, visit, do_ring, leader);
        }
    }
    griddepcontrol_launch_dependents();
}

// Thread: add the part of dQ in the buffer of consumer `group` to `sums`, both in the order of fragments, and wait
// until the buffer has been read.
__device__ __forceinline__ void add_dq(unsigned base, int group, float* sums) {
    proxy_fence();
    const unsigned part = base + kOffsetDq + group * kDqBytes;
    const int bytes = kDqBytes;
    bulk_reduce(sums, part, bytes);
    tma_store_commit();
    tma_store_wait();
}

// The fp32 sums of dQ of query tile `tile` in plane `plane`.
__device__ __forceinline__ float* dq_accum_of(const Params& p, long long plane, int tile) {
    return p.dq_accum + plane * p.padded_q * kHeadDim + static_cast<long long>(tile) * (kTileM * kHeadDim);
}

// Warp 2 + group: add the columns of dQ of consumer `group` to dq_accum.
__device__ __forceinline__ void reduce_dq(const Params& p, unsigned base, const Work& work, int group) {
    griddepcontrol_wait();  // for the zeros
    const bool leader = threadIdx.x % 32 == 0;
    unsigned phase = 0;
    for (int h = 0; h < work.heads; ++h) {
        const long long plane = first_plane(p, work) + h;
#pragma unroll 1
        for (int i = 0; i < work.visits; ++i) {
            const int tile = visit_of(p, work, i) >> 1;
            barrier_wait(base + kFullDq + group * 8, phase);
            phase ^= 1;
            if (leader) {
                add_dq(base, group, dq_accum_of(p, plane, tile) + group * (kDqBytes / 4));
                barrier_arrive(base + kEmptyDq + group * 8);
            }
        }
    }
}

// ---- Softmax and its gradient --------------------------------------------------------------------------------------

// Warpgroup: x = S - lse / scale becomes P = 2^(scale log2(e) x).
__device__ __forceinline__ void probabilities(float (&s)[kTileM / 2], float scale_log2) {
#pragma unroll
    for (int i = 0; i < kTileM / 2; ++i) {
        s[i] = exp2_approx(s[i] * scale_log2);
    }
}

// Warpgroup: P = 0 where the mask hides; `key` is the thread's first key.
__device__ __forceinline__ void apply_mask(const Params& p, int plane, float (&s)[kTileM / 2], int query0, int key) {
#pragma unroll
    for (int word = 0; word < kTileM / 32; ++word) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned seen = seen_by(p, plane, key + half * 8, query0 + word * 32) >> threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& value = s[word * 16 + i / 2 * 4 + half * 2 + i % 2];
                value = seen >> (i / 2 * 8 + i % 2) & 1 ? value : 0.0f;
            }
        }
    }
}

// Thread: P in the registers and precision that wgmma takes as its A operand.
__device__ __forceinline__ void pack_scores(unsigned (&frags)[kTileM / 16][4], const float (&s)[kTileM / 2]) {
#pragma unroll
    for (int i = 0; i < kTileM / 4; ++i) {
        frags[i / 4][i % 4] = pack(s[i * 2], s[i * 2 + 1]);
    }
}

// Thread: dS = P (dP - delta), likewise packed; `dp` is that difference.
__device__ __forceinline__ void score_gradients(unsigned (&frags)[kTileM / 16][4], const float (&s)[kTileM / 2],
                                                const float (&dp)[kTileM / 2]) {
#pragma unroll
    for (int i = 0; i < kTileM / 4; ++i) {
        frags[i / 4][i % 4] = pack(s[i * 2] * dp[i * 2], s[i * 2 + 1] * dp[i * 2 + 1]);
    }
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Warp: A of the product of row_stats: ones (in bf16) in the first three of 16 columns, those that may not be 0.
__device__ __forceinline__ void set_ones(unsigned (&ones)[4]) {
    const int thread = threadIdx.x % 4;  // its columns: 2 * thread, the next, and those 8 further
    ones[0] = thread == 0 ? 0x3f803f80 : thread == 1 ? 0x3f80 : 0;
    ones[1] = ones[0];
    ones[2] = 0;
    ones[3] = 0;
    // Hidden from ptxas: if it computed them anew before each product, they would need a fence there.
    asm volatile("" : "+r"(ones[0]), "+r"(ones[1]), "+r"(ones[2]), "+r"(ones[3]));
}

// Warpgroup: start adding to S or dP the row_stats whose columns are at `row_stats`.
__device__ __forceinline__ void start_row_stats(float (&s)[kTileM / 2], const unsigned (&ones)[4],
                                                 unsigned row_stats) {
    // Eight rows are 128 bytes, without a swizzle. The last 8 columns, whose factors are 0, are the first 8 once more.
    wgmma_row_stats(s, ones, descriptor(row_stats, 0, 128, 0), 1);
}

// Warpgroup: start S = K Q^T or dP = V dO^T, for its keys.
__device__ __forceinline__ void start_scores(float (&s)[kTileM / 2], unsigned keys, unsigned queries) {
    const unsigned long long a = descriptor(keys, 0, 8 * kSwizzleBytes, kSwizzle);
    const unsigned long long b = descriptor(queries, 0, 8 * kSwizzleBytes, kSwizzle);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        wgmma_scores(s, a + step_at(step, kTileN), b + step_at(step, kTileM), step > 0);
    }
}

// Warpgroup: start dV += P^T dO or dK += dS^T Q, for its keys; the sum is overwritten if `add` is 0.
__device__ __forceinline__ void start_dkv(float (&sum)[kHeadDim / 2], const unsigned (&frags)[kTileM / 16][4],
                                          unsigned queries, int add) {
    const unsigned long long b = descriptor(queries, kTileM * kSwizzleBytes, 8 * kSwizzleBytes, kSwizzle);
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) {
        wgmma_dkv(sum, frags[step], b + (step * 16 * kSwizzleBytes >> 4), step > 0 ? 1 : add);
    }
}

// Warpgroup: start dQ = dS K over all keys of the block, for the kDqColumns columns that start at `k`.
__device__ __forceinline__ void start_dq(float (&dq)[kDqColumns / 2], unsigned ds, unsigned k) {
    const unsigned long long a = descriptor(ds, 0, 8 * kDsRowBytes, kSwizzleDs);
    const unsigned long long b = descriptor(k, kTileN * kSwizzleBytes, 8 * kSwizzleBytes, kSwizzle);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
        wgmma_dq(dq, a + (step * 16 * kDsRowBytes >> 4), b + (step * 16 * kSwizzleBytes >> 4), step > 0);
    }
}

// ---- How results leave registers -----------------------------------------------------------------------------------

// Warpgroup: its 64 keys of dS to the tile at `ds`.
__device__ __forceinline__ void store_ds(unsigned ds, const unsigned (&frags)[kTileM / 16][4], int group) {
    const int lane = threadIdx.x % 32;
    const int row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
    // Row lane % 16 has its chunk c at place c ^ lane % 8; of a step's two chunks the upper lanes have the second.
    const unsigned place = row * kDsRowBytes + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) {
        stmatrix(ds + (place ^ step * 32), frags[step][0], frags[step][1], frags[step][2], frags[step][3]);
    }
}

// Warpgroup: its part of dQ to shared memory, in fragment order: [4 elements' index][thread][4 elements].
__device__ __forceinline__ void store_dq(unsigned part, const float (&dq)[kDqColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kDqColumns / 2; i += 4) {
        store_quad(part + i * 512 + threadIdx.x % 128 * 16, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
}

// Warpgroup: add its 64 keys of dK or dV to the fp32 sums of the group, in fragment order.
__device__ __forceinline__ void add_dkv(float* sums, const float (&x)[kHeadDim / 2]) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; i += 4) {
        add_to(sums + i * 128 + threadIdx.x % 128 * 4, x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
}

// ---- Consumer ------------------------------------------------------------------------------------------------------

// Where a step finds its tiles, and the barriers by which a consumer frees those of Q and dO.
struct Buffers {
    unsigned q, dout, ds, empty_q, empty_do;
};

// A consumer warpgroup: 64 keys of the block's tile. Products run while scalar code does:
// dS is computed beside dV, the next P beside dK.
struct Consumer {
    const Params& p;
    const Work work;  // by value: a reference costs instructions in the main loop
    const unsigned base;    // of shared memory
    const int group, lane;  // number of the warpgroup; lane of the warp
    int key;  // the thread's first one; the other is key + 8
    Ring q_ring = {0, 0}, do_ring = {0, 0};
    unsigned k;  // where the own rows of K lie
    unsigned v;
    float s[kTileM / 2];  // S - lse / scale, S without the scale; then P
    float dp[kTileM / 2];  // dP - delta
    float dk[kHeadDim / 2];
    float dv[kHeadDim / 2];
    float dq[kDqColumns / 2];
    unsigned p_frags[kTileM / 16][4];  // P as A operand
    unsigned ds_frags[kTileM / 16][4];
    unsigned ones[4];  // A operand of row_stats

    __device__ __forceinline__ Consumer(const Params& p, unsigned base, const Work& work,
                                        int group)
        : p(p), work(work), base(base), group(group), lane(threadIdx.x % 32) {
        key = work.tile * kTileN + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
        asm volatile("" : "+r"(key));  // pinned: otherwise ptxas computes it anew in every masked step
        set_ones(ones);
    }

    // Of step `step`, while the rings stand there.
    __device__ __forceinline__ Buffers buffers(int step) const {
        return {base + kOffsetQ + q_ring.stage * kTileBytesM, base + kOffsetDo + do_ring.stage * kTileBytesM,
                base + kOffsetDs + (step & 1) * kDsBytes, base + kEmptyQ + q_ring.stage * 8,
                base + kEmptyDo + do_ring.stage * 8};
    }

    __device__ __forceinline__ void wait_k() {
        barrier_wait(base + kFullK, 0);
        k = base + kOffsetK + group * 64 * kSwizzleBytes;
    }
    __device__ __forceinline__ void wait_v() {
        barrier_wait(base + kFullV, 0);
        v = base + kOffsetV + group * 64 * kSwizzleBytes;
    }
    __device__ __forceinline__ void wait_q() { barrier_wait(base + kFullQ + q_ring.stage * 8, q_ring.phase); }
    __device__ __forceinline__ void wait_dout() { barrier_wait(base + kFullDo + do_ring.stage * 8, do_ring.phase); }

    // Arrive for this warp.
    __device__ __forceinline__ void arrive(unsigned barrier) {
        if (lane == 0) {
            barrier_arrive(barrier);
        }
    }

    // Issue S = K Q^T - lse / scale of the step where the rings stand.
    __device__ __forceinline__ void issue_s() {
        start_scores(s, k, base + kOffsetQ + q_ring.stage * kTileBytesM);
        start_row_stats(s, ones, base + kOffsetRowStats + q_ring.stage * kRowStatsBytes);
        wgmma_commit();
    }

    // Issue dP = V dO^T - delta of the step where the rings stand.
    __device__ __forceinline__ void issue_dp() {
        start_scores(dp, v, base + kOffsetDo + do_ring.stage * kTileBytesM);
        start_row_stats(dp, ones, base + kOffsetRowStats + q_ring.stage * kRowStatsBytes + kRowStatsBytes / 2);
        wgmma_commit();
    }

    // Issue dV += P^T dO.
    __device__ __forceinline__ void issue_dv(const Buffers& now, int step) {
        start_dkv(dv, p_frags, now.dout, step > 0);
        wgmma_commit();
    }

    // Issue dK += dS^T Q.
    __device__ __forceinline__ void issue_dk(const Buffers& now, int step) {
        start_dkv(dk, ds_frags, now.q, step > 0);
        wgmma_commit();
    }

    // Issue dQ = dS K, the columns of this consumer, of the step whose dS is at `ds`.
    __device__ __forceinline__ void issue_dq(unsigned ds) {
        start_dq(dq, ds, base + kOffsetK + group * (kDqSecond / kColumns * kTileN * kSwizzleBytes));
        wgmma_commit();
    }

    // From S to P, of the step where the rings stand.
    __device__ __forceinline__ void softmax() {
        const int visit = load_int(base + kOffsetVisit + q_ring.stage * 8);
        probabilities(s, p.scale_log2);
        if (visit & 1) {
            apply_mask(p, work.plane, s, (visit >> 1) * kTileM, key);
        }
    }

    // Store dS to shared memory, where both consumers read it for dQ, and arrive. Readers fence: a fence here would
    // wait for the stores, which are delayed while products in flight keep shared memory busy.
    __device__ __forceinline__ void hand_over_ds(const Buffers& now) {
        store_ds(now.ds, ds_frags, group);
        __syncwarp();
        arrive(base + kFullDs);
    }

    // Hand dQ over to the warp that adds it to dq_accum; it is number `count` of this consumer.
    __device__ __forceinline__ void hand_over_dq(int count) {
        store_dq(base + kOffsetDq + group * kDqBytes, dq);
        __syncwarp();
        arrive(base + kFullDq + group * 8);
    }

    __device__ __forceinline__ void run() {
        const int steps = work.visits * work.heads;
        prologue();
        for (int step = 0; step < steps; ++step) {
            one_step(step, step + 1 < steps);
        }
        epilogue();
    }

    // P of the first step.
    __device__ __forceinline__ void prologue() {
        wait_k();
        wait_q();
        wgmma_fence();
        issue_s();
        wgmma_wait<0>();
        accumulator_fence(s);
        softmax();
        wait_v();
    }

    __device__ __forceinline__ void one_step(int step, bool more) {
        const Buffers now = buffers(step);
        wait_dout();
        pack_scores(p_frags, s);
        wgmma_fence();
        issue_dp();
        issue_dv(now, step);
        wgmma_wait<1>();  // dP is complete
        accumulator_fence(dp);
        score_gradients(ds_frags, s, dp);
        hand_over_ds(now);

        q_ring.advance(kStagesQ);
        do_ring.advance(kStagesDo);
        if (more) {
            wait_q();
        }
        wgmma_fence();
        issue_s();  // after the last step on stale data; the result is not used
        issue_dk(now, step);
        wgmma_wait<1>();  // dV and S are complete
        accumulator_fence(s);
        arrive(now.empty_do);
        if (more) {
            softmax();
        }

        barrier_wait(base + kFullDs, step & 1);  // dS of the other consumer is there, too
        proxy_fence();
        wgmma_wait<0>();  // dK is complete
        arrive(now.empty_q);  // every warp for itself: with Q goes the visit, which it read before a __syncwarp
        wgmma_fence();
        issue_dq(now.ds);
        barrier_wait(base + kEmptyDq + group * 8, step & 1 ^ 1);
        wgmma_wait<0>();
        accumulator_fence(dq);
        hand_over_dq(step);
    }

    // Add dK and dV to dkv_accum, the fp32 sums of the group.
    __device__ __forceinline__ void add_to_sums() {
        const long long plane = static_cast<long long>(work.batch) * p.heads_kv + work.head_kv;
        const long long planes = static_cast<long long>(p.batch) * p.heads_kv;
        const int key0 = work.tile * kTileN + group * 64;
        add_dkv(p.dkv_accum + (plane * p.padded_k + key0) * kHeadDim, dk);
        add_dkv(p.dkv_accum + ((planes + plane) * p.padded_k + key0) * kHeadDim, dv);
    }

    __device__ __forceinline__ void epilogue() {
        accumulator_fence(dk);
        accumulator_fence(dv);
        add_to_sums();
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

// Thread: what rounding to bf16 leaves of x.
__device__ __forceinline__ float rest_of(float x) { return x - __uint_as_float(pack(x, 0.0f) << 16); }

// Thread: the 8 columns, in bf16, with which a row of Q or dO goes on: three that sum up to x, and zeros.
__device__ __forceinline__ uint4 columns_of(float x) {
    const float rest = rest_of(x);
    return make_uint4(pack(x, rest), pack(rest_of(rest), 0.0f), 0, 0);
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
attnforge_bwd_sm90a_bf16_d128_dense_a16_m64_n128_s2_t2_l0_r0_h1_o0_preprocess(const __grid_constant__ Params p) {
    griddepcontrol_launch_dependents();
    constexpr int lanes = 16;  // threads that share a row
    const int head = blockIdx.x % p.heads_q;
    const int batch = blockIdx.x / p.heads_q % p.batch;
    const int tile = blockIdx.x / (p.heads_q * p.batch);
    const long long plane = static_cast<long long>(batch) * p.heads_q + head;
    const element* out = static_cast<const element*>(p.out.data) + batch * p.out.batch + head * p.out.head;
    const element* dout = static_cast<const element*>(p.dout.data) + batch * p.dout.batch + head * p.dout.head;
    uint4* stored = reinterpret_cast<uint4*>(p.delta) + (plane * p.padded_q + tile * kTileM) * (kRowStatsFloats / 4);
    for (int i = threadIdx.x / lanes; i < kTileM; i += kHelperThreads / lanes) {
        const int row = tile * kTileM + i;
        const int chunk = threadIdx.x % lanes;
        float sum = 0.0f;
        if (row < p.seq_q && chunk < kHeadDim / 8) {
            sum = dot(out + row * p.out.row + chunk * 8, dout + row * p.dout.row + chunk * 8);
        }
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
        }
        if (chunk == 0) {
            // Rows without gradients get P = 0 by an lse that is huge but finite: an infinite one would leave NaN to
            // the second column.
            const float log2e = 1.4426950408889634f;
            const float2 stats = row_stats(p, plane, row, sum);
            const bool empty = stats.x == __int_as_float(0xff800000);
            stored[i] = columns_of(empty ? -3e38f : -stats.x * log2e / p.scale_log2);
            stored[kTileM + i] = columns_of(-stats.y);
        }
    }
    float4* dq = reinterpret_cast<float4*>(p.dq_accum + (plane * p.padded_q + tile * kTileM) * kHeadDim);
    for (int i = threadIdx.x; i < kTileM * kHeadDim / 4; i += kHelperThreads) {
        dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float4* dkv = reinterpret_cast<float4*>(p.dkv_accum);
    const long long quads = 2LL * p.batch * p.heads_kv * p.padded_k * kHeadDim / 4;
    const long long first = static_cast<long long>(blockIdx.x) * kHelperThreads + threadIdx.x;
    const long long step = static_cast<long long>(gridDim.x) * kHelperThreads;
    for (long long i = first; i < quads; i += step) {
        dkv[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Block: the sums of dQ of a query tile, times the scale, to `rows`.
__device__ __forceinline__ void gather_dq(const Params& p, unsigned (*rows)[kPitch], const float* sums) {
    gather<kDqColumns>(rows, 0, sums, p.scale);
    gather<kDqColumns>(rows, kDqColumns, sums + 64 * kDqColumns, p.scale);
}

// Grid: tiles_m x batch x heads_q. dQ = scale * sums.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
attnforge_bwd_sm90a_bf16_d128_dense_a16_m64_n128_s2_t2_l0_r0_h1_o0_postprocess(const __grid_constant__ Params p) {
    griddepcontrol_launch_dependents();
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

// Grid: tiles_n x batch x heads_kv. dK = scale * sums and dV = sums, 64 keys at a time.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
attnforge_bwd_sm90a_bf16_d128_dense_a16_m64_n128_s2_t2_l0_r0_h1_o0_postprocess_dkv(const __grid_constant__ Params p) {
    __shared__ __align__(16) unsigned rows[2][64][kPitch];
    const int head = blockIdx.x % p.heads_kv;
    const int batch = blockIdx.x / p.heads_kv % p.batch;
    const int tile = blockIdx.x / (p.heads_kv * p.batch);
    const long long plane = static_cast<long long>(batch) * p.heads_kv + head;
    const long long planes = static_cast<long long>(p.batch) * p.heads_kv;
    element* dk = static_cast<element*>(p.dk.data) + batch * p.dk.batch + head * p.dk.head;
    element* dv = static_cast<element*>(p.dv.data) + batch * p.dv.batch + head * p.dv.head;
    griddepcontrol_wait();
    for (int key0 = tile * kTileN; key0 < min(p.seq_k, (tile + 1) * kTileN); key0 += 64) {
        gather<kHeadDim>(rows[0], 0, p.dkv_accum + (plane * p.padded_k + key0) * kHeadDim, p.scale);
        gather<kHeadDim>(rows[1], 0, p.dkv_accum + ((planes + plane) * p.padded_k + key0) * kHeadDim, 1.0f);
        __syncthreads();
        scatter(dk + key0 * p.dk.row, p.dk.row, rows[0], min(64, p.seq_k - key0));
        scatter(dv + key0 * p.dv.row, p.dv.row, rows[1], min(64, p.seq_k - key0));
        __syncthreads();
    }
}

// ---- Main kernel ---------------------------------------------------------------------------------------------------

// Thread: set up all barriers of the block.
__device__ __forceinline__ void init_barriers(unsigned base) {
    barrier_init(base + kFullK, 1);
    barrier_init(base + kFullV, 1);
    barrier_init(base + kFullDs, kConsumers * 4);  // warps
    for (int i = 0; i < kStagesQ; ++i) {
        barrier_init(base + kFullQ + i * 8, 1);
        barrier_init(base + kEmptyQ + i * 8, kConsumers * 4);  // warps
    }
    for (int i = 0; i < kStagesDo; ++i) {
        barrier_init(base + kFullDo + i * 8, 1);
        barrier_init(base + kEmptyDo + i * 8, kConsumers * 4);
    }
    for (int i = 0; i < kConsumers; ++i) {
        barrier_init(base + kFullDq + i * 8, 4);  // warps
        barrier_init(base + kEmptyDq + i * 8, 1);
    }
    barrier_init_fence();
}

// Grid: blocks_n x batch x heads_q blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
attnforge_bwd_sm90a_bf16_d128_dense_a16_m64_n128_s2_t2_l0_r0_h1_o0(
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
        return;
    }
    if (threadIdx.x == 0) {
        init_barriers(base);
    }
    __syncthreads();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
        if (warp == 0) {
            produce(p, maps, base, work);
        } else if (warp > 1) {
            reduce_dq(p, base, work, warp - 2);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        Consumer(p, base, work, group - 1).run();
    }
}
