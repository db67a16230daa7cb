"""What is found of a CUDA toolchain, in the layouts that exist, and errors that say what to do."""

from __future__ import annotations

import importlib.machinery
import os
import pickle
import shutil
import sys
import types
from pathlib import Path

import pytest

from ffpa_jit import locate, settings, toolchain
from ffpa_jit.toolchain import (
    BuildError,
    Nvcc,
    Nvrtc,
    Probe,
    ToolchainError,
    find_nvcc,
    find_nvrtc,
    first_error,
    probes,
)
from tests.cpu.conftest import run_python

VERSION_TEXT = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Wed_Aug_20_01:58:59_PM_PDT_2025
Cuda compilation tools, release 13.0, V{version}
Build cuda_13.0.r13.0/compiler.36424714_0
"""
PLACES = [
    "CUDA_HOME", "nvcc on PATH", "default home", "nvcc from PyPI", "host compiler", "ninja", "NVRTC from PyPI",
    "NVRTC of a toolkit", "NVRTC elsewhere",
]  # fmt: skip


class Machine:
    """A machine with no toolchain at all, to put one together in `root`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.packages, self.default = (
            root,
            root / "site-packages" / "nvidia",
            root / "usr" / "local" / "cuda",
        )
        self.bin = root / "bin"
        self.bin.mkdir(parents=True)
        self.patch = monkeypatch
        for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "NVCC_CCBIN", "LD_LIBRARY_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(root / "cache"))
        monkeypatch.setattr(toolchain, "_DEFAULT_HOME", self.default)
        monkeypatch.setattr(locate, "SYSTEM_INCLUDES", ())
        monkeypatch.setattr(locate, "SYSTEM_LIBRARIES", (root / "usr" / "lib64",))
        monkeypatch.setattr(sys, "executable", str(root / "python" / "python"))
        monkeypatch.setattr(locate.sysconfig, "get_path", lambda name: str(root / "scripts"))
        monkeypatch.setattr(locate.importlib.util, "find_spec", self._find_spec)
        monkeypatch.setattr(locate, "torch_cuda_major", lambda: None)

    def _find_spec(self, name: str) -> importlib.machinery.ModuleSpec | None:
        if name != "nvidia" or not self.packages.exists():
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.packages)]
        return spec

    def program(self, path: Path, text: str = "") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho run >> {self.root}/runs\n{text}\n")
        path.chmod(0o755)
        return path

    @property
    def runs(self) -> int:
        """How often a program was run."""
        file = self.root / "runs"
        return len(file.read_text().split()) if file.exists() else 0

    def toolkit(
        self, home: Path, version: str = "13.0.88", *, libraries: str = "lib64", include: str = "include"
    ) -> Path:
        """A toolkit whose nvcc answers --version, and --dryrun as nvcc does."""
        here = home / "bin"
        said = VERSION_TEXT.format(version=version)
        self.program(  # PATH has no cat
            here / "nvcc",
            f"if [ \"$1\" = --version ]; then echo '{said}'\n"
            f"else echo '#$ _SPACE_= ' >&2; echo '#$ _HERE_={here}' >&2; echo '#$ TOP={here}/..' >&2; fi",
        )
        (here / "nvcc.profile").touch()
        for name in (f"{include}/cuda_runtime.h", f"{libraries}/libcudart_static.a"):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).touch()
        return here / "nvcc"

    def nvrtc(self, directory: Path, version: str = "13.0.88", *, builtins: bool = True) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        major, minor, _ = version.split(".")
        text = f"\0Cuda compilation tools, release {major}.{minor}, V{version}\0".encode()
        library = directory / f"libnvrtc.so.{major}"
        library.write_bytes(bytes(10000) + text + bytes(10000))
        (directory / f"libnvrtc.alt.so.{major}").write_bytes(b"")
        if builtins:
            (directory / f"libnvrtc-builtins.so.{major}.{minor}").touch()
            (directory / f"libnvrtc-builtins.alt.so.{major}.{minor}").touch()
        return library

    def host_tools(self) -> None:
        self.program(self.bin / "g++")
        self.program(self.bin / "ninja")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    toolchain.forget()
    yield Machine(tmp_path, monkeypatch)
    toolchain.forget()


