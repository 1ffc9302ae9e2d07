"""What an answer is worth: the answer in a response, and whether it is the label. Linear in the length of the response.

The answer is what stands in the last `<answer>...</answer>` of the response, else in its last `\\boxed{...}`, else nothing
(score 0). When it is the label says `labels`. Knows no task and no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from slime_tandem.config import AnswerKind
from slime_tandem.errors import DataError
from slime_tandem.tasks import labels
from slime_tandem.tasks.formulas import formulas_equal
from slime_tandem.types import Prompt

_OPEN, _CLOSE = "<answer>", "</answer>"


def extract_answer(text: str) -> str | None:
    r"""The answer in a response: the last `<answer>...</answer>`, else the last `\boxed{...}`, else None. Stripped.

    >>> extract_answer("<answer>3</answer> no <answer> 4 </answer>"), extract_answer(r"so \boxed{\frac{1}{2}}")
    ('4', '\\frac{1}{2}')
    """
    begin = text.rfind(_OPEN, 0, max(text.rfind(_CLOSE), 0))
    if begin < 0:
        return _last_boxed(text)
    begin += len(_OPEN)
    return text[begin : text.index(_CLOSE, begin)].strip()


def quick_label_reward(prompt: Prompt, text: str, answer: AnswerKind | None = None) -> float | None:
    """What `label_reward` gives, where comparing texts and numbers is enough; None where it takes mathematics.

    >>> [quick_label_reward(Prompt("p", (), "1/2", "t"), f"<answer>{a}</answer>") for a in ("0.5", "2", "x+1")]
    [1.0, 0.0, None]
    """
    given = extract_answer(text)
    if given is None:
        return 0.0
    same = labels.equal(_label(prompt), given, answer)
    return None if same is None else float(same)


def label_reward(prompt: Prompt, text: str, answer: AnswerKind | None = None) -> float:
    r"""The built-in reward `label`: 1.0 if the answer in `text` is the prompt's label, else 0.0.

    It may ask math-verify, which has no bound: a worker calls it. Raises DataError for a prompt without a label.

    >>> label_reward(Prompt("p", (), "1/2", "t"), r"<answer>\frac{2}{4}</answer>")
    1.0
    """
    given, label = extract_answer(text), _label(prompt)
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
