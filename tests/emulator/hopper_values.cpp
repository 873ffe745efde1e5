// Enough of Hopper to run a kernel of 16-bit types on the CPU, a few blocks or clusters at a time: a fiber per thread,
// warps in random order. Copies land, and products are done, as late as the waits for them allow.
#include "hopper_values.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "fibers.h"

// As in the text of kernels; words: data, strides in elements of batch, head and row; rows, columns of a box, its rows,
// its panels; columns that a column coordinate may have.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// ---- Fibers ---------------------------------------------------------------------------------------------------------

Index blockIdx, gridDim;
Index* current_thread;
unsigned char* shared_memory;
size_t shared_size;

namespace {  // for kernels may have types of the same names

struct Product {  // one wgmma of a thread
    float* d;
    int n, add, fragment, by_rows_a, by_rows_b;
    const unsigned* a;  // registers, which must not change until the product is done
    unsigned long long left, right;
};
struct Fiber {
    Context context;
    Index index;
    int block = 0;
    bool done = false;
    std::vector<Product> open;
    std::deque<std::vector<Product>> groups;  // that are not done
    long committed = 0;                       // groups in all
    std::vector<std::function<void()>> started, writes;  // of its additions and stores by TMA
    std::deque<std::vector<std::function<void()>>> reads;  // of them, groups that are committed
    long fenced = 0;      // stores to shared memory before its last proxy_fence
    bool waited = false;  // for the kernel before
};
struct Barrier {
    int count, pending;
    long long bytes;
    int phase;
};
struct Landing {  // of a copy
    std::function<void()> move;
    int bytes;
};
struct Cluster {
    int first = 0;  // of its blocks in the grid
    int met = 0;
    long meetings = 0;
};
struct Block {
    unsigned slowness = 1;  // one of so many turns is taken, so that a block may be far behind its peer
    std::vector<unsigned char> memory;
    std::vector<long> stores;  // by address / 16, of 16 bytes: the number of the last one, or 0
    bool waited = false;      // has a thread waited for the kernel before?
    std::map<unsigned, Barrier> barriers;
    std::multimap<unsigned, Landing> copies;  // by barrier
    struct {
        int arrived;
        long over;
    } named[16];
};

}  // namespace

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Stack> stacks;
static std::vector<Block> blocks;
static std::vector<Cluster> clusters;  // that run
static int blocks_of_cluster, threads_of_cluster;
static Context scheduler;
static Fiber* current;
static void (*call_kernel)(const void*);
static const void* called;
static std::mt19937 draw;
static long progress;
static bool hurry;  // has nothing moved for long? Then no block is slow, and copies land when they are waited for
static bool reads_late;  // does TMA take long at times, so that others come to a place before it has been read?
static std::string said;  // what went wrong
static const float *sums_begin, *sums_end;  // that TMA may add to
int broken;

extern "C" void prepare(unsigned seed, int change, const float* sums, long count) {
    draw.seed(seed);
    reads_late = seed % 2;
    broken = change;
    sums_begin = sums, sums_end = sums + count;
    said.clear();
}
const char* what_went_wrong() { return said.c_str(); }

void give_way() { switch_to(current->context, scheduler); }
void stop(const char* why, long long value) {
    said = "block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x) + ": " + why + " " +
           std::to_string(value);
    for (;;) {
        give_way();
    }
}
static void call_all(std::vector<std::function<void()>>& actions) {
    for (const auto& act : actions) {
        act();
    }
    actions.clear();
}
static void run_fiber() {
    call_kernel(called);
    if (!current->started.empty() || !current->reads.empty()) {
        stop("a thread ends while TMA may read its shared memory: groups", current->reads.size());
    }
    current->done = true;
    ++progress;
    give_way();
}
static unsigned char* memory_of(int block) {
    const auto begin = reinterpret_cast<uintptr_t>(blocks[block].memory.data());
    return reinterpret_cast<unsigned char*>((begin + 1023) / 1024 * 1024);
}
static Block& here() { return blocks[current->block]; }
static Warp& my_warp() { return warps[(current - fibers.data()) / 32]; }
void** arrive_at_warp(void* operand) {
    ++progress;
    return my_warp().arrive(threadIdx.x % 32, operand);
}
void release_warp() { my_warp().release(); }
// All threads of a cluster; those of one block meet as all do.
static void meet_all() {
    const int number = current->block / blocks_of_cluster;
    Cluster& cluster = clusters[number];
    const long meeting = cluster.meetings;
    ++progress;
    int alive = 0;
    for (int i = 0; i < threads_of_cluster; ++i) {
        alive += !fibers[number * threads_of_cluster + i].done;
    }
    if (++cluster.met == alive) {
        cluster.met = 0;
        ++cluster.meetings;
    }
    while (cluster.meetings == meeting) {
        give_way();
    }
}
int __syncthreads_count(bool) { meet_all(); return 0; }
int threads_of_block() { return 0; }

