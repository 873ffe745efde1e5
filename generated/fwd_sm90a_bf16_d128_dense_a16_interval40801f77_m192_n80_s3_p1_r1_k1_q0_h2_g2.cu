// attnforge_fwd_sm90a_bf16_d128_dense_a16_interval40801f77_m192_n80_s3_p1_r1_k1_q0_h2_g2
// Generated from templates/sm90a/forward.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch sm90a --dtype bf16 --head-dim 128 --mask dense --align 16
//     --mask-mod 'interval(t0: int32[1], t1: int32[1]): (t0[kv_idx] <= q_idx) & (q_idx
//     < t1[kv_idx])' --set tile_m=192 --set tile_n=80 --set stages=3 --set ping_pong=1
//     --set persistent=1 --set dynamic=1 --set q_in_regs=0 --set hand_over=2
//     --set heads_together=2
//
//   tile_m          192   query rows per tile, 64 for each consumer warpgroup
//   tile_n           80   keys per step of the main loop
//   stages            3   shared-memory buffers for K and for V
//   ping_pong         1   1: warpgroup ordering barrier: the softmax of one overlaps the products of another
//   persistent        1   1: one block per multiprocessor walks many tiles
//   dynamic           1   1: dynamic tile scheduler: a block takes its next work tile from tile_counter
//   q_in_regs         0   1: keep the fragments of Q in registers
//   hand_over         2   with ping_pong, the next warpgroup may go on after 0: both products, 1: Q K^T, 2: S complete
//   heads_together    2   least number of kv heads in a section; 0: as many as fit the L2 cache
//
// Attention forward. A producer thread loads tiles with TMA; 3 consumer warpgroups multiply them with wgmma.
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
//   work tile                       one query tile of one head, or a piece of its visits
//   visit     0 to visit_count - 1  one key tile of a work tile
//   kv_range  [begin, end)          the visits in which a warpgroup's rows see a key
//
// Fragments: element i of a thread is row warp*16 + lane/4 + (i/2%2)*8, column i/4*8 + lane%4*2 + i%2.

typedef unsigned short element;  // bf16, only ever moved as bits

// A tensor (batch, heads, seq, head_dim): its address, and strides in elements. Rows are contiguous.
struct TensorRef {
    void* data;
    long long batch, head, row;
};

// A captured tensor of a score or a mask function: its address, strides in elements, and sizes.
struct ScoreRef {
    const void* data;
    long long stride[4];
    int size[4];
};

