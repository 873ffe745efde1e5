"""An exported package, built once for all tests and kept: a second run of the tests compiles nothing."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import kept
import torch

from attnforge.codegen.package import Tree
from attnforge.codegen.spec import Arch, Direction, DType, Mask
from attnforge.runtime import export

COMMAND = "attnforge export"
NAME = "custom_attention"
DIRECTIONS = tuple(Direction)


def make_tree(
    arch: Arch,
    shapes: list[export.Shape],
    dtypes: tuple[DType, ...],
    masks: tuple[Mask, ...],
    directions: tuple[Direction, ...] = DIRECTIONS,
) -> Tree:
    return Tree(NAME, arch, export.collect(arch, shapes, dtypes, masks, directions))


def built(tree: Tree) -> Path:
    """Directory where the package was built, in the cache of the tests."""
    parts = [
        torch.__version__,
        sys.version,
        *(x for item in sorted(tree.files(COMMAND).items()) for x in item),
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    kind = "hub" if tree.hub else "own"
    directory = kept.directory / f"exported-{kind}-{digest}"
    with kept.lock("exported"):
        if not directory.exists():
            for old in directory.parent.glob(f"exported-{kind}-*"):
                shutil.rmtree(old)
            aside = directory.with_name(f"{directory.name}.tmp")
            export.write(tree, aside, COMMAND)
            run(aside, *(("build_variant.py",) if tree.hub else ("setup.py", "build_ext", "--inplace")))
            aside.rename(directory)
    return directory


def run(directory: Path, *arguments: str) -> str:
    """Output of a Python script of the package, run as its user would: nothing of attnforge on the path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MAX_JOBS": "2"}
    env["CXX"] = str(quick_compiler())
    done = subprocess.run(
        (sys.executable, *arguments), cwd=directory, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def quick_compiler() -> Path:
    """A C++ compiler that does not optimise, whatever it is told: most of its time is for torch's headers as it is.

    If it is g++, it collects garbage only beyond 2 GB, which saves a tenth of its time.
    """
    path, compiler = kept.directory / "quick-c++", os.environ.get("CXX", "c++")
    heap = "" if "clang" in compiler else " --param ggc-min-expand=400 --param ggc-min-heapsize=2000000"
    with kept.lock("exported-compiler"):
        if not path.exists():
            path.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0{heap}\n')
            path.chmod(0o755)
    return path


def load(directory: Path) -> ModuleType:
    """The package, imported into this process."""
    sys.path.insert(0, str(directory))
    try:
        return importlib.import_module(NAME)
    finally:
        sys.path.remove(str(directory))
