"""Names of kernels are read back to the specs that they name."""

from __future__ import annotations

import pytest
from spaces import sample

from attnforge.codegen.families import FAMILIES
from attnforge.codegen.slugs import parse
from attnforge.codegen.spec import Arch, DType, Mask, Problem
from attnforge.runtime.search.winners import tuned_specs

ARCHS = {arch.family: arch for arch in reversed(Arch)}


@pytest.mark.parametrize("dims", [(64, 0), (192, 128)])
@pytest.mark.parametrize("family", list(FAMILIES), ids=str)
def test_every_family_is_read_back(family: tuple[str, object], dims: tuple[int, int]) -> None:
    name, direction = family
    arch = ARCHS[name.removesuffix("_fp32").removesuffix("_wide")]
    dtype = DType.FLOAT32 if name.endswith("_fp32") else DType.BFLOAT16
    problem = Problem(direction, arch, dtype, dims[0], Mask.SPANS, 16, dims[1])  # type: ignore[arg-type]
    for spec in sample(problem, 20):
        assert parse(spec.slug) == parse(spec.symbol) == parse(f"generated/{spec.slug}.cu") == spec


def test_every_tuned_kernel_is_read_back() -> None:
    """With the functions that names have a digest of."""
    specs = tuned_specs()
    functions = {f for spec in specs for f in (spec.problem.mask_mod, spec.problem.score) if f}
    assert len(specs) > 50
    assert len(functions) > 2
    assert all(parse(spec.slug, functions) == spec for spec in specs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash_fwd", "is not the name of a kernel"),
        ("fwd_sm90a_bf16_d128_causal_a16_m192", "the knobs are 'm192', expected mN_nN_"),
        ("fwd_sm90a_bf16_d128_causal_a16_m192_n80_s3_p1_r1_k0_q0_c1_z9", "expected mN_nN_"),
        ("bwd_sm90a_fp32_d128_causal_a16_m192", "has no fp32 bwd kernel"),
        (
            "fwd_sm90a_bf16_d128_causal_a16_softcapc207641a_m192_n80",
            "softcapc207641a is a function of a mask or",
        ),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(name)
