// Products and scalar work of the Hopper backward as backward_pipeline.h sees them: which visit of which key tile the
// registers of a warp hold, from what lay in shared memory; and whether dQ, dK and dV got each visit once.
#pragma once

static const int* visits_of;  // (tiles_n, tiles_m): query tile * 2 + (1 if some is hidden), or -1

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

// ---- Scalar work ----------------------------------------------------------------------------------------------------

template <class S>
static void probabilities(S& s, unsigned lse, float) {
    give_way();
    const Write stats = origin({{lse, lse + kTileM * 4}}, lse);
    Value& value = define(s);
    require(value.kind == kS, "P of what is no S");
    require(stats.kind == kStats && stats.queries == value.queries, "P with wrong row statistics");
    value.kind = kP;
}
template <class S>
static void mask(S& s, int query0) {
    Value& value = define(s);
    require(value.kind == kP && value.queries.row == query0 && !value.masked, "the mask of another tile");
    value.masked = true;
}
template <class S, class Spans>
static void apply_mask(S& s, int query0, const Spans&) { mask(s, query0); }
template <class S>
static void apply_mask(const Params&, S& s, int query0, int) { mask(s, query0); }
static void require_masked(const Value& p) {
    const int entry = visit_of(p.keys, p.queries);
    require(p.kind == kP && entry >= 0 && p.masked == (entry & 1), "P is not masked as its visit says");
}
template <class F, class S>
static void pack_scores(F& frags, S& s) {
    const Value p = use(s);
    require_masked(p);
    Value& value = define(frags);
    value.kind = kP;
    value.queries = p.queries;
    value.keys = p.keys;
}
template <class F, class S, class D>
static void score_gradients(F& frags, S& s, D& dp, unsigned delta) {
    give_way();
    const Value p = use(s), gradient = use(dp);
    const Write stats = origin({{delta, delta + kTileM * 4}}, delta - kTileM * 4);
    require_masked(p);
    require(stats.kind == kStats && stats.queries == p.queries, "dS with wrong row statistics");
    require(gradient.kind == kDp && gradient.queries == p.queries && gradient.keys == p.keys, "dS with a wrong dP");
    Value& value = define(frags);
    value.kind = kDs;
    value.queries = p.queries;
    value.keys = p.keys;
}

// ---- Results --------------------------------------------------------------------------------------------------------

template <class F>
static void store_ds(unsigned ds, const F& frags, int group) {
    sync_warp();
    const Value& value = use(frags);
    const unsigned from = (group * 64 + warp() % 4 * 16 + half() * 8) * kSpanDs;
    fill(blockIdx.x, {ds + from, ds + from + 8 * kSpanDs}, new_write({kDs, value.queries, value.keys, false}), from);
}
static int part_bytes(int group) { return 64 * 4 * (group == 0 ? kDqColumns : kHeadDim - kDqColumns); }
template <class D, class... Group>
static void store_dq(unsigned part, const D& dq, Group...) {
    give_way();
    const Value& value = use(dq);
    const int write = new_write({value.kind, value.queries, value.keys, false});
    for (int i = 0; i < part_bytes(group_of()); i += 2048) {
        const unsigned from = i + threadIdx.x % 128 * 16;
        fill(blockIdx.x, {part + from, part + from + 256}, write, from);
    }
}
static void bulk_reduce(const float* target, unsigned part, int bytes) {
    const int group = (part - kOffsetDq) / kDqPartBytes, tile = kTileM * kHeadDim, block = here().number;
    const long long at = target - params->dq_accum, plane = at / (params->padded_q * kHeadDim);
    const int rest = at % (params->padded_q * kHeadDim);
    const Rows rows = rows_of(rest / tile * kTileM, plane, params->heads_q);
    const Write found = origin({{part, part + bytes}}, part);
    require(bytes == part_bytes(group) && rest % tile == group * kDqPartBytes / 4, "a wrong part of dQ");
    require(found.kind == kDq && found.queries == rows, "what is added is not dQ of this tile");
    copy_out({{part, part + bytes}}, [=] { dq_sums[{rows, group}].push_back({block, {found.keys}}); });
}
static void bulk_store(const float* target, unsigned part, int bytes) {
    const long long at = target - params->dq_accum, plane = at / (params->padded_q * kHeadDim);
    const int row = at % (params->padded_q * kHeadDim) / (kTileM * kHeadDim) * kTileM;
    const Rows rows = rows_of(row, plane, params->heads_q);
    require(dq_sums[{rows, (part - kOffsetDq) / kDqPartBytes}].empty(), "sums of dQ are overwritten");
    bulk_reduce(target, part, bytes);
}

