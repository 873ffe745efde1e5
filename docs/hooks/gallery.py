"""MkDocs hook: pictures of masks and scores, and lines of kernels, drawn and rendered while the site is built.

A page asks for them with comments, which GitHub does not show. NAME is a variable of the page's Python snippets above
it, which are run; A and B are parts of the first and of the last line to show.

    <!-- picture: NAME [seq_q] -->              a mask: its pairs, and the tiles that a kernel makes of them
    <!-- score: NAME -->                        what a score does to a pair, and the functions that kernels hold
    <!-- lines: FILE | A | B -->                lines of a file of the repository, the one that matches FILE
    <!-- kernel: fwd sm90a spans 1 | A | B -->  lines of a kernel of this pass, architecture, mask kind and intervals;
                                               without A and B the function that applies the mask; after the
                                               intervals may come the NAME of a mask function or a score

Formulas between dollar signs become MathML, which browsers draw without a library.
"""

from __future__ import annotations

import operator
import re
import shlex
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from attnforge.codegen.mask_function import MaskMod
from attnforge.codegen.render import render
from attnforge.codegen.score import ScoreMod
from attnforge.codegen.space import candidates
from attnforge.codegen.spec import Arch, Direction, DType, Mask, Problem
from attnforge.runtime import mask_svg
from attnforge.runtime.scores import Score

REPOSITORY = Path(__file__).parents[2]

PYTHON = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
OTHER = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"^<!-- (?P<what>picture|score|lines|kernel): (?P<words>.*?) -->$", re.MULTILINE)
PART = re.compile(f"(?:{PYTHON.pattern})|(?:{MARKER.pattern})|(?:{OTHER.pattern})", PYTHON.flags)
MATH = re.compile(r"(?<![\\$`])(\$\$?)(?!\s)([^$`]+?)(?<!\s)\1(?!\d)")
TILE = 8  # of pictures
SIDE = 220  # pixels


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if not MARKER.search(markdown):
        return markdown
    names: dict[str, Any] = {}
    made: list[str] = []
    last = 0
    *_, final = (marker.end() for marker in MARKER.finditer(markdown))
    for part in PART.finditer(markdown):
        made.append(_formulas(markdown[last : part.start()]))
        last = part.end()
        if part["what"]:
            made.append(_DRAWN[part["what"]](part["words"], names))
            continue
        made.append(part[0])
        needed = part.end() < final and not (part["code"] or "").startswith("# Needs ")
        if part["code"] and needed:
            exec(compile(part["code"], page.file.src_uri, "exec"), names)  # noqa: S102  our own page
    return "".join([*made, _formulas(markdown[last:])])


def _formulas(text: str) -> str:
    from latex2mathml.converter import convert  # the tests of pictures and lines do without it

    def mathml(match: re.Match[str]) -> str:
        if match[1] == "$":
            return convert(match[2])
        return f'<div class="formula">{convert(match[2], display="block")}</div>'

    return MATH.sub(mathml, text)


# ---- Masks


def _picture(words: str, names: dict[str, Any]) -> str:
    name, *rest = words.split()
    mask = names[name]
    seq_k = getattr(mask, "seq_k", int(rest[0]) if rest else 0)
    seq_q = int(rest[0]) if rest else seq_k
    pairs, tiles = (_shares(mask, seq_q, seq_k, side) for side in (1, TILE))
    kinds = [(tiles == share).sum().item() for share in (1, 0)]
    partial = tiles.numel() - sum(kinds)
    return _figures(
        (
            _svg(pairs, seq_q, seq_k, 1),
            f"{int(pairs.sum())} of {seq_q} x {seq_k} pairs are visible. Queries go down, keys to the right.",
        ),
        (
            _svg(tiles, seq_q, seq_k, TILE),
            f"Tiles of {TILE} x {TILE}: {kinds[0]} full (dark), {partial} partial (light), {kinds[1]} skipped (grey).",
        ),
    )


def _shares(mask: Any, seq_q: int, seq_k: int, tile: int) -> torch.Tensor:
    if hasattr(mask, "starts"):
        return mask_svg.span_shares(mask.starts, mask.ends, seq_q, tile, tile)
    return mask_svg.dense_shares(mask.visible(seq_q, seq_k), tile, tile)


def _svg(shares: torch.Tensor, seq_q: int, seq_k: int, tile: int) -> str:
    """The library's picture, with lines between tiles."""
    picture = mask_svg.svg(shares, seq_q, seq_k, tile, tile, SIDE)
    lines = "".join(
        [f"M{x} 0V{seq_q}" for x in range(TILE, seq_k, TILE)]
        + [f"M0 {y}H{seq_k}" for y in range(TILE, seq_q, TILE)]
    )
    grid = f'<path d="{lines}" stroke="#8888" stroke-width="{seq_k / SIDE:.2f}" fill="none"/>'
    return picture.replace("</svg>", f"{grid}</svg>")


def _figures(*figures: tuple[str, str]) -> str:
    inner = "".join(f"<figure>{svg}<figcaption>{text}</figcaption></figure>" for svg, text in figures)
    return f'<div class="pictures">{inner}</div>'


# ---- Scores

FUNCTIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "==": operator.eq,
    "abs": torch.abs,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "tanh": torch.tanh,
    "where": torch.where,
}


