"""Host side of a launch: operands as tensor descriptors, launches that repeat, and how many processors there are."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

Operand = Any
"""What ``operands.load_2d`` reads: a TMA descriptor, or (tensor, strides over batch, head and row in 8 elements)."""


def describable(t: torch.Tensor) -> bool:
    """Whether a [B, H, N, D] tensor can be read as it is: 16-byte rows, last stride 1, elsewhere 0 is fine."""
    if t.stride(-1) != 1 or t.data_ptr() % 16 != 0:
        return False
    lanes = 16 // t.element_size()
    return all(n == 1 or s % lanes == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True))


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
    return describe(TensorDescriptor, t, (1, 1, rows, cols))


def bind_tiles(t: torch.Tensor, rows: int, cols: int, tma: bool) -> Any:
    """The workspace, a [slots * TILE, TILE] tensor, read or written in [rows, cols] parts."""
    return describe(TensorDescriptor, t, (rows, cols)) if tma else t


def describe(kind: Any, t: torch.Tensor, block: tuple[int, ...], *layout: Any) -> Any:
    """A descriptor of the class ``kind``, read a ``block`` at a time.

    Its checks take 10 us, of a call that may take 100: they are made for the first tensor with such a block; what
    depends on the tensor, ``operand`` has seen to.
    """
    # The stride of a dimension of one element is arbitrary in torch, but a descriptor wants a legal one.
    strides = [s if n > 1 else t.shape[-1] for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)] + [1]
    key = kind, t.dtype, block
    rest = _checked.get(key)
    if rest is None:
        made = kind(t, list(t.shape), strides, list(block), *layout)
        _checked[key] = {k: v for k, v in vars(made).items() if k not in ("base", "shape", "strides")}
        return made
    made = object.__new__(kind)
    vars(made).update(rest, base=t, shape=list(t.shape), strides=strides)
    return made


_checked: dict[tuple[Any, ...], dict[str, Any]] = {}


_Found = tuple[Any, Any, tuple[Any, ...]]
"""A kernel (held, because its id is a key), what it was compiled to, and the constants to launch that with."""

_everywhere: dict[Any, _Found] = {}
"""What any call has found, by what Triton specialises a kernel on."""


def launch(device: torch.device, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> _Found | None:
    """Launch a kernel; one like it, if any call has launched that, without a search. Returns what was launched.

    To find a compiled kernel, Triton looks at every argument of every launch: 50 to 150 us of host time, more than many
    of these launches take on the device. Without a GPU there is none: the interpreter has no compiled kernels, and for
    tensors of "meta" (``offline``) nothing is launched.
    """
    if device.type != "cuda":
        kernel[(programs,)](*arguments, **constants)
        return None
    marks = (_key(kernel, constants), device.index, *map(mark, arguments)) if _marks_are_known() else None
    found = _everywhere.get(marks)
    if found is not None:
        _again(found, programs, arguments)
        return found
    compiled = kernel[(programs,)](*arguments, **constants)
    if compiled is None:
        return None
    # A compiled kernel takes the constants, too, by position.
    found = kernel, compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    if marks is not None:
        _everywhere[marks] = found
    return found


def _key(kernel: Any, constants: dict[str, Any]) -> tuple[Any, ...]:
    return id(kernel), *constants, *constants.values()


def _again(found: _Found, programs: int, arguments: tuple[Any, ...]) -> None:
    _, compiled, rest = found
    compiled[(programs, 1, 1)](*arguments, *rest)


class Launcher:
    """Launches the kernels of one call, round after round.

    Between the rounds of a call only integers change that no kernel is specialised on, so what was found in the first
    round is launched in the others, in a third of the time. The arguments of a kernel must be the same tensors each
    time, or such of the same shape, strides and alignment.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[Any, ...], _Found] = {}

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        key = _key(kernel, constants)
        found = self._known.get(key)
        if found is not None:
            _again(found, programs, arguments)
            return
        found = launch(self._device, kernel, programs, *arguments, **constants)
        if found is not None:
            self._known[key] = found


def mark(x: Any) -> Any:
    """All that Triton (3.5 to 3.9) may compile a kernel for, of an argument, as if it specialised on every one."""
    kind = type(x)
    if kind is int:
        return (x == 1) + 2 * (x % 16 == 0) + 4 * (-(2**31) <= x < 2**31)
    if x is None or kind is float or kind is bool:
        return kind
    if kind is tuple:
        return tuple(map(mark, x))
    if isinstance(x, torch.Tensor):
        # On AMD, also on whether offsets fit 32 bits.
        small = torch.version.hip is not None and x.untyped_storage().nbytes() < 2**31
        return x.dtype, x.data_ptr() % 16 == 0, small
    return kind, x.base.dtype, tuple(x.block_shape)


@cache
def _marks_are_known() -> bool:
    return triton_is_between((3, 5), (3, 9))


def triton_is_between(first: tuple[int, int], last: tuple[int, int]) -> bool:
    """Whether this Triton is one of the minor versions ``first`` to ``last``."""
    import triton

    version = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])
    return first <= version <= last


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of the device; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
