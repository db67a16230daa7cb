"""The one oracle: attention and its gradients in float64, from the inputs as they were rounded.

The formulas, with s = scale * q k^T and masked scores at -inf:

    lse = log sum_j exp(s_j)          out = sum_j p_j v_j,  p = exp(s - lse)
    dp = do v^T                       ds = p * (dp - rowsum(do * out) + dlse)
    dq = scale * ds k                 dk = scale * ds^T q           dv = p^T do

A row that sees no key has out 0, lse -inf and gradients 0.

The bound. Every tensor-core attention rounds three things to the 16-bit type: the probabilities
before P V, the score gradients before their two GEMMs, and each result. ``attention(rounding=dtype)``
evaluates the formulas with fp32 scores and exactly those roundings; a result passes when its error is at
most ``FACTOR`` times the error of that evaluation (or of one rounding, where that happens to be exact: one key
has probability 1), plus a floor of fp32 size for values that cancel to zero (one key: dq is exactly 0).
Torch's math path is no yardstick here: it computes in fp32 throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0
PEAK_FACTOR = 4.0  # the largest single element scatters more than a norm does
FLOOR = 2e-5
BUDGET = 2**25  # score elements held at once in float64


@dataclass
class Attention:
    """Results of the oracle; ``size_*`` are the magnitudes before cancellation."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    size_dq: Tensor | None = None
    size_dk: Tensor | None = None
    largest_score: float = 0.0


def visible(rows: Tensor, len_q: int, len_kv: int) -> Tensor:
    """Bottom-right causal visibility of every key for the given query rows."""
    keys = torch.arange(len_kv, device=rows.device)
    return keys[None, :] <= rows[:, None] + (len_kv - len_q)


