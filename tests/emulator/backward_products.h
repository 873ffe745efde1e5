// Products and scalar work of the Hopper backward as backward_pipeline.h sees them: which visit of which key tile the
// registers of a warp hold, from what lay in shared memory; and whether dQ, dK and dV got each visit once.
#pragma once

static const int* visits_of;  // (tiles_n, tiles_m): query tile * 2 + (1 if some is hidden), or -1

constexpr int kDqParts = kDqColumns == kHeadDim ? 1 : kConsumers;  // of a tile; 1: consumers take turns
static int group_of() { return warp() / 4 - 1; }
static int visit_of(const Rows& keys, const Rows& queries) {
    return visits_of[keys.row / kTileN * params->tiles_m + queries.row / kTileM];
}

// ---- Registers ------------------------------------------------------------------------------------------------------

static Value& value_of(const void* registers) { return current->registers[registers]; }
// For scalar code to read, or to write.
static Value& use(const void* registers) {
    Value& value = value_of(registers);
    require(value.written < current->complete, "registers are read while a product writes them");
    value.touched = true;
    return value;
}
static Value& define(const void* registers) {
    Value& value = use(registers);
    require(value.read < current->complete, "registers are written while a product reads them");
    return value;
}
// A product that starts writes or reads `registers`.
static Value& issue(const void* registers, int Value::*role) {
    Value& value = value_of(registers);
    require(!value.touched, "a product after other use of its registers without wgmma_fence");
    value.*role = current->group;
    return value;
}
static void note_read(std::vector<Range> ranges) {
    for (const Range& range : ranges) {
        require_fenced(range);
    }
    std::vector<int> found = snapshot(blockIdx.x, ranges);
    current->reads.push_back({std::move(ranges), std::move(found), current->group});
}
static void wgmma_fence() {
    sync_warp();
    for (auto& [registers, value] : current->registers) {
        value.touched = false;
    }
}
static void wgmma_commit() {
    sync_warp();
    ++current->group;
}
template <int groups>
static void wgmma_wait() {
    give_way();
    current->complete = max(current->complete, current->group - groups);
    for (; !current->reads.empty() && current->reads.front().group < current->complete; current->reads.erase(current->reads.begin())) {
        const Read& read = current->reads.front();
        require(snapshot(blockIdx.x, read.ranges) == read.writes, "something overwrites what a product reads");
    }
    sync_warp();
}
template <class T>
static void accumulator_fence(T&) {}

// ---- Products -------------------------------------------------------------------------------------------------------

// The warp's 16 rows of the 64 that start at `keys`, in every panel of K or V.
static std::vector<Range> own_rows(unsigned keys) {
    std::vector<Range> ranges;
    for (int panel = 0; panel < kPanels; ++panel) {
        const unsigned from = keys + panel * kTileN * kSwizzleBytes + warp() % 4 * 16 * kSwizzleBytes;
        ranges.push_back({from, from + 16 * kSwizzleBytes});
    }
    return ranges;
}
static Write own_keys(unsigned keys) { return origin(own_rows(keys), keys < kOffsetV ? kOffsetK : kOffsetV); }
static void set_scores(const void* s, const Write& keys, unsigned queries) {
    const Range range{queries, queries + kTileBytesM};
    const Write tile = origin({range}, queries);
    const bool gradient = keys.kind == kTensorV && tile.kind == kTensorDo;
    Value& value = issue(s, &Value::written);
    value = {kNothing, tile.queries, keys.keys, false, false, value.written, value.read};
    value.kind = gradient ? kDp : keys.kind == kTensorK && tile.kind == kTensorQ ? kS : kNothing;
    note_read({range});
}
template <class T>
static void load_fragments(T& fragments, unsigned keys) {
    sync_warp();
    const Write found = own_keys(keys);
    require(found.kind != kNothing, "fragments of what is not there");
    Value& value = define(fragments);
    value.kind = found.kind;
    value.keys = found.keys;
}
template <class S>
static void start_scores(S& s, unsigned keys, unsigned queries) {
    set_scores(s, own_keys(keys), queries);
    note_read(own_rows(keys));
}
template <class S, int n>
static void start_scores(S& s, const unsigned (&keys)[n][4], unsigned queries) {
    const Value& value = issue(keys, &Value::read);
    set_scores(s, {value.kind, {}, value.keys, true}, queries);
}
template <class Ones>
static void set_ones(Ones& ones) {
    define(ones).kind = kOnes;
}
template <class S, class Ones>
static void start_row_stats(S& s, const Ones& ones, unsigned row_stats) {
    const unsigned offset = (row_stats - kOffsetRowStats) % kRowStatsBytes;  // lse, then delta
    const Range range{row_stats, row_stats + kRowStatsBytes / 2};
    const Write found = origin({range}, row_stats - offset);
    require(issue(ones, &Value::read).kind == kOnes, "row_stats times what is not one");
    Value& value = issue(s, &Value::written);
    const bool of_rows = found.kind == kStats && found.queries == value.queries;
    value.row_stats = of_rows && offset == (value.kind == kDp ? kRowStatsBytes / 2 : 0);
    note_read({range});
}
template <class S, class F>
static void start_dkv(S& sum, const F& frags, unsigned queries, int add) {
    const Range range{queries, queries + kTileBytesM};
    const Write tile = origin({range}, queries);
    const Value from = issue(frags, &Value::read);
    Value& value = issue(sum, &Value::written);
    if (!add) {
        value.sum.clear();
        value.kind = from.kind == kP ? kDv : kDk;
        value.keys = from.keys;
    }
    require(from.kind == (value.kind == kDv ? kP : kDs) && from.keys == value.keys, "a wrong factor of dK or dV");
    const Kind factor = value.kind == kDv ? kTensorDo : kTensorQ;
    require(tile.kind == factor && tile.queries == from.queries, "dK or dV with a wrong tile");
    value.sum.push_back(tile.queries);
    note_read({range});
}
template <class S>
static void start_dq(S& dq, unsigned ds, unsigned k) {
    const unsigned panels = (kDqColumns + kColumns - 1) / kColumns, panel = kTileN * kSwizzleBytes;
    const unsigned first = kOffsetK + (k - kOffsetK) / panel * panel;
    const Range scores{ds, ds + kDsBytes}, keys{first, first + panels * panel};
    const Write a = origin({scores}, ds), b = origin({keys}, kOffsetK);
    Value& value = issue(dq, &Value::written);
    require(b.kind == kTensorK, "dQ with a wrong tile of K");
    value.kind = a.kind == kDs && a.keys == b.keys ? kDq : kNothing;
    value.queries = a.queries;
    value.keys = a.keys;
    if (a.kind == kDs) {
        note_read({scores, keys});
    }
}

#include "backward_results.h"
