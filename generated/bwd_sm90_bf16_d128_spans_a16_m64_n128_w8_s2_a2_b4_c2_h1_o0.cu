// attnforge_bwd_sm90_bf16_d128_spans_a16_m64_n128_w8_s2_a2_b4_c2_h1_o0
// Generated from templates/sm80/backward.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction bwd --arch sm90 --dtype bf16 --head-dim 128 --mask spans --align 16
//     --set tile_m=64 --set tile_n=128 --set warps=8 --set stages=2 --set warps_sdp=2
//     --set warps_dkv=4 --set warps_dq=2 --set split_heads=1 --set deterministic=0
//
//   tile_m          64   query rows per step of the main loop
//   tile_n         128   keys per block
//   warps            8   warps per block
//   stages           2   shared-memory buffers for Q and for dO
//   warps_sdp        2   warps along the queries in S and dP; the rest split the keys
//   warps_dkv        4   warps along the keys in dK and dV; the rest split head_dim
//   warps_dq         2   warps along the queries in dQ; the rest split head_dim
//   split_heads      1   1: a block per q head (dK, dV summed in fp32 memory), not per kv head
//   deterministic    0   1: blocks add to dQ, dK and dV in a fixed order: the same bits on every run

typedef unsigned short element;  // bf16, only ever moved as bits

// A tensor (batch, heads, seq, head_dim): its address, and strides in elements. Rows are contiguous.
struct TensorRef {
    void* data;
    long long batch, head, row;
};

