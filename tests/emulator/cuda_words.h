// What CUDA has beyond C++, as far as the Hopper kernels use it. Includes nothing: each kernel is compiled with it.
#pragma once

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct float2 {
    float x, y;
};
struct int2 {
    int x, y;
};
struct float4 {
    float x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float __int_as_float(int) { return 0.0f; }
template <class T>
static T __shfl_sync(unsigned, T x, int) { return x; }
template <class T>
static T __shfl_xor_sync(unsigned, T x, int) {
    return x;
}
template <class T>
static T __ldg(const T* x) { return *x; }
template <class T>
static constexpr T max(T x, T y) { return x < y ? y : x; }
template <class T>
static constexpr T min(T x, T y) { return y < x ? y : x; }
