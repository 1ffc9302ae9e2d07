"""Names that stand for code: built in, a user's own, or refused with the setting's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_tandem.errors import ConfigError
from slime_tandem.extensions import find

BUILT_IN = {"word": len, "chunk": repr}


def test_built_in_names_come_first() -> None:
    assert find("word", BUILT_IN, "x") is len


def test_a_module_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_things.py").write_text("def f(): return 3\nN = 4\nraise_at = None\n")
    (tmp_path / "own_broken.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("own_things:f", {}, "x")() == 3  # type: ignore[var-annotated]
    for name, why in (
        ("own_things:N", "it is a int"),
        ("own_things:gone", "AttributeError"),
        ("no_such_module_at_all:f", "ModuleNotFoundError"),
        ("own_broken:f", "SystemExit"),
        (":f", "no built-in one"),
        ("own_things:", "no built-in one"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            find(name, BUILT_IN, "tasks.0.reward")
        assert (caught.value.field, caught.value.value) == ("tasks.0.reward", name)


def test_a_kind_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no str"):
        find("math:pi", {}, "x", str)
    assert find("string:digits", {}, "x", str) == "0123456789"


def test_a_near_miss_is_pointed_out() -> None:
    with pytest.raises(ConfigError, match="did you mean 'word'"):
        find("words", BUILT_IN, "x")
