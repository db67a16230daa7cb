"""The value phase: GEMMs over stored tiles. It knows tiles and ranges, nothing of masks or softmax.

    forward    O  = P V / l
    backward   dQ = dS K * scale        dK = dS^T Q * scale        dV = P^T dO

A program owns ``TILE`` output rows and ``BLOCK_N + TAIL`` output columns. TAIL is a second accumulator beside the
first one: head dims such as 320 = 256 + 64 have no power-of-two tile, and two narrow tiles would read P twice.

The backward's three GEMMs are one launch. Their programs differ in length (a causal row block sees between one and
all tiles, a GQA key block sums over the whole group), and one launch over all of them, longest first, fills the GPU
where three launches would each leave a tail. Where the key side has too few programs the contraction is split and
the float32 partial sums are added in a fixed order by ``rows.reduce_partials``.

What is not finite. P and dS are exactly 0 where a row does not see a key, but 0 times NaN is NaN. Under an attention
mask or a window a program that finds a NaN in its sums therefore takes them again, in two more passes: rows that weigh
something not finite keep what they got, for the others it counts as 0. The check is 128 comparisons a thread, of a
program that may have nine steps, and the passes take registers, so causal calls without options go without: there a
NaN reaches the rows of its own tile.
"""

import triton
import triton.language as tl

from .epilogue import MASK
from .geometry import LOCAL, key_span, narrowed, row_span, slot_of
from .mask_tiles import key_line, row_line
from .operands import load_2d, load_tile, store_2d
from .params import Block, KeySteps, KeyTile, Place

_COUNTS = [
    "block_mask", "len_q", "len_kv", "row_first", "col_first", "head_first", "heads_q", "group", "m_tiles", "n_tiles",
    "slots", "heads", "offset", "left", "right", "width",
]  # fmt: skip


