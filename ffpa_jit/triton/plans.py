"""What the Triton backend's `plan_forward` and `plan_backward` return: host twins, run once a layout, then from a plan.

A layout is the shapes and strides of a call's tensors. The first call of each runs the host code of its kernels, with a
recorder where there is a driver to launch by; later ones launch what it noted. Of decoding steps, which never have
the same number of keys twice, `decode` keeps what they share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ffpa_jit import context
from ffpa_jit.launch_plan import LaunchPlan, Recorder
from ffpa_jit.problem import AttentionParams, device_arch
from ffpa_jit.settings import workspace_bytes
from ffpa_jit.triton import archive, decode, dense, fused, ragged
from ffpa_jit.triton.configs import has_one_launch
from ffpa_jit.triton.launch import Launcher, processors
from ffpa_jit.triton.schedule import few_queries, minimum_bytes, one_launch_serves
from ffpa_jit.triton.terms import Terms

if TYPE_CHECKING:
    from ffpa_jit.backends import TritonBackend

__all__ = ["Backward", "Forward", "VarlenBackward", "VarlenForward"]

Tensors = tuple[torch.Tensor | None, ...]

_MOST_LAYOUTS = 256

_logger = logging.getLogger("ffpa_jit")


class _Recorded:
    """Calls with the same options, by layout. A derived class says what one of them does: `_run`."""

    direction = ""

    def __init__(self, params: AttentionParams, options: TritonBackend | None) -> None:
        self._params = params
        self._workspace_mb = None if options is None else options.workspace_mb
        self._plans: dict[Any, LaunchPlan | None] = {}
        self._seen: set[Any] = set()
        self._plain: Terms | None = None
        self._plain = self._terms(None, None)

    def _run(self, launcher: Launcher, arch: str, inputs: Tensors, lengths: tuple[int, ...]) -> Tensors:
        raise NotImplementedError

    def _launch(self, device: torch.device, inputs: Tensors, lengths: tuple[int, ...] = ()) -> Tensors:
        """The results for `inputs`. `lengths`: what else the launches depend on."""
        layout = (device.index, lengths, *[None if x is None else (x.shape, x.stride()) for x in inputs])
        known = layout in self._plans
        plan = self._plans.get(layout)
        if plan is not None and context.current_device() == device.index:
            context.ensure(device)
            launched = plan(inputs)
            if launched is not None:
                return tuple(launched)
        recorder = None
        if not known and device.type == "cuda" and torch.version.hip is None:
            # Of the first call of a layout nothing is noted: in many models few lengths come twice.
            if layout in self._seen:
                recorder = Recorder(device, inputs)
            else:
                if len(self._seen) >= _MOST_LAYOUTS:
                    self._seen.clear()
                self._seen.add(layout)
        arch = device_arch(device.type, device.index)
        launcher = Launcher(device, recorder)
        here = device.type == "cuda" and context.current_device() == device.index
        with nullcontext() if here else on(device), self._announced(arch, inputs):
            results = self._run(launcher, arch, inputs if recorder is None else recorder.inputs, lengths)
        if recorder is not None and recorder.repeatable_inputs:
            if len(self._plans) >= _MOST_LAYOUTS:
                self._plans.clear()
            self._plans[layout] = recorder.finish(*results)
        return tuple(results)

    def _terms(self, mask: torch.Tensor | None, rng: torch.Tensor | None) -> Terms:
        if mask is None and rng is None and self._plain is not None:
            return self._plain
        p = self._params
        return Terms(p.scale, p.is_causal, p.window, p.softcap, mask, p.dropout_p, rng)

    def _cap(self) -> int:
        """Bytes of workspace for a call: the backend's own option, else the setting."""
        return workspace_bytes() if self._workspace_mb is None else int(self._workspace_mb * 2**20)

    def _announced(self, arch: str, inputs: Tensors) -> AbstractContextManager[None]:
        raise NotImplementedError


