"""The backward alone, for those who combine attention over shards of the keys themselves.

Ring attention and context parallelism run the forward on each shard, merge the outputs by their log-sum-exps, and then
need each shard's gradients for the merged result. Softmax's backward is local in the keys: with p = exp(s - lse) of the
merged lse and the row sums of grad_out * out of the merged out, what a shard computes are its own terms of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ffpa_jit import arguments, dispatch, masks, ops, ops_varlen, varlen
from ffpa_jit.attention import BackendChoice, Window
from ffpa_jit.backends import side
from ffpa_jit.problem import NO_WINDOW, Rejection, describe, dtype_rejection
from ffpa_jit.request import Request

__all__ = ["ffpa_attn_backward", "ffpa_attn_varlen_backward"]

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def ffpa_attn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_lse: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0,  # an int: torch.compile(dynamic=True) makes a symbol of a float and traces twice
    backend: BackendChoice = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> Gradients:
    """The gradients of query, key and value for an output and a log-sum-exp that may be merged over shards of the keys.

    With the (out, lse) of `ffpa_attn_func(..., return_lse=True)` they are what autograd computes.

    Args:
        grad_out, out: [B, Hq, Nq, D] in the query's dtype; the merged output and its gradient.
        query: [B, Hq, Nq, D] with D from 257 to 1024, fp16 or bf16.
        key, value: [B, Hkv, Nkv, D]: this shard's. Nkv may be 0.
        lse: [B, Hq, Nq], fp32, natural logarithm: the merged one. Rows where it is -inf have no gradient.
        grad_lse: the gradient of lse, if it was used; like lse.
        attn_mask, is_causal, scale, enable_gqa, window_size, softcap: as in `ffpa_attn_func`, for this shard alone.
            The mask gets no gradient.
        backend: a name or a Backend object; None lets the dispatcher choose.
        needs: which of the three are wanted.

    Returns:
        (grad_query, grad_key, grad_value), laid out as `torch.empty_like` of each; None for one that is not needed.
        They have no derivative themselves.

    Raises:
        TypeError, ValueError: as `ffpa_attn_func`, and for a grad_out, out, lse or grad_lse of another shape, dtype or
            device.
        NotImplementedError: no backend computes these gradients (SDPA takes no log-sum-exp); the message lists every
            reason.
    """
    arguments.check_kinds(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    _check_foreign(query, key, value, attn_mask, grad_out, out, lse, grad_lse)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; pass [batch, heads, length, head_dim]")
    if query.shape[0] != key.shape[0] or query.shape[0] != value.shape[0]:
        sizes = query.shape[0], key.shape[0], value.shape[0]
        raise ValueError(f"query, key and value have the batch sizes {sizes}; they must be equal")
    window, cap = arguments.window(window_size), arguments.softcap(softcap)
    mask = None if attn_mask is None else masks.compact(attn_mask.detach())
    is_causal = bool(is_causal)
    window = (window[0], -1) if is_causal else window
    request = Request(
        query, key, value, mask, mask, 0.0, is_causal, scale, bool(enable_gqa), True, window, cap, None, None
    )
    call = request.call()._replace(needs_grad=True)
    described = describe(call)
    if not isinstance(described, Rejection):
        described = dtype_rejection(described.dtype, described.head_dim) or described
    if isinstance(described, Rejection):
        raise described.kind(described.message)
    _check_results(query, query.shape[:3], grad_out=grad_out, out=out, lse=lse, grad_lse=grad_lse)
    chosen = _of_more_keys(dispatch.choose_backward(described, side("backend", "backward", backend)))
    factor = arguments.factor("scale", scale, described.head_dim)
    if mask is not None:
        mask = masks.to_4d(mask, query.shape[:1], query.shape[0])
    inputs = (
        grad_out, grad_lse, query, key, value, mask, None, out, lse, factor, described.is_causal, 0.0,
        *described.window, cap, [*_needs(needs), False], chosen,
    )  # fmt: skip
    plain = not torch.is_grad_enabled() and ops.unwatched(grad_out, query, key, value)
    return _wanted(ops.gradients(*inputs) if plain else ops.flash_attn_backward(*inputs), needs)


def ffpa_attn_varlen_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    grad_lse: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    enable_gqa: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0,
    backend: BackendChoice = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> Gradients:
    """`ffpa_attn_backward` for packed sequences: the gradients of q, k and v for an output that may be merged.

    Args:
        grad_out, out: [Tq, Hq, D] in the dtype of q; the merged output and its gradient.
        lse: [Hq, Tq], fp32: the merged log-sum-exp. Rows where it is -inf have no gradient. grad_lse: like it.
        The others: as in `ffpa_attn_varlen_func` and `ffpa_attn_backward`.

    Returns:
        (grad_q, grad_k, grad_v), laid out as `torch.empty_like` of each; None for one that is not needed.

    Raises:
        As `ffpa_attn_varlen_func`, and TypeError or ValueError for a grad_out, out, lse or grad_lse of another shape,
        dtype or device.
    """
    arguments.check_tensors(q=q, k=k, v=v)
    _check_foreign(grad_out, out, lse, grad_lse)
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    problem = varlen.check((q, k, v), cu_seqlens_q, cu_k, causal, enable_gqa, window_size, softcap, needs_grad=True)
    _check_results(q, (q.shape[1], q.shape[0]), grad_out=grad_out, out=out, lse=lse, grad_lse=grad_lse)
    chosen = _of_more_keys(dispatch.choose_backward(problem, side("backend", "backward", backend)))
    max_q, max_k = varlen.bounds(q, k, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    factor = arguments.factor("softmax_scale", softmax_scale, problem.head_dim)
    inputs = (
        grad_out, grad_lse, q, k, v, cu_seqlens_q.contiguous(), cu_k.contiguous(), None, out, lse, max_q, max_k, factor,
        problem.is_causal, 0.0, *problem.window, problem.softcap, [*_needs(needs)], chosen,
    )  # fmt: skip
    plain = not torch.is_grad_enabled() and ops.unwatched(grad_out, q, k, v, cu_seqlens_q, cu_k)
    return _wanted(ops_varlen.gradients(*inputs) if plain else ops_varlen.flash_attn_varlen_backward(*inputs), needs)


def _of_more_keys(backend: str) -> str:
    """A backend, as text, that is told that (out, lse) may come from more keys than the call has."""
    return f"{backend};merged=True" if backend.split(";")[0] == "triton" else backend


def _check_foreign(*tensors: Any) -> None:
    foreign = arguments.foreign(*[tensor for tensor in tensors if isinstance(tensor, Tensor)])
    if foreign is not None:
        raise NotImplementedError(f"the backward takes plain tensors only: {foreign.reason}")


def _check_results(query: Tensor, rows: Any, **tensors: Tensor | None) -> None:
    """TypeError or ValueError for what does not belong to `query`; `rows`: the shape of the log-sum-exp."""
    for name, tensor in tensors.items():
        if tensor is None and name == "grad_lse":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        per_row = name in ("lse", "grad_lse")
        shape, dtype = (rows, torch.float32) if per_row else (query.shape, query.dtype)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {dtype}: cast it")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} and the queries on {query.device}; move it there")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; for these queries it must be {list(shape)}")


def _needs(needs: Any) -> tuple[bool, bool, bool]:
    try:
        query, key, value = needs
    except (TypeError, ValueError):
        raise ValueError(f"needs must be three bools, one each for query, key and value, not {needs!r}") from None
    return bool(query), bool(key), bool(value)


def _wanted(grads: Any, needs: Any) -> Gradients:
    dq, dk, dv = (grad if need else None for grad, need in zip(grads, needs, strict=False))
    return dq, dk, dv
