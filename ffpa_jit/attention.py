"""`ffpa_attn_func`, the public function, and `explain`, which tells what it would do.

Here a call is checked, brought to the form the kernels take, and handed to the operator or to SDPA. Order of events:
named backends are resolved; up to head dim 256 the call goes to SDPA as it was made; inputs are cast under autocast;
the call is checked and planned; [B, H, N, D] views of the inputs go to the operator.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ffpa_jit import arguments, dispatch, masks, ops, registry, repeats, sdpa, settings
from ffpa_jit.backends import NAMES, Backend, resolve
from ffpa_jit.problem import NO_WINDOW, Call, Mask, Refusal, UnavailableError, batch_shape, device_arch

__all__ = ["BackendChoice", "Window", "describe", "explain", "ffpa_attn_func"]

BackendChoice = str | Backend | None
Window = tuple[int | None, int | None] | None

_NAME = "ffpa_attn_func"
_OPTIONS = "Its options are attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse, window_size and softcap."

_SMALL = "head dims up to 256 are left to SDPA's own kernels"


@functools.lru_cache(maxsize=4096)
def _decide_cached(
    call: Call, forward: Backend | None, backward: Backend | None, installed: bool, workspace: str | None, epoch: int
) -> dispatch.Decision:
    """`dispatch.decide`, remembered. `workspace` is part of the key because backends judge a call by it, `epoch`
    (`registry.epoch`) because they may judge otherwise later."""
    return dispatch.decide(call, forward, backward, installed)


registry.on_change(_decide_cached.cache_clear)


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
    if unsupported:
        arguments.reject(_NAME, unsupported, _OPTIONS)
    window = NO_WINDOW
    if not (type(window_size) is tuple and window_size == NO_WINDOW):
        window = arguments.window(window_size)
    softcap = 0.0 if isinstance(softcap, (int, float)) and softcap == 0 else arguments.softcap(softcap)
    forward: Backend | None = None
    backward: Backend | None = None
    if not (backend is None and forward_backend is None and backward_backend is None):
        forward, backward = resolve(backend, forward_backend, backward_backend)

    if _is_small(query):
        if return_lse:
            raise NotImplementedError(f"return_lse=True: SDPA returns no log-sum-exp, and it runs this call: {_SMALL}")
        if window != NO_WINDOW or softcap:
            raise NotImplementedError(_small_error(window, softcap))
        return sdpa.native(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    if not (
        type(query) is type(key) is type(value) is Tensor
        and attn_mask is None
        and type(is_causal) is type(enable_gqa) is type(return_lse) is bool
    ):
        arguments.check_kinds(
            query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse
        )
    dropout_p = arguments.probability(dropout_p)
    return_lse = bool(return_lse)
    if is_causal and window != NO_WINDOW:
        window = (window[0], -1)
    if (
        attn_mask is None
        and dropout_p == 0.0
        and query.dim() == key.dim() == value.dim() == 4
        and ops.unwatched(query, key, value)
    ):
        # The common case, kept short: what was decided for these shapes is remembered.
        if torch._C._is_any_autocast_enabled():
            query, key, value = arguments.autocast(query), arguments.autocast(key), arguments.autocast(value)
        needs_grad = (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled()
        installed, epoch = _installed(), registry.epoch()
        form = repeats.form_of(
            query, key, value, is_causal, enable_gqa, needs_grad, return_lse, window, softcap, forward, backward,
            installed, epoch,
        )  # fmt: skip
        known = repeats.find(form)
        if known is None:
            call = describe(
                query, key, value, None, None, 0.0, bool(is_causal), bool(enable_gqa), return_lse, window, softcap
            )
            plan = _decide_cached(call, forward, backward, installed, settings.workspace_text(), epoch).plan
            known = repeats.keep(form, plan, needs_grad, window, softcap)
        elif known.repeat is not None:
            result = known.repeat(query, key, value, arguments.factor("scale", scale, query.shape[-1]))
            if result is not None:
                out, lse = result
                return out if lse is None or not return_lse else (out, lse)
        plan = known.plan
        if plan is not None and plan.small:
            return sdpa.fallback(query, key, value, None, 0.0, bool(is_causal), scale, bool(enable_gqa))
        if (
            plan is not None
            and plan.forward != "sdpa"
            and plan.backward != "sdpa"
            and query.shape[0] == key.shape[0] == value.shape[0]
        ):
            factor = arguments.factor("scale", scale, query.shape[-1])
            try:
                out, lse = ops.attend(
                    query, key, value, None, None, factor, bool(is_causal), 0.0, *window, softcap,
                    plan.forward_text, plan.backward_text,
                )  # fmt: skip
            except UnavailableError as error:
                dispatch.gave_up(plan.forward, error, named=forward is not None)
            else:
                known.has_run(query, key, value, out, is_causal=bool(is_causal), wants_lse=return_lse)
                return (out, lse) if return_lse else out
    return _general(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, forward, backward, return_lse,
        window, softcap,
    )  # fmt: skip


def _general(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    forward: Backend | None,
    backward: Backend | None,
    return_lse: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor | tuple[Tensor, Tensor]:
    """The whole of `ffpa_attn_func` for every kind of call; plain enough for torch.compile to trace."""
    foreign = arguments.foreign(query, key, value, attn_mask)
    if foreign is not None:
        error = _foreign_error(foreign, forward, backward, return_lse, window, softcap)
        if error is not None:
            raise NotImplementedError(error)
        if forward is None:
            dispatch.report_fallback("forward", dict.fromkeys(dispatch.PREFERENCE, (foreign,)))
        run = sdpa.native if query.is_nested else sdpa.fallback
        return run(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    installed = _installed()
    is_causal, enable_gqa = bool(is_causal), bool(enable_gqa)
    query, key, value = arguments.autocast(query), arguments.autocast(key), arguments.autocast(value)
    mask = None if attn_mask is None else _prepared(attn_mask)
    call = describe(query, key, value, attn_mask, mask, dropout_p, is_causal, enable_gqa, return_lse, window, softcap)
    if ops.unwatched(query, key, value):  # sizes are plain ints then
        decision = _decide_cached(call, forward, backward, installed, settings.workspace_text(), registry.epoch())
    else:
        decision = dispatch.decide(call, forward, backward, installed)
    rejection, problem, plan = decision
    if rejection is not None:
        if installed and not (return_lse or softcap or window != NO_WINDOW) and forward is None and backward is None:
            refused = Refusal("call", rejection.message)
            dispatch.report_fallback("forward", dict.fromkeys(dispatch.PREFERENCE, (refused,)))
            return sdpa.fallback(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        raise rejection.kind(rejection.message)
    assert problem is not None  # for the type checker: a decision is a rejection or a plan
    assert plan is not None

    if plan.forward == "sdpa" and return_lse:
        raise NotImplementedError(
            "return_lse=True: SDPA returns no log-sum-exp, and it runs this call"
            + (": it was named" if forward is not None else dispatch.listed(plan.refusals))
        )
    falls_back = dispatch.fallback_of(plan, forward, backward)
    if falls_back is not None:
        dispatch.report_fallback(falls_back, plan.refusals)
    if plan.forward == "sdpa":
        return sdpa.fallback(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window)

    factor = arguments.factor("scale", scale, query.shape[-1])
    lead = batch_shape(query.shape, key.shape, value.shape)
    q, k, v = (_to_4d(tensor, lead, problem.batch) for tensor in (query, key, value))
    if mask is not None:
        mask = masks.to_4d(mask, lead, problem.batch)
    rng = None
    if dropout_p > 0:
        # Drawn out here, so that checkpointing, compilers and graph capture repeat the draw as they do any other. (The
        # bounds are those of a range that is an int64 itself: compilers compute with it.)
        rng = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=query.device)
    operator = ops.attend if ops.unwatched(*((q, k, v) if mask is None else (q, k, v, mask))) else ops.flash_attn
    try:
        out, lse = operator(
            q, k, v, mask, rng, factor, is_causal, float(dropout_p), *window, softcap,
            plan.forward_text, plan.backward_text,
        )  # fmt: skip
    except UnavailableError as error:
        dispatch.gave_up(plan.forward, error, named=forward is not None)
        return _general(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, forward, backward, return_lse,
            window, softcap,
        )  # fmt: skip
    rank = max(query.dim(), key.dim(), value.dim())
    if rank != 4:
        # Two dims have no heads either; more than four have several batch dims.
        shape = (problem.heads_q, problem.len_q) if rank > 2 else (problem.len_q,)
        out = out.reshape(*lead, *shape, problem.head_dim_v)
        lse = lse.reshape(*lead, *shape)
    return (out, lse) if return_lse else out


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
        dropout_p, softcap = arguments.probability(dropout_p), arguments.softcap(softcap)
        window = arguments.window(window_size)
    except (TypeError, ValueError, NotImplementedError) as wrong:
        kind = type(wrong).__name__
        return dispatch.Explanation("arguments of the wrong kind", None, None, {}, f"{kind}: {wrong}")
    summary = (
        f"query {_shown(query)}, key {_shown(key)}, value {_shown(value)}, {arguments.autocast(query).dtype} on "
        f"{query.device}"
        f"{', causal' if is_causal else ''}"
        f"{f', attn_mask {_shown(attn_mask)} {attn_mask.dtype}' if attn_mask is not None else ''}"
        f"{f', dropout {dropout_p}' if dropout_p else ''}"
        f"{f', window {window}' if window != NO_WINDOW else ''}"
        f"{f', softcap {softcap}' if softcap else ''}"
    )
    try:
        forward, backward = resolve(backend, forward_backend, backward_backend)
    except (TypeError, ValueError) as wrong:
        return dispatch.Explanation(summary, None, None, {}, f"{type(wrong).__name__}: {wrong}")
    needs_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (query, key, value, attn_mask)
    )
    error: str | None = None
    reason: str | None = None
    if _is_small(query):
        reason = _SMALL
        if return_lse:
            error = f"return_lse=True: SDPA returns no log-sum-exp, and it runs this call: {_SMALL}"
        elif window != NO_WINDOW or softcap:
            error = _small_error(window, softcap)
    else:
        foreign = arguments.foreign(query, key, value, attn_mask)
        if foreign is not None:
            reason = foreign.reason
            error = _foreign_error(foreign, forward, backward, return_lse, window, softcap)
            if error is None and forward is None and settings.strict():
                error = f"{reason}; the call falls back to SDPA, and FFPA_JIT_STRICT=1 forbids that"
    if reason is not None:
        others = {name: [reason] for name in NAMES if name != "sdpa"}
        if error is not None:
            return dispatch.Explanation(summary, None, None, others, f"NotImplementedError: {error}")
        return dispatch.Explanation(summary, "sdpa", "sdpa" if needs_grad else None, others)
    query, key, value = arguments.autocast(query), arguments.autocast(key), arguments.autocast(value)
    mask = None if attn_mask is None else _prepared(attn_mask)
    if is_causal:
        window = (window[0], -1)
    call = describe(
        query, key, value, attn_mask, mask, dropout_p, bool(is_causal), bool(enable_gqa), return_lse, window, softcap
    )
    return dispatch.explain_call(summary, call, forward, backward, _installed(), return_lse)


def _is_small(query: Tensor) -> bool:
    """Whether a call is SDPA's from the start: a head dim that its own kernels serve, or no attention shape at all."""
    if not isinstance(query, Tensor):
        return True  # SDPA has the right TypeError
    return not query.is_nested and (query.dim() < 2 or query.shape[-1] <= 256)


