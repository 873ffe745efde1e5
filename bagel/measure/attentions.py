"""What all peers share: the type of an attention, and the error of one that does not support a case."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k and v


class Unavailable(RuntimeError):
    """The peer does not support this case; the message appears in the table in place of a number."""
