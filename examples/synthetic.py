"""Packs for train_mot.py: made up, but shaped as BAGEL's, and there is something to learn in them.

A pack is a function of its seed alone. Each sample has one of a few subjects: its captions count in steps that depend
on the subject, and its images have the subject's colour.

    t2i     caption; image to be denoised
    edit    image as latents, the same as vision tokens, instruction, image to be denoised; then perhaps another turn
    vlm     image as vision tokens; answer

Learnt are the next tokens of captions and answers, and the flow of images to be denoised.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnforge.bagel.mot.layer import MotConfig
from attnforge.bagel.mot.model import Pack, rope_positions

Plan = tuple[tuple[str, str], ...]  # (what, mode) of each split

SUBJECTS = 4
START, END, TEXT = 0, 1, 2  # ids of an image's two markers; text ids begin at TEXT
TURN: Plan = (("latent", "full"), ("vision", "full"), ("instruction", "causal"), ("latent", "noise"))
PLANS: tuple[Plan, ...] = (
    (("caption", "causal"), ("latent", "noise")),
    TURN,
    TURN + TURN,
    (("vision", "full"), ("caption", "causal")),
)


class Synthetic:
    """Packs of at most `tokens` tokens, and of not many fewer, for a model of sizes `config`."""

    def __init__(self, config: MotConfig, tokens: int) -> None:
        """Raises ValueError if a pack is too short for the longest kind of sample at its shortest."""
        if tokens < 64:
            raise ValueError(f"tokens: {tokens}; a pack needs 64 or more")
        self.config = config
        self.tokens = tokens
        generator = torch.Generator().manual_seed(1)
        self.colours = {
            name: torch.randn(SUBJECTS, dim, generator=generator)
            for name, dim in (("vision", config.vision_dim), ("latent", config.latent_dim))
        }

    def pack(self, seed: int) -> Pack:
        """The pack of this seed, on the CPU."""
        builder = _Builder(self, seed)
        refused = 0
        while refused < 4:  # room for shorter ones may be left
            refused += not builder.add_sample()
        return builder.finish()


class _Builder:
    """A pack as it grows, sample by sample."""

    def __init__(self, source: Synthetic, seed: int) -> None:
        self.source = source
        self.generator = torch.Generator().manual_seed(seed)
        self.sample_lens: list[int] = []
        self.split_lens: list[int] = []
        self.modes: list[str] = []
        self.text: list[Tensor] = []  # each (2, n): rows, ids
        self.labels: list[Tensor] = []  # each (2, n): rows, ids of the tokens after them
        self.images: dict[str, list[tuple[Tensor, Tensor]]] = {"vision": [], "latent": []}  # (rows, values)
        self.times: list[Tensor] = []  # of each image of latents

    def draw(self, low: int, high: int) -> int:
        """low to high - 1."""
        return int(torch.randint(low, high, (), generator=self.generator))

    def add_sample(self) -> bool:
        """One more sample; False if what was drawn does not fit any more."""
        tokens, places = self.source.tokens, self.source.config.places
        plan = PLANS[self.draw(0, len(PLANS))]
        subject = self.draw(0, SUBJECTS)
        most = max(3, math.isqrt(min(places, tokens // 8)) + 1)
        areas = [self.draw(2, most) ** 2 if what in self.images else 0 for what, _ in plan]
        lengths = [area + 2 if area else self.draw(4, max(5, tokens // 16)) for area in areas]
        if sum(self.sample_lens) + sum(lengths) > tokens:
            return False
        first = sum(self.sample_lens)
        for (what, mode), length in zip(plan, lengths, strict=True):
            rows = torch.arange(first, first + length)
            if what in self.images:
                self.add_image(rows, what, mode, subject)
            else:
                self.add_text(rows, subject, what == "caption")
            self.split_lens.append(length)
            self.modes.append(mode)
            first += length
        self.sample_lens.append(sum(lengths))
        return True

    def add_text(self, rows: Tensor, subject: int, learnt: bool) -> None:
        """Numbers in steps of subject + 1."""
        letters = self.source.config.vocab - TEXT
        count = torch.arange(rows.numel()) * (subject + 1) + self.draw(0, letters)
        ids = TEXT + count % letters
        self.text.append(torch.stack((rows, ids)))
        if learnt:
            self.labels.append(torch.stack((rows[:-1], ids[1:])))

    def add_image(self, rows: Tensor, what: str, mode: str, subject: int) -> None:
        """Tokens of the subject's colour between two markers."""
        self.text.append(torch.stack((rows[[0, -1]], torch.tensor((START, END)))))
        inner = rows[1:-1]
        self.images[what].append((inner, self.source.colours[what][subject].expand(inner.numel(), -1)))
        if what == "latent":
            time = (
                torch.sigmoid(torch.randn((), generator=self.generator))
                if mode == "noise"
                else torch.zeros(())
            )
            self.times.append(time.expand(inner.numel()))

    def finish(self) -> Pack:
        def image(what: str, dim: int) -> tuple[Tensor, Tensor, Tensor]:
            """rows, places, values"""
            found = self.images[what]
            rows = torch.cat([torch.empty(0, dtype=torch.int64), *(rows for rows, _ in found)])
            places = torch.cat([rows[:0], *(torch.arange(r.numel()) for r, _ in found)])
            return rows, places, torch.cat([torch.empty(0, dim), *(values for _, values in found)])

        none = torch.empty(2, 0, dtype=torch.int64)
        text, labels = torch.cat([none, *self.text], 1), torch.cat([none, *self.labels], 1)
        vision_rows, vision_places, vision = image("vision", self.source.config.vision_dim)
        latent_rows, latent_places, latents = image("latent", self.source.config.latent_dim)
        lists = tuple(self.sample_lens), tuple(self.split_lens), tuple(self.modes)
        return Pack(
            *lists,
            positions=rope_positions(*lists),
            text_ids=text[1],
            text_rows=text[0],
            vision=vision,
            vision_rows=vision_rows,
            vision_places=vision_places,
            latents=latents,
            latent_rows=latent_rows,
            latent_places=latent_places,
            noise=torch.randn(latents.shape, generator=self.generator),
            times=torch.cat([torch.empty(0), *self.times]),
            labels=labels[1],
            label_rows=labels[0],
        )
