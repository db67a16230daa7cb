"""One entry of the cache on disk: its key, what its directory holds, and whether it may be used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ffpa_jit.cache import files
from ffpa_jit.cache.files import PLAIN_NAME, Refused

__all__ = ["LOG", "META", "STAMP", "Built", "Entry", "Key", "load", "seal"]

SCHEMA = 1
META, LOG, STAMP = "meta.json", "build.log", ".last_used"
RESERVED = frozenset({"locks", "failed", "notes"})  # directories of a root that are not groups


@dataclass(frozen=True)
class Key:
    """Everything that decides the bits of an artefact, and nothing else: no path, no time, no environment."""

    group: str  # sub-directory of the root: "cuda"
    slug: str  # readable: "sm_90-d512-bf16-f32-s2"
    spec: Mapping[str, str | int]  # what is built
    source: str  # hex digest over the names and bytes of all sources, and the flags
    compiler: str  # "nvcc 13.0.88 (cuda_13.0.r13.0/compiler.36424714_0)", "nvrtc 13.0.88"

    def __post_init__(self) -> None:
        texts = (self.group, self.slug, self.source, self.compiler, *self.spec)
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(value, str | int) for value in self.spec.values()
        ):
            raise TypeError("a key has strings, and integers in its spec")
        names = (self.group, f"{self.slug}-{'0' * 16}")
        if not all(PLAIN_NAME.fullmatch(name) for name in names) or self.group in RESERVED:
            raise ValueError(f"{self.group!r} and {self.slug!r} cannot name a group and an entry of the cache")

    def __hash__(self) -> int:
        return hash(self.digest)

    def fields(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return {**vars(self), "spec": dict(self.spec)}

    @property
    def digest(self) -> str:
        """sha256, in hex, of all fields and the number of the schema."""
        return hashlib.sha256(json.dumps([SCHEMA, self.fields()], sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The entry's directory within the group."""
        return f"{self.slug}-{self.digest[:16]}"


@dataclass(frozen=True)
class Built:
    """What a build left in its directory: the artefact's file name, and what meta.json shall say beside the usual."""

    artefact: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    def check(self, directory: Path, what: str) -> None:
        """RuntimeError if the build of `what` has not left in `directory` what it says."""
        path = directory / self.artefact
        if path.parent != directory or path.name in (META, LOG) or path.is_symlink() or not path.is_file():
            raise RuntimeError(f"the build of {what} left no file {self.artefact!r}")


@dataclass(frozen=True)
class Entry:
    """A published artefact. `meta` is all of meta.json: schema, key (its fields), artefact (file name), sha256, size
    (bytes), seconds (of the build), created (ISO 8601, UTC), and what the build added."""

    path: Path
    meta: dict[str, Any]
    root: Path
    read_only: bool

    @property
    def artefact(self) -> Path:
        return self.path / str(self.meta["artefact"])

    @property
    def key(self) -> Key:
        return Key(**self.meta["key"])

    @property
    def disk_bytes(self) -> int:
        """What the directory takes on disk."""
        return files.disk_bytes(self.path)

    @property
    def last_used(self) -> float:
        """Seconds since the epoch, to the hour; the time of the build until then, and in a read-only root."""
        return max(files.modified(self.path / STAMP), files.modified(self.path / META))


def load(path: Path, root: Path, read_only: bool, *, hashed: bool = True) -> Entry:
    """The entry in the directory `path`; Refused, with the reason, if it is not one that may be used."""
    owners = files.owners(read_only)
    try:
        files.check_directory(path, owners)
        meta = json.loads(files.read(path / META, owners))
        if meta["schema"] != SCHEMA:
            raise Refused(f"its schema is {meta['schema']!r}, not {SCHEMA}")
        entry = Entry(path, meta, root, read_only)
        if (entry.key.group, entry.key.name) != (path.parent.name, path.name):
            raise Refused(f"its key is that of {entry.key.group}/{entry.key.name}")
        if not PLAIN_NAME.fullmatch(meta["artefact"]):
            raise Refused(f"its artefact has the name {meta['artefact']!r}")
        data = files.read(entry.artefact, owners, meta["size"])
        if hashed and hashlib.sha256(data).hexdigest() != meta["sha256"]:
            raise Refused(f"the sha256 of {entry.artefact.name} is not the one in {META}")
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refused(f"its {META} cannot be read: {error!r}") from error
    return entry


def seal(private: Path, key: Key, built: Built, seconds: float) -> dict[str, Any]:
    """Leave the artefact, the log and meta.json in `private`, readable by the owner only, and on disk; meta.json."""
    for each in list(private.iterdir()):
        if each.name in (built.artefact, LOG):
            each.chmod(0o600)  # whatever the umask was
        else:
            files.remove(each)
    data = (private / built.artefact).read_bytes()
    text = json.dumps({
        **built.meta, "schema": SCHEMA, "key": key.fields(), "artefact": built.artefact, "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(), "seconds": seconds,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }, indent=1)  # fmt: skip
    files.write(private / META, text.encode())
    for each in (*private.iterdir(), private):
        files.sync(each)
    meta: dict[str, Any] = json.loads(text)
    return meta
