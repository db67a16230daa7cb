"""`kernel(spec)`: from the description of a kernel to one that launches, by way of memory, the cache and the CuTe DSL.

An artefact serves here if it was made from these sources by the installed release of the DSL, its build for the same
CUDA toolkit, on a CPU that can do no more than this one (`toolkit`): the host's part of an object is compiled for the
CPU that compiled it. Any other is left alone, and one is made: in a process of its own (`emit`), published for every
later process. A compilation that failed is not tried again in this process. A hit runs no program and does not import
the DSL.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ffpa_jit.cache import Built, Entry, Key, default_cache
from ffpa_jit.cache.entries import LOG
from ffpa_jit.context import refuse_capture
from ffpa_jit.cute import toolkit
from ffpa_jit.cute.emit import ANSWER, OBJECT, PREFIX
from ffpa_jit.cute.load import Kernel, load
from ffpa_jit.cute.spec import KernelSpec, target_of
from ffpa_jit.toolchain import BuildError

__all__ = ["DslError", "DslMissing", "available", "find", "forget", "ident", "kernel", "key_of", "warm"]

_logger = logging.getLogger("ffpa_jit")

GROUP = "cute"
KERNELS = "ffpa_jit.cute.forward_sm90"
"""The module whose `entry(spec)` gives what to compile."""

_SOURCES = Path(__file__).resolve().parent
# What only launches, finds or describes kernels: no bit of an object depends on it.
_HOST_ONLY = frozenset({"__init__", "backend", "compile", "dense", "estimates", "load", "order", "spec", "toolkit"})
_PATIENCE = 900.0  # seconds that one compilation may take
_SHOWN = 6  # lines of a log in an error
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(error\b|[\w.]*(Error|Exception)\b)")

_loaded: dict[KernelSpec, Kernel] = {}
_failed: dict[KernelSpec, BuildError] = {}
_locks: dict[KernelSpec, threading.Lock] = {}


class DslMissing(RuntimeError):  # noqa: N818  (it says what is wrong)
    """There is no CuTe DSL here that can be used."""


class DslError(BuildError):
    """The DSL failed; it says why in its last lines, and not always in one of them."""

    def __str__(self) -> str:
        where = f"\nThe whole log: {self.log}" if self.log is not None else ""
        return f"compiling {self.what} failed: {_last_lines(self.log_text) or 'there is no output'}{where}"


def kernel(spec: KernelSpec) -> Kernel:
    """The kernel of `spec`, loaded; the first call finds it in the cache or compiles it.

    DslMissing where there is no DSL that can be used, BuildError where it fails, OSError where the artefact cannot be
    loaded or the compiler not started, RuntimeError for a first call during the capture of a CUDA graph.
    """
    found = _loaded.get(spec)
    return found if found is not None else _first(spec)


def _first(spec: KernelSpec) -> Kernel:
    refuse_capture(f"the first use of the CuTe-DSL kernel {spec.slug}")
    with _locks.setdefault(spec, threading.Lock()):
        if spec not in _loaded:
            entry, _, _ = warm(spec)
            meta = entry.meta
            _loaded[spec] = load(entry.artefact, meta["arguments"], meta["prefix"], _toolkit().runtime)
        return _loaded[spec]


def warm(spec: KernelSpec) -> tuple[Entry, str, float]:
    """The artefact of `spec`, found ("hit") or made ("built"), and the seconds that took. It is not loaded, and no GPU
    is needed. DslMissing, BuildError."""
    start = time.perf_counter()
    entry = find(spec)
    if entry is not None:
        return entry, "hit", time.perf_counter() - start
    chosen = _toolkit()
    known = _failed.get(spec)
    if known is not None:
        raise known.again()
    built: list[float] = []
    try:
        entry = default_cache().get(
            key_of(spec, ident(chosen)), _builder(spec, chosen, built), f"the CuTe-DSL kernel {spec.slug}"
        )
    except BuildError as error:
        _failed[spec] = error.again()
        raise
    if built and built[0] > 2:
        _logger.info("compiled the CuTe-DSL kernel %s in %.1f s into %s", spec.slug, built[0], entry.path)
    return entry, "built" if built else "hit", time.perf_counter() - start


def available(spec: KernelSpec) -> str | None:
    """None if `spec` can be had here, from memory, the cache or the DSL; else the reason. Compiles nothing."""
    if spec in _loaded:
        return None
    chosen = toolkit.find()
    if isinstance(chosen, str):
        return chosen
    failed = _failed.get(spec)
    if failed is None or find(spec) is not None:  # another process may have made it since
        return None
    return f"compiling {spec.slug} failed: {_last_lines(failed.log_text).splitlines()[0]}"


def find(spec: KernelSpec) -> Entry | None:
    """The artefact that serves `spec` here, if there is one; see this module's head."""
    chosen = toolkit.find()
    if isinstance(chosen, str):
        return None
    cache, key = default_cache(), key_of(spec, ident(chosen))
    return cache.find(key) or next((each for each in cache.alternatives(key) if _serves(each, chosen)), None)


