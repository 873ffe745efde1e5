"""Which case the options --model, --heads, --mask, --length, --batch and --pack select."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import ArrayLike
from torch import Tensor

from attnforge.bagel.commands import options
from attnforge.bagel.commands.selection import LENGTHS, Request, Selection, select
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.mask_files import read_mask
from attnforge.bagel.measure.peers import attention_of
from attnforge.bagel.models import MODELS
from attnforge.cli import main
from attnforge.codegen.spec import PROBLEM_FIELDS, Arch, Direction, DType
from attnforge.runtime.masks import DenseMask, Spans
from attnforge.runtime.search.case import Case
from attnforge.runtime.search.reference import reference, visible_rows

CPU = torch.device("cpu")


def chosen(**given: Any) -> Selection:
    return select(Request(**{"device": "cpu", "dtype": "fp32", **given}))


def one(**given: Any) -> Case:
    (case,) = chosen(**given).cases()
    return case


def seen(case: Case) -> Tensor:
    """(planes of the batch, planes of the heads, seq_q, seq_k)"""
    return visible_rows(case.mask, torch.arange(case.seq_q), case.seq_q, case.seq_k)


@pytest.mark.parametrize("mask", ["full", "causal", "window:40"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(90, 90), (70, 110), (110, 70)])
def test_masks_and_lengths(mask: str, seq_q: int, seq_k: int) -> None:
    case = one(masks=(mask,), length=(seq_q, seq_k), heads=(6, 2), head_dim=96, batch=3, extra={"dim_v": 32})
    assert (case.batch, case.seq_q, case.seq_k) == (3, seq_q, seq_k)
    assert (case.heads_q, case.heads_kv, case.head_dim, case.head_dim_v) == (6, 2, 96, 32)
    query, key = torch.arange(seq_q)[:, None] + seq_k - seq_q, torch.arange(seq_k)
    expected = {"full": key >= 0, "causal": key <= query, "window:40": (key <= query) & (key > query - 40)}
    pairs = expected[mask].expand(seq_q, seq_k)
    assert torch.equal(seen(case)[0, 0], pairs)
    assert case.pairs == int(pairs.sum())
    assert case.problem(Direction.FORWARD, Arch.CPU).head_dim_v == 32


def test_names_tell_cases_apart() -> None:
    """The log of a search resumes by them."""
    given: tuple[dict[str, Any], ...] = (
        {},
        {"batch": 2},
        {"length": (64, 64)},
        {"length": (64, 96)},
        {"heads": (4, 2)},
        {"head_dim": 40},
        {"extra": {"dim_v": 32}},
    )
    names = [one(**{"masks": ("causal",), "model": "llama3-1b", **more}).name for more in given]
    assert len(set(names)) == len(given), names


@pytest.mark.parametrize("name", list(MODELS))
def test_presets(name: str) -> None:
    model = MODELS[name]
    assert ": " in model.source
    case = make_case("causal/32", name, DType.BFLOAT16, CPU)
    assert (case.heads_q, case.heads_kv, case.head_dim) == (model.heads_q, model.heads_kv, model.head_dim)
    assert case.head_dim_v == (model.head_dim_v or model.head_dim)
    assert model.heads_q % model.heads_kv == 0
    assert make_case("causal/32", model.heads, DType.BFLOAT16, CPU).head_dim_v == case.head_dim_v
    alone = () if model.mask == "bagel" else (f"{model.mask}/{LENGTHS['cpu']}",)
    assert chosen(model=name).packs == alone


def test_a_model_alone_runs_what_it_is_trained_with() -> None:
    assert chosen(model="llama3-8b").packs == (f"causal/{LENGTHS['cpu']}",)
    assert chosen(model="flux").packs == (f"full/{LENGTHS['cpu']}",)
    assert chosen(model="gpt-oss-20b").packs == (f"window:128/{LENGTHS['cpu']}",)
    assert chosen(model="0.5B").packs == ()
    assert chosen(model="llama3-8b", packs=("full/64",)).packs == ("full/64",)
    wide = one(model="llama3-8b", head_dim=64, length=(32, 32))
    assert (wide.heads_q, wide.heads_kv, wide.head_dim, wide.seq_q) == (32, 8, 64, 32)


def test_files(tmp_path: Path) -> None:
    pairs = np.random.default_rng(0).random((40, 50)) < 0.5
    np.save(tmp_path / "pairs.npy", pairs)
    case = one(masks=(str(tmp_path / "pairs.npy"),), heads=(4, 2), head_dim=16)
    assert isinstance(case.mask, DenseMask)
    assert torch.equal(seen(case)[0, 0], torch.from_numpy(pairs))
    assert (case.pairs, case.seq_q, case.seq_k) == (int(pairs.sum()), 40, 50)

    planes = np.random.default_rng(0).random((2, 4, 40, 50)) < 0.5
    np.savez(tmp_path / "planes.npz", mask=planes)
    case = one(masks=(str(tmp_path / "planes.npz"),), heads=(4, 2), head_dim=16)
    assert (case.batch, case.pairs) == (2, int(planes.sum()) // 8)
    with pytest.raises(ValueError, match="has 4 heads, but q has 6"):
        one(masks=(str(tmp_path / "planes.npz"),), heads=(6, 2), head_dim=16)

    starts, ends = np.array([0, 5, -3, 30]), np.array([10, 5, 2, 99])
    np.savez(tmp_path / "spans.npz", starts=starts, ends=ends, seq_q=40)
    mask, seq_q = read_mask(tmp_path / "spans.npz", "cpu")
    assert isinstance(mask, Spans)
    assert (seq_q, mask.visible_keys) == (40, (10 + 0 + 2 + 10) / 40)
    case = one(masks=(str(tmp_path / "spans.npz"),), heads=(4, 2), head_dim=16)
    assert case.pairs == int(seen(case).sum()) == 22


def test_files_hold_all_that_spans_take(tmp_path: Path) -> None:
    """Several intervals, which may overlap, and planes of batch entries, query heads or kv heads."""
    path = tmp_path / "spans.npz"
    draw = np.random.default_rng(0)
    for shape in ((1, 50), (3, 50), (1, 1, 2, 50), (2, 4, 4, 50), (1, 2, 1, 50), (2, 1, 2, 50)):
        starts = draw.integers(-5, 40, shape)
        ends = starts + draw.integers(0, 30, shape)
        np.savez(path, starts=starts, ends=ends, seq_q=40)
        case = one(masks=(str(path),), heads=(4, 2), head_dim=16)
        row = np.arange(40)[:, None]
        exact = ((starts[..., None, :] <= row) & (row < ends[..., None, :])).any(-3)
        assert isinstance(case.mask, Spans)
        assert torch.equal(seen(case), torch.from_numpy(exact).reshape(seen(case).shape))
        planes = shape[:2] if len(shape) == 4 else (1, 1)
        assert (case.batch, case.seq_q, case.seq_k) == (planes[0], 40, 50)
        assert case.mask.planes == planes
        assert case.pairs == int(exact.sum()) // (planes[0] * planes[1])
        assert case.mask.visible_keys == pytest.approx(exact.sum() / 40 / planes[0] / planes[1])


def test_spans_of_other_heads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "spans.npz"
    np.savez(path, starts=np.zeros((1, 3, 1, 8), int), ends=np.full((1, 3, 1, 8), 8))
    with pytest.raises(ValueError, match="has 3 heads, but q has 4 and k has 2; expected 1 or these"):
        one(masks=(str(path),), heads=(4, 2), head_dim=16)


@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        pytest.param(np.zeros((5, 8), int), np.ones((5, 8), int), id="five intervals"),
        pytest.param(np.zeros((0, 8), int), np.ones((0, 8), int), id="none"),
        pytest.param(np.zeros((1, 2, 8), int), np.ones((1, 2, 8), int), id="three axes"),
        pytest.param(np.zeros((2, 8), int), np.ones((1, 8), int), id="other shapes"),
        pytest.param(np.zeros(8), np.ones(8, int), id="floats"),
        pytest.param(np.zeros((), int), np.ones((), int), id="one number"),
    ],
)
def test_arrays_that_are_no_spans_are_refused(starts: ArrayLike, ends: ArrayLike, tmp_path: Path) -> None:
    np.savez(tmp_path / "spans.npz", starts=starts, ends=ends)
    with pytest.raises(ValueError, match=r"has starts of .* and ends of .*\(n, seq_k\).* 1 to 4 intervals"):
        read_mask(tmp_path / "spans.npz", "cpu")


def test_a_search_takes_a_file_of_two_intervals(tmp_path: Path) -> None:
    """Its problem is of two intervals, verified and timed; attnforge mask draws it."""
    path = tmp_path / "spans.npz"
    row = np.arange(64)
    starts, ends = (
        np.stack((row, np.minimum(row + 20, 64))),
        np.stack((np.minimum(row + 9, 64), 0 * row + 64)),
    )
    np.savez(path, starts=starts, ends=ends)
    log = tmp_path / "log.jsonl"
    words = ["search", "--mask", str(path), "--heads", "2/1", "--head-dim", "16", "--dtype", "fp32"]
    words += ["--variants", "1", "--direction", "fwd", "--device", "cpu", "--log", str(log)]
    words += ["--no-page", "--no-peers"]
    done = CliRunner().invoke(main, [*words, "--table-out", str(tmp_path / "tables")])
    assert done.exit_code == 0, done.output
    assert '"intervals": 2' in log.read_text()
    picture = tmp_path / "mask.svg"
    done = CliRunner().invoke(main, ["mask", str(path), "--out", str(picture)])
    assert done.exit_code == 0, done.output
    pairs = int((ends - starts).clip(0).sum())
    assert f"64 queries, 64 keys, {pairs} visible pairs" in done.output


@pytest.mark.parametrize("seq_q", [0, -1, 2**40, 2.5, [4, 4]], ids=str)
def test_numbers_of_queries_that_are_none_are_refused(seq_q: ArrayLike, tmp_path: Path) -> None:
    np.savez(tmp_path / "spans.npz", starts=np.arange(4), ends=np.arange(4) + 2, seq_q=seq_q)
    with pytest.raises(ValueError, match=r"has 4 keys and seq_q .*, expected 1 or more of each"):
        read_mask(tmp_path / "spans.npz", "cpu")


def test_bounds_beyond_int32_do_not_wrap_around(tmp_path: Path) -> None:
    np.savez(tmp_path / "spans.npz", starts=np.array([-(2**40), 2**40]), ends=np.array([2**40, 2**41]))
    mask, _ = read_mask(tmp_path / "spans.npz", "cpu")
    assert mask.visible(2, 2).tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"\x93NUMPY nonsense"), "cannot be read"),
        (lambda path: np.save(path, np.zeros((3, 3))), "array of float64"),
        (lambda path: path.write_bytes(b"PK\x03\x04 nonsense"), "cannot be read"),
        (lambda path: np.save(path, np.zeros(3, bool)), "of shape"),
        (lambda path: np.save(path, np.zeros((0, 5), bool)), r"has no pairs, its shape is \(0, 5\)"),
        (lambda path: np.save(path, np.array([{}, {}]), allow_pickle=True), "cannot be read"),
    ],
)
def test_other_files_are_refused(write: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mask.npy"
    write(path)
    with pytest.raises(ValueError, match=message):
        read_mask(path, "cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heads": (32, 8)}, "--heads: --head-dim is missing"),
        ({"head_dim": 64}, "--head-dim: --heads is missing"),
        ({"heads": (5, 2), "head_dim": 8, "masks": ("causal",)}, "heads: got 5/2"),
        ({"heads": (4, 2), "head_dim": 999}, "--head-dim: got 999, accepted are 1 to 512"),
        ({"length": (8, 8)}, "--length: needs --mask"),
        ({"length": (8, 8), "packs": ("pretrain/0",)}, "--length: needs --mask"),
        ({"masks": ("window:0",)}, "--mask: 'window:0' is neither"),
        ({"masks": ("gone.npy",)}, "there is no file gone.npy"),
        ({"masks": ("gone.npy",), "length": (8, 8)}, "has a length of its own"),
        ({"packs": ("full/2x64",), "batch": 3}, "--batch: leave it out, full/2x64 7B has a batch of 2"),
        ({"dtype": "fp16"}, "--dtype: fp16 runs on GPUs only"),
        ({"device": "mps"}, "--device: kernels run on cpu, cuda and cuda:N, not on mps"),
    ],
)
def test_messages(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        chosen(**{"model": None if "heads" in given or "head_dim" in given else "7B", **given}).cases()


def test_fields_of_problems_become_options() -> None:
    """Those that tensors and masks decide are none: align, and what is declared as nearness of a mask."""
    assert {f.attribute for f in options.OPTION_FIELDS} == {
        f.attribute for f in PROBLEM_FIELDS if f.optional and f.match == "same"
    }
    assert "dim_v" in {f.attribute for f in options.OPTION_FIELDS}
    with pytest.raises(ValueError, match="--align: measured cases do not support it yet"):
        chosen(extra={"align": 4})


@pytest.mark.parametrize(("seq_q", "seq_k"), [(40, 60), (60, 40)])
def test_peers_align_causal_masks_as_we_do(seq_q: int, seq_k: int) -> None:
    """Torch's own causal mask is aligned at the top left."""
    case = one(masks=("causal",), length=(seq_q, seq_k), heads=(4, 2), head_dim=16)
    x = case.inputs()
    rows = slice(max(0, seq_q - seq_k), None)  # those that see a key
    got = attention_of("sdpa-flash", case)(x.q, x.k, x.v)[:, :, rows]
    exact = reference(x.q, x.k, x.v, case.mask).out[:, :, rows]
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
