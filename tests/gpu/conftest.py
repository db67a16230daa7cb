"""Every test in this folder needs a GPU; without one they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.cute import cute_cache, cute_kernels, launches  # noqa: F401  (fixtures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="no CUDA or ROCm device")
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def _free_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FFPA_JIT_STRICT", "FFPA_JIT_WORKSPACE_MB"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
