"""The kernels without a workspace, through the interpreter in fp16, against the oracle; and compiled for GPUs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch

from bench.compile_kernels import SHARED_KIB
from ffpa_jit.triton import configs
from tests import oracle, philox
from tests.cases.shapes import EMPTY, LAYOUTS, MaskKind, Shape, late_maximum, make, make_mask
from tests.cpu.conftest import run_compiling

pytest.importorskip("triton")

from ffpa_jit.triton import fused
from ffpa_jit.triton.terms import Terms

HALF = torch.float16
ALL = (-1, -1)
EVERY = (True, True, True, True)
PLAIN = Shape(1, 2, 1, 40, 50, 40)
SHORT = Shape(2, 2, 1, 20, 40, 40)
LARGE = Shape(1, 2, 1, 130, 150, 264)


@dataclass(frozen=True)
class Case:
    """A call, stated; ``run`` holds it to the oracle."""

    shape: Shape
    mask: MaskKind | None = None
    window: tuple[int, int] = ALL
    softcap: float = 0.0
    dropout_p: float = 0.0
    with_lse: bool = False
    layout: str = "contiguous"
    scale: float | None = None
    needs: tuple[bool, bool, bool, bool] = EVERY

    def __str__(self) -> str:
        parts = [str(self.shape), str(self.mask or ""), f"w{self.window[0]},{self.window[1]}"]
        return "-".join([*parts, f"cap{self.softcap}", f"drop{self.dropout_p}", self.layout])

    def terms(self, mask: torch.Tensor | None = None) -> tuple[Terms, torch.Tensor | None]:
        """The options, and what dropout multiplies the probabilities with."""
        shape, rng, kept = self.shape, None, None
        if self.dropout_p:
            rng = torch.randint(-(2**63), 2**63 - 1, (2,))
            kept = philox.kept(rng, (shape.batch, shape.heads_q, shape.len_q, shape.len_kv), self.dropout_p)
        scale = shape.head_dim**-0.5 if self.scale is None else self.scale
        return Terms(scale, shape.is_causal, self.window, self.softcap, mask, self.dropout_p, rng), kept

    def run(self, tensors: tuple[torch.Tensor, ...] | None = None) -> tuple[torch.Tensor, ...]:
        """out, lse and the four gradients."""
        shape = self.shape
        q, k, v, do = make(shape, HALF, layout=self.layout) if tensors is None else tensors
        mask = None if self.mask is None else make_mask(self.mask, shape, HALF)
        grad_lse = torch.randn(do.shape[:3]) if self.with_lse else None
        terms, kept = self.terms(mask)
        out, lse = fused.forward(q, k, v, terms, arch="interpreter")
        needs = (*self.needs[:3], self.needs[3] and mask is not None and mask.dtype != torch.bool)
        grads = fused.backward(do, grad_lse, q, k, v, out, lse, terms, needs=needs, arch="interpreter")
        assert out.stride() == torch.empty_like(q).stride()
        for grad, x, need in zip(grads, (q, k, v, mask), needs, strict=True):
            assert (grad is not None) == need
            if grad is not None:
                assert (grad.dtype, grad.shape, grad.stride()) == (x.dtype, x.shape, torch.empty_like(x).stride())
        oracle.check(
            q, k, v, out=out, lse=lse, grads=grads[:3], grad_mask=grads[3], grad_out=do, grad_lse=grad_lse,
            is_causal=shape.is_causal, scale=self.scale, attn_mask=mask, kept=kept, window=self.window,
            softcap=self.softcap,
        )  # fmt: skip
        return out, lse, *grads


def replaced_tiling(monkeypatch: pytest.MonkeyPatch, **fields: int) -> None:
    tiling = replace(configs.fused_tiling("interpreter", "forward", 264, plain=True), **fields)
    monkeypatch.setattr(fused, "fused_tiling", lambda *args, **kwargs: tiling)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 rows, slices of 48 columns: little to interpret, but 40 rows or keys are two tiles."""
    monkeypatch.setattr(fused, "TILE", 32)
    monkeypatch.setattr(fused, "tiles", lambda n: -(-n // 32))
    replaced_tiling(monkeypatch, block_n=32, tail=16, strip=32, block_k=64)


small = pytest.mark.usefixtures("small_tiles")


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 1, 1, 1, 512),
        Shape(1, 1, 1, 200, 1, 264),
        Shape(1, 1, 1, 1, 200, 520),
        LARGE,
        Shape(1, 1, 1, 33, 65, 1024),
        Shape(1, 1, 1, 130, 130, 512, True),
        Shape(1, 2, 1, 40, 17, 320, True),  # rows without keys
    ],
    ids=str,
)
def test_forward_and_backward_match_the_oracle(shape):
    Case(shape, with_lse=shape.is_causal).run()


