// attnforge_fwd_sm90a_bf16_d128_spans_a16_m192_n80_s3_p1_r1_k1_q0_c1
// Generated from templates/sm90a/forward.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch sm90a --dtype bf16 --head-dim 128 --mask spans --align 16
//     --set tile_m=192 --set tile_n=80 --set stages=3 --set ping_pong=1 --set
//     persistent=1 --set counter=1 --set q_in_regs=0 --set cluster=1
//
//   tile_m       192   query rows per tile, 64 for each consumer warpgroup
//   tile_n        80   keys per step of the main loop
//   stages         3   shared-memory buffers for K and for V
//   ping_pong      1   consumer warpgroups take turns with the tensor cores
//   persistent     1   one block per multiprocessor walks many tiles
//   counter        1   a block takes its next tile from a counter, not in fixed rounds
//   q_in_regs      0   keep the fragments of Q in registers
//   cluster        1   blocks, 1 or 2, of neighbouring query tiles that share their loads of K and V
//
// S = Q K^T (tile_m x tile_n), P = 2^(scale log2(e) (S - top)) with `top` near the row maximum, O = sum of P V,
// l = row sum of P; out = O / l, lse = ln(sum exp(scale S)).
// One producer thread copies tiles with TMA; each consumer warpgroup owns 64 query rows of a tile. Inside a consumer S
// of the next key tile is started before P V of this one (wgmma is asynchronous).
// Fragments: element i of a thread is row warp*16 + lane/4 + (i/2%2)*8, column i/4*8 + lane%4*2 + i%2.

typedef unsigned short element;  // bf16, only ever moved as bits

