"""Host side of a launch: operands as tensor descriptors, and launches without Triton's own launcher.

To launch, Triton looks at every argument and every global of a kernel to find what it compiled, then unpacks the
arguments one by one: 50 to 150 us of host time, more than many of these launches take on the device. `Launcher` does
both once. It finds a compiled kernel by what Triton specialises on, packs the parameters as the kernel's PTX declares
them, and calls the driver. With a `Recorder` the packed launches become a plan, which later calls launch with other
addresses.

Where parameters cannot be packed (AMD, the interpreter, a Triton whose kernels declare others than are known here),
Triton's launcher is used, and there is no plan.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ffpa_jit import context
from ffpa_jit.cuda import tensor_maps as maps
from ffpa_jit.cuda.driver import driver
from ffpa_jit.launch_plan import PackedLaunch, Recorder, launcher
from ffpa_jit.triton.params import Strided

Operand = Any
"""What ``operands.load_2d`` reads: a TMA descriptor, or a ``params.Strided``."""


def describable(t: torch.Tensor) -> bool:
    """Whether a [B, H, N, D] tensor can be read as it is: 16-byte rows, last stride 1, elsewhere 0 is fine."""
    if t.stride(-1) != 1 or t.data_ptr() % 16 != 0:
        return False
    lanes = 16 // t.element_size()
    return all(n == 1 or s % lanes == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True))


def bind(t: torch.Tensor, rows: int, cols: int, tma: bool) -> Operand | None:
    """A [B, H, N, D] tensor as an operand read in [rows, cols] tiles; None for a tile without columns."""
    if not cols:
        return None
    if not tma:
        b, h, n = (s // 8 if size > 1 else 0 for s, size in zip(t.stride()[:-1], t.shape[:-1], strict=True))
        return Strided(t, b, h, n)
    return describe(TensorDescriptor, t, (1, 1, rows, cols))


def bind_tiles(t: torch.Tensor, rows: int, cols: int, tma: bool) -> Any:
    """The workspace, a [slots * TILE, TILE] tensor, read or written in [rows, cols] parts."""
    return describe(TensorDescriptor, t, (rows, cols)) if tma else t


def describe(kind: Any, t: torch.Tensor, block: tuple[int, ...], *layout: Any) -> Any:
    """A descriptor of the class ``kind``, read a ``block`` at a time.

    Its checks take 10 us, of a call that may take 100: they are made for the first tensor with such a block; what
    depends on the tensor, ``Launcher.operand`` has seen to.
    """
    # The stride of a dimension of one element is arbitrary in torch, but a descriptor wants a legal one.
    strides = [s if n > 1 else t.shape[-1] for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)] + [1]
    key = kind, t.dtype, block
    rest = _checked.get(key)
    if rest is None:
        made = kind(t, list(t.shape), strides, list(block), *layout)
        _checked[key] = {k: v for k, v in vars(made).items() if k not in ("base", "shape", "strides")}
        return made
    made = object.__new__(kind)
    vars(made).update(rest, base=t, shape=list(t.shape), strides=strides)
    return made


_checked: dict[tuple[Any, ...], dict[str, Any]] = {}


class Launcher:
    """Launches the kernels of one call, and makes the memory that they share.

    ``recorder``: notes all of it, where the call is to become a plan. Between the launches of a call's blocks only
    integers change that no kernel is specialised on, so what the first one found serves the others.
    """

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        self.device = device
        self._recorder = recorder
        self._known: dict[tuple[Any, ...], _Compiled] = {}

    @property
    def records(self) -> bool:
        """Whether the call is to become a plan."""
        return self._recorder is not None

    def share(self, found: dict[Any, Any]) -> None:
        """Use, and add to, what other calls found that differ in their tensors only."""
        self._known = found

    def step(self, kernel: Any, **constants: Any) -> Step | None:
        """The launches of a kernel that was found; None if it was not, or its parameters are not understood."""
        compiled = self._known.get((id(kernel), *constants, *constants.values()))
        return None if compiled is None or compiled.layout is None else Step(compiled)

    def operand(self, t: torch.Tensor) -> torch.Tensor:
        """``t``, or a dense copy of it (O(B H N D)) where its strides cannot be described."""
        return t if describable(t) else self.produce(_dense, t)

    def contiguous(self, t: torch.Tensor) -> torch.Tensor:
        """``t``, or a contiguous copy of it."""
        return t if t.is_contiguous() else self.produce(_dense, t)

    def result_like(self, t: torch.Tensor) -> torch.Tensor:
        """Memory for a result, laid out as ``torch.empty_like`` of an input."""
        return torch.empty_like(t) if self._recorder is None else self._recorder.empty_like(t)

    def result(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous memory for a result."""
        if self._recorder is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self._recorder.empty(shape, dtype)

    def scratch(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous memory of the workspace."""
        if self._recorder is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self._recorder.scratch(shape, dtype)

    def give_up(self) -> None:
        """Say that the call is no plan for others."""
        if self._recorder is not None:
            self._recorder.give_up()

    def view(self, view: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """``view``, which begins where a tensor of the call does."""
        if self._recorder is not None:
            self._recorder.view(view, of)
        return view

    def call(self, function: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Call a function of torch that writes into one of the tensors."""
        if self._recorder is None:
            function(*tensors)
        else:
            self._recorder.call(function, *tensors)

    def produce(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """What a function of torch makes of tensors."""
        return function(*tensors) if self._recorder is None else self._recorder.produce(function, *tensors)

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        """Launch ``kernel`` on a grid of ``programs``. ``constants``: its constexpr arguments, and options."""
        if not programs:
            return
        key = (id(kernel), *constants, *constants.values())
        compiled = self._known.get(key)
        if compiled is None:
            compiled = _find(self.device, kernel, key, arguments)
            if compiled is None:
                compiled = self._first(kernel, key, programs, arguments, constants)
                if compiled is None:
                    return
                self._note(compiled, programs, arguments)
                return
            self._known[key] = compiled
        packed = self._note(compiled, programs, arguments)
        if packed is None:
            compiled.kernel[(programs, 1, 1)](*arguments, *compiled.constants)
        else:
            _launch(self.device, packed)

    def _first(
        self, kernel: Any, key: tuple[Any, ...], programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> _Compiled | None:
        """Launch by way of Triton, which compiles; None where nothing compiled is there to be launched again: the
        interpreter has no compiled kernels, and for tensors of "meta" (``offline``) nothing is launched."""
        made = kernel[(programs,)](*arguments, **constants)
        if made is None or self.device.type != "cuda":
            self.give_up()
            return None
        # A compiled kernel takes the constants, too, by position.
        rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        compiled = self._known[key] = _Compiled(kernel, made, rest, _layout(made))
        if _marks_are_known():
            _everywhere[_marks(self.device, key, arguments)] = compiled
        return compiled

    def _note(self, compiled: _Compiled, programs: int, arguments: tuple[Any, ...]) -> PackedLaunch | None:
        """The launch with its parameters, given to the recorder; None where they cannot be packed."""
        layout = compiled.layout
        if layout is None:
            self.give_up()
            return None
        params, addresses = layout.pack(arguments)
        packed = PackedLaunch(layout.function, programs, layout.block, layout.shared, params, layout.offsets)
        if self._recorder is not None:
            self._recorder.launch(packed, addresses)
        return packed


class Step:
    """The launches of one kernel with arguments of the same kinds in the same order, given leaf by leaf: for calls that
    are never the same twice, so that no plan serves them.

    A leaf is a tensor's address, a number, or (`map_values`) a descriptor's values; those of arguments that are no
    parameters of the compiled kernel are passed over.
    """

    def __init__(self, compiled: _Compiled) -> None:
        layout = compiled.layout
        assert layout is not None
        keep: list[int] = []
        at = 0
        boxes = iter(layout.boxes)
        self.boxes = layout.boxes
        for kind in layout.kinds:
            width = 1 + 2 * len(next(boxes)[1]) if kind == _MAP else 1
            if kind != _SKIPPED:
                keep += range(at, at + width)
            at += width
        self._layout, self._keep = layout, keep

    def launch(self, device: torch.device, programs: int, leaves: list[Any]) -> None:
        """Launch on a grid of `programs`."""
        layout = self._layout
        params = layout.format.pack(*[leaves[at] for at in self._keep])
        _launch(device, PackedLaunch(layout.function, programs, layout.block, layout.shared, params, layout.offsets))


def map_values(x: torch.Tensor, swizzle: int, box: tuple[int, ...]) -> list[Any]:
    """The values of a descriptor of a [B, H, N, D] tensor, as a kernel takes them."""
    b, h, n, d = x.shape
    strides = x.stride()
    shown = (strides[0] if b > 1 else d, strides[1] if h > 1 else d, strides[2] if n > 1 else d, 1)
    encoded = maps.encode(
        x.data_ptr(), _MAP_KINDS[x.dtype], (d, n, h, b), shown[2::-1], box[::-1], swizzle=swizzle,
        promotion=_PROMOTE_128B,
    )  # fmt: skip
    return [encoded, b, h, n, d, *shown]


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)``, for ``Launcher.call``."""
    target.copy_(source)


def _launch(device: torch.device, packed: PackedLaunch) -> None:
    function, grid, block, shared, params, offsets = packed
    memory = ctypes.create_string_buffer(params, len(params))
    address = ctypes.addressof(memory)
    pointers = (ctypes.c_void_p * len(offsets))(*[address + offset for offset in offsets])
    stream = ctypes.c_void_p(context.stream(device.index))
    code = launcher()(ctypes.c_void_p(function), grid, 1, 1, block, 1, 1, shared, stream, pointers, None)
    if code:
        raise driver().error(code, "launching a Triton kernel")


class _Compiled(NamedTuple):
    """A kernel (held, because its id is a key), what it was compiled to, the constants to launch that with through
    Triton, and its parameters, if they are understood."""

    function: Any
    kernel: Any
    constants: tuple[Any, ...]
    layout: _Layout | None


_everywhere: dict[Any, _Compiled] = {}
"""What any call has found, by what Triton specialises a kernel on."""


def _find(device: torch.device, kernel: Any, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> _Compiled | None:
    if device.type != "cuda" or not _marks_are_known():
        return None
    return _everywhere.get(_marks(device, key, arguments))


def _marks(device: torch.device, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return key, device.index, *map(mark, arguments)


def mark(x: Any) -> Any:
    """All that Triton (3.5 to 3.9) may compile a kernel for, of an argument, as if it specialised on every one."""
    kind = type(x)
    if kind is int:
        return (x == 1) + 2 * (x % 16 == 0) + 4 * (-(2**31) <= x < 2**31)
    if x is None or kind is float or kind is bool:
        return kind
    if isinstance(x, tuple):
        return tuple(map(mark, x))
    if isinstance(x, torch.Tensor):
        # On AMD, also on whether offsets fit 32 bits.
        small = torch.version.hip is not None and x.untyped_storage().nbytes() < 2**31
        return x.dtype, x.data_ptr() % 16 == 0, small
    return kind, x.base.dtype, tuple(x.block_shape)


@cache
def _marks_are_known() -> bool:
    return triton_is_between((3, 5), (3, 9))


def triton_is_between(first: tuple[int, int], last: tuple[int, int]) -> bool:
    """Whether this Triton is one of the minor versions ``first`` to ``last``."""
    import triton

    version = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])
    return first <= version <= last


# Parameters, as Triton orders them: those of the signature without constants, a descriptor as a tensor map, its sizes
# and its strides, then pointers to scratch memory, which these kernels do not use.

_SKIPPED, _VALUE, _POINTER, _MAP = range(4)

_CODES = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_SIZES = {"b": 1, "h": 2, "i": 4, "q": 8, "f": 4, "d": 8}
_PTX_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([bufs])(8|16|32|64)\b[^,\[)]*(?:\[(\d+)\])?")


class _Layout(NamedTuple):
    """How the parameters of a compiled kernel lie in memory. `kinds`: of the arguments' leaves; `boxes`: swizzle and
    box of its tensor maps; `addresses`: where an address stands, by leaf."""

    function: int
    block: int
    shared: int
    format: struct.Struct
    offsets: tuple[int, ...]
    kinds: tuple[int, ...]
    boxes: tuple[tuple[int, tuple[int, ...]], ...]
    addresses: tuple[int, ...]

    def pack(self, arguments: tuple[Any, ...]) -> tuple[bytes, list[tuple[int, torch.Tensor]]]:
        """The parameters for these arguments, and where in them the address of which tensor stands."""
        values: list[Any] = []
        addresses: list[tuple[int, torch.Tensor]] = []
        places, boxes = iter(self.addresses), iter(self.boxes)
        leaves: list[Any] = []
        _flatten(arguments, leaves)
        for kind, x in zip(self.kinds, leaves, strict=False):
            if kind == _VALUE:
                values.append(x)
            elif kind == _POINTER:
                at = next(places)
                if x is None:
                    values.append(0)
                else:
                    values.append(x.data_ptr())
                    addresses.append((at, x))
            elif kind == _MAP:
                addresses.append((next(places), x.base))
                values += (_tensor_map(x, *next(boxes)), *x.shape, *x.strides)
        return self.format.pack(*values), addresses


def _flatten(x: Iterable[Any], leaves: list[Any]) -> None:
    for each in x:
        if isinstance(each, tuple):
            _flatten(each, leaves)
        else:
            leaves.append(each)


def _layout(kernel: Any) -> _Layout | None:
    """The parameters of a compiled kernel; None where its PTX declares others, or they cannot be replaced."""
    if torch.version.hip is not None or "ptx" not in kernel.asm:
        return None
    found = parameters(kernel)
    if found is None or (found.boxes and not maps.address_is_first()):
        return None
    kernel._init_handles()
    return found._replace(function=kernel.function)


def parameters(kernel: Any) -> _Layout | None:
    """`_layout` of a kernel that is not loaded."""
    meta = kernel.metadata
    unusual = ("launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")
    if any(getattr(meta, name, 0) for name in unusual) or getattr(meta, "num_ctas", 1) != 1:
        return None
    described = iter(getattr(meta, "tensordesc_meta", None) or ())
    kinds, codes, boxes = [], [], []
    leaves: list[Any] = []
    _flatten(kernel.src.signature.values(), leaves)
    for leaf in leaves:
        if leaf == "constexpr":
            kinds.append(_SKIPPED)
        elif leaf.startswith("*"):
            kinds.append(_POINTER)
            codes.append("Q")
        elif leaf.startswith("tensordesc"):
            of_map = next(described, None)
            if of_map is None or of_map["fp4_padded"]:
                return None
            kinds.append(_MAP)
            boxes.append((of_map["swizzle"], tuple(of_map["block_size"])))
            rank = len(of_map["block_size"])
            codes += ["128s", *"i" * rank, *"q" * rank]
        elif leaf in _CODES:
            kinds.append(_VALUE)
            codes.append(_CODES[leaf])
        else:
            return None
    declared = _declared(kernel.asm["ptx"])
    sizes = [maps.BYTES if code == "128s" else _SIZES[code.lower()] for code in codes]
    if declared[: len(sizes)] != sizes or declared[len(sizes) :] not in ([], [8], [8, 8]):
        return None
    offsets, text = _offsets(codes, len(declared) - len(sizes))
    addresses = tuple(offset for offset, code in zip(offsets, codes, strict=False) if code in ("Q", "128s"))
    return _Layout(
        0, 32 * meta.num_warps, meta.shared, struct.Struct(text), offsets, tuple(kinds), tuple(boxes), addresses
    )


def _offsets(codes: list[str], scratch: int) -> tuple[tuple[int, ...], str]:
    """Where each parameter lies, aligned to its size, and the whole as a format of `struct`."""
    at, offsets, text = 0, [], "="
    for code in [*codes, *["8x"] * scratch]:
        size = maps.BYTES if code == "128s" else 8 if code == "8x" else _SIZES[code.lower()]
        gap = -at % (maps.ALIGN if code == "128s" else size)
        text += f"{gap}x{code}" if gap else code
        offsets.append(at + gap)
        at += gap + size
    return tuple(offsets), text


def _declared(ptx: str) -> list[int]:
    """The sizes in bytes of the parameters of the entry in a PTX text."""
    begin = ptx.index("(", ptx.index(".entry "))
    text = ptx[begin : ptx.index(")", begin)]
    return [int(count) if count else _PTX_SIZES[bits] for _, bits, count in _PARAMETER.findall(text)]


_MAP_KINDS = {torch.float16: maps.FLOAT16, torch.bfloat16: maps.BFLOAT16, torch.float32: maps.FLOAT32}
_PROMOTE_128B = 2  # as Triton's own launcher asks for


def _tensor_map(x: Any, swizzle: int, box: tuple[int, ...]) -> bytes:
    """The tensor map of a descriptor. `box`: what one copy brings, which may be smaller than a block.

    Maps of tensors of one layout differ in the address alone, so they are kept without it."""
    base = x.base
    key = base.dtype, swizzle, box, *x.shape, *x.strides
    found = _tensor_maps.get(key)
    if found is None:
        if len(_tensor_maps) >= _MOST_MAPS:
            _tensor_maps.clear()
        found = _tensor_maps[key] = maps.encode(
            base.data_ptr(), _MAP_KINDS[base.dtype], x.shape[::-1], x.strides[-2::-1], box[::-1], swizzle=swizzle,
            promotion=_PROMOTE_128B,
        )  # fmt: skip
    return maps.with_address(found, base.data_ptr())


_tensor_maps: dict[Any, bytes] = {}
_MOST_MAPS = 1024


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of the device; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
