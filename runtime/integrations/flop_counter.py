"""torch.utils.flop_counter: what `FlopCounterMode` counts for attention.

Torch's own convention for SDPA and FlexAttention: 2 FLOPs for each multiply-add of the matrix products, of all Sq x Sk
pairs, whatever the mask hides, for each query head. Forward: q k^T and p v. Backward: five products, one of them q k^T
again. Softmax, scores, sinks and `qk_norm_rope` count as zero. A count follows from shapes alone: counting never waits
for a device, and real and fake tensors agree. Calls of `flash_attn_varlen_func` count the packed sequences as one,
where torch's varlen operator adds up the documents. The share of pairs that a mask shows is abs(mask.visible_keys) /
Sk, where it is known on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

MODULE = "torch.utils.flop_counter"


def _forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * _pairs(q, k) * (q[3] + v[3])


def _backward_flops(
    dout: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    # S and dP again, then dV, dQ and dK.
    return 2 * _pairs(q, k) * (3 * q[3] + 2 * v[3])


def _pairs(q: Sequence[int], k: Sequence[int]) -> int:
    return q[0] * q[1] * q[2] * k[2]


_FORMULAS: dict[str, Callable[..., int]] = {
    "forward": _forward_flops,
    "backward": _backward_flops,
    "score_backward": _backward_flops,
}


def register() -> None:
    """Let torch's counter know our operators, which must be loaded. Imports it only if the program does.

    Importing it takes 0.35 s where Triton is not imported yet (torch 2.13), half as long as importing attnforge.
    """
    if MODULE in sys.modules:
        _add(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, _WhenImported())


def _add(counter: ModuleType) -> None:
    for name, formula in _FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.attnforge, name))(formula)
    # A counter copies the table when it is made: the first call of all may be inside one.
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counter._FlopCounterMode):
            mode.counter.flop_registry = counter.flop_registry | mode.counter.flop_registry


class _WhenImported(MetaPathFinder):
    """Adds the formulas after torch's module has been executed."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _add(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
