"""The score phase: tiles of ``Q K^T`` (and ``dO V^T``) with the epilogue that turns a score into a probability.

Everything that knows about softmax and masks lives in this file; the value phase sees tiles of P and dS only.

Forward. A row needs a reference ``r`` so that ``P = 2^(s - r)`` fits the storage dtype (``s`` is the scaled score in
log2 units). Flash attention takes the running maximum and rescales its accumulator whenever that moves; a GEMM over
stored tiles cannot afford the rescale (prototype: 593 instead of 728-761 TFLOP/s), so the reference is fixed before:
``row_reference`` computes one tile of scores per row block, around the diagonal, and takes its row maximum plus
``SHIFT``. A score may exceed the reference by ``HEADROOM`` powers of two before the dtype's exponent range ends::

    bf16   SHIFT 64, HEADROOM 32   rows up to 96 powers of two (66 nats) above the sampled maximum
    fp16   SHIFT  0, HEADROOM 15   rows up to 15 powers of two (10 nats) above it

A row of a tile that exceeds its headroom is stored against its own integer maximum, which is written down, and
``rows.combine`` brings the row's tiles to one common reference (multiplication by powers of two: exact). Every row's
result is therefore that of an exact softmax; the headroom decides only how often the repair runs. The sample is a
score of the row, so the true maximum is never below it: nothing that matters can underflow. P reaches 2^HEADROOM, so
the float32 accumulator holds V up to 2^(127 - HEADROOM) / Nkv, for bf16 about 1e23 at a million keys.

Backward. LSE is known, so ``P = 2^(s - lse)`` needs no reference; ``dS = P * (dP - delta)`` with
``delta = rowsum(dO * O) - dlse``. P is rounded to the storage dtype once and dS is computed from the rounded P, so
both GEMMs of the value phase see the same probabilities. ``delta`` inherits the rounding of the stored O, and where
one key dominates a row ``dP - delta`` cancels down to that rounding. But a row of dS sums to dlse exactly, so the row
sums show the error, and ``rows.refine`` takes it out of the rows where it matters.

Schedule (sm_90): 128 x 128 tiles, one warpgroup, two (forward) or three (backward) stages of 32 KiB. Two or more such
programs share an SM, and one's epilogue hides behind another's wgmma; a 128 x 256 tile with two warpgroups has nothing
to hide it behind.
"""

import triton
import triton.language as tl

from .epilogue import (
    DROPOUT,
    MASK,
    MASK_ADD,
    MASK_FIRST,
    SOFTCAP,
    capped,
    floored,
    in_range,
    kept,
    mask_start,
    masked,
    probability,
    slope,
    slope_at,
)  # fmt: skip
from .geometry import CAUSAL, FULL, slot_of, tile_of
from .mask_tiles import EMPTY, OPEN, in_key_span, in_row_span, row_line, state_of
from .operands import load_2d, store_tile

_COUNTS = [
    "mods", "skips", "len_q", "len_kv", "row_first", "col_first", "head_first", "heads_q", "group", "m_tiles",
    "n_tiles", "slots", "programs", "offset", "left", "right", "width",
]  # fmt: skip


