"""Draws docs/speed.png from tables of docs/performance.md: python docs/draw_speed.py

Each panel is one table of "Against FlashAttention-3 and cuDNN's flexible attention", H200 columns.
"""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).parent
COLOURS = {
    "attnforge": "#1f5fa8",
    "cudnn.flex": "#d98032",
    "FA3": "#5a9e6f",
    "FA4": "#a8c686",
    "cuDNN": "#d98032",
}
WIDTH, ROW, BAR, LABEL, GAP, SCALE = (
    1270,
    7,
    15,
    280,
    60,
    800.0,
)  # pixels; SCALE: TFLOP/s at a panel's right end
INK, PALE = "#20242a", "#d9dde3"


def rows(text: str, head: str) -> list[list[str]]:
    """Cells of the Markdown table whose header line starts with `head`."""
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("*", "") for cell in line.strip("|").split("|")] for line in lines]


def rates(cells: list[str], names: dict[str, int], part: int) -> list[tuple[str, float]]:
    """(name, TFLOP/s) of one pass; part 0 is forward, 1 backward."""
    return [(name, float(cells[column].split("/")[part])) for name, column in names.items()]


class Figure:
    """Panels of horizontal bars under each other, forward on the left, backward on the right."""

    def __init__(self) -> None:
        self.image = Image.new("RGB", (WIDTH, 2000), "white")
        self.draw = ImageDraw.Draw(self.image)
        self.y = 16

    def write(self, x: float, text: str, size: int = 15, fill: str = INK) -> None:
        self.draw.text((x, self.y), text, fill=fill, font=ImageFont.load_default(size))

    def panel(self, title: str, table: list[list[str]], names: dict[str, int]) -> None:
        """One title, a legend, and a group of bars for each row of the table."""
        half = (WIDTH - LABEL - GAP) / 2
        self.write(16, title, 19)
        self.y += 30
        for part, heading in enumerate(("forward, TFLOP/s", "backward, TFLOP/s")):
            self.write(LABEL + part * (half + GAP), heading, 15)
        self.legend(names)
        self.y += 26
        for cells in table:
            height = len(names) * BAR
            self.draw.text((16, self.y + height / 2 - 9), cells[0], fill=INK, font=ImageFont.load_default(15))
            for part in (0, 1):
                left = LABEL + part * (half + GAP)
                for number, (name, rate) in enumerate(rates(cells, names, part)):
                    top, end = self.y + number * BAR, left + (half - 40) * rate / SCALE
                    self.draw.rectangle((left, top, end, top + BAR - 3), fill=COLOURS[name])
                    self.draw.text(
                        (end + 5, top - 2), f"{rate:.0f}", fill=INK, font=ImageFont.load_default(12)
                    )
                self.draw.line((left, self.y - 2, left, self.y + height - 2), fill=PALE, width=1)
            self.y += height + ROW
        self.y += 22

    def legend(self, names: dict[str, int]) -> None:
        x = 16.0
        for name in names:
            self.draw.rectangle((x, self.y + 4, x + 10, self.y + 14), fill=COLOURS[name])
            self.write(x + 14, name, 13)
            x += 26 + self.draw.textlength(name, ImageFont.load_default(13))

    def save(self, path: Path) -> None:
        self.image.crop((0, 0, WIDTH, self.y)).quantize(64).save(path, optimize=True)


def main() -> None:
    text = (HERE / "performance.md").read_text()
    packs = [row for row in rows(text, "| packs |") if re.search("28/4/128|14/2/64", row[0])]
    chosen = ("4 x 8192 28/4/128", "8 x 4096 14/2/64", "8 x 4096 16/16/72", "16 x 1024", "4 x 4096 24/24/96")
    dense = [row for row in rows(text, "| shape | ours | FA3") if any(name in row[0] for name in chosen)]
    figure = Figure()
    figure.panel(
        "BAGEL's packs (query heads / kv heads / head_dim), one H200, bf16",
        packs,
        {"attnforge": 1, "cudnn.flex": 2},
    )
    figure.panel(
        "Dense attention (batch x length, heads), one H200, bf16",
        dense,
        {"attnforge": 1, "FA3": 2, "FA4": 3, "cuDNN": 4},
    )
    figure.save(HERE / "speed.png")


if __name__ == "__main__":
    main()
