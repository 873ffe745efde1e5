"""The Mixture of Transformers: against a plain transcription, row by row; operators; odd packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import torchrun
from synthetic import Synthetic
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import attnforge
from attnforge.bagel.mot.attention import make_operator
from attnforge.bagel.mot.layer import (
    CONFIGS,
    Experts,
    Mlp,
    Mlps,
    MotLayer,
    Pair,
    Project,
    Shared,
    apart,
    rotate,
    share,
    together,
)
from attnforge.bagel.mot.model import MotModel, Pack, rope_positions
from attnforge.bagel.mot.norm import add_normed, normed
from attnforge.bagel.mot.parallel import dealt_rows, local_rows
from attnforge.bagel.mot.swiglu import swiglu
from attnforge.bagel.packing import visible_from_definition

CONFIG = CONFIGS["tiny"]
LISTS = ([9, 7], [3, 4, 2, 4, 3], ["causal", "noise", "causal", "full", "causal"])
GENERATION = torch.tensor([4, 5, 10, 11])
TOKENS = 16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def layer_and_inputs(name: str = "attnforge", max_tokens: int = 128) -> tuple[MotLayer, Tensor, Shared]:
    operator = make_operator(name, CONFIG.heads_q, max_tokens, torch.float32)
    layer = MotLayer(CONFIG, operator)
    for parameter in layer.parameters():  # ones and zeros would hide mistakes
        torch.nn.init.normal_(parameter, std=0.2)
    understanding = torch.tensor([row for row in range(TOKENS) if row not in GENERATION])
    mask = operator.mask(*LISTS, CPU)
    shared = share(understanding, GENERATION, rope_positions(*LISTS), CONFIG, mask)
    return layer, torch.randn(TOKENS, CONFIG.hidden, requires_grad=True), shared


def run(layer: MotLayer, x: Tensor, shared: Shared) -> Tensor:
    """The layer of all rows in the order of the pack."""
    pair: Pair = layer(apart(x, shared), shared)
    return together(pair, shared)


def transcribed(layer: MotLayer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The layer for one row at a time with that row's weights, and attention by its formula."""

    def expert(experts: Experts | Mlps, row: int) -> torch.nn.Module:
        return experts.generation if row in GENERATION else experts.understanding

    def heads(row: int) -> tuple[Tensor, Tensor, Tensor]:
        project = expert(layer.attention.project, row)
        assert isinstance(project, Project)
        return project.normed(project(x[row : row + 1])[1])

    rows = [heads(row) for row in range(TOKENS)]
    q, k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    group = CONFIG.heads_q // CONFIG.heads_kv
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * CONFIG.head_dim**-0.5
    weights = scores.masked_fill(~visible_from_definition(*LISTS), -torch.inf).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, 1)).flatten(1)

    def mlp(row: int) -> Tensor:
        module = expert(layer.mlp, row)
        assert isinstance(module, Mlp)
        gate, up = module.gate_up(module.norm(x[row])).chunk(2)
        result: Tensor = x[row] + module.down(torch.nn.functional.silu(gate) * up)
        return result

    x = x + torch.cat([expert(layer.attention.output, r)(out[r : r + 1]) for r in range(TOKENS)])
    return torch.stack([mlp(row) for row in range(TOKENS)])


@pytest.mark.parametrize("name", ["attnforge", "sdpa"])
def test_a_layer_is_its_transcription(name: str) -> None:
    layer, x, shared = layer_and_inputs(name)
    got, expected = run(layer, x, shared), transcribed(layer, x, shared.cos, shared.sin)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    dout = torch.randn_like(got)
    leaves = [x, *layer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("selective", [False, True])
def test_a_compiled_layer_is_the_same(selective: bool) -> None:
    """fullgraph, its pack's mask and angles included, with attention kept from recomputation and without."""
    layer, x, shared = layer_and_inputs()
    keep: dict[str, Any] = {"context_fn": attnforge.save_attention} if selective else {}

    def checkpointed(x: Tensor) -> Tensor:
        pair: Pair = checkpoint(layer, apart(x, shared), shared, use_reentrant=False, **keep)
        return together(pair, shared)

    got = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")(x)
    expected = run(layer, x, shared)
    torch._dynamo.reset()
    torch.testing.assert_close(got, expected)
    dout = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, dout) for out in (got, expected)))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("selective", [False, True])
