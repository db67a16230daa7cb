"""The store of the CuTe DSL kernels (see `cache.store`), and the process that compiles one.

An artefact serves here if it was made from these sources by the installed release of the DSL, its build for the same
CUDA toolkit, on a CPU that can do no more than this one (`toolkit`): the host's part of an object is compiled for the
CPU that compiled it. Any other is left alone, and one is made: in a process of its own (`emit`). A hit does not import
the DSL.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ffpa_jit.build_error import BuildError
from ffpa_jit.cache import Built, Entry
from ffpa_jit.cache.entries import LOG
from ffpa_jit.cache.store import KernelStore
from ffpa_jit.cute import toolkit
from ffpa_jit.cute.emit import ANSWER, OBJECT, PREFIX
from ffpa_jit.cute.load import Kernel, load
from ffpa_jit.cute.spec import KernelSpec, target_of

__all__ = ["STORE", "Dsl", "DslError", "DslMissing", "available", "find", "forget", "kernel", "key_of", "warm"]

KERNELS = "ffpa_jit.cute.forward_sm90"
"""The module whose `entry(spec)` gives what to compile."""

_SOURCES = Path(__file__).resolve().parent
# What only launches, finds or describes kernels: no bit of an object depends on it.
_HOST_ONLY = frozenset({"__init__", "backend", "compile", "dense", "estimates", "load", "order", "spec", "toolkit"})
_PATIENCE = 900.0  # seconds that one compilation may take
_SHOWN = 6  # lines of a log in an error
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(error\b|[\w.]*(Error|Exception)\b)")


class DslMissing(RuntimeError):  # noqa: N818  (it says what is wrong)
    """There is no CuTe DSL here that can be used."""


class DslError(BuildError):
    """The DSL failed; it says why in its last lines, and not always in one of them."""

    @property
    def reason(self) -> str:
        """What a log ends with: a few lines from the last one on that names an error."""
        lines = [line.rstrip() for line in _COLOURS.sub("", self.log_text).splitlines() if line.strip()]
        first = next((at for at in reversed(range(len(lines))) if _ERROR.search(lines[at])), len(lines) - _SHOWN)
        return "\n  ".join(lines[max(first, 0) :][:_SHOWN]) or "there is no output"


@dataclass(frozen=True)
class Dsl:
    """The DSL as a compiler. `id`: all its parts, and the CPU that it compiles the host's part for."""

    toolkit: toolkit.Toolkit

    @property
    def id(self) -> str:
        return f"{self.toolkit.compiler_id} {toolkit.host_level()}"

    def compile(self, spec: KernelSpec, directory: Path) -> Built:
        """The object of `spec`, made by a process of its own. DslError."""
        head = f"{self.id}: {spec.slug}\n"
        task = {
            "module": KERNELS, "spec": dataclasses.asdict(spec), "target": target_of(spec),
            "toolkit": self.toolkit.cuda_variant, "paths": [each for each in sys.path if each],
        }  # fmt: skip
        failed = _compile(task, directory, head)
        answer = directory / ANSWER
        if not failed and not answer.is_file():
            failed = "\nits process left no object"
        if not failed and _digest() != _source_digest():  # that process has read them, and the key is of what they were
            failed = "\nthe kernels' sources have changed since this process first read them: start a new one"
        if failed:
            log = (directory / LOG).read_text(errors="replace").removeprefix(head) + failed
            raise DslError(f"{spec.slug} with {self.toolkit.compiler_id.partition(' (')[0]}", log, directory / LOG)
        arguments = json.loads(answer.read_text())["arguments"]
        return Built(OBJECT, {"arguments": arguments, "prefix": PREFIX, "target": target_of(spec)})


class _Store(KernelStore[KernelSpec, Kernel]):
    spec_type, group, title = KernelSpec, "cute", "CuTe DSL kernel"

    def compiler(self, spec: KernelSpec, kind: str | None = None) -> Dsl | None:
        found = toolkit.find()
        return None if isinstance(found, str) else Dsl(found)

    def absent(self, spec: KernelSpec, kind: str | None) -> str:
        return str(toolkit.find())

    def missing(self, kind: str | None) -> DslMissing:
        return DslMissing(toolkit.find())

    def digest(self, spec: KernelSpec) -> str:
        return _source_digest()

    def serves(self, entry: Entry, kind: str | None) -> bool:
        made_by, _, level = entry.key.compiler.rpartition(" ")
        found = toolkit.find()
        return isinstance(found, toolkit.Toolkit) and made_by == found.compiler_id and toolkit.runs_here(level)

    def open(self, spec: KernelSpec, entry: Entry) -> Kernel:
        found = toolkit.find()
        if isinstance(found, str):
            raise self.missing(None)
        return load(entry.artefact, entry.meta["arguments"], entry.meta["prefix"], found.runtime)

    def forget(self) -> None:
        """The same, and look for the DSL and read the sources anew."""
        super().forget()
        toolkit.forget()
        _source_digest.cache_clear()


STORE = _Store()
kernel, available, warm, find = STORE.kernel, STORE.available, STORE.warm, STORE.find
key_of, forget = STORE.key_of, STORE.forget


@functools.lru_cache(maxsize=1)
def _source_digest() -> str:
    """`_digest`, when this process first needed it."""
    return _digest()


def _digest() -> str:
    """sha256 over every source that takes part in an object, and the module that is asked for what to compile."""
    digest = hashlib.sha256(f"{KERNELS}\n".encode())
    for path in sorted(_SOURCES.glob("*.py")):
        if path.stem not in _HOST_ONLY:
            text = path.read_bytes()
            digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


# The process that compiles. What it imports the package through is a shell: the real one would import torch.
_BOOT = (
    "import sys, types; sys.path[:] = [each for each in sys.path if each]; package = types.ModuleType('ffpa_jit'); "
    "package.__path__ = [sys.argv[1]]; sys.modules['ffpa_jit'] = package; "
    "from ffpa_jit.cute.emit import main; main()"
)


def _compile(task: Mapping[str, object], directory: Path, head: str) -> str:
    """Run the process; why it died, "" if it did not. Its output becomes the log, after `head`."""
    log = directory / LOG
    with log.open("wb") as output:
        output.write(head.encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(_SOURCES.parent)],
            stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=directory,
            env=_environment(str(task["target"])),
        )  # fmt: skip
        try:
            process.communicate(json.dumps(task).encode(), timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            return f"\nit took more than {_PATIENCE:.0f} s"
        finally:
            process.kill()
            process.wait()
    if process.returncode == -9:
        return "\nits process was killed: out of memory?"
    return "" if process.returncode == 0 else f"\nits process ended with exit code {process.returncode}"


def _environment(target: str) -> dict[str, str]:
    """This process's, without GPUs and without what would make the DSL compile something else.

    The target stands there too: the DSL's operations each ask what to compile for, and where nothing says it, they ask
    the driver, which with no GPU to see begins anew each time. That took half of a compilation.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    return {**environment, "CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": target, "PYTHONSAFEPATH": "1", "NO_COLOR": "1"}
