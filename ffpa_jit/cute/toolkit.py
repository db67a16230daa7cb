"""The installed CuTe DSL, found without importing it: its versions, and which of its builds this machine uses.

The wheels bring the DSL once for each CUDA toolkit ("cu12", "cu13"). It loads the newest that the driver supports, or
the newest of all where there is no driver, and so does this module: the code that comes out depends on it.

The objects that it makes hold machine code for the CPU that compiled them too, by its own features; so `host_level`
tells how much a CPU can do, and an object runs where at least as much can be done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RUNTIME", "Toolkit", "find", "forget", "host_level", "runs_here"]

RUNTIME = "libcute_dsl_runtime.so"

_LEVELS = {  # the x86-64 psABI's, lowest first, by the names of /proc/cpuinfo
    "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


@dataclass(frozen=True)
class Toolkit:
    """`cuda_variant`: the build in use, "cu12" or "cu13". `version`: of the distribution. `compiler_id`: it and all
    that belongs to it, for cache keys. `runtime`: the library that loads objects."""

    cuda_variant: str
    version: str
    compiler_id: str
    runtime: Path


def find() -> Toolkit | str:
    """The DSL's build for this machine, or why there is none."""
    return _find()


def forget() -> None:
    """Look again the next time."""
    _find.cache_clear()
    host_level.cache_clear()


@functools.lru_cache(maxsize=1)
def _find() -> Toolkit | str:
    root = _root()
    if root is None:
        return "nvidia-cutlass-dsl is not installed: pip install 'ffpa-jit[cute]'"
    versions = _versions(root.parent)
    if "nvidia-cutlass-dsl" not in versions:
        return f"{root} belongs to no installed nvidia-cutlass-dsl: pip install 'ffpa-jit[cute]'"
    variants = {int(path.parents[1].name[2:]): path for path in root.glob(f"cu[0-9]*/lib/{RUNTIME}")}
    driver = _driver_major()
    usable = [major for major in variants if driver is None or major <= driver]
    if not usable:
        there = ", ".join(f"cu{major}" for major in sorted(variants)) or f"no {RUNTIME}"
        limit = "" if driver is None else f", and the driver supports up to CUDA {driver}"
        return f"nvidia-cutlass-dsl in {root} has {there}{limit}: pip install --force-reinstall 'ffpa-jit[cute]'"
    variant = f"cu{max(usable)}"
    version = versions.pop("nvidia-cutlass-dsl")
    parts = " ".join(_part(name, found, version) for name, found in versions.items())
    return Toolkit(variant, version, f"cutlass-dsl {version} ({parts}) {variant}", variants[max(usable)])


def _root() -> Path | None:
    """The directory of the package that the wheels share."""
    try:
        spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None


def _versions(site: Path) -> dict[str, str]:
    """Distribution -> version of all that are called nvidia-cutlass-dsl..., in order; by the names in `site` alone,
    because asking for each one's metadata reads as many files."""
    found = {}
    for name in sorted(os.listdir(site)):
        match = re.fullmatch(r"(nvidia_cutlass_dsl\w*)-([^-]+)\.dist-info", name)
        if match:
            found[match[1].replace("_", "-")] = match[2]
    return found


def _part(name: str, version: str, usual: str) -> str:
    short = name.removeprefix("nvidia-cutlass-dsl-").removeprefix("libs-")
    return short if version == usual else f"{short}={version}"


def _driver_major() -> int | None:
    """The newest CUDA that the driver supports; None where there is no driver. Initialises nothing."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    return None


@functools.lru_cache(maxsize=1)
def host_level() -> str:
    """What this CPU can run: "x86-64" and its levels -v2 to -v4; elsewhere the machine's name."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return machine
    level, features = "x86-64", set()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:  # the first's; reading all takes milliseconds
        features = set(next((line for line in file if line.startswith("flags")), "").split())
    for name, needed in _LEVELS.items():
        if not needed <= features:
            break
        level = name
    return level


def runs_here(level: str) -> bool:
    """Whether code for a CPU of `level` runs on this one."""
    ordered, here = ["x86-64", *_LEVELS], host_level()
    return level == here or (level in ordered and here in ordered and ordered.index(level) <= ordered.index(here))
