"""What watches, transforms, records and shards calls: tests for the interpreter and a GPU, as in tests/semantics.py."""

from __future__ import annotations

import pytest
import torch

from ffpa_jit import ffpa_attn_func, ffpa_attn_varlen_func
from tests import oracle
from tests.cases.shapes import Shape, leaves, make, tensor
from tests.semantics import DIM


def test_flops_are_counted_for_the_operators(device, dtype):
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v, do = make(Shape(2, 4, 2, 17, 33, DIM), dtype, device)
    rows = leaves(q, k, v)
    with FlopCounterMode(display=False) as counter:
        out = ffpa_attn_func(*rows, enable_gqa=True)
    product = 2 * 2 * 4 * 17 * 33 * DIM
    assert counter.get_total_flops() == 2 * product
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out, rows, do)
    assert counter.get_total_flops() == 5 * product
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor([0, x.shape[0]], dtype=torch.int32, device=device) for x in packed[:2])
    with FlopCounterMode(display=False) as counter:
        ffpa_attn_varlen_func(*packed, cu_q, cu_k, 17, 33, enable_gqa=True)
    assert counter.get_total_flops() == product


def test_a_program_exported_with_dynamic_lengths_runs_at_all_of_them(device, dtype):
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True)

    def given(length, keys):
        return make(Shape(1, 4, 2, length, keys, DIM), dtype, device)[:3]

    length, keys = torch.export.Dim("length", min=2, max=4096), torch.export.Dim("keys", min=2, max=8192)
    shapes = ({2: length}, {2: keys}, {2: keys})
    program = torch.export.export(Attend(), given(17, 33), dynamic_shapes=shapes, strict=False)
    for sizes in ((17, 33), (5, 70), (33, 33), (200, 300)):
        q, k, v = given(*sizes)
        assert torch.equal(program.module()(q, k, v), ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True)), sizes


def test_a_program_exported_without_gradients_has_them_when_called_with_them(device, dtype):
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return ffpa_attn_func(q, k, v, is_causal=True)

    q, k, v, do = make(Shape(1, 2, 2, 17, 33, DIM), dtype, device)
    with torch.no_grad():
        program = torch.export.export(Attend(), (q, k, v), strict=False)
    rows = leaves(q, k, v)
    out = program.module()(*rows)
    grads = torch.autograd.grad(out, rows, do)
    oracle.check(q, k, v, out=out, grads=grads, grad_out=do, is_causal=True)


def test_a_gradient_transform_may_be_compiled(device, dtype):
    q, k, v, _ = make(Shape(1, 2, 2, 9, 12, DIM), dtype, device)
    gradient = torch.func.grad(lambda q, k, v: ffpa_attn_func(q, k, v).float().square().sum(), argnums=(0, 1, 2))
    torch.compiler.reset()
    compiled = torch.compile(gradient, backend="aot_eager")(q, k, v)
    rows = leaves(q, k, v)
    expected = torch.autograd.grad(ffpa_attn_func(*rows).float().square().sum(), rows)
    for a, b, c in zip(compiled, gradient(q, k, v), expected, strict=True):
        assert oracle.relative_error(a, c) < 1e-2
        assert oracle.relative_error(b, c) < 1e-2


def test_a_vectorised_call_is_a_call_for_each(device, dtype):
    q = torch.randn(3, 1, 2, 9, DIM, dtype=dtype, device=device)
    k, v = (torch.randn(3, 1, 2, 12, DIM, dtype=dtype, device=device) for _ in range(2))
    at_once = torch.func.vmap(lambda q, k, v: ffpa_attn_func(q, k, v, is_causal=True))(q, k, v)
    for i in range(3):
        one = ffpa_attn_func(q[i], k[i], v[i], is_causal=True)
        assert oracle.relative_error(at_once[i], one) < 1e-2


@pytest.fixture
def mesh(device, tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "shape", [Shape(1, 4, 4, 9, 12, DIM, True), Shape(1, 4, 4, 12, 12, DIM, True), Shape(1, 4, 2, 9, 9, DIM)], ids=str
)
def test_heads_that_are_sharded_are_attended_to(device, dtype, mesh, shape):
    from torch.distributed.tensor import Shard, distribute_tensor

    q, k, v, do = make(shape, dtype, device)
    rows = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in (q, k, v)]
    out = ffpa_attn_func(*rows, is_causal=shape.is_causal, enable_gqa=shape.enable_gqa)
    grads = torch.autograd.grad(out, rows, distribute_tensor(do, mesh, [Shard(1)]))
    exact = oracle.attention(q, k, v, is_causal=shape.is_causal, grad_out=do)
    for a, b in zip((out, *grads), (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
        assert oracle.relative_error(a.full_tensor(), b) < (4e-3 if dtype == torch.float16 else 2e-2)


def test_a_packed_view_keeps_its_layout(device, dtype):
    q = tensor("sliced", 9, 2, 3, DIM, dtype=dtype, device=device)[:, :, 0]
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    assert ffpa_attn_varlen_func(q, q, q, cu).stride() == torch.empty_like(q).stride()
