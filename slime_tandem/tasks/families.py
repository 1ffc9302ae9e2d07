"""The tasks of a run: prompts drawn from families by weight, and each response's score.

A family is any data set of reasoning-gym by its name, scored by the library's own scorer; `jsonl`, a file of the user's prompts
and labels (`jsonl.py`); or a class of the user's own, `module:attribute`. `tasks[].reward` puts another scorer in the family's
place.

Train and held-out prompts never overlap, whatever the seeds, because membership is a property of the prompt itself: a
prompt is held out if and only if the SHA-256 of its rendered messages is divisible by `HELD_OUT_ONE_IN` (a fixed tenth of
all prompts). A train stream drops the held-out ones it meets, the held-out stream keeps only these.

`INSTRUCTION` tells the model in every reasoning-gym prompt where its answer goes; prompts of other families are taken as they
are. Rewards are pure functions of (prompt, response text); the text is the one after stop truncation. Where and within which
limits they are computed is `judging`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any

from slime_tandem.config import RewardConfig, TaskSpec
from slime_tandem.errors import ConfigError, DataError, printable
from slime_tandem.extensions import find, is_own, is_url, made, said
from slime_tandem.tasks import labels
from slime_tandem.tasks.answers import extract_answer, guarded, label_reward, quick_label_reward
from slime_tandem.tasks.arguments import SENT, Parameters, Response, parameters_of
from slime_tandem.tasks.family import (
    HELD_OUT_ONE_IN,
    INSTRUCTION,
    Family,
    Listed,
    MakeFamily,
    Reward,
    hint,
    is_held_out,
    make_prompt,
)
from slime_tandem.tasks.formulas import prepare, require_math_verify
from slime_tandem.tasks.jsonl import JsonlFamily
from slime_tandem.tasks.judging import Judge, Quick, Verdict
from slime_tandem.tasks.own_reward import Caller
from slime_tandem.tasks.own_scorers import OWN_SCORERS
from slime_tandem.tasks.row_files import Source
from slime_tandem.types import Message, Prompt

EVALUATED_AS_CODE: Mapping[str, str] = {
    **dict.fromkeys(
        ("polynomial_multiplication", "simple_integration", "intermediate_integration"),
        "sympy's parse_expr, which is an eval",
    ),
    "composite": "the scorers of the data sets that it names",
}
"""Data sets of reasoning-gym whose scorer runs text as Python, and by what: a model could answer with a program, and the
trainer would run it. They are refused, unless `own_scorers` has one in its place; tests/tasks reads the sources of all scorers
and of what they call, and finds these."""

LINEAR_SCORERS = frozenset({"chain_sum", "decimal_arithmetic", "decimal_chain_sum"})
"""Data sets whose scorer compares decimal numbers, in time that is linear in the answer: it is called in this process. So is
that of each data set with the library's default scorer, which looks for the right answer in the given one."""
_LONGEST_QUICK = 10_000

REWARDS: dict[str, Reward] = {"label": label_reward}
"""Built-in values of `tasks[].reward`."""

_BLOCK = 32
_CHECKED = 1000
_MAX_BARREN_DRAWS = 1024


