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
    Both outputs are differentiable. `backward_backend` names who computes the gradients; "sdpa" runs SDPA again, and ""
    leaves the choice to the backward (a program may be traced without gradients and called with them).

`flash_attn_backward(grad_out, grad_lse, query, key, value, attn_mask, rng, out, lse, scale, is_causal, dropout_p,`
    `window_size_left, window_size_right, softcap, needs, backend)`
    `-> (grad_query, grad_key, grad_value, grad_attn_mask)`
    Each is laid out as `torch.empty_like` of its input; one that `needs` does not ask for is an empty tensor of shape
    (0,). `out` and `lse` may come from elsewhere, for example merged over shards.
    Not differentiable: a second derivative raises NotImplementedError.

Empty tensors are the operators' own: without a query or a key no backend is asked. Forward-mode derivatives raise
NotImplementedError. How vmap, DTensor and FLOP counters see the operators is in `op_rules`; their twins for packed
sequences are in `ops_varlen`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._device import DeviceContext

from ffpa_jit import dispatch, op_rules, plan, sdpa
from ffpa_jit.arguments import has_tangent
from ffpa_jit.backends import decode
from ffpa_jit.problem import AttentionParams, Problem

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


def _is_empty(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether no query can have a key, by the shapes alone."""
    return query.numel() == 0 or key.numel() == 0


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
    if _is_empty(query, key):
        return torch.zeros_like(query), query.new_full(query.shape[:-1], float("-inf"), dtype=torch.float32)
    window = window_size_left, window_size_right
    params = AttentionParams(scale, is_causal, window, softcap, dropout_p)
    planned = plan.of(query, params, forward_backend, backward_backend)
    result: tuple[torch.Tensor, torch.Tensor] = planned.forward(query, key, value, attn_mask, rng)
    return result


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
    if _is_empty(query, key):
        dq, dk, dv, dmask = (
            torch.zeros_like(tensor) if need and tensor is not None else None
            for tensor, need in zip((query, key, value, attn_mask), needs, strict=True)
        )
        return dq, dk, dv, dmask
    window = window_size_left, window_size_right
    params = AttentionParams(scale, is_causal, window, softcap, dropout_p)
    run = plan.of(query, params, "", backend).backward((needs[0], needs[1], needs[2], needs[3]))
    dq, dk, dv, dmask = run(grad_out, grad_lse, query, key, value, attn_mask, rng, out, lse)
    return dq, dk, dv, dmask


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
    query, key, value, attn_mask, rng, out, lse = ctx.saved_tensors
    grads = _gradients_of(
        (query, key, value, attn_mask), rng, out, lse, grad_out, grad_lse, ctx.options, tuple(ctx.needs_input_grad[:4]),
        ctx.backward_backend,
    )  # fmt: skip
    return *grads, *(None,) * 9  # from rng on


def _gradients_of(
    inputs: tuple[Any, ...],
    rng: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    options: tuple[Any, ...],
    needs: tuple[bool, ...],
    backend: str,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of query, key, value and attn_mask (`inputs`) that are needed, in autograd."""
    if (grad_out is None and grad_lse is None) or not any(needs):
        return None, None, None, None
    query, key, value, attn_mask = inputs
    scale, is_causal, dropout_p, left, right, softcap = options
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    backend = backend or _chosen(options, needs, query, key, value, attn_mask)
    if decode(backend).name == "sdpa":
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
        return sdpa.backward(
            grad_out,
            query,
            key,
            value,
            attn_mask,
            scale=scale,
            is_causal=is_causal,
            window=window,
            needs=(needs[0], needs[1], needs[2], needs[3]),
        )
    arguments = (
        grad_out, grad_lse, query, key, value, attn_mask, rng, out, lse, *options, needs, backend
    )  # fmt: skip
    looked_at = [x for x in (grad_out, grad_lse, query, key, value, attn_mask) if x is not None]
    if not torch.is_grad_enabled() and unwatched(*looked_at):
        # Without create_graph nothing would see the operator: call what it calls.
        return gradients(*arguments)
    grads = flash_attn_backward(*arguments)
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


def _chosen(options: tuple[Any, ...], needs: tuple[bool, ...], *tensors: torch.Tensor | None) -> str:
    """Who computes gradients that nobody was chosen for when the forward was traced."""
    query, key, value, attn_mask = tensors
    assert query is not None  # for the type checker
    assert key is not None
    assert value is not None
    _, is_causal, dropout_p, left, right, softcap = options
    problem = Problem.from_tensors(query, key, value, attn_mask, dropout_p, is_causal, (left, right), softcap)
    return dispatch.choose_late_backward(replace(problem, needs_grad=any(needs[:3]), mask_needs_grad=needs[3]))


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
) -> None:
    """Implement the operators `name` and `name`_backward, which are defined."""

    def backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
        # As the operator returns them: with empty tensors for what is not needed.
        query = arguments[2]
        return tuple(query.new_empty(0) if grad is None else grad for grad in gradients(*arguments))

    def second(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    for each, implementation, fake, each_save, formula in (
        (name, forward, forward_fake, save, differentiate),
        (f"{name}_backward", backward, gradients_fake, second, no_second_derivative),
    ):
        for key in ("CUDA", "CPU"):  # ROCm devices use the CUDA key; the CPU serves Triton's interpreter
            library.impl(each, implementation, key)
        torch.library.register_fake(f"{_NAMESPACE}::{each}", fake, lib=library)
        library.impl(each, _with_autograd(each, each_save, formula), "Autograd", with_keyset=True)
        op_rules.register_vmap(library, each)


def _with_autograd(name: str, save: Callable[..., None], differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """The operator's implementation for the autograd keys.

    What `torch.library.register_autograd` registers, and three things that it does not: `torch.func.grad` works, an
    input with a forward-mode tangent is refused instead of losing it, and `op_rules` are there before anybody below
    needs them.
    """
    op = getattr(torch.ops.ffpa_jit, name).default

    def below(keyset: Any, inputs: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)

    # Of a single level: functorch has brought the call to one of its levels before it reaches this key.
    class Differentiable(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            inputs, keyset = inputs[:-1], inputs[-1]
            output = below(keyset, inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
            return (*differentiate(ctx, *grads), None)

    Differentiable.__name__ = f"ffpa_jit_{name}"

    def autograd(keyset: Any, *inputs: Any) -> Any:
        op_rules.prepare()
        if forward_ad._current_level >= 0 and has_tangent(*inputs):
            raise NotImplementedError(
                f"ffpa_jit::{name} has no forward-mode derivative (jvp, jacfwd, hessian); use reverse mode, or SDPA "
                "under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
            )
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            with enable_single_level_autograd_function():
                return Differentiable.apply(*inputs, keyset)  # type: ignore[attr-defined]
        return below(keyset, inputs)

    return autograd


register("flash_attn", _forward, _forward_fake, gradients, _gradients_fake, _save, _differentiate)

flash_attn_backward = torch.ops.ffpa_jit.flash_attn_backward.default


def flash_attn(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator. Inference mode skips its autograd key, and with it the rules."""
    if not torch.compiler.is_compiling():
        op_rules.prepare()
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.ffpa_jit.flash_attn.default(*inputs)
    return result


@functools.cache
def _foreign_keys(device: torch.device) -> int:
    """The dispatch keys, as bits, that a plain strided tensor of the device does not have."""
    with torch.inference_mode(False):  # tensors made in that mode lack the keys for gradients
        plain = torch.empty(0, device=device)
    return ~int(torch._C._dispatch_keys(plain).raw_repr())


def _only_default_devices() -> bool:
    """Whether the torch function modes that are active are those of `torch.set_default_device`, which say where new
    tensors go if nobody does."""
    depth = torch._C._len_torch_function_stack()
    return all(type(torch._C._get_function_stack_at(at)) is DeviceContext for at in range(depth))


def unwatched(*tensors: torch.Tensor) -> bool:
    """Whether nothing watches or transforms the operations on these tensors, so that the dispatcher may be skipped.

    Watchers: compilers, torch function modes (but for default devices) and dispatch modes (fake tensors, selective
    checkpointing, flop counters), functorch transforms, forward-mode derivatives, jit tracing; tensor subclasses; and
    tensors whose data is not what their memory says (lazily negated or zero, batched, nested, sparse). Not autocast: it
    does nothing to the operator, whose inputs are cast before.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and not _only_default_devices())
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


class _Planned(torch.autograd.Function):
    """A plan's forward with its backward, for tensors that are `unwatched`."""

    @staticmethod
    def forward(ctx: Any, planned: plan.Plan, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = planned.forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.plan = planned
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 6
        planned = ctx.plan
        _, *needs, _ = ctx.needs_input_grad
        query, key, value, attn_mask, rng, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        # The inputs were looked at in the forward. Without create_graph nothing would see the operator.
        grads = (grad_out,) if grad_lse is None else (grad_out, grad_lse)
        if planned.computes_gradients and not torch.is_grad_enabled() and unwatched(*grads):
            run = planned.backward(tuple(needs))
            return None, *run(grad_out, grad_lse, query, key, value, attn_mask, rng, out, lse), None
        p = planned.params
        return None, *_gradients_of(
            (query, key, value, attn_mask), rng, out, lse, grad_out, grad_lse,
            (p.scale, p.is_causal, p.dropout_p, *p.window, p.softcap), tuple(needs), planned.backward_text,
        ), None  # fmt: skip


def attend(planned: plan.Plan, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of query, key, value, attn_mask and rng by a plan, for tensors that are `unwatched`, at a fraction of
    the operator's host time. A plan without a backward computes no gradients."""
    if not planned.backward_text:
        result: tuple[torch.Tensor, torch.Tensor | None] = planned.forward(*inputs)
        return result
    result = _Planned.apply(planned, *inputs)
    return result