def test_no_toolchain_at_all_lists_every_probe_with_a_remedy(machine):
    assert find_nvcc() is None
    assert find_nvrtc() is None
    found = probes()
    assert [each.name.replace(str(machine.default), "default home") for each in found] == PLACES
    assert not any(each.found for each in found)
    assert all(each.detail and each.remedy for each in found[1:])
    assert (found[0].detail, found[0].remedy) == ("not set", "")
    error = str(ToolchainError())
    for each in found:
        assert f"{each.name}: {each.detail}" in error
        assert each.remedy in error
    assert machine.runs == 0
    assert "pip install 'ffpa-jit[nvcc]'" in error
    assert error.startswith("no CUDA compiler can be used: pip install nvidia-cuda-nvrtc")


@pytest.mark.parametrize(("wanted", "other"), [("nvcc", "NVRTC from PyPI"), ("nvrtc", "host compiler")])
def test_the_error_for_a_forced_compiler_is_about_that_one_only(machine, wanted, other):
    lines = str(ToolchainError(wanted)).splitlines()
    assert lines[0].startswith(f"FFPA_JIT_COMPILER={wanted} allows no other")
    assert not any(other in line for line in lines)
    assert "unset FFPA_JIT_COMPILER" in lines[-1]
    assert "pip install nvidia-cuda-nvrtc" in lines[-1]


