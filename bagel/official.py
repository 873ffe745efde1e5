"""`attnforge.bagel.patch()`: the official trainer (ByteDance-Seed/Bagel), unmodified, on our kernels.

Replaced are module globals and one method, all looked up at call time, so models, FSDP and checkpoint wrappers
that exist already follow. Before anything is touched, every function that is replaced or relied on is checked
for its parameters and for the globals that it calls.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

from attnforge.bagel import substitutes
from attnforge.runtime.dropins import flash_attn_func, flash_attn_varlen_func

logger = logging.getLogger("attnforge")

BAGEL = "modeling.bagel.bagel"
QWEN = "modeling.bagel.qwen2_navit"
SIGLIP = "modeling.bagel.siglip_navit"
FLASH = "flash_attn"


@dataclass(frozen=True)
class _Known:
    """A function as we know it: its first parameters, and globals that it must call."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    def differences(self) -> list[str]:
        """What is different here; the module is imported."""
        value: Any = sys.modules[self.module]
        for part in self.name.split("."):
            value = getattr(value, part, None)
        where = f"{self.module}.{self.name}"
        if not callable(value):
            return [f"{where} is missing"]
        function = inspect.unwrap(value)
        found = []
        if self.parameters:
            names = tuple(inspect.signature(function).parameters)
            if names[: len(self.parameters)] != self.parameters:
                found.append(f"{where} takes ({', '.join(names)}), not ({', '.join(self.parameters)})")
        code = getattr(function, "__code__", None)
        missing = [name for name in self.calls if code is None or name not in code.co_names]
        return found + [f"{where} does not call {name}" for name in missing]


_TRAIN = ("self", "packed_sequence", "sample_lens", "attention_mask")
_KNOWN = (
    _Known(BAGEL, "create_sparse_mask", ("document_lens", "split_lens", "attn_modes", "device")),
    _Known(BAGEL, "create_block_mask", ("mask_mod",)),
    _Known(BAGEL, "Bagel.forward", calls=("create_sparse_mask", "create_block_mask")),
    _Known(QWEN, "pad_sequence", ("tensor", "pad_size")),
    _Known(QWEN, "flex_attention"),
    _Known(QWEN, "flash_attn_varlen_func"),
    _Known(QWEN, "Qwen2Model.forward_train", (*_TRAIN, "packed_position_ids")),
    *(
        _Known(
            QWEN,
            f"{layer}.forward_train",
            (*_TRAIN, "packed_position_embeddings"),
            ("flex_attention", "pad_sequence"),
        )
        for layer in ("PackedAttention", "PackedAttentionMoT")
    ),
    *(
        _Known(QWEN, f"{layer}.forward_inference", calls=("flash_attn_varlen_func",))
        for layer in ("PackedAttention", "PackedAttentionMoT")
    ),
    _Known(SIGLIP, "flash_attn_varlen_func"),
    _Known(SIGLIP, "SiglipFlashAttention2.forward", calls=("flash_attn_varlen_func",)),
)


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
            logger.warning("unpatch: %s was replaced again by somebody else and is left as it is", self.name)


_lock = threading.RLock()
_changes: list[_Change] | None = None  # None: not patched
_stand_in: types.ModuleType | None = None


class Patched:
    """What `patch` returns. As a context manager it unpatches at the end, if its own call has patched."""

    def __init__(self, applied: bool) -> None:
        self._applied = applied

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, *error: object) -> None:
        if self._applied:
            unpatch()


def patch() -> Patched:
    """Make ByteDance-Seed/Bagel's attention run on our kernels; `unpatch()` or the end of a `with` undoes it.

    Call it where `import modeling` works (the repository's root on sys.path), before the first forward pass;
    where flash-attn is absent, before modeling is imported: `import flash_attn` then finds ours.

    - use_flex on: the mask is two int32 per token, built once per micro-step; nothing is padded.
    - use_flex off: the dense masks become the same once per micro-step; K and V are not repeated.
    - SigLIP and inference: our `flash_attn_varlen_func`, whether flash-attn is installed or not.

    Patching twice changes nothing. Raises RuntimeError, naming each difference, if the code is not as known or
    cannot be imported; nothing is patched then.
    """
    global _changes
    with _lock:
        if _changes is not None:
            return Patched(applied=False)
        _install_flash_attn()
        try:
            _import_and_check()
        except BaseException:
            _remove_flash_attn()
            raise
        _changes = _plan()
        for change in _changes:
            change.apply()
        return Patched(applied=True)


def unpatch() -> None:
    """Put everything back that `patch` replaced; without a patch, do nothing."""
    global _changes
    with _lock:
        for change in _changes or ():
            change.undo()
        _changes = None
        _remove_flash_attn()


def _import_and_check() -> None:
    for name in (BAGEL, QWEN, SIGLIP):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise RuntimeError(
                f"patch: cannot import {name} ({error}); put the root of the Bagel repository on sys.path and "
                "install what it needs. Nothing is patched"
            ) from error
    differences = [line for known in _KNOWN for line in known.differences()]
    if differences:
        raise RuntimeError(
            "patch: this version of Bagel is not one that attnforge knows; nothing is patched:\n  "
            + "\n  ".join(differences)
        )


def _plan() -> list[_Change]:
    bagel, qwen, siglip = (sys.modules[name] for name in (BAGEL, QWEN, SIGLIP))
    model: Any = vars(qwen)["Qwen2Model"]
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (bagel, "create_sparse_mask", substitutes.create_sparse_mask),
        (bagel, "create_block_mask", substitutes.create_block_mask),
        (qwen, "pad_sequence", substitutes.pad_sequence),
        (qwen, "flex_attention", substitutes.flex_attention),
        (qwen, "flash_attn_varlen_func", flash_attn_varlen_func),
        (siglip, "flash_attn_varlen_func", flash_attn_varlen_func),
        (model, "forward_train", substitutes.model_forward_train(model.forward_train)),
    )
    return [_Change(owner, name, vars(owner)[name], ours) for owner, name, ours in replaced]


def _install_flash_attn() -> None:
    """Put a module with our functions under the name flash_attn, if there is none."""
    global _stand_in
    if FLASH in sys.modules or importlib.util.find_spec(FLASH) is not None:
        return
    module = types.ModuleType(
        FLASH, "attnforge's functions under flash-attn's name; see attnforge.bagel.patch"
    )
    # transformers asks importlib for it, and that fails for a module without one.
    module.__spec__ = importlib.machinery.ModuleSpec(FLASH, None)
    vars(module).update(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    sys.modules[FLASH] = _stand_in = module


def _remove_flash_attn() -> None:
    global _stand_in
    if _stand_in is not None and sys.modules.get(FLASH) is _stand_in:
        del sys.modules[FLASH]
    _stand_in = None
