"""`ffpa_attn_varlen_func` and its backward: what they accept, what they say when not, and what reaches a backend.

A backend in plain torch stands in for Triton's; the kernels have tests of their own.
"""

from __future__ import annotations

import enum
import inspect

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ffpa_jit import (
    TritonBackend,
    ffpa_attn_func,
    ffpa_attn_varlen_backward,
    ffpa_attn_varlen_func,
    registry,
)
from ffpa_jit.problem import Refusal, UnavailableError
from tests import oracle
from tests.cpu.fakes import FakeCUDA, FakeTriton, Refusing, attention

HALF = torch.float16
DIM = 264
QUERIES, KEYS = [5, 0, 3, 4, 0], [7, 2, 0, 4, 0]  # empty on either side, and on both


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


@pytest.fixture
def triton():
    fake = FakeTriton()
    with registry.replaced("triton", fake), registry.replaced("cuda", FakeCUDA()):
        yield fake


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def packed(queries=QUERIES, keys=KEYS, *, heads=(4, 2), beyond=0, dtype=HALF, grad=True):
    """q, k, v, an output gradient, and both offsets; `beyond` rows belong to no sequence."""
    torch.manual_seed(0)
    rows, cols = sum(queries) + beyond, sum(keys) + beyond
    q, do = (torch.randn(rows, heads[0], DIM, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(cols, heads[1], DIM, dtype=dtype) for _ in range(2))
    if grad:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    return q, k, v, do, offsets(queries), offsets(keys)


OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"causal": True, "window_size": (3, 3), "softcap": 2.0},
    {"softmax_scale": 0.5},
]


def as_dense(options):
    names = {"causal": "is_causal", "softmax_scale": "scale", "window_size": "window"}
    return {names.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("beyond", [0, 3])
def test_sequences_attend_to_themselves_with_gradients_and_lse(triton, options, beyond):
    q, k, v, do, cu_q, cu_k = packed(beyond=beyond)
    out, lse = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, enable_gqa=True, return_lse=True, **options)
    assert lse.shape == (4, q.shape[0])
    dlse = torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    oracle.check_varlen(
        q, k, v, cu_q, cu_k, out=out, lse=lse, grads=grads, grad_out=do, grad_lse=dlse, **as_dense(options)
    )
    if beyond:
        assert not out[-beyond:].any()
        assert (lse[:, -beyond:] == float("-inf")).all()
        assert not any(grad[-beyond:].any() for grad in grads)


def test_the_signature_is_that_of_flash_attention_and_of_the_reference():
    names = list(inspect.signature(ffpa_attn_varlen_func).parameters.values())
    positional = [p.name for p in names if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    keywords = {p.name for p in names if p.kind is p.KEYWORD_ONLY}
    assert keywords == {
        "dropout_p", "softmax_scale", "causal", "enable_gqa", "return_lse", "window_size", "softcap", "backend",
        "forward_backend", "backward_backend",
    }  # fmt: skip


def test_one_set_of_offsets_serves_both_sides(triton):
    q, k, v, _, cu_q, _ = packed(QUERIES, QUERIES, heads=(2, 2))
    out = ffpa_attn_varlen_func(q, k, v, cu_q, max_seqlen_q=5, causal=True)
    assert torch.equal(out, ffpa_attn_varlen_func(q, k, v, cu_q, cu_q, 5, 5, causal=True))
    assert (triton.calls[0]["max_seqlen_q"], triton.calls[0]["max_seqlen_k"]) == (5, 5)


@pytest.mark.parametrize(
    ("given", "reaches"),
    [
        (5, 5),
        (np.int64(5), 5),
        (torch.tensor(5), 5),
        (torch.tensor([5], dtype=torch.int32), 5),
        (torch.tensor(5, device="meta"), 12),
        (None, 12),
        (0, 0),
        (800, 800),
    ],
    ids=str,
)
def test_a_longest_length_is_read_where_that_waits_for_nothing(triton, given, reaches):
    q, k, v, _, cu_q, cu_k = packed()
    ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, given, given, enable_gqa=True)
    assert triton.calls[0]["max_seqlen_q"] == reaches
    assert triton.calls[0]["max_seqlen_k"] == (13 if reaches == 12 else reaches)


