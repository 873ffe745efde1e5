"""The parts of a mask's function: values of queries and of keys, pairs, and intervals of whole tiles."""

from __future__ import annotations

import ctypes
import random
import re
from itertools import product
from pathlib import Path

import gxx
import torch

from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.render import render_text
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime.score_trace import evaluate

TREE = MaskMod(
    "tree(t0: int32[1], t1: int32[1]): (t0[kv_idx] <= t0[q_idx]) & (t0[q_idx] < t1[kv_idx]) & (kv_idx <= q_idx)"
)


def test_what_queries_and_keys_have() -> None:
    sides = TREE.sides
    assert [side.values for side in (sides.query, sides.key)] == [
        (("idx", "int"), ("x0", "int")),
        (("idx", "int"), ("x0", "int"), ("x1", "int")),
    ]
    assert sides.pair.result == "((k.x0 <= q.x0) & (q.x0 < k.x1)) & (k.idx <= q.idx)"
    assert sides.tile == sides.pair
    assert "load_int32_1d(p.score3, static_cast<unsigned>(kv_idx))" in TREE.sides_from(2).key.texts


def test_what_no_index_of_a_pair_decides_belongs_to_the_query() -> None:
    mod = MaskMod("a(t0: int32[1]): (h < t0[b]) & (q_idx >= kv_idx)")
    assert [value[0] for value in mod.sides.query.values] == ["x0", "idx"]
    assert mod.sides.key.texts == ("kv_idx",)
    assert [mod.reads(leaf) for leaf in ("b", "h")] == [True, True]
    assert not TREE.reads("h")
    alone = MaskMod("a: kv_idx < 7").sides
    assert (alone.query.values, alone.key.values, alone.pair.result) == ((), (("x0", "bool"),), "k.x0")


def test_what_intervals_do_not_follow() -> None:
    """An element that a pair reads, floats, and bits of integers."""
    for formula, expected in (
        ("t0[q_idx - kv_idx] > 3", "any_int() > exactly(3)"),
        ("t1[q_idx] < t1[kv_idx]", "any_bool()"),
        ("float(q_idx - kv_idx) < 0.5", "any_bool()"),
        ("((q_idx ^ kv_idx) & 8) == 0", "any_int() == exactly(0)"),
        ("(q_idx - kv_idx) // kv_idx < 2", "any_int() < exactly(2)"),
        ("(q_idx - kv_idx) // 7 < 2", "floor_div(q.idx - k.idx, 7) < exactly(2)"),
    ):
        mod = MaskMod(f"a(t0: int32[1], t1: float32[1]): {formula}")
        assert mod.sides.tile.result == expected


# By a reciprocal, or with a product in a sum that is not rounded, some of these come out otherwise.
FLOATS = (
    "floor(q_idx / 41.0) == floor(kv_idx / 41.0)",
    "t2[q_idx] * t2[q_idx] - t2[kv_idx] * t2[kv_idx] == 0.0",
    "t2[q_idx] * 0.7 + t2[kv_idx] * 0.3 == t2[kv_idx]",
)
# So that one function means the same in all kernels it must not matter how a compiler uses undefined behaviour.
UNDEFINED = (
    "((kv_idx * 1013904223 + 12345) % 7 < 3) & (kv_idx <= q_idx)",
    "(kv_idx + 2147483600 < 0) | (q_idx == kv_idx)",
    "(-(t0[kv_idx] - 3 << 31) < 0) ^ (abs(t0[q_idx] << 31) < q_idx)",
    "(kv_idx // (100 - q_idx)) % 2 == 0",
    "(t0[q_idx] - 3 << 31) // (t0[kv_idx] - 3) < (-2147483648 % (t0[kv_idx] - 3)) + 9",
    "(1 << kv_idx % 40 > q_idx) & (q_idx - kv_idx >> 40 == -1)",
    "where(t0[q_idx] == 1, q_idx, -2147483648) < kv_idx",
)


def random_int(chance: random.Random, depth: int) -> str:
    if depth == 0 or chance.random() < 0.2:
        leaves = (
            "q_idx",
            "kv_idx",
            "t0[q_idx]",
            "t0[kv_idx]",
            "t1[b, kv_idx]",
            "t0[h]",
            "t0[q_idx - kv_idx]",
            "7",
            "-40",
        )
        return chance.choice(leaves)
    x, y = random_int(chance, depth - 1), random_int(chance, depth - 1)
    forms = ("x + y", "x - y", "x - y", "x * y", "-x", "abs(x)", "maximum(x, y)", "minimum(x, y)", "x // 24", "x % 24",
             "x >> 3", "x & y", "x ^ 9", "where(c, x, y)", "x * 1013904223 + 12345", "x << 3", "x << y", "x >> y",
             "x >> 40", "x >> -1", "x // y", "x % y", "where(c, x, -2147483648)")  # fmt: skip
    condition = random_bool(chance, depth - 1)
    return re.sub(r"\b[xyc]\b", lambda m: {"x": x, "y": y, "c": condition}[m[0]], f"({chance.choice(forms)})")


