"""Dense forward and backward on the two-phase kernels: operands, workspace, and the launches of every block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from ffpa_jit.triton import mask_gradient, mask_tiles, rows, score, value
from ffpa_jit.triton.configs import score_tiling, uses_tma, value_tiling
from ffpa_jit.triton.launch import Launcher, bind, bind_tiles, copy, processors
from ffpa_jit.triton.params import BlockMask
from ffpa_jit.triton.schedule import TILE, Block, Shape, backward_blocks, forward_blocks, grid_tiles, tiles
from ffpa_jit.triton.terms import Terms, encode_unspecialized

EXPONENT_WINDOW = {torch.bfloat16: (64, 32), torch.float16: (0, 15)}
"""dtype -> (SHIFT, HEADROOM) of ``score``: where P sits in the exponent range, and how far a score may exceed it."""

UNMASKED, CAUSAL, LOCAL = 0, 1, 2
"""MASK_MODE of ``geometry``."""

Gradients = tuple[torch.Tensor | None, ...]


class _Call:
    """What both directions of a call share: sizes, options, and what the attention mask leaves of each tile."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, terms: Terms, arch: str, launcher: Launcher) -> None:
        b, h, n, d = q.shape
        self.terms, self.batch, self.heads_q, self.heads_kv = terms, b, h, k.shape[1]
        self.s = shape_of(q, k, terms)
        self.launch = launcher
        self.ptx, self.tma = arch.startswith("sm_"), uses_tma(arch)
        self.mods, bits = terms.modifiers
        visible = LOCAL if self.s.banded else CAUSAL if terms.is_causal else UNMASKED
        self.left, self.right = terms.left, terms.right
        self.shape = {"MASK_MODE": visible, "MOD_FLAGS": bits, "TILE": TILE}
        self.common = {"D": d, "TMA": self.tma, **self.shape}
        self.block_mask = None if terms.attn_mask is None else self._block_mask_tables(terms.attn_mask)

    def _block_mask_tables(self, mask: torch.Tensor) -> BlockMask:
        """``mask_tiles``' tables, and how a batch, a head and a tile find their line in them."""
        s, strides = self.s, self.terms.mask_strides
        batches = mask.shape[0] if strides[0] else 1
        heads = mask.shape[1] if strides[1] else 1
        m_total, n_tiles = tiles(s.len_q), tiles(s.len_kv)
        m_tiles = m_total if strides[2] else 1
        lines = batches * heads
        state = self.launch.scratch((lines * m_tiles * n_tiles,), torch.int8)
        row_spans = self.launch.scratch((lines, m_tiles, 2), torch.int32)
        key_spans = self.launch.scratch((lines, n_tiles, 2), torch.int32)
        constants = {"MOD_FLAGS": self.shape["MOD_FLAGS"], "num_warps": 4}
        self.launch(
            mask_tiles.classify, state.numel(), state, self.mods, s.len_q, s.len_kv, heads, m_tiles, n_tiles,
            TILE=TILE, **constants,
        )  # fmt: skip
        self.launch(
            mask_tiles.find_spans, lines * (m_tiles + n_tiles), state, row_spans, key_spans, m_tiles, n_tiles,
            lines * m_tiles, m_total, CHUNK=256, **constants,
        )  # fmt: skip
        if heads > 1 and s.group > 1:
            self.launch.call(_join_spans(batches, self.heads_kv, s.group), key_spans)
        mask_b, mask_h = (heads if batches > 1 else 0), int(heads > 1)
        return BlockMask(state, row_spans, key_spans, *map(encode_unspecialized, (mask_b, mask_h, m_tiles, n_tiles)))

    def place(self, x: Block) -> tuple[int, ...]:
        """Where a block is, as kernels take it."""
        return x.offset, self.left, self.right, x.width


def _join_spans(batches: int, heads_kv: int, group: int) -> Callable[[torch.Tensor], None]:
    """A function that makes the runs over row tiles of all heads of a group those of the group."""

    def join(spans: torch.Tensor) -> None:
        grouped = spans.view(batches, heads_kv, group, -1, 2)
        low, end = grouped[..., 0].amin(2, keepdim=True), grouped[..., 1].amax(2, keepdim=True)
        grouped.copy_(torch.stack((low, end), -1))

    return join


