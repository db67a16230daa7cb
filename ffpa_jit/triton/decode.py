"""Attention of few query rows over many keys: parts of the keys in parallel, one combine. See ``decode_kernels``."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

from ffpa_jit.triton import decode_kernels
from ffpa_jit.triton.configs import DecodeTiling, decode_tiling, uses_tma
from ffpa_jit.triton.dense import nothing_seen
from ffpa_jit.triton.launch import Launcher, bind, copy, map_values, mark, processors, triton_is_between
from ffpa_jit.triton.params import ScoreMods
from ffpa_jit.triton.schedule import LEAST_KEYS
from ffpa_jit.triton.terms import UNLIMITED, Terms, encode_unspecialized

KEYS_OF_MANY = 768
"""More programs than run at a time, for an even end, only if each keeps so many keys."""

MOST_WAVES = 4

GLUON = (3, 5), (3, 9)
"""The first and the last version of Triton that ``decode_hopper`` compiles with."""

_MASK, _ROWS, _ALIGNED = 3, 4, 16  # bits of ``epilogue``, as in ``terms``


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms, *, arch: str, cap: int,
    launcher: Launcher | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention output [B, Hq, Nq, D] in the query's layout, and LSE [B, Hq, Nq] (float32, natural logarithm).

    ``cap``: bytes of workspace; with 0 the keys are not split.
    """
    rows = query.shape[2] * (query.shape[1] // max(key.shape[1], 1))
    tiling = decode_tiling(arch, rows, query.shape[3], not modifiers(terms)[1] and _has_gluon())
    return run(query, key, value, terms, arch=arch, cap=cap, tiling=tiling, launcher=launcher)


def run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms, *, arch: str, cap: int,
    tiling: DecodeTiling, splits: int | None = None, launcher: Launcher | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``forward`` with a configuration, and a number of parts of the keys, of the caller's choice."""
    device = query.device
    launcher = launcher or Launcher(device)
    out = launcher.result_like(query)
    lse = launcher.result(query.shape[:-1], torch.float32)
    if out.numel() == 0 or key.shape[2] == 0:
        launcher.call(nothing_seen, out, lse)
        return out, lse
    target = launcher.operand(out)  # an output whose last stride is not 1 is computed densely and copied
    q, k, v = launcher.operand(query), launcher.operand(key), launcher.operand(value)
    mods, bits = modifiers(terms)
    strides = q.stride(), target.stride()
    kinds = mark(mods) if bits else None, None if uses_tma(arch) else mark((bind(k, 1, 1, False), bind(v, 1, 1, False)))
    step = _step_like(
        arch, device, processors(device), q.dtype, q.shape, k.shape[1], strides, (terms.left, terms.right), bits, kinds,
        cap, tiling,
    )  # fmt: skip
    step.launch(launcher, (q, k, v, target, lse), mods, terms, splits)
    if target is not out:
        launcher.call(copy, out, target)
    return out, lse


class _Step:
    """Decoding steps that differ in their tensors and in the number of keys only: how they are cut, and the kernels
    once they are known.

    The eager steps of a decoding loop take longer on the host than on the device, so what they share is kept, and no
    step has the number of keys of the one before. Dtype, strides and kinds (``mark`` of the options, and of keys and
    values where they are no descriptors) only tell steps apart that have kernels of their own.
    """

    def __init__(
        self, arch: str, device: torch.device, device_processors: int, dtype: torch.dtype, shape: torch.Size,
        heads_kv: int, strides: Any, ranges: tuple[int, int], bits: int, kinds: Any, cap: int, t: DecodeTiling,
    ) -> None:  # fmt: skip
        batch, heads_q, len_q, head_dim = shape
        self.group, self.units = heads_q // heads_kv, batch * heads_kv
        self.n_rows = len_q * self.group
        self.row_tiles = -(-self.n_rows // t.rows)
        self.most_splits = max(cap // (4 * self.units * self.n_rows * (head_dim + 2)), 1)
        self.at_once = device_processors * t.per_processor
        self.tiling, self.head_dim, self.len_q, self.heads_kv, self.ranges = t, head_dim, len_q, heads_kv, ranges
        self.widths, self.tma = cover(head_dim), uses_tma(arch)
        self.constants = {"D": head_dim, "W1": self.widths[1], "num_warps": t.warps}
        if not t.hopper:
            self.constants |= {
                "W0": self.widths[0], "ROWS": t.rows, "BLOCK_N": t.block_n, "FOLD": t.fold, "PRECISE": t.precise,
                "MOD_FLAGS": bits, "TMA": self.tma, "num_stages": t.stages, **register_limit(t, arch, bits),
            }  # fmt: skip
        width = 1024 if arch == "interpreter" else 128  # interpreted, a program costs the same whatever its size
        self.combining = {"D": head_dim, "BLOCK_D": width, "CHUNK": 16, "num_warps": 4}
        self.combine_programs = self.units * self.n_rows * -(-head_dim // width)
        self.found: dict[Any, Any] = {}  # kernels, see ``Launcher``
        self.steps: dict[bool, tuple[Any, Any]] = {}  # by whether the keys are split: launches of the two kernels
        self.kernel: Any = decode_kernels.attend
        self.describe: Any = None
        if t.hopper:
            from ffpa_jit.triton import decode_hopper

            self.kernel, self.describe = decode_hopper.attend, decode_hopper.describe

    def launch(
        self, launcher: Launcher, tensors: tuple[torch.Tensor, ...], mods: ScoreMods, terms: Terms,
        splits: int | None,
    ) -> None:  # fmt: skip
        q, k, v, out, lse = tensors
        len_kv = k.shape[2]
        if splits is None:
            seen = visible(self.ranges, self.len_q, len_kv)
            splits = min(count_splits(self.units * self.row_tiles, seen, self.at_once), self.most_splits)
        n_rows = splits * self.units * self.n_rows if splits > 1 else 0  # of partial sums
        sums = launcher.scratch((n_rows * (self.head_dim + 2),), torch.float32)
        counts = self.len_q, len_kv, self.heads_kv, self.group, self.row_tiles, splits, *self.ranges
        programs = self.units * self.row_tiles * splits
        steps = None if launcher.records or not self.tma else self.steps.get(splits > 1)
        if steps is not None:
            self._again(steps, programs, (q, k, v, out, lse, sums), mods, terms, counts, n_rows)
            return
        launcher.share(self.found)
        t, widths = self.tiling, self.widths
        partial, row_max, row_sum = sums.split_with_sizes((n_rows * self.head_dim, n_rows, n_rows))
        query, result = (bind(x, t.rows, self.head_dim, False) for x in (q, out))
        results = result, partial, row_max, row_sum, lse
        factors = terms.scale_log2, terms.keep_scale
        describe = self.describe or (lambda x, cols: bind(x, t.block_n, cols, self.tma))
        operands = [describe(x, cols) for x in (k, v) for cols in widths]
        options = () if t.hopper else (mods,)
        attending = {"SPLIT": splits > 1, **self.constants}
        launcher(self.kernel, programs, query, *operands, *results, *options, *factors, *counts, **attending)
        if splits > 1:
            launcher(
                decode_kernels.combine, self.combine_programs, *results, terms.keep_scale, self.len_q, self.heads_kv,
                self.group, splits, **self.combining,
            )  # fmt: skip
        attend = launcher.step(self.kernel, **attending)
        combine = launcher.step(decode_kernels.combine, **self.combining) if splits > 1 else None
        if attend is not None and (splits == 1 or combine is not None):
            self.steps[splits > 1] = attend, combine

    def _again(
        self, steps: tuple[Any, Any], programs: int, tensors: tuple[torch.Tensor, ...], mods: ScoreMods,
        terms: Terms, counts: tuple[int, ...], n_rows: int,
    ) -> None:  # fmt: skip
        """Launch for another number of keys: the same kernels, by their parameters."""
        attend, combine = steps
        q, k, v, out, lse, sums = tensors
        partial = sums.data_ptr()
        row_max = partial + 4 * n_rows * self.head_dim
        results: list[Any] = [*_rows_of(out), partial, row_max, row_max + 4 * n_rows, lse.data_ptr()]
        leaves: list[Any] = _rows_of(q)
        boxes = attend.boxes
        for x, (first, second) in ((k, boxes[:2]), (v, boxes[2:])):
            described = map_values(x, *first)
            leaves += described
            leaves += described if second == first else map_values(x, *second)
        leaves += results
        if not self.tiling.hopper:
            leaves += [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in mods]
        leaves += [terms.scale_log2, terms.keep_scale, *counts]
        attend.launch(q.device, programs, leaves)
        if combine is not None:
            leaves = [*results, terms.keep_scale, self.len_q, self.heads_kv, self.group, counts[5]]
            combine.launch(q.device, self.combine_programs, leaves)


def _rows_of(x: torch.Tensor) -> list[Any]:
    """The values of an operand that is no descriptor, see ``bind``."""
    b, h, n, _ = x.stride()
    shape = x.shape
    return [
        x.data_ptr(), b // 8 if shape[0] > 1 else 0, h // 8 if shape[1] > 1 else 0, n // 8 if shape[2] > 1 else 0
    ]  # fmt: skip


_step_like = lru_cache(maxsize=1024)(_Step)


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


def modifiers(terms: Terms) -> tuple[ScoreMods, int]:
    """(mods, MOD_FLAGS) of ``epilogue`` for rows of several heads.

    A mask that differs between heads is read row by row, and none by 16 bytes: a kernel for every alignment of a line
    of keys, as it grows, would cost more than the few loads.
    """
    mods, bits = terms.modifiers
    if bits & _MASK:
        strides = terms.mask_strides
        b, h, q, k = map(encode_unspecialized, strides)
        mods = mods._replace(mask_stride_b=b, mask_stride_h=h, mask_stride_q=q, mask_stride_k=k)
        bits = (bits & ~_ALIGNED) | (_ROWS if strides[1] else 0)
    return mods, bits
