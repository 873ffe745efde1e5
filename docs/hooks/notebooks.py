"""MkDocs hook: notebooks become Markdown pages with the outputs that they were saved with; nothing is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    exporter = MarkdownExporter()
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            text, _resources = exporter.from_filename(file.abs_src_path)
            files.remove(file)
            page = file.src_uri.removesuffix(".ipynb") + ".md"
            files.append(File.generated(config, page, content=_STYLE.sub("", text)))
    return files


def on_config(config: Any, **_: Any) -> Any:
    """The navigation names the notebooks; their pages are what it leads to."""
    config["nav"] = _renamed(config["nav"])
    return config


def _renamed(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_renamed(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _renamed(entry) for title, entry in nav.items()}
    return str(Path(nav).with_suffix(".md")) if nav.endswith(".ipynb") else nav
