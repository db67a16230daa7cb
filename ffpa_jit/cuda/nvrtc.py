"""NVRTC, through ctypes and in this process: `kernel.cubin`. It runs no program and needs no PATH."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path

from ffpa_jit.cache import Built
from ffpa_jit.cuda import recipe
from ffpa_jit.cuda.instantiate import MAIN, KernelSpec
from ffpa_jit.toolchain import Nvrtc

__all__ = ["NvrtcCompiler"]


class NvrtcCompiler:
    """NVRTC through ctypes, in this process."""

    def __init__(self, tools: Nvrtc) -> None:
        self._tools = tools
        self.id = tools.compiler_id

    def compile(self, spec: KernelSpec, directory: Path) -> Built:
        nvrtc, flags, texts = _nvrtc(self._tools), recipe.nvrtc_flags(spec), dict(recipe.texts())
        main = texts.pop(MAIN)
        program, size = ctypes.c_void_p(), ctypes.c_size_t()

        def check(code: int, log: str = "NVRTC: ") -> None:
            if code:
                log += nvrtc.nvrtcGetErrorString(code).decode()
                raise recipe.failed(spec, self.id, log, directory)

        check(nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), main, MAIN.encode(),
            len(texts), _strings(texts.values()), _strings(name.encode() for name in texts),
        ))  # fmt: skip
        try:
            code = nvrtc.nvrtcCompileProgram(program, len(flags), _strings(flag.encode() for flag in flags))
            check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetProgramLog(program, log))
            text = log.value.decode(errors="replace")
            check(code, f"{text}\n" if text.strip() else "")
            check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            cubin = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetCUBIN(program, cubin))
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        (directory / "kernel.cubin").write_bytes(cubin.raw)
        (directory / "build.log").write_text(f"{self.id}: {spec.slug}\n{' '.join(flags)}\n{text}")
        return Built("kernel.cubin", {"flags": flags})


def _strings(values: Iterable[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    values = list(values)
    return (ctypes.c_char_p * len(values))(*values)


@functools.lru_cache(maxsize=4)
def _nvrtc(tools: Nvrtc) -> ctypes.CDLL:
    """libnvrtc with its prototypes; what it opens by name when it compiles is opened first, by path."""
    ctypes.CDLL(str(tools.builtins))
    nvrtc = ctypes.CDLL(str(tools.library))
    pointer, strings = ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)
    nvrtc.nvrtcCreateProgram.argtypes = [pointer, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, strings, strings]
    nvrtc.nvrtcCompileProgram.argtypes = [pointer, ctypes.c_int, strings]
    for name in ("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"):
        getattr(nvrtc, name).argtypes = [pointer, pointer]
    nvrtc.nvrtcDestroyProgram.argtypes = [pointer]
    nvrtc.nvrtcGetErrorString.argtypes, nvrtc.nvrtcGetErrorString.restype = [ctypes.c_int], ctypes.c_char_p
    return nvrtc
