// From a variant to functions that run: finding them on a device, and launching them.
#pragma once

#include <algorithm>
#include <cstring>

#include <c10/core/DeviceGuard.h>

#include "driver.h"
#include "variant.h"

namespace attnforge {

// What `choose_splits` reads of the device of a variant that splits the keys.
inline void measure_device(Variant& variant) {
    const Launch& main = variant.launches.front();
    variant.clusters[1] = static_cast<int>(variant.split_blocks) * variant.multiprocessors;
    if (!main.clustered) {
        return;
    }
    variant.bandwidth = relative_bandwidth(variant.device);
    for (unsigned size = 2; size <= kMostOfCluster && driver().most_clusters != nullptr; ++size) {
        variant.clusters[size] = driver().count_clusters(main.function, {size, main.threads, main.shared_bytes, size});
    }
}

// Completes `variant` for `device`. `find(symbol)` returns a function there: a CUfunction, or on the CPU its address;
// on a GPU it is called with the device's context current.
template <typename Find>
void load_functions(Variant& variant, c10::Device device, Find find) {
    constexpr int kMaxDynamicSharedSizeBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    variant.device = device;
    const c10::DeviceGuard guard(device);
    if (!device.is_cpu()) {
        const Driver& d = driver();
        const bool maps = d.tensor_map_encode != nullptr && d.tensor_map_move != nullptr;
        TORCH_CHECK(variant.tensor_maps.empty() || maps, "attnforge: ", variant.name,
                    " needs tensor maps, which this NVIDIA driver lacks; update it to one for CUDA 12 or later");
        ensure_context(device);
        variant.multiprocessors = count_multiprocessors(device);
    }
    for (auto* list : {&variant.launches, &variant.schedule}) {
        for (Launch& launch : *list) {
            launch.function = find(launch.symbol);
            if (!device.is_cpu()) {
                const int bytes = static_cast<int>(launch.shared_bytes);
                driver().check(driver().function_attribute(launch.function, kMaxDynamicSharedSizeBytes, bytes),
                               "reserving dynamic shared memory");
            }
        }
    }
    measure_device(variant);
}

// The argument of a variant's kernels: the members of Params that they have.
class PackedParams {
public:
    PackedParams(const Variant& variant, const Params& params) {
        unsigned char* end = bytes_;
        for (const ParamsPiece& piece : variant.pieces) {
            std::memcpy(end, reinterpret_cast<const unsigned char*>(&params) + piece.offset, piece.size);
            end += piece.size;
        }
    }
    void* data() { return bytes_; }

private:
    alignas(Params) unsigned char bytes_[sizeof(Params)];
};

// Blocks of a launch. A persistent one has at most as many as there are multiprocessors.
inline unsigned blocks_of(const Launch& launch, const Params& params, int multiprocessors) {
    int64_t blocks = launch.per_tile;
    for (const auto size : launch.sizes) {
        blocks *= params.*size;
    }
    const int64_t together = launch.paired ? 2 : 1;  // blocks of a cluster
    blocks = (blocks + together - 1) / together * together;
    TORCH_CHECK_VALUE(blocks < (int64_t{1} << 31), "attnforge: ", launch.symbol, " would need ", blocks,
                      " blocks, more than a grid can hold; split the batch");
    if (launch.persistent) {
        blocks = std::min(blocks, std::max(together, multiprocessors / together * together));
    }
    return static_cast<unsigned>(blocks);
}

constexpr int kCombineWarps = 8;  // of a block of _combine (codegen/families/limits.py: COMBINE_THREADS)

// Of a variant that splits the keys: into how many parts, and how many warps combine their results. Others have 0.
inline void set_kv_splits(const Variant& variant, Params& p) {
    if (variant.split_blocks == 0) {
        return;
    }
    const int64_t rows = int64_t{p.seq_q} * (p.heads_q / p.heads_kv);
    TORCH_CHECK_VALUE(numbers_rows(rows, variant.tile_m), "q: ", p.seq_q, " queries of ", p.heads_q / p.heads_kv,
                      " heads for each of k are ", rows, " rows, more than ", variant.name,
                      ", which splits the keys, can number with an int; split the queries into several calls");
    p.tiles_packed = static_cast<int>((rows + variant.tile_m - 1) / variant.tile_m);
    const int64_t planes = int64_t{p.heads_kv} * p.batch;
    const bool clustered = variant.launches.front().clustered;  // without clusters nothing was fitted
    const SplitCosts costs =
        clustered ? split_costs(variant.tile_m, planes * p.tiles_n, variant.bandwidth) : SplitCosts{0, 0};
    const Splits splits = choose_splits(variant.clusters, planes * p.tiles_packed, p.tiles_n, costs);
    p.kv_splits = splits.kv_splits;
    p.cluster_size = splits.cluster_size;
    // A warp has 4 splits of a row, which it loads at once, or more where a block is not enough.
    const int64_t warps = (p.kv_splits + 3) / 4;
    p.combine_warps = warps <= 1 ? 1 : warps <= 2 ? 2 : warps <= 4 ? 4 : kCombineWarps;
    const int64_t all = int64_t{p.batch} * p.heads_q * p.seq_q * p.combine_warps;
    p.combine_blocks = p.kv_splits == 1 ? 0 : static_cast<int>((all + kCombineWarps - 1) / kCombineWarps);
}

// Runs `launches` in order on `stream` (GPU) or in this thread (CPU).
inline void run(const Variant& variant, const std::vector<Launch>& launches, const Params& params, void* stream) {
    PackedParams packed(variant, params);
    if (variant.device.is_cpu()) {
        for (const Launch& launch : launches) {
            reinterpret_cast<void (*)(const void*)>(launch.function)(packed.data());
        }
        return;
    }
    const TensorMaps* maps = nullptr;  // kernels without them take the first argument only
    if (!variant.tensor_maps.empty() && &launches == &variant.launches) {
        maps = &encoded(variant.tensor_maps, params, variant.dtype);
    }
    void* arguments[] = {packed.data(), const_cast<TensorMaps*>(maps)};
    for (const Launch& launch : launches) {
        if (const unsigned blocks = blocks_of(launch, params, variant.multiprocessors)) {
            const unsigned cluster = launch.clustered ? params.cluster_size : 1;
            const LaunchShape shape{blocks, launch.threads, launch.shared_bytes, cluster, launch.overlaps};
            driver().check(driver().enqueue(launch.function, shape, stream, arguments), launch.symbol.c_str());
        }
    }
}

}  // namespace attnforge
