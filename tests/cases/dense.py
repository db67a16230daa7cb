"""Dense calls of the Triton backend, forward and backward, held to the oracle: on which inputs, and in which sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffpa_jit import ffpa_attn_func
from tests import oracle
from tests.cases import shapes
from tests.cases.shapes import Shape, leaves

SCORE_ORDERS = (1, 100, 10_000)
"""How large scores are: multiples of the default scale."""

STEPS = (5, 50, 500)
"""By how much a row's maximum grows every 64 keys."""

STRIDED = tuple(layout for layout in shapes.LAYOUTS if layout != "contiguous")


@dataclass(frozen=True)
class Sizes:
    """Shapes of the same properties: a matrix of all, and some for each kind of input."""

    matrix: list[Shape]
    strided: list[Shape]
    any_order: list[Shape]
    late_maximum: list[Shape]
    gemma_like: list[Shape]


PLAIN = Shape(1, 1, 1, 130, 130, 320)
CAUSAL = Shape(1, 2, 1, 130, 200, 264, True)

SMALL = Sizes(
    matrix=shapes.SMALL,
    strided=[Shape(1, 2, 2, 33, 65, 264), CAUSAL],
    any_order=[PLAIN, CAUSAL],
    late_maximum=[Shape(1, 1, 1, 130, 300, 264), Shape(1, 1, 1, 200, 330, 264, True)],
    gemma_like=[Shape(1, 2, 1, 150, 150, 512, True)],
)
"""For the interpreter, which takes about a second for each."""

LARGE = Sizes(
    matrix=shapes.LARGE,
    strided=[Shape(2, 4, 2, 300, 520, 512, True)],
    any_order=[Shape(1, 2, 2, 640, 1000, 512), Shape(1, 2, 1, 640, 1000, 320, True)],
    late_maximum=[Shape(1, 2, 2, 700, 1000, 512), Shape(1, 2, 1, 1000, 1000, 320, True)],
    gemma_like=[Shape(1, 8, 1, 2048, 2048, 512, True), Shape(1, 4, 2, 500, 900, 512)],
)
"""For a GPU."""


def attend(shape: Shape, q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Output and LSE of the call that `shape` describes."""
    return ffpa_attn_func(
        q, k, v, is_causal=shape.is_causal, enable_gqa=shape.enable_gqa, backend="triton", return_lse=True, **options
    )


def run_and_check(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, grad_lse: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Forward and backward of three leaves; everything is held to the oracle."""
    q, k, v = leaves(q, k, v)
    out, lse = attend(shape, q, k, v, scale=scale)
    outputs, gradients = ((out,), (grad_out,)) if grad_lse is None else ((out, lse), (grad_out, grad_lse))
    grads = torch.autograd.grad(outputs, (q, k, v), gradients)
    oracle.check(
        q, k, v, out=out, lse=lse, grads=grads, grad_out=grad_out, grad_lse=grad_lse, is_causal=shape.is_causal,
        scale=scale,
    )  # fmt: skip
    return out, lse, grads
