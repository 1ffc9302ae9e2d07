"""The examples in the docstrings are tests, and every module says what it is for."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import slime_tandem

ROOT = Path(slime_tandem.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WITH_EXAMPLES = [p for p in FILES if ">>> " in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=dotted)
def test_examples_hold(path: Path) -> None:
    result = doctest.testmod(importlib.import_module(dotted(path)))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("path", FILES, ids=dotted)
def test_the_module_docstring_says_its_duty(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text
    assert text.splitlines()[0].endswith((".", ":")) or len(text.splitlines()) > 1


def test_the_pure_modules_have_examples() -> None:
    names = {dotted(p).removeprefix("slime_tandem.") for p in WITH_EXAMPLES}
    assert names >= {
        "types", "errors", "config.run", "strategies", "rollout.handoff", "rollout.writer", "rollout.boundaries",
        "rollout.transcript", "tokens.token_bytes",
        "distill.alignment", "objective.advantages", "objective.kl", "objective.logprobs", "objective.loss",
    }  # fmt: skip
