"""The registered operators as PyTorch's machinery sees them: schema, fakes, autograd, compile, checkpoint, autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ffpa_jit
from ffpa_jit import ffpa_attn_func, registry
from tests import oracle
from tests.cases.shapes import Shape, leaves, make, tensor
from tests.cpu.conftest import run_python
from tests.cpu.fakes import Refusing

pytest.importorskip("triton")

HALF = torch.float16
SHAPE = Shape(1, 2, 1, 17, 33, 264, True)
ORIGINAL = F.scaled_dot_product_attention


PLAIN = (None, None, 0.05, True, 0.0, -1, -1, 0.0)
"""Arguments of the forward operator between the tensors and the backends: no option but the causal mask."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    with registry.replaced("cuda", Refusing()):
        yield
    torch.compiler.reset()


def test_the_forward_operator_passes_opcheck():
    q, k, v, _ = make(SHAPE, HALF)
    arguments = (*leaves(q, k, v), *PLAIN, "triton", "triton")
    torch.library.opcheck(torch.ops.ffpa_jit.flash_attn, arguments)


@pytest.mark.parametrize("needs", [[True, True, True, False], [True, False, False, False], [False, True, True, False]])
def test_the_backward_operator_passes_opcheck(needs):
    q, k, v, do = make(SHAPE, HALF)
    out, lse = torch.ops.ffpa_jit.flash_attn(q, k, v, *PLAIN, "triton", "triton")
    arguments = (do, torch.randn_like(lse), q, k, v, None, None, out, lse, *PLAIN[2:], needs, "triton")
    torch.library.opcheck(
        torch.ops.ffpa_jit.flash_attn_backward, arguments, test_utils=("test_schema", "test_faketensor")
    )
    grads = torch.ops.ffpa_jit.flash_attn_backward(*arguments)
    for grad, x, need in zip(grads, (q, k, v, None), needs, strict=True):
        assert grad.shape == (x.shape if need else (0,))


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "expanded", "sliced", "last_stride"])
def test_fake_and_real_results_have_the_same_strides(layout):
    from torch._subclasses import FakeTensorMode

    q, k, v, _ = make(SHAPE, HALF, layout=layout)
    real = torch.ops.ffpa_jit.flash_attn(q, k, v, *PLAIN, "triton", "triton")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        fake = torch.ops.ffpa_jit.flash_attn(*fakes, *PLAIN, "triton", "triton")
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_compile_makes_one_graph_for_all_lengths():
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v):
        return ffpa_attn_func(q * 1, k, v, is_causal=True, enable_gqa=True, backend="triton").float().square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for length in (17, 33, 130, 40):
        q, k, v, _ = make(Shape(1, 2, 1, length, length, 264), HALF)
        q, k, v = leaves(q, k, v)
        loss = compiled(q, k, v)
        grads = torch.autograd.grad(loss, (q, k, v))
        expected = torch.autograd.grad(step(q, k, v), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
        graphs.append(counter.frame_count)
    # torch may trace the first call twice (a float default becomes symbolic); no length may add a graph.
    assert len(set(graphs)) == 1


def test_compile_without_a_named_backend_has_no_graph_break():
    compiled = torch.compile(
        lambda q, k, v: ffpa_attn_func(q, k, v, return_lse=True), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (17, 40):
        q, k, v, _ = make(Shape(1, 1, 1, length, length + 3, 264), HALF)
        out, lse = compiled(q, k, v)
        oracle.check(q, k, v, out=out, lse=lse)


def test_compile_takes_the_fallback_without_a_graph_break():
    compiled = torch.compile(ffpa_attn_func, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v, _ = make(Shape(1, 1, 1, 17, 20, 261), HALF)
    mask = torch.randn(17, 20).to(HALF)
    torch.testing.assert_close(compiled(q, k, v, attn_mask=mask), ORIGINAL(q, k, v, attn_mask=mask))


def test_checkpointing_repeats_the_forward_and_gives_the_same_gradients():
    q, k, v, do = make(SHAPE, HALF)
    q, k, v = leaves(q, k, v)

    def block(q, k, v):
        return ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True)

    expected = torch.autograd.grad(block(q, k, v), (q, k, v), do)
    got = torch.autograd.grad(checkpoint(block, q, k, v, use_reentrant=False), (q, k, v), do)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_autocast_converts_inputs_as_it_does_for_sdpa():
    q, k, v, _ = make(Shape(1, 1, 1, 17, 33, 264), torch.float32)
    q, k, v = leaves(q, k, v)
    with torch.autocast("cpu", dtype=HALF):
        out = ffpa_attn_func(q, k, v, backend="triton")
    assert out.dtype == HALF
    expected = ffpa_attn_func(q.half(), k.half(), v.half(), backend="triton")
    assert torch.equal(out, expected)
    grad = torch.autograd.grad(out.float().sum(), q)[0]
    assert grad.dtype == torch.float32
    assert grad.isfinite().all()


def test_the_one_line_patch_reaches_the_kernels(monkeypatch, warnings_seen):
    monkeypatch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
    q, k, v, do = make(SHAPE, HALF)
    q, k, v = leaves(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), do)
    oracle.check(q, k, v, out=out, grads=grads, grad_out=do, is_causal=True)
    assert not warnings_seen


def test_a_second_derivative_raises():
    q, k, v, _ = make(Shape(1, 1, 1, 17, 17, 264), HALF)
    q, k, v = leaves(q, k, v)
    out = ffpa_attn_func(q, k, v, backend="triton")
    (grad,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError):
        grad.float().square().sum().backward()


def test_no_graph_is_kept_when_nothing_requires_a_gradient():
    q, k, v, _ = make(SHAPE, HALF)
    assert not ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True).requires_grad
    q.requires_grad_()
    with torch.no_grad():
        assert not ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True).requires_grad


