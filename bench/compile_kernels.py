#!/usr/bin/env python3
"""Compile the kernels for a GPU architecture, on any machine: no GPU, no driver.

    python bench/compile_kernels.py sm_90 gfx942 --head-dims 512,1024
    python bench/compile_kernels.py sm_90 --head-dims 320 --options     # masks, dropout, ..., each subset of gradients

What is compiled is what calls launch (see `ffpa_jit.triton.offline`). Printed for each kernel: registers per thread,
spills and shared memory. The exit status is 1 if a kernel spills or needs more shared memory than the architecture has.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ffpa_jit.triton.offline import SPLIT, WHOLE, compile_call, compile_only

SHARED_KIB = {
    "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
    "gfx90a": 64, "gfx942": 64, "gfx1201": 64,
}  # fmt: skip
"""Shared memory a block may take, in KiB; the architectures the kernels are checked for."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler said of one kernel."""

    kernel: str
    options: str
    registers: int
    spilled: int  # reloads from local memory on NVIDIA, registers on AMD
    shared: int

    def faults(self, arch: str) -> list[str]:
        limit = SHARED_KIB[arch] * 1024
        found = []
        if self.spilled:
            found.append(f"spills {self.spilled}")
        if self.shared > limit:
            found.append(f"needs {self.shared} bytes of shared memory, {arch} has {limit}")
        return found


