"""What transforms, compilers and counters see of the operators: one rule each, the same numbers as a plain call."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ffpa_jit import ffpa_attn_func, ffpa_attn_varlen_func, problem, registry
from tests import oracle
from tests.cases.shapes import Shape, leaves, make
from tests.cpu.conftest import run_program, run_python
from tests.cpu.fakes import FakeTriton, Refusing

HALF = torch.float16
D = 264
FLASH = torch.ops.ffpa_jit
PLAIN = (0.05, True, 0.0, -1, -1, 0.0)
"""scale, is_causal, dropout_p, window and softcap of an operator."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    with registry.replaced("cuda", Refusing()), registry.replaced("triton", FakeTriton()):
        yield
    torch.compiler.reset()


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(HALF)


def same(got, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# torch.export


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call(*tensors)


@pytest.fixture
def hopper(monkeypatch):
    """Fake CUDA tensors are those of an H200 with every backend."""
    from ffpa_jit.cuda import backend as cuda
    from ffpa_jit.cute import backend as cute
    from ffpa_jit.triton import backend as triton

    def reachable(*arguments):
        return None

    reachable._dynamo_marked_constant = True
    for backend in (cuda, cute):
        monkeypatch.setattr(backend, "_out_of_reach", reachable)
    monkeypatch.setattr(problem, "_cuda_arch", lambda index: "sm_90")
    with contextlib.ExitStack() as stack:
        for backend in (cuda, cute, triton):
            stack.enter_context(registry.replaced(backend.BACKEND.name, backend.BACKEND))
        stack.enter_context(FakeTensorMode())
        yield


def on_gpu(*shape: int, dtype=HALF) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


BATCH, ROWS, KEYS = (torch.export.Dim(name) for name in ("batch", "rows", "keys"))
SELF, CROSS = {0: BATCH, 2: ROWS}, {0: BATCH, 2: KEYS}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("options", "rows", "mask", "runs"),
    [
        ({"is_causal": True}, 64, None, "cutedsl"),
        ({"is_causal": True}, 1, None, "triton"),  # decoding: a length of 1 is known
        ({"window_size": (8, 8), "softcap": 20.0}, 64, None, "triton"),
        ({"dropout_p": 0.1}, 64, None, "triton"),
        ({}, 64, (2, 1, 64, 80), "triton"),
        ({"is_causal": True}, 64, (2, 1, 1, 80), "triton"),
    ],
)
def test_a_call_exports_for_every_batch_and_length(hopper, strict, options, rows, mask, runs):
    q, k, v = on_gpu(2, 4, rows, 512), on_gpu(2, 2, 80, 512), on_gpu(2, 2, 80, 512)
    tensors, dims = [q, k, v], [SELF if rows > 1 else {0: BATCH}, CROSS, CROSS]
    if mask is not None:
        tensors.append(on_gpu(*mask))
        dims.append({0: BATCH, 3: KEYS} | ({2: ROWS} if mask[2] > 1 else {}))
    module = Module(lambda q, k, v, m=None: ffpa_attn_func(q, k, v, m, enable_gqa=True, **options))
    program = torch.export.export(module, tuple(tensors), dynamic_shapes=(tuple(dims),), strict=strict)
    (call,) = [node for node in program.graph.nodes if node.target is FLASH.flash_attn.default]
    assert call.args[-2:] == (runs, "")
    assert all(each.lower <= 2 and each.upper > 2**40 for each in program.range_constraints.values())


def test_packed_sequences_export_for_every_number_of_tokens_and_sequences(hopper):
    q, cu = on_gpu(64, 4, 512), on_gpu(5, dtype=torch.int32)
    module = Module(lambda q, k, v, cu: ffpa_attn_varlen_func(q, k, v, cu, causal=True))
    dims = ({0: ROWS},) * 3 + ({0: BATCH},)
    program = torch.export.export(module, (q, q, q, cu), dynamic_shapes=(dims,))
    assert FLASH.flash_attn_varlen.default in [node.target for node in program.graph.nodes]


def test_a_call_left_to_sdpa_exports_for_every_length():
    q, k = half(1, 2, 5, 261), half(1, 2, 9, 261)
    module = Module(lambda q, k: ffpa_attn_func(q, k, k, is_causal=True))
    program = torch.export.export(module, (q, k), dynamic_shapes=(({2: ROWS}, {2: KEYS}),)).module()
    for rows, keys in ((5, 9), (7, 7), (3, 40)):
        q, k = half(1, 2, rows, 261), half(1, 2, keys, 261)
        torch.testing.assert_close(program(q, k), ffpa_attn_func(q, k, k, is_causal=True))


