"""Tasks: where prompts come from and how a response is scored.

Two kinds of family, mixed by weight: any data set of reasoning-gym by its name, scored by the library's own scorer, and
`jsonl`, a file of the user's prompts and labels, scored by math-verify.

Train and held-out prompts never overlap, whatever the seeds, because membership is a property of the prompt itself: a
prompt is held out if and only if the SHA-256 of its rendered messages is divisible by `HELD_OUT_ONE_IN` (a fixed tenth of
all prompts). A train stream drops the held-out ones it meets, the held-out stream keeps only these.

The answer is what stands in the last `<answer>...</answer>` of the response, else in its last `\\boxed{...}`, else nothing
(score 0). `INSTRUCTION` tells the model so in every reasoning-gym prompt; jsonl prompts are taken as they are.

Rewards are pure functions of (prompt, response text); the text is the one after stop truncation.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Protocol

from slime_tandem.config import TaskSpec
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.types import Message, Prompt

EVALUATED_AS_CODE: Mapping[str, str] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"), "eval"),
    "bitwise_arithmetic": "eval (of its question)",
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), "sympy's parse_expr, which is an eval"),
    **dict.fromkeys(("simple_integration", "intermediate_integration"), "sympy's parse_expr, which is an eval"),
    "composite": "the scorers of the data sets that it names",
}
"""Data sets of reasoning-gym whose scorer runs text as Python, and by what: a model could answer with a program, and the
trainer would run it. They are refused; tests/tasks reads the sources of all scorers and finds these."""

HELD_OUT_ONE_IN = 10
INSTRUCTION = "End with <answer>...</answer>."

_BLOCK = 32
_MAX_BARREN_DRAWS = 1024
_MATH_TIMEOUT_SECONDS = 5
_ROLES = ("system", "user", "assistant", "tool")
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def is_held_out(messages: Sequence[Message]) -> bool:
    """Whether a prompt belongs to the held-out tenth; depends on nothing but the messages.

    >>> sum(is_held_out((Message("user", str(i)),)) for i in range(1000))
    110
    """
    return int.from_bytes(_digest(messages)[:8], "big") % HELD_OUT_ONE_IN == 0


def extract_answer(text: str) -> str | None:
    r"""The answer in a response: the last `<answer>...</answer>`, else the last `\boxed{...}`, else None. Stripped.

    >>> extract_answer("<answer>3</answer> no <answer> 4 </answer>"), extract_answer(r"so \boxed{\frac{1}{2}}")
    ('4', '\\frac{1}{2}')
    """
    found = _ANSWER.findall(text)
    return str(found[-1]).strip() if found else _last_boxed(text)


class Family(Protocol):
    """One source of prompts with its scorer."""

    def stream(self, key: str) -> Iterator[Prompt]:
        """Prompts without end, train and held-out mixed; a pure function of `key`."""
        ...

    def reward(self, prompt: Prompt, answer: str) -> float:
        """Score in [0, 1] of an extracted answer."""
        ...


class TaskSet:
    """The tasks of a run.

    `seed` picks the train prompts only; held-out prompts are the same for every run. Raises ConfigError for a family that
    does not exist or refuses its config, DataError for a broken jsonl file. Prompt ids are content hashes: equal prompts
    have equal ids in every run.
    """

    def __init__(self, specs: Sequence[TaskSpec], seed: int):
        if not specs:
            raise ConfigError("tasks", [], "at least one task", "name a family, e.g. chain_sum")
        self.specs = tuple(specs)
        self.seed = seed
        self._families: tuple[Family, ...] = tuple(
            _Jsonl(index, spec) if spec.family == "jsonl" else _ReasoningGym(index, spec)
            for index, spec in enumerate(specs)
        )

    @property
    def listed_prompts(self) -> list[Prompt]:
        """Every prompt of the prompt files; what else there is is made when it is drawn."""
        return [p for family in self._families if isinstance(family, _Jsonl) for p in family.prompts]

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """`n` prompts for a step: a pure function of (seed, step, n), so that a resumed run sees what it would have seen.

        Each prompt's family is drawn by weight. Raises ConfigError if a family gives held-out prompts only.
        """
        rng = Random(f"train/{self.seed}/{step}")  # noqa: S311 (not for secrets; a str seed is hashed with SHA-512)
        drawn = rng.choices(range(len(self.specs)), weights=[spec.weight for spec in self.specs], k=n)
        streams = [
            _filtered(family.stream(f"train/{self.seed}/{step}/{index}"), held_out=False)
            for index, family in enumerate(self._families)
        ]
        return [self._next(streams[index], index, "train") for index in drawn]

    def heldout_prompts(self, n: int) -> list[Prompt]:
        """The first `n` held-out prompts, all distinct, the same for every seed; families in proportion to their weights.

        Raises ConfigError if a family's held-out tenth has too few distinct prompts.
        """
        streams = [
            _filtered(family.stream(f"held-out/{index}"), held_out=True) for index, family in enumerate(self._families)
        ]
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

    def reward(self, prompt: Prompt, text: str) -> float:
        """Score in [0, 1] by the family's scorer; 0.0 if the response holds no answer.

        Some scorers of reasoning-gym give part marks to wrong answers: use `correct` for accuracy.
        """
        answer = extract_answer(text)
        return 0.0 if answer is None else self._families[prompt.metadata["spec"]].reward(prompt, answer)

    def correct(self, prompt: Prompt, text: str) -> bool:
        """Whether the response has the full score; what accuracies count."""
        return self.reward(prompt, text) == 1.0

    def _next(
        self, stream: Iterator[Prompt], index: int, side: str, seen: frozenset[str] | set[str] = frozenset()
    ) -> Prompt:
        for prompt, _ in zip(stream, range(_MAX_BARREN_DRAWS), strict=False):  # the range only caps the draws
            if prompt.prompt_id not in seen:
                return prompt
        raise ConfigError(
            f"tasks.{index}",
            self.specs[index].family,
            f"more distinct {side} prompts than the {len(seen)} found (one in {HELD_OUT_ONE_IN} prompts is held out)",
            "lower eval.prompts, widen the family's config, or add lines to the file",
        )


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

    def __init__(self, index: int, spec: TaskSpec):
        self._index, self._spec = index, spec
        self._check()
        self._scorer = self._build(seed=0, size=1)

    def stream(self, key: str) -> Iterator[Prompt]:
        block = 0
        while True:
            items = self._build(seed=_seed_of(f"{key}/{block}"), size=_BLOCK)
            for i in range(_BLOCK):
                yield self._prompt(items[i])
            block += 1

    def reward(self, prompt: Prompt, answer: str) -> float:
        entry = prompt.metadata["entry"]
        return _guarded(lambda text: self._scorer.score_answer(text, entry), answer, prompt.label)

    def _prompt(self, entry: dict[str, Any]) -> Prompt:
        messages = (Message("user", f"{INSTRUCTION}\n{entry['question']}"),)
        label = None if entry["answer"] is None else str(entry["answer"])
        return _make_prompt(self._spec.family, messages, label, {"spec": self._index, "entry": entry})

    def _build(self, seed: int, size: int) -> Any:
        return _reasoning_gym().create_dataset(self._spec.family, seed=seed, size=size, **self._spec.config)

    def _check(self) -> None:
        families = _reasoning_gym().factory.DATASETS
        where, family = f"tasks.{self._index}", self._spec.family
        if family not in families:
            raise ConfigError(
                f"{where}.family", family, "`jsonl` or a reasoning-gym data set", _hint(family, [*families, "jsonl"])
            )
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
                raise ConfigError(f"{where}.config.{name}", value, f"a setting of {family}", _hint(name, known))
        try:
            self._build(seed=0, size=1)[0]
        except Exception as error:  # data sets refuse their config by any exception, mostly AssertionError
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"{where}.config",
                self._spec.config,
                f"a config that {family} accepts; it says {reason}",
                "change these settings of the data set",
            ) from error


class _Jsonl:
    """A prompt file; the whole file is read and checked at construction."""

    def __init__(self, index: int, spec: TaskSpec):
        assert spec.path is not None, "TaskSpec checks it"
        self._index = index
        self.prompts = [
            _make_prompt(prompt.task, prompt.messages, prompt.label, {**prompt.metadata, "spec": index})
            for prompt in read_jsonl(Path(spec.path))
        ]

    def stream(self, key: str) -> Iterator[Prompt]:
        epoch = 0
        while True:  # whole shuffles, so that no line comes twice before each came once
            order = list(self.prompts)
            Random(f"{key}/{epoch}").shuffle(order)  # noqa: S311
            yield from order
            epoch += 1

    def reward(self, prompt: Prompt, answer: str) -> float:
        assert prompt.label is not None, "read_jsonl checks it"
        return label_reward(prompt.label, answer)


def label_reward(label: str, answer: str) -> float:
    """1.0 for an extracted answer that is the label, or that math-verify finds equal to it; else 0.0.

    >>> label_reward("7", "7")
    1.0
    """
    if answer == label.strip():
        return 1.0
    return _guarded(lambda text: _math_equal(label, text), answer, label)


def read_jsonl(path: Path) -> list[Prompt]:
    """Prompts of a file with one JSON object a line, as slime users have them.

    Keys: `prompt` (a str, or a list of {role, content}) or `messages` (a list), `label` (str or number), and optionally
    `task` (str) and `metadata` (object). Blank lines are skipped; other keys are refused. Raises DataError with path and
    line number for the first bad line, and for a file that is missing, empty or not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028, which JSON may hold
    except FileNotFoundError:
        raise DataError("path", str(path), "an existing JSONL file", "check tasks.*.path") from None
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        expected = f"a readable UTF-8 text file ({why})"
        raise DataError("path", str(path), expected, "give a JSONL file, saved as UTF-8") from None
    prompts = [_parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise DataError("path", str(path), "at least one line", "add prompts to the file")
    return prompts


def _parse_line(line: str, where: str) -> Prompt:
    example = 'e.g. {"prompt": "2 + 2 =", "label": "4"}'
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # no half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise DataError(where, line[:80], f"one JSON object ({error})", example) from None
    if not isinstance(row, dict):
        raise DataError(where, line[:80], "a JSON object", example)
    for key in row:
        if key not in ("prompt", "messages", "label", "task", "metadata"):
            known = ["prompt", "messages", "label", "task", "metadata"]
            raise DataError(f"{where} key", key, "a known key", f"{_hint(key, known)} or put it under `metadata`")
    if ("prompt" in row) == ("messages" in row):
        raise DataError(where, sorted(row), "either `prompt` or `messages`", example)
    key = "prompt" if "prompt" in row else "messages"
    label = row.get("label")
    if isinstance(label, bool) or not isinstance(label, (str, int, float)) or not str(label).strip():
        raise DataError(f"{where} label", label, "a non-empty string or a number", "add the right answer")
    task, metadata = row.get("task", "jsonl"), row.get("metadata", {})
    if not isinstance(task, str) or not task:
        raise DataError(f"{where} task", task, "a non-empty string", "leave it out for `jsonl`")
    if not isinstance(metadata, dict):
        raise DataError(f"{where} metadata", metadata, "an object", "leave it out if there is none")
    messages = parse_messages(row[key], f"{where} {key}", may_be_text=key == "prompt")
    return _make_prompt(task, messages, str(label), metadata)


def parse_messages(value: Any, where: str, *, may_be_text: bool) -> tuple[Message, ...]:
    """Chat turns of a JSON value: a list of {role, content}, or a text where that may be; raises DataError naming `where`."""
    if may_be_text and isinstance(value, str) and value.strip():
        return (Message("user", value),)
    expected = "a non-empty string or a list of messages" if may_be_text else "a list of messages"
    if not isinstance(value, list) or not value:
        raise DataError(where, value, expected, 'e.g. [{"role": "user", "content": "2 + 2 ="}]')
    messages = []
    for i, turn in enumerate(value):
        if not isinstance(turn, dict) or set(turn) != {"role", "content"} or not isinstance(turn["content"], str):
            raise DataError(f"{where}.{i}", turn, "an object with text `role` and `content`", "correct this turn")
        if turn["role"] not in _ROLES:
            raise DataError(f"{where}.{i}.role", turn["role"], f"one of {', '.join(_ROLES)}", "correct the role")
        messages.append(Message(turn["role"], turn["content"]))
    return tuple(messages)


def _make_prompt(task: str, messages: tuple[Message, ...], label: str | None, metadata: Mapping[str, Any]) -> Prompt:
    return Prompt(f"{task}/{_digest(messages).hex()[:12]}", messages, label, task, metadata)


def _digest(messages: Sequence[Message]) -> bytes:
    rendered = json.dumps([[m.role, m.content] for m in messages], ensure_ascii=True)
    return hashlib.sha256(rendered.encode("ascii")).digest()


def _seed_of(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1  # 31 bits: valid for numpy seeds too


def _filtered(prompts: Iterator[Prompt], *, held_out: bool) -> Iterator[Prompt]:
    """Keep one side; ends (instead of searching for ever) once so many draws in a row were of the other side."""
    barren = 0
    for prompt in prompts:
        if is_held_out(prompt.messages) == held_out:
            barren = 0
            yield prompt
        else:
            barren += 1
            if barren >= _MAX_BARREN_DRAWS:
                return


def _hint(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else f"choose one of {', '.join(sorted(known)[:12])}"


def _guarded(score: Callable[[str], float], answer: str, label: str | None) -> float:
    """Score a model's answer with a library that may raise on odd text; such an answer is wrong and scores 0.

    Only the text may be at fault: if the scorer also raises on the label itself, the exception is passed on.
    """
    try:
        value = float(score(answer))
    except Exception:  # noqa: BLE001 (scorers raise anything on odd text)
        if label is not None:
            score(label)
        return 0.0
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


@cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., bool]]:
    from math_verify import parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        # Both warn at every call without a time-out; below the level of errors they have nothing else to say.
        logging.getLogger(name).setLevel(logging.ERROR)
    return parse, verify


def _math_equal(label: str, answer: str) -> float:
    """Whether math-verify finds two answers equal. Its time-outs are signals, which only the main thread can take."""
    parse, verify = _math_verify()
    seconds = _MATH_TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None
    gold, given = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=seconds, raise_on_error=True) for text in (label, answer)
    )
    return float(verify(gold, given, timeout_seconds=seconds, raise_on_error=True))


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return None
