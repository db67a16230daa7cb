"""Tensor maps: how the tensor copy engine of sm_90 and later is told where K and V lie.

CUDA driver API, `cuTensorMapEncodeTiled`. A map depends on an address, sizes and strides only, so they are remembered.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_uint32, c_uint64, c_void_p

from ffpa_jit.cuda.driver import driver

__all__ = ["BYTES", "encode"]

BYTES = 128
_UINT16, _INTERLEAVE_NONE, _SWIZZLE_128B, _PROMOTE_256B, _FILL_ZEROS = 1, 0, 3, 3, 0


@functools.lru_cache(maxsize=512)
def encode(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], rows: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The map of a matrix of 16-bit elements, in boxes of 64 columns by `rows` rows, swizzled by 128 bytes.

    `address`: of the first element, a multiple of 16. `sizes`: (D, N, H, B). `strides`: in elements, those of N, H
    and B, multiples of 8; a dim of stride 0 must be given as one of size 1. What is read outside is zeros. CudaError.
    """
    scratch = ctypes.create_string_buffer(BYTES + 64)
    aligned = (ctypes.addressof(scratch) + 63) & ~63
    driver().encode(
        c_void_p(aligned),
        _UINT16,
        4,
        c_void_p(address),
        (c_uint64 * 4)(*sizes),
        (c_uint64 * 3)(*(2 * stride for stride in strides)),
        (c_uint32 * 4)(64, rows, 1, 1),
        (c_uint32 * 4)(1, 1, 1, 1),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        _PROMOTE_256B,
        _FILL_ZEROS,
    )
    return (ctypes.c_ubyte * BYTES).from_buffer_copy(ctypes.string_at(aligned, BYTES))
