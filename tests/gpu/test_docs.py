"""The code of the README and of docs/examples.md runs as it stands."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.docs import ROOT, blocks

EXAMPLES = [block for page in ("README.md", "docs/examples.md") for block in blocks(ROOT / page, "python")]


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_the_example_runs(block, monkeypatch):
    monkeypatch.setenv("FFPA_JIT_STRICT", "1")  # an example that falls back shows nothing
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)  # put back what it patches
    exec(compile(block.code, str(block), "exec"), {"__name__": "example"})
