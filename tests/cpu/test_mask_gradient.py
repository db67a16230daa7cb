"""How the gradient of a mask adds up over blocks of heads: its float32 sums, half of them in the gradient itself."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ffpa_jit.triton import dense
from ffpa_jit.triton.schedule import TILE_BYTES
from ffpa_jit.triton.terms import Terms
from tests import oracle
from tests.cases.options import Case
from tests.cases.shapes import MaskKind, Shape

HALF = torch.float16


def gradients(mask, *, heads, cap, batch=2, is_causal=False):
    torch.manual_seed(len(mask.shape) + heads)
    len_q, len_kv = mask.shape[-2:]
    q, do = (torch.randn(batch, heads, len_q, 264).to(HALF) for _ in range(2))
    k, v = (torch.randn(batch, heads, len_kv, 264).to(HALF) for _ in range(2))
    terms = Terms(264**-0.5, is_causal, attn_mask=mask)
    out, lse = dense.forward(q, k, v, terms, arch="interpreter", cap=1 << 30)
    needs = (True, True, True, True)
    found = dense.backward(do, None, q, k, v, out, lse, terms, needs=needs, arch="interpreter", cap=cap)
    return found, (q, k, v, do, out)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 1, 40, 150), HALF), ((1, 1, 33, 144), torch.float32), ((2, 1, 33, 144), HALF), ((1, 3, 20, 17), HALF)],
    ids=str,
)
def test_it_has_the_same_bits_however_the_heads_are_cut(shape, dtype, monkeypatch):
    torch.manual_seed(1)
    mask = torch.randn(shape).to(dtype)
    whole, (q, k, v, do, out) = gradients(mask, heads=3, cap=1 << 30)
    oracle.check(q, k, v, out=out, grads=whole[:3], grad_mask=whole[3], grad_out=do, attn_mask=mask)
    slots = -(-shape[2] // 128) * -(-shape[3] // 128)
    # A head's tiles fit beside what the sums hold, two heads' do not.
    room = int(1.5 * slots * 2 * TILE_BYTES) + dense.mask_sum_bytes(mask, q, k)
    blocks = []
    plan = dense.backward_blocks
    monkeypatch.setattr(dense, "backward_blocks", lambda *args, **rest: blocks.extend(plan(*args, **rest)) or blocks)
    cut, _ = gradients(mask, heads=3, cap=room)
    assert [block.heads for block in blocks] == [1] * 6
    assert torch.equal(cut[3], whole[3])


def test_it_may_have_any_layout_and_be_zero_where_nobody_sees():
    torch.manual_seed(2)
    base = torch.randn(1, 1, 140, 130).to(HALF)
    expected, (q, k, v, do, out) = gradients(base, heads=2, cap=1 << 30, is_causal=True)
    oracle.check(q, k, v, out=out, grad_mask=expected[3], grad_out=do, attn_mask=base, is_causal=True)
    transposed = base.transpose(2, 3).contiguous().transpose(2, 3)
    found, _ = gradients(transposed, heads=2, cap=1 << 20, is_causal=True)
    assert found[3].stride() == transposed.stride()
    assert torch.equal(found[3], expected[3])


def test_what_it_holds_beside_itself_is_the_other_half_of_the_sums():
    q = torch.empty(2, 4, 300, 264, dtype=HALF)
    assert dense.mask_sum_bytes(torch.empty(1, 1, 300, 300, dtype=HALF), q, q) == 2 * 300 * 300
    assert dense.mask_sum_bytes(torch.empty(2, 1, 300, 300), q, q) == 0
    assert dense.mask_sum_bytes(torch.empty(2, 1, 1, 300), q, q) == 4 * 2 * 4 * 300
    transposed = torch.empty(2, 1, 300, 200).transpose(2, 3)  # added up densely, then copied
    assert dense.mask_sum_bytes(transposed, q[:, :, :200], q) == 4 * 2 * 300 * 200


@pytest.mark.parametrize("memory", [1.0, 1.3, 2.0])
def test_what_does_not_fit_is_computed_again(memory):
    """480 kB for a gradient that is added up in another layout than its own; the other gradients need 0.8 MB."""
    Case(Shape(1, 1, 1, 300, 400, 264), MaskKind("fp32", "qk", "random", "transposed"), memory=memory).run(HALF)
