"""A compiler that only copies, and sources for it: the cache does not care what a kernel computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from attnforge.codegen.families import FAMILIES, make_tuning
from attnforge.codegen.plan import Launch, Plan
from attnforge.codegen.render import Source
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec

# Answers the two identity questions, counts each compile in a file, rejects a source that holds FAIL.
SCRIPT = """#!/bin/sh
case "$*" in
*-dM*) echo '#define NATIVE {native}'; exit ;;
*--version*) echo 'stub {version}'; exit ;;
esac
echo run >> '{log}'
sleep {seconds}
while [ "$1" != -o ]; do shift; done
if grep -q FAIL "$3"; then printf '%s:2:1: error: planted\\nsecond error\\n' "$3"; exit 1; fi
cat "$3" > "$2"
"""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The stub on disk. Set CXX to `path` to use it."""

    path: Path
    log: Path

    @property
    def runs(self) -> int:
        """Compiles so far."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def compiler(directory: Path, *, version: str = "1.0", native: str = "1", seconds: float = 0) -> Compiler:
    """Write a stub compiler. Each has a path of its own: what is remembered about one is not of another."""
    path = directory / f"stub-{version}-{native}-{seconds}"
    log = directory / "compiles.log"
    path.write_text(SCRIPT.format(version=version, native=native, seconds=seconds, log=log))
    path.chmod(0o755)
    return Compiler(path, log)


def spec(arch: Arch = Arch.CPU, knob: int = 16) -> Spec:
    """A forward spec with every knob set to one value; nothing here renders or runs it."""
    problem = Problem(Direction.FORWARD, arch, DType.BFLOAT16, 64, Mask.FULL)
    fields = dataclasses.fields(FAMILIES[arch.family, Direction.FORWARD].tuning)
    return Spec(problem, make_tuning(problem, {f.name: knob for f in fields}))


def source(text: str = "void f();\n", arch: Arch = Arch.CPU, knob: int = 16) -> Source:
    """A source of that spec with the text given."""
    of = spec(arch, knob)
    launch = Launch(of.symbol, ("batch",), 128)
    plan = Plan(of, "none", ".cu" if arch.is_gpu else ".cpp", (launch,), (), "m", 0)
    return Source(of, plan, text)


# Two kernels: one with static shared memory, one that spills under its launch bounds.
CUDA = """
struct Params { float* x; int n; };
extern "C" __global__ void __launch_bounds__(256) attnforge_plain(const __grid_constant__ Params p) {
  __shared__ float s[256];
  s[threadIdx.x] = p.x[threadIdx.x];
  __syncthreads();
  p.x[threadIdx.x] = s[255 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(1024, 2) attnforge_spills(const __grid_constant__ Params p) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = p.x[i * p.n + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 64; ++i) p.x[i * p.n + threadIdx.x * 2] = a[(i * 7) % 64] + a[63 - i];
}
"""
