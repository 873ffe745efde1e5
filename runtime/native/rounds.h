// How well the work of a call fills a GPU. The same rule as `rounds_of` in runtime/rounds.py.
#pragma once

#include <algorithm>
#include <cstdint>

namespace attnforge {

constexpr int64_t kManyRounds = 8;  // beyond it, the number of rounds no longer matters

// How often tiles of 128 rows of all heads and batch entries fill three quarters of the multiprocessors. A forward's
// rows are queries of q heads, a backward's keys of kv heads.
inline int64_t rounds(int64_t batch, int64_t heads, int64_t rows, int64_t multiprocessors) {
    constexpr int64_t kRows = 128;
    const int64_t tiles = batch * heads * ((rows + kRows - 1) / kRows);
    return std::min(kManyRounds, 4 * tiles / (3 * multiprocessors));
}

}  // namespace attnforge
