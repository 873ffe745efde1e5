// What a kernel's text uses of the machine that both barrier emulations run it on, machine.h: threads, which are fibers
// that run in random turns, barriers of shared memory and named ones. Includes no header of the standard library, whose
// templates would be most of a kernel's compilation.
#pragma once

#include "cuda_words.h"

struct Params;  // of the kernel's text
struct TensorMap;

struct Index {
    unsigned x;
};
extern Index threadIdx, blockIdx, gridDim;  // of the fiber that runs
extern int broken;                          // number of the break of the protocol that is on, or 0

void give_way();
static inline unsigned shared_address(const void*) { return 0; }
void barrier_init(unsigned barrier, int count);
static inline void barrier_init_fence() {}
void barrier_expect(unsigned barrier, int bytes);
void barrier_arrive(unsigned barrier);
void barrier_wait(unsigned barrier, unsigned parity);
void named_sync(int id, int threads);
void __syncthreads();
void __syncwarp();
void proxy_fence();
void tma_load(unsigned to, const TensorMap& map, unsigned barrier, int column, int row, int, int head, int batch);
void tma_store_wait();

void wgmma_fence();
void wgmma_commit();
static inline void accumulator_fence(const void*) {}
