"""Attention without a workspace: scores live and die inside the program that needs them.

A 128 x D accumulator does not fit the registers at D >= 320, so a program owns ``TILE`` rows of a result and a slice
of ``BLOCK_N + TAIL`` of its columns, and recomputes the scores for it ("split-D"). In products of two head-dim wide
matrices, with ``c`` slices::

    forward    S, P V                                     c + 1
    backward   dQ: S, dP, dS K;  dK: S, dP, dS^T Q        2 c + 1 each
               dV: S, P^T dO                              c + 1

where the two-phase kernels (``score``, ``value``) take 2 and 5. The gradient of an additive mask takes S and dP once.
Sums are taken in a fixed order by one owner each: no atomics, no scratch memory beyond ``lse`` and ``delta``.

Schedule. The loop over the head dim inside a score tile is the one that Triton pipelines; the loop around it, over keys
or rows, is not. A score tile is 128 x ``STRIP``: beside an accumulator of 128 x 256 (128 registers a thread, 8 warps)
there is room for P and dP only if ``STRIP``, a divisor of ``TILE``, is 64 or 32. On the key side the score tile is
computed transposed, as ``K Q^T``: its P^T then is the left operand of the second product as it lies in the registers.

What a row sees is ``limits``: two numbers a row, here from the window, elsewhere perhaps from arrays. Which tiles a
program visits follows from the limits of the first and last row (they never decrease from row to row); tiles that every
row sees whole skip the comparisons.

What is not finite. Scores and dS of what a row does not see are cut off, but 0 times a NaN of V (in the backward of K,
Q or dO) is NaN: such a one reaches the rows (or keys) whose strip it is in. A second pass would double these kernels.
"""

import triton
import triton.language as tl

from .epilogue import (
    DROPOUT,
    MASK,
    MASK_BOOL,
    MASK_FIRST,
    SOFTCAP,
    capped,
    finish_lse,
    floored,
    in_range,
    kept,
    mask_start,
    mask_values,
    masked,
    probability,
    slope_at,
)  # fmt: skip
from .operands import load_2d
from .params import Sizes
from .score import from_storage, to_storage
from .value import accumulators, multiply, store_both

LAZY = tl.constexpr(8.0)
"""Powers of two by which a score may exceed its row's max before the accumulators are rescaled."""

P_SCALE = tl.constexpr(4096.0)
"""Probabilities of long rows are subnormal numbers of float16; times this, the smaller ones keep their bits."""

_COUNTS = ["len_q", "len_kv", "left", "right", "heads_q", "group", "m_tiles"]


@triton.jit
def limits(rows, len_q, len_kv, left, right):
    """The keys ``[low, high)`` that rows see; may be empty. Never decreasing in ``rows``."""
    position = rows + (len_kv - len_q)
    return tl.maximum(position - left, 0), tl.minimum(position + right + 1, len_kv)


@triton.jit
def _key_strips(row, end, len_q, len_kv, left, right, STRIP: tl.constexpr):
    """Keys, in whole strips, that some row of ``[row, end)`` sees: first and (past the) last."""
    first, _ = limits(row, len_q, len_kv, left, right)
    _, last = limits(tl.minimum(end, len_q) - 1, len_q, len_kv, left, right)
    return first // STRIP * STRIP, last


@triton.jit
def _row_strips(col, end, len_q, len_kv, left, right, STRIP: tl.constexpr):
    """Rows, in whole strips, that see some key of ``[col, end)``: first and (past the) last."""
    offset = len_kv - len_q
    first = tl.maximum(col - right - offset, 0)
    last = tl.minimum(tl.minimum(end, len_kv) + left - offset, len_q)
    return first // STRIP * STRIP, last


