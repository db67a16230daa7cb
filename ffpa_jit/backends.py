"""The backend objects: which implementation runs which direction, and its options.

They hold options only and never touch a device, so building one is always safe. All are frozen and hashable; a wrong
value is an error when the object is built, not when the call runs.

A side is chosen with strings (`"triton"`, `"cuda"`, `"cutedsl"`, `"sdpa"`) or with these objects. The operators carry
them as text, which `encode` writes and `decode` reads: a compiled or exported graph then holds plain strings.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

import torch

__all__ = [
    "FORWARD_ONLY",
    "NAMES",
    "Backend",
    "CUDABackend",
    "CuTeDSLBackend",
    "SDPABackend",
    "TritonBackend",
    "decode",
    "encode",
    "resolve",
    "side",
]

NAMES = ("triton", "cuda", "cutedsl", "sdpa")

FORWARD_ONLY = {"cuda": "CUDA", "cutedsl": "CuTe-DSL"}
"""The backends without a backward, as messages call them."""

_STORAGE_DTYPES: dict[Any, torch.dtype | None] = {
    None: None,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    torch.float16: torch.float16,
    torch.float32: torch.float32,
}


def _require_bool(owner: object, field: str, value: object, *, optional: bool = False) -> None:
    if isinstance(value, bool) or (optional and value is None):
        return
    allowed = "True, False or None" if optional else "True or False"
    raise TypeError(f"{type(owner).__name__}({field}={value!r}): {field} must be {allowed}")


def _storage_dtype(owner: object, field: str, value: object) -> torch.dtype | None:
    """`value` as a dtype or None; ValueError for anything that is not fp16 or fp32."""
    try:
        return _STORAGE_DTYPES[value]
    except (KeyError, TypeError):
        raise ValueError(
            f"{type(owner).__name__}({field}={value!r}): {field} must be None, torch.float16, torch.float32, "
            "'fp16' or 'fp32'"
        ) from None


@dataclass(frozen=True)
class Backend:
    """A backend by name, and which directions this object chooses it for.

    `name`: one of `"triton"`, `"cuda"`, `"cutedsl"`, `"sdpa"`.
    `forward`, `backward`: whether the object stands for that direction. Both None means both; if exactly one is given,
    the other is its negation (`TritonBackend(forward=True)` is a forward-only choice). Both False is a ValueError.

    After construction `forward` and `backward` are plain booleans. `Backend("triton")` means `TritonBackend()`.
    """

    name: str
    forward: bool | None = None
    backward: bool | None = None

    _text: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"{type(self).__name__}(name={self.name!r}): name must be a string, one of {_listed()}")
        own = getattr(type(self), "_own_name", None)
        if own is not None and self.name != own:
            raise ValueError(f"{type(self).__name__}(name={self.name!r}): this class is the {own!r} backend; omit name")
        if self.name not in NAMES:
            raise ValueError(f"Backend(name={self.name!r}): unknown backend; choose one of {_listed()}")
        _require_bool(self, "forward", self.forward, optional=True)
        _require_bool(self, "backward", self.backward, optional=True)
        forward, backward = self.forward, self.backward
        if forward is None and backward is None:
            forward, backward = self._both_unset()
        elif forward is None:
            forward = not backward
        elif backward is None:
            backward = not forward
        if not (forward or backward):
            raise ValueError(
                f"{type(self).__name__}(forward=False, backward=False) chooses nothing; set one of them to True"
            )
        self._set("forward", forward)
        self._set("backward", backward)
        self._check()
        self._set("_text", _written(self))

    def _check(self) -> None:
        """Judge and normalise the options, `forward` and `backward` being settled."""

    def _both_unset(self) -> tuple[bool, bool]:
        """The sides an object stands for when it names none: those its backend has."""
        return (True, False) if self.name in FORWARD_ONLY else (True, True)

    def unfit(self, dtype: torch.dtype) -> str | None:
        """Why these options cannot go with inputs of `dtype`, on any device; None: they can."""
        return None

    def _set(self, field: str, value: object) -> None:
        # The dataclass is frozen for its users; __post_init__ still has to store the normalised value.
        object.__setattr__(self, field, value)


@dataclass(frozen=True)
class SDPABackend(Backend):
    """PyTorch's own `scaled_dot_product_attention`.

    As a forward choice the whole call goes to SDPA (causal masks stay bottom-right). As a backward choice after another
    forward, the gradients come from running SDPA again on the saved inputs.

    `high_precision_grad`: accepted for compatibility. The recomputed SDPA already accumulates in fp32 and rounds every
    gradient once, so there is no second precision to select.
    """

    name: str = "sdpa"
    high_precision_grad: bool = False

    _own_name = "sdpa"

    def _check(self) -> None:
        _require_bool(self, "high_precision_grad", self.high_precision_grad)


@dataclass(frozen=True)
class TritonBackend(Backend):
    """The two-phase Triton kernels, forward and backward; the default where they run.

    `autotune`: reserved for measuring configurations on this device before the call runs. In this release shipped
        configurations, chosen by architecture, head dim and dtype, are used whatever its value.
    `autotune_mode`: how wide such a search is, `"fast"` or `"max"`.
    `enable_tma`: accepted; the kernels decide by themselves where the hardware's tensor copy engine pays.
    `enable_ws`: accepted; warp specialisation is a property of a shipped configuration, not of a call.
    `persist_dkdv`: accepted; dK and dV are always accumulated in fp32 in registers, over all queries, before one
        rounding.
    `split_launch`: accepted; the backward always computes dQ and dK/dV in separate launches over stored tiles.
    `preprocess_d_chunk`: accepted; the row sums of dO·O read D in pieces that fit registers at every head dim.
    `workspace_mb`: most device memory, in MiB, that one call may use beside its outputs; None is what the environment
        variable `FFPA_JIT_WORKSPACE_MB` says. 0 takes fused kernels that need none: slower, never less exact. Packed
        sequences need some.
    `merged`: (out, lse) of a backward may come from more keys than the call has, as where shards of the keys were
        merged. `ffpa_attn_backward` sets it; the rows of dS are then not held to sum to dlse.
    `grad_kv_storage_dtype`, `grad_q_storage_dtype`: None, `torch.float16`, `torch.float32`, `"fp16"` or `"fp32"`;
        accepted. Gradients are accumulated in fp32 and rounded once to the input's dtype, so no lower-precision partial
        result exists that a wider storage could protect.
    """

    name: str = "triton"
    autotune: bool = False
    autotune_mode: str = "fast"
    enable_tma: bool = False
    enable_ws: bool = False
    persist_dkdv: bool = False
    split_launch: bool = False
    preprocess_d_chunk: bool = False
    grad_kv_storage_dtype: torch.dtype | str | None = None
    grad_q_storage_dtype: torch.dtype | str | None = None
    workspace_mb: float | None = None
    merged: bool = False

    _own_name = "triton"

    def _check(self) -> None:
        flags = ("autotune", "enable_tma", "enable_ws", "persist_dkdv", "split_launch", "preprocess_d_chunk", "merged")
        for field in flags:
            _require_bool(self, field, getattr(self, field))
        if self.autotune_mode not in ("fast", "max"):
            raise ValueError(f"TritonBackend(autotune_mode={self.autotune_mode!r}): choose 'fast' or 'max'")
        for field in ("grad_kv_storage_dtype", "grad_q_storage_dtype"):
            self._set(field, _storage_dtype(self, field, getattr(self, field)))
        self._set("workspace_mb", _megabytes(self.workspace_mb))


def _megabytes(value: object) -> float | None:
    """`workspace_mb` as an int where it is one, else a float or None: equal caps are then written alike."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"TritonBackend(workspace_mb={value!r}): workspace_mb must be a number of MiB or None")
    if not 0 <= value < 1 << 30:
        raise ValueError(f"TritonBackend(workspace_mb={value!r}): choose a number of MiB from 0 on, or None")
    return int(value) if value == int(value) else float(value)


