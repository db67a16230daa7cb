"""Compile the Triton kernels of a call for a GPU architecture, on any machine: no GPU, no driver.

The host code runs as it does for a call, on tensors without memory, with a Triton driver of the given architecture;
every launch compiles its kernel and stops there. So what is compiled is what a call would compile: constants, strides
and alignment included. Lengths, head counts and block sizes are not constants of a kernel, so that a few small calls
(`SAMPLES`) launch what calls of any size do.

To launch, Triton also needs C modules of its own, which it compiles with the host compiler and keeps in the same cache:
`cuda_utils`, and up to Triton 3.6 one `__triton_launcher` a signature. `helper_modules` makes them without a GPU. They
link against libcuda.so.1; where there is none, a stub stands in, which only the compiling process ever loads.

Works with Triton 3.5 to 3.9. Kernels do not depend on how many SMs or how much memory a device has.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ffpa_jit.triton.configs import has_one_launch, uses_tma

__all__ = [
    "SAMPLES", "SPLIT", "WHOLE", "HelperModule", "Launch", "Sample", "check_triton", "compile_call", "compile_only",
    "helper_modules", "samples_for", "target_of",
]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A small call. `sms` (of the imagined device) and `workspace` (bytes) decide how its backward is cut;
    `transposed` is the layout [B, N, H, D]."""

    heads: int = 2
    heads_kv: int = 1
    length: int = 256
    sms: int = 1
    workspace: int = 512 << 20
    grad_lse: bool = False
    transposed: bool = False
    queries: int = 0
    """Of a call with few queries, which has kernels of its own and no backward here; 0: as many as keys."""


WHOLE = Sample()
"""A call that fits the workspace: the usual case."""

SPLIT = Sample(length=512, sms=1024)
"""Few key tiles for many SMs: the key side is split and goes through float32 sums."""

SAMPLES = (
    WHOLE,
    SPLIT,
    Sample(grad_lse=True),  # of a call with return_lse
    Sample(1, 1, 1024, workspace=2 << 20),  # the workspace does not hold one head: two passes, keys in whole columns
    Sample(16, 1, 1024, workspace=2 << 20),  # nor a column of a group: two passes with float32 sums
    # Few queries: tiles of 16, 32 and 64 rows, with keys in one part and in several.
    *(Sample(queries=n) for n in (1, 12, 32)),
    *(Sample(length=4096, sms=132, queries=n) for n in (1, 12, 32)),
)
"""Between them, every kernel that a forward or a backward with all three gradients launches."""

_LAYOUTS = (Sample(4, 2), Sample(4, 2, transposed=True), Sample(2, 1, transposed=True), Sample(4, 2, 255))


def samples_for(arch: str, head_dim: int) -> tuple[Sample, ...]:
    """`SAMPLES`, and calls in other layouts where those have kernels of their own.

    Without tensor descriptors Triton specialises on which strides are divisible by 128 elements. All are, whatever the
    layout, if the head dim is; else that depends on the layout, the number of heads and the parity of the length.
    """
    if uses_tma(arch) or head_dim % 128 == 0:
        return SAMPLES
    split = tuple(replace(each, sms=1024, length=each.length + 256) for each in _LAYOUTS)
    return SAMPLES + _LAYOUTS + split


@dataclass(frozen=True)
class Launch:
    """A launch that was compiled and stopped: Triton's function, its keyword arguments and the compiled kernel."""

    function: Any
    kwargs: dict[str, Any]
    kernel: Any


def check_triton() -> None:
    """RuntimeError, with the remedy, where kernels cannot be compiled for an absent device."""
    try:
        import triton
    except ImportError as error:
        raise RuntimeError(f"Triton cannot be imported ({error}): pip install triton") from None
    version = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])
    if version < (3, 5):
        raise RuntimeError(
            f"Triton {triton.__version__} has not all that the kernels need: pip install 'triton>=3.5' (with the torch "
            "that goes with it)"
        )
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set, and an interpreted kernel is not compiled: unset it")


def target_of(arch: str) -> Any:
    """Triton's name for an architecture: "sm_90", "gfx942"."""
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)


@contextmanager
def _active(driver: Any) -> Iterator[None]:
    from triton.runtime.driver import driver as config

    with _replaced(config, _active=driver):
        yield


