"""Compilers and artefacts of the CUDA backend, without a GPU.

The compilers are the real ones, on a small source of the same shape as the kernels' (skipped where one is missing).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ffpa_jit import cache as cache_module
from ffpa_jit import context, toolchain
from ffpa_jit.cache.store import Compiler
from ffpa_jit.cuda import kernels, load, nvcc, recipe
from ffpa_jit.cuda.instantiate import KernelSpec, spec_for, tile_of
from ffpa_jit.toolchain import BuildError, Nvcc, Nvrtc, ToolchainError
from tests.cpu.conftest import in_threads, keeps_tensors

SPEC = spec_for("sm_90", 512, "bfloat16")
SOURCES = {
    "params.cuh": b"""
#pragma once
struct ForwardParams { void* out; float* lse; long long stride[3]; int n; float scale; };
""",
    "forward.cu": b"""
#include "params.cuh"
extern "C" __global__ void ffpa_forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = p.scale;
  __syncthreads();
  static_cast<float*>(p.out)[blockIdx.x * p.n + threadIdx.x] = tile[p.n - threadIdx.x] * FFPA_HEAD_DIM;
}
extern "C" __global__ void ffpa_combine(const __grid_constant__ ForwardParams p) { p.lse[threadIdx.x] = p.scale; }
#ifndef __CUDACC_RTC__
extern "C" int ffpa_launch(const ForwardParams* p, int which, unsigned x, unsigned y, void* stream) {
  void* arguments[] = {const_cast<ForwardParams*>(p)};
  const void* kernel = which ? (const void*)ffpa_combine : (const void*)ffpa_forward;
  return cudaLaunchKernel(kernel, dim3(x, y), dim3(256), arguments, 0, static_cast<cudaStream_t>(stream));
}
extern "C" const char* ffpa_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
#endif
""",
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small sources, no setting of the user's, nothing remembered from another test."""
    for name in ("FFPA_JIT_COMPILER", "FFPA_JIT_CACHE_PATH", "FFPA_JIT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    use_sources(monkeypatch, SOURCES)
    kernels.forget()
    yield
    kernels.forget()
    recipe.source_digest.cache_clear()


def use_sources(monkeypatch: pytest.MonkeyPatch, sources: dict[str, bytes]) -> None:
    monkeypatch.setattr(recipe, "texts", lambda: sources)
    recipe.source_digest.cache_clear()


# ---- the compilers ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["nvcc", "nvrtc"])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    found = kernels.compiler_here(request.param)
    if found is None:
        pytest.skip(f"no {request.param} on this machine")
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small source built by nvcc in a directory whose name needs quoting."""
    found = kernels.compiler_here("nvcc")
    if found is None:
        pytest.skip("no nvcc on this machine")
    directory = tmp_path_factory.mktemp("a private directory")
    with pytest.MonkeyPatch.context() as patch:
        use_sources(patch, SOURCES)
        return directory / found.compile(SPEC, directory).artefact


def test_a_build_leaves_one_artefact_and_a_log(compiler: Compiler, tmp_path: Path) -> None:
    environment, home = dict(os.environ), _cuda_home()
    built = compiler.compile(SPEC, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {built.artefact, "build.log"}
    assert "-DFFPA_HEAD_DIM=512" in built.meta["flags"]
    assert compiler.id in (tmp_path / "build.log").read_text()
    assert dict(os.environ) == environment
    assert _cuda_home() == home
    image = (tmp_path / built.artefact).read_bytes()
    assert image.startswith(b"\x7fELF")
    if compiler.id.startswith("nvrtc"):
        assert int.from_bytes(image[18:20], "little") == 190  # e_machine of a CUDA binary
        assert b"ffpa_forward" in image
        assert b"ffpa_combine" in image


@pytest.mark.parametrize("name", ["do$lar", "co:lon", "a b'c"])
def test_a_directory_may_have_any_name(compiler: Compiler, tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    assert (directory / compiler.compile(SPEC, directory).artefact).is_file()


def _cuda_home() -> object:
    from torch.utils import cpp_extension

    return cpp_extension.CUDA_HOME


def test_the_library_needs_neither_torch_nor_a_toolkit(library: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    dynamic = subprocess.check_output(["readelf", "-dW", library], text=True)
    needed = set(re.findall(r"NEEDED.*\[(.*?)\.so", dynamic))
    assert needed <= {"libc", "libm", "libdl", "librt", "libpthread", "libstdc++", "libgcc_s"} | {
        name for name in needed if name.startswith("ld-linux")
    }
    assert not re.search(r"RPATH|RUNPATH|SONAME", dynamic)
    symbols = subprocess.check_output(["readelf", "--dyn-syms", "-W", library], text=True)
    exported = {line.split()[-1] for line in symbols.splitlines() if "GLOBAL DEFAULT" in line and " UND " not in line}
    assert exported == {"ffpa_launch", "ffpa_error"}
    image = library.read_bytes()
    for path in (library.parent, Path.home(), Path(torch.__file__).parent):
        assert str(path).encode() not in image


def test_the_library_opens_without_a_driver(library: Path) -> None:
    code = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).ffpa_error; f.restype = ctypes.c_char_p; print(f(1))"
    done = subprocess.run([sys.executable, "-c", code, library], capture_output=True, text=True)
    assert "invalid argument" in done.stdout, done.stderr


def test_nvrtc_compiles_with_an_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.compiler_here("nvrtc")
    if found is None:
        pytest.skip("no NVRTC on this machine")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(subprocess, "Popen", _no_program)
    assert found.compile(SPEC, tmp_path).artefact == "kernel.cubin"


def _no_program(*arguments: object, **options: object) -> None:
    raise AssertionError(f"a program was run: {arguments}")


def test_a_failed_build_names_the_first_error(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = SOURCES["params.cuh"].replace(b"float scale", b"flaot scale")
    use_sources(monkeypatch, {**SOURCES, "params.cuh": broken})
    with pytest.raises(BuildError) as caught:
        compiler.compile(SPEC, tmp_path)
    first = toolchain.first_error(caught.value.log_text)
    assert "params.cuh" in first
    assert "flaot" in first
    assert "flaot" in (tmp_path / "build.log").read_text()
    assert "flaot" in str(caught.value)


def test_an_architecture_that_the_compiler_lacks_is_a_build_error(compiler: Compiler, tmp_path: Path) -> None:
    # Every supported compiler has sm_80 to sm_90, so the unknown one is made up past the table's check.
    spec = dataclasses.replace(SPEC, arch="sm_87")
    object.__setattr__(spec, "arch", "sm_77")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "_macros", lambda spec: ["-DFFPA_HEAD_DIM=512"])
        with pytest.raises(BuildError, match="arch"):
            compiler.compile(spec, tmp_path)


def test_one_build_leaves_nothing_behind_for_the_next(compiler: Compiler, tmp_path: Path) -> None:
    """Torch's loader would build a name that it has seen as another, and appends to the lists that it is given."""
    flags = recipe.LINK_FLAGS
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        assert compiler.compile(SPEC, tmp_path / name).artefact in ("kernel.so", "kernel.cubin")
    assert flags == recipe.LINK_FLAGS


# ---- which compiler --------------------------------------------------------------------------------------------------

NVCC = Nvcc(Path("/x/bin/nvcc"), Path("/x"), "13.0.88", "b1", Path("/x/lib64"), Path("/bin/g++"), Path("/bin/ninja"))
NVRTC = Nvrtc(Path("/x/libnvrtc.so.13"), Path("/x/libnvrtc-builtins.so.13.0"), "13.0.88")


def use_tools(monkeypatch: pytest.MonkeyPatch, nvcc_tools: Nvcc | None, nvrtc_tools: Nvrtc | None) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: nvcc_tools)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda: nvrtc_tools)
    monkeypatch.setattr(toolchain, "probes", list)


