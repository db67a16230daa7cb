"""What is remembered of a call serves the next one like it: every path, called again with other memory, strides,
scales, streams and threads, and inside a CUDA graph, gives bit for bit what the operator gives for the same tensors.

The public function may launch from what it planned for a call before. The operator (seen by a dispatch mode, see
tests/paths.py) plans anew, and the oracle knows neither.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ffpa_jit import TritonBackend, explain, ffpa_attn_func, ffpa_attn_varlen_func
from tests import oracle
from tests.cases.shapes import Packed, Shape, make_packed
from tests.gpu.graphs import capture
from tests.paths import BIAS, BOOL, HALF_BIAS, PADDING, Operators, Path, assert_same, dropping, paths

FP16, BF16 = torch.float16, torch.bfloat16
AGAIN = 6

DENSE = {
    "plain": {"shape": Shape(2, 4, 4, 200, 300, 512)},
    "causal": {"shape": Shape(2, 4, 4, 200, 300, 512, True)},
    "square": {"shape": Shape(1, 4, 4, 256, 256, 512, True)},
    "small": {"shape": Shape(1, 2, 2, 64, 64, 512)},
    "gqa": {"shape": Shape(2, 8, 2, 129, 257, 512, True)},
    "windowed": {"shape": Shape(1, 4, 2, 300, 500, 512), "window": (100, 20)},
    "bool mask": {"shape": Shape(2, 4, 4, 200, 300, 512), "mask": BOOL},
    "key padding": {"shape": Shape(2, 4, 2, 200, 300, 512, True), "mask": PADDING},
    "bias": {"shape": Shape(1, 4, 4, 200, 304, 512), "mask": BIAS},
    "half bias": {"shape": Shape(2, 4, 2, 200, 300, 512), "mask": HALF_BIAS},
    "dropout": {"shape": Shape(1, 4, 4, 200, 300, 512), "dropout_p": 0.25},
    "dropout, mask": {"shape": Shape(1, 4, 2, 200, 300, 512), "dropout_p": 0.25, "mask": BOOL},
    "softcap": {"shape": Shape(1, 4, 2, 200, 300, 512, True), "softcap": 20.0},
    "one query": {"shape": Shape(2, 8, 2, 1, 2000, 512)},
    "five queries": {"shape": Shape(2, 8, 2, 5, 2000, 512, True)},
    "64 queries": {"shape": Shape(1, 4, 4, 64, 3000, 512, True)},
    "one query, padding": {"shape": Shape(2, 8, 2, 1, 2000, 512), "mask": PADDING},
}
BACKENDS = {
    "chosen": None,
    "triton": "triton",
    "no workspace": TritonBackend(workspace_mb=0),
    "cuda": "cuda",
    "cutedsl": "cutedsl",
}
WITHOUT_WORKSPACE = ("causal", "gqa", "bias", "bool mask", "softcap", "dropout")
EVERY = [
    path
    for label, backend in BACKENDS.items()
    for path in paths(
        {x: y for x, y in DENSE.items() if label != "no workspace" or x in WITHOUT_WORKSPACE}, {label: backend}
    )
]

every_path = pytest.mark.parametrize("path", EVERY, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
LAYOUTS = ["bshd", "expanded", "sliced", "last_stride"]


def warmed(path: Path, dtype: torch.dtype, **options: Any) -> dict[str, Tensor | None]:
    """Inputs of a path whose call has been made twice."""
    inputs = path.inputs(dtype, "cuda", **options)
    path.skip_unless_it_runs(inputs)
    with dropping("cuda"):
        for _ in range(2):
            path.step(inputs)
            path.step(inputs, return_lse=False)
    return inputs


def both_ways(path: Path, inputs: dict[str, Tensor | None], what: str, **options: Any) -> None:
    """A call that may launch from a plan, with and without LSE: the operator's bits, and within the oracle's bound."""
    with dropping("cuda") as words:
        results = path.step(inputs, **options)
        without = path.step(inputs, return_lse=False, **options)
        expected = path.through_operator(inputs, **options)
    assert_same(results, expected, what)
    assert_same(without, {name: x for name, x in expected.items() if name != "lse"}, f"{what}, no LSE")
    path.check(inputs, results, words=words, **options)
    assert results["out"].stride() == torch.empty_like(inputs["q"]).stride(), what
    for name in path.needs:
        if inputs[name] is not None and inputs[name].is_floating_point():
            assert results[f"d{name}"].stride() == torch.empty_like(inputs[name]).stride(), f"{what} d{name}"


def misaligned(x: Tensor | None, by: int = 1) -> Tensor | None:
    """A contiguous copy that begins so many elements (for 16-bit numbers: 2 bytes each) beside what torch allocates."""
    if x is None:
        return None
    store = torch.empty(x.numel() + by, dtype=x.dtype, device=x.device)
    return store[by:].view(x.shape).copy_(x)


@every_dtype
@every_path
def test_calls_like_one_before_compute_their_own_numbers_wherever_they_lie(path, dtype):
    warmed(path, dtype)
    held: list[Any] = []
    for i in range(AGAIN):
        inputs = path.inputs(dtype, "cuda", seed=i + 1)
        if i % 2:
            held.append((inputs, torch.empty(1 + 4099 * i, dtype=dtype, device="cuda")))
        both_ways(path, inputs, f"call {i}")


@every_path
def test_another_scale_is_another_number(path):
    inputs = warmed(path, BF16)
    for scale in (0.1, None, 0.02, 0.0, -0.03):
        both_ways(path, inputs, f"scale {scale}", scale=scale)


@every_path
def test_other_strides_are_read_as_they_are(path):
    plain = warmed(path, BF16)
    for layout in LAYOUTS:
        for i in range(2):
            both_ways(path, path.inputs(BF16, "cuda", layout=layout, seed=i), layout)
    other = path.inputs(BF16, "cuda", layout="bshd", seed=5)
    for name in "qkv":  # each alone
        both_ways(path, plain | {name: other[name]}, f"{name} transposed")
    do = plain["do"]
    transposed = do.transpose(1, 2).contiguous().transpose(1, 2)
    both_ways(path, plain | {"do": transposed}, "the output's gradient transposed")
    both_ways(path, plain | {"do": do[:1, :1, :1, :1].expand(do.shape)}, "the output's gradient expanded")
    if plain["m"] is not None:
        mask = plain["m"].expand(path.shape.batch, path.shape.heads_q, path.shape.len_q, path.shape.len_kv)
        if not path.needs or plain["m"].dtype == torch.bool:
            both_ways(path, plain | {"m": mask}, "the mask expanded")
        both_ways(path, plain | {"m": mask.contiguous()}, "the mask written out")


@every_dtype
@every_path
def test_misaligned_memory_is_read_right_after_aligned_memory(path, dtype):
    inputs = warmed(path, dtype)
    for name in ("q", "k", "v", "m", "do"):
        if inputs[name] is not None:
            both_ways(path, inputs | {name: misaligned(inputs[name])}, f"{name} misaligned")
    for by in (1, 4, 8):
        both_ways(path, {x: misaligned(y, by) for x, y in inputs.items()}, f"all {by} elements off")
    both_ways(path, inputs, "aligned again")


@every_path
def test_another_stream_is_launched_on(path):
    """Inputs that the stream itself writes late: a launch on any other stream reads what was there before."""
    inputs = warmed(path, BF16)
    stream, square = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    later = path.inputs(BF16, "cuda", seed=9)
    target = {name: None if x is None else x.clone() for name, x in inputs.items()}
    for i in range(3):
        source = later if i % 2 == 0 else inputs
        with dropping("cuda"):
            expected = path.through_operator(source)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(4):
                    square @ square
                for name, x in target.items():
                    if x is not None:
                        x.copy_(source[name])
                results = path.step(target)
                results = {name: x.clone() for name, x in results.items()}
            stream.synchronize()
        assert_same(results, expected, f"stream, call {i}")


@every_path
def test_two_threads_on_two_streams_do_not_meet(path):
    inputs = [warmed(path, BF16, seed=seed) for seed in range(2)]
    with dropping("cuda"):
        expected = [path.through_operator(x) for x in inputs]
        torch.cuda.synchronize()
        barrier, errors = threading.Barrier(2), []

        def run(i: int) -> None:
            try:
                stream = torch.cuda.Stream()
                barrier.wait()
                with torch.cuda.stream(stream):
                    results = [path.step(inputs[i], return_lse=j % 2 == 0) for j in range(10)]
                stream.synchronize()
                for j, each in enumerate(results):
                    wanted = {name: x for name, x in expected[i].items() if j % 2 == 0 or name != "lse"}
                    assert_same(each, wanted, f"thread {i}, call {j}")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors


@every_dtype
@every_path
def test_a_captured_call_is_replayed_on_what_its_inputs_hold_then(path, dtype):
    inputs = warmed(path, dtype)
    with dropping("cuda") as words:
        graph, captured = capture(lambda: path.step(inputs))
        for i in range(3):
            new = path.inputs(dtype, "cuda", seed=20 + i)
            for name, x in inputs.items():
                if x is not None:
                    x.copy_(new[name])
            graph.replay()
            torch.cuda.synchronize()
            results = {name: x.clone() for name, x in captured.items()}
            expected = path.through_operator(inputs)
            if path.backend is not None:  # left to itself, a capture may be another choice
                assert_same(results, expected, f"replay {i}")
            path.check(inputs, results, words=words)
            assert_same(path.step(inputs), expected, f"eager after replay {i}")


@every_path
def test_the_allocator_may_be_emptied_in_between(path):
    inputs = warmed(path, BF16)
    for i in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        both_ways(path, inputs, f"after empty_cache {i}")


@every_path
def test_tensors_that_are_gone_are_not_kept(path):
    """What a plan holds of a call must not be its tensors."""
    inputs = warmed(path, BF16)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for i in range(AGAIN):
        with dropping("cuda"):
            path.step(path.inputs(BF16, "cuda", seed=i))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    both_ways(path, inputs, "the first inputs again")


# Decoding: the length of the keys grows, and with it what is the best way.


@every_dtype
@pytest.mark.parametrize("backend", ["chosen", "triton", "cuda", "cutedsl"])
@pytest.mark.parametrize("len_q", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("how", ["plain", "causal", "padding"])
def test_decoding_with_keys_that_grow_is_right_at_every_length(dtype, backend, len_q, how):
    shape = Shape(2, 8, 2, len_q, 1100, 512, how == "causal")
    mask = PADDING if how == "padding" else None
    path = Path("", shape, mask, backend=BACKENDS[backend])
    whole = path.inputs(dtype, "cuda")
    path.skip_unless_it_runs(whole)
    for length in [*range(64, 72), *range(127, 131), 255, 256, 257, 511, 600, 1023, 1024, 1025, 1100]:
        shorter = replace(path, shape=replace(shape, len_kv=length))
        inputs = shorter.inputs(dtype, "cuda", seed=length) | {x: whole[x][:, :, :length] for x in "kv"}
        both_ways(shorter, inputs, f"{length} keys")


# Packed sequences: as many tokens as before, cut elsewhere.


@dataclass(frozen=True)
class PackedPath:
    """A packed call, and its steps as `Path` has them."""

    name: str
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    dropout_p: float = 0.0
    needs: bool = False
    tell: bool = True

    def __str__(self) -> str:
        return self.name + (", forward and backward" if self.needs else ", forward")

    def step(self, tensors: tuple[Tensor, ...], packed: Packed, *, scale: float | None = None) -> dict[str, Tensor]:
        q, k, v, do, cu_q, cu_k = tensors
        rows = [x.detach().requires_grad_(self.needs) for x in (q, k, v)]
        longest = (packed.max_q, packed.max_k) if self.tell else (None, None)
        out, lse = ffpa_attn_varlen_func(
            *rows, cu_q, cu_k, *longest, causal=self.causal, window_size=self.window, softcap=self.softcap,
            dropout_p=self.dropout_p, softmax_scale=scale, enable_gqa=True, return_lse=True,
        )  # fmt: skip
        results = {"out": out.detach(), "lse": lse.detach()}
        if self.needs:
            results |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, rows, do), strict=True)
        return results


PACKED = [
    replace(path, needs=needs)
    for needs in (False, True)
    for path in (
        PackedPath("packed"),
        PackedPath("packed, causal", causal=True),
        PackedPath("packed, lengths untold", causal=True, tell=False),
        PackedPath("packed, window", window=(40, 0)),
        PackedPath("packed, softcap", causal=True, softcap=20.0),
        PackedPath("packed, dropout", causal=True, dropout_p=0.25),
    )
]
CUTS = [(300, 200, 12), (100, 400, 12), (512,), (1, 0, 500, 11), (64,) * 8, (128, 129, 255), (300, 200, 12)]


def packed_calls(dtype: torch.dtype) -> Iterator[tuple[Packed, tuple[Tensor, ...]]]:
    for i, lens in enumerate(CUTS):
        packed = Packed(lens, lens, 4, 2, 512)
        yield packed, make_packed(packed, dtype, "cuda", seed=i)


def check_packed(path: PackedPath, packed: Packed, tensors: tuple[Tensor, ...], **options: Any) -> None:
    with dropping("cuda"):
        results = path.step(tensors, packed, **options)
        with Operators() as seen:
            expected = path.step(tensors, packed, **options)
    assert any("varlen" in name for name in seen.names)
    assert_same(results, expected, f"{packed} {options}")
    if not path.dropout_p:  # its bits are compared, and tests/gpu/test_options.py knows what they are
        q, k, v, do, cu_q, cu_k = tensors
        oracle.check_varlen(
            q, k, v, cu_q, cu_k, out=results["out"], lse=results["lse"],
            grads=tuple(results.get(name) for name in ("dq", "dk", "dv")), grad_out=do, is_causal=path.causal,
            window=path.window, softcap=path.softcap, **options,
        )  # fmt: skip


@every_dtype
@pytest.mark.parametrize("path", PACKED, ids=str)
def test_packed_calls_of_other_lengths_each_time_are_right(path, dtype):
    held = []
    for packed, tensors in packed_calls(dtype):
        check_packed(path, packed, tensors)
        held.append(tensors)
        check_packed(path, packed, tensors, scale=0.07)
    packed, (q, k, v, *rest) = Packed(CUTS[0], CUTS[0], 4, 2, 512), held[0]
    check_packed(path, packed, (*(misaligned(x) for x in (q, k, v)), *rest))
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    check_packed(path, packed, (*transposed, *rest))


@pytest.mark.parametrize("path", PACKED, ids=str)
def test_a_captured_packed_call_follows_its_offsets(path):
    packed, tensors = next(packed_calls(BF16))
    with dropping("cuda"):
        whole = replace(path, tell=False)  # the graph has to hold for sequences of any length
        whole.step(tensors, packed)
        graph, captured = capture(lambda: whole.step(tensors, packed))
        for i, lens in enumerate(CUTS):
            if len(lens) != len(CUTS[0]):
                continue
            other = Packed(lens, lens, 4, 2, 512)
            for x, y in zip(tensors, make_packed(other, BF16, "cuda", seed=30 + i), strict=True):
                x.copy_(y)
            graph.replay()
            torch.cuda.synchronize()
            results = {name: x.clone() for name, x in captured.items()}
            with Operators():
                expected = whole.step(tensors, other)
            assert_same(results, expected, str(other))


# What a plan must not forget.


def turned(call: Callable[[], dict[str, Tensor]], others: list[Callable[[], Any]]) -> None:
    """The same bits from a call with each of the others in between."""
    first = call()
    for i, other in enumerate(others):
        other()
        assert_same(call(), first, f"after call {i}")


@every_dtype
def test_calls_that_differ_in_one_thing_do_not_take_each_others_plans(dtype):
    base = Path("", Shape(2, 4, 4, 200, 200, 512))
    variants = [
        replace(base, shape=Shape(2, 4, 4, 200, 200, 512, True)),
        replace(base, shape=Shape(2, 4, 2, 200, 200, 512)),
        replace(base, shape=Shape(4, 2, 2, 200, 200, 512)),
        replace(base, shape=Shape(2, 4, 4, 200, 201, 512)),
        replace(base, shape=Shape(2, 4, 4, 201, 200, 512)),
        replace(base, shape=Shape(2, 4, 4, 200, 200, 320)),
        replace(base, window=(10, 0)),
        replace(base, softcap=5.0),
        replace(base, dropout_p=0.5),
        replace(base, mask=BOOL),
        replace(base, mask=BIAS),
        replace(base, mask=HALF_BIAS),
        replace(base, needs="qkv"),
        replace(base, needs="q"),
        replace(base, needs="v"),
        replace(base, mask=BIAS, needs="m"),
        replace(base, backend="triton"),
        replace(base, backend="cuda"),
    ]
    with dropping("cuda") as words:
        kept = [(path, path.inputs(dtype, "cuda", seed=i)) for i, path in enumerate([base, *variants])]
        kept = [(path, x) for path, x in kept if explain(*(x[n] for n in "qkvm"), **path.options()).error is None]
        expected = [path.through_operator(inputs) for path, inputs in kept]
        for _ in range(3):
            for (path, inputs), wanted in zip(kept, expected, strict=True):
                assert_same(path.step(inputs), wanted, str(path.options()))
                assert_same(path.step(inputs, return_lse=False), {x: y for x, y in wanted.items() if x != "lse"})
        for (path, inputs), wanted in zip(kept, expected, strict=True):
            path.check(inputs, wanted, words=words)


@every_dtype
def test_modes_and_settings_between_two_calls_are_heeded(monkeypatch, dtype):
    path = Path("", Shape(1, 4, 2, 200, 300, 512, True), needs="qkv")
    inputs = path.inputs(dtype, "cuda")

    def with_small_workspace() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FFPA_JIT_WORKSPACE_MB", "1")
            path.check(inputs, path.step(inputs))

    def without_gradients() -> None:
        with torch.no_grad():
            forward = replace(path, needs="")
            forward.check(inputs, forward.step(inputs))

    def in_inference_mode() -> None:
        with torch.inference_mode():
            forward = replace(path, needs="")
            forward.check(inputs, forward.step(inputs))

    def under_autocast() -> None:
        with torch.autocast("cuda", dtype=dtype):
            q, k, v = (inputs[x].float() for x in "qkv")
            out = ffpa_attn_func(q, k, v, is_causal=True, enable_gqa=True)
        oracle.check(*(inputs[x] for x in "qkv"), out=out, is_causal=True)

    def checked_for_determinism() -> None:
        torch.use_deterministic_algorithms(True)
        try:
            path.check(inputs, path.step(inputs))
        finally:
            torch.use_deterministic_algorithms(False)

    turned(
        lambda: path.step(inputs),
        [with_small_workspace, without_gradients, in_inference_mode, under_autocast, checked_for_determinism],
    )
