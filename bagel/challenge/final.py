"""`challenge run --final`: the ten final-round shapes, checked against float64 and timed beside torch's backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnforge.bagel.challenge.layer import Attention, naive
from attnforge.bagel.challenge.operator import FINAL, final_mask
from attnforge.runtime.export import Shape
from attnforge.runtime.masks import DenseMask
from attnforge.runtime.search.reference import reference
from attnforge.runtime.search.timing import Effort, effort, measure

TOLERANCES = {
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 5e-3,
}  # absolute and relative: the challenge's
# float16 cannot hold the gradients of inputs of +-0.02, so training scales the loss; here by this factor.
LOSS_SCALE = 1024.0
# Errors relative to the norm: for such inputs the challenge's absolute tolerance would accept zeros.
GRADIENTS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
BACKENDS = {
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
}
OURS, NAIVE = "ours", "naive"


@dataclass
class Result:
    """One attention on one shape in one dtype; `note` is the reason for a missing number, or the error."""

    shape: Shape
    dtype: torch.dtype
    name: str
    forward_ms: float | None = None
    both_ms: float | None = None  # forward and backward
    errors: dict[str, float] = field(default_factory=dict)  # relative to the norm: out, dq, dk, dv
    note: str = ""
    wrong: bool = False


def shapes(device: torch.device) -> tuple[Shape, ...]:
    """The ten shapes; on a CPU with fewer heads and a sixteenth of the rows."""
    if device.type != "cpu":
        return FINAL
    small = (Shape(s.batch, min(s.heads, 3), s.rows // 16, s.head_dim) for s in FINAL)
    return tuple(dict.fromkeys(small))


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v uniform in +-0.02 and a gradient of out, the same for the same shape; in float16 times LOSS_SCALE."""
    generator = torch.Generator(device).manual_seed(shape.rows)
    size = (shape.batch, shape.heads, shape.rows, shape.head_dim)
    q, k, v, dout = (torch.rand(size, generator=generator, device=device) * 0.04 - 0.02 for _ in range(4))
    if dtype is torch.float16:
        dout *= LOSS_SCALE
    return [x.to(dtype) for x in (q, k, v, dout)]


def run_final(
    device: torch.device, ours: Attention, dtypes: tuple[torch.dtype, ...] | None = None
) -> Iterator[Result]:
    """`ours` and its peers on every shape. Peers are those of the device that take a mask; naive in float32 only."""
    if dtypes is None:  # the CPU has no float16 kernels
        dtypes = tuple(d for d in TOLERANCES if device.type != "cpu" or d is not torch.float16)
    for dtype in dtypes:
        for shape in shapes(device):
            yield from _contest(shape, dtype, device, ours)


def _contest(shape: Shape, dtype: torch.dtype, device: torch.device, ours: Attention) -> Iterator[Result]:
    q, k, v, dout = draw(shape, dtype, device)
    blocked = final_mask(shape.rows, device)
    exact = reference(q, k, v, DenseMask(~blocked), dout=dout)
    assert exact.dq is not None
    assert exact.dk is not None
    assert exact.dv is not None
    expected = {"out": exact.out, "dq": exact.dq, "dk": exact.dk, "dv": exact.dv}
    contestants = {OURS: ours, **_peers(device, ~blocked)}
    if dtype is torch.float32:
        contestants[NAIVE] = naive
    for who, attention in contestants.items():
        result = Result(shape, dtype, who)
        try:
            result.errors, problems = check(attention, (q, k, v, dout), blocked, expected)
            if who == OURS and problems:
                result.wrong, result.note = True, "; ".join(problems)
            _time(result, attention, (q, k, v, dout), blocked)
        except (RuntimeError, ValueError, TypeError) as error:
            result.wrong = who == OURS
            result.note = " ".join(str(error).split())[:160]
        yield result


def _peers(device: torch.device, visible: Tensor) -> dict[str, Attention]:
    """torch's backends with their mask, made once. Flash attention supports masks on a CPU only."""
    chosen = (
        ("sdpa-flash", "sdpa-math") if device.type == "cpu" else ("sdpa-efficient", "sdpa-math", "sdpa-cudnn")
    )

    def peer(backend: SDPBackend) -> Attention:
        def call(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

        return call

    return {name: peer(BACKENDS[name]) for name in chosen}


def check(
    attention: Attention,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    blocked: Tensor,
    expected: dict[str, Tensor],
) -> tuple[dict[str, float], list[str]]:
    """Errors relative to the expected tensors' norms, and a line for each one beyond its tolerance."""
    *leaves, dout = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attention(*leaves, blocked)  # type: ignore[call-arg]
    results = {
        "out": out,
        **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True)),
    }
    errors, problems = {}, []
    for name, x in results.items():
        wanted = expected[name]
        errors[name] = ((x.double() - wanted).norm() / wanted.norm()).item()
        if name != "out" and not errors[name] <= GRADIENTS[x.dtype]:
            problems.append(f"{name} is off by {errors[name]:.1e} of its norm")
    limit = TOLERANCES[out.dtype]
    if out.dtype != dout.dtype or not torch.allclose(out.double(), expected["out"], atol=limit, rtol=limit):
        problems.append(f"out is off by {(out.double() - expected['out']).abs().max().item():.1e}")
    if not errors["out"] <= GRADIENTS[out.dtype]:
        problems.append(f"out is off by {errors['out']:.1e} of its norm")
    return errors, problems


def _time(result: Result, attention: Attention, inputs: tuple[Tensor, ...], blocked: Tensor) -> None:
    q, k, v, dout = inputs
    how = Effort(seconds=0.1, repeats=20) if q.is_cuda else effort(q.device)
    if q.device.type == "cpu":
        how = Effort(seconds=0.1, repeats=3)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return attention(q, k, v, blocked)

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attention(*leaves, blocked), leaves, dout)  # type: ignore[call-arg]

    calls: dict[str, Callable[..., object]] = {"forward_ms": forward, "both_ms": both}
    for name, call in calls.items():
        setattr(result, name, measure(call, [(q, k, v)], q.device, how).median)
