// The CUDA driver, opened at run time: no CUDA header and no link dependency, so that one launcher source builds
// against every torch and runs on machines without a GPU.
#pragma once

#include <dlfcn.h>

#include <type_traits>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include "launch_config.h"

namespace attnforge {

// Entry points of libcuda.so.1 with the prototypes of cuda.h; CUresult is an int, handles are void*.
struct Driver {
    int (*init)(unsigned);
    int (*error_name)(int, const char**);
    int (*error_string)(int, const char**);
    int (*device_get)(int*, int);
    int (*primary_retain)(void**, int);
    int (*context_current)(void**);
    int (*context_set)(void*);
    int (*module_load)(void**, const void*);
    int (*module_function)(void**, void*, const char*);
    int (*function_attribute)(void*, int, int);
    int (*is_capturing)(void*, int*);
    int (*device_attribute)(int*, int, int);
    int (*tensor_map_encode)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*,
                             const unsigned*, int, int, int, int);
    int (*tensor_map_move)(void*, void*);
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    // Both null with drivers whose kernels cannot overlap; there, clusters have one block.
    int (*launch_with)(const LaunchConfig*, void*, void**, void**);
    int (*most_clusters)(int*, void*, const LaunchConfig*);

    // Puts a kernel into `stream`.
    int enqueue(void* function, const LaunchShape& shape, void* stream, void** arguments) const {
        const bool overlaps = shape.overlaps && launch_with != nullptr;
        if (!overlaps && shape.cluster == 1) {
            return launch(function, shape.blocks, 1, 1, shape.threads, 1, 1, shape.shared_bytes, stream, arguments,
                          nullptr);
        }
        LaunchAttribute attributes[2];
        unsigned count = 0;
        if (overlaps) {
            attributes[count++] = overlap_attribute();
        }
        if (shape.cluster > 1) {
            attributes[count++] = cluster_attribute(shape.cluster);
        }
        const LaunchConfig config = launch_config(shape, stream, attributes, count);
        return launch_with(&config, function, arguments, nullptr);
    }

    // How many clusters of such a launch the current device holds at a time; none if they are too large for it.
    int count_clusters(void* function, const LaunchShape& shape) const {
        constexpr int kInvalidClusterSize = 912;  // CUDA_ERROR_INVALID_CLUSTER_SIZE
        LaunchAttribute attribute = cluster_attribute(shape.cluster);
        const LaunchConfig config = launch_config(shape, nullptr, &attribute, 1);
        int count = 0;
        const int result = most_clusters(&count, function, &config);
        if (result == kInvalidClusterSize) {
            return 0;
        }
        check(result, "counting clusters");
        return count;
    }

    void check(int result, const char* what) const {
        if (result == 0) {
            return;
        }
        const char* name = "unknown error";
        const char* text = "";
        error_name(result, &name);
        error_string(result, &text);
        TORCH_CHECK(false, "attnforge: ", what, " failed: ", name, " (", text, ")");
    }
};

inline const Driver& driver() {
    static const Driver loaded = [] {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        TORCH_CHECK(library != nullptr, "attnforge: the CUDA driver library cannot be opened: ", dlerror());
        const auto load = [library](const char* name, auto& slot) {
            void* symbol = dlsym(library, name);
            TORCH_CHECK(symbol != nullptr, "attnforge: libcuda.so.1 has no ", name, "; update the NVIDIA driver");
            slot = reinterpret_cast<std::decay_t<decltype(slot)>>(symbol);
        };
        Driver d{};
        load("cuInit", d.init);
        load("cuGetErrorName", d.error_name);
        load("cuGetErrorString", d.error_string);
        load("cuDeviceGet", d.device_get);
        load("cuDevicePrimaryCtxRetain", d.primary_retain);
        load("cuCtxGetCurrent", d.context_current);
        load("cuCtxSetCurrent", d.context_set);
        load("cuModuleLoadData", d.module_load);
        load("cuModuleGetFunction", d.module_function);
        load("cuFuncSetAttribute", d.function_attribute);
        load("cuStreamIsCapturing", d.is_capturing);
        load("cuDeviceGetAttribute", d.device_attribute);
        // Drivers before CUDA 12 lack them; the kernels that need them then fail to load, with this reason.
        d.tensor_map_encode = reinterpret_cast<decltype(d.tensor_map_encode)>(dlsym(library, "cuTensorMapEncodeTiled"));
        d.tensor_map_move = reinterpret_cast<decltype(d.tensor_map_move)>(dlsym(library, "cuTensorMapReplaceAddress"));
        load("cuLaunchKernel", d.launch);
        d.check(d.init(0), "cuInit");
        int (*get_version)(int*) = nullptr;
        int version = 0;
        load("cuDriverGetVersion", get_version);
        d.check(get_version(&version), "cuDriverGetVersion");
        if (version >= kOverlappingDriver) {
            load("cuLaunchKernelEx", d.launch_with);
            load("cuOccupancyMaxActiveClusters", d.most_clusters);
        }
        return d;
    }();
    return loaded;
}

// A fresh thread (autograd's, for one) may have no context yet; torch works in the primary one.
inline void ensure_context(c10::Device device) {
    const Driver& d = driver();
    void* context = nullptr;
    d.check(d.context_current(&context), "cuCtxGetCurrent");
    if (context == nullptr) {
        int ordinal = 0;
        d.check(d.device_get(&ordinal, device.index()), "cuDeviceGet");
        d.check(d.primary_retain(&context, ordinal), "cuDevicePrimaryCtxRetain");
        d.check(d.context_set(context), "cuCtxSetCurrent");
    }
}

// Multiprocessors of a GPU.
inline int count_multiprocessors(c10::Device device) {
    constexpr int kMultiprocessorCount = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    const Driver& d = driver();
    int ordinal = 0, count = 0;
    d.check(d.device_get(&ordinal, device.index()), "cuDeviceGet");
    d.check(d.device_attribute(&count, kMultiprocessorCount, ordinal), "cuDeviceGetAttribute");
    return count;
}

// The memory bandwidth of a Hopper GPU over that of an H100, by peak clock and bus width. 1 for other GPUs, and if the
// driver does not report them.
inline double relative_bandwidth(c10::Device device) {
    constexpr int kMemoryClock = 36, kBusWidth = 37, kCapabilityMajor = 75;  // CU_DEVICE_ATTRIBUTE_..., kHz and bits
    constexpr double kH100 = 2619e3 * 5120;
    const Driver& d = driver();
    int ordinal = 0, kilohertz = 0, bits = 0, major = 0;
    d.check(d.device_get(&ordinal, device.index()), "cuDeviceGet");
    const bool said = d.device_attribute(&kilohertz, kMemoryClock, ordinal) == 0 &&
                      d.device_attribute(&bits, kBusWidth, ordinal) == 0 &&
                      d.device_attribute(&major, kCapabilityMajor, ordinal) == 0;
    const double found = static_cast<double>(kilohertz) * bits;
    return said && major == 9 && found > 0 ? found / kH100 : 1.0;
}

// Is `stream` being captured into a CUDA graph? The default stream cannot be recorded.
inline bool is_capturing(void* stream) {
    int status = 0;
    if (stream != nullptr) {
        driver().check(driver().is_capturing(stream, &status), "cuStreamIsCapturing");
    }
    return status != 0;
}

}  // namespace attnforge
