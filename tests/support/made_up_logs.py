"""Logs of searches that never ran: an H200's real search space, with numbers that are made up.

python tests/support/made_up_logs.py DIR    writes two logs that `attnforge report` compares
"""

from __future__ import annotations

import json
import random
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from attnforge.codegen.families import make_plan
from attnforge.codegen.render import render
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem, Spec
from attnforge.runtime.search.journal import source_key

CASE = "finetune/0 7B"
MADE_UP = {"device": "NVIDIA H200", "note": "made up for a test, measured by nobody"}
TOP = {Direction.FORWARD: 640.0, Direction.BACKWARD: 540.0}  # TFLOP/s
PEERS = {"fa3": 0.82, "sdpa-cudnn": 0.31, "flex": 0.61, "flex-fa4": 0.79}  # of the fastest variant
START = datetime(2026, 11, 20, 9, 0, tzinfo=timezone.utc)
# The error of a compiler, as it looks.
COMPILE_ERROR = (
    "nvcc failed with status 255: nvcc -O3 kernel.cu\nptxas error: too much shared <data> & more\n"
)


def write_log(
    path: Path, direction: Direction, count: int = 240, torch: str = "2.11.0", gain: float = 1.0
) -> None:
    """Write the log of a search over up to `count` variants, `gain` times as fast as the usual one."""
    draw = random.Random(f"{direction} {torch}")
    problem = Problem(direction, Arch.SM90A, DType.BFLOAT16, 128, Mask.SPANS)
    specs = list(candidates(problem))[:count]
    scope: dict[str, Any] = {
        "case": CASE,
        "direction": direction.value,
        "environment": {**MADE_UP, "torch": torch},
    }
    now = START
    rows: list[dict[str, Any]] = [
        {"search": {"space": len(specs) + 7, "planned": len(specs), "incumbent": specs[0].to_json()}}
    ]
    stamps = [now]
    for number, spec in enumerate(specs):
        now += timedelta(milliseconds=draw.randint(20, 400))
        stamps.append(now)
        rows.append({"source": source_key(render(spec).text), "result": _result(spec, number, draw, gain)})
    flops = 2.0 * 28 * 256 * 23642390 * (1 if direction is Direction.FORWARD else 2.5)
    best = max(row["result"]["tflops"] for row in rows[1:])
    for row in rows[1:]:
        _set_times(row["result"], flops, draw)
    peers: list[dict[str, Any]] = [
        {
            "name": name,
            "ms": flops / (best * share) / 1e9,
            "tflops": best * share,
            "note": "",
            "dtype": "bf16",
        }
        for name, share in PEERS.items()
    ]
    peers.append({"name": "fa4", "ms": None, "tflops": None, "note": "no such mask", "dtype": "bf16"})
    ranked = sorted(
        (row["result"] for row in rows[1:] if row["result"]["ms"]), key=lambda result: result["ms"]
    )
    rows += [{"final": {"results": ranked[:4]}}, {"peers": peers}]
    stamps += [now + timedelta(seconds=1), now + timedelta(seconds=3)]
    lines = [
        json.dumps({**scope, "time": stamp.isoformat(timespec="milliseconds"), **row})
        for stamp, row in zip(stamps, rows, strict=True)
    ]
    with path.open("a") as file:
        file.write("\n".join(lines) + "\n")


def _result(spec: Spec, number: int, draw: random.Random, gain: float) -> dict[str, Any]:
    plan = make_plan(spec)
    knobs = spec.tuning.to_json()
    area = knobs["tile_m"] * knobs["tile_n"]
    share = 0.6 + 0.25 * min(1.0, area / 20000) + 0.04 * knobs["stages"] + draw.uniform(-0.05, 0.05)
    if plan.owner == "m" and knobs["tile_m"] == 64:  # loads from the L2 cache
        share *= 0.7
    status, detail = "ok", ""
    if number % 37 == 11:
        status, detail = "compile", COMPILE_ERROR
    elif number % 53 == 17:
        status, detail = "wrong", "out: rms error 3.1e-02, allowed are 1.2e-03"
    speed = TOP[spec.problem.direction] * gain * min(share, 1.0) if status == "ok" else 0.0
    return {
        "spec": spec.to_json(),
        "status": status,
        "detail": detail,
        "ms": 0.0,
        "best_ms": 0.0,
        "repeats": 50 if status == "ok" else 0,
        "tflops": speed,
        "registers": draw.choice((152, 168, 168, 168, 184)) if status != "compile" else 0,
        "spill_bytes": 8 * (number % 29 == 3),
        "shared_bytes": max(launch.shared_bytes for launch in plan.launches) if status != "compile" else 0,
        "compile_seconds": 9.0,
        "errors": {"out": [1.4e-3, 9.7e-3]} if status == "ok" else {},
        "limit_used": 0.7 if status == "ok" else 0.0,
    }


def _set_times(result: dict[str, Any], flops: float, draw: random.Random) -> None:
    if result["status"] == "ok":
        ms = flops / result["tflops"] / 1e9
        result["ms"], result["best_ms"] = ms, ms * 0.99
        result["low_ms"], result["high_ms"] = (
            ms * (1 - draw.uniform(0.002, 0.01)),
            ms * (1 + draw.uniform(0.002, 0.02)),
        )


def main() -> None:
    directory = Path(sys.argv[1])
    for name, torch, gain in (("h200", "2.11.0", 1.0), ("h200-new-torch", "2.13.0", 1.03)):
        path = directory / f"{name}.jsonl"
        path.unlink(missing_ok=True)
        for direction in Direction:
            write_log(path, direction, torch=torch, gain=gain)


if __name__ == "__main__":
    main()
