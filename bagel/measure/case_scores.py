"""Scores by name, as `--score` takes them: `softcap:50`, `alibi`, `relative_bias:128`, `FILE.py:NAME`."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path

import torch

from attnforge.bagel.measure.cases import make_case
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.spec import DType
from attnforge.runtime.sampled import jumps
from attnforge.runtime.scores import Score, alibi, as_score, relative_bias, softcap
from attnforge.runtime.search.case import Case

NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
NAMED = re.compile(rf"softcap:(?P<cap>{NUMBER})|(?P<alibi>alibi)|relative_bias:(?P<distance>[1-9]\d{{0,6}})")
FORMS = "softcap:50 (a number above 0), alibi, relative_bias:128 (the largest distance) or FILE.py:NAME"


def with_score(case: Case, name: str) -> Case:
    """The case with the score of that name, which ends the case's name; as it is if the name is empty.

    alibi: slopes 2^(-8 (h + 1) / Hq), the last query at the last key. relative_bias:N: a standard normal table
    (Hq, 2 N + 1). FILE.py:NAME: a function (score, b, h, q_idx, kv_idx) or an `attnforge.scores.Score` that the file
    defines. Raises ValueError naming --score.
    """
    if not name:
        return case
    try:
        score = _make_score(case, name)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--score {name}: {error}") from error
    except Exception as error:  # whatever a file does when it is run
        raise ValueError(f"--score {name}: {type(error).__name__}: {error}") from error
    if jumps(ScoreMod(score.text)):
        raise ValueError(
            f"--score {name}: a score that jumps or is approximate cannot be checked against float64"
        )
    return replace(case, name=f"{case.name} {name}", score=score)


def function_named(name: str) -> ScoreMod:
    """The function alone of the score of that name. Raises ValueError naming --score."""
    score = with_score(make_case("causal/64", "2/1/16", DType.FLOAT32, torch.device("cpu")), name).score
    return ScoreMod(score.text if score else "")


def without_score(name: str) -> tuple[str, str]:
    """A case's name without its score's, and the score's, empty if it has none."""
    case, _, last = name.rpartition(" ")
    return (case, last) if NAMED.fullmatch(last) or ".py:" in last else (name, "")


def _make_score(case: Case, name: str) -> Score:
    found = NAMED.fullmatch(name)
    if found is None:
        return _from_file(case, name)
    if found["cap"]:
        return softcap(float(found["cap"]))
    heads, device = case.heads_q, case.device
    if found["alibi"]:
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)
        return alibi(slopes, case.seq_k - case.seq_q)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(heads, 2 * int(found["distance"]) + 1, generator=generator)
    return relative_bias(table.to(device))


def _from_file(case: Case, name: str) -> Score:
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"expected {FORMS}")
    if " " in name:
        raise ValueError("a path with a space cannot be a part of a case's name; rename or move the file")
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    defined = runpy.run_path(path)
    if attribute not in defined:
        raise ValueError(f"{path} does not define {attribute}")
    score = as_score(defined[attribute])
    return Score(score.text, tuple(tensor.detach().to(case.device) for tensor in score.tensors))
