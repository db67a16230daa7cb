# mypy: ignore-errors
"""The value phase of packed sequences: ``kernels`` explains tables, sets and slots, the dense ``value`` the products.

What is not finite. A contraction multiplies by exact zeros what it reads of other sequences: the rows that its last
step reads beyond the segment (without TMA those loads are masked), and in a packed segment the other sequences
themselves. A zero times NaN is NaN, so every launch is two:

``NONFINITE`` False  does the work, unless ``inspect`` has found something beyond a segment (UNSAFE). In a packed
                     segment it looks at what it got, and leaves a mark where that has a NaN (UNSAFE_PACKS).
``NONFINITE`` True   returns at once if there is neither mark. Else a few programs take turns and do all the work, or
                     that of the packed segments, again: what is not finite is read as 0, and a row of the result
                     becomes NaN (in the columns of its program) if anything that it *sees* is not finite.
"""

import triton
import triton.language as tl

from ffpa_jit.triton.operands import _addresses, load_2d, load_tile, store_2d
from ffpa_jit.triton.params import BackwardOperands, ForwardOperands, PackedKeyTile
from ffpa_jit.triton.ragged.kernels import chunk_of, nan_if_invalid
from ffpa_jit.triton.ragged.tables import (
    C_KEY_TILE,
    C_KEY_TILE_END,
    CHUNK_RECORD,
    K_CUT,
    K_FROM,
    K_KEY,
    K_KEY_END,
    K_PACKED,
    K_ROW,
    K_ROW_END,
    K_ROW_TILE,
    K_ROW_TILE_END,
    K_TILE,
    K_TO,
    R_FROM,
    R_FULL_FROM,
    R_KEY,
    R_KEY_END,
    R_LOW,
    R_ROW,
    R_ROW_END,
    R_SLOT,
    R_TO,
    RECORD,
    UNSAFE,
    UNSAFE_PACKS,
    band_of,
    before,
)
from ffpa_jit.triton.value import accumulators, multiply

_COUNTS = ["head_first", "heads", "sets", "group", "part", "c", "left", "right", "sum_rows"]


@triton.jit
def _idle(tables, NONFINITE: tl.constexpr):
    """Whether this variant has nothing to do."""
    unsafe = tl.load(tables.head + UNSAFE) != 0
    if NONFINITE:
        idle = (unsafe == 0) & (tl.load(tables.head + UNSAFE_PACKS) == 0)
    else:
        idle = unsafe
    return idle


@triton.jit
def _check(acc, tail, packed, tables, TAIL: tl.constexpr):
    """Leave a mark if a NaN came out of a packed segment."""
    if packed:
        bad = tl.max((acc != acc).to(tl.int32))
        if TAIL > 0:
            bad |= tl.max((tail != tail).to(tl.int32))
        if bad != 0:
            tl.store(tables.head + UNSAFE_PACKS, 1)


@triton.jit
def _clean(y):
    """``y`` with 0 for what is not finite, and which rows had something that is not."""
    bad = (y.to(tl.float32) - y.to(tl.float32)) != 0.0
    return tl.where(bad, 0.0, y).to(y.dtype), tl.max(bad.to(tl.int32), 1)


