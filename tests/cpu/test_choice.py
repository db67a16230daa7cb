"""Which backend is chosen where several would run a call, what happens when the chosen one cannot after all, and that a
compiler can trace the choice. Plans are those of a GPU; nothing is launched.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from ffpa_jit import dispatch, explain, ffpa_attn_func, registry
from ffpa_jit.problem import Problem, Refusal, UnavailableError
from tests.cases.shapes import Shape, make
from tests.cpu.fakes import FakeCUDA, Refusing

SDPA = F.scaled_dot_product_attention
HALF = torch.float16
SHAPE = Shape(3, 2, 2, 5, 7, 264)


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _no_cutedsl_here():
    with registry.replaced("cutedsl", Refusing()):
        yield


class _Estimating:
    """A backend that takes any forward and says how long it takes."""

    def __init__(self, name: str, microseconds: float) -> None:
        self.name, self.microseconds = name, microseconds

    def refusals(self, problem, options, *, direction):
        return []

    def predict_us(self, problem):
        return self.microseconds


def _gpu_problem(**changes) -> Problem:
    problem = Problem(
        batch=1, heads_q=8, heads_kv=2, len_q=1, len_kv=8192, head_dim=512, head_dim_v=512, dtype=torch.bfloat16,
        device_type="cuda", device_index=0, arch="sm_90", is_causal=False, has_mask=False, dropout_p=0.0,
        needs_grad=False, mask_needs_grad=False,
    )  # fmt: skip
    return dataclasses.replace(problem, **changes)


@pytest.mark.parametrize(("triton", "cuda", "runs"), [(300.0, 50.0, "cuda"), (50.0, 300.0, "triton"), (9, 9, "triton")])
def test_of_two_candidates_the_faster_runs_with_gradients_as_without(triton, cuda, runs):
    with (
        registry.replaced("triton", _Estimating("triton", triton)),
        registry.replaced("cuda", _Estimating("cuda", cuda)),
    ):
        assert dispatch.choose(_gpu_problem(), None, None).forward == runs
        assert dispatch.choose(_gpu_problem(needs_grad=True), None, None).forward == runs


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, "triton"),
        ({"batch": 8}, "triton"),  # a decoding step whose keys take the memory longer than the launches the host
        ({"len_q": 8192}, "triton"),
        ({"len_q": 8192, "len_kv": 8192, "heads_q": 2}, "triton"),
        ({"len_q": 64, "len_kv": 64, "heads_q": 2}, "triton"),  # one launch, on either
        ({"len_q": 512, "len_kv": 512}, "cuda"),  # one launch instead of four
    ],
)
def test_what_the_predictions_choose_and_no_call_is_too_small_for_a_kernel(changes, runs, monkeypatch):
    from ffpa_jit.cuda import backend

    monkeypatch.setattr(backend, "_out_of_reach", lambda *arguments: None)
    with registry.replaced("cuda", backend.BACKEND):
        assert dispatch.choose(_gpu_problem(**changes), None, None).forward == runs


def test_no_heads_and_nearly_certain_dropout_are_planned_without_an_error(monkeypatch):
    from ffpa_jit.cuda import backend

    monkeypatch.setattr(backend, "_out_of_reach", lambda *arguments: None)
    with registry.replaced("cuda", backend.BACKEND), registry.replaced("triton", Refusing()):
        assert dispatch.choose(_gpu_problem(heads_q=0, heads_kv=0), None, None).forward in ("cuda", "triton", "sdpa")
        assert dispatch.choose(_gpu_problem(dropout_p=0.9999), None, None).forward == "cuda"
        for certain in (0.99999, 0.999999999, 1.0):
            assert dispatch.choose(_gpu_problem(dropout_p=certain), None, None).forward == "sdpa"


class _Broken(FakeCUDA):
    """Takes a call and finds that it cannot run it; from then on it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.tried = 0

    def refusals(self, problem, options, *, direction):
        if self.broken:
            return [Refusal("toolchain", "its compiler fails")]
        return super().refusals(problem, options, direction=direction)

    def forward(self, *tensors, **options):
        self.broken = True
        self.tried += 1
        raise UnavailableError("its compiler fails")


