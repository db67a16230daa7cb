"""The shipped decode configurations compile without spills, within the shared memory of every architecture.

Compiling needs a Triton that is not interpreting, so each architecture is a subprocess of bench/sweep_decode.py.
"""

from __future__ import annotations

import pytest

from bench.compile_kernels import SHARED_KIB
from ffpa_jit.triton import configs
from tests.cpu.conftest import run_compiling

pytest.importorskip("triton")


def compile_shipped(arch: str, head_dims: str, options: str) -> str:
    given = "--compile-only", arch, "--head-dims", head_dims, "--options", options
    return run_compiling("bench/sweep_decode.py", *given, timeout=900)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("arch", list(SHARED_KIB))
def test_every_call_has_a_configuration(arch, plain):
    for head_dim in range(264, 1025, 8):
        for rows in (1, 16, 17, 64, 500):
            tiling = configs.decode_tiling(arch, rows, head_dim, plain)
            assert plain or not tiling.hopper
            assert not tiling.hopper or head_dim <= 512


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_plain_kernels_compile_without_spills(arch):
    assert "attend" in compile_shipped(arch, "512", "plain")


@pytest.mark.matrix
@pytest.mark.parametrize("head_dims", ["264,512", "320,1024", "640,904"])
@pytest.mark.parametrize("arch", list(SHARED_KIB))
def test_all_kernels_compile_without_spills(arch, head_dims):
    compile_shipped(arch, head_dims, "plain;causal, window;bool mask, softcap;additive mask, dropout")
