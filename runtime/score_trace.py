"""From a Python function of a pair to its text (codegen/formula.py) and back to tensors.

make_fx traces a function of a score or of a mask, and its graph is translated, which takes milliseconds. A function
like an earlier one is not traced again (trace_cache.py). `evaluate` computes a text with torch.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from attnforge.codegen.formula import MAX_TENSORS, Formula
from attnforge.codegen.formula_program import Program, ScoreError
from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.score import ScoreMod
from attnforge.runtime.trace_cache import MOST, TraceCache, describe

ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
FLOATS = (torch.float32, torch.bfloat16)  # of captured tensors as kernels read them
_NARROWED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64)  # which kernels read as int32


_fitting: Any = WeakIdKeyDictionary()  # the versions of int64 tensors whose values fit int32
_traces = TraceCache()


_DETACH = torch.ops.aten.detach
_DETACHING = (Tensor.detach, torch.detach, _DETACH, _DETACH.default, Tensor.data.__get__)  # type: ignore[attr-defined]
_DETACHING_IN_PLACE = (Tensor.detach_, torch.detach_, torch.ops.aten.detach_, torch.ops.aten.detach_.default)


# What reads values of a captured tensor unnoticed: make_fx refuses operators that do.
_READING = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.storage)


def _detached(x: Tensor) -> Tensor:
    """x through an operator that graphs of every torch keep; since 2.14, x.detach() is recorded as an alias of x."""
    return torch.ops.aten.detach_copy.default(x) if x.is_floating_point() else x


class _Tracing(TorchFunctionMode):
    """What make_fx would not record as it is meant.

    `x[i]` with scalar tensors is an operator of the graph; torch would read their values. What is detached, or computed
    under torch.no_grad(), passes through detach_copy. Captured tensors of torch.func's transforms are replaced: the
    trace runs outside of the transforms.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads_values = False  # of a tensor, without an operator
        self.replaced: list[tuple[Tensor, Tensor]] = []  # (a transform's tensor, the one in its place)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._plain, (args, kwargs or {}))
        self.reads_values |= func in _READING
        if func in _DETACHING:
            return _detached(args[0])
        if func in _DETACHING_IN_PLACE:
            raise ScoreError("detach_ is not supported")
        result = self._call(func, args, kwargs)
        return result if torch.is_grad_enabled() else tree_map_only(Tensor, _detached, result)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is Tensor.__getitem__:
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) for i in at):
                if not all(isinstance(i, (int, Tensor)) for i in at):
                    raise ScoreError("a captured tensor is indexed with slices; use a number for each axis")
                of = args[0]
                for axis in range(len(at))[::-1]:
                    if not isinstance(at[axis], Tensor):  # a tensor of it would be one more that is captured
                        of = of.select(axis, at[axis])
                return torch.ops.aten.index.Tensor(of, [i for i in at if isinstance(i, Tensor)])
        return func(*args, **kwargs)

    def _plain(self, x: Tensor) -> Tensor:
        """x, or a tensor of its form if x is one of a transform."""
        if not is_functorch_wrapped_tensor(x):
            return x
        for original, plain in self.replaced:
            if original is x:
                return plain
        with _disable_current_modes():  # what make_fx saw would be an operation of the graph
            plain = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)  # x may be large
        self.replaced.append((x, plain))
        return plain

    def restore(self, graph: GraphModule) -> None:
        """Put the transforms' tensors back."""
        for node in graph.graph.nodes:
            for original, plain in self.replaced if node.op == "get_attr" else ():
                if getattr(graph, str(node.target)) is plain:
                    setattr(graph, str(node.target), original)