def round_mantissa(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the precision of ``dtype`` but keep the exponent: what a kernel scales into range cannot overflow."""
    mantissa, exponent = torch.frexp(x)
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    rounding: torch.dtype | None = None,
    attn_mask: Tensor | None = None,
    kept: Tensor | None = None,
) -> Attention:
    """Evaluate attention, and the gradients when ``grad_out`` is given, chunked over heads and rows.

    ``attn_mask``: bool or additive, broadcastable to [B, Hq, Nq, Nkv]. ``kept``: what dropout multiplies the
    probabilities with, of that shape. Neither goes with gradients here.
    """
    batch, heads_q, len_q, head_dim = query.shape
    heads_kv, len_kv, head_dim_v = key.shape[1], key.shape[2], value.shape[3]
    group = heads_q // max(heads_kv, 1)
    scale = head_dim**-0.5 if scale is None else scale

    def rounded(x: Tensor) -> Tensor:
        return x if rounding is None else round_mantissa(x, rounding)

    # [B, Hq, ...] -> [B * Hkv, group, ...]; keys and values get a group axis of one.
    def split(x: Tensor, axis: int) -> Tensor:
        return x.detach().reshape(batch * heads_kv, axis, *x.shape[2:]).double()

    q, k, v = split(query, group), split(key, 1), split(value, 1)
    do = None if grad_out is None else split(grad_out, group)

    def scores_like(x: Tensor) -> Tensor:
        return x.expand(batch, heads_q, len_q, len_kv).reshape(batch * heads_kv, group, len_q, len_kv)

    assert do is None or (attn_mask is None and kept is None)
    mask = None if attn_mask is None else scores_like(attn_mask)
    factor = None if kept is None else scores_like(kept)
    dlse = None if grad_lse is None else split(grad_lse, group)
    flat = batch * heads_kv
    new = {"dtype": torch.float64, "device": query.device}
    out = torch.zeros(flat, group, len_q, head_dim_v, **new)
    lse = torch.full((flat, group, len_q), -math.inf, **new)
    result = Attention(out, lse)
    if do is not None:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        size_dq, size_dk = torch.zeros_like(q), torch.zeros_like(k)

    row_block = max(1, min(len_q, 2048))
    head_block = max(1, BUDGET // max(1, group * row_block * len_kv))
    for h0 in range(0, flat, head_block):
        h = slice(h0, h0 + head_block)
        for r0 in range(0, len_q, row_block):
            if len_kv == 0:
                continue
            r = slice(r0, min(r0 + row_block, len_q))
            if rounding is None:
                s = q[h, :, r] @ k[h].mT * scale
            else:
                s = (q[h, :, r].float() @ k[h].float().mT * scale).double()
            if is_causal:
                rows = torch.arange(r.start, r.stop, device=q.device)
                s.masked_fill_(~visible(rows, len_q, len_kv), -math.inf)
            finite = s.abs().masked_fill(s.abs() > 1e30, 0.0)  # not what a mask's "minimum" made of them
            result.largest_score = max(result.largest_score, finite.amax().item())
            if mask is not None and mask.dtype == torch.bool:
                s.masked_fill_(~mask[h, :, r], -math.inf)
            elif mask is not None:
                s += mask[h, :, r].double()
                if rounding is not None:
                    s = s.float().double()
            top = s.amax(-1, keepdim=True).clamp_min(-1e300)
            e = torch.exp(s - top)
            total = e.sum(-1, keepdim=True)
            safe = torch.where(total == 0, 1.0, total)
            dropped = e if factor is None else e * factor[h, :, r]
            o = rounded(rounded(dropped) @ v[h] / safe)
            out[h, :, r] = o
            lse[h, :, r] = (top + torch.log(total)).squeeze(-1)
            if do is None:
                continue
            g = do[h, :, r]
            p = e / safe
            dp = g @ v[h].mT
            delta = (g * o).sum(-1, keepdim=True)
            if dlse is not None:
                delta = delta - dlse[h, :, r].unsqueeze(-1)
            ds = rounded(p * (dp - delta))
            dq[h, :, r] = ds @ k[h] * scale
            dk[h] += (ds.mT @ q[h, :, r]).sum(1, keepdim=True) * scale
            dv[h] += (rounded(p).mT @ g).sum(1, keepdim=True)
            loud = p * (dp.abs() + delta.abs()) * scale
            size_dq[h, :, r] = loud @ k[h].abs()
            size_dk[h] += (loud.mT @ q[h, :, r].abs()).sum(1, keepdim=True)

    result.out = out.reshape(batch, heads_q, len_q, head_dim_v)
    result.lse = lse.reshape(batch, heads_q, len_q)
    if do is not None:
        result.dq, result.dk, result.dv = (
            rounded(x).reshape(y.shape) for x, y in ((dq, query), (dk, key), (dv, value))
        )
        result.size_dq, result.size_dk = size_dq.reshape(query.shape), size_dk.reshape(key.shape)
    return result


def relative_error(result: Tensor, reference: Tensor) -> float:
    """||result - reference|| / ||reference||; a NaN anywhere gives infinity, 0 against 0 gives 0."""
    difference = (result.double() - reference.double()).norm().item()
    if math.isnan(difference):
        return math.inf
    norm = reference.double().norm().item()
    return difference / norm if norm else (math.inf if difference else 0.0)


def assert_close(
    name: str, result: Tensor, exact: Tensor, rounded: Tensor, size: Tensor | None = None, floor: float = FLOOR
) -> None:
    """Hold ``result`` to the bound, per (batch, head) in norm and overall in the largest element."""
    assert result.shape == exact.shape, f"{name}: shape {tuple(result.shape)}, not {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    size, dtype = exact if size is None else size, result.dtype
    result, rounded = result.detach().double(), rounded.double()
    assert not result.isnan().any(), f"{name}: {int(result.isnan().sum())} NaN of {result.numel()}"
    axes = tuple(range(2, exact.ndim))

    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=axes)

    # The slack of one head never falls under that of the average head: heads of a few rows scatter about it, and the
    # worst of many such heads by more (the largest of n normal deviates is about sqrt(2 ln n)).
    scatter = 1 + math.sqrt(math.log(exact.shape[:2].numel()) / exact.shape[2])
    once = 0.3 * torch.finfo(dtype).eps
    model = torch.maximum(norm(rounded - exact), norm(rounded - exact).square().mean().sqrt() * scatter)
    allowed = FACTOR * torch.maximum(model, once * norm(exact))
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # results may be subnormal
    allowed = allowed + floor * norm(size) + tiny * math.prod(exact.shape[2:]) ** 0.5
    error = norm(result - exact)
    worst = int((error - allowed).argmax())
    assert (error <= allowed).all(), (
        f"{name}: error {error.flatten()[worst]:.3e} > {allowed.flatten()[worst]:.3e} "
        f"in head {worst} of {error.numel()} (norm {norm(exact).flatten()[worst]:.3e})"
    )
    peak, peak_allowed = (result - exact).abs().amax(), (rounded - exact).abs().amax()
    peak_allowed = torch.maximum(peak_allowed, once * exact.abs().amax())
    limit = PEAK_FACTOR * peak_allowed + floor * size.abs().amax() + tiny
    assert peak <= limit, f"{name}: largest error {peak:.3e} > {limit:.3e}"


def assert_lse(result: Tensor, exact: Tensor, rounded: Tensor) -> None:
    """lse is fp32: rows without keys are -inf exactly, the others within fp32 of the scores' size."""
    assert result.dtype == torch.float32
    assert result.shape == exact.shape
    if exact.numel() == 0:
        return
    result = result.detach().double()
    empty = torch.isneginf(exact)
    assert torch.equal(torch.isneginf(result), empty), "lse: -inf in the wrong rows"
    if empty.all():
        return
    difference = (result - exact)[~empty].abs()
    limit = FACTOR * (rounded - exact)[~empty].abs().amax() + 2e-6 * (1 + exact[~empty].abs().amax())
    assert (difference <= limit).all(), f"lse: error {difference.amax():.3e} > {limit:.3e}"


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    kept: Tensor | None = None,
) -> None:
    """Hold whatever results are given to the oracle's bound."""
    wanted = any(g is not None for g in grads)
    arguments = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask, "kept": kept}
    if wanted:
        arguments.update(grad_out=grad_out, grad_lse=grad_lse)
    exact = attention(query, key, value, **arguments)
    rounded = attention(query, key, value, rounding=query.dtype, **arguments)
    # A score is known to two fp32 roundings of the largest one, and a probability errs by what its score does.
    floor = FLOOR + 2.0**-23 * exact.largest_score
    assert_close("out", out, exact.out, rounded.out, floor=floor)
    if lse is not None:
        assert_lse(lse, exact.lse, rounded.lse)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        if grad is not None:
            size = getattr(exact, f"size_{name}", None)
            assert_close(name, grad, getattr(exact, name), getattr(rounded, name), size, floor)
