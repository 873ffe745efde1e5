// Which variant runs a call: resolved in Python (runtime/dispatch.py) once per problem class, then kept.
#pragma once

#include <cstdlib>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "checks.h"
#include "handles.h"
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

// The memory bandwidth of a GPU over that of an H100; 1 for those that are not Hopper's, where it was not measured.
inline double relative_bandwidth(c10::Device device) {
    constexpr double kH100 = 3.352e12;  // bytes a second: 2,619 MHz, 5,120 bits
    const double found = capability_major(device) == 9 ? memory_bandwidth(device) : 0.0;
    return found > 0.0 ? found / kH100 : 1.0;
}

// Whether a call runs a kernel that splits the keys, if there is one for it.
inline bool splits_keys(const Call& c, bool backward) {
    if (backward || c.q.is_cpu() || c.q.size(2) > kMostQueriesToSplit) {
        return false;
    }
    const c10::Device device = c.q.device();
    return splitting_is_faster({c.q.size(0), c.q.size(1), c.k.size(1), c.q.size(2), c.k.size(2),
                                count_multiprocessors(device), relative_bandwidth(device)});
}

class Router {
public:
    int64_t choose(const Call& c, bool backward, bool deterministic, int64_t align) {
        const uint64_t rows_octave = 63 - __builtin_clzll(static_cast<uint64_t>(c.q.size(2)));
        const uint64_t visible_keys = std::abs(c.visible_keys);
        const uint64_t visible_octave =
            (visible_keys > 0 ? 64 - __builtin_clzll(visible_keys) : 0) | (c.visible_keys < 0 ? 128u : 0u);
        const uint64_t device = static_cast<uint8_t>(c.q.device().index()) * 2u + c.q.is_cpu();
        const bool split_keys = splits_keys(c, backward);
        const Route route{
            static_cast<uint64_t>(split_keys) << 63 | static_cast<uint64_t>(c.q.size(3)) << 48 |
                static_cast<uint64_t>(c.v.size(3)) << 32 | static_cast<uint64_t>(c.q.size(1) / c.k.size(1)),
            visible_octave << 56 | device << 40 | static_cast<uint64_t>(c.q.scalar_type()) << 32 |
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
                                                    bool, std::string_view, std::string_view, bool)>(
            "attnforge::resolve");
        const int64_t handle =
            resolve.call(backward, c.q.scalar_type(), c.q.size(3), c.v.size(3), c.kind, c.q.size(1), c.k.size(1),
                         c.q.size(2), c.k.size(2), align, c.q.device(), deterministic, c.visible_keys, c.intervals(),
                         c.planes(), c.score.text, c.score.mask_mod, split_keys);
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
