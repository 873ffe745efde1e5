// Whether a forward of few queries splits the keys, and into how many parts.
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <limits>

namespace attnforge {

// Few queries for many keys?
inline bool may_split(int64_t queries, int64_t keys) {
    constexpr int64_t kQueries = 512, kKeys = 1024, kKeysOfQuery = 4;
    return queries <= kQueries && keys >= std::max(kKeys, kKeysOfQuery * queries);
}

// Kernels that split the keys number the packed rows of a kv head, in whole tiles, with an int.
inline bool numbers_rows(int64_t rows, int64_t tile_m) { return rows <= INT_MAX / tile_m * tile_m; }

// Sizes of a forward on a GPU. `bandwidth`: that of its memory over an H100's.
struct SplitSizes {
    int64_t batch, heads_q, heads_kv, queries, keys, multiprocessors;
    double bandwidth;
};

constexpr int kMostOfCluster = 8;  // blocks, of all devices that have clusters
using ClusterCounts = std::array<int, kMostOfCluster + 1>;  // by the number of their blocks

// `kv_splits` parts of the keys, each for a cluster of `cluster_size` blocks that share it. `time`: predicted visits.
struct Splits {
    int kv_splits, cluster_size;
    double time;
};

// Costs in visits of a key tile by a tile of rows. `loads`: what all visits take at least, as K and V are read from
// memory. `combining`: of several splits, whose results pass through memory to another kernel.
struct SplitCosts {
    double loads, combining;
};

// Of a kernel whose blocks form clusters, with tiles of `tile_m` rows, for so many key tiles of all heads. `bandwidth`:
// of the memory, over an H100's. The constants were fitted to 183 cases on an H200, with tiles of 64 rows by 64 keys
// and of 128 by 128 (docs/experiments.md, 139).
inline SplitCosts split_costs(int64_t tile_m, int64_t key_tiles, double bandwidth) {
    constexpr double kVisitsOfLoads = 1.0 / 69;  // of K and V of a key tile, where an H100's memory is the bound
    constexpr double kCombining = 192;           // visits of a row
    return {static_cast<double>(key_tiles) * kVisitsOfLoads / bandwidth, kCombining / static_cast<double>(tile_m)};
}

// How the keys of `work_tiles` work tiles, `tiles_n` tiles of keys each, are split. `held`: clusters that the device
// holds at a time. They run in rounds of as many, all of about the same length; for each number of rounds, the ranges
// that fill them are considered.
inline Splits choose_splits(const ClusterCounts& held, int64_t work_tiles, int64_t tiles_n, const SplitCosts& costs) {
    constexpr double kBesideRound = 10;  // rows of q, a pipeline that fills and drains, results
    Splits chosen{1, 1, std::numeric_limits<double>::max()};
    for (int64_t size = 1; size <= kMostOfCluster; ++size) {
        const int64_t least = held[size] == 0 ? 0 : (work_tiles + held[size] - 1) / held[size];
        for (int64_t rounds = least; least > 0 && rounds < least + 4; ++rounds) {
            const int64_t most = std::clamp<int64_t>(rounds * held[size] / work_tiles * size, 1, tiles_n);
            const int64_t tiles_of_range = (tiles_n + most - 1) / most;
            const int64_t ranges = (tiles_n + tiles_of_range - 1) / tiles_of_range;
            const int64_t splits = (ranges + size - 1) / size;
            const double visits = std::max(static_cast<double>(rounds * tiles_of_range), costs.loads);
            const double beside = kBesideRound * static_cast<double>(rounds) + (splits > 1 ? costs.combining : 0);
            if (visits + beside < chosen.time) {
                chosen = {static_cast<int>(splits), static_cast<int>(size), visits + beside};
            }
        }
    }
    return chosen;
}

// Is a kernel that splits the keys faster than one whose blocks have the rows of one q head? Times are predicted in
// steps: what a multiprocessor takes for 128 rows by 128 keys. The constants fit 156 cases on an H100, where the choice
// took 1.01 times as long as the faster one (docs/experiments.md, 91). kApart was fitted to 123 cases on an H200, where
// it took 1.001 times as long (138).
inline bool splitting_is_faster(const SplitSizes& s) {
    if (!may_split(s.queries, s.keys)) {
        return false;
    }
    constexpr double kStepsOfLoads = 1.0 / 76;  // K and V of 128 keys of a head, where an H100's memory is the bound
    constexpr double kFewRows = 0.85;           // of a step, with 64 rows or fewer
    constexpr double kApart = 1.1;              // where q heads of a kv head load K and V each on its own
    constexpr double kBesideTile = 4, kBesideCall = 3;  // steps that splitting costs beside the products
    const auto up = [](int64_t size, int64_t unit) { return (size + unit - 1) / unit; };
    const int64_t kv_planes = s.heads_kv * s.batch, q_planes = s.heads_q * s.batch;
    const double key_tiles = static_cast<double>(s.keys) / 128;
    const double loads = static_cast<double>(kv_planes) * key_tiles * kStepsOfLoads / s.bandwidth;

    const int64_t tile = s.queries <= 128 ? 128 : 192;
    const int64_t rounds = up(q_planes * up(s.queries, tile), s.multiprocessors);
    const double step = static_cast<double>(tile) / 128 * (s.queries <= 64 ? kFewRows : 1.0);
    const double apart = s.heads_q > s.heads_kv ? kApart : 1.0;
    const double whole = std::max(static_cast<double>(rounds) * step * key_tiles * apart, loads);

    const int64_t rows = s.queries * (s.heads_q / s.heads_kv);
    const int64_t packed = rows <= 128 ? 64 : 128;
    if (!numbers_rows(rows, packed)) {
        return false;
    }
    const double work_tiles = static_cast<double>(up(rows, packed) * packed * kv_planes) / 128;
    const double products = work_tiles / static_cast<double>(s.multiprocessors) * (key_tiles + kBesideTile);
    const double split = std::max(products, loads) + kBesideCall;
    return split < whole;
}

// Rows of the tiles with which a kernel that splits the keys is faster, 64 or 128: small tiles share out few rows and
// keys among more blocks. The constants were fitted to 65 cases on an H200, where the choice takes 1.001 times as long
// as the faster kernel, 1.04 at most (docs/experiments.md, 138).
inline int64_t split_rows(const SplitSizes& s) {
    constexpr double kSmallVisit = 0.5;   // of one of 128 rows by 128 keys
    constexpr double kSmallBeside = 1.5;  // visits of 128 rows that small tiles cost beside
    const int64_t rows = s.queries * (s.heads_q / s.heads_kv), planes = s.heads_kv * s.batch;
    const auto time = [&](int64_t tile) {
        const int64_t tiles_n = (s.keys + tile - 1) / tile, work_tiles = (rows + tile - 1) / tile * planes;
        ClusterCounts held{};
        held[1] = static_cast<int>(s.multiprocessors);
        return choose_splits(held, work_tiles, tiles_n, split_costs(tile, planes * tiles_n, s.bandwidth)).time;
    };
    return time(64) * kSmallVisit + kSmallBeside < time(128) ? 64 : 128;
}

}  // namespace attnforge
