"""Programs of several processes, started as `torchrun` starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(ranks: int, script: Path, *arguments: str) -> str:
    """What the ranks of `script` print, with a thread each. A rank that fails fails the test with its last words."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        (*command, str(script), *arguments),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout
