"""MkDocs hook: pages and sources of the repository that lie outside of docs/, and the links to them.

Markdown links are written as GitHub reads them, relative to the file. Here they become links of the site. What the site
does not hold (folders, tests) becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks/README.md",
    "generated/README.md": "generated/README.md",
}
# As text, which browsers show instead of storing it.
SOURCES = {
    str(path.relative_to(REPOSITORY)): f"{path.relative_to(REPOSITORY)}.txt"
    for pattern in ("generated/*.cu", "generated/*.cpp", "examples/*.py", "benchmarks/*.py")
    for path in sorted(REPOSITORY.glob(pattern))
}
MOUNTED = PAGES | SOURCES
_HOME = {site: path for path, site in MOUNTED.items()}

_LINK = re.compile(r"(!?)\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\(([^)#\s]+)(#[\w-]+)?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_config(config: Any, **_: Any) -> Any:
    """The package for mkdocstrings, which would otherwise read every file of the repository, .venv included."""
    package = REPOSITORY / "build" / "package" / "attnforge"
    package.mkdir(parents=True, exist_ok=True)
    for name in ("__init__.py", "bagel", "cli.py", "codegen", "runtime"):
        if not (package / name).is_symlink():
            (package / name).symlink_to(REPOSITORY / name)
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for path, site in MOUNTED.items():
        files.append(File.generated(config, site, abs_src_path=str(REPOSITORY / path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """The page's links, outside of fenced code, as links of the site."""
    here = page.file.src_uri
    text, last = [], 0
    for fence in FENCE.finditer(markdown):
        text += [_moved(markdown[last : fence.start()], here, files), fence[0]]
        last = fence.end()
    return "".join([*text, _moved(markdown[last:], here, files)])


def _moved(text: str, here: str, files: Files) -> str:
    folder = posixpath.dirname(_HOME.get(here, f"docs/{here}"))

    def link(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        site = MOUNTED.get(path, path.removeprefix("docs/"))
        if site.endswith(".ipynb"):
            site = site.removesuffix(".ipynb") + ".md"  # see notebooks.py
        if files.get_file_from_path(site) is None:
            if (REPOSITORY / path).exists():
                return words
            raise ValueError(f"{here}: {target} leads nowhere")
        relative = posixpath.relpath(site, posixpath.dirname(here) or ".")
        return f"{picture}[{words}]({relative}{anchor or ''})"

    return _LINK.sub(link, text)