struct Params {
    TensorRef out;  // (batch, heads_q, seq_q, head_dim_v)
    ScoreRef score0;  // t0 of the formula
    ScoreRef score1;  // t1 of the formula
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
    float* out_accum;  // fp32 out and lse of splits of keys, (kv_splits, batch, heads_q, seq_q, columns), or of pieces
    unsigned* visit_bits;  // (bit_slots, 64-row groups, 128, words) bits of partial visits as threads hold their pairs
    int* visit_slots;  // (mask_planes, tiles, list_stride) slot of each visit's bits, -1: none
    int* slot_visits;  // (bit_slots, 2) of each slot: the owned tile of all planes, the visited one
    int* slots_taken;  // (1) number of visits that requested a slot, while lists are built
    int* tile_count;  // (mask_planes, tiles) visited tiles of each owned tile
    int* tile_order;  // (mask_planes, tiles) owned tiles in launch order, or with lists that are cut, pieces of them
    int* tile_slots;  // (mask_planes, tiles_m, 2) slots [x, y) of a cut query tile's pieces; 0 0: whole
    int* tile_list;  // (mask_planes, tiles, list_stride) visited tile << row groups | a bit for each with hidden pairs
    int* kv_range;  // (mask_planes, tiles_m, 4, 2) visits [x, y) that a 64-row group of queries needs
    int* tile_counter;  // work tiles handed out; of a forward also blocks that found none left, both 0 between launches
    int batch;
    int heads_q;
    int heads_kv;  // divides heads_q
    int seq_q;
    int seq_k;
    int tiles_m;  // ceil(seq_q / tile_m)
    int tiles_n;  // ceil(seq_k / tile_n)
    int blocks_m;  // work tiles of a head where long lists are cut: 1/16 to 1/4 more than tiles_m, most for few heads
    int piece_slots;  // 2 * (blocks_m - tiles_m): places of a head for results of pieces in out_accum
    int list_stride;  // entries per row of tile_list
    int mask_batches;  // batch if each entry has a plane of its own, else 1
    int mask_heads;  // heads if each q head (of spans also: kv head) has a plane of its own, else 1
    int bit_slots;  // visits whose bits there is memory for
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
constexpr int kRowGroups = kConsumers;  // row groups of a query tile, each with a kv_range of its own
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
// Empty Q: O has been stored through the buffer.
constexpr int kFullQ = kOffsetBarriers;
constexpr int kEmptyQ = kFullQ + 8 * kBuffersQ;
constexpr int kFullK = kEmptyQ + 8 * kBuffersQ;
constexpr int kEmptyK = kFullK + 8 * kStages;
constexpr int kFullV = kEmptyK + 8 * kStages;
constexpr int kEmptyV = kFullV + 8 * kStages;
// The work tile of each buffer of Q, which the producer broadcasts: tile, head, batch, visit_count (0: none is left).
// After it the kv_range of each row group, then first_visit and slot of the piece. 16 bytes each.
constexpr int kBroadcast = kEmptyV + 8 * kStages;
constexpr int kBroadcastBytes = 16 + 16 * kRowGroups + 16;
static_assert(kBroadcast % 16 == 0, "read and written 16 bytes at a time");
constexpr int kSharedBytes = kBroadcast + kBroadcastBytes * kBuffersQ;
static_assert(kSharedBytes == 221472, "codegen/families/sm90.py disagrees");

// Named barriers, one of each kind for each consumer warpgroup; 0 is __syncthreads.
//   kOrderBarrier      orders warpgroups: one syncs before it issues products, the one before it arrives after its own
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

// Thread: hide x's value from ptxas, so that it keeps x in a register instead of computing it again. No instruction.
template <class Word>
__device__ __forceinline__ void pin(Word& x) {
    asm volatile("" : "+r"(x));
}

// ---- Mask: dense ---------------------------------------------------------------------------------------------------

// Offset of index `i` of an axis, of elements of `bytes`: an index below 0 counts from the end; one outside, as of a
// hidden pair, is moved inside.
__device__ __forceinline__ long long score_at(const ScoreRef& t, int axis, int i, long long bytes = 1) {
    i += i < 0 ? t.size[axis] : 0;
    return (i < 0 ? 0 : i < t.size[axis] ? i : t.size[axis] - 1) * (t.stride[axis] * bytes);
}
// Strides are below 2^32 bytes (runtime/native/arguments.h): one multiplication.
__device__ __forceinline__ long long score_at(const ScoreRef& t, int axis, unsigned i, long long bytes) {
    const unsigned last = t.size[axis] - 1;
    return static_cast<unsigned long long>(i < last ? i : last) * static_cast<unsigned>(t.stride[axis] * bytes);
}
template <class I>
__device__ __forceinline__ int load_int32_1d(const ScoreRef& t, I i) {
    const char* at = static_cast<const char*>(t.data);
    at += score_at(t, 0, i, sizeof(int));
    const int* x = reinterpret_cast<const int*>(at);
    return __ldg(x);
}

// Does query q_idx of batch entry b and query head h see key kv_idx?
//     interval(t0: int32[1], t1: int32[1]): (t0[kv_idx] <= q_idx) & (q_idx < t1[kv_idx])
// What this needs of a query, and of a key: for many pairs it is read once.
struct MaskQuery {
    int idx;
};
__device__ __forceinline__ MaskQuery mask_query(const Params&, int, int, int q_idx) {
    return {q_idx};
}

struct MaskKey {
    int x0;
    int x1;
};
__device__ __forceinline__ MaskKey mask_key(const Params& p, int, int, int kv_idx) {
    return {
        load_int32_1d(p.score0, static_cast<unsigned>(kv_idx)),
        load_int32_1d(p.score1, static_cast<unsigned>(kv_idx)),
    };
}

// Does the query see the key?
__device__ __forceinline__ bool mask_pair(const Params&, const MaskQuery& q, const MaskKey& k) {
    return (k.x0 <= q.idx) & (q.idx < k.x1);
}

// The plane of the mask of q head `head`.
__device__ __forceinline__ int mask_plane(const Params& p, int batch, int head) {
    return (p.mask_batches > 1 ? batch * p.mask_heads : 0) + (p.mask_heads > 1 ? head : 0);
}

// What the mask's function needs of query `query` and of key `key` in plane `plane`.
__device__ __forceinline__ MaskQuery query_values(const Params& p, int plane, int query) {
    return mask_query(p, plane / p.mask_heads, plane % p.mask_heads, query);
}
__device__ __forceinline__ MaskKey key_values(const Params& p, int plane, int key) {
    return mask_key(p, plane / p.mask_heads, plane % p.mask_heads, key);
}

// Is key `key` visible to query `query`, by the function of the mask?
__device__ __forceinline__ bool visible(const Params& p, int plane, int query, int key) {
    return mask_pair(p, query_values(p, plane, query), key_values(p, plane, key)) && key < p.seq_k;
}

// Where the tables of the schedule hold owned tile `tile`.
__device__ __forceinline__ long long entry_of(const Params& p, int plane, int tile) {
    return static_cast<long long>(plane) * p.tiles_m + tile;
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

// Words of a thread, of which bit i % 32 of word i / 32 is whether element i of its fragment is visible. The rows of a
// warpgroup's fragment are its 64 queries, columns are keys. A thread loads its words at once: 1, 2 or 4.
constexpr int kSeenWords = 2;
static_assert(kSeenWords * 64 >= kTileN, "codegen/families/hopper.py disagrees");

// Warpgroup: the thread's bits, of its rows `row` and row + 8 and the key tile that starts at `column0`.
__device__ __forceinline__ void find_seen(const Params& p, int plane, int row, int column0,
                                          unsigned (&seen)[kSeenWords]) {
    const MaskQuery rows[2] = {query_values(p, plane, row), query_values(p, plane, row + 8)};
    // Some columns at a time, or ptxas holds all it reads; the last ones first, as words shift up.
    constexpr int together = kTileN / 4 % 8 == 0 ? 8 : 4;
    constexpr int bits = 2 * together;
#pragma unroll
    for (int word = 0; word < kSeenWords; ++word) {
        seen[word] = 0;
    }
#pragma unroll 1
    for (int at = kTileN / 4 - together; at >= 0; at -= together) {
        unsigned some = 0;
#pragma unroll
        for (int i = 0; i < together; ++i) {
            const int key = column0 + (at + i) / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
            const MaskKey of_key = key_values(p, plane, key);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool sees = mask_pair(p, rows[half], of_key) & (key < p.seq_k);
                some |= sees ? 1u << (i / 2 * 4 + half * 2 + i % 2) : 0;
            }
        }
#pragma unroll
        for (int word = kSeenWords - 1; word > 0; --word) {
            seen[word] = seen[word] << bits | seen[word - 1] >> (32 - bits);
        }
        seen[0] = seen[0] << bits | some;
    }
}

// The slot of the bits of visit number `index`, -1 if it has none.
__device__ __forceinline__ int visit_slot(const Params& p, int plane, int tile, int index) {
    return __ldg(p.visit_slots + entry_of(p, plane, tile) * p.list_stride + index);
}

// Where the thread's bits of warpgroup `group` lie in slot `slot`.
__device__ __forceinline__ unsigned* seen_of(const Params& p, int slot, int group) {
    const unsigned first = (static_cast<unsigned>(slot) * (kTileM / 64) + group) * 128 + threadIdx.x % 128;
    return p.visit_bits + first * kSeenWords;
}

// Warpgroup: load the thread's bits.
__device__ __forceinline__ void load_seen(const Params& p, int slot, int group, unsigned (&seen)[kSeenWords]) {
    const unsigned* const from = seen_of(p, slot, group);
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(from));
    seen[0] = words.x;
    seen[1] = words.y;
}

