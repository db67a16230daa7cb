"""`ForwardParams`: what a launch is told, field by field as `cuda_src/params.cuh` has it."""

from __future__ import annotations

import ctypes

__all__ = ["ForwardParams"]

_Pointer, _Int, _Strides = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong * 3


class ForwardParams(ctypes.Structure):
    """See `cuda_src/params.cuh`, which says what each field means; strides count elements."""

    _fields_ = [
        ("k_map", ctypes.c_ubyte * 128),
        ("v_map", ctypes.c_ubyte * 128),
        ("q", _Pointer),
        ("k", _Pointer),
        ("v", _Pointer),
        ("mask", _Pointer),
        ("rng", _Pointer),
        ("out", _Pointer),
        ("lse", _Pointer),
        ("partial_out", _Pointer),
        ("partial_lse", _Pointer),
        ("q_stride", _Strides),
        ("k_stride", _Strides),
        ("v_stride", _Strides),
        ("out_stride", _Strides),
        ("mask_stride", ctypes.c_longlong * 4),
        ("batch", _Int),
        ("heads_q", _Int),
        ("heads_kv", _Int),
        ("len_q", _Int),
        ("len_kv", _Int),
        ("head_dim", _Int),
        ("row_tiles", _Int),
        ("splits", _Int),
        ("causal", _Int),
        ("mask_kind", _Int),
        ("dropout_threshold", _Int),
        ("k_head_step", _Int),
        ("k_batch_step", _Int),
        ("v_head_step", _Int),
        ("v_batch_step", _Int),
        ("dropout_scale", ctypes.c_float),
        ("scale", ctypes.c_float),
        # The struct is aligned to 64 bytes, and so is its size; a launch copies all of it.
        ("padding", ctypes.c_ubyte * 52),
    ]
