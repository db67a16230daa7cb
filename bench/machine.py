#!/usr/bin/env python3
"""What one sm_90a GPU can do, in the units that kernels are planned with: bytes and flops per clock of an SM.

    python bench/machine.py --out machine.json      # stream, rate, gemm; a process and a time limit for each
    python bench/machine.py --section rate          # one of them, in this process
    python bench/machine.py --compile-only          # compile all variants without a GPU; look for spills in ptxas

stream: every SM streams the same 16 MiB from L2 through a ring in shared memory, alone or in pairs that multicast.
rate:   wgmma m64nNk16, bf16, of 4096 flop/clk/SM, one to three warpgroups, A in shared memory or registers, alone,
        beside such a ring, and beside a multicast one.
gemm:   a warp-specialised CuTe-DSL GEMM and cuBLAS, interleaved, L2 flushed; cuBLAS at 8192^3 is the run's unit.

Clocks are %clock64 of the SMs; TB/s and TFLOP/s are from events. A kernel that hangs costs its section's time limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Row = dict[str, Any]

REPETITIONS = 5
PASSES = 8  # over the 16 MiB, about 2 ms
RATE_CLOCKS = 1_000_000  # of one rate measurement at the full rate
FLOPS = 4096  # per clock and SM, dense bf16
PORT = 64  # bytes per clock and SM: more a ring is not expected to take in
GEMM_SHAPES = ((8192, 8192, 512), (8192, 512, 8192))  # M, N, K: the score GEMM and the value GEMM
UNIT = (8192, 8192, 8192)
TOLERANCE = 5e-3  # of the norm: two roundings to bf16
STREAM_RINGS = ((4096, 48, 1), (8192, 24, 1), (16384, 12, 1), (4096, 24, 2), (8192, 12, 2), (16384, 6, 2))  # 192 KiB
RATE_RINGS = {1: (8192, 12, 1), 2: (8192, 6, 2)}  # 96 KiB: box bytes, slots, cluster


class Variant(NamedTuple):
    name: str
    kernel: Any
    arguments: str  # as compile_kernel takes them


def stream_variants() -> Iterator[Variant]:
    from bench.machine_kernels import Stream

    for box, slots, cluster in STREAM_RINGS:
        yield Variant(f"stream-{box}-c{cluster}", Stream(box, slots, cluster), "llliii")


def rate_variants() -> Iterator[Variant]:
    """Per width and source of A: the ring, the multicast ring, and where no ring fits, three warpgroups alone."""
    from bench.machine_kernels import Rate, Ring

    for n in (64, 96, 128, 192, 256):
        for registers in (False, True):
            name = f"rate-n{n}-{'rs' if registers else 'ss'}"
            for cluster, ring in RATE_RINGS.items():
                kernel = Rate(n, registers, 2 if n == 256 else 3, Ring(*ring), cluster)
                yield Variant(f"{name}-c{cluster}", kernel, "lllliiiii")
            if n == 256:
                yield Variant(f"{name}-alone", Rate(n, registers, 3, None, 1), "lllliiiii")


def gemm_variants() -> Iterator[Variant]:
    from bench.machine_kernels import Gemm

    for m, n, k in GEMM_SHAPES:
        yield Variant(f"gemm-{m}-{n}-{k}", Gemm(m, n, k), "llli")


def table(widths: tuple[int, ...], *cells: object) -> None:
    """Print a line at once: what was measured before a hang is not lost."""
    print("  ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)


class Gpu:
    """The device, the 16 MiB that all rings read, and what the kernels write about themselves."""

    def __init__(self) -> None:
        import torch

        from bench import machine_kernels

        self.torch = torch
        properties = torch.cuda.get_device_properties(0)
        if (properties.major, properties.minor) != (9, 0):
            raise RuntimeError(f"{properties.name} is not sm_90: these kernels use wgmma and TMA of Hopper")
        self.name = properties.name
        self.sms = properties.multi_processor_count
        # A stream of its own, so that its handle is not 0; kernels and torch's own work share it.
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        torch.manual_seed(0)
        shape = (machine_kernels.SOURCE_ROWS, machine_kernels.SOURCE_COLUMNS)
        self.source = torch.randn(shape, device="cuda").to(torch.bfloat16)
        self.log = torch.zeros(self.sms, machine_kernels.LOG_WORDS, dtype=torch.int64, device="cuda")
        self.checks = torch.zeros(self.sms, 32, dtype=torch.int32, device="cuda")
        self.sums = torch.zeros(self.sms, 384, dtype=torch.float32, device="cuda")

    def ctas(self, cluster: int) -> int:
        return self.sms // cluster * cluster

    def seconds(self, run: Callable[[], object]) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def check_ring(self, ring: Any, items: int) -> None:
        """Compare what the readers added up with the source: every box must have come, as often as it was sent."""
        torch = self.torch
        words = self.source.view(torch.int32)[:: ring.box_rows].long()  # the first row of each box
        boxes = words.reshape(-1, ring.cluster, ring.column_boxes, 32).sum(1).view(-1, 32)  # [item of a pass, word]
        whole, rest = divmod(items, ring.items)
        total = whole * boxes.sum(0) + boxes[:rest].sum(0)
        total = (total + 2**31) % 2**32 - 2**31  # as 32-bit sums wrap
        wrong = (self.checks[: self.ctas(ring.cluster)].long() != total).any(1)
        if bool(wrong.any()):
            raise RuntimeError(f"{int(wrong.sum())} CTAs did not read what the ring should have sent")


def measure_stream(gpu: Gpu) -> list[Row]:
    from bench.machine_kernels import LOG_FILL_END, LOG_FILL_START, SOURCE_BYTES, compile_kernel

    rows: list[Row] = []
    widths = (8, 7, 8, 9, 10, 9, 7, 11, 7)
    print("\nstream: 16 MiB from L2, 192 KiB of ring; L2: bytes read there, multicast once; start: where CTAs begin")
    table(widths, "box", "cluster", "slot", "start", "B/clk/SM", "TB/s in", "MHz", "L2 B/clk/SM", "TB/s")
    for variant in stream_variants():
        ring = variant.kernel
        kernel = compile_kernel(ring, variant.arguments)
        ctas = gpu.ctas(ring.cluster)
        for start, stagger in (("together", 0), ("spread", max(1, ring.items * ring.cluster // ctas))):
            times, clocks = [], []

            def run(kernel: Any = kernel, ctas: int = ctas, stagger: int = stagger) -> None:
                addresses = (gpu.source.data_ptr(), gpu.log.data_ptr(), gpu.checks.data_ptr())
                kernel(*addresses, ctas, PASSES, stagger, gpu.stream.cuda_stream)

            for repetition in range(REPETITIONS + 1):
                gpu.checks.zero_()
                seconds = gpu.seconds(run)
                if repetition:  # the first one brought the source into L2
                    times.append(seconds)
                    log = gpu.log[:ctas]
                    clocks.append(float((log[:, LOG_FILL_END] - log[:, LOG_FILL_START]).double().mean()))
            gpu.check_ring(ring, PASSES * ring.items)
            arriving = PASSES * SOURCE_BYTES
            seconds, clock = median(times), median(clocks)
            row: Row = {
                "box": ring.slot_bytes // ring.cluster,
                "cluster": ring.cluster,
                "slot": ring.slot_bytes,
                "start": start,
                "bytes_per_clock": arriving / clock,
                "tb_per_second": arriving * ctas / seconds / 1e12,
                "mhz": clock / seconds / 1e6,
                "l2_bytes_per_clock": arriving / clock / ring.cluster,
                "l2_tb_per_second": arriving * ctas / ring.cluster / seconds / 1e12,
            }
            rows.append(row)
            rates = (f"{row['bytes_per_clock']:.1f}", f"{row['tb_per_second']:.2f}", f"{row['mhz']:.0f}")
            of_l2 = (f"{row['l2_bytes_per_clock']:.1f}", f"{row['l2_tb_per_second']:.2f}")
            table(widths, row["box"], row["cluster"], row["slot"], start, *rates, *of_l2)
    return rows


def rate_once(gpu: Gpu, rate: Any, kernel: Any, groups: int, filled: bool) -> Row:
    """The median rates of one kernel with `groups` of its warpgroups at work, its ring running or not."""
    from bench.machine_kernels import LOG_CLOCK_SEEN, LOG_FILL_START, LOG_ITEMS_SEEN, LOG_MMA

    ctas = gpu.ctas(rate.cluster)
    iterations = RATE_CLOCKS // (rate.STEPS * rate.n // 2 * groups)
    ideal = iterations * rate.STEPS * rate.n // 2 * groups  # clocks at the full rate
    items = int(1.2 * ideal * PORT / rate.ring.slot_bytes) if filled else 0
    shares, fills, frequencies = [], [], []
    attempts = 0
    while len(shares) < REPETITIONS:
        attempts += 1
        addresses = (gpu.source.data_ptr(), gpu.log.data_ptr(), gpu.checks.data_ptr(), gpu.sums.data_ptr())
        for written in (gpu.log, gpu.checks, gpu.sums):
            written.zero_()

        def run(addresses: tuple[int, ...] = addresses, items: int = items) -> None:
            kernel(*addresses, ctas, groups, iterations, items, 0, gpu.stream.cuda_stream)

        seconds = gpu.seconds(run)
        log = gpu.log[:ctas]
        if filled:
            gpu.check_ring(rate.ring, items)
            if bool((log[:, LOG_ITEMS_SEEN] == 0).any()):  # a ring ran dry before the last wgmma
                if attempts > 20:
                    raise RuntimeError("the ring always ends before the wgmmas")
                items *= 2
                shares.clear(), fills.clear(), frequencies.clear()
                continue
        if attempts == 1:
            continue
        ends = log[:, LOG_MMA : LOG_MMA + 2 * groups].view(ctas, groups, 2)
        clocks = (ends[:, :, 1].amax(1) - ends[:, :, 0].amin(1)).double()
        shares.append(float(ideal / clocks.mean()))
        frequencies.append(float(clocks.mean()) / seconds / 1e6)
        if filled:
            beside = (log[:, LOG_CLOCK_SEEN] - log[:, LOG_FILL_START]).double()
            fills.append(float((log[:, LOG_ITEMS_SEEN] * rate.ring.slot_bytes / beside).mean()))
    used = gpu.sums.view(-1)[: ctas * 128 * rate.groups].view(ctas, -1)[:, : 128 * groups]
    if not bool(gpu.torch.isfinite(used).all()) or bool((used == 0).all(1).any()):
        raise RuntimeError("the accumulators are not what random operands give")
    return {"share": median(shares), "fill": median(fills) if fills else None, "mhz": median(frequencies)}


def measure_rate(gpu: Gpu) -> list[Row]:
    from bench.machine_kernels import compile_kernel

    rows: list[Row] = []
    widths = (4, 2, 6, 6, 5, 6, 6, 5, 9, 6, 5)
    print("\nrate: wgmma's share of 4096 flop/clk/SM; B/clk: what the ring takes in beside it, of L2 half if multicast")
    print("port: bytes a clock of shared memory by the model, wgmma's 64 + 4096 / N (SS) x share, and the ring's")
    table(widths, "N", "A", "groups", "alone", "MHz", "ring", "B/clk", "port", "multicast", "B/clk", "port")
    variants: dict[tuple[int, bool], dict[str, Variant]] = {}
    for variant in rate_variants():
        kind = variant.name.rsplit("-", 1)[1]
        variants.setdefault((variant.kernel.n, variant.kernel.registers), {})[kind] = variant
    for (n, registers), kinds in variants.items():
        kernels = {kind: compile_kernel(variant.kernel, variant.arguments) for kind, variant in kinds.items()}
        for groups in (1, 2, 3):
            with_ring = groups <= kinds["c1"].kernel.groups
            alone = "c1" if with_ring else "alone"
            row: Row = {"n": n, "a": "registers" if registers else "shared", "groups": groups}
            row["alone"] = rate_once(gpu, kinds[alone].kernel, kernels[alone], groups, False)
            cells = [f"{row['alone']['share']:.3f}", f"{row['alone']['mhz']:.0f}"]
            for name, kind in (("ring", "c1"), ("multicast", "c2")):
                if not with_ring:
                    cells += ["-", "-", "-"]
                    continue
                row[name] = rate_once(gpu, kinds[kind].kernel, kernels[kind], groups, True)
                share, fill = row[name]["share"], row[name]["fill"]
                # What the shared memory port carries by the model: B's 64 B/clk, A's 4096 / N, and the fill.
                port = share * (64 + (0 if registers else 4096 / n)) + fill
                row[name]["port"] = port
                cells += [f"{share:.3f}", f"{fill:.1f}", f"{port:.0f}"]
            rows.append(row)
            table(widths, n, "RS" if registers else "SS", groups, *cells)
    return rows


def measure_gemm(gpu: Gpu) -> list[Row]:
    from bench.machine_kernels import Gemm, compile_kernel

    torch = gpu.torch
    ctas = gpu.ctas(Gemm.CLUSTER)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    runs: list[tuple[str, tuple[int, int, int], Callable[[], object]]] = []
    errors: dict[tuple[int, int, int], float] = {}
    for variant, shape in zip((*gemm_variants(), None), (*GEMM_SHAPES, UNIT), strict=True):
        m, n, k = shape
        a, b = (torch.randn(rows, k, device="cuda").to(torch.bfloat16) for rows in (m, n))
        c, expected = (torch.zeros(m, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))

        def cublas(a: Any = a, b: Any = b, out: Any = expected) -> None:
            torch.matmul(a, b.t(), out=out)

        cublas()
        if variant is not None:
            kernel = compile_kernel(variant.kernel, variant.arguments)

            def ours(kernel: Any = kernel, a: Any = a, b: Any = b, c: Any = c) -> None:
                kernel(a.data_ptr(), b.data_ptr(), c.data_ptr(), ctas, gpu.stream.cuda_stream)

            ours()
            torch.cuda.synchronize()
            error = float((c.float() - expected.float()).norm() / expected.float().norm())
            if not error < TOLERANCE:
                raise RuntimeError(f"{variant.name}: relative error {error:.2e} against torch.matmul")
            errors[shape] = error
            runs.append(("cute", shape, ours))
        runs.append(("cublas", shape, cublas))
    times: dict[tuple[str, tuple[int, int, int]], list[float]] = {}
    for repetition in range(3 * REPETITIONS + 2):
        for name, shape, run in runs:
            flush.fill_(repetition)  # also hides the launch: the GPU is busy while it is prepared
            seconds = gpu.seconds(run)
            if repetition > 1:
                times.setdefault((name, shape), []).append(seconds)
    unit = median(times["cublas", UNIT])
    unit_rate = 2 * UNIT[0] * UNIT[1] * UNIT[2] / unit / 1e12
    rows: list[Row] = []
    widths = (6, 14, 9, 8, 9, 10)
    print("\ngemm: C[M,N] = A[M,K] B[N,K]^T, bf16, L2 flushed; of unit: of cuBLAS at 8192^3 in this run")
    table(widths, "who", "M x N x K", "us", "TFLOP/s", "of unit", "error")
    for (name, shape), all_times in times.items():
        seconds = median(all_times)
        rate = 2 * shape[0] * shape[1] * shape[2] / seconds / 1e12
        row = {"who": name, "shape": shape, "seconds": seconds, "tflops": rate, "of_unit": rate / unit_rate}
        if name == "cute":
            row["error"] = errors[shape]
        rows.append(row)
        shown = f"{row['error']:.1e}" if name == "cute" else ""
        table(
            widths,
            name,
            "x".join(map(str, shape)),
            f"{seconds * 1e6:.1f}",
            f"{rate:.0f}",
            f"{rate / unit_rate:.2f}",
            shown,
        )
    return rows


SECTIONS: dict[str, Callable[[Gpu], list[Row]]] = {
    "stream": measure_stream,
    "rate": measure_rate,
    "gemm": measure_gemm,
}


def find_ptxas() -> str | None:
    """ptxas of the nvidia-cuda-nvcc wheel, which is as new as the PTX; else the one of the PATH."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for found in Path(place).glob("*/bin/ptxas"):
            return str(found)
    return shutil.which("ptxas")


