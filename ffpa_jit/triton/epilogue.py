"""Between a product of query and key and a probability: softcap, masks, ranges, dropout. Written once, for all kernels.

Scores are kept in log2 units: ``s = scale * log2(e) * q.k``. Every kernel takes ``mods`` (``params.ScoreMods``), what
the options need at run time, and ``MOD_FLAGS``, bits that say which there are (``terms.Terms.modifiers`` makes both).

Order, as in PyTorch's SDPA and in FlashAttention: scale, softcap, additive mask, then -inf for what is not visible.

Rows of "minimum". A mask may hold finite values so low that a row's scores all round to one number (``finfo.min`` of
bf16 or fp32), and SDPA then weighs the row's keys equally. Scores are cut off at ``FLOOR`` = -1e30, which makes them
equal. The LSE of such a row would lose the number of its keys to rounding, and the backward needs it: it is written as
``-2^100 * (1 + keys * 2^-23)``, which holds up to eight million keys exactly and is as good as any number that low.

Dropout. The stream is documented in ``cuda_src/dropout.cuh``: one Philox call serves eight keys of a row.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)

MASK_BOOL = tl.constexpr(1)
"""There is a boolean mask."""
MASK_ADD = tl.constexpr(2)
"""There is an additive mask."""
MASK = tl.constexpr(3)
MASK_ROWS = tl.constexpr(4)
"""The mask differs between query rows; else one line serves them all."""
MASK_UNIT = tl.constexpr(8)
"""Neighbouring keys are neighbours in the mask's memory."""
MASK_ALIGNED = tl.constexpr(16)
"""MASK_UNIT, and lines begin at 16 bytes: strides count units of 16 elements (bool) or 8."""
SOFTCAP = tl.constexpr(32)
DROPOUT = tl.constexpr(64)
MASK_FIRST = tl.constexpr(128)
"""The mask goes into the accumulator of the scores before the product does, see ``mask_start``."""

FLOOR = tl.constexpr(-1e30)
MINIMUM_LSE = tl.constexpr(-1.2676506002282294e30)
"""-2^100"""


@triton.jit
def decode_unspecialized(n):
    """An integer of a tuple as it was given to ``terms.encode_unspecialized``."""
    return (n - 3) >> 1


@triton.jit
def capped(s, mods, MOD_FLAGS: tl.constexpr):
    """``softcap * tanh(s / softcap)``, in log2 units."""
    if SOFTCAP & MOD_FLAGS:
        x = s / mods.softcap
        square = x * x
        # The exponential form loses the digits of small arguments, the series those of large ones.
        series = x * (1.0 - square * (0.3333333333333333 - square * 0.13333333333333333))
        large = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
        s = tl.where(tl.abs(x) < 0.1, series, large) * mods.softcap
    return s


@triton.jit
def mask_values(mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS: tl.constexpr):
    """The mask at (rows, cols): [ROWS, COLS], or [1, COLS] where it is the same for all rows.

    ``h``: a head, or one for each row. Outside the problem: not visible, or 0 for an additive mask.
    """
    UNIT: tl.constexpr = (16 if MASK_BOOL & MOD_FLAGS else 8) if MASK_ALIGNED & MOD_FLAGS else 1
    line = b.to(tl.int64) * decode_unspecialized(mods.mask_stride_b)
    line = line + h.to(tl.int64) * decode_unspecialized(mods.mask_stride_h)
    inside = (cols < len_kv)[None, :]
    if MASK_ROWS & MOD_FLAGS:
        line = (line + rows.to(tl.int64) * decode_unspecialized(mods.mask_stride_q))[:, None]
        inside = inside & (rows < len_q)[:, None]
    if MASK_UNIT & MOD_FLAGS:
        at = (mods.mask + line * UNIT) + cols[None, :]
        if MASK_ALIGNED & MOD_FLAGS:
            # Of an argument that is not specialised the compiler knows no alignment: without it, a load an element.
            at = tl.max_contiguous(tl.multiple_of(at, [1, 16]), [1, UNIT])
    else:
        at = (mods.mask + line) + (cols.to(tl.int64) * decode_unspecialized(mods.mask_stride_k))[None, :]
    if MASK_BOOL & MOD_FLAGS:
        # Widened before it is compared: the compiler then changes the layout of bytes, not of what is made of them.
        values = tl.load(at, mask=inside, other=0).to(tl.int32) != 0
    else:
        values = tl.load(at, mask=inside, other=0.0)
    return values


@triton.jit
def masked(s, mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS: tl.constexpr):
    """``s`` under the attention mask, if there is one: -inf where it hides a key."""
    if MASK_BOOL & MOD_FLAGS:
        s = tl.where(mask_values(mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS), s, float("-inf"))
    if MASK_ADD & MOD_FLAGS:
        bias = mask_values(mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS).to(tl.float32)
        s += bias * LOG2E
        # -inf stays, what was finite and is lower than FLOOR does not. (A maximum would hide a NaN.)
        s = tl.where((s < FLOOR) & (bias > float("-inf")), FLOOR, s)
    return s


