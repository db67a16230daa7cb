"""The CuTe-DSL forward against the oracle, for sm_90: every instantiation, and sizes that only a GPU can hold."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable

import pytest
import torch

from ffpa_jit.cute.spec import served_by
from tests import oracle
from tests.cases.shapes import EMPTY, LARGE, Shape, far_apart, gemma_like, late_maximum, make
from tests.gpu.cute import BF16, DTYPES, attend, on_hopper, run_and_check, same
from tests.gpu.random_calls import random_call

pytestmark = on_hopper

SERVED = [head_dim for head_dim in (264, 320, 328, 384, 448, 456, 512, 520, 576, 584, 640) if served_by(head_dim)]
# Both dtypes at 512 and at a head dim that ends within a box; the others are the same code with other numbers.
MATRIX = [(head_dim, dtype) for head_dim in SERVED for dtype in DTYPES if dtype == BF16 or head_dim in (264, 512)]
every_kind = pytest.mark.parametrize(("head_dim", "dtype"), MATRIX, ids=str)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# Results.


@every_kind
@pytest.mark.parametrize("is_causal", [False, True])
def test_all_lengths_and_groups_match_the_oracle(head_dim, dtype, is_causal):
    groups, batches = itertools.cycle((1, 2, 3, 7, 8)), itertools.cycle((1, 2, 1))
    for len_q, len_kv in itertools.product((1, 63, 64, 65, 127, 129, 300), (1, 64, 65, 500, 1023)):
        if is_causal and len_kv < len_q:
            continue
        group, batch = next(groups), next(batches)
        q, k, v, _ = make(Shape(batch, 2 * group, 2, len_q, len_kv, head_dim), dtype, "cuda", seed=len_q + len_kv)
        run_and_check(q, k, v, is_causal=is_causal)


@both_dtypes
@pytest.mark.parametrize("shape", [each for each in LARGE + EMPTY if served_by(each.head_dim)], ids=str)
def test_large_and_empty_shapes_match_the_oracle(shape, dtype):
    q, k, v, _ = make(shape, dtype, "cuda")
    run_and_check(q, k, v, is_causal=shape.is_causal)


TILES = [
    Shape(1, 74, 74, 300, 400, 512),  # several tiles a cluster
    Shape(2, 80, 10, 333, 500, 512, True),
    Shape(3, 50, 50, 130, 130, 320, True),
    Shape(1, 200, 200, 65, 100, 384),  # one tile a head
    Shape(1, 20, 20, 300, 2000, 512, True),  # the heads do not all fit in L2: several sections, the last one smaller
    Shape(1, 2, 2, 300, 9000, 512),
    Shape(1, 1, 1, 40, 5000, 512),  # fewer tiles than clusters
    Shape(1, 3, 1, 130, 700, 448, True),
    Shape(1, 133, 133, 1, 70, 512),
    Shape(1, 134, 67, 129, 200, 576, True),
    Shape(2, 70, 35, 130, 333, 640, True),
]


@pytest.mark.parametrize("shape", [each for each in TILES if served_by(each.head_dim)], ids=str)
def test_any_number_of_tiles_is_shared_out_among_the_clusters(shape):
    q, k, v, _ = make(shape, BF16, "cuda")
    run_and_check(q, k, v, is_causal=shape.is_causal)


def test_two_hundred_random_calls_match_the_oracle():
    """Other ones every time; FFPA_CUTE_SEED repeats those of a failure."""
    seed = int(os.environ.get("FFPA_CUTE_SEED") or random.SystemRandom().getrandbits(31))
    draw = random.Random(seed)
    for i in range(200):
        call = random_call(draw)
        q, k, v = call.inputs("cuda")
        try:
            out, _ = run_and_check(q, k, v, is_causal=call.shape.is_causal, scale=call.scale)
            assert out.stride() == torch.empty_like(q).stride()
        except Exception as error:
            raise AssertionError(f"call {i} of FFPA_CUTE_SEED={seed}: {call}: {error}") from error


@every_kind
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.05, 1.0, 3e-5])
def test_any_scale_is_right(head_dim, dtype, scale):
    for is_causal in (False, True):
        q, k, v, _ = make(Shape(1, 6, 2, 100, 333, head_dim), dtype, "cuda")
        run_and_check(q, k, v, is_causal=is_causal, scale=scale)


@both_dtypes
@pytest.mark.parametrize("factor", [8, 20, 1 / 64])
@pytest.mark.parametrize("head_dim", SERVED)
def test_scores_of_any_size_stay_exact(head_dim, factor, dtype):
    for is_causal in (False, True):
        q, k, v, _ = make(Shape(1, 4, 2, 200, 700, head_dim), dtype, "cuda")
        run_and_check(q * factor, k * factor, v * factor, is_causal=is_causal)


@both_dtypes
@pytest.mark.parametrize("step", [5, 12, 60, 500])
@pytest.mark.parametrize("shape", [Shape(1, 2, 2, 700, 1000, 512), Shape(1, 2, 1, 1000, 1000, 320, True)], ids=str)
def test_rows_whose_maximum_moves_late_stay_exact(shape, step, dtype):
    q, k, v, _ = late_maximum(shape, dtype, "cuda", step=step)
    run_and_check(q, k, v, is_causal=shape.is_causal)


def levels(head_dim: int, dtype: torch.dtype, heights: torch.Tensor, *, rows: int = 200):
    """Inputs whose scores in block j of 64 keys lie about `heights[j]`; of every other query, the negative of that."""
    q, k, v, _ = make(Shape(1, 2, 1, rows, 64 * len(heights) - 7, head_dim), dtype, "cuda")
    gain = (head_dim**0.5 / 8) ** 0.5
    signs = torch.where(torch.arange(rows, device="cuda") % 2 == 0, 1.0, -1.0)
    q, k = q.float(), k.float()
    q[..., :8] += gain * signs[:, None]
    k[..., :8] += gain * heights.to("cuda").repeat_interleave(64)[: k.shape[2], None]
    return q.to(dtype), k.to(dtype), v


@every_kind
def test_a_maximum_that_rises_in_every_block_or_goes_up_and_down_stays_exact(head_dim, dtype):
    """The output so far is rescaled in every block, in some, or for some rows of a warp only."""
    count = 12
    blocks = torch.arange(count).float()
    down_and_up = torch.tensor([0.0, 30, -30, 31, 60, 5, 61, 90, 0, 0, 97, 98])
    for heights in (20 * blocks, 6 * blocks, -20 * blocks, 4 * blocks, down_and_up, -down_and_up):
        q, k, v = levels(head_dim, dtype, heights)
        run_and_check(q, k, v)
        run_and_check(q[:, :1], k, v, is_causal=True)


@every_kind
def test_equal_scores_average_the_values(head_dim, dtype):
    q, k, v, _ = make(Shape(1, 6, 2, 130, 300, head_dim), dtype, "cuda")
    out, lse = run_and_check(torch.zeros_like(q), k, v)
    assert oracle.relative_error(out, v.double().mean(2, keepdim=True).repeat_interleave(3, 1).expand(out.shape)) < 4e-3
    assert (lse.double() - math.log(300)).abs().max() < 1e-5
    run_and_check(q, k[:, :, :1].expand(k.shape), v, is_causal=True)
    ones = torch.ones_like(v)
    for is_causal in (False, True):  # the sum is of the probabilities as they were rounded, up to that rounding
        assert (attend(q, k, ones, is_causal=is_causal)[0].double() - 1).abs().max() < 4e-3


@both_dtypes
@pytest.mark.parametrize("shape", [Shape(1, 8, 1, 1000, 1000, 512, True), Shape(1, 4, 2, 500, 900, 512)], ids=str)
def test_gemma_like_inputs_with_scale_one_stay_exact(shape, dtype):
    q, k, v, _ = gemma_like(shape, dtype, "cuda")
    run_and_check(q, k, v, is_causal=shape.is_causal, scale=1.0)


# What is not finite.


@both_dtypes
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_not_finite_goes_as_far_as_in_the_math_path(which, value, dtype):
    tensors = make(Shape(2, 4, 2, 100, 200, 512), dtype, "cuda")[:3]
    tensors[which][0, 1, 70, 9] = value
    out, lse = attend(*tensors)
    q, k, v = (x.double().repeat_interleave(4 // x.shape[1], 1) for x in tensors)
    scores = q @ k.mT * 512**-0.5
    exact = scores.softmax(-1) @ v
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(test(out), test(exact)), test.__name__
    assert torch.equal(lse.isfinite(), scores.logsumexp(-1).isfinite())
    assert not torch.isneginf(lse).any(), "-inf says that a row has no keys"
    finite = exact.isfinite()
    assert oracle.relative_error(out[finite], exact[finite]) < 1e-2
    spoiled = (~finite).any(-1)
    if which == 0:
        assert spoiled.nonzero().tolist() == [[0, 1, 70]]
    else:
        assert not spoiled[1].any()
        assert not spoiled[0, :2].any()
        assert spoiled[0, 2:].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_causality_hides_spoils_no_earlier_tile_and_as_a_key_no_earlier_row(value):
    q, k, v, _ = make(Shape(2, 2, 1, 300, 300, 512), BF16, "cuda")
    clean = attend(q, k, v, is_causal=True)
    for which, safe in ((k, 200), (v, 128)):
        kept = which[0, 0, 200].clone()
        which[0, 0, 200] = value
        found = attend(q, k, v, is_causal=True)
        which[0, 0, 200] = kept
        assert same((x[:, :, :safe] for x in found), (x[:, :, :safe] for x in clean))
        assert same((x[1] for x in found), (x[1] for x in clean))
        assert not found[0][0, :, 200:].isfinite().all(-1).any()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", SERVED)
def test_nan_beyond_the_last_key_row_or_column_never_leaks(head_dim, is_causal):
    def window(heads, length):
        store = torch.full((1, heads, 1024, head_dim + 64), math.nan, dtype=BF16, device="cuda")
        store[:, :, :length, :head_dim] = torch.randn(1, heads, length, head_dim, device="cuda")
        return store[:, :, :length, :head_dim]

    run_and_check(window(2, 100), window(1, 131), window(1, 131), is_causal=is_causal)


# Layouts and memory.


def moved(x, shape, strides, offset=0):
    """`x` in memory of its own with these strides; what lies between holds NaN."""
    size = offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return x.new_full((size,), math.nan).as_strided(shape, strides, offset).copy_(x)


ARRANGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded heads": lambda x: x[:, :1].contiguous().expand(x.shape),
    "expanded batches": lambda x: x[:1].contiguous().expand(x.shape),
    "expanded heads and batches": lambda x: x[:1, :1].contiguous().expand(x.shape),
    "expanded rows": lambda x: x[:, :, :1].contiguous().expand(x.shape),
    "sliced": lambda x: torch.nn.functional.pad(x, (8, 16, 2, 3), value=math.nan)[:, :, 2:-3, 8:-16],
    "part of qkv": lambda x: torch.stack((x, x * math.nan), 3)[:, :, :, 0],
    "last stride": lambda x: x.mT.contiguous().mT,
    "odd rows": lambda x: torch.nn.functional.pad(x, (0, 3), value=math.nan)[..., :-3],
    "offset by one": lambda x: moved(x, x.shape, x.stride(), 1),
    "offset by eight": lambda x: moved(x, x.shape, x.stride(), 8),
    "odd heads": lambda x: moved(x, x.shape, (x.stride(0) + 30, x.stride(1) + 3, *x.stride()[2:])),
}
KINDS = [(head_dim, dtype) for head_dim, dtype in MATRIX if head_dim in (264, 512, 576, 640)]


@pytest.mark.parametrize(("head_dim", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ARRANGED)
def test_any_strides_go_in_and_change_no_bit(layout, is_causal, head_dim, dtype):
    tensors = make(Shape(2, 6, 2, 150, 333, head_dim), dtype, "cuda")[:3]
    views = [ARRANGED[layout](x) for x in tensors]
    expected = run_and_check(*(x.clone(memory_format=torch.contiguous_format) for x in views), is_causal=is_causal)
    found = attend(*views, is_causal=is_causal)
    assert same(found, expected)
    assert found[0].stride() == torch.empty_like(views[0]).stride()
    for alone in range(3):
        mixed = [views[i] if i == alone else views[i].contiguous() for i in range(3)]
        assert same(attend(*mixed, is_causal=is_causal), expected)


@pytest.mark.parametrize("layout", ["contiguous", "bshd"])
def test_single_batches_heads_and_rows_may_have_any_stride(layout):
    for shape in (Shape(1, 1, 1, 70, 90, 512), Shape(1, 4, 1, 1, 1, 512), Shape(1, 3, 3, 1, 130, 264)):
        q, k, v, _ = make(shape, BF16, "cuda", layout=layout)
        odd = [x.as_strided(x.shape, [s if n > 1 else 7 for n, s in zip(x.shape, x.stride(), strict=True)])
               for x in (q, k, v)]  # fmt: skip
        assert same(run_and_check(*odd), run_and_check(q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
def test_key_and_value_may_be_one_tensor(is_causal):
    q, k, _, _ = make(Shape(2, 8, 1, 333, 600, 512), BF16, "cuda")
    assert same(run_and_check(q, k, k, is_causal=is_causal), attend(q, k, k.clone(), is_causal=is_causal))
    assert same(attend(k, k, k, is_causal=True), run_and_check(k.clone(), k, k.clone(), is_causal=True))


# Size.


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_more_than_65535_batches_or_heads_run(axis):
    many = 65_537
    shape = Shape(many, 1, 1, 3, 5, 264) if axis == "batch" else Shape(1, many, many, 3, 5, 264)
    q, k, v, _ = make(shape, BF16, "cuda")
    run_and_check(q, k, v)


def test_offsets_beyond_two_to_the_31_elements_are_right():
    """Heads 2^30 elements apart: the last of four starts at 3 * 2^30."""
    q, k, v = far_apart(2**30, 260, 512)
    run_and_check(q, k, v, is_causal=True)


def test_more_than_two_to_the_31_elements_of_keys_are_right():
    length, last = 2**31 // 512 + 130, 100
    q = torch.randn(1, 1, 8, 512, dtype=BF16, device="cuda")
    k = torch.randn(1, 1, length, 512, dtype=BF16, device="cuda")
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[:, :, -last:, 0] = 120.0  # the last keys carry the weight: exp(42) each
    out, lse = attend(q, k, k)
    exact = oracle.attention(q, k[:, :, -2 * last :], k[:, :, -2 * last :])
    assert oracle.relative_error(out, exact.out) < 5e-3
    assert (lse.double() - exact.lse).abs().max() < 1e-3


def test_more_than_two_to_the_31_elements_of_queries_and_output_are_right():
    length = 2**31 // 512 + 130
    q = torch.randn(1, 1, length, 512, dtype=BF16, device="cuda")
    k, v = torch.randn(2, 1, 1, 70, 512, dtype=BF16, device="cuda")
    out, lse = attend(q, k, v)
    for part in (slice(0, 300), slice(length // 2, length // 2 + 300), slice(-300, None)):
        oracle.check(q[:, :, part], k, v, out=out[:, :, part], lse=lse[:, :, part])
