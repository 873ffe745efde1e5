"""qk_norm_rope against float64: layouts, experts, dtypes, gradients, errors, tracing and checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import prologue_oracle as oracle
import pytest
import torch
from prologue_oracle import Pack, check, draw
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.codegen.prologue import MOST_TOKENS
from attnforge.runtime import prologue_kernels

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def call(pack: Pack, **rest: Any) -> tuple[Tensor, ...]:
    """Of two fused projections."""
    q_weight, k_weight = pack.pairs()
    return attnforge.qk_norm_rope(
        (pack.fused[0], pack.fused[1]),
        heads=pack.heads,
        cos=pack.cos,
        sin=pack.sin,
        q_weight=q_weight,
        k_weight=k_weight,
        **({"experts": pack.experts()} | rest),
    )


def compare(pack: Pack, outputs: tuple[Tensor, ...]) -> None:
    """Results and gradients of `fused` and `weights` against float64."""
    exact, exact_gradients = pack.exact()
    dtype = pack.fused[0].dtype
    for name, got, wanted in zip("qkv", outputs, exact, strict=False):
        check(name, got, wanted, dtype)
        assert got.is_contiguous()
    leaves = [*pack.fused, *pack.weights]
    gradients = torch.autograd.grad(outputs, leaves, pack.dout[: len(outputs)])
    for i, (got, wanted, leaf) in enumerate(zip(gradients, exact_gradients, leaves, strict=True)):
        check(f"gradient {i}", got, wanted, leaf.dtype)


@devices
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, FP32), (64, BF16), (72, BF16), (82, FP32), (96, FP32), (128, BF16), (256, BF16)],
)
def test_two_experts(head_dim: int, dtype: torch.dtype, device: str) -> None:
    pack = draw(head_dim=head_dim, dtype=dtype, device=device)
    compare(pack, call(pack))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 82, 256])
def test_half_precision(head_dim: int) -> None:
    pack = draw(head_dim=head_dim, dtype=FP16, device="cuda")
    compare(pack, call(pack))


@devices
@pytest.mark.parametrize(
    ("weight", "table", "norm"),
    [(FP32, FP32, True), (BF16, BF16, True), (FP32, BF16, True), (None, FP32, False), (None, BF16, False)],
)
def test_other_dtypes_of_weights_and_tables(
    weight: torch.dtype | None, table: torch.dtype, norm: bool, device: str
) -> None:
    pack = draw(dtype=BF16, weight=weight, table=table, norm=norm, device=device)
    compare(pack, call(pack))


@devices
@pytest.mark.parametrize(
    ("lengths", "nobody"), [((0, 9), 0), ((9, 0), 0), ((7, 4), 6), ((1, 0), 0), ((0, 0), 3)]
)
def test_empty_experts_and_tokens_of_neither(lengths: tuple[int, int], nobody: int, device: str) -> None:
    pack = draw(lengths, nobody, device=device)
    outputs = call(pack)
    compare(pack, outputs)
    theirs = torch.ones(pack.tokens, dtype=torch.bool, device=device)
    theirs[torch.cat(pack.rows)] = False
    assert theirs.sum() == nobody
    assert not any(x[theirs].any() for x in outputs)


@devices
def test_no_tokens(device: str) -> None:
    pack = draw((0, 0), device=device)
    outputs = call(pack)
    assert [tuple(x.shape) for x in outputs] == [(0, 5, 64), (0, 2, 64), (0, 2, 64)]
    gradients = torch.autograd.grad(outputs, pack.weights, pack.dout)
    assert not any(x.any() for x in gradients)


@devices
def test_long_packs_fill_every_block(device: str) -> None:
    """More tokens than the backward has warps: each takes several, and changes experts between them."""
    pack = draw((5000, 3000) if device == "cuda" else (400, 300), head_dim=64, dtype=BF16, device=device)
    compare(pack, call(pack))


@devices
@pytest.mark.parametrize("with_v", [False, True])
def test_one_expert_of_separate_strided_projections(with_v: bool, device: str) -> None:
    """Columns of one wider tensor, rows far apart."""
    pack = draw((30, 0), heads=(4, 2), head_dim=64, dtype=BF16, device=device)
    order = pack.rows[0]
    wide = torch.zeros(60, 9, 64, dtype=BF16, device=device)
    wide[order * 2, :8] = pack.fused[0].detach()
    leaf = wide.requires_grad_()
    q, k, v = leaf[::2, :8].split((4, 2, 2), 1)
    assert not q.is_contiguous()
    outputs = attnforge.qk_norm_rope(
        q,
        k,
        *([v] if with_v else []),
        cos=pack.cos,
        sin=pack.sin,
        q_weight=pack.weights[0],
        k_weight=pack.weights[1],
    )
    exact, (exact_leaf, _, *exact_weights) = pack.exact()
    assert len(outputs) == 2 + with_v
    for name, got, wanted in zip("qkv", outputs, exact, strict=False):
        check(name, got, wanted, BF16)
    gradients = torch.autograd.grad(outputs, (leaf, *pack.weights[:2]), pack.dout[: len(outputs)])
    found = gradients[0][order * 2, :8]
    check("source", found[:, : None if with_v else 6], exact_leaf[:, : None if with_v else 6], BF16)
    for got, wanted in zip(gradients[1:], exact_weights, strict=False):
        check("weight", got, wanted, BF16)


@devices
def test_pairs_of_separate_projections(device: str) -> None:
    pack = draw(device=device)
    heads = (*pack.heads, pack.heads[1])
    q, k, v = zip(*(x.split(heads, 1) for x in pack.fused), strict=True)
    q_weight, k_weight = pack.pairs()
    outputs = attnforge.qk_norm_rope(
        q, k, v, cos=pack.cos, sin=pack.sin, q_weight=q_weight, k_weight=k_weight, experts=pack.experts()
    )
    compare(pack, outputs)


@devices
def test_projections_in_the_order_of_tokens(device: str) -> None:
    """Both experts' rows in one tensor: only weights differ."""
    pack = draw(device=device)
    whole = pack.fused[0].new_zeros(pack.tokens, *pack.fused[0].shape[1:])
    for rows, x in zip(pack.rows, pack.fused, strict=True):
        whole = whole.index_copy(0, rows, x)
    q_weight, k_weight = pack.pairs()
    outputs = attnforge.qk_norm_rope(
        whole.flatten(1),
        heads=pack.heads,
        cos=pack.cos,
        sin=pack.sin,
        q_weight=q_weight,
        k_weight=k_weight,
        experts=pack.experts(),
    )
    compare(pack, outputs)


