"""Where entries are looked for, and what is done with those that are there: found, judged, listed, pruned, exported."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ffpa_jit.cache import files
from ffpa_jit.cache.archive import pack
from ffpa_jit.cache.entries import LOG, META, RESERVED, STAMP, Entry, Key, load
from ffpa_jit.cache.files import Refused

__all__ = ["Roots"]

_logger = logging.getLogger("ffpa_jit")

_STAMP_EVERY = 3600.0  # seconds


class Roots:
    """Entries in `root` (None: there is no place for one) and, searched first and never written, in those of `search`.

    `standby` is the root that stands in for `root` in this process where that cannot be written, once there is one.
    """

    def __init__(self, root: Path | None, search: Sequence[Path] = ()) -> None:
        # Links on the way to a root are its owner's own; within a root none is followed.
        self.root = None if root is None else Path(os.path.realpath(root))
        self.search = tuple(Path(os.path.realpath(each)) for each in search)
        self.standby: Path | None = None
        self._told: set[Path | None] = set()

    def roots(self) -> list[tuple[Path, bool]]:
        """(root, read_only) of those that exist and can be trusted, in the order of search."""
        every = [*((each, True) for each in self.search), (self.root, False), (self.standby, False)]
        return [(root, read_only) for root, read_only in every if root is not None and self._trusted(root, read_only)]

    def refusal(self) -> str:
        """Why the entries in `root` are not used; "" if they are, or if it does not exist yet."""
        if self.root is None:
            return "there is no home directory"
        try:
            files.check_directory(self.root, files.owners())
        except FileNotFoundError:
            return ""
        except (Refused, OSError) as error:
            return str(error)
        return ""

    def holds(self, group: str, slug: str) -> bool:
        """Whether there is an entry of this name, of whatever compiler and sources; it is not looked into."""
        return any(path.name.startswith(f"{slug}-") for path, _, _ in self._paths(group))

    def find(self, key: Key) -> Entry | None:
        """The entry of exactly this key, verified, or None. A bad one is warned of, and removed if the root is ours."""
        looks = (self._look(group / key.name, root, read_only) for group, root, read_only in self._groups(key.group))
        return next((entry for entry in looks if entry is not None), None)

    def alternatives(self, key: Key) -> list[Entry]:
        """Verified entries of the same spec and source that another compiler made, those in read-only roots first."""
        found = []
        for path, root, read_only in self._paths(key.group):
            if path.name.startswith(key.slug + "-") and path.name != key.name:
                entry = self._look(path, root, read_only)
                if entry and (entry.key.slug, entry.key.spec, entry.key.source) == (key.slug, key.spec, key.source):
                    found.append(entry)
        return found

    def _trusted(self, directory: Path, read_only: bool) -> bool:
        try:
            files.check_directory(directory, files.owners(read_only))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (Refused, OSError) as error:
            self._refuse(directory, str(error), read_only)
            return False
        return True

    def _groups(self, name: str | None = None) -> Iterator[tuple[Path, Path, bool]]:
        for root, read_only in self.roots():
            for each in [name] if name else files.names(root):
                if each not in RESERVED and self._trusted(root / each, read_only):
                    yield root / each, root, read_only

    def _paths(self, group: str | None = None) -> Iterator[tuple[Path, Path, bool]]:
        for directory, root, read_only in self._groups(group):
            for name in files.names(directory):
                yield directory / name, root, read_only

    def _look(self, path: Path, root: Path, read_only: bool) -> Entry | None:
        """The entry at `path` if there is one and it verifies; what does not is moved away."""
        try:
            status = os.lstat(path)
        except OSError:
            return None
        try:
            entry = load(path, root, read_only)
        except Refused as error:
            if os.path.lexists(path):  # else it was removed while we read it
                then = "it is passed over" if read_only else "it is removed, to be built again"
                _logger.warning("the kernel cache entry %s is not used: %s; %s", path, error, then)
                if not read_only:
                    files.discard(path, status)
            return None
        if not read_only and time.time() - files.modified(path / STAMP) > _STAMP_EVERY:
            with contextlib.suppress(OSError):  # atime would not do: many file systems do not keep it
                (path / STAMP).touch(0o600)
        return entry

    def _refuse(self, directory: Path | None, reason: str, read_only: bool) -> None:
        """Warn of a directory that is not used, once."""
        if directory in self._told:
            return
        self._told.add(directory)
        if read_only:
            _logger.warning("the kernel cache %s is passed over: %s", directory, reason)
        else:
            _logger.warning("the kernel cache %s is not used: %s; what is compiled is kept until this process ends. "
                "Set FFPA_JIT_CACHE_DIR to a directory of your own to keep it", directory or "", reason)  # fmt: skip

    def _judged(self, *, hashed: bool = True) -> Iterator[tuple[Path, bool, Entry | str]]:
        """(path, read_only, the entry or what is wrong with it) of every root, in the order of search."""
        for path, root, read_only in self._paths():
            try:
                yield path, read_only, load(path, root, read_only, hashed=hashed)
            except Refused as error:
                yield path, read_only, str(error)

    def entries(self) -> list[Entry]:
        """Every entry of every root in the order of search; contents are not hashed, bad ones left out."""
        return [found for _, _, found in self._judged(hashed=False) if isinstance(found, Entry)]

    def bad(self) -> list[Path]:
        """What `entries` leaves out."""
        return [path for path, _, found in self._judged(hashed=False) if isinstance(found, str)]

    def verify(self) -> list[tuple[Path, str | None]]:
        """Every entry of every root with what is wrong with it, None for a good one. Removes nothing."""
        return [(path, found if isinstance(found, str) else None) for path, _, found in self._judged()]

    def prune(self, max_bytes: int | None = None, older_than: float | None = None) -> dict[Path, int]:
        """Remove from the writable root bad entries, those not used for `older_than` seconds, then the longest unused
        until the rest takes at most `max_bytes`. The directories removed, with the bytes each took."""
        kept: list[tuple[float, Path]] = []
        sizes, removed, now = {}, {}, time.time()
        for path, read_only, found in self._judged():
            if not read_only:
                sizes[path] = files.disk_bytes(path)
                if isinstance(found, str) or (older_than is not None and now - found.last_used > older_than):
                    removed[path] = sizes.pop(path)
                else:
                    kept.append((found.last_used, path))
        for _, path in sorted(kept):
            if max_bytes is not None and sum(sizes.values()) > max_bytes:
                removed[path] = sizes.pop(path)
        for path in removed:
            files.discard(path)
        if self.root is not None and self._trusted(self.root, False):
            groups = (self.root / name for name in files.names(self.root) if name not in RESERVED)
            for directory in (self.root, *groups):
                files.sweep(directory)
        return removed

    def clear(self) -> dict[Path, int]:
        """Remove all from the writable root but its lock files. The entries removed, with the bytes each took."""
        removed = self.prune(older_than=-float("inf"))
        if self.root is not None and self._trusted(self.root, False):
            for name in ("failed", "notes"):
                files.remove(self.root / name)
        return removed

    def export(self, tar_path: Path, entries: Iterable[Entry] | None = None) -> list[Entry]:
        """Write `entries` (None: all) to a tar file, gzipped if its name ends in gz. Those written: all that verify; if
        none does, no file is written."""
        chosen: dict[str, Entry] = {}
        for each in self.entries() if entries is None else entries:
            entry = self._look(each.path, each.root, each.read_only)
            if entry is not None:
                chosen.setdefault(f"{each.path.parent.name}/{each.path.name}", entry)
        if not chosen:
            return []
        pack(tar_path, (
            (f"{name}/{path.name}", path.read_bytes())
            for name, entry in sorted(chosen.items())
            for path in (entry.artefact, entry.path / LOG, entry.path / META) if path.is_file()
        ))  # fmt: skip
        return list(chosen.values())

    def note(self, name: str) -> Any:
        """What `remember` has kept under this name, or None."""
        for root, read_only in self.roots():
            with contextlib.suppress(Refused, OSError, ValueError):
                files.check_directory(root / "notes", files.owners(read_only))
                return json.loads(files.read(root / "notes" / f"{name}.json", files.owners(read_only)))
        return None
