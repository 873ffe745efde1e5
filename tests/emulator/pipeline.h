// What the text of a Hopper forward kernel is compiled with to run on the CPU: declarations of pipeline.cpp, which is
// compiled once for all kernels.
#pragma once

#include "turns.h"

// What the machine has to know of a kernel, by the names of its constants where it has some,
struct Shape {
    int consumers, tile_m, tile_n;
    int columns, swizzle_bytes, panels, main, row_bytes;
    int head_dim_v, panels_v;
    int out_panels;  // of O's own buffer; 0: O goes through the buffer of Q
    int intervals;  // of a key
    bool causal;
    bool listed;  // whether key tiles are visited as lists say
    bool cut;     // whether these lists are cut into pieces
    bool lines;   // whether S begins with lines of a score
};
// and of a call: sizes, and what shows which pairs are visible.
struct Call {
    int batch, heads_q, heads_kv, seq_q, seq_k, padded_k, tiles_m;
    int planes;  // of the mask
    const unsigned char* dense;  // or null
    long long dense_head, dense_row;
    const int *starts, *ends, *bounds, *tile_slots, *tile_counter;
};

// Runs the kernel in a grid of `count` blocks; returns what was wrong, or nothing.
const char* run_blocks(void (*kernel)(), const Shape& of_kernel, const Call& of_call, int count, unsigned seed);

// ---- PTX ------------------------------------------------------------------------------------------------------------

void named_arrive(int id, int threads);
#include "conditional.h"

void shared_store(unsigned address, int4 x);
int4 shared_load(unsigned address);
template <class T>
static void pin(T&) {}
int atomicAdd(int* word, int x);
void bulk_load(unsigned to, const int* from, int bytes, unsigned barrier);

static inline float log2_approx(float x) { return x; }
static inline float exp2_approx(float x) { return x; }
static inline unsigned pack(float, float) { return 0; }
void stmatrix(unsigned address, unsigned, unsigned, unsigned, unsigned);
static inline void stmatrix_half(unsigned address, unsigned, unsigned) { stmatrix(address, 0, 0, 0, 0); }
void tma_store(const TensorMap& map, unsigned, int, int, int, int, int);
void tma_store_commit();

// ---- Products and softmax -------------------------------------------------------------------------------------------

void wgmma_wait(int groups);
static inline void wgmma_wait_all() { wgmma_wait(0); }
static inline void wgmma_wait_all_but_one() { wgmma_wait(1); }

// The lines that a score adds. Those of a head and a visit go with its products only.
struct ScoreLines {
    int batch = -1, head = -1;
};
static inline ScoreLines score_lines(const Params&, int batch, int head) { return {batch, head}; }
unsigned line_at(const ScoreLines& lines, int row, int key0, const float*);
static inline void begin_scores(const void*, unsigned) {}
static inline void bend_scores(const void*, const ScoreLines&, int, int) {}
static inline void store_numbers(unsigned) {}
static inline void multiply_slope(const void*, const void*, unsigned) {}

void load_q(const void*, unsigned q, int row);
void multiply_qk(const void*, unsigned q, int row, unsigned k);
void multiply_qk(const void*, const void*, unsigned k);  // of the rows of load_q
void multiply_pv(const void*, const void*, unsigned v, bool);

// The key tile whose S is complete runs mask code.
void run_mask(int key0);
static inline void apply_mask(const Params&, const void*, int, int key0) { run_mask(key0); }
static inline void apply_mask(const Params&, int, const void*, int, int key0) { run_mask(key0); }
void apply_mask(const void*, int, unsigned bounds);
// The bits of the thread's elements of S are those of its pairs.
void check_bits(const unsigned* seen);
template <int words>
static void apply_mask(const void*, const unsigned (&seen)[words]) { check_bits(seen); }

struct RowStats {
    float row_max[2] = {}, row_sum[2] = {};
    bool ordinary = false, growing = false;
    void reset() {}
};
template <class... T>
static bool softmax_step(T&&...) {
    give_way();
    return false;
}

// The products of a work tile were those of its rows with each key tile that they see, once, and with no tile that
// hides pairs of them but ran mask code. `slot`: of the results of a piece, -1 if they are those of the whole tile.
void check_tile(int batch, int head, int tile, int slot, int group);
