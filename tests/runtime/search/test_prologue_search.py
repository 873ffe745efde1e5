"""The search of qk_norm_rope's kernels: what wins is saved and used, what is wrong is not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attnforge.cli import main
from attnforge.codegen.plan import Infeasible
from attnforge.codegen.prologue import PrologueSpec, candidates, spec_from_slug
from attnforge.codegen.spec import Direction, DType
from attnforge.runtime import prologue_kernels, tables
from attnforge.runtime.build.settings import TABLES
from attnforge.runtime.search import prologue
from attnforge.runtime.search.timing import Timing

CPU = torch.device("cpu")
WORKLOAD = prologue.Workload(200, 3, 1, 32, DType.FLOAT32, CPU)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tables that calls read."""
    monkeypatch.setenv(TABLES, str(tmp_path))
    prologue_kernels.forget()
    return tmp_path


@pytest.mark.parametrize("direction", list(Direction))
def test_the_winner_is_saved_and_used(direction: Direction, folder: Path) -> None:
    found = prologue.search(WORKLOAD, direction, variants=2)
    assert found.tried == len(found.leaders) == 2
    assert not found.failed
    assert found.leaders[0].ms <= found.leaders[1].ms
    slower = found.leaders[1]
    path = prologue.keep(slower, WORKLOAD, folder)
    problem = WORKLOAD.problem(direction)
    assert prologue_kernels.choose(problem, tables.device_name(CPU)) == slower.spec
    prologue.keep(found.leaders[0], WORKLOAD, folder)  # in place of the first
    assert [entry["spec"] for entry in json.loads(path.read_text())] == [found.leaders[0].spec.slug]


def test_a_tuning_serves_other_dtypes_of_tables_and_weights(folder: Path) -> None:
    problem = WORKLOAD.problem(Direction.FORWARD)
    last = list(candidates(problem))[-1]
    prologue.keep(prologue.Result(last, "ok", timing=Timing(1, 1, 1, 1)), WORKLOAD, folder)
    other = spec_from_slug(last.slug.replace("_a16_", "_a8_")).problem
    assert prologue_kernels.choose(other, tables.device_name(CPU)) == PrologueSpec(other, last.tuning)
    assert prologue_kernels.choose(other, "another device") == next(candidates(other))


def test_a_file_that_is_no_table_is_named(folder: Path) -> None:
    (folder / prologue_kernels.TUNED).mkdir()
    path = tables.table_path("my device", folder / prologue_kernels.TUNED)
    path.write_text('[{"spec": "nonsense"}]')
    with pytest.raises(
        ValueError, match=r"my-device.json is not a table of prologue kernels: 'nonsense' is not"
    ):
        prologue_kernels.choose(WORKLOAD.problem(Direction.FORWARD), "my device")


@pytest.mark.parametrize("wrong_by", [1e-3, math.nan])
def test_wrong_results_do_not_win(wrong_by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = prologue.Inputs.run
    wrong = next(candidates(WORKLOAD.problem(Direction.FORWARD)))

    def run(self: prologue.Inputs, direction: Direction, spec: PrologueSpec) -> tuple[torch.Tensor, ...]:
        outputs = right(self, direction, spec)
        if spec == wrong:
            outputs[1][3, 0, 5] += wrong_by
        return outputs

    monkeypatch.setattr(prologue.Inputs, "run", run)
    found = prologue.search(WORKLOAD, Direction.FORWARD, variants=2)
    assert [(r.spec, r.status) for r in found.failed] == [(wrong, "wrong")]
    assert wrong not in {r.spec for r in found.leaders}


def test_a_problem_without_kernels() -> None:
    workload = prologue.Workload(64, 2, 1, 64, DType.FLOAT16, CPU)
    with pytest.raises(Infeasible, match="fp16: the CPU's kernels take fp32 and bf16"):
        prologue.search(workload, Direction.FORWARD)


def test_bytes_are_those_of_bagels_pack() -> None:
    """Forward: 36 heads of 128 bf16 in and out, 64 angles twice, a row; backward: q and k once more."""
    workload = prologue.Workload(1000, 28, 4, 128, DType.BFLOAT16, CPU)
    assert workload.bytes(Direction.FORWARD) == 1000 * (2 * 36 * 256 + 512 + 4)
    assert workload.bytes(Direction.BACKWARD) == 1000 * ((2 * 36 + 32) * 256 + 512 + 4)


def test_the_command(folder: Path) -> None:
    arguments = ["prologue", "--model", "0.5B", "--tokens", "64", "--device", "cpu", "--variants", "1"]
    result = CliRunner().invoke(main, [*arguments, "--direction", "bwd", "--table-out", str(folder)])
    assert result.exit_code == 0, result.output
    assert "qk_norm_rope_bwd_cpu_bf16_d64" in result.output
    assert "1 variants; the winner is in" in result.output
    result = CliRunner().invoke(
        main, ["render", "--prologue", "qk_norm_rope_fwd_cpu_fp32_d64_wfp32_tfp32_a16_c64"]
    )
    assert result.exit_code == 0, result.output
    assert 'extern "C" void attnforge_qk_norm_rope_fwd_cpu_fp32_d64' in result.output
