"""ATTNFORGE_CANARY: samples against the definition, right calls, planted faults, and which calls are compared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import score_oracle
import torch
from torch import Tensor

import attnforge
from attnforge.bagel import PackedMask
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.runtime import canary, ops, sampled
from attnforge.runtime.build.settings import CANARY
from attnforge.runtime.canary import CanaryError
from attnforge.runtime.inputs import MASKS
from attnforge.runtime.masks import AnyMask, FunctionMask, load_operators
from attnforge.runtime.native import operators
from attnforge.runtime.sampled import Call, Given
from attnforge.runtime.scores import Score
from attnforge.runtime.search.reference import reference

BATCH, HEADS_Q, HEADS_KV, LENGTH, DIM = 2, 4, 2, 70, 64


def test_bounds_allow_for_scores_whose_products_cancel() -> None:
    """float32 then loses most digits of a score, in any order of its sum."""
    generator = torch.Generator().manual_seed(3)
    q, k, small, v = torch.randn(4, 1, 1, 8, 32, generator=generator)
    q, k = torch.cat((q, q), 3) * 40, torch.cat((k, small / 1000 - k), 3) * 40
    s = torch.zeros(8, 8)
    for i in range(64):
        s += q[0, 0, :, i, None] * k[0, 0, None, :, i]
    call = Call(q, k, v, None, MASKS[0], 1.0, ScoreMod())
    rows = torch.arange(8)
    out, lse = (s.softmax(1) @ v[0, 0])[None, None], s.logsumexp(1)[None, None]
    for sample in sampled.forward_samples(call, 0, 0, rows, out, lse):
        assert bool(((sample.got - sample.exact).abs() <= sample.bound).all()), sample.name


def draw(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, heads, LENGTH, DIM, generator=generator).to(dtype).requires_grad_(i < 3)
        for i, heads in enumerate((HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q))
    ]


def masks() -> dict[str, Callable[[], AnyMask]]:
    generator = torch.Generator().manual_seed(1)
    pairs = torch.rand(BATCH, HEADS_Q, LENGTH, LENGTH, generator=generator) > 0.6
    bounds = torch.randint(0, LENGTH, (2, BATCH, HEADS_KV, 2, LENGTH), generator=generator, dtype=torch.int32)
    return {
        "full": lambda: None,
        "causal": attnforge.Causal,
        "pack": lambda: PackedMask([40, 30], [20, 20, 30], ["causal", "noise", "full"], "cpu"),
        "unions": lambda: attnforge.Spans(*bounds.sort(0).values.unbind()),
        "dense": lambda: attnforge.DenseMask(pairs),
        "function": lambda: attnforge.masks.mask_mod(blocks, LENGTH, LENGTH, "cpu"),
    }


def blocks(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return ((q_idx // 24 >= kv_idx // 24) & (h + b != 2)) | (kv_idx % 24 == 5)


@pytest.fixture
def watch() -> Iterator[Callable[[int], None]]:
    """Checks every n-th call until the end of the test."""
    load_operators()
    libraries = []
    yield lambda every: libraries.append(canary.install(every))
    for library in libraries:
        library._destroy()


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The results that were compared."""
    names: list[str] = []
    judge = canary._judge

    def spy(sample: Any, dtype: torch.dtype) -> Any:
        names.append(sample.name)
        return judge(sample, dtype)

    monkeypatch.setattr(canary, "_judge", spy)
    return names


# ---- The samples


def call_of(q: Tensor, k: Tensor, v: Tensor, mask: AnyMask, score: Score | None = None) -> Call:
    data, kind, _ = ops.unpack_mask(mask, q, k)
    text, tensors = ("", ()) if score is None else (score.text, score.tensors)
    function = MaskMod(mask.text if isinstance(mask, FunctionMask) else "")
    return Call(q, k, v, data, MASKS[kind], DIM**-0.5, ScoreMod(text), tensors, function)


