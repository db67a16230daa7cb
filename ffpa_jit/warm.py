"""Compile kernels ahead of their first call: here, or on a machine without a GPU for one with.

    ffpa_jit.warm(head_dim=[512, 320], dtype="bf16", arch="sm_90")

Which kernels there are, and how each is built and loaded, the backends say (`registry.Implementation`). Every one is
compiled in a process of its own that sees no GPU, several at a time as memory allows, and goes into the cache
(`ffpa_jit.cache`), Triton's also where Triton looks. One that fails does not stop the others. What is in the cache
already is left alone. For the GPUs of this machine the kernels are then loaded in this process, so that a CUDA graph
may be captured next.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ffpa_jit import registry, settings
from ffpa_jit.cache import Cache, default_cache
from ffpa_jit.kernel_spec import NoKernelError, Spec

__all__ = ["Result", "default_jobs", "local_archs", "plain_arch", "warm"]

_logger = logging.getLogger("ffpa_jit")

JOB_BYTES = 1 << 30
"""Memory to have free for each compiler that runs: nvcc takes up to 0.9 GB, NVRTC and Triton half of that."""

Progress = Callable[["Result", int, int], None]


@dataclass(frozen=True)
class Result:
    """What became of one instantiation.

    `how`: "built" now, "hit" (it was there), "skipped" (the backend has none for this architecture or head dim, or is
    not installed), "failed", and of a dry run "planned". `seconds`: that it took. `path`: its directory in the cache.
    `message`: why it failed or was skipped, or what to know of one that is there.
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
    """One kernel to compile."""

    backend: str
    spec: Spec

    @property
    def name(self) -> str:
        return self.spec.slug


def warm(
    head_dim: int | Sequence[int],
    dtype: str | Sequence[str] = ("bf16",),
    acc: str | Sequence[str] = "f32",
    stages: int | Sequence[int | None] | None = None,
    arch: str | Sequence[str] | None = None,
    backend: str | Sequence[str] | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    load: bool | None = None,
) -> list[Result]:
    """Compile the kernels of every combination of the arguments, each one value or several; one result a kernel.

    `head_dim`: multiples of 8 from 264 to 1024. `dtype`: "bf16", "fp16". `acc`, `stages`: of the CUDA backend, as in
    `CUDABackend`. `arch`: "sm_90" ("sm_90a" is the same), ...; None: that of this machine's GPUs. `backend`: "cuda",
    "triton", "cutedsl" ("cute" is the same), None for all; of several, one that has no kernel here is skipped. `jobs`:
    how many at a time (default: FFPA_JIT_JOBS, else as cores and memory allow). `dry_run`: compile nothing, but tell
    what is there. `progress(result, done, total)` is called as results come in. CUDA has a kernel for the forward;
    Triton's are those of the forward and of the backward; CuTe DSL's the forward with `is_causal` and without.
    `load`: whether to load them as well, in this process, on each GPU of their architecture, as graph capture needs it
    (Triton's and CuTe DSL's by running them once); None: if `arch` is None.

    ValueError for what no kernel exists for, and where there is no GPU and no `arch`. What fails to compile is no
    exception: look at `Result.how`.
    """
    archs = local_archs() if arch is None else list(dict.fromkeys(map(plain_arch, _several(arch))))
    asked = registry.names() if backend is None else _several(backend)
    backends = list(dict.fromkeys(registry.ALIASES.get(name, name) for name in asked))
    units, skipped = _units(
        archs, backends, _several(head_dim), _several(dtype), acc=_several(acc), stages=_several(stages)
    )
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}: it must be at least 1")
    run = _Run(units, progress)
    if dry_run:
        for unit in units:
            run.note(unit, _find(unit, install=False) or Result(unit.backend, unit.name, "planned"))
    elif lost := _lost(default_cache()):
        for unit in units:
            run.note(unit, Result(unit.backend, unit.name, "failed", message=lost))
    else:
        run.compile(jobs or default_jobs())
    if not dry_run:
        registry.invalidate()  # what was refused for want of a kernel or a compiler may run now
        if arch is None if load is None else load:
            _load(run.results)
    return [run.results[unit] for unit in units] + skipped