def test_a_recomputation_omits_the_last_products(selective: bool) -> None:
    """Of either expert: projection, output and gate_up are computed again, down is not."""
    layer, x, shared = layer_and_inputs()
    pair = apart(x, shared)
    dout = tuple(torch.randn_like(part) for part in pair)
    leaves = [x, *layer.parameters()]
    keep: dict[str, Any] = {"context_fn": attnforge.save_attention} if selective else {}
    found, counts = [], []
    for checkpointed in (False, True):
        out = (
            checkpoint(layer, pair, shared, use_reentrant=False, **keep)
            if checkpointed
            else layer(pair, shared)
        )
        with Products() as products:
            found.append(torch.autograd.grad(out, leaves, dout, retain_graph=True))
        counts.append(products.count)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert counts[1] - counts[0] == 2 * 3


def test_gradients_can_be_taken_twice() -> None:
    layer, x, shared = layer_and_inputs()
    out = run(layer, x, shared)
    first, second = (torch.autograd.grad(out.sum(), x, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("max_tokens", [TOKENS, 40, 128])
def test_flex_is_the_same(max_tokens: int) -> None:
    """Forward: torch has no more of it on the CPU. With and without padding."""
    layer, x, shared = layer_and_inputs("flex", max_tokens)
    with torch.no_grad():
        expected = transcribed(layer, x, shared.cos, shared.sin)
        torch.testing.assert_close(run(layer, x, shared), expected, rtol=1e-4, atol=1e-4)


def test_flex_refuses_packs_that_are_too_long() -> None:
    with pytest.raises(ValueError, match="pack: 16 tokens, more than the 15 that flex pads to"):
        layer_and_inputs("flex", 15)


def test_unknown_operators_are_refused() -> None:
    with pytest.raises(ValueError, match="attention: got 'triton', accepted are attnforge, flex, sdpa"):
        make_operator("triton", 4, 128)


def test_rotation_turns_pairs() -> None:
    """Products of rotated rows depend on the difference of their positions only."""
    x, y = torch.randn(2, 1, 1, CONFIG.head_dim)

    def product(i: int, j: int) -> Tensor:
        cos, sin = attnforge.rope_tables(torch.tensor([i, j]), CONFIG.head_dim, CONFIG.rope_base)
        return (rotate(x, cos[:1], sin[:1]) * rotate(y, cos[1:], sin[1:])).sum()

    torch.testing.assert_close(product(3, 10), product(50, 57), rtol=1e-4, atol=1e-4)
    assert not torch.isclose(product(3, 10), product(3, 11), rtol=1e-4)


def test_rows_part_and_meet() -> None:
    """`apart` and `together` are inverse, and each one's gradient is the other."""
    _, x, shared = layer_and_inputs()
    pair = apart(x, shared)
    assert torch.equal(pair[0], x[shared.understanding])
    assert torch.equal(pair[1], x[shared.generation])
    assert torch.equal(together(pair, shared), x)
    assert torch.autograd.gradcheck(
        lambda x: together(apart(x, shared), shared) * 2, x[:, :3].detach().double().requires_grad_()
    )


@pytest.mark.parametrize("rows", [5, 0])
def test_swiglu_is_its_formula(rows: int) -> None:
    gate_up = torch.randn(rows, 12, dtype=torch.float64, requires_grad=True)
    gate, up = gate_up.chunk(2, 1)
    torch.testing.assert_close(swiglu(gate_up), gate * gate.sigmoid() * up)
    assert torch.autograd.gradcheck(swiglu, (gate_up,))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 68), (77, 2049), (1000, 136)])
def test_swiglu_on_a_gpu(rows: int, columns: int) -> None:
    """Compiled by Triton: results and gradients are rounded once, those of float32 inputs within a few units."""
    for dtype, limit in ((torch.bfloat16, 2**-8), (torch.float32, 2**-20)):
        given = torch.randn(rows, 2 * columns, device="cuda").to(dtype).requires_grad_()
        dout = torch.randn(rows, columns, device="cuda").to(dtype)
        out = swiglu(given)
        ours = (out, *torch.autograd.grad(out, given, dout))
        wide = given.detach().double().requires_grad_()
        gate, up = wide.chunk(2, 1)
        exact = gate * gate.sigmoid() * up
        for one, other in zip(ours, (exact, *torch.autograd.grad(exact, wide, dout.double())), strict=True):
            assert one.dtype is dtype
            assert (one.double() - other).norm() <= limit * other.norm()


