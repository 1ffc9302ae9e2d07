"""The family `jsonl`: a file of the user's prompts and labels, in the dialects of `columns` and the formats of `row_files`.

Prompts are not kept: a row is read when it is drawn. At the start `CHECKED` rows are read, all of a file that has no more, else
rows evenly spaced; what is wrong with another is told when it is drawn.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slime_tandem.config import AnswerKind, TaskSpec
from slime_tandem.errors import DataError
from slime_tandem.files import parse_json
from slime_tandem.tasks import labels as kinds
from slime_tandem.tasks.answers import label_reward
from slime_tandem.tasks.columns import WHOLE_LABEL, Keys, Picked, final_answer, no_label, pick
from slime_tandem.tasks.family import make_prompt
from slime_tandem.tasks.row_files import Rows, Source, open_rows
from slime_tandem.tasks.saved_datasets import HubName, from_hub, saved
from slime_tandem.tasks.shuffles import shuffled
from slime_tandem.types import Message, Prompt

CHECKED = 50_000
"""Rows that are read when a job starts: about two seconds."""
_TAGS = 10_000
_ROLES = ("system", "user", "assistant", "tool")
_MORE = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Further keys of a message that chat templates take."""


class JsonlFamily:
    """A prompt file. `labels`: every row needs one, of the kind `spec.answer`.

    A prompt is text, or a list of {role, content}; turns of tools may have the further keys of `_MORE`. Where the last turn is
    the assistant's, it is the answer, no part of the prompt. A worked solution is read for its final answer; it stays in the
    metadata.

    Raises DataError with file, line and reason for a bad row, unless `spec.bad_lines` is `skip`, and for a file that is
    missing, empty or no such file, or has no good row among those that are read now.

    `notes`: for people, what was taken for what. `tagged`: one prompt of each tag and teacher that was seen. `known_labels`:
    a label that takes mathematics to compare, if one was seen; None: not all were looked at.
    """

    def __init__(self, spec: TaskSpec, where: str, *, labels: bool = True) -> None:
        self._spec, self._labels = spec, labels and spec.by_label
        self._keys = Keys(spec.input_key, spec.label_key, spec.metadata_key)
        self._rows = _opened(spec)
        self._csv = spec.path is not None and bool({".csv", ".tsv"} & {s.lower() for s in Path(spec.path).suffixes})
        self.skipped = 0
        self._check()

    @property
    def source(self) -> Source:
        """What the rows are from."""
        return self._rows.source

    def __len__(self) -> int:
        """Rows, blank and bad ones among them."""
        return len(self._rows)

    @property
    def prompts(self) -> Iterator[Prompt]:
        """Every prompt, in order; each is read when it is asked for."""
        for number in range(len(self._rows)):
            if (prompt := self._at(number)) is not None:
                yield prompt

    def stream(self, key: str) -> Iterator[Prompt]:
        """Whole shuffles of the file, so that no line comes twice before each came once."""
        epoch = 0
        while True:
            for number in shuffled(len(self._rows), f"{key}/{epoch}"):
                if (prompt := self._at(number)) is not None:
                    yield prompt
            epoch += 1

    def reward(self, prompt: Prompt, text: str) -> float:
        """1.0 if the answer in `text` is the label."""
        return label_reward(prompt, text, self._spec.answer, self._spec.answer_format)

    def _at(self, number: int) -> Prompt | None:
        """The prompt of a row, None for a blank line and for a bad row that is skipped: `skipped` counts these."""
        try:
            read = self._read(number)
        except DataError:
            if self._spec.bad_lines == "refuse":
                raise
            self.skipped += 1
            return None
        return None if read is None else read.prompt

    def _read(self, number: int) -> _Read | None:
        where, row = self._rows[number]
        if row is None:
            return None
        if isinstance(row, DataError):
            raise row
        picked = pick(row, where, self._keys)
        if self._csv:
            picked = picked._replace(input=_cell(picked.input, f"{where} {picked.input_key}"))
        prompt, label_from = _prompt(picked, where, self._labels, self._spec)
        if prompt.label is None and self._labels:
            raise no_label(row, where, self._keys)
        return _Read(prompt, f"prompt from {picked.input_key}, {label_from}", picked.metadata)

    def _check(self) -> None:
        spec, name = self._spec, self.source.name
        every = max(1, math.ceil(len(self._rows) / CHECKED))
        good, bad, first_bad = 0, 0, None
        dialects: Counter[str] = Counter()
        others: dict[str, None] = {}
        tagged: dict[tuple[str, str], Prompt] = {}
        formula: list[str] = []
        for number in range(0, len(self._rows), every):
            try:
                if (read := self._read(number)) is None:
                    continue
            except DataError as error:
                if spec.bad_lines == "refuse":
                    raise
                bad, first_bad = bad + 1, first_bad or error
                continue
            good += 1
            prompt, dialect, metadata = read
            dialects[dialect] += 1
            others |= dict.fromkeys(metadata)
            if len(tagged) < _TAGS:
                tagged.setdefault((prompt.task, repr(prompt.metadata.get("teacher"))), prompt)
            if not formula and prompt.label is not None and kinds.needs_formulas(prompt.label, spec.answer):
                formula.append(prompt.label)
        if not good:
            if first_bad is not None:
                raise first_bad
            raise DataError("path", name, "at least one line", "add prompts to the file")
        self.tagged = tuple(tagged.values())
        self.known_labels = formula if formula or every == 1 else None
        of = "" if every == 1 else f" of {good + bad} looked at"
        notes = [f"{name}: {n} rows{of}: {dialect}" for dialect, n in dialects.most_common()]
        if others:
            notes.append(f"{name}: metadata: {', '.join(list(others)[:20])}{', ...' if len(others) > 20 else ''}")
        if first_bad is not None:
            notes.append(f"{name}: {bad} bad rows{of} skipped; the first: {first_bad.what}")
        if every > 1:
            notes.append(
                f"{name}: {len(self._rows)} rows, one in {every} looked at now, the others when they are drawn"
            )
        self.notes = tuple(notes)


