"""Every option of the Triton backend crossed with every other on a GPU, and what only a GPU can show of them."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ffpa_jit import TritonBackend, ffpa_attn_func, ffpa_attn_varlen_func
from tests import oracle, philox
from tests.cases.options import (
    ALL,
    DENSE,
    VARLEN,
    Case,
    VarlenCase,
    dense_allowed,
    dense_case,
    drawn,
    pairwise,
    varlen_allowed,
    varlen_case,
)
from tests.cases.shapes import (
    MaskKind,
    Packed,
    Shape,
    far_apart,
    leaves,
    make,
    make_mask,
    make_packed,
    pack,
)
from tests.gpu.graphs import capture
from tests.gpu.memory import extra_memory

DTYPES = [torch.float16, torch.bfloat16]
BF16 = torch.bfloat16
WORKSPACE = 512 * 2**20

SIZES = {"dtype": DTYPES, "dim": [264, 512, 1024], "window": [ALL, (300, -1), (-1, 40), (100, 129), (0, 0)]}
LARGE_DENSE = {
    **DENSE, **SIZES, "heads": [(2, 2), (6, 1), (7, 1), (4, 2), (5, 5)],
    "lengths": [(1, 2500), (7, 1100), (70, 2000), (900, 300), (777, 777), (300, 1024)], "memory": [None, 0, 3],
}  # fmt: skip
LARGE_VARLEN = {
    **VARLEN, **SIZES, "heads": [(2, 2), (6, 1), (4, 2)], "times": [1, 7], "slack": [0, 50], "memory": [None, 16],
}  # fmt: skip


def dense_pairs() -> Iterator[object]:
    for choice in pairwise(LARGE_DENSE, dense_allowed, seed=2):
        dtype = choice.pop("dtype")
        case = dense_case(**choice)
        yield pytest.param(case, dtype, id=f"{case}-{dtype}")


def dense_combinations(count: int) -> Iterator[object]:
    """Random calls, each with two shapes: what a kernel is compiled for does not depend on lengths."""
    draw = random.Random(4)
    for i in range(count):
        choice = {name: draw.choice(values) for name, values in LARGE_DENSE.items()}
        dtype = choice.pop("dtype")
        choice["dim"] = draw.choice([264, 320, 320, 384, 512, 512, 520, 640, 768, 904, 1024])
        cases = []
        for _ in range(2):
            lengths = draw.choice([1, 2, 16, 33, 128, 129, 500, 1000, 1999]), draw.choice([1, 65, 128, 255, 1000, 2003])
            allowed = dense_allowed(**choice | {"lengths": lengths})
            cases.append(dense_case(**choice | {"lengths": lengths if allowed else lengths[::-1]}))
        yield pytest.param(cases, dtype, id=f"{i}-{cases[0]}-{dtype}")


def varlen_pairs() -> Iterator[object]:
    for choice in pairwise(LARGE_VARLEN, varlen_allowed, seed=3):
        dtype = choice.pop("dtype")
        case = varlen_case(**choice)
        yield pytest.param(case, dtype, id=f"{case}-{dtype}")


def varlen_combinations(count: int) -> Iterator[object]:
    draw = random.Random(5)
    for i in range(count):
        choice = {name: draw.choice(values) for name, values in LARGE_VARLEN.items()}
        dtype = choice.pop("dtype")
        longest = draw.choice([3, 40, 300, 1500])
        lens = [(draw.randint(0, longest), draw.randint(0, longest)) for _ in range(draw.randint(1, 12))]
        if draw.random() < 0.5:
            lens = [(q, q) for q, _ in lens]
        case = varlen_case(**choice)
        packed = Packed(
            tuple(q for q, _ in lens), tuple(k for _, k in lens), *choice["heads"], choice["dim"], choice["slack"]
        )
        same = packed.lens_q == packed.lens_k and not packed.slack
        case = VarlenCase(**vars(case) | {"packed": packed, "same": same})
        yield pytest.param(case, dtype, id=f"{i}-{case}-{dtype}")


@pytest.mark.parametrize(("case", "dtype"), list(dense_pairs()))
def test_every_two_options_go_together(case, dtype):
    case.run(dtype, "cuda")


@pytest.mark.parametrize(("cases", "dtype"), list(dense_combinations(60)))
def test_options_go_together_in_any_number(cases, dtype):
    for seed, case in enumerate(cases):
        case.run(dtype, "cuda", seed=seed)


@pytest.mark.parametrize(("case", "dtype"), list(varlen_pairs()))
def test_every_two_options_go_together_on_packed_sequences(case, dtype):
    case.run(dtype, "cuda")


@pytest.mark.parametrize(("case", "dtype"), list(varlen_combinations(30)))
def test_options_go_together_in_any_number_on_packed_sequences(case, dtype):
    case.run(dtype, "cuda")


# Masks.


@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.parametrize("what", ["half", "fp32"])
@pytest.mark.parametrize("dims", ["qk", "bqk", "hqk", "bk", "k", "hq", "h", ""])
def test_a_mask_gradient_is_summed_over_what_the_mask_broadcasts_over(dims, what, memory):
    shape = Shape(2, 4, 2, 700, 1000, 512)
    case = Case(shape, MaskKind(what, dims, "values"), with_lse=True, memory=memory)
    case.run(BF16, "cuda")


def test_the_gradient_of_a_large_shared_mask_is_right_and_the_same_every_time():
    shape = Shape(2, 8, 2, 3000, 3000, 512)
    q, k, v, do = make(shape, BF16, "cuda")
    mask = make_mask(MaskKind("half", "qk", "random"), shape, BF16, "cuda").requires_grad_()
    q, k, v = leaves(q, k, v)
    case = Case(shape)

    def gradients():
        out, _ = case.call(q, k, v, mask)
        return out, *torch.autograd.grad(out, (q, k, v, mask), do)

    out, *grads = first = gradients()
    oracle.check(q, k, v, out=out, grads=grads[:3], grad_mask=grads[3], grad_out=do, attn_mask=mask)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first, strict=True))


def test_a_float_mask_that_is_causal_by_frames_trains_at_head_dim_1024():
    shape = Shape(1, 1, 1, 2560, 2560, 1024)
    frame = torch.arange(2560, device="cuda") // 512
    mask = torch.zeros(2560, 2560, dtype=BF16, device="cuda").masked_fill(frame[:, None] < frame, -math.inf)
    q, k, v, do = make(shape, BF16, "cuda")
    q, k, v = leaves(q, k, v)
    out, lse = Case(shape).call(q, k, v, mask)
    grads = torch.autograd.grad(out, (q, k, v), do)
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do, attn_mask=mask)


def test_many_batches_share_one_small_mask():
    shape = Shape(14_080, 1, 1, 16, 16, 512)
    q, k, v, do = make(shape, BF16, "cuda")
    mask = torch.ones(16, 16, dtype=torch.bool, device="cuda").tril()
    q, k, v = leaves(q, k, v)
    out, lse = Case(shape).call(q, k, v, mask)
    grads = torch.autograd.grad(out, (q, k, v), do)
    oracle.check(q, k, v, out=out, lse=lse, grads=grads, grad_out=do, attn_mask=mask)
    expected, _ = ffpa_attn_func(q, k, v, is_causal=True, backend="triton", return_lse=True)
    assert oracle.relative_error(out, expected) < 1e-3


@pytest.mark.parametrize("what", ["bool", "half"])
def test_mask_elements_beyond_two_to_the_31_are_reached(what):
    """Heads of the mask are 2^30 elements apart: the last of four starts at 3 * 2^30."""
    apart, length, dim = 2**30, 260, 512
    q, k, v = far_apart(apart, length, dim)
    values = torch.bool if what == "bool" else BF16
    store = torch.ones(3 * apart + length * length, dtype=values, device="cuda")
    mask = store.as_strided((1, 4, length, length), (4 * apart, apart, length, 1))
    mask.copy_(make_mask(MaskKind(what), Shape(1, 4, 4, length, length, dim), BF16, "cuda"))
    needed = leaves(q, k, v) if what == "bool" else (*leaves(q, k, v), mask.detach().requires_grad_())
    do = torch.randn(1, 4, length, dim, dtype=BF16, device="cuda")
    out, lse = Case(Shape(1, 4, 4, length, length, dim)).call(*needed[:3], mask if what == "bool" else needed[3])
    grads = torch.autograd.grad(out, needed, do)
    oracle.check(
        q, k, v, out=out, lse=lse, grads=grads[:3], grad_mask=grads[3] if what != "bool" else None, grad_out=do,
        attn_mask=mask,
    )  # fmt: skip


# Dropout.


def test_dropout_keeps_what_it_says_and_never_the_same_twice():
    q, k, _, _ = make(Shape(1, 2, 2, 512, 512, 512), torch.float16, "cuda")
    q, v = torch.zeros_like(q), torch.zeros_like(k)  # uniform probabilities 1 / 512
    index = torch.arange(512, device="cuda")
    v[:, :, index, index] = 512.0  # out[row, key] is what the probability was multiplied with
    first, second = (ffpa_attn_func(q, k, v, dropout_p=0.25, backend="triton") for _ in range(2))
    share = (first == 0).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / first.numel())
    assert abs(first[first != 0].double().mean().item() - 1 / 0.75) < 1e-3
    assert not torch.equal(first, second)
    assert abs(((first == 0) & (second == 0)).double().mean().item() - 0.0625) < 2e-3
    assert (first == 0).double().mean(-1).std().item() < 2 * math.sqrt(0.25 * 0.75 / 512)


@pytest.mark.parametrize("kind", ["dense", "fused", "varlen"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_dropout_bit_by_bit(use_reentrant, kind):
    shape = Shape(1, 4, 2, 300, 300, 512)
    q, k, v, do = make(shape, BF16, "cuda")
    memory = 0 if kind == "fused" else None

    def block(q, k, v):
        q = q * 2
        if kind != "varlen":
            return ffpa_attn_func(
                q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True, backend=TritonBackend(workspace_mb=memory)
            )
        cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out = ffpa_attn_varlen_func(q, k, v, cu, cu, 200, 200, dropout_p=0.3, causal=True, enable_gqa=True)
        return out.transpose(0, 1)[None]

    results = []
    for call in (block, lambda *x: checkpoint(block, *x, use_reentrant=use_reentrant)):
        a, b, c = leaves(q, k, v)
        torch.manual_seed(11)
        out = call(a, b, c)
        out.backward(do)  # what reentrant checkpoints know
        results.append((out, a.grad, b.grad, c.grad))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    a, b, c = leaves(q, k, v)
    assert not torch.equal(block(a, b, c), results[0][0])  # another draw is another result


def test_a_call_advances_the_generator_once_whatever_its_size():
    states = []
    for length in (0, 64, 1500):
        torch.manual_seed(3)
        if length:
            q, k, v, _ = make(Shape(1, 2, 2, length, length, 512), BF16, "cuda", seed=3)
            torch.manual_seed(3)
            a, b, c = leaves(q, k, v)
            ffpa_attn_func(a, b, c, dropout_p=0.5, backend="triton").sum().backward()
        states.append(torch.cuda.get_rng_state())
    assert not torch.equal(states[0], states[1])
    assert torch.equal(states[1], states[2])


def test_a_captured_graph_draws_anew_at_every_replay_and_its_backward_agrees():
    shape = Shape(1, 2, 2, 512, 512, 512)
    q, k, _, do = make(shape, torch.float16, "cuda")
    q, v = torch.zeros_like(q), torch.zeros_like(k)
    index = torch.arange(512, device="cuda")
    v[:, :, index, index] = 512.0  # out is what dropout multiplied with
    q, k, v = leaves(q, k, v)

    def step():
        out = ffpa_attn_func(q, k, v, dropout_p=0.25, backend="triton")
        return out, *torch.autograd.grad(out, (q, k, v), do)

    graph, captured = capture(step)
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        out, *grads = (x.clone() for x in captured)
        kept = torch.where(out == 0, 0.0, 65536 / 49152).double()
        oracle.check(q, k, v, out=out, grads=tuple(grads), grad_out=do, kept=kept)
        seen.append(out)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("memory", [None, 0])
def test_dropout_is_right_beyond_two_to_the_31_scores(memory):
    length, rows = 33_000, 8
    shape = Shape(1, 2, 2, length, length, 264)
    q, k, v, do = make(shape, BF16, "cuda")
    do[:, :, :-rows] = 0  # so that few rows make dK and dV
    q, k, v = leaves(q, k, v)
    with drawn("cuda") as words:
        out, lse = ffpa_attn_func(
            q, k, v, dropout_p=0.3, backend=TritonBackend(workspace_mb=memory), return_lse=True
        )  # fmt: skip
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    assert not dq[:, :, :-rows].any()
    for head in range(2):
        h, last = slice(head, head + 1), slice(-rows, None)
        kept = philox.kept(words, (1, 1, rows, length), 0.3, first_row=length - rows, first_line=head)
        oracle.check(
            q[:, h, last], k[:, h], v[:, h], out=out[:, h, last], lse=lse[:, h, last],
            grads=(dq[:, h, last], dk[:, h], dv[:, h]), grad_out=do[:, h, last], kept=kept,
        )  # fmt: skip


# Packed sequences.


def test_eighty_thousand_short_documents_run():
    documents, length, dim = 80_000, 16, 264
    packed = Packed((length,) * documents, (length,) * documents, 2, 1, dim)
    case = VarlenCase(packed, is_causal=True, with_lse=True)
    q, k, v, do, cu, _ = make_packed(packed, BF16, "cuda")
    do_lse = torch.randn(2, len(q), device="cuda")
    rows = leaves(q, k, v)
    out, lse = case.call(*rows, cu, None)
    grads = torch.autograd.grad((out, lse), rows, (do, do_lse))

    def by_document(x):
        return x.view(documents, length, -1, dim).transpose(1, 2)

    chosen = torch.cat([torch.arange(300), torch.randint(documents, (1000,)), torch.arange(documents - 300, documents)])
    chosen = chosen.to("cuda")
    oracle.check(
        *(by_document(x)[chosen] for x in (q, k, v)), out=by_document(out)[chosen],
        lse=lse.view(2, documents, length).transpose(0, 1)[chosen], is_causal=True,
        grads=tuple(by_document(x)[chosen] for x in grads), grad_out=by_document(do)[chosen],
        grad_lse=do_lse.view(2, documents, length).transpose(0, 1)[chosen],
    )  # fmt: skip
    dense = ffpa_attn_func(
        *(by_document(x) for x in (q, k, v)), is_causal=True, enable_gqa=True, backend="triton"
    )  # fmt: skip
    difference, size = (by_document(out).float() - dense.float()).flatten(1), dense.float().flatten(1)
    worst = difference.norm(dim=1) / size.norm(dim=1)
    assert worst.max() < 1e-2


@pytest.mark.parametrize("is_causal", [False, True])
def test_hundreds_of_tiny_documents_of_uneven_lengths_match_the_oracle(is_causal):
    draw = random.Random(9)
    lens_q, lens_k = (tuple(draw.randint(0, 9) for _ in range(700)) for _ in range(2))
    case = VarlenCase(Packed(lens_q, lens_k, 6, 2, 512, slack=5), is_causal=is_causal, dropout_p=0.1, with_lse=True)
    case.run(BF16, "cuda", only={*range(20), *range(340, 360), *range(680, 700)})


@pytest.mark.parametrize("kind", ["ordinary", "one_long"])
def test_documents_of_a_packed_training_batch_match_the_oracle(kind):
    lens = (2048, 1900, 2300, 1, 1800, 143) if kind == "ordinary" else (3, 6000, 2)
    case = VarlenCase(Packed(lens, lens, 8, 1, 512, slack=17), is_causal=True, with_lse=True)
    case.run(BF16, "cuda")


def test_a_bound_on_the_lengths_that_is_far_too_large_changes_nothing():
    packed = pack("several", 4, 2, 512, times=5)
    q, k, v, do, cu_q, cu_k = make_packed(packed, BF16, "cuda")
    results = []
    for longest in (packed.max_q, 10**6, None):
        rows = leaves(q, k, v)
        out, lse = ffpa_attn_varlen_func(
            *rows, cu_q, cu_k, longest, longest, causal=True, enable_gqa=True, return_lse=True
        )
        results.append((out, lse, *torch.autograd.grad(out, rows, do)))
    for other in results[1:]:
        for x, y in zip(other, results[0], strict=True):
            assert oracle.relative_error(x, y) < 2e-3


def test_packed_memory_stays_within_the_results_and_the_workspace():
    lens = (8192,) * 4 + (16,) * 2000
    packed = Packed(lens, lens, 16, 2, 512)
    q, k, v, do, cu, _ = make_packed(packed, BF16, "cuda")
    rows = leaves(q, k, v)
    case = VarlenCase(packed, is_causal=True)
    (out, _), over = extra_memory(lambda: case.call(*rows, cu, None))
    assert over <= WORKSPACE + 2**21, f"forward: {over / 2**20:.0f} MiB beside the results"
    _, over = extra_memory(lambda: torch.autograd.grad(out, rows, do))
    assert over <= WORKSPACE + 2**21, f"backward: {over / 2**20:.0f} MiB beside the results"


# Few queries.

DECODE = [
    Shape(1, 32, 32, 1, 32_768, 512),
    Shape(8, 32, 4, 1, 8192, 512),
    Shape(1, 32, 4, 1, 131_072, 512),
    Shape(1, 32, 4, 8, 32_768, 512, True),
    Shape(1, 8, 1, 8, 8, 512, True),
    Shape(2, 8, 2, 1, 1, 264),
    Shape(1, 16, 1, 4, 777, 512, True),
    Shape(1, 64, 1, 1, 5000, 1024),
    Shape(1, 48, 1, 2, 9000, 640),
    Shape(1, 4, 1, 33, 4097, 512, True),
    Shape(1, 7, 1, 5, 130, 320),
    Shape(3, 12, 1, 3, 2049, 904, True),
    Shape(1, 1, 1, 1, 1_000_003, 512),
    Shape(1, 8, 1, 1, 1_000_000, 264),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_few_queries_are_as_exact_as_sdpa(shape, dtype):
    q, k, v, _ = make(shape, dtype, "cuda")
    out, lse = Case(shape).call(q, k, v)
    oracle.check(q, k, v, out=out, lse=lse, is_causal=shape.is_causal)
    exact = oracle.attention(q, k, v, is_causal=shape.is_causal).out
    repeated = (x.repeat_interleave(shape.heads_q // shape.heads_kv, 1) for x in (k, v))
    mask = None
    if shape.is_causal:
        mask = oracle.visible(torch.arange(shape.len_q, device="cuda"), shape.len_q, shape.len_kv)
    theirs = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask)
    assert oracle.relative_error(out, exact) <= 1.15 * oracle.relative_error(theirs, exact)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": MaskKind("bool", "bk", "right")},
        {"mask": MaskKind("half", "hk", "values")},
        {"mask": MaskKind("fp32", "bhqk", "minimum", "transposed")},
        {"mask": MaskKind("bool", "bk", "all")},
        {"window": (1000, -1)},
        {"window": (5000, 3)},
        {"softcap": 5.0},
        {"dropout_p": 0.4},
        {"mask": MaskKind("bool", "bqk", "random"), "window": (9000, 0), "softcap": 20.0, "dropout_p": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "shape",
    [Shape(2, 8, 1, 1, 20_001, 512), Shape(2, 6, 2, 9, 8192, 320, True), Shape(1, 4, 4, 2, 3000, 1024)],
    ids=str,
)
def test_few_queries_take_every_option(shape, options):
    Case(shape, needs="", **options).run(BF16, "cuda")
    Case(shape, with_lse=True, **options).run(BF16, "cuda")


def test_repeated_calls_of_few_queries_give_the_same_bits():
    q, k, v, _ = make(Shape(1, 32, 4, 1, 50_000, 512), BF16, "cuda")
    first = ffpa_attn_func(q, k, v, enable_gqa=True, backend="triton", return_lse=True)
    for _ in range(5):
        again = ffpa_attn_func(q, k, v, enable_gqa=True, backend="triton", return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


# Memory.


@pytest.mark.parametrize("memory", [None, 100, 0])
def test_padding_and_dropout_need_no_memory_but_the_workspace(memory):
    """A row of padding and is_causal at a length whose full mask would take 3.6 GB."""
    length = 60_000
    shape = Shape(1, 2, 1, length, length, 512, True)
    q, k, v, do = make(shape, BF16, "cuda")
    mask = (torch.arange(length, device="cuda") < length - 1234).view(1, 1, 1, length)
    rows = leaves(q, k, v)
    case = Case(shape, dropout_p=0.1, memory=memory)
    cap = (512 if memory is None else memory) * 2**20
    (out, _), over = extra_memory(lambda: case.call(*rows, mask))
    assert over <= cap + 2**20, f"forward: {over / 2**20:.0f} MiB beside the results"
    # Row sums and what else is of the size of the queries' rows is not workspace.
    _, over = extra_memory(lambda: torch.autograd.grad(out, rows, do))
    assert over <= cap + 2**22, f"backward: {over / 2**20:.0f} MiB beside the results"


def test_a_mask_gradient_needs_no_memory_but_the_workspace():
    length = 16_384
    shape = Shape(1, 8, 2, length, length, 512)
    q, k, v, do = make(shape, BF16, "cuda")
    mask = torch.randn(1, 1, length, length, dtype=BF16, device="cuda").requires_grad_()
    rows = (*leaves(q, k, v), mask)
    case = Case(shape)
    (out, _), over = extra_memory(lambda: case.call(*rows))
    assert over <= WORKSPACE + 2**20, f"forward: {over / 2**20:.0f} MiB beside the results"
    _, over = extra_memory(lambda: torch.autograd.grad(out, rows, do))
    assert over <= WORKSPACE + 2**22, f"backward: {over / 2**20:.0f} MiB beside the results"


@pytest.mark.parametrize("device", range(1, 2))
def test_dropout_runs_on_another_device_than_the_current_one(device):
    if torch.cuda.device_count() <= device:
        pytest.skip("one GPU")
    with drawn(f"cuda:{device}") as words:
        q, k, v, _ = make(Shape(1, 2, 1, 200, 300, 512), BF16, f"cuda:{device}")
        out, lse = ffpa_attn_func(q, k, v, dropout_p=0.3, enable_gqa=True, backend="triton", return_lse=True)
    oracle.check(q, k, v, out=out, lse=lse, kept=philox.kept(words, (1, 2, 200, 300), 0.3))


def test_the_first_launch_of_a_thread_may_be_ours():
    """A thread has no CUDA context before its first call of the runtime, and a cached block of memory needs none."""
    q, k, v, _ = make(Shape(1, 2, 1, 300, 300, 512), BF16, "cuda")
    expected = ffpa_attn_func(q, k, v, enable_gqa=True, backend="triton")
    torch.cuda.synchronize()
    found = []

    def run() -> None:
        try:
            found.append(ffpa_attn_func(q, k, v, enable_gqa=True, backend="triton"))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert isinstance(found[0], torch.Tensor), found[0]
    assert torch.equal(found[0], expected)
