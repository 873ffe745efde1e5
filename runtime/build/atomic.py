"""Atomic writes: readers find a file whole or not at all, also if its writer is killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, text: str, unfinished: str = ".tmp") -> None:
    """Replace the file atomically and durably; readable by all, as files under version control are.

    A process that is killed leaves a file in the folder of `path` whose name ends with `unfinished`.
    """
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=unfinished, delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)
