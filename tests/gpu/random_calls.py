"""Random calls of the CuTe-DSL forward: shapes, layouts and scales that it takes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from ffpa_jit.cute.spec import HEAD_DIMS
from tests.cases.shapes import LAYOUTS, Shape, make

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RandomCall:
    """A call, and with `seed` its inputs."""

    shape: Shape
    dtype: torch.dtype
    layout: str
    scale: float | None
    seed: int

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.shape}-{name}-{self.layout}-scale {self.scale}-seed {self.seed}"

    def inputs(self, device: str) -> tuple[torch.Tensor, ...]:
        return make(self.shape, self.dtype, device, layout=self.layout, seed=self.seed)[:3]


def length(draw: random.Random, largest: int) -> int:
    """As often near a multiple of a tile's rows as anywhere, and as often short as long."""
    near = draw.choice((1, 64, 128, 192, 256, 512)) + draw.randint(-1, 1)
    anywhere = round(2 ** draw.uniform(0, largest.bit_length() - 1e-9))
    return max(1, min(draw.choice((near, anywhere, draw.randint(1, largest))), largest))


def random_call(draw: random.Random, *, rows: int = 700, keys: int = 1500, scores: int = 2**24) -> RandomCall:
    """A call of at most so many queries and keys a head, and of so many scores in all."""
    while True:
        heads_kv, group = draw.choice((1, 1, 2, 3, 5)), draw.choice((1, 1, 2, 3, 4, 7, 8, 9))
        head_dim = draw.choice((draw.choice(HEAD_DIMS), draw.randrange(264, HEAD_DIMS[-1] + 1, 8)))
        len_q, len_kv, causal = length(draw, rows), length(draw, keys), draw.random() < 0.5
        if causal and len_q > len_kv:
            len_q, len_kv = len_kv, len_q
        shape = Shape(draw.choice((1, 1, 2, 3)), heads_kv * group, heads_kv, len_q, len_kv, head_dim, causal)
        scale = draw.choice((None, None, None, 1.0, -0.1, 0.3))
        call = RandomCall(shape, draw.choice(DTYPES), draw.choice(LAYOUTS), scale, draw.getrandbits(31))
        if shape.batch * shape.heads_q * len_q * len_kv <= scores:
            return call
