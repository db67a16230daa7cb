"""A kernel that compiles in a tenth of a second, with the `entry` of the real ones. What it does is not used."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64


@cute.kernel
def fill(out: cute.Pointer, count: Int32, number: Float32):
    thread, _, _ = cute.arch.thread_idx()
    cute.make_tensor(out, cute.make_layout(count))[thread] = number


@cute.jit
def launch(out: Int64, count: Int32, number: Float32, stream: CUstream):
    pointer = cute.make_ptr(Float32, out, cute.AddressSpace.gmem, assumed_align=16)
    fill(pointer, count, number).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def entry(spec):
    assert spec.arch == "sm_90"
    return launch, (Int64(0), Int32(4), Float32(1.0), cute.runtime.make_fake_stream())
