"""Breaks of the protocol of the Hopper backward kernel, which tests/kernels/test_backward_pipeline.py has to find."""

from __future__ import annotations

HAND_BACK = "arrive(now.empty_q);"
HAND_OVER_DS = "\n        hand_over_ds(now);"
WAIT = "griddepcontrol_wait();"
OF_THE_NEXT = "start_row_stats(s, ones, base + kOffsetRowStats + q_ring.stage * kRowStatsBytes"
FIRST_VISIT = "accumulator_fence(s);\n        softmax();"
# Breaks of the protocol: what the text becomes if `broken` is n, and what is then found (among other things).
Break = tuple[dict[str, str], str]
BREAKS: dict[str, Break] = {
    "Q is handed back too early": (
        {
            HAND_BACK: "if (broken != n) " + HAND_BACK,
            HAND_OVER_DS: f"\n        if (broken == n) {HAND_BACK}{HAND_OVER_DS}",
        },
        "dK or dV with a wrong tile",
    ),
    "nobody waits for EmptyDq": (
        {"barrier_wait(base + kEmptyDq": "if (broken != n) barrier_wait(base + kEmptyDq"},
        "something overwrites what a bulk copy reads",
    ),
    "a visit is read after its buffer was handed back": (
        {
            HAND_BACK: "if (broken != n || step > 0) " + HAND_BACK,
            FIRST_VISIT: f"if (broken == n) arrive(base + kEmptyQ);\n{FIRST_VISIT}",
        },
        "the mask of another tile",
    ),
    "lanes do not wait for each other": (
        {"__syncwarp();": "if (broken != n) __syncwarp();"},
        "what is added is not dQ of this tile",
    ),
    "writes are not fenced": (
        {"proxy_fence();": "if (broken != n) proxy_fence();"},
        "an asynchronous read of what has not been fenced",
    ),
    "S has the delta of its rows": (
        {
            OF_THE_NEXT: f"{OF_THE_NEXT} + (broken == n ? kRowStatsBytes / 2 : 0)",
        },
        "P with wrong row_stats",
    ),
    "row_stats are loaded before they are there": (
        {f"{WAIT}  // for row_stats": f"if (broken != n) {WAIT}  // for row_stats"},
        "the kernel before has not ended",
    ),
    "blocks without work do not wait": (
        {f"(work.visits == 0) {{\n        {WAIT}": f"(work.visits == 0) {{\n        if (broken != n) {WAIT}"},
        "the kernel before",
    ),
}
# Of lists that are cut: blocks that store dK and dV, and those that add parts of them.
SUMS = "sums_dkv(p, work.tile)) {"
CUT: dict[str, Break] = {
    "parts are stored": ({SUMS: f"broken != n && {SUMS}"}, "a part of dK or dV is stored"),
    "a block with all visits adds": (
        {SUMS: f"(broken == n || {SUMS.removesuffix(' {')}) {{"},
        "dK or dV is added to sums that nobody reads",
    ),
    "K is overwritten while it is read": (
        {"named_sync(kConsumersDone": "if (broken != n) named_sync(kConsumersDone"},
        "dQ with a wrong tile",
    ),
}
# Of the bits of partial visits.
BITS: dict[str, Break] = {
    "the slot of another visit": (
        {"slot_of(p, work, i)": "slot_of(p, work, broken == n ? 0 : i)"},
        "bits of another visit",
    ),
    "the slot of another step": (
        {"q_ring.stage * 16 + 8)": "(broken == n ? 0 : q_ring.stage) * 16 + 8)"},
        "bits of another visit",
    ),
    "the bits of other keys": (
        {"load_seen(p, slot, group, seen)": "load_seen(p, slot, broken == n ? 0 : group, seen)"},
        "bits of another visit",
    ),
    "no bits without a slot": (
        {"if (slot < 0) {": "if (broken != n && slot < 0) {"},
        "bits of another visit",
    ),
}
PAIR_BEFORE = "barrier_wait(base + kFullDs, step >> 1 & 1 ^ 1);"
LAGGING: dict[str, Break] = {
    "two buffers of dS": (
        {"base + kOffsetDs + (step & 3)": "base + kOffsetDs + (step & (broken == n ? 1 : 3))"},
        "something overwrites what a product reads",
    ),
    "dS of the pair before is fenced before it is waited for": (
        {
            PAIR_BEFORE: f"if (broken == n) proxy_fence(); {PAIR_BEFORE}",
            "proxy_fence();  // for dQ of that pair": "if (broken != n) proxy_fence();  // for dQ of that pair",
        },
        "an asynchronous read of what has not been fenced",
    ),
    "dS is handed over before the other consumer has done so in the pair before": (
        {
            PAIR_BEFORE: f"if (broken != n) {PAIR_BEFORE}",
            "// In the first pair": f"if (broken == n) {PAIR_BEFORE}  // In the first pair",
        },
        "what is added is not dQ of this tile",
    ),
    "what is no dQ is added": (
        {"unsigned phase = 1;": "unsigned phase = broken == n ? 0 : 1;"},
        "what is added is not dQ of this tile",
    ),
}
ORDERED: dict[str, Break] = {
    "turns are not waited for": (
        {"while (found < value);": "while (found < value && broken != n);"},
        "parts of dQ are added out of turn",
    ),
    "a turn ends early": (
        {"bulk_reduce_wait();": "if (broken != n) bulk_reduce_wait();"},
        "a turn ends before its sums are there",
    ),
}
# With launch_order.
TURNED: dict[str, Break] = {
    "the last section adds in the order of the others": (
        {"work.tile < work.descending ?": "broken == n || work.tile < work.descending ?"},
        "parts of dQ are added out of turn",
    ),
}
APART: dict[str, Break] = {
    "a head starts before those whose parts it waits for": (
        {"first + at.y;": "first + (broken == n ? width - 1 - at.y : at.y);"},
        "dK or dV is added to out of turn",
    ),
}
A_VISIT = "a visit is read after its buffer was handed back"
BY_TURNS: dict[str, Break] = {
    A_VISIT: (BREAKS[A_VISIT][0], "with wrong row_stats"),
    "nobody waits for EmptyDq": (
        BREAKS["nobody waits for EmptyDq"][0],
        "what is added is not dQ of this tile",
    ),
    # With lag they come after a consumer's first dQ, and so after row_stats.
    "turns are looked at before they are counted from 0": (
        {f"{WAIT}  // for semaphores": f"if (broken != n) {WAIT}  // for semaphores"},
        "the kernel before has not ended",
    ),
}
WAIT_FOR_DS = "barrier_wait(base + kFullDs, step & 1);"
TOO_EARLY = ("Q is handed back too early", A_VISIT)
PLAIN: dict[str, Break] = {
    **{name: (BREAKS[name][0], "something overwrites what a product reads") for name in TOO_EARLY},
    "one buffer of dS": ({"(step & 1) * kDsBytes": "(broken == n ? 0 : step & 1) * kDsBytes"}, "overwrites"),
    "dS is fenced before it is waited for": (
        {
            WAIT_FOR_DS: f"if (broken != n) {WAIT_FOR_DS}",
            "wgmma_wait<0>();  // dK is complete": f"if (broken == n) {WAIT_FOR_DS} wgmma_wait<0>();",
        },
        "an asynchronous read of what has not been fenced",
    ),
    "dK goes where K is still read": (
        {"named_sync(kConsumersDone": "if (broken != n) named_sync(kConsumersDone"},
        "something overwrites what a product reads",
    ),
}

