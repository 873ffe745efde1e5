// Descriptors of the Hopper TMA unit: they hold the tensors' addresses, sizes and strides.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "driver.h"
#include "params.h"
#include "variant_fields.h"

namespace attnforge {

// codegen.plan.TensorMap: one copy moves rows x panels x columns elements of one head.
struct TensorMapPlan {
    TensorRef Params::*tensor;
    bool queries;      // heads_q and seq_q, else heads_kv and seq_k
    int64_t head_dim;  // of the tensor
    unsigned columns, rows, panels;
};

inline TensorMapPlan tensor_map_of(const TensorMapFields& f, int64_t head_dim, int64_t head_dim_v) {
    const auto plan = [&](TensorRef Params::*tensor, bool queries, int64_t dim) {
        return TensorMapPlan{tensor, queries, dim, f.columns, f.rows, f.panels};
    };
    if (f.tensor == "q") return plan(&Params::q, true, head_dim);
    if (f.tensor == "k") return plan(&Params::k, false, head_dim);
    if (f.tensor == "v") return plan(&Params::v, false, head_dim_v);
    if (f.tensor == "out") return plan(&Params::out, true, head_dim_v);
    if (f.tensor == "dout") return plan(&Params::dout, true, head_dim_v);
    if (f.tensor == "dq") return plan(&Params::dq, true, head_dim);
    if (f.tensor == "dk") return plan(&Params::dk, false, head_dim);
    if (f.tensor == "dv") return plan(&Params::dv, false, head_dim_v);
    TORCH_CHECK_VALUE(false, "variant: unknown tensor '", f.tensor, "' in a tensor map");
}

// The kernel's `struct TensorMaps`; a descriptor is 128 bytes (CUtensorMap), aligned to 64.
struct alignas(64) TensorMaps {
    unsigned char bytes[8][128];
};

inline void encode(const std::vector<TensorMapPlan>& plans, const Params& p, at::ScalarType dtype, TensorMaps& maps) {
    // Values of the enums in cuda.h.
    constexpr int kFloat16 = 6, kBfloat16 = 9, kNoInterleave = 0, kPromotion128 = 2, kZeroFill = 0;
    TORCH_INTERNAL_ASSERT(plans.size() <= 8);
    for (size_t i = 0; i < plans.size(); ++i) {
        const TensorMapPlan& m = plans[i];
        const TensorRef& x = p.*m.tensor;
        const uint64_t heads = m.queries ? p.heads_q : p.heads_kv, seq = m.queries ? p.seq_q : p.seq_k;
        const uint64_t width = m.panels > 1 ? m.columns : m.head_dim;
        const uint64_t panels = m.panels > 1 ? m.head_dim / m.columns : 1;  // a copy may take some of them
        const uint64_t sizes[] = {width, seq, panels, heads, static_cast<uint64_t>(p.batch)};
        // The stride of an axis of size 1 is never used, but has to be acceptable.
        const auto bytes = [](long long stride, uint64_t size) {
            return size > 1 ? static_cast<uint64_t>(stride) * 2 : 16;
        };
        const uint64_t strides[] = {bytes(x.row, seq), bytes(m.columns, panels), bytes(x.head, heads),
                                    bytes(x.batch, p.batch)};
        const unsigned box[] = {m.columns, m.rows, m.panels, 1, 1};
        const unsigned steps[] = {1, 1, 1, 1, 1};
        const int swizzle = m.columns == 64 ? 3 : m.columns == 32 ? 2 : 1;  // over 128, 64 or 32 bytes
        const int type = dtype == at::kHalf ? kFloat16 : kBfloat16;
        driver().check(driver().tensor_map_encode(maps.bytes[i], type, 5, x.data, sizes, strides, box, steps,
                                                  kNoInterleave, swizzle, kPromotion128, kZeroFill),
                       "cuTensorMapEncodeTiled");
    }
}

// What the maps of a kernel hold besides addresses: batch, heads_q, heads_kv, seq_q, seq_k, then three strides a map.
using Geometry = std::array<long long, 5 + 3 * 8>;

inline Geometry geometry_of(const std::vector<TensorMapPlan>& plans, const Params& p) {
    Geometry g{p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k};
    long long* next = g.data() + 5;
    for (const TensorMapPlan& m : plans) {
        const TensorRef& x = p.*m.tensor;
        *next++ = x.batch;
        *next++ = x.head;
        *next++ = x.row;
    }
    return g;
}

// As encode, with a cache. Layer after layer has the same sizes and strides at other addresses, and a map with another
// address takes a sixth of the time of a new one. Each thread has its own, so they need no lock. The result is good
// until the thread's next call. `plans` are a variant's, which is never removed.
inline const TensorMaps& encoded(const std::vector<TensorMapPlan>& plans, const Params& p, at::ScalarType dtype) {
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
            void* const address = (p.*plans[i].tensor).data;
            driver().check(driver().tensor_map_move(entry.maps.bytes[i], address), "cuTensorMapReplaceAddress");
        }
    } else {
        entry.plans = nullptr;  // should encode fail
        encode(plans, p, dtype, entry.maps);
        entry.plans = &plans;
        entry.geometry = geometry;
    }
    return entry.maps;
}

}  // namespace attnforge
