"""What stands in for the CuTe DSL in tests: a compiler, a toolkit, and the library that launches."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch

from ffpa_jit import dispatch
from ffpa_jit.cute import backend as cute_backend
from ffpa_jit.cute import compile as kernels
from ffpa_jit.cute import toolkit
from ffpa_jit.problem import Problem

TOOLKIT = toolkit.Toolkit("cu13", "4.8.1", "cutlass-dsl 4.8.1 (base core cu13) cu13", Path("/x/libcute_dsl_runtime.so"))


class Compiler:
    """Stands in for the process that compiles: `calls` holds the tasks, `says` is what it fails with."""

    def __init__(self) -> None:
        self.calls: list[dict] = []
        self.says = ""

    def __call__(self, task, directory, head):
        self.calls.append(task)
        (directory / "build.log").write_text(head + self.says)
        if self.says:
            return "\nits process ended with exit code 1"
        (directory / "kernel.o").write_bytes(json.dumps(task["spec"]).encode())
        (directory / "emitted.json").write_text('{"arguments": "qifP"}')
        return ""


def install(monkeypatch) -> Compiler:
    """Have a stand-in compile for a machine with `TOOLKIT`; the stand-in."""
    stand_in = Compiler()
    monkeypatch.setattr(kernels, "_compile", stand_in)
    monkeypatch.setattr(toolkit, "find", lambda: TOOLKIT)
    monkeypatch.setattr(toolkit, "host_level", functools.cache(lambda: "x86-64-v3"))
    return stand_in


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache, and a process, that have seen no kernel yet."""
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(cute_backend, "_unloadable", {})
    kernels.forget()
    yield
    kernels.forget()


@pytest.fixture(name="compiler")
def fake_compiler(monkeypatch):
    return install(monkeypatch)


class Runtime:
    """Stands in for the DSL's library: keeps what the arguments' memory held."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.seen = code, []

    def CuteDSLRT_Function_Run(self, function, pointers, count):  # noqa: N802
        kinds = (ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p, ctypes.c_int32)
        assert count == len(kinds)
        values = [kind.from_address(at) for kind, at in zip(kinds, pointers, strict=True)]
        values[-1].value = self.code
        self.seen.append([value.value for value in values[:-1]])
        return int(self.code != 0)

    def cuda_dialect_get_error_name(self, code):
        return b"cudaErrorNoKernelImageForDevice"


def gpu_problem(**changes) -> Problem:
    problem = Problem(
        batch=1, heads_q=8, heads_kv=2, len_q=4096, len_kv=4096, head_dim=512, head_dim_v=512, dtype=torch.bfloat16,
        device_type="cuda", device_index=0, arch="sm_90", is_causal=False, has_mask=False, dropout_p=0.0,
        needs_grad=False, mask_needs_grad=False,
    )  # fmt: skip
    return dataclasses.replace(problem, **changes)
