// The emulator's shared memory, and the instructions that a warp computes together: ldmatrix and mma.sync. See emulator.h.
#include "emulator.h"

#include <deque>
#include <vector>

unsigned char* shared_memory;
size_t shared_size;

// `bytes` at a shared address, which must be aligned to them.
unsigned char* shared_at(unsigned address, unsigned bytes) {
    if (address + size_t{bytes} > shared_size || address % bytes != 0) {
        stop("bad shared address", address);
    }
    return shared_memory + address;
}

// cp.async of `width` bytes, zeros from `bytes` on. As late as the hardware may, it lands when its thread waits for its
// group.
struct Copy {
    unsigned char* target;
    const void* from;
    int width, bytes;
};
struct ThreadCopies {
    std::vector<Copy> open;                 // not yet committed
    std::deque<std::vector<Copy>> groups;  // committed, oldest first
};
static std::vector<ThreadCopies> async_copies;  // of each thread of the block

void copy_async(unsigned to, const void* from, int width, int bytes) {
    if (bytes < 0 || bytes > width || (bytes > 0 && reinterpret_cast<uintptr_t>(from) % width != 0)) {
        stop("bad copy of bytes", bytes);
    }
    unsigned char* target = shared_at(to, width);
    std::memset(target, 0xff, width);  // NaN: who still reads what was there, or does not wait, notices
    async_copies[threadIdx.x].open.push_back({target, from, width, bytes});
}

void copies_commit() {
    ThreadCopies& mine = async_copies[threadIdx.x];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}

// All groups but the newest `pending` land.
void copies_wait(size_t pending) {
    std::deque<std::vector<Copy>>& groups = async_copies[threadIdx.x].groups;
    for (; groups.size() > pending; groups.pop_front()) {
        for (const Copy& copy : groups.front()) {
            std::memset(copy.target, 0, copy.width);
            if (copy.bytes > 0) {
                std::memcpy(copy.target, copy.from, copy.bytes);
            }
        }
    }
}

void forget_copies(int threads) { async_copies.assign(threads, ThreadCopies{}); }

#if EMULATED_FP16
float widen(unsigned x) { return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(x))); }
static unsigned narrow(float x) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(x)); }
#else
float widen(unsigned x) { return __uint_as_float(x << 16); }
static unsigned narrow(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif
unsigned narrow_pair(float low, float high) { return narrow(low) | narrow(high) << 16; }

// ldmatrix of `count` 8x8 matrices; lane 8 m + r has the address of row r of matrix m.
void load_matrices(unsigned* registers, unsigned address, int count, bool transposed) {
    struct Lane {
        unsigned* registers;
        unsigned address;
    } operand = {registers, address};
    together(&operand, [=](Lane** lanes) {
        for (int m = 0; m < count; ++m) {
            uint16_t x[8][8];
            for (int row = 0; row < 8; ++row) {
                std::memcpy(x[row], shared_at(lanes[m * 8 + row]->address, 16), 16);
            }
            for (int i = 0; i < 32; ++i) {
                const int row = i / 4, column = i % 4 * 2;
                lanes[i]->registers[m] = transposed ? x[column][row] | unsigned{x[column + 1][row]} << 16
                                                    : x[row][column] | unsigned{x[row][column + 1]} << 16;
            }
        }
    });
}

// mma.sync m16n8k16 or m16n8k8: d += a b.
void multiply(float* d, const unsigned* a, const unsigned* b, int depth) {
    struct Lane {
        float* d;
        const unsigned *a, *b;
    } operand = {d, a, b};
    together(&operand, [depth](Lane** lanes) {
        float left[16][16], right[16][8];
        for (int i = 0; i < 32; ++i) {
            const int group = i / 4, column = i % 4 * 2;
            for (int k = 0; k < depth; k += 8) {
                for (int half = 0; half < 2; ++half) {
                    const auto part = [half](unsigned x) { return widen(half ? x >> 16 : x & 0xffff); };
                    left[group][k + column + half] = part(lanes[i]->a[k / 4]);
                    left[group + 8][k + column + half] = part(lanes[i]->a[k / 4 + 1]);
                    right[k + column + half][group] = part(lanes[i]->b[k / 8]);
                }
            }
        }
        for (int i = 0; i < 32; ++i) {
            for (int e = 0; e < 4; ++e) {
                float sum = 0.0f;
                for (int k = 0; k < depth; ++k) {
                    sum += left[i / 4 + e / 2 * 8][k] * right[k][i % 4 * 2 + e % 2];
                }
                lanes[i]->d[e] += sum;
            }
        }
    });
}

// What is left of a sum of float32 products and `start` in tensor cores: every term is cut off 2 bits below the last one
// of a float as large as the largest, and so is the sum at its own last bit. (Measured on Hopper by others.)
float cut_sum(float start, const float* x, const float* y, int count) {
    int top = start == 0.0f ? -200 : std::ilogb(start);
    for (int k = 0; k < count; ++k) {
        if (x[k] * y[k] != 0.0f) {
            top = max(top, std::ilogb(x[k]) + std::ilogb(y[k]));
        }
    }
    const double unit = std::ldexp(1.0, top - 25);
    double sum = std::trunc(start / unit);
    for (int k = 0; k < count; ++k) {
        sum += std::trunc(double{x[k]} * y[k] / unit);
    }
    const double exact = sum * unit;
    const float rounded = static_cast<float>(exact);
    return std::fabs(rounded) > std::fabs(exact) ? std::nextafter(rounded, 0.0f) : rounded;
}

// mma.sync m16n8k8 of tf32: d += a b.
void multiply_tf32(float* d, const unsigned* a, const unsigned* b) {
    struct Lane {
        float* d;
        const unsigned *a, *b;
    } operand = {d, a, b};
    together(&operand, [](Lane** lanes) {
        float left[16][8], right[8][8];  // right: column, then k
        const auto tf32 = [](unsigned x) { return __uint_as_float(x & 0xffffe000u); };
        for (int i = 0; i < 32; ++i) {
            for (int e = 0; e < 4; ++e) {
                left[i / 4 + e % 2 * 8][i % 4 + e / 2 * 4] = tf32(lanes[i]->a[e]);
            }
            for (int e = 0; e < 2; ++e) {
                right[i / 4][i % 4 + e * 4] = tf32(lanes[i]->b[e]);
            }
        }
        for (int i = 0; i < 32; ++i) {
            for (int e = 0; e < 4; ++e) {
                float& sum = lanes[i]->d[e];
                sum = cut_sum(sum, left[i / 4 + e / 2 * 8], right[i % 4 * 2 + e % 2], 8);
            }
        }
    });
}
