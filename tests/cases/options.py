"""Calls in which every option meets every other, for the interpreter and for a GPU: stated, run, held to the oracle."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from ffpa_jit import TritonBackend, ffpa_attn_backward, ffpa_attn_func, ffpa_attn_varlen_func
from tests import oracle, philox
from tests.cases.shapes import LAYOUTS, LENGTHS, MaskKind, Packed, Shape, make, make_mask, make_packed, pack

ALL = (-1, -1)
"""The window that limits nothing."""

MASKS = [
    None,
    MaskKind("bool", "bk", "right", "few_dims"),
    MaskKind("bool", "bqk", "left", "expanded"),
    MaskKind("bool", "qk", "blocks", "few_dims"),
    MaskKind("bool", "bhqk", "empty_rows", "sliced"),
    MaskKind("bool", "hqk", "frames", "transposed"),
    MaskKind("bool", "q", "random"),
    MaskKind("half", "bhqk", "random"),
    MaskKind("half", "qk", "minimum", "few_dims"),
    MaskKind("half", "hk", "values", "expanded"),
    MaskKind("half", "bk", "all"),
    MaskKind("fp32", "k", "low", "few_dims"),
    MaskKind("fp32", "bqk", "minimum", "transposed"),
    MaskKind("fp32", "bh", "values"),
    MaskKind("fp32", "hq", "values", "sliced"),
]
EVERYWHERE: dict[str, Sequence[Any]] = {
    "softcap": [0.0, 2.0, 30.0],
    "dropout_p": [0.0, 0.1, 0.9],
    "with_lse": [False, True],
}
DENSE: dict[str, Sequence[Any]] = {
    "mask": MASKS,
    "batch": [1, 2],
    "causal": [False, True],
    "needs": ["qkvm", "m", "q", "km", "qv", ""],
    "layout": list(LAYOUTS),
    "scale": [None, 0.0, -0.1],
    **EVERYWHERE,
}
VARLEN: dict[str, Sequence[Any]] = {
    "lengths": list(LENGTHS),
    "is_causal": [False, True],
    "needs": ["qkv", "q", "kv", ""],
    "given": ["int", "tensor", "none"],
    **EVERYWHERE,
}
"""The values of each option, whatever the size of a call; what depends on that is its test's."""


def pairwise(options: dict[str, Sequence[Any]], allowed: Callable[..., bool], seed: int = 0) -> list[dict[str, Any]]:
    """Few choices of one value for each option, so that each allowed pair of values of two options is in one."""
    draw = random.Random(seed)
    names = list(options)

    def pairs(choice: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, choice[a], b, choice[b]) for a, b in combinations(names, 2)}

    def values(choice: dict[str, int]) -> dict[str, Any]:
        return {name: options[name][i] for name, i in choice.items()}

    missing = [
        (a, i, b, j) for a, b in combinations(names, 2) for i in range(len(options[a])) for j in range(len(options[b]))
    ]
    draw.shuffle(missing)
    left, found = dict.fromkeys(missing), []
    while left:
        a, i, b, j = next(iter(left))
        candidates = []
        for _ in range(200):
            choice = {name: draw.randrange(len(options[name])) for name in names} | {a: i, b: j}
            if allowed(**values(choice)):
                candidates.append(choice)
        del left[a, i, b, j]
        if candidates:  # else the two values never go together
            best = max(candidates, key=lambda choice: len(pairs(choice) & left.keys()))
            found.append(values(best))
            for pair in pairs(best):
                left.pop(pair, None)
    return found


