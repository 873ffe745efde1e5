// runtime/native/variant.h and launch.h with a driver that does nothing: prints what was read from a description, and
// the grid and the packed argument that follow from it. Arguments: a file with the description, multiprocessors,
// queries; and for the layout of its schedule, planes of the mask and bytes of bits.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace at {
enum class ScalarType { Float, Half, BFloat16 };
constexpr ScalarType kFloat = ScalarType::Float, kHalf = ScalarType::Half, kBFloat16 = ScalarType::BFloat16;
}  // namespace at
namespace c10 {
struct Device {
    bool is_cpu() const { return false; }
    int index() const { return 0; }
};
constexpr Device kCPU;
struct DeviceGuard {
    explicit DeviceGuard(Device) {}
};
}  // namespace c10

template <typename... Words>
[[noreturn]] void fail(const Words&... words) {
    std::ostringstream text;
    (text << ... << words);
    throw std::runtime_error(text.str());
}
#define TORCH_CHECK(good, ...) \
    if (!(good)) fail(__VA_ARGS__)
#define TORCH_CHECK_VALUE TORCH_CHECK
#define TORCH_INTERNAL_ASSERT(good) TORCH_CHECK(good, "assertion")

#include "launch_config.h"

namespace attnforge {

struct Driver {
    int (*tensor_map_encode)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*,
                             const unsigned*, int, int, int, int) = nullptr;
    int (*tensor_map_move)(void*, void*) = nullptr;
    int (*most_clusters)(int*, void*, const LaunchConfig*) = nullptr;
    static int function_attribute(void*, int, int) { return 0; }
    static int count_clusters(void*, const LaunchShape&) { return 0; }
    static int enqueue(void*, const LaunchShape&, void*, void**) { return 0; }
    static void check(int, const char*) {}
};
inline const Driver& driver() {
    static const Driver instance;
    return instance;
}
inline void ensure_context(c10::Device) {}
inline int count_multiprocessors(c10::Device) { return 0; }
inline double relative_bandwidth(c10::Device) { return 1; }

}  // namespace attnforge

#include "launch.h"
#include "schedule_layout.h"

using namespace attnforge;

// Where the tables of a schedule with 7 x 3 tiles in each plane begin, in ints, and the end; the slots for bits.
static void print_layout(const Variant& variant, int planes, int64_t bytes_of_bits) {
    Params p{};
    p.tiles_m = 7, p.tiles_n = 3, p.blocks_m = 7, p.blocks_n = 3, p.mask_planes = planes;
    limit_bits(bytes_of_bits);
    const ScheduleLayout layout(variant, p);
    alignas(16) static int memory[1];
    layout.point(variant, p, memory);
    const int* const tables[] = {reinterpret_cast<int*>(p.visit_bits), p.kv_range, p.tile_slots, p.slot_visits,
                                 p.tile_count, p.tile_order, p.tile_pieces, p.tile_list, p.visit_slots, p.slots_taken,
                                 memory + layout.size()};
    for (const int* table : tables) {
        std::printf("%ld ", static_cast<long>(table - memory));
    }
    std::printf("%d\n", p.bit_slots);
}

int main(int count, char** arguments) {
    std::ostringstream text;
    text << std::ifstream(arguments[1]).rdbuf();
    try {
        Variant variant = read_variant(text.str());
        std::printf("%s %d %ld %ld\n", variant.name.c_str(), variant.backward, variant.tile_m, variant.row_groups);
        Params p{};
        p.batch = 1, p.heads_q = 5, p.heads_kv = 1, p.tiles_m = 7, p.tiles_n = 3, p.mask_planes = 1, p.scale = 0.5F;
        const std::string queries = arguments[3];  // or "queries:tiles_n"
        p.seq_q = std::stoi(queries);
        p.tiles_n = queries.find(':') == std::string::npos ? p.tiles_n : std::stoi(queries.substr(queries.find(':') + 1));
        variant.clusters[1] = static_cast<int>(variant.split_blocks) * std::stoi(arguments[2]);
        set_kv_splits(variant, p);
        p.q = {reinterpret_cast<void*>(uintptr_t{4096}), 11, 12, 13};
        for (const Launch& launch : variant.launches) {
            std::printf("%s %u\n", launch.symbol.c_str(), blocks_of(launch, p, std::stoi(arguments[2])));
        }
        PackedParams packed(variant, p);
        size_t size = 0;
        for (const ParamsPiece& piece : variant.pieces) {
            size += piece.size;
        }
        for (size_t i = 0; i < size; ++i) {
            std::printf("%02x", static_cast<unsigned char*>(packed.data())[i]);
        }
        std::printf("\n");
        if (count > 4) {
            print_layout(variant, std::stoi(arguments[4]), std::stol(arguments[5]));
        }
    } catch (const std::runtime_error& error) {
        std::printf("%s\n", error.what());
        return 1;
    }
}
