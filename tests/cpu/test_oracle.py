"""The oracle itself, against autograd in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests import oracle, philox
from tests.cases.shapes import EMPTY, LENGTHS, PATTERNS, MaskKind, Shape, make, make_mask, make_packed, pack


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


def by_autograd(q, k, v, do, dlse, *, scale, mask=None, kept=None, window=(-1, -1), softcap=0.0):
    """(out, lse, dq, dk, dv[, dmask]) of whole float64 matrices; every row must see a key."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    if mask is not None and mask.dtype != torch.bool:
        leaves.append(mask.detach().double().requires_grad_())
        mask = leaves[3]
    a, b, c = leaves[:3]
    group, len_q, len_kv = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    s = a @ b.repeat_interleave(group, 1).mT * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    distance = torch.arange(len_kv) - torch.arange(len_q)[:, None] - (len_kv - len_q)
    if window[0] >= 0:
        s = s.masked_fill(distance < -window[0], -math.inf)
    if window[1] >= 0:
        s = s.masked_fill(distance > window[1], -math.inf)
    out = (s.softmax(-1) * (1.0 if kept is None else kept)) @ c.repeat_interleave(group, 1)
    lse = s.logsumexp(-1)
    return out, lse, *torch.autograd.grad((out, lse), leaves, (do.double(), dlse))


@pytest.mark.parametrize("what", ["none", "bool", "half", "fp32"])
@pytest.mark.parametrize("dims", ["bhqk", "k", "q", "hq", "bk", ""])
@pytest.mark.parametrize(
    ("window", "softcap", "dropout_p"),
    [((-1, -1), 0.0, 0.0), ((-1, 0), 1.5, 0.0), ((3, 2), 0.0, 0.4), ((4, -1), 0.7, 0.2)],
    ids=str,
)
def test_every_option_agrees_with_autograd_in_float64(what, dims, window, softcap, dropout_p, monkeypatch):
    monkeypatch.setattr(oracle, "BUDGET", 40)  # forces chunks of heads
    shape = Shape(2, 6, 2, 9, 13, 16)
    q, k, v, do = make(shape, torch.float64)
    dlse = torch.randn(do.shape[:3], dtype=torch.float64)
    mask = None
    if what != "none":
        mask = make_mask(MaskKind(what, dims, "values" if what == "half" else "random"), shape, torch.float64)
        sees = (torch.arange(13) - torch.arange(9)[:, None]) == 4  # every row its own key
        mask = mask | sees if what == "bool" else torch.where(mask.isneginf() & (mask.shape[3] == 1), 0, mask)
        if what == "fp32" and mask.shape[3] == 13:
            mask = torch.where(sees & mask.isneginf() if mask.shape[2] == 9 else mask.isneginf(), -1.0, mask)
    kept = philox.kept(torch.tensor([5, 6]), (2, 6, 9, 13), dropout_p) if dropout_p else None
    expected = by_autograd(q, k, v, do, dlse, scale=0.3, mask=mask, kept=kept, window=window, softcap=softcap)
    got = oracle.attention(
        q, k, v, attn_mask=mask, kept=kept, scale=0.3, grad_out=do, grad_lse=dlse, softcap=softcap,
        is_causal=window == (-1, 0), window=window if window != (-1, 0) else None,
    )  # fmt: skip
    mine = (got.out, got.lse, got.dq, got.dk, got.dv, *([] if got.dmask is None else [got.dmask]))
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dmask"), mine, expected, strict=False):
        assert a.shape == b.shape, name
        torch.testing.assert_close(a, b.detach(), rtol=1e-10, atol=1e-10, msg=name)
    assert len(mine) == len(expected)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("what", ["bool", "fp32"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_agree_with_the_math_path_of_sdpa(what, pattern, is_causal):
    shape = Shape(2, 2, 2, 9, 9, 16)
    q, k, v, do = make(shape, torch.float64)
    mask = make_mask(MaskKind(what, "bhqk", pattern), shape, torch.float32)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    both = mask
    if what != "bool":
        both = mask.double().requires_grad_()
        leaves.append(both)
    lower = torch.ones(9, 9, dtype=torch.bool).tril() if is_causal else torch.ones(9, 9, dtype=torch.bool)
    both = both & lower if what == "bool" else both.masked_fill(~lower, -math.inf)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*leaves[:3], both)
    expected = (out, *torch.autograd.grad(out, leaves, do))
    got = oracle.attention(q, k, v, attn_mask=mask, is_causal=is_causal, grad_out=do)
    results = (got.out, got.dq, got.dk, got.dv, got.dmask)
    for mine, theirs in zip(results, expected, strict=False):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-10, atol=1e-10)
    assert torch.equal(torch.isneginf(got.lse), torch.isneginf(both).all(-1) if what != "bool" else ~both.any(-1))


