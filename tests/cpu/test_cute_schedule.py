"""The barriers of the CuTe-DSL forward, played through on the CPU: for every shipped schedule, no order of events makes
its warps wait for each other, and nobody reads what is not there or overwrites what is still read.

The model has the kernel's waits, arrivals and copies in the kernel's order, and nothing of its arithmetic. An actor is
a generator that yields what it waits for. Four warps of a warpgroup are one actor that arrives four times, also at the
barriers of P, where each of their lanes does.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Generator, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffpa_jit.cute.schedule import CLUSTER, Schedule, schedule_of
from ffpa_jit.cute.spec import HEAD_DIMS

IN_FLIGHT = 3  # as in forward_sm90, which cannot be imported without the DSL
Waits = Generator[Callable[[], bool], None, None]


class Barrier:
    """An mbarrier: a phase is over when all have arrived and all announced boxes have come."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.boxes = self.phase = 0

    def arrive(self, boxes: int = 0) -> None:
        assert self.missing > 0, "more arrivals than a phase has"
        self.missing -= 1
        self.boxes += boxes
        self._turn()

    def come(self) -> None:
        """A box, which may be there before it is announced."""
        self.boxes -= 1
        self._turn()

    def _turn(self) -> None:
        if self.missing == 0 and self.boxes == 0:
            self.missing, self.phase = self.count, self.phase + 1

    def over(self, parity: int) -> Callable[[], bool]:
        """Whether the phase of that parity is over, as a wait on it sees it."""
        return lambda: self.phase % 2 != parity % 2


