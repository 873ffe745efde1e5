// At the end of a run of backward_pipeline.cpp: have dQ, dK and dV all their terms, each once and, if deterministic, in
// order?
#pragma once

static bool in_turn(const std::vector<Sum>& sums) {
    return std::is_sorted(sums.begin(), sums.end(), [](const Sum& a, const Sum& b) { return a.block < b.block; });
}
// `sums` are of `expected`, each once.
static void require_each(const std::vector<Sum>& sums, const std::vector<Rows>& expected, const char* what) {
    std::vector<Rows> all;
    for (const Sum& sum : sums) {
        all.insert(all.end(), sum.visits.begin(), sum.visits.end());
    }
    std::sort(all.begin(), all.end());
    require(all == expected, what);
}
static void require_sums() {
    const int group = call.heads_q / call.heads_kv;
    for (int batch = 0; batch < call.batch; ++batch) {
        for (int i = 0; i < call.heads_q * call.tiles_m * dq_parts(); ++i) {
            const int tile = i / dq_parts() % call.tiles_m, head = i / dq_parts() / call.tiles_m;
            std::vector<Rows> keys;
            for (int n = 0; n < call.tiles_n; ++n) {
                if (call.visits[n * call.tiles_m + tile] >= 0) {
                    keys.push_back({n * shape.tile_n, head / group, batch});
                }
            }
            const std::vector<Sum>& sums = dq_sums[{{tile * shape.tile_m, head, batch}, i % dq_parts()}];
            require_each(sums, keys, "dQ has not the parts of all its key tiles, each once");
            require(!shape.deterministic || in_turn(sums), "parts of dQ are added out of turn");
        }
        for (int i = 0; i < call.heads_kv * call.tiles_n * shape.consumers * 16; ++i) {
            const int fiber = i % 8, kind = i / 8 % 2 ? kDk : kDv, groups = call.tiles_n * shape.consumers;
            const int key0 = i / 16 % groups * 64, head = i / 16 / groups;
            std::vector<Rows> queries;
            for (int j = 0; j < group * call.tiles_m; ++j) {
                if (call.visits[key0 / shape.tile_n * call.tiles_m + j % call.tiles_m] >= 0) {
                    queries.push_back({j % call.tiles_m * shape.tile_m, head * group + j / call.tiles_m, batch});
                }
            }
            const std::vector<Sum>& sums = dkv_sums[{kind, {key0, head, batch}, fiber}];
            if (key0 < call.seq_k) {
                require_each(sums, queries, "dK or dV has not the products of all its visits, each once");
                require(!stores_all(key0) || sums.size() == 1, "dK or dV is not stored once");
            }
            require(!shape.deterministic || in_turn(sums), "dK or dV is added to out of turn");
        }
    }
}