@pytest.mark.parametrize("masked", [False, True])
def test_a_program_exported_without_gradients_computes_them(masked):
    q, k, v, do = make(Shape(1, 2, 1, 9, 12, D, True), HALF)
    tensors = [q, k, v] + [half(1, 1, 9, 12)] * masked
    module = Module(lambda q, k, v, m=None: ffpa_attn_func(q, k, v, m, is_causal=True, enable_gqa=True))
    program = torch.export.export(module, tuple(tensors)).module()
    a, b = leaves(*tensors), leaves(*tensors)
    assert same(torch.autograd.grad(program(*a), a, do), torch.autograd.grad(module(*b), b, do))


def test_a_packed_program_exported_without_gradients_computes_them():
    q, k, v = (half(12, 2, D) for _ in range(3))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    module = Module(lambda q, k, v: ffpa_attn_varlen_func(q, k, v, cu, causal=True))
    program = torch.export.export(module, (q, k, v)).module()
    a, b = leaves(q, k, v), leaves(q, k, v)
    assert same(torch.autograd.grad(program(*a).sum(), a), torch.autograd.grad(module(*b).sum(), b))


def test_gradients_nobody_was_chosen_for_are_sdpas_if_no_backend_computes_them():
    q, k, v, do = make(Shape(1, 2, 2, 9, 12, D), HALF)
    tensors = leaves(q, k, v)
    out, _ = FLASH.flash_attn(*tensors, None, None, *PLAIN, "triton", "")
    with registry.replaced("triton", Refusing()):
        grads = torch.autograd.grad(out, tensors, do)
    oracle.check(q, k, v, out=out, grads=grads, grad_out=do, is_causal=True, scale=0.05)


AOTI = """
import torch
from ffpa_jit import ffpa_attn_func, registry
from tests.cpu.fakes import FakeTriton

class Module(torch.nn.Module):
    def forward(self, q, k, v, mask):
        out, lse = ffpa_attn_func(q, k, v, mask, is_causal=True, return_lse=True, backend="triton")
        return out * 2, lse

q, k, v = (torch.randn(1, 2, 9, 264).half() for _ in range(3))
tensors = q, k, v, torch.randn(1, 1, 9, 9).half()
fake = registry.replaced("triton", FakeTriton())
fake.__enter__()
compiler = torch._inductor.config.aot_inductor
if hasattr(compiler, "precompile_headers"):  # they are worth it for many packages
    compiler.precompile_headers = False
program = torch.export.export(Module(), tensors)
packaged = torch._inductor.aoti_compile_and_package(program, package_path=PATH)
for got, expected in zip(torch._inductor.aoti_load_package(packaged)(*tensors), Module()(*tensors)):
    torch.testing.assert_close(got, expected)
print("right")
"""


def test_an_exported_call_runs_as_an_ahead_of_time_package(tmp_path):
    """In a new process: a package that fails takes it down. A C++ compiler is at work for some seconds."""
    code = AOTI.replace("PATH", repr(str(tmp_path / "call.pt2")))
    assert "right" in run_python(code, unset=(), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))


# torch.func


def causal(q, k, v, mask=None, **options):
    return ffpa_attn_func(q, k, v, mask, is_causal=True, enable_gqa=True, **options)


def test_torch_func_grad_is_what_autograd_computes_compiled_or_not():
    q, k, v, _ = make(Shape(1, 2, 1, 9, 12, D), HALF)
    call = lambda q, k, v: causal(q, k, v).float().square().sum()  # noqa: E731
    tensors = leaves(q, k, v)
    expected = torch.autograd.grad(call(*tensors), tensors)
    transformed = torch.func.grad(call, argnums=(0, 1, 2))
    assert same(transformed(q, k, v), expected)
    assert same(torch.compile(transformed, backend="aot_eager", fullgraph=True)(q, k, v), expected)


def mapped(function, tensors, dims):
    """What vmap is to give: a call for each, its results stacked."""
    calls = [
        function(*[x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True)])
        for i in range(3)
    ]
    return [torch.stack(each) for each in zip(*calls, strict=True)]


MASKS = {
    "none": (None, None),
    "own": ((3, 2, 1, 3, 5), 0),
    "own, of any batch": ((3, 1, 1, 3, 5), 0),
    "own, mapped last": ((2, 1, 3, 5, 3), 4),
    "shared": ((1, 2, 3, 5), None),
    "shared, of each batch": ((2, 1, 3, 5), None),
}


