// What the text of a Hopper kernel of 16-bit types is compiled with to run on the CPU: declarations of hopper_values.cpp,
// which is compiled once for all kernels.
#pragma once

#include "emulator.h"

#undef __device__  // members, too, are functions of the device
#define __device__
#define __cluster_dims__(...)
#define __align__(n)

struct TensorMap;  // of the kernel's text

extern int broken;  // number of the mistake that is switched on
extern const bool by_warpgroup;  // does one thread release what the four warps of a warpgroup have read?

// Run `count` clusters of `size` blocks in the order of the grid, `together` at a time. False once something has gone
// wrong.
bool run_grid(void (*call)(const void*), const void* kernel, int count, int size, int together, int threads,
              size_t shared);
const char* what_went_wrong();  // or ""

// ---- Threads, shared memory and scalars -----------------------------------------------------------------------------

static inline int thread() { return threadIdx.x; }
int block_rank();  // of the block in its cluster

template <typename T>
static T read_shared(unsigned address) {
    T x;
    std::memcpy(&x, shared_at(address, sizeof(T)), sizeof(T));
    return x;
}
static inline unsigned shared_address(const void* x) { return static_cast<const unsigned char*>(x) - shared_memory; }
static inline void store_int(unsigned address, int x) { std::memcpy(shared_at(address, 4), &x, 4); }
static inline int load_int(unsigned address) { return read_shared<int>(address); }
static inline float load_float(unsigned address) { return read_shared<float>(address); }
static inline float2 load_pair(unsigned address) { return read_shared<float2>(address); }
static inline float4 load_quad(unsigned address) { return read_shared<float4>(address); }
static inline int2 load_span(unsigned address) { return read_shared<int2>(address); }
static inline int4 shared_load(unsigned address) { return read_shared<int4>(address); }
static inline void shared_store(unsigned address, int4 x) { std::memcpy(shared_at(address, 16), &x, 16); }
template <typename T>
static void pin(T&) {}
void ldmatrix(unsigned (&r)[4], unsigned address);
void note_store(unsigned address);  // of 16 bytes, which TMA may read after a proxy_fence only
static inline void store_quad(unsigned address, float x, float y, float z, float w) {
    const float4 quad = {x, y, z, w};
    std::memcpy(shared_at(address, 16), &quad, 16);
    note_store(address);
}
unsigned pack(float low, float high);
static inline float2 unpack(unsigned packed) { return {widen(packed & 0xffff), widen(packed >> 16)}; }
static inline float exp2_approx(float x) { return std::exp2(x); }
static inline float log2_approx(float x) { return std::log2(x); }
static inline void add_to(float* target, float x, float y, float z, float w) {
    target[0] += x, target[1] += y, target[2] += z, target[3] += w;
}
void stmatrix(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3);
void stmatrix_half(unsigned address, unsigned r0, unsigned r1);
void stmatrix_transposed(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3);
void stmatrix_transposed(unsigned address, unsigned r0, unsigned r1);

// ---- Barriers and copies --------------------------------------------------------------------------------------------

void barrier_init(unsigned address, int count);
static inline void barrier_init_fence() {}
void barrier_arrive(unsigned address);
void barrier_expect(unsigned address, int bytes);
void barrier_arrive_at(unsigned address, unsigned block_rank);
void barrier_wait(unsigned address, unsigned parity);
void cluster_sync();
void named_sync(int id, int threads);
void named_arrive(int id, int threads);
#include "conditional.h"
static inline void barrier_arrive_there_if(bool condition, unsigned barrier) {
    if (condition) {
        barrier_arrive_at(barrier, block_rank() ^ 1);
    }
}
static inline void prefetch_map(const void*) {}
void proxy_fence();
void griddepcontrol_wait();  // before semaphores
static inline void griddepcontrol_launch_dependents() {}
void tma_store_commit();
void tma_store_wait();  // what this thread has committed of additions and stores is read, as late as this
void bulk_read_wait_all_but_last();  // likewise, of all groups but the last
void bulk_reduce_wait();  // and written, by now; without a wait at some time
void bulk_reduce(float* target, unsigned src, int bytes);
void bulk_store(float* target, unsigned src, int bytes);
void semaphore_wait(const int* semaphore, int value);
void semaphore_release(int* semaphore);
void cp_async(unsigned dst, const void* src, bool inside);
void cp_async_wait();  // what this thread has started is copied, as late as this
void tma_load(unsigned dst, const TensorMap& map, unsigned barrier, int column, int row, int panel, int head,
              int batch);
void tma_multicast(unsigned dst, const TensorMap& map, unsigned barrier, int column, int row, int panel, int head,
                   int batch);  // to both blocks of a cluster
void tma_store(const TensorMap& map, unsigned src, int column, int row, int panel, int head, int batch);
void bulk_load(unsigned dst, const void* src, int bytes, unsigned barrier);
void bulk_send(unsigned dst, unsigned src, int bytes, unsigned barrier, unsigned block_rank);
unsigned cluster_address(unsigned address, unsigned block_rank);
void read_block(void* x, int bytes, unsigned address, unsigned block_rank);
template <typename T>
static void cluster_load_if(bool condition, T& x, unsigned address, unsigned block_rank) {
    if (condition) {
        read_block(&x, sizeof(T), address, block_rank);
    }
}
void send_quad(unsigned address, unsigned barrier, float x, float y, float z, float w);  // to such an address

// ---- Products: done when their group is waited for ------------------------------------------------------------------

// `n`: of a thread's numbers. `rows_a`, `rows_b`: is summed over rows of the operand, not over columns?
void issue(float* d, int n, unsigned long long a, unsigned long long b, int add, int rows_a, int rows_b);
void issue(float* d, int n, const unsigned (&a)[4], unsigned long long b, int add, int rows_b);
static inline void wgmma_fence() {}
void wgmma_commit();
void finish_products(int pending);  // all groups but the last `pending`
template <int pending>
static void wgmma_wait() {
    finish_products(pending);
}
static inline void wgmma_wait_all() { finish_products(0); }
static inline void wgmma_wait_all_but_one() { finish_products(1); }
static inline void accumulator_fence(const float*) {}
