"""The error kinds of slime_tandem: every failure a user can cause or meet is one of these.

Each message names the field, the value it had, what was expected and the remedy, in that order; build it with
:func:`explain` so that no part is forgotten. Our own invariants are `assert`s instead: a failing assert is our bug.
"""

from __future__ import annotations

import errno
import os

_LONGEST = 1000
"""Characters of a value that are shown: a user's function may answer megabytes."""


def explain(field: str, value: object, expected: str, remedy: str) -> str:
    """One error sentence: `field=value` (cut where it is very long), what was expected, what to do.

    >>> explain("tandem.prob_senior", 1.5, "a number in [0, 1]", "set it to 0.5, the paper's value")
    "tandem.prob_senior=1.5: expected a number in [0, 1]. Remedy: set it to 0.5, the paper's value."
    """
    shown = repr(value).replace("\n", " ")
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}... ({len(shown)} characters)"
    return f"{field}={shown}: expected {expected}. Remedy: {remedy}."


def explain_os_error(path: str | os.PathLike[str], error: OSError) -> str:
    """`explain` for a file or folder that the system refuses; a full disk gets a remedy of its own.

    >>> explain_os_error("runs/a", OSError(errno.EACCES, "Permission denied"))
    "runs/a='Permission denied': expected a usable path on a disk with free space. Remedy: check the path and its \
permissions, or choose another one."
    """
    remedy = "check the path and its permissions, or choose another one"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space on that disk, then run again, or resume the run from its last checkpoint"
    return explain(os.fspath(path), error.strerror or str(error), "a usable path on a disk with free space", remedy)


class TandemError(Exception):
    """Base of all errors that slime_tandem raises on purpose."""


class ConfigError(TandemError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class DataError(TandemError, ValueError):
    """Input data (a prompt file, a sample, a channel) has the wrong form or length."""


class ModelError(TandemError, ValueError):
    """A model folder is missing, incomplete or of an unsupported architecture."""


class TokenizerMismatchError(ModelError):
    """Two models that must share one tokenizer do not."""


class EngineError(TandemError, RuntimeError):
    """An engine could not do what was asked."""


class EngineRejectedError(EngineError):
    """The engine answered 4xx: the request is wrong and is not retried."""


class EngineUnavailableError(EngineError):
    """Time-outs, disconnects or 5xx answers went on past the last retry."""


class PortInUseError(EngineError):
    """The port asked for is taken by another process."""


class WeightVersionError(EngineError):
    """An engine serves other weights than the trainer sent it."""


class TeacherScoreError(EngineError):
    """A teacher's answer is missing, short, or holds a value that is no log-probability."""


class EnvironmentTimeoutError(EngineError):
    """What answers between the models' turns has not answered in time."""


class CheckpointError(TandemError, RuntimeError):
    """A checkpoint cannot be written, read, or does not belong to this run."""


class RunDirError(TandemError, OSError):
    """The run folder cannot be used: it exists with other settings, or the disk is full."""
