"""The Triton backend's verbs (see ``registry.Implementation``).

Importing this module does not import Triton; the first launch does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ffpa_jit import context
from ffpa_jit.problem import Problem, Refusal, device_arch
from ffpa_jit.settings import workspace_bytes
from ffpa_jit.triton import bundle
from ffpa_jit.triton.configs import FAMILIES, family
from ffpa_jit.triton.schedule import TILE, few_queries, minimum_bytes
from ffpa_jit.triton.terms import Terms

if TYPE_CHECKING:
    from ffpa_jit.backends import TritonBackend

__all__ = ["BACKEND", "TritonKernels"]

Result = TypeVar("Result")

_logger = logging.getLogger("ffpa_jit")


def _served() -> str:
    return ", ".join(sorted(arch for members in FAMILIES.values() for arch in members if arch != "interpreter"))


class TritonKernels:
    """Dense attention on two-phase Triton kernels, for NVIDIA GPUs from sm_80 and AMD's CDNA 2-4 and RDNA 3-4."""

    name = "triton"

    def refusals(self, problem: Problem, options: TritonBackend, *, direction: str) -> list[Refusal]:
        """Why this backend does not run ``problem`` on its device; what no backend runs, the dispatcher has judged."""
        found = []

        def refuse(code: str, reason: str) -> None:
            found.append(Refusal(code, reason))

        if problem.device_type != "cuda" and problem.arch != "interpreter":
            refuse(
                "device",
                f"the tensors are on a {problem.device_type} device; the kernels run on CUDA and ROCm devices (or set "
                "TRITON_INTERPRET=1 before Triton is imported to run them slowly on the CPU, in fp16)",
            )
        if problem.varlen and options is not None and options.workspace_mb == 0:
            refuse("workspace", "packed sequences need a workspace; drop workspace_mb=0, or give them some MiB")
        if family(problem.arch) is None and problem.device_type == "cuda":
            refuse("arch", f"{problem.arch} has no kernel configuration; supported are {_served()}")
        if problem.arch == "interpreter" and problem.dtype == torch.bfloat16:
            refuse(
                "interpreter-dtype",
                "the inputs are torch.bfloat16, which Triton's interpreter multiplies wrongly; use torch.float16",
            )
        return found

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, is_causal: bool,
        attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, rng: torch.Tensor | None = None,
        window: tuple[int, int] = (-1, -1), softcap: float = 0.0, options: TritonBackend | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Output in the query's layout and LSE [B, Hq, Nq] (float32, natural logarithm)."""
        terms = Terms(scale, is_causal, window, softcap, attn_mask, dropout_p, rng)
        cap = _cap(options)
        arch = device_arch(query.device.type, query.device.index)
        with _on(query.device), _compiling("forward", arch, query, terms):
            if few_queries(query.shape[2], query.shape[3]) and cap:
                from . import decode

                return decode.forward(query, key, value, terms, arch=arch, cap=cap)
            if cap < _needed(query, key, "forward"):
                from . import fused

                return fused.forward(query, key, value, terms, arch=arch)
            from . import dense

            return dense.forward(query, key, value, terms, arch=arch, cap=cap)

    def backward(
        self, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, scale: float, is_causal: bool,
        needs: tuple[bool, bool, bool, bool], attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
        rng: torch.Tensor | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        options: TritonBackend | None = None,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """(dQ, dK, dV, dMask), None where not needed; ``out`` and ``lse`` may be any forward's of the same call."""
        terms = Terms(scale, is_causal, window, softcap, attn_mask, dropout_p, rng)
        cap = _cap(options)
        arch = device_arch(query.device.type, query.device.index)
        with _on(query.device), _compiling("backward", arch, query, terms):
            needed = _needed(query, key, "backward")
            # A stored dS has the softcap's slope in it, which the gradient of the mask has not.
            if cap < needed or (softcap and needs[3]):
                from . import fused

                return fused.backward(
                    grad_out, grad_lse, query, key, value, out, lse, terms, needs=needs, arch=arch
                )  # fmt: skip
            from . import dense

            mine = needs
            if needs[3] and attn_mask is not None:
                held = dense.mask_sum_bytes(attn_mask, query, key)
                if held > min(cap // 2, cap - needed):
                    mine = (*needs[:3], False)
            whole_rows = options is None or not options.merged
            grads = dense.backward(
                grad_out, grad_lse, query, key, value, out, lse, terms, needs=mine, arch=arch, cap=cap,
                whole_rows=whole_rows,
            )  # fmt: skip
            if mine != needs:  # sums of the mask's size in float32 do not fit: what computes them again needs none
                from . import fused

                only = (False, False, False, True)
                mask_grad = fused.backward(
                    grad_out, grad_lse, query, key, value, out, lse, terms, needs=only, arch=arch
                )[3]  # fmt: skip
                grads = (*grads[:3], mask_grad)
            return grads

    def varlen_forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor, *, max_seqlen_q: int, max_seqlen_k: int, scale: float, is_causal: bool,
        dropout_p: float = 0.0, rng: torch.Tensor | None = None, window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0, options: TritonBackend | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Output [Tq, Hq, D] in the query's layout and LSE [Hq, Tq] of packed sequences."""
        from . import ragged

        terms = Terms(scale, is_causal, window, softcap, None, dropout_p, rng)
        arch = device_arch(query.device.type, query.device.index)
        with _on(query.device), _compiling("varlen forward", arch, query, terms):
            return _fitting(
                lambda max_q, max_k: ragged.forward(
                    query, key, value, cu_seqlens_q, cu_seqlens_k, terms, max_q=max_q, max_k=max_k, arch=arch,
                    cap=_cap(options),
                ),
                cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            )  # fmt: skip

    def varlen_backward(
        self, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor, *, max_seqlen_q: int, max_seqlen_k: int, scale: float, is_causal: bool,
        needs: tuple[bool, bool, bool], dropout_p: float = 0.0, rng: torch.Tensor | None = None,
        window: tuple[int, int] = (-1, -1), softcap: float = 0.0, options: TritonBackend | None = None,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """(dQ, dK, dV) of packed sequences, None where not needed."""
        from . import ragged

        terms = Terms(scale, is_causal, window, softcap, None, dropout_p, rng)
        arch = device_arch(query.device.type, query.device.index)
        with _on(query.device), _compiling("varlen backward", arch, query, terms):
            return _fitting(
                lambda max_q, max_k: ragged.backward(
                    grad_out, grad_lse, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, terms, needs=needs,
                    max_q=max_q, max_k=max_k, arch=arch, cap=_cap(options),
                    whole_rows=options is None or not options.merged,
                ),
                cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            )  # fmt: skip

    def estimate(self, problem: Problem) -> float:
        """About how many microseconds, from an H200: the host needs 230 for the launches of a forward and 350 more for
        those of a backward; then the GPU does 450 TFLOP/s over whole tiles, or reads 2.2 TB/s of keys and values. With
        few queries: 150 for two launches, and 3.9 TB/s."""
        product = problem.product_mflop(TILE)
        if problem.needs_grad:
            return max(580.0, product * 7.0 / 450.0)
        if few_queries(problem.len_q, problem.head_dim):
            return max(150.0, problem.cache_mb() / 3.9)
        return max(230.0, product * 2.0 / 450.0, problem.cache_mb() / 2.2)

    def warm(self, problem: Problem, options: TritonBackend | None = None) -> None:
        """Compile what ``problem`` needs by running it on random data of the smallest sizes that do."""
        device = torch.device(problem.device_type, problem.device_index or 0)
        group, head_dim = problem.heads_q // problem.heads_kv, problem.head_dim
        common: dict[str, Any] = {"scale": head_dim**-0.5, "is_causal": problem.is_causal, "options": options}
        k, v = (torch.randn((1, 1, 2048, head_dim), device=device, dtype=problem.dtype) for _ in range(2))
        q = torch.randn((1, group, 2048, head_dim), device=device, dtype=problem.dtype)
        for few, keys in ((1, 64), (1, 2048), (-(-64 // group), 64), (-(-64 // group), 2048)):
            self.forward(q[:, :, :few], k[:, :, :keys], v[:, :, :keys], **common)
        q, k, v = (x[:, :, :256] for x in (q, k, v))
        out, lse = self.forward(q, k, v, **common)
        if problem.needs_grad:
            needs = (True, True, True, False)
            self.backward(torch.randn_like(out), None, q, k, v, out, lse, needs=needs, **common)


def _fitting(
    run: Callable[[int, int], Result], cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int
) -> Result:
    """``run`` with bounds on the lengths; where they are so loose that the workspace does not hold what they allow,
    with the lengths themselves: read from the device, the only case in which a packed call waits for it."""
    from .ragged import DoesNotFitError

    try:
        return run(max_q, max_k)
    except DoesNotFitError:
        if cu_q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise
        longest_q, longest_k = torch.stack([(cu[1:] - cu[:-1]).amax() for cu in (cu_q, cu_k)]).tolist()
        if longest_q >= max_q and longest_k >= max_k:
            raise
        return run(max(min(longest_q, max_q), 1), max(min(longest_k, max_k), 1))


def _cap(options: TritonBackend | None) -> int:
    """Bytes of workspace for a call: the backend's own option, else the setting."""
    own = None if options is None else options.workspace_mb
    return workspace_bytes() if own is None else int(own * 2**20)


def _needed(query: torch.Tensor, key: torch.Tensor, direction: str) -> int:
    """Bytes of workspace that the two-phase kernels take at least."""
    b, h, n, d = query.shape
    return minimum_bytes(b * h, n, key.shape[2], d, direction)


def _on(device: torch.device) -> torch.cuda.device:
    """Triton launches on the current device; -1 leaves it alone (CPU tensors under the interpreter)."""
    index = device.index if device.type == "cuda" else None
    return torch.cuda.device(-1 if index is None else index)


_compiled: set[tuple[object, ...]] = set()
"""What this process has compiled (or loaded from Triton's cache), so that only a first call is announced."""


def _compiling(direction: str, arch: str, query: torch.Tensor, terms: Terms) -> AbstractContextManager[None]:
    """Says on the logger `ffpa_jit` (INFO) that a first call compiles, and afterwards how long it took."""
    context.ensure(query.device)
    key = direction, arch, query.shape[-1], query.dtype, terms.is_causal, terms.banded, terms.kinds
    if key in _compiled or arch == "interpreter":
        return nullcontext()
    _compiled.add(key)
    # What `ffpa_jit.warm` compiled goes to where Triton looks.
    bundle.serve(arch, query.shape[-1], str(query.dtype).removeprefix("torch."), direction.removeprefix("varlen "))
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


BACKEND = TritonKernels()
