"""What the public functions share about their arguments: kinds, numbers, keywords, autocast, tensors that are not ours.

A wrong argument is a TypeError, ValueError or NotImplementedError that names it, says what came, what is allowed and
what to do. Everything here is plain enough for torch.compile to trace.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from ffpa_jit import op_rules
from ffpa_jit.problem import NO_WINDOW, Refusal, shown

__all__ = [
    "autocast",
    "check_flag",
    "check_kinds",
    "check_tensors",
    "factor",
    "foreign",
    "has_tangent",
    "number",
    "probability",
    "reject",
    "softcap",
    "window",
]

# The tensor types whose operations we may replace, beside DTensor, for which the operators have rules. Any other
# subclass (jagged, user-made) gives its own meaning to SDPA and is left to it.
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)

_SINK = "no kernel has sink logits"
_MODIFIER = "no kernel calls functions; write an attn_mask, or use torch.nn.attention.flex_attention"
_PAGED = "the keys must be one tensor; gather the pages"
_SCALED = "fp8 inputs are not served"
_LENGTHS = "state the lengths with cu_seqlens_q and cu_seqlens_k of ffpa_attn_varlen_func"
_BIAS = "add it to attn_mask of ffpa_attn_func"

# Keywords that other attention functions have and these do not, and what to do instead.
_REMEDIES = {
    "alibi_slopes": _BIAS,
    "attention_mask": "ffpa_attn_func takes it as attn_mask; packed sequences take none",
    "attn_mask": "packed sequences take no mask; use ffpa_attn_func",
    "aux_tensors": _MODIFIER,
    "block_mask": _MODIFIER,
    "block_table": _PAGED,
    "k_descale": _SCALED,
    "learnable_sink": _SINK,
    "leftpad_k": _LENGTHS,
    "mask_mod": _MODIFIER,
    "num_splits": "the kernels decide by themselves",
    "page_table": _PAGED,
    "position_bias": _BIAS,
    "q_descale": _SCALED,
    "return_attn_probs": "probabilities are never in memory; return_lse=True gives what normalises them",
    "s_aux": _SINK,
    "score_mod": _MODIFIER,
    "seqused_k": _LENGTHS,
    "seqused_q": _LENGTHS,
    "sink": _SINK,
    "sinks": _SINK,
    "sliding_window": "pass window_size=(sliding_window - 1, 0)",
    "v_descale": _SCALED,
}
# Values other than None that ask for nothing.
_OFF: dict[str, tuple[object, ...]] = {
    "deterministic": (False, True),  # the kernels always are
    "num_splits": (0, 1),
    "return_attn_probs": (False,),
}


def reject(function: str, given: Mapping[str, object], supported: str) -> None:
    """TypeError for keywords nobody knows, NotImplementedError for those that others know, all in one message.

    One whose value is None, or asks for nothing, is let through. `supported`: the options that there are, for messages.
    """
    unknown = sorted([name for name in given if name not in _REMEDIES and name not in _OFF])
    if unknown:
        raise TypeError(f"{function}() got unexpected keyword argument(s): {', '.join(unknown)}")
    asked = sorted([name for name, value in given.items() if not _is_off(name, value)])
    if asked:
        lines = [f"\n  - {name}: {_REMEDIES.get(name, 'leave it at its default')}" for name in asked]
        raise NotImplementedError(f"{function}() does not support {', '.join(asked)}:{''.join(lines)}\n{supported}")


def _is_off(name: str, value: object) -> bool:
    return value is None or (isinstance(value, (bool, int)) and name in _OFF and value in _OFF[name])


def check_tensors(**tensors: object) -> None:
    """TypeError for an argument that is no tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")


def check_kinds(query: object, key: object, value: object, attn_mask: object, **flags: object) -> None:
    """TypeError for arguments that are not even of the right kind; SDPA's, where it has the better one, comes later."""
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name != "attn_mask"):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    for name, flag in flags.items():
        check_flag(name, flag)


def check_flag(name: str, value: object) -> None:
    """TypeError for what is no truth value."""
    if not isinstance(value, (int, torch.SymInt, torch.SymBool)):
        raise TypeError(f"{name} must be True or False, not {type(value).__name__} ({value!r})")


