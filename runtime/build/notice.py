"""What takes long at the first run is announced on stderr: once a process, and only to a terminal."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading

_said: set[str] = set()
_lock = threading.Lock()


def announce(subject: str, text: str) -> None:
    """Print `attnforge: text` unless `subject` was announced before, or stderr is no terminal.

    Helper processes are silent, and all ranks of a distributed run but the first of a machine.
    """
    with _lock:
        if subject in _said:
            return
        _said.add(subject)
    helper = multiprocessing.parent_process() is not None or os.environ.get("LOCAL_RANK", "0") != "0"
    if not helper and sys.stderr.isatty():
        print(f"attnforge: {text}", file=sys.stderr, flush=True)