def test_a_mask_that_is_an_expanded_view_has_a_gradient_for_each_of_its_elements():
    shape = Shape(2, 2, 1, 5, 7, 8)
    q, k, v, do = make(shape, torch.float64)
    row = torch.randn(1, 1, 1, 7, dtype=torch.float64)
    whole = oracle.attention(q, k, v, attn_mask=row.expand(2, 2, 5, 7), grad_out=do).dmask
    assert whole.shape == (2, 2, 5, 7)
    for view in (row, row[0, 0], row[0, 0, 0]):
        got = oracle.attention(q, k, v, attn_mask=view, grad_out=do).dmask
        torch.testing.assert_close(got, whole.sum((0, 1, 2)).view(view.shape))


@pytest.mark.parametrize("what", ["half", "fp32"])
def test_minimum_rows_weigh_their_keys_equally(what):
    shape = Shape(1, 1, 1, 4, 6, 8)
    q, k, v, do = make(shape, torch.bfloat16)
    mask = torch.zeros(4, 6, dtype=torch.float32 if what == "fp32" else torch.bfloat16)
    mask[1], mask[2, :4] = torch.finfo(mask.dtype).min, torch.finfo(mask.dtype).min
    mask[3] = -math.inf
    for rounding in (None, torch.bfloat16):
        got = oracle.attention(q, k, v, attn_mask=mask, grad_out=do, rounding=rounding)
        torch.testing.assert_close(got.out[0, 0, 1], v[0, 0].double().mean(0), rtol=1e-2, atol=1e-2)
        assert got.dq[0, 0, 1].any()
        assert (got.lse[0, 0, 1] < -1e29) & torch.isfinite(got.lse[0, 0, 1])
        assert torch.isneginf(got.lse[0, 0, 3])
        assert not got.dq[0, 0, 3].any()
    causal = oracle.attention(q, k, v, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(causal.out[0, 0, 1], v[0, 0, :4].double().mean(0))


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_are_each_their_own_attention(name, is_causal):
    packed = pack(name, 4, 2, 16, slack=2)
    q, k, v, do, cu_q, cu_k = make_packed(packed, torch.float64)
    assert q.shape[0] == cu_q[-1] + 2
    dlse = torch.randn(4, q.shape[0], dtype=torch.float64)
    got = oracle.varlen_attention(q, k, v, cu_q, cu_k, is_causal=is_causal, grad_out=do, grad_lse=dlse, softcap=2.0)
    first_q = first_k = 0
    for len_q, len_k in zip(packed.lens_q, packed.lens_k, strict=True):
        rows, keys = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        first_q, first_k = rows.stop, keys.stop
        a, b, c, g = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys], do[rows]))
        one = oracle.attention(a, b, c, is_causal=is_causal, grad_out=g, grad_lse=dlse[None, :, rows], softcap=2.0)
        for whole, part in (
            (got.out[rows], one.out), (got.dq[rows], one.dq), (got.dk[keys], one.dk), (got.dv[keys], one.dv),
        ):  # fmt: skip
            assert torch.equal(whole.transpose(0, 1)[None], part)
        assert torch.equal(got.lse[None, :, rows], one.lse)
    assert not got.out[-2:].any()
    assert not got.dk[-2:].any()
    results = {"out": got.out, "lse": got.lse.float(), "grads": (got.dq, got.dk, got.dv), "grad_out": do}
    oracle.check_varlen(q, k, v, cu_q, cu_k, is_causal=is_causal, grad_lse=dlse, softcap=2.0, **results)
    for bad in (got.out, got.dk):
        if bad.any():
            right = bad.clone()
            bad[bad.abs().sum((1, 2)).argmax()] *= 1.1
            with pytest.raises(AssertionError):
                oracle.check_varlen(q, k, v, cu_q, cu_k, is_causal=is_causal, grad_lse=dlse, softcap=2.0, **results)
            bad.copy_(right)
    got.dq[-1, 0, 0] = 1e-9
    with pytest.raises(AssertionError, match="rows of no sequence"):
        oracle.check_varlen(q, k, v, cu_q, cu_k, is_causal=is_causal, grad_lse=dlse, softcap=2.0, **results)


def test_the_dropout_stream_may_be_asked_for_a_part():
    rng = torch.tensor([-7, 2**62 + 9])
    whole = philox.kept(rng, (2, 3, 40, 70), 0.3)
    part = philox.kept(rng, (1, 2, 5, 70), 0.3, first_row=30, first_line=4)
    assert torch.equal(part[0], whole[1, 1:3, 30:35])


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


LOG2E = math.log2(math.e)

OPTIONS = {
    "plain": {},
    "mask": {"what": "half", "dims": "bhqk"},
    "key_mask": {"what": "fp32", "dims": "bk"},
    "head_mask": {"what": "fp32", "dims": "h"},
    "low_mask": {"what": "half", "dims": "qk", "pattern": "low"},
    "minimum": {"what": "fp32", "dims": "qk", "pattern": "minimum"},
    "bool": {"what": "bool", "dims": "qk", "pattern": "empty_rows"},
    "dropout": {"dropout_p": 0.3},
    "softcap": {"softcap": 2.0},
    "window": {"window": (30, 5)},
}


