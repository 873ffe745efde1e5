// The barriers and copies of the Hopper forward kernel on the CPU. One thread of the producer and two of each consumer
// warpgroup are fibers that run in random turns; copies and arrivals at another block take their time. What a kernel
// computes is left out: its products only note which rows of which tensor they read, and that these stay until they end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ucontext.h>

#define __device__ static
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct float2 {
    float x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float __int_as_float(int) { return 0.0f; }
template <class T>
static T __shfl_sync(unsigned, T x, int) { return x; }
using std::max;
using std::min;

// A row of a panel: 0 where nothing has landed.
struct Piece {
    int tensor = 0, column = 0, row = 0, head = 0, batch = 0;
    bool operator!=(const Piece& o) const {
        return std::tie(tensor, column, row, head, batch) != std::tie(o.tensor, o.column, o.row, o.head, o.batch);
    }
};
struct Barrier {
    int count = 0, pending = 0, bytes = 0, phase = 0;
};
struct Named {
    int arrived = 0, generation = 0;
};
struct Block {
    std::map<unsigned, Barrier> barriers;
    std::map<unsigned, Piece> shared;  // by address
    Named named[16], aligned[4];
    int running = 0;
};
struct Read {  // by a product in flight
    std::map<unsigned, Piece> pieces;
    int group;
};
struct Index {
    unsigned x;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Index thread, block;
    int speed;
    bool done = false;
    std::function<bool()> ready;
    std::deque<Read> reads;
    int group = 0;
    int sent = 0;  // arrivals at other blocks that are on their way
    Piece q;
    std::deque<std::pair<Piece, Piece>> scores;  // first row of Q, of K
    std::deque<Piece> values;
};
struct Event {
    long time;
    std::function<void()> happen;
};

static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static std::vector<Event> events;
static std::map<std::tuple<int, int, int, int>, int> stored;  // batch, head, tile, warpgroup: how often
static std::mt19937 random_bits;
static long now;
static Named everyone[1 << 10];  // by cluster
static Fiber* current;
static ucontext_t scheduler;
static std::function<void()> body;
static std::string failure;
static Index gridDim;
#define threadIdx (current->thread)
#define blockIdx (current->block)

static void require(bool condition, const char* what) {
    if (!condition && failure.empty()) {
        failure = what;
    }
}
static void wait_for(std::function<bool()> ready) {
    current->ready = std::move(ready);
    swapcontext(&current->context, &scheduler);
}
static void give_way() {
    wait_for([] { return true; });
}
static void later(std::function<void()> happen) { events.push_back({now + 1 + random_bits() % 60, std::move(happen)}); }
static Block& here() { return blocks[blockIdx.x]; }

// ---- Barriers -------------------------------------------------------------------------------------------------------

static void settle(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.pending = barrier.count;
        ++barrier.phase;
    }
}
static void arrive(unsigned block, unsigned address, int bytes) {
    Barrier& barrier = blocks[block].barriers[address];
    require(blocks[block].running > 0, "an arrival at a block that has left");
    require(barrier.pending > 0, "more arrivals than a barrier takes");
    --barrier.pending;
    barrier.bytes += bytes;
    settle(barrier);
}
static unsigned shared_address(const void*) { return 0; }
static void barrier_init(unsigned barrier, int count) { here().barriers[barrier] = {count, count, 0, 0}; }
static void barrier_init_fence() {}
static void barrier_expect(unsigned barrier, int bytes) {
    give_way();
    arrive(blockIdx.x, barrier, bytes);
}
static void barrier_arrive(unsigned barrier) { barrier_expect(barrier, 0); }
static void barrier_arrive_if(bool condition, unsigned barrier) {
    if (condition) {
        barrier_arrive(barrier);
    }
}
static void barrier_wait(unsigned barrier, unsigned parity) {
    Barrier* state = &here().barriers[barrier];
    wait_for([=] { return (state->phase & 1) != static_cast<int>(parity); });
}
static void meet(Named& barrier, int weight, int of, bool wait) {
    give_way();
    const int generation = barrier.generation;
    if ((barrier.arrived += weight) == of) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    require(barrier.arrived < of, "more threads than a named barrier takes");
    if (wait) {
        wait_for([&barrier, generation] { return barrier.generation != generation; });
    }
}
static void named_sync(int id, int threads) { meet(here().named[id], 64, threads, true); }
static void named_arrive(int id, int threads) { meet(here().named[id], 64, threads, false); }
static void __syncthreads() { meet(here().named[0], 1, 1 + 2 * kConsumers, true); }

// ---- Copies ---------------------------------------------------------------------------------------------------------

