#!/usr/bin/env python3
"""Configurations of the decode kernels, side by side: time, bandwidth, error.

    python bench/sweep_decode.py                                # every case, on the GPU that is there
    python bench/sweep_decode.py --cases "GQA 32/4" --seconds 60
    python bench/sweep_decode.py --compile-only sm_80 gfx942    # shipped configurations: registers, spills; no GPU

Each call is captured in a CUDA graph (the plan's own choice once more as an eager call, which includes the host's
time), timed behind a write of more than L2, and compared with float64. GB/s count K and V once; the fraction is of the
bandwidth of a copy (read and write) of this run. The number after a figure is how many parts the keys went to.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ffpa_jit.triton.configs import DecodeTiling, decode_tiling
from ffpa_jit.triton.terms import Terms


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int

    @property
    def bytes(self) -> int:
        return 4 * self.batch * self.heads_kv * self.len_kv * self.head_dim

    @property
    def rows(self) -> int:
        return self.len_q * self.heads_q // self.heads_kv


CASES = [
    Case("MHA 32k", 1, 32, 32, 1, 32768, 512),
    Case("8 x GQA 32/4 8k", 8, 32, 4, 1, 8192, 512),
    Case("GQA 32/4 128k", 1, 32, 4, 1, 131072, 512),
    Case("8 queries GQA 32/4 32k", 1, 32, 4, 8, 32768, 512),
    Case("MHA 32k D320", 1, 32, 32, 1, 32768, 320),
    Case("8 queries GQA 32/4 32k D320", 1, 32, 4, 8, 32768, 320),
    Case("MHA 16 x 32k D1024", 1, 16, 16, 1, 32768, 1024),
    Case("4 queries GQA 16/2 32k D1024", 1, 16, 2, 4, 32768, 1024),
    Case("GQA 32/4 4k (short)", 1, 32, 4, 1, 4096, 512),
]


def _t(rows: int, block_n: int, fold: int, warps: int, stages: int, per_processor: int) -> DecodeTiling:
    return DecodeTiling(rows, block_n, fold, warps, stages, per_processor)


HOPPER = DecodeTiling(64, 64, 1, 8, 1, 1, hopper=True)
FEW = {
    320: [_t(16, 32, 4, 4, 2, 3), _t(16, 32, 4, 4, 3, 2), _t(16, 16, 4, 4, 3, 3), _t(16, 64, 4, 4, 2, 2), HOPPER],
    512: [
        _t(16, 32, 4, 4, 2, 2), _t(16, 16, 4, 4, 3, 2), _t(16, 16, 4, 4, 2, 4), _t(16, 32, 8, 8, 2, 2),
        _t(16, 32, 4, 4, 3, 1), _t(16, 32, 1, 4, 2, 2), HOPPER,
    ],
    1024: [_t(16, 16, 8, 8, 2, 2), _t(16, 16, 8, 8, 3, 1), _t(16, 32, 8, 8, 2, 1), _t(16, 16, 4, 4, 2, 2)],
}  # fmt: skip
"""Head dim -> candidates for up to 16 rows."""

MANY = {
    320: [HOPPER, _t(32, 32, 8, 8, 2, 1), _t(32, 32, 8, 8, 3, 1)],
    512: [HOPPER, _t(32, 32, 8, 8, 2, 1), _t(32, 16, 8, 8, 3, 1), _t(32, 32, 8, 8, 3, 1)],
    1024: [_t(32, 16, 8, 8, 2, 1), _t(16, 16, 8, 8, 2, 2)],
}
"""The same for more."""


def candidates(case: Case) -> list[DecodeTiling]:
    found = (FEW if case.rows <= 16 else MANY)[case.head_dim]
    return [*found, replace(found[0], precise=False)] if case.name == "MHA 32k" else found


def label(t: DecodeTiling) -> str:
    if t.hopper:
        return "hopper 64x64"
    return f"{t.rows}x{t.block_n} f{t.fold} w{t.warps} s{t.stages}{'' if t.precise else ' P16'}"


# Compiling, without a GPU.


def compile_tiling(
    arch: str, head_dim: int, t: DecodeTiling, terms: Terms | None = None, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, str, int, int, int]]:
    """(kernel, configuration, registers, spills, bytes of shared memory); leaves them in Triton's cache."""
    from bench.compile_kernels import resources
    from ffpa_jit.triton import decode
    from ffpa_jit.triton.offline import compile_only

    q = torch.empty(1, 4, 4, head_dim, dtype=dtype, device="meta")
    k = torch.empty(1, 2, 4096, head_dim, dtype=dtype, device="meta")
    found = []
    for splits in (4, 1):
        with compile_only(arch) as launches:
            decode.run(q, k, k, terms or Terms(0.1), arch=arch, cap=1 << 30, tiling=t, splits=splits)
        found += [(x.function.__name__, label(t), *resources(x.kernel), x.kernel.metadata.shared) for x in launches]
    return found


