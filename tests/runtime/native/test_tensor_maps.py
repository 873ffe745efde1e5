"""Tensor maps that are kept and moved (runtime/native/tensor_maps.h) against maps made for each call, without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gxx import HERE

from attnforge.runtime.native.launcher import sources


def test_kept_maps_are_those_of_the_call(tmp_path: Path) -> None:
    texts = sources()
    for name in ("tensor_maps.h", "params.h", "variant_fields.h"):
        (tmp_path / name).write_text(texts[name])
    for name in ("driver.h", "c10/core/ScalarType.h"):  # tensor_maps.cpp has its own
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    program = tmp_path / "program"
    flags = ("-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path}")
    subprocess.run(["g++", *flags, HERE / "tensor_maps.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    moved, refused = map(int, done.stdout.split())
    assert moved > 5000  # of 40000 maps
    assert refused > 0
