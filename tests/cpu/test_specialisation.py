"""What a kernel is compiled for, without a GPU: never for a length, a stride or a rate."""

from __future__ import annotations

import pytest

from tests.cpu.conftest import run_compiling

pytest.importorskip("triton")

PLAIN = ["combine", "sample_row_max", "score_forward", "value_forward"]
MASKED = ["classify", "combine", "find_spans", "sample_row_max", "score_forward", "value_forward"]
EXPECTED = {
    "dropout rates": PLAIN,
    "additive masks": MASKED,
    "boolean masks": MASKED,
    "decoding under a mask": ["attend", "attend", "combine"],  # keys in one part, and in several
}


@pytest.mark.parametrize("calls", EXPECTED)
def test_one_kernel_serves_all(calls):
    assert run_compiling("-m", "tests.cpu.specialised", calls).split() == EXPECTED[calls]
