"""The one oracle: attention and its gradients in float64, from the inputs as they were rounded.

The formulas, with x = scale * q k^T, s = x (or c * tanh(x / c) under a softcap c), plus an additive mask, -inf where a
key is not visible (bool mask, causal, window), and z = what dropout multiplies a probability with:

    lse = log sum_j exp(s_j)          out = sum_j p_j z_j v_j,  p = exp(s - lse)
    dp = z * (do v^T)                 ds = p * (dp - rowsum(do * out) + dlse)     dmask = ds, summed over broadcast dims
    dx = ds * (1 - tanh^2(x / c))     dq = scale * dx k       dk = scale * dx^T q       dv = (p * z)^T do

A row that sees no key has out 0, lse -inf and gradients 0. A row whose scores all lie below ``MINIMUM`` (a mask of
``finfo.min``) weighs the keys that are not -inf equally, as fp32 does.

The bound. Every tensor-core attention rounds three things to the 16-bit type: the probabilities
before P V, the score gradients before their GEMMs and sums, and each result. ``attention(rounding=dtype)``
evaluates the formulas with fp32 scores and exactly those roundings; a result passes when its error is at
most ``FACTOR`` times the error of that evaluation (or of one rounding, where that happens to be exact: one key
has probability 1), plus a floor of fp32 size for values that cancel to zero (one key: dq is exactly 0).
A score is known to two fp32 roundings of the largest number that it is made from, which the floor grows with; if that
is an additive mask, to as many as there are steps of its product, whose errors add up like a random walk.
Torch's math path is no yardstick here: it computes in fp32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 2.0
PEAK_FACTOR = 4.0  # the largest single element scatters more than a norm does
FLOOR = 2e-5
BUDGET = 2**25  # score elements held at once in float64
MINIMUM = -1e30
ONCE = 0.3  # of eps: what one rounding may do
NOISE = 0.21  # of eps: the standard deviation of one rounding


@dataclass
class Attention:
    """Results of the oracle; ``size_*`` are the magnitudes before cancellation, as the floor takes them."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dmask: Tensor | None = None
    size_out: Tensor | None = None
    size_dq: Tensor | None = None
    size_dk: Tensor | None = None
    size_dv: Tensor | None = None
    size_dmask: Tensor | None = None
    noise_dq: Tensor | None = None  # the standard deviation that the roundings of a row give each element
    noise_dk: Tensor | None = None
    noise_dmask: Tensor | None = None
    largest_score: float = 0.0


def limits(window: tuple[int | None, int | None] | None, is_causal: bool) -> tuple[int, int]:
    """(left, right) of a window in any of its spellings, -1 where there is no limit."""
    left, right = (-1 if limit is None else limit for limit in (window or (-1, -1)))
    return left, 0 if is_causal else right


def visible(rows: Tensor, len_q: int, len_kv: int, window: tuple[int, int] = (-1, 0)) -> Tensor:
    """Which keys the given query rows see; positions are aligned at the end (bottom-right)."""
    keys, at = torch.arange(len_kv, device=rows.device)[None, :], rows[:, None] + (len_kv - len_q)
    seen = torch.ones(1, 1, dtype=torch.bool, device=rows.device).expand(len(rows), len_kv)
    if window[0] >= 0:
        seen = seen & (keys >= at - window[0])
    if window[1] >= 0:
        seen = seen & (keys <= at + window[1])
    return seen


