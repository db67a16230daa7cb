"""Backends in plain torch that stand in for the real ones, so that what reaches a backend is tested without one."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ffpa_jit.problem import AttentionParams, Problem, Refusal


class Refusing:
    """A backend that refuses every call with one reason, as the CUDA backend does on a machine without a GPU."""

    name = "cuda"

    def refusals(self, problem: Problem, options: Any, *, direction: str) -> list[Refusal]:
        return [
            Refusal("device", f"the tensors are on a {problem.device_type} device; CUDA's kernels run on NVIDIA GPUs")
        ]

    def predict_us(self, problem: Problem) -> float:
        return 1.0


class FakeCUDA:
    """Masks and dropout in fp32 torch operations; forward only unless `backward` is set.

    `calls` and `backward_calls` hold the keyword arguments of every call, with the strides of the mask.
    """

    name = "cuda"
    takes_everything = False

    def __init__(self, *, backward: bool = False) -> None:
        self.has_backward = backward
        self.calls: list[dict[str, Any]] = []
        self.backward_calls: list[dict[str, Any]] = []

    def refusals(self, problem: Problem, options: Any, *, direction: str) -> list[Refusal]:
        if direction == "backward" and not self.has_backward:
            return [Refusal("no-backward", "the CUDA backend has a forward only")]
        asked = {"varlen": problem.varlen, "window": problem.window != (-1, -1), "softcap": problem.softcap > 0}
        return [Refusal(code, f"it has no {code}") for code in asked if asked[code] and not self.takes_everything]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        mask = arguments["attn_mask"]
        if mask is not None:
            assert all(n in (1, whole) for n, whole in zip(mask.shape, (*query.shape[:3], key.shape[2]), strict=True))
        self.calls.append({**arguments, "mask_strides": None if mask is None else mask.stride()})
        with torch.autocast("cpu", enabled=False):  # kernels do not see it
            result, lse = attention(query, key, value, **arguments)
        return torch.empty_like(query).copy_(result), lse.contiguous()

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
        lse: Tensor, *, needs: tuple[bool, ...], **arguments: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        # Below the dispatcher there is no autograd, so by formula; see tests/oracle.py.
        assert len(needs) == 4
        self.backward_calls.append({**arguments, "needs": needs})
        arguments.pop("options")
        scores, slope, keep, k, v = _scores(query, key, value, **arguments)
        # Of the output and the log-sum-exp that are given, not of those of this call alone.
        weights = torch.where(lse.unsqueeze(-1).isneginf(), 0.0, torch.exp(scores - lse.unsqueeze(-1)))
        do, group = grad_out.float(), query.shape[1] // max(key.shape[1], 1)
        delta = (do * out.float()).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse.unsqueeze(-1)
        dmask = weights * ((do @ v.transpose(-2, -1)) * keep - delta)
        ds = dmask * slope * arguments["scale"]
        dk, dv = (x.unflatten(1, (key.shape[1], group)).sum(2) for x in (
            ds.transpose(-2, -1) @ query.float(), (weights * keep).transpose(-2, -1) @ do))  # fmt: skip
        mask = arguments["attn_mask"]
        tensors = (query, key, value, mask)
        grads = (ds @ k, dk, dv, None if mask is None else dmask.sum_to_size(mask.shape))
        return tuple(
            torch.empty_like(x).copy_(grad) if need else None
            for x, grad, need in zip(tensors, grads, needs, strict=True)
        )

    def varlen_forward(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
        max_seqlen_q: int, max_seqlen_k: int, **arguments: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.calls.append({**arguments, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k})
        assert cu_seqlens_q.is_contiguous()
        assert cu_seqlens_k.is_contiguous()
        out = torch.zeros_like(query)
        lse = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=torch.float32)
        for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
            with torch.autocast("cpu", enabled=False):
                part, lse_part = attention(*_batched(query[rows], key[keys], value[keys]), attn_mask=None, **arguments)
            out[rows], lse[:, rows] = part[0].transpose(0, 1).to(out.dtype), lse_part[0]
        return out, lse

    def varlen_backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
        lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, max_seqlen_q: int, max_seqlen_k: int,
        needs: tuple[bool, ...], **arguments: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        assert len(needs) == 3
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
            do, q, k, v, o = _batched(grad_out[rows], query[rows], key[keys], value[keys], out[rows])
            parts = self.backward(
                do, None if grad_lse is None else grad_lse[None, :, rows], q, k, v, o, lse[None, :, rows],
                needs=(True, True, True, False), attn_mask=None, **arguments,
            )  # fmt: skip
            for grad, part, where in zip(grads, parts, (rows, keys, keys), strict=False):
                grad[where] = part[0].transpose(0, 1)
        return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))

    def predict_us(self, problem: Problem) -> float:
        return 1.0

    def plan_forward(self, params: AttentionParams, options: Any, wants_lse: bool) -> Any:
        """`forward` and `varlen_forward`, with the options of a plan as keywords."""
        keywords = _keywords(params, options)

        def forward(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, rng: Any = None) -> Any:
            return self.forward(query, key, value, attn_mask=attn_mask, rng=rng, **keywords)

        def varlen_forward(
            query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, rng: Any, max_q: int, max_k: int
        ) -> Any:
            return self.varlen_forward(
                query, key, value, cu_q, cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, rng=rng, **keywords
            )

        return varlen_forward if params.varlen else forward

    def plan_backward(self, params: AttentionParams, options: Any, needs: tuple[bool, ...]) -> Any:
        keywords = _keywords(params, options)

        def backward(
            grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, rng: Any,
            out: Tensor, lse: Tensor,
        ) -> Any:  # fmt: skip
            return self.backward(
                grad_out, grad_lse, query, key, value, out, lse, needs=needs, attn_mask=attn_mask, rng=rng, **keywords
            )

        def varlen_backward(
            grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor,
            rng: Any, out: Tensor, lse: Tensor, max_q: int, max_k: int,
        ) -> Any:  # fmt: skip
            return self.varlen_backward(
                grad_out, grad_lse, query, key, value, out, lse, cu_q, cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
                needs=needs, rng=rng, **keywords,
            )  # fmt: skip

        return varlen_backward if params.varlen else backward


def _keywords(params: AttentionParams, options: Any) -> dict[str, Any]:
    keywords = params._asdict()
    del keywords["varlen"]
    return {**keywords, "options": options}


class FakeTriton(FakeCUDA):
    """Everything, in both directions: stands in for the Triton backend."""

    name = "triton"
    takes_everything = True

    def __init__(self) -> None:
        super().__init__(backward=True)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    starts = [cu_seqlens_q.tolist(), cu_seqlens_k.tolist()]
    parts = [[slice(a, b) for a, b in itertools.pairwise(x)] for x in starts]
    return list(zip(*parts, strict=True))


def _batched(*packed: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).unsqueeze(0) for x in packed]


def attention(query: Tensor, key: Tensor, value: Tensor, *, options: Any, **arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp32; what is dropped depends on `rng` alone."""
    scores, _, keep, _, value = _scores(query, key, value, **arguments)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.sum(-1) - float("inf")
    weights = torch.exp(scores - lse.unsqueeze(-1).clamp_min(-1e30))
    return (weights * keep) @ value, lse


