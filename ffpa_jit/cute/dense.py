"""The forward's launch: what of a call the kernel is told, in the order of `forward_sm90.Forward.__call__`.

What follows from shapes and strides alone is computed once for each of their combinations (`_form`): a small call takes
longer on the host than on the GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ffpa_jit.cute.schedule import BLOCK, CLUSTER

__all__ = ["forward", "section_of"]

_TILE = CLUSTER * BLOCK
_L2_SHARE = 24 << 20
"""Bytes of keys and values that the clusters may work on at a time: half of an H200's second-level cache."""

# The handle without an object around it, where torch is built with CUDA.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


def forward(
    launch: Callable[..., None],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out laid out as `torch.empty_like(query)`, LSE), by `launch`, a kernel, on the current device and stream.

    Whether it is causal is a property of the kernel.
    """
    device = query.device
    form = _form(query.shape, query.stride(), key.shape, key.stride(), value.stride(), device.index)
    out = torch.empty_like(query)
    lse = torch.empty(form.lse_shape, dtype=torch.float32, device=device)
    if form.empty:
        return out.zero_(), lse.fill_(-math.inf)
    places = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
    if not form.direct or (places[0] | places[1] | places[2] | places[3]) % 16:
        if not _addressable(out.shape, out.stride()):
            query = query.contiguous()  # and with it the output
        written, lse = forward(launch, *[_readable(each) for each in (query, key, value)], scale=scale)
        return out.copy_(written), lse
    launch(*places, lse.data_ptr(), *form.numbers, scale, form.section, form.clusters, _stream(device.index))
    return out, lse


class _Form(NamedTuple):
    """What the shapes and strides of a call tell. `empty`: there is nothing to compute; `direct`: the kernel can
    address all tensors as they are. `numbers`: the kernel's arguments between the addresses and the scale."""

    lse_shape: tuple[int, ...]
    empty: bool
    direct: bool
    numbers: tuple[int, ...]
    section: int
    clusters: int


_Ints = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _form(
    shape: _Ints, stride: _Ints, key_shape: _Ints, key_stride: _Ints, value_stride: _Ints, device: int | None
) -> _Form:
    batch, heads_q, len_q, head_dim = shape
    heads, len_kv = key_shape[1], key_shape[2]
    lse_shape = (batch, heads_q, len_q)
    if 0 in shape or len_kv == 0:
        return _Form(lse_shape, True, True, (), 0, 0)
    out_stride = torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()
    direct = (
        _addressable(shape, stride)
        and _addressable(shape, out_stride)
        and all(
            _addressable(key_shape, each) and (each[2] > 0 or len_kv == 1) for each in (key_stride, value_stride)
        )
    )  # fmt: skip
    group = heads_q // heads
    key_strides, key_counts = _apart(key_shape, key_stride)
    value_strides, value_counts = _apart(key_shape, value_stride)
    numbers = (
        *stride[:3], *key_strides, *value_strides, *out_stride[:3], *key_counts, *value_counts, batch, heads, group,
        len_q, len_kv, head_dim,
    )  # fmt: skip
    tiles = -(-len_q * group // _TILE) * heads * batch
    section = section_of(len_kv, head_dim, heads * batch)
    return _Form(lse_shape, False, direct, numbers, section, min(tiles, _clusters(device)))


def section_of(len_kv: int, head_dim: int, heads: int) -> int:
    """How many key heads are worked on side by side: as many as the cache holds."""
    return max(1, min(heads, _L2_SHARE // (len_kv * head_dim * 4)))


def _addressable(shape: _Ints, stride: _Ints) -> bool:
    """Whether the last stride is 1, and every row begins at a multiple of 16 bytes from the first."""
    return stride[3] == 1 and all(
        step % 8 == 0 for step, size in zip(stride[:3], shape[:3], strict=True) if size > 1
    )  # fmt: skip


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it that the kernel can address."""
    fits = _addressable(tensor.shape, tensor.stride()) and tensor.data_ptr() % 16 == 0
    if fits and (tensor.stride(2) > 0 or tensor.shape[2] == 1):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _apart(shape: _Ints, stride: _Ints) -> tuple[_Ints, tuple[int, int]]:
    """Strides of batch, head and row, and over how many heads and batches TMA walks: one, where they all are the same.

    A dim of size 1 is never stepped along, but its stride is still checked.
    """
    batch, heads, length, head_dim = shape
    batch_stride, head_stride, row_stride, _ = stride
    row_stride = row_stride if length > 1 else -(-head_dim // 8) * 8
    heads = heads if head_stride > 0 else 1
    batch = batch if batch_stride > 0 else 1
    strides = batch_stride if batch > 1 else row_stride, head_stride if heads > 1 else row_stride, row_stride
    return strides, (heads, batch)


@functools.cache
def _clusters(device: int | None) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count // CLUSTER