def test_the_error_names_the_compiler_that_was_asked_for_and_survives_pickling():
    error = ToolchainError(
        "nvcc", [Probe("ninja", False, "not there", "pip install ninja"), Probe("g++", True, "/g", "")]
    )
    assert "FFPA_JIT_COMPILER=nvcc" in str(error)
    assert "missing ninja: not there (pip install ninja)" in str(error)
    assert "found   g++: /g" in str(error)
    assert isinstance(error, RuntimeError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_first_place_with_a_toolkit_wins(machine):
    machine.host_tools()
    found = []
    order = [
        machine.packages / "cu13", machine.default, machine.root / "on-path", machine.root / "cuda-path",
        machine.root / "cuda-home",
    ]  # fmt: skip
    for home in order:
        machine.toolkit(home)
        if home.name == "on-path":
            machine.patch.setenv("PATH", f"{machine.bin}{os.pathsep}{home / 'bin'}")
        elif home.name.startswith("cuda-"):
            machine.patch.setenv(home.name.upper().replace("-", "_"), str(home))
        toolchain.forget()
        found.append(find_nvcc())
    assert [each.home for each in found] == order
    nvcc = found[-1]
    assert nvcc == Nvcc(
        nvcc.home / "bin" / "nvcc", nvcc.home, "13.0.88", "cuda_13.0.r13.0/compiler.36424714_0", nvcc.home / "lib64",
        machine.bin / "g++", machine.bin / "ninja",
    )  # fmt: skip
    assert nvcc.compiler_id == "nvcc 13.0.88 (cuda_13.0.r13.0/compiler.36424714_0)"
    assert all(each.found for each in probes() if not each.name.startswith("NVRTC"))


def test_a_cuda_home_that_is_wrong_is_told_of_and_passed_over(machine):
    machine.host_tools()
    machine.toolkit(machine.default)
    machine.patch.setenv("CUDA_HOME", f":{machine.default}")
    assert find_nvcc().home == machine.default
    probe = probes()[0]
    assert (probe.name, probe.found) == ("CUDA_HOME", False)
    assert f":{machine.default}" in probe.detail


@pytest.mark.parametrize("kind", ["wrapper", "link", "link-to-directory"])
def test_the_nvcc_behind_a_wrapper_or_a_link_is_found(machine, kind):
    machine.host_tools()
    nvcc = machine.toolkit(machine.root / "cuda-13.0")
    if kind == "wrapper":
        machine.program(machine.bin / "nvcc", f'exec {nvcc} "$@"')
    elif kind == "link":
        (machine.bin / "nvcc").symlink_to(nvcc)
    else:
        (machine.root / "cuda").symlink_to(machine.root / "cuda-13.0")
        machine.patch.setenv("CUDA_HOME", str(machine.root / "cuda"))
    assert (find_nvcc().path, find_nvcc().home) == (nvcc, machine.root / "cuda-13.0")


def test_a_wrapper_around_nothing_is_told_of(machine):
    machine.host_tools()
    machine.program(machine.bin / "nvcc", "exit 1")
    assert find_nvcc() is None
    assert "runs no nvcc" in probes()[1].detail


TARGET = f"targets/{os.uname().machine}-linux"


@pytest.mark.parametrize(
    ("libraries", "include"), [("lib64", "include"), ("lib", "include"), (f"{TARGET}/lib", f"{TARGET}/include")]
)
def test_each_layout_of_a_toolkit_is_known(machine, libraries, include):
    machine.host_tools()
    machine.toolkit(machine.default, libraries=libraries, include=include)
    assert find_nvcc().libraries == machine.default / libraries


@pytest.mark.parametrize(
    ("missing", "detail"),
    [
        ("lib64/libcudart_static.a", "libcudart_static.a"),
        ("include/cuda_runtime.h", "cuda_runtime.h"),
        ("bin/nvcc", "no"),
    ],
)
def test_half_a_toolkit_is_told_of_and_the_next_one_is_used(machine, missing, detail):
    machine.host_tools()
    machine.toolkit(machine.default)
    machine.toolkit(machine.packages / "cu13", libraries="lib")
    (machine.default / missing).unlink()
    assert find_nvcc().home == machine.packages / "cu13"
    assert detail in probes()[2].detail


def test_an_nvcc_that_does_not_run_is_told_of(machine):
    machine.host_tools()
    machine.toolkit(machine.default).write_bytes(b"\x7fELF not for this machine")
    assert find_nvcc() is None
    assert "does not run" in probes()[2].detail


def test_the_package_for_the_cuda_of_torch_comes_first_then_the_newest(machine):
    machine.host_tools()
    for name, version in [("cu14", "14.0.1"), ("cu13", "13.2.3")]:
        machine.toolkit(machine.packages / name, version, libraries="lib")
        machine.nvrtc(machine.packages / name / "lib", version)
    machine.nvrtc(machine.packages / "cuda_nvrtc" / "lib", "12.9.86")
    assert (find_nvcc().version, find_nvrtc().version) == ("14.0.1", "14.0.1")
    machine.patch.setattr(locate, "torch_cuda_major", lambda: 13)
    assert (find_nvcc().version, find_nvrtc().version) == ("13.2.3", "13.2.3")
    machine.patch.setattr(locate, "torch_cuda_major", lambda: 12)
    assert (find_nvcc().version, find_nvrtc().version) == ("14.0.1", "12.9.86")
    assert find_nvrtc() == Nvrtc(
        machine.packages / "cuda_nvrtc" / "lib" / "libnvrtc.so.12",
        machine.packages / "cuda_nvrtc" / "lib" / "libnvrtc-builtins.so.12.9",
        "12.9.86",
    )
    assert find_nvrtc().compiler_id == "nvrtc 12.9.86"


@pytest.mark.parametrize("version", ["13.0", "12.4", None])
def test_the_cuda_release_of_torch_is_read_without_importing_it(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=types.SimpleNamespace(cuda=version)))
    assert locate.torch_cuda_major() == (int(version[:2]) if version else None)
    monkeypatch.delitem(sys.modules, "torch")
    assert locate.torch_cuda_major() is None


def test_nvrtc_is_found_in_toolkits_and_where_the_loader_looks(machine):
    machine.nvrtc(machine.root / "usr" / "lib64", "12.2.1")
    assert find_nvrtc().version == "12.2.1"
    machine.nvrtc(machine.root / "loader", "12.4.1")
    machine.patch.setenv("LD_LIBRARY_PATH", f"{machine.root / 'none'}{os.pathsep}{machine.root / 'loader'}")
    assert find_nvrtc().version == "12.4.1"
    machine.nvrtc(machine.default / "lib64", "12.6.1")
    toolchain.forget()
    assert find_nvrtc().version == "12.6.1"
    machine.nvrtc(machine.packages / "cuda_nvrtc" / "lib", "12.9.86", builtins=False)
    toolchain.forget()
    assert find_nvrtc().version == "12.6.1"
    assert "no libnvrtc-builtins.so.12.9" in probes()[6].detail
    assert machine.runs == 0


