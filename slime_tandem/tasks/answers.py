"""What an answer is worth: the answer in a response, and whether it is the label. Linear in the length of the response.

The answer is what `tasks[].answer_format` says; by default what stands in the last `<answer>...</answer>` of the response, else
in its last `\\boxed{...}`, else nothing (score 0). When it is the label says `labels`. Knows no task and no file.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

from slime_tandem.config import AnswerKind
from slime_tandem.errors import DataError
from slime_tandem.tasks import labels
from slime_tandem.tasks.formulas import formulas_equal
from slime_tandem.types import Prompt

_LONGEST_SEARCHED = 10_000
_OPEN, _CLOSE = "<answer>", "</answer>"


def extract_answer(text: str, answer_format: str | None = None) -> str | None:
    r"""The answer in a response, stripped, None where there is none: as `answer_format` (`TaskSpec`) says; by default the last
    `<answer>...</answer>`, else the last `\boxed{...}`.

    >>> extract_answer("<answer>3</answer> no <answer> 4 </answer>"), extract_answer(r"so \boxed{\frac{1}{2}}")
    ('4', '\\frac{1}{2}')
    >>> extract_answer("7 - 3 = 4.", "last_number"), extract_answer("It is B.", "choice")
    ('4', 'B')
    >>> extract_answer("= 4 m", r"regex:= (\d+)")
    '4'
    """
    if answer_format is None:
        found = _last_tags(text)
        return _last_boxed(text) if found is None else found
    if answer_format.startswith("regex:"):
        return _last_match(_compiled(answer_format.removeprefix("regex:")), text)
    return FORMATS[answer_format](text)


def quick_label_reward(
    prompt: Prompt, text: str, answer: AnswerKind | None = None, answer_format: str | None = None
) -> float | None:
    """What `label_reward` gives, where texts and numbers are compared; None where it takes mathematics, or a long search.

    >>> [quick_label_reward(Prompt("p", (), "1/2", "t"), f"<answer>{a}</answer>") for a in ("0.5", "2", "x+1")]
    [1.0, 0.0, None]
    """
    if answer_format is not None and answer_format.startswith("regex:") and len(text) > _LONGEST_SEARCHED:
        return None  # one search is linear, all matches of a pattern may not be: a worker has a limit
    given = extract_answer(text, answer_format)
    if given is None:
        return 0.0
    same = labels.equal(_label(prompt), given, answer)
    return None if same is None else float(same)


def label_reward(
    prompt: Prompt, text: str, answer: AnswerKind | None = None, answer_format: str | None = None
) -> float:
    r"""The built-in reward `label`: 1.0 if the answer in `text` is the prompt's label, else 0.0.

    It may ask math-verify, which has no bound: a worker calls it. Raises DataError for a prompt without a label.

    >>> label_reward(Prompt("p", (), "1/2", "t"), r"<answer>\frac{2}{4}</answer>")
    1.0
    """
    given, label = extract_answer(text, answer_format), _label(prompt)
    if given is None:
        return 0.0

    def score(text: str) -> float:
        return float(bool(labels.equal(label, text, answer, formulas_equal)))

    return guarded(score, given, None)


def _label(prompt: Prompt) -> str:
    if prompt.label is None:
        raise DataError(
            f"label of prompt {prompt.prompt_id}", None, "the right answer", "add it, or set tasks[].reward"
        )
    return prompt.label


def guarded(score: Callable[[str], float], answer: str, label: str | None) -> float:
    """Score a model's answer with a library that may raise on odd text; such an answer is wrong and scores 0.

    Only the text may be at fault: if the scorer also raises on the label itself, the exception is passed on. So is the end of
    memory or stack, which a worker counts.
    """
    try:
        value = float(score(answer))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 (scorers raise anything on odd text)
        if label is not None:
            score(label)
        return 0.0
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def _last_tags(text: str) -> str | None:
    begin = text.rfind(_OPEN, 0, max(text.rfind(_CLOSE), 0))
    if begin < 0:
        return None
    begin += len(_OPEN)
    return text[begin : text.index(_CLOSE, begin)].strip()


def _last_hash(text: str) -> str | None:
    return text.rpartition("####")[2].strip().split("\n")[0].strip() or None if "####" in text else None


def _last_line(text: str) -> str | None:
    return text.rstrip().rpartition("\n")[2].strip() or None


def _last_match(pattern: Any, text: str) -> str | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007 - the last one
        pass
    if found is None:
        return None
    answer: str | None = found[1] if pattern.groups else found[0]
    return (answer or "").strip() or None


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> Any:
    import re2  # whose time is linear in the text; only for those who name a pattern

    return re2.compile(pattern)


_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-\u2212])?(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?%?"
)
_CHOICE = re.compile(r"(?<![\w'])([A-J])(?![\w'])(?! [a-z])|(?<![\w'])([B-HJ])(?![\w'])")
"""A letter that stands alone; `A` and `I` before a word are words."""


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def _last_choice(text: str) -> str | None:
    found = _CHOICE.findall(text)
    return "".join(found[-1]) if found else None


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


FORMATS: dict[str, Callable[[str], str | None]] = {
    "tags": _last_tags,
    "boxed": _last_boxed,
    "hash": _last_hash,
    "last_number": _last_number,
    "last_line": _last_line,
    "choice": _last_choice,
}
"""What finds the answer, by `tasks[].answer_format`."""
