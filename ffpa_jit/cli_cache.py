"""`ffpa-jit cache`: list, check, prune, carry to another machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ffpa_jit import registry
from ffpa_jit.cache import Cache, Entry, default_cache
from ffpa_jit.console import BYTES, SECONDS, as_json, counted, size, table, tell


@click.group(short_help="Look after the compiled kernels.")
def cache() -> None:
    """Look after the compiled kernels."""


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "group": entry.key.group, "name": entry.path.name, "path": str(entry.path), "bytes": entry.disk_bytes,
        "read_only": entry.read_only, "created": entry.meta.get("created"), "seconds": entry.meta.get("seconds"),
        "last_used": entry.last_used, "compiler": entry.key.compiler, "spec": dict(entry.key.spec),
    }  # fmt: skip


@cache.command(short_help="Print where compiled kernels are kept.")
@as_json
def path(json_: bool) -> None:
    """Print the directory of the compiled kernels (FFPA_JIT_CACHE_DIR)."""
    found = default_cache()
    if found.root is None and not json_:
        raise click.ClickException("there is no home directory; set FFPA_JIT_CACHE_DIR")
    tell(json_, {"path": found.root, "searched_first": list(found.search)}, str(found.root))


def _used(but: str) -> Cache:
    """The cache; an error where its root is refused, as then `but`."""
    found = default_cache()
    reason = found.refusal()
    if reason:
        raise click.ClickException(f"{found.root} is not used: {reason}; {but}" if found.root else f"{reason}; {but}")
    return found


@cache.command(name="list", short_help="List what is there.")
@as_json
def list_(json_: bool) -> None:
    """List what is there, in the order in which it is searched."""
    found = _used("nothing was listed")
    entries = found.entries()
    if json_:
        tell(json_, [_entry(entry) for entry in entries])
        return
    rows = [
        (each.key.group, each.path.name, size(each.disk_bytes), _age(each.last_used), each.key.compiler,
         "read-only" if each.read_only else "")
        for each in entries
    ]  # fmt: skip
    if rows:
        table([("backend", "kernel", "size", "last used", "compiler", ""), *rows])
    for root in (*found.search, found.root):
        there = [entry for entry in entries if entry.root == root]
        total = size(sum(entry.disk_bytes for entry in there))
        kind = " (read-only)" if root in found.search else ""
        click.echo(f"{counted(len(there))}, {total}, in {root}{kind}", err=True)
    bad = found.bad()
    if bad:
        click.echo(f"{len(bad)} bad left out; `ffpa-jit cache verify` tells what is wrong with them", err=True)


def _age(then: float) -> str:
    hours = max(0.0, time.time() - then) / 3600
    if hours < 2:
        return f"{hours * 60:.0f} min ago"
    return f"{hours / 24:.0f} days ago" if hours >= 48 else f"{hours:.0f} h ago"


@cache.command(short_help="Check every entry against its hash.")
@as_json
def verify(json_: bool) -> None:
    """Check every entry against its hash; exit code 1 if one is bad."""
    found = _used("nothing was checked").verify()
    bad = [(where, wrong) for where, wrong in found if wrong is not None]
    shown = [{"path": where, "ok": wrong is None, "error": wrong} for where, wrong in found]
    tell(json_, shown, *(f"{where}: {wrong}" for where, wrong in bad))
    click.echo(f"{len(found) - len(bad)} good, {len(bad)} bad", err=True)
    raise SystemExit(1 if bad else 0)


@cache.command(short_help="Remove bad and old entries, or down to a size.")
@click.option("--max-size", callback=BYTES, help="Keep at most so much, the last used first: 2GB.")
@click.option("--older-than", callback=SECONDS, help="Remove what was not used for so long: 30d.")
@as_json
def prune(max_size: float | None, older_than: float | None, json_: bool) -> None:
    """Remove bad entries; with the options also those not used for long, and those beyond a size."""
    removed = _used("nothing was removed").prune(None if max_size is None else int(max_size), older_than)
    _removed(removed, json_)


@cache.command(short_help="Remove everything.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def clear(yes: bool, json_: bool) -> None:
    """Remove everything. What Triton keeps in its own cache stays."""
    found = _used("nothing was removed")
    if not yes:
        click.confirm(f"Remove every compiled kernel in {found.root}?", abort=True, err=True)
    _removed(found.clear(), json_)


def _removed(removed: dict[Path, int], json_: bool) -> None:
    shown = [{"path": where, "bytes": count} for where, count in removed.items()]
    tell(json_, shown, f"removed {counted(len(removed))}, {size(sum(removed.values()))}")


@cache.command(short_help="Write everything to a tar file.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@as_json
def export(file: Path, json_: bool) -> None:
    """Write everything to FILE, a tar (gzipped if its name ends in gz), for `import` on another machine."""
    try:
        written = default_cache().export(file)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error}") from None
    if not written:
        _used(f"{file} was not written")
        raise click.ClickException(
            f"{default_cache().root} has nothing to export, so {file} was not written; `ffpa-jit warm` compiles kernels"
        )
    tell(json_, [_entry(entry) for entry in written], f"wrote {counted(len(written))} to {file}")


@cache.command(name="import", short_help="Take over what `export` wrote.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@as_json
def import_(file: Path, json_: bool) -> None:
    """Take over what `export` wrote. Import only files that you would run: they hold machine code."""
    known: list[Path] = []
    added = default_cache().import_(file, known)
    left: dict[str, str] = {}
    for name in registry.names():
        left |= registry.described(name).store.install_all(default_cache().entries())
    already = f", {len(known)} {'was' if len(known) == 1 else 'were'} there already" if known else ""
    tell(
        json_, {"imported": [_entry(entry) for entry in added], "there_already": known, "left_out": left},
        f"imported {counted(len(added))}{already}, into {default_cache().root}",
    )  # fmt: skip
    for name, why in left.items():
        click.echo(f"note: {name}: {why}", err=True)
