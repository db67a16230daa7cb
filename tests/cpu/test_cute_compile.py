"""Every shipped specialisation of the CuTe-DSL forward compiles for sm_90a and keeps within its budgets; without a GPU.

Each is compiled once in a run of the tests, in a process of its own; two at a time, or where pytest-xdist has several
workers, by the one that first needs it. What the others find is the PTX and the cubin, which is what ships. `ptxas`
reads the PTX once more, because it alone says what it has done to wgmma.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import re
import struct
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from ffpa_jit.cute import compile as kernels
from ffpa_jit.cute import toolkit
from ffpa_jit.cute.schedule import COPY_REGISTERS, LAUNCH_REGISTERS, SHARED_LIMIT, THREADS, Schedule, schedule_of
from ffpa_jit.cute.spec import ARCHS, HEAD_DIMS, KernelSpec, spec_for, target_of
from tests.cpu.conftest import ROOT
from tests.cpu.forking import Forking

HERE = toolkit.find()
pytestmark = pytest.mark.skipif(isinstance(HERE, str), reason=str(HERE))

SPECS = [
    spec_for(arch, head_dim, dtype, causal)
    for arch in ARCHS
    for head_dim in HEAD_DIMS
    for dtype in ("bf16", "fp16")
    for causal in (False, True)
]
WARPGROUPS = 4
FRAME_SIZE, REGISTER_COUNT = 0x11, 0x2F  # attributes in a cubin's .nv.info
PATIENCE = 300.0

every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)

# As the backend's own compiling process: without torch, and with no GPU to see.
COMPILE = """
import importlib, json, os, sys, types
root, module, fields, target, directory = sys.argv[1:]
assert "torch" not in sys.modules
os.chdir(directory)
package = types.ModuleType("ffpa_jit")
package.__path__ = [root + "/ffpa_jit"]
sys.modules["ffpa_jit"] = package
sys.path.append(root)
from cutlass import cute
function, arguments = importlib.import_module(module).entry(types.SimpleNamespace(**json.loads(fields)))
cute.compile(
    function, *arguments, options=f"--gpu-arch {target} --keep-ptx --keep-cubin --dump-dir {directory}"
)
"""


_forking = threading.local()


def compiling(target: str) -> Forking:
    """This thread's process that has imported the DSL, for one architecture."""
    if not hasattr(_forking, target):
        mine = dict.fromkeys(name for name in os.environ if name.startswith("CUTE_DSL_"))
        mine.update(CUDA_VISIBLE_DEVICES="", CUTE_DSL_ARCH=target, NO_COLOR="1")
        setattr(_forking, target, Forking(["cutlass.cute"], **mine))
    return getattr(_forking, target)


def compile_into(directory: Path, spec: KernelSpec) -> None:
    """Leave what the DSL makes of `spec` in `directory`; its output in log.txt, and "done" when that was all."""
    with FileLock(f"{directory}.lock"):
        if (directory / "done").exists():
            return
        directory.mkdir(exist_ok=True)
        fields, target = json.dumps(dataclasses.asdict(spec)), target_of(spec)
        task = "-c", COMPILE, str(ROOT), kernels.KERNELS, fields, target, str(directory)
        try:
            (directory / "log.txt").write_text(compiling(target).run(*task, timeout=PATIENCE))
            done = "0"
        except AssertionError as error:
            (directory / "log.txt").write_text(str(error))
            done = "failed"
        (directory / "done").write_text(done)


