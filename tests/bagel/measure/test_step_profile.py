"""benchmarks/step_profile.py: names of kernels find their groups, idle time is what nothing covers, bars are drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from step_profile import ORDER, group_of, kernels_of, main, summary

NAMES = {
    "attnforge_qk_norm_rope_bwd_sm90a_bf16_d128_sums": "prologue",
    "attnforge_bwd_sm90a_bf16_d128_spans_postprocess": "attention backward",
    "attnforge_fwd_sm90a_bf16_d128_spans": "attention forward",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "matmul",
    "triton_poi_fused_mul_silu_0": "activation",
    "swiglu_backward": "activation",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>": "elementwise",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>": "gather, scatter, copy",
    "void at::native::(anonymous namespace)::cuComputePartGradGammaBeta<float>": "norms",
    "Memset (Device)": "fill",
    "something": "other",
}


def test_groups() -> None:
    assert {name: group_of(name) for name in NAMES} == NAMES
    assert set(NAMES.values()) <= set(ORDER)


def test_a_summary() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 30.0, "dur": 10.0},
        {"cat": "kernel", "name": "attnforge_fwd", "ts": 10.0, "dur": 10.0},
        {"cat": "gpu_memset", "name": "Memset", "ts": 15.0, "dur": 1.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0},
    ]
    found = summary(kernels_of({"traceEvents": events}), 2)
    assert found["total"] == pytest.approx(0.015)
    assert found["groups"]["idle"] == pytest.approx(0.005)
    assert found["groups"]["matmul"] == pytest.approx(0.005)
    assert found["groups"]["fill"] == pytest.approx(0.0005)
    assert sorted(name for name, *_ in found["kernels"]) == ["Memset", "attnforge_fwd", "gemm"]


def test_bars(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    groups = dict.fromkeys(ORDER, 1.0)
    row = {"operator": "attnforge", "checkpointing": "full", "groups": groups}
    for name in ("before", "now"):
        (tmp_path / f"{name}.json").write_text(json.dumps([row]))
    picture = tmp_path / "step.svg"
    done = CliRunner().invoke(
        main, ["--draw", str(picture), *(str(tmp_path / f"{name}.json") for name in ("before", "now"))]
    )
    assert done.exit_code == 0, done.output
    assert "attention backward" in picture.read_text()