@triton.jit
def _multiply_clean(
    acc, tail, nonfinite, a, y, y_tail, seen, h, row, n_rows, d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``value.multiply`` where something is not finite; ``seen`` [TILE, BLOCK_K]: which rows of Y a row of the result
    depends on."""
    part, bad = _clean(load_2d(y, h * 0, h, row, d, n_rows, D, BLOCK_K, BLOCK_N, TMA))
    acc = tl.dot(a, part, acc)
    if TAIL > 0:
        part, more = _clean(load_2d(y_tail, h * 0, h, row, d + BLOCK_N, n_rows, D, BLOCK_K, TAIL, TMA))
        tail = tl.dot(a, part, tail)
        bad |= more
    return acc, tail, nonfinite | tl.max((seen & (bad != 0)[None, :]).to(tl.int32), 1)


@triton.jit
def _with_nan_rows(acc, tail, nonfinite):
    hit = (nonfinite != 0)[:, None]
    return tl.where(hit, float("nan"), acc), tl.where(hit, float("nan"), tail)


@triton.jit
def _store(
    x, acc, tail, h, row, end, d, D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store rows up to ``end``, through pointers: what lies beyond belongs to another sequence."""
    store_2d(x, row * 0, h, row, d, end, acc, D, TILE, BLOCK_N, False)
    if TAIL > 0:
        store_2d(x, row * 0, h, row, d + BLOCK_N, end, tail, D, TILE, TAIL, False)


@triton.jit
def _row_side(
    a_tiles, y, y_tail, tables, record, slot, heads, h, d,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, NONFINITE: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``A Y`` of a row tile: O from P and V, or dQ from dS and K."""
    key, key_end = tl.load(record + R_KEY), tl.load(record + R_KEY_END)
    start, end = tl.load(record + R_FROM) // BLOCK_K * BLOCK_K, tl.load(record + R_TO)
    first = tl.load(record + R_LOW)
    acc, tail = accumulators(BLOCK_N, TAIL, TILE)
    if NONFINITE:
        rows = tl.load(record + R_ROW) + tl.arange(0, TILE)
        inside = rows < tl.load(record + R_ROW_END)
        low = tl.load(tables.low + rows, mask=inside, other=0)[:, None]
        high = tl.load(tables.high + rows, mask=inside, other=0)[:, None]
        nonfinite = tl.zeros([TILE], tl.int32)
        for k in tl.range(start, end, BLOCK_K):
            a = load_tile(a_tiles, (slot + (k // TILE - first) * heads) * TILE, k % TILE, TILE, BLOCK_K, TILE, TMA)
            cols = k + tl.arange(0, BLOCK_K)[None, :]
            acc, tail, nonfinite = _multiply_clean(acc, tail, nonfinite, a, y, y_tail, (cols >= low) & (cols < high), h,
                                                key + k, key_end, d, D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
        acc, tail = _with_nan_rows(acc, tail, nonfinite)
    else:
        for k in tl.range(start, end, BLOCK_K):
            a = load_tile(a_tiles, (slot + (k // TILE - first) * heads) * TILE, k % TILE, TILE, BLOCK_K, TILE, TMA)
            acc, tail = multiply(acc, tail, a, y, y_tail, h * 0, h, key + k, key_end, d,
                                  D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
        _check(acc, tail, tl.load(record + R_FULL_FROM) < 0, tables, TAIL)
    return acc, tail


@triton.jit
def _output_tile(
    pid, operands, tables, inverse_sum_ptr, head_first, sets, group, chunk,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, NONFINITE: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """O of a row tile, ``BLOCK_N + TAIL`` columns."""
    STEP: tl.constexpr = BLOCK_N + TAIL
    D_TILES: tl.constexpr = (D + STEP - 1) // STEP
    i = chunk.row_tiles - 1 - pid // (sets * D_TILES)  # under a causal mask the last row tile sees the most keys
    z = pid // D_TILES % sets
    d = pid % D_TILES * STEP
    h = head_first + z
    record = tables.row + (chunk.row_tile + i) * RECORD
    slot = z * chunk.slots + tl.load(record + R_SLOT) - chunk.slot
    acc, tail = _row_side(operands.p_tiles, operands.v, operands.v_tail, tables, record, slot, 1, h // group, d,
                          D, BLOCK_N, TAIL, BLOCK_K, NONFINITE, TMA, TILE)  # fmt: skip
    inverse = tl.load(inverse_sum_ptr + (z * chunk.row_tiles + i) * TILE + tl.arange(0, TILE))[:, None]
    _store(operands.out, acc * inverse, tail * inverse, h, tl.load(record + R_ROW), tl.load(record + R_ROW_END), d,
           D, BLOCK_N, TAIL, TILE)  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def value_forward(
    p_tiles, v, v_tail, out, tables, inverse_sum_ptr, head_first, sets, group, c,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, NONFINITE: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """O of a chunk's row tiles."""
    STEP: tl.constexpr = BLOCK_N + TAIL
    D_TILES: tl.constexpr = (D + STEP - 1) // STEP
    operands = ForwardOperands(p_tiles, v, v_tail, out)
    chunk = chunk_of(tables, c)
    programs = chunk.row_tiles * sets * D_TILES
    pid = tl.program_id(0)
    if (pid >= programs) | _idle(tables, NONFINITE):
        return
    if NONFINITE:
        everything = tl.load(tables.head + UNSAFE) != 0
        for each in tl.range(pid, programs, tl.num_programs(0)):
            record = tables.row + (chunk.row_tile + chunk.row_tiles - 1 - each // (sets * D_TILES)) * RECORD
            if everything | (tl.load(record + R_FULL_FROM) < 0):
                _output_tile(each, operands, tables, inverse_sum_ptr, head_first, sets, group, chunk,
                             D, BLOCK_N, TAIL, BLOCK_K, NONFINITE, TMA, TILE)  # fmt: skip
    else:
        _output_tile(pid, operands, tables, inverse_sum_ptr, head_first, sets, group, chunk,
                     D, BLOCK_N, TAIL, BLOCK_K, NONFINITE, TMA, TILE)  # fmt: skip


@triton.jit
def _add(sum_ptr, grad, x, scale, h, key, key_end, d, continued, finished, D: tl.constexpr, COLS: tl.constexpr,
         TILE: tl.constexpr):  # fmt: skip
    """Continue a float32 sum, or finish it: then it is stored as a gradient. In parts, as ``value._store_sum``."""
    if COLS > 64:
        left, right = x.reshape([TILE, 2, COLS // 2]).permute(0, 2, 1).split()
        _add(sum_ptr, grad, left, scale, h, key, key_end, d, continued, finished, D, COLS // 2, TILE)
        _add(sum_ptr, grad, right, scale, h, key, key_end, d + COLS // 2, continued, finished, D, COLS // 2, TILE)
    else:
        lanes = tl.arange(0, TILE)
        cols = d + tl.arange(0, COLS)
        inside = (cols < D)[None, :]
        at = sum_ptr + lanes[:, None] * D + cols[None, :]
        x += tl.load(at, mask=inside & continued, other=0.0)
        tl.store(at, x, mask=inside & (finished == 0))
        to = _addresses(grad, key * 0, h, key, d, TILE, COLS)
        mask = inside & (key + lanes < key_end)[:, None] & finished
        tl.store(to, (x * scale).to(grad.ptr.dtype.element_ty), mask=mask)


@triton.jit
def _key_tile(
    at_tiles, x, x_tail, grad, tables, sum_ptr, scale, record, owner, part, chunk, left, right, IS_DK: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, PARTIAL: tl.constexpr,
    NONFINITE: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``A^T X`` of a key tile over the heads of a group and the rows of the chunk that see it."""
    key, key_end = tl.load(record + K_KEY), tl.load(record + K_KEY_END)
    row, row_end = tl.load(record + K_ROW), tl.load(record + K_ROW_END)
    row_tile = tl.load(record + K_ROW_TILE)
    start = max(tl.load(record + K_FROM), (chunk.row_tile - row_tile) * TILE) // BLOCK_K
    end = min(tl.load(record + K_TO), (chunk.row_tile + chunk.row_tiles - row_tile) * TILE)
    steps = max((end + BLOCK_K - 1) // BLOCK_K - start, 0)
    tile = tl.load(record + K_TILE)
    band = band_of(row_end - row, key_end - key + tile * TILE, left, right, TILE)
    begin = start * BLOCK_K // TILE
    there = tables.row + (row_tile + begin) * RECORD
    slot = (owner.g * chunk.slots - chunk.slot + tile + tl.load(there + R_SLOT) - tl.load(there + R_LOW)
            - before(begin, band))  # fmt: skip
    if not IS_DK:
        scale = nan_if_invalid(tables, scale)
    acc, tail = accumulators(BLOCK_N, TAIL, TILE)
    if NONFINITE:
        cols = (tile * TILE + tl.arange(0, TILE))[:, None]
        nonfinite = tl.zeros([TILE], tl.int32)
        for i in tl.range(0, steps * owner.heads):
            j = i // steps
            m = (start + i % steps) * BLOCK_K
            at = (slot + before(m // TILE, band)) * owner.heads + j
            rows = row + m + tl.arange(0, BLOCK_K)
            low = tl.load(tables.low + rows, mask=rows < row_end, other=0)[None, :]
            high = tl.load(tables.high + rows, mask=rows < row_end, other=0)[None, :]
            a = load_tile(at_tiles, at * TILE + m % TILE, 0, BLOCK_K, TILE, TILE, TMA).T
            acc, tail, nonfinite = _multiply_clean(acc, tail, nonfinite, a, x, x_tail, (cols >= low) & (cols < high),
                                                owner.h + j, row + m, row_end, owner.d,
                                                D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
        acc, tail = _with_nan_rows(acc, tail, nonfinite)
    else:
        for i in tl.range(0, steps * owner.heads):
            j = i // steps
            m = (start + i % steps) * BLOCK_K
            at = (slot + before(m // TILE, band)) * owner.heads + j
            a = load_tile(at_tiles, at * TILE + m % TILE, 0, BLOCK_K, TILE, TILE, TMA).T
            acc, tail = multiply(acc, tail, a, x, x_tail, owner.g * 0, owner.h + j, row + m, row_end, owner.d,
                                  D, BLOCK_N, TAIL, BLOCK_K, TMA)  # fmt: skip
        _check(acc, tail, tl.load(record + K_PACKED) != 0, tables, TAIL)
    if IS_DK:
        # Were the same to follow the loops of dK and dV, MLIR would merge it, and Triton then takes their shared memory
        # to be in use at the same time. So they ask for this at different times.
        scale = nan_if_invalid(tables, scale)
    if PARTIAL > 0:
        if PARTIAL == 1:
            cut = tl.load(record + K_CUT) != 0
            continued = cut & (chunk.row_tile > row_tile)
            finished = (cut == 0) | (chunk.row_tile + chunk.row_tiles >= tl.load(record + K_ROW_TILE_END))
            sums = sum_ptr + (tile * TILE).to(tl.int64) * D
        else:
            continued = part > 0
            finished = part > 0
            sums = sum_ptr + (owner.tile * TILE).to(tl.int64) * D
        _add(sums, grad, acc, scale, owner.h_kv, key, key_end, owner.d, continued, finished, D, BLOCK_N, TILE)
        if TAIL > 0:
            _add(sums, grad, tail, scale, owner.h_kv, key, key_end, owner.d + BLOCK_N, continued, finished,
                 D, TAIL, TILE)  # fmt: skip
    else:
        _store(grad, acc * scale, tail * scale, owner.h_kv, key, key_end, owner.d, D, BLOCK_N, TAIL, TILE)


@triton.jit
def _query_gradient(
    pid, ds_tiles, k, k_tail, dq, tables, grad_scale_ptr, scale, head_first, heads, sets, group, chunk, everything,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
    NONFINITE: tl.constexpr, TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ of a row tile."""
    D_TILES: tl.constexpr = (D + BLOCK_N + TAIL - 1) // (BLOCK_N + TAIL)
    d = pid % D_TILES * (BLOCK_N + TAIL)
    t = pid // D_TILES
    z = t % (sets * heads)
    h = head_first + z
    record = tables.row + (chunk.row_tile + chunk.row_tiles - 1 - t // (sets * heads)) * RECORD
    mine = True
    if NONFINITE:
        mine = everything | (tl.load(record + R_FULL_FROM) < 0)
    if mine:
        slot = (z // heads * chunk.slots + tl.load(record + R_SLOT) - chunk.slot) * heads + z % heads
        acc, tail = _row_side(ds_tiles, k, k_tail, tables, record, slot, heads, h // group, d,
                              D, BLOCK_N, TAIL, BLOCK_K, NONFINITE, TMA, TILE)  # fmt: skip
        scale = nan_if_invalid(tables, scale)
        if SCALED:
            scale = scale / tl.load(grad_scale_ptr + h // group)
        _store(dq, acc * scale, tail * scale, h, tl.load(record + R_ROW), tl.load(record + R_ROW_END), d,
               D, BLOCK_N, TAIL, TILE)  # fmt: skip


@triton.jit
def _key_gradient(
    pid, operands, tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale, head_first, heads, sets, group, part,
    key_first, chunk, left, right, everything,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr, PARTIAL: tl.constexpr, SCALED: tl.constexpr, NONFINITE: tl.constexpr, TMA: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """dK or dV of a key tile."""
    D_TILES: tl.constexpr = (D + BLOCK_N + TAIL - 1) // (BLOCK_N + TAIL)
    KEYS: tl.constexpr = (1 if NEED_DK else 0) + (1 if NEED_DV else 0)
    d = pid % D_TILES * (BLOCK_N + TAIL)
    t = pid // D_TILES
    kind = t % KEYS
    t = t // KEYS
    g = t % sets
    h = head_first + g * heads
    index = key_first + t // sets
    record = tables.key + index * RECORD
    owner = PackedKeyTile(g, heads, h, h // group, d, index)
    x = operands
    mine = True
    if NONFINITE:
        mine = everything | (tl.load(record + K_PACKED) != 0)
    if mine:
        key_scale = scale
        if SCALED:
            key_scale = scale / tl.load(grad_scale_ptr + h // group)
        sums = sum_ptr
        if PARTIAL > 0:
            sums += sum_rows.to(tl.int64) * D
        if NEED_DK and NEED_DV:
            if kind == 0:
                _key_tile(x.ds_t_tiles, x.q, x.q_tail, x.dk, tables, sum_ptr, key_scale, record, owner, part, chunk,
                          left, right, True, D, BLOCK_N, TAIL, BLOCK_K, PARTIAL, NONFINITE, TMA, TILE)  # fmt: skip
            else:
                _key_tile(x.p_t_tiles, x.do, x.do_tail, x.dv, tables, sums, value_scale, record, owner, part, chunk,
                          left, right, False, D, BLOCK_N, TAIL, BLOCK_K, PARTIAL, NONFINITE, TMA, TILE)  # fmt: skip
        elif NEED_DK:
            _key_tile(x.ds_t_tiles, x.q, x.q_tail, x.dk, tables, sum_ptr, key_scale, record, owner, part, chunk,
                      left, right, True, D, BLOCK_N, TAIL, BLOCK_K, PARTIAL, NONFINITE, TMA, TILE)  # fmt: skip
        else:
            _key_tile(x.p_t_tiles, x.do, x.do_tail, x.dv, tables, sums, value_scale, record, owner, part, chunk,
                      left, right, False, D, BLOCK_N, TAIL, BLOCK_K, PARTIAL, NONFINITE, TMA, TILE)  # fmt: skip


@triton.jit
def _gradient_tile(
    pid, key_programs, operands, tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale, head_first, heads, sets,
    group, part, key_first, chunk, left, right, everything,
    D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, NEED_DQ: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr, SCALED: tl.constexpr, NONFINITE: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dK or dV of a key tile, or dQ of a row tile, ``BLOCK_N + TAIL`` columns; ``everything``, or what is packed."""
    KEYS: tl.constexpr = (1 if NEED_DK else 0) + (1 if NEED_DV else 0)
    # The three differ in operands only, but a descriptor cannot be chosen at run time. What is not wanted has none at
    # all, so those branches are the compiler's.
    x = operands
    if NEED_DQ and KEYS > 0:
        if pid >= key_programs:
            _query_gradient(pid - key_programs, x.ds_tiles, x.k, x.k_tail, x.dq, tables, grad_scale_ptr, scale,
                            head_first, heads, sets, group, chunk, everything, D, BLOCK_N, TAIL, BLOCK_K, SCALED,
                            NONFINITE, TMA, TILE)  # fmt: skip
        else:
            _key_gradient(pid, operands, tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale, head_first,
                          heads, sets, group, part, key_first, chunk, left, right, everything, D, BLOCK_N, TAIL,
                          BLOCK_K, NEED_DK, NEED_DV, PARTIAL, SCALED, NONFINITE, TMA, TILE)  # fmt: skip
    elif NEED_DQ:
        _query_gradient(pid, x.ds_tiles, x.k, x.k_tail, x.dq, tables, grad_scale_ptr, scale, head_first, heads, sets,
                        group, chunk, everything, D, BLOCK_N, TAIL, BLOCK_K, SCALED, NONFINITE, TMA, TILE)  # fmt: skip
    else:
        _key_gradient(pid, operands, tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale, head_first, heads,
                      sets, group, part, key_first, chunk, left, right, everything, D, BLOCK_N, TAIL, BLOCK_K, NEED_DK,
                      NEED_DV, PARTIAL, SCALED, NONFINITE, TMA, TILE)  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def value_backward(
    p_t_tiles, ds_tiles, ds_t_tiles, q, q_tail, k, k_tail, do, do_tail, dq, dk, dv,
    tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale, head_first, heads, sets, group, part, c, left,
    right, D: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, BLOCK_K: tl.constexpr, NEED_DQ: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, PARTIAL: tl.constexpr, SCALED: tl.constexpr, NONFINITE: tl.constexpr,
    TMA: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of a chunk in one launch: first the key tiles, whose contractions are longest, then the row tiles.

    With PARTIAL the sums of dK and dV go to a float32 buffer [2, sum_rows, D] until they are complete. 1: those of
    segments that the chunk does not finish, by the key tile's place in its sequence. 2: those of the first half of a
    group's heads (``part`` 0), which the second half (1) finishes, by the key tile's place among all.
    """
    D_TILES: tl.constexpr = (D + BLOCK_N + TAIL - 1) // (BLOCK_N + TAIL)
    KEYS: tl.constexpr = (1 if NEED_DK else 0) + (1 if NEED_DV else 0)
    chunk = chunk_of(tables, c)
    here = tables.chunk + c * CHUNK_RECORD
    key_first = tl.load(here + C_KEY_TILE)
    key_programs = (tl.load(here + CHUNK_RECORD + C_KEY_TILE_END) - key_first) * (sets * D_TILES * KEYS)
    programs = key_programs
    if NEED_DQ:
        programs += chunk.row_tiles * heads * sets * D_TILES
    pid = tl.program_id(0)
    if (pid >= programs) | _idle(tables, NONFINITE):
        return
    operands = BackwardOperands(p_t_tiles, ds_tiles, ds_t_tiles, q, q_tail, k, k_tail, do, do_tail, dq, dk, dv)
    if NONFINITE:
        everything = tl.load(tables.head + UNSAFE) != 0
        for each in tl.range(pid, programs, tl.num_programs(0)):
            _gradient_tile(each, key_programs, operands, tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale,
                           head_first, heads, sets, group, part, key_first, chunk, left, right, everything, D, BLOCK_N,
                           TAIL, BLOCK_K, NEED_DQ, NEED_DK, NEED_DV, PARTIAL, SCALED, NONFINITE, TMA, TILE)  # fmt: skip
    else:
        _gradient_tile(pid, key_programs, operands, tables, sum_ptr, sum_rows, grad_scale_ptr, scale, value_scale,
                       head_first, heads, sets, group, part, key_first, chunk, left, right, True, D, BLOCK_N, TAIL,
                       BLOCK_K, NEED_DQ, NEED_DK, NEED_DV, PARTIAL, SCALED, NONFINITE, TMA, TILE)  # fmt: skip