@dataclass(frozen=True)
class CUDABackend(Backend):
    """Hand-written CUDA kernels, forward only, with masks and dropout; compiled on first use, once a machine.

    As `backend=CUDABackend()` (or `backend="cuda"`) it takes the forward; who computes the gradients is chosen as ever:
    Triton where it runs the call, else SDPA, run again on the saved inputs.

    `acc`: the accumulator of the matrix products, `"f32"` or `"f16"`. `"f16"` is faster on some GPUs, loses accuracy
        with the head dim, and is for fp16 inputs: with bf16 the call is a ValueError.
    `stages`: depth of the copy pipeline, 1 to 4; None lets the architecture decide.
    """

    name: str = "cuda"
    acc: str = "f32"
    stages: int | None = None

    _own_name = "cuda"

    def _check(self) -> None:
        if self.backward:
            raise ValueError("CUDABackend has a forward only; drop backward=True and set backward_backend='triton'")
        if self.acc not in ("f32", "f16"):
            raise ValueError(f"CUDABackend(acc={self.acc!r}): choose 'f32' or 'f16'")
        if self.stages is not None:
            if isinstance(self.stages, bool) or not isinstance(self.stages, int):
                raise TypeError(f"CUDABackend(stages={self.stages!r}): stages must be an int from 1 to 4, or None")
            if not 1 <= self.stages <= 4:
                raise ValueError(f"CUDABackend(stages={self.stages}): stages must be from 1 to 4, or None")

    def unfit(self, dtype: torch.dtype) -> str | None:
        if self.acc == "f16" and dtype != torch.float16:
            return f"CUDABackend(acc='f16') needs float16 inputs, and these are {dtype}; use acc='f32', or cast them"
        return None


