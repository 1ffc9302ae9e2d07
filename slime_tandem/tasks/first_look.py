"""Why the rewards of a run's first responses are all equal: the likeliest cause, shown on three of them, and what to do.

It looks at texts alone, and guesses for people; no score depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slime_tandem.config import TaskSpec
from slime_tandem.errors import printable, sentence
from slime_tandem.tasks.answers import FORMATS, extract_answer, quick_label_reward
from slime_tandem.types import Prompt, ScoredSample

_SHOWN, _READ = 3, 10_000


class Look(NamedTuple):
    """A response with its score. `cut`: it was not ended by itself."""

    prompt: Prompt
    text: str
    reward: float
    cut: bool


class Cause(NamedTuple):
    """What was seen, what to do about it, and a few responses."""

    found: str
    remedy: str
    examples: tuple[str, ...]

    @property
    def warning(self) -> str:
        """All of it, for the screen and for logs."""
        return "\n  ".join((f"nothing to learn from: {sentence(self.found)} {sentence(self.remedy)}", *self.examples))


def looks(scored: Sequence[ScoredSample]) -> list[Look]:
    """The responses of a rollout, for `why_equal`."""
    return [
        Look(s.sample.prompt, s.sample.text, s.reward, s.sample.finish_reason == "length")
        for s in scored
        if s.reward is not None
    ]


def why_equal(specs: Sequence[TaskSpec], seen: Sequence[Look], named: str | None = None) -> Cause | None:
    """The likeliest cause of equal rewards; None if they differ, or there are fewer than two. `named`: a reward that no task
    names and that scored them (slime's own)."""
    if len(seen) < 2 or len({look.reward for look in seen}) > 1:
        return None
    reward, n = seen[0].reward, len(seen)
    all_are = f"all {n} rewards are {reward:.3g}"
    spec = specs[seen[0].prompt.metadata.get("spec", 0)]
    seen = [look._replace(text=look.text[-_READ:]) for look in seen]
    own = named is not None or spec.scored_by_own
    given = [None if own else extract_answer(look.text, spec.answer_format) for look in seen]
    examples = tuple(_example(*pair, own=own) for pair in zip(seen[:_SHOWN], given[:_SHOWN], strict=True))
    if reward == 1.0:
        return Cause(f"{all_are}: every response is right", "give harder prompts", examples)
    if own:
        what = named or spec.reward or spec.family
        return Cause(f"{all_are}: {what} gives no other", "try it on the responses below", examples)
    if all(look.prompt.label is None for look in seen):
        return Cause(f"{all_are}: no prompt has a label", "add labels, or set objective.reward_coef=0", examples)
    missing, cut = sum(a is None for a in given), sum(look.cut for look in seen)
    where = spec.answer_format or "<answer> or \\boxed{}"
    if 2 * missing <= n:
        found = f"{all_are}: {n - missing} of {n} responses have an answer ({where}), none of them is the label"
        return Cause(found, "compare answers and labels below: another form, or too hard for the model", examples)
    found = f"{all_are}: {missing} of {n} responses have no answer ({where})"
    if 2 * cut > n:
        return Cause(f"{found}, {cut} of {n} were cut at their longest", "raise sampling.max_new_tokens", examples)
    right = {name: sum(_right(spec, look, name) for look in seen) for name in FORMATS}
    best = max(right, key=right.__getitem__)
    ask = "let the prompts ask for it" + (" by tasks[].instruction" if spec.family == "jsonl" else "")
    if spec.by_label and right[best]:
        remedy = f"set tasks[].answer_format={best}, by which {right[best]} of {n} would be right, or {ask}"
        return Cause(found, remedy, examples)
    return Cause(
        found, f"{ask}, e.g. 'End with <answer>...</answer>.'" if spec.answer_format is None else ask, examples
    )


def _right(spec: TaskSpec, look: Look, answer_format: str) -> bool:
    return (
        look.prompt.label is not None and quick_label_reward(look.prompt, look.text, spec.answer, answer_format) == 1.0
    )


def _example(look: Look, given: str | None, *, own: bool) -> str:
    asked = look.prompt.messages[-1].content if look.prompt.messages else ""
    answer = "" if own else f" answer {'none' if given is None else repr(given[:40])},"
    return (
        f"{_end(asked)} -> {_end(look.text)}{' (cut)' if look.cut else ''}:{answer} "
        f"label {None if look.prompt.label is None else look.prompt.label[:40]!r}, reward {look.reward:.3g}"
    )


def _end(text: str) -> str:
    text = " ".join(text.split())
    return repr(printable(text if len(text) <= 80 else "..." + text[-77:]))
