"""What a user's own modules bring to distillation, found and checked before anything is started: scorers, selector, signal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_tandem.config import RunConfig, TeacherSpec
from slime_tandem.distill.alignment import Aligner
from slime_tandem.distill.scorer import Scorer, ScorerEngine, TokenizerOfScorer
from slime_tandem.distill.selection import find_ranker
from slime_tandem.distill.teacher import Teacher, check_teacher
from slime_tandem.errors import ConfigError
from slime_tandem.extensions import find, made
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.objective.divergence import find_divergence


def check_extensions(config: RunConfig) -> None:
    """Raise ConfigError for a selector or a signal of the user's own that cannot be imported, or that fails on a small example.

    Families and rewards are checked where `tasks.families.TaskSet` is made, environments where `Environments` are.
    """
    opd = config.opd
    if opd.enabled and opd.signal != "sampled":
        find_divergence(opd.signal)
    if opd.enabled and opd.selection.mask != "full":
        find_ranker(opd.selection.mask)


def own_teacher(spec: TeacherSpec, student: ModelTokenizer, config: RunConfig) -> Teacher:
    """The teacher of an entry with a `scorer`, whose student has this tokenizer.

    Raises ConfigError for a scorer that cannot be imported or made or is none, ModelError for a tokenizer that none can align.
    """
    assert spec.scorer is not None
    field = f"opd.teachers, {spec.name}: scorer"
    make: Callable[[TeacherSpec, ModelTokenizer], object] = find(spec.scorer, {}, field)
    scorer = made(make, spec, student, field=field, name=spec.scorer)
    if not isinstance(scorer, Scorer) or not isinstance(scorer.tokenizer, TokenizerOfScorer):
        expected = "something that makes a scorer (`tokenizer` and `log_probs`)"
        raise ConfigError(field, spec.scorer, expected, "see docs/extending.md")
    t, engine = scorer.tokenizer, ScorerEngine(scorer, spec.name)
    options: dict[str, Any] = {
        "name": spec.name,
        "tasks": None if spec.tasks is None else frozenset(spec.tasks),
        "weight": spec.weight,
        "max_batch": config.engine.max_batch,
        "concurrency": config.opd.concurrency,
    }
    if isinstance(t, ModelTokenizer):
        teacher = Teacher.by_template(engine, student.chat(), t.chat(spec.template_kwargs), spec.thinking, **options)
    else:
        aligner = Aligner(student.tokens, t.tokens, end_of_turn=t.end_of_turn, thinking=spec.thinking)
        teacher = Teacher(engine, aligner, t.render, t.encode, getattr(t, "bridge", None), **options)
    check_teacher(teacher)
    return teacher
