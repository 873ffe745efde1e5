"""benchmarks/scores.py on the CPU: its peers compute the same scores and gradients as ours; no time is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scores as benchmark
import torch
from torch import Tensor

from attnforge import scores
from attnforge.bagel.measure import fa4, peers
from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.cases import make_case
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime.ops import attention
from attnforge.runtime.search.case import Inputs

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
CASE = make_case("causal/160", "4/2/16", DType.FLOAT32, CPU)
NAMES = tuple(benchmark.contestants(CASE))
ADDED = ("bias", "bias, learned", "sinks, learned")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention is not compiled, which takes half a minute for each score."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    caches = (peers._compiled_flex, benchmark.compiled_with_sinks)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


def inputs() -> list[Inputs]:
    q, k, v, dout = CASE.inputs()
    return [Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", [name for name in NAMES if "approximate" not in name])
def test_flex_computes_the_same(name: str) -> None:
    """Forward: it has no backward on a CPU."""
    one, sets = benchmark.contestants(CASE)[name], [CASE.inputs()]
    mine, theirs = (make(CASE, one, Direction.FORWARD, sets)(0) for make in (benchmark.ours, benchmark.flex))
    assert theirs.dtype == CASE.torch_dtype
    benchmark.agrees(theirs, mine, 0, DType.FLOAT32)


@pytest.mark.parametrize("name", [name for name in NAMES if "learned" in name])
def test_learned_tensors_get_the_gradient_of_the_formula(name: str) -> None:
    """Which is the function that FlexAttention gets, so it reads the tensor that is learned."""
    one, x = benchmark.contestants(CASE)[name], inputs()
    (leaf,) = one.learned
    *_, got = benchmark.ours(CASE, one, Direction.BACKWARD, x)(0)
    q, k, v, dout = (t.detach() for t in x[0])
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    score = q @ k.mT * CASE.scale
    if one.function is not None:
        score = one.function(score, *torch.meshgrid(*map(torch.arange, score.shape), indexing="ij"))
    score = score.masked_fill(~torch.ones(160, 160, dtype=torch.bool).tril(), -torch.inf)
    lse = score.logsumexp(-1, keepdim=True)
    if one.sinks is not None:
        lse = torch.logaddexp(lse, one.sinks[:, None, None])
    (exact,) = torch.autograd.grad((score - lse).exp() @ v, leaf, dout)
    torch.testing.assert_close(got, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_ours_is_small(name: str) -> None:
    """That the benchmark reports: its own formula in float64 is the score that ours got."""
    limit = 2e-2 if "approximate" in name else 1e-5
    for direction in Direction:
        assert benchmark.error(CASE, benchmark.contestants(CASE)[name], direction, inputs()[0]) < limit


def stand_in(seen: list[dict[str, Any]]) -> SimpleNamespace:
    """For flash_attn.cute: ours, by the arguments that FA4's function takes."""

    def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen.append(options)
        score = None
        if options.get("softcap"):
            score = scores.softcap(options["softcap"])
        elif "score_mod" in options:
            score = options["score_mod"](*options["aux_tensors"])
        x, y, z = (t.transpose(1, 2) for t in (q, k, v))
        out = attention(x, y, z, CASE.mask, score=score, sinks=options.get("learnable_sink"))
        return out.transpose(1, 2), None

    return SimpleNamespace(flash_attn_func=flash)


@pytest.fixture
def calls_of_fa4(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of its stand-in."""
    seen = list[dict[str, Any]]()
    functions = SimpleNamespace(
        alibi=lambda slopes: scores.alibi(slopes[:, 0]),
        relative_bias=scores.relative_bias,
        bias=scores.bias,
        unchanged="unchanged",
    )
    monkeypatch.setattr(fa4, "installed", lambda: True)
    module = stand_in(seen)
    monkeypatch.setattr(
        "importlib.import_module", lambda name: functions if name.endswith("fa4_scores") else module
    )
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_fa4_gets_the_same_score(name: str, calls_of_fa4: list[dict[str, Any]]) -> None:
    one, sets = benchmark.contestants(CASE)[name], inputs()
    if one.learned and one.sinks is None:
        with pytest.raises(Unavailable, match="has no gradient of what a score reads"):
            benchmark.flash4(CASE, one, Direction.FORWARD, sets)
        return
    for direction in Direction:
        mine, theirs = (make(CASE, one, direction, sets)(0) for make in (benchmark.ours, benchmark.flash4))
        dtype = DType.BFLOAT16 if "approximate" in name else DType.FLOAT32
        benchmark.agrees(theirs, mine, 0, dtype)
    assert all(options["causal"] for options in calls_of_fa4)
    assert all(("score_mod" in options) == bool(one.cute) for options in calls_of_fa4)


def test_peers_that_differ_are_not_timed() -> None:
    exact = (torch.ones(8), torch.ones(8))
    near, far = (torch.ones(8) * 1.005 for _ in range(2)), (torch.ones(8), torch.ones(8) * 1.1)
    benchmark.agrees(tuple(near), exact, 0, DType.BFLOAT16)
    benchmark.agrees(far, exact, 1, DType.BFLOAT16)  # of a learned tensor, which peers sum in bf16
    with pytest.raises(Unavailable, match=r"result 1 differs from ours by 1\.0e-01, so it is not timed"):
        benchmark.agrees(far, exact, 0, DType.BFLOAT16)
    with pytest.raises(Unavailable, match="result 0 differs from ours by inf"):
        benchmark.agrees(torch.full((8,), torch.nan), exact[0], 0, DType.BFLOAT16)


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Callable[..., Any]:
        def call(case: Any, one: Any, direction: Direction, sets: Any) -> Callable[[int], Any]:
            if one.sinks is not None:
                raise Unavailable("has no sinks")
            return benchmark.ours(case, one, direction, sets)

        return call

    monkeypatch.setitem(benchmark.PEERS, "fa4", without("fa4"))
    table = tmp_path / "table.md"
    words = ["--pack=causal/160", "--model=4/2/16", "--dtype=fp32", "--device=cpu", "--seconds=0.01"]
    benchmark.main([*words, "--scores", *ADDED, "--peers", "fa4", "fa3", "--markdown", str(table)])
    lines = [line for line in table.read_text().splitlines() if line.startswith("| causal")]
    found = [line.strip("| ").split(" | ") for line in lines]
    works = [f"causal/160 4/2/16, {direction.value}" for direction in Direction]
    assert [row[:2] for row in found] == [[work, name] for work in works for name in ("plain", *ADDED)]
    for row in found:
        assert len(row) == len(benchmark.HEAD)
        assert float(row[2]) > 0
        assert (row[7] == "-") == ("sinks" in row[1])
        assert row[6] == row[8] == "-"
        assert float(row[9]) < 1e-5
    said = capsys.readouterr().out
    assert "fa4 sinks, learned bwd: has no sinks" in said
    assert "fa3 bias fwd: has no such score" in said
