"""`Request`: what a caller of `ffpa_attn_func` asked for, normalised once, and the plan key of a call.

`Request.make` raises for arguments of the wrong kind; what a call may ask of its shapes, dtypes and backends is decided
from `Request.call` (`dispatch.decide`). `explain` and `ffpa_attn_func` make the same request. All of it is plain enough
for torch.compile to trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffpa_jit import arguments, masks, op_rules
from ffpa_jit.backends import Backend, resolve
from ffpa_jit.problem import NO_WINDOW, AttentionParams, Call, Mask, Refusal, batch_shape, device_arch

__all__ = ["FEW_QUERIES", "Request", "is_small", "key_layout", "mask_layout"]

SMALL = "head dims up to 256 are left to SDPA's own kernels"

FEW_QUERIES = 64
"""Up to so many queries a call may be a decoding step: the number of keys is then no part of its plan key."""


class Request(NamedTuple):
    """A call. `query`, `key`, `value`: after autocast; `attn_mask`: as given, `mask`: compact and after autocast.

    `window` has no right limit where `is_causal` sets it. `forward`, `backward`: the backends that were named.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: Any
    enable_gqa: bool
    return_lse: bool
    window: tuple[int, int]
    softcap: float
    forward: Backend | None
    backward: Backend | None

    @classmethod
    def make(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        *,
        dropout_p: Any,
        is_causal: Any,
        scale: Any,
        enable_gqa: Any,
        return_lse: Any,
        window_size: Any,
        softcap: Any,
        backends: tuple[Any, Any, Any],
        any_lengths: bool,
    ) -> Request:
        """`backends`: `backend`, `forward_backend` and `backward_backend`. `any_lengths`: a causal bias goes by the
        call's lengths, as in SDPA. TypeError, ValueError or NotImplementedError, as the public function documents."""
        window, softcap = arguments.window(window_size), arguments.softcap(softcap)
        forward, backward = resolve(*backends)
        if is_small(query):  # SDPA's from the start, and so are its errors
            return cls(
                query, key, value, attn_mask, None, dropout_p, is_causal, scale, enable_gqa, bool(return_lse), window,
                softcap, forward, backward,
            )  # fmt: skip
        arguments.check_kinds(
            query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse
        )
        is_causal, dropout_p = bool(is_causal), arguments.probability(dropout_p)
        if attn_mask is not None and masks.is_causal_bias(attn_mask) and not query.is_nested:
            key, value, is_causal, window = _unbiased((query, key, value), attn_mask, is_causal, window, any_lengths)
            attn_mask = None
        if is_causal and window != NO_WINDOW:
            window = (window[0], -1)
        mask = None
        if arguments.foreign(query, key, value, attn_mask) is None:
            query, key, value = (arguments.autocast(x) for x in (query, key, value))
            mask = None if attn_mask is None else prepared(attn_mask)
        return cls(
            query, key, value, attn_mask, mask, dropout_p, is_causal, scale, bool(enable_gqa), bool(return_lse), window,
            softcap, forward, backward,
        )  # fmt: skip

    def named(self) -> bool:
        """Whether the caller asked for something that SDPA is not."""
        others = [each for each in (self.forward, self.backward) if each is not None and each.name != "sdpa"]
        return bool(others or self.return_lse or self.softcap or self.window != NO_WINDOW)

    def beyond_sdpa(self, reason: str, code: str = "") -> str | None:
        """Why SDPA cannot run this call, which it is to run for `reason`; None: it can."""
        if code:
            for each in (self.forward, self.backward):
                if each is not None and each.name != "sdpa":
                    return f"backend {each.name!r} does not run this call: [{code}] {reason}"
        if self.return_lse:
            return f"return_lse=True: SDPA returns no log-sum-exp, and it runs this call: {reason}"
        extras = ["window_size"] * (self.window != NO_WINDOW) + ["softcap"] * (self.softcap > 0)
        if extras:
            hint = "" if code else "; flash_attn has both options"
            return f"{' and '.join(extras)}: SDPA has none, and it runs this call: {reason}{hint}"
        return None

    def foreign(self) -> Refusal | None:
        """Why the tensors cannot be handed to kernels at all."""
        found = arguments.foreign(self.query, self.key, self.value, self.attn_mask)
        if found is None and self.dropout_p > 0 and op_rules.is_sharded(self.query, self.key, self.value):
            return Refusal("subclass", "ranks that hold parts of a DTensor would drop the same of each part")
        return found

    def needs_grad(self) -> bool:
        """Whether any input requires a gradient."""
        tensors = self.query, self.key, self.value, self.attn_mask
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    def params(self) -> AttentionParams:
        """The options that kernels take. TypeError for a scale that is no number."""
        scale = arguments.factor("scale", self.scale, self.query.shape[-1])
        return AttentionParams(scale, self.is_causal, self.window, self.softcap, float(self.dropout_p))

    def call(self) -> Call:
        """What a decision may depend on."""
        query, key, value, mask = self.query, self.key, self.value, self.mask
        grad = torch.is_grad_enabled()
        described = None
        if self.attn_mask is not None and mask is not None:
            copies = masks.joining_copies(mask, batch_shape(query.shape, key.shape, value.shape))
            needs_grad = grad and self.attn_mask.requires_grad
            described = Mask(self.attn_mask.shape, mask.dtype, mask.device, needs_grad, copies, masks.planes(mask))
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
            self.dropout_p,
            self.is_causal,
            self.enable_gqa,
            grad and (query.requires_grad or key.requires_grad or value.requires_grad),
            self.return_lse,
            self.window,
            self.softcap,
        )

    def summary(self) -> str:
        """The call in one line."""
        query, mask = self.query, self.attn_mask
        return (
            f"query {_shown(query)}, key {_shown(self.key)}, value {_shown(self.value)}, "
            f"{arguments.autocast(query).dtype} on {query.device}"
            f"{', causal' if self.is_causal else ''}"
            f"{f', attn_mask {_shown(mask)} {mask.dtype}' if mask is not None else ''}"
            f"{f', dropout {self.dropout_p}' if self.dropout_p else ''}"
            f"{f', window {self.window}' if self.window != NO_WINDOW else ''}"
            f"{f', softcap {self.softcap}' if self.softcap else ''}"
        )


