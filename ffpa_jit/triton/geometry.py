"""Device side of the tile arithmetic: which program computes a tile, and which slot of the workspace holds it.

One launch handles a *block*: some heads, the query rows ``[row_first, row_first + rows)`` and the keys
``[col_first, col_first + cols)``, cut into ``TILE x TILE`` tiles. In block coordinates a causal row ``r`` sees the
columns ``c <= r + offset``. A block always starts at the first row tile that sees a key, so ``offset > -TILE``.

Only visible tiles are stored. Row tile ``m`` of ``n_tiles`` columns sees ``min(n_tiles, m + first)`` tiles, where
``first`` is what row tile 0 sees; slots are numbered row by row without gaps. ``schedule`` counts the same tiles and
slots on the host: a jitted function cannot be called from Python.
"""

import triton
import triton.language as tl


@triton.jit
def visible_tiles_of(m_tile, n_tiles, offset, CAUSAL: tl.constexpr, TILE: tl.constexpr):
    """How many key tiles a row tile sees."""
    visible = n_tiles
    if CAUSAL:
        visible = min(n_tiles, m_tile + (TILE - 1 + offset) // TILE + 1)
    return visible


@triton.jit
def first_row_tile_of(n_tile, offset, CAUSAL: tl.constexpr, TILE: tl.constexpr):
    """The first row tile that sees a key tile."""
    first = n_tile * 0
    if CAUSAL:
        first = max(n_tile - (TILE - 1 + offset) // TILE, 0)
    return first


@triton.jit
def slot_of(m_tile, n_tile, n_tiles, offset, CAUSAL: tl.constexpr, TILE: tl.constexpr):
    """Workspace slot of a visible tile, counted from the head's first slot."""
    slot = m_tile * n_tiles + n_tile
    if CAUSAL:
        first = (TILE - 1 + offset) // TILE + 1
        ramp = min(m_tile, max(n_tiles - first, 0))
        slot = ramp * first + ramp * (ramp - 1) // 2 + (m_tile - ramp) * n_tiles + n_tile
    return slot


@triton.jit
def tile_of(t, m_tiles, n_tiles, offset, CAUSAL: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """The (row tile, key tile) of a score program; a row tile of -1 means there is none.

    Row tiles are taken ``GROUP_ROWS`` at a time and walk the columns together, so that their keys come from L2. Under
    a causal mask the groups grow by ``GROUP_ROWS`` columns each until they span all columns, so a program finds its
    group by inverting a quadratic; float32 is off by at most one there, which the two comparisons repair.
    """
    if CAUSAL:
        width = GROUP_ROWS + (TILE - 1 + offset) // TILE
        ramp = max((n_tiles - width + GROUP_ROWS - 1) // GROUP_ROWS, 0)
        ramp_tiles = GROUP_ROWS * (ramp * width + GROUP_ROWS * (ramp * (ramp - 1) // 2))
        if t < ramp_tiles:
            half = width - GROUP_ROWS * 0.5
            g = ((tl.sqrt(half * half + 2.0 * t) - half) / GROUP_ROWS).to(tl.int32)
            g = tl.where(GROUP_ROWS * (g * width + GROUP_ROWS * (g * (g - 1) // 2)) > t, g - 1, g)
            g = tl.where(GROUP_ROWS * ((g + 1) * width + GROUP_ROWS * (g * (g + 1) // 2)) <= t, g + 1, g)
            rest = t - GROUP_ROWS * (g * width + GROUP_ROWS * (g * (g - 1) // 2))
        else:
            g = ramp + (t - ramp_tiles) // (GROUP_ROWS * n_tiles)
            rest = (t - ramp_tiles) % (GROUP_ROWS * n_tiles)
        m_tile = g * GROUP_ROWS + rest % GROUP_ROWS
        n_tile = rest // GROUP_ROWS
        seen = min(n_tiles, m_tile + (TILE - 1 + offset) // TILE + 1)
        m_tile = tl.where((m_tile < m_tiles) & (n_tile < seen), m_tile, -1)
    else:
        g = t // (GROUP_ROWS * n_tiles)
        rest = t % (GROUP_ROWS * n_tiles)
        here = min(m_tiles - g * GROUP_ROWS, GROUP_ROWS)
        m_tile = g * GROUP_ROWS + rest % here
        n_tile = rest // here
    return m_tile, n_tile