@small
@pytest.mark.parametrize(
    "shape", [PLAIN, Shape(2, 4, 2, 17, 40, 40, True), Shape(1, 3, 1, 33, 40, 104), Shape(2, 1, 1, 65, 31, 40)], ids=str
)
def test_small_tiles_match_the_oracle(shape):
    Case(shape, with_lse=True).run()


@small
@pytest.mark.parametrize("window", [(0, 0), (30, -1), (20, 5)])
@pytest.mark.parametrize("shape", [Shape(1, 1, 1, 90, 100, 40), Shape(1, 1, 1, 70, 20, 40)], ids=str)
def test_a_window_limits_both_sides(shape, window):
    Case(shape, window=window).run()


@small
def test_a_window_goes_with_a_causal_mask():
    Case(Shape(1, 1, 1, 90, 100, 40, True), window=(40, 100)).run()


@small
def test_tiles_out_of_the_window_are_not_read():
    shape = Shape(1, 1, 1, 20, 200, 40)
    q, k, v, _ = make(shape, HALF)
    k[:, :, :128] = v[:, :, :128] = math.nan
    out, lse = fused.forward(q, k, v, Terms(0.1, window=(40, -1)), arch="interpreter")
    assert not out.isnan().any()
    assert not lse.isnan().any()


@small
@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap(softcap):
    Case(PLAIN, softcap=softcap, scale=1.0).run()


@small
@pytest.mark.parametrize(("shape", "dropout_p"), [(PLAIN, 0.1), (replace(SHORT, is_causal=True), 0.9)], ids=str)
def test_dropout_is_the_documented_stream(shape, dropout_p):
    Case(shape, dropout_p=dropout_p, with_lse=True).run()


@small
@pytest.mark.parametrize(
    "mask",
    [
        MaskKind("bool", "bk", "right"),
        MaskKind("bool", "bhqk", "empty_rows", "sliced"),
        MaskKind("bool", "qk", "blocks", "transposed"),
        MaskKind("half", "qk", "minimum"),
        MaskKind("half", "hk", "values", "expanded"),
        MaskKind("half", "hq", "values", "sliced"),
        MaskKind("fp32", "bqk", "minimum", "transposed"),
        MaskKind("fp32", "k", "low"),
        MaskKind("fp32", "bh", "values"),
    ],
    ids=str,
)
def test_masks_and_their_gradients(mask):
    Case(SHORT, mask).run()


@small
@pytest.mark.parametrize("dims", ["qk", "k", "q", ""])
def test_the_gradient_of_a_mask_is_summed_over_what_it_broadcasts_over(dims):
    Case(Shape(2, 2, 1, 40, 45, 40, True), MaskKind("fp32", dims, "values"), with_lse=True).run()


@small
def test_only_a_mask_may_require_a_gradient():
    Case(SHORT, MaskKind("half", "hqk", "random"), needs=(False, False, False, True)).run()


@small
def test_tiles_that_a_mask_empties_are_not_computed():
    shape = Shape(1, 1, 1, 20, 200, 40)
    q, k, v, _ = make(shape, HALF)
    k[:, :, :128] = v[:, :, :128] = math.nan
    mask = (torch.arange(200) >= 128)[None, None, None]
    out, _ = fused.forward(q, k, v, Terms(0.1, attn_mask=mask), arch="interpreter")
    assert not out.isnan().any()


