"""The page of `attnforge report`: what it says, that it loads nothing, and that a browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import made_up_logs
import pytest
from click.testing import CliRunner

from attnforge.bagel.report.read import read
from attnforge.cli import main
from attnforge.codegen.spec import Direction

vl_convert = pytest.importorskip("vl_convert", reason="needs the extra `report`")
pytest.importorskip("altair", reason="needs the extra `report`")

from attnforge.bagel.report import charts, page  # noqa: E402
from attnforge.bagel.report.bounds import case_of  # noqa: E402
from attnforge.bagel.report.kernels import compare  # noqa: E402
from attnforge.bagel.report.sources import style_sheet  # noqa: E402


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two logs of one problem, the first with a second problem."""
    folder = tmp_path_factory.mktemp("logs")
    first, second = folder / "first.jsonl", folder / "second.jsonl"
    made_up_logs.write_log(first, Direction.FORWARD, count=24)
    made_up_logs.write_log(first, Direction.BACKWARD, count=6)
    made_up_logs.write_log(second, Direction.FORWARD, count=24, torch="2.13.0", gain=1.1)
    return [first, second]


@pytest.fixture(scope="module")
def text(logs: list[Path]) -> str:
    return page.make_page(read(logs))


class Tags(HTMLParser):
    """(tag, attributes) of a page in order, and the text of the scripts; tags are closed in order."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif self._open and self._open[-1] != "style":
            self.words.append(data)

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def tags(text: str) -> Tags:
    return Tags(text)


def test_the_page_loads_nothing(text: str, tags: Tags) -> None:
    """Its policy forbids it, and nothing asks for it."""
    (policy,) = [m["content"] for m in tags.of("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "http" not in policy
    assert not {tag for tag, _ in tags.tags} & {"link", "iframe", "object", "embed", "base", "video", "audio"}
    for _, attributes in tags.tags:
        for name in ("src", "href", "srcset", "action", "poster", "data"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:image/png;base64,")), value[:80]
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_can_be_read_without_seeing_it(tags: Tags) -> None:
    levels = [int(tag[1]) for tag, _ in tags.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(image["alt"] for image in tags.of("img"))
    places = [attributes for _, attributes in tags.tags if attributes.get("class") == "chart"]
    assert all(place["role"] == "img" and place["aria-label"] for place in places)
    # What scrolls can be reached with the keyboard.
    scrolling = [attributes for _, attributes in tags.tags if attributes.get("class") == "scroll"]
    assert scrolling
    assert all(attributes["tabindex"] == "0" for attributes in scrolling)
    names = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(names) == len(set(names))
    links = {(link["href"] or "").removeprefix("#") for link in tags.of("a")}
    assert links
    assert links <= set(names)
    assert tags.of("html")[0]["lang"] == "en"


def test_every_chart_has_its_spec_and_rows(tags: Tags) -> None:
    data = json.loads(tags.scripts[0])
    places = [attributes for _, attributes in tags.tags if attributes.get("class") == "chart"]
    assert {place["data-spec"] for place in places} == data["specs"].keys()
    assert {place["data-rows"] for place in places} == data["rows"].keys() == {"p1", "p2"}
    for name, spec in data["specs"].items():
        assert not spec.keys() & {"$schema", "config"}
        rows = {**spec.get("datasets", {}), "variants": data["rows"][name[:2]]}
        assert set(re.findall(r'"data": \{"name": "([^"]+)"', json.dumps(spec))) <= rows.keys(), name
        drawn = vl_convert.vegalite_to_vega({**spec, "datasets": rows})
        assert drawn["marks"], name


def test_what_the_page_says(tags: Tags, logs: list[Path]) -> None:
    said = " ".join(" ".join(tags.words).split())
    forward = read(logs).subjects[0]
    assert forward.best is not None
    run, best = forward.best
    assert run.label == "second"
    for words in (
        "finetune/0 7B, forward, bf16",
        "finetune/0 7B, backward, bf16",
        f"{best.tflops:.1f} TFLOP/s",
        page.words(best),
        "1.22x",  # of fa3, as made up
        "no such mask",
        "of a space of 31",
        "too much shared <data> & more",
        "made up for a test, measured by nobody",
        "The incumbent, the choice of the tuned tables when the search began, is",
        best.spec.slug,
        "22 variants measured in first, too: ",
        "the data sheet's 989.4 TFLOP/s",
        "the slope the L2 cache's 7.7 TB/s",
        "could not be read",
    ):
        assert (words in said) != (words == "could not be read"), words


def test_the_source_has_changed_since_the_search(text: str, logs: list[Path], tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    rows = [json.loads(line) for line in logs[0].read_text().splitlines()]
    for row in rows:
        row["source"] = "another"
    old.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sentence = "the templates have changed since the search"
    assert sentence not in text
    assert sentence in page.make_page(read([old]))


def test_the_incumbent_of_a_log_that_names_none(logs: list[Path], tmp_path: Path) -> None:
    """It is the package's choice, whether or not the search measured it."""
    run, best = read(logs).subjects[0].best or pytest.fail("no variant works")
    silent = replace(run, incumbent=None)
    found = compare(silent, best, case_of("finetune/0 7B", "bf16"))
    assert found.origin == "the choice of the package's tables"
    assert found.incumbent is not None
    assert found.incumbent.problem == best.spec.problem
    assert compare(silent, best, None).incumbent is None


