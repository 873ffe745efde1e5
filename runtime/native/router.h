// Which variant runs a call: resolved in Python (runtime/dispatch.py) once per problem class, then kept.
#pragma once

#include <cstdlib>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "checks.h"
#include "handles.h"
#include "rounds.h"
#include "split_choice.h"

namespace attnforge {

// The problem class that a dispatch decision holds for.
struct Route {
    uint64_t sizes, kind, score;
    bool operator==(const Route& o) const { return sizes == o.sizes && kind == o.kind && score == o.score; }
};

struct RouteHash {
    size_t operator()(const Route& r) const {
        return (r.sizes ^ (r.kind ^ r.score << 20) * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u >> 7;
    }
};

inline uint64_t number_or_none(std::string_view text) {
    return text.empty() ? 0 : static_cast<uint64_t>(number_of(std::string(text)));
}

// Rates of a GPU that `splitting_is_faster` reads. The driver is queried once for each device.
struct GpuRates {
    int multiprocessors;
    double bandwidth;  // of its memory, over an H100's
};

inline const GpuRates& rates_of(c10::Device device) {
    static std::shared_mutex mutex;
    static std::unordered_map<int, GpuRates> known;  // its elements do not move
    {
        const std::shared_lock lock(mutex);
        const auto found = known.find(device.index());
        if (found != known.end()) {
            return found->second;
        }
    }
    const GpuRates rates{count_multiprocessors(device), relative_bandwidth(device)};
    const std::unique_lock lock(mutex);
    return known.emplace(device.index(), rates).first->second;
}

// Rows of the tiles of a kernel that splits the keys, if there is one for the call; 0 if it should run another one.
inline int64_t split_rows_of(const Call& c, bool backward) {
    if (backward || c.q.is_cpu() || !may_split(c.q.size(2), c.k.size(2))) {
        return 0;
    }
    const GpuRates& rates = rates_of(c.q.device());
    const SplitSizes sizes{c.q.size(0), c.q.size(1), c.k.size(1), c.q.size(2), c.k.size(2), rates.multiprocessors,
                           rates.bandwidth};
    return splitting_is_faster(sizes) ? split_rows(sizes) : 0;
}

inline uint64_t rounds_of(const Call& c, bool backward) {
    if (c.q.is_cpu()) {
        return kManyRounds;
    }
    const at::Tensor& owner = backward ? c.k : c.q;
    return rounds(owner.size(0), owner.size(1), owner.size(2), rates_of(owner.device()).multiprocessors);
}

class Router {
public:
    int64_t choose(const Call& c, bool backward, bool deterministic, int64_t align) {
        const uint64_t rows_octave = 63 - __builtin_clzll(static_cast<uint64_t>(c.q.size(2)));
        const uint64_t visible_keys = std::abs(c.visible_keys);
        const uint64_t visible_octave =
            (visible_keys > 0 ? 64 - __builtin_clzll(visible_keys) : 0) | (c.visible_keys < 0 ? 128u : 0u);
        const uint64_t device = static_cast<uint8_t>(c.q.device().index()) * 2u + c.q.is_cpu();
        const int64_t split_rows = split_rows_of(c, backward);
        const uint64_t rounds = rounds_of(c, backward);
        const Route route{
            static_cast<uint64_t>(split_rows / 64) << 62 | static_cast<uint64_t>(c.q.size(3)) << 48 |
                static_cast<uint64_t>(c.v.size(3)) << 32 | static_cast<uint64_t>(c.q.size(1) / c.k.size(1)),
            visible_octave << 56 | rounds << 52 | device << 40 | static_cast<uint64_t>(c.q.scalar_type()) << 32 |
                rows_octave << 24 | static_cast<uint64_t>(align) << 16 | static_cast<uint64_t>(c.kind) << 8 |
                static_cast<uint64_t>(c.intervals()) << 4 | c.planes() * 4u | deterministic * 2u | backward,
            number_or_none(c.score.text) | number_or_none(c.score.mask_mod) << 32};
        {
            const std::shared_lock lock(mutex_);
            const auto found = handles_.find(route);
            if (found != handles_.end()) {
                return found->second;
            }
        }
        static const auto resolve = find_op<int64_t(bool, at::ScalarType, int64_t, int64_t, int64_t, int64_t, int64_t,
                                                    int64_t, int64_t, int64_t, at::Device, bool, int64_t, int64_t,
                                                    bool, std::string_view, std::string_view, int64_t, int64_t)>(
            "attnforge::resolve");
        const int64_t handle =
            resolve.call(backward, c.q.scalar_type(), c.q.size(3), c.v.size(3), c.kind, c.q.size(1), c.k.size(1),
                         c.q.size(2), c.k.size(2), align, c.q.device(), deterministic, c.visible_keys, c.intervals(),
                         c.planes(), c.score.text, c.score.mask_mod, split_rows, static_cast<int64_t>(rounds));
        const std::unique_lock lock(mutex_);
        handles_[route] = handle;
        return handle;
    }

    void clear() {
        const std::unique_lock lock(mutex_);
        handles_.clear();
    }

private:
    std::shared_mutex mutex_;
    std::unordered_map<Route, int64_t, RouteHash> handles_;
};

inline Router& router() {
    static auto* instance = new Router;
    return *instance;
}

inline const Variant& choose(const Call& c, bool backward, bool deterministic, int64_t align, int64_t handle) {
    if (handle == 0) {
        return variants().at(router().choose(c, backward, deterministic, align));
    }
    const Variant& v = variants().at(handle);
    TORCH_CHECK_VALUE(v.backward == backward && v.dtype == c.q.scalar_type() && v.head_dim == c.q.size(3) &&
                          v.head_dim_v == c.v.size(3) && v.mask == c.kind && v.intervals == c.intervals() &&
                          v.planes == c.planes() && v.score == c.score.text &&
                          v.mask_mod == c.score.mask_mod && v.device == c.q.device() &&
                          align % v.align == 0 && (v.deterministic || !deterministic),
                      "variant: ", v.name, " on ", v.device, " does not fit this call (", backward ? "bwd" : "fwd",
                      ", ", c.q.scalar_type(), ", head_dim ", c.q.size(3), " and of v ", c.v.size(3), ", mask ", c.kind,
                      c.is_union() ? c10::str(" of ", c.intervals(), " intervals", c.planes() ? " in planes" : "") : "",
                      ", rows aligned to ", align, " bytes, ", c.q.device(), deterministic ? ", deterministic" : "",
                      ")");
    return v;
}

}  // namespace attnforge
