"""The table of backends: name -> the object with the verbs of `Implementation`, imported when first asked for.

The table sits below the dispatcher and the ops, which both look backends up by name, so that a compiled graph carries a
name and never an object. Importing this module imports no backend.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, cast

import torch

from ffpa_jit import plan_table, settings
from ffpa_jit.cache.store import KernelStore
from ffpa_jit.problem import AttentionParams, Problem, Refusal

__all__ = [
    "ALIASES",
    "Backward",
    "Forward",
    "Implementation",
    "VarlenBackward",
    "VarlenForward",
    "described",
    "get",
    "invalidate",
    "missing",
    "names",
    "replaced",
]


Forward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""(query, key, value, attn_mask, rng) -> (out, lse): out with the memory layout of `torch.empty_like(query)`, lse fp32,
natural logarithm, [B, Hq, Nq]; it may be None where it is not wanted."""

Backward = Callable[..., tuple[torch.Tensor | None, ...]]
"""(grad_out, grad_lse, query, key, value, attn_mask, rng, out, lse) -> the gradients of query, key, value and attn_mask
that are needed, as `torch.empty_like` of each, else None. `out` and `lse` may come from elsewhere, for example merged
over shards of the keys; rows whose lse is -inf get no gradient."""

VarlenForward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(query, key, value, cu_seqlens_q, cu_seqlens_k, rng, max_seqlen_q, max_seqlen_k) -> (out, lse) of sequences packed
into [T, H, D]; lse [Hq, Tq].