@contextmanager
def drawn(device: str) -> Iterator[Tensor]:
    """Inside, every call draws these two words for its dropout."""
    words = torch.randint(-(2**63), 2**63 - 1, (2,), device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.randint", lambda *args, **kwargs: words.clone())
        yield words


def requiring(tensors: dict[str, Tensor | None], needs: str) -> dict[str, Tensor | None]:
    """The same views as leaves; those whose letter (q, k, v, m) is in ``needs`` require a gradient."""
    return {
        name: None if x is None else x.detach().requires_grad_(name in needs and x.is_floating_point())
        for name, x in tensors.items()
    }


def gradients(
    outputs: tuple[Tensor, Tensor], inputs: dict[str, Tensor | None], grad_out: Tensor, grad_lse: Tensor | None
) -> dict[str, Tensor]:
    """The gradient of each input that requires one."""
    wanted = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    if not wanted:
        assert not outputs[0].requires_grad
        return {}
    given = ((outputs[0],), (grad_out,)) if grad_lse is None else (outputs, (grad_out, grad_lse))
    grads = dict(zip(wanted, torch.autograd.grad(given[0], list(wanted.values()), given[1]), strict=True))
    for name, grad in grads.items():
        assert grad.dtype == inputs[name].dtype, name
        assert grad.shape == inputs[name].shape, name
    return grads


@dataclass(frozen=True)
class Case:
    """A dense call. ``needs``: letters of q, k, v and m, the mask; ``memory``: `TritonBackend.workspace_mb`."""

    shape: Shape
    mask: MaskKind | None = None
    window: tuple[int | None, int | None] | None = ALL
    softcap: float = 0.0
    dropout_p: float = 0.0
    with_lse: bool = False
    needs: str = "qkvm"
    memory: float | None = None
    layout: str = "contiguous"
    scale: float | None = None

    def __str__(self) -> str:
        parts = [str(self.shape), str(self.mask or "nomask")]
        parts += [f"w{self.window[0]},{self.window[1]}"] if self.window != ALL else []
        parts += [f"cap{self.softcap}"] if self.softcap else []
        parts += [f"drop{self.dropout_p}"] if self.dropout_p else []
        parts += ["dlse"] if self.with_lse else []
        parts += [self.needs or "forward"]
        parts += [f"mem{self.memory}"] if self.memory is not None else []
        parts += [self.layout] if self.layout != "contiguous" else []
        parts += [f"scale{self.scale}"] if self.scale is not None else []
        return "-".join(parts)

    def call(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The public function with these options, on Triton."""
        return ffpa_attn_func(
            q, k, v, attn_mask=mask, dropout_p=self.dropout_p, is_causal=self.shape.is_causal, scale=self.scale,
            enable_gqa=self.shape.enable_gqa, window_size=self.window, softcap=self.softcap,
            backend=TritonBackend(workspace_mb=self.memory), return_lse=True,
        )  # fmt: skip

    def run(self, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0) -> None:
        """Forward, and backward where something needs it; everything is held to the oracle."""
        shape = self.shape
        q, k, v, grad_out = make(shape, dtype, device, layout=self.layout, seed=seed)
        mask = None if self.mask is None else make_mask(self.mask, shape, dtype, device, seed=seed)
        grad_lse = torch.randn(grad_out.shape[:3], device=device) if self.with_lse else None
        inputs = requiring({"q": q, "k": k, "v": v, "m": mask}, self.needs)
        with drawn(device) as words:
            out, lse = self.call(*inputs.values())
        grads = gradients((out, lse), inputs, grad_out, grad_lse)
        kept = None
        if self.dropout_p:
            kept = philox.kept(words, (shape.batch, shape.heads_q, shape.len_q, shape.len_kv), self.dropout_p)
        oracle.check(
            q, k, v, out=out, lse=lse, grads=tuple(grads.get(name) for name in "qkv"), grad_mask=grads.get("m"),
            grad_out=grad_out, grad_lse=grad_lse, is_causal=shape.is_causal, scale=self.scale, attn_mask=mask,
            kept=kept, window=self.window, softcap=self.softcap,
        )  # fmt: skip
        assert out.stride() == torch.empty_like(q).stride()


@dataclass(frozen=True)
class VarlenCase:
    """A packed call.

    ``given``: how the longest lengths are told, "int", "tensor" or "none". ``same``: without cu_seqlens_k.
    """

    packed: Packed
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = ALL
    softcap: float = 0.0
    dropout_p: float = 0.0
    with_lse: bool = False
    needs: str = "qkv"
    memory: float | None = None
    given: str = "int"
    same: bool = False

    def __str__(self) -> str:
        parts = [str(self.packed)]
        parts += ["causal"] if self.is_causal else []
        parts += [f"w{self.window[0]},{self.window[1]}"] if self.window != ALL else []
        parts += [f"cap{self.softcap}"] if self.softcap else []
        parts += [f"drop{self.dropout_p}"] if self.dropout_p else []
        parts += ["dlse"] if self.with_lse else []
        parts += [self.needs or "forward", self.given]
        parts += [f"mem{self.memory}"] if self.memory is not None else []
        return "-".join(parts)

    def call(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None) -> tuple[Tensor, Tensor]:
        """The public function with these options."""
        longest: list[Any] = [self.packed.max_q, self.packed.max_k]
        if self.given == "tensor":
            longest = [torch.tensor(n, dtype=torch.int32, device=q.device) for n in longest]
        elif self.given == "none":
            longest = [None, None]
        return ffpa_attn_varlen_func(
            q, k, v, cu_q, cu_k, *longest, dropout_p=self.dropout_p, causal=self.is_causal,
            enable_gqa=self.packed.enable_gqa, window_size=self.window, softcap=self.softcap, return_lse=True,
            backend=TritonBackend(workspace_mb=self.memory),
        )  # fmt: skip

    def run(self, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0, only: set[int] | None = None) -> None:
        """Forward, and backward where something needs it; every sequence (or ``only`` those) is held to the oracle."""
        packed = self.packed
        q, k, v, grad_out, cu_q, cu_k = make_packed(packed, dtype, device, seed=seed)
        grad_lse = torch.randn(packed.heads_q, q.shape[0], device=device) if self.with_lse else None
        inputs = requiring({"q": q, "k": k, "v": v}, self.needs)
        with drawn(device) as words:
            out, lse = self.call(*inputs.values(), cu_q, None if self.same else cu_k)
        grads = gradients((out, lse), inputs, grad_out, grad_lse)
        kept = None
        if self.dropout_p:
            kept = philox.kept(words, (1, packed.heads_q, q.shape[0], packed.max_k), self.dropout_p)
        oracle.check_varlen(
            q, k, v, cu_q, cu_k, out=out, lse=lse, grads=tuple(grads.get(name) for name in "qkv"), grad_out=grad_out,
            grad_lse=grad_lse, kept=kept, only=only, is_causal=self.is_causal, window=self.window, softcap=self.softcap,
        )  # fmt: skip


def dense_case(
    *, heads: tuple[int, int], lengths: tuple[int, int], batch: int, dim: int, causal: bool, **rest: Any
) -> Case:
    """A case from values of single options."""
    return Case(Shape(batch, *heads, *lengths, dim, causal), **rest)


def dense_allowed(*, lengths: tuple[int, int], causal: bool, **rest: Any) -> bool:
    """A causal call needs a key for every query."""
    return not causal or lengths[0] <= lengths[1]


def varlen_case(
    *, lengths: str, heads: tuple[int, int], dim: int, slack: int, times: int = 1, **rest: Any
) -> VarlenCase:
    """A case from values of single options; without slack, keys of the queries' lengths go without cu_seqlens_k."""
    packed = pack(lengths, *heads, dim, slack=slack, times=times)
    return VarlenCase(packed, same=packed.lens_q == packed.lens_k and slack == 0, **rest)


def varlen_allowed(**rest: Any) -> bool:
    """Every packed call is one."""
    return True


def ring(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, parts: Sequence[tuple[int, int]], first_row: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Forward and backward of causal attention over shards of the keys, merged as ring attention does it.

    ``parts``: where the shards begin and end; queries stand at the positions from ``first_row`` on.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, device=q.device)
    rows = first_row + torch.arange(q.shape[2], device=q.device)
    group = {"enable_gqa": q.shape[1] != k.shape[1], "backend": "triton"}
    masks = [torch.arange(a, b, device=q.device) <= rows[:, None] for a, b in parts]
    for (a, b), mask in zip(parts, masks, strict=True):
        one, its = ffpa_attn_func(q, k[:, :, a:b], v[:, :, a:b], mask, return_lse=True, **group)
        both = torch.logaddexp(lse, its)
        weights = [torch.where(both == -math.inf, 0.0, torch.exp(x - both)).unsqueeze(-1) for x in (lse, its)]
        out, lse = out * weights[0] + one.float() * weights[1], both
    out = out.to(q.dtype)
    dq, dk, dv = torch.zeros(q.shape, device=q.device), torch.zeros_like(k), torch.zeros_like(v)
    for (a, b), mask in zip(parts, masks, strict=True):
        grads = ffpa_attn_backward(do, q, k[:, :, a:b], v[:, :, a:b], out, lse, attn_mask=mask, **group)
        dq += grads[0].float()
        dk[:, :, a:b], dv[:, :, a:b] = grads[1], grads[2]
    return out, lse, (dq.to(q.dtype), dk, dv)