def compile_only(dump: Path) -> int:
    """Compile every variant; with a ptxas at hand, say what it says of registers, spills and serialised wgmmas."""
    from bench.machine_kernels import compile_kernel

    ptxas = find_ptxas()
    bad = 0
    widths = (20, 7, 9, 6, 30)
    table(widths, "variant", "s", "registers", "spills", "wgmma")
    for variant in (*stream_variants(), *rate_variants(), *gemm_variants()):
        directory = dump / variant.name
        directory.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        compile_kernel(variant.kernel, variant.arguments, f"--keep-ptx --dump-dir {directory}")
        seconds = f"{time.perf_counter() - start:.2f}"
        if ptxas is None:
            table(widths, variant.name, seconds, "-", "-", "no ptxas")
            continue
        for ptx in directory.glob("*.ptx"):
            command = [ptxas, "-v", "-arch=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
            done = subprocess.run(command, capture_output=True, text=True)
            said = done.stdout + done.stderr
            registers = re.search(r"Used (\d+) registers", said)
            spilt = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
            notes = sorted(set(re.findall(r"C75\d\d", said)))
            bad += done.returncode != 0 or spilt > 0 or bool(notes)
            verdict = " ".join(notes) or "as written" if done.returncode == 0 else said.strip()[:200]
            table(widths, variant.name, seconds, registers[1] if registers else "-", spilt, verdict)
    return 1 if bad else 0


def section(name: str, out: Path | None) -> None:
    gpu = Gpu()
    start = time.perf_counter()
    rows = SECTIONS[name](gpu)
    print(f"{name}: {time.perf_counter() - start:.1f} s on {gpu.name}, {gpu.sms} SMs", flush=True)
    if out:
        out.write_text(json.dumps({"device": gpu.name, "sms": gpu.sms, "rows": rows}, indent=1) + "\n")


def all_sections(out: Path | None, limit: float) -> int:
    """Each section in a process of its own: one that hangs is killed, and the others still run."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in SECTIONS:
            part = Path(scratch, f"{name}.json")
            child = subprocess.Popen([sys.executable, __file__, "--section", name, "--out", str(part)])
            try:
                code = child.wait(limit)
                failure = None if code == 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                failure = f"no end after {limit:.0f} s"
                child.kill()
                # The driver first ends what runs on the GPU; do not wait for ever for that.
                try:
                    child.wait(15)
                except subprocess.TimeoutExpired:
                    failure += ", and it cannot be killed"
            if failure:
                print(f"{name}: {failure}", flush=True)
            results[name] = {"failure": failure} if failure else json.loads(part.read_text())
            if out:
                out.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any("failure" in result for result in results.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--section", choices=SECTIONS, help="measure one section in this process, without a limit")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a section, compilation included")
    parser.add_argument("--compile-only", action="store_true", help="compile all variants; needs no GPU")
    parser.add_argument("--dump-dir", type=Path, help="with --compile-only: keep the PTX here")
    options = parser.parse_args()
    if options.compile_only:
        with tempfile.TemporaryDirectory() as scratch:
            return compile_only(options.dump_dir or Path(scratch))
    if options.section:
        section(options.section, options.out)
        return 0
    return all_sections(options.out, options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
