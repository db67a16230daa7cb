"""How the clusters of the CuTe-DSL forward share out the tiles: what the kernel's `_index` and `_tile` do with the
section that the host chooses, counted again tile by tile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffpa_jit.cute.order import balance, section_of, tile_lengths
from ffpa_jit.cute.schedule import TILE

CLUSTERS = 66  # an H200's


def taken(heads: int, group: int, len_q: int, len_kv: int, section: int, clusters: int) -> list[list[tuple[int, int]]]:
    """For each cluster the (head, blocks of keys) of its tiles in turn: the kernel's arithmetic, causal."""
    rows = len_q * group
    per_head = -(-rows // TILE)
    tiles: list[list[tuple[int, int]]] = [[] for _ in range(clusters)]
    for cluster in range(clusters):
        turn = 0
        while (index := turn * clusters + (clusters - 1 - cluster if turn % 2 else cluster)) < per_head * heads:
            whole = section * per_head
            inside = index % whole
            width = min(section, heads - index // whole * section)
            row_tile, head = per_head - 1 - inside // width, index // whole * section + inside % width
            last = min(row_tile * TILE + TILE, rows) - 1
            seen = max(last // group + 1 + len_kv - len_q, 1)
            tiles[cluster].append((head, -(-seen // 64)))
            turn += 1
    return tiles


def shared(heads: int, group: int, len_q: int, len_kv: int, clusters: int = CLUSTERS) -> float:
    """Mean over greatest work of the clusters with the chosen section."""
    section = section_of(heads, group, len_q, len_kv, True, clusters)
    work = [sum(blocks + 1.5 for _, blocks in each) for each in taken(heads, group, len_q, len_kv, section, clusters)]
    return sum(work) / len(work) / max(work)


@pytest.mark.parametrize(
    ("heads", "group", "length"),
    [(32, 1, 8192), (16, 1, 8192), (8, 1, 16384), (8, 4, 8192), (4, 8, 4096), (64, 1, 4096), (128, 1, 2048),
     (256, 1, 1024), (40, 1, 6144), (96, 1, 3072), (300, 2, 700), (65, 1, 3000)],
)  # fmt: skip
def test_long_causal_calls_leave_no_cluster_idle(heads, group, length):
    """One head at a time leaves a third of them idle in the second, and half in the third."""
    assert shared(heads, group, length, length) > 0.98


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 100), group=st.sampled_from((1, 2, 3, 8)), len_q=st.integers(1, 3000),
    more=st.integers(0, 2000), clusters=st.sampled_from((39, 57, 66)),
)  # fmt: skip
def test_any_causal_call_is_shared_out_as_well_as_its_number_of_tiles_allows(heads, group, len_q, more, clusters):
    found = shared(heads, group, len_q, len_q + more, clusters)
    turns = heads * -(-len_q * group // TILE) / clusters
    assert found > (0.87 if turns > 12 else 0.75 if turns > 4 else 0.0), turns


def test_a_whole_call_is_counted_as_the_kernel_takes_it():
    for heads, group, length, section in ((5, 1, 3000, 2), (12, 3, 1000, 5), (7, 2, 900, 7)):
        tiles = taken(heads, group, length, length, section, 20)
        work = [sum(blocks + 1.5 for _, blocks in each) for each in tiles]
        found = balance(tile_lengths(group, length, length, 10**6), heads, section, 20)
        assert found == pytest.approx(sum(work) / 20 / max(work))
        assert sum(len(each) for each in tiles) == heads * -(-length * group // TILE)


def test_a_section_is_of_heads_that_there_are():
    for is_causal in (False, True):
        for heads in (1, 2, 7, 8, 9, 1000):
            assert 1 <= section_of(heads, 1, 700, 700, is_causal, CLUSTERS) <= heads
    assert section_of(3, 1, 1, 1 << 20, True, CLUSTERS) == 3


def test_short_calls_of_many_heads_have_them_all_side_by_side_where_that_is_best():
    assert shared(40, 1, 245, 245) == pytest.approx(0.779, abs=0.002)  # 11 at a time: 0.606
    assert shared(37, 1, 639, 639) == pytest.approx(0.934, abs=0.002)


def test_what_comes_after_many_turns_counts_too():
    """Later sections begin at other clusters: of these, 48 turns of sections of 8 look even, and the whole is not."""
    for heads, group, length in ((128, 1, 4829), (64, 4, 2729), (213, 1, 2301)):
        assert shared(heads, group, length, length) > 0.975


def test_choosing_looks_at_a_few_tiles_however_many_there_are():
    assert 1 <= section_of(10**9, 1, 1000, 1000, True, CLUSTERS) <= 64
    assert 1 <= section_of(2, 1, 10**12, 10**12, True, CLUSTERS) <= 2
