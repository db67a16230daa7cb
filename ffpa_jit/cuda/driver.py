"""The calls of the CUDA driver that a cubin needs, through ctypes, and the error they are reported with.

Torch's tensors live in a device's primary context. It is current in every thread that torch has used the device in, and
is made current here in one that it has not.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p

import torch

__all__ = ["CudaError", "Driver", "driver"]

_NUM_REGS, _MAX_DYNAMIC_SHARED_BYTES = 4, 8  # CUfunction_attribute
# Codes of CUresult and cudaError_t, whose numbers agree where both have one: insufficient driver, entry point not
# found in the driver, invalid image, no binary for this GPU, unsupported PTX version.
_UNREADABLE = frozenset({35, 36, 200, 209, 222})
_REMEDIES = {
    35: "the driver is older than the CUDA toolkit that built this kernel: update the driver, or build it here",
    36: "the driver is older than the CUDA runtime in this kernel's library: update the driver, or build it here",
    200: "the driver cannot read this kernel: it may be older than the compiler that built it",
    209: "the kernel was built for another architecture than this GPU's",
    222: "the driver is older than the compiler that built this kernel",
    700: "earlier work on this GPU may have failed: CUDA_LAUNCH_BLOCKING=1 shows which call it was",
    900: "a CUDA graph is being captured: call once before the capture",
}


class CudaError(RuntimeError):
    """A CUDA call failed; `code` is its CUresult or cudaError_t."""

    def __init__(self, code: int, name: str, meaning: str, doing: str) -> None:
        super().__init__(code, name, meaning, doing)  # all of them, so that it can be pickled
        self.code = code

    def __str__(self) -> str:
        code, name, meaning, doing = self.args
        remedy = _REMEDIES.get(code)
        return f"{name} ({code}: {meaning}) while {doing}" + (f"; {remedy}" if remedy else "")

    @property
    def unreadable(self) -> bool:
        """Whether this machine's driver or GPU cannot use the artefact, where another compiler's may do."""
        return self.code in _UNREADABLE


class Driver:
    """The driver in `library`: OSError if there is none, CudaError for what it refuses."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        cuda = ctypes.CDLL(library)
        pointer = POINTER(c_void_p)
        prototypes = {
            "cuInit": [c_uint],
            "cuGetErrorName": [c_int, POINTER(c_char_p)],
            "cuGetErrorString": [c_int, POINTER(c_char_p)],
            "cuCtxGetCurrent": [pointer],
            "cuCtxSetCurrent": [c_void_p],
            "cuDeviceGet": [POINTER(c_int), c_int],
            "cuDevicePrimaryCtxRetain": [pointer, c_int],
            "cuModuleLoadData": [pointer, c_char_p],
            "cuModuleGetFunction": [pointer, c_void_p, c_char_p],
            "cuFuncGetAttribute": [POINTER(c_int), c_int, c_void_p],
            "cuFuncSetAttribute": [c_void_p, c_int, c_int],
            "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
        }
        for name, argtypes in prototypes.items():
            function = getattr(cuda, name)
            function.argtypes, function.restype = argtypes, c_int
        self._cuda = cuda
        self._current = cuda.cuCtxGetCurrent
        self.launch = cuda.cuLaunchKernel
        self._retained: dict[int, c_void_p] = {}  # device -> its primary context, kept for the life of the process
        self._check(cuda.cuInit(0), "initialising the CUDA driver")

    def context(self) -> int:
        """The thread's current context; where it has none, the primary context of torch's device becomes it."""
        current = c_void_p()
        code = self._current(byref(current))
        if code:
            raise self.error(code, "asking for the current context")
        return current.value or self._adopt(torch.cuda.current_device())

    def _adopt(self, device: int) -> int:
        context = self._retained.get(device)
        if context is None:
            handle, context = c_int(), c_void_p()
            self._check(self._cuda.cuDeviceGet(byref(handle), device), f"opening device {device}")
            code = self._cuda.cuDevicePrimaryCtxRetain(byref(context), handle)
            self._check(code, f"retaining the context of device {device}")
            # Two threads may both retain it: one reference more, which nothing ever counts down.
            self._retained[device] = context
        self._check(self._cuda.cuCtxSetCurrent(context), f"entering the context of device {device}")
        assert context.value is not None
        return context.value

    def functions(
        self, image: bytes, blocks: tuple[tuple[bytes, int, int], ...], doing: str
    ) -> tuple[tuple[int, int, int], ...]:
        """Load a module into the current context: for each (name, threads, shared) a (CUfunction, threads, shared)."""
        module = c_void_p()
        self._check(self._cuda.cuModuleLoadData(byref(module), image), doing)
        found = []
        for name, threads, shared in blocks:
            function, registers = c_void_p(), c_int()
            self._check(self._cuda.cuModuleGetFunction(byref(function), module, name), doing)
            if shared:
                code = self._cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared)
                self._check(code, f"{doing} with {shared} bytes of shared memory")
            # Modules load lazily; asking for an attribute loads the function now rather than inside a capture.
            self._check(self._cuda.cuFuncGetAttribute(byref(registers), _NUM_REGS, function), doing)
            assert function.value is not None
            found.append((function.value, threads, shared))
        return tuple(found)

    def encode(self, *arguments: object) -> None:
        """cuTensorMapEncodeTiled with `arguments`; CudaError where the driver has no such call or refuses them."""
        call = getattr(self._cuda, "cuTensorMapEncodeTiled", None)
        if call is None:
            raise CudaError(801, "CUDA_ERROR_NOT_SUPPORTED", "the driver is older than CUDA 12", "making a tensor map")
        self._check(call(*arguments), "making a tensor map")

    def error(self, code: int, doing: str) -> CudaError:
        """The exception for a CUresult that is not 0."""
        name, meaning = c_char_p(), c_char_p()
        self._cuda.cuGetErrorName(code, byref(name))
        self._cuda.cuGetErrorString(code, byref(meaning))
        called, means = name.value or b"an unknown CUDA error", meaning.value or b"no description"
        return CudaError(code, called.decode(), means.decode(), doing)

    def _check(self, code: int, doing: str) -> None:
        if code:
            raise self.error(code, doing)


@functools.lru_cache(maxsize=1)
def driver() -> Driver:
    """The process's driver, opened on first use."""
    return Driver()