def random_bool(chance: random.Random, depth: int) -> str:
    """A formula of a mask of which intervals decide some tiles."""
    if depth > 0 and chance.random() < 0.6:
        x, y, c = (random_bool(chance, depth - 1) for _ in range(3))
        forms: tuple[str, ...] = (
            "x & y",
            "x & y",
            "x | y",
            "x | y",
            "x ^ y",
            "~x",
            "x == y",
            "x != y",
            "where(c, x, y)",
        )
    else:
        x, y = random_int(chance, depth), random_int(chance, depth)
        c = chance.choice(("t2[q_idx] < t2[kv_idx]", "t2[kv_idx] > 0.25", *FLOATS))
        forms = (*(f"x {op} y" for op in ("<", "<=", ">", ">=", "==", "!=")), "kv_idx <= q_idx", "c")
    return re.sub(r"\b[xyc]\b", lambda m: {"x": x, "y": y, "c": c}[m[0]], f"({chance.choice(forms)})")


HEAD = """
#include <cmath>
#include <cstdlib>

struct ScoreRef {
    const void* data;
    long long stride[4];
    int size[4];
};
struct Params {
    ScoreRef score0, score1, score2;
};
"""
# lo and hi of a tile's interval, and the pairs, from query and key number 0 on.
RUN = """
extern "C" void run_NUMBER(const Params* p, int q0, int q1, int k0, int k1, int* tile, bool* pairs) {
    using namespace f_NUMBER;
    MaskQueries queries;
    MaskKeys keys;
    for (int i = q0; i < q1; ++i) {
        include(queries, mask_query(*p, 1, 2, i));
    }
    for (int j = k0; j < k1; ++j) {
        include(keys, mask_key(*p, 1, 2, j));
    }
    const Interval seen = mask_tile(queries, keys);
    tile[0] = static_cast<int>(seen.lo), tile[1] = static_cast<int>(seen.hi);
    for (int i = q0; i < q1; ++i) {
        for (int j = k0; j < k1; ++j) {
            *pairs++ = mask_pair(*p, mask_query(*p, 1, 2, i), mask_key(*p, 1, 2, j));
        }
    }
}
"""


class ScoreRef(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_longlong * 4), ("size", ctypes.c_int * 4))


def test_pairs_and_tiles_are_those_of_the_formula(tmp_path: Path) -> None:
    """Random formulas: all pairs by torch's operations; what an interval says of a tile holds for its pairs."""
    chance = random.Random(5)
    header = "(t0: int32[1], t1: int32[2], t2: float32[1])"
    known = [
        f"tree{header}: (t0[kv_idx] <= t0[q_idx]) & (t0[q_idx] < t1[1, kv_idx]) & (kv_idx <= q_idx)",
        f"window{header}: (kv_idx <= q_idx) & (q_idx - kv_idx < 40)",
        f"documents{header}: t0[q_idx] == t0[kv_idx]",
    ]
    special = [f"special{header}: {formula}" for formula in (*FLOATS, *UNDEFINED)]
    texts = known + special + [f"r{header}: {random_bool(chance, 3)}" for _ in range(120)]
    source = [HEAD]
    for number, text in enumerate(texts):
        problem = Problem(Direction.FORWARD, Arch.CPU, DType.FLOAT32, 16, Mask.DENSE, mask_mod=MaskMod(text))
        spec = next(candidates(problem))
        parts = [render_text(f"common/{name}.h.jinja", spec=spec) for name in ("mask_mod", "mask_interval")]
        source += [
            f"namespace f_{number} {{\nusing ::abs;\n",
            *parts,
            "}\n",
            RUN.replace("NUMBER", str(number)),
        ]
    path = tmp_path / "functions.cpp"
    path.write_text("".join(source))
    library = gxx.library(
        path,
        "-std=c++17",
        "-O1",
        "-fexpensive-optimizations",
        "-march=native",
        "-fno-math-errno",
        "-Werror=narrowing",
        "-fPIC",
        "-shared",
    )
    length, size = 128, 32
    draw = torch.Generator().manual_seed(3)
    ordered = torch.randint(0, 6, (length,), generator=draw, dtype=torch.int32).sort().values
    tensors = (
        ordered,
        torch.stack((ordered, ordered + 2)),
        torch.rand(length, generator=draw).round(decimals=1),
    )
    refs = (ScoreRef * 3)()
    for ref, x in zip(refs, tensors, strict=True):
        ref.data, ref.stride[: x.dim()], ref.size[: x.dim()] = x.data_ptr(), x.stride(), x.shape
    one = {"b": torch.tensor(1, dtype=torch.int32), "h": torch.tensor(2, dtype=torch.int32)}
    index = torch.arange(length, dtype=torch.int32)
    decided, uniform = dict.fromkeys(texts, 0), dict.fromkeys(texts, 0)
    for number, text in enumerate(texts):
        exact = evaluate(MaskMod(text), one | {"q_idx": index[:, None], "kv_idx": index[None]}, tensors)
        exact = exact.expand(length, length)
        for q0, k0 in product(range(0, length, size), repeat=2):
            tile, pairs = (ctypes.c_int * 2)(), torch.empty(size, size, dtype=torch.bool)
            getattr(library, f"run_{number}")(
                ctypes.byref(refs), q0, q0 + size, k0, k0 + size, tile, ctypes.c_void_p(pairs.data_ptr())
            )
            assert torch.equal(pairs, exact[q0 : q0 + size, k0 : k0 + size]), text
            assert tile[0] <= int(pairs.all()), text
            assert tile[1] >= int(pairs.any()), text
            decided[text] += tile[0] == tile[1]
            uniform[text] += bool(pairs.all() or not pairs.any())
    assert [decided[text] for text in known] == [uniform[text] for text in known]
    assert sum(decided.values()) > 0.5 * sum(uniform.values())
