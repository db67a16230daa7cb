"""The rules of the public function that a machine without a GPU can check; one rule a section, one sentence a name."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import torch.nn.functional as F

from ffpa_jit import explain, ffpa_attn_func, registry
from tests import oracle
from tests.cases.shapes import Shape, leaves, make
from tests.cpu.conftest import ROOT, run_python
from tests.cpu.fakes import FakeCUDA, Refusing

SDPA = F.scaled_dot_product_attention
HALF = torch.float16


@pytest.fixture(autouse=True)
def _no_cuda_here():
    with registry.replaced("cuda", Refusing()):
        yield


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


# 1. D <= 256 goes to SDPA as it was made.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_head_dims_up_to_256_give_exactly_what_sdpa_gives(dtype):
    q, k, v, _ = make(Shape(2, 4, 2, 5, 9, 256), dtype)
    mask = torch.rand(5, 9) > 0.3
    for arguments in ({}, {"attn_mask": mask}, {"scale": 0.3}, {"is_causal": True}):
        assert torch.equal(
            ffpa_attn_func(q, k, v, enable_gqa=True, **arguments), SDPA(q, k, v, enable_gqa=True, **arguments)
        )


def test_head_dims_up_to_256_keep_sdpas_top_left_causal_mask_even_with_more_queries_than_keys():
    q, k, v, _ = make(Shape(1, 1, 1, 9, 5, 64), torch.float32)
    assert torch.equal(ffpa_attn_func(q, k, v, is_causal=True), SDPA(q, k, v, is_causal=True))


def test_head_dims_up_to_256_keep_sdpas_dropout_and_ranks():
    q = torch.randn(6, 7, 32)
    torch.manual_seed(3)
    first = ffpa_attn_func(q, q, q, dropout_p=0.4)
    torch.manual_seed(3)
    assert torch.equal(first, SDPA(q, q, q, dropout_p=0.4))


# 2. Causal is bottom-right on every path.


@pytest.mark.parametrize(
    "arguments", [{"backend": "triton"}, {"backend": "sdpa"}, {}], ids=["triton", "sdpa", "chosen"]
)
@pytest.mark.parametrize(("len_q", "len_kv"), [(17, 17), (5, 40), (1, 33)])
def test_causal_is_bottom_right_on_every_path(arguments, len_q, len_kv):
    shape = Shape(1, 2, 1, len_q, len_kv, 264, True)
    q, k, v, _ = make(shape, HALF)
    out = ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True, **arguments)
    close(out.double(), oracle.attention(q, k, v, is_causal=True).out)


@pytest.mark.parametrize("backend", [None, "triton", "sdpa"])
def test_causal_with_more_queries_than_keys_is_a_value_error(backend):
    q, k, v, _ = make(Shape(1, 1, 1, 9, 5, 264), HALF)
    with pytest.raises(ValueError, match="keys"):
        ffpa_attn_func(q, k, v, is_causal=True, backend=backend)


# 3. Dtypes, autocast, and the installed patch.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_above_head_dim_256_are_a_type_error(dtype):
    q, k, v, _ = make(Shape(1, 1, 1, 5, 5, 264), dtype)
    with pytest.raises(TypeError, match="float16"):
        ffpa_attn_func(q, k, v)


def test_mixed_dtypes_are_a_type_error():
    q, k, v, _ = make(Shape(1, 1, 1, 5, 5, 264), HALF)
    with pytest.raises(TypeError):
        ffpa_attn_func(q, k.bfloat16(), v)


def installed_calls():
    q, k, v, _ = make(Shape(1, 2, 2, 5, 9, 264), torch.float32)
    h = [x.half() for x in (q, k, v)]
    yield "fp32", (q, k, v), {}
    yield "fp64", (q.double(), k.double(), v.double()), {}
    yield "mask", tuple(h), {"attn_mask": torch.rand(5, 9) > 0.2}
    yield "additive mask", tuple(h), {"attn_mask": torch.randn(2, 5, 9).half()}
    yield "fp32 mask", tuple(h), {"attn_mask": torch.randn(2, 5, 9)}
    # As many queries as keys: otherwise SDPA means another alignment.
    yield "mask and causal", (h[0], h[0], h[0]), {"attn_mask": torch.rand(5, 5) > 0.2, "is_causal": True}
    yield "another head dim of value", (h[0], h[1], h[2][..., :40]), {}
    yield "three dimensions", tuple(x[0] for x in h), {}
    yield "odd head dim", tuple(x[..., :261] for x in h), {}
    yield "large head dim", tuple(torch.cat([x] * 4, -1) for x in h), {}
    yield "causal with more queries", (h[1], h[0], h[0]), {"is_causal": True}
    yield "broadcast batch", (h[0].expand(3, 2, 5, 264), h[1], h[2]), {}


@pytest.mark.parametrize(
    ("name", "tensors", "arguments"), installed_calls(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_installed_as_sdpa_it_never_raises_where_sdpa_would_not(monkeypatch, name, tensors, arguments):
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    out = F.scaled_dot_product_attention(*tensors, **arguments)
    close(out, SDPA(*tensors, **arguments))


# 4. Named backends and unknown keywords.


def test_an_unknown_keyword_is_a_type_error():
    q, k, v, _ = make(Shape(1, 1, 1, 5, 5, 264), HALF)
    with pytest.raises(TypeError, match=r"ffpa_attn_func\(\) got unexpected keyword argument\(s\): causal, soft_cap"):
        ffpa_attn_func(q, k, v, soft_cap=30.0, causal=True, sinks=torch.ones(1))


def test_a_named_backend_drops_nothing_silently():
    q, k, v, _ = make(Shape(1, 1, 1, 5, 5, 264), HALF)
    with registry.replaced("cuda", FakeCUDA()), pytest.raises(NotImplementedError) as refused:
        ffpa_attn_func(q, k, v, window_size=(2, 0), softcap=30.0, backend="cuda")
    assert "[window]" in str(refused.value)
    assert "[softcap]" in str(refused.value)


# 5. Rows without keys, on the fallback too.


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_no_keys_at_all_give_zero(backend):
    q, k, v, do = make(Shape(1, 2, 1, 5, 0, 264), HALF)
    q, k, v = leaves(q, k, v)
    out = ffpa_attn_func(q, k, v, enable_gqa=True, backend=backend)
    grads = torch.autograd.grad(out, (q, k, v), do)
    assert (out == 0).all()
    assert (grads[0] == 0).all()
    assert grads[1].shape == k.shape


def test_rows_that_a_mask_empties_give_zero_on_the_fallback():
    q, k, v, do = make(Shape(1, 1, 1, 5, 6, 264), HALF)
    q, k, v = leaves(q, k, v)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[2] = False
    out = ffpa_attn_func(q, k, v, attn_mask=mask, backend="sdpa")
    grads = torch.autograd.grad(out, (q, k, v), do)
    assert (out[0, 0, 2] == 0).all()
    assert all(g.isfinite().all() for g in grads)


# 6. Layouts: tests/cpu/test_kernels_interpreter.py and test_torch_ops.py.


def test_the_output_keeps_the_layout_of_the_query():
    shape = Shape(2, 3, 3, 9, 17, 264)
    q, k, v, _ = make(shape, HALF, layout="bshd")
    assert ffpa_attn_func(q, k, v).stride() == q.stride()


# 7. GQA needs the flag, as in SDPA.


def test_unequal_heads_without_enable_gqa_are_a_value_error():
    q, k, v, _ = make(Shape(1, 4, 2, 5, 5, 264), HALF)
    with pytest.raises(ValueError, match="enable_gqa"):
        ffpa_attn_func(q, k, v)
    with pytest.raises(ValueError):
        ffpa_attn_func(q[:, :3], k, v, enable_gqa=True)


# 10. Importing.

IMPORT = """
import logging, os, sys
root = logging.getLogger()
before = (list(root.handlers), root.level)
import torch
torch_modules = set(sys.modules)
import ffpa_jit
assert (list(root.handlers), root.level) == before
assert not logging.getLogger("ffpa_jit").handlers or all(
    isinstance(h, logging.NullHandler) for h in logging.getLogger("ffpa_jit").handlers)
