"""What the CuTe DSL backend refuses, when it is chosen, and what `warm` and `info` say of it; without a GPU."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from click.testing import CliRunner

import ffpa_jit
from ffpa_jit import CuTeDSLBackend, TritonBackend, dispatch, explain, registry
from ffpa_jit.backends import resolve
from ffpa_jit.cli import main
from ffpa_jit.cute import backend as cute_backend
from ffpa_jit.cute import toolkit
from ffpa_jit.cute.spec import spec_for
from ffpa_jit.problem import AttentionParams, Refusal, UnavailableError
from tests.cases.shapes import Shape, leaves, make
from tests.cpu.conftest import run_python
from tests.cpu.fake_dsl import fake_compiler, gpu_problem, install, own_cache  # noqa: F401  (fixtures)
from tests.cpu.fakes import FakeCUDA, FakeTriton, Refusing

warming = importlib.import_module("ffpa_jit.warm")

HERE = toolkit.find()
needs_dsl = pytest.mark.skipif(isinstance(HERE, str), reason=str(HERE))
SPEC = spec_for("sm_90", 512, "bf16", True)


# Refusals.


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"is_causal": True, "dtype": torch.float16, "head_dim": 264, "head_dim_v": 264}, []),
        ({"device_type": "cpu", "arch": "cpu"}, ["device"]),
        ({"arch": "sm_80"}, ["arch"]),
        ({"arch": "sm_100", "head_dim": 1024}, ["head_dim", "arch"]),
        ({"arch": "gfx942"}, ["arch"]),
        ({"head_dim": 648}, ["head_dim"]),
        ({"has_mask": True}, ["mask"]),
        ({"dropout_p": 0.1}, ["dropout"]),
        ({"window": (128, 0)}, ["window"]),
        ({"softcap": 30.0}, ["softcap"]),
        ({"varlen": True}, ["varlen"]),
        ({"len_q": 2**29, "len_kv": 2**29}, ["size"]),  # times a group of four
        ({"len_kv": 2**31 - 2**16}, ["size"]),
        ({"len_kv": 2**31 - 2**16 - 1, "len_q": 1}, []),
        ({"has_mask": True, "dropout_p": 0.5, "softcap": 1.0, "varlen": True, "window": (1, 1)},
         ["varlen", "window", "softcap", "mask", "dropout"]),
    ],
)  # fmt: skip
def test_what_it_does_not_run_is_refused_by_code_with_a_reason(compiler, changes, codes):
    refused = cute_backend.BACKEND.refusals(gpu_problem(**changes), None, direction="forward")
    assert [refusal.code for refusal in refused] == codes
    assert all(len(refusal.reason) > 20 for refusal in refused)


def test_it_has_no_backward_and_takes_no_options_behind_the_dispatchers_back(compiler):
    backend = cute_backend.BACKEND
    assert [each.code for each in backend.refusals(gpu_problem(), None, direction="backward")] == ["no-backward"]
    q = torch.zeros(1, 1, 4, 512)
    for unsupported in ({"dropout_p": 0.5}, {"window": (1, 0)}, {"softcap": 1.0}, {"varlen": True}):
        with pytest.raises(NotImplementedError, match="Triton"):
            backend.plan_forward(AttentionParams(1.0, **unsupported), None, True)
    with pytest.raises(NotImplementedError, match="Triton"):
        backend.plan_forward(AttentionParams(1.0), None, True)(q, q, q, q)
    with pytest.raises(NotImplementedError, match="triton"):
        backend.plan_backward(AttentionParams(1.0), None, (True, True, True, False))


def test_where_the_dsl_cannot_be_used_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setattr(toolkit, "find", lambda: "nvidia-cutlass-dsl is not installed: pip install 'ffpa-jit[cute]'")
    (refused,) = cute_backend.BACKEND.refusals(gpu_problem(), None, direction="forward")
    assert refused.code == "toolchain"
    assert "ffpa-jit[cute]" in refused.reason
    with pytest.raises(UnavailableError, match=r"ffpa-jit\[cute\]"):
        cute_backend._loaded(SPEC)


@pytest.mark.parametrize(
    ("version", "code"),
    [("4.5.3", "too-old"), ("4.6.1", "too-old"), ("4.6.2", None), ("4.8.1", None), ("4.10.0.dev1", None),
     ("5.0.0", "too-new"), (None, "not-installed")],
)  # fmt: skip
def test_only_releases_from_4_6_2_to_before_5_are_used(monkeypatch, version, code):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version or "9.0")
    monkeypatch.setattr(registry, "_present", lambda module: version is not None or module != "cutlass")
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "_absent", {})
    refused = registry.missing("cutedsl")
    assert (refused.code if refused else None) == code
    if refused is not None:
        assert refused.reason.endswith("pip install 'ffpa-jit[cute]'")
        assert version is None or version in refused.reason


WITHOUT = """
import importlib.util, logging, sys
found, asked = importlib.util.find_spec, []
def find_spec(name, *rest):
    asked.append(name)
    return None if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl") else found(name, *rest)
