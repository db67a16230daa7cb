"""The torch operators: `torch.ops.ffpa_jit.flash_attn` and `.flash_attn_backward`.

Both are functional: they change no input and return fresh tensors. They carry backends by name, so a compiled or
exported graph holds plain strings. Inputs are [B, H, N, D] tensors of one dtype (fp16 or bf16) and device, as
`ffpa_attn_func` hands them over; it does the checking.

`flash_attn(query, key, value, scale, is_causal, forward_backend, backward_backend) -> (out, lse)`
    out: memory layout of `torch.empty_like(query)`. lse: fp32, natural logarithm, contiguous [B, Hq, Nq].
    Both outputs are differentiable. `backward_backend` names who computes the gradients; "sdpa" runs SDPA again.

`flash_attn_backward(grad_out, grad_lse, query, key, value, out, lse, scale, is_causal, needs, backend)`
    `-> (grad_query, grad_key, grad_value)`: each laid out as `torch.empty_like` of its input; one that `needs` does not
    ask for is an empty tensor of shape (0,). `out` and `lse` may come from elsewhere, for example merged over shards.
    Not differentiable: a second derivative raises NotImplementedError.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import forward_ad

from ffpa_jit import registry, sdpa

__all__ = ["attend", "flash_attn", "flash_attn_backward", "unwatched"]

_NAMESPACE = "ffpa_jit"
_library = torch.library.Library(_NAMESPACE, "DEF")

# The fake kernels derive the outputs' strides from the inputs', so a compiler must hand over the inputs as it traced
# them. "exact" appeared after torch 2.6; "fixed order" is the same promise for dense tensors.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)
_library.define(
    "flash_attn(Tensor query, Tensor key, Tensor value, float scale, bool is_causal, str forward_backend, "
    "str backward_backend) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define(
    "flash_attn_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor lse, float scale, bool is_causal, bool[3] needs, str backend) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    is_causal: bool,
    forward_backend: str,
    backward_backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return registry.get(forward_backend).forward(query, key, value, scale=scale, is_causal=is_causal)


def _forward_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    is_causal: bool,
    forward_backend: str,
    backward_backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    is_causal: bool,
    needs: list[bool],
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = registry.get(backend).backward(
        grad_out,
        grad_lse,
        query,
        key,
        value,
        out,
        lse,
        scale=scale,
        is_causal=is_causal,
        needs=(needs[0], needs[1], needs[2]),
    )
    return (
        query.new_empty(0) if dq is None else dq,
        query.new_empty(0) if dk is None else dk,
        query.new_empty(0) if dv is None else dv,
    )


def _backward_fake(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    is_causal: bool,
    needs: list[bool],
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (
        torch.empty_like(tensor) if need else query.new_empty(0)
        for tensor, need in zip((query, key, value), needs, strict=True)
    )
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, scale, is_causal, _, backward_backend = inputs
    # An unused lse (or out) then has the gradient None instead of a tensor of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output)
    ctx.scale, ctx.is_causal, ctx.backward_backend = scale, is_causal, backward_backend


def _differentiate(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    needs = tuple(ctx.needs_input_grad[:3])
    constants = (None, None, None, None)
    if (grad_out is None and grad_lse is None) or not any(needs):
        return (None, None, None, *constants)
    query, key, value, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if ctx.backward_backend == "sdpa":
        if grad_lse is not None:
            raise NotImplementedError(
                "backward_backend='sdpa' cannot differentiate the log-sum-exp, which SDPA does not return; use "
                "backward_backend='triton', or detach lse"
            )
        grads = sdpa.backward(grad_out, query, key, value, scale=ctx.scale, is_causal=ctx.is_causal, needs=needs)
        return (*grads, *constants)
    if not torch.is_grad_enabled() and unwatched(grad_out, query, key, value):
        # Without create_graph nothing would see the operator: call what it calls.
        dq, dk, dv = registry.get(ctx.backward_backend).backward(
            grad_out, grad_lse, query, key, value, out, lse, scale=ctx.scale, is_causal=ctx.is_causal, needs=needs
        )
        return (dq, dk, dv, *constants)
    dq, dk, dv = flash_attn_backward(
        grad_out, grad_lse, query, key, value, out, lse, ctx.scale, ctx.is_causal, needs, ctx.backward_backend
    )
    return (dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, *constants)


def _no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    raise NotImplementedError(
        "ffpa_attn_func has no second derivative; compute it with SDPA under "
        "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), or drop create_graph=True"
    )


for _key in ("CUDA", "CPU"):  # ROCm devices use the CUDA key; the CPU serves Triton's interpreter
    _library.impl("flash_attn", _forward, _key)
    _library.impl("flash_attn_backward", _backward, _key)
torch.library.register_fake(f"{_NAMESPACE}::flash_attn", _forward_fake, lib=_library)
torch.library.register_fake(f"{_NAMESPACE}::flash_attn_backward", _backward_fake, lib=_library)
torch.library.register_autograd(f"{_NAMESPACE}::flash_attn", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd(f"{_NAMESPACE}::flash_attn_backward", _no_second_derivative, lib=_library)

flash_attn = torch.ops.ffpa_jit.flash_attn.default
flash_attn_backward = torch.ops.ffpa_jit.flash_attn_backward.default


@functools.cache
def _foreign_keys(device_type: str) -> int:
    """The dispatch keys, as bits, that a plain strided tensor of the device does not have."""
    return ~int(torch._C._dispatch_keys(torch.empty(0, device=device_type)).raw_repr())


def unwatched(*tensors: torch.Tensor) -> bool:
    """Whether nothing watches or transforms the operations on these tensors, so that the dispatcher may be skipped.

    Watchers: compilers, torch function and dispatch modes (fake tensors, selective checkpointing, flop counters),
    functorch transforms, forward-mode derivatives, jit tracing; tensor subclasses; and tensors whose data is not what
    their memory says (lazily negated or zero, batched, nested, sparse). Not autocast: it does nothing to the operator,
    whose inputs are cast before.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and all(
            type(tensor) is torch.Tensor
            and torch._C._dispatch_keys(tensor).raw_repr() & _foreign_keys(tensor.device.type) == 0
            for tensor in tensors
        )
    )


class _Attend(torch.autograd.Function):
    """`flash_attn` without the dispatcher: the same forward, and the same formula backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        return _differentiate(ctx, *grads)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    is_causal: bool,
    forward_backend: str,
    backward_backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn` for tensors that are `unwatched`, at a fraction of the operator's host time.

    `backward_backend`: None when no gradient is needed.
    """
    if backward_backend is None:
        return registry.get(forward_backend).forward(query, key, value, scale=scale, is_causal=is_causal)
    result: tuple[torch.Tensor, torch.Tensor] = _Attend.apply(
        query, key, value, scale, is_causal, forward_backend, backward_backend
    )
    return result
