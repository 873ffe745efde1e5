// The operators that make the data of masks: copies, never views of what they are given. None waits for the device.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "checks.h"
#include "driver.h"
#include "masks.h"
#include "stream.h"

namespace attnforge {

// ---- Kernels of codegen/modules.py ---------------------------------------------------------------------------------

struct MaskKernels {
    void* documents = nullptr;
    void* pairs = nullptr;
};

class MaskKernelTable {
public:
    void add(c10::Device device, const MaskKernels& kernels) {
        const std::lock_guard lock(mutex_);
        table_[device.index()] = kernels;
    }

    // Those of `device`; compiled and loaded by runtime/kernels.py at the first use.
    MaskKernels of(c10::Device device) {
        static const auto load = find_op<void(at::Device)>("attnforge::load_mask_kernels");
        for (bool tried = false;; tried = true) {
            {
                const std::lock_guard lock(mutex_);
                const auto found = table_.find(device.index());
                if (found != table_.end()) {
                    return found->second;
                }
            }
            TORCH_INTERNAL_ASSERT(!tried, "attnforge: mask kernels of ", device, " were not loaded");
            load.call(device);
        }
    }

private:
    std::mutex mutex_;
    std::map<c10::DeviceIndex, MaskKernels> table_;
};

inline MaskKernelTable& mask_kernel_table() {
    static auto* const table = new MaskKernelTable;
    return *table;
}

inline void add_mask_kernels(const Tensor& binary, at::Device device) {
    const Driver& d = driver();
    const c10::DeviceGuard guard(device);
    ensure_context(device);
    void* module = nullptr;
    d.check(d.module_load(&module, binary.const_data_ptr()), "loading the mask kernels");
    MaskKernels kernels;
    const auto load = [&](void** function, const char* name) {
        d.check(d.module_function(function, module, name), name);
    };
    load(&kernels.documents, "attnforge_mask_of_documents");
    load(&kernels.pairs, "attnforge_mask_of_pairs");
    mask_kernel_table().add(device, kernels);
}

constexpr int64_t kMaskThreads = 128;  // kThreads of templates/common/masks.cu.jinja

template <size_t n>
void launch_mask_kernel(void* function, int64_t blocks, c10::Device device, std::array<void*, n> arguments) {
    TORCH_CHECK_VALUE(blocks < (int64_t{1} << 31), "mask: too large, it would take ", blocks, " blocks");
    ensure_context(device);
    driver().check(driver().enqueue(function, {static_cast<unsigned>(blocks), kMaskThreads},
                                    current_stream(device), arguments.data()),
                   "launching a mask kernel");
}

// For errors: dtype, shape and device of a tensor.
inline std::string described(const Tensor& x) {
    return c10::str(x.scalar_type(), " ", x.sizes(), " on ", x.device());
}

// ---- Spans ----------------------------------------------------------------------------------------------------------

// starts, ends: int32 (seq_k) -> (2, seq_k); int32 (batch, heads, intervals, seq_k), those of a key disjoint ->
// (batch, heads, intervals, 2, seq_k).
inline Tensor mask_of_spans(const Tensor& starts, const Tensor& ends) {
    const bool unions = starts.dim() == 4;
    TORCH_CHECK_VALUE(starts.scalar_type() == at::kInt && ends.scalar_type() == at::kInt &&
                          (starts.dim() == 1 || unions) && starts.sizes() == ends.sizes() &&
                          starts.device() == ends.device(),
                      "starts, ends: got ", described(starts), " and ", described(ends),
                      ", expected two int32 tensors of one shape on one device, (seq_k) or (batch, heads, intervals, "
                      "seq_k)");
    const c10::DeviceGuard guard(starts.device());
    std::vector<int64_t> sizes = starts.sizes().vec();
    sizes.insert(sizes.end() - 1, 2);
    const Tensor data = new_mask(sizes, starts.device(), unions ? 0 : room_for_schedules(starts.size(0)));
    data.select(-2, 0).copy_(starts);
    data.select(-2, 1).copy_(ends);
    return data;
}

// A copy of the data of a mask, or of a part of it, as a mask of its own.
inline Tensor mask_of_data(const Tensor& data) {
    TORCH_CHECK_VALUE(data.scalar_type() == at::kInt && (data.dim() < 3 || data.dim() == 4 || data.dim() == 5),
                      "data: got ", described(data), ", expected that of a mask, int32");
    const c10::DeviceGuard guard(data.device());
    const Tensor copy = new_mask(data.sizes(), data.device(), data.dim() == 2 ? room_for_schedules(data.size(1)) : 0);
    copy.copy_(data);
    return copy;
}

// Keys of split i, up to ends[i], are visible to the queries from firsts[i] on, or from their own on if that is -1, to
// lasts[i]. Keys from `limit` on are visible to no query.
inline Tensor mask_of_splits(at::IntArrayRef ends, at::IntArrayRef firsts, at::IntArrayRef lasts, int64_t limit,
                             at::Device place) {
    const c10::Device device =
        place.has_index() || place.is_cpu() ? place : c10::impl::VirtualGuardImpl(place.type()).getDevice();
    TORCH_CHECK_VALUE(ends.size() == firsts.size() && ends.size() == lasts.size(),
                      "ends, firsts, lasts: got ", ends.size(), ", ", firsts.size(), " and ", lasts.size(),
                      " numbers, expected equally many");
    const int64_t total = ends.empty() ? 0 : ends.back();
    // In the host's memory, since the numbers come from there. Pinned: otherwise the copy would wait for the device.
    const auto options = at::TensorOptions().dtype(at::kInt).pinned_memory(!device.is_cpu());
    const c10::DeviceGuard guard(device);
    const Tensor data = new_mask({2, total}, device, room_for_schedules(total));
    const Tensor table = device.is_cpu() ? data : at::empty({2, total}, options);
    int* const starts = table.mutable_data_ptr<int>();
    int* const last = starts + total;
    int64_t key = 0;
    for (size_t i = 0; i < ends.size(); ++i) {
        const int64_t end = std::max(key, std::min(ends[i], limit));
        if (firsts[i] < 0) {
            std::iota(starts + key, starts + end, static_cast<int>(key));
        } else {
            std::fill(starts + key, starts + end, static_cast<int>(firsts[i]));
        }
        std::fill(last + key, last + end, static_cast<int>(lasts[i]));
        key = end;
    }
    std::fill(starts + key, starts + total, 0);
    std::fill(last + key, last + total, 0);
    if (!device.is_cpu()) {
        data.copy_(table, /*non_blocking=*/true);
    }
    return data;
}

// cu_seqlens: int32 (documents + 1). See attnforge_mask_of_documents in templates/common/masks.cu.jinja.
inline Tensor mask_of_documents(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t seq_q, int64_t seq_k,
                                int64_t left, int64_t right) {
    const c10::Device device = cu_seqlens_q.device();
    TORCH_CHECK_VALUE(cu_seqlens_q.scalar_type() == at::kInt && cu_seqlens_k.scalar_type() == at::kInt &&
                          cu_seqlens_q.dim() == 1 && cu_seqlens_q.sizes() == cu_seqlens_k.sizes() &&
                          cu_seqlens_q.size(0) > 1 && cu_seqlens_k.device() == device,
                      "cu_seqlens_q, cu_seqlens_k: got ", described(cu_seqlens_q), " and ", described(cu_seqlens_k),
                      ", expected two int32 vectors of one length, at least 2, on one device");
    TORCH_CHECK_VALUE(std::max(seq_q, seq_k) <= INT_MAX / 2, "q, k: got ", seq_q, " and ", seq_k, " rows, at most ",
                      INT_MAX / 2, " are supported");
    const c10::DeviceGuard guard(device);
    const Tensor data = new_mask({2, seq_k}, device, room_for_schedules(seq_k));
    const Tensor bounds_q = cu_seqlens_q.contiguous(), bounds_k = cu_seqlens_k.contiguous();
    const int* cu_q = bounds_q.const_data_ptr<int>();
    const int* cu_k = bounds_k.const_data_ptr<int>();
    int documents = static_cast<int>(cu_seqlens_q.size(0)) - 1, rows_q = static_cast<int>(seq_q);
    int rows_k = static_cast<int>(seq_k);
    // No window is wider than both sequences: sums with it stay within int.
    int before = static_cast<int>(std::min(left, seq_q + seq_k));
    int behind = static_cast<int>(std::min(right, seq_q + seq_k));
    int* starts = data.mutable_data_ptr<int>();
    int* ends = starts + seq_k;
    if (seq_k == 0) {
        return data;
    }
    if (!device.is_cpu()) {
        const int64_t blocks = (seq_k + kMaskThreads - 1) / kMaskThreads;
        launch_mask_kernel<9>(mask_kernel_table().of(device).documents, blocks, device,
                              {&cu_q, &cu_k, &documents, &rows_q, &rows_k, &before, &behind, &starts, &ends});
        return data;
    }
    for (int key = 0; key < rows_k; ++key) {
        const int document = static_cast<int>(std::upper_bound(cu_k + 1, cu_k + 1 + documents, key) - cu_k) - 1;
        starts[key] = ends[key] = 0;
        if (document < documents) {
            const int first = cu_q[document], last = std::min(cu_q[document + 1], rows_q);
            const int diagonal = last - (cu_k[document + 1] - key);
            starts[key] = right < 0 ? first : std::max(first, diagonal - behind);
            ends[key] = left < 0 ? last : std::min(last, diagonal + before + 1);
        }
    }
    return data;
}

// ---- Dense masks ----------------------------------------------------------------------------------------------------

// visible: bool (seq_q, seq_k) or (batch, heads, seq_q, seq_k), any strides; an expanded axis becomes one plane.
inline Tensor mask_of_pairs(const Tensor& visible_any) {
    TORCH_CHECK_VALUE(visible_any.scalar_type() == at::kBool && (visible_any.dim() == 2 || visible_any.dim() == 4),
                      "mask: got ", described(visible_any), ", expected a bool tensor of 2 or 4 dimensions");
    Tensor visible = visible_any.dim() == 2 ? visible_any.unsqueeze(0).unsqueeze(0) : visible_any;
    for (int64_t axis = 0; axis < 2; ++axis) {
        if (visible.stride(axis) == 0 && visible.size(axis) > 1) {
            visible = visible.narrow(axis, 0, 1);
        }
    }
    const c10::Device device = visible.device();
    const c10::DeviceGuard guard(device);
    const int64_t seq_q = visible.size(2), seq_k = visible.size(3), words = (seq_k + 31) / 32;
    const Tensor data = new_mask({visible.size(0), visible.size(1), seq_q, words}, device);
    int64_t rows = visible.size(0) * visible.size(1) * seq_q;
    auto from = static_cast<const unsigned char*>(visible.const_data_ptr());
    auto bits = reinterpret_cast<unsigned*>(data.mutable_data_ptr<int>());
    long long strides[4] = {visible.stride(0), visible.stride(1), visible.stride(2), visible.stride(3)};
    int heads = static_cast<int>(visible.size(1)), rows_q = static_cast<int>(seq_q), rows_k = static_cast<int>(seq_k);
    if (data.numel() == 0) {
        return data;
    }
    if (!device.is_cpu()) {
        long long count = rows;
        launch_mask_kernel<10>(mask_kernel_table().of(device).pairs, (rows + 3) / 4, device,
                               {&from, &strides[0], &strides[1], &strides[2], &strides[3], &heads, &rows_q, &rows_k,
                                &count, &bits});
        return data;
    }
    at::parallel_for(0, rows, 1 + (1 << 15) / std::max<int64_t>(seq_k, 1), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const int64_t plane = row / seq_q;
            const unsigned char* mask =
                from + plane / heads * strides[0] + plane % heads * strides[1] + row % seq_q * strides[2];
            for (int64_t word = 0; word < words; ++word) {
                unsigned found = 0;
                for (int64_t i = 0; i < std::min<int64_t>(32, seq_k - word * 32); ++i) {
                    found |= static_cast<unsigned>(mask[(word * 32 + i) * strides[3]] != 0) << i;
                }
                bits[row * words + word] = found;
            }
        }
    });
    return data;
}

