"""The cutting of a call into blocks: everything is covered once, sums are ordered, and nothing exceeds the cap."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ffpa_jit.triton import schedule
from ffpa_jit.triton.schedule import (
    TILE,
    Block,
    Shape,
    WorkspaceTooSmallError,
    backward_blocks,
    first_visible,
    forward_blocks,
    grid_tiles,
    minimum_bytes,
    slot_count,
    tiles,
)  # fmt: skip
from ffpa_jit.triton.terms import UNLIMITED


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    group = draw(st.sampled_from([1, 1, 2, 3, 8]))
    len_q = draw(st.integers(1, 1500))
    causal = draw(st.booleans())
    len_kv = len_q + draw(st.integers(0, 1200)) if causal else draw(st.integers(1, 2500))
    sizes = group * draw(st.integers(1, 4)), group, len_q, len_kv, draw(st.sampled_from([264, 512, 1024]))
    if draw(st.integers(0, 2)) > 0:
        return Shape(*sizes, causal)
    limit = st.sampled_from([0, 1, 100, 128, 129, 700, UNLIMITED])
    return Shape(*sizes, False, draw(limit), 0 if causal else draw(limit))


def visible(s: Shape) -> set[tuple[int, int]]:
    """(row tile, key tile) pairs with at least one visible score."""
    pairs = set()
    for m in range(tiles(s.len_q)):
        last = min((m + 1) * TILE, s.len_q) - 1
        if s.banded:
            low = max(m * TILE + s.offset - s.left, 0)
            high = min(last + s.offset + s.right, s.len_kv - 1)
            pairs |= {(m, n) for n in range(low // TILE, high // TILE + 1) if low <= high}
            continue
        keys = min(s.len_kv, last + 1 + s.offset) if s.causal else s.len_kv
        pairs |= {(m, n) for n in range(tiles(keys))}
    return pairs


def covered(s: Shape, x: Block) -> list[tuple[int, int, int]]:
    """(head, row tile, key tile) of every tile that a block stores, with a slot of its own for each."""
    if s.banded:
        return [(x.head_first + z, m, n) for z in range(x.heads) for m, n in band(s, x)]
    first = first_visible(x.offset, x.n_tiles, s.causal)
    found, slots = [], []
    for m in range(x.m_tiles):
        seen = min(x.n_tiles, m + first) if s.causal else x.n_tiles
        ramp = min(m, max(x.n_tiles - first, 0)) if s.causal else 0
        start = ramp * first + ramp * (ramp - 1) // 2 + (m - ramp) * x.n_tiles
        slots += range(start, start + seen)
        found += [(x.row_first // TILE + m, x.col_first // TILE + n) for n in range(seen)]
    assert slots == list(range(x.slots)), "slots are numbered without gaps"
    return [(x.head_first + z, m, n) for z in range(x.heads) for m, n in found]


def band(s: Shape, x: Block) -> list[tuple[int, int]]:
    """(row tile, key tile) of every tile of a banded block, as `geometry` finds them from either side."""
    found, slots = [], []
    for m in range(x.m_tiles):
        low = max(m * TILE + x.offset - s.left, 0) // TILE
        end = min(x.n_tiles, max(m * TILE + 2 * TILE - 1 + x.offset + s.right, 0) // TILE)
        found += [(m, n) for n in range(low, end)]
        slots += [m * x.width + n - low for n in range(low, end)]
        assert end - low <= x.width
    assert len(set(slots)) == len(slots)
    assert max(slots, default=-1) < x.slots
    from_keys = set()
    for n in range(x.n_tiles):
        first = max(n * TILE - x.offset - s.right, 0) // TILE
        end = min(x.m_tiles, max(n * TILE - x.offset + 2 * TILE - 1 + s.left, 0) // TILE)
        from_keys |= {(m, n) for m in range(first, end)}
    assert from_keys == set(found)
    return [(x.row_first // TILE + m, x.col_first // TILE + n) for m, n in found]


def overshoot(s: Shape) -> set[tuple[int, int]]:
    """Tiles past the last row's keys that a whole row tile would see; storing them is allowed, they hold zeros."""
    rows = tiles(s.len_q)
    if s.banded:
        return {(rows - 1, n) for n in range(tiles(s.len_kv))} - visible(s)
    return {(rows - 1, n) for n in range(tiles(s.len_kv) + 1)} - visible(s)


