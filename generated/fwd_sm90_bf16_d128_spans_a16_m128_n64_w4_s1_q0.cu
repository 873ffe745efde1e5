// attnforge_fwd_sm90_bf16_d128_spans_a16_m128_n64_w4_s1_q0
// Generated from templates/sm80/forward.cu.jinja; do not edit.
// Regenerate: python cli.py render --direction fwd --arch sm90 --dtype bf16 --head-dim 128 --mask spans --align 16
//     --set tile_m=128 --set tile_n=64 --set warps=4 --set stages=1 --set q_in_regs=0
//
//   tile_m     128   query rows per block
//   tile_n      64   keys per step of the main loop
//   warps        4   warps per block; each owns tile_m / warps query rows
//   stages       1   shared-memory buffers for K and for V
//   q_in_regs    0   1: keep the Q fragments in registers instead of shared memory

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
    const int* starts;  // (seq_k) spans: key j is visible to queries starts[j] <= i < ends[j]
    const int* ends;  // (seq_k)
    float* lse;  // (batch, heads_q, seq_q) natural log of the softmax denominator; -inf: empty row
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
    float scale;  // softmax scale, multiplies q k^T; 1e-30 to 2e38
    float scale_log2;  // scale * log2(e)
};

// ---- Specialisation ------------------------------------------------------------------------------------------------

constexpr int kHeadDim = 128;
constexpr int kTileM = 128;  // query rows of a block
constexpr int kTileN = 64;  // keys of a step
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kStages = 1;  // buffers of K and of V
constexpr int kChunks = (kHeadDim + 7) / 8;  // 16-byte chunks of a row, the last one filled up with zeros
constexpr int kPitch = 256;  // bytes between rows in shared memory
constexpr int kTileBytesM = kTileM * kPitch;
constexpr int kTileBytesN = kTileN * kPitch;
constexpr int kFragsM = kTileM / kWarps / 16;  // m16 fragments of a warp
constexpr int kFragsN = kTileN / 8;            // n8 fragments of S
constexpr int kFragsD = kChunks;               // n8 fragments of O
constexpr int kStepsD = kChunks / 2;           // k16 steps of Q K^T
constexpr int kSharedBytes = kTileBytesM + 2 * kStages * kTileBytesN;
constexpr int kOffsetQ = 0;
constexpr int kOffsetK = kTileBytesM;
constexpr int kOffsetV = kOffsetK + kStages * kTileBytesN;
static_assert(kSharedBytes == 65536, "codegen/families/sm80.py disagrees");

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

// ---- Shared-memory tiles -------------------------------------------------------------------------------------------

// Byte offset of 16-byte chunk `chunk` of row `row`. The XOR spreads the 8 rows of a matrix over all banks.
__device__ __forceinline__ constexpr unsigned tile_offset(int row, int chunk) {
    return row * kPitch + ((chunk ^ (row & 7)) << 4);
}

