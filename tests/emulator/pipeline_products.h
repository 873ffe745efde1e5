// Products and results as pipeline.h sees them: which rows they read, and whether these were there and stayed.
#pragma once

// The pieces of `count` rows from row `from` on of a tile of `rows`; they must follow one another and be of `tensor`.
static Piece read(unsigned tile, int from, int count, int rows, Tensor tensor) {
    Read read{{}, current->group};
    Pieces& shared = here().shared;
    const Piece first = shared[tile + from * kSwizzleBytes];
    for (int row = from; row < from + count; ++row) {
        const int panels = tensor == kV ? PANELS_V : kPanels;
        for (int panel = 0; panel <= panels; ++panel) {
            const bool tail = panel == panels;
            if (tail && kMain * 2 == kRowBytes) {
                break;
            }
            const int width = tail ? kRowBytes - kMain * 2 : kSwizzleBytes;
            const unsigned address = tile + panel * rows * kSwizzleBytes + row * width;
            Piece expected = first;
            expected.tensor = tensor;
            expected.column = panel * kColumns;
            expected.row += row - from;
            require(!(shared[address] != expected), "a product reads what is not there");
            read.pieces.push_back({address, shared[address]});
        }
    }
    current->reads.push_back(read);
    return first;
}
static void wgmma_fence() {}
static void wgmma_commit() { ++current->group; }
static void finish_reads(int groups) {
    give_way();
    for (; !current->reads.empty() && current->reads.front().group < current->group - groups; current->reads.erase(current->reads.begin())) {
        for (const auto& [address, piece] : current->reads.front().pieces) {
            require(!(here().shared[address] != piece), "a copy overwrites what a product reads");
        }
    }
}
// All threads of a warpgroup go on together, as .aligned says.
static void wgmma_wait(int groups) {
    finish_reads(groups);
    meet(here().aligned[threadIdx.x / 128], 1, 2, true);
}
static void wgmma_wait_all() { wgmma_wait(0); }
static void wgmma_wait_all_but_one() { wgmma_wait(1); }
template <class T>
static void accumulator_fence(T&) {}

template <class T>
static void load_q(T&, unsigned q, int row) {
    current->q = read(q, row, 64, kTileM, kQ);
    current->reads.pop_back();  // done at once
}
// What S begins with where a score adds lines. The head's lines go with the products of that head only.
struct ScoreLines {
    int batch = -1, head = -1;
};
static ScoreLines score_lines(const Params&, int batch, int head) { return {batch, head}; }
template <class S>
static void begin_scores(S&, const ScoreLines& lines, int row, int key0) {
    current->begun = {kQ, key0, row, lines.head, lines.batch};
}
static void note_scores(const Piece& rows, const Piece& keys) {
#if LINES
    const Piece& begun = current->begun;
    require(begun.tensor == kQ && begun.head == rows.head && begun.batch == rows.batch, "S begins with lines of another head");
    require(begun.row >= rows.row && begun.row < rows.row + 64, "S begins with lines of other rows");
    require(begun.column == keys.row, "S begins with lines of other keys");
    current->begun = {};
#endif
    current->scores.push_back({rows, keys});
}
template <class S>
static void multiply_qk(S&, unsigned q, int row, unsigned k) {
    const Piece rows = read(q, row, 64, kTileM, kQ);
    note_scores(rows, read(k, 0, kTileN, kTileN, kK));
}
template <class S, class Q>
static void multiply_qk(S&, const Q&, unsigned k) {
    note_scores(current->q, read(k, 0, kTileN, kTileN, kK));
}
template <class O, class P>
static void multiply_pv(O&, const P&, unsigned v, bool) {
    current->values.push_back(read(v, 0, kTileN, kTileN, kV));
}

struct RowStats {
    float row_max[2] = {}, row_sum[2] = {};
    bool ordinary = false, growing = false;
    void reset() {}
};
// The key tile whose S is complete runs mask code.
static void run_mask(int key0) {
    require(!current->scores.empty() && current->scores.back().second.row == key0, "another key tile is masked");
    current->masked.insert(key0);
}
template <class S>
static void apply_mask(const Params&, S&, int row, int key0) {
    run_mask(key0);
}
template <class S>
static void apply_mask(const Params&, int plane, S&, int row, int key0) {
    run_mask(key0);
}
template <class S>
static void apply_mask(S&, int row, unsigned bounds) {
    const Piece found = here().shared[bounds];
    run_mask(current->scores.empty() ? -1 : current->scores.back().second.row);
    const auto [rows, keys] = current->scores.back();
    const int plane = (rows.batch * heads_of_q + rows.head) % planes_of_mask;
    require(found.tensor == kBounds && found.row == plane * padded_keys + keys.row, "bounds of other keys");
}
template <class... T>
static bool softmax_step(T&&...) {
    give_way();
    return false;
}

