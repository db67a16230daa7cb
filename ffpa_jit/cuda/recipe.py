"""What the two compilers have in common: the sources, the flags, and the digest of both."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from ffpa_jit.build_error import BuildError
from ffpa_jit.cuda.instantiate import KernelSpec, defines, sources, tile_of

__all__ = ["LINK_FLAGS", "failed", "nvcc_flags", "nvrtc_flags", "source_digest", "texts"]

# Only the launcher is exported, so that no other copy of the CUDA runtime in the process can be mixed with this one.
LINK_FLAGS = ("-Wl,--as-needed", "-Wl,--exclude-libs,ALL", "-s", "-lcudart_static", "-lrt", "-lpthread", "-ldl")


def nvcc_flags(spec: KernelSpec) -> list[str]:
    """Machine code for the one architecture and no PTX: what runs is what was compiled, or nothing."""
    sm = spec.arch.removeprefix("sm_")
    return ["-O3", "-std=c++17", f"-gencode=arch=compute_{sm},code=sm_{sm}", *_macros(spec)]


def nvrtc_flags(spec: KernelSpec) -> list[str]:
    """The same for NVRTC, whose default is to optimise."""
    return ["--std=c++17", f"--gpu-architecture={spec.arch}", *_macros(spec)]


def _macros(spec: KernelSpec) -> list[str]:
    return [f"-D{name}={value}" for name, value in sorted(defines(spec).items())]


@functools.lru_cache(maxsize=1)
def texts() -> Mapping[str, bytes]:
    """Name -> bytes of every source file, read once: what is compiled is what the cache key was computed from."""
    return {path.name: path.read_bytes() for path in sources()}


@functools.lru_cache(maxsize=256)
def source_digest(spec: KernelSpec) -> str:
    """sha256 over the sources and the flags of both compilers: artefacts of either have it in their key, so that one
    can stand in for the other."""
    digest = hashlib.sha256()
    for name, text in sorted(texts().items()):
        digest.update(f"{name} {len(text)}\n".encode() + text)
    tile = tile_of(spec)
    how = [nvcc_flags(spec), LINK_FLAGS, nvrtc_flags(spec), tile.threads, tile.shared_bytes]
    digest.update(json.dumps(how).encode())
    return digest.hexdigest()


def failed(spec: KernelSpec, compiler_id: str, log: str, directory: Path) -> BuildError:
    """The error of a build whose output is `log`, which is kept as `build.log` in `directory`."""
    path = directory / "build.log"
    path.write_text(f"{compiler_id}: {spec.slug}\n{log}")
    return BuildError(f"{spec.slug} with {compiler_id}", log, path)
