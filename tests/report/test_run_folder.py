import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError, RunDirError
from slime_tandem.objective.advantages import reward_histograms
from slime_tandem.report import run_folder
from slime_tandem.report.metrics import row_keys
from slime_tandem.report.run_folder import RunWriter, Transcript, TranscriptToken, read_rows, transcript_of
from slime_tandem.types import AlignedScores, AuthorRun, Message, Prompt, SampleKey, ScoredSample, TandemSample

STEP = dict.fromkeys(row_keys("step"))
EVAL = dict.fromkeys(row_keys("eval"))
SAMPLE = Transcript("1 + 1 =", "2", "chain_sum", 1.0, "stop", (TranscriptToken(" 2", 1, -0.5, None),))


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def write(run_dir: Path, steps: range, resume_step: int | None = None) -> None:
    with RunWriter(run_dir, resume_step=resume_step) as writer:
        for step in steps:
            writer.write_step(step, {**STEP, "train/loss": step / 2})
            writer.write_transcripts(step, "train", [SAMPLE, SAMPLE])


def test_a_row_holds_its_step_and_every_name_with_null_for_what_is_missing(tmp_path):
    write(tmp_path, range(1))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert list(row) == ["step", *row_keys("step")]
    assert row["train/loss"] == 0.0
    assert row["opd/teacher_kl"] is None


def test_a_row_is_on_the_disk_before_the_call_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with RunWriter(tmp_path, resume_step=None) as writer:
        writer.write_step(0, STEP)
        assert synced == [(tmp_path / "metrics.jsonl").stat().st_size]


def test_resume_drops_what_it_will_write_again(tmp_path):
    write(tmp_path, range(5))
    write(tmp_path, range(3, 7), resume_step=3)
    assert steps_of(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4, 5, 6]
    assert steps_of(tmp_path / "transcripts.jsonl") == [s for s in range(7) for _ in range(2)]


def test_resume_survives_a_half_written_last_line(tmp_path):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    write(tmp_path, range(2, 4), resume_step=2)
    assert steps_of(path) == [0, 1, 2, 3]
    assert path.read_bytes().startswith(whole[: whole.index(b"\n") + 1])


@pytest.mark.parametrize("damage", ["lost", "cut", "a row less", "a row twice", "another order"])
def test_rows_of_steps_that_the_checkpoint_has_done_are_missed(tmp_path, damage):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    a, b, c = path.read_bytes().splitlines(keepends=True)
    left = {"cut": a + b + c[:-9], "a row less": a + c, "a row twice": a + b + b + c, "another order": b + a + c}
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(left[damage])
    with pytest.raises(
        RunDirError, match=r"metrics\.jsonl='\d rows, the first .* step \d'.* 3 steps that the checkpoint"
    ):
        RunWriter(tmp_path, resume_step=3)


def test_a_checkpoint_of_any_number_of_steps_takes_no_memory_for_each(tmp_path):
    write(tmp_path, range(3))
    with pytest.raises(RunDirError, match="3 rows, the first that is missing or out of place is that of step 3"):
        RunWriter(tmp_path, resume_step=10**18)


def test_a_broken_line_in_the_middle_is_no_half_line(tmp_path):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "{oops\n" + lines[2])
    with pytest.raises(RunDirError, match=r"metrics\.jsonl:2="):
        RunWriter(tmp_path, resume_step=2)


def test_an_evaluation_of_the_resumed_weights_stays_and_is_never_doubled(tmp_path):
    with RunWriter(tmp_path, resume_step=None) as writer:
        for step, phase in ((0, "before"), (2, "during"), (4, "during")):
            writer.write_eval(step, phase, {**EVAL, "eval/coverage": 0.5})
            writer.write_transcripts(step, "eval", [SAMPLE])
            writer.write_step(step, STEP)
            writer.write_step(step + 1, STEP)
    with RunWriter(tmp_path, resume_step=2) as writer:
        assert steps_of(tmp_path / "eval.jsonl") == [0, 2]
        writer.write_eval(2, "during", {**EVAL, "eval/coverage": 0.75})
        writer.write_transcripts(2, "eval", [SAMPLE])
        writer.write_eval(4, "after", EVAL)
    rows = list(read_rows(tmp_path / "eval.jsonl"))
    assert [(r["step"], r["phase"], r["eval/coverage"]) for r in rows] == [
        (0, "before", 0.5),
        (2, "during", 0.75),
        (4, "after", None),
    ]
    assert steps_of(tmp_path / "transcripts.jsonl") == [0, 2]


def test_a_step_is_never_written_twice(tmp_path):
    write(tmp_path, range(2))
    with RunWriter(tmp_path, resume_step=2) as writer, pytest.raises(AssertionError, match="step 1 after step 1"):
        writer.write_step(1, STEP)


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    write(tmp_path, range(2))
    with pytest.raises(RunDirError, match="no rows of an earlier run"):
        RunWriter(tmp_path, resume_step=None)


def test_nan_is_refused_and_leaves_no_row(tmp_path):
    with RunWriter(tmp_path, resume_step=None) as writer:
        with pytest.raises(DataError, match="train/pg_loss=nan"):
            writer.write_step(0, {**STEP, "train/pg_loss": math.nan})
        bad = Transcript("p", None, "t", 0.0, "stop", (TranscriptToken("x", 1, math.nan, None),))
        with pytest.raises(DataError, match=r"transcript.*log_prob"):
            writer.write_transcripts(0, "train", [bad])
    assert steps_of(tmp_path / "metrics.jsonl") == steps_of(tmp_path / "transcripts.jsonl") == []