def test_the_output_gradient_may_have_any_strides_under_compile():
    q, k, v, _ = make(SHAPE, HALF)
    q, k, v = leaves(q, k, v)
    compiled = torch.compile(
        lambda q, k, v: ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(1, 17, -1),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    do = tensor("last_stride", 1, 1, 17, 2 * 264, dtype=HALF)[0]
    grads = torch.autograd.grad(compiled(q, k, v), (q, k, v), do)
    grad_out = do.reshape(1, 17, 2, 264).transpose(1, 2)
    out = ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True)
    oracle.check(q, k, v, out=out, grads=grads, grad_out=grad_out, is_causal=True)


def test_operator_names_tell_checkpoint_policies_what_they_are():
    assert "flash_attn" in torch.ops.ffpa_jit.flash_attn.default.name()
    assert ffpa_jit.__version__


FIRST_COMPILED = """
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from ffpa_jit import dispatch
from ffpa_jit.cuda import backend
from ffpa_jit.cute import backend as cute_backend
from ffpa_jit.problem import Problem

for each in (backend, cute_backend):
    each._out_of_reach = lambda *arguments: None
    each._out_of_reach._dynamo_marked_constant = True

def plan(x, heads_kv, arch):
    return dispatch.choose(Problem(
        batch=1, heads_q=8, heads_kv=heads_kv, len_q=x.shape[0], len_kv=x.shape[1], head_dim=512, head_dim_v=512,
        dtype=torch.bfloat16, device_type="cuda", device_index=0, arch=arch, is_causal=False, has_mask=False,
        dropout_p=0.0, needs_grad=False, mask_needs_grad=False), None, None)

CODES = {"sdpa": 1, "triton": 2, "cuda": 3, "cutedsl": 4}
for arch, heads_kv in (("sm_80", 2), ("sm_90", 8)):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    step = lambda x: x * CODES[plan(x, heads_kv, arch).forward]
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    chosen = {int(compiled(torch.ones(size))[0, 0]) for size in [(300, 310), (512, 777), (5000, 5001), (9, 4000)]}
    print(counter.frame_count, len(chosen))
    for size in [(5000, 5000), (9, 4000)]:
        x = torch.ones(size)
        assert torch.equal(torch.compile(step, fullgraph=True, dynamic=False, backend="eager")(x), step(x)), size
"""


def test_a_first_call_may_be_a_compiled_one_and_no_length_adds_a_graph():
    """In a new process, in which no backend is loaded yet, on the plans of a GPU. A length that the compiler leaves
    open does not change the choice; one that it knows does, as it does eagerly."""
    assert run_python(FIRST_COMPILED).split() == ["1", "1"] * 2
