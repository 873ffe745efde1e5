"""A cache of traces of Python functions of masks and scores.

Such a function is often made anew for each step, around tensors of this step: `lambda b, h, i, j: ids[i] == ids[j]`.
`describe` gives a key of everything that its trace can depend on: its code, numbers, functions that it calls, and
dtypes, shapes and strides of tensors, but not their values. A function with a known key is not traced again; its text
is that of the earlier function, and its own tensors take the places of the other's. A function that reads anything
else, such as attributes of an object, has no key and is traced every time.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

MOST = 256  # traces that are kept
MOST_ITEMS = 64  # of a list that is described
# Packages whose functions give the same results for the same arguments, so that they need no description.
PACKAGES = frozenset({"builtins", "functools", "math", "operator", "torch"})
# Builtins by which a function can read what its code does not name.
_REVEALING = frozenset({"__import__", "eval", "exec", "globals", "input", "locals", "open", "vars"})
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)

Key = tuple[Hashable, ...]


class _Indescribable(Exception):
    """A value of which a key cannot say everything that a function may read of it."""


@dataclass(frozen=True)
class Description:
    """A function's key, and the tensors that it can read in the order in which the key names them."""

    key: Key
    tensors: tuple[Tensor, ...]

    def places(self, captured: Sequence[Tensor]) -> tuple[int, ...] | None:
        """Positions of `captured` in `tensors`; None if one is not there, because the function made it."""
        numbers = {id(x): i for i, x in enumerate(self.tensors)}
        found = [numbers.get(id(x)) for x in captured]
        return None if None in found else tuple(i for i in found if i is not None)


def describe(function: Callable[..., Any], *facts: Hashable) -> Description | None:
    """The description of a function whose trace also depends on `facts`; None for one without a key."""
    search = _Search()
    try:
        key = (facts, _modes(), search.of(function))
        return Description(key, tuple(search.tensors))
    except _Indescribable:
        return None


def _modes() -> Key:
    autocast = tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.get_default_dtype(), torch.is_inference_mode_enabled(), autocast


class _Search:
    """Walks through the values that a function can read, each once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.met: dict[int, int] = {}  # tensors, functions and lists by id: the order in which they were met

    def of(self, value: object) -> Hashable:
        """The description of a value. Raises _Indescribable."""
        if isinstance(value, _PLAIN):
            if type(value) not in _PLAIN:
                raise _Indescribable  # a subclass, of which the value is not all
            return type(value), repr(value)  # True, 1 and 1.0 are equal
        if id(value) in self.met:
            return "again", self.met[id(value)]
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list) and len(value) <= MOST_ITEMS:
            self._meet(value)
            return type(value), tuple(self.of(x) for x in value)
        if type(value) is partial:
            keywords = tuple((name, self.of(x)) for name, x in value.keywords.items())
            return partial, self.of(value.func), self.of(value.args), keywords
        if _is_known(value):
            return "known", id(value)  # it lives as long as its package
        raise _Indescribable

    def _meet(self, value: object) -> None:
        self.met[id(value)] = len(self.met)

    def _tensor(self, x: Tensor) -> Hashable:
        if (
            type(x) not in (Tensor, nn.Parameter)
            or is_functorch_wrapped_tensor(x)
            or x.layout != torch.strided
        ):
            raise _Indescribable
        self._meet(x)
        self.tensors.append(x)
        return "tensor", x.dtype, x.device, tuple(x.shape), x.stride(), x.requires_grad, x.is_inference()

    def _function(self, function: FunctionType) -> Hashable:
        if function.__closure__ is None and _package(function.__module__) in PACKAGES:
            return "known", id(function)
        if function.__dict__:
            raise _Indescribable  # such as __wrapped__, or a counter
        self._meet(function)
        code, outside = function.__code__, function.__globals__
        names = _globals_of(code)
        if names is None or not _REVEALING.isdisjoint(names - outside.keys()):
            raise _Indescribable
        reads = tuple((name, self.of(outside[name])) for name in sorted(names & outside.keys()))
        try:
            cells = tuple(self.of(cell.cell_contents) for cell in function.__closure__ or ())
        except ValueError:  # a variable that has no value yet
            raise _Indescribable from None
        defaults = (
            self.of(function.__defaults__),
            tuple((name, self.of(x)) for name, x in (function.__kwdefaults__ or {}).items()),
        )
        return code, function.__name__, cells, reads, defaults


@lru_cache(maxsize=MOST)
def _globals_of(code: CodeType) -> frozenset[str] | None:
    """Names of globals and builtins that a code and its inner functions read.

    None if they import from other packages, or assign variables outside of the function, which a trace does once.
    """
    names = set()
    for step in dis.get_instructions(code):
        match step.opname:
            case "IMPORT_NAME" if _package(step.argval) not in PACKAGES:
                return None
            case "STORE_GLOBAL" | "DELETE_GLOBAL":
                return None
            case "STORE_DEREF" | "DELETE_DEREF" if step.argval in code.co_freevars:
                return None
            case "LOAD_GLOBAL" | "LOAD_NAME" | "LOAD_FROM_DICT_OR_GLOBALS":
                names.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _globals_of(constant)
            if inner is None:
                return None
            names |= inner
    return frozenset(names)


def _is_known(value: object) -> bool:
    """Is it a module, a type or a function of PACKAGES?"""
    if isinstance(value, ModuleType):
        return _package(value.__name__) in PACKAGES
    if isinstance(value, type):
        return _package(value.__module__) in PACKAGES
    if isinstance(value, BuiltinFunctionType):  # also methods of objects, such as x.item
        owner = value.__self__
        return owner is None or (isinstance(owner, (ModuleType, type)) and _is_known(owner))
    return False


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


class TraceCache:
    """Texts of functions by their keys, with the positions of the tensors that each text reads."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[str, tuple[int, ...]]] = {}
        self._lock = threading.Lock()  # of writers

    def find(self, description: Description | None) -> tuple[str, list[Tensor]] | None:
        """(text, captured tensors) of a function whose key is known, else None."""
        if description is None or (found := self._known.get(description.key)) is None:
            return None
        text, places = found
        return text, [description.tensors[i] for i in places]

    def keep(self, description: Description | None, text: str, captured: Sequence[Tensor]) -> None:
        """Keep the text of a function that reads no values of tensors, unless it captures one that it made."""
        if description is None or (places := description.places(captured)) is None:
            return
        with self._lock:
            while len(self._known) >= MOST:
                self._known.pop(next(iter(self._known)))
            self._known[description.key] = text, places
