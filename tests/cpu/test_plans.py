"""The plan table: a call with a cached plan skips what was decided, and only that. The kernel is a stand-in that
computes, on the CPU, what it is launched for."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ffpa_jit import context, dispatch, ffpa_attn_func, plan_table, registry, request
from ffpa_jit.cute import backend as cute
from ffpa_jit.cute import dense
from ffpa_jit.problem import Refusal
from tests.cpu.conftest import ROOT, run_python
from tests.cpu.fakes import FakeTriton, Refusing
from tests.cpu.test_cute_dense import attend, launch, rand


class Machine:
    """Counts what a call passes through."""

    def __init__(self) -> None:
        self.decided = self.launches = 0
        self.places: list[int] = []

    def launch(self, *arguments):
        self.launches += 1
        self.places.append(arguments[4])
        launch(*arguments)

    @property
    def since(self) -> tuple[int, int]:
        """(decisions, launches) since the last time it was asked."""
        found = self.decided, self.launches
        self.decided = self.launches = 0
        return found


@pytest.fixture
def machine(monkeypatch):
    """CPU tensors that the CuTe-DSL backend takes for those of a Hopper GPU."""
    seen = Machine()
    for module in (request, cute):
        monkeypatch.setattr(module, "device_arch", lambda *device: "sm_90")
    monkeypatch.setattr(registry, "_loaded", {**registry._loaded, "cutedsl": cute.BACKEND})
    monkeypatch.setattr(dispatch, "_common_refusals", lambda call: ())
    monkeypatch.setattr(cute.CuTeKernels, "refusals", lambda self, call, options, *, direction: [])
    monkeypatch.setattr(cute, "_loaded", lambda spec: seen.launch)
    monkeypatch.setattr(context, "current_device", lambda: None)
    monkeypatch.setattr(dense, "_clusters", lambda device: 66)
    monkeypatch.setattr(context, "stream", lambda device: 0)
    decide = dispatch.decide

    def counted_decide(*arguments):
        seen.decided += 1
        return decide(*arguments)

    monkeypatch.setattr(dispatch, "decide", counted_decide)
    registry.invalidate()
    dense._form.cache_clear()
    yield seen
    registry.invalidate()
    dense._form.cache_clear()


def run(q, k, v, **options):
    options = {"backend": "cutedsl", "enable_gqa": True, **options}
    return ffpa_attn_func(q, k, v, return_lse=True, **options)


def tensors():
    return rand(2, 4, 9, 264), rand(2, 2, 7, 264), rand(2, 2, 7, 264)


def right(found, q, k, v, scale=264**-0.5):
    out, lse = attend(q, k, v, scale)
    torch.testing.assert_close(found[0], out.to(q.dtype), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found[1], lse)


def test_a_call_with_a_cached_plan_goes_straight_to_the_kernel(machine):
    first = tensors()
    right(run(*first), *first)
    assert machine.since == (1, 1)
    for scale in (None, 0.3, 2):
        for decided in (int(scale is not None), 0):
            again = tensors()
            found = run(*again, scale=scale)
            right(found, *again, 264**-0.5 if scale is None else scale)
            assert found[0].stride() == again[0].stride()
            assert machine.since == (decided, 1)


def test_a_number_that_is_a_tensor_is_read_at_every_call(machine):
    scale = torch.tensor(0.3)
    for value in (0.3, 0.3, 0.1):
        scale.fill_(value)
        q, k, v = tensors()
        right(run(q, k, v, scale=scale), q, k, v, float(scale))


def test_only_the_output_is_returned_where_only_that_is_asked_for(machine):
    for _ in range(3):
        q, k, v = tensors()
        out = ffpa_attn_func(q, k, v, enable_gqa=True, backend="cutedsl")
        torch.testing.assert_close(out, attend(q, k, v, 264**-0.5)[0].to(q.dtype), atol=1e-2, rtol=1e-2)
    assert machine.since == (1, 3)
    assert [bool(lse) for lse in machine.places] == [False] * 3  # where the kernel is to write it


def moved(x):
    """`x` at an address that is no multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def test_another_layout_is_decided_anew_and_another_alignment_is_copied(machine):
    q, k, v = tensors()
    run(q, k, v)
    machine.since  # noqa: B018
    longer = rand(2, 2, 8, 264)
    right(run(q, longer, longer), q, longer, longer)
    assert machine.since == (1, 1)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    right(run(transposed, k, v), q, k, v)
    assert machine.since == (1, 1)
    right(run(moved(q), moved(k), v), q, k, v)
    assert machine.since == (0, 1)
    right(run(q, k, v), q, k, v)
    assert machine.since == (0, 1)