def _compile(job: tuple[str, int, DecodeTiling]) -> str:
    try:
        compile_tiling(*job)
    except Exception as error:
        return f"{job[0]} D{job[1]} {label(job[2])}: {type(error).__name__}: {str(error).strip()[:200]}"
    return ""


def compile_all(arch: str, cases: Iterable[Case], workers: int) -> None:
    """Compile every candidate in parallel processes, before this one touches the GPU."""
    jobs = list(dict.fromkeys((arch, case.head_dim, t) for case in cases for t in candidates(case)))
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        for failure in filter(None, pool.map(_compile, jobs)):
            print(failure)
    print(f"compiled {len(jobs)} configurations in {time.monotonic() - start:.0f} s", flush=True)


OPTIONS = {
    "plain": lambda: Terms(0.1),
    "causal, window": lambda: Terms(0.1, True, (100, 0)),
    "bool mask, softcap": lambda: Terms(
        0.1, softcap=30.0, attn_mask=torch.empty(1, 4, 4, 4096, dtype=torch.bool, device="meta")
    ),
    "additive mask, dropout": lambda: Terms(
        0.1, attn_mask=torch.empty(1, 1, 4, 4096, dtype=torch.float32, device="meta"), dropout_p=0.1,
        rng=torch.empty(2, dtype=torch.int64, device="meta"),
    ),
}  # fmt: skip


def compile_shipped(archs: Iterable[str], head_dims: Iterable[int], options: Iterable[str]) -> int:
    """What ships for these architectures; the number of kernels that spill or take too much shared memory."""
    from bench.compile_kernels import SHARED_KIB

    wrong = 0
    for arch in archs:
        for head_dim in head_dims:
            for name in options:
                plain = name in ("plain", "causal, window")
                for t in dict.fromkeys(decode_tiling(arch, rows, head_dim, plain) for rows in (1, 32, 64)):
                    for i, dtype in enumerate((torch.bfloat16, torch.float16)):
                        if i and name != "plain":
                            continue
                        for kernel, what, registers, spills, shared in compile_tiling(
                            arch, head_dim, t, OPTIONS[name](), dtype
                        ):
                            fault = spills > 0 or shared > SHARED_KIB[arch] * 1024
                            wrong += fault
                            print(
                                f"{arch} D{head_dim:<4} {name:22} {kernel:8} {what:18} {registers:4} registers, "
                                f"{spills} spilled, {shared / 1024:6.1f} of {SHARED_KIB[arch]} KiB"
                                f"{'  FAULT' if fault else ''}",
                                flush=True,
                            )
    return wrong


# Measuring.


