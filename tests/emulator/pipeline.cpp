// The barriers and copies of the Hopper forward kernel on the CPU. One thread of the producer and two of each consumer
// warpgroup are fibers that run in random turns; copies take their time. What a kernel computes is left out: its
// products only note which rows of which tensor they read, and that these stay until they end.
#include "pipeline.h"

#include <cstddef>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr int kMaxConsumers = 3;

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
    std::map<unsigned, int4> words;   // work tiles that the producer broadcasts
    int written[kMaxConsumers] = {};  // by warpgroup: parts of O in its buffer, and how many of them TMA may read
    int fenced[kMaxConsumers] = {};
    bool stores[kMaxConsumers] = {};  // whether TMA may still read O there
    int column[kMaxConsumers] = {};   // of O, that TMA stores next from O's own buffer
    unsigned start[kMaxConsumers] = {};  // of these rows in the buffer
};
struct Read {  // by a product in flight
    std::vector<std::pair<unsigned, Piece>> pieces;  // with their addresses
    int group;
};
struct State {
    std::vector<Read> reads;
    int group = 0;
    Piece q;
    Piece begun;  // head, batch, row and first key (`column`) that S has begun with
    std::vector<std::pair<Piece, Piece>> scores;  // first row of Q, of K
    std::vector<Piece> values;
    std::set<int> masked;  // key tiles of this work tile that ran mask code
};
enum Tensor { kNone, kQ, kK, kV, kOut, kBounds };

}  // namespace

#include "machine.h"

static Shape shape;
static Call call;
using Place = std::tuple<int, int, int, int>;  // batch, head, tile or slot, warpgroup
static std::map<Place, int> stored;            // how often each tile is stored,
static std::map<Place, int> stored_slots;      // and each slot
static std::map<Place, std::set<int>> met_by;  // where lists are cut: the key tiles of all pieces of a tile so far

static int consumer() { return threadIdx.x / 128 - 1; }

void shared_store(unsigned address, int4 x) {
    give_way();
    here().words[address] = x;
}
int4 shared_load(unsigned address) {
    give_way();
    return here().words[address];
}
void named_sync(int id, int threads) { meet(here().named[id], 64, threads, true); }
void named_arrive(int id, int threads) { meet(here().named[id], 64, threads, false); }
void __syncthreads() { meet(here().named[0], 1, 1 + 2 * shape.consumers, true); }
void __syncwarp() { give_way(); }

// ---- Copies ---------------------------------------------------------------------------------------------------------

