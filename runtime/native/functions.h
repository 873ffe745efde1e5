// Functions that Python launches one by one, with an argument that it has packed: those of runtime/prologue_kernels.py.
#pragma once

#include <deque>
#include <mutex>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "driver.h"
#include "stream.h"

namespace attnforge {

struct Function {
    void* entry;  // a CUfunction, or on the CPU void (*)(const void*)
    c10::Device device;
    std::string name;
};

// Handles are 1, 2, 3, ...; a function is never removed, so references stay valid.
class FunctionTable {
public:
    int64_t add(Function function) {
        const std::lock_guard lock(mutex_);
        functions_.push_back(std::move(function));
        return static_cast<int64_t>(functions_.size());
    }

    const Function& at(int64_t handle) {
        const std::lock_guard lock(mutex_);
        TORCH_CHECK_VALUE(handle > 0 && handle <= static_cast<int64_t>(functions_.size()), "function: got handle ",
                          handle, ", expected one that add_function returned");
        return functions_[handle - 1];
    }

private:
    std::mutex mutex_;
    std::deque<Function> functions_;
};

inline FunctionTable& functions() {
    static auto* const table = new FunctionTable;  // outlives every thread that may still call in at exit
    return *table;
}

// Loads `symbol` from a cubin (`binary`), or on the CPU from the shared library at `path`.
inline int64_t add_function(const std::string& symbol, at::Device device, const at::Tensor& binary,
                            const std::string& path) {
    void* entry = nullptr;
    if (device.is_cpu()) {
        void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        TORCH_CHECK(library != nullptr, "attnforge: cannot load ", path, ": ", dlerror());
        entry = dlsym(library, symbol.c_str());
        TORCH_CHECK(entry != nullptr, "attnforge: ", path, " has no function ", symbol);
    } else {
        const c10::DeviceGuard guard(device);
        const Driver& d = driver();
        ensure_context(device);
        void* module = nullptr;
        d.check(d.module_load(&module, binary.const_data_ptr()), ("loading the cubin of " + symbol).c_str());
        d.check(d.module_function(&entry, module, symbol.c_str()), symbol.c_str());
    }
    return functions().add({entry, device, symbol});
}

// Runs a function on torch's current stream, or on the CPU in this thread. `argument`: the bytes of its one parameter,
// on the CPU; they are copied before this returns.
inline void launch_function(int64_t handle, int64_t blocks, int64_t threads, const at::Tensor& argument) {
    const Function& f = functions().at(handle);
    TORCH_CHECK_VALUE(argument.is_cpu() && argument.is_contiguous(), "argument: expected contiguous bytes on the CPU");
    void* const data = argument.data_ptr();
    if (f.device.is_cpu()) {
        reinterpret_cast<void (*)(const void*)>(f.entry)(data);
        return;
    }
    TORCH_CHECK_VALUE(blocks > 0 && blocks < (int64_t{1} << 31), "attnforge: ", f.name, " would need ", blocks,
                      " blocks");
    const c10::DeviceGuard guard(f.device);
    ensure_context(f.device);
    void* arguments[] = {data};
    driver().check(driver().enqueue(f.entry, {static_cast<unsigned>(blocks), static_cast<unsigned>(threads)},
                                    current_stream(f.device), arguments),
                   f.name.c_str());
}

}  // namespace attnforge