@pytest.mark.parametrize("transposed", range(2))
def test_layouts_of_swiglu_are_known_to_torch_compile(transposed: int) -> None:
    """dout or gate_up may be transposed; the operators' results then have the strides that their fakes say."""
    x = [torch.randn(5, 6), torch.randn(5, 12)]
    x[transposed] = x[transposed].T.contiguous().T
    dout, gate_up = x
    torch.library.opcheck(torch.ops.attnforge.swiglu_backward.default, (dout, gate_up))
    torch.library.opcheck(torch.ops.attnforge.swiglu.default, (gate_up.requires_grad_(),))


def norms(x: Tensor, y: Tensor | None, norm: torch.nn.RMSNorm) -> Pair:
    return normed(x, norm) if y is None else add_normed(x, y, norm)


@pytest.mark.gpu
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (77, 129), (3000, 3584)])
def test_norms_on_a_gpu(adds: bool, rows: int, columns: int) -> None:
    """Compiled by Triton: sums, norms and gradients beside those of float64."""
    for dtype, limit in ((torch.bfloat16, 2**-7), (torch.float32, 2**-20)):
        x, y, *dout = torch.randn(4, rows, columns, device="cuda").to(dtype)
        given = [t.clone().requires_grad_() for t in ((x, y) if adds else (x,))]
        norm = torch.nn.RMSNorm(columns, 1e-6, device="cuda", dtype=dtype)
        torch.nn.init.normal_(norm.weight)
        results = norms(given[0], given[1] if adds else None, norm)
        ours = (*results, *torch.autograd.grad(results, [*given, norm.weight], dout))
        # From the rounded sum on: what is normed is that.
        wide = [results[0].detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()]
        exact = (wide[0] * 1, wide[0] * (wide[0].square().mean(1, True) + 1e-6).rsqrt() * wide[1])
        dx, dweight = torch.autograd.grad(exact, wide, [d.double() for d in dout])
        for one, other in zip(ours, (*exact, *([dx] * len(given)), dweight), strict=True):
            assert one.dtype is dtype
            assert (one.double() - other).norm() <= limit * other.norm()
        if adds:
            assert torch.equal(results[0], x + y)


