"""How calls reach the CuTe-DSL kernels on a GPU: what they need beside their results, what is compiled and how often,
streams, graphs and processes, gradients, and what is chosen by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ffpa_jit import explain, ffpa_attn_func, registry
from ffpa_jit.cute import compile as kernels
from ffpa_jit.cute import dense
from ffpa_jit.cute.spec import HEAD_DIMS, served_by
from tests import oracle
from tests.cases.shapes import Shape, leaves, make
from tests.gpu.cute import BF16, FP16, attend, on_hopper, run_and_check, same
from tests.gpu.graphs import capture
from tests.gpu.memory import extra_memory

pytestmark = on_hopper

NEVER_MORE = 4096  # bytes: what the allocator rounds up to


def together(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, all at once; an error in one is the test's."""
    barrier, errors = threading.Barrier(len(works)), []

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


# Memory, and the same bits every time.


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "expanded", "sliced"])
@pytest.mark.parametrize("shape", [Shape(1, 32, 32, 4096, 8192, 512), Shape(1, 32, 4, 4096, 4096, 512, True)], ids=str)
def test_it_needs_no_memory_beside_its_results(shape, layout):
    q, k, v, _ = make(shape, BF16, "cuda", layout=layout)
    for call in ("the first", "the second, on its short way"):
        _, over = extra_memory(lambda: attend(q, k, v, is_causal=shape.is_causal))
        assert over <= NEVER_MORE, f"{over} bytes beside the results of {call}"
    for call in ("the first without an LSE", "the second without an LSE"):
        (out,), over = extra_memory(
            lambda: (ffpa_attn_func(q, k, v, is_causal=shape.is_causal, enable_gqa=True, backend="cutedsl"),)
        )
        assert over <= NEVER_MORE + (out[..., 0].numel() * 4 if "first" in call else 0), f"{over} bytes, {call}"


REPEATED = [
    Shape(1, 8, 2, 2000, 2000, 512, True),
    Shape(1, 96, 96, 300, 900, 512),
    Shape(1, 1, 1, 64, 20_000, 512),
    Shape(2, 24, 3, 700, 700, 320, True),
    Shape(1, 16, 16, 500, 1000, 576, True),
    Shape(1, 5, 5, 700, 1000, 640, True),
]


@pytest.mark.parametrize("shape", [each for each in REPEATED if served_by(each.head_dim)], ids=str)
def test_repeated_calls_give_the_same_bits_beside_other_work_and_on_other_streams(shape):
    q, k, v, _ = make(shape, BF16, "cuda")
    first = attend(q, k, v, is_causal=shape.is_causal)
    square, (other, noise) = torch.randn(2048, 2048, device="cuda"), (torch.cuda.Stream(), torch.cuda.Stream())
    torch.cuda.synchronize()
    for i in range(20):
        with torch.cuda.stream(noise):
            square @ square
        with torch.cuda.stream(other if i % 2 else torch.cuda.default_stream()):
            again = attend(q, k, v, is_causal=shape.is_causal)
        torch.cuda.synchronize()
        assert same(again, first), f"run {i}"


def test_two_streams_and_two_threads_run_side_by_side():
    inputs = [make(Shape(1, 4, 2, 700, 900, 512), BF16, "cuda", seed=seed)[:3] for seed in range(2)]
    expected = [attend(*x) for x in inputs]
    torch.cuda.synchronize()

    def work(i: int) -> Callable[[], None]:
        def run() -> None:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                results = [attend(*inputs[i]) for _ in range(20)]
            stream.synchronize()
            assert all(same(result, expected[i]) for result in results)

        return run

    together(work(0), work(1))


def test_nothing_is_compiled_or_loaded_again_for_other_lengths_batches_heads_or_strides(monkeypatch):
    run_and_check(*make(Shape(1, 4, 2, 65, 70, 512), BF16, "cuda")[:3])

    def again(*arguments):
        raise AssertionError(f"compiled or loaded again: {arguments}")

    monkeypatch.setattr(kernels, "warm", again)
    monkeypatch.setattr(kernels, "load", again)
    head_dims = range([0, *HEAD_DIMS][HEAD_DIMS.index(512)] + 8, 513, 8)  # all that one kernel serves
    for i, head_dim in enumerate(head_dims):
        shape = Shape(1 + i % 3, 2 + 2 * i, 2, 1 + 31 * i, 700 - 13 * i, head_dim)
        q, k, v, _ = make(shape, BF16, "cuda", layout=("contiguous", "bshd")[i % 2])
        run_and_check(q, k, v, scale=0.01 * i)


