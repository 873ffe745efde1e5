"""A mode that counts the calls of our operators."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts the operators that reach the kernels: what selective checkpointing answers itself never does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))

    def count(self) -> tuple[int, int]:
        """(forward, backward) calls of ours."""
        return self.seen.count("attnforge.forward.default"), self.seen.count("attnforge.backward.default")
