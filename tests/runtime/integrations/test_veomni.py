"""`register_veomni` through VeOmni's dispatch: its own where it is installed, else stand-ins of its names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
import trainers
from ranks import torchrun
from torch import Tensor, nn

import attnforge
from attnforge.runtime.build.settings import DISABLE
from attnforge.runtime.integrations import veomni
from attnforge.runtime.integrations.veomni import FULL_NAME

HERE = Path(__file__).parent
ROWS = 40
ONE = SimpleNamespace(cp_size=1, ulysses_enabled=False, ulysses_size=1, ulysses_group=None)
TWO = SimpleNamespace(cp_size=1, ulysses_enabled=True, ulysses_size=2, ulysses_group="ranks")


def layer(is_causal: bool = True) -> nn.Module:
    module: Any = nn.Module()
    module.is_causal = is_causal
    module.config = SimpleNamespace(_attn_implementation=FULL_NAME)
    made: nn.Module = module
    return made


def draw(batch: int = 1) -> tuple[Tensor, ...]:
    """q, k, v (batch, heads, ROWS, 16), which require gradients, and dout."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(batch, n, ROWS, 16, generator=generator) for n in (4, 2, 2, 4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def eager(
    x: tuple[Tensor, ...], visible: Tensor, cap: float | None, sinks: Tensor | None
) -> tuple[Tensor, ...]:
    """Output (B, S, H, D) and gradients in float64, with all scores."""
    q, k, v = (t.detach().double().requires_grad_() for t in x[:3])
    score = 0.3 * q @ k.repeat_interleave(2, 1).mT
    score = score if cap is None else cap * torch.tanh(score / cap)
    score = score.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        score = torch.cat((score, sinks.double()[None, :, None, None].expand(*score.shape[:3], 1)), -1)
    weights = score.softmax(-1)[..., :ROWS]
    out = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), x[3].double().transpose(1, 2))


def visible_pairs(samples: list[int] | None, window: int | None, is_causal: bool) -> Tensor:
    row, key = torch.arange(ROWS)[:, None], torch.arange(ROWS)
    visible = key <= row if is_causal else torch.ones(ROWS, ROWS, dtype=torch.bool)
    if window is not None:
        visible = visible & ((row - key).abs() < window)
    if samples is not None:
        sample = torch.bucketize(torch.arange(ROWS), torch.tensor(samples[1:]), right=True)
        visible = visible & (sample[:, None] == sample)
    return visible


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("samples", [None, [0, 13, 14, ROWS]])
@pytest.mark.parametrize("extra", ["none", "window", "wide window", "softcap", "sinks"])
def test_attention_through_the_dispatch(
    extra: str, samples: list[int] | None, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = trainers.veomni(monkeypatch, ONE)
    attnforge.register_veomni()
    window = {"window": 7, "wide window": ROWS}.get(extra)
    cap = 2.0 if extra == "softcap" else None
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if extra == "sinks" else None
    x = draw(1 if samples else 2)
    named: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "softcap": cap, "s_aux": sinks}
    if samples is not None:
        edges = torch.tensor(samples, dtype=torch.int32)
        named |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 26, "max_length_k": 26}
    out, weights = modules.known[FULL_NAME](layer(is_causal), *x[:3], None, **named)
    assert weights is None
    assert modules.exchanged == []
    ours = (out.detach(), *torch.autograd.grad(out, x[:3], x[3].transpose(1, 2)))
    for a, b in zip(ours, eager(x, visible_pairs(samples, window, is_causal), cap, sinks), strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)


