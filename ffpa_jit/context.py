"""The CUDA context of a thread."""

from __future__ import annotations

import threading

import torch

__all__ = ["ensure"]

_made = threading.local()


def ensure(device: torch.device) -> None:
    """Make the context of `device`, which must be the current one, current in this thread.

    Autograd runs backwards in threads of its own. PyTorch sets their device, but the context follows only with the
    first call of the CUDA runtime, and what we call first is the driver: tensor maps are encoded, kernels launched. An
    allocation that the cache serves is no such call, nor is a stream that is looked up.
    """
    if device.type == "cuda" and torch.version.hip is None and not hasattr(_made, f"device_{device.index}"):
        torch.cuda.is_current_stream_capturing()  # the cheapest call of the runtime, and allowed in a capture
        setattr(_made, f"device_{device.index}", True)
