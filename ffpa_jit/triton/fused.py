"""Forward and backward that allocate nothing but results and row vectors, O(B H N). Device side: ``fused_kernels``."""

from __future__ import annotations

import math
from typing import Any

import torch

from ffpa_jit.triton import fused_kernels, rows
from ffpa_jit.triton.configs import fused_tiling, uses_tma
from ffpa_jit.triton.dense import grad_scale, nothing_seen
from ffpa_jit.triton.launch import Launcher, bind, copy
from ffpa_jit.triton.schedule import TILE, tiles
from ffpa_jit.triton.terms import Terms

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms, *, arch: str,
    launcher: Launcher | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention output [B, Hq, Nq, D] in the query's layout, and LSE [B, Hq, Nq] (float32, natural logarithm)."""
    launcher = launcher or Launcher(query.device)
    out = launcher.result_like(query)
    lse = launcher.result(query.shape[:-1], torch.float32)
    if out.numel() == 0 or key.shape[2] == 0:
        launcher.call(nothing_seen, out, lse)
        return out, lse
    q, k, v = launcher.operand(query), launcher.operand(key), launcher.operand(value)
    target = launcher.operand(out)  # an output whose last stride is not 1 is computed densely and copied
    call = _Call(q, k, terms, arch, "forward", launcher)
    t = call.tiling
    launcher(
        fused_kernels.fused_forward, call.query_programs * call.slices, call.read(call.q, TILE),
        call.read(call.k, t.strip), *call.sliced(v, t.strip), *call.sliced(target, TILE), lse,
        terms.scale_log2, terms.keep_scale, *call.counts, call.mods, PTX=call.ptx, **call.widths, **call.common,
    )  # fmt: skip
    if target is not out:
        launcher.call(copy, out, target)
    return out, lse


def backward(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, terms: Terms, *,
    needs: tuple[bool, bool, bool, bool], arch: str, launcher: Launcher | None = None,
) -> Gradients:  # fmt: skip
    """(dQ, dK, dV, dmask) in the layouts of their inputs; None where ``needs`` is false.

    dmask has the sizes of the mask: what it broadcasts over with size 1 is summed, in float32.
    """
    launcher = launcher or Launcher(query.device)
    inputs = (query, key, value, terms.attn_mask)
    grads = [launcher.result_like(t) if need and t is not None else None for t, need in zip(inputs, needs, strict=True)]
    if query.numel() == 0 or key.numel() == 0:
        for grad in grads:
            if grad is not None:
                launcher.call(torch.Tensor.zero_, grad)
    elif any(grad is not None for grad in grads):
        do, q, k, v, o = (launcher.operand(x) for x in (grad_out, query, key, value, out))
        run = _Backward(do, grad_lse, q, k, v, o, lse, terms, arch, launcher)
        for compute, grad in zip((run.query, run.key, run.value), grads[:3], strict=True):
            if grad is not None:
                target = launcher.operand(grad)
                compute(target)
                if target is not grad:
                    launcher.call(copy, grad, target)
        if grads[3] is not None:
            run.mask(grads[3])
    dq, dk, dv, dmask = grads
    return dq, dk, dv, dmask


def _plain(terms: Terms) -> bool:
    """Whether nothing but a mask, if that, stands between a product and a probability."""
    return terms.softcap == 0 and terms.dropout_p == 0 and not terms.masked_late


class _Call:
    """What the kernels of one direction have in common."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, terms: Terms, arch: str, direction: str, launcher: Launcher
    ) -> None:
        self.q, self.k, self.launch = q, k, launcher
        batch, heads_q, len_q, head_dim = q.shape
        self.group = heads_q // k.shape[1]
        self.tma, self.ptx = uses_tma(arch), arch.startswith("sm_")
        self.mods, bits = terms.modifiers
        t = self.tiling = fused_tiling(arch, direction, head_dim, plain=_plain(terms))
        self.slices = -(-head_dim // t.width)
        self.query_programs = batch * heads_q * tiles(len_q)
        self.counts = len_q, k.shape[2], terms.left, terms.right, heads_q, self.group, tiles(len_q)
        self.widths = {"BLOCK_N": t.block_n, "TAIL": t.tail}
        self.common: dict[str, Any] = {
            "MOD_FLAGS": bits, "D": head_dim, "BLOCK_K": t.block_k, "STRIP": t.strip, "TMA": self.tma, "TILE": TILE,
            **t.options(),
        }  # fmt: skip

    def read(self, x: torch.Tensor, height: int) -> Any:
        """An operand of a score tile."""
        return bind(x, height, self.tiling.block_k, self.tma)

    def sliced(self, x: torch.Tensor, height: int) -> list[Any]:
        """A matrix read or written in slices of its columns: the slice's two parts."""
        return [bind(x, height, columns, self.tma) for columns in (self.tiling.block_n, self.tiling.tail)]


