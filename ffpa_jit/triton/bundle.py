"""Triton's compiled kernels as an entry of our cache, to be warmed on one machine and used on another.

Triton looks for kernels in a cache of its own (TRITON_CACHE_DIR, else ~/.triton/cache), and that stays so: nothing here
changes what Triton does for anybody. `warm` compiles one direction of one (architecture, head dim, dtype) into a
private directory and keeps what launches need as one file, the bundle, in the entry's directory `triton/`. `restore`
puts what a bundle holds where Triton will look on this machine, through Triton's own cache manager:

- of a kernel, the cubin (hsaco) and its metadata under the key Triton gave it, and the group file, which names the
  others by absolute path and so is written anew;
- of Triton's C modules (see `offline`) the library, under a key computed here: it depends on the machine, on whether
  there is a program `file`, and from Triton 3.8 on where Triton and libcuda are installed.

A bundle serves the Triton that made it: same release and build, same Python version and machine type, same ptxas and
compile options. All of that is the key's `compiler`, so that another bundle is not found, and Triton compiles as ever.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import logging
import platform
import shutil
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ffpa_jit.cache import Built, Entry, Key, default_cache
from ffpa_jit.cache.files import PLAIN_NAME
from ffpa_jit.triton.configs import FAMILIES, family

__all__ = [
    "DIRECTIONS", "GROUP", "Restored", "TritonSpec", "find", "here", "key_of", "restore", "restore_all", "serve",
    "spec_for", "warm",
]  # fmt: skip

_logger = logging.getLogger("ffpa_jit")

GROUP = "triton"
DIRECTIONS = ("forward", "backward")
_ARTEFACT, _FORMAT = "kernels.zip", 1
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_NOT_SOURCES = ("backend.py", "bundle.py", "__init__.py")


@dataclass(frozen=True)
class TritonSpec:
    """One direction of the calls with one head dim and dtype ("float16", "bfloat16") on one architecture."""

    arch: str
    head_dim: int
    dtype: str
    direction: str

    @property
    def slug(self) -> str:
        short = {long: short for short, long in _DTYPES.items()}[self.dtype]
        return f"{self.arch}-d{self.head_dim}-{short}-{self.direction}"


def spec_for(arch: str, head_dim: int, dtype: str, direction: str) -> TritonSpec:
    """The spec; ValueError, with what is allowed, for what has no kernels."""
    dtype = _DTYPES.get(dtype, dtype)
    if family(arch) is None or arch == "interpreter":
        served = ", ".join(each for name, members in FAMILIES.items() if name != "interpreter" for each in members)
        raise ValueError(f"arch={arch!r} has no Triton kernels; choose one of {served}")
    if not 256 < head_dim <= 1024 or head_dim % 8:
        raise ValueError(f"head_dim={head_dim} has no Triton kernels; they serve multiples of 8 from 264 to 1024")
    if dtype not in _DTYPES.values():
        raise ValueError(f"dtype={dtype!r} has no Triton kernels; choose 'bf16' or 'fp16'")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r}: choose 'forward' or 'backward'")
    return TritonSpec(arch, head_dim, dtype, direction)


def key_of(spec: TritonSpec) -> Key:
    """The cache key of a bundle made by this machine's Triton. Imports Triton."""
    return Key(GROUP, spec.slug, asdict(spec), _source_digest(spec.arch), here(spec.arch))


def _source_digest(arch: str) -> str:
    folder = Path(__file__).parent
    files = [path for path in sorted(folder.rglob("*.py")) if path.name not in _NOT_SOURCES]
    digest = hashlib.sha256(str(_FORMAT).encode())
    for path in (*files, folder / "configs" / f"{family(arch)}.json"):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def here(arch: str) -> str:
    """This machine's Triton, as far as it decides what is compiled for `arch`; in words and a digest."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import compiler, make_backend

    from ffpa_jit.triton.offline import target_of

    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        triton_key = compiler.triton_key  # Triton 3.4
    backend = make_backend(target_of(arch))
    options = backend.parse_options({}).hash()
    settings = sorted(get_cache_invalidating_env_vars().items())
    everything = json.dumps([triton_key(), backend.hash(), options, settings, _abi()])
    return f"triton {triton.__version__} {_abi()} {hashlib.sha256(everything.encode()).hexdigest()[:16]}"


def _abi() -> str:
    """Which Python's modules are loaded here: "cpython-312-x86_64-linux-gnu"."""
    return str(sysconfig.get_config_var("EXT_SUFFIX")).strip(".").rsplit(".", 1)[0]


