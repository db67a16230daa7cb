"""Packed documents: the tables against a plain model of them, and the kernels through the interpreter, in fp16."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import oracle, philox
from tests.cases.shapes import LENGTHS as LENGTHS_OF
from tests.cases.shapes import Packed, make_packed, pack
from tests.cpu import numpy_triton

pytest.importorskip("triton")

from ffpa_jit.triton import ragged
from ffpa_jit.triton.launch import Launcher
from ffpa_jit.triton.ragged import plan, run, tables
from ffpa_jit.triton.schedule import TILE
from ffpa_jit.triton.terms import UNLIMITED, Terms

HALF = torch.float16
QUICK = numpy_triton.kernels(tables.__file__)

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


# The tables


def limits(batch, lengths_q, lengths_k):
    """The packed keys [low, high) that each packed row sees."""
    seen, q0, k0 = {}, 0, 0
    for nq, nk in zip(lengths_q, lengths_k, strict=True):
        for r in range(nq):
            low, high = max(0, r + nk - nq - batch.left), min(nk, r + nk - nq + batch.right + 1)
            seen[q0 + r] = (k0 + low, k0 + high) if low < high else (0, 0)
        q0, k0 = q0 + nq, k0 + nk
    return seen


class Plan:
    """The tables of a plan as Python values."""

    def __init__(self, batch, rounds, cu_q, cu_k):
        self.batch, self.rounds, self.cu = batch, rounds, (cu_q, cu_k)
        self.t = t = run.fill(Launcher(cu_q.device), batch, rounds, cu_q, cu_k, interpreted=True)
        self.malformed, _, self.segments, self.row_tiles, self.key_tiles, self.slots, self.tasks = t.head.tolist()[:7]
        self.rows = t.row[: (batch.row_tiles + 1) * 16].view(-1, 16).tolist()
        self.keys = t.key[: (batch.key_tiles + 1) * 16].view(-1, 16).tolist()
        self.chunks = t.chunk[: (rounds.chunks + 1) * 8].view(-1, 8).tolist()

    def expand(self, c):
        """[(row tile, key tile)] of a chunk, and its rows' limits."""
        t = self.t
        run.expand(Launcher(self.cu[0].device), t, self.batch, self.rounds, *self.cu, c)
        count = self.chunks[c + 1][1] - self.chunks[c][1]
        assert count <= self.rounds.tasks
        pairs = zip(t.task[:count].tolist(), t.task[t.task.shape[0] // 2 :][:count].tolist(), strict=True)
        return [pair for pair in pairs if pair[1] >= 0]


def check_plan(batch, rounds, lengths_q, lengths_k):
    p = Plan(batch, rounds, offsets(lengths_q), offsets(lengths_k))
    assert not p.malformed
    assert p.segments <= batch.segments
    assert p.row_tiles <= batch.row_tiles
    assert p.key_tiles <= batch.key_tiles
    assert p.slots <= batch.slots
    seen = limits(batch, lengths_q, lengths_k)

    # Row tiles hold every row once, key tiles every key.
    covered = []
    for record in p.rows[: p.row_tiles]:
        covered += range(record[1], min(record[1] + TILE, record[2]))
    assert covered == list(range(batch.len_q))
    covered = []
    for record in p.keys[: p.key_tiles]:
        covered += range(record[0], min(record[0] + TILE, record[1]))
    assert covered == list(range(batch.len_k))

    # Chunks hold every row tile once, within what was allocated.
    assert p.chunks[0][0] == 0
    assert p.chunks[-1][0] == p.row_tiles
    for before, after in zip(p.chunks, p.chunks[1:], strict=False):
        assert 0 <= after[0] - before[0] <= rounds.rows
        used = [p.rows[i][5] - before[2] + p.rows[i][7] for i in range(before[0], after[0])]
        assert max(used, default=0) <= rounds.slots

    taken = set()
    row_spans = {}
    for c in range(rounds.chunks):
        pairs = p.expand(c)
        assert len(set(pairs)) == len(pairs)
        low, high = p.t.low.tolist(), p.t.high.tolist()
        expected = []
        for i in range(p.chunks[c][0], p.chunks[c + 1][0]):
            r = p.rows[i]
            for row in range(r[1], min(r[1] + TILE, r[2])):
                mine = (low[row] + r[3], high[row] + r[3]) if low[row] < high[row] else (0, 0)
                assert mine == seen.get(row, (0, 0)), row
                if low[row] < high[row]:
                    assert r[8] <= low[row]
                    assert high[row] <= r[9] <= r[4] - r[3]
            tiles = range(r[6], r[6] + r[7])
            if r[8] < r[9]:
                assert tiles == range(r[8] // TILE, -(-r[9] // TILE))
                assert r[12] in tiles
                assert r[4] > r[3]
            else:
                assert not tiles
            for n in tiles:
                if r[10] <= n * TILE and (n + 1) * TILE <= r[11]:
                    assert r[1] + TILE <= r[2]
                    for row in (r[1], r[1] + TILE - 1):
                        assert seen[row][0] - r[3] <= n * TILE < (n + 1) * TILE <= seen[row][1] - r[3]
                slot = r[5] + n - r[6]
                assert slot not in taken
                taken.add(slot)
                row_spans[i, n] = slot
            expected += [(i, n) for n in tiles]
        assert sorted(pairs) == expected
    assert len(taken) <= p.slots

    # The key side: what each chunk adds to each key tile, as `_key_tile` reads it.
    needed = {}
    for row, (low, high) in seen.items():
        for key in {low, high - 1} if low < high else ():
            needed.setdefault(key, []).append(row)
    sums, finished = {}, {}
    for c in range(rounds.chunks):
        first, end = p.chunks[c][0], p.chunks[c + 1][0]
        for i in range(p.chunks[c][3], p.chunks[c + 1][4]):
            k = p.keys[i]
            start, stop = max(k[7], (first - k[3]) * TILE), min(k[8], (end - k[3]) * TILE)
            if rounds.partial:
                continued = bool(k[9]) and first > k[3]
                done = not k[9] or end >= k[4]
                if not continued:
                    sums[i] = set()
                buffer = k[2]
                assert buffer < batch.wide or done
            else:
                continued, done = False, True
                sums[i] = set()
            sums.setdefault(i, set())
            band = QUICK.band_of.function(k[6] - k[5], k[1] - k[0] + k[2] * TILE, batch.left, batch.right, TILE)
            begin = start // TILE
            shift = p.rows[k[3] + begin][5] - p.rows[k[3] + begin][6] - QUICK.before.function(begin, band)
            for m in range(begin, -(-stop // TILE)) if start < stop else ():
                assert (k[3] + m, k[2]) in row_spans, "reads a tile that nobody wrote"
                assert row_spans[k[3] + m, k[2]] == shift + k[2] + QUICK.before.function(m, band)
                assert first <= k[3] + m < end, "reads a tile of another chunk"
            sums[i] |= {k[5] + row for row in range(start, stop)}
            if done:
                finished[i] = set(sums[i])
    if rounds.heads > 1 or rounds.chunks == 1:  # dK and dV are wanted
        assert sorted(finished) == list(range(p.key_tiles))
        for i, rows in finished.items():
            k = p.keys[i]
            for key in (key for key in needed if k[0] <= key < min(k[0] + TILE, k[1])):
                assert rows.issuperset(needed[key])


def batch_of(lengths_q, lengths_k, *, extra=(0, 0), slack=(0, 0), **kwargs):
    return plan.Batch(
        len(lengths_q), sum(lengths_q) + extra[0], sum(lengths_k) + extra[1],
        max(lengths_q, default=0) + slack[0], max(lengths_k, default=0) + slack[1], **kwargs,
    )  # fmt: skip


LENGTHS = st.one_of(
    st.integers(0, 20), st.integers(0, 140), st.sampled_from([0, 1, 64, 65, 127, 128, 129, 256, 300, 520]),
    st.integers(0, 900),
)  # fmt: skip
LIMITS = st.one_of(st.just(UNLIMITED), st.integers(0, 400), st.sampled_from([0, 127, 128]))


@st.composite
def batches(draw):
    lengths = draw(st.sampled_from([LENGTHS, st.integers(0, 20)]))
    lengths_q = draw(st.lists(lengths, min_size=0, max_size=12))
    same = draw(st.booleans())
    lengths_k = lengths_q if same else [draw(lengths) for _ in lengths_q]
    extra = draw(st.sampled_from([(0, 0), (3, 3), (300, 300)]))
    if not same:
        extra = extra[0], draw(st.sampled_from([0, 5, 200]))
    slack = draw(st.sampled_from([(0, 0), (50, 1000)]))
    batch = batch_of(
        lengths_q, lengths_k, extra=extra, slack=slack, left=draw(LIMITS),
        right=draw(st.one_of(st.just(0), LIMITS)), same=same, pack=draw(st.booleans()),
    )  # fmt: skip
    return batch, lengths_q, lengths_k


SLOT = plan.TILE_BYTES


@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(batches(), st.integers(1, 5), st.sampled_from([3, 5, 9, 15, 30, 60, 200, 10**6]), st.booleans(), st.booleans())
def test_tables_say_what_a_plain_model_says(case, group_rows, room, dkv, sums):
    batch, lengths_q, lengths_k = case
    if not batch.len_q or not batch.len_k:
        return
    try:
        if dkv:
            cap = room * 2 * (2 * SLOT + 1024) + plan.sum_bytes(batch, 264) * sums
            rounds = plan.backward_rounds(batch, cap, 4, 2, 264, group_rows, matrices=2, dkv=True)
        else:
            rounds = plan.forward_rounds(batch, room * (SLOT + 1536), 4, group_rows)
    except plan.DoesNotFitError:
        assert room <= 2 * batch.row_width + plan.sum_bytes(batch, 264) // (2 * SLOT)
        return
    if rounds.chunks * rounds.rows < 1000:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "tables", QUICK)
            check_plan(batch, rounds, lengths_q, lengths_k)


@pytest.mark.parametrize("dkv", [False, True])
def test_tables_of_the_interpreter_are_the_same(dkv):
    lengths = [3, 0, 17, 300, 5, 5, 70, 129, 0, 1]
    batch = batch_of(lengths, lengths[::-1], extra=(7, 0), right=0)
    rounds = plan.forward_rounds(batch, 8 * (SLOT + 1536), 2, 2)
    if dkv:
        cap = 10 * (2 * SLOT + 1024) + plan.sum_bytes(batch, 264)
        rounds = plan.backward_rounds(batch, cap, 2, 2, 264, 2, matrices=2, dkv=True)
        assert rounds.partial
    check_plan(batch, rounds, lengths, lengths[::-1])


@pytest.mark.parametrize(
    ("cu", "wrong"),
    [
        ([0, 5, 9], False), ([0, 5, 10], False), ([0, 0, 0], False), ([1, 5, 9], True), ([0, 6, 5], True),
        ([0, 5, 11], True), ([0, 2, 9], True), ([0, -1, 9], True), ([-(2**31), 2**31 - 1, 3], True), ([0, 3, -7], True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("side", [0, 1])
def test_malformed_offsets_are_found(cu, wrong, side, monkeypatch):
    monkeypatch.setattr(run, "tables", QUICK)
    good = torch.tensor([0, 4, 8], dtype=torch.int32)
    both = [good, good]
    both[side] = torch.tensor(cu, dtype=torch.int32)
    batch = plan.Batch(2, 10, 10, 6, 6)
    rounds = plan.forward_rounds(batch, 2**24, 1, 1)
    p = Plan(batch, rounds, *both)
    assert p.malformed == wrong
    if wrong:
        assert (p.segments, p.row_tiles, p.key_tiles) == (1, 1, 1)
        assert p.expand(0) == []


def test_short_documents_share_tiles():
    lengths = [16] * 80_000
    batch = batch_of(lengths, lengths, right=0, same=True)
    rounds = plan.forward_rounds(batch, 2**29, 8, 4)
    assert batch.slots < 1.3 * sum(lengths) / TILE
    assert rounds.chunks == 1
    assert rounds.tasks == batch.slots


def test_the_usual_batch_needs_few_rounds():
    batch = batch_of([2048] * 8, [2048] * 8, right=0, same=True)
    assert batch.slots < 1.25 * 8 * 136
    rounds = plan.forward_rounds(batch, 2**29, 32, 4)
    assert (rounds.chunks, rounds.together) == (1, 11)
    rounds = plan.backward_rounds(batch, 2**29, 32, 8, 512, 4, matrices=2, dkv=True)
    assert rounds.chunks <= 3
    assert not rounds.fenced


# The kernels


def attend(
    packed, cu_q, cu_k, terms, tensors, *, grad_lse=None, needs=(True, True, True), caps=(2**29, 2**29), most=None
):
    """Forward and backward: out, lse, gradients."""
    q, k, v, do = tensors
    max_q, max_k = most or (packed.max_q, packed.max_k)
    common = {"max_q": max_q, "max_k": max_k, "arch": "interpreter"}
    out, lse = ragged.forward(q, k, v, cu_q, cu_k, terms, cap=caps[0], **common)
    grads = ragged.backward(do, grad_lse, q, k, v, out, lse, cu_q, cu_k, terms, needs=needs, cap=caps[1], **common)
    return out, lse, grads


def hold(q, k, v, cu_q, cu_k, out, lse, grads, **kwargs):
    """Results to the oracle's bound, by heads: single documents of a few rows scatter too much."""
    exact = oracle.varlen_attention(q, k, v, cu_q, cu_k, **kwargs)
    rounded = oracle.varlen_attention(q, k, v, cu_q, cu_k, rounding=HALF, **kwargs)

    def heads(x):
        return x.transpose(0, 1)[None]

    for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        if x is not None:
            oracle.assert_close(name, *(heads(y) for y in (x, getattr(exact, name), getattr(rounded, name))))
            assert not x[int((cu_q if name in ("out", "dq") else cu_k)[-1]) :].any(), name
    oracle.assert_lse(lse, exact.lse, rounded.lse)


def check(packed, *, lse_gradient=False, options=None, dropout_p=0.0, make=make_packed, **kwargs):
    """Everything held to the oracle, each document by itself."""
    options = options or {}
    q, k, v, do, cu_q, cu_k = make(packed, HALF)
    if packed.lens_q == packed.lens_k:
        cu_k = cu_q
    grad_lse = torch.randn(packed.heads_q, q.shape[0]) if lse_gradient else None
    rng = torch.randint(-(2**63), 2**63 - 1, (2,)) if dropout_p else None
    terms = Terms(packed.head_dim**-0.5, dropout_p=dropout_p, rng=rng, **options)
    out, lse, grads = attend(packed, cu_q, cu_k, terms, (q, k, v, do), grad_lse=grad_lse, **kwargs)
    kept = None
    if dropout_p:
        kept = philox.kept(rng, (1, packed.heads_q, q.shape[0], packed.max_k), dropout_p)
    hold(q, k, v, cu_q, cu_k, out, lse, grads, grad_out=do, grad_lse=grad_lse, kept=kept, **options)
    assert out.stride() == torch.empty_like(q).stride()
    return out, lse, grads


@pytest.mark.parametrize("name", list(LENGTHS_OF))
def test_documents_match_the_oracle(name):
    check(pack(name, 2, 1, 264, slack=3), options={"is_causal": name in list(LENGTHS_OF)[::2]}, lse_gradient=True)


LONG = Packed((150, 3, 0, 300, 5), (280, 3, 9, 170, 0), 2, 1, 264, slack=2)
SELF = Packed((7, 270, 130, 2, 1), (7, 270, 130, 2, 1), 2, 2, 264)


@pytest.mark.parametrize(
    ("packed", "options"),
    [
        (LONG, {}), (LONG, {"is_causal": True}), (LONG, {"window": (100, 20), "softcap": 2.0}),
        (LONG, {"window": (-1, 0)}), (SELF, {"is_causal": True, "window": (5, -1)}), (SELF, {"window": (0, 0)}),
        (SELF, {"is_causal": True, "softcap": 2.0}),
    ],
    ids=str,
)  # fmt: skip
def test_ranges_and_softcap_match_the_oracle(packed, options):
    check(packed, options=options)


def cut_calls(monkeypatch):
    """The rounds of the calls from here on."""
    seen = []
    for name in ("forward_rounds", "backward_rounds"):
        original = getattr(plan, name)

        def spy(*args, original=original, **kwargs):
            seen.append(original(*args, **kwargs))
            return seen[-1]

        monkeypatch.setattr(run, name, spy)
    return seen


FIXED = 2**17
"""More than tables and row vectors take here."""


def test_a_small_workspace_cuts_documents(monkeypatch):
    packed = Packed((2, 650, 5), (2, 650, 5), 2, 1, 264)
    rounds = cut_calls(monkeypatch)
    whole = check(packed, options={"is_causal": True})
    sums = plan.sum_bytes(plan.Batch(3, 0, 657, 0, 650), 264)
    caps = FIXED + 9 * SLOT, FIXED + sums + 8 * 2 * (2 * SLOT + 1024)
    parts = check(packed, options={"is_causal": True}, caps=caps)
    assert [x.chunks > 1 for x in rounds] == [False, False, True, True]
    assert rounds[3].partial
    assert torch.equal(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])
    assert torch.equal(parts[2][0], whole[2][0])  # no sum of dQ is cut


def test_chunks_of_whole_documents_need_no_sums(monkeypatch):
    packed = Packed((140, 20, 100, 130), (140, 20, 100, 130), 2, 1, 264)
    rounds = cut_calls(monkeypatch)
    whole = check(packed, options={"is_causal": True})
    parts = check(packed, options={"is_causal": True}, caps=(2**29, FIXED + 2 * 10 * (2 * SLOT + 1024)))
    assert rounds[3].chunks > 1
    assert not rounds[3].partial
    for x, y in zip(parts[2], whole[2], strict=True):
        assert torch.equal(x, y)


def test_the_heads_of_a_group_may_come_in_halves(monkeypatch):
    packed = Packed((390,), (390,), 4, 1, 264)
    rounds = cut_calls(monkeypatch)
    batch = plan.Batch(1, 390, 390, 390, 390, same=True)
    check(packed, caps=(2**29, FIXED + plan.part_bytes(batch, 264) + 2 * batch.slots * (2 * SLOT + 1024)))
    assert rounds[1].parts == 2


@pytest.mark.parametrize("caps", [(2**12, 2**29), (2**29, 2**12), (2**29, FIXED + 2**18)])
def test_a_workspace_that_is_too_small_is_refused_before_anything_runs(caps):
    with pytest.raises(plan.DoesNotFitError, match="FFPA_JIT_WORKSPACE_MB"):
        check(Packed((300,), (300,), 2, 1, 264), caps=caps)


@pytest.mark.parametrize(("tma", "value"), [(True, math.nan), (False, math.nan), (True, math.inf)])
def test_documents_do_not_touch_each_other(tma, value, monkeypatch):
    packed = Packed((30, 50, 140, 40, 5, 9, 3), (70, 20, 150, 9, 5, 2, 3), 1, 1, 264, slack=5)  # the last four: a pack
    monkeypatch.setattr(run, "uses_tma", lambda arch: tma)
    q, k, v, do, cu_q, cu_k = make_packed(packed, HALF)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k), (do, cu_q)):
        for i in (0, 2, 4):
            x[cu[i] : cu[i + 1]] = value
    out, lse, grads = attend(packed, cu_q, cu_k, Terms(264**-0.5), (q, k, v, do))
    oracle.check_varlen(q, k, v, cu_q, cu_k, out=out, lse=lse, grads=grads, grad_out=do, only={1, 3, 5, 6})
    assert not out[cu_q[0] : cu_q[1]].isfinite().any()


@pytest.mark.parametrize("packed", [pack("several", 4, 2, 264), replace(LONG, heads_q=1)], ids=str)
def test_dropout_draws_by_row_and_by_key_within_the_document(packed):
    check(packed, dropout_p=0.3, options={"is_causal": True})


def test_dropout_does_not_depend_on_how_the_work_is_cut(monkeypatch):
    packed = Packed((260, 20), (260, 20), 1, 1, 264)
    rounds = cut_calls(monkeypatch)
    q, k, v, _, cu_q, cu_k = make_packed(packed, HALF)
    terms = Terms(0.1, dropout_p=0.5, rng=torch.tensor([5, 7]))
    whole, parts = (
        ragged.forward(q, k, v, cu_q, cu_k, terms, max_q=260, max_k=260, arch="interpreter", cap=cap)
        for cap in (2**29, FIXED + 8 * SLOT)
    )
    assert rounds[1].chunks > 1
    assert torch.equal(whole[0], parts[0])


@pytest.mark.parametrize(("cu", "side"), [([0, 60, 40, 90], 0), ([0, 20, 50, 101], 1), ([0, 60, 70, 90], 1)])
def test_malformed_offsets_give_nan(cu, side):
    packed = Packed((20, 30, 40), (20, 30, 40), 1, 1, 264)
    q, k, v, do, *offsets_ = make_packed(packed, HALF)
    offsets_[side] = torch.tensor(cu, dtype=torch.int32)
    out, lse, grads = attend(packed, *offsets_, Terms(0.1), (q, k, v, do), most=(50, 50))
    for x in (out, lse, *grads):
        assert x.isnan().all()


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_needed_is_computed(needs):
    packed = Packed((140, 20), (140, 20), 2, 1, 264)
    _, _, grads = check(packed, needs=needs)
    assert tuple(x is not None for x in grads) == needs


def test_any_layout_goes_in():
    def strided(packed, dtype):
        q, k, v, do, *cu = make_packed(packed, dtype)
        wide = torch.zeros(v.shape[0], v.shape[1], 2 * v.shape[2], dtype=dtype)
        wide[..., ::2] = v
        return q.transpose(0, 1).contiguous().transpose(0, 1), k, wide[..., ::2], do, *cu

    check(Packed((20, 140, 9), (20, 140, 9), 2, 1, 264, slack=1), make=strided, options={"is_causal": True})


def test_lengths_that_are_only_bounded_give_the_same():
    packed = Packed((20, 140, 9), (20, 140, 9), 1, 1, 264)
    exact = check(packed, options={"is_causal": True})
    loose = check(packed, options={"is_causal": True}, most=(169, 169))
    assert torch.equal(exact[0], loose[0])


def test_empty_tensors_give_empty_or_zero_results():
    packed = Packed((5, 9), (0, 0), 2, 1, 264)
    out, _, _ = check(packed)
    assert not out.any()
    packed = Packed((0, 0), (5, 9), 2, 1, 264)
    out, _, grads = check(packed)
    assert out.shape == (0, 2, 264)
    assert not grads[1].any()


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("whole_rows", [True, False])
def test_rows_with_one_key_have_query_gradients_of_zero(whole_rows, options):
    packed = Packed((30, 1, 40), (30, 1, 40), 1, 1, 264)
    q, k, v, do, cu, _ = make_packed(packed, HALF)
    terms = Terms(264**-0.5, is_causal=True, **options)
    common = {"max_q": 40, "max_k": 40, "arch": "interpreter", "cap": 2**29}
    out, lse = ragged.forward(q, k, v, cu, cu, terms, **common)
    dq, _, _ = ragged.backward(
        do, None, q, k, v, out, lse, cu, cu, terms, needs=(True, True, True), whole_rows=whole_rows, **common
    )
    assert not dq[cu[:-1].long()].any()
    assert dq[1].any()
