// What the text of a Hopper backward kernel is compiled with to run on the CPU: declarations of backward_pipeline.cpp,
// which is compiled once for all kernels. An array of registers is known by its address.
#pragma once

#include "turns.h"

// What the machine has to know of a kernel, by the names of its constants where it has some,
struct Shape {
    int consumers, tile_m, tile_n, head_dim;
    int columns, swizzle_bytes, panels, tile_bytes_m, tile_bytes_n;
    int row_stats_bytes, ds_bytes, ds_row_bytes;
    int dq_columns, dq_bytes;  // dq_bytes: of a consumer
    unsigned offset_k, offset_v, offset_row_stats, offset_dq;
    int shared_bytes;
    bool deterministic;
};
// and of a call.
struct Call {
    int batch, heads_q, heads_kv, tiles_m, tiles_n, seq_k, padded_q, padded_k;
    const float *delta, *dq_accum, *dkv_accum;
    int* tile_counter;  // of persistent blocks, or null
    const int* tile_pieces;  // (tiles_n) where blocks store dK and dV of some tiles and add those of others, or null
    float scale;
    const int* visits;  // (tiles_n, tiles_m): query tile * 2 + (1 if some pairs are hidden), or -1
};

// Runs `count` blocks, kResident at a time; returns what was wrong, or nothing.
const char* run_blocks(void (*kernel)(), const Shape& of_kernel, const Call& of_call, int count, unsigned seed);

int block_number();  // of the block in the grid

// ---- PTX ------------------------------------------------------------------------------------------------------------

void griddepcontrol_wait();
static inline void griddepcontrol_launch_dependents() {}
void store_int(unsigned address, int x);
int load_int(unsigned address);
void bulk_load(unsigned to, const float* stats, int bytes, unsigned barrier);
static inline void prefetch_map(const void*) {}
static inline void tma_store_commit() {}
void bulk_reduce_wait();
void __threadfence();
int load_acquire(const int* address);
void add_release(int* address);
int atomicAdd(int* counter, int x);
// A persistent block's warp goes on to this work tile.
int note_work(int index);

// ---- Products -------------------------------------------------------------------------------------------------------

void wgmma_wait_for(int groups);
template <int groups>
static void wgmma_wait() {
    wgmma_wait_for(groups);
}
void load_fragments(const void* fragments, unsigned keys);
void start_scores(const void* s, unsigned keys, unsigned queries);
void start_scores(const void* s, const void* keys, unsigned queries);  // of fragments
void set_ones(const void* ones);
void start_row_stats(const void* s, const void* ones, unsigned row_stats);
void start_dkv(const void* sum, const void* fragments, unsigned queries, int add);
void start_dq(const void* dq, unsigned ds, unsigned k);

// ---- Scalar work ----------------------------------------------------------------------------------------------------

void probabilities(const void* s, float);
void probabilities(const Params&, const void* s, const void* fragments, unsigned lse, unsigned seen, int, int head,
                   int query0, int);
void mask_pairs(const void* s, int query0);
static inline void apply_mask(const void* s, int query0, const void*) { mask_pairs(s, query0); }
void mask_pairs(const void* s, int query0, int key);  // of the keys from key - lane / 4 on
static inline void apply_mask(const Params&, const void* s, int query0, int key) { mask_pairs(s, query0, key); }
// The bits of a visit stand for the first of its 64 keys and the first query.
unsigned bits_of(int key, int query0);
void check_bits(const void* s, unsigned seen);
template <int words>
static void find_seen(const Params&, int, int key, int query0, unsigned (&seen)[words]) {
    seen[0] = bits_of(key, query0);
}
template <int words>
static void apply_mask(const void* s, const unsigned (&seen)[words]) { check_bits(s, seen[0]); }
static inline unsigned seen_pairs(int query0, const void*) { return query0; }
static inline unsigned seen_pairs(const Params&, int query0, int) { return query0; }
void pack_scores(const void* fragments, const void* s);
void score_gradients(const void* fragments, const void* s, const void* dp);

// ---- Results --------------------------------------------------------------------------------------------------------

void store_ds(unsigned ds, const void* fragments, int group);
void store_dq(unsigned part, const void* dq, int group = 0);
void bulk_reduce(const float* target, unsigned part, int bytes);
void bulk_store(const float* target, unsigned part, int bytes);
void add_dkv(const float* target, const void* sum);
void stage_dkv(unsigned part, const void* sum, float);
void store_tile(const TensorMap& map, unsigned part, int row, int head, int batch);
void store_no_dkv(const Params&, int key0, int head, int batch);
void store_no_dkv(const Params& p, int key0, int head, int batch, int thread, int threads);
