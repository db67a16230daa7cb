"""The Triton backend's verbs (see ``registry.Implementation``).

Importing this module does not import Triton; the first launch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ffpa_jit.problem import AttentionParams, Problem, Refusal
from ffpa_jit.triton import archive
from ffpa_jit.triton.configs import FAMILIES, family, has_one_launch
from ffpa_jit.triton.schedule import LEAST_KEYS, TILE, few_queries, one_launch_serves

if TYPE_CHECKING:
    from ffpa_jit.backends import TritonBackend

__all__ = ["BACKEND", "TritonKernels"]


def _served() -> str:
    return ", ".join(sorted(arch for members in FAMILIES.values() for arch in members if arch != "interpreter"))


class TritonKernels:
    """Dense attention on two-phase Triton kernels, for NVIDIA GPUs from sm_80 and AMD's CDNA 2-4 and RDNA 3-4."""

    name = "triton"
    store = archive.STORE

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

    def plan_forward(self, params: AttentionParams, options: TritonBackend | None, wants_lse: bool) -> Any:
        """See ``registry.Implementation``: output in the query's layout and LSE (float32, natural logarithm)."""
        from ffpa_jit.triton import plans

        return (plans.VarlenForward if params.varlen else plans.Forward)(params, options)

    def plan_backward(self, params: AttentionParams, options: TritonBackend | None, needs: tuple[bool, ...]) -> Any:
        """The gradients that are needed; ``out`` and ``lse`` may be any forward's of the same call."""
        from ffpa_jit.triton import plans

        return (plans.VarlenBackward if params.varlen else plans.Backward)(params, options, needs)

    def predict_us(self, problem: Problem) -> float:
        """About how many microseconds, from an H200 (bench/NOTES.md).

        The host takes 30 for a call of one launch, 40 for a decoding step and 50 for others; the GPU 20 for four
        launches and then 450 TFLOP/s over whole tiles, 150 in the one launch of a small call, and reads 2.2 TB/s of
        keys and values, for few queries 3.9.
        """
        product = problem.product_mflop(TILE)
        backward = 30.0 + product * 5.0 / 450.0 if problem.needs_grad or problem.mask_needs_grad else 0.0
        if few_queries(problem.len_q, problem.head_dim):
            return backward + max(30.0 if problem.len_kv <= 2 * LEAST_KEYS else 40.0, problem.cache_mb() / 3.9)
        heads = problem.batch * problem.heads_q
        if has_one_launch(problem.arch) and one_launch_serves(
            heads, problem.len_q, problem.len_kv, problem.head_dim, 132
        ):
            return backward + max(30.0, product * 2.0 / 150.0)
        return backward + max(50.0, 20.0 + product * 2.0 / 450.0, problem.cache_mb() / 2.2)

    def kernels(self, arch: str, head_dim: int, dtype: str, **options: Any) -> list[archive.TritonSpec]:
        """Those of the forward and those of the backward, in an archive each."""
        return [archive.spec_for(arch, head_dim, dtype, direction) for direction in archive.DIRECTIONS]

    def load(self, spec: archive.TritonSpec, device: int) -> None:
        """Run what an archive is for, with a causal mask and without, on random data of the smallest sizes that do."""
        where, dtype = torch.device("cuda", device), getattr(torch, spec.dtype)
        long = [torch.randn((1, 1, 2048, spec.head_dim), device=where, dtype=dtype) for _ in range(3)]
        for is_causal in (False, True):
            params = AttentionParams(spec.head_dim**-0.5, is_causal)
            forward = self.plan_forward(params, None, True)
            for few, keys in ((1, 64), (1, 2048), (64, 64), (64, 2048)):
                forward(long[0][:, :, :few], long[1][:, :, :keys], long[2][:, :, :keys])
            for length in (128, 640):  # one launch, two phases
                q, k, v = (x[:, :, :length] for x in long)
                out, lse = forward(q, k, v)
            if spec.direction == "backward":
                backward = self.plan_backward(params, None, (True, True, True, False))
                backward(torch.randn_like(out), None, q, k, v, None, None, out, lse)


BACKEND = TritonKernels()
"""The Triton backend."""
