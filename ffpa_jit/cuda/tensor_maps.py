"""Tensor maps: how the tensor memory accelerator (TMA) of sm_90 and later finds a tensor.

CUDA driver API, `cuTensorMapEncodeTiled`. A map depends on an address, sizes and strides only. Those of another tensor
of the same layout differ in the address alone, which stands in the first eight bytes on every architecture so far:
`address_is_first` says whether it does on this driver.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_uint32, c_uint64, c_void_p

from ffpa_jit.cuda.driver import driver

__all__ = ["ALIGN", "BFLOAT16", "BYTES", "FLOAT16", "FLOAT32", "UINT16", "address_is_first", "encode", "with_address"]

BYTES = 128
ALIGN = 64
UINT16, FLOAT16, FLOAT32, BFLOAT16 = 1, 6, 7, 9
"""Of CUtensorMapDataType."""

_ITEM_BYTES = {UINT16: 2, FLOAT16: 2, BFLOAT16: 2, FLOAT32: 4}
_INTERLEAVE_NONE, _FILL_ZEROS = 0, 0


def encode(
    address: int, kind: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], *, swizzle: int = 3,
    promotion: int = 3,
) -> bytes:  # fmt: skip
    """The map of a tensor, read a `box` at a time. What is read outside is zeros.

    `address`: of the first element, a multiple of 16. `kind`: of the elements. `sizes`, `box`: innermost dim first.
    `strides`: in elements, of all dims but the innermost, multiples of 16 bytes; a dim of stride 0 must be given as one
    of size 1. `swizzle`: 0 to 3 for none, 32, 64 and 128 bytes. `promotion`: 2, 3 for 128 and 256 bytes of L2.
    CudaError.
    """
    rank = len(sizes)
    scratch = ctypes.create_string_buffer(BYTES + ALIGN)
    aligned = -(-ctypes.addressof(scratch) // ALIGN) * ALIGN
    item = _ITEM_BYTES[kind]
    driver().encode(
        c_void_p(aligned),
        kind,
        rank,
        c_void_p(address),
        (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*[item * stride for stride in strides]),
        (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*[1] * rank),
        _INTERLEAVE_NONE,
        swizzle,
        promotion,
        _FILL_ZEROS,
    )
    return ctypes.string_at(aligned, BYTES)


def with_address(encoded: bytes, address: int) -> bytes:
    """A map for another tensor of the same layout, where `address_is_first`."""
    return address.to_bytes(8, "little") + encoded[8:]


@functools.cache
def address_is_first() -> bool:
    """Whether a map with other first eight bytes is that of a tensor at another address."""
    first, second = 0x7F1234560000, 0x7E0765432100
    for kind, sizes, strides, box in (
        (BFLOAT16, (512, 256, 3, 2), (512, 131072, 393216), (64, 128, 1, 1)),
        (UINT16, (320, 77, 1, 1), (320, 320, 320), (64, 32, 1, 1)),
        (FLOAT16, (128, 384), (128,), (64, 128)),
    ):
        made = encode(first, kind, sizes, strides, box)
        if int.from_bytes(made[:8], "little") != first or with_address(made, second) != encode(
            second, kind, sizes, strides, box
        ):
            return False
    return True
