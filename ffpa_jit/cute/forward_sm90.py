"""Attention forward for Hopper: out = softmax(Q K^T scale) V and its log-sum-exp, in one pass, with no workspace.

The tile. A cluster of two thread blocks makes 128 rows of the output, 64 each; rows are the (query, head) pairs of a
key head, the heads of a query next to each other, so that a group's heads read their keys once. Clusters are persistent
and take tiles of a few heads side by side (`order`, `_tile`), causal ones the longest first.

The copies. All keys and values of a tile pass through both thread blocks. Each copies every other 64-column box from L2
and TMA writes it into both shared memories: without that, 64 rows would need 64 bytes a clock, and L2 gives 37 to each
processor (bench/machine.py). A slot is filled again when eight warps, four of each thread block, have given it back.

The warpgroups, for each block of 64 keys j:

    copies      three warps: keys; values of the first, of the second value warpgroup
    scores      S_j = Q K_j^T, a box of columns at a time as they come in; then P_j = exp2(S_j - reference), into
                shared memory, which has room for two of them
    values (2)  O += P_j V_j, each for its columns

S_j and the exponentials of P_j follow each other in one warpgroup, 1024 clocks of tensor cores and about as many of
everything else at D=512. So P_(j-1) is handed over only `lead` boxes before the end of S_j: its product, 1024 clocks
too, then fills the time of the exponentials, and not of S_j, and the tensor cores are never without work for long.

The reference of a row follows its maximum only when that rises by more than a factor of 2^8: until then P is larger
than 1, which costs bf16 and fp32 sums nothing and fits in fp16. A rise is told to the value warpgroups with P, warp by
warp.

The budget (`schedule`). Registers: 64 columns of Q are 16 a thread, S_j 32, 64 columns of O 32; 4 x 128 in all, so that
what Q does not find room for lies in shared memory, beside a block of keys and one to two of values. With 512 threads
`wgmma` of n256 does not assemble (C7602), hence two of n128.

Waiting is polling (`ptx.wait`): a wait that sleeps wakes so late that a third of the speed is lost.

The ceiling, measured (bench/machine.py, bench/NOTES.md): wgmma keeps its full rate whatever the operands' source and
beside copies of 44 to 70 bytes a clock; the tile wants 64 at full rate. GEMMs of these shapes run at 0.80 and 0.96 of
cuBLAS at 8192^3, this kernel at 0.85 to 0.92 in turns with it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ffpa_jit.cute import ptx
from ffpa_jit.cute.schedule import BLOCK, BOX_BYTES, CLUSTER, COPY_REGISTERS, THREADS, TILE, schedule_of
from ffpa_jit.cute.spec import KernelSpec

__all__ = ["Forward", "entry"]

LAZY = 8.0
"""How far, in powers of two, a row's maximum may rise above its reference."""

IN_FLIGHT = 3
"""Boxes of S whose instructions run while the next box is waited for."""

SCORE_BARRIER = 1
"""The named barrier of the score warpgroup; 0 is `syncthreads`."""


class Sizes(NamedTuple):
    """`group`: query heads of a key head. `rows`: of a key head. `diagonal`: keys before the first query's own
    position. `section`: key heads that are worked on side by side (`order`). `tiles`, `all_heads`: of all batches."""

    group: Int32
    heads: Int32
    rows: Int32
    keys: Int32
    head_dim: Int32
    len_q: Int32
    diagonal: Int32
    tiles_per_head: Int32
    tiles: Int32
    section: Int32
    all_heads: Int32
    clusters: Int32


class Array(NamedTuple):
    """A [B, H, N, D] tensor of 16-bit numbers in global memory: its address, and its strides in elements."""

    base: Int64
    batch: Int64
    head: Int64
    row: Int64


class Tile(NamedTuple):
    """`first` row, key head, batch; how many blocks of keys some row of it sees."""

    first: Int32
    head: Int32
    batch: Int32
    blocks: Int32


class Source(NamedTuple):
    """Boxes of keys or values: the copy, their slots in shared memory, where they come from, and whether heads and
    batches lie apart there or are one."""

    copy: Any
    slots: Any
    boxes: Any
    heads_apart: Any
    batches_apart: Any


class Signals(NamedTuple):
    """Barriers in shared memory. A slot is full when its bytes have come, empty when all warps have given it back.

    At those of P every lane arrives, for what it has itself written or read. One lane for all of its warp is no faster,
    and compute-sanitizer's racecheck does not follow it, nor barriers of the other kind (`bar.sync`)."""

    key_full: Any
    key_empty: Any
    value_full: Any
    value_empty: Any
    p_full: Any
    p_empty: Any


