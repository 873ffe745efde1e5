#!/usr/bin/env python3
"""Builds the sdist and the wheel, checks them, and tries both with several Pythons, the wheel with several torches.

    make wheels                                              # every Python found, oldest and newest torch
    .ci/wheels.py --python python3.12 --torch 2.11.0         # one pair; both options repeat

Each pair gets a fresh environment, which holds what pip finds in its index (PIP_INDEX_URL, PIP_FIND_LINKS). There:
attention forward and backward on the CPU against torch, `attnforge doctor`, a search of two variants. Each Python also
installs the sdist, which must put the same files in place as the wheel. Prints a Markdown table for docs/wheels.md and
ends with 1 if anything failed. A CUDA build of torch takes 5 GB a pair while it is tried; minutes for each pair.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "wheels"
VERSIONS = [f"3.{minor}" for minor in range(10, 15)]

SMOKE = """
import platform
import torch
import attnforge

torch.manual_seed(0)
for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    q, k, v = (torch.randn(2, heads, 200, 64, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mask = attnforge.masks.documents([120, 80], "cpu", causal=True)
    document = torch.arange(200) >= 120
    visible = (document[:, None] == document) & torch.ones(200, 200).tril().bool()
    out = attnforge.attention(q, k, v, mask)
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=visible, enable_gqa=True)
    dout = torch.randn_like(out)
    ours = (out, *torch.autograd.grad(out, (q, k, v), dout))
    theirs = (exact, *torch.autograd.grad(exact, wide, dout.double()))
    for x, y in zip(ours, theirs):
        error = ((x.double() - y).norm() / y.norm()).item()
        assert error <= bound, (dtype, error)
print(f"| {platform.python_version()} | {torch.__version__} | {platform.libc_ver()[1]} |", end=" ")
"""
SEARCH = "search --device cpu --heads 4/2 --head-dim 64 --mask causal --length 256 --direction fwd"
STEPS = {
    "attention": ("python", "-c", SMOKE),
    "doctor": ("attnforge", "doctor"),
    "search": ("attnforge", *SEARCH.split(), "--variants", "2", "--seconds", "30", "--no-peers"),
}


def run(*command: str | Path, **rest: object) -> subprocess.CompletedProcess[str]:
    """The finished command with its output; nothing of this checkout is on its path."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "ATTNFORGE_"))
    }
    words = [str(word) for word in command]
    return subprocess.run(
        words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **{"env": env, **rest}
    )


def must(*command: str | Path, **rest: object) -> str:
    """Output of a command that ends this script if it fails."""
    done = run(*command, **rest)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))[:300]}\n{done.stdout}")
    return done.stdout


def pythons() -> list[str]:
    """One interpreter of each version that is on the PATH or kept by pyenv, and that runs."""
    found = []
    for version in VERSIONS:
        kept = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
        names = [*map(str, kept), shutil.which(f"python{version}") or ""]
        runs = (name for name in names if name and run(name, "-c", "import venv, ensurepip").returncode == 0)
        found += itertools.islice(runs, 1)
    return found


def torches(python: str) -> list[str]:
    """The oldest torch that pyproject.toml accepts, and the newest that the index has for this Python."""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    text = must(python, "-m", "pip", "index", "versions", "torch")
    newest = re.search(r"^torch \(([\d.]+)", text, re.MULTILINE)[1]
    return [oldest, newest]


def environment(directory: Path, python: str) -> Path:
    """A fresh virtual environment with a current pip; returns its folder of programs."""
    shutil.rmtree(directory, ignore_errors=True)
    must(python, "-m", "venv", directory)
    must(directory / "bin/python", "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    return directory / "bin"


def package() -> tuple[Path, Path]:
    """The sdist and the wheel, which is built from it; both checked."""
    tools, dist = environment(PLACE / "tools", sys.executable), PLACE / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    must(tools / "python", "-m", "pip", "install", "--quiet", "build", "twine", "check-wheel-contents")
    must(tools / "python", "-m", "build", "--outdir", dist, ROOT)
    print(must(tools / "twine", "check", "--strict", *sorted(dist.iterdir())).rstrip())
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    print(must(tools / "check-wheel-contents", wheel).rstrip(), flush=True)
    return sdist, wheel


def files(record: str) -> set[tuple[str, ...]]:
    """Name, hash and size of each file of the package that an installation's or a wheel's RECORD lists."""
    rows = (tuple(row) for row in csv.reader(record.splitlines()))
    return {row for row in rows if row[0].startswith("attnforge/") and not row[0].endswith(".pyc")}


def same_from_source(sdist: Path, wheel: Path, python: str, directory: Path) -> bool:
    """Whether this Python installs the sdist, with the files of the wheel; prints what is wrong."""
    programs = environment(directory, python)
    done = run(programs / "python", "-m", "pip", "install", "--quiet", "--no-deps", sdist)
    if done.returncode != 0:
        print(f"\n--- {python} cannot install the sdist\n{done.stdout}", flush=True)
        return False
    (path,) = directory.glob("lib/python*/site-packages/attnforge-*.dist-info/RECORD")
    with zipfile.ZipFile(wheel) as archive:
        packed = files(archive.read(f"{path.parent.name}/RECORD").decode())
    differing = files(path.read_text()) ^ packed
    if differing:
        names = sorted({row[0] for row in differing})
        print(f"\n--- {python}: sdist and wheel install different files: {names}", flush=True)
    return bool(packed) and not differing


def attempt(wheel: Path, python: str, torch: str, directory: Path) -> bool:
    """Install the wheel beside this torch and run every step; prints one row of the table."""
    begin = time.monotonic()
    programs = environment(directory, python)
    done = run(
        programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", wheel, f"torch=={torch}"
    )
    if done.returncode != 0:
        print(f"| {python} | {torch} | cannot be installed |\n{done.stdout}", flush=True)
        return False
    work = directory / "work"
    work.mkdir()
    settings = {"ATTNFORGE_CACHE_DIR": str(work / "cache"), "ATTNFORGE_TABLES": str(work / "tables")}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    failures = []
    for name, (program, *arguments) in STEPS.items():
        done = run(programs / program, *arguments, cwd=work, env=env)
        if name == "attention" and done.returncode == 0:
            print(done.stdout.splitlines()[-1], end=" ")
        if done.returncode != 0:
            failures.append(f"\n--- {name}\n{done.stdout}")
    seconds = time.monotonic() - begin
    print(f"{'failed' if failures else 'passed'} | {seconds:.0f} |", *failures, flush=True)
    return not failures


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", action="append", metavar="PROGRAM", help="default: every one from 3.10 to 3.14"
    )
    parser.add_argument("--torch", action="append", metavar="VERSION", help="default: oldest and newest")
    parser.add_argument("--keep", action="store_true", help="keep the environments, in build/wheels/")
    given = parser.parse_args()
    sdist, wheel = package()
    print("| Python | torch | glibc | result | s |\n| --- | --- | --- | --- | --- |", flush=True)
    good = True
    for python in given.python or pythons():
        good &= same_from_source(sdist, wheel, python, PLACE / "source")
        for torch in given.torch or torches(python):
            directory = PLACE / f"environment-{len(list(PLACE.iterdir()))}"
            good &= attempt(wheel, python, torch, directory)
            if not given.keep:
                shutil.rmtree(directory, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
