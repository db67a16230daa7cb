"""PyTorch's SDPA as it was at import, and the fallback to it that keeps causal masks bottom-right.

`native` is the builtin itself: patching `torch.nn.functional.scaled_dot_product_attention` does not change it, so a
patched name cannot recurse into the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from ffpa_jit import settings
from ffpa_jit.masks import compact
from ffpa_jit.problem import Problem

__all__ = ["backward", "estimate", "fallback", "native"]

_SHIFTABLE = 1e30  # what is beyond is somebody's "minimum", and no bias

native = cast(Callable[..., torch.Tensor], torch._C._nn.scaled_dot_product_attention)


def fallback(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """SDPA with this package's meaning of `is_causal`: row r sees the keys k <= r + Nkv - Nq when head_dim > 256.

    Up to head dim 256 the call is passed on as it is, and so is every call on which the two meanings agree. Otherwise
    the alignment costs at most the workspace cap in extra memory: a boolean mask where that fits, else zero queries in
    front that make the problem square (they cost time, O(Nkv * D) memory, and are cut off again). With no keys at all
    the output is zeros, connected to autograd.

    An fp32 mask with half-precision inputs is brought to theirs, because SDPA's fused kernels take no other.

    Any rank >= 2 that SDPA takes. With more queries than keys the call is passed on (rows without a key have no SDPA
    meaning); `ffpa_attn_func` rejects it before.
    """
    if query.shape[-1] > 256:
        len_q, len_kv = query.shape[-2], key.shape[-2]
        if len_kv == 0:
            return _no_keys(query, key, value, enable_gqa)
        if attn_mask is not None and attn_mask.dtype != query.dtype and attn_mask.dtype == torch.float32:
            attn_mask = _narrowed(compact(attn_mask), query.dtype)
        if is_causal and attn_mask is None and len_q < len_kv:
            if len_q == 1:
                is_causal = False  # the only query is aligned to the last key and sees all of them
            elif _mask_bytes(len_q, len_kv) <= settings.workspace_bytes():
                attn_mask, is_causal = _bottom_right(len_q, len_kv, query.device), False
            else:
                square = torch.nn.functional.pad(query, (0, 0, len_kv - len_q, 0))
                out = native(square, key, value, None, dropout_p, True, scale=scale, enable_gqa=enable_gqa)
                return out[..., len_kv - len_q :, :]
    return native(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _narrowed(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive fp32 mask in `dtype`, so that the probabilities stay what they are to its precision.

    Softmax does not see what is added to a whole row. With the row's largest value taken off, rounding is finest where
    the weight is. Rows that are all "minimum" keep it, clamped to a finite one: their keys stay equal, and none hidden.
    """
    top = mask.detach().amax(-1, keepdim=True) if mask.shape[-1] else mask.detach().sum(-1, keepdim=True)
    shifted = mask - torch.where(top.abs() < _SHIFTABLE, top, 0.0)
    return torch.where(shifted.isneginf(), shifted, shifted.clamp(min=torch.finfo(dtype).min)).to(dtype)


def estimate(problem: Problem) -> float:
    """About how many microseconds SDPA takes for `problem`, backward included where it needs one.

    From an H200 and torch 2.11 (bench/NOTES.md): 20 us of launches, then 130 TFLOP/s forward and 45 backward, in 64-row
    tiles. With grouped heads SDPA repeats K and V or takes its math path, tens of times slower: nothing is small then.
    The figures only decide which of two correct paths is taken, so a factor of two on another GPU does little harm.
    """
    if problem.heads_q != problem.heads_kv:
        return float("inf")
    product = problem.product_mflop(64)
    if problem.needs_grad:
        return 20.0 + 60.0 + product * (2.0 / 130.0 + 5.0 / 45.0)
    return 20.0 + product * (2.0 / 130.0)


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    scale: float,
    is_causal: bool,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the fallback at (query, key, value, attn_mask), by running it again; None for those not in `needs`.

    Differentiable itself where SDPA is: with grad mode on (`create_graph=True`) the result stays connected to the
        inputs.
    """
    connected = torch.is_grad_enabled()
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    with torch.enable_grad():
        # Distinct tensors even if key is value: each must get its own share of the gradient, not the sum.
        inputs = [
            tensor.view_as(tensor) if connected else tensor.detach().requires_grad_(need)
            for tensor, need in zip(given, needs, strict=False)
        ]
        enable_gqa = bool(query.shape[-3] != key.shape[-3])  # bool() also of a symbolic comparison
        query, key, value = inputs[:3]
        mask = inputs[3] if attn_mask is not None else None
        out = fallback(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        wanted = [tensor for tensor, need in zip(inputs, needs, strict=False) if need]
        # Without keys the mask takes no part, and its gradient is as empty as it is.
        grads = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=connected, materialize_grads=True))
    dq, dk, dv, dmask = (next(grads) if need else None for need in needs)
    return dq, dk, dv, dmask


def _no_keys(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
    """Zeros of the output's shape whose gradients are zeros: a product over an empty dimension."""
    if enable_gqa and query.dim() > 2:
        # An expanded empty tensor costs nothing.
        group = query.shape[-3] // max(key.shape[-3], 1)
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    return torch.matmul(torch.matmul(query, key.transpose(-2, -1)), value)


def _mask_bytes(len_q: int, len_kv: int) -> int:
    """What SDPA holds for a boolean mask at its peak: the mask and its additive copy, padded when Nkv is odd-sized."""
    return (3 if len_kv % 16 == 0 else 5) * len_q * len_kv


def _bottom_right(len_q: int, len_kv: int, device: torch.device) -> torch.Tensor:
    """Boolean [Nq, Nkv], True where query r may see key k: k <= r + Nkv - Nq."""
    rows = torch.arange(len_q, device=device).unsqueeze(1) + (len_kv - len_q)
    return torch.arange(len_kv, device=device) <= rows
