"""The challenge's operator through the JIT, its installation, and our harness, on the CPU with small sizes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from attnforge.bagel.challenge import final, operator, run
from attnforge.bagel.challenge.layer import SMALL, Sizes, draw_pack, stepwise
from attnforge.bagel.challenge.operator import FINAL, final_mask, forward, install
from attnforge.cli import main
from attnforge.runtime.export import Shape
from attnforge.runtime.masks import DenseMask

TINY = Sizes(hidden=64, heads=2, heads_kv=2, text=(1, 24), image=(16, 40))
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.rand(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 32, 16), (1, 2, 70, 41)])
def test_operator_as_the_challenge_checks_it(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    q, k, v = draw(shape, dtype, device)
    mask = torch.ones(shape[2], shape[2], dtype=torch.bool, device=device).triu(1)
    mask[5] = True  # sees nothing
    with torch.autocast(device, torch.bfloat16):
        out = forward(q, k, v, mask)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = (wide[0] @ wide[1].mT * shape[3] ** -0.5).masked_fill(mask, -torch.inf)
    expected = scores.softmax(-1).masked_fill(mask, 0) @ wide[2]
    assert out.dtype is dtype
    assert not out[:, :, 5].any()
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    dout = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), dout)
    theirs = torch.autograd.grad(expected, wide, dout.double())
    for x, y in zip(ours[1:], theirs[1:], strict=True):  # dq cancels for such inputs
        assert (x.double() - y).norm() < (1e-5 if dtype is torch.float32 else 2e-2) * y.norm()


def test_columns_apart_are_copied() -> None:
    q, k, v = (torch.randn(1, 2, 16, 20).mT for _ in range(3))
    mask = torch.zeros(20, 20, dtype=torch.bool)
    torch.testing.assert_close(forward(q, k, v, mask), stepwise(q, k, v, mask), atol=1e-5, rtol=1e-5)


def test_layers_share_what_is_made_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the mask changes, also in place."""
    made, make = [], operator._visible

    def counted(blocked: Tensor) -> DenseMask:
        made.append(blocked)
        return make(blocked)

    monkeypatch.setattr(operator, "_visible", counted)
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    mask = torch.zeros(20, 20, dtype=torch.bool)
    for columns in (0, 0, 7):
        mask[:, :columns] = True
        torch.testing.assert_close(forward(q, k, v, mask), stepwise(q, k, v, mask), atol=1e-5, rtol=1e-5)
    assert len(made) == 3  # writing no column counts as a change
    forward(q, k, v, mask)
    forward(q, k, v, mask)
    assert len(made) == 3
    with torch.inference_mode():  # changes of such tensors are not counted
        mask = mask.clone()
        forward(q, k, v, mask)
        forward(q, k, v, mask.logical_not_())
    assert len(made) == 5


@pytest.mark.parametrize("mask", [None, torch.zeros(8, 8)])
def test_a_mask_that_is_no_bool_tensor(mask: Tensor | None) -> None:
    with pytest.raises(TypeError, match="mask: got"):
        forward(*draw((1, 1, 8, 8), torch.float32, "cpu"), mask)  # type: ignore[arg-type]


def test_mask_of_the_final_round() -> None:
    blocked = final_mask(8)  # two text tokens, six of the image
    assert blocked[:2].tolist() == [[False, True] + [False] * 6, [False] * 8]
    assert (blocked[2:] == torch.tensor([True, True] + [False] * 6)).all()


def test_final_round_is_the_published_one() -> None:
    assert [s.head_dim for s in FINAL] == [56, 64, 44, 64, 52, 64, 40, 41, 64, 64]
    assert [s.rows for s in FINAL] == [2651, 3366, 2872, 4096, 4096, 4096, 3594, 4096, 4096, 1808]
    assert [s.batch * s.heads for s in FINAL] == [5, 5, 26, 28, 20, 14, 8, 6, 11, 28]


# ---- Installation


