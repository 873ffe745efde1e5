"""A PNG of schedules: busy SMs over time, and the distribution of work over SMs."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

from attnforge.bagel.measure.occupancy import Schedule
from attnforge.bagel.pictures.mask import FAINT, GRID, INK, PAPER, font

FILL, LOSS, BAR = (64, 110, 190), (246, 190, 136), (42, 140, 106)
WIDTH, HEIGHT, LABEL, GAP, MARGIN = 560, 92, 290, 44, 28
FROM = 0.8  # of the slowest SM's time: the curves begin there, because all SMs are busy before
BINS, LOWEST, HIGHEST = 40, 0.8, 1.1  # of the histogram, in mean work


def draw_schedules(title: str, rows: Sequence[tuple[str, Schedule]]) -> Image.Image:
    """RGB image with a line for each (label, schedule)."""
    top = 128
    size = (2 * MARGIN + LABEL + 2 * WIDTH + GAP, top + len(rows) * (HEIGHT + GAP) + MARGIN)
    image = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(image)
    left, right = MARGIN + LABEL, MARGIN + LABEL + WIDTH + GAP
    draw.text((MARGIN, 22), title, INK, font(30))
    heads = (
        (left, f"busy SMs in the last {1 - FROM:.0%} of the time; orange: idle"),
        (right, f"number of SMs by work, {LOWEST} to {HIGHEST} of the mean"),
    )
    for x, text in heads:
        draw.text((x, top - 36), text, FAINT, font(17))
    for number, (label, schedule) in enumerate(rows):
        y = top + number * (HEIGHT + GAP)
        _label(draw, label, schedule, y)
        _curve(draw, schedule, left, y)
        _histogram(draw, schedule, right, y)
    return image


def _label(draw: ImageDraw.ImageDraw, label: str, schedule: Schedule, y: int) -> None:
    lines = (
        f"visible pairs of visited tiles {schedule.tile_use:.1%}",
        f"load balance {schedule.balance:.1%}",
        f"efficiency at most {schedule.allowed:.1%}",
    )
    draw.text((MARGIN, y - 2), label, INK, font(18))
    for number, line in enumerate(lines):
        draw.text((MARGIN, y + 24 + 21 * number), line, FAINT, font(16))


def _curve(draw: ImageDraw.ImageDraw, schedule: Schedule, left: int, y: int) -> None:
    end = max(schedule.busy)
    for pixel in range(WIDTH):
        time = end * (FROM + (1 - FROM) * (pixel + 0.5) / WIDTH)
        height = round(HEIGHT * schedule.running(time) / len(schedule.busy))
        draw.line((left + pixel, y, left + pixel, y + HEIGHT - 1), LOSS)
        if height:
            draw.line((left + pixel, y + HEIGHT - height, left + pixel, y + HEIGHT - 1), FILL)
    draw.rectangle((left - 1, y - 1, left + WIDTH, y + HEIGHT), outline=GRID)


def _histogram(draw: ImageDraw.ImageDraw, schedule: Schedule, left: int, y: int) -> None:
    """Work beyond the ends of the axis is counted in the outermost bins."""
    mean = sum(schedule.busy) / len(schedule.busy)
    counts = [0] * BINS
    for work in schedule.busy:
        place = int((work / mean - LOWEST) / (HIGHEST - LOWEST) * BINS)
        counts[min(max(place, 0), BINS - 1)] += 1
    step = WIDTH // BINS
    for place, count in enumerate(counts):
        height = round((HEIGHT - 16) * count / max(counts))
        if count:
            x = left + place * step
            draw.rectangle((x, y + HEIGHT - max(height, 2), x + step - 2, y + HEIGHT - 1), BAR)
    draw.line((left, y + HEIGHT, left + WIDTH, y + HEIGHT), GRID)
    middle = left + round(WIDTH * (1 - LOWEST) / (HIGHEST - LOWEST))
    draw.line((middle, y, middle, y + HEIGHT), FAINT)
