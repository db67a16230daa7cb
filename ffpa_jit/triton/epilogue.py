"""Between a product of query and key and a probability: softcap, masks, ranges, dropout. Written once, for all kernels.

Scores are kept in log2 units: ``s = scale * log2(e) * q.k``. Every kernel takes ``mods``, a tuple of what the options
need at run time, and ``MODS``, bits that say which options there are (``terms.Terms.device`` makes both)::

    mods = (mask pointer (bytes of a boolean one), its strides over batch, head, query, key, softcap in log2 units,
            rng pointer, drop threshold, 1 / scale), the integers as ``plain`` reads them

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
def plain(n):
    """An integer of a tuple as it was given to ``terms.opaque``."""
    return (n - 3) >> 1


@triton.jit
def capped(s, mods, MODS: tl.constexpr):
    """``softcap * tanh(s / softcap)``, in log2 units."""
    if SOFTCAP & MODS:
        x = s / mods[5]
        square = x * x
        # The exponential form loses the digits of small arguments, the series those of large ones.
        series = x * (1.0 - square * (0.3333333333333333 - square * 0.13333333333333333))
        large = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
        s = tl.where(tl.abs(x) < 0.1, series, large) * mods[5]
    return s


@triton.jit
def mask_values(mods, b, h, rows, cols, len_q, len_kv, MODS: tl.constexpr):
    """The mask at (rows, cols): [ROWS, COLS], or [1, COLS] where it is the same for all rows.

    ``h``: a head, or one for each row. Outside the problem: not visible, or 0 for an additive mask.
    """
    UNIT: tl.constexpr = (16 if MASK_BOOL & MODS else 8) if MASK_ALIGNED & MODS else 1
    line = b.to(tl.int64) * plain(mods[1]) + h.to(tl.int64) * plain(mods[2])
    inside = (cols < len_kv)[None, :]
    if MASK_ROWS & MODS:
        line = (line + rows.to(tl.int64) * plain(mods[3]))[:, None]
        inside = inside & (rows < len_q)[:, None]
    if MASK_UNIT & MODS:
        at = (mods[0] + line * UNIT) + cols[None, :]
        if MASK_ALIGNED & MODS:
            # Of an argument that is not specialised the compiler knows no alignment: without it, a load an element.
            at = tl.max_contiguous(tl.multiple_of(at, [1, 16]), [1, UNIT])
    else:
        at = (mods[0] + line) + (cols.to(tl.int64) * plain(mods[4]))[None, :]
    if MASK_BOOL & MODS:
        # Widened before it is compared: the compiler then changes the layout of bytes, not of what is made of them.
        values = tl.load(at, mask=inside, other=0).to(tl.int32) != 0
    else:
        values = tl.load(at, mask=inside, other=0.0)
    return values


@triton.jit
def masked(s, mods, b, h, rows, cols, len_q, len_kv, MODS: tl.constexpr):
    """``s`` under the attention mask, if there is one: -inf where it hides a key."""
    if MASK_BOOL & MODS:
        s = tl.where(mask_values(mods, b, h, rows, cols, len_q, len_kv, MODS), s, float("-inf"))
    if MASK_ADD & MODS:
        bias = mask_values(mods, b, h, rows, cols, len_q, len_kv, MODS).to(tl.float32)
        s += bias * LOG2E
        # -inf stays, what was finite and is lower than FLOOR does not. (A maximum would hide a NaN.)
        s = tl.where((s < FLOOR) & (bias > float("-inf")), FLOOR, s)
    return s


@triton.jit
def mask_start(mods, b, h, rows, cols, len_q, len_kv, MODS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """What the accumulator of ``q.k`` starts with under MASK_FIRST: the mask, in units of unscaled scores.

    Beside finished scores a tile of the mask does not fit the registers of one warpgroup; before the product nothing
    else is there. Not with a softcap, which comes before the mask, nor with a scale that is not positive.
    """
    values = mask_values(mods, b, h, rows, cols, len_q, len_kv, MODS)
    if MASK_BOOL & MODS:
        start = tl.where(values, 0.0, float("-inf"))
    else:
        start = values.to(tl.float32)
        start = tl.where((start < FLOOR) & (start > float("-inf")), FLOOR, start) * mods[8]
    return tl.broadcast_to(start, [ROWS, COLS])


@triton.jit
def floored(s, MODS: tl.constexpr):
    """Scores that started with a mask: what is finite and about FLOOR or lower becomes FLOOR."""
    if MASK_ADD & MODS:
        s = tl.where((s < FLOOR * 0.99) & (s > float("-inf")), FLOOR, s)
    return s


@triton.jit
def modified(s, mods, b, h, rows, cols, len_q, len_kv, MODS: tl.constexpr):
    """Scores with softcap and attention mask, before the visible range of each row is cut (``in_range``).

    ``rows``, ``cols``: indices within the sequence, 1-D. ``h``: a query head, or one for each row.
    """
    return masked(capped(s, mods, MODS), mods, b, h, rows, cols, len_q, len_kv, MODS)


@triton.jit
def in_range(s, cols, low, high):
    """-inf outside of ``low <= key < high``; the limits are scalars or [ROWS, 1]."""
    return tl.where((cols[None, :] >= low) & (cols[None, :] < high), s, float("-inf"))


@triton.jit
def slope_at(s, mods):
    """Derivative of the softcap, ``1 - tanh^2``, where its result (before a mask is added) is ``s``."""
    t = s / mods[5]
    return tl.maximum(1.0 - t * t, 0.0)


@triton.jit
def slope(p, lse2, mods):
    """``slope_at``, got back from the probability where no additive mask is in it: keeping the scores would spill."""
    s = tl.log2(p) + lse2[:, None]
    t = tl.where(p > 0.0, s / mods[5], 1.0)
    return tl.maximum(1.0 - t * t, 0.0)


@triton.jit
def finish_lse(highest, total):
    """LSE, natural, from the highest reference of a row (log2 units) and the sum of ``2^(s - reference)``.

    -inf for a row without keys; the encoding above for a row of "minimum" scores.
    """
    encoded = MINIMUM_LSE * (1.0 + tl.minimum(total, 8388607.0) * 1.1920928955078125e-07)
    lse = tl.where(highest <= FLOOR, encoded, (highest + tl.log2(total)) * LN2)
    return tl.where(total == 0.0, float("-inf"), lse)


@triton.jit
def lse_to_log2(lse):
    """What ``probability`` takes: LSE in log2 units, +inf for rows without keys, encoded ones as they are."""
    return tl.where(lse == float("-inf"), float("inf"), tl.where(lse <= MINIMUM_LSE, lse, lse * LOG2E))


@triton.jit
def probability(s, lse2, MODS: tl.constexpr):
    """``2^(s - lse)`` of finished scores, rows of "minimum" included."""
    if MASK_ADD & MODS:
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
    seed, offset = tl.load(mods[6]), tl.load(mods[6] + 1)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32) ^ (offset >> 32).to(tl.uint32)
    calls = (col // 32) * 4 + tl.arange(0, COLS // 8)
    blank = tl.zeros([ROWS, COLS // 8], tl.uint32)
    c0 = blank + calls.to(tl.uint32)[None, :]
    c1 = blank + rows.to(tl.uint32)[:, None]
    c2 = blank + ((lines + rows * 0).to(tl.uint32))[:, None]
    c3 = blank + offset.to(tl.uint32)
    w0, w1, w2, w3 = _philox(c0, c1, c2, c3, k0, k1)
    limit = plain(mods[7]).to(tl.uint32)
    # Call 4 a + j holds the keys 32 a + 8 w + 2 j + e: word w, half e (the low one for even keys).
    even = tl.join(tl.join(w0 & 0xFFFF, w2 & 0xFFFF), tl.join(w1 & 0xFFFF, w3 & 0xFFFF)) >= limit
    odd = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16)) >= limit
    both = tl.join(even, odd)  # [ROWS, calls, low bit's partner, ...]: see the permutation
    both = both.reshape([ROWS, COLS // 32, 4, 2, 2, 2])
    return both.permute(0, 1, 3, 4, 2, 5).reshape([ROWS, COLS])
