// Enough of CUDA to run kernels of the mma.sync family on the CPU, one block after another: a fiber per thread, and
// instructions of a whole warp or block as a rendezvous of its fibers. Copies are done at once, so this checks what a
// kernel computes, not whether it waits for what it has started.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include <ucontext.h>

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
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;
static inline long long min(long long a, int b) { return a < b ? a : b; }

// ---- Fibers ---------------------------------------------------------------------------------------------------------

struct Fiber {
    ucontext_t context;
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
static ucontext_t scheduler;
static Fiber* current;
static Index blockIdx, gridDim;
#define threadIdx (current->index)

static void give_way() { swapcontext(&current->context, &scheduler); }

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

static inline float __shfl_xor_sync(unsigned, float x, int distance) {
    struct Shuffle {
        float in, out;
    } operand = {x, 0.0f};
    together(&operand, [distance](Shuffle** lanes) {
        for (int i = 0; i < 32; ++i) {
            lanes[i]->out = lanes[i ^ distance]->in;
        }
    });
    return operand.out;
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline void __threadfence() {}
static inline float __int_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
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

// ---- Shared memory and tensor cores ---------------------------------------------------------------------------------

static unsigned char* shared_memory;
static size_t shared_size;

static inline size_t __cvta_generic_to_shared(const void* x) {
    return static_cast<size_t>(static_cast<const unsigned char*>(x) - shared_memory);
}

// `bytes` at a shared address, which must be aligned to them.
static unsigned char* shared_at(unsigned address, unsigned bytes) {
    if (address + size_t{bytes} > shared_size || address % bytes != 0) {
        stop("bad shared address", address);
    }
    return shared_memory + address;
}

// cp.async of `width` bytes, zeros from `bytes` on.
static void copy_async(unsigned to, const void* from, int width, int bytes) {
    unsigned char* target = shared_at(to, width);
    if (bytes < 0 || bytes > width || (bytes > 0 && reinterpret_cast<uintptr_t>(from) % width != 0)) {
        stop("bad copy of bytes", bytes);
    }
    std::memset(target, 0, width);
    if (bytes > 0) {
        std::memcpy(target, from, bytes);
    }
}

#if EMULATED_FP16
static float widen(unsigned x) { return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(x))); }
static unsigned narrow(float x) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(x)); }
#else
static float widen(unsigned x) { return __uint_as_float(x << 16); }
static unsigned narrow(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif
static unsigned narrow_pair(float low, float high) { return narrow(low) | narrow(high) << 16; }

// ldmatrix of `count` 8x8 matrices; lane 8 m + r has the address of row r of matrix m.
static void load_matrices(unsigned* registers, unsigned address, int count, bool transposed) {
    struct Lane {
        unsigned* registers;
        unsigned address;
    } operand = {registers, address};
    together(&operand, [=](Lane** lanes) {
        for (int m = 0; m < count; ++m) {
            uint16_t x[8][8];
            for (int row = 0; row < 8; ++row) {
                std::memcpy(x[row], shared_at(lanes[m * 8 + row]->address, 16), 16);
            }
            for (int i = 0; i < 32; ++i) {
                const int row = i / 4, column = i % 4 * 2;
                lanes[i]->registers[m] = transposed ? x[column][row] | unsigned{x[column + 1][row]} << 16
                                                    : x[row][column] | unsigned{x[row][column + 1]} << 16;
            }
        }
    });
}

// mma.sync m16n8k16 or m16n8k8: d += a b.
static void multiply(float* d, const unsigned* a, const unsigned* b, int depth) {
    struct Lane {
        float* d;
        const unsigned *a, *b;
    } operand = {d, a, b};
    together(&operand, [depth](Lane** lanes) {
        float left[16][16], right[16][8];
        for (int i = 0; i < 32; ++i) {
            const int group = i / 4, column = i % 4 * 2;
            for (int k = 0; k < depth; k += 8) {
                for (int half = 0; half < 2; ++half) {
                    const auto part = [half](unsigned x) { return widen(half ? x >> 16 : x & 0xffff); };
                    left[group][k + column + half] = part(lanes[i]->a[k / 4]);
                    left[group + 8][k + column + half] = part(lanes[i]->a[k / 4 + 1]);
                    right[k + column + half][group] = part(lanes[i]->b[k / 8]);
                }
            }
        }
        for (int i = 0; i < 32; ++i) {
            for (int e = 0; e < 4; ++e) {
                float sum = 0.0f;
                for (int k = 0; k < depth; ++k) {
                    sum += left[i / 4 + e / 2 * 8][k] * right[k][i % 4 * 2 + e % 2];
                }
                lanes[i]->d[e] += sum;
            }
        }
    });
}

// What is left of a sum of float32 products and `start` in tensor cores: every term is cut off 2 bits below the last one
// of a float as large as the largest, and so is the sum at its own last bit. (Measured on Hopper by others.)
static float cut_sum(float start, const float* x, const float* y, int count) {
    int top = start == 0.0f ? -200 : std::ilogb(start);
    for (int k = 0; k < count; ++k) {
        if (x[k] * y[k] != 0.0f) {
            top = max(top, std::ilogb(x[k]) + std::ilogb(y[k]));
        }
    }
    const double unit = std::ldexp(1.0, top - 25);
    double sum = std::trunc(start / unit);
    for (int k = 0; k < count; ++k) {
        sum += std::trunc(double{x[k]} * y[k] / unit);
    }
    const double exact = sum * unit;
    const float rounded = static_cast<float>(exact);
    return std::fabs(rounded) > std::fabs(exact) ? std::nextafter(rounded, 0.0f) : rounded;
}

// mma.sync m16n8k8 of tf32: d += a b.
static void multiply_tf32(float* d, const unsigned* a, const unsigned* b) {
    struct Lane {
        float* d;
        const unsigned *a, *b;
    } operand = {d, a, b};
    together(&operand, [](Lane** lanes) {
        float left[16][8], right[8][8];  // right: column, then k
        const auto tf32 = [](unsigned x) { return __uint_as_float(x & 0xffffe000u); };
        for (int i = 0; i < 32; ++i) {
            for (int e = 0; e < 4; ++e) {
                left[i / 4 + e % 2 * 8][i % 4 + e / 2 * 4] = tf32(lanes[i]->a[e]);
            }
            for (int e = 0; e < 2; ++e) {
                right[i / 4][i % 4 + e * 4] = tf32(lanes[i]->b[e]);
            }
        }
        for (int i = 0; i < 32; ++i) {
            for (int e = 0; e < 4; ++e) {
                float& sum = lanes[i]->d[e];
                sum = cut_sum(sum, left[i / 4 + e / 2 * 8], right[i % 4 * 2 + e % 2], 8);
            }
        }
    });
}

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
        for (int i = 0; i < threads; ++i) {
            fibers[i].index = {i};
            getcontext(&fibers[i].context);
            fibers[i].context.uc_stack.ss_sp = stacks[i].data();
            fibers[i].context.uc_stack.ss_size = stacks[i].size();
            makecontext(&fibers[i].context, run_fiber, 0);
        }
        for (bool any = true; any;) {
            any = false;
            for (Fiber& fiber : fibers) {
                if (!fiber.done) {
                    current = &fiber;
                    swapcontext(&scheduler, &fiber.context);
                    any = true;
                }
            }
        }
    }
    std::free(shared_memory);
}