def resources(kernel: Any) -> tuple[int, int]:
    """(registers per thread, spills) of a compiled kernel: reloads from local memory on NVIDIA, registers on AMD.

    Local memory that is only written is no spill: on sm_120 every kernel with a tensor descriptor has 8 such bytes.
    """
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        spilled = sum(int(n) for n in re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s*(\d+)", text))
        return int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0]), spilled
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def read(flag: str) -> str:
        return subprocess.run([str(tool), flag, str(cubin)], capture_output=True, text=True, check=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage = read("--dump-resource-usage")
        found = re.search(r"REG:(\d+) STACK:(\d+) \S+ LOCAL:(\d+)", usage)
        if found is None:
            raise RuntimeError(f"cannot read the resource usage: {usage}")
        registers, *local = map(int, found.groups())
        # Disassembling takes a hundred times as long, and a kernel without local memory cannot reload from it.
        reloads = len(re.findall(r"\bLDL", read("--dump-sass"))) if any(local) else 0
    return registers, reloads


def judge(arch: str, head_dim: int, dtype: torch.dtype, is_causal: bool, splits: bool) -> list[Compiled]:
    """Every kernel of one forward and one backward call; with ``splits`` those of a split key side too."""
    samples = (WHOLE, SPLIT) if splits else (WHOLE,)
    found = []
    for launch in compile_call(arch, head_dim, dtype, causal=(is_causal,), samples=samples):
        interesting = ("BLOCK_N", "TAIL", "BLOCK_K", "num_warps", "num_stages")
        options = " ".join(f"{name}={launch.kwargs[name]}" for name in interesting if name in launch.kwargs)
        found.append(
            Compiled(launch.function.__name__, options, *resources(launch.kernel), launch.kernel.metadata.shared)
        )
    return found


def calls_with_options(arch: str, head_dim: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Forward and backward calls on tensors without memory that between them have every option, dense and packed, and
    want every subset of the gradients."""
    from ffpa_jit.triton import dense, ragged
    from ffpa_jit.triton.terms import Terms

    def meta(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    length, scale = 256, head_dim**-0.5
    rng = meta(2, kind=torch.int64)
    options = {
        "boolean mask": Terms(scale, attn_mask=meta(1, 1, length, length, kind=torch.bool)),
        "key padding, causal": Terms(scale, True, attn_mask=meta(2, 1, 1, length, kind=torch.bool)),
        "additive mask": Terms(scale, attn_mask=meta(1, 4, length, length)),
        "window, dropout": Terms(scale, True, (100, -1), dropout_p=0.1, rng=rng),
        "softcap": Terms(scale, softcap=20.0),
        "softcap, additive mask": Terms(scale, softcap=20.0, attn_mask=meta(1, 1, 1, length, kind=torch.float32)),
    }
    q, k = meta(2, 4, length, head_dim), meta(2, 2, length, head_dim)
    lse = meta(2, 4, length, kind=torch.float32)
    packed_q, packed_k, packed_lse = meta(512, 4, head_dim), meta(512, 2, head_dim), meta(4, 512, kind=torch.float32)
    cu = meta(3, kind=torch.int32)
    common = {"arch": arch, "cap": 512 << 20}

    def dense_call(terms: Terms, needs: tuple[bool, ...]) -> None:
        dense.forward(q, k, k, terms, **common)
        dense.backward(q, None, q, k, k, q, lse, terms, needs=needs, **common)

    def packed_call(terms: Terms, needs: tuple[bool, ...]) -> None:
        sizes = {"max_q": 256, "max_k": 256, **common}
        ragged.forward(packed_q, packed_k, packed_k, cu, cu, terms, **sizes)
        ragged.backward(
            packed_q, None, packed_q, packed_k, packed_k, packed_q, packed_lse, cu, cu, terms, needs=needs, **sizes
        )

    calls: dict[str, Callable[[], object]] = {}
    for name, terms in options.items():
        additive = terms.attn_mask is not None and terms.attn_mask.is_floating_point() and not terms.softcap
        calls[name] = partial(dense_call, terms, (True, True, True, additive))
    for needs in itertools.product((True, False), repeat=3):
        wanted = "".join(letter for letter, need in zip("qkv", needs, strict=True) if need)
        if wanted:
            calls[f"gradients of {wanted}"] = partial(dense_call, Terms(scale), (*needs, False))
            calls[f"packed, gradients of {wanted}"] = partial(packed_call, Terms(scale, True), needs)
    calls["packed, window, softcap"] = partial(packed_call, Terms(scale, True, (100, -1), 20.0), (True, True, True))
    return calls


def judge_options(arch: str, head_dim: int, dtype: torch.dtype) -> Iterator[tuple[str, Compiled]]:
    """(call, kernel) of `calls_with_options`, every kernel once. Spills are told, not counted as faults: what an option
    adds to an epilogue may be worth some."""
    seen = set()
    for name, call in calls_with_options(arch, head_dim, dtype).items():
        with compile_only(arch) as launches:
            call()
        for launch in launches:
            if launch.kernel.hash not in seen:
                seen.add(launch.kernel.hash)
                registers, spilled = resources(launch.kernel)
                told = f"spills {spilled}" if spilled else ""
                yield name, Compiled(launch.function.__name__, told, registers, 0, launch.kernel.metadata.shared)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archs", nargs="+", choices=sorted(SHARED_KIB), metavar="ARCH", help=", ".join(SHARED_KIB))
    parser.add_argument("--head-dims", default="512")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--causal", default="0,1", help="0, 1 or both")
    parser.add_argument("--no-splits", action="store_true", help="leave out the kernels of a split key side")
    parser.add_argument("--options", action="store_true", help="calls with options, and for each subset of gradients")
    options = parser.parse_args(argv)
    wrong = 0
    if options.options:
        for arch, head_dim in itertools.product(options.archs, options.head_dims.split(",")):
            for name, c in judge_options(arch, int(head_dim), getattr(torch, options.dtypes)):
                faults = c.faults(arch)
                wrong += len(faults)
                shared = f"{c.shared / 1024:.1f} KiB"
                print(
                    f"{arch} D={head_dim} {name}: {c.kernel} {c.registers} registers, {shared} {c.options}"
                    + "".join(f"  FAULT: {fault}" for fault in faults),
                    flush=True,
                )
        return 1 if wrong else 0
    for arch in options.archs:
        for head_dim in options.head_dims.split(","):
            for dtype in options.dtypes.split(","):
                for causal in options.causal.split(","):
                    print(f"{arch}, D={head_dim}, {dtype}{', causal' if causal == '1' else ''}", flush=True)
                    for c in judge(arch, int(head_dim), getattr(torch, dtype), causal == "1", not options.no_splits):
                        faults = c.faults(arch)
                        wrong += len(faults)
                        print(
                            f"  {c.kernel:16} {c.registers:4} registers, {c.spilled} spilled, "
                            f"{c.shared / 1024:6.1f} of {SHARED_KIB[arch]} KiB shared  {c.options}"
                            + "".join(f"  FAULT: {fault}" for fault in faults),
                            flush=True,
                        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
