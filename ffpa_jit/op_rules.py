"""How the operators behave under what transforms or counts them: `torch.func.vmap`, DTensor, FLOP counters.

One rule an operator and kind, beside the operators' own (fakes and derivatives, in `ops`). Those of vmap are registered
with the operators. Those of DTensor and the FLOP formulas need modules that take seconds to import, so `prepare`
registers them once somebody else has imported these modules.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["is_sharded", "prepare", "register_vmap", "replicated"]

_OPS = torch.ops.ffpa_jit


def prepare() -> None:
    """Before an operator is called: register what the modules that are imported by now need."""
    if torch._C._len_torch_dispatch_stack() and "torch.utils.flop_counter" in sys.modules:
        _count_flops()
    if not _sharding_rules and hasattr(sys.modules.get("torch.distributed.tensor"), "DTensor"):
        _register_sharding()


# vmap. A rule gets each tensor with the dim that is mapped over (None: all share the tensor), calls the operator, and
# returns its results with that dim in front. With dropout each call has its own words of randomness, and its index
# decides what is dropped: then, and where joining would copy a mask, there is one call for each.

_Dims = Sequence[int | None]
_Tensors = Sequence[Tensor | None]
_Mapped = tuple[tuple[Tensor, ...], tuple[int | None, ...]]


def register_vmap(library: torch.library.Library, name: str) -> None:
    """Register the rule of an operator that is defined."""
    torch.library.register_vmap(f"ffpa_jit::{name}", _VMAP_RULES[name], lib=library)


def _forward(info: Any, dims: _Dims, *inputs: Any) -> _Mapped:
    size, tensors = info.batch_size, _in_front(inputs[:4], dims)
    mask, dropout_p = tensors[3], inputs[7]
    if dropout_p > 0 or not _joins(mask, dims[3], _batch(tensors[0], dims[0])):
        return _one_by_one(_OPS.flash_attn.default, size, dims, inputs)
    joined = *_join(tensors[:3], dims, size), _join_mask(mask, dims[3])
    results = _OPS.flash_attn.default(*joined, *inputs[4:])
    return tuple([_split(result, size) for result in results]), (0, 0)


def _backward(info: Any, dims: _Dims, *inputs: Any) -> _Mapped:
    size, tensors = info.batch_size, _in_front(inputs[:9], dims)
    mask, dropout_p, needs = tensors[5], inputs[11], inputs[15]
    batch = _batch(tensors[2], dims[2])
    # A mask that is shared, or broadcasts over the batch, would get one gradient for all.
    shared = needs[3] and mask is not None and (dims[5] is None or mask.shape[1] != batch)
    if dropout_p > 0 or shared or not _joins(mask, dims[5], batch):
        return _one_by_one(_OPS.flash_attn_backward.default, size, dims, inputs, needs)
    grads = _OPS.flash_attn_backward.default(
        *_join(tensors[:5], dims, size), _join_mask(mask, dims[5]), inputs[6],
        *_join(tensors[7:9], dims[7:], size), *inputs[9:],
    )  # fmt: skip
    return _needed(grads, needs, size)


def _varlen_forward(info: Any, dims: _Dims, *inputs: Any) -> _Mapped:
    size, dropout_p = info.batch_size, inputs[10]
    if dropout_p > 0 or dims[3] is not None or dims[4] is not None:
        return _one_by_one(_OPS.flash_attn_varlen.default, size, dims, inputs)
    # Of the same lengths: what is mapped over becomes heads.
    joined = _join(_in_front(inputs[:3], dims), dims, size, 1)
    out, lse = _OPS.flash_attn_varlen.default(*joined, *inputs[3:])
    return (_split(out, size, 1), _split(lse, size)), (0, 0)


def _varlen_backward(info: Any, dims: _Dims, *inputs: Any) -> _Mapped:
    size, dropout_p, needs = info.batch_size, inputs[14], inputs[18]
    if dropout_p > 0 or dims[5] is not None or dims[6] is not None:
        return _one_by_one(_OPS.flash_attn_varlen_backward.default, size, dims, inputs, needs)
    tensors = _in_front(inputs[:10], dims)
    packed, of_rows = (0, 2, 3, 4, 8), (1, 9)
    grad_out, query, key, value, out = _join([tensors[i] for i in packed], [dims[i] for i in packed], size, 1)
    grad_lse, lse = _join([tensors[i] for i in of_rows], [dims[i] for i in of_rows], size)
    grads = _OPS.flash_attn_varlen_backward.default(
        grad_out, grad_lse, query, key, value, *inputs[5:8], out, lse, *inputs[10:]
    )
    return _needed(grads, needs, size, 1)


_VMAP_RULES = {
    "flash_attn": _forward,
    "flash_attn_backward": _backward,
    "flash_attn_varlen": _varlen_forward,
    "flash_attn_varlen_backward": _varlen_backward,
}


def _in_front(tensors: _Tensors, dims: _Dims) -> list[Any]:
    """The tensors with their mapped dim in front."""
    return [
        tensor if tensor is None or dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=False)
    ]


def _batch(tensor: Tensor, dim: int | None) -> int:
    batch: int = tensor.shape[0 if dim is None else 1]
    return batch


def _join(tensors: _Tensors, dims: _Dims, size: int, at: int = 0) -> list[Any]:
    """Tensors whose mapped dim, in front, is joined with their dim `at`; those that are shared are repeated."""
    joined: list[Tensor | None] = []
    for tensor, dim in zip(tensors, dims, strict=False):
        if tensor is not None:
            if dim is None:
                tensor = tensor.expand(size, *tensor.shape)
            tensor = tensor.movedim(0, at).flatten(at, at + 1)
        joined.append(tensor)
    return joined


def _joins(mask: Tensor | None, dim: int | None, batch: int) -> bool:
    """Whether a mask, its mapped dim in front, serves the joined batch as it lies in memory."""
    if mask is None:
        return True
    if dim is None:
        return mask.shape[0] == 1
    return mask.shape[1] == batch and (batch == 1 or mask.stride(0) == batch * mask.stride(1))


def _join_mask(mask: Tensor | None, dim: int | None) -> Tensor | None:
    return mask if mask is None or dim is None else mask.flatten(0, 1)


def _split(tensor: Tensor, size: int, at: int = 0) -> Tensor:
    """What `_join` joined, with the mapped dim in front."""
    split: Tensor = tensor.unflatten(at, (size, tensor.shape[at] // size)).movedim(at, 0)
    return split


def _needed(grads: Sequence[Tensor], needs: Sequence[bool], size: int, at: int = 0) -> _Mapped:
    """The gradients split; those that are not needed are empty, and the same for all."""
    split = [_split(grad, size, at) if need else grad for grad, need in zip(grads, needs, strict=True)]
    return tuple(split), tuple([0 if need else None for need in needs])


def _one_by_one(
    op: Any, size: int, dims: _Dims, inputs: Sequence[Any], needs: Sequence[bool] = (True, True)
) -> _Mapped:
    """A call of `op` for each; results that `needs` does not ask for are empty, and the same for all."""

    def call(i: int) -> Any:
        # Lists have lists for dims, and are never mapped over.
        return op(*[x.select(dim, i) if isinstance(dim, int) else x for x, dim in zip(inputs, dims, strict=True)])

    calls = zip(*[call(i) for i in range(size)], strict=True)
    results = [torch.stack(each) if need else each[0] for each, need in zip(calls, needs, strict=True)]
    return tuple(results), tuple([0 if need else None for need in needs])


# DTensor. An operator runs on each rank's batches or heads; what is sharded otherwise is gathered before.

_sharding_rules: list[str] = []
"""The operators whose rules are registered."""


def is_sharded(*tensors: Any) -> bool:
    """Whether these are DTensors, all of them that are there, for which the operators have rules."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and all(tensor is None or isinstance(tensor, kind) for tensor in tensors)


