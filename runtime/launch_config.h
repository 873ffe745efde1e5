// The arguments of cuLaunchKernelEx as cuda.h has them, of which nothing is included; tests compare the two.
#pragma once

#include <cstdint>

namespace attnforge {

struct LaunchAttribute {
    int id;
    alignas(8) union {
        int flag;
        unsigned char bytes[64];
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

// The first driver whose CUDA graphs can record such launches.
constexpr int kOverlappingDriver = 12030;

}  // namespace attnforge