// Cluster `number` of those that run becomes the one whose blocks begin with `first`.
static void start(int number, int first) {
    clusters[number] = {};
    clusters[number].first = first;
    for (int i = 0; i < blocks_of_cluster; ++i) {
        Block& block = blocks[number * blocks_of_cluster + i];
        block.slowness = 1 << draw() % 5;
        std::fill(block.memory.begin(), block.memory.end(), 0xff);
        std::fill(block.stores.begin(), block.stores.end(), 0);
        block.waited = false;
        block.barriers.clear();
        block.copies.clear();
        for (auto& named : block.named) {
            named = {0, 0};
        }
    }
    const int threads = threads_of_cluster / blocks_of_cluster;
    for (int i = number * threads_of_cluster; i < (number + 1) * threads_of_cluster; ++i) {
        call_all(fibers[i].writes);
        fibers[i] = {};
        fibers[i].index = {static_cast<unsigned>(i % threads)};
        fibers[i].block = i / threads;
        warps[i / 32] = {};
        make_context(fibers[i].context, stacks[i], run_fiber);
    }
}
static bool runs(int number) {
    for (int i = 0; i < threads_of_cluster; ++i) {
        if (!fibers[number * threads_of_cluster + i].done) {
            return true;
        }
    }
    return false;
}
static void run_warp(size_t warp) {
    const unsigned first = draw();  // lane: one lands what those before it have just waited for
    for (unsigned i = 0; i < 32; ++i) {
        Fiber& fiber = fibers[warp * 32 + (first + i) % 32];
        if (!fiber.done && said.empty()) {
            current = &fiber;
            current_thread = &fiber.index;
            const Cluster& cluster = clusters[fiber.block / blocks_of_cluster];
            blockIdx = {static_cast<unsigned>(cluster.first + fiber.block % blocks_of_cluster)};
            shared_memory = memory_of(fiber.block);
            switch_to(scheduler, fiber.context);
        }
    }
}

