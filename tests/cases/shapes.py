"""One table of shapes and layouts for every test that runs a kernel."""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class MaskKind:
    """How an attention mask looks.

    ``what``: "bool", or additive in the query's dtype ("half") or in float32 ("fp32").
    ``dims``: those of "bhqk" that it has; it broadcasts over the others.
    ``pattern``: what it hides, see ``_hidden``. An additive mask hides with -inf ("minimum" and "low": with the lowest
    finite number, of its own dtype or of fp16) and adds random values elsewhere.
    ``layout``: "plain", "expanded" (full size, stride 0 where it broadcasts), "transposed" (keys are not the fastest
    dim), "sliced" (a window of memory whose rest would show in every result), "few_dims" (without leading ones).
    """

    what: str
    dims: str = "bhqk"
    pattern: str = "random"
    layout: str = "plain"

    def __str__(self) -> str:
        layout = "" if self.layout == "plain" else f"-{self.layout}"
        return f"{self.what}/{self.dims or '0'}-{self.pattern}{layout}"


PATTERNS = ("random", "values", "right", "left", "blocks", "frames", "empty_rows", "all", "minimum", "low")


def _hidden(pattern: str, shape: Shape, generator: torch.Generator, device: str) -> Tensor:
    """The hidden elements, [B, Hq, Nq, Nkv]."""
    batch, _, len_q, len_kv = sizes = (shape.batch, shape.heads_q, shape.len_q, shape.len_kv)
    keys = torch.arange(len_kv, device=device)
    rows = (torch.arange(len_q, device=device) + (len_kv - len_q))[:, None]
    per_batch = torch.arange(batch, device=device)[:, None, None, None]
    if pattern in ("right", "left"):  # padding, in half of the keys and rows at most
        start = (per_batch * 37 + len_kv // 3 + 1) % (len_kv // 2 + 1)
        edge = len_kv - start if pattern == "right" else start
        hidden = (keys >= edge) | (rows >= edge) if pattern == "right" else (keys < edge) | (rows < edge)
        return hidden.expand(sizes)
    if pattern == "blocks":  # several documents in one row
        return (rows // max(1, len_kv // 3) != keys // max(1, len_kv // 3)).expand(sizes)
    if pattern == "frames":  # all of a frame sees all of it and of the ones before
        return (keys // max(1, len_kv // 5) > rows // max(1, len_kv // 5)).expand(sizes)
    if pattern == "values":
        return torch.zeros(sizes, dtype=torch.bool, device=device)
    if pattern == "all":
        return torch.ones(sizes, dtype=torch.bool, device=device)
    hidden = torch.rand(sizes, device=device, generator=generator) < 0.3
    if pattern in ("empty_rows", "minimum", "low"):
        hidden[:, :, ::3] = True
    elif len_q > 3:
        hidden[:, :, 3] = True
    return hidden


def make_mask(kind: MaskKind, shape: Shape, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0) -> Tensor:
    """A mask of a kind for a shape; ``dtype`` is the query's."""
    generator = torch.Generator(device).manual_seed(seed)
    full = (shape.batch, shape.heads_q, shape.len_q, shape.len_kv)
    hidden = _hidden(kind.pattern, shape, generator, device)
    hidden = hidden[tuple(slice(None) if name in kind.dims else slice(0, 1) for name in "bhqk")]
    if kind.what == "bool":
        mask, beyond = ~hidden, True
    else:
        values = torch.float32 if kind.what == "fp32" else dtype
        lowest = {"minimum": torch.finfo(values).min, "low": torch.finfo(torch.float16).min}
        mask = torch.randn(hidden.shape, device=device, generator=generator).to(values)
        mask, beyond = mask.masked_fill(hidden, lowest.get(kind.pattern, -math.inf)), math.nan
        if kind.pattern in lowest and hidden.shape[2] > 6:
            mask[:, :, 6, ::2] = -math.inf  # beside "minimum" keys, ones that are not there at all
    if kind.layout == "expanded":
        return mask.expand(full)
    if kind.layout == "transposed":
        return mask.transpose(2, 3).contiguous().transpose(2, 3)
    if kind.layout == "sliced":
        store = mask.new_full((*mask.shape[:2], mask.shape[2] + 3, mask.shape[3] + 5), beyond)
        return store[:, :, 1 : 1 + mask.shape[2], 1 : 1 + mask.shape[3]].copy_(mask)
    if kind.layout == "few_dims":
        while mask.dim() > 2 and mask.shape[0] == 1:
            mask = mask[0]
    return mask


@dataclass(frozen=True)
class Packed:
    """Sequences packed into [T, H, D] tensors, by their lengths; ``slack`` rows of NaN follow the last one."""

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    heads_q: int
    heads_kv: int
    head_dim: int
    slack: int = 0

    @property
    def enable_gqa(self) -> bool:
        return self.heads_q != self.heads_kv

    @property
    def max_q(self) -> int:
        return max(self.lens_q, default=0)

    @property
    def max_k(self) -> int:
        return max(self.lens_k, default=0)

    def __str__(self) -> str:
        def lengths(lens: tuple[int, ...]) -> str:
            return "_".join(map(str, lens[:4])) + ("..." if len(lens) > 4 else "")

        return f"q{lengths(self.lens_q)}k{lengths(self.lens_k)}h{self.heads_q}x{self.heads_kv}d{self.head_dim}"


# Lengths of queries and keys that a packed batch may hold; None for the keys: those of the queries.
LENGTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "one": ((17,), None),
    "several": ((17, 1, 40, 9), None),
    "zero_queries": ((5, 0, 9, 0), (5, 7, 30, 3)),
    "zero_keys": ((5, 6, 9), (0, 8, 0)),
    "zero_both": ((0, 9, 0, 0, 4), (0, 9, 0, 0, 4)),
    "nothing": ((0, 0), (0, 0)),
    "more_keys": ((3, 20, 1), (40, 33, 70)),
    "more_queries": ((40, 20), (3, 1)),
    "one_query_each": ((1, 0, 1, 0, 1), (3, 0, 5, 2, 40)),
    "many_tiny": ((1, 2, 3, 0, 1, 4, 2, 1), None),
    "one_long": ((1, 2, 150, 1), None),
    "tile_edges": ((63, 64, 65), None),
}


def pack(name: str, heads_q: int, heads_kv: int, head_dim: int, *, times: int = 1, slack: int = 0) -> Packed:
    """The lengths of a name, ``times`` as long."""
    lens_q, lens_k = LENGTHS[name]
    lens_k = lens_q if lens_k is None else lens_k
    return Packed(
        tuple(n * times for n in lens_q), tuple(n * times for n in lens_k), heads_q, heads_kv, head_dim, slack
    )


def make_packed(packed: Packed, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0):
    """Query, key, value and an output gradient of [T, H, D], then cu_seqlens of queries and of keys (int32)."""
    torch.manual_seed(seed)
    total_q, total_k = sum(packed.lens_q) + packed.slack, sum(packed.lens_k) + packed.slack

    def values(total: int, heads: int) -> Tensor:
        x = torch.randn(total, heads, packed.head_dim, dtype=dtype, device=device)
        x[total - packed.slack :] = math.nan
        return x

    def offsets(lens: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)

    query, grad_out = (values(total_q, packed.heads_q) for _ in range(2))
    key, value = (values(total_k, packed.heads_kv) for _ in range(2))
    return query, key, value, grad_out, offsets(packed.lens_q), offsets(packed.lens_k)
