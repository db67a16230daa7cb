"""nvcc and NVRTC on this machine: which can be used, what was looked for, and errors that say what to do.

What is found is remembered per process and setting; `forget` drops it.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ffpa_jit import locate, settings
from ffpa_jit.build_error import BuildError, first_error
from ffpa_jit.locate import Missing, Toolkit

__all__ = [
    "REMEDY", "BuildError", "Nvcc", "Nvrtc", "Probe", "ToolchainError", "find_nvcc", "find_nvrtc", "first_error",
    "forget", "probes",
]  # fmt: skip

REMEDY = "pip install nvidia-cuda-nvrtc (for CUDA 12: nvidia-cuda-nvrtc-cu12)"
"""What most often is to be done where there is no compiler."""

_DEFAULT_HOME = Path("/usr/local/cuda")
_NEEDED = {"nvcc": "a CUDA toolkit, a host compiler and ninja", "nvrtc": "its own libraries only"}


@dataclass(frozen=True)
class Probe:
    """One thing looked for: what was found or why not, and what to do about it ("" where nothing is to be done)."""

    name: str
    found: bool
    detail: str
    remedy: str

    def __str__(self) -> str:
        remedy = f" ({self.remedy})" if self.remedy and not self.found else ""
        return f"{'found  ' if self.found else 'missing'} {self.name}: {self.detail}{remedy}"


@dataclass(frozen=True)
class Nvcc:
    """A toolkit, host compiler and ninja that together can build a shared library."""

    path: Path  # the nvcc itself, never a wrapper around it
    home: Path  # what CUDA_HOME should say
    version: str  # "13.0.88"
    build: str  # "cuda_13.0.r13.0/compiler.36424714_0"
    libraries: Path  # the directory of libcudart_static.a
    host_compiler: Path  # for -ccbin
    ninja: Path  # the executable; torch looks for it on PATH only

    @property
    def compiler_id(self) -> str:
        return f"nvcc {self.version} ({self.build})"


@dataclass(frozen=True)
class Nvrtc:
    """The runtime compiler. It looks for `builtins` by name only, so that must be loaded first."""

    library: Path
    builtins: Path
    version: str  # "13.0.88"

    @property
    def compiler_id(self) -> str:
        return f"nvrtc {self.version}"

    def __str__(self) -> str:
        return f"{self.compiler_id} in {self.library.parent}"


class ToolchainError(RuntimeError):
    """No compiler can be used. Lists all that was looked for, and the remedies.

    `wanted`: the one that was asked for, None for any. `found`: the probes (default: those of now).
    """

    def __init__(self, wanted: str | None = None, found: Sequence[Probe] | None = None) -> None:
        self.wanted, self.probes = wanted, tuple(probes() if found is None else found)
        super().__init__(wanted, self.probes)

    def __str__(self) -> str:
        lines = [f"no CUDA compiler can be used: {REMEDY}. nvcc would do too, with {_NEEDED['nvcc']}. Looked for:"]
        shown = self.probes
        if self.wanted:
            lines = [f"FFPA_JIT_COMPILER={self.wanted} allows no other compiler, and {self.wanted} cannot be used: "
                     f"it needs {_NEEDED[self.wanted]}. Looked for:"]  # fmt: skip
            shown = tuple(each for each in shown if each.name.startswith("NVRTC") == (self.wanted == "nvrtc"))
        lines += [f"  {each}" for each in shown]
        if self.wanted == "nvrtc":
            lines.append(f"{REMEDY}, or unset FFPA_JIT_COMPILER")
        elif self.wanted:
            lines.append(f"Install what is missing, or unset FFPA_JIT_COMPILER: then NVRTC will do, {REMEDY}")
        return "\n".join(lines)


def find_nvcc() -> Nvcc | None:
    """The first toolkit of CUDA_HOME, PATH, /usr/local/cuda and the wheels, with a host compiler and ninja; or None."""
    return _find_nvcc(_surroundings())


def find_nvrtc() -> Nvrtc | None:
    """NVRTC from the wheels, else from a toolkit, else from where the loader looks; or None."""
    return _find_nvrtc(_surroundings())


def probes() -> list[Probe]:
    """All places that are looked in, in that order, also behind the first that has what is wanted."""
    found = []
    for name, remedy, look in (*_toolkits(), *_host_tools(), *_nvrtcs()):
        try:
            found.append(Probe(name, True, str(look()), ""))
        except Missing as missing:
            found.append(Probe(name, False, str(missing), remedy))
    return found


def forget() -> None:
    """Look again at the next use: for a toolchain that was installed while the process runs, and for tests."""
    for each in (_find_nvcc, _find_nvrtc, locate.version):
        each.cache_clear()


def _surroundings() -> tuple[object, ...]:
    """All that decides what is found, but for the files themselves."""
    named = settings.cuda_home(), settings.host_compiler()
    return *named, settings.executables_path(), settings.libraries_path(), locate.torch_cuda_major()


@functools.lru_cache(maxsize=8)
def _find_nvcc(surroundings: tuple[object, ...]) -> Nvcc | None:
    with contextlib.suppress(Missing):
        return Nvcc(*_first(_toolkits()), locate.host_compiler(), locate.ninja())
    return None


@functools.lru_cache(maxsize=8)
def _find_nvrtc(surroundings: tuple[object, ...]) -> Nvrtc | None:
    with contextlib.suppress(Missing):
        return _first(_nvrtcs())
    return None


T = TypeVar("T")
_Place = tuple[str, str, Callable[[], T]]  # name, remedy, and what returns the thing that is there or raises Missing


def _first(places: Iterator[_Place[T]]) -> T:
    for _, _, look in places:
        with contextlib.suppress(Missing):
            return look()
    raise Missing


def _toolkits() -> Iterator[_Place[Toolkit]]:
    home, on_path = settings.cuda_home(), shutil.which("nvcc", path=settings.executables_path())
    wheel = next((nvcc for each in locate.wheels() if (nvcc := each / "bin" / "nvcc").exists()), None)

    def judge(nvcc: Path | str | None, none: str = "") -> Callable[[], Toolkit]:
        def look() -> Toolkit:
            if nvcc is None:
                raise Missing(none)
            return locate.toolkit(Path(nvcc))

        return look

    remedy = "set it to the directory of a CUDA toolkit, or unset it" if home else ""
    yield "CUDA_HOME", remedy, judge(home / "bin" / "nvcc" if home else None, "not set")
    yield "nvcc on PATH", "add a toolkit's bin to PATH", judge(on_path, "there is none")
    yield str(_DEFAULT_HOME), "install a CUDA toolkit", judge(_DEFAULT_HOME / "bin" / "nvcc")
    yield "nvcc from PyPI", "pip install 'ffpa-jit[nvcc]'", judge(wheel, "no package that is installed has one")


def _host_tools() -> Iterator[_Place[Path]]:
    yield "host compiler", "install g++, or set CXX to a C++ compiler", locate.host_compiler
    yield "ninja", "pip install ninja", locate.ninja


def _nvrtcs() -> Iterator[_Place[Nvrtc]]:
    homes = [each for each in (settings.cuda_home(), _DEFAULT_HOME) if each is not None]
    toolkits = [place for each in homes for place in locate.within(each, "lib64", "lib")]
    wheels = [each / "lib" for each in locate.wheels()]
    loader = [*settings.libraries_path(), *locate.SYSTEM_LIBRARIES]
    yield "NVRTC from PyPI", REMEDY, lambda: Nvrtc(*locate.nvrtc(wheels))
    yield "NVRTC of a toolkit", "set CUDA_HOME to one with libnvrtc.so", lambda: Nvrtc(*locate.nvrtc(toolkits))
    yield "NVRTC elsewhere", "add its directory to LD_LIBRARY_PATH", lambda: Nvrtc(*locate.nvrtc(loader))
