"""The site of the documentation builds and loads nothing from elsewhere; notebooks run; quoted messages exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
import torch

import attnforge
from attnforge import masks, scores

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOOLS = ("mkdocs", "material", "mkdocstrings", "mkdocs_click", "nbconvert", "latex2mathml")


# ---- Notebooks


@pytest.mark.parametrize("notebook", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code cells as one program, without a GPU."""
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code
    program = tmp_path / f"{notebook.stem}.py"
    program.write_text("\n\n".join(code))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of commands that it starts
    runpy.run_path(str(program))


@pytest.mark.parametrize("notebook", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_was_saved_with_its_outputs(notebook: Path) -> None:
    """All but the last cells print or show something; none shows an error."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert len(kinds) >= len(cells) - 1
    assert "error" not in kinds


# ---- Masks, scores, messages


def headings(page: str) -> set[str]:
    return set(re.findall(r"^##+ (.*)$", (DOCS / page).read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("page", "module"), [("masks.md", masks), ("scores.md", scores)], ids=["masks", "scores"]
)
def test_every_constructor_has_a_section_with_a_picture(page: str, module: Any) -> None:
    """Its name is called in a section that asks for a picture, and, of masks, for the lines of a kernel."""
    sections = re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE)
    names = [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
        if name not in ("Score", "as_score")
    ]
    assert len(names) >= 5
    for name in names:
        section = next(text for text in sections if f".{name}(" in text)
        assert re.search(r"<!-- (picture|score): \w+", section), name
        assert page == "scores.md" or "<!-- kernel: " in section, name


MARKED = [
    page for page in sorted(DOCS.rglob("*.md")) if re.search(r"^<!-- \w+: ", page.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("page", MARKED, ids=lambda p: p.stem)
def test_pictures_are_drawn_and_lines_of_kernels_found(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MkDocs, so that a changed template is noticed where the site is not built."""
    monkeypatch.syspath_prepend(DOCS / "hooks")
    gallery = importlib.import_module("gallery")
    monkeypatch.setattr(gallery, "_formulas", lambda text: text)
    text = page.read_text()
    made = gallery.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page.name)))
    assert "<!-- " not in made
    assert made.count("linenums=") == len(re.findall(r"^<!-- (?:lines|kernel|score): ", text, re.MULTILINE))
    assert made.count('<div class="pictures">') == len(
        re.findall(r"^<!-- (?:picture|score): ", text, re.MULTILINE)
    )


@cache
def messages() -> tuple[str, ...]:
    """Every string of the package, with a NUL for each value in it; strings of a C++ statement joined."""
    found = []
    for folder in ("codegen", "runtime", "bagel"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                    found.append("".join(map(str, parts)))
    for path in (ROOT / "runtime" / "native").glob("*.[ch]*"):
        for statement in path.read_text().split(";\n"):
            found.append("\0".join(re.findall(r'"((?:[^"\\]|\\.)*)"', statement)).replace('"\0', ""))
    return tuple(found)


def quoted() -> list[str]:
    return re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


def test_messages_are_quoted() -> None:
    assert len(quoted()) > 25


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_exists(message: str) -> None:
    """The words between the dots stand in one string of the source, in this order."""
    parts = [re.escape(part) for part in message.split("…")]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in messages())


# ---- The site


def test_the_site(tmp_path: Path) -> None:
    """One test: with several, processes would build the site once each."""
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; pip install -e '.[docs]'")
    site = tmp_path / "site"
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    check_that_nothing_is_loaded_from_elsewhere(site)
    check_links(site)
    assert 'href="notebooks/attention.html"' in (site / "index.html").read_text()
    check_the_gallery(site)
    check_the_reference(site)


class Page(HTMLParser):
    """Links, loaded resources, and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and "href" in values:
            self.loaded.append(values["href"])


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in site.rglob("*.html"):
        yield path, Page(path.read_text())


def check_that_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    count = 0
    for path, page in pages(site):
        count += 1
        assert [
            url for url in page.loaded if re.match(r"\w+:|//", url) and not url.startswith("data:")
        ] == [], path
        assert "fonts.g" not in path.read_text()
    assert count > 30
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:|//)", style.read_text()), style


def check_links(site: Path) -> None:
    known = dict(pages(site))
    for path, page in known.items():
        if path.name == "404.html":  # its links begin at the server's root
            continue
        for link in page.links:
            if re.match(r"\w+:", link):
                continue
            target, _, anchor = link.partition("#")
            there = (path.parent / unquote(target)).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), f"{path}: {link}"
            if anchor and there.suffix == ".html" and anchor != "__codelineno":
                assert unquote(anchor) in known[there].anchors, f"{path}: {link}"


def check_the_gallery(site: Path) -> None:
    """No marker is left, and the lines of kernels are those of this source."""
    page = (site / "masks.html").read_text()
    assert page.count("<figure>") >= 2 * 15
    assert "<!-- kernel" not in page
    assert "apply_mask" in page
    assert "<math" in page
    assert "$$" not in page
    functions = (site / "scores.html").read_text()
    assert functions.count("score_mod_grad") >= 2


def check_the_reference(site: Path) -> None:
    api = (site / "reference" / "api.html").read_text()
    modules = {"__version__", "bagel", "masks", "scores"}
    for name in set(attnforge.__all__) - modules:
        assert f'.{name}"' in api, name
    commands = (site / "reference" / "cli.html").read_text()
    assert 'id="attnforge-search"' in commands
