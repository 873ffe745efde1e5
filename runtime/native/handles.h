// The variants of this process by numbered handles; they come from shared libraries and cubins of the cache.
#pragma once

#include <deque>
#include <shared_mutex>

#include <ATen/core/Tensor.h>

#include "launch.h"

namespace attnforge {

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

// Loads a variant and returns its handle. `description`: codegen.variant.describe; `binary`: the cubin on a GPU;
// `path`: the shared library on the CPU.
inline int64_t add_variant(const std::string& description, at::Device device, const at::Tensor& binary,
                           const std::string& path) {
    Variant v = read_variant(description);
    if (device.is_cpu()) {
        void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        TORCH_CHECK(library != nullptr, "attnforge: cannot load ", path, ": ", dlerror());
        load_functions(v, device, [&](const std::string& symbol) {
            void* const function = dlsym(library, symbol.c_str());
            TORCH_CHECK(function != nullptr, "attnforge: ", path, " has no function ", symbol);
            return function;
        });
    } else {
        void* module = nullptr;
        load_functions(v, device, [&](const std::string& symbol) {
            const Driver& d = driver();
            if (module == nullptr) {
                d.check(d.module_load(&module, binary.const_data_ptr()), ("loading the cubin of " + v.name).c_str());
            }
            void* function = nullptr;
            d.check(d.module_function(&function, module, symbol.c_str()), symbol.c_str());
            return function;
        });
    }
    return variants().add(std::move(v));
}

}  // namespace attnforge
