"""Calls like one before, at a fraction of the host's time.

A small call takes longer on the host than on the GPU, and most of that is finding out again what was found out for the
last call like it: who runs it, with which kernel, and what its shapes and strides mean to that. So the plan is kept
under all that it was made from. For plain calls, those without gradients, mask, dropout, window and softcap, a backend
may give a function of what is left, the tensors and the scale (`registry.Repeat`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable

from torch import Tensor

from ffpa_jit import registry, settings
from ffpa_jit.backends import Backend
from ffpa_jit.dispatch import Plan
from ffpa_jit.problem import NO_WINDOW, UnavailableError, device_arch

__all__ = ["Known", "find", "form_of", "keep"]

_MOST = 4096  # forms that are kept: a model has few, but each text may bring a length of its own

_known: dict[Hashable, Known] = {}

registry.on_change(_known.clear)

find = _known.get
"""What is known of a form, or None."""


class Known:
    """`plan`: who runs such calls, None if they are to go the long way. `repeat`: the backend's short way, if any."""

    __slots__ = ("_asked", "plan", "repeat")

    def __init__(self, plan: Plan | None, plain: bool) -> None:
        self.plan = plan
        self.repeat: registry.Repeat | None = None
        self._asked = not plain

    def has_run(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *, is_causal: bool, wants_lse: bool
    ) -> None:
        """To be told of each call that the plan's backend has run, with what it gave: the first time, it is asked for
        a short way."""
        if not self._asked and self.plan is not None:
            self._asked = True
            shortcut = _shortcut_of(registry.get(self.plan.forward))
            if shortcut is not None:
                with contextlib.suppress(UnavailableError):  # the call is done, and no later one needs a short way
                    self.repeat = shortcut(query, key, value, out, is_causal=is_causal, wants_lse=wants_lse)


def _shortcut_of(backend: registry.Implementation) -> Callable[..., registry.Repeat | None] | None:
    """The backend's verb, unless a class that is derived from the verb's has a `forward` of its own."""
    for kind in type(backend).__mro__:
        if "shortcut" in vars(kind):
            return backend.shortcut  # type: ignore[attr-defined, no-any-return]
        if "forward" in vars(kind):
            break
    return None


def form_of(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool, needs_grad: bool, wants_lse: bool,
    window: tuple[int, int], softcap: float, forward: Backend | None, backward: Backend | None, installed: bool,
    epoch: int,
) -> Hashable:  # fmt: skip
    """All that decides how a call without mask and dropout is run, but for addresses and scale, of tensors that are
    `ops.unwatched`. `epoch`: `registry.epoch` before anything was decided."""
    # A CUDA device stays what it is; what CPU tensors are depends on a setting, see `device_arch`.
    arch = None if query.is_cuda else device_arch(query.device.type, query.device.index)
    return (
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(), query.dtype, key.dtype,
        value.dtype, query.device, key.device, value.device, is_causal, enable_gqa, needs_grad, wants_lse, window,
        softcap, forward, backward, installed, epoch, settings.workspace_text(), arch,
    )  # fmt: skip


def keep(form: Hashable, plan: Plan | None, needs_grad: bool, window: tuple[int, int], softcap: float) -> Known:
    """Remember the plan for a form."""
    if len(_known) >= _MOST:
        _known.clear()
    known = _known[form] = Known(plan, plain=not needs_grad and window == NO_WINDOW and softcap == 0.0)
    return known