// A piece of the list of query tile `tile`: `count` visits from number `begin` on. Its results go to slot `slot` of the
// head, or to out if it is the whole list (-1).
struct Piece {
    int tile, begin, count, slot;
};

// The piece of the work tile with this rank; those with most visits have the lowest rank. Where none is left, `tile` is
// -1 and `count` is 0. Its words are stored as they are used: after a division here, ptxas would not treat them as
// uniform.
__device__ __forceinline__ Piece piece_of(const Params& p, int plane, int rank) {
    const int* words = p.tile_order + (static_cast<long long>(plane) * p.blocks_m + rank) * 4;
    return {__ldg(words), __ldg(words + 1), __ldg(words + 2), __ldg(words + 3)};
}

// ---- Order of the work ---------------------------------------------------------------------------------------------

// Bytes of the L2 cache that K and V of a section of heads may take.
// The L2 cache of an H200 has 50 MB. How the value was chosen: docs/experiments.md, 11 and 89.
constexpr long long kCacheBytes = 16 << 20;

// Least number of kv heads in a section; it has more of them only if their operands fit.
constexpr long long kHeadsTogether = 2;

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
    const int fits = static_cast<int>(min(max(kCacheBytes / bytes, kHeadsTogether), planes));
    const int section = fits * together;
    const int first = index / (section * p.blocks_m) * section;
    const int width = min(section, heads * p.batch - first);  // the last section may be narrower
    const int rest = index - first * p.blocks_m;
    const int plane = first + rest % width;
    return {rest / width, plane % heads, plane / heads};
}

// ---- Tile schedule from the mask's function: built once per mask on the device, shared by all layers and heads -----

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

// All integers from lo to hi, as int32 holds them; none as long as lo > hi. false is 0, true is 1.
struct Interval {
    long long lo = 2147483647;
    long long hi = -2147483648LL;
};
__device__ __forceinline__ void include(Interval& all, int x) {
    all.lo = x < all.lo ? x : all.lo;
    all.hi = x > all.hi ? x : all.hi;
}
// Warp: the interval of what all its threads have.
__device__ __forceinline__ void join_warp(Interval& all) {
    all.lo = __reduce_min_sync(~0u, static_cast<int>(all.lo));
    all.hi = __reduce_max_sync(~0u, static_cast<int>(all.hi));
}
__device__ __forceinline__ Interval operator<(Interval x, Interval y) {
    return {x.hi < y.lo, x.lo < y.hi};
}
__device__ __forceinline__ Interval operator<=(Interval x, Interval y) {
    return {x.hi <= y.lo, x.lo <= y.hi};
}
__device__ __forceinline__ Interval operator&(Interval x, Interval y) {
    return {x.lo & y.lo, x.hi & y.hi};
}

// Of several queries and of several keys, the ranges of what the mask's function needs.
struct MaskQueries {
    Interval idx;
};
__device__ __forceinline__ void include(MaskQueries& all, const MaskQuery& x) {
    include(all.idx, x.idx);
}
__device__ __forceinline__ void join_warp(MaskQueries& all) {
    join_warp(all.idx);
}

struct MaskKeys {
    Interval x0;
    Interval x1;
};
__device__ __forceinline__ void include(MaskKeys& all, const MaskKey& x) {
    include(all.x0, x.x0);
    include(all.x1, x.x1);
}
__device__ __forceinline__ void join_warp(MaskKeys& all) {
    join_warp(all.x0);
    join_warp(all.x1);
}

// lo: do all of these queries see all of these keys, as far as ranges show? hi: may any of them see one?
__device__ __forceinline__ Interval mask_tile(const MaskQueries& q, const MaskKeys& k) {
    return (k.x0 <= q.idx) & (q.idx < k.x1);
}

// Warp: evaluates all pairs of a tile. A bit for each row group that sees some pair, then for each that misses some.
__device__ __forceinline__ unsigned kind_by_pairs(const Params& p, int plane, int query_tile, int key_tile) {
    constexpr unsigned all = (1u << kRowGroups * 2) - 1;
    unsigned found = 0;
    for (int j = threadIdx.x % 32; j / 32 * 32 < kTileN && found != all; j += 32) {
        const int key = key_tile * kTileN + j;
        const MaskKey of_key = key_values(p, plane, key);
        const int queries = j < kTileN ? min(kTileM, p.seq_q - query_tile * kTileM) : 0;
#pragma unroll 4
        for (int i = 0; i < queries; ++i) {
            const bool seen = mask_pair(p, query_values(p, plane, query_tile * kTileM + i), of_key) && key < p.seq_k;
            found |= (seen ? 1u : 1u << kRowGroups) << i / (kTileM / kRowGroups);
        }
        found = __reduce_or_sync(~0u, found);
    }
    return found;
}

