"""What a task family and a reward are: one protocol each, and what every family shares. Knows no family.

A family and a reward of one's own are named `module:attribute` in `tasks[].family` and `tasks[].reward` (docs/extending.md);
the built-in ones come through the same door (`families.find_family`, `families.REWARDS`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from slime_tandem.config import TaskSpec
from slime_tandem.types import Message, Prompt

HELD_OUT_ONE_IN = 10
INSTRUCTION = "End with <answer>...</answer>."

Reward = Callable[[Prompt, str], float]
"""A built-in one: (prompt, response text after stop truncation) -> score in [0, 1], where 1.0 is correct. What a user's own may
take and give says `arguments` and `own_reward`."""


@runtime_checkable
class Family(Protocol):
    """One source of prompts with its scorer."""

    def stream(self, key: str) -> Iterator[Prompt]:
        """Prompts without end, train and held-out mixed; a pure function of `key`. `make_prompt` makes one."""
        ...

    def reward(self, prompt: Prompt, text: str) -> float:
        """A `Reward`, of this family's own prompts; of a user's family, anything that `tasks[].reward` may name."""
        ...


@runtime_checkable
class Listed(Protocol):
    """A family that has all of its prompts beforehand."""

    @property
    def prompts(self) -> Iterable[Prompt]:
        """All of them, in order."""
        ...


MakeFamily = Callable[[TaskSpec, str], Family]
"""(entry of `tasks`, its dotted name as `tasks.0`) -> the family; a class will do. `spec.config` and `spec.path` are for it.
Raises ConfigError or DataError for settings that do not hold."""


def make_prompt(
    task: str, messages: Sequence[Message], label: str | None = None, metadata: Mapping[str, Any] | None = None
) -> Prompt:
    """A prompt whose id follows from its messages, so that equal prompts have equal ids in every run.

    >>> make_prompt("squares", [Message("user", "7 * 7 =")], "49").prompt_id
    'squares/2268c7d0e252'
    """
    messages = tuple(messages)
    return Prompt(f"{task}/{_digest(messages).hex()[:12]}", messages, label, task, metadata or {})


def is_held_out(messages: Sequence[Message]) -> bool:
    """Whether a prompt belongs to the held-out tenth; depends on nothing but the messages.

    >>> sum(is_held_out((Message("user", str(i)),)) for i in range(1000))
    110
    """
    return int.from_bytes(_digest(messages)[:8], "big") % HELD_OUT_ONE_IN == 0


def _digest(messages: Sequence[Message]) -> bytes:
    rendered = json.dumps([[m.role, m.content] for m in messages], ensure_ascii=True)
    return hashlib.sha256(rendered.encode("ascii")).digest()


def hint(word: str, known: Sequence[str]) -> str:
    """The nearest known word, or some of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else f"choose one of {', '.join(sorted(known)[:12])}"
