"""What `ffpa-jit info` tells: everything about this machine that decides which kernels run, ready for json."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ffpa_jit import problem, settings
from ffpa_jit.console import counted, size
from ffpa_jit.dispatch import Explanation

__all__ = ["collect", "explain_on", "lines"]


def collect() -> dict[str, Any]:
    """All sections. Touches no GPU where there is none, and compiles nothing; what cannot be found out says why."""
    devices = _guarded(_devices)
    arch = devices[0]["arch"] if isinstance(devices, list) and devices else None
    return {
        "versions": _versions(),
        "devices": devices,
        "toolchain": _guarded(_toolchain),
        "cache": _guarded(_cache),
        "backends": _guarded(lambda: _backends(arch)),
        "environment": _variables(),
    }


def _guarded(section: Any) -> Any:
    """A section, or why it cannot be had: a report for a bug must not stop at it."""
    try:
        return section()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, str | None]:
    import torch

    import ffpa_jit

    def of(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "ffpa-jit": ffpa_jit.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda,
        "torch's HIP": torch.version.hip,
        "triton": of("triton") or of("triton-windows") or of("pytorch-triton-rocm"),
        "nvidia-cutlass-dsl": of("nvidia-cutlass-dsl"),
    }


def _devices() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append({
            "name": properties.name, "arch": problem.device_arch("cuda", index),
            "memory_gib": round(properties.total_memory / 2**30, 1), "processors": properties.multi_processor_count,
        })  # fmt: skip
    return found


def _toolchain() -> dict[str, Any]:
    """`used`: the compiler that a first call of the CUDA backend would take, in words; `probes`: what was looked for,
    last the CuTe-DSL backend's."""
    from ffpa_jit import toolchain

    probes = [
        {"name": each.name, "found": each.found, "detail": each.detail, "remedy": each.remedy}
        for each in toolchain.probes()
    ]
    return {"used": _compiler(), "probes": [*probes, _dsl()]}


def _dsl() -> dict[str, Any]:
    """The CuTe DSL, as a probe."""
    from ffpa_jit import registry
    from ffpa_jit.cute import toolkit

    absent = registry.missing("cutedsl")
    found = toolkit.find() if absent is None else absent.reason
    if isinstance(found, toolkit.Toolkit):
        return {"name": "CuTe-DSL", "found": True, "detail": f"{found.ident} in {found.runtime.parent}", "remedy": ""}
    reason, _, remedy = found.partition(": ")
    return {"name": "CuTe-DSL", "found": False, "detail": reason, "remedy": remedy}


def _compiler() -> str:
    from ffpa_jit import toolchain
    from ffpa_jit.cuda.build import find_compiler

    try:
        found, wanted = find_compiler(), settings.compiler()
    except ValueError as error:
        return f"error: {error}"
    if found is not None:
        return "used: " + " ".join(found.ident.split()[:2]) + (" (FFPA_JIT_COMPILER)" if wanted else "")
    if wanted is not None:
        return f"none: FFPA_JIT_COMPILER={wanted}, which cannot be used; unset it, or install what is missing of it"
    return f"none: {toolchain.REMEDY}"


def _cache() -> dict[str, Any]:
    from ffpa_jit.cache import default_cache

    cache = default_cache()
    entries = cache.entries()
    groups = {name: sum(entry.key.group == name for entry in entries) for name in {e.key.group for e in entries}}
    return {
        "path": str(cache.root) if cache.root else None,
        "refused": cache.refusal(),
        "searched_first": [str(each) for each in cache.search],
        "entries": len(entries),
        "groups": groups,
        "bytes": sum(entry.disk_bytes for entry in entries),
    }


def _backends(arch: str | None) -> dict[str, Any]:
    explanation = explain_on(arch, head_dim=512, heads=32, kv_heads=8, len_q=4096, len_kv=4096, grad=True)
    return explanation.to_dict()