bool run_grid(void (*call)(const void*), const void* kernel, int count, int size, int together, int threads,
              size_t shared) {
    call_kernel = call, called = kernel;
    gridDim = {static_cast<unsigned>(count * size)};
    shared_size = shared;
    blocks_of_cluster = size, threads_of_cluster = size * threads;
    together = min(together, count);
    clusters = std::vector<Cluster>(together);
    blocks = std::vector<Block>(together * size);
    for (Block& block : blocks) {
        block.memory.resize(shared + 1024);
        block.stores.resize(shared / 16);
    }
    fibers = std::vector<Fiber>(together * threads_of_cluster);
    warps = std::vector<Warp>(fibers.size() / 32);
    stacks = std::vector<Stack>(fibers.size());
    int started = 0;
    for (; started < together; ++started) {
        start(started, started * size);
    }
    long seen = -1;
    int still = 0;
    for (bool any = true; any && said.empty();) {
        for (size_t turn = 0; turn < warps.size(); ++turn) {
            const size_t warp = draw() % warps.size();
            if (hurry || draw() % blocks[fibers[warp * 32].block].slowness == 0) {
                run_warp(warp);
            }
            call_all(fibers[draw() % fibers.size()].writes);
        }
        any = false;
        for (int i = 0; i < together; ++i) {
            if (!runs(i) && started < count) {
                start(i, started++ * size);
            }
            any |= runs(i);
        }
        still = progress == seen ? still + 1 : 0;
        seen = progress;
        hurry = still > 1000;
        if (still > 1200) {
            said = "nothing moves";
        }
    }
    for (Fiber& fiber : fibers) {
        call_all(fiber.writes);
    }
    // Tests load a library for each kernel, and none is unloaded: kept, this would be 30 MB of each.
    blocks = std::vector<Block>();
    stacks = std::vector<Stack>();
    return said.empty();
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

unsigned char* shared_at(unsigned address, unsigned bytes) {
    if (address + size_t{bytes} > shared_size || address % min(bytes, 16u) != 0) {
        stop("bad shared address", address);
    }
    return shared_memory + address;
}
float widen(unsigned x) { return __uint_as_float(x << 16); }
static unsigned narrow(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
unsigned pack(float low, float high) { return narrow(low) | narrow(high) << 16; }
// Matrices of 8 x 8 elements; lane l gives the address of row l % 8 of matrix l / 8, as it is in shared memory.
template <int matrices, bool transposed>
static void store_matrices(unsigned address, const unsigned (&r)[4]) {
    struct Lane {
        unsigned address, r[4];
    } operand = {address, {r[0], r[1], r[2], r[3]}};
    together(&operand, [](Lane** lanes) {
        for (int x = 0; x < matrices * 64; ++x) {
            const int m = x / 64, row = x / 8 % 8, column = x % 8;
            const unsigned pair = lanes[row * 4 + column / 2]->r[m];
            const unsigned short element = column % 2 ? pair >> 16 : pair;
            const int line = transposed ? column : row, place = transposed ? row : column;
            std::memcpy(shared_at(lanes[m * 8 + line]->address, 16) + place * 2, &element, 2);
            note_store(lanes[m * 8 + line]->address);
        }
    });
}
void ldmatrix(unsigned (&r)[4], unsigned address) {
    struct Lane {
        unsigned address, *r;
    } operand = {address, r};
    together(&operand, [](Lane** lanes) {
        for (int m = 0; m < 4; ++m) {
            for (int lane = 0; lane < 32; ++lane) {
                const unsigned line = lanes[m * 8 + lane / 4]->address;
                std::memcpy(&lanes[lane]->r[m], shared_at(line, 16) + lane % 4 * 4, 4);
            }
        }
    });
}
void load_bounds(unsigned address, int* start, int* end) {
    const auto* words = reinterpret_cast<const int*>(shared_at(address, 16));
    start[0] = words[0], end[0] = words[1], start[1] = words[2], end[1] = words[3];
}
void stmatrix(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    store_matrices<4, false>(address, {r0, r1, r2, r3});
}
void stmatrix_half(unsigned address, unsigned r0, unsigned r1) {
    store_matrices<2, false>(address, {r0, r1, 0, 0});
}
void stmatrix_transposed(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    store_matrices<4, true>(address, {r0, r1, r2, r3});
}
void stmatrix_transposed(unsigned address, unsigned r0, unsigned r1) {
    store_matrices<2, true>(address, {r0, r1, 0, 0});
}
int block_rank() { return current->block % blocks_of_cluster; }
// Stops if it has left: its shared memory is another block's.
static int block_of_rank(unsigned rank) {
    const int block = current->block - current->block % blocks_of_cluster + rank;
    const int threads = threads_of_cluster / blocks_of_cluster;
    const auto first = fibers.begin() + block * threads;
    if (std::all_of(first, first + threads, [](const Fiber& fiber) { return fiber.done; })) {
        stop("reads, sends to or arrives at a block that has left, rank", rank);
    }
    return block;
}

// ---- Barriers and copies --------------------------------------------------------------------------------------------

static Barrier& barrier_at(Block& block, unsigned address) {
    const auto found = block.barriers.find(address);
    if (found == block.barriers.end()) {
        stop("no barrier at", address);
    }
    return found->second;
}
static void end_phase(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.pending = barrier.count;
        ++barrier.phase;
        ++progress;
    }
}
static void arrive_in(Block& block, unsigned address, int bytes) {
    Barrier& barrier = barrier_at(block, address);
    if (--barrier.pending < 0) {
        stop("more arrivals than a barrier takes at", address);
    }
    barrier.bytes += bytes;
    end_phase(barrier);
}
void barrier_init(unsigned address, int count) { here().barriers[address] = {count, count, 0, 0}; }
void barrier_arrive(unsigned address) {
    arrive_in(here(), address, 0);
    for (unsigned turns = draw() % 8; turns > 0; --turns) {  // who arrived too early is overtaken
        give_way();
    }
}
void barrier_expect(unsigned address, int bytes) { arrive_in(here(), address, bytes); }
static void hesitate() {  // for up to 255 turns, at times
    if (draw() % 8 == 0) {
        for (int turns = draw() % 256; turns > 0; --turns, ++progress) {
            give_way();
        }
    }
}
void barrier_arrive_at(unsigned address, unsigned block_rank) {
    hesitate();
    arrive_in(blocks[block_of_rank(block_rank)], address, 0);
}
static void land(Block& block, unsigned address) {
    for (auto copy = block.copies.find(address); copy != block.copies.end(); copy = block.copies.find(address)) {
        copy->second.move();
        Barrier& barrier = barrier_at(block, address);
        barrier.bytes -= copy->second.bytes;
        block.copies.erase(copy);
        end_phase(barrier);
    }
}
void barrier_wait(unsigned address, unsigned parity) {
    Barrier& barrier = barrier_at(here(), address);
    while (barrier.phase % 2 == static_cast<int>(parity)) {
        if (hurry || draw() % 64 == 0) {
            land(here(), address);
        }
        if (barrier.phase % 2 == static_cast<int>(parity)) {
            give_way();
        }
    }
    if (draw() % 64 == 0) {
        give_way();
    }
}
void cluster_sync() { meet_all(); }
static long arrive_named(int id, int threads) {
    auto& named = here().named[id];
    const long over = named.over;
    ++progress;
    if (++named.arrived == threads) {
        named.arrived = 0;
        ++named.over;
    }
    return over;
}
void named_arrive(int id, int threads) { arrive_named(id, threads); }
void named_sync(int id, int threads) {
    const long over = arrive_named(id, threads);
    while (here().named[id].over == over) {
        give_way();
    }
}

template <typename Move>
static void each_chunk(const TensorMap& map, int column, int row, int panel, int head, int batch, Move move) {
    const auto* words = reinterpret_cast<const long long*>(map.words);
    auto* data = reinterpret_cast<unsigned short*>(words[0]) + batch * words[1] + head * words[2];
    const int columns = words[5], rows = words[6], panels = words[7];
    unsigned place = 0;
    for (int i = 0; i < panels; ++i) {
        for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < columns; c += 8, place += 16) {
                const bool inside = row + r < words[4] && column + c < words[8];
                move(place, inside ? data + (row + r) * words[3] + (panel + i) * columns + column + c : nullptr);
            }
        }
    }
}
static void require_fence(unsigned address) {  // of this thread, since 16 bytes here were stored
    if (here().stores[address / 16] > current->fenced) {
        stop("TMA reads what has not been fenced at", address);
    }
}
// Where 16 bytes at this address are, in rows of 128, 64 or 32 bytes.
static unsigned swizzled(unsigned address, unsigned row) { return address ^ (address >> 7 & (row / 16 - 1)) << 4; }
static void copy_box(int block, unsigned dst, const TensorMap& map, unsigned barrier, int column, int row, int panel,
                     int head, int batch) {
    unsigned char* memory = memory_of(block);
    const int bytes = map.words[5] * map.words[6] * map.words[7] * 2;
    const unsigned width = map.words[5] * 2;
    shared_at(dst + bytes - 16, 16);
    std::memset(memory + dst, 0xff, bytes);
    blocks[block].copies.insert({barrier, {[=, &map] {
        each_chunk(map, column, row, panel, head, batch, [=](unsigned place, const unsigned short* from) {
            unsigned char* to = memory + swizzled(dst + place, width);
            from ? std::memcpy(to, from, 16) : std::memset(to, 0, 16);
        });
    }, bytes}});
}
void tma_load(unsigned dst, const TensorMap& map, unsigned barrier, int column, int row, int panel, int head,
              int batch) {
    copy_box(current->block, dst, map, barrier, column, row, panel, head, batch);
}
void tma_multicast(unsigned dst, const TensorMap& map, unsigned barrier, int column, int row, int panel, int head,
                   int batch) {
    for (int rank = 0; rank < 2; ++rank) {
        copy_box(block_of_rank(rank), dst, map, barrier, column, row, panel, head, batch);
    }
}
void tma_store(const TensorMap& map, unsigned src, int column, int row, int panel, int head, int batch) {
    each_chunk(map, column, row, panel, head, batch, [=, &map](unsigned place, unsigned short* to) {
        const unsigned from = swizzled(src + place, map.words[5] * 2);
        require_fence(from);
        if (to) {
            current->started.push_back([=] { std::memcpy(to, shared_at(from, 16), 16); });
        }
    });
}
void cp_async(unsigned dst, const void* src, bool inside) {
    unsigned char* to = shared_at(dst, 16);
    current->started.push_back([=] {
        inside ? std::memcpy(to, src, 16) : std::memset(to, 0, 16);
        note_store(dst);
    });
}
void cp_async_wait() {
    call_all(current->started);
}
void bulk_load(unsigned dst, const void* src, int bytes, unsigned barrier) {
    unsigned char* to = shared_at(dst, 16);
    std::memset(to, 0xff, bytes);
    here().copies.insert({barrier, {[=] { std::memcpy(to, src, bytes); }, bytes}});
}
void bulk_send(unsigned dst, unsigned src, int bytes, unsigned barrier, unsigned rank) {
    unsigned char *to = memory_of(block_of_rank(rank)) + dst, *from = shared_memory + src;
    std::memset(to, 0xff, bytes);
    blocks[block_of_rank(rank)].copies.insert({barrier, {[=] { std::memcpy(to, from, bytes); }, bytes}});
}
// Beyond any shared memory, so that neither kind of address passes for the other.
static constexpr int kRankShift = 24;
unsigned cluster_address(unsigned address, unsigned rank) { return address + (rank + 1 << kRankShift); }
void read_block(void* x, int bytes, unsigned address, unsigned rank) {
    shared_at(address, bytes);
    std::memcpy(x, memory_of(block_of_rank(rank)) + address, bytes);
}
void send_quad(unsigned address, unsigned barrier, float x, float y, float z, float w) {
    const unsigned number = address >> kRankShift, place = address % (1 << kRankShift);
    if (number == 0 || barrier >> kRankShift != number) {
        stop("sends to no block, or not to that of its barrier: address", address);
    }
    const int block = block_of_rank(number - 1);
    shared_at(place, 16);
    unsigned char* to = memory_of(block) + place;
    barrier %= 1 << kRankShift;
    barrier_at(blocks[block], barrier);
    std::memset(to, 0xff, 16);
    const float4 quad = {x, y, z, w};
    blocks[block].copies.insert({barrier, {[=] { std::memcpy(to, &quad, 16); }, 16}});
}

