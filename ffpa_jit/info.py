"""What `ffpa-jit info` tells: everything about this machine that decides which kernels run, ready for json."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ffpa_jit import problem, settings, toolchain
from ffpa_jit.console import counted, size
from ffpa_jit.dispatch import Explanation
from ffpa_jit.toolchain import Probe

__all__ = ["Call", "collect", "explain_on", "lines"]


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
    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": each.name, "arch": problem.device_arch("cuda", index),
         "memory_gib": round(each.total_memory / 2**30, 1), "sms": each.multi_processor_count}
        for index, each in enumerate(every)
    ]  # fmt: skip


def _toolchain() -> dict[str, Any]:
    """`used`: the compiler that a first call of the CUDA backend would take, in words; `probes`: what was looked for,
    last the CuTe DSL backend's."""
    return {"used": _compiler(), "probes": [asdict(each) for each in (*toolchain.probes(), _dsl())]}


def _dsl() -> Probe:
    """The CuTe DSL."""
    from ffpa_jit import registry
    from ffpa_jit.cute import toolkit

    absent = registry.missing("cutedsl")
    found = toolkit.find() if absent is None else absent.reason
    if isinstance(found, toolkit.Toolkit):
        return Probe("CuTe DSL", True, f"{found.compiler_id} in {found.runtime.parent}", "")
    reason, _, remedy = found.partition(": ")
    return Probe("CuTe DSL", False, reason, remedy)


def _compiler() -> str:
    from ffpa_jit.cuda.kernels import STORE

    try:
        found, wanted = STORE.compiler(), settings.compiler()
    except ValueError as error:
        return f"error: {error}"
    if found is not None:
        return "used: " + " ".join(found.id.split()[:2]) + (" (FFPA_JIT_COMPILER)" if wanted else "")
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
    return explain_on(arch, Call(head_dim=512, heads=32, kv_heads=8, grad=True)).to_dict()


def _variables() -> dict[str, str]:
    """Those that are set of the variables that `settings` lists, and Triton's place of its cache."""
    names = dict.fromkeys(re.findall(r"`([A-Z][A-Z_]+)`(?=[^|]*\|[^|]*\|[^|]*\|)", settings.__doc__ or ""))
    shown = [name for name in names if name not in ("PATH", "LD_LIBRARY_PATH")]
    shown += ["TRITON_CACHE_DIR", "TRITON_HOME", "CUDA_VISIBLE_DEVICES", "CC"]
    return {name: os.environ[name] for name in shown if name in os.environ}


@dataclass(frozen=True)
class Call:
    """A call of `ffpa_attn_func` by its sizes. `kv_heads`, `len_kv`: None is as `heads`, `len_q`."""

    head_dim: int
    heads: int
    kv_heads: int | None = None
    len_q: int = 4096
    len_kv: int | None = None
    batch: int = 1
    dtype: str = "bf16"
    causal: bool = False
    mask: bool = False
    dropout: float = 0.0
    grad: bool = False
    backend: str | None = None


def explain_on(arch: str | None, call: Call) -> Explanation:
    """`ffpa_jit.explain` of a call on a GPU of `arch`; None: on the CPU. Nothing is allocated."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ffpa_jit.attention import explain

    device = "cpu" if arch is None else "cuda"
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[call.dtype]
    kv_heads = call.heads if call.kv_heads is None else call.kv_heads
    len_kv = call.len_q if call.len_kv is None else call.len_kv
    with _as_on(arch), FakeTensorMode(), torch.enable_grad():
        q, k, v = (
            torch.empty(call.batch, heads, length, call.head_dim, dtype=kind, device=device, requires_grad=call.grad)
            for heads, length in ((call.heads, call.len_q), (kv_heads, len_kv), (kv_heads, len_kv))
        )
        mask = torch.empty(call.len_q, len_kv, dtype=torch.bool, device=device) if call.mask else None
        found = explain(q, k, v, mask, dropout_p=call.dropout, is_causal=call.causal,
                        enable_gqa=call.heads != kv_heads, backend=call.backend)  # fmt: skip
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
        f"  {i}: {each['name']}, {each['arch']}, {each['memory_gib']} GiB, {each['sms']} SMs"
        for i, each in enumerate(report["devices"])
    ]
    shown.append("toolchain")
    found = report["toolchain"]
    shown += _failed(found) or [f"  {found['used']}", *(f"  {Probe(**each)}" for each in found["probes"])]
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
    shown += _failed(backends) or ["  " + line for line in str(Explanation(**backends)).splitlines()]
    shown.append("environment" if report["environment"] else "environment: nothing set")
    shown += [f"  {name}={value}" for name, value in report["environment"].items()]
    return shown


def _failed(section: Any) -> list[str]:
    return [f"  {section['error']}"] if isinstance(section, dict) and set(section) == {"error"} else []
