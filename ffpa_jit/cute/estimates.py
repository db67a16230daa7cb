"""How fast the kernels are, for the dispatcher's choice: one number a kernel, measured by `bench/estimates.py`."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["CAUSAL", "FULL", "OVERHEAD_US", "PROCESSORS", "TABLE"]

TABLE = Path(__file__).with_name("estimates.json")

_measured = json.loads(TABLE.read_text())

OVERHEAD_US: float = _measured["overhead_us"]
"""A call that computes next to nothing: the host's time, the launch, and a tile's way through the pipeline."""

FULL: dict[int, float] = {int(head_dim): rate for head_dim, rate in _measured["full"].items()}
"""Instantiated head dim -> TFLOP/s of long bf16 calls; only the visible scores are counted."""

CAUSAL: dict[int, float] = {int(head_dim): rate for head_dim, rate in _measured["causal"].items()}

PROCESSORS = 66
"""Clusters that run at a time: fewer tiles than these leave the others idle."""
