"""The value phase: GEMMs over stored tiles. It knows tiles and ranges, nothing of masks or softmax.

    forward    O  = P V / l
    backward   dQ = dS K * scale        dK = dS^T Q * scale        dV = P^T dO

A program owns ``TILE`` output rows and ``BLOCK_N + TAIL`` output columns. TAIL is a second accumulator beside the
first one: head dims such as 320 = 256 + 64 have no power-of-two tile, and two narrow tiles would read P twice.

The backward's three GEMMs are one launch. Their programs differ in length (a causal row block sees between one and
all tiles, a GQA key block sums over the whole group), and one launch over all of them, longest first, fills the GPU
where three launches would each leave a tail. Where the key side has too few programs the contraction is split and
the float32 partial sums are added in a fixed order by ``rows.reduce_partials``.
"""

import triton
import triton.language as tl

from .epilogue import MASK
from .geometry import key_span, narrowed, row_span, slot_of
from .mask_tiles import key_line, row_line
from .operands import load_2d, load_tile, store_2d

_COUNTS = [
    "skips", "len_q", "len_kv", "row_first", "col_first", "head_first", "heads_q", "group", "m_tiles", "n_tiles",
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
def _row_side(
    pid, a_tiles, y, y_tail, len_kv, place, block, skips,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, SHAPE: tl.constexpr,
    MODS: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``A Y`` for the row tile that program ``pid`` owns: O from P and V, or dQ from dS and K.

    Returns the accumulators and where they belong: slot of the row tile among the block's, batch, head, row, column.
    """
    row_first, col_first, head_first, heads_q, group, slots, heads = place
    m_tiles = block[0]
    STEP: tl.constexpr = BLOCK_N + TAIL
    D_TILES: tl.constexpr = (D + STEP - 1) // STEP
    # Longest rows first: under a causal mask the last row tile sees the most keys.
    m_tile = m_tiles - 1 - pid // (heads * D_TILES)
    z = (pid % (heads * D_TILES)) // D_TILES
    d = (pid % D_TILES) * STEP
    b = (head_first + z) // heads_q
    h = (head_first + z) % heads_q
    low, end = row_span(m_tile, block, SHAPE, TILE)
    if MASK & MODS:
        line = row_line(skips, b, h, row_first // TILE + m_tile, MODS)
        low, end = narrowed(low, end, skips[1], line, col_first // TILE)
    start = z * slots + slot_of(m_tile, 0, block, SHAPE, TILE)
    acc, tail = accumulators(BLOCK_N, TAIL, TILE)
    for k in tl.range(low * TILE, end * TILE, BLOCK_K):
        a = load_tile(a_tiles, (start + k // TILE) * TILE, k % TILE, TILE, BLOCK_K, TILE, TMA)
        acc, tail = multiply(acc, tail, a, y, y_tail, b, h // group, col_first + k, len_kv, d,
                              D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
    return acc, tail, z * m_tiles + m_tile, b, h, row_first + m_tile * TILE, d


@triton.jit(do_not_specialize=_COUNTS)
def value_forward(
    p_tiles, v, v_tail, out, out_tail, inverse_sum_ptr, skips, len_q, len_kv,
    row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset, left, right, width,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, SHAPE: tl.constexpr,
    MODS: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """O of a block: rows ``[row_first, row_first + m_tiles * TILE)`` of ``heads`` heads."""
    place = (row_first, col_first, head_first, heads_q, group, slots, heads)
    block = (m_tiles, n_tiles, offset, left, right, width)
    acc, tail, tile, b, h, row, d = _row_side(tl.program_id(0), p_tiles, v, v_tail, len_kv, place, block, skips,
                                              D, BLOCK_N, TAIL, BLOCK_K, SHAPE, MODS, TMA, TILE)  # fmt: skip
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
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, SHAPE: tl.constexpr,
    PARTIAL: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``A^T X`` for one key tile: to its gradient, or unscaled to its float32 partial sum."""
    row_first, col_first, head_first, heads_q, group, slots, heads = place
    z, b, h, n_tile, d = owner
    first, steps_per_head, step, step_end = steps
    acc, tail = accumulators(BLOCK_N, TAIL, TILE)
    for i in tl.range(step, step_end):
        j = i // steps_per_head
        m = first * TILE + (i % steps_per_head) * BLOCK_K
        slot = (z + j) * slots + slot_of(m // TILE, n_tile, block, SHAPE, TILE)
        a = load_tile(at_tiles, slot * TILE + m % TILE, 0, BLOCK_K, TILE, TILE, TMA).T
        acc, tail = multiply(acc, tail, a, x, x_tail, b, h + j, row_first + m, len_q, d,
                              D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
    if PARTIAL:
        if (step < step_end) | (previous == 0):
            _store_sum(sum_ptr, acc, d, previous, D, BLOCK_N, TILE)
            if TAIL > 0:
                _store_sum(sum_ptr, tail, d + BLOCK_N, previous, D, TAIL, TILE)
    else:
        store_both(grad, grad_tail, acc * scale, tail * scale, b, h // group, col_first + n_tile * TILE, len_kv, d,
               D, BLOCK_N, TAIL, TMA, TILE)  # fmt: skip


@triton.jit
def _key_side(
    pid, p_t_tiles, ds_t_tiles, q, q_tail, do, do_tail, dk, dk_tail, dv, dv_tail, sum_ptr, sum_rows, grad_scale_ptr,
    scale, len_q, len_kv, place, block, skips, heads_per_group, splits, previous,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, SHAPE: tl.constexpr,
    MODS: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr, SCALED: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One key tile of dK or of dV, or one split of it: a contraction over every row of every head of the group."""
    row_first, col_first, head_first, heads_q, group, slots, heads = place
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
    groups = heads // heads_per_group
    n_tile = pid // groups
    g = pid % groups
    z = g * heads_per_group
    b = (head_first + z) // heads_q
    h = (head_first + z) % heads_q
    owner = (z, b, h, n_tile, d)
    first, end = key_span(n_tile, block, SHAPE, TILE)
    if MASK & MODS:
        # The heads of a group share their spans over rows, whatever their masks.
        line = key_line(skips, b, h, col_first // TILE + n_tile)
        first, end = narrowed(first, end, skips[2], line, row_first // TILE)
    steps_per_head = max(end - first, 0) * (TILE // BLOCK_K)
    total = steps_per_head * heads_per_group
    share = tl.cdiv(total, splits)
    steps = (first, steps_per_head, split * share, min(split * share + share, total))
    if SCALED:
        scale = scale / tl.load(grad_scale_ptr + (head_first + z) // group)
    sums = sum_ptr
    if PARTIAL:
        kind = tl.where(is_dk, 0, 1)
        sums += (((kind * splits + split) * groups + g).to(tl.int64) * sum_rows + n_tile * TILE) * D
    # The two differ in operands only, but a descriptor cannot be chosen at run time. Where only one is wanted, the
    # other's operands are None, and the branch must be the compiler's.
    if NEED_DK and NEED_DV:
        if is_dk:
            _key_tile(ds_t_tiles, q, q_tail, dk, dk_tail, sums, scale, len_q, len_kv, owner, steps, place, block,
                      previous, D, BLOCK_N, TAIL, BLOCK_K, SHAPE, PARTIAL, TMA, TILE)  # fmt: skip
        else:
            _key_tile(p_t_tiles, do, do_tail, dv, dv_tail, sums, 1.0, len_q, len_kv, owner, steps, place, block,
                      previous, D, BLOCK_N, TAIL, BLOCK_K, SHAPE, PARTIAL, TMA, TILE)  # fmt: skip
    elif NEED_DK:
        _key_tile(ds_t_tiles, q, q_tail, dk, dk_tail, sums, scale, len_q, len_kv, owner, steps, place, block,
                  previous, D, BLOCK_N, TAIL, BLOCK_K, SHAPE, PARTIAL, TMA, TILE)  # fmt: skip
    else:
        _key_tile(p_t_tiles, do, do_tail, dv, dv_tail, sums, 1.0, len_q, len_kv, owner, steps, place, block,
                  previous, D, BLOCK_N, TAIL, BLOCK_K, SHAPE, PARTIAL, TMA, TILE)  # fmt: skip


@triton.jit
def _query_side(
    pid, ds_tiles, k, k_tail, dq, dq_tail, grad_scale_ptr, scale, len_q, len_kv, place, block, skips,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, SHAPE: tl.constexpr,
    MODS: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ of a row tile."""
    acc, tail, _, b, h, row, d = _row_side(pid, ds_tiles, k, k_tail, len_kv, place, block, skips,
                                           D, BLOCK_N, TAIL, BLOCK_K, SHAPE, MODS, TMA, TILE)  # fmt: skip
    if SCALED:
        scale = scale / tl.load(grad_scale_ptr + (b * place[3] + h) // place[4])
    store_both(dq, dq_tail, acc * scale, tail * scale, b, h, row, len_q, d, D, BLOCK_N, TAIL, TMA, TILE)


_BACKWARD_COUNTS = [*_COUNTS, "sum_rows", "query_programs", "key_programs", "heads_per_group", "splits",
                    "queries_first", "previous"]  # fmt: skip


@triton.jit(do_not_specialize=_BACKWARD_COUNTS)
def value_backward(
    p_t_tiles, ds_tiles, ds_t_tiles, q, q_tail, k, k_tail, do, do_tail, dq, dq_tail, dk, dk_tail, dv, dv_tail,
    sum_ptr, sum_rows, grad_scale_ptr, scale, skips, len_q, len_kv,
    row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset, left, right, width,
    query_programs, key_programs, heads_per_group, splits, queries_first, previous,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, SHAPE: tl.constexpr,
    MODS: tl.constexpr, NEED_DQ: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr,
    SCALED: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of a block in one launch.

    ``query_programs`` programs own a row tile each, ``key_programs`` a key tile for dK and as many for dV.
    ``heads_per_group`` heads of each group are in the block. With PARTIAL the key side goes unscaled to a float32
    buffer [2, splits, groups, sum_rows, D], continued from what it holds when ``previous`` is set.
    """
    place = (row_first, col_first, head_first, heads_q, group, slots, heads)
    block = (m_tiles, n_tiles, offset, left, right, width)
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
                        skips, D, BLOCK_N, TAIL, BLOCK_K, SHAPE, MODS, SCALED, TMA, TILE)  # fmt: skip
        else:
            _key_side(pid, p_t_tiles, ds_t_tiles, q, q_tail, do, do_tail, dk, dk_tail, dv, dv_tail, sum_ptr, sum_rows,
                      grad_scale_ptr, scale, len_q, len_kv, place, block, skips, heads_per_group, splits, previous,
                      D, BLOCK_N, TAIL, BLOCK_K, SHAPE, MODS, NEED_DK, NEED_DV, PARTIAL, SCALED, TMA,
                      TILE)  # fmt: skip
    elif NEED_DQ:
        _query_side(pid, ds_tiles, k, k_tail, dq, dq_tail, grad_scale_ptr, scale, len_q, len_kv, place, block,
                    skips, D, BLOCK_N, TAIL, BLOCK_K, SHAPE, MODS, SCALED, TMA, TILE)  # fmt: skip
    else:
        _key_side(pid, p_t_tiles, ds_t_tiles, q, q_tail, do, do_tail, dk, dk_tail, dv, dv_tail, sum_ptr, sum_rows,
                  grad_scale_ptr, scale, len_q, len_kv, place, block, skips, heads_per_group, splits, previous,
                  D, BLOCK_N, TAIL, BLOCK_K, SHAPE, MODS, NEED_DK, NEED_DV, PARTIAL, SCALED, TMA,
                  TILE)  # fmt: skip
