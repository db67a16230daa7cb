"""What an attention mask leaves of each tile, and of each line of tiles: so that empty ones cost next to nothing.

Padding, sliding windows, packed sequences and frames leave most rows a run of keys with nothing on either side. One
pass over the mask finds out, for every tile, whether anything in it is visible, and for every line of tiles where the
run begins and ends. The score phase then skips tiles, and the value phase, which knows ranges only, gets shorter ones.

The tables have one entry where the mask broadcasts: a padding mask [B, 1, 1, Nkv] has B lines of key tiles.
"""

import triton
import triton.language as tl

from .epilogue import MASK_BOOL, MASK_ROWS, decode_unspecialized, mask_values

EMPTY = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)
"""A boolean tile that hides nothing: it need not be read again."""


@triton.jit(do_not_specialize=["len_q", "len_kv", "heads", "m_tiles", "n_tiles"])
def classify(state_ptr, mods, len_q, len_kv, heads, m_tiles, n_tiles, MOD_FLAGS: tl.constexpr, TILE: tl.constexpr):
    """EMPTY, PARTIAL or FULL for every tile [mask batches * mask heads, m_tiles, n_tiles].

    No more of a tile is read than it takes to tell.
    """
    pid = tl.program_id(0)
    n_tile = pid % n_tiles
    m_tile = (pid // n_tiles) % m_tiles
    line = pid // n_tiles // m_tiles
    if MASK_ROWS & MOD_FLAGS:
        STEP: tl.constexpr = 32
    else:
        STEP: tl.constexpr = TILE
    cols = n_tile * TILE + tl.arange(0, TILE)
    some = pid * 0
    hidden = pid * 0
    first = pid * 0
    looking = pid >= 0
    while looking:
        rows = m_tile * TILE + first + tl.arange(0, STEP)
        values = mask_values(mods, line // heads, line % heads, rows, cols, len_q, len_kv, MOD_FLAGS)
        inside = (cols < len_kv)[None, :]
        if MASK_ROWS & MOD_FLAGS:
            inside = inside & (rows < len_q)[:, None]
        if MASK_BOOL & MOD_FLAGS:
            visible = values & inside
            hidden = max(hidden, tl.max(tl.max((inside & (visible == 0)).to(tl.int32), 1), 0))
        else:
            visible = (values != float("-inf")) & inside  # a NaN counts as visible: it must reach the output
            hidden = hidden | 1  # what an additive mask adds is never nothing
        some = max(some, tl.max(tl.max(visible.to(tl.int32), 1), 0))
        first += STEP
        looking = (first < TILE) & ((some == 0) | (hidden == 0))
    state = tl.where(some == 0, EMPTY, tl.where(hidden == 0, FULL, PARTIAL))
    tl.store(state_ptr + pid, state.to(tl.int8))


@triton.jit(do_not_specialize=["m_tiles", "n_tiles", "row_lines", "m_total"])
def find_spans(
    state_ptr, row_spans_ptr, key_spans_ptr, m_tiles, n_tiles, row_lines, m_total,
    MOD_FLAGS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The run of live tiles of every line: ``row_spans`` [lines, m_tiles, 2] over key tiles, ``key_spans``
    [lines, n_tiles, 2] over row tiles (of the whole problem, ``m_total``)."""
    pid = tl.program_id(0)
    of_rows = pid < row_lines
    line = tl.where(of_rows, pid, pid - row_lines)
    count = tl.where(of_rows, n_tiles, m_tiles)
    step = tl.where(of_rows, 1, n_tiles)
    start = tl.where(of_rows, line.to(tl.int64) * n_tiles,
                     (line // n_tiles).to(tl.int64) * m_tiles * n_tiles + line % n_tiles)  # fmt: skip
    low = count
    end = count * 0
    for t in tl.range(0, count, CHUNK):
        at = t + tl.arange(0, CHUNK)
        live = tl.load(state_ptr + start + at.to(tl.int64) * step, mask=at < count, other=0) > 0
        low = min(low, tl.min(tl.where(live, at, count), 0))
        end = max(end, tl.max(tl.where(live, at + 1, 0), 0))
    if of_rows:
        tl.store(row_spans_ptr + line.to(tl.int64) * 2, low)
        tl.store(row_spans_ptr + line.to(tl.int64) * 2 + 1, end)
    else:
        if (MASK_ROWS & MOD_FLAGS) == 0:
            low = tl.where(end > 0, 0, m_total)
            end = tl.where(end > 0, m_total, 0)
        tl.store(key_spans_ptr + line.to(tl.int64) * 2, low)
        tl.store(key_spans_ptr + line.to(tl.int64) * 2 + 1, end)


@triton.jit
def row_line(block_mask, b, h, m_tile, MOD_FLAGS: tl.constexpr):
    """Index of a row tile (of the whole problem) in ``row_spans``, and in the states of its key tiles."""
    line = b * decode_unspecialized(block_mask.lines_b) + h * decode_unspecialized(block_mask.lines_h)
    if MASK_ROWS & MOD_FLAGS:
        line = line * decode_unspecialized(block_mask.m_tiles) + m_tile
    return line


@triton.jit
def key_line(block_mask, b, h, n_tile):
    """Index of a key tile (of the whole problem) in ``key_spans``."""
    line = b * decode_unspecialized(block_mask.lines_b) + h * decode_unspecialized(block_mask.lines_h)
    return line * decode_unspecialized(block_mask.n_tiles) + n_tile


@triton.jit
def state_of(block_mask, b, h, m_tile, n_tile, MOD_FLAGS: tl.constexpr):
    """EMPTY, PARTIAL or FULL."""
    line = row_line(block_mask, b, h, m_tile, MOD_FLAGS)
    return tl.load(block_mask.states + line.to(tl.int64) * decode_unspecialized(block_mask.n_tiles) + n_tile)


@triton.jit
def in_row_span(block_mask, b, h, m_tile, n_tile, MOD_FLAGS: tl.constexpr):
    """Whether a tile lies within its row's run of live tiles: then the value phase reads it, empty or not."""
    at = block_mask.row_spans + row_line(block_mask, b, h, m_tile, MOD_FLAGS).to(tl.int64) * 2
    return (n_tile >= tl.load(at)) & (n_tile < tl.load(at + 1))


@triton.jit
def in_key_span(block_mask, b, h, m_tile, n_tile):
    """The same for its column of row tiles."""
    at = block_mask.key_spans + key_line(block_mask, b, h, n_tile).to(tl.int64) * 2
    return (m_tile >= tl.load(at)) & (m_tile < tl.load(at + 1))
