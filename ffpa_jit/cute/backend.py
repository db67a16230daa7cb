"""The CuTe-DSL backend's verbs (see `registry.Implementation`): a forward for Hopper, compiled on first use.

Importing this module compiles and loads nothing, touches no device and does not import the DSL.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ffpa_jit import context, registry
from ffpa_jit.backends import CuTeDSLBackend
from ffpa_jit.cute import compile as kernels
from ffpa_jit.cute import dense, estimates
from ffpa_jit.cute.load import Kernel
from ffpa_jit.cute.schedule import TILE
from ffpa_jit.cute.spec import ARCHS, HEAD_DIMS, KernelSpec, served_by, spec_for
from ffpa_jit.kernel_spec import NoKernelError
from ffpa_jit.problem import (
    NO_WINDOW,
    AttentionParams,
    Problem,
    Refusal,
    UnavailableError,
    device_arch,
    shown,
)
from ffpa_jit.toolchain import BuildError

__all__ = ["BACKEND", "CuTeKernels"]

_FEATURES = {"varlen": "packed sequences", "window": "window_size", "softcap": "softcap"}
_MOST = 2**31 - 2**16  # rows and keys are counted in 32 bits, and rounded up to tiles
_WARM_ROWS = 256


class CuTeKernels:
    """Dense attention forward on `wgmma` and TMA, for sm_90 and head dims up to 640: GQA, no workspace."""

    name = "cutedsl"
    store = kernels.STORE

    def refusals(self, problem: Problem, options: CuTeDSLBackend | None, *, direction: str) -> list[Refusal]:
        """Why this backend does not run `problem`; what no backend runs, the dispatcher has judged."""
        if direction == "backward":
            return [Refusal("no-backward", "the CuTe-DSL backend has a forward only; its gradients come from another")]
        if problem.device_type != "cuda":
            reason = f"the tensors are on a {problem.device_type} device; the CuTe-DSL kernels run on NVIDIA GPUs"
            return [Refusal("device", reason)]
        found = _unsupported(problem)
        rows = problem.len_q * problem.group()
        if rows >= _MOST or problem.len_kv >= _MOST:
            found.append(Refusal("size", f"one key head has {_MOST} query rows or keys; split the call"))
        if problem.head_dim > HEAD_DIMS[-1]:
            reason = f"head dim {problem.head_dim} is above {HEAD_DIMS[-1]}, the largest that has a CuTe-DSL kernel"
            found.append(Refusal("head_dim", reason))
        if problem.arch not in ARCHS:
            found.append(Refusal("arch", f"{problem.arch} has no CuTe-DSL kernel; supported are {', '.join(ARCHS)}"))
            return found
        head_dim, dtype = served_by(problem.head_dim), _name(problem.dtype)
        if head_dim is not None and dtype in ("float16", "bfloat16"):
            missing = _out_of_reach(problem.arch, head_dim, dtype, problem.is_causal)
            if missing is not None:
                found.append(Refusal("toolchain", missing))
        return found

    def plan_forward(self, params: AttentionParams, options: CuTeDSLBackend | None, wants_lse: bool) -> Any:
        """Output in the query's layout and LSE [B, Hq, Nq] (float32, natural logarithm), if that is wanted."""
        if (
            params.dropout_p or params.window != NO_WINDOW or params.softcap or params.varlen
        ):  # of the operators' callers
            raise NotImplementedError(
                "the CuTe-DSL kernels have no dropout, window_size, softcap or packed sequences; use the Triton backend"
            )
        return _Forward(params, wants_lse)

    def plan_backward(
        self, params: AttentionParams, options: CuTeDSLBackend | None, needs: tuple[bool, ...]
    ) -> NoReturn:
        """There is none."""
        raise NotImplementedError("the CuTe-DSL backend has a forward only; set backward_backend='triton' or 'sdpa'")

    def kernels(self, arch: str, head_dim: int, dtype: str, **options: Any) -> list[KernelSpec]:
        """The one with `is_causal` and the one without; none where the DSL is not installed, which is an extra."""
        specs = [spec_for(arch, head_dim, dtype, is_causal) for is_causal in (False, True)]
        absent = registry.missing(self.name)
        if absent is not None:
            raise NoKernelError(arch, absent.reason)
        return specs

    def load(self, spec: KernelSpec, device: int) -> None:
        """Find it in the cache, or compile it, and run it once on a device: the driver puts a kernel there when it is
        first launched."""
        shape, where = (1, 1, _WARM_ROWS, spec.head_dim), torch.device("cuda", device)
        query, key, value = (torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=where) for _ in range(3))
        self.plan_forward(AttentionParams(1.0, spec.is_causal), None, True)(query, key, value)

    def predict_us(self, problem: Problem) -> float:
        """About how many microseconds, from `estimates`: the launch, and the products at the kernel's measured rate, as
        if there were never fewer tiles than run at a time. Without the gradients, which are another's."""
        rates = estimates.CAUSAL if problem.is_causal else estimates.FULL
        head_dim = served_by(problem.head_dim) or HEAD_DIMS[-1]
        heads = problem.batch * problem.heads_kv
        rows = problem.len_q * problem.group()
        filled = max(heads * rows, estimates.PROCESSORS * TILE)
        scores = filled * problem.len_kv * (0.5 if problem.is_causal else 1.0)
        return estimates.OVERHEAD_US + scores * head_dim * 4.0e-6 / rates[head_dim]


