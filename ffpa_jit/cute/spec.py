"""What one compiled kernel is: `KernelSpec`. Plain data: nothing here imports torch or the DSL."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ffpa_jit.kernel_spec import Spec, check

__all__ = ["ARCHS", "HEAD_DIMS", "KernelSpec", "served_by", "spec_for", "target_of"]

ARCHS = {"sm_90": "sm_90a"}
"""Architecture, as devices and caches name it -> what the DSL compiles for: `wgmma` and TMA are of the "a" variant."""

HEAD_DIMS = (320, 384, 448, 512, 576, 640)
"""The instantiated head dims; each serves those down to the one before it, and 320 those from 264 on."""


@dataclass(frozen=True, slots=True)
class KernelSpec(Spec):
    """One instantiation, "sm_90-d512-bf16-causal" for example. `head_dim`: one of HEAD_DIMS."""

    is_causal: bool

    @property
    def variant(self) -> str:
        return "causal" if self.is_causal else "full"


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
    arch = {target: name for name, target in ARCHS.items()}.get(arch, arch)
    dtype = check("CuTe DSL kernel", arch, head_dim, dtype, archs=ARCHS, largest=HEAD_DIMS[-1])
    return KernelSpec(arch, -(-head_dim // 64) * 64, dtype, bool(is_causal))
