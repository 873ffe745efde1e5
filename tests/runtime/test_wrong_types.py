"""Arguments of wrong types: a TypeError or ValueError that names the argument, from every public function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import attnforge

S, D = 8, 16
WRONG = ("x", 3, 1.5, True, None, [1], object())
NO_SUCH_TENSORS = (np.zeros(3, dtype=np.float32), torch.zeros(3))  # in the place of tensors


class Public(NamedTuple):
    """A function, arguments that it takes, and values of WRONG that are no mistake, by argument."""

    function: Callable[..., Any]
    good: dict[str, Any]
    fine: dict[str, tuple[Any, ...]]


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


NUMBERS, FLAGS = (3, 1.5, None), (3, 1.5, True, None)
ANY = WRONG  # not looked at, or nothing but true or false
VECTOR, LENGTHS = torch.zeros(S, dtype=torch.int32), torch.tensor([0, 3, S], dtype=torch.int32)
HEADS_FIRST = {name: tensor(1, 2, S, D) for name in "qkv"}
HEADS_INSIDE = {name: tensor(1, S, 2, D) for name in "qkv"}
PACKED = {name: tensor(S, 2, D) for name in "qkv"}
FLASH = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
FLASH_FINE = {
    "softmax_scale": NUMBERS,
    "softcap": (3, 1.5),
    "alibi_slopes": (None,),
    "deterministic": FLAGS,
    "return_attn_probs": ANY,
}
PUBLIC = {
    "attention": Public(
        attnforge.attention,
        {
            **HEADS_FIRST,
            "mask": None,
            "scale": None,
            "return_lse": False,
            "deterministic": False,
            "score": None,
            "sinks": None,
        },
        {
            "mask": (None,),
            "scale": NUMBERS,
            "return_lse": ANY,
            "deterministic": FLAGS,
            "score": (None,),
            "sinks": (None,),
        },
    ),
    "Spans": Public(
        attnforge.Spans,
        {"starts": VECTOR, "ends": VECTOR + S, "visible_keys": None},
        {"visible_keys": (3, 1.5, None)},
    ),
    "DenseMask": Public(
        attnforge.DenseMask,
        {"mask": torch.ones(S, S, dtype=torch.bool), "visible_keys": None},
        {"visible_keys": (3, 1.5, None)},
    ),
    "flash_attn_func": Public(attnforge.flash_attn_func, HEADS_INSIDE | FLASH, {**FLASH_FINE, "causal": ANY}),
    "flash_attn_varlen_func": Public(
        attnforge.flash_attn_varlen_func,
        {
            **PACKED,
            "cu_seqlens_q": LENGTHS,
            "cu_seqlens_k": LENGTHS,
            "max_seqlen_q": S,
            "max_seqlen_k": S,
            **FLASH,
            "block_table": None,
        },
        {**FLASH_FINE, "causal": ANY, "max_seqlen_q": ANY, "max_seqlen_k": ANY, "block_table": (None,)},
    ),
    "flex_attention": Public(
        attnforge.flex_attention,
        {
            **{name: tensor(1, 2, S, D) for name in ("query", "key", "value")},
            "score_mod": None,
            "block_mask": create_block_mask(causal, None, None, S, S, device="cpu"),
            "scale": None,
            "enable_gqa": False,
            "return_lse": False,
            "kernel_options": None,
            "return_aux": None,
        },
        {
            "score_mod": (None,),
            "block_mask": (None,),
            "scale": NUMBERS,
            "enable_gqa": ANY,
            "return_lse": ANY,
            "kernel_options": ANY,
            "return_aux": (None,),
        },
    ),
    "from_block_mask": Public(
        attnforge.from_block_mask,
        {"block_mask": create_block_mask(causal, None, None, S, S, device="cpu")},
        {},
    ),
    "PackedMask": Public(
        attnforge.bagel.PackedMask,
        {
            "sample_lens": [S],
            "split_lens": [3, S - 3],
            "attn_modes": ["causal", "full"],
            "device": "cpu",
            "used": None,
            "padding": "skip",
        },
        {"used": (None,), "device": (3,) * (torch.accelerator.device_count() > 3)},
    ),
    "softcap": Public(attnforge.scores.softcap, {"cap": 30.0}, {"cap": (3, 1.5)}),
    "alibi": Public(
        attnforge.scores.alibi,
        {"slopes": torch.ones(2), "offset": 0},
        {"slopes": NO_SUCH_TENSORS[1:], "offset": (3,)},
    ),
}


def names(wrong: object) -> str:
    return type(wrong).__name__


def is_one_of(value: object, fine: tuple[Any, ...]) -> bool:
    return any(value is x for x in fine)


CASES = [
    pytest.param(public, argument, wrong, id=f"{name}-{argument}-{names(wrong)}")
    for name, public in PUBLIC.items()
    for argument in public.good
    for wrong in WRONG + NO_SUCH_TENSORS * isinstance(public.good[argument], Tensor)
    if not is_one_of(wrong, public.fine.get(argument, ()))
]


NESTED = torch.nested.nested_tensor([torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("wrong", "words"), [(torch.zeros(1, 2, 3, 4).to_sparse(), "to_dense"), (NESTED, "masks.documents")]
)
@pytest.mark.parametrize(
    "rest", [{}, {"score": attnforge.scores.softcap(2.0)}, {"return_lse": True}], ids=str
)
def test_sparse_and_nested_tensors(wrong: Tensor, words: str, rest: dict[str, Any]) -> None:
    right = torch.zeros(1, 2, 3, 4)
    call: Any = attnforge.attention
    with pytest.raises(TypeError, match=f"q: got .*{words}"):
        call(wrong, right, right, **rest)
    with pytest.raises(TypeError, match="mask: got layout"):
        attnforge.DenseMask(torch.ones(3, 3, dtype=torch.bool).to_sparse())
    with pytest.raises(TypeError, match="tensor: got layout"):
        attnforge.scores.bias(torch.ones(3, 3).to_sparse())


@pytest.mark.parametrize(
    "rest", [{}, {"score": attnforge.scores.softcap(2.0)}, {"return_lse": True}], ids=str
)
def test_scales(rest: dict[str, Any]) -> None:
    """The gradient of a learned scale would be lost; numbers of numpy are numbers."""
    call: Any = attnforge.attention
    q, k, v = (torch.zeros(1, 2, 3, 4) for _ in range(3))
    with pytest.raises(TypeError, match=r"scale: got Tensor.*multiply q"):
        call(q, k, v, scale=torch.tensor(0.5, requires_grad=True), **rest)
    for scale in (np.float32(0.5), np.float64(0.5), np.int64(2), 2):
        call(q, k, v, scale=scale, **rest)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_good_arguments_are_good(name: str) -> None:
    public = PUBLIC[name]
    public.function(**public.good)
    for argument, fine in public.fine.items():
        for value in fine:
            public.function(**public.good | {argument: value})


@pytest.mark.parametrize(("public", "argument", "wrong"), CASES)
def test_wrong_type(public: Public, argument: str, wrong: object) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        public.function(**public.good | {argument: wrong})
    assert argument.removeprefix("softmax_") in str(caught.value)


@pytest.mark.parametrize("wrong", WRONG + NO_SUCH_TENSORS, ids=names)
def test_context_parallel(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^device_mesh: got"):
        attnforge.context_parallel(wrong)
    if wrong is None or type(wrong) is int:
        return
    mesh: Any = object()  # comes later
    with pytest.raises(TypeError, match=r"^heads: got"):
        attnforge.context_parallel(mesh, heads=wrong)
    with pytest.raises(TypeError, match=r"^pieces: got"):
        attnforge.context_parallel(mesh, pieces=wrong)


@pytest.mark.parametrize("wrong", WRONG, ids=names)
def test_trainer(wrong: Any) -> None:
    if wrong is not None:
        with pytest.raises(ValueError, match=r"^trainer: got"):
            attnforge.bagel.patch(trainer=wrong)
        with pytest.raises(ValueError, match=r"^trainer: got"):
            attnforge.bagel.record("packs.jsonl", trainer=wrong)


def test_tensors_where_lists_or_masks_are_expected_get_a_hint() -> None:
    lengths = torch.tensor([50])
    with pytest.raises(TypeError, match=r"sample_lens: got Tensor, .*; use sample_lens.tolist\(\)"):
        attnforge.bagel.PackedMask(lengths, [50], ["causal"], "cpu")  # type: ignore[arg-type]
    q = torch.randn(1, 2, 50, 16)
    with pytest.raises(TypeError, match=r"goes in as attnforge.DenseMask\(mask\)"):
        attnforge.attention(q, q, q, torch.ones(50, 50, dtype=torch.bool))  # type: ignore[call-overload]


def test_without_transformers_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers is not installed; pip install .*huggingface"):
        attnforge.register_huggingface()


def test_names_of_lazy_modules_are_listed() -> None:
    for module in (attnforge, attnforge.bagel):
        assert set(module.__all__) <= set(dir(module))