class _Dividing(TorchDispatchMode):
    """x // 0 and x % 0 of integers as 0, as kernels have it; all indices are 0 here, and torch would refuse."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "ZeroDivisionError" not in str(error):
                raise
            if not isinstance(args[1], Tensor):
                raise ScoreError("an integer is divided by the constant 0") from None
        none = args[1] == 0
        return torch.where(none, 0, func(args[0], torch.where(none, 1, args[1]), **(kwargs or {})))


def traced(function: ScoreFunction) -> tuple[str, tuple[Tensor, ...]]:
    """(text, captured tensors) of a function (score, b, h, q_idx, kv_idx). Raises ScoreError naming what is wrong."""
    try:
        text, tensors = _translated(ScoreMod, function, _captured_by_score)
    except ScoreError as error:
        raise ScoreError(f"score: {error}") from None
    _require_derivative(text)
    return text, tensors


@lru_cache(maxsize=MOST)
def _require_derivative(text: str) -> None:
    """ScoreError for a score with an operation that has none, here and not in a backward."""
    ScoreMod(text).gradient  # noqa: B018


def wants_gradients(score: str) -> bool:
    """Does the text of a score mark tensors whose gradients a backward computes?"""
    return bool(ScoreMod(score).wanted)


wants_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as masks.load_operators


def traced_mask(
    function: MaskFunction, fixed: Mapping[str, int] | None = None
) -> tuple[str, tuple[Tensor, ...]]:
    """(text, captured tensors) of a function (b, h, q_idx, kv_idx) that says which pairs are visible.

    fixed: values of indices that the text shall not depend on. Captured tensors are copies: bool and integers as int32,
    in which the function computes: it wraps around at 32 bits, also where torch would at 8 or at 64.
    Raises ScoreError naming what is wrong.
    """
    try:
        text, tensors = _translated(MaskMod, function, _captured_by_mask, fixed or {})
    except ScoreError as error:
        raise ScoreError(f"mask_mod: {error}") from None
    with torch.inference_mode(False):  # a later call that is recorded for backward saves them
        copies = (x.detach().clone(memory_format=torch.contiguous_format) for x in tensors)
        return text, tuple(as_read(x) for x in copies)


def _translated(
    form: type[Formula],
    function: Callable[..., Tensor],
    checked: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
    fixed: Mapping[str, int] | None = None,
) -> tuple[str, tuple[Tensor, ...]]:
    """(text, `checked` of the tensors that it captures) of a function, which is traced if none like it has been."""
    description = describe(function, form, tuple((fixed or {}).items()))
    if found := _traces.find(description):
        text, captured = found
        return text, checked(captured)
    graph, reads_values = _graph(function, form.leaves)
    translation = _Translation(graph, form.leaves, fixed)
    tensors = checked(translation.tensors)
    text = _text(form, function, translation, tensors)
    if not reads_values:
        _traces.keep(description, text, translation.tensors)
    return text, tensors


def _graph(function: Callable[..., Tensor], leaves: Sequence[str]) -> tuple[GraphModule, bool]:
    """The function's graph, whose placeholders are `leaves`, and whether it may depend on values of tensors."""

    def trace() -> tuple[GraphModule, bool]:
        _expect_arguments(function, leaves)
        recording = _Tracing()
        # Inside torch.func's transforms new tensors are theirs, and make_fx records constants in their places.
        dividing = _Dividing()  # type: ignore[no-untyped-call]
        with torch.enable_grad(), temporarily_clear_interpreter_stack(), recording, dividing:
            scalars = [
                torch.zeros((), dtype=torch.float32 if leaf == "score" else torch.int32) for leaf in leaves
            ]
            # make_fx counts the arguments of a function's code, with `self` and those that have defaults.
            graph = make_fx(lambda *indices: function(*indices), tracing_mode="real")(*scalars)
        recording.restore(graph)
        return graph, recording.reads_values

    # Dynamo of torch 2.11 cannot break a graph inside a mode, and leaves the mode on. Not a decorator: disable imports
    # torch._dynamo, which takes a second; make_fx needs it anyway.
    try:
        found: tuple[GraphModule, bool] = torch.compiler.disable(trace)()
    except ScoreError:
        raise
    except Exception as error:  # whatever the function does
        words = str(error)
        if "_local_scalar_dense" in words or "get value out of a tracing tensor" in words:
            words = "it branches on a tensor, or reads its value; use torch.where, &, | and ~"
        raise ScoreError(f"the function cannot be traced: {words}") from error
    return found


