"""Causal biases of torch.nn.attention.bias, on Triton's interpreter; the tests are in tests/causal_biases.py."""

from __future__ import annotations

import pytest
import torch

from tests.causal_biases import *  # noqa: F403  (each of them, here)
from tests.cpu.conftest import run_python

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def dtype() -> torch.dtype:
    return torch.float16  # the interpreter computes with bf16 wrongly


def test_to_look_for_one_imports_no_compiler():
    run_python(
        "import sys, torch; from ffpa_jit import ffpa_attn_func; q = torch.randn(1, 1, 3, 512, dtype=torch.float16)\n"
        "mask = torch.nn.Parameter(torch.zeros(3, 3, dtype=torch.float16))\n"
        "ffpa_attn_func(q, q, q, mask, backend='sdpa')\n"
        "assert 'torch.nn.attention.bias' not in sys.modules and 'torch._dynamo' not in sys.modules"
    )
