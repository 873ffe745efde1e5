// Products and results as pipeline.h sees them: which rows they read, and whether these were there and stayed.
#pragma once

enum Tensor { kNone, kQ, kK, kV };

// The pieces of `count` rows from row `from` on of a tile of `rows`; they must follow one another and be of `tensor`.
static Piece read(unsigned tile, int from, int count, int rows, Tensor tensor) {
    Read read{{}, current->group};
    std::map<unsigned, Piece>& shared = here().shared;
    const Piece first = shared[tile + from * kSpan];
    for (int row = from; row < from + count; ++row) {
        for (int panel = 0; panel <= kPanels; ++panel) {
            const bool tail = panel == kPanels;
            if (tail && kMain * 2 == kRowBytes) {
                break;
            }
            const int width = tail ? kRowBytes - kMain * 2 : kSpan;
            const unsigned address = tile + panel * rows * kSpan + row * width;
            Piece expected = first;
            expected.tensor = tensor;
            expected.column = panel * kColumns;
            expected.row += row - from;
            require(!(shared[address] != expected), "a product reads what is not there");
            read.pieces[address] = shared[address];
        }
    }
    current->reads.push_back(read);
    return first;
}
static void wgmma_fence() {}
static void wgmma_commit() { ++current->group; }
static void finish_reads(int groups) {
    give_way();
    for (; !current->reads.empty() && current->reads.front().group < current->group - groups; current->reads.pop_front()) {
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
template <class S>
static void start_scores(S&, unsigned q, int row, unsigned k) {
    const Piece rows = read(q, row, 64, kTileM, kQ);
    current->scores.push_back({rows, read(k, 0, kTileN, kTileN, kK)});
}
template <class S, class Q>
static void start_scores(S&, const Q&, unsigned k) {
    current->scores.push_back({current->q, read(k, 0, kTileN, kTileN, kK)});
}
template <class O, class P>
static void start_out(O&, const P&, unsigned v, int) {
    current->values.push_back(read(v, 0, kTileN, kTileN, kV));
}

struct Rows {
    float top[2], sum[2];
    bool known;
};
template <class... T>
static void apply_mask(T&&...) {}
template <class... T>
static bool softmax(T&&...) {
    give_way();
    return false;
}
template <class... T>
static void rescale_out(T&&...) {}

// The products of a piece of work were those of its rows with all keys in turn.
template <class Maps, class Work, class O>
static void store(const Params& p, const Maps&, const Work& work, const Rows&, O&, unsigned, int group) {
    give_way();
    const int head = work.head / (p.heads_q / p.heads_kv);
    for (int i = 0; i < p.tiles_n; ++i) {
        require(!current->scores.empty() && !current->values.empty(), "a product is missing");
        if (!failure.empty()) {
            return;
        }
        const auto [rows, keys] = current->scores.front();
        const Piece q{kQ, 0, work.tile * kTileM + group * 64, work.head, work.batch};
        require(!(rows != q) && !(keys != Piece{kK, 0, i * kTileN, head, work.batch}), "a wrong tile of Q or K");
        require(!(current->values.front() != Piece{kV, 0, i * kTileN, head, work.batch}), "a wrong tile of V");
        current->scores.pop_front();
        current->values.pop_front();
    }
    if (threadIdx.x % 128 == 0 && work.tile * kTileM + group * 64 < p.seq_q) {
        ++stored[{work.batch, work.head, work.tile, group}];
    }
}
