"""Which forwards split the keys: the prediction, compiled alone."""

from __future__ import annotations

import ctypes

import gxx
import pytest
from click.testing import CliRunner

from attnforge.bagel.commands import explain
from attnforge.cli import main
from attnforge.codegen import host_sources

H100, H200 = 1.0, 4.917 / 3.352  # memory bandwidth
ENTRY = """
extern "C" bool splits(const long (&s)[6], double bandwidth) {
    return attnforge::splitting_is_faster({s[0], s[1], s[2], s[3], s[4], s[5], bandwidth});
}
extern "C" long rows(const long (&s)[6], double bandwidth) {
    return attnforge::split_rows({s[0], s[1], s[2], s[3], s[4], s[5], bandwidth});
}
extern "C" void choose(const int (&held)[9], long work_tiles, long tiles_n, double loads, double combining,
                       int (&chosen)[2]) {
    attnforge::ClusterCounts counts{};
    std::copy(held, held + 9, counts.begin());
    const attnforge::Splits splits = attnforge::choose_splits(counts, work_tiles, tiles_n, {loads, combining});
    chosen[0] = splits.kv_splits, chosen[1] = splits.cluster_size;
}
"""
HELD = (0, 132, 66, 39, 30, 22, 17, 15, 15)  # clusters of 0 to 8 blocks that an H200 held at a time
ALONE = (0, 132, *(0,) * 7)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("split") / "choice.cpp"
    path.write_text(host_sources.sources("split_choice.h")["split_choice.h"] + ENTRY)
    found = gxx.library(path, "-std=c++17", "-O1", "-fPIC", "-shared")
    found.splits.restype = ctypes.c_bool
    return found


def splits(
    library: ctypes.CDLL, heads: tuple[int, int], batch: int, queries: int, keys: int, bandwidth: float
) -> bool:
    sizes = (ctypes.c_long * 6)(batch, *heads, queries, keys, 132)
    return bool(library.splits(sizes, ctypes.c_double(bandwidth)))


@pytest.mark.parametrize(
    ("heads", "batch", "queries", "keys", "rows"),
    [
        # Seven rows: tiles of 128 were not measured.
        ((28, 4), 1, 1, 8192, 64),
        # Measured on an H200: the other tiles took at least 4 % longer.
        ((28, 4), 1, 16, 8192, 64),
        ((28, 4), 1, 16, 32768, 128),
        ((28, 4), 4, 16, 8192, 128),
        ((28, 4), 1, 64, 2048, 64),
        ((28, 4), 1, 64, 8192, 128),
        ((8, 8), 1, 128, 2048, 64),
        ((8, 8), 1, 128, 32768, 128),
        ((32, 8), 1, 16, 32768, 64),
        ((32, 8), 1, 64, 2048, 64),
        ((32, 8), 1, 128, 8192, 128),
        ((16, 16), 4, 128, 2048, 128),
    ],
)
def test_rows_of_tiles(
    library: ctypes.CDLL, heads: tuple[int, int], batch: int, queries: int, keys: int, rows: int
) -> None:
    sizes = (ctypes.c_long * 6)(batch, *heads, queries, keys, 132)
    assert library.rows(sizes, ctypes.c_double(H200)) == rows


@pytest.mark.parametrize(
    ("held", "work_tiles", "tiles_n", "costs", "chosen"),
    [
        # Measured, (kv_splits, cluster_size): 28/4/128 with 64 queries and 8,192 keys; 16/16/128 with 16, 8/8/128
        # with 1; four batch entries of 32/8/128 with 16; 28/4/128 with 128, 32/8/128 with 128, and sixteen entries.
        (HELD, 16, 64, (2.6, 1), (8, 1)),
        (HELD, 16, 128, (21.2, 2), (1, 6)),
        (HELD, 8, 128, (10.6, 2), (16, 1)),
        (HELD, 32, 128, (42.3, 2), (1, 3)),
        (HELD, 28, 64, (2.6, 1), (1, 4)),
        (HELD, 32, 64, (5.3, 1), (4, 1)),
        (HELD, 512, 64, (84.6, 1), (1, 1)),
        # 16/16/128 with one query. With 131,072 keys, where clusters of six were slower than FlashAttention-3, eight
        # splits are predicted to be faster.
        (HELD, 16, 512, (84.6, 2), (1, 6)),
        (HELD, 16, 2048, (338.4, 2), (8, 1)),
        # Without clusters: two key tiles for each block, and whole rounds.
        (ALONE, 16, 16, (0, 0), (8, 1)),
        (ALONE, 200, 8, (0, 0), (1, 1)),
        # Fewer key tiles than blocks; clusters too large for the device.
        (HELD, 1, 1, (0, 0), (1, 1)),
        ((0, 10, 4, *(0,) * 6), 4, 100, (0, 1), (1, 2)),
    ],
)
def test_splits(
    library: ctypes.CDLL,
    held: tuple[int, ...],
    work_tiles: int,
    tiles_n: int,
    costs: tuple[float, float],
    chosen: tuple[int, int],
) -> None:
    found = (ctypes.c_int * 2)()
    sizes = ctypes.c_long(work_tiles), ctypes.c_long(tiles_n)
    library.choose((ctypes.c_int * 9)(*held), *sizes, *map(ctypes.c_double, costs), found)
    assert tuple(found) == chosen


