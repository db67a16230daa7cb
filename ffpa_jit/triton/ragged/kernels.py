# mypy: ignore-errors
"""The score and value phases of packed documents. The arithmetic is that of ``score``, ``rows`` and ``value``, where
the numerics are explained; what differs is where a program finds its tile: in ``tables``.

``tables`` = (head, row, key, chunk, low, high, task), ``c`` is the chunk. A launch handles ``sets`` sets of ``heads``
query heads from ``head_first`` on: ``heads`` is 1, or a whole group where dK and dV add up over it. The slot of row
tile ``m``, key tile ``n`` and head ``j`` of a set is ``(first of the set + slot of (m, n)) * heads + j``.

What lies beyond a segment belongs to another document, or to nobody, and may be NaN. Scores there are cut to -inf by
XX
last step reads beyond the segment, where it multiplies by zeros. Without TMA those loads are masked. With TMA they
cannot be; if ``inspect`` finds something there that is not finite, the value kernels (``GUARD`` 1) return at once, and
the same ones without TMA (``GUARD`` 2), a few programs that take turns, do the work.

Row references need no extra products here: documents are short, so the tile that they are taken from is computed first
and kept (``SAMPLE``).
"""

import triton
import triton.language as tl

from ffpa_jit.triton.epilogue import DROPOUT, SOFTCAP, capped, finish_lse, in_range, kept, probability, slope
from ffpa_jit.triton.operands import _addresses, load_2d, load_tile, store_2d, store_tile
from ffpa_jit.triton.ragged.tables import (
    CHUNK_RECORD,
    K_CUT,
    K_FROM,
    K_KEY,
    K_KEY_END,
    K_ROW,
    K_ROW_END,
    K_ROW_TILE,
    K_ROW_TILE_END,
    K_TILE,
    K_TO,
    MALFORMED,
    R_COUNT,
    R_FROM,
    R_FULL_FROM,
    R_FULL_TO,
    R_KEY,
    R_KEY_END,
    R_LOW,
    R_ROW,
    R_ROW_END,
    R_SAMPLE,
    R_SLOT,
    R_TO,
    RECORD,
    S_KEY,
    S_ROW,
    UNSAFE,
    band_of,
    before,
)
from ffpa_jit.triton.score import from_storage, score_tile, to_storage
from ffpa_jit.triton.value import _multiply, _zeros

_COUNTS = ["mods", "head_first", "heads", "sets", "group", "padded", "c", "len_q"]


@triton.jit
def _chunk(tables, c):
    """(first row tile, row tiles, first slot, slots of a head) of a chunk."""
    here = tables[3] + c * CHUNK_RECORD
    tile, slot = tl.load(here), tl.load(here + 2)
    return tile, tl.load(here + CHUNK_RECORD) - tile, slot, tl.load(here + CHUNK_RECORD + 2) - slot


