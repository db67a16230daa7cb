"""Every shipped configuration compiles for every architecture it serves: no spill, and shared memory that is there.

Compiling needs no GPU, but a Triton that is not interpreting, so each (architecture, head dim) is one subprocess of
bench/compile_kernels.py.
"""

from __future__ import annotations

import pytest

from bench.compile_kernels import SHARED_KIB
from ffpa_jit.triton import configs
from tests.cpu.conftest import run_program

pytest.importorskip("triton")

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
    return run_program("bench/compile_kernels.py", arch, *options, timeout=500)


@pytest.mark.parametrize(("arch", "head_dim", "dtype", "causal"), MATRIX)
def test_kernels_compile_without_spills_within_shared_memory(arch, head_dim, dtype, causal):
    splits = () if head_dim == "512" else ("--no-splits",)
    said = compile_kernels(arch, "--head-dims", head_dim, "--dtypes", dtype, "--causal", causal, *splits)
    assert said.count("registers") >= 6


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "gfx942", "gfx1201"])
def test_every_shipped_value_tiling_compiles(arch):
    covered = {(a, h) for a, h, _, _ in MATRIX}
    rest = {str(h) for h in shipped_widths(arch).values() if h is not None} - {h for a, h in covered if a == arch}
    if rest:
        compile_kernels(arch, "--head-dims", ",".join(sorted(rest)), "--causal", "1")


@pytest.mark.parametrize(("arch", "head_dim"), [("sm_90", "320"), ("sm_80", "512")])
def test_every_option_and_every_subset_of_gradients_compiles(arch, head_dim):
    said = compile_kernels(arch, "--head-dims", head_dim, "--options")
    for kernel in ("mask_gradient", "classify", "value_backward", "refine", "combine"):
        assert kernel in said