// The data of a mask whose pairs are given by a function.
inline Tensor mask_of_function(int64_t seq_k, at::Device place) {
    const c10::Device device =
        place.has_index() || place.is_cpu() ? place : c10::impl::VirtualGuardImpl(place.type()).getDevice();
    if (device.is_meta()) {
        return at::empty({1}, at::TensorOptions().dtype(at::kInt).device(device));
    }
    const c10::DeviceGuard guard(device);
    return new_mask({1}, device, device.is_cpu() ? room_for_schedules(seq_k) : room_for_bits(seq_k)).zero_();
}

// Schedules that a mask owns; without one all in this process.
inline int64_t schedule_count(const OptionalTensor& data) {
    if (!data) {
        return live_schedules();
    }
    MaskState* const state = state_of(*data);
    if (state == nullptr) {
        return 0;
    }
    const std::lock_guard lock(state->mutex);
    return static_cast<int64_t>(state->schedules.size());
}

// Drops the schedules of a mask; the next call builds them anew. For benchmarks. There are none outside of masks.
inline void forget_schedules(const OptionalTensor& data) {
    if (MaskState* const state = data ? state_of(*data) : nullptr) {
        const std::lock_guard lock(state->mutex);
        state->schedules.clear();
        state->used = aligned(state->size);
    }
}

}  // namespace attnforge
