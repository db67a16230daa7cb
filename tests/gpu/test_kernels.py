"""The kernels on a GPU against the oracle, and what only a GPU can show: size, memory, graphs, compilation."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ffpa_jit import ffpa_attn_func
from tests import oracle
from tests.cases.dense import LARGE, SCORE_ORDERS, STEPS, STRIDED, attend, run_and_check
from tests.cases.shapes import EMPTY, Shape, far_apart, gemma_like, late_maximum, leaves, make, tensor
from tests.gpu.graphs import capture

DTYPES = [torch.float16, torch.bfloat16]
WORKSPACE = 512 * 2**20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE.matrix, ids=str)
def test_forward_and_backward_match_the_oracle(shape, dtype):
    q, k, v, do = make(shape, dtype, "cuda")
    run_and_check(shape, q, k, v, do, grad_lse=torch.randn(do.shape[:3], device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("shape", LARGE.strided, ids=str)
def test_any_strides_go_in(shape, layout, dtype):
    q, k, v, _ = make(shape, dtype, "cuda", layout=layout)
    do = tensor(layout, shape.batch, shape.heads_q, shape.len_q, shape.head_dim, dtype=dtype, device="cuda")
    out, _, grads = run_and_check(shape, q, k, v, do)
    assert out.stride() == torch.empty_like(q).stride()
    assert [g.stride() for g in grads] == [torch.empty_like(x).stride() for x in (q, k, v)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_tensors_give_empty_or_zero_results(shape):
    run_and_check(shape, *make(shape, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", SCORE_ORDERS)
@pytest.mark.parametrize("shape", LARGE.any_order, ids=str)
def test_scores_of_any_order_stay_exact(shape, order, dtype):
    q, k, v, do = make(shape, dtype, "cuda")
    run_and_check(shape, q, k, v, do, scale=order * shape.head_dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", LARGE.late_maximum, ids=str)
def test_rows_whose_maximum_moves_late_stay_exact(shape, step, dtype):
    run_and_check(shape, *late_maximum(shape, dtype, "cuda", step=step))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE.gemma_like, ids=str)
def test_gemma_like_inputs_with_scale_one_stay_exact(shape, dtype):
    run_and_check(shape, *gemma_like(shape, dtype, "cuda"), scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("megabytes", ["2", "7"])
def test_a_small_workspace_changes_the_chunks_not_the_result(monkeypatch, megabytes, dtype):
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", megabytes)
    shape = Shape(1, 6, 2, 1300, 1500, 512, True)
    run_and_check(shape, *late_maximum(shape, dtype, "cuda", step=20))


@pytest.mark.parametrize("size", [2.0**14, 2.0**-12])
def test_large_and_small_output_gradients_keep_their_precision_in_fp16(size):
    shape = Shape(1, 2, 2, 512, 512, 512)
    q, k, v, do = make(shape, torch.float16, "cuda")
    run_and_check(shape, q, k, v, do * (size if size < 1 else size / 8))


def test_key_and_value_may_be_one_tensor():
    q, k, _, do = make(Shape(1, 4, 1, 333, 600, 512), torch.bfloat16, "cuda")
    q, k = leaves(q, k)
    out = ffpa_attn_func(q, k, k, enable_gqa=True, backend="triton")
    dq, dk = torch.autograd.grad(out, (q, k), do)
    oracle.check(q, k, k, out=out, grads=(dq, None, None), grad_out=do)
    exact = oracle.attention(q, k, k, grad_out=do)
    assert oracle.relative_error(dk, exact.dk + exact.dv) < 1e-2


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_more_than_65535_batches_or_heads_run(axis):
    many = 65_537
    shape = Shape(many, 1, 1, 3, 5, 264) if axis == "batch" else Shape(1, many, many, 3, 5, 264)
    run_and_check(shape, *make(shape, torch.bfloat16, "cuda"))


def test_offsets_beyond_two_to_the_31_elements_are_right():
    """Heads 2^30 elements apart: the last of four starts at 3 * 2^30."""
    length, dim = 260, 512
    q, k, v = far_apart(2**30, length, dim)
    shape = Shape(1, 4, 4, length, length, dim, True)
    do = torch.randn(1, 4, length, dim, dtype=torch.bfloat16, device="cuda")
    run_and_check(shape, q, k, v, do)


def test_a_long_single_tensor_beyond_two_to_the_31_elements_is_right():
    length = 2**31 // 1024 // 16 + 130
    q = torch.randn(1, 17, 64, 1024, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 17, length, 1024, dtype=torch.bfloat16, device="cuda")
    assert k.numel() > 2**31
    out, lse = ffpa_attn_func(q, k, k, backend="triton", return_lse=True)
    last = slice(16, 17)
    oracle.check(q[:, last], k[:, last], k[:, last], out=out[:, last], lse=lse[:, last])


def test_compile_makes_one_graph_for_all_lengths():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")

    def step(q, k, v):
        return (ffpa_attn_func(q * 2, k, v, is_causal=True, enable_gqa=True) * 0.5).float().square().mean()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for length in (300, 512, 1000, 777):
        q, k, v, _ = make(Shape(1, 4, 2, length, length, 512), torch.bfloat16, "cuda")
        q, k, v = leaves(q, k, v)
        grads = torch.autograd.grad(compiled(q, k, v), (q, k, v))
        expected = torch.autograd.grad(step(q, k, v), (q, k, v))
        for a, b in zip(grads, expected, strict=True):
            assert oracle.relative_error(a, b) < 1e-2
        graphs.append(counter.frame_count)
    # torch may trace the first call twice (a float default becomes symbolic); no length may add a graph.
    assert len(set(graphs)) == 1


def test_a_captured_graph_replays_on_new_values():
    shape = Shape(1, 4, 2, 300, 500, 512, True)
    q, k, v, do = make(shape, torch.bfloat16, "cuda")
    q, k, v = leaves(q, k, v)

    def step():
        out, lse = attend(shape, q, k, v)
        return out, lse, torch.autograd.grad(out, (q, k, v), do)

    graph, captured = capture(step)
    with torch.no_grad():
        for x in (q, k, v, do):
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    expected = step()
    assert torch.equal(captured[0], expected[0])
    assert torch.equal(captured[1], expected[1])
    assert all(torch.equal(a, b) for a, b in zip(captured[2], expected[2], strict=True))


@pytest.mark.parametrize("shape", [Shape(1, 8, 2, 2000, 2000, 512, True), Shape(1, 2, 1, 500, 5000, 1024)], ids=str)
def test_repeated_calls_give_the_same_bits(shape):
    q, k, v, do = make(shape, torch.bfloat16, "cuda")
    q, k, v = leaves(q, k, v)

    def step():
        out, lse = attend(shape, q, k, v)
        return (out, lse, *torch.autograd.grad(out, (q, k, v), do))

    first = step()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))


@pytest.mark.parametrize(
    "shape",
    [Shape(1, 32, 32, 8192, 8192, 512), Shape(1, 32, 4, 8192, 8192, 512, True), Shape(1, 4, 1, 1, 131_072, 512)],
    ids=str,
)
def test_memory_stays_within_the_results_and_the_workspace(shape):
    q, k, v, do = make(shape, torch.bfloat16, "cuda")
    q, k, v = leaves(q, k, v)

    def extra(call):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        size = sum(x.numel() * x.element_size() for x in result)
        return result, torch.cuda.max_memory_allocated() - before - size

    (out, _lse), over = extra(lambda: attend(shape, q, k, v))
    assert over <= WORKSPACE + 2**20, f"forward: {over / 2**20:.0f} MiB beside the results"
    _, over = extra(lambda: torch.autograd.grad(out, (q, k, v), do))
    assert over <= WORKSPACE + 2**20, f"backward: {over / 2**20:.0f} MiB beside the results"


def test_autocast_converts_inputs_as_it_does_for_sdpa():
    q, k, v, _ = make(Shape(1, 2, 2, 200, 200, 512), torch.float32, "cuda")
    q, k, v = leaves(q, k, v)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = ffpa_attn_func(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.float().sum(), q)[0].dtype == torch.float32


def test_the_error_stays_near_that_of_sdpa():
    shape = Shape(1, 2, 2, 2048, 2048, 512)
    q, k, v, do = make(shape, torch.bfloat16, "cuda")
    exact = oracle.attention(q, k, v, grad_out=do)
    errors = []
    for call in (torch.nn.functional.scaled_dot_product_attention, ffpa_attn_func):
        a, b, c = leaves(q, k, v)
        out = call(a, b, c)
        grads = torch.autograd.grad(out, (a, b, c), do)
        errors.append(
            [
                oracle.relative_error(x, y)
                for x, y in zip((out, *grads), (exact.out, exact.dq, exact.dk, exact.dv), strict=True)
            ]
        )
    assert all(mine <= 1.2 * theirs for theirs, mine in zip(*errors, strict=True)), errors


def test_nan_beyond_the_last_key_never_leaks():
    def window(heads, length):
        store = torch.full((1, heads, 1024, 512), math.nan, dtype=torch.bfloat16, device="cuda")
        store[:, :, :length] = torch.randn(1, heads, length, 512, device="cuda")
        return store[:, :, :length]

    run_and_check(Shape(1, 2, 1, 100, 131, 512), window(2, 100), window(1, 131), window(1, 131), window(2, 100))