def test_ulysses_exchanges_around_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for modules that skip it. The worker has exchanges between real ranks."""
    modules = trainers.veomni(monkeypatch, TWO)
    attnforge.register_veomni()
    x = draw()
    out, _ = modules.known[FULL_NAME](layer(), *x[:3], None, scaling=0.3)
    assert modules.exchanged == ["prepare", "restore"]
    again, _ = modules.known[FULL_NAME](layer(), *x[:3], None, scaling=0.3, skip_ulysses=True)
    assert modules.exchanged == ["prepare", "restore"]
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    ("state", "mask", "named", "message"),
    [
        (SimpleNamespace(**vars(ONE) | {"cp_size": 2}), None, {}, "cp_size: got 2"),
        (ONE, None, {"dropout": 0.1}, "dropout: got 0.1"),
        (ONE, None, {"output_attentions": True}, "output_attentions"),
        (TWO, torch.ones(1, 1, 20, 20, dtype=torch.bool), {}, "attention_mask: got shape"),
        (TWO, torch.ones(1, 4, ROWS, ROWS, dtype=torch.bool), {}, "attention_mask: got shape"),
        (
            TWO,
            None,
            {"position_bias": torch.zeros(1, 4, ROWS, ROWS)},
            "position_bias: not supported with Ulysses",
        ),
    ],
)
def test_calls_that_are_refused(
    state: Any, mask: Tensor | None, named: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = trainers.veomni(monkeypatch, state)
    attnforge.register_veomni()
    with pytest.raises(ValueError, match=message):
        modules.known[FULL_NAME](layer(), *draw()[:3], mask, **named)


def test_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = trainers.veomni(monkeypatch, ONE)
    attnforge.register_veomni()
    make = modules.masks[FULL_NAME]
    padded = torch.arange(ROWS)[None] > 3
    assert make(1, ROWS, ROWS) is None
    assert make(1, ROWS, ROWS, attention_mask=torch.ones_like(padded), local_size=7) is None
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    assert make(1, ROWS, ROWS, **skips) is None
    for given in (
        {"attention_mask": padded},  # padding
        {"allow_is_causal_skip": False},  # another mask than the causal one
        {"q_offset": 3},  # a cache
    ):
        name, _, named = make(1, ROWS, ROWS, **given)
        assert name == "sdpa_mask"
        assert named["attention_mask"] is given.get("attention_mask")
        assert not named["allow_is_causal_skip"]


def test_masks_under_ulysses(monkeypatch: pytest.MonkeyPatch) -> None:
    """attention_mask has all columns, and the rows are those of one rank."""
    modules = trainers.veomni(monkeypatch, TWO)
    attnforge.register_veomni()
    make = modules.masks[FULL_NAME]
    ones = torch.ones(1, 2 * ROWS, dtype=torch.bool)
    assert make(1, ROWS, 2 * ROWS, attention_mask=ones) is None
    for given in ({"attention_mask": ones.logical_not()}, {"allow_is_causal_skip": False}):
        with pytest.raises(ValueError, match="attention_mask: with Ulysses"):
            make(1, ROWS, 2 * ROWS, **given)


def test_the_name_is_accepted_and_other_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = trainers.veomni(monkeypatch, ONE)
    bound = trainers.module(
        monkeypatch, "veomni.models.omni", VARLEN_ATTENTION_TYPES=modules.varlen.VARLEN_ATTENTION_TYPES
    )
    attnforge.register_veomni()
    attnforge.register_veomni()
    config = modules.arguments.OpsImplementationConfig
    assert config("attnforge").attn_implementation == FULL_NAME
    assert config().attn_implementation == "veomni_flash_attention_2_with_sp"
    literal = get_args(get_type_hints(config)["attn_implementation"])[0]
    assert get_args(literal) == ("eager", "flash_attention_2", "attnforge")
    for where in (bound, modules.varlen):
        assert where.VARLEN_ATTENTION_TYPES == ("flash_attention_2", FULL_NAME)
    assert modules.gpt_oss.GptOssPreTrainedModel._compatible_flash_implementations == ["theirs", FULL_NAME]
    kernel = modules.flash._load_veomni_local_flash_kernel(FULL_NAME)
    assert kernel.flash_attn_varlen_func is attnforge.flash_attn_varlen_func
    with pytest.raises(ValueError, match="unheard"):
        modules.flash._load_veomni_local_flash_kernel("unheard")


def test_disabled_is_veomnis_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE, "1")
    modules = trainers.veomni(monkeypatch, ONE)
    attnforge.register_veomni()
    config = modules.arguments.OpsImplementationConfig("attnforge")
    assert config.attn_implementation == "veomni_flash_attention_2_with_sp"
    assert FULL_NAME not in modules.known


def test_an_unknown_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = trainers.veomni(monkeypatch, ONE)
    del modules.ulysses.prepare_ulysses_qkv
    monkeypatch.setattr("attnforge.runtime.integrations.trainers.metadata.version", lambda package: "9.9")
    with pytest.raises(
        RuntimeError, match=r"veomni 9\.9; nothing(.|\n)*ulysses.prepare_ulysses_qkv is missing"
    ):
        attnforge.register_veomni()
    assert FULL_NAME not in modules.known


@pytest.mark.parametrize("name", ["veomni", "nemo"])
def test_without_the_package_the_name_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"veomni": "veomni", "nemo": "nemo_automodel"}[name]
    monkeypatch.setattr(sys, "meta_path", [Absent(package), *sys.meta_path])
    for module in list(sys.modules):
        if module.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, module)
    register: Callable[[], None] = getattr(attnforge, f"register_{name}")
    with pytest.raises(ImportError, match=f"register_{name}: .* is not installed"):
        register()


class Absent:
    """A finder for which a package does not exist."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)


def importable() -> None:
    """Skips unless VeOmni is installed; its import changes transformers, so another process does it."""
    pytest.importorskip("transformers")
    if importlib.util.find_spec("veomni") is None:
        pytest.skip("VeOmni is not installed")
    program = f"import {', '.join(veomni._NEEDED)}"
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"VeOmni cannot be imported: {done.stderr.strip().splitlines()[-1]}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_veomni_agree_with_one(ranks: int) -> None:
    """4 ranks: each has one of four query heads, and the only kv head."""
    importable()
    assert f"{ranks} ranks agree" in torchrun(ranks, HERE / "veomni_worker.py")


def test_a_model_of_veomni_is_the_same(tmp_path: Path) -> None:
    """Built by VeOmni from a parsed YAML file, in a process of its own, beside the same model on eager attention."""
    importable()
    done = subprocess.run(
        (sys.executable, str(HERE / "veomni_model.py"), str(tmp_path)),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert "the models agree" in done.stdout
