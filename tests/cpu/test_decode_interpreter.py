"""Attention of few query rows through the interpreter, in fp16, against the oracle: every option, alone and crossed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import oracle, philox
from tests.cases.shapes import LAYOUTS, MaskKind, Shape, make, make_mask, tensor

pytest.importorskip("triton")

from ffpa_jit.triton import decode
from ffpa_jit.triton.configs import DecodeTiling
from ffpa_jit.triton.terms import Terms

HALF = torch.float16
FOLDED = DecodeTiling(rows=16, block_n=32, fold=4, warps=4, stages=1, per_processor=8)
NARROW = replace(FOLDED, block_n=16, fold=8, warps=8)
PLAIN = replace(FOLDED, rows=64, fold=1)
WIDE = replace(FOLDED, rows=32, block_n=64)
TILINGS = {"folded": FOLDED, "narrow": NARROW, "plain": PLAIN, "wide": WIDE}
RNG = torch.tensor([-5_000_000_000_123, 2**33 + 4], dtype=torch.int64)


def attend(
    shape, q, k, v, *, tiling=FOLDED, splits=None, cap=1 << 30, scale=None, mask=None, dropout_p=0.0,
    window=(-1, -1), softcap=0.0,
):  # fmt: skip
    """(out, lse), held to the oracle."""
    scale = shape.head_dim**-0.5 if scale is None else scale
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    rng = RNG if dropout_p else None
    terms = Terms(scale, shape.is_causal, window, softcap, mask, dropout_p, rng)
    out, lse = decode.run(q, k, v, terms, arch="interpreter", cap=cap, tiling=tiling, splits=splits)
    kept = philox.kept(RNG, (shape.batch, shape.heads_q, shape.len_q, shape.len_kv), dropout_p) if dropout_p else None
    oracle.check(
        q, k, v, out=out, lse=lse, is_causal=shape.is_causal, scale=scale, attn_mask=mask, kept=kept, window=window,
        softcap=softcap,
    )  # fmt: skip
    return out, lse


SHAPES = [
    (Shape(1, 1, 1, 1, 1, 264), "folded"),
    (Shape(1, 2, 2, 1, 301, 320), "wide"),
    (Shape(2, 3, 1, 1, 77, 512), "folded"),
    (Shape(1, 8, 1, 1, 130, 1024), "narrow"),
    (Shape(1, 16, 1, 2, 95, 264), "wide"),
    (Shape(1, 3, 1, 20, 64, 320), "plain"),
    (Shape(1, 2, 1, 5, 131, 456, True), "folded"),
    (Shape(1, 8, 2, 9, 53, 264, True), "narrow"),
    (Shape(1, 16, 1, 2, 70, 904), "plain"),
    (Shape(1, 1, 1, 20, 20, 320, True), "folded"),
]


@pytest.mark.parametrize(("shape", "tiling"), SHAPES, ids=str)
def test_results_match_the_oracle(shape, tiling):
    q, k, v, _ = make(shape, HALF)
    attend(shape, q, k, v, tiling=TILINGS[tiling], splits=3)


@pytest.mark.parametrize("splits", [1, 2, 18])
@pytest.mark.parametrize("shape", [Shape(1, 2, 2, 3, 333, 320), Shape(1, 4, 1, 3, 333, 320, True)], ids=str)
def test_any_number_of_parts_gives_the_same_attention(shape, splits):
    q, k, v, _ = make(shape, HALF)
    attend(shape, q, k, v, splits=splits)


def test_the_default_configuration_and_split_are_taken_from_the_shape():
    shape = Shape(1, 4, 1, 3, 800, 264)
    q, k, v, _ = make(shape, HALF)
    terms = Terms(264**-0.5)
    results = [decode.forward(q, k, v, terms, arch="interpreter", cap=cap) for cap in (1 << 30, 0)]
    for out, lse in results:
        oracle.check(q, k, v, out=out, lse=lse)
    torch.testing.assert_close(*(lse for _, lse in results))


def test_the_error_is_that_of_rounding_the_output():
    shape = Shape(1, 8, 1, 1, 700, 512)
    q, k, v, _ = make(shape, HALF)
    out, _ = attend(shape, q, k, v, splits=3)
    exact = oracle.attention(q, k, v).out.reshape(out.shape)
    assert oracle.relative_error(out, exact) < 1.02 * oracle.relative_error(exact.to(HALF), exact)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "contiguous"])
def test_any_strides_go_in_and_the_output_keeps_the_layout(layout):
    shape = Shape(2, 4, 2, 2, 70, 264)
    q, k, v, _ = make(shape, HALF, layout=layout)
    for splits in (1, 2):
        out, _ = attend(shape, q, k, v, splits=splits)
        assert out.stride() == torch.empty_like(q).stride()


def test_each_tensor_may_have_its_own_layout():
    shape = Shape(2, 4, 2, 3, 40, 264)
    q = tensor("bshd", 2, 4, 3, 264, dtype=HALF)
    k, v = tensor("last_stride", 2, 2, 40, 264, dtype=HALF), tensor("sliced", 2, 2, 40, 264, dtype=HALF)
    attend(shape, q, k, v, splits=2)


def test_empty_tensors_give_empty_or_zero_results():
    for shape in (Shape(0, 2, 1, 1, 9, 320), Shape(1, 2, 1, 0, 9, 320), Shape(1, 2, 1, 3, 0, 320)):
        q, k, v, _ = make(shape, HALF)
        out, lse = decode.forward(q, k, v, Terms(1.0), arch="interpreter", cap=1 << 30)
        assert out.shape == q.shape
        assert (out == 0).all()
        assert torch.isneginf(lse).all()


MASKS = [
    MaskKind("bool", "k"),
    MaskKind("bool", "bk", "right"),
    MaskKind("bool", "bhqk", "empty_rows"),
    MaskKind("bool", "qk", "all"),
    MaskKind("bool", "hk", layout="expanded"),
    MaskKind("half", "bhqk"),
    MaskKind("half", "hq", "values"),
    MaskKind("half", "qk", "minimum", "transposed"),
    MaskKind("fp32", "bqk", "low", "sliced"),
    MaskKind("fp32", "k", "minimum"),
    MaskKind("half", "qk", "empty_rows", "few_dims"),
]


@pytest.mark.parametrize(("splits", "mask"), [(1 + 2 * (i % 2), mask) for i, mask in enumerate(MASKS)], ids=str)
def test_masks_of_any_kind(mask, splits):
    shape = Shape(2, 4, 2, 7, 65, 264)
    q, k, v, _ = make(shape, HALF)
    attend(shape, q, k, v, mask=make_mask(mask, shape, HALF), splits=splits)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (5, -1), (-1, 3), (40, 2)])
def test_windows_bound_the_keys_that_are_read(window, causal):
    shape = Shape(1, 2, 1, 6, 150, 264, causal)
    q, k, v, _ = make(shape, HALF)
    first, last = 150 - 6 - window[0], 150 - 6 + 5 + (0 if causal else window[1])
    hidden = torch.zeros(150, dtype=torch.bool)
    if window[0] >= 0:
        hidden[: max(first, 0) // 32 * 32] = True
    if causal or window[1] >= 0:
        hidden[-(-(last + 1) // 32) * 32 :] = True
    poisoned = [torch.where(hidden[:, None], math.nan, x) for x in (k, v)]
    terms = Terms(264**-0.5, causal, window)
    for splits in (1, 3):
        out, lse = attend(shape, q, k, v, window=window, splits=splits)
        again = decode.run(q, *poisoned, terms, arch="interpreter", cap=1 << 30, tiling=FOLDED, splits=splits)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def test_rows_without_keys_give_zero():
    shape = Shape(1, 2, 1, 20, 8, 264)  # a window that ends before the first key, as a shard of a sequence has it
    q, k, v, _ = make(shape, HALF)
    for splits in (1, 2):
        out, lse = attend(shape, q, k, v, window=(3, 3), splits=splits)
        assert torch.isneginf(lse[0, :, 0]).all()
        assert (out[0, :, 0] == 0).all()


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap):
    shape = Shape(1, 4, 2, 3, 100, 264, True)
    q, k, v, _ = make(shape, HALF)
    attend(shape, q, k, v, softcap=softcap, scale=0.5, splits=3)


@pytest.mark.parametrize("tiling", [FOLDED, NARROW, WIDE], ids=["32", "16", "64"])
@pytest.mark.parametrize(("dropout_p", "splits"), [(0.1, 3), (0.75, 1), (0.9999, 2)])
def test_dropout_follows_the_documented_stream(dropout_p, splits, tiling):
    shape = Shape(2, 4, 2, 2, 100, 264)
    q, k, v, _ = make(shape, HALF)
    attend(shape, q, k, v, dropout_p=dropout_p, tiling=tiling, splits=splits)


@pytest.mark.parametrize("order", [1, 100, 10_000])
def test_scores_of_any_order_stay_exact(order):
    shape = Shape(1, 2, 1, 3, 200, 264)
    q, k, v, _ = make(shape, HALF)
    attend(shape, q, k, v, scale=order * 264**-0.5, splits=4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_is_not_finite_spoils_only_its_own_row(value):
    shape = Shape(1, 4, 1, 3, 100, 264)
    q, k, v, _ = make(shape, HALF)
    q[0, 2, 1, 7] = value
    for splits in (1, 3):
        terms = Terms(1.0)
        out, _ = decode.run(q, k, v, terms, arch="interpreter", cap=1 << 30, tiling=FOLDED, splits=splits)
        spoiled = torch.zeros(1, 4, 3, dtype=torch.bool)
        spoiled[0, 2, 1] = True
        assert torch.equal(out.isnan().any(-1), spoiled)


def test_nan_beyond_the_last_key_never_leaks():
    store = torch.full((2, 1, 2, 128, 320), math.nan, dtype=HALF)
    k, v = store[:, :, :, :77].copy_(torch.randn(2, 1, 2, 77, 320)).unbind()
    shape = Shape(1, 4, 2, 2, 77, 320)
    attend(shape, torch.randn(1, 4, 2, 320, dtype=HALF), k, v, splits=2)


@settings(
    max_examples=8, deadline=None, database=None, phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(data=st.data())
def test_options_cross(data):
    pick = lambda values: data.draw(st.sampled_from(values))  # noqa: E731
    heads_kv, group = pick([1, 2]), pick([1, 3, 8])
    len_q = data.draw(st.integers(1, 20))
    shape = Shape(
        pick([1, 2]), heads_kv * group, heads_kv, len_q, len_q + data.draw(st.integers(0, 90)), pick([264, 320]),
        pick([False, True]),
    )  # fmt: skip
    q, k, v, _ = make(shape, HALF)
    mask = pick([None, *MASKS])
    attend(
        shape, q, k, v, tiling=pick(list(TILINGS.values())), splits=pick([1, 2, 5]),
        mask=None if mask is None else make_mask(mask, shape, HALF), dropout_p=pick([0.0, 0.0, 0.3]),
        window=pick([(-1, -1), (-1, -1), (7, -1), (20, 5)]), softcap=pick([0.0, 0.0, 5.0]),
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", range(264, 1025, 8))
def test_two_pieces_cover_the_head_dim(head_dim):
    first, second = decode.cover(head_dim)
    assert first < head_dim <= first + second
    assert second <= first
    assert second == 64 or head_dim > first + second // 2


def test_parts_fill_the_processors_and_keep_enough_keys():
    assert decode.count_splits(32, 32768, 264) == 33  # four even waves
    assert decode.count_splits(32, 8192, 264) == 8
    assert decode.count_splits(4, 131072, 264) == 132
    assert decode.count_splits(4, 1000, 264) == 3
    assert decode.count_splits(1, 1, 264) == 1
    assert decode.count_splits(5000, 1 << 20, 264) == 1
