"""Compile with nvcc where every warning is an error, and check what ptxas says of registers and spills."""

from __future__ import annotations

import re
from pathlib import Path

from attnforge.codegen.render import Source
from attnforge.runtime.build import compilation, toolchain

# Bytes of stores and loads together that a main kernel which fills the register file may spill: ptxas 13.0 gives
# 12 to 72 for the first choice of some targets and nothing for all others.
SPILLED = 72
# ptxas says these of wgmma it had to serialise. C7519 only adds an instruction to wait for registers.
SERIALISED = re.compile(r"C75(?!19)\d\d")


def compile_strictly(source: Source, directory: Path) -> tuple[str, dict[str, dict[str, int]]]:
    """Log and resources by kernel; any warning fails."""
    tool = toolchain.toolchain(source.spec.problem.arch)
    assert isinstance(tool, toolchain.Command)
    path = compilation.write_source(source, directory)
    strict = ("-Werror", "all-warnings")
    code, log = toolchain.run(
        (str(tool.program), *tool.flags, *strict, "-o", tool.binary_name, path.name), directory
    )
    assert code == 0, f"{source.spec.to_cli()}\n{log}"
    return log, compilation.parse_ptxas(log)


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
