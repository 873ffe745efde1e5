// Scalar work of the Hopper backward as backward_pipeline.cpp sees it: what becomes of the products' registers, and
// where dS, dQ, dK and dV go from them.
#pragma once

// ---- Scalar work ----------------------------------------------------------------------------------------------------

void probabilities(const void* s, float) {
    Value& value = define(s);
    require(value.kind == kS, "P of what is no S");
    require(value.row_stats, "P with wrong row_stats");
    value.kind = kP;
}
void mask_pairs(const void* s, int query0) {
    Value& value = define(s);
    require(value.kind == kP && value.queries.row == query0 && !value.masked, "the mask of another tile");
    value.masked = true;
}
void mask_pairs(const void* s, int query0, int key) {
    mask_pairs(s, query0);
    const int own = use(s).keys.row + group_of() * 64 + warp() % 4 * 16 + lane() / 4;
    require(key == own, "keys of another work tile");
}
unsigned bits_of(int key, int query0) { return key / 64 << 16 | query0 / shape.tile_m; }
void check_bits(const void* s, unsigned seen) {
    const Value& value = define(s);
    mask_pairs(s, value.queries.row);
    const int key = value.keys.row + (warp() / 4 - 1) * 64;
    require(seen == bits_of(key, value.queries.row), "bits of another visit");
}
static void require_masked(const Value& p) {
    const int entry = visit_of(p.keys, p.queries);
    require(p.kind == kP && entry >= 0 && p.masked == (entry & 1), "P is not masked as its visit says");
}
// Of a score whose derivative is kept: the visible pairs come first, then P, packed, and in place of S its product with
// the derivative.
void probabilities(const Params&, const void* s, const void* fragments, unsigned lse, unsigned seen, int, int head,
                   int query0, int) {
    Value& value = define(s);
    const Write found = origin({{lse, lse + shape.row_stats_bytes / 2}}, lse);
    require(value.kind == kS && value.queries.row == query0 && value.queries.head == head, "P of what is no S");
    require(found.kind == kStats && found.queries == value.queries, "P with another lse");
    require(seen == ~0u || static_cast<int>(seen) == query0, "the mask of another tile");
    value.kind = kP;
    value.masked = seen != ~0u;
    Value& packed = define(fragments);
    packed.kind = kP;
    packed.queries = value.queries;
    packed.keys = value.keys;
}
void pack_scores(const void* fragments, const void* s) {
    const Value p = use(s);
    require_masked(p);
    Value& value = define(fragments);
    value.kind = kP;
    value.queries = p.queries;
    value.keys = p.keys;
}
void score_gradients(const void* fragments, const void* s, const void* dp) {
    const Value p = use(s), gradient = use(dp);
    require_masked(p);
    require(gradient.row_stats, "dS with wrong row_stats");
    require(gradient.kind == kDp && gradient.queries == p.queries && gradient.keys == p.keys, "dS with a wrong dP");
    Value& value = define(fragments);
    value.kind = kDs;
    value.queries = p.queries;
    value.keys = p.keys;
}

// ---- Results --------------------------------------------------------------------------------------------------------

void store_ds(unsigned ds, const void* fragments, int group) {
    sync_warp();
    const Value& value = use(fragments);
    const int write = new_write({kDs, value.queries, value.keys, false});
    const unsigned from = (group * 64 + warp() % 4 * 16 + half() * 8) * shape.ds_row_bytes;
    fill(blockIdx.x, {ds + from, ds + from + 8 * shape.ds_row_bytes}, write, from);
}
static int part_bytes(int group) {
    return dq_parts() == 1 || group == 0 ? shape.dq_bytes : 64 * 4 * (shape.head_dim - shape.dq_columns);
}
void store_dq(unsigned part, const void* dq, int) {
    give_way();
    const Value& value = use(dq);
    const int write = new_write({value.kind, value.queries, value.keys, false});
    for (int i = 0; i < part_bytes(group_of()); i += 2048) {
        const unsigned from = i + threadIdx.x % 128 * 16;
        fill(blockIdx.x, {part + from, part + from + 256}, write, from);
    }
}
void bulk_reduce(const float* target, unsigned part, int bytes) {
    const int group = (part - shape.offset_dq) / shape.dq_bytes, of_tile = group % dq_parts();
    const int tile = shape.tile_m * shape.head_dim, block = owner_of_sum();
    const long long at = target - call.dq_accum, plane = at / (call.padded_q * shape.head_dim);
    const int rest = at % (call.padded_q * shape.head_dim);
    const Rows rows = rows_of(rest / tile * shape.tile_m, plane, call.heads_q);
    const Write found = origin({{part, part + bytes}}, part);
    require(bytes == part_bytes(group) && rest % tile == of_tile * shape.dq_bytes / 4, "a wrong part of dQ");
    require(found.kind == kDq && found.queries == rows, "what is added is not dQ of this tile");
    copy_out({{part, part + bytes}}, [=] { dq_sums[{rows, of_tile}].push_back({block, {found.keys}}); });
}
void bulk_store(const float* target, unsigned part, int bytes) {
    const long long at = target - call.dq_accum, plane = at / (call.padded_q * shape.head_dim);
    const int row = at % (call.padded_q * shape.head_dim) / (shape.tile_m * shape.head_dim) * shape.tile_m;
    const Rows rows = rows_of(row, plane, call.heads_q);
    const int of_tile = (part - shape.offset_dq) / shape.dq_bytes % dq_parts();
    require(dq_sums[{rows, of_tile}].empty(), "sums of dQ are overwritten");
    bulk_reduce(target, part, bytes);
}

