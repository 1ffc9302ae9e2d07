"""What errors say: whole sentences, each with one end, whatever their parts end in."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slime_tandem
from slime_tandem import errors
from slime_tandem.errors import ConfigError, TandemError, explain, sentence
from slime_tandem.tasks.first_look import Cause

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TandemError)]
TWICE = re.compile(r"[?!…]\.|(?<![.])[.][.](?![.])|\.{4,}|[.?!…]\s+[.?!…]")
"""Two ends in a row; three dots are one."""
WORDS = st.text("ab cd", min_size=1).map(str.strip).filter(bool)
PARTS = st.builds(lambda text, end: text + end, WORDS, st.sampled_from(["", ".", "?", "!", "...", "…", " "]))


@given(PARTS)
def test_a_sentence_has_one_end(text: str) -> None:
    made = sentence(text)
    assert made.startswith(text.rstrip())
    assert made[-1] in ".?!…"
    assert not TWICE.search(made)
    assert sentence(made) == made, "an end is not put twice"


@given(st.sampled_from(KINDS), PARTS, PARTS, st.lists(PARTS, max_size=3))
def test_every_kind_of_error_is_made_of_sentences(
    kind: type[TandemError], expected: str, remedy: str, more: list[str]
) -> None:
    error = kind("a.b", 1, expected, remedy)
    shown = [str(error), error.what, str(error.within("file.yaml")), explain("a.b", 1, expected, remedy)]
    if more:
        shown.append(str(kind.gather([error, *(kind("c", 2, part, part) for part in more)])))
    for text in shown:
        for line in text.splitlines():
            assert not TWICE.search(line), line
            assert line[-1] in ".?!…"
    assert str(error) == f"{error.what} Remedy: {sentence(remedy)}"
    assert (error.expected, error.remedy) == (expected, remedy), "the parts stay what they were"


@given(PARTS, PARTS)
def test_the_warning_of_equal_rewards_is_made_of_sentences(found: str, remedy: str) -> None:
    assert not TWICE.search(Cause(found, remedy, ()).warning)


def _literals() -> list[tuple[str, str]]:
    """(where, text) of every remedy and expectation that is written out in the package, f-strings with their gaps as `x`."""
    found = []
    for path in sorted(Path(slime_tandem.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error")):
                continue
            for part in node.args[2:4]:
                texts = [part.value] if isinstance(part, ast.Constant) else getattr(part, "values", [])
                words = [t if isinstance(t, str) else str(getattr(t, "value", "x")) for t in texts]
                if words and isinstance(part, ast.Constant | ast.JoinedStr):
                    found.append((f"{path.name}:{node.lineno}", "".join(words)))
    return found


def test_no_text_of_the_package_ends_twice() -> None:
    texts = _literals()
    assert len(texts) > 300, "the search still finds them"
    assert any(text.endswith("?") for _, text in texts), "the fault that this is about could come back"
    for where, text in texts:
        made = explain("f", 0, text, text)
        assert not re.search(r"[?!]\.(\s|$)|(?<![.])[.][.](\s|$)", made), f"{where}: {made}"


@pytest.mark.parametrize("end", ["?", "!", "."])
def test_a_remedy_with_an_end_of_its_own_by_hand(end: str) -> None:
    error = errors.EngineError("pretrain", 1, "exit code 0", f"is the disk full{end}")
    assert str(error) == f"pretrain=1: expected exit code 0. Remedy: is the disk full{end}"


def test_a_path_that_is_not_there_is_not_told_to_be_short_of_space(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no", "a path that is there"), (tmp_path, "a file, no folder")):
        with pytest.raises(OSError, match=r"No such|directory") as caught:
            path.read_bytes()
        assert f"expected {said}. Remedy: check the path." in str(ConfigError.of_os_error(path, caught.value))