@contextmanager
def compile_only(arch: str) -> Iterator[list[Launch]]:
    """Inside, a launch compiles for ``arch``, is written to the list and stops. For this process as a whole, so not
    beside calls on a device."""
    check_triton()
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run, target = JITFunction.run, target_of(arch)
    device = SimpleNamespace(  # as much of a Triton driver as compiling takes
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )

    def compile_and_stop(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        launches.append(Launch(self, kwargs, kernel))
        return kernel

    try:
        with _replaced(JITFunction, run=compile_and_stop), _active(device):
            yield launches
    finally:
        for function in {launch.function for launch in launches}:
            function.device_caches.clear()  # they remember the architecture


def compile_call(
    arch: str, head_dim: int, dtype: torch.dtype, *, forward: bool = True, backward: bool = True,
    causal: Iterable[bool] = (False, True), samples: Iterable[Sample] = SAMPLES,
) -> list[Launch]:  # fmt: skip
    """Compile what calls launch; every kernel once, in the order of first use."""
    with compile_only(arch) as launches:
        for sample in samples:
            for is_causal in causal:
                _call(sample, arch, head_dim, dtype, is_causal, forward, backward)
    first: dict[str, Launch] = {}
    for launch in launches:
        first.setdefault(launch.kernel.hash, launch)
    return list(first.values())


def _call(
    sample: Sample, arch: str, head_dim: int, dtype: torch.dtype, is_causal: bool, forward: bool, backward: bool
) -> None:
    from ffpa_jit.triton import decode, dense, fused
    from ffpa_jit.triton.terms import Terms

    def tensor(heads: int, length: int = sample.length) -> torch.Tensor:
        outer = (length, heads) if sample.transposed else (heads, length)
        x = torch.empty(2, *outer, head_dim, dtype=dtype, device="meta")
        return x.transpose(1, 2) if sample.transposed else x

    q, k, v = tensor(sample.heads), tensor(sample.heads_kv), tensor(sample.heads_kv)
    terms = Terms(head_dim**-0.5, is_causal)
    if sample.queries:
        if forward:
            few = tensor(sample.heads, sample.queries)
            with _replaced(decode, processors=lambda device: sample.sms):
                decode.forward(few, k, v, terms, arch=arch, cap=sample.workspace)
        return
    common: dict[str, Any] = {"arch": arch, "cap": sample.workspace}
    with _replaced(dense, processors=lambda device: sample.sms):
        if forward and sample.workspace == WHOLE.workspace:
            dense.forward(q, k, v, terms, **common)
            if has_one_launch(arch):
                fused.forward(q, k, v, terms, arch=arch)
        if backward:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device="meta")
            grad_lse = torch.empty_like(lse) if sample.grad_lse else None
            dense.backward(
                torch.empty_like(q), grad_lse, q, k, v, torch.empty_like(q), lse, terms,
                needs=(True, True, True, False), **common,
            )  # fmt: skip


@contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@dataclass(frozen=True)
class HelperModule:
    """A C module of Triton's: its name, its source, the shared library made of it."""

    name: str
    source: bytes
    library: bytes


def helper_modules(kernels: Iterable[Any], directory: Path) -> list[HelperModule]:
    """The C modules that launching these compiled kernels takes on an NVIDIA GPU, compiled in Triton's cache directory.

    For a process that uses no GPU, with a cache directory that has none of them yet. ``directory`` takes the stub of
    libcuda. RuntimeError where the host compiler is missing or fails, with what it said.
    """
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import build

    modules = []
    compile_c = build._build

    def record(name: str, source_path: str, *args: Any, **kwargs: Any) -> Any:
        library = compile_c(name, source_path, *args, **kwargs)
        modules.append(HelperModule(name, Path(source_path).read_bytes(), Path(library).read_bytes()))
        return library

    paths = [each for each in (nvidia.libcuda_dirs, nvidia.library_dirs) if hasattr(each, "cache_clear")]
    try:
        with knobs.nvidia.scope(), _replaced(build, _build=record):
            if not _has_libcuda(nvidia):
                for each in paths:
                    each.cache_clear()
                knobs.nvidia.libcuda_path = str(_stub(Path(nvidia.__file__).parent / "include" / "cuda.h", directory))
            driver = nvidia.CudaDriver()
            with _active(driver):
                for kernel in kernels:
                    driver.launcher_cls(kernel.src, kernel.metadata)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"Triton's launcher cannot be compiled: `{' '.join(map(str, error.cmd))}` failed with {error.returncode}; "
            "it needs the headers of Python (python3-dev) and a working C compiler (CC names another one)"
        ) from error
    except (FileNotFoundError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "C compiler" not in str(error):
            raise
        raise RuntimeError(f"Triton's launcher cannot be compiled ({error}): install gcc, or set CC") from error
    finally:
        for each in paths:
            each.cache_clear()
    return modules


def _has_libcuda(nvidia: Any) -> bool:
    """Whether Triton finds the driver's library here, and it can be loaded."""
    try:
        nvidia.libcuda_dirs()
        ctypes.CDLL("libcuda.so.1")
    except (AssertionError, OSError, subprocess.SubprocessError):
        return False
    return True


def _stub(header: Path, directory: Path) -> Path:
    """A directory with a libcuda.so.1 that has every function of cuda.h, each failing with CUDA_ERROR_STUB_LIBRARY.

    It is loaded as well, so that this process finds it by its name. An empty library would do for the linker, but one
    with --as-needed, as Debian's and Ubuntu's gcc have it, would then not record that libcuda.so.1 is needed.
    """
    folder = directory / "libcuda"
    folder.mkdir()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header.read_text(errors="replace"))))
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 34; }}\n" for name in names))
    library = folder / "libcuda.so.1"
    command = [_host_compiler(), source, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library]
    subprocess.run([str(each) for each in command], check=True, stdout=sys.stderr)
    ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL)
    return folder


def _host_compiler() -> str:
    """What Triton will call: $CC, else gcc, else clang."""
    from triton import knobs

    found = getattr(knobs.build, "cc", None) or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise RuntimeError("there is no C compiler")
    return str(found)