@pytest.mark.parametrize(
    ("kind", "dims"), [("none", (1, None, None)), ("none", (None, 4, 0)), *[(kind, (0, 0, 0)) for kind in MASKS]]
)
def test_vmap_gives_the_results_and_the_gradients_of_a_call_for_each(kind, dims):
    shape, mask_dim = MASKS[kind]
    tensors = [half(*s) for s in ((2, 2, 3, D), (2, 1, 5, D), (2, 1, 5, D))]
    tensors = [x if dim is None else torch.stack([x, x.flip(2), -x], dim) for x, dim in zip(tensors, dims, strict=True)]
    if shape is not None:
        tensors.append(half(*shape))
        dims = (*dims, mask_dim)

    def loss(*tensors):
        out, lse = causal(*tensors, return_lse=True)
        return out.float().square().sum() + lse.sum()

    forward = functools.partial(causal, return_lse=True)
    backward = torch.func.grad(loss, argnums=tuple(range(len(tensors))))
    for function in (forward, backward):
        got = torch.func.vmap(function, in_dims=dims)(*tensors)
        for a, b in zip(got, mapped(function, tensors, dims), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_vmap_of_a_call_without_a_batch_is_a_call_with_one():
    q, k, v, _ = make(Shape(3, 2, 1, 9, 12, D), HALF)
    assert torch.equal(torch.func.vmap(causal)(q, k, v), causal(q, k, v))
    with torch.no_grad():
        compiled = torch.compile(torch.func.vmap(causal), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), causal(q, k, v))


def test_vmap_makes_one_call_of_what_it_joins():
    q, k, v, _ = make(Shape(3, 2, 1, 9, 12, D), HALF)
    torch.func.vmap(causal, in_dims=(0, 0, 0, None))(q, k, v, half(9, 12))
    assert len(registry.get("triton").calls) == 1


def test_a_gradient_of_a_vmapped_call_reaches_what_all_share():
    q, k, v, _ = make(Shape(3, 2, 1, 9, 12, D), HALF)
    k, v = leaves(k[:1], v[:1])
    torch.func.vmap(causal, in_dims=(0, None, None))(q.unsqueeze(1), k, v).float().square().sum().backward()
    expected = leaves(k, v)
    causal(q, *[x.expand(3, -1, -1, -1) for x in expected]).float().square().sum().backward()
    for got, each in zip((k, v), expected, strict=True):
        torch.testing.assert_close(got.grad, each.grad, rtol=2e-3, atol=2e-2)


def test_jacrev_maps_over_the_backward_alone():
    q, k, v, _ = make(Shape(1, 1, 1, 2, 3, D), HALF)
    got = torch.func.jacrev(lambda q: causal(q, k, v).float().sum(-1).flatten())(q)
    rows = [torch.func.grad(lambda q, i=i: causal(q, k, v).float().sum(-1).flatten()[i])(q) for i in range(2)]
    torch.testing.assert_close(got, torch.stack(rows), rtol=2e-3, atol=2e-3)


def test_dropout_under_vmap_follows_its_rules_of_randomness():
    q, k, v, _ = make(Shape(1, 2, 2, 9, 12, D), HALF)
    tensors = [x.expand(2, *x.shape) for x in (q, k, v)]
    dropped = functools.partial(causal, dropout_p=0.5)
    with pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(dropped)(*tensors)
    same_for_all = torch.func.vmap(dropped, randomness="same")(*tensors)
    assert torch.equal(same_for_all[0], same_for_all[1])
    different = torch.func.vmap(dropped, randomness="different")(*tensors)
    assert not torch.equal(different[0], different[1])
    # The output is linear in v: a backward that drops what its forward dropped gives it back.
    linear = torch.func.vmap(
        torch.func.grad_and_value(lambda v: dropped(q, k, v).double().sum()), randomness="different"
    )
    grads, sums = linear(tensors[2])
    torch.testing.assert_close((grads.double() * tensors[2].double()).sum((1, 2, 3, 4)), sums, rtol=1e-2, atol=0.5)


