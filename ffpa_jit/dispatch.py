"""Who runs a call: `plan` chooses a backend for each direction, and `explain_call` tells the choice with its reasons.

Preference: the fastest backend that runs the call on its device (today that is Triton), else PyTorch's SDPA. A backend
that the caller names runs or raises NotImplementedError with every reason. A fallback that nobody asked for is logged
once per reason code on the logger `ffpa_jit`, or raises under `FFPA_JIT_STRICT=1`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ffpa_jit import registry, sdpa, settings
from ffpa_jit.backends import DEFAULTS, NAMES, Backend
from ffpa_jit.problem import MAX_HEAD_DIM, Call, Problem, Refusal, Rejection, describe, dtype_rejection

__all__ = ["Decision", "Explanation", "Plan", "decide", "explain_call", "listed", "plan", "refusals", "report_fallback"]

_logger = logging.getLogger("ffpa_jit")

# The backends that are tried, fastest first, when the caller names none.
PREFERENCE = ("triton",)

_HALF_NAMES = ("torch.float16", "torch.bfloat16")


@dataclass(frozen=True, slots=True)
class Plan:
    """Who runs a problem.

    `forward`: name of the backend that computes the output. `backward`: of the one that computes the gradients, None if
    nothing requires them. "sdpa" as `forward` means the whole call; as `backward` alone, that SDPA is run again.
    `refusals`: what the backends that were tried and passed over had to say, by name. `small`: SDPA was chosen
    although another backend could run the problem, because it is faster; that is no reason to warn.
    """

    forward: str
    backward: str | None
    refusals: dict[str, tuple[Refusal, ...]] = field(default_factory=dict)
    small: bool = False


class Decision(NamedTuple):
    """The outcome for one call: either it breaks the contract (`rejection`), or `problem` runs as `plan` says."""

    rejection: Rejection | None
    problem: Problem | None
    plan: Plan | None


def refusals(problem: Problem, options: Backend, direction: str) -> tuple[Refusal, ...]:
    """Why the backend of `options` does not run `problem` in `direction`; empty: it does. One refusal a code.

    What no backend of this release runs is judged here; the rest is the backend's own word.
    """
    if options.name == "sdpa":
        return ()
    found = _common_refusals(problem)
    absent = registry.missing(options.name)
    if absent is not None:
        return (*found, absent)
    own = registry.get(options.name).refusals(problem, options, direction=direction)
    if not found or (own and own[0].code == "not-built"):
        return tuple(own)  # what no kernel serves is no advice for a backend without kernels
    codes = [refusal.code for refusal in found]
    return (*found, *[refusal for refusal in own if refusal.code not in codes])


def _common_refusals(problem: Problem) -> list[Refusal]:
    found = []
    head_dim = problem.head_dim
    if str(problem.dtype) not in _HALF_NAMES:
        found.append(
            Refusal("dtype", f"the inputs are {problem.dtype}; the kernels take torch.float16 and torch.bfloat16")
        )
    if head_dim <= 256:
        found.append(Refusal("head_dim", f"head dim {head_dim} is at most 256, where SDPA's own kernels are used"))
    elif head_dim > MAX_HEAD_DIM:
        found.append(
            Refusal(
                "head_dim", f"head dim {head_dim} is above {MAX_HEAD_DIM}, the largest that has kernels; SDPA runs it"
            )
        )
    elif head_dim % 8 != 0:
        found.append(
            Refusal(
                "head_dim_multiple",
                f"head dim {head_dim} is not a multiple of 8; pad query, key and value with zeros, pass "
                f"scale={head_dim}**-0.5 and cut the output",
            )
        )
    if problem.head_dim_v != head_dim:
        found.append(
            Refusal(
                "head_dim_v",
                f"value has head dim {problem.head_dim_v} and query {head_dim}; they must be equal: pad value with "
                "zeros and cut the output",
            )
        )
    if problem.has_mask:
        found.append(Refusal("mask", "attn_mask was given; this release has no masks but is_causal=True"))
    if problem.dropout_p > 0:
        found.append(Refusal("dropout", f"dropout_p is {problem.dropout_p}; this release has no dropout: pass 0.0"))
    if problem.device_type != "cuda" and problem.arch != "interpreter":
        found.append(
            Refusal(
                "device",
                f"the tensors are on a {problem.device_type} device; the kernels run on CUDA and ROCm devices (or set "
                "TRITON_INTERPRET=1 before Triton is imported to run them slowly on the CPU, in fp16)",
            )
        )
    return found


def plan(problem: Problem, forward: Backend | None, backward: Backend | None) -> Plan:
    """Choose who runs `problem`; `forward` and `backward` are what the caller named, None where anything will do.

    NotImplementedError, with every reason, if a named backend does not run its direction. `backward` matters only when
    the problem needs gradients.
    """
    needs_grad = problem.needs_grad or problem.mask_needs_grad
    passed_over: dict[str, tuple[Refusal, ...]] = {}
    chosen = "sdpa"
    if forward is not None:
        _require(problem, forward, "forward")
        chosen = forward.name
    else:
        for name in PREFERENCE:
            options = backward if backward is not None and backward.name == name else DEFAULTS[name]
            reasons = refusals(problem, options, "forward")
            if not reasons:
                chosen = name
                break
            passed_over[name] = reasons
        if chosen != "sdpa" and backward is None and not problem.wants_lse:
            slower = _slower_than_sdpa(chosen, problem)
            if slower is not None:
                passed_over[chosen] = (slower,)
                return Plan("sdpa", "sdpa" if needs_grad else None, passed_over, small=True)

    if not needs_grad:
        return Plan(chosen, None, passed_over)
    if backward is not None:
        _require(problem, backward, "backward")
    if chosen == "sdpa":
        if backward is not None and backward.name != "sdpa":
            raise NotImplementedError(
                f"backward_backend={backward.name!r} needs the log-sum-exp of a forward that is not SDPA, and this "
                "forward goes to SDPA" + (" because it was named" if forward is not None else listed(passed_over))
            )
        return Plan("sdpa", "sdpa", passed_over)
    if backward is not None:
        return Plan(chosen, backward.name, passed_over)
    for name in PREFERENCE:
        options = forward if forward is not None and forward.name == name else DEFAULTS[name]
        reasons = refusals(problem, options, "backward")
        if not reasons:
            return Plan(chosen, name, passed_over)
        passed_over[name] = reasons
    return Plan(chosen, "sdpa", passed_over)


def _slower_than_sdpa(name: str, problem: Problem) -> Refusal | None:
    """Why a backend that could run `problem` is not worth it: its launches alone take longer than all of SDPA."""
    if problem.arch == "interpreter":
        return None
    ours, theirs = registry.get(name).estimate(problem), sdpa.estimate(problem)
    if ours <= theirs:
        return None
    return Refusal(
        "small",
        f"the call is so small that SDPA is faster (about {theirs:.0f} us against {ours:.0f} us, launches included); "
        f"name the backend ({name!r}) to run it all the same",
    )


def _require(problem: Problem, named: Backend, direction: str) -> None:
    reasons = refusals(problem, named, direction)
    if reasons:
        raise NotImplementedError(
            f"backend {named.name!r} does not run this {direction}" + listed({named.name: reasons})
        )


def listed(reasons: dict[str, tuple[Refusal, ...]]) -> str:
    """`reasons` as indented lines to append to a message."""
    return "".join(
        [f"\n  - {name}: [{refusal.code}] {refusal.reason}" for name, found in reasons.items() for refusal in found]
    )


def decide(call: Call, forward: Backend | None, backward: Backend | None, installed: bool) -> Decision:
    """Check `call` (head dim above 256) against the contract, and plan it.

    `installed`: the function stands in for SDPA, so a dtype we do not serve is a reason to fall back, not a TypeError.
    Raises what `plan` raises.
    """
    described = describe(call)
    if isinstance(described, Rejection):
        return Decision(described, None, None)
    if not installed:
        rejection = dtype_rejection(described.dtype, described.head_dim)
        if rejection is not None:
            return Decision(rejection, None, None)
    return Decision(None, described, plan(described, forward, backward))


_warned: set[tuple[str, str]] = set()


def report_fallback(direction: str, reasons: dict[str, tuple[Refusal, ...]]) -> None:
    """Say once a code that `direction` ("forward" or "backward") goes to SDPA, and why; raise if strict."""
    _report(direction, tuple([(refusal.code, refusal.reason) for found in reasons.values() for refusal in found]))


def _report(direction: str, reasons: Sequence[tuple[str, str]]) -> None:
    if settings.strict():
        raise NotImplementedError(
            f"the {direction} would fall back to scaled_dot_product_attention, and FFPA_JIT_STRICT=1 forbids that"
            + "".join(f"\n  - [{code}] {reason}" for code, reason in reasons)
        )
    for code, reason in reasons:
        if (direction, code) not in _warned:
            _warned.add((direction, code))
            _logger.warning(
                "the %s falls back to scaled_dot_product_attention (reason=%r): %s. Said once per reason; "
                "FFPA_JIT_STRICT=1 makes it an error",
                direction,
                code,
                reason,
            )


# A constant under torch.compile: what torch.compiler.assume_constant_result sets, without importing the compiler.
_report._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    `forward`, `backward`: names of the backends that would run; None if the call would raise, and for `backward` also
    if no input requires a gradient. `reasons`: for every backend that would not run, why. `error`: what the call would
    raise, or None. `summary`: the call in one line.
    """

    summary: str
    forward: str | None
    backward: str | None
    reasons: dict[str, list[str]]
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain dicts, lists and strings, ready for json."""
        return {
            "summary": self.summary,
            "forward": self.forward,
            "backward": self.backward,
            "reasons": {name: list(found) for name, found in self.reasons.items()},
            "error": self.error,
        }

    def __str__(self) -> str:
        lines = [self.summary]
        if self.error is not None:
            lines.append(f"raises: {self.error}")
        else:
            lines.append(f"forward: {self.forward}")
            lines.append(f"backward: {self.backward or 'not needed (no input requires a gradient)'}")
        for name, found in self.reasons.items():
            lines.extend(f"not {name}: {reason}" for reason in found)
        return "\n".join(lines)


def reasons_against(problem: Problem, decided: Plan | None) -> dict[str, list[str]]:
    """For every backend that `decided` does not use, why not; both directions if the problem needs gradients."""
    directions = ["forward", "backward"] if problem.needs_grad or problem.mask_needs_grad else ["forward"]
    used = () if decided is None else (decided.forward, decided.backward)
    result = {}
    for name in NAMES:
        if name in used:
            continue
        if name == "sdpa":
            result[name] = [f"{decided.forward} runs the call" if decided else "it was not asked for"]
            continue
        found: dict[str, str] = {}
        for direction in directions:
            if name == "cuda" and direction == "backward":
                continue  # it has none, and that is not why it does not run the forward
            for refusal in refusals(problem, DEFAULTS[name], direction):
                found.setdefault(refusal.code, refusal.reason)
        if not found and decided is not None:
            for refusal in decided.refusals.get(name, ()):
                found[refusal.code] = refusal.reason
        if not found and decided is not None:
            found["preference"] = f"it could run this call; {decided.forward} was chosen"
        result[name] = list(found.values())
    return result


def explain_call(
    summary: str,
    call: Call,
    forward: Backend | None,
    backward: Backend | None,
    installed: bool,
    return_lse: bool,
) -> Explanation:
    """`decide`, told instead of done: the same decision, with the reasons of every backend that would not run."""
    decision = Decision(None, None, None)
    error = None
    try:
        decision = decide(call, forward, backward, installed)
    except NotImplementedError as refused:
        error = f"NotImplementedError: {refused}"
    rejection, problem, decided = decision
    if rejection is not None and not installed:
        return Explanation(summary, None, None, {}, f"{rejection.kind.__name__}: {rejection.message}")
    if rejection is not None:
        others = {name: [rejection.message] for name in NAMES if name != "sdpa"}
        return Explanation(summary, "sdpa", "sdpa" if call.needs_grad or call.mask_needs_grad else None, others)
    if decided is None or problem is None:
        described = describe(call)
        assert isinstance(described, Problem)
        return Explanation(summary, None, None, reasons_against(described, None), error)
    reasons = reasons_against(problem, decided)
    if decided.forward == "sdpa" and return_lse:
        error = "NotImplementedError: return_lse=True, but SDPA runs this call and returns no log-sum-exp"
    elif decided.refusals and not decided.small and "sdpa" in (decided.forward, decided.backward) and settings.strict():
        error = "NotImplementedError: the call falls back to SDPA, and FFPA_JIT_STRICT=1 forbids that"
    if error is not None:
        return Explanation(summary, None, None, reasons, error)
    return Explanation(summary, decided.forward, decided.backward, reasons)
