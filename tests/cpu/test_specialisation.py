"""What a kernel is compiled for, without a GPU: never for a length, a stride or a rate."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cpu.conftest import ROOT

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
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cpu.specialised", calls],
        capture_output=True, text=True, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-1500:]
    assert done.stdout.split() == EXPECTED[calls]
