"""`ffpa_attn_varlen_func`: attention over sequences of different lengths, packed one after the other.

There is no fallback: what no backend runs is a NotImplementedError with every reason. No value of a tensor on a device
is read, so nothing synchronises and a compiled call holds for any lengths.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor

from ffpa_jit import arguments, dispatch, ops, ops_varlen, plan_table, settings
from ffpa_jit.attention import BackendChoice, Window
from ffpa_jit.backends import Backend, resolve
from ffpa_jit.problem import (
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    NO_WINDOW,
    Problem,
    UnavailableError,
    device_arch,
    shown,
    wrong_heads,
)

__all__ = ["bounds", "check", "ffpa_attn_varlen_func"]

_NAME = "ffpa_attn_varlen_func"
OPTIONS = "Its options are dropout_p, softmax_scale, causal, enable_gqa, return_lse, window_size and softcap."


def ffpa_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *,
    dropout_p: float = 0,  # an int: torch.compile(dynamic=True) makes a symbol of a float and traces twice
    softmax_scale: float | None = None,
    causal: bool = False,
    enable_gqa: bool = False,
    return_lse: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0,
    backend: BackendChoice = None,
    forward_backend: BackendChoice = None,
    backward_backend: BackendChoice = None,
    **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several packed sequences: FlashAttention's varlen function for head dims 257 to 1024.

    Args:
        q: [Tq, Hq, D], fp16 or bf16, any strides; the queries of sequence i are the rows `cu_seqlens_q[i]` to
            `cu_seqlens_q[i + 1]`.
        k, v: [Tk, Hkv, D] of the same dtype and device; may be the same tensor.
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], starting at 0 and never falling, on the same device;
            `cu_seqlens_k=None` is `cu_seqlens_q`. A sequence may be empty on either side. Their values are not checked
            (that would synchronise): malformed ones give NaN, never an access outside the tensors.
        max_seqlen_q, max_seqlen_k: no sequence is longer: an int, or a tensor of one element, which is read if it is on
            the CPU and not under a compiler. None, and any other tensor, means Tq or Tk.
        dropout_p: the probability that a weight is dropped.
        softmax_scale: factor on the scores; None is 1 / sqrt(D).
        causal: query r of a sequence with n queries and m keys sees its keys k <= r + m - n; a query that sees none
            gives 0.
        enable_gqa: let Hq be a multiple of Hkv; keys and values are not repeated in memory.
        return_lse: also return the log-sum-exp of the scaled scores.
        window_size: (left, right) around the key at which a query stands, r + m - n; -1 for no limit.
        softcap: a number above 0 bounds the scaled scores: softcap * tanh(score / softcap).
        backend, forward_backend, backward_backend: as in `ffpa_attn_func`.
        unsupported: `deterministic`, which the kernels always are, and `return_attn_probs=False` are accepted; so is
            None for any option that other attention functions have.

    Returns:
        out: [Tq, Hq, D] in the dtype and memory layout of q, 0 in rows that belong to no sequence; or (out, lse) with
        `return_lse=True`, lse being fp32 [Hq, Tq], natural logarithm, -inf for a query without keys, differentiable.

    Raises:
        TypeError: dtypes other than fp16 and bf16 or not the same, cu_seqlens that are not int32, arguments of the
            wrong kind, an unknown keyword.
        ValueError: shapes or devices that do not fit, Hq != Hkv without enable_gqa, a negative window, softcap or
            max_seqlen, dropout_p outside 0 to 1; a workspace that does not hold two rows of score tiles (in the
            backward: of all heads that share a key head).
        NotImplementedError: head dims outside 257 to 1024 or not a multiple of 8, an option that no kernel has, a call
            that no backend runs, tensor subclasses and forward-mode derivatives. The message lists every reason.
    """
    if unsupported:
        arguments.reject(_NAME, unsupported, OPTIONS)
    forward: Backend | None = None
    backward: Backend | None = None
    if not (backend is None and forward_backend is None and backward_backend is None):
        forward, backward = resolve(backend, forward_backend, backward_backend)
    arguments.check_tensors(q=q, k=k, v=v)
    arguments.check_flag("return_lse", return_lse)
    dropout_p = arguments.probability(dropout_p)
    q, k, v = arguments.autocast(q), arguments.autocast(k), arguments.autocast(v)
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    problem = check(
        (q, k, v), cu_seqlens_q, cu_k, causal, enable_gqa, window_size, softcap, dropout_p, bool(return_lse)
    )
    max_q, max_k = bounds(q, k, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = arguments.factor("softmax_scale", softmax_scale, problem.head_dim)
    tensors = q, k, v, cu_seqlens_q.contiguous(), cu_k.contiguous()
    options = max_q, max_k, scale, problem.is_causal, float(dropout_p), *problem.window, problem.softcap
    rng = None
    if dropout_p > 0:
        # Drawn out here, so that checkpointing, compilers and graph capture repeat the draw as they do any other.
        rng = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    out, lse = _run(problem, forward, backward, (*tensors, rng, *options))
    return (out, lse) if return_lse else out


def _choose(problem: Problem, forward: Backend | None, backward: Backend | None) -> dispatch.Choice:
    """`dispatch.choose`, kept in the plan table."""
    table, key = plan_table.current(), (problem, forward, backward, settings.workspace_text())
    found: dispatch.Choice | None = table.get(key)
    if found is None:
        found = dispatch.choose(problem, forward, backward)
        plan_table.store(table, key, found)
    return found


def _run(
    problem: Problem, forward: Backend | None, backward: Backend | None, inputs: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator's `inputs`, of which the backends are still missing."""
    plain = ops.unwatched(*inputs[:5])
    # Sizes of plain tensors are plain ints.
    choice = _choose(problem, forward, backward) if plain else dispatch.choose(problem, forward, backward)
    run = ops_varlen.attend if plain else ops_varlen.flash_attn_varlen
    try:
        result: tuple[Tensor, Tensor] = run(*inputs, choice.forward_text, choice.backward_text)
    except UnavailableError as error:
        dispatch.unavailable(choice.forward, error, named=forward is not None)
        return _run(problem, forward, backward, inputs)
    return result


def bounds(q: Tensor, k: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: Any, max_seqlen_k: Any) -> tuple[int, int]:
    """The two `max_seqlen` as ints; where keys and queries share their offsets, one of them says it for both."""
    if cu_seqlens_k is None and max_seqlen_k is None:
        max_seqlen_k = max_seqlen_q
    return _bound("max_seqlen_q", max_seqlen_q, q.shape[0]), _bound("max_seqlen_k", max_seqlen_k, k.shape[0])


def _bound(name: str, value: Any, total: int) -> int:
    """A `max_seqlen` argument as an int: what it says, or `total` where nothing can be known without waiting for it."""
    if value is None:
        return total
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} has shape {list(value.shape)}; pass an int, a tensor of one element, or None")
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} has dtype {value.dtype}; pass an int, an integer tensor of one element, or None")
        if value.device.type != "cpu" or not ops.unwatched(value):
            return total
        value = int(value)
    elif isinstance(value, bool) or not (isinstance(value, (int, torch.SymInt)) or hasattr(value, "__index__")):
        raise TypeError(f"{name} must be an int, a tensor of one element, or None, not {type(value).__name__}")
    elif type(value) is not int and not isinstance(value, torch.SymInt):
        value = operator.index(value)
    # Under a compiler it may be a symbol that no comparison may be made with.
    if torch.compiler.is_compiling():
        return cast(int, value)
    if value < 0:
        raise ValueError(f"{name} is {value}; it is the length of the longest sequence, 0 or more")
    # Operators take no more than 64 bits, and Triton has another kernel for more than 32.
    return min(cast(int, value), 2**31 - 1)