@pytest.mark.parametrize("cu_dim", [None, 0])
def test_vmap_over_packed_sequences_is_a_call_for_each(cu_dim):
    tensors = [half(3, 12, 2, D), half(12, 1, D), half(12, 1, 3, D)]
    cu = torch.tensor([[0, 5, 11], [0, 0, 12], [0, 3, 4]], dtype=torch.int32)
    tensors, dims = [*tensors, cu if cu_dim == 0 else cu[0]], (0, None, 2, cu_dim)

    def loss(q, k, v, cu):
        out, lse = ffpa_attn_varlen_func(q, k, v, cu, causal=True, enable_gqa=True, return_lse=True)
        return out.float().square().sum() + lse[:, :3].sum()

    def forward(q, k, v, cu):
        return ffpa_attn_varlen_func(q, k, v, cu, causal=True, enable_gqa=True, return_lse=True)

    for function in (forward, torch.func.grad(loss, argnums=(0, 1, 2))):
        got = torch.func.vmap(function, in_dims=dims)(*tensors)
        for a, b in zip(got, mapped(function, tensors, dims), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_forward_mode_is_refused_and_never_loses_a_tangent():
    q, k, v, _ = make(Shape(1, 2, 2, 9, 12, D), HALF)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: FLASH.flash_attn(q, k, v, None, None, *PLAIN, "triton", "")[0], (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            FLASH.flash_attn(dual, k, v, None, None, *PLAIN, "triton", "triton")
        with pytest.raises(NotImplementedError, match="forward-mode"):
            ffpa_attn_func(dual, k, v, backend="triton")
        assert torch.equal(ffpa_attn_func(q, k, v, backend="triton"), ffpa_attn_func(q, k, v))  # no tangent


# Empty tensors


EMPTY = [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)]


class Launching:
    """A backend that takes every call and fails when it is run."""

    name = "triton"

    def refusals(self, problem, options, *, direction):
        return []

    def predict_us(self, problem):
        return 0.0

    def plan_forward(self, *options):
        raise AssertionError("a backend was asked for nothing")

    plan_backward = plan_forward


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", EMPTY)
def test_an_empty_call_launches_nothing_and_has_zero_gradients(shape, masked):
    batch, heads, rows, keys = shape
    tensors = leaves(*[half(batch, heads, n, D) for n in (rows, keys, keys)], *[half(1, 1, rows, keys)] * masked)
    compiled = torch.compile(ffpa_attn_func, backend="aot_eager", fullgraph=True)
    with registry.replaced("triton", Launching()):
        for call in (ffpa_attn_func, compiled):
            out, lse = call(*tensors, return_lse=True, backend="triton")
            assert (out == 0).all()
            assert lse.isneginf().all()
            grads = torch.autograd.grad([out, lse], tensors, [torch.ones_like(out), torch.ones_like(lse)])
            assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(grads, tensors, strict=True))


@pytest.mark.parametrize(("tokens", "heads"), [((0, 7), 2), ((5, 0), 2), ((5, 7), 0)])
def test_an_empty_packed_call_launches_nothing_and_has_zero_gradients(tokens, heads):
    rows, keys = tokens
    tensors = leaves(*[half(n, heads, D) for n in (rows, keys, keys)])
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in tokens)
    with registry.replaced("triton", Launching()):
        out, lse = ffpa_attn_varlen_func(*tensors, cu_q, cu_k, return_lse=True)
        assert (out == 0).all()
        assert lse.isneginf().all()
        grads = torch.autograd.grad([out, lse], tensors, [torch.ones_like(out), torch.ones_like(lse)])
    assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(grads, tensors, strict=True))


# What is looked at, and what is needed


@pytest.mark.parametrize("wanted", ["out", "lse", "both"])
def test_gradients_of_either_output_or_both(wanted):
    q, k, v, do = make(Shape(1, 2, 1, 9, 12, D), HALF)
    tensors = leaves(q, k, v)
    out, lse = causal(*tensors, return_lse=True)
    dlse = torch.randn_like(lse)
    outputs, cotangents = [out] * (wanted != "lse") + [lse] * (wanted != "out"), []
    cotangents = [do] * (wanted != "lse") + [dlse] * (wanted != "out")
    grads = torch.autograd.grad(outputs, tensors, cotangents)
    grad_out = torch.zeros_like(do) if wanted == "lse" else do
    oracle.check(
        q, k, v, out=out, lse=lse, grads=grads, grad_out=grad_out, grad_lse=None if wanted == "out" else dlse,
        is_causal=True,
    )  # fmt: skip


