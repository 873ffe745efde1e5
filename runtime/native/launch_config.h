// The argument of cuLaunchKernelEx, as cuda.h has it, which is not included (a test compares the two).
#pragma once

#include <cstdint>

namespace attnforge {

struct LaunchAttribute {
    int id;
    int unused;
    union {
        int flag;
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

// The first driver whose CUDA graphs can record such launches.
constexpr int kOverlappingDriver = 12030;

}  // namespace attnforge
