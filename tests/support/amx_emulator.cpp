// Executes the instructions of Intel AMX that a CPU without them refuses: a handler of SIGILL decodes and emulates one,
// and steps over it. Instructions, configuration and arithmetic as in the Intel SDM, volume 2. What the CPU would refuse,
// too (no configuration, another palette, shapes that do not fit), ends the process with a message.
#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kRegisters = 8, kMaxRows = 16, kMaxBytes = 64;

struct Tile {
    int rows;
    int row_bytes;
    unsigned char data[kMaxRows][kMaxBytes];
};

struct TileState {
    bool configured;
    Tile tiles[kRegisters];
};

thread_local TileState state;
struct sigaction before;
long long emulated;

[[noreturn]] void refuse(const char* reason) {
    std::fprintf(stderr, "amx_emulator: %s\n", reason);
    std::abort();
}

// One instruction with a VEX prefix of three bytes in the opcode map 0F38.
struct Instruction {
    int opcode;
    int prefix;  // 0: none, 1: 66, 2: F3, 3: F2
    int reg;     // ModRM.reg
    int rm;      // ModRM.rm of a register operand
    int vvvv;
    bool memory;
    unsigned char* base;  // of the memory operand, displacement included
    long stride;          // the index, scaled
    int bytes;            // length of the instruction
};

// The general register `number` in the order of the encoding.
long general(const ucontext_t& context, int number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context.uc_mcontext.gregs[order[number]];
}

// Fills the memory operand; returns its bytes behind ModRM.
int decode_memory(const ucontext_t& context, const unsigned char* modrm, bool x, bool b, Instruction& out) {
    const int mod = modrm[0] >> 6, rm = modrm[0] & 7;
    int length = 0, base = rm | b << 3;
    long address = 0;
    out.stride = 0;
    if (rm == 4) {
        const int sib = modrm[1], index = (sib >> 3 & 7) | x << 3;
        length = 1;
        base = (sib & 7) | b << 3;
        out.stride = index == 4 ? 0 : general(context, index) << (sib >> 6);
    }
    const bool no_base = mod == 0 && (base & 7) == 5;
    const int wide = mod == 1 ? 1 : mod == 2 || no_base ? 4 : 0;
    if (no_base && rm != 4) {
        address = context.uc_mcontext.gregs[REG_RIP];  // the caller adds the instruction's length
    } else if (!no_base) {
        address = general(context, base);
    }
    std::int32_t displacement = 0;
    if (wide == 1) {
        displacement = static_cast<signed char>(modrm[1 + length]);
    } else if (wide == 4) {
        std::memcpy(&displacement, modrm + 1 + length, 4);
    }
    out.base = reinterpret_cast<unsigned char*>(address + displacement);
    length += wide;
    if (no_base && rm != 4) {
        out.base += 5 + length;
    }
    return length;
}

bool decode(const ucontext_t& context, Instruction& out) {
    const auto* at = reinterpret_cast<const unsigned char*>(context.uc_mcontext.gregs[REG_RIP]);
    if (at[0] != 0xc4 || (at[1] & 31) != 2 || (at[2] & 4) != 0 || (at[2] & 0x80) != 0) {
        return false;
    }
    const bool r = !(at[1] & 0x80), x = !(at[1] & 0x40), b = !(at[1] & 0x20);
    out.vvvv = ~at[2] >> 3 & 15;
    out.prefix = at[2] & 3;
    out.opcode = at[3];
    out.reg = (at[4] >> 3 & 7) | r << 3;
    out.rm = (at[4] & 7) | b << 3;
    out.memory = at[4] >> 6 != 3;
    out.bytes = 5 + (out.memory ? decode_memory(context, at + 4, x, b, out) : 0);
    return out.opcode == 0x49 || out.opcode == 0x4b || out.opcode == 0x5c;
}

Tile& tile(int number) {
    if (!state.configured) {
        refuse("a tile register is used before ldtilecfg");
    }
    if (number >= kRegisters || state.tiles[number].rows == 0) {
        refuse("a tile register is used that the configuration does not name");
    }
    return state.tiles[number];
}