// ---- Products: done when their group is waited for ------------------------------------------------------------------

// 8 elements of an operand, which the swizzle leaves together. `byte`: of their first, in its line.
static const unsigned short* eight_at(unsigned long long descriptor, int line, int byte) {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3fff) << 4;
    const unsigned code = descriptor >> 62;
    const unsigned row = code ? 256 >> code : 16;  // bytes, as the swizzle has them, or without one
    const unsigned inside = start % row;           // a range may start inside of a row
    if (inside + byte % row >= row && leading == 0) {
        stop("operand crosses a panel", byte);
    }
    const unsigned place = start + line / 8 * stride + line % 8 * row + byte / row * leading + byte % row;
    const unsigned address = swizzled(place, row);
    return reinterpret_cast<const unsigned short*>(shared_at(address, 16));
}
// Elements [first, first + count) x 16 of an operand: to[k * count + i].
static void read_operand(unsigned long long descriptor, int by_rows, int first, int count, double* to) {
    for (int i = 0; i < count * 2; ++i) {
        const int line = by_rows ? i % 16 : first + i / 2;
        const auto* eight = eight_at(descriptor, line, by_rows ? (first + i / 16 * 8) * 2 : i % 2 * 16);
        for (int j = 0; j < 8; ++j) {
            to[by_rows ? line * count + i / 16 * 8 + j : (i % 2 * 8 + j) * count + i / 2] = widen(eight[j]);
        }
    }
}
// Product `number` of the first group of each lane of a warp.
static void compute(Fiber* const* lanes, size_t number) {
    static double left[16 * 16], right[16 * 256];
    const Product& x = lanes[0]->groups.front()[number];
    const int columns = x.n * 2;
    if (x.fragment) {
        for (int i = 0; i < 256; ++i) {
            const int row = i % 16, k = i / 16;
            const unsigned pair = lanes[row % 8 * 4 + k % 8 / 2]->groups.front()[number].a[row / 8 + k / 8 * 2];
            left[i] = widen(k % 2 ? pair >> 16 : pair & 0xffff);
        }
    } else {
        read_operand(x.left, x.by_rows_a, lanes[0]->index.x / 32 % 4 * 16, 16, left);
    }
    read_operand(x.right, x.by_rows_b, 0, columns, right);
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < columns; column += 8) {
            double sums[8] = {};
            for (int k = 0; k < 16; ++k) {
                for (int i = 0; i < 8; ++i) {
                    sums[i] += left[k * 16 + row] * right[k * columns + column + i];
                }
            }
            for (int i = 0; i < 8; ++i) {
                const Product& of = lanes[row % 8 * 4 + i / 2]->groups.front()[number];
                float& d = of.d[column / 2 + row / 8 * 2 + i % 2];
                d = static_cast<float>((of.add ? d : 0.0) + sums[i]);
            }
        }
    }
}
void issue(float* d, int n, unsigned long long a, unsigned long long b, int add, int rows_a, int rows_b) {
    current->open.push_back({d, n, add, 0, rows_a, rows_b, nullptr, a, b});
}
void issue(float* d, int n, const unsigned (&a)[4], unsigned long long b, int add, int rows_b) {
    __syncwarp();  // where warps give way to each other, mistakes of their order show
    current->open.push_back({d, n, add, 1, 0, rows_b, a, 0, b});
}
void wgmma_commit() {
    current->groups.push_back(std::move(current->open));
    current->open.clear();
    ++current->committed;
}
// The products of a warp's groups up to number `last`.
static void compute_groups(Fiber* warp, long last) {
    Fiber* lanes[32];
    for (int i = 0; i < 32; ++i) {
        lanes[i] = warp + i;
    }
    for (; lanes[0]->committed - static_cast<long>(lanes[0]->groups.size()) < last;) {
        const size_t products = lanes[0]->groups.front().size();
        for (Fiber* lane : lanes) {
            if (lane->groups.empty() || lane->groups.front().size() != products) {
                stop("other products than in lane 0: lane", lane - warp);
            }
        }
        for (size_t number = 0; number < products; ++number) {
            compute(lanes, number);
        }
        for (Fiber* lane : lanes) {
            lane->groups.pop_front();
        }
    }
}
// A wgmma is one operation of its warpgroup, done for all four warps when one has waited for it. Kernels whose warps each
// release what they have read do not need that, so there a warp's part is done alone: more mistakes show.
void finish_products(int pending) {
    together(current, [=](Fiber** lanes) {  // as late as the last lane comes
        const long last = lanes[0]->committed - pending;
        if (!by_warpgroup) {
            compute_groups(lanes[0], last);
            return;
        }
        Fiber* const group = fibers.data() + (lanes[0] - fibers.data()) / 128 * 128;
        while (std::any_of(group, group + 128, [=](const Fiber& fiber) { return fiber.committed < last; })) {
            give_way();
        }
        for (int warp = 0; warp < 4; ++warp) {
            compute_groups(group + warp * 32, last);
        }
    });
}

