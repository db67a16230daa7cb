"""What the cache asks of a file system: private directories, files that only their owner could have written, fsync.

Another user of the machine must not be able to hand us code, so nothing is read through a symbolic link, from another
user's file, or from what others can write; `Refused` says which of these it was.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Collection
from pathlib import Path

__all__ = [
    "PLAIN_NAME", "Refused", "check_directory", "discard", "disk_bytes", "disk_full", "make_directory", "modified",
    "names", "own_directory", "owners", "private_name", "read", "remove", "sweep", "sync",
    "temporary_directory", "write",
]  # fmt: skip

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")  # a file name without separators, and not hidden

_POSIX = os.name == "posix"  # elsewhere the permissions of the user's profile have to do
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ABANDONED = 3600.0  # seconds after which a private directory belongs to nobody, whatever its process id says
_PRIVATE = re.compile(r"\.tmp-(\d{1,9})-([0-9a-f]{12})-[0-9a-f]{8}")


class Refused(Exception):  # noqa: N818  (an outcome, not an error)
    """Something in a cache cannot be trusted, or is not what it should be; the text says what is wrong."""


def owners(read_only: bool = False) -> Collection[int]:
    """Whose files may be used: our own and, where the user has named a root for reading, the administrator's."""
    user = os.geteuid() if hasattr(os, "geteuid") else 0
    return (user, 0) if read_only else (user,)


def check_directory(path: Path, owners: Collection[int]) -> None:
    """Refused unless `path` itself is a directory of one of `owners` that nobody else can write; OSError if absent."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise Refused(f"{path} is not a directory")
    _check(path, status, owners)


def _check(path: Path, status: os.stat_result, owners: Collection[int]) -> None:
    """Refused unless its owner is one of `owners` and nobody else can write it."""
    if _POSIX and status.st_uid not in owners:
        raise Refused(f"{path} belongs to uid {status.st_uid}, not to uid {os.geteuid()}")
    if _POSIX and status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise Refused(f"{path} can be written by other users (mode {mode:o}; `chmod go-w` if they never had access)")


def read(path: Path, owners: Collection[int], size: int | None = None) -> bytes:
    """The bytes of a regular file under the same rules; Refused also if it is not `size` bytes long."""
    # O_NONBLOCK: opening a planted named pipe must not wait for its writer.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise Refused(f"{path} is a symbolic link") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{path} is not a regular file")
        _check(path, status, owners)
        if size is not None and status.st_size != size:
            raise Refused(f"{path} is {status.st_size} bytes long instead of {size}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents, readable by nobody else; one that exists is left as it is."""
    try:
        path.mkdir(0o700)
    except FileNotFoundError:
        make_directory(path.parent)
        path.mkdir(0o700, exist_ok=True)
    except FileExistsError:
        pass


def own_directory(path: Path) -> None:
    """`make_directory`, and Refused if what is there could have been written by others."""
    make_directory(path)
    check_directory(path, owners())


def write(path: Path, data: bytes) -> None:
    """Replace `path`, readable by nobody else: all of it or nothing."""
    aside = path.with_name(private_name() + path.name)
    try:
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        os.replace(aside, path)
    except OSError:
        remove(aside)
        raise


def sync(path: Path) -> None:
    """Flush a file or a directory to disk; a file system that cannot flush directories is left to itself."""
    directory = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not directory or error.errno in (*_FULL, errno.EIO):
            raise


def remove(path: Path) -> None:
    """Delete a file, a link or a tree as far as that is possible; never an error."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def disk_full(directory: Path) -> bool:
    """Whether a mebibyte no longer fits there. Compilers say so in a hundred ways, or just fail; a quota shows in no
    `statvfs`."""
    probe = directory / private_name()
    try:
        with open(probe, "xb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in _FULL
    finally:
        remove(probe)
    return False


def machine() -> str:
    """Whose process ids these are: host name and, where there are containers, their process name space."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:12]