def find(spec: TritonSpec) -> Entry | None:
    """The bundle of this machine's Triton, if there is one."""
    return default_cache().find(key_of(spec))


def warm(spec: TritonSpec) -> tuple[Entry, str, float, str]:
    """The bundle of `spec`, found ("hit") or made ("built"), and the seconds that took; restored here, and what of it
    could not be ("" for nothing).

    For a process that uses no GPU: Triton is told of another device meanwhile. RuntimeError with the reason.
    """
    from ffpa_jit.triton.offline import check_triton

    check_triton()
    start = time.perf_counter()
    built: list[bool] = []

    def build(directory: Path) -> Built:
        built.append(True)
        return _build(spec, directory)

    entry = default_cache().get(key_of(spec), build, f"the Triton kernels of {spec.slug}")
    try:
        left_out = restore(entry).left_out
    except OSError as error:
        left_out = f"Triton's cache here cannot be written ({error}); the kernels are put there by a first call"
    if not entry.meta["modules"]:
        left_out = "Triton compiles its own launcher at the first call, for which it needs a C compiler there"
    return entry, "built" if built else "hit", time.perf_counter() - start, left_out


def _build(spec: TritonSpec, directory: Path) -> Built:
    import torch
    from triton import knobs

    from ffpa_jit.triton import offline

    work = directory / "work"
    cache = work / "cache"
    cache.mkdir(parents=True)
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir, knobs.cache.manager_class = str(cache), None
        knobs.compilation.override = knobs.compilation.dump_ir = knobs.compilation.always_compile = False
        launches = offline.compile_call(
            spec.arch, spec.head_dim, getattr(torch, spec.dtype), samples=offline.samples_for(spec.arch, spec.head_dim),
            forward=spec.direction == "forward", backward=spec.direction == "backward",
        )  # fmt: skip
        modules = []
        if spec.arch.startswith("sm_"):
            modules = offline.helper_modules([launch.kernel for launch in launches], work)
    _pack(directory / _ARTEFACT, cache, modules)
    shutil.rmtree(work)
    return Built(_ARTEFACT, {"kernels": len(launches), "modules": [module.name for module in modules]})


def _pack(target: Path, cache: Path, modules: list[Any]) -> None:
    """Everything to a zip: `kernels/<key>/<file>`, `modules/<n>/source` and `library`, and manifest.json."""
    kernels = {}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as bundle:
        for group in sorted(cache.glob("*/__grp__*.json")):
            metadata = group.name.removeprefix("__grp__")
            names = [metadata, *(f"{metadata.removesuffix('.json')}.{kind}" for kind in ("cubin", "hsaco"))]
            names = [name for name in names if (group.parent / name).is_file()]
            for name in names:
                bundle.write(group.parent / name, f"kernels/{group.parent.name}/{name}")
            kernels[group.parent.name] = names
        for i, module in enumerate(modules):
            bundle.writestr(f"modules/{i}/source", module.source)
            bundle.writestr(f"modules/{i}/library", module.library)
        manifest = {"format": _FORMAT, "kernels": kernels, "modules": [module.name for module in modules],
                    "glibc": platform.libc_ver()[1]}  # fmt: skip
        bundle.writestr("manifest.json", json.dumps(manifest, indent=1))


@dataclass(frozen=True)
class Restored:
    """What `restore` has put into Triton's cache, and what could not be put there, "" for nothing."""

    kernels: int
    modules: int
    left_out: str = ""


def restore(entry: Entry) -> Restored:
    """Put into Triton's cache of this machine what it does not have of a bundle of this machine's Triton.

    OSError where that cache cannot be written.
    """
    with zipfile.ZipFile(entry.artefact) as bundle:
        manifest = json.loads(bundle.read("manifest.json"))
        # They become paths. An entry's hash says that it is whole, not where it comes from.
        names = [name for key, names in manifest["kernels"].items() for name in (key, *names)]
        if not all(PLAIN_NAME.fullmatch(name) for name in (*names, *manifest["modules"])):
            raise ValueError(f"{entry.path.name} names files that no bundle holds")
        kernels = sum(_restore_kernel(bundle, key, names) for key, names in manifest["kernels"].items())
        modules, left_out = 0, ""
        if manifest["modules"]:
            left_out = _unloadable(manifest["glibc"])
            if not left_out:
                modules, left_out = _restore_modules(bundle, manifest["modules"])
    return Restored(kernels, modules, left_out)


