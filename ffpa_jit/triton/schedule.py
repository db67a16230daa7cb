"""How a call is cut into blocks that fit the workspace. Pure arithmetic: no torch, no Triton.

A *block* (see ``geometry``) is what one pair of score and value launches handles. The forward cuts over heads and,
where one head does not fit, over query rows: no sum ever crosses a block. The backward has contractions in both
directions, so it prefers, in this order,

``whole``   blocks of whole groups: every gradient is finished inside its block;
``rows``    the heads or query rows of a group one after another: dQ is finished in its block, dK and dV are summed
            in float32 buffers over the group's blocks, in order;
``twice``   two passes, row chunks for dQ, then key chunks for dK and dV, each with its own score phase: seven GEMMs
            instead of five, for sequences whose float32 sums would take the workspace themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

TILE = 128
"""Edge of a workspace tile: 32 KiB of fp16/bf16, one TMA box on either side of the value phase."""


def few_queries(len_q: int, head_dim: int) -> bool:
    """Whether the kernels for few queries are faster than two phases.

    They read keys and values once for every 64 rows of a group (32 above D=512); the two-phase kernels compute 128 rows
    of each head whatever there are. On an H200 the two take the same time at about 64 queries (32).
    """
    return 0 < len_q <= (64 if head_dim <= 512 else 32)


def one_launch_serves(heads: int, len_q: int, len_kv: int, head_dim: int, processors: int) -> bool:
    """Whether the fused forward is faster than the four launches of two phases: a tile sees so few keys that it is done
    before those are, and all run at a time. On an H200, heads of 128 x 128 at D=512 take 13 us instead of 22, of 256 x
    256 22 instead of 24, of 512 x 512 40 instead of 28."""
    slices = -(-head_dim // 256)
    return len_kv * head_dim <= 256 * 512 and heads * tiles(len_q) * slices <= processors


LEAST_KEYS = 256
"""Of few queries a program takes at least so many keys, or its start and its share of the combine cost more than it
reads."""

FORWARD_ROW_BYTES = 3 * 4
"""Per row of a tile: its float32 reference, sum and stored sum."""

BACKWARD_ROW_BYTES = 2 * 4
"""Per row of a tile: the sum of dS and of its magnitudes."""

TILE_BYTES = TILE * TILE * 2


def tiles(n: int) -> int:
    return -(-n // TILE)


def first_visible(offset: int, n_tiles: int, causal: bool) -> int:
    """Tiles that row tile 0 sees, before clipping to ``n_tiles``."""
    return (TILE - 1 + offset) // TILE + 1 if causal else n_tiles


def slot_count(m_tiles: int, n_tiles: int, offset: int, causal: bool, width: int = 0) -> int:
    """Workspace tiles of one head; ``width``: of a row tile in a band."""
    if width:
        return m_tiles * width
    if not causal:
        return m_tiles * n_tiles
    first = first_visible(offset, n_tiles, causal)
    ramp = min(m_tiles, max(n_tiles - first, 0))
    return ramp * first + ramp * (ramp - 1) // 2 + (m_tiles - ramp) * n_tiles


def grid_tiles(m_tiles: int, n_tiles: int, offset: int, causal: bool, group_rows: int, width: int = 0) -> int:
    """Programs per head of a score kernel (a few of them find no tile and return); ``group_rows``: see ``tile_of``."""
    if width:
        return m_tiles * width
    if not causal:
        return m_tiles * n_tiles
    groups = -(-m_tiles // group_rows)
    width = group_rows - 1 + first_visible(offset, n_tiles, causal)
    ramp = min(groups, max(-(-(n_tiles - width) // group_rows), 0))
    ramp_tiles = group_rows * (ramp * width + group_rows * ramp * (ramp - 1) // 2)
    return ramp_tiles + (groups - ramp) * group_rows * n_tiles


@dataclass(frozen=True)
class Shape:
    """The sizes of one call. ``heads`` counts batch x query heads; ``group`` query heads share a key head.

    ``causal``: rows see what is not behind their diagonal. ``left``, ``right``: given for a band around the diagonal,
    how many keys it has on either side; ``causal`` is False then.
    """

    heads: int
    group: int
    len_q: int
    len_kv: int
    head_dim: int
    causal: bool
    left: int | None = None
    right: int | None = None

    @property
    def offset(self) -> int:
        return self.len_kv - self.len_q

    @property
    def banded(self) -> bool:
        return self.left is not None and self.right is not None

    def width(self, n_tiles: int) -> int:
        """The most key tiles, of ``n_tiles``, that a row tile of a band sees; 0 where there is no band."""
        if self.left is None or self.right is None:
            return 0
        return min(n_tiles, -(-(self.left + self.right + TILE - 1) // TILE) + 1)


@dataclass(frozen=True)
class Block:
    """Heads ``[head_first, head_first + heads)``, rows from ``row_first``, keys from ``col_first``, in tiles."""

    head_first: int
    heads: int
    row_first: int
    m_tiles: int
    col_first: int
    n_tiles: int
    offset: int
    slots: int
    width: int = 0
    """Of a band: slots of a row tile."""
    heads_per_group: int = 1
    dq: bool = True
    dkv: bool = True
    partial: bool = False
    """dK and dV go to float32 buffers (because they are split, or because another block adds to them)."""
    previous: bool = False
    """The float32 buffers already hold the sum of earlier blocks."""
    last: bool = True
    """After this block the key side is complete."""
    splits: int = 1
    key_tiles: int = 0
    """Key tiles of the float32 sums this block adds to (its own may be fewer under a causal mask)."""
    all_keys: bool = True
    """Its rows see no key outside the block, so row sums are complete."""


class WorkspaceTooSmallError(ValueError):
    """The cap does not hold a single row of tiles."""

    def __init__(self, needed: int, left: int) -> None:
        super().__init__(
            f"a row of score tiles needs {needed / 2**20:.4g} MiB of workspace, and the row vectors leave "
            f"{max(left, 0) / 2**20:.4g} MiB of the cap: raise FFPA_JIT_WORKSPACE_MB"
        )


def minimum_bytes(heads: int, len_q: int, len_kv: int, head_dim: int, direction: str) -> int:
    """A cap in bytes that is always enough: the row vectors, one row of tiles and, backward, a column of float32 sums.

    Plain arithmetic, so the sizes may be symbolic.
    """
    m_rows, n_total = tiles(len_q) * TILE, tiles(len_kv)
    if direction == "forward":
        return heads * m_rows * 4 + m_rows * 4 + n_total * (TILE_BYTES + TILE * FORWARD_ROW_BYTES)
    pair = 2 * TILE_BYTES + TILE * BACKWARD_ROW_BYTES
    return 2 * heads * m_rows * 4 + n_total * pair + 2 * TILE * head_dim * 4


def _block(s: Shape, head_first: int, heads: int, row_tile: int, m_tiles: int, col_tile: int, n_tiles: int) -> Block:
    """A block in tile coordinates; under a causal mask what it cannot see is cut off first."""
    row_first, col_first = row_tile * TILE, col_tile * TILE
    offset = s.offset + row_first - col_first
    if s.causal:
        if offset <= -TILE:  # the first row tiles end before the first key
            skip = -offset // TILE
            row_first, m_tiles, offset = row_first + skip * TILE, m_tiles - skip, offset + skip * TILE
        last_row = min(row_first + m_tiles * TILE, s.len_q) - 1
        n_tiles = min(n_tiles, tiles(last_row + 1 + s.offset) - col_tile)
    if s.left is not None and s.right is not None and n_tiles < tiles(s.len_kv):
        # Of a key chunk, the rows that see it; at least one, so that somebody writes its gradients.
        end = min(row_tile + m_tiles, max(col_first + n_tiles * TILE - s.offset + TILE - 1 + s.left, 0) // TILE)
        start = max(row_tile, min(max(col_first - s.offset - s.right, 0) // TILE, row_tile + m_tiles - 1))
        row_first, m_tiles = start * TILE, max(end - start, 1)
        offset = s.offset + row_first - col_first
    return Block(
        head_first,
        heads,
        row_first,
        m_tiles,
        col_first,
        n_tiles,
        offset,
        slot_count(m_tiles, n_tiles, offset, s.causal, s.width(n_tiles)),
        s.width(n_tiles),
    )


def _even(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut ``total`` into the fewest parts of at most ``most``, all nearly equal: (start, size)."""
    parts = -(-total // most)
    for i in range(parts):
        start = total * i // parts
        yield start, total * (i + 1) // parts - start


def _row_chunks(s: Shape, head: int, slot_limit: int) -> list[Block]:
    """One head in row chunks of at most ``slot_limit`` tiles, about equally many in each."""
    return [replace(block, head_first=head) for block in _first_head_row_chunks(s, slot_limit)]


@lru_cache(maxsize=64)
def _first_head_row_chunks(s: Shape, slot_limit: int) -> tuple[Block, ...]:
    m_total, n_total = tiles(s.len_q), tiles(s.len_kv)
    whole = _block(s, 0, 1, 0, m_total, 0, n_total).slots
    target = -(-whole // -(-whole // slot_limit))
    start, chunks = 0, []
    while start < m_total:
        count = 1
        while start + count < m_total and _block(s, 0, 1, start, count + 1, 0, n_total).slots <= target:
            count += 1
        block = _block(s, 0, 1, start, count, 0, n_total)
        if block.slots > slot_limit:
            raise WorkspaceTooSmallError(block.slots * TILE_BYTES, slot_limit * TILE_BYTES)
        chunks.append(block)
        start += count
    return tuple(chunks)


@lru_cache(maxsize=256)
def forward_blocks(s: Shape, cap: int) -> tuple[Block, ...]:
    """Blocks of the forward within ``cap`` bytes.

    Raises:
        WorkspaceTooSmallError: one row of tiles over all keys does not fit.
    """
    m_total = tiles(s.len_q)
    cap -= s.heads * m_total * TILE * 4  # the row references live through the whole call
    slot_bytes = TILE_BYTES + TILE * FORWARD_ROW_BYTES
    head_bytes = _block(s, 0, 1, 0, m_total, 0, tiles(s.len_kv)).slots * slot_bytes + m_total * TILE * 4
    if head_bytes <= cap:
        cut = _even(s.heads, cap // head_bytes)
        return tuple(_block(s, start, n, 0, m_total, 0, tiles(s.len_kv)) for start, n in cut)
    limit = (cap - m_total * TILE * 4) // slot_bytes
    row = s.width(tiles(s.len_kv)) or tiles(s.len_kv)
    if limit < row:
        raise WorkspaceTooSmallError(row * slot_bytes, cap)
    return tuple(block for head in range(s.heads) for block in _row_chunks(s, head, limit))


LEAST_SPLIT = 6
"""Tiles of a contraction that are worth being split: parts take three launches more, to be written and added up."""


def _splits(s: Shape, block: Block, d_tiles: int, processors: int) -> int:
    """Into how many parts to cut the key side's contraction so that no program outlasts the rest of the launch."""
    half = 0.5 if s.causal else 1.0
    key_length = block.heads_per_group * block.m_tiles
    if key_length < LEAST_SPLIT:
        return 1
    key_programs = block.heads // block.heads_per_group * block.n_tiles * d_tiles * 2
    query_programs = block.heads * block.m_tiles * d_tiles if block.dq else 0
    work = (key_programs * key_length + query_programs * block.n_tiles) * half
    return max(1, min(8, key_length, round(key_length / (0.6 * work / processors + 1.0))))


@lru_cache(maxsize=256)
def backward_blocks(
    s: Shape, cap: int, *, matrices: int, dq: bool, dkv: bool, d_tiles: int, processors: int
) -> tuple[Block, ...]:
    """Blocks of the backward within ``cap`` bytes; ``matrices`` is 2 when both P and dS are stored, else 1.

    Raises:
        WorkspaceTooSmallError: not even one row (or column) of tiles fits.
    """
    m_total, n_total = tiles(s.len_q), tiles(s.len_kv)
    cap -= 2 * s.heads * m_total * TILE * 4  # lse and delta live through the whole call
    slot_bytes = matrices * TILE_BYTES + (TILE * BACKWARD_ROW_BYTES if matrices == 2 else 0)
    sums = 2 * n_total * TILE * s.head_dim * 4  # float32 dK and dV of one key head
    groups = s.heads // s.group

    head_slots = _block(s, 0, 1, 0, m_total, 0, n_total).slots
    group_bytes = head_slots * s.group * slot_bytes
    if group_bytes <= cap:
        cut = list(_even(groups, cap // group_bytes))
        blocks = [
            replace(
                _block(s, start * s.group, n * s.group, 0, m_total, 0, n_total),
                heads_per_group=s.group, dq=dq, dkv=dkv, key_tiles=n_total,
            )
            for start, n in cut
        ]  # fmt: skip
        if dkv:
            # One number of splits for all blocks, from the largest: it also sets the size of P, dS and the sums.
            largest = max(blocks, key=lambda x: x.heads)
            most = max(n for _, n in cut)
            room = (cap - most * group_bytes) // (most * sums)
            splits = min(_splits(s, largest, d_tiles, processors), max(room, 1))
            blocks = [replace(x, splits=splits, partial=splits > 1) for x in blocks]
        return tuple(blocks)

    if not dkv:
        limit = cap // slot_bytes
        if limit < n_total:
            raise WorkspaceTooSmallError(n_total * slot_bytes, cap)
        return tuple(replace(b, dkv=False) for h in range(s.heads) for b in _row_chunks(s, h, limit))

    limit = max(cap - sums, 0) // slot_bytes
    if limit >= min(head_slots, 8 * n_total):
        return tuple(b for g in range(groups) for b in _summed_blocks(s, g * s.group, limit, head_slots, dq))
    return tuple(_two_passes(s, cap, slot_bytes, dq))


def _summed_blocks(s: Shape, head_first: int, limit: int, head_slots: int, dq: bool) -> list[Block]:
    """One group in blocks of heads or rows whose dK and dV add up in float32."""
    m_total, n_total = tiles(s.len_q), tiles(s.len_kv)
    if limit >= head_slots:
        cut = [
            replace(_block(s, head_first + start, n, 0, m_total, 0, n_total), heads_per_group=n)
            for start, n in _even(s.group, limit // head_slots)
        ]
    else:
        # Later rows see more keys: they go first, so that the first block of a key tile is also its initialiser.
        cut = [b for h in range(s.group) for b in reversed(_row_chunks(s, head_first + h, limit))]
    return [
        replace(b, dq=dq, partial=True, key_tiles=n_total, previous=i > 0, last=i == len(cut) - 1)
        for i, b in enumerate(cut)
    ]


def _two_passes(s: Shape, cap: int, slot_bytes: int, dq: bool) -> list[Block]:
    """Row chunks for dQ, which see whole rows and so correct ``delta``, then key chunks for dK and dV."""
    m_total, n_total = tiles(s.len_q), tiles(s.len_kv)
    column = 2 * TILE * s.head_dim * 4  # float32 sums of one key tile
    per_column = s.group * m_total * slot_bytes
    width = 0  # key tiles that have float32 sums at a time, which live through both passes
    if per_column > cap:
        width = 4
        while width > 1 and max(8 * width, n_total) * slot_bytes + width * column > cap:
            width //= 2
        if slot_bytes + column > cap:
            raise WorkspaceTooSmallError(slot_bytes + column, cap)
    blocks = []
    if dq:
        limit = (cap - width * column) // slot_bytes
        row = s.width(n_total) or n_total
        if limit < row:
            raise WorkspaceTooSmallError(row * slot_bytes + width * column, cap)
        blocks += [replace(b, dkv=False) for h in range(s.heads) for b in _row_chunks(s, h, limit)]
    for g in range(s.heads // s.group):
        head_first = g * s.group
        if not width:
            for start, n in _even(n_total, cap // per_column):
                b = _block(s, head_first, s.group, 0, m_total, start, n)
                blocks.append(replace(b, heads_per_group=s.group, dq=False, all_keys=n == n_total))
        else:
            height = (cap - width * column) // (width * slot_bytes)
            for start, n in _even(n_total, width):
                rows = _block(s, head_first, 1, 0, m_total, start, n)
                first = rows.row_first // TILE
                parts = [
                    replace(
                        _block(s, head_first + h, 1, first + r, c, start, n),
                        dq=False,
                        partial=True,
                        key_tiles=n,
                        all_keys=n == n_total,
                    )
                    for h in range(s.group)
                    for r, c in reversed(list(_even(m_total - first, height)))
                ]
                last = len(parts) - 1
                blocks += [replace(b, previous=i > 0, last=i == last) for i, b in enumerate(parts)]
    return blocks
