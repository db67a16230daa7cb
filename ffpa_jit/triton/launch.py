"""Host side of a launch: operands as tensor descriptors, launches that repeat, and how many processors there are."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

Operand = Any
"""What ``operands.load_2d`` reads: a TMA descriptor, or (tensor, strides over batch, head and row in 8 elements)."""


def describable(t: torch.Tensor) -> bool:
    """Whether a [B, H, N, D] tensor can be read as it is: 16-byte rows, last stride 1, elsewhere 0 is fine."""
    size = t.element_size()
    return (
        t.stride(-1) == 1
        and t.data_ptr() % 16 == 0
        and all(n == 1 or s * size % 16 == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True))
    )


def operand(t: torch.Tensor) -> torch.Tensor:
    """``t``, or a dense copy of it (O(B H N D)) where its strides cannot be described."""
    return t if describable(t) else t.clone(memory_format=torch.contiguous_format)


def bind(t: torch.Tensor, rows: int, cols: int, tma: bool) -> Operand | None:
    """A [B, H, N, D] tensor as an operand read in [rows, cols] tiles; None for a tile without columns."""
    if not cols:
        return None
    if not tma:
        b, h, n = (s // 8 if size > 1 else 0 for s, size in zip(t.stride()[:-1], t.shape[:-1], strict=True))
        return t, b, h, n
    # The stride of a dimension of one element is arbitrary in torch, but a descriptor wants a legal one.
    strides = [s if n > 1 else t.shape[-1] for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], [1, 1, rows, cols])


def bind_tiles(t: torch.Tensor, rows: int, cols: int, tma: bool) -> Any:
    """The workspace, a [slots * TILE, TILE] tensor, read or written in [rows, cols] parts."""
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, cols]) if tma else t


class Launcher:
    """Launches the kernels of one call, round after round.

    To find a compiled kernel, Triton looks at every argument of every launch: 50 to 150 us of host time, more than many
    of these launches take on the device. Between the rounds of a call only integers change that no kernel is
    specialised on, so what Triton found in the first round is launched in the others; that takes a third of the time.
    The arguments of a kernel must be the same tensors each time, but for those of other constants.
    """

    def __init__(self, device: torch.device) -> None:
        # The interpreter has no compiled kernels, and without a device (``offline``) nothing is launched.
        self._remembers = device.type == "cuda"
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        key = (id(kernel), *constants.values())
        found = self._known.get(key)
        if found is not None:
            compiled, rest = found
            compiled[(programs, 1, 1)](*arguments, *rest)
            return
        compiled = kernel[(programs,)](*arguments, **constants)
        if self._remembers and compiled is not None:
            # A compiled kernel takes the constants, too, by position.
            rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            self._known[key] = compiled, rest


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of the device; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