def test_gradients_are_part_of_the_key(machine):
    q, k, v = tensors()
    run(q, k, v)
    machine.since  # noqa: B018
    q.requires_grad_()
    out, _ = run(q, k, v)
    assert out.requires_grad
    assert machine.since == (1, 1)
    assert run(q, k, v)[0].requires_grad
    assert machine.since == (0, 1)
    with torch.no_grad():
        out, _ = run(q, k, v)
    assert not out.requires_grad
    assert machine.since == (0, 1)


def test_what_changes_the_decision_is_heeded(machine, monkeypatch):
    q, k, v = tensors()
    run(q, k, v)
    run(q, k, v)
    assert machine.since == (1, 2)
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "7")
    run(q, k, v)
    assert machine.since[0] == 1
    registry.invalidate()
    run(q, k, v)
    assert machine.since == (1, 1)
    monkeypatch.setattr(context, "current_device", lambda: 1)  # and the tensors are on another one
    monkeypatch.setattr(cute.torch.cuda, "device", lambda device: pytest.fail("the long way"))
    with pytest.raises(pytest.fail.Exception, match="the long way"):
        run(q, k, v)


class Judge:
    """Refuses everything once `refuses` is set; a thread called "slow" is held before it may keep what was decided."""

    def __init__(self, monkeypatch) -> None:
        self.refuses = False
        self.decided, self.may_go_on = threading.Event(), threading.Event()
        decide = dispatch.decide

        def slow(*arguments):
            decision = decide(*arguments)
            if threading.current_thread().name == "slow":
                self.decided.set()
                assert self.may_go_on.wait(60)
            return decision

        monkeypatch.setattr(dispatch, "decide", slow)
        monkeypatch.setattr(cute.CuTeKernels, "refusals", self.refusals)

    def refusals(self, backend, problem=None, options=None, *, direction="forward"):
        return [Refusal("toolchain", "it is gone")] if self.refuses else []


def test_a_decision_from_before_a_change_is_not_kept_beyond_it(machine, monkeypatch):
    judge, (q, k, v) = Judge(monkeypatch), tensors()
    thread = threading.Thread(target=lambda: run(q, k, v), name="slow")
    thread.start()
    assert judge.decided.wait(60)
    judge.refuses = True
    registry.invalidate()
    judge.may_go_on.set()
    thread.join()
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="it is gone"):
            run(q, k, v)


def test_a_derived_backend_plans_for_itself(machine):
    class Doubled(cute.CuTeKernels):
        def plan_forward(self, params, options, wants_lse):
            forward = super().plan_forward(params, options, wants_lse)
            return lambda *tensors: (forward(*tensors)[0] * 2, forward(*tensors)[1])

    q, k, v = tensors()
    expected = attend(q, k, v, 264**-0.5)[0].to(q.dtype) * 2
    run(q, k, v)
    with registry.replaced("cutedsl", Doubled()):
        for _ in range(3):
            torch.testing.assert_close(run(q, k, v)[0], expected, atol=2e-2, rtol=1e-2)
    right(run(q, k, v), q, k, v)


def test_of_a_decoding_step_the_number_of_keys_is_not_in_the_key(machine):
    q = rand(2, 4, 1, 264)
    for length in (70, 71, 90, 127):
        k = rand(2, 2, length, 264)
        right(run(q, k, k), q, k, k)
    assert machine.since == (1, 4)
    many = rand(2, 4, 65, 264)
    for length in (70, 71):
        k = rand(2, 2, length, 264)
        right(run(many, k, k), many, k, k)
    assert machine.since == (2, 2)
    k = rand(2, 2, 3, 264)
    for length in (4, 2):  # what one length allows, another of the same key must not be let through by
        few = rand(2, 4, length, 264)
        if length > 3:
            with pytest.raises(ValueError, match="at least as many keys"):
                run(few, k, k, is_causal=True)
        else:
            run(few, k, k, is_causal=True)
            with pytest.raises(ValueError, match="value"):
                run(few, k, rand(2, 2, 2, 264))


