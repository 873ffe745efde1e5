"""The peers: they compute what we compute, get what they expect, and say what they cannot."""

from __future__ import annotations

import importlib
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from attnforge.bagel.measure import cudnn_flex, fa3, fa4, peers
from attnforge.bagel.measure.attentions import Unavailable
from attnforge.bagel.measure.bench import OURS, ours, peers_of
from attnforge.bagel.measure.case_scores import with_score
from attnforge.bagel.measure.cases import make_case
from attnforge.bagel.measure.peers import NAMES, _mask_mod, attention_of
from attnforge.bagel.packing import PackedMask
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType
from attnforge.runtime import mask_patterns
from attnforge.runtime.masks import Causal, DenseMask, Spans
from attnforge.runtime.ops import attention
from attnforge.runtime.search.case import Case, as_deterministic
from attnforge.runtime.search.reference import reference, visible_rows
from attnforge.runtime.search.timing import Timing

CPU = torch.device("cpu")
TINY = ("causal/96", "0.5B")


def documents(device: torch.device, dtype: DType) -> Case:
    """Three documents, the last of them padding."""
    splits = [40, 90, 30, 70, 120, 50]
    modes = ["causal", "noise", "causal", "full", "causal", "causal"]
    mask = PackedMask([160, 190, 50], splits, modes, device, used=350)
    return Case("three documents", 1, 6, 2, 400, 400, 64, dtype, mask, mask.pairs, device)


@pytest.fixture
def pack() -> Case:
    return documents(CPU, DType.FLOAT32)


def test_peers_see_a_dense_mask() -> None:
    case = make_case("blocks/0.5/512", "6/2/16", DType.FLOAT32, CPU)
    assert isinstance(case.mask, DenseMask)
    x = case.inputs()
    exact = reference(x.q, x.k, x.v, case.mask, case.scale).out
    got = attention_of("sdpa-flash", case)(x.q, x.k, x.v)
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)
    mod = _mask_mod(case)
    assert mod is not None
    row, zero = torch.arange(512), torch.tensor(0)
    assert torch.equal(mod(zero, zero, row[:, None], row[None]), case.mask.mask)
    planes = replace(case, mask=DenseMask(torch.stack([case.mask.mask, ~case.mask.mask])[None]))
    with pytest.raises(Unavailable, match="differ between batch entries or heads"):
        attention_of("flex", planes)


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-samples"])
def test_peers_agree_with_the_reference(name: str, pack: Case) -> None:
    x = pack.inputs()
    got = attention_of(name, pack)(x.q, x.k, x.v)
    exact = reference(x.q, x.k, x.v, pack.mask, pack.scale).out
    torch.testing.assert_close(got[:, :, :350].double(), exact[:, :, :350], atol=1e-5, rtol=1e-5)


def test_a_v_of_its_own_width_on_a_cpu(recwarn: pytest.WarningsRecorder) -> None:
    """Flash cannot do it: its note has torch's reason, which is not printed as a warning. The math backend can."""
    case = make_case("causal/96", "4/2/48", DType.FLOAT32, CPU)
    assert "sdpa-math" not in peers.usual(case)
    case = replace(case, dim_v=32)
    assert peers.usual(case)[:2] == ("sdpa-math", "sdpa-flash")
    for _ in range(2):
        math, flash = peers_of(case, Direction.FORWARD, ("sdpa-math", "sdpa-flash"), alone=True)
        assert math.ms
        assert flash.ms is None
        assert flash.note.startswith("RuntimeError: No available kernel")
        assert "same last dimension. Got Query.size(-1): 48" in flash.note
        assert "because:" not in flash.note
    assert not [str(one.message) for one in recwarn]
    x = case.inputs()
    exact = reference(x.q, x.k, x.v, case.mask, case.scale).out
    got = attention_of("sdpa-math", case)(x.q, x.k, x.v)
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)


def test_other_warnings_of_peers_are_shown() -> None:
    with pytest.warns(UserWarning, match="of another kind"), peers.as_unavailable():
        warnings.warn("of another kind", UserWarning, stacklevel=1)


GPU_CASES = [
    *((name, "documents") for name in NAMES["cuda"]),
    *((name, mask) for name in ("flex", "cudnn-flex", "fa3") for mask in ("window", "function")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "mask"), GPU_CASES)
