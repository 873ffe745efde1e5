// attnforge_fwd_sm90a_bf16_d512_full_a16_m128_n64_s2
// Generated from templates/sm90a/forward_wide.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch sm90a --dtype bf16 --head-dim 512 --mask full --align 16
//     --set tile_m=128 --set tile_n=64 --set stages=2
//
//   tile_m  128   query rows per tile, 64 for each consumer warpgroup: 64 or 128
//   tile_n   64   keys per step of the main loop
//   stages    2   shared-memory buffers for K and for V
//
// Attention forward for wide heads. O of 64 queries and 512 columns does not fit the registers of a warpgroup, so a
// cluster of two blocks shares a query tile: each block has half of the columns of Q, K, V and O. It computes half of
// the sums of Q K^T, sends them to the other block, the peer, and adds what the peer sends: then both have all of S.
// A producer thread loads tiles with TMA; 2 consumer warpgroups multiply them with wgmma.
//
// symbol      shape                 meaning
//   Q         kTileM x kBlockDim    query tile; each consumer warpgroup owns 64 of its rows
//   K, V      kTileN x kBlockDim    key and value tile of a visit
//   S         64 x kTileN           Q K^T of a warpgroup, fp32, in registers; the sum of two parts, one from each block
//   P         64 x kTileN           2^(scale log2(e) (S - row_max)), 16-bit, in registers: the A operand of P V
//   O         64 x kBlockDim        sum of P V over the visits, fp32, in registers; out = O / row_sum
//   row_max   64                    row maximum of S over the visits so far, not always the latest
//   row_sum   64                    row sum of P
//   lse       64                    ln(sum exp(scale S)) = scale row_max + ln(row_sum)
//   work tile                       one query tile of one head
//   visit     0 to visit_count - 1  one key tile of a work tile
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

constexpr int kHeadDim = 512;
constexpr int kBlockDim = kHeadDim / 2;  // columns of Q, K, V and O that a block has
// A tile is stored in panels of kColumns columns, [panel][row][column], 16-byte chunks swizzled within kSwizzleBytes.
constexpr int kColumns = 64;
constexpr int kSwizzleBytes = kColumns * 2;
constexpr unsigned kSwizzle = 1;  // wgmma's code for it
constexpr int kPanels = 4;
constexpr int kMain = kColumns * kPanels;  // columns of a stored row
constexpr int kRowBytes = kMain * 2;
constexpr int kSteps = kBlockDim / 16;  // k16 steps of wgmma along a block's columns
constexpr int kCluster = 2;  // blocks
constexpr int kTileM = 128;  // query rows of a work tile
constexpr int kTileN = 64;  // keys of a visit
constexpr int kConsumers = 2;  // warpgroups, 64 query rows each
constexpr int kThreads = (kConsumers + 1) * 128;
// Row maxima are exact in the first kExact visits, in masked ones, and while a row has none: there P is 1 at most.
// Elsewhere they are updated only when the average of P over a thread's columns passes 1.25 (docs/experiments.md, 24).
constexpr int kExact = 3;
constexpr float kLimit = kTileN / 4 * 1.25f;  // of the sum over a thread's columns
constexpr int kStages = 2;  // buffers of K
constexpr int kStagesV = 2;  // buffers of V
constexpr int kTileBytesM = kTileM * kRowBytes;
constexpr int kTileBytesN = kTileN * kRowBytes;
constexpr int kPartBytes = 64 * kTileN * 4;  // the peer's part of S of a warpgroup, fp32, in the order of fragments
constexpr int kOffsetQ = 0;  // O is stored through the buffer of Q
constexpr int kOffsetK = kOffsetQ + kTileBytesM;
constexpr int kOffsetV = kOffsetK + kStages * kTileBytesN;
constexpr int kOffsetPart = kOffsetV + kStagesV * kTileBytesN;
constexpr int kOffsetBounds = kOffsetPart + kConsumers * kPartBytes;
constexpr int kFullQ = kOffsetBounds;
// Barriers in shared memory, one of each kind a buffer. Full: the tile has landed, that is one thread has arrived and
// the bytes that it announced are there. Empty: the buffer may be filled again, as all warps that read it have arrived;
// kEmptyPart is about the buffer of the peer, whose warps arrive here.
constexpr int kFullK = kFullQ + 8;
constexpr int kEmptyK = kFullK + 8 * kStages;
constexpr int kFullV = kEmptyK + 8 * kStages;
constexpr int kEmptyV = kFullV + 8 * kStagesV;
constexpr int kFullPart = kEmptyV + 8 * kStagesV;
constexpr int kEmptyPart = kFullPart + 8 * kConsumers;
constexpr int kSharedBytes = kEmptyPart + 8 * kConsumers;
static_assert(kSharedBytes == 229480, "codegen/families/sm90_forward_wide.py disagrees");

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

