"""Every environment variable the package reads, and the only module that reads one.

| variable | default | read | meaning |
|---|---|---|---|
| `FFPA_JIT_WORKSPACE_MB` | 512 | at every call | most device memory, in MiB, that one call may use beside its outputs |
| `FFPA_JIT_STRICT` | 0 | when a call falls back | 1: a fallback to SDPA raises `NotImplementedError` |
| `TRITON_INTERPRET` | 0 | at every call on CPU tensors | Triton's own: 1 runs its kernels on the CPU, slowly |
| `FFPA_JIT_CACHE_DIR` | the user's cache directory | when a kernel is looked up | where compiled kernels are kept |
| `FFPA_JIT_CACHE_PATH` | none | when a kernel is looked up | read-only caches, searched first; separated as in `PATH` |
| `FFPA_JIT_COMPILER` | the first found | when a kernel is looked up | `nvcc` or `nvrtc`: that compiler and no other |
| `FFPA_JIT_JOBS` | from cores and memory | by `warm` | how many kernels are compiled at a time |
| `CUDA_HOME`, `CUDA_PATH` | none | when a compiler is looked for | the CUDA toolkit; the first that is set counts |
| `NVCC_CCBIN`, `CXX` | none | when a compiler is looked for | nvcc's host compiler; the first that is set counts |
| `PATH`, `LD_LIBRARY_PATH` | none | when a compiler is looked for | where nvcc, host compiler, ninja; where NVRTC |

Nothing is cached here: a variable set inside the process counts from the next read on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "cache_dir",
    "cache_path",
    "compiler",
    "cuda_home",
    "executables_path",
    "host_compiler",
    "interpreter",
    "interpreter_text",
    "jobs",
    "libraries_path",
    "strict",
    "workspace_bytes",
    "workspace_text",
]

_DEFAULT_WORKSPACE_MB = 512
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def _flag(name: str) -> bool:
    """The boolean variable `name`; ValueError for a spelling that is neither true nor false."""
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name}={os.environ[name]!r} is not a flag; set it to 1 or 0, or unset it")


# The texts of what plan keys hold, as they stand. `os.environ` encodes and decodes at every look, 0.7 us of a call that
# may take 20; what it wraps is a plain dict.
_texts: Any = getattr(os.environ, "_data", None)


def _text(name: str) -> Callable[[], Any]:
    """A function that gives the variable as it stands, None when unset: equal texts are equal, no more."""
    encoded = os.fsencode(name)
    if isinstance(_texts, dict) and os.name == "posix":
        return functools.partial(_texts.get, encoded)
    return lambda: os.environ.get(name)


workspace_text = _text("FFPA_JIT_WORKSPACE_MB")
interpreter_text = _text("TRITON_INTERPRET")


def workspace_bytes() -> int:
    """`FFPA_JIT_WORKSPACE_MB` in bytes: the cap on the memory one call takes beside its outputs.

    A whole or decimal number of MiB above 0; anything else is a ValueError. Lower values cost speed, never correctness.
    """
    text = os.environ.get("FFPA_JIT_WORKSPACE_MB")
    if text is None or not text.strip():
        return _DEFAULT_WORKSPACE_MB << 20
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 < size < 1 << 30:
        raise ValueError(
            f"FFPA_JIT_WORKSPACE_MB={text!r} is not a size; set it to a number of MiB above 0 "
            f"(the default is {_DEFAULT_WORKSPACE_MB}), or unset it"
        )
    return max(1, int(size * (1 << 20)))


def strict() -> bool:
    """`FFPA_JIT_STRICT`: whether a fallback to SDPA is an error."""
    return _flag("FFPA_JIT_STRICT")


def interpreter() -> bool:
    """`TRITON_INTERPRET=1`: CPU tensors run the Triton kernels through Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _path(text: str, name: str) -> Path:
    """`text` as an absolute path, `~` expanded; ValueError where there is no home directory to expand it to."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{name}={text!r}: {error}") from None


def cache_dir() -> Path | None:
    """`FFPA_JIT_CACHE_DIR`: the directory of compiled kernels; None when unset (then the user's cache directory)."""
    text = os.environ.get("FFPA_JIT_CACHE_DIR", "").strip()
    return _path(text, "FFPA_JIT_CACHE_DIR") if text else None


def cache_path() -> tuple[Path, ...]:
    """`FFPA_JIT_CACHE_PATH`: read-only caches in the order in which they are searched."""
    texts = os.environ.get("FFPA_JIT_CACHE_PATH", "").split(os.pathsep)
    return tuple(_path(text.strip(), "FFPA_JIT_CACHE_PATH") for text in texts if text.strip())


def compiler() -> Literal["nvcc", "nvrtc"] | None:
    """`FFPA_JIT_COMPILER`: the only compiler to use, or None for the first that is found; ValueError for any other."""
    text = os.environ.get("FFPA_JIT_COMPILER", "").strip().lower()
    if text == "nvcc":
        return "nvcc"
    if text == "nvrtc":
        return "nvrtc"
    if text:
        raise ValueError(f"FFPA_JIT_COMPILER={text!r} is not a compiler; set it to nvcc or nvrtc, or unset it")
    return None


def jobs() -> int | None:
    """`FFPA_JIT_JOBS`: how many kernels are compiled at a time, at least 1; None when unset."""
    text = os.environ.get("FFPA_JIT_JOBS", "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"FFPA_JIT_JOBS={text!r} is not a number of jobs; set it to 1 or more, or unset it")
    return int(text)


def cuda_home() -> Path | None:
    """`CUDA_HOME`, else `CUDA_PATH`: the CUDA toolkit as the user names it (it may not exist); None when unset."""
    text = os.environ.get("CUDA_HOME", "").strip() or os.environ.get("CUDA_PATH", "").strip()
    return Path(text) if text else None


def host_compiler() -> str | None:
    """`NVCC_CCBIN`, else `CXX`: the host compiler as the user names it, a name or a path; None when unset."""
    return os.environ.get("NVCC_CCBIN", "").strip() or os.environ.get("CXX", "").strip() or None


def executables_path() -> str:
    """`PATH`."""
    return os.environ.get("PATH", "")


def libraries_path() -> tuple[Path, ...]:
    """The directories of `LD_LIBRARY_PATH`."""
    return tuple(Path(text) for text in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if text)


# A constant under torch.compile: what torch.compiler.assume_constant_result sets, without importing the compiler.
for _read in (workspace_bytes, strict, interpreter):
    _read._dynamo_marked_constant = True  # type: ignore[attr-defined]
