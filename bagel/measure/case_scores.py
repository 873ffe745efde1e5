"""Scores by name, as `--score` takes them: `softcap:50`, `alibi`, `relative_bias:128`, `FILE.py:NAME`."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path

import torch

from attnforge.codegen.score import ScoreMod
from attnforge.runtime.sampled import jumps
from attnforge.runtime.scores import Score, alibi, as_score, relative_bias, softcap
from attnforge.runtime.search.case import Case

NAMED = re.compile(r"softcap:(?P<cap>[\d.]+)|(?P<alibi>alibi)|relative_bias:(?P<reach>[1-9]\d*)")


def with_score(case: Case, name: str) -> Case:
    """The case with the score of that name, which ends the case's name; as it is if the name is empty.

    alibi: slopes 2^(-8 (h + 1) / Hq). relative_bias:N: a standard normal table (Hq, 2 N + 1). FILE.py:NAME: a function
    (score, b, h, q_idx, kv_idx) or an `attnforge.scores.Score` that the file defines. Raises ValueError naming --score.
    """
    if not name:
        return case
    score = _named(case, name)
    if jumps(ScoreMod(score.text)):
        raise ValueError(
            f"--score: {name} jumps or is approximate, so that results cannot be checked against float64"
        )
    return replace(case, name=f"{case.name} {name}", score=score)


def without_score(name: str) -> tuple[str, str]:
    """A case's name without its score's, and the score's, empty if it has none."""
    case, _, last = name.rpartition(" ")
    return (case, last) if NAMED.fullmatch(last) or ".py:" in last else (name, "")


def _named(case: Case, name: str) -> Score:
    found = NAMED.fullmatch(name)
    if found is None:
        return _from_file(case, name)
    if found["cap"]:
        return softcap(float(found["cap"]))
    heads, device = case.heads_q, case.device
    if found["alibi"]:
        return alibi(2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads))
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(heads, 2 * int(found["reach"]) + 1, generator=generator)
    return relative_bias(table.to(device))


def _from_file(case: Case, name: str) -> Score:
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"--score: {name!r} is none of softcap:CAP, alibi, relative_bias:N and FILE.py:NAME")
    if not Path(path).is_file():
        raise ValueError(f"--score: there is no file {path}")
    defined = runpy.run_path(path)
    if attribute not in defined:
        raise ValueError(f"--score: {path} does not define {attribute}")
    score = as_score(defined[attribute])
    return Score(score.text, tuple(tensor.to(case.device) for tensor in score.tensors))
