"""Which compiler this machine has for the kernels: nvcc where it is complete, else NVRTC."""

from __future__ import annotations

from ffpa_jit import settings, toolchain
from ffpa_jit.cuda.nvcc import NvccCompiler, loader_missing
from ffpa_jit.cuda.nvrtc import NvrtcCompiler
from ffpa_jit.cuda.recipe import Compiler, Kind, source_digest
from ffpa_jit.toolchain import Probe, ToolchainError

__all__ = ["Compiler", "Kind", "compiler_here", "find_compiler", "select_compiler", "source_digest"]


def compiler_here(kind: Kind) -> Compiler | None:
    """The compiler of this kind that this machine has, or None."""
    if kind == "nvrtc":
        nvrtc = toolchain.find_nvrtc()
        return None if nvrtc is None else NvrtcCompiler(nvrtc)
    nvcc = None if loader_missing() else toolchain.find_nvcc()
    return None if nvcc is None else NvccCompiler(nvcc)


def find_compiler(kind: Kind | None = None) -> Compiler | None:
    """nvcc, or NVRTC where nvcc is not complete, or None; only `kind` (default: FFPA_JIT_COMPILER) if one is named."""
    wanted = kind or settings.compiler()
    kinds: tuple[Kind, ...] = ("nvcc", "nvrtc") if wanted is None else (wanted,)
    return next((found for each in kinds if (found := compiler_here(each)) is not None), None)


def select_compiler(kind: Kind | None = None) -> Compiler:
    """The same, but ToolchainError with all that was looked for if there is none."""
    found = find_compiler(kind)
    if found is not None:
        return found
    probes = list(toolchain.probes())
    reason = loader_missing()
    if reason is not None:
        probes.append(Probe("torch's extension loader", False, reason, "pip install setuptools, or use NVRTC"))
    raise ToolchainError(kind or settings.compiler(), probes)