struct Params {
    TensorRef q;  // (batch, heads_q, seq_q, head_dim)
    TensorRef k;  // (batch, heads_kv, seq_k, head_dim)
    TensorRef v;  // (batch, heads_kv, seq_k, head_dim_v)
    TensorRef out;  // (batch, heads_q, seq_q, head_dim_v)
    TensorRef dout;  // gradient of out
    TensorRef dq;  // gradients, shaped as q, k, v
    TensorRef dk;
    TensorRef dv;
    const int* starts;  // (seq_k) spans: key j is visible to queries starts[j] <= i < ends[j]
    const int* ends;  // (seq_k)
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
    const float* dlse;  // (batch, heads_q, seq_q) gradient of lse, null if there is none
    float* delta;  // per row: sum(dout * out) - dlse; on GPUs with lse beside it, 2 or 8 floats a row
    float* dq_accum;  // (batch, heads_q, padded_q, columns) fp32 sums of dq, in the kernel's order
    float* dkv_accum;  // (batch, heads_kv, padded_k, columns) fp32 sums of dk, then those of dv
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
    int padded_q;  // tiles_m * tile_m
    int padded_k;  // tiles_n * tile_n
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;
constexpr int kTileM = 64;  // query rows of a step
constexpr int kTileN = 128;  // keys of a block
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kStages = 2;  // buffers of Q and of dO
constexpr int kChunks = (kHeadDim + 7) / 8;  // 16-byte chunks of a row, the last one filled up with zeros
constexpr int kColumns = 128;  // kHeadDim rounded up until warps share it evenly; what is beyond is dropped
constexpr int kPitch = 256;  // bytes between rows of Q, dO, K and V in shared memory
constexpr int kScorePitch = 256;  // bytes between rows of P and dS
constexpr int kTileBytesM = kTileM * kPitch;
constexpr int kTileBytesN = kTileN * kPitch;
constexpr int kScoreBytes = kTileM * kScorePitch;
constexpr int kStatBytes = kTileM * 8;
// S and dP: warps are a kSdpM x kSdpN grid over (queries, keys).
constexpr int kSdpM = 2;
constexpr int kSdpN = kWarps / kSdpM;
constexpr int kSdpFragsM = kTileM / kSdpM / 16;
constexpr int kSdpFragsN = kTileN / kSdpN / 8;
// dK and dV: warps are a kDkvN x kDkvD grid over (keys, head_dim).
constexpr int kDkvN = 4;
constexpr int kDkvD = kWarps / kDkvN;
constexpr int kDkvFragsN = kTileN / kDkvN / 16;
constexpr int kDkvFragsD = kColumns / kDkvD / 8;
// dQ: warps are a kDqM x kDqD grid over (queries, head_dim).
constexpr int kDqM = 2;
constexpr int kDqD = kWarps / kDqM;
constexpr int kDqFragsM = kTileM / kDqM / 16;
constexpr int kDqFragsD = kColumns / kDqD / 8;
// Shared memory.
constexpr int kOffsetK = 0;
constexpr int kOffsetV = kOffsetK + kTileBytesN;
constexpr int kOffsetQ = kOffsetV + kTileBytesN;
constexpr int kOffsetDo = kOffsetQ + kStages * kTileBytesM;
constexpr int kOffsetP = kOffsetDo + kStages * kTileBytesM;
constexpr int kOffsetDs = kOffsetP + kScoreBytes;
constexpr int kOffsetStats = kOffsetDs + kScoreBytes;
constexpr int kOffsetSpans = kOffsetStats + kStages * kStatBytes;
constexpr int kSharedBytes = kOffsetSpans + kTileN * 8;
static_assert(kSharedBytes == 165888, "codegen/families/sm80_backward.py disagrees");

// ---- PTX: one instruction per function -----------------------------------------------------------------------------

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Thread: copy 16 bytes to shared memory in the background; zeros if `valid` is false (then `src` is not read).
__device__ __forceinline__ void cp_async(unsigned dst, const void* src, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}

// Thread: close the group of copies issued since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Thread: wait until at most 0 of this thread's groups are in flight.
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Warp: four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Warp: the same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_transposed(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Warp: d += a b for a 16x16, b 16x8; fragments as in the PTX manual.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Thread: 2^x, about 2 ulp.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Thread: round two floats to bf16; `low` takes the lower half of the register.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Thread: the value of a stored bf16 element.
__device__ __forceinline__ float to_float(element bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

// Thread: copy 8 bytes (lse and delta of one row) to shared memory in the background.
__device__ __forceinline__ void cp_async_stat(unsigned dst, const void* src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
}

// Thread: add four consecutive floats to device memory.
__device__ __forceinline__ void add_to(float* target, const float (&x)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// ---- Shared-memory tiles -------------------------------------------------------------------------------------------

// Byte offset of 16-byte chunk `chunk` of row `row`. The XOR spreads the 8 rows of a matrix over all banks.
__device__ __forceinline__ constexpr unsigned tile_offset(int row, int chunk) {
    return row * kPitch + ((chunk ^ (row & 7)) << 4);
}

// Address `chunk` chunks right of `base`, a value of tile_offset on a 1024-byte aligned tile with chunk 0 or 1.
__device__ __forceinline__ unsigned tile_chunk(unsigned base, int chunk) {
    return (base ^ ((chunk & 7) << 4)) + (chunk >> 3) * 128;
}

// Byte offset of 16-byte chunk `chunk` of row `row`. The XOR spreads the 8 rows of a matrix over all banks.
__device__ __forceinline__ constexpr unsigned score_offset(int row, int chunk) {
    return row * kScorePitch + ((chunk ^ (row & 7)) << 4);
}

// Address `chunk` chunks right of `base`, a value of score_offset on a 1024-byte aligned tile with chunk 0 or 1.
__device__ __forceinline__ unsigned score_chunk(unsigned base, int chunk) {
    return (base ^ ((chunk & 7) << 4)) + (chunk >> 3) * 128;
}

// Thread: copy one 16-byte chunk of a row.
__device__ __forceinline__ void load_chunk(unsigned dst, const element* src, bool valid) {
    cp_async(dst, src, valid);
}

// Block: copy kTileM rows of a (seq, kHeadDim) matrix; rows from `valid` on become zeros.
__device__ __forceinline__ void load_q_tile(unsigned tile, const element* src, long long stride, int valid) {
    constexpr int row_step = kThreads / kChunks;
    const int first_row = threadIdx.x / kChunks;
    const int chunk = threadIdx.x % kChunks;
    src += first_row * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < (kTileM + row_step - 1) / row_step; ++i) {
        const int row = first_row + i * row_step;
        if (kTileM % row_step == 0 || row < kTileM) {
            load_chunk(tile + tile_offset(row, chunk), src, row < valid);
        }
        src += row_step * stride;
    }
}

// Block: copy kTileN rows of a (seq, kHeadDim) matrix; rows from `valid` on become zeros.
__device__ __forceinline__ void load_kv_tile(unsigned tile, const element* src, long long stride, int valid) {
    constexpr int row_step = kThreads / kChunks;
    const int first_row = threadIdx.x / kChunks;
    const int chunk = threadIdx.x % kChunks;
    src += first_row * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < (kTileN + row_step - 1) / row_step; ++i) {
        const int row = first_row + i * row_step;
        if (kTileN % row_step == 0 || row < kTileN) {
            load_chunk(tile + tile_offset(row, chunk), src, row < valid);
        }
        src += row_step * stride;
    }
}

// Thread: write two neighbours of a row of kHeadDim elements, from column `col` on.
__device__ __forceinline__ void store_pair(element* row, int col, float low, float high) {
    *reinterpret_cast<unsigned*>(row + col) = pack(low, high);
}

// A-operand lane address: row lane % 16, chunk lane / 16. Also serves transposed reads of a row-major B.
__device__ __forceinline__ int row_of_a(int lane) { return lane & 15; }
__device__ __forceinline__ int chunk_of_a(int lane) { return lane >> 4; }

// B-operand lane address for two n8 tiles of a K-major matrix. Also serves transposed reads of A.
__device__ __forceinline__ int row_of_b(int lane) { return (lane >> 4) * 8 + (lane & 7); }
__device__ __forceinline__ int chunk_of_b(int lane) { return (lane >> 3) & 1; }

// ---- Mask: spans ---------------------------------------------------------------------------------------------------

// The queries that see key `key` are [x, y).
__device__ __forceinline__ int2 span_of(const Params& p, int key) {
    return key < p.seq_k ? make_int2(__ldg(p.starts + key), __ldg(p.ends + key)) : make_int2(0, 0);
}

// The key tile of the block with this rank; tiles with most work have the lowest rank.
__device__ __forceinline__ int owned_tile(const Params& p, int rank) {
    return __ldg(p.tile_order + rank);
}

// How many query tiles key tile `tile` visits.
__device__ __forceinline__ int visits(const Params& p, int tile) {
    return __ldg(p.tile_count + tile);
}

// Visit number `index`: query tile * 2 + (1 if some of its pairs are hidden).
__device__ __forceinline__ int visit(const Params& p, int tile, int index) {
    return __ldg(p.tile_list + static_cast<long long>(tile) * p.list_stride + index);
}

// ---- Order of the work ---------------------------------------------------------------------------------------------

// Bytes of the L2 cache that Q, dO and the sums of dQ of a section of heads may take.
// The L2 cache of an H200 has 50 MB. How the value was chosen: docs/experiments.md, 11 and 89.
constexpr long long kCacheBytes = 40 << 20;

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
    const int first = index / (section * p.tiles_n) * section;
    const int width = min(section, heads * p.batch - first);  // the last section may be narrower
    const int rest = index - first * p.tiles_n;
    const int plane = first + rest % width;
    return {rest / width, plane % heads, plane / heads};
}

// ---- Tile schedule from starts/ends: built once per mask on the device, shared by all layers and heads -------------

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

constexpr int kUnit = kTileM / kRowGroups;  // query rows of a row group
constexpr int kKeysOfThread = (kTileN + kScheduleThreads - 1) / kScheduleThreads;

// The keys of a tile, as the threads of a block hold them.
struct Keys {
    int2 units[kKeysOfThread];  // row groups with queries that see the key: [x, y)
    int latest, earliest;       // the latest start and the earliest end of all keys of the tile
};

// Block: the keys of a tile.
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
        }
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
    constexpr int units = kScheduleThreads * kRowGroups;
    __shared__ int changes[units];  // how many more keys a row group sees than the one before it
    __shared__ int sums[kScheduleThreads / 32];
    for (int i = threadIdx.x; i < units; i += kScheduleThreads) {
        changes[i] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kKeysOfThread; ++i) {
        const unsigned first = keys.units[i].x - base * kRowGroups;
        const unsigned last = keys.units[i].y - base * kRowGroups;
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
    int group_keys[kRowGroups];
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
        sum += changes[threadIdx.x * kRowGroups + group];
        group_keys[group] = sum;
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
    for (int group = 0; group < kRowGroups; ++group) {
        const int first = (base + threadIdx.x) * kTileM + group * kUnit;
        const int last = min(first + kUnit, p.seq_q);
        kind |= (before + group_keys[group] > 0) << group;
        kind |= (keys.latest > first || keys.earliest < last) << kRowGroups + group;
    }
    return kind & kSomeRowGroups ? kind : 0;
}