def replicated(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, the same on every rank, as DTensor computes with it beside `like`; itself if that is a plain one."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    whole: Tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole


def _register_sharding() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for name, rule in (
        ("flash_attn", _shard_forward),
        ("flash_attn_backward", _shard_backward),
        ("flash_attn_varlen", _shard_varlen_forward),
        ("flash_attn_varlen_backward", _shard_varlen_backward),
    ):
        register_sharding(getattr(_OPS, name).default)(rule)
        _sharding_rules.append(name)


def _shard_forward(query: Any, key: Any, value: Any, mask: Any, rng: Any, *options: Any) -> Any:
    from torch.distributed.tensor import Replicate

    rest = [None if rng is None else Replicate(), *[None] * len(options)]
    ways = []
    for rows, keys, masks, _ in _ways(query, key, mask, (0, 1)):
        ways.append(([rows, rows], [rows, keys, keys, masks, *rest]))
    return ways


def _shard_backward(
    grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, mask: Any, rng: Any, out: Any, lse: Any,
    *options: Any,
) -> Any:  # fmt: skip
    from torch.distributed.tensor import Partial, Replicate

    needs = options[-2]
    whole = None if rng is None else Replicate()
    ways = []
    for rows, keys, masks, is_split in _ways(query, key, mask, (0, 1)):
        # What every rank has whole, and uses a part of, gets a part of its gradient there.
        grads = [Partial() if is_split and place == Replicate() else place for place in (rows, keys, keys, masks)]
        grads = [place if need and place is not None else Replicate() for place, need in zip(grads, needs, strict=True)]
        inputs = [rows, None if grad_lse is None else rows, rows, keys, keys, masks, whole, rows, rows]
        ways.append((grads, [*inputs, *[None] * len(options)]))
    return ways


def _shard_varlen_forward(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, rng: Any, *options: Any) -> Any:
    from torch.distributed.tensor import Replicate

    rest = [Replicate(), Replicate(), None if rng is None else Replicate(), *[None] * len(options)]
    ways = []
    for rows, keys, _, is_split in _ways(query, key, None, (1,)):
        ways.append(([rows, _of_lse(is_split)], [rows, keys, keys, *rest]))
    return ways


def _shard_varlen_backward(
    grad_out: Any, grad_lse: Any, query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, rng: Any, out: Any, lse: Any,
    *options: Any,
) -> Any:  # fmt: skip
    from torch.distributed.tensor import Partial, Replicate

    needs = options[-2]
    offsets = [Replicate(), Replicate(), None if rng is None else Replicate()]
    ways = []
    for rows, keys, _, is_split in _ways(query, key, None, (1,)):
        grads = [Partial() if is_split and place == Replicate() else place for place in (rows, keys, keys)]
        grads = [place if need else Replicate() for place, need in zip(grads, needs, strict=True)]
        lses = _of_lse(is_split)
        inputs = [rows, None if grad_lse is None else lses, rows, keys, keys, *offsets, rows, lses]
        ways.append((grads, [*inputs, *[None] * len(options)]))
    return ways


def _of_lse(is_split: bool) -> Any:
    """The placement of a packed LSE, [Hq, T]."""
    from torch.distributed.tensor import Replicate, Shard

    return Shard(0) if is_split else Replicate()


def _ways(query: Any, key: Any, mask: Any, dims: Sequence[int]) -> list[tuple[Any, Any, Any, bool]]:
    """Placements of what has query heads, of keys and values, and of the mask, and whether ranks have different parts.

    Everything whole; or a dim of batches or heads sharded. Grouped heads are sharded only into whole groups, but a
    single key head may be whole on every rank.
    """
    from torch.distributed.tensor import Replicate, Shard

    ways: list[tuple[Any, Any, Any, bool]] = [(Replicate(), Replicate(), None if mask is None else Replicate(), False)]
    for dim in dims:
        keys: Any = Shard(dim)
        if dim == 1 and query.shape[1] != key.shape[1]:
            if key.shape[1] == 1:
                keys = Replicate()
            elif not _divides(key.mesh, key.shape[1]):
                continue
        masks = None if mask is None else Replicate() if mask.shape[dim] == 1 else Shard(dim)
        ways.append((Shard(dim), keys, masks, True))
    return ways


def _divides(mesh: Any, heads: int) -> bool:
    """Whether any dims of the mesh shard so many heads evenly, those aside that shard them below one."""
    products = [
        math.prod(sizes) for count in range(1, mesh.ndim + 1) for sizes in itertools.combinations(mesh.shape, count)
    ]
    return all(heads % product == 0 for product in products if product <= heads)


# FLOP counters. The convention of torch.utils.flop_counter for SDPA: two products forward and five backward of every
# query with every key, whatever is hidden.


def _product_flop(query: Tensor, keys: int) -> int:
    """FLOP of one product of [..., N, D] queries with so many keys."""
    return 2 * query.numel() * keys


def _flop_forward(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> int:
    return 2 * _product_flop(query, key.shape[2])


def _flop_backward(grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> int:
    return 5 * _product_flop(query, key.shape[2])


def _varlen_product_flop(query: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> int:
    """The same for packed sequences; as in torch, of offsets without values, all are taken to be the longest."""
    if isinstance(cu_q, FakeTensor) or cu_q.is_meta:
        pairs = (cu_q.shape[0] - 1) * max_q * max_k
    else:
        pairs = int((cu_q.diff().long() * cu_k.diff().long()).sum())
    return 2 * query.shape[1] * query.shape[2] * pairs


def _flop_varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, rng: Any, max_q: int, max_k: int,
    *rest: Any, **options: Any,
) -> int:  # fmt: skip
    return 2 * _varlen_product_flop(query, cu_q, cu_k, max_q, max_k)


def _flop_varlen_backward(
    grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, rng: Any,
    out: Tensor, lse: Tensor, max_q: int, max_k: int, *rest: Any, **options: Any,
) -> int:  # fmt: skip
    return 5 * _varlen_product_flop(query, cu_q, cu_k, max_q, max_k)


_FLOP_FORMULAS = {
    "flash_attn": _flop_forward,
    "flash_attn_backward": _flop_backward,
    "flash_attn_varlen": _flop_varlen_forward,
    "flash_attn_varlen_backward": _flop_varlen_backward,
}


def _count_flops() -> None:
    """Register the formulas, also with the counters that are running: each has a copy of the registry of its time."""
    from torch.utils import flop_counter
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    formulas: dict[Any, Any] = {getattr(_OPS, name): formula for name, formula in _FLOP_FORMULAS.items()}
    for op, formula in formulas.items():
        if op not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):
            for op, formula in formulas.items():
                registry.setdefault(op, formula)
