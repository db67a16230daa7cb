"""Failures that users of other attention libraries reported, scaled down to the interpreter; see the GPU twin.

Each test is named after the report's number in our survey and says what must happen instead.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ffpa_jit import (
    TritonBackend,
    ffpa_attn_backward,
    ffpa_attn_func,
    ffpa_attn_varlen_backward,
    ffpa_attn_varlen_func,
)
from tests import oracle
from tests.cases.options import VarlenCase, ring
from tests.cases.shapes import MaskKind, Packed, Shape, leaves, make, make_mask

pytest.importorskip("triton")

HALF = torch.float16


def attend(q, k, v, mask=None, memory=None, **options):
    options.setdefault("enable_gqa", q.shape[1] != k.shape[1])
    return ffpa_attn_func(q, k, v, mask, backend=TritonBackend(workspace_mb=memory), return_lse=True, **options)


def test_r02_head_dims_up_to_256_are_left_alone_and_512_runs_causal_with_grouped_heads():
    q, k, v, do = make(Shape(1, 8, 1, 10, 10, 512, True), HALF)
    rows = leaves(q, k, v)
    out, lse = attend(*rows, is_causal=True)
    grads = torch.autograd.grad(out, rows, do)
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do, is_causal=True)
    VarlenCase(Packed((4, 6), (4, 6), 8, 1, 512), is_causal=True).run(HALF)
    small = [x[..., :256].float() for x in (q, k, v)]
    assert torch.equal(
        ffpa_attn_func(*small, is_causal=True, enable_gqa=True),
        F.scaled_dot_product_attention(*small, is_causal=True, enable_gqa=True),
    )


def test_r06_queries_at_an_offset_attend_to_shards_of_the_keys_and_keys_past_the_horizon_get_zeros():
    q, k, v, do = make(Shape(1, 4, 2, 20, 90, 264), HALF)
    out, lse, grads = ring(q, k, v, do, [(0, 30), (30, 30), (30, 50), (50, 90)], 35)
    mask = torch.arange(90) <= 35 + torch.arange(20)[:, None]
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do, attn_mask=mask)
    assert not grads[1][:, :, 55:].any()
    assert not grads[2][:, :, 55:].any()
    # The same by slicing the keys, where is_causal says it without a mask.
    rows = leaves(q, k, v)
    out, lse = attend(rows[0], rows[1][:, :, :55], rows[2][:, :, :55], is_causal=True)
    grads = torch.autograd.grad(out, rows, do)
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do, attn_mask=mask)


def test_r06_packed_shards_of_the_keys_merge_as_well():
    q, k, v, do = make(Shape(1, 2, 1, 20, 90, 264), HALF)
    exact = oracle.attention(q, k, v, grad_out=do)
    rows, keys, values, grad, out = (x[0].transpose(0, 1) for x in (q, k, v, do, exact.out.half()))
    cu_q = torch.tensor([0, 20], dtype=torch.int32)
    parts = []
    for a, b in ((0, 30), (30, 90)):
        cu_k = torch.tensor([0, b - a], dtype=torch.int32)
        parts.append(
            ffpa_attn_varlen_backward(
                grad, rows, keys[a:b], values[a:b], out, exact.lse[0].float(), cu_q, cu_k, enable_gqa=True
            )
        )
    dq = parts[0][0].float() + parts[1][0].float()
    dk, dv = (torch.cat([part[i] for part in parts]) for i in (1, 2))
    grads = tuple(x.half().transpose(0, 1)[None] for x in (dq, dk, dv))
    oracle.check(q, k, v, out=exact.out.half(), grads=grads, grad_out=do)


def test_r06_a_shard_without_a_visible_key_gives_zero_and_minus_infinity_and_never_raises():
    q, k, v, do = make(Shape(1, 2, 1, 9, 20, 264), HALF)
    out, lse = attend(q, k, v, torch.zeros(9, 20, dtype=torch.bool))
    assert not out.any()
    assert torch.isneginf(lse).all()
    grads = ffpa_attn_backward(
        do, q, k, v, out, lse, attn_mask=torch.zeros(9, 20, dtype=torch.bool), enable_gqa=True, backend="triton"
    )
    assert not any(grad.any() for grad in grads)
    empty = ffpa_attn_backward(do, q, k[:, :, :0], v[:, :, :0], out, lse, enable_gqa=True, backend="triton")
    assert not empty[0].any()
    assert empty[1].shape == (1, 1, 0, 264)


@pytest.mark.parametrize("head_dim", [384, 512])
def test_r09_a_patched_sdpa_serves_the_head_dims_of_image_decoders(monkeypatch, head_dim):
    q, k, v, _ = make(Shape(1, 1, 1, 40, 40, head_dim), HALF)
    expected = F.scaled_dot_product_attention(q, k, v)
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    assert oracle.relative_error(F.scaled_dot_product_attention(q, k, v), expected) < 2e-3
    single = [x.float() for x in (q, k, v)]
    assert torch.equal(F.scaled_dot_product_attention(*single), torch.ops.aten.scaled_dot_product_attention(*single))


def test_r10_views_of_one_projection_go_in_as_they_are():
    x = torch.randn(1, 1, 131, 3 * 384, dtype=HALF)
    q, k, v = x.chunk(3, -1)
    assert not q.is_contiguous()
    out, lse = attend(q, k, v)
    oracle.check(q, k, v, out=out, lse=lse)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("what", ["bool", "half", "fp32"])
@pytest.mark.parametrize("memory", [None, 0])
def test_r13_all_false_rows_give_zero_output_and_gradients(memory, what, is_causal):
    shape = Shape(1, 2, 1, 33, 40, 264, is_causal)
    q, k, v, do = make(shape, HALF)
    mask = torch.ones(33, 40, dtype=torch.bool)
    mask[-1, :] = mask[7, :] = False
    if what != "bool":
        mask = torch.zeros(33, 40, dtype=HALF if what == "half" else torch.float32).masked_fill(~mask, -math.inf)
    rows = (*leaves(q, k, v), *([] if what == "bool" else [mask.requires_grad_()]))
    out, lse = attend(*rows[:3], mask, memory, is_causal=is_causal)
    grads = torch.autograd.grad((out, lse), rows, (do, torch.ones_like(lse)))
    for row in (7, 32):
        assert not out[:, :, row].any()
        assert torch.isneginf(lse[:, :, row]).all()
        assert not grads[0][:, :, row].any()
        assert what == "bool" or not grads[3][row].any()
    oracle.check(
        q, k, v, out=out, lse=lse, grads=grads[:3], grad_mask=grads[3] if what != "bool" else None, grad_out=do,
        grad_lse=torch.ones_like(lse), attn_mask=mask, is_causal=is_causal,
    )  # fmt: skip


@pytest.mark.parametrize("len_q", [1, 40])
@pytest.mark.parametrize("memory", [None, 0])
def test_r15_nan_beyond_the_last_key_never_leaks_through_a_mask(memory, len_q):
    shape = Shape(1, 2, 1, len_q, 131, 264)
    q, k, v, do = make(shape, HALF, layout="sliced")
    mask = make_mask(MaskKind("half", "bhqk", "random", "sliced"), shape, HALF)
    rows = (*leaves(q, k, v), mask.detach().requires_grad_())
    out, lse = attend(*rows, memory, window_size=(100, 3), softcap=9.0)
    grads = torch.autograd.grad(out, rows, do)
    oracle.check(
        q, k, v, out=out, lse=lse, grads=grads[:3], grad_mask=grads[3], grad_out=do, attn_mask=mask, window=(100, 3),
        softcap=9.0,
    )  # fmt: skip


@pytest.mark.parametrize("shape_of", ["head", "batch", "expanded"])
def test_r17_a_learnable_bias_gets_a_gradient_of_its_own_shape(shape_of):
    shape = Shape(2, 2, 2, 20, 33, 264)
    q, k, v, do = make(shape, HALF)
    sizes = {"head": (1, 2, 20, 33), "batch": (2, 1, 20, 33), "expanded": (20, 33)}[shape_of]
    bias = torch.randn(sizes, dtype=HALF, requires_grad=True)
    rows = leaves(q, k, v)
    mask = bias.expand(2, 2, 20, 33) if shape_of == "expanded" else bias
    out, _ = attend(*rows, mask)
    grads = torch.autograd.grad(out, (*rows, bias), do)
    assert grads[3].shape == bias.shape
    assert grads[3].dtype == bias.dtype
    oracle.check(q, k, v, out=out, grads=grads[:3], grad_mask=grads[3], grad_out=do, attn_mask=bias)


@pytest.mark.parametrize("len_q", [1, 3])
@pytest.mark.parametrize("shift", [-128.0, 128.0])
def test_r23_one_query_whose_scores_are_all_far_from_zero_has_finite_gradients(len_q, shift):
    q, k, v, do = make(Shape(1, 1, 1, len_q, 128, 264), HALF)
    q[..., 0], k[..., 0] = 16.0, shift / 16 * 264**0.5
    rows = leaves(q, k, v)
    out, lse = attend(*rows)
    grads = torch.autograd.grad(out, rows, do)
    assert ((lse - shift).abs() < 16).all()
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do)


def test_r24_scores_beyond_the_range_of_fp16_stay_finite():
    q, k, v, do = make(Shape(1, 1, 1, 40, 130, 512), HALF)
    q, k = q * 30, k * 30
    assert (q.float() @ k.float().mT).abs().max() > 65504
    rows = leaves(q, k, v)
    out, lse = attend(*rows)
    grads = torch.autograd.grad(out, rows, do)
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_r31_no_keys_at_all_give_zero_minus_infinity_and_zero_gradients(heads):
    q, k, v, do = make(Shape(2, *heads, 5, 0, 264), HALF)
    rows = leaves(q, k, v)
    out, lse = attend(*rows)
    grads = torch.autograd.grad(out, rows, do)
    assert not out.any()
    assert torch.isneginf(lse).all()
    assert not grads[0].any()
    assert grads[1].shape == k.shape
    for is_causal in (False, True):
        VarlenCase(Packed((3, 2), (0, 0), *heads, 264), is_causal=is_causal, with_lse=True).run(HALF)
        VarlenCase(Packed((3, 2), (0, 4), *heads, 264), is_causal=is_causal, with_lse=True).run(HALF)


def test_r32_an_empty_batch_works_under_autograd_and_compile():
    q = torch.empty(0, 10, 3952, 512, dtype=HALF)
    rows = leaves(q, q, q)

    def step(q, k, v):
        return ffpa_attn_func(q, k, v, is_causal=True, backend="triton")

    torch.compiler.reset()
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        out = call(*rows)
        assert out.shape == q.shape
        assert all(grad.shape == q.shape for grad in torch.autograd.grad(out.sum(), rows))


@pytest.mark.parametrize("is_causal", [False, True])
def test_r33_one_query_at_most_and_none_in_some_sequences(is_causal):
    VarlenCase(Packed((0, 1, 0, 1), (0, 3, 0, 5), 2, 1, 264), is_causal=is_causal, with_lse=True).run(HALF)


def test_r35_causal_is_aligned_at_the_end_and_rows_before_the_first_key_are_empty():
    q, k, v, _ = make(Shape(1, 1, 1, 2, 5, 264), HALF)
    out, lse = attend(q, k, v, is_causal=True)
    mask = torch.tensor([[True, True, True, True, False], [True] * 5])
    oracle.check(q, k, v, out=out, lse=lse, attn_mask=mask)
    long, short = torch.randn(5, 1, 264, dtype=HALF), torch.randn(2, 1, 264, dtype=HALF)
    with pytest.raises(ValueError, match="aligned to the end"):
        ffpa_attn_func(*(x.transpose(0, 1)[None] for x in (long, short, short)), is_causal=True)
    cu_q, cu_k = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    out, lse = ffpa_attn_varlen_func(long, short, short, cu_q, cu_k, 5, 2, causal=True, return_lse=True)
    assert not out[:3].any()
    assert torch.isneginf(lse[:, :3]).all()
    assert torch.equal(out[3], short[0])  # the fourth query sees one key


def test_r36_both_meanings_of_a_short_query_block_can_be_said():
    """A cache filled to its end means bottom-right, one that is larger than what it holds means top-left."""
    q, k, v, _ = make(Shape(1, 4, 1, 4, 300, 264), HALF)
    out, lse = attend(q, k, v, is_causal=True)
    oracle.check(q, k, v, out=out, lse=lse, is_causal=True)
    mask = torch.arange(300) <= torch.arange(4)[:, None]
    out, lse = attend(q, k, v, mask)
    first = [x[:, :, :4] for x in (k, v)]
    oracle.check(q, k, v, out=out, lse=lse, attn_mask=mask)
    assert oracle.relative_error(out, attend(q, *first, is_causal=True)[0]) < 2e-3


@pytest.mark.parametrize("kind", ["one", "split"])
@pytest.mark.parametrize("is_varlen", [False, True])
def test_r37_output_gradients_that_are_views_are_read_by_their_strides(kind, is_varlen):
    q, k, v, _ = make(Shape(1, 2, 2, 20, 20, 264), HALF)
    rows = leaves(*((x[0].transpose(0, 1).contiguous() for x in (q, k, v)) if is_varlen else (q, k, v)))
    cu = torch.tensor([0, 20], dtype=torch.int32)
    out = ffpa_attn_varlen_func(*rows, cu) if is_varlen else attend(*rows, torch.ones(20, 20, dtype=torch.bool))[0]
    if kind == "one":
        do = torch.ones((), dtype=HALF).expand_as(out)
    else:
        do = torch.randn(*out.shape[:-1], 3 * 264, dtype=HALF).split(264, -1)[1]
    grads = torch.autograd.grad(out, rows, do)
    if is_varlen:
        out, do, *grads = (x.transpose(0, 1)[None] for x in (out, do, *grads))
    oracle.check(q, k, v, out=out, grads=tuple(grads), grad_out=do)


@pytest.mark.parametrize("which", ["last_stride", "bshd", "sliced"])
def test_r39_r40_each_input_may_have_strides_of_its_own(which):
    shape = Shape(1, 2, 2, 20, 33, 264)
    other = make(shape, HALF, layout=which)
    for i in range(3):
        q, k, v, do = make(shape, HALF)
        rows = leaves(*(other[j] if j == i else x for j, x in enumerate((q, k, v))))
        mask = make_mask(MaskKind("fp32", "hqk", "random", "transposed"), shape, HALF).requires_grad_()
        out, lse = attend(*rows, mask)
        grads = torch.autograd.grad(out, (*rows, mask), do)
        oracle.check(*rows, out=out, lse=lse, grads=grads[:3], grad_mask=grads[3], grad_out=do, attn_mask=mask)


def test_r41_slices_of_a_static_cache_have_right_gradients_under_compile():
    q, k, v, do = make(Shape(1, 2, 2, 9, 200, 264), HALF)
    rows = leaves(q, k, v)

    def step(q, k, v):
        return ffpa_attn_func(q, k[:, :, :-128], v[:, :, :-128], backend="triton")

    torch.compiler.reset()
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(*rows), rows, do)
    assert all(torch.equal(a, b) for a, b in zip(compiled, torch.autograd.grad(step(*rows), rows, do), strict=True))
    assert not compiled[1][:, :, -128:].any()
    part = (q, k[:, :, :-128], v[:, :, :-128])
    oracle.check(
        *part, out=step(*rows), grads=(compiled[0], *(x[:, :, :-128] for x in compiled[1:])), grad_out=do
    )  # fmt: skip


def test_r42_fp32_inputs_are_cast_under_autocast_and_otherwise_named():
    q, k, v, _ = make(Shape(1, 1, 1, 9, 9, 264), torch.float32)
    mixed = leaves(q, k.half(), v.half())
    mask = torch.randn(9, 9, requires_grad=True)
    with torch.autocast("cpu", dtype=HALF):
        out = ffpa_attn_func(*mixed, mask, backend="triton")
    assert out.dtype == HALF
    grads = torch.autograd.grad(out.float().sum(), (*mixed, mask))
    assert [grad.dtype for grad in grads] == [torch.float32, HALF, HALF, torch.float32]
    oracle.check(q.half(), k.half(), v.half(), out=out, attn_mask=mask.half())
    cu = torch.tensor([0, 9], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k.half(), v.half())]
    with torch.autocast("cpu", dtype=HALF):
        assert ffpa_attn_varlen_func(*packed, cu).dtype == HALF
    for call in (lambda: ffpa_attn_func(q, k.half(), v.half()), lambda: ffpa_attn_varlen_func(*packed, cu)):
        with pytest.raises(TypeError, match="dtype"):
            call()


def test_r51_a_policy_that_saves_attention_by_name_saves_its_results():
    calls = []

    def policy(context, op, *args, **kwargs):
        name = str(op)
        if "flash_attn" in name and "backward" not in name:
            calls.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v, do = make(Shape(1, 2, 1, 9, 9, 264), HALF)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)

    def block(q, k, v):
        out = ffpa_attn_func(q * 2, k, v, enable_gqa=True, backend="triton")
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        return out + ffpa_attn_varlen_func(*rows, cu, enable_gqa=True).transpose(0, 1)

    rows = leaves(q, k, v)
    out = checkpoint(
        block, *rows, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )  # fmt: skip
    grads = torch.autograd.grad(out, rows, do)
    assert calls.count(False) == 2
    plain = torch.autograd.grad(block(*rows), rows, do)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
    for name in ("flash_attn", "flash_attn_varlen"):
        assert "window_size_left" in str(getattr(torch.ops.ffpa_jit, name).default._schema)


@pytest.mark.parametrize("name", ["s_aux", "sinks", "learnable_sink", "alibi_slopes", "block_mask", "score_mod"])
def test_r52_options_that_change_the_result_are_refused_by_name(name):
    q, k, v, _ = make(Shape(1, 1, 1, 9, 9, 264), HALF)
    cu = torch.tensor([0, 9], dtype=torch.int32)
    for call in (ffpa_attn_func, lambda q, k, v, **x: ffpa_attn_varlen_func(q[0], k[0], v[0], cu, **x)):
        with pytest.raises(NotImplementedError, match=name):
            call(q, k, v, **{name: torch.zeros(1)})
        with pytest.raises(TypeError, match=f"{name}_typo"):
            call(q, k, v, **{f"{name}_typo": None})


def test_r52_one_key_head_that_is_the_value_too_takes_a_dense_additive_mask():
    shape = Shape(1, 16, 1, 12, 60, 512)
    q, k, _, do = make(shape, HALF)
    mask = make_mask(MaskKind("half", "qk", "random"), shape, HALF)
    rows = leaves(q, k)
    out, lse = attend(rows[0], rows[1], rows[1], mask)
    dq, dk = torch.autograd.grad(out, rows, do)
    oracle.check(q, k, k, out=out, lse=lse, grads=(dq, None, None), grad_out=do, attn_mask=mask)
    exact = oracle.attention(q, k, k, grad_out=do, attn_mask=mask)
    assert oracle.relative_error(dk, exact.dk + exact.dv) < 2e-3