def test_peers_agree_with_the_reference_on_a_gpu(name: str, mask: str) -> None:
    device = torch.device("cuda")
    case = documents(device, DType.BFLOAT16)
    if mask == "window":
        case = replace(case, mask=mask_patterns.window(400, 400, 30, 0, device))
    if mask == "function":
        every = torch.arange(400) % 90 == 7
        mod = mask_patterns.mask_mod(lambda b, h, i, j: every[j] | ((i - j).abs() < 20), 400, 400, device)
        case = replace(case, mask=mod)
    x = case.inputs()
    try:
        got = attention_of(name, case)(x.q, x.k, x.v)
    except (Unavailable, RuntimeError) as reason:
        pytest.skip(f"{name}: {reason}")
    exact = reference(x.q, x.k, x.v, case.mask, case.scale).out
    torch.testing.assert_close(got[:, :, :350].double(), exact[:, :, :350], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("name", ["softcap:2", "alibi", "relative_bias:20"])
def test_flex_and_ours_take_the_same_score(name: str, pack: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_compiled_flex", lambda: flex_attention)
    case = with_score(pack, name)
    x = case.inputs()
    exact = reference(x.q, x.k, x.v, case.mask, case.scale, x.dout, score=case.score)
    for peer in ("flex", OURS):
        out = attention_of(peer, case)(x.q, x.k, x.v)
        torch.testing.assert_close(out.double(), exact.out, atol=1e-5, rtol=1e-5)
    for direction, expected in ((Direction.FORWARD, exact[:2]), (Direction.BACKWARD, exact[2:])):
        for got, answer in zip(ours(case, direction, [x])(0), expected, strict=True):
            torch.testing.assert_close(got.double(), answer, atol=1e-4, rtol=1e-5)


def test_other_peers_take_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """But FA3 and FA4 their softcap."""
    caps = list[tuple[str, float]]()
    for module in (fa3, fa4):
        monkeypatch.setattr(
            module,
            "attention",
            lambda case, *rest, name=module.__name__[-3:], softcap=0.0: caps.append((name, softcap)),
        )
    plain = make_case(*TINY, DType.FLOAT32, CPU)
    for name in ("softcap:2", "alibi"):
        case = with_score(plain, name)
        for peer in ("sdpa-flash", "sdpa-samples", "cudnn-flex", *peers.CAPPED * (name == "alibi")):
            with pytest.raises(Unavailable, match="takes no such score"):
                attention_of(peer, case)
    for peer in peers.CAPPED:
        attention_of(peer, with_score(plain, "softcap:2"))
        attention_of(peer, plain)
    assert caps == [(module, cap) for module in ("fa3", "fa4", "fa4") for cap in (2.0, 0.0)]


def test_flex_sees_the_same_mask(pack: Case) -> None:
    mod = _mask_mod(pack)
    assert mod is not None
    assert pack.mask is not None
    row, zero = torch.arange(400), torch.tensor(0)
    dense = mod(zero, zero, row[:, None], row[None])
    assert torch.equal(dense, pack.mask.visible(400, 400))


def test_flex_sees_all_intervals_of_a_key() -> None:
    """Also where a key has fewer than others."""
    starts, ends = torch.tensor([[0, 5, 9], [12, 0, 30]]), torch.tensor([[4, 20, 9], [15, 0, 40]])
    spans = Spans(starts.int(), ends.int())
    case = replace(make_case("full/40/3", "2/1/16", DType.FLOAT32, CPU), mask=spans)
    mod, zero = _mask_mod(case), torch.tensor(0)
    assert mod is not None
    seen = mod(zero, zero, torch.arange(40)[:, None], torch.arange(3)[None])
    assert torch.equal(seen, spans.visible(40, 3))
    assert seen.sum(0).tolist() == [7, 15, 10]


def test_peers_say_what_they_cannot(pack: Case) -> None:
    dense = make_case("full/64", "0.5B", DType.FLOAT32, CPU)
    with pytest.raises(Unavailable, match="only for packs"):
        attention_of("sdpa-samples", dense)


# ---- FlashAttention-4, FlexAttention, Triton


@pytest.mark.parametrize(
    ("splits", "modes", "used"),
    [
        ([40, 60, 50], ["causal", "full", "full"], 150),  # a document of two splits
        ([100, 50], ["causal", "full"], 150),  # two kinds of documents
        ([100, 50], ["full", "full"], 100),  # padding, which must come out as zeros
    ],
)
def test_varlen_is_for_whole_documents(splits: list[int], modes: list[str], used: int) -> None:
    mask = PackedMask([100, 50], splits, modes, CPU, used=used)
    with pytest.raises(Unavailable, match="takes no mask"):
        fa4.documents(mask)


def test_fa4_gets_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for flash_attn.cute: its layouts, and the documents that varlen is called with."""
    seen: dict[str, Any] = {}

    def varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen.update(options, shape=q.shape)
        return q + 1, None

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen.update(options, shape=q.shape)
        return q + 2, None

    cute = SimpleNamespace(flash_attn_varlen_func=varlen, flash_attn_func=dense)
    monkeypatch.setattr(fa4, "installed", lambda: True)
    monkeypatch.setattr("attnforge.bagel.measure.fa4.importlib.import_module", lambda name: cute)
    mask = PackedMask([30, 20], [30, 20], ["full", "full"], CPU)
    case = Case("documents", 1, 4, 2, 50, 50, 16, DType.FLOAT32, mask, mask.pairs, CPU)
    x = case.inputs()
    out = attention_of("fa4", case)(x.q, x.k, x.v)
    torch.testing.assert_close(out, x.q + 1)
    assert seen["shape"] == (50, 4, 16)
    assert seen["cu_seqlens_q"].tolist() == [0, 30, 50]
    assert seen["cu_seqlens_k"].dtype == torch.int32
    assert (seen["max_seqlen_q"], seen["causal"], seen["pack_gqa"]) == (30, False, None)
    case = make_case(*TINY, DType.FLOAT32, CPU)
    x = case.inputs()
    torch.testing.assert_close(attention_of("fa4-nopack", case)(x.q, x.k, x.v), x.q + 2)
    assert seen["shape"] == (1, 96, 14, 64)
    assert (seen["causal"], seen["pack_gqa"], seen["softmax_scale"]) == (True, False, 0.125)
    with pytest.raises(Unavailable, match="takes no mask"):
        attention_of("fa4", make_case("blocks/0.5/256", "0.5B", DType.FLOAT32, CPU))


def test_absent_peers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fa3, fa4, cudnn_flex):
        monkeypatch.setattr(module, "installed", lambda: False)
    assert set(peers.present(torch.device("cuda"))) == {*peers.BACKENDS, "sdpa-samples", "flex"}
    monkeypatch.setattr(peers, "_flex", lambda *arguments: pytest.fail("nothing is to be compiled for it"))
    for name in peers.INSTALLED:
        with pytest.raises(Unavailable, match="not installed"):
            attention_of(name, make_case(*TINY, DType.FLOAT32, CPU))


def test_present_peers_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fa3, fa4, cudnn_flex):
        monkeypatch.setattr(module, "installed", lambda: True)
    assert set(peers.present(torch.device("cuda"))) == set(peers.NAMES["cuda"])


def test_fa3_gets_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert (q.shape, options["causal"], options["softmax_scale"]) == ((1, 96, 14, 64), True, 0.125)
        return q + 3

    monkeypatch.setitem(sys.modules, fa3.MODULE, SimpleNamespace(flash_attn_func=dense))
    case = make_case(*TINY, DType.FLOAT32, CPU)
    x = case.inputs()
    torch.testing.assert_close(attention_of("fa3", case)(x.q, x.k, x.v), x.q + 3)


def test_fa3_by_its_operators_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """xformers has them without `flash_attn_interface`: documents of a pack, with gradients."""
    monkeypatch.setattr(fa3, "_has_interface", lambda: False)
    library = tmp_path / fa3.LIBRARY
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(fa3, "find_spec", lambda name: found)
    assert not fa3.installed()
    library.parent.mkdir()
    library.write_bytes(b"")
    assert fa3.installed()
    standin = Operators()
    monkeypatch.setattr(fa3, "operators", lambda: standin)
    case = as_deterministic(make_case(*TINY, DType.FLOAT32, CPU))
    x = case.inputs()
    leaves = [tensor.requires_grad_() for tensor in (x.q, x.k, x.v)]
    calls = (fa3.attention(case), lambda q, k, v: attention(q, k, v, Causal(), scale=case.scale))
    outs = [call(*leaves) for call in calls]
    torch.testing.assert_close(*outs)
    gradients = [torch.autograd.grad(out, leaves, x.dout) for out in outs]
    torch.testing.assert_close(*gradients)
    window = {"window_size_left": -1, "window_size_right": -1}
    common = {"softmax_scale": case.scale, "is_causal": True, **window}
    assert standin.seen == [
        {"num_splits": 1, "pack_gqa": None, **common},
        {"deterministic": True, **common},
    ]


class Operators:
    """torch.ops.flash_attn_3 of causal batches, and the options that it was given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        self.seen.append(options)
        return _causal(q, k, v), q.new_zeros(()), q.new_zeros(()), q.new_zeros(())

    def bwd(self, dout: Tensor, *saved: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **options: Any) -> None:
        self.seen.append(options)
        leaves = [x.detach().requires_grad_() for x in saved[:3]]
        with torch.enable_grad():
            found = torch.autograd.grad(_causal(*leaves), leaves, dout)
        for to, gradient in zip((dq, dk, dv), found, strict=True):
            to.copy_(gradient)


class RowsInPlace(Operators):
    """Kernels read 16 bytes at a time: the elements of a row follow each other."""

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
        assert [x.stride(-1) for x in (q, k, v)] == [1, 1, 1]
        return super().fwd(q, k, v, **options)

    def bwd(self, dout: Tensor, *saved: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **options: Any) -> None:
        assert dout.stride(-1) == 1
        super().bwd(dout, *saved, dq=dq, dk=dk, dv=dv, **options)


def test_fa3_operators_get_windows_and_rows_in_place() -> None:
    standin = RowsInPlace()
    q, k, v, dout = (torch.randn(1, 4, 16, 9).transpose(1, 3).requires_grad_() for _ in range(4))
    options = {"window_size": (7, 0), "pack_gqa": False}
    out = fa3.Interface(standin).flash_attn_func(q, k, v, **options)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    torch.testing.assert_close(gradients, torch.autograd.grad(_causal(q, k, v), (q, k, v), dout))
    common = {"is_causal": False, "window_size_left": 7, "window_size_right": 0}
    assert standin.seen == [
        {"num_splits": 1, "pack_gqa": False, **common},
        {"deterministic": False, **common},
    ]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, S, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def test_fa3_operators_of_either_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its interface first: both libraries cannot be loaded."""
    loaded: list[str] = []
    monkeypatch.setattr(fa3, "_loaded", lambda: bool(loaded))
    monkeypatch.setattr(fa3, "_library", lambda: "xformers")
    monkeypatch.setattr(fa3, "_load", loaded.append)
    monkeypatch.setattr("attnforge.bagel.measure.fa3.importlib.import_module", loaded.append)
    for there, name in ((True, fa3.MODULE), (False, "xformers")):
        loaded.clear()
        monkeypatch.setattr(fa3, "_has_interface", lambda there=there: there)
        for _ in range(2):
            assert fa3.operators() is torch.ops.flash_attn_3
        assert loaded == [name]


def test_fa3_operators_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a package, with a library that is none, and with one that has not both operators."""
    monkeypatch.setattr(fa3, "_has_interface", lambda: False)
    monkeypatch.setattr(fa3, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="not installed: pip install --no-deps xformers"):
        fa3.operators()
    library = tmp_path / fa3.LIBRARY
    library.parent.mkdir()
    library.write_bytes(b"no library")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "none"), str(tmp_path)])
    monkeypatch.setattr(fa3, "find_spec", lambda name: found)
    with pytest.raises(Unavailable, match=r"cannot be loaded: .*pip install"):
        fa3.operators()
    monkeypatch.setattr(fa3, "_load", lambda path: None)
    for names in ((), ("fwd",), ("bwd",)):
        monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(**dict.fromkeys(names)))
        with pytest.raises(Unavailable, match="has no operators"):
            fa3.operators()


