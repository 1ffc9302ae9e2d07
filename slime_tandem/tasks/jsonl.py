"""The family `jsonl`: a file of the user's prompts and labels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from slime_tandem.config import AnswerKind, TaskSpec
from slime_tandem.errors import DataError
from slime_tandem.files import parse_json
from slime_tandem.tasks import labels as kinds
from slime_tandem.tasks.answers import label_reward
from slime_tandem.tasks.family import hint, make_prompt
from slime_tandem.types import Message, Prompt

_ROLES = ("system", "user", "assistant", "tool")
_MORE = ("tool_calls", "tool_call_id", "name", "reasoning_content")
"""Further keys of a message that chat templates take."""


class JsonlFamily:
    """A prompt file; the whole file is read and checked when this is made. Raises DataError as `read_jsonl`."""

    def __init__(self, spec: TaskSpec, where: str) -> None:
        assert spec.path is not None, "TaskSpec checks it"
        self.prompts = tuple(read_jsonl(Path(spec.path), labels=spec.by_label, answer=spec.answer))

    def stream(self, key: str) -> Iterator[Prompt]:
        """Whole shuffles of the file, so that no line comes twice before each came once."""
        epoch = 0
        while True:
            order = list(self.prompts)
            Random(f"{key}/{epoch}").shuffle(order)  # noqa: S311
            yield from order
            epoch += 1

    def reward(self, prompt: Prompt, text: str) -> float:
        """1.0 if the answer in `text` is the label."""
        return label_reward(prompt, text)


def read_jsonl(path: Path, *, labels: bool = True, answer: AnswerKind | None = None) -> list[Prompt]:
    """Prompts of a file with one JSON object a line, as slime users have them.

    Keys: `prompt` (a str, or a list of {role, content}; turns of tools may have the further keys of `_MORE`) or `messages` (a
    list), `label` (str or number; optional without `labels`), and optionally `task` (str) and `metadata` (object; its `tools`
    are offered to the models). Blank lines are skipped; other keys are refused, and so are labels that are not of the kind
    `answer`.

    Raises DataError with path and line number for the first bad line, and for a file that is missing, empty or not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028, which JSON may hold
    except FileNotFoundError:
        raise DataError("path", str(path), "an existing JSONL file", "check tasks.*.path") from None
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        expected = f"a readable UTF-8 text file ({why})"
        raise DataError("path", str(path), expected, "give a JSONL file, saved as UTF-8") from None
    prompts = [
        _parse_line(line, f"{path}:{number}", labels, answer)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise DataError("path", str(path), "at least one line", "add prompts to the file")
    return prompts


def _parse_line(line: str, where: str, labels: bool, answer: AnswerKind | None) -> Prompt:
    example = 'e.g. {"prompt": "2 + 2 =", "label": "4"}'
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(where, line[:80], f"one JSON object ({error})", example) from None
    if not isinstance(row, dict):
        raise DataError(where, line[:80], "a JSON object", example)
    for key in row:
        if key not in ("prompt", "messages", "label", "task", "metadata"):
            known = ["prompt", "messages", "label", "task", "metadata"]
            raise DataError(f"{where} key", key, "a known key", f"{hint(key, known)} or put it under `metadata`")
    if ("prompt" in row) == ("messages" in row):
        raise DataError(where, sorted(row), "either `prompt` or `messages`", example)
    key = "prompt" if "prompt" in row else "messages"
    label = row.get("label")
    if labels or label is not None:
        _check_label(label, where, answer)
    task, metadata = row.get("task", "jsonl"), row.get("metadata", {})
    if not isinstance(task, str) or not task:
        raise DataError(f"{where} task", task, "a non-empty string", "leave it out for `jsonl`")
    if not isinstance(metadata, dict):
        raise DataError(f"{where} metadata", metadata, "an object", "leave it out if there is none")
    messages = parse_messages(row[key], f"{where} {key}", may_be_text=key == "prompt")
    return make_prompt(task, messages, None if label is None else str(label), metadata)


def _check_label(label: object, where: str, answer: AnswerKind | None) -> None:
    fine = isinstance(label, (str, int, float)) and not isinstance(label, bool) and bool(str(label).strip())
    if not fine:
        raise DataError(f"{where} label", label, "a non-empty string or a number", "add the right answer")
    if not kinds.fits(str(label), answer):
        expected = f"a label that is {answer}, as tasks[].answer says"
        raise DataError(f"{where} label", label, expected, "correct the label, or set tasks[].answer to text")


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
            raise DataError(f"{where}.{i}", turn, "an object with text `role` and `content`", "correct this turn")
        if turn["role"] not in _ROLES:
            raise DataError(f"{where}.{i}.role", turn["role"], f"one of {', '.join(_ROLES)}", "correct the role")
        messages.append(Message.of(turn))
    return tuple(messages)
