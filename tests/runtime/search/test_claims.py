"""Problems that processes share out by locks and notes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnforge.runtime.search.claims import Claims

NAMES = [f"problem{n}" for n in range(40)]

# Takes what is left, writes who did it, and works a little.
WORKER = """
import sys, time
from pathlib import Path
from attnforge.runtime.search.claims import Claims
claims = Claims(Path(sys.argv[1]))
done = []
while any(claims.note(f"problem{n}") is None for n in range(40)):
    for n in range(40):
        with claims.take(f"problem{n}") as mine:
            if mine:
                time.sleep(0.002)
                claims.finish(f"problem{n}", {"by": sys.argv[2]})
                done.append(n)
print(done)
"""


def test_each_problem_is_done_once(tmp_path: Path) -> None:
    def work(name: str) -> list[int]:
        command = [sys.executable, "-c", WORKER, str(tmp_path), name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return list(json.loads(done.stdout))

    with ThreadPoolExecutor(4) as pool:
        shares = list(pool.map(work, "abcd"))
    assert sorted(n for share in shares for n in share) == list(range(40))
    for name, share in zip("abcd", shares, strict=True):
        assert all(Claims(tmp_path).note(f"problem{n}") == {"by": name} for n in share)


def test_what_a_killed_process_leaves_is_taken_over(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from attnforge.runtime.search.claims import Claims\n"
        "with Claims(Path(sys.argv[1])).take('one') as mine:\n    print(mine, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        claims = Claims(tmp_path)
        with claims.take("one") as mine:
            assert not mine
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    with claims.take("one") as mine:
        assert mine


def test_what_fails_is_left_for_another_try(tmp_path: Path) -> None:
    claims = Claims(tmp_path)

    def fail() -> None:
        with claims.take("one"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert claims.note("one") is None
    with claims.take("one") as mine:
        assert mine
        claims.finish("one", {"speed": 1})
    with claims.take("one") as mine:
        assert not mine