@pytest.mark.parametrize("installed", [True, False])
def test_fa3_library_is_loaded_after_the_runtime_of_cuda_12(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that pip installs, found in a later folder of packages; else the system's."""
    runtime = tmp_path / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12"
    if installed:
        runtime.parent.mkdir(parents=True)
        runtime.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "none"), str(tmp_path)])
    loaded: list[str] = []
    monkeypatch.setattr("attnforge.bagel.measure.fa3.ctypes.CDLL", lambda name, mode: loaded.append(name))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: loaded.append(path.name))
    fa3._load(tmp_path / "_C.so")
    assert loaded == [str(runtime) if installed else "libcudart.so.12", "_C.so"]


def test_cudnn_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontend is there, its optional packages are not: it says so at the first use of a function."""

    def missing(name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else ImportError(f"{name}: optional dependencies")

    cudnn = ModuleType("cudnn")
    monkeypatch.setattr(cudnn, "__getattr__", missing, raising=False)
    monkeypatch.setattr(cudnn_flex, "installed", lambda: True)
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    with pytest.raises(Unavailable, match=r"optional dependencies; pip install .*cutedsl"):
        attention_of("cudnn-flex", make_case(*TINY, DType.FLOAT32, CPU))


def test_fa3_gets_a_softcap_only_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append(options)
        return q

    monkeypatch.setitem(sys.modules, fa3.MODULE, SimpleNamespace(flash_attn_func=dense))
    case = make_case(*TINY, DType.FLOAT32, CPU)
    x = case.inputs()
    for softcap in (0.0, 50.0):
        fa3.attention(case, softcap)(x.q, x.k, x.v)
    assert [options.get("softcap") for options in seen] == [None, 50.0]


def test_only_fa3_is_timed_beside_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append(options)
        return q

    monkeypatch.setitem(sys.modules, fa3.MODULE, SimpleNamespace(flash_attn_func=dense))
    plain = make_case(*TINY, DType.FLOAT32, CPU)
    case = as_deterministic(replace(plain, device=torch.device("cuda")))
    for there in (False, True):
        monkeypatch.setattr(fa3, "installed", lambda there=there: there)
        assert peers.usual(case) == (("fa3",) if there else ())
    x = plain.inputs()
    for one in (plain, as_deterministic(plain)):
        attention_of("fa3", one)(x.q, x.k, x.v)
    assert [options.get("deterministic") for options in seen] == [None, True]
    for name in ("sdpa-flash", "flex", "fa4"):
        with pytest.raises(Unavailable, match="its deterministic gradients are not timed"):
            attention_of(name, case)


WINDOWS = {(5, 0): (5, 0), (0, 3): (0, 3), (-1, 0): (95, 0), (-1, -1): (95, 95)}  # -1: no limit


def test_flash_attention_gets_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many queries as keys; all else is none."""

    def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        assert not options["causal"]
        left, right = options["window_size"]
        out: Tensor = q + left + 100 * right
        return out

    monkeypatch.setitem(
        sys.modules, fa3.MODULE, SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=dense)
    )
    case = make_case(*TINY, DType.FLOAT32, CPU)
    x = case.inputs()
    for given, (left, right) in WINDOWS.items():
        one = replace(case, mask=mask_patterns.window(96, 96, *given, CPU))
        torch.testing.assert_close(attention_of("fa3", one)(x.q, x.k, x.v), x.q + left + 100 * right)
    others = [
        mask_patterns.window_with_sinks(96, 96, 5, 0, 2, CPU),
        mask_patterns.window(96, 96, 5, 0, CPU) & mask_patterns.documents([40, 56], CPU),
        mask_patterns.block_diffusion(48, 8, CPU),
        Spans(torch.full((96,), 4, dtype=torch.int32), torch.full((96,), 2, dtype=torch.int32)),
    ]
    for mask in others:
        with pytest.raises(Unavailable, match="takes no mask"):
            attention_of("fa3", replace(case, mask=mask))
    with pytest.raises(Unavailable, match="takes no mask"):
        attention_of("fa3", make_case("window:7/40/96", "0.5B", DType.FLOAT32, CPU))


