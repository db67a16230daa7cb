"""The forward's launch: what of a call goes into `ForwardParams`, and how many thread blocks share its keys."""

from __future__ import annotations

import ctypes
import math

import torch

from ffpa_jit import context, layout
from ffpa_jit.cuda import tensor_maps
from ffpa_jit.cuda.instantiate import KernelSpec, Tile, has_tma, tile_of
from ffpa_jit.cuda.load import Kernel
from ffpa_jit.cuda.params import ForwardParams
from ffpa_jit.settings import workspace_bytes

__all__ = ["DROPOUT_LEVELS", "forward", "splits_for"]

DROPOUT_LEVELS = 1 << 16
"""A dropout probability is rounded to a multiple of 1 / DROPOUT_LEVELS (`cuda_src/dropout.cuh`)."""

_MASK_KINDS = {torch.bool: 1, torch.float32: 3}  # any other type is the query's: 2
_Strides, _MaskStrides = ctypes.c_longlong * 3, ctypes.c_longlong * 4


def forward(
    kernel: Kernel,
    spec: KernelSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    is_causal: bool,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    rng: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out laid out as `torch.empty_like(query)`, LSE), by `kernel` of `spec`, on the current device and stream."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    batch, heads_q, len_q, head_dim = query.shape
    heads_kv, len_kv = key.shape[1], key.shape[2]
    if query.numel() == 0 or len_kv == 0:
        return out.zero_(), lse.fill_(-math.inf)
    tile = tile_of(spec)
    query, key, value = layout.readable(query), layout.readable(key), layout.readable(value)
    written = out if layout.fits(out) else torch.empty_like(query, memory_format=torch.contiguous_format)
    row_tiles = -(-len_q * (heads_q // heads_kv) // tile.rows)
    blocks = row_tiles * batch * heads_kv
    splits = splits_for(blocks, batch * heads_q * len_q, len_kv, head_dim, tile, context.processors(query.device.index))

    params = ForwardParams()
    params.q, params.k, params.v = query.data_ptr(), key.data_ptr(), value.data_ptr()
    params.out, params.lse = written.data_ptr(), lse.data_ptr()
    params.q_stride, params.k_stride = _Strides(*query.stride()[:3]), _Strides(*key.stride()[:3])
    params.v_stride, params.out_stride = _Strides(*value.stride()[:3]), _Strides(*written.stride()[:3])
    params.batch, params.heads_q, params.heads_kv = batch, heads_q, heads_kv
    params.len_q, params.len_kv, params.head_dim = len_q, len_kv, head_dim
    params.row_tiles, params.splits, params.causal = row_tiles, splits, is_causal
    params.scale = scale
    if has_tma(spec.arch):
        params.k_map, params.k_head_step, params.k_batch_step = _map(key, tile.keys)
        params.v_map, params.v_head_step, params.v_batch_step = _map(value, tile.value_rows)
    if attn_mask is not None:
        params.mask, params.mask_stride = attn_mask.data_ptr(), _MaskStrides(*attn_mask.stride())
        params.mask_kind = _MASK_KINDS.get(attn_mask.dtype, 2)
    if dropout_p > 0.0:
        assert rng is not None
        threshold = round(dropout_p * DROPOUT_LEVELS)
        params.dropout_threshold, params.rng = threshold, rng.data_ptr()
        params.dropout_scale = DROPOUT_LEVELS / (DROPOUT_LEVELS - threshold)
    stream = torch.cuda.current_stream(query.device).cuda_stream
    launch = kernel.launch
    if splits == 1:
        launch(params, "forward", (blocks, 1), stream)
    else:
        rows = batch * heads_q * len_q
        partial_out = query.new_empty((splits, rows, head_dim), dtype=torch.float32)
        partial_lse = query.new_empty((splits, rows), dtype=torch.float32)
        params.partial_out, params.partial_lse = partial_out.data_ptr(), partial_lse.data_ptr()
        launch(params, "forward", (blocks, splits), stream)
        launch(params, "combine", (-(-rows // 8), 1), stream)
    if written is not out:
        out.copy_(written)
    return out, lse


def splits_for(blocks: int, rows: int, len_kv: int, head_dim: int, tile: Tile, processors: int) -> int:
    """Into how many parts the keys are split: 1, unless the blocks would leave half of the processors idle.

    Each part then has at least two tiles of keys, and the partial results (fp32, `rows` in all) stay under the
    workspace cap.
    """
    wanted = min(processors // blocks, -(-len_kv // tile.keys) // 2)
    if wanted <= 1:
        return 1
    fitting = workspace_bytes() // (rows * (head_dim + 1) * 4)
    return max(1, min(wanted, fitting))


def _map(tensor: torch.Tensor, rows: int) -> tuple[ctypes.Array[ctypes.c_ubyte], int, int]:
    """The tensor map of K or V, and whether its heads and its batches lie apart (1) or are one (0)."""
    (batch_stride, head_stride, row_stride), (heads, batch) = layout.apart(tensor.shape, tensor.stride())
    sizes, strides = (tensor.shape[3], tensor.shape[2], heads, batch), (row_stride, head_stride, batch_stride)
    return tensor_maps.encode(tensor.data_ptr(), sizes, strides, rows), int(heads > 1), int(batch > 1)
