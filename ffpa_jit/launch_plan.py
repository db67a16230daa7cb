"""`LaunchPlan`: a call's launches with everything known but addresses, and `Recorder`, which makes one of a call.

What a call launches depends on shapes, strides, dtypes and options. So the first call of a layout runs the host code of
its kernels, and a recorder beside it notes each launch: function handle, grid, packed parameters, and where in them the
address of an input, a result or the workspace stands. Later calls allocate their results and one block of workspace,
write the addresses, and go to the driver. A launch then costs the host about what the driver takes.

What is not a launch (a copy of an input that the kernels cannot address, a reduction in torch) is noted as a function
of tensors and called again in its place.

A plan holds no tensor. It may be used from several threads: a lock covers the parameters while they are written and
read.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ffpa_jit import context
from ffpa_jit.cuda.driver import driver

__all__ = ["LaunchPlan", "PackedLaunch", "Recorder"]

_ALIGN = 256  # of a tensor in the workspace, as torch's allocator aligns
_MAP_ALIGN = 64  # of a tensor map, and so of each launch's parameters

MOST_LAUNCHES = 96
"""A call of more launches is recorded no further: the GPU takes so long for it that the host does not matter."""


class PackedLaunch(NamedTuple):
    """One launch. `params`: its parameters as the driver reads them, each at one of `offsets`."""

    function: int
    grid: int
    block: int
    shared: int
    params: bytes
    offsets: tuple[int, ...]


class _Place(NamedTuple):
    """Where an address comes from: a slot (see `LaunchPlan`) and bytes from its beginning."""

    slot: int
    offset: int


class _Scratch(NamedTuple):
    """A tensor in the workspace, for functions of torch that read or write it."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Call(NamedTuple):
    """A function of torch. `produces`: its result is the next slot."""

    function: Callable[..., Any]
    arguments: tuple[int | _Scratch, ...]
    produces: bool


_Result = tuple[int, tuple[int, ...], torch.dtype | None]
"""A result: like the tensor in a slot, or (slot -1) contiguous of a shape and dtype."""


