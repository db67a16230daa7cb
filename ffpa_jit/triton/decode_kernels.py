"""Attention of few query rows: each program reads a part of the keys once, online softmax, one combine.

The query rows of all heads that share a KV head form one tile: row ``i`` is query ``i // group`` of head
``i % group``, so that a tile's rows are neighbours in the sequence and see about the same keys. The keys that a tile
sees, in blocks of ``BLOCK_N``, are dealt evenly to ``splits`` programs. With more than one, a program writes its sum of
``2^(s - m) v``, its row max ``m`` (log2 units) and its sum of ``2^(s - m)`` in float32, and ``combine`` joins them.

Bound by memory: K and V pass once, and what matters is that copies are under way at all times. A block's chain (wait,
scores, maximum, exponential, values) is hidden by a second stage or by other programs on the same SM.

Scores. D is the K dimension of a product with as few as 16 rows, so the warps share D, not the keys (``FOLD``: how many
parts): each multiplies its part of Q and K, and the partial scores are added. Dealt by keys, every warp would read all
of Q.

Values. P is a sum of two numbers of the storage dtype, so that it carries about 16 bits (``PRECISE``): the tensor cores
have the time, and the error is then that of rounding the output.

D is covered by two pieces, powers of two (``W0``, ``W1``).

What is not finite. A hidden key of NaN has a score of -inf, but 0 times a NaN of V is NaN: it reaches the rows of its
block. The registers that a second pass takes are not there.
"""

import triton
import triton.language as tl

from .epilogue import DROPOUT, FLOOR, MASK_ROWS, finish_lse, in_range, kept, modified
from .operands import load_2d


