"""Calls like one before: they skip what was decided, and only that. The kernel is a stand-in that computes, on the CPU,
what it is told to."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ffpa_jit import attention, context, dispatch, ffpa_attn_func, registry, repeats
from ffpa_jit.cute import backend as cute
from ffpa_jit.cute import dense
from ffpa_jit.problem import Refusal, UnavailableError
from tests.cpu.conftest import ROOT, run_python
from tests.cpu.test_cute_dense import attend, launch, rand


class Machine:
    """Counts what a call passes through."""

    def __init__(self) -> None:
        self.decided = self.forwards = self.launches = 0
        self.places: list[int] = []

    def launch(self, *arguments):
        self.launches += 1
        self.places.append(arguments[4])
        launch(*arguments)

    @property
    def since(self) -> tuple[int, int, int]:
        """(decisions, forwards, launches) since the last time it was asked."""
        found = self.decided, self.forwards, self.launches
        self.decided = self.forwards = self.launches = 0
        return found


@pytest.fixture
def machine(monkeypatch):
    """CPU tensors that the CuTe-DSL backend takes for those of a Hopper GPU."""
    seen = Machine()
    for module in (attention, repeats, cute):
        monkeypatch.setattr(module, "device_arch", lambda *device: "sm_90")
    monkeypatch.setattr(registry, "_loaded", {**registry._loaded, "cutedsl": cute.BACKEND})
    monkeypatch.setattr(dispatch, "_common_refusals", lambda call: ())
    monkeypatch.setattr(cute.CuTeKernels, "refusals", lambda self, call, options, *, direction: [])
    monkeypatch.setattr(cute, "_loaded", lambda spec: seen.launch)
    monkeypatch.setattr(context, "current_device", lambda: None)
    monkeypatch.setattr(dense, "_clusters", lambda device: 66)
    monkeypatch.setattr(dense, "_stream", lambda device: 0)
    forward, decide = cute.CuTeKernels.forward, dispatch.decide

    def counted_forward(self, *tensors, **options):
        seen.forwards += 1
        return forward(self, *tensors, **options)

    def counted_decide(*arguments):
        seen.decided += 1
        return decide(*arguments)

    monkeypatch.setattr(cute.CuTeKernels, "forward", counted_forward)
    monkeypatch.setattr(dispatch, "decide", counted_decide)
    registry.changed()
    dense._form.cache_clear()
    yield seen
    registry.changed()
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


def test_a_call_like_one_before_goes_straight_to_the_kernel_with_its_own_numbers(machine):
    first = tensors()
    right(run(*first), *first)
    assert machine.since == (1, 1, 1)
    for scale in (None, 0.3, 2):
        again = tensors()
        found = run(*again, scale=scale)
        right(found, *again, 264**-0.5 if scale is None else scale)
        assert found[0].stride() == again[0].stride()
        assert machine.since == (0, 0, 1)


def test_only_the_output_is_returned_where_only_that_is_asked_for(machine):
    for _ in range(3):
        q, k, v = tensors()
        out = ffpa_attn_func(q, k, v, enable_gqa=True, backend="cutedsl")
        torch.testing.assert_close(out, attend(q, k, v, 264**-0.5)[0].to(q.dtype), atol=1e-2, rtol=1e-2)
    assert machine.since == (1, 1, 3)
    assert [bool(lse) for lse in machine.places] == [True, False, False]  # where the kernel is to write it


def moved(x):
    """`x` at an address that is no multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def test_what_differs_in_more_than_numbers_goes_the_long_way(machine):
    q, k, v = tensors()
    run(q, k, v)
    machine.since  # noqa: B018
    longer = rand(2, 2, 8, 264)
    right(run(q, longer, longer), q, longer, longer)
    assert machine.since == (1, 1, 1)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    right(run(transposed, k, v), q, k, v)
    assert machine.since == (0, 1, 1)  # the same decision, another launch
    right(run(moved(q), moved(k), v), q, k, v)
    assert machine.since == (0, 1, 1)
    right(run(q, k, v), q, k, v)
    assert machine.since == (0, 0, 1)


def test_gradients_go_the_long_way_and_a_call_without_them_does_not(machine):
    q, k, v = tensors()
    run(q, k, v)
    machine.since  # noqa: B018
    q.requires_grad_()
    out, _ = run(q, k, v)
    assert out.requires_grad
    assert machine.since == (1, 1, 1)
    with torch.no_grad():
        out, _ = run(q, k, v)
    assert not out.requires_grad
    assert machine.since == (0, 0, 1)


