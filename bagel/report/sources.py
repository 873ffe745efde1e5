"""Generated sources as HTML: highlighted text, and the difference between two of them."""

from __future__ import annotations

import difflib

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer, DiffLexer

from attnforge.codegen.render import Source

# Styles whose colours all have a contrast of 4.5 or more to the page's background (tests/bagel/report/).
STYLES = {"light": "xcode", "dark": "github-dark"}
CSS_CLASS = "code"


def source_html(source: Source) -> str:
    """The text of a kernel as a <pre>."""
    return str(highlight(source.text, CudaLexer(), _formatter("light")))


def difference_html(old: Source, new: Source) -> str:
    """What changes from `old` to `new` as a unified diff in a <pre>; empty if nothing does."""
    lines = difflib.unified_diff(
        old.text.splitlines(keepends=True), new.text.splitlines(keepends=True), old.file_name, new.file_name
    )
    text = "".join(lines)
    return str(highlight(text, DiffLexer(), _formatter("light"))) if text else ""


def style_sheet(theme: str) -> str:
    """CSS of the tokens for "light" or "dark"; without the background, which is the page's."""
    formatter = _formatter(theme)
    rules = formatter.get_token_style_defs(f".{CSS_CLASS}")
    return "\n".join(rules)


def _formatter(theme: str) -> HtmlFormatter[str]:
    return HtmlFormatter(style=STYLES[theme], cssclass=CSS_CLASS, nobackground=True)
