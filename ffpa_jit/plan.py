"""The plan table: who runs a call and how it is launched, found once for all calls with the same key.

A `Plan` holds the functions of its backends that launch a call's forward and backward (`registry.Implementation`:
`plan_forward`, `plan_backward`); they know their kernels, and remember launches by layout. Two kinds of keys lead to
one. `of` is for operators: options, backends, dtype, head dim and device. The public function keeps plans under all
that it checks of a call (`request.plan_key`), so that a cached plan skips every check.

The table is a dict that `invalidate` replaces (when a backend was replaced, or found or missed a compiler): a decision
made before then lands in the table that is dropped. Only what has run is stored. Under a compiler nothing is looked up
or stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ffpa_jit import registry, settings
from ffpa_jit.backends import decode
from ffpa_jit.plan_table import current, store
from ffpa_jit.problem import AttentionParams

__all__ = ["Plan", "of"]


class Plan:
    """The launches of calls with the same options on one device.

    `params`: their options; `forward_text`, `backward_text`: their backends as operators carry them; `forward`: a
    `registry.Forward`, or a `registry.VarlenForward` for packed sequences; `computes_gradients`: `backward` does, and
    not SDPA, run again.
    """

    __slots__ = ("_backwards", "backward_text", "computes_gradients", "forward", "forward_text", "params")

    def __init__(self, params: AttentionParams, forward_text: str, backward_text: str, wants_lse: bool) -> None:
        self.forward_text, self.backward_text, self.params = forward_text, backward_text, params
        self.computes_gradients = bool(backward_text) and decode(backward_text).name != "sdpa"
        self._backwards: dict[tuple[bool, ...], Callable[..., tuple[torch.Tensor | None, ...]]] = {}
        if forward_text:
            options = decode(forward_text)
            self.forward = registry.get(options.name).plan_forward(params, options, wants_lse)

    def backward(self, needs: tuple[bool, ...]) -> Callable[..., tuple[torch.Tensor | None, ...]]:
        """What computes the gradients that are needed: `registry.Backward`, or `registry.VarlenBackward`."""
        found = self._backwards.get(needs)
        if found is None:
            options = decode(self.backward_text)
            found = registry.get(options.name).plan_backward(self.params, options, needs)
            self._backwards[needs] = found
        return found


class _Key(NamedTuple):
    params: AttentionParams
    forward: str
    backward: str
    wants_lse: bool
    dtype: torch.dtype
    head_dim: int
    device: torch.device
    interpreted: bool
    workspace: str | None


def of(query: torch.Tensor, params: AttentionParams, forward: str, backward: str, wants_lse: bool = True) -> Plan:
    """The plan of calls with these options and backends (as text; "" for a direction that is not asked for) on
    tensors like `query`. NotImplementedError where a backend is not installed."""
    device = query.device
    interpreted = device.type == "cpu" and settings.interpreter()
    key = _Key(
        params,
        forward,
        backward,
        wants_lse,
        query.dtype,
        query.shape[-1],
        device,
        interpreted,
        settings.workspace_text(),
    )  # fmt: skip
    table = current()
    found: Plan | None = table.get(key)
    if found is None:
        found = Plan(params, forward, backward, wants_lse)
        store(table, key, found)
    return found
