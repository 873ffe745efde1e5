// The tables of a tile schedule: their sizes, and where each lies in the memory of the schedule.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "variant.h"

namespace attnforge {

// Bytes of bits of partial visits that a schedule has memory for in each plane, up to kPlanesOfBits planes. The visits
// of trees and of Longformer's mask at 131,072 tokens all fit; others evaluate the mask's function. Tests lower it.
constexpr int64_t kBytesOfBits = 40 << 20, kPlanesOfBits = 4;
inline std::atomic<int64_t>& most_bits() {
    static std::atomic<int64_t> bytes{kBytesOfBits};
    return bytes;
}
// Sets the bytes; returns those before.
inline int64_t limit_bits(int64_t bytes) {
    TORCH_CHECK_VALUE(bytes >= 0 && bytes <= kBytesOfBits, "bytes: got ", bytes, ", expected 0 to ", kBytesOfBits);
    return most_bits().exchange(bytes);
}

// Visits of `visits` whose bits there is memory for.
inline int bit_slots(const Variant& variant, int64_t planes, int64_t visits) {
    if (variant.slot_words == 0) {
        return 0;
    }
    const int64_t bytes = most_bits() * std::min(planes, kPlanesOfBits);
    return static_cast<int>(std::min(visits, bytes / (variant.slot_words * 4)));
}

// Sizes of the tables of a schedule, in ints, in the order of its memory. codegen/params.py documents each.
struct ScheduleLayout {
    int64_t tiles, bounds, visit_bits, bits, kv_range, slots, slot_visits, order, pieces, lists, taken, counter;

    ScheduleLayout(const Variant& variant, Params& p) {
        const bool of_keys = variant.bits == MaskBits::kOfKeys;
        p.bits_row = variant.bits == MaskBits::kNone ? 0 : ((of_keys ? p.padded_k : p.padded_q) + 31) / 32;
        p.list_stride = variant.owner_n ? p.tiles_m : p.tiles_n;
        tiles = int64_t{p.mask_planes} * (variant.owner_n ? p.tiles_n : p.tiles_m);
        bounds = variant.bounds ? int64_t{2} * p.mask_planes * variant.intervals * p.padded_k : 0;
        bits = int64_t{p.mask_planes} * (of_keys ? p.padded_q : p.padded_k) * p.bits_row;
        p.bit_slots = bit_slots(variant, p.mask_planes, tiles * p.list_stride);
        visit_bits = p.bit_slots * variant.slot_words;
        slot_visits = 2 * int64_t{p.bit_slots};
        kv_range = variant.row_groups > 1 ? 8 * tiles : 0;
        slots = variant.cut_lists && !variant.owner_n ? 2 * tiles : 0;
        const int64_t words = variant.owner_n ? int64_t{3} * p.blocks_n : int64_t{4} * p.blocks_m;  // of pieces
        order = variant.cut_lists ? p.mask_planes * words : tiles;
        pieces = variant.cut_lists && variant.owner_n ? tiles : 0;
        lists = tiles * (1 + p.list_stride * (1 + variant.dq_semaphore + (variant.slot_words > 0)));
        taken = variant.slot_words > 0 ? 1 : 0;
        counter = variant.schedule_counter ? 2 : 0;
    }

    int64_t size() const {
        return bounds + visit_bits + bits + kv_range + slots + slot_visits + order + pieces + lists + taken + counter;
    }

    void point(const Variant& variant, Params& p, int* memory) const {
        p.bounds = memory;  // first, where the allocator aligns it for TMA
        p.visit_bits = reinterpret_cast<unsigned*>(p.bounds + bounds);  // likewise for loads of 16 bytes
        p.bits = p.visit_bits + visit_bits;
        p.kv_range = p.bounds + bounds + visit_bits + bits;
        p.tile_slots = p.kv_range + kv_range;  // pairs, as those before and after it: aligned to 8 bytes
        p.slot_visits = p.tile_slots + slots;
        p.tile_count = p.slot_visits + slot_visits;
        p.tile_order = p.tile_count + tiles;
        p.tile_pieces = p.tile_order + order;
        p.tile_list = p.tile_pieces + pieces;
        p.dq_order = variant.dq_semaphore ? p.tile_list + tiles * p.list_stride : nullptr;
        p.visit_slots = p.tile_list + tiles * p.list_stride * (1 + variant.dq_semaphore);
        int* const end = memory + size() - counter;
        p.tile_counter = counter > 0 ? end : p.tile_counter;  // a backward has its own
        p.slots_taken = end - taken;
    }
};

}  // namespace attnforge
