"""Window, softcap, keywords of other libraries, and the backward for merged outputs: what the public functions accept,
what they say when they do not, and what reaches a backend. A backend in plain torch stands in for Triton's.
"""

from __future__ import annotations

import enum

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from ffpa_jit import TritonBackend, dispatch, explain, ffpa_attn_backward, ffpa_attn_func, registry, sdpa
from ffpa_jit.problem import Problem
from tests import oracle
from tests.cases.shapes import Shape, leaves, make
from tests.cpu.fakes import FakeCUDA, FakeTriton, Refusing

SDPA = F.scaled_dot_product_attention
HALF = torch.float16
SHAPE = Shape(2, 4, 2, 9, 14, 264)
WINDOWS = [(-1, -1), (3, -1), (-1, 2), (3, 2), (0, 0), (100, 0)]


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    torch.compiler.reset()


@pytest.fixture
def triton():
    fake = FakeTriton()
    with registry.replaced("triton", fake), registry.replaced("cuda", FakeCUDA()):
        yield fake


@pytest.fixture
def nobody():
    with registry.replaced("triton", Refusing()), registry.replaced("cuda", Refusing()):
        yield


def inputs(shape: Shape = SHAPE):
    q, k, v, do = make(shape, HALF)
    return (*leaves(q, k, v), do)


# Windows and softcap.


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_all_options_apply_together_and_reach_both_directions(triton, window, softcap, is_causal, masked):
    q, k, v, do = inputs()
    mask = torch.randn(4, 9, 14, requires_grad=True) if masked else None
    options = {"window_size": window, "softcap": softcap, "is_causal": is_causal, "attn_mask": mask}
    out, lse = ffpa_attn_func(q, k, v, enable_gqa=True, return_lse=True, **options)
    wanted = (q, k, v, mask) if masked else (q, k, v)
    dlse = torch.randn_like(lse)
    dq, dk, dv, *rest = torch.autograd.grad((out, lse), wanted, (do, dlse))
    oracle.check(
        q, k, v, out=out, lse=lse, grads=(dq, dk, dv), grad_mask=rest[0] if masked else None, grad_out=do,
        grad_lse=dlse, is_causal=is_causal, window=window, softcap=softcap, attn_mask=mask,
    )  # fmt: skip
    for call in (triton.calls[0], triton.backward_calls[0]):
        assert (call["window"], call["softcap"]) == ((window[0], -1 if is_causal else window[1]), softcap)


@pytest.mark.parametrize("off", [(-1, -1), [-1, -1], None, (None, None), (-1, None), (np.int64(-1), -1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 264])
def test_every_spelling_of_no_window_is_none(triton, off, head_dim):
    q, k, v, _ = make(Shape(1, 2, 2, 5, 7, head_dim), HALF)
    out = ffpa_attn_func(q, k, v, window_size=off, softcap=None)
    torch.testing.assert_close(out, SDPA(q, k, v), rtol=4e-3, atol=4e-3)
    assert all(call["window"] == (-1, -1) for call in triton.calls)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"window_size": 4}, TypeError, "window_size must be a pair.*int"),
        ({"window_size": (4,)}, ValueError, "window_size has 1"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size has 3"),
        ({"window_size": (1.5, 2)}, TypeError, "window_size.*float"),
        ({"window_size": (True, 2)}, TypeError, "window_size.*bool"),
        ({"window_size": torch.tensor([1, 2])}, TypeError, "window_size.*Tensor"),
        ({"window_size": (torch.tensor(1), 2)}, TypeError, "window_size.*Tensor"),
        ({"window_size": (-2, 0)}, ValueError, "window_size has -2"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ({"softcap": float("inf")}, ValueError, "softcap=inf"),
        ({"softcap": float("nan")}, ValueError, "softcap=nan"),
        ({"softcap": "20"}, TypeError, "softcap must be a number"),
        ({"softcap": [20.0]}, TypeError, "softcap must be a number"),
        ({"softcap": torch.tensor(2.0, requires_grad=True)}, TypeError, "softcap must be a number"),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 264])
def test_windows_and_softcaps_that_are_none_are_named(triton, arguments, error, words, head_dim):
    q, k, v, _ = make(Shape(1, 2, 2, 5, 7, head_dim), HALF)
    with pytest.raises(error, match=words):
        ffpa_attn_func(q, k, v, **arguments)
    assert explain(q, k, v, **arguments).error.startswith(error.__name__)