// Thread: arrive at the barrier at this place in block `block_rank` of the cluster. It hands over no writes:
// .release.cluster would wait until all that the thread has written is in memory.
__device__ __forceinline__ void barrier_arrive_at(unsigned barrier, unsigned block_rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier), "r"(block_rank)
        : "memory");
}

// Warp: wait for all warps of the cluster. What they did to shared memory and barriers before is done.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Thread: the number of its block in the cluster.
__device__ __forceinline__ int block_rank() {
    int number;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(number));
    return number;
}

// Thread: four consecutive floats from shared memory.
__device__ __forceinline__ float4 load_quad(unsigned address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
    return x;
}

// Thread: the address at which the cluster knows this place in block `block_rank`.
__device__ __forceinline__ unsigned cluster_address(unsigned address, unsigned block_rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block_rank));
    return there;
}

// Thread: start writing four floats to a block of the cluster; their bytes count towards `barrier` there.
__device__ __forceinline__ void send_quad(unsigned address, unsigned barrier, float x, float y, float z, float w) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(address),
        "r"(barrier), "f"(x), "f"(y), "f"(z), "f"(w)
        : "memory");
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

// Thread: start copying `rows` rows of a head, from `row` on, to a tile, panels from `first` on.
__device__ __forceinline__ void load_tile(unsigned tile, const TensorMap& map, unsigned barrier, int row, int head,
                                          int batch, int rows, int first) {
    tma_load(tile, map, barrier, 0, row, first, head, batch);
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
// end are dropped. The tile holds `count` panels of O, from panel `first` on.
__device__ __forceinline__ void store_panels(const TensorMap& map, unsigned tile, int from, int row, int head,
                                             int batch, int rows, int first, int count) {
#pragma unroll
    for (int panel = 0; panel < count; ++panel) {
        tma_store(map, tile + (panel * rows + from) * kSwizzleBytes, (first + panel) * kColumns, row, 0, head,
                  batch);
    }
    tma_store_commit();
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Warpgroup: S (64 x 64) = or += Q K^T over 16 columns of head_dim, both from shared memory.
__device__ __forceinline__ void wgmma_scores(float (&d)[kTileN / 2], unsigned long long a, unsigned long long b,
                                             int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add));
    // clang-format on
}

