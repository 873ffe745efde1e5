// The barriers and copies of the Hopper forward kernel on the CPU. One thread of the producer and two of each consumer
// warpgroup are fibers that run in random turns; copies and arrivals at another block take their time. What a kernel
// computes is left out: its products only note which rows of which tensor they read, and that these stay until they end.
#pragma once

#include "cuda_words.h"

// A row of a panel: 0 where nothing has landed.
struct Piece {
    int tensor = 0, column = 0, row = 0, head = 0, batch = 0;
    bool operator!=(const Piece& o) const {
        return std::tie(tensor, column, row, head, batch) != std::tie(o.tensor, o.column, o.row, o.head, o.batch);
    }
};
constexpr unsigned kPieceBytes = 16;  // divides all addresses of pieces
struct Pieces {
    std::vector<Piece> all;
    Piece& operator[](unsigned address) {
        const size_t place = address / kPieceBytes;
        if (place >= all.size()) {
            all.resize(place + 1);
        }
        return all[place];
    }
};
struct Memory {
    Pieces shared;
    std::map<unsigned, int4> words;  // work tiles that the producer broadcasts
    int written[kConsumers] = {};    // by warpgroup: parts of O in its buffer, and how many of them TMA may read
    int fenced[kConsumers] = {};
};
struct Read {  // by a product in flight
    std::vector<std::pair<unsigned, Piece>> pieces;  // with their addresses
    int group;
};
struct State {
    std::vector<Read> reads;
    int group = 0;
    int sent = 0;  // arrivals at other blocks that are on their way
    Piece q;
    Piece begun;  // head, batch, row and first key (`column`) that S has begun with
    std::vector<std::pair<Piece, Piece>> scores;  // first row of Q, of K
    std::vector<Piece> values;
    std::set<int> masked;  // key tiles of this work tile that ran mask code
};
enum Tensor { kNone, kQ, kK, kV, kOut, kBounds };
static const int* all_bounds;
static int padded_keys, planes_of_mask, heads_of_q;
static int broken;  // number of the break of the protocol that is on, or 0
#include "turns.h"

static std::map<std::tuple<int, int, int, int>, int> stored;  // batch, head, tile, warpgroup: how often
#if CUT
static std::map<std::tuple<int, int, int, int>, std::set<int>> met_by;  // the same: key tiles of all pieces so far
static std::map<std::tuple<int, int, int, int>, int> stored_slots;      // batch, head, slot, warpgroup: how often
#endif

static void barrier_arrive_if(bool condition, unsigned barrier) {
    if (condition) {
        barrier_arrive(barrier);
    }
}
static void shared_store(unsigned address, int4 x) {
    give_way();
    here().words[address] = x;
}
static int4 shared_load(unsigned address) {
    give_way();
    return here().words[address];
}
static void barrier_wait_if(bool condition, unsigned barrier, unsigned parity) {
    if (condition) {
        barrier_wait(barrier, parity);
    }
}
static void named_sync(int id, int threads) { meet(here().named[id], 64, threads, true); }
static void named_arrive(int id, int threads) { meet(here().named[id], 64, threads, false); }
static void named_sync_if(bool condition, int id, int threads) {
    if (condition) {
        named_sync(id, threads);
    }
}
static void named_arrive_if(bool condition, int id, int threads) {
    if (condition) {
        named_arrive(id, threads);
    }
}
static void __syncthreads() { meet(here().named[0], 1, 1 + 2 * kConsumers, true); }

// ---- Copies ---------------------------------------------------------------------------------------------------------

// Words of a TensorMap here: tensor, columns, rows and panels of a box.
template <class Box>
static void copy(unsigned block, unsigned to, const Box& map, unsigned barrier, Piece first) {
    const auto* box = map.words;
    later([=] {
        for (unsigned panel = 0; panel < box[3]; ++panel) {
            for (unsigned row = 0; row < box[2]; ++row) {
                Piece piece = first;
                piece.column += panel * box[1];
                piece.row += row;
                blocks[block].shared[to + (panel * box[2] + row) * box[1] * 2] = piece;
            }
        }
        landed(block, barrier, box[1] * box[2] * box[3] * 2);
    });
}
template <class Box>
static void tma_load(unsigned to, const Box& map, unsigned barrier, int column, int row, int, int head, int batch) {
    give_way();
    copy(blockIdx.x, to, map, barrier, {static_cast<int>(map.words[0]), column, row, head, batch});
}
template <class T>
static void pin(T&) {}
// Starts and ends of consecutive keys, for each of their intervals; only the first one is noted, counted through planes.
static void bulk_load(unsigned to, const int* from, int bytes, unsigned barrier) {
    give_way();
    const unsigned block = blockIdx.x;
    const int key = (from - all_bounds) / (2 * INTERVALS);
    later([=] {
        blocks[block].shared[to] = {kBounds, 0, key, 0, 0};
        landed(block, barrier, bytes);
    });
}
static int atomicAdd(int* word, int x) {
    give_way();
    const int before = *word;
    *word += x;
    return before;
}

