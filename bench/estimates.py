#!/usr/bin/env python3
"""Measure what the dispatcher knows of the CuTe-DSL kernels' speed, and write it down.

    python bench/estimates.py [--out FILE]      # default: ffpa_jit/cute/estimates.json

For each instantiated head dim, full and causal, the TFLOP/s of a call that fills the GPU (32 heads of 8192 queries and
keys), the median of a few; and what a call takes that computes next to nothing. Run it on an idle GPU; rates differ by
10 % between runs with the clocks, which is less than what separates the backends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from ffpa_jit import ffpa_attn_func
from ffpa_jit.cute.estimates import TABLE
from ffpa_jit.cute.spec import HEAD_DIMS

HEADS, LENGTH, REPEATS = 32, 8192, 7


def _random(heads: int, length: int, head_dim: int) -> torch.Tensor:
    return torch.randn(1, heads, length, head_dim, dtype=torch.bfloat16, device="cuda")


def rate(head_dim: int, causal: bool) -> float:
    """TFLOP/s of a long call, counting the visible scores."""
    query, key, value = (_random(HEADS, LENGTH, head_dim) for _ in range(3))
    times = []
    for _ in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        ffpa_attn_func(query, key, value, is_causal=causal, backend="cutedsl")
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    pairs = LENGTH * (LENGTH + 1) / 2 if causal else LENGTH * LENGTH
    return 4 * HEADS * pairs * head_dim / statistics.median(times[1:]) / 1e9


def overhead(calls: int = 500) -> float:
    """Microseconds that a call takes whose keys are one block, in a row of such calls."""
    query = _random(1, 64, 512)
    for _ in range(20):
        ffpa_attn_func(query, query, query, backend="cutedsl")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        ffpa_attn_func(query, query, query, backend="cutedsl")
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args()
    with torch.no_grad():
        table = {
            "device": torch.cuda.get_device_name(),
            "overhead_us": round(overhead(), 1),
            "full": {str(head_dim): round(rate(head_dim, False), 1) for head_dim in HEAD_DIMS},
            "causal": {str(head_dim): round(rate(head_dim, True), 1) for head_dim in HEAD_DIMS},
        }
    arguments.out.write_text(json.dumps(table, indent=2) + "\n")
    print(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
