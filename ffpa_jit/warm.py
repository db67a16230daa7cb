"""Compile kernels ahead of their first call: here, or on a machine without a GPU for one with.

    ffpa_jit.warm(head_dim=[512, 320], dtype="bf16", arch="sm_90")

Every instantiation is compiled in a process of its own that sees no GPU, several at a time as memory allows, and goes
into the cache (`ffpa_jit.cache`); Triton's also where Triton looks (`ffpa_jit.triton.bundle`). One that fails does not
stop the others. What is in the cache already is left alone. For the GPUs of this machine the kernels are then loaded in
this process, so that a CUDA graph may be captured next.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ffpa_jit import registry, settings
from ffpa_jit.cache import Entry, default_cache

if TYPE_CHECKING:
    from ffpa_jit.cuda.instantiate import KernelSpec
    from ffpa_jit.cute.spec import KernelSpec as CuteSpec
    from ffpa_jit.triton.bundle import TritonSpec

__all__ = ["BACKENDS", "SYNONYMS", "Result", "default_jobs", "local_archs", "plain_arch", "warm"]

_logger = logging.getLogger("ffpa_jit")

BACKENDS = ("cuda", "triton", "cutedsl")

Mode = Literal["look", "hits", "all"]  # tell what is there; answer only for what is there; compile what is not

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
    load: bool | None = None,
) -> list[Result]:
    """Compile the kernels of every combination of the arguments, each one value or several; one result a kernel.

    `head_dim`: multiples of 8 from 264 to 1024. `dtype`: "bf16", "fp16". `acc`, `stages`: of the CUDA backend, as in
    `CUDABackend`. `arch`: "sm_90" ("sm_90a" is the same), ...; None: that of this machine's GPUs. `backend`: "cuda",
    "triton", "cutedsl" ("cute" is the same); of several, one that has no kernel here is skipped. `jobs`: how many at a
    time (default: FFPA_JIT_JOBS, else as cores and memory allow). `dry_run`: compile nothing, but tell what is there.
    `progress(result, done, total)` is called as results come in. CUDA has a kernel for the forward; Triton's are those
    of the forward and of the backward; CuTe-DSL's the forward with `is_causal` and without.
    `load`: whether to load them as well, in this process, on each GPU of their architecture, as graph capture needs it
    (Triton's and CuTe-DSL's by running them once); None: if `arch` is None.

    ValueError for what no kernel exists for, and where there is no GPU and no `arch`. What fails to compile is no
    exception: look at `Result.how`.
    """
    archs = _plain(_several(arch)) if arch is not None else local_archs()
    names = list(dict.fromkeys(SYNONYMS.get(name, name) for name in _several(backend)))
    units, skipped = _units(_several(head_dim), _several(dtype), _several(acc), _several(stages), archs, names)
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}: it must be at least 1")
    results: dict[_Unit, Result] = {}
    told: set[str] = set()

    def note(unit: _Unit, result: Result) -> None:
        results[unit] = result
        if progress is not None:
            progress(result, len(results), len(units))

    def answers(answer: tuple[list[Result], list[str]]) -> list[Result]:
        for warning in answer[1]:
            if warning not in told:
                told.add(warning)
                _logger.warning("%s", warning)
        return answer[0]

    if dry_run:
        for unit, result in zip(units, answers(_in_process(units, "look")), strict=True):
            note(unit, result)
    elif lost := _lost():
        for unit in units:
            note(unit, Result(unit.backend, unit.name, "failed", message=lost))
    else:
        there = [unit for unit in units if default_cache().holds(_GROUPS.get(unit.backend, unit.backend), unit.name)]
        if len(there) > 1:  # one process for all that is done already, rather than one for each
            for unit, result in zip(there, answers(_in_process(there, "hits")), strict=True):
                if result.how == "hit":
                    note(unit, result)
        missing = [unit for unit in units if unit not in results]
        with ThreadPoolExecutor(min(jobs or default_jobs(), max(len(missing), 1))) as pool:
            running = {pool.submit(_in_process, [unit], "all"): unit for unit in missing}
            try:
                for future in as_completed(running):
                    note(running[future], answers(future.result())[0])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                _stop_all()
                raise
    if not dry_run:
        registry.changed()  # what was refused for want of a kernel or a compiler may run now
        if arch is None if load is None else load:
            _load([unit for unit in units if not results[unit].failed], results)
    return [results[unit] for unit in units] + skipped


def _lost() -> str:
    """Why nothing that is compiled could be kept; "" if it can be."""
    cache = default_cache()
    reason = cache.unwritable()
    return _nothing_kept(cache.root, reason) if reason else ""


def _nothing_kept(root: Path | None, reason: str) -> str:
    why = f"{root} is not used: {reason}" if root else reason
    return f"nothing can be kept: {why}; set FFPA_JIT_CACHE_DIR to a directory of your own"


_NAMES = {"cuda": "CUDA", "triton": "Triton", "cutedsl": "CuTe-DSL"}
SYNONYMS = {"cute": "cutedsl"}
"""What commands take for a backend's name besides."""

