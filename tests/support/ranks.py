"""Programs of several processes, in the environment that `torchrun` gives them.

`torchrun` starts an interpreter for each rank, all of which import torch. Here one interpreter reads the program and
what it imports, then forks into the ranks: most of such a test's time goes to imports. On a machine with GPUs it is
`torchrun` itself, as a process that has looked for GPUs cannot fork into ones that use them.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import torch

HERE = Path(__file__).parent


def torchrun(ranks: int, script: Path, *arguments: str) -> str:
    """What the ranks of `script`, which has a function `main`, print, with a thread each.

    A rank that fails fails the test with its last words.
    """
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    launcher: tuple[str, ...] = (__file__, str(ranks))
    if torch.cuda.is_available():
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = subprocess.run(
        (sys.executable, *launcher, str(script), *arguments),
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def fork_ranks(count: int, program: dict[str, object]) -> int:
    """Run `main` of a program in `count` ranks; the status of the first that failed, which ends the others, or 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = [run_rank(program, common | {"RANK": rank, "LOCAL_RANK": rank}) for rank in range(count)]
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def run_rank(program: dict[str, object], environment: dict[str, object]) -> int:
    """The id of a child that runs `main` and ends."""
    if child := os.fork():
        return child
    os.environ.update({name: str(value) for name, value in environment.items()})
    main, status = program["main"], 0
    assert callable(main)
    try:
        main()
    except SystemExit as end:
        status = 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: freeing every object of torch's modules copies the memory that the ranks share.
    os._exit(status)


if __name__ == "__main__":
    _, number, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    import torch._dynamo  # ranks that compile would each import it

    program = runpy.run_path(script, run_name="__ranks__")
    gc.freeze()  # a collection in a rank leaves alone what is shared
    sys.exit(fork_ranks(int(number), program))