def test_a_log_of_failures_and_a_case_that_cannot_be_made(logs: list[Path], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in logs[0].read_text().splitlines()]
    broken = tmp_path / "broken.jsonl"
    failed = [row for row in rows if "result" in row and row["result"]["status"] != "ok"]
    lost = [{**row, "case": "packs.jsonl:7 7B"} for row in rows]
    broken.write_text("".join(json.dumps(row) + "\n" for row in (*failed, *lost)))
    said = " ".join(" ".join(Tags(page.make_page(read([broken]))).words).split())
    assert "No variant works." in said
    assert (
        "The case cannot be made here: pack: there is no file packs.jsonl, so no line packs.jsonl:7" in said
    )


def test_rows_of_the_charts(logs: list[Path]) -> None:
    subject = read(logs).subjects[0]
    scale = charts.scale_of(subject)
    rows = charts.rows_of(subject, scale)
    assert len(rows) == sum(len(run.ranked) for run in subject.runs)
    for run in subject.runs:
        mine = [row for row in rows if row["run"] == run.label]
        assert [row["best"] for row in mine] == [
            max(row["trial"] for row in mine[: n + 1]) for n in range(len(mine))
        ]
        assert all(row["low"] <= row["speed"] <= row["high"] for row in mine)
    assert scale.unit == "TFLOP/s"
    assert scale.low < min(row["low"] for row in rows)
    assert max(row["high"] for row in rows) < scale.high
    varied = charts.varied([v for run in subject.runs for v in run.variants])
    assert "tile_n" in varied
    assert "hand_over" not in varied


def test_labels_of_peers_do_not_overlap() -> None:
    assert charts._apart([1.0, 1.1, 5.0, 5.1, 5.2], 1.0) == [1.0, 2.0, 5.0, 6.0, 7.0]


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themes() -> Iterator[tuple[str, dict[str, str]]]:
    """The colours of style sheet by name, light and dark."""
    blocks = re.findall(r":root \{(.*?)\}", (page.FOLDER / "page.css").read_text(), re.DOTALL)
    for name, block in zip(("light", "dark"), blocks, strict=True):
        yield name, dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


@pytest.mark.parametrize(("theme", "colours"), list(themes()), ids=["light", "dark"])
def test_contrast(theme: str, colours: dict[str, str]) -> None:
    """Text has 4.5 to what it stands on, marks of charts have 3."""
    for paper in ("paper", "card"):
        for name in ("ink", "faint", "link", "warn"):
            assert contrast(colours[name], colours[paper]) >= 4.5, (name, paper)
    assert all(contrast(colours["ink"], colours[name]) >= 4.5 for name in ("added", "removed"))
    series = [colour for name, colour in colours.items() if name.startswith("series-")]
    assert len(series) == 5
    assert all(contrast(colour, colours["paper"]) >= 3 for colour in series)
    tokens = {}
    for line in style_sheet(theme).splitlines():
        found = re.search(r"\.code \.(\w+) \{.*?color: (#[0-9A-Fa-f]{3,6})", line)
        if found and found[1] not in ("gi", "gd", "gu", "gh", "w", "err"):  # of page.css, or invisible
            tokens[found[1]] = full(found[2].lower())
    assert len(tokens) > 10
    assert {name: c for name, c in tokens.items() if contrast(c, colours["card"]) < 4.5} == {}


def full(colour: str) -> str:
    return colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])


def test_the_command(logs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["report", *map(str, logs), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert f"{out}: {out.stat().st_size / 1e6:.1f} MB" in done.output
    assert out.stat().st_size < 3e6


def test_a_missing_package_names_the_extra(
    logs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.delitem(sys.modules, "attnforge.bagel.report.page")
    done = CliRunner().invoke(main, ["report", str(logs[0]), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert (
        "needs vl_convert, which the extra `report` installs: pip install 'attnforge[report]'" in done.stderr
    )
    assert isinstance(done.exception, (SystemExit, click.ClickException))


@cache
def chromium() -> str:
    """Its path; empty if there is none."""
    return shutil.which("chromium") or shutil.which("google-chrome") or ""


@pytest.mark.skipif(not chromium(), reason="needs chromium or google-chrome, and playwright")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_draws_the_page(text: str, tmp_path: Path, width: int, scheme: str) -> None:
    """Offline, without an error, no wider than the window, each chart with marks, in the colours of the scheme."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    problems: list[str] = []
    requests: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
        )
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(path.as_uri())
        drawn = [_drawn(tab, place) for place in tab.query_selector_all(".chart")]
        sizes = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        paper = tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        browser.close()
    assert problems == []
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    assert len(drawn) > 10
    assert all(marks > 3 and 200 < wide <= width for marks, wide in drawn), drawn
    assert sizes == [width, width]
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]


def _drawn(tab: Any, place: Any) -> tuple[int, float]:
    """(number of marks, width in pixels) of a chart that is scrolled to."""
    place.scroll_into_view_if_needed()
    tab.wait_for_function("place => place.dataset.drawn", arg=place)
    marks = place.evaluate(
        "place => place.querySelectorAll('svg [class*=mark-] path, svg [class*=mark-] line').length"
    )
    return int(marks), float(place.bounding_box()["width"])
