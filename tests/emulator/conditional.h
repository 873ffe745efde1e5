// Conditional forms of what a kernel's text uses of barriers, from the others, which come before.
#pragma once

static inline void barrier_arrive_if(bool condition, unsigned barrier) {
    if (condition) {
        barrier_arrive(barrier);
    }
}
static inline void barrier_wait_if(bool condition, unsigned barrier, unsigned parity) {
    if (condition) {
        barrier_wait(barrier, parity);
    }
}
static inline void named_sync_if(bool condition, int id, int threads) {
    if (condition) {
        named_sync(id, threads);
    }
}
static inline void named_arrive_if(bool condition, int id, int threads) {
    if (condition) {
        named_arrive(id, threads);
    }
}
