"""The CPU tests run the Triton kernels through Triton's interpreter.

The variable is read when a kernel is decorated, so it has to be set before anything imports Triton. Tests that
need the opposite (the compiler, a machine without Triton) start a subprocess.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # small products: threads of parallel workers only wait
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.cpu import interpreter  # noqa: E402
from tests.cpu.forking import Forking  # noqa: E402

interpreter.speed_up()

ROOT = Path(__file__).resolve().parents[2]
LONG = ("compile_matrix", "fused_interpreter", "cute_compile", "cuda_kernels", "decode_compile", "triton_offline")
"""Tests of ten seconds and more are in these files."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long first, so that no worker is left with it at the end."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


@pytest.fixture(scope="session")
def _session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ffpa-jit-cache")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, _session_cache: Path) -> None:
    for name in [name for name in os.environ if name.startswith("FFPA_JIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(_session_cache))  # never the user's
    torch.manual_seed(0)


@pytest.fixture
def warnings_seen() -> list[str]:
    """Messages of the package's logger from here on."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("ffpa_jit")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def run_python(code: str, *, unset: tuple[str, ...] = ("TRITON_INTERPRET",), **environment: str) -> str:
    """Run code in a fresh interpreter and return what it printed; its failure is the test's."""
    return run_program("-c", code, unset=unset, **environment)


def run_program(
    *arguments: str, unset: tuple[str, ...] = ("TRITON_INTERPRET",), timeout: float = 300, **environment: str
) -> str:
    """The same for any arguments of Python: a script of the project, say, for which Triton has to compile."""
    env = {k: v for k, v in os.environ.items() if k not in unset and not k.startswith("FFPA_JIT_")}
    env.update(environment, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=ROOT, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-2500:] + done.stderr[-3000:]
    return done.stdout


_forking = Forking(TRITON_INTERPRET=None)


def run_compiling(*arguments: str, timeout: float = 600) -> str:
    """The same for a program that imports torch and compiles with Triton, without the imports' time."""
    return _forking.run(*arguments, timeout=timeout)


def in_threads(count: int, work: Callable[[], object]) -> None:
    """Run `work` in so many threads at once; an error in one is the test's."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run() -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def keeps_tensors(call: Callable[[], object], error: type[Exception]) -> bool:
    """Whether what a caller of `call` has at hand is still there after `call` has failed with `error`, twice."""
    held: list[weakref.ref[torch.Tensor]] = []

    def caller() -> None:
        large = torch.zeros(3)
        held.append(weakref.ref(large))
        call()

    for _ in range(2):
        with pytest.raises(error):
            caller()
    gc.collect()
    return any(each() is not None for each in held)
