"""What an answer is worth: the answer in a response, and whether it is the label. Pure functions of text.

The answer is what stands in the last `<answer>...</answer>` of the response, else in its last `\\boxed{...}`, else nothing
(score 0). Labels are compared by math-verify, so that 1/2 is 0.5. Knows no task and no file.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from slime_tandem.errors import DataError
from slime_tandem.types import Prompt

_MATH_TIMEOUT_SECONDS = 5
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def extract_answer(text: str) -> str | None:
    r"""The answer in a response: the last `<answer>...</answer>`, else the last `\boxed{...}`, else None. Stripped.

    >>> extract_answer("<answer>3</answer> no <answer> 4 </answer>"), extract_answer(r"so \boxed{\frac{1}{2}}")
    ('4', '\\frac{1}{2}')
    """
    found = _ANSWER.findall(text)
    return str(found[-1]).strip() if found else _last_boxed(text)


def label_reward(label: str, answer: str) -> float:
    """1.0 for an extracted answer that is the label, or that math-verify finds equal to it; else 0.0.

    >>> label_reward("7", "7")
    1.0
    """
    if answer == label.strip():
        return 1.0
    return guarded(lambda text: _math_equal(label, text), answer, label)


def reward_by_label(prompt: Prompt, text: str) -> float:
    """The built-in reward `label`: 1.0 if the answer in `text` is the prompt's label, else 0.0.

    Raises DataError for a prompt without a label.

    >>> reward_by_label(Prompt("p", (), "1/2", "t"), "<answer>0.5</answer>")
    1.0
    """
    if prompt.label is None:
        raise DataError(
            f"label of prompt {prompt.prompt_id}", None, "the right answer", "add it, or set tasks[].reward"
        )
    answer = extract_answer(text)
    return 0.0 if answer is None else label_reward(prompt.label, answer)


def guarded(score: Callable[[str], float], answer: str, label: str | None) -> float:
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
