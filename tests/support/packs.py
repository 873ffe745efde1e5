"""Random packs in the trainer's format."""

from __future__ import annotations

from hypothesis import strategies as st

from attnforge.bagel.packing import MODES

# A sample is a list of (length, mode); lengths of zero and samples without splits are part of the format.
splits = st.tuples(st.integers(0, 7), st.sampled_from(MODES))
packs = st.lists(st.lists(splits, max_size=6), min_size=1, max_size=5).filter(
    lambda samples: any(length for sample in samples for length, _ in sample)
)


def lists(samples: list[list[tuple[int, str]]]) -> tuple[list[int], list[int], list[str]]:
    """sample_lens, split_lens, attn_modes of a drawn pack."""
    flat = [split for sample in samples for split in sample]
    return (
        [sum(length for length, _ in sample) for sample in samples],
        [length for length, _ in flat],
        [mode for _, mode in flat],
    )
