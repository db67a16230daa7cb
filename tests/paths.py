"""The ways a call takes: one table of dense calls, for which shapes, options, backends and strides cross.

A path is stated once and run with any tensors of its shape: through the public function, or through the operator, which
a dispatch mode makes visible. Results are compared bit for bit, or held to the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ffpa_jit import TritonBackend, explain, ffpa_attn_func
from tests import oracle, philox
from tests.cases.options import drawn
from tests.cases.shapes import MaskKind, Shape, make, make_mask

Results = dict[str, Tensor]

NAMES = ("q", "k", "v", "m")


class Operators(TorchDispatchMode):
    """Inside, no call skips the dispatcher; `names` are the operators of this package that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "ffpa_jit" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Path:
    """A dense call. `needs`: letters of q, k, v and m, whose gradients it computes; "" for the forward alone."""

    name: str
    shape: Shape
    mask: MaskKind | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    dropout_p: float = 0.0
    backend: Any = None
    needs: str = ""

    def __str__(self) -> str:
        return self.name

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the public function, but for the mask, the scale and `return_lse`."""
        given = {
            "dropout_p": self.dropout_p, "is_causal": self.shape.is_causal, "enable_gqa": self.shape.enable_gqa,
            "window_size": self.window, "softcap": self.softcap, "backend": self.backend,
        }  # fmt: skip
        return given

    def inputs(
        self, dtype: torch.dtype, device: str, *, layout: str = "contiguous", seed: int = 0
    ) -> dict[str, Tensor | None]:
        """q, k, v, m and the output's gradient, do."""
        q, k, v, do = make(self.shape, dtype, device, layout=layout, seed=seed)
        if self.mask == PADDING:
            mask = padding(self.shape, device)
        else:
            mask = None if self.mask is None else make_mask(self.mask, self.shape, dtype, device, seed=seed)
        return {"q": q, "k": k, "v": v, "m": mask, "do": do}

    def needing(self, inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The same views, those that need a gradient as leaves."""
        return {
            name: x.detach().requires_grad_() if x is not None and name in self.needs and x.is_floating_point() else x
            for name, x in inputs.items()
        }

    def step(
        self,
        inputs: dict[str, Tensor | None],
        *,
        scale: float | None = None,
        return_lse: bool = True,
        call: Callable[..., Any] = ffpa_attn_func,
    ) -> Results:
        """Output, log-sum-exp and the gradients that are needed."""
        given = self.needing(inputs)
        q, k, v, mask = (given[name] for name in NAMES)
        options = self.options() | ({"return_lse": True} if return_lse else {})
        result = call(q, k, v, mask, scale=scale, **options)
        out, lse = result if return_lse else (result, None)
        results = {"out": out} | ({} if lse is None else {"lse": lse})
        wanted = {name: given[name] for name in NAMES if given[name] is not None and given[name].requires_grad}
        if wanted:
            grads = torch.autograd.grad(out, list(wanted.values()), inputs["do"])
            results |= {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}
        return {name: x.detach() for name, x in results.items()}

    def through_operator(self, inputs: dict[str, Tensor | None], **options: Any) -> Results:
        """`step`, by `torch.ops.ffpa_jit.flash_attn` and its backward."""
        # Who runs it is settled before: a mode may be a reason to choose another.
        found = explain(*(self.needing(inputs)[name] for name in NAMES), **self.options())

        def named(*tensors: Any, backend: Any, **rest: Any) -> Any:
            if backend is None:
                return ffpa_attn_func(*tensors, forward_backend=found.forward, backward_backend=found.backward, **rest)
            return ffpa_attn_func(*tensors, backend=backend, **rest)

        with Operators() as seen:
            results = self.step(inputs, call=named, **options)
        assert any("flash_attn" in name and "backward" not in name for name in seen.names), seen.names
        assert any("backward" in name for name in seen.names) == bool(self.needs), seen.names
        return results

    def check(
        self,
        inputs: dict[str, Tensor | None],
        results: Results,
        *,
        scale: float | None = None,
        words: Tensor | None = None,
    ) -> None:
        """Hold results to the oracle. `words`: those that dropout drew."""
        shape, kept = self.shape, None
        if self.dropout_p:
            assert words is not None
            kept = philox.kept(words, (shape.batch, shape.heads_q, shape.len_q, shape.len_kv), self.dropout_p)
        oracle.check(
            *(inputs[name] for name in "qkv"), out=results["out"], lse=results.get("lse"),
            grads=tuple(results.get(f"d{name}") for name in "qkv"), grad_mask=results.get("dm"),
            grad_out=inputs["do"], is_causal=shape.is_causal, scale=scale, attn_mask=inputs["m"], kept=kept,
            window=self.window, softcap=self.softcap,
        )  # fmt: skip

    def skip_unless_it_runs(self, inputs: dict[str, Tensor | None], return_lse: bool = True) -> str:
        """The backend that runs the forward; where the one that is named refuses, the test is skipped."""
        given = self.needing(inputs)
        found = explain(*(given[name] for name in NAMES), **self.options(), return_lse=return_lse)
        if found.error is not None:
            pytest.skip(found.error.splitlines()[-1].strip())
        return str(found.forward)


def assert_same(results: Results, expected: Results, what: str = "") -> None:
    """Bit for bit, NaN where NaN is expected."""
    assert results.keys() == expected.keys()
    for name, x in results.items():
        wanted = expected[name]
        assert x.shape == wanted.shape, f"{what} {name}: {tuple(x.shape)}, not {tuple(wanted.shape)}"
        assert x.dtype == wanted.dtype, f"{what} {name}: {x.dtype}"
        same = (x == wanted) | (x.isnan() & wanted.isnan())
        assert same.all(), f"{what} {name}: {int((~same).sum())} of {same.numel()} elements differ"


@contextmanager
def dropping(device: str) -> Iterator[Tensor]:
    """Inside, every call draws the same words for its dropout: those it gives."""
    with drawn(device) as words:
        yield words


def padding(shape: Shape, device: str) -> Tensor:
    """[B, 1, 1, Nkv], False at the end of the keys, where a batch has none of its own; none is left without a key."""
    hidden = [(37 * i + shape.len_kv // 5) % (shape.len_kv // 2 + 1) for i in range(shape.batch)]
    filled = shape.len_kv - torch.tensor(hidden, device=device)
    return torch.arange(shape.len_kv, device=device) < filled[:, None, None, None]


BOOL = MaskKind("bool", "bqk", "random")
PADDING = MaskKind("bool", "bk", "right")
BIAS = MaskKind("fp32", "hqk", "random")
HALF_BIAS = MaskKind("half", "bhqk", "random", "transposed")
FUSED = TritonBackend(workspace_mb=0)


def options_of_a_call(batch: int, heads: int, len_q: int, len_kv: int, dim: int) -> dict[str, dict[str, Any]]:
    """Every option alone, and some together, for a shape; values are keyword arguments of `Path`."""
    plain = Shape(batch, heads, heads, len_q, len_kv, dim)
    causal = Shape(batch, heads, heads, min(len_q, len_kv), len_kv, dim, True)
    grouped = Shape(batch, heads, 1, min(len_q, len_kv), len_kv, dim, True)
    return {
        "plain": {"shape": plain},
        "causal": {"shape": causal},
        "gqa": {"shape": grouped},
        "window": {"shape": plain, "window": (max(1, len_kv // 3), 2)},
        "bool mask": {"shape": plain, "mask": BOOL},
        "padding and causal": {"shape": causal, "mask": PADDING},
        "bias": {"shape": plain, "mask": BIAS},
        "half bias": {"shape": grouped, "mask": HALF_BIAS},
        "softcap": {"shape": causal, "softcap": 20.0},
        "dropout": {"shape": plain, "dropout_p": 0.25},
        "dropout, gqa, mask": {"shape": grouped, "mask": BOOL, "dropout_p": 0.5},
        "all": {"shape": grouped, "mask": BIAS, "dropout_p": 0.25, "softcap": 30.0, "window": (len_kv // 2, 0)},
    }


def paths(
    options: dict[str, dict[str, Any]], backends: dict[str, Any], directions: tuple[str, ...] = ("", "qkv")
) -> list[Path]:
    """Every option on every backend, forward and with gradients; an additive mask has one, too."""
    found = []
    for label, backend in backends.items():
        for name, option in options.items():
            for needs in directions:
                mask = option.get("mask")
                every = needs + ("m" if needs and mask is not None and mask.what != "bool" else "")
                title = f"{label}: {name}, {'forward' if not needs else 'forward and ' + every}"
                found.append(Path(title, backend=backend, needs=every, **option))
    return found
