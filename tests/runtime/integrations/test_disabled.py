"""ATTNFORGE_DISABLE=1: what replaces other libraries' attention changes nothing, and says so once."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.runtime.build.settings import DISABLE, SettingsError
from attnforge.runtime.integrations import sdpa, torch_backend


@pytest.fixture(autouse=True)
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, "1")
    monkeypatch.setattr("attnforge.runtime.build.settings._warned", set())


def test_sdpa_stays_torchs(caplog: pytest.LogCaptureFixture) -> None:
    torchs = F.scaled_dot_product_attention
    attnforge.enable()
    attnforge.enable()
    with attnforge.sdpa():
        assert F.scaled_dot_product_attention is torchs
    assert sdpa._current is None
    attnforge.disable()
    said = [record.message for record in caplog.records]
    assert [text.partition(" changes")[0] for text in said] == [
        f"{DISABLE}=1: attnforge.enable()",
        f"{DISABLE}=1: attnforge.sdpa()",
    ]


def test_torchs_flash_backend_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name can still be activated."""
    registry: Any = nn.attention
    if not hasattr(registry, "register_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} has no register_flash_attention_impl")
    monkeypatch.setattr(torch_backend, "Library", None)  # nothing may be registered
    attnforge.register_torch()
    registry.activate_flash_attention_impl("attnforge")
    registry.restore_flash_attention_impl()


def test_the_name_in_transformers_stands_for_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"sdpa": object()}
    masks: dict[str, Any] = {}

    class AttentionInterface:
        register = staticmethod(known.__setitem__)

        def __getitem__(self, name: str) -> object:
            return known[name]

    class AttentionMaskInterface:
        register = staticmethod(masks.__setitem__)

    transformers, utils = ModuleType("transformers"), ModuleType("transformers.masking_utils")
    vars(transformers).update(AttentionInterface=AttentionInterface, __version__="4.53.0")
    masks_of_torch = {name: lambda name=name, **_: name for name in ("sdpa_mask", "eager_mask")}
    vars(utils).update(AttentionMaskInterface=AttentionMaskInterface, **masks_of_torch)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", utils)
    attnforge.register_huggingface()
    assert known["attnforge"] is known["sdpa"]
    assert masks["attnforge"](config=None) == "sdpa_mask"


def test_checkpointing_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher cannot be built."""
    monkeypatch.setattr("attnforge.runtime.integrations.checkpointing.operators", None)
    runs = []

    def layer(x: Tensor) -> Tensor:
        runs.append(1)
        return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 1, 8, 8, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False, context_fn=attnforge.save_attention).sum().backward()
    assert len(runs) == 2
    assert x.grad is not None


def test_direct_calls_keep_working() -> None:
    """They have no other attention to fall back to."""
    q = torch.randn(1, 1, 8, 16)
    assert torch.allclose(attnforge.attention(q, q, q), F.scaled_dot_product_attention(q, q, q), atol=1e-5)


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, "yes")
    with pytest.raises(SettingsError, match="ATTNFORGE_DISABLE='yes': accepted are 0 and 1"):
        attnforge.enable()