class _Run:
    """The results of some units as they come in, each given to `progress`, and the warnings of the processes that they
    come from, each passed on once."""

    def __init__(self, units: list[_Unit], progress: Progress | None) -> None:
        self._units, self._progress = units, progress
        self._warned: set[str] = set()
        self.results: dict[_Unit, Result] = {}

    def note(self, unit: _Unit, result: Result, warnings: Sequence[str] = ()) -> None:
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _logger.warning("%s", warning)
        self.results[unit] = result
        if self._progress is not None:
            self._progress(result, len(self.results), len(self._units))

    def compile(self, jobs: int) -> None:
        """What is not there, so many at a time."""
        for unit in self._units:
            found = _find(unit)
            if found is not None:
                self.note(unit, found)
        missing = [unit for unit in self._units if unit not in self.results]
        with ThreadPoolExecutor(min(jobs, max(len(missing), 1))) as pool:
            running = {pool.submit(_in_process, unit): unit for unit in missing}
            try:
                for future in as_completed(running):
                    self.note(running[future], *future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                _stop_all()
                raise


def _find(unit: _Unit, install: bool = True) -> Result | None:
    """What the cache has of a unit, put where its runtime looks; None where there is nothing."""
    store = registry.described(unit.backend).store
    with contextlib.suppress(Exception):  # Triton may not be here; the process that compiles says so
        entry = store.find(unit.spec) if default_cache().holds(store.group, unit.name) else None
        if entry is not None:
            message = store.install(entry) if install else ""
            return Result(unit.backend, unit.name, "hit", 0.0, str(entry.path), message)
    return None


def _lost(cache: Cache) -> str:
    """Why nothing that is compiled could be kept; "" if it can be."""
    reason = cache.unwritable()
    where = f"{cache.root} is not used: {reason}" if cache.root else reason
    return reason and f"nothing can be kept: {where}; set FFPA_JIT_CACHE_DIR to a directory of your own"


def _several(value: Any) -> list[Any]:
    return [value] if value is None or isinstance(value, str | int) else list(dict.fromkeys(value))


def plain_arch(arch: str) -> str:
    """An architecture as a device names it: "sm_90a", what compilers call a GPU with all that it has, is "sm_90"."""
    return arch[:-1] if re.fullmatch(r"sm_\d+[af]", arch) else arch


def local_archs() -> list[str]:
    """The architectures of this machine's GPUs; ValueError if there is none."""
    archs = list(dict.fromkeys(arch for _, arch in _devices()))
    if not archs:
        raise ValueError("there is no GPU here to compile for; name an architecture such as sm_90 (arch, --arch)")
    return archs


def _devices() -> list[tuple[int, str]]:
    """(index, architecture) of this machine's GPUs."""
    import torch

    from ffpa_jit.problem import device_arch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [(index, device_arch("cuda", index)) for index in range(count)]


def _units(
    archs: Sequence[str], backends: Sequence[str], head_dims: list[int], dtypes: list[str], **options: list[Any]
) -> tuple[list[_Unit], list[Result]]:
    """What to compile, and what is skipped because a backend that is not the only one has no kernel for it."""
    known = registry.names()
    for name in backends:
        if name not in known:
            raise ValueError(f"backend={name!r} has nothing to compile ahead; choose of {', '.join(known)}")
    if not (archs and backends and head_dims and dtypes and all(options.values())):
        raise ValueError("nothing to compile: an argument is empty")
    for head_dim in head_dims:
        if head_dim % 8 or not 264 <= head_dim <= 1024:
            raise ValueError(f"head_dim={head_dim}: head dims are multiples of 8 from 264 to 1024")
    units: dict[_Unit, None] = {}
    skipped: dict[tuple[str, str], Result] = {}
    lacking: dict[tuple[str, int], list[str]] = {}
    for arch, name, head_dim in itertools.product(archs, backends, head_dims):
        try:
            for dtype, *values in itertools.product(dtypes, *options.values()):
                chosen = dict(zip(options, values, strict=True))
                specs = registry.described(name).kernels(arch, head_dim, dtype, **chosen)
                units.update(dict.fromkeys(_Unit(name, spec) for spec in specs))
        except NoKernelError as error:
            skipped[name, error.what] = Result(name, error.what, "skipped", message=str(error))
            reasons = lacking.setdefault((arch, head_dim), [])
            reasons.append(str(error))
            if len(reasons) == len(backends):
                raise ValueError("; ".join(reasons)) from None
    return list(units), list(skipped.values())


# The processes that compile.

_processes: set[subprocess.Popen[bytes]] = set()


def _stop_all() -> None:
    for process in list(_processes):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)  # ninja then ends its compilers too; SIGKILL would orphan them


