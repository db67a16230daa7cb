# mypy: ignore-errors
"""The score phase of packed documents, and the kernels of rows; ``value`` has the value phase. The arithmetic is that
of the dense kernels, where the numerics are explained; what differs is where a program finds its tile: in ``tables``.

``tables`` = (head, row, key, chunk, low, high, task), ``c`` is the chunk. A launch handles ``sets`` sets of ``heads``
query heads from ``head_first`` on: ``heads`` is 1, or a whole group where dK and dV add up over it. The slot of row
tile ``m``, key tile ``n`` and head ``j`` of a set is ``(first of the set + slot of (m, n)) * heads + j``.

What lies beyond a segment belongs to another document, or to nobody, and may be NaN. Scores there are cut to -inf by
each row's range, and dS is 0 where P is; what is left to do is in ``value``.

Row references need no extra products here: documents are short, so the tile that they are taken from is computed first
and kept (``SAMPLE``).
"""

import triton
import triton.language as tl

from ffpa_jit.triton.epilogue import DROPOUT, SOFTCAP, capped, finish_lse, in_range, kept, probability, slope
from ffpa_jit.triton.operands import load_2d, store_tile
from ffpa_jit.triton.ragged.tables import (
    CHUNK_RECORD,
    MALFORMED,
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
    UNSAFE,
)
from ffpa_jit.triton.rows import merge, repair, row_excess, tolerance
from ffpa_jit.triton.score import from_storage, score_tile, to_storage

_COUNTS = ["mods", "head_first", "heads", "sets", "group", "padded", "c", "len_q"]


@triton.jit
def chunk_of(tables, c):
    """(first row tile, row tiles, first slot, slots of a head) of a chunk."""
    here = tables[3] + c * CHUNK_RECORD
    tile, slot = tl.load(here), tl.load(here + 2)
    return tile, tl.load(here + CHUNK_RECORD) - tile, slot, tl.load(here + CHUNK_RECORD + 2) - slot


@triton.jit
def spoilt(tables, x):
    """``x``, or NaN if ``cu_seqlens`` are malformed."""
    return tl.where(tl.load(tables[0] + MALFORMED) != 0, float("nan"), x)


@triton.jit
def _limits(tables, row, row_end, TILE: tl.constexpr):
    """Keys that each row of a tile sees, [TILE, 1] each, and which rows exist."""
    rows = row + tl.arange(0, TILE)
    inside = rows < row_end
    low, high = tl.load(tables[4] + rows, mask=inside, other=0), tl.load(tables[5] + rows, mask=inside, other=0)
    return low[:, None], high[:, None], inside


@triton.jit
def _scores(s, tables, record, mods, row, row_end, col, MODS: tl.constexpr, TILE: tl.constexpr):
    """Softcap, and -inf outside of each row's range; a tile that all of 128 rows see is spared the comparisons."""
    s = capped(s, mods, MODS)
    if (col < tl.load(record + R_FULL_FROM)) | (col + TILE > tl.load(record + R_FULL_TO)):
        low, high, _ = _limits(tables, row, row_end, TILE)
        s = in_range(s, col + tl.arange(0, TILE), low, high)
    return s


