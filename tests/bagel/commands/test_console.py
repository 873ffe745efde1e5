"""Tables and labelled lines in terminals of any width."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from attnforge.bagel.commands import console as terminal
from attnforge.bagel.commands import doctor
from attnforge.bagel.commands.console import echo_entry, make_table
from attnforge.runtime.doctor.findings import OK, WARNING, Finding


def lines(width: int) -> list[str]:
    table = make_table("", ("variant",), ("speed", "95 % interval"), ("note",))
    table.add_row("tile_n=128 heads=8", "0.1 GFLOP/s", "0.0622-0.0866", "two words")
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_numbers_and_words_stay_whole_in_a_narrow_terminal() -> None:
    found = lines(46)
    assert max(map(len, found)) <= 46
    text = "\n".join(found)
    assert "0.1 GFLOP/s 0.0622-0.0866" in text
    assert all(word in text for word in ("tile_n=128", "heads=8", "95 %", "interval", "words"))


@pytest.mark.parametrize("width", [80, 200])
def test_columns_stand_apart_where_there_is_room(width: int) -> None:
    assert " tile_n=128 heads=8   0.1 GFLOP/s   0.0622-0.0866   two words" in lines(width)


def test_no_digit_is_lost_in_a_terminal_that_is_too_narrow() -> None:
    digits = [c for c in "".join(lines(24)) if c.isdigit()]
    whole = [c for c in "".join(lines(200)) if c.isdigit()]
    assert sorted(digits) == sorted(whole)


@pytest.mark.parametrize(
    ("is_terminal", "expected"),
    [
        (
            True,
            [
                "  why   tuned for 1024 rows,",
                "        a_slug_that_is_longer_than_the_line",
                "        nearer than all",
            ],
        ),
        (False, ["  why   tuned for 1024 rows, a_slug_that_is_longer_than_the_line nearer than all"]),
    ],
)
def test_labelled_lines_are_indented_in_a_terminal_and_whole_in_a_pipe(
    is_terminal: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(width=30, force_terminal=is_terminal)
    monkeypatch.setattr(terminal, "console", console)
    with console.capture() as captured:
        echo_entry("why", "tuned for 1024 rows, a_slug_that_is_longer_than_the_line nearer than all")
    assert captured.get().splitlines() == expected


PATH = "/home/someone/envs/attention/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13"


@pytest.mark.parametrize(
    ("is_terminal", "expected"),
    [
        (
            True,
            [
                " ok       NVRTC  " + PATH,
                " warning  CPU    compiled by",
                "                 " + PATH,
                "                 the second line",
                "                 → run a command or another",
                "                   one",
            ],
        ),
        (
            False,
            [
                " ok       NVRTC  " + PATH,
                f" warning  CPU    compiled by {PATH}",
                "                 the second line",
                "                 → run a command or another one",
            ],
        ),
    ],
)
def test_doctor_keeps_paths_whole(
    is_terminal: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(width=46, force_terminal=is_terminal, no_color=True)
    monkeypatch.setattr(terminal, "console", console)
    monkeypatch.setattr(doctor, "console", console)
    findings = (
        Finding("NVRTC", OK, PATH),
        Finding("CPU", WARNING, f"compiled by {PATH}\nthe second line", "run a command or another one"),
    )
    with console.capture() as captured:
        doctor.print_findings(findings)
    assert re.sub(r"\x1b\[\d*m", "", captured.get()).splitlines() == expected
