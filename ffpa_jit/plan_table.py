"""The table behind `plan`, below everything that invalidates it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = ["current", "invalidate", "store"]

MOST = 4096  # a model has few plan keys, but each text may bring a length of its own

_plans: dict[Hashable, Any] = {}


def current() -> dict[Hashable, Any]:
    """The table as it stands: taken before a decision is made, and given back to `store` with it."""
    return _plans


def store(table: dict[Hashable, Any], key: Hashable, plan: Any) -> None:
    """Keep a plan in the table that was current when it was decided."""
    if len(table) >= MOST:
        table.clear()
    table[key] = plan


def invalidate() -> None:
    """Forget every plan: a backend was replaced, or may refuse other calls than before."""
    global _plans
    _plans = {}
