"""Compile with nvcc where every warning is an error, and check what ptxas says of registers and spills.

Each text is compiled once: for all tests, all workers and the next run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

import kept

from attnforge.codegen.render import Source
from attnforge.runtime.build import compilation, toolchain

# Bytes of stores and loads together that a main kernel which fills the register file may spill: ptxas 13.0 gives
# 12 to 72 for the first choice of some targets and nothing for all others.
SPILLED = 72
# ptxas says these of wgmma it had to serialise. C7519 only adds an instruction to wait for registers.
SERIALISED = re.compile(r"C75(?!19)\d\d")


def compile_strictly(source: Source, directory: Path) -> tuple[str, dict[str, dict[str, int]]]:
    """Log and resources by kernel; any warning fails."""
    cubin = strict_cubin(source, directory)
    log = cubin.with_name("log").read_text()
    return log, compilation.parse_ptxas(log)


def strict_cubin(source: Source, directory: Path) -> Path:
    """The cubin of a source, with what the compiler said in the file `log` beside it; any warning fails.

    `directory` is a place to compile in.
    """
    tool = toolchain.toolchain(source.spec.problem.arch)
    assert isinstance(tool, toolchain.Command)
    flags = (*tool.flags, "-Werror", "all-warnings")
    digest = hashlib.sha256("\0".join((source.text, tool.identity, *flags)).encode()).hexdigest()[:20]
    built = kept.directory / "cubins" / digest
    if not built.exists():
        path = compilation.write_source(source, directory)
        code, log = toolchain.run((str(tool.program), *flags, "-o", tool.binary_name, path.name), directory)
        assert code == 0, f"{source.spec.to_cli()}\n{log}"
        aside = built.with_name(f"{digest}.{os.getpid()}")
        aside.mkdir(parents=True)
        shutil.copy(directory / tool.binary_name, aside)
        (aside / "log").write_text(log)
        try:
            aside.rename(built)
        except OSError:  # another worker was first
            shutil.rmtree(aside)
    return built / tool.binary_name


def check_resources(source: Source, directory: Path) -> str:
    """Compile; registers fit, and no kernel spills but for a few bytes of a main one. Returns the log."""
    log, resources = compile_strictly(source, directory)
    launches = (*source.plan.launches, *source.plan.schedule)
    assert resources.keys() == {launch.symbol for launch in launches}
    for launch in launches:
        used = resources[launch.symbol]
        assert used["registers"] * launch.threads <= 65536, launch.symbol
        full = launch.symbol == source.spec.symbol and used["registers"] >= 128
        assert used["spill_bytes"] <= (SPILLED if full else 0), launch.symbol
    return log
