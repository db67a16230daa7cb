"""Every shipped configuration compiles for every architecture it serves: no spill, and shared memory that is there.

Compiling needs no GPU, but a Triton that is not interpreting, so each (architecture, head dim) is one subprocess of
bench/compile_kernels.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.compile_kernels import SHARED_KIB, resources
from ffpa_jit.triton import configs
from tests.cpu.conftest import run_compiling

triton = pytest.importorskip("triton")

# 264 and 904 end in a partial tile, 320 and 576 take a tail, 512 and 1024 are whole; both dtypes and masks are covered.
MATRIX = [
    (arch, head_dim, dtype, causal)
    for i, arch in enumerate(SHARED_KIB)
    for head_dim, dtype, causal in (
        [("264", "float16", "1"), ("320", "bfloat16", "0"), ("512", "bfloat16", "1"), ("1024", "float16", "0")]
        if arch == "sm_90"
        else [("264", "float16", "1"), ("512", "bfloat16", "1")]
        if arch in ("sm_80", "gfx942")
        else [("320", "float16", "1"), ("512", "bfloat16", "0" if i % 2 else "1")]
    )
]


def shipped_widths(arch: str) -> dict[tuple[str, int, int], int | None]:
    """(direction, block_n, tail) of every value tiling in an architecture's file -> a head dim that selects it."""
    found: dict[tuple[str, int, int], int | None] = {}
    for direction in ("forward", "backward"):
        for entry in configs._table(arch)[f"value_{direction}"]:
            found[direction, entry["block_n"], entry.get("tail", 0)] = None
        for head_dim in range(1024, 256, -8):
            tiling = configs.value_tiling(arch, direction, head_dim)
            found[direction, tiling.block_n, tiling.tail] = head_dim
    return found


@pytest.mark.parametrize("arch", list(SHARED_KIB))
def test_every_architecture_has_a_configuration(arch):
    assert configs.family(arch) is not None
    for head_dim in range(264, 1025, 8):
        for direction in ("forward", "backward"):
            assert configs.value_tiling(arch, direction, head_dim).width >= 16


@pytest.mark.parametrize("arch", list(SHARED_KIB))
def test_no_shipped_tiling_is_dead(arch):
    dead = [key for key, head_dim in shipped_widths(arch).items() if head_dim is None]
    assert not dead, f"no head dim selects {dead}"


def compile_kernels(arch: str, *options: str) -> str:
    return run_compiling("bench/compile_kernels.py", arch, *options)


@pytest.mark.parametrize(("arch", "head_dim", "dtype", "causal"), MATRIX)
def test_kernels_compile_without_spills_within_shared_memory(arch, head_dim, dtype, causal):
    splits = () if head_dim == "512" else ("--no-splits",)
    said = compile_kernels(arch, "--head-dims", head_dim, "--dtypes", dtype, "--causal", causal, *splits)
    assert said.count("registers") >= 6


def tilings_beyond_the_matrix() -> list[tuple[str, int]]:
    """(arch, head dim) of the shipped tilings that no head dim of MATRIX selects, for one architecture of each file."""
    found = []
    for arch in ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1201"):
        left = shipped_widths(arch)
        for _, head_dim in {(a, int(h)) for a, h, _, _ in MATRIX if a == arch}:
            for direction in ("forward", "backward"):
                tiling = configs.value_tiling(arch, direction, head_dim)
                left.pop((direction, tiling.block_n, tiling.tail), None)
        found += [(arch, head_dim) for head_dim in sorted({h for h in left.values() if h is not None})]
    return found


def test_every_file_of_configurations_has_an_architecture_in_the_matrix():
    assert {configs.family(arch) for arch, _, _, _ in MATRIX} == set(configs.FAMILIES) - {"interpreter"}


@pytest.mark.parametrize(("arch", "head_dim"), tilings_beyond_the_matrix())
def test_every_other_shipped_value_tiling_compiles(arch, head_dim):
    compile_kernels(arch, "--head-dims", str(head_dim), "--causal", "1")


@pytest.mark.parametrize(("arch", "head_dim"), [("sm_90", "320"), ("sm_80", "512")])
def test_every_option_and_every_subset_of_gradients_compiles(arch, head_dim):
    said = compile_kernels(arch, "--head-dims", head_dim, "--options")
    for kernel in ("mask_gradient", "classify", "value_backward", "correct_delta", "combine"):
        assert kernel in said


KEEPS_LOCALLY = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry keeps(.param .u64 out, .param .u32 at) {
  .local .align 4 .b8 held[256];
  .reg .b64 %out, %base, %far; .reg .b32 %at;
  ld.param.u64 %out, [out]; ld.param.u32 %at, [at];
  mov.u64 %base, held; mul.wide.u32 %far, %at, 4; add.u64 %base, %base, %far;
  st.local.u32 [%base], %at; RELOAD st.global.u32 [%out], %at; ret;
}
"""


@pytest.mark.parametrize(("reload", "expected"), [("ld.local.u32 %at, [held+16];", 1), ("", 0)])
def test_reloads_from_local_memory_are_counted(tmp_path, reload, expected):
    (tmp_path / "x.ptx").write_text(KEEPS_LOCALLY.replace("RELOAD", reload))
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    subprocess.run([str(ptxas), "-arch", "sm_90", "-o", "x.cubin", "x.ptx"], check=True, cwd=tmp_path)
    registers, reloads = resources(SimpleNamespace(asm={"cubin": (tmp_path / "x.cubin").read_bytes()}))
    assert 2 < registers < 64
    assert reloads == expected