class TaskSet:
    """The tasks of a run.

    `seed` picks the train prompts only; held-out prompts are the same for every run. Raises ConfigError for a family or reward
    that does not exist, and for a family that refuses its config, DataError for a broken jsonl file. Prompt ids are content
    hashes: equal prompts have equal ids in every run. `metadata["spec"]` of a prompt is the number of its task. `limits`: what
    scoring one response may take. `labels`: prompts whose reward is the label's need one; else a response to one without
    has no reward.
    """

    def __init__(
        self, specs: Sequence[TaskSpec], seed: int, limits: RewardConfig | None = None, *, labels: bool = True
    ):
        if not specs:
            raise ConfigError("tasks", [], "at least one task", "name a family, e.g. chain_sum")
        self.specs = tuple(specs)
        self.seed = seed
        self._labels = labels
        self._families = tuple(_make(spec, f"tasks.{index}", labels) for index, spec in enumerate(specs))
        for index, (spec, family) in enumerate(zip(specs, self._families, strict=True)):
            if isinstance(family, JsonlFamily):
                require_for_labels(spec, f"tasks.{index}", family.known_labels)
            elif isinstance(family, Listed):
                require_for_labels(spec, f"tasks.{index}", [p.label for p in family.prompts if p.label is not None])
            else:
                require_for_labels(spec, f"tasks.{index}")
        self._judges = tuple(
            judge_of(spec, f"tasks.{index}", limits or RewardConfig(), family)
            for index, (spec, family) in enumerate(zip(specs, self._families, strict=True))
        )
        for judge, family in zip(self._judges, self._families, strict=True):
            if judge.own is not None and isinstance(family, Listed):
                judge.own.check(
                    list(islice(family.prompts, _CHECKED))
                )  # what is nowhere is refused now, not when it is drawn

    @property
    def notes(self) -> list[str]:
        """For people: what was read of the prompt files, and what was taken for what."""
        return [
            printable(note) for family in self._families if isinstance(family, JsonlFamily) for note in family.notes
        ]

    @property
    def sources(self) -> dict[int, Source]:
        """What the prompt files are, by the number of the task."""
        return {i: family.source for i, family in enumerate(self._families) if isinstance(family, JsonlFamily)}

    @property
    def skipped_rows(self) -> int:
        """Bad rows of prompt files that were left out of draws so far."""
        return sum(family.skipped for family in self._families if isinstance(family, JsonlFamily))

    @property
    def listed_prompts(self) -> Iterator[Prompt]:
        """Every prompt of the prompt files, each read when it is asked for; what else there is is made when it is drawn."""
        for i, family in enumerate(self._families):
            if isinstance(family, Listed):
                yield from (_of_task(prompt, i) for prompt in family.prompts)

    @property
    def tagged_prompts(self) -> list[Prompt]:
        """One prompt of each tag and teacher that the prompt files name, as far as they were read."""
        return [
            _of_task(prompt, i)
            for i, family in enumerate(self._families)
            if isinstance(family, Listed)
            for prompt in (family.tagged if isinstance(family, JsonlFamily) else family.prompts)
        ]

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """`n` prompts for a step: a pure function of (seed, step, n), so that a resumed run sees what it would have seen.

        Each prompt's family is drawn by weight. Raises ConfigError if a family gives held-out prompts only.
        """
        rng = Random(f"train/{self.seed}/{step}")  # noqa: S311 (not for secrets; a str seed is hashed with SHA-512)
        drawn = rng.choices(range(len(self.specs)), weights=[spec.weight for spec in self.specs], k=n)
        streams = [
            self._side(index, f"train/{self.seed}/{step}/{index}", held_out=False) for index in range(len(self.specs))
        ]
        return [self._next(streams[index], index, "train") for index in drawn]

    def heldout_prompts(self, n: int) -> list[Prompt]:
        """The first `n` held-out prompts, all distinct, the same for every seed; families in proportion to their weights.

        Raises ConfigError if a family's held-out tenth has too few distinct prompts.
        """
        streams = [self._side(index, f"held-out/{index}", held_out=True) for index in range(len(self.specs))]
        taken = [0] * len(self.specs)
        seen: set[str] = set()
        prompts: list[Prompt] = []
        while len(prompts) < n:
            # The family that is furthest behind its share is next: any prefix of the list is in proportion too.
            index = min(range(len(taken)), key=lambda i: ((taken[i] + 1) / self.specs[i].weight, i))
            prompt = self._next(streams[index], index, "held-out", seen)
            seen.add(prompt.prompt_id)
            taken[index] += 1
            prompts.append(prompt)
        return prompts

    def verdicts(self, responses: Sequence[Response | tuple[Prompt, str]]) -> list[Verdict]:
        """The verdict on each (prompt, response text), in order: by the task's reward, else by its family's scorer.

        Built-in ones give 0.0 where there is no answer; a user's that fails gives none, and the verdict says why. Nor
        is there one for a prompt without a label, where no labels are needed.
        """
        by_task: dict[int, list[int]] = {}
        for i, response in enumerate(responses):
            by_task.setdefault(response[0].metadata["spec"], []).append(i)
        found: dict[int, Verdict] = {}
        if not self._labels:
            for task, members in by_task.items():
                bare = [i for i in members if not self.is_rewarded(responses[i][0])]
                found |= dict.fromkeys(bare, Verdict(None))
                by_task[task] = [i for i in members if i not in found]
        for task, members in by_task.items():
            found.update(zip(members, self._judges[task].verdicts([responses[i] for i in members]), strict=True))
        return [found[i] for i in range(len(responses))]

    def is_rewarded(self, prompt: Prompt) -> bool:
        """Whether a response to it has a reward to be found: not to a prompt without a label, where no labels are needed."""
        return self._labels or prompt.label is not None or not self.specs[prompt.metadata["spec"]].by_label

    def reward(self, prompt: Prompt, text: str) -> float:
        """The score of one response; `verdicts` takes many at once.

        Some scorers of reasoning-gym give part marks to wrong answers: 1.0 is correct. Raises DataError where the user's gives
        none.
        """
        (verdict,) = self.verdicts([(prompt, text)])
        if verdict.unasked:
            field, expected = f"label of prompt {prompt.prompt_id}", "the right answer, which the reward compares with"
            raise DataError(field, None, expected, "give it one, or a reward by tasks[].reward")
        if verdict.reward is None:
            field = f"reward of tasks.{prompt.metadata['spec']} at prompt {prompt.prompt_id}"
            raise DataError(field, verdict.why, "a number, or named parts that are numbers", "mend the function")
        return verdict.reward

    def correct(self, prompt: Prompt, text: str) -> bool:
        """Whether the response has the full score; what accuracies count."""
        return self.verdicts([(prompt, text)])[0].right

    def _side(self, index: int, key: str, *, held_out: bool) -> Iterator[Prompt]:
        return _filtered(self._families[index].stream(key), f"tasks.{index}.family", held_out=held_out)

    def _next(
        self, stream: Iterator[Prompt], index: int, side: str, seen: frozenset[str] | set[str] = frozenset()
    ) -> Prompt:
        for prompt, _ in zip(stream, range(_MAX_BARREN_DRAWS), strict=False):  # the range only caps the draws
            if prompt.prompt_id not in seen:
                return _of_task(prompt, index)
        raise ConfigError(
            f"tasks.{index}",
            self.specs[index].family,
            f"more distinct {side} prompts than the {len(seen)} found (one in {HELD_OUT_ONE_IN} prompts is held out)",
            "lower eval.prompts, widen the family's config, or add lines to the file",
        )


