// Products and results as pipeline.cpp sees them, of which this is a part: which rows they read, and whether these were
// there and stayed.
#pragma once

// The pieces of `count` rows from row `from` on of a tile of `rows`; they must follow one another and be of `tensor`.
static Piece read(unsigned tile, int from, int count, int rows, Tensor tensor) {
    Read read{{}, current->group};
    Pieces& shared = here().shared;
    const Piece first = shared[tile + from * shape.swizzle_bytes];
    const int panels = tensor == kV ? shape.panels_v : shape.panels;
    const int tail = shape.row_bytes - shape.main * 2;  // bytes of a row beyond its panels
    for (int row = from; row < from + count; ++row) {
        for (int panel = 0; panel < panels + (tail > 0); ++panel) {
            const int width = panel == panels ? tail : shape.swizzle_bytes;
            const unsigned address = tile + panel * rows * shape.swizzle_bytes + row * width;
            Piece expected = first;
            expected.tensor = tensor;
            expected.column = panel * shape.columns;
            expected.row += row - from;
            require(!(shared[address] != expected), "a product reads what is not there");
            read.pieces.push_back({address, shared[address]});
        }
    }
    current->reads.push_back(std::move(read));
    return first;
}
static void finish_reads(int groups) {
    give_way();
    std::vector<Read>& reads = current->reads;
    for (; !reads.empty() && reads.front().group < current->group - groups; reads.erase(reads.begin())) {
        for (const auto& [address, piece] : reads.front().pieces) {
            require(!(here().shared[address] != piece), "a copy overwrites what a product reads");
        }
    }
}
static void note_scores(const Piece& rows, const Piece& keys) {
    if (shape.lines) {
        const Piece& begun = current->begun;
        const bool same = begun.tensor == kQ && begun.head == rows.head && begun.batch == rows.batch;
        require(same, "S has the lines of another head");
        require(begun.row >= rows.row && begun.row < rows.row + 64, "S has the lines of other rows");
        require(begun.column == keys.row, "S has the lines of other keys");
        current->begun = {};
    }
    current->scores.push_back({rows, keys});
}
static Piece read_keys(unsigned k) { return read(k, 0, shape.tile_n, shape.tile_n, kK); }

void wgmma_fence() {}
void wgmma_commit() { ++current->group; }
// All threads of a warpgroup go on together, as .aligned says.
void wgmma_wait(int groups) {
    finish_reads(groups);
    meet(here().aligned[threadIdx.x / 128], 1, 2, true);
}
void load_q(const void*, unsigned q, int row) {
    current->q = read(q, row, 64, shape.tile_m, kQ);
    current->reads.pop_back();  // done at once
}
unsigned line_at(const ScoreLines& lines, int row, int key0, const float*) {
    current->begun = {kQ, key0, row, lines.head, lines.batch};
    return 0;
}
void multiply_qk(const void*, unsigned q, int row, unsigned k) {
    const Piece rows = read(q, row, 64, shape.tile_m, kQ);
    note_scores(rows, read_keys(k));
}
void multiply_qk(const void*, const void*, unsigned k) { note_scores(current->q, read_keys(k)); }
void multiply_pv(const void*, const void*, unsigned v, bool) {
    current->values.push_back(read(v, 0, shape.tile_n, shape.tile_n, kV));
}

void run_mask(int key0) {
    require(!current->scores.empty() && current->scores.back().second.row == key0, "another key tile is masked");
    current->masked.insert(key0);
}
void apply_mask(const void*, int, unsigned bounds) {
    const Piece found = here().shared[bounds];
    run_mask(current->scores.empty() ? -1 : current->scores.back().second.row);
    const auto [rows, keys] = current->scores.back();
    const int plane = (rows.batch * call.heads_q + rows.head) % call.planes;
    require(found.tensor == kBounds && found.row == plane * call.padded_k + keys.row, "bounds of other keys");
}
void check_bits(const unsigned* seen) {
    run_mask(current->scores.empty() ? -1 : current->scores.back().second.row);
    const auto [rows, keys] = current->scores.back();
    const unsigned char* const mask = call.dense + (rows.batch * call.heads_q + rows.head) % call.planes * call.dense_head;
    const int lane = threadIdx.x % 32, first = rows.row + threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (int i = 0; i < shape.tile_n / 2; ++i) {
        const int query = first + i / 2 % 2 * 8, key = keys.row + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const bool visible = key < call.seq_k && query < call.seq_q && mask[query * call.dense_row + key] != 0;
        require(query >= call.seq_q || visible == (seen[i / 32] >> i % 32 & 1), "bits of other pairs");
    }
}