template <class S>
static void add_dkv(const float* target, const S& x) {
    give_way();
    const Value value = use(x);
    const long long at = target - params->dkv_accum, plane = at / (params->padded_k * kHeadDim);
    const long long planes = params->batch * params->heads_kv;
    const int row = at % (params->padded_k * kHeadDim) / kHeadDim, part = threadIdx.x % 128 / 16, block = here().number;
    const Rows rows = rows_of(row, plane % planes, params->heads_kv);
    const Rows own{value.keys.row + group_of() * 64, value.keys.head, value.keys.batch};
    require(value.kind == (plane < planes ? kDk : kDv) && rows == own, "dK or dV goes to a wrong place");
    Fiber* fiber = current;
    ++fiber->adding;
    later([=] {
        dkv_sums[{value.kind, rows, part}].push_back({block, value.sum});
        --fiber->adding;
    });
}
static std::map<int, std::vector<Rows>> staged;  // by write
// Chunks of 16 bytes of 8 rows of a staged tile that lanes 0-15 of a warp write, or the others.
static std::vector<Range> staged_rows(unsigned part, int warp, int half) {
    std::vector<Range> ranges;
    constexpr int chunks = kColumns / 8;  // of a panel
    for (int row = warp * 16; row < warp * 16 + 16; ++row) {
        for (int chunk = half; chunk < kHeadDim / 8; chunk += 2) {
            const int place = chunk % chunks ^ row / (64 / kColumns) % chunks;
            const unsigned from = part + chunk / chunks * 64 * kSpan + row * kSpan + place * 16;
            ranges.push_back({from, from + 16});
        }
    }
    return ranges;
}
template <class S>
static void stage_dkv(unsigned part, const S& x, float) {
    sync_warp();
    const Value& value = use(x);
    const Rows own{value.keys.row + group_of() * 64, value.keys.head, value.keys.batch};
    const int write = new_write({value.kind, {}, own, false});
    staged[write] = value.sum;
    for (const Range& range : staged_rows(part, warp() % 4, half())) {
        fill(blockIdx.x, range, write, range.from - part);
    }
}
template <class Map>
static void store_tile(const Map& map, unsigned part, int row, int head, int batch) {
    const int kind = map.words[0] == kTensorDk ? kDk : kDv, block = here().number;
    const Rows rows{row, head, batch};
    for (int i = 0; i < 8; ++i) {
        const std::vector<Range> ranges = staged_rows(part, i / 2, i % 2);
        const Write found = origin(ranges, part);
        require(found.kind == kind && found.keys == rows, "what is stored is not dK or dV of these keys");
        const std::vector<Rows> visits = staged[cell(blockIdx.x, ranges[0].from).write];
        copy_out(ranges, [=] { dkv_sums[{kind, rows, i}].push_back({block, visits}); });
    }
}
static void store_no_dkv(const Params&, int key0, int head, int batch) {
    for (int i = 0; threadIdx.x == 0 && i < 16 * kConsumers; ++i) {
        dkv_sums[{i % 2 ? kDk : kDv, {key0 + i / 16 * 64, head, batch}, i / 2 % 8}].push_back({here().number, {}});
    }
}

#include "backward_sums.h"
