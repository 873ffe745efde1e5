"""Markdown tables of `interleaved.run_goal`: medians over seeds, goals, ratios to peers, errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from attnforge.bagel.measure.bench import OURS
from attnforge.bagel.measure.goals import GOALS, STEP, Goal
from attnforge.bagel.measure.interleaved import DETERMINISTIC, LAYER, MATMUL, Line
from attnforge.bagel.measure.markdown import facts_line, markdown_head, markdown_row
from attnforge.bagel.models import MODELS

LAYERS = MODELS["7B"].layers
MERGED = {"fa4-nopack": "fa4"}  # two settings of one peer; the better one is shown
UNFUSED = ("sdpa-math",)  # keeps P in float32, so its errors are no reference for fused kernels


def markdown(lines: Sequence[Line], facts: dict[str, str]) -> str:
    """All suites that have lines, then what failed and why."""
    text = [facts_line(facts), ""]
    for suite, goals in GOALS.items():
        found = [(goal, [line for line in lines if _belongs(line, goal)]) for goal in goals]
        found = [(goal, group) for goal, group in found if group]
        if found:
            text += [f"**{suite}**", "", *(_steps(found) if suite == "step" else _table(found)), ""]
    return "\n".join([*text, *_notes(lines)]) + "\n"


def _belongs(line: Line, goal: Goal) -> bool:
    return (line.label, line.work) == (goal.label, goal.work)


def rates(group: Iterable[Line], name: str) -> list[float]:
    """TFLOP/s of one attention, a value for each line that has one; of merged settings the better."""
    found = []
    for line in group:
        entries = [entry for key, entry in line.entries.items() if MERGED.get(key, key) == name]
        speeds = [entry.tflops for entry in entries if entry.tflops is not None]
        found += [max(speeds)] if speeds else []
    return found


def ratio(group: Iterable[Line], names: Sequence[str]) -> float | None:
    """Median over lines of ours over the best of `names`; None without a line that has both."""
    found = []
    for line in group:
        mine, theirs = rates([line], OURS), [x for name in names for x in rates([line], name)]
        found += [mine[0] / max(theirs)] if mine and theirs else []
    return median(found) if found else None


def error_ratios(group: Iterable[Line]) -> dict[str, float]:
    """Tensor -> our RMS error over the best fused peer's, the worst of the lines."""
    worst: dict[str, float] = {}
    for line in group:
        mine = line.entries[OURS].errors if OURS in line.entries else {}
        for tensor, error in mine.items():
            theirs = [
                entry.errors[tensor]
                for name, entry in line.entries.items()
                if name not in (OURS, DETERMINISTIC, *UNFUSED) and tensor in entry.errors
            ]
            if theirs:
                worst[tensor] = max(worst.get(tensor, 0.0), error / max(min(theirs), 1e-30))
    return worst


def _peers(goal: Goal, group: Iterable[Line]) -> list[str]:
    """The peers of a goal, and those that a run had besides."""
    own = (OURS, DETERMINISTIC, MATMUL)
    timed = [name.removesuffix(LAYER) for line in group for name in line.entries]
    return list(dict.fromkeys((*goal.peers, *(name for name in timed if name not in own))))


def _contestants(found: Sequence[tuple[Goal, list[Line]]]) -> list[str]:
    """Columns between ours and the matrix product."""
    names = [DETERMINISTIC] if any(goal.deterministic for goal, _ in found) else []
    names += [MERGED.get(name, name) for goal, group in found for name in _peers(goal, group)]
    return list(dict.fromkeys(names))


def _table(found: Sequence[tuple[Goal, list[Line]]]) -> list[str]:
    names = _contestants(found)
    head = [
        "work",
        "pass",
        "seeds",
        OURS,
        *names,
        MATMUL,
        "goal",
        "of goal",
        "ours / best peer",
        "ratio goals",
    ]
    rows = [[*head, "error / best peer's"]]
    for goal, group in found:
        mine = rates(group, OURS)
        cells = [goal.label, goal.work, str(len(group)), f"**{_number(mine)}**"]
        cells += [_number(rates(group, name)) for name in (*names, MATMUL)]
        cells += ["-" if goal.floor is None else f"{goal.floor:.0f}"]
        cells += ["-" if goal.floor is None or not mine else f"{median(mine) / goal.floor:.2f}"]
        cells += [
            _times(ratio(group, [MERGED.get(name, name) for name in _peers(goal, group)])),
            _ratio_goals(goal, group),
        ]
        cells += [" ".join(f"{tensor} {x:.2f}" for tensor, x in error_ratios(group).items()) or "-"]
        rows.append(cells)
    return _grid(rows)


