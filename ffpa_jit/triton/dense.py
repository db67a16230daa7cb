"""Dense forward and backward on the two-phase kernels: workspace, blocks, launches."""

from __future__ import annotations

import functools
import math

import torch

from ..settings import workspace_bytes
from . import rows, score, value
from .configs import score_tiling, uses_tma, value_tiling
from .geometry import GROUP_ROWS, TILE, grid_tiles
from .launch import bind, bind_tiles, operand, processors
from .schedule import Block, Shape, backward_blocks, forward_blocks, tiles

LOG2E = math.log2(math.e)

EXPONENT_WINDOW = {torch.bfloat16: (64, 32), torch.float16: (0, 15)}
"""dtype -> (SHIFT, HEADROOM) of ``score``: where P sits in the exponent range, and how far a score may exceed it."""


def _shape(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> Shape:
    b, h, n, d = query.shape
    return Shape(b * h, h // key.shape[1], n, key.shape[2], d, is_causal)


def forward(
    query: torch.Tensor, key: torch.Tensor, value_: torch.Tensor, *, scale: float, is_causal: bool, arch: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output [B, Hq, Nq, D] in the query's layout, and LSE [B, Hq, Nq] (float32, natural logarithm)."""
    b, h, n, d = query.shape
    out = torch.empty_like(query)
    lse = query.new_empty((b, h, n), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    s = _shape(query, key, is_causal)
    if s.len_kv == 0:
        return out.zero_(), lse.fill_(-math.inf)
    q, k, v = operand(query), operand(key), operand(value_)
    o = operand(out)

    blocks = forward_blocks(s, workspace_bytes())
    m_total = tiles(n)
    most = max(block.slots * block.heads for block in blocks)
    p = query.new_empty((most * TILE, TILE))
    stats = query.new_empty((3, most * TILE), dtype=torch.float32).unbind()
    reference = query.new_empty(s.heads * m_total * TILE, dtype=torch.float32)
    inverse_sum = query.new_empty(max(x.heads * x.m_tiles for x in blocks) * TILE, dtype=torch.float32)

    shift, headroom = EXPONENT_WINDOW[query.dtype]
    tiling = score_tiling(arch, "forward")
    tma = uses_tma(arch)
    common = {"D": d, "CAUSAL": is_causal, "TMA": tma, "TILE": TILE}
    q_rows, k_rows = bind(q, TILE, tiling.block_k, tma), bind(k, TILE, tiling.block_k, tma)
    score.row_reference[(s.heads * m_total,)](
        q_rows, k_rows, reference, scale * LOG2E, n, s.len_kv, h, s.group, m_total,
        BLOCK_K=tiling.block_k, SHIFT=shift, **common, **tiling.options(),
    )  # fmt: skip
    wide = value_tiling(arch, "forward", d)
    p_tile, p_rows = bind_tiles(p, TILE, TILE, tma), bind_tiles(p, TILE, wide.block_k, tma)
    columns = wide.block_n, wide.tail
    v_parts = [bind(v, wide.block_k, cols, tma) for cols in columns]
    o_parts = [bind(o, TILE, cols, tma) for cols in columns]
    for x in blocks:
        programs = grid_tiles(x.m_tiles, x.n_tiles, x.offset, is_causal)
        score.score_forward[(x.heads * programs,)](
            q_rows, k_rows, p_tile, reference, *stats, scale * LOG2E,
            n, s.len_kv, x.row_first, x.col_first, x.head_first, h, s.group, x.m_tiles, x.n_tiles, x.slots, programs,
            x.offset, BLOCK_K=tiling.block_k, HEADROOM=headroom, GROUP_ROWS=GROUP_ROWS,
            PTX=arch.startswith("sm_"), **common, **tiling.options(),
        )  # fmt: skip
        rows.combine[(x.heads * x.m_tiles,)](
            p, *stats, inverse_sum, lse, n, x.row_first, x.head_first, x.m_tiles, x.n_tiles, x.slots,
            x.offset, CAUSAL=is_causal, CHUNK=16, TILE=TILE, num_warps=4,
        )  # fmt: skip
        value.value_forward[(x.heads * x.m_tiles * -(-d // wide.width),)](
            p_rows, *v_parts, *o_parts, inverse_sum, n, s.len_kv,
            x.row_first, x.col_first, x.head_first, h, s.group, x.m_tiles, x.n_tiles, x.slots, x.heads, x.offset,
            BLOCK_N=wide.block_n, TAIL=wide.tail, BLOCK_K=wide.block_k, **common, **wide.options(),
        )  # fmt: skip
    if o is not out:
        out.copy_(o)
    return out, lse


def _grad_scale(grad_out: torch.Tensor, value_: torch.Tensor, grad_lse: torch.Tensor | None) -> torch.Tensor:
    """A power of two that puts float16 dS near the top of its range, whatever the loss scale; on the device.

    ``|dP - delta| <= 2 D max|dO| max|V| + max|dlse|``, so with this factor no dS exceeds 2^15 and small gradients keep their bits.
    """
    largest = functools.partial(torch.linalg.vector_norm, ord=math.inf, dtype=torch.float32)
    bound = 2.0 * value_.shape[-1] * largest(grad_out) * largest(value_)
    if grad_lse is not None:
        bound = bound + largest(grad_lse)
    return torch.exp2(torch.floor(15.0 - torch.log2(bound.clamp(2.0**-60, 2.0**60)))).reshape(1)


def backward(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
    value_: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, scale: float, is_causal: bool,
    needs: tuple[bool, bool, bool], arch: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(dQ, dK, dV) in the layouts of their inputs; None where ``needs`` is false."""
    inputs = (query, key, value_)
    grads = tuple(torch.empty_like(t) if need else None for t, need in zip(inputs, needs, strict=True))
    if query.numel() == 0 or key.numel() == 0:
        return tuple(None if g is None else g.zero_() for g in grads)  # type: ignore[return-value]
    if not any(needs):
        return None, None, None
    s = _shape(query, key, is_causal)
    run = _Backward(grad_out, grad_lse, query, key, value_, out, lse, grads, s, scale, arch)
    for block in run.blocks:
        run.score(block)
        if block.all_keys:
            run.refine(block)
        run.value(block)
        if block.partial and block.last:
            run.reduce(block)
    return run.finish()


class _Backward:
    """The operands of one backward call and its three kinds of launch."""

    def __init__(self, grad_out, grad_lse, query, key, value_, out, lse, grads, s: Shape, scale: float, arch: str):  # type: ignore[no-untyped-def]
        self.s, self.scale, self.arch, self.grads = s, scale, arch, grads
        self.heads_q, self.heads_kv = query.shape[1], key.shape[1]
        self.device = query.device
        self.need_dq, self.need_dk, self.need_dv = (g is not None for g in grads)
        self.dtype = query.dtype
        do = operand(grad_out)
        self.q, self.k, self.v, self.do = operand(query), operand(key), operand(value_), do
        # Gradients that a descriptor cannot address (last stride not 1) are computed densely and copied.
        self.targets = tuple(None if g is None else operand(g) for g in grads)
        d = s.head_dim
        tma = self.tma = uses_tma(arch)
        self.common = {"D": d, "CAUSAL": s.causal, "TMA": tma, "TILE": TILE}
        self.wide = value_tiling(arch, "backward", d)
        self.d_tiles = -(-d // self.wide.width)
        self.need_ds = self.need_dq or self.need_dk
        self.blocks = backward_blocks(
            s, workspace_bytes(), matrices=1 + self.need_ds, dq=self.need_dq,
            dkv=self.need_dk or self.need_dv, d_tiles=self.d_tiles, processors=processors(query.device),
        )  # fmt: skip
        most = max(b.slots * b.heads for b in self.blocks)
        p = self.p = query.new_empty((most * TILE, TILE))
        ds = self.ds = query.new_empty((most * TILE if self.need_ds else TILE, TILE))
        stats = query.new_empty((2, most * TILE if self.need_ds else TILE), dtype=torch.float32)
        self.row_sum, self.row_size = stats.unbind()
        self.sums = self._sums()
        self.scaled = self.dtype == torch.float16
        self.grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
        self.grad_scale = _grad_scale(do, self.v, self.grad_lse) if self.scaled else None
        self.lse2, self.delta = self._row_terms(do, operand(out), lse)

        t = self.score_tiling = score_tiling(arch, "backward")
        self.score_operands = tuple(bind(x, TILE, t.block_k, tma) for x in (self.q, self.k, self.v, do))
        self.score_outputs = bind_tiles(p, TILE, TILE, tma), bind_tiles(ds, TILE, TILE, tma)
        w = self.wide
        self.value_tiles = (
            bind_tiles(p, w.block_k, TILE, tma), bind_tiles(ds, TILE, w.block_k, tma),
            bind_tiles(ds, w.block_k, TILE, tma),
        )  # fmt: skip
        self.value_operands = tuple(
            bind(x, w.block_k, cols, tma) for x in (self.q, self.k, do) for cols in (w.block_n, w.tail)
        )
        self.value_outputs = tuple(
            None if x is None else bind(x, TILE, cols, tma) for x in self.targets for cols in (w.block_n, w.tail)
        )

    def _sums(self) -> torch.Tensor | None:
        """Float32 sums of dK and dV, [2, splits, groups, key rows, D] of the block that needs most."""
        sizes = [b.splits * (b.heads // b.heads_per_group) * b.key_tiles for b in self.blocks if b.partial]
        if not sizes:
            return None
        return torch.empty(2 * max(sizes) * TILE * self.s.head_dim, device=self.device, dtype=torch.float32)

    def _row_terms(self, do, out, lse) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        s, m_total = self.s, tiles(self.s.len_q)
        lse2, delta = torch.empty((2, s.heads * m_total * TILE), device=self.device, dtype=torch.float32)
        height, width = 16, 256
        rows.row_terms[(s.heads * m_total * (TILE // height),)](
            bind(do, height, width, self.tma), bind(out, height, width, self.tma), lse.contiguous(),
            self.grad_lse, lse2, delta, s.len_q, self.heads_q, m_total,
            D=s.head_dim, BLOCK_D=width, HAS_GRAD_LSE=self.grad_lse is not None, ROWS=height, TMA=self.tma, TILE=TILE,
            num_warps=4,
        )  # fmt: skip
        return lse2, delta

    def score(self, x: Block) -> None:
        s, t = self.s, self.score_tiling
        programs = grid_tiles(x.m_tiles, x.n_tiles, x.offset, s.causal)
        score.score_backward[(x.heads * programs,)](
            *self.score_operands, *self.score_outputs, self.lse2, self.delta, self.row_sum, self.row_size, self.grad_scale,
            self.scale * LOG2E, s.len_q, s.len_kv, x.row_first, x.col_first, x.head_first, self.heads_q, s.group, x.m_tiles, x.n_tiles,
            x.slots, programs, x.offset, BLOCK_K=t.block_k, STORE_DS=self.need_ds, SCALED=self.scaled, GROUP_ROWS=GROUP_ROWS,
            PTX=self.arch.startswith("sm_"),             **self.common, **t.options(),
        )  # fmt: skip

    def refine(self, x: Block) -> None:
        if self.need_ds:
            rows.refine[(x.heads * x.m_tiles,)](
                self.p, self.ds, self.row_sum, self.row_size, self.delta, self.grad_lse, self.grad_scale,
                self.s.len_q, x.row_first, x.head_first, x.m_tiles, x.n_tiles, x.slots, x.offset,
                CAUSAL=self.s.causal, HAS_GRAD_LSE=self.grad_lse is not None, SCALED=self.scaled, CHUNK=16, TILE=TILE,
                num_warps=4,
            )  # fmt: skip

    def value(self, x: Block) -> None:
        need_dk, need_dv = x.dkv and self.need_dk, x.dkv and self.need_dv
        if x.partial and need_dk and need_dv:
            # With float32 stores Triton 3.6 does not overlay the shared memory of three GEMMs, of two it does.
            self._value(x, x.dq, True, False)
            self._value(x, False, False, True)
        else:
            self._value(x, x.dq, need_dk, need_dv)

    def _value(self, x: Block, need_dq: bool, need_dk: bool, need_dv: bool) -> None:
        s, w = self.s, self.wide
        query_programs = x.heads * x.m_tiles * self.d_tiles if need_dq else 0
        key_programs = x.heads // x.heads_per_group * x.n_tiles * self.d_tiles * x.splits
        queries_first = x.n_tiles * x.splits > x.heads_per_group * x.m_tiles
        value.value_backward[(query_programs + key_programs * (need_dk + need_dv),)](
            *self.value_tiles, *self.value_operands, *self.value_outputs, self.sums, x.key_tiles * TILE,
            self.grad_scale, self.scale,
            s.len_q, s.len_kv, x.row_first, x.col_first, x.head_first, self.heads_q, s.group, x.m_tiles, x.n_tiles,
            x.slots, x.heads, x.offset, query_programs, key_programs, x.heads_per_group, x.splits, int(queries_first),
            int(x.previous), BLOCK_N=w.block_n, TAIL=w.tail, BLOCK_K=w.block_k, NEED_DQ=need_dq, NEED_DK=need_dk,
            NEED_DV=need_dv, PARTIAL=x.partial, SCALED=self.scaled, **self.common, **w.options(),
        )  # fmt: skip

    def reduce(self, x: Block) -> None:
        height, width = 32, 128
        s = self.s
        groups, n_rows = x.heads // x.heads_per_group, x.key_tiles * TILE
        kinds = self.sums[: 2 * x.splits * groups * n_rows * self.s.head_dim].chunk(2)
        # dS carries the fp16 grad scale and lacks the softmax scale; P has neither.
        factors = (self.scale, self.scaled), (1.0, False)
        for sums, target, (scale, scaled) in zip(kinds, self.targets[1:], factors, strict=True):
            if target is not None:
                rows.reduce_partials[(groups * (n_rows // height) * -(-self.s.head_dim // width),)](
                    sums, bind(target, height, width, self.tma), self.grad_scale, scale, s.len_kv, n_rows, self.heads_kv,
                    x.head_first // self.s.group, groups, x.col_first, x.splits,
                    D=self.s.head_dim, BLOCK_D=width, SCALED=scaled, ROWS=height, TMA=self.tma, num_warps=4,
                )  # fmt: skip

    def finish(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        for grad, target in zip(self.grads, self.targets, strict=True):
            if grad is not target:
                grad.copy_(target)
        return self.grads