@dataclass(frozen=True)
class CuTeDSLBackend(Backend):
    """Kernels in NVIDIA's CuTe DSL, forward only, for sm_90 (H100, H200) and head dims up to 640: the fastest there,
    without workspace. They need the extra `ffpa-jit[cute]` and are compiled on first use, once a machine.

    As `backend=CuTeDSLBackend()` (or `backend="cutedsl"`) it takes the forward; who computes the gradients is chosen as
    ever: Triton where it runs the call, else SDPA, run again on the saved inputs.

    `grad_kv_storage_dtype`: None, `torch.float16`, `torch.float32`, `"fp16"` or `"fp32"`; accepted. Whoever computes dK
        and dV accumulates them in fp32 and rounds them once, so there is no intermediate buffer to widen.
    """

    name: str = "cutedsl"
    grad_kv_storage_dtype: torch.dtype | str | None = None

    _own_name = "cutedsl"

    def _check(self) -> None:
        if self.backward:
            raise ValueError("CuTeDSLBackend has a forward only; drop backward=True and set backward_backend='triton'")
        self._set("grad_kv_storage_dtype", _storage_dtype(self, "grad_kv_storage_dtype", self.grad_kv_storage_dtype))


_DTYPE_TEXTS: dict[object, str] = {torch.float16: "fp16", torch.float32: "fp32"}


def _options(backend: Backend) -> list[Field[Any]]:
    return [field for field in fields(backend) if field.name not in ("name", "forward", "backward")]


def _written(backend: Backend) -> str:
    """What `encode` gives. Written when the object is built: a compiler that traces may see its numbers as symbols."""
    text = backend.name
    for option in _options(backend):
        value = getattr(backend, option.name)
        if value != option.default:
            text += f";{option.name}={_DTYPE_TEXTS[value] if isinstance(value, torch.dtype) else value}"
    return text