def find_family(name: str, field: str) -> MakeFamily:
    """What makes a family of this name; raises ConfigError, naming `field`, for one that is none of the three kinds."""
    table: dict[str, MakeFamily] = {"jsonl": JsonlFamily}
    if name not in table and not is_own(name):
        table |= dict.fromkeys(_reasoning_gym().factory.DATASETS, _ReasoningGym)
    if name not in table and not is_own(name):
        raise ConfigError(
            field, name, "`jsonl`, a reasoning-gym data set or module:attribute", hint(name, sorted(table))
        )
    return find(name, table, field)


def find_reward(spec: TaskSpec, where: str) -> Callable[..., Any] | None:
    """The function that a task names as its reward, None for its family's own and for a server.

    Raises ConfigError, naming `where`, for a name that stands for none."""
    if spec.reward is None or is_url(spec.reward):
        return None
    return find(spec.reward, REWARDS, f"{where}.reward")


def judge_of(spec: TaskSpec, where: str, limits: RewardConfig, family: Family | None) -> Judge:
    """What judges the responses of a task; `family`: what its prompts come from, where that is here (for its own scorer).

    Raises ConfigError for a reward that cannot be found, or whose parameters cannot be given, and for a key that is not set.
    """
    function, name = find_reward(spec, where), spec.reward
    own: Parameters | None = None
    if name is not None and is_url(name):
        _key(limits)
        own = Parameters(SENT, (), everything=False, batch=False, waits=True, where=f"{where}.reward")
    elif name is not None and is_own(name):
        assert function is not None
        own = parameters_of(function, f"{where}.reward", name)
    elif name is None and is_own(spec.family) and family is not None:
        own = parameters_of(family.reward, f"{where}.family", spec.family)
    return Judge(spec, where, limits, quick_of(spec, family), own)