@triton.jit
def multiply(
    acc, tail, a, y, y_tail, b, h, row, n_rows, d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One step of either contraction: ``A [TILE, BLOCK_K]`` times BLOCK_K rows of Y."""
    acc = tl.dot(a, load_2d(y, b, h, row, d, n_rows, D, BLOCK_K, BLOCK_N, TMA), acc)
    if TAIL > 0:
        tail = tl.dot(a, load_2d(y_tail, b, h, row, d + BLOCK_N, n_rows, D, BLOCK_K, TAIL, TMA), tail)
    return acc, tail


@triton.jit
def accumulators(BLOCK_N: tl.constexpr, TAIL: tl.constexpr, TILE: tl.constexpr):
    return tl.zeros([TILE, BLOCK_N], tl.float32), tl.zeros([TILE, TAIL if TAIL > 0 else 16], tl.float32)


@triton.jit
def store_both(
    x, x_tail, acc, tail, b, h, row, n_rows, d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    store_2d(x, b, h, row, d, n_rows, acc, D, TILE, BLOCK_N, TMA)
    if TAIL > 0:
        store_2d(x_tail, b, h, row, d + BLOCK_N, n_rows, tail, D, TILE, TAIL, TMA)


@triton.jit
def _has_nan(acc, tail, TAIL: tl.constexpr):
    bad = tl.max(tl.max((acc != acc).to(tl.int32), 1), 0)
    if TAIL > 0:
        bad |= tl.max(tl.max((tail != tail).to(tl.int32), 1), 0)
    return bad > 0


@triton.jit
def sees_nonfinite(
    a, y, y_tail, b, h, row, n_rows, d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Which rows of ``A [TILE, BLOCK_K]`` weigh a row of Y that has something not finite, [TILE] of int32."""
    part = load_2d(y, b, h, row, d, n_rows, D, BLOCK_K, BLOCK_N, TMA).to(tl.float32)
    bad = tl.max((part - part != 0.0).to(tl.int32), 1)
    if TAIL > 0:
        part = load_2d(y_tail, b, h, row, d + BLOCK_N, n_rows, D, BLOCK_K, TAIL, TMA).to(tl.float32)
        bad |= tl.max((part - part != 0.0).to(tl.int32), 1)
    return tl.max(((a != 0.0) & (bad != 0)[None, :]).to(tl.int32), 1)


@triton.jit
def _finite(y):
    """``y`` with 0 for what is not finite."""
    x = y.to(tl.float32)
    return tl.where(x - x == 0.0, y, tl.zeros_like(y))


@triton.jit
def multiply_finite(
    acc, tail, a, y, y_tail, b, h, row, n_rows, d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``multiply``, with 0 for what is not finite in Y."""
    acc = tl.dot(a, _finite(load_2d(y, b, h, row, d, n_rows, D, BLOCK_K, BLOCK_N, TMA)), acc)
    if TAIL > 0:
        part = _finite(load_2d(y_tail, b, h, row, d + BLOCK_N, n_rows, D, BLOCK_K, TAIL, TMA))
        tail = tl.dot(a, part, tail)
    return acc, tail


@triton.jit
def _row_side(
    pid, a_tiles, y, y_tail, len_kv, place, block, block_mask,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, MASK_MODE: tl.constexpr,
    MOD_FLAGS: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``A Y`` for the row tile that program ``pid`` owns: O from P and V, or dQ from dS and K.

    Returns the accumulators and where they belong: slot of the row tile among the block's, batch, head, row, column.
    """
    STEP: tl.constexpr = BLOCK_N + TAIL
    D_TILES: tl.constexpr = (D + STEP - 1) // STEP
    # Longest rows first: under a causal mask the last row tile sees the most keys.
    m_tile = block.m_tiles - 1 - pid // (place.heads * D_TILES)
    z = (pid % (place.heads * D_TILES)) // D_TILES
    d = (pid % D_TILES) * STEP
    b = (place.head_first + z) // place.heads_q
    h = (place.head_first + z) % place.heads_q
    low, end = row_span(m_tile, block, MASK_MODE, TILE)
    if MASK & MOD_FLAGS:
        line = row_line(block_mask, b, h, place.row_first // TILE + m_tile, MOD_FLAGS)
        low, end = narrowed(low, end, block_mask.row_spans, line, place.col_first // TILE)
    start = z * place.slots + slot_of(m_tile, 0, block, MASK_MODE, TILE)
    acc, tail = accumulators(BLOCK_N, TAIL, TILE)
    for k in tl.range(low * TILE, end * TILE, BLOCK_K):
        a = load_tile(a_tiles, (start + k // TILE) * TILE, k % TILE, TILE, BLOCK_K, TILE, TMA)
        acc, tail = multiply(acc, tail, a, y, y_tail, b, h // place.group, place.col_first + k, len_kv, d,
                              D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
    if (MASK & MOD_FLAGS) or MASK_MODE == LOCAL:  # noqa: SIM102 (one is the compiler's, the other the program's)
        if _has_nan(acc, tail, TAIL):
            seen = tl.zeros([TILE], tl.int32)
            for k in tl.range(low * TILE, end * TILE, BLOCK_K, num_stages=1):
                a = load_tile(a_tiles, (start + k // TILE) * TILE, k % TILE, TILE, BLOCK_K, TILE, TMA)
                seen |= sees_nonfinite(a, y, y_tail, b, h // place.group, place.col_first + k, len_kv, d,
                                       D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
            keep = (seen != 0)[:, None]
            acc, tail = tl.where(keep, acc, 0.0), tl.where(keep, tail, 0.0)
            for k in tl.range(low * TILE, end * TILE, BLOCK_K, num_stages=1):
                a = load_tile(a_tiles, (start + k // TILE) * TILE, k % TILE, TILE, BLOCK_K, TILE, TMA)
                a = tl.where(keep, tl.zeros_like(a), a)
                acc, tail = multiply_finite(acc, tail, a, y, y_tail, b, h // place.group, place.col_first + k, len_kv,
                                            d, D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
    return acc, tail, z * block.m_tiles + m_tile, b, h, place.row_first + m_tile * TILE, d


@triton.jit(do_not_specialize=_COUNTS)
def value_forward(
    p_tiles, v, v_tail, out, out_tail, inverse_sum_ptr, block_mask, len_q, len_kv,
    row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset, left, right, width,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, MASK_MODE: tl.constexpr,
    MOD_FLAGS: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """O of a block: rows ``[row_first, row_first + m_tiles * TILE)`` of ``heads`` heads."""
    place = Place(row_first, col_first, head_first, heads_q, group, slots, heads)
    block = Block(m_tiles, n_tiles, offset, left, right, width)
    acc, tail, tile, b, h, row, d = _row_side(tl.program_id(0), p_tiles, v, v_tail, len_kv, place, block, block_mask,
                                              D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, MOD_FLAGS, TMA, TILE)  # fmt: skip
    inverse = tl.load(inverse_sum_ptr + tile * TILE + tl.arange(0, TILE))[:, None]
    store_both(out, out_tail, acc * inverse, tail * inverse, b, h, row, len_q, d, D, BLOCK_N, TAIL, TMA, TILE)


@triton.jit
def _store_sum(sum_ptr, x, d, previous, D: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr):
    """Store a float32 [TILE, COLS] tile at column ``d`` of [.., D] rows, added to what is there if ``previous``.

    Each element has one owner, so continuing a sum needs no atomics. In halves, because the addresses and the old
    values of a whole tile would not fit the registers beside it.
    """
    if COLS > 64:
        low, high = x.reshape([TILE, 2, COLS // 2]).permute(0, 2, 1).split()
        _store_sum(sum_ptr, low, d, previous, D, COLS // 2, TILE)
        _store_sum(sum_ptr, high, d + COLS // 2, previous, D, COLS // 2, TILE)
    else:
        cols = d + tl.arange(0, COLS)
        to = sum_ptr + tl.arange(0, TILE)[:, None] * D + cols[None, :]
        inside = (cols < D)[None, :]
        tl.store(to, x + tl.load(to, mask=inside & (previous != 0), other=0.0), mask=inside)


@triton.jit
def _key_tile(
    at_tiles, x, x_tail, grad, grad_tail, sum_ptr, scale, len_q, len_kv, owner, steps, place, block, previous,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, MASK_MODE: tl.constexpr,
    HIDES: tl.constexpr, PARTIAL: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``A^T X`` for one key tile: to its gradient, or unscaled to its float32 partial sum."""
    acc, tail = accumulators(BLOCK_N, TAIL, TILE)
    for i in tl.range(steps.begin, steps.end):
        j = i // steps.per_head
        m = steps.first * TILE + (i % steps.per_head) * BLOCK_K
        slot = (owner.z + j) * place.slots + slot_of(m // TILE, owner.n_tile, block, MASK_MODE, TILE)
        a = load_tile(at_tiles, slot * TILE + m % TILE, 0, BLOCK_K, TILE, TILE, TMA).T
        acc, tail = multiply(acc, tail, a, x, x_tail, owner.b, owner.h + j, place.row_first + m, len_q, owner.d,
                              D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
    if HIDES:  # noqa: SIM102 (one is the compiler's, the other the program's)
        if _has_nan(acc, tail, TAIL):
            seen = tl.zeros([TILE], tl.int32)
            for i in tl.range(steps.begin, steps.end, num_stages=1):
                j = i // steps.per_head
                m = steps.first * TILE + (i % steps.per_head) * BLOCK_K
                slot = (owner.z + j) * place.slots + slot_of(m // TILE, owner.n_tile, block, MASK_MODE, TILE)
                a = load_tile(at_tiles, slot * TILE + m % TILE, 0, BLOCK_K, TILE, TILE, TMA).T
                seen |= sees_nonfinite(a, x, x_tail, owner.b, owner.h + j, place.row_first + m, len_q, owner.d,
                                       D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
            keep = (seen != 0)[:, None]
            acc, tail = tl.where(keep, acc, 0.0), tl.where(keep, tail, 0.0)
            for i in tl.range(steps.begin, steps.end, num_stages=1):
                j = i // steps.per_head
                m = steps.first * TILE + (i % steps.per_head) * BLOCK_K
                slot = (owner.z + j) * place.slots + slot_of(m // TILE, owner.n_tile, block, MASK_MODE, TILE)
                a = load_tile(at_tiles, slot * TILE + m % TILE, 0, BLOCK_K, TILE, TILE, TMA).T
                a = tl.where(keep, tl.zeros_like(a), a)
                acc, tail = multiply_finite(acc, tail, a, x, x_tail, owner.b, owner.h + j, place.row_first + m, len_q,
                                            owner.d, D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
    if PARTIAL:
        if (steps.begin < steps.end) | (previous == 0):
            _store_sum(sum_ptr, acc, owner.d, previous, D, BLOCK_N, TILE)
            if TAIL > 0:
                _store_sum(sum_ptr, tail, owner.d + BLOCK_N, previous, D, TAIL, TILE)
    else:
        store_both(grad, grad_tail, acc * scale, tail * scale, owner.b, owner.h // place.group,
                   place.col_first + owner.n_tile * TILE, len_kv, owner.d, D, BLOCK_N, TAIL, TMA, TILE)  # fmt: skip


@triton.jit
def _key_side(
    pid, p_t_tiles, ds_t_tiles, q, q_tail, do, do_tail, dk, dk_tail, dv, dv_tail, sum_ptr, sum_rows, grad_scale_ptr,
    scale, len_q, len_kv, place, block, block_mask, heads_per_group, splits, previous,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, MASK_MODE: tl.constexpr,
    MOD_FLAGS: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr, SCALED: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One key tile of dK or of dV, or one split of it: a contraction over every row of every head of the group."""
    STEP: tl.constexpr = BLOCK_N + TAIL
    D_TILES: tl.constexpr = (D + STEP - 1) // STEP
    is_dk = NEED_DK
    if NEED_DK and NEED_DV:
        is_dk = (pid // D_TILES) % 2 == 0
        pid = pid // (2 * D_TILES) * D_TILES + pid % D_TILES
    # Key tile 0 is seen by the most row tiles: ascending order is longest first.
    d = (pid % D_TILES) * STEP
    pid = pid // D_TILES
    split = pid % splits
    pid = pid // splits
    groups = place.heads // heads_per_group
    n_tile = pid // groups
    g = pid % groups
    z = g * heads_per_group
    b = (place.head_first + z) // place.heads_q
    h = (place.head_first + z) % place.heads_q
    owner = KeyTile(z, b, h, n_tile, d)
    first, end = key_span(n_tile, block, MASK_MODE, TILE)
    if MASK & MOD_FLAGS:
        # The heads of a group steps_per_split their spans over rows, whatever their masks.
        line = key_line(block_mask, b, h, place.col_first // TILE + n_tile)
        first, end = narrowed(first, end, block_mask.key_spans, line, place.row_first // TILE)
    steps_per_head = max(end - first, 0) * (TILE // BLOCK_K)
    total = steps_per_head * heads_per_group
    steps_per_split = tl.cdiv(total, splits)
    begin = split * steps_per_split
    steps = KeySteps(first, steps_per_head, begin, min(begin + steps_per_split, total))
    if SCALED:
        scale = scale / tl.load(grad_scale_ptr + (place.head_first + z) // place.group)
    HIDES: tl.constexpr = (MASK & MOD_FLAGS) != 0 or MASK_MODE == LOCAL
    sums = sum_ptr
    if PARTIAL:
        kind = tl.where(is_dk, 0, 1)
        sums += (((kind * splits + split) * groups + g).to(tl.int64) * sum_rows + n_tile * TILE) * D
    # The two differ in operands only, but a descriptor cannot be chosen at run time. Where only one is wanted, the
    # other's operands are None, and the branch must be the compiler's.
    if NEED_DK and NEED_DV:
        if is_dk:
            _key_tile(ds_t_tiles, q, q_tail, dk, dk_tail, sums, scale, len_q, len_kv, owner, steps, place, block,
                      previous, D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, HIDES, PARTIAL, TMA, TILE)  # fmt: skip
        else:
            _key_tile(p_t_tiles, do, do_tail, dv, dv_tail, sums, 1.0, len_q, len_kv, owner, steps, place, block,
                      previous, D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, HIDES, PARTIAL, TMA, TILE)  # fmt: skip
    elif NEED_DK:
        _key_tile(ds_t_tiles, q, q_tail, dk, dk_tail, sums, scale, len_q, len_kv, owner, steps, place, block,
                  previous, D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, HIDES, PARTIAL, TMA, TILE)  # fmt: skip
    else:
        _key_tile(p_t_tiles, do, do_tail, dv, dv_tail, sums, 1.0, len_q, len_kv, owner, steps, place, block,
                  previous, D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, HIDES, PARTIAL, TMA, TILE)  # fmt: skip


@triton.jit
def _query_side(
    pid, ds_tiles, k, k_tail, dq, dq_tail, grad_scale_ptr, scale, len_q, len_kv, place, block, block_mask,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, MASK_MODE: tl.constexpr,
    MOD_FLAGS: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ of a row tile."""
    acc, tail, _, b, h, row, d = _row_side(pid, ds_tiles, k, k_tail, len_kv, place, block, block_mask,
                                           D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, MOD_FLAGS, TMA, TILE)  # fmt: skip
    if SCALED:
        scale = scale / tl.load(grad_scale_ptr + (b * place.heads_q + h) // place.group)
    store_both(dq, dq_tail, acc * scale, tail * scale, b, h, row, len_q, d, D, BLOCK_N, TAIL, TMA, TILE)


_BACKWARD_COUNTS = [*_COUNTS, "sum_rows", "query_programs", "key_programs", "heads_per_group", "splits",
                    "queries_first", "previous"]  # fmt: skip


@triton.jit(do_not_specialize=_BACKWARD_COUNTS)
def value_backward(
    p_t_tiles, ds_tiles, ds_t_tiles, q, q_tail, k, k_tail, do, do_tail, dq, dq_tail, dk, dk_tail, dv, dv_tail,
    sum_ptr, sum_rows, grad_scale_ptr, scale, block_mask, len_q, len_kv,
    row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset, left, right, width,
    query_programs, key_programs, heads_per_group, splits, queries_first, previous,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, MASK_MODE: tl.constexpr,
    MOD_FLAGS: tl.constexpr, NEED_DQ: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr,
    SCALED: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of a block in one launch.

    ``query_programs`` programs own a row tile each, ``key_programs`` a key tile for dK and as many for dV.
    ``heads_per_group`` heads of each group are in the block. With PARTIAL the key side goes unscaled to a float32
    buffer [2, splits, groups, sum_rows, D], continued from what it holds when ``previous`` is set.
    """
    place = Place(row_first, col_first, head_first, heads_q, group, slots, heads)
    block = Block(m_tiles, n_tiles, offset, left, right, width)
    KEYS: tl.constexpr = (1 if NEED_DK else 0) + (1 if NEED_DV else 0)
    pid = tl.program_id(0)
    if NEED_DQ and KEYS > 0:
        if queries_first:
            is_query = pid < query_programs
            pid = tl.where(is_query, pid, pid - query_programs)
        else:
            is_query = pid >= key_programs * KEYS
            pid = tl.where(is_query, pid - key_programs * KEYS, pid)
        if is_query:
            _query_side(pid, ds_tiles, k, k_tail, dq, dq_tail, grad_scale_ptr, scale, len_q, len_kv, place, block,
                        block_mask, D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, MOD_FLAGS, SCALED, TMA, TILE)  # fmt: skip
        else:
            _key_side(pid, p_t_tiles, ds_t_tiles, q, q_tail, do, do_tail, dk, dk_tail, dv, dv_tail, sum_ptr, sum_rows,
                      grad_scale_ptr, scale, len_q, len_kv, place, block, block_mask, heads_per_group, splits, previous,
                      D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, MOD_FLAGS, NEED_DK, NEED_DV, PARTIAL, SCALED, TMA,
                      TILE)  # fmt: skip
    elif NEED_DQ:
        _query_side(pid, ds_tiles, k, k_tail, dq, dq_tail, grad_scale_ptr, scale, len_q, len_kv, place, block,
                    block_mask, D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, MOD_FLAGS, SCALED, TMA, TILE)  # fmt: skip
    else:
        _key_side(pid, p_t_tiles, ds_t_tiles, q, q_tail, do, do_tail, dk, dk_tail, dv, dv_tail, sum_ptr, sum_rows,
                  grad_scale_ptr, scale, len_q, len_kv, place, block, block_mask, heads_per_group, splits, previous,
                  D, BLOCK_N, TAIL, BLOCK_K, MASK_MODE, MOD_FLAGS, NEED_DK, NEED_DV, PARTIAL, SCALED, TMA,
                  TILE)  # fmt: skip