@pytest.mark.parametrize(
    ("nvcc_tools", "nvrtc_tools", "setting", "expected"),
    [
        (NVCC, NVRTC, None, "nvcc"),
        (None, NVRTC, None, "nvrtc"),
        (NVCC, None, None, "nvcc"),
        (NVCC, NVRTC, "nvrtc", "nvrtc"),
        (NVCC, NVRTC, "nvcc", "nvcc"),
        (None, NVRTC, "nvcc", None),
        (NVCC, None, "nvrtc", None),
        (None, None, None, None),
    ],
)
def test_nvcc_is_preferred_and_the_setting_decides(
    nvcc_tools: Nvcc | None, nvrtc_tools: Nvrtc | None, setting: str | None, expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use_tools(monkeypatch, nvcc_tools, nvrtc_tools)
    if setting:
        monkeypatch.setenv("FFPA_JIT_COMPILER", setting)
    found = kernels.STORE.compiler()
    assert (found and found.id.split()[0]) == expected


def test_without_setuptools_nvrtc_is_chosen_and_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tools(monkeypatch, NVCC, NVRTC)
    monkeypatch.setattr(nvcc.importlib.util, "find_spec", lambda name: None)
    found = kernels.STORE.compiler()
    assert found is not None
    assert found.id == "nvrtc 13.0.88"
    assert kernels.STORE.compiler(kind="nvcc") is None
    assert "setuptools" in str(kernels.STORE.missing("nvcc"))


def test_the_digest_follows_sources_flags_and_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {recipe.source_digest(SPEC)}

    def changed() -> None:
        recipe.source_digest.cache_clear()
        digest = recipe.source_digest(SPEC)
        assert digest not in seen
        seen.add(digest)

    for name, text in SOURCES.items():
        use_sources(monkeypatch, {**SOURCES, name: text + b" "})
        changed()
    use_sources(monkeypatch, {"other.cuh": SOURCES["params.cuh"], "forward.cu": SOURCES["forward.cu"]})
    changed()
    monkeypatch.setattr(recipe, "LINK_FLAGS", (*recipe.LINK_FLAGS, "-g"))
    changed()
    for name in ("nvcc_flags", "nvrtc_flags"):
        before = getattr(recipe, name)
        monkeypatch.setattr(recipe, name, lambda spec, before=before: [*before(spec), "-x"])
        changed()
    monkeypatch.setattr(recipe, "tile_of", lambda spec: SimpleNamespace(threads=1, shared_bytes=2))
    changed()


def test_flags_hold_no_path() -> None:
    for flag in [*recipe.nvcc_flags(SPEC), *recipe.nvrtc_flags(SPEC), *recipe.LINK_FLAGS]:
        assert "/" not in flag
        assert "fast" not in flag


# ---- which artefact --------------------------------------------------------------------------------------------------


class Compiled:
    """A compiler of the tests: it writes a file, or fails, and counts."""

    def __init__(self, kind: str, compiler_id: str, error: BuildError | None = None) -> None:
        self.kind, self.id, self.error, self.builds = kind, compiler_id, error, 0

    def compile(self, spec: KernelSpec, directory: Path) -> cache_module.Built:
        self.builds += 1
        (directory / "build.log").write_text("")
        if self.error is not None:
            raise copy.copy(self.error)  # as a compiler does, a new one each time
        artefact = "kernel.so" if self.kind == "nvcc" else "kernel.cubin"
        (directory / artefact).write_bytes(self.id.encode())
        return cache_module.Built(artefact, {})


class Machine:
    """A machine with the given compilers, and a cache of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self._patch = monkeypatch
        monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(root))
        self.nvcc: Compiled | None = None
        self.nvrtc: Compiled | None = None
        self.has()

    def has(self, nvcc: str | None = None, nvrtc: str | None = None) -> None:
        self.nvcc = Compiled("nvcc", f"nvcc {nvcc} (b)") if nvcc else None
        self.nvrtc = Compiled("nvrtc", f"nvrtc {nvrtc}") if nvrtc else None
        here: dict[str, Compiled | None] = {"nvcc": self.nvcc, "nvrtc": self.nvrtc}
        self._patch.setattr(kernels, "compiler_here", here.__getitem__)
        self._patch.setattr(toolchain, "probes", list)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "cache")


BUILT = "built"  # a compiler of this machine builds
NOTHING = "nothing"  # neither an artefact nor a compiler


@pytest.mark.parametrize(
    ("cached", "nvcc_here", "nvrtc_here", "setting", "expected"),
    [
        ("nvcc 13.0", "13.0", None, None, "nvcc 13.0 (b)"),
        ("nvcc 13.0", "13.1", None, None, BUILT),
        ("nvcc 13.0", None, None, None, "nvcc 13.0 (b)"),
        ("nvcc 13.0", None, "13.0", None, "nvcc 13.0 (b)"),
        ("nvcc 13.0", None, "13.0", "nvrtc", BUILT),
        ("nvcc 13.0", None, None, "nvcc", "nvcc 13.0 (b)"),
        ("nvcc 13.0", None, None, "nvrtc", NOTHING),
        ("nvrtc 13.0", None, "13.0", None, "nvrtc 13.0"),
        ("nvrtc 13.0", None, "13.1", None, BUILT),
        ("nvrtc 13.0", None, None, None, "nvrtc 13.0"),
        ("nvrtc 13.0", "13.0", None, None, "nvrtc 13.0"),
        ("nvrtc 13.0", "13.0", "13.0", None, "nvrtc 13.0"),
        ("nvrtc 13.0", "13.0", "13.1", None, BUILT),
        ("nvrtc 13.0", "13.0", "13.0", "nvcc", BUILT),
        ("nvrtc 13.0", None, None, "nvcc", NOTHING),
        (None, "13.0", "13.0", None, BUILT),
        (None, None, None, None, NOTHING),
    ],
)
def test_which_artefact_serves(
    cached: str | None, nvcc_here: str | None, nvrtc_here: str | None, setting: str | None, expected: str,
    machine: Machine, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if cached:
        kind, version = cached.split()
        machine.has(**{kind: version})
        assert kernels.warm(SPEC)[1] == "built"
    machine.has(nvcc_here, nvrtc_here)
    if setting:
        monkeypatch.setenv("FFPA_JIT_COMPILER", setting)
    assert (kernels.available(SPEC) is not None) == (expected == NOTHING)
    if expected == NOTHING:
        with pytest.raises(ToolchainError):
            kernels.warm(SPEC)
        return
    entry, how, seconds = kernels.warm(SPEC)
    assert seconds >= 0
    builds = sum(each.builds for each in (machine.nvcc, machine.nvrtc) if each)
    if expected == BUILT:
        assert (how, builds) == ("built", 1)
        assert kernels.warm(SPEC)[1] == "hit"
    else:
        assert (how, builds) == ("hit", 0)
        assert entry.meta["key"]["compiler"] == expected


def test_other_sources_or_another_spec_never_serve(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.has(nvcc="13.0")
    kernels.warm(SPEC)
    machine.has()
    assert kernels.available(SPEC) is None
    assert kernels.available(dataclasses.replace(SPEC, stages=3)) is not None
    use_sources(monkeypatch, {**SOURCES, "forward.cu": b"// other"})
    reason = kernels.available(SPEC)
    assert reason is not None
    assert SPEC.slug in reason


def test_a_compiler_can_be_asked_for(machine: Machine) -> None:
    machine.has("13.0", "13.0")
    assert kernels.warm(SPEC, "nvrtc")[0].artefact.name == "kernel.cubin"
    assert kernels.warm(SPEC, "nvcc")[0].artefact.name == "kernel.so"


def test_a_failed_build_keeps_no_tensor_of_its_callers(machine: Machine) -> None:
    machine.has(nvcc="13.0")
    assert machine.nvcc is not None
    machine.nvcc.error = BuildError("d512", "error: no\n")
    assert not keeps_tensors(lambda: kernels.warm(SPEC), BuildError)


def test_a_failed_build_is_remembered(machine: Machine) -> None:
    machine.has(nvcc="13.0")
    assert machine.nvcc is not None
    machine.nvcc.error = BuildError("d512", 'forward.cu(1): error: identifier "x" is undefined\n')
    for _ in range(3):
        with pytest.raises(BuildError, match="undefined"):
            kernels.warm(SPEC)
    assert machine.nvcc.builds == 1
    assert "undefined" in str(kernels.available(SPEC))
    kernels.forget()
    machine.nvcc.error = None
    assert kernels.warm(SPEC)[1] == "built"


def test_what_failed_here_is_available_once_another_process_has_built_it(machine: Machine) -> None:
    machine.has(nvcc="13.0")
    assert machine.nvcc is not None
    machine.nvcc.error = BuildError("d512", "error: no space left\n")
    with pytest.raises(BuildError):
        kernels.warm(SPEC)
    assert kernels.available(SPEC) is not None
    machine.nvcc.error = None
    key = kernels.key_of(SPEC, machine.nvcc.id)
    cache_module.default_cache().get(key, lambda directory: machine.nvcc.compile(SPEC, directory), "another's")
    assert kernels.available(SPEC) is None
    assert kernels.warm(SPEC)[1] == "hit"


def test_a_build_is_announced_and_a_long_one_reported(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.has(nvcc="13.0")
    clock = iter(range(0, 1000, 7))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO, "ffpa_jit"):
        entry, _, _ = kernels.warm(SPEC)
    messages = [record.getMessage() for record in caplog.records if SPEC.slug in record.getMessage()]
    assert "compiling it with nvcc 13.0" in messages[0]
    assert "in 7.0 s" in messages[-1]
    assert str(entry.path) in messages[-1]


class Opened:
    """Stands for a loaded kernel."""

    def __init__(self, artefact: Path) -> None:
        self.artefact, self.prepared = artefact, 0

    def prepare(self) -> None:
        self.prepared += 1


def test_a_kernel_is_loaded_once_and_ready(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.has(nvcc="13.0")
    opened: list[Opened] = []

    def open_(artefact: Path, *, threads: int, shared_bytes: int) -> Opened:
        assert (threads, shared_bytes) == (tile_of(SPEC).threads, tile_of(SPEC).shared_bytes)
        opened.append(Opened(artefact))
        return opened[-1]

    monkeypatch.setattr(kernels, "load", open_)
    found: list[object] = []
    in_threads(8, lambda: found.append(kernels.kernel(SPEC)))
    assert len(opened) == 1
    assert found == opened * 8
    assert opened[0].prepared == 1
    assert machine.nvcc is not None
    assert machine.nvcc.builds == 1


UNREADABLE = [
    OSError("failed to map segment from shared object"),
    load.CudaError(35, "CUDA runtime error", "driver version is insufficient", "loading"),
]


@pytest.mark.parametrize("error", UNREADABLE)
def test_an_artefact_that_cannot_be_used_here_is_replaced(
    error: Exception, machine: Machine, monkeypatch: pytest.MonkeyPatch, warnings_seen: list[str]
) -> None:
    machine.has("13.0", "13.0")
    refuse_libraries(monkeypatch, error)
    assert kernels.kernel(SPEC).artefact.name == "kernel.cubin"  # type: ignore[attr-defined]
    assert any(str(error) in message and "nvrtc" in message for message in warnings_seen)


@pytest.mark.parametrize(
    "error", [*UNREADABLE, load.CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory", "loading")]
)
def test_it_is_not_replaced_where_that_is_not_wanted_or_no_use(
    error: Exception, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.has("13.0", "13.0")
    refuse_libraries(monkeypatch, error)
    if error in UNREADABLE:
        monkeypatch.setenv("FFPA_JIT_COMPILER", "nvcc")
    with pytest.raises(type(error), match=str(error).split()[0]):
        kernels.kernel(SPEC)
    assert machine.nvrtc is not None
    assert machine.nvrtc.builds == 0


def refuse_libraries(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def open_(artefact: Path, **_: int) -> Opened:
        if artefact.suffix == ".so":
            raise error
        return Opened(artefact)

    monkeypatch.setattr(kernels, "load", open_)


def test_a_first_use_inside_a_capture_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.has(nvcc="13.0")
    monkeypatch.setattr(kernels, "load", lambda artefact, **_: Opened(artefact))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"ffpa_jit\.warm") as caught:
        kernels.kernel(SPEC)
    assert "ffpa-jit warm" in str(caught.value)
    assert SPEC.slug in str(caught.value)
    assert machine.nvcc is not None
    assert machine.nvcc.builds == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first = kernels.kernel(SPEC)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernels.kernel(SPEC) is first


def test_the_capture_is_not_asked_about_before_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", _no_program)
    context.refuse_capture("loading")


def test_a_hit_runs_no_program_and_imports_no_loader(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new process with an empty PATH, the artefact of an nvcc that is not there."""
    use_sources(monkeypatch, {"forward.cu": b""})
    machine.has(nvcc="1.2.3")
    assert kernels.warm(SPEC)[1] == "built"
    code = """
import sys, time, torch
from ffpa_jit.cuda import kernels, recipe
from ffpa_jit.cuda.instantiate import spec_for
def audit(event, args):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
        raise SystemExit(f"{event} {args}")
sys.addaudithook(audit)
recipe.texts = lambda: {"forward.cu": b""}
start = time.perf_counter()
_, how, _ = kernels.warm(spec_for("sm_90", 512, "bfloat16"))
print(how, time.perf_counter() - start, "torch.utils.cpp_extension" in sys.modules)
"""
    environment = {**os.environ, "PATH": "", "FFPA_JIT_COMPILER": "nvcc"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(kernels.__file__).parents[2]), *filter(None, sys.path)])
    for name in ("CUDA_HOME", "CUDA_PATH"):
        environment.pop(name, None)
    if toolchain.find_nvcc() is not None:  # so that it is not found by its usual place either
        code = "from ffpa_jit import toolchain; toolchain.find_nvcc = lambda: None\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    how, seconds, imported = done.stdout.split()
    assert (how, imported) == ("hit", "False")
    assert float(seconds) < 0.5
