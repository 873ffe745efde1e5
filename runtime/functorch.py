"""What the kernels of operators inside torch.func's transforms share."""

from __future__ import annotations

from typing import Any

from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import FuncTorchInterpreter
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

# The dispatch key that is active inside transforms only, so other calls are not slower.
KEY = "FuncTorchDynamicLayerFrontMode"


def is_functionalize(interpreter: FuncTorchInterpreter) -> bool:
    """Is this transform torch.func.functionalize?"""
    return interpreter.key() == TransformType.Functionalize


def functionalized(interpreter: FuncTorchInterpreter, op: Any, arguments: tuple[Any, ...]) -> Any:
    """Results of `op`, which changes nothing in place, inside functionalize."""
    around: Any = FunctorchFunctionalizeAPI(interpreter)  # type: ignore[arg-type]
    inputs = around.unwrap_tensors(arguments)
    with around.redispatch_to_next():
        return around.wrap_tensors(op(*inputs))
