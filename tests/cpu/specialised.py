"""Prints the kernels that calls of a set compile for sm_90, once for each: ``python -m tests.cpu.specialised SET``.

A program of its own, because compiling needs a Triton that is not interpreting.
"""

from __future__ import annotations

import sys

import torch

from ffpa_jit.triton import decode, dense
from ffpa_jit.triton.offline import compile_only
from ffpa_jit.triton.terms import Terms

BF16, BOOL = torch.bfloat16, torch.bool


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def attend(len_q, len_kv, terms, run=dense.forward, batch=2):
    q, k = empty(batch, 4, len_q, 512), empty(batch, 2, len_kv, 512)
    return lambda: run(q, k, k, terms, arch="sm_90", cap=512 << 20)


def rates():
    rng = empty(2, dtype=torch.int64)
    return [attend(300, 300, Terms(0.1, dropout_p=p, rng=rng)) for p in (0.1, 0.5, 1 / 16)]


def masks(dtype):
    sizes = [(256, 256), (384, 4096), (2048, 2176), (128, 1040), (16, 16)]
    shapes = [(n, m, (*lead, n, m)) for n, m in sizes for lead in ((1, 1), (2, 4))]
    return [attend(n, m, Terms(0.1, attn_mask=empty(*shape, dtype=dtype))) for n, m, shape in shapes]


def decoding():
    shapes = [(batch, m) for m in (64, 100, 1000, 2048) for batch in (1, 2, 16)]
    terms = [(m, batch, Terms(0.1, attn_mask=empty(batch, 1, 1, m, dtype=BOOL))) for batch, m in shapes]
    return [attend(1, m, each, decode.forward, batch) for m, batch, each in terms]


SETS = {
    "dropout rates": rates,
    "additive masks": lambda: masks(BF16),
    "boolean masks": lambda: masks(BOOL),
    "decoding under a mask": decoding,
}

if __name__ == "__main__":
    with compile_only("sm_90") as launches:
        for call in SETS[sys.argv[1]]():
            call()
    print(*sorted(name for name, _ in {(x.function.__name__, x.kernel.hash) for x in launches}))
