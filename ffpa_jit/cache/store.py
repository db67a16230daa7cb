"""`KernelStore`: from the spec of a kernel to one that launches, by way of memory, the cache and a compiler.

One for each backend, which derives it and says there what is its own: its compilers, the digest of its sources, which
artefacts of other compilers may be used, how one is opened. The first call for a spec finds its artefact in the cache,
or has it compiled under the cache's lock for every later process; one thread at a time does that for a spec. A build
that failed is not tried again in this process. A hit runs no program.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ffpa_jit.build_error import BuildError
from ffpa_jit.cache import Built, Entry, Key, default_cache
from ffpa_jit.context import refuse_capture
from ffpa_jit.kernel_spec import Spec

__all__ = ["Compiler", "KernelStore"]

_logger = logging.getLogger("ffpa_jit")

AnySpec = TypeVar("AnySpec", bound=Spec)
Kernel = TypeVar("Kernel")


class Compiler(Protocol):
    """One way to compile kernels here."""

    @property
    def id(self) -> str:
        """The compiler and its build, as cache keys have it."""
        ...

    def compile(self, spec: Any, directory: Path) -> Built:
        """Compile `spec` in `directory`, which is empty and this call's own. BuildError, its log in `directory`."""
        ...


class KernelStore(Generic[AnySpec, Kernel]):
    """A backend's kernels in this process. `spec_type`: their spec; `group`: their directory in the cache; `title`:
    what messages call one.

    `kind` names one of several compilers that a backend may have; None: the best one that is here.
    """

    spec_type: type[AnySpec]
    group: str
    title: str

    def __init__(self) -> None:
        self._loaded: dict[AnySpec, Kernel] = {}
        self._failed: dict[tuple[AnySpec, str], BuildError] = {}
        self._locks: dict[AnySpec, threading.Lock] = {}

    def compiler(self, spec: AnySpec, kind: str | None = None) -> Compiler | None:
        """What would compile `spec` here; None where nothing can."""
        raise NotImplementedError

    def absent(self, spec: AnySpec, kind: str | None) -> str:
        """Why there is no `compiler` and no artefact, in a line."""
        raise NotImplementedError

    def missing(self, kind: str | None) -> RuntimeError:
        """The error for want of a `compiler`, with all that there is to say."""
        raise NotImplementedError

    def digest(self, spec: AnySpec) -> str:
        """sha256 over what is compiled and how, the compiler aside."""
        raise NotImplementedError

    def serves(self, entry: Entry, kind: str | None) -> bool:
        """Whether an artefact of the same sources by another compiler may be used here."""
        raise NotImplementedError

    def open(self, spec: AnySpec, entry: Entry) -> Kernel:
        """The kernel in an artefact, ready to launch on the current device."""
        raise NotImplementedError

    def fallback(self, entry: Entry, error: Exception) -> str | None:
        """The kind of compiler whose artefact may open where this one gave `error`."""
        return None

    def install(self, entry: Entry) -> str:
        """Put an artefact where its runtime looks for it, if that is not the cache; what could not be, "" for none."""
        return ""

    def kernel(self, spec: AnySpec) -> Kernel:
        """The kernel of `spec`, loaded on the current device; the first call finds it in the cache or compiles it.

        `missing` where there is neither an artefact nor a compiler, BuildError where that fails, what `open` raises,
        RuntimeError for a first call during the capture of a CUDA graph.
        """
        found = self._loaded.get(spec)
        return found if found is not None else self._first(spec)

    def _first(self, spec: AnySpec) -> Kernel:
        refuse_capture(f"the first use of the {self.title} {spec.slug}")
        with self._locks.setdefault(spec, threading.Lock()):
            if spec not in self._loaded:
                entry, _, _ = self.warm(spec)
                try:
                    self._loaded[spec] = self.open(spec, entry)
                except (OSError, RuntimeError) as error:
                    other = self.fallback(entry, error)
                    if other is None or self.available(spec, other) is not None:
                        raise
                    _logger.warning("%s cannot be loaded (%s); using %s instead", entry.artefact, error, other)
                    self._loaded[spec] = self.open(spec, self.warm(spec, other)[0])
            return self._loaded[spec]

    def warm(self, spec: AnySpec, kind: str | None = None) -> tuple[Entry, str, float]:
        """The artefact of `spec`, found ("hit") or made ("built"), and the seconds that took. It is not loaded, so any
        architecture will do on any machine. Raises as `kernel` does."""
        start = time.perf_counter()
        entry = self.find(spec, kind)
        if entry is not None:
            return entry, "hit", time.perf_counter() - start
        compiler = self.compiler(spec, kind)
        if compiler is None:
            raise self.missing(kind)
        failed = self._failed.get((spec, compiler.id))
        if failed is not None:
            raise failed.again()
        seconds: list[float] = []  # that building took, if it was this process that did it

        def build(directory: Path) -> Built:
            _logger.info("first use of the %s %s: compiling it with %s", self.title, spec.slug, compiler.id)
            began = time.perf_counter()
            built = compiler.compile(spec, directory)
            seconds.append(time.perf_counter() - began)
            return built

        try:
            entry = default_cache().get(self.key_of(spec, compiler.id), build, f"the {self.title} {spec.slug}")
        except BuildError as error:
            self._failed[spec, compiler.id] = error.again()
            raise
        if seconds and seconds[0] > 2:
            _logger.info("compiled the %s %s in %.1f s into %s", self.title, spec.slug, seconds[0], entry.path)
        return entry, "built" if seconds else "hit", time.perf_counter() - start

    def available(self, spec: AnySpec, kind: str | None = None) -> str | None:
        """None if `spec` can be had here, from memory, the cache or a compiler; else the reason. Compiles nothing."""
        if kind is None and spec in self._loaded:
            return None
        compiler = self.compiler(spec, kind)
        failed = None if compiler is None else self._failed.get((spec, compiler.id))
        if compiler is not None and failed is None:
            return None
        if self.find(spec, kind) is not None:  # another process may have made it since
            return None
        if failed is None:
            return self.absent(spec, kind)
        return f"compiling {spec.slug} failed: {failed.reason.splitlines()[0]}"

    def find(self, spec: AnySpec, kind: str | None = None) -> Entry | None:
        """The artefact that serves `spec` here, if there is one: this machine's compiler's, else one that `serves`."""
        cache, compiler = default_cache(), self.compiler(spec, kind)
        key = self.key_of(spec, compiler.id if compiler else "none")
        entry = cache.find(key) if compiler else None
        return entry or next((each for each in cache.alternatives(key) if self.serves(each, kind)), None)

    def key_of(self, spec: AnySpec, compiler_id: str) -> Key:
        """The cache key of `spec` as that compiler makes it."""
        return Key(self.group, spec.slug, dataclasses.asdict(spec), self.digest(spec), compiler_id)

    def install_all(self, entries: Iterable[Entry]) -> dict[str, str]:
        """`install` this store's own of `entries`; the names of those that could not be, with the reason."""
        left = {}
        for entry in entries:
            if entry.key.group == self.group:
                try:
                    note = self.install(entry)
                except Exception as error:  # whatever a runtime or a file system comes up with: it compiles then
                    note = f"{type(error).__name__}: {error}"
                if note:
                    left[entry.path.name] = note
        return left

    def forget(self) -> None:
        """Drop what this process has loaded and which builds failed, so that the next use starts from the cache."""
        self._loaded.clear()
        self._failed.clear()