def round_mantissa(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the precision of ``dtype`` but keep the exponent: what a kernel scales into range cannot overflow."""
    mantissa, exponent = torch.frexp(x)
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)


def sum_to(x: Tensor, sizes: torch.Size) -> Tensor:
    """``x`` summed over the dims in which ``sizes`` has 1."""
    for axis, size in enumerate(sizes):
        if size == 1 and x.shape[axis] != 1:
            x = x.sum(axis, keepdim=True)
    return x


class MaskSums:
    """Sums of score gradients, chunk by chunk, in the shape of an additive mask [B|1, Hq|1, Nq|1, Nkv|1]."""

    def __init__(self, shape: torch.Size, heads_kv: int, group: int, device: torch.device) -> None:
        self.total = torch.zeros(shape, dtype=torch.float64, device=device)
        self.heads_kv, self.group = heads_kv, group

    def add(self, chunk: Tensor, first: int, rows: slice) -> None:
        """``chunk``: [heads, group, rows, keys], heads counting over batch * heads_kv from ``first``."""
        batch, heads, len_q, _ = shape = self.total.shape
        chunk = sum_to(chunk, torch.Size((-1, -1, shape[2], shape[3])))
        for i, one in enumerate(chunk):
            b, h = divmod(first + i, self.heads_kv)
            h = slice(h * self.group, (h + 1) * self.group) if heads > 1 else slice(0, 1)
            one = one if heads > 1 else one.sum(0, keepdim=True)
            self.total[b if batch > 1 else 0, h, rows if len_q > 1 else slice(0, 1)] += one


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
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
) -> Attention:
    """Evaluate attention, and the gradients when ``grad_out`` is given, chunked over heads and rows.

    ``attn_mask``: bool or additive, broadcastable to [B, Hq, Nq, Nkv]; its gradient has its shape. ``kept``: what
    dropout multiplies the probabilities with, [B, Hq, Nq, Nkv].
    """
    batch, heads_q, len_q, head_dim = query.shape
    heads_kv, len_kv, head_dim_v = key.shape[1], key.shape[2], value.shape[3]
    group = heads_q // max(heads_kv, 1)
    scale = head_dim**-0.5 if scale is None else scale
    window = limits(window, is_causal)
    ranged = window != (-1, -1)

    def rounded(x: Tensor) -> Tensor:
        return x if rounding is None else round_mantissa(x, rounding)

    # [B, Hq, ...] -> [B * Hkv, group, ...]; keys and values get a group axis of one.
    def split(x: Tensor, axis: int) -> Tensor:
        return x.detach().reshape(batch * heads_kv, axis, *x.shape[2:]).double()

    def scores_like(x: Tensor) -> Tensor:
        return x.detach().expand(batch, heads_q, len_q, len_kv).reshape(batch * heads_kv, group, len_q, len_kv)

    q, k, v = split(query, group), split(key, 1), split(value, 1)
    do = None if grad_out is None else split(grad_out, group)
    mask = None if attn_mask is None else scores_like(attn_mask)
    additive = mask is not None and mask.dtype != torch.bool
    factor = None if kept is None else scores_like(kept)
    dlse = None if grad_lse is None else split(grad_lse, group)
    flat = batch * heads_kv
    new = {"dtype": torch.float64, "device": query.device}
    out = torch.zeros(flat, group, len_q, head_dim_v, **new)
    lse = torch.full((flat, group, len_q), -math.inf, **new)
    result = Attention(out, lse)
    size_out = torch.zeros_like(out) if additive else None
    if do is not None:
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        size_dq, size_dk, size_dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        noise_dq, noise_dk = torch.zeros_like(q), torch.zeros_like(k)
        if additive:
            full = torch.Size((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
            dmask, size_dmask, variance = (MaskSums(full, heads_kv, group, query.device) for _ in range(3))

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
                s = q[h, :, r].float() @ k[h].float().mT * scale
            if softcap > 0:
                tanh = torch.tanh(s / softcap)
                slope = (1 - tanh * tanh).double()
                reach = s.abs().double() * slope + softcap * tanh.abs()
                s = softcap * tanh
            else:
                reach = s.abs().double()
            s = s.double()
            if ranged:
                hidden = ~visible(torch.arange(r.start, r.stop, device=q.device), len_q, len_kv, window)
                s.masked_fill_(hidden, -math.inf)
                reach.masked_fill_(hidden, 0.0)
            result.largest_score = max(result.largest_score, reach.amax().item())
            if additive:
                s += mask[h, :, r].double()
                if rounding is not None:
                    s = s.float().double()
            elif mask is not None:
                s.masked_fill_(~mask[h, :, r], -math.inf)
            top = s.amax(-1, keepdim=True)
            if additive:
                s = torch.where((top <= MINIMUM) & (s > -math.inf), MINIMUM, s)
                top = torch.where((top <= MINIMUM) & (top > -math.inf), MINIMUM, top)
            e = torch.exp(s - top.clamp_min(-1e300))
            total = e.sum(-1, keepdim=True)
            safe = torch.where(total == 0, 1.0, total)
            p = e / safe
            dropped = e if factor is None else e * factor[h, :, r]
            o = rounded(rounded(dropped) @ v[h] / safe)
            out[h, :, r] = o
            lse[h, :, r] = (top + torch.log(total)).squeeze(-1)
            # How much more than FLOOR the scores' own rounding is, by row: finite masks that keep the row's keys. The
            # sum of a score begins at the mask, and every step of 16 products cuts it off at the mask's size.
            extra = None
            if additive:
                far = s.abs().masked_fill((e < 1e-20) | (s <= MINIMUM), 0.0).amax(-1, keepdim=True)
                extra = 2.0**-23 / FLOOR * far * max(1.0, 0.3 * math.sqrt(head_dim / 16))
                size_out[h, :, r] = extra * (o.abs() + (dropped / safe).square() @ v[h].square()).sqrt()
            if do is None:
                continue
            g = do[h, :, r]
            z = 1.0 if factor is None else factor[h, :, r]
            dp = g @ v[h].mT * z
            delta = (g * o).sum(-1, keepdim=True)
            if dlse is not None:
                delta = delta - dlse[h, :, r].unsqueeze(-1)
            pz = p * z
            ds = rounded(p) * (dp - delta)  # P is stored before it meets dP
            dx = rounded(ds if softcap == 0 else ds * slope)
            dq[h, :, r] = dx @ k[h] * scale
            dk[h] += (dx.mT @ q[h, :, r]).sum(1, keepdim=True) * scale
            dv[h] += (rounded(pz).mT @ g).sum(1, keepdim=True)
            loud = p * (dp.abs() + delta.abs())
            if rounding is not None:
                # The rounding of ds itself, and those of out, which shift a whole row by way of delta.
                shift = (g * o).square().sum(-1, keepdim=True) + (p * dp).square().sum(-1, keepdim=True)
                slid = p if softcap == 0 else p * slope
                noise_dq[h, :, r] = dx.square() @ k[h].square() + (slid @ k[h]).square() * shift
                noise_dk[h] += ((dx.square() + slid.square() * shift).mT @ q[h, :, r].square()).sum(1, keepdim=True)
            if extra is not None:
                size_dv[h] += ((pz * extra).mT @ g.abs()).sum(1, keepdim=True)
                loud = loud * (1 + extra)
                dmask.add(rounded(ds), h0, r)
                size_dmask.add(loud, h0, r)
                if rounding is not None:
                    variance.add(sum_to(ds.square(), (-1, -1, -1, full[3])), h0, r)
                    variance.add(sum_to(p, (-1, -1, -1, full[3])).square() * shift, h0, r)
            if softcap > 0:
                loud = loud * (slope + 2.0**-23 / FLOOR)  # 1 - tanh^2 cancels
            size_dq[h, :, r] = loud @ k[h].abs() * scale
            size_dk[h] += (loud.mT @ q[h, :, r].abs()).sum(1, keepdim=True) * scale

    result.out = out.reshape(batch, heads_q, len_q, head_dim_v)
    result.lse = lse.reshape(batch, heads_q, len_q)
    if size_out is not None:
        result.size_out = result.out.abs() + size_out.reshape(result.out.shape)
    if do is None:
        return result
    result.dq, result.dk, result.dv = (rounded(x).reshape(y.shape) for x, y in ((dq, query), (dk, key), (dv, value)))
    result.size_dq, result.size_dk = size_dq.reshape(query.shape).abs(), size_dk.reshape(key.shape).abs()
    if rounding is not None:
        noise = NOISE * torch.finfo(rounding).eps
        result.noise_dq = noise * abs(scale) * noise_dq.sqrt().reshape(query.shape)
        result.noise_dk = noise * abs(scale) * noise_dk.sqrt().reshape(key.shape)
    if additive:
        result.size_dv = result.dv.abs() + size_dv.reshape(value.shape)
        total = dmask.total if rounding is None else round_mantissa(dmask.total, attn_mask.dtype)
        result.dmask, result.size_dmask = total.reshape(attn_mask.shape), size_dmask.total.reshape(attn_mask.shape)
        if rounding is not None:
            result.noise_dmask = noise * variance.total.sqrt().reshape(attn_mask.shape)
    return result


def relative_error(result: Tensor, reference: Tensor) -> float:
    """||result - reference|| / ||reference||; a NaN anywhere gives infinity, 0 against 0 gives 0."""
    difference = (result.double() - reference.double()).norm().item()
    if math.isnan(difference):
        return math.inf
    norm = reference.double().norm().item()
    return difference / norm if norm else (math.inf if difference else 0.0)


def assert_close(
    name: str,
    result: Tensor,
    exact: Tensor,
    rounded: Tensor,
    size: Tensor | None = None,
    floor: float = FLOOR,
    noise: Tensor | None = None,
) -> None:
    """Hold ``result`` to the bound, per (batch, head) in norm and overall in the largest element.

    ``noise``: the deviation of the elements, for where few roundings make many of them and ``rounded`` is but one draw.
    """
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
    once = ONCE * torch.finfo(dtype).eps
    model = torch.maximum(norm(rounded - exact), norm(rounded - exact).square().mean().sqrt() * scatter)
    model = torch.maximum(model, once * norm(exact))
    if noise is not None:
        draws = exact.shape[2] if name != "dmask" else exact.shape[2:].numel()
        model = torch.maximum(model, norm(noise) * (1 + 2 / math.sqrt(draws)))
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # results may be subnormal
    allowed = FACTOR * model + floor * norm(size) + tiny * math.prod(exact.shape[2:]) ** 0.5
    error = norm(result - exact)
    worst = int((error - allowed).argmax())
    assert (error <= allowed).all(), (
        f"{name}: error {error.flatten()[worst]:.3e} > {allowed.flatten()[worst]:.3e} "
        f"in head {worst} of {error.numel()} (norm {norm(exact).flatten()[worst]:.3e})"
    )
    peak, peak_allowed = (result - exact).abs().amax(), (rounded - exact).abs().amax()
    peak_allowed = torch.maximum(peak_allowed, once * exact.abs().amax())
    if noise is not None:
        peak_allowed = torch.maximum(peak_allowed, 2 * noise.amax())
    limit = PEAK_FACTOR * peak_allowed + floor * size.abs().amax() + tiny
    assert peak <= limit, f"{name}: largest error {peak:.3e} > {limit:.3e}"


def assert_lse(result: Tensor, exact: Tensor, rounded: Tensor) -> None:
    """lse is fp32: rows without keys are -inf exactly, the others within fp32 of the scores' size.

    Rows of "minimum" scores may hold any number below ``MINIMUM``.
    """
    assert result.dtype == torch.float32
    assert result.shape == exact.shape
    result = result.detach().double()
    empty, minimum = torch.isneginf(exact), exact <= MINIMUM / 2
    assert torch.equal(torch.isneginf(result), empty), "lse: -inf in the wrong rows"
    assert (result[minimum] < MINIMUM).all(), "lse: a row of minimum scores must stay below all others"
    for rows in (~minimum & (exact.abs() < 1e4), ~minimum & (exact.abs() >= 1e4)):
        if not rows.any():
            continue
        difference = (result - exact)[rows].abs()
        limit = FACTOR * (rounded - exact)[rows].abs().amax() + 2e-6 * (1 + exact[rows].abs().amax())
        assert (difference <= limit).all(), f"lse: error {difference.amax():.3e} > {limit:.3e}"


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    grad_mask: Tensor | None = None,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **options: object,
) -> None:
    """Hold whatever results are given to the oracle's bound; ``options`` are those of ``attention``."""
    if grad_mask is not None or any(g is not None for g in grads):
        options.update(grad_out=grad_out, grad_lse=grad_lse)
    exact = attention(query, key, value, **options)
    rounded = attention(query, key, value, rounding=query.dtype, **options)
    # A score is known to two fp32 roundings of the largest one, and a probability errs by what its score does.
    floor = FLOOR + 2.0**-23 * exact.largest_score
    if lse is not None:
        assert_lse(lse, exact.lse, rounded.lse)
    for name, result in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        if result is not None:
            size = getattr(exact, f"size_{name}")
            noise = getattr(rounded, f"noise_{name}", None)
            assert_close(name, result, getattr(exact, name), getattr(rounded, name), size, floor, noise)
    if grad_mask is not None:
        lead = (1,) * (4 - grad_mask.dim())
        four = [x.reshape(*lead, *x.shape) for x in (exact.dmask, rounded.dmask, exact.size_dmask, rounded.noise_dmask)]
        result = grad_mask.reshape(*lead, *grad_mask.shape)
        assert_close("dmask", result, *four[:3], floor, noise=four[3])


def sequences(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """The rows and the keys of each sequence of a packed batch."""
    q, k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


def _one_sequence(
    tensors: dict[str, Tensor | None], rows: slice, keys: slice, kept: Tensor | None
) -> dict[str, Tensor | None]:
    """Packed tensors [T, H, D] (and lse-like [H, T]), by name, as the batch of one that a sequence is."""
    sides = {"key": keys, "value": keys, "dk": keys, "dv": keys}
    cut: dict[str, Tensor | None] = {}
    for name, x in tensors.items():
        if x is None:
            cut[name] = None
        elif name in ("lse", "grad_lse"):
            cut[name] = x[:, rows].unsqueeze(0)
        else:
            cut[name] = x[sides.get(name, rows)].transpose(0, 1).unsqueeze(0)
    if kept is not None:
        cut["kept"] = kept[:, :, rows, : keys.stop - keys.start]
    return cut


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    kept: Tensor | None = None,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **options: object,
) -> Attention:
    """``attention`` of each sequence of [T, H, D] tensors, packed again; rows of no sequence have zeros and -inf.

    ``kept``: [1, Hq, Tq, longest keys], by packed row and by key within its sequence. lse is [Hq, Tq].
    """
    new = {"dtype": torch.float64, "device": query.device}
    result = Attention(
        torch.zeros(*query.shape[:2], value.shape[2], **new), torch.full(query.shape[1::-1], -math.inf, **new)
    )
    if grad_out is not None:
        result.dq, result.dk, result.dv = (torch.zeros(x.shape, **new) for x in (query, key, value))
    packed = {"query": query, "key": key, "value": value, "grad_out": grad_out, "grad_lse": grad_lse}
    for rows, keys in sequences(cu_q, cu_k):
        one = attention(**_one_sequence(packed, rows, keys, kept), **options)
        result.out[rows], result.lse[:, rows] = one.out[0].transpose(0, 1), one.lse[0]
        if grad_out is not None:
            result.dq[rows] = one.dq[0].transpose(0, 1)
            result.dk[keys], result.dv[keys] = one.dk[0].transpose(0, 1), one.dv[0].transpose(0, 1)
    return result


def check_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    kept: Tensor | None = None,
    only: set[int] | None = None,
    **options: object,
) -> None:
    """Hold each sequence (``only`` those, if given) to the oracle's bound, and the rows beyond them all to zero."""
    packed = {
        "query": query, "key": key, "value": value, "out": out, "lse": lse, "grad_out": grad_out,
        "grad_lse": grad_lse, "dq": grads[0], "dk": grads[1], "dv": grads[2],
    }  # fmt: skip
    rows, keys = slice(0, 0), slice(0, 0)
    for i, (rows, keys) in enumerate(sequences(cu_q, cu_k)):
        if only is None or i in only:
            one = _one_sequence(packed, rows, keys, kept)
            one["grads"] = tuple(one.pop(name) for name in ("dq", "dk", "dv"))
            check(**one, **options)
    for name, x, last in (("out", out, rows), *zip(("dq", "dk", "dv"), grads, (rows, keys, keys), strict=True)):
        assert x is None or (x[last.stop :] == 0).all(), f"{name}: rows of no sequence must be 0"
    assert lse is None or torch.isneginf(lse[:, rows.stop :]).all(), "lse: rows of no sequence must be -inf"