def _unsupported(problem: Problem) -> list[Refusal]:
    """A refusal for each option of the call that the kernels do not have."""
    found = []
    for code, off in (("varlen", False), ("window", NO_WINDOW), ("softcap", 0.0)):
        if getattr(problem, code) != off:
            found.append(Refusal(code, f"the CuTe-DSL kernels have no {_FEATURES[code]}; the Triton backend has"))
    if problem.has_mask:
        found.append(Refusal("mask", "the CuTe-DSL kernels take no attn_mask; the Triton backend does"))
    if problem.dropout_p > 0.0:
        reason = f"dropout_p is {shown(problem.dropout_p)}; the CuTe-DSL kernels drop nothing, the Triton backend does"
        found.append(Refusal("dropout", reason))
    return found


class _Forward:
    """See `registry.Forward`: finds or builds the kernel that a query asks for, then launches."""

    def __init__(self, params: AttentionParams, wants_lse: bool) -> None:
        self._params, self._wants_lse = params, wants_lse
        self._launches: dict[Any, dense.Forward] = {}

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        device = query.device
        if mask is not None:  # of the operators' callers
            raise NotImplementedError("the CuTe-DSL kernels take no attn_mask; use the Triton backend")
        if device.index != context.current_device():
            with torch.cuda.device(device):
                return self(query, key, value)
        context.ensure(device)
        kind = query.dtype, query.shape[-1], device.index
        launch = self._launches.get(kind)
        if launch is None:
            arch = device_arch(device.type, device.index)
            spec = spec_for(arch, query.shape[-1], _name(query.dtype), self._params.is_causal)
            launch = self._launches[kind] = dense.Forward(_loaded(spec), self._params, self._wants_lse)
        return launch(query, key, value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_unloadable: dict[KernelSpec, str] = {}
"""What was there and could not be loaded, and why; not tried again in this process."""


def _loaded(spec: KernelSpec) -> Kernel:
    """`kernels.kernel`; UnavailableError where it can be neither built nor loaded."""
    try:
        return kernels.kernel(spec)
    except (BuildError, kernels.DslMissing) as error:  # compile.py remembers these
        raise UnavailableError(str(error)) from error
    except OSError as error:
        _unloadable[spec] = f"loading {spec.slug} failed: {error}{_others()}"
        raise UnavailableError(_unloadable[spec]) from error


def _others() -> str:
    """What may be why, where the process sees GPUs of several kinds: loading puts a kernel on all of them."""
    seen = {torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())}
    if len(seen) < 2:
        return ""
    return (
        f". It is loaded on every GPU that the process sees ({', '.join(sorted(seen))}): if some are not for it, "
        "hide them with CUDA_VISIBLE_DEVICES"
    )


def _out_of_reach(arch: str, head_dim: int, dtype: str, is_causal: bool) -> str | None:
    """Why a kernel can be neither found nor built on this machine; None: it can. A constant under torch.compile."""
    spec = spec_for(arch, head_dim, dtype, is_causal)
    return _unloadable.get(spec) or kernels.available(spec)


# What torch.compiler.assume_constant_result sets, without importing the compiler.
_out_of_reach._dynamo_marked_constant = True  # type: ignore[attr-defined]

BACKEND = CuTeKernels()
