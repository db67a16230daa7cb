"""Variable-length forward and backward: operands, tables, workspace, and the launches of every round."""

from __future__ import annotations

import torch

from ffpa_jit.triton import rows
from ffpa_jit.triton.configs import score_tiling, uses_tma, value_tiling
from ffpa_jit.triton.dense import EXPONENT_WINDOW, grad_scale, nothing_seen
from ffpa_jit.triton.launch import Launcher, bind, bind_tiles, describable, processors
from ffpa_jit.triton.ragged import kernels, tables, value
from ffpa_jit.triton.ragged.plan import (
    Batch,
    Rounds,
    Tables,
    allocate,
    backward_rounds,
    fixed_bytes,
    forward_rounds,
    part_bytes,
    sum_bytes,
)
from ffpa_jit.triton.schedule import TILE
from ffpa_jit.triton.terms import UNLIMITED, Terms

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, terms: Terms, *,
    max_q: int, max_k: int, arch: str, cap: int, launcher: Launcher | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output [Tq, Hq, D], laid out as ``torch.empty_like(q)``, and LSE [Hq, Tq] (float32, natural logarithm).

    ``q``, ``k``, ``v``: [T, H, D]. ``cu_q``, ``cu_k``: where documents begin, int32 [documents + 1]. ``max_q`` and
    ``max_k`` bound their lengths, ``cap`` the bytes of memory beside the results.

    Raises:
        DoesNotFitError: the documents are too long for the workspace.
    """
    launcher = launcher or Launcher(q.device)
    out = launcher.result_like(q)
    lse = launcher.result((q.shape[1], q.shape[0]), torch.float32)
    if out.numel() == 0 or k.shape[0] == 0:
        launcher.call(nothing_seen, out, lse)
        return out, lse
    target = _operand(launcher, out)
    query, key, value = (_operand(launcher, x) for x in (q, k, v))
    call = _Forward(query, key, value, target, lse, cu_q, cu_k, terms, max_q, max_k, arch, cap, launcher)
    call.run()
    if target.data_ptr() != out.data_ptr():
        launcher.call(_store, out, target)
    return out, lse


def backward(
    do: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, terms: Terms, *,
    needs: tuple[bool, bool, bool], max_q: int, max_k: int, arch: str, cap: int, whole_rows: bool = True,
    launcher: Launcher | None = None,
) -> Gradients:  # fmt: skip
    """(dQ, dK, dV), laid out as ``torch.empty_like`` of the inputs; None where ``needs`` is false. See ``forward``."""
    launcher = launcher or Launcher(q.device)
    grads = tuple(launcher.result_like(x) if need else None for x, need in zip((q, k, v), needs, strict=True))
    dq, dk, dv = grads
    if q.numel() == 0 or k.numel() == 0:
        for grad in grads:
            if grad is not None:
                launcher.call(torch.Tensor.zero_, grad)
        return dq, dk, dv
    if not any(needs):
        return dq, dk, dv
    targets = tuple(None if grad is None else _operand(launcher, grad) for grad in grads)
    grad_out, query, key, value, output = (_operand(launcher, x) for x in (do, q, k, v, out))
    call = _Backward(
        grad_out, grad_lse, query, key, value, output, lse, targets, cu_q, cu_k, terms, max_q, max_k, arch, cap,
        launcher,
    )  # fmt: skip
    call.whole_rows = whole_rows
    call.run()
    for grad, target in zip(grads, targets, strict=True):
        if grad is not None and target is not None and target.data_ptr() != grad.data_ptr():
            launcher.call(_store, grad, target)
    return dq, dk, dv


def _operand(launcher: Launcher, x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] as [1, H, T, D] that kernels can address: a view, or a copy."""
    view = x.transpose(0, 1)[None]
    return launcher.view(view, x) if describable(view) else launcher.produce(_copied, x)


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)[None].clone(memory_format=torch.contiguous_format)


def _store(target: torch.Tensor, source: torch.Tensor) -> None:
    """What ``_operand`` made of a result, back into it."""
    target.copy_(source[0].transpose(0, 1))