_GROUPS = {"cutedsl": "cute"}  # of the cache, where they are not called as the backend


def _several(value: Any) -> list[Any]:
    return [value] if value is None or isinstance(value, str | int) else list(dict.fromkeys(value))


def _plain(archs: list[str]) -> list[str]:
    """Architectures as devices name them: "sm_90a", what compilers call a GPU with all that it has, is "sm_90"."""
    return list(dict.fromkeys(plain_arch(arch) for arch in archs))


def plain_arch(arch: str) -> str:
    """One architecture, as a device names it."""
    return arch[:-1] if re.fullmatch(r"sm_\d+[af]", arch) else arch


def local_archs() -> list[str]:
    """The architectures of this machine's GPUs; ValueError if there is none."""
    import torch

    from ffpa_jit.problem import device_arch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError("there is no GPU here to compile for: name an architecture, arch='sm_90'")
    return list(dict.fromkeys(device_arch("cuda", index) for index in range(count)))


def _units(
    head_dims: list[int], dtypes: list[str], accs: list[str], stages: list[int | None], archs: list[str],
    backends: list[str],
) -> tuple[list[_Unit], list[Result]]:  # fmt: skip
    """What to compile, and what is skipped because a backend that is not the only one has no kernel for it."""
    for name in backends:
        if name not in BACKENDS:
            raise ValueError(f"backend={name!r} has nothing to compile ahead; choose of {', '.join(BACKENDS)}")
    if not (head_dims and dtypes and accs and stages and archs and backends):
        raise ValueError("nothing to compile: an argument is empty")
    for head_dim in head_dims:
        if head_dim % 8 or not 264 <= head_dim <= 1024:
            raise ValueError(f"head_dim={head_dim}: head dims are multiples of 8 from 264 to 1024")
    units: dict[tuple[str, str], _Unit] = {}
    skipped: dict[tuple[str, str], Result] = {}
    served = _served()
    for arch in archs:
        lacking = {name: _lacking(name, arch, served) for name in backends}
        if all(lacking.values()):
            lists = "; ".join(f"{_NAMES[name]}: {', '.join(served[name])}" for name in backends)
            absent = "; ".join(reason for name, reason in lacking.items() if reason and arch in served[name])
            raise ValueError(absent or f"arch={arch!r}: there are no kernels for it. {lists}")
        for name in backends:
            if reason := lacking[name]:
                skipped[name, arch] = Result(name, arch, "skipped", message=reason)
                continue
            for head_dim in head_dims:
                if name == "cutedsl" and len(backends) > 1 and head_dim > _cute_limit():
                    slug, limit = f"{arch}-d{head_dim}", _cute_limit()
                    message = f"cutedsl has no kernels for head dims above {limit}"
                    skipped[name, slug] = Result(name, slug, "skipped", message=message)
                    continue
                for spec, arguments in _specs(name, arch, head_dim, dtypes, accs, stages):
                    units.setdefault((name, spec.slug), _Unit(name, spec.slug, arguments))
    return list(units.values()), list(skipped.values())