// One block per owned tile: list the tiles it must visit, in ascending order.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_bwd_sm90_bf16_d128_spans_a16_m64_n128_w8_s2_a2_b4_c2_h1_o0_schedule(const __grid_constant__ Params p) {
    __shared__ unsigned votes[kScheduleThreads / 32];
    const int tile = blockIdx.x;
    int* list = p.tile_list + static_cast<long long>(tile) * p.list_stride;
    const Keys keys = load_keys(p, tile);
    int seen = 0;
    int total = 0;
    for (int base = 0; base < p.tiles_m; base += kScheduleThreads) {
        const int visited = base + threadIdx.x;
        const unsigned kind = find_kind(p, keys, base, seen);
        const int slot = count_before(kind != 0, votes, total);
        if (kind != 0) {
            list[slot] = visited << kRowGroups | kind >> kRowGroups;
        }
    }
    if (threadIdx.x == 0) {
        p.tile_count[tile] = total;
    }
}

// One block per owned tile: its rank is the number of tiles with more work, earlier tiles winning ties.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_bwd_sm90_bf16_d128_spans_a16_m64_n128_w8_s2_a2_b4_c2_h1_o0_order(const __grid_constant__ Params p) {
    const int tile = blockIdx.x;
    const int work = p.tile_count[tile];
    int rank = 0;
    for (int base = 0; base < p.tiles_n; base += kScheduleThreads) {
        const int other = base + threadIdx.x;
        const int theirs = other < p.tiles_n ? p.tile_count[other] : -1;
        rank += __syncthreads_count(theirs > work || (theirs == work && other < tile));
    }
    if (threadIdx.x == 0) {
        p.tile_order[rank] = tile;
    }
}

