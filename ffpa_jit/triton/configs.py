"""Tile shapes per GPU architecture, read from ``configs/*.json``.

A file lists, for each kernel, the K step, warps and pipeline stages: of the score phase by head dim, of the value phase
by the output width ``BLOCK_N + TAIL``, with its measured relative rate, from which ``value_tiling`` picks.
Every shipped entry is compiled in the tests for every architecture it serves, with spills and shared memory checked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Tiling:
    """One kernel's launch configuration; ``block_n`` and ``tail`` are the value phase's, ``group_rows`` the score's."""

    block_k: int
    warps: int
    stages: int
    block_n: int = 0
    tail: int = 0
    group_rows: int = 4

    @property
    def width(self) -> int:
        return self.block_n + self.tail

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


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


def _table(arch: str) -> dict[str, Any]:
    name = family(arch)
    if name is None:
        raise KeyError(f"no kernel configuration for {arch}")
    return _load(name)


@cache
def score_tiling(arch: str, direction: str, head_dim: int) -> Tiling:
    """Configuration of a score kernel: the first entry whose ``up_to`` admits the head dim."""
    entries = _table(arch)[f"score_{direction}"]
    chosen = next(entry for entry in entries if head_dim <= entry["up_to"])
    return Tiling(**{k: v for k, v in chosen.items() if k != "up_to"})


@cache
def value_tiling(arch: str, direction: str, head_dim: int) -> Tiling:
    """Configuration of a value kernel: the widths that cover ``head_dim`` at the least estimated cost."""

    def cost(entry: dict[str, Any]) -> float:
        width: int = entry["block_n"] + entry.get("tail", 0)
        return float(-(-head_dim // width) * width / entry["rate"])

    best = min(_table(arch)[f"value_{direction}"], key=cost)
    return Tiling(**{k: v for k, v in best.items() if k != "rate"})
