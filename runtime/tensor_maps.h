// Descriptors of the Hopper copy engine (TMA), encoded for each call: they hold the tensors' addresses and strides.
#pragma once

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

}  // namespace attnforge
