"""A run's checkpoints as folders: found by step, dropped when old, replaced whole (what they hold: test_policy.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_tandem.errors import CheckpointError
from slime_tandem.megatron.checkpoint import drop_older, newest_checkpoint, read_state, replacing, step_folder


def test_the_newest_is_found_by_its_step_and_half_written_ones_are_not_seen(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    for step in (9, 100, 20):
        step_folder(tmp_path, step).mkdir()
    (tmp_path / ".step-000200.partial-x").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000100"
    drop_older(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000020", "step-000100"]
    drop_older(tmp_path, keep=2)
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "c"
    with replacing(target) as partial:
        (partial / "old").write_text("old")

    def spoilt() -> None:
        with replacing(target) as partial:
            (partial / "new").write_text("new")
            raise OSError("a disk that is gone")

    with pytest.raises(CheckpointError, match="expected a folder that can be written"):
        spoilt()
    assert [p.name for p in target.iterdir()] == ["old"]
    with replacing(target) as partial:
        (partial / "new").write_text("new")
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["c"], "nothing half-written stays"


def test_a_folder_without_a_state_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unreadable state\.json.*Remedy: delete this folder to resume"):
        read_state(tmp_path)
