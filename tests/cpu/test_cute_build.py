"""Compiling, keeping, loading and launching the CuTe DSL kernels, without a GPU.

What needs the DSL itself is skipped where it is not installed; most stands in for it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import subprocess
import sys

import pytest
import torch

from ffpa_jit.cache import default_cache
from ffpa_jit.cuda.driver import CudaError
from ffpa_jit.cute import backend as cute_backend
from ffpa_jit.cute import compile as kernels
from ffpa_jit.cute import load, toolkit
from ffpa_jit.cute.spec import HEAD_DIMS, spec_for
from ffpa_jit.problem import UnavailableError
from ffpa_jit.toolchain import BuildError
from tests.cpu.conftest import ROOT, keeps_tensors
from tests.cpu.fake_dsl import TOOLKIT, Runtime, fake_compiler, gpu_problem, install, own_cache  # noqa: F401  (fixtures)

HERE = toolkit.find()
needs_dsl = pytest.mark.skipif(isinstance(HERE, str), reason=str(HERE))
SPEC = spec_for("sm_90", 512, "bf16", True)


# Specs.


def test_every_head_dim_up_to_640_has_the_next_instantiation():
    served = {head_dim: spec_for("sm_90", head_dim, "float16", False).head_dim for head_dim in range(264, 641, 8)}
    assert set(served.values()) == set(HEAD_DIMS)
    assert (served[264], served[320], served[328], served[504], served[512], served[520], served[584]) == (
        320,
        320,
        384,
        512,
        512,
        576,
        640,
    )


def test_a_spec_is_named_readably_and_sm_90a_is_sm_90():
    assert SPEC.slug == "sm_90-d512-bf16-causal"
    assert spec_for("sm_90a", 300 + 4, "float16", False).slug == "sm_90-d320-fp16-full"
    assert spec_for("sm_90a", 512, "bfloat16", True) == SPEC


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("sm_80", 512, "bf16", True), "sm_80"), (("sm_90", 648, "bf16", True), "264 to 640"),
     (("sm_90", 256, "bf16", True), "256"), (("sm_90", 300, "bf16", True), "multiples of 8"),
     (("sm_90", 512, "fp32", True), "fp32")],
)  # fmt: skip
def test_what_has_no_kernel_is_a_value_error(arguments, said):
    with pytest.raises(ValueError, match=said):
        spec_for(*arguments)


# The cache.


def test_the_key_holds_all_that_decides_the_bits(compiler, monkeypatch):
    def name(spec=SPEC, made_by=TOOLKIT):
        return kernels.key_of(spec, kernels.Dsl(made_by).id).name

    specs = [spec_for("sm_90", d, dtype, causal) for d in HEAD_DIMS for dtype in ("fp16", "bf16") for causal in (0, 1)]
    names = {name(spec) for spec in specs}
    assert len(names) == len(specs) == 24
    names |= {name(made_by=dataclasses.replace(TOOLKIT, compiler_id="cutlass-dsl 4.8.2 (base core cu13) cu13"))}
    monkeypatch.setattr(toolkit, "host_level", functools.cache(lambda: "x86-64-v4"))
    names |= {name()}
    monkeypatch.setattr(kernels, "KERNELS", "another.module")
    kernels._source_digest.cache_clear()
    names |= {name()}
    assert len(names) == 27
    assert name() == name()


def test_the_compiling_process_is_told_its_target_and_no_setting_of_the_dsl(monkeypatch):
    """Without the target the DSL asks the driver for it hundreds of times, which took half of a compilation."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.setenv("CUTE_DSL_OPT_LEVEL", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    environment = kernels._environment("sm_90a")
    assert {name for name in environment if name.startswith("CUTE_DSL_")} == {"CUTE_DSL_ARCH"}
    assert (environment["CUTE_DSL_ARCH"], environment["CUDA_VISIBLE_DEVICES"]) == ("sm_90a", "")


def test_a_kernels_source_is_in_the_key_and_what_launches_it_is_not(tmp_path, monkeypatch):
    for each in ("forward_sm90", "helper", "backend", "dense"):
        (tmp_path / f"{each}.py").write_text("x = 1\n")
    monkeypatch.setattr(kernels, "_SOURCES", tmp_path)
    digests = []
    for changed in (None, "backend", "dense", "helper", "forward_sm90"):
        if changed:
            (tmp_path / f"{changed}.py").write_text("x = 2\n")
        kernels._source_digest.cache_clear()
        digests.append(kernels._source_digest())
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests)) == 3


def test_an_object_of_sources_that_have_changed_meanwhile_is_not_kept(compiler, tmp_path, monkeypatch):
    (tmp_path / "forward_sm90.py").write_text("x = 1\n")
    monkeypatch.setattr(kernels, "_SOURCES", tmp_path)
    assert kernels.find(SPEC) is None  # the key is known
    (tmp_path / "forward_sm90.py").write_text("x = 2\n")
    with pytest.raises(BuildError, match="sources have changed"):
        kernels.warm(SPEC)
    kernels.forget()
    assert kernels.warm(SPEC)[1] == "built"