def fill(
    launcher: Launcher, b: Batch, r: Rounds, cu_q: torch.Tensor, cu_k: torch.Tensor, *, interpreted: bool
) -> Tables:
    """The tables of a call, but for what ``expand`` adds for each chunk."""
    t = allocate(b, r, launcher)
    launcher(
        tables.scan, 1,
        cu_q, cu_k, t.head, t.row_marks, t.key_marks, t.segment, t.row, t.key, t.chunk, t.segments,
        b.docs, b.len_q, b.len_k, b.max_q, b.max_k, b.short, b.window, b.left, b.right, UNLIMITED, r.group_rows,
        r.cut_above, int(r.fenced), r.chunks, r.stride, b.row_tiles.bit_length() if r.chunks > 1 else 0,
        TILE=TILE, BLOCK=128 if interpreted else 1024, num_warps=8,
    )  # fmt: skip
    return t


def expand(launcher: Launcher, t: Tables, b: Batch, r: Rounds, cu_q: torch.Tensor, cu_k: torch.Tensor, c: int) -> None:
    """Ranges of the rows, and the tasks, of chunk ``c``."""
    launcher(
        tables.expand, r.rows, cu_q, cu_k, t.segment, t.row, t.chunk, t.low, t.high, t.task, c, t.segments, b.left,
        b.right, b.docs.bit_length(), t.task.shape[0] // 2, TILE=TILE, num_warps=4,
    )  # fmt: skip