def test_installed_module_is_ours(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ("challenge", "install", "--into", str(tmp_path)))
    assert done.exit_code == 0, done.output
    code = (
        "import sys, custom_attention; print(custom_attention.forward.__module__, custom_attention.__file__)"
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
    printed = subprocess.run(
        (sys.executable, "-c", script), capture_output=True, text=True, check=True
    ).stdout
    assert printed.split() == [
        "attnforge.bagel.challenge.operator",
        str(tmp_path / "custom_attention" / "__init__.py"),
    ]
    assert install(tmp_path).exists()  # again


def test_somebody_elses_module_stays(tmp_path: Path) -> None:
    (tmp_path / "custom_attention").mkdir()
    (tmp_path / "custom_attention" / "__init__.py").write_text("forward = None\n")
    with pytest.raises(ValueError, match="holds another custom_attention"):
        install(tmp_path)
    assert (tmp_path / "custom_attention" / "__init__.py").read_text() == "forward = None\n"


# ---- The harness


def test_packs_are_random_and_reproducible() -> None:
    packs = [draw_pack(SMALL, seed) for seed in range(40)]
    assert packs == [draw_pack(SMALL, seed) for seed in range(40)]
    assert {kind for pack in packs for kind in pack.kinds} == {"text", "image", "noise"}
    assert {len(pack.rows) for pack in packs} == {1, 2, 3, 4, 5}
    text, image = draw_pack(TINY, 3), draw_pack(TINY, 4)
    for pack in (text, image):
        for kind, mask in zip(pack.kinds, pack.masks(torch.device("cpu")), strict=True):
            assert bool(mask.any()) == (kind == "text" and mask.shape[0] > 1)


def test_training_step_is_checked_timed_and_traced(tmp_path: Path) -> None:
    training = run.Training(torch.device("cpu"), 1, TINY)
    row = training.run("ours", forward, tmp_path)
    assert row.error == ""
    assert row.ms > row.attention_ms > 0
    (trace,) = tmp_path.glob("ours*.json")
    assert "attnforge::forward" in trace.read_text()
    wrong = training.run("wrong", lambda q, k, v, mask: forward(q, k, v, mask) + 1, tmp_path)
    assert wrong.error.startswith("output is off by")


def test_final_round_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final, "shapes", lambda device: (Shape(1, 2, 48, 41),))
    right = list(final.run_final(torch.device("cpu"), forward, (torch.float32,)))
    assert [row.name for row in right] == ["ours", "sdpa-flash", "sdpa-math", "naive"]
    assert all(not row.wrong and row.forward_ms and row.both_ms for row in right)

    def without_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return forward(q, k, v, torch.zeros_like(mask))

    bad, *_ = final.run_final(torch.device("cpu"), without_mask, (torch.float32,))
    assert bad.wrong
    assert re.search(r"out is off by .* dk is off by|dk is off by .* out is off by", bad.note)


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SMALL", TINY)
    monkeypatch.setattr(final, "shapes", lambda device: (Shape(1, 2, 48, 41),))
    command = ("challenge", "run", "--cpu")
    trained = CliRunner().invoke(main, (*command, "--logs", str(tmp_path / "logs")))
    assert trained.exit_code == 0, trained.output
    assert "native" in trained.output
    assert len(list((tmp_path / "logs").glob("*.json"))) == 2
    out = tmp_path / "final.json"
    finals = CliRunner().invoke(main, (*command, "--final", "--dtype", "fp32", "--json", str(out)))
    assert finals.exit_code == 0, finals.output
    assert "float32 forward + backward:" in finals.output
    assert {row["attention"] for row in json.loads(out.read_text())} == {
        "ours",
        "sdpa-flash",
        "sdpa-math",
        "naive",
    }
    failed = CliRunner().invoke(main, (*command, "--operator", "no.such"))
    assert failed.exit_code == 2
    assert "--operator: no.such has no operator" in failed.output


def test_a_wrong_result_ends_with_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "SMALL", TINY)
    monkeypatch.setattr(operator, "forward", lambda q, k, v, mask: stepwise(q, k, v, mask) * 2)
    done = CliRunner().invoke(main, ("challenge", "run", "--cpu", "--logs", str(tmp_path)))
    assert done.exit_code == 1
    assert "output is off by" in done.output
