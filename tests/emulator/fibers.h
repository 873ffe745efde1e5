// Stacks of their own, between which a thread switches. On x86-64 without ucontext, whose swapcontext makes two system
// calls for the signal mask: nine tenths of the time of an emulated kernel.
#pragma once

#include <cstddef>
#include <memory>

// Its bytes are not set, so that pages that no call reaches take no memory.
struct Stack {
    static constexpr std::size_t kBytes = 1 << 17;
    std::unique_ptr<char[]> bytes{new char[kBytes]};
};

#ifdef __x86_64__

struct Context {
    void* stack = nullptr;
};

// Saves the registers that a callee has to keep and the stack in *from, and goes on where `to` was saved.
extern "C" __attribute__((visibility("hidden"))) void switch_stacks(void** from, void* to);
asm(R"(
    .text
    .p2align 4
    .hidden switch_stacks
    .globl switch_stacks
    .type switch_stacks, @function
switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size switch_stacks, .-switch_stacks
)");

static inline void switch_to(Context& from, Context& to) { switch_stacks(&from.stack, to.stack); }

// A context that begins with `run`, which must not return.
static inline void make_context(Context& context, const Stack& stack, void (*run)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<std::size_t>(stack.bytes.get() + Stack::kBytes) / 16 * 16);
    for (int i = 1; i <= 8; ++i) {
        top[-i] = nullptr;
    }
    top[-2] = reinterpret_cast<void*>(run);  // what `ret` takes; above it, the return address of `run`
    context.stack = top - 8;
}

#else

#include <ucontext.h>

struct Context {
    ucontext_t registers;
};

static inline void switch_to(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }

static inline void make_context(Context& context, const Stack& stack, void (*run)()) {
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = stack.bytes.get();
    context.registers.uc_stack.ss_size = Stack::kBytes;
    makecontext(&context.registers, run, 0);
}

#endif

void give_way();  // to other threads; each emulation has its own

// Lanes of a warp that have arrived at the instruction of this generation, and what they bring.
struct Warp {
    int arrived = 0;
    long generation = 0;
    void* operands[32];

    // The operands of all lanes for the last one that arrives, which then calls `release`; the others get null, then.
    void** arrive(unsigned lane, void* operand) {
        const long now = generation;
        operands[lane] = operand;
        if (++arrived == 32) {
            return operands;
        }
        while (generation == now) {
            give_way();
        }
        return nullptr;
    }
    void release() {
        arrived = 0;
        ++generation;
    }
};