assert not torch.cuda.is_initialized()
print(sorted(m for m in set(sys.modules) - torch_modules if m.split(".")[0] in ("triton", "cutlass", "cuda")))
"""


def test_importing_touches_neither_cuda_nor_triton_nor_the_root_logger():
    assert run_python(IMPORT).strip() == "[]"


def test_importing_writes_no_file_and_needs_no_home(tmp_path):
    code = "import os; os.environ.pop('HOME', None); import ffpa_jit"
    run_python(
        code,
        unset=("HOME", "TRITON_INTERPRET"),
        XDG_CACHE_HOME=str(tmp_path),
        TMPDIR=str(tmp_path),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert list(tmp_path.iterdir()) == []


WITHOUT_TRITON = """
import sys, importlib.abc
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "cutlass"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] in ("triton", "cutlass") else found(name, *a)
import json, torch, ffpa_jit
q = torch.randn(1, 1, 5, 264, dtype=torch.float16)
out = ffpa_jit.ffpa_attn_func(q, q, q, is_causal=True)
e = ffpa_jit.explain(q, q, q)
try:
    ffpa_jit.ffpa_attn_func(q, q, q, backend="triton")
    raised = ""
except NotImplementedError as error:
    raised = str(error)
print(json.dumps([e.forward, " ".join(e.reasons["triton"]), raised]))
"""


def test_without_triton_calls_go_to_sdpa_and_the_reason_names_the_remedy():
    forward, reasons, raised = json.loads(run_python(WITHOUT_TRITON).splitlines()[-1])
    assert forward == "sdpa"
    assert "pip install triton" in reasons
    assert "pip install triton" in raised


def test_python_o_and_warnings_as_errors_do_not_break_the_import():
    run_python("import warnings; import torch; warnings.simplefilter('error'); import ffpa_jit", PYTHONOPTIMIZE="2")


def test_the_package_ships_its_type_marker_and_every_config():
    assert (ROOT / "ffpa_jit" / "py.typed").exists()
    configs = sorted((ROOT / "ffpa_jit" / "triton" / "configs").glob("*.json"))
    assert configs
    assert all(json.loads(c.read_text()) for c in configs)


def test_a_fallback_warns_on_the_packages_logger_only(caplog, monkeypatch):
    from ffpa_jit import dispatch

    monkeypatch.setattr(dispatch, "_warned", set())
    q, k, v, _ = make(Shape(1, 1, 1, 5, 5, 261), HALF)
    with caplog.at_level(logging.WARNING):
        ffpa_attn_func(q, k, v)
    assert {r.name for r in caplog.records} == {"ffpa_jit"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", None), ("value", "x"), ("attn_mask", 1), ("dropout_p", "0.5"), ("dropout_p", None), ("scale", "0.1"),
        ("scale", [1]), ("scale", 1j), ("is_causal", "no"), ("is_causal", None),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_kind_are_named(name, value):
    tensors = {n: torch.randn(1, 1, 4, 264, dtype=torch.float16) for n in ("query", "key", "value")}
    with pytest.raises(TypeError, match=name):
        ffpa_attn_func(**{**tensors, name: value})


def test_explain_names_arguments_of_the_wrong_kind_too():
    q = torch.randn(1, 1, 4, 264, dtype=torch.float16)
    for arguments, name in (((q, None, q), "key"), (([1], q, q), "query"), ((q, q, q, None, "0.5"), "dropout_p")):
        assert explain(*arguments).error.startswith(f"TypeError: {name} must be")


def test_a_scale_that_requires_grad_is_refused_not_detached():
    q = torch.randn(1, 1, 4, 264, dtype=torch.float16)
    with pytest.raises(TypeError, match="scale"):
        ffpa_attn_func(q, q, q, scale=torch.tensor(0.1, requires_grad=True))


def test_bf16_is_refused_by_the_interpreter_which_would_compute_it_wrongly():
    q = torch.randn(1, 1, 4, 264, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="interpreter-dtype"):
        ffpa_attn_func(q, q, q, backend="triton")
