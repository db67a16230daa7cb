"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
SECTION = re.compile(r"^### (\d\. .+?)$(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [(title, code) for title, text in SECTION.findall(README) for code in CODE.findall(text)]


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_the_example_runs(title, code, monkeypatch):
    monkeypatch.setenv("FFPA_JIT_STRICT", "1")  # an example that falls back shows nothing
    exec(compile(code, title, "exec"), {"__name__": "example"})


def test_there_are_eight_examples():
    assert len(EXAMPLES) == 8
