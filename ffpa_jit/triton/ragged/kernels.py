# mypy: ignore-errors
"""The score phase of packed sequences, and the kernels of rows; ``value`` has the value phase. The arithmetic is that
of the dense kernels, where the numerics are explained; what differs is where a program finds its tile: in ``tables``.

``tables`` are the tables (``params.Tables``), ``c`` is the chunk. A launch handles ``sets`` sets of ``heads``
query heads from ``head_first`` on: ``heads`` is 1, or a whole group where dK and dV add up over it. The slot of row
tile ``m``, key tile ``n`` and head ``j`` of a set is ``(first of the set + slot of (m, n)) * heads + j``.

What lies beyond a segment belongs to another sequence, or to nobody, and may be NaN. Scores there are cut to -inf by
each row's range, and dS is 0 where P is; what is left to do is in ``value``.

Row maxima need no extra products here: sequences are short, so the tile that they are taken from is computed first
and kept (``SAMPLE``).
"""

import triton
import triton.language as tl

from ffpa_jit.triton.epilogue import DROPOUT, SOFTCAP, capped, finish_lse, in_range, kept, probability, slope
from ffpa_jit.triton.operands import load_2d, store_tile
from ffpa_jit.triton.params import Chunk
from ffpa_jit.triton.ragged.tables import (
    C_ROW_TILE,
    C_SLOT,
    C_TASK,
    CHUNK_RECORD,
    INVALID,
    R_COUNT,
    R_FULL_FROM,
    R_FULL_TO,
    R_KEY,
    R_KEY_END,
    R_LOW,
    R_ROW,
    R_ROW_END,
    R_SAMPLE,
    R_SLOT,
    RECORD,
    S_KEY,
    S_ROW,
    SEGMENTS,
    UNSAFE,
)
from ffpa_jit.triton.rows import clear_single_keys, merge, rescale_tiles, row_residual, tolerance
from ffpa_jit.triton.score import from_storage, score_tile, to_storage

_COUNTS = ["mods", "head_first", "heads", "sets", "group", "padded", "c", "len_q"]


@triton.jit
def chunk_of(tables, c):
    """What the tables say of chunk ``c``."""
    here = tables.chunk + c * CHUNK_RECORD
    tile, slot = tl.load(here + C_ROW_TILE), tl.load(here + C_SLOT)
    row_tiles = tl.load(here + CHUNK_RECORD + C_ROW_TILE) - tile
    return Chunk(tile, row_tiles, slot, tl.load(here + CHUNK_RECORD + C_SLOT) - slot)


@triton.jit
def nan_if_invalid(tables, x):
    """``x``, or NaN if ``cu_seqlens`` are invalid."""
    return tl.where(tl.load(tables.head + INVALID) != 0, float("nan"), x)


@triton.jit
def _limits(tables, row, row_end, TILE: tl.constexpr):
    """Keys that each row of a tile sees, [TILE, 1] each, and which rows exist."""
    rows = row + tl.arange(0, TILE)
    inside = rows < row_end
    low, high = tl.load(tables.low + rows, mask=inside, other=0), tl.load(tables.high + rows, mask=inside, other=0)
    return low[:, None], high[:, None], inside


@triton.jit
def _scores(s, tables, record, mods, row, row_end, col, MOD_FLAGS: tl.constexpr, TILE: tl.constexpr):
    """Softcap, and -inf outside of each row's range; a tile that all of 128 rows see is spared the comparisons."""
    s = capped(s, mods, MOD_FLAGS)
    if (col < tl.load(record + R_FULL_FROM)) | (col + TILE > tl.load(record + R_FULL_TO)):
        low, high, _ = _limits(tables, row, row_end, TILE)
        s = in_range(s, col + tl.arange(0, TILE), low, high)
    return s