struct Params {
    void* q;  // (batch, heads, seq, head_dim), strides below
    void* k;  // (batch, heads, seq, head_dim), strides below
    void* v;  // (batch, heads, seq, head_dim), strides below
    void* out;  // (batch, heads, seq, head_dim), strides below
    void* dout;  // (batch, heads, seq, head_dim), strides below
    void* dq;  // (batch, heads, seq, head_dim), strides below
    void* dk;  // (batch, heads, seq, head_dim), strides below
    void* dv;  // (batch, heads, seq, head_dim), strides below
    float* lse;  // (batch, heads_q, seq_q) natural-log sum of exp, -inf for an empty row
    const float* dlse;  // (batch, heads_q, seq_q) gradient of lse, null if there is none
    float* delta;  // workspace of the backward, 2 or 8 floats a row: row sums of dout * out less dlse, on GPUs with lse
    float* dq_accum;  // (batch, heads_q, padded_q, columns) fp32 sums of dq, kernel's own order
    const int* starts;  // (seq_k) spans: key j is visible to queries starts[j] <= i < ends[j]
    const int* ends;  // (seq_k)
    int* bounds;  // (padded_k, 2) starts and ends side by side, 0 0 past seq_k
    const unsigned char* dense;  // dense mask as bytes, 1 where query i sees key j; strides below
    const unsigned* mask_bits;  // the same as bits, (mask_planes, seq_q, mask_words); one of the two
    unsigned* bits;  // (mask_planes, padded_q or padded_k, bits_row) the dense mask, 32 pairs a word
    int* tile_count;  // (mask_planes, tiles) visited tiles of each owned tile
    int* tile_order;  // (mask_planes, tiles) owned tiles, the one with most work first
    int* tile_list;  // (mask_planes, tiles, list_stride) visited tile << parts | a bit for each part with hidden pairs
    int* reach;  // (mask_planes, tiles_m, 4, 2) lists of key tiles: visits [x, y) that show a 64-row part anything
    float* dkv_accum;  // (batch, heads_kv, padded_k, columns) fp32 sums of dk, then those of dv
    int* turn;  // (mask_planes, tiles, list_stride) ordered dq sums: each visit's turn
    int* pieces;  // (2) pieces of work taken from the counter, and blocks that found none left; 0 between launches
    int* turns_taken;  // (batch, heads_q, tiles_m) of dq, (batch, heads_kv, tiles_n) of dk, dv: ordered sums so far
    long long q_batch;  // stride of q along batch, in elements
    long long q_head;  // stride of q along heads, in elements
    long long q_row;  // stride of q along the sequence, in elements
    long long k_batch;  // stride of k along batch, in elements
    long long k_head;  // stride of k along heads, in elements
    long long k_row;  // stride of k along the sequence, in elements
    long long v_batch;  // stride of v along batch, in elements
    long long v_head;  // stride of v along heads, in elements
    long long v_row;  // stride of v along the sequence, in elements
    long long out_batch;  // stride of out along batch, in elements
    long long out_head;  // stride of out along heads, in elements
    long long out_row;  // stride of out along the sequence, in elements
    long long dout_batch;  // stride of dout along batch, in elements
    long long dout_head;  // stride of dout along heads, in elements
    long long dout_row;  // stride of dout along the sequence, in elements
    long long dq_batch;  // stride of dq along batch, in elements
    long long dq_head;  // stride of dq along heads, in elements
    long long dq_row;  // stride of dq along the sequence, in elements
    long long dk_batch;  // stride of dk along batch, in elements
    long long dk_head;  // stride of dk along heads, in elements
    long long dk_row;  // stride of dk along the sequence, in elements
    long long dv_batch;  // stride of dv along batch, in elements
    long long dv_head;  // stride of dv along heads, in elements
    long long dv_row;  // stride of dv along the sequence, in elements
    long long dense_batch;  // stride of dense along batch, 0 where it is the same for all
    long long dense_head;  // stride of dense along heads_q, 0 where it is the same for all
    long long dense_row;  // stride of dense along queries, 0 where it is the same for all
    long long dense_col;  // stride of dense along keys, 0 where it is the same for all
    int batch;
    int heads_q;
    int heads_kv;  // divides heads_q
    int seq_q;
    int seq_k;
    int tiles_m;  // ceil(seq_q / tile_m)
    int tiles_n;  // ceil(seq_k / tile_n)
    int list_stride;  // entries per row of tile_list
    int mask_batches;  // batch if each entry has its own dense mask, else 1
    int mask_heads;  // heads_q if each q head has its own dense mask, else 1
    int mask_planes;  // mask_batches * mask_heads; 1 for other masks
    int mask_words;  // words per row of mask_bits, ceil(seq_k / 32)
    int bits_row;  // words per row of bits
    int padded_q;  // tiles_m * tile_m
    int padded_k;  // tiles_n * tile_n
    int threads;  // CPU threads to use
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// How the copy engine finds the tensors; encoded by the host for each call.
struct TensorMaps {
    TensorMap q, k, v, out;
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;
constexpr int kTileM = 192;  // query rows of a tile
constexpr int kTileN = 80;  // keys of a step
constexpr int kConsumers = 3;  // warpgroups, 64 query rows each
constexpr int kParts = kConsumers;  // of a query tile: each warpgroup passes by what is hidden from its rows
constexpr int kThreads = (kConsumers + 1) * 128;
// Row maxima are followed in the first kExact visits, in masked ones, and while a row has none: there P is 1 at most.
// Elsewhere only when the average of P over a thread's columns passes 1.25. A row's largest P costs accuracy where it
// is not 1, for it is rounded; what these two numbers cost: docs/performance.md, log 24.
constexpr int kExact = 3;
constexpr float kLimit = kTileN / 4 * 1.25f;  // of the sum over a thread's columns
constexpr int kStages = 3;  // buffers of K and of V
// A tile is stored in panels of kColumns columns, [panel][row][column], 16-byte chunks swizzled within kSpan bytes.
constexpr int kColumns = 64;
constexpr int kSpan = kColumns * 2;
constexpr unsigned kSwizzle = 1;  // wgmma's code for it
constexpr int kPanels = 2;
constexpr int kMain = kColumns * kPanels;  // columns of a stored row
constexpr int kRowBytes = kMain * 2;
constexpr int kSteps = (kHeadDim + 15) / 16;  // k16 steps of wgmma along head_dim
constexpr int kTileBytesM = kTileM * kRowBytes;
constexpr int kTileBytesN = kTileN * kRowBytes;
constexpr int kBuffersQ = 2;  // O leaves through the buffer that Q came in
constexpr int kOffsetQ = 0;
constexpr int kOffsetK = kOffsetQ + kBuffersQ * kTileBytesM;
constexpr int kOffsetV = kOffsetK + kStages * kTileBytesN;
constexpr int kOffsetBounds = kOffsetV + kStages * kTileBytesN;
constexpr int kBoundsBytes = kTileN * 8;  // of the keys of a tile, where it is masked
constexpr int kOffsetBarriers = kOffsetBounds + kStages * kBoundsBytes;
// Barriers: full = the tile has landed (the producer's arrival and the bytes that it announced), empty = its consumers
// are done with it. One thread arrives for a warpgroup: it has waited for a wgmma, which is one operation of all warps.
// Empty K takes an arrival of each warp, as each reads the bounds beside K on its own.
// Empty Q: O has left through the buffer.
constexpr int kFullQ = kOffsetBarriers;
constexpr int kEmptyQ = kFullQ + 8 * kBuffersQ;
constexpr int kFullK = kEmptyQ + 8 * kBuffersQ;
constexpr int kEmptyK = kFullK + 8 * kStages;
constexpr int kFullV = kEmptyK + 8 * kStages;
constexpr int kEmptyV = kFullV + 8 * kStages;
// What each buffer of Q is for, as the producer found out: the tile, head, batch and number of visits of the piece of
// work, then the reach of each part; 16 bytes each.
constexpr int kPiece = kEmptyV + 8 * kStages;
constexpr int kPieceBytes = 16 + 16 * kParts;
static_assert(kPiece % 16 == 0, "read and written 16 bytes at a time");
constexpr int kSharedBytes = kPiece + kPieceBytes * kBuffersQ;
static_assert(kSharedBytes == 223360, "codegen/plan_sm90.py disagrees");

// Named barriers, one of each kind for each consumer warpgroup; 0 is __syncthreads.
enum NamedBarrier { kTurnOfFirst = 1, kStoreOfFirst = 1 + kConsumers };

// ---- PTX: one instruction per function -----------------------------------------------------------------------------

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Thread: set up a barrier for `count` arrivals per phase.
__device__ __forceinline__ void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Thread: make initialised barriers visible to the copy engine.
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

// Warp: write four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

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

// ---- Mask: spans ---------------------------------------------------------------------------------------------------

// The queries that see key `key` are [x, y).
__device__ __forceinline__ int2 span_of(const Params& p, int key) {
    return key < p.seq_k ? make_int2(__ldg(p.starts + key), __ldg(p.ends + key)) : make_int2(0, 0);
}

// The query tile of the block with this rank; tiles with most work have the lowest rank.
__device__ __forceinline__ int owned_tile(const Params& p, int rank) {
    return __ldg(p.tile_order + rank);
}

// How many key tiles query tile `tile` visits.
__device__ __forceinline__ int visits(const Params& p, int tile) {
    return __ldg(p.tile_count + tile);
}

// Visit number `index`: key tile << kParts, and a bit for each row group of the query tile that misses some pairs.
__device__ __forceinline__ int visit(const Params& p, int tile, int index) {
    return __ldg(p.tile_list + static_cast<long long>(tile) * p.list_stride + index);
}

// The visits in which row group `part` of the tile sees some pair: [x, y).
__device__ __forceinline__ int2 reach_of(const Params& p, int tile, int part) {
    return __ldg(reinterpret_cast<const int2*>(p.reach) + tile * 4 + part);
}

// ---- Order of the work ---------------------------------------------------------------------------------------------

// Bytes of the L2 cache that K and V of the heads in work may take. An H200 has 50 MB; what
// sections gain: docs/performance.md, log 11.
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

// ---- Tile schedule from starts/ends: built once per mask on the device, shared by all layers and heads -------------

constexpr int kScheduleThreads = 128;
constexpr unsigned kSomeParts = (1u << kParts) - 1;

// Block: in how many threads before this one `mine` is true. Adds all of them to `total`; `votes` holds each warp's.
__device__ __forceinline__ int count_before(bool mine, unsigned (&votes)[kScheduleThreads / 32], int& total) {
    const int warp = threadIdx.x / 32;
    __syncthreads();  // nobody reads the last votes any more
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

constexpr int kUnit = kTileM / kParts;  // query rows of a row group
constexpr int kKeysOfThread = (kTileN + kScheduleThreads - 1) / kScheduleThreads;

// The keys of a tile, as the threads of a block hold them.
struct Keys {
    int2 units[kKeysOfThread];  // of queries that see the key: [x, y)
    int latest, earliest;       // start and end of all keys of the tile
};

// Block: the keys of a tile. Also writes bounds, and clears the tile counters.
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
            reinterpret_cast<int2*>(p.bounds)[key_tile * kTileN + in_tile] = span;
        }
    }
    if (key_tile == 0 && threadIdx.x < 2) {
        p.pieces[threadIdx.x] = 0;
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
    constexpr int units = kScheduleThreads * kParts;
    __shared__ int changes[units];  // how many more keys a row group sees than the one before it
    __shared__ int sums[kScheduleThreads / 32];
    for (int i = threadIdx.x; i < units; i += kScheduleThreads) {
        changes[i] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeysOfThread; ++i) {
        const unsigned first = keys.units[i].x - base * kParts;
        const unsigned last = keys.units[i].y - base * kParts;
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
    int parts[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        sum += changes[threadIdx.x * kParts + part];
        parts[part] = sum;
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
    for (int part = 0; part < kParts; ++part) {
        const int first = (base + threadIdx.x) * kTileM + part * kUnit;
        const int last = min(first + kUnit, p.seq_q);
        kind |= (before + parts[part] > 0) << part;
        kind |= (keys.latest > first || keys.earliest < last) << kParts + part;
    }
    return kind & kSomeParts ? kind : 0;
}

// One block per key tile: writes to the list of each query tile, at the place of the key tile, how it is seen.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90a_bf16_d128_spans_a16_m192_n80_s3_p1_r1_k1_q0_c1_kinds(const __grid_constant__ Params p) {
    const Keys keys = load_keys(p, blockIdx.x);
    int seen = 0;
    for (int base = 0; base < p.tiles_m; base += kScheduleThreads) {
        const unsigned kind = find_kind(p, keys, base, seen);
        if (base + threadIdx.x < p.tiles_m) {
            p.tile_list[static_cast<long long>(base + threadIdx.x) * p.list_stride + blockIdx.x] = kind;
        }
    }
}

// One block per owned tile: list the tiles it must visit, in ascending order.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90a_bf16_d128_spans_a16_m192_n80_s3_p1_r1_k1_q0_c1_schedule(const __grid_constant__ Params p) {
    __shared__ unsigned votes[kScheduleThreads / 32];
    __shared__ int2 reach[kParts];
    if (threadIdx.x < kParts) {
        reach[threadIdx.x] = make_int2(p.tiles_n, 0);
    }
    const int tile = blockIdx.x;
    int* list = p.tile_list + static_cast<long long>(tile) * p.list_stride;
    int total = 0;
    for (int base = 0; base < p.tiles_n; base += kScheduleThreads) {
        const int visited = base + threadIdx.x;
        // What _kinds wrote to the list. It is overwritten only where every thread has read.
        const unsigned kind = visited < p.tiles_n ? list[visited] : 0;
        const int slot = count_before(kind != 0, votes, total);
        if (kind != 0) {
            list[slot] = visited << kParts | kind >> kParts;
        }
        // The visits of a warp lie side by side: take the first and the last in which a row group sees some pair.
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const unsigned shows = __ballot_sync(~0u, kind >> part & 1);
            const bool first = (shows & ((2u << threadIdx.x % 32) - 1)) == 1u << threadIdx.x % 32;
            const bool last = shows >> threadIdx.x % 32 == 1;
            if (first) {
                atomicMin(&reach[part].x, slot);
            }
            if (last) {
                atomicMax(&reach[part].y, slot + 1);
            }
        }
    }
    if (threadIdx.x == 0) {
        p.tile_count[tile] = total;
    }
    __syncthreads();
    if (threadIdx.x < kParts) {
        const int2 found = reach[threadIdx.x];
        reinterpret_cast<int2*>(p.reach)[tile * 4 + threadIdx.x] = found.y > 0 ? found : make_int2(0, 0);
    }
}

