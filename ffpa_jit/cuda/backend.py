"""The CUDA backend's verbs (see `registry.Implementation`): a forward, compiled on first use.

Importing this module compiles and loads nothing, and touches no device.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ffpa_jit import context
from ffpa_jit.backends import CUDABackend
from ffpa_jit.cuda import kernels
from ffpa_jit.cuda.driver import CudaError
from ffpa_jit.cuda.instantiate import ARCHS, HEAD_DIMS, KernelSpec, spec_for
from ffpa_jit.cuda.load import Kernel
from ffpa_jit.problem import (
    NO_WINDOW,
    AttentionParams,
    Problem,
    Refusal,
    UnavailableError,
    device_arch,
    shown,
)
from ffpa_jit.toolchain import BuildError, ToolchainError

__all__ = ["BACKEND", "CUDAKernels"]

_DEFAULT = CUDABackend()
# The factor of what stays must be an fp16 number, and probabilities are rounded to 1 / 65536 (dropout.cuh).
_MOST_DROPPED = 1.0 - 2.0**-14
_FEATURES = {"varlen": "packed sequences", "window": "window_size", "softcap": "softcap"}
_MOST = 2**31 - 2**16  # rows, keys and blocks are counted in 32 bits, and rounded up to tiles


class CUDAKernels:
    """Dense attention forward on `mma.sync`, for NVIDIA GPUs from sm_80: masks, dropout, GQA, no workspace."""

    name = "cuda"
    store = kernels.STORE

    def refusals(self, problem: Problem, options: CUDABackend | None, *, direction: str) -> list[Refusal]:
        """Why this backend does not run `problem`; what no backend runs, the dispatcher has judged."""
        if direction == "backward":
            return [Refusal("no-backward", "the CUDA backend has a forward only; its gradients come from another")]
        if problem.device_type != "cuda":
            reason = f"the tensors are on a {problem.device_type} device; the CUDA kernels run on NVIDIA GPUs"
            return [Refusal("device", reason)]
        options = options or _DEFAULT
        found = []
        for code, off in (("varlen", False), ("window", (-1, -1)), ("softcap", 0.0)):
            if getattr(problem, code) != off:
                found.append(Refusal(code, f"the CUDA kernels have no {_FEATURES[code]}; the Triton backend has"))
        if problem.dropout_p > _MOST_DROPPED:
            most = f"{1 / (1 - _MOST_DROPPED):.0f}"
            reason = f"dropout_p is {shown(problem.dropout_p)}, which drops all but one element in {most}"
            found.append(Refusal("dropout-all", f"{reason} or more; SDPA takes it"))
        group = problem.group()
        blocks = problem.batch * problem.heads_kv * (problem.len_q * group // 16 + 1)
        if problem.len_q * group >= _MOST or problem.len_kv >= _MOST or blocks >= _MOST:
            found.append(
                Refusal("size", f"one key head has {_MOST} query rows or keys, or the call as many blocks; split it")
            )
        if problem.arch not in ARCHS:
            found.append(Refusal("arch", f"{problem.arch} has no CUDA kernel; supported are {', '.join(ARCHS)}"))
            return found
        unfit = options.unfit(problem.dtype)
        if unfit is not None:
            found.append(Refusal("acc", unfit))
        else:
            head_dim = _instantiated(problem.head_dim)
            dtype = _name(problem.dtype)
            if head_dim is not None and dtype in ("float16", "bfloat16"):
                missing = _out_of_reach(problem.arch, head_dim, dtype, options.acc, options.stages)
                if missing is not None:
                    found.append(Refusal("toolchain", missing))
        return found

    def plan_forward(self, params: AttentionParams, options: CUDABackend | None, wants_lse: bool) -> Any:
        """Output in the query's layout and LSE [B, Hq, Nq] (float32, natural logarithm)."""
        if params.window != NO_WINDOW or params.softcap or params.varlen:  # for who calls the operators directly
            raise NotImplementedError(
                "the CUDA kernels have neither window_size, softcap nor packed sequences; use the Triton backend"
            )
        return _Forward(params, options or _DEFAULT)

    def plan_backward(self, params: AttentionParams, options: CUDABackend | None, needs: tuple[bool, ...]) -> NoReturn:
        """There is none."""
        raise NotImplementedError("the CUDA backend has a forward only; set backward_backend='triton' or 'sdpa'")

    def kernels(self, arch: str, head_dim: int, dtype: str, **options: Any) -> list[KernelSpec]:
        """The one for the accumulator `acc` and the `stages`."""
        return [spec_for(arch, head_dim, dtype, options.get("acc", "f32"), options.get("stages"))]

    def load(self, spec: KernelSpec, device: int) -> None:
        """Find it in the cache, or compile it, and load it on a device."""
        with torch.cuda.device(device):
            _loaded(spec).prepare()  # finding it did that on the first device only

    def predict_us(self, problem: Problem) -> float:
        """About how many microseconds, from an H200 (bench/NOTES.md): the largest of the host's time, 39, or 51 where
        the keys are split, the products at 330 TFLOP/s over tiles of 64 rows, which the heads of a group share, and
        keys and values at 3 TB/s. Without the gradients, which are another's."""
        rows = -(-problem.len_q * problem.group() // 64) * 64
        scores = problem.batch * problem.heads_kv * rows * problem.len_kv * (0.5 if problem.is_causal else 1.0)
        split = problem.batch * problem.heads_kv * rows <= 64 * 64 and problem.len_kv > 512
        products = 14.0 + scores * problem.head_dim * 4.0e-6 / 330.0
        return max(51.0 if split else 39.0, products, problem.cache_mb() / 3.0)


class _Forward:
    """See `registry.Forward`: finds or builds the kernel that a query asks for, then launches."""

    def __init__(self, params: AttentionParams, options: CUDABackend) -> None:
        self._params, self._options = params, options
        self._launches: dict[Any, Any] = {}

    def __call__(self, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        device = query.device
        if device.index != context.current_device():
            with torch.cuda.device(device):
                return self(query, *rest)
        context.ensure(device)
        kind = query.dtype, query.shape[-1], device.index
        launch = self._launches.get(kind)
        if launch is None:
            from ffpa_jit.cuda import dense

            options = self._options
            arch = device_arch(device.type, device.index)
            spec = spec_for(arch, query.shape[-1], _name(query.dtype), options.acc, options.stages)
            launch = self._launches[kind] = dense.Forward(_loaded(spec), spec, self._params)
        result: tuple[torch.Tensor, torch.Tensor] = launch(query, *rest)
        return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _instantiated(head_dim: int) -> int | None:
    """The instantiation that serves a head dim; by comparisons, which make a number of a symbolic one."""
    if head_dim > 256:
        for instantiated in HEAD_DIMS:
            if head_dim <= instantiated:
                return instantiated
    return None


_unloadable: dict[KernelSpec, str] = {}
"""What was there and could not be loaded, and why; not tried again in this process."""


def _loaded(spec: KernelSpec) -> Kernel:
    """`kernels.kernel`; UnavailableError where it can be neither built nor loaded."""
    try:
        return kernels.kernel(spec)
    except (BuildError, ToolchainError) as error:  # kernels.py remembers these
        raise UnavailableError(str(error)) from error
    except (CudaError, OSError) as error:
        if isinstance(error, CudaError) and not error.unreadable:
            raise  # a fault of this GPU or of earlier work on it, which no other path would mend
        _unloadable[spec] = f"loading {spec.slug} failed: {error}"
        raise UnavailableError(_unloadable[spec]) from error


def _out_of_reach(arch: str, head_dim: int, dtype: str, acc: str, stages: int | None) -> str | None:
    """Why a kernel can be neither found nor built on this machine; None: it can. A constant under torch.compile."""
    spec = spec_for(arch, head_dim, dtype, acc, stages)
    return _unloadable.get(spec) or kernels.available(spec)


# What torch.compiler.assume_constant_result sets, without importing the compiler.
_out_of_reach._dynamo_marked_constant = True  # type: ignore[attr-defined]

BACKEND = CUDAKernels()
