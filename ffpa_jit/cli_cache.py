"""`ffpa-jit cache`: list, check, prune, carry to another machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ffpa_jit.cache import Cache, Entry, default_cache
from ffpa_jit.console import BYTES, SECONDS, as_json, print_json, size, table


@click.group()
def cache() -> None:
    """Look after the compiled kernels."""


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "group": entry.key.group, "name": entry.path.name, "path": str(entry.path), "bytes": entry.disk_bytes,
        "read_only": entry.read_only, "created": entry.meta.get("created"), "seconds": entry.meta.get("seconds"),
        "last_used": entry.last_used, "compiler": entry.key.compiler, "spec": dict(entry.key.spec),
    }  # fmt: skip


@cache.command()
@as_json
def path(json_: bool) -> None:
    """Print the directory of the compiled kernels (FFPA_JIT_CACHE_DIR)."""
    found = default_cache()
    if json_:
        print_json({"path": found.root, "searched_first": list(found.search)})
    else:
        click.echo(str(_writable(found)))


def _writable(found: Cache) -> Path:
    if found.root is None:
        raise click.ClickException("there is no home directory; set FFPA_JIT_CACHE_DIR")
    return found.root


@cache.command(name="list")
@as_json
def list_(json_: bool) -> None:
    """List what is there, in the order in which it is searched."""
    entries = default_cache().entries()
    if json_:
        print_json([_entry(entry) for entry in entries])
        return
    rows = [
        (each.key.group, each.path.name, size(each.disk_bytes), _age(each.last_used), each.key.compiler,
         "read-only" if each.read_only else "")
        for each in entries
    ]  # fmt: skip
    if rows:
        table([("backend", "kernel", "size", "last used", "compiler", ""), *rows])
    total = size(sum(entry.disk_bytes for entry in entries))
    click.echo(f"{len(entries)} entries, {total}, in {default_cache().root}", err=True)


def _age(then: float) -> str:
    hours = max(0.0, time.time() - then) / 3600
    return f"{hours / 24:.0f} days ago" if hours >= 48 else f"{hours:.0f} h ago"


@cache.command()
@as_json
def verify(json_: bool) -> None:
    """Check every entry against its hash; exit code 1 if one is bad."""
    found = default_cache().verify()
    bad = [(where, wrong) for where, wrong in found if wrong is not None]
    if json_:
        print_json([{"path": where, "ok": wrong is None, "error": wrong} for where, wrong in found])
    else:
        for where, wrong in bad:
            click.echo(f"{where}: {wrong}")
        click.echo(f"{len(found) - len(bad)} good, {len(bad)} bad", err=True)
    raise SystemExit(1 if bad else 0)


@cache.command()
@click.option("--max-size", callback=BYTES, help="Keep at most so much, the last used first: 2GB.")
@click.option("--older-than", callback=SECONDS, help="Remove what was not used for so long: 30d.")
@as_json
def prune(max_size: float | None, older_than: float | None, json_: bool) -> None:
    """Remove bad entries, those not used for long, and those beyond a size."""
    if max_size is None and older_than is None:
        raise click.UsageError("say what to remove: --max-size 2GB, --older-than 30d, or both")
    removed = default_cache().prune(None if max_size is None else int(max_size), older_than)
    _removed(removed, json_)


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def clear(yes: bool, json_: bool) -> None:
    """Remove everything. What Triton keeps in its own cache stays."""
    if not yes:
        click.confirm(f"Remove every compiled kernel in {_writable(default_cache())}?", abort=True, err=True)
    _removed(default_cache().clear(), json_)


def _removed(removed: dict[Path, int], json_: bool) -> None:
    if json_:
        print_json([{"path": where, "bytes": count} for where, count in removed.items()])
    else:
        click.echo(f"removed {len(removed)} entries, {size(sum(removed.values()))}")


@cache.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@as_json
def export(file: Path, json_: bool) -> None:
    """Write everything to FILE, a tar (gzipped if its name ends in gz), for `import` on another machine."""
    try:
        written = default_cache().export(file)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error}") from None
    if json_:
        print_json([_entry(entry) for entry in written])
    else:
        click.echo(f"wrote {len(written)} entries to {file}")
    if not written:
        click.echo("there is nothing to export; `ffpa-jit warm` compiles kernels", err=True)
        raise SystemExit(1)


@cache.command(name="import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@as_json
def import_(file: Path, json_: bool) -> None:
    """Take over what `export` wrote. Import only files that you would run: they hold machine code."""
    try:
        added = default_cache().import_(file)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    left = _place_for_triton()
    if json_:
        print_json({"imported": [_entry(entry) for entry in added], "triton": left})
    else:
        click.echo(f"imported {len(added)} entries into {default_cache().root}")
        for name, why in left.items():
            click.echo(f"note: {name}: {why}", err=True)


def _place_for_triton() -> dict[str, str]:
    """Put Triton's kernels where Triton looks; those that could not be, with the reason."""
    from ffpa_jit.triton import bundle

    bundles = [entry for entry in default_cache().entries() if entry.key.group == bundle.GROUP]
    return {entry.path.name: why for entry, why in bundle.restore_all(bundles)}
