// Loaded kernel variants: numbered handles, their functions, and how to launch them.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>

#include "driver.h"
#include "params.h"
#include "tensor_maps.h"

namespace attnforge {

enum MaskKind : int64_t { kFull = 0, kCausal = 1, kSpans = 2, kDense = 3 };

// Words of 32 pairs that a dense mask is packed to: 32 keys of a query, or 32 queries of a key.
enum class Bits { kNone, kOfKeys, kOfQueries };

// One kernel launch: the grid is the product of the Params members listed, the first rounded up to whole clusters.
struct Launch {
    std::string symbol;
    void* function = nullptr;
    std::vector<int Params::*> grid;
    unsigned threads = 0;
    unsigned shared_bytes = 0;
    bool persistent = false;  // at most one block per multiprocessor
    int cluster = 1;          // blocks that run together
    bool overlaps = false;    // may start before the launch before it has ended, if the driver can do so
};

struct Variant {
    std::string name;
    c10::Device device = c10::kCPU;
    bool backward = false;
    at::ScalarType dtype = at::kFloat;
    int64_t head_dim = 0;
    int64_t head_dim_v = 0;
    int64_t mask = kFull;
    int64_t align = 0;
    int64_t tile_m = 0;
    int64_t tile_n = 0;
    bool owner_n = false;  // schedules list query tiles for each key tile instead of the reverse
    int64_t parts = 1;     // of a query tile, each with a reach of its own
    int64_t statistics = 0;  // floats of row statistics for each query row and head
    bool dq_accum = false;   // which workspaces the launches need
    bool dkv_accum = false;
    bool ordered = false;
    int64_t columns = 0;     // of their rows: those of dq and dk, those of dv
    int64_t columns_v = 0;
    bool bounds = false;     // in the schedule
    int64_t schedule_kind = 0;  // the same for variants whose schedules are the same for the same mask
    bool grouped = false;       // the q heads of a kv head share an order of tiles
    Bits bits = Bits::kNone;
    bool deterministic = false;
    std::vector<Launch> launches;
    std::vector<Launch> schedule;
    std::vector<TensorMapPlan> tensor_maps;  // second argument of the launches
    int multiprocessors = 0;
};

inline std::vector<int Params::*> parse_grid(const std::string& names) {
    static const std::pair<const char*, int Params::*> known[] = {
        {"batch", &Params::batch},     {"heads_q", &Params::heads_q}, {"heads_kv", &Params::heads_kv},
        {"tiles_m", &Params::tiles_m}, {"tiles_n", &Params::tiles_n}, {"mask_planes", &Params::mask_planes},
    };
    std::vector<int Params::*> grid;
    for (size_t begin = 0; begin < names.size();) {
        const size_t end = std::min(names.find('*', begin), names.size());
        const std::string name = names.substr(begin, end - begin);
        const size_t before = grid.size();
        for (const auto& [text, member] : known) {
            if (name == text) {
                grid.push_back(member);
            }
        }
        TORCH_CHECK_VALUE(grid.size() == before + 1, "attnforge: unknown size '", name, "' in a grid");
        begin = end + 1;
    }
    return grid;
}

inline void load_cpu(Variant& variant, const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library != nullptr, "attnforge: cannot load ", path, ": ", dlerror());
    for (auto* list : {&variant.launches, &variant.schedule}) {
        for (Launch& launch : *list) {
            launch.function = dlsym(library, launch.symbol.c_str());
            TORCH_CHECK(launch.function != nullptr, "attnforge: ", path, " has no function ", launch.symbol);
        }
    }
}

inline void load_gpu(Variant& variant, const void* image) {
    constexpr int kMaxDynamicSharedSizeBytes = 8;
    constexpr int kMultiprocessorCount = 16;
    const Driver& d = driver();
    const bool maps = d.tensor_map_encode != nullptr && d.tensor_map_move != nullptr;
    TORCH_CHECK(variant.tensor_maps.empty() || maps, "attnforge: ", variant.name,
                " needs tensor maps, which this NVIDIA driver lacks; update it to one for CUDA 12 or later");
    const c10::DeviceGuard guard(variant.device);
    ensure_context(variant.device);
    int ordinal = 0;
    d.check(d.device_get(&ordinal, variant.device.index()), "cuDeviceGet");
    d.check(d.device_attribute(&variant.multiprocessors, kMultiprocessorCount, ordinal), "cuDeviceGetAttribute");
    void* module = nullptr;
    d.check(d.module_load(&module, image), ("loading the cubin of " + variant.name).c_str());
    for (auto* list : {&variant.launches, &variant.schedule}) {
        for (Launch& launch : *list) {
            d.check(d.module_function(&launch.function, module, launch.symbol.c_str()), launch.symbol.c_str());
            d.check(d.function_attribute(launch.function, kMaxDynamicSharedSizeBytes, launch.shared_bytes),
                    "reserving dynamic shared memory");
        }
    }
}