class Recorder:
    """Notes what one call does. `inputs`: its tensors, in the order in which the plan takes them.

    `empty_like` and `empty` make results, `scratch` what is needed in between, `call` and `produce` run a function of
    torch on tensors of these kinds, `launch` notes a launch that was made. Where something cannot be repeated for other
    tensors (`give_up`), `finish` returns None; `repeatable_inputs` says whether that is for the inputs' alignment.
    """

    def __init__(self, device: torch.device, inputs: Sequence[torch.Tensor | None]) -> None:
        self._device = device
        self._inputs = distinct(inputs)
        self._slots: dict[int, int] = {id(x): slot for slot, x in enumerate(self._inputs) if x is not None}
        self._held: list[torch.Tensor] = []  # so that no address and no id is used twice while the call is recorded
        self._results: list[_Result] = []
        self._produced: list[torch.Tensor] = []
        self._ranges: list[tuple[int, int, int, int]] = []  # begin, end, slot (-1: workspace), offset in the slot
        self._scratch: dict[int, _Scratch] = {}
        self._bytes = 0
        self._steps: list[tuple[PackedLaunch, tuple[tuple[int, _Place], ...]] | _Call] = []
        self.repeatable_inputs = not any(x is not None and x.data_ptr() % 16 for x in inputs)
        self._given_up = not self.repeatable_inputs

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors to run the call on: those that were given, each an object of its own, because later calls may
        have other tensors where this one has one twice."""
        return self._inputs

    def give_up(self) -> None:
        """Say that later calls cannot repeat this one."""
        self._given_up = True
        self._steps.clear()

    def empty_like(self, like: torch.Tensor) -> torch.Tensor:
        """A result laid out as `torch.empty_like(like)`, an input."""
        made = torch.empty_like(like)
        return self._result(made, (self._slots.get(id(like), -1), tuple(made.shape), None))

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous result."""
        shape = tuple(shape)
        return self._result(torch.empty(shape, dtype=dtype, device=self._device), (-1, shape, dtype))

    def _result(self, made: torch.Tensor, how: _Result) -> torch.Tensor:
        if self._produced or (how[0] < 0 and how[2] is None):
            self.give_up()  # slots are numbered results first
        self._hold(made, len(self._inputs) + len(self._results), 0)
        self._slots[id(made)] = len(self._inputs) + len(self._results)
        self._results.append(how)
        return made

    def view(self, view: torch.Tensor, of: torch.Tensor) -> None:
        """Say that `view` begins where `of` does."""
        slot = self._slots.get(id(of))
        if slot is None or view.data_ptr() != of.data_ptr():
            self.give_up()
        else:
            self._held.append(view)
            self._slots[id(view)] = slot

    def scratch(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor that nobody needs after the call."""
        shape = tuple(shape)
        made = torch.empty(shape, dtype=dtype, device=self._device)
        nbytes = made.numel() * made.element_size()
        self._hold(made, -1, self._bytes)
        self._scratch[id(made)] = _Scratch(self._bytes, nbytes, shape, dtype)
        self._bytes += -(-nbytes // _ALIGN) * _ALIGN
        return made

    def _hold(self, made: torch.Tensor, slot: int, offset: int) -> None:
        self._held.append(made)
        begin = made.data_ptr()
        self._ranges.append((begin, begin + made.untyped_storage().nbytes(), slot, offset))

    def call(self, function: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Call `function`, which writes into one of the tensors and keeps none."""
        function(*tensors)
        self._note(function, tensors, produces=False)

    def produce(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """What `function` returns: a new tensor, made of these."""
        made = function(*tensors)
        self._note(function, tensors, produces=True)
        slot = len(self._inputs) + len(self._results) + 1 + len(self._produced)
        self._produced.append(made)
        self._hold(made, slot, 0)
        self._slots[id(made)] = slot
        return made

    def _note(self, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], produces: bool) -> None:
        where: list[int | _Scratch] = []
        for tensor in tensors:
            found = self._slots.get(id(tensor), self._scratch.get(id(tensor)))
            if found is None:
                self.give_up()
                return
            where.append(found)
        if not self._given_up:
            self._steps.append(_Call(function, tuple(where), produces))

    def launch(self, packed: PackedLaunch, addresses: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Note a launch. `addresses`: at which bytes of its parameters the address of which tensor stands."""
        if self._given_up:
            return
        places = []
        for at, tensor in addresses:
            if not tensor.data_ptr():  # an empty tensor, whose address is 0 whichever it is
                continue
            place = self._place(tensor)
            if place is None:
                self.give_up()
                return
            places.append((at, place))
        self._steps.append((packed, tuple(places)))
        if len(self._steps) > MOST_LAUNCHES:
            self.give_up()

    def _place(self, tensor: torch.Tensor) -> _Place | None:
        slot = self._slots.get(id(tensor))
        if slot is not None:
            return _Place(slot, 0)
        address = tensor.data_ptr()
        for begin, end, slot, offset in self._ranges:
            if begin <= address < end:
                return _Place(slot, offset + address - begin)
        # A view of an input; the same address in two inputs does not tell which one it is of.
        alike = [slot for slot, x in enumerate(self._inputs) if x is not None and x.data_ptr() == address]
        return _Place(alike[0], 0) if len(alike) == 1 else None

    def finish(self, *results: torch.Tensor | None) -> LaunchPlan | None:
        """The plan of the call, which returns `results`; None where it cannot be repeated."""
        wanted = [None if x is None else self._slots.get(id(x), -1) for x in results]
        if self._given_up or -1 in wanted:
            return None
        workspace = len(self._inputs) + len(self._results)
        return LaunchPlan(
            self._device, len(self._inputs), self._results, self._bytes, _segments(self._steps, workspace), wanted
        )


def distinct(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The same tensors, each an object of its own."""
    seen: set[int] = set()
    made = []
    for x in tensors:
        made.append(x.view_as(x) if x is not None and id(x) in seen else x)
        seen.add(id(x))
    return tuple(made)


@functools.cache
def launcher() -> Callable[..., int]:
    """`cuLaunchKernel` without the conversion of arguments that declared types bring, which takes longer than the call:
    pointers are passed as `ctypes.c_void_p` or arrays, numbers as ints below 2^31."""
    driver()  # opens and initialises the library, or says why it cannot
    found: Callable[..., int] = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    return found


class _Segment(NamedTuple):
    """Functions of torch, then launches. `patches`: (word of the parameters, slot, offset); `launches`: the arguments
    of `cuLaunchKernel` but for the stream, and what keeps their memory."""

    calls: tuple[_Call, ...]
    words: memoryview
    patches: tuple[tuple[int, int, int], ...]
    launches: tuple[tuple[ctypes.c_void_p, int, int, int, Any], ...]


def _segments(
    steps: list[tuple[PackedLaunch, tuple[tuple[int, _Place], ...]] | _Call], workspace: int
) -> list[_Segment]:
    segments: list[_Segment] = []
    at = 0
    while at < len(steps):
        calls, launches = [], []
        while at < len(steps) and isinstance(steps[at], _Call):
            calls.append(steps[at])
            at += 1
        while at < len(steps) and not isinstance(steps[at], _Call):
            launches.append(steps[at])
            at += 1
        segments.append(_segment(calls, launches, workspace))  # type: ignore[arg-type]
    return segments


def _segment(
    calls: list[_Call], launches: list[tuple[PackedLaunch, tuple[tuple[int, _Place], ...]]], workspace: int
) -> _Segment:
    sizes = [-(-len(packed.params) // _MAP_ALIGN) * _MAP_ALIGN for packed, _ in launches]
    memory = (ctypes.c_uint64 * ((sum(sizes) + _MAP_ALIGN) // 8))()
    address = ctypes.addressof(memory)
    start = -address % _MAP_ALIGN
    patches, arguments = [], []
    for (packed, places), size in zip(launches, sizes, strict=True):
        ctypes.memmove(address + start, packed.params, len(packed.params))
        pointers = (ctypes.c_void_p * len(packed.offsets))(*(address + start + offset for offset in packed.offsets))
        arguments.append((ctypes.c_void_p(packed.function), packed.grid, packed.block, packed.shared, pointers))
        for at, (slot, offset) in places:
            patches.append(((start + at) // 8, workspace if slot < 0 else slot, offset))
        start += size
    words = memoryview(memory).cast("B").cast("Q")
    return _Segment(tuple(calls), words, tuple(patches), tuple(arguments))


class LaunchPlan:
    """A recorded call. Slots: its inputs, its results, the workspace, then what functions of torch produced."""

    __slots__ = ("_device", "_inputs", "_launch", "_lock", "_makers", "_segments", "_wanted", "_workspace")

    def __init__(
        self, device: torch.device, inputs: int, results: list[_Result], workspace: int, segments: list[_Segment],
        wanted: list[int | None],
    ) -> None:  # fmt: skip
        self._device, self._inputs, self._workspace = device, inputs, workspace
        self._makers, self._segments, self._wanted = tuple(results), tuple(segments), tuple(wanted)
        self._lock = threading.Lock()
        self._launch = launcher()

    def __call__(self, inputs: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None] | None:
        """The results for these inputs, on the current stream of the plan's device, which is the current one.

        None, and nothing was launched, where an input does not begin at a multiple of 16 bytes.
        """
        device = self._device
        tensors: list[Any] = [*inputs]
        addresses = []
        alignment = 0
        for x in inputs:
            address = 0 if x is None else x.data_ptr()
            alignment |= address
            addresses.append(address)
        if alignment % 16:
            return None
        for like, shape, dtype in self._makers:
            made = torch.empty_like(tensors[like]) if dtype is None else torch.empty(shape, dtype=dtype, device=device)
            tensors.append(made)
            addresses.append(made.data_ptr())
        workspace = torch.empty(self._workspace, dtype=torch.uint8, device=device) if self._workspace else None
        tensors.append(workspace)
        addresses.append(0 if workspace is None else workspace.data_ptr())
        stream = ctypes.c_void_p(context.stream(device.index))
        launch = self._launch
        with self._lock:
            for calls, words, patches, launches in self._segments:
                for function, arguments, produces in calls:
                    made = function(*[_tensor(x, tensors, workspace) for x in arguments])
                    if produces:
                        tensors.append(made)
                        addresses.append(made.data_ptr())
                for word, slot, offset in patches:
                    words[word] = addresses[slot] + offset
                for kernel, grid, block, shared, pointers in launches:
                    code = launch(kernel, grid, 1, 1, block, 1, 1, shared, stream, pointers, None)
                    if code:
                        raise driver().error(code, "launching a Triton kernel")
        return [None if slot is None else tensors[slot] for slot in self._wanted]


def _tensor(where: int | _Scratch, tensors: list[torch.Tensor], workspace: torch.Tensor | None) -> torch.Tensor:
    if isinstance(where, int):
        return tensors[where]
    assert workspace is not None or where.nbytes == 0
    if workspace is None:
        return torch.empty(where.shape, dtype=where.dtype, device=tensors[0].device)
    return workspace[where.offset : where.offset + where.nbytes].view(where.dtype).view(where.shape)
