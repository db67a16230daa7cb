"""What the CuTe-DSL forward is told of a call: a launcher that reads the addresses and strides it is given, on the CPU,
computes what the call means, whatever the layout of its tensors."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from ffpa_jit import context
from ffpa_jit.cute import dense
from ffpa_jit.problem import AttentionParams

BF16 = torch.bfloat16


def at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind=ctypes.c_uint16, dtype=BF16):
    """The tensor that lies at an address."""
    count = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return torch.frombuffer((kind * count).from_address(address), dtype=dtype).as_strided(shape, strides)


def attend(q, k, v, scale):
    group = q.shape[1] // k.shape[1]
    scores = q.float() @ k.float().repeat_interleave(group, 1).transpose(-1, -2) * scale
    return scores.softmax(-1) @ v.float().repeat_interleave(group, 1), scores.logsumexp(-1)


def launch(query, key, value, out, lse, *rest):
    strides, rest = [rest[i : i + 3] for i in range(0, 12, 3)], rest[12:]
    k_heads, k_batches, v_heads, v_batches, batch, heads, group, len_q, len_kv, head_dim = rest[:10]
    scale, section, clusters, _ = rest[10:]
    assert not any(address % 16 for address in (query, key, value, out))
    assert not any(step % 8 for each in strides for step in each)
    assert all(step > 0 for each in strides[1:3] for step in each)
    assert 1 <= section <= heads * batch
    assert 1 <= clusters <= -(-len_q * group // 128) * heads * batch
    q, o = (
        at(place, (batch, heads * group, len_q, head_dim), (*steps, 1))
        for place, steps in ((query, strides[0]), (out, strides[3]))
    )
    k, v = (
        at(place, (*counts, len_kv, head_dim), (*steps, 1)).expand(batch, heads, len_kv, head_dim)
        for place, counts, steps in (
            (key, (k_batches, k_heads), strides[1]),
            (value, (v_batches, v_heads), strides[2]),
        )
    )
    result, log = attend(q, k, v, scale)
    o.copy_(result)
    rows = batch * heads * group * len_q
    if lse:
        at(lse, (rows,), (1,), ctypes.c_float, torch.float32).copy_(log.flatten())


def rand(*shape):
    return torch.randn(*shape, dtype=BF16)


def calls():
    q, k, v = rand(2, 4, 9, 264), rand(2, 2, 7, 264), rand(2, 2, 7, 264)
    yield "contiguous", q, k, v
    yield "[B, N, H, D]", rand(2, 9, 4, 264).transpose(1, 2), rand(2, 7, 2, 264).transpose(1, 2), v
    yield "expanded keys", q, rand(1, 1, 7, 264).expand(2, 2, 7, 264), rand(2, 1, 7, 264).expand(2, 2, 7, 264)
    yield "expanded heads", rand(1, 1, 9, 264).expand(2, 4, 9, 264), k, v
    yield "expanded rows", rand(2, 4, 1, 264).expand(2, 4, 9, 264), k, v
    yield "one key expanded", q, rand(2, 2, 1, 264).expand(2, 2, 7, 264), v
    yield "query transposed", rand(2, 4, 264, 9).transpose(2, 3), k, v
    yield "keys transposed", q, rand(2, 2, 264, 7).transpose(2, 3), v
    yield "query unaligned", rand(2 * 4 * 9 * 264 + 1)[1:].view(2, 4, 9, 264), k, v
    yield "odd row strides", rand(2, 9, 4, 265)[..., 1:].transpose(1, 2), rand(2, 2, 7, 265)[..., :264], v
    yield "sliced", rand(2, 8, 20, 512)[:, ::2, 3:12, :264], rand(2, 4, 9, 264)[:, :2, 2:], v
    yield "k is v", q, k, k
    yield "one query, one key", rand(2, 4, 1, 264), rand(2, 2, 1, 264), rand(2, 2, 1, 264)


@pytest.mark.parametrize(("q", "k", "v"), [pytest.param(*tensors, id=name) for name, *tensors in calls()])
def test_the_kernel_is_told_where_everything_lies(monkeypatch, q, k, v):
    monkeypatch.setattr(dense, "_clusters", lambda device: 66)
    monkeypatch.setattr(context, "stream", lambda device: 0)
    dense._form.cache_clear()
    out, lse = dense.Forward(launch, AttentionParams(0.05), True)(q, k, v)
    expected, log = attend(q, k, v, 0.05)
    assert out.stride() == torch.empty_like(q).stride()
    torch.testing.assert_close(out, expected.to(BF16), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, log)
    dense._form.cache_clear()


@pytest.mark.parametrize("shape", [(0, 2, 3, 264), (1, 0, 3, 264), (1, 2, 0, 264)])
def test_an_empty_call_launches_nothing(shape):
    empty = rand(*shape)
    out, lse = dense.Forward(None, AttentionParams(1.0, True), True)(empty, empty, empty)
    assert out.shape == shape
    assert lse.shape == shape[:3]


def test_without_keys_the_output_is_zero_and_the_lse_minus_infinity():
    none = rand(1, 2, 0, 264)
    out, lse = dense.Forward(None, AttentionParams(1.0), True)(rand(1, 2, 3, 264), none, none)
    assert not out.any()
    assert (lse == -math.inf).all()
