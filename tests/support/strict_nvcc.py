"""Compile with nvcc where every warning is an error, and check what ptxas says of registers and spills.

Each kernel is compiled once: for all tests, all workers and the next run. Of those of a list that no test compiled
before, one text is made: to start nvcc, and to read the headers that it includes of its own accord, takes a quarter of
the time of a kernel.
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
STRICT = ("-Werror", "all-warnings")


def compile_strictly(source: Source | list[Source], directory: Path) -> tuple[str, dict[str, dict[str, int]]]:
    """Log and resources by kernel, of a source or of several of one target; any warning fails.

    `directory` is a place to compile in.
    """
    sources = source if isinstance(source, list) else [source]
    places = [place_of(each) for each in sources]
    new = {place: each for place, each in zip(places, sources, strict=True) if not place.exists()}
    if new:
        log = compile_now(list(new.values()), directory)
        for place, each in new.items():
            keep(place, {"log": part_of(log, each).encode()})
    log = "\n".join((place / "log").read_text() for place in dict.fromkeys(places))
    return log, compilation.parse_ptxas(log)


def strict_cubin(source: Source, directory: Path) -> Path:
    """The cubin of a source, compiled alone; any warning fails. `directory` is a place to compile in."""
    place = place_of(source).with_suffix(".alone")
    if not place.exists():
        compile_now([source], directory)
        keep(place, {"kernel.cubin": (directory / nvcc(source).binary_name).read_bytes()})
    return place / "kernel.cubin"


def nvcc(source: Source) -> toolchain.Command:
    tool = toolchain.toolchain(source.spec.problem.arch)
    assert isinstance(tool, toolchain.Command)
    return tool


def place_of(source: Source) -> Path:
    """Directory for what is kept of a source."""
    tool = nvcc(source)
    words = "\0".join((source.text, tool.identity, *tool.flags, *STRICT))
    return kept.directory / "cubins" / hashlib.sha256(words.encode()).hexdigest()[:20]


def compile_now(sources: list[Source], directory: Path) -> str:
    """What the compiler says of sources of one target; their cubin is left in `directory`."""
    tool = nvcc(sources[0])
    assert len({each.spec.problem.arch for each in sources}) == 1
    path = directory / "kernels.cu"
    path.write_text(sources[0].text if len(sources) == 1 else together(sources))
    command = (str(tool.program), *tool.flags, *STRICT, "-o", tool.binary_name, path.name)
    code, log = toolchain.run(command, directory)
    assert code == 0, "\n".join((*(each.spec.to_cli() for each in sources), log))
    return log


def part_of(log: str, source: Source) -> str:
    """The lines about the kernels of a source, and all that are about no kernel.

    A line is about the kernels that it names, else about the one whose compilation was announced last.
    """
    symbols = {launch.symbol for launch in (*source.plan.launches, *source.plan.schedule)}
    current: set[str] = set()
    lines = []
    for line in log.splitlines():
        named = set(re.findall(r"attnforge_\w+", line))
        if "Compiling entry function" in line:
            current = named
        about = named or current
        lines += [line] if not about or about & symbols else []
    return "\n".join(lines)


def keep(place: Path, files: dict[str, bytes]) -> None:
    """Make a directory that holds these files, unless another worker was first."""
    aside = place.with_name(f"{place.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    for name, data in files.items():
        (aside / name).write_bytes(data)
    try:
        aside.rename(place)
    except OSError:
        shutil.rmtree(aside)


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