class Clock:
    def __init__(self) -> None:
        self.flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")

    def median(self, call: Callable[[], object], repeats: int) -> float:
        """Microseconds, behind a write of more than L2."""
        pairs = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def copy_rate(clock: Clock) -> float:
    """GB/s of a copy, read and written bytes."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / clock.median(lambda: y.copy_(x), 15) / 1e3


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor, b: int, h: int) -> Tensor:
    h_kv = h // (case.heads_q // case.heads_kv)
    s = q[b, h].double() @ k[b, h_kv].double().T * case.head_dim**-0.5
    return s.softmax(-1) @ v[b, h_kv].double()


def measure(case: Case, clock: Clock, copy: float, arch: str, deadline: float) -> None:
    from ffpa_jit.triton import decode

    torch.manual_seed(0)
    new = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(case.batch, case.heads_q, case.len_q, case.head_dim, **new)
    k, v = (torch.randn(case.batch, case.heads_kv, case.len_kv, case.head_dim, **new) for _ in range(2))
    terms = Terms(case.head_dim**-0.5)
    heads = sorted({(0, 0), (0, case.heads_q // 2), (case.batch - 1, case.heads_q - 1)})
    reference = torch.stack([exact(case, q, k, v, b, h) for b, h in heads])

    def error(out: Tensor) -> float:
        return float((torch.stack([out[b, h] for b, h in heads]).double() - reference).norm() / reference.norm())

    gqa = case.heads_q != case.heads_kv
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
    rounded = error(reference_rounded(reference, sdpa, heads))
    print(f"{case.name}: error of SDPA {error(sdpa):.2e}, of rounding {rounded:.2e}")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for t in candidates(case):
        if time.monotonic() > deadline:
            print("  no time left")
            return
        tiles = case.batch * case.heads_kv * -(-case.rows // t.rows)
        cells, worst = [], 0.0
        most = case.len_kv // 192
        for parts in sorted({min(max(n * processors * t.per_processor // tiles, 1), most) for n in (1, 2, 4)}):

            def call(parts: int = parts, t: DecodeTiling = t) -> Tensor:
                return decode.run(q, k, v, terms, arch=arch, cap=1 << 30, tiling=t, splits=parts)[0]

            try:
                worst = max(worst, error(call()))
                us = clock.median(captured(call).replay, 20)
            except Exception as failure:
                cells.append(f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:80]} /{parts}")
                break
            rate = case.bytes / us / 1e3
            cells.append(f"{rate:.0f} = {rate / copy:.3f} /{parts}")
        print(f"  {label(t):20} error {worst:.2e}  " + "   ".join(cells), flush=True)

    def shipped() -> Tensor:
        return decode.forward(q, k, v, terms, arch=arch, cap=512 << 20)[0]

    found, us = error(shipped()), clock.median(captured(shipped).replay, 20)
    eager = clock.median(shipped, 20)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        shipped()
    host = (time.perf_counter() - start) / 20 * 1e6
    torch.cuda.synchronize()
    print(
        f"  shipped: {label(decode_tiling(arch, case.rows, case.head_dim, True))}, error {found:.2e}, {us:.1f} us = "
        f"{case.bytes / us / 1e3 / copy:.3f} (eager {eager:.1f} us = {case.bytes / eager / 1e3 / copy:.3f}; "
        f"host at most {host:.0f} us a call)",
        flush=True,
    )


def reference_rounded(reference: Tensor, like: Tensor, heads: list[tuple[int, int]]) -> Tensor:
    """An output that holds the exact result, rounded to the storage type."""
    out = torch.zeros_like(like)
    for x, (b, h) in zip(reference, heads, strict=True):
        out[b, h] = x.to(like.dtype)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="parts of case names, separated by commas")
    parser.add_argument("--seconds", type=float, default=130, help="start no configuration after this long")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--compile-only", nargs="+", metavar="ARCH", help="compile what ships, with no GPU")
    parser.add_argument("--head-dims", default="264,320,512,640,1024", help="of --compile-only")
    parser.add_argument("--options", default=";".join(OPTIONS), help="of --compile-only, separated by semicolons")
    given = parser.parse_args(argv)
    if given.compile_only:
        dims = [int(x) for x in given.head_dims.split(",")]
        return 1 if compile_shipped(given.compile_only, dims, given.options.split(";")) else 0
    deadline = time.monotonic() + given.seconds
    if not torch.cuda.is_available():
        print("bench/sweep_decode.py measures a GPU, and torch sees none here; see --compile-only")
        return 1
    cases = [case for case in CASES if any(part in case.name for part in given.cases.split(","))]
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    compile_all(arch, cases, given.workers)
    clock = Clock()
    copy = copy_rate(clock)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy:.0f} GB/s", flush=True)
    with torch.no_grad():
        for case in cases:
            measure(case, clock, copy, arch, deadline)
            torch.cuda.empty_cache()
    print(f"copy {copy_rate(clock):.0f} GB/s; {given.seconds - (deadline - time.monotonic()):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
