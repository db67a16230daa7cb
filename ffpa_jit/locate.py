"""Where the parts of a CUDA toolchain may lie on this machine, and whether what lies there can be used.

Each function returns what it found, or raises `Missing` with the reason. Nothing is remembered here but versions, which
take a run of nvcc or a read of NVRTC's 100 MB: the kernel cache keeps them under path, size and time of modification.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import mmap
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ffpa_jit import settings
from ffpa_jit.cache import default_cache

__all__ = [
    "Missing", "Toolkit", "host_compiler", "ninja", "nvrtc", "toolkit", "torch_cuda_major", "version", "wheels",
    "within",
]  # fmt: skip

SYSTEM_INCLUDES = (Path("/usr/include"),)  # where Debian's toolkit keeps what others have in their home
SYSTEM_LIBRARIES = tuple(
    Path(each) for each in (f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}", "/usr/lib64", f"{sys.prefix}/lib")
)


class Missing(Exception):  # noqa: N818  (an outcome, not an error)
    """Something is not there, or cannot be used; the text says which."""


def within(home: Path, *names: str) -> tuple[Path, ...]:
    """The directories of these names in a toolkit: at its top, or below the target that it compiles for."""
    targets = (f"{platform.machine()}-linux", "sbsa-linux")
    return tuple(place / name for name in names for place in (home, *(home / "targets" / each for each in targets)))


def wheels() -> list[Path]:
    """The directories of NVIDIA's packages from PyPI: `nvidia/cu13` and, before CUDA 13, one a library.

    First the ones of the CUDA release that torch was built for, since torch brings those, then the newest.
    """
    try:
        package = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    parents = (package.submodule_search_locations or ()) if package else ()
    found = [path for each in parents for path in sorted(Path(each).glob("cu*")) if path.is_dir()]

    def rank(path: Path) -> tuple[bool, int]:
        release = re.fullmatch(r"cu(\d+)", path.name)
        major = int(release[1]) if release else 12
        return major != torch_cuda_major(), -major

    return sorted(found, key=rank)


def torch_cuda_major() -> int | None:
    """13 if the torch that is loaded was built for CUDA 13.x; None if none is, or it was built for something else."""
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return int(str(cuda).partition(".")[0]) if cuda else None


class Toolkit(NamedTuple):
    """`path`: of nvcc itself. `libraries`: the directory of the static runtime."""

    path: Path
    home: Path
    version: str
    build: str
    libraries: Path

    def __str__(self) -> str:
        return f"nvcc {self.version} in {self.home}"


def toolkit(nvcc: Path) -> Toolkit:
    """That of an nvcc, or a link to it or a wrapper."""
    real = Path(os.path.realpath(nvcc))
    if not real.is_file():
        raise Missing(f"there is no {nvcc}")
    if not real.with_name("nvcc.profile").is_file():
        real = _behind(nvcc)
    home = real.parents[1]
    if not any((each / "cuda_runtime.h").is_file() for each in (*within(home, "include"), *SYSTEM_INCLUDES)):
        raise Missing(f"{home} has no cuda_runtime.h")
    libraries = [*within(home, "lib64", "lib"), *SYSTEM_LIBRARIES]
    static = next((each for each in libraries if (each / "libcudart_static.a").is_file()), None)
    if static is None:
        raise Missing(f"{home} has no libcudart_static.a")
    known = version(real, _ask_nvcc)
    if known is None:
        raise Missing(f"{real} does not run")
    return Toolkit(real, home, *known, static)


def _behind(wrapper: Path) -> Path:
    """The nvcc that a wrapper runs: nvcc.profile lies beside it. Not kept, as a wrapper may come to run another one."""
    here = re.search(r"^#\$ _HERE_=(.+)$", _run(wrapper, "--dryrun", "-E", "-x", "cu", os.devnull), re.MULTILINE)
    real = Path(os.path.realpath(Path(here[1].strip()) / "nvcc")) if here else None
    if real is None or not real.is_file():
        raise Missing(f"{wrapper} runs no nvcc")
    return real


def _ask_nvcc(nvcc: Path) -> tuple[str, str] | None:
    text = _run(nvcc, "--version")
    number, build = re.search(r"\bV(\d+(?:\.\d+)+)", text), re.search(r"^Build (\S+)", text, re.MULTILINE)
    return (number[1], build[1] if build else "unknown build") if number else None


def _run(program: Path, *arguments: str) -> str:
    """What a program says on either stream; "" if it cannot be run."""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


def host_compiler() -> Path:
    """The C++ compiler that NVCC_CCBIN or CXX names, else the first on PATH."""
    named, path = settings.host_compiler(), settings.executables_path()
    launchers = ("ccache", "sccache", "distcc")  # nvcc takes a compiler with nothing before it
    words = [word for word in shlex.split(named or "") if os.path.basename(word) not in launchers]
    if words and os.path.isdir(words[0]):
        words, path = ["g++"], words[0]
    for name in words[:1] or ("c++", "g++", "clang++"):
        found = shutil.which(name, path=path)
        if found is not None:
            return Path(found).absolute()
    raise Missing(f"NVCC_CCBIN or CXX says {named}, which is not found" if named else "no c++, g++ or clang++ on PATH")


def ninja() -> Path:
    """ninja on PATH, beside this Python (a virtual environment that was not activated), or in its package."""
    places = [settings.executables_path(), str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    package = importlib.util.find_spec("ninja")
    places += [f"{each}/data/bin" for each in (package.submodule_search_locations or () if package else ())]
    for each in places:
        found = shutil.which("ninja", path=each)
        if found is not None:
            return Path(found).absolute()
    raise Missing("neither on PATH nor beside this Python")


def nvrtc(directories: Iterable[Path]) -> tuple[Path, Path, str]:
    """(library, its builtins, version) of the first NVRTC in these directories that is whole."""
    why = "there is no libnvrtc.so"
    for directory in directories:
        for library in sorted(directory.glob("libnvrtc.so.*"), key=lambda path: len(path.name)):
            number, _ = version(Path(os.path.realpath(library)), _read_nvrtc) or ("", "")
            release = ".".join(number.split(".")[:2])
            builtins = sorted(directory.glob(f"libnvrtc-builtins.so.{release}*"))
            if builtins:
                return library, builtins[0], number or builtins[0].name.partition(".so.")[2]
            why = f"{library} has no libnvrtc-builtins.so.{release} beside it"
    raise Missing(why)


def _read_nvrtc(library: Path) -> tuple[str, str] | None:
    """The version that NVRTC has in its text, as nvcc has: its own function knows no patch level, and loads it all."""
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = text.find(b"Cuda compilation tools, release ")
        number = re.search(rb"\bV(\d+(?:\.\d+)+)", text[at : at + 100]) if at >= 0 else None
    return (number[1].decode(), "") if number else None


@functools.lru_cache(maxsize=32)
def version(file: Path, ask: Callable[[Path], tuple[str, str] | None]) -> tuple[str, str] | None:
    """(version, build) as `ask` finds out, unless the cache's notes have it for this very file."""
    try:
        status = os.stat(file)
        same = hashlib.sha256(f"{file} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
        known = default_cache().note(f"version-{same}")
        if isinstance(known, list) and len(known) == 2 and all(isinstance(each, str) for each in known):
            return known[0], known[1]
        asked = ask(file)
    except (OSError, ValueError):
        return None
    if asked is not None:
        default_cache().remember(f"version-{same}", asked)
    return asked