class Artefacts:
    """What one specialisation was compiled to."""

    def __init__(self, spec: KernelSpec, directory: Path) -> None:
        log = (directory / "log.txt").read_text()
        assert (directory / "done").read_text() == "0", f"{spec.slug} does not compile:\n{log[-3000:]}"
        self.log = log
        self.ptx_files = sorted(directory.glob("*.ptx"))
        self.cubins = sorted(directory.glob("*.cubin"))
        assert self.ptx_files, f"no PTX in {directory}: {sorted(directory.iterdir())}"
        assert self.cubins, f"no cubin in {directory}: {sorted(directory.iterdir())}"

    @property
    def ptx(self) -> str:
        return "\n".join(path.read_text() for path in self.ptx_files)


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """`compiled(spec)`: its Artefacts. All that this run asks for are begun at once, if it runs in one process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    base = tmp_path_factory.getbasetemp()
    base = (base.parent if worker else base) / "cute-compiled"  # the parent is that of all workers of a run
    base.mkdir(exist_ok=True)

    def directory(spec: KernelSpec) -> Path:
        return base / spec.slug

    wanted = [item.callspec.params.get("spec") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        ahead = dict.fromkeys(each for each in wanted if isinstance(each, KernelSpec)) if not worker else ()
        for spec in ahead:
            pool.submit(compile_into, directory(spec), spec)

        def artefacts(spec: KernelSpec) -> Artefacts:
            compile_into(directory(spec), spec)
            return Artefacts(spec, directory(spec))

        yield artefacts
        pool.shutdown(cancel_futures=True)


# What a cubin says of its kernels.


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of every section of a 64-bit ELF file."""
    assert elf[:5] == b"\x7fELF\x02"
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, at, length in headers:
        end = elf.index(b"\0", strings + name)
        yield elf[strings + name : end].decode(), b"" if kind == 8 else elf[at : at + length]  # 8: takes no space


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and value of the attributes in an .nv.info section: two bytes, or as many as they say (format 4)."""
    at = 0
    while at < len(info):
        form, number, value = struct.unpack_from("<BBH", info, at)
        assert form in (1, 2, 3, 4), f"format {form} of an attribute is unknown"
        at += 4
        if form == 4:
            yield number, info[at : at + value]
            at += value
        else:
            yield number, struct.pack("<H", value)


def per_function(cubin: Path, wanted: int) -> dict[int, int]:
    """Symbol -> value of an attribute that functions have."""
    found = {}
    for name, content in sections(cubin.read_bytes()):
        if name.startswith(".nv.info"):
            for number, value in attributes(content):
                if number == wanted and len(value) == 8:
                    symbol, amount = struct.unpack("<II", value)
                    found[symbol] = amount
    return found


# What ptxas says of the PTX.


@functools.cache
def ptxas_programs() -> list[Path]:
    """ptxas of the wheels (nvidia-cuda-nvcc) and then of PATH."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(each) for each in (spec.submodule_search_locations or [])] if spec is not None else []
    found = [path for root in roots for path in sorted(root.glob("*/bin/ptxas"), reverse=True)]
    found += [Path(each) / "ptxas" for each in os.environ.get("PATH", "").split(os.pathsep) if each]
    return [path for path in found if path.is_file() and os.access(path, os.X_OK)]


