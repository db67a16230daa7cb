"""What the compiling process does: one spec in, `kernel.o` out. Others take its names only.

It is a process of its own because importing the DSL takes a second that no other process should pay, and because one
that has compiled for long has been seen to fail where a fresh one does not. It imports neither torch nor the rest of
the package, sees no GPU, and runs in the directory of the build.

The object is of the DSL's plain C interface, the one that `CuteDSLRuntime.h` in its wheels describes: it can be loaded
without Python's side of the DSL (`load`), where the objects for TVM's need all of it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["ANSWER", "OBJECT", "PREFIX", "main"]

OBJECT, ANSWER, PREFIX = "kernel.o", "emitted.json", "ffpa_forward"

# Without one of these the DSL's runtime would not refuse the object but end the process that loads it.
_NEEDED = ("_version", "_args_spec", "_function_name", "_kernel_info", "_cuda_init", "_cuda_load_to_device")


def main() -> None:
    """`task` on standard input: module, spec, target, toolkit, paths. Leaves OBJECT and ANSWER in this directory."""
    task = json.load(sys.stdin)
    sys.path += [each for each in task["paths"] if each not in sys.path]
    start = time.perf_counter()
    from cutlass import cute

    _check_toolkit(task["toolkit"])
    for library in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # exporting looks the launch calls up in this process
    module = importlib.import_module(task["module"])
    imported = time.perf_counter()
    function, arguments = module.entry(_Spec(task["spec"]))
    compiled = cute.compile(function, *arguments, options=f"--gpu-arch {task['target']}")
    compiled.export_to_c(file_path=os.getcwd(), file_name=Path(OBJECT).stem, function_prefix=PREFIX)
    _check_object(Path(OBJECT).read_bytes())
    done = time.perf_counter()
    print(f"imported the DSL in {imported - start:.1f} s, compiled in {done - imported:.1f} s")
    Path(ANSWER).write_text(json.dumps({"arguments": _codes(arguments), "target": task["target"]}))


class _Spec:
    """The fields of a spec, by name."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)


def _check_toolkit(expected: str) -> None:
    """The DSL chooses by the driver between its builds for several CUDA toolkits; the cache key names one."""
    module = sys.modules.get("cutlass._mlir._mlir_libs._cutlass_ir")
    file = Path(getattr(module, "__file__", None) or "").name
    if file.startswith("_cutlass_ir.cu") and not file.startswith(f"_cutlass_ir.{expected}."):
        raise SystemExit(f"error: the DSL has loaded {file}, where its build for {expected} was expected")


def _check_object(data: bytes) -> None:
    missing = [name for name in _NEEDED if f"{PREFIX}{name}\0".encode() not in data]
    if missing:
        raise SystemExit(f"error: the DSL has exported no {', '.join(PREFIX + name for name in missing)}")


def _codes(arguments: tuple[Any, ...]) -> str:
    """The types of the arguments, as `struct` has them: "q" Int64, "i" Int32, "f" Float32, last "P" the stream."""
    from cutlass import Float32, Int32, Int64

    codes = {Int64: "q", Int32: "i", Float32: "f"}
    *plain, stream = arguments
    unknown = [type(each).__name__ for each in plain if type(each) not in codes]
    if unknown or type(stream) in codes:
        raise SystemExit(f"error: a kernel takes Int64, Int32, Float32 and last a stream, not {unknown or 'no stream'}")
    return "".join(codes[type(each)] for each in plain) + "P"