// Runs `launches` in order on `stream` (GPU) or in this thread (CPU).
inline void run(const Variant& variant, const std::vector<Launch>& launches, Params& params, void* stream) {
    const TensorMaps* maps = nullptr;  // kernels without them take the first argument only
    if (!variant.tensor_maps.empty() && &launches == &variant.launches) {
        maps = &encoded(variant.tensor_maps, params, variant.head_dim, variant.dtype);
    }
    for (const Launch& launch : launches) {
        if (variant.device.is_cpu()) {
            reinterpret_cast<void (*)(const Params*)>(launch.function)(&params);
            continue;
        }
        int64_t blocks = 1;
        for (const auto member : launch.grid) {
            blocks *= params.*member;
            if (member == launch.grid.front()) {
                blocks = (blocks + launch.cluster - 1) / launch.cluster * launch.cluster;
            }
        }
        TORCH_CHECK_VALUE(blocks < (int64_t{1} << 31), "attnforge: ", launch.symbol, " would need ", blocks,
                          " blocks, more than a grid can hold; split the batch");
        if (launch.persistent) {
            blocks = std::min<int64_t>(blocks, variant.multiprocessors / launch.cluster * launch.cluster);
        }
        void* arguments[] = {&params, const_cast<TensorMaps*>(maps)};
        driver().check(driver().enqueue(launch.function, static_cast<unsigned>(blocks), launch.threads,
                                        launch.shared_bytes, launch.overlaps, stream, arguments),
                       launch.symbol.c_str());
    }
}

// Handles are 1, 2, 3, ...; a variant is never removed, so references stay valid.
class VariantTable {
public:
    int64_t add(Variant variant) {
        const std::unique_lock lock(mutex_);
        variants_.push_back(std::move(variant));
        return static_cast<int64_t>(variants_.size());
    }

    const Variant& at(int64_t handle) {
        const std::shared_lock lock(mutex_);
        TORCH_CHECK_VALUE(handle > 0 && handle <= static_cast<int64_t>(variants_.size()), "variant: got handle ",
                          handle, ", expected 0 (dispatch) or one that attnforge.runtime.kernels.load returned");
        return variants_[handle - 1];
    }

private:
    std::shared_mutex mutex_;
    std::deque<Variant> variants_;
};

inline VariantTable& variants() {
    static auto* table = new VariantTable;  // outlives every thread that may still call in at exit
    return *table;
}

// The same number for the same text.
inline int64_t number_of(const std::string& text) {
    static std::mutex mutex;
    static std::map<std::string, int64_t> numbers;
    const std::lock_guard lock(mutex);
    return numbers.emplace(text, static_cast<int64_t>(numbers.size()) + 1).first->second;
}

// Loads a variant and returns its handle; the arguments are those of runtime/kernels.py.
inline int64_t add_variant(const at::Tensor& binary, std::string path, std::string name, at::Device device,
                           bool backward, at::ScalarType dtype, int64_t head_dim, int64_t head_dim_v, int64_t mask,
                           int64_t align, int64_t tile_m, int64_t tile_n, bool owner_n, int64_t parts,
                           int64_t statistics, bool dq_accum, bool dkv_accum, bool ordered, int64_t columns,
                           int64_t columns_v, bool bounds, std::string bits, const std::string& schedule_kind,
                           bool grouped, bool deterministic, std::vector<std::string> symbols,
                           std::vector<std::string> grids,
                           std::vector<int64_t> threads, std::vector<int64_t> shared_bytes,
                           std::vector<int64_t> persistent, std::vector<int64_t> cluster,
                           std::vector<int64_t> overlaps, int64_t launches, std::vector<std::string> mapped,
                           std::vector<int64_t> boxes) {
    Variant v;
    v.name = std::move(name);
    v.device = device;
    v.backward = backward;
    v.dtype = dtype;
    v.head_dim = head_dim;
    v.head_dim_v = head_dim_v;
    v.mask = mask;
    v.align = align;
    v.tile_m = tile_m;
    v.tile_n = tile_n;
    v.owner_n = owner_n;
    v.parts = parts;
    v.statistics = statistics;
    v.dq_accum = dq_accum;
    v.dkv_accum = dkv_accum;
    v.ordered = ordered;
    v.columns = columns;
    v.columns_v = columns_v;
    v.bounds = bounds;
    v.bits = bits.empty() ? Bits::kNone : bits == "k" ? Bits::kOfKeys : Bits::kOfQueries;
    v.schedule_kind = number_of(schedule_kind);
    v.grouped = grouped;
    v.deterministic = deterministic;
    for (size_t i = 0; i < symbols.size(); ++i) {
        auto& list = static_cast<int64_t>(i) < launches ? v.launches : v.schedule;
        list.push_back({symbols[i], nullptr, parse_grid(grids.at(i)), static_cast<unsigned>(threads.at(i)),
                        static_cast<unsigned>(shared_bytes.at(i)), persistent.at(i) != 0,
                        static_cast<int>(cluster.at(i)), overlaps.at(i) != 0});
    }
    for (size_t i = 0; i < mapped.size(); ++i) {
        const auto box = [&](size_t axis) { return static_cast<unsigned>(boxes.at(i * 3 + axis)); };
        v.tensor_maps.push_back(parse_tensor_map(mapped[i], box(0), box(1), box(2)));
    }
    if (device.is_cpu()) {
        load_cpu(v, path);
    } else {
        load_gpu(v, binary.const_data_ptr());
    }
    return variants().add(std::move(v));
}

}  // namespace attnforge
