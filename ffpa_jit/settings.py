"""Every environment variable the package reads, and the only module that reads one.

| variable | default | read | meaning |
|---|---|---|---|
| `FFPA_JIT_WORKSPACE_MB` | 512 | at every call | most device memory, in MiB, that one call may use beside its outputs |
| `FFPA_JIT_STRICT` | 0 | when a call falls back | 1: a fallback to SDPA raises `NotImplementedError` |
| `TRITON_INTERPRET` | 0 | at every call on CPU tensors | Triton's own: 1 runs its kernels on the CPU, slowly |

Nothing is cached here: a variable set inside the process counts from the next read on.
"""

from __future__ import annotations

import os

__all__ = ["interpreter", "strict", "workspace_bytes", "workspace_text"]

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


def workspace_text() -> str | None:
    """`FFPA_JIT_WORKSPACE_MB` as it stands, for keys of remembered decisions; None when unset."""
    return os.environ.get("FFPA_JIT_WORKSPACE_MB")


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


# A constant under torch.compile: what torch.compiler.assume_constant_result sets, without importing the compiler.
for _read in (workspace_bytes, strict, interpreter):
    _read._dynamo_marked_constant = True  # type: ignore[attr-defined]