// ---- Work of a block -----------------------------------------------------------------------------------------------

// A key tile of a kv head, for one of its q heads.
struct Work {
    int batch, head_kv, tile;
    int head;   // the q head
    int steps;  // query tiles to visit
};

__device__ __forceinline__ Work work_at(const Params& p, int index) {
    const Place place = place_of(p, index);
    Work work;
    work.batch = place.batch;
    work.head = place.head;
    work.tile = owned_tile(p, place.rank);
    work.head_kv = work.head / (p.heads_q / p.heads_kv);
    work.steps = visits(p, work.tile);
    return work;
}

// What a step visits.
struct QueryTile {
    int head, tile;
    bool masked;  // does the mask hide some pairs?
};

__device__ __forceinline__ QueryTile query_tile_at(const Params& p, const Work& work, int step) {
    QueryTile query;
    const int index = step;
    query.head = work.head;
    const int entry = visit(p, work.tile, index);
    query.tile = entry >> 1;
    query.masked = entry & 1;
    return query;
}

// Warp: dS = P * (dP - delta), in the registers of dP. `stats` holds (lse, delta) of the tile's rows.
__device__ __forceinline__ void subtract_delta(float (&dp)[kSdpFragsM][kSdpFragsN][4],
                                               const float (&p)[kSdpFragsM][kSdpFragsN][4], const float2* stats) {
    const int row0 = threadIdx.x / 32 % kSdpM * kSdpFragsM * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < kSdpFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float delta = stats[row0 + i * 16 + half * 8].y;
#pragma unroll
            for (int j = 0; j < kSdpFragsN; ++j) {
#pragma unroll
                for (int e = half * 2; e < half * 2 + 2; ++e) {
                    dp[i][j][e] = p[i][j][e] * (dp[i][j][e] - delta);
                }
            }
        }
    }
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Warp: acc = A B^T over head_dim, for S (Q, K) and dP (dO, V). `a` and `b` are the warp's operand addresses.
__device__ __forceinline__ void multiply_sdp(float (&acc)[kSdpFragsM][kSdpFragsN][4], unsigned a, unsigned b) {
#pragma unroll
    for (int step = 0; step < kChunks / 2; ++step) {
        unsigned fa[kSdpFragsM][4];
#pragma unroll
        for (int i = 0; i < kSdpFragsM; ++i) {
            ldmatrix(fa[i], tile_chunk(a, step * 2) + i * 16 * kPitch);
        }
#pragma unroll
        for (int j = 0; j < kSdpFragsN; j += 2) {
            unsigned fb[4];
            ldmatrix(fb, tile_chunk(b, step * 2) + j * 8 * kPitch);
#pragma unroll
            for (int i = 0; i < kSdpFragsM; ++i) {
                mma(acc[i][j], fa[i], fb[0], fb[1]);
                mma(acc[i][j + 1], fa[i], fb[2], fb[3]);
            }
        }
    }
}

// Warp: acc += A^T B over the queries, for dV (P, dO) and dK (dS, Q).
__device__ __forceinline__ void multiply_dkv(float (&acc)[kDkvFragsN][kDkvFragsD][4], unsigned a, unsigned b) {
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) {
        unsigned fa[kDkvFragsN][4];
#pragma unroll
        for (int i = 0; i < kDkvFragsN; ++i) {
            ldmatrix_transposed(fa[i], score_chunk(a, i * 2) + step * 16 * kScorePitch);
        }
#pragma unroll
        for (int j = 0; j + 1 < kDkvFragsD; j += 2) {
            unsigned fb[4];
            ldmatrix_transposed(fb, tile_chunk(b, j) + step * 16 * kPitch);
#pragma unroll
            for (int i = 0; i < kDkvFragsN; ++i) {
                mma(acc[i][j], fa[i], fb[0], fb[1]);
                mma(acc[i][j + 1], fa[i], fb[2], fb[3]);
            }
        }
    }
}

// Warp: acc = A B over the keys, for dQ (dS, K).
__device__ __forceinline__ void multiply_dq(float (&acc)[kDqFragsM][kDqFragsD][4], unsigned a, unsigned b) {
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
        unsigned fa[kDqFragsM][4];
#pragma unroll
        for (int i = 0; i < kDqFragsM; ++i) {
            ldmatrix(fa[i], score_chunk(a, step * 2) + i * 16 * kScorePitch);
        }
#pragma unroll
        for (int j = 0; j + 1 < kDqFragsD; j += 2) {
            unsigned fb[4];
            ldmatrix_transposed(fb, tile_chunk(b, j) + step * 16 * kPitch);
#pragma unroll
            for (int i = 0; i < kDqFragsM; ++i) {
                mma(acc[i][j], fa[i], fb[0], fb[1]);
                mma(acc[i][j + 1], fa[i], fb[2], fb[3]);
            }
        }
    }
}

