"""The Triton backend's four verbs. Importing this module does not import Triton; the first launch does."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ..problem import MAX_HEAD_DIM, MIN_HEAD_DIM, Problem, Refusal, device_arch
from ..settings import workspace_bytes
from .configs import FAMILIES, family

if TYPE_CHECKING:
    from ..backends import TritonBackend

__all__ = ["BACKEND", "TritonKernels"]


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _served() -> str:
    return ", ".join(sorted(arch for members in FAMILIES.values() for arch in members if arch != "interpreter"))


def _minimum_bytes(problem: Problem, direction: str) -> int:
    """What one row of tiles needs beside the row vectors; a cap below it cannot be met (see ``schedule``)."""
    row_vectors = (1 if direction == "forward" else 2) * problem.batch * problem.heads_q * (problem.len_q + 127) * 4
    tile = 128 * 128 * 2
    if direction == "forward":
        return row_vectors + (problem.len_kv // 128 + 1) * (tile + 128 * 12) + (problem.len_q + 127) * 4
    pair = 2 * tile + 128 * 8
    return row_vectors + max((problem.len_kv // 128 + 1) * pair, pair + 2 * 128 * problem.head_dim * 4)


class TritonKernels:
    """Dense attention on two-phase Triton kernels, for NVIDIA GPUs from sm_80 and AMD's CDNA 2-4 and RDNA 3-4."""

    name = "triton"

    def refusals(self, problem: Problem, options: TritonBackend, *, direction: str) -> list[Refusal]:
        """Every reason why this backend does not run ``problem``; empty when it does."""
        found = []

        def refuse(code: str, reason: str) -> None:
            found.append(Refusal(code, reason))

        if not _installed():
            refuse("not-installed", "Triton is not installed; run `pip install triton` (CUDA builds of torch bring it)")
        if problem.device_type != "cuda" and problem.arch != "interpreter":
            refuse("device", f"tensors are on {problem.device_type}; the Triton kernels need a GPU (or TRITON_INTERPRET=1 for tests)")
        elif family(problem.arch) is None:
            refuse("arch", f"{problem.arch} has no kernel configuration; supported are {_served()}")
        if problem.dtype not in (torch.float16, torch.bfloat16):
            refuse("dtype", f"dtype is {problem.dtype}; float16 or bfloat16 is needed: cast the inputs or use torch.autocast")
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            refuse("head_dim", f"head dim is {problem.head_dim}; {MIN_HEAD_DIM} to {MAX_HEAD_DIM} is supported")
        if problem.head_dim % 8:
            refuse("head_dim_multiple", f"head dim is {problem.head_dim}; a multiple of 8 is needed: pad the last dimension with zeros")
        if problem.head_dim_v != problem.head_dim:
            refuse("head_dim_v", f"value has head dim {problem.head_dim_v}, query and key {problem.head_dim}; they must be equal")
        if problem.has_mask:
            refuse("mask", "attn_mask is given; masks are not built yet: use is_causal where that is what the mask says")
        if problem.dropout_p:
            refuse("dropout", f"dropout_p is {problem.dropout_p}; dropout is not built yet: pass 0.0")
        needed = _minimum_bytes(problem, direction)
        if needed > workspace_bytes():
            refuse(
                "workspace",
                f"the {direction} needs at least {needed / 2**20:.0f} MiB of workspace, the cap is "
                f"{workspace_bytes() / 2**20:.0f} MiB: raise FFPA_JIT_WORKSPACE_MB",
            )
        return found

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in the query's layout and LSE [B, Hq, Nq] (float32, natural logarithm)."""
        from . import dense

        arch = device_arch(query.device.type, query.device.index)
        with _on(query.device):
            return dense.forward(query, key, value, scale=scale, is_causal=is_causal, arch=arch)

    def backward(
        self, grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, scale: float, is_causal: bool,
        needs: tuple[bool, bool, bool],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """(dQ, dK, dV), None where not needed; ``out`` and ``lse`` may come from any forward of the same call."""
        from . import dense

        arch = device_arch(query.device.type, query.device.index)
        with _on(query.device):
            return dense.backward(
                grad_out, grad_lse, query, key, value, out, lse,
                scale=scale, is_causal=is_causal, needs=needs, arch=arch,
            )  # fmt: skip

    def warm(self, problem: Problem) -> None:
        """Compile what ``problem`` needs by running it once on random data of the smallest size that does."""
        device = torch.device(problem.device_type, problem.device_index)
        shape = (1, problem.heads_q // problem.heads_kv, 256, problem.head_dim)
        q = torch.randn(shape, device=device, dtype=problem.dtype)
        k, v = (torch.randn((1, 1, *shape[2:]), device=device, dtype=problem.dtype) for _ in range(2))
        out, lse = self.forward(q, k, v, scale=problem.head_dim**-0.5, is_causal=problem.is_causal)
        if problem.needs_grad:
            self.backward(
                torch.randn_like(out), None, q, k, v, out, lse,
                scale=problem.head_dim**-0.5, is_causal=problem.is_causal, needs=(True, True, True),
            )  # fmt: skip


def _on(device: torch.device) -> torch.cuda.device:
    """Triton launches on the current device; -1 leaves it alone (CPU tensors under the interpreter)."""
    return torch.cuda.device(device.index if device.type == "cuda" else -1)


BACKEND = TritonKernels()
