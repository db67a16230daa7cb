"""NaN and infinity in query, key and value, through the interpreter: they reach what sees them, and nothing else.

The interpreter's maximum is made the hardware's, which passes over NaN.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ffpa_jit import ffpa_attn_func, ffpa_attn_varlen_func

pytest.importorskip("triton")

from triton.runtime import interpreter

HALF = torch.float16
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _maximum_passes_over_nan(monkeypatch):
    builder = type(interpreter.interpreter_builder)
    monkeypatch.setattr(builder, "create_maxnumf", lambda self, x, y: self.binary_op(x, y, np.fmax))
    monkeypatch.setattr(builder, "create_minnumf", lambda self, x, y: self.binary_op(x, y, np.fmin))


def position(n: int, m: int) -> torch.Tensor:
    """Key minus own position, [n, m]: 0 on the diagonal that ends at the last key."""
    return torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n)


def boolean_mask(n: int, m: int) -> torch.Tensor:
    """Hides the last keys and key 5 from everybody, key 60 from some rows, and everything from row 2."""
    mask = torch.ones(n, m, dtype=torch.bool)
    mask[:, -10:] = False
    mask[:, 5] = False
    mask[n // 2 :, 60] = False
    mask[2] = False
    return mask


KINDS = {
    "causal": (lambda n, m: position(n, m) <= 0, lambda n, m: {"is_causal": True}),
    "window": (lambda n, m: position(n, m).abs() <= 3, lambda n, m: {"window_size": (3, 3)}),
    "mask": (boolean_mask, lambda n, m: {"attn_mask": boolean_mask(n, m)}),
}


class Case:
    """Random tensors, what each row sees of them, and the results of a call, with gradients if there are any."""

    def __init__(self, kind: str, n: int = 70, m: int = 140, dim: int = 264) -> None:
        torch.manual_seed(0)
        self.q, self.k, self.v, self.do = (torch.randn(1, 1, x, dim).to(HALF) for x in (n, m, m, n))
        if kind == "plain":
            self.sees, self.options = torch.ones(n, m, dtype=torch.bool), {}
        else:
            sees, options = KINDS[kind]
            self.sees, self.options = sees(n, m), options(n, m)

    def run(self, *, backward: bool = True) -> dict[str, torch.Tensor]:
        leaves = [x.clone().requires_grad_(backward) for x in (self.q, self.k, self.v)]
        out, lse = ffpa_attn_func(*leaves, backend="triton", return_lse=True, **self.options)
        found = {"out": out.detach()[0, 0], "lse": lse.detach()[0, 0]}
        if backward:
            grads = torch.autograd.grad(out, leaves, self.do)
            found |= {name: x[0, 0] for name, x in zip(("dq", "dk", "dv"), grads, strict=True)}
        return found


def assert_same(found, expected, rows, keys):
    for name in found:
        at = keys if name in ("dk", "dv") else rows
        x, y = found[name][at].float(), expected[name][at].float()
        assert torch.equal(torch.isfinite(x), torch.isfinite(y)), name
        finite = torch.isfinite(y)
        torch.testing.assert_close(x[finite], y[finite], rtol=2e-3, atol=2e-3, msg=lambda said, name=name: name + said)


def check_hidden(case: Case, name: str, bad: float, keys: list[int], *, backward: bool = True) -> None:
    """What is bad in these keys is as good as 0 to the rows that see none of them."""
    x = getattr(case, name)
    x[0, 0, keys] = 0.0
    expected = case.run(backward=backward)
    x[0, 0, keys, 3] = bad
    found = case.run(backward=backward)
    blind = ~case.sees[:, keys].any(1)
    assert blind.any()
    clean_keys = ~(case.sees & ~blind[:, None]).any(0)
    clean_keys[keys] = False
    assert_same(found, expected, blind, clean_keys)
    assert torch.isfinite(found["out"][blind]).all()
    seeing = case.sees[:, keys].any(1)
    assert not torch.isfinite(found["out"][seeing]).all(1).any()


HIDDEN = {"causal": [139, 137, 130], "window": [139, 125, 3], "mask": [135, 5, 60]}


@pytest.mark.parametrize("kind", ["window", "mask"])
@pytest.mark.parametrize(("name", "bad"), [("k", NAN), ("v", NAN), ("v", INF)])
def test_what_is_hidden_never_reaches_a_row_that_does_not_see_it(kind, name, bad):
    check_hidden(Case(kind), name, bad, HIDDEN[kind])


@pytest.mark.parametrize("name", ["k", "v"])
def test_hidden_nan_beyond_the_first_tiles_stays_hidden(name):
    check_hidden(Case("mask", 150, 300), name, NAN, [5, 60, 291])


def test_a_key_of_nan_that_comes_later_reaches_no_output():
    case = Case("causal")
    case.k[0, 0, HIDDEN["causal"]] = NAN
    found = case.run(backward=False)
    blind = ~case.sees[:, HIDDEN["causal"]].any(1)
    for x in (found["out"], found["lse"]):
        assert torch.isfinite(x[blind]).all()
        assert x[~blind].isnan().flatten(1).all() if x.dim() > 1 else x[~blind].isnan().all()


@pytest.mark.parametrize("kind", ["window", "mask"])
def test_a_query_of_nan_reaches_no_key_that_it_does_not_see(kind):
    case = Case(kind)
    case.q[0, 0, 1] = 0.0
    expected = case.run()
    case.q[0, 0, 1] = NAN
    rows = torch.arange(70) != 1
    assert_same(case.run(), expected, rows, ~case.sees[1])


@pytest.mark.parametrize("memory", [None, "0.01"], ids=["two phases", "fused"])
@pytest.mark.parametrize("kind", ["plain", "causal", "window", "mask"])
def test_a_query_of_nan_is_nan_in_output_and_log_sum_exp(monkeypatch, kind, memory):
    if memory is not None:
        monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", memory)
    case = Case(kind)
    case.q[0, 0, 1, 7] = NAN
    found = case.run()
    assert found["out"][1].isnan().all()
    assert found["lse"][1].isnan()
    assert found["dq"][1].isnan().all()
    assert not found["lse"][[0, *range(2, 70)]].isnan().any()


@pytest.mark.parametrize("n", [3, 1])
@pytest.mark.parametrize("kind", ["plain", "causal"])
def test_a_query_of_nan_among_few_is_nan_in_output_and_log_sum_exp(kind, n):
    case = Case(kind, n, 700)
    case.q[0, 0, n - 1, 7] = NAN
    found = case.run(backward=False)
    assert found["out"][n - 1].isnan().all()
    assert found["lse"].isnan().tolist() == [i == n - 1 for i in range(n)]


def test_a_query_of_nan_is_nan_in_output_and_log_sum_exp_of_packed_sequences():
    torch.manual_seed(0)
    q, k, v = (torch.randn(16, 1, 264).to(HALF) for _ in range(3))
    q[4, 0, 7] = NAN
    cu = torch.tensor([0, 6, 16], dtype=torch.int32)
    out, lse = ffpa_attn_varlen_func(q, k, v, cu, cu, 10, 10, causal=True, return_lse=True, backend="triton")
    assert out[4].isnan().all()
    assert lse[0].isnan().tolist() == [i == 4 for i in range(16)]


@pytest.mark.parametrize("memory", [None, "0.01"], ids=["two phases", "fused"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_rows_without_keys_give_zero_whatever_keys_and_values_hold(monkeypatch, bad, memory):
    if memory is not None:
        monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", memory)
    case = Case("mask")
    case.k[:], case.v[:] = bad, bad
    found = case.run()
    assert (found["out"][2] == 0).all()
    assert torch.isneginf(found["lse"][2])
    assert (found["dq"][2] == 0).all()


def test_rows_of_few_without_keys_give_zero_whatever_keys_and_values_hold():
    case = Case("mask", 3, 700)
    case.k[:], case.v[:] = NAN, INF
    found = case.run(backward=False)
    assert (found["out"][2] == 0).all()
    assert torch.isneginf(found["lse"][2])


def test_a_key_of_nan_that_a_mask_hides_never_reaches_a_row_of_few():
    check_hidden(Case("mask", 3, 140), "k", NAN, [5, 135, 60], backward=False)


def test_an_infinite_value_is_infinite_in_its_own_column_only():
    case = Case("mask")
    case.v[0, 0, 7, 3] = INF
    out = case.run(backward=False)["out"]
    seeing = case.sees[:, 7]
    assert torch.isposinf(out[seeing, 3]).all()
    assert torch.isfinite(out[seeing][:, [*range(3), *range(4, 264)]]).all()
