// The machine of both barrier emulations: fibers that stand for threads of CUDA blocks and run in random turns, on the
// CPU; barriers of shared memory and named ones; what takes its time (copies, arrivals elsewhere). It is a part of the
// one .cpp file of an emulation, which declares first what it keeps besides of a fiber (struct State) and of the shared
// memory of a block (struct Memory). Kernels call what is not static, here and there. Types are in a namespace without
// a name, as kernels have others of the same names.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"
#include "turns.h"

// As in the text of kernels.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

namespace {

struct Barrier {
    int count = 0, pending = 0, bytes = 0, phase = 0;
};
struct Named {
    int arrived = 0, generation = 0;
};
struct Block : Memory {
    std::map<unsigned, Barrier> barriers;
    Named named[16], aligned[12];  // by id; by warp or warpgroup
    int running = 0;
};
struct Fiber : State {
    Context context;
    Stack stack;
    Index thread, block;
    unsigned speed;
    bool done = true;
    bool (*ready)(const void*) = nullptr;  // null: at any time
    const void* waits = nullptr;           // what it is called with
};
struct Event {
    long time;
    std::function<void()> happen;
};

}  // namespace

Index threadIdx, blockIdx, gridDim;
int broken;

static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static std::vector<Event> events;
static std::mt19937 random_bits;
static long now;
static Fiber* current;
static Context scheduler;
static std::function<void()> body;  // of each thread
static std::string failure;

static void require(bool condition, const char* what) {
    if (!condition && failure.empty()) {
        failure = what;
    }
}
// `ready` is on this fiber's stack, which stays while it waits.
template <class Ready>
static void wait_for(const Ready& ready) {
    current->ready = [](const void* it) { return static_cast<bool>((*static_cast<const Ready*>(it))()); };
    current->waits = &ready;
    switch_to(current->context, scheduler);
}
void give_way() {
    current->ready = nullptr;
    switch_to(current->context, scheduler);
}
// Mostly soon, at times much later.
static void later(std::function<void()> happen) {
    const long time = random_bits() % (40 << random_bits() % 6);
    events.push_back({now + 1 + time, std::move(happen)});
}
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
void barrier_init(unsigned barrier, int count) { here().barriers[barrier] = {count, count, 0, 0}; }
void barrier_expect(unsigned barrier, int bytes) {
    give_way();
    arrive(blockIdx.x, barrier, bytes);
}
void barrier_arrive(unsigned barrier) { barrier_expect(barrier, 0); }
void barrier_wait(unsigned barrier, unsigned parity) {
    Barrier* state = &here().barriers[barrier];
    wait_for([=] { return (state->phase & 1) != static_cast<int>(parity); });
}
// The bytes of a copy to `block` have landed.
static void landed(unsigned block, unsigned barrier, int bytes) {
    Barrier& state = blocks[block].barriers[barrier];
    require(blocks[block].running > 0, "a copy to a block that has left");
    require(state.count > 0, "a copy towards a barrier that is none yet");
    state.bytes -= bytes;
    settle(state);
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

// ---- Turns ----------------------------------------------------------------------------------------------------------

static void run_fiber() {
    body();
    --here().running;
    current->done = true;
    switch_to(current->context, scheduler);
}
// The fiber becomes a thread of a block that has all its threads to come.
static void start(Fiber& fiber, unsigned block, unsigned thread) {
    static_cast<State&>(fiber) = {};
    fiber.thread.x = thread;
    fiber.block.x = block;
    fiber.speed = 1 << random_bits() % 9;
    fiber.done = false;
    fiber.ready = nullptr;
    ++blocks[block].running;
    make_context(fiber.context, fiber.stack, run_fiber);
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
    static std::vector<Fiber*> able;
    able.clear();
    unsigned speeds = 0;
    for (Fiber& fiber : fibers) {
        if (!fiber.done && (fiber.ready == nullptr || fiber.ready(fiber.waits))) {
            able.push_back(&fiber);
            speeds += fiber.speed;
        }
    }
    if (able.empty()) {
        return !events.empty();
    }
    auto chosen = able.begin();
    for (unsigned turn = random_bits() % speeds; turn >= (*chosen)->speed; ++chosen) {
        turn -= (*chosen)->speed;
    }
    current = *chosen;
    threadIdx = current->thread;
    blockIdx = current->block;
    switch_to(scheduler, current->context);
    return true;
}