def _variables() -> dict[str, str]:
    """Those that are set of the variables that `settings` lists, and Triton's place of its cache."""
    names = dict.fromkeys(re.findall(r"`([A-Z][A-Z_]+)`(?=[^|]*\|[^|]*\|[^|]*\|)", settings.__doc__ or ""))
    shown = [name for name in names if name not in ("PATH", "LD_LIBRARY_PATH")]
    shown += ["TRITON_CACHE_DIR", "TRITON_HOME", "CUDA_VISIBLE_DEVICES", "CC"]
    return {name: os.environ[name] for name in shown if name in os.environ}


def explain_on(
    arch: str | None, *, head_dim: int, heads: int, kv_heads: int, len_q: int, len_kv: int, dtype: str = "bf16",
    batch: int = 1, causal: bool = False, mask: bool = False, dropout: float = 0.0, grad: bool = False,
    backend: str | None = None,
) -> Explanation:  # fmt: skip
    """`ffpa_jit.explain` of a call with these sizes on a GPU of `arch`; None: on the CPU. Nothing is allocated."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ffpa_jit.attention import explain

    device = "cpu" if arch is None else "cuda"
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    with _as_on(arch), FakeTensorMode(), torch.enable_grad():
        q = torch.empty(batch, heads, len_q, head_dim, dtype=kind, device=device, requires_grad=grad)
        k, v = (torch.empty(batch, kv_heads, len_kv, head_dim, dtype=kind, device=device, requires_grad=grad)
                for _ in range(2))  # fmt: skip
        attn_mask = torch.empty(len_q, len_kv, dtype=torch.bool, device=device) if mask else None
        found = explain(
            q, k, v, attn_mask, dropout_p=dropout, is_causal=causal, enable_gqa=heads != kv_heads, backend=backend
        )
    return found if arch is None else replace(found, summary=re.sub(r"\bcuda:\d+", arch, found.summary))


@contextlib.contextmanager
def _as_on(arch: str | None) -> Iterator[None]:
    """Inside, CUDA devices are of this architecture."""
    if arch is None:
        yield
        return
    own = problem._cuda_arch
    problem._cuda_arch = lambda index: arch  # type: ignore[assignment]
    try:
        yield
    finally:
        problem._cuda_arch = own


def lines(report: dict[str, Any]) -> list[str]:
    """What `collect` found, to be read."""
    shown = ["versions"]
    shown += [f"  {name}: {value or 'none'}" for name, value in report["versions"].items()]
    shown.append("devices" if report["devices"] else "devices: none")
    shown += _failed(report["devices"]) or [
        f"  {i}: {each['name']}, {each['arch']}, {each['memory_gib']} GiB, {each['processors']} processors"
        for i, each in enumerate(report["devices"])
    ]
    shown.append("toolchain")
    shown += _failed(report["toolchain"]) or [
        f"  {report['toolchain']['used']}",
        *(
            f"  {'found  ' if each['found'] else 'missing'} {each['name']}: {each['detail']}"
            + (f" ({each['remedy']})" if each["remedy"] and not each["found"] else "")
            for each in report["toolchain"]["probes"]
        ),
    ]
    shown.append("cache")
    cache = report["cache"]
    shown += _failed(cache) or [
        f"  {cache['path'] or 'none: there is no home directory'}",
        *(f"  searched first: {each}" for each in cache["searched_first"]),
        *([f"  not used: {cache['refused']}"] if cache["refused"] else []),
        f"  {counted(cache['entries'])}, {size(cache['bytes'])}",
    ]
    shown.append("backends, for a training call of D=512")
    backends = report["backends"]
    if _failed(backends):
        shown += _failed(backends)
    else:
        shown += ["  " + line for line in str(Explanation(**backends)).splitlines()]
    shown.append("environment" if report["environment"] else "environment: nothing set")
    shown += [f"  {name}={value}" for name, value in report["environment"].items()]
    return shown


def _failed(section: Any) -> list[str]:
    return [f"  {section['error']}"] if isinstance(section, dict) and set(section) == {"error"} else []