// Warpgroup: O (64 x 256) = or += P V over 16 keys, P from registers, V as it lies in memory.
__device__ __forceinline__ void wgmma_out(float (&d)[kBlockDim / 2], const unsigned (&a)[4], unsigned long long b,
                                          int add) {
    // clang-format off
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %133, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, add, 1, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
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
__device__ __forceinline__ void multiply_pv(float (&o)[kBlockDim / 2], const unsigned (&p)[kTileN / 16][4], unsigned v,
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

// One thread, which loads this block's columns of all tiles with TMA as soon as buffers are empty.
struct Producer {
    const Params& p;
    const TensorMaps& maps;
    const unsigned smem;  // start of shared memory
    const Work& work;
    const int panel;    // this block's first, of a row
    const int head_kv;
    PipelineState<kStages> k_pipe;
    PipelineState<kStagesV> v_pipe;

    __device__ __forceinline__ void load_q() const {
        barrier_expect(smem + kFullQ, kTileBytesM);
        load_tile(smem + kOffsetQ, maps.q, smem + kFullQ, work.tile * kTileM, work.head, work.batch,
                  kTileM, panel);
    }

    // K of a visit; `entry` is its key tile, and whether it is masked.
    __device__ __forceinline__ void load_k(int entry) {
        const int key0 = (entry >> 1) * kTileN;
        const unsigned full = smem + kFullK + k_pipe.stage * 8;
        barrier_wait(smem + kEmptyK + k_pipe.stage * 8, k_pipe.phase ^ 1);
        barrier_expect(full, kTileBytesN);
        load_tile(smem + kOffsetK + k_pipe.stage * kTileBytesN, maps.k, full, key0, head_kv, work.batch, kTileN,
                  panel);
        k_pipe.advance();
    }

    __device__ __forceinline__ void load_v(int entry) {
        const unsigned full = smem + kFullV + v_pipe.stage * 8;
        barrier_wait(smem + kEmptyV + v_pipe.stage * 8, v_pipe.phase ^ 1);
        barrier_expect(full, kTileBytesN);
        load_tile(smem + kOffsetV + v_pipe.stage * kTileBytesN, maps.v, full, (entry >> 1) * kTileN, head_kv,
                  work.batch, kTileN, panel);
        v_pipe.advance();
    }

    // K is loaded a visit ahead of V, as its buffers are empty earlier.
    __device__ __forceinline__ void run(int visit_count) {
        int entry = visit(p, work.tile, 0);
        load_q();
        load_k(entry);
#pragma unroll 1  // registers are few
        for (int i = 1; i < visit_count; ++i) {
            const int last = entry;
            entry = visit(p, work.tile, i);
            load_k(entry);
            load_v(last);
        }
        load_v(entry);
    }
};

// ---- Consumer ------------------------------------------------------------------------------------------------------

// Thread: O times the factors of its two rows.
__device__ __forceinline__ void rescale_out(float (&o)[kBlockDim / 2], float2 factor) {
#pragma unroll
    for (int i = 0; i < kBlockDim / 2; ++i) {
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

// One consumer warpgroup, which owns 64 query rows. Its visit i is
//
//     S = Q K_i^T               issue_qk                        wgmma, to s: this block's part
//                               complete_scores                 + the peer's part, which mask_scores may hide
//     P = 2^(scale log2(e) (S - row_max))   softmax_step        s to p_frags
//     O = O + P V_i             issue_pv                        wgmma, to o
//
// wgmma is asynchronous: S of visit i is in flight together with P V of visit i - 1, which goes on while parts are
// exchanged. For the rules of loops and branches around wgmma see sm90a/forward.cu.jinja, above Consumer.
struct Consumer {
    const Params& p;
    const unsigned smem;     // start of shared memory
    const int warpgroup;     // 0 to kConsumers - 1
    const Work& work;
    const unsigned part;     // this thread's place in the buffer of the peer's part
    const unsigned sent;     // likewise in the peer's block, where this block's part goes

    PipelineState<kStages> k_pipe;
    PipelineState<kStagesV> v_pipe;  // V is used one visit later
    unsigned part_phase = 0;
    int entry;               // of the visit: its key tile, and whether it is masked
    int row;                 // the thread's first query row; its other one is 8 further down

    float s[kTileN / 2];
    float o[kBlockDim / 2];
    unsigned p_frags[kTileN / 16][4];
    RowStats stats;

    __device__ __forceinline__ Consumer(const Params& p, unsigned smem, int warpgroup, const Work& work)
        : p(p), smem(smem), warpgroup(warpgroup), work(work),
          part(smem + kOffsetPart + warpgroup * kPartBytes + threadIdx.x % 128 * 16),
          sent(cluster_address(part, peer())),
          row(work.tile * kTileM + warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {}

    // The number of the other block. Read where it is used, as registers are few.
    static __device__ __forceinline__ unsigned peer() { return block_rank() ^ 1; }

    // Warp: release a buffer of K or V.
    __device__ __forceinline__ void release(unsigned barrier) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(barrier);
        }
    }

    // Start S = Q K^T over this block's columns.
    __device__ __forceinline__ void issue_qk() {
        barrier_wait(smem + kFullK + k_pipe.stage * 8, k_pipe.phase);
        wgmma_fence();
        multiply_qk(s, smem + kOffsetQ, warpgroup * 64, smem + kOffsetK + k_pipe.stage * kTileBytesN);
        wgmma_commit();
    }

    // Start O += P V of the visit before, or O = P V unless `accumulate`.
    __device__ __forceinline__ void issue_pv(bool accumulate) {
        barrier_wait(smem + kFullV + v_pipe.stage * 8, v_pipe.phase);
        wgmma_fence();
        multiply_pv(o, p_frags, smem + kOffsetV + v_pipe.stage * kTileBytesN, accumulate);
        wgmma_commit();
    }

    // O of the visit before is complete: release its V.
    __device__ __forceinline__ void release_v() {
        accumulator_fence(o);
        release(smem + kEmptyV + v_pipe.stage * 8);
        v_pipe.advance();
    }

    // S = this block's part + the peer's. Both blocks add the same two numbers, so they go on with the same bits.
    __device__ __forceinline__ void complete_scores() {
        accumulator_fence(s);
        barrier_wait(smem + kEmptyPart + warpgroup * 8, part_phase ^ 1);
        const unsigned sent_full = cluster_address(smem + kFullPart + warpgroup * 8, peer());
#pragma unroll
        for (int i = 0; i < kTileN / 2; i += 4) {
            send_quad(sent + i * 512, sent_full, s[i], s[i + 1], s[i + 2], s[i + 3]);
        }
        barrier_wait(smem + kFullPart + warpgroup * 8, part_phase);
        if (threadIdx.x % 128 == 0) {
            barrier_expect(smem + kFullPart + warpgroup * 8, kPartBytes);  // of the next visit
        }
#pragma unroll
        for (int i = 0; i < kTileN / 2; i += 4) {
            const float4 x = load_quad(part + i * 512);
            s[i] += x.x;
            s[i + 1] += x.y;
            s[i + 2] += x.z;
            s[i + 3] += x.w;
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive_at(smem + kEmptyPart + warpgroup * 8, peer());
        }
        part_phase ^= 1;
    }

    // Hide what the mask hides of S, which is complete.
    __device__ __forceinline__ void mask_scores() {
        if (entry & 1) {
            apply_mask(p, s, row, (entry >> 1) * kTileN);
        }
    }

    // From a part of S to all of it.
    __device__ __forceinline__ void finish_scores() {
        release(smem + kEmptyK + k_pipe.stage * 8);
        complete_scores();
        mask_scores();
        k_pipe.advance();
    }

    // O, row_max and row_sum of the work tile.
    __device__ __forceinline__ void attend(int visit_count) {
        stats.reset();
        float2 rescale;
        barrier_wait(smem + kFullQ, 0);
        entry = visit(p, work.tile, 0);
        issue_qk();
        wgmma_wait_all();
        finish_scores();
        softmax_step(s, p_frags, stats, true, p.scale_log2, rescale);
        for (int i = 1; i < visit_count; ++i) {
            entry = visit(p, work.tile, i);
            issue_qk();
            issue_pv(i > 1);
            wgmma_wait_all_but_one();  // this block's part of S is complete, P V may still run
            finish_scores();
            wgmma_wait_all();
            release_v();
            const bool exact = entry & 1 || i < kExact || !stats.ordinary;
            if (softmax_step(s, p_frags, stats, exact, p.scale_log2, rescale)) {
                rescale_out(o, rescale);
            }
        }
        issue_pv(visit_count > 1);
        wgmma_wait_all();
        accumulator_fence(o);
    }
};

// ---- Results -------------------------------------------------------------------------------------------------------

// Warpgroup: store this block's columns of out = O / row_sum, and the first block lse, of its 64 rows. O goes through
// its rows of the buffer `q`.
__device__ __forceinline__ void store_out(Consumer& consumer, const TensorMaps& maps, unsigned q, int panel) {
    const Params& p = consumer.p;
    const Work& work = consumer.work;
    const int lane = threadIdx.x % 32;
    float* lse = p.lse + (static_cast<long long>(work.batch) * p.heads_q + work.head) * p.seq_q;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_row(consumer.stats.row_sum[half]);
        inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int row = consumer.row + half * 8;
        if (panel == 0 && lane % 4 == 0 && row < p.seq_q) {
            lse[row] = lse_of(p, consumer.stats.row_max[half], sum);
        }
    }
    float(&o)[kBlockDim / 2] = consumer.o;
    rescale_out(o, make_float2(inverse[0], inverse[1]));
    const int in_tile = consumer.warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kBlockDim / 2; i += 8) {
        stmatrix(q + chunk_at(in_tile, i / 4 + lane / 16, kTileM), pack(o[i], o[i + 1]), pack(o[i + 2], o[i + 3]),
                 pack(o[i + 4], o[i + 5]), pack(o[i + 6], o[i + 7]));
    }
    named_sync(1 + consumer.warpgroup, 128);
    if (threadIdx.x % 128 == 0) {
        proxy_fence();  // before TMA reads the buffer
        const int query0 = work.tile * kTileM + consumer.warpgroup * 64;
        if (query0 < p.seq_q) {
            store_panels(maps.out, q, consumer.warpgroup * 64, query0, work.head, work.batch, kTileM, panel, kPanels);
            tma_store_wait();  // before shared memory is given back
        }
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------------------

// Grid: tiles_m x batch x heads_q clusters of two blocks.
extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
attnforge_fwd_sm90a_bf16_d512_full_a16_m128_n64_s2(
    const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned smem = shared_address(shared);
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);  // warp-uniform, also for ptxas
    const Work work = work_at(p, blockIdx.x / kCluster);
    const int visit_count = visits(p, work.tile);
    const int panel = block_rank() * kPanels;
    if (threadIdx.x == 0) {
        barrier_init(smem + kFullQ, 1);
        for (int i = 0; i < kStages; ++i) {
            barrier_init(smem + kFullK + i * 8, 1);
            barrier_init(smem + kEmptyK + i * 8, kConsumers * 4);
        }
        for (int i = 0; i < kStagesV; ++i) {
            barrier_init(smem + kFullV + i * 8, 1);
            barrier_init(smem + kEmptyV + i * 8, kConsumers * 4);
        }
        for (int i = 0; i < kConsumers; ++i) {
            barrier_init(smem + kFullPart + i * 8, 1);
            barrier_init(smem + kEmptyPart + i * 8, 4);
            barrier_expect(smem + kFullPart + i * 8, kPartBytes);
        }
        barrier_init_fence();
    }
    cluster_sync();  // the peer's barriers are ready, too
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            Producer{p, maps, smem, work, panel, work.head / (p.heads_q / p.heads_kv)}.run(visit_count);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        Consumer consumer(p, smem, group - 1, work);
        consumer.attend(visit_count);
        store_out(consumer, maps, smem + kOffsetQ, panel);
    }
    cluster_sync();  // until now the peer may have sent to this block or arrived at its barriers
}
