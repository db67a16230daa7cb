#!/usr/bin/env python3
"""What each option costs: its speed as a fraction of the same call without it, and decoding beside a copy.

    python bench/options.py
    python bench/options.py --only decode,varlen

Clocks move during a run, so a call and the one it is compared with are timed in turns, behind an L2 flush, and the
medians of both are divided. `varlen` and `window` are rates for a useful FLOP (visible pairs only). `decode` counts the
bytes of keys and values, beside a device-to-device copy (bytes read and written), replayed as a CUDA graph; the eager
call, whose host time shows where the caches are small, is in the remark, with its error and SDPA's.
Results go to bench/results/<device>-options.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bench import RESULTS, SDPA, Case, Clock, forward_error
from ffpa_jit import TritonBackend, ffpa_attn_func, ffpa_attn_varlen_func

DTYPE = torch.bfloat16
Timed = Callable[[], object]
Row = tuple[str, str, float, str]  # case, direction, ratio (of 1), remark


def in_turns(clock: Clock, calls: list[Timed], rounds: int = 5) -> list[float]:
    """Median milliseconds of each call, all timed in turns."""
    samples: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, times in zip(calls, samples, strict=True):
            times.append(clock.median(call))
    return [statistics.median(times) for times in samples]


def tensors(batch: int, heads_q: int, heads_kv: int, len_q: int, len_kv: int, head_dim: int = 512) -> list[Tensor]:
    shapes = (heads_q, len_q), (heads_kv, len_kv), (heads_kv, len_kv)
    return [torch.randn(batch, h, n, head_dim, dtype=DTYPE, device="cuda") for h, n in shapes]


def both(call: Callable[..., Tensor], inputs: list[Tensor], **options: object) -> tuple[Timed, Timed]:
    """The forward without gradients, and the backward, of one call."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    mask = options.get("attn_mask")
    if isinstance(mask, Tensor) and mask.is_floating_point():
        trained = mask.detach().requires_grad_()
        out = call(*leaves, **{**options, "attn_mask": trained})
        wanted = [*leaves, trained]
    else:
        out, wanted = call(*leaves, **options), leaves
    grad = torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return call(*inputs, **options)

    return forward, lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)


def triton(*inputs: Tensor, **options: object) -> Tensor:
    options.setdefault("backend", "triton")
    return ffpa_attn_func(*inputs, enable_gqa=inputs[0].shape[1] != inputs[1].shape[1], **options)


