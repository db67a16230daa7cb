"""Failures that users of other attention libraries reported, at their own sizes; the small ones are in the CPU twin."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ffpa_jit import ffpa_attn_func, ffpa_attn_varlen_func
from tests import oracle
from tests.cases.options import VarlenCase, ring
from tests.cases.shapes import Packed, Shape, leaves, make
from tests.gpu.graphs import capture
from tests.gpu.memory import extra_memory

BF16 = torch.bfloat16
MIB = 2**20


def attend(q, k, v, mask=None, **options):
    options.setdefault("enable_gqa", q.shape[1] != k.shape[1])
    return ffpa_attn_func(q, k, v, mask, backend="triton", return_lse=True, **options)


def test_r01_training_a_global_layer_needs_no_score_matrix_and_no_repeated_keys():
    """The call as a model makes it: no backend is named."""
    q, k, v, do = make(Shape(1, 32, 4, 8192, 8192, 512, True), BF16, "cuda")
    rows = leaves(q, k, v)
    (out,), over = extra_memory(lambda: (ffpa_attn_func(*rows, is_causal=True, enable_gqa=True),))
    lse = 32 * 8192 * 4
    assert over <= 512 * MIB + lse + MIB
    grads, over = extra_memory(lambda: torch.autograd.grad(out, rows, do))
    assert over <= 512 * MIB + 4 * MIB
    head = slice(0, 8)
    oracle.check(
        q[:, head], k[:, :1], v[:, :1], out=out[:, head], grads=(grads[0][:, head], grads[1][:, :1], grads[2][:, :1]),
        grad_out=do[:, head], is_causal=True,
    )  # fmt: skip


def test_r02_grouped_causal_heads_run_dense_and_packed_without_naming_a_backend():
    q, k, v, do = make(Shape(1, 16, 2, 1500, 1500, 512, True), BF16, "cuda")
    rows = leaves(q, k, v)
    out = ffpa_attn_func(*rows, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, rows, do)
    oracle.check(q, k, v, out=out, grads=grads, grad_out=do, is_causal=True)
    VarlenCase(Packed((700, 800), (700, 800), 16, 2, 512), is_causal=True).run(BF16, "cuda")
    small = [x[..., :256] for x in (q, k, v)]
    assert torch.equal(
        ffpa_attn_func(*small, is_causal=True, enable_gqa=True),
        F.scaled_dot_product_attention(*small, is_causal=True, enable_gqa=True),
    )


def test_r06_a_rank_of_context_parallel_training_merges_its_shards():
    q, k, v, do = make(Shape(1, 8, 1, 2048, 16_384, 512), BF16, "cuda")
    parts = [(i, i + 4096) for i in range(0, 16_384, 4096)]
    first_row = 6144
    out, lse, grads = ring(q, k, v, do, parts, first_row)
    horizon = first_row + 2048
    assert not grads[1][:, :, horizon:].any()
    assert not grads[2][:, :, horizon:].any()
    seen = [x[:, :, :horizon] for x in (k, v)]
    # Each shard's output is rounded before it is merged, and each one's dQ before the sum: that is once more.
    exact = oracle.attention(q, *seen, is_causal=True, grad_out=do)
    rounded = oracle.attention(q, *seen, is_causal=True, grad_out=do, rounding=BF16)
    oracle.assert_lse(lse, exact.lse, rounded.lse)
    results = (out, grads[0], *(x[:, :, :horizon] for x in grads[1:]))
    for result, name in zip(results, ("out", "dq", "dk", "dv"), strict=True):
        its, bound = (oracle.relative_error(x, getattr(exact, name)) for x in (result, getattr(rounded, name)))
        assert its <= 2 * bound, name
    whole = leaves(q, k, v)
    out, lse = attend(whole[0], *(x[:, :, :horizon] for x in whole[1:]), is_causal=True)
    grads = torch.autograd.grad(out, whole, do)
    assert not grads[1][:, :, horizon:].any()
    oracle.check(
        q, *seen, out=out, lse=lse, grads=(grads[0], *(x[:, :, :horizon] for x in grads[1:])), grad_out=do,
        is_causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", [384, 512])
def test_r09_a_patched_sdpa_serves_image_decoders(monkeypatch, head_dim):
    q, k, v, _ = make(Shape(1, 1, 1, 4096, 4096, head_dim), BF16, "cuda")
    expected = F.scaled_dot_product_attention(q, k, v)
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    assert oracle.relative_error(F.scaled_dot_product_attention(q, k, v), expected) < 1e-2
    single = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert oracle.relative_error(single, expected) < 1e-2


@pytest.mark.parametrize("length", [27_556, 57_600])
def test_r10_r11_an_untiled_image_decode_needs_its_activations_only_and_copies_no_view(monkeypatch, length):
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "16")  # less than one copy of the queries
    x = torch.randn(1, 1, length, 3 * 384, dtype=BF16, device="cuda")
    q, k, v = x.chunk(3, -1)
    assert q.numel() * 2 > 20 * MIB
    (out, lse), over = extra_memory(lambda: attend(q, k, v))
    assert over <= 16 * MIB + MIB
    last = slice(-512, None)
    oracle.check(q[:, :, last], k, v, out=out[:, :, last], lse=lse[:, :, last])


def test_r18_a_long_padded_prompt_needs_no_mask_of_its_square():
    length = 60_000
    q, k, v, _ = make(Shape(1, 4, 1, length, length, 512, True), BF16, "cuda")
    mask = (torch.arange(length, device="cuda") < 59_000).expand(1, 1, length, length)
    (out, lse), over = extra_memory(lambda: attend(q, k, v, mask, is_causal=True))
    assert over <= 512 * MIB + MIB
    last = slice(-300, None)
    oracle.check(
        q[:, :, last], k, v, out=out[:, :, last], lse=lse[:, :, last], attn_mask=mask[:, :, last], is_causal=True
    )  # fmt: skip


def test_r20_packing_said_with_a_block_mask_is_the_packed_result():
    lens = (1000, 2000, 56, 1600)
    length = sum(lens)
    q, k, v, do = make(Shape(1, 4, 2, length, length, 512), BF16, "cuda")
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lens)).to("cuda")
    mask = ids[:, None] == ids
    rows = leaves(q, k, v)
    out, lse = attend(*rows, mask, is_causal=True)
    grads = torch.autograd.grad(out, rows, do)
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do, attn_mask=mask, is_causal=True)
    cu = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    packed = ffpa_attn_varlen_func(*(x[0].transpose(0, 1) for x in rows), cu, causal=True, enable_gqa=True)
    assert oracle.relative_error(packed.transpose(0, 1)[None], out) < 1e-2


@pytest.mark.parametrize("side", ["right", "left"])
def test_r21_thirty_steps_on_a_padded_batch_stay_finite(side):
    torch.manual_seed(0)
    batch, length, width = 2, 333, 512
    x = torch.randn(batch, length, width, device="cuda", dtype=BF16)
    weights = [
        torch.randn(width, width, device="cuda", dtype=BF16).mul_(width**-0.5).requires_grad_() for _ in range(3)
    ]
    lens = torch.tensor([length, 100], device="cuda")[:, None]
    at = torch.arange(length, device="cuda")
    seen = at < lens if side == "right" else at >= length - lens
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    losses = []
    for _ in range(30):
        q, k, v = ((x @ w)[:, None] for w in weights)
        out, _ = attend(q, k, v, seen[:, None, None], is_causal=True)
        loss = ((out[:, 0] - x).float()[seen] ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(torch.isfinite(w.grad).all() for w in weights)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_r24_scores_beyond_the_range_of_fp16_stay_finite(dtype):
    q, k, v, do = make(Shape(1, 1, 1, 1024, 1024, 512), dtype, "cuda")
    q, k = q * 30, k * 30
    assert (q.float() @ k.float().mT).abs().max() > 65504
    rows = leaves(q, k, v)
    out, lse = attend(*rows)
    grads = torch.autograd.grad(out, rows, do)
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do)


@pytest.mark.parametrize("what", ["bool", "half"])
def test_r25_rows_beyond_two_to_the_32_mask_elements_are_right(what):
    length = 73_728
    assert (length - 256) * length > 2**32
    q, k, v, _ = make(Shape(1, 1, 1, length, length, 512), BF16, "cuda")
    if what == "bool":
        mask = torch.empty(length, length, dtype=torch.bool, device="cuda").bernoulli_(0.5)
    else:
        mask = torch.empty(length, length, dtype=BF16, device="cuda").normal_()
    out, lse = attend(q, k, v, mask)
    for first in (0, 2**31 // length, 2**32 // length, length - 256):
        rows = slice(first, first + 256)
        oracle.check(
            q[:, :, rows], k, v, out=out[:, :, rows], lse=lse[:, :, rows], attn_mask=mask[rows]
        )  # fmt: skip


def test_r26_a_mask_of_more_than_two_to_the_31_elements_trains():
    length = 53_936
    assert length * length > 2**31
    q, k, v, do = make(Shape(1, 1, 1, length, length, 264), BF16, "cuda")
    mask = torch.empty(length, length, dtype=torch.bool, device="cuda").bernoulli_(0.5)
    mask[length - 5] = False
    rows = leaves(q, k, v)
    out, lse = attend(*rows, mask)
    grads = torch.autograd.grad(out, rows, do)
    assert not grads[0][:, :, length - 5].any()
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do, attn_mask=mask)


def test_r29_eighty_thousand_documents_on_one_key_head_run_without_being_told_their_lengths():
    documents, length = 80_000, 16
    q = torch.randn(documents * length, 1, 264, dtype=BF16, device="cuda")
    cu = torch.arange(documents + 1, dtype=torch.int32, device="cuda") * length
    rows = leaves(q, q, q)
    out = ffpa_attn_varlen_func(*rows, cu, causal=True)
    grads = torch.autograd.grad(out, rows, torch.ones((), dtype=BF16, device="cuda").expand_as(out))
    assert torch.isfinite(out).all()
    first = out.view(documents, length, 264)[:, 0]
    assert torch.equal(first, q.view(documents, length, 264)[:, 0])  # it sees itself only
    assert all(torch.isfinite(grad).all() for grad in grads)
    # Every value gives its weight away once, and the weights of a row are one.
    assert (
        oracle.relative_error(grads[2].double().view(documents, -1).sum(), torch.tensor(documents * length * 264.0))
        < 1e-3
    )


def test_r32_an_empty_batch_works_under_autograd_and_compile():
    q = torch.empty(0, 10, 3952, 512, dtype=BF16, device="cuda")
    rows = leaves(q, q, q)

    def step(q, k, v):
        return ffpa_attn_func(q * 2, k, v, is_causal=True, backend="triton")

    torch.compiler.reset()
    for call in (step, torch.compile(step, fullgraph=True)):
        out = call(*rows)
        assert out.shape == q.shape
        assert all(grad.shape == q.shape for grad in torch.autograd.grad(out.sum(), rows))


def test_r41_slices_of_a_static_cache_have_right_gradients_under_inductor():
    q, k, v, do = make(Shape(1, 4, 2, 300, 640, 512), BF16, "cuda")
    rows = leaves(q, k, v)

    def step(q, k, v):
        return ffpa_attn_func(q * 1.0, k[:, :, :-128] * 1.0, v[:, :, :-128], enable_gqa=True, backend="triton")

    torch.compiler.reset()
    out = torch.compile(step, fullgraph=True)(*rows)
    grads = torch.autograd.grad(out, rows, do)
    assert not grads[1][:, :, -128:].any()
    oracle.check(
        q, k[:, :, :-128], v[:, :, :-128], out=out, grads=(grads[0], *(x[:, :, :-128] for x in grads[1:])), grad_out=do
    )  # fmt: skip


def test_r42_fp32_norms_of_an_adapter_train_under_autocast():
    q, k, v, _ = make(Shape(1, 2, 2, 300, 300, 512), torch.float32, "cuda")
    rows = leaves(q, k.to(BF16), v.to(BF16))
    with torch.autocast("cuda", dtype=BF16):
        out = ffpa_attn_func(*rows, is_causal=True, backend="triton")
    grads = torch.autograd.grad(out.float().sum(), rows)
    assert [grad.dtype for grad in grads] == [torch.float32, BF16, BF16]
    oracle.check(q.to(BF16), k.to(BF16), v.to(BF16), out=out, is_causal=True)
    with pytest.raises(TypeError, match="dtype"):
        ffpa_attn_func(*rows)


def test_r45_a_compiled_packed_step_leaks_no_memory_over_many_lengths():
    torch.compiler.reset()

    def step(q, k, v, cu):
        return ffpa_attn_varlen_func(q * 2, k, v, cu, causal=True, enable_gqa=True).float().square().mean()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    held = []
    for i in range(300):
        length = 64 + (i * 37) % 400
        q = torch.randn(length, 4, 264, dtype=BF16, device="cuda", requires_grad=True)
        k = torch.randn(length, 2, 264, dtype=BF16, device="cuda", requires_grad=True)
        cu = torch.tensor([0, length // 3, length], dtype=torch.int32, device="cuda")
        compiled(q, k, k, cu).backward()
        assert torch.isfinite(q.grad).all()
        del q, k, cu
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= max(held[50:100])


def test_r47_a_first_call_inside_a_capture_is_right():
    """A head dim that no other test has, so that its kernels are new; nothing may tune or wait while capturing."""
    q, k, v, _ = make(Shape(1, 2, 2, 200, 200, 888), BF16, "cuda")
    mask = torch.rand(200, 200, device="cuda") < 0.7
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(q, k, v, mask)
    graph.replay()
    torch.cuda.synchronize()
    oracle.check(q, k, v, out=out, lse=lse, attn_mask=mask)


def test_r47_a_training_step_with_a_bias_is_captured_and_replayed():
    q, k, v, do = make(Shape(1, 2, 2, 200, 300, 512), BF16, "cuda")
    bias = torch.randn(1, 2, 1, 300, device="cuda", requires_grad=True)
    rows = (*leaves(q, k, v), bias)

    def step():
        out, _ = attend(*rows)
        return out, *torch.autograd.grad(out, rows, do)

    graph, captured = capture(step)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    out, *grads = captured
    oracle.check(q, k, v, out=out, grads=tuple(grads[:3]), grad_mask=grads[3], grad_out=do, attn_mask=bias)


def test_r52_a_latent_head_with_a_dense_mask_trains():
    shape = Shape(1, 64, 1, 256, 4096, 512)
    q, k, _, do = make(shape, BF16, "cuda")
    mask = torch.randn(256, 4096, device="cuda", dtype=BF16)
    rows = leaves(q, k)
    out, lse = attend(rows[0], rows[1], rows[1], mask)
    dq, dk = torch.autograd.grad(out, rows, do)
    oracle.check(q, k, k, out=out, lse=lse, grads=(dq, None, None), grad_out=do, attn_mask=mask)
    exact = oracle.attention(q, k, k, grad_out=do, attn_mask=mask)
    assert oracle.relative_error(dk, exact.dk + exact.dv) < 1e-2