// One block per query tile and plane; each warp takes every fourth key tile. Writes to the tile's place of the list a
// bit for each row group that sees some pair, then for each that misses some; or 0. For most tiles the intervals of
// what the function reads say that all pairs are visible or none is. The others are looked at pair by pair.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90a_bf16_d128_dense_a16_interval40801f77_m192_n80_s3_p1_r1_k1_q0_h2_g2_classify(const __grid_constant__ Params p) {
    constexpr int unit = kTileM / kRowGroups;
    const int query_tile = blockIdx.x % p.tiles_m;
    const int plane = blockIdx.x / p.tiles_m;
    const int lane = threadIdx.x % 32;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *p.slots_taken = 0;  // before _schedule
    }
    MaskQueries queries[kRowGroups];
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
        for (int i = lane; i < unit; i += 32) {
            const int query = query_tile * kTileM + group * unit + i;
            if (query < p.seq_q) {
                include(queries[group], query_values(p, plane, query));
            }
        }
        join_warp(queries[group]);
    }
    for (int key_tile = threadIdx.x / 32; key_tile < p.tiles_n; key_tile += kScheduleThreads / 32) {
        const int first = key_tile * kTileN;
        MaskKeys keys;
        for (int key = first + lane; key < min(first + kTileN, p.seq_k); key += 32) {
            include(keys, key_values(p, plane, key));
        }
        join_warp(keys);
        unsigned kind = 0;
        bool known = true;
#pragma unroll
        for (int group = 0; group < kRowGroups; ++group) {
            if (query_tile * kTileM + group * unit < p.seq_q) {
                const Interval seen = mask_tile(queries[group], keys);
                const bool misses = seen.lo == 0 || first + kTileN > p.seq_k;
                kind |= static_cast<unsigned>(seen.hi) << group | static_cast<unsigned>(misses) << kRowGroups + group;
                known &= seen.lo == seen.hi;
            }
        }
        if (!known) {
            kind = kind_by_pairs(p, plane, query_tile, key_tile);
        }
        if (lane == 0) {
            const long long row = entry_of(p, plane, query_tile);
            p.tile_list[row * p.list_stride + key_tile] = kind & kSomeRowGroups ? kind : 0;
        }
    }
}

// Thread: a slot for the bits of a partial visit of owned tile `row` (of all planes), or -1 if none is left. Which
// visits get one makes no difference to results. The counter is read first, so that it never overflows.
__device__ __forceinline__ int take_slot(const Params& p, int row, int visited) {
    if (*const_cast<volatile int*>(p.slots_taken) >= p.bit_slots) {
        return -1;
    }
    const int slot = atomicAdd(p.slots_taken, 1);
    if (slot >= p.bit_slots) {
        return -1;
    }
    reinterpret_cast<int2*>(p.slot_visits)[slot] = make_int2(row, visited);
    return slot;
}

// One block per owned tile and plane: list the tiles it must visit, in ascending order. Also clears tile_counter.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90a_bf16_d128_dense_a16_interval40801f77_m192_n80_s3_p1_r1_k1_q0_h2_g2_schedule(const __grid_constant__ Params p) {
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
        // What _classify wrote. Entries are overwritten only after every thread has read its own.
        const unsigned kind = visited < p.tiles_n ? list[visited] : 0;
        const int slot = count_before(kind != 0, votes, total);
        if (kind != 0) {
            list[slot] = visited << kRowGroups | kind >> kRowGroups;
            const bool partial = kind >> kRowGroups != 0;
            const long long place = static_cast<long long>(tile) * p.list_stride + slot;
            p.visit_slots[place] = partial ? take_slot(p, tile, visited) : -1;
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
    if (blockIdx.x == 0 && threadIdx.x < 2) {
        p.tile_counter[threadIdx.x] = 0;
    }
    __syncthreads();
    if (threadIdx.x < kRowGroups) {
        const int2 found = kv_range[threadIdx.x];
        reinterpret_cast<int2*>(p.kv_range)[tile * 4 + threadIdx.x] = found.y > 0 ? found : make_int2(0, 0);
    }
}

