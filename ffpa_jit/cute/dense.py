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
from ffpa_jit.problem import AttentionParams

__all__ = ["Forward"]


class Forward:
    """See `registry.Forward`: the launches of one kernel. Without `wants_lse` none is made, because an allocation is a
    tenth of a small call's time, and the kernel takes 0 for its address."""

    def __init__(self, launch: Callable[..., None], params: AttentionParams, wants_lse: bool) -> None:
        self._launch, self._params, self._wants_lse = launch, params, wants_lse

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None = None, rng: None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out laid out as `torch.empty_like(query)`, LSE), on the current device and stream."""
        out = torch.empty_like(query)
        device = query.device
        form = _form(
            query.shape, query.stride(), out.stride(), key.shape, key.stride(), value.stride(), self._params.is_causal,
            device.index,
        )  # fmt: skip
        if form.empty:
            return out.zero_(), torch.full(form.lse_shape, -math.inf, dtype=torch.float32, device=device)
        q, k, v, o = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        if form.direct and (q | k | v | o) % 16 == 0:
            lse = torch.empty(form.lse_shape, dtype=torch.float32, device=device) if self._wants_lse else None
            self._launch(
                q, k, v, o, 0 if lse is None else lse.data_ptr(), *form.numbers, self._params.scale, form.section,
                form.clusters, context.stream(device.index),
            )  # fmt: skip
            return out, lse
        if not layout.addressable(out.shape, out.stride()):
            query = query.contiguous()  # and with it the output
        written, lse = self(layout.readable(query), layout.readable(key), layout.readable(value))
        return out.copy_(written), lse


class _Form(NamedTuple):
    """What the shapes and strides of a call tell. `empty`: there is nothing to compute; `direct`: the kernel can
    address all tensors as they are. `numbers`: the kernel's arguments between the addresses and the scale."""

    lse_shape: tuple[int, ...]
    empty: bool
    direct: bool
    numbers: tuple[int, ...]
    section: int
    clusters: int


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