// One block per owned tile: its rank is the number of tiles with more work, earlier tiles winning ties.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90a_bf16_d128_spans_a16_m192_n80_s3_p1_r1_k1_q0_c1_order(const __grid_constant__ Params p) {
    const int tile = blockIdx.x;
    const int work = p.tile_count[tile];
    int rank = 0;
    for (int base = 0; base < p.tiles_m; base += kScheduleThreads) {
        const int other = base + threadIdx.x;
        const int theirs = other < p.tiles_m ? p.tile_count[other] : -1;
        rank += __syncthreads_count(theirs > work || (theirs == work && other < tile));
    }
    if (threadIdx.x == 0) {
        p.tile_order[rank] = tile;
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
    return (step / (kColumns / 16) * rows * kSpan + step % (kColumns / 16) * 32) >> 4;
}

// Thread: start copying `rows` rows of a head, from `row` on, to a tile.
__device__ __forceinline__ void load_tile(unsigned tile, const TensorMap& map, unsigned barrier, int row, int head,
                                          int batch, int rows) {
    tma_load(tile, map, barrier, 0, row, 0, head, batch);
}

// Rows from `row` on of a tile of `rows` rows, as operands of wgmma, whether columns or rows are what it sums over
// (where it is columns, the distance of panels is ignored).
__device__ __forceinline__ unsigned long long panels_at(unsigned tile, int rows, int row) {
    return descriptor(tile + row * kSpan, rows * kSpan, 8 * kSpan, kSwizzle);
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of `rows` rows. TMA swizzles: the chunk's number is XORed
// with the place of the row in the pattern.
__device__ __forceinline__ unsigned chunk_at(int row, int chunk, int rows) {
    const int place = chunk % 8 ^ row / 1 % 8;
    return chunk / 8 * rows * kSpan + row * kSpan + place * 16;
}

// Thread: start copying 64 rows, from `from` on, of a tile of `rows` rows to a head, from `row` on; rows past the end
// of the head are dropped.
__device__ __forceinline__ void store_rows(const TensorMap& map, unsigned tile, int from, int row, int head, int batch,
                                           int rows) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        tma_store(map, tile + (panel * rows + from) * kSpan, panel * kColumns, row, 0, head, batch);
    }
    tma_store_commit();
}