def shape_of(q: torch.Tensor, k: torch.Tensor, terms: Terms) -> Shape:
    """The sizes of a call as ``schedule`` takes them."""
    b, h, n, d = q.shape
    left, right = (terms.left, terms.right) if terms.banded else (None, None)
    return Shape(b * h, h // k.shape[1], n, k.shape[2], d, terms.is_causal and not terms.banded, left, right)


def forward(
    query: torch.Tensor, key: torch.Tensor, value_: torch.Tensor, terms: Terms, *, arch: str, cap: int,
    launcher: Launcher | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention output [B, Hq, Nq, D] in the query's layout, and LSE [B, Hq, Nq] (float32, natural logarithm).

    ``cap``: bytes of workspace. WorkspaceTooSmallError if it does not hold a row of tiles.
    """
    launcher = launcher or Launcher(query.device)
    out = launcher.result_like(query)
    lse = launcher.result(query.shape[:-1], torch.float32)
    if out.numel() == 0 or key.shape[2] == 0:
        launcher.call(nothing_seen, out, lse)
        return out, lse
    q, k, v = launcher.operand(query), launcher.operand(key), launcher.operand(value_)
    target = launcher.operand(out)  # an output whose last stride is not 1 is computed densely and copied
    run = _Forward(q, k, v, target, lse, terms, arch, cap, launcher)
    for block in run.blocks:
        run.score(block)
        run.combine(block)
        run.value(block)
    if target is not out:
        launcher.call(copy, out, target)
    return out, lse


def nothing_seen(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Make these the output and the log-sum-exp of rows that see no key."""
    out.zero_()
    lse.fill_(-math.inf)


class _Forward(_Call):
    """The operands of one forward call and its launches; the row references are computed on construction."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        terms: Terms, arch: str, cap: int, launcher: Launcher,
    ) -> None:  # fmt: skip
        super().__init__(q, k, terms, arch, launcher)
        s, self.lse = self.s, lse
        self.shift, self.headroom = EXPONENT_WINDOW[q.dtype]
        self.blocks = forward_blocks(s, cap)

        most = max(x.slots * x.heads for x in self.blocks)
        self.p = launcher.scratch((most * TILE, TILE), q.dtype)
        self.stats = launcher.scratch((3, most * TILE), torch.float32).unbind()
        most_rows = max(x.heads * x.m_tiles for x in self.blocks)
        self.inverse_sum = launcher.scratch((most_rows * TILE,), torch.float32)
        self.reference = launcher.scratch((s.heads * tiles(s.len_q) * TILE,), torch.float32)

        t = self.narrow = score_tiling(arch, "forward", s.head_dim, terms.kind)
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
        self.launch(
            score.sample_row_max, s.heads * m_tiles,
            *self.score_operands, self.reference, self.mods, self.block_mask, self.terms.scale_log2, s.len_q, s.len_kv,
            self.heads_q, s.group, m_tiles, self.left, self.right, BLOCK_K=t.block_k, SHIFT=self.shift,
            **self.common, **t.options(),
        )  # fmt: skip

    def score(self, x: Block) -> None:
        s, t = self.s, self.narrow
        programs = grid_tiles(x.m_tiles, x.n_tiles, x.offset, s.causal, t.group_rows, x.width)
        self.launch(
            score.score_forward, x.heads * programs,
            *self.score_operands, self.p_tile, self.reference, *self.stats, self.mods, self.block_mask,
            self.terms.scale_log2, s.len_q, s.len_kv, x.row_first, x.col_first, x.head_first, self.heads_q, s.group,
            x.m_tiles, x.n_tiles, x.slots, programs, *self.place(x), BLOCK_K=t.block_k, HEADROOM=self.headroom,
            PTX=self.ptx, GROUP_ROWS=t.group_rows, **self.common, **t.options(),
        )  # fmt: skip

    def combine(self, x: Block) -> None:
        self.launch(
            rows.combine, x.heads * x.m_tiles,
            self.p, *self.stats, self.inverse_sum, self.lse, self.block_mask, self.terms.keep_scale, self.s.len_q,
            x.row_first, x.head_first, self.heads_q, x.m_tiles, x.n_tiles, x.slots, *self.place(x), CHUNK=16,
            num_warps=4, **self.shape,
        )  # fmt: skip

    def value(self, x: Block) -> None:
        s, w = self.s, self.wide
        self.launch(
            value.value_forward, x.heads * x.m_tiles * -(-s.head_dim // w.width),
            self.p_rows, *self.value_operands, *self.outputs, self.inverse_sum, self.block_mask, s.len_q, s.len_kv,
            x.row_first, x.col_first, x.head_first, self.heads_q, s.group, x.m_tiles, x.n_tiles, x.slots, x.heads,
            *self.place(x), BLOCK_N=w.block_n, TAIL=w.tail, BLOCK_K=w.block_k, **self.common, **w.options(),
        )  # fmt: skip


def backward(
    grad_out: torch.Tensor, grad_lse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor,
    value_: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, terms: Terms, *,
    needs: tuple[bool, bool, bool, bool], arch: str, cap: int, whole_rows: bool = True,
    launcher: Launcher | None = None,
) -> Gradients:  # fmt: skip
    """(dQ, dK, dV, dMask) in the layouts of their inputs; None where ``needs`` is false.

    ``whole_rows``: (out, lse) are of these very keys, so that P sums to one; not if they were merged over shards.
    A mask gradient and a softcap do not go together: dS as it is stored has the softcap's slope in it.
    """
    launcher = launcher or Launcher(query.device)
    inputs = query, key, value_, terms.attn_mask
    grads = tuple(launcher.result_like(t) if n and t is not None else None for t, n in zip(inputs, needs, strict=True))
    if not any(grad is not None for grad in grads):
        return grads
    if query.numel() == 0 or key.numel() == 0:
        for grad in grads:
            if grad is not None:
                launcher.call(torch.Tensor.zero_, grad)
        return grads
    do, q, k, v, o = (launcher.operand(x) for x in (grad_out, query, key, value_, out))
    run = _Backward(do, grad_lse, q, k, v, o, lse, grads, terms, arch, cap, launcher)
    for block in run.blocks:
        run.score(block)
        if run.need_ds and block.all_keys:
            run.correct_delta(block, whole_rows and not terms.softcap)
        if block.dq and grads[3] is not None:
            run.mask(block)
        run.value(block)
        if block.partial and block.last:
            run.reduce(block)
    for grad, target in zip(grads, run.targets, strict=False):
        if grad is not None and target is not None and grad is not target:
            launcher.call(copy, grad, target)
    if grads[3] is not None:
        run.finish_mask(grads[3])
    return grads


def grad_scale(
    launcher: Launcher, grad_out: torch.Tensor, value_: torch.Tensor, grad_lse: torch.Tensor | None,
    keep_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """For every key head [B * Hkv], the power of two that puts its float16 dS near the top of the range, on the device.

    ``|Z dP - delta| <= 2 keep_scale |dO row| |V row| + |dlse|``, so with this factor no dS exceeds 2^15, and small
    gradients keep their bits whatever the loss scale or the size of other heads' gradients. Rows that are not finite
    have no say: they spoil what depends on them, but not the scale of the rest.
    """

    def of(grad_out: torch.Tensor, value_: torch.Tensor, grad_lse: torch.Tensor | None = None) -> torch.Tensor:
        def largest(x: torch.Tensor) -> torch.Tensor:
            finite = torch.where(x.isfinite(), x, 0.0)
            return finite.reshape(value_.shape[0] * value_.shape[1], -1).amax(1)

        norm = functools.partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
        bound = 2.0 * keep_scale * largest(norm(grad_out)) * largest(norm(value_))
        if grad_lse is not None:
            bound = bound + largest(grad_lse.abs())
        return torch.exp2(torch.floor(15.0 - torch.log2(bound.clamp(2.0**-60, 2.0**60))))

    return launcher.produce(of, grad_out, value_, *(() if grad_lse is None else (grad_lse,)))


def _sum_to(grad: torch.Tensor, sums: torch.Tensor) -> None:
    grad.copy_(sums.sum_to_size(grad.shape))


def mask_sum_bytes(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> int:
    """Bytes that the gradient of a mask takes beside itself to add up, see ``_Backward._hold_mask``."""
    if mask.shape[2] != query.shape[2] or mask.shape[3] != key.shape[2]:
        return 4 * query.shape[0] * query.shape[1] * (key.shape[2] if mask.shape[2] == 1 else query.shape[2])
    held = mask.numel() * (4 - mask.element_size())
    contiguous = torch.empty_like(mask, device="meta").is_contiguous()
    return held if contiguous else held + mask.numel() * mask.element_size()


class _Backward(_Call):
    """The operands of one backward call and its launches; delta is computed on construction."""

    mask_grad: torch.Tensor | None = None
    """The gradient of a mask that has an element for each query and key."""
    mask_sum: torch.Tensor | None = None

    def __init__(
        self, do: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, grads: Gradients, terms: Terms, arch: str, cap: int, launcher: Launcher,
    ) -> None:  # fmt: skip
        super().__init__(q, k, terms, arch, launcher)
        s, tma = self.s, self.tma
        self.device, self.scale, self.scaled = q.device, terms.scale, q.dtype == torch.float16
        self.need_dq, self.need_dk, self.need_dv, need_mask = (g is not None for g in grads)
        self.need_ds = self.need_dq or self.need_dk or need_mask
        # Gradients whose last stride is not 1 are computed densely and copied.
        self.targets = tuple(None if g is None else launcher.operand(g) for g in grads[:3])

        t = self.narrow = score_tiling(arch, "backward", s.head_dim, terms.kind)
        w = self.wide = value_tiling(arch, "backward", s.head_dim)
        self.d_tiles = -(-s.head_dim // w.width)
        held = 0
        if grads[3] is not None and terms.attn_mask is not None:
            held = mask_sum_bytes(terms.attn_mask, q, k)
            self._hold_mask(grads[3])
        self.blocks = backward_blocks(
            s, cap - held, matrices=1 + self.need_ds, dq=self.need_dq or need_mask, dkv=self.need_dk or self.need_dv,
            d_tiles=self.d_tiles, processors=processors(q.device),
        )  # fmt: skip
        most = max(x.slots * x.heads for x in self.blocks)
        most_ds = most if self.need_ds else 1
        self.p, self.ds = (launcher.scratch((n * TILE, TILE), q.dtype) for n in (most, most_ds))
        self.row_sums = launcher.scratch((2, most_ds * TILE), torch.float32).unbind()
        self.sums = self._sums()
        self.grad_lse = None if grad_lse is None else launcher.contiguous(grad_lse)
        self.grad_scale = grad_scale(launcher, do, v, self.grad_lse, terms.keep_scale) if self.scaled else None
        self.lse2, self.delta = self._bwd_preprocess(do, out, lse)

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
        return self.launch.scratch((2 * max(sizes) * TILE * self.s.head_dim,), torch.float32)

    def _hold_mask(self, grad: torch.Tensor) -> None:
        """What the mask's gradient needs to add up: the lower halves of float32 sums, whose upper halves wait in a
        gradient of 16 bits; if it broadcasts over a side, a line for each head."""
        s = self.s
        len_q, len_kv = grad.shape[2:]
        if len_q != s.len_q or len_kv != s.len_kv:
            shape = (self.batch, self.heads_q, 1, s.len_kv) if len_q == 1 else (self.batch, self.heads_q, s.len_q, 1)
            self.mask_sum = self.launch.scratch(shape, torch.float32)
            self.launch.call(torch.Tensor.zero_, self.mask_sum)
            return
        self.mask_grad = grad = grad if grad.is_contiguous() else self.launch.scratch(grad.shape, grad.dtype)
        if self.shape["MASK_MODE"] != UNMASKED:  # tiles that nobody sees are not visited
            self.launch.call(torch.Tensor.zero_, grad)
        if grad.element_size() == 2:
            self.mask_sum = self.launch.scratch(grad.shape, torch.int16)

    def _bwd_preprocess(self, do: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> list[torch.Tensor]:
        s, m_tiles = self.s, tiles(self.s.len_q)
        height, width = 16, 256
        terms = self.launch.scratch((2, s.heads * m_tiles * TILE), torch.float32)
        self.launch(
            rows.bwd_preprocess, s.heads * m_tiles * (TILE // height),
            bind(do, height, width, self.tma), bind(out, height, width, self.tma), self.launch.contiguous(lse),
            self.grad_lse, *terms.unbind(), s.len_q, self.heads_q, m_tiles, D=s.head_dim, BLOCK_D=width,
            HAS_GRAD_LSE=self.grad_lse is not None, ROWS=height, TMA=self.tma, TILE=TILE, num_warps=4,
        )  # fmt: skip
        return list(terms.unbind())

    def score(self, x: Block) -> None:
        s, t = self.s, self.narrow
        programs = grid_tiles(x.m_tiles, x.n_tiles, x.offset, s.causal, t.group_rows, x.width)
        self.launch(
            score.score_backward, x.heads * programs,
            *self.score_operands, *self.score_outputs, self.lse2, self.delta, *self.row_sums, self.grad_scale,
            self.mods, self.block_mask, self.terms.scale_log2, self.terms.keep_scale, s.len_q, s.len_kv, x.row_first,
            x.col_first, x.head_first, self.heads_q, s.group, x.m_tiles, x.n_tiles, x.slots, programs,
            *self.place(x), BLOCK_K=t.block_k, STORE_DS=self.need_ds, SCALED=self.scaled, PTX=self.ptx,
            GROUP_ROWS=t.group_rows, **self.common, **t.options(),
        )  # fmt: skip

    def correct_delta(self, x: Block, whole_rows: bool) -> None:
        s = self.s
        self.launch(
            rows.correct_delta, x.heads * x.m_tiles,
            self.p, self.ds, *self.row_sums, self.delta, self.grad_lse, self.grad_scale, self.block_mask,
            self.terms.keep_scale, s.len_q, x.row_first, x.head_first, self.heads_q, s.group, x.m_tiles, x.n_tiles,
            x.slots, *self.place(x), WHOLE_ROWS=whole_rows, HAS_GRAD_LSE=self.grad_lse is not None,
            SCALED=self.scaled, CHUNK=16, num_warps=4, **self.shape,
        )  # fmt: skip

    def mask(self, x: Block) -> None:
        """Add a block's dS to the mask's gradient."""
        s, grad = self.s, self.mask_grad
        place = (
            self.grad_scale, self.block_mask, s.len_q, s.len_kv, x.row_first, x.col_first, x.head_first, self.heads_q,
            s.group, x.m_tiles, x.n_tiles, x.slots, x.heads, *self.place(x),
        )  # fmt: skip
        constants = {"SCALED": self.scaled, **self.shape}
        if grad is not None:
            height = 16
            batches, heads = grad.shape[:2]
            self.launch(
                mask_gradient.mask_gradient, batches * heads * x.m_tiles * (TILE // height) * x.n_tiles,
                self.ds, grad, self.mask_sum, *place, self.batch, batches, heads, HALVES=self.mask_sum is not None,
                ALIGNED=s.len_kv % 16 == 0, ROWS=height, num_warps=4, **constants,
            )  # fmt: skip
        else:
            assert self.mask_sum is not None
            over_rows = self.mask_sum.shape[2] == 1
            self.launch(
                mask_gradient.mask_line_gradient, x.heads * (x.n_tiles if over_rows else x.m_tiles), self.ds,
                self.mask_sum, *place, OVER_ROWS=over_rows, num_warps=8, **constants,
            )  # fmt: skip

    def finish_mask(self, grad: torch.Tensor) -> None:
        if self.mask_grad is None:
            assert self.mask_sum is not None
            self.launch.call(_sum_to, grad, self.mask_sum)
        elif grad is not self.mask_grad:
            self.launch.call(copy, grad, self.mask_grad)

    def value(self, x: Block) -> None:
        need_dq = x.dq and self.need_dq
        need_dk, need_dv = x.dkv and self.need_dk, x.dkv and self.need_dv
        if x.partial and need_dk and need_dv:
            # With float32 stores Triton 3.6 does not overlay the shared memory of three GEMMs, of two it does.
            self._value(x, need_dq, True, False)
            self._value(x, False, False, True)
        elif need_dq or need_dk or need_dv:
            self._value(x, need_dq, need_dk, need_dv)

    def _value(self, x: Block, need_dq: bool, need_dk: bool, need_dv: bool) -> None:
        s, w = self.s, self.wide
        query_programs = x.heads * x.m_tiles * self.d_tiles if need_dq else 0
        key_programs = x.heads // x.heads_per_group * x.n_tiles * self.d_tiles * x.splits
        queries_first = x.n_tiles * x.splits > x.heads_per_group * x.m_tiles  # longest contractions first
        self.launch(
            value.value_backward, query_programs + key_programs * (need_dk + need_dv),
            *self.value_tiles, *self.value_operands, *self.value_outputs, self.sums, x.key_tiles * TILE,
            self.grad_scale, self.scale, self.block_mask, s.len_q, s.len_kv, x.row_first,
            x.col_first, x.head_first, self.heads_q, s.group, x.m_tiles, x.n_tiles, x.slots, x.heads,
            *self.place(x), query_programs, key_programs,
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
                self.launch(
                    rows.reduce_partials, groups * (n_rows // height) * -(-s.head_dim // width),
                    sums, bind(target, height, width, self.tma), self.grad_scale, scale, s.len_kv, n_rows,
                    self.heads_kv, x.head_first // s.group, groups, x.col_first, x.splits, D=s.head_dim,
                    BLOCK_D=width, SCALED=scaled, ROWS=height, TMA=self.tma, num_warps=4,
                )  # fmt: skip
