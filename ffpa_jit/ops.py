"""The torch operators: `torch.ops.ffpa_jit.flash_attn` and `.flash_attn_backward`.

Both are functional: they change no input and return fresh tensors. They carry backends as text (`backends.encode`:
"triton", "cuda;acc=f16"), so a compiled or exported graph holds plain strings. Inputs are [B, H, N, D] tensors of one
dtype (fp16 or bf16) and device, as `ffpa_attn_func` hands them over; it does the checking.

`flash_attn(query, key, value, attn_mask, rng, scale, is_causal, dropout_p, window_size_left, window_size_right,`
    `softcap, forward_backend, backward_backend) -> (out, lse)`
    attn_mask: None or [B, Hq, Nq, Nkv] with size 1 where it broadcasts; bool, fp32 or the dtype of query.
    rng: two int64 words on the device that determine what is dropped; None when `dropout_p` is 0.
    window_size_left, window_size_right: keys before and after its own position that a query sees; -1 for all.
    softcap: the bound on the scaled scores; 0 for none.
    out: memory layout of `torch.empty_like(query)`. lse: fp32, natural logarithm, contiguous [B, Hq, Nq].
    Both outputs are differentiable. `backward_backend` names who computes the gradients; "sdpa" runs SDPA again.

`flash_attn_backward(grad_out, grad_lse, query, key, value, attn_mask, rng, out, lse, scale, is_causal, dropout_p,`
    `window_size_left, window_size_right, softcap, needs, backend)`
    `-> (grad_query, grad_key, grad_value, grad_attn_mask)`
    Each is laid out as `torch.empty_like` of its input; one that `needs` does not ask for is an empty tensor of shape
    (0,). `out` and `lse` may come from elsewhere, for example merged over shards.
    Not differentiable: a second derivative raises NotImplementedError.

Their twins for packed sequences are in `ops_varlen`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ffpa_jit import registry, sdpa
from ffpa_jit.backends import decode

__all__ = [
    "TAGS",
    "attend",
    "flash_attn",
    "flash_attn_backward",
    "gradients",
    "library",
    "register",
    "unwatched",
]

_NAMESPACE = "ffpa_jit"
library = torch.library.Library(_NAMESPACE, "DEF")

# The fake kernels derive the outputs' strides from the inputs', so a compiler must hand over the inputs as it traced
# them. "exact" appeared after torch 2.6; "fixed order" is the same promise for dense tensors.
TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)
library.define(
    "flash_attn(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? rng, float scale, bool is_causal, "
    "float dropout_p, int window_size_left, int window_size_right, float softcap, str forward_backend, "
    "str backward_backend) -> (Tensor, Tensor)",
    tags=TAGS,
)
library.define(
    "flash_attn_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor? rng, Tensor out, Tensor lse, float scale, bool is_causal, float dropout_p, "
    "int window_size_left, int window_size_right, float softcap, bool[4] needs, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=TAGS,
)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    rng: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    forward_backend: str,
    backward_backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = decode(forward_backend)
    return registry.get(options.name).forward(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        rng=rng,
        window=(window_size_left, window_size_right),
        softcap=softcap,
        options=options,
    )


def _forward_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    rng: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    forward_backend: str,
    backward_backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    rng: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    needs: Sequence[bool],
    backend: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """What `flash_attn_backward` computes, with None for what is not needed, for tensors that are `unwatched`."""
    options = decode(backend)
    return registry.get(options.name).backward(
        grad_out,
        grad_lse,
        query,
        key,
        value,
        out,
        lse,
        scale=scale,
        is_causal=is_causal,
        needs=(needs[0], needs[1], needs[2], needs[3]),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        rng=rng,
        window=(window_size_left, window_size_right),
        softcap=softcap,
        options=options,
    )


def _gradients_fake(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    rng: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    needs: list[bool],
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv, dmask = (
        torch.empty_like(tensor) if need and tensor is not None else query.new_empty(0)
        for tensor, need in zip((query, key, value, attn_mask), needs, strict=True)
    )
    return dq, dk, dv, dmask


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, attn_mask, rng, scale, is_causal, dropout_p, left, right, softcap, _, backward_backend = inputs
    # An unused lse (or out) then has the gradient None instead of a tensor of zeros.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, attn_mask, rng, *output)
    ctx.options = scale, is_causal, dropout_p, left, right, softcap
    ctx.backward_backend = backward_backend


def _differentiate(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    needs = tuple(ctx.needs_input_grad[:4])
    constants = (None,) * 9  # from rng on
    if (grad_out is None and grad_lse is None) or not any(needs):
        return (None, None, None, None, *constants)
    query, key, value, attn_mask, rng, out, lse = ctx.saved_tensors
    scale, is_causal, dropout_p, left, right, softcap = ctx.options
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if decode(ctx.backward_backend).name == "sdpa":
        if grad_lse is not None:
            raise NotImplementedError(
                "backward_backend='sdpa' cannot differentiate the log-sum-exp, which SDPA does not return; use "
                "backward_backend='triton', or detach lse"
            )
        if dropout_p > 0:
            raise NotImplementedError("SDPA, run again for the backward, cannot repeat the dropout of another forward")
        if softcap > 0:
            raise NotImplementedError("SDPA, run again for the backward, has no softcap")
        window = (left, right)
        grads = sdpa.backward(
            grad_out, query, key, value, attn_mask, scale=scale, is_causal=is_causal, needs=needs, window=window
        )
        return (*grads, *constants)
    arguments = (
        grad_out, grad_lse, query, key, value, attn_mask, rng, out, lse, *ctx.options, needs, ctx.backward_backend
    )  # fmt: skip
    if not torch.is_grad_enabled() and unwatched(grad_out, query, key, value):
        # Without create_graph nothing would see the operator: call what it calls.
        return (*gradients(*arguments), *constants)
    grads = flash_attn_backward(*arguments)
    return (*[grad if need else None for grad, need in zip(grads, needs, strict=True)], *constants)


def no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    raise NotImplementedError(
        "the kernels' gradients have no derivative; compute second derivatives with SDPA under "
        "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), or drop create_graph=True"
    )


def register(
    name: str,
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    forward_fake: Callable[..., Any],
    gradients: Callable[..., tuple[torch.Tensor | None, ...]],
    gradients_fake: Callable[..., Any],
    save: Callable[..., None],
    differentiate: Callable[..., tuple[torch.Tensor | None, ...]],
) -> type[torch.autograd.Function]:
    """Implement the operators `name` and `name`_backward, which are defined.

    Returns the first without the dispatcher, as an autograd function: the same forward, the same formula backward.
    """

    def backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
        # As the operator returns them: with empty tensors for what is not needed.
        query = arguments[2]
        return tuple(query.new_empty(0) if grad is None else grad for grad in gradients(*arguments))

    for key in ("CUDA", "CPU"):  # ROCm devices use the CUDA key; the CPU serves Triton's interpreter
        library.impl(name, forward, key)
        library.impl(f"{name}_backward", backward, key)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", forward_fake, lib=library)
    torch.library.register_fake(f"{_NAMESPACE}::{name}_backward", gradients_fake, lib=library)
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", differentiate, setup_context=save, lib=library)
    torch.library.register_autograd(f"{_NAMESPACE}::{name}_backward", no_second_derivative, lib=library)

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            output = forward(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
            return differentiate(ctx, *grads)

    return Attend


_Attend = register("flash_attn", _forward, _forward_fake, gradients, _gradients_fake, _save, _differentiate)

flash_attn = torch.ops.ffpa_jit.flash_attn.default
flash_attn_backward = torch.ops.ffpa_jit.flash_attn_backward.default


@functools.cache
def _foreign_keys(device: torch.device) -> int:
    """The dispatch keys, as bits, that a plain strided tensor of the device does not have."""
    with torch.inference_mode(False):  # tensors made in that mode lack the keys for gradients
        plain = torch.empty(0, device=device)
    return ~int(torch._C._dispatch_keys(plain).raw_repr())


def unwatched(*tensors: torch.Tensor) -> bool:
    """Whether nothing watches or transforms the operations on these tensors, so that the dispatcher may be skipped.

    Watchers: compilers, torch function and dispatch modes (fake tensors, selective checkpointing, flop counters),
    functorch transforms, forward-mode derivatives, jit tracing; tensor subclasses; and tensors whose data is not what
    their memory says (lazily negated or zero, batched, nested, sparse). Not autocast: it does nothing to the operator,
    whose inputs are cast before.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return False
    for tensor in tensors:  # loops, because every call passes here: generators would be half of its time
        if type(tensor) is not torch.Tensor:
            return False
    foreign = _foreign_keys(tensors[0].device)
    for tensor in tensors:  # noqa: SIM110
        if torch._C._dispatch_keys(tensor).raw_repr() & foreign:
            return False
    return True


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    rng: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    forward_backend: str,
    backward_backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn` for tensors that are `unwatched`, at a fraction of the operator's host time.

    `backward_backend`: "" when no gradient is needed.
    """
    inputs = (
        query, key, value, attn_mask, rng, scale, is_causal, dropout_p, window_size_left, window_size_right, softcap,
        forward_backend, backward_backend,
    )  # fmt: skip
    if not backward_backend:
        return _forward(*inputs)
    result: tuple[torch.Tensor, torch.Tensor] = _Attend.apply(*inputs)
    return result
