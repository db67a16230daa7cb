"""What one attention call is: `Problem`, its static description, and the checks that decide whether it is one.

Nothing here reads tensor data or launches anything. All functions work on shapes, dtypes and flags, with SymInt sizes
too, and are plain enough for torch.compile to trace.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ffpa_jit import settings

__all__ = [
    "MAX_HEAD_DIM",
    "MIN_HEAD_DIM",
    "NO_WINDOW",
    "AttentionParams",
    "Call",
    "Mask",
    "Problem",
    "Refusal",
    "Rejection",
    "UnavailableError",
    "device_arch",
    "known",
    "shown",
    "with_nominal_sizes",
]

# SDPA's own kernels serve head dims up to 256; above 1024 nothing here does.
MIN_HEAD_DIM = 257
MAX_HEAD_DIM = 1024

NO_WINDOW = (-1, -1)
"""`window_size` that hides nothing."""

_HALF = (torch.float16, torch.bfloat16)


class AttentionParams(NamedTuple):
    """The options of a call that stand between a product of query and key and a probability, as plain numbers.

    `window`: how many keys before and after its own position a query sees, -1 for all. `varlen`: sequences packed into
    [T, H, D].
    """

    scale: float
    is_causal: bool = False
    window: tuple[int, int] = NO_WINDOW
    softcap: float = 0.0
    dropout_p: float = 0.0
    varlen: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a backend does not run a call.

    `code`: short and stable, for programs and for warning once ("dtype", "head_dim", "mask", "dropout", "device", ...).
    `reason`: one sentence with what came, what is allowed and what to do.
    """

    code: str
    reason: str


class UnavailableError(RuntimeError):
    """A backend that took a call finds that it cannot run it (its compiler failed, say); nothing was launched."""


def shown(number: float, form: str = "") -> str:
    """A number for a message, as `format` writes it; "a number" under a compiler, whose symbols have no format."""
    return "a number" if torch.compiler.is_compiling() else format(number, form)


def known(*sizes: int) -> bool:
    """Whether these are plain numbers: False if a compiler leaves one open. Adds no guard."""
    if not (torch.compiler.is_compiling() or any(isinstance(size, torch.SymInt) for size in sizes)):
        return True
    # Imports sympy, which a compiler has imported before. TorchDynamo shows symbolic sizes as ints.
    from torch.fx.experimental import symbolic_shapes

    if not hasattr(symbolic_shapes, "has_static_value"):  # before torch 2.9
        return False
    return all(symbolic_shapes.has_static_value(size) for size in sizes)


class Rejection(NamedTuple):
    """The contract does not allow the call: the exception that says so."""

    kind: type[Exception]
    message: str


