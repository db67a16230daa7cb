"""The torch operators for packed sequences: `torch.ops.ffpa_jit.flash_attn_varlen` and `.flash_attn_varlen_backward`.

As those of `ops`: functional, with backends as text, for arguments that `ffpa_attn_varlen_func` has checked. The
tensors are [T, H, D], sequence i in the rows `cu_seqlens[i]` to `cu_seqlens[i + 1]`, whose values no host reads.

`flash_attn_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, rng, max_seqlen_q, max_seqlen_k, scale, is_causal,`
    `dropout_p, window_size_left, window_size_right, softcap, forward_backend, backward_backend) -> (out, lse)`
    cu_seqlens_q, cu_seqlens_k: contiguous int32 [sequences + 1]. max_seqlen_q, max_seqlen_k: no sequence is longer.
    out: memory layout of `torch.empty_like(query)`; 0 in rows of no sequence. lse: fp32, contiguous [Hq, Tq], -inf
    there. Both are differentiable.

`flash_attn_varlen_backward(grad_out, grad_lse, query, key, value, cu_seqlens_q, cu_seqlens_k, rng, out, lse,`
    `max_seqlen_q, max_seqlen_k, scale, is_causal, dropout_p, window_size_left, window_size_right, softcap, needs,`
    `backend) -> (grad_query, grad_key, grad_value)`
    As `flash_attn_backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ffpa_jit import dispatch, op_rules, plan
from ffpa_jit.ops import TAGS, library, register, unwatched
from ffpa_jit.problem import AttentionParams, Problem

__all__ = ["attend", "flash_attn_varlen", "flash_attn_varlen_backward", "gradients"]

library.define(
    "flash_attn_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? rng, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, bool is_causal, float dropout_p, int window_size_left, "
    "int window_size_right, float softcap, str forward_backend, str backward_backend) -> (Tensor, Tensor)",
    tags=TAGS,
)
library.define(
    "flash_attn_varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? rng, Tensor out, Tensor lse, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float scale, bool is_causal, float dropout_p, int window_size_left, int window_size_right, "
    "float softcap, bool[3] needs, str backend) -> (Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def _nothing_to_see(query: torch.Tensor, key: torch.Tensor, cu_seqlens: torch.Tensor) -> bool:
    """Whether no query can have a key, by the shapes alone: no backend is asked then."""
    return query.numel() == 0 or key.numel() == 0 or cu_seqlens.shape[0] < 2


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    rng: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    forward_backend: str,
    backward_backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if _nothing_to_see(query, key, cu_seqlens_q):
        lse = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=torch.float32)
        return torch.zeros_like(query), lse
    window = window_size_left, window_size_right
    params = AttentionParams(scale, is_causal, window, softcap, dropout_p, varlen=True)
    run = plan.of(query, params, forward_backend, backward_backend).forward
    result: tuple[torch.Tensor, torch.Tensor] = run(
        query, key, value, cu_seqlens_q, cu_seqlens_k, rng, max_seqlen_q, max_seqlen_k
    )
    return result


def _forward_fake(query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


def gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    rng: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    needs: Sequence[bool],
    backend: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """What `flash_attn_varlen_backward` computes, with None for what is not needed, for `ops.unwatched` tensors."""
    if _nothing_to_see(query, key, cu_seqlens_q):
        dq, dk, dv = (
            torch.zeros_like(tensor) if need else None for tensor, need in zip((query, key, value), needs, strict=True)
        )
        return dq, dk, dv
    window = window_size_left, window_size_right
    params = AttentionParams(scale, is_causal, window, softcap, dropout_p, varlen=True)
    run = plan.of(query, params, "", backend).backward((needs[0], needs[1], needs[2]))
    dq, dk, dv = run(
        grad_out, grad_lse, query, key, value, cu_seqlens_q, cu_seqlens_k, rng, out, lse, max_seqlen_q, max_seqlen_k
    )
    return dq, dk, dv


def _gradients_fake(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    needs = rest[-2]
    dq, dk, dv = (
        torch.empty_like(tensor) if need else query.new_empty(0)
        for tensor, need in zip((query, key, value), needs, strict=True)
    )
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, rng = inputs[:6]
    # An unused lse (or out) then has the gradient None instead of a tensor of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, rng, *output)
    ctx.options, ctx.backward_backend = inputs[6:14], inputs[15]


def _differentiate(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    needs = tuple(ctx.needs_input_grad[:3])
    constants = (None,) * 13  # from cu_seqlens_q on
    if (grad_out is None and grad_lse is None) or not any(needs):
        return (None, None, None, *constants)
    query, key, value, cu_seqlens_q, cu_seqlens_k, rng, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    backend = ctx.backward_backend or _chosen(query, key, value, ctx.options)
    arguments = (
        grad_out, grad_lse, query, key, value, cu_seqlens_q, cu_seqlens_k, rng, out, lse, *ctx.options, needs, backend
    )  # fmt: skip
    if not torch.is_grad_enabled() and unwatched(*[x for x in arguments[:10] if x is not None]):
        # Without create_graph nothing would see the operator: call what it calls.
        return (*gradients(*arguments), *constants)
    grads = flash_attn_varlen_backward(*arguments)
    return (*[grad if need else None for grad, need in zip(grads, needs, strict=True)], *constants)


def _chosen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: tuple[Any, ...]) -> str:
    """Who computes gradients that nobody was chosen for when the forward was traced."""
    _, _, _, is_causal, dropout_p, left, right, softcap = options
    query, key, value = (x.unsqueeze(0).transpose(1, 2) for x in (query, key, value))
    problem = Problem.from_tensors(query, key, value)
    problem = replace(problem, is_causal=is_causal, dropout_p=dropout_p, window=(left, right), softcap=softcap)
    return dispatch.choose_late_backward(replace(problem, varlen=True, needs_grad=True))


register("flash_attn_varlen", _forward, _forward_fake, gradients, _gradients_fake, _save, _differentiate)

flash_attn_varlen_backward = torch.ops.ffpa_jit.flash_attn_varlen_backward.default


def flash_attn_varlen(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator. Inference mode skips its autograd key, and with it the rules."""
    if not torch.compiler.is_compiling():
        op_rules.prepare()
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.ffpa_jit.flash_attn_varlen.default(*inputs)
    return result


class _Direct(torch.autograd.Function):
    """The operator's forward and its formula without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        return _differentiate(ctx, *grads)


def attend(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_varlen`, by position, for `ops.unwatched` tensors, at a fraction of the operator's host time."""
    if not inputs[-1]:  # no backward backend: no gradient is needed
        return _forward(*inputs)
    result: tuple[torch.Tensor, torch.Tensor] = _Direct.apply(*inputs)
    return result
