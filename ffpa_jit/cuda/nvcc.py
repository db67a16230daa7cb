"""nvcc, driven by `torch.utils.cpp_extension.load`: `kernel.so`, with a launcher in it.

Torch's loader keeps state of its own (a lock file, versions of a name, lists that it appends to) and adds flags and
libraries. So each build gets a private directory, a name of its own and copies; what torch adds to the link is answered
with empty archives, and the CUDA runtime is linked statically. The library then needs libc and libstdc++ only, no
torch, no CUDA toolkit and no path of this machine; and a CPU build of torch builds it as well.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from ffpa_jit import settings
from ffpa_jit.cache import Built
from ffpa_jit.cuda import recipe
from ffpa_jit.cuda.instantiate import MAIN, KernelSpec
from ffpa_jit.toolchain import Nvcc

__all__ = ["NvccCompiler", "loader_missing"]

_LIBRARIES = ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch", "torch_python", "cudart")


def loader_missing() -> str | None:
    """Why torch's loader cannot drive nvcc here."""
    if importlib.util.find_spec("setuptools") is None:
        return "setuptools is not installed, and torch.utils.cpp_extension imports it"
    if torch.version.hip is not None:
        return "this is a ROCm build of torch, whose extension loader compiles with hipcc"
    return None


class NvccCompiler:
    """nvcc through `torch.utils.cpp_extension.load`; one build at a time in a process."""

    _lock = threading.Lock()

    def __init__(self, tools: Nvcc) -> None:
        self._tools = tools
        self.id = tools.compiler_id

    def compile(self, spec: KernelSpec, directory: Path) -> Built:
        work = directory / "work"
        if re.search(r"[$:\n]", str(work)):  # torch writes paths into a ninja file, where these mean something
            work = Path(tempfile.mkdtemp(prefix="ffpa-jit-"))
        try:
            return self._compile(spec, directory, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _compile(self, spec: KernelSpec, directory: Path, work: Path) -> Built:
        (work / "empty").mkdir(parents=True)
        for library in _LIBRARIES:
            (work / "empty" / f"lib{library}.a").write_bytes(b"!<arch>\n")
        for name, text in recipe.texts().items():
            (work / name).write_bytes(text)
        # The loader opens what it has built, and a name that it has opened before would be built as another.
        name = f"ffpa_{uuid.uuid4().hex}"
        library_file = work / f"{name}.so"
        flags = recipe.nvcc_flags(spec)
        with self._lock, self._loader(spec) as load:
            try:
                load(
                    name,
                    [str(work / MAIN)],
                    extra_cuda_cflags=[*flags, "-ccbin", shlex.quote(str(self._tools.host_compiler))],
                    extra_ldflags=["-Lempty", f"-L{shlex.quote(str(self._tools.libraries))}", *recipe.LINK_FLAGS],
                    build_directory=str(work),
                    is_python_module=False,
                )
            except (RuntimeError, ValueError) as error:  # the message holds all that ninja wrote
                raise recipe.failed(spec, self.id, str(error), directory) from None
            except OSError:  # where nothing can be opened (a directory mounted noexec), it is built none the less
                if not library_file.exists():
                    raise
        ninja = (work / "build.ninja").read_text(errors="replace")
        (directory / "build.log").write_text(f"{self.id}: {spec.slug}\n{ninja}")
        shutil.move(library_file, directory / "kernel.so")
        return Built("kernel.so", {"flags": flags})

    @contextmanager
    def _loader(self, spec: KernelSpec) -> Iterator[Callable[..., object]]:
        """`cpp_extension.load` with this toolchain in the environment, which is put back afterwards."""
        from torch.utils import cpp_extension

        sm, tools = spec.arch.removeprefix("sm_"), self._tools
        path = [str(tools.ninja.parent), settings.executables_path(), str(tools.host_compiler.parent)]
        environment = {
            # Older releases of torch add this list's flags to those they are given; the same flag twice counts once.
            "TORCH_CUDA_ARCH_LIST": f"{sm[:-1]}.{sm[-1]}",
            "PYTORCH_NVCC": shlex.quote(str(tools.path)),
            "CXX": str(tools.host_compiler),
            "PATH": os.pathsep.join(filter(None, path)),
            "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": "1",
            "LC_ALL": "C",
            **dict.fromkeys(("CC", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")),
        }
        home = cpp_extension.CUDA_HOME
        with _environment(environment):
            cpp_extension.CUDA_HOME = str(tools.home)
            try:
                yield cpp_extension.load
            finally:
                cpp_extension.CUDA_HOME = home


@contextmanager
def _environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Inside the block the environment has these values (None: not set)."""

    def put(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    before = {name: os.environ.get(name) for name in wanted}
    put(wanted)
    try:
        yield
    finally:
        put(before)