@pytest.mark.parametrize("layout", ["sliced heads", "heads first", "last stride", "one tensor"])
def test_any_strides_go_in_and_the_layout_of_the_queries_comes_out(triton, layout):
    q, k, v, _, cu_q, cu_k = packed(grad=False)
    if layout == "sliced heads":
        q, k, v = torch.randn(12, 8, DIM).half()[:, ::2], *torch.randn(2, 13, 3, DIM).half()[:, :, 1:]
    elif layout == "heads first":
        q, k, v = (torch.randn(x.shape[1], x.shape[0], DIM).half().transpose(0, 1) for x in (q, k, v))
    elif layout == "last stride":
        q, k, v = (torch.randn(x.shape[0], DIM, x.shape[1]).half().transpose(1, 2) for x in (q, k, v))
    else:
        v = k
    q, k, v = (x.requires_grad_() for x in (q.detach(), k.detach(), v.detach()))
    out = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True)
    assert out.stride() == torch.empty_like(q).stride()
    do = torch.randn_like(out)
    oracle.check_varlen(
        q, k, v, cu_q, cu_k, out=out, grads=torch.autograd.grad(out, (q, k, v), do), grad_out=do
    )  # fmt: skip


def test_offsets_need_not_be_contiguous(triton):
    q, k, v, _, cu_q, cu_k = packed()
    spread = [torch.stack([x, x + 1], 1)[:, 0] for x in (cu_q, cu_k)]
    out = ffpa_attn_varlen_func(q, k, v, *spread, enable_gqa=True)
    assert torch.equal(out, ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True))


