"""Who runs a call: `choose` takes a backend for each direction, and `explain_call` tells the choice with its reasons.

Of the backends that run the call on its device, the one that predicts the least time; PyTorch's SDPA runs what none
does. A backend that the caller names runs or raises NotImplementedError with every reason. A fallback that nobody asked
for is logged once per reason code on the logger `ffpa_jit`, or raises under `FFPA_JIT_STRICT=1`. What SDPA has no words
for (softcap, packed sequences) raises NotImplementedError, with every reason, if no backend runs it.

A backward that no backend runs is SDPA's, run again on the saved inputs. That cannot repeat another forward's dropout,
so a call with dropout and gradients needs a backend for both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ffpa_jit import registry, sdpa, settings
from ffpa_jit.backends import DEFAULTS, NAMES, Backend, encode
from ffpa_jit.problem import (
    MAX_HEAD_DIM,
    Call,
    Problem,
    Refusal,
    Rejection,
    UnavailableError,
    describe,
    dtype_rejection,
    shown,
    with_nominal_sizes,
)

__all__ = [
    "Choice",
    "Decision",
    "Explanation",
    "choose",
    "choose_backward",
    "choose_late_backward",
    "decide",
    "explain_call",
    "fallback_of",
    "listed",
    "refusals",
    "report_fallback",
    "unavailable",
]

_logger = logging.getLogger("ffpa_jit")

# The backends that are tried when the caller names none; of equals, the first runs the call.
PREFERENCE = ("cutedsl", "triton", "cuda")

# What an extra brings. Not to have it is how most machines are, and no reason for a call to fall back.
_EXTRAS = ("cutedsl",)
_ABSENT = ("not-installed", "too-old", "too-new")

_HALF_NAMES = ("torch.float16", "torch.bfloat16")


@dataclass(frozen=True, slots=True)
class Choice:
    """Who runs a problem.

    `forward`: name of the backend that computes the output. `backward`: of the one that computes the gradients, None if
    nothing requires them. "sdpa" as `forward` means the whole call; as `backward` alone, that SDPA is run again.
    `forward_text`, `backward_text`: the same with their options, as the operators carry them; "" for None.
    `rejected`: the refusals of the backends that were tried, by name.
    """

    forward: str
    backward: str | None
    forward_text: str
    backward_text: str
    rejected: dict[str, tuple[Refusal, ...]] = field(default_factory=dict)


class Decision(NamedTuple):
    """The outcome for one call: either it breaks the contract (`rejection`), or `problem` runs as `choice` says."""

    rejection: Rejection | None
    problem: Problem | None
    choice: Choice | None


def refusals(problem: Problem, options: Backend, direction: str) -> tuple[Refusal, ...]:
    """Why the backend of `options` does not run `problem` in `direction`; empty: it does. One refusal a code.

    What no backend of this release runs is judged here; the rest is the backend's own word.
    """
    if options.name == "sdpa":
        return sdpa.refusals(problem)
    found = _common_refusals(problem)
    absent = registry.missing(options.name)
    if absent is not None:
        return (*found, absent)
    own = registry.get(options.name).refusals(problem, options, direction=direction)
    if not found:
        return tuple(own)
    codes = [refusal.code for refusal in own]
    return (*[refusal for refusal in found if refusal.code not in codes], *own)


def _forward_refusals(problem: Problem, options: Backend, backward: Backend | None) -> tuple[Refusal, ...]:
    """`refusals` of a forward whose gradients `backward` is to compute (None: whoever can)."""
    found = refusals(problem, options, "forward")
    if found or options.name == "sdpa" or not (problem.dropout_p > 0 and _needs_grad(problem)):
        return found
    for candidate in _backward_candidates(options) if backward is None else (backward,):
        if candidate.name != "sdpa" and not refusals(problem, candidate, "backward"):
            return ()
    return (
        Refusal(
            "dropout-backward",
            f"dropout_p is {shown(problem.dropout_p)} and gradients are needed, but no backward "
            + ("here" if backward is None else f"of {backward.name!r}")
            + " drops what this forward dropped: leave the call to SDPA, or run it under torch.no_grad()",
        ),
    )


def _needs_grad(problem: Problem) -> bool:
    return problem.needs_grad or problem.mask_needs_grad


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
    if problem.mask_copies:
        found.append(
            Refusal(
                "mask-layout",
                "attn_mask broadcasts over some of several batch dimensions, or its memory does not join them, so that "
                "[batch, heads, queries, keys] would be a copy of it; join the batch dimensions before the call",
            )
        )
    if problem.device_type != "cuda" and problem.arch != "interpreter":
        found.append(Refusal("device", f"the tensors are on a {problem.device_type} device; the kernels run on GPUs"))
    return found


def choose(problem: Problem, forward: Backend | None, backward: Backend | None, capped: bool = True) -> Choice:
    """Choose who runs `problem`; `forward` and `backward` are what the caller named, None where anything will do.

    NotImplementedError, with every reason, if a named backend does not run its direction, or if nobody does.
    `backward` matters only when the problem needs gradients. `capped`: SDPA, too, keeps to the cap on memory.
    """
    problem = with_nominal_sizes(problem)
    rejected: dict[str, tuple[Refusal, ...]] = {}
    if forward is not None:
        _require(forward, "forward", _forward_refusals(problem, forward, backward))
        chosen = forward
    else:
        chosen = _choose_forward(problem, backward, rejected)
        if chosen.name == "sdpa":
            _require_fallback("runs this call", problem, rejected, capped)
    if not _needs_grad(problem):
        return _choice(chosen, None, rejected)
    return _with_backward(problem, chosen, forward, backward, rejected, capped)


def _choose_forward(problem: Problem, backward: Backend | None, rejected: dict[str, tuple[Refusal, ...]]) -> Backend:
    """Who runs the forward that nobody named; what the others had to say goes to `rejected`."""
    candidates: list[Backend] = []
    for name in PREFERENCE:
        options = backward if backward is not None and backward.name == name else DEFAULTS[name]
        reasons = _forward_refusals(problem, options, backward)
        if reasons:
            rejected[name] = reasons
        else:
            candidates.append(options)
    return _fastest(candidates, problem) or DEFAULTS["sdpa"]


def _backward_candidates(forward: Backend | None) -> list[Backend]:
    """Who is asked for a backward that nobody named: with the options of the forward, where it is the same backend."""
    return [forward if forward is not None and forward.name == name else DEFAULTS[name] for name in PREFERENCE]


def _with_backward(
    problem: Problem,
    chosen: Backend,
    forward: Backend | None,
    backward: Backend | None,
    rejected: dict[str, tuple[Refusal, ...]],
    capped: bool,
) -> Choice:
    """The plan of a problem with gradients, whose forward `chosen` runs (`forward` if it was named)."""
    if backward is not None:
        _require(backward, "backward", refusals(problem, backward, "backward"))
    if chosen.name == "sdpa":
        if backward is not None and backward.name != "sdpa":
            raise NotImplementedError(
                f"backward_backend={backward.name!r} needs the log-sum-exp of a forward that is not SDPA, and this "
                "forward goes to SDPA" + (" because it was named" if forward is not None else listed(rejected))
            )
        return _choice(chosen, DEFAULTS["sdpa"], rejected)
    if backward is not None:
        return _choice(chosen, backward, rejected)
    refused: dict[str, tuple[Refusal, ...]] = {}
    for options in _backward_candidates(forward):
        reasons = refusals(problem, options, "backward")
        if not reasons:
            return _choice(chosen, options, rejected)
        refused[options.name] = reasons
        if all(refusal.code != "no-backward" for refusal in reasons):  # to have none says nothing about the call
            rejected[options.name] = reasons
    _require_fallback("computes the gradients of this call", problem, refused, capped)
    if forward is None and not problem.wants_lse and _recompute_is_slower(problem):
        rejected[chosen.name] = (
            *rejected.get(chosen.name, ()),
            Refusal(
                "recompute",
                "no backend computes the gradients of this call, and SDPA's backward needs SDPA's own forward, so that "
                f"running another one before it would be wasted; forward_backend={chosen.name!r} forces it",
            ),
        )
        return _choice(DEFAULTS["sdpa"], DEFAULTS["sdpa"], rejected)
    return _choice(chosen, DEFAULTS["sdpa"], rejected)


def choose_backward(problem: Problem, backward: Backend | None) -> str:
    """The backend, as text, that computes the gradients of `problem` from an output and a log-sum-exp of any origin.

    `backward`: who was named, or None. NotImplementedError, with every reason, if it or everybody refuses.
    """
    problem = with_nominal_sizes(problem)
    if backward is not None:
        if backward.name == "sdpa":
            raise NotImplementedError(
                "backend='sdpa': SDPA's backward needs SDPA's own forward and takes no log-sum-exp; use 'triton'"
            )
        _require(backward, "backward", refusals(problem, backward, "backward"))
        return encode(backward)
    refused = {}
    for options in _backward_candidates(None):
        reasons = refusals(problem, options, "backward")
        if not reasons:
            return encode(options)
        refused[options.name] = reasons
    raise NotImplementedError("no backend computes these gradients" + listed(refused))


def choose_late_backward(problem: Problem) -> str:
    """The backend, as text, of gradients that were not expected when the forward was planned; SDPA, run again, if no
    other computes them. NotImplementedError, with every reason, if it does not either."""
    try:
        return choose_backward(problem, None)
    except NotImplementedError:
        if problem.dropout_p > 0 or sdpa.refusals(with_nominal_sizes(problem)):
            raise
        return encode(DEFAULTS["sdpa"])


def _choice(forward: Backend, backward: Backend | None, rejected: dict[str, tuple[Refusal, ...]]) -> Choice:
    return Choice(
        forward.name,
        None if backward is None else backward.name,
        encode(forward),
        "" if backward is None else encode(backward),
        rejected,
    )


def fallback_of(decided: Choice, forward: Backend | None, backward: Backend | None) -> str | None:
    """The direction, if any, that goes to SDPA although nobody asked for that."""
    if decided.forward == "sdpa":
        return "forward" if forward is None else None
    return "backward" if decided.backward == "sdpa" and backward is None else None


def _recompute_is_slower(problem: Problem) -> bool:
    """Whether a forward on kernels with SDPA's backward is worse than SDPA alone.

    It takes longer, by that forward. But with grouped heads SDPA's math path would keep [Hq, Nq, Nkv] probabilities
    until the backward, and run again it holds them only then.
    """
    return problem.arch != "interpreter" and problem.heads_q == problem.heads_kv


def _fastest(candidates: list[Backend], problem: Problem) -> Backend | None:
    """That with the least predicted time for the forward, the first of equals; None of none."""
    if len(candidates) < 2 or problem.arch == "interpreter":
        return candidates[0] if candidates else None
    alone = replace(problem, needs_grad=False, mask_needs_grad=False)  # whoever runs it, the gradients are the same
    best, least = candidates[0], float("inf")
    for options in candidates:  # plain enough for torch.compile, as all of this
        predicted = registry.get(options.name).predict_us(alone)
        if predicted < least:
            best, least = options, predicted
    return best


def _require_fallback(does: str, problem: Problem, reasons: dict[str, tuple[Refusal, ...]], capped: bool) -> None:
    """NotImplementedError if SDPA, the last resort after those with `reasons`, does not run `problem` either."""
    found = sdpa.refusals(problem)
    if not capped:
        found = tuple([refusal for refusal in found if refusal.code != "combined-mask"])
    if found:
        raise NotImplementedError(f"no backend {does}" + listed({**reasons, "sdpa": found}))


def _require(named: Backend, direction: str, reasons: tuple[Refusal, ...]) -> None:
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
    """Check `call` (head dim above 256) and the options of named backends against the contract, and plan it.

    `installed`: the function stands in for SDPA, so a dtype we do not serve is a reason to fall back, not a TypeError,
    and SDPA may take the memory that it always took. Raises what `plan` raises.
    """
    described = describe(call)
    if isinstance(described, Rejection):
        return Decision(described, None, None)
    if not installed:
        rejection = dtype_rejection(described.dtype, described.head_dim)
        if rejection is not None:
            return Decision(rejection, None, None)
    for named in (forward, backward):
        wrong = None if named is None else named.unfit(described.dtype)
        if wrong is not None:
            return Decision(Rejection(ValueError, wrong), None, None)
    capped = not (installed and forward is None and backward is None)
    return Decision(None, described, choose(described, forward, backward, capped))


_warned: set[tuple[str, str]] = set()


def report_fallback(direction: str, reasons: dict[str, tuple[Refusal, ...]]) -> None:
    """Say once a code that `direction` ("forward" or "backward") goes to SDPA, and why; raise if strict."""
    told = []
    for name, found in reasons.items():
        if name not in _EXTRAS or not [refusal for refusal in found if refusal.code in _ABSENT]:
            told.extend([(name, refusal.code, refusal.reason) for refusal in found])
    _report(direction, tuple(told))


def unavailable(name: str, error: UnavailableError, named: bool) -> None:
    """A backend could not run a call that it had taken. Every plan is forgotten, since the backend now refuses such
    calls; if the call named it, `error` is raised, else the log says that from now on others run them."""
    registry.invalidate()
    if named:
        raise error
    _logger.warning("the %s backend could not run a call that it had taken; others will: %s", name, error)


def _report(direction: str, reasons: Sequence[tuple[str, str, str]]) -> None:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, code, reason in reasons:
        by_reason.setdefault((code, reason), []).append(name)
    lines = [f"{', '.join(names)}: [{code}] {reason}" for (code, reason), names in by_reason.items()]
    if settings.strict():
        raise NotImplementedError(
            f"the {direction} would fall back to scaled_dot_product_attention, and FFPA_JIT_STRICT=1 forbids that"
            + "".join(f"\n  - {line}" for line in lines)
        )
    codes = {(direction, code) for code, _ in by_reason}
    if not codes <= _warned:
        _warned.update(codes)
        _logger.warning(
            "the %s falls back to scaled_dot_product_attention: %s. Said once per reason; FFPA_JIT_STRICT=1 makes it "
            "an error",
            direction,
            "; ".join(lines),
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


def reasons_against(problem: Problem, decided: Choice | None) -> dict[str, list[str]]:
    """For every backend that `decided` does not use, why not; both directions if the problem needs gradients."""
    used = () if decided is None else (decided.forward, decided.backward)
    result = {}
    for name in NAMES:
        if name in used:
            continue
        if name == "sdpa":
            refused = [refusal.reason for refusal in sdpa.refusals(problem)]
            result[name] = refused or [f"{decided.forward} runs the call" if decided else "it was not asked for"]
            continue
        found = {refusal.code: refusal.reason for refusal in _forward_refusals(problem, DEFAULTS[name], None)}
        if _needs_grad(problem):
            for refusal in refusals(problem, DEFAULTS[name], "backward"):
                if refusal.code != "no-backward":  # to have none is not why it does not run the forward
                    found.setdefault(refusal.code, refusal.reason)
        if not found and decided is not None:
            for refusal in decided.rejected.get(name, ()):
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
    if rejection is not None and not (installed and forward is None and backward is None and not return_lse):
        return Explanation(summary, None, None, {}, f"{rejection.kind.__name__}: {rejection.message}")
    if rejection is not None:
        others = {name: [rejection.message] for name in NAMES if name != "sdpa"}
        return Explanation(
            summary,
            "sdpa",
            "sdpa" if call.needs_grad or (call.mask is not None and call.mask.needs_grad) else None,
            others,
        )
    if decided is None or problem is None:
        described = describe(call)
        assert isinstance(described, Problem)
        return Explanation(summary, None, None, reasons_against(described, None), error)
    reasons = reasons_against(problem, decided)
    if decided.forward == "sdpa" and return_lse:
        error = "NotImplementedError: return_lse=True, but SDPA runs this call and returns no log-sum-exp"
    elif fallback_of(decided, forward, backward) is not None and settings.strict():
        error = "NotImplementedError: the call falls back to SDPA, and FFPA_JIT_STRICT=1 forbids that"
    if error is not None:
        return Explanation(summary, None, None, reasons, error)
    return Explanation(summary, decided.forward, decided.backward, reasons)
