"""The documentation: its Python runs, its commands and links exist, and its prose names no commits."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import attnforge
from attnforge.cli import main

ROOT = Path(__file__).resolve().parent
while not (ROOT / "pyproject.toml").exists():
    ROOT = ROOT.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = "# Needs "  # first words of a snippet that not every machine can run
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")


def snippets(page: Path, language: str) -> list[str]:
    return [match[2] for match in FENCE.finditer(page.read_text()) if match[1] == language]


def runnable(page: Path) -> list[str]:
    return [text for text in snippets(page, "python") if not text.startswith(NEEDS)]


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda p: p.name)
def test_python_runs_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of a page run one after another, with the names of those before; without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)  # for the files that snippets write
    names: dict[str, Any] = {}
    for number, text in enumerate(runnable(page)):
        path = tmp_path / f"{page.stem}_{number}.py"
        path.write_text(text)
        names = runpy.run_path(str(path), names)


def test_what_cannot_run_here_compiles() -> None:
    texts = [text for page in PAGES for text in snippets(page, "python") if text.startswith(NEEDS)]
    assert len(texts) > 5
    for text in texts:
        assert compile(text, "snippet", "exec")


def test_the_quick_start_is_the_first_snippet_and_short() -> None:
    first = snippets(ROOT / "README.md", "python")[0]
    assert not first.startswith(NEEDS)
    assert len(first.splitlines()) <= 16


def command_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for text in snippets(page, "bash"):
            for line in text.splitlines():
                if line.startswith(("attnforge ", "python cli.py ")):
                    yield page.name, line.removeprefix("python cli.py ").removeprefix("attnforge ")


@pytest.mark.parametrize(("page", "line"), list(command_lines()), ids=str)
def test_commands_exist(page: str, line: str) -> None:
    """The command and each of its options are known; nothing is run."""
    words = shlex.split(line, comments=True)
    words = words[1:] if words[0] == "--traceback" else words
    command: click.Command = main
    while words and isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    known = {name for option in command.params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them, and those written by hand."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a id="([\w-]+)">', text))


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "generated/README.md", ROOT / "benchmarks/README.md"], ids=str
)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith("http"):
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lists_begin_after_a_blank_line(page: Path) -> None:
    """GitHub does not need it, but the site would put the items into the paragraph before them."""
    for block in re.split(r"\n\s*\n", FENCE.sub("", page.read_text())):
        first, *rest = block.strip("\n").splitlines() or [""]
        if not re.match(r"\s*([-*|#>]|\d+\.) ", first):
            assert not [line for line in rest if line.startswith("- ")], block


def test_every_page_and_picture_is_reachable() -> None:
    """Pages and notebooks by the navigation of the site and by a link, pictures by a link."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    linked = {(page.parent / to).resolve() for page in PAGES for to, _ in LINK.findall(page.read_text())}
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in (".md", ".ipynb"):
            assert path.relative_to(ROOT / "docs").as_posix() in navigation, path
        if path.suffix in (".md", ".png"):
            assert path.resolve() in linked, path


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "reliability.md"], ids=lambda p: p.name
)
def test_commits_are_named_in_provenance_lines_only(page: Path) -> None:
    """reliability.md is a record of runs: each row names its commit."""
    for line in page.read_text().splitlines():
        if re.search(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b", line):
            assert "commit" in line, line


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_paragraphs_of_the_readme_are_short() -> None:
    text = FENCE.sub("", (ROOT / "README.md").read_text())
    for paragraph in re.split(r"\n\n|\n(?=- )", text):
        if not paragraph.startswith("|"):
            assert len(paragraph.strip().splitlines()) <= 5, paragraph


def test_the_citation_is_of_this_version() -> None:
    """CITATION.cff has the version and the date of the newest release in the changelog."""
    citation = (ROOT / "CITATION.cff").read_text()
    released = re.search(r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is not None
    assert released[1] == attnforge.__version__
    assert f"\nversion: {released[1]}\ndate-released: {released[2]}\n" in citation