@devices
def test_rows_and_weights_off_any_alignment(device: str) -> None:
    """As FSDP's flat parameters and odd strides have them."""
    pack = draw(heads=(3, 1), head_dim=64, dtype=BF16, device=device)
    pack.weights = [_shifted(x, 1).detach().requires_grad_() for x in pack.weights]
    pack.fused = [_shifted(x, 1).detach().requires_grad_() for x in pack.fused]
    pack.cos, pack.sin = _shifted(pack.cos, 1), _shifted(pack.sin, 3)
    assert pack.fused[0].data_ptr() % 4 == 2
    compare(pack, call(pack))


def _shifted(x: Tensor, elements: int) -> Tensor:
    flat = x.new_empty(x.numel() + elements)
    flat[elements:] = x.detach().flatten()
    return flat[elements:].view(x.shape)


@devices
def test_full_tables_as_transformers_has_them(device: str) -> None:
    pack = draw(device=device)
    full = {name: torch.cat((x, x), 1) for name, x in (("cos", pack.cos), ("sin", pack.sin))}
    outputs = call(pack)
    pack.cos, pack.sin = full["cos"], full["sin"]
    assert all(map(torch.equal, call(pack), outputs))


@devices
def test_rows_of_sin_may_be_farther_apart_than_those_of_cos(device: str) -> None:
    """As those of one table that has other columns, too."""
    pack = draw(device=device)
    outputs = call(pack)
    pack.sin = torch.cat((pack.sin, pack.sin), 1)[:, : pack.sin.shape[1]]
    assert pack.sin.stride(0) == 2 * pack.cos.stride(0)
    assert all(map(torch.equal, call(pack), outputs))