def _ratio_goals(goal: Goal, group: Sequence[Line]) -> str:
    """The ratios and, in parentheses, the ratios to reach: `flex 1.81 (1.7)`."""
    parts = [f"{name} {_times(ratio(group, [name]))} ({least})" for name, least in goal.ratios]
    return ", ".join(parts) or "-"


def _steps(found: Sequence[tuple[Goal, list[Line]]]) -> list[str]:
    """Milliseconds: one layer with the making of the mask; then a step, in which all layers share the mask."""
    rows = [
        [
            "work",
            "attention",
            "mask + 1 layer, ms",
            "layer, ms",
            f"mask + {LAYERS} layers, ms",
            "ours is",
            "ratio goals",
        ]
    ]
    for goal, group in found:
        wanted = dict(goal.ratios)
        ours = _step_times(group, OURS)
        for name in (OURS, *_peers(goal, group)):
            one, layer, step = _step_times(group, name)
            times = [f"{b / a:.2f}" for a, b in ((ours[0], one), (ours[2], step)) if a and b]
            cells = [goal.label, name, *(f"{x:.2f}" if x else "-" for x in (one, layer, step))]
            rows.append([*cells, " / ".join(times) or "-", str(wanted.get(name, "-"))])
    return _grid(rows)


def _step_times(group: Sequence[Line], name: str) -> tuple[float, float, float]:
    """Medians over lines; 0 where there is none."""
    found = []
    for line in group:
        one, layer = (line.entries.get(key) for key in (name, name + LAYER))
        if one and layer and one.ms and layer.ms:
            found.append((one.ms, layer.ms, one.ms + (LAYERS - 1) * layer.ms))
    if not found:
        return 0.0, 0.0, 0.0
    one_ms, layer_ms, step_ms = (median(column) for column in zip(*found, strict=True))
    return one_ms, layer_ms, step_ms


def _notes(lines: Iterable[Line]) -> list[str]:
    """Failures, each with where it happened."""
    notes: dict[str, list[str]] = {}
    for line in lines:
        for name, entry in line.entries.items():
            if entry.note:
                notes.setdefault(f"{name}: {entry.note}", []).append(f"{line.case} {line.work}")
    return [f"- {note} ({', '.join(where)})" for note, where in notes.items()]


def one_line(line: Line) -> str:
    """For the log of a running measurement."""
    parts = []
    for name, entry in line.entries.items():
        errors = "/".join(f"{x:.1e}" for x in entry.errors.values())
        speed = f"{entry.tflops:.4g}" if entry.tflops is not None else "FAILED"
        parts.append(
            f"{name} {speed}{f' err {errors}' if errors else ''}{f' ({entry.note})' if entry.note else ''}"
        )
    repeats = max((entry.repeats for entry in line.entries.values()), default=0)
    return f"{line.case} {line.work}: {', '.join(parts)} [{repeats} calls]"


def missed(lines: Sequence[Line]) -> list[str]:
    """The measured goals that were not reached, one sentence each; errors of gradients are goals, too."""
    text = []
    for goal in (goal for goals in GOALS.values() for goal in goals):
        group = [line for line in lines if _belongs(line, goal)]
        mine = rates(group, OURS)
        if goal.floor is not None and mine and median(mine) < goal.floor:
            text.append(f"{goal.label} {goal.work}: {median(mine):.0f} of {goal.floor:.0f} TFLOP/s")
        for name, least in goal.ratios:
            got = _step_ratio(group, name) if goal.work == STEP else ratio(group, [name])
            if got is not None and got < least:
                text.append(f"{goal.label} {goal.work}: {got:.2f} times {name}, the goal is {least}")
        for tensor, error in error_ratios(group).items():
            if error > 1.1:
                text.append(f"{goal.label} {goal.work}: error of {tensor} {error:.2f} times the best peer's")
    return text


def _step_ratio(group: Sequence[Line], name: str) -> float | None:
    ours, theirs = _step_times(group, OURS)[0], _step_times(group, name)[0]
    return theirs / ours if ours and theirs else None


def _number(values: Sequence[float]) -> str:
    return f"{median(values):.0f}" if values else "-"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
    return [*markdown_head(rows[0]), *map(markdown_row, rows[1:])]