def _served() -> dict[str, tuple[str, ...]]:
    """Backend -> the architectures that it has kernels for."""
    from ffpa_jit.cuda import instantiate
    from ffpa_jit.cute import spec
    from ffpa_jit.triton.configs import FAMILIES

    families = [members for name, members in FAMILIES.items() if name != "interpreter"]
    return {
        "cuda": tuple(instantiate.ARCHS),
        "triton": tuple(each for members in families for each in members),
        "cutedsl": tuple(spec.ARCHS),
    }


def _lacking(name: str, arch: str, served: dict[str, tuple[str, ...]]) -> str:
    """Why a backend compiles nothing for an architecture; "" if it does."""
    if arch not in served[name]:
        return f"{name} has no kernels for {arch}"
    # Of the others, what is not there is a failure of its own: a machine that has one is not to be told of an extra.
    absent = registry.missing(name) if name == "cutedsl" else None
    return absent.reason if absent is not None else ""


def _cute_limit() -> int:
    from ffpa_jit.cute.spec import HEAD_DIMS

    return HEAD_DIMS[-1]


def _specs(
    name: str, arch: str, head_dim: int, dtypes: list[str], accs: list[str], stages: list[int | None]
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The instantiations of one backend, each with the arguments of its `spec_for`."""
    from ffpa_jit.cuda import instantiate
    from ffpa_jit.cute import spec
    from ffpa_jit.triton import bundle

    ways: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
        "cuda": (instantiate.spec_for, [(acc, depth) for acc in accs for depth in stages]),
        "triton": (bundle.spec_for, [(direction,) for direction in bundle.DIRECTIONS]),
        "cutedsl": (spec.spec_for, [(is_causal,) for is_causal in (False, True)]),
    }
    spec_for, last = ways[name]
    for dtype in dtypes:
        for each in last:
            arguments = (arch, head_dim, dtype, *each)
            yield spec_for(*arguments), arguments


# The processes that compile.

_processes: set[subprocess.Popen[bytes]] = set()


def _stop_all() -> None:
    for process in list(_processes):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)  # ninja then ends its compilers too; SIGKILL would orphan them


def _in_process(units: list[_Unit], mode: Mode) -> tuple[list[Result], list[str]]:
    """The results of `units`, from a process that sees no GPU and whose crash is only theirs; and its warnings."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ffpa-jit-warm-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        task = json.dumps({"units": [asdict(unit) for unit in units], "mode": mode, "answer": str(answer)})
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
            return [Result(**each) for each in given["results"]], given["warnings"]
        said = "\n".join(log.read_text(errors="replace").strip().splitlines()[-8:])
    died = f"the process that compiled it died with exit code {process.returncode}"
    if process.returncode == -9:
        died += " (killed: out of memory? try fewer at a time, --jobs 1)"
    seconds = time.perf_counter() - start
    message = f"{died}\n{said}".strip()
    return [Result(unit.backend, unit.name, "failed", seconds, None, message) for unit in units], []


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
    warnings = _Collected(logging.WARNING)
    _logger.addHandler(warnings)
    results = [_work(_Unit(**{**each, "arguments": tuple(each["arguments"])}), task["mode"])
               for each in task["units"]]  # fmt: skip
    partial = Path(task["answer"]).with_suffix(".part")
    partial.write_text(json.dumps({"results": [asdict(each) for each in results], "warnings": warnings.messages}))
    partial.replace(task["answer"])


class _Collected(logging.Handler):
    """Keeps what is logged, for the process that asked."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


def _work(unit: _Unit, mode: Mode) -> Result:
    start = time.perf_counter()
    try:
        work = _work_triton if unit.backend == "triton" else _work_kernel
        path, how, seconds, message = work(unit, mode)
    except Exception as error:
        ours = isinstance(error, RuntimeError | ValueError | OSError)
        message = str(error) if ours and str(error) else f"{type(error).__name__}: {error}"
        return Result(unit.backend, unit.name, "failed", time.perf_counter() - start, None, message)
    return Result(unit.backend, unit.name, how, round(seconds, 3), path, message)


_Work = tuple["str | None", str, float, str]


def _work_kernel(unit: _Unit, mode: Mode) -> _Work:
    """Of the backends whose kernels are one artefact each: `find` and `warm` are called alike."""
    modules = ("cuda.instantiate", "cuda.kernels") if unit.backend == "cuda" else ("cute.spec", "cute.compile")
    specs, kernels = (importlib.import_module(f"ffpa_jit.{each}") for each in modules)
    spec = specs.spec_for(*unit.arguments)
    if mode != "all":
        found = kernels.find(spec)
        return (None, "planned", 0.0, "") if found is None else (str(found.path), "hit", 0.0, "")
    entry, how, seconds = kernels.warm(spec)
    return _kept(entry), how, seconds, ""


def _work_triton(unit: _Unit, mode: Mode) -> _Work:
    from ffpa_jit.triton import bundle

    spec = bundle.spec_for(*unit.arguments)
    found = bundle.find(spec) if mode != "all" else None
    if mode == "look" or (mode == "hits" and found is None):
        return (None, "planned", 0.0, "") if found is None else (str(found.path), "hit", 0.0, "")
    entry, how, seconds, note = bundle.warm(spec)  # a hit is put where Triton looks
    return _kept(entry), how, seconds, note


def _kept(entry: Entry) -> str:
    """Where an entry is; OSError if that goes with this process, because the cache could not take it after all."""
    cache = default_cache()
    if entry.root == cache.standby:
        raise OSError(_nothing_kept(cache.root, cache.unwritable()))
    return str(entry.path)


# Loading, in this process.


def _load(units: list[_Unit], results: dict[_Unit, Result]) -> None:
    """Load what was compiled on every GPU here that it is for; what cannot be is a failure in `results`."""
    for unit in units:
        for index in _devices(unit.arguments[0]):
            try:
                _load_on(index, unit)
            except Exception as error:
                message = f"it is compiled, but cannot be loaded on GPU {index}: {type(error).__name__}: {error}"
                results[unit] = replace(results[unit], how="failed", message=message)
                break


def _devices(arch: str) -> list[int]:
    import torch

    from ffpa_jit.problem import device_arch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [index for index in range(count) if device_arch("cuda", index) == arch]


def _load_on(index: int, unit: _Unit) -> None:
    """Through the backend's verb. Triton and CuTe-DSL run each once, a backward with the forward that it needs."""
    import torch

    from ffpa_jit.backends import CUDABackend
    from ffpa_jit.cuda import instantiate
    from ffpa_jit.cute import spec as cute
    from ffpa_jit.problem import Problem
    from ffpa_jit.triton import bundle

    def problem(spec: KernelSpec | TritonSpec | CuteSpec, **more: bool) -> Problem:
        flags: dict[str, Any] = {"is_causal": False, "needs_grad": False, **more}
        return Problem(
            batch=1, heads_q=1, heads_kv=1, len_q=256, len_kv=256, head_dim=spec.head_dim, head_dim_v=spec.head_dim,
            dtype=getattr(torch, spec.dtype), device_type="cuda", device_index=index, arch=spec.arch, has_mask=False,
            dropout_p=0.0, mask_needs_grad=False, **flags,
        )  # fmt: skip

    backend = registry.get(unit.backend)
    if unit.backend == "cuda":
        kernel = instantiate.spec_for(*unit.arguments)
        backend.warm(problem(kernel), CUDABackend(acc=kernel.acc, stages=kernel.stages))
    elif unit.backend == "cutedsl":
        fused = cute.spec_for(*unit.arguments)
        backend.warm(problem(fused, is_causal=fused.is_causal))
    else:
        triton = bundle.spec_for(*unit.arguments)
        for is_causal in (False, True):
            backend.warm(problem(triton, is_causal=is_causal, needs_grad=triton.direction == "backward"))


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
