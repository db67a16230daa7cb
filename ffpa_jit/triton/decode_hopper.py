"""``decode_kernels.attend`` for sm_90 and D <= 512, on warpgroup instructions: up to 64 rows, no options but ranges.

Written in Gluon, because the schedule is the point and Triton's pipeliner issues a block's copies together, at its end.

    K and V of a block (64 keys) are two pieces each, of 256 and W1 columns: four buffers of at most 32 KiB, one barrier
    each. A buffer is refilled the moment its product is done, so that at least two pieces are always under way.

    wait K0, S0 = Q0 K0^T    wait K1, S1 = Q1 K1^T    refill K0, K1 as they end
    softmax of S0 + S1, P in two parts to shared memory
    wait V0, O0 += P V0      wait V1, O1 += P V1      refill V0, V1 as they end

Two warpgroups: in a product of scores each has half of the keys, in one of values half of the columns. Rows are padded
to 64. Of 6900 cycles that 128 KiB take at 19 bytes a clock and SM (4.4 TB/s), the scores take 1600 (Q comes from
shared memory), the values 2100, the softmax about 700. Shared memory at D=512: Q 64, K and V 128, P 16 KiB. Registers:
206, of which O takes 128.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import decode_kernels, epilogue, launch

_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.8 renamed it
_part_of = gluon.jit(decode_kernels.part_of.fn)
_finish_lse = gluon.jit(epilogue.finish_lse.fn)
_FLOOR = gl.constexpr(epilogue.FLOOR.value)
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def describe(t: torch.Tensor, cols: int) -> TensorDescriptor:
    """A [B, H, N, D] tensor, read a block of keys and ``cols`` columns at a time."""
    return launch.describe(TensorDescriptor, t, (1, 1, 64, cols), _LAYOUT)


@gluon.jit
def _fetch(x, b, h, col, d: gl.constexpr, buffer, ready, wanted):
    """Start the copy of a piece; ``ready`` completes a phase when it is there."""
    mbarrier.expect(ready, x.block_type.nbytes, pred=wanted)
    _copy(x, [b, h, col, d], ready, buffer, pred=wanted)


@gluon.jit
def _load_query(q, line, inside, d: gl.constexpr, D: gl.constexpr, buffer, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    cols = d + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.load(q.ptr + line[:, None] + cols[None, :], mask=inside[:, None] & (cols < D)[None, :], other=0.0)
    buffer.store(x)


@gluon.jit
def _store_piece(out, line, inside, d: gl.constexpr, o, SPLIT: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr):
    cols = d + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, o.type.layout))
    at = line[:, None] + cols[None, :]
    visible = inside[:, None] & (cols < D)[None, :]
    if SPLIT:
        gl.store(out + at, o, mask=visible)
    else:
        gl.store(out.ptr + at, o.to(out.ptr.dtype.element_ty), mask=visible)


@gluon.jit(
    do_not_specialize=[
        "row_max_ptr", "sum_ptr", "keep_scale", "len_q", "len_kv", "heads_kv", "group", "row_tiles", "splits",
        "left", "right",
    ]
)  # fmt: skip
def attend(
    q, k0, k1, v0, v1, out, partial, row_max_ptr, sum_ptr, lse_ptr, scale_log2, keep_scale,
    len_q, len_kv, heads_kv, group, row_tiles, splits, left, right,
    D: gl.constexpr, W1: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """What ``decode_kernels.attend`` does, without options."""
    ROWS: gl.constexpr = 64
    BLOCK_N: gl.constexpr = 64
    W0: gl.constexpr = 256
    dtype: gl.constexpr = q.ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, W0 // 2, 16])
    TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, W1 // 2, 16])
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    tile, split, unit, begin, stop = _part_of(
        gl.program_id(0), len_q, len_kv, group, row_tiles, splits, left, right, ROWS, BLOCK_N
    )
    b = unit // heads_kv
    h_kv = unit % heads_kv
    n_rows = len_q * group
    offset = len_kv - len_q

    keys0 = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, W0], k0.layout)
    keys1 = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, W1], k1.layout)
    values0 = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, W0], v0.layout)
    values1 = gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, W1], v1.layout)
    query0 = gl.allocate_shared_memory(dtype, [1, ROWS, W0], SHARED)
    query1 = gl.allocate_shared_memory(dtype, [1, ROWS, W1], SHARED)
    p_high = gl.allocate_shared_memory(dtype, [1, ROWS, BLOCK_N], SHARED)
    p_low = gl.allocate_shared_memory(dtype, [1, ROWS, BLOCK_N], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(4):
        mbarrier.init(ready.index(j), count=1)
    fence_async_shared()

    some = begin < stop
    _fetch(k0, b, h_kv, begin, 0, keys0.index(0), ready.index(0), some)
    _fetch(k1, b, h_kv, begin, W0, keys1.index(0), ready.index(1), some)
    _fetch(v0, b, h_kv, begin, 0, values0.index(0), ready.index(2), some)
    _fetch(v1, b, h_kv, begin, W0, values1.index(0), ready.index(3), some)

    i = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUERY))
    h = h_kv * group + i % group
    line = (b.to(gl.int64) * q.stride_b + h.to(gl.int64) * q.stride_h + (i // group).to(gl.int64) * q.stride_n) * 8
    _load_query(q, line, i < n_rows, 0, D, query0.index(0), W0, QUERY)
    _load_query(q, line, i < n_rows, W0, D, query1.index(0), W1, QUERY)
    fence_async_shared()

    i = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    low = gl.maximum(i // group + offset - left, 0)[:, None]
    high = gl.minimum(i // group + offset + right + 1, len_kv)[:, None]
    m = gl.full([ROWS], _FLOOR, gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    o0 = gl.zeros([ROWS, W0], gl.float32, WIDE)
    o1 = gl.zeros([ROWS, W1], gl.float32, TAIL)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)

    phase = 0
    for col in range(begin, stop, BLOCK_N):
        following = col + BLOCK_N
        more = following < stop
        # 0, but not to the compiler: it would hoist the addresses of every operand, which take more registers than O.
        slot = (col < 0).to(gl.int32)
        mbarrier.wait(ready.index(0), phase)
        key = keys0.index(slot).reshape([BLOCK_N, W0]).permute([1, 0])
        s0 = warpgroup_mma(query0.index(slot), key, zero, use_acc=False, is_async=True)
        mbarrier.wait(ready.index(1), phase)
        key = keys1.index(slot).reshape([BLOCK_N, W1]).permute([1, 0])
        s1 = warpgroup_mma(query1.index(slot), key, zero, use_acc=False, is_async=True)
        s0 = warpgroup_mma_wait(1, deps=[s0])
        _fetch(k0, b, h_kv, following, 0, keys0.index(slot), ready.index(0), more)
        s1 = warpgroup_mma_wait(0, deps=[s1])
        _fetch(k1, b, h_kv, following, W0, keys1.index(slot), ready.index(1), more)

        s = (s0 + s1) * scale_log2
        cols = (col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES)))[None, :]
        s = gl.where((cols >= low) & (cols < high), s, float("-inf"))
        new_max = gl.maximum(m, gl.max(s, 1))
        correction = gl.exp2(m - new_max)
        p = gl.exp2(s - new_max[:, None])
        row_sum = row_sum * correction + gl.sum(p, 1)
        m = new_max
        rounded = p.to(dtype)
        high_part, low_part = p_high.index(slot), p_low.index(slot)
        high_part.store(rounded)
        low_part.store((p - rounded.to(gl.float32)).to(dtype))
        fence_async_shared()
        o0 *= gl.convert_layout(correction, gl.SliceLayout(1, WIDE))[:, None]
        o1 *= gl.convert_layout(correction, gl.SliceLayout(1, TAIL))[:, None]

        mbarrier.wait(ready.index(2), phase)
        value = values0.index(slot).reshape([BLOCK_N, W0])
        o0 = warpgroup_mma(high_part, value, o0, is_async=True)
        o0 = warpgroup_mma(low_part, value, o0, is_async=True)
        mbarrier.wait(ready.index(3), phase)
        value = values1.index(slot).reshape([BLOCK_N, W1])
        o1 = warpgroup_mma(high_part, value, o1, is_async=True)
        o1 = warpgroup_mma(low_part, value, o1, is_async=True)
        o0 = warpgroup_mma_wait(2, deps=[o0])
        _fetch(v0, b, h_kv, following, 0, values0.index(slot), ready.index(2), more)
        o1 = warpgroup_mma_wait(0, deps=[o1])
        _fetch(v1, b, h_kv, following, W0, values1.index(slot), ready.index(3), more)
        phase ^= 1

    for j in gl.static_range(4):
        mbarrier.invalidate(ready.index(j))

    inside = i < n_rows
    h = h_kv * group + i % group
    if SPLIT:
        row = (unit.to(gl.int64) * splits + split) * n_rows + i
        gl.store(row_max_ptr + row, m, mask=inside)
        gl.store(sum_ptr + row, row_sum, mask=inside)
        line = row * D
        target = partial
    else:
        inverse_sum = gl.where(row_sum > 0.0, keep_scale / row_sum, gl.where(row_sum == 0.0, 0.0, row_sum))
        o0 *= gl.convert_layout(inverse_sum, gl.SliceLayout(1, WIDE))[:, None]
        o1 *= gl.convert_layout(inverse_sum, gl.SliceLayout(1, TAIL))[:, None]
        row = (b.to(gl.int64) * (heads_kv * group) + h) * len_q + i // group
        gl.store(lse_ptr + row, _finish_lse(m, row_sum), mask=inside)
        line = b.to(gl.int64) * out.stride_b + h.to(gl.int64) * out.stride_h
        line = (line + (i // group).to(gl.int64) * out.stride_n) * 8
        target = out
    line0 = gl.convert_layout(line, gl.SliceLayout(1, WIDE))
    line1 = gl.convert_layout(line, gl.SliceLayout(1, TAIL))
    inside0 = gl.convert_layout(inside, gl.SliceLayout(1, WIDE))
    inside1 = gl.convert_layout(inside, gl.SliceLayout(1, TAIL))
    _store_piece(target, line0, inside0, 0, o0, SPLIT, D, W0)
    _store_piece(target, line1, inside1, W0, o1, SPLIT, D, W1)
