"""`kernel(spec)`: from the description of a kernel to one that launches, by way of memory, the cache and a compiler.

Which artefact of a spec serves here:

1. the one of the compiler that this machine would use (the exact key);
2. one of another compiler, from the same sources and flags, if that compiler is not here in another version: a library
   that was built elsewhere where there is no nvcc, a cubin where there is no or the same NVRTC;
3. with FFPA_JIT_COMPILER set, those of that compiler only;
4. else one is built, and published for every later process.

One that cannot be opened (a cache mounted noexec, an older glibc or driver than where it was built) is replaced by the
other compiler's. A build that failed is not tried again in this process. A hit runs no program.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ffpa_jit import settings
from ffpa_jit.cache import Built, Entry, Key, default_cache
from ffpa_jit.context import refuse_capture
from ffpa_jit.cuda.build import Compiler, Kind, compiler_here, find_compiler, select_compiler, source_digest
from ffpa_jit.cuda.instantiate import KernelSpec, tile_of
from ffpa_jit.cuda.load import CudaError, Kernel, load
from ffpa_jit.toolchain import BuildError, first_error

__all__ = ["available", "find", "forget", "kernel", "key_of", "warm"]

_logger = logging.getLogger("ffpa_jit")

_loaded: dict[KernelSpec, Kernel] = {}
_failed: dict[tuple[KernelSpec, Kind], BuildError] = {}
_locks: dict[KernelSpec, threading.Lock] = {}


def kernel(spec: KernelSpec) -> Kernel:
    """The kernel of `spec`, loaded on the current device; the first call finds it in the cache or compiles it.

    ToolchainError where there is neither an artefact nor a compiler, BuildError where the compiler fails, CudaError or
    OSError where the artefact cannot be loaded, RuntimeError for a first call during the capture of a CUDA graph.
    """
    found = _loaded.get(spec)
    return found if found is not None else _first(spec)


def _first(spec: KernelSpec) -> Kernel:
    refuse_capture(f"the first use of the CUDA kernel {spec.slug}")
    with _locks.setdefault(spec, threading.Lock()):
        if spec not in _loaded:
            entry, _, _ = warm(spec)
            try:
                _loaded[spec] = _open(spec, entry)
            except (OSError, CudaError) as error:
                other: Kind = "nvrtc" if _kind(entry) == "nvcc" else "nvcc"
                hopeless = isinstance(error, CudaError) and not error.unreadable
                if hopeless or settings.compiler() is not None or available(spec, other) is not None:
                    raise
                _logger.warning("%s cannot be loaded (%s); using %s instead", entry.artefact, error, other)
                _loaded[spec] = _open(spec, warm(spec, other)[0])
        return _loaded[spec]


def _open(spec: KernelSpec, entry: Entry) -> Kernel:
    tile = tile_of(spec)
    loaded = load(entry.artefact, threads=tile.threads, shared_bytes=tile.shared_bytes)
    loaded.prepare()
    return loaded


def warm(spec: KernelSpec, compiler: Kind | None = None) -> tuple[Entry, str, float]:
    """The artefact of `spec`, found ("hit") or made ("built"), and the seconds that took. It is not loaded, so any
    architecture will do on any machine. `compiler`: only this one (default: FFPA_JIT_COMPILER, else the best here).

    ToolchainError, BuildError.
    """
    start = time.perf_counter()
    entry = find(spec, compiler)
    if entry is not None:
        return entry, "hit", time.perf_counter() - start
    chosen = select_compiler(compiler)
    known = _failed.get((spec, chosen.kind))
    if known is not None:
        raise known.again()
    built: list[float] = []
    try:
        entry = default_cache().get(
            key_of(spec, chosen.ident), _builder(spec, chosen, built), f"the CUDA kernel {spec.slug}"
        )
    except BuildError as error:
        _failed[spec, chosen.kind] = error.again()
        raise
    if built and built[0] > 2:
        _logger.info("compiled the CUDA kernel %s in %.1f s into %s", spec.slug, built[0], entry.path)
    return entry, "built" if built else "hit", time.perf_counter() - start


def _builder(spec: KernelSpec, compiler: Compiler, built: list[float]) -> Callable[[Path], Built]:
    """What the cache calls when it has to build, in a private directory; it leaves the seconds in `built`."""

    def build(directory: Path) -> Built:
        _logger.info("first use of the CUDA kernel %s: compiling it with %s", spec.slug, compiler.ident)
        start = time.perf_counter()
        result = compiler.compile(spec, directory)
        built.append(time.perf_counter() - start)
        return result

    return build


def available(spec: KernelSpec, compiler: Kind | None = None) -> str | None:
    """None if `spec` can be had here, from memory, the cache or a compiler; else the reason. Compiles nothing."""
    if spec in _loaded and compiler is None:
        return None
    chosen = find_compiler(compiler)
    if chosen is None:
        if find(spec, compiler) is not None:
            return None
        wanted = compiler or settings.compiler() or "CUDA compiler (nvcc or NVRTC)"
        return (
            f"no {wanted} is found and no cache holds {spec.slug}: pip install nvidia-cuda-nvrtc, or import a cache "
            "(`ffpa-jit info` lists what was looked for)"
        )
    failed = _failed.get((spec, chosen.kind))
    return None if failed is None else f"building {spec.slug} failed: {first_error(failed.log_text)}"


def key_of(spec: KernelSpec, ident: str) -> Key:
    """The cache key of `spec` compiled by the compiler `ident`."""
    return Key("cuda", spec.slug, dataclasses.asdict(spec), source_digest(spec), ident)


def find(spec: KernelSpec, wanted: Kind | None = None) -> Entry | None:
    """The artefact that serves `spec` here, if there is one; see this module's head."""
    wanted = wanted or settings.compiler()
    cache, compiler = default_cache(), find_compiler(wanted)
    key = key_of(spec, compiler.ident if compiler else "none")
    entry = cache.find(key) if compiler else None
    return entry or next((each for each in cache.alternatives(key) if _serves(each, wanted)), None)


def _serves(entry: Entry, wanted: Kind | None) -> bool:
    """Rules 2 and 3 of this module's head."""
    kind = _kind(entry)
    if kind is None or wanted not in (None, kind):
        return False
    here = compiler_here(kind)
    return here is None or here.ident == entry.key.compiler


def _kind(entry: Entry) -> Kind | None:
    name = entry.key.compiler.partition(" ")[0]
    return "nvcc" if name == "nvcc" else "nvrtc" if name == "nvrtc" else None


def forget() -> None:
    """Drop what this process has loaded and which builds failed, so that the next use starts from the cache."""
    _loaded.clear()
    _failed.clear()
