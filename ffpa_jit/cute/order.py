"""How many key heads are worked on side by side: the host's part of the order in which the clusters take their tiles.

The kernel goes through the heads in sections, and in each through the row tiles, those of its heads next to each other,
in causal calls the longest first (`forward_sm90.Forward._tile`). A turn is one tile for each cluster; every other turn
goes through the clusters in reverse (`_index`).

With one head at a time all clusters read the same keys at once, which costs up to 5 %; with more than about 16 the
second-level cache serves too many streams (64 of them: 6 %). In causal calls a section decides more than that: where it
ends in mid-turn, some clusters get its last and shortest tile and others the first and longest of the next one. 16
heads of 8192 rows, one at a time, took 1.6 times as long as side by side (bench/NOTES.md). So sections are tried here,
on the lengths of the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice, repeat

from ffpa_jit.cute.schedule import BLOCK, TILE

__all__ = ["balance", "section_of", "tile_lengths"]

_USUAL = 8
_TRIED = (_USUAL, 11, 12, 16, 4, 6, 22, 32, 64)
"""Heads a section, where there are so many, else all; they differ in how their tiles divide among the clusters."""

_ENOUGH = 0.985
_MANY = 16
_EACH_MORE = 0.0012  # what a head beyond _MANY costs
_TILE_COST = 1.5  # blocks of keys that would take as long as what a tile does beside its blocks
_TURNS = 128  # that are looked at: an estimate for what has more


def section_of(heads: int, group: int, len_q: int, len_kv: int, is_causal: bool, clusters: int) -> int:
    """The section for a call. `heads`: key heads in all; `group`: query heads of each; `clusters`: on the GPU."""
    usual = min(_USUAL, heads)
    if not is_causal or heads == 1:
        return usual
    lengths = tile_lengths(group, len_q, len_kv, _TURNS * clusters)
    if len(lengths) * heads <= clusters:
        return usual
    best, most = usual, 0.0
    for section in dict.fromkeys(min(each, heads) for each in _TRIED):
        score = balance(lengths, heads, section, clusters) * (1 - _EACH_MORE * max(0, section - _MANY))
        if score > most:
            best, most = section, score
        if most >= _ENOUGH:
            break
    return best


def tile_lengths(group: int, len_q: int, len_kv: int, most: int) -> list[float]:
    """How long the row tiles of a key head take in a causal call, in blocks of keys: `most` of them, longest first."""
    rows = len_q * group
    tiles = -(-rows // TILE)
    lasts = (min((tile + 1) * TILE, rows) - 1 for tile in reversed(range(max(0, tiles - most), tiles)))
    return [-(-max(last // group + 1 + len_kv - len_q, 1) // BLOCK) + _TILE_COST for last in lasts]


def balance(lengths: Sequence[float], heads: int, section: int, clusters: int) -> float:
    """Mean over greatest of what the clusters have to do."""
    widths = (min(section, heads - first) for first in range(0, heads, section))
    in_order = chain.from_iterable(repeat(length, width) for width in widths for length in lengths)
    tiles = list(islice(in_order, _TURNS * clusters))
    pair = 2 * clusters  # there and back
    work = [sum(tiles[each::pair]) + sum(tiles[pair - 1 - each :: pair]) for each in range(clusters)]
    return sum(work) / clusters / max(work)
