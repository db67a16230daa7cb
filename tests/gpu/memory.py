"""How much memory of the device a call needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T", bound=Sequence[torch.Tensor])


def extra_memory(call: Callable[[], T]) -> tuple[T, int]:
    """What `call` returns, and the bytes it held at its peak beside that."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    size = sum(x.numel() * x.element_size() for x in result)
    return result, torch.cuda.max_memory_allocated() - before - size