@triton.jit
def _spoilt(tables, x):
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
    first, row_tiles, base, slots = _chunk(tables, c)
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
    slot = z * slots + tl.load(record + R_SLOT) - base + n - tl.load(record + R_LOW)
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
    first, row_tiles, base, slots = _chunk(tables, c)
    if pid >= row_tiles * sets:
        return
    z = pid // row_tiles
    record = tables[1] + (first + pid % row_tiles) * RECORD
    start = z * slots + tl.load(record + R_SLOT) - base
    tiles = tl.load(record + R_COUNT)
    lanes = tl.arange(0, TILE)

    highest = tl.full([TILE], float("-inf"), tl.float32)
    lowest = tl.full([TILE], float("inf"), tl.float32)
    for t in tl.range(0, tiles, CHUNK):
        tile = t + tl.arange(0, CHUNK)
        at = (start + tile)[:, None] * TILE + lanes[None, :]
        there = (tile < tiles)[:, None]
        reference = tl.load(tile_reference_ptr + at, mask=there, other=0.0)
        live = tl.load(tile_sum_ptr + at, mask=there, other=0.0) != 0.0
        highest = tl.maximum(highest, tl.max(tl.where(live, reference, float("-inf")), 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(live, reference, float("inf")), 0))
    total = tl.zeros([TILE], tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    for t in tl.range(0, tiles, CHUNK):
        tile = t + tl.arange(0, CHUNK)
        at = (start + tile)[:, None] * TILE + lanes[None, :]
        there = (tile < tiles)[:, None]
        reference = tl.load(tile_reference_ptr + at, mask=there, other=0.0)
        part = tl.load(tile_sum_ptr + at, mask=there, other=0.0)
        factor = tl.where(part != 0.0, tl.exp2(reference - highest[None, :]), 0.0)
        total += tl.sum(tl.where(part != 0.0, part * factor, 0.0), 0)
        mass += tl.sum(tl.where(part != 0.0, tl.load(tile_mass_ptr + at, mask=there, other=0.0) * factor, 0.0), 0)

    spoilt = _spoilt(tables, 0.0)
    tl.store(inverse_sum_ptr + pid * TILE + lanes, tl.where(total == 0.0, 0.0, keep_scale / mass) + spoilt)
    rows = tl.load(record + R_ROW) + lanes
    to = lse_ptr + (head_first + z).to(tl.int64) * len_q + rows
    tl.store(to, finish_lse(highest, total) + spoilt, mask=rows < tl.load(record + R_ROW_END))

    if tl.max((highest > lowest).to(tl.int32), 0) > 0:
        for t in tl.range(0, tiles):
            at = (start + t) * TILE + lanes
            live = tl.load(tile_sum_ptr + at) != 0.0
            factor = tl.where(live, tl.exp2(tl.load(tile_reference_ptr + at) - highest), 1.0)
            if tl.min(factor, 0) < 1.0:
                p = p_ptr + (at[:, None].to(tl.int64) * TILE + lanes[None, :])
                tl.store(p, (tl.load(p).to(tl.float32) * factor[:, None]).to(p_ptr.dtype.element_ty))


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
    first, row_tiles, base, slots = _chunk(tables, c)
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
    p = to_storage(probability(s, lse2, MODS), dtype, PTX)
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
            cap = tl.load(lse_ptr + at, mask=row + lanes < row_end, other=0.0)
            ds *= slope(probabilities, cap, mods, pid * 0, h, row + lanes, col + lanes, row_end, key_end, MODS)
        store_tile(ds_tiles, slot * TILE, to_storage(ds, dtype, PTX), TILE, TMA)


@triton.jit(do_not_specialize=_COUNTS)
def refine(
    p_ptr, ds_ptr, tables, row_sum_ptr, row_size_ptr, delta_ptr, grad_lse_ptr, grad_scale_ptr,
    head_first, heads, sets, group, padded, len_q, c,
    MODS: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As ``rows.refine``: take the error of ``delta`` out of dS where it is not small against dS itself."""
    pid = tl.program_id(0)
    first, row_tiles, base, slots = _chunk(tables, c)
    if pid >= row_tiles * heads * sets:
        return
    g = pid // (row_tiles * heads)
    j = pid % heads
    record = tables[1] + (first + pid // heads % row_tiles) * RECORD
    start = (g * slots + tl.load(record + R_SLOT) - base) * heads + j
    tiles = tl.load(record + R_COUNT)
    h = head_first + g * heads + j
    lanes = tl.arange(0, TILE)
    excess = tl.zeros([TILE], tl.float32)
    size = tl.zeros([TILE], tl.float32)
    for t in tl.range(0, tiles, CHUNK):
        tile = t + tl.arange(0, CHUNK)
        at = (start + tile * heads)[:, None] * TILE + lanes[None, :]
        there = (tile < tiles)[:, None]
        excess += tl.sum(tl.load(row_sum_ptr + at, mask=there, other=0.0), 0)
        size += tl.sum(tl.load(row_size_ptr + at, mask=there, other=0.0), 0)
    scale = 1.0
    if SCALED:
        scale = tl.load(grad_scale_ptr + h // group)
    rows = tl.load(record + R_ROW) + lanes
    inside = rows < tl.load(record + R_ROW_END)
    if HAS_GRAD_LSE:
        # A row without keys has a gradient of LSE that goes nowhere.
        d_lse = tl.load(grad_lse_ptr + h.to(tl.int64) * len_q + rows, mask=inside, other=0.0)
        excess -= tl.where(size > 0.0, scale * d_lse, 0.0)
    excess = tl.where(tl.abs(excess) > size * 0.00048828125, excess, 0.0)
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
    """Marks the call as unsafe if a row of ``x`` that a contraction reads beyond its segment is not finite.

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
            if tl.max(tl.max(bad, 1), 0) > 0:
                tl.store(head + UNSAFE, 1)


@triton.jit
def _elsewhere(tables, GUARD: tl.constexpr):
    """Whether the other variant of a value kernel does the work."""
    gone = False
    if GUARD == 1:
        gone = tl.load(tables[0] + UNSAFE) != 0
    if GUARD == 2:
        gone = tl.load(tables[0] + UNSAFE) == 0
    return gone


@triton.jit
def _store(
    x, acc, tail, h, row, end, d, D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store rows up to ``end``, through pointers: what lies beyond belongs to another document."""
    store_2d(x, row * 0, h, row, d, end, acc, D, TILE, BLOCK_N, False)
    if TAIL > 0:
        store_2d(x, row * 0, h, row, d + BLOCK_N, end, tail, D, TILE, TAIL, False)


@triton.jit
def _row_side(
    a_tiles, y, y_tail, record, slot, heads, h, d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """``A Y`` of a row tile: O from P and V, or dQ from dS and K."""
    key, key_end = tl.load(record + R_KEY), tl.load(record + R_KEY_END)
    start, end = tl.load(record + R_FROM) // BLOCK_K * BLOCK_K, tl.load(record + R_TO)
    low = tl.load(record + R_LOW)
    acc, tail = _zeros(BLOCK_N, TAIL, TILE)
    for k in tl.range(start, end, BLOCK_K):
        a = load_tile(a_tiles, (slot + (k // TILE - low) * heads) * TILE, k % TILE, TILE, BLOCK_K, TILE, TMA)
        acc, tail = _multiply(acc, tail, a, y, y_tail, slot * 0, h, key + k, key_end, d,
                              D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
    return acc, tail


@triton.jit
def _output_tile(
    pid, operands, tables, inverse_sum_ptr, head_first, sets, group, chunk,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """O of a row tile, ``BLOCK_N + TAIL`` columns."""
    STEP: tl.constexpr = BLOCK_N + TAIL
    D_TILES: tl.constexpr = (D + STEP - 1) // STEP
    p_tiles, v, v_tail, out = operands
    first, row_tiles, base, slots = chunk
    i = row_tiles - 1 - pid // (sets * D_TILES)  # the last row tile of a document is the longest under a causal mask
    z = pid // D_TILES % sets
    d = pid % D_TILES * STEP
    h = head_first + z
    record = tables[1] + (first + i) * RECORD
    slot = z * slots + tl.load(record + R_SLOT) - base
    acc, tail = _row_side(p_tiles, v, v_tail, record, slot, 1, h // group, d,
                          D, BLOCK_N, TAIL, BLOCK_K, TMA, TILE)  # fmt: skip
    inverse = tl.load(inverse_sum_ptr + (z * row_tiles + i) * TILE + tl.arange(0, TILE))[:, None]
    _store(out, acc * inverse, tail * inverse, h, tl.load(record + R_ROW), tl.load(record + R_ROW_END), d,
           D, BLOCK_N, TAIL, TILE)  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def value_forward(
    p_tiles, v, v_tail, out, tables, inverse_sum_ptr, head_first, sets, group, c,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, GUARD: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """O of a chunk's row tiles."""
    operands = (p_tiles, v, v_tail, out)
    chunk = _chunk(tables, c)
    programs = chunk[1] * sets * ((D + BLOCK_N + TAIL - 1) // (BLOCK_N + TAIL))
    pid = tl.program_id(0)
    if (pid >= programs) | _elsewhere(tables, GUARD):
        return
    if GUARD == 2:
        for each in tl.range(pid, programs, tl.num_programs(0)):
            _output_tile(each, operands, tables, inverse_sum_ptr, head_first, sets, group, chunk,
                         D, BLOCK_N, TAIL, BLOCK_K, TMA, TILE)  # fmt: skip
    else:
        _output_tile(pid, operands, tables, inverse_sum_ptr, head_first, sets, group, chunk,
                     D, BLOCK_N, TAIL, BLOCK_K, TMA, TILE)  # fmt: skip


@triton.jit
def _add(sum_ptr, grad, x, scale, h, key, key_end, d, continued, finished, D: tl.constexpr, COLS: tl.constexpr,
         TILE: tl.constexpr):  # fmt: skip
    """Continue a float32 sum, or finish it: then it is stored as a gradient. In parts, as ``value._store_sum``."""
    if COLS > 64:
        left, right = x.reshape([TILE, 2, COLS // 2]).permute(0, 2, 1).split()
        _add(sum_ptr, grad, left, scale, h, key, key_end, d, continued, finished, D, COLS // 2, TILE)
        _add(sum_ptr, grad, right, scale, h, key, key_end, d + COLS // 2, continued, finished, D, COLS // 2, TILE)
    else:
        lanes = tl.arange(0, TILE)
        cols = d + tl.arange(0, COLS)
        inside = (cols < D)[None, :]
        at = sum_ptr + lanes[:, None] * D + cols[None, :]
        x += tl.load(at, mask=inside & continued, other=0.0)
        tl.store(at, x, mask=inside & (finished == 0))
        to = _addresses(grad, key * 0, h, key, d, TILE, COLS)
        mask = inside & (key + lanes < key_end)[:, None] & finished
        tl.store(to, (x * scale).to(grad[0].dtype.element_ty), mask=mask)


@triton.jit
def _key_tile(
    at_tiles, x, x_tail, grad, tables, sum_ptr, scale, record, place, chunk, IS_DK: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``A^T X`` of a key tile over the heads of a group and the rows of the chunk that see it."""
    g, heads, h, h_key, d = place
    first, row_tiles, base, slots, left, right = chunk
    key, key_end = tl.load(record + K_KEY), tl.load(record + K_KEY_END)
    row, row_end = tl.load(record + K_ROW), tl.load(record + K_ROW_END)
    row_tile = tl.load(record + K_ROW_TILE)
    start = max(tl.load(record + K_FROM), (first - row_tile) * TILE) // BLOCK_K
    end = min(tl.load(record + K_TO), (first + row_tiles - row_tile) * TILE)
    steps = max((end + BLOCK_K - 1) // BLOCK_K - start, 0)
    tile = tl.load(record + K_TILE)
    band = band_of(row_end - row, key_end - key + tile * TILE, left, right, TILE)
    begin = start * BLOCK_K // TILE
    there = tables[1] + (row_tile + begin) * RECORD
    slot = g * slots - base + tile + tl.load(there + R_SLOT) - tl.load(there + R_LOW) - before(begin, band)
    if not IS_DK:
        scale = _spoilt(tables, scale)
    acc, tail = _zeros(BLOCK_N, TAIL, TILE)
    for i in tl.range(0, steps * heads):
        j = i // steps
        m = (start + i % steps) * BLOCK_K
        at = (slot + before(m // TILE, band)) * heads + j
        a = load_tile(at_tiles, at * TILE + m % TILE, 0, BLOCK_K, TILE, TILE, TMA).T
        acc, tail = _multiply(acc, tail, a, x, x_tail, g * 0, h + j, row + m, row_end, d,
                              D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
    if IS_DK:
        # If what follows the loops of dK and dV were the same, they would be made one and Triton 3.6 take their shared
        # memory to be in use at the same time. So they ask for this at different times.
        scale = _spoilt(tables, scale)
    if PARTIAL:
        cut = tl.load(record + K_CUT) != 0
        continued = cut & (first > row_tile)
        finished = (cut == 0) | (first + row_tiles >= tl.load(record + K_ROW_TILE_END))
        sums = sum_ptr + (tile * TILE).to(tl.int64) * D
        _add(sums, grad, acc, scale, h_key, key, key_end, d, continued, finished, D, BLOCK_N, TILE)
        if TAIL > 0:
            _add(sums, grad, tail, scale, h_key, key, key_end, d + BLOCK_N, continued, finished, D, TAIL, TILE)
    else:
        _store(grad, acc * scale, tail * scale, h_key, key, key_end, d, D, BLOCK_N, TAIL, TILE)


@triton.jit
def _gradient_tile(
    pid, key_programs, operands, tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale, head_first, heads, sets,
    group, key_first, chunk,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, NEED_DQ: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """dK or dV of a key tile, or dQ of a row tile, ``BLOCK_N + TAIL`` columns."""
    STEP: tl.constexpr = BLOCK_N + TAIL
    D_TILES: tl.constexpr = (D + STEP - 1) // STEP
    KEYS: tl.constexpr = (1 if NEED_DK else 0) + (1 if NEED_DV else 0)
    p_t_tiles, ds_tiles, ds_t_tiles, q, q_tail, k, k_tail, do, do_tail, dq, dk, dv = operands
    first, row_tiles, base, slots, left, right = chunk
    d = pid % D_TILES * STEP
    is_query = NEED_DQ
    if NEED_DQ and KEYS > 0:
        is_query = pid >= key_programs
    # The three differ in operands only, but a descriptor cannot be chosen at run time.
    if is_query:
        t = (pid - key_programs) // D_TILES
        z = t % (sets * heads)
        h = head_first + z
        record = tables[1] + (first + row_tiles - 1 - t // (sets * heads)) * RECORD
        slot = (z // heads * slots + tl.load(record + R_SLOT) - base) * heads + z % heads
        acc, tail = _row_side(ds_tiles, k, k_tail, record, slot, heads, h // group, d,
                              D, BLOCK_N, TAIL, BLOCK_K, TMA, TILE)  # fmt: skip
        scale = _spoilt(tables, scale)
        if SCALED:
            scale = scale / tl.load(grad_scale_ptr + h // group)
        _store(dq, acc * scale, tail * scale, h, tl.load(record + R_ROW), tl.load(record + R_ROW_END), d,
               D, BLOCK_N, TAIL, TILE)  # fmt: skip
    else:
        t = pid // D_TILES
        is_dk = NEED_DK
        if NEED_DK and NEED_DV:
            is_dk = t % 2 == 0
        t = t // KEYS
        g = t % sets
        h = head_first + g * heads
        record = tables[2] + (key_first + t // sets) * RECORD
        place = (g, heads, h, h // group, d)
        if is_dk:
            if SCALED:
                scale = scale / tl.load(grad_scale_ptr + h // group)
            _key_tile(ds_t_tiles, q, q_tail, dk, tables, sum_ptr, scale, record, place, chunk, True,
                      D, BLOCK_N, TAIL, BLOCK_K, PARTIAL, TMA, TILE)  # fmt: skip
        else:
            sums = sum_ptr
            if PARTIAL:
                sums += sum_rows.to(tl.int64) * D
            _key_tile(p_t_tiles, do, do_tail, dv, tables, sums, value_scale, record, place, chunk, False,
                      D, BLOCK_N, TAIL, BLOCK_K, PARTIAL, TMA, TILE)  # fmt: skip


@triton.jit(do_not_specialize=[*_COUNTS, "sum_rows", "left", "right"])
def value_backward(
    p_t_tiles, ds_tiles, ds_t_tiles, q, q_tail, k, k_tail, do, do_tail, dq, dk, dv,
    tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale, head_first, heads, sets, group, c, left, right,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, NEED_DQ: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr, SCALED: tl.constexpr, GUARD: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of a chunk in one launch: first the key tiles, whose contractions are longest, then the row tiles.

    With PARTIAL the sums of segments that the chunk does not finish go to a float32 buffer [2, sum_rows, D].
    """
    D_TILES: tl.constexpr = (D + BLOCK_N + TAIL - 1) // (BLOCK_N + TAIL)
    KEYS: tl.constexpr = (1 if NEED_DK else 0) + (1 if NEED_DV else 0)
    first, row_tiles, base, slots = _chunk(tables, c)
    here = tables[3] + c * CHUNK_RECORD
    key_first = tl.load(here + 3)
    key_programs = (tl.load(here + CHUNK_RECORD + 4) - key_first) * (sets * D_TILES * KEYS)
    programs = key_programs
    if NEED_DQ:
        programs += row_tiles * heads * sets * D_TILES
    pid = tl.program_id(0)
    if (pid >= programs) | _elsewhere(tables, GUARD):
        return
    operands = (p_t_tiles, ds_tiles, ds_t_tiles, q, q_tail, k, k_tail, do, do_tail, dq, dk, dv)
    chunk = (first, row_tiles, base, slots, left, right)
    if GUARD == 2:
        for each in tl.range(pid, programs, tl.num_programs(0)):
            _gradient_tile(each, key_programs, operands, tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale,
                           head_first, heads, sets, group, key_first, chunk, D, BLOCK_N, TAIL, BLOCK_K,
                           NEED_DQ, NEED_DK, NEED_DV, PARTIAL, SCALED, TMA, TILE)  # fmt: skip
    else:
        _gradient_tile(pid, key_programs, operands, tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale,
                       head_first, heads, sets, group, key_first, chunk, D, BLOCK_N, TAIL, BLOCK_K,
                       NEED_DQ, NEED_DK, NEED_DV, PARTIAL, SCALED, TMA, TILE)  # fmt: skip