importlib.util.find_spec = find_spec
said = []
handler = logging.Handler(logging.DEBUG)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("ffpa_jit").addHandler(handler)
logging.getLogger("ffpa_jit").setLevel(logging.DEBUG)
import torch, ffpa_jit
for length in range(3, 6):
    q = torch.randn(1, 1, length, 264, dtype=torch.float16)
    ffpa_jit.ffpa_attn_func(q, q, q)
print(said, asked.count("cutlass"), sorted(name for name in sys.modules if name.split(".")[0] == "cutlass"))
print(ffpa_jit.explain(q, q, q).forward, ffpa_jit.explain(q, q, q).reasons["cutedsl"])
q = torch.randn(1, 1, 5, 261, dtype=torch.float16)
ffpa_jit.ffpa_attn_func(q, q, q)
print(said)
"""


def test_without_the_extra_nothing_is_logged_and_it_is_looked_for_once():
    pytest.importorskip("triton")
    quiet, explained, fallback = run_python(WITHOUT, unset=(), TRITON_INTERPRET="1").splitlines()
    assert quiet == "[] 1 []"
    assert explained.startswith("triton")
    assert "pip install 'ffpa-jit[cute]'" in explained
    assert "head_dim_multiple" in fallback
    assert "cute" not in fallback, "not to have an extra is no reason to fall back"


# The choice.


class Estimating(FakeTriton):
    def __init__(self, forward: float, backward: float = 0.0) -> None:
        super().__init__()
        self.times = forward, backward

    def predict_us(self, problem):
        return sum(self.times) if problem.needs_grad else self.times[0]


class FakeCute(FakeCUDA):
    """The forward alone, in torch."""

    name = "cutedsl"

    def __init__(self, microseconds: float = 1.0) -> None:
        super().__init__()
        self.microseconds = microseconds

    def predict_us(self, problem):
        return self.microseconds

    def refusals(self, problem, options, *, direction):
        if direction == "backward":
            return [Refusal("no-backward", "it has a forward only")]
        return [Refusal("mask", "it takes no mask")] if problem.has_mask else []


@pytest.mark.parametrize(("cute", "triton", "runs"), [(50.0, 300.0, "cutedsl"), (300.0, 50.0, "triton")])
def test_with_nobody_named_the_fastest_runs_and_triton_computes_the_gradients(cute, triton, runs):
    with (
        registry.replaced("cutedsl", FakeCute(cute)),
        registry.replaced("triton", Estimating(triton)),
        registry.replaced("cuda", Refusing()),
    ):
        assert dispatch.choose(gpu_problem(), None, None).forward == runs
        training = dispatch.choose(gpu_problem(needs_grad=True), None, None)
        assert (training.forward, training.backward) == (runs, "triton")
        assert "cutedsl" not in training.rejected, "to have no backward says nothing about the call"
        masked = dispatch.choose(gpu_problem(has_mask=True), None, None)
        assert (masked.forward, [each.code for each in masked.rejected["cutedsl"]]) == ("triton", ["mask"])


def test_its_forward_feeds_tritons_backward():
    q, k, v, do = make(Shape(1, 4, 2, 5, 7, 264, True), torch.float16)
    grads = []
    for fake in (FakeCute(), Refusing()):
        with registry.replaced("cutedsl", fake), registry.replaced("triton", FakeTriton()):
            tensors = leaves(q, k, v)
            out = ffpa_jit.ffpa_attn_func(*tensors, is_causal=True, enable_gqa=True)
            grads.append(torch.autograd.grad(out, tensors, do))
        assert getattr(fake, "calls", [1])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_choice_can_be_traced_with_gradients_and_any_length():
    torch.compiler.reset()
    with registry.replaced("cutedsl", FakeCute()), registry.replaced("triton", FakeTriton()):
        compiled = torch.compile(ffpa_jit.ffpa_attn_func, fullgraph=True, dynamic=True, backend="aot_eager")
        for length in (5, 9, 12):
            q, k, v, _ = make(Shape(2, 2, 2, length, length, 264), torch.float16)
            tensors = leaves(q, k, v)
            out = compiled(*tensors)
            torch.testing.assert_close(out, ffpa_jit.ffpa_attn_func(*tensors))
            out.sum().backward()


def test_the_real_estimate_is_overhead_plus_work_and_sees_idle_processors(compiler):
    def estimate(**changes):
        return cute_backend.BACKEND.predict_us(gpu_problem(**changes))

    long, longer = estimate(heads_q=32, heads_kv=32), estimate(heads_q=32, heads_kv=32, len_kv=8192)
    assert 300 < long < longer < 2 * long
    assert estimate(heads_q=32, heads_kv=32, is_causal=True) < long
    one = estimate(heads_q=1, heads_kv=1, len_q=1, len_kv=65536)
    assert one > 1000, "one row keeps one cluster busy and the others idle"


def test_the_backend_object_takes_the_forward_and_leaves_the_backward():
    assert resolve("cutedsl", None, None) == (CuTeDSLBackend(), None)
    assert resolve(CuTeDSLBackend(grad_kv_storage_dtype="fp32"), None, "triton")[1] == TritonBackend()
    for wrong in ({"backward": True}, {"forward": False}):
        with pytest.raises(ValueError, match="forward only"):
            CuTeDSLBackend(**wrong)
    with pytest.raises(ValueError, match="CuTe-DSL backend has a forward only"):
        resolve(None, None, "cutedsl")


def test_explain_says_why_not_and_a_named_backend_raises_it():
    q, k, v, _ = make(Shape(1, 2, 2, 5, 7, 264), torch.float16)
    found = explain(q, k, v)
    assert found.forward != "cutedsl"
    assert found.reasons["cutedsl"]
    with pytest.raises(NotImplementedError, match="cutedsl: "):
        ffpa_jit.ffpa_attn_func(q, k, v, backend="cutedsl")


# warm, info.


def run(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(registry, "_loaded", {**registry._loaded, "cutedsl": cute_backend.BACKEND})


@pytest.fixture
def not_installed(monkeypatch):
    remaining = {name: each for name, each in registry._loaded.items() if name != "cutedsl"}
    monkeypatch.setattr(registry, "_loaded", remaining)
    reason = "nvidia-cutlass-dsl is not installed: pip install 'ffpa-jit[cute]'"
    monkeypatch.setattr(registry, "_absent", {"cutedsl": Refusal("not-installed", reason)})


def units(head_dims, dtypes, archs, backends=None):
    archs, backends = list(map(warming.plain_arch, archs)), backends or registry.names()
    found, skipped = warming._units(archs, backends, head_dims, dtypes)
    return [unit.name for unit in found if unit.backend == "cutedsl"], {each.name: each.message for each in skipped}


def test_warm_compiles_both_masks_of_each_dtype(installed):
    assert units([512, 504], ["bf16", "fp16"], ["sm_90a", "sm_90"]) == (
        [f"sm_90-d512-{dtype}-{mask}" for dtype in ("bf16", "fp16") for mask in ("full", "causal")], {},
    )  # fmt: skip


def test_warm_skips_it_where_it_has_no_kernel_and_other_backends_have(installed):
    lacking = {"sm_80": "arch='sm_80' has no CuTe DSL kernel; choose one of sm_90"}
    assert units([512], ["bf16"], ["sm_80"]) == ([], lacking)
    names, skipped = units([512, 1024], ["bf16"], ["sm_90"])
    assert len(names) == 2
    (reason,) = skipped.values()
    assert list(skipped) == ["sm_90-d1024"]
    assert "multiples of 8 from 264 to 640" in reason
    with pytest.raises(ValueError, match="264 to 640"):
        units([1024], ["bf16"], ["sm_90"], backends=["cutedsl"])
    with pytest.raises(ValueError, match="CuTe DSL kernel; choose one of sm_90"):
        units([512], ["bf16"], ["sm_80"], backends=["cutedsl"])


def test_warm_skips_it_where_it_is_not_installed_unless_it_is_all_that_is_asked_for(not_installed):
    names, skipped = units([512], ["bf16"], ["sm_90"])
    assert names == []
    assert "pip install 'ffpa-jit[cute]'" in skipped["sm_90"]
    done = run("warm", "--backend", "cute", "--headdim", 512, "--arch", "sm_90a")
    assert done.exit_code == 2
    assert "pip install 'ffpa-jit[cute]'" in " ".join(done.stderr.split())


def test_warm_loads_a_kernel_by_running_it_once_on_each_gpu(compiler, monkeypatch):
    ran = []

    def plan_forward(self, params, options, wants_lse):
        return lambda query, key, value: ran.append((query.shape[-1], query.dtype, params.is_causal))

    monkeypatch.setattr(cute_backend.CuTeKernels, "plan_forward", plan_forward)
    monkeypatch.setattr("torch.device", lambda kind, index: "cpu")
    for is_causal in (False, True):
        cute_backend.BACKEND.load(spec_for("sm_90", 512, "bf16", is_causal), 0)
    assert ran == [(512, torch.bfloat16, False), (512, torch.bfloat16, True)]


def test_info_tells_how_to_get_it(not_installed):
    said = run("info").stdout
    assert "missing CuTe DSL: nvidia-cutlass-dsl is not installed (pip install 'ffpa-jit[cute]')" in said


@needs_dsl
def test_warm_compiles_the_kernels_themselves_without_a_gpu():
    call = ("warm", "--backend", "cute", "--headdim", 320, "--arch", "sm_90a", "--json")
    done = run(*call)
    assert done.exit_code == 0, done.output
    assert {each["name"]: each["how"] for each in json.loads(done.stdout)} == {
        "sm_90-d320-bf16-full": "built", "sm_90-d320-bf16-causal": "built",
    }  # fmt: skip
    assert {each["how"] for each in json.loads(run(*call).stdout)} == {"hit"}
    assert "sm_90-d320-bf16-full" in run("cache", "list").stdout
    assert run("cache", "verify").exit_code == 0