@dataclass(frozen=True, slots=True)
class Problem:
    """The static description of one call with [B, H, N, D] tensors; sizes may be `torch.SymInt` while tracing.

    `mask_copies`: the mask cannot be seen as [B, Hq, Nq, Nkv] without O(N^2) memory. `mask_planes`: over how many
    batches and heads it differs. `window`: how many keys before and after its own position a query sees, -1 for all
    (the second always, if `is_causal`); `softcap`: the bound on the scores, 0 for none.

    `varlen`: sequences packed into [T, H, D]; then `batch` is 1 and the lengths are the totals, so that what is
    computed from them is an upper bound.
    """

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device_type: str
    device_index: int | None
    arch: str
    is_causal: bool
    has_mask: bool
    dropout_p: float
    needs_grad: bool
    mask_needs_grad: bool
    wants_lse: bool = False
    mask_copies: bool = False
    window: tuple[int, int] = NO_WINDOW
    softcap: float = 0.0
    varlen: bool = False
    mask_planes: int = 1

    @classmethod
    def from_tensors(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        window: tuple[int, int] = NO_WINDOW,
        softcap: float = 0.0,
    ) -> Problem:
        """The problem of a call with [B, H, N, D] tensors that has passed the checks; grad mode is read from torch."""
        grad = torch.is_grad_enabled()
        return cls(
            batch=query.shape[0],
            heads_q=query.shape[1],
            heads_kv=key.shape[1],
            len_q=query.shape[2],
            len_kv=key.shape[2],
            head_dim=query.shape[3],
            head_dim_v=value.shape[3],
            dtype=query.dtype,
            device_type=query.device.type,
            device_index=query.device.index,
            arch=device_arch(query.device.type, query.device.index),
            is_causal=is_causal,
            has_mask=attn_mask is not None,
            dropout_p=dropout_p,
            needs_grad=grad and (query.requires_grad or key.requires_grad or value.requires_grad),
            mask_needs_grad=grad and attn_mask is not None and attn_mask.requires_grad,
            window=window,
            softcap=softcap,
            mask_planes=1 if attn_mask is None else math.prod(attn_mask.shape[:-2]),
        )

    def group(self) -> int:
        """Query heads of a key head; 1 where there are none."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    def cache_mb(self) -> float:
        """MB of keys and values."""
        return 4.0e-6 * self.batch * self.heads_kv * self.len_kv * self.head_dim

    def product_mflop(self, tile: int) -> float:
        """MFLOP of one matrix product over all visible scores, in whole tiles of `tile` rows and keys."""
        rows, cols = -(-self.len_q // tile) * tile, -(-self.len_kv // tile) * tile
        product = 2.0e-6 * self.batch * self.heads_q * self.head_dim * rows * cols
        return product * 0.5 if self.is_causal else product


_NOMINAL_LENGTH, _NOMINAL_HEADS = 4096, 32


def with_nominal_sizes(problem: Problem) -> Problem:
    """`problem` with nominal numbers for the sizes that a compiler leaves open.

    A choice made from it adds no guard: one graph holds for every length, and exports for every length. Whether a query
    decodes is known nevertheless, because a compiler never leaves a size of 1 open.
    """
    changes: dict[str, int] = {}
    if not known(problem.batch):
        changes["batch"] = 1
    if not known(problem.heads_q, problem.heads_kv):
        changes["heads_q"] = _NOMINAL_HEADS
        changes["heads_kv"] = _NOMINAL_HEADS if problem.heads_q == problem.heads_kv else _NOMINAL_HEADS // 4
    if not known(problem.len_q):
        changes["len_q"] = _NOMINAL_LENGTH
    if not known(problem.len_kv):
        changes["len_kv"] = _NOMINAL_LENGTH
    if not known(problem.mask_planes):
        changes["mask_planes"] = 1
    return replace(problem, **changes) if changes else problem  # type: ignore[arg-type]


class Mask(NamedTuple):
    """What a decision may depend on in `attn_mask`; `copies` and `planes` are `Problem.mask_copies`, `.mask_planes`."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    copies: bool
    planes: int = 1


class Call(NamedTuple):
    """Everything about a call that a decision may depend on, hashable when the sizes are plain ints.

    Shapes are as the caller gave them; dtypes are those after autocast.
    """

    query_shape: Sequence[int]
    key_shape: Sequence[int]
    value_shape: Sequence[int]
    query_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    query_device: torch.device
    key_device: torch.device
    value_device: torch.device
    arch: str
    mask: Mask | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    needs_grad: bool
    wants_lse: bool = False
    window: tuple[int, int] = NO_WINDOW
    softcap: float = 0.0