def probability(dropout_p: Any) -> float:
    """`dropout_p` as a number: also a NumPy scalar or a tensor of one element, as SDPA takes them; else TypeError."""
    if isinstance(dropout_p, (int, float, torch.SymInt, torch.SymFloat)):
        return cast(float, dropout_p)
    if not hasattr(dropout_p, "__float__"):
        raise TypeError(f"dropout_p must be a number from 0 to 1, not {type(dropout_p).__name__} ({dropout_p!r})")
    return number("dropout_p", dropout_p)


def number(name: str, value: Any) -> float:
    """A scalar argument as a float; TypeError for what is none, and for a tensor whose gradient would be lost."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(f"{name} must be a number; a tensor would get no gradient: multiply the query by it")
    if isinstance(value, (str, bytes, complex)):
        raise TypeError(f"{name} must be a number or None, not {type(value).__name__} ({value!r})")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or None, not {type(value).__name__}") from None


def factor(name: str, scale: Any, head_dim: int) -> float:
    """What the scores are multiplied by: a scale as `number` takes it, 1 / sqrt(head_dim) for None."""
    return head_dim**-0.5 if scale is None else number(name, scale)


def softcap(value: Any) -> float:
    """`softcap` as a float, 0 for None; TypeError or ValueError for what is no finite number from 0 on."""
    if value is None:
        return 0.0
    cap = number("softcap", value)
    if not 0.0 <= cap < float("inf"):
        raise ValueError(f"softcap={shown(cap)}: pass a finite number above 0, or 0 for no cap")
    return cap


def window(value: Any) -> tuple[int, int]:
    """`window_size` as (left, right), -1 for no limit; TypeError or ValueError for anything but a pair of ints.

    Also None, or None in the pair, means no limit.
    """
    if value is None:
        return NO_WINDOW
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"window_size must be a pair of ints (left, right), not {type(value).__name__} ({value!r})")
    if len(value) != 2:
        raise ValueError(f"window_size has {len(value)} values; pass two: how many keys a query sees before and after")
    return _limit(value[0]), _limit(value[1])


def _limit(value: Any) -> int:
    if value is None:
        return -1
    if isinstance(value, (bool, Tensor)) or not (isinstance(value, int) or hasattr(value, "__index__")):
        raise TypeError(f"window_size must be a pair of ints, and one is {type(value).__name__} ({value!r})")
    limit = value if type(value) is int else operator.index(value)  # a subclass is no int to Triton
    if limit < -1:
        raise ValueError(f"window_size has {shown(limit)}; pass a number of keys from 0 on, or -1 for no limit")
    return limit


def foreign(*tensors: Tensor | None) -> Refusal | None:
    """Why these tensors cannot be handed to kernels at all, whatever the call; None if they can."""
    sharded = op_rules.is_sharded(*tensors)
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TYPES and not sharded:
            return Refusal("subclass", f"{type(tensor).__name__} arguments give SDPA a meaning of their own")
        if tensor.is_nested:
            return Refusal("subclass", "nested tensors give SDPA a meaning of their own")
        if tensor.layout != torch.strided:
            return Refusal(
                "layout", f"a tensor has the layout {tensor.layout}; the kernels read strided memory: densify it"
            )
    if not torch.compiler.is_compiling() and has_tangent(*tensors):
        return Refusal("transform", "forward-mode derivatives (jvp) are SDPA's")
    return None


def has_tangent(*inputs: Any) -> bool:
    """Whether one of these carries a forward-mode derivative."""
    return forward_ad._current_level >= 0 and any(
        isinstance(each, Tensor) and forward_ad.unpack_dual(each).tangent is not None for each in inputs
    )


def autocast(tensor: Tensor) -> Tensor:
    """`tensor` as autocast would hand it to SDPA: floating tensors but float64 in the autocast dtype."""
    device_type = tensor.device.type
    if (
        device_type != "meta"
        and torch.is_autocast_enabled(device_type)
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    ):
        return tensor.to(torch.get_autocast_dtype(device_type))
    return tensor
