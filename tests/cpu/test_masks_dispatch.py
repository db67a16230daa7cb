"""What reaches a backend of attn_mask, dropout_p and options, and where the gradients come from then.

A backend in plain torch stands in for the CUDA backend (tests/cpu/fakes.py).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from ffpa_jit import CUDABackend, SDPABackend, TritonBackend, dispatch, explain, ffpa_attn_func, masks, registry, sdpa
from ffpa_jit.backends import DEFAULTS, decode, encode
from ffpa_jit.problem import Problem
from tests.cases.shapes import Shape, leaves, make
from tests.cpu.fakes import FakeCUDA, FakeTriton, Refusing, attention, kept

SDPA = F.scaled_dot_product_attention
HALF = torch.float16
SHAPE = Shape(3, 2, 2, 5, 7, 264)
MASK_SHAPES = [(5, 7), (1, 7), (5, 1), (1, 1), (2, 5, 7), (1, 5, 7), (2, 1, 7), (3, 2, 5, 7), (3, 1, 1, 7),
               (1, 2, 5, 1), (3, 1, 5, 7)]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    torch.compiler.reset()


@pytest.fixture
def cuda():
    """A backend with a forward only, and no other."""
    fake = FakeCUDA()
    with registry.replaced("cuda", fake), registry.replaced("triton", Refusing()):
        yield fake


@pytest.fixture
def both_ways():
    """A backend for both directions, and no other."""
    fake = FakeTriton()
    with registry.replaced("triton", fake), registry.replaced("cuda", Refusing()):
        yield fake


def inputs(shape: Shape = SHAPE, dtype: torch.dtype = HALF):
    q, k, v, do = make(shape, dtype)
    return (*leaves(q, k, v), do)


def make_mask(shape, kind: str) -> torch.Tensor:
    if kind == "bool":
        mask = torch.rand(shape) > 0.4
        mask[..., 0] = True
        return mask
    return torch.randn(shape, dtype=torch.float32 if kind == "fp32" else HALF)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 4e-3) -> None:
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


# Masks: values, gradients, memory.


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "half", "fp32"])
def test_masks_reach_the_backend_and_mean_what_they_mean_to_sdpa(cuda, shape, kind):
    q, k, v, do = inputs()
    mask = make_mask(shape, kind)
    out = ffpa_attn_func(q, k, v, attn_mask=mask)
    assert len(cuda.calls) == 1
    assert cuda.calls[0]["attn_mask"].dtype == mask.dtype
    expected = SDPA(q, k, v, attn_mask=mask)
    close(out, expected)
    for got, want in zip(*(torch.autograd.grad(x, (q, k, v), do) for x in (out, expected)), strict=True):
        close(got, want)


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["half", "fp32"])
@pytest.mark.parametrize("others", [True, False], ids=["with query", "alone"])
@pytest.mark.parametrize("backward", ["own", "sdpa"])
def test_the_gradient_of_a_mask_has_its_shape_whoever_computes_it(both_ways, shape, kind, others, backward):
    q, k, v, do = inputs()
    if not others:
        q, k, v = q.detach(), k.detach(), v.detach()
    mask = make_mask(shape, kind).requires_grad_()
    wanted = (mask, q) if others else (mask,)
    out = ffpa_attn_func(q, k, v, attn_mask=mask, backward_backend="sdpa" if backward == "sdpa" else None)
    assert both_ways.calls
    got = torch.autograd.grad(out, wanted, do)
    assert [call["needs"] for call in both_ways.backward_calls] == [(others, others, others, True)] * (
        backward == "own"
    )
    want = torch.autograd.grad(SDPA(q, k, v, attn_mask=mask.to(HALF)), wanted, do)
    assert got[0].dtype == mask.dtype
    assert got[0].shape == mask.shape
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-2)


def test_gradients_of_a_masked_call_agree_with_finite_differences(cuda):
    """Of the fp32 formula that the fake backend evaluates, at one random direction in all four inputs."""
    q, k, v, do = inputs(Shape(1, 4, 2, 3, 4, 264))
    mask = torch.randn(4, 3, 4, requires_grad=True)
    out = ffpa_attn_func(q, k, v, attn_mask=mask, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v, mask), do)
    exact = [x.detach().double() for x in (q, k, v, mask)]
    step = [torch.randn_like(x) for x in exact]

    def value(sign):
        a, b, c, m = (x + sign * 1e-5 * d for x, d in zip(exact, step, strict=True))
        scores = a @ b.repeat_interleave(2, 1).transpose(-2, -1) * 264**-0.5 + m
        return (scores.softmax(-1) @ c.repeat_interleave(2, 1) * do.double()).sum()

    slope = (value(1) - value(-1)) / 2e-5
    got = sum((g.double() * d).sum() for g, d in zip(grads, step, strict=True))
    torch.testing.assert_close(got, slope, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_a_broadcast_mask_stays_a_view(cuda, shape):
    q, k, v, _ = make(SHAPE, HALF)
    mask = make_mask(shape, "half")
    ffpa_attn_func(q, k, v, attn_mask=mask)
    given = cuda.calls[0]["attn_mask"]
    assert given.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
    assert given.shape == (1,) * (4 - len(shape)) + shape


def test_an_expanded_mask_is_cast_by_autocast_without_being_written_out(cuda):
    q, k, v, _ = make(SHAPE, torch.float32)
    mask = torch.randn(1, 1, 5, 7).expand(3, 2, 5, 7)
    with torch.autocast("cpu", dtype=HALF):
        out = ffpa_attn_func(q, k, v, attn_mask=mask)
        expected = SDPA(q, k, v, attn_mask=mask)
    given = cuda.calls[0]["attn_mask"]
    assert given.dtype == HALF
    assert given.shape == (1, 1, 5, 7)
    close(out, expected)


def test_an_expanded_leaf_gets_a_gradient_for_each_of_its_elements(cuda):
    q, k, v, do = inputs()
    mask = torch.randn(1, 1, 5, 7, dtype=HALF).expand(3, 2, 5, 7).detach().requires_grad_()
    (got,) = torch.autograd.grad(ffpa_attn_func(q, k, v, attn_mask=mask), mask, do)
    (want,) = torch.autograd.grad(SDPA(q, k, v, attn_mask=mask), mask, do)
    close(got, want)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_mask_that_its_owner_expanded_stays_a_view_and_gets_a_gradient_of_its_own_shape(both_ways, autocast):
    q, k, v, do = (x.float() if autocast else x for x in inputs())
    bias = torch.randn(1, 1, 5, 7, dtype=torch.float32 if autocast else HALF, requires_grad=True)
    with torch.autocast("cpu", dtype=HALF, enabled=autocast):
        out = ffpa_attn_func(q, k, v, attn_mask=bias.expand(3, 2, 5, 7))
    (got,) = torch.autograd.grad(out, bias, do.to(out.dtype))
    given = both_ways.calls[0]["attn_mask"]
    assert given.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
    assert given.stride()[:2] == (0, 0)
    (want,) = torch.autograd.grad(SDPA(q.half(), k.half(), v.half(), attn_mask=bias.half()), bias, do.half())
    assert got.shape == bias.shape
    close(got, want, 1e-2)


def test_without_gradients_an_expanded_bias_is_as_small_as_it_is(both_ways):
    q, k, v, _ = make(SHAPE, HALF)
    bias = torch.randn(1, 1, 5, 7, dtype=HALF, requires_grad=True)
    with torch.no_grad():
        ffpa_attn_func(q, k, v, attn_mask=bias.expand(3, 2, 5, 7))
    assert both_ways.calls[0]["attn_mask"].shape == (1, 1, 5, 7)


@pytest.mark.parametrize(
    ("lead", "mask_lead", "runs"),
    [
        ((2, 3), (), True),
        ((2, 3), (1, 1), True),
        ((2, 3), (2, 3), True),
        ((2, 3), (2, 1), False),
        ((2, 3), (3,), False),
        ((2, 1), (2, 1), True),
        ((1, 3), (3,), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [5, 1])
def test_several_batch_dims_join_where_that_copies_no_large_mask(cuda, lead, mask_lead, runs, rows):
    q = torch.randn(*lead, 2, 5, 264, dtype=HALF)
    k = torch.randn(*lead, 2, 7, 264, dtype=HALF)
    mask = torch.randn(*mask_lead, 1, rows, 7, dtype=HALF)
    out = ffpa_attn_func(q, k, k, attn_mask=mask)
    close(out, SDPA(q, k, k, attn_mask=mask))
    assert bool(cuda.calls) == (runs or rows == 1)
    assert masks.joining_copies(mask, lead) != (runs or rows == 1)


@pytest.mark.parametrize(("rank", "mask_rank"), [(2, 2), (3, 2), (3, 3)])
def test_fewer_dims_are_read_as_sdpa_reads_them(cuda, rank, mask_rank):
    q, k, v, _ = (x[0, 0] if rank == 2 else x[0] for x in make(SHAPE, HALF))
    mask = make_mask((2, 5, 7)[-mask_rank:], "half")
    out = ffpa_attn_func(q, k, v, attn_mask=mask)
    assert cuda.calls
    close(out, SDPA(q, k, v, attn_mask=mask))


@pytest.mark.parametrize(
    "shape", [(7,), (), (3, 5, 7), (5, 6), (4, 1, 5, 7), (1, 3, 2, 5, 7), (2, 7, 5), (0, 7)], ids=str
)
@pytest.mark.parametrize("backend", [None, "cuda", "sdpa"])
def test_a_mask_that_does_not_broadcast_to_the_scores_is_a_value_error(cuda, shape, backend):
    q, k, v, _ = make(SHAPE, HALF)
    with pytest.raises(ValueError, match=r"attn_mask has shape .*\[3, 2, 5, 7\]"):
        ffpa_attn_func(q, k, v, attn_mask=torch.zeros(shape, dtype=HALF), backend=backend)
    assert "ValueError" in explain(q, k, v, attn_mask=torch.zeros(shape, dtype=HALF), backend=backend).error


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_a_mask_of_another_dtype_is_a_type_error(cuda, dtype):
    q, k, v, _ = make(SHAPE, HALF)
    with pytest.raises(TypeError, match="attn_mask has dtype"):
        ffpa_attn_func(q, k, v, attn_mask=torch.zeros(5, 7, dtype=dtype))


def test_a_mask_on_another_device_is_a_value_error(cuda):
    q, k, v, _ = make(SHAPE, HALF)
    with pytest.raises(ValueError, match="attn_mask is on meta"):
        ffpa_attn_func(q, k, v, attn_mask=torch.zeros(5, 7, dtype=HALF, device="meta"))


@pytest.mark.parametrize("backend", [None, "sdpa"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 1), (3, 1, 5, 7)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "half", "fp32"])
def test_a_mask_and_is_causal_both_apply(both_ways, shape, kind, backend):
    q, k, v, do = inputs()
    mask = make_mask(shape, kind)
    seen = torch.ones(5, 7, dtype=torch.bool).tril(2)
    whole = mask & seen if kind == "bool" else mask.to(HALF).masked_fill(~seen, float("-inf"))
    out = ffpa_attn_func(q, k, v, attn_mask=mask, is_causal=True, backend=backend)
    expected = SDPA(q, k, v, attn_mask=whole)
    close(out, expected)
    assert bool(both_ways.calls) == (backend is None)
    for got, want in zip(*(torch.autograd.grad(x, (q, k, v), do) for x in (out, expected)), strict=True):
        close(got, want)


def test_a_masked_row_gives_zero_and_an_infinite_lse(cuda):
    q, k, v, _ = make(SHAPE, HALF)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    out, lse = ffpa_attn_func(q, k, v, attn_mask=mask, return_lse=True)
    assert (out[:, :, 2] == 0).all()
    assert (lse[:, :, 2] == float("-inf")).all()


def test_no_keys_give_a_mask_an_empty_gradient(cuda):
    q, k, v, do = inputs(Shape(1, 2, 2, 5, 0, 264))
    mask = torch.zeros(5, 0, dtype=HALF, requires_grad=True)
    _, _, lse_mask = torch.autograd.grad(ffpa_attn_func(q, k, v, attn_mask=mask), (q, k, mask), do)
    assert lse_mask.shape == (5, 0)


def test_an_fp32_mask_is_cast_where_sdpa_runs_the_call(cuda):
    q, k, v, _ = make(SHAPE, HALF)
    mask = torch.randn(5, 7)
    close(ffpa_attn_func(q, k, v, mask, backend="sdpa"), SDPA(*(x.float() for x in (q, k, v)), mask))
    assert sdpa.fallback(q, k, v, mask.expand(3, 2, 5, 7)).dtype == HALF


class Own(torch.Tensor):
    """A subclass that may mean something else by attention."""


def test_subclasses_with_a_mask_are_sdpas(cuda, warnings_seen):
    q, k, v, _ = make(SHAPE, HALF)
    mask = make_mask((3, 1, 5, 7), "half")
    out = ffpa_attn_func(q.as_subclass(Own), k, v, attn_mask=mask)
    close(out.as_subclass(torch.Tensor), SDPA(q, k, v, attn_mask=mask))
    assert not cuda.calls
    assert len(warnings_seen) == 1


def test_a_backward_that_refuses_is_not_asked(cuda):
    q, k, v, _ = inputs()
    mask = make_mask((5, 7), "bool")
    with pytest.raises(NotImplementedError, match=r"triton.*backward"):
        ffpa_attn_func(q, k, v, attn_mask=mask, forward_backend="cuda", backward_backend="triton")
    found = explain(q, k, v, attn_mask=mask)
    assert (found.forward, found.backward) == ("cuda", "sdpa")
    assert "device" in " ".join(found.reasons["triton"])


def test_a_named_cuda_leaves_the_backward_to_whoever_runs_it(both_ways):
    q, k, v, do = inputs(Shape(1, 2, 1, 9, 17, 264, True))
    with registry.replaced("cuda", FakeCUDA()):
        found = explain(q, k, v, is_causal=True, enable_gqa=True, backend="cuda")
        assert (found.forward, found.backward) == ("cuda", "triton")
        out = ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True, backend="cuda")
    expected = ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True, backend="triton")
    for got, want in zip(*(torch.autograd.grad(x, (q, k, v), do) for x in (out, expected)), strict=True):
        close(got, want)
    assert len(both_ways.calls) == 1


def test_the_recomputed_backward_is_reported_once_and_strictly_forbidden(cuda, monkeypatch, warnings_seen):
    q, k, v, _ = inputs()
    mask = make_mask((5, 7), "bool")
    for _ in range(2):
        ffpa_attn_func(q, k, v, attn_mask=mask)
    assert len(warnings_seen) == 1
    assert "backward" in warnings_seen[0]
    assert "no-backward" not in warnings_seen[0]
    monkeypatch.setenv("FFPA_JIT_STRICT", "1")
    with pytest.raises(NotImplementedError, match="backward"):
        ffpa_attn_func(q, k, v, attn_mask=mask)
    assert explain(q, k, v, attn_mask=mask).error is not None
    ffpa_attn_func(q, k, v, attn_mask=mask, backward_backend="sdpa")
    assert explain(q, k, v, attn_mask=mask, backward_backend="sdpa").error is None


def test_a_second_derivative_of_a_masked_call_is_that_of_sdpa(cuda):
    q, k, v, _ = (x.float().to(HALF) for x in make(Shape(1, 1, 1, 3, 4, 264), HALF))
    mask = torch.randn(3, 4, dtype=HALF, requires_grad=True)
    seconds = []
    for call in (ffpa_attn_func, SDPA):
        (grad,) = torch.autograd.grad(call(q, k, v, attn_mask=mask).float().square().sum(), mask, create_graph=True)
        assert grad.requires_grad
        seconds.append(grad)
    close(*seconds)


# Who runs it on a GPU; problems are descriptions, so no GPU is needed to plan them.


def gpu_problem(**changes) -> Problem:
    fields = {
        "batch": 1, "heads_q": 8, "heads_kv": 8, "len_q": 8192, "len_kv": 8192, "head_dim": 512, "head_dim_v": 512,
        "dtype": torch.bfloat16, "device_type": "cuda", "device_index": 0, "arch": "sm_90", "is_causal": False,
        "has_mask": True, "dropout_p": 0.0, "needs_grad": True, "mask_needs_grad": False,
    }  # fmt: skip
    return Problem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "sides"),
    [
        ({"needs_grad": False}, ("cuda", None)),
        ({}, ("sdpa", "sdpa")),
        ({"wants_lse": True}, ("cuda", "sdpa")),
        ({"heads_kv": 2}, ("cuda", "sdpa")),
        ({"heads_kv": 2, "needs_grad": False, "mask_needs_grad": True}, ("cuda", "sdpa")),
        ({"dropout_p": 0.1}, ("sdpa", "sdpa")),
        ({"dropout_p": 0.1, "needs_grad": False}, ("cuda", None)),
    ],
    ids=str,
)
def test_a_forward_before_a_recomputed_backward_runs_only_where_it_saves_something(cuda, changes, sides):
    """Where no backend has a backward for the call."""
    plan = dispatch.choose(gpu_problem(**changes), None, None)
    assert (plan.forward, plan.backward) == sides
    if sides == ("sdpa", "sdpa"):
        assert dispatch.fallback_of(plan, None, None) == "forward"
        assert "cuda" in plan.rejected
        assert "triton" in plan.rejected


def test_a_named_forward_keeps_its_recomputed_backward(cuda):
    plan = dispatch.choose(gpu_problem(), DEFAULTS["cuda"], None)
    assert (plan.forward, plan.backward) == ("cuda", "sdpa")


# Dropout.


def test_dropout_words_are_drawn_once_a_call_from_the_generator(cuda):
    q, k, v, _ = make(SHAPE, HALF)
    before = torch.get_rng_state()
    ffpa_attn_func(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    first, second = (ffpa_attn_func(q, k, v, dropout_p=0.4) for _ in range(2))
    torch.manual_seed(5)
    again = ffpa_attn_func(q, k, v, dropout_p=0.4)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert (cuda.calls[0]["rng"], cuda.calls[0]["dropout_p"]) == (None, 0.0)
    words = cuda.calls[1]["rng"]
    assert (words.dtype, words.shape) == (torch.int64, (2,))
    assert cuda.calls[1]["dropout_p"] == 0.4


def test_dropout_keeps_the_log_sum_exp_and_drops_weights(cuda):
    q, k, v, _ = make(SHAPE, HALF)
    out, lse = ffpa_attn_func(q, k, v, dropout_p=0.4, attn_mask=make_mask((5, 7), "bool"), return_lse=True)
    call = cuda.calls[0]
    call.pop("mask_strides")
    close(out, attention(q, k, v, **call)[0])
    call["dropout_p"] = 0.0
    torch.testing.assert_close(lse, attention(q, k, v, **call)[1])


def test_dropout_with_gradients_goes_to_sdpa_and_is_reported_once(cuda, warnings_seen):
    q, k, v, do = inputs()
    for _ in range(2):
        torch.manual_seed(5)
        out = ffpa_attn_func(q, k, v, dropout_p=0.3)
    torch.manual_seed(5)
    expected = SDPA(q, k, v, dropout_p=0.3)
    assert torch.equal(out, expected)
    for got, want in zip(*(torch.autograd.grad(x, (q, k, v), do) for x in (out, expected)), strict=True):
        assert torch.equal(got, want)
    assert not cuda.calls
    assert len(warnings_seen) == 1
    assert "dropout-backward" in warnings_seen[0]
    assert "no_grad" in " ".join(explain(q, k, v, dropout_p=0.3).reasons["cuda"])


@pytest.mark.parametrize(
    "sides", [{"backend": "cuda"}, {"forward_backend": "cuda"}, {"forward_backend": "cuda", "backward_backend": "sdpa"}]
)
def test_a_named_forward_that_no_backward_can_follow_raises(cuda, sides):
    q, k, v, _ = inputs()
    with pytest.raises(NotImplementedError, match="dropout-backward"):
        ffpa_attn_func(q, k, v, dropout_p=0.3, **sides)
    with torch.no_grad():
        ffpa_attn_func(q, k, v, dropout_p=0.3, **sides)
    assert "dropout-backward" in explain(q, k, v, dropout_p=0.3, **sides).error


def test_the_operator_itself_refuses_to_recompute_dropout(cuda):
    q, k, v, do = inputs()
    rng = torch.tensor([1, 2])
    out, _ = torch.ops.ffpa_jit.flash_attn(q, k, v, None, rng, 0.1, False, 0.3, -1, -1, 0.0, "cuda", "sdpa")
    with pytest.raises(NotImplementedError, match="dropout"):
        out.backward(do)


def test_the_operator_itself_refuses_to_recompute_a_softcap(both_ways):
    q, k, v, do = inputs()
    out, _ = torch.ops.ffpa_jit.flash_attn(q, k, v, None, None, 0.1, False, 0.0, -1, -1, 9.0, "triton", "sdpa")
    with pytest.raises(NotImplementedError, match="softcap"):
        out.backward(do)


def test_a_backward_that_takes_the_same_words_drops_what_the_forward_dropped(both_ways):
    q, k, v, do = inputs()
    out = ffpa_attn_func(q, k, v, dropout_p=0.3)
    grads = torch.autograd.grad(out, (q, k, v), do)
    keep = kept(both_ways.calls[0]["rng"], 0.3, (3, 2, 5, 7)) / 0.7
    weights = (q.float() @ k.float().transpose(-2, -1) * 264**-0.5).softmax(-1) * keep
    expected = torch.autograd.grad(weights @ v.float(), (q, k, v), do.float())
    for got, want in zip(grads, expected, strict=True):
        close(got, want)
    assert torch.equal(both_ways.calls[0]["rng"], both_ways.backward_calls[0]["rng"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_words_again(both_ways, reentrant):
    q, k, v, do = inputs()
    mask = make_mask((5, 7), "half")

    def block(q, k, v):
        return ffpa_attn_func(q, k, v, attn_mask=mask, dropout_p=0.3)

    torch.manual_seed(7)
    expected = torch.autograd.grad(block(q, k, v), (q, k, v), do)
    torch.manual_seed(7)
    out = checkpoint(block, q, k, v, use_reentrant=reentrant)
    out.backward(do)
    for x, want in zip((q, k, v), expected, strict=True):
        assert torch.equal(x.grad, want)
    words = [call["rng"].tolist() for call in both_ways.calls]
    assert words[0] == words[1] == words[2]


# Compilers.


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("backward", ["own", "sdpa"])
def test_a_compiled_masked_call_has_one_graph_and_the_same_gradients(both_ways, backend, backward):
    named = "sdpa" if backward == "sdpa" else None
    counter = CompileCounterWithBackend(backend)

    def step(q, k, v, mask):
        return ffpa_attn_func(q * 1, k, v, attn_mask=mask, backward_backend=named).float().square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for length in (9, 17, 33):
        q, k, v, _ = inputs(Shape(2, 2, 2, length, length + 3, 264))
        mask = torch.randn(2, length, length + 3, dtype=HALF, requires_grad=True)
        grads = torch.autograd.grad(compiled(q, k, v, mask), (q, k, v, mask))
        expected = torch.autograd.grad(step(q, k, v, mask), (q, k, v, mask))
        for got, want in zip(grads, expected, strict=True):
            close(got, want, 2e-2)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("kind", ["bool", "half", "fp32"])
def test_compiled_masks_reach_the_backend_as_views(cuda, kind, expanded):
    compiled = torch.compile(ffpa_attn_func, fullgraph=True, backend="inductor")
    q, k, v, _ = make(SHAPE, HALF)
    mask = make_mask((1, 1, 5, 7), kind)
    compiled(q, k, v, attn_mask=mask.expand(3, 2, 5, 7) if expanded else mask)
    assert cuda.calls[-1]["attn_mask"].shape == (1, 1, 5, 7)
    assert cuda.calls[-1]["mask_strides"][2:] == (7, 1)
    close(compiled(q, k, v, attn_mask=mask), SDPA(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_dropout_draws_new_words_at_every_call_and_replays_them_backward(both_ways, backend):
    compiled = torch.compile(
        lambda q, k, v: ffpa_attn_func(q, k, v, dropout_p=0.3) * 1.0, fullgraph=True, backend=backend
    )
    q, k, v, do = inputs()
    for _ in range(2):
        grads = torch.autograd.grad(compiled(q, k, v), (q, k, v), do)
        keep = kept(both_ways.calls[-1]["rng"], 0.3, (3, 2, 5, 7)) / 0.7
        weights = (q.float() @ k.float().transpose(-2, -1) * 264**-0.5).softmax(-1) * keep
        expected = torch.autograd.grad(weights @ v.float(), (q, k, v), do.float())
        for got, want in zip(grads, expected, strict=True):
            close(got, want)
    first, second = (call["rng"].tolist() for call in both_ways.calls)
    assert first != second


def test_options_reach_a_compiled_backend(cuda):
    chosen = CUDABackend(acc="f16", stages=2)
    compiled = torch.compile(
        lambda q, k, v: ffpa_attn_func(q, k, v, forward_backend=chosen), fullgraph=True, backend="aot_eager"
    )
    q, k, v, _ = make(SHAPE, HALF)
    compiled(q, k, v)
    assert (cuda.calls[0]["options"].acc, cuda.calls[0]["options"].stages) == ("f16", 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("options", [(-1, -1, 0.0), (2, 1, 0.0), (-1, 0, 3.0)], ids=str)
def test_the_forward_operator_passes_opcheck_with_masks_and_dropout(both_ways, masked, dropped, options):
    q, k, v, _ = inputs(Shape(2, 4, 2, 5, 7, 264))
    mask = make_mask((1, 4, 5, 7), "fp32") if masked else None
    rng = torch.tensor([3, 4]) if dropped else None
    arguments = (q, k, v, mask, rng, 0.05, False, 0.25 if dropped else 0.0, *options, "triton;autotune=True", "triton")
    torch.library.opcheck(torch.ops.ffpa_jit.flash_attn, arguments)
    q, k, v = q.detach(), k.detach(), v.detach()
    out, lse = torch.ops.ffpa_jit.flash_attn(q, k, v, *arguments[3:])
    needs = [True, True, False, masked]
    arguments = (torch.randn_like(out), None, q, k, v, mask, rng, out, lse, *arguments[5:11], needs)
    torch.library.opcheck(
        torch.ops.ffpa_jit.flash_attn_backward, (*arguments, "triton"), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("backward", ["triton", "sdpa"])
@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (3, 2, 5, 7), (1, 2, 1, 7)], ids=str)
def test_the_forward_operator_passes_opcheck_with_a_mask_that_learns(both_ways, shape, backward):
    q, k, v, _ = inputs()
    mask = make_mask(shape, "half").requires_grad_()
    torch.library.opcheck(
        torch.ops.ffpa_jit.flash_attn,
        (q, k, v, mask, None, 0.05, False, 0.0, -1, -1, 0.0, "triton", backward),
        # The other test differentiates the log-sum-exp, which SDPA does not return.
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        + ("test_aot_dispatch_dynamic",) * (backward == "triton"),
    )


# Options.


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (TritonBackend(), "triton"),
        (TritonBackend(forward=True), "triton"),
        (TritonBackend(autotune=True, grad_q_storage_dtype="fp32"), "triton;autotune=True;grad_q_storage_dtype=fp32"),
        (TritonBackend(workspace_mb=0), "triton;workspace_mb=0"),
        (TritonBackend(workspace_mb=64.0), "triton;workspace_mb=64"),
        (TritonBackend(workspace_mb=0.25), "triton;workspace_mb=0.25"),
        (TritonBackend(workspace_mb=1e-7), "triton;workspace_mb=1e-07"),
        (CUDABackend(), "cuda"),
        (CUDABackend(acc="f16", stages=2), "cuda;acc=f16;stages=2"),
        (SDPABackend(high_precision_grad=True), "sdpa;high_precision_grad=True"),
    ],
)
def test_backends_travel_as_text(backend, text):
    assert encode(backend) == text
    back = decode(text)
    assert type(back) is type(backend)
    assert encode(back) == text


@pytest.mark.parametrize(
    "text",
    ["mkl", "cuda;speed=9", "cuda;acc=f64", "cuda;stages=9", "", "cuda;stages=two", "triton;workspace_mb=-1",
     "triton;workspace_mb=nan", "triton;workspace_mb=no"],
)  # fmt: skip
def test_text_that_is_no_backend_is_an_error(text):
    with pytest.raises((ValueError, TypeError)):
        decode(text)


@pytest.mark.parametrize("chosen", ["cuda", CUDABackend(), CUDABackend(acc="f16", stages=3)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_options_reach_the_backend_as_the_object(cuda, chosen, masked):
    q, k, v, _ = make(SHAPE, HALF)
    ffpa_attn_func(q, k, v, make_mask((5, 7), "bool") if masked else None, backend=chosen)
    assert cuda.calls[0]["options"] == (CUDABackend() if chosen == "cuda" else chosen)


def test_f16_accumulators_with_bf16_inputs_are_a_value_error_before_any_launch(cuda, monkeypatch):
    q, k, v, _ = make(SHAPE, torch.bfloat16)
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
        with pytest.raises(ValueError, match="needs float16"):
            ffpa_attn_func(q, k, v, backend=CUDABackend(acc="f16"))
        assert explain(q, k, v, backend=CUDABackend(acc="f16")).error.startswith("ValueError")
    assert not cuda.calls
    ffpa_attn_func(q, k, v, backend=CUDABackend())
    assert cuda.calls


def test_the_mask_free_call_goes_to_cuda_where_triton_refuses(cuda):
    q, k, v, _ = make(SHAPE, HALF)
    close(ffpa_attn_func(q, k, v), SDPA(q, k, v))
    assert cuda.calls[0]["attn_mask"] is None
    assert cuda.calls[0]["rng"] is None


def test_reasons_of_both_backends_are_told_in_one_message(warnings_seen):
    with registry.replaced("cuda", Refusing()):
        q, k, v, _ = make(SHAPE, torch.bfloat16)
        ffpa_attn_func(q, k, v, attn_mask=torch.ones(5, 7, dtype=torch.bool))
        ffpa_attn_func(torch.cat([q] * 4, -1), torch.cat([k] * 4, -1), torch.cat([v] * 4, -1))
    assert len(warnings_seen) == 2
    assert "triton: [interpreter-dtype]" in warnings_seen[0]
    assert "cuda: [device]" in warnings_seen[0]
    assert "triton, cuda: [head_dim]" in warnings_seen[1]