@pytest.mark.parametrize(
    ("heads", "batch", "queries", "keys", "on_h100", "on_h200"),
    [
        # Measured: the slower kernel took at least 7 % longer.
        ((28, 4), 1, 64, 8192, True, True),
        ((28, 4), 16, 64, 8192, True, True),
        ((32, 8), 1, 256, 32768, True, True),
        ((16, 16), 1, 1, 2048, True, True),
        ((32, 8), 16, 128, 2048, False, False),
        # An H200 loads K and V faster than a third of its multiprocessors can use.
        ((16, 16), 4, 1, 8192, False, True),
        ((16, 16), 4, 16, 8192, False, True),
        ((16, 16), 4, 1, 32768, False, True),
        ((16, 16), 4, 16, 32768, False, True),
        # Blocks of one q head load K and V for each of four; measured on an H200.
        ((32, 8), 16, 128, 8192, True, True),
        ((32, 8), 4, 128, 8192, True, True),
    ],
)
def test_choice(
    library: ctypes.CDLL,
    heads: tuple[int, int],
    batch: int,
    queries: int,
    keys: int,
    on_h100: bool,
    on_h200: bool,
) -> None:
    found = [splits(library, heads, batch, queries, keys, chip) for chip in (H100, H200)]
    assert found == [on_h100, on_h200]


@pytest.mark.parametrize(
    ("queries", "keys", "expected"),
    [(1, 1023, False), (1, 1024, True), (512, 2047, False), (512, 65536, True), (513, 65536, False)],
)
def test_bounds(library: ctypes.CDLL, queries: int, keys: int, expected: bool) -> None:
    assert splits(library, (16, 2), 1, queries, keys, H100) == expected


def test_explain_has_the_same_bounds() -> None:
    text = host_sources.sources("split_choice.h")["split_choice.h"]
    bounds = (explain.MOST_QUERIES, explain.LEAST_KEYS, explain.KEYS_OF_A_QUERY)
    queries, keys, keys_of_query = bounds
    assert f"kQueries = {queries}, kKeys = {keys}, kKeysOfQuery = {keys_of_query};" in text


@pytest.mark.parametrize(("length", "said"), [("1/32768", True), ("1/1000", False), ("513/32768", False)])
def test_explain_says_where_keys_may_be_split(length: str, said: bool) -> None:
    words = ("explain", "--gpu", "NVIDIA H200", "--heads", "28/4", "--head-dim", "128", "--mask", "full")
    shown = CliRunner().invoke(main, [*words, "--length", length, "--direction", "fwd"])
    assert shown.exit_code == 0, shown.output
    assert ("blocks share the keys" in shown.output) == said


def test_explain_has_the_defaults_of_the_gpu_that_it_explains() -> None:
    words = ("explain", "--gpu", "NVIDIA H200", "--heads", "8/8", "--head-dim", "64", "--mask", "causal")
    assert "causal/8192 8/8/64 fwd bf16 on NVIDIA H200" in CliRunner().invoke(main, words).output


def test_many_heads_do_not_split(library: ctypes.CDLL) -> None:
    """They fill the multiprocessors without."""
    found = [splits(library, (32, 32), batch, 128, 16384, H100) for batch in (1, 2, 4, 8, 16, 33)]
    assert found[0]
    assert not found[-1]


@pytest.mark.parametrize(("group", "expected"), [(2**22 - 1, True), (2**22, False), (2**23, False)])
def test_rows_beyond_an_int_do_not_split(library: ctypes.CDLL, group: int, expected: bool) -> None:
    """Of 512 queries; on a device so wide that splitting them is the faster way."""
    sizes = (ctypes.c_long * 6)(1, group, 1, 512, 1 << 20, 1 << 27)
    assert bool(library.splits(sizes, ctypes.c_double(H100))) == expected
