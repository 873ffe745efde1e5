// Barriers in shared memory, named barriers, bulk copies and wgmma; see emulator.h. A copy makes its target NaN at once and
// fills it when somebody waits for it; products are done at once.
#include "emulator.h"

#include <map>

struct SharedBarrier {
    int count, pending;
    long long bytes;  // announced and not there yet
    int phase;
};
static std::map<unsigned, SharedBarrier> shared_barriers;

void make_barrier(unsigned address, int count) { shared_barriers[address] = {count, count, 0, 0}; }

static SharedBarrier& barrier_at(unsigned address) {
    const auto found = shared_barriers.find(address);
    if (found == shared_barriers.end()) {
        stop("no barrier at", address);
    }
    return found->second;
}
static void end_phase(SharedBarrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.pending = barrier.count;
        ++barrier.phase;
    }
}
void arrive(unsigned address, int bytes) {
    SharedBarrier& barrier = barrier_at(address);
    if (--barrier.pending < 0) {
        stop("more arrivals than a barrier takes at", address);
    }
    barrier.bytes += bytes;
    end_phase(barrier);
}
struct BulkCopy {
    unsigned char* to;
    const void* from;
    int bytes;
};
static std::multimap<unsigned, BulkCopy> bulk_copies;  // in flight, by barrier

void copy_bulk(unsigned to, const void* from, int bytes, unsigned address) {
    if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
        stop("bad bulk copy of bytes", bytes);
    }
    shared_at(to + bytes - 16, 16);
    std::memset(shared_at(to, 16), 0xff, bytes);
    bulk_copies.insert({address, {shared_at(to, 16), from, bytes}});
}
void wait_phase(unsigned address, unsigned parity) {
    SharedBarrier& barrier = barrier_at(address);
    for (auto copy = bulk_copies.find(address); copy != bulk_copies.end(); copy = bulk_copies.find(address)) {
        std::memcpy(copy->second.to, copy->second.from, copy->second.bytes);
        barrier.bytes -= copy->second.bytes;
        bulk_copies.erase(copy);
        end_phase(barrier);
    }
    while (barrier.phase % 2 == static_cast<int>(parity)) {
        give_way();
    }
}

// Starts and ends of two keys.
void load_bounds(unsigned address, int* start, int* end) {
    int words[4];
    std::memcpy(words, shared_at(address, 16), 16);
    for (int i = 0; i < 2; ++i) {
        start[i] = words[i * 2];
        end[i] = words[i * 2 + 1];
    }
}

struct Meeting {
    int arrived;
    long over;
};
static Meeting meetings[16];

// A named barrier: wait for all threads, or only report.
void meet(int id, int threads, bool stays) {
    Meeting& meeting = meetings[id];
    const long over = meeting.over;
    if (++meeting.arrived == threads) {
        meeting.arrived = 0;
        ++meeting.over;
    }
    while (stays && meeting.over == over) {
        give_way();
    }
}

// A bf16 of a wgmma operand: `line` is its row of 8-row groups, `byte` where it is in the row; panels are `leading` apart.
static float operand_at(unsigned long long descriptor, int line, int byte) {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3fff) << 4, code = descriptor >> 62;
    const unsigned span = code == 1 ? 128 : code == 2 ? 64 : 32;
    unsigned address = start + line / 8 * stride + line % 8 * span + byte / span * leading + byte % span;
    address ^= (address >> 7 & (span / 16 - 1)) << 4;
    uint16_t x;
    std::memcpy(&x, shared_at(address, 2), 2);
    return widen(x);
}

// A of wgmma m64nNk16 for row `row` of a warp's 16: the fragments of its lanes, or shared memory.
static void left_row(float (&x)[16], const unsigned* const* fragments, int row) {
    for (int k = 0; k < 16; ++k) {
        const unsigned pair = fragments[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        x[k] = widen(k % 2 ? pair >> 16 : pair & 0xffff);
    }
}
static void left_row(float (&x)[16], unsigned long long descriptor, int row) {
    for (int k = 0; k < 16; ++k) {
        x[k] = operand_at(descriptor, threadIdx.x / 32 % 4 * 16 + row, k * 2);
    }
}

template <typename Left>
static void multiply_any(float* d, int n, const Left& left, unsigned long long b, int add, bool by_rows) {
    const int lane = threadIdx.x % 32;
    float x[2][16];
    left_row(x[0], left, lane / 4);
    left_row(x[1], left, lane / 4 + 8);
    for (int i = 0; i < n; ++i) {
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float y[16];
        for (int k = 0; k < 16; ++k) {
            y[k] = by_rows ? operand_at(b, k, column * 2) : operand_at(b, column, k * 2);
        }
        d[i] = cut_sum(add ? d[i] : 0.0f, x[i / 2 % 2], y, 16);
    }
}
void multiply_rows(float* d, int n, const unsigned* const* fragments, unsigned long long b, int add, bool by_rows) {
    multiply_any(d, n, fragments, b, add, by_rows);
}
void multiply_rows(float* d, int n, unsigned long long a, unsigned long long b, int add, bool by_rows) {
    multiply_any(d, n, a, b, add, by_rows);
}

void forget_barriers() {
    shared_barriers.clear();
    bulk_copies.clear();
    std::fill(std::begin(meetings), std::end(meetings), Meeting{});
}