@triton.jit(do_not_specialize=_COUNTS)
def score_forward(
    q, k, p_tiles, tables, row_max_ptr, tile_max_ptr, tile_sum_ptr, tile_rounded_sum_ptr, mods, scale_log2,
    head_first, sets, group, padded, c, tasks,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MOD_FLAGS: tl.constexpr, SAMPLE: tl.constexpr, SHIFT: tl.constexpr,
    HEADROOM: tl.constexpr, PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """P tiles of a chunk; for each row of a tile its max, its sum, and the sum of the rounded P.

    With SAMPLE a program has a row tile, computes its sample tile and writes the row maxima, [Hq, padded]; without, it
    has a task, and those that are sample tiles are done.
    """
    pid = tl.program_id(0)
    chunk = chunk_of(tables, c)
    programs = chunk.row_tiles
    if not SAMPLE:
        here = tables.chunk + c * CHUNK_RECORD + C_TASK
        programs = tl.load(here + CHUNK_RECORD) - tl.load(here)
    if pid >= programs * sets:
        return
    z = pid // programs
    i = pid % programs
    if SAMPLE:
        tile = chunk.row_tile + i
        record = tables.row + tile * RECORD
        n = tl.load(record + R_SAMPLE)
        skip = tl.load(record + R_COUNT) == 0
    else:
        tile = tl.load(tables.task + i)
        record = tables.row + tile * RECORD
        n = tl.load(tables.task + tasks + i)
        skip = (n < 0) | (n == tl.load(record + R_SAMPLE))
    if skip:
        return
    h = head_first + z
    row, row_end = tl.load(record + R_ROW), tl.load(record + R_ROW_END)
    key, key_end = tl.load(record + R_KEY), tl.load(record + R_KEY_END)
    col = n * TILE
    s = score_tile(tl.zeros([TILE, TILE], tl.float32), q, k, pid * 0, h, h // group, row, key + col, row_end, key_end,
                   D, BLOCK_K, TILE, TMA) * scale_log2  # fmt: skip
    s = _scores(s, tables, record, mods, row, row_end, col, MOD_FLAGS, TILE)

    lanes = tl.arange(0, TILE)
    inside = row + lanes < row_end
    tile_max = tl.max(s, 1)
    at = row_max_ptr + h.to(tl.int64) * padded + row + lanes
    if SAMPLE:
        row_max = tl.ceil(tile_max) + SHIFT
        tl.store(at, row_max, mask=inside)
    else:
        row_max = tl.load(at, mask=inside, other=0.0)
        row_max = tl.where(tile_max - row_max > HEADROOM, tl.ceil(tile_max), row_max)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    p = tl.exp2(s - row_max[:, None])
    if TMA:
        dtype: tl.constexpr = p_tiles.dtype
    else:
        dtype: tl.constexpr = p_tiles.dtype.element_ty
    stored = to_storage(p, dtype, PTX)
    slot = z * chunk.slots + tl.load(record + R_SLOT) - chunk.slot + n - tl.load(record + R_LOW)
    tl.store(tile_max_ptr + slot * TILE + lanes, row_max)
    tl.store(tile_sum_ptr + slot * TILE + lanes, tl.sum(p, 1))
    tl.store(tile_rounded_sum_ptr + slot * TILE + lanes, tl.sum(from_storage(stored, PTX), 1))
    if DROPOUT & MOD_FLAGS:
        keep = kept(mods, h, row + lanes, col, TILE, TILE)
        store_tile(p_tiles, slot * TILE, tl.where(keep, stored, 0.0), TILE, TMA)
    else:
        store_tile(p_tiles, slot * TILE, stored, TILE, TMA)


@triton.jit(do_not_specialize=_COUNTS)
def combine(
    p_ptr, tables, tile_max_ptr, tile_sum_ptr, tile_rounded_sum_ptr, inverse_sum_ptr, lse_ptr, keep_scale,
    head_first, sets, len_q, c,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As ``rows.combine``: one max for the tiles of a row, ``keep_scale / sum of rounded P``, LSE [Hq, Tq]."""
    pid = tl.program_id(0)
    chunk = chunk_of(tables, c)
    if pid >= chunk.row_tiles * sets:
        return
    z = pid // chunk.row_tiles
    record = tables.row + (chunk.row_tile + pid % chunk.row_tiles) * RECORD
    start = z * chunk.slots + tl.load(record + R_SLOT) - chunk.slot
    tiles = tl.load(record + R_COUNT)
    lanes = tl.arange(0, TILE)
    row_max, lowest_max, row_sum, rounded_sum = merge(
        tile_max_ptr, tile_sum_ptr, tile_rounded_sum_ptr, start, tiles, CHUNK, TILE
    )
    addend = nan_if_invalid(tables, 0.0)
    tl.store(inverse_sum_ptr + pid * TILE + lanes, tl.where(row_sum == 0.0, 0.0, keep_scale / rounded_sum) + addend)
    rows = tl.load(record + R_ROW) + lanes
    to = lse_ptr + (head_first + z).to(tl.int64) * len_q + rows
    tl.store(to, finish_lse(row_max, row_sum) + addend, mask=rows < tl.load(record + R_ROW_END))
    rescale_tiles(p_ptr, tile_max_ptr, tile_sum_ptr, start, tiles, row_max, lowest_max, TILE)


@triton.jit(do_not_specialize=_COUNTS)
def score_backward(
    q, k, v, do, p_tiles, ds_tiles, tables, lse_ptr, delta_ptr, row_sum_ptr, abs_row_sum_ptr, grad_scale_ptr, mods,
    scale_log2, keep_scale, head_first, heads, sets, group, padded, c, tasks,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MOD_FLAGS: tl.constexpr, STORE_DS: tl.constexpr, SCALED: tl.constexpr,
    PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """P and dS tiles of a chunk, and for each row of a dS tile its sum and the sum of its magnitudes.

    ``lse`` (log2 units, +inf without keys) and ``delta`` are [Hq, padded].
    """
    pid = tl.program_id(0)
    chunk = chunk_of(tables, c)
    here = tables.chunk + c * CHUNK_RECORD + C_TASK
    programs = (tl.load(here + CHUNK_RECORD) - tl.load(here)) * heads
    if pid >= programs * sets:
        return
    g = pid // programs
    j = pid % heads  # the heads of a group share a key tile
    i = (pid % programs) // heads
    record = tables.row + tl.load(tables.task + i) * RECORD
    n = tl.load(tables.task + tasks + i)
    if n < 0:
        return
    h = head_first + g * heads + j
    row, row_end = tl.load(record + R_ROW), tl.load(record + R_ROW_END)
    key, key_end = tl.load(record + R_KEY), tl.load(record + R_KEY_END)
    slot = (g * chunk.slots + tl.load(record + R_SLOT) - chunk.slot + n - tl.load(record + R_LOW)) * heads + j
    col = n * TILE
    lanes = tl.arange(0, TILE)
    at = h.to(tl.int64) * padded + row + lanes

    s = score_tile(tl.zeros([TILE, TILE], tl.float32), q, k, pid * 0, h, h // group, row, key + col, row_end, key_end,
                   D, BLOCK_K, TILE, TMA) * scale_log2  # fmt: skip
    s = _scores(s, tables, record, mods, row, row_end, col, MOD_FLAGS, TILE)
    lse2 = tl.load(lse_ptr + at, mask=row + lanes < row_end, other=float("inf"))
    if TMA:
        dtype: tl.constexpr = p_tiles.dtype
    else:
        dtype: tl.constexpr = p_tiles.dtype.element_ty
    # A row whose LSE is NaN keeps that to what it sees: the other keys of the tile may be another sequence's.
    p = to_storage(tl.where(s == float("-inf"), 0.0, probability(s, lse2, MOD_FLAGS)), dtype, PTX)
    if DROPOUT & MOD_FLAGS:
        # A probability has no sign: it carries what was dropped over the second product.
        p = tl.where(kept(mods, h, row + lanes, col, TILE, TILE), p, -p)
        store_tile(p_tiles, slot * TILE, tl.where(p < 0.0, 0.0, p), TILE, TMA)
    else:
        store_tile(p_tiles, slot * TILE, p, TILE, TMA)
    if STORE_DS:
        if DROPOUT & MOD_FLAGS:
            ds = score_tile(tl.zeros([TILE, TILE], tl.float32), do, v, pid * 0, h, h // group, row, key + col, row_end,
                            key_end, D, BLOCK_K, TILE, TMA)  # fmt: skip
            signed = from_storage(p, PTX)
            delta = tl.load(delta_ptr + at, mask=row + lanes < row_end, other=0.0)
            ds = tl.where(signed < 0.0, 0.0, ds * keep_scale) - delta[:, None]
            probabilities = tl.abs(signed)
        else:
            delta = tl.load(delta_ptr + at, mask=row + lanes < row_end, other=0.0)
            ds = score_tile(tl.broadcast_to(-delta[:, None], [TILE, TILE]), do, v, pid * 0, h, h // group, row,
                            key + col, row_end, key_end, D, BLOCK_K, TILE, TMA)  # fmt: skip
            probabilities = from_storage(p, PTX)
        if SCALED:
            ds *= tl.load(grad_scale_ptr + h // group)
        # dP of another sequence's key or row may be NaN.
        ds = tl.where(probabilities == 0.0, 0.0, ds * probabilities)
        tl.store(row_sum_ptr + slot * TILE + lanes, tl.sum(ds, 1))
        tl.store(abs_row_sum_ptr + slot * TILE + lanes, tl.sum(tl.abs(ds), 1))
        if SOFTCAP & MOD_FLAGS:
            lse2 = tl.load(lse_ptr + at, mask=row + lanes < row_end, other=0.0)
            ds *= slope(probabilities, lse2, mods)
        store_tile(ds_tiles, slot * TILE, to_storage(ds, dtype, PTX), TILE, TMA)


@triton.jit(do_not_specialize=_COUNTS)
def correct_delta(
    p_ptr, ds_ptr, tables, row_sum_ptr, abs_row_sum_ptr, delta_ptr, grad_lse_ptr, grad_scale_ptr,
    head_first, heads, sets, group, padded, len_q, c,
    MOD_FLAGS: tl.constexpr, WHOLE_ROWS: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, SCALED: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As ``rows.correct_delta``: take the error of ``delta`` out of dS where it is not small against dS itself."""
    pid = tl.program_id(0)
    chunk = chunk_of(tables, c)
    if pid >= chunk.row_tiles * heads * sets:
        return
    g = pid // (chunk.row_tiles * heads)
    j = pid % heads
    record = tables.row + (chunk.row_tile + pid // heads % chunk.row_tiles) * RECORD
    start = (g * chunk.slots + tl.load(record + R_SLOT) - chunk.slot) * heads + j
    tiles = tl.load(record + R_COUNT)
    h = head_first + g * heads + j
    lanes = tl.arange(0, TILE)
    residual, size = row_residual(row_sum_ptr, abs_row_sum_ptr, start, tiles, heads, CHUNK, TILE)
    scale = 1.0
    if SCALED:
        scale = tl.load(grad_scale_ptr + h // group)
    rows = tl.load(record + R_ROW) + lanes
    inside = rows < tl.load(record + R_ROW_END)
    target = tl.zeros([TILE], tl.float32)
    if HAS_GRAD_LSE:
        target = scale * tl.load(grad_lse_ptr + h.to(tl.int64) * len_q + rows, mask=inside, other=0.0)
    if not WHOLE_ROWS:
        to = delta_ptr + h.to(tl.int64) * padded + rows
        clear_single_keys(p_ptr, ds_ptr, to, residual, size, target, scale, start, tiles, heads, inside, TILE)
        return
    if HAS_GRAD_LSE:
        residual -= target
    residual = tl.where(tl.abs(residual) > size * tolerance(ds_ptr.dtype.element_ty), residual, 0.0)
    if tl.max((residual != 0.0).to(tl.int32), 0) > 0:
        delta = tl.load(delta_ptr + h.to(tl.int64) * padded + rows, mask=inside, other=0.0)
        growth = tl.where(delta == 0.0, 0.0, residual / (scale * delta))
        for t in tl.range(0, tiles):
            at = ((start + t * heads) * TILE + lanes)[:, None].to(tl.int64) * TILE + lanes[None, :]
            ds = tl.load(ds_ptr + at).to(tl.float32)
            p = tl.load(p_ptr + at).to(tl.float32)
            corrected = ds - p * residual[:, None]
            if DROPOUT & MOD_FLAGS:
                corrected = tl.where(p == 0.0, ds * (1.0 + growth[:, None]), corrected)
            tl.store(ds_ptr + at, corrected.to(ds_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["size", "length", "heads"])
def inspect(
    x, head, segment, size, length, heads,
    D: tl.constexpr, EDGE: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Marks the call as unsafe if a row of ``x`` that a contraction reads beyond its segment is not finite (``value``).

    ``SIDE``: S_ROW if the rows of ``x`` are query rows, S_KEY if they are keys. A program has a segment and a head.
    """
    s = tl.program_id(0) // heads
    h = tl.program_id(0) % heads
    if s < tl.load(head + SEGMENTS) - 1:
        here = segment + s
        rows = tl.load(here + 1 + S_ROW * size) - tl.load(here + S_ROW * size)
        keys = tl.load(here + 1 + S_KEY * size) - tl.load(here + S_KEY * size)
        begin, end = tl.load(here + SIDE * size), tl.load(here + 1 + SIDE * size)
        until = min(begin + (end - begin + EDGE - 1) // EDGE * EDGE, length)
        if (rows > 0) & (keys > 0) & (end < until):
            bad = tl.zeros([EDGE, BLOCK_D], tl.int32)
            for d in tl.range(0, D, BLOCK_D):
                y = load_2d(x, s * 0, h, end, d, until, D, EDGE, BLOCK_D, False).to(tl.float32)
                bad |= (y - y != 0.0).to(tl.int32)
            if tl.max(bad) > 0:
                tl.store(head + UNSAFE, 1)
