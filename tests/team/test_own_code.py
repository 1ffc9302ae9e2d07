"""Modules of the user's are found, made and checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.config import RunConfig, TeacherSpec
from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.team.own_code import check_extensions, own_teacher


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Writes a module of the user's; gives the name of its `f`."""

    def make(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return f"{name}:f"

    return make


@pytest.fixture(scope="module")
def student(trio: Any) -> ModelTokenizer:
    return ModelTokenizer.load(trio.senior)


STUDENTS = """
class f:
    def __init__(self, spec, student):
        self.tokenizer = student
    async def log_probs(self, ids, start):
        return [-1.0] * (len(ids) - start)
"""


def test_a_scorer_in_the_students_own_tokens(own: Callable[[str, str], str], student: ModelTokenizer) -> None:
    spec = TeacherSpec(name="mine", scorer=own("sc_student", STUDENTS), tasks=("sums",), weight=2.0)
    teacher = own_teacher(spec, student, RunConfig())
    assert teacher.aligner.same_vocabulary
    assert teacher.bridge is not None
    assert (teacher.name, teacher.tasks, teacher.weight) == ("mine", frozenset({"sums"}), 2.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f = 3", "it is a int"),
        ("def f(spec, student): raise SystemExit(0)", r"one that can be made \(SystemExit: 0\)"),
        ("def f(spec, student): return student", "something that makes a scorer"),
        (STUDENTS.replace("= student", "= spec"), "something that makes a scorer"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_scorer_that_is_none(own: Callable[[str, str], str], student: ModelTokenizer, text: str, says: str) -> None:
    name = own(f"sc_bad_{abs(hash(text))}", text)
    with pytest.raises(ConfigError, match=says) as caught:
        own_teacher(TeacherSpec(name="mine", scorer=name), student, RunConfig())
    assert (caught.value.field, caught.value.value) == ("opd.teachers, mine: scorer", name)


def test_a_tokenizer_that_spells_something_else(own: Callable[[str, str], str], student: ModelTokenizer) -> None:
    text = """
import dataclasses
class f:
    def __init__(self, spec, student):
        self.tokenizer = Loud(student)
    async def log_probs(self, ids, start):
        return [-1.0] * (len(ids) - start)
class Loud:
    def __init__(self, student):
        self.tokens, self.end_of_turn, self.render = student.tokens, student.end_of_turn, student.render
        self.encode = lambda text: student.encode(text.upper())
"""
    with pytest.raises(ModelError, match="ids that spell"):
        own_teacher(TeacherSpec(name="mine", scorer=own("sc_loud", text)), student, RunConfig())


def test_selector_and_signal_are_looked_at_where_they_count() -> None:
    for opd, field in (
        ({"signal": "no_such:f"}, "opd.signal"),
        ({"selection": {"selector": "no_such:f", "ratio": 0.5}}, "opd.selection.selector"),
    ):
        config = RunConfig.from_mapping({"opd": opd})
        with pytest.raises(ConfigError, match=rf"{field}='no_such:f': .*ModuleNotFoundError"):
            check_extensions(config)
        check_extensions(RunConfig.from_mapping({"opd": {**opd, "enabled": False}}))
    check_extensions(RunConfig())
