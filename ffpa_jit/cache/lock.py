"""Who builds what: a lock between processes that says for whom one waits, and that never keeps anybody from working."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ffpa_jit.cache import files

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["held"]

_logger = logging.getLogger("ffpa_jit")

_PATIENCE = 5.0  # seconds of waiting before it is told


@contextlib.contextmanager
def held(path: Path, what: str, *, wait: float, unless: Path) -> Iterator[bool]:
    """Hold the lock `<path>.lock` while building `what`; yields whether it is held.

    It is not where it cannot be had (no flock on this file system, a stale handle, a directory that cannot be written),
    where `unless` exists before it is released, and after `wait` seconds: the caller goes on all the same. The kernel
    releases it when its holder dies; its file stays, since a waiter may have it open.
    """
    lock = _acquire(path, wait, unless)
    if lock is None:
        yield False
        return
    holder = _holder_file(path)
    me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%H:%M:%S"), "what": what}
    try:
        with contextlib.suppress(OSError):
            files.write(holder, json.dumps(me).encode())
        yield True
    finally:
        files.remove(holder)
        with contextlib.suppress(Exception):  # ESTALE and its like: the file system has released it already
            lock.release()


def _acquire(path: Path, wait: float, unless: Path) -> BaseFileLock | None:
    started, told = time.monotonic(), False
    file = path.with_name(path.name + ".lock")
    try:
        from filelock import FileLock, Timeout

        files.make_directory(file.parent)
        lock = FileLock(str(file))  # no options: which there are depends on the version
        while (left := wait - (time.monotonic() - started)) > 0:
            try:
                lock.acquire(timeout=min(left, 1.0))
                return lock
            except Timeout:
                if os.path.lexists(unless):
                    return None
            if not told and time.monotonic() - started >= _PATIENCE:
                told = True
                _logger.warning("waiting for %s (lock %s)", _holder(path), file)
    except Exception as error:  # whatever it is, it costs a second build at most
        _logger.debug("no lock %s: %r", file, error)
        return None
    _logger.warning("waited %.0f s for %s (lock %s), now going on without it", wait, _holder(path), file)
    return None


def _holder_file(path: Path) -> Path:
    return path.with_name(path.name + ".holder")


def _holder(path: Path) -> str:
    try:
        who = json.loads(files.read(_holder_file(path), files.owners()))
        return f"process {who['pid']} on {who['host']}, which has been building {who['what']} since {who['since']}"
    except (files.Refused, OSError, ValueError, TypeError, KeyError):
        return "another process"