@triton.jit
def score_tile(
    acc, x, y, b, h_x, h_y, row, col, n_x, n_y,
    D: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``acc + X[row : row + TILE] Y[col : col + TILE]^T`` in float32."""
    for d in tl.range(0, D, BLOCK_K):
        left = load_2d(x, b, h_x, row, d, n_x, D, TILE, BLOCK_K, TMA)
        right = load_2d(y, b, h_y, col, d, n_y, D, TILE, BLOCK_K, TMA)
        acc = tl.dot(left, right.T, acc)
    return acc


@triton.jit
def scores_of(
    q, k, mods, state, b, h, group, row, col, scale_log2, len_q, len_kv,
    MODS: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of scores with softcap and attention mask; ``state``: what ``mask_tiles`` says of the tile."""
    rows = row + tl.arange(0, TILE)
    cols = col + tl.arange(0, TILE)
    start = tl.zeros([TILE, TILE], tl.float32)
    if MASK_FIRST & MODS:  # noqa: SIM102 (one is the compiler's, the other the program's)
        if state != OPEN:
            start = mask_start(mods, b, h, rows, cols, len_q, len_kv, MODS, TILE, TILE)
    s = score_tile(start, q, k, b, h, h // group, row, col, len_q, len_kv, D, BLOCK_K, TILE, TMA) * scale_log2
    s = capped(s, mods, MODS)
    if MASK_FIRST & MODS:
        s = floored(s, MODS)
    else:
        s = masked(s, mods, b, h, rows, cols, len_q, len_kv, MODS)
    return s


@triton.jit
def to_storage(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """float32 to fp16 or bf16.

    The packed conversion is spelled out for NVIDIA: left alone, LLVM splits some bf16 pairs, and P then takes a
    register an element instead of half of one, which spills.
    """
    if PTX and dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = x.to(dtype)
    return y


@triton.jit
def from_storage(x, PTX: tl.constexpr):
    """fp16 or bf16 to float32, two bf16 a register until the very end (see ``to_storage``)."""
    if PTX and x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def visible(s, rows, cols, row, col, len_q, len_kv, left, right, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """-inf where a key does not exist or is out of its row's range; ``rows`` and ``cols`` are of the whole problem.

    Interior tiles see every key: a branch spares them the comparisons.
    """
    at = len_kv - len_q
    if SHAPE == FULL:
        if col + TILE > len_kv:
            s = tl.where((cols < len_kv)[None, :], s, float("-inf"))
    elif SHAPE == CAUSAL:
        if col + TILE > min(len_kv, row + 1 + at):
            # The diagonal ends before the keys do for every row that exists, so one comparison covers both limits.
            s = tl.where(cols[None, :] <= tl.minimum(rows + at, len_kv - 1)[:, None], s, float("-inf"))
    else:
        if (col + TILE > min(len_kv, row + 1 + at + right)) | (col < row + TILE - 1 + at - left):
            high = tl.minimum(rows + (at + 1 + right), len_kv)
            s = in_range(s, cols, (rows + (at - left))[:, None], high[:, None])
    return s


@triton.jit(do_not_specialize=["mods", "skips", "len_q", "len_kv", "heads_q", "group", "m_tiles", "left", "right"])
def row_reference(
    q, k, reference_ptr, mods, skips, scale_log2, len_q, len_kv, heads_q, group, m_tiles, left, right,
    D: tl.constexpr, BLOCK_K: tl.constexpr, SHAPE: tl.constexpr, MODS: tl.constexpr, SHIFT: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``ceil(max over a sample of TILE keys) + SHIFT`` for every query row; writes [B * Hq, m_tiles * TILE]."""
    pid = tl.program_id(0)
    head = pid // m_tiles
    row = (pid % m_tiles) * TILE
    b = head // heads_q
    h = head % heads_q
    if SHAPE == FULL:
        col = ((row.to(tl.int64) * len_kv) // len_q).to(tl.int32)
    else:
        col = row + len_kv - len_q
    if MASK & MODS:
        # A sample that the mask hides would leave the row to the repair of ``rows.combine``.
        live = skips[1] + row_line(skips, b, h, pid % m_tiles, MODS).to(tl.int64) * 2
        col = max(min(col, tl.load(live + 1) * TILE - TILE), tl.load(live) * TILE)
    col = max(min(col, len_kv - TILE), 0)
    s = scores_of(q, k, mods, 1, b, h, group, row, col, scale_log2, len_q, len_kv, MODS, D, BLOCK_K, TILE, TMA)
    rows = row + tl.arange(0, TILE)
    cols = col + tl.arange(0, TILE)
    s = visible(s, rows, cols, row, col, len_q, len_kv, left, right, SHAPE, TILE)
    reference = tl.ceil(tl.max(s, 1)) + SHIFT
    tl.store(reference_ptr + pid.to(tl.int64) * TILE + tl.arange(0, TILE), reference)


@triton.jit(do_not_specialize=_COUNTS)
def score_forward(
    q, k, p_tiles, reference_ptr, tile_reference_ptr, tile_sum_ptr, tile_mass_ptr, mods, skips, scale_log2,
    len_q, len_kv, row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, programs, offset,
    left, right, width,
    D: tl.constexpr, BLOCK_K: tl.constexpr, SHAPE: tl.constexpr, MODS: tl.constexpr, HEADROOM: tl.constexpr,
    PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """P tiles of a block; for each row of a tile its reference, its sum (for LSE) and the sum of what was stored.

    O is divided by the sum of the *rounded* P: a row that one key dominates then gets that key's value exactly. Both
    sums are of the probabilities before dropout.
    """
    pid = tl.program_id(0)
    z = pid // programs
    block = (m_tiles, n_tiles, offset, left, right, width)
    m_tile, n_tile = tile_of(pid % programs, block, SHAPE, TILE, GROUP_ROWS)
    if m_tile < 0:
        return
    head = head_first + z
    b = head // heads_q
    h = head % heads_q
    row = row_first + m_tile * TILE
    col = col_first + n_tile * TILE
    lanes = tl.arange(0, TILE)
    slot = z * slots + slot_of(m_tile, n_tile, block, SHAPE, TILE)
    if TMA:
        dtype: tl.constexpr = p_tiles.dtype
    else:
        dtype: tl.constexpr = p_tiles.dtype.element_ty
    state = OPEN + 0
    if MASK & MODS:
        state = state_of(skips, b, h, row // TILE, col // TILE, MODS).to(tl.int32)
        if state == EMPTY:
            if in_row_span(skips, b, h, row // TILE, col // TILE, MODS):
                tl.store(tile_sum_ptr + slot * TILE + lanes, tl.zeros([TILE], tl.float32))
                store_tile(p_tiles, slot * TILE, tl.zeros([TILE, TILE], dtype), TILE, TMA)
            return
    s = scores_of(q, k, mods, state, b, h, group, row, col, scale_log2, len_q, len_kv, MODS, D, BLOCK_K, TILE, TMA)
    rows = row + lanes
    cols = col + lanes
    s = visible(s, rows, cols, row, col, len_q, len_kv, left, right, SHAPE, TILE)

    row_tiles = tl.cdiv(len_q, TILE)
    reference = tl.load(reference_ptr + (head.to(tl.int64) * row_tiles * TILE + row) + lanes)
    highest = tl.max(s, 1)
    reference = tl.where(highest - reference > HEADROOM, tl.ceil(highest), reference)
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    p = tl.exp2(s - reference[:, None])
    stored = to_storage(p, dtype, PTX)

    tl.store(tile_reference_ptr + slot * TILE + lanes, reference)
    tl.store(tile_sum_ptr + slot * TILE + lanes, tl.sum(p, 1))
    if DROPOUT & MODS:
        tl.store(tile_mass_ptr + slot * TILE + lanes, tl.sum(from_storage(stored, PTX), 1))
        keep = kept(mods, head, rows, col, TILE, TILE)
        store_tile(p_tiles, slot * TILE, tl.where(keep, stored, 0.0), TILE, TMA)
    else:
        store_tile(p_tiles, slot * TILE, stored, TILE, TMA)
        tl.store(tile_mass_ptr + slot * TILE + lanes, tl.sum(from_storage(stored, PTX), 1))


@triton.jit(do_not_specialize=_COUNTS)
def score_backward(
    q, k, v, do, p_tiles, ds_tiles, lse_ptr, delta_ptr, row_sum_ptr, row_size_ptr, grad_scale_ptr, mods, skips,
    scale_log2, keep_scale,
    len_q, len_kv, row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, programs, offset,
    left, right, width,
    D: tl.constexpr, BLOCK_K: tl.constexpr, SHAPE: tl.constexpr, MODS: tl.constexpr, STORE_DS: tl.constexpr,
    SCALED: tl.constexpr, PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """P and dS tiles of a block, and for each row of a dS tile its sum and the sum of its magnitudes.

    ``lse`` is as ``epilogue.lse_to_log2`` gives it, +inf for rows without keys; it and ``delta`` are padded to whole
    tiles. With dropout the stored P is ``P * Z`` and ``dS = P * (Z * dP - delta)``, with Z 0 or ``keep_scale``.
    """
    pid = tl.program_id(0)
    z = pid // programs
    block = (m_tiles, n_tiles, offset, left, right, width)
    m_tile, n_tile = tile_of(pid % programs, block, SHAPE, TILE, GROUP_ROWS)
    if m_tile < 0:
        return
    head = head_first + z
    b = head // heads_q
    h = head % heads_q
    row = row_first + m_tile * TILE
    col = col_first + n_tile * TILE
    lanes = tl.arange(0, TILE)
    at = head.to(tl.int64) * tl.cdiv(len_q, TILE) * TILE + row
    slot = z * slots + slot_of(m_tile, n_tile, block, SHAPE, TILE)
    if TMA:
        dtype: tl.constexpr = p_tiles.dtype
    else:
        dtype: tl.constexpr = p_tiles.dtype.element_ty
    state = OPEN + 0
    if MASK & MODS:
        state = state_of(skips, b, h, row // TILE, col // TILE, MODS).to(tl.int32)
        if state == EMPTY:
            within = in_row_span(skips, b, h, row // TILE, col // TILE, MODS)
            if within | in_key_span(skips, b, h, row // TILE, col // TILE):
                zeros = tl.zeros([TILE, TILE], dtype)
                store_tile(p_tiles, slot * TILE, zeros, TILE, TMA)
                if STORE_DS:
                    store_tile(ds_tiles, slot * TILE, zeros, TILE, TMA)
                    tl.store(row_sum_ptr + slot * TILE + lanes, tl.zeros([TILE], tl.float32))
                    tl.store(row_size_ptr + slot * TILE + lanes, tl.zeros([TILE], tl.float32))
            return

    s = scores_of(q, k, mods, state, b, h, group, row, col, scale_log2, len_q, len_kv, MODS, D, BLOCK_K, TILE, TMA)
    rows = row + lanes
    cols = col + lanes
    s = visible(s, rows, cols, row, col, len_q, len_kv, left, right, SHAPE, TILE)
    p = probability(s, tl.load(lse_ptr + at + lanes), MODS)
    if DROPOUT & MODS:
        # A probability has no sign: it carries what was dropped over the second product.
        keep = kept(mods, head, rows, col, TILE, TILE)
        store_tile(p_tiles, slot * TILE, to_storage(tl.where(keep, p * keep_scale, 0.0), dtype, PTX), TILE, TMA)
        p = to_storage(tl.where(keep, p, -p), dtype, PTX)
    else:
        p = to_storage(p, dtype, PTX)
        store_tile(p_tiles, slot * TILE, p, TILE, TMA)
    if STORE_DS:
        if DROPOUT & MODS:
            ds = score_tile(tl.zeros([TILE, TILE], tl.float32), do, v, b, h, h // group, row, col, len_q, len_kv,
                            D, BLOCK_K, TILE, TMA)  # fmt: skip
            signed = from_storage(p, PTX)
            ds = tl.where(signed < 0.0, 0.0, ds * keep_scale) - tl.load(delta_ptr + at + lanes)[:, None]
            probabilities = tl.abs(signed)
        else:
            # The accumulator starts at -delta: one row vector less to keep alive behind the loop.
            dp = tl.broadcast_to(-tl.load(delta_ptr + at + lanes)[:, None], [TILE, TILE])
            ds = score_tile(dp, do, v, b, h, h // group, row, col, len_q, len_kv, D, BLOCK_K, TILE, TMA)
            probabilities = from_storage(p, PTX)
        if SCALED:
            ds *= tl.load(grad_scale_ptr + head // group)
        ds *= probabilities
        tl.store(row_sum_ptr + slot * TILE + lanes, tl.sum(ds, 1))
        tl.store(row_size_ptr + slot * TILE + lanes, tl.sum(tl.abs(ds), 1))
        if SOFTCAP & MODS:
            if MASK_ADD & MODS:
                # A mask of "minimum" leaves nothing of the score in the probability.
                again = score_tile(tl.zeros([TILE, TILE], tl.float32), q, k, b, h, h // group, row, col, len_q, len_kv,
                                   D, BLOCK_K, TILE, TMA) * scale_log2  # fmt: skip
                ds *= slope_at(capped(again, mods, MODS), mods)
            else:
                ds *= slope(probabilities, tl.load(lse_ptr + at + lanes), mods)
        store_tile(ds_tiles, slot * TILE, to_storage(ds, dtype, PTX), TILE, TMA)
