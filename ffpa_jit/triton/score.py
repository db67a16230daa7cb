"""The score phase: tiles of ``Q K^T`` (and ``dO V^T``) with the epilogue that turns a score into a probability.

Everything that knows about softmax and masks lives in this file; the value phase sees tiles of P and dS only.

Forward. A row needs a max ``r`` so that ``P = 2^(s - r)`` fits the storage dtype (``s`` is the scaled score in
log2 units). Flash attention takes the running maximum and rescales its accumulator whenever that moves; a GEMM over
stored tiles cannot afford the rescale (prototype: 593 instead of 728-761 TFLOP/s), so the max is fixed before:
``sample_row_max`` computes one tile of scores per row block, around the diagonal, and takes its row maximum plus
``SHIFT``. A score may exceed it by ``HEADROOM`` powers of two before the dtype's exponent range ends::

    bf16   SHIFT 64, HEADROOM 32   rows up to 96 powers of two (66 nats) above the sampled maximum
    fp16   SHIFT  0, HEADROOM 15   rows up to 15 powers of two (10 nats) above it

A row of a tile that exceeds its headroom is stored against its own integer max, which is written down, and
``rows.combine`` brings the row's tiles to one common max (multiplication by powers of two: exact). Every row's
result is therefore that of an exact softmax; the headroom decides only how often tiles are rescaled. The sample is a
score of the row, so the true maximum is never below it: nothing that matters can underflow. P reaches 2^HEADROOM, so
the float32 accumulator holds V up to 2^(127 - HEADROOM) / Nkv, for bf16 about 1e23 at a million keys.

Backward. LSE is known, so ``P = 2^(s - lse)`` needs no max; ``dS = P * (dP - delta)`` with
``delta = rowsum(dO * O) - dlse``. P is rounded to the storage dtype once and dS is computed from the rounded P, so
both GEMMs of the value phase see the same probabilities. ``delta`` inherits the rounding of the stored O, and where
one key dominates a row ``dP - delta`` cancels down to that rounding. But a row of dS sums to dlse exactly, so the row
sums show the error, and ``rows.correct_delta`` takes it out of the rows where it matters.

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
    MASK_BOOL,
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
from .geometry import CAUSAL, UNMASKED, slot_of, tile_of
from .mask_tiles import EMPTY, FULL, in_key_span, in_row_span, row_line, state_of
from .operands import load_2d, store_tile
from .params import Block

_COUNTS = [
    "mods", "block_mask", "len_q", "len_kv", "row_first", "col_first", "head_first", "heads_q", "group", "m_tiles",
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
def _finite(x):
    """``x`` with 0 for what is not finite, and what was not."""
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, x, tl.zeros_like(x)), (finite == 0).to(tl.int32)


@triton.jit
def finite_score_tile(
    acc, x, y, b, h_x, h_y, row, col, n_x, n_y, scale, BOTH: tl.constexpr,
    D: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``score_tile * scale`` where Y (BOTH: or X) is not finite: NaN for such a key (or row), -inf where ``acc`` is."""
    bad_rows = tl.zeros([TILE], tl.int32)
    bad_keys = tl.zeros([TILE], tl.int32)
    for d in tl.range(0, D, BLOCK_K, num_stages=1):
        right, bad = _finite(load_2d(y, b, h_y, col, d, n_y, D, TILE, BLOCK_K, TMA))
        bad_keys |= tl.max(bad, 1)
        left = load_2d(x, b, h_x, row, d, n_x, D, TILE, BLOCK_K, TMA)
        if BOTH:
            left, bad = _finite(left)
            bad_rows |= tl.max(bad, 1)
        acc = tl.dot(left, right.T, acc)
    acc *= scale
    acc = tl.where((acc > float("-inf")) & (bad_keys != 0)[None, :], float("nan"), acc)
    if BOTH:
        acc = tl.where((acc > float("-inf")) & (bad_rows != 0)[:, None], float("nan"), acc)
    return acc