def _in_process(unit: _Unit) -> tuple[Result, list[str]]:
    """The result of `unit`, from a process that sees no GPU and whose crash is only its own; and its warnings."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ffpa-jit-warm-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        task = json.dumps({**asdict(unit), "answer": str(answer)})
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", "from ffpa_jit.warm import _serve; _serve()"],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env=_environment(), start_new_session=True,
            )  # fmt: skip
            _processes.add(process)
            try:
                process.communicate(task.encode())
            finally:
                process.kill()
                process.wait()
                _processes.discard(process)
        if answer.is_file():
            given = json.loads(answer.read_text())
            return Result(**given["result"]), given["warnings"]
        said = "\n".join(log.read_text(errors="replace").strip().splitlines()[-8:])
    killed = " (killed: out of memory? try fewer at a time, --jobs 1)" if process.returncode == -9 else ""
    message = f"the process that compiled it died with exit code {process.returncode}{killed}\n{said}".strip()
    return Result(unit.backend, unit.name, "failed", time.perf_counter() - start, None, message), []


def _environment() -> dict[str, str]:
    """This process's, without GPUs, and with this package where it is here."""
    blind = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(each for each in (package, os.environ.get("PYTHONPATH")) if each)
    environment = {**os.environ, **blind, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    environment.pop("TRITON_INTERPRET", None)  # an interpreted kernel is not compiled
    return environment


def _serve() -> None:
    """What the process does: a task on standard input, the result into a file."""
    task = json.load(sys.stdin)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    _logger.addHandler(handler)
    result = asdict(_compile(task["backend"], task["spec"]))
    partial = Path(task["answer"]).with_suffix(".part")
    partial.write_text(json.dumps({"result": result, "warnings": warnings}))
    partial.replace(task["answer"])


def _compile(backend: str, fields: dict[str, Any]) -> Result:
    """`fields`: of the spec."""
    store, cache = registry.described(backend).store, default_cache()
    spec = store.spec_type(**fields)
    start = time.perf_counter()
    try:
        entry, how, seconds = store.warm(spec)
        if entry.root == cache.standby:  # the cache could not take it after all, and that goes with this process
            raise OSError(_lost(cache))
        return Result(backend, spec.slug, how, round(seconds, 3), str(entry.path), store.install(entry))
    except Exception as error:
        ours = isinstance(error, RuntimeError | ValueError | OSError)
        message = str(error) if ours and str(error) else f"{type(error).__name__}: {error}"
        return Result(backend, spec.slug, "failed", time.perf_counter() - start, None, message)


# Loading, in this process.


def _load(results: dict[_Unit, Result]) -> None:
    """Load what was compiled on every GPU here that it is for; what cannot be becomes a failure."""
    for index, arch in _devices():
        for unit, result in results.items():
            if unit.spec.arch == arch and not result.failed:
                try:
                    registry.described(unit.backend).load(unit.spec, index)
                except Exception as error:
                    message = f"it is compiled, but cannot be loaded on GPU {index}: {type(error).__name__}: {error}"
                    results[unit] = replace(result, how="failed", message=message)


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
    bounds = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        bounds.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")))
    for limit, usage, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError, ValueError):
            lines = Path("/sys/fs/cgroup", statistics).read_text().splitlines()
            counts = dict(line.split() for line in lines)
            given_back = sum(int(counts.get(name, 0)) for name in ("inactive_file", "total_inactive_file"))  # if wanted
            bounds.append(max(0, _number(limit) - _number(usage) + given_back))
    return min(bounds, default=4 * JOB_BYTES)


def _number(name: str) -> int:
    return int(Path("/sys/fs/cgroup", name).read_text())  # "max" is a ValueError: no limit