TOGGLED = """
import os, torch
from ffpa_jit import explain, ffpa_attn_func
from ffpa_jit.triton import plans
q, k, v = (torch.randn(1, 1, 5, 264, dtype=torch.float16) for _ in range(3))
ran, launches = [], []
run = plans.Forward.__call__
plans.Forward.__call__ = lambda self, *tensors: (launches.append(1), run(self, *tensors))[1]
for setting in "10101":
    os.environ["TRITON_INTERPRET"] = setting
    for _ in range(2):
        launches.clear()
        ffpa_attn_func(q, k, v)
    ran.append("triton" if launches else "sdpa")
    assert explain(q, k, v).forward == ran[-1]
print(*ran)
"""


def test_the_interpreter_may_be_turned_on_and_off_between_calls():
    said = run_python(TOGGLED, unset=(), TRITON_INTERPRET="1", PYTHONPATH=str(ROOT))
    assert said.split() == ["triton", "sdpa", "triton", "sdpa", "triton"]


def test_a_first_call_in_inference_mode_spoils_no_later_one():
    """What a plain tensor looks like was learnt from one made there, which lacks the keys for gradients."""
    said = run_python(
        "import torch; from ffpa_jit import ops\n"
        "with torch.inference_mode(): print(ops.unwatched(torch.zeros(2)))\n"
        "print(ops.unwatched(torch.zeros(2)), ops.unwatched(torch.zeros(2, requires_grad=True)))",
        PYTHONPATH=str(ROOT),
    )
    assert said.split() == ["True"] * 3


def test_an_error_is_the_same_every_time(machine):
    q, k, v = tensors()
    for _ in range(3):
        with pytest.raises(ValueError, match="head dim"):
            run(q, rand(2, 2, 7, 272), v)
        with pytest.raises(TypeError, match="scale"):
            run(q, k, v, scale="0.1")
    run(q, k, v)
    with pytest.raises(TypeError, match="scale"):
        run(q, k, v, scale="0.1")
    with pytest.raises(TypeError, match="is_causal"):
        run(q, k, v, is_causal="no")


def test_compilers_and_modes_see_the_operator(machine):
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = tensors()
    run(q, k, v)
    run(q, k, v)
    with Names() as names:
        run(q, k, v)
    assert "ffpa_jit.flash_attn.default" in names.seen


def test_a_mask_that_is_not_what_its_memory_says_is_read_as_what_it_is():
    """A lazily negated view has the shape, the strides and the type of a plain mask."""
    q, k, v = (rand(1, 2, n, 264).to(torch.float16) for n in (66, 70, 70))
    mask = torch.view_as_complex(torch.randn(66, 70, 2)).conj().imag
    assert mask.is_neg()
    backend = FakeTriton()
    with registry.replaced("triton", backend), registry.replaced("cuda", Refusing()):
        plain = mask.resolve_neg().clone(memory_format=torch.preserve_format)
        strided = torch.view_as_real(torch.zeros(66, 70, dtype=torch.complex64))[..., 1].copy_(plain)
        assert strided.stride() == mask.stride()
        for given in (strided, mask, strided):
            out = ffpa_attn_func(q, k, v, given)
            expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), plain)
            torch.testing.assert_close(out.float(), expected, atol=4e-3, rtol=4e-3)
    assert len(backend.calls) == 3
    assert not any(call["attn_mask"].is_neg() for call in backend.calls)  # kernels read memory


def test_no_more_than_so_many_plans_are_kept(machine, monkeypatch):
    monkeypatch.setattr(plan_table, "MOST", 5)
    for length in range(65, 84):
        k = rand(1, 1, length, 264)
        run(rand(1, 1, 65, 264), k, k)
        assert len(plan_table.current()) <= 5
    assert machine.since == (19, 19)