def _small_error(window: tuple[int, int], softcap: float) -> str:
    """What a window or a softcap raises on a call that `_is_small`."""
    return f"{_extras(window, softcap)}: SDPA has none, and it runs this call: {_SMALL}; flash_attn has both options"


def _extras(window: tuple[int, int], softcap: float) -> str:
    """The options that are on and that SDPA does not have, for a message; "" if none is."""
    return " and ".join(["window_size"] * (window != NO_WINDOW) + ["softcap"] * (softcap > 0))


def _foreign_error(
    foreign: Refusal,
    forward: Backend | None,
    backward: Backend | None,
    return_lse: bool,
    window: tuple[int, int],
    softcap: float,
) -> str | None:
    """What a call with `foreign` tensors raises, if it asks for more than SDPA."""
    for named in (forward, backward):
        if named is not None and named.name != "sdpa":
            return f"backend {named.name!r} does not run this call: [{foreign.code}] {foreign.reason}"
    if return_lse:
        return f"return_lse=True: SDPA returns no log-sum-exp, and it runs this call: {foreign.reason}"
    if window != NO_WINDOW or softcap > 0:
        return f"{_extras(window, softcap)}: SDPA has none, and it runs this call: {foreign.reason}"
    return None


def _shown(tensor: Tensor) -> str:
    return "nested" if tensor.is_nested else str(list(tensor.shape))


