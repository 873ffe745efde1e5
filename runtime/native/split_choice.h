// Whether a forward of few queries splits the keys.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

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

// Is a kernel that splits the keys faster than one whose blocks have the rows of one q head? Times are predicted in
// steps: what a multiprocessor takes for 128 rows by 128 keys. The constants fit 156 cases on an H100: the choice takes
// 1.01 times as long as the faster one (docs/experiments.md, 91).
inline bool splitting_is_faster(const SplitSizes& s) {
    if (!may_split(s.queries, s.keys)) {
        return false;
    }
    constexpr double kStepsOfLoads = 1.0 / 76;  // K and V of 128 keys of a head, where an H100's memory is the bound
    constexpr double kFewRows = 0.85;           // of a step, with 64 rows or fewer
    constexpr double kBesideTile = 4, kBesideCall = 3;  // steps that splitting costs beside the products
    const auto up = [](int64_t size, int64_t unit) { return (size + unit - 1) / unit; };
    const int64_t kv_planes = s.heads_kv * s.batch, q_planes = s.heads_q * s.batch;
    const double key_tiles = static_cast<double>(s.keys) / 128;
    const double loads = static_cast<double>(kv_planes) * key_tiles * kStepsOfLoads / s.bandwidth;

    const int64_t tile = s.queries <= 128 ? 128 : 192;
    const int64_t rounds = up(q_planes * up(s.queries, tile), s.multiprocessors);
    const double step = static_cast<double>(tile) / 128 * (s.queries <= 64 ? kFewRows : 1.0);
    const double whole = std::max(static_cast<double>(rounds) * step * key_tiles, loads);

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

}  // namespace attnforge