@triton.jit
def _product(
    acc, x, y, b, h_x, h_y, row, col, n_x, n_y,
    D: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``acc + X[row : row + ROWS] Y[col : col + COLS]^T`` in float32."""
    for d in tl.range(0, D, BLOCK_K):
        left = load_2d(x, b, h_x, row, d, n_x, D, ROWS, BLOCK_K, TMA)
        right = load_2d(y, b, h_y, col, d, n_y, D, COLS, BLOCK_K, TMA)
        acc = tl.dot(left, right.T, acc)
    return acc


@triton.jit
def _row_key_product(
    acc, x, y, b, h, row, col, sizes,
    D: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BY_KEYS: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """``acc + X Y^T`` of query-side X and key-side Y, [ROWS, COLS]; BY_KEYS computes its transpose (see the module)."""
    if BY_KEYS:
        acc = _product(acc.T, y, x, b, h // sizes.group, h, col, row, sizes.len_kv, sizes.len_q,
                       D, BLOCK_K, COLS, ROWS, TMA).T  # fmt: skip
    else:
        acc = _product(acc, x, y, b, h, h // sizes.group, row, col, sizes.len_q, sizes.len_kv,
                       D, BLOCK_K, ROWS, COLS, TMA)  # fmt: skip
    return acc


@triton.jit
def _start(
    mods, b, h, row, col, sizes, MOD_FLAGS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """What a tile's scores are added to."""
    start = tl.zeros([ROWS, COLS], tl.float32)
    if MASK_FIRST & MOD_FLAGS:
        rows = row + tl.arange(0, ROWS)
        cols = col + tl.arange(0, COLS)
        start = mask_start(mods, b, h, rows, cols, sizes.len_q, sizes.len_kv, MOD_FLAGS, ROWS, COLS)
    return start


@triton.jit
def _live(start):
    """Whether the mask leaves anything of a tile."""
    return tl.max(tl.max((start != float("-inf")).to(tl.int32), 1), 0) > 0


@triton.jit
def _masked(s, mods, b, h, rows, cols, sizes, MOD_FLAGS: tl.constexpr, CHECK: tl.constexpr):
    """Scores after a softcap, with the mask that was not in ``_start``. CHECK: a boolean one hides keys of NaN, too."""
    if MASK_FIRST & MOD_FLAGS:
        s = floored(s, MOD_FLAGS)
        if CHECK:  # noqa: SIM102 (Triton has no "and" of constants)
            if MASK_BOOL & MOD_FLAGS:
                # -inf + NaN is NaN. (A branch for tiles with a NaN does not compile for sm_100.)
                seen = mask_values(mods, b, h, rows, cols, sizes.len_q, sizes.len_kv, MOD_FLAGS)
                s = tl.where(seen, s, float("-inf"))
    else:
        s = masked(s, mods, b, h, rows, cols, sizes.len_q, sizes.len_kv, MOD_FLAGS)
    return s


@triton.jit
def _cuts(row, col, sizes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Whether some row of a tile does not see all of its keys."""
    _, least = limits(row, sizes.len_q, sizes.len_kv, sizes.left, sizes.right)
    most, _ = limits(row + ROWS - 1, sizes.len_q, sizes.len_kv, sizes.left, sizes.right)
    return (col < most) | (col + COLS > least)


@triton.jit
def _visible(s, row, rows, col, cols, sizes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """-inf where a row does not see a key; a tile that every row sees whole is left as it is."""
    if _cuts(row, col, sizes, ROWS, COLS):
        low, high = limits(rows, sizes.len_q, sizes.len_kv, sizes.left, sizes.right)
        s = in_range(s, cols, low[:, None], high[:, None])
    return s


@triton.jit
def _storage_type(x, TMA: tl.constexpr):
    """A value of the operand's dtype: jitted functions return values, not types."""
    if TMA:
        zero = tl.zeros([1], x.dtype)
    else:
        zero = tl.zeros([1], x.ptr.dtype.element_ty)
    return zero


@triton.jit(do_not_specialize=_COUNTS)
def fused_forward(
    q, k, v, v_tail, out, out_tail, lse_ptr, scale_log2, keep_scale, len_q, len_kv, left, right, heads_q, group,
    m_tiles, mods,
    MOD_FLAGS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr, PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A slice of O for a row tile; the first slice writes the LSE [B * Hq, len_q] (natural log) as well.

    Online softmax with a max per row, an integer in log2 units, so that rescaling is exact. It moves only when a
    score exceeds it by ``LAZY``: P stays below 2^LAZY. O is divided by the sum of the *rounded* P (see ``score``).
    """
    sizes = Sizes(len_q, len_kv, left, right, heads_q, group, m_tiles)
    STEP: tl.constexpr = BLOCK_N + TAIL
    SLICES: tl.constexpr = (D + STEP - 1) // STEP
    # Slices of a row tile run side by side and share Q and K; the last row tile, which sees the most keys, goes first.
    pid = tl.program_id(0)
    d = (pid % SLICES) * STEP
    row = (m_tiles - 1 - pid // SLICES % m_tiles) * TILE
    head = pid // (SLICES * m_tiles)
    b = head // heads_q
    h = head % heads_q
    rows = row + tl.arange(0, TILE)
    dtype: tl.constexpr = _storage_type(out, TMA).dtype

    row_max = tl.full([TILE], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE], tl.float32)
    rounded_sum = tl.zeros([TILE], tl.float32)
    acc, tail = accumulators(BLOCK_N, TAIL, TILE)
    first, last = _key_strips(row, row + TILE, len_q, len_kv, left, right, STRIP)
    for col in tl.range(first, last, STRIP):
        start = _start(mods, b, h, row, col, sizes, MOD_FLAGS, TILE, STRIP)
        live = True
        if MASK_FIRST & MOD_FLAGS:
            live = _live(start)
        if live:
            cols = col + tl.arange(0, STRIP)
            s = _row_key_product(start, q, k, b, h, row, col, sizes, D, BLOCK_K, TILE, STRIP, False, TMA)
            s = _masked(capped(s * scale_log2, mods, MOD_FLAGS), mods, b, h, rows, cols, sizes, MOD_FLAGS, True)
            s = _visible(s, row, rows, col, cols, sizes, TILE, STRIP)
            tile_max = tl.max(s, 1)
            above = tile_max > row_max + LAZY
            if tl.max(above.to(tl.int32), 0) > 0:
                new_max = tl.where(above, tl.ceil(tile_max), row_max)
                rescale = tl.where(above, tl.exp2(row_max - new_max), 1.0)
                row_max = new_max
                row_sum *= rescale
                rounded_sum *= rescale
                acc *= rescale[:, None]
                tail *= rescale[:, None]
            p = tl.exp2(s - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None])
            row_sum += tl.sum(p, 1)
            p = to_storage(p, dtype, PTX)
            rounded_sum += tl.sum(from_storage(p, PTX), 1)
            if DROPOUT & MOD_FLAGS:
                p = tl.where(kept(mods, head, rows, col, TILE, STRIP), p, tl.zeros([TILE, STRIP], dtype))
            acc, tail = multiply(acc, tail, p, v, v_tail, b, h // group, col, len_kv, d,
                                  D, BLOCK_N, TAIL, STRIP, TMA)  # fmt: skip

    empty = row_sum == 0.0
    inverse = (keep_scale / tl.where(empty, 1.0, rounded_sum))[:, None]
    # Not only a factor of 0: V may hold an infinity that such a row must not see.
    acc = tl.where(empty[:, None], 0.0, acc * inverse)
    tail = tl.where(empty[:, None], 0.0, tail * inverse)
    store_both(out, out_tail, acc, tail, b, h, row, len_q, d, D, BLOCK_N, TAIL, TMA, TILE)
    if d == 0:
        tl.store(lse_ptr + head.to(tl.int64) * len_q + rows, finish_lse(row_max, row_sum), mask=rows < len_q)


@triton.jit
def _probabilities(
    start, q, k, lse_ptr, scale_log2, b, h, row, col, sizes, mods,
    MOD_FLAGS: tl.constexpr, SLOPED: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, BY_KEYS: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of P from the LSE (log2 units, padded to whole tiles), [ROWS, COLS]; SLOPED: times the softcap's slope."""
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    s = _row_key_product(start, q, k, b, h, row, col, sizes, D, BLOCK_K, ROWS, COLS, BY_KEYS, TMA) * scale_log2
    s = capped(s, mods, MOD_FLAGS)
    if SLOPED and SOFTCAP & MOD_FLAGS:
        slope = slope_at(s, mods)
    s = _masked(s, mods, b, h, rows, cols, sizes, MOD_FLAGS, not BY_KEYS)
    s = _visible(s, row, rows, col, cols, sizes, ROWS, COLS)
    at = (b * sizes.heads_q + h).to(tl.int64) * sizes.m_tiles * TILE + rows
    p = probability(s, tl.load(lse_ptr + at), MOD_FLAGS)
    if SLOPED and SOFTCAP & MOD_FLAGS:
        p *= slope
    return p


@triton.jit
def _score_gradients(
    start, q, k, v, do, lse_ptr, delta_ptr, scale_log2, keep_scale, b, h, row, col, sizes, mods,
    MOD_FLAGS: tl.constexpr, SLOPED: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, BY_KEYS: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``P * (Z * dP - delta)`` of a tile, [ROWS, COLS], Z being dropout's factor; times the softcap's slope if SLOPED.

    All that the options have to say is put into P before dP is computed, when there are registers for it.
    """
    p = _probabilities(start, q, k, lse_ptr, scale_log2, b, h, row, col, sizes, mods,
                       MOD_FLAGS, SLOPED, D, BLOCK_K, ROWS, COLS, BY_KEYS, TMA, TILE)  # fmt: skip
    rows = row + tl.arange(0, ROWS)
    head = b * sizes.heads_q + h
    delta_at = delta_ptr + head.to(tl.int64) * sizes.m_tiles * TILE + rows
    if DROPOUT & MOD_FLAGS:
        p = tl.where(kept(mods, head, rows, col, ROWS, COLS), p, -p)  # P is never negative: the sign is free
        dp = _row_key_product(tl.zeros([ROWS, COLS], tl.float32), do, v, b, h, row, col, sizes,
                              D, BLOCK_K, ROWS, COLS, BY_KEYS, TMA)  # fmt: skip
        ds = tl.abs(p) * (tl.where(p > 0.0, dp * keep_scale, 0.0) - tl.load(delta_at)[:, None])
    else:
        # The accumulator starts at -delta: one row vector less to keep alive behind the loop.
        dp = tl.broadcast_to(-tl.load(delta_at)[:, None], [ROWS, COLS])
        ds = p * _row_key_product(dp, do, v, b, h, row, col, sizes, D, BLOCK_K, ROWS, COLS, BY_KEYS, TMA)
    # dP of a key that the row does not see may be anything.
    if MASK & MOD_FLAGS:
        ds = tl.where(p == 0.0, 0.0, ds)
    else:
        if _cuts(row, col, sizes, ROWS, COLS):
            ds = tl.where(p == 0.0, 0.0, ds)
    return ds


@triton.jit(do_not_specialize=_COUNTS)
def fused_query_gradient(
    q, k, v, do, keys, keys_tail, dq, dq_tail, lse_ptr, delta_ptr, grad_scale_ptr, scale, scale_log2, keep_scale,
    len_q, len_kv, left, right, heads_q, group, m_tiles, mods,
    MOD_FLAGS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A slice of dQ for a row tile. ``keys``: K, read in slices."""
    sizes = Sizes(len_q, len_kv, left, right, heads_q, group, m_tiles)
    STEP: tl.constexpr = BLOCK_N + TAIL
    SLICES: tl.constexpr = (D + STEP - 1) // STEP
    pid = tl.program_id(0)
    d = (pid % SLICES) * STEP
    row = (m_tiles - 1 - pid // SLICES % m_tiles) * TILE
    head = pid // (SLICES * m_tiles)
    b = head // heads_q
    h = head % heads_q
    dtype: tl.constexpr = _storage_type(dq, TMA).dtype
    grad_scale = 1.0
    if SCALED:
        grad_scale = tl.load(grad_scale_ptr + head // group)
    acc, tail = accumulators(BLOCK_N, TAIL, TILE)
    first, last = _key_strips(row, row + TILE, len_q, len_kv, left, right, STRIP)
    for col in tl.range(first, last, STRIP):
        start = _start(mods, b, h, row, col, sizes, MOD_FLAGS, TILE, STRIP)
        live = True
        if MASK_FIRST & MOD_FLAGS:
            live = _live(start)
        if live:
            ds = _score_gradients(start, q, k, v, do, lse_ptr, delta_ptr, scale_log2, keep_scale, b, h, row, col,
                                  sizes, mods, MOD_FLAGS, True, D, BLOCK_K, TILE, STRIP, False, TMA, TILE)  # fmt: skip
            if SCALED:
                ds *= grad_scale
            acc, tail = multiply(acc, tail, to_storage(ds, dtype, PTX), keys, keys_tail, b, h // group, col, len_kv,
                                  d, D, BLOCK_N, TAIL, STRIP, TMA)  # fmt: skip
    scale /= grad_scale
    lse2 = tl.load(lse_ptr + head.to(tl.int64) * m_tiles * TILE + row + tl.arange(0, TILE))
    # Not only dS of 0 for a row without keys: K may hold a NaN that it must not see.
    empty = (lse2 == float("inf"))[:, None]
    acc, tail = tl.where(empty, 0.0, acc * scale), tl.where(empty, 0.0, tail * scale)
    store_both(dq, dq_tail, acc, tail, b, h, row, len_q, d, D, BLOCK_N, TAIL, TMA, TILE)


@triton.jit(do_not_specialize=_COUNTS)
def fused_key_gradient(
    q, k, v, do, rows_side, rows_side_tail, grad, grad_tail, lse_ptr, delta_ptr, grad_scale_ptr, scale, scale_log2,
    keep_scale, len_q, len_kv, left, right, heads_q, group, m_tiles, mods,
    MOD_FLAGS: tl.constexpr, OF_VALUE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr, STRIP: tl.constexpr, SCALED: tl.constexpr, PTX: tl.constexpr, TMA: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A slice of dK (of dV if OF_VALUE) for a key tile: a sum over the rows of every head of the group, in order.

    ``rows_side``: Q (dO), read in slices. ``v``, ``delta`` and ``grad_scale_ptr`` have no part in dV.
    """
    sizes = Sizes(len_q, len_kv, left, right, heads_q, group, m_tiles)
    STEP: tl.constexpr = BLOCK_N + TAIL
    SLICES: tl.constexpr = (D + STEP - 1) // STEP
    # The first key tile is seen by the most rows: ascending order is longest first.
    pid = tl.program_id(0)
    n_tiles = tl.cdiv(len_kv, TILE)
    d = (pid % SLICES) * STEP
    col = (pid // SLICES % n_tiles) * TILE
    pair = pid // (SLICES * n_tiles)
    heads_kv = heads_q // group
    b = pair // heads_kv
    h_kv = pair % heads_kv
    dtype: tl.constexpr = _storage_type(grad, TMA).dtype
    grad_scale = 1.0
    if SCALED and OF_VALUE:
        grad_scale = P_SCALE
    elif SCALED:
        grad_scale = tl.load(grad_scale_ptr + pair)
    acc, tail = accumulators(BLOCK_N, TAIL, TILE)
    first, last = _row_strips(col, col + TILE, len_q, len_kv, left, right, STRIP)
    per_head = tl.maximum(tl.cdiv(last - first, STRIP), 0)
    for i in tl.range(0, per_head * group):
        h = h_kv * group + i // per_head
        row = first + i % per_head * STRIP
        start = _start(mods, b, h, row, col, sizes, MOD_FLAGS, STRIP, TILE)
        live = True
        if MASK_FIRST & MOD_FLAGS:
            live = _live(start)
        if live:
            if OF_VALUE:
                a = _probabilities(start, q, k, lse_ptr, scale_log2, b, h, row, col, sizes, mods,
                                   MOD_FLAGS, False, D, BLOCK_K, STRIP, TILE, True, TMA, TILE)  # fmt: skip
                if DROPOUT & MOD_FLAGS:
                    rows = row + tl.arange(0, STRIP)
                    a = tl.where(kept(mods, b * heads_q + h, rows, col, STRIP, TILE), a, 0.0)
            else:
                a = _score_gradients(start, q, k, v, do, lse_ptr, delta_ptr, scale_log2, keep_scale, b, h, row, col,
                                     sizes, mods, MOD_FLAGS, True, D, BLOCK_K, STRIP, TILE, True, TMA,
                                     TILE)  # fmt: skip
            if SCALED:
                a *= grad_scale
            acc, tail = multiply(acc, tail, to_storage(a, dtype, PTX).T, rows_side, rows_side_tail, b, h, row, len_q,
                                  d, D, BLOCK_N, TAIL, STRIP, TMA)  # fmt: skip
    scale /= grad_scale
    store_both(grad, grad_tail, acc * scale, tail * scale, b, h_kv, col, len_kv, d, D, BLOCK_N, TAIL, TMA, TILE)


@triton.jit(do_not_specialize=[*_COUNTS, "batches", "mask_batches", "mask_heads"])
def fused_mask_gradient(
    q, k, v, do, dmask_ptr, dmask_stride_b, dmask_stride_h, dmask_stride_q, dmask_stride_k, lse_ptr, delta_ptr,
    scale_log2, keep_scale, len_q, len_kv, left, right, heads_q, group, m_tiles, batches, mask_batches, mask_heads,
    mods,
    MOD_FLAGS: tl.constexpr, ONE_ROW: tl.constexpr, ONE_KEY: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr,
    STRIP: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A [TILE, STRIP] tile of the additive mask's gradient, in the mask's dtype.

    The mask has ``mask_batches`` (1 or ``batches``) and ``mask_heads`` (1 or ``heads_q``); ONE_ROW: it is the same for
    all rows, ONE_KEY: for all keys. What it broadcasts over is summed in float32, batch by batch, head by head, row
    tile by row tile, strip by strip.
    """
    sizes = Sizes(len_q, len_kv, left, right, heads_q, group, m_tiles)
    strips = tl.cdiv(len_kv, STRIP)
    m_programs = m_tiles
    n_programs = strips
    if ONE_ROW:
        m_programs = 1
    if ONE_KEY:
        n_programs = 1
    pid = tl.program_id(0)
    n = pid % n_programs
    m = pid // n_programs % m_programs
    mask_h = pid // (n_programs * m_programs) % mask_heads
    mask_b = pid // (n_programs * m_programs) // mask_heads

    per_head = (m_tiles // m_programs) * (strips // n_programs)
    heads = heads_q // mask_heads
    acc = tl.zeros([TILE, STRIP], tl.float32)
    for i in tl.range(0, (batches // mask_batches) * heads):
        b = mask_b + i // heads
        h = mask_h + i % heads
        for j in tl.range(0, per_head):
            row = (m + j // (strips // n_programs)) * TILE
            col = (n + j % (strips // n_programs)) * STRIP
            first, last = _key_strips(row, row + TILE, len_q, len_kv, left, right, STRIP)
            if (col >= first) & (col < last):
                start = _start(mods, b, h, row, col, sizes, MOD_FLAGS, TILE, STRIP)
                live = True
                if MASK_FIRST & MOD_FLAGS:
                    live = _live(start)
                if live:
                    acc += _score_gradients(start, q, k, v, do, lse_ptr, delta_ptr, scale_log2, keep_scale, b, h,
                                            row, col, sizes, mods, MOD_FLAGS, False, D, BLOCK_K, TILE, STRIP, False,
                                            TMA, TILE)  # fmt: skip
    to = dmask_ptr + mask_b.to(tl.int64) * dmask_stride_b + mask_h.to(tl.int64) * dmask_stride_h
    rows = (m * TILE + tl.arange(0, TILE)).to(tl.int64)
    cols = (n * STRIP + tl.arange(0, STRIP)).to(tl.int64)
    dtype: tl.constexpr = dmask_ptr.dtype.element_ty
    if ONE_ROW and ONE_KEY:
        tl.store(to, tl.sum(tl.sum(acc, 1), 0).to(dtype))
    elif ONE_ROW:
        tl.store(to + cols * dmask_stride_k, tl.sum(acc, 0).to(dtype), mask=cols < len_kv)
    elif ONE_KEY:
        tl.store(to + rows * dmask_stride_q, tl.sum(acc, 1).to(dtype), mask=rows < len_q)
    else:
        to += rows[:, None] * dmask_stride_q + cols[None, :] * dmask_stride_k
        tl.store(to, acc.to(dtype), mask=(rows < len_q)[:, None] & (cols < len_kv)[None, :])