def _expect_arguments(function: Callable[..., Tensor], leaves: Sequence[str]) -> None:
    try:
        inspect.signature(function, follow_wrapped=False).bind(*leaves)
    except ValueError:  # one that is not of Python has none
        return
    except TypeError:
        names = ", ".join(leaves)
        raise ScoreError(f"the function cannot be traced: it has to take the arguments ({names})") from None


def _text(
    form: type[Formula],
    function: Callable[..., Tensor],
    translation: _Translation,
    tensors: tuple[Tensor, ...],
) -> str:
    """The text of a traced function, named after it."""
    truth, fallback = form is MaskMod, "mask_mod" if form is MaskMod else "score_mod"
    name = re.sub(r"[^a-z0-9_]", "", getattr(function, "__name__", "").lower()).strip("_")
    translation.program.tensors = tuple(dtype_as_read(x) for x in tensors)
    result = translation.result()
    result = _truth(translation.program, result) if truth else translation.program.call("float", result)
    declared = tuple((dtype, x.dim()) for dtype, x in zip(translation.program.tensors, tensors, strict=True))
    name = name if name[:1].isalpha() else fallback
    return str(form.of(name, declared, translation.program, result))


def _expect_one(x: Tensor) -> None:
    """ScoreError for a tensor of vmap: its samples would share the tile lists of one mask."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            raise ScoreError(
                "a captured tensor differs between the samples of torch.func.vmap; make Spans or a DenseMask, or add a "
                "batch axis and read it at b"
            )
        x = get_unwrapped(x)


def _check_mask(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        _expect_one(x)
    _check_integers(tensors)


def _check_integers(tensors: Sequence[Tensor]) -> None:
    """Raises ScoreError for values of int64 that do not fit int32. Waits for the device, once for each change of x."""
    for x in tensors:
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        if x.dtype != torch.int64:
            continue
        version = None if x.is_inference() else x._version
        if version is None or _fitting.get(x) != version:
            if bool((x != x.to(torch.int32)).any()):
                raise ScoreError("a captured tensor is torch.int64, and some of its values do not fit int32")
            _fitting[x] = version


def as_read(x: Tensor) -> Tensor:
    """A captured tensor as kernels read it: float16 as a copy in float32, bool and integers as one in int32."""
    if x.dtype == torch.float16:
        return x.float()
    return x.to(torch.int32) if x.dtype in _NARROWED else x


def dtype_as_read(x: Tensor) -> str:
    """The dtype of `as_read` as texts of functions have it."""
    if x.dtype == torch.float16:
        return "float32"
    return "int32" if x.dtype in _NARROWED else str(x.dtype).removeprefix("torch.")


def _captured_by_score(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    torch.compiler.disable(_check_integers)(tensors)
    return _captured(tensors)


def _captured_by_mask(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    torch.compiler.disable(_check_mask)(tensors)
    return _captured([as_read(x) for x in tensors])


def _captured(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The captured tensors of a traced function, checked, with at least one axis."""
    if len(tensors) > MAX_TENSORS:
        raise ScoreError(f"captures {len(tensors)} tensors, at most {MAX_TENSORS} are supported")
    found = []
    for x in tensors:
        if x.dtype not in (*FLOATS, torch.float16, torch.int32, *_NARROWED):
            raise ScoreError(
                f"a captured tensor is {x.dtype}, accepted are float32, bfloat16, float16, bool, uint8, int8 to int64"
            )
        if x.dim() > 4 or x.numel() == 0:
            raise ScoreError(
                f"a captured tensor has shape {tuple(x.shape)}, expected 0 to 4 axes and elements"
            )
        with torch.enable_grad():  # a view made without it would get no gradient in later calls
            found.append(x.reshape(1) if x.dim() == 0 else x)
    return tuple(found)


