"""What responses are worth: scored where that is safe, and in processes that can be killed everywhere else (`pool`).

Here, in the caller's own process: comparing texts and numbers, whose cost is linear in the response. In a guarded worker: the
scorers of reasoning-gym and math-verify, which know no bound. In a worker of its own, without the guard: a reward or a family
of the user's, so that it may keep what it has loaded (`own_reward`), and the requests to a server of the user's (`remote`).

A limit that a built-in scorer went past is the response's own doing: 0. What goes wrong in the user's code says nothing of the
response: no reward.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from slime_tandem.config import AnswerKind, RewardConfig, TaskSpec
from slime_tandem.errors import ConfigError, DataError, TandemError
from slime_tandem.tasks.answers import quick_label_reward
from slime_tandem.tasks.arguments import Parameters, Response
from slime_tandem.tasks.own_reward import Outcome, failed
from slime_tandem.tasks.pool import Call, Limits, Reply, recipe, shared
from slime_tandem.types import Prompt, is_right

LONGEST_RESPONSE = 1_000_000
"""Characters of a response that are read; a longer one is past a limit."""

Quick = Callable[[Prompt, str], float | None]
"""A score that needs no process; None where one is needed."""

Problem = Literal["timeout", "error", "raised", "invalid", "unreachable"]
PROBLEMS: Mapping[Problem, str] = MappingProxyType(
    {
        "timeout": "timeouts",
        "error": "errors",
        "raised": "raised",
        "invalid": "invalid",
        "unreachable": "unreachable",
    }
)
"""What can go wrong with a reward, and what it is counted under (`reward/...`)."""
_FIRST, _SLICE, _GRACE_S = 4, 16, 5.0
"""Responses of a rollout that are tried first, and then at a time: if none of so many is answered in time, the rest is not
asked. Seconds for a process to tell of time-outs of its own before it is killed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The `reward` of a response with its named `parts`; and the `problem` if it was not found: a limit of a built-in scorer
    gives reward 0, anything wrong with a reward of the user's gives None, and `why` says what. Neither reward nor problem:
    there was none to be found (`unasked`). `by`: whose function it was that gave none.
    """

    reward: float | None
    problem: Problem | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    why: str = field(default="", compare=False)
    by: str = field(default="", compare=False)

    @property
    def said(self) -> str:
        """Of a problem: whose function it was, what it did, and why."""
        return f"{self.by} {self.problem}: {self.why}".lstrip()

    @property
    def right(self) -> bool:
        """What accuracies count (`types.is_right`)."""
        return is_right(self.reward, self.parts)

    @property
    def failed(self) -> bool:
        """Whether a reward was to be found, and was not."""
        return self.reward is None and self.problem is not None

    @property
    def unasked(self) -> bool:
        """Whether there was none to be found: a prompt without a label, where nothing is learnt from rewards."""
        return self.reward is None and self.problem is None


class Judge:
    """Scores the responses to the prompts of one task. `where` is its dotted name; nothing starts before it is needed.

    `own`: what the user's function or server is given; None: the reward is built in. Raises ConfigError for code of the user's
    that no other process can import.
    """

    def __init__(
        self,
        spec: TaskSpec,
        where: str,
        limits: RewardConfig,
        quick: Quick | None = None,
        own: Parameters | None = None,
    ) -> None:
        name = spec.reward if spec.reward is not None else spec.family
        if own is not None and name.startswith("__main__:"):
            expected = "a module that another process can import; rewards run in one of their own"
            raise ConfigError(where, name, expected, "put the code into a file on PYTHONPATH")
        self._where, self._quick, self._own = where, quick, own
        self._by = f"{name} ({where}.{'family' if spec.reward is None else 'reward'})"
        self._at_once = 1
        if own is None:
            self._limits = Limits(limits.timeout_s, memory_mib=limits.memory_mib, processes=limits.processes)
        else:
            self._at_once = limits.own_concurrency if own.waits and not own.batch else 1
            tells = own.waits  # of its time-outs, while it lives
            self._limits = Limits(
                limits.own_timeout_s + (_GRACE_S if tells else 0.0),
                memory_mib=None,
                processes=limits.own_processes,
                guarded=False,
                at_once=1,
            )
        self._parts = _Parts(spec, where)
        self._recipe = recipe("slime_tandem.tasks.families", "scorer_of", spec, where, limits)

    @property
    def own(self) -> Parameters | None:
        """What the user's code is given, None for a built-in reward."""
        return self._own

    def verdicts(self, responses: Sequence[Response | tuple[Prompt, str]]) -> list[Verdict]:
        """The verdict on each response, in order.

        Raises DataError for a scorer that cannot even read the label, and for a function of the user's that wants what the
        prompt does not have.
        """
        asked = [Response(*response) for response in responses]
        found: list[Verdict | None] = [self._here(response) for response in asked]
        left = [i for i, verdict in enumerate(found) if verdict is None]
        if left and self._own is None:
            replies = shared(self._limits).ask([Call(self._recipe, asked[i][:2]) for i in left])
            for i, reply in zip(left, replies, strict=True):
                found[i] = self._read(reply, asked[i].prompt)
        elif left:
            outcomes = self._outcomes([asked[i] for i in left], self._own)  # type: ignore[arg-type]
            for i, outcome in zip(left, outcomes, strict=True):
                verdict = self._parts.verdict(outcome)
                found[i] = replace(verdict, by=self._by) if verdict.failed else verdict
        return [verdict for verdict in found if verdict is not None]

    def _here(self, response: Response) -> Verdict | None:
        if len(response.text) > LONGEST_RESPONSE:
            if self._own is not None:
                return Verdict(None, "error", why=f"a response of more than {LONGEST_RESPONSE} characters", by=self._by)
            return Verdict(0.0, "error")
        score = None if self._quick is None else self._quick(response.prompt, response.text)
        return None if score is None else Verdict(score)

    def _read(self, reply: Reply, prompt: Prompt) -> Verdict:
        if isinstance(reply.error, TandemError):
            raise reply.error
        if reply.error is not None:
            field = f"scorer of {self._where} at prompt {prompt.prompt_id}"
            raise DataError(field, str(reply.error), "a score for the prompt's own label", "choose another family")
        return Verdict(0.0, reply.problem) if reply.problem is not None else Verdict(float(reply.value))  # type: ignore[arg-type]

    def _outcomes(self, responses: Sequence[Response], own: Parameters) -> list[Outcome]:
        """Of the user's code. Together where it takes them together; what kills its process then is asked again, one by one."""
        if own.batch:
            (reply,) = self._ask([(own.of_all(responses), len(responses))])
            return _outcomes(reply, len(responses))
        given = [own.of(response) for response in responses]
        found: list[Outcome] = []
        for start, stop in _slices(len(given), self._at_once * self._limits.processes):
            part = given[start:stop]
            groups = [part[i : i + self._at_once] for i in range(0, len(part), self._at_once)]
            for group, reply in zip(groups, self._ask(groups), strict=True):
                outcomes = _outcomes(reply, len(group))
                if reply.problem is not None and len(group) > 1:
                    outcomes = self._one_by_one(group)
                found += outcomes
            if _hopeless(found[start:]):
                return found + [_not_asked(stop - start)] * (len(given) - stop)
        return found

    def _one_by_one(self, given: Sequence[Any]) -> list[Outcome]:
        found: list[Outcome] = []
        for start, stop in _slices(len(given), self._limits.processes):
            found += [_outcomes(reply, 1)[0] for reply in self._ask([[one] for one in given[start:stop]])]
            if _hopeless(found[start:]):
                return found + [_not_asked(stop - start)] * (len(given) - stop)
        return found

    def _ask(self, calls: Sequence[Any]) -> list[Reply]:
        return shared(self._limits).ask([Call(self._recipe, (one,)) for one in calls])