def _key(limits: RewardConfig) -> str | None:
    if limits.api_key_env is None:
        return None
    if not (key := os.environ.get(limits.api_key_env)):
        remedy = f"export {limits.api_key_env}"
        raise ConfigError("reward.api_key_env", limits.api_key_env, "an environment variable that is set", remedy)
    return key


def require_for_labels(spec: TaskSpec, where: str, known: Sequence[str] | None = None) -> None:
    """Raise ConfigError where comparing answers with the `known` labels (None: any) takes math-verify, and there is none."""
    if not spec.by_label:
        return
    needed = (
        spec.answer in (None, "math") if known is None else any(labels.needs_formulas(t, spec.answer) for t in known)
    )
    if needed:
        require_math_verify(f"{where}.answer", spec.answer)


def scorer_of(spec: TaskSpec, where: str, limits: RewardConfig | None = None) -> Callable[..., Any]:
    """What scores the responses of a task; a worker makes it (`judging`). A family of the user's is made anew there; a `Caller`
    calls what is the user's."""
    limits = limits or RewardConfig()
    if spec.by_label:
        prepare()
        return functools.partial(label_reward, answer=spec.answer, answer_format=spec.answer_format)
    if spec.reward is not None and is_url(spec.reward):
        from slime_tandem.tasks.remote import RemoteReward  # aiohttp

        ask = RemoteReward(
            spec.reward, retries=limits.own_retries, concurrency=limits.own_concurrency, key=_key(limits)
        )
        return Caller(ask, batch=False, waits=True, timeout_s=limits.own_timeout_s)
    own = find_reward(spec, where)
    if own is not None:
        return _caller(own, f"{where}.reward", str(spec.reward), limits)
    family = _make(spec, where)
    if is_own(spec.family):
        return _caller(family.reward, f"{where}.family", spec.family, limits)
    return family.reward


def _caller(function: Callable[..., Any], where: str, name: str, limits: RewardConfig) -> Caller:
    takes = parameters_of(function, where, name)
    called: Any = made(function, field=where, name=name) if inspect.isclass(function) else function
    return Caller(called, batch=takes.batch, waits=takes.waits, timeout_s=limits.own_timeout_s)


def quick_of(spec: TaskSpec, family: Family | None) -> Quick:
    """What scores those responses of a task that need no worker."""
    if spec.by_label:
        return functools.partial(quick_label_reward, answer=spec.answer, answer_format=spec.answer_format)
    if spec.reward is None and isinstance(family, _ReasoningGym):
        return family.quick
    return lambda prompt, text: None


def _make(spec: TaskSpec, where: str, labels: bool = True) -> Family:
    make: Callable[[TaskSpec, str], object] = find_family(spec.family, f"{where}.family")
    if make is JsonlFamily:
        make = functools.partial(JsonlFamily, labels=labels)
    family = made(make, spec, where, field=f"{where}.family", name=spec.family)
    if not isinstance(family, Family):
        expected = "something that makes a task family (`stream` and `reward`)"
        raise ConfigError(f"{where}.family", spec.family, expected, "see docs/extending.md")
    return family


def _of_task(prompt: Prompt, index: int) -> Prompt:
    return dataclasses.replace(prompt, metadata={**prompt.metadata, "spec": index})


