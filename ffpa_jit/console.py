"""What the commands share: options with a form of their own, and output as JSON or as a table."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["BYTES", "SECONDS", "as_json", "counted", "listed", "size", "table", "tell"]

T = TypeVar("T")

as_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


class Group(click.Group):
    """Commands whose errors are messages: what this package refuses, and what the system does, is no crash."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            if isinstance(error, click.exceptions.Exit) or getattr(error, "errno", None) == errno.EPIPE:
                raise  # click's own business
            raise click.ClickException(str(error)) from error


def listed(convert: Callable[[str], T], what: str) -> Callable[[Any, Any, str | None], list[T] | None]:
    """The callback of an option whose value is a list with commas."""

    def callback(context: Any, parameter: Any, text: str | None) -> list[T] | None:
        if text is None:
            return None
        try:
            return [convert(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list of {what}, separated by commas") from None

    return callback


def quantity(units: dict[str, float], what: str) -> Callable[[Any, Any, str | None], float | None]:
    """The callback of an option that is a number with a unit."""

    def callback(context: Any, parameter: Any, text: str | None) -> float | None:
        if text is None:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
        if found is None or found[2] not in units:
            raise click.BadParameter(f"{text!r} is not {what}")
        return float(found[1]) * units[found[2]]

    return callback


BYTES = quantity(
    {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30},
    "a size such as 500MB, 2GB or 1GiB",
)
SECONDS = quantity({"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}, "an age such as 12h, 30d or 4w")


def tell(json_: bool, value: Any, *lines: str) -> None:
    """Print `value` as JSON if that is asked for, else the lines."""
    if json_ or lines:
        click.echo(json.dumps(value, indent=2, default=str) if json_ else "\n".join(lines))


def table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def counted(count: int) -> str:
    """So many entries: "1 entry", "2 entries"."""
    return f"{count} {'entry' if count == 1 else 'entries'}"


def size(count: int) -> str:
    """Bytes in words: "3.4 MB"."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
