"""What goes into kernels in groups, by name: filled in by the host, read by the device code.

Triton (3.5 and later) takes named tuples as arguments and makes them inside kernels. Neither torch nor Triton is needed
here. What stands in an annotation is what the host gives; on the device a tensor is a pointer, an int an integer.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Strided(NamedTuple):
    """A [B, H, N, D] tensor that is read through pointers; the strides count 8 elements."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_n: int


class ScoreMods(NamedTuple):
    """What the options of a call need where a score becomes a probability (``epilogue``). The strides and the threshold
    are encoded (``terms.encode_unspecialized``)."""

    mask: Any
    """The attention mask, bytes of a boolean one; or None."""
    mask_stride_b: int
    mask_stride_h: int
    mask_stride_q: int
    mask_stride_k: int
    softcap: float
    """In log2 units."""
    rng: Any
    """Seed and offset of the dropout's stream, two int64; or None."""
    drop_threshold: int
    inverse_scale: float


class BlockMask(NamedTuple):
    """The block-mask tables (``mask_tiles``), and how a batch, a head and a tile find their line in them. The integers
    are encoded (``terms.encode_unspecialized``)."""

    states: Any
    """[lines, m_tiles, n_tiles]: what is visible of each tile."""
    row_spans: Any
    """[lines, m_tiles, 2]: the run of key tiles with anything visible."""
    key_spans: Any
    """[lines, n_tiles, 2]: the run of row tiles with anything visible."""
    lines_b: int
    """From one batch to the next."""
    lines_h: int
    m_tiles: int
    n_tiles: int


class Block(NamedTuple):
    """The tiles of a launch and what a row of them sees, see ``geometry``."""

    m_tiles: int
    n_tiles: int
    offset: int
    left: int
    right: int
    width: int


class Place(NamedTuple):
    """Where a launch is in the problem: its first row, key and head; ``slots`` of the workspace belong to a head."""

    row_first: int
    col_first: int
    head_first: int
    heads_q: int
    group: int
    slots: int
    heads: int
    """Of the launch."""


class RowPlace(NamedTuple):
    """``Place`` of a kernel that has whole rows."""

    row_first: int
    head_first: int
    heads_q: int
    slots: int


class KeyTile(NamedTuple):
    """The key tile that a program of the value phase owns: number of its first head in the launch, batch, head, tile of
    the block, first column."""

    z: int
    b: int
    h: int
    n_tile: int
    d: int


class KeySteps(NamedTuple):
    """Steps ``[begin, end)`` of a key tile's contraction, ``per_head`` of them over the rows of each head, which begin
    at row tile ``first``."""

    first: int
    per_head: int
    begin: int
    end: int


class Sizes(NamedTuple):
    """Sizes of a call without a workspace (``fused_kernels``)."""

    len_q: int
    len_kv: int
    left: int
    right: int
    heads_q: int
    group: int
    m_tiles: int


class Tables(NamedTuple):
    """The tables of packed sequences, see ``ragged.tables``."""

    head: Any
    row: Any
    key: Any
    chunk: Any
    low: Any
    high: Any
    task: Any


class Chunk(NamedTuple):
    """A chunk of packed row tiles: the first one and how many, its first slot, and the slots that a head has."""

    row_tile: int
    row_tiles: int
    slot: int
    slots: int


class Band(NamedTuple):
    """Row tile ``m`` of a sequence sees the key tiles [m + low, m + high), cut at 0 and ``n_tiles``."""

    low: int
    high: int
    n_tiles: int


class PackedKeyTile(NamedTuple):
    """The key tile that a program owns: number of its set of ``heads`` heads, first query head, KV head, first column,
    number of the tile among all."""

    g: int
    heads: int
    h: int
    h_kv: int
    d: int
    tile: int


class ForwardOperands(NamedTuple):
    """Of the packed value phase, forward."""

    p_tiles: Any
    v: Any
    v_tail: Any
    out: Any


class BackwardOperands(NamedTuple):
    """Of the packed value phase, backward; the tiles of P and dS are read by columns (``_t``) and by rows."""

    p_t_tiles: Any
    ds_tiles: Any
    ds_t_tiles: Any
    q: Any
    q_tail: Any
    k: Any
    k_tail: Any
    do: Any
    do_tail: Any
    dq: Any
    dk: Any
    dv: Any
