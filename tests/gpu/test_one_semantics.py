"""One semantics above head dim 256, on a GPU; most tests are in tests/semantics.py and
tests/transforms.py, here is what needs one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as File

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ffpa_jit import ffpa_attn_func
from tests import oracle
from tests.cases.shapes import Shape, leaves, make
from tests.semantics import *  # noqa: F403  (each of them, here)
from tests.transforms import *  # noqa: F403

BF16 = torch.bfloat16
ROOT = File(__file__).resolve().parents[2]

# What torch itself launches to fill, copy, draw and compare; everything else is attention.
OF_TORCH = ("at::native", "at::cuda", "at_cuda_detail", "cub::", "memset", "memcpy", "random_", "distribution_")


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(params=[torch.float16, BF16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def size() -> int:
    return 600


@pytest.fixture
def launched():
    @contextmanager
    def inside() -> Iterator[list[str]]:
        names: list[str] = []
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
            yield names
            torch.cuda.synchronize()
        for event in record.events():
            of_torch = any(part in event.name.lower() for part in OF_TORCH)
            if event.device_type == torch.autograd.DeviceType.CUDA and not of_torch:
                names.append(event.name)

    return inside


@pytest.mark.parametrize("backend", ["triton", "cuda", "cutedsl", "sdpa"])
def test_a_launch_is_seen(launched, device, dtype, backend):
    path = Path("", Shape(1, 1, 1, 2, 2, 512), backend=backend)  # noqa: F405
    inputs = path.inputs(dtype, device)
    path.skip_unless_it_runs(inputs, return_lse=False)
    path.step(inputs, return_lse=False)  # compiled
    with launched() as kernels:
        path.step(inputs, return_lse=False)
    assert kernels


@pytest.mark.parametrize("length", [64, 128, 600])
@pytest.mark.parametrize("needs", ["", "qkv"])
def test_no_call_that_kernels_run_goes_to_sdpa(launched, device, dtype, length, needs):
    """By the names of what is launched: SDPA's kernels for these head dims are called fmha_cutlass."""
    for heads_kv in (1, 4):
        path = Path("", Shape(1, 4, heads_kv, length, length, 512, True), needs=needs)  # noqa: F405
        inputs = path.inputs(dtype, device)
        path.step(inputs)
        with launched() as kernels:
            path.step(inputs)
            path.step(inputs, return_lse=False)
        assert kernels
        assert not [name for name in kernels if "fmha" in name or "cutlassF" in name or "cutlassB" in name]


PACKAGED = """
import sys, torch
from ffpa_jit import ffpa_attn_func

class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return ffpa_attn_func(q * 2, k, v, is_causal=True, enable_gqa=True) + 1

def given(length, keys):
    torch.manual_seed(length)
    q = torch.randn(1, 4, length, 512, dtype=torch.bfloat16, device="cuda")
    return q, *(torch.randn(1, 2, keys, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2))

path = sys.argv[1]
if sys.argv[2] == "make":
    length, keys = torch.export.Dim("length", min=2, max=4096), torch.export.Dim("keys", min=2, max=8192)
    shapes = ({2: length}, {2: keys}, {2: keys}) if sys.argv[3] == "dynamic" else None
    with torch.no_grad():
        program = torch.export.export(Attend(), given(200, 300), dynamic_shapes=shapes, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=path)
run = torch._inductor.aoti_load_package(path)
for sizes in ((200, 300), (128, 128), (2, 700)) if sys.argv[3] == "dynamic" else ((200, 300),):
    inputs = given(*sizes)
    got, expected = run(*inputs), Attend()(*inputs)
    got = got[0] if isinstance(got, (list, tuple)) else got
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
print("done")
"""


@pytest.mark.parametrize("lengths", ["static", "dynamic"])
def test_a_call_packaged_by_aotinductor_runs_here_and_in_another_process(tmp_path, lengths):
    """In processes of their own: what went wrong killed them."""
    package = str(tmp_path / "attend.pt2")
    for what in ("make", "load"):
        done = subprocess.run(
            [sys.executable, "-c", PACKAGED, package, what, lengths],
            capture_output=True, text=True, cwd=ROOT, timeout=540,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        assert "done" in done.stdout


def test_many_heads_of_nothing_end_no_process():
    """B = 0 with gradients once ended it by a signal, so in one of its own."""
    code = (
        "import torch; from ffpa_jit import ffpa_attn_func\n"
        "for shape in ((0, 4, 64, 512), (2, 0, 64, 512), (2, 4, 0, 512)):\n"
        "    for mask in (None, torch.ones(64, 64, dtype=torch.bool, device='cuda')):\n"
        "        q, k, v = (torch.randn(*shape, device='cuda', dtype=torch.float16, requires_grad=True)"
        " for _ in range(3))\n"
        "        mask = mask if shape[2] else None\n"
        "        ffpa_attn_func(q, k, v, mask).sum().backward()\n"
        "        assert q.grad.shape == q.shape\n"
        "torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("shape", [Shape(1, 4, 2, 200, 300, 512, True), Shape(1, 8, 8, 256, 256, 512, True)], ids=str)
def test_inductor_computes_what_the_call_computes(device, dtype, shape):
    q, k, v, do = make(shape, dtype, device)
    torch.compiler.reset()
    results = []
    for call in (torch.compile(ffpa_attn_func, fullgraph=True), ffpa_attn_func):
        rows = leaves(q, k, v)
        out = call(*rows, is_causal=True, enable_gqa=True)
        results.append((out, *torch.autograd.grad(out, rows, do)))
    for a, b in zip(*results, strict=True):
        assert oracle.relative_error(a, b) < 1e-2
        assert a.stride() == b.stride()