def private_name() -> str:
    """A new name for something of this process that is not finished; `stale` tells when it has been abandoned."""
    return f".tmp-{os.getpid()}-{machine()}-{uuid.uuid4().hex[:8]}"


def stale(path: Path) -> bool:
    """Whether `path` has a name of `private_name`, and its process is gone or has not touched it for an hour.

    Of a process that runs here, a day: the clock of a file server may be far from ours, and a machine may sleep.
    """
    match = _PRIVATE.search(path.name)
    if match is None or _dead(path):
        return match is not None
    return _untouched(path, 24 * _ABANDONED if match[2] == machine() else _ABANDONED)


def long_dead(path: Path) -> bool:
    """Whether `path` is ours, has a name of `private_name`, and its process has been gone for an hour."""
    with contextlib.suppress(OSError):
        return _dead(path) and _untouched(path, _ABANDONED) and (not _POSIX or os.lstat(path).st_uid == os.geteuid())
    return False


def _dead(path: Path) -> bool:
    """Whether `path` has the name of a process of this machine that has ended."""
    match = _PRIVATE.search(path.name)
    if match is None or match[2] != machine():
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        pass
    return False


def _untouched(path: Path, seconds: float) -> bool:
    """Whether nothing was done in `path` for so long."""
    with contextlib.suppress(OSError):
        return time.time() - os.lstat(path).st_mtime > seconds
    return False


def discard(path: Path, judged: os.stat_result | None = None) -> None:
    """Move `path` aside in one step, then remove it; not if it is no longer the one that was `judged`."""
    aside = path.with_name(private_name())
    with contextlib.suppress(OSError):
        os.rename(path, aside)
        now = os.lstat(aside)
        if judged is not None and (now.st_ino, now.st_mtime_ns) != (judged.st_ino, judged.st_mtime_ns):
            os.rename(aside, path)  # somebody has replaced it in the meantime
    remove(aside)


def sweep(directory: Path) -> None:
    """Delete what builds that are no more have left in `directory`: names of `private_name` that are `stale`. Entries,
    and what a running process works on, stay."""
    with contextlib.suppress(OSError):
        for each in list(directory.glob(".tmp-*")):
            if stale(each):
                remove(each)


def temporary_directory() -> Path:
    """A new directory that goes when this process ends, save for the logs of failed builds."""
    failure: OSError | None = None
    for parent in (None, "/dev/shm"):
        try:
            path = Path(tempfile.mkdtemp(prefix="ffpa-jit" + private_name(), dir=parent))
            atexit.register(_remove_temporary, os.getpid(), path)
            for each in list(path.parent.glob("ffpa-jit.tmp-*")):  # of processes that were killed
                if long_dead(each):
                    remove(each)
            if not disk_full(path):
                return path
        except OSError as error:
            failure = error
    raise OSError("no directory for compiled kernels can be written; set FFPA_JIT_CACHE_DIR to one") from failure


def _remove_temporary(pid: int, path: Path) -> None:
    """At the end of process `pid`: delete its temporary root, but for the logs of failed builds."""
    if os.getpid() == pid:  # not in a forked child
        for each in path.iterdir() if path.is_dir() else ():
            if each.name != "failed":
                remove(each)
        with contextlib.suppress(OSError):
            path.rmdir()


def names(directory: Path) -> list[str]:
    """The plain names in a directory, sorted: no hidden ones. None where it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(each.name for each in os.scandir(directory) if PLAIN_NAME.fullmatch(each.name))
    return []


def modified(path: Path) -> float:
    """When a file was last modified, in seconds since the epoch; 0 if it is not there."""
    with contextlib.suppress(OSError):
        return os.lstat(path).st_mtime
    return 0.0


def disk_bytes(path: Path) -> int:
    """What a directory and the files in it take on disk; what cannot be read counts as nothing."""
    total = 0
    with contextlib.suppress(OSError):
        for each in (path, *path.iterdir()):
            total += getattr(os.lstat(each), "st_blocks", 0) * 512
    return total
