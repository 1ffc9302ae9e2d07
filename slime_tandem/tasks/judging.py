"""What responses are worth: scored where that is safe, and in processes that can be killed everywhere else (`pool`).

Here, in the caller's own process: comparing texts and numbers, whose cost is linear in the response. In a guarded worker: the
scorers of reasoning-gym and math-verify, which know no bound. In a worker of its own, without the guard: a reward or a family
of the user's, one call after the other, so that it may keep what it has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from slime_tandem.config import RewardConfig, TaskSpec
from slime_tandem.errors import ConfigError, DataError, TandemError
from slime_tandem.extensions import is_own
from slime_tandem.tasks.pool import Call, Limits, Reply, recipe, shared
from slime_tandem.types import Prompt

LONGEST_RESPONSE = 1_000_000
"""Characters of a response that are read; a longer one is past a limit."""

Quick = Callable[[Prompt, str], float | None]
"""A score that needs no process; None where one is needed."""


class Verdict(NamedTuple):
    """The `reward` of a response, and the `problem` if it was not read to the end: `timeout` or `error`, with reward 0."""

    reward: float
    problem: str | None = None


class Judge:
    """Scores the responses to the prompts of one task. `where` is its dotted name; nothing starts before it is needed.

    Raises ConfigError for code of the user's that no other process can import.
    """

    def __init__(self, spec: TaskSpec, where: str, limits: RewardConfig, quick: Quick | None = None) -> None:
        name = spec.reward if spec.reward is not None else spec.family
        own = is_own(name)
        if own and name.startswith("__main__:"):
            expected = "a module that another process can import; rewards run in one of their own"
            raise ConfigError(where, name, expected, "put the code into a file on PYTHONPATH")
        self._where, self._quick = where, quick
        self._limits = Limits(
            limits.timeout_s,
            memory_mib=None if own else limits.memory_mib,
            processes=1 if own else limits.processes,
            guarded=not own,
        )
        self._recipe = recipe("slime_tandem.tasks.families", "scorer_of", spec, where)

    def verdicts(self, responses: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """The verdict on each (prompt, response text), in order.

        Raises DataError for code of the user's that raises or answers no number, and for a scorer that cannot even read the
        label.
        """
        found: list[Verdict | None] = [self._at_once(*response) for response in responses]
        left = [i for i, verdict in enumerate(found) if verdict is None]
        if left:
            replies = shared(self._limits).ask([Call(self._recipe, responses[i]) for i in left])
            for i, reply in zip(left, replies, strict=True):
                found[i] = self._read(reply, responses[i][0])
        return [verdict for verdict in found if verdict is not None]

    def _at_once(self, prompt: Prompt, text: str) -> Verdict | None:
        if len(text) > LONGEST_RESPONSE:
            return Verdict(0.0, "error")
        score = None if self._quick is None else self._quick(prompt, text)
        return None if score is None else Verdict(score)

    def _read(self, reply: Reply, prompt: Prompt) -> Verdict:
        if isinstance(reply.error, TandemError):
            raise reply.error
        if reply.error is not None:
            field = f"scorer of {self._where} at prompt {prompt.prompt_id}"
            raise DataError(field, str(reply.error), "a score for the prompt's own label", "choose another family")
        return Verdict(0.0, reply.problem) if reply.problem is not None else Verdict(float(reply.value))


def counted(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """`reward/timeouts` and `reward/errors`: responses that went past a limit, and scored 0."""
    problems = [verdict.problem for verdict in verdicts]
    return {f"reward/{name}s": float(problems.count(name)) for name in ("timeout", "error")}
