"""What a failed build says: an error of one line, found in a compiler's log, and where the whole log is."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["BuildError", "first_error"]


class BuildError(RuntimeError):
    """A compiler failed on `what`: its first error, and `log`, the file with all of it. The cache keeps that file when
    it removes the directory of the build, and sets the attribute to where."""

    def __init__(self, what: str, log_text: str, log: Path | None = None) -> None:
        super().__init__(what, log_text, log)
        self.what, self.log_text, self.log = what, log_text, log

    def again(self) -> BuildError:
        """The same error, not raised yet: one that was raised and is kept keeps its traceback, and with it the tensors
        of all callers."""
        return type(self)(self.what, self.log_text, self.log)

    @property
    def reason(self) -> str:
        """What of the log says why."""
        return first_error(self.log_text) or "there is no output"

    def __str__(self) -> str:
        where = f"\nThe whole log: {self.log}" if self.log is not None else ""
        return f"compiling {self.what} failed: {self.reason}{where}"


_ERROR = re.compile(
    r"\b(fatal )?error\s*(#\S+|[A-Z]+\d+)?\s*:"  # gcc, clang, cudafe++, cicc, ptxas, NVRTC, ninja
    r"|^\s*#\s*error\b|\b(nvcc|ptxas|nvlink|cicc|fatbinary) fatal\b"
    r"|undefined reference to|cannot find -l|No space left on device|Cannot allocate memory"
    r"|[Cc]ommand not found|: not found$|No such file or directory|^Killed\b|died due to signal|Killed signal"
)
_FOLLOWS = re.compile(
    r"collect2: |ld returned|error: command .* failed|ninja: build stopped|^FAILED: |Error building ext"
)


def first_error(log_text: str) -> str:
    """The first line of a log that a compiler, linker or ninja means as an error, or that says what a failure follows
    from; the last line where there is none, "" for an empty log."""
    lines = [line.strip() for line in log_text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    causes = [line for line in errors if not _FOLLOWS.search(line)]
    return (causes or errors or lines[-1:] or [""])[0]
