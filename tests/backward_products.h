// Products and scalar work of the Hopper backward as backward_pipeline.h sees them: which visit of which key tile the
// registers of a warp hold, from what lay in shared memory; and whether dQ, dK and dV got each visit once.
#pragma once

static const int* visits_of;  // (tiles_n, tiles_m): query tile * 2 + (1 if some is hidden), or -1

constexpr bool kTransposed = kTileM != 64;  // dQ is: each consumer has 64 columns of head_dim
constexpr int kDqParts = !kTransposed && kDqColumns == kHeadDim ? 1 : kConsumers;  // or: consumers take turns
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
    for (; !current->reads.empty() && current->reads.front().group < current->complete; current->reads.pop_front()) {
        const Read& read = current->reads.front();
        require(snapshot(blockIdx.x, read.ranges) == read.writes, "something overwrites what a product reads");
    }
    sync_warp();
}
template <class T>
static void accumulator_fence(T&) {}
template <class T>
static void operand_fence(T&) {}

// ---- Products -------------------------------------------------------------------------------------------------------

// The warp's 16 rows of the 64 that start at `keys`, in every panel of K or V.
static std::vector<Range> own_rows(unsigned keys) {
    std::vector<Range> ranges;
    for (int panel = 0; panel < kPanels; ++panel) {
        const unsigned from = keys + panel * kTileN * kSpan + warp() % 4 * 16 * kSpan;
        ranges.push_back({from, from + 16 * kSpan});
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
constexpr int kStepsM = kTileM / 16;  // along the queries
// Steps `from` to before `to` of a product for dK or dV.
static void add_product(Value& value, const Value& from, unsigned queries, int add, int first, int end) {
    const Range range{queries, queries + kTileBytesM};
    const Write tile = origin({range}, queries);
    if (first == 0 && !add) {
        value.sum.clear();
        value.kind = from.kind == kP ? kDv : kDk;
        value.keys = from.keys;
        value.steps = 0;
    }
    require(from.kind == (value.kind == kDv ? kP : kDs) && from.keys == value.keys, "a wrong factor of dK or dV");
    const Kind factor = value.kind == kDv ? kTensorDo : kTensorQ;
    require(tile.kind == factor && tile.queries == from.queries, "dK or dV with a wrong tile");
    require(value.steps == first, "dK or dV without some of its steps, or with some of them twice");
    value.steps = end % kStepsM;
    if (end == kStepsM) {
        value.sum.push_back(tile.queries);
    }
    note_read({range});
}
template <int kFrom = 0, int kTo = kStepsM, class S, class F>
static void start_dkv(S& sum, const F& frags, unsigned queries, int add) {
    const Value from = issue(frags + kFrom, &Value::read);
    add_product(issue(sum, &Value::written), from, queries, add, kFrom, kTo);
}
// The warp's 16 keys of each query in the consumer's part of dS at `part`.
static std::vector<Range> own_chunks(unsigned part, int from = 0, int step = 1) {
    std::vector<Range> ranges;
    for (int row = from; row < kTileM; row += step > 1 && row % 8 == 7 ? step : 1) {
        for (int chunk = warp() % 4 * 2; chunk < warp() % 4 * 2 + 2; ++chunk) {
            const unsigned at = part + row * kSpanDs + (chunk ^ row % 8) * 16;
            ranges.push_back({at, at + 16});
        }
    }
    return ranges;
}
// The same with dS from shared memory, the consumer's own part. What is no dS spoils the sum until it is overwritten.
template <int kFrom, int kTo, class S>
static void start_dk(S& sum, unsigned ds, unsigned queries, int add) {
    const unsigned tile = ds - (ds - kOffsetDs) % kDsBytes;
    const std::vector<Range> own = own_chunks(ds);  // of A a warp reads its own rows
    const Write found = origin(own, tile);
    Value& value = issue(sum, &Value::written);
    if (found.kind != kDs) {
        value.kind = kNothing;
        return;
    }
    Value from;
    from.kind = kDs;
    from.queries = found.queries;
    from.keys = found.keys;
    require(ds - tile == group_of() * kTileM * kSpanDs, "dK with dS of the other consumer");
    add_product(value, from, queries, add, kFrom, kTo);
    note_read(own);
}
template <class S>
static void start_dq(S& dq, unsigned ds, unsigned k) {
    const unsigned panels = (kDqColumns + kColumns - 1) / kColumns, panel = kTileN * kSpan;
    const unsigned first = (k - kOffsetK) / panel * panel;
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
// Transposed, for 64 keys: first the consumer's own, then those of the other one.
template <class S>
static void start_dq(S& dq, unsigned ds, unsigned k, int add) {
    const unsigned tile = ds - (ds - kOffsetDs) % kDsBytes;
    const Range scores{ds, ds + kTileM * kSpanDs}, keys{k, k + 64 * kSpan};
    const Write a = origin({scores}, tile), b = origin({keys}, kOffsetK);
    Value& value = issue(dq, &Value::written);
    require(b.kind == kTensorK, "dQ with a wrong tile of K");
    require((ds - tile) / (kTileM * kSpanDs) == (k - kOffsetK) % (kTileN * kSpan) / (64 * kSpan), "dQ with other keys");
    const bool other = value.keys == a.keys && value.queries == a.queries && value.steps == 1;
    value.kind = a.kind == kDs && a.keys == b.keys && add && other ? kDq : kNothing;
    value.steps = !add;
    value.queries = a.queries;
    value.keys = a.keys;
    note_read({scores, keys});
}

#include "backward_results.h"
