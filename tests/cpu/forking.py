"""Programs that compile, each in a process of its own, none of which imports its compiler's Python again.

The tests' own process cannot compile with Triton, because in it Triton interprets, nor with the CuTe DSL, which goes
without torch. So a process imports the compiler, compiles nothing, and forks for each program: a fork is as clean as a
new interpreter and up to two seconds of processor time cheaper.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRITON = ("torch", "triton.backends.amd.compiler", "triton.backends.nvidia.compiler")


class Forking:
    """The parent's side, for one thread; the process that has imported `modules` is started by the first program.

    What of the environment its start decides (TRITON_INTERPRET) is as it is here then, or as in `environment`; a value
    of None takes a name away.
    """

    def __init__(self, modules: Iterable[str] = TRITON, **environment: str | None) -> None:
        self._modules = tuple(modules)
        self._changes = environment
        self._process: subprocess.Popen[str] | None = None

    def _environment(self) -> dict[str, str]:
        merged = {**os.environ, "PYTHONPATH": str(ROOT), **self._changes}
        return {name: value for name, value in merged.items() if value is not None and not name.startswith("FFPA_JIT_")}

    def run(self, *arguments: str, timeout: float = 600) -> str:
        """What `python *arguments` prints in ROOT (a script; "-m", a module; "-c", code); its failure is an error."""
        with tempfile.TemporaryFile("w+") as output:
            task = {"arguments": arguments, "environment": self._environment(), "output": output.fileno()}
            code = self._ask(task, timeout)
            output.seek(0)
            said = output.read()
        assert code == 0, f"{' '.join(arguments)} ended with {code}:\n{said[-5000:]}"
        return said

    def _ask(self, task: dict[str, object], timeout: float) -> int:
        if self._process is None:
            self._process = self._start()
            atexit.register(self.stop)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        # The program writes to a file of ours, by the name that any process of this user can open it with.
        task["output"] = f"/proc/{os.getpid()}/fd/{task['output']}"
        late = threading.Timer(timeout, self.stop)
        late.start()
        try:
            print(json.dumps(task), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        finally:
            late.cancel()
        assert answer, f"{task['arguments']} took longer than {timeout} s, or its process has died"
        return int(answer)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.cpu.forking", *self._modules]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=self._environment(),
            start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            if process.poll() is None:
                os.killpg(process.pid, 9)  # with what it has forked
            process.wait()


def _run(task: dict[str, object]) -> None:
    """In the fork: the program, with its output where it belongs. Never returns."""
    code = 1
    try:
        output = os.open(str(task["output"]), os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(task["environment"])  # type: ignore[arg-type]
        sys.argv = list(task["arguments"])  # type: ignore[call-overload]
        if sys.argv[0] == "-c":
            code_text = sys.argv.pop(1)
            exec(compile(code_text, "<program>", "exec"), {"__name__": "__main__"})
        elif sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Task by task from standard input, answered by exit statuses."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    tasks = os.fdopen(os.dup(0))
    for line in tasks:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
