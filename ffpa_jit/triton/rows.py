"""Row-wise kernels around the two phases: combine, delta and the sum of partial gradients. All are memory bound."""

import triton
import triton.language as tl

from .epilogue import DROPOUT, MASK, finish_lse, lse_to_log2
from .geometry import narrowed, row_span, slot_of
from .mask_tiles import row_line
from .operands import load_2d, store_2d
from .params import Block, RowPlace


@triton.jit
def _tiles(z, m_tile, place, block, block_mask, MASK_MODE: tl.constexpr, MOD_FLAGS: tl.constexpr, TILE: tl.constexpr):
    """The slots of a row tile's live tiles: the first one, and how many."""
    low, end = row_span(m_tile, block, MASK_MODE, TILE)
    if MASK & MOD_FLAGS:
        head = place.head_first + z
        b, h = head // place.heads_q, head % place.heads_q
        line = row_line(block_mask, b, h, place.row_first // TILE + m_tile, MOD_FLAGS)
        low, end = narrowed(low, end, block_mask.row_spans, line, 0)  # rows are whole: a block has all their keys
    return z * place.slots + slot_of(m_tile, low, block, MASK_MODE, TILE), max(end - low, 0)


@triton.jit
def merge(
    tile_max_ptr, tile_sum_ptr, tile_rounded_sum_ptr, start, tiles, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of a row tile's ``tiles`` slots from ``start``: the row max and the lowest tile max of each row, and against the
    row max the sums of P, for LSE, and of the rounded P."""
    lanes = tl.arange(0, TILE)
    row_max = tl.full([TILE], float("-inf"), tl.float32)
    lowest_max = tl.full([TILE], float("inf"), tl.float32)
    for t in tl.range(0, tiles, CHUNK):
        tile = t + tl.arange(0, CHUNK)
        at = (start + tile)[:, None] * TILE + lanes[None, :]
        there = (tile < tiles)[:, None]
        tile_max = tl.load(tile_max_ptr + at, mask=there, other=0.0)
        # A tile of zeros has no say; a NaN sum does, so that it reaches the output.
        live = tl.load(tile_sum_ptr + at, mask=there, other=0.0) != 0.0
        row_max = tl.maximum(row_max, tl.max(tl.where(live, tile_max, float("-inf")), 0))
        lowest_max = tl.minimum(lowest_max, tl.min(tl.where(live, tile_max, float("inf")), 0))
    row_sum = tl.zeros([TILE], tl.float32)
    rounded_sum = tl.zeros([TILE], tl.float32)
    for t in tl.range(0, tiles, CHUNK):
        tile = t + tl.arange(0, CHUNK)
        at = (start + tile)[:, None] * TILE + lanes[None, :]
        there = (tile < tiles)[:, None]
        tile_max = tl.load(tile_max_ptr + at, mask=there, other=0.0)
        part = tl.load(tile_sum_ptr + at, mask=there, other=0.0)
        rescale = tl.where(part != 0.0, tl.exp2(tile_max - row_max[None, :]), 0.0)
        row_sum += tl.sum(tl.where(part != 0.0, part * rescale, 0.0), 0)
        rounded = tl.load(tile_rounded_sum_ptr + at, mask=there, other=0.0)
        rounded_sum += tl.sum(tl.where(part != 0.0, rounded * rescale, 0.0), 0)
    return row_max, lowest_max, row_sum, rounded_sum


@triton.jit
def rescale_tiles(p_ptr, tile_max_ptr, tile_sum_ptr, start, tiles, row_max, lowest_max, TILE: tl.constexpr):
    """Bring the tiles of rows that are stored against several tile maxima to the row max."""
    lanes = tl.arange(0, TILE)
    if tl.max((row_max > lowest_max).to(tl.int32), 0) > 0:
        for t in tl.range(0, tiles):
            at = (start + t) * TILE + lanes
            live = tl.load(tile_sum_ptr + at) != 0.0
            rescale = tl.where(live, tl.exp2(tl.load(tile_max_ptr + at) - row_max), 1.0)
            if tl.min(rescale, 0) < 1.0:
                p = p_ptr + (at[:, None].to(tl.int64) * TILE + lanes[None, :])
                tl.store(p, (tl.load(p).to(tl.float32) * rescale[:, None]).to(p_ptr.dtype.element_ty))


@triton.jit
def row_residual(row_sum_ptr, abs_row_sum_ptr, start, tiles, step, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Sums of dS and of its magnitudes over a row's tiles, which are ``step`` slots apart."""
    lanes = tl.arange(0, TILE)
    residual = tl.zeros([TILE], tl.float32)
    size = tl.zeros([TILE], tl.float32)
    for t in tl.range(0, tiles, CHUNK):
        tile = t + tl.arange(0, CHUNK)
        at = (start + tile * step)[:, None] * TILE + lanes[None, :]
        there = (tile < tiles)[:, None]
        residual += tl.sum(tl.load(row_sum_ptr + at, mask=there, other=0.0), 0)
        size += tl.sum(tl.load(abs_row_sum_ptr + at, mask=there, other=0.0), 0)
    return residual, size


_COUNTS = ["block_mask", "len_q", "row_first", "head_first", "heads_q", "m_tiles", "n_tiles", "slots", "offset", "left",
           "right", "width"]  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def combine(
    p_ptr, tile_max_ptr, tile_sum_ptr, tile_rounded_sum_ptr, inverse_sum_ptr, lse_ptr, block_mask, keep_scale,
    len_q, row_first, head_first, heads_q, m_tiles, n_tiles, slots, offset, left, right, width,
    MASK_MODE: tl.constexpr, MOD_FLAGS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One max, one sum and the LSE per row; tiles stored against another max are brought to it.

    Writes ``keep_scale / sum of rounded P`` [heads, m_tiles * TILE] and ``lse`` [B * Hq, len_q] (natural log). A row's
    max is the largest of its tiles', so every factor is a power of two in [0, 1]: scaling a tile cannot overflow.
    """
    pid = tl.program_id(0)
    z = pid // m_tiles
    m_tile = pid % m_tiles
    lanes = tl.arange(0, TILE)
    place = RowPlace(row_first, head_first, heads_q, slots)
    block = Block(m_tiles, n_tiles, offset, left, right, width)
    start, tiles = _tiles(z, m_tile, place, block, block_mask, MASK_MODE, MOD_FLAGS, TILE)

    row_max, lowest_max, row_sum, rounded_sum = merge(
        tile_max_ptr, tile_sum_ptr, tile_rounded_sum_ptr, start, tiles, CHUNK, TILE
    )
    empty = row_sum == 0.0
    tl.store(inverse_sum_ptr + pid * TILE + lanes, tl.where(empty, 0.0, keep_scale / rounded_sum))
    row = row_first + m_tile * TILE + lanes
    tl.store(lse_ptr + (head_first + z).to(tl.int64) * len_q + row, finish_lse(row_max, row_sum), mask=row < len_q)
    rescale_tiles(p_ptr, tile_max_ptr, tile_sum_ptr, start, tiles, row_max, lowest_max, TILE)


@triton.jit
def tolerance(dtype: tl.constexpr):
    """The residual that is not worth a pass over the tiles: less than rounding does to an element of dS."""
    limit: tl.constexpr = 0.001953125 if dtype == tl.bfloat16 else 0.00048828125
    return limit


@triton.jit
def clear_single_keys(
    p_ptr, ds_ptr, delta_at, row_sum, abs_row_sum, target, scale, start, tiles, step, inside, TILE: tl.constexpr,
):  # fmt: skip
    """Make dS of rows that see one key, with P = 1, what it is exactly: ``target`` (``dlse``); corrects ``delta`` too.

    Where P need not sum to one, or dS has a softcap's slope in it, that much is known all the same. The sum of such a
    row's magnitudes is the magnitude of its sum, which rules out nearly all others before P is read.
    """
    lanes = tl.arange(0, TILE)
    single = inside & (tl.abs(row_sum) == abs_row_sum) & (row_sum != target)
    if tl.max(single.to(tl.int32), 0) > 0:
        keys = tl.zeros([TILE], tl.int32)
        mass = tl.zeros([TILE], tl.float32)
        for t in tl.range(0, tiles):
            at = ((start + t * step) * TILE + lanes)[:, None].to(tl.int64) * TILE + lanes[None, :]
            p = tl.load(p_ptr + at).to(tl.float32)
            keys += tl.sum((p != 0.0).to(tl.int32), 1)
            mass += tl.sum(p, 1)
        single = single & (keys == 1) & (mass == 1.0)
        factor = tl.where(single, target / tl.where(row_sum == 0.0, 1.0, row_sum), 1.0)
        if tl.max(single.to(tl.int32), 0) > 0:
            tl.store(delta_at, tl.load(delta_at, mask=single, other=0.0) + (row_sum - target) / scale, mask=single)
            for t in tl.range(0, tiles):
                at = ((start + t * step) * TILE + lanes)[:, None].to(tl.int64) * TILE + lanes[None, :]
                ds = tl.load(ds_ptr + at, mask=single[:, None], other=0.0).to(tl.float32) * factor[:, None]
                tl.store(ds_ptr + at, ds.to(ds_ptr.dtype.element_ty), mask=single[:, None])


@triton.jit(do_not_specialize=[*_COUNTS, "group"])
def correct_delta(
    p_ptr, ds_ptr, row_sum_ptr, abs_row_sum_ptr, delta_ptr, grad_lse_ptr, grad_scale_ptr, block_mask, keep_scale,
    len_q, row_first, head_first, heads_q, group, m_tiles, n_tiles, slots, offset, left, right, width,
    MASK_MODE: tl.constexpr, MOD_FLAGS: tl.constexpr, WHOLE_ROWS: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    SCALED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Take the error of ``delta`` out of dS where it is not small against dS itself; corrects ``delta`` as well.

    A row of exact dS sums to ``dlse`` (``P`` sums to one), so what the computed sum is off by, the residual, is the
    error of delta: ``dS -= P * residual``. Rows whose residual is below ``tolerance`` of their magnitudes' sum, the
    usual case, are left alone.
    With dropout the stored P is ``keep_scale`` as large; where it has left none, ``dS`` is ``-P * delta`` and is scaled
    with delta.

    Without WHOLE_ROWS (a softcap, whose slope is in dS and unknown here, or an LSE of more keys than these) only rows
    with a single key are corrected.
    """
    pid = tl.program_id(0)
    z = pid // m_tiles
    m_tile = pid % m_tiles
    lanes = tl.arange(0, TILE)
    place = RowPlace(row_first, head_first, heads_q, slots)
    block = Block(m_tiles, n_tiles, offset, left, right, width)
    start, tiles = _tiles(z, m_tile, place, block, block_mask, MASK_MODE, MOD_FLAGS, TILE)
    residual, size = row_residual(row_sum_ptr, abs_row_sum_ptr, start, tiles, 1, CHUNK, TILE)
    scale = 1.0
    if SCALED:
        scale = tl.load(grad_scale_ptr + (head_first + z) // group)
    head = (head_first + z).to(tl.int64)
    row = row_first + m_tile * TILE + lanes
    to = delta_ptr + head * tl.cdiv(len_q, TILE) * TILE + row
    target = tl.zeros([TILE], tl.float32)
    if HAS_GRAD_LSE:
        target = scale * tl.load(grad_lse_ptr + head * len_q + row, mask=row < len_q, other=0.0)
    if not WHOLE_ROWS:
        clear_single_keys(p_ptr, ds_ptr, to, residual, size, target, scale, start, tiles, 1, row < len_q, TILE)
        return
    if HAS_GRAD_LSE:
        residual -= target
    residual = tl.where(tl.abs(residual) > size * tolerance(ds_ptr.dtype.element_ty), residual, 0.0)
    if tl.max((residual != 0.0).to(tl.int32), 0) > 0:
        delta = tl.load(to)
        tl.store(to, delta + residual / scale)
        for t in tl.range(0, tiles):
            at = ((start + t) * TILE + lanes)[:, None].to(tl.int64) * TILE + lanes[None, :]
            ds = tl.load(ds_ptr + at).to(tl.float32)
            p = tl.load(p_ptr + at).to(tl.float32)
            corrected = ds - p * (residual / keep_scale)[:, None]
            if DROPOUT & MOD_FLAGS:
                growth = tl.where(delta == 0.0, 0.0, residual / (scale * delta))
                corrected = tl.where(p == 0.0, ds * (1.0 + growth[:, None]), corrected)
            tl.store(ds_ptr + at, corrected.to(ds_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["len_q", "heads_q", "m_tiles"])
def bwd_preprocess(
    do, out, lse_ptr, grad_lse_ptr, lse2_ptr, delta_ptr, len_q, heads_q, m_tiles,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """``delta = rowsum(dO * O) - dlse`` and LSE in log2 units, both [B * Hq, m_tiles * TILE].

    Rows that do not exist and rows without keys get lse +inf: their P is 2^-inf = 0 with no comparison later.
    """
    pid = tl.program_id(0)
    per_head = m_tiles * (TILE // ROWS)
    head = pid // per_head
    row = (pid % per_head) * ROWS
    b = head // heads_q
    h = head % heads_q
    acc = tl.zeros([ROWS], tl.float32)
    for d in tl.range(0, D, BLOCK_D):
        x = load_2d(do, b, h, row, d, len_q, D, ROWS, BLOCK_D, TMA).to(tl.float32)
        acc += tl.sum(x * load_2d(out, b, h, row, d, len_q, D, ROWS, BLOCK_D, TMA).to(tl.float32), 1)
    rows = row + tl.arange(0, ROWS)
    inside = rows < len_q
    lse = tl.load(lse_ptr + head.to(tl.int64) * len_q + rows, mask=inside, other=float("inf"))
    lse = lse_to_log2(lse)
    if HAS_GRAD_LSE:
        acc -= tl.load(grad_lse_ptr + head.to(tl.int64) * len_q + rows, mask=inside, other=0.0)
    to = head.to(tl.int64) * m_tiles * TILE + rows
    tl.store(lse2_ptr + to, lse)
    tl.store(delta_ptr + to, acc)


@triton.jit(do_not_specialize=["len_kv", "n_rows", "heads_kv", "group_first", "groups", "col_first", "splits"])
def reduce_partials(
    partial_ptr, grad, grad_scale_ptr, scale, len_kv, n_rows, heads_kv, group_first, groups, col_first, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``scale`` times the float32 partial sums [splits, groups, n_rows, D], added in split order, as a gradient."""
    pid = tl.program_id(0)
    d_tiles: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    d = (pid % d_tiles) * BLOCK_D
    pid = pid // d_tiles
    per_group = tl.cdiv(n_rows, ROWS)
    g = pid // per_group
    row = (pid % per_group) * ROWS
    rows = row + tl.arange(0, ROWS)
    cols = d + tl.arange(0, BLOCK_D)
    inside = (rows < n_rows)[:, None] & (cols < D)[None, :]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for split in tl.range(0, splits):
        at = (split * groups + g).to(tl.int64) * n_rows + rows
        acc += tl.load(partial_ptr + at[:, None] * D + cols[None, :], mask=inside, other=0.0)
    if SCALED:
        scale = scale / tl.load(grad_scale_ptr + group_first + g)
    b = (group_first + g) // heads_kv
    h = (group_first + g) % heads_kv
    store_2d(grad, b, h, col_first + row, d, len_kv, acc * scale, D, ROWS, BLOCK_D, TMA)
