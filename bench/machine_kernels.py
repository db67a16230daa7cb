"""The kernels of machine.py, in CuTe-DSL for sm_90a: a TMA ring, wgmma beside a TMA ring, a persistent GEMM.

Protocol of every ring here. A slot has two mbarriers. `full` has one arrival, its own CTA's producer, which announces
the bytes of the *whole* slot; under multicast half of them are sent by the peer's producer, which may be earlier than
the announcement: the phase cannot end before the arrival. `empty` has one arrival a reader; under multicast the readers
of both CTAs arrive at the `empty` of both, so a slot is refilled only when it is free on both sides. A producer waits
for parity 1 first, which a fresh barrier grants at once; readers wait for parity 0. The CTAs of a cluster do the same
number of steps, and meet before they exit: nothing may arrive at the barrier of a CTA that has left.
Arrivals at the peer keep the default scope, as CUTLASS's do: they say that a slot has been read and hand over no data;
with cluster scope ptxas puts a MEMBAR.ALL.GPU before each, hundreds of clocks in a loop that has none to spare.

Bulk tensor copies elect their thread themselves (since cutlass-dsl 4.6), so whole warps issue them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

# The compiled program takes addresses, ints and a stream as ints; nothing of torch is known to it.
OPTIONS = "--gpu-arch sm_90a --enable-tvm-ffi"
SOURCE_ROWS, SOURCE_COLUMNS = 16384, 512  # bf16: 16 MiB
SOURCE_BYTES = SOURCE_ROWS * SOURCE_COLUMNS * 2
BOX_COLUMNS = 64  # 128 bytes: the row of a SW128 box
LOG_WORDS = 16  # Int64 a CTA writes about itself
LOG_FILL_START, LOG_FILL_END, LOG_ITEMS_SEEN, LOG_CLOCK_SEEN, LOG_MMA = 0, 1, 2, 3, 4
BOTH = 0b11  # multicast mask of a pair


def compile_kernel(kernel: Any, ints: str, options: str = "") -> Callable[..., None]:
    """Compile for addresses and counts: `ints` has a letter for each argument, "l" 64 bits and "i" 32."""
    arguments = [Int64(1) if letter == "l" else Int32(1) for letter in ints]
    compiled: Callable[..., None] = cute.compile(kernel, *arguments, make_fake_stream(), options=f"{OPTIONS} {options}")
    return compiled


def gmem_tensor(dtype: Any, address: Int64, shape: tuple[int, ...]) -> cute.Tensor:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape))))))


def box_layout(rows: int, boxes: int) -> cute.ComposedLayout:
    """`boxes` boxes of `rows` x 64, each as TMA writes it with SW128 and as wgmma reads a K-major operand."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, BOX_COLUMNS, boxes), order=(0, 1, 2))


def load_atom(source: cute.Tensor, rows: int, multicast: bool) -> cpasync.TmaInfo:
    """A copy of one box of `rows` x 64. A multicast box is not divided: the kernel says which CTA sends which."""
    op = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(op, source, cute.select(box_layout(rows, 1), mode=[0, 1]), (rows, BOX_COLUMNS))


