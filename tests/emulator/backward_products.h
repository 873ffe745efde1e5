// Products and scalar work of the Hopper backward as backward_pipeline.cpp sees them: which visit of which key tile the
// registers of a warp hold, from what lay in shared memory; and whether dQ, dK and dV got each visit once.
#pragma once

// Parts of dQ of a tile. 1: consumers take turns.
static int dq_parts() { return shape.dq_columns == shape.head_dim ? 1 : shape.consumers; }
static int group_of() { return warp() / 4 - 1; }
static int visit_of(const Rows& keys, const Rows& queries) {
    return call.visits[keys.row / shape.tile_n * call.tiles_m + queries.row / shape.tile_m];
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
void wgmma_fence() {
    sync_warp();
    for (auto& [registers, value] : current->registers) {
        value.touched = false;
    }
}
void wgmma_commit() {
    sync_warp();
    ++current->group;
}
void wgmma_wait_for(int groups) {
    give_way();
    current->complete = max(current->complete, current->group - groups);
    std::vector<Read>& reads = current->reads;
    for (; !reads.empty() && reads.front().group < current->complete; reads.erase(reads.begin())) {
        const Read& read = reads.front();
        require(snapshot(blockIdx.x, read.ranges) == read.writes, "something overwrites what a product reads");
    }
    sync_warp();
}

// ---- Products -------------------------------------------------------------------------------------------------------

// The warp's 16 rows of the 64 that start at `keys`, in every panel of K or V.
static std::vector<Range> own_rows(unsigned keys) {
    std::vector<Range> ranges;
    for (int panel = 0; panel < shape.panels; ++panel) {
        const unsigned from = keys + (panel * shape.tile_n + warp() % 4 * 16) * shape.swizzle_bytes;
        ranges.push_back({from, from + 16 * shape.swizzle_bytes});
    }
    return ranges;
}
// Where the tile of K or V starts that `keys` lies in.
static unsigned tile_of(unsigned keys) {
    const unsigned first = keys < shape.offset_v ? shape.offset_k : shape.offset_v;
    return first + (keys - first) / shape.tile_bytes_n * shape.tile_bytes_n;
}
static Write own_keys(unsigned keys) {
    return origin(own_rows(keys), tile_of(keys));
}
static void set_scores(const void* s, const Write& keys, unsigned queries) {
    const Range range{queries, queries + shape.tile_bytes_m};
    const Write tile = origin({range}, queries);
    const bool gradient = keys.kind == kTensorV && tile.kind == kTensorDo;
    Value& value = issue(s, &Value::written);
    value = {kNothing, tile.queries, keys.keys, false, false, value.written, value.read};
    value.kind = gradient ? kDp : keys.kind == kTensorK && tile.kind == kTensorQ ? kS : kNothing;
    note_read({range});
}
void load_fragments(const void* fragments, unsigned keys) {
    sync_warp();
    const Write found = own_keys(keys);
    require(found.kind != kNothing, "fragments of what is not there");
    Value& value = define(fragments);
    value.kind = found.kind;
    value.keys = found.keys;
}
void start_scores(const void* s, unsigned keys, unsigned queries) {
    set_scores(s, own_keys(keys), queries);
    note_read(own_rows(keys));
}
void start_scores(const void* s, const void* keys, unsigned queries) {
    const Value& value = issue(keys, &Value::read);
    set_scores(s, {value.kind, {}, value.keys, true}, queries);
}
void set_ones(const void* ones) {
    define(ones).kind = kOnes;
}
void start_row_stats(const void* s, const void* ones, unsigned row_stats) {
    const unsigned bytes = shape.row_stats_bytes / 2;
    const unsigned offset = (row_stats - shape.offset_row_stats) % (2 * bytes);  // lse, then delta
    const Range range{row_stats, row_stats + bytes};
    const Write found = origin({range}, row_stats - offset);
    require(issue(ones, &Value::read).kind == kOnes, "row_stats times what is not one");
    Value& value = issue(s, &Value::written);
    const bool of_rows = found.kind == kStats && found.queries == value.queries;
    value.row_stats = of_rows && offset == (value.kind == kDp ? bytes : 0);
    note_read({range});
}
void start_dkv(const void* sum, const void* fragments, unsigned queries, int add) {
    const Range range{queries, queries + shape.tile_bytes_m};
    const Write tile = origin({range}, queries);
    const Value from = issue(fragments, &Value::read);
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
void start_dq(const void* dq, unsigned ds, unsigned k) {
    const unsigned panels = (shape.dq_columns + shape.columns - 1) / shape.columns;
    const unsigned panel = shape.tile_n * shape.swizzle_bytes;
    const unsigned first = shape.offset_k + (k - shape.offset_k) / panel * panel;
    const Range scores{ds, ds + shape.ds_bytes}, keys{first, first + panels * panel};
    const Write a = origin({scores}, ds), b = origin({keys}, tile_of(first));
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