// Does a block store all of dK and dV of a key tile, so that they need no sums?
static bool stores_all(int key0) {
    const bool whole = call.tile_pieces == nullptr ? call.dkv_accum == nullptr
                                                   : call.tile_pieces[key0 / shape.tile_n] == 1;
    return whole && (call.dkv_accum == nullptr || call.heads_q == call.heads_kv);
}
void add_dkv(const float* target, const void* sum) {
    give_way();
    require_before_ended();
    const Value value = use(sum);
    const long long at = target - call.dkv_accum, plane = at / (call.padded_k * shape.head_dim);
    const long long planes = call.batch * call.heads_kv;
    const int row = at % (call.padded_k * shape.head_dim) / shape.head_dim;
    const int part = threadIdx.x % 128 / 16, block = owner_of_sum();
    const Rows rows = rows_of(row, plane % planes, call.heads_kv);
    const Rows own{value.keys.row + group_of() * 64, value.keys.head, value.keys.batch};
    require(value.kind == (plane < planes ? kDk : kDv) && rows == own, "dK or dV goes to a wrong place");
    require(!stores_all(row), "dK or dV is added to sums that nobody reads");
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
    const int chunks = shape.columns / 8;  // of a panel
    for (int row = warp * 16; row < warp * 16 + 16; ++row) {
        for (int chunk = half; chunk < shape.head_dim / 8; chunk += 2) {
            const int place = chunk % chunks ^ row / (64 / shape.columns) % chunks;
            const unsigned from = part + (chunk / chunks * 64 + row) * shape.swizzle_bytes + place * 16;
            ranges.push_back({from, from + 16});
        }
    }
    return ranges;
}
void stage_dkv(unsigned part, const void* sum, float factor) {
    sync_warp();
    const Value& value = use(sum);
    require(factor == (value.kind == kDk ? call.scale : 1.0f), "dK without the scale, or dV with it");
    const Rows own{value.keys.row + group_of() * 64, value.keys.head, value.keys.batch};
    const int write = new_write({value.kind, {}, own, false});
    staged[write] = value.sum;
    for (const Range& range : staged_rows(part, warp() % 4, half())) {
        fill(blockIdx.x, range, write, range.from - part);
    }
}
void store_tile(const TensorMap& map, unsigned part, int row, int head, int batch) {
    const int kind = map.words[0] == kTensorDk ? kDk : kDv, block = owner_of_sum();
    const Rows rows{row, head, batch};
    require(stores_all(row), "a part of dK or dV is stored");
    for (int i = 0; i < 8; ++i) {
        const std::vector<Range> ranges = staged_rows(part, i / 2, i % 2);
        const Write found = origin(ranges, part);
        require(found.kind == kind && found.keys == rows, "what is stored is not dK or dV of these keys");
        const std::vector<Rows> visits = staged[cell(blockIdx.x, ranges[0].from).write];
        copy_out(ranges, [=] { dkv_sums[{kind, rows, i}].push_back({block, visits}); });
    }
}
void store_no_dkv(const Params&, int key0, int head, int batch) {
    require_before_ended();
    require(stores_all(key0), "zeros for a part of dK and dV");
    for (int i = 0; threadIdx.x == 0 && i < 16 * shape.consumers; ++i) {
        dkv_sums[{i % 2 ? kDk : kDv, {key0 + i / 16 * 64, head, batch}, i / 2 % 8}].push_back({owner_of_sum(), {}});
    }
}
// By a warp, or by the block.
void store_no_dkv(const Params& p, int key0, int head, int batch, int thread, int threads) {
    const bool alone = threads == 32;
    require(thread == (alone ? lane() : static_cast<int>(threadIdx.x)), "zeros by wrong threads");
    require(alone || threads == 128 * (1 + shape.consumers), "zeros by wrong threads");
    store_no_dkv(p, key0, head, batch);
}

#include "backward_sums.h"
