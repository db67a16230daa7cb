"""Host side of a launch: operands as tensor descriptors, and how many processors there are."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def describable(t: torch.Tensor) -> bool:
    """Whether a [B, H, N, D] tensor can be read through a TMA descriptor: 16-byte rows, unit last stride."""
    size = t.element_size()
    return (
        t.stride(-1) == 1
        and t.data_ptr() % 16 == 0
        and all(n == 1 or (s > 0 and s * size % 16 == 0) for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True))
    )


def operand(t: torch.Tensor) -> torch.Tensor:
    """``t``, or a dense copy of it (O(B H N D)) where its strides cannot be described."""
    return t if describable(t) else t.contiguous()


def describe(t: torch.Tensor, rows: int, cols: int) -> TensorDescriptor | None:
    """[1, 1, rows, cols] boxes of a [B, H, N, D] tensor; None for a box without columns."""
    if not cols:
        return None
    # The stride of a dimension of one element is arbitrary in torch, but a descriptor wants a legal one.
    strides = [s if n > 1 else t.shape[-1] for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, 1, rows, cols])


def describe_tiles(t: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """[rows, cols] boxes of the workspace, a [slots * TILE, TILE] tensor."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, cols])


@lru_cache(maxsize=None)
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of the device; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
