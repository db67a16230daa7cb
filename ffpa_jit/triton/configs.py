"""Tile shapes per GPU architecture, read from ``configs/*.json``.

A file lists, for each kernel, the K step, warps and pipeline stages: of the score phase by head dim, of the value phase
and of the fused kernels by the output width ``BLOCK_N + TAIL``, with a relative rate, from which ``value_tiling`` and
``fused_tiling`` pick.
Every shipped entry is compiled in the tests for every architecture it serves, with spills and shared memory checked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Tiling:
    """One kernel's launch configuration; ``block_n`` and ``tail`` are the value phase's, ``group_rows`` the score's,
    ``strip`` the fused kernels'."""

    block_k: int
    warps: int
    stages: int
    block_n: int = 0
    tail: int = 0
    group_rows: int = 4
    strip: int = 64
    registers: int = 0
    """The most a thread may have, 0 for what the compiler takes: one more program may then share a processor."""

    @property
    def width(self) -> int:
        return self.block_n + self.tail

    def options(self) -> dict[str, int]:
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


@dataclass(frozen=True)
class DecodeTiling:
    """Launch configuration of the kernel for few query rows (``decode_kernels``).

    ``rows``: of a tile. ``block_n``: keys of a step. ``fold``: parts of D that warps share. ``per_processor``: programs
    that are to fit a processor. ``precise``: P as a sum of two numbers. ``hopper``: the kernel of
    ``decode_hopper`` instead, which has shapes of its own.
    """

    rows: int
    block_n: int
    fold: int
    warps: int
    stages: int
    per_processor: int
    precise: bool = True
    hopper: bool = False


FAMILIES = {
    "sm_80": ("sm_80", "sm_87"),
    "sm_86": ("sm_86", "sm_89"),
    "sm_90": ("sm_90",),
    "sm_100": ("sm_100", "sm_103", "sm_110"),
    "sm_120": ("sm_120", "sm_121"),
    "gfx9": ("gfx90a", "gfx942", "gfx950"),
    "gfx12": ("gfx1100", "gfx1101", "gfx1200", "gfx1201"),
    "interpreter": ("interpreter",),
}
"""Configuration file -> the architectures it serves."""

_FAMILY_OF = {arch: name for name, members in FAMILIES.items() for arch in members}


def family(arch: str) -> str | None:
    """The configuration that serves an architecture, or None."""
    return _FAMILY_OF.get(arch)


@cache
def _load(name: str) -> dict[str, Any]:
    folder = resources.files("ffpa_jit.triton") / "configs"
    table: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return table


def uses_tma(arch: str) -> bool:
    """Whether operands are tensor descriptors on this architecture (see ``operands``)."""
    return bool(_table(arch)["tma"])


def has_one_launch(arch: str) -> bool:
    """Whether the fused forward runs small calls (``schedule.one_launch_serves``): where that was measured."""
    return bool(_table(arch).get("one_launch", False))


# A constant under torch.compile: what torch.compiler.assume_constant_result sets, without importing the compiler.
has_one_launch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _table(arch: str) -> dict[str, Any]:
    name = family(arch)
    if name is None:
        raise KeyError(f"no kernel configuration for {arch}")
    return _load(name)


@cache
def score_tiling(arch: str, direction: str, head_dim: int, kind: str = "") -> Tiling:
    """Configuration of a score kernel: the first entry whose ``up_to`` admits the head dim.

    ``kind``: of the epilogue. "masked" with an attention mask; "heavy" with options that take registers beside those of
    the scores (a softcap, a mask that waits for it), for which, where the file has no entries, twice the warps share.
    """
    table = _table(arch)
    special = table.get(f"score_{direction}_{kind}")
    chosen = next(entry for entry in special or table[f"score_{direction}"] if head_dim <= entry["up_to"])
    tiling = Tiling(**{k: v for k, v in chosen.items() if k != "up_to"})
    return replace(tiling, warps=min(2 * tiling.warps, 8)) if kind == "heavy" and not special else tiling


@cache
def value_tiling(arch: str, direction: str, head_dim: int) -> Tiling:
    """Configuration of a value kernel: the widths that cover ``head_dim`` at the least estimated cost."""

    def cost(entry: dict[str, Any]) -> float:
        width: int = entry["block_n"] + entry.get("tail", 0)
        return float(-(-head_dim // width) * width / entry["rate"])

    best = min(_table(arch)[f"value_{direction}"], key=cost)
    return Tiling(**{k: v for k, v in best.items() if k != "rate"})


@cache
def fused_tiling(arch: str, direction: str, head_dim: int, *, plain: bool) -> Tiling:
    """Configuration of the fused kernels: the widths whose slices, each with its own scores, take the least work.

    ``plain``: no softcap, attention mask or dropout, which take registers. Entries marked so are for such calls only.
    """
    products = 1 if direction == "forward" else 2  # of a score tile: S, and dP

    def cost(entry: dict[str, Any]) -> float:
        width: int = entry["block_n"] + entry.get("tail", 0)
        return float(-(-head_dim // width) * (products * head_dim + width) / entry["rate"])

    entries = [x for x in _table(arch)[f"fused_{direction}"] if plain or not x.get("plain", False)]
    best = min(entries, key=cost)
    return Tiling(**{k: v for k, v in best.items() if k not in ("rate", "plain")})


@cache
def decode_tiling(arch: str, rows: int, head_dim: int, plain: bool) -> DecodeTiling:
    """Configuration for so many query rows: of the entries for the least head dim that admits this one, the first that
    holds all rows, or the last. ``plain``: no softcap, attention mask or dropout, which `hopper` entries do not have.
    """
    table = [x for x in _table(arch)["decode"] if head_dim <= x["up_to"] and (plain or not x.get("hopper", False))]
    entries = [x for x in table if x["up_to"] == min(y["up_to"] for y in table)]
    chosen = next((entry for entry in entries if rows <= entry["rows"]), entries[-1])
    return DecodeTiling(**{k: v for k, v in chosen.items() if k != "up_to"})
