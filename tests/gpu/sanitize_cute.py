"""Tiny calls of every CuTe-DSL kernel, for NVIDIA's compute-sanitizer, under which a call takes a hundred times longer.

    python tests/gpu/sanitize_cute.py  # compiles what is not in the cache yet
    compute-sanitizer --tool memcheck --error-exitcode 3 python tests/gpu/sanitize_cute.py
    compute-sanitizer --tool racecheck --error-exitcode 3 python tests/gpu/sanitize_cute.py

Two clusters share out several tiles each: lengths end within tiles and blocks, heads within groups of three. Inputs are
made on the CPU, and results are checked there, so that hardly any kernel runs but those that are meant. Exits with 1 if
a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from ffpa_jit import ffpa_attn_func
from ffpa_jit.cute import dense
from ffpa_jit.cute.spec import HEAD_DIMS
from tests import oracle
from tests.cases.shapes import Shape, make


def cases(head_dims: list[int]) -> list[tuple[Shape, torch.dtype]]:
    """For each head dim one that is full and one that is causal; only one of them ends where a box ends."""
    found = []
    for head_dim in head_dims:
        found.append((Shape(1, 9, 3, 61, 150, head_dim), torch.bfloat16))
        found.append((Shape(1, 9, 3, 61, 150, head_dim - 8, True), torch.bfloat16))
    return [*found, (Shape(1, 3, 3, 129, 65, head_dims[-1]), torch.float16)]


def wrong(shape: Shape, dtype: torch.dtype) -> str | None:
    """Run one call, and twice the same without an LSE, which the second time goes the short way to a kernel that has
    nowhere to put one; what is wrong with their results."""
    q, k, v, _ = make(shape, dtype, layout="bshd")
    tensors = [x.to("cuda") for x in (q, k, v)]
    options = {"is_causal": shape.is_causal, "enable_gqa": shape.enable_gqa, "backend": "cutedsl"}
    out, lse = ffpa_attn_func(*tensors, return_lse=True, **options)
    for _ in range(2):
        if not torch.equal(ffpa_attn_func(*tensors, **options).cpu(), out.cpu()):
            return "another output without an LSE"
    try:
        oracle.check(q, k, v, out=out.cpu(), lse=lse.cpu(), is_causal=shape.is_causal)
    except AssertionError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Tiny calls of every CuTe-DSL kernel, for compute-sanitizer.")
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), choices=HEAD_DIMS)
    parser.add_argument("--clusters", type=int, default=2, help="clusters that share out the tiles (default: 2)")
    options = parser.parse_args()
    dense._clusters = lambda device: options.clusters  # several tiles for each, without hundreds of them
    failed = 0
    for shape, dtype in cases(options.head_dims):
        start = time.perf_counter()
        error = wrong(shape, dtype)
        failed += error is not None
        print(f"{shape} {dtype}: {error or 'right'} ({time.perf_counter() - start:.1f} s)", flush=True)
    print("ok" if not failed else f"{failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