// Warp: set P to 0 where the mask hides a pair. `query0` is the thread's first query, `key0` the
// warp's first key; `spans` are those of its keys, in shared memory.
__device__ __forceinline__ void apply_mask(const Params& p, float (&s)[kSdpFragsM][kSdpFragsN][4],
                                           const int2* spans, int query0, int key0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kSdpFragsN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = j * 8 + lane % 4 * 2 + c;
            const int2 span = spans[column];
#pragma unroll
            for (int i = 0; i < kSdpFragsM; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int query = query0 + i * 16 + half * 8;
                    const bool seen = query >= span.x && query < span.y;
                    s[i][j][half * 2 + c] = seen ? s[i][j][half * 2 + c] : 0.0f;
                }
            }
        }
    }
}

// ---- Steps of the main loop ----------------------------------------------------------------------------------------

// Warp: P = 2^(S - lse), 0 where the mask hides a pair. `stats` holds (lse * log2 e, delta) of the tile's rows.
__device__ __forceinline__ void probabilities(const Params& p, float (&s)[kSdpFragsM][kSdpFragsN][4],
                                              const QueryTile& query, const float2* stats,
                                              const int2* spans, int key0) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row0 = warp % kSdpM * kSdpFragsM * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kSdpFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float lse = stats[row0 + i * 16 + half * 8].x;
#pragma unroll
            for (int j = 0; j < kSdpFragsN; ++j) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& value = s[i][j][half * 2 + c];
                    value = exp2_approx(value * p.scale_log2 - lse);
                }
            }
        }
    }
    if (query.masked) {
        const int column0 = warp / kSdpM * kSdpFragsN * 8;
        apply_mask(p, s, spans + column0, query.tile * kTileM + row0, key0 + column0);
    }
}

// Warp: round a (queries x keys) fragment grid to bf16 and put it into shared memory at `tile`.
__device__ __forceinline__ void store_scores(unsigned char* tile, const float (&s)[kSdpFragsM][kSdpFragsN][4]) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row0 = warp % kSdpM * kSdpFragsM * 16 + lane / 4;
    const int chunk0 = warp / kSdpM * kSdpFragsN;
#pragma unroll
    for (int i = 0; i < kSdpFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < kSdpFragsN; ++j) {
                unsigned char* target = tile + score_offset(row0 + i * 16 + half * 8, chunk0 + j) + lane % 4 * 4;
                *reinterpret_cast<unsigned*>(target) = pack(s[i][j][half * 2], s[i][j][half * 2 + 1]);
            }
        }
    }
}

// Warp: add the dQ fragments to the fp32 sums of one tile, in fragment order so that a warp's writes are consecutive.
__device__ __forceinline__ void add_dq(float* tile, const float (&dq)[kDqFragsM][kDqFragsD][4]) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float* target = tile + warp * (kDqFragsM * kDqFragsD * 128) + lane * 4;
#pragma unroll
    for (int i = 0; i < kDqFragsM; ++i) {
#pragma unroll
        for (int j = 0; j < kDqFragsD; ++j) {
            add_to(target + (i * kDqFragsD + j) * 128, dq[i][j]);
        }
    }
}

// Warp: add dK or dV fragments to the fp32 sums of one key tile, in fragment order.
__device__ __forceinline__ void add_dkv(float* tile, const float (&acc)[kDkvFragsN][kDkvFragsD][4]) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float* target = tile + warp * (kDkvFragsN * kDkvFragsD * 128) + lane * 4;
#pragma unroll
    for (int i = 0; i < kDkvFragsN; ++i) {
#pragma unroll
        for (int j = 0; j < kDkvFragsD; ++j) {
            add_to(target + (i * kDkvFragsD + j) * 128, acc[i][j]);
        }
    }
}

// Warp: the inverse of add_dkv.
__device__ __forceinline__ void read_dkv(const float* tile, float (&acc)[kDkvFragsN][kDkvFragsD][4]) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const float* source = tile + warp * (kDkvFragsN * kDkvFragsD * 128) + lane * 4;
#pragma unroll
    for (int i = 0; i < kDkvFragsN; ++i) {
#pragma unroll
        for (int j = 0; j < kDkvFragsD; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                acc[i][j][e] = source[(i * kDkvFragsD + j) * 128 + e];
            }
        }
    }
}

// Warp: write dK or dV of the key tile, times `factor`.
__device__ __forceinline__ void store_dkv(element* out, long long stride,
                                          const float (&acc)[kDkvFragsN][kDkvFragsD][4], float factor, int keys) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row0 = warp % kDkvN * kDkvFragsN * 16 + lane / 4;
    const int col0 = warp / kDkvN * kDkvFragsD * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDkvFragsN; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + i * 16 + half * 8;
            if (row >= keys) {
                continue;
            }
