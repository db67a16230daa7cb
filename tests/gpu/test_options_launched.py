"""How calls with options reach a GPU: what is compiled, and how often, what waits, and what a graph captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ffpa_jit import TritonBackend, ffpa_attn_func, ffpa_attn_varlen_func
from tests import oracle
from tests.cases.options import Case, varlen_case
from tests.cases.shapes import Packed, Shape, leaves, make, make_packed
from tests.gpu.graphs import capture

BF16 = torch.bfloat16


# What is compiled, and how often.


@contextmanager
def compiles() -> Iterator[list[str]]:
    """The Triton kernels specialised (compiled or taken from the disk cache) inside."""
    triton = pytest.importorskip("triton")
    seen: list[str] = []

    def hook(**kwargs) -> bool:
        seen.append(str(kwargs.get("repr")))
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
        yield seen


def dense_step(length: int, keys: int | None = None, memory: float | None = None, **options) -> None:
    keys = length if keys is None else keys
    q, k, v, do = make(Shape(1, 4, 2, length, keys, 512), BF16, "cuda")
    q, k, v = leaves(q, k, v)
    out = ffpa_attn_func(q, k, v, enable_gqa=True, backend=TritonBackend(workspace_mb=memory), **options)
    torch.autograd.grad(out, (q, k, v), do)


def packed_step(lens: tuple[int, ...], **options) -> None:
    q, k, v, do, cu_q, cu_k = make_packed(Packed(lens, lens, 4, 2, 512), BF16, "cuda")
    q, k, v = leaves(q, k, v)
    out = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, max(lens), max(lens), causal=True, enable_gqa=True, **options)
    torch.autograd.grad(out, (q, k, v), do)


REPEATS: dict[str, tuple[Callable[[], None], ...]] = {
    "lengths": tuple(lambda n=n: dense_step(n, is_causal=True) for n in (300, 512, 777, 1024, 1001)),
    "lengths without a workspace": tuple(lambda n=n: dense_step(n, memory=0) for n in (300, 512, 777, 1001)),
    "numbers of keys": tuple(lambda n=n: dense_step(400, n) for n in (300, 512, 777)),
    "large numbers of keys": tuple(lambda n=n: dense_step(400, n) for n in (4096, 5000, 7001)),
    "seeds": tuple(lambda n=n: (torch.manual_seed(n), dense_step(300, dropout_p=0.1)) for n in (0, 1, 2**40)),
    "dropout rates": tuple(lambda p=p: dense_step(300, dropout_p=p) for p in (0.1, 0.5, 1 / 16)),
    "lengths under a mask": tuple(
        lambda n=n: dense_step(n, attn_mask=torch.randn(1, 1, n, n, dtype=BF16, device="cuda").requires_grad_())
        for n in (304, 512, 784, 1024)
    ),
    "windows": tuple(lambda w=w: dense_step(300, window_size=w) for w in ((9, 9), (16, 16), (130, 8))),
    "softcaps": tuple(lambda c=c: dense_step(300, softcap=c) for c in (1.0, 16.0, 50)),
    "scales": tuple(lambda s=s: dense_step(300, scale=s) for s in (0.1, 1.0, 0.03)),
    "packed lengths": tuple(
        lambda n=n: packed_step(n) for n in ((300, 200), (512, 16), (1, 2, 3), (64,) * 40, (1000, 1, 30, 4))
    ),
    "packed seeds": tuple(
        lambda n=n: (torch.manual_seed(n), packed_step((300, 200), dropout_p=0.1)) for n in (0, 1, 2**40)
    ),
}


@pytest.mark.parametrize("what", REPEATS)
def test_nothing_is_compiled_again_for_other(what):
    first, *others = REPEATS[what]
    first()
    with compiles() as seen:
        for other in others:
            other()
    assert not seen, seen


def test_the_count_of_compilations_sees_one():
    with compiles() as seen:
        dense_step(70, scale=0.1, window_size=(5, 5), softcap=3.0, dropout_p=0.5)
        q, k, v, _ = make(Shape(1, 1, 1, 40, 40, 296), BF16, "cuda")
        ffpa_attn_func(q, k, v, backend="triton")
    assert seen


def test_compile_makes_one_graph_for_all_lengths_with_masks_dropout_window_and_softcap():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")

    def step(q, k, v, mask):
        out = ffpa_attn_func(
            q * 2, k, v, mask, is_causal=True, enable_gqa=True, softcap=20.0, window_size=(200, -1), backend="triton"
        )
        dropped = ffpa_attn_func(q, k, v, dropout_p=0.2, enable_gqa=True, backend="triton")
        return (out * 0.5).float().square().mean() + 0.0 * dropped.float().mean()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for length in (300, 512, 1000, 777):
        q, k, v, _ = make(Shape(1, 4, 2, length, length, 512), BF16, "cuda")
        mask = torch.randn(1, 1, 1, length, device="cuda", requires_grad=True)
        q, k, v = leaves(q, k, v)
        grads = torch.autograd.grad(compiled(q, k, v, mask), (q, k, v, mask))
        expected = torch.autograd.grad(step(q, k, v, mask), (q, k, v, mask))
        for a, b in zip(grads, expected, strict=True):
            assert oracle.relative_error(a, b) < 1e-2
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


def test_compile_makes_one_graph_for_all_packed_batches():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")

    def step(q, k, v, cu, longest):
        out, lse = ffpa_attn_varlen_func(
            q * 2, k, v, cu, cu, longest, longest, causal=True, enable_gqa=True, return_lse=True
        )
        return (out * 0.5).float().square().mean() + lse.mean()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for lens in ((300, 212), (100, 200, 300, 400), (777,), (64,) * 9):
        q, k, v, _, cu, _ = make_packed(Packed(lens, lens, 4, 2, 512), BF16, "cuda")
        q, k, v = leaves(q, k, v)
        grads = torch.autograd.grad(compiled(q, k, v, cu, max(lens)), (q, k, v))
        expected = torch.autograd.grad(step(q, k, v, cu, max(lens)), (q, k, v))
        for a, b in zip(grads, expected, strict=True):
            assert oracle.relative_error(a, b) < 1e-2
        graphs.append(counter.frame_count)
    # The second batch may be traced again, which makes its sizes symbolic; none after it adds a graph.
    assert graphs[0] == 1
    assert graphs[-1] == graphs[1] <= 2


def test_no_call_waits_for_the_gpu():
    """Synchronising is an error in this mode: reading cu_seqlens, a mask or the generator's words would show."""
    case = varlen_case(lengths="several", heads=(4, 2), dim=512, slack=3, dropout_p=0.1, given="tensor")
    q, k, v, do, cu_q, cu_k = make_packed(case.packed, BF16, "cuda")
    q, k, v = leaves(q, k, v)
    shape = Shape(1, 4, 2, 300, 300, 512, True)
    inputs = (*leaves(*make(shape, BF16, "cuda")[:3]), torch.randn(1, 300, device="cuda", requires_grad=True))
    longest = [torch.tensor(40, dtype=torch.int32, device="cuda")] * 2
    few = make(Shape(1, 4, 2, 1, 5000, 512), BF16, "cuda")[:3]

    def step():
        packed = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, dropout_p=0.1, enable_gqa=True, causal=True)
        dense = ffpa_attn_func(*inputs, dropout_p=0.1, is_causal=True, enable_gqa=True, backend="triton")
        torch.autograd.grad(packed, (q, k, v), do)
        torch.autograd.grad(dense, inputs, torch.ones_like(dense))
        ffpa_attn_func(*few, enable_gqa=True, backend="triton")

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Graphs.