def is_small(query: Tensor) -> bool:
    """Whether a call is SDPA's from the start: a head dim that its own kernels serve, or no attention shape at all."""
    if not isinstance(query, Tensor):
        return True  # SDPA has the right TypeError
    if query.is_nested:
        return _nested_is_small(query)
    return query.dim() < 2 or query.shape[-1] <= 256


def _nested_is_small(query: Tensor) -> bool:
    try:
        return query.size(-1) <= 256
    except RuntimeError:  # a ragged last dimension
        return False


def _unbiased(
    tensors: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor, is_causal: bool, window: tuple[int, int],
    any_lengths: bool,
) -> tuple[Tensor, Tensor, bool, tuple[int, int]]:  # fmt: skip
    """(key, value, is_causal, window) that mean the same without a mask as these with a causal bias."""
    query, key, value = tensors
    len_q, len_kv = query.shape[-2], key.shape[-2] if key.dim() > 1 else 0
    flags = masks.causal_bias(attn_mask, len_q, len_kv, is_causal=is_causal, window=window, any_lengths=any_lengths)
    if flags.keys < len_kv and value.dim() > 1 and value.shape[-2] == len_kv:  # else the call is rejected as it is
        key, value = key[..., : flags.keys, :], value[..., : flags.keys, :]
    return key, value, flags.is_causal, flags.window


def prepared(attn_mask: Tensor) -> Tensor:
    """The mask as `masks.compact` and autocast leave it."""
    mask = masks.compact(attn_mask)
    if mask.dtype == torch.float32 and mask.requires_grad and torch.is_grad_enabled():
        return mask  # a cast would write out what is only a view; the kernels take fp32 as well
    return arguments.autocast(mask)


def _shown(tensor: Tensor) -> str:
    return "nested" if tensor.is_nested else str(list(tensor.shape))


def key_layout(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """What a plan key holds of 4-D keys and values. Of a decoding step's, whose number grows from step to step, only
    how many there are to a power of two, that they are as many as the values and no fewer than the queries, and how
    they lie in memory."""
    if query.shape[2] > FEW_QUERIES:
        return key.shape, key.stride(), value.shape, value.stride()
    shape = key.shape
    batch, heads, length, head_dim = shape
    order = 0
    for x in (key, value):
        b, h, n, d = x.stride()
        if d != 1 or b % 8 or h % 8 or n % 8 or not (b and h and n):
            return shape, key.stride(), value.shape, value.stride()
        order = order * 4 + (b >= h) * 2 + (h >= n)
    return batch, heads, head_dim, length.bit_length(), length >= query.shape[2], shape == value.shape, order


def mask_layout(query: Tensor, key: Tensor, mask: Tensor) -> tuple[Any, ...]:
    """What a plan key holds of a mask; of a decoding step's, not the number of keys."""
    kind = mask.dtype, mask.requires_grad, mask.get_device()
    if query.shape[2] > FEW_QUERIES or not mask.dim():
        return mask.shape, mask.stride(), *kind
    *rest, keys = mask.shape
    return tuple(rest), keys == key.shape[2], keys == 1, mask.stride()[-1:] == (1,), *kind
