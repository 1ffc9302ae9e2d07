"""What the exit codes of `slime-tandem` mean: docs/commands.md and `--help` say the same. Nothing else ends it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DONE, INTERNAL, REFUSED, FAULT, STOPPED = 0, 1, 2, 3, 130
EXIT_CODES: Mapping[int, str] = MappingProxyType(
    {
        DONE: "done",
        INTERNAL: "a fault of this package, with its traceback; or nobody reads the output any more",
        REFUSED: "an error that says what to do; an unknown flag",
        FAULT: "`doctor`: a probe failed, all rewards equal among them",
        STOPPED: "Ctrl-C or SIGTERM",
    }
)


def in_words() -> str:
    """All of them in a line."""
    return "; ".join(f"{code} {what.replace('`', '')}" for code, what in EXIT_CODES.items())
