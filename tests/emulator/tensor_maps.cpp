// runtime/native/tensor_maps.h with a driver that writes down what it is told: kept maps are those that encode makes anew.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>

namespace at {
enum class ScalarType { Half, BFloat16 };
constexpr ScalarType kHalf = ScalarType::Half, kBFloat16 = ScalarType::BFloat16;
}  // namespace at
#define TORCH_CHECK_VALUE(good, ...) \
    if (!(good)) throw std::runtime_error("value")
#define TORCH_INTERNAL_ASSERT(good) TORCH_CHECK_VALUE(good)

namespace attnforge {

struct Driver {
    static inline std::atomic<int> moved{0}, refused{0};

    static int tensor_map_encode(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                                 const uint64_t* strides, const unsigned* box, const unsigned*, int, int swizzle, int,
                                 int) {
        if (sizes[1] == 13) {  // a length that this driver does not like, and breaks off at
            ++refused;
            std::memset(map, 255, 64);
            return 1;
        }
        unsigned char bytes[128] = {static_cast<unsigned char>(type), static_cast<unsigned char>(swizzle)};
        std::memcpy(bytes + 8, &address, 8);
        unsigned hash = rank;
        for (int i = 0; i < 5; ++i) {
            hash = hash * 31 + static_cast<unsigned>(sizes[i]);
            hash = hash * 31 + box[i];
            hash = hash * 31 + static_cast<unsigned>(i < 4 ? strides[i] : 0);
        }
        std::memcpy(bytes + 16, &hash, 4);
        std::memcpy(bytes + 24, &sizes[2], 8);
        std::memcpy(bytes + 32, &strides[1], 8);
        std::memcpy(map, bytes, 128);
        return 0;
    }

    static int tensor_map_move(void* map, void* address) {
        ++moved;
        std::memcpy(static_cast<unsigned char*>(map) + 8, &address, 8);
        return 0;
    }

    static void check(int result, const char* what) {
        if (result != 0) throw std::runtime_error(what);
    }
};

inline const Driver& driver() {
    static const Driver instance;
    return instance;
}

}  // namespace attnforge

#include "tensor_maps.h"

using namespace attnforge;

// Panels of a row that a map knows, and the bytes between them. A copy may take some of the panels.
bool knows_panels(unsigned columns, unsigned panels, uint64_t of_row, uint64_t bytes) {
    Params p{};
    p.batch = p.heads_kv = p.seq_k = 1;
    TensorMaps maps{};
    encode({tensor_map_of({"k", columns, 8, panels}, 512, 512)}, p, at::kHalf, maps);
    uint64_t known[2];
    std::memcpy(known, maps.bytes[0] + 24, 16);
    return known[0] == of_row && known[1] == bytes;
}

// Random calls of two variants: more geometries than are kept, some of them often, with other addresses every time.
void calls(unsigned seed, const std::vector<TensorMapPlan>& first, const std::vector<TensorMapPlan>& second) {
    std::mt19937 random(seed);
    for (int call = 0; call < 5000; ++call) {
        Params p{};
        p.batch = 1 + static_cast<int>(random() % 2), p.heads_q = 4, p.heads_kv = 2;
        const auto rarely = [&](int usual, int other) { return random() % 16 == 0 ? other : usual; };
        p.seq_q = rarely(8, 16), p.seq_k = random() % 8 == 0 ? 13 : rarely(8, 16);
        for (TensorRef* x : {&p.q, &p.k, &p.out}) {
            x->data = reinterpret_cast<void*>(uintptr_t{16} * (random() % 100000));
            x->row = rarely(64, 72), x->head = rarely(1600, 1608), x->batch = rarely(8000, 8008);
        }
        const bool which = random() % 2 != 0;
        const auto& plans = which ? first : second;
        const at::ScalarType dtype = which ? at::kHalf : at::kBFloat16;
        TensorMaps anew{};
        bool refused = false;
        try {
            encode(plans, p, dtype, anew);
        } catch (const std::runtime_error&) {
            refused = true;
        }
        try {
            const TensorMaps& kept = encoded(plans, p, dtype);
            if (refused || reinterpret_cast<uintptr_t>(&kept) % 64 != 0 ||
                std::memcmp(&kept, &anew, plans.size() * 128) != 0) {
                std::printf("call %d of seed %u: other maps\n", call, seed);
                std::exit(1);
            }
        } catch (const std::runtime_error&) {
            if (!refused) {
                std::printf("call %d of seed %u: refused\n", call, seed);
                std::exit(1);
            }
        }
    }
}

int main() {
    const auto map = [](const char* tensor, unsigned columns, unsigned rows, unsigned panels) {
        return tensor_map_of({tensor, columns, rows, panels}, 64, 48);
    };
    const std::vector<TensorMapPlan> first{map("q", 64, 128, 1), map("k", 64, 96, 1)};
    const std::vector<TensorMapPlan> second{map("k", 32, 64, 2), map("out", 32, 64, 2)};
    if (first[0].head_dim != 64 || map("out", 48, 64, 1).head_dim != 48 || map("dv", 48, 64, 1).head_dim != 48) {
        std::printf("head_dim of another tensor\n");
        return 1;
    }
    // Half of the panels, all of them, and single panels, whose columns are those of the row.
    if (!knows_panels(64, 4, 8, 128) || !knows_panels(64, 8, 8, 128) || !knows_panels(64, 1, 1, 16)) {
        std::printf("other panels\n");
        return 1;
    }
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back(calls, seed, std::cref(first), std::cref(second));
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    std::printf("%d %d\n", Driver::moved.load(), Driver::refused.load());
}
