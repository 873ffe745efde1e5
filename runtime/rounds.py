"""Rounds of a call: how well its work fills a GPU. Takes sizes of a call, gives a number from 0 to MANY.

The field calls them waves of thread blocks: as many blocks as run at the same time, then the next ones. Rounds count
tiles of a fixed number of rows instead of a kernel's blocks, so that a call has a number before its kernel is chosen.
Tables keep it with each entry (runtime/tables.py), and a choice compares it (runtime/choosing.py).
"""

from __future__ import annotations

MANY = 8  # rounds of a call, beyond which their number no longer matters
ROWS = 128  # of a tile


def rounds_of(batch: int, heads: int, rows: int, multiprocessors: int) -> int:
    """How often tiles of ROWS rows of all heads and batch entries fill three quarters of the GPU: 0, 1, ... or MANY.

    A forward's rows are queries of q heads, a backward's keys of kv heads. MANY where the number of multiprocessors is
    not known (0). The same rule as runtime/native/rounds.h.
    """
    tiles = batch * heads * -(-rows // ROWS)
    return min(MANY, 4 * tiles // (3 * multiprocessors)) if multiprocessors else MANY