// ---- Work ----------------------------------------------------------------------------------------------------------

// One piece of work: a query tile of a head.
struct Work {
    int tile, head, batch;
};

// Work number `index`.
__device__ __forceinline__ Work work_at(const Params& p, int index) {
    const Place place = place_of(p, index);
    return {owned_tile(p, place.rank), place.head, place.batch};
}

// Pieces of work, those that see nothing included.
__device__ __forceinline__ int count_work(const Params& p) {
    return p.tiles_m * p.heads_q * p.batch;
}

// Thread `thread` of `threads`: zeros for `rows` rows, from `query0` on, that see nothing.
__device__ __forceinline__ void store_empty(const Params& p, const Work& work, int query0, int rows, int thread,
                                            int threads) {
    element* out = static_cast<element*>(p.out) + work.batch * p.out_batch + work.head * p.out_head;
    float* lse = p.lse + (static_cast<long long>(work.batch) * p.heads_q + work.head) * p.seq_q;
    rows = min(rows, p.seq_q - query0);
#pragma unroll 1
    for (int i = thread; i < rows * (kHeadDim / 8); i += threads) {
        element* chunk = out + (query0 + i / (kHeadDim / 8)) * p.out_row + i % (kHeadDim / 8) * 8;
        *reinterpret_cast<uint4*>(chunk) = make_uint4(0, 0, 0, 0);
    }
#pragma unroll 1
    for (int i = thread; i < rows; i += threads) {
        lse[query0 + i] = __int_as_float(0xff800000);
    }
}

// Warp: the results of all tiles whose rows see nothing; the producer gives consumers none of them.
__device__ __forceinline__ void fill_empty(const Params& p) {
#pragma unroll 1
    for (int index = blockIdx.x; index < count_work(p); index += gridDim.x) {
        const Work work = work_at(p, index);
        if (visits(p, work.tile) == 0) {
            store_empty(p, work, work.tile * kTileM, kTileM, threadIdx.x % 32, 32);
        }
    }
}

// Warpgroup: the next piece of work, which of its visits show part `group` anything, and how many there are; 0 if no
// piece is left. All as the producer left it with the buffer of Q. All warps have read it before that buffer is handed
// back: a named barrier of the warpgroup lies in between, in store or in pass.
__device__ __forceinline__ int next_work(unsigned base, unsigned q_buffer, unsigned q_phase, int group, Work& work,
                                         int2& reach) {
    barrier_wait(base + kFullQ + q_buffer * 8, q_phase);
    const int4 piece = shared_load(base + kPiece + q_buffer * kPieceBytes);
    const int4 part = shared_load(base + kPiece + q_buffer * kPieceBytes + 16 + group * 16);
    reach = make_int2(__shfl_sync(~0u, part.x, 0), __shfl_sync(~0u, part.y, 0));
    work = {__shfl_sync(~0u, piece.x, 0), __shfl_sync(~0u, piece.y, 0), __shfl_sync(~0u, piece.z, 0)};
    return __shfl_sync(~0u, piece.w, 0);
}

