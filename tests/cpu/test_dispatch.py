"""Who runs a call: backend objects, resolution, refusals, explain, warnings and strict mode."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import ffpa_jit
from ffpa_jit import (
    Backend,
    CUDABackend,
    CuTeDSLBackend,
    SDPABackend,
    TritonBackend,
    dispatch,
    explain,
    ffpa_attn_func,
    registry,
)
from ffpa_jit.backends import resolve
from tests.cases.shapes import Shape, leaves, make
from tests.cpu.conftest import run_python
from tests.cpu.fakes import FakeCUDA, Refusing

HALF = torch.float16


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())


@pytest.fixture(autouse=True)
def _no_cuda_here():
    with registry.replaced("cuda", Refusing()):
        yield


def inputs(head_dim: int = 264, dtype: torch.dtype = HALF, **kwargs):
    q, k, v, _ = make(Shape(1, 2, 2, 5, 7, head_dim), dtype, **kwargs)
    return q, k, v


# The dataclasses.

FIELDS = {
    Backend: {"name", "forward", "backward"},
    SDPABackend: {"name", "forward", "backward", "high_precision_grad"},
    TritonBackend: {
        "name", "forward", "backward", "autotune", "autotune_mode", "enable_tma", "enable_ws", "persist_dkdv",
        "split_launch", "preprocess_d_chunk", "grad_kv_storage_dtype", "grad_q_storage_dtype", "workspace_mb", "merged",
    },
    CUDABackend: {"name", "forward", "backward", "acc", "stages"},
    CuTeDSLBackend: {"name", "forward", "backward", "grad_kv_storage_dtype"},
}  # fmt: skip


@pytest.mark.parametrize("cls", FIELDS, ids=lambda c: c.__name__)
def test_every_backend_has_its_documented_fields_and_is_frozen(cls):
    assert {f.name for f in dataclasses.fields(cls)} == FIELDS[cls]
    backend = cls("sdpa") if cls is Backend else cls()
    assert hash(backend) == hash(dataclasses.replace(backend))
    with pytest.raises(dataclasses.FrozenInstanceError):
        backend.name = "other"
    for name in FIELDS[cls] - {"name"}:
        assert f"`{name}`" in (cls.__doc__ + Backend.__doc__)


@pytest.mark.parametrize(
    ("given", "sides"),
    [({}, (True, True)), ({"forward": True}, (True, False)), ({"backward": True}, (False, True)),
     ({"forward": False}, (False, True)), ({"forward": True, "backward": True}, (True, True))],
)  # fmt: skip
def test_one_given_side_negates_the_other(given, sides):
    backend = TritonBackend(**given)
    assert (backend.forward, backend.backward) == sides


@pytest.mark.parametrize(
    "make_backend",
    [
        lambda: TritonBackend(autotune_mode="slow"),
        lambda: TritonBackend(grad_kv_storage_dtype="bf16"),
        lambda: TritonBackend(grad_q_storage_dtype=torch.bfloat16),
        lambda: TritonBackend(workspace_mb=-1),
        lambda: TritonBackend(workspace_mb=float("nan")),
        lambda: TritonBackend(workspace_mb=float("inf")),
        lambda: CuTeDSLBackend(grad_kv_storage_dtype="int8"),
        lambda: CUDABackend(acc="bf16"),
        lambda: CUDABackend(stages=0),
        lambda: CUDABackend(stages=5),
        lambda: CUDABackend(backward=True),
        lambda: CuTeDSLBackend(backward=True),
        lambda: TritonBackend(forward=False, backward=False),
        lambda: Backend("mkl"),
        lambda: TritonBackend(name="cuda"),
    ],
)
def test_a_wrong_option_is_an_error_when_the_object_is_built(make_backend):
    with pytest.raises(ValueError):
        make_backend()


@pytest.mark.parametrize("value", ["64", True, [1]])
def test_a_workspace_that_is_no_number_is_a_type_error(value):
    with pytest.raises(TypeError, match="workspace_mb"):
        TritonBackend(workspace_mb=value)


@pytest.mark.parametrize("value", [None, "fp16", "fp32", torch.float16, torch.float32])
def test_storage_dtypes_are_normalised(value):
    stored = TritonBackend(grad_kv_storage_dtype=value).grad_kv_storage_dtype
    assert stored is None or isinstance(stored, torch.dtype)


def test_every_option_is_accepted_and_changes_no_result():
    q, k, v = inputs()
    expected = ffpa_attn_func(q, k, v, backend="triton")
    options = TritonBackend(
        autotune=True, autotune_mode="max", enable_tma=True, enable_ws=True, persist_dkdv=True, split_launch=True,
        preprocess_d_chunk=True, grad_kv_storage_dtype="fp32", grad_q_storage_dtype=torch.float16,
    )  # fmt: skip
    assert torch.equal(ffpa_attn_func(q, k, v, backend=options), expected)


# Resolution.


def test_backend_fills_both_sides_and_explicit_sides_win():
    triton, sdpa = TritonBackend(), SDPABackend()
    assert resolve(None, None, None) == (None, None)
    assert resolve("triton", None, None) == (triton, triton)
    assert resolve("triton", None, "sdpa") == (triton, sdpa)
    assert resolve("sdpa", triton, None) == (triton, sdpa)
    assert resolve(None, "triton", None) == (triton, None)
    assert resolve(Backend("triton"), None, None) == (triton, triton)
    assert resolve(TritonBackend(forward=True), None, None) == (TritonBackend(forward=True), None)
    assert resolve("cuda", None, None) == (CUDABackend(), None)
    assert resolve(CUDABackend(stages=2), None, "sdpa") == (CUDABackend(stages=2), sdpa)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, "mkl", None), ValueError),
        (("fast", None, None), ValueError),
        ((3, None, None), TypeError),
        ((TritonBackend, None, None), TypeError),
        ((None, TritonBackend(backward=True), None), ValueError),
        ((None, None, "cuda"), ValueError),
        ((None, None, "cutedsl"), ValueError),
    ],
)
def test_a_backend_that_does_not_exist_or_fit_is_an_error(arguments, error):
    with pytest.raises(error):
        resolve(*arguments)


def test_a_bad_backend_name_is_an_error_below_head_dim_257_too():
    q = torch.randn(1, 1, 4, 64)
    with pytest.raises(ValueError):
        ffpa_attn_func(q, q, q, backend="mkl")


# Running what was named.


@pytest.mark.parametrize("name", ["cuda", "cutedsl"])
def test_backends_that_cannot_run_refuse_with_the_reason(name):
    with pytest.raises(NotImplementedError, match=name):
        ffpa_attn_func(*inputs(), forward_backend=name)


@pytest.mark.parametrize("backend", [CUDABackend(), CuTeDSLBackend(), "cuda", "cutedsl"])
def test_backends_that_cannot_run_refuse_as_backend_too(backend):
    with pytest.raises(NotImplementedError):
        ffpa_attn_func(*inputs(), backend=backend)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda q, k, v: ((q[..., :261], k[..., :261], v[..., :261]), {}), "261"),
        (lambda q, k, v: ((q, k, v[..., :40]), {}), "40"),
        (lambda q, k, v: ((q.bfloat16(), k.bfloat16(), v.bfloat16()), {}), "bfloat16"),
        (lambda q, k, v: (tuple(torch.cat([x] * 4, -1) for x in (q, k, v)), {}), "1056"),
    ],
    ids=["head dim not a multiple of 8", "value head dim", "bf16 in the interpreter", "head dim above 1024"],
)
def test_a_named_backend_says_what_came_and_the_unnamed_call_falls_back(change, word, warnings_seen):
    tensors, arguments = change(*inputs())
    with pytest.raises(NotImplementedError, match=word):
        ffpa_attn_func(*tensors, backend="triton", **arguments)
    assert ffpa_attn_func(*tensors, **arguments).shape == (*tensors[0].shape[:3], tensors[2].shape[3])
    assert len(warnings_seen) == 1
    assert word in warnings_seen[0]


def test_mixed_sides_give_the_gradients_of_either():
    q, k, v, do = make(Shape(1, 2, 1, 9, 17, 264, True), HALF)
    q, k, v = leaves(q, k, v)
    results = []
    for backward in ("triton", "sdpa"):
        sides = {"forward_backend": "triton", "backward_backend": backward}
        out = ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True, **sides)
        results.append(torch.autograd.grad(out, (q, k, v), do))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)


# Warnings and strict mode.


def test_a_fallback_warns_once_per_reason(warnings_seen):
    for _ in range(3):
        ffpa_attn_func(*inputs(dtype=torch.bfloat16))
    assert len(warnings_seen) == 1
    assert "interpreter-dtype" in warnings_seen[0]
    for _ in range(2):
        ffpa_attn_func(*inputs(261))
    assert len(warnings_seen) == 2
    assert "head_dim_multiple" in warnings_seen[1]


def test_no_warning_for_small_head_dims_or_a_named_sdpa(warnings_seen):
    small = torch.randn(1, 1, 4, 64)
    ffpa_attn_func(small, small, small)
    ffpa_attn_func(*inputs(), backend="sdpa")
    assert not warnings_seen


def test_strict_mode_turns_a_fallback_into_an_error(monkeypatch):
    monkeypatch.setenv("FFPA_JIT_STRICT", "1")
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match="head_dim_multiple"):
        ffpa_attn_func(*inputs(261))
    ffpa_attn_func(q, k, v)
    ffpa_attn_func(q, k, v, backend="sdpa")
    small = torch.randn(1, 1, 4, 64)
    ffpa_attn_func(small, small, small)


def test_a_setting_that_is_none_is_an_error(monkeypatch):
    monkeypatch.setenv("FFPA_JIT_STRICT", "maybe")
    with pytest.raises(ValueError, match="FFPA_JIT_STRICT"):
        ffpa_attn_func(*inputs(261))


def test_on_a_plain_cpu_the_call_falls_back_with_the_device_as_reason():
    code = """