class _Read(NamedTuple):
    prompt: Prompt
    dialect: str
    metadata: dict[str, Any]


class PromptFile(NamedTuple):
    """What was read: the prompts, and for people what was taken for what."""

    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...]


def read_prompts(spec: TaskSpec, *, labels: bool = True) -> PromptFile:
    """All prompts of a file at once, as `JsonlFamily` reads them, and its notes. Raises DataError as that."""
    family = JsonlFamily(spec, "tasks.0", labels=labels)
    return PromptFile(tuple(family.prompts), family.notes)


def _opened(spec: TaskSpec) -> Rows:
    if spec.hub is not None:
        return from_hub(HubName(spec.hub, spec.subset, spec.split, spec.revision))
    assert spec.path is not None, "TaskSpec checks it"
    path = Path(spec.path)
    if path.is_dir():
        return saved(path, spec.split)
    if spec.split is not None:
        expected = "none: a file has no splits, a folder that `datasets` saved may have"
        raise DataError("split", spec.split, expected, "leave tasks[].split out, or name a folder")
    return open_rows(path)


def _prompt(picked: Picked, where: str, needed: bool, spec: TaskSpec) -> tuple[Prompt, str]:
    """(the prompt of a row, what its label is from)."""
    task, key = picked.task, picked.input_key
    if not isinstance(task, str) or not task:
        raise DataError(f"{where} task", task, "a non-empty string", "leave it out for `jsonl`")
    turns = _sharegpt(picked.input, f"{where} {key}") if key == "conversations" else picked.input
    messages = parse_messages(turns, f"{where} {key}", may_be_text=key not in ("messages", "conversations"))
    label_key, given, metadata = picked.label_key, picked.label, picked.metadata
    if not any(message.content.strip() for message in messages):
        raise DataError(f"{where} {key}", turns, "a turn with text", "write the prompt, or leave the row out")
    if all(message.role == "assistant" for message in messages):
        raise DataError(f"{where} {key}", turns, "a turn that the assistant answers", "add the user's turn")
    if messages[-1].role == "assistant":
        messages, last = messages[:-1], messages[-1].content
        if "last_turn" in metadata:
            expected = "no such key beside a last turn of the assistant, which is kept there"
            raise DataError(f"{where} last_turn", metadata["last_turn"], expected, "rename it")
        metadata = metadata | {"last_turn": last}
        if label_key is None:
            label_key, given = "last turn", last
    if spec.instruction is not None:
        messages = _with_instruction(messages, spec.instruction, f"{where} {key}")
    if label_key is None:
        return make_prompt(task, messages, None, metadata), "no label"
    if label_key == "label" and given is None and not needed:
        return make_prompt(task, messages, None, metadata), "no label"
    label, of = _label(given, label_key, f"{where} {label_key}", needed, spec.answer)
    if label is None or (of and label_key != "last turn"):  # nothing is lost: a reward may want all of it
        metadata = metadata | ({} if "." in label_key or label_key == "last turn" else {label_key: given})
    if label is None and isinstance(given, list | dict | bool):
        return make_prompt(task, messages, None, metadata | {WHOLE_LABEL: given}), f"label, whole, from {label_key}"
    told = "no label" if label is None else f"label from {label_key}{' (its final answer)' if of else ''}"
    return make_prompt(task, messages, label, metadata), told


