"""Files: whole or not at all; texts that cannot be read are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_tandem.errors import DataError, RunDirError
from slime_tandem.files import read_text, require_place, whole_file


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
