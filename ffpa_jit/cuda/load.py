"""Load a compiled kernel and launch it on a CUDA stream.

Two kinds of artefact, by their suffix:

- `.so` (nvcc): its own `ffpa_launch` launches through the CUDA runtime linked into it. A library that also exports
  `int ffpa_prepare()` has it called once a device; it makes that device ready to launch and returns a cudaError_t.
- `.cubin` (NVRTC): launched through the driver.

A module is loaded into a context when it is first launched there; that breaks a CUDA graph capture, so it is refused
during one. Launching may happen from several threads at a time.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_char_p, c_int, c_uint, c_void_p
from pathlib import Path
from typing import Literal, Protocol

import torch

from ffpa_jit.context import refuse_capture
from ffpa_jit.cuda.driver import CudaError, Driver, driver

__all__ = ["CudaError", "Kernel", "Which", "load"]

Which = Literal["forward", "combine"]
_WHICH = {"forward": 0, "combine": 1}
_COMBINE_THREADS = 256


class Kernel(Protocol):
    """One instantiation, loaded."""

    def launch(self, params: ctypes.Structure, which: Which, grid: tuple[int, int], stream: int) -> None:
        """Enqueue a kernel on `stream` (a raw pointer, 0: the default stream) of the current device; CudaError."""
        ...

    def prepare(self) -> None:
        """Make the current device ready to launch, so that no launch on it loads anything. CudaError."""
        ...


def load(artefact: Path, *, threads: int, shared_bytes: int) -> Kernel:
    """The kernel in `artefact`, a file that is trusted: a library's code runs here.

    `threads` of a block and dynamic `shared_bytes` of the forward kernel: a cubin's launch takes them. OSError if the
    file cannot be opened as what it is (another glibc, a directory mounted noexec) or there is no driver.
    """
    if artefact.suffix == ".so":
        return _Library(artefact)
    blocks = ((b"ffpa_forward", threads, shared_bytes), (b"ffpa_combine", _COMBINE_THREADS, 0))
    return _Cubin(artefact, blocks, driver())


class _Library:
    def __init__(self, artefact: Path) -> None:
        library = ctypes.CDLL(str(artefact))
        self._name = artefact.parent.name
        self._launch = library.ffpa_launch
        self._launch.argtypes = [c_void_p, c_int, c_uint, c_uint, c_void_p]
        self._launch.restype = c_int
        self._error = library.ffpa_error
        self._error.argtypes, self._error.restype = [c_int], c_char_p
        self._prepare = getattr(library, "ffpa_prepare", None)
        self._prepared: set[int] = set()

    def launch(self, params: ctypes.Structure, which: Which, grid: tuple[int, int], stream: int) -> None:
        if torch.cuda.current_device() not in self._prepared:
            self.prepare()
        code = self._launch(ctypes.addressof(params), _WHICH[which], grid[0], grid[1], stream)
        if code:
            raise self._failed(code, f"launching ffpa_{which} of {self._name}")

    def prepare(self) -> None:
        device = torch.cuda.current_device()
        if device in self._prepared:
            return
        refuse_capture(f"loading the CUDA kernel {self._name}")
        if self._prepare is not None:
            code = self._prepare()
            if code:
                raise self._failed(code, f"loading {self._name}")
        self._prepared.add(device)

    def _failed(self, code: int, doing: str) -> CudaError:
        meaning = self._error(code)
        return CudaError(code, "CUDA runtime error", meaning.decode() if meaning else "unknown", doing)


class _Cubin:
    def __init__(self, artefact: Path, blocks: tuple[tuple[bytes, int, int], ...], driver: Driver) -> None:
        self._name = artefact.parent.name
        self._image = artefact.read_bytes()
        self._blocks = blocks
        self._driver = driver
        self._lock = threading.Lock()
        self._functions: dict[int, tuple[tuple[int, int, int], ...]] = {}  # context -> (CUfunction, threads, shared)

    def launch(self, params: ctypes.Structure, which: Which, grid: tuple[int, int], stream: int) -> None:
        driver = self._driver
        context = driver.context()
        functions = self._functions.get(context)
        if functions is None:
            functions = self._load(context)
        function, threads, shared = functions[_WHICH[which]]
        arguments = _Arguments(ctypes.addressof(params))
        code = driver.launch(function, grid[0], grid[1], 1, threads, 1, 1, shared, stream, arguments, None)
        if code:
            raise driver.error(code, f"launching ffpa_{which} of {self._name}")

    def prepare(self) -> None:
        context = self._driver.context()
        if context not in self._functions:
            self._load(context)

    def _load(self, context: int) -> tuple[tuple[int, int, int], ...]:
        refuse_capture(f"loading the CUDA kernel {self._name}")
        with self._lock:
            if context not in self._functions:
                self._functions[context] = self._driver.functions(self._image, self._blocks, f"loading {self._name}")
            return self._functions[context]


_Arguments = c_void_p * 1  # kernelParams: a pointer to each parameter, and the kernels have one
