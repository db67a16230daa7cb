"""The fallback: SDPA's result, this package's causal alignment, and no recursion through a patch."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ffpa_jit import explain, ffpa_attn_func, sdpa
from tests import oracle
from tests.cases.shapes import Shape, leaves, make

SDPA = F.scaled_dot_product_attention
HALF = torch.float16


def close(a, b, tolerance=3e-3):
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("megabytes", ["512", "0.0001"], ids=["mask", "zero queries"])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_causal_stays_bottom_right_with_gradients_however_it_is_expressed(monkeypatch, megabytes, dtype):
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", megabytes)
    shape = Shape(2, 4, 2, 5, 12, 264, True)
    q, k, v, do = make(shape, dtype)
    q, k, v = leaves(q, k, v)
    out = ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True, backend="sdpa")
    grads = torch.autograd.grad(out, (q, k, v), do)
    exact = oracle.attention(q, k, v, is_causal=True, grad_out=do)
    tolerance = 3e-3 if dtype == HALF else 3e-2
    for a, b in zip((out, *grads), (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
        close(a, b, tolerance)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 5, 7), (1, 2, 5, 7), (3, 1, 5, 7), (3, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks_of_any_broadcast_mean_what_they_mean_to_sdpa(shape, boolean):
    q, k, v, _ = make(Shape(3, 2, 2, 5, 7, 264), HALF)
    mask = torch.rand(shape) > 0.4 if boolean else torch.randn(shape).half()
    assert torch.equal(ffpa_attn_func(q, k, v, attn_mask=mask, backend="sdpa"), SDPA(q, k, v, attn_mask=mask))


def test_the_gradient_of_an_additive_mask_comes_from_sdpa():
    q, k, v, _ = make(Shape(1, 2, 2, 5, 7, 264), HALF)
    grads = []
    for call in (partial(ffpa_attn_func, backend="sdpa"), SDPA):
        mask = torch.zeros(2, 5, 7, dtype=HALF, requires_grad=True)
        call(q, k, v, attn_mask=mask).float().square().sum().backward()
        grads.append(mask.grad)
    assert torch.equal(*grads)
    assert grads[0].any()


def test_finite_minimum_masks_behave_as_on_sdpas_math_path():
    q, k, v, _ = make(Shape(1, 1, 1, 5, 7, 264), torch.bfloat16)
    mask = torch.full((5, 7), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    mask[:3, :4] = 0
    out = ffpa_attn_func(q, k, v, attn_mask=mask)
    assert out.isfinite().all()
    assert torch.equal(out, SDPA(q, k, v, attn_mask=mask))


def test_dropout_draws_what_sdpa_draws():
    q, k, v, _ = make(Shape(1, 2, 2, 5, 7, 264), HALF)
    torch.manual_seed(5)
    first = ffpa_attn_func(q, k, v, dropout_p=0.3, backend="sdpa")
    torch.manual_seed(5)
    assert torch.equal(first, SDPA(q, k, v, dropout_p=0.3))


def test_a_patch_cannot_make_the_fallback_recurse(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    monkeypatch.setattr(torch._C._nn, "scaled_dot_product_attention", ffpa_attn_func)
    q, k, v, _ = make(Shape(1, 1, 1, 5, 7, 261), HALF)  # a head dim that only SDPA takes
    mask = torch.rand(5, 7) > 0.3
    close(
        F.scaled_dot_product_attention(q, k, v, mask),
        SDPA.__wrapped__(q, k, v, mask) if hasattr(SDPA, "__wrapped__") else sdpa.native(q, k, v, mask),
    )


def test_sdpa_arguments_work_by_position_as_in_sdpa():
    q, k, v, _ = make(Shape(1, 2, 2, 7, 7, 264), HALF)
    close(ffpa_attn_func(q, k, v, None, 0.0, True), SDPA(q, k, v, None, 0.0, True))


def test_sdpa_as_backward_after_a_triton_forward_gives_only_the_gradients_asked_for():
    q, k, v, do = make(Shape(1, 1, 1, 9, 17, 264), HALF)
    k.requires_grad_()
    out = ffpa_attn_func(q, k, v, forward_backend="triton", backward_backend="sdpa")
    out.backward(do)
    assert q.grad is None
    assert v.grad is None
    close(k.grad, oracle.attention(q, k, v, grad_out=do).dk)


def test_sdpa_has_no_log_sum_exp_to_return():
    q, k, v, _ = make(Shape(1, 1, 1, 9, 17, 264), HALF)
    with pytest.raises(NotImplementedError, match="return_lse"):
        ffpa_attn_func(q, k, v, backend="sdpa", return_lse=True)


def test_without_keys_the_fallback_gives_zeros_connected_to_autograd():
    q, k, v, do = make(Shape(2, 4, 2, 5, 0, 264), HALF)
    q, k, v = leaves(q, k, v)
    out = sdpa.fallback(q, k, v, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), do)
    assert (out == 0).all()
    assert not grads[0].any()
    assert grads[1].shape == k.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_fp32_biases_keep_their_steps_forward_and_backward(dtype):
    q, k, v, do = make(Shape(1, 2, 2, 33, 700, 512), dtype)
    bias = (0.5 * torch.arange(700.0)).expand(33, 700).clone()
    bias[0, 5:] = -math.inf
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    reference = SDPA(*exact, attn_mask=bias.double())
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ffpa_attn_func(*mine, attn_mask=bias, backend="sdpa")
    assert ((out - reference).norm() / reference.norm()).item() < 1e-2
    grads = torch.autograd.grad(out, mine, do)
    for grad, wanted in zip(grads, torch.autograd.grad(reference, exact, do.double()), strict=True):
        assert ((grad - wanted).norm() / wanted.norm()).item() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_row_of_fp32_minimum_hides_no_key(dtype):
    q, k, v, _ = make(Shape(1, 1, 1, 3, 40, 512), dtype)
    out = ffpa_attn_func(q * 0, k, v, attn_mask=torch.full((3, 40), torch.finfo(torch.float32).min), backend="sdpa")
    close(out, v.mean(2, keepdim=True).expand_as(out), 1e-2)


@pytest.mark.parametrize("number", [np.float32(0), np.int64(0), torch.tensor(0.0)], ids=lambda x: type(x).__name__)
def test_dropout_may_be_any_number_that_sdpa_takes(number):
    q, k, v, _ = make(Shape(1, 1, 1, 5, 7, 264), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, None, number), SDPA(q, k, v))
        assert explain(q, k, v, None, number).error is None
