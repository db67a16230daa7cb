"""Triton's compiled kernels as entries of our cache, to be warmed on one machine and used on another.

Triton looks for kernels in a cache of its own (TRITON_CACHE_DIR, else ~/.triton/cache), and that stays so: nothing here
changes what Triton does for anybody. `STORE.warm` compiles one direction of one (architecture, head dim, dtype) into a
private directory and keeps what launches need as one file, the kernel archive, in the entry's directory `triton/`.
`install` puts what an archive holds where Triton will look on this machine, through Triton's own cache manager:

- of a kernel, the cubin (hsaco) and its metadata under the key Triton gave it, and the group file, which names the
  others by absolute path and so is written anew;
- of Triton's C modules (see `offline`) the library, under a key computed here: it depends on the machine, on whether
  there is a program `file`, and from Triton 3.8 on where Triton and libcuda are installed.

An archive serves the Triton that made it: same release and build, same Python version and machine type, same ptxas and
compile options. All of that is the compiler's id, so that another archive is not found, and Triton compiles as ever.
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
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ffpa_jit.cache import Built, Entry, default_cache
from ffpa_jit.cache.files import PLAIN_NAME
from ffpa_jit.cache.store import KernelStore
from ffpa_jit.kernel_spec import Spec, check
from ffpa_jit.triton.configs import FAMILIES, family

__all__ = ["DIRECTIONS", "STORE", "TritonSpec", "compiler_id", "install", "preinstall", "spec_for"]

_logger = logging.getLogger("ffpa_jit")

DIRECTIONS = ("forward", "backward")
ARCHS = tuple(each for name, members in FAMILIES.items() if name != "interpreter" for each in members)
_ARTEFACT, _FORMAT = "kernels.zip", 1
_NOT_SOURCES = ("backend.py", "archive.py", "__init__.py")


@dataclass(frozen=True, slots=True)
class TritonSpec(Spec):
    """One direction of the calls with one head dim and dtype on one architecture."""

    direction: str

    @property
    def variant(self) -> str:
        return self.direction


def spec_for(arch: str, head_dim: int, dtype: str, direction: str) -> TritonSpec:
    """The spec; ValueError, with what is allowed, for what has no kernels."""
    dtype = check("Triton kernels", arch, head_dim, dtype, archs=ARCHS, largest=1024)
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r}: choose 'forward' or 'backward'")
    return TritonSpec(arch, head_dim, dtype, direction)


@dataclass(frozen=True)
class _Triton:
    """Triton as a compiler, for a process that uses no GPU: another device stands in meanwhile."""

    id: str

    def compile(self, spec: TritonSpec, directory: Path) -> Built:
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
                spec.arch, spec.head_dim, getattr(torch, spec.dtype),
                samples=offline.samples_for(spec.arch, spec.head_dim),
                forward=spec.direction == "forward", backward=spec.direction == "backward",
            )  # fmt: skip
            modules = []
            if spec.arch.startswith("sm_"):
                modules = offline.helper_modules([launch.kernel for launch in launches], work)
        _pack(directory / _ARTEFACT, cache, modules)
        shutil.rmtree(work)
        return Built(_ARTEFACT, {"kernels": len(launches), "modules": [module.name for module in modules]})


class _Store(KernelStore[TritonSpec, NoReturn]):
    """Loading what is installed is Triton's own business."""

    spec_type, group, title = TritonSpec, "triton", "Triton kernel archive"

    def compiler(self, spec: TritonSpec, kind: str | None = None) -> _Triton:
        return _Triton(compiler_id(spec.arch))

    def warm(self, spec: TritonSpec, kind: str | None = None) -> tuple[Entry, str, float]:
        """The same; RuntimeError where Triton cannot compile for a device that is not here."""
        from ffpa_jit.triton.offline import check_triton

        check_triton()
        return super().warm(spec)

    def find(self, spec: TritonSpec, kind: str | None = None) -> Entry | None:
        """The archive of this very Triton: no other serves."""
        return default_cache().find(self.key_of(spec, compiler_id(spec.arch)))

    def digest(self, spec: TritonSpec) -> str:
        return _source_digest(spec.arch)

    def install(self, entry: Entry) -> str:
        mine = compiler_id(str(entry.key.spec["arch"]))
        if entry.key.compiler != mine:
            return f"it was made by {entry.key.compiler}, and here is {mine}"
        try:
            left_out = install(entry)
        except OSError as error:
            return f"Triton's cache here cannot be written ({error}); the kernels are put there by a first call"
        if not entry.meta["modules"]:
            return "Triton compiles its own launcher at the first call, for which it needs a C compiler there"
        return left_out


STORE = _Store()


