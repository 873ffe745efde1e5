"""Other attentions on a case: SDPA by backend, BAGEL's per-sample loop, FlexAttention, FA3, FA4, cuDNN's."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnforge.bagel.measure import cudnn_flex, fa3, fa4
from attnforge.bagel.measure.attentions import Attention, Unavailable
from attnforge.bagel.packing import PackedMask
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import Direction, Mask
from attnforge.runtime.masks import Causal, DenseMask, FunctionMask, Spans
from attnforge.runtime.ops import attention
from attnforge.runtime.score_trace import evaluator
from attnforge.runtime.scores import Score
from attnforge.runtime.search.case import Case, Inputs
from attnforge.runtime.search.timing import Effort, Timing, effort, measure_interleaved, rotate

log = logging.getLogger("attnforge")

BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
FLEX = ("flex", "flex-bagel", "flex-fa4")
FA4 = ("fa4", "fa4-nopack", "flex-fa4")  # with flash-attn-4; nopack: without its packing of grouped heads
CAPPED = ("fa3", "fa4", "fa4-nopack")  # take a softcap, and no other score
# Packages that may not be there. cudnn-flex is `cudnn.flex_attention`.
INSTALLED: dict[str, Callable[[], bool]] = {
    **dict.fromkeys(FA4, lambda: fa4.installed()),
    "fa3": lambda: fa3.installed(),
    "cudnn-flex": lambda: cudnn_flex.installed(),
}
NAMES = {
    "cuda": (*BACKENDS, "sdpa-samples", "flex", "cudnn-flex", "fa3", *FA4),
    "cpu": ("sdpa-flash", "sdpa-samples", "flex"),
}
DETERMINISTIC = ("fa3",)  # have deterministic gradients as an option of a call
EXTRA: dict[str, Callable[[Case], Attention]] = {}  # peers that a benchmark adds, by name
# A warning of torch that says why it does not use a backend of SDPA.
_REFUSAL = re.compile(r"(?P<why>.*?)\s*\(Triggered internally at \S*/sdp_utils", re.DOTALL)
OURS = "attnforge"  # our own kernel in rows and tables
OF_PLANES = "masks that differ between batch entries or heads are not supported for FlexAttention here"
Call = Callable[[int], Any]  # on the inputs of that index


def present(device: torch.device) -> tuple[str, ...]:
    """The peers that are installed here, in the order of tables."""
    return tuple(name for name in NAMES[device.type] if name not in INSTALLED or INSTALLED[name]())


def usual(case: Case) -> tuple[str, ...]:
    """The peers that a case is timed beside: `present` ones, for a deterministic case those of DETERMINISTIC.

    On a CPU, where v has a head_dim of its own, SDPA's slow math backend is one: its flash backend cannot compute that.
    """
    names = present(case.device)
    if case.deterministic:
        return tuple(name for name in names if name in DETERMINISTIC)
    if case.device.type == "cpu" and case.head_dim_v != case.head_dim:
        return ("sdpa-math", *names)
    return names


def known() -> tuple[str, ...]:
    """All names that `time_peer` takes, on whatever device."""
    return tuple(dict.fromkeys((*(name for names in NAMES.values() for name in names), "flex-bagel", *EXTRA)))


def time_peer(
    name: str, case: Case, direction: Direction, ours: Callable[[Sequence[Inputs]], Call] | None = None
) -> tuple[Timing, Timing | None]:
    """Time one peer (of NAMES or EXTRA) on a case, interleaved with `ours` if it is given; backward is timed alone.

    `ours` makes a call like `contestant`'s. Returns the peer's timing and ours. Raises Unavailable.
    """
    with memory_freed(case.device):
        sets = [Inputs(*tensors) for tensors in rotate(tuple(case.inputs()), case.device)]
        calls = {} if ours is None else {OURS: ours(sets)}
        with as_unavailable():
            calls[name] = contestant(name, case, direction, sets)
            how = effort(case.device)
            if case.device.type == "cpu":  # masked SDPA takes many seconds there, and has nothing to warm up
                how = Effort(seconds=2.0, repeats=5, least=1, warmups=int(name == "flex"))
            timings = measure_interleaved(calls, [(index,) for index in range(len(sets))], case.device, how)
        return timings[name], timings.get(OURS)


def contestant(name: str, case: Case, direction: Direction, sets: Sequence[Inputs]) -> Call:
    """A call that runs the peer on the set of inputs of that index: out, or (dq, dk, dv) of backward alone."""
    return call_of(attention_of(name, case), direction, sets)


def call_of(call: Attention, direction: Direction, sets: Sequence[Inputs]) -> Call:
    """`contestant` of an attention."""
    if direction is Direction.FORWARD:
        return lambda index: call(*sets[index][:3])
    graphs = [_graph(call, x) for x in sets]

    def backward(index: int) -> Any:
        out, leaves, dout = graphs[index]
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return backward


def _graph(call: Attention, x: Inputs) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    leaves = tuple(tensor.detach().requires_grad_() for tensor in (x.q, x.k, x.v))
    return call(*leaves), leaves, x.dout


@contextlib.contextmanager
def memory_freed(device: torch.device) -> Iterator[None]:
    """Releases unused memory to the device at the end."""
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def with_peak(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What `call` returns, and the peak of its memory in bytes above what is allocated before it; nan on a CPU."""
    if device.type != "cuda":
        return call(), float("nan")
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    return result, float(torch.cuda.max_memory_allocated(device) - before)


