"""Griffe extension: lines "name: meaning" of our docstrings, where name is a parameter, become a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Function

_LINE = re.compile(r"^([a-z]\w*(?:, [a-z]\w*)*): ")


class Parameters(Extension):
    def on_function(self, *, func: Function, **_: Any) -> None:
        if func.docstring:
            func.docstring = listed(func.docstring, {parameter.name for parameter in func.parameters})


def listed(docstring: Docstring, names: set[str]) -> Docstring:
    """The docstring with each line that begins with parameters as an item, and what belongs to it indented below."""
    lines: list[str] = []
    inside = False
    for line in docstring.value.splitlines():
        match = _LINE.match(line)
        if match and set(match[1].split(", ")) <= names:
            marked = ", ".join(f"`{name}`" for name in match[1].split(", "))
            lines += [] if inside else [""]
            lines.append(f"- {marked}: {line[match.end() :]}")
            inside = True
        elif inside and line and not line.startswith(" "):
            lines += ["", line]  # a paragraph after the list
            inside = False
        else:
            lines.append(line)
    text = "\n".join(lines)
    return Docstring(text, lineno=docstring.lineno, endlineno=docstring.endlineno, parent=docstring.parent)