def test_a_captured_graph_replays_every_option_on_new_values():
    shape = Shape(1, 4, 2, 300, 500, 512, True)
    q, k, v, do = make(shape, BF16, "cuda")
    mask = torch.randn(300, 500, device="cuda")
    few = make(Shape(1, 8, 2, 1, 5000, 512), BF16, "cuda")[:3]
    packed = make_packed(Packed((100, 0, 200), (100, 7, 200), 4, 2, 512), BF16, "cuda")
    values = [q, k, v, do, mask, *few, *packed[:4]]
    inputs = (*leaves(q, k, v), mask.detach().requires_grad_())
    rows = leaves(*packed[:3])
    case = Case(shape, window=(400, -1), softcap=20.0)

    def step():
        out, lse = case.call(*inputs)
        grads = torch.autograd.grad(out, inputs, do)
        ragged = ffpa_attn_varlen_func(*rows, *packed[4:], 300, 307, causal=True, enable_gqa=True)
        more = torch.autograd.grad(ragged, rows, packed[3])
        return out, lse, *grads, ragged, *more, ffpa_attn_func(*few, enable_gqa=True, backend="triton")

    graph, captured = capture(step)
    for x in values:
        x.copy_(torch.randn_like(x))
    packed[4].copy_(torch.tensor([0, 50, 50, 300]))  # other sequences of the same total
    packed[5].copy_(torch.tensor([0, 50, 57, 307]))
    graph.replay()
    torch.cuda.synchronize()
    results = [x.clone() for x in captured]
    assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))
    assert results[0].abs().sum() > 0
