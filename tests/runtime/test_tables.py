"""Files of tuned tables: reading, merging, names of devices, entries of kernels that are gone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tuned_entries import FIRST, H200, PROBLEM, entries

from attnforge.codegen import cpu_features
from attnforge.codegen.spec import Arch, Direction
from attnforge.runtime import tables
from attnforge.runtime.tables import Tuned


def test_file_round_trip(tmp_path: Path) -> None:
    assert tables.load(H200, tmp_path) == ()
    written = entries(PROBLEM, 3)
    path = tables.save(H200, written, tmp_path)
    assert path == tmp_path / "nvidia-h200.json"
    assert list(tables.load(H200, tmp_path)) == written
    assert json.loads(path.read_text())[0]["class"]["head_dim"] == 128
    assert list(tmp_path.glob("*.json*")) == [path]


def test_a_later_winner_replaces_its_class_only(tmp_path: Path) -> None:
    first, second, third = entries(PROBLEM, 3)
    tables.save(H200, [first, second], tmp_path)
    better = replace(first, spec=third.spec, size=first.size + 5)  # the same octave
    tables.save(H200, [better], tmp_path)
    assert {entry.spec for entry in tables.load(H200, tmp_path)} == {better.spec, second.spec}


@pytest.mark.parametrize(("speed", "replaces"), [(99.0, False), (100.0, True), (101.0, True)])
def test_a_winner_of_another_run_replaces_what_is_not_faster(
    speed: float, replaces: bool, tmp_path: Path
) -> None:
    """One that was timed beside the present one replaces it in any case."""
    first, second = entries(PROBLEM, 2)
    later = replace(first, spec=second.spec, tflops=speed)
    for beside, taken in (((), replaces), ((first.spec,), True)):
        tables.save(H200, [first], tmp_path)
        tables.save(H200, [later], tmp_path, beside=beside)
        assert [entry.spec for entry in tables.load(H200, tmp_path)] == [later.spec if taken else first.spec]


def test_a_table_does_not_depend_on_the_order_of_searches(tmp_path: Path) -> None:
    """So that a table under version control changes in the lines of the new winners alone."""
    a, b, c = entries(PROBLEM, 3)
    orders = (a, b, c), (c, a, b)
    for number, order in enumerate(orders):
        for entry in order:
            path = tables.save(H200, [entry], tmp_path / str(number))
        tables.save(H200, order, tmp_path / "at once")
    texts = {path.read_text() for path in tmp_path.glob(f"*/{path.name}")}
    assert len(texts) == 1


def test_a_table_is_readable_by_all(tmp_path: Path) -> None:
    """It is a file under version control, whatever the umask and the temporary file it was made of."""
    path = tables.save(H200, entries(PROBLEM, 1), tmp_path)
    assert path.stat().st_mode & 0o777 == 0o644


def test_saving_reads_what_is_there_now(tmp_path: Path) -> None:
    """Not what this process read before: another one may have saved within the same tick of the clock."""
    first, second = entries(PROBLEM, 2)
    path = tables.save(H200, [first], tmp_path)
    before = path.stat()
    assert tables.load(H200, tmp_path) == (first,)
    text = json.loads(path.read_text())
    path.write_text(json.dumps([*text, second.to_json()]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    third = replace(first, group=5)
    tables.save(H200, [third], tmp_path)
    found = tables.load(H200, tmp_path)
    assert len(found) == 3
    assert all(entry in found for entry in (first, second, third))


def test_a_table_half_written_by_the_dead_is_swept(tmp_path: Path) -> None:
    (tmp_path / "tmpabc.json.tmp").write_text("[")
    tables.save(H200, entries(PROBLEM, 1), tmp_path)
    assert [path.name for path in tmp_path.glob("*.json*")] == ["nvidia-h200.json"]


@pytest.mark.parametrize(
    ("bf16", "amx_refusal", "name"),
    [(False, "no AMX", "cpu avx512"), (True, "no AMX", "cpu avx512 bf16"), (True, "", "cpu avx512 bf16 amx")],
)
def test_a_cpus_table_is_that_of_its_instructions(
    bf16: bool, amx_refusal: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu_features, "has_bf16", lambda: bf16)
    monkeypatch.setattr(cpu_features, "amx_refusal", lambda: amx_refusal)
    assert tables.device_name(torch.device("cpu")) == name


def test_a_table_that_is_none(tmp_path: Path) -> None:
    path = tables.table_path(H200, tmp_path)
    for text in ("{", '{"a": 1}', '[{"spec": {}}]', '[{"spec": {"direction": "fwd"}}]'):
        path.write_text(text)
        tables._read.cache_clear()
        with pytest.raises(ValueError, match=r"nvidia-h200.json is not a tuned table.*delete it"):
            tables.load(H200, tmp_path)


def test_entries_of_kernels_that_are_gone_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a knob with a value that no kernel has any more; the others of the table count, and saving drops it."""
    first, second, third = entries(replace(PROBLEM, direction=Direction.BACKWARD, arch=Arch.SM90A), 3)
    older = [first.to_json(), second.to_json(), third.to_json()]
    for entry, descending in zip(older, (0, 1, 0), strict=True):
        entry["spec"]["tuning"]["descending"] = descending
    path = tables.table_path(H200, tmp_path)
    path.write_text(json.dumps(older))
    assert tables.load(H200, tmp_path) == (first, third)
    assert "an entry is skipped" in caplog.text
    assert "descending unknown" in caplog.text
    tables.save(H200, [first], tmp_path)
    assert json.loads(path.read_text()) == [first.to_json(), third.to_json()]


def test_the_class_of_a_deterministic_entry_is_its_own(tmp_path: Path) -> None:
    """It survives a round trip; entries of older tables read as they did and write the same JSON."""
    strict, loose = (Tuned(FIRST, 7, 1024, 1.0, 90.0, deterministic=found) for found in (True, False))
    assert strict.cls == {**loose.cls, "deterministic": 1}
    assert "deterministic" not in loose.cls
    tables.save(H200, [loose, strict], tmp_path)
    assert set(map(str, tables.load(H200, tmp_path))) == {str(loose), str(strict)}
    old = loose.to_json()
    assert Tuned.from_json(old) == loose
    assert Tuned.from_json(old).to_json() == old