def _source_digest(arch: str) -> str:
    folder = Path(__file__).parent
    files = [path for path in sorted(folder.rglob("*.py")) if path.name not in _NOT_SOURCES]
    digest = hashlib.sha256(str(_FORMAT).encode())
    for path in (*files, folder / "configs" / f"{family(arch)}.json"):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compiler_id(arch: str) -> str:
    """This machine's Triton, as far as it decides what is compiled for `arch`; in words and a digest."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import make_backend
    from triton.runtime.cache import triton_key

    from ffpa_jit.triton.offline import target_of

    backend = make_backend(target_of(arch))
    options = backend.parse_options({}).hash()
    settings = sorted(get_cache_invalidating_env_vars().items())
    everything = json.dumps([triton_key(), backend.hash(), options, settings, _abi()])
    return f"triton {triton.__version__} {_abi()} {hashlib.sha256(everything.encode()).hexdigest()[:16]}"


def _abi() -> str:
    """Which Python's modules are loaded here: "cpython-312-x86_64-linux-gnu"."""
    return str(sysconfig.get_config_var("EXT_SUFFIX")).strip(".").rsplit(".", 1)[0]


def _pack(target: Path, cache: Path, modules: list[Any]) -> None:
    """Everything to a zip: `kernels/<key>/<file>`, `modules/<n>/source` and `library`, and manifest.json."""
    kernels = {}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for group in sorted(cache.glob("*/__grp__*.json")):
            metadata = group.name.removeprefix("__grp__")
            names = [metadata, *(f"{metadata.removesuffix('.json')}.{kind}" for kind in ("cubin", "hsaco"))]
            names = [name for name in names if (group.parent / name).is_file()]
            for name in names:
                archive.write(group.parent / name, f"kernels/{group.parent.name}/{name}")
            kernels[group.parent.name] = names
        for i, module in enumerate(modules):
            archive.writestr(f"modules/{i}/source", module.source)
            archive.writestr(f"modules/{i}/library", module.library)
        manifest = {"format": _FORMAT, "kernels": kernels, "modules": [module.name for module in modules],
                    "glibc": platform.libc_ver()[1]}  # fmt: skip
        archive.writestr("manifest.json", json.dumps(manifest, indent=1))


def install(entry: Entry) -> str:
    """Put into Triton's cache of this machine what it does not have of an archive of this machine's Triton; what cannot
    be put there, "" for nothing.

    OSError where that cache cannot be written.
    """
    with zipfile.ZipFile(entry.artefact) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        # They become paths. An entry's hash says that it is whole, not where it comes from.
        names = [name for key, names in manifest["kernels"].items() for name in (key, *names)]
        if not all(PLAIN_NAME.fullmatch(name) for name in (*names, *manifest["modules"])):
            raise ValueError(f"{entry.path.name} names files that no kernel archive holds")
        for key, names in manifest["kernels"].items():
            _install_kernel(archive, key, names)
        if not manifest["modules"]:
            return ""
        return _glibc_too_old(manifest["glibc"]) or _install_modules(archive, manifest["modules"])


def _install_kernel(archive: zipfile.ZipFile, key: str, names: list[str]) -> None:
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager(base64.b32decode(key + "=" * (-len(key) % 8)).hex())
    there = manager.get_group(names[0]) or {}
    if all(name in there for name in names):
        return
    paths = {name: _put(manager, archive.read(f"kernels/{key}/{name}"), name) for name in names}
    manager.put_group(names[0], paths)  # last: with it the kernel is there


def _put(manager: Any, data: bytes, name: str) -> str:
    try:
        return str(manager.put(data, name))
    except OSError:
        path = manager.get_file(name)  # Triton fails to remove its temporary directory on some network file systems
        if path is None:
            raise
        return str(path)


def _glibc_too_old(glibc: str) -> str:
    """Why libraries that were linked against this glibc do not load here; "" if they do."""
    mine = platform.libc_ver()[1]
    needed, there = ([int(part) for part in each.split(".") if part.isdecimal()] for each in (glibc, mine))
    if there and needed > there:
        return f"Triton's C modules need glibc {glibc}, and here is {mine}; a C compiler is needed for the first call"
    return ""


def _install_modules(archive: zipfile.ZipFile, names: list[str]) -> str:
    """What could not be installed."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for i, name in enumerate(names):
        try:
            managers = list(_managers_of(archive.read(f"modules/{i}/source")))
        except (AssertionError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"the C modules of this Triton can only be placed where libcuda is: a first call does it ({reason})"
        for manager in managers:
            if manager.get_file(f"{name}{suffix}") is None:
                _put(manager, archive.read(f"modules/{i}/library"), f"{name}{suffix}")
    return ""


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


_preinstalled: set[TritonSpec] = set()


def preinstall(arch: str, head_dim: int, dtype: str, direction: str) -> None:
    """Before a first call: install the archive of it, if any cache has one. Never an error; once a process."""
    with contextlib.suppress(ValueError):
        spec = spec_for(arch, head_dim, dtype, direction)
        if spec in _preinstalled:
            return
        _preinstalled.add(spec)
        if not any((root / STORE.group).is_dir() for root, _ in default_cache().roots()):
            return
        try:
            entry = STORE.find(spec)
            left_out = "" if entry is None else install(entry)
        except Exception as error:  # whatever Triton or a file system comes up with: Triton compiles then
            _logger.warning("the warmed Triton kernels of %s are not used: %s", spec.slug, error)
            return
        if left_out:
            _logger.warning("%s: %s", spec.slug, left_out)