def canonical_shape(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """`shape` as [B, H, N, D]: leading dims are joined into B, missing ones are 1, dim -3 is always the heads.

    That is how SDPA reads its arguments, so a 3-D tensor is [H, N, D].
    """
    batch = 1
    for size in shape[:-3]:
        batch = batch * size
    heads = shape[-3] if len(shape) > 2 else 1
    return batch, heads, shape[-2], shape[-1]


def describe(call: Call) -> Problem | Rejection:
    """The [B, H, N, D] problem that `call` states, or why the contract rejects it.

    For head dims above 256 only. `Rejection` carries a TypeError (dtypes) or a ValueError (shapes, flags, devices); the
    message names the argument, what came, what is allowed and what to do.
    """
    wrong = _wrong_dtype(call) or _wrong_device(call) or _wrong_rank(call)
    if wrong is not None:
        return wrong
    _, heads_q, len_q, head_dim = canonical_shape(call.query_shape)
    _, heads_kv, len_kv, head_dim_k = canonical_shape(call.key_shape)
    _, heads_v, len_v, head_dim_v = canonical_shape(call.value_shape)
    if head_dim_k != head_dim:
        return Rejection(
            ValueError,
            f"query has head dim {head_dim} and key {head_dim_k}; their last dimensions must be equal",
        )
    if len_v != len_kv:
        return Rejection(ValueError, f"key has {len_kv} positions and value {len_v}; they must have the same number")
    wrong = wrong_heads(heads_q, heads_kv, heads_v, call.enable_gqa) or _wrong_batch(call)
    if wrong is not None:
        return wrong
    if call.is_causal and len_kv < len_q:
        return Rejection(
            ValueError,
            f"is_causal=True with {len_q} queries and {len_kv} keys: the queries are aligned to the end of the keys, "
            "so there must be at least as many keys; drop the queries without a key, or pass an attn_mask",
        )
    if not 0.0 <= call.dropout_p <= 1.0:
        return Rejection(
            ValueError, f"dropout_p={shown(call.dropout_p)} is not a probability; pass a number from 0 to 1"
        )
    if call.mask is not None:
        wrong = _wrong_mask(call, call.mask)
        if wrong is not None:
            return wrong
    batch = 1
    for size in batch_shape(call.query_shape, call.key_shape, call.value_shape):
        batch = batch * size
    return Problem(
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        len_q=len_q,
        len_kv=len_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=call.query_dtype,
        device_type=call.query_device.type,
        device_index=call.query_device.index,
        arch=call.arch,
        is_causal=call.is_causal,
        has_mask=call.mask is not None,
        dropout_p=call.dropout_p,
        needs_grad=call.needs_grad,
        mask_needs_grad=call.mask is not None and call.mask.needs_grad,
        wants_lse=call.wants_lse,
        mask_copies=call.mask is not None and call.mask.copies,
        window=call.window,
        softcap=call.softcap,
        mask_planes=1 if call.mask is None else call.mask.planes,
    )


def batch_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The dims before [H, N, D] that `shapes` broadcast to; they must be known to be compatible."""
    rank = max(len(shape) for shape in shapes) - 3
    result = []
    for axis in range(-3 - rank, -3):
        size = 1
        for shape in shapes:
            if len(shape) >= -axis and shape[axis] != 1:
                size = shape[axis]
        result.append(size)
    return tuple(result)


def _wrong_dtype(call: Call) -> Rejection | None:
    query, key, value = call.query_dtype, call.key_dtype, call.value_dtype
    if query != key or query != value:
        return Rejection(
            TypeError,
            f"query, key and value have dtypes {query}, {key} and {value}; they must be the same: cast them, or run "
            "under torch.autocast",
        )
    return None


def dtype_rejection(dtype: torch.dtype, head_dim: int) -> Rejection | None:
    """The TypeError for a head dim above 256 in a dtype other than fp16 and bf16."""
    if dtype in _HALF:
        return None
    return Rejection(
        TypeError,
        f"query has dtype {dtype} and head dim {head_dim}; above head dim 256 the inputs must be torch.float16 or "
        "torch.bfloat16: cast them, run under torch.autocast, or call torch's scaled_dot_product_attention",
    )


def _wrong_device(call: Call) -> Rejection | None:
    query, key, value = call.query_device, call.key_device, call.value_device
    if query != key or query != value:
        return Rejection(ValueError, f"query, key and value are on {query}, {key} and {value}; move them to one device")
    return None


def _wrong_rank(call: Call) -> Rejection | None:
    if len(call.query_shape) < 2 or len(call.key_shape) < 2 or len(call.value_shape) < 2:
        return Rejection(
            ValueError,
            f"query, key and value have {len(call.query_shape)}, {len(call.key_shape)} and {len(call.value_shape)} "
            "dimensions; pass tensors of shape [batch, heads, length, head_dim]",
        )
    return None


def wrong_heads(heads_q: int, heads_kv: int, heads_v: int, enable_gqa: bool) -> Rejection | None:
    if heads_v != heads_kv:
        return Rejection(
            ValueError, f"key has {heads_kv} heads and value {heads_v}; they must have the same number of heads"
        )
    if heads_q == heads_kv:
        return None
    if not enable_gqa:
        return Rejection(
            ValueError,
            f"query has {heads_q} heads and key/value {heads_kv}; pass enable_gqa=True for grouped-query attention",
        )
    if heads_kv == 0 or heads_q % heads_kv != 0:
        return Rejection(
            ValueError,
            f"enable_gqa=True with {heads_q} query heads and {heads_kv} key/value heads; the first must be a multiple "
            "of the second",
        )
    return None


def _wrong_batch(call: Call) -> Rejection | None:
    shapes = (call.query_shape, call.key_shape, call.value_shape)
    whole = batch_shape(*shapes)
    for shape in shapes:
        for axis in range(-3 - len(whole), -3):
            if len(shape) >= -axis and shape[axis] != 1 and shape[axis] != whole[axis + 3]:
                return Rejection(
                    ValueError,
                    f"query, key and value have shapes {list(call.query_shape)}, {list(call.key_shape)} and "
                    f"{list(call.value_shape)}; their batch dimensions must be equal or 1",
                )
    return None


def _wrong_mask(call: Call, mask: Mask) -> Rejection | None:
    if mask.dtype not in (torch.bool, call.query_dtype, torch.float32):
        return Rejection(
            TypeError,
            f"attn_mask has dtype {mask.dtype}; it must be torch.bool (True: the key is seen), or "
            f"{call.query_dtype} like the query or torch.float32 (added to the scores)",
        )
    if mask.device != call.query_device:
        return Rejection(
            ValueError,
            f"attn_mask is on {mask.device} and the query on {call.query_device}; move them to one device",
        )
    _, heads_q, len_q, _ = canonical_shape(call.query_shape)
    scores: list[int] = [*batch_shape(call.query_shape, call.key_shape, call.value_shape), heads_q, len_q]
    scores.append(call.key_shape[-2])
    rank = max(len(call.query_shape), len(call.key_shape), len(call.value_shape))
    scores = scores[-rank:]  # two dims have no heads
    shape = mask.shape
    fits = 2 <= len(shape) <= rank
    if fits:
        for axis in range(-len(shape), 0):
            fits = fits and (shape[axis] == 1 or shape[axis] == scores[axis])
    if fits:
        return None
    return Rejection(
        ValueError,
        f"attn_mask has shape {list(shape)} and the scores {scores} (from query {list(call.query_shape)} and key "
        f"{list(call.key_shape)}); the mask must broadcast to the scores: at least 2 dimensions and no more than they "
        "have, each, counted from the last, equal or 1",
    )


def device_arch(device_type: str, device_index: int | None) -> str:
    """The architecture kernels would be built for: "sm_90", "gfx942", "cpu", "interpreter", or "unknown".

    CPU tensors mean "interpreter" while `TRITON_INTERPRET=1`. A CUDA device is asked once a process.
    """
    if device_type == "cuda":
        try:
            return _cuda_arch(device_index)
        except (RuntimeError, AssertionError):
            # A fake CUDA tensor on a machine without a device: describable, not runnable.
            return "unknown"
    if device_type == "cpu" and settings.interpreter():
        return "interpreter"
    return device_type


@functools.cache
def _cuda_arch(device_index: int | None) -> str:
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device_index).gcnArchName
        return name.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"sm_{major}{minor}"


# A constant under torch.compile: what torch.compiler.assume_constant_result sets, without importing the compiler.
device_arch._dynamo_marked_constant = True  # type: ignore[attr-defined]