def test_a_kernel_is_compiled_once_and_then_found(compiler):
    assert kernels.find(SPEC) is None
    entry, how, _ = kernels.warm(SPEC)
    assert (how, entry.meta["arguments"], entry.meta["target"]) == ("built", "qifP", "sm_90a")
    assert (entry.path.parent.name, entry.artefact.name) == ("cute", "kernel.o")
    assert {each.name for each in entry.path.iterdir()} >= {"kernel.o", "meta.json", "build.log"}
    kernels.forget()
    assert kernels.warm(SPEC)[1] == "hit"
    assert len(compiler.calls) == 1
    assert compiler.calls[0]["spec"] == dataclasses.asdict(SPEC)


def test_a_damaged_object_is_built_again_and_never_loaded(compiler, monkeypatch, warnings_seen):
    entry, _, _ = kernels.warm(SPEC)
    good = entry.artefact.read_bytes()
    entry.artefact.write_bytes(b"x" * len(good))
    opened = []
    monkeypatch.setattr(kernels, "load", lambda artefact, *rest: opened.append(artefact.read_bytes()))
    kernels.kernel(SPEC)
    assert opened == [good]
    assert len(compiler.calls) == 2
    assert "sha256" in warnings_seen[0]


@pytest.mark.parametrize(
    ("made_by", "served"),
    [
        (TOOLKIT.compiler_id + " x86-64-v3", True),
        (TOOLKIT.compiler_id + " x86-64-v2", True),
        (TOOLKIT.compiler_id + " x86-64-v4", False),  # may hold instructions that this CPU has not
        (TOOLKIT.compiler_id + " aarch64", False),
        ("cutlass-dsl 4.6.2 (base core cu13) cu13 x86-64-v3", False),
        ("cutlass-dsl 4.8.1 (base core cu13) cu12 x86-64-v3", False),
    ],
)
def test_only_an_object_of_the_installed_release_and_for_this_cpu_is_used(compiler, made_by, served):
    key = kernels.key_of(SPEC, made_by)
    default_cache().get(key, lambda directory: kernels.Dsl(TOOLKIT).compile(SPEC, directory), "a test")
    assert (kernels.find(SPEC) is not None) == served


def test_a_compilation_that_failed_says_why_once_and_is_not_tried_again(compiler):
    compiler.says = "Traceback\n  File x\n\x1b[91merror: \x1b[0mName `y` is not defined\n  --> forward.py:8\n"
    for _ in range(2):
        with pytest.raises(BuildError) as raised:
            kernels.kernel(SPEC)
    text = str(raised.value)
    assert "compiling sm_90-d512-bf16-causal with cutlass-dsl 4.8.1 failed: error: Name `y` is not defined" in text
    assert "forward.py:8" in text
    assert "\x1b" not in text
    assert raised.value.log.read_text().startswith(f"{TOOLKIT.compiler_id} x86-64-v3: {SPEC.slug}\n")
    assert len(compiler.calls) == 1
    assert kernels.available(SPEC).endswith("error: Name `y` is not defined")


def test_a_compilation_that_failed_keeps_no_tensor_of_its_callers(compiler):
    compiler.says = "error: no"
    assert not keeps_tensors(lambda: kernels.kernel(SPEC), BuildError)


def test_of_several_builds_of_the_dsl_the_newest_that_the_driver_can_is_used(tmp_path, monkeypatch):
    for major in (12, 13):
        (tmp_path / f"nvidia_cutlass_dsl/cu{major}/lib").mkdir(parents=True)
        (tmp_path / f"nvidia_cutlass_dsl/cu{major}/lib/libcute_dsl_runtime.so").touch()
    for name in ("", "_libs_base", "_libs_cu13"):
        (tmp_path / f"nvidia_cutlass_dsl{name}-4.6.2.dist-info").mkdir()
    monkeypatch.setattr(toolkit, "_root", lambda: tmp_path / "nvidia_cutlass_dsl")

    def found(driver):
        monkeypatch.setattr(toolkit, "_driver_major", lambda: driver)
        toolkit.forget()
        return toolkit.find()

    assert found(None).compiler_id == "cutlass-dsl 4.6.2 (base cu13) cu13"
    assert [found(driver).cuda_variant for driver in (12, 13, 14)] == ["cu12", "cu13", "cu13"]
    assert "the driver supports up to CUDA 11" in found(11)
    monkeypatch.setattr(toolkit, "_root", lambda: None)
    assert "pip install 'ffpa-jit[cute]'" in found(13)


# Loading and launching.


@pytest.fixture
def on_device_3(monkeypatch):
    monkeypatch.setattr("ffpa_jit.context.current_device", lambda: 3)