@pytest.mark.parametrize("is_causal", [False, True])
def test_calls_like_one_before_are_launched_at_once_and_compute_their_own_numbers(monkeypatch, is_causal):
    shape, forwards, forward = Shape(2, 6, 2, 130, 333, 512), [], dense.forward

    def counted(launch, query, *tensors, **options):
        forwards.append(query.shape)
        return forward(launch, query, *tensors, **options)

    registry.invalidate()
    monkeypatch.setattr(dense, "forward", counted)
    stream = torch.cuda.Stream()
    for i in range(6):
        q, k, v, _ = make(shape, BF16, "cuda", layout="bshd", seed=i)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream if i % 2 else torch.cuda.default_stream()):
            run_and_check(q, k, v, is_causal=is_causal, scale=(None, 0.1, -0.2)[i % 3])
        torch.cuda.synchronize()
    assert len(forwards) == 1
    for i in range(6):  # ... and where no LSE is wanted, there is none
        q, k, v, _ = make(shape, BF16, "cuda", layout="bshd", seed=i)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream if i % 2 else torch.cuda.default_stream()):
            out = ffpa_attn_func(q, k, v, is_causal=is_causal, enable_gqa=True, backend="cutedsl")
        torch.cuda.synchronize()
        oracle.check(q, k, v, out=out, is_causal=is_causal)
    assert len(forwards) == 2
    unaligned = torch.empty(q.numel() + 1, dtype=BF16, device="cuda")[1:].view(q.shape).copy_(q)
    run_and_check(unaligned, k.contiguous(), v.contiguous(), is_causal=is_causal)
    run_and_check(unaligned.clone(), k.contiguous(), v.contiguous(), is_causal=is_causal)
    assert len(forwards) > 2


# Gradients, compilation, graphs.


GRADIENTS = [
    (Shape(1, 4, 2, 500, 640, 512, True), BF16),
    (Shape(1, 3, 1, 300, 333, 512), FP16),
    (Shape(1, 2, 2, 200, 200, 328, True), BF16),
    (Shape(2, 2, 1, 200, 300, 576), BF16),
    (Shape(1, 2, 1, 200, 300, 640, True), BF16),
]


@pytest.mark.parametrize(("shape", "dtype"), [each for each in GRADIENTS if served_by(each[0].head_dim)], ids=str)
def test_its_output_and_lse_serve_the_triton_backward(launches, shape, dtype):
    q, k, v, do = make(shape, dtype, "cuda")
    q, k, v = leaves(q, k, v)
    options = {"is_causal": shape.is_causal, "enable_gqa": shape.enable_gqa}
    found = explain(q, k, v, backend="cutedsl", **options)
    assert (found.forward, found.backward) == ("cutedsl", "triton")
    out, lse = attend(q, k, v, **options)
    assert len(launches) == 1
    dlse = torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    oracle.check(
        q, k, v, out=out, lse=lse, grads=grads, grad_out=do, grad_lse=dlse, is_causal=shape.is_causal
    )  # fmt: skip


def test_compile_makes_one_graph_for_all_lengths(launches):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")

    def step(q, k, v):
        out = ffpa_attn_func(q * 2, k, v, is_causal=True, enable_gqa=True, backend="cutedsl")
        return (out * 0.5).float().square().mean()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for length in (300, 512, 1000, 777):
        tensors = leaves(*make(Shape(1, 4, 2, length, length, 512), BF16, "cuda")[:3])
        grads = torch.autograd.grad(compiled(*tensors), tensors)
        assert launches[-1] == (1, 4, length, 512)
        expected = torch.autograd.grad(step(*tensors), tensors)
        for a, b in zip(grads, expected, strict=True):
            assert oracle.relative_error(a, b) < 1e-2
        graphs.append(counter.frame_count)
    # torch may trace the first call twice (a float default becomes symbolic); no length may add a graph.
    assert len(set(graphs)) == 1


def test_a_captured_graph_replays_on_new_values():
    shape = Shape(1, 4, 2, 300, 500, 512, True)
    q, k, v, do = make(shape, BF16, "cuda")
    q, k, v = leaves(q, k, v)

    def step():
        out, lse = attend(q, k, v, is_causal=True)
        return out, lse, *torch.autograd.grad(out, (q, k, v), do), *attend(k.detach(), k.detach(), v.detach())

    graph, captured = capture(step)
    with torch.no_grad():
        for x in (q, k, v, do):
            x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert same(captured, step())
    oracle.check(q, k, v, out=captured[0], lse=captured[1], is_causal=True)


