"""Device side of the tile arithmetic: which program computes a tile, and which slot of the workspace holds it.

One launch handles a *block*: some heads, the query rows ``[row_first, row_first + rows)`` and the keys
``[col_first, col_first + cols)``, cut into ``TILE x TILE`` tiles. In block coordinates row ``r`` stands at column
``r + offset``, and ``MASK_MODE`` says what it sees::

    UNMASKED      every column
    CAUSAL    c <= r + offset
    LOCAL      r + offset - left <= c <= r + offset + right

A causal block always starts at the first row tile that sees a key, so there ``offset > -TILE``.

Only visible tiles are stored. Slots are numbered row by row: under a causal mask without gaps, in a band ``width`` to a
row tile. ``schedule`` counts the same tiles and slots on the host: a jitted function cannot be called from Python.

An attention mask may leave less of a row than its shape does. ``spans`` then holds, for every line of mask tiles, the
range of tiles with anything visible (see ``mask_tiles``); outside of it nothing is stored or read.
"""

import triton
import triton.language as tl

UNMASKED = tl.constexpr(0)
CAUSAL = tl.constexpr(1)
LOCAL = tl.constexpr(2)


@triton.jit
def row_span(m_tile, block, MASK_MODE: tl.constexpr, TILE: tl.constexpr):
    """The key tiles ``[low, end)`` that a row tile sees."""
    low = m_tile * 0
    end = m_tile * 0 + block.n_tiles
    if MASK_MODE == CAUSAL:
        end = min(block.n_tiles, m_tile + (TILE - 1 + block.offset) // TILE + 1)
    if MASK_MODE == LOCAL:
        low = max(m_tile * TILE + block.offset - block.left, 0) // TILE
        end = min(block.n_tiles, max(m_tile * TILE + 2 * TILE - 1 + block.offset + block.right, 0) // TILE)
    return low, end


@triton.jit
def key_span(n_tile, block, MASK_MODE: tl.constexpr, TILE: tl.constexpr):
    """The row tiles ``[first, end)`` that see a key tile."""
    first = n_tile * 0
    end = n_tile * 0 + block.m_tiles
    if MASK_MODE == CAUSAL:
        first = max(n_tile - (TILE - 1 + block.offset) // TILE, 0)
    if MASK_MODE == LOCAL:
        first = max(n_tile * TILE - block.offset - block.right, 0) // TILE
        # ``left`` may be as large as an int32 allows to add one tile to.
        end = min(block.m_tiles, max(n_tile * TILE - block.offset + 2 * TILE - 1 + block.left, 0) // TILE)
    return first, end


@triton.jit
def slot_of(m_tile, n_tile, block, MASK_MODE: tl.constexpr, TILE: tl.constexpr):
    """Workspace slot of a visible tile, counted from the head's first slot."""
    slot = m_tile * block.n_tiles + n_tile
    if MASK_MODE == CAUSAL:
        first = (TILE - 1 + block.offset) // TILE + 1
        ramp = min(m_tile, max(block.n_tiles - first, 0))
        slot = ramp * first + ramp * (ramp - 1) // 2 + (m_tile - ramp) * block.n_tiles + n_tile
    if MASK_MODE == LOCAL:
        low, _ = row_span(m_tile, block, MASK_MODE, TILE)
        slot = m_tile * block.width + n_tile - low
    return slot


@triton.jit
def tile_of(t, block, MASK_MODE: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """The (row tile, key tile) of a score program; a row tile of -1 means there is none.

    Row tiles are taken ``GROUP_ROWS`` at a time and walk the columns together, so that their keys come from L2. Under
    a causal mask the groups grow by ``GROUP_ROWS`` columns each until they span all columns, so a program finds its
    group by inverting a quadratic; float32 is off by at most one there, which the two comparisons rescale_tiles.
    """
    if MASK_MODE == CAUSAL:
        span = GROUP_ROWS + (TILE - 1 + block.offset) // TILE
        ramp = max((block.n_tiles - span + GROUP_ROWS - 1) // GROUP_ROWS, 0)
        ramp_tiles = GROUP_ROWS * (ramp * span + GROUP_ROWS * (ramp * (ramp - 1) // 2))
        if t < ramp_tiles:
            half = span - GROUP_ROWS * 0.5
            g = ((tl.sqrt(half * half + 2.0 * t) - half) / GROUP_ROWS).to(tl.int32)
            g = tl.where(GROUP_ROWS * (g * span + GROUP_ROWS * (g * (g - 1) // 2)) > t, g - 1, g)
            g = tl.where(GROUP_ROWS * ((g + 1) * span + GROUP_ROWS * (g * (g + 1) // 2)) <= t, g + 1, g)
            rest = t - GROUP_ROWS * (g * span + GROUP_ROWS * (g * (g - 1) // 2))
        else:
            g = ramp + (t - ramp_tiles) // (GROUP_ROWS * block.n_tiles)
            rest = (t - ramp_tiles) % (GROUP_ROWS * block.n_tiles)
        m_tile = g * GROUP_ROWS + rest % GROUP_ROWS
        n_tile = rest // GROUP_ROWS
        seen = min(block.n_tiles, m_tile + (TILE - 1 + block.offset) // TILE + 1)
        m_tile = tl.where((m_tile < block.m_tiles) & (n_tile < seen), m_tile, -1)
    elif MASK_MODE == LOCAL:
        m_tile = t // block.width
        low, end = row_span(m_tile, block, MASK_MODE, TILE)
        n_tile = low + t % block.width
        m_tile = tl.where(n_tile < end, m_tile, -1)
    else:
        g = t // (GROUP_ROWS * block.n_tiles)
        rest = t % (GROUP_ROWS * block.n_tiles)
        here = min(block.m_tiles - g * GROUP_ROWS, GROUP_ROWS)
        m_tile = g * GROUP_ROWS + rest % here
        n_tile = rest // here
    return m_tile, n_tile


@triton.jit
def narrowed(low, end, spans, line, first):
    """``[low, end)`` cut to what ``spans[line]`` says is live; ``first`` is where the block's tiles begin."""
    live = spans + line.to(tl.int64) * 2
    return max(low, tl.load(live) - first), min(end, tl.load(live + 1) - first)
