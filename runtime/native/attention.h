// Attention by a chosen variant: allocates the results and workspaces, and launches the kernels.
#pragma once

#include "arguments.h"

namespace attnforge {

// Rows are aligned as `variant` needs; `stream` is torch's current one (a CUstream; null on the CPU).
// Without `with_lse` the second result is undefined.
inline ForwardResult attend_with(const Variant& variant, const Call& call, bool with_lse, void* stream) {
    const Tensor& q = call.q;
    const int64_t heads = q.size(1), rows = q.size(2);
    Tensor out = output(q, call.v), lse;
    Scratch unwanted;
    if (with_lse) {
        lse = new_tensor(q, q.sizes().slice(0, 3), {heads * rows, rows, 1}, at::kFloat);
    } else {
        unwanted = Scratch(q, q.size(0) * heads * rows * 4);
    }
    Params params =
        make_params(call, variant, out, with_lse ? lse.const_data_ptr<float>() : unwanted.data<float>());
    const Scratch splits = dkv_accum_of(call.k, variant, params);
    const Scratch ranges = out_accum_of(q, variant, params);
    launch(call, variant, params, stream);
    return {std::move(out), std::move(lse)};
}

// As attend_with. Rows of dout and out are aligned, too; lse and dlse are contiguous.
inline BackwardResult differentiate_with(const Variant& variant, const Call& call, const Gradients& g,
                                         void* stream) {
    const Tensor &q = call.q, &k = call.k, &v = call.v;
    Tensor dq = like(q), dk = like(k), dv = like(v);
    Params params = make_params(call, variant, g.out, g.lse.const_data_ptr<float>());
    set_score_gradients(params, call.score, call.score_gradients);
    params.dlse = g.dlse ? g.dlse->const_data_ptr<float>() : nullptr;
    params.dout = ref(g.dout);
    params.dq = ref(dq);
    params.dk = ref(dk);
    params.dv = ref(dv);
    const int64_t rows_q = q.size(0) * q.size(1) * params.padded_q;
    const Scratch delta(q, rows_q * variant.row_stats * 4);
    params.delta = delta.data<float>();
    const Scratch dkv_accum = dkv_accum_of(k, variant, params);
    Scratch dq_accum, dq_semaphore;
    if (variant.dq_accum) {
        dq_accum = Scratch(q, (rows_q * variant.columns + variant.tile_counter) * 4);
        params.dq_accum = dq_accum.data<float>();
    }
    if (variant.tile_counter) {
        params.tile_counter = dq_accum.data<int>() + rows_q * variant.columns;
    }
    if (variant.dq_semaphore) {
        dq_semaphore = Scratch(q, q.size(0) * (q.size(1) * params.tiles_m + k.size(1) * params.tiles_n) * 4);
        params.dq_semaphore = dq_semaphore.data<int>();
    }
    const std::vector<Tensor> score_bins = score_bins_of(variant, call.score, params);
    launch(call, variant, params, stream);
    return {std::move(dq), std::move(dk), std::move(dv)};
}

}  // namespace attnforge
