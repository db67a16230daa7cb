"""Dense forward and backward on the two-phase kernels: operands, workspace, and the launches of every block."""

from __future__ import annotations

import functools
import math

import torch

from ffpa_jit.settings import workspace_bytes
from ffpa_jit.triton import rows, score, value
from ffpa_jit.triton.configs import score_tiling, uses_tma, value_tiling
from ffpa_jit.triton.launch import bind, bind_tiles, operand, processors
from ffpa_jit.triton.schedule import TILE, Block, Shape, backward_blocks, forward_blocks, grid_tiles, tiles

LOG2E = math.log2(math.e)

EXPONENT_WINDOW = {torch.bfloat16: (64, 32), torch.float16: (0, 15)}
"""dtype -> (SHIFT, HEADROOM) of ``score``: where P sits in the exponent range, and how far a score may exceed it."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _shape(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> Shape:
    b, h, n, d = query.shape
    return Shape(b * h, h // key.shape[1], n, key.shape[2], d, is_causal)


def forward(
    query: torch.Tensor, key: torch.Tensor, value_: torch.Tensor, *, scale: float, is_causal: bool, arch: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output [B, Hq, Nq, D] in the query's layout, and LSE [B, Hq, Nq] (float32, natural logarithm)."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if key.shape[2] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    target = operand(out)  # an output whose last stride is not 1 is computed densely and copied
    run = _Forward(operand(query), operand(key), operand(value_), target, lse, scale, is_causal, arch)
    for block in run.blocks:
        run.score(block)
        run.combine(block)
        run.value(block)
    if target is not out:
        out.copy_(target)
    return out, lse


class _Forward:
    """The operands of one forward call and its launches; the row references are computed on construction."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        scale: float, is_causal: bool, arch: str,
    ) -> None:  # fmt: skip
        s = self.s = _shape(q, k, is_causal)
        self.heads_q, self.lse, self.scale_log2 = q.shape[1], lse, scale * LOG2E
        self.shift, self.headroom = EXPONENT_WINDOW[q.dtype]
        self.ptx, self.tma = arch.startswith("sm_"), uses_tma(arch)
        self.common = {"D": s.head_dim, "CAUSAL": is_causal, "TMA": self.tma, "TILE": TILE}
        self.blocks = forward_blocks(s, workspace_bytes())

        most = max(x.slots * x.heads for x in self.blocks)
        self.p = q.new_empty((most * TILE, TILE))
        self.stats = q.new_empty((3, most * TILE), dtype=torch.float32).unbind()
        self.inverse_sum = q.new_empty(max(x.heads * x.m_tiles for x in self.blocks) * TILE, dtype=torch.float32)
        self.reference = q.new_empty(s.heads * tiles(s.len_q) * TILE, dtype=torch.float32)

        t = self.narrow = score_tiling(arch, "forward", s.head_dim)
        w = self.wide = value_tiling(arch, "forward", s.head_dim)
        self.score_operands = bind(q, TILE, t.block_k, self.tma), bind(k, TILE, t.block_k, self.tma)
        self.p_tile = bind_tiles(self.p, TILE, TILE, self.tma)
        self.p_rows = bind_tiles(self.p, TILE, w.block_k, self.tma)
        columns = w.block_n, w.tail
        self.value_operands = [bind(v, w.block_k, cols, self.tma) for cols in columns]
        self.outputs = [bind(out, TILE, cols, self.tma) for cols in columns]
        self._row_reference()

    def _row_reference(self) -> None:
        s, t, m_tiles = self.s, self.narrow, tiles(self.s.len_q)
        score.row_reference[(s.heads * m_tiles,)](
            *self.score_operands, self.reference, self.scale_log2, s.len_q, s.len_kv, self.heads_q, s.group, m_tiles,
            BLOCK_K=t.block_k, SHIFT=self.shift, **self.common, **t.options(),
        )  # fmt: skip

    def score(self, x: Block) -> None:
        s, t = self.s, self.narrow
        programs = grid_tiles(x.m_tiles, x.n_tiles, x.offset, s.causal, t.group_rows)
        score.score_forward[(x.heads * programs,)](
            *self.score_operands, self.p_tile, self.reference, *self.stats, self.scale_log2, s.len_q, s.len_kv,
            x.row_first, x.col_first, x.head_first, self.heads_q, s.group, x.m_tiles, x.n_tiles, x.slots, programs,
            x.offset, BLOCK_K=t.block_k, HEADROOM=self.headroom, PTX=self.ptx, GROUP_ROWS=t.group_rows,
            **self.common, **t.options(),
        )  # fmt: skip

    def combine(self, x: Block) -> None:
        rows.combine[(x.heads * x.m_tiles,)](
            self.p, *self.stats, self.inverse_sum, self.lse, self.s.len_q, x.row_first, x.head_first, x.m_tiles,
            x.n_tiles, x.slots, x.offset, CAUSAL=self.s.causal, CHUNK=16, TILE=TILE, num_warps=4,
        )  # fmt: skip

    def value(self, x: Block) -> None:
        s, w = self.s, self.wide
        value.value_forward[(x.heads * x.m_tiles * -(-s.head_dim // w.width),)](
            self.p_rows, *self.value_operands, *self.outputs, self.inverse_sum, s.len_q, s.len_kv,
            x.row_first, x.col_first, x.head_first, self.heads_q, s.group, x.m_tiles, x.n_tiles, x.slots, x.heads,
            x.offset, BLOCK_N=w.block_n, TAIL=w.tail, BLOCK_K=w.block_k, **self.common, **w.options(),
        )  # fmt: skip


def backward(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
    value_: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, scale: float, is_causal: bool,
    needs: tuple[bool, bool, bool], arch: str,
) -> Gradients:  # fmt: skip
    """(dQ, dK, dV) in the layouts of their inputs; None where ``needs`` is false."""
    dq, dk, dv = (torch.empty_like(t) if need else None for t, need in zip((query, key, value_), needs, strict=True))
    if not any(needs):
        return None, None, None
    if query.numel() == 0 or key.numel() == 0:
        for grad in (dq, dk, dv):
            if grad is not None:
                grad.zero_()
        return dq, dk, dv
    run = _Backward(
        operand(grad_out), grad_lse, operand(query), operand(key), operand(value_), operand(out), lse,
        (dq, dk, dv), scale, is_causal, arch,
    )  # fmt: skip
    for block in run.blocks:
        run.score(block)
        if run.need_ds and block.all_keys:
            run.refine(block)
        run.value(block)
        if block.partial and block.last:
            run.reduce(block)
    for grad, target in zip((dq, dk, dv), run.targets, strict=True):
        if grad is not None and target is not None and grad is not target:
            grad.copy_(target)
    return dq, dk, dv


def _grad_scale(grad_out: torch.Tensor, value_: torch.Tensor, grad_lse: torch.Tensor | None) -> torch.Tensor:
    """For every key head [B * Hkv], the power of two that puts its float16 dS near the top of the range, on the device.

    ``|dP - delta| <= 2 |dO row| |V row| + |dlse|``, so with this factor no dS exceeds 2^15, and small gradients keep
    their bits whatever the loss scale or the size of other heads' gradients. Rows that are not finite have no say: they
    spoil what depends on them, but not the scale of the rest.
    """

    def largest(x: torch.Tensor) -> torch.Tensor:
        finite = torch.where(x.isfinite(), x, 0.0)
        return finite.reshape(value_.shape[0] * value_.shape[1], -1).amax(1)

    norm = functools.partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
    bound = 2.0 * largest(norm(grad_out)) * largest(norm(value_))
    if grad_lse is not None:
        bound = bound + largest(grad_lse.abs())
    return torch.exp2(torch.floor(15.0 - torch.log2(bound.clamp(2.0**-60, 2.0**60))))


class _Backward:
    """The operands of one backward call and its launches; delta is computed on construction."""

    def __init__(
        self, do: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, grads: Gradients, scale: float, is_causal: bool, arch: str,
    ) -> None:  # fmt: skip
        s = self.s = _shape(q, k, is_causal)
        self.heads_q, self.heads_kv, self.device, self.scale = q.shape[1], k.shape[1], q.device, scale
        self.ptx, tma = arch.startswith("sm_"), uses_tma(arch)
        self.tma, self.scaled = tma, q.dtype == torch.float16
        self.common = {"D": s.head_dim, "CAUSAL": s.causal, "TMA": tma, "TILE": TILE}
        self.need_dq, self.need_dk, self.need_dv = (g is not None for g in grads)
        self.need_ds = self.need_dq or self.need_dk
        # Gradients whose last stride is not 1 are computed densely and copied.
        self.targets = tuple(None if g is None else operand(g) for g in grads)

        t = self.narrow = score_tiling(arch, "backward", s.head_dim)
        w = self.wide = value_tiling(arch, "backward", s.head_dim)
        self.d_tiles = -(-s.head_dim // w.width)
        self.blocks = backward_blocks(
            s, workspace_bytes(), matrices=1 + self.need_ds, dq=self.need_dq, dkv=self.need_dk or self.need_dv,
            d_tiles=self.d_tiles, processors=processors(q.device),
        )  # fmt: skip
        most = max(x.slots * x.heads for x in self.blocks)
        most_ds = most if self.need_ds else 1
        self.p, self.ds = q.new_empty((most * TILE, TILE)), q.new_empty((most_ds * TILE, TILE))
        self.row_sums = q.new_empty((2, most_ds * TILE), dtype=torch.float32).unbind()
        self.sums = self._sums()
        self.grad_lse = None if grad_lse is None else grad_lse.float().contiguous()
        self.grad_scale = _grad_scale(do, v, self.grad_lse) if self.scaled else None
        self.lse2, self.delta = self._row_terms(do, out, lse)

        self.score_operands = [bind(x, TILE, t.block_k, tma) for x in (q, k, v, do)]
        self.score_outputs = [bind_tiles(x, TILE, TILE, tma) for x in (self.p, self.ds)]
        self.value_tiles = (
            bind_tiles(self.p, w.block_k, TILE, tma),
            bind_tiles(self.ds, TILE, w.block_k, tma),
            bind_tiles(self.ds, w.block_k, TILE, tma),
        )
        columns = w.block_n, w.tail
        self.value_operands = [bind(x, w.block_k, cols, tma) for x in (q, k, do) for cols in columns]
        self.value_outputs = [None if x is None else bind(x, TILE, cols, tma) for x in self.targets for cols in columns]

    def _sums(self) -> torch.Tensor | None:
        """Float32 sums of dK and dV, [2, splits, groups, key rows, D] of the block that needs most."""
        sizes = [x.splits * (x.heads // x.heads_per_group) * x.key_tiles for x in self.blocks if x.partial]
        if not sizes:
            return None
        return torch.empty(2 * max(sizes) * TILE * self.s.head_dim, device=self.device, dtype=torch.float32)

    def _row_terms(self, do: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> list[torch.Tensor]:
        s, m_tiles = self.s, tiles(self.s.len_q)
        height, width = 16, 256
        terms = torch.empty((2, s.heads * m_tiles * TILE), device=self.device, dtype=torch.float32)
        rows.row_terms[(s.heads * m_tiles * (TILE // height),)](
            bind(do, height, width, self.tma), bind(out, height, width, self.tma), lse.contiguous(), self.grad_lse,
            *terms.unbind(), s.len_q, self.heads_q, m_tiles, D=s.head_dim, BLOCK_D=width,
            HAS_GRAD_LSE=self.grad_lse is not None, ROWS=height, TMA=self.tma, TILE=TILE, num_warps=4,
        )  # fmt: skip
        return list(terms.unbind())

    def score(self, x: Block) -> None:
        s, t = self.s, self.narrow
        programs = grid_tiles(x.m_tiles, x.n_tiles, x.offset, s.causal, t.group_rows)
        score.score_backward[(x.heads * programs,)](
            *self.score_operands, *self.score_outputs, self.lse2, self.delta, *self.row_sums, self.grad_scale,
            self.scale * LOG2E, s.len_q, s.len_kv, x.row_first, x.col_first, x.head_first, self.heads_q, s.group,
            x.m_tiles, x.n_tiles, x.slots, programs, x.offset, BLOCK_K=t.block_k, STORE_DS=self.need_ds,
            SCALED=self.scaled, PTX=self.ptx, GROUP_ROWS=t.group_rows, **self.common, **t.options(),
        )  # fmt: skip

    def refine(self, x: Block) -> None:
        s = self.s
        rows.refine[(x.heads * x.m_tiles,)](
            self.p, self.ds, *self.row_sums, self.delta, self.grad_lse, self.grad_scale, s.len_q, x.row_first,
            x.head_first, s.group, x.m_tiles, x.n_tiles, x.slots, x.offset, CAUSAL=s.causal,
            HAS_GRAD_LSE=self.grad_lse is not None, SCALED=self.scaled, CHUNK=16, TILE=TILE, num_warps=4,
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
        queries_first = x.n_tiles * x.splits > x.heads_per_group * x.m_tiles  # longest contractions first
        value.value_backward[(query_programs + key_programs * (need_dk + need_dv),)](
            *self.value_tiles, *self.value_operands, *self.value_outputs, self.sums, x.key_tiles * TILE,
            self.grad_scale, self.scale, s.len_q, s.len_kv, x.row_first, x.col_first, x.head_first, self.heads_q,
            s.group, x.m_tiles, x.n_tiles, x.slots, x.heads, x.offset, query_programs, key_programs,
            x.heads_per_group, x.splits, int(queries_first), int(x.previous), BLOCK_N=w.block_n, TAIL=w.tail,
            BLOCK_K=w.block_k, NEED_DQ=need_dq, NEED_DK=need_dk, NEED_DV=need_dv, PARTIAL=x.partial,
            SCALED=self.scaled, **self.common, **w.options(),
        )  # fmt: skip

    def reduce(self, x: Block) -> None:
        """Finish dK and dV of a block's groups from their float32 sums."""
        assert self.sums is not None
        s, height, width = self.s, 32, 128
        groups, n_rows = x.heads // x.heads_per_group, x.key_tiles * TILE
        kinds = self.sums[: 2 * x.splits * groups * n_rows * s.head_dim].chunk(2)
        # dS carries the fp16 grad scale and lacks the softmax scale; P has neither.
        factors = (self.scale, self.scaled), (1.0, False)
        for sums, target, (scale, scaled) in zip(kinds, self.targets[1:], factors, strict=True):
            if target is not None:
                rows.reduce_partials[(groups * (n_rows // height) * -(-s.head_dim // width),)](
                    sums, bind(target, height, width, self.tma), self.grad_scale, scale, s.len_kv, n_rows,
                    self.heads_kv, x.head_first // s.group, groups, x.col_first, x.splits, D=s.head_dim,
                    BLOCK_D=width, SCALED=scaled, ROWS=height, TMA=self.tma, num_warps=4,
                )  # fmt: skip