def _with_instruction(messages: tuple[Message, ...], text: str, where: str) -> tuple[Message, ...]:
    """The turns with a line more at the end of the user's last."""
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if last is None:
        expected, remedy = "a user's turn, to which tasks[].instruction is appended", "leave the instruction out"
        raise DataError(where, [m.role for m in messages], expected, remedy)
    turn = dataclasses.replace(messages[last], content=f"{messages[last].content}\n{text}")
    return (*messages[:last], turn, *messages[last + 1 :])


def _label(value: Any, key: str, where: str, needed: bool, answer: AnswerKind | None) -> tuple[str | None, bool]:
    """(the label, whether it is the final answer of a longer text). None for what is none, where none is needed."""
    if not needed and isinstance(value, list | dict | bool):
        return None, False
    found = value
    if isinstance(value, str) and key != "label":  # the key of this package is taken at its word
        found = final_answer(value)
        if found is None and value.strip() and needed:
            expected = "an answer: `#### 42`, a box, <answer>, or a text of one line"
            raise DataError(where, value[:200], expected, "name the answer's column by tasks[].label_key")
        if found is None and value.strip():
            found = value
    if not needed and key != "label" and (not isinstance(found, str | int | float) or isinstance(found, bool)):
        return None, False
    _check_label(found, where, answer)
    return str(found), found != value and str(found) != str(value).strip()


def _check_label(label: object, where: str, answer: AnswerKind | None) -> None:
    fine = isinstance(label, (str, int, float)) and not isinstance(label, bool) and bool(str(label).strip())
    if not fine:
        whole = "give one answer; a list or an object reaches a reward of your own (tasks[].reward) whole"
        remedy = whole if isinstance(label, list | dict) else "add the right answer"
        raise DataError(where, label, "a non-empty string or a number", remedy)
    if not kinds.fits(str(label), answer):
        expected = f"a label that is {answer}, as tasks[].answer says"
        raise DataError(where, label, expected, "correct the label, or set tasks[].answer to text")


_FROM = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""ShareGPT's names of roles."""


def _sharegpt(value: Any, where: str) -> Any:
    """Turns {from, value} as {role, content}, all else as it is. Raises DataError for a role that has no other name."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) and "from" in turn for turn in value):
        return value
    turns = []
    for i, turn in enumerate(value):
        if turn["from"] not in _FROM or set(turn) - {"from", "value", "weight"}:
            expected = f"an object with `from` (one of {', '.join(_FROM)}) and `value`"
            raise DataError(f"{where}.{i}", turn, expected, "write this turn as {role, content}")
        turns.append({"role": _FROM[turn["from"]], "content": turn.get("value")})
    return turns


def _cell(text: Any, where: str) -> Any:
    """A prompt in a cell of CSV: text, or messages as JSON. Messages as Python writes them are refused, not read as text."""
    if not isinstance(text, str) or not text.lstrip().startswith("[{") or "role" not in text:
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        expected = f"messages as JSON ({error})"
        raise DataError(where, text[:80], expected, "save them by json.dumps, or as JSON lines or Parquet") from None


def parse_messages(value: Any, where: str, *, may_be_text: bool) -> tuple[Message, ...]:
    """Chat turns of a JSON value: a list of {role, content, ...}, or a text where that may be; raises DataError at `where`."""
    if may_be_text and isinstance(value, str) and value.strip():
        return (Message("user", value),)
    expected = "a non-empty string or a list of messages" if may_be_text else "a list of messages"
    if not isinstance(value, list) or not value:
        raise DataError(where, value, expected, 'e.g. [{"role": "user", "content": "2 + 2 ="}]')
    messages = []
    for i, turn in enumerate(value):
        if (
            not isinstance(turn, dict)
            or not {"role", "content"} <= set(turn)
            or set(turn) - {"role", "content", *_MORE}
        ):
            more = f"an object with text `role` and `content`, and at most {', '.join(_MORE)} beside"
            raise DataError(f"{where}.{i}", turn, more, "correct this turn")
        if turn["content"] is None and turn.get("tool_calls"):  # as OpenAI's API has turns that call tools
            turn = turn | {"content": ""}
        if not isinstance(turn["content"], str):
            remedy = (
                "write its text as one string; images are not read"
                if isinstance(turn["content"], list)
                else "correct it"
            )
            raise DataError(f"{where}.{i}", turn, "an object with text `role` and `content`", remedy)
        if turn["role"] not in _ROLES:
            raise DataError(f"{where}.{i}.role", turn["role"], f"one of {', '.join(_ROLES)}", "correct the role")
        messages.append(Message.of(turn))
    return tuple(messages)