@pytest.mark.parametrize(("queries", "keys"), [([], []), ([0, 0], [0, 0]), ([0, 0], [3, 1]), ([3, 1], [0, 0])], ids=str)
def test_nothing_at_all_is_a_call_too(triton, queries, keys):
    q, k, v, do, cu_q, cu_k = packed(queries, keys)
    out, lse = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True, return_lse=True)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == float("-inf")).all()
    for grad, x in zip(torch.autograd.grad(out, (q, k, v), do), (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


def test_many_short_sequences(triton):
    q, k, v, _, cu, _ = packed([2] * 300, [2] * 300, heads=(1, 1), grad=False)
    out = ffpa_attn_varlen_func(q, k, v, cu, max_seqlen_q=2, causal=True)
    dense = ffpa_attn_func(*(x.view(300, 2, 1, DIM).transpose(1, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(out, dense.transpose(1, 2).reshape(600, 1, DIM), rtol=2e-3, atol=2e-3)


def test_autocast_casts_what_goes_in(triton):
    q, k, v, _, cu_q, cu_k = packed(dtype=torch.float32)
    with torch.autocast("cpu", dtype=HALF):
        out = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True)
    assert out.dtype == HALF
    assert torch.equal(out, ffpa_attn_varlen_func(q.half(), k.half(), v.half(), cu_q, cu_k, enable_gqa=True))
    assert torch.autograd.grad(out.float().sum(), q)[0].dtype == torch.float32


# Dropout.


def test_dropout_draws_two_words_a_call_and_the_backward_gets_them(triton):
    q, k, v, do, cu, _ = packed([6], [6], heads=(2, 2))
    torch.manual_seed(5)
    out = ffpa_attn_varlen_func(q, k, v, cu, dropout_p=0.4)
    torch.manual_seed(5)
    assert torch.equal(out, ffpa_attn_varlen_func(q, k, v, cu, dropout_p=0.4))
    torch.autograd.grad(out, (q, k, v), do)
    assert torch.equal(triton.calls[0]["rng"], triton.backward_calls[0]["rng"])
    assert triton.backward_calls[0]["dropout_p"] == 0.4
    call = {name: triton.calls[0][name] for name in ("scale", "is_causal", "rng", "dropout_p", "window", "softcap")}
    tensors = (x.detach().transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    expected = attention(*tensors, options=None, attn_mask=None, **call)[0]
    torch.testing.assert_close(out.float(), expected[0].transpose(0, 1), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_words_again(triton, reentrant):
    q, k, v, do, cu, _ = packed([6], [6], heads=(2, 2))

    def block(q, k, v):
        return ffpa_attn_varlen_func(q, k, v, cu, dropout_p=0.4)

    torch.manual_seed(7)
    expected = torch.autograd.grad(block(q, k, v), (q, k, v), do)
    torch.manual_seed(7)
    checkpoint(block, q, k, v, use_reentrant=reentrant).backward(do)
    assert all(torch.equal(x.grad, want) for x, want in zip((q, k, v), expected, strict=True))


# Errors.

BAD = [
    ({"q": lambda x: [1]}, TypeError, "q must be a tensor, not list"),
    ({"v": lambda x: None}, TypeError, "v must be a tensor, not NoneType"),
    ({"cu_seqlens_q": lambda x: [0, 5]}, TypeError, "cu_seqlens_q must be a tensor, not list"),
    (
        {"cu_seqlens_q": lambda x: x.long()},
        TypeError,
        r"cu_seqlens_q has dtype torch.int64.*cu_seqlens_q.to\(torch.int32",
    ),
    ({"cu_seqlens_k": lambda x: x.float()}, TypeError, "cu_seqlens_k has dtype torch.float32.*int32"),
    ({"cu_seqlens_q": lambda x: x.to("meta")}, ValueError, "cu_seqlens_q is on meta.*cpu"),
    ({"cu_seqlens_q": lambda x: x[None]}, ValueError, r"cu_seqlens_q has shape \[1, 6\].*one dimension"),
    (
        {"cu_seqlens_q": lambda x: x[:1], "cu_seqlens_k": lambda x: x[:1]},
        ValueError,
        "cu_seqlens_q has length 1.*12 tokens",
    ),
    ({"cu_seqlens_k": lambda x: x[:0]}, ValueError, "cu_seqlens_k has length 0"),
    ({"cu_seqlens_k": lambda x: x[:-1]}, ValueError, "cu_seqlens_q has length 6 and cu_seqlens_k 5"),
    ({"q": lambda x: x[None]}, ValueError, r"q has shape \[1, 12, 4, 264\].*\[tokens, heads, head_dim\]"),
    ({"k": lambda x: x[0]}, ValueError, r"k has shape \[2, 264\]"),
    ({"k": lambda x: x.bfloat16()}, TypeError, "float16.*bfloat16.*must be the same"),
    ({n: lambda x: x.float() for n in "qkv"}, TypeError, "q has dtype torch.float32.*bfloat16"),
    ({"k": lambda x: x.to("meta")}, ValueError, "q, k and v are on cpu, meta and cpu"),
    ({"k": lambda x: x[..., :256]}, ValueError, "q has head dim 264 and k 256"),
    ({"v": lambda x: x[:5]}, ValueError, "k has 13 tokens and v 5"),
    ({"v": lambda x: x[:, :1]}, ValueError, "key has 2 heads and value 1"),
    ({"enable_gqa": lambda x: False}, ValueError, "4 heads and key/value 2.*enable_gqa=True"),
    ({"q": lambda x: x[:, :3]}, ValueError, "3 query heads and 2"),
    ({"enable_gqa": lambda x: "yes"}, TypeError, "enable_gqa must be True or False"),
    ({"causal": lambda x: None}, TypeError, "causal must be True or False"),
    ({"return_lse": lambda x: "no"}, TypeError, "return_lse must be True or False"),
    ({"q": lambda x: x.to_sparse()}, NotImplementedError, "layout torch.sparse_coo"),
    (
        {n: lambda x: x[..., :256] for n in "qkv"},
        NotImplementedError,
        "head dim 256.*flash_attn.flash_attn_varlen_func",
    ),
    ({n: lambda x: x[..., :261] for n in "qkv"}, NotImplementedError, "head dim 261.*multiple of 8"),
    ({n: lambda x: torch.cat([x] * 4, -1) for n in "qkv"}, NotImplementedError, "head dim 1056.*1024"),
    ({"v": lambda x: x[..., :40]}, NotImplementedError, "40 of v"),
    ({"max_seqlen_q": lambda x: -1}, ValueError, "max_seqlen_q is -1"),
    ({"max_seqlen_q": lambda x: torch.tensor(-1)}, ValueError, "max_seqlen_q is -1"),
    ({"max_seqlen_k": lambda x: 7.0}, TypeError, "max_seqlen_k must be an int.*float"),
    ({"max_seqlen_k": lambda x: True}, TypeError, "max_seqlen_k must be an int.*bool"),
    ({"max_seqlen_k": lambda x: "7"}, TypeError, "max_seqlen_k must be an int.*str"),
    ({"max_seqlen_q": lambda x: torch.tensor([5, 5])}, ValueError, r"max_seqlen_q has shape \[2\]"),
    ({"max_seqlen_q": lambda x: torch.tensor(5.0)}, TypeError, "max_seqlen_q has dtype torch.float32"),
    ({"dropout_p": lambda x: 1.5}, ValueError, "dropout_p=1.5"),
    ({"dropout_p": lambda x: "no"}, TypeError, "dropout_p must be a number"),
    ({"softmax_scale": lambda x: "1"}, TypeError, "softmax_scale must be a number"),
    ({"window_size": lambda x: 128}, TypeError, "window_size must be a pair"),
    ({"window_size": lambda x: (-5, 0)}, ValueError, "window_size has -5"),
    ({"softcap": lambda x: -1}, ValueError, "softcap=-1"),
    ({"backend": lambda x: "mkl"}, ValueError, "mkl"),
    ({"backend": lambda x: 3}, TypeError, "backend must be one of"),
    ({"backend": lambda x: "sdpa"}, NotImplementedError, "sdpa: .varlen. SDPA takes no packed sequences"),
    ({"backend": lambda x: "cuda"}, NotImplementedError, "cuda: .varlen."),
    ({"backend": lambda x: "cutedsl"}, NotImplementedError, "cutedsl: .(device|not-installed)."),
    ({"backward_backend": lambda x: "sdpa"}, NotImplementedError, "sdpa: .varlen."),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=[words for _, _, words in BAD])
def test_a_bad_argument_is_named_with_what_came_and_what_is_allowed(triton, change, error, words):
    q, k, v, _, cu_q, cu_k = packed()
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "enable_gqa": True}
    given.update({name: make_it(given.get(name)) for name, make_it in change.items()})
    with pytest.raises(error, match=words):
        ffpa_attn_varlen_func(**given)


class Length(enum.IntEnum):
    longest = 700


@pytest.mark.parametrize("longest", [2**31, 2**63, 2**70, Length.longest], ids=str)
def test_a_longest_length_may_be_any_number(triton, longest):
    """Of 2^70 the operator's schema knows nothing, and to Triton a subclass is no int."""
    q, k, v, do, cu_q, cu_k = packed()
    out, lse = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, longest, longest, enable_gqa=True, return_lse=True)
    assert torch.equal(out, ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True))
    grads = ffpa_attn_varlen_backward(do, q, k, v, out, lse, cu_q, cu_k, longest, longest, enable_gqa=True)
    assert all(grad.isfinite().all() for grad in grads)


def test_options_of_other_libraries_are_refused_together_by_name(triton):
    q, k, v, _, cu_q, cu_k = packed()
    off = {
        "deterministic": True,
        "return_attn_probs": False,
        "num_splits": 1,
        "alibi_slopes": None,
        "block_table": None,
    }
    assert ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True, **off).shape == q.shape
    on = {"alibi_slopes": torch.ones(4), "learnable_sink": torch.ones(4), "return_attn_probs": True, "seqused_k": cu_k,
          "attn_mask": torch.ones(1), "num_splits": 7, "block_table": None, "deterministic": False}  # fmt: skip
    with pytest.raises(NotImplementedError) as refused:
        ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True, **on)
    assert "alibi_slopes, attn_mask, learnable_sink, num_splits, return_attn_probs, seqused_k:" in str(refused.value)
    assert "return_lse" in str(refused.value)
    with pytest.raises(
        TypeError, match=r"ffpa_attn_varlen_func\(\) got unexpected keyword argument\(s\): a, is_causal"
    ):
        ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, is_causal=True, a=None, alibi_slopes=torch.ones(4))


