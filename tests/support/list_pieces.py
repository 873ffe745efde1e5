"""How _order of schedule.cuh cuts lists of visits, in plain Python."""

from __future__ import annotations


def more_pieces(tiles: int, slots: bool = False, planes: int = 1) -> int:
    """By how many at most there are more pieces than tiles; arguments as of `pieces`."""
    return max(-(-tiles // 16) - 1, min(tiles // 4, 64 // planes)) if slots else -(-tiles // 8) - 1


def pieces(counts: list[int], slots: bool = False, planes: int = 1) -> list[list[int]]:
    """The order of tiles, or pieces of them, whose lists have these lengths: [tile, first visit, visits].

    slots: those of a forward of `planes` heads in all, of which a piece also has a slot, -1 if the list is whole.
    """
    spare = more_pieces(len(counts), slots, planes)
    least = max(16, 3 * sum(counts) // ((1 if slots else 2) * len(counts)))
    most = max(least, sum(count for count in counts if count > least) // (spare + 1) + 1)
    lengths = [-(-count // max(1, -(-count // max(most, -(-count // 32))))) for count in counts]
    order = sorted(range(len(counts)), key=lambda tile: (-lengths[tile], tile))
    found = []
    for tile in order:
        for begin in range(0, max(1, counts[tile]), max(1, lengths[tile])):
            found.append([tile, begin, min(lengths[tile], counts[tile] - begin)])
    blocks = len(counts) + spare
    assert len(found) <= blocks
    found += [[-1, 0, 0]] * (blocks - len(found))
    if slots:
        cut = sorted((tile, begin) for tile, begin, count in found if 0 < count < counts[tile])
        assert len(cut) <= 2 * spare
        places = [(piece[0], piece[1]) for piece in found]
        found = [
            [*piece, cut.index(place) if place in cut and piece[2] > 0 else -1]
            for piece, place in zip(found, places, strict=True)
        ]
    return found