class Forward(_Recorded):
    """See `registry.Forward`."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        device = query.device
        out, lse = self._launch(device, (query, key, value, mask, rng))
        assert out is not None
        assert lse is not None
        return out, lse

    def _run(self, launcher: Launcher, arch: str, inputs: Tensors, lengths: tuple[int, ...]) -> Tensors:
        query, key, value, mask, rng = inputs
        assert query is not None and key is not None and value is not None  # noqa: PT018
        cap, terms = self._cap(), self._terms(mask, rng)
        if cap and few_queries(query.shape[2], query.shape[3]):
            return decode.forward(query, key, value, terms, arch=arch, cap=cap, launcher=launcher)
        heads, len_q = query.shape[0] * query.shape[1], query.shape[2]
        small = has_one_launch(arch) and one_launch_serves(
            heads, len_q, key.shape[2], query.shape[3], processors(query.device)
        )
        if small or cap < _needed(query, key, "forward"):
            return fused.forward(query, key, value, terms, arch=arch, launcher=launcher)
        return dense.forward(query, key, value, terms, arch=arch, cap=cap, launcher=launcher)

    def _announced(self, arch: str, inputs: Tensors) -> AbstractContextManager[None]:
        query, _, _, mask, rng = inputs
        assert query is not None
        return compiling("forward", arch, query, self._terms(mask, rng))


class Backward(_Recorded):
    """See `registry.Backward`."""

    def __init__(self, params: AttentionParams, options: TritonBackend | None, needs: tuple[bool, ...]) -> None:
        super().__init__(params, options)
        self._needs = (needs[0], needs[1], needs[2], needs[3])
        self._whole_rows = options is None or not options.merged

    def __call__(
        self, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, *rest: torch.Tensor | None
    ) -> Tensors:
        return self._launch(query.device, (grad_out, grad_lse, query, *rest))

    def _run(self, launcher: Launcher, arch: str, inputs: Tensors, lengths: tuple[int, ...]) -> Tensors:
        grad_out, grad_lse, query, key, value, mask, rng, out, lse = inputs
        assert query is not None and key is not None  # noqa: PT018
        needs, cap, terms = self._needs, self._cap(), self._terms(mask, rng)
        needed = _needed(query, key, "backward")
        tensors = grad_out, grad_lse, query, key, value, out, lse
        # A stored dS has the softcap's slope in it, which the gradient of the mask has not.
        if cap < needed or (terms.softcap and needs[3]):
            return fused.backward(*tensors, terms, needs=needs, arch=arch, launcher=launcher)  # type: ignore[arg-type]
        mine = needs
        if needs[3] and mask is not None and dense.mask_sum_bytes(mask, query, key) > min(cap // 2, cap - needed):
            mine = (*needs[:3], False)
        grads = dense.backward(
            *tensors, terms, needs=mine, arch=arch, cap=cap, whole_rows=self._whole_rows, launcher=launcher,  # type: ignore[arg-type]
        )  # fmt: skip
        if mine != needs:  # sums of the mask's size in float32 do not fit: what computes them again needs none
            only = (False, False, False, True)
            again = fused.backward(*tensors, terms, needs=only, arch=arch, launcher=launcher)  # type: ignore[arg-type]
            grads = (*grads[:3], again[3])
        return grads

    def _announced(self, arch: str, inputs: Tensors) -> AbstractContextManager[None]:
        query, mask, rng = inputs[2], inputs[5], inputs[6]
        assert query is not None
        return compiling("backward", arch, query, self._terms(mask, rng))


class VarlenForward(_Recorded):
    """See `registry.VarlenForward`."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
        rng: torch.Tensor | None, max_q: int, max_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        lengths = max_q, max_k, int(cu_q is cu_k or cu_q.data_ptr() == cu_k.data_ptr())
        out, lse = self._launch(query.device, (query, key, value, cu_q, cu_k, rng), lengths)
        assert out is not None
        assert lse is not None
        return out, lse

    def _run(self, launcher: Launcher, arch: str, inputs: Tensors, lengths: tuple[int, ...]) -> Tensors:
        query, key, value, cu_q, cu_k, rng = inputs
        terms, cap = self._terms(None, rng), self._cap()
        return _fitting(
            lambda max_q, max_k: ragged.forward(
                query, key, value, cu_q, cu_k, terms, max_q=max_q, max_k=max_k, arch=arch, cap=cap, launcher=launcher  # type: ignore[arg-type]
            ),
            launcher, cu_q, cu_k, lengths,
        )  # fmt: skip

    def _announced(self, arch: str, inputs: Tensors) -> AbstractContextManager[None]:
        assert inputs[0] is not None
        return compiling("varlen forward", arch, inputs[0], self._terms(None, inputs[5]))