#pragma unroll
            for (int j = 0; j < kDkvFragsD; ++j) {
                store_pair(out + row * stride, col0 + j * 8, acc[i][j][half * 2] * factor,
                           acc[i][j][half * 2 + 1] * factor);
            }
        }
    }
}

// Where the float32 sums of dK, and of dV, of the key tile begin: those of dV follow all of dK.
__device__ __forceinline__ float* dk_sums(const Params& p, int batch, int head_kv, int key0) {
    const long long plane = static_cast<long long>(batch) * p.heads_kv + head_kv;
    return p.dkv_accum + (plane * p.padded_k + key0) * kColumns;
}
__device__ __forceinline__ float* dv_sums(const Params& p, int batch, int head_kv, int key0) {
    const long long plane = static_cast<long long>(batch) * p.heads_kv + head_kv;
    const long long planes = static_cast<long long>(p.batch) * p.heads_kv;
    return p.dkv_accum + planes * p.padded_k * kColumns + (plane * p.padded_k + key0) * kColumns;
}

// Block: rows of dK and dV of the key tile that begins at `key0`, once they are complete.
__device__ __forceinline__ void store_dk_dv(const Params& p, int batch, int head_kv, int key0,
                                            const float (&dk)[kDkvFragsN][kDkvFragsD][4],
                                            const float (&dv)[kDkvFragsN][kDkvFragsD][4]) {
    element* dk_rows = static_cast<element*>(p.dk.data) + batch * p.dk.batch + head_kv * p.dk.head + key0 * p.dk.row;
    element* dv_rows = static_cast<element*>(p.dv.data) + batch * p.dv.batch + head_kv * p.dv.head + key0 * p.dv.row;
    store_dkv(dk_rows, p.dk.row, dk, p.scale, p.seq_k - key0);
    store_dkv(dv_rows, p.dv.row, dv, 1.0f, p.seq_k - key0);
}

// ---- Main loop -----------------------------------------------------------------------------------------------------

// What a block keeps from step to step.
struct Gradients {
    float dk[kDkvFragsN][kDkvFragsD][4];
    float dv[kDkvFragsN][kDkvFragsD][4];
};

// Where this warp reads the operands of the products, relative to the tiles; see row_of_a.
struct Operands {
    unsigned sdp_left, sdp_right;  // Q and K
    unsigned dkv_left, dkv_right;  // P and dS, and Q and dO
    unsigned dq_left, dq_right;  // dS and K
};

__device__ __forceinline__ Operands operands_of(int warp, int lane) {
    const int sdp_row = warp % kSdpM * kSdpFragsM * 16;
    const int sdp_column = warp / kSdpM * kSdpFragsN * 8;
    const int dkv_row = warp % kDkvN * kDkvFragsN * 16;
    const int dkv_column = warp / kDkvN * kDkvFragsD * 8;
    const int dq_row = warp % kDqM * kDqFragsM * 16;
    const int dq_column = warp / kDqM * kDqFragsD * 8;
    Operands at;
    at.sdp_left = tile_offset(sdp_row + row_of_a(lane), chunk_of_a(lane));
    at.sdp_right = tile_offset(sdp_column + row_of_b(lane), chunk_of_b(lane));
    at.dkv_left = score_offset(row_of_b(lane), dkv_row / 8 + chunk_of_b(lane));
    at.dkv_right = tile_offset(row_of_a(lane), dkv_column / 8 + chunk_of_a(lane));
    at.dq_left = score_offset(dq_row + row_of_a(lane), chunk_of_a(lane));
    at.dq_right = tile_offset(row_of_a(lane), dq_column / 8 + chunk_of_a(lane));
    return at;
}

// Block: start copying Q, dO and their row_stats for step `step` into buffer `stage`.
__device__ __forceinline__ void load_step(const Params& p, const Work& work, unsigned base, int step, int stage) {
    const QueryTile query = query_tile_at(p, work, step);
    const int query0 = query.tile * kTileM;
    const element* q = static_cast<const element*>(p.q.data) + work.batch * p.q.batch + query.head * p.q.head;
    const element* dout =
        static_cast<const element*>(p.dout.data) + work.batch * p.dout.batch + query.head * p.dout.head;
    load_q_tile(base + kOffsetQ + stage * kTileBytesM, q + query0 * p.q.row, p.q.row, p.seq_q - query0);
    load_q_tile(base + kOffsetDo + stage * kTileBytesM, dout + query0 * p.dout.row, p.dout.row, p.seq_q - query0);
    const long long plane = static_cast<long long>(work.batch) * p.heads_q + query.head;
    const float* stats = p.delta + (plane * p.padded_q + query0) * 2;
    for (int row = threadIdx.x; row < kTileM; row += kThreads) {
        cp_async_stat(base + kOffsetStats + stage * kStatBytes + row * 8, stats + row * 2);
    }
}

