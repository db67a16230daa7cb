"""Load a compiled kernel and call it, through the DSL's own C runtime and nothing else of the DSL.

`CuteDSLRuntime.h` in the wheels describes the three calls that this takes: link an object into this process, find its
function there, call that with pointers to its arguments. Importing the DSL for the same takes a second.

Finding the function loads its kernels for all GPUs of the process, so it is refused during the capture of a CUDA graph;
and so is a first launch on a device, with which the driver puts the code there. Launching may happen from several
threads at a time.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

from ffpa_jit import context
from ffpa_jit.context import refuse_capture
from ffpa_jit.cuda.driver import CudaError

__all__ = ["Kernel", "load"]


class Kernel:
    """One instantiation, loaded: called with its arguments, Python ints and floats, the last one a raw stream."""

    def __init__(self, name: str, runtime: ctypes.CDLL, function: int, arguments: str) -> None:
        self._name = name
        self._runtime = runtime
        self._function = function
        self._frames = _Frames(arguments)
        self._launched: set[int] = set()  # devices

    def __call__(self, *arguments: float) -> None:
        """Enqueue the kernel on the stream, one of the current device. CudaError; struct.error for wrong arguments."""
        device = context.current_device()
        first = device not in self._launched
        if first:
            refuse_capture(f"the first launch of the CuTe DSL kernel {self._name} on a device")
        frame = self._frames.frame
        frame.pack_into(frame.buffer, 0, *arguments, 0)
        if self._runtime.CuteDSLRT_Function_Run(self._function, frame.pointers, frame.count):
            raise self._failed(frame.result)
        if first:
            self._launched.add(device)

    def _failed(self, code: int) -> CudaError:
        name = self._runtime.cuda_dialect_get_error_name(code) if code else None
        return CudaError(code, "CUDA runtime error", name.decode() if name else "unknown", f"launching {self._name}")


class _Frames(threading.local):
    """A thread's frame for the arguments of a kernel, whose types are `arguments`: codes of `struct`."""

    def __init__(self, arguments: str) -> None:
        self.frame = _Frame(arguments)


class _Frame:
    """Memory for the arguments of a call and for its result, a cudaError_t, with a pointer to each."""

    def __init__(self, arguments: str) -> None:
        codes = arguments + "i"
        ends = [struct.calcsize(codes[: index + 1]) for index in range(len(codes))]
        starts = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        self.pack_into = struct.Struct(codes).pack_into
        self.buffer = ctypes.create_string_buffer(ends[-1])
        self.count = len(codes)
        address = ctypes.addressof(self.buffer)
        self.pointers = (c_void_p * len(codes))(*(address + start for start in starts))
        self._result = c_int.from_buffer(self.buffer, starts[-1])

    @property
    def result(self) -> int:
        return self._result.value


def load(artefact: Path, arguments: str, prefix: str, runtime_path: Path) -> Kernel:
    """The kernel in `artefact`, an object that is trusted: its code runs here. OSError if this machine cannot use it.

    `arguments`: the types of its arguments; `prefix`: the name that it was exported by.
    """
    name = artefact.parent.name
    refuse_capture(f"loading the CuTe DSL kernel {name}")
    runtime = _runtime(runtime_path)
    data = artefact.read_bytes()
    libraries = (c_char_p * 1)(str(runtime_path).encode())
    module, function = c_void_p(), c_void_p()
    code = runtime.CuteDSLRT_Module_Create_From_Bytes(byref(module), data, len(data), libraries, 1)
    if not code:
        code = runtime.CuteDSLRT_Module_Get_Function(byref(function), module, prefix.encode())
    if code or not function.value:
        said = runtime.CuteDSLRT_GetErrorString(code).decode() if code else "there is no such function"
        raise OSError(f"the runtime of the CuTe DSL cannot load {name}: {said} ({code})")
    return Kernel(name, runtime, function.value, arguments)  # never unloaded: a launch may still be under way


@functools.lru_cache(maxsize=4)
def _runtime(path: Path) -> ctypes.CDLL:
    """The library with its prototypes; OSError if it cannot be opened, or is none."""
    runtime = ctypes.CDLL(str(path))
    try:
        runtime.CuteDSLRT_Module_Create_From_Bytes.argtypes = [
            POINTER(c_void_p), c_char_p, c_size_t, POINTER(c_char_p), c_size_t,
        ]  # fmt: skip
        runtime.CuteDSLRT_Module_Get_Function.argtypes = [POINTER(c_void_p), c_void_p, c_char_p]
        runtime.CuteDSLRT_Function_Run.argtypes = [c_void_p, c_void_p, c_size_t]
        for call in ("Module_Create_From_Bytes", "Module_Get_Function", "Function_Run"):
            getattr(runtime, f"CuteDSLRT_{call}").restype = c_int
        for call in ("CuteDSLRT_GetErrorString", "cuda_dialect_get_error_name"):
            getattr(runtime, call).argtypes, getattr(runtime, call).restype = [c_int], c_char_p
    except AttributeError as error:
        raise OSError(f"{path} is not the runtime of the CuTe DSL that is needed: {error}") from None
    return runtime