import torch, ffpa_jit
q = torch.randn(1, 1, 5, 264, dtype=torch.float16)
assert ffpa_jit.ffpa_attn_func(q, q, q).shape == q.shape
e = ffpa_jit.explain(q, q, q)
assert e.forward == "sdpa", e
print(" ".join(e.reasons["triton"]))
try:
    ffpa_jit.ffpa_attn_func(q, q, q, backend="triton")
except NotImplementedError as error:
    print(error)
"""
    said = run_python(code)
    assert said.count("TRITON_INTERPRET") >= 2


def test_cuda_is_tried_where_triton_refuses_and_is_not_where_it_does_not():
    q, k, v = inputs()
    refused = inputs(dtype=torch.bfloat16)
    cuda = FakeCUDA()
    with registry.replaced("cuda", cuda):
        ffpa_attn_func(q, k, v)
        assert not cuda.calls
        ffpa_attn_func(*refused)
        assert len(cuda.calls) == 1
        assert explain(*refused).forward == "cuda"
        assert explain(q, k, v).reasons["cuda"] == ["it could run this call; triton was chosen"]


# explain.


def test_explain_names_who_runs_and_why_the_others_do_not():
    q, k, v = inputs()
    found = explain(q, k, v)
    assert (found.forward, found.backward, found.error) == ("triton", None, None)
    assert set(found.reasons) == {"sdpa", "cuda", "cutedsl"}
    assert all(found.reasons.values())
    mask = torch.ones(5, 7, dtype=torch.bool)
    found = explain(*leaves(*inputs(261, torch.bfloat16)), attn_mask=mask, dropout_p=0.5, is_causal=True)
    assert (found.forward, found.backward) == ("sdpa", "sdpa")
    assert len(found.reasons["triton"]) == 2
    for word in ("sdpa", "mask", "0.5", "261", "bfloat16"):
        assert word in str(found)


def test_explain_tells_what_would_raise_without_raising():
    q, k, v = inputs()
    assert "TypeError" in explain(q.float(), k.float(), v.float()).error
    assert "ValueError" in explain(k, q, q, is_causal=True).error
    assert "NotImplementedError" in explain(q, k, v, backend="cuda").error
    assert "ValueError" in explain(q, k, v, backend="mkl").error


def test_explain_runs_nothing_and_takes_meta_tensors():
    big = torch.empty(1, 32, 1 << 20, 512, dtype=HALF, device="meta")
    found = explain(big, big, big, is_causal=True)
    assert found.forward == "sdpa"
    assert "meta" in " ".join(found.reasons["triton"])


def test_explain_is_ready_for_json_and_agrees_with_small_head_dims():
    small = torch.randn(1, 1, 4, 64)
    found = json.loads(json.dumps(explain(small, small, small).to_dict()))
    assert found["forward"] == "sdpa"
    assert "256" in " ".join(found["reasons"]["triton"])


@pytest.mark.parametrize("backend", [None, "triton", "sdpa", "cuda", "cutedsl"])
@pytest.mark.parametrize("masked", [False, True])
def test_explain_and_the_call_agree(backend, masked):
    q, k, v = inputs()
    arguments = {"attn_mask": torch.ones(5, 7, dtype=torch.bool) if masked else None, "backend": backend}
    found = explain(q, k, v, **arguments)
    if found.error is None:
        ffpa_attn_func(q, k, v, **arguments)
    else:
        with pytest.raises(NotImplementedError):
            ffpa_attn_func(q, k, v, **arguments)


def test_the_public_names_are_there():
    for name in (
        "ffpa_attn_func",
        "explain",
        "Backend",
        "SDPABackend",
        "TritonBackend",
        "CUDABackend",
        "CuTeDSLBackend",
    ):
        assert name in ffpa_jit.__all__


@pytest.mark.parametrize(("version", "fits"), [("3.3.1", False), ("3.4.0", False), ("3.5.0", True), ("3.10.2", True)])
def test_a_triton_that_is_too_old_is_refused_with_its_version(monkeypatch, version, fits):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.delitem(registry._loaded, "triton", raising=False)
    monkeypatch.setattr(registry, "_absent", {})
    refused = registry.missing("triton")
    assert (refused is None) == fits
    assert fits or (version in refused.reason and "3.5" in refused.reason)
