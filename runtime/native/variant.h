// The host's description of a kernel variant: its fields, read from the text of codegen/variant.py, and its launches.
#pragma once

#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include "params.h"
#include "split_choice.h"
#include "tensor_maps.h"
#include "variant_fields.h"

namespace attnforge {

// One kernel launch: the grid is the product of `sizes`, times `per_tile`.
struct Launch : LaunchFields {
    std::vector<int Params::*> sizes;  // of `grid`
    void* function = nullptr;          // a CUfunction on the variant's device; on the CPU void (*)(const Params*)
};

// Bytes of Params that follow each other in a kernel's argument, too.
struct ParamsPiece {
    size_t offset, size;
};

struct Variant : VariantFields {
    c10::Device device = c10::kCPU;
    int64_t schedule_number = 0;  // of `schedule_kind`
    std::vector<ParamsPiece> pieces;  // of `params`
    std::vector<Launch> launches;
    std::vector<Launch> schedule;
    std::vector<TensorMapPlan> tensor_maps;  // second argument of the launches
    int multiprocessors = 0;
    ClusterCounts clusters{};  // of blocks that split the keys, that the device holds at a time
    double bandwidth = 1;  // of its memory, over an H100's
};

// ---- Values ---------------------------------------------------------------------------------------------------------

// The place of `word` among `words`; an error that names the field if it is none of them.
template <size_t n>
size_t place_among(const char* field, const std::string& word, const char* const (&words)[n]) {
    for (size_t i = 0; i < n; ++i) {
        if (word == words[i]) {
            return i;
        }
    }
    TORCH_CHECK_VALUE(false, "variant: field '", field, "' is '", word, "', which is unknown here");
}

inline void read_value(const char*, const std::string& text, std::string& value) { value = text; }

inline void read_value(const char*, const std::string& text, std::vector<std::string>& value) {
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        value.push_back(word);
    }
}

inline void read_value(const char* field, const std::string& text, int64_t& value) {
    size_t end = 0;
    try {
        value = std::stoll(text, &end);
    } catch (const std::logic_error&) {
    }
    TORCH_CHECK_VALUE(end > 0 && end == text.size(), "variant: field '", field, "' is '", text, "', expected a number");
}

inline void read_value(const char* field, const std::string& text, unsigned& value) {
    int64_t number = 0;
    read_value(field, text, number);
    TORCH_CHECK_VALUE(number >= 0 && number <= INT32_MAX, "variant: field '", field, "' is ", number);
    value = static_cast<unsigned>(number);
}

inline void read_value(const char* field, const std::string& text, bool& value) {
    value = place_among(field, text, {"0", "1"}) == 1;
}

inline void read_value(const char* field, const std::string& text, at::ScalarType& value) {
    constexpr at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16};
    value = types[place_among(field, text, {"fp32", "fp16", "bf16"})];
}

inline void read_value(const char* field, const std::string& text, MaskKind& value) {
    value = static_cast<MaskKind>(place_among(field, text, kMaskNames));
}

inline void read_value(const char* field, const std::string& text, MaskBits& value) {
    value = static_cast<MaskBits>(place_among(field, text, {"none", "keys", "queries"}));
}

// ---- Reading --------------------------------------------------------------------------------------------------------

using Lines = std::map<std::string, std::string>;  // values by field

// Fills a struct of variant_fields.h: each of its fields is there once, and there is no other.
template <typename Fields>
void read_fields(Fields& fields, Lines lines, const char* what) {
    visit_fields(fields, [&](const char* name, auto& value) {
        const auto found = lines.find(name);
        TORCH_CHECK_VALUE(found != lines.end(), "variant: ", what, " lacks the field '", name, "'");
        read_value(name, found->second, value);
        lines.erase(found);
    });
    TORCH_CHECK_VALUE(lines.empty(), "variant: ", what, " has an unknown field '", lines.begin()->first, "'");
}

inline std::vector<int Params::*> grid_sizes(const std::vector<std::string>& names) {
    constexpr const char* known[] = {"batch",        "heads_q",   "heads_kv",       "seq_q",
                                     "tiles_m",      "tiles_n",   "blocks_m",       "blocks_n",
                                     "tiles_packed", "kv_splits", "cluster_size",   "combine_blocks",
                                     "mask_planes"};
    constexpr int Params::*members[] = {&Params::batch,        &Params::heads_q,   &Params::heads_kv,
                                        &Params::seq_q,        &Params::tiles_m,   &Params::tiles_n,
                                        &Params::blocks_m,     &Params::blocks_n,  &Params::tiles_packed,
                                        &Params::kv_splits,    &Params::cluster_size, &Params::combine_blocks,
                                        &Params::mask_planes};
    std::vector<int Params::*> sizes;
    for (const std::string& name : names) {
        sizes.push_back(members[place_among("grid", name, known)]);
    }
    return sizes;
}

// Where the members named are in Params; neighbours become one piece.
inline std::vector<ParamsPiece> params_pieces(const std::vector<std::string>& names) {
    std::vector<ParamsPiece> pieces;
    for (const std::string& name : names) {
        const ParamsMember* found = nullptr;
        for (const ParamsMember& member : kParamsMembers) {
            found = name == member.name ? &member : found;
        }
        TORCH_CHECK_VALUE(found != nullptr, "variant: field 'params' names '", name, "', which Params does not have");
        if (!pieces.empty() && pieces.back().offset + pieces.back().size == found->offset) {
            pieces.back().size += found->size;
        } else {
            pieces.push_back({found->offset, found->size});
        }
    }
    return pieces;
}

// The same number for the same text.
inline int64_t number_of(const std::string& text) {
    static std::mutex mutex;
    static std::map<std::string, int64_t> numbers;
    const std::lock_guard lock(mutex);
    return numbers.emplace(text, static_cast<int64_t>(numbers.size()) + 1).first->second;
}

// A variant from the text of codegen.variant.describe; launch.h finds its functions. Raises ValueError that names a
// field which is missing, unknown, repeated or has an invalid value.
inline Variant read_variant(const std::string& text) {
    std::vector<std::pair<std::string, Lines>> sections{{"variant", {}}};
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        line.erase(0, line.find_first_not_of(' '));
        if (!line.empty() && line.back() == ':') {
            sections.emplace_back(line.substr(0, line.size() - 1), Lines{});
            continue;
        }
        const size_t end = std::min(line.find(' '), line.size());
        const std::string value = end < line.size() ? line.substr(end + 1) : "";
        TORCH_CHECK_VALUE(sections.back().second.emplace(line.substr(0, end), value).second, "variant: ",
                          sections.back().first, " has the field '", line.substr(0, end), "' twice");
    }
    Variant variant;
    for (const auto& [title, fields] : sections) {
        if (title == "variant") {
            read_fields(variant, fields, "it");
        } else if (title == "launches" || title == "schedule") {
            Launch& launch = (title == "launches" ? variant.launches : variant.schedule).emplace_back();
            read_fields(launch, fields, "a launch");
            launch.sizes = grid_sizes(launch.grid);
        } else if (title == "tensor_maps") {
            TensorMapFields map;
            read_fields(map, fields, "a tensor map");
            variant.tensor_maps.push_back(tensor_map_of(map, variant.head_dim, variant.head_dim_v));
        } else {
            TORCH_CHECK_VALUE(false, "variant: has an unknown section '", title, "'");
        }
    }
    TORCH_CHECK_VALUE(!variant.launches.empty(), "variant: ", variant.name, " launches nothing");
    variant.pieces = params_pieces(variant.params);
    variant.schedule_number = number_of(variant.schedule_kind);
    return variant;
}

}  // namespace attnforge
