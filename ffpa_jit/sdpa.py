"""PyTorch's SDPA as it was at import, and the fallback to it that keeps causal masks bottom-right and has windows.

`native` is the builtin itself: patching `torch.nn.functional.scaled_dot_product_attention` does not change it, so a
patched name cannot recurse into the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from ffpa_jit import masks, op_rules, settings
from ffpa_jit.problem import NO_WINDOW, Call, Problem, Refusal, describe, known, shown

__all__ = ["backward", "fallback", "flash_enabled", "math_only", "native", "refusals", "runs"]

_SHIFTABLE = 1e30  # what is beyond is somebody's "minimum", and no bias

native = cast(Callable[..., torch.Tensor], torch._C._nn.scaled_dot_product_attention)


flash_enabled: Callable[[], bool] = torch._C._get_flash_sdp_enabled
"""Whether `torch.nn.attention.sdpa_kernel` allows SDPA's flash kernels: true outside of any such context."""


def math_only() -> bool:
    """Whether a `torch.nn.attention.sdpa_kernel` context allows SDPA's math path alone.

    That is how a caller asks for derivatives of any order. Of the other contexts none matters above head dim 256, where
    SDPA's kernels are not what runs. Under a compiler, which takes no such derivatives, none is looked for.
    """
    if torch.compiler.is_compiling() or flash_enabled():
        return False
    others = torch._C._get_mem_efficient_sdp_enabled() or torch._C._get_cudnn_sdp_enabled()
    return bool(torch._C._get_math_sdp_enabled()) and not others


def runs(call: Call) -> bool:
    """Whether `fallback` runs a call that the contract allows."""
    described = describe(call)
    return isinstance(described, Problem) and not refusals(described)


def fallback(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] = NO_WINDOW,
) -> torch.Tensor:
    """SDPA with this package's meaning of `is_causal`: row r sees the keys k <= r + Nkv - Nq when head_dim > 256.

    Up to head dim 256 the call is passed on as it is, and so is every call on which the two meanings agree. Otherwise
    the alignment costs at most the workspace cap in extra memory: a boolean mask where that fits, else zero queries in
    front that make the problem square (they cost time, O(Nkv * D) memory, and are cut off again). With no keys at all
    the output is zeros, connected to autograd.

    A window, and `is_causal` together with `attn_mask`, become one mask of queries by keys, however large: `refusals`
    tells before where that exceeds the cap.

    An fp32 mask with half-precision inputs is brought to theirs, because SDPA's fused kernels take no other.

    Any rank >= 2 that SDPA takes. With more queries than keys the call is passed on (rows without a key have no SDPA
    meaning); `ffpa_attn_func` rejects it before.
    """
    if query.shape[-1] > 256:
        len_q, len_kv = query.shape[-2], key.shape[-2]
        if len_kv == 0:
            return _no_keys(query, key, value, enable_gqa)
        if attn_mask is not None and attn_mask.dtype != query.dtype and attn_mask.dtype == torch.float32:
            attn_mask = _narrowed(masks.compact(attn_mask), query.dtype)
        if is_causal and len_q == 1:
            is_causal = False  # the only query is aligned to the last key and sees all of them
        if window != NO_WINDOW or (is_causal and attn_mask is not None and len_q <= len_kv):
            seen = op_rules.replicated(masks.visible(len_q, len_kv, query.device, is_causal, window), query)
            attn_mask, is_causal = seen if attn_mask is None else _both(masks.compact(attn_mask), seen), False
        elif is_causal and attn_mask is None and (not known(len_kv - len_q) or len_q < len_kv):
            # Where a compiler leaves lengths open, a comparison would hold its graph to one answer.
            if not known(len_q, len_kv) or _mask_bytes(len_q, len_kv) <= settings.workspace_bytes():
                seen = masks.visible(len_q, len_kv, query.device, True, NO_WINDOW)
                attn_mask, is_causal = op_rules.replicated(seen, query), False
            else:
                square = torch.nn.functional.pad(query, (0, 0, len_kv - len_q, 0))
                out = native(square, key, value, None, dropout_p, True, scale=scale, enable_gqa=enable_gqa)
                return out[..., len_kv - len_q :, :]
    return native(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _both(mask: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """`mask`, with the keys hidden that `seen` does not have."""
    return mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, float("-inf"))


def refusals(problem: Problem) -> tuple[Refusal, ...]:
    """What of `problem` SDPA has no words for; empty: `fallback` runs it, in either direction."""
    if problem.varlen:
        return (Refusal("varlen", "SDPA takes no packed sequences; unpack them and call it for each"),)
    found = []
    if problem.softcap > 0:
        found.append(Refusal("softcap", f"softcap is {shown(problem.softcap)}, and SDPA caps no scores"))
    windowed = problem.window != NO_WINDOW
    if windowed or (problem.is_causal and problem.has_mask):
        planes = problem.mask_planes if problem.has_mask else 1
        needed, cap = _mask_bytes(problem.len_q, problem.len_kv, planes), settings.workspace_bytes()
        if needed > cap and problem.len_q * problem.len_kv > 0:
            what = "a window" if windowed else "is_causal together with attn_mask"
            found.append(
                Refusal(
                    "combined-mask",
                    f"SDPA takes {what} only as a mask of all queries by all keys, {shown(needed / 2**20, '.4g')} MiB, "
                    f"and the cap is {shown(cap / 2**20, '.4g')} MiB: raise FFPA_JIT_WORKSPACE_MB",
                )
            )
    return tuple(found)


def _narrowed(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive fp32 mask in `dtype`, so that the probabilities stay what they are to its precision.

    Softmax does not see what is added to a whole row. With the row's largest value taken off, rounding is finest where
    the weight is. Rows that are all "minimum" keep it, clamped to a finite one: their keys stay equal, and none hidden.
    """
    top = mask.detach().amax(-1, keepdim=True) if mask.shape[-1] else mask.detach().sum(-1, keepdim=True)
    shifted = mask - torch.where(top.abs() < _SHIFTABLE, top, 0.0)
    return torch.where(shifted.isneginf(), shifted, shifted.clamp(min=torch.finfo(dtype).min)).to(dtype)


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
    window: tuple[int, int] = NO_WINDOW,
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
        out = fallback(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, window=window)
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


def _mask_bytes(len_q: int, len_kv: int, planes: int = 1) -> int:
    """What SDPA holds for a boolean mask at its peak: the mask and its additive copy, padded when Nkv is odd-sized."""
    return (3 if len_kv % 16 == 0 else 5) * planes * len_q * len_kv
