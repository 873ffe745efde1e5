"""ATTNFORGE_CANARY=N: the first forward, the first backward and every N-th of each after them, compared with float64.

`install` puts Python kernels in the place of the operators' own at the dispatch keys CPU and CUDA, once, when the
operators are loaded. Without the variable nothing is registered, and no call does more than before. Traces never reach
these keys; while a CUDA graph is captured nothing is compared. A call costs a sample of rows and keys of a few heads.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from attnforge.codegen.formula import MAX_TENSORS
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.runtime import dispatch, kernels, sampled
from attnforge.runtime.build.settings import CANARY
from attnforge.runtime.inputs import MASKS
from attnforge.runtime.sampled import Call, Given, Sample

PLANES = 4  # pairs of a batch entry and a head
ROWS = 16  # of each of them; as many keys
# Of the expected error, and of the worst case's; as in tests/fuzzing/fuzz_exact.py.
RMS_RATIO, RMS_SHARE = 3.0, 1 / 8
NORMAL = {torch.float32: 2.0**-90, torch.bfloat16: 2.0**-90, torch.float16: 2.0**-12}


class CanaryError(ArithmeticError):
    """A call's result is farther from float64 than rounding explains; the message names the call and its kernel."""


def install(every: int) -> Library:
    """Check every `every`-th forward and backward of this process. The result undoes it by `_destroy()`."""
    library = Library("attnforge", "IMPL")
    own = {
        (name, key): torch.library.get_kernel(f"attnforge::{name}", key)
        for name in ("forward", "backward")
        for key in ("CPU", "CUDA")
    }
    checks = {"forward": _Check("forward", every), "backward": _Check("backward", every)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[\\s\\S]*[Oo]verriding a previously registered kernel")
        for (name, key), kernel in own.items():
            library.impl(name, _checked(checks[name], kernel), key, with_keyset=True)
        # The short ways to `forward`, which otherwise call its kernel directly.
        for name, function in _SHORT.items():
            library.impl(name, function, "CompositeImplicitAutograd")
    return library


def _checked(check: _Check, kernel: Any) -> Any:
    def run(keys: torch.DispatchKeySet, *arguments: Any) -> Any:
        results = kernel.call_boxed(keys, *arguments)
        check(arguments, results)
        return results

    return run


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    deterministic: bool = False,
    kind: int = 0,
    mask: Tensor | None = None,
    visible: int = 0,
) -> Tensor:
    out: Tensor = torch.ops.attnforge.forward.default(q, k, v, mask, kind, scale, deterministic, visible)[0]
    return out