@triton.jit
def mask_start(mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """What the accumulator of ``q.k`` starts with under MASK_FIRST: the mask, in units of unscaled scores.

    Beside finished scores a tile of the mask does not fit the registers of one warpgroup; before the product nothing
    else is there. Not with a softcap, which comes before the mask, nor with a scale that is not positive.
    """
    values = mask_values(mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS)
    if MASK_BOOL & MOD_FLAGS:
        start = tl.where(values, 0.0, float("-inf"))
    else:
        start = values.to(tl.float32)
        start = tl.where((start < FLOOR) & (start > float("-inf")), FLOOR, start) * mods.inverse_scale
    return tl.broadcast_to(start, [ROWS, COLS])


@triton.jit
def floored(s, MOD_FLAGS: tl.constexpr):
    """Scores that started with a mask: what is finite and about FLOOR or lower becomes FLOOR."""
    if MASK_ADD & MOD_FLAGS:
        s = tl.where((s < FLOOR * 0.99) & (s > float("-inf")), FLOOR, s)
    return s


@triton.jit
def modified(s, mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS: tl.constexpr):
    """Scores with softcap and attention mask, before the visible range of each row is cut (``in_range``).

    ``rows``, ``cols``: indices within the sequence, 1-D. ``h``: a query head, or one for each row.
    """
    return masked(capped(s, mods, MOD_FLAGS), mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS)


@triton.jit
def in_range(s, cols, low, high):
    """-inf outside of ``low <= key < high``; the limits are scalars or [ROWS, 1]."""
    return tl.where((cols[None, :] >= low) & (cols[None, :] < high), s, float("-inf"))


@triton.jit
def slope_at(s, mods):
    """Derivative of the softcap, ``1 - tanh^2``, where its result (before a mask is added) is ``s``."""
    t = s / mods.softcap
    return tl.maximum(1.0 - t * t, 0.0)


@triton.jit
def slope(p, lse2, mods):
    """``slope_at``, got back from the probability where no additive mask is in it: keeping the scores would spill."""
    s = tl.log2(p) + lse2[:, None]
    t = tl.where(p > 0.0, s / mods.softcap, 1.0)
    return tl.maximum(1.0 - t * t, 0.0)


@triton.jit
def finish_lse(row_max, row_sum):
    """LSE, natural, from the row max (log2 units) and the sum of ``2^(s - row_max)``.

    -inf for a row without keys; the encoding above for a row of "minimum" scores.
    """
    encoded = MINIMUM_LSE * (1.0 + tl.minimum(row_sum, 8388607.0) * 1.1920928955078125e-07)
    lse = tl.where(row_max <= FLOOR, encoded, (row_max + tl.log2(row_sum)) * LN2)
    # A sum of NaN makes the LSE one, whatever the maximum (which passes over NaN, as the minimum above does).
    return tl.where(row_sum == row_sum, tl.where(row_sum == 0.0, float("-inf"), lse), row_sum)


@triton.jit
def lse_to_log2(lse):
    """What ``probability`` takes: LSE in log2 units, +inf for rows without keys, encoded ones as they are.

    NaN becomes FLOOR: the P of what the row sees is then infinite or NaN, and that of what it does not see is still 0.
    """
    finite = tl.where(lse == float("-inf"), float("inf"), tl.where(lse <= MINIMUM_LSE, lse, lse * LOG2E))
    return tl.where(lse == lse, finite, FLOOR)


@triton.jit
def probability(s, lse2, MOD_FLAGS: tl.constexpr):
    """``2^(s - lse)`` of finished scores, rows of "minimum" included."""
    if MASK_ADD & MOD_FLAGS:
        low = lse2 <= MINIMUM_LSE
        keys = (lse2 / MINIMUM_LSE - 1.0) * 8388608.0
        lse2 = tl.where(low, tl.log2(keys), lse2)
        s = tl.where(low[:, None] & (s > float("-inf")), 0.0, s)
    return tl.exp2(s - lse2[:, None])


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 on uint32 counters."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, tl.full([], 0xD2511F53, tl.uint32)), c0 * tl.full([], 0xD2511F53, tl.uint32)
        high1, low1 = tl.umulhi(c2, tl.full([], 0xCD9E8D57, tl.uint32)), c2 * tl.full([], 0xCD9E8D57, tl.uint32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def kept(mods, lines, rows, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Which elements dropout keeps, [ROWS, COLS] of int1.

    ``lines``: batch * Hq + head, a scalar or [ROWS]. ``rows``: query indices [ROWS]. ``col``: the first key, a multiple
    of 32; COLS is one as well.
    """
    seed, offset = tl.load(mods.rng), tl.load(mods.rng + 1)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32) ^ (offset >> 32).to(tl.uint32)
    calls = (col // 32) * 4 + tl.arange(0, COLS // 8)
    blank = tl.zeros([ROWS, COLS // 8], tl.uint32)
    c0 = blank + calls.to(tl.uint32)[None, :]
    c1 = blank + rows.to(tl.uint32)[:, None]
    c2 = blank + ((lines + rows * 0).to(tl.uint32))[:, None]
    c3 = blank + offset.to(tl.uint32)
    w0, w1, w2, w3 = _philox(c0, c1, c2, c3, k0, k1)
    limit = decode_unspecialized(mods.drop_threshold).to(tl.uint32)
    # Call 4 a + j holds the keys 32 a + 8 w + 2 j + e: word w, half e (the low one for even keys).
    even = tl.join(tl.join(w0 & 0xFFFF, w2 & 0xFFFF), tl.join(w1 & 0xFFFF, w3 & 0xFFFF)) >= limit
    odd = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16)) >= limit
    both = tl.join(even, odd)  # [ROWS, calls, low bit's partner, ...]: see the permutation
    both = both.reshape([ROWS, COLS // 32, 4, 2, 2, 2])
    return both.permute(0, 1, 3, 4, 2, 5).reshape([ROWS, COLS])