def options_table(clock: Clock) -> Iterator[Row]:
    """Masks, dropout, softcap and the zero-workspace mode, at B=1 H=8 N=8192 D=512."""
    n = 8192
    inputs = tensors(1, 8, 8, n, n)
    keys = torch.arange(n, device="cuda")
    cases: dict[str, dict[str, object]] = {
        "key padding, last eighth, [B, 1, 1, N] bool": {"attn_mask": (keys < n * 7 // 8)[None, None, None]},
        "key padding, every tenth key, [B, 1, 1, N] bool": {"attn_mask": (keys % 10 != 0)[None, None, None]},
        "additive [1, 1, N, N] bf16 with its gradient": {
            "attn_mask": torch.randn(1, 1, n, n, dtype=DTYPE, device="cuda")
        },
        "boolean [1, 1, N, N], random": {"attn_mask": torch.rand(1, 1, n, n, device="cuda") > 0.1},
        "dropout 0.1": {"dropout_p": 0.1},
        "softcap 50": {"softcap": 50.0},
        "no workspace (fused kernels)": {"backend": TritonBackend(workspace_mb=0)},
    }
    plain = both(triton, inputs)
    for name, options in cases.items():
        optional = both(triton, inputs, **options)
        for direction, base, call in zip(("forward", "backward"), plain, optional, strict=True):
            first, second = in_turns(clock, [base, call])
            yield name, direction, first / second, f"{second:.2f} ms, plain {first:.2f} ms"


def window_table(clock: Clock) -> Iterator[Row]:
    """A causal window of 1024 at 32k, for a visible pair, beside the full causal call."""
    n, width = 32768, 1024
    inputs = tensors(1, 8, 8, n, n)
    pairs = n * (n + 1) / 2, width * (width + 1) / 2 + (n - width) * (width + 1)
    plain = both(triton, inputs, is_causal=True)
    windowed = both(triton, inputs, is_causal=True, window_size=(width, 0))
    for direction, base, call in zip(("forward", "backward"), plain, windowed, strict=True):
        first, second = in_turns(clock, [base, call], 3)
        ratio = (pairs[1] / second) / (pairs[0] / first)
        yield "window 1024 at 32k, causal", direction, ratio, f"{second:.2f} ms, full causal {first:.2f} ms"


def varlen_table(clock: Clock) -> Iterator[Row]:
    """16k tokens in documents of about 2k, 32/4 heads, causal, beside dense causal calls."""
    torch.manual_seed(0)
    lengths = (torch.randint(1536, 2561, (8,)).float() * 1.0).long()
    lengths[-1] += 16384 - int(lengths.sum())
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)
    longest = int(lengths.max())
    packed = [torch.randn(16384, h, 512, dtype=DTYPE, device="cuda") for h in (32, 4, 4)]

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ffpa_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True, enable_gqa=True)

    useful = float((lengths * (lengths + 1) // 2).sum())
    calls = both(varlen, packed)
    dense = {
        "8 x 2k": (tensors(8, 32, 4, 2048, 2048), 8 * 2048 * 2049 / 2),
        "1 x 8k": (tensors(1, 32, 4, 8192, 8192), 8192 * 8193 / 2),
    }
    for name, (inputs, pairs) in dense.items():
        plain = both(triton, inputs, is_causal=True)
        for direction, base, call in zip(("forward", "backward"), plain, calls, strict=True):
            first, second = in_turns(clock, [base, call])
            ratio = (useful / second) / (pairs / first)
            yield f"varlen 16k tokens, documents of ~2k, beside dense {name}", direction, ratio, f"{second:.2f} ms"


DECODE = [
    Case("1 x 32k MHA, 32 heads", "decode", 1, 32, 32, 1, 32768, 512),
    Case("8 x 8k GQA 32/4", "decode", 8, 32, 4, 1, 8192, 512),
    Case("1 x 128k GQA 32/4", "decode", 1, 32, 4, 1, 131072, 512),
    Case("8 queries x 32k GQA 32/4", "decode", 1, 32, 4, 8, 32768, 512),
    Case("1 x 32k MHA, 32 heads, D=1024", "decode", 1, 32, 32, 1, 32768, 1024),
    Case("1 x 64k GQA 32/4, D=320", "decode", 1, 32, 4, 1, 65536, 320),
]


def decode_table(clock: Clock) -> Iterator[Row]:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for case in DECODE:
        q, k, v, scale = case.tensors(DTYPE)

        def ours(q: Tensor = q, k: Tensor = k, v: Tensor = v, scale: float = scale) -> Tensor:
            with torch.no_grad():
                return triton(q, k, v, scale=scale)

        ours()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours()
        copied, taken, eager = in_turns(clock, [lambda: target.copy_(source), graph.replay, ours])
        rate, ceiling = case.cache_bytes / taken / 1e6, 2 * source.numel() / copied / 1e6
        error = forward_error(case, ours(), q, k, v, scale)
        theirs = forward_error(case, SDPA(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]), q, k, v, scale)
        yield (
            f"decode {case.name}", "forward", rate / ceiling,
            f"{rate:.0f} GB/s, copy {ceiling:.0f}; eager {taken / eager * rate / ceiling:.2f}; "
            f"error {error:.1e}, SDPA {theirs:.1e}",
        )  # fmt: skip


TABLES = {"options": options_table, "window": window_table, "varlen": varlen_table, "decode": decode_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TABLES), help="tables, separated by commas (%(default)s)")
    parser.add_argument("--milliseconds", type=float, default=60.0, help="GPU time a sample (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results (%(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/options.py measures a GPU, and torch sees none here")
    clock = Clock(arguments.milliseconds)
    device = torch.cuda.get_device_name()
    lines = [
        f"# What options cost on one {device}, bf16, torch {torch.__version__}", "",
        "| case | direction | fraction | |", "|---|---|---:|---|",
    ]  # fmt: skip
    for name in arguments.only.split(","):
        for case, direction, ratio, remark in TABLES[name](clock):
            lines.append(f"| {case} | {direction} | {ratio:.2f} | {remark} |")
            print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    arguments.output.mkdir(parents=True, exist_ok=True)
    name = device.lower().replace(" ", "-")
    (arguments.output / f"{name}-options.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
