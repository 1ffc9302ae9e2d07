"""The error kinds of slime_tandem: every failure a user can cause or meet is one of these.

Each carries its four parts as attributes, `field`, `value`, `expected` and `remedy`, and `str()` makes a sentence of them.
Nobody takes a sentence apart again. Our own invariants are `assert`s instead: a failing assert is our bug.

    TandemError
      ConfigError, DataError, ModelError (TokenizerMismatchError)      what a user gave; also ValueErrors
      EngineError (Rejected, Unavailable, PortInUse, WeightVersion,
                   TeacherScore, EnvironmentTimeout)                    what a server or a teacher did; also RuntimeErrors
      CheckpointError, RunDirError                                      what lies on the disk
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import Self

_LONGEST = 1000
"""Characters of a value that are shown: a user's function may answer megabytes."""


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Text that others wrote (a model, a file, a server) as a terminal may show it: what would move its cursor, colour it or
    turn its reading direction is shown by number; line ends and tabs stay.

    >>> printable("a\x1b[2J\u202eb\r\n")
    'a\\x1b[2J\\u202eb\\r\n'
    """
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def sentence(text: str) -> str:
    """Text with the full stop that ends it, unless it has an end of its own.

    >>> sentence("see its log"), sentence("is the disk full?"), sentence("it is."), sentence("quoted 'so.'")
    ('see its log.', 'is the disk full?', 'it is.', "quoted 'so.'.")
    """
    text = text.rstrip()
    return text if text.endswith((".", "?", "!", "…")) else f"{text}."


def explain(field: str, value: object, expected: str, remedy: str) -> str:
    """One error sentence: `field=value` (cut where it is very long), what was expected, what to do.

    >>> explain("tandem.prob_senior", 1.5, "a number in [0, 1]", "set it to 0.5, the paper's value")
    "tandem.prob_senior=1.5: expected a number in [0, 1]. Remedy: set it to 0.5, the paper's value."
    """
    shown = repr(value).replace("\n", " ")
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}... ({len(shown)} characters)"
    return f"{field}={shown}: expected {sentence(expected)} Remedy: {sentence(remedy)}"


_NO_SUCH = {errno.ENOENT: "a path that is there", errno.EISDIR: "a file, no folder", errno.ENOTDIR: "a folder, no file"}


class TandemError(Exception):
    """Base of all errors that slime_tandem raises on purpose.

    `field`: the setting, file or request part at fault; `value`: what it was; `expected`: what it should have been; `remedy`:
    what to do; `detail`: further lines, such as the end of a log; `problems`: the errors that this one gathers, else itself.

    >>> error = ConfigError("tandem.prob_senior", 1.5, "a number in [0, 1]", "set it to 0.5, the paper's value")
    >>> error.field, error.value, error.remedy
    ('tandem.prob_senior', 1.5, "set it to 0.5, the paper's value")
    >>> print(error.within("suite.yaml"))
    suite.yaml: tandem.prob_senior=1.5: expected a number in [0, 1]. Remedy: set it to 0.5, the paper's value.
    """

    def __init__(self, field: str, value: object, expected: str, remedy: str, detail: str = "") -> None:
        super().__init__()
        self.args = (field, value, expected, remedy, detail)  # what pickle makes it from again
        self.field, self.value, self.expected, self.remedy, self.detail = field, value, expected, remedy, detail
        self.problems: tuple[TandemError, ...] = (self,)

    def __str__(self) -> str:
        if self.problems != (self,):
            return "\n".join(str(problem) for problem in self.problems)
        return self.what + f" Remedy: {sentence(self.remedy)}" + (f"\n{self.detail}" if self.detail else "")

    @property
    def what(self) -> str:
        """The sentence without its remedy.

        >>> ConfigError("seed", -1, "at least 0", "leave it out").what
        'seed=-1: expected at least 0.'
        """
        return explain(self.field, self.value, self.expected, "").removesuffix(" Remedy: .")

    def within(self, where: str) -> Self:
        """The same error, with `where` (a file, a role) said first."""
        made = type(self)(f"{where}: {self.field}", self.value, self.expected, self.remedy, self.detail)
        if self.problems != (self,):
            made.problems = tuple(problem.within(where) for problem in self.problems)
        return made

    @classmethod
    def gather(cls, problems: Sequence[TandemError]) -> Self:
        """One error of all `problems` (at least one), a line each; its own parts are the first one's.

        >>> print(ConfigError.gather([ConfigError("a", 1, "2", "set it"), ConfigError("b", 3, "4", "set it")]))
        a=1: expected 2. Remedy: set it.
        b=3: expected 4. Remedy: set it.
        """
        first = problems[0]
        made = cls(first.field, first.value, first.expected, first.remedy, first.detail)
        if len(problems) > 1:
            made.problems = tuple(problems)
        return made

    @classmethod
    def of_os_error(cls, path: object, error: OSError) -> Self:
        """For a file or folder that the system refuses; a full disk gets a remedy of its own.

        >>> str(RunDirError.of_os_error("runs/a", OSError(errno.EACCES, "Permission denied")))
        "runs/a='Permission denied': expected a usable path on a disk with free space. Remedy: check the path and its \
permissions, or choose another one."
        """
        if error.errno in _NO_SUCH:
            return cls(str(path), error.strerror, _NO_SUCH[error.errno], "check the path")
        remedy = "check the path and its permissions, or choose another one"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space on that disk, then run again, or resume the run from its last checkpoint"
        return cls(str(path), error.strerror or str(error), "a usable path on a disk with free space", remedy)

    def __reduce__(self) -> tuple[object, ...]:
        # OSError's own way leaves out all but two arguments; `problems` is state.
        return type(self), self.args, {"problems": self.problems} if self.problems != (self,) else None


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


class UnreadRolesError(TeacherScoreError):
    """A sample holds messages of a role that the teacher's template does not show."""


class UnreadToolsError(TeacherScoreError):
    """A sample offers or calls tools, and the teacher's template shows none."""


class UnreadTemplateError(TeacherScoreError):
    """The teacher's template refuses a sample, or does not write its turns out."""


class EnvironmentTimeoutError(EngineError):
    """What answers between the models' turns has not answered in time."""


class CheckpointError(TandemError, RuntimeError):
    """A checkpoint cannot be written, read, or does not belong to this run."""


class RunDirError(TandemError, OSError):
    """The run folder cannot be used: it exists with other settings, or the disk is full."""
