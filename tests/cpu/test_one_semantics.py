"""One semantics above head dim 256, on Triton's interpreter; the tests are in tests/semantics.py and
tests/transforms.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.semantics import *  # noqa: F403  (each of them, here)
from tests.transforms import *  # noqa: F403

pytest.importorskip("triton")


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def dtype() -> torch.dtype:
    return torch.float16  # the interpreter computes with bf16 wrongly


@pytest.fixture
def size() -> int:
    return 70


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """What the interpreter runs inside."""
    from triton.runtime.interpreter import GridExecutor

    run, names = GridExecutor.__call__, []

    def record(self, *arguments, **options):
        names.append(self.fn.__name__)
        return run(self, *arguments, **options)

    @contextmanager
    def inside() -> Iterator[list[str]]:
        names.clear()
        with monkeypatch.context() as patch:
            patch.setattr(GridExecutor, "__call__", record)
            yield names

    return inside


def test_a_launch_is_seen(launched, device, dtype):
    from tests.cases.shapes import Shape, make

    with launched() as kernels:
        q, k, v, _ = make(Shape(1, 1, 1, 2, 2, 264), dtype, device)
        ffpa_attn_func(q, k, v)  # noqa: F405
    assert kernels