def boxes_of(
    atom: cute.CopyAtom, shared: cute.Tensor, source: cute.Tensor, rows: int
) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared boxes [box] and global boxes [row of boxes, column of boxes] as cute.copy takes them."""
    tiles = cute.local_tile(source, (rows, BOX_COLUMNS), (None, None))
    one = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, one, cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))


class Ring:
    """A ring of slots that a producer warp fills from the 16 MiB source and a consumer warp empties.

    With `cluster` 2 a slot holds two boxes; CTA r loads box r of every slot and multicasts it to both.
    """

    def __init__(self, box_bytes: int, slots: int, cluster: int) -> None:
        self.box_rows = box_bytes // (BOX_COLUMNS * 2)
        self.box_words = box_bytes // 4
        self.slots = slots
        self.cluster = cluster
        self.slot_bytes = box_bytes * cluster
        self.items = SOURCE_BYTES // self.slot_bytes  # of one pass, a power of two
        self.column_boxes = SOURCE_COLUMNS // BOX_COLUMNS

    def atom(self, source: Int64) -> cpasync.TmaInfo:
        tensor = gmem_tensor(BFloat16, source, (SOURCE_ROWS, SOURCE_COLUMNS))
        return load_atom(tensor, self.box_rows, self.cluster > 1)

    def allocate(self, smem: SmemAllocator) -> cute.Tensor:
        layout = box_layout(self.box_rows, self.slots * self.cluster)
        return smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    @cute.jit
    def init(self, full: cute.Pointer, empty: cute.Pointer) -> None:
        """By one thread."""
        for slot in cutlass.range_constexpr(self.slots):
            cute.arch.mbarrier_init(full + slot, 1)
            cute.arch.mbarrier_init(empty + slot, self.cluster)

    @cute.jit
    def produce(
        self,
        atom: cute.CopyAtom,
        shared: cute.Tensor,
        source: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        first: Int32,
        items: Int32,
    ) -> None:
        """By one whole warp: send `items` slots, the first of them item `first` of the source."""
        to, of = boxes_of(atom, shared, source, self.box_rows)
        rank = Int32(0)
        if cutlass.const_expr(self.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        slot, parity = Int32(0), Int32(1)
        for i in cutlass.range(items, unroll=1):
            at = (first + i) & (self.items - 1)
            row = (at // self.column_boxes) * self.cluster + rank
            column = at % self.column_boxes
            cute.arch.mbarrier_wait(empty + slot, parity)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.slot_bytes)
            if cutlass.const_expr(self.cluster > 1):
                box = slot * self.cluster + rank
                cute.copy(atom, of[None, row, column], to[None, box], tma_bar_ptr=full + slot, mcast_mask=Int16(BOTH))
            else:
                cute.copy(atom, of[None, row, column], to[None, slot], tma_bar_ptr=full + slot)
            slot += 1
            if slot == self.slots:
                slot = Int32(0)
                parity = parity ^ 1

    @cute.jit
    def consume(
        self,
        shared: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        items: Int32,
        done: cute.Pointer | None,
        log: cute.Tensor,
        checks: cute.Tensor,
    ) -> None:
        """By one whole warp: release slots as they come, add up the first row of every box, log the clocks.

        `done`, where there is one, ends its first phase when the work beside the ring has ended; the items up to then
        are logged, with the clock. The ring goes on: how many items a CTA sends must not depend on a clock.
        """
        lane = cute.arch.lane_idx()
        words = cute.make_ptr(Int32, shared.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
        slot, parity = Int32(0), Int32(0)
        total = Int32(0)
        seen, clock_seen = Int32(0), Int64(0)
        start = cute.arch.clock64()
        for i in cutlass.range(items, unroll=1):
            cute.arch.mbarrier_wait(full + slot, parity)
            for box in cutlass.range_constexpr(self.cluster):
                # Row 0 of a box is the one row that SW128 leaves in order.
                row = cute.make_tensor(words + (slot * self.cluster + box) * self.box_words, cute.make_layout(32))
                total += row[lane]
            cute.arch.sync_warp()
            if cutlass.const_expr(self.cluster > 1):
                if lane < self.cluster:
                    cute.arch.mbarrier_arrive(empty + slot, lane)
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty + slot)
            if cutlass.const_expr(done is not None):  # noqa: SIM102 - one is for the compiler, one for the device
                if seen == 0:  # noqa: SIM102 - `and` would test the barrier on every step
                    if cute.arch.mbarrier_test_wait(done, 0):
                        seen = i + 1
                        clock_seen = cute.arch.clock64()
            slot += 1
            if slot == self.slots:
                slot = Int32(0)
                parity = parity ^ 1
        end = cute.arch.clock64()
        if lane == 0:
            log[LOG_FILL_START] = start
            log[LOG_FILL_END] = end
            log[LOG_ITEMS_SEEN] = Int64(seen)
            log[LOG_CLOCK_SEEN] = clock_seen
        checks[lane] = total


@cute.jit
def meet(cluster: cutlass.Constexpr[int], first: cutlass.Constexpr[bool]) -> None:
    """All threads of a cluster: after the barriers are made (`first`), and before any CTA leaves."""
    cute.arch.sync_warp()
    if cutlass.const_expr(first):
        cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(cluster > 1):
        cute.arch.cluster_arrive()  # releases what was written before, to the own CTA too
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


class Stream(Ring):
    """Section 1: nothing but the ring, one CTA an SM."""

    @cute.jit
    def __call__(
        self, source: Int64, log: Int64, checks: Int64, ctas: Int32, passes: Int32, stagger: Int32, stream: Any
    ) -> None:
        atom, tensor = self.atom(source)
        self.kernel(atom, tensor, log, checks, passes, stagger).launch(
            grid=[ctas, 1, 1], block=[64, 1, 1], cluster=[self.cluster, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, atom: cute.CopyAtom, source: cute.Tensor, log: Int64, checks: Int64, passes: Int32, stagger: Int32
    ) -> None:
        smem = SmemAllocator()
        shared = self.allocate(smem)
        full = smem.allocate_array(Int64, self.slots)
        empty = smem.allocate_array(Int64, self.slots)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = cute.arch.block_idx()[0]
        if warp == 0:
            with cute.arch.elect_one():
                self.init(full, empty)
        meet(self.cluster, True)
        if warp == 0:
            first = (cta // self.cluster) * stagger
            self.produce(atom, shared, source, full, empty, first, passes * self.items)
        else:
            mine = gmem_tensor(Int64, log + Int64(cta) * (LOG_WORDS * 8), (LOG_WORDS,))
            sums = gmem_tensor(Int32, checks + Int64(cta) * 128, (32,))
            self.consume(shared, full, empty, passes * self.items, None, mine, sums)
        meet(self.cluster, False)


class Rate:
    """Section 2: `groups` warpgroups issue m64nNk16 without end, a ring is filled beside them.

    Operands lie in shared memory as random bits (A in registers where `registers`); 8 wgmmas a commit group, over two
    64-wide stages, one group in flight. All warpgroups read the same B; each has its own A.

    Beyond twelve warps a thread gets 128 registers at the launch (a quarter of an SM then holds four warps), too few
    for m64n192 with A in registers. Three multiplying groups and a ring therefore make four whole warpgroups, and
    setmaxnreg moves registers from the ring's to the others: 24 + 3 * 160 of 4 * 128. m64n256 is not to be had there.
    """

    STAGES = 2
    STEPS = 8  # wgmmas of one iteration

    def __init__(self, n: int, registers: bool, groups: int, ring: Ring | None, cluster: int) -> None:
        self.n = n
        self.registers = registers
        self.groups = groups
        self.ring = ring
        self.described = ring if ring is not None else Ring(8192, 1, 1)  # whose box the launch describes, used or not
        self.cluster = cluster
        self.moves_registers = ring is not None and groups == 3
        self.threads = 128 * groups + (0 if ring is None else 128 if self.moves_registers else 64)

    @cute.jit
    def __call__(
        self,
        source: Int64,
        log: Int64,
        checks: Int64,
        sums: Int64,
        ctas: Int32,
        groups: Int32,
        iterations: Int32,
        items: Int32,
        stagger: Int32,
        stream: Any,
    ) -> None:
        mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (64, self.n),
            warpgroup.OperandSource.RMEM if self.registers else warpgroup.OperandSource.SMEM,
        )
        atom, tensor = self.described.atom(source)
        self.kernel(mma, atom, tensor, source, log, checks, sums, groups, iterations, items, stagger).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        atom: cute.CopyAtom,
        boxes: cute.Tensor,
        source: Int64,
        log: Int64,
        checks: Int64,
        sums: Int64,
        groups: Int32,
        iterations: Int32,
        items: Int32,
        stagger: Int32,
    ) -> None:
        smem = SmemAllocator()
        a_layout = box_layout(64, self.STAGES * self.groups)
        b_layout = box_layout(self.n, self.STAGES)
        b_shared = smem.allocate_tensor(BFloat16, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        a_shared = b_shared
        if cutlass.const_expr(not self.registers):
            a_shared = smem.allocate_tensor(BFloat16, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        tid = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = cute.arch.block_idx()[0]
        done = smem.allocate_array(Int64, 1)
        shared, full, empty = b_shared, done, done
        if cutlass.const_expr(self.ring is not None):
            shared = self.ring.allocate(smem)
            full = smem.allocate_array(Int64, self.ring.slots)
            empty = smem.allocate_array(Int64, self.ring.slots)

        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(done, groups)
                if cutlass.const_expr(self.ring is not None):
                    self.ring.init(full, empty)
        # The operands: bits of the source, in whatever order; what matters is that they are random bf16.
        self.scatter(b_shared, source, tid)
        if cutlass.const_expr(not self.registers):
            self.scatter(a_shared, source, tid)
        cute.arch.fence_view_async_shared()  # wgmma reads through the async proxy
        meet(self.cluster, True)

        mine = gmem_tensor(Int64, log + Int64(cta) * (LOG_WORDS * 8), (LOG_WORDS,))
        group = warp // 4
        if group == self.groups:
            # Nothing but the ring may come after the decrease, else ptxas ignores it (C7507).
            if cutlass.const_expr(self.ring is not None):
                if cutlass.const_expr(self.moves_registers):
                    cute.arch.setmaxregister_decrease(24)
                if warp == 4 * self.groups:
                    self.ring.produce(atom, shared, boxes, full, empty, (cta // self.cluster) * stagger, items)
                if warp == 4 * self.groups + 1:
                    totals = gmem_tensor(Int32, checks + Int64(cta) * 128, (32,))
                    self.ring.consume(shared, full, empty, items, done, mine, totals)
        else:
            if cutlass.const_expr(self.moves_registers):
                cute.arch.setmaxregister_increase(160)
            if group < groups:
                out = gmem_tensor(Float32, sums + (Int64(cta) * (128 * self.groups) + Int64(tid)) * 4, (1,))
                self.multiply(mma, a_shared, b_shared, source, group, tid, iterations, done, mine, out)
        meet(self.cluster, False)

    @cute.jit
    def scatter(self, shared: cute.Tensor, source: Int64, tid: Int32) -> None:
        """By all threads: fill a shared tensor with bits of the source."""
        words = cute.cosize(shared.layout) // 2
        to = cute.make_tensor(
            cute.make_ptr(Int32, shared.iterator.toint(), cute.AddressSpace.smem, assumed_align=16),
            cute.make_layout(words),
        )
        of = gmem_tensor(Int32, source, (words,))
        for i in cutlass.range(tid, words, self.threads, unroll=1):
            to[i] = of[i]

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        a_shared: cute.Tensor,
        b_shared: cute.Tensor,
        source: Int64,
        group: Int32,
        tid: Int32,
        iterations: Int32,
        done: cute.Pointer,
        log: cute.Tensor,
        out: cute.Tensor,
    ) -> None:
        """By one warpgroup: the timed loop."""
        slice_ = mma.get_slice(0)
        b = mma.make_fragment_B(slice_.partition_B(b_shared))
        if cutlass.const_expr(self.registers):
            a = mma.make_fragment_A(mma.partition_shape_A((64, 32)))  # two fragments, and ptxas makes copies
            words = cute.recast_tensor(a, Int32)
            count = cute.size(words)
            of = gmem_tensor(Int32, source + Int64(tid) * (count * 4), (count,))
            for i in cutlass.range_constexpr(count):
                words[i] = of[i]
        else:
            a = mma.make_fragment_A(slice_.partition_A(a_shared))
        c = cute.make_rmem_tensor(mma.partition_shape_C((64, self.n)), Float32)
        c.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)

        start = cute.arch.clock64()
        for _ in cutlass.range(iterations, unroll=1):
            warpgroup.fence()
            for step in cutlass.range_constexpr(self.STEPS):
                stage, k = step // 4, step % 4
                if cutlass.const_expr(self.registers):
                    cute.gemm(mma, c, a[None, None, k % 2], b[None, None, k, stage], c)
                else:
                    cute.gemm(mma, c, a[None, None, k, group * self.STAGES + stage], b[None, None, k, stage], c)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
        warpgroup.wait_group(0)
        end = cute.arch.clock64()

        if tid % 128 == 0:
            cute.arch.mbarrier_arrive(done)
            log[LOG_MMA + 2 * group] = start
            log[LOG_MMA + 2 * group + 1] = end
        total = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(c)):
            total += c[i]
        out[0] = total  # every accumulator is used


class Gemm:
    """Section 3: C[M,N] = A[M,K] B[N,K]^T, bf16, persistent, a pair of CTAs on two row tiles of the same columns.

    Threads: a producer warpgroup (its first warp; 40 registers) and two consumers (232), each 64 rows of a 128x256
    tile. Shared memory: 4 stages of A 16 KiB + B 32 KiB, then 2 x 8 KiB a consumer to store C through. A CTA loads its
    own A and half of B, which it multicasts. The consumers do not wait for each other: one may be up to four stages
    ahead, so that its epilogue lies beside the other's wgmmas.
    """

    TILE_M, TILE_N, TILE_K = 128, 256, 64
    STAGES = 4
    CLUSTER = 2
    STAGE_BYTES = (TILE_M + TILE_N) * TILE_K * 2
    STORES = 2  # 64 x 64 buffers of a consumer

    def __init__(self, m: int, n: int, k: int) -> None:
        self.m, self.n, self.k = m, n, k
        self.steps = k // self.TILE_K
        self.row_pairs = m // (self.TILE_M * self.CLUSTER)
        self.tiles = self.row_pairs * (n // self.TILE_N)  # of a cluster

    @cute.jit
    def __call__(self, a: Int64, b: Int64, c: Int64, ctas: Int32, stream: Any) -> None:
        a_atom, a_tensor = load_atom(gmem_tensor(BFloat16, a, (self.m, self.k)), self.TILE_M, False)
        b_atom, b_tensor = load_atom(gmem_tensor(BFloat16, b, (self.n, self.k)), self.TILE_N // 2, True)
        c_atom, c_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            gmem_tensor(BFloat16, c, (self.m, self.n)),
            cute.select(box_layout(64, 1), mode=[0, 1]),
            (64, BOX_COLUMNS),
        )
        mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, self.TILE_N)
        )
        self.kernel(mma, a_atom, a_tensor, b_atom, b_tensor, c_atom, c_tensor).launch(
            grid=[ctas, 1, 1], block=[384, 1, 1], cluster=[self.CLUSTER, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        a_atom: cute.CopyAtom,
        a_tensor: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tensor: cute.Tensor,
        c_atom: cute.CopyAtom,
        c_tensor: cute.Tensor,
    ) -> None:
        smem = SmemAllocator()
        a_layout = box_layout(64, 2 * self.STAGES)  # box 2 * stage + consumer
        b_layout = box_layout(self.TILE_N, self.STAGES)
        c_layout = box_layout(64, 2 * self.STORES)
        a_shared = smem.allocate_tensor(BFloat16, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        b_shared = smem.allocate_tensor(BFloat16, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        c_shared = smem.allocate_tensor(BFloat16, c_layout.outer, byte_alignment=1024, swizzle=c_layout.inner)
        full = smem.allocate_array(Int64, self.STAGES)
        empty = smem.allocate_array(Int64, self.STAGES)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.STAGES):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, 8 * self.CLUSTER)  # a warp of a consumer is a reader
        meet(self.CLUSTER, True)
        cluster = cute.arch.block_idx()[0] // self.CLUSTER
        clusters = cute.arch.grid_dim()[0] // self.CLUSTER
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp < 4:
            cute.arch.setmaxregister_decrease(40)
            if warp == 0:
                self.load(a_atom, a_tensor, b_atom, b_tensor, a_shared, b_shared, full, empty, cluster, clusters, rank)
        else:
            cute.arch.setmaxregister_increase(232)
            consumer = warp // 4 - 1
            self.consume(
                mma, c_atom, c_tensor, a_shared, b_shared, c_shared, full, empty, consumer, cluster, clusters, rank
            )
        meet(self.CLUSTER, False)

    @cute.jit
    def load(
        self,
        a_atom: cute.CopyAtom,
        a_tensor: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tensor: cute.Tensor,
        a_shared: cute.Tensor,
        b_shared: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        cluster: Int32,
        clusters: Int32,
        rank: Int32,
    ) -> None:
        """By one whole warp: fill the ring for every tile of this cluster."""
        # The same bytes as boxes of 128 rows: one of A and two of B a stage.
        a_boxes = box_layout(self.TILE_M, self.STAGES)
        b_boxes = box_layout(self.TILE_N // 2, 2 * self.STAGES)
        a_to, a_of = boxes_of(a_atom, cute.make_tensor(a_shared.iterator, a_boxes.outer), a_tensor, self.TILE_M)
        b_to, b_of = boxes_of(b_atom, cute.make_tensor(b_shared.iterator, b_boxes.outer), b_tensor, self.TILE_N // 2)
        stage, parity = Int32(0), Int32(1)
        for tile in cutlass.range(cluster, self.tiles, clusters, unroll=1):
            row = (tile % self.row_pairs) * self.CLUSTER + rank
            column = (tile // self.row_pairs) * 2 + rank
            for k in cutlass.range(self.steps, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, parity)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.STAGE_BYTES)
                cute.copy(a_atom, a_of[None, row, k], a_to[None, stage], tma_bar_ptr=full + stage)
                half = 2 * stage + rank
                cute.copy(
                    b_atom, b_of[None, column, k], b_to[None, half], tma_bar_ptr=full + stage, mcast_mask=Int16(BOTH)
                )
                stage += 1
                if stage == self.STAGES:
                    stage = Int32(0)
                    parity = parity ^ 1

    @cute.jit
    def release(self, empty: cute.Pointer, stage: Int32) -> None:
        """By every warp of a consumer, when its wgmmas have read the stage: tell both CTAs."""
        lane = cute.arch.lane_idx()
        if lane < self.CLUSTER:
            cute.arch.mbarrier_arrive(empty + stage, lane)

    @cute.jit
    def consume(
        self,
        mma: cute.TiledMma,
        c_atom: cute.CopyAtom,
        c_tensor: cute.Tensor,
        a_shared: cute.Tensor,
        b_shared: cute.Tensor,
        c_shared: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        consumer: Int32,
        cluster: Int32,
        clusters: Int32,
        rank: Int32,
    ) -> None:
        """By one warpgroup: multiply and store its 64 rows of every tile."""
        slice_ = mma.get_slice(0)
        a = mma.make_fragment_A(slice_.partition_A(a_shared))
        b = mma.make_fragment_B(slice_.partition_B(b_shared))
        c = cute.make_rmem_tensor(mma.partition_shape_C((64, self.TILE_N)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        stage, parity = Int32(0), Int32(0)
        for tile in cutlass.range(cluster, self.tiles, clusters, unroll=1):
            c.fill(0.0)
            before = Int32(0)
            for k in cutlass.range(self.steps, unroll=1):
                cute.arch.mbarrier_wait(full + stage, parity)
                warpgroup.fence()
                for part in cutlass.range_constexpr(4):
                    cute.gemm(mma, c, a[None, None, part, 2 * stage + consumer], b[None, None, part, stage], c)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if k > 0:
                    self.release(empty, before)
                before = stage
                stage += 1
                if stage == self.STAGES:
                    stage = Int32(0)
                    parity = parity ^ 1
            warpgroup.wait_group(0)
            self.release(empty, before)
            row = ((tile % self.row_pairs) * self.CLUSTER + rank) * 2 + consumer
            self.store(c_atom, c_tensor, c_shared, c, consumer, row, tile // self.row_pairs)
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last stores have read shared memory

    @cute.jit
    def store(
        self,
        c_atom: cute.CopyAtom,
        c_tensor: cute.Tensor,
        c_shared: cute.Tensor,
        c: cute.Tensor,
        consumer: Int32,
        row: Int32,
        column: Int32,
    ) -> None:
        """By one warpgroup: 64 x 256 accumulators to C, 64 columns at a time through two buffers.

        A thread holds columns 8 j + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8 of its warp's 16. Under
        SW128 a warp's 32 words of one j fall into 32 banks: plain 4-byte stores are free of conflicts.
        """
        of, to = boxes_of(c_atom, c_shared, c_tensor, 64)
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        words = cute.make_ptr(Int32, c_shared.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
        barrier = 1 + consumer
        for part in cutlass.range_constexpr(self.TILE_N // BOX_COLUMNS):
            box = consumer * self.STORES + part % self.STORES
            # Whoever issued the store before last knows whether this buffer has been read.
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(self.STORES - 1, read=True)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
            base = box * (64 * 32) + (warp * 16 + lane // 4) * 32 + lane % 4
            for j in cutlass.range_constexpr(8):
                chunk = 4 * (j ^ (lane // 4))
                pairs = cute.make_rmem_tensor((4,), BFloat16)
                for i in cutlass.range_constexpr(4):
                    pairs[i] = c[(part * 8 + j) * 4 + i].to(BFloat16)
                packed = cute.recast_tensor(pairs, Int32)
                for half in cutlass.range_constexpr(2):
                    word = cute.make_tensor(words + (base + chunk + half * 8 * 32), cute.make_layout(1))
                    word[0] = packed[half]
            cute.arch.fence_view_async_shared()  # TMA reads through the async proxy
            cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
            if warp == 0:
                cute.copy(c_atom, of[None, box], to[None, row, column * 4 + part])
                cute.arch.cp_async_bulk_commit_group()