CROSSED = [
    Case(SHORT, MaskKind("half", "bqk", "random"), (30, 9), 5.0, 0.2, with_lse=True, layout="bshd"),
    Case(replace(SHORT, is_causal=True), MaskKind("fp32", "hk", "values"), softcap=20.0, dropout_p=0.1),
    Case(replace(SHORT, is_causal=True), MaskKind("bool", "bk", "left"), (25, -1), dropout_p=0.5, with_lse=True),
    Case(SHORT, MaskKind("half", "qk", "minimum"), softcap=2.0, with_lse=True),
    Case(SHORT, MaskKind("half", "k", "values"), scale=-0.1, layout="last_stride"),
    Case(replace(SHORT, is_causal=True), None, (40, -1), 10.0, 0.3, layout="sliced"),
    Case(Shape(1, 2, 1, 40, 45, 40, True), MaskKind("half", "qk", "random"), (30, -1), 15.0, 0.1, with_lse=True),
]


@small
@pytest.mark.parametrize("case", CROSSED, ids=str)
def test_options_cross(case):
    case.run()


def test_whole_tiles_take_every_option():
    Case(
        replace(LARGE, is_causal=True), MaskKind("half", "qk", "random"), (100, -1), 15.0, 0.1, with_lse=True
    ).run()  # fmt: skip


@small
@pytest.mark.parametrize("tma", [True, False])
def test_tilings_and_pointers_change_nothing_but_roundings(monkeypatch, tma):
    replaced_tiling(monkeypatch, block_n=32, tail=0, strip=32, block_k=32)
    monkeypatch.setattr(fused, "uses_tma", lambda arch: tma)
    replace(CROSSED[0], shape=replace(SHORT, batch=1)).run()


@small
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "contiguous"])
def test_any_strides_go_in(layout):
    Case(Shape(1, 2, 2, 20, 40, 40, True), layout=layout).run()


@small
@pytest.mark.parametrize(("is_causal", "tma"), [(False, False), (True, True)])
def test_nan_beyond_the_last_key_or_row_never_leaks(monkeypatch, is_causal, tma):
    monkeypatch.setattr(fused, "uses_tma", lambda arch: tma)

    def window(heads: int, length: int) -> torch.Tensor:
        store = torch.full((1, heads, 128, 48), math.nan, dtype=HALF)
        store[:, :, :length, :40] = torch.randn(1, heads, length, 40)
        return store[:, :, :length, :40]

    q, k, v, do = window(2, 40), window(1, 50), window(1, 50), window(2, 40)
    Case(Shape(1, 2, 1, 40, 50, 40, is_causal), MaskKind("half", "qk", "random", "sliced")).run((q, k, v, do))


@small
def test_rows_without_keys_give_zero_whatever_the_values_are():
    shape = Shape(1, 1, 1, 30, 10, 40, True)
    q, k, v, _ = make(shape, HALF)
    v[0, 0, 0] = math.inf
    out, lse = fused.forward(q, k, v, Terms(0.1, True), arch="interpreter")
    assert (out[0, 0, :20] == 0).all()
    assert torch.isneginf(lse[0, 0, :20]).all()