// ---- Additions by TMA, and their order ------------------------------------------------------------------------------

static long stores;  // in all
void note_store(unsigned address) { blocks[current->block].stores[address / 16] = ++stores; }
void proxy_fence() { current->fenced = stores; }
void griddepcontrol_wait() { current->waited = here().waited = true; }

template <typename Move>
static void bulk_write(float* target, unsigned src, int bytes, Move move) {
    if (target < sums_begin || target + bytes / 4 > sums_end) {
        stop("added to other memory, bytes", bytes);
    }
    shared_at(src, 16), shared_at(src + bytes - 16, 16);
    for (unsigned at = src; at < src + bytes; at += 16) {
        require_fence(at);
    }
    current->started.push_back([=] {
        const auto* from = reinterpret_cast<const float*>(shared_at(src, 16));
        current->writes.push_back([=, parts = std::vector<float>(from, from + bytes / 4)] {
            for (size_t i = 0; i < parts.size(); ++i) {
                move(target[i], parts[i]);
            }
        });
    });
}
void bulk_reduce(float* target, unsigned src, int bytes) {
    bulk_write(target, src, bytes, [](float& sum, float part) { sum += part; });
}
void bulk_store(float* target, unsigned src, int bytes) {
    bulk_write(target, src, bytes, [](float& sum, float part) { sum = part; });
}
void tma_store_commit() {
    current->reads.push_back(std::move(current->started));
    current->started.clear();
}
static void finish_reads(size_t pending) {
    if (reads_late && current->reads.size() > pending) {
        hesitate();  // longer than a step, it may be
    }
    for (; current->reads.size() > pending; current->reads.pop_front()) {
        call_all(current->reads.front());
    }
}
void tma_store_wait() { finish_reads(0); }
void bulk_read_wait_all_but_last() { finish_reads(1); }
void bulk_reduce_wait() {
    tma_store_wait();
    call_all(current->writes);
}
void semaphore_wait(const int* semaphore, int value) {
    // By warpgroups, consumers wait for what another thread loads once it has waited.
    if (!current->waited && !(by_warpgroup && here().waited)) {
        stop("a semaphore before the kernel before has ended, value", value);
    }
    while (*semaphore < value) {
        give_way();
    }
}
void semaphore_release(int* semaphore) {
    ++*semaphore;
    ++progress;
}
