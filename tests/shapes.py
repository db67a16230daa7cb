"""One table of shapes and layouts for every test that runs a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """One attention problem; ``heads_q`` is a multiple of ``heads_kv``."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int
    is_causal: bool = False

    @property
    def enable_gqa(self) -> bool:
        return self.heads_q != self.heads_kv

    def __str__(self) -> str:
        causal = "-causal" if self.is_causal else ""
        return f"b{self.batch}h{self.heads_q}x{self.heads_kv}n{self.len_q}x{self.len_kv}d{self.head_dim}{causal}"


# Small enough for the interpreter: a tile is 128 x 128, so 130 and 200 cross a tile edge.
SMALL = [
    Shape(1, 1, 1, 1, 1, 512),
    Shape(1, 2, 2, 17, 17, 264),
    Shape(2, 1, 1, 130, 130, 320),
    Shape(1, 1, 1, 200, 200, 512),
    Shape(1, 1, 1, 33, 33, 1024),
    Shape(1, 2, 2, 1, 200, 512),
    Shape(1, 3, 1, 17, 130, 320),
    Shape(1, 1, 1, 200, 1, 264),
    Shape(1, 1, 1, 130, 17, 512),
    Shape(1, 1, 1, 130, 130, 512, True),
    Shape(1, 1, 1, 200, 200, 264, True),
    Shape(1, 1, 1, 17, 200, 320, True),
    Shape(1, 3, 1, 130, 200, 264, True),
    Shape(1, 5, 1, 17, 17, 512),
    Shape(2, 8, 1, 17, 33, 264, True),
    Shape(1, 6, 2, 33, 65, 320),
    Shape(1, 1, 1, 1, 1, 1024, True),
]

# No output, no key, or no batch.
EMPTY = [
    Shape(0, 2, 2, 17, 17, 320),
    Shape(1, 2, 1, 0, 17, 320),
    Shape(1, 2, 1, 17, 0, 320),
    Shape(2, 2, 2, 0, 0, 512, True),
    Shape(1, 0, 0, 17, 17, 320),
]

# For a GPU: every head-dim class, lengths at and off the tile edges, group sizes that divide nothing.
LARGE = [
    Shape(1, 2, 2, 512, 512, 320),
    Shape(2, 4, 4, 1000, 1000, 512),
    Shape(1, 4, 4, 1024, 1024, 512, True),
    Shape(1, 2, 2, 2047, 2047, 512, True),
    Shape(1, 2, 2, 1, 4096, 512),
    Shape(1, 4, 2, 8, 4097, 512, True),
    Shape(1, 2, 2, 129, 2048, 264, True),
    Shape(1, 2, 2, 1024, 129, 640),
    Shape(1, 12, 4, 333, 777, 384),
    Shape(2, 10, 2, 512, 640, 512, True),
    Shape(1, 8, 1, 700, 700, 768, True),
    Shape(1, 14, 2, 257, 1025, 320),
    Shape(1, 2, 2, 1500, 1500, 1024),
    Shape(1, 3, 1, 1500, 1500, 1024, True),
    Shape(1, 2, 1, 300, 300, 904),
    Shape(1, 1, 1, 8192, 8192, 512, True),
]

LAYOUTS = ("contiguous", "bshd", "expanded", "sliced", "last_stride")


def tensor(layout: str, batch: int, heads: int, length: int, dim: int, **kwargs) -> Tensor:
    """Random values of shape [batch, heads, length, dim] in the given memory layout.

    Memory that a view skips holds NaN: reading it shows in every result.
    """
    shape = (batch, heads, length, dim)
    if layout == "contiguous":
        return torch.randn(shape, **kwargs)
    if layout == "bshd":  # [B, S, H, D] seen as [B, H, S, D]
        return torch.randn(batch, length, heads, dim, **kwargs).transpose(1, 2)
    if layout == "expanded":  # one head broadcast to all
        return torch.randn(batch, 1, length, dim, **kwargs).expand(shape)
    if layout == "sliced":  # a window of a larger cache, and a wider row
        store = torch.full((batch, heads, length + 5, dim + 8), float("nan"), **kwargs)
        view = store[:, :, :length, :dim]
        return view.copy_(torch.randn(shape, **kwargs))
    if layout == "last_stride":  # [B, H, D, S] seen as [B, H, S, D]
        return torch.randn(batch, heads, dim, length, **kwargs).transpose(2, 3)
    raise ValueError(layout)


def make(shape: Shape, dtype: torch.dtype, device: str = "cpu", *, layout: str = "contiguous", seed: int = 0):
    """Query, key, value and an output gradient of a shape; the gradient is contiguous."""
    torch.manual_seed(seed)
    kwargs = {"dtype": dtype, "device": device}
    query = tensor(layout, shape.batch, shape.heads_q, shape.len_q, shape.head_dim, **kwargs)
    key = tensor(layout, shape.batch, shape.heads_kv, shape.len_kv, shape.head_dim, **kwargs)
    value = tensor(layout, shape.batch, shape.heads_kv, shape.len_kv, shape.head_dim, **kwargs)
    grad_out = torch.randn(shape.batch, shape.heads_q, shape.len_q, shape.head_dim, **kwargs)
    return query, key, value, grad_out


def far_apart(apart: int, length: int, dim: int) -> tuple[Tensor, ...]:
    """Query, key and value in bf16 on the GPU, [1, 4, length, dim], whose heads are `apart` elements apart."""
    store = torch.empty(3 * apart + 3 * length * dim, dtype=torch.bfloat16, device="cuda")

    def view(offset: int) -> Tensor:
        x = store.as_strided((1, 4, length, dim), (4 * apart, apart, dim, 1), offset * length * dim)
        return x.copy_(torch.randn_like(x, memory_format=torch.contiguous_format))

    return view(0), view(1), view(2)


def late_maximum(shape: Shape, dtype: torch.dtype, device: str = "cpu", *, step: float = 12.0, seed: int = 0):
    """Inputs whose row maximum grows along the keys: by ``step`` in the score every 64 keys, unevenly by row."""
    query, key, value, grad_out = make(shape, dtype, device, seed=seed)
    direction = torch.zeros(shape.head_dim, device=device, dtype=torch.float32)
    direction[:8] = 1.0
    rows = torch.linspace(-0.2, 1.0, shape.len_q, device=device)  # some rows fall instead
    steps = (torch.arange(shape.len_kv, device=device) // 64).float()
    gain = (step * shape.head_dim**0.5 / 8) ** 0.5
    query = (query.float() + rows[:, None] * gain * direction).to(dtype)
    key = (key.float() + steps[:, None] * gain * direction).to(dtype)
    return query, key, value, grad_out


def gemma_like(shape: Shape, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0):
    """RMS-normed query and key with the key close to the query, for scale 1.0: the diagonal dominates."""
    assert shape.len_q <= shape.len_kv
    query, key, value, grad_out = make(shape, dtype, device, seed=seed)
    group = shape.heads_q // shape.heads_kv

    def rms(x: Tensor) -> Tensor:
        x = x.float()
        return (x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(dtype)

    key = rms(key)
    tail = key[:, :, shape.len_kv - shape.len_q :].repeat_interleave(group, 1).float()
    return rms(tail + 0.5 * query.float()), key, value, grad_out


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same views as autograd leaves; ``detach`` keeps the strides."""
    return tuple(t.detach().requires_grad_() for t in tensors)
