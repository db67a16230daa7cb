"""Cache entries as a tar file, to carry them to machines that have no compiler.

A tar from elsewhere is read as hostile: its members are plain files `<group>/<entry>/<file>` of bounded size or nothing
is written at all. Whether they are what they claim to be, the cache verifies before it publishes them.
"""

from __future__ import annotations

import errno
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from ffpa_jit.cache.files import PLAIN_NAME, make_directory, private_name, remove, write

__all__ = ["pack", "unpack"]

_LARGEST = 1 << 28  # bytes of all files together
_MOST = 20_000  # files


def pack(tar_path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write the files, named as in the tar, to `tar_path`, gzipped if it ends in gz; it is replaced whole or not."""
    tar_path = tar_path.resolve()  # what a link points to is replaced, not the link
    if tar_path.exists() and not tar_path.is_file():
        raise FileExistsError(errno.EEXIST, "is there and no file", str(tar_path))
    aside = tar_path.with_name(private_name() + tar_path.name)
    try:
        with open(aside, "xb") as raw, tarfile.open(fileobj=raw, mode="w:gz" if _gzipped(tar_path) else "w:") as tar:
            for name, data in files:
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o600
                tar.addfile(member, io.BytesIO(data))
        os.replace(aside, tar_path)
    finally:
        remove(aside)


def _gzipped(path: Path) -> bool:
    return path.suffix in (".gz", ".tgz")


def unpack(tar_path: Path, into: Path) -> list[Path]:
    """Write the files of `tar_path` below the directory `into`; the directories of the entries, `into/<group>/<entry>`.

    ValueError, before anything is written, for a tar with a member that `pack` would not have written.
    """
    files: dict[tuple[str, ...], bytes] = {}
    total = 0
    try:
        with tarfile.open(tar_path, "r:*") as tar:
            for member in tar:
                parts = tuple(member.name.split("/"))
                plain = len(parts) == 3 and all(PLAIN_NAME.fullmatch(part) for part in parts)
                if not plain or not member.isreg() or parts in files:
                    raise ValueError(f"{tar_path} is not an exported kernel cache: it has {member.name!r} in it")
                total += member.size
                if total > _LARGEST or len(files) >= _MOST:
                    raise ValueError(f"{tar_path} holds more than {_LARGEST >> 20} MiB or {_MOST} files")
                content = tar.extractfile(member)
                files[parts] = content.read() if content is not None else b""
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        reason = str(error).partition("\n")[0].rstrip(":")  # then one line for each compression that was tried
        raise ValueError(f"{tar_path} cannot be read as a tar file: {reason}") from error
    for parts, data in files.items():
        path = into.joinpath(*parts)
        make_directory(path.parent)
        write(path, data)
    return sorted({into.joinpath(*parts[:2]) for parts in files})
