"""The CUDA context of a thread, what must not happen while a stream is captured, and a device's size."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

__all__ = ["current_device", "ensure", "processors", "refuse_capture", "stream"]


class _Made(threading.local):
    """The devices whose context a thread has."""

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()


_made = _Made()

# Without Python's wrapper, where torch is built with CUDA: callers hold a CUDA tensor, so that all is initialised.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


stream: Callable[[int | None], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""The current stream of a device, by its index, as the raw handle."""


def ensure(device: torch.device) -> None:
    """Make the context of `device`, which must be the current one, current in this thread.

    Autograd runs backwards in threads of its own. PyTorch sets their device, but the context follows only with the
    first call of the CUDA runtime, and what we call first is the driver: tensor maps are encoded, kernels launched. An
    allocation that the cache serves is no such call, nor is a stream that is looked up.
    """
    made = _made.devices
    if device not in made:
        if device.type == "cuda" and torch.version.hip is None:
            torch.cuda.is_current_stream_capturing()  # the cheapest call of the runtime, and allowed in a capture
        made.add(device)


@functools.cache
def processors(device: int | None) -> int:
    """Streaming multiprocessors of a CUDA device, by its index."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def refuse_capture(doing: str) -> None:
    """RuntimeError if the current stream is being captured into a CUDA graph, which `doing` would break."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{doing} cannot happen while a CUDA graph is captured: run the call once before the capture, or "
            "ffpa_jit.warm(...) in this process (`ffpa-jit warm` compiles it for later processes)"
        )
