"""Calls a reward of the user's own, and reads what it answers: in a scoring process (`pool_worker`), which can be killed.

Whatever the function does becomes an outcome of each response, a plain record: a value with its parts, or why there is none. It
raises nothing of the user's. What an outcome means for a run is not known here, nor how arguments come about (`arguments`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypedDict

from slime_tandem.errors import printable
from slime_tandem.extensions import said

PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""The name of a part; it stands in names of metrics."""
MOST_PARTS = 64
_LONGEST = 300
"""Characters of what went wrong that are kept."""


class UnreachableError(Exception):
    """A server of the user's gave no usable answer, or refused the request."""


class Outcome(TypedDict, total=False):
    """Of one response: `value` (None: `parts` alone say it), or the `problem` (`raised`, `timeout`, `invalid`, `unreachable`)
    and `why`."""

    value: float | None
    parts: dict[str, float]
    problem: str
    why: str


def failed(problem: str, why: str) -> Outcome:
    """The outcome of a response that got no reward."""
    return {"problem": problem, "why": printable(why)[:_LONGEST]}


def _of_error(error: BaseException) -> Outcome:
    if isinstance(error, UnreachableError):
        return failed("unreachable", str(error))
    return failed("raised", said(error))


def outcome_of(answer: object) -> Outcome:
    """What an answer for one response means: a finite number, or a mapping of names to such.

    >>> outcome_of(True), outcome_of({"correct": 1, "brief": 0.5})
    ({'value': 1.0, 'parts': {}}, {'value': None, 'parts': {'correct': 1.0, 'brief': 0.5}})
    >>> outcome_of("0.5")["problem"], outcome_of({"a": float("nan")})["why"]
    ('invalid', "part 'a' is nan, not a finite number")
    """
    if isinstance(answer, Mapping):
        if not 1 <= len(answer) <= MOST_PARTS:
            return failed("invalid", f"{len(answer)} parts, not 1 to {MOST_PARTS}")
        for name, part in answer.items():
            if not (isinstance(name, str) and PART.fullmatch(name)):
                return failed("invalid", f"{name!r:.80} is no name of a part (letters, digits, . _ -, at most 64)")
            if _number(part) is None:
                return failed("invalid", f"part {name!r} is {part!r:.80}, not a finite number")
        return {"value": None, "parts": {str(name): float(part) for name, part in answer.items()}}
    if (value := _number(answer)) is None:
        return failed("invalid", f"{answer!r:.80} ({type(answer).__name__}) is no finite number")
    return {"value": value, "parts": {}}


def outcomes_of(answer: object, n: int) -> list[Outcome]:
    """What an answer for a batch of `n` means: a list with one answer each, or a mapping of parts to such lists.

    >>> outcomes_of([1.0, "x"], 2)[1]["problem"], outcomes_of({"a": [1, 2]}, 2)[1]["parts"]
    ('invalid', {'a': 2.0})
    >>> outcomes_of([1.0], 2)[0]["why"]
    '1 answers for 2 responses'
    """
    if isinstance(answer, Mapping):
        columns = {name: _listed(values) for name, values in answer.items()}
        for name, values in columns.items():
            if values is None or len(values) != n:
                why = f"part {name!r:.80} has {'no list' if values is None else len(values)} for {n} responses"
                return [failed("invalid", why)] * n
        return [outcome_of({name: values[i] for name, values in columns.items() if values}) for i in range(n)]
    answers = _listed(answer)
    if answers is None or len(answers) != n:
        found = f"a {type(answer).__name__}" if answers is None else f"{len(answers)} answers"
        return [failed("invalid", f"{found} for {n} responses")] * n
    return [outcome_of(one) for one in answers]


def _listed(answer: object) -> Sequence[Any] | None:
    if isinstance(answer, str | bytes | Mapping):
        return None
    if hasattr(answer, "tolist"):  # of numpy and torch
        answer = answer.tolist()
    return list(answer) if isinstance(answer, Sequence) else None


def _number(value: object) -> float | None:
    """A finite number; text that looks like one is none."""
    if isinstance(value, str | bytes | bytearray | complex) or value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - somebody's own class
        return None
    return number if math.isfinite(number) else None


class Caller:
    """Calls `function` with what `arguments` found. `batch`: all responses of a call at once; else one after the other, a
    coroutine function's all at once, each within `timeout_s` on the wall. It is kept between calls, as is its event loop, until
    `close`: a worker's ends with its process."""

    def __init__(self, function: Callable[..., Any], *, batch: bool, waits: bool, timeout_s: float) -> None:
        self._function = function
        self._batch, self._waits, self._timeout_s = batch, waits, timeout_s
        self._loop = asyncio.Runner()

    def __call__(self, given: Any) -> list[Outcome]:
        """The outcome of each response. `given`: the keyword arguments of the batch with its length, else those of each."""
        if self._batch:
            return self._of_batch(*given)
        if self._waits:
            return self._loop.run(self._all(given))
        return [self._one(arguments) for arguments in given]

    def close(self) -> None:
        """Close the event loop; nothing is called afterwards."""
        self._loop.close()

    def _one(self, arguments: dict[str, Any]) -> Outcome:
        try:
            answer = self._function(**arguments)
            return self._loop.run(self._awaited(answer)) if inspect.isawaitable(answer) else outcome_of(answer)
        except BaseException as error:  # noqa: BLE001 - the user's code, whatever it raises
            return _of_error(error)

    def _of_batch(self, arguments: dict[str, Any], n: int) -> list[Outcome]:
        try:
            answer = self._function(**arguments)
            if inspect.isawaitable(answer):
                return self._loop.run(self._awaited_batch(answer, n))
            return outcomes_of(answer, n)
        except BaseException as error:  # noqa: BLE001 - the user's code, whatever it raises
            return [_of_error(error)] * n

    async def _all(self, given: Sequence[dict[str, Any]]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._later(arguments) for arguments in given)))

    async def _later(self, arguments: dict[str, Any]) -> Outcome:
        try:
            return await self._awaited(self._function(**arguments))
        except BaseException as error:  # noqa: BLE001 - the user's code, whatever it raises
            return _of_error(error)

    async def _awaited(self, answer: Awaitable[Any]) -> Outcome:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return outcome_of(await answer)
        except TimeoutError as error:
            return self._late() if limit.expired() else _of_error(error)

    async def _awaited_batch(self, answer: Awaitable[Any], n: int) -> list[Outcome]:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return outcomes_of(await answer, n)
        except TimeoutError as error:
            return [self._late() if limit.expired() else _of_error(error)] * n

    def _late(self) -> Outcome:
        return failed("timeout", f"no answer within {self._timeout_s:g} s (reward.own_timeout_s)")