def test_no_call_waits_for_the_gpu():
    q, k, v, _ = make(Shape(1, 4, 2, 300, 500, 512), BF16, "cuda", layout="bshd")
    attend(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(q, k, v)
        attend(q, k, v, is_causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Processes.


INPUTS = """
import logging, time
built = []
handler = logging.Handler()
handler.emit = lambda record: built.append("compiling it with" in record.getMessage())
logging.getLogger("ffpa_jit").addHandler(handler)
logging.getLogger("ffpa_jit").setLevel(logging.INFO)
import torch
from ffpa_jit import ffpa_attn_func
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 200, 512, dtype=torch.bfloat16, device="cuda") for _ in range(3))
torch.cuda.synchronize()
"""
CALL = (
    INPUTS
    + """
start = time.perf_counter()
out = ffpa_attn_func(q, k, v, backend="cutedsl")
torch.cuda.synchronize()
print("seconds", time.perf_counter() - start)
print("sum", out.double().sum().item(), "nan", int(out.isnan().sum()), "built", sum(built))
"""
)
CAPTURE = (
    INPUTS
    + """
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        ffpa_attn_func(q, k, v, backend="cutedsl")
except RuntimeError as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
expected = ffpa_attn_func(q, k, v, backend="cutedsl")  # the refusal broke nothing
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = ffpa_attn_func(q, k, v, backend="cutedsl")
graph.replay()
torch.cuda.synchronize()
print(torch.equal(out, expected))
"""
)


def children(code: str, count: int, cache: Path | str) -> list[str]:
    """Run `count` processes of `code` at once on one cache; what each printed."""
    # Nowhere else to look: a cache that the tests themselves search would not be cold.
    env = {
        **os.environ,
        "FFPA_JIT_CACHE_DIR": str(cache),
        "FFPA_JIT_CACHE_PATH": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    running = [subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) for _ in range(count)]
    said = []
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        said.append(out)
    return said


def test_of_processes_on_a_cold_cache_one_compiles_and_later_ones_only_load(tmp_path):
    def numbers(count):
        said = [out.split() for out in children(CALL, count, tmp_path / "cache")]
        return [dict(zip(words[::2], map(float, words[1::2]), strict=True)) for words in said]

    results = numbers(2)
    assert sum(result["built"] for result in results) == 1
    assert len({result["sum"] for result in results}) == 1
    assert not any(result["nan"] for result in results)
    assert len(list((tmp_path / "cache" / kernels.STORE.group).glob("*/meta.json"))) == 1
    (later,) = numbers(1)
    assert (later["built"], later["sum"]) == (0, results[0]["sum"])
    assert later["seconds"] < 1.0


def test_a_first_use_inside_a_capture_names_warm_and_breaks_nothing():
    (said,) = children(CAPTURE, 1, os.environ["FFPA_JIT_CACHE_DIR"])
    refusal, works = said.strip().splitlines()
    assert refusal.startswith("RuntimeError")
    assert "warm" in refusal
    assert works == "True"


# The choice.


def test_it_runs_by_itself_what_it_can(launches):
    q, k, v, _ = make(Shape(1, 32, 8, 4096, 4096, 512), BF16, "cuda")
    for tensors, backward in (((q, k, v), None), (leaves(q, k, v), "triton")):
        found = explain(*tensors, is_causal=True, enable_gqa=True)
        assert (found.forward, found.backward, found.error) == ("cutedsl", backward, None), found
        out = ffpa_attn_func(*tensors, is_causal=True, enable_gqa=True)
        assert len(launches) == 1
        launches.clear()
        assert torch.equal(out, attend(q, k, v, is_causal=True)[0])
        launches.clear()


@pytest.mark.parametrize(
    ("options", "code"),
    [({"dropout_p": 0.1}, "dropout_p"), ({"window_size": (128, 0)}, "window_size"), ({"softcap": 20.0}, "softcap"),
     ({"attn_mask": None}, "attn_mask")],
)  # fmt: skip
def test_what_it_cannot_is_refused_by_name_and_goes_to_triton_unnamed(launches, options, code):
    q, k, v, _ = make(Shape(1, 32, 32, 4096, 4096, 512), BF16, "cuda")
    if "attn_mask" in options:
        options = {"attn_mask": torch.rand(1, 1, 1, 4096, device="cuda") < 0.5}
    with pytest.raises(NotImplementedError, match=rf"cutedsl: .*{code}"):
        ffpa_attn_func(q, k, v, backend="cutedsl", **options)
    found = explain(q, k, v, **options)
    assert found.forward == "triton", found
    assert any(code in reason for reason in found.reasons["cutedsl"])
    torch.manual_seed(1)
    out = ffpa_attn_func(q, k, v, **options)
    torch.manual_seed(1)
    assert torch.equal(out, ffpa_attn_func(q, k, v, backend="triton", **options))
    assert not launches


def test_a_head_dim_beyond_the_largest_is_refused():
    q = torch.zeros(1, 1, 100, HEAD_DIMS[-1] + 8, dtype=BF16, device="cuda")
    with pytest.raises(NotImplementedError, match="head dim"):
        attend(q, q, q)
