"""The oracle itself, against autograd in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests import oracle
from tests.shapes import EMPTY, Shape, make


@pytest.mark.parametrize(
    "shape", [Shape(2, 6, 2, 9, 13, 16, True), Shape(1, 4, 4, 7, 5, 8), Shape(1, 3, 1, 5, 1, 8)], ids=str
)
def test_the_oracle_agrees_with_autograd_of_sdpa_in_float64(shape, monkeypatch):
    monkeypatch.setattr(oracle, "BUDGET", 40)  # forces chunks of heads
    q, k, v, do = make(shape, torch.float64)
    dlse = torch.randn(do.shape[:3], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    group = shape.heads_q // shape.heads_kv
    ke, ve = (t.repeat_interleave(group, 1) for t in (k, v))
    s = q @ ke.mT * 0.3
    if shape.is_causal:
        s = s.masked_fill(~oracle.visible(torch.arange(shape.len_q), shape.len_q, shape.len_kv), -math.inf)
    out, lse = s.softmax(-1) @ ve, s.logsumexp(-1)
    expected = torch.autograd.grad((out, lse), leaves, (do, dlse))
    got = oracle.attention(q, k, v, is_causal=shape.is_causal, scale=0.3, grad_out=do, grad_lse=dlse)
    for mine, theirs in zip((got.out, got.lse, got.dq, got.dk, got.dv), (out, lse, *expected), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-10, atol=1e-10)
    if not shape.is_causal:
        torch.testing.assert_close(got.out, F.scaled_dot_product_attention(q, ke, ve, scale=0.3))


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_the_oracle_takes_empty_tensors(shape):
    q, k, v, do = make(shape, torch.float16)
    got = oracle.attention(q, k, v, is_causal=shape.is_causal, grad_out=do)
    assert got.out.shape == do.shape
    assert (got.out == 0).all()
    assert torch.isneginf(got.lse).all()
    assert got.dq.shape == q.shape
    assert got.dk.shape == k.shape
    assert got.dv.shape == v.shape


def test_rows_without_keys_give_zero_and_minus_infinity():
    q, k, v, do = make(Shape(1, 1, 1, 5, 2, 8, True), torch.float64)
    got = oracle.attention(q, k, v, is_causal=True, grad_out=do)
    assert (got.out[0, 0, :3] == 0).all()
    assert (got.dq[0, 0, :3] == 0).all()
    assert torch.isneginf(got.lse[0, 0, :3]).all()
    assert torch.isfinite(got.lse[0, 0, 3:]).all()


def test_a_nan_never_passes():
    x = torch.ones(1, 1, 4, 4)
    bad = x.clone()
    bad[0, 0, 1, 1] = float("nan")
    assert oracle.relative_error(bad, x) == math.inf
    with pytest.raises(AssertionError):
        oracle.assert_close("x", bad, x, x + 1)
    with pytest.raises(AssertionError):
        oracle.assert_close("x", torch.full_like(x, math.inf), x, x)


@pytest.mark.parametrize("what", ["row", "element", "scale", "tail"])
def test_the_bound_catches_small_mistakes(what):
    shape = Shape(1, 2, 2, 200, 200, 320)
    q, k, v, _ = make(shape, torch.float16)
    out = oracle.attention(q, k, v).out.half()
    oracle.check(q, k, v, out=out)
    if what == "row":
        out[0, 1, 77] = out[0, 1, 78]
    elif what == "element":
        out[0, 1, 77, 5] += 0.01
    elif what == "scale":
        out *= 1.002
    else:
        out = oracle.attention(q, k[:, :, :-1], v[:, :, :-1]).out.half()
    with pytest.raises(AssertionError):
        oracle.check(q, k, v, out=out)
