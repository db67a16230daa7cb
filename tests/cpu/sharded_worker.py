"""Run as a program: two processes compare calls of DTensors with those of whole tensors; the first prints them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank: int, store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    from ffpa_jit import explain, ffpa_attn_func, ffpa_attn_varlen_func, registry
    from tests.cpu.fakes import FakeTriton

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    stack = contextlib.ExitStack()
    stack.enter_context(registry.replaced("triton", FakeTriton()))
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).half()

    def letter(tensor: torch.Tensor) -> str:
        (place,) = tensor.placements
        if isinstance(place, Shard):
            return f"S({place.dim})"
        return "P" if isinstance(place, Partial) else "R" if isinstance(place, Replicate) else "?"

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    def sharded(tensors, places, grad=True):
        return [
            distribute_tensor(x, mesh, [p]).requires_grad_(grad and x.is_floating_point())
            for x, p in zip(tensors, places, strict=True)
        ]

    def close(got, expected) -> bool:
        pairs = zip(got, expected, strict=True)
        return all(torch.allclose(a.full_tensor(), b, rtol=1e-2, atol=1e-2) for a, b in pairs)

    def compare(name, function, tensors, places) -> None:
        whole = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
        parts = sharded(tensors, places)
        results, gradients = [], []
        for inputs in (parts, whole):
            out, lse = function(*inputs)
            loss = out.float().square().sum() + lse.sum()
            gradients.append(torch.autograd.grad(loss, [x for x in inputs if x.requires_grad]))
            results.append((out, lse))
        right = close(results[0], results[1]) and close(*gradients)
        say(
            f"{name}: {letter(results[0][0])} | {' '.join(map(letter, gradients[0]))} | {'right' if right else 'wrong'}"
        )

    def dense(q, k, v, mask=None):
        return ffpa_attn_func(q, k, v, mask, is_causal=True, enable_gqa=True, return_lse=True)

    def packed(q, k, v, cu):
        return ffpa_attn_varlen_func(q, k, v, cu, causal=True, enable_gqa=True, return_lse=True)

    heads, batch, whole = Shard(1), Shard(0), Replicate()
    q, k, v = half(2, 4, 3, 264), half(2, 2, 5, 264), half(2, 2, 5, 264)
    compare("heads, grouped", dense, (q, k, v), (heads,) * 3)
    tensors = q, k[:, :1].contiguous(), v[:, :1].contiguous(), half(1, 4, 3, 5)
    compare("heads of one key head, a mask of each", dense, tensors, (heads, whole, whole, whole))
    compare("batch, a mask for all", dense, (q, k, v, half(3, 5)), (batch, batch, batch, whole))
    compare(
        "groups that do not divide", dense, (half(1, 6, 3, 264), half(1, 3, 5, 264), half(1, 3, 5, 264)), (heads,) * 3
    )
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    compare("packed heads", packed, (half(5, 4, 264), half(5, 2, 264), half(5, 2, 264), cu), (heads,) * 3 + (whole,))

    tensors = half(2, 2, 3, 264), half(2, 2, 5, 264), half(2, 2, 5, 264)
    parts = sharded(tensors, (heads,) * 3, grad=False)
    try:
        ffpa_attn_func(*parts, dropout_p=0.5, backend="triton")
    except NotImplementedError as refused:
        say(f"dropout: {'subclass' if '[subclass]' in str(refused) else refused}")
    assert explain(*parts).error is None
    stack.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (str(Path(folder) / "store"),), 2)