def _scores(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool, attn_mask: Tensor | None,
    dropout_p: float, rng: Tensor | None, window: tuple[int, int], softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Masked scores, the slope that the softcap has there, the factors of dropout, key and value for every query head;
    all fp32."""
    group = query.shape[1] // max(key.shape[1], 1)
    key, value = key.repeat_interleave(group, 1).float(), value.repeat_interleave(group, 1).float()
    scores = scale * (query.float() @ key.transpose(-2, -1))
    slope = torch.ones_like(scores)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
        slope = 1 - (scores / softcap).square()
    position = torch.arange(scores.shape[-2])[:, None] + scores.shape[-1] - scores.shape[-2]
    distance = torch.arange(scores.shape[-1]) - position
    left, right = window[0], 0 if is_causal else window[1]
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    scores = scores.masked_fill(~seen, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    keep = torch.ones_like(scores)
    if dropout_p > 0:
        keep = kept(rng, dropout_p, scores.shape) / (1 - dropout_p)
    return scores, slope, keep, key, value


def kept(rng: Tensor, dropout_p: float, shape: tuple[int, ...]) -> Tensor:
    """Which weights two words of random bits leave in place."""
    first, second = rng.tolist()
    generator = torch.Generator().manual_seed((first ^ (second << 1)) % 2**63)
    return torch.rand(shape, generator=generator) >= dropout_p
