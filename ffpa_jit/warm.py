"""Compile kernels ahead of their first call: here, or on a machine without a GPU for one with.

    ffpa_jit.warm(head_dim=[512, 320], dtype="bf16", arch="sm_90")

Every instantiation is compiled in a process of its own that sees no GPU, several at a time as memory allows, and goes
into the cache (`ffpa_jit.cache`); Triton's also where Triton looks (`ffpa_jit.triton.bundle`). One that fails does not
stop the others. What is in the cache already is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ffpa_jit import settings

__all__ = ["BACKENDS", "Result", "default_jobs", "local_archs", "warm"]

BACKENDS = ("cuda", "triton")

JOB_BYTES = 1 << 30
"""Memory to have free for each compiler that runs: nvcc takes up to 0.9 GB, NVRTC and Triton half of that."""

Progress = Callable[["Result", int, int], None]


@dataclass(frozen=True)
class Result:
    """What became of one instantiation.

    `how`: "built" now, "hit" (it was there), "skipped" (the backend has none for this architecture), "failed", and of a
    dry run "planned". `seconds`: that it took. `path`: its directory in the cache. `message`: why it failed or was
    skipped, or what to know of one that is there.
    """

    backend: str
    name: str
    how: str
    seconds: float = 0.0
    path: str | None = None
    message: str = ""

    @property
    def failed(self) -> bool:
        return self.how == "failed"


@dataclass(frozen=True)
class _Unit:
    """One instantiation, by the arguments of its backend's `spec_for`."""

    backend: str
    name: str
    arguments: tuple[Any, ...]


def warm(
    head_dim: int | Sequence[int],
    dtype: str | Sequence[str] = ("bf16",),
    acc: str | Sequence[str] = "f32",
    stages: int | Sequence[int | None] | None = None,
    arch: str | Sequence[str] | None = None,
    backend: str | Sequence[str] = BACKENDS,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> list[Result]:
    """Compile the kernels of every combination of the arguments, each one value or several; one result a kernel.

    `head_dim`: 257 to 1024. `dtype`: "bf16", "fp16". `acc`, `stages`: of the CUDA backend, as in `CUDABackend`.
    `arch`: "sm_90", ...; None: that of this machine's GPUs. `jobs`: how many at a time (default: FFPA_JIT_JOBS, else as
    cores and memory allow). `dry_run`: compile nothing, but tell what is there. `progress(result, done, total)` is
    called as results come in. CUDA has a kernel for the forward; Triton's are those of the forward and of the backward.

    ValueError for what no kernel exists for, and where there is no GPU and no `arch`. What fails to compile is no
    exception: look at `Result.how`.
    """
    archs = _several(arch) if arch is not None else local_archs()
    units, skipped = _units(_several(head_dim), _several(dtype), _several(acc), _several(stages), archs,
                            _several(backend))  # fmt: skip
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}: it must be at least 1")
    order = {unit: i for i, unit in enumerate(units)}
    results: dict[int, Result] = {}

    def note(unit: _Unit, result: Result) -> None:
        results[order[unit]] = result
        if progress is not None:
            progress(result, len(results), len(units))

    if dry_run:
        for unit, result in zip(units, _in_process(units, dry_run=True), strict=True):
            note(unit, result)
    else:
        with ThreadPoolExecutor(min(jobs or default_jobs(), max(len(units), 1))) as pool:
            running = {pool.submit(_in_process, [unit], dry_run=False): unit for unit in units}
            try:
                for future in as_completed(running):
                    note(running[future], future.result()[0])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                _stop_all()
                raise
    return [results[i] for i in sorted(results)] + skipped


def _several(value: Any) -> list[Any]:
    return [value] if value is None or isinstance(value, str | int) else list(dict.fromkeys(value))


def local_archs() -> list[str]:
    """The architectures of this machine's GPUs; ValueError if there is none."""
    import torch

    from ffpa_jit.problem import device_arch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(
            "there is no GPU here to compile for: name an architecture, arch='sm_90' (on the command line --arch sm_90)"
        )
    return list(dict.fromkeys(device_arch("cuda", index) for index in range(count)))


def _units(
    head_dims: list[int], dtypes: list[str], accs: list[str], stages: list[int | None], archs: list[str],
    backends: list[str],
) -> tuple[list[_Unit], list[Result]]:  # fmt: skip
    """What to compile, and what is skipped because a backend that is not the only one does not know an architecture."""
    from ffpa_jit.cuda import instantiate
    from ffpa_jit.triton import bundle
    from ffpa_jit.triton.configs import family

    for name in backends:
        if name not in BACKENDS:
            raise ValueError(f"backend={name!r} has nothing to compile ahead; choose of {', '.join(BACKENDS)}")
    if not (head_dims and dtypes and accs and stages and archs and backends):
        raise ValueError("nothing to compile: an argument is empty")
    units: dict[tuple[str, str], _Unit] = {}
    skipped: dict[tuple[str, str], Result] = {}

    def add(backend: str, spec: Any, *arguments: Any) -> None:
        units.setdefault((backend, spec.slug), _Unit(backend, spec.slug, arguments))

    for arch in archs:
        unknown = {"cuda": arch not in instantiate.ARCHS, "triton": family(arch) is None or arch == "interpreter"}
        known = [name for name in backends if not unknown[name]] or backends
        for name in backends:
            if name not in known:
                skipped[name, arch] = Result(name, arch, "skipped", message=f"{name} has no kernels for {arch}")
        for head_dim in head_dims:
            for dtype in dtypes:
                if "cuda" in known:
                    for acc in accs:
                        for depth in stages:
                            arguments = arch, head_dim, dtype, acc, depth
                            add("cuda", instantiate.spec_for(*arguments), *arguments)
                if "triton" in known:
                    for direction in bundle.DIRECTIONS:
                        add("triton", bundle.spec_for(arch, head_dim, dtype, direction),
                            arch, head_dim, dtype, direction)  # fmt: skip
    return list(units.values()), list(skipped.values())