def _installed() -> bool:
    """Whether this function stands in for `torch.nn.functional.scaled_dot_product_attention` right now."""
    return F.scaled_dot_product_attention is ffpa_attn_func


def _prepared(attn_mask: Tensor) -> Tensor:
    """The mask as `masks.compact` and autocast leave it."""
    mask = masks.compact(attn_mask)
    if mask.dtype == torch.float32 and mask.requires_grad and torch.is_grad_enabled():
        return mask  # a cast would write out what is only a view; the kernels take fp32 as well
    return arguments.autocast(mask)


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    return_lse: bool,
    window: tuple[int, int],
    softcap: float,
) -> Call:
    """The call with `attn_mask` as the caller gave it, and `mask` as `_prepared` leaves it."""
    grad = torch.is_grad_enabled()
    described = None
    if attn_mask is not None and mask is not None:
        copies = masks.joining_copies(mask, batch_shape(query.shape, key.shape, value.shape))
        needs_grad = grad and attn_mask.requires_grad
        described = Mask(attn_mask.shape, mask.dtype, mask.device, needs_grad, copies, masks.planes(mask))
    return Call(
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        device_arch(query.device.type, query.device.index),
        described,
        dropout_p,
        is_causal,
        enable_gqa,
        grad and (query.requires_grad or key.requires_grad or value.requires_grad),
        return_lse,
        window,
        softcap,
    )


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
