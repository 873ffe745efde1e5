"""torch.func's transforms of attention: grad, vjp, vmap and functionalize; forward mode raises NotImplementedError.

The operators get a kernel at the dispatch key that is active inside transforms only, so other calls are not slower.
Importing this module registers the kernels: the extension must be loaded first, see native/launcher.py. Arguments are
identified by their names in the operators' schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    retrieve_current_functorch_interpreter,
)

from attnforge.runtime.functorch import KEY, functionalized, is_functionalize

_FORWARD, _BACKWARD = torch.ops.attnforge.forward.default, torch.ops.attnforge.backward.default

# (batch, heads, ...): batch entries are independent. Other tensors belong to the mask.
_BATCHED = ("q", "k", "v", "dout", "out", "lse", "dlse")
_INPUTS = ("q", "k", "v")


def _names(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def _values(op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, in the schema's order. The dispatcher leaves defaults out."""
    given = dict(zip(_names(op), args, strict=False)) | named
    return {a.name: given.get(a.name, a.default_value) for a in op._schema.arguments}


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _FORWARD(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        values = dict(zip(_names(_FORWARD), inputs, strict=True))
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        ctx.tensors = [*tensors, "out", "lse"]
        ctx.save_for_backward(*tensors.values(), *output)
        ctx.rest = {name: value for name, value in values.items() if name not in tensors}
        ctx.rest.pop("variant")  # that of the forward pass
        if "dlse" not in _names(_BACKWARD):
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        wanted = [n for n, need in zip(_names(_FORWARD), ctx.needs_input_grad, strict=True) if need]
        if any(name not in _INPUTS for name in wanted):
            raise NotImplementedError(
                "attnforge: score: gradients of captured tensors in torch.func's transforms are not implemented; "
                "use torch.autograd.grad or backward()"
            )
        values = ctx.rest | dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        values |= {"dout": dout, "dlse": dlse}
        gradients = _BACKWARD(*_values(_BACKWARD, (), values).values())
        by_name = dict(zip(_INPUTS, gradients, strict=True))
        return tuple(by_name.get(name) for name in _names(_FORWARD))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "attnforge: derivatives of attention in forward mode (jvp, jacfwd, linearize) are not implemented; "
            "use torch.func.grad, vjp or jacrev"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _mapped(_FORWARD, info.batch_size, in_dims, arguments, _FORWARD)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _BACKWARD(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "attnforge: second derivatives of attention are not implemented; take the gradient once"
        )

    jvp = _Forward.jvp

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        # The operator refuses inputs that require grad outside of transforms; _Backward refuses in its backward.
        return _mapped(_BACKWARD, info.batch_size, in_dims, arguments, _Backward.apply)


def _mapped(op: Any, size: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...], run: Any) -> Any:
    """`op` over `size` problems: one call with a larger batch if the mask has no tensors, else one call each.

    run: what is called, with all arguments of `op`.
    """
    values = dict(zip(_names(op), arguments, strict=True))
    dims = dict(zip(values, in_dims, strict=True))
    first = {name: _dim_first(x, dims[name], size) for name, x in values.items() if isinstance(x, Tensor)}
    if first.keys() <= set(_BATCHED) and not (
        values["score"] or values["mask_mod"]
    ):  # these may depend on it
        folded = values | {name: x.flatten(0, 1) for name, x in first.items()}
        batch = first["q"].shape[1]
        results = [x.unflatten(0, (size, batch)) for x in run(*folded.values())]
    else:
        if size == 0:  # shapes of results are those of one problem
            first = {n: x.new_zeros((1, *x.shape[1:])) for n, x in first.items()}
        problems = (run(*(values | {n: x[i] for n, x in first.items()}).values()) for i in range(size or 1))
        results = [torch.stack(outputs)[:size] for outputs in zip(*problems, strict=True)]
    return tuple(results), (0,) * len(results)


def _dim_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _kernel(op: Any, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    def transformed(*args: Any, **named: Any) -> Any:
        values = _values(op, args, named)
        interpreter = retrieve_current_functorch_interpreter()
        if is_functionalize(interpreter):
            return functionalized(interpreter, op, tuple(values.values()))
        if any(map(is_functionalize, retrieve_all_functorch_interpreters())):
            raise NotImplementedError(
                "attnforge: torch.func.functionalize around another transform of attention is not implemented; "
                "use functionalize inside of it"
            )
        if op is _FORWARD:
            values |= _autocast({name: values[name] for name in _INPUTS})
        return function.apply(*values.values())

    return transformed


def _autocast(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs, cast as the operator would cast them: `backward` must get the same tensors."""
    place = inputs["q"].device.type
    if not torch.is_autocast_enabled(place):
        return inputs
    dtype = torch.get_autocast_dtype(place)
    return {
        n: x.to(dtype) if x.is_floating_point() and x.dtype != torch.double else x for n, x in inputs.items()
    }


def _decompose(op: Any) -> Callable[..., Any]:
    """The kernel of an `attend` operator: it decomposes into `forward` without consuming the dispatch key."""

    def decomposed(*args: Any, **named: Any) -> Any:
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **named)

    return decomposed


torch.library.impl("attnforge::forward", KEY, _kernel(_FORWARD, _Forward))
torch.library.impl("attnforge::backward", KEY, _kernel(_BACKWARD, _Backward))
for _name in torch._C._dispatch_get_all_op_names():
    if _name.startswith("attnforge::attend"):
        torch.library.impl(_name, KEY, _decompose(getattr(torch.ops.attnforge, _name.split("::")[1]).default))