def check(
    tensors: tuple[Tensor, Tensor, Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    enable_gqa: bool,
    window_size: Any,
    softcap: Any,
    dropout_p: float = 0.0,
    wants_lse: bool = False,
    needs_grad: bool = False,
) -> Problem:
    """The problem of a call with packed tensors; raises what `ffpa_attn_varlen_func` documents for one that is none.

    `needs_grad`: gradients are needed whatever the tensors say.
    """
    q, k, v = tensors
    arguments.check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    foreign = arguments.foreign(q, k, v, cu_seqlens_q, cu_seqlens_k)
    if foreign is not None:
        raise NotImplementedError(f"packed sequences are for plain tensors and reverse mode: {foreign.reason}")
    for name, flag in (("causal", causal), ("enable_gqa", enable_gqa)):
        arguments.check_flag(name, flag)
    window, cap = arguments.window(window_size), arguments.softcap(softcap)
    _check_inputs(q, k, v, bool(enable_gqa))
    for name, cu_seqlens, rows in (("cu_seqlens_q", cu_seqlens_q, q), ("cu_seqlens_k", cu_seqlens_k, k)):
        _check_offsets(name, cu_seqlens, rows)
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise ValueError(
            f"cu_seqlens_q has length {cu_seqlens_q.shape[0]} and cu_seqlens_k {cu_seqlens_k.shape[0]}; both have one "
            "more than there are sequences: repeat an offset where one is empty"
        )
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p={shown(dropout_p)} is not a probability; pass a number from 0 to 1")
    return Problem(
        batch=1,
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        len_q=q.shape[0],
        len_kv=k.shape[0],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        dtype=q.dtype,
        device_type=q.device.type,
        device_index=q.device.index,
        arch=device_arch(q.device.type, q.device.index),
        is_causal=bool(causal),
        has_mask=False,
        dropout_p=dropout_p,
        needs_grad=needs_grad or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)),
        mask_needs_grad=False,
        wants_lse=wants_lse,
        window=(window[0], -1) if causal else window,
        softcap=cap,
        varlen=True,
    )


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; pass [tokens, heads, head_dim], sequence after sequence"
            )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise TypeError(
            f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be the same: cast them, or run "
            "under torch.autocast"
        )
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"q has dtype {q.dtype}; pass torch.float16 or torch.bfloat16, or run under torch.autocast")
    if q.device != k.device or q.device != v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"q has head dim {q.shape[2]} and k {k.shape[2]}; their last dimensions must be equal")
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"k has {k.shape[0]} tokens and v {v.shape[0]}; they must have the same number")
    wrong = wrong_heads(q.shape[1], k.shape[1], v.shape[1], enable_gqa)
    if wrong is not None:
        raise wrong.kind(wrong.message)
    head_dim = q.shape[2]
    if head_dim < MIN_HEAD_DIM:
        raise NotImplementedError(
            f"head dim {head_dim}: packed sequences are served from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}; call "
            "flash_attn.flash_attn_varlen_func, which serves up to 256"
        )
    if head_dim > MAX_HEAD_DIM or head_dim % 8 != 0 or v.shape[2] != head_dim:
        raise NotImplementedError(
            f"head dim {head_dim} of q and k and {v.shape[2]} of v: packed sequences are served with the same for all, "
            f"a multiple of 8 up to {MAX_HEAD_DIM}; pad with zeros, pass softmax_scale={head_dim}**-0.5 and cut the "
            "output"
        )


def _check_offsets(name: str, cu_seqlens: Tensor, rows: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {cu_seqlens.dtype}; it must be torch.int32: {name}.to(torch.int32)")
    if cu_seqlens.dim() != 1:
        raise ValueError(f"{name} has shape {list(cu_seqlens.shape)}; it has one dimension, [sequences + 1]")
    if cu_seqlens.device != rows.device:
        raise ValueError(f"{name} is on {cu_seqlens.device} and q on {rows.device}; move it there")
    length = cu_seqlens.shape[0]
    if length < 1 or (length == 1 and rows.shape[0] > 0):
        raise ValueError(
            f"{name} has length {length} and there are {rows.shape[0]} tokens; pass the offsets of all sequences and "
            "the end of the last: [0, ..., total]"
        )
