"""What one compiled kernel is: `KernelSpec`, the tile shape it gets on its architecture, and its macros.

Plain arithmetic: nothing here imports torch, touches a device or runs a compiler.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from pathlib import Path

from ffpa_jit.cuda.params import ForwardParams
from ffpa_jit.kernel_spec import Spec, check

__all__ = [
    "ARCHS", "FAST_F16", "HEAD_DIMS", "MAIN", "SOURCES", "KernelSpec", "Tile", "defines", "has_tma", "sources",
    "spec_for", "tile_of",
]  # fmt: skip

SOURCES = Path(__file__).resolve().parent.parent / "cuda_src"
MAIN = "forward.cu"

# Architecture -> KiB of shared memory one thread block may take (CUDA programming guide, compute capabilities).
ARCHS = {
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227,
    "sm_100": 227, "sm_103": 227, "sm_110": 227, "sm_120": 99, "sm_121": 99,
}  # fmt: skip

FAST_F16 = ("sm_86", "sm_89", "sm_120", "sm_121")
"""Where an fp16 accumulator doubles the rate. Elsewhere it would save nothing in P V and cost the conversions."""

HEAD_DIMS = tuple(range(320, 1025, 64))
"""The instantiated head dims; each serves those down to the one before it, and 320 those from 257 on."""


@dataclass(frozen=True, slots=True)
class KernelSpec(Spec):
    """One instantiation. `head_dim`: a multiple of 64 from 320 to 1024; `acc`: accumulator of the matrix products."""

    acc: str
    stages: int

    @property
    def variant(self) -> str:
        return f"{self.acc}-s{self.stages}"


def spec_for(arch: str, head_dim: int, dtype: str, acc: str = "f32", stages: int | None = None) -> KernelSpec:
    """The instantiation that serves a head dim (rounded up to a multiple of 64); ValueError where there is none.

    `dtype`: "float16" or "bfloat16" ("fp16", "bf16"). `stages`: None is what measured best, two large chunks where
    shared memory is plentiful and three small ones where it is not.
    """
    dtype = check("CUDA kernel", arch, head_dim, dtype, archs=ARCHS, largest=HEAD_DIMS[-1])
    if acc not in ("f32", "f16"):
        raise ValueError(f"acc={acc!r}: choose 'f32' or 'f16'")
    if acc == "f16" and dtype == "bfloat16":
        raise ValueError("acc='f16' needs float16 inputs; with bfloat16 choose acc='f32'")
    if stages is None:
        stages = 2 if ARCHS[arch] > 99 else 3
    if not 1 <= stages <= 4:
        raise ValueError(f"stages={stages}: choose 1, 2, 3 or 4")
    return KernelSpec(arch, -(-head_dim // 64) * 64, dtype, acc, stages)


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of an instantiation; `cuda_src/tile.cuh` says what each number means."""

    row_warps: int
    col_warps: int
    row_tiles: int
    keys: int
    key_chunk: int
    value_rows: int
    value_cols: int
    shared_bytes: int = 0

    @property
    def rows(self) -> int:
        """(query, head of the group) rows of a thread block."""
        return self.row_warps * self.row_tiles * 16

    @property
    def threads(self) -> int:
        return self.row_warps * self.col_warps * 32


def _shared_bytes(tile: Tile, head_dim: int, stages: int) -> int:
    """Q, P, the ring, row statistics, row descriptions and barriers: the sum that `tile.cuh` checks."""
    slot = max(tile.keys * tile.key_chunk, tile.value_rows * tile.value_cols) * 2
    rows = tile.rows
    return rows * (2 * head_dim + 2 * tile.keys + tile.col_warps * 4 + 24) + stages * slot + 8 * (2 * stages + 1)


