"""Capturing a step into a CUDA graph, as torch documents it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def capture(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of `step`, run once before on a stream of its own, and what the captured run returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
