r"""Which column of a row is the prompt, which the label, which metadata; and the final answer in a worked solution.

| column | is | of |
|---|---|---|
| `prompt` (text or messages), `messages`, `conversations`, `question`, `problem` | the prompt | slime, TRL, verl, DAPO, \
GSM8K, MATH, OpenR1, ShareGPT |
| `label`, `answer`, `reward_model.ground_truth`, `ground_truth`, `solution` | the label; the first that there is | the same |
| `task`, `metadata` | tag and object of this package | slime |
| all others | metadata, under their own names | |

`tasks[].input_key`, `label_key` and `metadata_key` name others; a dot leads into an object. Knows no file and no model.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

from slime_tandem.errors import DataError
from slime_tandem.tasks.answers import extract_answer
from slime_tandem.tasks.family import hint

PROMPTS = ("prompt", "messages", "conversations", "question", "problem")
LABELS = ("label", "answer", "reward_model.ground_truth", "ground_truth", "solution")
CHOICES = ("choices", "options", "endings")
"""Answers to choose from, beside a question that does not hold them (MMLU, ARC, AQuA, HellaSwag)."""
NO_TEXT = ("images", "image", "videos", "video", "audios", "audio")
"""What a prompt shows beside its text (verl's `images`, TRL's)."""
_PAIR = ("chosen", "rejected")
_LONGEST_LINE = 200
"""Characters of a line that may be an answer as it is; a longer one is a solution."""
WHOLE_LABEL = "whole_label"
"""The key of a prompt's metadata for a label that is no one answer (a list, an object, true), as own rewards get it."""
RESERVED = ("spec", WHOLE_LABEL)
"""Keys of a prompt's metadata that this package writes."""


class Keys(NamedTuple):
    """The columns that a task names; None: the usual ones."""

    input: str | None = None
    label: str | None = None
    metadata: str | None = None


class Picked(NamedTuple):
    """The columns of one row: names and values. `label_key` is None if there is no label."""

    input_key: str
    input: Any
    label_key: str | None
    label: Any
    metadata: dict[str, Any]
    task: Any


def pick(row: Mapping[str, Any], where: str, keys: Keys) -> Picked:
    """The columns of a row; raises DataError at `where` if it has no prompt, or two, or lacks a column that is named."""
    input_key = _input_key(row, where, keys)
    if shown := next((key for key in NO_TEXT if isinstance(row.get(key), str | list | dict) and row[key]), None):
        expected = f"prompts of text alone: no model would see what is in the column `{shown}`"
        raise DataError(f"{where} {shown}", f"{row[shown]!r:.80}", expected, "leave these rows out, or drop the column")
    label_key, label = None, None
    for key in LABELS if keys.label is None else (keys.label,):
        found, value = _at(row, key)
        if found and key != input_key:
            label_key, label = key, value
            break
    metadata_key = keys.metadata or "metadata"
    found, given = _at(row, metadata_key)
    if keys.metadata is not None and not found:
        raise _absent(row, where, keys.metadata, "metadata_key")
    if found and not isinstance(given, dict):
        raise DataError(f"{where} {metadata_key}", given, "an object", "leave it out if there is none")
    taken = {input_key, label_key, metadata_key, "task"}
    rest = {key: value for key, value in row.items() if key not in taken}
    metadata = dict(given or {})
    if ours := next((key for key in (*metadata, *rest) if key in RESERVED), None):
        raise DataError(f"{where} key", ours, "a name that this package does not use itself", "rename the column")
    for key in (*rest, *([label_key] if label_key not in (None, "label") else ())):
        if key in metadata:
            raise DataError(f"{where} key", key, "a column that is not in the metadata, too", "rename the column")
    return Picked(input_key, _at(row, input_key)[1], label_key, label, metadata | rest, row.get("task", "jsonl"))


def no_label(row: Mapping[str, Any], where: str, keys: Keys) -> DataError:
    """What to say of a row that has no label and needs one."""
    if {*_PAIR} <= {*row}:
        expected = "a label; `chosen` and `rejected` are preferences, from which no reward of this package learns"
        remedy = "add labels, name a reward by tasks[].reward, or distil alone (objective.reward_coef=0, control=false)"
        return DataError(f"{where} {keys.label or 'label'}", None, expected, remedy)
    rest = [key for key in row if key not in (*PROMPTS, "task", "metadata")]
    near = [word for key in rest for word in difflib.get_close_matches(key, LABELS, n=1, cutoff=0.75)]
    named = (
        f"name its column by tasks[].label_key; there are {', '.join(row)[:200]}; distillation alone "
        "(objective.reward_coef=0, control=false) needs none"
    )
    remedy = f"did you mean `{near[0]}`?" if near else named
    return DataError(f"{where} {keys.label or 'label'}", None, "a non-empty string or a number", remedy)


def final_answer(text: str) -> str | None:
    r"""The answer in a worked solution: behind its last `####`, else in `<answer>` or `\boxed{}`, else all of one short line.

    >>> final_answer("3 + 4 = 7 apples.\n#### 7"), final_answer(r"Thus \boxed{34}."), final_answer(" 12 "), final_answer("a\nb")
    ('7', '34', '12', None)
    """
    if "####" in text:
        return extract_answer(text, "hash")
    found = extract_answer(text)
    if found is not None:
        return found or None
    text = text.strip()
    return text if text and "\n" not in text and len(text) <= _LONGEST_LINE else None


def _input_key(row: Mapping[str, Any], where: str, keys: Keys) -> str:
    if keys.input is not None:
        if not _at(row, keys.input)[0]:
            raise _absent(row, where, keys.input, "input_key")
        return keys.input
    there = [key for key in PROMPTS if key in row]
    given = next((key for key in CHOICES if isinstance(row.get(key), list | dict)), None)
    if given is not None:
        expected = f"a prompt that holds its choices: `{given}` is a column of its own, no model would see it"
        raise DataError(where, sorted(row), expected, "write them into the prompt, and the right letter into `label`")
    if there[:2] == ["prompt", "messages"] or not there:
        expected = "either `prompt` or `messages` (or `conversations`, `question`, `problem`)"
        raise DataError(where, sorted(row), expected, _unnamed(row))
    return there[0]


def _unnamed(row: Mapping[str, Any]) -> str:
    """What to do with a row without a prompt's column."""
    if {"instruction", "input"} <= {*row}:
        return "join `instruction` and `input` into one column `prompt`, or name one of them by tasks[].input_key"
    if {*_PAIR} <= {*row}:
        return (
            "give the prompt that both answers share a column of its own; no reward of this package learns from pairs"
        )
    return "name the prompt's column by tasks[].input_key"


def _absent(row: Mapping[str, Any], where: str, key: str, setting: str) -> DataError:
    return DataError(where, sorted(row), f"the column {key} of tasks[].{setting}", hint(key, list(row)))


def _at(row: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """(whether it is there, the value) of a column, or of a dotted name in an object (`reward_model.ground_truth`)."""
    if key in row:
        return True, row[key]
    first, dot, rest = key.partition(".")
    inner = row.get(first)
    return _at(inner, rest) if dot and isinstance(inner, dict) else (False, None)