class _Partial:
    """A captured tensor, and the indices that its axes were given so far, None for an axis without one."""

    def __init__(self, tensor: int, at: tuple[int | None, ...]) -> None:
        self.tensor, self.at = tensor, at

    def indexed(self, indices: Sequence[int], first: int = 0) -> _Partial:
        """With indices for axes that have none, from the `first` of those on."""
        at = list(self.at)
        free = [axis for axis, index in enumerate(at) if index is None][first:]
        for axis, index in zip(free, indices, strict=False):
            at[axis] = index
        return _Partial(self.tensor, tuple(at))


class _Translation:
    """From the nodes of a graph to values of a program."""

    def __init__(
        self, graph: GraphModule, leaves: Sequence[str], fixed: Mapping[str, int] | None = None
    ) -> None:
        self.graph, self.program, self.leaves, self.fixed = graph, Program(), leaves, fixed or {}
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # of captured tensors by identity
        self.values: dict[Node, int | _Partial] = {}
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                x = getattr(graph, str(node.target))
                if id(x) not in self.numbers:
                    self.numbers[id(x)] = len(self.tensors)
                    self.tensors.append(x)
        self.bools = {i for i, x in enumerate(self.tensors) if x.dtype == torch.bool}

    def result(self) -> int:
        """The number of the function's value."""
        leaves = iter(self.leaves)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                leaf, program = next(leaves), self.program
                fixed = self.fixed.get(leaf)
                self.values[node] = program.leaf(leaf) if fixed is None else program.const(fixed)
            elif node.op == "get_attr":
                x = getattr(self.graph, str(node.target))
                self.values[node] = _Partial(self.numbers[id(x)], (None,) * x.dim())
            elif node.op == "call_function":
                self.values[node] = self.called(node)
            elif not isinstance(node.args[0], Node):
                raise ScoreError("the function does not return one tensor")
            else:
                return self.number(node.args[0])
        raise AssertionError("the traced graph has no output node")

    def number(self, x: Any) -> int:
        """The value of an argument: a node's, or a constant."""
        if not isinstance(x, Node):
            return self.program.const(x)
        found = self.values[x]
        if isinstance(found, int):
            return found
        at = tuple(index for index in found.at if index is not None)
        if len(at) == len(found.at):
            # A captured scalar has one element.
            loaded = self.program.load(found.tensor, at or (self.program.const(0),))
            return _truth(self.program, loaded) if found.tensor in self.bools else loaded
        raise ScoreError(
            "a captured tensor is used without an index for each of its axes, such as bias[h, q_idx]"
        )

    def called(self, node: Node) -> int | _Partial:
        """The value of one operation."""
        name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
        if name in ("index", "select"):
            return self.indexed(node)
        if name in _SAME:
            return self.same(node)
        if name == "_to_copy":
            return self.converted(node)
        if name in _FILLED:
            return self.filled(node, _FILLED[name])
        if name in ("scalar_tensor", "full", "full_like"):
            return self.filled(node, node.args[-1])  # type: ignore[arg-type]
        if name not in _OPERATIONS:
            raise ScoreError(
                f"{node.target} is not supported; values that depend on indices only can be read from a captured tensor"
            )
        if float(node.kwargs.get("alpha", 1)) != 1:  # type: ignore[arg-type]
            raise ScoreError(f"alpha of {node.target} is not supported")
        if node.kwargs.get("rounding_mode") is not None:
            name = f"div_{node.kwargs['rounding_mode']}"
        args = [None if x is None else self.number(x) for x in node.args]
        try:
            return _OPERATIONS[name](self.program, *args)
        except ScoreError as error:
            raise ScoreError(f"{node.target}: {error}") from None

    def same(self, node: Node) -> int | _Partial:
        """An operation that changes no value: of a captured tensor without all its indices, no shape either."""
        source: Node = node.args[0]  # type: ignore[assignment]
        # Not aten.detach, which autograd records for what it saves.
        if node.target is torch.ops.aten.detach_copy.default:
            self.expect_no_gradient(source)
        before, after = (x.meta["val"].shape for x in (source, node))
        if before != after and isinstance(self.values[source], _Partial):
            raise ScoreError(
                f"{node.target} of a captured tensor, {tuple(before)} to {tuple(after)}, is not supported; "
                "call it outside of the function"
            )
        return self.values[source]

    def expect_no_gradient(self, source: Node) -> None:
        """ScoreError if a score detaches what may have a gradient: a formula is differentiated as a whole."""
        if "score" in self.leaves and self.has_gradient(self.values[source]):
            raise ScoreError(
                "detach and torch.no_grad are not supported for what may have a gradient; detach captured tensors "
                "outside of the function"
            )

    def has_gradient(self, x: int | _Partial) -> bool:
        """Is x a function of the score, or of a captured tensor that requires a gradient?"""
        if isinstance(x, _Partial):
            return self.tensors[x.tensor].requires_grad
        flows: list[bool] = []  # for each value of the program up to x
        for node in self.program.nodes[: x + 1]:
            if node.op == "leaf" or node.kind != "float":
                flows.append(node.kind == "float")
            elif node.op.startswith("load:"):
                flows.append(self.tensors[int(node.op[5:])].requires_grad)
            else:
                flows.append(any(flows[i] for i in node.args))
        return flows[x]

    def filled(self, node: Node, value: float) -> int:
        """A scalar."""
        shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
        if shape:
            raise ScoreError(f"{node.target} of shape {tuple(shape)} is not supported, only of shape ()")
        kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
        return self.program.const(kind(value))

    def indexed(self, node: Node) -> _Partial:
        of = self.values[node.args[0]]  # type: ignore[index]
        if not isinstance(of, _Partial):
            raise ScoreError("only captured tensors can be indexed")
        if node.target is torch.ops.aten.select.int:
            axis: Any = node.args[1]
            dims = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
            return of.indexed([self.number(node.args[2])], axis % dims)
        return of.indexed([self.number(i) for i in node.args[1]])  # type: ignore[union-attr]

    def converted(self, node: Node) -> int:
        value, dtype = self.number(node.args[0]), node.kwargs.get("dtype")
        if dtype in (None, torch.float32):
            return self.program.call("float", value) if dtype else value
        if dtype in (torch.int32, torch.int64) and self.program.kind(value) != "bool":
            return self.program.call("int", value)
        if dtype in (torch.int32, torch.int64):
            return self.program.call("where", value, self.program.const(1), self.program.const(0))
        raise ScoreError(f"a conversion to {dtype} is not supported")


