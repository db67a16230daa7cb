"""The budgets of the Hopper forward: who holds what, for each head dim. Plain arithmetic, nothing of the DSL.

`forward_sm90` says what the numbers mean for the schedule; tests hold them against the compiler's own report.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BLOCK", "BOX_BYTES", "CLUSTER", "COPY_REGISTERS", "LAUNCH_REGISTERS", "SHARED_LIMIT", "THREADS", "TILE",
    "Schedule", "schedule_of",
]  # fmt: skip

BLOCK = 64
"""Query rows of a thread block, keys of a block, and columns of a box."""

BOX_BYTES = BLOCK * BLOCK * 2
"""A box of keys or of queries: 64 rows of 64 columns, 128 bytes a row, which is what TMA swizzles."""

CLUSTER = 2
"""Thread blocks that share what they read. Two neighbours of 64 rows each make a tile."""

TILE = CLUSTER * BLOCK
"""Query rows, of all the heads of a group together, that a cluster works on at a time."""

THREADS = 512
"""Four warpgroups: copies, scores, and the two parts of the output's columns."""

LAUNCH_REGISTERS = 128
"""Of a thread, with so many threads; from them the warpgroups take and give by `setmaxnreg`, 4 x 128 in all."""

COPY_REGISTERS = 24

SHARED_LIMIT = 227 << 10
"""Bytes of shared memory a thread block may have (CUDA programming guide, compute capability 9.0)."""


@dataclass(frozen=True)
class Schedule:
    """One instantiation.

    `head_dim`: a multiple of 64. `first`: boxes of the output's columns that the first value warpgroup makes. `held`:
    boxes of the query in the score warpgroup's registers; the others are in shared memory. `lead`: boxes of keys before
    the end of a block's scores at which the block before is handed over. `key_stages`: blocks of keys in flight.
    `slice`: keys of a slice of values, what a value warpgroup takes and gives back at a time; `value_stages` of them
    are in flight, at least two: one is given back when the next has been taken. `score_registers`, `value_registers`:
    of a thread.
    """

    head_dim: int
    first: int
    held: int
    lead: int
    key_stages: int
    slice: int
    value_stages: int
    score_registers: int
    value_registers: tuple[int, int]

    @property
    def boxes(self) -> int:
        """Boxes across the head dim."""
        return self.head_dim // BLOCK

    @property
    def widths(self) -> tuple[int, int]:
        """Output columns of the first and the second value warpgroup."""
        return self.first * BLOCK, (self.boxes - self.first) * BLOCK

    @property
    def tail(self) -> int:
        """Boxes of the query in shared memory."""
        return self.boxes - self.held

    @property
    def slices(self) -> int:
        """Slices of values in a block."""
        return BLOCK // self.slice

    @property
    def key_slots(self) -> int:
        """Boxes of keys in flight."""
        return self.key_stages * self.boxes

    # Offsets in shared memory. What TMA writes and wgmma reads comes first: it is aligned to 1024 bytes.

    @property
    def value_at(self) -> int:
        return 0

    @property
    def key_at(self) -> int:
        return self.value_at + self.value_stages * self.boxes * self.slice * BLOCK * 2

    @property
    def query_at(self) -> int:
        return self.key_at + self.key_slots * BOX_BYTES

    @property
    def probability_at(self) -> int:
        return self.query_at + self.tail * BOX_BYTES

    @property
    def factor_at(self) -> int:
        return self.probability_at + 2 * BOX_BYTES

    @property
    def share_at(self) -> int:
        return self.factor_at + 2 * BLOCK * 4

    @property
    def flag_at(self) -> int:
        return self.share_at + 2 * BLOCK * 4

    @property
    def barriers_at(self) -> int:
        return self.flag_at + 2 * 4 * 4

    @property
    def barriers(self) -> int:
        """Two for each slot of keys, for each slice of values of both warpgroups, and for each of two P."""
        return 2 * self.key_slots + 4 * self.value_stages + 4

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 8 * self.barriers


# head_dim, first, held, lead, key_stages, slice, value_stages, score_registers, value_registers; what was tried beside
# these is in bench/NOTES.md.
_SCHEDULES = {
    320: Schedule(320, 3, 5, 1, 2, 32, 4, 232, (128, 128)),
    384: Schedule(384, 3, 6, 1, 2, 32, 3, 216, (136, 136)),
    448: Schedule(448, 4, 4, 2, 1, 32, 4, 168, (160, 160)),
    512: Schedule(512, 4, 5, 2, 1, 32, 3, 168, (160, 160)),
    576: Schedule(576, 6, 2, 1, 1, 16, 4, 128, (224, 136)),
    640: Schedule(640, 6, 2, 2, 1, 16, 3, 104, (224, 160)),
}


def schedule_of(head_dim: int) -> Schedule:
    """The schedule of an instantiated head dim."""
    return _SCHEDULES[head_dim]