@triton.jit(do_not_specialize=_COUNTS)
def score_forward(
    q, k, p_tiles, tables, reference_ptr, tile_reference_ptr, tile_sum_ptr, tile_mass_ptr, mods, scale_log2,
    head_first, sets, group, padded, c, tasks,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MODS: tl.constexpr, SAMPLE: tl.constexpr, SHIFT: tl.constexpr,
    HEADROOM: tl.constexpr, PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """P tiles of a chunk; for each row of a tile its reference, its sum, and the sum of the rounded P.

    With SAMPLE a program has a row tile, computes its sample tile and writes the references, [Hq, padded]; without, it
    has a task, and those that are sample tiles are done.
    """
    pid = tl.program_id(0)
    first, row_tiles, base, slots = chunk_of(tables, c)
    programs = row_tiles
    if not SAMPLE:
        here = tables[3] + c * CHUNK_RECORD + 1
        programs = tl.load(here + CHUNK_RECORD) - tl.load(here)
    if pid >= programs * sets:
        return
    z = pid // programs
    i = pid % programs
    if SAMPLE:
        tile = first + i
        record = tables[1] + tile * RECORD
        n = tl.load(record + R_SAMPLE)
        skip = tl.load(record + R_COUNT) == 0
    else:
        tile = tl.load(tables[6] + i)
        record = tables[1] + tile * RECORD
        n = tl.load(tables[6] + tasks + i)
        skip = (n < 0) | (n == tl.load(record + R_SAMPLE))
    if skip:
        return
    h = head_first + z
    row, row_end = tl.load(record + R_ROW), tl.load(record + R_ROW_END)
    key, key_end = tl.load(record + R_KEY), tl.load(record + R_KEY_END)
    col = n * TILE
    s = score_tile(tl.zeros([TILE, TILE], tl.float32), q, k, pid * 0, h, h // group, row, key + col, row_end, key_end,
                   D, BLOCK_K, TILE, TMA) * scale_log2  # fmt: skip
    s = _scores(s, tables, record, mods, row, row_end, col, MODS, TILE)

    lanes = tl.arange(0, TILE)
    inside = row + lanes < row_end
    highest = tl.max(s, 1)
    at = reference_ptr + h.to(tl.int64) * padded + row + lanes
    if SAMPLE:
        reference = tl.ceil(highest) + SHIFT
        tl.store(at, reference, mask=inside)
    else:
        reference = tl.load(at, mask=inside, other=0.0)
        reference = tl.where(highest - reference > HEADROOM, tl.ceil(highest), reference)
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    p = tl.exp2(s - reference[:, None])
    if TMA:
        dtype: tl.constexpr = p_tiles.dtype
    else:
        dtype: tl.constexpr = p_tiles.dtype.element_ty
    stored = to_storage(p, dtype, PTX)
    slot = z * slots + tl.load(record + R_SLOT) - base + n - tl.load(record + R_LOW)
    tl.store(tile_reference_ptr + slot * TILE + lanes, reference)
    tl.store(tile_sum_ptr + slot * TILE + lanes, tl.sum(p, 1))
    tl.store(tile_mass_ptr + slot * TILE + lanes, tl.sum(from_storage(stored, PTX), 1))
    if DROPOUT & MODS:
        keep = kept(mods, h, row + lanes, col, TILE, TILE)
        store_tile(p_tiles, slot * TILE, tl.where(keep, stored, 0.0), TILE, TMA)
    else:
        store_tile(p_tiles, slot * TILE, stored, TILE, TMA)


@triton.jit(do_not_specialize=_COUNTS)
def combine(
    p_ptr, tables, tile_reference_ptr, tile_sum_ptr, tile_mass_ptr, inverse_sum_ptr, lse_ptr, keep_scale,
    head_first, sets, len_q, c,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As ``rows.combine``: one reference for the tiles of a row, ``keep_scale / sum of rounded P``, LSE [Hq, Tq]."""
    pid = tl.program_id(0)
    first, row_tiles, base, slots = chunk_of(tables, c)
    if pid >= row_tiles * sets:
        return
    z = pid // row_tiles
    record = tables[1] + (first + pid % row_tiles) * RECORD
    start = z * slots + tl.load(record + R_SLOT) - base
    tiles = tl.load(record + R_COUNT)
    lanes = tl.arange(0, TILE)
    highest, lowest, total, mass = merge(tile_reference_ptr, tile_sum_ptr, tile_mass_ptr, start, tiles, CHUNK, TILE)
    addend = spoilt(tables, 0.0)
    tl.store(inverse_sum_ptr + pid * TILE + lanes, tl.where(total == 0.0, 0.0, keep_scale / mass) + addend)
    rows = tl.load(record + R_ROW) + lanes
    to = lse_ptr + (head_first + z).to(tl.int64) * len_q + rows
    tl.store(to, finish_lse(highest, total) + addend, mask=rows < tl.load(record + R_ROW_END))
    repair(p_ptr, tile_reference_ptr, tile_sum_ptr, start, tiles, highest, lowest, TILE)


@triton.jit(do_not_specialize=_COUNTS)
def score_backward(
    q, k, v, do, p_tiles, ds_tiles, tables, lse_ptr, delta_ptr, row_sum_ptr, row_size_ptr, grad_scale_ptr, mods,
    scale_log2, keep_scale, head_first, heads, sets, group, padded, c, tasks,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MODS: tl.constexpr, STORE_DS: tl.constexpr, SCALED: tl.constexpr,
    PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """P and dS tiles of a chunk, and for each row of a dS tile its sum and the sum of its magnitudes.

    ``lse`` (log2 units, +inf without keys) and ``delta`` are [Hq, padded].
    """
    pid = tl.program_id(0)
    first, row_tiles, base, slots = chunk_of(tables, c)
    here = tables[3] + c * CHUNK_RECORD + 1
    programs = (tl.load(here + CHUNK_RECORD) - tl.load(here)) * heads
    if pid >= programs * sets:
        return
    g = pid // programs
    j = pid % heads  # the heads of a group share a key tile
    i = (pid % programs) // heads
    record = tables[1] + tl.load(tables[6] + i) * RECORD
    n = tl.load(tables[6] + tasks + i)
    if n < 0:
        return
    h = head_first + g * heads + j
    row, row_end = tl.load(record + R_ROW), tl.load(record + R_ROW_END)
    key, key_end = tl.load(record + R_KEY), tl.load(record + R_KEY_END)
    slot = (g * slots + tl.load(record + R_SLOT) - base + n - tl.load(record + R_LOW)) * heads + j
    col = n * TILE
    lanes = tl.arange(0, TILE)
    at = h.to(tl.int64) * padded + row + lanes

    s = score_tile(tl.zeros([TILE, TILE], tl.float32), q, k, pid * 0, h, h // group, row, key + col, row_end, key_end,
                   D, BLOCK_K, TILE, TMA) * scale_log2  # fmt: skip
    s = _scores(s, tables, record, mods, row, row_end, col, MODS, TILE)
    lse2 = tl.load(lse_ptr + at, mask=row + lanes < row_end, other=float("inf"))
    if TMA:
        dtype: tl.constexpr = p_tiles.dtype
    else:
        dtype: tl.constexpr = p_tiles.dtype.element_ty
    # A row whose LSE is NaN keeps that to what it sees: the other keys of the tile may be another document's.
    p = to_storage(tl.where(s == float("-inf"), 0.0, probability(s, lse2, MODS)), dtype, PTX)
    if DROPOUT & MODS:
        # A probability has no sign: it carries what was dropped over the second product.
        p = tl.where(kept(mods, h, row + lanes, col, TILE, TILE), p, -p)
        store_tile(p_tiles, slot * TILE, tl.where(p < 0.0, 0.0, p), TILE, TMA)
    else:
        store_tile(p_tiles, slot * TILE, p, TILE, TMA)
    if STORE_DS:
        if DROPOUT & MODS:
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
        # dP of another document's key or row may be NaN.
        ds = tl.where(probabilities == 0.0, 0.0, ds * probabilities)
        tl.store(row_sum_ptr + slot * TILE + lanes, tl.sum(ds, 1))
        tl.store(row_size_ptr + slot * TILE + lanes, tl.sum(tl.abs(ds), 1))
        if SOFTCAP & MODS:
            lse2 = tl.load(lse_ptr + at, mask=row + lanes < row_end, other=0.0)
            ds *= slope(probabilities, lse2, mods)
        store_tile(ds_tiles, slot * TILE, to_storage(ds, dtype, PTX), TILE, TMA)


@triton.jit(do_not_specialize=_COUNTS)
def refine(
    p_ptr, ds_ptr, tables, row_sum_ptr, row_size_ptr, delta_ptr, grad_lse_ptr, grad_scale_ptr,
    head_first, heads, sets, group, padded, len_q, c,
    MODS: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As ``rows.refine``: take the error of ``delta`` out of dS where it is not small against dS itself."""
    pid = tl.program_id(0)
    first, row_tiles, base, slots = chunk_of(tables, c)
    if pid >= row_tiles * heads * sets:
        return
    g = pid // (row_tiles * heads)
    j = pid % heads
    record = tables[1] + (first + pid // heads % row_tiles) * RECORD
    start = (g * slots + tl.load(record + R_SLOT) - base) * heads + j
    tiles = tl.load(record + R_COUNT)
    h = head_first + g * heads + j
    lanes = tl.arange(0, TILE)
    excess, size = row_excess(row_sum_ptr, row_size_ptr, start, tiles, heads, CHUNK, TILE)
    scale = 1.0
    if SCALED:
        scale = tl.load(grad_scale_ptr + h // group)
    rows = tl.load(record + R_ROW) + lanes
    inside = rows < tl.load(record + R_ROW_END)
    if HAS_GRAD_LSE:
        excess -= scale * tl.load(grad_lse_ptr + h.to(tl.int64) * len_q + rows, mask=inside, other=0.0)
    excess = tl.where(tl.abs(excess) > size * tolerance(ds_ptr.dtype.element_ty), excess, 0.0)
    if tl.max((excess != 0.0).to(tl.int32), 0) > 0:
        delta = tl.load(delta_ptr + h.to(tl.int64) * padded + rows, mask=inside, other=0.0)
        growth = tl.where(delta == 0.0, 0.0, excess / (scale * delta))
        for t in tl.range(0, tiles):
            at = ((start + t * heads) * TILE + lanes)[:, None].to(tl.int64) * TILE + lanes[None, :]
            ds = tl.load(ds_ptr + at).to(tl.float32)
            p = tl.load(p_ptr + at).to(tl.float32)
            corrected = ds - p * excess[:, None]
            if DROPOUT & MODS:
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
    if s < tl.load(head + 2) - 1:
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
