"""Launches that repeat: Triton looks for the compiled kernel once a call, and gets the same arguments every time."""

from __future__ import annotations

import torch

from ffpa_jit.triton.launch import Launcher


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
    def __init__(self, kernel, wide):
        self.kernel, self.wide = kernel, wide

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((self.wide, grid, args))


CUDA = torch.device("cuda", 0)


def test_a_kernel_is_looked_up_once_for_every_set_of_constants():
    kernel, launch = Kernel(), Launcher(CUDA)
    for n in range(3):
        launch(kernel, 7 + n, "x", n, TILE=128, WIDE=True, num_warps=4)
        launch(kernel, 1, "y", n, WIDE=False, TILE=128, num_warps=4)
    assert kernel.looked == [
        ((7,), ("x", 0), {"TILE": 128, "WIDE": True, "num_warps": 4}),
        ((1,), ("y", 0), {"WIDE": False, "TILE": 128, "num_warps": 4}),
    ]
    # Constants follow by position, in the kernel's order; options of the compiler do not.
    assert kernel.launched == [
        (True, (8, 1, 1), ("x", 1, True, 128)),
        (False, (1, 1, 1), ("y", 1, False, 128)),
        (True, (9, 1, 1), ("x", 2, True, 128)),
        (False, (1, 1, 1), ("y", 2, False, 128)),
    ]


def test_two_kernels_with_the_same_constants_are_two():
    first, second, launch = Kernel(), Kernel(), Launcher(CUDA)
    for kernel in (first, second, first, second):
        launch(kernel, 1, "x", 1, WIDE=True, TILE=128)
    assert len(first.looked) == len(second.looked) == len(first.launched) == len(second.launched) == 1


def test_nothing_is_remembered_where_nothing_is_launched():
    """Without a GPU: the interpreter returns no kernel, and tensors of `meta` are compiled for only."""
    for kernel, device in ((Kernel(), torch.device("meta")), (Kernel(compiles=False), CUDA)):
        launch = Launcher(device)
        for n in range(3):
            launch(kernel, 1, "x", n, WIDE=True, TILE=128)
        assert len(kernel.looked) == 3
        assert not kernel.launched