// Words of a TensorMap here: tensor, columns, rows and panels of a box.
template <class Box>
static void copy(unsigned block, unsigned to, const Box& map, unsigned barrier, Piece first) {
    const auto* box = map.words;
    later([=] {
        require(blocks[block].running > 0, "a copy to a block that has left");
        for (unsigned panel = 0; panel < box[3]; ++panel) {
            for (unsigned row = 0; row < box[2]; ++row) {
                Piece piece = first;
                piece.column += panel * box[1];
                piece.row += row;
                blocks[block].shared[to + (panel * box[2] + row) * box[1] * 2] = piece;
            }
        }
        Barrier& state = blocks[block].barriers[barrier];
        require(state.count > 0, "a copy towards a barrier that is none yet");
        state.bytes -= box[1] * box[2] * box[3] * 2;
        settle(state);
    });
}
template <class Box>
static void tma_load(unsigned to, const Box& map, unsigned barrier, int column, int row, int, int head, int batch) {
    give_way();
    copy(blockIdx.x, to, map, barrier, {static_cast<int>(map.words[0]), column, row, head, batch});
}
static void tma_store_wait() { give_way(); }
static void proxy_fence() {}
template <class... T>
static void tma_store(T&&...) {}
static void tma_store_commit() {}

// ---- Clusters -------------------------------------------------------------------------------------------------------

#ifdef CLUSTER
static unsigned member(unsigned rank) { return blockIdx.x / CLUSTER * CLUSTER + rank; }
static void barrier_arrive_at(unsigned barrier, unsigned rank) {
    give_way();
    const unsigned block = member(rank);
    Fiber* sender = current;
    ++sender->sent;
    later([=] {
        arrive(block, barrier, 0);
        --sender->sent;
    });
}
static void cluster_sync() {
    Fiber* self = current;
    wait_for([=] { return self->sent == 0; });  // it releases: what this thread has sent is there
    meet(everyone[blockIdx.x / CLUSTER], 1, CLUSTER * (1 + 2 * kConsumers), true);
}
template <class Box>
static void tma_multicast(unsigned to, const Box& map, unsigned barrier, int column, int row, int, int head, int batch) {
    give_way();
    for (unsigned rank = 0; rank < CLUSTER; ++rank) {
        copy(member(rank), to, map, barrier, {static_cast<int>(map.words[0]), column, row, head, batch});
    }
}
#endif

#include "pipeline_products.h"

// ---- Runs -----------------------------------------------------------------------------------------------------------

static void run_fiber() {
    body();
    --here().running;
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

// One fiber, or what has been on its way for long enough. False if nothing can go on.
static bool take_turn() {
    ++now;
    for (size_t i = 0; i < events.size(); ++i) {
        if (events[i].time <= now) {
            const auto happen = std::move(events[i].happen);
            events.erase(events.begin() + i);
            happen();
            return true;
        }
    }
    std::vector<Fiber*> able;
    for (Fiber& fiber : fibers) {
        if (!fiber.done && fiber.ready()) {
            able.insert(able.end(), fiber.speed, &fiber);
        }
    }
    if (able.empty()) {
        return !events.empty();
    }
    current = able[random_bits() % able.size()];
    swapcontext(&scheduler, &current->context);
    return true;
}

// Runs the kernel in a grid of `count` blocks; returns what was wrong, or nothing.
static std::string run_blocks(const Params& p, int count, unsigned seed) {
    random_bits.seed(seed);
    blocks.assign(count, {});
    fibers.assign(count * (1 + 2 * kConsumers), {});
    events.clear();
    stored.clear();
    failure.clear();
    std::fill(std::begin(everyone), std::end(everyone), Named{});
    gridDim.x = count;
    for (size_t i = 0; i < fibers.size(); ++i) {
        Fiber& fiber = fibers[i];
        const unsigned actor = i % (1 + 2 * kConsumers);
        fiber.thread.x = actor == 0 ? 0 : (actor + 1) / 2 * 128 + (actor - 1) % 2;
        fiber.block.x = i / (1 + 2 * kConsumers);
        fiber.speed = 1 << random_bits() % 6;
        fiber.ready = [] { return true; };
        fiber.stack.resize(1 << 16);
        ++blocks[fiber.block.x].running;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, run_fiber, 0);
    }
    while (failure.empty() && take_turn()) {
    }
    for (const Fiber& fiber : fibers) {
        require(fiber.done, "it hangs");
    }
    for (int i = 0; i < p.batch * p.heads_q * p.tiles_m * kConsumers; ++i) {
        const int group = i % kConsumers, tile = i / kConsumers % p.tiles_m, plane = i / kConsumers / p.tiles_m;
        const bool any = tile * kTileM + group * 64 < p.seq_q;
        require(stored[{plane / p.heads_q, plane % p.heads_q, tile, group}] == any, "a tile is not stored once");
    }
    return failure;
}