void load_config(const unsigned char* from) {
    if (from[0] != 1 || from[1] != 0) {
        refuse("ldtilecfg: the palette is not 1, or start_row not 0");
    }
    for (int i = 2; i < 16; ++i) {
        if (from[i] != 0) {
            refuse("ldtilecfg: a reserved byte is not 0");
        }
    }
    std::memset(&state, 0, sizeof(state));
    for (int i = 0; i < 16; ++i) {
        std::uint16_t row_bytes;
        std::memcpy(&row_bytes, from + 16 + 2 * i, 2);
        const int rows = from[48 + i];
        if (rows > kMaxRows || row_bytes > kMaxBytes || (rows == 0) != (row_bytes == 0) || (i >= kRegisters && rows)) {
            refuse("ldtilecfg: a register larger than 16 rows of 64 bytes, or a ninth one");
        }
        if (i < kRegisters) {
            state.tiles[i].rows = rows;
            state.tiles[i].row_bytes = row_bytes;
        }
    }
    state.configured = true;
}

// The bf16 in the low or high half of a word, 0 for a denormal number.
float widen(std::uint32_t word, int half) {
    const std::uint32_t bits = half ? word & 0xffff0000u : word << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return (bits & 0x7f800000u) == 0 ? 0.0f : x;
}

// sum += x * y as tdpbf16ps: the even and the odd products of a row are summed apart, then added to the sum.
void multiply_add(Tile& sum, const Tile& x, const Tile& y) {
    if (x.rows != sum.rows || y.row_bytes != sum.row_bytes || x.row_bytes != 4 * y.rows) {
        refuse("tdpbf16ps: the shapes do not fit");
    }
    const int lanes = sum.row_bytes / 4, depth = x.row_bytes / 4;
    for (int m = 0; m < sum.rows; ++m) {
        float even[16] = {}, odd[16] = {}, result[16];
        for (int k = 0; k < depth; ++k) {
            std::uint32_t a, b[16];
            std::memcpy(&a, x.data[m] + 4 * k, 4);
            std::memcpy(b, y.data[k], sizeof(b));
            for (int n = 0; n < lanes; ++n) {
                even[n] = __builtin_fmaf(widen(a, 0), widen(b[n], 0), even[n]);
                odd[n] = __builtin_fmaf(widen(a, 1), widen(b[n], 1), odd[n]);
            }
        }
        std::memcpy(result, sum.data[m], sizeof(result));
        for (int n = 0; n < lanes; ++n) {
            result[n] += even[n] + odd[n];
        }
        std::memcpy(sum.data[m], result, sizeof(result));
    }
}

void move(const Instruction& x, bool store) {
    Tile& here = tile(x.reg);
    for (int row = 0; row < here.rows; ++row) {
        unsigned char* there = x.base + row * x.stride;
        std::memcpy(store ? there : here.data[row], store ? here.data[row] : there, here.row_bytes);
    }
}

bool execute(const Instruction& x) {
    if (x.opcode == 0x49 && x.memory && x.prefix == 0 && x.reg == 0) {
        load_config(x.base);
    } else if (x.opcode == 0x49 && !x.memory && x.prefix == 0 && x.reg == 0 && x.rm == 0) {
        std::memset(&state, 0, sizeof(state));  // tilerelease
    } else if (x.opcode == 0x49 && !x.memory && x.prefix == 3) {
        std::memset(tile(x.reg).data, 0, sizeof(Tile::data));  // tilezero
    } else if (x.opcode == 0x4b && x.memory && (x.prefix == 3 || x.prefix == 2)) {
        move(x, x.prefix == 2);  // tileloadd, tilestored
    } else if (x.opcode == 0x5c && !x.memory && x.prefix == 2) {
        if (x.reg == x.rm || x.reg == x.vvvv || x.rm == x.vvvv) {
            refuse("tdpbf16ps: two operands are the same register");
        }
        multiply_add(tile(x.reg), tile(x.rm), tile(x.vvvv));
    } else {
        return false;
    }
    return true;
}

void on_sigill(int, siginfo_t*, void* raw) {
    auto& context = *static_cast<ucontext_t*>(raw);
    Instruction x = {};
    if (!decode(context, x) || !execute(x)) {
        sigaction(SIGILL, &before, nullptr);  // the instruction runs again, and meets the handler of before
        return;
    }
    __atomic_fetch_add(&emulated, 1, __ATOMIC_RELAXED);
    context.uc_mcontext.gregs[REG_RIP] += x.bytes;
}

}  // namespace

// Emulate from now on.
extern "C" void start_amx_emulation() {
    struct sigaction action = {};
    action.sa_sigaction = on_sigill;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, &before);
}

// The handler of before; returns how many instructions were emulated since the last call.
extern "C" long long stop_amx_emulation() {
    sigaction(SIGILL, &before, nullptr);
    return __atomic_exchange_n(&emulated, 0, __ATOMIC_RELAXED);
}

// Is the calling thread's tile state the one before ldtilecfg?
extern "C" int amx_is_released() { return !state.configured; }