def test_an_nvrtc_that_does_not_say_its_version_has_that_of_its_builtins(machine):
    machine.nvrtc(machine.packages / "cu13" / "lib").write_bytes(b"no text")
    assert find_nvrtc().version == "13.0"


@pytest.mark.parametrize("missing", ["g++", "ninja"])
def test_nvcc_without_host_compiler_or_ninja_is_not_complete(machine, missing):
    machine.host_tools()
    machine.toolkit(machine.default)
    (machine.bin / missing).unlink()
    assert find_nvcc() is None
    assert [each.found for each in probes()[4:6]] == [missing != "g++", missing != "ninja"]


def test_ninja_beside_this_python_serves_without_an_activated_environment(machine):
    machine.host_tools()
    machine.toolkit(machine.default)
    (machine.bin / "ninja").unlink()
    (machine.root / "python").mkdir()
    ninja = machine.program(machine.root / "python" / "ninja")
    assert find_nvcc().ninja == ninja


def test_the_host_compiler_that_was_named_is_used(machine):
    machine.host_tools()
    machine.toolkit(machine.default)
    named = machine.program(machine.root / "gcc 12" / "g++-12")
    machine.patch.setenv("CXX", f"ccache '{named}'")
    assert find_nvcc().host_compiler == named
    other = machine.program(machine.root / "gcc13" / "g++")
    machine.patch.setenv("NVCC_CCBIN", str(other.parent))
    assert find_nvcc().host_compiler == other
    machine.patch.setenv("NVCC_CCBIN", "no-such-compiler")
    assert find_nvcc() is None
    assert "no-such-compiler" in probes()[4].detail


def test_nvcc_is_asked_for_its_version_once_a_machine_and_again_when_it_has_changed(machine):
    machine.host_tools()
    nvcc = machine.toolkit(machine.default)
    assert find_nvcc().version == "13.0.88"
    assert find_nvcc() is find_nvcc()
    assert machine.runs == 1
    toolchain.forget()  # a new process
    assert find_nvcc().version == "13.0.88"
    assert machine.runs == 1
    nvcc.unlink()
    machine.toolkit(machine.default, "13.1.115")
    toolchain.forget()
    assert find_nvcc().version == "13.1.115"
    assert machine.runs == 2


def test_what_is_found_is_looked_for_again_when_a_setting_changes(machine):
    machine.host_tools()
    assert find_nvcc() is None
    machine.toolkit(machine.root / "mine")
    machine.patch.setenv("CUDA_HOME", str(machine.root / "mine"))
    assert find_nvcc().home == machine.root / "mine"


def test_importing_runs_nothing_and_creates_nothing(tmp_path):
    code = (
        "import sys, subprocess, os; os.environ['HOME'] = sys.argv[1] if len(sys.argv) > 1 else os.environ['HOME']\n"
        "import torch; subprocess.Popen = None\n"  # torch may look for libraries with a program of the system
        "import ffpa_jit.toolchain, ffpa_jit.cache\n"
        "print('filelock' in vars(ffpa_jit.cache), os.listdir(os.environ['HOME']))"
    )
    assert run_python(code, HOME=str(tmp_path)).split() == ["False", "[]"]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_the_nvcc_of_this_machine_is_found_with_its_true_home(monkeypatch, tmp_path):
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(tmp_path))
    toolchain.forget()
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip(str(ToolchainError("nvcc")))
    assert (nvcc.home / "bin" / "nvcc").samefile(nvcc.path)
    assert (nvcc.libraries / "libcudart_static.a").is_file()
    assert nvcc.version.count(".") == 2
    assert nvcc.build.startswith("cuda_")


# Logs.

