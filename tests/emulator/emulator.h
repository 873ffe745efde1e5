// Enough of CUDA to run kernels of the mma.sync family, and the Hopper float32 forward, on the CPU, one block after
// another: a fiber per thread, and instructions of a whole warp or block as a rendezvous of its fibers. Copies land when
// they are waited for, so a kernel that waits for too few of them computes with what was there before.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "fibers.h"

#define __device__ static
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct Index {
    int x;
};
struct int2 {
    int x, y;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;
static inline long long min(long long a, int b) { return a < b ? a : b; }

// ---- Fibers ---------------------------------------------------------------------------------------------------------

struct Fiber {
    Context context;
    Index index;
    bool done;
};

// Lanes that have arrived at the instruction of this generation, and what they bring.
struct Warp {
    int arrived;
    long generation;
    void* operands[32];
};

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<std::vector<char>> stacks;
static std::function<void()> body;
static Context scheduler;
static Fiber* current;
static Index blockIdx, gridDim;
#define threadIdx (current->index)

static void give_way() { switch_to(current->context, scheduler); }

static void run_fiber() {
    body();
    current->done = true;
    give_way();
}

static void stop(const char* why, long long value) {
    std::fprintf(stderr, "emulator: block %d, thread %d: %s %lld\n", blockIdx.x, threadIdx.x, why, value);
    std::abort();
}

// The last lane of a warp to arrive does `work` with the operands of all.
template <typename Operand, typename Work>
static void together(Operand* operand, Work work) {
    Warp& warp = warps[threadIdx.x / 32];
    const long generation = warp.generation;
    warp.operands[threadIdx.x % 32] = operand;
    if (++warp.arrived == 32) {
        work(reinterpret_cast<Operand**>(warp.operands));
        warp.arrived = 0;
        ++warp.generation;
    }
    while (warp.generation == generation) {
        give_way();
    }
}

static int waiting;            // threads of the block at the barrier
static long barriers;          // that are over
static int votes, last_votes;  // for the barrier, and for the last one

// How many threads of the block vote for it.
static int __syncthreads_count(bool vote) {
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
static inline void __syncthreads() { __syncthreads_count(false); }
static inline bool __syncthreads_or(bool x) { return __syncthreads_count(x) > 0; }
static inline bool __syncthreads_and(bool x) { return __syncthreads_count(x) == static_cast<int>(fibers.size()); }

static inline unsigned __ballot_sync(unsigned, bool vote) {
    struct Vote {
        bool mine;
        unsigned all;
    } operand = {vote, 0};
    together(&operand, [](Vote** lanes) {
        unsigned all = 0;
        for (int i = 0; i < 32; ++i) {
            all |= static_cast<unsigned>(lanes[i]->mine) << i;
        }
        for (int i = 0; i < 32; ++i) {
            lanes[i]->all = all;
        }
    });
    return operand.all;
}
static inline void __syncwarp() { __ballot_sync(~0u, false); }
static inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
static inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == ~0u; }

// What each lane of a warp has, in the order of the lanes.
template <typename T>
static std::array<T, 32> exchange(T x) {
    struct Exchange {
        T in;
        std::array<T, 32> out;
    } operand = {x, {}};
    together(&operand, [](Exchange** lanes) {
        for (int i = 0; i < 32; ++i) {
            for (int j = 0; j < 32; ++j) {
                lanes[i]->out[j] = lanes[j]->in;
            }
        }
    });
    return operand.out;
}
static inline float __shfl_xor_sync(unsigned, float x, int distance) {
    return exchange(x)[threadIdx.x % 32 ^ distance];
}
static inline int __shfl_sync(unsigned, int x, int lane) { return exchange(x)[lane]; }
static inline int __shfl_up_sync(unsigned, int x, int distance) {
    return exchange(x)[threadIdx.x % 32 - (threadIdx.x % 32 < distance ? 0 : distance)];
}
static inline int __reduce_max_sync(unsigned, int x) {
    const auto all = exchange(x);
    return *std::max_element(all.begin(), all.end());
}
static inline int __reduce_min_sync(unsigned, int x) {
    const auto all = exchange(x);
    return *std::min_element(all.begin(), all.end());
}

// Fibers give way only where they wait for one another.
static inline void atomicAdd(int* sum, int x) { *sum += x; }
static inline void atomicMin(int* least, int x) { *least = min(*least, x); }
static inline void atomicMax(int* most, int x) { *most = max(*most, x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline void __threadfence() {}
static inline float __int_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
static inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
static inline float __fmul_rn(float x, float y) {
    volatile float product = x * y;  // so that no sum takes it up
    return product;
}
template <typename T>
static T __ldg(const T* x) {
    return *x;
}

#include "emulator_warp.h"
#include "emulator_hopper.h"

// ---- Launch ---------------------------------------------------------------------------------------------------------

// Runs `kernel` for every block. Shared memory is full of NaN at first.
static void launch(std::function<void()> kernel, long long blocks, int threads, long long shared_bytes) {
    body = std::move(kernel);
    stacks.resize(threads, std::vector<char>(1 << 17));
    shared_size = static_cast<size_t>(shared_bytes);
    shared_memory = static_cast<unsigned char*>(std::aligned_alloc(1024, (shared_size / 1024 + 1) * 1024));
    gridDim = {static_cast<int>(blocks)};
    for (long long block = 0; block < blocks; ++block) {
        blockIdx = {static_cast<int>(block)};
        std::memset(shared_memory, 0xff, shared_size);
        fibers.assign(threads, Fiber{});
        warps.assign(threads / 32, Warp{});
        waiting = votes = 0;
        shared_barriers.clear();
        bulk_copies.clear();
        async_copies.assign(threads, ThreadCopies{});
        std::fill(std::begin(meetings), std::end(meetings), Meeting{});
        for (int i = 0; i < threads; ++i) {
            fibers[i].index = {i};
            make_context(fibers[i].context, stacks[i].data(), stacks[i].size(), run_fiber);
        }
        for (bool any = true; any;) {
            any = false;
            for (Fiber& fiber : fibers) {
                if (!fiber.done) {
                    current = &fiber;
                    switch_to(scheduler, fiber.context);
                    any = true;
                }
            }
        }
    }
    std::free(shared_memory);
}