class Block:
    """A thread block's shared memory: what each slot holds (None: free), and the barriers."""

    def __init__(self, schedule: Schedule) -> None:
        self.keys: list[tuple[int, int] | None] = [None] * schedule.key_slots
        self.values: list[list[list[int | None]]] = [
            [[None] * (width // 64) for _ in range(schedule.value_stages)] for width in schedule.widths
        ]
        self.probabilities: list[int | None] = [None, None]
        self.readers = [0, 0]
        self.key_full = [Barrier(1) for _ in range(schedule.key_slots)]
        self.key_empty = [Barrier(4 * CLUSTER) for _ in range(schedule.key_slots)]
        self.value_full = [[Barrier(1) for _ in range(schedule.value_stages)] for _ in range(2)]
        self.value_empty = [[Barrier(4 * CLUSTER) for _ in range(schedule.value_stages)] for _ in range(2)]
        self.p_full, self.p_empty = [Barrier(4), Barrier(4)], [Barrier(8), Barrier(8)]
        for barrier in self.key_full:
            barrier.arrive(boxes=1)
        for which, stages in enumerate(self.value_full):
            for barrier in stages:
                barrier.arrive(boxes=schedule.widths[which] // 64)


class Cluster:
    """The pair, and what is on its way through TMA: closures that make a copy arrive."""

    def __init__(self, schedule: Schedule, tiles: list[int]) -> None:
        self.s, self.tiles = schedule, tiles
        self.blocks = [Block(schedule) for _ in range(CLUSTER)]
        self.flying: list[Callable[[], None]] = []

    def actors(self) -> Iterable[Waits]:
        for rank in range(CLUSTER):
            yield self.copy_keys(rank)
            yield self.scores(rank)
            for which in range(2):
                yield self.copy_values(rank, which)
                yield self.values(rank, which)

    def copy_keys(self, rank: int) -> Waits:
        s = self.s
        for count in range(sum(self.tiles)):
            first, free = count % s.key_stages * s.boxes, count // s.key_stages % 2 ^ 1
            for g in range(s.boxes):
                if rank == g % CLUSTER:
                    yield self.blocks[rank].key_empty[first + g].over(free)
                    for block in self.blocks:
                        self.flying.append(functools.partial(self._put_key, block, first + g, (count, g)))

    def _put_key(self, block: Block, slot: int, box: tuple[int, int]) -> None:
        assert block.keys[slot] is None, f"box {box} overwrites {block.keys[slot]}"
        block.keys[slot] = box
        block.key_full[slot].come()

    def copy_values(self, rank: int, which: int) -> Waits:
        s = self.s
        stage, free = 0, 1
        for count in range(sum(self.tiles) * s.slices):
            yield self.blocks[rank].value_empty[which][stage].over(free)
            for g in range(s.widths[which] // 64):
                if rank == g % CLUSTER:
                    for block in self.blocks:
                        self.flying.append(functools.partial(self._put_value, block, which, stage, g, count))
            stage, free = self._turn(stage, free)

    def _put_value(self, block: Block, which: int, stage: int, g: int, count: int) -> None:
        boxes = block.values[which][stage]
        assert boxes[g] is None, f"slice {count} overwrites {boxes[g]}"
        boxes[g] = count
        block.value_full[which][stage].come()

    def scores(self, rank: int) -> Waits:
        s, own = self.s, self.blocks[rank]
        count = 0
        for blocks in self.tiles:
            for j in range(blocks):
                first = count % s.key_stages * s.boxes
                for g in range(s.boxes):
                    yield own.key_full[first + g].over(count // s.key_stages)
                    assert own.keys[first + g] == (count, g)
                    if g >= IN_FLIGHT:
                        self._give_back_key(own, first, g - IN_FLIGHT)
                    if g == s.boxes - 1 - s.lead and j > 0:
                        self._hand_over(own, count - 1)
                for g in range(s.boxes - IN_FLIGHT, s.boxes):
                    self._give_back_key(own, first, g)
                yield own.p_empty[count % 2].over(count // 2 % 2 ^ 1)
                assert own.readers[count % 2] == 0, "P is overwritten while it is read"
                own.probabilities[count % 2] = count
                count += 1
            self._hand_over(own, count - 1)

    def values(self, rank: int, which: int) -> Waits:
        s, own = self.s, self.blocks[rank]
        stage, phase, given = 0, 0, 0
        for count in range(sum(self.tiles)):
            yield own.p_full[count % 2].over(count // 2)
            own.readers[count % 2] += 1
            for part in range(s.slices):
                yield own.value_full[which][stage].over(phase)
                assert own.probabilities[count % 2] == count
                assert own.values[which][stage] == [count * s.slices + part] * (s.widths[which] // 64)
                stage, phase = self._turn(stage, phase)
                if part > 0:
                    given = self._give_back_value(own, which, given)
            given = self._give_back_value(own, which, given)
            own.readers[count % 2] -= 1
            for _ in range(4):
                own.p_empty[count % 2].arrive()

    def _give_back_key(self, own: Block, first: int, g: int) -> None:
        own.keys[first + g] = None
        own.key_full[first + g].arrive(boxes=1)
        for _ in range(4):
            self.blocks[g % CLUSTER].key_empty[first + g].arrive()

    def _give_back_value(self, own: Block, which: int, stage: int) -> int:
        own.values[which][stage] = [None] * (self.s.widths[which] // 64)
        own.value_full[which][stage].arrive(boxes=self.s.widths[which] // 64)
        for block in self.blocks:
            for _ in range(4):
                block.value_empty[which][stage].arrive()
        return self._turn(stage, 0)[0]

    def _hand_over(self, own: Block, count: int) -> None:
        for _ in range(4):
            own.p_full[count % 2].arrive()

    def _turn(self, stage: int, phase: int) -> tuple[int, int]:
        return (0, phase ^ 1) if stage + 1 == self.s.value_stages else (stage + 1, phase)


def play(schedule: Schedule, tiles: list[int], draw: random.Random) -> None:
    """Events in a random order until all actors have finished; AssertionError if they cannot go on."""
    cluster = Cluster(schedule, tiles)
    waiting: dict[Waits, Callable[[], bool]] = {actor: lambda: True for actor in cluster.actors()}
    while waiting:
        ready = [actor for actor, passes in waiting.items() if passes()]
        if cluster.flying and (not ready or draw.random() < 0.5):
            cluster.flying.pop(draw.randrange(len(cluster.flying)))()
            continue
        assert ready, f"{len(waiting)} of 12 actors wait for each other"
        actor = draw.choice(ready)
        try:
            waiting[actor] = next(actor)
        except StopIteration:
            del waiting[actor]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@settings(max_examples=12, deadline=None)
@given(tiles=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_no_order_of_events_stops_a_cluster_or_spoils_its_memory(head_dim, tiles, seed):
    play(schedule_of(head_dim), tiles, random.Random(seed))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_schedule_is_one_that_the_kernel_can_follow(head_dim):
    schedule = schedule_of(head_dim)
    assert schedule.value_stages >= 2  # a slice is given back when the next has been taken
    assert min(schedule.widths) >= CLUSTER * 64  # each thread block fills a part of every slice, and none runs ahead
    assert schedule.boxes > max(IN_FLIGHT, schedule.lead)


def test_the_model_sees_a_schedule_that_waits_for_itself():
    short = dataclasses.replace(schedule_of(512), value_stages=1)  # given back only when the next has been taken
    with pytest.raises(AssertionError, match="wait for each other"):
        play(short, [3], random.Random(0))


def test_the_model_sees_memory_that_is_overwritten(monkeypatch):
    def early(self, own, which, stage):
        own.value_full[which][stage].arrive(boxes=self.s.widths[which] // 64)
        for block in self.blocks:  # tells that it is done with the slice, and is not
            for _ in range(4):
                block.value_empty[which][stage].arrive()
        return self._turn(stage, 0)[0]

    monkeypatch.setattr(Cluster, "_give_back_value", early)
    with pytest.raises(AssertionError, match="overwrites"):
        play(schedule_of(512), [8], random.Random(0))
