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

from .geometry import first_row_tile_of, slot_of, visible_tiles_of
from .score import load_2d

_COUNTS = ["len_q", "row_first", "col_first", "head_first", "heads_q", "group", "m_tiles", "n_tiles", "slots",
           "heads", "offset"]  # fmt: skip


@triton.jit
def store_2d(desc, b, h, row, col, x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store a tile into a [B, H, N, D] tensor; what lies outside is dropped."""
    desc.store([b, h, row, col], x.to(desc.dtype).reshape([1, 1, ROWS, COLS]))


@triton.jit(do_not_specialize=_COUNTS)
def value_forward(
    p_desc, v_desc, v_tail_desc, out_desc, out_tail_desc, inverse_sum_ptr,
    len_q, row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """O of a block: rows ``[row_first, row_first + m_tiles * TILE)`` of ``heads`` heads."""
    D_TILES: tl.constexpr = (D + BLOCK_N + TAIL - 1) // (BLOCK_N + TAIL)
    pid = tl.program_id(0)
    # Longest rows first: under a causal mask the last row tile sees the most keys.
    m_tile = m_tiles - 1 - pid // (heads * D_TILES)
    z = (pid % (heads * D_TILES)) // D_TILES
    d = (pid % D_TILES) * (BLOCK_N + TAIL)
    head = head_first + z
    b = head // heads_q
    h = head % heads_q
    h_kv = h // group
    start = z * slots + slot_of(m_tile, 0, n_tiles, offset, CAUSAL, TILE)
    end = visible_tiles_of(m_tile, n_tiles, offset, CAUSAL, TILE) * TILE

    acc = tl.zeros([TILE, BLOCK_N], tl.float32)
    if TAIL > 0:
        tail = tl.zeros([TILE, TAIL], tl.float32)
    for k in tl.range(0, end, BLOCK_K):
        p = p_desc.load([(start + k // TILE) * TILE, k % TILE])
        acc = tl.dot(p, load_2d(v_desc, b, h_kv, col_first + k, d, BLOCK_K, BLOCK_N), acc)
        if TAIL > 0:
            tail = tl.dot(p, load_2d(v_tail_desc, b, h_kv, col_first + k, d + BLOCK_N, BLOCK_K, TAIL), tail)

    inverse = tl.load(inverse_sum_ptr + (z * m_tiles + m_tile) * TILE + tl.arange(0, TILE))[:, None]
    row = row_first + m_tile * TILE
    store_2d(out_desc, b, h, row, d, acc * inverse, TILE, BLOCK_N)
    if TAIL > 0:
        store_2d(out_tail_desc, b, h, row, d + BLOCK_N, tail * inverse, TILE, TAIL)


@triton.jit
def _rows_times(
    a_desc, b_desc, b_tail_desc, b, h, start, end, row, d,
    BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``A B`` for one row tile: consecutive slots from ``start``, keys from ``row``."""
    acc = tl.zeros([TILE, BLOCK_N], tl.float32)
    tail = tl.zeros([TILE, TAIL if TAIL > 0 else 16], tl.float32)
    for k in tl.range(0, end, BLOCK_K):
        a = a_desc.load([(start + k // TILE) * TILE, k % TILE])
        acc = tl.dot(a, load_2d(b_desc, b, h, row + k, d, BLOCK_K, BLOCK_N), acc)
        if TAIL > 0:
            tail = tl.dot(a, load_2d(b_tail_desc, b, h, row + k, d + BLOCK_N, BLOCK_K, TAIL), tail)
    return acc, tail


@triton.jit
def _columns_times(
    at_desc, b_desc, b_tail_desc, b, h, z, n_tile, first, steps_per_head, step, step_end, row_first, d,
    n_tiles, slots, offset,
    BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``A^T B`` for one key tile, over the row tiles from ``first`` of the heads from ``h``: one long contraction."""
    acc = tl.zeros([TILE, BLOCK_N], tl.float32)
    tail = tl.zeros([TILE, TAIL if TAIL > 0 else 16], tl.float32)
    for i in tl.range(step, step_end):
        j = i // steps_per_head
        m = first * TILE + (i % steps_per_head) * BLOCK_K
        slot = (z + j) * slots + slot_of(m // TILE, n_tile, n_tiles, offset, CAUSAL, TILE)
        at = at_desc.load([slot * TILE + m % TILE, 0]).T
        acc = tl.dot(at, load_2d(b_desc, b, h + j, row_first + m, d, BLOCK_K, BLOCK_N), acc)
        if TAIL > 0:
            tail = tl.dot(at, load_2d(b_tail_desc, b, h + j, row_first + m, d + BLOCK_N, BLOCK_K, TAIL), tail)
    return acc, tail


@triton.jit
def _query_side(
    pid, ds_desc, k_desc, k_tail_desc, dq_desc, dq_tail_desc, unscale,
    row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One row tile of dQ."""
    STEP: tl.constexpr = BLOCK_N + TAIL
    D_TILES: tl.constexpr = (D + STEP - 1) // STEP
    m_tile = m_tiles - 1 - pid // (heads * D_TILES)
    z = (pid % (heads * D_TILES)) // D_TILES
    d = (pid % D_TILES) * STEP
    b = (head_first + z) // heads_q
    h = (head_first + z) % heads_q
    start = z * slots + slot_of(m_tile, 0, n_tiles, offset, CAUSAL, TILE)
    end = visible_tiles_of(m_tile, n_tiles, offset, CAUSAL, TILE) * TILE
    acc, tail = _rows_times(ds_desc, k_desc, k_tail_desc, b, h // group, start, end, col_first, d,
                            BLOCK_N, TAIL, BLOCK_K, TILE)  # fmt: skip
    row = row_first + m_tile * TILE
    store_2d(dq_desc, b, h, row, d, acc * unscale, TILE, BLOCK_N)
    if TAIL > 0:
        store_2d(dq_tail_desc, b, h, row, d + BLOCK_N, tail * unscale, TILE, TAIL)


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
def _key_gemm(
    at_desc, x_desc, x_tail_desc, grad_desc, grad_tail_desc, sum_ptr, unscale,
    b, h, h_kv, z, n_tile, first, steps_per_head, step, step_end, row_first, col, d, n_tiles, slots, offset, previous,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    PARTIAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One key tile of dK or dV: to its gradient, or unscaled to its float32 partial sum."""
    acc, tail = _columns_times(at_desc, x_desc, x_tail_desc, b, h, z, n_tile, first, steps_per_head,
                               step, step_end, row_first, d, n_tiles, slots, offset,
                               BLOCK_N, TAIL, BLOCK_K, CAUSAL, TILE)  # fmt: skip
    if PARTIAL:
        _store_sum(sum_ptr, acc, d, previous, D, BLOCK_N, TILE)
        if TAIL > 0:
            _store_sum(sum_ptr, tail, d + BLOCK_N, previous, D, TAIL, TILE)
    else:
        store_2d(grad_desc, b, h_kv, col, d, acc * unscale, TILE, BLOCK_N)
        if TAIL > 0:
            store_2d(grad_tail_desc, b, h_kv, col, d + BLOCK_N, tail * unscale, TILE, TAIL)


@triton.jit
def _key_side(
    pid, p_t_desc, ds_t_desc, q_desc, q_tail_desc, do_desc, do_tail_desc, dk_desc, dk_tail_desc,
    dv_desc, dv_tail_desc, sum_ptr, sum_rows, unscale,
    row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset,
    heads_per_group, splits, previous,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One key tile of dK or of dV, or one split of it."""
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
    first = first_row_tile_of(n_tile, offset, CAUSAL, TILE)
    steps_per_head = (m_tiles - first) * (TILE // BLOCK_K)
    total = steps_per_head * heads_per_group
    share = tl.cdiv(total, splits)
    step = split * share
    step_end = min(step + share, total)
    col = col_first + n_tile * TILE
    sums = sum_ptr
    if PARTIAL:
        kind = tl.where(is_dk, 0, 1)
        sums += (((kind * splits + split) * groups + g).to(tl.int64) * sum_rows + n_tile * TILE) * D
    # The branches only differ in operands, but a descriptor cannot be chosen at run time.
    if NEED_DK and NEED_DV:
        if is_dk:
            _key_gemm(ds_t_desc, q_desc, q_tail_desc, dk_desc, dk_tail_desc, sums, unscale,
                      b, h, h // group, z, n_tile, first, steps_per_head, step, step_end, row_first, col, d, n_tiles, slots, offset, previous,
                      D, BLOCK_N, TAIL, BLOCK_K, CAUSAL, PARTIAL, TILE)  # fmt: skip
        else:
            _key_gemm(p_t_desc, do_desc, do_tail_desc, dv_desc, dv_tail_desc, sums, 1.0,
                      b, h, h // group, z, n_tile, first, steps_per_head, step, step_end, row_first, col, d, n_tiles, slots, offset, previous,
                      D, BLOCK_N, TAIL, BLOCK_K, CAUSAL, PARTIAL, TILE)  # fmt: skip
    elif NEED_DK:
        _key_gemm(ds_t_desc, q_desc, q_tail_desc, dk_desc, dk_tail_desc, sums, unscale,
                  b, h, h // group, z, n_tile, first, steps_per_head, step, step_end, row_first, col, d, n_tiles, slots, offset, previous,
                  D, BLOCK_N, TAIL, BLOCK_K, CAUSAL, PARTIAL, TILE)  # fmt: skip
    else:
        _key_gemm(p_t_desc, do_desc, do_tail_desc, dv_desc, dv_tail_desc, sums, 1.0,
                  b, h, h // group, z, n_tile, first, steps_per_head, step, step_end, row_first, col, d, n_tiles, slots, offset, previous,
                  D, BLOCK_N, TAIL, BLOCK_K, CAUSAL, PARTIAL, TILE)  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS + ["sum_rows", "dq_programs", "key_programs", "heads_per_group", "splits", "queries_first",
                                         "previous"])  # fmt: skip
def value_backward(
    p_t_desc, ds_desc, ds_t_desc, q_desc, q_tail_desc, k_desc, k_tail_desc, do_desc, do_tail_desc,
    dq_desc, dq_tail_desc, dk_desc, dk_tail_desc, dv_desc, dv_tail_desc, sum_ptr, sum_rows,
    grad_scale_ptr, scale,
    len_q, row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset,
    dq_programs, key_programs, heads_per_group, splits, queries_first, previous,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
    NEED_DQ: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr,
    SCALED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of a block in one launch.

    ``dq_programs`` programs own a row tile each, ``key_programs`` a key tile for dK and as many for dV.
    ``heads_per_group`` heads of each group are in the block. With PARTIAL the key side goes unscaled to a float32
    buffer [2, splits, groups, rows, D], continued from what they hold when ``previous`` is set.
    """
    pid = tl.program_id(0)
    unscale = scale
    if SCALED:
        unscale = scale / tl.load(grad_scale_ptr)
    KEYS: tl.constexpr = (1 if NEED_DK else 0) + (1 if NEED_DV else 0)
    if NEED_DQ and KEYS > 0:
        if queries_first:
            is_query = pid < dq_programs
            pid = tl.where(is_query, pid, pid - dq_programs)
        else:
            is_query = pid >= key_programs * KEYS
            pid = tl.where(is_query, pid - key_programs * KEYS, pid)
        if is_query:
            _query_side(
                pid, ds_desc, k_desc, k_tail_desc, dq_desc, dq_tail_desc, unscale,
                row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset,
                D, BLOCK_N, TAIL, BLOCK_K, CAUSAL, TILE,
            )  # fmt: skip
        else:
            _key_side(
                pid, p_t_desc, ds_t_desc, q_desc, q_tail_desc, do_desc, do_tail_desc, dk_desc, dk_tail_desc,
                dv_desc, dv_tail_desc, sum_ptr, sum_rows, unscale,
                row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset,
                heads_per_group, splits, previous,
                D, BLOCK_N, TAIL, BLOCK_K, CAUSAL, NEED_DK, NEED_DV, PARTIAL, TILE,
            )  # fmt: skip
    elif NEED_DQ:
        _query_side(
            pid, ds_desc, k_desc, k_tail_desc, dq_desc, dq_tail_desc, unscale,
            row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset,
            D, BLOCK_N, TAIL, BLOCK_K, CAUSAL, TILE,
        )  # fmt: skip
    else:
        _key_side(
            pid, p_t_desc, ds_t_desc, q_desc, q_tail_desc, do_desc, do_tail_desc, dk_desc, dk_tail_desc,
            dv_desc, dv_tail_desc, sum_ptr, sum_rows, unscale,
            row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset,
            heads_per_group, splits, previous,
            D, BLOCK_N, TAIL, BLOCK_K, CAUSAL, NEED_DK, NEED_DV, PARTIAL, TILE,
        )  # fmt: skip