# The processes that compile.

_processes: set[subprocess.Popen[bytes]] = set()


def _stop_all() -> None:
    for process in list(_processes):
        process.kill()


def _in_process(units: list[_Unit], *, dry_run: bool) -> list[Result]:
    """The results of `units`, from a process that sees no GPU and whose crash is only theirs."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ffpa-jit-warm-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        task = json.dumps({"units": [asdict(unit) for unit in units], "dry_run": dry_run, "answer": str(answer)})
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", "from ffpa_jit.warm import _serve; _serve()"],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env=_environment(),
            )  # fmt: skip
            _processes.add(process)
            try:
                process.communicate(task.encode())
            finally:
                process.kill()
                process.wait()
                _processes.discard(process)
        if answer.is_file():
            return [Result(**each) for each in json.loads(answer.read_text())]
        said = "\n".join(log.read_text(errors="replace").strip().splitlines()[-8:])
    died = f"the process that compiled it died with exit code {process.returncode}"
    if process.returncode == -9:
        died += " (killed: out of memory? try fewer at a time, --jobs 1)"
    seconds = time.perf_counter() - start
    return [Result(unit.backend, unit.name, "failed", seconds, None, f"{died}\n{said}".strip()) for unit in units]


def _environment() -> dict[str, str]:
    """This process's, without GPUs, and with this package where it is here."""
    blind = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(each for each in (package, os.environ.get("PYTHONPATH")) if each)
    environment = {**os.environ, **blind, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    environment.pop("TRITON_INTERPRET", None)  # an interpreted kernel is not compiled
    return environment


def _serve() -> None:
    """What the process does: a task on standard input, the results into a file."""
    task = json.load(sys.stdin)
    results = [_work(_Unit(**{**each, "arguments": tuple(each["arguments"])}), task["dry_run"])
               for each in task["units"]]  # fmt: skip
    partial = Path(task["answer"]).with_suffix(".part")
    partial.write_text(json.dumps([asdict(result) for result in results]))
    partial.replace(task["answer"])


def _work(unit: _Unit, dry_run: bool) -> Result:
    start = time.perf_counter()
    try:
        if unit.backend == "cuda":
            path, how, seconds, message = _work_cuda(unit, dry_run)
        else:
            path, how, seconds, message = _work_triton(unit, dry_run)
    except Exception as error:
        ours = isinstance(error, RuntimeError | ValueError | OSError)
        message = str(error) if ours and str(error) else f"{type(error).__name__}: {error}"
        return Result(unit.backend, unit.name, "failed", time.perf_counter() - start, None, message)
    return Result(unit.backend, unit.name, how, round(seconds, 3), path, message)


_Work = tuple["str | None", str, float, str]


def _work_cuda(unit: _Unit, dry_run: bool) -> _Work:
    from ffpa_jit.cuda import instantiate, kernels

    spec = instantiate.spec_for(*unit.arguments)
    if dry_run:
        entry = kernels._find(spec, None)
        return (None, "planned", 0.0, "") if entry is None else (str(entry.path), "hit", 0.0, "")
    entry, how, seconds = kernels.warm(spec)
    return str(entry.path), how, seconds, ""


def _work_triton(unit: _Unit, dry_run: bool) -> _Work:
    from ffpa_jit.triton import bundle

    spec = bundle.spec_for(*unit.arguments)
    if dry_run:
        found = bundle.find(spec)
        return (None, "planned", 0.0, "") if found is None else (str(found.path), "hit", 0.0, "")
    entry, how, seconds, note = bundle.warm(spec)
    return str(entry.path), how, seconds, note


# How many at a time.


def default_jobs() -> int:
    """FFPA_JIT_JOBS, else as many as this process may use cores, and memory has room for."""
    return settings.jobs() or max(1, min(_cores(), _free_bytes() // JOB_BYTES))


def _cores() -> int:
    """Cores that this process may use, by its affinity and its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = (_number(f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota_us > 0:
            cores = min(cores, max(1, quota_us // period_us))
    return cores


def _free_bytes() -> int:
    """Memory that this process could take: of the machine, and what its control group leaves."""
    return min(_memory_bounds(), default=4 * JOB_BYTES)


def _memory_bounds() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for limit, usage, cache in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError, ValueError):
            yield max(0, _number(limit) - _number(usage) + _file_cache(cache))


def _number(name: str) -> int:
    return int(Path("/sys/fs/cgroup", name).read_text())  # "max" is a ValueError: no limit


def _file_cache(name: str) -> int:
    """Bytes counted as used that the kernel gives back when they are wanted."""
    lines: Iterable[str] = Path("/sys/fs/cgroup", name).read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "total_inactive_file"))