// Address `chunk` chunks right of `base`, a value of tile_offset on a 1024-byte aligned tile with chunk 0 or 1.
__device__ __forceinline__ unsigned tile_chunk(unsigned base, int chunk) {
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

// The query tile of the block with this rank; tiles with most work have the lowest rank.
__device__ __forceinline__ int owned_tile(const Params& p, int rank) {
    return __ldg(p.tile_order + rank);
}

// How many key tiles query tile `tile` visits.
__device__ __forceinline__ int visits(const Params& p, int tile) {
    return __ldg(p.tile_count + tile);
}

// Visit number `index`: key tile * 2 + (1 if some of its pairs are hidden).
__device__ __forceinline__ int visit(const Params& p, int tile, int index) {
    return __ldg(p.tile_list + static_cast<long long>(tile) * p.list_stride + index);
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

// One block per key tile: at its index in the list of each query tile, writes how the query tile sees it.
extern "C" __global__ void __launch_bounds__(kScheduleThreads)
attnforge_fwd_sm90_bf16_d128_spans_a16_m128_n64_w4_s1_q0_kinds(const __grid_constant__ Params p) {
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
attnforge_fwd_sm90_bf16_d128_spans_a16_m128_n64_w4_s1_q0_schedule(const __grid_constant__ Params p) {
    __shared__ unsigned votes[kScheduleThreads / 32];
    const int tile = blockIdx.x;
    int* list = p.tile_list + static_cast<long long>(tile) * p.list_stride;
    int total = 0;
    for (int base = 0; base < p.tiles_n; base += kScheduleThreads) {
        const int visited = base + threadIdx.x;
        // What _kinds wrote. Entries are overwritten only after every thread has read its own.
        const unsigned kind = visited < p.tiles_n ? list[visited] : 0;
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
attnforge_fwd_sm90_bf16_d128_spans_a16_m128_n64_w4_s1_q0_order(const __grid_constant__ Params p) {
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

// Warp: set S to -infinity where the mask hides a pair. `query0` is the thread's first query, `key0` the
// warp's first key.
__device__ __forceinline__ void apply_mask(const Params& p, float (&s)[kFragsM][kFragsN][4],
                                           int query0, int key0) {
    const int lane = threadIdx.x % 32;
    const float hidden = __int_as_float(0xff800000);
#pragma unroll
    for (int j = 0; j < kFragsN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = j * 8 + lane % 4 * 2 + c;
            const int2 span = span_of(p, key0 + column);
#pragma unroll
            for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int query = query0 + i * 16 + half * 8;
                    const bool seen = query >= span.x && query < span.y;
                    s[i][j][half * 2 + c] = seen ? s[i][j][half * 2 + c] : hidden;
                }
            }
        }
    }
}

// ---- Softmax -------------------------------------------------------------------------------------------------------

typedef float Scores[kFragsM][kFragsN][4];  // of S, then of P

// What a thread keeps of its rows: [i][half] is query first + i * 16 + half * 8.
struct Rows {
    int first;
    float o[kFragsM][kFragsD][4];
    float row_max[kFragsM][2];  // of S so far
    float row_sum[kFragsM][2];  // of P so far, this thread's columns only
};

// Thread: rows that have seen no key.
__device__ __forceinline__ Rows empty_rows(int first) {
    Rows rows = {};
    rows.first = first;
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
        rows.row_max[i][0] = rows.row_max[i][1] = __int_as_float(0xff800000);
    }
    return rows;
}

// P is 2^(c S - base), where base is c times the row maximum: the exponent takes one FMA. Where base is above kLarge,
// its rounding error would change P noticeably. There the row maximum is subtracted from S first; the difference is
// exact wherever P is not 0.
constexpr float kLarge = 4096.0f;

// A row maximum, or 0 for -infinity, that of a row that has seen nothing.
__device__ __forceinline__ float finite(float row_max) {
    return row_max == __int_as_float(0xff800000) ? 0.0f : row_max;
}

// What the exponents of a row are relative to; 0 if maxima are `large`, as S is relative to them then.
__device__ __forceinline__ float base_of(float row_max, bool large, float scale_log2) {
    return large ? 0.0f : finite(row_max) * scale_log2;
}

// The factor of O and of a row sum when the maximum of the row grows from `before` to `row_max`.
__device__ __forceinline__ float rescale_of(float before, float row_max, bool large, float scale_log2) {
    return exp2_approx((before - finite(row_max)) * scale_log2);
}

// Warp: online softmax step. S becomes P; O and the row sums are rescaled to the new row maxima.
__device__ __forceinline__ void softmax(Scores& s, Rows& rows, float scale_log2) {
    float row_max[kFragsM][2];  // with this tile
    bool moved = false;
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& most = row_max[i][half];
            most = rows.row_max[i][half];
#pragma unroll
            for (int j = 0; j < kFragsN; ++j) {
                most = fmaxf(most, fmaxf(s[i][j][half * 2], s[i][j][half * 2 + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            moved |= most != rows.row_max[i][half];
        }
    }
    bool some = false;
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            some |= fabsf(finite(row_max[i][half]) * scale_log2) > kLarge;
        }
    }
    const bool large = __any_sync(~0u, some);  // then maxima are subtracted from S
    // Maxima rarely move after the first few tiles. With few rows a warp rescales always: the branch costs registers.
    if (kFragsM == 1 || __any_sync(~0u, moved)) {
#pragma unroll
        for (int i = 0; i < kFragsM; ++i) {
            float rescale[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                rescale[half] = rescale_of(rows.row_max[i][half], row_max[i][half], large, scale_log2);
                rows.row_sum[i][half] *= rescale[half];
            }
#pragma unroll
            for (int j = 0; j < kFragsD; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    rows.o[i][j][e] *= rescale[e / 2];
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
        rows.row_max[i][0] = row_max[i][0];
        rows.row_max[i][1] = row_max[i][1];
    }
    if (large) {
#pragma unroll
        for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
            for (int j = 0; j < kFragsN; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    s[i][j][e] -= finite(row_max[i][e / 2]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float base = base_of(row_max[i][half], large, scale_log2);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kFragsN; ++j) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& value = s[i][j][half * 2 + c];
                    value = exp2_approx(value * scale_log2 - base);
                    sum += value;
                }
            }
            rows.row_sum[i][half] += sum;
        }
    }
}

// Warp: the epilogue. O divided by the row sums goes to `out`, the log-sum-exp of each row to `lse`.
__device__ __forceinline__ void store(const Params& p, const Rows& rows, element* out, float* lse) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = rows.row_sum[i][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
            const int row = rows.first + i * 16 + half * 8;
            if (row >= p.seq_q) {
                continue;
            }
            if (lane % 4 == 0) {
                const float ln2 = 0.6931471805599453f;
                const float empty = __int_as_float(0xff800000);
                lse[row] = sum == 0.0f ? empty : rows.row_max[i][half] * p.scale + log2_approx(sum) * ln2;
            }
            element* target = out + row * p.out.row;
#pragma unroll
            for (int j = 0; j < kFragsD; ++j) {
                const float* x = rows.o[i][j] + half * 2;
                store_pair(target, j * 8 + lane % 4 * 2, x[0] * inverse, x[1] * inverse);
            }
        }
    }
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Where the products of a warp read Q, K and V: addresses for ldmatrix, of the first stage.
struct Operands {
    unsigned q;
    unsigned k, v;
};

// Warp: fragments of Q for k16 step `k`.
__device__ __forceinline__ void load_q(unsigned (&a)[kFragsM][4], unsigned q, int k) {
#pragma unroll
    for (int i = 0; i < kFragsM; ++i) {
        ldmatrix(a[i], tile_chunk(q, k * 2) + i * 16 * kPitch);
    }
}

// Warp: S = Q K^T, K of buffer `stage`.
__device__ __forceinline__ void multiply_qk(Scores& s, const Operands& operands, int stage) {
    const unsigned q = operands.q;
    const unsigned k = operands.k + stage * kTileBytesN;
    unsigned a[2][kFragsM][4];
    unsigned b[2][4];
    load_q(a[0], q, 0);
    ldmatrix(b[0], k);
#pragma unroll
    for (int step = 0; step < kStepsD; ++step) {
#pragma unroll
        for (int j = 0; j < kFragsN; j += 2) {
            // Fetch the next operands before using these, so that the tensor cores need not wait for shared memory.
            const int now = (step * kFragsN + j) / 2 & 1;
            if (j + 2 < kFragsN) {
                ldmatrix(b[now ^ 1], tile_chunk(k, step * 2) + (j + 2) * 8 * kPitch);
            } else if (step + 1 < kStepsD) {
                load_q(a[(step + 1) & 1], q, step + 1);
                ldmatrix(b[now ^ 1], tile_chunk(k, step * 2 + 2));
            }
#pragma unroll
            for (int i = 0; i < kFragsM; ++i) {
                mma(s[i][j], a[step & 1][i], b[now][0], b[now][1]);
                mma(s[i][j + 1], a[step & 1][i], b[now][2], b[now][3]);
            }
        }
    }
}

// Warp: O += P V, V of buffer `stage` transposed as it is read. Accumulators of S have the layout of an A operand.
__device__ __forceinline__ void multiply_pv(float (&o)[kFragsM][kFragsD][4], const Scores& s, const Operands& operands,
                                            int stage) {
    const unsigned v = operands.v + stage * kTileBytesN;
    unsigned b[2][4];
    ldmatrix_transposed(b[0], v);
#pragma unroll
    for (int step = 0; step < kFragsN / 2; ++step) {
        unsigned a[kFragsM][4];
#pragma unroll
        for (int i = 0; i < kFragsM; ++i) {
            a[i][0] = pack(s[i][step * 2][0], s[i][step * 2][1]);
            a[i][1] = pack(s[i][step * 2][2], s[i][step * 2][3]);
            a[i][2] = pack(s[i][step * 2 + 1][0], s[i][step * 2 + 1][1]);
            a[i][3] = pack(s[i][step * 2 + 1][2], s[i][step * 2 + 1][3]);
        }
#pragma unroll
        for (int j = 0; j + 1 < kFragsD; j += 2) {
            const int now = (step * (kFragsD / 2) + j / 2) & 1;
            if (j + 3 < kFragsD) {
                ldmatrix_transposed(b[now ^ 1], tile_chunk(v, j + 2) + step * 16 * kPitch);
            } else if (step + 1 < kFragsN / 2) {
                ldmatrix_transposed(b[now ^ 1], v + (step + 1) * 16 * kPitch);
            }
#pragma unroll
            for (int i = 0; i < kFragsM; ++i) {
                mma(o[i][j], a[i], b[now][0], b[now][1]);
                mma(o[i][j + 1], a[i], b[now][2], b[now][3]);
            }
        }
    }
}

// ---- Main loop -----------------------------------------------------------------------------------------------------

// A work tile: kTileM query rows of one head.
struct Work {
    int head, batch, tile;
    int visits;  // how many key tiles its rows see
    const element *q, *k, *v;  // the first row of the tile; the first rows of the kv head
};

// Work tile number `index`.
__device__ __forceinline__ Work work_at(const Params& p, int index) {
    const Place place = place_of(p, index);
    Work work;
    work.head = place.head;
    work.batch = place.batch;
    work.tile = owned_tile(p, place.rank);
    const int head_kv = work.head / (p.heads_q / p.heads_kv);
    const int query0 = work.tile * kTileM;
    work.q = static_cast<const element*>(p.q.data) + work.batch * p.q.batch + work.head * p.q.head + query0 * p.q.row;
    work.k = static_cast<const element*>(p.k.data) + work.batch * p.k.batch + head_kv * p.k.head;
    work.v = static_cast<const element*>(p.v.data) + work.batch * p.v.batch + head_kv * p.v.head;
    work.visits = visits(p, work.tile);
    return work;
}

// Block: start copying the keys from `key0` on to buffer `stage` of K, and the same rows of V.
__device__ __forceinline__ void load_k(const Params& p, const Work& work, unsigned base, int stage, int key0) {
    load_kv_tile(base + kOffsetK + stage * kTileBytesN, work.k + key0 * p.k.row, p.k.row, p.seq_k - key0);
}
__device__ __forceinline__ void load_v(const Params& p, const Work& work, unsigned base, int stage, int key0) {
    load_kv_tile(base + kOffsetV + stage * kTileBytesN, work.v + key0 * p.v.row, p.v.row, p.seq_k - key0);
}

// Block: add all key tiles that the rows of `work` see. V is copied while S is computed, and the next K during softmax.
__device__ __forceinline__ void attend(const Params& p, const Work& work, unsigned base, const Operands& operands,
                                       Rows& rows) {
    int entry = work.visits > 0 ? visit(p, work.tile, 0) : 0;
    if (work.visits > 0) {
        load_k(p, work, base, 0, (entry >> 1) * kTileN);
    }
    cp_async_commit();
    for (int index = 0; index < work.visits; ++index) {
        const int key0 = (entry >> 1) * kTileN;
        cp_async_wait();
        __syncthreads();  // K has arrived; V has been read
        load_v(p, work, base, 0, key0);
        cp_async_commit();

        Scores s = {};
        multiply_qk(s, operands, 0);
        if (entry & 1) {
            apply_mask(p, s, rows.first, key0);
        }

        cp_async_wait();
        __syncthreads();  // V has arrived; K has been read
        if (index + 1 < work.visits) {
            entry = visit(p, work.tile, index + 1);
            load_k(p, work, base, 0, (entry >> 1) * kTileN);
        }
        cp_async_commit();

        softmax(s, rows, p.scale_log2);
        multiply_pv(rows.o, s, operands, 0);
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------------------

// Grid: tiles_m x batch x heads_q blocks.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
attnforge_fwd_sm90_bf16_d128_spans_a16_m128_n64_w4_s1_q0(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = shared_address(shared);
    const int warp_row = threadIdx.x / 32 * kFragsM * 16;  // of the tile, the warp's first
    const int lane = threadIdx.x % 32;
    const Work work = work_at(p, blockIdx.x);

    const unsigned q_warp = base + kOffsetQ + tile_offset(warp_row + row_of_a(lane), chunk_of_a(lane));
    Operands operands;
    operands.k = base + kOffsetK + tile_offset(row_of_b(lane), chunk_of_b(lane));
    operands.v = base + kOffsetV + tile_offset(row_of_a(lane), chunk_of_a(lane));
    Rows rows = empty_rows(work.tile * kTileM + warp_row + lane / 4);

    load_q_tile(base + kOffsetQ, work.q, p.q.row, p.seq_q - work.tile * kTileM);
    operands.q = q_warp;
    attend(p, work, base, operands, rows);
    asm volatile("cp.async.wait_group 0;" ::: "memory");

    element* out = static_cast<element*>(p.out.data) + work.batch * p.out.batch + work.head * p.out.head;
    store(p, rows, out, p.lse + (static_cast<long long>(work.batch) * p.heads_q + work.head) * p.seq_q);
}
