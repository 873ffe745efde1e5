"""Compile with nvcc where every warning is an error, and check what ptxas says of registers and spills.

Each text is compiled once: for all tests, all workers and the next run. Of a list of sources one text is made: to start
nvcc, and to read the headers that it includes of its own accord, takes a quarter of the time of a kernel.
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


def compile_strictly(source: Source | list[Source], directory: Path) -> tuple[str, dict[str, dict[str, int]]]:
    """Log and resources by kernel, of a source or of several of one target; any warning fails."""
    cubin = strict_cubin(source, directory)
    log = cubin.with_name("log").read_text()
    return log, compilation.parse_ptxas(log)


def strict_cubin(source: Source | list[Source], directory: Path) -> Path:
    """The cubin of a source or of several, with what the compiler said in the file `log` beside it; any warning fails.

    `directory` is a place to compile in.
    """
    sources = source if isinstance(source, list) else [source]
    (arch,) = {each.spec.problem.arch for each in sources}
    tool = toolchain.toolchain(arch)
    assert isinstance(tool, toolchain.Command)
    flags = (*tool.flags, "-Werror", "all-warnings")
    text = sources[0].text if len(sources) == 1 else together(sources)
    digest = hashlib.sha256("\0".join((text, tool.identity, *flags)).encode()).hexdigest()[:20]
    built = kept.directory / "cubins" / digest
    if not built.exists():
        path = directory / "kernels.cu"
        path.write_text(text)
        code, log = toolchain.run((str(tool.program), *flags, "-o", tool.binary_name, path.name), directory)
        assert code == 0, "\n".join((*(each.spec.to_cli() for each in sources), log))
        aside = built.with_name(f"{digest}.{os.getpid()}")
        aside.mkdir(parents=True)
        shutil.copy(directory / tool.binary_name, aside)
        (aside / "log").write_text(log)
        try:
            aside.rename(built)
        except OSError:  # another worker was first
            shutil.rmtree(aside)
    return built / tool.binary_name


def together(sources: list[Source]) -> str:
    """One text, with a namespace for each source; kernels are extern "C", and their names say which they are."""
    return "\n".join(f"namespace source_{i} {{\n{each.text}\n}}" for i, each in enumerate(sources))


def check_resources(source: Source | list[Source], directory: Path) -> str:
    """Compile; registers fit, and no kernel spills but for a few bytes of a main one. Returns the log."""
    log, resources = compile_strictly(source, directory)
    sources = source if isinstance(source, list) else [source]
    launches = {x.symbol: x for each in sources for x in (*each.plan.launches, *each.plan.schedule)}
    assert resources.keys() == launches.keys()
    main = {each.spec.symbol for each in sources}
    for symbol, launch in launches.items():
        used = resources[symbol]
        assert used["registers"] * launch.threads <= 65536, symbol
        full = symbol in main and used["registers"] >= 128
        assert used["spill_bytes"] <= (SPILLED if full else 0), symbol
    return log
