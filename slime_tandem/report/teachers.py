"""What an evaluation keeps of its teachers beside its metrics: by teacher, what its KL is made of, prompt by prompt. Pure.

Where there is no reward the teachers are the evaluation; by the sums of each prompt a change has an interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from slime_tandem.report.statistics import Estimate, Ratio, ratio_difference

TEACHERS = "teachers"
"""What a row of eval.jsonl holds beside its metrics, where teachers have scored: `all` of them as one, and each `by_name`."""
_RESAMPLES = 2000
_LARGEST = 1e100


class TeacherFigures(TypedDict):
    """Of one teacher (or of all as one) on the held-out responses: `kl_sums` [N] nats over the `tokens` [N] of each prompt that
    it and the senior have both a log-prob of; `coverage`: share of the sampled tokens with one of it."""

    kl_sums: list[float]
    tokens: list[int]
    coverage: float | None


class EvaluationTeachers(TypedDict):
    """The teachers of an evaluation."""

    all: TeacherFigures
    by_name: dict[str, TeacherFigures]


def teacher_metric(name: str) -> str:
    """What a teacher's KL is called on dashboards, where there are several.

    >>> teacher_metric("math")
    'eval/teacher_kl/math'
    """
    return f"eval/teacher_kl/{name}"


def kl_of(figures: TeacherFigures) -> float | None:
    """Mean over tokens, nats; None where there is no token.

    >>> kl_of({"kl_sums": [1.0, 2.0], "tokens": [4, 2], "coverage": 1.0})
    0.5
    """
    tokens = sum(figures["tokens"])
    return math.fsum(figures["kl_sums"]) / tokens if tokens else None


def teacher_kls(row: Mapping[str, Any] | None) -> dict[str, float | None]:
    """The KL to each teacher of an evaluation, by name; nothing where there is but one, which `eval/teacher_kl` is of."""
    by_name = {} if row is None else row.get(TEACHERS, {}).get("by_name", {})
    return {name: kl_of(figures) for name, figures in by_name.items()} if len(by_name) > 1 else {}


def kl_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Estimate | None:
    """`after - before` of the KL to the teachers, paired by prompt; None where the rows do not say it prompt by prompt."""
    sides = [row.get(TEACHERS, {}).get("all") for row in (before, after)]
    if None in sides or len({len(side["tokens"]) for side in sides}) > 1:
        return None
    zero = "no token has a teacher's log-prob"
    ratios = [
        Ratio(np.array(side["kl_sums"], np.float64), np.array(side["tokens"], np.float64), zero) for side in sides
    ]
    return ratio_difference(*ratios, resamples=_RESAMPLES, seed=0)


def is_teachers(value: object) -> bool:
    """Whether a row's TEACHERS can be shown."""
    if not isinstance(value, dict) or value.keys() != {"all", "by_name"} or not isinstance(value["by_name"], dict):
        return False
    return all(_is_figures(figures) for figures in (value["all"], *value["by_name"].values()))


def _is_figures(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != TeacherFigures.__annotations__.keys():
        return False
    sums, tokens, coverage = value["kl_sums"], value["tokens"], value["coverage"]
    return (
        isinstance(sums, list)
        and isinstance(tokens, list)
        and len(sums) == len(tokens)
        and _are_numbers(sums, -_LARGEST)
        and _are_numbers(tokens, 0.0)
        and (coverage is None or _are_numbers([coverage], 0.0))
    )


def _are_numbers(values: Sequence[object], least: float) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) and least <= v <= _LARGEST for v in values)