# ---- cudnn.flex_attention


@pytest.mark.parametrize("pack", ["full/40", "causal/40/50", "causal/50/40", "window:7/40", "blocks/0.5/256"])
def test_endpoints_are_the_mask(pack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """[0, F0) and [F1, F2), ... of each row, against the mask's definition; in chunks of few rows."""
    monkeypatch.setattr(cudnn_flex, "CHUNK", 300)
    case = replace(make_case(pack, "2/1/16", DType.FLOAT32, CPU), batch=2)
    ends = cudnn_flex.endpoints(case)
    assert (ends.dtype, ends.shape[0], ends.shape[1] % 2, ends.shape[2]) == (
        torch.int32,
        1,
        1,
        2 * case.seq_q,
    )
    assert bool((ends.diff(dim=1) >= 0).all())
    key = torch.arange(case.seq_k)
    covered = (ends[0, :, :, None] <= key).sum(0) % 2 == 0  # an even number of endpoints before a visible key
    seen = visible_rows(case.mask, torch.arange(case.seq_q), case.seq_q, case.seq_k)[0, 0]
    assert torch.equal(covered, seen.repeat(2, 1))


def test_masks_of_many_intervals_are_not_for_cudnn() -> None:
    comb = torch.arange(100) % 2 == 0
    case = Case("comb", 1, 2, 1, 4, 100, 16, DType.FLOAT32, DenseMask(comb.repeat(4, 1)), 200, CPU)
    with pytest.raises(Unavailable, match="has 99 endpoints"):
        cudnn_flex.endpoints(case)
    planes = DenseMask(torch.ones(1, 2, 4, 100, dtype=torch.bool).tril())
    keys = torch.zeros(1, 2, 1, 100, dtype=torch.int32)
    heads = mask_patterns.mask_mod(lambda b, h, i, j: i >= j + h, 4, 100, CPU)
    for mask in (planes, Spans(keys, keys + 3), heads):
        with pytest.raises(Unavailable, match="masks that differ between"):
            cudnn_flex.endpoints(replace(case, mask=mask))
        with pytest.raises(Unavailable, match="masks that differ between"):
            attention_of("flex", replace(case, mask=mask))


def test_endpoints_of_a_function() -> None:
    """And FlexAttention's function of it. Global keys beside a window: several intervals a row."""
    is_global = torch.arange(50) % 20 == 7
    mask = mask_patterns.mask_mod(lambda b, h, i, j: is_global[j] | ((i - j).abs() < 3), 50, 50, CPU)
    case = replace(make_case("full/50", "2/1/16", DType.FLOAT32, CPU), mask=mask)
    key = torch.arange(50)
    seen = is_global | ((key[:, None] - key).abs() < 3)
    ends = cudnn_flex.endpoints(case)
    assert torch.equal((ends[0, :, :, None] <= key).sum(0) % 2 == 0, seen)
    mod, zero = _mask_mod(case), torch.tensor(0)
    assert mod is not None
    assert torch.equal(mod(zero, zero, key[:, None], key), seen)
    x = case.inputs()
    exact = reference(x.q, x.k, x.v, DenseMask(seen)).out
    for name in ("sdpa-flash", peers.OURS):
        torch.testing.assert_close(
            attention_of(name, case)(x.q, x.k, x.v).double(), exact, atol=1e-5, rtol=1e-5
        )
    for module in (fa3, fa4):
        with pytest.raises(Unavailable):
            module.attention(case)


def test_cudnn_gets_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def plan(ends: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> str:
        seen.update(ends=ends, shapes=(q.shape, k.shape, v.shape), build_backward=build_backward)
        return "plan"

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask_plan: str, softmax_scale: float) -> Tensor:
        seen.update(mask_plan=mask_plan, scale=softmax_scale)
        return q + 4

    monkeypatch.setattr(cudnn_flex, "installed", lambda: True)
    module = SimpleNamespace(create_mask_plan=plan, flex_attn_func=attend)
    monkeypatch.setitem(sys.modules, "cudnn", module)
    case = make_case(*TINY, DType.FLOAT32, CPU)
    x = case.inputs()
    torch.testing.assert_close(attention_of("cudnn-flex", case)(x.q, x.k, x.v), x.q + 4)
    assert seen["shapes"] == ((1, 96, 14, 64), (1, 96, 2, 64), (1, 96, 2, 64))
    assert seen["ends"].flatten().tolist() == list(range(1, 97))
    assert seen["build_backward"]  # a plan without it cannot be differentiated
    assert (seen["mask_plan"], seen["scale"]) == ("plan", 0.125)


# ---- Timing


def test_peers_are_timed_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def timed(calls: dict[str, Any], *rest: object) -> dict[str, Timing]:
        asked.append(list(calls))
        return {name: Timing(len(name), 1.0, 9.0, 5, 2.0, 3.0) for name in calls}

    monkeypatch.setattr(peers, "measure_interleaved", timed)
    case = make_case(*TINY, DType.FLOAT32, CPU)
    spec = next(iter(candidates(case.problem(Direction.FORWARD, Arch.CPU))))
    (row,) = peers_of(case, Direction.FORWARD, ["sdpa-flash"], spec)
    (alone,) = peers_of(case, Direction.FORWARD, ["sdpa-flash"], alone=True)
    assert asked == [[OURS, "sdpa-flash"], ["sdpa-flash"]]
    assert (row.ms, row.ours_ms, row.low_ms, row.high_ms) == (10, 9, 2.0, 3.0)
    assert row.ratio == pytest.approx(10 / 9)
    assert alone.ratio is None


@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
def test_a_given_variant_of_ours_runs(direction: Direction) -> None:
    case = make_case(*TINY, DType.FLOAT32, CPU)
    *_, last = candidates(case.problem(direction, Arch.CPU))
    sets = [case.inputs()]
    got = ours(case, direction, sets, last)(0)
    exact = reference(sets[0].q, sets[0].k, sets[0].v, Causal(), dout=sets[0].dout)
    expected = (exact.out, exact.lse) if direction is Direction.FORWARD else (exact.dq, exact.dk, exact.dv)
    for mine, true in zip(got, expected, strict=True):
        assert true is not None
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "often", "free", "compiled"),
    [
        ("flex", False, 1 << 40, [False]),  # eagerly: compiling the sort takes minutes
        ("flex", False, 1 << 10, [True]),  # there is no memory for S x S
        ("flex-bagel", False, 1 << 40, [False]),
        ("flex-bagel", True, 1 << 40, [True]),  # as BAGEL's trainer does
        ("flex", True, 1 << 40, []),  # a compiled function of its own
    ],
)
def test_how_block_masks_are_made(
    name: str, often: bool, free: int, compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    path = "torch.nn.attention.flex_attention.create_block_mask"
    monkeypatch.setattr(path, lambda *size, _compile: made.append(_compile))
    monkeypatch.setattr(peers, "_compiled_block_mask", lambda: lambda *size: None)
    monkeypatch.setattr(peers, "_free_bytes", lambda device: free)
    mask = PackedMask([30, 20], [30, 20], ["full", "full"], CPU)
    case = Case("x", 1, 4, 2, 50, 50, 16, DType.FLOAT32, mask, mask.pairs, torch.device("cuda"))
    attention_of(name, case, often)
    assert made == compiled


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_the_triton_peer_is_right(causal: bool) -> None:
    pytest.importorskip("triton")
    attention = importlib.import_module("attnforge.benchmarks.triton_attention").attention
    case = make_case(
        f"{'causal' if causal else 'full'}/2x256", "8/2/64", DType.BFLOAT16, torch.device("cuda")
    )
    x = case.inputs()
    leaves = [tensor.detach().requires_grad_() for tensor in x[:3]]
    out = attention(leaves[0], leaves[1], leaves[2], causal)
    got = (out, *torch.autograd.grad(out, leaves, x.dout))
    exact = reference(x.q, x.k, x.v, Causal() if causal else None, dout=x.dout)
    for mine, true in zip(got, (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
        assert true is not None
        assert float((mine.double() - true).norm() / true.norm()) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flex", "flex-bagel"])
def test_masks_made_often_are_the_same_on_a_gpu(name: str) -> None:
    splits, modes = [40, 90, 30, 70, 120], ["causal", "noise", "causal", "full", "causal"]
    mask = PackedMask([160, 190], splits, modes, torch.device("cuda"))
    case = Case("pack", 1, 4, 2, 350, 350, 64, DType.BFLOAT16, mask, mask.pairs, torch.device("cuda"))
    x = case.inputs()
    once, often = (attention_of(name, case, often)(x.q, x.k, x.v) for often in (False, True))
    torch.testing.assert_close(once, often)
