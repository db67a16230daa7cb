"""Launch plans: a recorded call, launched again for other tensors. A stand-in of the driver reads the parameters."""

from __future__ import annotations

import ctypes
import json
import struct

import pytest
import torch

from ffpa_jit import context, launch_plan
from ffpa_jit.launch_plan import PackedLaunch, Recorder
from ffpa_jit.triton import launch
from tests.cpu.conftest import ROOT, run_python

CPU = torch.device("cpu")
FORMAT = struct.Struct("=QQQi4x128sQ")
OFFSETS = (0, 8, 16, 24, 32, 160)
MAP = bytes(range(128))


class Driver:
    """Keeps what it is launched with: (function, grid, parameters)."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int, tuple]] = []
        self.code = 0

    def __call__(self, function, grid, y, z, block, by, bz, shared, stream, pointers, extra):
        start = pointers[0]
        assert [pointer - start for pointer in pointers] == list(OFFSETS)
        values = FORMAT.unpack(ctypes.string_at(start, FORMAT.size))
        self.launched.append((function.value, grid, values))
        return self.code


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(launch_plan, "launcher", lambda: fake)
    monkeypatch.setattr(context, "stream", lambda index: 5)
    return fake


def tensor(*shape):
    made = torch.randn(*shape)
    assert made.data_ptr() % 16 == 0
    return made


def packed(*addresses, number=3):
    mapped = addresses[3].to_bytes(8, "little") + MAP[8:]
    return PackedLaunch(7, 11, 128, 64, FORMAT.pack(*addresses[:3], number, mapped, 0), OFFSETS)


def recorded(a, b):
    """A call of two inputs: a result like the first, a part of the workspace, a map of the second."""
    recorder = Recorder(CPU, (a, b, None))
    x, y, _ = recorder.inputs
    out = recorder.empty_like(x)
    unused = recorder.scratch((100,), torch.float32)
    part = recorder.scratch((8, 4), torch.float32)[2:]
    addresses = x.data_ptr(), part.data_ptr(), out.data_ptr(), y.data_ptr()
    recorder.launch(packed(*addresses), [(0, x), (8, part), (16, out), (32, y)])
    assert unused.numel() == 100
    return recorder, out


def test_later_calls_are_launched_with_their_own_addresses(driver):
    recorder, out = recorded(tensor(2, 3, 8), tensor(4, 8))
    plan = recorder.finish(out, None)
    held = []
    for _ in range(3):
        a, b = tensor(2, 3, 8), tensor(4, 8)
        found, nothing = plan((a, b, None))
        held.append((a, b, found))
        assert nothing is None
        assert found.shape == a.shape
        assert found.stride() == a.stride()
        function, grid, (first, part, result, number, mapped, scratch) = driver.launched[-1]
        assert (function, grid, number, scratch) == (7, 11, 3, 0)
        assert (first, result) == (a.data_ptr(), found.data_ptr())
        assert mapped == b.data_ptr().to_bytes(8, "little") + MAP[8:]
        assert part % 16 == 0
        assert part not in (first, result)
    assert len(driver.launched) == 3


def test_a_tensor_given_twice_is_not_taken_for_one_in_later_calls(driver):
    twice = tensor(2, 3, 8)
    recorder, out = recorded(twice, twice)
    plan = recorder.finish(out)
    a, b = tensor(2, 3, 8), tensor(2, 3, 8)
    plan((a, b, None))
    values = driver.launched[-1][2]
    assert values[0] == a.data_ptr()
    assert values[4][:8] == b.data_ptr().to_bytes(8, "little")


def test_functions_of_torch_are_called_again_in_their_place(driver):
    a = tensor(2, 8).t()  # what no kernel addresses is copied first, and the result is copied back
    recorder = Recorder(CPU, (a,))
    out = recorder.empty_like(a)
    copied = recorder.produce(lambda x: x.contiguous() * 2, a)
    part = recorder.scratch((4,), torch.float32)
    recorder.call(torch.Tensor.zero_, part)
    addresses = copied.data_ptr(), part.data_ptr(), out.data_ptr(), copied.data_ptr()
    recorder.launch(packed(*addresses), [(0, copied), (8, part), (16, out), (32, copied)])
    recorder.call(lambda target, source: target.copy_(source), out, copied)
    plan = recorder.finish(out)
    b = tensor(2, 8).t()
    (found,) = plan((b,))
    torch.testing.assert_close(found, b * 2)
    assert driver.launched[-1][2][2] == found.data_ptr()
    assert driver.launched[-1][2][0] not in (b.data_ptr(), found.data_ptr())


def test_what_cannot_be_repeated_gives_no_plan(driver):
    a, b = tensor(2, 3, 8), tensor(4, 8)
    recorder, out = recorded(a, b)
    stranger = tensor(3)
    recorder.launch(packed(*[stranger.data_ptr()] * 4), [(0, stranger)])
    assert recorder.finish(out) is None
    recorder, out = recorded(torch.randn(49)[1:].view(2, 3, 8), b)
    assert not recorder.repeatable_inputs
    assert recorder.finish(out) is None
    recorder, out = recorded(a, b)
    recorder.give_up()
    assert recorder.finish(out) is None
    recorder, _ = recorded(a, b)
    assert recorder.finish(stranger) is None
    recorder, out = recorded(a, b)
    for _ in range(launch_plan.MOST_LAUNCHES):
        recorder.launch(packed(*[a.data_ptr()] * 4), [(0, recorder.inputs[0])])
    assert recorder.finish(out) is None


def test_another_alignment_launches_nothing(driver):
    recorder, out = recorded(tensor(2, 3, 8), tensor(4, 8))
    plan = recorder.finish(out)
    assert plan((torch.randn(49)[1:].view(2, 3, 8), tensor(4, 8), None)) is None
    assert not driver.launched


def test_an_error_of_the_driver_is_raised(driver, monkeypatch):
    recorder, out = recorded(tensor(2, 3, 8), tensor(4, 8))
    plan = recorder.finish(out)
    driver.code = 700

    class Errors:
        @staticmethod
        def error(code, doing):
            return RuntimeError(f"{code} while {doing}")

    monkeypatch.setattr(launch_plan, "driver", lambda: Errors)
    with pytest.raises(RuntimeError, match="700 while launching"):
        plan((tensor(2, 3, 8), tensor(4, 8), None))


class Source:
    def __init__(self, signature):
        self.signature = signature


class Compiled:
    """As much of a compiled kernel as its parameters are read from."""

    class metadata:  # noqa: N801
        num_warps, shared, num_ctas = 4, 1024, 1
        tensordesc_meta = ({"swizzle": 3, "block_size": [1, 64], "fp4_padded": False},)

    def __init__(self, signature, parameters):
        self.src = Source(signature)
        lines = ",\n".join(f"\t.param {each} k_param_{at}" for at, each in enumerate(parameters))
        self.asm = {"ptx": f".visible .entry k(\n{lines}\n)\n.reqntid 128\n{{ ret; }}"}


SIGNATURE = {"x": "tensordesc<bf16[1, 64]>", "y": ("*fp32", "constexpr", "i32"), "z": "fp32", "D": "constexpr"}
PARAMETERS = [".align 64 .b8", ".u32", ".u32", ".u64", ".u64", ".u64 .ptr .global .align 1", ".u32", ".f32"]


def declared(parameters):
    named = [f"{each} p" if "b8" not in each else each for each in parameters]
    found = Compiled(SIGNATURE, named)
    found.asm["ptx"] = found.asm["ptx"].replace(".align 64 .b8 k_param_0", ".align 64 .b8 k_param_0[128]")
    return found


def test_parameters_lie_where_ptx_says():
    found = launch.parameters(declared([*PARAMETERS, ".u64 .ptr .global .align 1", ".u64"]))
    assert found is not None
    assert found.offsets == (0, 128, 132, 136, 144, 152, 160, 164, 168, 176)
    assert found.addresses == (0, 152)
    assert found.boxes == ((3, (1, 64)),)
    assert (found.block, found.shared, found.format.size) == (128, 1024, 184)


@pytest.mark.parametrize(
    "parameters",
    [PARAMETERS[:-1], [*PARAMETERS, ".u32"], [*PARAMETERS[:6], ".u64", ".f32"], [*PARAMETERS, *[".u64"] * 3]],
)
def test_parameters_that_ptx_declares_otherwise_are_left_to_triton(parameters):
    assert launch.parameters(declared(parameters)) is None


KERNELS = """
import json
from tests.cpu.specialised import BF16, BOOL, attend, decode, dense, empty
from ffpa_jit.triton import fused, launch
from ffpa_jit.triton.offline import SAMPLES, SPLIT, WHOLE, compile_only, _call
from ffpa_jit.triton.terms import Terms
found = []
with compile_only("sm_90") as launches:
    rng = empty(2, dtype=__import__("torch").int64)
    attend(300, 300, Terms(0.1, attn_mask=empty(2, 4, 300, 300), dropout_p=0.1, rng=rng))()
    attend(1, 300, Terms(0.1, attn_mask=empty(2, 1, 1, 300, dtype=BOOL)), decode.forward)()
    for sample in (SPLIT, *[each for each in SAMPLES if each.queries][:1]):
        _call(sample, "sm_90", 512, BF16, True, True, True)
print(json.dumps(sorted({(x.function.__name__, launch.parameters(x.kernel) is not None) for x in launches})))
"""


def test_the_parameters_of_every_kernel_for_hopper_are_understood():
    """Else its calls would have no plans, and take a hundred microseconds more without a word."""
    found = json.loads(run_python(KERNELS, unset=("TRITON_INTERPRET",), PYTHONPATH=str(ROOT)).splitlines()[-1])
    assert len(found) >= 12
    assert all(understood for _, understood in found), found