@pytest.mark.parametrize("adds", [False, True])
def test_norms_are_their_formula(adds: bool) -> None:
    norm = torch.nn.RMSNorm(6, 1e-6, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    x, y = (torch.randn(5, 6, dtype=torch.float64) for _ in range(2))
    total, out = norms(x, y if adds else None, norm)
    assert torch.equal(total, x + y if adds else x)
    torch.testing.assert_close(out, total * (total.square().mean(1, True) + 1e-6).rsqrt() * norm.weight)


def test_positions() -> None:
    """Text counts on, an image has one position, and a noise image's is taken again by what follows."""
    modes = ["causal", "noise", "full", "causal", "causal"]
    assert rope_positions([9, 2], [2, 3, 2, 2, 2], modes).tolist() == [0, 1, 2, 2, 2, 2, 2, 3, 4, 0, 1]


# ---- The model


def make(name: str = "attnforge") -> MotModel:
    model = MotModel(CONFIG, make_operator(name, CONFIG.heads_q, 256, torch.float32))
    torch.nn.init.normal_(model.latent_out.weight)
    return model


def test_losses_of_a_model_without_layers() -> None:
    """What the heads and losses do, written out."""
    config = dataclasses.replace(CONFIG, layers=0)
    model = MotModel(config, make_operator("attnforge", 4, 256))
    torch.nn.init.normal_(model.latent_out.weight)
    pack = Synthetic(CONFIG, 256).pack(3)
    losses = model(pack)
    text = dict(zip(pack.text_rows.tolist(), pack.text_ids.tolist(), strict=True))
    for row, label in zip(pack.label_rows.tolist(), pack.labels.tolist(), strict=True):
        assert text[row + 1] == label
    hidden = model.norm.understanding(
        model.text_in(torch.tensor([text[r] for r in pack.label_rows.tolist()]))
    )
    expected = F.cross_entropy(model.text_out(hidden), pack.labels) * pack.labels.numel()
    torch.testing.assert_close(losses.ce, expected)
    total = torch.zeros(())
    for i in range(pack.times.numel()):
        t = pack.times[i]
        if t > 0:
            mixed = (1 - t) * pack.latents[i] + t * pack.noise[i]
            x = model.latent_in(mixed) + model.place(pack.latent_places[i]) + model.time(t[None])[0]
            flow = model.latent_out(model.norm.generation(x))
            total = total + F.mse_loss(flow, pack.noise[i] - pack.latents[i])
    torch.testing.assert_close(losses.mse, total)


def test_noise_images_touch_no_later_loss() -> None:
    """A clean image's latents matter to what follows; those of a noise image only to its own flow."""
    pack = Synthetic(CONFIG, 256).pack(3)
    model = make()
    noisy = pack.times > 0
    assert noisy.any()
    assert not noisy.all()
    other = dataclasses.replace(pack, latents=pack.latents + noisy[:, None] * 5.0)
    base, changed = model(pack), model(other)
    assert torch.equal(base.ce, changed.ce)
    assert not torch.isclose(base.mse, changed.mse)
    other = dataclasses.replace(pack, latents=pack.latents + ~noisy[:, None] * 5.0)
    assert not torch.isclose(base.mse, model(other).mse)


def without_images(pack: Pack, length: int = 10) -> Pack:
    """One sample of text."""
    none = torch.empty(0, dtype=torch.int64)
    rows = torch.arange(length)
    return dataclasses.replace(
        pack,
        sample_lens=(length,),
        split_lens=(length,),
        attn_modes=("causal",),
        positions=rows,
        text_ids=rows + 2,
        text_rows=rows,
        vision=pack.vision[:0],
        vision_rows=none,
        vision_places=none,
        latents=pack.latents[:0],
        latent_rows=none,
        latent_places=none,
        noise=pack.noise[:0],
        times=pack.times[:0],
        labels=rows[1:] + 2,
        label_rows=rows[:-1],
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pack_without_images(device: str) -> None:
    """All weights get gradients, the unused ones zeros: ranks whose packs differ must reduce the same tensors."""
    model = make().to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    losses = model(without_images(Synthetic(CONFIG, 256).pack(3)).to(torch.device(device)))
    assert losses.mse == 0
    (losses.ce + losses.mse).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("ranks", [1, 3, 1000])
def test_ranks_share_the_rows_of_a_pack(ranks: int) -> None:
    """Each row is one rank's, with what belongs to it; the last ranks have rows of padding, or nothing else."""
    pack = Synthetic(CONFIG, 256).pack(3)
    count = -(-pack.tokens // ranks)
    parts = [local_rows(pack, rank, ranks) for rank in range(ranks)]
    found: dict[str, list[Tensor]] = {}
    for rank, part in enumerate(parts):
        rows = torch.cat((part.text_rows, part.vision_rows, part.latent_rows))
        assert torch.equal(rows.sort().values, torch.arange(count))
        assert part.positions.shape == (count,)
        assert (part.sample_lens, part.attn_modes) == (pack.sample_lens, pack.attn_modes)
        for field in dataclasses.fields(pack):
            if isinstance(value := getattr(part, field.name), Tensor):
                offset = rank * count if field.name.endswith("_rows") else 0
                found.setdefault(field.name, []).append(value + offset)
    padding = count * ranks - pack.tokens
    for name, values in found.items():
        whole = getattr(pack, name)
        # Padding is text after all other rows: at the end of positions, of ids and of rows.
        extra = padding if name in ("positions", "text_ids", "text_rows") else 0
        got = torch.cat(values)
        assert got.shape[0] == whole.shape[0] + extra, name
        assert torch.equal(got[: whole.shape[0]], whole), name


def test_shards_have_a_share_of_each_part() -> None:
    """Of a fused weight of 4 heads of q, 2 of k and 2 of v."""
    assert dealt_rows([4, 2, 2], 2).tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


def test_gradients_of_split_layers() -> None:
    """Of every parameter, with the fused prologue and without."""
    torchrun(2, Path(__file__).with_name("mot_worker.py"))


def test_rows_are_shared_with_our_operator_only(group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    make_operator("attnforge", 4, 128, cp=mesh)
    with pytest.raises(ValueError, match="cp: attention is 'sdpa', but rows are shared among ranks by 'attn"):
        make_operator("sdpa", 4, 128, cp=mesh)


def test_packs_are_their_seeds() -> None:
    source, again = Synthetic(CONFIG, 256), Synthetic(CONFIG, 256)
    kinds = set()
    for seed in range(20):
        pack, copy = source.pack(seed), again.pack(seed)
        assert 128 < pack.tokens <= 256
        rows = torch.cat((pack.text_rows, pack.vision_rows, pack.latent_rows))
        assert torch.equal(rows.sort().values, torch.arange(pack.tokens))
        assert torch.equal(pack.positions, copy.positions)
        assert torch.equal(pack.noise, copy.noise)
        kinds |= set(pack.attn_modes)
    assert kinds == {"causal", "full", "noise"}