// Words of a TensorMap here: tensor, columns, rows and panels of a box.
void tma_load(unsigned to, const TensorMap& map, unsigned barrier, int column, int row, int, int head, int batch) {
    give_way();
    const auto* box = map.words;
    const unsigned block = blockIdx.x;
    const Piece first = {static_cast<int>(box[0]), column, row, head, batch};
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
// Starts and ends of consecutive keys, for each of their intervals; the first key is noted, counted through planes.
void bulk_load(unsigned to, const int* from, int bytes, unsigned barrier) {
    give_way();
    const unsigned block = blockIdx.x;
    const int key = (from - call.bounds) / (2 * shape.intervals);
    later([=] {
        blocks[block].shared[to] = {kBounds, 0, key, 0, 0};
        landed(block, barrier, bytes);
    });
}
int atomicAdd(int* word, int x) {
    give_way();
    const int before = *word;
    *word += x;
    return before;
}

// ---- O --------------------------------------------------------------------------------------------------------------

void stmatrix(unsigned address, unsigned, unsigned, unsigned, unsigned) {
    give_way();
    require(shape.out_panels == 0 || !here().stores[consumer()], "O is overwritten while it is stored");
    const unsigned row = shape.swizzle_bytes;
    for (unsigned bytes = 0; bytes < row && bytes <= address; bytes += kPieceBytes) {
        if (Piece& piece = here().shared[address - bytes]; piece.tensor != kNone) {
            require(shape.out_panels == 0, "O overwrites a tile");
            piece = {kOut};  // O takes the place of this row of Q
            break;
        }
    }
    ++here().written[consumer()];
}
void proxy_fence() { here().fenced[consumer()] = std::exchange(here().written[consumer()], 0); }
void tma_store(const TensorMap& map, unsigned from_address, int column, int, int, int, int) {
    // Of a thread: 16 columns at a time, of all panels or of those that the buffer holds in this round.
    const int round = shape.out_panels * shape.columns, from = round > 0 ? column / round * round : 0;
    const int columns = round > 0 ? min(round, shape.head_dim_v - from) : shape.head_dim_v;
    const int of_a_thread = (columns + 15) / 16;
    require(map.words[0] == kOut, "TMA stores to another tensor");
    const int fenced = here().fenced[consumer()];
    require(fenced == 0 || fenced == 2 * of_a_thread, "O is stored before all warps have written it");
    require(fenced != 0 && here().written[consumer()] == 0, "O is stored without a fence");
    here().stores[consumer()] = true;
    if (shape.out_panels > 0) {
        int& next = here().column[consumer()];
        unsigned& start = here().start[consumer()];
        start = column == 0 ? from_address : start;
        const int panel = column / shape.columns % shape.out_panels;
        require(column == next, "a panel of O is missing");
        require(from_address == start + panel * shape.tile_m * shape.swizzle_bytes, "another panel of O is stored");
        next = (column + shape.columns) % (shape.columns * shape.panels_v);
    }
}
void tma_store_commit() { here().fenced[consumer()] = 0; }
void tma_store_wait() {
    give_way();
    if (threadIdx.x % 128 == 0) {  // which has issued them
        here().stores[consumer()] = false;
    }
}

#include "pipeline_products.h"

// ---- Runs -----------------------------------------------------------------------------------------------------------

constexpr int kSecond = 32;  // threads of a warpgroup that there are: the first, and this one of another warp

// At the end of a run: each tile that has something to store is stored once, whole or all of its pieces.
static void require_stored(int plane, int tile, int group) {
    const int batch = plane / call.heads_q, head = plane % call.heads_q;
    const Place place = {batch, head, tile, group};
    if (shape.cut) {
        check_keys(plane, tile, group, met_by[place]);
        const int first = call.tile_slots[tile * 2], last = call.tile_slots[tile * 2 + 1];
        for (int slot = first; slot < last; ++slot) {
            require(stored_slots[{batch, head, slot, group}] == 1, "a slot is not stored once");
        }
        if (first < last) {
            require(stored[place] == 0, "the results of a piece go to out");
            return;
        }
    }
    const bool any = has_rows(tile, group) && sees_any(plane, tile, group);
    require(stored[place] == any, "a tile is not stored once");
}

const char* run_blocks(void (*kernel)(), const Shape& of_kernel, const Call& of_call, int count, unsigned seed) {
    shape = of_kernel;
    call = of_call;
    body = kernel;
    random_bits.seed(seed);
    blocks.assign(count, {});
    fibers = std::vector<Fiber>(count * (1 + 2 * shape.consumers));
    events.clear();
    stored.clear();
    stored_slots.clear();
    met_by.clear();
    failure.clear();
    gridDim.x = count;
    for (size_t i = 0; i < fibers.size(); ++i) {
        const unsigned actor = i % (1 + 2 * shape.consumers);
        const unsigned thread = actor == 0 ? 0 : (actor + 1) / 2 * 128 + (actor - 1) % 2 * kSecond;
        start(fibers[i], i / (1 + 2 * shape.consumers), thread);
    }
    while (failure.empty() && take_turn()) {
    }
    for (const Fiber& fiber : fibers) {
        require(fiber.done, "it hangs");
    }
    for (const Block& block : blocks) {
        for (int group = 0; group < shape.consumers; ++group) {
            require(!block.stores[group], "a block ends while O is stored");
            require(block.column[group] == 0, "a panel of O is missing");
        }
    }
    for (int i = 0; i < call.batch * call.heads_q * call.tiles_m * shape.consumers; ++i) {
        const int group = i % shape.consumers, tile = i / shape.consumers;
        require_stored(tile / call.tiles_m, tile % call.tiles_m, group);
    }
    if (shape.listed) {
        require(call.tile_counter[0] == 0 && call.tile_counter[1] == 0, "the scheduler is not reset");
    }
    return failure.c_str();
}