NVCC_LOG = """[1/2] /usr/bin/nvcc --generate-dependencies -Werror all-warnings -c forward.cu -o forward.cuda.o
FAILED: [code=2] forward.cuda.o
/usr/local/cuda/bin/nvcc -c forward.cu -o forward.cuda.o
forward.cu(3): warning #177-D: variable "errors" was declared but never referenced
forward.cu(12): error: identifier "y" is undefined
forward.cu(13): error: expected a ";"

2 errors detected in the compilation of "forward.cu".
ninja: build stopped: subcommand failed.
"""
LOGS = {
    NVCC_LOG: 'forward.cu(12): error: identifier "y" is undefined',
    'bad.cu:2:10: fatal error: nope.h: No such file or directory\n    2 | #include "nope.h"\nterminated.\n': (
        "bad.cu:2:10: fatal error: nope.h: No such file or directory"
    ),
    "ptxas /tmp/x.ptx, line 21; error   : Unknown modifier '.op'\nptxas fatal   : Ptx assembly aborted\n": (
        "ptxas /tmp/x.ptx, line 21; error   : Unknown modifier '.op'"
    ),
    "nvcc fatal   : Unsupported gpu architecture 'x'\n": "nvcc fatal   : Unsupported gpu architecture 'x'",
    "/usr/bin/ld: cannot find -lcudart: No such file or directory\ncollect2: error: ld returned 1 exit status\n": (
        "/usr/bin/ld: cannot find -lcudart: No such file or directory"
    ),
    "collect2: error: ld returned 1 exit status\n": "collect2: error: ld returned 1 exit status",
    "host_config.h:151:2: error: #error -- unsupported GNU version! gcc versions later than 12 are not supported!\n": (
        "host_config.h:151:2: error: #error -- unsupported GNU version! gcc versions later than 12 are not supported!"
    ),
    "/nope/g++: No such file or directory\nnvcc fatal   : Failed to preprocess host compiler properties.\n": (
        "/nope/g++: No such file or directory"
    ),
    "Error building extension 'x': [1/2] c++ x\nx.o: No space left on device\n": "x.o: No space left on device",
    "forward.cu(7): catastrophic error: cannot open source file\n": (
        "forward.cu(7): catastrophic error: cannot open source file"
    ),
    "nvcc: error while loading shared libraries: libfoo.so: cannot open shared object file\n": (
        "nvcc: error while loading shared libraries: libfoo.so: cannot open shared object file"
    ),
    "one\nlast\n\n": "last",
    "": "",
}


@pytest.mark.parametrize("log", LOGS, ids=range(len(LOGS)))
def test_the_first_error_of_a_log_is_found(log):
    assert first_error(log) == LOGS[log]


def test_a_failed_build_shows_its_first_error_and_where_the_log_is():
    error = BuildError("the kernel", NVCC_LOG, Path("/private/build.log"))
    error.log = Path("/kept/build.log")  # as the cache does
    assert str(error) == (
        'compiling the kernel failed: forward.cu(12): error: identifier "y" is undefined\n'
        "The whole log: /kept/build.log"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert "there is no output" in str(BuildError("x", ""))


# Settings.


def test_the_compiler_and_the_jobs_are_checked(monkeypatch):
    monkeypatch.delenv("FFPA_JIT_COMPILER", raising=False)
    monkeypatch.delenv("FFPA_JIT_JOBS", raising=False)
    assert (settings.compiler(), settings.jobs()) == (None, None)
    for text, compiler in [("nvcc", "nvcc"), (" NVRTC ", "nvrtc"), ("", None)]:
        monkeypatch.setenv("FFPA_JIT_COMPILER", text)
        assert settings.compiler() == compiler
    monkeypatch.setenv("FFPA_JIT_COMPILER", "clang")
    with pytest.raises(ValueError, match="FFPA_JIT_COMPILER='clang'"):
        settings.compiler()
    monkeypatch.setenv("FFPA_JIT_JOBS", "4")
    assert settings.jobs() == 4
    for text in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("FFPA_JIT_JOBS", text)
        with pytest.raises(ValueError, match="FFPA_JIT_JOBS"):
            settings.jobs()
