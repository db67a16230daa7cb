"""What the tests run programs with: processes that fork off one that has imported the compiler, and Triton's
interpreter without what it does over and over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cpu.forking import Forking
from tests.cpu.interpreter import VERSIONS


@pytest.fixture
def forking() -> Iterator[Forking]:
    started = Forking(["decimal"], TOLD="yes", HIDDEN=None)
    yield started
    started.stop()


def test_a_program_has_its_arguments_its_environment_and_what_is_imported(forking, monkeypatch):
    monkeypatch.setenv("HIDDEN", "1")
    monkeypatch.setenv("FFPA_JIT_STRICT", "1")
    code = (
        "import os, sys; names = [x for x in ('TOLD', 'HIDDEN', 'FFPA_JIT_STRICT', 'LATER') if x in os.environ]; "
        "print(sys.argv[1:], names, 'decimal' in sys.modules, 'torch' in sys.modules)"
    )
    assert forking.run("-c", code, "a b").strip() == "['a b'] ['TOLD'] True False"
    monkeypatch.setenv("LATER", "1")
    assert forking.run("-c", code).strip() == "[] ['TOLD', 'LATER'] True False"


def test_a_module_and_a_script_run_as_python_would_run_them(forking, tmp_path):
    assert "usage:" in forking.run("-m", "json.tool", "--help")
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, sys.argv)")
    assert forking.run(str(script), "x").strip() == f"__main__ {[str(script), 'x']}"


def test_one_program_leaves_nothing_to_the_next(forking):
    forking.run("-c", "import decimal, os; decimal.left = 1; os.chdir('/')")
    assert forking.run("-c", "import decimal, os; print(hasattr(decimal, 'left'), os.getcwd() == '/')") == (
        "False False\n"
    )


def test_a_program_that_fails_is_an_error_with_its_output(forking):
    with pytest.raises(AssertionError, match=r"(?s)ended with 3.*printed"):
        forking.run("-c", "import sys; print('printed'); sys.exit(3)")
    with pytest.raises(AssertionError, match=r"(?s)ended with 1.*ZeroDivisionError"):
        forking.run("-c", "1 / 0")
    with pytest.raises(AssertionError, match="ended with -9"):
        forking.run("-c", "import os; os.kill(os.getpid(), 9)")


def test_a_program_that_takes_too_long_is_ended_and_the_next_one_runs(forking):
    with pytest.raises(AssertionError, match="took longer than"):
        forking.run("-c", "import time; time.sleep(600)", timeout=1)
    assert forking.run("-c", "print('next')") == "next\n"


# The interpreter.

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _scaled(x, factor):
    return x * factor + tl.sum(x, 0)


@triton.jit
def _kernel(source, target, n, factor, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(source + at, mask=at < n, other=0)
    tl.store(target + at, _scaled(x, factor), mask=at < n)


@triton.jit
def _faulty(source):
    tl.load(source + "nowhere")


def launched(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    _kernel[(2,)](x, out, len(x), 3, SIZE=8)
    return out


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float32], ids=str)
def test_a_kernel_that_calls_a_function_gives_its_values(dtype):
    x = torch.arange(13).to(dtype)
    parts = [part * 3 + part.sum() for part in x.split(8)]
    for _ in range(2):
        assert torch.equal(launched(x), torch.cat(parts).to(dtype))


def test_the_language_is_its_own_again_after_a_launch_even_a_failed_one():
    def functions():
        return [tl.load, tl.sum, tl.arange, tl.reduce, tl.tensor.__add__, tl.math.exp2]

    before, x = functions(), torch.arange(13)
    launched(x)
    assert functions() == before
    with pytest.raises(triton.runtime.errors.InterpreterError):
        _faulty[(1,)](x)
    assert functions() == before
    assert torch.equal(launched(x), launched(x))


def test_device_functions_do_not_replace_the_language_again(monkeypatch):
    """Once for the kernel's module and once for `tl.sum`'s, whatever the number of calls."""
    from triton.runtime import interpreter

    if not triton.__version__.startswith(VERSIONS):
        pytest.skip("this Triton's interpreter runs as it is")
    counted = []
    languages = interpreter._patch_lang
    original = languages._patch
    monkeypatch.setattr(languages, "_patch", lambda function: counted.append(function) or original(function))
    launched(torch.arange(13))
    assert [function.__name__ for function in counted] == ["_kernel", "sum"]
