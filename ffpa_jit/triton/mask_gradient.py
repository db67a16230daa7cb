"""The gradient of an additive mask: dS, summed over whatever the mask broadcasts over, in float32 and in a fixed order.

It reads the tiles of dS that the score phase has stored, and has a program for each tile of the result, so nothing is
added atomically. Where the mask has an element for each query and key, a program sums over the heads that share it (and
over the blocks, one after another). Where it broadcasts over queries or keys, the sum over those comes first, for every
head by itself, and the host adds the heads.

Between blocks, a float32 sum for each element of the mask is kept. A mask of 16 bits has room for half of it: the upper
half of the sum waits in the gradient itself, the lower half beside it.
"""

import triton
import triton.language as tl

from .geometry import key_span, row_span, slot_of
from .mask_tiles import EMPTY, state_of
from .params import Block, Place

_COUNTS = ["block_mask", "len_q", "len_kv", "row_first", "col_first", "head_first", "heads_q", "group", "m_tiles",
           "n_tiles", "slots", "heads", "offset", "left", "right", "width", "batches", "mask_batches",
           "mask_heads"]  # fmt: skip


@triton.jit
def _tile(
    ds_ptr, grad_scale_ptr, block_mask, head, m_tile, n_tile, part, place, block,
    MASK_MODE: tl.constexpr, MOD_FLAGS: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a tile of dS, in float32; zeros where the mask hides all of it, and nothing was stored."""
    b = head // place.heads_q
    h = head % place.heads_q
    state = state_of(block_mask, b, h, place.row_first // TILE + m_tile, place.col_first // TILE + n_tile, MOD_FLAGS)
    slot = (head - place.head_first) * place.slots + slot_of(m_tile, n_tile, block, MASK_MODE, TILE)
    at = (slot * TILE + part * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    ds = tl.load(ds_ptr + at, mask=tl.full([ROWS, TILE], 1, tl.int1) & (state != EMPTY), other=0.0).to(tl.float32)
    if SCALED:
        ds = ds / tl.load(grad_scale_ptr + head // place.group)
    return ds


@triton.jit
def _load_sum(grad, low, at, mask, HALVES: tl.constexpr):
    """A float32 sum that waits for the next block; 0 outside of ``mask``."""
    x = tl.load(grad + at, mask=mask, other=0.0)
    if HALVES:
        high = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        x = (high | (tl.load(low + at, mask=mask, other=0).to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _store_sum(grad, low, at, x, mask, finished, HALVES: tl.constexpr):
    """Store a sum for the next block, or round it to the gradient."""
    if HALVES:
        dtype: tl.constexpr = grad.dtype.element_ty
        bits = x.to(tl.int32, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(dtype, bitcast=True)
        tl.store(grad + at, tl.where(finished, x.to(dtype), high), mask=mask)
        tl.store(low + at, bits.to(tl.int16), mask=mask & (finished == 0))
    else:
        tl.store(grad + at, x, mask=mask)


@triton.jit(do_not_specialize=_COUNTS)
def mask_gradient(
    ds_ptr, grad, low_ptr, grad_scale_ptr, block_mask, len_q, len_kv,
    row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset, left, right, width,
    batches, mask_batches, mask_heads,
    MASK_MODE: tl.constexpr, MOD_FLAGS: tl.constexpr, SCALED: tl.constexpr, HALVES: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add a block's share to ``grad`` [mask batches, mask heads, len_q, len_kv], dense.

    The first block of a line writes; the others add to what is there, and the last one rounds. ``HALVES``: ``grad`` has
    16 bits, and the other 16 of a sum are in ``low_ptr``. ``ALIGNED``: ``len_kv`` is a multiple of 16.
    """
    pid = tl.program_id(0)
    place = Place(row_first, col_first, head_first, heads_q, group, slots, heads)
    block = Block(m_tiles, n_tiles, offset, left, right, width)
    n_tile = pid % n_tiles
    pid = pid // n_tiles
    PARTS: tl.constexpr = TILE // ROWS  # of a tile, so that many programs share a SM
    part = pid % PARTS
    m_tile = (pid // PARTS) % m_tiles
    line = pid // PARTS // m_tiles
    mask_b = line // mask_heads
    mask_h = line % mask_heads
    low, end = row_span(m_tile, block, MASK_MODE, TILE)
    last = head_first + heads
    b_first = tl.where(mask_batches > 1, mask_b, head_first // heads_q)
    b_end = tl.where(mask_batches > 1, mask_b + 1, (last - 1) // heads_q + 1)
    h_first = tl.where(mask_heads > 1, mask_h, 0)
    h_end = tl.where(mask_heads > 1, mask_h + 1, heads_q)
    shared = 0
    for b in tl.range(b_first, b_end):
        shared += max(min(b * heads_q + h_end, last) - max(b * heads_q + h_first, head_first), 0)
    if (n_tile >= low) & (n_tile < end) & (shared > 0):
        rows = row_first + m_tile * TILE + part * ROWS + tl.arange(0, ROWS)
        cols = tl.max_contiguous(tl.multiple_of(col_first + n_tile * TILE + tl.arange(0, TILE), TILE), TILE)
        start = (line.to(tl.int64) * len_q + rows) * len_kv
        within = cols < len_kv
        if ALIGNED:  # said so that 8 elements are loaded at a time
            start = tl.multiple_of(start, 16)
            within = cols // 16 < len_kv // 16
        at = start[:, None] + cols[None, :]
        there = (rows < len_q)[:, None] & within[None, :]
        line_first = tl.where(mask_batches > 1, mask_b, 0) * heads_q + h_first
        line_last = tl.where(mask_batches > 1, mask_b, batches - 1) * heads_q + h_end - 1
        acc = _load_sum(grad, low_ptr, at, there & (line_first < head_first), HALVES)
        for b in tl.range(b_first, b_end):
            for head in tl.range(max(b * heads_q + h_first, head_first), min(b * heads_q + h_end, last)):
                acc += _tile(ds_ptr, grad_scale_ptr, block_mask, head, m_tile, n_tile, part, place, block,
                             MASK_MODE, MOD_FLAGS, SCALED, ROWS, TILE)  # fmt: skip
        _store_sum(grad, low_ptr, at, acc, there, line_last < last, HALVES)


@triton.jit(do_not_specialize=_COUNTS[:-3])
def mask_line_gradient(
    ds_ptr, sum_ptr, grad_scale_ptr, block_mask, len_q, len_kv,
    row_first, col_first, head_first, heads_q, group, m_tiles, n_tiles, slots, heads, offset, left, right, width,
    MASK_MODE: tl.constexpr, MOD_FLAGS: tl.constexpr, OVER_ROWS: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add each head's sum of dS over its queries to [B * Hq, len_kv], or (not OVER_ROWS) over its keys to
    [B * Hq, len_q]."""
    pid = tl.program_id(0)
    place = Place(row_first, col_first, head_first, heads_q, group, slots, heads)
    block = Block(m_tiles, n_tiles, offset, left, right, width)
    lanes = tl.arange(0, TILE)
    acc = tl.zeros([TILE], tl.float32)
    if OVER_ROWS:
        head = head_first + pid // n_tiles
        n_tile = pid % n_tiles
        first, end = key_span(n_tile, block, MASK_MODE, TILE)
        for m_tile in tl.range(first, end):
            acc += tl.sum(_tile(ds_ptr, grad_scale_ptr, block_mask, head, m_tile, n_tile, 0, place, block,
                                MASK_MODE, MOD_FLAGS, SCALED, TILE, TILE), 0)  # fmt: skip
        index = col_first + n_tile * TILE + lanes
        length = len_kv
    else:
        head = head_first + pid // m_tiles
        m_tile = pid % m_tiles
        first, end = row_span(m_tile, block, MASK_MODE, TILE)
        for n_tile in tl.range(first, end):
            acc += tl.sum(_tile(ds_ptr, grad_scale_ptr, block_mask, head, m_tile, n_tile, 0, place, block,
                                MASK_MODE, MOD_FLAGS, SCALED, TILE, TILE), 1)  # fmt: skip
        index = row_first + m_tile * TILE + lanes
        length = len_q
    at = sum_ptr + head.to(tl.int64) * length + index
    tl.store(at, acc + tl.load(at, mask=index < length, other=0.0), mask=index < length)
