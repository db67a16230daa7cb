"""Triton's interpreter, without the work that it does over and over: the same values, in half the time.

Most of an interpreted launch is Triton's own Python, and most of that has no effect:

- each call of a device function replaces all of `triton.language` by what interprets it, as the launch has done before;
- each integer operation is computed a second time in 64 bits for an overflow check whose outcome is looked at only in
  debug mode, which the interpreter never is in;
- the NumPy type of a Triton type is looked up in a table that is built for each look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

VERSIONS = ("3.5.", "3.6.")
"""Releases of Triton whose interpreter works as described; others run as they are."""


class _Languages:
    """Replaces `_patch_lang`: in a launch, a module of the language is patched by whoever needs it first."""

    def __init__(self, interpreter: Any) -> None:
        self._patch: Callable[[Any], Any] = interpreter._patch_lang
        self._nothing: type = interpreter._LangPatchScope
        self._languages = (interpreter.tl, interpreter.tl.core)
        self._seen: dict[int, tuple[Any, ...]] = {}  # by the identity of a module's globals
        self._patched: list[Any] = []

    def __call__(self, function: Any) -> Any:
        names = function.__globals__
        used = self._seen.get(id(names))
        if used is None:
            used = tuple(x for x in self._languages if any(value is x for value in names.values()))
            self._seen[id(names)] = used
        if used and all(x in self._patched for x in used):
            return self._nothing()
        outermost = not self._patched
        scope = self._patch(function)
        self._patched += used
        if outermost:
            restore = scope.restore

            def restored() -> None:
                self._patched.clear()
                restore()

            scope.restore = restored
        return scope


def speed_up() -> None:
    """For this process; once."""
    try:
        import triton
    except ImportError:
        return
    if not triton.__version__.startswith(VERSIONS):
        return
    from triton.runtime import interpreter

    if isinstance(interpreter._patch_lang, _Languages):
        return
    interpreter._patch_lang = _Languages(interpreter)
    looked_up = interpreter._get_np_dtype
    of_number = functools.cache(looked_up)
    interpreter._get_np_dtype = lambda kind: (looked_up if kind.scalar.is_ptr() else of_number)(kind.scalar)
    builder = interpreter.InterpreterBuilder
    original_init = builder.__init__

    def init(self: Any) -> None:
        original_init(self)
        self.options = replace(self.options, sanitize_overflow=False)

    builder.__init__ = init
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