class _Call:
    """What both directions share: sizes, tables, constants of the kernels."""

    rounds: Rounds

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, terms: Terms, max_q: int,
        max_k: int, arch: str, launcher: Launcher,
    ) -> None:  # fmt: skip
        _, self.heads, self.len_q, self.head_dim = q.shape
        self.heads_kv, self.len_k = k.shape[1], k.shape[2]
        self.group = self.heads // self.heads_kv
        self.device, self.terms, self.cu = q.device, terms, (cu_q, cu_k)
        self.launch = launcher
        self.padded = -(-self.len_q // TILE) * TILE
        self.batch = Batch(
            cu_q.shape[0] - 1, self.len_q, self.len_k, max_q, max_k, terms.left, terms.right,
            same=(cu_q is cu_k or 0 != cu_q.data_ptr() == cu_k.data_ptr()) and self.len_q == self.len_k,
            # Dropout draws 32 keys at a time, counted from the first key of a document.
            pack=terms.dropout_p == 0,
        )  # fmt: skip
        self.ptx, self.tma, self.interpreted = arch.startswith("sm_"), uses_tma(arch), arch == "interpreter"
        self.mods, bits = terms.modifiers
        self.common = {"D": self.head_dim, "TMA": self.tma, "TILE": TILE}
        self.score_options = {"MOD_FLAGS": bits, "PTX": self.ptx}
        # See ``value``. Without TMA, documents meet in packed segments only.
        self.variants = (False, True) if self.tma or self.batch.pack else (False,)

    def plan(self) -> None:
        self.tables = fill(self.launch, self.batch, self.rounds, *self.cu, interpreted=self.interpreted)

    def expand(self, c: int) -> None:
        expand(self.launch, self.tables, self.batch, self.rounds, *self.cu, c)

    def inspect(self, x: torch.Tensor, edge: int, side: int) -> None:
        """Look at the rows of [1, H, T, D] beside the segments; for TMA only, whose loads know no segments."""
        if self.tma:
            t, length = self.tables, x.shape[2]
            self.launch(
                kernels.inspect, self.batch.segments * x.shape[1],
                bind(x, 0, 1, False), t.head, t.segment, t.segments, length, x.shape[1], D=self.head_dim, EDGE=edge,
                BLOCK_D=128, SIDE=side, num_warps=4,
            )  # fmt: skip

    def grid(self, programs: int, rescue: bool) -> int:
        """Programs of a value kernel: few of the variant that hardly ever has to work."""
        return min(programs, processors(self.device)) if rescue else programs

    def run(self) -> None:
        r = self.rounds
        sets = self.heads // r.heads
        for first in range(0, sets, r.together):
            for c in range(r.chunks):
                if r.chunks > 1 or not first:
                    self.expand(c)
                self.round(first * r.heads, min(r.together, sets - first), c)

    def round(self, head_first: int, sets: int, c: int) -> None:
        raise NotImplementedError


class _Forward(_Call):
    """The operands of one forward call and its launches."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        cu_q: torch.Tensor, cu_k: torch.Tensor, terms: Terms, max_q: int, max_k: int, arch: str, cap: int,
        launcher: Launcher,
    ) -> None:  # fmt: skip
        super().__init__(q, k, cu_q, cu_k, terms, max_q, max_k, arch, launcher)
        t = self.narrow = score_tiling(arch, "forward", self.head_dim)
        w = self.wide = value_tiling(arch, "forward", self.head_dim)
        left = cap - fixed_bytes(self.batch) - self.heads * self.padded * 4
        r = self.rounds = forward_rounds(self.batch, left, self.heads, t.group_rows)
        self.plan()

        self.lse = lse
        self.p = launcher.scratch((r.together * r.slots * TILE, TILE), q.dtype)
        self.stats = launcher.scratch((3, r.together * r.slots * TILE), torch.float32).unbind()
        self.inverse_sum = launcher.scratch((r.together * r.rows * TILE,), torch.float32)
        self.reference = launcher.scratch((self.heads * self.padded,), torch.float32)
        self.score_operands = bind(q, TILE, t.block_k, self.tma), bind(k, TILE, t.block_k, self.tma)
        self.p_tile = bind_tiles(self.p, TILE, TILE, self.tma)
        columns = w.block_n, w.tail
        self.value_operands = [
            bind_tiles(self.p, TILE, w.block_k, self.tma),
            *(bind(v, w.block_k, cols, self.tma) for cols in columns),
            bind(out, TILE, w.block_n, False),
        ]
        self.inspect(v, w.block_k, 1)

    def round(self, head_first: int, sets: int, c: int) -> None:
        r, t, w = self.rounds, self.narrow, self.wide
        shift, headroom = EXPONENT_WINDOW[self.p.dtype]
        for sample, programs in ((True, r.rows), (False, r.tasks)):
            self.launch(
                kernels.score_forward, sets * programs,
                *self.score_operands, self.p_tile, self.tables.views, self.reference, *self.stats, self.mods,
                self.terms.scale_log2, head_first, sets, self.group, self.padded, c, self.tables.task.shape[0] // 2,
                BLOCK_K=t.block_k, SAMPLE=sample, SHIFT=shift, HEADROOM=headroom, **self.score_options, **self.common,
                **t.options(),
            )  # fmt: skip
        self.launch(
            kernels.combine, sets * r.rows,
            self.p, self.tables.views, *self.stats, self.inverse_sum, self.lse, self.terms.keep_scale, head_first, sets,
            self.len_q, c, CHUNK=16, TILE=TILE, num_warps=4,
        )  # fmt: skip
        programs = sets * r.rows * -(-self.head_dim // w.width)
        for rescue in self.variants:
            self.launch(
                value.value_forward, self.grid(programs, rescue),
                *self.value_operands, self.tables.views, self.inverse_sum, head_first, sets, self.group, c,
                BLOCK_N=w.block_n, TAIL=0 if rescue else w.tail, BLOCK_K=w.block_k, NONFINITE=rescue, **self.common,
                **w.options(),
            )  # fmt: skip


class _Backward(_Call):
    """The operands of one backward call and its launches."""

    whole_rows = True
    """(out, lse) are of these very keys: not if they were merged over shards of keys."""

    def __init__(
        self, do: torch.Tensor, grad_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, targets: tuple[torch.Tensor | None, ...], cu_q: torch.Tensor,
        cu_k: torch.Tensor, terms: Terms, max_q: int, max_k: int, arch: str, cap: int, launcher: Launcher,
    ) -> None:  # fmt: skip
        super().__init__(q, k, cu_q, cu_k, terms, max_q, max_k, arch, launcher)
        self.need_dq, self.need_dk, self.need_dv = (x is not None for x in targets)
        self.need_ds = self.need_dq or self.need_dk
        self.scaled = q.dtype == torch.float16
        t = self.narrow = score_tiling(arch, "backward", self.head_dim)
        w = self.wide = value_tiling(arch, "backward", self.head_dim)
        left = cap - fixed_bytes(self.batch) - 2 * self.heads * self.padded * 4
        r = self.rounds = backward_rounds(
            self.batch, left, self.heads, self.group, self.head_dim, t.group_rows, matrices=1 + self.need_ds,
            dkv=self.need_dk or self.need_dv,
        )  # fmt: skip
        self.plan()

        most = r.together * r.heads * r.slots
        most_ds = most if self.need_ds else 1
        self.p, self.ds = (launcher.scratch((n * TILE, TILE), q.dtype) for n in (most, most_ds))
        self.row_sums = launcher.scratch((2, most_ds * TILE), torch.float32).unbind()
        by_key = part_bytes if r.parts > 1 else sum_bytes
        sums = by_key(self.batch, self.head_dim) // 4
        self.sums = launcher.scratch((sums,), torch.float32) if r.partial else None
        self.grad_lse = None if grad_lse is None else launcher.contiguous(grad_lse)
        self.grad_scale = grad_scale(launcher, do, v, self.grad_lse, terms.keep_scale) if self.scaled else None
        self.lse2, self.delta = self._bwd_preprocess(do, out, lse)

        self.score_operands = [bind(x, TILE, t.block_k, self.tma) for x in (q, k, v, do)]
        self.score_outputs = [bind_tiles(x, TILE, TILE, self.tma) for x in (self.p, self.ds)]
        columns = w.block_n, w.tail
        self.value_operands = [
            bind_tiles(self.p, w.block_k, TILE, self.tma),
            bind_tiles(self.ds, TILE, w.block_k, self.tma),
            bind_tiles(self.ds, w.block_k, TILE, self.tma),
            *(bind(x, w.block_k, cols, self.tma) for x in (q, k, do) for cols in columns),
            *(None if x is None else bind(x, TILE, w.block_n, False) for x in targets),
        ]
        if self.need_dq:
            self.inspect(k, w.block_k, 1)
        if self.need_dk:
            self.inspect(q, w.block_k, 0)
        if self.need_dv:
            self.inspect(do, w.block_k, 0)

    def _bwd_preprocess(self, do: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> list[torch.Tensor]:
        height, width = 16, 256
        terms = self.launch.scratch((2, self.heads * self.padded), torch.float32)
        self.launch(
            rows.bwd_preprocess, self.heads * (self.padded // height),
            bind(do, height, width, self.tma), bind(out, height, width, self.tma), self.launch.contiguous(lse),
            self.grad_lse, *terms.unbind(), self.len_q, self.heads, self.padded // TILE, D=self.head_dim, BLOCK_D=width,
            HAS_GRAD_LSE=self.grad_lse is not None, ROWS=height, TMA=self.tma, TILE=TILE, num_warps=4,
        )  # fmt: skip
        return list(terms.unbind())

    def round(self, head_first: int, sets: int, c: int) -> None:
        r, t, views = self.rounds, self.narrow, self.tables.views
        place = head_first, r.heads, sets, self.group
        self.launch(
            kernels.score_backward, sets * r.heads * r.tasks,
            *self.score_operands, *self.score_outputs, views, self.lse2, self.delta, *self.row_sums, self.grad_scale,
            self.mods, self.terms.scale_log2, self.terms.keep_scale, *place, self.padded, c,
            self.tables.task.shape[0] // 2, BLOCK_K=t.block_k, STORE_DS=self.need_ds, SCALED=self.scaled,
            **self.score_options, **self.common, **t.options(),
        )  # fmt: skip
        if self.need_ds:
            self.launch(
                kernels.correct_delta, sets * r.heads * r.rows,
                self.p, self.ds, views, *self.row_sums, self.delta, self.grad_lse, self.grad_scale, *place, self.padded,
                self.len_q, c, MOD_FLAGS=self.score_options["MOD_FLAGS"],
                WHOLE_ROWS=self.whole_rows and not self.terms.softcap, HAS_GRAD_LSE=self.grad_lse is not None,
                SCALED=self.scaled, CHUNK=16, TILE=TILE, num_warps=4,
            )  # fmt: skip
        w = self.wide
        programs = sets * (self.batch.key_tiles * (self.need_dk + self.need_dv) + r.heads * r.rows * self.need_dq)
        programs *= -(-self.head_dim // w.width)
        sum_rows = (self.batch.key_tiles if r.parts > 1 else self.batch.wide) * TILE
        part = head_first // r.heads % r.parts
        for rescue in self.variants:
            self.launch(
                value.value_backward, self.grid(programs, rescue),
                *self.value_operands, self.tables.views, self.sums, sum_rows, self.grad_scale,
                self.terms.scale, self.terms.keep_scale, *place, part, c, self.batch.left, self.batch.right,
                BLOCK_N=w.block_n, TAIL=0 if rescue else w.tail, BLOCK_K=w.block_k, NEED_DQ=self.need_dq,
                NEED_DK=self.need_dk, NEED_DV=self.need_dv, PARTIAL=r.partial, SCALED=self.scaled, NONFINITE=rescue,
                **self.common, **w.options(),
            )  # fmt: skip
