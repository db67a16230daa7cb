"""One process that uses the cache, for tests of several: ``python cache_worker.py '<json>'``.

The package's ``__init__`` imports torch; the cache does not need it, so its modules are imported without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

FIELDS: dict[str, Any] = {
    "group": "cuda",
    "slug": "sm_90-d512-bf16-f32-s4",
    "spec": {"arch": "sm_90", "head_dim": 512, "dtype": "bfloat16", "acc": "f32", "stages": 4},
    "source": hashlib.sha256(b"sources").hexdigest(),
    "compiler": "nvcc 13.0.88 (cuda_13.0.r13.0/compiler.36424714_0)",
}


def artefact_of(digest: str) -> bytes:
    """What a compiler makes of a key in these tests."""
    return digest.encode() * 400


def _import_without_torch() -> None:
    package = types.ModuleType("ffpa_jit")
    package.__path__ = [str(ROOT / "ffpa_jit")]
    sys.modules["ffpa_jit"] = package


def _become(uid: int, scratch: str) -> None:
    """Go on as another user. What is imported late is imported before: that user may not be able to read it."""
    import filelock
    import platformdirs

    platformdirs.user_cache_dir("x")
    with filelock.FileLock(os.path.join(scratch, "lock")):
        pass
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main(options: dict[str, Any]) -> None:
    _import_without_torch()
    from ffpa_jit import cache
    from ffpa_jit.cache import lock

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ffpa_jit").addHandler(handler)
    if "uid" in options:
        _become(options["uid"], options["scratch"])

    def step(name: str) -> None:
        if name == options.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)

    cache._step = step
    lock._PATIENCE = options.get("patience", 5.0)
    if options.get("no_lock"):
        lock._acquire = lambda *arguments: None

    key = cache.Key(**FIELDS)
    built: list[int] = []

    def build(directory: Path) -> Any:
        built.append(1)
        data = artefact_of(key.digest)
        with open(directory / "kernel.so", "wb") as file:
            file.write(data[:100])
            file.flush()
            step("half")
            file.write(data[100:])
        (directory / "build.log").write_text("compiling\n")
        if "building" in options:
            Path(options["building"]).touch()
        time.sleep(options.get("seconds", 0.0))
        if options.get("fail"):
            raise RuntimeError("compiler failed")
        return cache.Built("kernel.so", {"flags": ["-O3"]})

    if "barrier" in options:
        barrier = Path(options["barrier"])
        (barrier / f"ready-{os.getpid()}").touch()
        while not (barrier / "go").exists():
            time.sleep(0.002)

    result: dict[str, Any] = {"digest": key.digest, "name": key.name}
    if "root" in options:
        own = cache.Cache(
            Path(options["root"]), [Path(each) for each in options.get("search", ())], wait=options.get("wait", 120.0)
        )
        started = time.monotonic()
        try:
            entry = own.get(key, build, "the test kernel")
            result |= {
                "path": str(entry.path), "root": str(entry.root), "seconds": time.monotonic() - started,
                "sha256": hashlib.sha256(entry.artefact.read_bytes()).hexdigest(), "read_only": entry.read_only,
            }  # fmt: skip
        except RuntimeError as error:
            result["error"] = str(error)
        result["standby"] = str(own.standby) if own.standby else None
    print(json.dumps({**result, "built": len(built), "messages": messages, "torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