def _restore_kernel(bundle: zipfile.ZipFile, key: str, names: list[str]) -> bool:
    """Whether there was something to do."""
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager(base64.b32decode(key + "=" * (-len(key) % 8)).hex())
    there = manager.get_group(names[0]) or {}
    if all(name in there for name in names):
        return False
    paths = {name: _put(manager, bundle.read(f"kernels/{key}/{name}"), name) for name in names}
    manager.put_group(names[0], paths)  # last: with it the kernel is there
    return True


def _put(manager: Any, data: bytes, name: str) -> str:
    try:
        return str(manager.put(data, name))
    except OSError:
        path = manager.get_file(name)  # Triton fails to remove its temporary directory on some network file systems
        if path is None:
            raise
        return str(path)


def _unloadable(glibc: str) -> str:
    """Why libraries that were linked against this glibc do not load here; "" if they do."""
    mine = platform.libc_ver()[1]
    if glibc and mine and _numbers(glibc) > _numbers(mine):
        return f"Triton's C modules need glibc {glibc}, and here is {mine}; a C compiler is needed for the first call"
    return ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def _restore_modules(bundle: zipfile.ZipFile, names: list[str]) -> tuple[int, str]:
    done = 0
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for i, name in enumerate(names):
        source = bundle.read(f"modules/{i}/source")
        try:
            managers = list(_managers_of(source))
        except (AssertionError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return (
                done,
                f"the C modules of this Triton can only be placed where libcuda is: a first call does it ({reason})",
            )
        new = [manager for manager in managers if manager.get_file(f"{name}{suffix}") is None]
        for manager in new:
            _put(manager, bundle.read(f"modules/{i}/library"), f"{name}{suffix}")
        done += bool(new)
    return done, ""


def _managers_of(source: bytes) -> Iterator[Any]:
    """The places where Triton looks for a C module: with a program `file` in the PATH, and without."""
    from triton.backends.nvidia import driver
    from triton.runtime import build
    from triton.runtime.cache import get_cache_manager

    bits = platform.architecture(executable="")[0]
    own = build.platform_key
    for linkage in ("ELF", ""):
        text = ",".join([platform.machine(), platform.system(), bits, linkage])
        if not hasattr(build, "_get_cache_manager"):  # up to Triton 3.7
            yield get_cache_manager(hashlib.sha256(source + text.encode()).hexdigest())
            continue
        config = {"language": ["c"], "library_dirs": driver.library_dirs(), "include_dirs": driver.include_dirs,
                  "libraries": driver.libraries, "ccflags": None}  # fmt: skip
        build.platform_key = functools.partial(str, text)
        try:
            yield build._get_cache_manager(source, config=config)
        finally:
            build.platform_key = own


_served: set[TritonSpec] = set()


def serve(arch: str, head_dim: int, dtype: str, direction: str) -> None:
    """Before a first call: restore the bundle of it, if any cache has one. Never an error; once a process."""
    with contextlib.suppress(ValueError):
        spec = spec_for(arch, head_dim, dtype, direction)
        if spec in _served:
            return
        _served.add(spec)
        if not any(each.is_dir() for root, _ in default_cache().roots() for each in [root / GROUP]):
            return
        try:
            entry = find(spec)
            done = None if entry is None else restore(entry)
        except Exception as error:  # whatever Triton or a file system comes up with: Triton compiles then
            _logger.warning("the warmed Triton kernels of %s are not used: %s", spec.slug, error)
            return
        if done is not None and done.left_out:
            _logger.warning("%s: %s", spec.slug, done.left_out)


def restore_all(entries: list[Entry]) -> list[tuple[Entry, str]]:
    """Restore those of `entries` that are bundles of this machine's Triton; the others, with the reason."""
    left = []
    for entry in entries:
        if entry.key.group == GROUP:
            try:
                mine = here(str(entry.key.spec["arch"]))
                if entry.key.compiler != mine:
                    left.append((entry, f"it was made by {entry.key.compiler}, and here is {mine}"))
                    continue
                done = restore(entry)
                if done.left_out:
                    left.append((entry, done.left_out))
            except Exception as error:
                left.append((entry, f"{type(error).__name__}: {error}"))
    return left