def as_a_kernel_does(q, k, v, do, dlse, *, attn_mask=None, kept=None, window=None, softcap=0.0):
    """Results as another right kernel rounds them: scores in log2 units, probabilities normalised before P V."""
    dtype, group, scale = q.dtype, q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    a, b, c, g = (x.float() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), do))
    slope = 1.0
    s = a @ b.mT * (scale * LOG2E)
    if softcap:
        tanh = torch.tanh(s / (softcap * LOG2E))
        s, slope = tanh * (softcap * LOG2E), 1 - tanh * tanh
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask.float() * LOG2E
        if attn_mask.dtype != torch.bool:  # finfo.min overflows in log2 units
            s = torch.where((attn_mask > -math.inf) & (s < -1e30), -1e30, s)
    if window is not None:
        s = s.masked_fill(~oracle.visible(torch.arange(q.shape[2]), q.shape[2], k.shape[2], window), -math.inf)
    top = s.amax(-1, keepdim=True)
    total = torch.exp2(s - top.clamp_min(-3e38)).sum(-1, keepdim=True)
    p = torch.exp2(s - top.clamp_min(-3e38)) / total.clamp_min(1e-30)
    lse = torch.where(top <= -1e30, 2 * top, (top + torch.log2(total)) / LOG2E)[..., 0]
    z = 1.0 if kept is None else kept.float()
    out = ((p * z).to(dtype).float() @ c).to(dtype)
    dp = g @ c.mT * z
    ds = p * (dp - (g * out.float()).sum(-1, keepdim=True) + dlse[..., None])
    dx = (ds * slope * scale).to(dtype).float()
    dq = (dx @ b).to(dtype)
    dk, dv = (
        x.unflatten(1, (-1, group)).sum(2).to(dtype) for x in (dx.mT @ a, (p * z).to(dtype).float().mT @ g)
    )  # fmt: skip
    dmask = None
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        dmask = oracle.sum_to(ds.to(dtype).float(), attn_mask.shape).to(attn_mask.dtype)
    return out, lse, (dq, dk, dv), dmask


def rounded_results(name: str, dtype: torch.dtype, seed: int):
    """Inputs of `oracle.check` for an option, with results that a right kernel of another rounding may give."""
    options = dict(OPTIONS[name])
    shape = Shape(2, 4, 2, 60, 90, 264)
    q, k, v, do = make(shape, dtype, seed=seed)
    if "what" in options:
        kind = MaskKind(options.pop("what"), options.pop("dims"), options.pop("pattern", "random"))
        options["attn_mask"] = make_mask(kind, shape, dtype, seed=seed)
    if "dropout_p" in options:
        options["kept"] = philox.kept(torch.tensor([seed, 3]), (2, 4, 60, 90), options.pop("dropout_p"))
    dlse = torch.randn(do.shape[:3])
    out, lse, grads, dmask = as_a_kernel_does(q, k, v, do, dlse, **options)
    results = {"out": out, "lse": lse, "grads": grads, "grad_out": do, "grad_lse": dlse}
    if dmask is not None:
        results["grad_mask"] = dmask
    return (q, k, v), results, options


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_bound_allows_other_draws_of_the_same_roundings(name, dtype):
    for seed in range(3):
        inputs, results, options = rounded_results(name, dtype, seed)
        oracle.check(*inputs, **results, **options)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("which", ["out", "lse", "dq", "dk", "dv", "grad_mask"])
@pytest.mark.parametrize("how", ["scale", "nan", "row"])
def test_the_bound_of_every_option_catches_small_mistakes(name, which, how):
    inputs, results, options = rounded_results(name, torch.float16, 0)
    if which == "grad_mask" and which not in results:
        pytest.skip("no mask to differentiate")
    grads = dict(zip(("dq", "dk", "dv"), results["grads"], strict=True))
    wrong = (grads | results)[which]
    if how == "scale":  # minus 65504 is known to an eighth of a percent in fp32, and a sum over all cancels
        wrong.mul_({"low_mask": 1.3, "head_mask": 1.05}.get(name, 1.01))
    elif how == "nan":
        wrong.view(-1)[wrong.numel() // 3] = math.nan
    elif which == "grad_mask":
        wrong.view(-1)[0] += 0.5
    else:
        wrong[1, 2 if which in ("out", "dq", "lse") else 1, 7] *= -1.0 if which != "lse" else 1.0001
        wrong[1, 1, 8] *= -1.0 if which != "lse" else 1.0001
    with pytest.raises(AssertionError):
        oracle.check(*inputs, **results, **options)


def test_a_minimum_row_may_not_claim_an_ordinary_lse():
    inputs, results, options = rounded_results("minimum", torch.float16, 0)
    low = results["lse"] < -1e29
    assert low.any()
    results["lse"][low] = -3e38
    oracle.check(*inputs, **results, **options)
    for wrong in (-5.0, -math.inf, math.nan):
        results["lse"][low] = wrong
        with pytest.raises(AssertionError):
            oracle.check(*inputs, **results, **options)