// Warpgroup: hand back `count` tiles of K and V that are hidden from its rows. Nothing may be in flight.
// Of its turns with the tensor cores it passes on the first `turns`.
__device__ __forceinline__ void pass(unsigned base, unsigned& stage, unsigned& phase, int group, int count, int turns) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        barrier_wait(base + kFullK + stage * 8, phase);  // to arrive before would count for the tile before
        named_sync(kStoreOfFirst + group, 128);  // all warps have seen this phase: it may end
        barrier_arrive_if(threadIdx.x % 32 == 0, base + kEmptyK + stage * 8);
        if (i < turns) {
            named_sync(kTurnOfFirst + group, 256);
            named_arrive(kTurnOfFirst + (group + 1) % kConsumers, 256);
        }
        barrier_wait(base + kFullV + stage * 8, phase);
        named_sync(kStoreOfFirst + group, 128);
        barrier_arrive_if(threadIdx.x % 128 == 0, base + kEmptyV + stage * 8);
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
}

// ---- Producer ------------------------------------------------------------------------------------------------------

// Thread: feed the consumers of this block.
__device__ __forceinline__ void produce(const Params& p, const TensorMaps& maps, unsigned base) {
    unsigned stage = 0;
    unsigned phase = 0;  // of the K and V buffers
    unsigned q_buffer = 0;
    unsigned q_phase = 0;
    int index = blockIdx.x;
    while (index < count_work(p)) {
        const Work work = work_at(p, index);
        const int head_kv = work.head / (p.heads_q / p.heads_kv);
        const int count = visits(p, work.tile);
        if (count == 0) {
            index = gridDim.x + atomicAdd(p.pieces, 1);
            continue;
        }
        barrier_wait(base + kEmptyQ + q_buffer * 8, q_phase ^ 1);
        const unsigned piece = base + kPiece + q_buffer * kPieceBytes;
        // Full Q, where consumers wait, comes after these writes: the arrival that announces Q releases them.
        shared_store(piece, make_int4(work.tile, work.head, work.batch, count));
        for (int part = 0; part < kParts; ++part) {
            const int2 reach = reach_of(p, work.tile, part);
            shared_store(piece + 16 + part * 16, make_int4(reach.x, reach.y, 0, 0));
        }
        barrier_expect(base + kFullQ + q_buffer * 8, kTileBytesM);
        load_tile(base + kOffsetQ + q_buffer * kTileBytesM, maps.q, base + kFullQ + q_buffer * 8,
                  work.tile * kTileM, work.head, work.batch, kTileM);
        if (++q_buffer == kBuffersQ) {
            q_buffer = 0;
            q_phase ^= 1;
        }
        int entry = visit(p, work.tile, 0);
#pragma unroll 1  // registers are few
        for (int i = 0; i < count; ++i) {
            if (i + 1 == count) {
                index = gridDim.x + atomicAdd(p.pieces, 1);  // early: the answer takes its time
            }
            const int key0 = (entry >> kParts) * kTileN;
            const int masked = (entry & (1 << kParts) - 1) != 0;
            if (i + 1 < count) {
                entry = visit(p, work.tile, i + 1);
            }
            barrier_wait(base + kEmptyK + stage * 8, phase ^ 1);
            barrier_expect(base + kFullK + stage * 8, kTileBytesN + masked * kBoundsBytes);
            if (masked) {
                bulk_load(base + kOffsetBounds + stage * kBoundsBytes, p.bounds + key0 * 2, kBoundsBytes,
                          base + kFullK + stage * 8);
            }
            load_tile(base + kOffsetK + stage * kTileBytesN, maps.k, base + kFullK + stage * 8, key0, head_kv,
                      work.batch, kTileN);
            barrier_wait(base + kEmptyV + stage * 8, phase ^ 1);
            barrier_expect(base + kFullV + stage * 8, kTileBytesN);
            load_tile(base + kOffsetV + stage * kTileBytesN, maps.v, base + kFullV + stage * 8, key0, head_kv,
                      work.batch, kTileN);
            if (++stage == kStages) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
    barrier_wait(base + kEmptyQ + q_buffer * 8, q_phase ^ 1);
    for (int i = 0; i < kPieceBytes; i += 16) {  // no visits: the end
        shared_store(base + kPiece + q_buffer * kPieceBytes + i, make_int4(0, 0, 0, 0));
    }
    barrier_arrive(base + kFullQ + q_buffer * 8);
    if (atomicAdd(p.pieces + 1, 1) == gridDim.x - 1) {  // the last block: nobody asks any more, until the next launch
        p.pieces[0] = 0;
        p.pieces[1] = 0;
    }
}

// ---- Softmax -------------------------------------------------------------------------------------------------------

// Warpgroup: hide what the mask hides; `row` is the thread's first query, `bounds` those of the tile's keys.
__device__ __forceinline__ void apply_mask(float (&s)[kTileN / 2], int row, unsigned bounds) {
    const float hidden = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 4) {
        int start[2], end[2];
        asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(start[0]), "=r"(end[0]), "=r"(start[1]), "=r"(end[1])
                     : "r"(bounds + (i * 2 + threadIdx.x % 4 * 2) * 8));
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            s[i + c] = row >= start[c] && row < end[c] ? s[i + c] : hidden;
            s[i + 2 + c] = row + 8 >= start[c] && row + 8 < end[c] ? s[i + 2 + c] : hidden;
        }
    }
}