@functools.cache
def _label_judge(answer: AnswerKind | None, answer_format: str | None) -> Judge:
    spec = TaskSpec(family="chain_sum", reward="label", answer=answer, answer_format=answer_format)
    quick = functools.partial(quick_label_reward, answer=answer, answer_format=answer_format)
    return Judge(spec, "label_reward", RewardConfig(), quick)


def label_reward(
    prompt: Prompt, text: str, *, answer: AnswerKind | None = None, answer_format: str | None = None
) -> float:
    r"""The built-in reward for one of the user's own to build on: 1.0 if the answer in `text` is the prompt's label, else 0.0.

    `answer` and `answer_format` as of a task. What takes mathematics is compared in a guarded process, within its limits; past
    them 0.0. Raises DataError for a prompt without a label.

    >>> label_reward(Prompt("p", (), "1/2", "t"), "so it is 0.5", answer_format="last_number")
    1.0
    """
    (verdict,) = _label_judge(answer, answer_format).verdicts([(prompt, text)])
    assert verdict.reward is not None, "the built-in one gives one"
    return verdict.reward


def _slices(n: int, together: int) -> Iterator[tuple[int, int]]:
    """(start, stop): first a few, then more at a time; whole groups of what is asked `together`."""
    start, step = 0, _FIRST
    while start < n:
        stop = min(n, start + max(step, together))
        yield start, stop
        start, step = stop, _SLICE