@triton.jit
def scores_of(
    q, k, mods, state, b, h, group, row, col, scale_log2, len_q, len_kv, CHECK: tl.constexpr,
    MOD_FLAGS: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of scores with softcap and attention mask; ``state``: what ``mask_tiles`` says of the tile.

    CHECK: whether a boolean mask hides keys of NaN (1), and keys from rows of NaN (2).
    """
    rows = row + tl.arange(0, TILE)
    cols = col + tl.arange(0, TILE)
    start = tl.zeros([TILE, TILE], tl.float32)
    if MASK_FIRST & MOD_FLAGS:  # noqa: SIM102 (one is the compiler's, the other the program's)
        if state != FULL:
            start = mask_start(mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS, TILE, TILE)
    s = score_tile(start, q, k, b, h, h // group, row, col, len_q, len_kv, D, BLOCK_K, TILE, TMA) * scale_log2
    s = capped(s, mods, MOD_FLAGS)
    if MASK_FIRST & MOD_FLAGS:
        s = floored(s, MOD_FLAGS)
        if MASK_BOOL & MOD_FLAGS and CHECK > 0:  # noqa: SIM102 (one is the compiler's, the other the program's)
            if state != FULL:  # noqa: SIM102 (the second after the first)
                if tl.max(tl.max((s != s).to(tl.int32), 1), 0) > 0:
                    # A hidden key of NaN: -inf + NaN is NaN. Again, with finite operands.
                    start = mask_start(mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS, TILE, TILE)
                    s = finite_score_tile(start, q, k, b, h, h // group, row, col, len_q, len_kv, scale_log2,
                                          CHECK > 1, D, BLOCK_K, TILE, TMA)  # fmt: skip
    else:
        s = masked(s, mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS)
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
def cuts(row, col, len_q, len_kv, left, right, MASK_MODE: tl.constexpr, TILE: tl.constexpr):
    """Whether some row of a tile does not see all of its keys, of those that exist."""
    at = len_kv - len_q
    if MASK_MODE == UNMASKED:
        cut = row < 0
    elif MASK_MODE == CAUSAL:
        cut = col + TILE > row + 1 + at
    else:
        cut = (col + TILE > row + 1 + at + right) | (col < row + TILE - 1 + at - left)
    return cut


@triton.jit
def visible(s, rows, cols, row, col, len_q, len_kv, left, right, MASK_MODE: tl.constexpr, TILE: tl.constexpr):
    """-inf where a key does not exist or is out of its row's range; ``rows`` and ``cols`` are of the whole problem.

    Interior tiles see every key: a branch spares them the comparisons.
    """
    at = len_kv - len_q
    if MASK_MODE == UNMASKED:
        if col + TILE > len_kv:
            s = tl.where((cols < len_kv)[None, :], s, float("-inf"))
    elif MASK_MODE == CAUSAL:
        if col + TILE > min(len_kv, row + 1 + at):
            # The diagonal ends before the keys do for every row that exists, so one comparison covers both limits.
            s = tl.where(cols[None, :] <= tl.minimum(rows + at, len_kv - 1)[:, None], s, float("-inf"))
    else:
        if (col + TILE > min(len_kv, row + 1 + at + right)) | (col < row + TILE - 1 + at - left):
            high = tl.minimum(rows + (at + 1 + right), len_kv)
            s = in_range(s, cols, (rows + (at - left))[:, None], high[:, None])
    return s


@triton.jit(do_not_specialize=["mods", "block_mask", "len_q", "len_kv", "heads_q", "group", "m_tiles", "left", "right"])
def sample_row_max(
    q, k, row_max_ptr, mods, block_mask, scale_log2, len_q, len_kv, heads_q, group, m_tiles, left, right,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MASK_MODE: tl.constexpr, MOD_FLAGS: tl.constexpr, SHIFT: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``ceil(max over a sample of TILE keys) + SHIFT`` for every query row; writes [B * Hq, m_tiles * TILE]."""
    pid = tl.program_id(0)
    head = pid // m_tiles
    row = (pid % m_tiles) * TILE
    b = head // heads_q
    h = head % heads_q
    if MASK_MODE == UNMASKED:
        col = ((row.to(tl.int64) * len_kv) // len_q).to(tl.int32)
    else:
        col = row + len_kv - len_q
    if MASK & MOD_FLAGS:
        # A sample that the mask hides would leave the row to ``rows.rescale_tiles``.
        live = block_mask.row_spans + row_line(block_mask, b, h, pid % m_tiles, MOD_FLAGS).to(tl.int64) * 2
        col = max(min(col, tl.load(live + 1) * TILE - TILE), tl.load(live) * TILE)
    col = max(min(col, len_kv - TILE), 0)
    s = scores_of(q, k, mods, 1, b, h, group, row, col, scale_log2, len_q, len_kv, 0, MOD_FLAGS,
                  D, BLOCK_K, TILE, TMA)  # fmt: skip
    rows = row + tl.arange(0, TILE)
    cols = col + tl.arange(0, TILE)
    s = visible(s, rows, cols, row, col, len_q, len_kv, left, right, MASK_MODE, TILE)
    row_max = tl.max(s, 1)
    if MASK_BOOL & MOD_FLAGS:
        # Of keys that are all NaN or hidden: what is not hidden stands in another tile.
        row_max = tl.where(row_max == row_max, row_max, float("-inf"))
    row_max = tl.ceil(row_max) + SHIFT
    tl.store(row_max_ptr + pid.to(tl.int64) * TILE + tl.arange(0, TILE), row_max)


@triton.jit(do_not_specialize=_COUNTS)
def score_forward(
    q, k, p_tiles, row_max_ptr, tile_max_ptr, tile_sum_ptr, tile_rounded_sum_ptr, mods, block_mask, scale_log2,
    len_q, len_kv, row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, programs, offset,
    left, right, width,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MASK_MODE: tl.constexpr, MOD_FLAGS: tl.constexpr, HEADROOM: tl.constexpr,
    PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """P tiles of a block; for each row of a tile its max, its sum (for LSE) and the sum of what was stored.

    O is divided by the sum of the *rounded* P: a row that one key dominates then gets that key's value exactly. Both
    sums are of the probabilities before dropout.
    """
    pid = tl.program_id(0)
    z = pid // programs
    block = Block(m_tiles, n_tiles, offset, left, right, width)
    m_tile, n_tile = tile_of(pid % programs, block, MASK_MODE, TILE, GROUP_ROWS)
    if m_tile < 0:
        return
    head = head_first + z
    b = head // heads_q
    h = head % heads_q
    row = row_first + m_tile * TILE
    col = col_first + n_tile * TILE
    lanes = tl.arange(0, TILE)
    slot = z * slots + slot_of(m_tile, n_tile, block, MASK_MODE, TILE)
    if TMA:
        dtype: tl.constexpr = p_tiles.dtype
    else:
        dtype: tl.constexpr = p_tiles.dtype.element_ty
    state = FULL + 0
    if MASK & MOD_FLAGS:
        state = state_of(block_mask, b, h, row // TILE, col // TILE, MOD_FLAGS).to(tl.int32)
        if state == EMPTY:
            if in_row_span(block_mask, b, h, row // TILE, col // TILE, MOD_FLAGS):
                tl.store(tile_sum_ptr + slot * TILE + lanes, tl.zeros([TILE], tl.float32))
                store_tile(p_tiles, slot * TILE, tl.zeros([TILE, TILE], dtype), TILE, TMA)
            return
    s = scores_of(q, k, mods, state, b, h, group, row, col, scale_log2, len_q, len_kv, 1, MOD_FLAGS,
                  D, BLOCK_K, TILE, TMA)  # fmt: skip
    rows = row + lanes
    cols = col + lanes
    s = visible(s, rows, cols, row, col, len_q, len_kv, left, right, MASK_MODE, TILE)

    row_tiles = tl.cdiv(len_q, TILE)
    row_max = tl.load(row_max_ptr + (head.to(tl.int64) * row_tiles * TILE + row) + lanes)
    tile_max = tl.max(s, 1)
    row_max = tl.where(tile_max - row_max > HEADROOM, tl.ceil(tile_max), row_max)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    p = tl.exp2(s - row_max[:, None])
    stored = to_storage(p, dtype, PTX)

    tl.store(tile_max_ptr + slot * TILE + lanes, row_max)
    tl.store(tile_sum_ptr + slot * TILE + lanes, tl.sum(p, 1))
    if DROPOUT & MOD_FLAGS:
        tl.store(tile_rounded_sum_ptr + slot * TILE + lanes, tl.sum(from_storage(stored, PTX), 1))
        keep = kept(mods, head, rows, col, TILE, TILE)
        store_tile(p_tiles, slot * TILE, tl.where(keep, stored, 0.0), TILE, TMA)
    else:
        store_tile(p_tiles, slot * TILE, stored, TILE, TMA)
        tl.store(tile_rounded_sum_ptr + slot * TILE + lanes, tl.sum(from_storage(stored, PTX), 1))


@triton.jit(do_not_specialize=_COUNTS)
def score_backward(
    q, k, v, do, p_tiles, ds_tiles, lse_ptr, delta_ptr, row_sum_ptr, abs_row_sum_ptr, grad_scale_ptr, mods, block_mask,
    scale_log2, keep_scale,
    len_q, len_kv, row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, programs, offset,
    left, right, width,
    D: tl.constexpr, BLOCK_K: tl.constexpr, MASK_MODE: tl.constexpr, MOD_FLAGS: tl.constexpr, STORE_DS: tl.constexpr,
    SCALED: tl.constexpr, PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """P and dS tiles of a block, and for each row of a dS tile its sum and the sum of its magnitudes.

    ``lse`` is as ``epilogue.lse_to_log2`` gives it, +inf for rows without keys; it and ``delta`` are padded to whole
    tiles. With dropout the stored P is ``P * Z`` and ``dS = P * (Z * dP - delta)``, with Z 0 or ``keep_scale``.
    """
    pid = tl.program_id(0)
    z = pid // programs
    block = Block(m_tiles, n_tiles, offset, left, right, width)
    m_tile, n_tile = tile_of(pid % programs, block, MASK_MODE, TILE, GROUP_ROWS)
    if m_tile < 0:
        return
    head = head_first + z
    b = head // heads_q
    h = head % heads_q
    row = row_first + m_tile * TILE
    col = col_first + n_tile * TILE
    lanes = tl.arange(0, TILE)
    at = head.to(tl.int64) * tl.cdiv(len_q, TILE) * TILE + row
    slot = z * slots + slot_of(m_tile, n_tile, block, MASK_MODE, TILE)
    if TMA:
        dtype: tl.constexpr = p_tiles.dtype
    else:
        dtype: tl.constexpr = p_tiles.dtype.element_ty
    state = FULL + 0
    if MASK & MOD_FLAGS:
        state = state_of(block_mask, b, h, row // TILE, col // TILE, MOD_FLAGS).to(tl.int32)
        if state == EMPTY:
            within = in_row_span(block_mask, b, h, row // TILE, col // TILE, MOD_FLAGS)
            if within | in_key_span(block_mask, b, h, row // TILE, col // TILE):
                zeros = tl.zeros([TILE, TILE], dtype)
                store_tile(p_tiles, slot * TILE, zeros, TILE, TMA)
                if STORE_DS:
                    store_tile(ds_tiles, slot * TILE, zeros, TILE, TMA)
                    tl.store(row_sum_ptr + slot * TILE + lanes, tl.zeros([TILE], tl.float32))
                    tl.store(abs_row_sum_ptr + slot * TILE + lanes, tl.zeros([TILE], tl.float32))
            return

    s = scores_of(q, k, mods, state, b, h, group, row, col, scale_log2, len_q, len_kv, 2, MOD_FLAGS,
                  D, BLOCK_K, TILE, TMA)  # fmt: skip
    rows = row + lanes
    cols = col + lanes
    s = visible(s, rows, cols, row, col, len_q, len_kv, left, right, MASK_MODE, TILE)
    p = probability(s, tl.load(lse_ptr + at + lanes), MOD_FLAGS)
    if DROPOUT & MOD_FLAGS:
        # A probability has no sign: it carries what was dropped over the second product.
        keep = kept(mods, head, rows, col, TILE, TILE)
        store_tile(p_tiles, slot * TILE, to_storage(tl.where(keep, p * keep_scale, 0.0), dtype, PTX), TILE, TMA)
        p = to_storage(tl.where(keep, p, -p), dtype, PTX)
    else:
        p = to_storage(p, dtype, PTX)
        store_tile(p_tiles, slot * TILE, p, TILE, TMA)
    if STORE_DS:
        if DROPOUT & MOD_FLAGS:
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
        if (MASK & MOD_FLAGS) or MASK_MODE != UNMASKED:  # noqa: SIM102 (as above)
            # dP of a key that the row does not see may be anything.
            if cuts(row, col, len_q, len_kv, left, right, MASK_MODE, TILE) | (state != FULL):
                ds = tl.where(probabilities == 0.0, 0.0, ds)
        tl.store(row_sum_ptr + slot * TILE + lanes, tl.sum(ds, 1))
        tl.store(abs_row_sum_ptr + slot * TILE + lanes, tl.sum(tl.abs(ds), 1))
        if SOFTCAP & MOD_FLAGS:
            if MASK_ADD & MOD_FLAGS:
                # A mask of "minimum" leaves nothing of the score in the probability.
                again = score_tile(tl.zeros([TILE, TILE], tl.float32), q, k, b, h, h // group, row, col, len_q, len_kv,
                                   D, BLOCK_K, TILE, TMA) * scale_log2  # fmt: skip
                ds *= slope_at(capped(again, mods, MOD_FLAGS), mods)
            else:
                ds *= slope(probabilities, tl.load(lse_ptr + at + lanes), mods)
        store_tile(ds_tiles, slot * TILE, to_storage(ds, dtype, PTX), TILE, TMA)