class _Backward(_Call):
    """The launches of one backward call; delta is computed on construction."""

    def __init__(
        self, do: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, terms: Terms, arch: str, launcher: Launcher,
    ) -> None:  # fmt: skip
        super().__init__(q, k, terms, arch, "backward", launcher)
        self.do, self.v, self.terms = do, v, terms
        grad_lse = None if grad_lse is None else launcher.contiguous(grad_lse)
        self.scaled = q.dtype == torch.float16
        # Dropout makes dP larger: by the next power of two, which the scale is one of.
        larger = 2.0 ** math.ceil(math.log2(max(terms.keep_scale, 1.0)))
        self.grad_scale = grad_scale(launcher, do, v, grad_lse, larger) if self.scaled else None
        self.factors = terms.scale_log2, terms.keep_scale
        self.bwd_preprocess = self._bwd_preprocess(out, lse, grad_lse)
        strip = self.tiling.strip
        # A row tile against a strip of keys, and a strip of rows against a key tile: q, k, v, do.
        self.by_rows = [self.read(x, n) for x, n in ((q, TILE), (k, strip), (v, strip), (do, TILE))]
        self.by_keys = [self.read(x, n) for x, n in ((q, strip), (k, TILE), (v, TILE), (do, strip))]

    def _bwd_preprocess(
        self, out: torch.Tensor, lse: torch.Tensor, grad_lse: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """LSE in log2 units and delta, both [B * Hq, row tiles * TILE]."""
        batch, heads_q, len_q, head_dim = self.q.shape
        height, width, m_tiles = 16, 256, tiles(len_q)
        terms = self.launch.scratch((2, batch * heads_q * m_tiles * TILE), torch.float32).unbind()
        self.launch(
            rows.bwd_preprocess, batch * heads_q * m_tiles * (TILE // height), bind(self.do, height, width, self.tma),
            bind(out, height, width, self.tma), self.launch.contiguous(lse), grad_lse,
            *terms, len_q, heads_q, m_tiles, D=head_dim, BLOCK_D=width, HAS_GRAD_LSE=grad_lse is not None,
            ROWS=height, TMA=self.tma, TILE=TILE, num_warps=4,
        )  # fmt: skip
        return list(terms)

    def query(self, dq: torch.Tensor) -> None:
        self.launch(
            fused_kernels.fused_query_gradient, self.query_programs * self.slices,
            *self.by_rows, *self.sliced(self.k, self.tiling.strip), *self.sliced(dq, TILE), *self.bwd_preprocess,
            self.grad_scale, self.terms.scale, *self.factors, *self.counts, self.mods, SCALED=self.scaled,
            PTX=self.ptx, **self.widths, **self.common,
        )  # fmt: skip

    def key(self, dk: torch.Tensor) -> None:
        self._key_side(self.q, dk, self.terms.scale, of_value=False)

    def value(self, dv: torch.Tensor) -> None:
        self._key_side(self.do, dv, self.terms.keep_scale, of_value=True)

    def _key_side(self, row_side: torch.Tensor, grad: torch.Tensor, factor: float, *, of_value: bool) -> None:
        batch, heads_kv, len_kv, _ = self.k.shape
        self.launch(
            fused_kernels.fused_key_gradient, batch * heads_kv * tiles(len_kv) * self.slices,
            *self.by_keys, *self.sliced(row_side, self.tiling.strip), *self.sliced(grad, TILE), *self.bwd_preprocess,
            self.grad_scale, factor, *self.factors, *self.counts, self.mods, OF_VALUE=of_value,
            SCALED=self.scaled, PTX=self.ptx, **self.widths, **self.common,
        )  # fmt: skip

    def mask(self, dmask: torch.Tensor) -> None:
        batches, heads, len_q, len_kv = dmask.shape
        one_row, one_key = len_q == 1, len_kv == 1
        programs = batches * heads * tiles(len_q) * -(-len_kv // self.tiling.strip)
        self.launch(
            fused_kernels.fused_mask_gradient, programs,
            *self.by_rows, dmask, *dmask.stride(), *self.bwd_preprocess, *self.factors, *self.counts, self.q.shape[0],
            batches, heads, self.mods, ONE_ROW=one_row, ONE_KEY=one_key, **self.common,
        )  # fmt: skip
