"""Device-side access to operands: [B, H, N, D] tensors and the tiles of the workspace.

Where the hardware has TMA an operand is a tensor descriptor. Elsewhere a tensor is a ``params.Strided``, whose strides
count 8 elements, and the workspace a pointer, because a descriptor that Triton lowers
to pointers loses the alignment that ``cp.async`` needs (Triton 3.6 then loads without pipelining). Either way what
lies outside is read as zero and never written, offsets are 64-bit, and rows start at multiples of 16 bytes
(``launch.operand`` sees to it).
"""

import triton
import triton.language as tl


@triton.jit
def _addresses(x, b, h, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    # Strides come in units of 8 elements, so that the compiler sees the alignment whatever their value.
    start = (b.to(tl.int64) * x.stride_b + h.to(tl.int64) * x.stride_h) * 8
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)
    return x.ptr + start + rows[:, None] * (x.stride_n * 8) + (col + tl.arange(0, COLS))[None, :]


@triton.jit
def load_2d(
    x, b, h, row, col, n_rows,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A [ROWS, COLS] tile of a [B, H, n_rows, D] tensor; zeros outside."""
    if TMA:
        y = x.load([b, h, row, col]).reshape([ROWS, COLS])
    else:
        inside = (row + tl.arange(0, ROWS) < n_rows)[:, None] & (col + tl.arange(0, COLS) < D)[None, :]
        y = tl.load(_addresses(x, b, h, row, col, ROWS, COLS), mask=inside, other=0.0)
    return y


@triton.jit
def store_2d(
    x, b, h, row, col, n_rows, y,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Store a tile into a [B, H, n_rows, D] tensor; what lies outside is dropped."""
    if TMA:
        x.store([b, h, row, col], y.to(x.dtype).reshape([1, 1, ROWS, COLS]))
    else:
        inside = (row + tl.arange(0, ROWS) < n_rows)[:, None] & (col + tl.arange(0, COLS) < D)[None, :]
        tl.store(_addresses(x, b, h, row, col, ROWS, COLS), y.to(x.ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_tile(p, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr):
    """A [ROWS, COLS] part of a workspace tile; ``row`` counts through all slots."""
    if TMA:
        y = p.load([row, col])
    else:
        start = tl.multiple_of(row.to(tl.int64) * TILE + col, 16)
        y = tl.load(p + start + (tl.arange(0, ROWS)[:, None] * TILE + tl.arange(0, COLS)[None, :]))
    return y


@triton.jit
def store_tile(p, row, y, TILE: tl.constexpr, TMA: tl.constexpr):
    """Store a whole workspace tile, already in the storage dtype."""
    if TMA:
        p.store([row, 0], y)
    else:
        start = tl.multiple_of(row.to(tl.int64) * TILE, 16)
        tl.store(p + start + (tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]), y)
