"""The forward's launch: what of a call goes into `ForwardParams`, and how many thread blocks share its keys."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch

from ffpa_jit import context, layout
from ffpa_jit.cuda import tensor_maps
from ffpa_jit.cuda.instantiate import KernelSpec, Tile, has_tma, tile_of
from ffpa_jit.cuda.load import Kernel
from ffpa_jit.cuda.params import ForwardParams
from ffpa_jit.problem import AttentionParams, UnavailableError
from ffpa_jit.settings import workspace_bytes

__all__ = ["DROPOUT_LEVELS", "Forward", "splits_for"]

DROPOUT_LEVELS = 1 << 16
"""A dropout probability is rounded to a multiple of 1 / DROPOUT_LEVELS (`cuda_src/dropout.cuh`)."""

_MASK_KINDS = {torch.bool: 1, torch.float32: 3}  # any other type is the query's: 2
_Strides, _MaskStrides = ctypes.c_longlong * 3, ctypes.c_longlong * 4
_MAPS = (ForwardParams.k_map.offset, ForwardParams.v_map.offset)
_MOST_LAYOUTS = 1024


class Forward:
    """See `registry.Forward`: the launches of one kernel. What a layout tells is packed once."""

    def __init__(self, kernel: Kernel, spec: KernelSpec, params: AttentionParams) -> None:
        self._kernel, self._spec, self._params = kernel, spec, params
        self._layouts: dict[Any, _Layout] = {}

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(out laid out as `torch.empty_like(query)`, LSE), on the current device and stream."""
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        if query.numel() == 0 or key.shape[2] == 0:
            return out.zero_(), lse.fill_(-math.inf)
        q, k, v, o = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        found = self._layout(query, key, value, out, mask)
        if not found.direct or (q | k | v | o) % 16:
            # A layout that the kernels cannot address is computed from copies.
            dense = torch.empty_like(query, memory_format=torch.contiguous_format)
            written, lse = self(dense.copy_(query), layout.readable(key), layout.readable(value), mask, rng)
            return out.copy_(written), lse
        params = ForwardParams.from_buffer_copy(found.template)
        params.q, params.k, params.v, params.out, params.lse = q, k, v, o, lse.data_ptr()
        if found.has_maps:
            memory = ctypes.addressof(params)
            for at, address in zip(_MAPS, (k, v), strict=True):
                ctypes.c_uint64.from_address(memory + at).value = address
        if mask is not None:
            params.mask = mask.data_ptr()
        if rng is not None:
            params.rng = rng.data_ptr()
        stream, launch = context.stream(query.device.index), self._kernel.launch
        if found.splits == 1:
            launch(params, "forward", (found.blocks, 1), stream)
        else:
            partial = query.new_empty(found.splits * found.rows * (query.shape[3] + 1), dtype=torch.float32)
            params.partial_out = partial.data_ptr()
            params.partial_lse = partial.data_ptr() + 4 * found.splits * found.rows * query.shape[3]
            launch(params, "forward", (found.blocks, found.splits), stream)
            launch(params, "combine", (-(-found.rows // 8), 1), stream)
        return out, lse

    def _layout(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, mask: torch.Tensor | None
    ) -> _Layout:
        of_mask = None if mask is None else (mask.shape, mask.stride(), mask.dtype)
        wanted = (
            query.shape, query.stride(), key.shape, key.stride(), value.stride(), out.stride(), of_mask,
            workspace_bytes(),
        )  # fmt: skip
        found = self._layouts.get(wanted)
        if found is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[wanted] = _packed(self._spec, self._params, query, key, value, out, mask)
        return found


class _Layout(NamedTuple):
    """A launch but for addresses. `direct`: the kernels can address all tensors as they lie. `template`: of
    `ForwardParams`; `blocks`: of a part of the keys; `splits`: parts; `rows`: in all heads. With `has_maps` the
    template has tensor maps, whose addresses are to be written."""

    direct: bool
    template: bytes
    blocks: int
    splits: int
    rows: int
    has_maps: bool


def _packed(
    spec: KernelSpec, options: AttentionParams, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, mask: torch.Tensor | None,
) -> _Layout:  # fmt: skip
    batch, heads_q, len_q, head_dim = query.shape
    heads_kv, len_kv = key.shape[1], key.shape[2]
    addressable = all(layout.addressable(x.shape, x.stride()) for x in (query, key, value, out))
    if not addressable or any(x.stride(2) == 0 and x.shape[2] > 1 for x in (query, key, value)):
        return _Layout(False, b"", 0, 0, 0, False)
    tile = tile_of(spec)
    row_tiles = -(-len_q * (heads_q // heads_kv) // tile.rows)
    blocks, rows = row_tiles * batch * heads_kv, batch * heads_q * len_q
    splits = splits_for(blocks, rows, len_kv, head_dim, tile, context.processors(query.device.index))

    params = ForwardParams()
    params.q_stride, params.k_stride = _Strides(*query.stride()[:3]), _Strides(*key.stride()[:3])
    params.v_stride, params.out_stride = _Strides(*value.stride()[:3]), _Strides(*out.stride()[:3])
    params.batch, params.heads_q, params.heads_kv = batch, heads_q, heads_kv
    params.len_q, params.len_kv, params.head_dim = len_q, len_kv, head_dim
    params.row_tiles, params.splits, params.causal = row_tiles, splits, options.is_causal
    params.scale = options.scale
    has_maps = has_tma(spec.arch)
    if has_maps:
        params.k_map, params.k_head_step, params.k_batch_step = _map(key, tile.keys)
        params.v_map, params.v_head_step, params.v_batch_step = _map(value, tile.value_rows)
    if mask is not None:
        strides = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
        params.mask_stride, params.mask_kind = _MaskStrides(*strides), _MASK_KINDS.get(mask.dtype, 2)
    if options.dropout_p > 0.0:
        threshold = round(options.dropout_p * DROPOUT_LEVELS)
        params.dropout_threshold = threshold
        params.dropout_scale = DROPOUT_LEVELS / (DROPOUT_LEVELS - threshold)
    return _Layout(True, bytes(params), blocks, splits, rows, has_maps)


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
    """The tensor map of K or V, in boxes of 64 columns by `rows` rows, and whether its heads and its batches lie apart
    (1) or are one (0). The kernels take any map whose address is the tensor's."""
    if not tensor_maps.address_is_first():
        raise UnavailableError("this driver's tensor maps are of a kind that is not known here; use the Triton backend")
    (batch_stride, head_stride, row_stride), (heads, batch) = layout.apart(tensor.shape, tensor.stride())
    sizes, strides = (tensor.shape[3], tensor.shape[2], heads, batch), (row_stride, head_stride, batch_stride)
    encoded = tensor_maps.encode(tensor.data_ptr(), tensor_maps.UINT16, sizes, strides, (64, rows, 1, 1))
    return (ctypes.c_ubyte * tensor_maps.BYTES).from_buffer_copy(encoded), int(heads > 1), int(batch > 1)