@contextlib.contextmanager
def as_unavailable() -> Iterator[None]:
    """Turns an exception of a peer into Unavailable, so that the run continues and the table shows the reason."""
    with _refusals() as refusals:
        try:
            yield
        except Unavailable:
            raise
        except Exception as error:
            log.debug("a peer failed", exc_info=True)
            text = " ".join((str(error), *refusals))
            words = " ".join(text.split())  # all lines, since the first one may hold no information
            raise Unavailable(f"{type(error).__name__}: {words[:300]}") from error


@contextlib.contextmanager
def _refusals() -> Iterator[list[str]]:
    """Torch's reasons not to use a backend of SDPA, which it warns of before it raises; other warnings pass."""
    found: list[str] = []
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, *arguments: Any, **more: Any) -> None:
            refusal = _REFUSAL.match(str(message))
            if refusal is None:
                others(message, *arguments, **more)
            elif not refusal["why"].endswith(("because:", "runtime disabled.")):
                found.append(refusal["why"])

        warnings.showwarning = show
        warnings.filterwarnings("always", _REFUSAL.pattern, UserWarning)
        yield found


def attention_of(name: str, case: Case, often: bool = False) -> Attention:
    """The peer as a function of q, k and v; its mask is made before. Raises Unavailable, or the peer's exceptions.

    `often`: masks are made again and again, which FlexAttention does quickest by compiling all of
    create_block_mask. "flex-bagel" makes them as BAGEL's trainer does; it is "flex" otherwise.
    """
    if name in EXTRA:
        return EXTRA[name](case)
    if name == OURS:
        return attend(case)
    if case.deterministic and name not in DETERMINISTIC:
        raise Unavailable("its deterministic gradients are not timed")
    cap = softcap_of(case)
    capped = {"softcap": cap} if cap else {}
    if case.score is not None and not (name in FLEX or (name in CAPPED and cap)):
        raise Unavailable("takes no such score")
    if name == "flex-fa4":
        fa4.require()
    if name in FLEX:
        making = ("bagel" if name == "flex-bagel" else "often") if often else "once"
        return _flex(case, making, "FLASH" if name == "flex-fa4" else None)
    if name in FA4:
        return fa4.attention(case, False if name == "fa4-nopack" else None, **capped)
    if name == "fa3":
        return fa3.attention(case, **capped)
    if name == "cudnn-flex":
        return cudnn_flex.attention(case)
    if name == "sdpa-samples":
        return _samples(case)
    return _sdpa(name, case)


def attend(case: Case) -> Attention:
    """Ours by its public function: the kernels that dispatch chooses, with autograd as the peers."""
    options: dict[str, Any] = {"scale": case.scale, "score": case.score, "deterministic": case.deterministic}
    return lambda q, k, v: attention(q, k, v, case.mask, **options)


def _sdpa(name: str, case: Case) -> Attention:
    """One call; a mask of spans or pairs becomes an additive one."""
    backend = BACKENDS[name]
    on_cpu = case.device.type == "cpu"
    # torch's own causal mask is aligned at the top left.
    plain = case.mask is None or (isinstance(case.mask, Causal) and case.seq_q == case.seq_k)
    masked = not plain
    if masked and name == "sdpa-flash" and not on_cpu:
        raise Unavailable("takes no mask")
    need = _bytes_needed(name, case)
    room = _free_bytes(case.device)
    if need > room:
        raise Unavailable(f"needs {need / 2**30:.0f} GiB, {room / 2**30:.0f} are free")
    bias = None
    if masked and case.mask is not None:
        seen = case.mask.visible(case.seq_q, case.seq_k, case.device)
        bias = _bias(seen, case.torch_dtype)
    causal = case.mask_kind is Mask.CAUSAL and not masked
    repeat = name == "sdpa-efficient" or on_cpu  # the kernel has no grouped heads: BAGEL repeats k and v, too

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeat:
            k, v = _repeated(k, case), _repeated(v, case)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=causal, scale=case.scale, enable_gqa=not repeat
            )

    return call


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, else -inf. SDPA makes this from a bool mask at every call."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _repeated(x: Tensor, case: Case) -> Tensor:
    group = case.heads_q // case.heads_kv
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _bytes_needed(name: str, case: Case) -> int:
    """Rough peak of what is quadratic in the length."""
    square = case.seq_q * case.seq_k
    if name == "sdpa-math":
        return 3 * 4 * case.batch * case.heads_q * square
    return 8 * square if case.mask_kind in (Mask.SPANS, Mask.DENSE) else 0


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(0.8 * torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo") as file:  # noqa: PTH123
        free = next(line for line in file if line.startswith("MemAvailable"))
    return int(0.5 * 1024 * int(free.split()[1]))


def _samples(case: Case) -> Attention:
    """BAGEL's path without FlexAttention: one masked SDPA call per sample, k and v repeated to all heads."""
    if not isinstance(case.mask, PackedMask):
        raise Unavailable("only for packs")
    backend = BACKENDS["sdpa-flash" if case.device.type == "cpu" else "sdpa-efficient"]
    bounds = {split.sample_end for split in case.mask.splits if split.end > split.start}
    ends = sorted(end for end in bounds if end <= case.mask.used)
    pieces = []
    for start, end in zip([0, *ends], ends, strict=False):
        row = torch.arange(start, end, device=case.device)[:, None]
        seen = (case.mask.starts[None, start:end] <= row) & (row < case.mask.ends[None, start:end])
        pieces.append((start, end, _bias(seen, case.torch_dtype)))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _repeated(k, case), _repeated(v, case)
        with sdpa_kernel(backend):
            parts = [
                F.scaled_dot_product_attention(
                    q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], attn_mask=bias, scale=case.scale
                )
                for a, b, bias in pieces
            ]
        rest = q.shape[2] - pieces[-1][1]
        return torch.cat([*parts, q.new_zeros(*q.shape[:2], rest, v.shape[3])], dim=2)

    return call