def _listed() -> str:
    return ", ".join(repr(name) for name in NAMES)


# One default object a name: a string never builds anything, also not while torch.compile traces.
DEFAULTS: dict[str, Backend] = {
    "triton": TritonBackend(),
    "cuda": CUDABackend(),
    "cutedsl": CuTeDSLBackend(),
    "sdpa": SDPABackend(),
}
_CLASSES: dict[str, Callable[..., Backend]] = {name: type(instance) for name, instance in DEFAULTS.items()}

# What of an object `encode` writes: every option, and not which directions the object was chosen for.
_OPTIONS = {name: tuple(field.name for field in _options(instance)) for name, instance in DEFAULTS.items()}
_VALUES: dict[str, object] = {"True": True, "False": False, "None": None}


def encode(backend: Backend) -> str:
    """`backend` as text: its name, then the options that are not the default ones: `"cuda;acc=f16;stages=2"`."""
    return backend._text


def _number(text: str) -> float | str:
    """`text` as the int or float that it writes, else itself."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


@functools.cache
def decode(text: str) -> Backend:
    """The backend object that `encode` wrote as `text`, with its options; ValueError or TypeError for other text."""
    name, *pairs = text.split(";")
    if name not in DEFAULTS:
        raise ValueError(f"{text!r}: unknown backend; choose one of {_listed()}")
    if not pairs:
        return DEFAULTS[name]
    options: dict[str, object] = {}
    for pair in pairs:
        option, _, value = pair.partition("=")
        if option not in _OPTIONS[name]:
            raise ValueError(f"{text!r}: {name!r} has no option {option!r}; choose from {', '.join(_OPTIONS[name])}")
        options[option] = _VALUES[value] if value in _VALUES else _number(value)
    return _CLASSES[name](**options)


def _as_backend(argument: str, value: object) -> Backend | None:
    """`value`, given as `argument=`, as a concrete backend object; None stays None."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in DEFAULTS:
            raise ValueError(f"{argument}={value!r}: unknown backend; choose one of {_listed()}")
        return DEFAULTS[value]
    if not isinstance(value, Backend):
        raise TypeError(
            f"{argument} must be one of {_listed()}, a Backend object or None, got {type(value).__name__}: {value!r}"
        )
    if type(value) is Backend:
        return _CLASSES[value.name](forward=value.forward, backward=value.backward)
    return value


def side(argument: str, direction: str, value: object) -> Backend | None:
    """`value`, given as `argument=`, as the backend of one direction; errors as in `resolve`."""
    chosen = _as_backend(argument, value)
    if chosen is None or getattr(chosen, direction):
        return chosen
    other = "backward" if direction == "forward" else "forward"
    if chosen.name in FORWARD_ONLY:
        title = FORWARD_ONLY[chosen.name]
        raise ValueError(f"{argument}={value!r}: the {title} backend has a forward only; choose 'triton' or 'sdpa'")
    raise ValueError(
        f"{argument}={value!r} is set up for the {other} only; build it with {direction}=True, or pass it as "
        f"{other}_backend"
    )


def resolve(
    backend: str | Backend | None,
    forward_backend: str | Backend | None,
    backward_backend: str | Backend | None,
) -> tuple[Backend | None, Backend | None]:
    """The backends that the caller named for (forward, backward); None where the dispatcher may choose.

    `backend` fills the sides it stands for; an explicit side wins over it. `backend="cuda"` and `"cutedsl"` leave the
    backward, which they do not have, to the dispatcher.

    Errors: ValueError for an unknown name or an object given for a side it does not have, TypeError for anything that
    is neither a string nor a Backend.
    """
    both = _as_backend("backend", backend)
    forward = side("forward_backend", "forward", forward_backend)
    backward = side("backward_backend", "backward", backward_backend)
    if both is not None:
        if forward is None and both.forward:
            forward = both
        if backward is None and both.backward:
            backward = both
    return forward, backward