// The first query of a warpgroup in a tile; rows of the last causal tile end with the last query, by groups of 64.
static int first_row(int tile, int group) {
    const int beyond = shape.causal ? (call.tiles_m * shape.tile_m - call.seq_q) / 64 * 64 : 0;
    return tile * shape.tile_m + group * 64 - beyond;
}
static bool has_rows(int tile, int group) {
    const int row = first_row(tile, group);
    return row < call.seq_q && row + 64 > 0;
}
// How many keys a query sees, without a mask or with a causal one.
static int keys_of(int query) {
    return shape.causal ? max(0, min(call.seq_k, query + 1 + call.seq_k - call.seq_q)) : call.seq_k;
}
// How many of the pairs of a warpgroup's rows, from `row` on, and a key tile are visible, and how many pairs there are.
// `plane`: batch entry * heads + head.
static std::pair<int, int> count_pairs(int plane, int row, int key0) {
    const int first = max(row, 0), last = min(row + 64, call.seq_q), end = min(key0 + shape.tile_n, call.seq_k);
    int seen = 0;
    if (call.dense != nullptr) {
        const unsigned char* const mask = call.dense + plane % call.planes * call.dense_head;
        for (int query = first; query < last; ++query) {
            for (int key = key0; key < end; ++key) {
                seen += mask[query * call.dense_row + key] != 0;
            }
        }
    } else if (shape.listed) {  // each key is visible from its start to its end
        for (int key = key0; key < end; ++key) {
            seen += max(0, min(call.ends[key], last) - max(call.starts[key], first));
        }
    } else {
        for (int query = first; query < last; ++query) {
            seen += max(0, min(keys_of(query), end) - key0);
        }
    }
    return {seen, max(0, last - first) * shape.tile_n};
}
// Whether a work tile's rows see a key: those of the warpgroup if it skips what is hidden from it, else those of any.
static bool sees_any(int plane, int tile, int group) {
    if (!shape.listed) {
        return keys_of(first_row(tile, shape.consumers) - 1) > 0;
    }
    for (int key0 = 0; key0 < call.seq_k; key0 += shape.tile_n) {
        if (count_pairs(plane, first_row(tile, group), key0).first > 0) {
            return true;
        }
    }
    return false;
}

// The rows of a warpgroup have met each key tile that they see.
template <class Met>
static void check_keys(int plane, int tile, int group, const Met& met) {
    for (int key0 = 0; has_rows(tile, group) && key0 < call.seq_k; key0 += shape.tile_n) {
        const bool seen = count_pairs(plane, first_row(tile, group), key0).first > 0;
        require(met.count(key0) || !seen, "a key tile is missing");
    }
}

void check_tile(int batch, int head, int tile, int slot, int group) {
    give_way();
    const int head_kv = head / (call.heads_q / call.heads_kv);
    const int row = first_row(tile, group), plane = batch * call.heads_q + head;
    const bool leads = threadIdx.x % 128 == 0;  // one of the two threads speaks for the warpgroup
    const Piece q{kQ, 0, row, head, batch};
    std::map<int, int> met;
    // The next work tile's first S may have begun.
    while (!current->values.empty()) {
        require(!current->scores.empty(), "a product is missing");
        if (!failure.empty()) {
            return;
        }
        const auto [rows, keys] = current->scores.front();
        const int key0 = keys.row;
        require(!(rows != q) && !(keys != Piece{kK, 0, key0, head_kv, batch}), "a wrong tile of Q or K");
        require(!(current->values.front() != Piece{kV, 0, key0, head_kv, batch}), "a wrong tile of V");
        require(++met[key0] == 1, "a key tile is met twice");
        if (shape.cut && leads) {
            require(met_by[{batch, head, tile, group}].insert(key0).second, "a key tile is met twice");
        }
        const auto [seen, pairs] = count_pairs(plane, row, key0);
        require(seen == pairs || current->masked.count(key0), "hidden pairs are not masked");
        current->scores.erase(current->scores.begin());
        current->values.erase(current->values.begin());
    }
    current->masked.clear();
    if (slot >= 0) {
        stored_slots[{batch, head, slot, group}] += leads;
        return;
    }
    if (!shape.cut) {  // else at the end, of all pieces together
        check_keys(plane, tile, group, met);
    }
    if (leads && has_rows(tile, group)) {
        ++stored[{batch, head, tile, group}];
    }
}
