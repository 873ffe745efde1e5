"""attnforge.bagel.patch(): all of it or nothing, undone without a trace, and only on code that it knows."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from trainer import PAD, STANDIN, batch, clean, flash_attn, make_model, stock_varlen, train

import attnforge
from attnforge.bagel.trainer.patch import FLASH
from attnforge.bagel.trainer.ports import BAGEL, QWEN, SIGLIP
from attnforge.runtime.build.settings import DISABLE

__all__ = ["clean", "flash_attn"]  # fixtures


def snapshot() -> dict[tuple[str, str], Any]:
    modules = [sys.modules[name] for name in (BAGEL, QWEN, SIGLIP)]
    values = {(m.__name__, name): value for m in modules for name, value in vars(m).items()}
    return values | {("Qwen2Model", k): v for k, v in vars(sys.modules[QWEN].Qwen2Model).items()}


def changed(before: dict[tuple[str, str], Any]) -> set[str]:
    return {name for (owner, name), value in snapshot().items() if before.get((owner, name)) is not value}


def test_patching_twice_and_unpatching_twice_change_nothing(flash_attn: types.ModuleType) -> None:
    make_model()
    before = snapshot()
    attnforge.bagel.unpatch()
    outer = attnforge.bagel.patch()
    patched = snapshot()
    assert changed(before) == {
        "create_sparse_mask",
        "create_block_mask",
        "pad_sequence",
        "flex_attention",
        "flash_attn_varlen_func",
        "forward_train",
    }
    with attnforge.bagel.patch():
        assert not changed(patched)
    assert not changed(patched)  # the inner block did not patch, so it does not unpatch
    assert sys.modules[FLASH] is flash_attn
    assert flash_attn.flash_attn_varlen_func is stock_varlen
    with outer:
        pass
    assert not changed(before)
    attnforge.bagel.unpatch()
    assert not changed(before)


def test_a_disabled_patch_leaves_the_trainer_alone(
    flash_attn: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DISABLE, "1")
    monkeypatch.setattr("attnforge.runtime.build.settings._warned", set())
    make_model()
    before = snapshot()
    for _ in range(2):
        with attnforge.bagel.patch(deep=True):
            assert not changed(before)
    assert [record.message for record in caplog.records] == [
        "ATTNFORGE_DISABLE=1: attnforge.bagel.patch() changes nothing; the trainer runs its own attention, for which "
        "it needs flash_attn"
    ]
    monkeypatch.setenv(DISABLE, "0")
    with attnforge.bagel.patch():
        assert changed(before)


@pytest.mark.skipif(importlib.util.find_spec(FLASH) is not None, reason="flash-attn is installed")
def test_flash_attn_is_satisfied_where_it_is_absent() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(QWEN)
    with attnforge.bagel.patch():
        assert importlib.util.find_spec(FLASH) is not None  # transformers asks
        module: Any = importlib.import_module(FLASH)
        assert module.flash_attn_varlen_func is attnforge.flash_attn_varlen_func
        loss, _ = train(make_model(), batch(True, PAD, True), torch.bfloat16)
        assert loss > 0
    assert FLASH not in sys.modules


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        (QWEN, "pad_sequence", None, "qwen2_navit.pad_sequence is missing"),
        (QWEN, "pad_sequence", lambda tensor, size, side: tensor, "pad_sequence takes (tensor, size, side)"),
        (BAGEL, "create_sparse_mask", lambda lens: lens, "create_sparse_mask takes (lens)"),
        (
            SIGLIP,
            "SiglipFlashAttention2",
            type("Other", (), {"forward": lambda self, x: x}),
            "SiglipFlashAttention2.forward does not call flash_attn_varlen_func",
        ),
    ],
)
def test_an_unknown_version_is_left_alone(
    module: str, name: str, value: Any, message: str, flash_attn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model()
    monkeypatch.setattr(sys.modules[module], name, value)
    before = snapshot()
    with pytest.raises(RuntimeError) as caught:
        attnforge.bagel.patch()
    assert message in str(caught.value)
    assert "nothing is patched" in str(caught.value)
    assert not changed(before)


def test_without_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(STANDIN)])
    with pytest.raises(RuntimeError, match=r"cannot import modeling\.bagel\.bagel"):
        attnforge.bagel.patch()
    assert not isinstance(sys.modules.get(FLASH), types.ModuleType)