# Operations that change nothing here.
_SAME = (
    *("detach", "detach_copy", "alias", "clone", "lift_fresh_copy", "lift_fresh"),
    *("view", "_unsafe_view", "squeeze"),
)


# Scalars of one value: and_masks and or_masks of FlexAttention begin with them.
_FILLED = {"new_ones": 1, "ones": 1, "ones_like": 1, "new_zeros": 0, "zeros": 0, "zeros_like": 0}


def _clamp(p: Program, x: int, low: int | None = None, high: int | None = None) -> int:
    if low is not None:
        x = p.call("where", p.binary("<", x, low), low, x)
    return x if high is None else p.call("where", p.binary(">", x, high), high, x)


def _sigmoid(p: Program, x: int) -> int:
    return p.binary("/", p.const(1.0), p.binary("+", p.const(1.0), p.call("exp", p.neg(x))))


def _power(p: Program, x: int, y: int) -> int:
    exponent, kinds = p.nodes[y], (p.kind(x), p.kind(y))
    if exponent.op == "const" and float(exponent.value) in (2.0, 3.0):
        x = p.call("float", x) if kinds == ("int", "float") else x  # as torch's, it does not wrap around
        square = p.binary("*", x, x)
        return square if float(exponent.value) == 2.0 else p.binary("*", square, x)
    if exponent.op == "const" and kinds == ("int", "int"):
        return _integer_power(p, x, int(exponent.value))
    if kinds == ("int", "int"):
        if (p.nodes[x].op, p.nodes[x].value) != ("const", 2.0):
            raise ScoreError("an integer to the power of an index or tensor is not supported; use floats")
        return p.binary("<<", p.const(1), y)  # wraps around as torch's power
    return p.call("pow", x, y)