// Statistics of the two query rows of a thread.
struct Rows {
    float top[2];   // what P is relative to: a maximum of S so far, not always the latest
    float sum[2];   // of P so far, this thread's columns only
    bool ordinary;  // whether all rows of the warp have a maximum, and none a large one
};

// P is 2^(c S - base), base being c times the row maximum: one operation. What rounding a base above kLarge loses would
// be a factor of P that matters. Then the maximum is subtracted from S, which is exact where P is not 0.
constexpr float kLarge = 4096.0f;

// Warp: if the maximum of a row has grown, move all rows to their new maxima; then the result is true and O must be
// multiplied by `factor`.
__device__ __forceinline__ bool follow(const float (&s)[kTileN / 2], Rows& rows, float scale_log2, float2& factor) {
    const float empty = __int_as_float(0xff800000);
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = s[half * 2];
#pragma unroll
        for (int i = half * 2; i < kTileN / 2; i += 4) {
            top[half] = fmaxf(top[half], fmaxf(s[i], s[i + 1]));
        }
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
    }
    if (!__any_sync(~0u, top[0] > rows.top[0] || top[1] > rows.top[1])) {
        return false;
    }
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(rows.top[half], top[half]);
        rescale[half] = next == empty ? 1.0f : exp2_approx((rows.top[half] - next) * scale_log2);
        rows.top[half] = next;
        rows.sum[half] *= rescale[half];
    }
    factor = make_float2(rescale[0], rescale[1]);
    const float larger = fmaxf(fabsf(rows.top[0]), fabsf(rows.top[1]));  // infinite if one has no maximum
    rows.ordinary = __all_sync(~0u, larger * scale_log2 <= kLarge);
    return true;
}

// Warp: P = 2^(scale log2(e) (S - top)) in the registers and precision that wgmma takes as its A operand. The result
// is as that of `follow`. Unless `careful`, P is computed from the maxima there are, in the hope that it stays small:
// that spares the search for new ones, except where the sums show that it was needed. From S with a large maximum that
// is subtracted first, which is exact wherever P is not 0.
__device__ __forceinline__ bool softmax(float (&s)[kTileN / 2], unsigned (&p)[kTileN / 16][4], Rows& rows,
                                        bool careful, float scale_log2, float2& factor) {
    const float empty = __int_as_float(0xff800000);
    bool moved = false;
    float sum[2];
    for (bool again = true; again;) {
        float base[2] = {rows.top[0] * scale_log2, rows.top[1] * scale_log2};
        if (careful) {
            moved = follow(s, rows, scale_log2, factor);
            const float top[2] = {rows.top[0] == empty ? 0.0f : rows.top[0], rows.top[1] == empty ? 0.0f : rows.top[1]};
            base[0] = top[0] * scale_log2;
            base[1] = top[1] * scale_log2;
            if (!rows.ordinary && __any_sync(~0u, fmaxf(fabsf(base[0]), fabsf(base[1])) > kLarge)) {
#pragma unroll
                for (int i = 0; i < kTileN / 2; ++i) {
                    s[i] -= top[i / 2 % 2];
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
        again = !careful && __any_sync(~0u, !(sum[0] <= kLimit && sum[1] <= kLimit));
        careful = true;
    }
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
    return moved;
}

// ---- Results -------------------------------------------------------------------------------------------------------

// Thread: O times the factors of its two rows.
__device__ __forceinline__ void rescale_out(float (&o)[kHeadDim / 2], float2 factor) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) {
        o[i] *= i / 2 % 2 ? factor.y : factor.x;
    }
}

// Warpgroup: write its 64 rows of O and their lse, O through its rows of the buffer `q`.
__device__ __forceinline__ void store(const Params& p, const TensorMaps& maps, const Work& work, const Rows& rows,
                                      float (&o)[kHeadDim / 2], unsigned q, int group) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    const int query0 = work.tile * kTileM + group * 64;
    float* lse = p.lse + (static_cast<long long>(work.batch) * p.heads_q + work.head) * p.seq_q;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = rows.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int row = query0 + warp * 16 + lane / 4 + half * 8;
        if (lane % 4 == 0 && row < p.seq_q) {
            const float ln2 = 0.6931471805599453f;
            const float empty = __int_as_float(0xff800000);
            lse[row] = sum == 0.0f ? empty : rows.top[half] * p.scale + log2_approx(sum) * ln2;
        }
    }
    rescale_out(o, make_float2(inverse[0], inverse[1]));
    const int row = group * 64 + warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i + 7 < kHeadDim / 2; i += 8) {
        stmatrix(q + chunk_at(row, i / 4 + lane / 16, kTileM), pack(o[i], o[i + 1]), pack(o[i + 2], o[i + 3]),
                 pack(o[i + 4], o[i + 5]), pack(o[i + 6], o[i + 7]));
    }
    named_sync(kStoreOfFirst + group, 128);
    if (threadIdx.x % 128 == 0) {
        proxy_fence();  // before the copy, and, where no row is the tensor's, before the next Q comes here
        if (query0 < p.seq_q) {
            store_rows(maps.out, q, group * 64, query0, work.head, work.batch, kTileM);
        }
    }
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Warpgroup: start S = Q K^T with the 64 rows from row `row` of the tile of Q on.
__device__ __forceinline__ void start_scores(float (&s)[kTileN / 2], unsigned q, int row, unsigned k) {
    const unsigned long long a = panels_at(q, kTileM, row);
    const unsigned long long b = panels_at(k, kTileN, 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        wgmma_scores(s, a + step_at(step, kTileM), b + step_at(step, kTileN), step > 0);
    }
}