// One block per owned tile and plane; together they walk the slots that are taken, and store the bits of their visits.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90a_bf16_d128_dense_a16_interval40801f77_m192_n80_s3_p1_r1_k1_q0_h2_g2_bits(const __grid_constant__ Params p) {
    static_assert(kScheduleThreads == 128, "a warpgroup, whose threads find their own bits");
    const int taken = min(*p.slots_taken, p.bit_slots);
    for (int slot = blockIdx.x; slot < taken; slot += gridDim.x) {
        const int2 visit = reinterpret_cast<const int2*>(p.slot_visits)[slot];
        const int plane = visit.x / p.tiles_m;
        const int first = visit.x % p.tiles_m * kTileM + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        for (int group = 0; group < kTileM / 64; ++group) {
            unsigned seen[kSeenWords];
            find_seen(p, plane, first + group * 64, visit.y * kTileN, seen);
            unsigned* const to = seen_of(p, slot, group);
#pragma unroll
            for (int word = 0; word < kSeenWords; ++word) {
                to[word] = seen[word];
            }
        }
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

constexpr int kLeastVisits = 16;  // that are worth a block
constexpr int kMostPieces = 32;  // of a list: one kernel reads all their results

// Into how many pieces a list of `visits` is cut, so that none has more than `most`, or more than an even share of
// kMostPieces; one piece if it is empty.
__device__ __forceinline__ int pieces_of(int visits, int most) {
    const int longest = max(most, (visits + kMostPieces - 1) / kMostPieces);
    return max(1, (visits + longest - 1) / longest);
}

// One block per owned tile and plane. Cuts lists that are long beside the others, as that of a tile with a query
// that sees all keys: else a block would still walk it when all others have ended. Lists above `most` visits are
// cut; the blocks beyond tiles_m suffice for that. The pieces of the tile get their ranks: those with more visits
// come first, earlier tiles win ties.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90a_bf16_d128_dense_a16_interval40801f77_m192_n80_s3_p1_r1_k1_q0_h2_g2_order(const __grid_constant__ Params p) {
    const int tile = blockIdx.x % p.tiles_m;
    const long long plane = blockIdx.x / p.tiles_m;
    const int* counts = p.tile_count + plane * p.tiles_m;
    int* order = p.tile_order + plane * p.blocks_m * 4;
    long long visits = 0;
    for (int other = threadIdx.x; other < p.tiles_m; other += kScheduleThreads) {
        visits += counts[other];
    }
    // Lists of up to three times the mean stay whole. The blocks suffice: a cut list has fewer than
    // visits / most pieces beyond its first, and all of them together fewer than long_visits / most.
    const long long least = max(static_cast<long long>(kLeastVisits), 3 * sum_of_block(visits) / p.tiles_m);
    long long long_visits = 0;  // of lists that may be cut
    for (int other = threadIdx.x; other < p.tiles_m; other += kScheduleThreads) {
        long_visits += counts[other] > least ? counts[other] : 0;
    }
    const long long share = sum_of_block(long_visits) / (p.blocks_m - p.tiles_m + 1) + 1;
    const int most = static_cast<int>(max(least, share));
    const int pieces = pieces_of(counts[tile], most);
    const int length = (counts[tile] + pieces - 1) / pieces;
    long long all = 0;
    long long before = 0;
    long long taken = 0;  // slots, by the pieces of earlier tiles
    for (int other = threadIdx.x; other < p.tiles_m; other += kScheduleThreads) {
        const int theirs = pieces_of(counts[other], most);
        const int their_length = (counts[other] + theirs - 1) / theirs;
        all += theirs;
        before += their_length > length || (their_length == length && other < tile) ? theirs : 0;
        taken += other < tile && theirs > 1 ? theirs : 0;
    }
    const int rank = static_cast<int>(sum_of_block(before));
    const int slot = static_cast<int>(sum_of_block(taken));
    if (threadIdx.x == 0) {
        const bool cut = pieces > 1;
        reinterpret_cast<int2*>(p.tile_slots)[blockIdx.x] = make_int2(cut ? slot : 0, cut ? slot + pieces : 0);
    }
    for (int i = threadIdx.x; i < pieces; i += kScheduleThreads) {
        const int begin = min(counts[tile], i * length);
        int* words = order + (rank + i) * 4;
        words[0] = tile;
        words[1] = begin;
        words[2] = min(counts[tile], begin + length) - begin;
        words[3] = pieces > 1 ? slot + i : -1;
    }
    const int end = static_cast<int>(sum_of_block(all));
    for (int i = end + threadIdx.x; tile == 0 && i < p.blocks_m; i += kScheduleThreads) {
        order[i * 4] = -1;
        order[i * 4 + 1] = 0;
        order[i * 4 + 2] = 0;
        order[i * 4 + 3] = -1;
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

// A work tile: a query tile of a head, and a piece of its visits.
struct Work {
    int tile, head, batch;
    int plane;  // of the mask
    int first_visit, visits, slot;  // of the piece, as Piece has them
};

// Work number `index`.
__device__ __forceinline__ Work work_at(const Params& p, int index) {
    const Place place = place_of(p, index);
    const int plane = mask_plane(p, place.batch, place.head);
    const Piece piece = piece_of(p, plane, place.rank);
    return {piece.tile, place.head, place.batch, plane, piece.begin, piece.count, piece.slot};
}

// Work tiles, those that see nothing included.
__device__ __forceinline__ int count_work(const Params& p) {
    return p.blocks_m * p.heads_q * p.batch;
}

// The first query row of a work tile.
__device__ __forceinline__ int first_row(const Params& p, const Work& work) {
    return work.tile * kTileM;
}

// How many key tiles a work tile visits.
__device__ __forceinline__ int visits_of(const Params&, const Work& work) {
    return work.visits;
}

// Visit `index` of a work tile: its key tile, and whether it is masked (`visit` says how the two are packed).
__device__ __forceinline__ int visit_of(const Params& p, const Work& work, int index) {
    return visit(p, work.plane, work.tile, work.first_visit + index);
}

// The slot of the bits of visit `index` of a work tile, -1 if it has none.
__device__ __forceinline__ int slot_of(const Params& p, const Work& work, int index) {
    return visit_slot(p, work.plane, work.tile, work.first_visit + index);
}

// The visits that show the 64 rows of warpgroup `warpgroup` anything: [x, y).
// All those of a piece: every warpgroup has results for each slot.
__device__ __forceinline__ int2 kv_range_of(const Params& p, const Work& work, int warpgroup) {
    if (work.slot >= 0) {
        return make_int2(0, work.visits);
    }
    return kv_range_of(p, work.plane, work.tile, warpgroup);
}

// ---- Softmax -------------------------------------------------------------------------------------------------------

// Warpgroup: hide what the thread's bits hide.
__device__ __forceinline__ void apply_mask(float (&s)[kTileN / 2], const unsigned (&seen)[kSeenWords]) {
    const float hidden = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
        s[i] = seen[i / 32] >> i % 32 & 1 ? s[i] : hidden;
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

    __device__ __forceinline__ void load_k(int key0, int head_kv, int batch) const {
        barrier_wait(smem + kEmptyK + kv_pipe.stage * 8, kv_pipe.phase ^ 1);
        barrier_expect(smem + kFullK + kv_pipe.stage * 8, kTileBytesN);
        load_tile(smem + kOffsetK + kv_pipe.stage * kTileBytesN, maps.k, smem + kFullK + kv_pipe.stage * 8, key0,
                  head_kv, batch, kTileN);
    }

    __device__ __forceinline__ void load_v(int key0, int head_kv, int batch) {
        barrier_wait(smem + kEmptyV + kv_pipe.stage * 8, kv_pipe.phase ^ 1);
        barrier_expect(smem + kFullV + kv_pipe.stage * 8, kTileBytesN);
        load_tile(smem + kOffsetV + kv_pipe.stage * kTileBytesN, maps.v, smem + kFullV + kv_pipe.stage * 8, key0,
                  head_kv, batch, kTileN);
        kv_pipe.advance();
    }

    // Consumers read this once Q is full: the arrival that announces Q releases these writes.
    __device__ __forceinline__ void broadcast(const Work& work, int count) const {
        const unsigned words = smem + kBroadcast + q_pipe.stage * kBroadcastBytes;
        shared_store(words, make_int4(work.tile, work.head, work.batch, count));
        for (int group = 0; group < kRowGroups; ++group) {
            const int2 range = kv_range_of(p, work, group);
            shared_store(words + 16 + group * 16, make_int4(range.x, range.y, 0, 0));
        }
        shared_store(words + kBroadcastBytes - 16, make_int4(work.first_visit, work.slot, 0, 0));
    }

    // No visits: the work has ended.
    __device__ __forceinline__ void broadcast_end() const {
        for (int i = 0; i < kBroadcastBytes; i += 16) {
            shared_store(smem + kBroadcast + q_pipe.stage * kBroadcastBytes + i, make_int4(0, 0, 0, 0));
        }
        barrier_arrive(smem + kFullQ + q_pipe.stage * 8);
    }

    // The dynamic scheduler: blocks count work tiles up together. The last block to find none left resets the counter.
    __device__ __forceinline__ int next_index() const { return gridDim.x + atomicAdd(p.tile_counter, 1); }

    __device__ __forceinline__ void reset_scheduler() const {
        if (atomicAdd(p.tile_counter + 1, 1) == gridDim.x - 1) {
            p.tile_counter[0] = 0;
            p.tile_counter[1] = 0;
        }
    }

    __device__ __forceinline__ void run() {
        int index = blockIdx.x;
        while (index < count_work(p)) {
            const Work work = work_at(p, index);
            const int head_kv = work.head / (p.heads_q / p.heads_kv);
            const int count = visits_of(p, work);
            if (count == 0) {
                index = next_index();
                continue;
            }
            wait_empty_q();
            broadcast(work, count);
            load_q(work);
            int entry = visit_of(p, work, 0);
#pragma unroll 1  // registers are few
            for (int i = 0; i < count; ++i) {
                if (i + 1 == count) {
                    index = next_index();  // early, to hide the latency of the atomic
                }
                const int key0 = (entry >> kRowGroups) * kTileN;
                if (i + 1 < count) {
                    entry = visit_of(p, work, i + 1);
                }
                load_k(key0, head_kv, work.batch);
                load_v(key0, head_kv, work.batch);
            }
        }
        wait_empty_q();
        broadcast_end();
        reset_scheduler();
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

// ---- Pieces --------------------------------------------------------------------------------------------------------

constexpr int kSlotFloats = kTileM * (kHeadDim + 2);  // O in the order of fragments, then row_max and row_sum

// The results of a slot of a head.
__device__ __forceinline__ float* slot_of(const Params& p, int batch, int head, int slot) {
    return p.out_accum + ((static_cast<long long>(batch) * p.heads_q + head) * p.piece_slots + slot) * kSlotFloats;
}

// Warpgroup: store O, row_max and row_sum of its 64 rows in the slot of the piece.
__device__ __forceinline__ void store_piece(const Params& p, const Work& work, const RowStats& stats,
                                            const float (&o)[kHeadDim / 2], int warpgroup) {
    float* const slot = slot_of(p, work.batch, work.head, work.slot);
    const int row = warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float2* const row_stats = reinterpret_cast<float2*>(slot + kTileM * kHeadDim) + row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = sum_of_row(stats.row_sum[half]);
        if (threadIdx.x % 4 == 0) {
            row_stats[half * 8] = make_float2(stats.row_max[half], sum);
        }
    }
    float* const out = slot + warpgroup * 64 * kHeadDim + threadIdx.x % 128 * 4;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; i += 4) {
        *reinterpret_cast<float4*>(out + i * 128) = make_float4(o[i], o[i + 1], o[i + 2], o[i + 3]);
    }
}

// (row_max, row_sum) of a row in a slot; `first` is that of slot 0.
__device__ __forceinline__ float2 row_stats_of(const float* first, int slot) {
    return *reinterpret_cast<const float2*>(first + static_cast<long long>(slot) * kSlotFloats);
}

// exp(scale (row_max - most)); 0 where the piece shows the row no key.
__device__ __forceinline__ float weight_of(float2 row_stats, float most, float scale_log2) {
    return row_stats.y == 0.0f ? 0.0f : exp2_approx((row_stats.x - most) * scale_log2);
}

// Thread: (row_max, row_sum) of a row over the slots [x, y); `first` is that of slot 0.
__device__ __forceinline__ float2 combine_row_stats(const float* first, int2 slots, float scale_log2) {
    float most = __int_as_float(0xff800000);
    for (int slot = slots.x; slot < slots.y; ++slot) {
        const float2 piece = row_stats_of(first, slot);
        most = piece.y != 0.0f && (piece.x > most || piece.x != piece.x) ? piece.x : most;  // NaN stays
    }
    float sum = 0.0f;
    for (int slot = slots.x; slot < slots.y; ++slot) {
        const float2 piece = row_stats_of(first, slot);
        sum += weight_of(piece, most, scale_log2) * piece.y;
    }
    return make_float2(most, sum);
}

// Grid: tiles_m x batch x heads_q, a warpgroup for 64 rows. Combines the pieces of tiles whose lists were cut.
extern "C" __global__ void __launch_bounds__(kConsumers * 128)
attnforge_fwd_sm90a_bf16_d128_dense_a16_interval40801f77_m192_n80_s3_p1_r1_k1_q0_h2_g2_combine(const __grid_constant__ Params p) {
    const int tile = blockIdx.x % p.tiles_m;
    const int head = blockIdx.x / p.tiles_m % p.heads_q;
    const int batch = blockIdx.x / p.tiles_m / p.heads_q;
    const long long entry = entry_of(p, mask_plane(p, batch, head), tile);
    const int2 slots = __ldg(reinterpret_cast<const int2*>(p.tile_slots) + entry);
    if (slots.x == slots.y) {
        return;  // the list was not cut: its results are in out
    }
    const float scale_log2 = p.scale_log2;
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // of the tile, the thread's first
    const float* const first = slot_of(p, batch, head, 0);
    const float* const stats0 = first + kTileM * kHeadDim + row * 2;  // of slot 0, as outs
    const float* const stats[2] = {stats0, stats0 + 16};
    const float* const outs = first + threadIdx.x / 128 * 64 * kHeadDim + threadIdx.x % 128 * 4;
    float2 all[2];
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        all[half] = combine_row_stats(stats[half], slots, scale_log2);
        inverse[half] = all[half].y == 0.0f ? 0.0f : 1.0f / all[half].y;
    }
    const int query = tile * kTileM + row;
    element* const out = static_cast<element*>(p.out.data) + batch * p.out.batch + head * p.out.head;
#pragma unroll 1
    for (int i = 0; i < kHeadDim / 2; i += 4) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int slot = slots.x; slot < slots.y; ++slot) {
            const long long at = static_cast<long long>(slot) * kSlotFloats + i * 128;
            const float4 x = *reinterpret_cast<const float4*>(outs + at);
            const float weight0 = weight_of(row_stats_of(stats[0], slot), all[0].x, scale_log2);
            const float weight1 = weight_of(row_stats_of(stats[1], slot), all[1].x, scale_log2);
            sum.x += weight0 * x.x;
            sum.y += weight0 * x.y;
            sum.z += weight1 * x.z;
            sum.w += weight1 * x.w;
        }
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2;
        element* const at = out + query * p.out.row + column;
        if (query < p.seq_q) {
            *reinterpret_cast<unsigned*>(at) = pack(sum.x * inverse[0], sum.y * inverse[0]);
        }
        if (query + 8 < p.seq_q) {
            *reinterpret_cast<unsigned*>(at + 8 * p.out.row) = pack(sum.z * inverse[1], sum.w * inverse[1]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (threadIdx.x % 4 == 0 && query + half * 8 < p.seq_q) {
            p.lse[(static_cast<long long>(batch) * p.heads_q + head) * p.seq_q + query + half * 8] =
                lse_of(p, all[half].x, all[half].y);
        }
    }
}

// ---- Rows that see no key ------------------------------------------------------------------------------------------

// Thread `thread` of `threads`: out = 0 and lse = -inf for `rows` rows, from `query0` on, that see no key.
__device__ __forceinline__ void store_empty(const Params& p, const Work& work, int query0, int rows, int thread,
                                            int threads) {
    element* out = static_cast<element*>(p.out.data) + work.batch * p.out.batch + work.head * p.out.head;
    float* lse = p.lse + (static_cast<long long>(work.batch) * p.heads_q + work.head) * p.seq_q;
    rows = min(rows, p.seq_q - query0);
#pragma unroll 1
    for (int i = thread; i < rows * (kHeadDim / 8); i += threads) {
        element* chunk = out + (query0 + i / (kHeadDim / 8)) * p.out.row + i % (kHeadDim / 8) * 8;
        *reinterpret_cast<uint4*>(chunk) = make_uint4(0, 0, 0, 0);
    }
#pragma unroll 1
    for (int i = thread; i < rows; i += threads) {
        lse[query0 + i] = __int_as_float(0xff800000);
    }
}

// Warp: the results of all work tiles without visits, which the producer does not broadcast.
__device__ __forceinline__ void fill_empty(const Params& p) {
#pragma unroll 1
    for (int index = blockIdx.x; index < count_work(p); index += gridDim.x) {
        const Work work = work_at(p, index);
        if (visits_of(p, work) == 0 && work.tile >= 0) {
            store_empty(p, work, first_row(p, work), kTileM, threadIdx.x % 32, 32);
        }
    }
}

// ---- Consumer ------------------------------------------------------------------------------------------------------

// Visits of a work tile, by their numbers.
struct Range {
    int begin, end;
};

// The end of a work tile after its last softmax: the last P V and the store of O.
struct TileTail {
    Work work;
    unsigned q_stage;  // the buffer of its Q, through which O is stored
    unsigned v_stage;  // of the last P V
    bool accumulate;   // whether there was a P V before it
    bool overlap;      // whether S of the next work tile is issued with the last P V
    int hidden_visits;  // after the end of kv_range
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
    int slot;         // of the bits of this visit, -1: it has none
    unsigned seen[kSeenWords];  // bits of a masked visit: which elements of S are visible

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

    // Arrive at an empty barrier of K or V for the warpgroup.
    __device__ __forceinline__ void release(unsigned barrier) const {
        if (leader) {
            barrier_arrive(barrier);
        }
    }

    // If `stored`: release the buffer of Q once O has been stored through it.
    __device__ __forceinline__ void release_q(unsigned stage, bool stored) const {
        tma_store_wait();
        barrier_arrive_if(stored && leader, smem + kEmptyQ + stage * 8);
    }

    // Warpgroup ordering barrier: one warpgroup issues its products while the others are at their softmax.
    // The next one issues its products once S of this one is complete.
    __device__ __forceinline__ void order_sync() const {
        named_sync(kOrderBarrier + warpgroup, 256);
    }

    __device__ __forceinline__ void order_arrive() const {
        named_arrive(kOrderBarrier + (warpgroup + 1) % kConsumers, 256);
    }

    // ---- Steps of a visit ----

    __device__ __forceinline__ void set_visit(int i) {
        entry = visit_of(p, work, i);
        slot = slot_of(p, work, i);
    }

    // Whether the mask hides any of the visit's pairs from these rows.
    __device__ __forceinline__ bool masked() const {
        return entry >> warpgroup & 1;
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

    // Load the bits of the visit, if it has any. They are needed when S is complete.
    __device__ __forceinline__ void load_bits() {
        if (slot >= 0) {
            load_seen(p, slot, warpgroup, seen);
        }
    }

    // Mask S, which is complete, and release K.
    __device__ __forceinline__ void apply_mask_and_release_k() {
        accumulator_fence(s);
        if (masked()) {
            if (slot < 0) {
                find_seen(p, work.plane, row, (entry >> kRowGroups) * kTileN, seen);
            }
            apply_mask(s, seen);
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
        const int4 range = shared_load(words + 16 + warpgroup * 16);
        kv_range = {__shfl_sync(~0u, range.x, 0), __shfl_sync(~0u, range.y, 0)};
        work = {__shfl_sync(~0u, tile.x, 0), __shfl_sync(~0u, tile.y, 0), __shfl_sync(~0u, tile.z, 0)};
        work.plane = mask_plane(p, work.batch, work.head);
        visit_count = __shfl_sync(~0u, tile.w, 0);
        const int4 piece = shared_load(words + kBroadcastBytes - 16);
        work.first_visit = __shfl_sync(~0u, piece.x, 0);
        work.slot = __shfl_sync(~0u, piece.y, 0);
    }

    // Release K and V of `count` visits that show these rows nothing. No wgmma may be in flight.
    // The other warpgroups take the first `ordered` of them through the ordering barrier.
    __device__ __forceinline__ void skip_visits(int count, int ordered) {
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            wait_k();  // to arrive earlier would count for the visit before
            named_sync(kWarpgroupBarrier + warpgroup, 128);  // all warps have seen this phase: it may end
            barrier_arrive_if(threadIdx.x % 128 == 0, smem + kEmptyK + kv_pipe.stage * 8);
            if (i < ordered) {
                order_sync();
                order_arrive();
            }
            wait_v(kv_pipe);
            named_sync(kWarpgroupBarrier + warpgroup, 128);
            barrier_arrive_if(leader, smem + kEmptyV + kv_pipe.stage * 8);
            kv_pipe.advance();
        }
    }

    // Skip a work tile, and fetch the next.
    __device__ __forceinline__ void skip_tile() {
        skip_visits(visit_count, visit_count - 1);
        store_empty(p, work, first_row(p, work) + warpgroup * 64, 64, threadIdx.x % 128, 128);
        barrier_arrive_if(leader, smem + kEmptyQ + q_pipe.stage * 8);
        q_pipe.advance();
        fetch_tile();
    }

    // Skip the work tiles that show these rows nothing, and the visits before kv_range. False: no work tile is left.
    // That is found out before skip_visits: ptxas takes a condition computed across its loop for divergent.
    __device__ __forceinline__ bool next_visible_tile() {
        while (visit_count > 0 && kv_range.begin == kv_range.end) {
            skip_tile();
        }
        if (visit_count == 0) {
            return false;
        }
        skip_visits(kv_range.begin, kv_range.begin);
        return true;
    }

    // Start S of the work tile's first visit.
    __device__ __forceinline__ void begin_tile() {
        set_visit(kv_range.begin);
        q = smem + kOffsetQ + q_pipe.stage * kTileBytesM;
        wait_k();
        issue_qk();
        load_bits();
    }

    // Go on to the next work tile, which is known unless hidden visits have to be skipped first.
    __device__ __forceinline__ TileTail leave_tile() {
        TileTail tail = {work, q_pipe.stage, kv_pipe.stage, kv_range.end - kv_range.begin > 1, false};
        wait_v(kv_pipe);
        kv_pipe.advance();
        q_pipe.advance();
        tail.hidden_visits = visit_count - kv_range.end;
        if (tail.hidden_visits == 0) {
            fetch_tile();
            tail.overlap = kv_range.begin == 0 && kv_range.end > 0;
        }
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
        if (tail.work.slot >= 0) {
            store_piece(p, tail.work, stats, o, warpgroup);
        } else {
            store_out(p, maps, tail.work, stats, o, smem + kOffsetQ + tail.q_stage * kTileBytesM, warpgroup);
        }
        if constexpr (overlap) {
            wgmma_wait_all();
        }
    }

    // ---- The loop over work tiles and visits ----

    __device__ __forceinline__ void run() {
        if (warpgroup == kConsumers - 1) {
            named_arrive(kOrderBarrier, 256);  // the first warpgroup begins
        }
        fetch_tile();
        while (next_visible_tile()) {
            begin_tile();
            wgmma_wait_all();
            TileTail tail = {};
            do {
                // The first visit.
                row = first_row(p, work) + warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
                pin(row);  // else computed anew in each masked visit
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
                    order_sync();
                    issue_qk();
                    wait_v(v_pipe);
                    issue_pv(v_pipe.stage, i > kv_range.begin + 1);
                    load_bits();
                    wgmma_wait_all_but_one();  // S is complete, P V may still run
                    order_arrive();
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
            if (tail.hidden_visits > 0) {
                skip_visits(tail.hidden_visits, tail.hidden_visits);
                fetch_tile();
            }
            release_q(tail.q_stage, true);
        }
    }
};

// ---- Kernel --------------------------------------------------------------------------------------------------------

// Grid: blocks_m x batch x heads_q work tiles, walked by one block per multiprocessor.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
attnforge_fwd_sm90a_bf16_d128_dense_a16_interval40801f77_m192_n80_s3_p1_r1_k1_q0_h2_g2(
    const __grid_constant__ Params p, const __grid_constant__ TensorMaps maps) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned smem = shared_address(shared);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // warp-uniform, also for ptxas
    if (threadIdx.x == 0) {
        for (int i = 0; i < kBuffersQ; ++i) {
            barrier_init(smem + kFullQ + i * 8, 1);
            barrier_init(smem + kEmptyQ + i * 8, kConsumers);  // leaders of warpgroups
        }
        for (int i = 0; i < kStages; ++i) {
            barrier_init(smem + kFullK + i * 8, 1);
            barrier_init(smem + kEmptyK + i * 8, kConsumers);
            barrier_init(smem + kFullV + i * 8, 1);
            barrier_init(smem + kEmptyV + i * 8, kConsumers);
        }
        barrier_init_fence();
    }
    __syncthreads();
    // All warps of a warpgroup take part in setmaxnreg; then one thread and one warp of the first go on.
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == 0) {
            Producer{p, maps, smem}.run();
        } else if (threadIdx.x / 32 == 1) {
            fill_empty(p);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        Consumer(p, maps, smem, warpgroup - 1).run();
    }
}
