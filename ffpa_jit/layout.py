"""Whether kernels can address a [B, H, N, D] tensor of 16-bit numbers as it lies in memory: by aligned 16 bytes."""

from __future__ import annotations

import torch

__all__ = ["Ints", "addressable", "apart", "fits", "readable"]

Ints = tuple[int, ...]


def addressable(shape: Ints, stride: Ints) -> bool:
    """Whether the last stride is 1, and every row begins at a multiple of 16 bytes from the first."""
    return stride[3] == 1 and all(step % 8 == 0 for step, size in zip(stride[:3], shape[:3], strict=True) if size > 1)


def fits(tensor: torch.Tensor) -> bool:
    """Whether every row begins at 16 aligned bytes, and has its numbers next to each other."""
    return tensor.data_ptr() % 16 == 0 and addressable(tensor.shape, tensor.stride())


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it: one that `fits`, and whose rows are not all the same memory."""
    if fits(tensor) and (tensor.stride(2) > 0 or tensor.shape[2] == 1):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def apart(shape: Ints, stride: Ints) -> tuple[Ints, tuple[int, int]]:
    """Strides of batch, head and row, and over how many heads and batches the copy engine (TMA) walks: one, where they
    all are the same.

    A dim of size 1 is never stepped along, but its stride is still checked.
    """
    batch, heads, length, head_dim = shape
    batch_stride, head_stride, row_stride, _ = stride
    row_stride = row_stride if length > 1 else -(-head_dim // 8) * 8
    heads = heads if head_stride > 0 else 1
    batch = batch if batch_stride > 0 else 1
    strides = batch_stride if batch > 1 else row_stride, head_stride if heads > 1 else row_stride, row_stride
    return strides, (heads, batch)