def assembled(ptx: Path, target: str) -> str:
    """What the first ptxas that knows this version of PTX says; skipped where there is none."""
    version = re.search(r"^\.version\s+(\S+)", ptx.read_text(), re.MULTILINE)[1]
    for program in ptxas_programs():
        command = [str(program), "-v", "-arch", target, "-o", os.devnull, str(ptx)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        said = done.stdout + done.stderr
        if done.returncode and "nsupported .version" in said:
            continue
        assert done.returncode == 0, said[-3000:]
        return said
    pytest.skip(f"there is no ptxas that knows PTX {version}: pip install nvidia-cuda-nvcc")


# The tests.


@every_spec
def test_it_compiles_for_sm_90a(compiled, spec):
    assert f".target {target_of(spec)}" in compiled(spec).ptx


@every_spec
def test_it_keeps_everything_in_the_registers_it_is_launched_with(compiled, spec):
    for cubin in compiled(spec).cubins:
        frames, counts = per_function(cubin, FRAME_SIZE), per_function(cubin, REGISTER_COUNT)
        assert frames, f"{cubin} tells no frame size"
        assert not any(frames.values()), f"stack frames of {frames} bytes"
        assert set(counts.values()) == {LAUNCH_REGISTERS}, counts


@every_spec
def test_it_neither_spills_nor_waits_for_every_wgmma(compiled, spec):
    for ptx in compiled(spec).ptx_files:
        said = assembled(ptx, target_of(spec))
        spills = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", said)
        assert spills, said
        assert not [each for each in spills if each[0] != "0"], said
        assert f"Used {LAUNCH_REGISTERS} registers" in said
        notes = [line for line in said.splitlines() if re.search(r"C75[12]\d|serializ", line)]
        assert not notes, "\n".join(notes)


@every_spec
def test_the_warpgroups_share_the_registers_as_scheduled(compiled, spec):
    s = schedule_of(spec.head_dim)
    shares = [COPY_REGISTERS, s.score_registers, *s.value_registers]
    assert len(shares) == WARPGROUPS
    assert sum(shares) <= WARPGROUPS * LAUNCH_REGISTERS == 512
    assert all(share % 8 == 0 and 24 <= share <= 255 for share in shares)
    found = re.findall(r"setmaxnreg\.(dec|inc)\.sync\.aligned\.u32\s+(\d+)", compiled(spec).ptx)
    for kind, expected in (
        ("dec", {share for share in shares if share < LAUNCH_REGISTERS}),
        ("inc", {share for share in shares if share > LAUNCH_REGISTERS}),
    ):
        assert {int(number) for direction, number in found if direction == kind} == expected


@every_spec
def test_every_wait_looks_again_at_once(compiled, spec):
    """A suspend-time hint, a fourth operand, makes a warp sleep (NANOSLEEP): a third of the speed was lost by that."""
    ptx = compiled(spec).ptx
    waits = re.findall(r"mbarrier\.\w*wait[^;]*;", ptx)
    assert len(waits) > 10
    form = r"mbarrier\.try_wait\.parity(\.shared(::cta)?)?\.b64\s+%?\w+,\s*\[[^\]]*\],\s*%?\w+;"
    assert not [wait for wait in waits if not re.fullmatch(form, " ".join(wait.split()))]
    assert "nanosleep" not in ptx


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shared_memory_suffices_and_what_tma_writes_is_aligned(head_dim):
    s = schedule_of(head_dim)
    assert s.shared_bytes <= SHARED_LIMIT == 227 * 1024
    assert LAUNCH_REGISTERS * THREADS == 65_536  # what a multiprocessor has
    assert s.barriers_at % 8 == 0
    places = {name: getattr(s, name) for name in dir(Schedule) if name.endswith("_at")}
    for name in ("value_at", "key_at", "query_at", "probability_at"):
        if name in places:
            assert places[name] % 1024 == 0, name
    assert sum(s.widths) == s.head_dim
    assert all(width % 64 == 0 and 0 < width <= 512 for width in s.widths)


def test_the_cubin_reader_sees_a_spill(tmp_path):
    """Frame size and registers of a kernel that needs a stack, as ptxas tells them."""
    source = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry spills(.param .u64 out, .param .u32 at) {
  .local .align 4 .b8 held[256];
  .reg .b64 %out, %base, %far; .reg .b32 %at;
  ld.param.u64 %out, [out]; ld.param.u32 %at, [at];
  mov.u64 %base, held; mul.wide.u32 %far, %at, 4; add.u64 %base, %base, %far;
  st.local.u32 [%base], %at; ld.local.u32 %at, [held+16]; st.global.u32 [%out], %at; ret;
}
"""
    if not ptxas_programs():
        pytest.skip("there is no ptxas: pip install nvidia-cuda-nvcc")
    (tmp_path / "x.ptx").write_text(source)
    subprocess.run(
        [str(ptxas_programs()[0]), "-arch", "sm_90a", "-o", "x.cubin", "x.ptx"], check=True, cwd=tmp_path
    )  # fmt: skip
    assert list(per_function(tmp_path / "x.cubin", FRAME_SIZE).values()) == [256]
    (registers,) = per_function(tmp_path / "x.cubin", REGISTER_COUNT).values()
    assert 4 < registers < 64
