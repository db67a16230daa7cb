"""Shared by the tests with and without a GPU."""

from __future__ import annotations

import pytest

for _name in ("causal_biases", "paths", "semantics", "transforms"):  # tests for both folders
    pytest.register_assert_rewrite(f"tests.{_name}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
