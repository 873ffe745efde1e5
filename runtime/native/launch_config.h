// The argument of cuLaunchKernelEx, as cuda.h has it, which is not included (a test compares the two).
#pragma once

#include <cstdint>

namespace attnforge {

struct LaunchAttribute {
    int id;
    int unused;
    union {
        int flag;
        unsigned sizes[3];
        uint64_t words[8];
    };
};

struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    void* stream;
    LaunchAttribute* attributes;
    unsigned count;
};

// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may start before the one before it has ended.
constexpr int kProgrammaticStreamSerialization = 6;
// CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: blocks of a cluster.
constexpr int kClusterDimension = 4;

// A launch of a one-dimensional grid, in clusters of `cluster` blocks. `overlaps`: the kernel may start before the one
// before it has ended, and waits itself for what it needs; launched without overlap, that wait returns at once.
struct LaunchShape {
    unsigned blocks, threads;
    unsigned shared_bytes = 0;
    unsigned cluster = 1;
    bool overlaps = false;
};

inline LaunchConfig launch_config(const LaunchShape& shape, void* stream, LaunchAttribute* attributes, unsigned count) {
    return {{shape.blocks, 1, 1}, {shape.threads, 1, 1}, shape.shared_bytes, stream, attributes, count};
}

inline LaunchAttribute overlap_attribute() {
    LaunchAttribute attribute{};
    attribute.id = kProgrammaticStreamSerialization;
    attribute.flag = 1;
    return attribute;
}

inline LaunchAttribute cluster_attribute(unsigned blocks) {
    LaunchAttribute attribute{};
    attribute.id = kClusterDimension;
    attribute.sizes[0] = blocks, attribute.sizes[1] = attribute.sizes[2] = 1;
    return attribute;
}

// The first driver whose CUDA graphs can record such launches.
constexpr int kOverlappingDriver = 12030;

}  // namespace attnforge
