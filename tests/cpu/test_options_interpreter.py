"""Every option of the Triton backend crossed with every other, small, through the interpreter, in fp16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.cases.options import ALL, DENSE, VARLEN, dense_allowed, dense_case, pairwise, varlen_allowed, varlen_case

pytest.importorskip("triton")

HALF = torch.float16
FEW = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip

SIZES = {
    "heads": [(1, 1), (2, 2), (3, 1), (4, 2)],
    "dim": [264, 320],
    "window": [ALL, (13, -1), (-1, 9), (20, 5), (0, 0)],
}
SMALL_DENSE = {
    **DENSE, **SIZES,
    "lengths": [(1, 40), (3, 129), (33, 9), (65, 65), (20, 130), (130, 140)], "memory": [None, 0, 0.6],
}  # fmt: skip
SMALL_VARLEN = {**VARLEN, **SIZES, "slack": [0, 3], "memory": [None, 4]}


def small(*, lengths, heads, batch, **rest) -> bool:
    """What the interpreter does in about a second."""
    work = batch * heads[0] * max(lengths[0], 32) * lengths[1]
    return work <= 26_000 and dense_allowed(lengths=lengths, **rest)


@pytest.mark.parametrize("case", [dense_case(**x) for x in pairwise(SMALL_DENSE, small)], ids=str)
def test_every_two_options_go_together(case):
    case.run(HALF)


@settings(FEW, max_examples=20)
@given(choice=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SMALL_DENSE.items()}))
def test_options_go_together_in_any_number(choice):
    if not small(**choice):
        choice.update(causal=False, batch=1, heads=(2, 1))
    dense_case(**choice).run(HALF, seed=1)


@pytest.mark.parametrize("case", [varlen_case(**x) for x in pairwise(SMALL_VARLEN, varlen_allowed)], ids=str)
def test_every_two_options_go_together_on_packed_sequences(case):
    case.run(HALF)


@settings(FEW, max_examples=14)
@given(
    choice=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SMALL_VARLEN.items()}),
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=5),
)
def test_options_go_together_in_any_number_on_packed_sequences(choice, lens):
    case = varlen_case(**choice)
    packed = type(case.packed)(
        tuple(q for q, _ in lens), tuple(k for _, k in lens), *choice["heads"], choice["dim"], choice["slack"]
    )
    type(case)(**{**vars(case), "packed": packed, "same": packed.lens_q == packed.lens_k and not packed.slack}).run(
        HALF
    )