@devices
def test_results_do_not_depend_on_the_run(device: str) -> None:
    pack = draw((3000, 1000) if device == "cuda" else (200, 100), dtype=BF16, device=device)
    runs = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        outputs = call(pack)
        runs.append([*outputs, *torch.autograd.grad(outputs, [*pack.fused, *pack.weights], pack.dout)])
        torch.set_num_threads(before)
    assert all(map(torch.equal, *runs))


def test_gradients_by_finite_differences() -> None:
    """Not against our own oracle: the directional derivative of the float32 kernel."""
    pack = draw((4, 3), head_dim=16, heads=(2, 1))
    leaves = [*pack.fused, *pack.weights]
    gradients = torch.autograd.grad(call(pack), leaves, pack.dout)
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(x.shape, generator=generator) for x in leaves]

    def along(t: float) -> float:
        moved = [x.detach() + t * step for x, step in zip(leaves, steps, strict=True)]
        there = Pack(moved[:2], moved[2:], pack.cos, pack.sin, pack.rows, pack.heads, pack.dout)
        return sum((a.double() * b).sum().item() for a, b in zip(call(there), pack.dout, strict=True))

    slope = (along(1e-2) - along(-1e-2)) / 2e-2
    expected = sum((g.double() * s).sum().item() for g, s in zip(gradients, steps, strict=True))
    assert slope == pytest.approx(expected, rel=2e-3)


# ---- Tables


def test_tables_of_positions_are_transformers_formula() -> None:
    positions = torch.tensor([0, 1, 7, 7, 130])
    cos, sin = attnforge.rope_tables(positions, 8, 100.0)
    angles = positions[:, None] * torch.tensor([1, 100**-0.25, 0.1, 100**-0.75])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_multimodal_tables_take_each_section_from_its_positions() -> None:
    """Qwen2-VL: frequencies of the first section take times, of the second heights, of the third widths."""
    positions = torch.tensor([[5, 5, 5, 6], [0, 0, 1, 6], [0, 1, 0, 6]])
    cos, sin = attnforge.rope_tables(positions, 16, sections=(2, 3, 3))
    for axis, columns in enumerate((slice(2), slice(2, 5), slice(5, 8))):
        for got, wanted in zip((cos, sin), attnforge.rope_tables(positions[axis], 16), strict=True):
            assert torch.equal(got[:, columns], wanted[:, columns])
    with pytest.raises(ValueError, match=r"sections: got \(2, 3\) .* add up to head_dim / 2 = 8"):
        attnforge.rope_tables(positions, 16, sections=(2, 3))
    with pytest.raises(ValueError, match=r"positions: got shape \(3, 4\), expected \(tokens\)"):
        attnforge.rope_tables(positions, 16)


# ---- Errors

