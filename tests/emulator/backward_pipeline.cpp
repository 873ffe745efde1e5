// The barriers, copies and products of the Hopper backward kernel on the CPU, in random turns. A fiber is a warp of the
// producers, or one half of a consumer's warp: halves go apart where the hardware lets lanes go apart. Shared memory
// holds no numbers, but which write each 16 bytes are from; backward_products.h says what follows from them.
#include "backward_pipeline.h"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

namespace {

enum Kind { kNothing, kTensorQ, kTensorDo, kTensorK, kTensorV, kTensorDk, kTensorDv, kStats, kOnes, kUnderWay,
            kS, kP, kDp, kDs, kDq, kDk, kDv };

// Rows of a tensor: a tile's first row, its head and batch.
struct Rows {
    int row, head, batch;
    bool operator==(const Rows& o) const { return row == o.row && head == o.head && batch == o.batch; }
    bool operator<(const Rows& o) const { return std::tie(batch, head, row) < std::tie(o.batch, o.head, o.row); }
};
Rows rows_of(int row, long long plane, int heads) {
    return {row, static_cast<int>(plane % heads), static_cast<int>(plane / heads)};
}
// What one thread or copy wrote at once.
struct Write {
    int kind;
    Rows queries, keys;
    bool copied;  // here by TMA, so that it and wgmma may read it without a fence
    bool same(const Write& o) const { return kind == o.kind && queries == o.queries && keys == o.keys; }
};
struct Cell {
    int write = 0, offset = 0;  // 0: never written; offset within what was written as a whole
};
struct Memory {
    std::vector<Cell> cells;  // of 16 bytes
    std::map<unsigned, int> words;  // the visits
    int number = 0, copies = 0;  // of the block in the grid; on their way to or from shared memory
    bool waited = false;  // for the kernel before
};
struct Range {
    unsigned from, to;
};
struct Read {  // by a product in flight
    std::vector<Range> ranges;
    std::vector<int> writes;
    int group;
};
// What an array of registers holds.
struct Value {
    int kind = kNothing;
    Rows queries, keys;
    bool masked = false;
    bool touched = false;  // since the last wgmma_fence
    int written = -1, read = -1;  // the last group of products that does so
    std::vector<Rows> sum;  // visits that dK or dV has
    bool row_stats = false;  // S or dP has those of its rows
};
struct State {
    std::vector<Read> reads;
    int group = 0, complete = 0;  // of products: the one being issued, the first that may be in flight
    std::map<const void*, Value> registers;
    int fenced = 0;  // writes before this one were there at its last fence
    int reading = 0, storing = 0, adding = 0;  // on their way: bulk copies that still read, all of them, other sums
    const int* polled = nullptr;
    int seen = 0;
    int work = -1;  // index of the work tile of a persistent block
};
struct Sum {
    int block;  // or work tile of a persistent one
    std::vector<Rows> visits;
};

}  // namespace

#include "machine.h"

constexpr int kResident = 3;  // blocks at a time
static Shape shape;
static Call call;
static std::vector<Write> writes;
static std::map<std::tuple<Rows, int>, std::vector<Sum>> dq_sums;  // query tile, consumer; Sum::visits are key tiles
static std::map<std::tuple<int, Rows, int>, std::vector<Sum>> dkv_sums;  // kDk or kDv, 64 keys, fiber
static bool before_ended;  // the kernel before

static int fibers_of_block() { return 4 + 8 * shape.consumers; }
static int lane() { return threadIdx.x % 32; }
static int warp() { return threadIdx.x / 32; }
static int half() { return lane() / 16; }
static void sync_warp() {
    if (warp() >= 4) {
        meet(here().aligned[warp()], 1, 2, true);
    }
}
int block_number() { return here().number; }
static int owner_of_sum() { return current->work >= 0 ? current->work : here().number; }
void __syncwarp() { sync_warp(); }
void __syncthreads() { meet(here().named[0], 1, fibers_of_block(), true); }
void named_sync(int id, int threads) { meet(here().named[id], 16, threads, true); }

// ---- The kernel before ----------------------------------------------------------------------------------------------

