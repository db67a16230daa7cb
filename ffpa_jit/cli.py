"""The command line: `ffpa-jit warm | info | explain | cache`, also `python -m ffpa_jit`.

Results go to standard output, progress and errors to standard error; `--json` prints what a program would read. The
exit code is 0 if all is well, 1 if something failed or is wrong, 2 if the command was wrong.
"""

from __future__ import annotations

import re
from typing import Any

import click

import ffpa_jit
from ffpa_jit import info as report
from ffpa_jit import registry
from ffpa_jit.backends import NAMES
from ffpa_jit.cli_cache import cache
from ffpa_jit.console import Group, as_json, listed, table, tell

_BACKENDS = ", ".join((*registry.names(), *(f"{short} ({name})" for short, name in registry.ALIASES.items())))


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(ffpa_jit.__version__, prog_name="ffpa-jit")
def main() -> None:
    """Attention for head dims 257 to 1024: compile its kernels, look after them, see what runs."""


main.add_command(cache)


@main.command(short_help="Compile kernels before their first call.")
@click.option("--headdim", required=True, callback=listed(int, "head dims"),
              help="Multiples of 8 from 264 to 1024: a list, separated by commas.")  # fmt: skip
@click.option("--dtype", default="bf16", show_default=True, callback=listed(str, "dtypes"),
              help="bf16, fp16: a list, separated by commas.")  # fmt: skip
@click.option("--acc", default="f32", show_default=True, callback=listed(str, "accumulators"),
              help="CUDA: f32, f16 (with fp16 only): a list, separated by commas.")  # fmt: skip
@click.option("--stages", callback=listed(int, "numbers"),
              help="CUDA: 1 to 4; default: 2, and 3 on sm_86, 89, 120, 121.")  # fmt: skip
@click.option("--arch", callback=listed(str, "architectures"), help="As in sm_89,sm_90a; default: the GPUs here.")
@click.option("--backend", callback=listed(str, "backends"), help=f"Of {_BACKENDS}: a list; default: all.")
@click.option("--jobs", type=click.IntRange(min=1), help="How many at a time; default: as cores and memory allow.")
@click.option("--dry-run", is_flag=True, help="Compile nothing; tell what is there.")
@as_json
def warm(headdim: list[int], json_: bool, **options: Any) -> None:
    """Compile kernels before their first call; with --arch on a machine without a GPU."""
    from ffpa_jit.warm import Result
    from ffpa_jit.warm import warm as compile_all

    def progress(result: Result, done: int, total: int) -> None:
        click.echo(f"[{done}/{total}] {result.backend} {result.name}: {result.how}"
                   + (f" in {result.seconds:.1f} s" if result.how == "built" else ""), err=True)  # fmt: skip

    try:
        results = compile_all(headdim, progress=progress, load=False, **options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    failed = [result for result in results if result.failed]
    if json_:
        tell(json_, [vars(result) for result in results])
    else:
        head = ("backend", "kernel", "result", "seconds")
        table([head, *((r.backend, r.name, r.how, f"{r.seconds:.1f}" if r.how == "built" else "") for r in results)])
        for message in dict.fromkeys(result.message for result in results if result.message and not result.failed):
            click.echo(f"note: {message}", err=True)
    for result in failed:
        click.echo(f"failed: {result.backend} {result.name}: {result.message}", err=True)
    raise SystemExit(1 if failed else 0)


@main.command(short_help="Tell what is here, for a bug report.")
@as_json
def info(json_: bool) -> None:
    """Tell versions, devices, toolchain, cache, backends and environment; the text to put into a bug report."""
    found = report.collect()
    tell(json_, found, *report.lines(found))


@main.command(short_help="Tell which backend would run a call, and why.")
@click.option("--headdim", "head_dim", type=click.IntRange(min=1), required=True, help="Of query, key and value.")
@click.option("--heads", type=click.IntRange(min=1), default=32, show_default=True, help="Of the query.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="Of key and value; default: as --heads.")
@click.option("--batch", type=click.IntRange(min=0), default=1, show_default=True, help="Size of the batch.")
@click.option("--len-q", type=click.IntRange(min=0), default=4096, show_default=True, help="Queries.")
@click.option("--len-kv", type=click.IntRange(min=0), help="Keys; default: as --len-q.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True,
              help="Of query, key and value.")  # fmt: skip
@click.option("--causal", is_flag=True, help="With is_causal=True.")
@click.option("--mask", is_flag=True, help="With a bool mask [len-q, len-kv].")
@click.option("--dropout", type=float, default=0.0, show_default=True, help="Its probability.")
@click.option("--grad", is_flag=True, help="The inputs require gradients.")
@click.option("--arch", help="As on this architecture, such as sm_90; default: the GPU here, else the CPU.")
@click.option("--backend", type=click.Choice((*NAMES, *registry.ALIASES)), help="As with this backend=.")
@as_json
def explain(arch: str | None, backend: str | None, json_: bool, **sizes: Any) -> None:
    """Tell which backend would run a call, and why not the others. Exit code 1 if the call would raise."""
    from ffpa_jit.warm import local_archs, plain_arch

    if arch is None:
        try:
            arch = local_archs()[0]
        except ValueError:
            click.echo("there is no GPU here, so this is of a call on the CPU; --arch sm_90 is one on a GPU", err=True)
    elif re.fullmatch(r"sm_\d+|gfx\w+", arch := plain_arch(arch)) is None:
        raise click.BadParameter(f"{arch!r} is no architecture such as sm_90 or gfx942", param_hint="--arch")
    named = None if backend is None else registry.ALIASES.get(backend, backend)
    found = report.explain_on(arch, report.Call(backend=named, **sizes))
    tell(json_, found.to_dict(), str(found))
    raise SystemExit(1 if found.error else 0)