// Block: start copying K, V and the first step.
__device__ __forceinline__ void load_first(const Params& p, const Work& work, unsigned base) {
    if (work.steps > 0) {
        const int key0 = work.tile * kTileN;
        const element* k = static_cast<const element*>(p.k.data) + work.batch * p.k.batch + work.head_kv * p.k.head;
        const element* v = static_cast<const element*>(p.v.data) + work.batch * p.v.batch + work.head_kv * p.v.head;
        load_kv_tile(base + kOffsetK, k + key0 * p.k.row, p.k.row, p.seq_k - key0);
        load_kv_tile(base + kOffsetV, v + key0 * p.v.row, p.v.row, p.seq_k - key0);
        load_step(p, work, base, 0, 0);
    }
    cp_async_commit();
}

// Warp: its share of dQ = dS K of this step, added to the sums in memory.
__device__ __forceinline__ void step_dq(const Params& p, const Work& work, const QueryTile& query, unsigned base,
                                        const Operands& at) {
    float dq[kDqFragsM][kDqFragsD][4] = {};
    multiply_dq(dq, base + kOffsetDs + at.dq_left, base + kOffsetK + at.dq_right);
    const long long plane = static_cast<long long>(work.batch) * p.heads_q + query.head;
    add_dq(p.dq_accum + (plane * p.padded_q + query.tile * kTileM) * kColumns, dq);
}

// Block: the main loop over query tiles. Copies of K, V and the first step have been started.
__device__ __forceinline__ void walk(const Params& p, const Work& work, unsigned char* shared, unsigned base,
                                     const Operands& at, Gradients& sums) {
    const int2* spans = reinterpret_cast<const int2*>(shared + kOffsetSpans);
    for (int step = 0; step < work.steps; ++step) {
        const int stage = step & 1;
        const QueryTile query = query_tile_at(p, work, step);
        const unsigned q_tile = base + kOffsetQ + stage * kTileBytesM;
        const unsigned do_tile = base + kOffsetDo + stage * kTileBytesM;
        const float2* stats = reinterpret_cast<const float2*>(shared + kOffsetStats + stage * kStatBytes);
        cp_async_wait();
        __syncthreads();  // Q and dO have arrived; P, dS and the other stage have been read
        if (step + 1 < work.steps) {
            load_step(p, work, base, step + 1, stage ^ 1);
        }
        cp_async_commit();

        float s[kSdpFragsM][kSdpFragsN][4] = {};
        multiply_sdp(s, q_tile + at.sdp_left, base + kOffsetK + at.sdp_right);
        probabilities(p, s, query, stats, spans, work.tile * kTileN);
        store_scores(shared + kOffsetP, s);

        float dp[kSdpFragsM][kSdpFragsN][4] = {};
        multiply_sdp(dp, do_tile + at.sdp_left, base + kOffsetV + at.sdp_right);
        subtract_delta(dp, s, stats);
        store_scores(shared + kOffsetDs, dp);
        __syncthreads();  // P and dS are complete

        step_dq(p, work, query, base, at);
        multiply_dkv(sums.dv, base + kOffsetP + at.dkv_left, do_tile + at.dkv_right);
        multiply_dkv(sums.dk, base + kOffsetDs + at.dkv_left, q_tile + at.dkv_right);
    }
}

// ---- Kernels -------------------------------------------------------------------------------------------------------

// Thread: dot product of 8 elements.
__device__ __forceinline__ float dot(const element* a, const element* b) {
    float sum = 0.0f;
    const uint4 wide_a = *reinterpret_cast<const uint4*>(a);
    const uint4 wide_b = *reinterpret_cast<const uint4*>(b);
    a = reinterpret_cast<const element*>(&wide_a);
    b = reinterpret_cast<const element*>(&wide_b);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        sum += to_float(a[e]) * to_float(b[e]);
    }
    return sum;
}

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