# Of scores whose derivative is kept.
SLOPES: dict[str, Break] = {
    "lse of another step": (
        {
            "q_ring.stage * kRowStatsBytes, seen": "(q_ring.stage ^ (broken == n ? 1 : 0)) * kRowStatsBytes, seen"
        },
        "P with another lse",
    ),
    "S is read before it is complete": (
        {"wgmma_wait<1>();  // dV and S": "broken == n ? wgmma_wait<2>() : wgmma_wait<1>();  // dV and S"},
        "registers are read while a product writes them",
    ),
}

# Of persistent blocks.
EMPTY_KV = "barrier_wait(base + kEmptyKv"
EMPTY_INDEX = "barrier_wait(base + kEmptyIndex"
AT_THE_LAST = "kConsumers + group) * 8, tiles / 2 & 1);"
WALKING: dict[str, Break] = {
    "K and V are loaded where dK and dV have not been stored": (
        {EMPTY_KV: f"if (broken != n) {EMPTY_KV}"},
        "something overwrites what a",
    ),
    "dK and dV are stored before they are there": (
        {AT_THE_LAST: "kConsumers + group) * 8, tiles / 2 & 1 ^ (broken == n ? 1 : 0));"},
        "what is stored is not dK or dV of these keys",
    ),
    "dK goes where K is still read": (PLAIN["dK goes where K is still read"][0], "overwrites"),
    "an index is overwritten before it is read": (
        {EMPTY_INDEX: f"if (broken != n) {EMPTY_INDEX}"},
        "it hangs",
    ),
    "the next work tile has the K and V of this one": (
        {"kv_ring.advance(2);": "if (broken != n) kv_ring.advance(2);"},
        "keys of another work tile",
    ),
    "the mask of the work tile before": (
        {"wait_v();\n            begin_tile();": "wait_v();\n            if (broken != n) begin_tile();"},
        "keys of another work tile",
    ),
    "dS of all work tiles begins in the first buffer": (
        {"begin += step": "begin += broken == n ? 0 : step"},
        "it hangs",
    ),
    "work tiles are counted before the counter is cleared": (
        {f"{WAIT}  // for row_stats": f"if (broken != n) {WAIT}  // for row_stats"},
        "the kernel before has not ended",
    ),
    "dK and dV are not fenced": (
        {"proxy_fence();  // TMA reads": "if (broken != n) proxy_fence();  // TMA reads"},
        "an asynchronous read of what has not been fenced",
    ),
}
WALKING_LAGGING: dict[str, Break] = {
    "what is no dQ stays after an odd number of steps": (
        {"% 2 == 1) {  // in": "% 2 == 1 && broken != n) {  // in"},
        "what is added is not dQ of this tile",
    ),
    "the second step of a pair is taken to have come": (
        {"if (steps % 2 == 1) {": "if (steps % 2 == 1 && broken != n) {"},
        "it hangs",
    ),
}
DKV_OF_TILE = "barrier_wait(base + kFullDkv + (tiles % 2 * kConsumers + group) * 8, tiles / 2 & 1);"
# A warp that adds no dQ of a short work tile may be two of them behind the consumers.
WALKING_ORDERED: dict[str, Break] = {
    "dK and dV of both buffers share a barrier": (
        {
            "kv / kTileBytesN * kConsumers": "(broken == n ? 0 : kv / kTileBytesN) * kConsumers",
            DKV_OF_TILE: f"if (broken == n) barrier_wait(base + kFullDkv + group * 8, tiles & 1); else {DKV_OF_TILE}",
        },
        "it hangs",
    ),
}
WAIT_FOR_DS_OF_TILE = "barrier_wait(base + kFullDs, begin + step & 1);"
WALKING_PLAIN: dict[str, Break] = {
    "dV goes where V is still read": (
        {WAIT_FOR_DS_OF_TILE: f"if (broken == n && next != kStep) stage_dv(); {WAIT_FOR_DS_OF_TILE}"},
        "something overwrites what a product reads",
    ),
}