WRONG = [
    ({"heads": None}, "k: is missing; a fused projection needs heads="),
    ({"heads": (5, 3)}, r"q: got shape \(23, 9, 64\), expected \(tokens, 11 \* head_dim\)"),
    ({"experts": None}, "q_weight: got 2 tensors, expected 1, since there are no experts"),
    ({"k_weight": None}, "q_weight, k_weight: expected both or neither"),
    ({"q_weight": torch.ones(64)}, "q_weight: got 1 tensor, expected 2, one for each expert"),
    (
        {"cos": torch.ones(37, 16)},
        r"cos: got \(37, 16\) torch.float32, expected \(tokens, 32\) or \(tokens, 64\) of torch.float32$",
    ),
    ({"sin": torch.ones(36, 32)}, "sin: has 36 rows on cpu, expected 37 on cpu"),
    ({"sin": torch.ones(37, 32).bfloat16()}, "sin: got .* expected .* of torch.float32"),
    ({"cos": torch.ones(37, 32, requires_grad=True)}, "cos: requires grad"),
    ({"v": torch.ones(37, 2, 64)}, "heads: is of a fused projection"),
    ({"q": torch.ones(3, 9, 64)}, "q: has 3 rows, expected 37 of its expert"),
    ({"q": torch.ones(37, 9, 64).half()}, "q: got dtype torch.float16, accepted on cpu are"),
    ({"q": (torch.ones(23, 9, 64), torch.ones(14, 9, 32))}, r"q: got shape \(14, 9, 32\)"),
    ({"heads": (0, 0)}, r"heads: got \(0, 0\), expected"),
    ({"eps": -1.0}, "eps: got -1.0, expected a number of at least 0"),
    ({"q": (torch.ones(23, 9, 64), torch.ones(14, 9, 64).double())}, "q: is torch.float64 on cpu, but q is"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    pack = draw()
    q_weight, k_weight = pack.pairs()
    arguments: dict[str, Any] = {
        "q": tuple(pack.fused),
        "heads": pack.heads,
        "cos": pack.cos,
        "sin": pack.sin,
        "q_weight": q_weight,
        "k_weight": k_weight,
        "experts": pack.experts(),
    }
    with pytest.raises(ValueError, match=message):
        attnforge.qk_norm_rope(**(arguments | change))


def test_more_tokens_than_kernels_can_number_are_refused() -> None:
    def result(tokens: int) -> Tensor:
        q, k = (torch.empty(tokens, heads, 4, device="meta") for heads in (2, 1))
        cos = torch.empty(tokens, 2, device="meta")
        return attnforge.qk_norm_rope(q, k, cos=cos, sin=cos)[0]

    assert result(MOST_TOKENS).shape[0] == MOST_TOKENS
    with pytest.raises(ValueError, match=f"q: got {MOST_TOKENS + 1} tokens, at most {MOST_TOKENS} are"):
        result(MOST_TOKENS + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 4}, r"heads: got int, expected \(heads_q, heads_kv\)"),
        ({"heads": (4.0, 2.0)}, "heads: entry 0 is 4.0"),
        ({"eps": None}, "eps: got NoneType, expected a number"),
        ({"eps": torch.tensor(1e-6)}, "eps: got Tensor, expected a number"),
        ({"experts": (torch.arange(6), torch.arange(6, 8))}, "experts: got tuple, expected ExpertRows"),
        ({"q": (torch.ones(1),) * 3}, "q: got tuple of Tensor, Tensor, Tensor, expected a tensor or a pair"),
    ],
)
def test_arguments_of_wrong_types_are_named(change: dict[str, Any], message: str) -> None:
    cos, sin = attnforge.rope_tables(torch.arange(8), 16)
    arguments: dict[str, Any] = {"q": torch.ones(8, 8 * 16), "heads": (4, 2), "cos": cos, "sin": sin}
    with pytest.raises(TypeError, match=message):
        attnforge.qk_norm_rope(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 16.0}, r"head_dim: got 16\.0, expected an integer"),
        ({"base": None}, "base: got NoneType, expected a number"),
        ({"sections": 8}, "sections: got int, expected integers"),
        ({"sections": (4.0, 4.0)}, "sections: entry 0 is 4.0"),
    ],
)
def test_arguments_of_tables_of_wrong_types_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"positions": torch.arange(4), "head_dim": 16}
    with pytest.raises(TypeError, match=message):
        attnforge.rope_tables(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 15}, "head_dim: got 15, expected an even number"),
        ({"head_dim": 0}, "head_dim: got 0"),
        ({"base": 0.0}, "base: got 0.0, expected a number above 0"),
        ({"base": -5.0}, "base: got -5.0"),
        ({"positions": torch.zeros(3, 4), "sections": (-1, 5, 4)}, r"sections: got \(-1, 5, 4\)"),
    ],
)
def test_wrong_tables_are_named(change: dict[str, Any], message: str) -> None:
    """Bases of 0 or less would give NaN, an odd head_dim tables that fit no head."""
    arguments: dict[str, Any] = {"positions": torch.arange(4), "head_dim": 16}
    with pytest.raises(ValueError, match=message):
        attnforge.rope_tables(**(arguments | change))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            torch.tensor([0, 1]),
            torch.tensor([1, 2]),
            "first, second: have 2 and 2 tokens, but the pack has 3",
        ),
        (
            torch.tensor([True, False, True]),
            torch.tensor([1]),
            r"first: got \(3,\) torch.bool, expected",
        ),
        (torch.tensor([0]), torch.tensor([[1]]), r"second: got \(1, 1\) torch.int64"),
        (torch.tensor([0, 0]), torch.tensor([1]), "first, second: have token 0 2 times"),
        (torch.tensor([0, 2]), torch.tensor([2]), "first, second: have token 2 2 times"),
        (torch.tensor([0]), torch.tensor([3]), "second: has token 3, expected 0 to 2"),
        (torch.tensor([-1]), torch.tensor([1]), "first: has token -1, expected 0 to 2"),
        (torch.tensor([0]), torch.tensor([1], device="meta"), "second: is on meta, but first is on cpu"),
    ],
)
def test_wrong_experts_are_named(first: torch.Tensor, second: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attnforge.ExpertRows(first, second, 3)


def test_tokens_of_experts_may_be_int32() -> None:
    rows = [
        attnforge.ExpertRows(torch.tensor([0, 2], dtype=t), torch.tensor([1], dtype=t), 3).rows
        for t in (torch.int32, torch.int64)
    ]
    assert torch.equal(*rows)


def test_tokens_of_neither_need_projections_by_expert() -> None:
    pack = draw((7, 4), nobody=2)
    with pytest.raises(ValueError, match="experts: have 7 and 4 of 13 tokens"):
        pack.experts().in_order()


def test_experts_are_on_the_device_of_q() -> None:
    pack = draw()
    experts = pack.experts()
    experts.rows = experts.rows.to("meta")
    with pytest.raises(ValueError, match="experts: are on meta, but q is on cpu"):
        call(pack, experts=experts)


def test_second_derivatives_are_refused() -> None:
    pack = draw((3, 2))
    (gradient,) = torch.autograd.grad(call(pack), pack.fused[:1], pack.dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives of qk_norm_rope"):
        gradient.sum().backward()


@pytest.mark.parametrize("norm", [True, False])
def test_forward_mode_is_refused(norm: bool) -> None:
    """torch would return tangents of zero."""
    pack = draw((3, 2), norm=norm)
    fused = [x.detach() for x in pack.fused]

    def run(x: Tensor) -> Tensor:
        return call(dataclasses.replace(pack, fused=[x, fused[1]]))[0]

    with pytest.raises(NotImplementedError, match="qk_norm_rope in forward mode"):
        torch.func.jvp(run, (fused[0],), (fused[0],))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="qk_norm_rope in forward mode"):
        run(forward_ad.make_dual(fused[0], fused[0]))
    compiled = torch.compile(run, backend="aot_eager")
    with pytest.raises(NotImplementedError, match="qk_norm_rope in forward mode"):
        torch.func.jvp(compiled, (fused[0],), (fused[0],))
    torch._dynamo.reset()


def test_transforms_are_refused_unless_the_call_is_constant_in_them() -> None:
    pack = draw((3, 2))
    fused = [x.detach() for x in pack.fused]

    def run(x: Tensor) -> Tensor:
        return call(dataclasses.replace(pack, fused=[x, fused[1]]))[0].sum()

    for transformed in (torch.func.grad(run), torch.func.vmap(lambda x: run(x + fused[0]))):
        with pytest.raises(NotImplementedError, match=r"torch\.func's transforms of qk_norm_rope"):
            transformed(fused[0])
    expected = run(fused[0])
    assert torch.equal(torch.func.functionalize(run)(fused[0]), expected)
    ones = torch.ones(3)
    results: Any = torch.func.jvp(lambda x: x.sum() * 2 + run(fused[0]), (ones,), (ones,))
    constant, tangent = results
    assert torch.equal(constant, expected + 6)
    assert tangent == 6


# ---- torch


@devices
@pytest.mark.parametrize("norm", [True, False])
def test_opcheck(norm: bool, device: str) -> None:
    pack = draw(head_dim=16, norm=norm, device=device)
    rows = pack.experts().rows
    arguments = (pack.fused, pack.cos, pack.sin, pack.weights, rows, 1, *pack.heads, 1e-6)
    torch.library.opcheck(prologue_kernels._forward_op, arguments)
    sources = pack.fused if norm else []
    lengths = [x.shape[0] for x in pack.fused]
    torch.library.opcheck(
        prologue_kernels._backward_op,
        (*pack.dout, sources, lengths, pack.cos, pack.sin, pack.weights, rows, 1, *pack.heads, 1e-6),
        test_utils=("test_schema", "test_faketensor"),
    )


@devices
def test_compile_with_changing_lengths(device: str) -> None:
    def step(pack: Pack) -> tuple[Tensor, ...]:
        q, k, v = call(pack)
        return q * 2, k, v

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((23, 14), (40, 7)):
        pack = draw(lengths, dtype=BF16, device=device)
        leaves = [*pack.fused, *pack.weights]
        expected, got = step(pack), compiled(pack)
        assert all(map(torch.equal, got, expected))
        ours, theirs = (torch.autograd.grad(x, leaves, pack.dout) for x in (got, expected))
        assert all(map(torch.equal, ours, theirs))
    torch._dynamo.reset()


@devices
def test_checkpointing_runs_the_forward_again_and_changes_nothing(device: str) -> None:
    pack = draw(dtype=BF16, device=device)
    leaves = [*pack.fused, *pack.weights]
    plain = torch.autograd.grad(call(pack), leaves, pack.dout)
    again = torch.autograd.grad(checkpoint(call, pack, use_reentrant=False), leaves, pack.dout)
    assert all(map(torch.equal, plain, again))


@devices
def test_attention_reads_the_results_as_views(device: str) -> None:
    pack = draw(heads=(4, 2), device=device)
    views = (x.transpose(0, 1)[None] for x in call(pack))
    out = attnforge.attention(*views, attnforge.Causal())[0].transpose(0, 1)  # type: ignore[call-overload]
    assert out.is_contiguous()
    q, k, v = (x.transpose(0, 1)[None] for x in pack.exact()[0])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected[0].transpose(0, 1).float())


def test_the_oracle_is_the_formula_of_transformers() -> None:
    """Qwen2RMSNorm and apply_rotary_pos_emb, written out for one head."""
    x, w = torch.tensor([3.0, 1.0, 2.0, -1.0]), torch.tensor([1.0, 2.0, 0.5, 1.0])
    cos, sin = torch.tensor([0.6, 0.8]), torch.tensor([0.8, 0.6])
    n = x / (15 / 4) ** 0.5 * w
    full_cos, full_sin = torch.cat((cos, cos)), torch.cat((sin, sin))
    expected = n * full_cos + torch.cat((-n[2:], n[:2])) * full_sin
    got = oracle.norm_rope(x[None, None], w, cos[None], sin[None], eps=0.0)
    torch.testing.assert_close(got[0, 0], expected)
