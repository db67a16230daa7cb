"""The CUDA kernels as compiled, without a GPU: every architecture, what they take of registers and shared memory, and
that what Python says of them is what the sources say."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ffpa_jit.cuda import kernels
from ffpa_jit.cuda.dense import splits_for
from ffpa_jit.cuda.instantiate import ARCHS, HEAD_DIMS, KernelSpec, defines, sources, spec_for, tile_of
from tests import philox

KINDS = [("bfloat16", "f32"), ("float16", "f32"), ("float16", "f16")]
# In `make test`: every architecture once, and the head dims and types where registers are tightest.
SOME = [
    *[spec_for(arch, 512, "bfloat16") for arch in ARCHS],
    *[spec_for("sm_90", head_dim, "bfloat16") for head_dim in (320, 640, 1024)],
    spec_for("sm_80", 320, "float16"),
    spec_for("sm_89", 1024, "float16", "f16"),
    spec_for("sm_90", 512, "float16", "f16", 4),
]
ALL = [
    spec_for(arch, head_dim, dtype, acc, stages)
    for arch in ARCHS
    for head_dim in HEAD_DIMS
    for dtype, acc in KINDS
    for stages in (None, 1, 4)
]


def cuobjdump() -> str | None:
    try:
        import triton
    except ImportError:
        return shutil.which("cuobjdump")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(bundled) if bundled.is_file() else shutil.which("cuobjdump")


needs_compiler = pytest.mark.skipif(kernels.STORE.compiler() is None, reason="neither nvcc nor NVRTC")
needs_cuobjdump = pytest.mark.skipif(cuobjdump() is None, reason="no cuobjdump")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda-kernels")


def check_binary(spec: KernelSpec) -> None:
    """Compile `spec` and hold the machine code to its budget."""
    entry, _, _ = kernels.warm(spec)
    tool = cuobjdump()
    assert tool is not None
    usage = subprocess.run([tool, "--dump-resource-usage", entry.artefact], capture_output=True, text=True, check=True)
    found = re.search(r"Function ffpa_forward:\s*REG:(\d+)\s+STACK:(\d+)", usage.stdout)
    assert found is not None, usage.stdout
    registers, stack = int(found[1]), int(found[2])
    tile = tile_of(spec)
    assert registers * tile.threads <= 65_536
    assert tile.shared_bytes <= ARCHS[spec.arch] * 1024
    if spec.head_dim <= 512:
        assert stack <= 8, f"{spec.slug}: {stack} bytes of spilled registers"  # 8: an alignment, never reloaded
    else:
        assert stack <= 128, f"{spec.slug}: {stack} bytes of stack"


@needs_compiler
@needs_cuobjdump
@pytest.mark.parametrize("spec", SOME, ids=lambda spec: spec.slug)
def test_an_instantiation_compiles_within_its_budget(spec, cache, monkeypatch):
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(cache))
    check_binary(spec)


@pytest.mark.matrix
@needs_compiler
@needs_cuobjdump
@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.slug)
def test_every_instantiation_compiles_within_its_budget(spec, cache, monkeypatch):
    monkeypatch.setenv("FFPA_JIT_CACHE_DIR", str(cache))
    check_binary(spec)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_instantiation_has_a_tile_that_fits(arch):
    for head_dim in HEAD_DIMS:
        for stages in (None, 1, 2, 3, 4):
            spec = spec_for(arch, head_dim, "float16", stages=stages)
            tile = tile_of(spec)
            assert tile.shared_bytes <= ARCHS[arch] * 1024
            assert tile.threads >= tile.rows  # the prologue describes one row a thread


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sm_75", 512, "float16"), "sm_75"),
        (("sm_90", 256, "float16"), "264 to 1024"),
        (("sm_90", 300, "float16"), "multiples of 8"),
        (("sm_90", 1032, "float16"), "264 to 1024"),
        (("sm_90", 512, "float32"), "float32"),
        (("sm_90", 512, "bfloat16", "f16"), "float16 inputs"),
        (("sm_90", 512, "float16", "f64"), "f64"),
        (("sm_90", 512, "float16", "f32", 5), "stages=5"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        spec_for(*arguments)


def test_a_head_dim_takes_the_next_instantiation_up():
    assert [spec_for("sm_90", d, "bf16").head_dim for d in (264, 320, 328, 1000, 1024)] == [320, 320, 384, 1024, 1024]


def test_the_sources_include_nothing_but_each_other():
    names = {path.name for path in sources()}
    for path in sources():
        for included in re.findall(r"#include\s+([<\"].*[>\"])", path.read_text()):
            assert included.strip('"') in names, f"{path.name} includes {included}"


def test_every_macro_of_the_sources_is_defined_and_used():
    used = set(re.findall(r"\bFFPA_[A-Z0-9_]+\b", "".join(path.read_text() for path in sources())))
    assert used == set(defines(spec_for("sm_90", 512, "bf16")))


def test_keys_are_split_when_blocks_are_few_and_memory_allows(monkeypatch):
    tile = tile_of(spec_for("sm_90", 512, "bf16"))
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "512")
    assert splits_for(132, 132 * 64, 8192, 512, tile, 132) == 1
    assert splits_for(32, 32, 32_768, 512, tile, 132) == 4
    assert splits_for(1, 1, 100, 512, tile, 132) == 1  # a split of one tile saves nothing
    assert splits_for(1, 1, 131_072, 512, tile, 132) == 132
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "0.01")
    assert splits_for(1, 1, 131_072, 512, tile, 132) == 5


def test_the_written_stream_is_philox():
    """Random123's known answers for philox4x32-10."""

    def words(counter: int, key: int) -> list[int]:
        return [int(word) for word in philox._words([torch.full((1,), counter)] * 4, key, key)]

    assert words(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(0xFFFFFFFF, 0xFFFFFFFF) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_the_stream_depends_on_the_element_alone():
    rng = torch.tensor([1234567, -7])
    whole = philox.kept(rng, (2, 3, 40, 70), 0.3)
    assert torch.equal(philox.kept(rng, (1, 3, 20, 33), 0.3), whole[:1, :, :20, :33])
    assert abs((whole == 0).double().mean().item() - 0.3) < 0.02
    assert not torch.equal(philox.kept(torch.tensor([1234567, -6]), (2, 3, 40, 70), 0.3), whole)
