"""What one compiled kernel is: `KernelSpec`. Plain data: nothing here imports torch or the DSL."""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = ["ARCHS", "HEAD_DIMS", "KernelSpec", "served_by", "spec_for", "target_of"]

ARCHS = {"sm_90": "sm_90a"}
"""Architecture, as devices and caches name it -> what the DSL compiles for: `wgmma` and TMA are of the "a" variant."""

HEAD_DIMS = (320, 384, 448, 512, 576, 640)
"""The instantiated head dims; each serves those down to the one before it, and 320 those from 264 on."""

_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One instantiation. `head_dim`: one of HEAD_DIMS; `dtype`: "float16" or "bfloat16"."""

    arch: str
    head_dim: int
    dtype: str
    is_causal: bool

    @property
    def slug(self) -> str:
        """Readable name, for example "sm_90-d512-bf16-causal"."""
        return f"{self.arch}-d{self.head_dim}-{_DTYPES[self.dtype]}-{'causal' if self.is_causal else 'full'}"


def target_of(spec: KernelSpec) -> str:
    """What the compiler calls the architecture of `spec`."""
    return ARCHS[spec.arch]


def served_by(head_dim: int) -> int | None:
    """The instantiation that serves a head dim; by comparisons, which make a number of a symbolic one."""
    if head_dim > 256:
        for instantiated in HEAD_DIMS:
            if head_dim <= instantiated:
                return instantiated
    return None


@functools.lru_cache(maxsize=256)
def spec_for(arch: str, head_dim: int, dtype: str, is_causal: bool) -> KernelSpec:
    """The instantiation that serves a head dim; ValueError where there is none.

    `arch`: "sm_90" or "sm_90a", which is the same. `dtype`: "float16" or "bfloat16" ("fp16", "bf16").
    """
    dtype = {short: name for name, short in _DTYPES.items()}.get(dtype, dtype)
    arch = {target: name for name, target in ARCHS.items()}.get(arch, arch)
    if arch not in ARCHS:
        raise ValueError(f"arch={arch!r} has no CuTe-DSL kernel; choose one of {', '.join(ARCHS)}")
    instantiated = None if head_dim % 8 else served_by(head_dim)
    if instantiated is None:
        raise ValueError(
            f"head_dim={head_dim} has no CuTe-DSL kernel; they serve multiples of 8 from 264 to {HEAD_DIMS[-1]}"
        )
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} has no CuTe-DSL kernel; choose 'float16' or 'bfloat16'")
    return KernelSpec(arch, instantiated, dtype, bool(is_causal))
