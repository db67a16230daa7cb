"""The options of a call that stand between ``q.k`` and a probability, as the host has them; see ``epilogue``."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ffpa_jit.triton.params import ScoreMods

__all__ = ["LEVELS", "UNLIMITED", "Terms", "encode_unspecialized"]

LOG2E = math.log2(math.e)

UNLIMITED = 1 << 30
"""A window limit that no index reaches."""

LEVELS = 65536
"""Dropout compares 16 random bits: probabilities are multiples of 1 / LEVELS."""

# The bits of ``epilogue``, which cannot be imported without Triton.
_BOOL, _ADD, _ROWS, _UNIT, _ALIGNED, _SOFTCAP, _DROPOUT, _FIRST = 1, 2, 4, 8, 16, 32, 64, 128

_SMALLEST_SCALE = 1e-6  # below, a mask in units of unscaled scores may overflow


def encode_unspecialized(n: int) -> int:
    """An integer as kernels take it inside a tuple, see ``epilogue.plain``: odd and at least 3.

    Triton compiles a kernel for an argument that is 1, or a multiple of 16, and in tuples it cannot be told not to.
    """
    return 2 * n + 3


@dataclass(frozen=True, eq=False)
class Terms:
    """Scale, ranges, softcap, mask and dropout of one call.

    ``window``: how many keys a row sees to the left and to the right of its own position, -1 for all.
    ``attn_mask``: [B, Hq, Nq, Nkv] with size 1 or stride 0 where it broadcasts; bool, or added to the scores.
    ``rng``: two int64 words on the device, given when ``dropout_p`` > 0.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    rng: torch.Tensor | None = None

    @property
    def scale_log2(self) -> float:
        return self.scale * LOG2E

    @property
    def left(self) -> int:
        """Keys before its own that a row sees."""
        return UNLIMITED if self.window[0] < 0 else min(self.window[0], UNLIMITED)

    @property
    def right(self) -> int:
        """Keys after its own that a row sees; none under a causal mask."""
        if self.is_causal:
            return 0
        return UNLIMITED if self.window[1] < 0 else min(self.window[1], UNLIMITED)

    @property
    def banded(self) -> bool:
        """Whether the visible range is anything but all keys or a causal mask."""
        return self.left < UNLIMITED or 0 < self.right < UNLIMITED or (self.right == 0 and not self.is_causal)

    @property
    def masked_late(self) -> bool:
        """Whether a mask has to wait for the product of query and key; see ``epilogue.mask_start``."""
        return self.attn_mask is not None and (self.softcap > 0 or self.scale < _SMALLEST_SCALE)

    @property
    def kind(self) -> str:
        """Which configuration of the score kernels fits, see ``configs.score_tiling``."""
        if self.softcap > 0 or self.masked_late:
            return "heavy"
        return "masked" if self.attn_mask is not None else ""

    @property
    def threshold(self) -> int:
        """Of LEVELS, how many random values drop an element."""
        return round(self.dropout_p * LEVELS)

    @property
    def keep_scale(self) -> float:
        """What dropout multiplies the kept probabilities with; 1 without dropout."""
        return LEVELS / (LEVELS - self.threshold) if self.threshold < LEVELS else 0.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The options that kernels are compiled for, in words."""
        names = []
        if self.attn_mask is not None:
            names.append("boolean mask" if self.attn_mask.dtype == torch.bool else "additive mask")
        if self.softcap > 0:
            names.append("softcap")
        if self.dropout_p > 0:
            names.append("dropout")
        return tuple(names)

    @functools.cached_property
    def mask_strides(self) -> tuple[int, int, int, int]:
        """Strides of the mask in elements, 0 where it broadcasts."""
        mask = self.attn_mask
        if mask is None:
            return 0, 0, 0, 0
        b, h, q, k = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
        return b, h, q, k

    @functools.cached_property
    def modifiers(self) -> tuple[ScoreMods, int]:
        """(mods, MOD_FLAGS) of ``epilogue``."""
        bits, unit = 0, 1
        strides = self.mask_strides
        mask = self.attn_mask
        if mask is not None:
            lanes = 16 if mask.dtype == torch.bool else 8
            bits |= _BOOL if mask.dtype == torch.bool else _ADD
            bits |= _ROWS if strides[2] else 0
            if strides[3] == 1:
                bits |= _UNIT
                if mask.data_ptr() % 16 == 0 and all(stride % lanes == 0 for stride in strides[:3]):
                    bits |= _ALIGNED
                    unit = lanes
            bits |= 0 if self.masked_late else _FIRST
        bits |= _SOFTCAP if self.softcap > 0 else 0
        bits |= _DROPOUT if self.dropout_p > 0 else 0
        b, h, q, k = map(encode_unspecialized, (strides[0] // unit, strides[1] // unit, strides[2] // unit, strides[3]))
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        mods = ScoreMods(
            mask, b, h, q, k, self.softcap * LOG2E, self.rng if self.dropout_p > 0 else None,
            encode_unspecialized(self.threshold), 1.0 / self.scale if self.scale else 0.0,
        )  # fmt: skip
        return mods, bits