def _serves(entry: Entry, chosen: toolkit.Toolkit) -> bool:
    made_by, _, level = entry.key.compiler.rpartition(" ")
    return made_by == chosen.ident and toolkit.runs_here(level)


def key_of(spec: KernelSpec, compiler: str) -> Key:
    """The cache key of `spec` compiled by `compiler`, an `ident`."""
    return Key(GROUP, spec.slug, dataclasses.asdict(spec), _source_digest(), compiler)


def ident(chosen: toolkit.Toolkit) -> str:
    """The compiler, for cache keys: the DSL, all its parts, and the CPU that it compiles the host's part for."""
    return f"{chosen.ident} {toolkit.host_level()}"


def forget() -> None:
    """Drop what this process has loaded and found, and which builds failed, so that the next use starts anew."""
    _loaded.clear()
    _failed.clear()
    toolkit.forget()
    _source_digest.cache_clear()


def _toolkit() -> toolkit.Toolkit:
    chosen = toolkit.find()
    if isinstance(chosen, str):
        raise DslMissing(chosen)
    return chosen


@functools.lru_cache(maxsize=1)
def _source_digest() -> str:
    """`_digest`, when this process first needed it."""
    return _digest()


def _digest() -> str:
    """sha256 over every source that takes part in an object, and the module that is asked for what to compile."""
    digest = hashlib.sha256(f"{KERNELS}\n".encode())
    for path in sorted(_SOURCES.glob("*.py")):
        if path.stem not in _HOST_ONLY:
            text = path.read_bytes()
            digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


# The process that compiles. What it imports the package through is a shell: the real one would import torch.
_BOOT = (
    "import sys, types; sys.path[:] = [each for each in sys.path if each]; package = types.ModuleType('ffpa_jit'); "
    "package.__path__ = [sys.argv[1]]; sys.modules['ffpa_jit'] = package; "
    "from ffpa_jit.cute.emit import main; main()"
)


def _builder(spec: KernelSpec, chosen: toolkit.Toolkit, built: list[float]) -> Callable[[Path], Built]:
    """What the cache calls when it has to build, in a private directory; it leaves the seconds in `built`."""

    def build(directory: Path) -> Built:
        _logger.info("first use of the CuTe-DSL kernel %s: compiling it with %s", spec.slug, chosen.ident)
        start = time.perf_counter()
        head = f"{ident(chosen)}: {spec.slug}\n"
        task = {
            "module": KERNELS, "spec": dataclasses.asdict(spec), "target": target_of(spec), "toolkit": chosen.flavour,
            "paths": [each for each in sys.path if each],
        }  # fmt: skip
        failed = _compile(task, directory, head)
        answer = directory / ANSWER
        if not failed and not answer.is_file():
            failed = "\nits process left no object"
        if not failed and _digest() != _source_digest():  # that process has read them, and the key is of what they were
            failed = "\nthe kernels' sources have changed since this process first read them: start a new one"
        if failed:
            log = (directory / LOG).read_text(errors="replace").removeprefix(head) + failed
            raise DslError(f"{spec.slug} with {chosen.ident.partition(' (')[0]}", log, directory / LOG)
        arguments = json.loads(answer.read_text())["arguments"]
        built.append(time.perf_counter() - start)
        return Built(OBJECT, {"arguments": arguments, "prefix": PREFIX, "target": target_of(spec)})

    return build


def _compile(task: Mapping[str, object], directory: Path, head: str) -> str:
    """Run the process; why it died, "" if it did not. Its output becomes the log, after `head`."""
    log = directory / LOG
    with log.open("wb") as output:
        output.write(head.encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(_SOURCES.parent)],
            stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=directory,
            env=_environment(str(task["target"])),
        )  # fmt: skip
        try:
            process.communicate(json.dumps(task).encode(), timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            return f"\nit took more than {_PATIENCE:.0f} s"
        finally:
            process.kill()
            process.wait()
    if process.returncode == -9:
        return "\nits process was killed: out of memory?"
    return "" if process.returncode == 0 else f"\nits process ended with exit code {process.returncode}"


def _environment(target: str) -> dict[str, str]:
    """This process's, without GPUs and without what would make the DSL compile something else.

    The target stands there too: the DSL's operations each ask what to compile for, and where nothing says it, they ask
    the driver, which with no GPU to see begins anew each time. That took half of a compilation.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    return {**environment, "CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": target, "PYTHONSAFEPATH": "1", "NO_COLOR": "1"}


def _last_lines(log_text: str) -> str:
    """What a log ends with: a few lines from the last one on that names an error; never none of a failure."""
    lines = [line.rstrip() for line in _COLOURS.sub("", log_text).splitlines() if line.strip()]
    first = next((at for at in reversed(range(len(lines))) if _ERROR.search(lines[at])), len(lines) - _SHOWN)
    return "\n  ".join(lines[max(first, 0) :][:_SHOWN])
