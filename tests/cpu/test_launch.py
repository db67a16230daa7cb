"""Launches that repeat: Triton looks for the compiled kernel once a call, and gets the same arguments every time."""

from __future__ import annotations

import pytest
import torch

from ffpa_jit.triton.launch import Launcher, bind


class Kernel:
    """A kernel of two arguments and two constants, and its compiled form: what Triton offers of either."""

    arg_names = ("x", "n", "WIDE", "TILE")

    def __init__(self, compiles=True):
        self.looked, self.launched, self.compiles = [], [], compiles

    def __getitem__(self, grid):
        return lambda *args, **constants: self.compile(grid, args, constants)

    def compile(self, grid, args, constants):
        self.looked.append((grid, args, constants))
        return Compiled(self, constants["WIDE"]) if self.compiles else None


class Compiled:
    asm = ()  # no PTX: its parameters are not known, and Triton's launcher is used

    def __init__(self, kernel, wide):
        self.kernel, self.wide = kernel, wide

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((self.wide, grid, args))


CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr("ffpa_jit.triton.launch._everywhere", {})


def test_a_kernel_is_looked_up_once_for_every_set_of_constants():
    kernel, launch = Kernel(), Launcher(CUDA)
    for n in range(3):
        launch(kernel, 7 + n, 0.5, n, TILE=128, WIDE=True, num_warps=4)
        launch(kernel, 1, 1.5, n, WIDE=False, TILE=128, num_warps=4)
    assert kernel.looked == [
        ((7,), (0.5, 0), {"TILE": 128, "WIDE": True, "num_warps": 4}),
        ((1,), (1.5, 0), {"WIDE": False, "TILE": 128, "num_warps": 4}),
    ]
    # Constants follow by position, in the kernel's order; options of the compiler do not.
    assert kernel.launched == [
        (True, (8, 1, 1), (0.5, 1, True, 128)),
        (False, (1, 1, 1), (1.5, 1, False, 128)),
        (True, (9, 1, 1), (0.5, 2, True, 128)),
        (False, (1, 1, 1), (1.5, 2, False, 128)),
    ]


def test_two_kernels_with_the_same_constants_are_two():
    first, second, launch = Kernel(), Kernel(), Launcher(CUDA)
    for kernel in (first, second, first, second):
        launch(kernel, 1, 0.5, 1, WIDE=True, TILE=128)
    assert len(first.looked) == len(second.looked) == len(first.launched) == len(second.launched) == 1


def test_nothing_is_remembered_where_nothing_is_launched():
    """Without a GPU: the interpreter returns no kernel, and tensors of `meta` are compiled for only."""
    for kernel, device in ((Kernel(), torch.device("meta")), (Kernel(compiles=False), CUDA)):
        launch = Launcher(device)
        for n in range(3):
            launch(kernel, 1, 0.5, n, WIDE=True, TILE=128)
        assert len(kernel.looked) == 3
        assert not kernel.launched


def test_another_call_finds_what_one_has_found_if_triton_would():
    base = torch.zeros(64, dtype=torch.float16)
    kernel = Kernel()

    def call(x, n):
        Launcher(CUDA)(kernel, 1, x, n, WIDE=True, TILE=128)

    # Each of these has a kernel of its own: by dtype, alignment, size, divisibility, being 1, and what is None.
    kinds = [
        (base, 32), (base.float(), 32), (base[1:], 32), (base, 2**31), (base, 33), (base, 1), (None, 32), (0.5, 32),
        (True, 32), ((base, 16), 32), ((base, 17), 32), ((None, 16), 32),
    ]  # fmt: skip
    for kind in kinds:
        call(*kind)
    assert len(kernel.looked) == len(kinds)
    assert not kernel.launched
    for kind in kinds:
        call(*kind)
    call(torch.ones(8, dtype=torch.float16), 4096)
    call(base, 35)
    call(1.5, 48)
    assert len(kernel.looked) == len(kinds)
    assert [args[1] for _, _, args in kernel.launched][-3:] == [4096, 35, 48]


def test_an_unknown_triton_is_asked_once_a_call(monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr("ffpa_jit.triton.launch._marks_are_known", lambda: False)
    for _ in range(2):
        launch = Launcher(CUDA)
        for n in range(3):
            launch(kernel, 1, 0.5, n, WIDE=True, TILE=128)
    assert len(kernel.looked) == 2
    assert len(kernel.launched) == 4


def test_a_descriptor_is_the_same_whether_triton_has_checked_it_or_one_like_it(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("ffpa_jit.triton.launch._checked", {})
    first, second = (torch.randn(2, 3, n, 264).to(torch.float16) for n in (5, 7))
    checked = bind(second, 16, 64, True)
    bind(first, 16, 64, True)
    found = bind(second, 16, 64, True)
    assert type(found) is type(checked)
    assert vars(found) == vars(checked)
    assert found.base is second
    assert found.shape == [2, 3, 7, 264]
    assert found.strides == [3 * 7 * 264, 7 * 264, 264, 1]
    assert found.block_shape == [1, 1, 16, 64]
