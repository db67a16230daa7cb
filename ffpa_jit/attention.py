"""`ffpa_attn_func`, the public function, and `explain`, which tells what it would do.

A call whose plan is cached is launched at once. Any other becomes a `Request`, is checked and decided, and its plan is
kept once it has run. Up to head dim 256 a call goes to SDPA as it was made.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_jit import arguments, dispatch, masks, ops, plan, plan_table, sdpa, settings
from ffpa_jit.backends import NAMES, Backend
from ffpa_jit.problem import NO_WINDOW, Problem, Refusal, UnavailableError, batch_shape
from ffpa_jit.request import SMALL, Request, is_small, key_layout, mask_layout, prepared

__all__ = ["BackendChoice", "Window", "explain", "ffpa_attn_func"]

BackendChoice = str | Backend | None
Window = tuple[int | None, int | None] | None

# What may stand in a plan key. A tensor of one element is a number as well, but not the same one at the next call.
_NUMBERS = frozenset((int, float, bool))

_NAME = "ffpa_attn_func"
_OPTIONS = "Its options are attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, window_size and softcap."


@overload
def ffpa_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: BackendChoice = None,
    forward_backend: BackendChoice = None,
    backward_backend: BackendChoice = None,
    return_lse: Literal[False] = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    **unsupported: Any,
) -> Tensor: ...


@overload
def ffpa_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: BackendChoice = None,
    forward_backend: BackendChoice = None,
    backward_backend: BackendChoice = None,
    return_lse: Literal[True],
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    **unsupported: Any,
) -> tuple[Tensor, Tensor]: ...


def ffpa_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,  # an int: torch.compile(dynamic=True) makes a symbol of a float and traces twice
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: BackendChoice = None,
    forward_backend: BackendChoice = None,
    backward_backend: BackendChoice = None,
    return_lse: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0,
    **unsupported: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query @ key^T) @ value, exactly: SDPA's signature, with fast kernels for head dims 257 to 1024.

    Up to head dim 256 the call goes to `scaled_dot_product_attention` as it was made.

    Args:
        query: [B, Hq, Nq, D], fp16 or bf16 when D > 256. Any strides. Other ranks are read as SDPA reads them: dim -3
            is the heads, the dims before it are the batch.
        key, value: [B, Hkv, Nkv, D] of the same dtype and device; may be the same tensor. Batch dims of size 1
            broadcast.
        attn_mask: bool (True: the key is seen), or added to the scaled scores: the inputs' dtype or fp32. Two
            dimensions or more, broadcast to [B, Hq, Nq, Nkv] from the right, as in SDPA; never expanded in memory.
            With `is_causal` or a window, both apply. An additive one may require a gradient, which has its shape: pass
            it as small as it is, because one that was expanded before gets the gradient of the expanded size first.
        dropout_p: the probability that a weight is dropped, as in SDPA, whose draws it does not repeat.
        is_causal: query r sees the keys k <= r + Nkv - Nq: for D > 256 queries are aligned to the end of the keys, on
            the SDPA fallback too. (Up to head dim 256 it has SDPA's own meaning.)
        scale: factor on the scores; None is 1 / sqrt(D). 0.0 is a scale like any other.
        enable_gqa: let Hq be a multiple of Hkv; key and value are not repeated in memory.
        backend: a name ("triton", "cuda", "cutedsl", "sdpa") or a Backend object for the directions it has; None lets
            the dispatcher choose. A named backend runs or raises; it never falls back.
        forward_backend, backward_backend: the same for one direction; they win over `backend`.
        return_lse: also return the log-sum-exp of the scaled scores: fp32, natural logarithm, [B, Hq, Nq], -inf for a
            row without keys. It is differentiable.
        window_size: (left, right): query r, which stands at the key p = r + Nkv - Nq, sees the keys from p - left to
            p + right; -1 (or None) for no limit. `is_causal` makes right 0. As in FlashAttention, for D > 256 only.
        softcap: a number above 0 bounds the scaled scores: softcap * tanh(score / softcap), before attn_mask is added.
            For D > 256 only.

    Returns:
        out: [B, Hq, Nq, D] in the query's dtype and memory layout; or (out, lse) with `return_lse=True`.

    Raises:
        TypeError: dtypes other than fp16 and bf16 (D > 256) or not the same; a mask of another dtype; a backend of a
            wrong type; an unknown keyword.
        ValueError: shapes that do not fit, is_causal=True with Nkv < Nq, Hq != Hkv without enable_gqa, a mask on
            another device, a negative window or softcap, an unknown backend, `CUDABackend(acc="f16")` with bf16 inputs.
        NotImplementedError: a named backend does not run the call; `return_lse=True` or a softcap where only SDPA would
            run it, and what SDPA can only do with a mask of Nq x Nkv (a window, is_causal together with attn_mask)
            where that is larger than `FFPA_JIT_WORKSPACE_MB`; a fallback under `FFPA_JIT_STRICT=1`; options that other
            attention functions have (alibi_slopes, sinks, score_mod, ...). The message lists every reason.

        While installed as `torch.nn.functional.scaled_dot_product_attention`, a call that SDPA accepts does not raise:
        it goes to SDPA.
    """
    plan_key: Any = None
    table: dict[Any, Any] = {}  # under a compiler nothing is looked up, and no guard on the table is wanted
    if (
        type(query) is type(key) is type(value) is Tensor
        and (attn_mask is None or type(attn_mask) is Tensor)
        and query.dim() == key.dim() == value.dim() == 4
        and not query.is_nested
        and query.shape[3] > 256
        and not unsupported
        and type(dropout_p) in _NUMBERS
        and (scale is None or type(scale) in _NUMBERS)
        and type(softcap) in _NUMBERS
        and (ops.unwatched(query, key, value) if attn_mask is None else ops.unwatched(query, key, value, attn_mask))
    ):
        if torch._C._is_any_autocast_enabled():
            query, key, value = arguments.autocast(query), arguments.autocast(key), arguments.autocast(value)
        plan_key = (
            query.shape, query.stride(), query.dtype, query.device, *key_layout(query, key, value), key.dtype,
            value.dtype, key.get_device(), value.get_device(),
            None if attn_mask is None else mask_layout(query, key, attn_mask), dropout_p, is_causal, scale, enable_gqa,
            return_lse, window_size, softcap, backend, forward_backend, backward_backend, _installed(),
            settings.workspace_text(), settings.interpreter_text(), sdpa.flash_enabled(),
            (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled(),
            attn_mask is not None and torch.is_grad_enabled(),
        )  # fmt: skip
        table = plan_table.current()
        try:
            found = table.get(plan_key)
        except TypeError:  # an argument that cannot be hashed: nothing is kept under it
            plan_key = found = None
        if found is not None:
            if attn_mask is not None:
                attn_mask = masks.to_4d(prepared(attn_mask), query.shape[:1], query.shape[0])
            try:
                out, lse = ops.attend(found, query, key, value, attn_mask, _draw(query) if dropout_p else None)
            except UnavailableError as error:
                dispatch.unavailable(found.forward_text, error, named=not (backend is forward_backend is None))
            else:
                return (out, lse) if return_lse else out  # type: ignore[return-value]
    if unsupported:
        arguments.reject(_NAME, unsupported, _OPTIONS)
    request = Request.make(
        query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        return_lse=return_lse, window_size=window_size, softcap=softcap,
        backends=(backend, forward_backend, backward_backend), any_lengths=_installed(),
    )  # fmt: skip
    return _run(request, table, plan_key)


def _run(request: Request, table: dict[Any, Any], plan_key: Any) -> Tensor | tuple[Tensor, Tensor]:
    """A call that has no cached plan. `plan_key`: what to keep its plan under in `table`; None: nothing."""
    small = is_small(request.query)
    foreign = None if small else request.foreign()
    if small or foreign is not None:
        return _by_sdpa(request, foreign)
    installed = _installed()
    if sdpa.math_only() and not request.named() and sdpa.runs(request.call()):
        return _fallback(request)  # the caller asked for its math path, which has second derivatives
    call = request.call()
    rejection, problem, choice = dispatch.decide(call, request.forward, request.backward, installed)
    if rejection is not None:
        if installed and not request.named() and request.forward is None and request.backward is None:
            refused = Refusal("call", rejection.message)
            dispatch.report_fallback("forward", dict.fromkeys(dispatch.PREFERENCE, (refused,)))
            return _fallback(request)
        raise rejection.kind(rejection.message)
    assert problem is not None  # for the type checker: a decision is a rejection or a choice
    assert choice is not None
    if choice.forward == "sdpa" and request.return_lse:
        raise NotImplementedError(
            "return_lse=True: SDPA returns no log-sum-exp, and it runs this call"
            + (": it was named" if request.forward is not None else dispatch.listed(choice.rejected))
        )
    falls_back = dispatch.fallback_of(choice, request.forward, request.backward)
    if falls_back is not None:
        dispatch.report_fallback(falls_back, choice.rejected)
    if choice.forward == "sdpa":
        return _fallback(request)
    try:
        # What falls back is reported, or refused, at every call.
        return _launch(request, problem, choice, table, plan_key if falls_back is None else None)
    except UnavailableError as error:
        dispatch.unavailable(choice.forward, error, named=request.forward is not None)
    return _run(request, table if plan_key is None else plan_table.current(), plan_key)


def _launch(
    request: Request, problem: Problem, choice: dispatch.Choice, table: dict[Any, Any], plan_key: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a call on the backends that were chosen, as [B, H, N, D] tensors."""
    query, key, value, mask = request.query, request.key, request.value, request.mask
    lead = batch_shape(query.shape, key.shape, value.shape)
    q, k, v = (_to_4d(tensor, lead, problem.batch) for tensor in (query, key, value))
    if mask is not None:
        mask = masks.to_4d(mask, lead, problem.batch)
    rng = _draw(query) if request.dropout_p > 0 else None
    params = request.params()
    plain = ops.unwatched(*((q, k, v) if mask is None else (q, k, v, mask)))
    if plain and 0 not in q.shape and k.shape[2]:  # of empty tensors no backend is asked: the operator answers
        # The plan of a call that asks for the LSE, or needs it for gradients, makes one.
        wants_lse = request.return_lse or bool(choice.backward_text)
        planned = plan.of(q, params, choice.forward_text, choice.backward_text, wants_lse)
        out, lse = ops.attend(planned, q, k, v, mask, rng)
        # Of broadcast batches the launches have other shapes than the call.
        if plan_key is not None and q is query and k is key and v is value:
            plan_table.store(table, plan_key, planned)
    else:
        out, lse = ops.flash_attn(
            q, k, v, mask, rng, params.scale, params.is_causal, params.dropout_p, *params.window, params.softcap,
            choice.forward_text, choice.backward_text,
        )  # fmt: skip
    rank = max(query.dim(), key.dim(), value.dim())
    if rank != 4:
        # Two dims have no heads either; more than four have several batch dims.
        shape = (problem.heads_q, problem.len_q) if rank > 2 else (problem.len_q,)
        out = out.reshape(*lead, *shape, problem.head_dim_v)
        lse = lse if lse is None else lse.reshape(*lead, *shape)
    return (out, lse) if request.return_lse else out  # type: ignore[return-value]


def _draw(query: Tensor) -> Tensor:
    """The two words that determine what dropout drops. Drawn out here, so that checkpointing, compilers and graph
    capture repeat the draw as they do any other. (The bounds are those of a range that is an int64 itself: compilers
    compute with it.)"""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=query.device)


def _by_sdpa(request: Request, foreign: Refusal | None) -> Tensor:
    """A call that no kernel is asked for: a small head dim, or tensors of a kind that is SDPA's (`foreign`)."""
    r = request
    error = r.beyond_sdpa(SMALL) if foreign is None else r.beyond_sdpa(foreign.reason, foreign.code)
    if error is not None:
        raise NotImplementedError(error)
    if r.attn_mask is not None and masks.is_causal_bias(r.attn_mask):
        return masks.sdpa_with_bias(
            r.query, r.key, r.value, r.attn_mask, r.dropout_p, r.is_causal, r.scale, r.enable_gqa
        )
    if foreign is None or r.query.is_nested:
        return sdpa.native(
            r.query, r.key, r.value, r.attn_mask, r.dropout_p, r.is_causal, scale=r.scale, enable_gqa=r.enable_gqa
        )
    if r.forward is None:
        dispatch.report_fallback("forward", dict.fromkeys(dispatch.PREFERENCE, (foreign,)))
    return _fallback(r)


def _fallback(request: Request) -> Tensor:
    r = request
    return sdpa.fallback(
        r.query, r.key, r.value, r.attn_mask, r.dropout_p, r.is_causal, r.scale, r.enable_gqa, r.window
    )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: BackendChoice = None,
    forward_backend: BackendChoice = None,
    backward_backend: BackendChoice = None,
    return_lse: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    **unsupported: Any,
) -> dispatch.Explanation:
    """What `ffpa_attn_func` would do with these arguments, without doing it: who would run it and why not the others.

    Takes what `ffpa_attn_func` takes. Needs no GPU and launches nothing; tensors on the "meta" device do as well. A
    call that would raise is explained too: see `Explanation.error`. Print the result, or read its fields.
    """
    try:
        arguments.reject(_NAME, unsupported, _OPTIONS)
        arguments.check_kinds(
            query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse
        )
        request = Request.make(
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            return_lse=return_lse, window_size=window_size, softcap=softcap,
            backends=(backend, forward_backend, backward_backend), any_lengths=_installed(),
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError) as wrong:
        kind = type(wrong).__name__
        return dispatch.Explanation("arguments of the wrong kind", None, None, {}, f"{kind}: {wrong}")
    small = is_small(query)
    foreign = None if small else request.foreign()
    summary = request.summary()
    if small or foreign is not None:
        reason = SMALL if foreign is None else foreign.reason
        error = request.beyond_sdpa(reason, "" if foreign is None else foreign.code)
        if error is None and foreign is not None and request.forward is None and settings.strict():
            error = f"{reason}; the call falls back to SDPA, and FFPA_JIT_STRICT=1 forbids that"
        others = {name: [reason] for name in NAMES if name != "sdpa"}
        if error is not None:
            return dispatch.Explanation(summary, None, None, others, f"NotImplementedError: {error}")
        return dispatch.Explanation(summary, "sdpa", "sdpa" if request.needs_grad() else None, others)
    if sdpa.math_only() and not request.named() and sdpa.runs(request.call()):
        others = {name: ["sdpa_kernel allows SDPA's math path only"] for name in NAMES if name != "sdpa"}
        return dispatch.Explanation(summary, "sdpa", "sdpa" if request.needs_grad() else None, others)
    return dispatch.explain_call(
        summary, request.call(), request.forward, request.backward, _installed(), request.return_lse
    )


def _installed() -> bool:
    """Whether this function stands in for `torch.nn.functional.scaled_dot_product_attention` right now."""
    return F.scaled_dot_product_attention is ffpa_attn_func


def _to_4d(tensor: Tensor, lead: tuple[int, ...], batch: int) -> Tensor:
    """`tensor` as [B, H, N, D]: batch dims broadcast to `lead` and joined. A view wherever one exists."""
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    if len(lead) == 0:
        return tensor.unsqueeze(0)
    if len(lead) == 1 and tensor.dim() == 4 and tensor.shape[0] == batch:
        return tensor
    tensor = tensor.expand(*lead, *tensor.shape[-3:])
    return tensor if len(lead) == 1 else tensor.reshape(batch, *tensor.shape[-3:])


# A constant under torch.compile: what torch.compiler.assume_constant_result sets, without importing the compiler.
# Whoever patches F retraces anyway, because the name that the traced code called has changed.
_installed._dynamo_marked_constant = True  # type: ignore[attr-defined]
