#!/usr/bin/env python3
"""The main job in one run, on whatever machine this is.

With a GPU: forward and backward at D=512, JIT-compiled, timed against PyTorch's SDPA and checked against float64; then
a masked forward and decoding without gradients.
Without: the same kernels through Triton's interpreter on a small problem, checked against float64; then the kernels are
compiled for sm_90, which takes no GPU, and their registers, spills and shared memory are printed; then one CUDA kernel,
if nvcc or NVRTC is there.

Try it with another head dim: python examples/demo.py --head-dim 640
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported

import torch.nn.functional as F  # noqa: E402

from ffpa_jit import explain, ffpa_attn_func  # noqa: E402

SDPA = F.scaled_dot_product_attention
ROOT = Path(__file__).resolve().parents[1]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> list[torch.Tensor]:
    """Causal attention of [B, H, N, D] tensors and its gradients, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(s.shape[-1] - s.shape[-2] + 1)
    out = s.masked_fill(hidden, -math.inf).softmax(-1) @ v.repeat_interleave(group, 1)
    return [out, *torch.autograd.grad(out, (q, k, v), do.double())]


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> bool:
    """Print the relative error of the output and of each gradient, beside SDPA's where SDPA has the same mask."""
    reference = exact(q, k, v, do)
    columns = {"ours": ffpa_attn_func}
    if q.shape[2] == k.shape[2]:
        columns["SDPA"] = SDPA
    errors = {}
    for name, attention in columns.items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, is_causal=True, enable_gqa=True)
        results = [out, *torch.autograd.grad(out, leaves, do)]
        errors[name] = [((a - b).norm() / b.norm()).item() for a, b in zip(results, reference, strict=True)]
    print("relative error against float64     out       dq        dk        dv")
    for name, values in errors.items():
        print(f"{name:>30}  " + "  ".join(f"{e:.2e}" for e in values))
    return all(e < 2e-2 for e in errors["ours"])


def milliseconds(call) -> float:
    for _ in range(2):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 5


def on_a_gpu(head_dim: int) -> bool:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    new = {"dtype": torch.bfloat16, "device": "cuda"}
    q, do = (torch.randn(1, 4, 1024, head_dim, **new) for _ in range(2))
    k, v = (torch.randn(1, 2, 1024, head_dim, **new) for _ in range(2))
    print(explain(q.detach().requires_grad_(), k, v, is_causal=True, enable_gqa=True))
    start = time.perf_counter()
    right = check(q, k, v, do)
    print(f"first calls, compilation included: {time.perf_counter() - start:.1f} s\n")

    n, heads = 8192, 16
    q, k, v, do = (torch.randn(1, heads, n, head_dim, **new) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    flops = 4 * heads * n * n * head_dim
    print(f"self-attention, N={n}, H={heads}, D={head_dim}, bf16        forward              backward")
    times = {}
    for name, attention in (("SDPA", SDPA), ("ours", ffpa_attn_func)):
        with torch.no_grad():
            forward = milliseconds(lambda f=attention: f(q, k, v))
        out = attention(q, k, v)
        backward = milliseconds(lambda o=out: torch.autograd.grad(o, leaves, do, retain_graph=True))
        times[name] = forward, backward
        print(
            f"{name:>40}  {forward:8.2f} ms {flops / forward / 1e9:5.0f} TFLOP/s"
            f"  {backward:8.2f} ms {2.5 * flops / backward / 1e9:5.0f} TFLOP/s"
        )
        del out
    ratios = [a / b for a, b in zip(times["SDPA"], times["ours"], strict=True)]
    print(f"{'faster by':>40}  {ratios[0]:8.2f} x {'':13}  {ratios[1]:8.2f} x")
    return without_gradients(q.detach(), k.detach(), v.detach()) and right


def without_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """A masked forward and decoding beside SDPA."""
    n = k.shape[2]
    mask = torch.arange(n, device="cuda") < 7 * n // 8
    right = True
    print("\nno gradients                                             SDPA        ours    difference")
    for name, rows, options in (
        ("key-padding mask", q, {"attn_mask": mask[None, None, None]}),
        ("decoding, 1 query", q[:, :, :1], {}),
    ):
        calls = [functools.partial(f, rows, k, v, **options) for f in (SDPA, ffpa_attn_func)]
        with torch.no_grad():
            theirs, ours = (milliseconds(call) for call in calls)
            a, b = (call().double() for call in calls)
        error = ((a - b).norm() / a.norm()).item()
        right = right and error < 2e-2
        print(f"{name:>50} {theirs:8.3f} ms {ours:8.3f} ms  {error:.1e}")
    return right


def without_a_gpu(head_dim: int) -> bool:
    print("no GPU: the Triton kernels run through Triton's interpreter, on a small problem in fp16\n")
    q, do = (torch.randn(1, 2, 130, head_dim, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(1, 1, 200, head_dim, dtype=torch.float16) for _ in range(2))
    print(explain(q.detach().requires_grad_(), k, v, is_causal=True, enable_gqa=True))
    start = time.perf_counter()
    right = check(q, k, v, do)
    print(f"interpreted in {time.perf_counter() - start:.1f} s\n")
    print("the same kernels compiled for sm_90 (H100, H200), which takes no GPU:", flush=True)
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "bench/compile_kernels.py"),
            "sm_90",
            "--head-dims",
            str(head_dim),
            "--causal",
            "1",
        ],
        env=environment,
    )
    return compile_one_cuda_kernel(head_dim) and right and done.returncode == 0


def compile_one_cuda_kernel(head_dim: int) -> bool:
    """For sm_90, into the cache, where a compiler is found."""
    from ffpa_jit.cuda import kernels
    from ffpa_jit.cuda.instantiate import spec_for

    compiler = kernels.STORE.compiler()
    if compiler is None:
        print("\nno nvcc and no NVRTC: no CUDA kernel is compiled (`ffpa-jit info` says what was looked for)")
        return True
    entry, how, seconds = kernels.warm(spec_for("sm_90", head_dim, "bf16"))
    print(f"\nCUDA kernel {entry.path.name}: {how} in {seconds:.1f} s with {compiler.id}")
    return entry.artefact.is_file()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=512)
    head_dim = parser.parse_args().head_dim
    torch.manual_seed(0)
    right = on_a_gpu(head_dim) if HAS_GPU else without_a_gpu(head_dim)
    print("\neverything is right" if right else "\nSOMETHING IS WRONG: see above")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
