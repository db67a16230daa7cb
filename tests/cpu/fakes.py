"""Backends in plain torch that stand in for the CUDA backend, so that what reaches a backend is tested without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ffpa_jit.problem import Problem, Refusal


class Refusing:
    """A backend that refuses every call with one reason, as the CUDA backend does on a machine without a GPU."""

    name = "cuda"

    def refusals(self, problem: Problem, options: Any, *, direction: str) -> list[Refusal]:
        return [
            Refusal("device", f"the tensors are on a {problem.device_type} device; CUDA's kernels run on NVIDIA GPUs")
        ]

    def estimate(self, problem: Problem) -> float:
        return 1.0


class FakeCUDA:
    """Masks, dropout and options in fp32 torch operations; forward only unless `backward` is set.

    `calls` holds the keyword arguments of every forward, with the strides of the mask.
    """

    name = "cuda"

    def __init__(self, *, backward: bool = False) -> None:
        self.has_backward = backward
        self.calls: list[dict[str, Any]] = []

    def refusals(self, problem: Problem, options: Any, *, direction: str) -> list[Refusal]:
        if direction == "backward" and not self.has_backward:
            return [Refusal("no-backward", "the CUDA backend has a forward only")]
        return []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        arguments = {"attn_mask": None, "dropout_p": 0.0, "rng": None, **arguments}
        mask = arguments["attn_mask"]
        if mask is not None:
            assert mask.shape == (*query.shape[:3], key.shape[2])
        self.calls.append({**arguments, "mask_strides": None if mask is None else mask.stride()})
        with torch.autocast("cpu", enabled=False):  # kernels do not see it
            result, lse = attention(query, key, value, **arguments)
        return torch.empty_like(query).copy_(result), lse

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
        lse: Tensor, *, needs: tuple[bool, bool, bool], **arguments: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        # Below the dispatcher there is no autograd, so by formula; see tests/oracle.py.
        arguments.pop("options")
        weights, keep, k, v, _ = _weights(query, key, value, **arguments)
        do, group = grad_out.float(), query.shape[1] // max(key.shape[1], 1)
        dp = (do @ v.transpose(-2, -1)) * keep
        ds = weights * (dp - (weights * dp).sum(-1, keepdim=True))
        if grad_lse is not None:
            ds = ds + weights * grad_lse.unsqueeze(-1)
        ds = ds * arguments["scale"]
        dk, dv = (x.unflatten(1, (key.shape[1], group)).sum(2) for x in (
            ds.transpose(-2, -1) @ query.float(), (weights * keep).transpose(-2, -1) @ do))  # fmt: skip
        return tuple(
            torch.empty_like(x).copy_(grad) if need else None
            for x, grad, need in zip((query, key, value), (ds @ k, dk, dv), needs, strict=True)
        )

    def estimate(self, problem: Problem) -> float:
        return 1.0


def attention(query: Tensor, key: Tensor, value: Tensor, *, options: Any, **arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp32; what is dropped depends on `rng` alone."""
    weights, keep, _, value, lse = _weights(query, key, value, **arguments)
    return (weights * keep) @ value, lse


def _weights(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool, attn_mask: Tensor | None,
    dropout_p: float, rng: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Probabilities, their factors from dropout, key and value for every query head, log-sum-exp; all fp32."""
    group = query.shape[1] // max(key.shape[1], 1)
    key, value = key.repeat_interleave(group, 1).float(), value.repeat_interleave(group, 1).float()
    scores = scale * (query.float() @ key.transpose(-2, -1))
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1).clamp_min(-1e30))
    keep = torch.ones_like(weights)
    if dropout_p > 0:
        keep = kept(rng, dropout_p, weights.shape) / (1 - dropout_p)
    return weights, keep, key, value, lse


def kept(rng: Tensor, dropout_p: float, shape: tuple[int, ...]) -> Tensor:
    """Which weights two words of random bits leave in place."""
    first, second = rng.tolist()
    generator = torch.Generator().manual_seed((first ^ (second << 1)) % 2**63)
    return torch.rand(shape, generator=generator) >= dropout_p
