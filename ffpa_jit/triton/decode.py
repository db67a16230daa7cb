"""Attention of few query rows over many keys: parts of the keys in parallel, one combine. See ``decode_kernels``."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch

from ffpa_jit.triton import decode_kernels
from ffpa_jit.triton.configs import DecodeTiling, decode_tiling, uses_tma
from ffpa_jit.triton.launch import Launcher, bind, mark, operand, processors, triton_is_between
from ffpa_jit.triton.terms import UNLIMITED, Terms, opaque

LEAST_KEYS = 256
"""A program takes at least so many keys, or its start and its share of the combine cost more than it reads."""

KEYS_OF_MANY = 768
"""More programs than run at a time, for an even end, only if each keeps so many keys."""

MOST_WAVES = 4

GLUON = (3, 5), (3, 9)
"""The first and the last version of Triton that ``decode_hopper`` compiles with."""

_MASK, _ROWS, _ALIGNED = 3, 4, 16  # bits of ``epilogue``, as in ``terms``


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms, *, arch: str, cap: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output [B, Hq, Nq, D] in the query's layout, and LSE [B, Hq, Nq] (float32, natural logarithm).

    ``cap``: bytes of workspace; with 0 the keys are not split.
    """
    rows = query.shape[2] * (query.shape[1] // max(key.shape[1], 1))
    tiling = decode_tiling(arch, rows, query.shape[3], not modifiers(terms)[1] and _has_gluon())
    return run(query, key, value, terms, arch=arch, cap=cap, tiling=tiling)


def run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms, *, arch: str, cap: int,
    tiling: DecodeTiling, splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``forward`` with a configuration, and a number of parts of the keys, of the caller's choice."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if key.shape[2] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    target = operand(out)  # an output whose last stride is not 1 is computed densely and copied
    _launch(operand(query), operand(key), operand(value), target, lse, terms, arch, cap, tiling, splits)
    if target is not out:
        out.copy_(target)
    return out, lse


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, terms: Terms,
    arch: str, cap: int, t: DecodeTiling, splits: int | None,
) -> None:  # fmt: skip
    mods, bits = modifiers(terms)
    calls = _calls_like(
        arch, q.device, processors(q.device), q.dtype, q.shape, k.shape,
        (q.stride(), k.stride(), v.stride(), out.stride()), (terms.left, terms.right), bits,
        mark(mods) if bits else None, cap, t, splits,
    )  # fmt: skip
    calls.launch(q, k, v, out, lse, mods, terms)