@triton.jit
def _kept_part(mods, lines, rows, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``kept`` for a block that may be half of the 32 keys that one step of the random stream covers."""
    if COLS < 32:
        keep = kept(mods, lines, rows, col // 32 * 32, ROWS, 32).to(tl.int32).reshape([ROWS, 32 // COLS, COLS])
        part = (tl.arange(0, 32 // COLS) == col % 32 // COLS)[None, :, None]
        keep = tl.sum(tl.where(part, keep, 0), 1) != 0
    else:
        keep = kept(mods, lines, rows, col, ROWS, COLS)
    return keep


@triton.jit
def _query_piece(
    q, line, inside, col, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr
):  # fmt: skip
    """Columns from ``col`` of the query rows: [ROWS, WIDTH], or [FOLD, ROWS, WIDTH / FOLD]; zeros outside."""
    cols = col + tl.arange(0, WIDTH)
    x = tl.load(q.ptr + line[:, None] + cols[None, :], mask=inside[:, None] & (cols < D)[None, :], other=0.0)
    if FOLD > 1 and WIDTH >= 16 * FOLD:
        x = x.reshape([ROWS, FOLD, WIDTH // FOLD]).permute(1, 0, 2)
    return x


@triton.jit
def _scores(folded, plain, x, k, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, FOLD: tl.constexpr):
    """Add the products of a piece of the queries with the same columns of K to one of two sums.

    ``folded``: [FOLD, ROWS, BLOCK_N]; ``plain``: [ROWS, BLOCK_N], for pieces too narrow to be folded.
    """
    if FOLD > 1 and WIDTH >= 16 * FOLD:
        folded = tl.dot(x, k.reshape([BLOCK_N, FOLD, WIDTH // FOLD]).permute(1, 2, 0), folded)
    else:
        plain = tl.dot(x, k.T, plain)
    return folded, plain


@triton.jit
def _add_values(acc, correction, high, low, v, PRECISE: tl.constexpr):
    acc = tl.dot(high, v, acc * correction[:, None])
    if PRECISE:
        acc = tl.dot(low, v, acc)
    return acc


@triton.jit
def _store_piece(
    out, line, inside, col, acc, SPLIT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A piece of the output or of the partial sums; ``line`` is where a row begins."""
    cols = col + tl.arange(0, WIDTH)
    at = line[:, None] + cols[None, :]
    visible = inside[:, None] & (cols < D)[None, :]
    if SPLIT:
        tl.store(out + at, acc, mask=visible)
    else:
        tl.store(out.ptr + at, acc.to(out.ptr.dtype.element_ty), mask=visible)


@triton.jit
def part_of(
    pid, len_q, len_kv, group, row_tiles, splits, left, right, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(row tile, part, unit, first key, end of the keys) of a program; the keys are whole blocks."""
    tile = pid % row_tiles
    split = pid // row_tiles % splits
    unit = pid // row_tiles // splits
    offset = len_kv - len_q
    # What the tile's first row sees first and its last row sees last.
    first = max(tile * ROWS // group + offset - left, 0) // BLOCK_N
    last = (min(tile * ROWS + ROWS, len_q * group) - 1) // group
    end = (min(last + offset + right + 1, len_kv) + BLOCK_N - 1) // BLOCK_N
    blocks = max(end - first, 0).to(tl.int64)
    begin = (first + blocks * split // splits).to(tl.int32) * BLOCK_N
    stop = (first + blocks * (split + 1) // splits).to(tl.int32) * BLOCK_N
    return tile, split, unit, begin, stop


_VARYING = [
    "row_max_ptr", "sum_ptr", "mods", "keep_scale", "len_q", "len_kv", "heads_kv", "group", "row_tiles", "splits",
    "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def attend(
    q, k0, k1, v0, v1, out, partial, row_max_ptr, sum_ptr, lse_ptr, mods, scale_log2, keep_scale,
    len_q, len_kv, heads_kv, group, row_tiles, splits, left, right,
    D: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    FOLD: tl.constexpr, PRECISE: tl.constexpr, SPLIT: tl.constexpr, MOD_FLAGS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one tile of query rows.

    Row tiles of the same keys are neighbours, so that all but the first find them in L2. ``SPLIT``: writes ``partial``
    [B * Hkv, splits, group * Nq, D] and the two statistics [B * Hkv, splits, group * Nq]; else ``out`` and ``lse``.
    """
    tile, split, unit, begin, stop = part_of(
        tl.program_id(0), len_q, len_kv, group, row_tiles, splits, left, right, ROWS, BLOCK_N
    )
    b = unit // heads_kv
    h_kv = unit % heads_kv
    n_rows = len_q * group
    i = tile * ROWS + tl.arange(0, ROWS)
    inside = i < n_rows
    rows = i // group
    h = h_kv * group + i % group
    offset = len_kv - len_q
    low = tl.maximum(rows + offset - left, 0)[:, None]
    high = tl.minimum(rows + offset + right + 1, len_kv)[:, None]

    line = (b.to(tl.int64) * q.stride_b + h.to(tl.int64) * q.stride_h + rows.to(tl.int64) * q.stride_n) * 8
    x0 = _query_piece(q, line, inside, 0, D, ROWS, W0, FOLD)
    acc0 = tl.zeros([ROWS, W0], tl.float32)
    x1 = _query_piece(q, line, inside, W0, D, ROWS, W1, FOLD)
    acc1 = tl.zeros([ROWS, W1], tl.float32)
    m = tl.full([ROWS], FLOOR, tl.float32)  # not -inf: rows that see nothing must not subtract it from itself
    row_sum = tl.zeros([ROWS], tl.float32)
    dtype: tl.constexpr = q.ptr.dtype.element_ty

    for col in tl.range(begin, stop, BLOCK_N):
        folded = tl.zeros([FOLD, ROWS, BLOCK_N], tl.float32)
        s = tl.zeros([ROWS, BLOCK_N], tl.float32)
        k = load_2d(k0, b, h_kv, col, 0, len_kv, D, BLOCK_N, W0, TMA)
        folded, s = _scores(folded, s, x0, k, BLOCK_N, W0, FOLD)
        k = load_2d(k1, b, h_kv, col, W0, len_kv, D, BLOCK_N, W1, TMA)
        folded, s = _scores(folded, s, x1, k, BLOCK_N, W1, FOLD)
        if FOLD > 1:
            s += tl.sum(folded, 0)
        cols = col + tl.arange(0, BLOCK_N)
        if MASK_ROWS & MOD_FLAGS:
            s = modified(s * scale_log2, mods, b, h, rows, cols, len_q, len_kv, MOD_FLAGS)
        else:
            s = modified(s * scale_log2, mods, b, h_kv * 0, rows, cols, len_q, len_kv, MOD_FLAGS)
        s = in_range(s, cols, low, high)
        new_max = tl.maximum(m, tl.max(s, 1))
        correction = tl.exp2(m - new_max)
        p = tl.exp2(s - new_max[:, None])
        row_sum = row_sum * correction + tl.sum(p, 1)
        m = new_max
        if DROPOUT & MOD_FLAGS:
            lines = b * (heads_kv * group) + h
            p = tl.where(_kept_part(mods, lines, rows, col, ROWS, BLOCK_N), p, 0.0)
        p_high = p.to(dtype)
        p_low = (p - p_high.to(tl.float32)).to(dtype)
        v = load_2d(v0, b, h_kv, col, 0, len_kv, D, BLOCK_N, W0, TMA)
        acc0 = _add_values(acc0, correction, p_high, p_low, v, PRECISE)
        v = load_2d(v1, b, h_kv, col, W0, len_kv, D, BLOCK_N, W1, TMA)
        acc1 = _add_values(acc1, correction, p_high, p_low, v, PRECISE)

    if SPLIT:
        row = (unit.to(tl.int64) * splits + split) * n_rows + i
        tl.store(row_max_ptr + row, m, mask=inside)
        tl.store(sum_ptr + row, row_sum, mask=inside)
        target = partial
        line = row * D
    else:
        inverse_sum = tl.where(row_sum > 0.0, keep_scale / row_sum, tl.where(row_sum == 0.0, 0.0, row_sum))[:, None]
        # Not only a factor of 0: V may hold what such a row must not see.
        acc0 = tl.where(inverse_sum == 0.0, 0.0, acc0 * inverse_sum)
        acc1 = tl.where(inverse_sum == 0.0, 0.0, acc1 * inverse_sum)
        row = (b.to(tl.int64) * (heads_kv * group) + h) * len_q + rows
        tl.store(lse_ptr + row, finish_lse(m, row_sum), mask=inside)
        target = out
        line = (b.to(tl.int64) * out.stride_b + h.to(tl.int64) * out.stride_h + rows.to(tl.int64) * out.stride_n) * 8
    _store_piece(target, line, inside, 0, acc0, SPLIT, D, W0)
    _store_piece(target, line, inside, W0, acc1, SPLIT, D, W1)


@triton.jit(
    do_not_specialize=["row_max_ptr", "sum_ptr", "keep_scale", "len_q", "heads_kv", "group", "splits"]
)  # fmt: skip
def combine(
    out, partial, row_max_ptr, sum_ptr, lse_ptr, keep_scale, len_q, heads_kv, group, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row, ``BLOCK_D`` columns: ``O = sum_t 2^(m_t - m) O_t / sum_t 2^(m_t - m) l_t``."""
    PIECES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    piece = pid % PIECES
    n_rows = len_q * group
    i = pid // PIECES % n_rows
    unit = pid // PIECES // n_rows
    cols = piece * BLOCK_D + tl.arange(0, BLOCK_D)
    start = unit.to(tl.int64) * splits * n_rows + i

    m = tl.full([CHUNK], FLOOR, tl.float32)
    row_sum = tl.zeros([CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for t in tl.range(0, splits, CHUNK):
        parts = t + tl.arange(0, CHUNK)
        there = parts < splits
        line = start + parts.to(tl.int64) * n_rows
        row_max = tl.load(row_max_ptr + line, mask=there, other=FLOOR)
        part_sum = tl.load(sum_ptr + line, mask=there, other=0.0)
        # A part without keys has no say, whatever its values hold.
        inside = (part_sum != 0.0)[:, None] & (cols < D)[None, :]
        part = tl.load(partial + line[:, None] * D + cols[None, :], mask=inside, other=0.0)
        new_max = tl.maximum(m, row_max)
        before, here = tl.exp2(m - new_max), tl.exp2(row_max - new_max)
        row_sum = row_sum * before + part_sum * here
        acc = acc * before[:, None] + part * here[:, None]
        m = new_max
    new_max = tl.max(m, 0)
    weight = tl.exp2(m - new_max)
    row_sum = tl.sum(row_sum * weight, 0)
    inverse_sum = tl.where(row_sum > 0.0, keep_scale / row_sum, tl.where(row_sum == 0.0, 0.0, row_sum))
    y = tl.sum(acc * weight[:, None], 0) * inverse_sum
    b = unit // heads_kv
    h = unit % heads_kv * group + i % group
    row = i // group
    line = (b.to(tl.int64) * out.stride_b + h.to(tl.int64) * out.stride_h + row.to(tl.int64) * out.stride_n) * 8
    tl.store(out.ptr + line + cols, y.to(out.ptr.dtype.element_ty), mask=cols < D)
    if piece == 0:
        at = (b.to(tl.int64) * (heads_kv * group) + h) * len_q + row
        tl.store(lse_ptr + at, finish_lse(new_max, row_sum))