def _flex(case: Case, making: str, backend: str | None = None) -> Attention:
    """Compiled; `backend` "FLASH" is FA4's kernels under FlexAttention's interface, None torch's Triton ones."""
    mod = _mask_mod(case)
    block_mask = mod and _block_mask(mod, case, making)
    flex = _compiled_flex()
    options = {"BACKEND": backend} if backend else None
    score = case.score and _score_function(case.score)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex(
            q, k, v, score, block_mask=block_mask, scale=case.scale, enable_gqa=True, kernel_options=options
        )
        return out

    return call


def _block_mask(mod: Callable[..., Tensor], case: Case, making: str) -> Any:
    """FlexAttention's mask of a case, made "once" or "often", or as "bagel" does. On the CPU always eagerly.

    Once is eagerly, too, where there is memory for it: compiled, nothing S x S is stored, but the sort of the blocks of
    a row takes Triton minutes to compile.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    size = (None, None, case.seq_q, case.seq_k, case.device)
    if case.device.type == "cpu":
        return create_block_mask(mod, *size)
    if making == "often":
        return _compiled_block_mask()(mod, *size)
    # Twelve bytes a pair is what it took at its peak on a CPU.
    too_large = 12 * case.seq_q * case.seq_k > _free_bytes(case.device)
    return create_block_mask(mod, *size, _compile=making == "bagel" or too_large)


@cache
def _compiled_block_mask() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.cuda.is_available():  # it would warn that there is no GPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch._dynamo.config.cache_size_limit = 512  # as BAGEL does: one compilation per case, never eager
    # Backward is timed alone, many times on one graph. Torch refuses that where it has compiled backward for one
    # use, so that it may write over what forward saved.
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False)


def _mask_mod(case: Case) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    if isinstance(case.mask, Spans):
        return _spans_mod(case.mask)
    if isinstance(case.mask, DenseMask):
        return _pair_mod(case.mask.mask)
    if isinstance(case.mask, FunctionMask):
        return _function_mod(case.mask)
    if case.mask is None:
        return None
    offset = case.seq_k - case.seq_q

    def before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + offset

    return before


def _spans_mod(mask: Spans) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    if mask.starts.dim() > 2:
        raise Unavailable(OF_PLANES)
    (starts, *other_starts), (ends, *other_ends) = (
        x.reshape(mask.intervals, -1).unbind() for x in (mask.starts, mask.ends)
    )

    def in_span(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (starts[j] <= i) & (i < ends[j])
        for first, end in zip(other_starts, other_ends, strict=True):
            seen = seen | ((first[j] <= i) & (i < end[j]))
        return seen

    return in_span


def _function_mod(mask: FunctionMask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    formula = MaskMod(mask.text)
    if formula.reads("b") or formula.reads("h"):
        raise Unavailable(OF_PLANES)

    function = evaluator(formula, mask.tensors)

    def evaluated(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return function({"q_idx": i, "kv_idx": j})

    return evaluated


def _score_function(score: Score) -> Callable[..., Tensor]:
    """The score as FlexAttention takes it."""
    function = evaluator(ScoreMod(score.text), score.tensors)

    def scored(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return function({"score": value, "b": b, "h": h, "q_idx": i, "kv_idx": j}).to(value.dtype)

    return scored


def softcap_of(case: Case) -> float:
    """c of a score c * tanh(score / c), 0 for any other and for none."""
    found = case.score and re.fullmatch(r"softcap: (\S+) \* tanh\w*\(score / \1\)", case.score.text)
    return float(found[1]) if found else 0.0


def _pair_mod(seen: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    if seen.dim() > 2:
        raise Unavailable(OF_PLANES)

    def in_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[i, j]

    return in_mask