def test_a_full_disk_names_file_and_remedy(tmp_path, monkeypatch):
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunWriter(tmp_path, resume_step=None) as writer:
        monkeypatch.setattr(os, "fsync", full)
        for attempt in (
            lambda: writer.write_step(0, STEP),
            lambda: writer.write_config(RunConfig()),
            lambda: writer.write_transcripts(0, "train", [SAMPLE]),
        ):
            with pytest.raises(RunDirError, match=r"No space left.*Remedy: free space .* resume the run"):
                attempt()
        monkeypatch.undo()


def test_a_row_that_did_not_fit_leaves_no_half_line(tmp_path, monkeypatch):
    with RunWriter(tmp_path, resume_step=None) as writer:
        writer.write_step(0, STEP)
        before = (tmp_path / "metrics.jsonl").read_bytes()

        def half(file, content):
            file.write(content[:50])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(run_folder, "_write_all", half)
        with pytest.raises(RunDirError):
            writer.write_step(1, STEP)
        monkeypatch.undo()
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        writer.write_step(1, STEP)
    assert steps_of(tmp_path / "metrics.jsonl") == [0, 1]


def test_a_disk_that_is_really_full(tmp_path):
    with RunWriter(tmp_path, resume_step=None) as writer:
        # Only now: reading the device back would never end.
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(RunDirError, match=r"metrics\.jsonl='No space left on device'"):
            writer.write_step(0, STEP)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="check the path"):
        RunWriter(tmp_path / "file" / "run", resume_step=None)


def test_config_is_resolved_and_resume_refuses_other_settings(tmp_path):
    config = RunConfig.load(overrides=["optimizer.lr=0.01"])
    with RunWriter(tmp_path, resume_step=None) as writer:
        writer.write_config(config)
    assert RunConfig.load(tmp_path / "config.yaml") == config
    with RunWriter(tmp_path, resume_step=0) as writer:
        with pytest.raises(RunDirError, match=r"^optimizer.lr=0.02: expected 0.01"):
            writer.write_config(RunConfig.load(overrides=["optimizer.lr=0.02"]))
        longer = RunConfig.load(overrides=["optimizer.lr=0.01", "train.steps=99", "engine.max_retries=9"])
        writer.write_config(longer)
    assert RunConfig.load(tmp_path / "config.yaml") == longer


def test_tensorboard_reads_what_was_written(tmp_path):
    write(tmp_path, range(2))
    (path,) = (tmp_path / "tb").iterdir()
    seen = {
        (event.step, value.tag): value.tensor.float_val[0]
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    }
    assert seen == {(0, "train/loss"): 0.0, (1, "train/loss"): 0.5}


def test_the_writer_needs_neither_torch_nor_tensorflow():
    code = "import sys, slime_tandem.report.run_folder; print({'torch', 'tensorflow'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def scored(teacher: AlignedScores | None, messages: tuple[Message, ...]) -> ScoredSample:
    prompt = Prompt("p", messages, "2", "chain_sum")
    runs = (AuthorRun(1, 0, 1, "0"), AuthorRun(0, 1, 2, "0"))
    sample = TandemSample(SampleKey(0, 0, 0), 0, prompt, (1,), (5, 6), (1, 0), (-0.25, -0.5), "length", " 2.", runs)
    return ScoredSample(sample, 0.5, teacher)


def test_a_transcript_keeps_only_proven_teacher_values():
    teacher = AlignedScores(np.array([-1.0, 0.0]), np.array([True, False]), {"boundary": 1})
    made = transcript_of(scored(teacher, (Message("user", "1 + 1 ="),)), [" 2", "."])
    assert made == Transcript(
        "1 + 1 =",
        "2",
        "chain_sum",
        0.5,
        "length",
        (TranscriptToken(" 2", 1, -0.25, -1.0), TranscriptToken(".", 0, -0.5, None)),
    )


def test_a_transcript_of_a_conversation_shows_the_roles_and_needs_a_text_per_token():
    messages = (Message("system", "Be short."), Message("user", "1 + 1 ="))
    made = transcript_of(scored(None, messages), [" 2", "."])
    assert made.prompt == "system: Be short.\n\nuser: 1 + 1 ="
    assert [t.teacher_log_prob for t in made.tokens] == [None, None]
    with pytest.raises(ValueError, match="zip"):
        transcript_of(scored(None, messages), [" 2"])


def test_rewards_by_task_go_to_their_file_and_to_tensorboard(tmp_path):
    histograms = reward_histograms([0.0, 1.0, 0.25, 5.0], ["sum", "sum", "sum", "gcd"])
    with RunWriter(tmp_path, resume_step=None) as writer:
        for step in (0, 1):
            writer.write_rewards(step, histograms)
        writer.write_step(0, STEP)
    with RunWriter(tmp_path, resume_step=1) as writer:
        writer.write_rewards(1, histograms)
    rows = [(row["step"], row["task"], row["samples"], row["p50"]) for row in read_rows(tmp_path / "rewards.jsonl")]
    assert rows == [(0, "gcd", 1, 5.0), (0, "sum", 3, 0.25), (1, "gcd", 1, 5.0), (1, "sum", 3, 0.25)]
    file = min((tmp_path / "tb").iterdir())
    events = [(e.step, v) for e in EventFileLoader(str(file)).Load() for v in e.summary.value]
    values = [(step, v) for step, v in events if v.tag.startswith("rollout/reward/")]
    assert [(step, v.tag) for step, v in values] == [
        (step, f"rollout/reward/{task}") for step in (0, 1) for task in ("gcd", "sum")
    ]
    table = tensor_util.make_ndarray(values[1][1].tensor)  # [bins, (from, to, count)]
    assert table[:, 2].sum() == 3
    assert table[-1, 1] == 1.0
