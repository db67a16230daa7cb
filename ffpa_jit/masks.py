"""Attention masks by shape and stride only: brought to the four dimensions of the operators, never to N x N memory.

Nothing here reads a mask's values. All of it is plain enough for torch.compile to trace.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_jit.problem import NO_WINDOW

__all__ = [
    "CausalFlags",
    "causal_bias",
    "compact",
    "is_causal_bias",
    "joining_copies",
    "planes",
    "sdpa_with_bias",
    "to_4d",
    "visible",
]

_BIASES = "torch.nn.attention.bias"


class CausalFlags(NamedTuple):
    """What a causal bias says. Only the first `keys` keys are seen; `is_causal` and `window` as in `visible`, with
    queries aligned to the end of those keys."""

    keys: int
    is_causal: bool
    window: tuple[int, int]


def is_causal_bias(attn_mask: object) -> bool:
    """Whether `attn_mask` is a `torch.nn.attention.bias.CausalBias`.

    The module is not imported for that: it brings the compiler along, and whoever has a bias has imported it.
    """
    module = sys.modules.get(_BIASES)
    return module is not None and isinstance(attn_mask, module.CausalBias)


def causal_bias(
    attn_mask: Any,
    len_q: int,
    len_kv: int,
    *,
    is_causal: bool = False,
    window: tuple[int, int] = NO_WINDOW,
    any_lengths: bool = False,
) -> CausalFlags:
    """The flags that mean what `causal_upper_left(n, m)` or `causal_lower_right(n, m)` means for a call of these
    lengths.

    The tensor of a bias is never initialised, so nothing else may be read from it. ValueError where n or m is not the
    call's own (`any_lengths` goes by the call's, as SDPA does, which looks at neither), and where `is_causal` or
    `window` says what the bias says.
    """
    if is_causal or window != NO_WINDOW:
        raise ValueError(
            "attn_mask is a causal bias, which says what a query sees; drop it, or is_causal and window_size"
        )
    n, m = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if not any_lengths and (n != len_q or m != len_kv):
        raise ValueError(
            f"attn_mask is a causal bias for {n} queries and {m} keys, and the call has {len_q} and {len_kv}; make one "
            "for its lengths, or pass is_causal=True"
        )
    upper_left = attn_mask.variant.name == "UPPER_LEFT" or n == m
    if upper_left and len_q <= len_kv:
        return CausalFlags(len_q, True, NO_WINDOW)  # no query sees a key beyond
    if upper_left:
        return CausalFlags(len_kv, False, (-1, len_q - len_kv))
    if len_q <= len_kv:
        return CausalFlags(len_kv, True, NO_WINDOW)
    return CausalFlags(len_kv, False, (-1, 0))  # the first queries see no key


def sdpa_with_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """SDPA with a causal bias, where SDPA is to run it: `torch.nn.functional.scaled_dot_product_attention` without a
    patch, and the same with one.

    A bias looks only for calls of the function that has that name at the moment, and reads itself, uninitialised, in
    any other, the saved SDPA included. What it calls then has a plain mask or none, so that a patch cannot recurse.
    """
    sdpa = F.scaled_dot_product_attention
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    kind = type(attn_mask)
    return cast(Tensor, kind.__torch_function__(sdpa, (kind,), (query, key, value, attn_mask), options))


def compact(mask: Tensor) -> Tensor:
    """`mask` without the copies it only pretends to hold: dims of stride 0 become size 1, so that a cast stays small.

    A mask that is differentiated is returned as it is: each of its elements is owed its own gradient.
    """
    if mask.requires_grad and torch.is_grad_enabled():
        return mask
    for axis in range(mask.dim()):
        if mask.stride(axis) == 0 and mask.shape[axis] > 1:
            mask = mask.narrow(axis, 0, 1)
    return mask


def to_4d(mask: Tensor, lead: Sequence[int], batch: int) -> Tensor:
    """`mask` as [B, Hq, Nq, Nkv] with size 1 where it broadcasts. `lead`: the batch dims of the call, `batch` in all.

    A view, unless batch dims have to be joined that memory does not join; see `joining_copies`.
    """
    mask = compact(mask)
    while mask.dim() < max(len(lead) + 3, 4):
        mask = mask.unsqueeze(0)
    if len(lead) < 2:
        return mask
    rest = mask.shape[-3:]
    if _broadcasts(mask.shape[:-3]):
        return mask.reshape(1, *rest)
    return mask.expand(*lead, *rest).reshape(batch, *rest)


def planes(mask: Tensor) -> int:
    """Over how many batches and heads `mask` (as `compact` leaves it) holds masks of its own."""
    count = 1
    for size in mask.shape[:-2]:
        count = count * size
    return count


def visible(len_q: int, len_kv: int, device: torch.device, is_causal: bool, window: tuple[int, int]) -> Tensor:
    """Boolean [Nq, Nkv], True where query r, which stands at the key p = r + Nkv - Nq, may see a key.

    It sees the keys from p - `window[0]` to p + `window[1]` (-1: no limit), and none after p if `is_causal`.
    """
    place = torch.arange(len_q, device=device).unsqueeze(1) + (len_kv - len_q)
    keys = torch.arange(len_kv, device=device)
    left, right = window[0], 0 if is_causal else window[1]
    if left < 0:
        return keys <= place + right
    seen = keys >= place - left
    return seen if right < 0 else seen & (keys <= place + right)


def joining_copies(mask: Tensor, lead: Sequence[int]) -> bool:
    """Whether `to_4d` would copy a mask of both queries and keys, O(N^2) memory, to join several batch dims."""
    mask = compact(mask)
    if len(lead) < 2 or _broadcasts(mask.shape[:-3]) or mask.shape[-2] == 1 or mask.shape[-1] == 1:
        return False
    own = mask.dim() - 3
    inner = None  # the step of memory that the next dim outwards must take to go on where this one ends
    for axis in range(-1, -1 - len(lead), -1):
        if lead[axis] == 1:
            continue
        stride = mask.stride(axis - 3) if -axis <= own and mask.shape[axis - 3] != 1 else 0
        if inner is not None and stride != inner:
            return True
        inner = stride * lead[axis]
    return False


def _broadcasts(shape: Sequence[int]) -> bool:
    return all(size == 1 for size in shape)