def test_without_a_backend_every_reason_is_told():
    q, k, v, _, cu_q, cu_k = packed()
    with (
        registry.replaced("triton", Refusing()),
        registry.replaced("cuda", FakeCUDA()),
        pytest.raises(NotImplementedError) as refused,
    ):
        ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True, softcap=3.0)
    for word in ("triton: [device]", "cuda: [varlen]", "cuda: [softcap]", "sdpa: [varlen]"):
        assert word in str(refused.value)


def test_a_forward_without_a_backward_is_refused_where_gradients_are_needed(triton):
    triton.has_backward = False
    registry.invalidate()
    q, k, v, _, cu_q, cu_k = packed()
    with pytest.raises(NotImplementedError, match="computes the gradients"):
        ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True)
    with torch.no_grad():
        ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True)


class _Broken(FakeTriton):
    """Takes a call and finds that it cannot run it; from then on it refuses."""

    broken = False

    def refusals(self, problem, options, *, direction):
        return [Refusal("toolchain", "its compiler fails")] if self.broken else []

    def varlen_forward(self, *tensors, **options):
        self.broken = True
        raise UnavailableError("its compiler fails")


def test_a_backend_that_turns_out_unavailable_is_told_among_the_reasons():
    q, k, v, _, cu_q, cu_k = packed()
    with registry.replaced("triton", _Broken()), pytest.raises(NotImplementedError, match="toolchain"):
        ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True)
    with registry.replaced("triton", _Broken()):
        with pytest.raises(UnavailableError):
            ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True, backend="triton")
        with pytest.raises(NotImplementedError, match="toolchain"):  # it is not tried again
            ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True, backend="triton")


