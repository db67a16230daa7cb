"""Causal biases of torch.nn.attention.bias, on a GPU; the tests are in tests/causal_biases.py."""

from __future__ import annotations

import pytest
import torch

from tests.causal_biases import *  # noqa: F403  (each of them, here)

pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def test_inductor_compiles_it(device, dtype):
    q, k, v, do = make(Shape(1, 2, 2, 200, 300, 512), dtype, device)  # noqa: F405
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v, mask: ffpa_attn_func(q * 2, k, v, mask), fullgraph=True)  # noqa: F405
    for kind in KINDS:  # noqa: F405
        rows = leaves(q, k, v)  # noqa: F405
        out = compiled(*rows, bias(kind, 200, 300))  # noqa: F405
        grads = torch.autograd.grad(out, rows, do)
        mask = seen(kind, 200, 300, device)  # noqa: F405
        oracle.check(q * 2, k, v, out=out, grads=(None, *grads[1:]), grad_out=do, attn_mask=mask)  # noqa: F405