def _integer_power(p: Program, x: int, exponent: int) -> int:
    """x ** exponent of an int, in products that wrap around as torch's; torch refuses exponents below 0."""
    if exponent < 2:
        return x if exponent == 1 else p.const(1)
    half = _integer_power(p, x, exponent // 2)
    square = p.binary("*", half, half)
    return p.binary("*", square, x) if exponent % 2 else square


def _relu(p: Program, x: int) -> int:
    zero = p.const(0 if p.kind(x) == "int" else 0.0)
    return p.call("where", p.binary("<=", x, zero), zero, x)


def _masked_fill(p: Program, x: int, mask: int, value: int) -> int:
    """The result has the type of x: torch truncates a value for an int."""
    fits = (p.kind(x), p.kind(value)) != ("int", "float")
    return p.call("where", mask, value if fits else p.call("int", value), x)


def _truth(p: Program, x: int) -> int:
    return x if p.kind(x) == "bool" else p.binary("!=", x, p.const(0))


def _div_trunc(p: Program, x: int, y: int) -> int:
    if (p.kind(x), p.kind(y)) != ("int", "int"):
        raise ScoreError("float32 with a rounding mode is not supported")
    zero, one = p.const(0), p.const(1)
    negative = p.binary("!=", p.binary("<", x, zero), p.binary("<", y, zero))
    up = p.binary("&", negative, p.binary("!=", p.binary("%", x, y), zero))
    return p.binary("+", p.binary("//", x, y), p.call("where", up, one, zero))


def _infix(op: str) -> Callable[..., int]:
    return lambda p, x, y: p.binary(op, x, y)


def _bitwise(op: str) -> Callable[..., int]:
    """& and |; of a bool that is a constant, such as the one that and_masks begins with, nothing remains."""

    def combined(p: Program, x: int, y: int) -> int:
        for one, other in ((x, y), (y, x)):
            if p.nodes[one].op == "const" and p.kind(one) == p.kind(other) == "bool":
                return other if bool(p.nodes[one].value) == (op == "&") else one
        return p.binary(op, x, y)

    return combined


def _logical(op: str) -> Callable[..., int]:
    return lambda p, x, y: _bitwise(op)(p, _truth(p, x), _truth(p, y))


def _calling(name: str) -> Callable[..., int]:
    return lambda p, *args: p.call(name, *args)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floor_divide": "//", "div_floor": "//", "remainder": "%",
    "bitwise_xor": "^",
    "bitwise_left_shift": "<<", "bitwise_right_shift": ">>", "__lshift__": "<<", "__rshift__": ">>",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
_CALLS = (
    "tanh", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "sin", "cos", "erf", "floor", "ceil",
    "abs", "maximum", "minimum", "where",
)  # fmt: skip
_OPERATIONS: dict[str, Callable[..., int]] = {
    **{name: _infix(op) for name, op in _INFIX.items()},
    **{name: _calling(name) for name in _CALLS},
    **{name: _bitwise("&") for name in ("bitwise_and", "__and__")},
    **{name: _bitwise("|") for name in ("bitwise_or", "__or__")},
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_not": lambda p, x: p.invert(_truth(p, x)),
    "bitwise_not": lambda p, x: p.invert(x),
    "div_trunc": _div_trunc,
    "rsub": lambda p, x, y: p.binary("-", y, x),
    "neg": lambda p, x: p.neg(x),
    "pow": _power,
    "square": lambda p, x: p.binary("*", x, x),
    "reciprocal": lambda p, x: p.binary("/", p.const(1.0), x),
    "rsqrt": lambda p, x: p.binary("/", p.const(1.0), p.call("sqrt", x)),
    "relu": _relu,
    "clamp": _clamp,
    "clamp_min": lambda p, x, low: _clamp(p, x, low),
    "clamp_max": lambda p, x, high: _clamp(p, x, None, high),
    "sigmoid": _sigmoid,
    "silu": lambda p, x: p.binary("*", x, _sigmoid(p, x)),
    "masked_fill": _masked_fill,
}


# ---- Evaluation

_TORCH: dict[str, Callable[..., Tensor]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": lambda x, y: torch.div(x, y, rounding_mode="floor"), "%": operator.mod,
    "&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "neg": operator.neg, "~": lambda x: ~x, "tanh_approx": torch.tanh,
}  # fmt: skip


def evaluate(text: Formula, leaves: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """What the function gives with torch's operations, for int32 tensors of indices by name that can be broadcast.

    As in kernels, integers wrap around at 32 bits, an index of a captured tensor below 0 counts from its end, one
    outside of it is moved inside, and an integer divided by 0 gives 0.
    """
    return evaluator(text, tensors)(leaves)


def evaluator(text: Formula, tensors: Sequence[Tensor]) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """`evaluate` as a function of the leaves. torch.compile can trace it."""
    return program_evaluator(*text.parsed, tensors)


def program_evaluator(
    program: Program, result: int, tensors: Sequence[Tensor], floats: torch.dtype = torch.float32
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The same of value `result` of a program, such as a derivative, with floats of the dtype `floats`."""
    # Dynamo wraps tuples, and no Node.
    nodes = [(node.op, node.args, node.kind, node.value) for node in program.nodes[: result + 1]]
    dtypes = {"float": floats, "int": torch.int32, "bool": torch.bool}

    def evaluated(leaves: Mapping[str, Tensor]) -> Tensor:
        device = next(iter(leaves.values())).device
        found: list[Tensor] = []
        for op, operands, kind, value in nodes:
            args = [found[i] for i in operands]
            if op == "const":
                # Not torch.tensor, a tensor outside of the graph, which FlexAttention's lowering does not accept.
                found.append(torch.full((), float(value), dtype=dtypes[kind], device=device))
            elif op == "leaf":
                found.append(leaves[str(value)])
            elif op.startswith("load:"):
                found.append(_element(tensors[int(op[5:])].to(device), args).to(dtypes[kind]))
            elif op in ("float", "int"):
                found.append(args[0].to(dtypes[op]))
            elif op in ("//", "%") and nodes[operands[1]][0] != "const":
                none = args[1] == 0  # torch refuses to divide
                found.append(torch.where(none, 0, _TORCH[op](args[0], torch.where(none, 1, args[1]))))
            else:
                if kind == "float":  # torch would make float32 of integers, whatever `floats` is
                    args = [
                        x.to(floats) if nodes[i][2] == "int" else x
                        for i, x in zip(operands, args, strict=True)
                    ]
                found.append((_TORCH.get(op) or getattr(torch, op))(*args))
        return found[result]

    return evaluated


def _element(x: Tensor, at: Sequence[Tensor]) -> Tensor:
    """Elements of a captured tensor."""
    inside = (i.long() + (i < 0) * n for i, n in zip(at, x.shape, strict=True))
    return x[tuple(i.clamp(0, n - 1) for i, n in zip(inside, x.shape, strict=True))]