@functools.cache
def tile_of(spec: KernelSpec) -> Tile:
    """The tile shape of `spec`: the first of its head dim's shapes that fits the architecture's shared memory.

    The order is that of measured speed on an H200 (bench/NOTES.md).
    """
    for tile in _shapes(spec.head_dim):
        shared_bytes = _shared_bytes(tile, spec.head_dim, spec.stages)
        if shared_bytes <= ARCHS[spec.arch] * 1024:
            return replace(tile, shared_bytes=shared_bytes)
    raise AssertionError(f"no tile shape of {spec.slug} fits {ARCHS[spec.arch]} KiB")


def _shapes(head_dim: int) -> list[Tile]:
    """Tile shapes for a head dim, fastest first, down to one that fits 99 KiB with four stages.

    What makes a shape fast: large chunks (each costs about 250 cycles of empty pipes), then 32 x 32 scores a warp, then
    rows. What limits it: O takes rows * head_dim / threads registers of 255.
    """
    best = {
        320: Tile(2, 4, 3, 64, 320, 64, 320),
        384: Tile(2, 4, 2, 128, 192, 64, 384),
        448: Tile(2, 4, 2, 128, 256, 64, 448),
        512: Tile(2, 4, 2, 128, 256, 64, 512),
        576: Tile(2, 4, 2, 128, 256, 32, 576),
        640: Tile(2, 4, 2, 128, 256, 32, 640),
        704: Tile(1, 8, 3, 128, 256, 32, 704),
        768: Tile(1, 8, 3, 128, 256, 32, 768),
        832: Tile(1, 8, 3, 128, 256, 32, 832),
        896: Tile(1, 8, 3, 128, 256, 32, 896),
        960: Tile(2, 4, 1, 128, 256, 32, 960),
        1024: Tile(1, 8, 2, 128, 256, 32, 1024),
    }[head_dim]
    d = head_dim
    if d <= 512:
        smaller = [(2, 4, 2, 128, 128, 32, d), (2, 4, 2, 128, 64, 16, d), (2, 4, 2, 64, 64, 16, d),
                   (2, 4, 2, 64, 64, 64, 64), (2, 4, 1, 64, 64, 64, 64)]  # fmt: skip
    else:
        wide = [(2, 4, 2, 128, 128, 16, d), (2, 4, 2, 128, 64, 16, d)] if d <= 640 else []
        smaller = [*wide, (2, 4, 1, 128, 128, 16, d), (2, 4, 1, 128, 64, 16, d), (2, 4, 1, 64, 128, 16, d),
                   (2, 4, 1, 64, 64, 64, 64), (1, 4, 1, 64, 64, 64, 64)]  # fmt: skip
    return [best, *(Tile(*shape) for shape in smaller)]


def defines(spec: KernelSpec) -> dict[str, str]:
    """The macros that make `cuda_src/forward.cu` the kernel of `spec`, values as text."""
    tile = tile_of(spec)
    values = {
        "HEAD_DIM": spec.head_dim,
        "BF16": spec.dtype == "bfloat16",
        "SCORES_F16": spec.acc == "f16",
        "OUTPUT_F16": spec.acc == "f16" and spec.arch in FAST_F16,
        "STAGES": spec.stages,
        "TMA": has_tma(spec.arch),
        "ROW_WARPS": tile.row_warps,
        "COL_WARPS": tile.col_warps,
        "ROW_TILES": tile.row_tiles,
        "KEYS": tile.keys,
        "KEY_CHUNK": tile.key_chunk,
        "VALUE_ROWS": tile.value_rows,
        "VALUE_COLS": tile.value_cols,
        "SHARED_BYTES": tile.shared_bytes,
        "PARAMS_BYTES": ctypes.sizeof(ForwardParams),
        "PARAMS_LAST": ForwardParams.scale.offset,
    }
    return {f"FFPA_{name}": str(int(value)) for name, value in values.items()}


def has_tma(arch: str) -> bool:
    """Whether kernels for `arch` take K and V as tensor maps."""
    return int(arch[3:]) >= 90


def sources() -> list[Path]:
    """Every source file, sorted; their names and bytes are part of a cache key."""
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cu", ".cuh"))
