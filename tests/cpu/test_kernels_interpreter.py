"""The Triton kernels through the interpreter, in fp16, against the oracle (interpreted bf16 products are wrong)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ffpa_jit import ffpa_attn_backward, ffpa_attn_func
from tests import oracle
from tests.cases.dense import CAUSAL, PLAIN, SCORE_ORDERS, SMALL, STEPS, STRIDED, attend, run_and_check
from tests.cases.shapes import EMPTY, LAYOUTS, Shape, gemma_like, late_maximum, leaves, make, tensor

pytest.importorskip("triton")

HALF = torch.float16


@pytest.mark.parametrize("shape", SMALL.matrix, ids=str)
def test_forward_and_backward_match_the_oracle(shape):
    run_and_check(shape, *make(shape, HALF))


@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("shape", SMALL.strided, ids=str)
def test_any_strides_go_in(shape, layout):
    q, k, v, do = make(shape, HALF, layout=layout)
    out, _, grads = run_and_check(shape, q, k, v, do)
    assert out.stride() == torch.empty_like(q).stride()
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.stride() == torch.empty_like(x).stride()


def test_each_tensor_may_have_its_own_layout():
    shape = Shape(2, 4, 2, 17, 40, 264)
    q, k, v, _ = make(shape, HALF)
    q = tensor("bshd", 2, 4, 17, 264, dtype=HALF)
    k = tensor("last_stride", 2, 2, 40, 264, dtype=HALF)
    v = tensor("sliced", 2, 2, 40, 264, dtype=HALF)
    run_and_check(shape, q, k, v, tensor("bshd", 2, 4, 17, 264, dtype=HALF))


@pytest.mark.parametrize("expanded", ["sum", "row", "head"])
def test_an_expanded_output_gradient_is_read_by_its_strides(expanded):
    shape = Shape(1, 2, 2, 33, 33, 320)
    q, k, v, _ = make(shape, HALF)
    do = {
        "sum": torch.ones((), dtype=HALF),
        "row": torch.randn(320, dtype=HALF),
        "head": torch.randn(1, 1, 33, 320, dtype=HALF),
    }[expanded].expand(1, 2, 33, 320)
    run_and_check(shape, q, k, v, do)


def test_key_and_value_may_be_one_tensor():
    shape = Shape(1, 2, 1, 33, 65, 512)
    q, k, _, do = make(shape, HALF)
    q, k = leaves(q, k)
    out, lse = attend(shape, q, k, k)
    dq, dk = torch.autograd.grad(out, (q, k), do)
    oracle.check(q, k, k, out=out, lse=lse, grads=(dq, None, None), grad_out=do)
    exact = oracle.attention(q, k, k, grad_out=do)
    assert oracle.relative_error(dk, exact.dk + exact.dv) < 2e-3


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_tensors_give_empty_or_zero_results(shape):
    q, k, v, do = make(shape, HALF)
    q, k, v = leaves(q, k, v)
    out, lse = attend(shape, q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), do)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.shape == q.shape[:3]
    assert torch.isneginf(lse).all()
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()


@pytest.mark.parametrize("order", SCORE_ORDERS)
@pytest.mark.parametrize("shape", SMALL.any_order, ids=str)
def test_scores_of_any_order_stay_exact(shape, order):
    q, k, v, do = make(shape, HALF)
    run_and_check(shape, q, k, v, do, scale=order * shape.head_dim**-0.5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SMALL.late_maximum, ids=str)
def test_rows_whose_maximum_moves_late_stay_exact(shape, step):
    run_and_check(shape, *late_maximum(shape, HALF, step=step))


@pytest.mark.parametrize("shift", [-128.0, 128.0])
def test_scores_far_from_zero_stay_finite(shift):
    shape = Shape(1, 1, 1, 17, 130, 320)
    q, k, v, do = make(shape, HALF)
    q[..., 0], k[..., 0] = 16.0, shift / 16 * 320**0.5
    run_and_check(shape, q, k, v, do)


@pytest.mark.parametrize("shape", SMALL.gemma_like, ids=str)
def test_gemma_like_inputs_with_scale_one_stay_exact(shape):
    run_and_check(shape, *gemma_like(shape, HALF), scale=1.0)


@pytest.mark.parametrize("scale", [0.0, -0.05])
def test_the_scale_is_taken_as_given(scale):
    shape = Shape(1, 1, 1, 33, 40, 264)
    run_and_check(shape, *make(shape, HALF), scale=scale)


@pytest.mark.parametrize("size", [2.0**12, 2.0**-12])
def test_large_and_small_output_gradients_keep_their_precision(size):
    shape = Shape(1, 1, 1, 33, 140, 264)
    q, k, v, do = make(shape, HALF)
    run_and_check(shape, q, k, v, do * size)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_beyond_the_last_key_or_row_never_leaks(is_causal):
    def window(heads: int, length: int):
        store = torch.full((1, heads, 256, 320), math.nan, dtype=HALF)
        store[:, :, :length] = torch.randn(1, heads, length, 320)
        return store[:, :, :length]

    run_and_check(
        Shape(1, 2, 1, 100, 131, 320, is_causal), window(2, 100), window(1, 131), window(1, 131), window(2, 100)
    )


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_rows_with_one_key_have_query_gradients_of_zero_however_they_are_computed(softcap):
    """dS of such a row is 0, or dlse, exactly: its output is its value."""
    shape = Shape(1, 2, 1, 70, 70, 264, True)
    q, k, v, do = make(shape, HALF)
    inputs = leaves(q, k, v)
    out, lse = attend(shape, *inputs, softcap=softcap)
    by_autograd = torch.autograd.grad(out, inputs, do)
    merged = ffpa_attn_backward(
        do, q, k, v, out.detach(), lse.detach(), is_causal=True, enable_gqa=True, softcap=softcap, backend="triton"
    )
    for dq, _, _ in (by_autograd, merged):
        assert (dq[:, :, 0] == 0).all()
        assert (dq[:, :, 1] != 0).any()


def test_nan_in_an_input_reaches_the_output():
    shape = Shape(1, 1, 1, 17, 17, 264)
    q, k, v, _ = make(shape, HALF)
    q[0, 0, 3] = math.nan
    out, _ = attend(shape, q, k, v)
    assert out[0, 0, 3].isnan().all()
    assert not out[0, 0, [2, 4]].isnan().any()


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv"])
def test_only_the_gradients_asked_for_are_computed(needs):
    shape = Shape(1, 3, 1, 33, 65, 264, True)
    q, k, v, do = make(shape, HALF)
    for name, x in zip("qkv", (q, k, v), strict=True):
        x.requires_grad_(name in needs)
    out, lse = attend(shape, q, k, v)
    out.backward(do)
    assert [x.grad is not None for x in (q, k, v)] == [name in needs for name in "qkv"]
    oracle.check(q, k, v, out=out, lse=lse, grads=(q.grad, k.grad, v.grad), grad_out=do, is_causal=True)


@pytest.mark.parametrize("shape", [PLAIN, CAUSAL], ids=str)
def test_the_gradient_of_the_log_sum_exp_is_honoured(shape):
    q, k, v, do = make(shape, HALF)
    run_and_check(shape, q, k, v, do, grad_lse=torch.randn(do.shape[:3]))


def test_the_log_sum_exp_alone_may_be_differentiated():
    shape = Shape(1, 1, 1, 17, 33, 264)
    q, k, v, do = make(shape, HALF)
    q, k, v = leaves(q, k, v)
    _, lse = attend(shape, q, k, v)
    grad_lse = torch.randn_like(lse)
    grads = torch.autograd.grad(lse, (q, k, v), grad_lse, allow_unused=True)
    exact = oracle.attention(q, k, v, grad_out=torch.zeros_like(do), grad_lse=grad_lse)
    assert oracle.relative_error(grads[0], exact.dq) < 2e-3
    assert oracle.relative_error(grads[1], exact.dk) < 2e-3
    assert grads[2] is None or not grads[2].any()


@pytest.mark.parametrize("megabytes", ["0.6", "0.8"])
@pytest.mark.parametrize(
    "shape", [Shape(2, 2, 2, 140, 300, 264), Shape(1, 4, 2, 140, 270, 264, True), Shape(1, 3, 1, 1, 500, 264)], ids=str
)
def test_a_small_workspace_changes_the_chunks_not_the_result(monkeypatch, shape, megabytes):
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", megabytes)
    run_and_check(shape, *make(shape, HALF), grad_lse=torch.randn(shape.batch, shape.heads_q, shape.len_q))


def test_chunks_of_keys_agree_when_the_maximum_moves_between_them(monkeypatch):
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "0.6")
    shape = Shape(1, 1, 1, 130, 400, 264)
    run_and_check(shape, *late_maximum(shape, HALF, step=25))


@pytest.mark.parametrize("len_q", [9, 130])
def test_a_workspace_too_small_for_one_row_of_tiles_is_done_without(monkeypatch, len_q):
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "0.01")
    shape = Shape(1, 2, 1, len_q, 130, 264)
    run_and_check(shape, *make(shape, HALF))


def test_repeated_calls_give_the_same_bits():
    q, k, v, do = make(CAUSAL, HALF)
    first, second = (run_and_check(CAUSAL, q, k, v, do) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


def test_saved_tensors_are_not_changed():
    q, k, v, do = make(CAUSAL, HALF)
    copies = [x.clone() for x in (q, k, v, do)]
    run_and_check(CAUSAL, q, k, v, do)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, do), copies, strict=True))


lengths = st.sampled_from([1, 15, 33, 128, 129])


@settings(
    max_examples=24, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(
    heads=st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]),
    len_q=lengths,
    extra=st.sampled_from([0, 1, 40, -1]),
    head_dim=st.sampled_from([264, 272, 320, 384, 520]),
    is_causal=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    order=st.sampled_from([1, 30, 3000]),
    with_grad_lse=st.booleans(),
    megabytes=st.sampled_from(["0.8", "512"]),
)
def test_options_cross_freely(heads, len_q, extra, head_dim, is_causal, layouts, order, with_grad_lse, megabytes):
    len_kv = max(0, len_q + (abs(extra) if is_causal else extra))
    shape = Shape(1, *heads, len_q, len_kv, head_dim, is_causal)
    torch.manual_seed(1)
    q = tensor(layouts[0], 1, heads[0], len_q, head_dim, dtype=HALF)
    k = tensor(layouts[1], 1, heads[1], len_kv, head_dim, dtype=HALF)
    v = tensor(layouts[2], 1, heads[1], len_kv, head_dim, dtype=HALF)
    do = tensor(layouts[3], 1, heads[0], len_q, head_dim, dtype=HALF)
    grad_lse = torch.randn(1, heads[0], len_q) if with_grad_lse else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFPA_JIT_WORKSPACE_MB", megabytes)
        run_and_check(shape, q, k, v, do, grad_lse, scale=order * head_dim**-0.5)


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_storage_that_starts_between_16_byte_boundaries_goes_in(name):
    shape = Shape(1, 1, 1, 9, 9, 264)
    tensors = dict(zip(("q", "k", "v", "do"), make(shape, torch.float16), strict=True))
    store = torch.empty(tensors[name].numel() + 1, dtype=torch.float16)
    tensors[name] = store[1:].view(tensors[name].shape).copy_(tensors[name])
    assert tensors[name].is_contiguous()
    assert tensors[name].data_ptr() % 16
    run_and_check(shape, *tensors.values())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["v", "do"])
def test_one_bad_value_spoils_no_other_batch(where, bad):
    shape = Shape(2, 2, 1, 9, 9, 264)
    q, k, v, do = make(shape, torch.float16)
    (v if where == "v" else do)[0, 0, 3, 5] = bad
    grads = {}
    for part in (slice(0, 2), slice(1, 2)):
        leaves = [t[part].clone().requires_grad_() for t in (q, k, v)]
        out = ffpa_attn_func(*leaves, enable_gqa=True)
        grads[part.start] = torch.autograd.grad(out, leaves, do[part])
    for both, alone in zip(grads[0], grads[1], strict=True):
        assert torch.equal(both[1:], alone)
        assert alone.abs().sum() > 0


def test_small_gradients_keep_their_precision_beside_large_ones():
    shape = Shape(2, 2, 2, 64, 64, 264)
    q, k, v, do = make(shape, torch.float16)
    do[1] *= 2.0**-14
    do[0] *= 2.0**6
    run_and_check(shape, q, k, v, do)


def test_lazily_negated_tensors_are_read_with_their_sign():
    shape = Shape(1, 1, 1, 9, 9, 264)
    q, k, v, do = make(shape, torch.float16)
    assert torch.equal(ffpa_attn_func(torch._neg_view(q), k, v), ffpa_attn_func(-q, k, v))
    q.requires_grad_()
    out = ffpa_attn_func(q, k, v)
    (lazy,) = torch.autograd.grad(out, q, torch._neg_view(do), retain_graph=True)
    assert torch.equal(lazy, torch.autograd.grad(out, q, -do)[0])


def test_batched_output_gradients_give_one_gradient_each():
    shape = Shape(1, 1, 1, 9, 9, 264)
    q, k, v, _ = make(shape, torch.float16)
    q.requires_grad_()
    out = ffpa_attn_func(q, k, v)
    many = torch.randn(3, *out.shape, dtype=torch.float16)
    (batched,) = torch.autograd.grad(out, q, many, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(out, q, g, retain_graph=True)[0] for g in many]
    assert torch.equal(batched, torch.stack(single))


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "expanded"])
@pytest.mark.parametrize("shape", [PLAIN, CAUSAL], ids=str)
def test_pointers_serve_where_the_hardware_has_no_tma(monkeypatch, shape, layout):
    monkeypatch.setattr("ffpa_jit.triton.dense.uses_tma", lambda arch: False)
    run_and_check(shape, *make(shape, HALF, layout=layout))


@pytest.mark.parametrize("tma", [True, False])
def test_a_split_key_side_adds_up(monkeypatch, tma):
    """Many processors and few key tiles: dK and dV are float32 sums of several programs."""
    monkeypatch.setattr("ffpa_jit.triton.dense.uses_tma", lambda arch: tma)
    monkeypatch.setattr("ffpa_jit.triton.dense.processors", lambda device: 132)
    shape = Shape(1, 4, 1, 150, 150, 264, True)
    run_and_check(shape, *make(shape, HALF))