def test_forward_mode_derivatives_are_refused(triton):
    q, k, v, _, cu_q, cu_k = packed(grad=False)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True), (q,), (q,))


def test_options_of_a_named_backend_reach_it(triton):
    q, k, v, do, cu_q, cu_k = packed()
    chosen = TritonBackend(workspace_mb=0)
    out = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True, backend=chosen)
    out.backward(do)
    assert triton.calls[0]["options"] == triton.backward_calls[0]["options"] == chosen


# The operators, compilers.


@pytest.mark.parametrize("options", [(False, 0.0, -1, -1, 0.0), (True, 0.3, 4, -1, 2.0)], ids=str)
def test_the_operators_pass_opcheck(triton, options):
    q, k, v, do, cu_q, cu_k = packed(beyond=1)
    rng = torch.tensor([3, 4]) if options[1] else None
    arguments = (q, k, v, cu_q, cu_k, rng, 5, 7, 0.05, *options)
    torch.library.opcheck(torch.ops.ffpa_jit.flash_attn_varlen, (*arguments, "triton;autotune=True", "triton"))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = torch.ops.ffpa_jit.flash_attn_varlen(q, k, v, *arguments[3:], "triton", "triton")
    for needs in ([True] * 3, [False, True, False]):
        backward = (do, torch.randn_like(lse), q, k, v, cu_q, cu_k, rng, out, lse, *arguments[6:], needs, "triton")
        torch.library.opcheck(
            torch.ops.ffpa_jit.flash_attn_varlen_backward, backward, test_utils=("test_schema", "test_faketensor")
        )


