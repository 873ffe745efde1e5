"""torch.func's transforms on attention: what they give, and what says that it is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functionalize, grad, jacrev, jvp, vjp, vmap

import attnforge

SEQ = 9
MASKS: dict[str, Callable[[], Any]] = {
    "full": lambda: None,
    "causal": attnforge.Causal,
    "spans": lambda: attnforge.Spans(
        torch.arange(SEQ, dtype=torch.int32), torch.full((SEQ,), SEQ, dtype=torch.int32)
    ),
    "dense": lambda: attnforge.DenseMask(
        torch.rand(2, 1, SEQ, SEQ, generator=torch.Generator().manual_seed(0)) < 0.7
    ),
}
each_mask = pytest.mark.parametrize("name", MASKS)


def draw(*sizes: int, heads: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, 2, heads, SEQ, 16, generator=torch.Generator().manual_seed(seed))


def inputs(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw(*sizes), draw(*sizes, heads=2, seed=1), draw(*sizes, heads=2, seed=2)


def close(one: Any, other: Any) -> bool:
    return all(bool((a - b).abs().max() <= 1e-5 * b.abs().max()) for a, b in zip(one, other, strict=True))


def weighted(*arguments: Any) -> Tensor:
    """Of q, k, v and a mask."""
    out = attnforge.attention(*arguments, scale=0.3)
    return (out * torch.linspace(-1, 2, 16)).sum()


def gradients(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(weighted(*leaves, mask), leaves)


@each_mask
def test_grad(name: str) -> None:
    mask, (q, k, v) = MASKS[name](), inputs()
    assert close(grad(weighted, (0, 1, 2))(q, k, v, mask), gradients(q, k, v, mask))


@each_mask
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 1, 4), (3, 0, None)])
@pytest.mark.filterwarnings("error")
def test_vmap(name: str, dims: tuple[int | None, ...]) -> None:
    """Over any dimension of any of the inputs, as over a loop; no warning of torch's about a slow fallback."""
    mask, given = MASKS[name](), inputs(3)
    mapped = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(given, dims, strict=True)]
    out, lse = vmap(lambda q, k, v: attnforge.attention(q, k, v, mask, return_lse=True), dims)(*mapped)
    for i in range(3):
        q, k, v = (x[0] if dim is None else x[i] for x, dim in zip(given, dims, strict=True))
        assert close((out[i], lse[i]), attnforge.attention(q, k, v, mask, return_lse=True))


def test_vmap_over_a_mask() -> None:
    """A mask that is made of mapped tensors."""
    q, k, v = inputs()
    planes = torch.rand(3, SEQ, SEQ, generator=torch.Generator().manual_seed(1)) < 0.6

    def masked(plane: Tensor) -> Tensor:
        return attnforge.attention(q, k, v, attnforge.DenseMask(plane))

    expected = torch.stack([masked(plane) for plane in planes])
    assert torch.equal(vmap(masked)(planes), expected)


@each_mask
def test_gradients_of_each_sample(name: str) -> None:
    mask, given = MASKS[name](), inputs(3)
    mapped = vmap(grad(weighted, (0, 1, 2)), (0, 0, 0, None))(*given, mask)
    for i in range(3):
        q, k, v = (x[i] for x in given)
        assert close([x[i] for x in mapped], gradients(q, k, v, mask))


@each_mask
def test_gradients_of_each_sample_beside_parameters(name: str) -> None:
    """Tensors that require grad outside of the transforms; second derivatives by them are refused when taken."""
    mask, (_, k, v) = MASKS[name](), inputs()
    samples, learned = inputs(3)[0], k.clone().requires_grad_()
    mapped = vmap(grad(lambda x: weighted(x, learned, v, mask)))(samples)
    assert close(mapped, [gradients(x, k, v, mask)[0] for x in samples])
    with pytest.raises(NotImplementedError, match="attnforge: second derivatives"):
        torch.autograd.grad(mapped.square().sum(), learned)


@each_mask
def test_vmap_over_no_samples(name: str) -> None:
    mask, (q, k, v) = MASKS[name](), inputs()
    none = q.new_zeros(0, *q.shape)
    out, lse = vmap(lambda x: attnforge.attention(x, k, v, mask, return_lse=True))(none)
    assert out.shape == none.shape
    assert lse.shape == none.shape[:-1]
    assert vmap(grad(lambda x: weighted(x, k, v, mask)))(none).shape == none.shape


def test_transforms_around_each_other() -> None:
    """vjp, the gradient of a mapped function, a Jacobian, and ordinary autograd around all of them."""
    q, k, v = inputs()
    expected = gradients(q, k, v, None)
    pull = vjp(lambda *x: weighted(*x, None), q, k, v)[1]
    assert close(pull(torch.tensor(1.0)), expected)
    by_entry = grad(lambda *x: vmap(lambda *y: weighted(*y, None))(*(z[:, None] for z in x)).sum(), (0, 1, 2))
    assert close(by_entry(q, k, v), expected)
    jacobian = jacrev(lambda x: weighted(x, k, v, None)[None])(q)
    assert close((jacobian[0],), expected[:1])
    leaf = q.clone().requires_grad_()
    out = vmap(lambda x: weighted(x[None], k[:1], v[:1], None))(leaf)
    (outside,) = torch.autograd.grad(out.sum(), leaf)
    assert close((outside,), gradients(q, k[:1].expand_as(k), v[:1].expand_as(v), None)[:1])


def test_functionalize() -> None:
    mask, (q, k, v) = attnforge.Causal(), inputs()
    expected = attnforge.attention(q, k, v, mask)
    assert torch.equal(functionalize(lambda x: attnforge.attention(x, k, v, mask))(q), expected)
    inside = grad(lambda x: functionalize(lambda y: weighted(y, k, v, mask))(x))(q)
    assert close((inside,), gradients(q, k, v, mask)[:1])


def test_autocast() -> None:
    """Inputs are cast as outside of transforms, and gradients are of the inputs' own dtype."""
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        ours = grad(weighted, (0, 1, 2))(q, k, v, None)
        assert [x.dtype for x in ours] == [torch.float32] * 3
        assert close(ours, gradients(q, k, v, None))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    q, k, v = inputs()

    def mapped(q: Tensor) -> Tensor:
        return vmap(lambda x: attnforge.attention(x, k, v))(torch.stack((q, q)))

    run = torch.compile(grad(lambda x: weighted(x, k, v, None)), backend=backend, fullgraph=True)
    assert close((run(q),), gradients(q, k, v, None)[:1])
    assert close((torch.compile(mapped, backend=backend, fullgraph=True)(q),), (mapped(q),))


def test_what_is_not_there() -> None:
    q, k, v = inputs()

    def run(x: Tensor) -> Tensor:
        return weighted(x, k, v, None)

    with pytest.raises(NotImplementedError, match="attnforge: derivatives of attention in forward mode"):
        jvp(run, (q,), (q,))
    with pytest.raises(NotImplementedError, match="attnforge: second derivatives"):
        grad(lambda x: grad(run)(x).square().sum())(q)
    with pytest.raises(NotImplementedError, match=r"attnforge: torch\.func\.functionalize around"):
        functionalize(grad(run))(q)


def test_wrong_arguments_are_named() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="k: got head_dim 8"):
        vmap(lambda x: attnforge.attention(x, k[..., :8], v))(q[None])