class Stats(NamedTuple):
    """What goes with P from the score warpgroup to the others, twice like P: a row's `factor` for the output so far,
    its `share` (one over the sum) with the last block, and a warp's `flag` that there is a factor other than 1."""

    factor: Any
    share: Any
    flag: Any


class Forward:
    """The kernel for one head dim (`schedule`), dtype and causality; compiled by calling it under `cute.compile`."""

    def __init__(self, head_dim: int, dtype: Any, causal: bool) -> None:
        self.s = schedule_of(head_dim)
        self.dtype = dtype
        self.causal = causal

    @cute.jit
    def __call__(
        self,
        query: Int64, key: Int64, value: Int64, out: Int64, lse: Int64,
        q_batch: Int64, q_head: Int64, q_row: Int64,
        k_batch: Int64, k_head: Int64, k_row: Int64,
        v_batch: Int64, v_head: Int64, v_row: Int64,
        o_batch: Int64, o_head: Int64, o_row: Int64,
        k_heads: Int32, k_batches: Int32, v_heads: Int32, v_batches: Int32,
        batch: Int32, heads: Int32, group: Int32, len_q: Int32, len_kv: Int32, head_dim: Int32,
        scale: Float32, section: Int32, clusters: Int32,
        stream: CUstream,
    ) -> None:  # fmt: skip
        """Launch. Addresses, strides in elements (multiples of 8), sizes; `k_heads`, `k_batches`, `v_heads` and
        `v_batches` are 1 where the tensor is the same for all. `lse`: contiguous fp32, or 0 where no one wants it.
        `clusters`: no more than tiles."""
        rows = len_q * group
        per_head = (rows + TILE - 1) // TILE
        sizes = Sizes(
            group, heads, rows, len_kv, head_dim, len_q, len_kv - len_q, per_head, per_head * heads * batch, section,
            heads * batch, clusters,
        )  # fmt: skip
        load_key, keys = self._tensor_map(
            Array(key, k_batch, k_head, k_row), len_kv, head_dim, k_heads, k_batches, BLOCK
        )
        load_value, values = self._tensor_map(
            Array(value, v_batch, v_head, v_row), len_kv, head_dim, v_heads, v_batches, self.s.slice
        )
        self.kernel(
            load_key, keys, load_value, values, Array(query, q_batch, q_head, q_row),
            Array(out, o_batch, o_head, o_row), lse, (k_heads > 1, k_batches > 1, v_heads > 1, v_batches > 1), scale,
            sizes,
        ).launch(
            grid=[CLUSTER * clusters, 1, 1], block=[THREADS, 1, 1], cluster=[CLUSTER, 1, 1],
            smem=self.s.shared_bytes, min_blocks_per_mp=1, stream=stream,
        )  # fmt: skip

    def _tensor_map(self, array: Array, length: Any, head_dim: Any, heads: Any, batches: Any, rows: int) -> Any:
        """The copy of boxes of `rows` rows, and the tensor as TMA counts it. Beyond its bounds it reads zeros."""
        row, head, batch = [cute.assume(each, divby=8) for each in (array.row, array.head, array.batch)]
        tensor = cute.make_tensor(
            cute.make_ptr(self.dtype, array.base, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((length, head_dim, heads, batches), stride=(row, 1, head, batch)),
        )
        box = cute.tile_to_shape(self._atom(warpgroup.SmemLayoutAtomKind.K_SW128), (rows, BLOCK), (0, 1))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SMulticastOp(), tensor, box, (rows, BLOCK))

    def _atom(self, kind: Any) -> Any:
        return warpgroup.make_smem_layout_atom(kind, self.dtype)

    def _boxes(self, memory: cute.Pointer, at: int, boxes: int, rows: int = BLOCK) -> cute.Tensor:
        """[rows, 64 columns, boxes] in shared memory, swizzled as TMA does."""
        layout = cute.tile_to_shape(self._atom(warpgroup.SmemLayoutAtomKind.K_SW128), (rows, BLOCK, boxes), (0, 1, 2))
        return cute.make_tensor(cute.recast_ptr(memory + at, layout.inner, dtype=self.dtype), layout.outer)

    @cute.kernel
    def kernel(
        self,
        load_key: cute.CopyAtom, keys: cute.Tensor, load_value: cute.CopyAtom, values: cute.Tensor, query: Array,
        out: Array, lse: Int64, apart: tuple, scale: Float32, sizes: Sizes,
    ) -> None:  # fmt: skip
        s = self.s
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster = block // CLUSTER
        memory = cute.arch.get_dyn_smem(cutlass.Uint8, 1024)
        signals = self._signals(memory)
        if warp == 0:
            cpasync.prefetch_descriptor(load_key)
            cpasync.prefetch_descriptor(load_value)
            with cute.arch.elect_one():
                self._initialise(signals)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

        stats = Stats(
            cute.recast_ptr(memory + s.factor_at, dtype=Float32), cute.recast_ptr(memory + s.share_at, dtype=Float32),
            cute.recast_ptr(memory + s.flag_at, dtype=Int32),
        )  # fmt: skip
        mine = thread % 128
        if warp < 4:
            cute.arch.setmaxregister_decrease(COPY_REGISTERS)
            if warp == 0:
                source = self._source(load_key, keys, memory, s.key_at, s.key_slots, BLOCK, apart[0], apart[1])
                self.copy_keys(source, signals, sizes, rank, cluster)
            if warp == 1 or warp == 2:
                source = self._source(
                    load_value, values, memory, s.value_at, s.value_stages * s.boxes, s.slice, apart[2], apart[3]
                )
                self.copy_values(source, signals, sizes, rank, cluster, warp - 1)
        elif warp < 8:
            _set_registers(s.score_registers)
            self.scores(memory, signals, stats, query, lse, scale, sizes, mine, warp % 4, rank, cluster)
        elif warp < 12:
            _set_registers(s.value_registers[0])
            self.values(memory, signals, stats, out, sizes, mine, warp % 4, rank, cluster, 0)
        else:
            _set_registers(s.value_registers[1])
            self.values(memory, signals, stats, out, sizes, mine, warp % 4, rank, cluster, 1)
        # Nobody leaves while its peer may still copy into its memory or arrive at its barriers.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def _signals(self, memory: cute.Pointer) -> Signals:
        s = self.s
        key_full = cute.recast_ptr(memory + s.barriers_at, dtype=Int64)
        value_full = key_full + 2 * s.key_slots
        p_full = value_full + 4 * s.value_stages
        return Signals(
            key_full, key_full + s.key_slots, value_full, value_full + 2 * s.value_stages, p_full, p_full + 2
        )

    def _initialise(self, signals: Signals) -> None:
        """By one thread. Slots are armed here for the first time, and from then on by who gives them back."""
        s = self.s
        for i in range(s.key_slots):
            cute.arch.mbarrier_init(signals.key_full + i, 1)
            cute.arch.mbarrier_init(signals.key_empty + i, 4 * CLUSTER)
            cute.arch.mbarrier_arrive_and_expect_tx(signals.key_full + i, BOX_BYTES)
        for i in range(2 * s.value_stages):
            cute.arch.mbarrier_init(signals.value_full + i, 1)
            cute.arch.mbarrier_init(signals.value_empty + i, 4 * CLUSTER)
            cute.arch.mbarrier_arrive_and_expect_tx(signals.value_full + i, self._slice_bytes(i // s.value_stages))
        for i in range(2):
            cute.arch.mbarrier_init(signals.p_full + i, 128)
            cute.arch.mbarrier_init(signals.p_empty + i, 256)

    def _slice_bytes(self, which: int) -> int:
        return self.s.widths[which] * self.s.slice * 2

    # Which tile when: every warp that needs it counts for itself.

    @cute.jit
    def _index(self, turn: Int32, cluster: Int32, sizes: Sizes) -> Int32:
        """The tile of a cluster's turn: in every other turn the clusters take theirs in reverse, so that who has a long
        one has a short one next."""
        place = cluster
        if turn % 2 == 1:
            place = sizes.clusters - 1 - cluster
        return turn * sizes.clusters + place

    @cute.jit
    def _tile(self, index: Int32, sizes: Sizes) -> Tile:
        """The heads of a section side by side, one row tile after the other; causal, the last and longest first."""
        whole = sizes.section * sizes.tiles_per_head
        section = index // whole
        inside = index - section * whole
        width = cutlass.min(sizes.section, sizes.all_heads - section * sizes.section)
        row_tile = inside // width
        head = section * sizes.section + inside - row_tile * width
        seen = sizes.keys
        if cutlass.const_expr(self.causal):
            row_tile = sizes.tiles_per_head - 1 - row_tile
            last = cutlass.min(row_tile * TILE + TILE, sizes.rows) - 1
            # One key at least, hidden then, for rows before the first: causal with fewer keys than queries, which the
            # public function refuses and the operator does not.
            seen = cutlass.max(last // sizes.group + 1 + sizes.diagonal, 1)
        blocks = (seen + BLOCK - 1) // BLOCK
        return Tile(row_tile * TILE, head % sizes.heads, head // sizes.heads, blocks)

    # The copying warps.

    @cute.jit
    def _source(
        self, load: Any, tensor: Any, memory: Any, at: int, slots: int, rows: int, heads_apart: Any, batches_apart: Any
    ) -> Source:
        shared = cute.group_modes(self._boxes(memory, at, slots, rows), 0, 2)
        boxes = cute.group_modes(cute.local_tile(tensor, (rows, BLOCK), (None, None, None, None)), 0, 2)
        into, come_from = cpasync.tma_partition(load, 0, cute.make_layout(1), shared, boxes)
        return Source(load, into, come_from, heads_apart, batches_apart)

    @cute.jit
    def copy_keys(self, source: Source, signals: Signals, sizes: Sizes, rank: Int32, cluster: Int32) -> None:
        """Every other box of each block, into both thread blocks of the cluster, as soon as both have room."""
        s = self.s
        turn, count = Int32(0), Int32(0)
        index = self._index(turn, cluster, sizes)
        while index < sizes.tiles:
            tile = self._tile(index, sizes)
            for j in cutlass.range(tile.blocks, unroll=1):
                first = count % s.key_stages * s.boxes
                free = count // s.key_stages % 2 ^ 1
                for g in cutlass.range_constexpr(s.boxes):
                    if rank == g % CLUSTER:
                        slot = first + g
                        ptx.wait(signals.key_empty + slot, free)
                        self._copy(source, tile, j, Int32(g), slot, signals.key_full + slot)
                count += 1
            turn += 1
            index = self._index(turn, cluster, sizes)

    @cute.jit
    def copy_values(
        self, source: Source, signals: Signals, sizes: Sizes, rank: Int32, cluster: Int32, which: Int32
    ) -> None:
        """The same for the boxes of each slice of the values that one value warpgroup multiplies."""
        s = self.s
        full = signals.value_full + which * s.value_stages
        empty = signals.value_empty + which * s.value_stages
        first = which * s.first
        turn, stage, free = Int32(0), Int32(0), Int32(1)
        index = self._index(turn, cluster, sizes)
        while index < sizes.tiles:
            tile = self._tile(index, sizes)
            for j in cutlass.range(tile.blocks * s.slices, unroll=1):
                ptx.wait(empty + stage, free)
                for g in cutlass.range_constexpr(s.first):
                    if rank == g % CLUSTER and first + g < s.boxes:
                        self._copy(source, tile, j, first + g, stage * s.boxes + first + g, full + stage)
                stage, free = self._turn(stage, free)
            turn += 1
            index = self._index(turn, cluster, sizes)

    @cute.jit
    def _copy(self, source: Source, tile: Tile, rows: Int32, column: Int32, slot: Int32, barrier: Any) -> None:
        """Box (`rows`, `column`) of the tile's head into `slot` of both thread blocks, whose barriers count bytes."""
        head, batch = Int32(0), Int32(0)
        if source.heads_apart:
            head = tile.head
        if source.batches_apart:
            batch = tile.batch
        cute.copy(
            source.copy, source.boxes[None, rows, column, head, batch], source.slots[None, slot], tma_bar_ptr=barrier,
            mcast_mask=Int16((1 << CLUSTER) - 1),
        )  # fmt: skip

    @cute.jit
    def _turn(self, stage: Int32, phase: Int32) -> Any:
        """The stage of values after `stage`, and its phase."""
        stage += 1
        wraps = stage == self.s.value_stages
        return ptx.either(wraps, Int32(0), stage), ptx.either(wraps, phase ^ 1, phase)

    # The score warpgroup. A lane has two rows of an accumulator, eight apart, and in each eight columns two neighbours:
    # element i is in row i // 2 % 2, columns i // 4 * 8 + lane % 4 * 2 + i % 2.

    @cute.jit
    def scores(
        self, memory: Any, signals: Signals, stats: Stats, query: Array, lse: Int64, scale: Float32, sizes: Sizes,
        thread: Int32, warp: Int32, rank: Int32, cluster: Int32,
    ) -> None:  # fmt: skip
        s = self.s
        lane = thread % 32
        held = _mma(self.dtype, BLOCK, OperandMajorMode.K, warpgroup.OperandSource.RMEM)
        stored = _mma(self.dtype, BLOCK, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        held.set(warpgroup.Field.ACCUMULATE, True)
        stored.set(warpgroup.Field.ACCUMULATE, True)
        keys = held.make_fragment_B(held.get_slice(thread).partition_B(self._boxes(memory, s.key_at, s.key_slots)))
        tail_at = self._boxes(memory, s.query_at, max(s.tail, 1))
        tail = stored.make_fragment_A(stored.get_slice(thread).partition_A(tail_at))
        queries = cute.make_rmem_tensor(held.partition_shape_A((BLOCK, s.held * BLOCK)), self.dtype)
        words = cute.recast_tensor(queries, Int32)
        operands = (held, stored, queries, tail, keys)
        acc = cute.make_rmem_tensor(held.partition_shape_C((BLOCK, BLOCK)), Float32)
        top = cute.make_rmem_tensor(2, Float32)
        total = cute.make_rmem_tensor(2, Float32)

        own_row = warp * 16 + lane // 4
        # What this lane gives stmatrix: the address of a row of an 8 x 8 matrix; 16 bytes of a row are found at their
        # number, the lowest three bits of the row's flipped in it.
        matrix_at = (memory + s.probability_at).toint()
        matrix_at += (warp * 16 + lane % 16) * 128 + (lane // 16 ^ lane % 8) * 16
        # Not 0, which would make NaN of the -inf of a hidden score.
        to_log2 = cutlass.max(cutlass.max(scale, -scale), Float32(1e-37)) * math.log2(math.e)

        turn, count = Int32(0), Int32(0)  # count: of blocks, over all tiles
        index = self._index(turn, cluster, sizes)
        while index < sizes.tiles:
            tile = self._tile(index, sizes)
            row = tile.first + rank * BLOCK + own_row
            top.fill(-Float32.inf)
            total.fill(0.0)
            self._load_query(words, memory, query, tile, row, own_row, lane, scale, sizes)
            whole = sizes.keys // BLOCK  # blocks all of whose keys all rows see
            if cutlass.const_expr(self.causal):
                whole = ((tile.first + rank * BLOCK) // sizes.group + 1 + sizes.diagonal) // BLOCK
            for j in cutlass.range(tile.blocks, unroll=1):
                self._multiply(acc, operands, signals, count, j > 0, warp)
                if j >= whole:
                    self._hide(acc, j * BLOCK + lane % 4 * 2, row, sizes)
                self._exponentiate(
                    acc, top, total, to_log2, signals, stats, count, j > 0, own_row, lane, warp, matrix_at
                )
                if j == tile.blocks - 1:
                    self._finish(top, total, stats, count % 2, lse, tile, row, own_row, lane, sizes)
                count += 1
            self._hand_over(signals, count - 1)
            turn += 1
            index = self._index(turn, cluster, sizes)

    @cute.jit
    def _multiply(self, acc: Any, operands: Any, signals: Signals, count: Int32, follows: Boolean, warp: Int32) -> None:
        """S of the tile's queries and a block of keys, a group of instructions a box; towards the end of it the block
        before is handed over, if this one `follows` one."""
        s = self.s
        held, stored, queries, tail, keys = operands
        acc.fill(0.0)
        phase = count // s.key_stages % 2
        first = count % s.key_stages * s.boxes if s.key_stages > 1 else 0
        for g in cutlass.range_constexpr(s.boxes):
            ptx.wait(signals.key_full + (first + g), phase)
            warpgroup.fence()
            for k in cutlass.range_constexpr(BLOCK // 16):
                key = keys[None, None, k, first + g]
                if cutlass.const_expr(g < s.held):
                    cute.gemm(held, acc, queries[None, None, g * (BLOCK // 16) + k], key, acc)
                else:
                    cute.gemm(stored, acc, tail[None, None, k, g - s.held], key, acc)
            warpgroup.commit_group()
            if cutlass.const_expr(g >= IN_FLIGHT):
                warpgroup.wait_group(IN_FLIGHT)
                self._give_back_key(signals, first, g - IN_FLIGHT, warp)
            if cutlass.const_expr(g == s.boxes - 1 - s.lead):  # noqa: SIM102  (decided now; the next, on the device)
                if follows:
                    self._hand_over(signals, count - 1)
        for g in cutlass.range_constexpr(s.boxes - IN_FLIGHT, s.boxes):
            warpgroup.wait_group(s.boxes - 1 - g)
            self._give_back_key(signals, first, g, warp)

    @cute.jit
    def _give_back_key(self, signals: Signals, first: Any, g: int, warp: Int32) -> None:
        """Arm a box's slot, and tell the thread block that fills it that this warp is done with it."""
        with cute.arch.elect_one():
            if warp == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(signals.key_full + (first + g), BOX_BYTES)
            ptx.arrive(signals.key_empty + (first + g), Int32(g % CLUSTER))

    @cute.jit
    def _hand_over(self, signals: Signals, count: Int32) -> None:
        """This lane's part of P of block `count`, and of what goes with it, to the value warpgroups."""
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(signals.p_full + count % 2)

    @cute.jit
    def _hide(self, acc: Any, column: Int32, row: Int32, sizes: Sizes) -> None:
        """No score of a key that does not exist, or that comes after the row's own."""
        for half in cutlass.range_constexpr(2):
            limit = sizes.keys
            if cutlass.const_expr(self.causal):
                limit = cutlass.min((row + 8 * half) // sizes.group + 1 + sizes.diagonal, sizes.keys)
            for i in cutlass.range_constexpr(BLOCK // 4):
                at = i // 2 * 4 + half * 2 + i % 2
                acc[at] = ptx.either(column + i // 2 * 8 + i % 2 < limit, acc[at], -Float32.inf)

    @cute.jit
    def _exponentiate(
        self, acc: Any, top: Any, total: Any, to_log2: Float32, signals: Signals, stats: Stats, count: Int32,
        follows: Boolean, own_row: Int32, lane: Int32, warp: Int32, matrix_at: Int32,
    ) -> None:  # fmt: skip
        """Scores to probabilities in units of 2^reference, and into shared memory. `top`: the references."""
        # Each step for both rows before the next, and in two strands a row: the warp is alone on its scheduler.
        high = [cute.arch.fmax(acc[i], acc[i + 1]) for i in range(0, 8, 2)]
        for i in cutlass.range_constexpr(8, cute.size(acc), 2):
            high[i // 2 % 4] = cute.arch.fmax(high[i // 2 % 4], cute.arch.fmax(acc[i], acc[i + 1]))
        high = [cute.arch.fmax(high[half], high[half + 2]) for half in range(2)]
        for distance in (1, 2):
            other = [cute.arch.shuffle_sync_bfly(each, distance) for each in high]
            high = [cute.arch.fmax(high[half], other[half]) for half in range(2)]
        moved = Boolean(False)
        changes, used = [], []
        for half in cutlass.range_constexpr(2):
            now, old = high[half] * to_log2, top[half]
            rises = now > old + LAZY
            top[half] = ptx.either(rises, now, old)
            used.append(ptx.either(top[half] == -Float32.inf, Float32(0.0), top[half]))
            changes.append(ptx.either(rises, ptx.exp2(old - used[half]), Float32(1.0)))
            moved = moved or rises
        sums = [total[0] * changes[0], total[1] * changes[1], Float32(0.0), Float32(0.0)]
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = ptx.exp2(acc[i] * to_log2 - used[i // 2 % 2])
            strand = i // 2 % 2 + i % 2 * 2
            sums[strand] = sums[strand] + acc[i]
        for half in cutlass.range_constexpr(2):
            total[half] = sums[half] + sums[half + 2]
        moved = cute.arch.vote_any_sync(moved)

        buffer = count % 2
        ptx.wait(signals.p_empty + buffer, count // 2 % 2 ^ 1)
        if lane % 4 == 0:
            for half in cutlass.range_constexpr(2):
                _put(stats.factor, buffer * BLOCK + own_row + half * 8, changes[half])
        if lane == 0:
            _put(stats.flag, buffer * 4 + warp, cutlass.select_(moved and follows, Int32(1), Int32(0)))
        for t in cutlass.range_constexpr(0, BLOCK // 8, 2):
            parts = []
            for m in cutlass.range_constexpr(4):
                at = (t + m // 2) * 4 + m % 2 * 2
                parts.append(ptx.pack(acc[at], acc[at + 1], self.dtype))
            ptx.store_matrices((matrix_at + buffer * BOX_BYTES) ^ (t * 16), parts)

    @cute.jit
    def _finish(
        self, top: Any, total: Any, stats: Stats, buffer: Int32, lse: Int64, tile: Tile, row: Int32, own_row: Int32,
        lane: Int32, sizes: Sizes,
    ) -> None:  # fmt: skip
        """The rows' shares, to go with the last P, and their log-sum-exp."""
        for half in cutlass.range_constexpr(2):
            whole = ptx.quad_sum(total[half])
            share = Float32(0.0)
            log = -Float32.inf
            if whole != 0.0:
                share = 1.0 / whole
                log = (top[half] + ptx.log2(whole)) * math.log(2.0)
            if lane % 4 == 0:
                _put(stats.share, buffer * BLOCK + own_row + half * 8, share)
                head, position, inside = self._place(tile, row + half * 8, sizes)
                if inside and lse != 0:
                    line = Int64(tile.batch * (sizes.heads * sizes.group) + head) * sizes.len_q + position
                    _put(cute.make_ptr(Float32, lse + line * 4, cute.AddressSpace.gmem, assumed_align=4), 0, log)

    @cute.jit
    def _place(self, tile: Tile, row: Int32, sizes: Sizes) -> Any:
        """Query head and position of a row; whether there is such a row."""
        position = row // sizes.group
        return tile.head * sizes.group + row - position * sizes.group, position, row < sizes.rows

    @cute.jit
    def _line(self, array: Array, tile: Tile, row: Int32, sizes: Sizes) -> Any:
        """The address of a row, and whether there is such a row."""
        head, position, inside = self._place(tile, row, sizes)
        return array.base + (tile.batch * array.batch + head * array.head + position * array.row) * 2, inside

    @cute.jit
    def _load_query(
        self, words: Any, memory: Any, query: Array, tile: Tile, row: Int32, own_row: Int32, lane: Int32,
        scale: Float32, sizes: Sizes,
    ) -> None:  # fmt: skip
        """The tile's rows, negated if the scale is negative, so that the greatest of S is the greatest of S scale.

        Held boxes as fragments of the first operand: of a step of 16 columns, words 0 and 1 are a lane's rows, 2 and 3
        the same eight columns on. 16 bytes a load; a transposition within four lanes deals them out.
        """
        s = self.s
        sign = Int32(0)
        if scale < 0.0:
            sign = Int32(-0x7FFF8000)  # the sign bits of both numbers of a word
        lines = [self._line(query, tile, row + half * 8, sizes) for half in range(2)]
        column = lane % 4 * 8
        for step in cutlass.range_constexpr(s.held * 2):
            for half in cutlass.range_constexpr(2):
                at, inside = lines[half]
                given = ptx.load_words(at + (step * 32 + column) * 2, inside and step * 32 + column < sizes.head_dim)
                for m in cutlass.range_constexpr(4):
                    words[step * 8 + m * 2 + half] = given[m]
        if cutlass.const_expr(s.tail > 0):
            cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=128)  # the products before are done with it
            for step in cutlass.range_constexpr(s.held * 2, s.boxes * 2):
                for half in cutlass.range_constexpr(2):
                    at, inside = lines[half]
                    given = ptx.load_words(
                        at + (step * 32 + column) * 2, inside and step * 32 + column < sizes.head_dim
                    )
                    shared_row = own_row + half * 8
                    piece = (step % 2 * 4 + lane % 4) ^ (shared_row % 8)
                    box = (memory + s.query_at + (step // 2 - s.held) * BOX_BYTES).toint()
                    ptx.store_shared_words(box + shared_row * 128 + piece * 16, [word ^ sign for word in given])
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=128)
        for step in cutlass.range_constexpr(s.held * 2):
            for half in cutlass.range_constexpr(2):
                places = [step * 8 + m * 2 + half for m in range(4)]
                dealt = ptx.transpose_quad([words[place] for place in places], lane)
                for m in cutlass.range_constexpr(4):
                    words[places[m]] = dealt[m] ^ sign

    # The value warpgroups.

    @cute.jit
    def values(
        self, memory: Any, signals: Signals, stats: Stats, out: Array, sizes: Sizes, thread: Int32, warp: Int32,
        rank: Int32, cluster: Int32, which: int,
    ) -> None:  # fmt: skip
        s = self.s
        lane = thread % 32
        width = s.widths[which]
        mma = _mma(self.dtype, width if width <= 192 else width // 2, OperandMajorMode.MN, warpgroup.OperandSource.SMEM)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        p_at = self._boxes(memory, s.probability_at, 2)
        probabilities = mma.make_fragment_A(mma.get_slice(thread).partition_A(p_at))
        columns = mma.make_fragment_B(mma.get_slice(thread).partition_B(self._columns(memory, which)))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((BLOCK, width)), Float32)
        shares = cute.make_rmem_tensor(2, Float32)
        full = signals.value_full + which * s.value_stages
        own_row = warp * 16 + lane // 4

        turn, count = Int32(0), Int32(0)
        stage, phase, given = Int32(0), Int32(0), Int32(0)
        index = self._index(turn, cluster, sizes)
        while index < sizes.tiles:
            tile = self._tile(index, sizes)
            acc.fill(0.0)
            shares.fill(0.0)
            for j in cutlass.range(tile.blocks, unroll=1):
                buffer = count % 2
                ptx.wait(signals.p_full + buffer, count // 2 % 2)
                if _get(stats.flag, buffer * 4 + warp) != 0:
                    changes = [_get(stats.factor, buffer * BLOCK + own_row + half * 8) for half in range(2)]
                    for i in cutlass.range_constexpr(cute.size(acc)):
                        acc[i] = acc[i] * changes[i // 2 % 2]
                if j == tile.blocks - 1:
                    for half in cutlass.range_constexpr(2):
                        shares[half] = _get(stats.share, buffer * BLOCK + own_row + half * 8)
                for part in cutlass.range_constexpr(s.slices):
                    ptx.wait(full + stage, phase)
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(s.slice // 16):
                        p = probabilities[None, None, part * (s.slice // 16) + k, buffer]
                        cute.gemm(mma, acc, p, columns[None, None, k, stage], acc)
                    warpgroup.commit_group()
                    stage, phase = self._turn(stage, phase)
                    if cutlass.const_expr(part > 0):
                        warpgroup.wait_group(1)
                        given = self._give_back_value(signals, which, given, warp)
                warpgroup.wait_group(0)
                given = self._give_back_value(signals, which, given, warp)
                cute.arch.mbarrier_arrive(signals.p_empty + buffer)
                count += 1
            self._store(acc, shares, out, tile, tile.first + rank * BLOCK + own_row, which, lane, sizes)
            turn += 1
            index = self._index(turn, cluster, sizes)

    def _columns(self, memory: cute.Pointer, which: int) -> cute.Tensor:
        """This warpgroup's boxes of the slices as the second operand: [its columns, keys of a slice, stages]. In memory
        the boxes of a slice, of both warpgroups, follow each other, and then the next stage's."""
        s = self.s
        atom = self._atom(warpgroup.SmemLayoutAtomKind.MN_SW128)
        columns = cute.tile_to_shape(atom, (s.widths[which], s.slice), (1, 0))
        stages = cute.make_layout(s.value_stages, stride=s.boxes * s.slice * BLOCK)
        base = cute.recast_ptr(memory + s.value_at, columns.inner, dtype=self.dtype) + which * s.first * s.slice * BLOCK
        return cute.make_tensor(base, cute.append(columns.outer, stages))

    @cute.jit
    def _give_back_value(self, signals: Signals, which: int, stage: Int32, warp: Int32) -> Int32:
        """Arm a slice's stage, and tell both thread blocks, which each fill a part of it, that this warp is done with
        it; the stage to give back next."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            at = which * self.s.value_stages + stage
            if warp == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(signals.value_full + at, self._slice_bytes(which))
            for peer in cutlass.range_constexpr(CLUSTER):
                ptx.arrive(signals.value_empty + at, Int32(peer))
        following, _ = self._turn(stage, Int32(0))
        return following

    @cute.jit
    def _store(
        self, acc: Any, shares: Any, out: Array, tile: Tile, row: Int32, which: int, lane: Int32, sizes: Sizes
    ) -> None:
        """Divide, round and write, 16 bytes a lane."""
        for half in cutlass.range_constexpr(2):
            line, inside = self._line(out, tile, row + half * 8, sizes)
            for t in cutlass.range_constexpr(0, self.s.widths[which] // 8, 4):
                parts = []
                for m in cutlass.range_constexpr(4):
                    at = (t + m) * 4 + half * 2
                    parts.append(ptx.pack(acc[at] * shares[half], acc[at + 1] * shares[half], self.dtype))
                column = which * self.s.widths[0] + (t + lane % 4) * 8
                words = ptx.transpose_quad(parts, lane)
                ptx.store_words(line + column * 2, words, inside and column < sizes.head_dim)


def _mma(dtype: Any, width: int, major: Any, source: Any) -> cute.TiledMma:
    """Instructions for 64 rows and `width` columns; `major`: of the second operand, `source`: of the first."""
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (BLOCK, width, 16), source, OperandMajorMode.K, major)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def _set_registers(count: int) -> None:
    if count > 128:
        cute.arch.setmaxregister_increase(count)
    elif count < 128:
        cute.arch.setmaxregister_decrease(count)


def _put(pointer: Any, at: Any, value: Any) -> None:
    cute.make_tensor(pointer + at, cute.make_layout(1))[0] = value


def _get(pointer: Any, at: Any) -> Any:
    return cute.make_tensor(pointer + at, cute.make_layout(1))[0]


_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def entry(spec: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """What to compile for a spec, and arguments of its types."""
    numbers = [Int64(0)] * 17 + [Int32(0)] * 10 + [Float32(1.0)] + [Int32(1)] * 2
    forward = Forward(spec.head_dim, _DTYPES[spec.dtype], spec.is_causal)
    return forward, (*numbers, cute.runtime.make_fake_stream())