def test_the_operators_names_tell_checkpoint_policies_what_they_are():
    schema = torch.ops.ffpa_jit.flash_attn_varlen.default._schema
    assert "flash_attn" in schema.name
    assert "backward" not in schema.name
    assert "window_size_left" in [argument.name for argument in schema.arguments]


@pytest.mark.parametrize("layout", ["plain", "heads first", "last stride"])
def test_fake_and_real_results_have_the_same_strides(triton, layout):
    q, k, v, do, cu_q, cu_k = packed(grad=False)
    if layout == "heads first":
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    elif layout == "last stride":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    real = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True, return_lse=True)
    real += ffpa_attn_varlen_backward(do, q, k, v, *real, cu_q, cu_k, enable_gqa=True)
    with FakeTensorMode() as mode:
        q, k, v, do, cu_q, cu_k = (mode.from_tensor(x) for x in (q, k, v, do, cu_q, cu_k))
        fake = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, torch.tensor(5), enable_gqa=True, return_lse=True)
        fake += ffpa_attn_varlen_backward(do, q, k, v, *fake, cu_q, cu_k, enable_gqa=True)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("longest", ["int", "tensor", None])
def test_a_compiled_call_has_one_graph_for_all_lengths_and_batches(triton, backend, longest):
    counter = CompileCounterWithBackend(backend)

    def step(q, k, v, cu_q, cu_k, max_q, max_k):
        out, lse = ffpa_attn_varlen_func(
            q * 1, k, v, cu_q, cu_k, max_q, max_k, causal=True, enable_gqa=True, return_lse=True, window_size=(9, 0)
        )
        return out.float().square().sum() + lse.clamp_min(-1e3).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for queries, keys in [(QUERIES, KEYS), ([8, 4], [6, 7]), ([3, 3, 3, 11], [9, 3, 4, 5])]:
        q, k, v, _, cu_q, cu_k = packed(queries, keys)
        longest_two = [max(queries), max(keys)]
        if longest != "int":
            longest_two = [None if longest is None else torch.tensor(x) for x in longest_two]
        grads = torch.autograd.grad(compiled(q, k, v, cu_q, cu_k, *longest_two), (q, k, v))
        expected = torch.autograd.grad(step(q, k, v, cu_q, cu_k, *longest_two), (q, k, v))
        for got, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


def test_a_compiled_call_does_not_wait_for_a_length_on_the_device(triton):
    def step(q, k, v, cu):
        longest = (cu[1:] - cu[:-1]).max()
        return ffpa_attn_varlen_func(q, k, v, cu, max_seqlen_q=longest, dropout_p=0.1)

    q, k, v, _, cu, _ = packed(QUERIES, QUERIES, heads=(2, 2))
    torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, cu).sum().backward()
    assert triton.calls[0]["max_seqlen_q"] == 12
    assert triton.backward_calls


@pytest.mark.parametrize("dynamic", [None, True])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_longest_length_may_be_a_number_that_the_compiler_does_not_know(triton, dynamic):
    def step(q, k, v, cu):
        return ffpa_attn_varlen_func(q, k, v, cu, max_seqlen_q=(cu[1:] - cu[:-1]).max().item(), causal=True)

    q, k, v, _, cu, _ = packed(QUERIES, QUERIES, heads=(2, 2))
    torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")(q, k, v, cu).sum().backward()
    assert triton.calls[0]["max_seqlen_q"] == 5


def test_a_second_derivative_raises(triton):
    q, k, v, _, cu_q, cu_k = packed()
    out = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True)
    (grad,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="derivative"):
        grad.float().square().sum().backward()


