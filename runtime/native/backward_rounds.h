// How well the work of a backward fills a GPU. The same rule as `rounds_of` in runtime/tables.py.
#pragma once

#include <algorithm>
#include <cstdint>

namespace attnforge {

constexpr int64_t kManyRounds = 8;  // beyond it, the number of rounds no longer matters

// How often the key tiles of 128 keys of all kv heads and batch entries fill three quarters of the multiprocessors.
inline int64_t backward_rounds(int64_t batch, int64_t heads_kv, int64_t keys, int64_t multiprocessors) {
    constexpr int64_t kKeys = 128;
    const int64_t tiles = batch * heads_kv * ((keys + kKeys - 1) / kKeys);
    return std::min(kManyRounds, 4 * tiles / (3 * multiprocessors));
}

}  // namespace attnforge
