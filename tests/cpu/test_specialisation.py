"""What a kernel is compiled for, without a GPU: never for a length, a stride or a rate."""

from __future__ import annotations

import pytest

from tests.cpu.conftest import run_program

pytest.importorskip("triton")

PLAIN = ["combine", "row_reference", "score_forward", "value_forward"]
MASKED = ["classify", "combine", "find_spans", "row_reference", "score_forward", "value_forward"]
EXPECTED = {
    "dropout rates": PLAIN,
    "additive masks": MASKED,
    "boolean masks": MASKED,
    "decoding under a mask": ["attend", "attend", "combine"],  # keys in one part, and in several
}


@pytest.mark.parametrize("calls", EXPECTED)
def test_one_kernel_serves_all(calls):
    assert run_program("-m", "tests.cpu.specialised", calls, timeout=500).split() == EXPECTED[calls]
