"""The run configuration: one tree of checked settings, built from YAML and `--set key=value`.

Unknown or misspelt keys, wrong types, out-of-range values and contradictions raise `ConfigError` with the dotted name
of the field, its value, what was expected and the remedy. The resolved tree is written beside every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from slime_tandem.config import load
from slime_tandem.config.contradictions import first_contradiction
from slime_tandem.config.opd import TeacherSpec
from slime_tandem.config.sections import Sections, TaskSpec
from slime_tandem.errors import ConfigError


class RunConfig(Sections):
    """Everything one run needs.

    >>> RunConfig.load(overrides=["tandem.prob_senior=0.25", "optimizer.lr=1e-5"]).tandem.prob_senior
    0.25
    """

    @model_validator(mode="after")
    def _no_contradictions(self) -> RunConfig:
        if problem := first_contradiction(self):
            raise problem
        return self

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return Path(self.runs_dir) / self.name

    @property
    def needs_labels(self) -> bool:
        """Whether rewards are learnt from, by the run or by its control; pure distillation needs no labels."""
        return self.objective.reward_coef > 0 or self.control

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a YAML file (safe loader), apply `key=value` overrides (values are YAML), check everything.

        Raises ConfigError for a missing file, broken YAML, or any setting that does not hold.
        """
        tree: dict[str, Any] = {}
        if path is not None:
            tree = load.read_yaml_mapping(Path(path))
        for item in overrides:
            load.set_override(tree, item)
        return cls.from_mapping(tree)

    @classmethod
    def from_mapping(cls, tree: Mapping[str, Any]) -> RunConfig:
        """Build from a nested mapping; raises ConfigError that lists every problem found."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError.gather(list(load.problems(error, cls, ENTRIES))) from None

    def to_yaml(self) -> str:
        """The resolved tree as YAML; `load` of it gives an equal config."""
        tree = self.model_dump()
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        if set(text) & set("\x85\u2028\u2029"):  # PyYAML writes these line breaks as they are and reads them as spaces
            text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=False)
        return text


def fields_of(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every leaf setting as (dotted name, default, description); `--help` and the unknown-key hint use it."""
    return load.fields_of(model, prefix)


def choices_of(name: str) -> tuple[str, ...]:
    """The literal values, or built-in names, that the setting with this dotted name takes; empty for any other kind of setting.

    >>> choices_of("objective.scale_advantages"), choices_of("optimizer.lr")
    (('none', 'std', 'mad'), ())
    """
    return load.choices_of(RunConfig, name)


ENTRIES: dict[str, type[BaseModel]] = {"tasks": TaskSpec, "opd.teachers": TeacherSpec}
"""Settings that are lists, and what each entry is."""
