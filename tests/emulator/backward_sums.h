// At the end of a run of backward_pipeline.h: have dQ, dK and dV all their terms, each once and, if deterministic, in order?
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
static void require_sums(const Params& p, bool deterministic) {
    const int group = p.heads_q / p.heads_kv;
    for (int batch = 0; batch < p.batch; ++batch) {
        for (int i = 0; i < p.heads_q * p.tiles_m * kDqParts; ++i) {
            const int tile = i / kDqParts % p.tiles_m, head = i / kDqParts / p.tiles_m;
            std::vector<Rows> keys;
            for (int n = 0; n < p.tiles_n; ++n) {
                if (visits_of[n * p.tiles_m + tile] >= 0) {
                    keys.push_back({n * kTileN, head / group, batch});
                }
            }
            const std::vector<Sum>& sums = dq_sums[{{tile * kTileM, head, batch}, i % kDqParts}];
            require_each(sums, keys, "dQ has not the parts of all its key tiles, each once");
            require(!deterministic || in_turn(sums), "parts of dQ are added out of turn");
        }
        for (int i = 0; i < p.heads_kv * p.tiles_n * kConsumers * 16; ++i) {
            const int fiber = i % 8, kind = i / 8 % 2 ? kDk : kDv, key0 = i / 16 % (p.tiles_n * kConsumers) * 64;
            const int head = i / 16 / (p.tiles_n * kConsumers);
            std::vector<Rows> queries;
            for (int j = 0; j < group * p.tiles_m; ++j) {
                if (visits_of[key0 / kTileN * p.tiles_m + j % p.tiles_m] >= 0) {
                    queries.push_back({j % p.tiles_m * kTileM, head * group + j / p.tiles_m, batch});
                }
            }
            const std::vector<Sum>& sums = dkv_sums[{kind, {key0, head, batch}, fiber}];
            if (key0 < p.seq_k) {
                require_each(sums, queries, "dK or dV has not the products of all its visits, each once");
                require(p.dkv_accum != nullptr || sums.size() == 1, "dK or dV is not stored once");
            }
            require(!deterministic || in_turn(sums), "dK or dV is added to out of turn");
        }
    }
}
