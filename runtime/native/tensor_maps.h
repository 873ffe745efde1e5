// Descriptors of the Hopper copy engine (TMA): they hold the tensors' addresses, sizes and strides.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "driver.h"
#include "params.h"

namespace attnforge {

// codegen.plan.TensorMap: one copy moves rows x panels x columns elements of one head.
struct TensorMapPlan {
    void* Params::* data;
    long long Params::*batch, Params::*head, Params::*row;
    bool queries;  // heads_q and seq_q, else heads_kv and seq_k
    unsigned columns, rows, panels;
};

inline TensorMapPlan parse_tensor_map(const std::string& tensor, unsigned columns, unsigned rows, unsigned panels) {
#define ATTNFORGE_TENSOR(name, queries)                                                                          \
    if (tensor == #name) {                                                                                       \
        return {&Params::name, &Params::name##_batch, &Params::name##_head, &Params::name##_row, queries, columns, \
                rows, panels};                                                                                   \
    }
    ATTNFORGE_TENSOR(q, true)
    ATTNFORGE_TENSOR(k, false)
    ATTNFORGE_TENSOR(v, false)
    ATTNFORGE_TENSOR(out, true)
    ATTNFORGE_TENSOR(dout, true)
    ATTNFORGE_TENSOR(dq, true)
    ATTNFORGE_TENSOR(dk, false)
    ATTNFORGE_TENSOR(dv, false)
#undef ATTNFORGE_TENSOR
    TORCH_CHECK_VALUE(false, "attnforge: unknown tensor '", tensor, "' in a tensor map");
}

// The kernel's `struct TensorMaps`; a descriptor is 128 bytes (CUtensorMap), aligned to 64.
struct alignas(64) TensorMaps {
    unsigned char bytes[8][128];
};

inline void encode(const std::vector<TensorMapPlan>& plans, const Params& p, int64_t head_dim, at::ScalarType dtype,
                   TensorMaps& maps) {
    // Values of the enums in cuda.h.
    constexpr int kFloat16 = 6, kBfloat16 = 9, kNoInterleave = 0, kPromotion128 = 2, kZeroFill = 0;
    TORCH_INTERNAL_ASSERT(plans.size() <= 8);
    for (size_t i = 0; i < plans.size(); ++i) {
        const TensorMapPlan& m = plans[i];
        const uint64_t heads = m.queries ? p.heads_q : p.heads_kv, seq = m.queries ? p.seq_q : p.seq_k;
        const uint64_t width = m.panels > 1 ? m.columns : head_dim;
        const uint64_t sizes[] = {width, seq, m.panels, heads, static_cast<uint64_t>(p.batch)};
        // The stride of an axis of size 1 is never used, but has to be acceptable.
        const auto bytes = [](long long stride, uint64_t size) {
            return size > 1 ? static_cast<uint64_t>(stride) * 2 : 16;
        };
        const uint64_t strides[] = {bytes(p.*m.row, seq), bytes(m.columns, m.panels), bytes(p.*m.head, heads),
                                    bytes(p.*m.batch, p.batch)};
        const unsigned box[] = {m.columns, m.rows, m.panels, 1, 1};
        const unsigned steps[] = {1, 1, 1, 1, 1};
        const int swizzle = m.columns == 64 ? 3 : m.columns == 32 ? 2 : 1;  // over 128, 64 or 32 bytes
        const int type = dtype == at::kHalf ? kFloat16 : kBfloat16;
        driver().check(driver().tensor_map_encode(maps.bytes[i], type, 5, p.*m.data, sizes, strides, box, steps,
                                                  kNoInterleave, swizzle, kPromotion128, kZeroFill),
                       "cuTensorMapEncodeTiled");
    }
}

// What the maps of a kernel say besides addresses: batch, heads_q, heads_kv, seq_q, seq_k, then three strides a map.
using Geometry = std::array<long long, 5 + 3 * 8>;

inline Geometry geometry_of(const std::vector<TensorMapPlan>& plans, const Params& p) {
    Geometry g{p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k};
    long long* next = g.data() + 5;
    for (const TensorMapPlan& m : plans) {
        *next++ = p.*m.batch;
        *next++ = p.*m.head;
        *next++ = p.*m.row;
    }
    return g;
}

// As encode, with a memory. Layer after layer has the same sizes and strides at other addresses, and a map with another
// address takes a sixth of the time of a new one. Each thread has its own, so they need no lock. The result is good
// until the thread's next call. `plans` are a variant's, which is never removed.
inline const TensorMaps& encoded(const std::vector<TensorMapPlan>& plans, const Params& p, int64_t head_dim,
                                 at::ScalarType dtype) {
    struct Entry {
        const void* plans = nullptr;
        Geometry geometry{};
        TensorMaps maps;
    };
    constexpr size_t kEntries = 32;
    thread_local const auto entries = std::make_unique<std::array<Entry, kEntries>>();
    const Geometry geometry = geometry_of(plans, p);
    uint64_t hash = reinterpret_cast<uintptr_t>(&plans);
    for (const long long value : geometry) {
        hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u;
    }
    Entry& entry = (*entries)[hash >> 32 & (kEntries - 1)];
    if (entry.plans == &plans && entry.geometry == geometry) {
        for (size_t i = 0; i < plans.size(); ++i) {
            void* const address = p.*plans[i].data;
            driver().check(driver().tensor_map_move(entry.maps.bytes[i], address), "cuTensorMapReplaceAddress");
        }
    } else {
        entry.plans = nullptr;  // should encode fail
        encode(plans, p, head_dim, dtype, entry.maps);
        entry.plans = &plans;
        entry.geometry = geometry;
    }
    return entry.maps;
}

}  // namespace attnforge