def test_only_the_gradients_that_are_asked_for_are_computed(triton):
    q, k, v, do, cu_q, cu_k = packed(grad=False)
    k.requires_grad_()
    ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True).backward(do)
    assert k.grad is not None
    assert not ffpa_attn_varlen_func(q, k.detach(), v, cu_q, cu_k, enable_gqa=True).requires_grad


# The backward for merged outputs.


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_backward_of_an_unsharded_call_is_autograds(triton, options):
    q, k, v, do, cu_q, cu_k = packed(beyond=2)
    out, lse = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, enable_gqa=True, return_lse=True, **options)
    dlse = torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            got = ffpa_attn_varlen_backward(
                do, q, k, v, out, lse, cu_q, cu_k, 5, 7, grad_lse=dlse, enable_gqa=True, **options
            )
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_gradients_of_shards_of_the_keys_are_those_of_the_whole(triton):
    queries, keys = [5, 3, 4], [7, 2, 4]
    q, k, v, do, cu_q, cu_k = packed(queries, keys, grad=False)
    own = [(4, 0, 1), (3, 2, 0), (0, 0, 3)]  # how many keys of each sequence a shard has; together all
    starts, shards = [0, 7, 9], []
    for lengths in own:
        rows = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
        starts = [a + n for a, n in zip(starts, lengths, strict=True)]
        shards.append((rows, offsets(lengths)))
    parts = [
        ffpa_attn_varlen_func(q, k[rows], v[rows], cu_q, cu, enable_gqa=True, return_lse=True) for rows, cu in shards
    ]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    out = sum(torch.exp(part[1] - lse).T.unsqueeze(-1) * part[0].float() for part in parts).half()
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    for rows, cu in shards:
        grads = ffpa_attn_varlen_backward(do, q, k[rows], v[rows], out, lse, cu_q, cu, enable_gqa=True)
        dq += grads[0]
        dk[rows], dv[rows] = grads[1].float(), grads[2].float()
    exact = oracle.varlen_attention(q, k, v, cu_q, cu_k, grad_out=do)
    for got, want in zip((dq, dk, dv), (exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_a_shard_without_keys_gives_zeros_and_empties(triton):
    q, _, _, do, cu_q, _ = packed(grad=False)
    k = torch.zeros(0, 2, DIM, dtype=HALF)
    grads = ffpa_attn_varlen_backward(
        do, q, k, k, do, torch.randn(4, 12), cu_q, torch.zeros_like(cu_q), enable_gqa=True
    )
    assert not grads[0].any()
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"lse": lambda x: x.T}, ValueError, r"lse has shape \[12, 4\].*\[4, 12\]"),
        ({"lse": lambda x: x.double()}, TypeError, "lse has dtype"),
        ({"k": lambda x: x.to_sparse()}, NotImplementedError, "layout torch.sparse_coo"),
        ({"out": lambda x: x[:3]}, ValueError, "out has shape"),
        ({"grad_out": lambda x: x.float()}, TypeError, "grad_out has dtype"),
        ({"cu_seqlens_q": lambda x: x.long()}, TypeError, "cu_seqlens_q has dtype"),
        ({"backend": lambda x: "sdpa"}, NotImplementedError, "log-sum-exp"),
        ({"backend": lambda x: "cuda"}, ValueError, "forward only"),
        ({"needs": lambda x: None}, ValueError, "needs"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_the_backward_are_named(triton, change, error, words):
    q, k, v, do, cu_q, cu_k = packed()
    out, lse = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, enable_gqa=True, return_lse=True)
    given = {"grad_out": do, "q": q, "k": k, "v": v, "out": out, "lse": lse, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k,
             "enable_gqa": True}  # fmt: skip
    given.update({name: make_it(given.get(name)) for name, make_it in change.items()})
    with pytest.raises(error, match=words):
        ffpa_attn_varlen_backward(**given)