// Warpgroup: start O += P V; O is overwritten if `add` is 0.
__device__ __forceinline__ void start_out(float (&o)[kHeadDim / 2], const unsigned (&p)[kTileN / 16][4], unsigned v,
                                          int add) {
    const unsigned long long b = panels_at(v, kTileN, 0);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
        wgmma_out(o, p[step], b + (step * 16 * kSpan >> 4), step > 0 ? 1 : add);
    }
}

// ---- Consumers -----------------------------------------------------------------------------------------------------

// Warpgroup: work through the pieces of work of this block, for 64 rows of each.
__device__ __forceinline__ void consume(const Params& p, const TensorMaps& maps, unsigned base, int group) {
    const bool leader = threadIdx.x % 128 == 0;
    const int row_in_tile = group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    unsigned stage = 0;  // of K; V follows one step behind
    unsigned phase = 0;
    unsigned q_buffer = 0;
    unsigned q_phase = 0;
    float s[kTileN / 2];
    float o[kHeadDim / 2];
    unsigned p_frags[kTileN / 16][4];
    unsigned q_at;
    if (group == kConsumers - 1) {  // gives the first one its first turn
        named_arrive(kTurnOfFirst, 256);
    }
    Work work;
    int2 reach;
    int count = next_work(base, q_buffer, q_phase, group, work, reach);
    // Pieces of work that show these rows nothing, and the visits before the first that does.
    while (count > 0 && reach.x == reach.y) {
        barrier_wait(base + kFullQ + q_buffer * 8, q_phase);
        pass(base, stage, phase, group, count, count - 1);
        store_empty(p, work, work.tile * kTileM + group * 64, 64, threadIdx.x % 128, 128);
        barrier_arrive_if(leader, base + kEmptyQ + q_buffer * 8);
        if (++q_buffer == kBuffersQ) {
            q_buffer = 0;
            q_phase ^= 1;
        }
        count = next_work(base, q_buffer, q_phase, group, work, reach);
    }
    if (count == 0) {
        return;
    }
    pass(base, stage, phase, group, reach.x, reach.x);
    int row = work.tile * kTileM + row_in_tile;
    int entry = visit(p, work.tile, reach.x);
    Rows rows;
    float2 factor;
    q_at = base + kOffsetQ + q_buffer * kTileBytesM;
    barrier_wait(base + kFullK + stage * 8, phase);
    wgmma_fence();
    start_scores(s, q_at, group * 64, base + kOffsetK + stage * kTileBytesN);
    wgmma_commit();
    wgmma_wait_all();
    accumulator_fence(s);
    // Apply the mask where there is any, and hand the buffer of K back.
    if (entry >> group & 1) {
        apply_mask(s, row, base + kOffsetBounds + stage * kBoundsBytes);
        __syncwarp();
    }
    if (threadIdx.x % 32 == 0) {  // every warp for itself: each has read the bounds on its own
        barrier_arrive(base + kEmptyK + stage * 8);
    }
    rows = { {__int_as_float(0xff800000), __int_as_float(0xff800000)}, {0.0f, 0.0f}, false};
    softmax(s, p_frags, rows, true, p.scale_log2, factor);
    while (true) {
        // Each step starts S of one key tile and P V of the tile before it.
        for (int i = reach.x + 1; i < reach.y; ++i) {
            base ^= p.batch >> 31;  // stays as it is; ptxas, not knowing, keeps it in place of asking for it (S2UR)
            entry = visit(p, work.tile, i);
            const unsigned v_stage = stage;
            const unsigned v_phase = phase;
            if (++stage == kStages) {
                stage = 0;
                phase ^= 1;
            }
            barrier_wait(base + kFullK + stage * 8, phase);
            named_sync(kTurnOfFirst + group, 256);
            wgmma_fence();
            start_scores(s, q_at, group * 64, base + kOffsetK + stage * kTileBytesN);
            wgmma_commit();
            barrier_wait(base + kFullV + v_stage * 8, v_phase);
            start_out(o, p_frags, base + kOffsetV + v_stage * kTileBytesN, i > reach.x + 1);
            wgmma_commit();
            named_arrive(kTurnOfFirst + (group + 1) % kConsumers, 256);
            wgmma_wait_all_but_one();  // S is complete, P V may still run
            accumulator_fence(s);
            // Apply the mask where there is any, and hand the buffer of K back.
            if (entry >> group & 1) {
                apply_mask(s, row, base + kOffsetBounds + stage * kBoundsBytes);
                __syncwarp();
            }
            if (threadIdx.x % 32 == 0) {  // every warp for itself: each has read the bounds on its own
                barrier_arrive(base + kEmptyK + stage * 8);
            }
            wgmma_wait_all();
            accumulator_fence(o);
            if (leader) {
                barrier_arrive(base + kEmptyV + v_stage * 8);
            }
            const bool careful = (entry >> group & 1) || i < reach.x + kExact || !rows.ordinary;
            if (softmax(s, p_frags, rows, careful, p.scale_log2, factor)) {
                rescale_out(o, factor);
            }
        }
        const Work done = work;
        const unsigned done_q = q_buffer;
        const unsigned v_stage = stage;
        const int add = reach.y - reach.x > 1;
        const int after = count - reach.y;  // visits left, all hidden
        barrier_wait(base + kFullV + stage * 8, phase);
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
        if (++q_buffer == kBuffersQ) {
            q_buffer = 0;
            q_phase ^= 1;
        }
        // With nothing to pass by in between, the next tile begins with this one's last product. Both branches end with
        // no wgmma in flight: ptxas takes all of them one by one if some may be where branches meet.
        bool at_once = false;
        if (after == 0) {
            count = next_work(base, q_buffer, q_phase, group, work, reach);
            at_once = reach.x == 0 && reach.y > 0;
        }
        if (at_once) {
            wgmma_fence();
            start_out(o, p_frags, base + kOffsetV + v_stage * kTileBytesN, add);
            wgmma_commit();
            entry = visit(p, work.tile, 0);
            q_at = base + kOffsetQ + q_buffer * kTileBytesM;
            barrier_wait(base + kFullK + stage * 8, phase);
            wgmma_fence();
            start_scores(s, q_at, group * 64, base + kOffsetK + stage * kTileBytesN);
            wgmma_commit();
            wgmma_wait_all_but_one();  // O is complete; it leaves while S of the next tile is computed
            accumulator_fence(o);
            if (leader) {
                barrier_arrive(base + kEmptyV + v_stage * 8);
            }
            store(p, maps, done, rows, o, base + kOffsetQ + done_q * kTileBytesM, group);
            wgmma_wait_all();
        } else {
            wgmma_fence();
            start_out(o, p_frags, base + kOffsetV + v_stage * kTileBytesN, add);
            wgmma_commit();
            wgmma_wait_all();
            accumulator_fence(o);
            if (leader) {
                barrier_arrive(base + kEmptyV + v_stage * 8);
            }
            store(p, maps, done, rows, o, base + kOffsetQ + done_q * kTileBytesM, group);
            if (after > 0) {
                pass(base, stage, phase, group, after, after);
                count = next_work(base, q_buffer, q_phase, group, work, reach);
            }
            if (leader) {
                tma_store_wait();
                barrier_arrive(base + kEmptyQ + done_q * 8);
            }
            // Pieces of work that show these rows nothing, and the visits before the first that does.
            while (count > 0 && reach.x == reach.y) {
                barrier_wait(base + kFullQ + q_buffer * 8, q_phase);
                pass(base, stage, phase, group, count, count - 1);
                store_empty(p, work, work.tile * kTileM + group * 64, 64, threadIdx.x % 128, 128);
                barrier_arrive_if(leader, base + kEmptyQ + q_buffer * 8);
                if (++q_buffer == kBuffersQ) {
                    q_buffer = 0;
                    q_phase ^= 1;
                }
                count = next_work(base, q_buffer, q_phase, group, work, reach);
            }
            if (count == 0) {
                break;
            }
            pass(base, stage, phase, group, reach.x, reach.x);
            entry = visit(p, work.tile, reach.x);
            q_at = base + kOffsetQ + q_buffer * kTileBytesM;
            barrier_wait(base + kFullK + stage * 8, phase);
            wgmma_fence();
            start_scores(s, q_at, group * 64, base + kOffsetK + stage * kTileBytesN);
            wgmma_commit();
            wgmma_wait_all();
        }
        row = work.tile * kTileM + row_in_tile;
        wgmma_wait_all();
        accumulator_fence(s);
        // Apply the mask where there is any, and hand the buffer of K back.
        if (entry >> group & 1) {
            apply_mask(s, row, base + kOffsetBounds + stage * kBoundsBytes);
            __syncwarp();
        }
        if (threadIdx.x % 32 == 0) {  // every warp for itself: each has read the bounds on its own
            barrier_arrive(base + kEmptyK + stage * 8);
        }
        rows = { {__int_as_float(0xff800000), __int_as_float(0xff800000)}, {0.0f, 0.0f}, false};
        softmax(s, p_frags, rows, true, p.scale_log2, factor);
        tma_store_wait();
        barrier_arrive_if(at_once && leader, base + kEmptyQ + done_q * 8);
    }
    if (leader) {
        tma_store_wait();
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------------------

// Grid: tiles_m x batch x heads_q pieces of work, walked by one block per multiprocessor.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
attnforge_fwd_sm90a_bf16_d128_spans_a16_m192_n80_s3_p1_r1_k1_q0_c1(
    const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = shared_address(shared);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so ptxas knows that the warp agrees
    if (threadIdx.x == 0) {
        for (int i = 0; i < kBuffersQ; ++i) {
            barrier_init(base + kFullQ + i * 8, 1);
            barrier_init(base + kEmptyQ + i * 8, kConsumers);  // leaders of warpgroups
        }
        for (int i = 0; i < kStages; ++i) {
            barrier_init(base + kFullK + i * 8, 1);
            barrier_init(base + kEmptyK + i * 8, kConsumers * 4);
            barrier_init(base + kFullV + i * 8, 1);
            barrier_init(base + kEmptyV + i * 8, kConsumers);
        }
        barrier_init_fence();
    }
    __syncthreads();
    // All warps of a warpgroup take part in setmaxnreg; then one thread and one warp of the first go on.
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == 0) {
            produce(p, maps, base);
        } else if (threadIdx.x / 32 == 1) {
            fill_empty(p);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        consume(p, maps, base, group - 1);
    }
}