@pytest.mark.parametrize("masked", [True, False])  # False: a call whose plan is remembered by itself
def test_a_backend_that_turns_out_unavailable_hands_the_call_on_and_is_not_tried_again(warnings_seen, masked):
    q, k, v, _ = make(SHAPE, HALF)
    mask = torch.rand(5, 7) > 0.3
    mask[:, 0] = True
    mask = mask if masked else None
    broken = _Broken()
    with registry.replaced("cuda", broken), registry.replaced("triton", Refusing()):
        for _ in range(3):
            out = ffpa_attn_func(q, k, v, attn_mask=mask)
            torch.testing.assert_close(out.float(), SDPA(q, k, v, attn_mask=mask).float(), rtol=4e-3, atol=4e-3)
        assert len([each for each in warnings_seen if "could not run a call" in each]) == 1
        assert any("its compiler fails" in message for message in warnings_seen)
        assert "its compiler fails" in str(explain(q, k, v, attn_mask=mask))
    assert broken.tried == 1
    broken = _Broken()
    with registry.replaced("cuda", broken):
        with pytest.raises(UnavailableError, match="compiler"):
            ffpa_attn_func(q, k, v, attn_mask=mask, forward_backend="cuda")
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="its compiler fails"):
                ffpa_attn_func(q, k, v, attn_mask=mask, forward_backend="cuda")
    assert broken.tried == 1


def test_keys_of_other_ranks_than_the_query_are_broadcast_whatever_their_first_size():
    q = torch.randn(2, 2, 5, 264, dtype=HALF)
    with registry.replaced("cuda", FakeCUDA()), registry.replaced("triton", Refusing()):
        for shape in ((2, 7, 264), (2, 1, 2, 7, 264), (1, 2, 7, 264), (2, 2, 7, 264)):
            for _ in range(2):
                k, v = (torch.randn(shape, dtype=HALF) for _ in range(2))
                out, wanted = ffpa_attn_func(q, k, v), SDPA(q.float(), k.float(), v.float())
                assert out.shape == wanted.shape
                torch.testing.assert_close(out.float(), wanted, rtol=4e-3, atol=4e-3)


def test_installed_as_sdpa_it_judges_calls_of_every_rank_alike(monkeypatch):
    """A window whose mask is above the cap: SDPA has none, but its caller did not ask for the cap to be heeded."""
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "0.001")
    tensors = make(Shape(1, 2, 2, 64, 64, 264), HALF)[:3]
    wider = [each[None] for each in tensors]
    with registry.replaced("cuda", Refusing()), registry.replaced("triton", Refusing()):
        for _ in range(2):
            for call in (tensors, wider):
                with pytest.raises(NotImplementedError, match="WORKSPACE"):
                    ffpa_attn_func(*call, window_size=(3, 0))
            with monkeypatch.context() as patch:
                patch.setattr(F, "scaled_dot_product_attention", ffpa_attn_func)
                found, expected = (
                    F.scaled_dot_product_attention(*call, window_size=(3, 0)) for call in (tensors, wider)
                )
                torch.testing.assert_close(found, expected[0], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("masked", [False, True])
def test_what_falls_back_can_be_traced_with_its_reasons(dynamic, dropout_p, masked):
    """A refusal says what came; while a compiler traces, that may be a symbol."""
    q, k, v, _ = make(Shape(1, 4, 2, 40, 50, 512), torch.bfloat16)
    mask = torch.rand(40, 50) > 0.3 if masked else None
    refusing = Refusing()

    def call(q, k, v, mask):
        return ffpa_attn_func(q, k, v, attn_mask=mask, dropout_p=dropout_p, enable_gqa=True) * 2

    with registry.replaced("triton", refusing), registry.replaced("cuda", refusing):
        out = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")(q, k, v, mask)
    assert out.shape == q.shape
    # ... and with the backends themselves.
    torch.compiler.reset()
    assert torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")(q, k, v, mask).shape == q.shape
