"""Files: whole or not at all; texts that cannot be read are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slime_tandem import files
from slime_tandem.errors import ConfigError, DataError, RunDirError
from slime_tandem.files import parse_json, read_text, require_place, resolved, whole_file


def test_a_file_takes_its_place_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.txt"
    with whole_file(target) as path:
        path.write_text("x")
        assert not target.exists()
    assert target.read_text() == "x"


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with whole_file(tmp_path / "a.txt") as path:
            path.write_text("x")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_text_that_cannot_be_read_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^record='{re.escape(str(path))}'"):
        read_text(path, "record")


def test_a_place_for_a_file_is_asked_for_before_the_work(tmp_path: Path) -> None:
    require_place(tmp_path / "new.json", "--output")
    for path in (tmp_path, tmp_path / "no" / "x.json"):
        with pytest.raises(RunDirError, match=f"--output={str(path)!r}: expected a file in an existing folder"):
            require_place(path, "--output")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "the key 'c' stands twice"),
        ('{"label": NaN}', "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ("[1e999]", "beyond the largest"),
        ("[18446744073709551616]", "more than 64 bits"),
        ("[-9223372036854775809]", "more than 64 bits"),
        ("1" * 5000, "more than 64 bits"),
        ("[" * 65 + "]" * 65, "more than 64 levels"),
        ("[" * 100_000, "more than 64 levels"),
        ('{"a":' * 65 + "1" + "}" * 65, "more than 64 levels"),
        ('["\\ud800"]', "surrogates not allowed"),
        (b'["\xff"]', "can't decode byte 0xff"),
        ("[1] 2", "Extra data"),
        ("", "Expecting value"),
    ],
)
def test_json_is_read_strictly(text: str | bytes, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_json(text)


def test_json_is_read_as_python_does_where_nothing_is_wrong() -> None:
    text = json.dumps({"a": [1, -2.5, None, True, "\u00e9\U0001f680\n"], "b": {}, "c": "[" * 200, "n": 2**64 - 1})
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    deep: object = 1
    for _ in range(64):
        deep = [deep]
    assert parse_json(json.dumps(deep)) == deep
    assert parse_json('["\\ud800"]', surrogates=True) == ["\ud800"]


def test_a_text_of_json_is_bounded_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_JSON", 10)
    with pytest.raises(ValueError, match="12 characters, more than 10"):
        parse_json('["12345678"]')


def test_a_path_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", Path("a\0b")):
        with pytest.raises(ConfigError, match="leads to one place"):
            resolved(path, "output")
    with pytest.raises(DataError, match="readable UTF-8 file"):
        read_text(Path("a\0b"), "FILE")