def test_a_call_hands_over_each_argument_as_its_type(on_device_3):
    runtime = Runtime()
    kernel = load.Kernel("k", runtime, 1, "qifP")
    kernel(2**47, -7, 0.5, 2**40)
    kernel(-1, 2**31 - 1, 1.0, 1)
    assert runtime.seen == [[2**47, -7, 0.5, 2**40], [-1, 2**31 - 1, 1.0, 1]]
    with pytest.raises(Exception, match=r"argument|format"):
        kernel(0, 2**31, 1.0, 1)


def test_a_failed_launch_is_named_by_its_error(on_device_3):
    with pytest.raises(CudaError, match=r"209: cudaErrorNoKernelImageForDevice.* launching k"):
        load.Kernel("k", Runtime(209), 1, "qifP")(0, 0, 0.0, 0)


def test_the_first_launch_on_a_device_is_refused_while_a_graph_is_captured(on_device_3, monkeypatch):
    kernel = load.Kernel("k", Runtime(), 1, "qifP")
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"the first launch of the CuTe DSL kernel k on a device.*run the call once"):
        kernel(0, 0, 0.0, 0)
    with pytest.raises(RuntimeError, match="first use"):
        kernels.kernel(SPEC)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    kernel(0, 0, 0.0, 0)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    kernel(0, 0, 0.0, 0)


def test_what_cannot_be_loaded_makes_the_backend_unavailable_and_then_refuse(compiler, monkeypatch):
    def broken(*arguments):
        raise OSError("no driver")

    monkeypatch.setattr(kernels, "load", broken)
    assert cute_backend.BACKEND.refusals(gpu_problem(is_causal=True), None, direction="forward") == []
    with pytest.raises(UnavailableError, match="loading sm_90-d512-bf16-causal failed: no driver"):
        cute_backend._loaded(SPEC)
    refused = cute_backend.BACKEND.refusals(gpu_problem(is_causal=True), None, direction="forward")
    assert [refusal.code for refusal in refused] == ["toolchain"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda each: ("NVIDIA H100", "NVIDIA L4", "NVIDIA L4")[each])
    with pytest.raises(UnavailableError, match=r"no driver\. .*NVIDIA H100, NVIDIA L4.*CUDA_VISIBLE_DEVICES"):
        cute_backend._loaded(SPEC)
    compiler.says = "error: no"
    with pytest.raises(UnavailableError, match="error: no"):
        cute_backend._loaded(spec_for("sm_90", 320, "bf16", True))


# With the DSL itself.


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", "tests.cpu.standin_cute")
    monkeypatch.syspath_prepend(str(ROOT))


@needs_dsl
def test_the_dsl_compiles_in_a_process_of_its_own_and_the_object_links_without_it(stand_in):
    entry, how, _ = kernels.warm(SPEC)
    assert how == "built"
    assert entry.meta["arguments"] == "qifP"
    assert "imported the DSL in" in (entry.path / "build.log").read_text()
    assert "cutlass" not in sys.modules
    runtime = load._runtime(HERE.runtime)
    data, library = entry.artefact.read_bytes(), (ctypes.c_char_p * 1)(str(HERE.runtime).encode())
    modules = [ctypes.c_void_p(), ctypes.c_void_p()]
    for module in modules:
        assert runtime.CuteDSLRT_Module_Create_From_Bytes(ctypes.byref(module), data, len(data), library, 1) == 0
    assert all(module.value for module in modules)


@needs_dsl
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a driver")
def test_without_a_driver_loading_is_an_os_error_and_no_crash(stand_in):
    with pytest.raises(OSError, match="cannot load sm_90-d512-bf16-causal"):
        kernels.kernel(SPEC)


@needs_dsl
def test_the_dsls_own_error_is_what_is_said(stand_in, tmp_path, monkeypatch):
    source = (ROOT / "tests/cpu/standin_cute.py").read_text()
    (tmp_path / "broken_cute.py").write_text(source.replace("= number\n", "= no_such_number\n"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kernels, "KERNELS", "broken_cute")
    with pytest.raises(BuildError, match="no_such_number") as raised:
        kernels.kernel(SPEC)
    assert len(str(raised.value).splitlines()) < 10
    assert "no_such_number" in raised.value.log.read_text()


CONTENDER = """
import sys
from ffpa_jit.cute import compile as kernels
from ffpa_jit.cute.spec import spec_for
kernels.KERNELS = "tests.cpu.standin_cute"
print(kernels.warm(spec_for("sm_90", 512, "bf16", True))[1])
"""


@needs_dsl
def test_of_two_processes_one_compiles_and_the_other_waits(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FFPA_JIT_CACHE_DIR": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen([sys.executable, "-c", CONTENDER], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert sorted(process.communicate(timeout=120)[0].strip() for process in processes) == ["built", "hit"]
