"""Attention masks by shape and stride only: brought to the four dimensions of the operators, never to N x N memory.

Nothing here reads a mask's values. All of it is plain enough for torch.compile to trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["compact", "joining_copies", "planes", "to_4d", "visible"]


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