def evaluate(function: Score, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    """The function of a score on tensors, from its text."""
    program, result = ScoreMod(function.text).parsed

    def value(x: int) -> torch.Tensor:
        node = program.nodes[x]
        if node.op == "const":
            return torch.tensor(int(node.value) if node.kind == "int" else float(node.value))
        if node.op == "leaf":
            return leaves[str(node.value)]
        arguments = [value(a) for a in node.args]
        if node.op.startswith("load:"):
            return function.tensors[int(node.op.removeprefix("load:"))][tuple(arguments)]
        return FUNCTIONS[node.op](*arguments)

    return value(result)


def _score(words: str, names: dict[str, Any]) -> str:
    score: Score = names[words.strip()]
    picture = _curve(score) if not score.tensors else _heat(score)
    return f"{picture}\n\n{_score_lines(score)}"


def _curve(score: Score) -> str:
    """What becomes of a score, where indices do not matter."""
    reach = 150.0
    x = torch.linspace(-reach, reach, 61)
    y = evaluate(score, {"score": x})
    points = " ".join(f"{a + reach:.0f},{reach - b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
    axes = f"M0 {reach:.0f}H300M{reach:.0f} 0V300"
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIDE}" height="{SIDE}" viewBox="0 0 300 300">'
        f'<path d="{axes}M0 300L300 0" stroke="#8888" stroke-dasharray="4 4" fill="none"/>'
        f'<polyline points="{points}" stroke="{mask_svg.FULL}" stroke-width="4" fill="none"/></svg>'
    )
    return _figures((svg, f"The result against the score, both from -{reach:.0f} to {reach:.0f}."))


def _heat(score: Score, size: int = 48) -> str:
    """What is added to a score of 0, for two heads."""
    q_idx, kv_idx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    figures = []
    for head in (0, 1):
        leaves = {"score": torch.zeros(size, size), "b": torch.tensor(0), "h": torch.tensor(head)}
        added = evaluate(score, leaves | {"q_idx": q_idx, "kv_idx": kv_idx})
        low, high = added.min().item(), added.max().item()
        levels = ((added - low) / ((high - low) or 1.0) * 15).round().int()
        cells = [
            f'<path d="{_squares(levels == level)}" fill="{mask_svg.FULL}" fill-opacity="{level / 15:.2f}"/>'
            for level in range(1, 16)
        ]
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIDE}" height="{SIDE}" viewBox="0 0 {size} {size}" '
            f'shape-rendering="crispEdges"><rect width="{size}" height="{size}" fill="#8882"/>{"".join(cells)}</svg>'
        )
        figures.append((svg, f"Head {head}: added to a score, from {low:.3g} (pale) to {high:.3g} (dark)."))
    return _figures(*figures)


def _squares(chosen: torch.Tensor) -> str:
    """Path of the runs of chosen cells in each row."""
    runs = []
    for i, row in enumerate(chosen.tolist()):
        for value, group in groupby(range(len(row)), key=row.__getitem__):
            if value:
                cells = list(group)
                runs.append(f"M{cells[0]} {i}h{len(cells)}v1h-{len(cells)}z")
    return "".join(runs)


def _score_lines(score: Score) -> str:
    problem = _problem("bwd sm80 causal 1", score.text)
    source = render(next(candidates(problem)))
    names = [name for name in ("score_mod", "score_mod_grad") if f" {name}(const Params&" in source.text]
    cuts = [_function(source.text, name) for name in names]
    return _details(f"In a kernel: {source.slug}", "\n\n".join(text for text, _ in cuts), cuts[0][1])


# ---- Lines


def _lines(words: str, names: dict[str, Any]) -> str:
    path, first, last = (word.strip() for word in words.split("|"))
    (file,) = REPOSITORY.glob(path)
    text, number = _cut(file.read_text(), first, last)
    return _fence(text, number)


def _kernel(words: str, names: dict[str, Any]) -> str:
    spec, *ends = (word.strip() for word in words.split("|"))
    *form, last = shlex.split(spec)
    if last in names:
        function = {"score" if isinstance(names[last], Score) else "mask_mod": names[last].text}
        problem = _problem(" ".join(form), **function)
    else:
        problem = _problem(spec)
    source = render(next(candidates(problem)))
    cut = _cut(source.text, *ends) if ends else _function(source.text, "apply_mask")
    return _details(f"In a kernel: {source.slug}", *cut)


def _problem(words: str, score: str = "", mask_mod: str = "") -> Problem:
    direction, arch, mask, intervals = shlex.split(words)
    return Problem(
        Direction(direction),
        Arch(arch),
        DType.BFLOAT16,
        128,
        Mask(mask),
        intervals=int(intervals),
        score=ScoreMod(score),
        mask_mod=MaskMod(mask_mod),
    )


def _cut(text: str, first: str, last: str) -> tuple[str, int]:
    """Lines from the one that holds `first` to the next that holds `last`, and the first one's number."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines) if first in line), None)
    if begin is None:
        raise ValueError(f"no line holds {first!r}")
    end = next((n for n, line in enumerate(lines) if n > begin and last in line), None)
    if end is None:
        raise ValueError(f"no line after {first!r} holds {last!r}")
    return "\n".join(lines[begin : end + 1]), begin + 1


def _function(text: str, name: str) -> tuple[str, int]:
    """A function with the comment above it, and the number of its first line."""
    lines = text.splitlines()
    begin = next(n for n, line in enumerate(lines) if f" {name}(" in line and not line.startswith((" ", "/")))
    end = lines.index("}", begin)
    while lines[begin - 1].startswith("//"):
        begin -= 1
    return "\n".join(lines[begin : end + 1]), begin + 1


def _fence(text: str, number: int) -> str:
    return f'```cuda linenums="{number}"\n{text}\n```'


def _details(title: str, text: str, number: int) -> str:
    inner = _fence(text, number).replace("\n", "\n    ")
    return f'??? abstract "{title}"\n\n    {inner}\n'


_DRAWN = {"picture": _picture, "score": _score, "lines": _lines, "kernel": _kernel}
