#!/usr/bin/env python3
"""Makes a platform wheel of the pure one: it brings the launcher along, so that its users need no C++ compiler.

    python -m build --wheel                                              # dist/attnforge-<version>-py3-none-any.whl
    .ci/prebuilt.py dist/attnforge-*-none-any.whl --python .venv/bin/python

Each --python is an interpreter with a torch to build for and attnforge's requirements, such as the environments that
`.ci/wheels.py --keep` leaves in build/wheels/. One build serves every Python with the same build of torch, and every
C library from the building machine's on: build where that is old. Needs the package `wheel`.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SAVE = """
import sys
from pathlib import Path
from attnforge.runtime.native import launcher
print(launcher.save_prebuilt(Path(sys.argv[1])))
"""


def add(directory: Path, python: str) -> None:
    """Build the launcher from the unpacked wheel's own text into it."""
    folder = directory / "attnforge" / "runtime" / "native" / "prebuilt"
    env = os.environ | {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        (python, "-c", SAVE, str(folder)),
        cwd=directory,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    print(done.stdout.strip())


def retag(directory: Path) -> None:
    """State that the wheel is for this machine's platform and holds compiled code."""
    (path,) = directory.glob("*.dist-info/WHEEL")
    text = re.sub(
        r"^Tag: .*", f"Tag: py3-none-linux_{platform.machine()}", path.read_text(), flags=re.MULTILINE
    )
    path.write_text(text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false"))


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="the pure wheel")
    parser.add_argument("--python", action="append", required=True, metavar="PROGRAM", help="repeatable")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        tool = (sys.executable, "-m", "wheel")
        subprocess.run((*tool, "unpack", str(given.wheel), "--dest", place), check=True)
        (directory,) = Path(place).iterdir()
        for python in given.python:
            add(directory, str(Path(python).absolute()))
        retag(directory)
        subprocess.run((*tool, "pack", str(directory), "--dest-dir", str(given.wheel.parent)), check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