// The first query of a warpgroup in a tile; rows of the last causal tile end with the last query, by groups of 64.
static int first_row(const Params& p, int tile, int group) {
    return tile * kTileM + group * 64 - (kCausal ? (p.tiles_m * kTileM - p.seq_q) / 64 * 64 : 0);
}
static bool has_rows(const Params& p, int tile, int group) {
    const int row = first_row(p, tile, group);
    return row < p.seq_q && row + 64 > 0;
}
// How many keys a query sees, without a mask or with a causal one.
static int keys_of(const Params& p, int query) {
    return kCausal ? max(0, min(p.seq_k, query + 1 + p.seq_k - p.seq_q)) : p.seq_k;
}
static bool visible_pair(const Params& p, int plane, int query, int key) {
#if MASKED
    if (p.dense.data != nullptr) {
        const auto mask = static_cast<const unsigned char*>(p.dense.data) + plane % planes_of_mask * p.dense.head;
        return mask[query * p.dense.row + key] != 0;
    }
    return p.starts[key] <= query && query < p.ends[key];
#else
    return key < keys_of(p, query);
#endif
}
// How many of the pairs of a warpgroup's rows, from `row` on, and a key tile are visible, and how many pairs there are.
// `plane`: batch entry * heads + head.
static std::pair<int, int> count_pairs(const Params& p, int plane, int row, int key0) {
    int seen = 0, pairs = 0;
    for (int query = max(row, 0); query < min(row + 64, p.seq_q); ++query) {
        pairs += kTileN;
        for (int key = key0; key < min(key0 + kTileN, p.seq_k); ++key) {
            seen += visible_pair(p, plane, query, key);
        }
    }
    return {seen, pairs};
}
// Whether a work tile's rows see a key: those of the warpgroup if it skips what is hidden from it, else those of any.
static bool sees_any(const Params& p, int plane, int tile, int group) {
#if MASKED
    for (int key0 = 0; key0 < p.seq_k; key0 += kTileN) {
        if (count_pairs(p, plane, first_row(p, tile, group), key0).first > 0) {
            return true;
        }
    }
    return false;
#else
    return keys_of(p, first_row(p, tile, kConsumers) - 1) > 0;
#endif
}

// The rows of a warpgroup have met each key tile that they see.
template <class Met>
static void check_keys(const Params& p, int plane, int tile, int group, const Met& met) {
    for (int key0 = 0; has_rows(p, tile, group) && key0 < p.seq_k; key0 += kTileN) {
        const bool seen = count_pairs(p, plane, first_row(p, tile, group), key0).first > 0;
        require(met.count(key0) || !seen, "a key tile is missing");
    }
}

// The products of a work tile were those of its rows with each key tile that they see, once, and with no tile that
// hides pairs of them but ran no mask code.
template <class Work>
static void check_tile(const Params& p, const Work& work, int group) {
    give_way();
    const int head = work.head / (p.heads_q / p.heads_kv);
    const int row = first_row(p, work.tile, group), plane = work.batch * p.heads_q + work.head;
    const Piece q{kQ, 0, row, work.head, work.batch};
    std::map<int, int> met;
    // The next work tile's first S may have begun.
    while (!current->values.empty()) {
        require(!current->scores.empty(), "a product is missing");
        if (!failure.empty()) {
            return;
        }
        const auto [rows, keys] = current->scores.front();
        const int key0 = keys.row;
        require(!(rows != q) && !(keys != Piece{kK, 0, key0, head, work.batch}), "a wrong tile of Q or K");
        require(!(current->values.front() != Piece{kV, 0, key0, head, work.batch}), "a wrong tile of V");
        require(++met[key0] == 1, "a key tile is met twice");
#if CUT
        if (threadIdx.x % 128 == 0) {
            require(met_by[{work.batch, work.head, work.tile, group}].insert(key0).second, "a key tile is met twice");
        }
#endif
        const auto [seen, pairs] = count_pairs(p, plane, row, key0);
        require(seen == pairs || current->masked.count(key0), "hidden pairs are not masked");
        current->scores.erase(current->scores.begin());
        current->values.erase(current->values.begin());
    }
    current->masked.clear();
#if CUT
    if (work.slot >= 0) {
        stored_slots[{work.batch, work.head, work.slot, group}] += threadIdx.x % 128 == 0;
        return;
    }
#else
    check_keys(p, plane, work.tile, group, met);
#endif
    if (threadIdx.x % 128 == 0 && has_rows(p, work.tile, group)) {
        ++stored[{work.batch, work.head, work.tile, group}];
    }
}