def _reasoning_gym() -> Any:
    """The package, imported without what the compiler says of its dependencies' sources.

    `cellpylib`, which it imports, compares with a literal by `is`; whoever compiles it first (we, when the installer did not)
    would print that SyntaxWarning, or fail by it under `-W error`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
        import reasoning_gym.factory
    return reasoning_gym


class _ReasoningGym:
    """A procedural data set; its items are made in small blocks, each from a seed that is a hash of (key, block)."""

    def __init__(self, spec: TaskSpec, where: str) -> None:
        self._spec = spec
        self._check(where)
        self._scorer = self._build(seed=0, size=1)

    def stream(self, key: str) -> Iterator[Prompt]:
        block = 0
        while True:
            items = self._build(seed=_seed_of(f"{key}/{block}"), size=_BLOCK)
            for i in range(_BLOCK):
                yield self._prompt(items[i])
            block += 1

    def reward(self, prompt: Prompt, text: str) -> float:
        answer = extract_answer(text)
        if answer is None:
            return 0.0
        entry = prompt.metadata["entry"]
        own = OWN_SCORERS.get(self._spec.family)
        score = self._scorer.score_answer if own is None else own
        return guarded(lambda text: score(text, entry), answer, prompt.label)

    def quick(self, prompt: Prompt, text: str) -> float | None:
        """The reward where it takes no worker."""
        answer = extract_answer(text)
        if answer is None:
            return 0.0
        from reasoning_gym.dataset import ProceduralDataset

        plain = type(self._scorer).score_answer is ProceduralDataset.score_answer
        linear = plain or self._spec.family in LINEAR_SCORERS
        return self.reward(prompt, text) if linear and len(answer) <= _LONGEST_QUICK else None

    def _prompt(self, entry: dict[str, Any]) -> Prompt:
        messages = (Message("user", f"{INSTRUCTION}\n{entry['question']}"),)
        label = None if entry["answer"] is None else str(entry["answer"])
        return make_prompt(self._spec.family, messages, label, {"entry": entry})

    def _build(self, seed: int, size: int) -> Any:
        return _reasoning_gym().create_dataset(self._spec.family, seed=seed, size=size, **self._spec.config)

    def _check(self, where: str) -> None:
        families, family = _reasoning_gym().factory.DATASETS, self._spec.family
        if family in EVALUATED_AS_CODE:
            raise ConfigError(
                f"{where}.family",
                family,
                f"a data set whose scorer does not run a model's answer as Python; this one hands it to "
                f"{EVALUATED_AS_CODE[family]}",
                "choose another family, or give prompts and labels of your own by `jsonl`",
            )
        known = [f.name for f in dataclasses.fields(families[family][1]) if f.name not in ("seed", "size")]
        for name, value in self._spec.config.items():
            if name in ("seed", "size"):
                raise ConfigError(f"{where}.config.{name}", value, "no seed or size", "they follow from the run")
            if name not in known:
                raise ConfigError(f"{where}.config.{name}", value, f"a setting of {family}", hint(name, known))
        try:
            self._build(seed=0, size=1)[0]
        except Exception as error:  # data sets refuse their config by any exception, mostly AssertionError
            raise ConfigError(
                f"{where}.config",
                self._spec.config,
                f"a config that {family} accepts; it says {said(error)}",
                "change these settings of the data set",
            ) from error


def _seed_of(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1  # 31 bits: valid for numpy seeds too


def _is_text(content: object) -> bool:
    """Whether a tokenizer takes it: half of a surrogate pair is no character."""
    try:
        return isinstance(content, str) and content.encode() is not None
    except UnicodeEncodeError:
        return False


def _filtered(prompts: Iterator[Prompt], field: str, *, held_out: bool) -> Iterator[Prompt]:
    """Keep one side; ends (instead of searching for ever) once so many draws in a row were of the other side."""
    barren = 0
    for prompt in prompts:
        if not isinstance(prompt, Prompt):
            raise DataError(
                f"{field}: stream", prompt, "prompts", "make them with slime_tandem.tasks.family.make_prompt"
            )
        if not all(_is_text(message.content) for message in prompt.messages):
            content = [message.content for message in prompt.messages]
            raise DataError(
                f"{field}: stream", content, "messages of whole characters", "leave half surrogate pairs out"
            )
        if is_held_out(prompt.messages) == held_out:
            barren = 0
            yield prompt
        else:
            barren += 1
            if barren >= _MAX_BARREN_DRAWS:
                return