void griddepcontrol_wait() {
    wait_for([] { return before_ended; });
    here().waited = true;
}
static void require_before_ended() {
    require(before_ended, "the kernel before has not ended, and what it or a later one writes is touched");
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

static Cell& cell(unsigned slot, unsigned address) { return blocks[slot].cells[address / 16]; }
static int new_write(Write write) {
    writes.push_back(write);
    return writes.size() - 1;
}
static void fill(unsigned slot, Range range, int write, int offset) {
    for (unsigned address = range.from; address < range.to; address += 16, offset += 16) {
        cell(slot, address) = {write, offset};
    }
}
// What all of it is from, if that is one thing and complete, or nothing; `base` is where that thing starts.
static Write origin(const std::vector<Range>& ranges, unsigned base) {
    const Write first = writes[cell(blockIdx.x, ranges[0].from).write];
    for (const Range& range : ranges) {
        for (unsigned address = range.from; address < range.to; address += 16) {
            const Cell& found = cell(blockIdx.x, address);
            if (!writes[found.write].same(first) || found.offset != static_cast<int>(address - base)) {
                return writes[0];
            }
        }
    }
    return first;
}
static std::vector<int> snapshot(unsigned slot, const std::vector<Range>& ranges) {
    std::vector<int> found;
    for (const Range& range : ranges) {
        for (unsigned address = range.from; address < range.to; address += 16) {
            found.push_back(cell(slot, address).write);
        }
    }
    return found;
}
static void require_fenced(Range range) {
    for (unsigned address = range.from; address < range.to; address += 16) {
        const int write = cell(blockIdx.x, address).write;
        require(writes[write].copied || write < current->fenced, "an asynchronous read of what has not been fenced");
    }
}
void proxy_fence() { current->fenced = writes.size(); }
void store_int(unsigned address, int x) {
    give_way();
    here().words[address] = x;
}
int load_int(unsigned address) {
    give_way();
    require(here().words.count(address) > 0, "a visit is read before it is written");
    return here().words[address];
}

// ---- Copies ---------------------------------------------------------------------------------------------------------

// From the start of a copy on its target is neither what it was nor what it will be.
static void copy(Range range, unsigned barrier, Write write, int offset) {
    give_way();
    const unsigned slot = blockIdx.x;
    fill(slot, range, new_write({kUnderWay, {}, {}, true}), 0);
    ++blocks[slot].copies;
    later([=] {
        fill(slot, range, new_write(write), offset);
        --blocks[slot].copies;
        landed(slot, barrier, range.to - range.from);
    });
}
// Words of a TensorMap here: kind, columns, rows and panels of a box.
void tma_load(unsigned to, const TensorMap& map, unsigned barrier, int column, int row, int, int head, int batch) {
    const auto* box = map.words;
    const int panel = box[1] * box[2] * 2;
    const Rows rows{row, head, batch};
    const Range range{to, to + panel * static_cast<unsigned>(box[3])};
    copy(range, barrier, {static_cast<int>(box[0]), rows, rows, true}, column / static_cast<int>(box[1]) * panel);
}
void bulk_load(unsigned to, const float* stats, int bytes, unsigned barrier) {
    require_before_ended();
    const long long at = stats - call.delta, plane = at / (call.padded_q * 8LL);
    const Rows rows = rows_of(at % (call.padded_q * 8LL) / 8, plane, call.heads_q);
    copy({to, to + bytes}, barrier, {kStats, rows, rows, true}, 0);
}
// The source of a bulk copy stays until it has been read; then `arrive`, some time later.
static void copy_out(std::vector<Range> ranges, std::function<void()> arrive) {
    give_way();
    require_before_ended();
    for (const Range& range : ranges) {
        require_fenced(range);
    }
    const unsigned slot = blockIdx.x;
    const std::vector<int> before = snapshot(slot, ranges);
    Fiber* fiber = current;
    ++fiber->reading;
    ++fiber->storing;
    ++blocks[slot].copies;
    later([=] {
        require(snapshot(slot, ranges) == before, "something overwrites what a bulk copy reads");
        --fiber->reading;
        --blocks[slot].copies;
        later([=] {
            arrive();
            --fiber->storing;
        });
    });
}
void tma_store_wait() {
    Fiber* fiber = current;
    wait_for([=] { return fiber->reading == 0; });
}
void bulk_reduce_wait() {
    Fiber* fiber = current;
    wait_for([=] { return fiber->storing == 0; });
}
// Bulk copies do not heed it.
void __threadfence() {
    Fiber* fiber = current;
    wait_for([=] { return fiber->adding == 0; });
}

// Turns: a second look at the same value waits until it changes.
int load_acquire(const int* address) {
    if (current->polled == address) {
        const int seen = current->seen;
        wait_for([=] { return *address != seen; });
    }
    give_way();
    require_before_ended();
    current->polled = address;
    return current->seen = *address;
}
void add_release(int* address) {
    give_way();
    require_before_ended();
    const Fiber* last = current + (warp() >= 4);  // and the other half of a consumer's warp, which lane 0 speaks for
    for (const Fiber* fiber = current; fiber <= last; ++fiber) {
        require(fiber->storing == 0 && fiber->adding == 0, "a turn ends before its sums are there");
    }
    ++*address;
}
int atomicAdd(int* counter, int x) {
    give_way();
    require_before_ended();
    *counter += x;
    return *counter - x;
}
int note_work(int index) { return current->work = index; }

#include "backward_products.h"

// ---- Runs -----------------------------------------------------------------------------------------------------------

static void start_block(unsigned slot, int number) {
    const std::vector<Cell> cells(shape.shared_bytes / 16 + 1);
    require(blocks[slot].copies == 0, "a block leaves before its copies have ended");
    blocks[slot] = {};
    blocks[slot].cells = cells;
    blocks[slot].number = number;
    for (int i = 0; i < fibers_of_block(); ++i) {
        start(fibers[slot * fibers_of_block() + i], slot, i < 4 ? i * 32 : 128 + (i - 4) * 16);
    }
}

const char* run_blocks(void (*kernel)(), const Shape& of_kernel, const Call& of_call, int count, unsigned seed) {
    shape = of_kernel;
    call = of_call;
    random_bits.seed(seed);
    writes.assign(1, Write{kNothing, {-1, -1, -1}, {-1, -1, -1}, true});
    blocks.resize(kResident);
    fibers.resize(kResident * fibers_of_block());
    for (Fiber& fiber : fibers) {
        fiber.done = true;
    }
    for (Block& block : blocks) {
        block = {};
    }
    events.clear();
    dq_sums.clear();
    dkv_sums.clear();
    failure.clear();
    before_ended = false;
    const long time = random_bits() % (40 << random_bits() % 8);
    events.push_back({now + time, [] {
        before_ended = true;
        if (call.tile_counter != nullptr) {
            *call.tile_counter = 0;
        }
    }});
    gridDim.x = count;
    body = [=] {
        kernel();
        require(here().running > 1 || here().waited, "a block ends that has not waited for the kernel before");
    };
    int next = 0;
    do {
        for (unsigned slot = 0; slot < kResident && next < count; ++slot) {
            if (blocks[slot].running == 0) {
                start_block(slot, next++);
            }
        }
    } while (failure.empty() && take_turn());
    for (const Fiber& fiber : fibers) {
        require(fiber.done, "it hangs");
    }
    require_sums();
    return failure.c_str();
}
