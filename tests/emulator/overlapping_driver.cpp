// runtime/native/driver.h with a libcuda.so.1 that says what it is told: how kernels are launched, by the driver's version.
// Built twice: with FAKE as that library, and without as the program that opens it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "launch_config.h"

#ifdef FAKE

extern "C" {
#define ATTNFORGE_FAKE(name) \
    int name() { return 0; }
ATTNFORGE_FAKE(cuInit)
ATTNFORGE_FAKE(cuGetErrorName)
ATTNFORGE_FAKE(cuGetErrorString)
ATTNFORGE_FAKE(cuDeviceGet)
ATTNFORGE_FAKE(cuDevicePrimaryCtxRetain)
ATTNFORGE_FAKE(cuCtxGetCurrent)
ATTNFORGE_FAKE(cuCtxSetCurrent)
ATTNFORGE_FAKE(cuModuleLoadData)
ATTNFORGE_FAKE(cuModuleGetFunction)
ATTNFORGE_FAKE(cuFuncSetAttribute)
ATTNFORGE_FAKE(cuStreamIsCapturing)
ATTNFORGE_FAKE(cuDeviceGetAttribute)

int cuDriverGetVersion(int* version) {
    *version = std::atoi(std::getenv("FAKE_VERSION"));
    return 0;
}
static void say(const char* how, void* function, const unsigned (&grid)[3], const unsigned (&block)[3], unsigned shared,
                void* stream, void** arguments) {
    std::printf("%s function %ld grid %u %u %u block %u %u %u shared %u stream %ld argument %d\n", how,
                reinterpret_cast<intptr_t>(function), grid[0], grid[1], grid[2], block[0], block[1], block[2], shared,
                reinterpret_cast<intptr_t>(stream), *static_cast<int*>(arguments[0]));
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** arguments, void**) {
    say("plain", function, {gx, gy, gz}, {bx, by, bz}, shared, stream, arguments);
    return 0;
}
int cuLaunchKernelEx(const attnforge::LaunchConfig* c, void* function, void** arguments, void**) {
    std::string how;
    for (unsigned i = 0; i < c->count; ++i) {
        const attnforge::LaunchAttribute& x = c->attributes[i];
        const unsigned* sizes = x.sizes;
        how += x.id == 6 && x.flag == 1 ? "overlapping " : "";
        how += x.id == 4 && sizes[1] * sizes[2] == 1 ? "clusters of " + std::to_string(sizes[0]) + " " : "";
    }
    say(how.empty() ? "odd" : how.substr(0, how.size() - 1).c_str(), function, c->grid, c->block, c->shared_bytes, c->stream, arguments);
    return 7;
}
int cuOccupancyMaxActiveClusters(int* count, void*, const attnforge::LaunchConfig* c) {
    const int size = static_cast<int>(c->attributes[0].sizes[0]);
    *count = 100 / size;
    return size > 8 ? 912 : 0;
}
}

#else

#include <stdexcept>
#include <type_traits>

#define TORCH_CHECK(good, ...) \
    if (!(good)) throw std::runtime_error("check")

namespace c10 {
struct Device {
    bool is_cpu() const { return false; }
    int index() const { return 0; }
    int type() const { return 1; }
};
struct Stream {
    void* native_handle() const { return nullptr; }
};
namespace impl {
struct VirtualGuardImpl {
    explicit VirtualGuardImpl(int) {}
    Stream getStream(Device) const { return {}; }
};
}  // namespace impl
}  // namespace c10

#include "driver.h"

int main() {
    int value = 5;
    void* arguments[] = {&value};
    void* const function = reinterpret_cast<void*>(11);
    void* const stream = reinterpret_cast<void*>(12);
    const attnforge::Driver& driver = attnforge::driver();
    for (const bool overlaps : {false, true}) {
        std::printf("%d\n", driver.enqueue(function, {40, 384, 1000, 1, overlaps}, stream, arguments));
    }
    if (driver.most_clusters != nullptr) {
        for (const bool overlaps : {false, true}) {
            driver.enqueue(function, {40, 384, 1000, 8, overlaps}, stream, arguments);
        }
        for (const unsigned size : {4U, 9U}) {
            std::printf("%d\n", driver.count_clusters(function, {size, 384, 1000, size}));
        }
    }
}

#endif
