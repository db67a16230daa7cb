#!/usr/bin/env python3
"""Measure ffpa-jit beside SDPA and every peer that imports: one process, one GPU, one run.

    python bench/bench.py                       # every case, every peer
    python bench/bench.py --cases forward --peers sdpa,ours --seconds 120

What is measured, for each case and peer:

* the median of CUDA-event timings, with a buffer larger than L2 written before every launch;
* TFLOP/s with the usual count, 2 GEMMs forward and 5 backward over the visible (row, key) pairs, and
  that rate as a fraction of the 8192^3 bf16 cuBLAS rate, which this run measures before and after;
* the relative error against float64 (forward: 256 rows of two heads; backward: one kv head entire);
* the peak of allocated memory beyond the inputs, results and workspace included;
* once per peer, the host time of a small eager call (B=1, H=8, N=64, D=512).

Ratios within one run are meaningful; rates of different runs are not, because clocks differ.
Results go to bench/results/<device>.md and .json, and a plot beside them if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
SDPA = F.scaled_dot_product_attention
Attention = Callable[..., Tensor]  # (q, k, v, is_causal, scale) -> out


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    group: str  # forward, masked, backward or decode
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int
    is_causal: bool = False
    inputs: str = "randn"  # or "gemma": RMS-normed q and k, scale 1.0, dominating diagonal
    option: str = ""  # of a masked case: "padding" ([B, 1, 1, N] bool), "additive" ([1, 1, N, N]) or "dropout" (0.1)

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs of one head."""
        full = self.len_q * self.len_kv
        return full - self.len_q * (self.len_q - 1) // 2 if self.is_causal else full

    @property
    def flops(self) -> int:
        gemms = 5 if self.group == "backward" else 2
        return gemms * 2 * self.batch * self.heads_q * self.pairs * self.head_dim

    @property
    def cache_bytes(self) -> int:
        return 2 * 2 * self.batch * self.heads_kv * self.len_kv * self.head_dim

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float]:
        torch.manual_seed(0)
        new = {"dtype": dtype, "device": "cuda"}
        q = torch.randn(self.batch, self.heads_q, self.len_q, self.head_dim, **new)
        k = torch.randn(self.batch, self.heads_kv, self.len_kv, self.head_dim, **new)
        v = torch.randn(self.batch, self.heads_kv, self.len_kv, self.head_dim, **new)
        if self.inputs == "randn":
            return q, k, v, self.head_dim**-0.5
        k = rms_norm(k)
        near = k[:, :, self.len_kv - self.len_q :].repeat_interleave(self.heads_q // self.heads_kv, 1)
        return rms_norm(near + 0.5 * q), k, v, 1.0


def options_of(case: Case, dtype: torch.dtype) -> dict[str, object]:
    """The arguments that make a case a masked one."""
    if case.option == "padding":
        return {"attn_mask": (torch.arange(case.len_kv, device="cuda") < case.len_kv * 7 // 8)[None, None, None]}
    if case.option == "additive":
        return {"attn_mask": torch.randn(1, 1, case.len_q, case.len_kv, dtype=dtype, device="cuda")}
    return {"dropout_p": 0.1} if case.option == "dropout" else {}


def rms_norm(x: Tensor) -> Tensor:
    y = x.float()
    return (y * y.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype)


CASES = [
    Case("self 8k D512", "forward", 1, 32, 32, 8192, 8192, 512),
    Case("causal 8k D512", "forward", 1, 32, 32, 8192, 8192, 512, True),
    Case("GQA 32/8 8k D512", "forward", 1, 32, 8, 8192, 8192, 512),
    Case("self 16k D512", "forward", 1, 16, 16, 16384, 16384, 512),
    Case("cross 1k x 8k D512", "forward", 1, 32, 32, 1024, 8192, 512),
    Case("odd length 8191 D512", "forward", 1, 8, 8, 8191, 8191, 512),
    Case("Gemma 32/4 4k causal, randn", "forward", 1, 32, 4, 4096, 4096, 512, True),
    Case("Gemma 32/4 4k causal, Gemma-like", "forward", 1, 32, 4, 4096, 4096, 512, True, "gemma"),
    Case("VAE 1 head 16k D512", "forward", 1, 1, 1, 16384, 16384, 512),
    Case("self 8k D320", "forward", 1, 32, 32, 8192, 8192, 320),
    Case("self 8k D384", "forward", 1, 32, 32, 8192, 8192, 384),
    Case("self 8k D640", "forward", 1, 16, 16, 8192, 8192, 640),
    Case("self 8k D768", "forward", 1, 16, 16, 8192, 8192, 768),
    Case("self 8k D1024", "forward", 1, 16, 16, 8192, 8192, 1024),
    Case("self 8k D512 + key padding", "masked", 1, 16, 16, 8192, 8192, 512, option="padding"),
    Case("self 8k D512 + additive [N, N]", "masked", 1, 16, 16, 8192, 8192, 512, option="additive"),
    Case("self 8k D512 + dropout 0.1", "masked", 1, 16, 16, 8192, 8192, 512, option="dropout"),
    Case("GQA 32/8 4k D512 + additive [N, N]", "masked", 1, 32, 8, 4096, 4096, 512, option="additive"),
    Case("self 8k D512", "backward", 1, 32, 32, 8192, 8192, 512),
    Case("causal 8k D512", "backward", 1, 32, 32, 8192, 8192, 512, True),
    Case("GQA 32/8 8k D512", "backward", 1, 32, 8, 8192, 8192, 512),
    Case("Gemma 32/4 4k causal, randn", "backward", 1, 32, 4, 4096, 4096, 512, True),
    Case("Gemma 32/4 4k causal, Gemma-like", "backward", 1, 32, 4, 4096, 4096, 512, True, "gemma"),
    Case("self 8k D320", "backward", 1, 16, 16, 8192, 8192, 320),
    Case("self 8k D1024", "backward", 1, 8, 8, 8192, 8192, 1024),
    Case("1 query, MHA, 32k keys", "decode", 1, 32, 32, 1, 32768, 512),
    Case("1 query, 8 x GQA 32/4, 8k keys", "decode", 8, 32, 4, 1, 8192, 512),
    Case("1 query, GQA 32/4, 128k keys", "decode", 1, 32, 4, 1, 131072, 512),
    Case("8 queries, GQA 32/4, 32k keys", "decode", 1, 32, 4, 8, 32768, 512),
]


# Peers. Each builder imports what it needs and returns a function of SDPA's layout.


def sdpa() -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, **options: object) -> Tensor:
        return SDPA(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **options)

    return call


def ours(forward_backend: str | None = None, **backend_options: object) -> Attention:
    from ffpa_jit import CUDABackend, ffpa_attn_func

    backend = CUDABackend(**backend_options) if backend_options else forward_backend

    def call(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, **options: object) -> Tensor:
        options.update(is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return ffpa_attn_func(q, k, v, forward_backend=backend, **options)

    return call


def flex() -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[tuple[int, int], object] = {}

    def call(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        n, m = q.shape[2], k.shape[2]
        if is_causal and (n, m) not in masks:
            masks[n, m] = create_block_mask(lambda b, h, i, j: j <= i + (m - n), None, None, n, m, device="cuda")
        mask = masks[n, m] if is_causal else None
        return compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    return call


def ffpa_attn(backend: str) -> Attention:
    from ffpa_attn import ffpa_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, **options: object) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        return ffpa_attn_func(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=gqa, backend=backend, **options)

    return call


PEERS: dict[str, Callable[[], Attention]] = {
    "sdpa": sdpa,
    "ours": ours,
    "ours-triton": lambda: ours("triton"),
    "ours-cuda": lambda: ours("cuda"),
    "ours-cuda-f16": lambda: ours("cuda", acc="f16"),  # with --dtype float16
    "flex": flex,
    "ffpa_attn-triton": lambda: ffpa_attn("triton"),
    "ffpa_attn-cutedsl": lambda: ffpa_attn("cutedsl"),
}


# Measuring.


class Clock:
    """Event timing behind an L2 flush; the number of launches follows from the time one takes."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds
        self.flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")

    def median(self, call: Callable[[], object]) -> float:
        call()
        torch.cuda.synchronize()
        estimate = self._time(call, 2)
        repeats = max(3, min(200, int(self.milliseconds / max(statistics.median(estimate), 1e-3))))
        return statistics.median(self._time(call, repeats))

    def _time(self, call: Callable[[], object], repeats: int) -> list[float]:
        pairs = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def cublas_rate(clock: Clock) -> float:
    """TFLOP/s of an 8192^3 bf16 matrix product."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / clock.median(lambda: a @ b) / 1e9


def host_microseconds(call: Attention, dtype: torch.dtype) -> float:
    """Host time of one small eager forward call, the queue never full."""
    q, k, v = (torch.randn(1, 8, 64, 512, dtype=dtype, device="cuda") for _ in range(3))
    with torch.no_grad():
        for _ in range(20):
            call(q, k, v, False, 512**-0.5)
        samples = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                call(q, k, v, False, 512**-0.5)
            samples.append((time.perf_counter() - start) / 10 * 1e6)
        torch.cuda.synchronize()
    return statistics.median(samples)


def scores(case: Case, q: Tensor, k: Tensor, rows: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    s = q.double() @ k.double().T * scale
    if mask is not None:
        mask = mask[0, 0].expand(case.len_q, case.len_kv)[rows]
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.double()
    if case.is_causal:
        keys = torch.arange(case.len_kv, device=q.device)
        s.masked_fill_(keys > rows[:, None] + (case.len_kv - case.len_q), -math.inf)
    return s


class Error:
    """Accumulates ||x - reference||^2 and ||reference||^2."""

    def __init__(self) -> None:
        self.difference = self.norm = 0.0

    def add(self, x: Tensor, reference: Tensor) -> None:
        self.difference += (x.double() - reference).square().sum().item()
        self.norm += reference.square().sum().item()

    def relative(self) -> float:
        value = math.sqrt(self.difference / self.norm) if self.norm else 0.0
        return math.inf if math.isnan(value) else value


def forward_error(
    case: Case, out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None
) -> float:
    if case.option == "dropout":
        return math.nan  # every peer drops other elements; the tests check ours against its documented stream
    group = case.heads_q // case.heads_kv
    rows = torch.linspace(0, case.len_q - 1, min(case.len_q, 256), device=q.device).long().unique()
    error = Error()
    for b, h in {(0, 0), (case.batch - 1, case.heads_q - 1)}:
        p = scores(case, q[b, h, rows], k[b, h // group], rows, scale, mask).softmax(-1)
        error.add(out[b, h, rows], p @ v[b, h // group].double())
    return error.relative()


def backward_error(
    case: Case, grads: tuple[Tensor, ...], do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> float:
    """The largest of the errors of dq, dk and dv, for the query heads of the first kv head."""
    keys, values = k[0, 0].double(), v[0, 0].double()
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    errors = [Error(), Error(), Error()]
    for h in range(case.heads_q // case.heads_kv):
        for rows in torch.arange(case.len_q, device=q.device).split(2048):
            p = scores(case, q[0, h, rows], k[0, 0], rows, scale).softmax(-1)
            g = do[0, h, rows].double()
            dp = g @ values.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
            errors[0].add(grads[0][0, h, rows], ds @ keys)
            dk += ds.T @ q[0, h, rows].double()
            dv += p.T @ g
    errors[1].add(grads[1][0, 0], dk)
    errors[2].add(grads[2][0, 0], dv)
    return max(e.relative() for e in errors)


@dataclass
class Row:
    """One measurement."""

    group: str
    case: str
    peer: str
    milliseconds: float
    rate: float  # TFLOP/s; GB/s of keys and values for decode
    fraction: float  # of the cuBLAS rate; NaN for decode
    error: float
    extra_mib: float
    first_seconds: float


def measure(case: Case, peer: str, call: Attention, dtype: torch.dtype, clock: Clock, ceiling: float) -> Row:
    q, k, v, scale = case.tensors(dtype)
    backward = case.group == "backward"
    options = options_of(case, dtype)

    def forward() -> Tensor:
        return call(q, k, v, case.is_causal, scale, **options)

    torch.cuda.synchronize()
    start = time.perf_counter()
    if backward:
        leaves = tuple(t.requires_grad_() for t in (q, k, v))
        out = forward()
        do = torch.randn_like(out)

        def timed() -> object:
            return torch.autograd.grad(out, leaves, do, retain_graph=True)

        result = timed()
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        with torch.no_grad():
            error = backward_error(case, result, do, q, k, v, scale)
    else:

        def timed() -> object:
            with torch.no_grad():
                return forward()

        result = timed()
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        error = forward_error(case, result, q, k, v, scale, options.get("attn_mask"))
    del result
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    timed()
    torch.cuda.synchronize()
    extra = (torch.cuda.max_memory_allocated() - before) / 2**20
    ms = clock.median(timed)
    if case.group == "decode":
        rate, fraction = case.cache_bytes / ms / 1e6, math.nan
    else:
        rate = case.flops / ms / 1e9
        fraction = rate / ceiling
    return Row(case.group, case.name, peer, ms, rate, fraction, error, extra, first)


# Reporting.


def tables(rows: list[Row], peers: list[str]) -> str:
    """One markdown table per group: rate (fraction), error and extra memory of each peer."""
    lines: list[str] = []
    for group in ("forward", "masked", "backward", "decode"):
        chosen = [r for r in rows if r.group == group]
        if not chosen:
            continue
        unit = "GB/s of keys and values" if group == "decode" else "TFLOP/s (fraction of cuBLAS)"
        lines += [f"### {group}: {unit}; error against float64; extra MiB, output included", ""]
        lines.append("| case | " + " | ".join(peers) + " | ours / SDPA |")
        lines.append("|---|" + "---:|" * (len(peers) + 1))
        for name in dict.fromkeys(r.case for r in chosen):
            by_peer = {r.peer: r for r in chosen if r.case == name}
            cells = []
            for peer in peers:
                r = by_peer.get(peer)
                if r is None:
                    cells.append("-")
                    continue
                share = "" if math.isnan(r.fraction) else f" ({r.fraction:.2f})"
                cells.append(f"{r.rate:.0f}{share}; {r.error:.1e}; {r.extra_mib:.0f}")
            mine = next((by_peer[peer] for peer in ("ours", "ours-cuda") if peer in by_peer), None)
            if mine is not None and "sdpa" in by_peer:
                speedup = f"{by_peer['sdpa'].milliseconds / mine.milliseconds:.2f}x"
            else:
                speedup = "-"
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {speedup} |")
        lines.append("")
    return "\n".join(lines)


def plot(rows: list[Row], peers: list[str], ceiling: float, path: Path) -> None:
    """Bars of forward and backward rates under the cuBLAS line; skipped without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    groups = [g for g in ("forward", "backward") if any(r.group == g for r in rows)]
    if not groups:
        return
    figure, axes = plt.subplots(len(groups), 1, figsize=(12, 5 * len(groups)), squeeze=False)
    for axis, group in zip(axes[:, 0], groups, strict=True):
        names = list(dict.fromkeys(r.case for r in rows if r.group == group))
        width = 0.8 / len(peers)
        for i, peer in enumerate(peers):
            rate = {r.case: r.rate for r in rows if r.group == group and r.peer == peer}
            x = [j + (i - (len(peers) - 1) / 2) * width for j in range(len(names))]
            axis.bar(x, [rate.get(n, 0.0) for n in names], width, label=peer)
        axis.axhline(ceiling, color="black", linewidth=0.8, linestyle="--", label="cuBLAS 8192³")
        axis.set_xticks(range(len(names)), names, rotation=25, ha="right")
        axis.set_ylabel("TFLOP/s")
        axis.set_title(group)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="forward,masked,backward,decode", help="groups, or parts of case names")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--milliseconds", type=float, default=150, help="timed per case and peer")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new case after this long")
    parser.add_argument("--suffix", default="", help="of the files' names")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the .md, .json and .png")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if not torch.cuda.is_available():
        print("bench/bench.py measures a GPU, and torch sees none here (torch.cuda.is_available() is False)")
        return 1
    began = time.monotonic()
    wanted = options.cases.split(",")
    cases = [c for c in CASES if c.group in wanted or any(w in c.name for w in wanted)]
    dtype = getattr(torch, options.dtype)
    clock = Clock(options.milliseconds)
    device = torch.cuda.get_device_name()
    ceiling = cublas_rate(clock)
    print(f"{device}, torch {torch.__version__}: cuBLAS bf16 8192^3 {ceiling:.0f} TFLOP/s", flush=True)

    calls: dict[str, Attention] = {}
    host: dict[str, float] = {}
    for peer in options.peers.split(","):
        try:
            calls[peer] = PEERS[peer]()
            host[peer] = host_microseconds(calls[peer], dtype)
            print(f"{peer}: {host[peer]:.0f} us of host time for a small call", flush=True)
        except Exception as error:  # a peer that is missing or broken must not end the run
            calls.pop(peer, None)
            print(f"{peer}: left out: {type(error).__name__}: {str(error).strip()[:160]}", flush=True)

    rows: list[Row] = []
    for case in cases:  # peers alternate within a case, so that a drift of the clocks touches all alike
        for peer, call in calls.items():
            if case.group == "backward" and peer.startswith("ours-cuda"):
                continue  # it has none: these are the gradients of "ours"
            if time.monotonic() - began > options.seconds:
                print(f"{case.group} {case.name}, {peer}: no time left", flush=True)
                continue
            try:
                row = measure(case, peer, call, dtype, clock, ceiling)
            except Exception as error:
                what = str(error).strip().splitlines()[:1] or [""]
                print(f"{case.group:8} {case.name:34} {peer:18} {type(error).__name__}: {what[0][:120]}")
            else:
                rows.append(row)
                unit = "GB/s" if case.group == "decode" else f"TFLOP/s {row.fraction:5.2f}"
                print(
                    f"{row.group:8} {row.case:34} {peer:18} {row.milliseconds:9.3f} ms {row.rate:7.0f} {unit}"
                    f"  error {row.error:.1e}  +{row.extra_mib:.0f} MiB  first {row.first_seconds:.1f} s",
                    flush=True,
                )
            torch.cuda.empty_cache()

    after = cublas_rate(clock)
    peers = [p for p in calls if any(r.peer == p for r in rows)]
    text = "\n".join(
        [
            f"## {device}, torch {torch.__version__}, {options.dtype}",
            "",
            f"cuBLAS bf16 8192³: {ceiling:.0f} TFLOP/s before, {after:.0f} after. "
            "Host time of a small call: " + ", ".join(f"{p} {host[p]:.0f} µs" for p in peers) + ".",
            "",
            tables(rows, peers),
        ]
    )
    print("\n" + text)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / re.sub(r"[^0-9A-Za-z]+", "-", f"{device}-{options.dtype}{options.suffix}").strip("-").lower()
    Path(f"{stem}.md").write_text(text)
    record = {
        "device": device,
        "torch": torch.__version__,
        "dtype": options.dtype,
        "cublas": [ceiling, after],
        "host_us": host,
        "rows": [asdict(r) for r in rows],
    }
    Path(f"{stem}.json").write_text(json.dumps(record, indent=1))
    plot(rows, peers, ceiling, Path(f"{stem}.png"))
    print(f"written to {stem}.md and .json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
