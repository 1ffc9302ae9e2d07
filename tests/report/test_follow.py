"""A run folder read on while it is written: half lines, rows that are dropped, files that come and go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.config import RunConfig
from slime_tandem.report.follow import MAX_PROBLEMS, RunFollower, Tail, _RawEnds
from slime_tandem.report.run_folder import RunWriter
from slime_tandem.report.transcripts import ends_of

from .conftest import eval_row, step_row


def tail_of(path: Path) -> tuple[Tail, list[bytes]]:
    lines: list[bytes] = []
    return Tail(path, lambda line, number: lines.append(line), lines.clear), lines


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=30), max_size=12), st.lists(st.integers(1, 40), max_size=12))
def test_a_tail_has_the_whole_lines_however_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "x"
    tail, read = tail_of(path)
    content = b"".join(line.replace(b"\n", b"") + b"\n" for line in lines) + b"half"
    at = 0
    with path.open("wb", buffering=0) as file:
        for cut in [*cuts, len(content)]:
            file.write(content[at : at + cut])
            at += cut
            tail.read()
            written = content[:at]
            assert read == written.split(b"\n")[:-1]


def test_a_half_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x"
    tail, read = tail_of(path)
    assert tail.read() is False, "no file yet"
    path.write_bytes(b"one\ntw")
    assert (tail.read(), read) == (True, [b"one"])
    assert tail.read() is False
    with path.open("ab") as file:
        file.write(b"o\n")
    assert (tail.read(), read) == (True, [b"one", b"two"])


@pytest.mark.parametrize("how", ["replaced", "cut", "cut and grown", "gone"])
def test_another_file_is_read_from_its_start(tmp_path: Path, how: str) -> None:
    path, new = tmp_path / "x", tmp_path / "new"
    path.write_bytes(b"one\ntwo\nthree\n")
    tail, read = tail_of(path)
    tail.read()
    if how == "replaced":
        new.write_bytes(b"one\ntwo\nother\n")
        new.replace(path)
        expected = [b"one", b"two", b"other"]
    elif how == "cut":
        with path.open("r+b") as file:
            file.truncate(4)
        expected = [b"one"]
    elif how == "cut and grown":
        with path.open("r+b") as file:
            file.truncate(4)
            file.seek(4)
            file.write(b"2222\n33333\n4\n")
        expected = [b"one", b"2222", b"33333", b"4"]
    else:
        path.unlink()
        expected = []
    assert tail.read() is True
    assert read == expected


def start(folder: Path, steps: int = 3) -> RunWriter:
    writer = RunWriter(folder, resume_step=None)
    writer.write_config(RunConfig(name="demo", train={"steps": steps}))
    return writer


def steps_of(follower: RunFollower) -> list[int]:
    return [row["step"] for row in follower.arms()[0].files.steps]


def test_a_run_is_followed_from_before_its_start_to_after_its_restart(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    assert follower.read() is False
    assert follower.config is None
    with start(tmp_path) as writer:
        assert follower.read() is True
        assert (follower.config is not None, steps_of(follower)) == (True, [])
        writer.write_eval(0, "before", eval_row(solo_accuracy=0.5))
        for step in range(3):
            writer.write_step(step, step_row(rollout__reward_mean=0.5))
            assert follower.read() is True
            assert steps_of(follower) == list(range(step + 1))
        assert follower.read() is False
    # Killed and gone on with from step 1: rows are dropped and written again.
    with RunWriter(tmp_path, resume_step=1) as writer:
        follower.read()
        assert steps_of(follower) == [0]
        writer.write_step(1, step_row(rollout__reward_mean=0.75))
        follower.read()
        assert steps_of(follower) == [0, 1]
        assert follower.arms()[0].files.steps[1]["rollout/reward_mean"] == 0.75
    # Deleted and begun anew.
    for path in tmp_path.iterdir():
        if path.is_file():
            path.unlink()
    assert follower.read() is True
    assert follower.config is None
    with start(tmp_path, steps=7):
        follower.read()
        assert follower.config is not None
        assert (follower.config.train.steps, steps_of(follower)) == (7, [])


def test_the_control_is_there_once_it_has_written(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    with start(tmp_path), RunWriter(tmp_path / "control", resume_step=None) as control:
        follower.read()
        assert [arm.key for arm in follower.arms()] == ["run"]
        control.write_step(0, step_row(rollout__reward_mean=0.5))
        follower.read()
        assert [arm.key for arm in follower.arms()] == ["run", "control"]


def test_what_cannot_be_used_is_said_once_and_left_out(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    with start(tmp_path) as writer:
        writer.write_step(0, step_row(rollout__reward_mean=0.5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, \x00\n' + json.dumps({"step": 2, "rollout/reward_mean": "much"}) + "\n[]\n")
    assert follower.read() is True
    assert steps_of(follower) == [0]
    assert len(follower.problems) == 3
    assert "metrics.jsonl:2" in follower.problems[0]
    assert follower.read() is False
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("".join(f"bad {i}\n" for i in range(100)))
    follower.read()
    assert len(follower.problems) == MAX_PROBLEMS
    assert "bad 99" in follower.problems[-1]


def test_a_broken_config_is_a_problem_until_it_is_mended(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    (tmp_path / "config.yaml").write_text("tandm: {}\n")
    assert follower.read() is True
    assert follower.config is None
    assert "tandm" in follower.problems[0]
    (tmp_path / "config.yaml").write_text("name: demo\n")
    assert follower.read() is True
    assert follower.config is not None


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["train", "eval", "other"]), st.booleans()), max_size=20))
def test_transcripts_by_their_heads_are_those_of_all_rows(rows: list[tuple[int, str, bool]]) -> None:
    """Whether a line begins as ours do or its keys stand in another order: the first and the last step are kept."""
    problems: list[str] = []
    raw = _RawEnds(Path("transcripts.jsonl"), problems.append)
    whole = []
    for number, (step, phase, ours) in enumerate(rows, 1):
        row = {"step": step, "phase": phase, "prompt": number}
        raw.add(json.dumps(row if ours else dict(reversed(row.items()))).encode(), number)
        if phase in ("eval", "train"):
            whole.append(row)
        assert raw.ends() == ends_of(whole)
    assert len(problems) == len(rows) - len(whole)


def test_a_line_that_is_no_transcript_is_a_problem() -> None:
    problems: list[str] = []
    raw = _RawEnds(Path("transcripts.jsonl"), problems.append)
    raw.add(b"nothing", 1)
    raw.add(b'{"step": 1, "phase": "train", ', 2)
    assert raw.ends()["train"].first == []
    assert ["transcripts.jsonl:1" in problems[0], "transcripts.jsonl:2" in problems[1]] == [True, True]
