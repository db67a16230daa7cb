"""`causal_upper_left` and `causal_lower_right` as attn_mask: tests for the interpreter and for a GPU.

A bias is a tensor whose memory is never initialised; here it is NaN, so that whoever reads it shows. The two files
called test_causal_bias.py import these and give the fixtures `device` and `dtype`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_jit import explain, ffpa_attn_func
from tests import oracle
from tests.cases.shapes import Shape, leaves, make

pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")

SDPA = F.scaled_dot_product_attention

SIZES = [(7, 7), (7, 12), (12, 7), (1, 9), (9, 1)]
if torch.cuda.is_available():
    SIZES += [(130, 200), (200, 130)]
KINDS = ["upper_left", "lower_right"]
WAYS = ["direct", "patched"]


def bias(kind: str, len_q: int, len_kv: int) -> Tensor:
    """A causal bias whose memory shows in every result that it is read for."""
    from torch.nn.attention import bias as biases

    made = getattr(biases, f"causal_{kind}")(len_q, len_kv)
    made.as_subclass(torch.Tensor).fill_(float("nan"))
    return made


def seen(kind: str, len_q: int, len_kv: int, device: str) -> Tensor:
    """What such a bias lets a query see."""
    mask = torch.ones(len_q, len_kv, dtype=torch.bool, device=device)
    return mask.tril(len_kv - len_q if kind == "lower_right" else 0)


@pytest.fixture(params=WAYS)
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function, by its own name and as the one-line patch has it."""
    if request.param == "direct":
        return ffpa_attn_func
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    return lambda *tensors, **options: F.scaled_dot_product_attention(*tensors, **options)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_up_to_head_dim_256_it_is_sdpas(device, dtype, call, kind, sizes):
    q, k, v, do = make(Shape(2, 2, 2, *sizes, 64), dtype, device)
    for options in ({}, {"scale": 0.3}):
        results = []
        for run in (call, SDPA):
            rows = leaves(q, k, v)
            if run is SDPA:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(F, "scaled_dot_product_attention", SDPA)
                    out = SDPA(*rows, attn_mask=bias(kind, *sizes), **options)
            else:
                out = run(*rows, attn_mask=bias(kind, *sizes), **options)
            results.append((out, *torch.autograd.grad(out, rows, do)))
        assert same(results[0][0], results[1][0])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [*SIZES, (0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
def test_above_it_is_the_flags_that_it_means(device, dtype, call, kind, sizes, heads):
    q, k, v, do = make(Shape(2, *heads, *sizes, 512), dtype, device)
    options = {"enable_gqa": heads[0] != heads[1]}
    rows = leaves(q, k, v)
    out = call(*rows, attn_mask=bias(kind, *sizes), **options)
    grads = torch.autograd.grad(out, rows, do)
    mask = seen(kind, *sizes, device)
    oracle.check(q, k, v, out=out, grads=grads, grad_out=do, attn_mask=mask)
    assert out.stride() == torch.empty_like(q).stride()
    both, lse = call(q, k, v, bias(kind, *sizes), return_lse=True, scale=0.1, **options)
    oracle.check(q, k, v, out=both, lse=lse, attn_mask=mask, scale=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_runs_on_the_backend_that_is_named(device, dtype, call, kind, sizes):
    q, k, v, do = make(Shape(1, 2, 2, *sizes, 264), dtype, device)
    for backend in ("triton", "cuda", "cutedsl"):
        if explain(q, k, v, bias(kind, *sizes), backend=backend).error is not None:
            continue
        rows = leaves(q, k, v)
        out = call(*rows, attn_mask=bias(kind, *sizes), backend=backend)
        grads = torch.autograd.grad(out, rows, do)
        oracle.check(q, k, v, out=out, grads=grads, grad_out=do, attn_mask=seen(kind, *sizes, device))


@pytest.mark.parametrize("kind", KINDS)
def test_where_sdpa_runs_the_call_it_has_the_same_mask(device, dtype, call, kind):
    """A head dim without kernels."""
    for sizes in SIZES[:5]:
        q, k, v, do = make(Shape(1, 2, 2, *sizes, 261), dtype, device)
        rows, mask = leaves(q, k, v), seen(kind, *sizes, device)
        out = call(*rows, attn_mask=bias(kind, *sizes))
        grads = torch.autograd.grad(out, rows, do)
        exact = oracle.attention(q, k, v, attn_mask=mask, grad_out=do)
        tolerance = 4e-3 if dtype == torch.float16 else 3e-2
        for a, b in zip((out, *grads), (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES[:5], ids=str)
def test_the_patch_takes_it_in_single_precision_too(monkeypatch, device, kind, sizes):
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    q, k, v, _ = make(Shape(1, 2, 2, *sizes, 264), torch.float32, device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias(kind, *sizes))
    exact = oracle.attention(q, k, v, attn_mask=seen(kind, *sizes, device))
    torch.testing.assert_close(out.double(), exact.out, rtol=1e-3, atol=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", SDPA)
        with pytest.raises(TypeError, match="dtype"):
            ffpa_attn_func(q, k, v, bias(kind, *sizes))


@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_it_says_the_same_as_is_causal_and_goes_with_neither_that_nor_a_window(device, dtype, call, kind, head_dim):
    q, k, v, _ = make(Shape(1, 1, 1, 7, 7, head_dim), dtype, device)
    with pytest.raises(ValueError, match="causal"):
        call(q, k, v, bias(kind, 7, 7), is_causal=True)
    with pytest.raises((ValueError, NotImplementedError), match="window_size"):
        call(q, k, v, bias(kind, 7, 7), window_size=(3, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_one_for_other_lengths_is_a_value_error_unless_sdpa_would_take_it(monkeypatch, device, dtype, kind):
    q, k, v, _ = make(Shape(1, 2, 2, 7, 12, 512), dtype, device)
    for sizes in ((7, 11), (6, 12), (12, 7)):
        with pytest.raises(ValueError, match=rf"{sizes[0]} queries and {sizes[1]} keys.*7 and 12"):
            ffpa_attn_func(q, k, v, bias(kind, *sizes))
        assert "ValueError" in explain(q, k, v, bias(kind, *sizes)).error
    # SDPA looks at the lengths of the tensors alone.
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    out = F.scaled_dot_product_attention(q, k, v, bias(kind, 5, 9))
    oracle.check(q, k, v, out=out, attn_mask=seen(kind, 7, 12, device))


def test_tensors_that_do_not_fit_each_other_are_told_as_without_it(device, dtype):
    q, k, v, _ = make(Shape(1, 2, 2, 5, 10, 512), dtype, device)
    with pytest.raises(ValueError, match="positions"):
        ffpa_attn_func(q, k, torch.cat([v, v], 2), bias("upper_left", 5, 10))
    with pytest.raises(TypeError, match="key must be a tensor"):
        ffpa_attn_func(q, None, v, bias("upper_left", 5, 10))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(7, 7), (7, 12), (12, 7)], ids=str)
def test_it_is_compiled_without_a_graph_break(device, dtype, call, kind, sizes, head_dim, backend):
    torch.compiler.reset()
    q, k, v, do = make(Shape(1, 2, 2, *sizes, head_dim), dtype, device)

    def step(q, k, v, mask):
        return call(q * 2, k, v, attn_mask=mask)

    results = []
    for run in (torch.compile(step, fullgraph=True, backend=backend), step):
        rows = leaves(q, k, v)
        out = run(*rows, bias(kind, *sizes))
        results.append((out, *torch.autograd.grad(out, rows, do)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_it_is_explained_by_what_runs(device, dtype, call):
    q, k, v, _ = make(Shape(1, 2, 2, 7, 12, 512), dtype, device)
    for kind in KINDS:
        assert explain(q, k, v, bias(kind, 7, 12)).error is None
        assert (
            explain(q, k, v, bias(kind, 7, 12)).forward == explain(q, k[:, :, :7], v[:, :, :7], is_causal=True).forward
        )
        small = explain(*(x[..., :64] for x in (q, k, v)), bias(kind, 7, 12))
        assert (small.forward, small.error) == ("sdpa", None)


def test_dropout_drops_what_it_drops_under_the_flags(device, dtype, call):
    q, k, v, _ = make(Shape(1, 2, 2, 12, 12, 512), dtype, device)
    results = []
    for options in ({"attn_mask": bias("lower_right", 12, 12)}, {"is_causal": True}):
        torch.manual_seed(3)
        results.append(call(q, k, v, dropout_p=0.5, **options))
    assert torch.equal(*results)
