"""Exact attention for head dims above 256, in multiples of 8 up to 1024, in PyTorch.

    from ffpa_jit import ffpa_attn_func
    out = ffpa_attn_func(query, key, value, is_causal=True, enable_gqa=True)

`ffpa_attn_varlen_func` takes packed sequences; `ffpa_attn_backward` and `ffpa_attn_varlen_backward` take outputs that
were merged over shards of the keys.

Importing this package touches no device, compiler, network or log handler, and needs only torch.
"""

from ffpa_jit.attention import explain, ffpa_attn_func
from ffpa_jit.backends import Backend, CUDABackend, CuTeDSLBackend, SDPABackend, TritonBackend
from ffpa_jit.backward import ffpa_attn_backward, ffpa_attn_varlen_backward
from ffpa_jit.varlen import ffpa_attn_varlen_func
from ffpa_jit.warm import warm

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "CUDABackend",
    "CuTeDSLBackend",
    "SDPABackend",
    "TritonBackend",
    "__version__",
    "explain",
    "ffpa_attn_backward",
    "ffpa_attn_func",
    "ffpa_attn_varlen_backward",
    "ffpa_attn_varlen_func",
    "warm",
]
