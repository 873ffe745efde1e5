// The fibers of emulator.h: threads of a block, which give way where they wait for one another.
#include "emulator.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "fibers.h"

struct Fiber {
    Context context;
    Index index;
    bool done;
};

Index blockIdx, gridDim;
Index* current_thread;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Stack> stacks;
static void (*kernel_call)(const void*);
static const void* kernel_called;
static Context scheduler;
static Fiber* current;

void give_way() { switch_to(current->context, scheduler); }

static void run_fiber() {
    kernel_call(kernel_called);
    current->done = true;
    give_way();
}

void stop(const char* why, long long value) {
    std::fprintf(stderr, "emulator: block %d, thread %d: %s %lld\n", blockIdx.x, threadIdx.x, why, value);
    std::abort();
}

void** arrive_at_warp(void* operand) { return warps[threadIdx.x / 32].arrive(threadIdx.x % 32, operand); }
void release_warp() { warps[threadIdx.x / 32].release(); }

static int waiting;            // threads of the block at the barrier
static long barriers;          // that are over
static int votes, last_votes;  // for the barrier, and for the last one

int __syncthreads_count(bool vote) {
    const long barrier = barriers;
    votes += vote;
    if (++waiting == static_cast<int>(fibers.size())) {
        last_votes = votes;
        waiting = votes = 0;
        ++barriers;
    }
    while (barriers == barrier) {
        give_way();
    }
    return last_votes;
}

int threads_of_block() { return static_cast<int>(fibers.size()); }

void launch_blocks(void (*call)(const void*), const void* kernel, long long blocks, int threads, long long shared_bytes) {
    kernel_call = call, kernel_called = kernel;
    stacks.resize(threads);
    shared_size = static_cast<size_t>(shared_bytes);
    shared_memory = static_cast<unsigned char*>(std::aligned_alloc(1024, (shared_size / 1024 + 1) * 1024));
    gridDim = {static_cast<int>(blocks)};
    for (long long block = 0; block < blocks; ++block) {
        blockIdx = {static_cast<int>(block)};
        std::memset(shared_memory, 0xff, shared_size);
        fibers.assign(threads, Fiber{});
        warps.assign(threads / 32, Warp{});
        waiting = votes = 0;
        forget_barriers();
        forget_copies(threads);
        for (int i = 0; i < threads; ++i) {
            fibers[i].index = {i};
            make_context(fibers[i].context, stacks[i], run_fiber);
        }
        for (bool any = true; any;) {
            any = false;
            for (Fiber& fiber : fibers) {
                if (!fiber.done) {
                    current = &fiber;
                    current_thread = &fiber.index;
                    switch_to(scheduler, fiber.context);
                    any = true;
                }
            }
        }
    }
    std::free(shared_memory);
    stacks = std::vector<Stack>();  // the library stays loaded
}