def _hopeless(outcomes: Sequence[Outcome]) -> bool:
    """Whether so many were asked, and all are late, that the others would be, too."""
    return len(outcomes) >= _FIRST and all(outcome.get("problem") == "timeout" for outcome in outcomes)


def _not_asked(n: int) -> Outcome:
    return failed("timeout", f"not asked: the {n} before it were all too late")


def _outcomes(reply: Reply, n: int) -> list[Outcome]:
    if isinstance(reply.error, TandemError):
        raise reply.error
    if reply.error is not None:  # our own code around the user's: an answer that cannot be sent, say
        return [failed("raised", str(reply.error))] * n
    if reply.problem is not None:
        why = "no answer in time" if reply.problem == "timeout" else "its process ended, twice"
        return [failed(reply.problem, why)] * n
    outcomes: list[Outcome] = reply.value
    assert len(outcomes) == n
    return outcomes


class _Parts:
    """From outcomes to verdicts: a task's reward has the same parts for all its responses; they are added up by weight."""

    def __init__(self, spec: TaskSpec, where: str) -> None:
        self._weights, self._where = spec.reward_weights, where
        self._names = None if spec.reward_weights is None else frozenset(spec.reward_weights)
        self._lock = threading.Lock()

    def verdict(self, outcome: Outcome) -> Verdict:
        """Raises nothing: parts of other names than the first answer's, or the weights', are a problem of the response."""
        if "problem" in outcome:
            return Verdict(None, outcome["problem"], why=outcome["why"])  # type: ignore[arg-type]
        names = frozenset(outcome["parts"])
        with self._lock:
            if self._names is None:
                self._names = names
        if names != self._names:
            of = "reward_weights" if self._weights is not None else "the first answer"
            return Verdict(None, "invalid", why=f"{_said(names)}, where {of} has {_said(self._names)}")
        value, weights = outcome["value"], self._weights or {}
        if value is None:
            value = sum(weights.get(name, 1.0) * part for name, part in outcome["parts"].items())
            if not math.isfinite(value):
                return Verdict(None, "invalid", why=f"the parts add up to {value}")
        return Verdict(value, parts=outcome["parts"])


def _said(names: frozenset[str]) -> str:
    return f"parts {', '.join(sorted(names))}" if names else "one number"


def counted(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """`reward/timeouts` and the like: what went wrong, by kind; `reward/failed_samples`: responses that got no reward by it."""
    problems = [verdict.problem for verdict in verdicts]
    counts = {f"reward/{name}": float(problems.count(problem)) for problem, name in PROBLEMS.items()}
    return {**counts, "reward/failed_samples": float(sum(verdict.failed for verdict in verdicts))}


def require_some(verdicts: Sequence[Verdict], on_failed: Literal["mask", "stop"], where: str) -> str | None:
    """What to tell of the responses whose reward failed, None if none did; `where`: in which phase of the run, of what.

    Raises DataError if one failed and `on_failed` is `stop`, or if all did that have one to be found: it names the phase, and
    for each function and kind of failure the first error.
    """
    asked = [verdict for verdict in verdicts if not verdict.unasked]
    failed = [verdict for verdict in asked if verdict.failed]
    if not failed:
        return None
    of_kind: dict[tuple[str, str | None], str] = {}
    for verdict in failed:
        of_kind.setdefault((verdict.by, verdict.problem), verdict.said)
    first = list(of_kind.values())
    if on_failed == "stop" or len(failed) == len(asked):
        raise DataError(
            f"responses without a reward ({where})",
            f"{len(failed)} of {len(asked)}",
            "a reward for each" if on_failed == "stop" else "a reward for some",
            "mend tasks[].reward, or give it time by reward.own_timeout_s",
            "\n".join(first),
        )
    return f"{where}: {len(failed)} of {len(asked)} responses have no reward ({'; '.join(first)})"


assert set(PROBLEMS) == set(get_args(Problem))
