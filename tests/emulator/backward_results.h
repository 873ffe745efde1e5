// Scalar work of the Hopper backward as backward_pipeline.h sees it: what becomes of the products' registers, and where
// dS, dQ, dK and dV go from them.
#pragma once

// ---- Scalar work ----------------------------------------------------------------------------------------------------

template <class S>
static void probabilities(S& s, float) {
    Value& value = define(s);
    require(value.kind == kS, "P of what is no S");
    require(value.row_stats, "P with wrong row_stats");
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
// Of a score whose derivative is kept: the visible pairs come first, then P, packed, and in place of S its product with
// the derivative.
template <class Spans>
static unsigned seen_pairs(int query0, const Spans&) { return query0; }
static unsigned seen_pairs(const Params&, int query0, int) { return query0; }
template <class S, class F>
static void probabilities(const Params&, S& s, F& frags, unsigned lse, unsigned seen, int, int head, int query0, int) {
    Value& value = define(s);
    const Write found = origin({{lse, lse + kRowStatsBytes / 2}}, lse);
    require(value.kind == kS && value.queries.row == query0 && value.queries.head == head, "P of what is no S");
    require(found.kind == kStats && found.queries == value.queries, "P with another lse");
    require(seen == ~0u || static_cast<int>(seen) == query0, "the mask of another tile");
    value.kind = kP;
    value.masked = seen != ~0u;
    Value& packed = define(frags);
    packed.kind = kP;
    packed.queries = value.queries;
    packed.keys = value.keys;
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
static void score_gradients(F& frags, S& s, D& dp) {
    const Value p = use(s), gradient = use(dp);
    require_masked(p);
    require(gradient.row_stats, "dS with wrong row_stats");
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
    const int write = new_write({kDs, value.queries, value.keys, false});
    const unsigned from = (group * 64 + warp() % 4 * 16 + half() * 8) * kDsRowBytes;
    fill(blockIdx.x, {ds + from, ds + from + 8 * kDsRowBytes}, write, from);
}
#ifdef DQ_RED
// From the registers of each half of a warp; the first one of a consumer stands for all of them in the sums.
template <class D>
static void add_dq(const float* target, const D& dq) {
    give_way();
    require_before_ended();
    const Value value = use(dq);
    const int tile = kTileM * kHeadDim, block = here().number;
    const long long at = target - params->dq_accum, plane = at / (params->padded_q * kHeadDim);
    const int rest = at % (params->padded_q * kHeadDim);
    const Rows rows = rows_of(rest / tile * kTileM, plane, params->heads_q);
    require(rest % tile == group_of() * kDqFloats, "a wrong part of dQ");
    require(value.kind == kDq && value.queries == rows, "what is added is not dQ of this tile");
    if (threadIdx.x % 128 == 0) {
        dq_sums[{rows, group_of()}].push_back({block, {value.keys}});
    }
}
#else
static int part_bytes(int group) {
    return kDqParts == 1 || group == 0 ? kDqBytes : 64 * 4 * (kHeadDim - kDqColumns);
}
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
    const int group = (part - kOffsetDq) / kDqBytes, tile = kTileM * kHeadDim, block = here().number;
    const long long at = target - params->dq_accum, plane = at / (params->padded_q * kHeadDim);
    const int rest = at % (params->padded_q * kHeadDim);
    const Rows rows = rows_of(rest / tile * kTileM, plane, params->heads_q);
    const Write found = origin({{part, part + bytes}}, part);
    const int of_tile = group % kDqParts;
    require(bytes == part_bytes(group) && rest % tile == of_tile * kDqBytes / 4, "a wrong part of dQ");
    require(found.kind == kDq && found.queries == rows, "what is added is not dQ of this tile");
    copy_out({{part, part + bytes}}, [=] { dq_sums[{rows, of_tile}].push_back({block, {found.keys}}); });
}
static void bulk_store(const float* target, unsigned part, int bytes) {
    const long long at = target - params->dq_accum, plane = at / (params->padded_q * kHeadDim);
    const int row = at % (params->padded_q * kHeadDim) / (kTileM * kHeadDim) * kTileM;
    const Rows rows = rows_of(row, plane, params->heads_q);
    require(dq_sums[{rows, (part - kOffsetDq) / kDqBytes % kDqParts}].empty(), "sums of dQ are overwritten");
    bulk_reduce(target, part, bytes);
}
#endif

template <class S>
static void add_dkv(const float* target, const S& x) {
    give_way();
    require_before_ended();
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
            const unsigned from = part + chunk / chunks * 64 * kSwizzleBytes + row * kSwizzleBytes + place * 16;
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
    require_before_ended();
    for (int i = 0; threadIdx.x == 0 && i < 16 * kConsumers; ++i) {
        dkv_sums[{i % 2 ? kDk : kDv, {key0 + i / 16 * 64, head, batch}, i / 2 % 8}].push_back({here().number, {}});
    }
}

#include "backward_sums.h"