def exact_of(call: Call, given: Given) -> dict[str, Tensor]:
    """The canary's own answer for every row and key."""
    every = torch.arange(LENGTH)
    found: dict[str, list[Tensor]] = {}
    for b in range(BATCH):
        for h in range(HEADS_Q):
            samples = sampled.forward_samples(call, b, h, every, given.out, given.lse)
            samples.append(sampled.dq_sample(call, given, b, h, every))
            if h % call.group == 0:
                samples += sampled.dk_dv_samples(call, given, b, h // call.group, every)
            for sample in samples:
                found.setdefault(sample.name, []).append(sample.exact)
    return {name: torch.stack(parts).unflatten(0, (BATCH, -1)) for name, parts in found.items()}


@pytest.mark.parametrize("name", masks())
def test_samples_are_the_definition(name: str) -> None:
    q, k, v, dout = (x.detach() for x in draw())
    mask = masks()[name]()
    right = reference(q, k, v, mask, dout=dout)._asdict()
    given = Given(dout, right["out"], right["lse"], None, *(right[x] for x in ("dq", "dk", "dv")))
    for result, exact in exact_of(call_of(q, k, v, mask), given).items():
        assert torch.allclose(exact.view_as(right[result]), right[result], rtol=0, atol=1e-12), result


@pytest.mark.parametrize("name", score_oracle.functions(BATCH, HEADS_Q, LENGTH, LENGTH))
def test_samples_of_scores_are_the_definition(name: str) -> None:
    q, k, v, dout = (x.detach() for x in draw())
    score, function = score_oracle.functions(BATCH, HEADS_Q, LENGTH, LENGTH)[name]
    dlse = torch.randn(BATCH, HEADS_Q, LENGTH)
    right = score_oracle.oracle(q, k, v, attnforge.Causal(), function, dout, dlse)
    out, lse, dq, dk, dv = right
    given = Given(dout, out, lse, dlse, dq, dk, dv)
    found = exact_of(call_of(q, k, v, attnforge.Causal(), score), given)
    # The functions in plain torch compute what depends on indices alone in float32.
    for result, exact in zip(("out", "lse", "dq", "dk", "dv"), right, strict=True):
        assert torch.allclose(found[result].view_as(exact), exact, rtol=1e-5, atol=1e-5), result


def test_integers_of_a_score_are_those_of_kernels(watch: Callable[[int], None], compared: list[str]) -> None:
    """They wrap around at 32 bits, and an integer divided by 0 gives 0."""
    watch(1)
    divisors = torch.arange(LENGTH, dtype=torch.int32) % 3

    def function(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (i // divisors[j]) * 0.01 + (i * 1013904223 % 7) * 0.1

    q, k, v, _ = draw()
    attnforge.attention(q, k, v, score=attnforge.scores.score_mod(function))
    assert set(compared) == {"out", "lse"}


def test_functions_that_jump_with_the_score_are_not_compared() -> None:
    def step(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(score > 0, score, 2 * score)

    def window(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i - j < 9, score, -torch.inf)

    assert sampled.jumps(ScoreMod(attnforge.scores.score_mod(step).text))
    assert not sampled.jumps(ScoreMod(attnforge.scores.score_mod(window).text))
    assert sampled.jumps(ScoreMod(attnforge.scores.softcap(3.0, approximate=True).text))


def test_masks_that_rounding_decides_are_not_compared(
    watch: Callable[[int], None], compared: list[str]
) -> None:
    watch(1)
    q, k, v, _ = draw()
    limit, document = torch.rand(HEADS_Q), torch.arange(LENGTH) // 30

    def far(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() < limit[h] * 64

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return document[i] == document[j]

    attnforge.attention(q, k, v, attnforge.masks.mask_mod(far, LENGTH, LENGTH, "cpu"))
    assert not compared
    slopes = attnforge.scores.alibi(torch.rand(HEADS_Q))
    attnforge.attention(q, k, v, attnforge.masks.mask_mod(same, LENGTH, LENGTH, "cpu"), score=slopes)
    assert compared.count("out") == canary.PLANES


# ---- Calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["full", "causal", "pack", "dense", "function"])
def test_right_calls_pass(
    name: str, dtype: torch.dtype, watch: Callable[[int], None], compared: list[str]
) -> None:
    watch(1)
    q, k, v, dout = draw(dtype)
    attnforge.attention(q, k, v, masks()[name]()).backward(dout)
    assert set(compared) == {"out", "lse", "dq", "dk", "dv"}


def test_right_calls_of_any_kind_pass(watch: Callable[[int], None], compared: list[str]) -> None:
    """Gradients of lse, scores, sinks, other scales, rows without keys, checkpoints."""
    watch(1)
    q, k, v, dout = draw()
    out, lse = attnforge.attention(q, k, v, attnforge.Causal(), scale=0.3, return_lse=True)
    ((out * dout).sum() + lse.sum()).backward()
    slopes = torch.rand(HEADS_Q)
    attnforge.attention(
        q, k, v, attnforge.Causal(), score=attnforge.scores.alibi(slopes), sinks=torch.rand(HEADS_Q)
    ).backward(dout)
    long = torch.randn(BATCH, HEADS_Q, LENGTH + 9, DIM, requires_grad=True)
    torch.utils.checkpoint.checkpoint(
        lambda x: attnforge.attention(x, k, v, attnforge.Causal(), deterministic=True),
        long,
        use_reentrant=False,
    ).sum().backward()
    assert compared.count("dv") == 3 * canary.PLANES
    with torch.no_grad():
        attnforge.attention(q[:, :, :0], k, v)
    assert compared.count("dv") == 3 * canary.PLANES


def test_compiled_calls_are_compared_when_they_run(watch: Callable[[int], None], compared: list[str]) -> None:
    watch(1)
    q, k, v, _ = draw()
    step = torch.compile(
        lambda q, k, v: attnforge.attention(q, k, v, attnforge.Causal()).sum(),
        backend="aot_eager",
        fullgraph=True,
    )
    step(q, k, v).backward()
    assert compared.count("out") == compared.count("dk") == canary.PLANES


Spoil = Callable[[dict[str, Any], list[Tensor]], None]


def _nan(given: dict[str, Any], results: list[Tensor]) -> None:
    results[0][..., -1, 3] = torch.nan  # the last row is in every sample


def _hide_keys(given: dict[str, Any], results: list[Tensor]) -> None:
    """As if the tile of the last 8 keys were skipped."""
    k, v = (given[x][:, :, :-8] for x in "kv")
    exact = reference(given["q"].detach(), k.detach(), v.detach())
    results[0].copy_(exact.out)
    results[1].copy_(exact.lse)


def _two_percent(given: dict[str, Any], results: list[Tensor]) -> None:
    results[-1].mul_(1.02)


def _zero(given: dict[str, Any], results: list[Tensor]) -> None:
    results[1].zero_()


FAULTS = [
    pytest.param("forward", _nan, "out of .*got nan", id="nan"),
    pytest.param("forward", _hide_keys, "(lse|out) of ", id="hidden-keys"),
    pytest.param("forward", _two_percent, "lse of ", id="lse"),
    pytest.param("backward", _nan, "dq of .*row 69: got nan", id="dq-nan"),
    pytest.param("backward", _two_percent, "dv of ", id="dv"),
    pytest.param("backward", _zero, "dk of .*key", id="dk"),
]


@pytest.mark.parametrize(("operator", "spoil", "words"), FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_planted_faults_are_found(
    operator: str,
    spoil: Spoil,
    words: str,
    dtype: torch.dtype,
    watch: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(operator, spoil, monkeypatch)
    watch(1)
    q, k, v, dout = draw(dtype)
    with pytest.raises(CanaryError, match=words):
        attnforge.attention(q, k, v).backward(dout)


def plant(operator: str, spoil: Spoil, monkeypatch: pytest.MonkeyPatch) -> None:
    get_kernel = torch.library.get_kernel

    class Spoilt:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def call_boxed(self, keys: Any, *arguments: Any) -> Any:
            results = self.kernel.call_boxed(keys, *arguments)
            names = [a.name for a in getattr(torch.ops.attnforge, operator).default._schema.arguments]
            spoil(dict(zip(names, arguments, strict=False)), results)
            return results

    def get(name: str, key: str) -> Any:
        kernel = get_kernel(name, key)
        return Spoilt(kernel) if name == f"attnforge::{operator}" else kernel

    monkeypatch.setattr(torch.library, "get_kernel", get)


def test_the_message_names_the_call_and_its_kernel(
    watch: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("backward", _two_percent, monkeypatch)
    watch(1)
    q, k, v, dout = draw(torch.bfloat16)
    mask = masks()["pack"]()
    out = attnforge.attention(q, k, v, mask)
    with pytest.raises(CanaryError) as caught:
        out.backward(dout)
    text = str(caught.value)
    for part in (
        "ATTNFORGE_CANARY: backward call 0 of this process",
        "q (2, 4, 70, 64) strides",
        "torch.bfloat16 on cpu; mask spans with data (2, 70)",
        "kernel: attnforge_bwd_cpu_bf16_d64_spans",
        "rounding explains",
    ):
        assert part in text
    assert text.splitlines()[3].partition("; ")[2]  # the table's entry


def test_every_nth_call_is_compared(watch: Callable[[int], None], compared: list[str]) -> None:
    watch(3)
    q, k, v, dout = draw()
    counts = []
    for _ in range(5):
        out = attnforge.attention(q, k, v)
        counts.append((compared.count("out") // canary.PLANES, compared.count("dq") // canary.PLANES))
        attnforge.attention(q, k, v).backward(dout)
        del out
    assert counts == [(1, 0), (1, 1), (2, 1), (3, 1), (3, 2)]


def test_it_ends_without_a_trace(compared: list[str]) -> None:
    load_operators()
    assert not operators._kept  # the variable is not set
    q, k, v, _ = draw()
    canary.install(1)._destroy()
    attnforge.attention(q, k, v)
    assert not compared


def test_the_variable_installs_it() -> None:
    code = (
        "import torch, attnforge\n"
        "from attnforge.runtime import canary\n"
        "judge, seen = canary._judge, []\n"
        "canary._judge = lambda sample, dtype: seen.append(1) or judge(sample, dtype)\n"
        "q = torch.randn(1, 1, 70, 64)\n"
        "for _ in range(4): attnforge.attention(q, q, q)\n"
        "print(len(seen))"
    )
    run = subprocess.run(
        (sys.executable, "-c", code), env=os.environ | {CANARY: "2"}, capture_output=True, text=True
    )
    assert run.stdout == "4\n", run.stderr  # out and lse of calls 0 and 2


# ---- On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("length", [300, 9000])
def test_right_calls_pass_on_a_gpu(
    length: int, dtype: torch.dtype, watch: Callable[[int], None], compared: list[str]
) -> None:
    watch(1)
    third = length // 3
    pack = PackedMask([length], [third, third, length - 2 * third], ["causal", "noise", "full"], "cuda")
    for dim in (64, 72, 128):
        for mask in (None, attnforge.Causal(), pack):
            for deterministic in (False, True):
                q, k, v = (
                    torch.randn(1, heads, length, dim, device="cuda", dtype=dtype, requires_grad=True)
                    for heads in (14, 2, 2)
                )
                out = attnforge.attention(q, k, v, mask, deterministic=deterministic)
                out.backward(torch.randn_like(out))
    assert compared.count("dk") == 18 * canary.PLANES


@pytest.mark.gpu
def test_a_captured_call_is_not_compared(watch: Callable[[int], None], compared: list[str]) -> None:
    q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    attnforge.attention(q, q, q)
    watch(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attnforge.attention(q, q, q)
    graph.replay()
    torch.cuda.synchronize()
    assert not compared
    assert torch.equal(out, attnforge.attention(q, q, q))
    assert compared