@pytest.mark.parametrize(
    "arguments", [{"window_size": (3, 0)}, {"softcap": 5.0}, {"window_size": (3, 0), "softcap": 5}]
)
def test_up_to_head_dim_256_there_is_neither(triton, arguments):
    q, k, v, _ = make(Shape(1, 2, 2, 5, 7, 64), HALF)
    with pytest.raises(NotImplementedError, match=" and ".join(arguments)):
        ffpa_attn_func(q, k, v, **arguments)
    assert " and ".join(arguments) in explain(q, k, v, **arguments).error


def test_a_softcap_that_no_backend_has_is_refused_with_every_reason(nobody):
    q, k, v, _ = make(SHAPE, HALF)
    with pytest.raises(NotImplementedError) as refused:
        ffpa_attn_func(q, k, v, enable_gqa=True, softcap=30.0)
    for word in ("triton: [device]", "cuda: [device]", "sdpa: [softcap]", "30.0"):
        assert word in str(refused.value)
    found = explain(q, k, v, enable_gqa=True, softcap=30.0)
    assert found.error == f"NotImplementedError: {refused.value}"
    assert "softcap" in " ".join(found.reasons["sdpa"])


@pytest.mark.parametrize("window", [*WINDOWS, (2, 30)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "half", "fp32"])
def test_sdpa_runs_a_window_as_a_mask_that_fits(nobody, window, is_causal, masked):
    q, k, v, do = inputs()
    mask = None
    if masked:
        mask = torch.randn(2, 1, 9, 14, dtype=HALF if masked == "half" else torch.float32)
        mask = mask > -0.5 if masked == "bool" else mask
    options = {"window_size": window, "is_causal": is_causal, "attn_mask": mask}
    out = ffpa_attn_func(q, k, v, enable_gqa=True, **options)
    grads = torch.autograd.grad(out, (q, k, v), do)
    exact = oracle.attention(q, k, v, window=window, is_causal=is_causal, attn_mask=mask, grad_out=do)
    for got, want in zip((out, *grads), (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


def test_sdpa_computes_the_gradients_of_a_windowed_forward_of_another(triton):
    q, k, v, do = inputs()
    out = ffpa_attn_func(q, k, v, enable_gqa=True, window_size=(3, 1), backward_backend="sdpa")
    grads = torch.autograd.grad(out, (q, k, v), do)
    exact = oracle.attention(q, k, v, window=(3, 1), grad_out=do)
    for got, want in zip(grads, (exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
    assert not triton.backward_calls
    with pytest.raises(NotImplementedError, match="softcap"):
        ffpa_attn_func(q, k, v, enable_gqa=True, softcap=3.0, backward_backend="sdpa")


@pytest.mark.parametrize(
    "options", [{"window_size": (3, 0)}, {"is_causal": True, "attn_mask": torch.zeros(9, 14).half()}]
)
def test_a_mask_for_sdpa_that_is_larger_than_the_cap_is_refused(nobody, monkeypatch, options):
    q, k, v, _ = make(SHAPE, HALF)
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "0.0001")
    for backend in (None, "sdpa"):
        with pytest.raises(NotImplementedError, match=r"combined-mask.*FFPA_JIT_WORKSPACE_MB"):
            ffpa_attn_func(q, k, v, enable_gqa=True, backend=backend, **options)
        assert "combined-mask" in explain(q, k, v, enable_gqa=True, backend=backend, **options).error
    if "attn_mask" in options:  # SDPA takes that too, whatever memory it costs
        monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        exact = oracle.attention(q, k, v, is_causal=True).out
        torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


def test_the_combined_mask_of_sdpa_is_counted_by_what_the_caller_gave():
    def problem(**changes):
        fields = {
            "batch": 4, "heads_q": 8, "heads_kv": 8, "len_q": 4096, "len_kv": 4096, "head_dim": 512, "head_dim_v": 512,
            "dtype": torch.bfloat16, "device_type": "cuda", "device_index": 0, "arch": "sm_90", "is_causal": True,
            "has_mask": True, "dropout_p": 0.0, "needs_grad": False, "mask_needs_grad": False,
        }  # fmt: skip
        return Problem(**{**fields, **changes})

    assert not sdpa.refusals(problem(mask_planes=4))
    assert sdpa.refusals(problem(mask_planes=32))
    assert not sdpa.refusals(problem(mask_planes=32, is_causal=False))
    assert sdpa.refusals(problem(has_mask=False, len_q=30_000, len_kv=30_000, window=(10, -1)))
    assert not sdpa.refusals(problem(has_mask=False, len_q=30_000, len_kv=30_000))


def test_cuda_is_passed_over_for_what_it_does_not_have(triton):
    q, k, v, _ = make(SHAPE, HALF)
    triton.predict_us = lambda problem: 500.0  # cuda would be faster
    found = explain(q, k, v, enable_gqa=True, window_size=(3, 0), softcap=2.0)
    assert found.forward == "triton"
    assert found.reasons["cuda"] == ["it has no window", "it has no softcap"]
    assert "window (3, 0)" in found.summary
    assert "softcap 2.0" in found.summary


def test_forward_mode_derivatives_have_no_window(triton):
    q, k, v, _ = make(SHAPE, HALF)
    with pytest.raises(NotImplementedError, match="window_size"):
        torch.func.jvp(lambda q: ffpa_attn_func(q, k, v, enable_gqa=True, window_size=(2, 0)), (q,), (q,))


def test_installed_as_sdpa_an_option_that_sdpa_lacks_still_raises(triton, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    q, k, v, _ = make(Shape(1, 1, 1, 9, 5, 264), HALF)
    F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match="keys"):
        F.scaled_dot_product_attention(q, k, v, is_causal=True, window_size=(3, 0))


# Keywords of other libraries.


@pytest.mark.parametrize("run", [ffpa_attn_func, explain])
@pytest.mark.parametrize("head_dim", [64, 264])
def test_known_options_that_no_kernel_has_are_refused_together_by_name(triton, run, head_dim):
    q, k, v, _ = make(Shape(1, 2, 2, 5, 7, head_dim), HALF)
    given = {"s_aux": torch.ones(2), "alibi_slopes": torch.ones(2), "score_mod": None, "num_splits": 4}
    if run is explain:
        message = explain(q, k, v, **given).error
    else:
        with pytest.raises(NotImplementedError) as refused:
            ffpa_attn_func(q, k, v, **given)
        message = str(refused.value)
    assert "alibi_slopes, num_splits, s_aux" in message
    assert "score_mod" not in message
    assert "window_size" in message  # what there is instead


@pytest.mark.parametrize(
    "name",
    ["alibi_slopes", "s_aux", "sink", "sinks", "learnable_sink", "block_table", "seqused_k", "score_mod", "block_mask",
     "aux_tensors", "position_bias", "sliding_window"],
)  # fmt: skip
def test_each_known_option_is_refused_and_its_none_is_not(triton, name):
    q, k, v, _ = make(SHAPE, HALF)
    with pytest.raises(NotImplementedError, match=name):
        ffpa_attn_func(q, k, v, enable_gqa=True, **{name: torch.ones(1)})
    assert ffpa_attn_func(q, k, v, enable_gqa=True, **{name: None}).shape == q.shape


def test_an_unknown_option_is_a_type_error_even_if_it_is_none(triton):
    q, k, v, _ = make(SHAPE, HALF)
    message = r"ffpa_attn_func\(\) got unexpected keyword argument\(s\): causal, is_casual"
    with pytest.raises(TypeError, match=message):
        ffpa_attn_func(q, k, v, is_casual=True, causal=None, alibi_slopes=torch.ones(1))
    assert "TypeError" in explain(q, k, v, is_casual=True).error


# Compilers.


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_with_options_has_one_graph_for_all_lengths(triton, backend):
    counter = CompileCounterWithBackend(backend)

    def step(q, k, v):
        out, lse = ffpa_attn_func(q * 1, k, v, is_causal=True, window_size=(5, 0), softcap=4.0, return_lse=True)
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for length in (9, 17, 40):
        q, k, v, _ = inputs(Shape(2, 2, 2, length, length + 3, 264))
        grads = torch.autograd.grad(compiled(q, k, v), (q, k, v))
        expected = torch.autograd.grad(step(q, k, v), (q, k, v))
        for got, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


@pytest.mark.parametrize(
    "options", [{"window_size": (5, 0)}, {"is_causal": True, "attn_mask": torch.zeros(14).expand(9, 14)}]
)
def test_the_mask_for_sdpa_can_be_traced(nobody, options):
    q, k, v, _ = make(SHAPE, HALF)
    compiled = torch.compile(
        lambda q, k, v: ffpa_attn_func(q, k, v, enable_gqa=True, **options), fullgraph=True, dynamic=True,
        backend="aot_eager",
    )  # fmt: skip
    torch.testing.assert_close(compiled(q, k, v), ffpa_attn_func(q, k, v, enable_gqa=True, **options))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("megabytes", [0, 64, 0.5])
def test_the_workspace_of_a_named_backend_reaches_it_compiled_or_not(triton, dynamic, megabytes):
    chosen = TritonBackend(workspace_mb=megabytes)

    def call(q, k, v):
        return ffpa_attn_func(q, k, v, enable_gqa=True, backend=chosen).float().sum()

    q, k, v, _ = inputs()
    for run in (call, torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")):
        run(q, k, v).backward()
        assert triton.calls[-1]["options"].workspace_mb == megabytes
        assert triton.backward_calls[-1]["options"].workspace_mb == megabytes


# The backward for merged outputs.

DENSE = [{}, {"is_causal": True}, {"window_size": (4, 1), "softcap": 3.0}, {"attn_mask": torch.randn(9, 14)}]


@pytest.mark.parametrize("options", DENSE, ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("grad", [False, True])
def test_the_backward_of_an_unsharded_call_is_autograds(triton, options, grad):
    q, k, v, do = inputs()
    out, lse = ffpa_attn_func(q, k, v, enable_gqa=True, return_lse=True, **options)
    dlse = torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    with torch.set_grad_enabled(grad):
        got = ffpa_attn_backward(do, q, k, v, out, lse, grad_lse=dlse, enable_gqa=True, **options)
    for a, b, x in zip(got, expected, (q, k, v), strict=True):
        assert torch.equal(a, b)
        assert (a.stride(), a.requires_grad) == (torch.empty_like(x).stride(), grad)
    if grad:
        with pytest.raises(NotImplementedError, match="derivative"):
            got[0].float().square().sum().backward()


def test_the_gradients_of_shards_of_the_keys_are_those_of_the_whole(triton):
    q, k, v, do = make(SHAPE, HALF)
    cuts = [slice(0, 5), slice(5, 5), slice(5, 14)]  # the second shard has no keys
    parts = [ffpa_attn_func(q, k[:, :, c], v[:, :, c], enable_gqa=True, return_lse=True) for c in cuts]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    out = sum(torch.exp(part[1] - lse).unsqueeze(-1) * part[0].float() for part in parts).half()
    grads = [ffpa_attn_backward(do, q, k[:, :, c], v[:, :, c], out, lse, enable_gqa=True) for c in cuts]
    dq = sum(grad[0].float() for grad in grads)
    dk, dv = (torch.cat([grad[i] for grad in grads], 2) for i in (1, 2))
    exact = oracle.attention(q, k, v, grad_out=do)
    for got, want in zip((dq, dk, dv), (exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    assert not grads[1][0].any()
    assert [g.shape[2] for g in grads[1]] == [9, 0, 0]


def test_rows_without_keys_get_no_gradient_whatever_the_merged_output_says(triton):
    q, k, v, do = make(SHAPE, HALF)
    out, lse = ffpa_attn_func(q, k, v, enable_gqa=True, return_lse=True)
    lse[:, :, 3] = float("-inf")
    dq, dk, dv = ffpa_attn_backward(do, q, k, v, out, lse, enable_gqa=True)
    assert not dq[:, :, 3].any()
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))


def test_only_what_is_needed_is_computed(triton):
    q, k, v, do = make(SHAPE, HALF)
    out, lse = ffpa_attn_func(q, k, v, enable_gqa=True, return_lse=True)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            dq, dk, dv = ffpa_attn_backward(do, q, k, v, out, lse, enable_gqa=True, needs=(False, True, False))
        assert (dq, dv) == (None, None)
        assert dk.shape == k.shape
    assert triton.backward_calls[-1]["needs"] == (False, True, False, False)


@pytest.mark.parametrize("name", ["enable_gqa", "return_lse", "is_causal"])
def test_a_flag_is_true_or_false(triton, name):
    q, k, v, _ = make(SHAPE, HALF)
    with pytest.raises(TypeError, match=f"{name} must be True or False, not str"):
        ffpa_attn_func(q, k, v, **{name: "no"})


@pytest.mark.parametrize("name", ["query", "attn_mask"])
def test_sparse_tensors_are_refused_by_their_layout(triton, name):
    q, k, v, _ = make(SHAPE, HALF)
    given = {"query": q, "key": k, "value": v, "attn_mask": torch.zeros(q.shape[2], k.shape[2], dtype=HALF)}
    given[name] = given[name].to_sparse()
    with pytest.raises(NotImplementedError, match=r"layout torch\.sparse_coo"):
        ffpa_attn_func(**given, enable_gqa=True, backend="triton")


class Keys(enum.IntEnum):
    before = 3


def test_a_window_of_another_kind_of_int_reaches_a_backend_as_an_int(triton):
    q, k, v, _ = make(SHAPE, HALF)
    ffpa_attn_func(q, k, v, enable_gqa=True, window_size=(Keys.before, 0), backend="triton")
    assert [type(limit) for limit in triton.calls[-1]["window"]] == [int, int]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"grad_out": lambda x: x.float()}, TypeError, "grad_out has dtype torch.float32.*torch.float16"),
        ({"grad_out": lambda x: None}, TypeError, "grad_out must be a tensor"),
        ({"out": lambda x: x[:, :2]}, ValueError, "out has shape"),
        ({"lse": lambda x: x.half()}, TypeError, "lse has dtype torch.float16.*torch.float32"),
        ({"lse": lambda x: x[..., None]}, ValueError, "lse has shape"),
        ({"grad_lse": lambda x: torch.zeros(1)}, ValueError, "grad_lse has shape"),
        ({"lse": lambda x: x.to("meta")}, ValueError, "lse is on meta"),
        ({"query": lambda x: x[0]}, ValueError, "query has shape"),
        ({"key": lambda x: x[:1]}, ValueError, "batch sizes"),
        ({"value": lambda x: x[:, :, :3]}, ValueError, "positions"),
        ({"key": lambda x: x.bfloat16()}, TypeError, "dtypes"),
        ({"is_causal": lambda x: "no"}, TypeError, "is_causal"),
        ({"enable_gqa": lambda x: "no"}, TypeError, "enable_gqa must be True or False"),
        ({"lse": lambda x: x.to_sparse()}, NotImplementedError, "layout torch.sparse_coo"),
        ({"scale": lambda x: "1"}, TypeError, "scale"),
        ({"backend": lambda x: "cuda"}, ValueError, "forward only"),
        ({"backend": lambda x: "sdpa"}, NotImplementedError, "log-sum-exp"),
        ({"backend": lambda x: "cutedsl"}, ValueError, "forward only"),
        ({"backend": lambda x: "mkl"}, ValueError, "mkl"),
        ({"needs": lambda x: (True, False)}, ValueError, "needs"),
        ({"window_size": lambda x: (1,)}, ValueError, "window_size"),
        ({"attn_mask": lambda x: torch.zeros(3, 3)}, ValueError, "attn_mask has shape"),
        ({"enable_gqa": lambda x: False}, ValueError, "enable_gqa"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_the_backward_are_named(triton, change, error, words):
    q, k, v, do = make(SHAPE, HALF)
    out, lse = ffpa_attn_func(q, k, v, enable_gqa=True, return_lse=True)
    given = {"grad_out": do, "query": q, "key": k, "value": v, "out": out, "lse": lse, "enable_gqa": True}
    given.update({name: make_it(given.get(name)) for name, make_it in change.items()})
    with pytest.raises(error, match=words):
        ffpa_attn_backward(**given)


@pytest.mark.parametrize("head_dim", [64, 261])
def test_the_backward_refuses_head_dims_with_every_reason(triton, head_dim):
    q, k, v, do = make(Shape(1, 2, 2, 5, 7, head_dim), HALF)
    with pytest.raises(NotImplementedError) as refused:
        ffpa_attn_backward(do, q, k, v, do, torch.zeros(1, 2, 5))
    for word in (f"triton: [head_dim{'_multiple' if head_dim == 261 else ''}]", "cuda: [head_dim", str(head_dim)):
        assert word in str(refused.value)
    for dtype in (torch.float32, torch.float64):
        big = torch.zeros(1, 1, 3, 264, dtype=dtype)
        with pytest.raises(TypeError, match="float16"):
            ffpa_attn_backward(big, big, big, big, big, torch.zeros(1, 1, 3))


def test_the_backward_compiles_without_a_graph_break_and_runs_on_fake_tensors(triton):
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(ffpa_attn_backward, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for length in (9, 17, 33):
        q, k, v, do = make(Shape(1, 2, 2, length, length + 4, 264), HALF)
        out, lse = ffpa_attn_func(q, k, v, return_lse=True)
        got = compiled(do, q, k, v, out, lse, is_causal=False)
        for a, b in zip(got, ffpa_attn_backward(do, q, k, v, out, lse), strict=True):
            assert torch.equal(a, b)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (do, q, k, v, out, lse)]
        for fake, real in zip(ffpa_attn_backward(*fakes), got, strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