// Grid: tiles_m x batch x heads_q. row_stats (lse * log2 e, delta), and zeros for the dQ sums.
extern "C" __global__ void __launch_bounds__(kThreads)
attnforge_bwd_sm90_bf16_d128_spans_a16_m64_n128_w8_s2_a2_b4_c2_h1_o0_preprocess(const __grid_constant__ Params p) {
    constexpr int lanes = 16;  // threads that share a row
    const int head = blockIdx.x % p.heads_q;
    const int batch = blockIdx.x / p.heads_q % p.batch;
    const int tile = blockIdx.x / (p.heads_q * p.batch);
    const long long plane = static_cast<long long>(batch) * p.heads_q + head;
    const element* out = static_cast<const element*>(p.out.data) + batch * p.out.batch + head * p.out.head;
    const element* dout = static_cast<const element*>(p.dout.data) + batch * p.dout.batch + head * p.dout.head;
    float2* stats = reinterpret_cast<float2*>(p.delta) + plane * p.padded_q;
    for (int i = threadIdx.x / lanes; i < kTileM; i += kThreads / lanes) {
        const int row = tile * kTileM + i;
        const int chunk = threadIdx.x % lanes;
        float sum = 0.0f;
        if (row < p.seq_q && chunk < kChunks) {
            sum = dot(out + row * p.out.row + chunk * 8, dout + row * p.dout.row + chunk * 8);
        }
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
        }
        if (chunk == 0) {
            // 2^(x - inf) = 0: rows without gradients get P = 0.
            const float log2e = 1.4426950408889634f;
            const float2 found = row_stats(p, plane, row, sum);
            const bool empty = found.x == __int_as_float(0xff800000);
            stats[row] = make_float2(empty ? __int_as_float(0x7f800000) : found.x * log2e, found.y);
        }
    }
    float4* dq = reinterpret_cast<float4*>(p.dq_accum + (plane * p.padded_q + tile * kTileM) * kColumns);
    for (int i = threadIdx.x; i < kTileM * kColumns / 4; i += kThreads) {
        dq[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float4* dkv = reinterpret_cast<float4*>(p.dkv_accum);
    const long long quads = 2LL * p.batch * p.heads_kv * p.padded_k * kColumns / 4;
    const long long step = static_cast<long long>(gridDim.x) * kThreads;
    for (long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x; i < quads; i += step) {
        dkv[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Grid: tiles_n x batch x heads_q blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
attnforge_bwd_sm90_bf16_d128_spans_a16_m64_n128_w8_s2_a2_b4_c2_h1_o0(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = shared_address(shared);
    const Work work = work_at(p, blockIdx.x);
    const int key0 = work.tile * kTileN;
    Gradients sums = {};
    load_first(p, work, base);
    for (int i = threadIdx.x; i < kTileN; i += kThreads) {
        reinterpret_cast<int2*>(shared + kOffsetSpans)[i] = span_of(p, key0 + i);
    }
    walk(p, work, shared, base, operands_of(threadIdx.x / 32, threadIdx.x % 32), sums);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    if (work.steps > 0) {
        add_dkv(dk_sums(p, work.batch, work.head_kv, key0), sums.dk);
        add_dkv(dv_sums(p, work.batch, work.head_kv, key0), sums.dv);
    }
}

// Grid: tiles_n x batch x heads_kv. dK = scale * sums and dV = sums, back from fragment order to rows.
extern "C" __global__ void __launch_bounds__(kThreads)
attnforge_bwd_sm90_bf16_d128_spans_a16_m64_n128_w8_s2_a2_b4_c2_h1_o0_postprocess_dkv(const __grid_constant__ Params p) {
    const int head_kv = blockIdx.x % p.heads_kv;
    const int batch = blockIdx.x / p.heads_kv % p.batch;
    const int key0 = blockIdx.x / (p.heads_kv * p.batch) * kTileN;
    float dk[kDkvFragsN][kDkvFragsD][4];
    float dv[kDkvFragsN][kDkvFragsD][4];
    read_dkv(dk_sums(p, batch, head_kv, key0), dk);
    read_dkv(dv_sums(p, batch, head_kv, key0), dv);
    store_dk_dv(p, batch, head_kv, key0, dk, dv);
}

// Grid: tiles_m x batch x heads_q. dQ = scale * sums, back from fragment order to rows.
extern "C" __global__ void __launch_bounds__(kThreads)
attnforge_bwd_sm90_bf16_d128_spans_a16_m64_n128_w8_s2_a2_b4_c2_h1_o0_postprocess(const __grid_constant__ Params p) {
    const int head = blockIdx.x % p.heads_q;
    const int batch = blockIdx.x / p.heads_q % p.batch;
    const int query0 = blockIdx.x / (p.heads_q * p.batch) * kTileM;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const long long plane = static_cast<long long>(batch) * p.heads_q + head;
    const float* sums = p.dq_accum + (plane * p.padded_q + query0) * kColumns + warp * (kDqFragsM * kDqFragsD * 128);
    element* dq = static_cast<element*>(p.dq.data) + batch * p.dq.batch + head * p.dq.head;
    const int row0 = query0 + warp % kDqM * kDqFragsM * 16 + lane / 4;
    const int col0 = warp / kDqM * kDqFragsD * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kDqFragsM; ++i) {
#pragma unroll
        for (int j = 0; j < kDqFragsD; ++j) {
            const float* x = sums + (i * kDqFragsD + j) * 128 + lane * 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row0 + i * 16 + half * 8;
                if (row < p.seq_q) {
                    store_pair(dq + row * p.dq.row, col0 + j * 8, x[half * 2] * p.scale,
                               x[half * 2 + 1] * p.scale);
                }
            }
        }
    }
}