class _Calls:
    """Calls that differ in their tensors only: how they are cut, and the kernels once they are known.

    The eager calls of a decoding loop take longer on the host than on the device, so what they share is kept. Dtype,
    strides and kinds (``mark`` of the options) only tell calls apart that have kernels of their own.
    """

    def __init__(
        self, arch: str, device: torch.device, device_processors: int, dtype: torch.dtype, shape: torch.Size,
        shape_kv: torch.Size, strides: tuple[tuple[int, ...], ...], ranges: tuple[int, int],
        bits: int, kinds: Any, cap: int, t: DecodeTiling, splits: int | None,
    ) -> None:  # fmt: skip
        batch, heads_q, len_q, head_dim = shape
        heads_kv, len_kv = shape_kv[1:3]
        group, units = heads_q // heads_kv, batch * heads_kv
        n_rows = len_q * group
        row_tiles = -(-n_rows // t.rows)
        row_bytes = 4 * units * n_rows * (head_dim + 2)
        if splits is None:
            at_once = device_processors * t.per_processor
            seen = visible(ranges, len_q, len_kv)
            splits = min(count_splits(units * row_tiles, seen, at_once), max(cap // row_bytes, 1))
        self.tiling, self.head_dim, self.splits = t, head_dim, splits
        self.counts = len_q, len_kv, heads_kv, group, row_tiles, splits, *ranges
        self.programs = units * row_tiles * splits
        self.rows = splits * units * n_rows if splits > 1 else 0  # of partial sums
        self.widths, self.tma = cover(head_dim), uses_tma(arch)
        self.constants = {"D": head_dim, "W1": self.widths[1], "SPLIT": splits > 1, "num_warps": t.warps}
        if not t.hopper:
            self.constants |= {
                "W0": self.widths[0], "ROWS": t.rows, "BLOCK_N": t.block_n, "FOLD": t.fold, "PRECISE": t.precise,
                "MODS": bits, "TMA": self.tma, "num_stages": t.stages, **register_limit(t, arch, bits),
            }  # fmt: skip
        width = 1024 if arch == "interpreter" else 128  # interpreted, a program costs the same whatever its size
        self.combining = {"D": head_dim, "BLOCK_D": width, "CHUNK": 16, "num_warps": 4}
        self.combine_programs = units * n_rows * -(-head_dim // width)
        self.launcher = Launcher(device)

    def launch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        mods: tuple[Any, ...], terms: Terms,
    ) -> None:  # fmt: skip
        sums = q.new_empty(self.rows * (self.head_dim + 2), dtype=torch.float32)
        partial, reference, total = sums.split_with_sizes((self.rows * self.head_dim, self.rows, self.rows))
        t, widths = self.tiling, self.widths
        query, result = (bind(x, t.rows, self.head_dim, False) for x in (q, out))
        results = result, partial, reference, total, lse
        factors = terms.scale_log2, terms.keep_scale
        if t.hopper:
            from ffpa_jit.triton import decode_hopper

            self.launcher(
                decode_hopper.attend, self.programs, query,
                *(decode_hopper.describe(x, cols) for x in (k, v) for cols in widths), *results, *factors,
                *self.counts, **self.constants,
            )  # fmt: skip
        else:
            self.launcher(
                decode_kernels.attend, self.programs, query,
                *(bind(x, t.block_n, cols, self.tma) for x in (k, v) for cols in widths), *results, mods, *factors,
                *self.counts, **self.constants,
            )  # fmt: skip
        if self.splits > 1:
            len_q, _, heads_kv, group = self.counts[:4]
            self.launcher(
                decode_kernels.combine, self.combine_programs, *results, terms.keep_scale, len_q, heads_kv, group,
                self.splits, **self.combining,
            )  # fmt: skip


_calls_like = lru_cache(maxsize=1024)(_Calls)


def register_limit(t: DecodeTiling, arch: str, bits: int) -> dict[str, int]:
    """How many registers a thread may take for ``per_processor`` programs to fit, where there are no options.

    Told nothing, ptxas spills a few to fit a program more than shared memory has room for.
    """
    if not arch.startswith("sm_"):
        return {}
    programs = 1 if bits else t.per_processor
    return {"maxnreg": min(65536 // (programs * 32 * t.warps) // 8 * 8, 255)}


@cache
def _has_gluon() -> bool:
    """Whether this Triton has the language of ``decode_hopper`` as that is written: a young one, still in motion."""
    return triton_is_between(*GLUON)


def visible(ranges: tuple[int, int], len_q: int, len_kv: int) -> int:
    """About how many keys a row tile sees that look so far to the left and right: fewer than there are in a window."""
    left, right = (min(n, len_kv) for n in ranges)
    return max(min(len_kv, left + right + len_q), 1) if ranges[0] < UNLIMITED else len_kv


def count_splits(tiles: int, keys: int, at_once: int) -> int:
    """Into how many parts the keys of each of ``tiles`` row tiles go, ``at_once`` programs running at a time."""
    for waves in range(MOST_WAVES, 0, -1):
        parts = waves * at_once // tiles
        if parts and keys // parts >= (KEYS_OF_MANY if waves > 1 else LEAST_KEYS):
            return parts
    return max(min(at_once // tiles, keys // LEAST_KEYS), 1)


def cover(head_dim: int) -> tuple[int, int]:
    """Two powers of two that cover a head dim above 256.

    The second is no less than 64, which is what the warps can share. Up to D=512 the first is 256: a product of 512
    columns takes more registers than two of 256.
    """
    first = 256 if head_dim <= 512 else 512
    return first, max(1 << (head_dim - first - 1).bit_length(), 64)


def modifiers(terms: Terms) -> tuple[tuple[Any, ...], int]:
    """(mods, MODS) of ``epilogue`` for rows of several heads.

    A mask that differs between heads is read row by row, and none by 16 bytes: a kernel for every alignment of a line
    of keys, as it grows, would cost more than the few loads.
    """
    mods, bits = terms.modifiers
    if bits & _MASK:
        strides = terms.mask_strides
        mods = (mods[0], *map(opaque, strides), *mods[5:])
        bits = (bits & ~_ALIGNED) | (_ROWS if strides[1] else 0)
    return mods, bits