@small
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_tensors_give_empty_or_zero_results(shape):
    q, k, v, do = make(shape, HALF)
    mask = torch.zeros(1, 1, shape.len_q, shape.len_kv)
    terms = Terms(1.0, attn_mask=mask)
    out, lse = fused.forward(q, k, v, terms, arch="interpreter")
    grads = fused.backward(do, None, q, k, v, out, lse, terms, needs=EVERY, arch="interpreter")
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    for grad, x in zip(grads, (q, k, v, mask), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()


@small
@pytest.mark.parametrize("step", [6, 300])
def test_rows_whose_maximum_moves_late_stay_exact(step):
    shape = Shape(1, 1, 1, 40, 300, 40)
    Case(shape).run(late_maximum(shape, HALF, step=step))


@small
@pytest.mark.parametrize("size", [2.0**12, 2.0**-12])
def test_large_and_small_output_gradients_keep_their_precision(size):
    q, k, v, do = make(SHORT, HALF)
    Case(SHORT, dropout_p=0.5).run((q, k, v, do * size))


@small
def test_repeated_calls_give_the_same_bits():
    first, second = (Case(SHORT, MaskKind("fp32", "k", "values"), with_lse=False).run() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@small
def test_nothing_but_results_and_row_vectors_is_allocated(monkeypatch):
    """The sizes of all tensors that a call makes on the host."""
    made = []
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *args, original=original, **kwargs: made.append(original(*args, **kwargs)) or made[-1]
        )
    shape = Shape(1, 2, 1, 40, 70, 40)
    q, k, v, do = make(shape, HALF)
    terms = Terms(0.1)
    out, lse = fused.forward(q, k, v, terms, arch="interpreter")
    fused.backward(do, None, q, k, v, out, lse, terms, needs=EVERY, arch="interpreter")
    others = [x for x in made if x.shape not in (q.shape, k.shape) and x.shape != lse.shape]
    # LSE in log2 units and delta, of whole row tiles.
    assert sum(x.numel() for x in others) <= 2 * shape.heads_q * 128


# Compiled, in a process of its own: (architecture, head dim, dtype, mask, softcap, dropout).
COMPILED = [
    ("sm_80", 512, "bfloat16", None, 0, 0),
    ("sm_86", 1024, "float16", "add", 0, 0),
    ("sm_90", 512, "bfloat16", "add", 0, 0),
    ("sm_90", 320, "bfloat16", "add", 20, 0.1),
    ("sm_90", 1024, "float16", "bool", 0, 0.1),
    ("sm_100", 512, "bfloat16", "bool", 0, 0),
    ("sm_120", 320, "float16", None, 0, 0),
    ("gfx942", 512, "bfloat16", "add", 20, 0.1),
    ("gfx1201", 512, "float16", "bool", 0, 0),
]

COMPILE = """
import json, re, sys
import torch
from bench.compile_kernels import resources
from ffpa_jit.triton import fused
from ffpa_jit.triton.offline import compile_only
from ffpa_jit.triton.terms import Terms

def meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")

arch, head_dim, dtype, mask, softcap, dropout_p = json.loads({case!r})
dtype = getattr(torch, dtype)
masks = {{"add": meta(1, 1, 256, 256, dtype=dtype), "bool": meta(2, 1, 1, 256, dtype=torch.bool)}}
rng = meta(2, dtype=torch.int64) if dropout_p else None
terms = Terms(head_dim**-0.5, True, (-1, -1), softcap, masks.get(mask), dropout_p, rng)
q, k, v = (meta(2, heads, 256, head_dim, dtype=dtype) for heads in (2, 1, 1))
lse = meta(2, 2, 256, dtype=torch.float32)
with compile_only(arch) as launches:
    fused.forward(q, k, v, terms, arch=arch)
    fused.backward(q, lse, q, k, v, q, lse, terms, needs=(True, True, True, mask == "add"), arch=arch)
found = []
for launch in launches:
    spilled = resources(launch.kernel)[1]
    if "amdgcn" in launch.kernel.asm:  # a scalar register that is spilled goes to a vector register
        spilled = sum(map(int, re.findall(r"vgpr_spill_count:\\s*(\\d+)", launch.kernel.asm["amdgcn"])))
    found.append([launch.function.__name__, spilled, launch.kernel.metadata.shared])
print(json.dumps(found))
"""

FEW = 8
"""Reloads that are no fault: a few row vectors wait in local memory while a score tile is computed."""


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_kernels_compile_within_registers_and_shared_memory(case):
    found = json.loads(run_compiling("-c", COMPILE.format(case=json.dumps(case))).splitlines()[-1])
    fused_kernels = [x for x in found if x[0].startswith("fused")]
    assert len(fused_kernels) == 4 + (case[3] == "add")
    for name, spilled, shared in fused_kernels:
        assert spilled <= FEW, f"{name}: {spilled} reloads"
        assert shared <= SHARED_KIB[case[0]] * 1024, f"{name}: {shared} bytes of shared memory"


@pytest.mark.parametrize("arch", [x for x in configs.FAMILIES if x != "interpreter"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_shipped_tiling_is_dead(arch, direction):
    arch = configs.FAMILIES[arch][0]
    chosen = {configs.fused_tiling(arch, direction, d, plain=p) for d in range(264, 1025, 8) for p in (True, False)}
    assert len(chosen) == len(configs._table(arch)[f"fused_{direction}"])