def test_what_changes_the_decision_is_heeded(machine, monkeypatch):
    q, k, v = tensors()
    run(q, k, v)
    run(q, k, v)
    assert machine.since == (1, 1, 2)
    monkeypatch.setenv("FFPA_JIT_WORKSPACE_MB", "7")
    run(q, k, v)
    assert machine.since[0] == 1
    registry.changed()
    run(q, k, v)
    assert machine.since == (1, 1, 1)
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
    registry.changed()
    judge.may_go_on.set()
    thread.join()
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="it is gone"):
            run(q, k, v)


def test_a_call_in_the_midst_of_a_change_keeps_nothing_from_before(machine, monkeypatch):
    judge, (q, k, v) = Judge(monkeypatch), tensors()
    run(q, k, v)
    seen = []

    def call():
        with pytest.raises(NotImplementedError, match="it is gone"):
            run(q, k, v)
        seen.append(True)

    listeners = list(registry._listeners)
    monkeypatch.setattr(registry, "_listeners", [call, *(each for old in listeners for each in (old, call))])
    judge.refuses = True
    registry.changed()
    assert len(seen) == len(listeners) + 1
    call()


def test_a_call_that_has_run_does_not_fail_for_its_short_way(machine, monkeypatch):
    def gone(*tensors, **options):
        raise UnavailableError("the cache was emptied meanwhile")

    monkeypatch.setattr(dense, "repeat", gone)
    for _ in range(2):
        q, k, v = tensors()
        right(run(q, k, v), q, k, v)


def test_a_derived_backend_with_a_forward_of_its_own_has_no_short_way_but_its_own(machine):
    class Doubled(cute.CuTeKernels):
        def forward(self, *tensors, **options):
            out, lse = super().forward(*tensors, **options)
            return out * 2, lse

    class Both(Doubled):
        def shortcut(self, query, key, value, out, **options):
            short = super().shortcut(query, key, value, out, **options)
            return lambda *arguments: (short(*arguments)[0] * 2, short(*arguments)[1])

    q, k, v = tensors()
    expected = attend(q, k, v, 264**-0.5)[0].to(q.dtype) * 2
    for kind, launches in ((Doubled, 3), (Both, 5)):
        machine.since  # noqa: B018
        with registry.replaced("cutedsl", kind()):
            for _ in range(3):
                torch.testing.assert_close(run(q, k, v)[0], expected, atol=2e-2, rtol=1e-2)
        assert machine.since[2] == launches


TOGGLED = """
import os, torch
from ffpa_jit import explain, ffpa_attn_func, registry, repeats
q, k, v = (torch.randn(1, 1, 5, 264, dtype=torch.float16) for _ in range(3))
ran = []
for setting in "10101":
    os.environ["TRITON_INTERPRET"] = setting
    for _ in range(2):
        ffpa_attn_func(q, k, v)
    form = repeats.form_of(
        q, k, v, False, False, False, False, (-1, -1), 0.0, None, None, False, registry.epoch()
    )
    ran.append(repeats.find(form).plan.forward)
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


class Nothing(TorchDispatchMode):
    """No operation on tensors is allowed."""

    def __torch_dispatch__(self, operation, *rest):
        raise AssertionError(f"{operation} is run")


def test_to_ask_for_a_short_way_takes_no_memory(machine):
    for q in (rand(2, 4, 9, 264), rand(2, 9, 4, 264).transpose(1, 2), rand(2, 8, 9, 264)[:, ::2]):
        _, k, v = tensors()
        out = torch.empty_like(q)
        with Nothing():  # an output to look at, of a call that fills the memory, was one too many
            short = cute.BACKEND.shortcut(q, k, v, out, is_causal=False, wants_lse=True)
        found = short(q, k, v, 0.1)
        right(found, q, k, v, 0.1)
        assert found[0].stride() == out.stride()


def test_no_more_than_so_many_forms_are_kept(machine, monkeypatch):
    monkeypatch.setattr(repeats, "_MOST", 5)
    for length in range(1, 20):
        k = rand(1, 1, length, 264)
        run(rand(1, 1, 1, 264), k, k)
        assert len(repeats._known) <= 5
    assert machine.since == (19, 19, 19)
