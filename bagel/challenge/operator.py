"""The OpenKernel challenge: its operator on our kernels, its shapes and masks, and the module its harness imports.

    custom_attention.forward(q, k, v, mask)     # mask: True = blocked, the opposite of attnforge.DenseMask

`forward` here compiles at run time; `attnforge export --contract openkernel` writes the same as a package of its own.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from attnforge.runtime.export import Shape
from attnforge.runtime.masks import DenseMask
from attnforge.runtime.ops import attention
from attnforge.runtime.per_tensor import may_keep, once

NAME = "custom_attention"
# The final round: (batch, heads, rows, head_dim).
FINAL = (
    Shape(1, 5, 2651, 56),
    Shape(1, 5, 3366, 64),
    Shape(2, 13, 2872, 44),
    Shape(2, 14, 4096, 64),
    Shape(2, 10, 4096, 52),
    Shape(2, 7, 4096, 64),
    Shape(2, 4, 3594, 40),
    Shape(1, 6, 4096, 41),
    Shape(1, 11, 4096, 64),
    Shape(2, 14, 1808, 64),
)
# What else its scripts call: verify.py, and run.py's layer (samples of up to 2048 tokens, 32 heads).
OTHERS = (Shape(2, 4, 32, 16), Shape(1, 32, 2048, 64))

_MODULE = '''"""The OpenKernel challenge's operator, attnforge's (written by `attnforge challenge install`)."""

from attnforge.bagel.challenge.operator import forward

__all__ = ["forward"]
'''


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v without the blocked pairs, differentiable in q, k and v.

    q, k, v: (B, H, S, D), float32, float16 or bfloat16, any strides. mask: bool (S, S), True = blocked, the same for
    every batch entry and head; rows whose pairs are all blocked give zeros. What is made of a mask is kept with the
    tensor until it changes, for the next layer. Returns (B, H, S, D) in q's dtype, also under autocast. Raises
    ValueError or TypeError naming the argument, as `attnforge.attention`.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        what = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: got {what}, expected a bool tensor, True = blocked")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        out = attention(q, k, v, once(_visible, mask) if may_keep(mask) else _visible(mask))
    assert isinstance(out, Tensor)
    return out


def _visible(blocked: Tensor) -> DenseMask:
    return DenseMask(blocked.logical_not())


def final_mask(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """The final round's mask, bool (rows, rows), True = blocked: a quarter text, then an image's VAE tokens.

    Text is causal among itself and sees every VAE token; VAE tokens see each other and no text.
    """
    text = rows // 4
    row = torch.arange(rows, device=device)
    later = row[None] > row[:, None]
    is_text = row < text
    return torch.where(is_text[:, None], is_text[None] & later, is_text[None])


def install(directory: Path | None = None) -> Path:
    """Write the package `custom_attention` into `directory` (None: this Python's site-packages); returns its file.

    It imports `forward` from here, so that `import custom_attention` finds it. Raises ValueError where another
    `custom_attention` is installed.
    """
    package = (directory or Path(sysconfig.get_path("purelib"))) / NAME
    path = package / "__init__.py"
    foreign = [p.name for p in package.iterdir() if p.name != "__pycache__"] if package.is_dir() else []
    if foreign and not (foreign == [path.name] and path.read_text() == _MODULE):
        raise ValueError(
            f"{package} holds another {NAME} ({', '.join(sorted(foreign)[:3])}); remove it first"
        )
    package.mkdir(parents=True, exist_ok=True)
    path.write_text(_MODULE)
    return path