def test_the_backward_sees_who_watches_the_gradient_of_the_lse():
    class Watched(torch.Tensor):
        seen = []  # noqa: RUF012

        @staticmethod
        def __new__(cls, plain):
            return torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype, device=plain.device)

        def __init__(self, plain):
            self.plain = plain

        @classmethod
        def __torch_dispatch__(cls, function, types, arguments=(), options=None):
            cls.seen.append(str(function))
            plain = torch.utils._pytree.tree_map_only(cls, lambda x: x.plain, arguments)
            return function(*plain, **(options or {}))

    q, k, v, _ = make(Shape(1, 2, 1, 9, 12, D), HALF)
    tensors = leaves(q, k, v)
    _, lse = causal(*tensors, return_lse=True)
    torch.autograd.grad(lse, tensors, Watched(torch.ones_like(lse)))
    assert "ffpa_jit.flash_attn_backward.default" in Watched.seen


# DTensor


def test_sharded_batches_and_heads_stay_sharded_and_give_the_results_of_the_whole():
    """Two processes, which import torch.distributed for some seconds."""
    lines = run_program("tests/cpu/sharded_worker.py", unset=()).splitlines()
    assert sorted(lines) == sorted(
        [
            "heads, grouped: S(1) | S(1) S(1) S(1) | right",
            "heads of one key head, a mask of each: S(1) | S(1) P P S(1) | right",
            "batch, a mask for all: S(0) | S(0) S(0) S(0) P | right",
            "groups that do not divide: R | R R R | right",
            "packed heads: S(1) | S(1) S(1) S(1) | right",
            "dropout: subclass",
        ]
    )


# Counters


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_flop_counters_count_what_they_count_of_sdpa(mode):
    from torch.utils.flop_counter import FlopCounterMode

    with mode():
        tensors = leaves(half(2, 4, 9, D), half(2, 2, 12, D), half(2, 2, 12, D))
        with FlopCounterMode(display=False) as counter:
            out = causal(*tensors)
            product = 2 * 2 * 4 * 9 * 12 * D
            assert counter.get_total_flops() == 2 * product
            if out.requires_grad:
                out.sum().backward()
                assert counter.get_total_flops() == 7 * product


def test_flop_counters_count_packed_sequences_by_their_lengths():
    from torch.utils.flop_counter import FlopCounterMode

    tensors = leaves(*[half(12, 2, D) for _ in range(3)])
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        ffpa_attn_varlen_func(*tensors, cu, causal=True).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 2 * D * (5 * 5 + 7 * 7)


def test_importing_the_package_imports_no_counter_no_dtensor_and_no_sympy():
    heavy = "'torch.utils.flop_counter', 'torch.distributed.tensor', 'sympy', 'torch._dynamo'"
    assert run_python(f"import sys, ffpa_jit; print([m for m in ({heavy}) if m in sys.modules])").strip() == "[]"


# Checkpoints and hooks


def selective(context, op, *arguments, **options):
    return CheckpointPolicy.MUST_SAVE if "flash_attn" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("way", ["selective", "reentrant", "save_on_cpu"])
def test_recomputed_and_offloaded_forwards_give_the_same_gradients(way):
    q, k, v, do = make(Shape(1, 2, 1, 9, 12, D), HALF)
    block = lambda q, k, v: causal(q * 2, k, v)  # noqa: E731
    tensors = leaves(q, k, v)
    expected = torch.autograd.grad(block(*tensors), tensors, do)
    tensors = leaves(q, k, v)
    if way == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            out = block(*tensors)
    elif way == "reentrant":
        out = checkpoint(block, *tensors, use_reentrant=True)
    else:
        contexts = functools.partial(create_selective_checkpoint_contexts, selective)
        out = checkpoint(block, *tensors, use_reentrant=False, context_fn=contexts)
    out.backward(do)
    assert same([x.grad for x in tensors], expected)


def test_the_packed_operators_pass_opcheck():
    q, k, v = leaves(*[half(12, 2, D) for _ in range(3)])
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    inputs = (q, k, v, cu, cu, None, 7, 7, *PLAIN, "triton", "triton")
    torch.library.opcheck(FLASH.flash_attn_varlen, inputs)
    out, lse = (x.detach() for x in FLASH.flash_attn_varlen(*inputs))
    q, k, v = (x.detach() for x in (q, k, v))
    inputs = (out, None, q, k, v, cu, cu, None, out, lse, 7, 7, *PLAIN, [True, False, True], "triton")
    torch.library.opcheck(FLASH.flash_attn_varlen_backward, inputs, test_utils=("test_schema", "test_faketensor"))