`cu_seqlens_*`: contiguous int32 [sequences + 1] on the device, never read by the host; rows that belong to no sequence
give out 0 and lse -inf. `max_seqlen_*`: no sequence is longer."""

VarlenBackward = Callable[..., tuple[torch.Tensor | None, ...]]
"""(grad_out, grad_lse, query, key, value, cu_seqlens_q, cu_seqlens_k, rng, out, lse, max_seqlen_q, max_seqlen_k) -> the
gradients of query, key and value that are needed."""


class Implementation(Protocol):
    """The verbs of a backend; tensors are [B, H, N, D] of one dtype on one device, and none is empty.

    `options` is the Backend object with the caller's options. `attn_mask` has four dimensions on that device, each of
    size 1 (or stride 0) where it broadcasts to [B, Hq, Nq, Nkv]: bool (True: the key is seen), the inputs' dtype, or
    fp32 (both added to the scores). `rng`, given when `dropout_p` > 0: two int64 words on that device which, with an
    element's index, determine whether it is dropped; forward and backward of one call get the same.

    Query r stands at the key p = r + Nkv - Nq and sees the keys from p - `window[0]` to p + `window[1]`, -1 for no
    limit, and none after p if `is_causal`. `softcap` > 0 makes softcap * tanh(score / softcap) of the scaled scores,
    before the mask is added. What a backend does not do it must refuse.
    """

    name: str

    def refusals(self, problem: Problem, options: Any, *, direction: str) -> list[Refusal]:
        """Why this backend does not run `problem` in `direction` ("forward" or "backward"); empty: it does."""
        ...

    def plan_forward(self, params: AttentionParams, options: Any, wants_lse: bool) -> Any:
        """What launches the forward of calls with these options, whatever their tensors: a `Forward`, or, for
        `params.varlen`, a `VarlenForward`. It keeps no tensor."""
        ...

    def plan_backward(self, params: AttentionParams, options: Any, needs: tuple[bool, ...]) -> Any:
        """The same for the gradients that `needs` asks for: a `Backward`, or a `VarlenBackward`."""
        ...

    store: KernelStore[Any, Any]
    """Where its compiled kernels come from."""

    def kernels(self, arch: str, head_dim: int, dtype: str, **options: Any) -> list[Any]:
        """The specs of what calls of a head dim and dtype ("bf16", "fp16") need on an architecture: what `warm` builds.

        `options`: those of its Backend object that choose kernels; other backends' are passed over. NoKernelError where
        it has no kernels, ValueError for an option that fits nothing.
        """
        ...

    def load(self, spec: Any, device: int) -> None:
        """Load one of `kernels` on a GPU here, so that its first call compiles and loads nothing."""
        ...

    def predict_us(self, problem: Problem) -> float:
        """About how many microseconds a call that this backend runs takes, launches and backward included."""
        ...


class _Package(NamedTuple):
    """A package that a backend needs. `module`: how it is imported; `distributions`: as what it may be installed;
    `remedy`: how to get it. `at_least`, `below`: the versions that fit, and `why`, to be told with them."""

    module: str
    distributions: tuple[str, ...]
    remedy: str
    at_least: tuple[int, ...] = ()
    below: tuple[int, ...] = ()
    why: str = ""


_TRITON = _Package(
    module="triton",
    distributions=("triton", "pytorch-triton", "pytorch-triton-rocm"),  # as torch's own builds are called
    remedy="pip install triton",
    at_least=(3, 5),  # before, it has no tensor descriptors (3.3), or none that all kernels compile with (3.4)
    why=" (it comes with torch 2.9)",
)

_CUTE = _Package(
    module="cutlass",
    distributions=("nvidia-cutlass-dsl",),
    remedy="pip install 'ffpa-jit[cute]'",
    at_least=(4, 6, 2),
    below=(5,),
)

# name -> (module that holds the object as BACKEND, what it needs)
_MODULES: dict[str, tuple[str, tuple[_Package, ...]]] = {
    "triton": ("ffpa_jit.triton.backend", (_TRITON,)),
    "cuda": ("ffpa_jit.cuda.backend", ()),
    "cutedsl": ("ffpa_jit.cute.backend", (_CUTE,)),
}

ALIASES = {"cute": "cutedsl"}
"""What commands and `warm` take for a name besides."""

_loaded: dict[str, Implementation] = {}
_absent: dict[str, Refusal] = {}


def _present(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False  # blocked, or half-imported: not usable either way


def _unfit(package: _Package) -> Refusal | None:
    """What is wrong with a package, if anything: it is not there, or its version does not fit."""
    if not _present(package.module):
        return Refusal("not-installed", f"{package.distributions[0]} is not installed: {package.remedy}")
    for distribution in package.distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
            wanted = ".".join(map(str, package.at_least))
            if numbers < package.at_least:
                reason = f"{distribution} {version} is too old, the kernels need {wanted}{package.why}"
                return Refusal("too-old", f"{reason}: {package.remedy}")
            if package.below and numbers >= package.below:
                reason = f"{distribution} {version} is too new, the kernels need one from {wanted} on and below "
                return Refusal("too-new", f"{reason}{'.'.join(map(str, package.below))}: {package.remedy}")
            return None
    return None


def missing(name: str) -> Refusal | None:
    """The refusal of a backend whose package is not installed; None when all is there, and the backend's module loaded.

    A package is looked for, not imported, and a backend's module imports it only when it launches. What is not there is
    looked for once, until `invalidate` is called. The other backends are loaded too: a compiler that traces sees the
    table as it was when it first looked.
    """
    for each in _MODULES:
        if each not in _loaded and each not in _absent:
            absent = _load(each)
            if absent is not None:
                _absent[each] = absent
    return None if name in _loaded else _absent.get(name)


def _load(name: str) -> Refusal | None:
    module, packages = _MODULES[name]
    for package in packages:
        unfit = _unfit(package)
        if unfit is not None:
            return unfit
    if name == "triton" and settings.interpreter() and not _present("numpy"):
        return Refusal("not-installed", "numpy is not installed, and Triton's interpreter needs it: pip install numpy")
    _loaded[name] = cast(Implementation, importlib.import_module(module).BACKEND)
    return None


def get(name: str) -> Implementation:
    """The implementation called `name`, loaded when needed; NotImplementedError if its package is not installed."""
    implementation = _loaded.get(name)
    if implementation is None:
        absent = missing(name)
        if absent is not None:
            raise NotImplementedError(absent.reason)
        implementation = _loaded[name]
    return implementation


def names() -> tuple[str, ...]:
    """The backends of the table."""
    return tuple(_MODULES)


def described(name: str) -> Implementation:
    """The implementation called `name`, whether what it needs is installed or not: to ask what it would compile."""
    return _loaded.get(name) or cast(Implementation, importlib.import_module(_MODULES[name][0]).BACKEND)


def invalidate() -> None:
    """Forget what was decided: a backend may refuse other calls than before, because it was replaced, or found what it
    had missed."""
    _absent.clear()
    plan_table.invalidate()


@contextlib.contextmanager
def replaced(name: str, implementation: Implementation) -> Iterator[None]:
    """Inside the block, `implementation` answers to `name`. For tests and for trying a backend of one's own, which may
    be derived from one of ours."""
    before = _loaded.get(name)
    _loaded[name] = implementation
    invalidate()
    try:
        yield
    finally:
        if before is None:
            del _loaded[name]
        else:
            _loaded[name] = before
        invalidate()


# A constant under torch.compile: what torch.compiler.assume_constant_result sets, without importing the compiler.
missing._dynamo_marked_constant = True  # type: ignore[attr-defined]
