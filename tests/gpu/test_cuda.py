"""The CUDA backend's kernels against the oracle: every instantiation, every option, and what only a GPU can show."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ffpa_jit import CUDABackend, ffpa_attn_func, warm
from ffpa_jit.cuda import dense, instantiate, kernels, recipe
from ffpa_jit.cuda.instantiate import HEAD_DIMS
from ffpa_jit.problem import device_arch
from tests import oracle, philox
from tests.cases.shapes import EMPTY, LARGE, LAYOUTS, Shape, far_apart, gemma_like, late_maximum, leaves, make
from tests.gpu.graphs import capture

DTYPES = [torch.float16, torch.bfloat16]
# With fp16 scores the error grows with the products' sizes; on random inputs it stays at a few roundings.
F16_ERROR = 4e-3


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFPA_JIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def everything(_own_cache) -> None:
    """Every instantiation, compiled in parallel."""
    results = []
    for stages in (None, 1, 2, 3, 4):
        results += warm(list(HEAD_DIMS), dtype=("bf16", "fp16"), stages=stages, backend="cuda")
        results += warm(list(HEAD_DIMS), dtype="fp16", acc="f16", stages=stages, backend="cuda")
    assert not [result for result in results if result.failed]


def attend(q, k, v, backend="cuda", **options):
    options.setdefault("enable_gqa", q.shape[1] != k.shape[1])
    return ffpa_attn_func(q, k, v, forward_backend=backend, return_lse=True, **options)


def drawn(monkeypatch, device="cuda"):
    """Every call from here on draws these two words for its dropout."""
    words = torch.randint(-(2**63), 2**63 - 1, (2,), device=device)
    monkeypatch.setattr("torch.randint", lambda *args, **kwargs: words.clone())
    return words


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instantiation_matches_the_oracle(everything, dtype, head_dim, stages):
    backend = CUDABackend(stages=stages)
    for shape in (Shape(1, 4, 2, 200, 333, head_dim, True), Shape(2, 1, 1, 65, 500, head_dim - 8)):
        q, k, v, _ = make(shape, dtype, "cuda")
        out, lse = attend(q, k, v, backend, is_causal=shape.is_causal)
        oracle.check(q, k, v, out=out, lse=lse, is_causal=shape.is_causal)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_instantiation_with_fp16_accumulators_stays_within_its_error(everything, head_dim, stages):
    q, k, v, _ = make(Shape(1, 4, 2, 200, 333, head_dim, True), torch.float16, "cuda")
    out, lse = attend(q, k, v, CUDABackend(acc="f16", stages=stages), is_causal=True)
    exact = oracle.attention(q, k, v, is_causal=True)
    assert oracle.relative_error(out, exact.out) < F16_ERROR
    assert (lse.double() - exact.lse).abs().max() < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE + EMPTY, ids=str)
def test_forward_matches_the_oracle(shape, dtype):
    q, k, v, _ = make(shape, dtype, "cuda")
    out, lse = attend(q, k, v, is_causal=shape.is_causal)
    oracle.check(q, k, v, out=out, lse=lse, is_causal=shape.is_causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [Shape(1, 4, 2, 500, 640, 512, True), Shape(1, 3, 1, 300, 300, 328)], ids=str)
def test_its_output_and_lse_serve_the_triton_backward(shape, dtype):
    q, k, v, do = make(shape, dtype, "cuda")
    q, k, v = leaves(q, k, v)
    out, lse = attend(q, k, v, is_causal=shape.is_causal, backward_backend="triton")
    dlse = torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    oracle.check(
        q, k, v, out=out, lse=lse, grads=grads, grad_out=do, grad_lse=dlse, is_causal=shape.is_causal
    )  # fmt: skip


def make_mask(kind: str, shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor | None:
    """A mask of a kind ("bool" or "add" or "fp32", and which dims it has) with some rows and keys masked out."""
    if kind == "none":
        return None
    generator = torch.Generator("cuda").manual_seed(seed)
    what, dims = kind.split("/")
    full = shape.batch, shape.heads_q, shape.len_q, shape.len_kv
    sizes = [size if name in dims else 1 for name, size in zip("bhqk", full, strict=True)]
    hidden = torch.rand(sizes, device="cuda", generator=generator) < 0.3
    if "q" in dims and shape.len_q > 3:
        hidden[:, :, 3] = True
    if what == "bool":
        mask = ~hidden
    else:
        mask = torch.randn(sizes, device="cuda", generator=generator).to(torch.float32 if what == "fp32" else dtype)
        mask.masked_fill_(hidden, -math.inf)
        if "q" in dims and shape.len_q > 5:
            mask[:, :, 5] = torch.finfo(mask.dtype).min
    if "t" in dims:  # keys are not the fastest dim
        mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
    return mask


MASKS = ["none", "bool/bk", "bool/qk", "bool/bhqk", "add/k", "add/hq", "add/bhqkt", "fp32/qk", "fp32/bh", "fp32/bqkt"]
LENGTHS = [1, 2, 17, 63, 64, 65, 100, 127, 128, 129, 200, 257, 400]


def combinations(count: int):
    """Random calls in which every option meets every other."""
    draw = random.Random(20)
    for seed in range(count):
        len_q, len_kv = draw.choice(LENGTHS), draw.choice(LENGTHS)
        causal = draw.random() < 0.4 and len_q <= len_kv
        group = draw.choice([1, 1, 2, 3, 5])
        heads = draw.choice([1, 2, 3])
        head_dim = draw.choice([264, 320, 328, 384, 512, 520, 640, 704, 768, 1000, 1024])
        shape = Shape(draw.choice([1, 2]), heads * group, heads, len_q, len_kv, head_dim, causal)
        mask = "none" if causal else draw.choice(MASKS)
        yield pytest.param(
            shape, draw.choice(DTYPES), draw.choice(LAYOUTS), mask, draw.choice([0.0, 0.0, 0.1, 0.7]),
            draw.choice([None, 0.0, -0.1, 1.0]), seed, id=str(seed),
        )  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype", "layout", "kind", "dropout_p", "scale", "seed"), list(combinations(150)))
def test_options_in_any_combination(monkeypatch, shape, dtype, layout, kind, dropout_p, scale, seed):
    q, k, v, _ = make(shape, dtype, "cuda", layout=layout, seed=seed)
    mask = make_mask(kind, shape, dtype, seed)
    words = drawn(monkeypatch)
    out, lse = attend(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=shape.is_causal, scale=scale)
    monkeypatch.undo()
    kept = None
    if dropout_p:
        kept = philox.kept(words, (shape.batch, shape.heads_q, shape.len_q, shape.len_kv), dropout_p)
    oracle.check(
        q, k, v, out=out, lse=lse, attn_mask=mask, kept=kept, is_causal=shape.is_causal, scale=scale
    )  # fmt: skip
    assert out.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 32, 32, 1, 9000, 512),
        Shape(2, 32, 4, 1, 5000, 512, True),
        Shape(1, 8, 1, 7, 20_000, 320, True),
        Shape(1, 16, 1, 40, 3001, 1024),
        Shape(1, 1, 1, 1, 131_073, 512),
        Shape(3, 2, 1, 2, 129, 768),
    ],
    ids=str,
)
def test_few_queries_split_the_keys(shape, dtype):
    q, k, v, _ = make(shape, dtype, "cuda")
    out, lse = attend(q, k, v, is_causal=shape.is_causal)
    oracle.check(q, k, v, out=out, lse=lse, is_causal=shape.is_causal)
    mask = torch.rand(1, shape.len_kv, device="cuda") < 0.5
    out, lse = attend(q, k, v, attn_mask=mask)
    oracle.check(q, k, v, out=out, lse=lse, attn_mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [5, 500])
def test_rows_whose_maximum_moves_late_stay_exact(step, dtype):
    shape = Shape(1, 2, 1, 700, 1000, 512, True)
    q, k, v, _ = late_maximum(shape, dtype, "cuda", step=step)
    out, lse = attend(q, k, v, is_causal=True)
    oracle.check(q, k, v, out=out, lse=lse, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemma_like_inputs_with_scale_one_stay_exact(dtype):
    q, k, v, _ = gemma_like(Shape(1, 8, 1, 1000, 1000, 512, True), dtype, "cuda")
    out, lse = attend(q, k, v, is_causal=True, scale=1.0)
    oracle.check(q, k, v, out=out, lse=lse, is_causal=True, scale=1.0)


@pytest.mark.parametrize("kind", ["add/qk", "fp32/hk", "bool/bk"])
def test_masked_training_takes_its_gradients_from_sdpa(kind):
    shape = Shape(1, 4, 2, 150, 260, 512)
    q, k, v, do = make(shape, torch.bfloat16, "cuda")
    mask = make_mask(kind, shape, torch.bfloat16, 0)
    if mask.dtype != torch.bool:
        mask = mask.masked_fill(mask < -100, -1.0)  # no row without keys: SDPA's gradients are the reference
        mask.requires_grad_()
    else:
        mask = mask | (torch.arange(shape.len_kv, device="cuda") < 3)
    q, k, v = leaves(q, k, v)
    inputs = (q, k, v) if mask.dtype == torch.bool else (q, k, v, mask)
    out, _ = attend(q, k, v, attn_mask=mask)
    grads = torch.autograd.grad(out, inputs, do)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact_mask = exact_inputs[3] if len(inputs) == 4 else mask
    exact = torch.nn.functional.scaled_dot_product_attention(*exact_inputs[:3], exact_mask, enable_gqa=True)
    for grad, reference in zip(grads, torch.autograd.grad(exact, exact_inputs, do.double()), strict=True):
        assert grad.shape == reference.shape
        assert oracle.relative_error(grad, reference) < 2e-2


def test_a_mask_is_read_where_it_lies():
    """A [1, 1, N, N] mask seen by 2 x 24 heads: expanded it would take 24 GB."""
    shape = Shape(2, 24, 24, 16_384, 16_384, 320)
    q, k, v, _ = make(Shape(2, 24, 24, 128, 16_384, 320), torch.bfloat16, "cuda")
    mask = torch.ones(shape.len_q, shape.len_kv, dtype=torch.bool, device="cuda").tril_()[-128:]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = attend(q, k, v, attn_mask=mask)
    expected, _ = attend(q, k, v, is_causal=True)
    assert torch.equal(out, expected)
    assert torch.cuda.max_memory_allocated() - before < 3 * out.numel() * 2


@pytest.mark.parametrize("shape", [Shape(1, 32, 32, 8192, 8192, 512), Shape(1, 16, 4, 4096, 4096, 1024, True)], ids=str)
def test_it_needs_no_memory_beside_its_results(shape):
    q, k, v, _ = make(shape, torch.bfloat16, "cuda")
    attend(q[:, :, :64], k, v, is_causal=shape.is_causal)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = attend(q, k, v, is_causal=shape.is_causal)
    torch.cuda.synchronize()
    results = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    assert torch.cuda.max_memory_allocated() - before <= results + 4096


def test_split_keys_stay_within_the_workspace(monkeypatch):
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "0.5")
    q, k, v, _ = make(Shape(1, 32, 4, 8, 8192, 512), torch.bfloat16, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = attend(q, k, v)
    assert torch.cuda.max_memory_allocated() - before <= out.numel() * 2 + lse.numel() * 4 + 2**19 + 4096
    oracle.check(q, k, v, out=out, lse=lse)


def test_dropout_keeps_what_it_says_and_never_the_same_twice():
    q, k, _, _ = make(Shape(1, 2, 2, 512, 512, 512), torch.float16, "cuda")
    q, v = torch.zeros_like(q), torch.zeros_like(k)  # uniform probabilities 1 / 512
    index = torch.arange(512, device="cuda")
    v[:, :, index, index] = 512.0  # out[row, key] is what the probability was multiplied with
    first, _ = attend(q, k, v, dropout_p=0.25)
    second, _ = attend(q, k, v, dropout_p=0.25)
    share = (first == 0).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / first.numel())
    assert abs(first[first != 0].double().mean().item() - 1 / 0.75) < 1e-3
    assert not torch.equal(first, second)
    dropped = first == 0
    assert abs((dropped & (second == 0)).double().mean().item() - 0.0625) < 2e-3
    rows = dropped.double().mean(-1)
    assert rows.std().item() < 2 * math.sqrt(0.25 * 0.75 / 512)


def test_dropout_is_replayed_by_the_generator():
    q, k, v, _ = make(Shape(1, 2, 2, 130, 200, 512), torch.bfloat16, "cuda")
    state = torch.cuda.get_rng_state()
    first, _ = attend(q, k, v, dropout_p=0.3)
    torch.cuda.set_rng_state(state)
    again, _ = attend(q, k, v, dropout_p=0.3)
    assert torch.equal(first, again)


def test_a_captured_graph_replays_on_new_values_with_new_dropout():
    shape = Shape(1, 4, 2, 300, 500, 512)
    q, k, v, _ = make(shape, torch.bfloat16, "cuda")
    mask = torch.rand(300, 500, device="cuda") < 0.8

    def step():
        return *attend(q, k, v, attn_mask=mask), attend(q, k, v, dropout_p=0.5)[0], attend(q[:, :, :1], k, v)[0]

    graph, captured = capture(step)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    dropped = captured[2].clone()
    expected = step()
    assert all(torch.equal(captured[i], expected[i]) for i in (0, 1, 3))
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(captured[2], dropped)


def test_a_first_call_inside_a_capture_names_warm():
    kernels.forget()
    q, k, v, _ = make(Shape(1, 2, 2, 64, 64, 448), torch.float16, "cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warm"), torch.cuda.graph(graph):
        attend(q, k, v)
    out, lse = attend(q, k, v)  # the refusal broke nothing
    oracle.check(q, k, v, out=out, lse=lse)


def test_compile_makes_one_graph_for_all_lengths():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")

    def step(q, k, v, mask):
        return ffpa_attn_func(q * 2, k, v, attn_mask=mask, enable_gqa=True) * 0.5

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for length in (300, 512, 1000, 777):
        q, k, v, _ = make(Shape(1, 4, 2, length, length, 512), torch.bfloat16, "cuda")
        mask = torch.rand(length, length, device="cuda") < 0.5
        oracle.check(q * 2, k, v, out=compiled(q, k, v, mask) * 2, attn_mask=mask)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


def test_any_alignment_goes_in():
    store = torch.randn(1, 2, 200, 520, dtype=torch.bfloat16, device="cuda")
    for first in (1, 3, 8):
        x = store[..., first : first + 512]
        out, lse = attend(x, x, x)
        oracle.check(x, x, x, out=out, lse=lse)


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_more_than_65535_batches_or_heads_run(axis):
    many = 65_537
    shape = Shape(many, 1, 1, 3, 5, 264) if axis == "batch" else Shape(1, many, many, 3, 5, 264)
    q, k, v, _ = make(shape, torch.bfloat16, "cuda")
    out, lse = attend(q, k, v)
    oracle.check(q, k, v, out=out, lse=lse)


def test_offsets_beyond_two_to_the_31_elements_are_right():
    """Heads 2^30 elements apart (the last of four starts at 3 * 2^30), and a mask of more than 2^31 elements."""
    apart, length, dim = 2**30, 260, 512
    q, k, v = far_apart(apart, length, dim)
    bits = torch.ones(3 * apart + length * length, dtype=torch.bool, device="cuda")
    mask = bits.as_strided((1, 4, length, length), (4 * apart, apart, length, 1))
    mask.copy_(torch.rand(mask.shape, device="cuda") < 0.6)
    out, lse = attend(q, k, v, attn_mask=mask)
    oracle.check(q, k, v, out=out, lse=lse, attn_mask=mask)


def test_a_long_single_tensor_beyond_two_to_the_31_elements_is_right():
    length = 2**31 // 1024 + 130
    q = torch.randn(1, 1, 8, 1024, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 1, length, 1024, dtype=torch.bfloat16, device="cuda")
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :, -100:, 0] = 120.0  # the last keys carry the weight: exp(30) each
    out, lse = attend(q, k, k)
    tail = k[:, :, -200:]
    exact = oracle.attention(q, tail, tail)
    assert oracle.relative_error(out, exact.out) < 5e-3
    assert (lse.double() - exact.lse).abs().max() < 1e-3


def test_repeated_calls_give_the_same_bits():
    for shape in (Shape(1, 8, 2, 2000, 2000, 512, True), Shape(1, 2, 1, 5, 50_000, 1024)):
        q, k, v, _ = make(shape, torch.bfloat16, "cuda")
        first = attend(q, k, v, is_causal=shape.is_causal)
        for _ in range(4):
            assert all(
                torch.equal(a, b) for a, b in zip(attend(q, k, v, is_causal=shape.is_causal), first, strict=True)
            )


def test_two_streams_run_side_by_side():
    shape = Shape(1, 4, 2, 700, 900, 512)
    inputs = [make(shape, torch.bfloat16, "cuda", seed=seed)[:3] for seed in range(2)]
    expected = [attend(*x)[0] for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results = [[], []]
    for _, (i, stream) in itertools.product(range(20), enumerate(streams)):
        with torch.cuda.stream(stream):
            results[i].append(attend(*inputs[i])[0])
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for many, want in zip(results, expected, strict=True) for got in many)


def test_calls_that_triton_does_not_run_come_here_by_themselves():
    q, k, v, _ = make(Shape(1, 4, 2, 300, 500, 512), torch.bfloat16, "cuda")
    mask = torch.rand(300, 500, device="cuda") < 0.5
    out = ffpa_attn_func(q, k, v, attn_mask=mask, enable_gqa=True)
    assert torch.equal(out, attend(q, k, v, attn_mask=mask)[0])


@pytest.fixture
def older(monkeypatch, tmp_path):
    """Pretend that this GPU has the shared memory of an older one, no tensor copy engine, and fast fp16 sums."""
    arch = device_arch("cuda", 0)

    def pretend(kib: int) -> None:
        monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(tmp_path))
        monkeypatch.setitem(instantiate.ARCHS, arch, kib)
        monkeypatch.setattr(instantiate, "FAST_F16", (arch,))
        for module in (instantiate, dense):
            monkeypatch.setattr(module, "has_tma", lambda arch: False)
        forget()

    def forget() -> None:
        instantiate.tile_of.cache_clear()
        recipe.source_digest.cache_clear()
        kernels.forget()

    yield pretend
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("kib", [99, 163])
@pytest.mark.parametrize("head_dim", [320, 448, 512, 640, 1024])
def test_what_older_gpus_run_is_right_here(older, kib, head_dim):
    older(kib)
    for dtype, stages in ((torch.bfloat16, None), (torch.float16, 2 if kib == 99 else 3)):
        for shape in (Shape(1, 4, 2, 200, 333, head_dim, True), Shape(2, 1, 1, 65, 500, head_dim - 8)):
            q, k, v, _ = make(shape, dtype, "cuda", layout="bshd")
            out, lse = attend(q, k, v, CUDABackend(stages=stages), is_causal=shape.is_causal)
            oracle.check(q, k, v, out=out, lse=lse, is_causal=shape.is_causal)
    out, lse = attend(q, k, v, CUDABackend(acc="f16"))
    assert oracle.relative_error(out, oracle.attention(q, k, v).out) < F16_ERROR


CHILD = """
import sys, time, os
import torch
from ffpa_jit import ffpa_attn_func
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 200, 512, dtype=torch.bfloat16, device="cuda") for _ in range(3))
torch.cuda.synchronize()
start = time.perf_counter()
out = ffpa_attn_func(q, k, v, backend="cuda")
torch.cuda.synchronize()
print("seconds", time.perf_counter() - start)
print("sum", out.double().sum().item(), "nan", int(out.isnan().sum()))
"""


def children(count: int, cache: Path, **environment: str) -> list[dict[str, float]]:
    """Run `count` processes of CHILD at once on one cache; what each printed."""
    env = {**os.environ, "FFPA_JIT_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command, pipe = [sys.executable, "-c", CHILD], subprocess.PIPE
    running = [subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) for _ in range(count)]
    results = []
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        words = out.split()
        results.append(dict(zip(words[::2], map(float, words[1::2]), strict=True)))
    return results


def test_eight_processes_on_a_cold_cache_build_once(tmp_path):
    results = children(8, tmp_path / "cache")
    assert len({result["sum"] for result in results}) == 1
    assert not any(result["nan"] for result in results)
    assert len(list((tmp_path / "cache").glob("**/meta.json"))) == 1


def test_with_an_empty_path_nvrtc_compiles_it_and_the_bits_are_those_of_a_correct_kernel(tmp_path):
    (tmp_path / "empty").mkdir()
    alone = children(1, tmp_path / "a", FFPA_JIT_COMPILER="nvrtc", PATH=str(tmp_path / "empty"))[0]
    here = children(1, tmp_path / "b")[0]
    assert not alone["nan"]
    assert alone["sum"] == pytest.approx(here["sum"], abs=0.5)
    again = children(1, tmp_path / "a", PATH=str(tmp_path / "empty"))[0]
    assert again["sum"] == alone["sum"]
    assert again["seconds"] < 1.0
