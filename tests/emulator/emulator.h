// Enough of CUDA to run kernels of the mma.sync family, and the Hopper float32 forward, on the CPU, one block after
// another: a fiber per thread, and instructions of a whole warp or block as a rendezvous of its fibers. Copies land when
// they are waited for, so a kernel that waits for too few of them computes with what was there before.
//
// Kernels are compiled with these declarations, emulator.cpp, emulator_warp.cpp and emulator_hopper.cpp once for all.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>

#define __device__ static
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct Index {
    unsigned x;  // as in CUDA: a difference of it and an int is never negative
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
struct int4 {
    int x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;
static inline long long min(long long a, int b) { return a < b ? a : b; }

// ---- Fibers ---------------------------------------------------------------------------------------------------------

extern Index blockIdx, gridDim;
extern Index* current_thread;
#define threadIdx (*current_thread)

void give_way();
[[noreturn]] void stop(const char* why, long long value);

// The operands of all lanes of a warp for the last one that arrives, which then releases the others; these get null.
void** arrive_at_warp(void* operand);
void release_warp();

// The last lane of a warp to arrive does `work` with the operands of all.
template <typename Operand, typename Work>
static void together(Operand* operand, Work work) {
    if (void** lanes = arrive_at_warp(operand)) {
        work(reinterpret_cast<Operand**>(lanes));
        release_warp();
    }
}

// How many threads of the block vote for it.
int __syncthreads_count(bool vote);
int threads_of_block();
static inline void __syncthreads() { __syncthreads_count(false); }
static inline bool __syncthreads_or(bool x) { return __syncthreads_count(x) > 0; }
static inline bool __syncthreads_and(bool x) { return __syncthreads_count(x) == threads_of_block(); }

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
template <typename T>
static T __shfl_sync(unsigned, T x, int lane) {
    return exchange(x)[lane];
}
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
static inline unsigned __reduce_or_sync(unsigned, unsigned x) {
    const auto all = exchange(x);
    return std::accumulate(all.begin(), all.end(), 0u, std::bit_or<>());
}

// Fibers give way only where they wait for one another.
static inline int atomicAdd(int* sum, int x) {
    const int before = *sum;
    *sum += x;
    return before;
}
static inline void atomicAdd(float* sum, float x) { *sum += x; }
static inline void atomicAdd(unsigned long long* sum, unsigned long long x) { *sum += x; }
static inline void atomicOr(unsigned long long* flags, unsigned long long x) { *flags |= x; }
static inline void atomicMin(int* least, int x) { *least = min(*least, x); }
static inline void atomicMax(int* most, int x) { *most = max(*most, x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline void __threadfence() {}
static inline float __int_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
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
template <typename T>
static T __ldcs(const T* x) {
    return *x;
}
template <typename T>
static void __stcs(T* x, T value) {
    *x = value;
}

// ---- Shared memory, and instructions of a warp: emulator_warp.cpp ---------------------------------------------------

extern unsigned char* shared_memory;
extern size_t shared_size;

static inline size_t __cvta_generic_to_shared(const void* x) {
    return static_cast<size_t>(static_cast<const unsigned char*>(x) - shared_memory);
}
unsigned char* shared_at(unsigned address, unsigned bytes);
void copy_async(unsigned to, const void* from, int width, int bytes);
void copies_commit();
void copies_wait(size_t pending);
void forget_copies(int threads);  // of the block before

float widen(unsigned x);
unsigned narrow_pair(float low, float high);
void load_matrices(unsigned* registers, unsigned address, int count, bool transposed);
void multiply(float* d, const unsigned* a, const unsigned* b, int depth);
void multiply_tf32(float* d, const unsigned* a, const unsigned* b);
float cut_sum(float start, const float* x, const float* y, int count);

// ---- Barriers, bulk copies and wgmma: emulator_hopper.cpp -----------------------------------------------------------

void make_barrier(unsigned address, int count);
void arrive(unsigned address, int bytes);
void wait_phase(unsigned address, unsigned parity);
void copy_bulk(unsigned to, const void* from, int bytes, unsigned address);
void load_bounds(unsigned address, int* start, int* end);
void meet(int id, int threads, bool stays);
void forget_barriers();  // of the block before

// d = or += A B, of a warp's 16 rows; `by_rows`: the rows of B are what is summed over, else its columns.
void multiply_rows(float* d, int n, const unsigned* const* fragments, unsigned long long b, int add, bool by_rows);
void multiply_rows(float* d, int n, unsigned long long a, unsigned long long b, int add, bool by_rows);
template <int n>
static void multiply_group(float (&d)[n], const unsigned (&a)[4], unsigned long long b, int add, bool by_rows) {
    const auto fragments = exchange(static_cast<const unsigned*>(a));
    multiply_rows(d, n, fragments.data(), b, add, by_rows);
    __syncwarp();  // nobody goes on while others read its fragments
}
template <int n>
static void multiply_group(float (&d)[n], unsigned long long a, unsigned long long b, int add, bool by_rows) {
    multiply_rows(d, n, a, b, add, by_rows);
}

// ---- Launch ---------------------------------------------------------------------------------------------------------

// Runs `kernel` for every block. Shared memory is full of NaN at first.
void launch_blocks(void (*call)(const void*), const void* kernel, long long blocks, int threads, long long shared_bytes);
template <class Kernel>
static void launch(const Kernel& kernel, long long blocks, int threads, long long shared_bytes) {
    const auto call = [](const void* it) { (*static_cast<const Kernel*>(it))(); };
    launch_blocks(call, &kernel, blocks, threads, shared_bytes);
}
