"""The dropout stream as `ffpa_jit/cuda_src/dropout.cuh` documents it, written a second time: what the elements are
multiplied with."""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF
LEVELS = 65536


def _words(counter: list[torch.Tensor], key0: int, key1: int) -> list[torch.Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words."""

    def multiply(factor: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # factor * x has 64 bits; in halves of x no product exceeds 48.
        low, high = factor * (x & 0xFFFF), factor * (x >> 16)
        total = low + ((high & 0xFFFF) << 16)
        return (high >> 16) + (total >> 32), total & _LOW

    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = multiply(0xD2511F53, c0)
        high1, low1 = multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return [c0, c1, c2, c3]


def kept(
    rng: torch.Tensor, shape: tuple[int, int, int, int], dropout_p: float, *, first_row: int = 0, first_line: int = 0
) -> torch.Tensor:
    """[B, H, Nq, Nkv] in float64: 0 where an element is dropped, else one over the probability to stay.

    `rng`: the call's two int64 words, (seed, offset). `first_row`, `first_line`: where the result begins, in query rows
    and in heads counted over the batch. A packed batch of sequences is (1, H, Tq, longest keys).
    """
    batch, heads, len_q, len_kv = shape
    seed, offset = (int(word) % 2**64 for word in rng)
    device = rng.device
    key = torch.arange(len_kv, device=device)
    counter = [
        ((key >> 5) * 4 + ((key >> 1) & 3)).expand(batch * heads, len_q, len_kv),
        (first_row + torch.arange(len_q, device=device))[:, None].expand(batch * heads, len_q, len_kv),
        (first_line + torch.arange(batch * heads, device=device))[:, None, None].expand(batch * heads, len_q, len_kv),
        torch.full((batch * heads, len_q, len_kv), offset & _LOW, device=device),
    ]
    words = _words(counter, seed & _LOW, (seed >> 32) ^ (offset >> 32))
    word = torch.zeros_like(words[0])
    for index, candidate in enumerate(words):
        word = torch.where((key >> 3) & 3 == index, candidate, word)
    bits = torch.where(key % 2 == 0, word & 0xFFFF, word >> 16)
    threshold = round(dropout_p * LEVELS)
    stays = LEVELS / (LEVELS - threshold)
    return torch.where(bits < threshold, 0.0, stays).double().view(shape)
