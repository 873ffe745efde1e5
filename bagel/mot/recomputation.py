"""Products that a checkpoint's recomputation leaves out, because nothing of the layer's backward needs their results.

`torch.utils.checkpoint(use_reentrant=False)` ends a recomputation as soon as it has packed the last tensor that the
forward saved. A linear layer saves its input before it multiplies, so the recomputation ends before a layer's last
product; but it computes every product before that one. Where a layer ends in several, `Held` saves all their inputs
before the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Module = Callable[[Tensor], Tensor]


class _Hold(torch.autograd.Function):
    """Its inputs, which it saves."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class Held:
    """Inputs of the last modules of a checkpointed layer, saved together before the first module runs.

    `results` runs the modules. What they save of the inputs is a reference into this object; all else that they save
    (weights, which a recomputation does not change) they keep themselves.
    """

    def __init__(self, *inputs: Tensor) -> None:
        # A compiler plans the recomputation of a layer itself.
        held = inputs if torch.compiler.is_compiling() else _Hold.apply(*inputs)  # type: ignore[no-untyped-call]
        self.inputs: tuple[Tensor, ...] = held
        self._node: Any = None if held is inputs else held[0].grad_fn
        self._places: dict[int, int] = {}
        if self._node is not None:  # torch 2.11 cannot trace addresses as keys
            self._places = {x.data_ptr(): i for i, x in enumerate(self.inputs) if x.numel()}
        self._shapes = [x.shape for x in self.inputs]
        self._recomputed: dict[int, Tensor] = {}

    def results(self, *modules: Module) -> tuple[Tensor, ...]:
        """The result of each module on its input."""
        inputs, self.inputs = self.inputs, ()
        if self._node is None:  # no gradient is wanted
            return tuple(module(x) for module, x in zip(modules, inputs, strict=True))
        with saved_tensors_hooks(self._pack, self._unpack):
            return tuple(module(x) for module, x in zip(modules, inputs, strict=True))

    def _pack(self, x: Tensor) -> int | Tensor:
        place = self._places.get(x.data_ptr(), -1)
        return place if place >= 0 and x.shape == self._shapes[place] and x.is_contiguous() else x

    def _unpack(self, saved: int | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved not in self._recomputed:  # a checkpoint gives its tensors once in each backward
            self._recomputed.update(enumerate(self._node.saved_tensors))
        return self._recomputed.pop(saved)