@settings(max_examples=150, deadline=None)
@given(shapes(), st.floats(0.3, 60))
def test_forward_blocks_cover_every_visible_tile_once_within_the_cap(s, mib):
    cap = int(mib * 2**20)
    try:
        blocks = forward_blocks(s, cap)
    except WorkspaceTooSmallError:
        return
    count = collections.Counter(pair for x in blocks for pair in covered(s, x))
    expected = {(h, m, n) for h in range(s.heads) for m, n in visible(s)}
    assert expected <= count.keys()
    assert {(m, n) for _, m, n in count.keys() - expected} <= overshoot(s)
    assert max(count.values()) == 1
    reference = s.heads * tiles(s.len_q) * TILE * 4
    stored = max(x.slots * x.heads for x in blocks) * (schedule.TILE_BYTES + TILE * schedule.FORWARD_ROW_BYTES)
    inverse = max(x.heads * x.m_tiles for x in blocks) * TILE * 4
    assert reference + stored + inverse <= cap


@settings(max_examples=200, deadline=None)
@given(shapes(), st.floats(0.6, 60), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1, 16, 132]))
def test_backward_blocks_finish_every_gradient_within_the_cap(s, mib, dq, dkv, only_dv, processors):
    if not (dq or dkv):
        return
    matrices = 1 if only_dv and not dq else 2
    cap, d_tiles = int(mib * 2**20), -(-s.head_dim // 256)
    try:
        blocks = backward_blocks(
            s, cap, matrices=matrices, dq=dq, dkv=dkv, d_tiles=d_tiles, processors=processors
        )  # fmt: skip
    except WorkspaceTooSmallError:
        return
    expected = {(h, m, n) for h in range(s.heads) for m, n in visible(s)}
    for wanted, chosen in ((dq, [x for x in blocks if x.dq]), (dkv, [x for x in blocks if x.dkv])):
        count = collections.Counter(pair for x in chosen for pair in covered(s, x))
        assert bool(chosen) == wanted
        if wanted:
            assert expected <= count.keys()
            assert max(count.values()) == 1
    for x in blocks:
        assert x.heads % x.heads_per_group == 0
        assert s.group % x.heads_per_group == 0 or not x.dkv or x.heads == x.heads_per_group
        if x.dq:
            assert x.all_keys, "dQ is never summed over blocks"
        if x.splits > 1:
            assert x.partial
    check_sums(s, [x for x in blocks if x.dkv])
    row_vectors = 2 * s.heads * tiles(s.len_q) * TILE * 4
    slot = matrices * schedule.TILE_BYTES + (TILE * schedule.BACKWARD_ROW_BYTES if matrices == 2 else 0)
    stored = max(x.slots * x.heads for x in blocks) * slot
    sums = [x.splits * (x.heads // x.heads_per_group) * x.key_tiles for x in blocks if x.partial]
    assert row_vectors + stored + 2 * max(sums, default=0) * TILE * s.head_dim * 4 <= cap


@settings(max_examples=200, deadline=None)
@given(shapes(), st.sampled_from([(True, True), (True, False), (False, True)]), st.sampled_from([1, 132]))
def test_the_stated_minimum_is_always_enough(s, wanted, processors):
    sizes = s.heads, s.len_q, s.len_kv, s.head_dim
    assert forward_blocks(s, minimum_bytes(*sizes, "forward"))
    dq, dkv = wanted
    for matrices in (1, 2):
        assert backward_blocks(
            s, minimum_bytes(*sizes, "backward"), matrices=matrices, dq=dq, dkv=dkv, d_tiles=2, processors=processors
        )  # fmt: skip


def check_sums(s: Shape, blocks: list[Block]) -> None:
    """Blocks that share float32 sums follow each other: the first covers all their keys, the last finishes them."""
    open_sum: tuple[int, int, int] | None = None
    for x in blocks:
        place = x.head_first // s.group, x.col_first, x.key_tiles
        if not x.partial:
            assert open_sum is None
            assert not x.previous
            assert x.last
            continue
        assert x.n_tiles <= x.key_tiles
        if x.previous:
            assert place == open_sum
        else:
            assert open_sum is None
            assert x.n_tiles == x.key_tiles, "the first block of a sum initialises all of it"
        open_sum = None if x.last else place
    assert open_sum is None


def device_tile(t: np.ndarray, m_tiles: int, n_tiles: int, offset: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """`geometry.tile_of` under a causal mask, in numpy with the same float32 square root."""
    first = (TILE - 1 + offset) // TILE
    width = group + first
    ramp = max((n_tiles - width + group - 1) // group, 0)
    ramp_tiles = group * (ramp * width + group * (ramp * (ramp - 1) // 2))
    half = np.float32(width - group * 0.5)
    g = ((np.sqrt(half * half + np.float32(2.0) * t.astype(np.float32)) - half) / np.float32(group)).astype(np.int64)
    g = np.where(group * (g * width + group * (g * (g - 1) // 2)) > t, g - 1, g)
    g = np.where(group * ((g + 1) * width + group * (g * (g + 1) // 2)) <= t, g + 1, g)
    rest = t - group * (g * width + group * (g * (g - 1) // 2))
    beyond = t >= ramp_tiles
    g = np.where(beyond, ramp + (t - ramp_tiles) // (group * n_tiles), g)
    rest = np.where(beyond, (t - ramp_tiles) % (group * n_tiles), rest)
    m, n = g * group + rest % group, rest // group
    inside = (m < m_tiles) & (n < np.minimum(n_tiles, m + first + 1))
    return m[inside], n[inside]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 900), st.integers(-TILE + 1, 40 * TILE), st.sampled_from([4, 8]))
def test_programs_find_every_visible_tile_once(m_tiles, extra, offset, group):
    first = (TILE - 1 + offset) // TILE + 1
    n_tiles = max(1, min(m_tiles - 1 + first, 1 + extra))
    total = grid_tiles(m_tiles, n_tiles, offset, True, group)
    m, n = device_tile(np.arange(total), m_tiles, n_tiles, offset, group)
    assert len(m) == slot_count(m_tiles, n_tiles, offset, True)
    assert len(np.unique(m * n_tiles + n)) == len(m)


def test_programs_find_their_tiles_in_the_longest_sequences():
    m_tiles = 8192  # a million rows
    total = grid_tiles(m_tiles, m_tiles, 0, True, 4)
    m, n = device_tile(np.arange(total), m_tiles, m_tiles, 0, 4)
    assert len(m) == slot_count(m_tiles, m_tiles, 0, True) == m_tiles * (m_tiles + 1) // 2
    assert len(np.unique(m * m_tiles + n)) == len(m)


def test_the_default_cap_holds_long_sequences():
    for length in (16_384, 65_536, 131_072, 262_144):
        s = Shape(32, 8, length, length, 512, True)
        assert forward_blocks(s, 512 << 20)
        assert backward_blocks(s, 512 << 20, matrices=2, dq=True, dkv=True, d_tiles=2, processors=132)


@pytest.mark.parametrize(
    ("s", "mib", "dq", "dkv"),
    [
        (Shape(15, 1, 3009, 3916, 512, True), 64, True, True),  # blocks of one and of two heads, split
        (Shape(116, 4, 2483, 5273, 1024, True), 512, True, True),
        (Shape(60, 4, 4056, 5628, 1024, True), 512, False, True),
        (Shape(48, 16, 1421, 2693, 512, True), 3697713 / 2**20, True, True),  # two passes, sums of a few columns
    ],
)
@pytest.mark.parametrize("processors", [132, 304])
def test_blocks_of_uneven_size_stay_within_the_cap_together(s, mib, dq, dkv, processors):
    test_backward_blocks_finish_every_gradient_within_the_cap.hypothesis.inner_test(
        s, mib, dq, dkv, False, processors
    )  # fmt: skip
