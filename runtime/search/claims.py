"""Problems shared out between processes without a server: a lock and a note for each, in a folder that all see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from attnforge.runtime.build.atomic import replace_file


class Claims:
    """The notes of a folder: NAME.json of what is finished, NAME.lock while a process works on it.

    A process that dies releases its lock, so another one takes its problem over.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def note(self, name: str) -> dict[str, Any] | None:
        """What was written when `name` was finished; None as long as it is not."""
        try:
            found: dict[str, Any] = json.loads((self._folder / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        return found

    @contextmanager
    def take(self, name: str) -> Iterator[bool]:
        """Whether `name` is this process's to work on until the block ends: unfinished, and nobody else's."""
        try:
            with FileLock(self._folder / f"{name}.lock", blocking=False):
                yield self.note(name) is None
        except Timeout:
            yield False

    def finish(self, name: str, note: dict[str, Any]) -> None:
        """Write the note of a problem that `take` gave to this process; whole or not at all."""
        replace_file(self._folder / f"{name}.json", json.dumps(note, indent=1) + "\n")
