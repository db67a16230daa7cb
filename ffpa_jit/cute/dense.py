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

from ffpa_jit import context, layout
from ffpa_jit.cute.order import section_of
from ffpa_jit.cute.schedule import CLUSTER, TILE
from ffpa_jit.layout import Ints

__all__ = ["forward", "repeat"]

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
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out laid out as `torch.empty_like(query)`, LSE), by `launch`, a kernel, on the current device and stream.

    Whether it is causal is a property of the kernel; here it decides the order of the tiles.
    """
    out = torch.empty_like(query)
    form = _form_of(query, key, value, out, is_causal)
    if form.empty:
        return out.zero_(), torch.full(form.lse_shape, -math.inf, dtype=torch.float32, device=query.device)
    if form.direct and _aligned(query, key, value, out):
        lse = torch.empty(form.lse_shape, dtype=torch.float32, device=query.device)
        _launch(launch, form, query, key, value, out, lse.data_ptr(), scale)
        return out, lse
    if not layout.addressable(out.shape, out.stride()):
        query = query.contiguous()  # and with it the output
    tensors = [layout.readable(each) for each in (query, key, value)]
    written, lse = forward(launch, *tensors, scale=scale, is_causal=is_causal)
    return out.copy_(written), lse


def repeat(
    launch: Callable[..., None],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    *,
    is_causal: bool,
    wants_lse: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None] | None] | None:
    """`forward` for other tensors with the shapes and strides of a call's, on this device, as a function of them and
    the scale, with None for an LSE that is not wanted: an allocation is a tenth of such a call's time. `out`: what the
    call gave.

    None if such calls need copies; that function returns None where an address does, or another device is the current
    one.
    """
    device = query.device
    form = _form_of(query, key, value, out, is_causal)
    if form.empty or not form.direct:
        return None

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        if context.current_device() != device.index:
            return None
        context.ensure(device)
        out = torch.empty_like(query)
        if not _aligned(query, key, value, out):
            return None
        lse = torch.empty(form.lse_shape, dtype=torch.float32, device=device) if wants_lse else None
        _launch(launch, form, query, key, value, out, 0 if lse is None else lse.data_ptr(), scale)
        return out, lse

    return run


def _aligned(*tensors: torch.Tensor) -> bool:
    """Whether all begin at a multiple of 16 bytes."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses % 16 == 0


def _launch(
    launch: Callable[..., None], form: _Form, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor, lse: int, scale: float,
) -> None:  # fmt: skip
    """Launch for tensors of a form that is `direct`, into `out` and the memory at `lse`, 0 if there is none."""
    launch(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), lse, *form.numbers, scale, form.section,
        form.clusters, _stream(out.device.index),
    )  # fmt: skip


class _Form(NamedTuple):
    """What the shapes and strides of a call tell. `empty`: there is nothing to compute; `direct`: the kernel can
    address all tensors as they are. `numbers`: the kernel's arguments between the addresses and the scale."""

    lse_shape: tuple[int, ...]
    empty: bool
    direct: bool
    numbers: tuple[int, ...]
    section: int
    clusters: int


def _form_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, is_causal: bool) -> _Form:
    return _form(
        query.shape, query.stride(), out.stride(), key.shape, key.stride(), value.stride(), is_causal,
        query.device.index,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _form(
    shape: Ints, stride: Ints, out_stride: Ints, key_shape: Ints, key_stride: Ints, value_stride: Ints, is_causal: bool,
    device: int | None,
) -> _Form:  # fmt: skip
    batch, heads_q, len_q, head_dim = shape
    heads, len_kv = key_shape[1], key_shape[2]
    lse_shape = (batch, heads_q, len_q)
    if 0 in shape or len_kv == 0:
        return _Form(lse_shape, True, True, (), 0, 0)
    direct = (
        layout.addressable(shape, stride)
        and layout.addressable(shape, out_stride)
        and all(
            layout.addressable(key_shape, each) and (each[2] > 0 or len_kv == 1) for each in (key_stride, value_stride)
        )
    )  # fmt: skip
    group = heads_q // heads
    key_strides, key_counts = layout.apart(key_shape, key_stride)
    value_strides, value_counts = layout.apart(key_shape, value_stride)
    numbers = (
        *stride[:3], *key_strides, *value_strides, *out_stride[:3], *key_counts, *value_counts, batch, heads, group,
        len_q, len_kv, head_dim,
    )  # fmt: skip
    tiles = -(-len_q * group // TILE) * heads * batch
    clusters = _clusters(device)
    section = section_of(heads * batch, group, len_q, len_kv, is_causal, clusters)
    return _Form(lse_shape, False, direct, numbers, section, min(tiles, clusters))


def _clusters(device: int | None) -> int:
    return context.processors(device) // CLUSTER
