"""The store of the CUDA kernels (see `cache.store`), whose compilers are nvcc and, where it is not complete, NVRTC.

Which artefact of a spec serves here:

1. the one of the compiler that this machine would use (the exact key);
2. one of another compiler, from the same sources and flags, if that compiler is not here in another version: a library
   that was built elsewhere where there is no nvcc, a cubin where there is no or the same NVRTC;
3. with FFPA_JIT_COMPILER set, those of that compiler only;
4. else one is built.

One that cannot be opened (a cache mounted noexec, an older glibc or driver than where it was built) is replaced by the
other compiler's.
"""

from __future__ import annotations

from ffpa_jit import settings, toolchain
from ffpa_jit.cache import Entry
from ffpa_jit.cache.store import Compiler, KernelStore
from ffpa_jit.cuda.instantiate import KernelSpec, tile_of
from ffpa_jit.cuda.load import CudaError, Kernel, load
from ffpa_jit.cuda.nvcc import NvccCompiler, loader_missing
from ffpa_jit.cuda.nvrtc import NvrtcCompiler
from ffpa_jit.cuda.recipe import source_digest
from ffpa_jit.toolchain import Probe, ToolchainError

__all__ = ["STORE", "available", "compiler_here", "find", "forget", "kernel", "key_of", "warm"]


def compiler_here(kind: str) -> Compiler | None:
    """The compiler of this kind, "nvcc" or "nvrtc", that this machine has, or None."""
    if kind == "nvrtc":
        nvrtc = toolchain.find_nvrtc()
        return None if nvrtc is None else NvrtcCompiler(nvrtc)
    nvcc = None if loader_missing() else toolchain.find_nvcc()
    return None if nvcc is None else NvccCompiler(nvcc)


class _Store(KernelStore[KernelSpec, Kernel]):
    spec_type, group, title = KernelSpec, "cuda", "CUDA kernel"

    def compiler(self, spec: KernelSpec | None = None, kind: str | None = None) -> Compiler | None:
        """That of `kind`, else of FFPA_JIT_COMPILER, if either is named."""
        wanted = kind or settings.compiler()
        kinds = ("nvcc", "nvrtc") if wanted is None else (wanted,)
        return next((found for each in kinds if (found := compiler_here(each)) is not None), None)

    def absent(self, spec: KernelSpec, kind: str | None) -> str:
        wanted = kind or settings.compiler() or "CUDA compiler (nvcc or NVRTC)"
        return (
            f"no {wanted} is found and no cache holds {spec.slug}: pip install nvidia-cuda-nvrtc, or import a cache "
            "(`ffpa-jit info` lists what was looked for)"
        )

    def missing(self, kind: str | None) -> ToolchainError:
        probes = list(toolchain.probes())
        reason = loader_missing()
        if reason is not None:
            probes.append(Probe("torch's extension loader", False, reason, "pip install setuptools, or use NVRTC"))
        return ToolchainError(kind or settings.compiler(), probes)

    def digest(self, spec: KernelSpec) -> str:
        return source_digest(spec)

    def serves(self, entry: Entry, kind: str | None) -> bool:
        """Rules 2 and 3 of this module's head."""
        made_by = entry.key.compiler.partition(" ")[0]
        if made_by not in ("nvcc", "nvrtc") or (kind or settings.compiler()) not in (None, made_by):
            return False
        here = compiler_here(made_by)
        return here is None or here.id == entry.key.compiler

    def open(self, spec: KernelSpec, entry: Entry) -> Kernel:
        tile = tile_of(spec)
        loaded = load(entry.artefact, threads=tile.threads, shared_bytes=tile.shared_bytes)
        loaded.prepare()
        return loaded

    def fallback(self, entry: Entry, error: Exception) -> str | None:
        usable = isinstance(error, OSError) or (isinstance(error, CudaError) and error.unreadable)
        if not usable or settings.compiler() is not None:
            return None
        return "nvrtc" if entry.key.compiler.startswith("nvcc") else "nvcc"


STORE = _Store()
kernel, available, warm, find = STORE.kernel, STORE.available, STORE.warm, STORE.find
key_of, forget = STORE.key_of, STORE.forget
