"""What the tests of the CuTe-DSL forward share: where they run, their kernels, and how it is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from ffpa_jit import ffpa_attn_func, registry, warm
from ffpa_jit.cute import dense, toolkit
from ffpa_jit.cute.spec import ARCHS, HEAD_DIMS
from ffpa_jit.problem import device_arch
from tests import oracle

FP16, BF16 = torch.float16, torch.bfloat16
DTYPES = [FP16, BF16]


def missing() -> str | None:
    """Why these tests cannot run here; no GPU at all is conftest's reason."""
    absent, found = registry.missing("cutedsl"), toolkit.find()
    if absent is not None or isinstance(found, str):
        return absent.reason if absent is not None else str(found)
    if torch.cuda.is_available() and device_arch("cuda", 0) not in ARCHS:
        return f"the kernels are for {', '.join(ARCHS)}, this is {device_arch('cuda', 0)}"
    return None


on_hopper = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.usefixtures("cute_kernels"),
]


@pytest.fixture(scope="session")
def cute_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cute-cache"))


@pytest.fixture(scope="module")
def cute_kernels(cute_cache: str) -> Iterator[None]:
    """Every specialisation, compiled in parallel into a cache of these tests' own, and loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FFPA_JIT_CACHE_DIR", cute_cache)
        results = warm(list(HEAD_DIMS), dtype=("bf16", "fp16"), backend="cutedsl")
        assert len(results) == 4 * len(HEAD_DIMS), results
        assert not [result for result in results if result.failed], results
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the queries that the CuTe-DSL kernels are launched on from here on."""
    seen: list[torch.Size] = []
    forward = dense.forward
    registry.invalidate()  # no call goes the short way of one before
    monkeypatch.setattr(dense, "repeat", lambda *tensors, **options: None)

    def record(launch, query, *tensors, **options):
        seen.append(query.shape)
        return forward(launch, query, *tensors, **options)

    monkeypatch.setattr(dense, "forward", record)
    return seen


def attend(q, k, v, **options):
    options.setdefault("enable_gqa", q.shape[1] != k.shape[1])
    return ffpa_attn_func(q, k, v, backend="cutedsl", return_lse=True, **options)


def run_and_check(q, k, v, **options):
    """Output and LSE, held to the oracle's bound; an error names the call."""
    out, lse = attend(q, k, v, **options)
    try:
        oracle.check(q, k, v, out=out, lse=lse, **options)
    except AssertionError as error:
        raise AssertionError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, {q.dtype}, {options}: {error}") from error
    return out, lse


def same(a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