// ---- O ---------------------------------------------------------------------------------------------------------------

static float log2_approx(float x) { return x; }
static float exp2_approx(float x) { return x; }
static unsigned pack(float, float) { return 0; }
static void __syncwarp() { give_way(); }
static int consumer() { return threadIdx.x / 128 - 1; }
static void stmatrix(unsigned address, unsigned, unsigned, unsigned, unsigned) {
    give_way();
    for (unsigned bytes = 0; bytes < kSwizzleBytes && bytes <= address; bytes += kPieceBytes) {
        if (Piece& piece = here().shared[address - bytes]; piece.tensor != kNone) {
            piece = {kOut};  // O takes the place of this row of Q
            break;
        }
    }
    ++here().written[consumer()];
}
static void stmatrix_half(unsigned address, unsigned, unsigned) { stmatrix(address, 0, 0, 0, 0); }
static void proxy_fence() { here().fenced[consumer()] = here().written[consumer()]; }
template <class Box>
static void tma_store(const Box& map, unsigned, int, int, int, int, int) {
    const int of_a_thread = (HEAD_DIM_V + 15) / 16;
    require(static_cast<int>(map.words[0]) == kOut, "TMA stores to another tensor");
    require(here().written[consumer()] == 2 * of_a_thread, "O is stored before all warps have written it");
    require(here().fenced[consumer()] == here().written[consumer()], "O is stored without a fence");
}
static void tma_store_commit() { here().written[consumer()] = 0; }
static void tma_store_wait() { give_way(); }

// Which threads of a warpgroup there are: the first, and one of another warp.
constexpr int kSecond = 32;

#include "pipeline_products.h"

// ---- Runs -----------------------------------------------------------------------------------------------------------

// Runs the kernel in a grid of `count` blocks; returns what was wrong, or nothing.
static std::string run_blocks(const Params& p, int count, unsigned seed) {
    random_bits.seed(seed);
    blocks.assign(count, {});
    fibers.assign(count * (1 + 2 * kConsumers), {});
    events.clear();
    stored.clear();
#if CUT
    met_by.clear();
    stored_slots.clear();
#endif
    failure.clear();
    all_bounds = p.bounds;
    padded_keys = p.padded_k, planes_of_mask = max(1, p.mask_planes), heads_of_q = p.heads_q;
    gridDim.x = count;
    for (size_t i = 0; i < fibers.size(); ++i) {
        const unsigned actor = i % (1 + 2 * kConsumers);
        const unsigned thread = actor == 0 ? 0 : (actor + 1) / 2 * 128 + (actor - 1) % 2 * kSecond;
        start(fibers[i], i / (1 + 2 * kConsumers), thread);
    }
    while (failure.empty() && take_turn()) {
    }
    for (const Fiber& fiber : fibers) {
        require(fiber.done, "it hangs");
    }
    for (int i = 0; i < p.batch * p.heads_q * p.tiles_m * kConsumers; ++i) {
        const int group = i % kConsumers, tile = i / kConsumers % p.tiles_m, plane = i / kConsumers / p.tiles_m;
        const bool any = has_rows(p, tile, group) && sees_any(p, plane, tile, group);
#if CUT
        const std::tuple<int, int, int, int> place = {plane / p.heads_q, plane % p.heads_q, tile, group};
        check_keys(p, plane, tile, group, met_by[place]);
        if (p.tile_slots[tile * 2] < p.tile_slots[tile * 2 + 1]) {
            for (int slot = p.tile_slots[tile * 2]; slot < p.tile_slots[tile * 2 + 1]; ++slot) {
                require(stored_slots[{plane / p.heads_q, plane % p.heads_q, slot, group}] == 1, "a slot is not stored once");
            }
            require(stored[place] == 0, "the results of a piece go to out");
            continue;
        }
#endif
        require(stored[{plane / p.heads_q, plane % p.heads_q, tile, group}] == any, "a tile is not stored once");
    }
#if MASKED
    require(p.tile_counter[0] == 0 && p.tile_counter[1] == 0, "the scheduler is not reset");
#endif
    return failure;
}
