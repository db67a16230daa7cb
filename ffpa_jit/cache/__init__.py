"""The compiled kernels of this user: built once, published whole, verified at every use.

    <root>/cuda/sm_90-d512-bf16-f32-s2-1f0c…/    one entry: the artefact, meta.json, build.log, .last_used
    <root>/cuda/.tmp-<pid>-<machine>-<random>/   a build that is running, or whose process has died
    <root>/locks/cuda-<name>.lock, .holder       who builds it; lock files are never removed
    <root>/failed/<name>.log                     the log of its last build, if that failed
    <root>/notes/<name>.json                     facts that are slow to find out, such as a compiler's version

How an entry comes to be: find, else lock, look again, build in a private directory beside the target, fsync, rename.

- Private directory, rename and hash make it correct. A lock only saves work: where it cannot be had (some network file
  systems) or is not released in time, everybody builds, the first rename wins and the others drop theirs. A process
  that is killed, at any point, leaves a private directory at most, which a later build sweeps.
- An entry counts if its directory and files are ours, nobody else can write them, none is a link, and size and sha256
  are as meta.json says. Any other is moved aside and built again; in a read-only root it is passed over.
- The hash finds damage. It cannot find an attacker who writes as the owner of the root.
- For a root that cannot be written or trusted a temporary one stands in until the process ends, with one warning.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ffpa_jit import settings
from ffpa_jit.cache import files, lock
from ffpa_jit.cache.archive import unpack
from ffpa_jit.cache.entries import LOG, META, Built, Entry, Key, load, seal
from ffpa_jit.cache.files import Refused
from ffpa_jit.cache.roots import Roots

__all__ = ["Built", "Cache", "Entry", "Key", "default_cache"]


class _Unusable(Exception):  # noqa: N818  (caught in this module)
    """A root turned out not to be writable."""


class Cache(Roots):
    """Roots that grow: `get` builds what is not there, `import_` takes what another machine has built.

    Nothing is created before the first write. `wait`: seconds to wait for another process before building as well.
    """

    def __init__(self, root: Path | None, search: Sequence[Path] = (), *, wait: float = 120.0) -> None:
        super().__init__(root, search)
        self.wait = wait
        self._unusable = "" if root is not None else "there is no home directory"
        self._mutex = threading.Lock()
        self._owner = 0  # the process that made the root that stands in

    def get(self, key: Key, build: Callable[[Path], Built], what: str) -> Entry:
        """The entry of `key`; if there is none, what `build` makes in the directory that it is given.

        `what` names the artefact in messages. What `build` raises is raised; its build.log is kept then, and the `log`
        attribute of the exception, if it has one, is set to where. OSError if no directory at all can be written.
        """
        entry = self.find(key)
        if entry is not None:
            return entry
        if self.root is not None and not self._unusable:
            try:
                return self._get_in(self.root, key, build, what)
            except _Unusable as error:
                self._unusable = str(error)
        self._refuse(self.root, self._unusable, read_only=False)
        try:
            return self._get_in(self._temporary_root(), key, build, what)
        except _Unusable as error:
            raise OSError(f"no directory can be written for {what}: {error}; set FFPA_JIT_CACHE_DIR to one") from error

    def unwritable(self) -> str:
        """Why nothing can be kept in `root`, which is made if it is not there; "" if entries can be."""
        if self.root is None or self._unusable:
            return self._unusable
        probe = self.root / files.private_name()
        try:
            files.own_directory(self.root)
            probe.mkdir(0o700)
        except (Refused, OSError) as error:
            return str(error)
        finally:
            files.remove(probe)
        return ""

    def _get_in(self, root: Path, key: Key, build: Callable[[Path], Built], what: str) -> Entry:
        target = root / key.group / key.name
        with _writing():
            files.own_directory(root)
            files.own_directory(target.parent)
        with lock.held(root / "locks" / f"{key.group}-{key.name}", what, wait=self.wait, unless=target):
            _step("locked")
            entry = self._look(target, root, False)  # the one that we have waited for
            if entry is None:
                files.sweep(target.parent)
                entry = self._build(root, target, key, build, what)
        return entry

    def _build(self, root: Path, target: Path, key: Key, build: Callable[[Path], Built], what: str) -> Entry:
        private = target.with_name(files.private_name())
        kept_log = root / "failed" / f"{key.name}.log"
        try:
            with _writing():
                private.mkdir(0o700)
            _step("private")
            started = time.monotonic()
            try:
                built = build(private)
                built.check(private, what)
            except Exception as error:
                if root == self.root and files.disk_full(private):
                    raise _Unusable("no space is left on its disk") from error
                _keep(private / LOG, kept_log, error)
                raise
            seconds = round(time.monotonic() - started, 3)
            _step("written")
            with _writing():
                meta = seal(private, key, built, seconds)
                _step("synced")
                other = self._publish(private, target, root)
        finally:
            files.remove(private)  # not there any more once it has been published
        _step("renamed")
        files.remove(kept_log)
        return other or Entry(target, meta, root, read_only=False)

    def _publish(self, private: Path, target: Path, root: Path) -> Entry | None:
        """Rename; the entry of somebody who was faster, else None."""
        try:
            os.rename(private, target)
        except OSError:
            entry = self._look(target, root, False)
            if entry is not None:
                return entry
            os.rename(private, target)  # a bad one has been moved out of the way; else this says what is wrong
        with contextlib.suppress(OSError):
            files.sync(target.parent)
        return None

    def _temporary_root(self) -> Path:
        with self._mutex:
            if self.standby is None or self._owner != os.getpid() or not self.standby.is_dir():
                self.standby, self._owner = files.temporary_directory(), os.getpid()
            return self.standby

    def import_(self, tar_path: Path, known: list[Path] | None = None) -> list[Entry]:
        """Publish the entries of an exported tar in the writable root; those that were not there before. The others'
        paths are added to `known`.

        ValueError, with nothing imported, for a tar that `export` did not write or that is damaged; OSError if the root
        cannot be written. Import only what you would run: the hashes say that it is whole, not who made it.
        """
        if self.root is None:
            raise OSError(f"nothing can be imported: {self._unusable}; set FFPA_JIT_CACHE_DIR")
        aside, imported = self.root / files.private_name(), []
        try:
            files.own_directory(self.root)
            files.sweep(self.root)
            aside.mkdir(0o700)
            unpacked = unpack(tar_path, aside)
            for path in unpacked:
                _check_unpacked(path, tar_path)
            for path in unpacked:
                target = self.root / path.relative_to(aside)
                files.own_directory(target.parent)
                if self._look(target, self.root, False) is None:
                    for each in (*path.iterdir(), path):
                        files.sync(each)
                    if self._publish(path, target, self.root) is None:
                        imported.append(load(target, self.root, False))
                        continue
                if known is not None:
                    known.append(target)
        except Refused as error:
            raise PermissionError(f"the kernel cache {self.root} is not used: {error}") from None
        finally:
            files.remove(aside)
        return imported

    def remember(self, name: str, value: Any) -> None:
        """Keep a JSON value in the writable root, if there is one; failing is not an error."""
        if self.root is not None and not self._unusable:
            with contextlib.suppress(Refused, OSError):
                files.own_directory(self.root)
                files.own_directory(self.root / "notes")
                files.write(self.root / "notes" / f"{name}.json", json.dumps(value).encode())


def _step(name: str) -> None:
    """Called as a build gets to `name`: locked, private, written, synced, renamed. For tests to stop it there."""


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except (Refused, OSError) as error:
        raise _Unusable(str(error)) from error


def _check_unpacked(path: Path, tar_path: Path) -> None:
    try:
        entry = load(path, path.parents[1], False)
        if not {each.name for each in path.iterdir()} <= {entry.artefact.name, LOG, META}:
            raise Refused(f"{path.name} has files that an entry does not have")
    except Refused as error:
        raise ValueError(f"{tar_path} is damaged or no exported kernel cache: {error}") from None


def _keep(log: Path, kept: Path, error: Exception) -> None:
    with contextlib.suppress(OSError):
        if log.is_file():
            files.make_directory(kept.parent)
            os.replace(log, kept)
            if hasattr(error, "log"):
                error.log = kept


def _user_directory() -> Path | None:
    from platformdirs import user_cache_dir

    try:
        path = Path(user_cache_dir("ffpa-jit"))
    except RuntimeError:  # the user has neither HOME nor an entry in passwd
        return None
    return path if path.is_absolute() else None  # as older releases of platformdirs say that: "~/.cache"


@functools.lru_cache(maxsize=8)
def _cache(root: Path | None, search: tuple[Path, ...]) -> Cache:
    return Cache(root, search)


def default_cache() -> Cache:
    """The process's cache, as FFPA_JIT_CACHE_DIR and FFPA_JIT_CACHE_PATH have it at this moment."""
    return _cache(settings.cache_dir() or _user_directory(), settings.cache_path())