class VarlenBackward(_Recorded):
    """See `registry.VarlenBackward`."""

    def __init__(self, params: AttentionParams, options: TritonBackend | None, needs: tuple[bool, ...]) -> None:
        super().__init__(params, options)
        self._needs = (needs[0], needs[1], needs[2])
        self._whole_rows = options is None or not options.merged

    def __call__(
        self, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, rng: torch.Tensor | None, out: torch.Tensor,
        lse: torch.Tensor, max_q: int, max_k: int,
    ) -> Tensors:  # fmt: skip
        lengths = max_q, max_k, int(cu_q is cu_k or cu_q.data_ptr() == cu_k.data_ptr())
        inputs = grad_out, grad_lse, query, key, value, cu_q, cu_k, rng, out, lse
        return self._launch(query.device, inputs, lengths)

    def _run(self, launcher: Launcher, arch: str, inputs: Tensors, lengths: tuple[int, ...]) -> Tensors:
        grad_out, grad_lse, query, key, value, cu_q, cu_k, rng, out, lse = inputs
        terms, cap = self._terms(None, rng), self._cap()
        return _fitting(
            lambda max_q, max_k: ragged.backward(
                grad_out, grad_lse, query, key, value, out, lse, cu_q, cu_k, terms, needs=self._needs,  # type: ignore[arg-type]
                max_q=max_q, max_k=max_k, arch=arch, cap=cap, whole_rows=self._whole_rows, launcher=launcher,
            ),
            launcher, cu_q, cu_k, lengths,
        )  # fmt: skip

    def _announced(self, arch: str, inputs: Tensors) -> AbstractContextManager[None]:
        assert inputs[2] is not None
        return compiling("varlen backward", arch, inputs[2], self._terms(None, inputs[7]))


def _fitting(
    run: Any, launcher: Launcher, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, lengths: tuple[int, ...]
) -> Tensors:
    """``run`` with bounds on the lengths; where they are so loose that the workspace does not hold what they allow,
    with the lengths themselves: read from the device, the only case in which a packed call waits for it."""
    max_q, max_k = lengths[:2]
    try:
        return run(max_q, max_k)  # type: ignore[no-any-return]
    except ragged.DoesNotFitError:
        assert cu_q is not None and cu_k is not None  # noqa: PT018
        launcher.give_up()  # other sequences have other lengths
        if cu_q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise
        longest_q, longest_k = torch.stack([(cu[1:] - cu[:-1]).amax() for cu in (cu_q, cu_k)]).tolist()
        if longest_q >= max_q and longest_k >= max_k:
            raise
        return run(max(min(longest_q, max_q), 1), max(min(longest_k, max_k), 1))  # type: ignore[no-any-return]


def _needed(query: torch.Tensor, key: torch.Tensor, direction: str) -> int:
    """Bytes of workspace that the two-phase kernels take at least."""
    b, h, n, d = query.shape
    return minimum_bytes(b * h, n, key.shape[2], d, direction)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, and by the context of the thread."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device)


_compiled: set[tuple[object, ...]] = set()
"""What this process has compiled (or loaded from Triton's cache), so that only a first call is announced."""


def _compiled_key(direction: str, arch: str, query: torch.Tensor, terms: Terms) -> tuple[object, ...]:
    return direction, arch, query.shape[-1], query.dtype, terms.is_causal, terms.banded, terms.kinds


def compiling(direction: str, arch: str, query: torch.Tensor, terms: Terms) -> AbstractContextManager[None]:
    """Says on the logger `ffpa_jit` (INFO) that a first call compiles, and afterwards how long it took."""
    context.ensure(query.device)
    key = _compiled_key(direction, arch, query, terms)
    if key in _compiled or arch == "interpreter":
        return nullcontext()
    _compiled.add(key)
    # What `ffpa_jit.warm` compiled goes to where Triton looks.
    dtype = str(query.dtype).removeprefix("torch.")
    archive.preinstall(arch, query.shape[-1], dtype, direction.removeprefix("varlen "))
    shape = "causal" if terms.is_causal else "full"
    extras = "".join(f", {name}" for name in ("window",) * terms.banded + terms.kinds)
    return _announced(direction, f"head dim {query.shape[-1]}, {query.dtype}, {shape}{extras}, {arch}")


@contextmanager
def _announced(direction: str, what: str) -> Iterator[None]:
    _logger.info("first %s for %s: compiling its Triton kernels, unless they are in Triton's cache", direction, what)
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    if seconds > 2:
        _logger.info("compiled the %s for %s in %.1f s", direction, what, seconds)
