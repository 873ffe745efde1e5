"""`attnforge.bagel.patch()`: ByteDance-Seed/Bagel or NeMo Automodel's port of it, unmodified, on our kernels.

Replaced are module globals and methods, all looked up at call time, so models, FSDP and checkpoint wrappers that
exist already follow. Before anything is touched, every function that is replaced or relied on is checked for its
parameters and for the globals that it calls (bagel/trainer/ports.py).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any, Literal

from attnforge.bagel.trainer import layers, substitutes
from attnforge.bagel.trainer.ports import Port, pick
from attnforge.runtime.build.settings import disabled
from attnforge.runtime.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

logger = logging.getLogger("attnforge")

FLASH = "flash_attn"


@dataclass(frozen=True)
class _Change:
    owner: Any
    name: str
    original: Any
    ours: Any

    def apply(self) -> None:
        setattr(self.owner, self.name, self.ours)

    def undo(self) -> None:
        if vars(self.owner)[self.name] is self.ours:
            setattr(self.owner, self.name, self.original)
        else:  # not ours to take away
            logger.warning("unpatch: other code has replaced %s, which stays as it is", self.name)


_lock = threading.RLock()
_changes: list[_Change] | None = None  # None: not patched
_stand_in: types.ModuleType | None = None


class Patched:
    """The result of `patch`: a context manager that unpatches at its end, if this call of `patch` patched."""

    def __init__(self, applied: bool) -> None:
        self._applied = applied

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, *error: object) -> None:
        if self._applied:
            unpatch()


def patch(*, deep: bool = False, trainer: Literal["bagel", "nemo"] | None = None) -> Patched:
    """Run BAGEL's attention on our kernels, until `unpatch()` or the end of a `with` block.

    trainer: "bagel" is ByteDance-Seed/Bagel, with the repository's root on sys.path; where flash-attn is absent,
        call it before `modeling` is imported: `import flash_attn` then finds ours. "nemo" is NVIDIA's NeMo
        Automodel. None: the one that is imported already or that is installed. Before the first forward pass.
    deep: replace the attention layers' forward_train too, so that no padding, no scatters and gathers of q, k and v
        and no copy of the output is left of them; the norms of q and k and their rotary embedding become one kernel.
        Needs code that is exactly as known.

    - use_flex on: the mask is two int32 per token, built once per micro-step; nothing is padded but the output.
    - use_flex off: the dense masks become the same once per micro-step; K and V are not repeated.
    - SigLIP and inference: our `flash_attn_varlen_func`, whether flash-attn is installed or not.
    - The VAE's attention (head_dim 512): ours in 16 bits without gradients, as the trainer calls it under autocast;
      torch's for other calls, and if the VAE's code is not as known. The logger "attnforge" says why.

    Patching twice changes nothing. With ATTNFORGE_DISABLE=1 nothing is patched, and the trainer needs flash-attn again.
    Raises RuntimeError, naming each difference, if the code is not as known or cannot be imported; nothing is patched
    then.
    """
    global _changes
    if disabled(
        "attnforge.bagel.patch()", "the trainer runs its own attention, for which it needs flash_attn"
    ):
        return Patched(applied=False)
    with _lock:
        if _changes is not None:
            return Patched(applied=False)
        port = pick(trainer)
        if port.needs_flash_attn:
            _install_flash_attn()
        try:
            port.load()
            _check(port, deep)
        except BaseException:
            _remove_flash_attn()
            raise
        _changes = [*_plan(port, deep), *_vae(port)]
        for change in _changes:
            change.apply()
        return Patched(applied=True)


def unpatch() -> None:
    """Restore everything that `patch` replaced; without a patch, do nothing."""
    global _changes
    with _lock:
        for change in _changes or ():
            change.undo()
        _changes = None
        _remove_flash_attn()


def _check(port: Port, deep: bool) -> None:
    differences = [line for known in port.known(deep) for line in known.differences()]
    if deep and not differences:
        differences = layers.differences(sys.modules[port.qwen])
    if differences:
        hint = "\nWithout deep=True less must be as known" if deep else ""
        raise RuntimeError(
            f"patch: attnforge does not know this version of {port.title}; nothing is patched:\n  "
            + "\n  ".join(differences)
            + hint
        )


def _plan(port: Port, deep: bool) -> list[_Change]:
    bagel, qwen, siglip = (sys.modules[name] for name in port.modules)
    model: Any = vars(qwen)["Qwen2Model"]
    replaced: list[tuple[Any, str, Any]] = [
        (bagel, "create_sparse_mask", substitutes.create_sparse_mask),
        (bagel, "create_block_mask", substitutes.create_block_mask),
        (qwen, port.pad, substitutes.pad_sequence),
        (qwen, port.flex, substitutes.flex_attention),
        (qwen, port.varlen, flash_attn_varlen_func),
        (siglip, port.varlen, flash_attn_varlen_func),
        (model, "forward_train", substitutes.model_forward_train(model.forward_train)),
    ]
    if deep:
        parts = layers.Parts(qwen)
        replaced += [
            (vars(qwen)[name], "forward_train", make(vars(qwen)[name].forward_train, parts))
            for name, make in (("PackedAttention", layers.dense), ("PackedAttentionMoT", layers.mixture))
        ]
    return [_Change(owner, name, vars(owner)[name], ours) for owner, name, ours in replaced]


def _vae(port: Port) -> list[_Change]:
    """The change of the VAE's attention; none if that is not as known: all else works without it."""
    if reason := port.why_not_vae():
        logger.info("patch: the VAE's attention stays as it is: %s", reason)
        return []
    block: Any = vars(sys.modules[port.vae])["AttnBlock"]
    return [_Change(block, "attention", block.attention, substitutes.vae_attention(block.attention))]


def _install_flash_attn() -> None:
    """Put a module with our functions under the name flash_attn, if there is none."""
    global _stand_in
    if FLASH in sys.modules or importlib.util.find_spec(FLASH) is not None:
        return
    module = types.ModuleType(
        FLASH, "attnforge's functions under flash-attn's name; see attnforge.bagel.patch"
    )
    # transformers looks the module's spec up through importlib, which fails for a module without one.
    module.__spec__ = importlib.machinery.ModuleSpec(FLASH, None)
    vars(module).update(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    sys.modules[FLASH] = _stand_in = module


def _remove_flash_attn() -> None:
    global _stand_in
    if _stand_in is not None and sys.modules.get(FLASH) is _stand_in:
        del sys.modules[FLASH]
    _stand_in = None