def _attend_full(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return _attend(q, k, v, scale)


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    return _attend(q, k, v, scale, kind=1)


def _attend_spans(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, visible: int, scale: float | None = None
) -> Tensor:
    return _attend(q, k, v, scale, kind=2, mask=mask, visible=visible)


_SHORT = {
    "attend": _attend,
    "attend_full": _attend_full,
    "attend_causal": _attend_causal,
    "attend_spans": _attend_spans,
}


@dataclass(frozen=True)
class _Found:
    """The sample that is farthest from its limit: `error` over `limit` is `ratio`."""

    sample: Sample
    what: str
    error: float
    limit: float
    at: int = 0  # place in the sample's index

    @property
    def ratio(self) -> float:
        return math.inf if math.isnan(self.error) else self.error / max(self.limit, 1e-300)


class _Check:
    """Counts the calls of one operator and compares those that are due. Calls with a chosen variant are not counted."""

    def __init__(self, name: str, every: int) -> None:
        self.name = name
        self.every = every
        self._numbers = itertools.count()  # `next` is atomic: calls come from several threads
        op = getattr(torch.ops.attnforge, name).default
        self._defaults = {a.name: a.default_value for a in op._schema.arguments}

    def __call__(self, arguments: Sequence[Any], results: Sequence[Tensor]) -> None:
        given = self._defaults | dict(zip(self._defaults, arguments, strict=False))
        if given["variant"]:
            return
        number = next(self._numbers)
        if number % self.every or not _comparable(given):
            return
        with torch.no_grad():
            found = max(_errors(self.name, given, results, number), key=lambda item: item.ratio)
            if found.ratio > 1:
                raise CanaryError(_describe(self.name, number, given, found))


def _comparable(given: dict[str, Any]) -> bool:
    q, k = given["q"], given["k"]
    if q.numel() == 0 or k.shape[2] == 0:
        return False
    if sampled.jumps(ScoreMod(given["score"])) or sampled.rounding_may_decide(MaskMod(given["mask_mod"])):
        return False
    return not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def _errors(name: str, given: dict[str, Any], results: Sequence[Tensor], number: int) -> list[_Found]:
    """The worst element and the root mean square of each sample of a call."""
    q, k = given["q"], given["k"]
    captured = tuple(x for x in (given[f"score{i}"] for i in range(MAX_TENSORS)) if x is not None)
    scale = q.shape[3] ** -0.5 if given["scale"] is None else given["scale"]
    # Kernels multiply by the nearest float32, of the scales that they can hold.
    scale = float(torch.tensor(min(max(scale, 1e-30), 2e38), dtype=torch.float32))
    functions = ScoreMod(given["score"]), captured, MaskMod(given["mask_mod"])
    call = Call(q, k, given["v"], given["mask"], MASKS[given["kind"]], scale, *functions)
    draw = torch.Generator().manual_seed(number)
    samples: list[Sample] = []
    for plane in torch.randperm(q.shape[0] * q.shape[1], generator=draw)[:PLANES].tolist():
        b, h = divmod(plane, q.shape[1])
        rows, keys = (_draw(n, draw).to(q.device) for n in (q.shape[2], k.shape[2]))
        if name == "forward":
            samples += sampled.forward_samples(call, b, h, rows, *results)
        else:
            gradients = Given(given["dout"], given["out"], given["lse"], given["dlse"], *results)
            samples.append(sampled.dq_sample(call, gradients, b, h, rows))
            samples += sampled.dk_dv_samples(call, gradients, b, h // call.group, keys)
    return [found for sample in samples for found in _judge(sample, q.dtype)]


def _draw(n: int, draw: torch.Generator) -> Tensor:
    """ROWS of n indices, the last among them."""
    some = torch.randint(0, n, (ROWS - 1,), generator=draw)
    rows: Tensor = torch.cat((some, torch.tensor([n - 1]))).unique()
    return rows


def _judge(sample: Sample, dtype: torch.dtype) -> list[_Found]:
    got, exact = sample.got, sample.exact
    same = got == exact  # also where both are -inf
    error = torch.where(same, 0, (got - exact).abs())
    # What the dtype cannot hold, and what rounding says nothing of, is not compared.
    known = sample.bound.isfinite() & ((exact.abs() < 0.99 * torch.finfo(dtype).max) | exact.isinf())
    ratio = torch.where(known & ~same, error / sample.bound, 0).nan_to_num(nan=torch.inf)
    at = int(ratio.argmax())
    found = [_Found(sample, "", float(error.view(-1)[at]), float(sample.bound.reshape(-1)[at]), at)]
    found[0] = found[0] if float(ratio.view(-1)[at]) > 0 else _Found(sample, "", 0.0, 1.0)
    if sample.name != "lse" and bool(known.any()) and _rms(exact[known]) > NORMAL[dtype]:
        limit = RMS_RATIO * _rms(sample.spread[known]) + RMS_SHARE * _rms(sample.bound[known])
        found.append(_Found(sample, "root mean square ", _rms(error[known]), limit))
    return found


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


# ---- The message


def _describe(name: str, number: int, given: dict[str, Any], found: _Found) -> str:
    sample = found.sample
    columns = sample.exact.shape[1]
    row, column = divmod(found.at, columns)
    kind = "key" if sample.name in ("dk", "dv") else "row"
    where = f"batch entry {sample.batch}, head {sample.head}"
    if not found.what:
        got, exact = (float(x[row, column]) for x in (sample.got, sample.exact))
        where += f", {kind} {int(sample.index[row])}: got {got:.9g}, in float64 {exact:.9g}"
    lines = (
        f"{CANARY}: {name} call {number} of this process is wrong.",
        f"{sample.name} of {where}; {found.what}error {found.error:.3g}, rounding explains {found.limit:.3g}",
        f"call: {_words(given)}",
        f"kernel: {_kernel(name, given)}",
        "ATTNFORGE_DISABLE=1 gives patched programs their own attention back.",
    )
    return "\n  ".join(lines)


def _words(given: dict[str, Any]) -> str:
    shapes = ", ".join(f"{x} {tuple(given[x].shape)} strides {given[x].stride()}" for x in "qkv")
    kind = MASKS[given["kind"]].value
    mask = kind if given["mask"] is None else f"{kind} with data {tuple(given['mask'].shape)}"
    words = f"{shapes}; {given['q'].dtype} on {given['q'].device}; mask {mask}"
    words += f", visible_keys {given['visible']}" if given["visible"] else ""
    words += f"; scale {given['scale']}" if given["scale"] is not None else ""
    words += "".join(f"; {x} {given[x]!r}" for x in ("score", "mask_mod") if given[x])
    return words + ("; deterministic" if given["deterministic"] else "")


def _kernel(name: str, given: dict[str, Any]) -> str:
    backward = name == "backward"
    extra = [given[x] for x in ("dout", "out")] if backward else [None, None]
    extra = [x if x is None or x.stride(3) == 1 else x.contiguous() for x in extra]
    deterministic = backward and (
        given["deterministic"]
        or (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
    )
    inputs = (given[x] for x in ("q", "k", "v", "mask", "kind"))
    scores = (given[x] for x in ("score", *(f"score{i}" for i in range(MAX_TENSORS)), "mask_mod"))
    handle = torch.ops.attnforge.route(*inputs, deterministic, given["visible"], *extra, *scores)
    return f"{kernels.spec_of(handle).symbol}; {dispatch.reason_of(handle)}"
