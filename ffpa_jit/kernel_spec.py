"""What every compiled kernel is called by, whatever its backend. Plain data: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["NoKernelError", "Spec", "check"]

_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}


class NoKernelError(ValueError):
    """A backend has no kernels for `what`: an architecture, or a head dim of one."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class Spec:
    """One instantiation. A backend derives it and adds fields: with these they are all that chooses a kernel."""

    arch: str
    head_dim: int
    dtype: str  # "float16", "bfloat16"

    @property
    def variant(self) -> str:
        """The other fields, readably."""
        raise NotImplementedError

    @property
    def slug(self) -> str:
        """Readable name, for example "sm_90-d512-bf16-f32-s2"."""
        return f"{self.arch}-d{self.head_dim}-{_DTYPES[self.dtype]}-{self.variant}"


def check(title: str, arch: str, head_dim: int, dtype: str, *, archs: Iterable[str], largest: int) -> str:
    """The dtype by its full name ("bf16" is "bfloat16") if a backend of these limits has kernels for all three.

    `title`: what the backend calls a kernel. NoKernelError for the architecture or the head dim, ValueError for the
    dtype, each with what is allowed.
    """
    if arch not in archs:
        raise NoKernelError(arch, f"arch={arch!r} has no {title}; choose one of {', '.join(archs)}")
    if not 256 < head_dim <= largest or head_dim % 8:
        reason = f"head_dim={head_dim} has no {title}; they serve multiples of 8 from 264 to {largest}"
        raise NoKernelError(f"{arch}-d{head_dim}", reason)
    dtype = {short: name for name, short in _DTYPES.items()}.get(dtype, dtype)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} has no {title}; choose 'bf16' or 'fp16' (bfloat16, float16)")
    return dtype
