"""What the host knows of a packed batch without reading ``cu_seqlens``: bounds of every table, the rounds of a call.

Documents become *segments*. A document longer than ``short`` rows or keys is one. Runs of shorter ones are packed into
a segment if their rows and their keys begin in the same window of ``window`` indices: it has at most one tile of
either. The rows and keys beyond the last document form the last segment, in which nobody sees anything.

A segment is cut into tiles of 128 rows and 128 keys; a row tile has a *slot* of the workspace for each key tile that it
sees, at least one, numbered through all row tiles. The score phase takes up to ``group_rows`` neighbouring row tiles of
a segment together and walks the columns, so that their keys come from L2; what such a group spans are its *tasks*.

Rounds. Heads whose slots fit the workspace together make a round. Where one head (for dK and dV: one group of heads)
does not fit, it is cut into *chunks* of row tiles, by slot number. A chunk ends with a group of row tiles or, when dK
and dV are wanted, with a segment, so that their sums are finished inside. Only segments of more than ``cut_above``
tiles are then cut at groups: they have chunks of their own (``fenced``), over which dK and dV are added up in float32.
How many chunks there are, the host only bounds; the programs of those that turn out empty return at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ffpa_jit.triton import params
from ffpa_jit.triton.launch import Launcher
from ffpa_jit.triton.schedule import BACKWARD_ROW_BYTES, FORWARD_ROW_BYTES, TILE, TILE_BYTES, tiles
from ffpa_jit.triton.terms import UNLIMITED

RECORD = 16
"""Words of a row tile's and of a key tile's record (``tables``)."""

CHUNK_RECORD = 8

NEVER = 2**31 - 1

_ALIGN = 32
"""Tables begin at multiples of so many words: Triton compiles a kernel for each alignment of its pointers."""


class DoesNotFitError(ValueError):
    """The two-phase kernels cannot run the call within the workspace; nothing has been launched."""


@dataclass(frozen=True)
class Batch:
    """Sizes of a call. ``same``: rows and keys have the same ``cu_seqlens``. ``pack``: short documents share tiles."""

    docs: int
    len_q: int
    len_k: int
    max_q: int
    max_k: int
    left: int = UNLIMITED
    right: int = UNLIMITED
    same: bool = False
    pack: bool = True

    @property
    def short(self) -> int:
        """Length up to which documents are packed; -1 for none."""
        return min(max(self.max_q, self.max_k, 1), TILE // 2) if self.pack else -1

    @property
    def window(self) -> int:
        return TILE + 1 - self.short if self.pack else 1

    @property
    def _sides(self) -> list[tuple[int, int]]:
        """Length and longest document of the sides whose offsets differ."""
        return [(self.len_q, self.max_q)] if self.same else [(self.len_q, self.max_q), (self.len_k, self.max_k)]

    @property
    def _windows(self) -> int:
        return sum(length // self.window for length, _ in self._sides)

    @property
    def segments(self) -> int:
        """Bound on segments, the last one included."""
        if not self.pack:
            return self.docs + 1
        long = sum(length // (self.short + 1) for length, most in self._sides if most > self.short)
        return min(self.docs, 1 + 2 * long + self._windows) + 1

    def _tiles(self, length: int) -> int:
        """Bound on the tiles of a side."""
        bound = (length + (TILE - 1) * min(self.segments, length)) // TILE
        if self.pack and max(self.max_q, self.max_k) <= self.short:
            # A tile a segment, and where the last one takes several, windows would be no fewer.
            bound = min(bound, self._windows + 2)
        return bound

    @property
    def row_tiles(self) -> int:
        return self._tiles(self.len_q)

    @property
    def key_tiles(self) -> int:
        return self._tiles(self.len_k)

    @property
    def high(self) -> int:
        """Row tiles of a document."""
        return max(tiles(min(self.max_q, self.len_q)), 1)

    @property
    def wide(self) -> int:
        """Key tiles of a document."""
        return max(tiles(min(self.max_k, self.len_k)), 1)

    @property
    def row_width(self) -> int:
        """Key tiles that a row tile sees."""
        return min(self.wide, (self.left + self.right + 2 * TILE - 2) // TILE + 1)

    @property
    def _key_heights(self) -> int:
        """Row tiles that see the key tiles of a longest document, all together."""
        most = min(self.high, (self.left + self.right + 2 * TILE - 2) // TILE + 1)
        # The rows that see a key tile reach to the last row; if positions are aligned, no tile is touched in vain.
        extra = 0 if self.same and not self.right else 1 + tiles(self.right)
        climb = min(max(most - extra, 0), self.wide)  # 1 + extra, 2 + extra, ...
        return climb * (climb + 1) // 2 + climb * min(extra, most) + (self.wide - climb) * most

    @property
    def slots(self) -> int:
        """Bound on the slots of a head: by rows, and by keys."""
        by_keys = -(-self.key_tiles * self._key_heights // self.wide)
        # A row tile without keys takes a slot, too. If rows see themselves, it is in the last segment.
        return max(min(self.row_tiles * self.row_width, by_keys + (0 if self.same else self.row_tiles)), self.row_tiles)

    @property
    def segment_slots(self) -> int:
        """Bound on the slots of a segment, the last one excepted: its slots are empty."""
        return min(self.high * self.row_width, self._key_heights + self.high)

    def segments_above(self, limit: int) -> int:
        """Bound on segments of more than ``limit`` tiles, seen or not."""
        area = min(self.row_tiles * self.wide, (self.key_tiles + self.row_tiles) * self.high)
        return min(self.docs, area // (limit + 1))

    def wasted_tasks(self, group_rows: int) -> float:
        """Tasks of a row tile that are none of its tiles: groups of row tiles are rectangles, and ranges slide."""
        sides = (self.left < UNLIMITED) + (self.right < UNLIMITED)
        return sides * (min(group_rows, self.high) - 1) / 2


@dataclass(frozen=True)
class Rounds:
    """How a call is cut.

    ``together`` sets of ``heads`` heads make a round: ``heads`` is 1, or a whole group if dK or dV is wanted. Chunk
    ``c`` begins at the first unit whose slot is at least ``c * stride``; it has at most ``slots`` slots for a head.
    """

    together: int
    heads: int
    chunks: int
    stride: int
    slots: int
    rows: int
    tasks: int
    group_rows: int
    cut_above: int = NEVER
    fenced: bool = False
    parts: int = 1
    """In how many parts the heads of a group come, one after the other: 1 or 2."""

    @property
    def partial(self) -> int:
        """How dK and dV come together: 0 at once, 1 of a segment from several chunks, 2 from two parts of the heads."""
        return 2 if self.parts > 1 else int(self.fenced)


def _rounds(
    batch: Batch, *, together: int, heads: int, stride: int, unit: int, group_rows: int, cut_above: int, fenced: bool
) -> Rounds:
    chunks = (batch.slots - 1) // stride + 1
    slots = min(batch.slots, stride + unit)
    if fenced:
        chunks += 2 * batch.segments_above(cut_above)
    rows = min(batch.row_tiles, stride + max(unit, group_rows))  # the last segment is cut at groups of rows
    waste = batch.wasted_tasks(group_rows)
    tasks = int(min(batch.slots + batch.row_tiles * waste, slots + rows * waste))
    return Rounds(together, heads, chunks, stride, slots, rows, tasks, group_rows, cut_above, fenced)


def _check(batch: Batch) -> None:
    if batch.slots + batch.row_tiles * 4 > NEVER:
        raise DoesNotFitError("the documents have more than 2^31 tiles of 128 x 128 scores")


def _too_small(cap: int, what: str) -> DoesNotFitError:
    return DoesNotFitError(
        f"{max(cap, 0) / 2**20:.4g} MiB, what tables and row sums leave of the workspace, do not hold {what}: raise "
        "FFPA_JIT_WORKSPACE_MB, or the call's own TritonBackend(workspace_mb=...)"
    )


def forward_rounds(batch: Batch, cap: int, heads: int, group_rows: int) -> Rounds:
    """Rounds of the forward within ``cap`` bytes, and of a backward that wants dQ only (with its own slot size)."""
    return _row_rounds(batch, cap, heads, group_rows, TILE_BYTES + TILE * FORWARD_ROW_BYTES, TILE * 4)


def _row_rounds(batch: Batch, cap: int, heads: int, group_rows: int, slot_bytes: int, row_bytes: int) -> Rounds:
    _check(batch)
    head_bytes = batch.slots * slot_bytes + batch.row_tiles * row_bytes
    if head_bytes <= cap:
        together = min(cap // head_bytes, heads)
        together = -(-heads // -(-heads // together))  # rounds of about the same size
        return _rounds(batch, together=together, heads=1, stride=batch.slots, unit=0, group_rows=group_rows,
                       cut_above=NEVER, fenced=False)  # fmt: skip
    room = (cap - batch.row_tiles * row_bytes) // slot_bytes
    for rows in (group_rows, 1):
        stride = room - rows * batch.row_width
        if stride >= rows * batch.row_width or (rows == 1 and stride > 0):
            return _rounds(batch, together=1, heads=1, stride=stride, unit=rows * batch.row_width, group_rows=rows,
                           cut_above=-1, fenced=False)  # fmt: skip
    raise _too_small(cap, "two rows of score tiles")


def backward_rounds(
    batch: Batch, cap: int, heads: int, group: int, head_dim: int, group_rows: int, *, matrices: int, dkv: bool
) -> Rounds:
    """Rounds of the backward; ``matrices`` is 2 when both P and dS are stored, else 1.

    Raises:
        DoesNotFitError: two row tiles of a group of heads, or the float32 sums of a longest document, do not fit.
    """
    _check(batch)
    slot_bytes = matrices * TILE_BYTES + (TILE * BACKWARD_ROW_BYTES if matrices == 2 else 0)
    if not dkv:
        return _row_rounds(batch, cap, heads, group_rows, slot_bytes, 0)
    room = cap // (slot_bytes * group)
    if batch.slots <= room:
        groups = heads // group
        together = min(room // batch.slots, groups)
        together = -(-groups // -(-groups // together))
        return _rounds(batch, together=together, heads=group, stride=batch.slots, unit=0, group_rows=group_rows,
                       cut_above=NEVER, fenced=False)  # fmt: skip
    if group % 2 == 0:
        # Half of the heads at a time, if that takes no chunks: no more rounds than otherwise, of key tiles whose
        # contractions are half as long, so that they do not outlast the rest of the round.
        half = (cap - part_bytes(batch, head_dim)) // (slot_bytes * (group // 2))
        if batch.slots <= half:
            cut = _rounds(batch, together=1, heads=group // 2, stride=batch.slots, unit=0, group_rows=group_rows,
                          cut_above=NEVER, fenced=False)  # fmt: skip
            return replace(cut, parts=2)
    if 2 * batch.segment_slots <= room:
        return _rounds(batch, together=1, heads=group, stride=room - batch.segment_slots, unit=batch.segment_slots,
                       group_rows=group_rows, cut_above=NEVER, fenced=False)  # fmt: skip
    room = (cap - sum_bytes(batch, head_dim)) // (slot_bytes * group)
    for rows in (group_rows, 1):
        stride = min(room * 2 // 3, room - rows * batch.row_width)
        if stride >= rows * batch.row_width or (rows == 1 and stride > 0):
            cut_above = max(stride // 2, 1)
            unit = max(cut_above, rows * batch.row_width)
            return _rounds(batch, together=1, heads=group, stride=stride, unit=unit, group_rows=rows,
                           cut_above=cut_above, fenced=True)  # fmt: skip
    raise _too_small(cap, "two rows of score tiles of a group of heads beside the float32 sums of a document")


def sum_bytes(batch: Batch, head_dim: int) -> int:
    """Float32 dK and dV of the longest document."""
    return 2 * batch.wide * TILE * head_dim * 4


def part_bytes(batch: Batch, head_dim: int) -> int:
    """Float32 dK and dV of all keys of a key head."""
    return 2 * batch.key_tiles * TILE * head_dim * 4


@dataclass
class Tables:
    """The tables of a call on the device, slices of one allocation of int32; see ``tables`` for what they hold."""

    memory: torch.Tensor
    segments: int
    head: torch.Tensor = field(init=False)
    row_marks: torch.Tensor = field(init=False)
    key_marks: torch.Tensor = field(init=False)
    segment: torch.Tensor = field(init=False)
    row: torch.Tensor = field(init=False)
    key: torch.Tensor = field(init=False)
    chunk: torch.Tensor = field(init=False)
    low: torch.Tensor = field(init=False)
    high: torch.Tensor = field(init=False)
    task: torch.Tensor = field(init=False)

    @property
    def views(self) -> params.Tables:
        """What the score and value kernels read."""
        return params.Tables(self.head, self.row, self.key, self.chunk, self.low, self.high, self.task)


def _table_sizes(batch: Batch, rounds: Rounds) -> dict[str, int]:
    segments = batch.segments + 2
    sizes = {
        "head": 8, "row_marks": batch.row_tiles + 2, "key_marks": batch.key_tiles + 2, "segment": 7 * segments,
        "row": (batch.row_tiles + 1) * RECORD, "key": (batch.key_tiles + 1) * RECORD,
        "chunk": (rounds.chunks + 1) * CHUNK_RECORD, "low": batch.len_q, "high": batch.len_q,
        "task": 2 * max(rounds.tasks, 1),
    }  # fmt: skip
    return {name: -(-size // _ALIGN) * _ALIGN for name, size in sizes.items()}


def fixed_bytes(batch: Batch) -> int:
    """Bytes of the tables but for tasks and chunks, which are small beside the tiles."""
    return 4 * ((batch.row_tiles + batch.key_tiles) * (RECORD + 1) + 7 * batch.segments + 2 * batch.len_q)


def allocate(batch: Batch, rounds: Rounds, launcher: Launcher) -> Tables:
    sizes = _table_sizes(batch, rounds)
    tables = Tables(launcher.scratch((sum(sizes.values()),), torch.int32), batch.segments + 2)
    launcher.call(torch.Tensor.zero_, tables.memory)
    for name, part in zip(sizes, tables.memory.split(list(sizes.values())), strict=True):
        setattr(tables, name, part)
    return tables
