"""Writes a run's folder: metrics, evaluations, transcripts, TensorBoard events and the resolved config.

A run folder: config.yaml, metrics.jsonl, eval.jsonl, transcripts.jsonl, tb/ (and, from others, checkpoints/,
summary.json, report.html, control/). Each JSON line is on the disk (fsync) before `write_*` returns, so a killed run
loses at most the line it was writing; a resumed run first drops what it is going to write again. What a run does is not known
here.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError, RunDirError
from slime_tandem.files import parse_json, whole_file
from slime_tandem.report.metrics import Row, check_row, part_metric, reward_metric
from slime_tandem.report.teachers import TEACHERS, EvaluationTeachers, teacher_kls, teacher_metric
from slime_tandem.report.trackers import Histogram, Trackers
from slime_tandem.types import ScoredSample

EvalPhase = Literal["before", "during", "after"]

RIGHT = "right"
"""What a row of eval.jsonl holds beside its metrics: by metric the share of right responses of each held-out prompt."""

REWARDS = "rewards"
"""The same for the mean reward of each held-out prompt, where rewards are own numbers that say nothing of right and wrong."""

# A resumed run may change these: they decide how long and where a run goes on, not what its past steps were.
_FREE_ON_RESUME = (
    "name",
    "runs_dir",
    "control",
    "train.steps",
    "train.save_every",
    "train.threads",
    "eval.every",
    "report_to",
)


@dataclass(frozen=True, slots=True)
class TranscriptToken:
    """One response token: its text, its author (1 senior, 0 junior, None: inserted text), the author's and the teacher's
    log-prob in nats.

    `teacher_log_prob` is None where the teacher has no proven token of the same bytes, or no teacher answered.
    """

    text: str
    author: int | None
    log_prob: float
    teacher_log_prob: float | None


@dataclass(frozen=True, slots=True)
class Transcript:
    """One response as the report shows it. `reward` None: it failed, or (`unasked`) there is none to be found."""

    prompt: str
    label: str | None
    task: str
    reward: float | None
    finish_reason: str
    tokens: tuple[TranscriptToken, ...]
    parts: Mapping[str, float] = field(default_factory=dict)
    unasked: bool = False


def transcript_of(scored: ScoredSample, token_texts: Sequence[str]) -> Transcript:
    """The transcript of one scored sample; `token_texts` [R] is the text of each response token.

    A prompt of one message is shown as it is, several messages with their roles.
    """
    s, teacher = scored.sample, scored.teacher
    messages = s.prompt.messages
    prompt = messages[0].content if len(messages) == 1 else "\n\n".join(f"{m.role}: {m.content}" for m in messages)
    teacher_log_probs: Sequence[float | None] = [None] * len(s.response_ids)
    if teacher is not None:
        teacher_log_probs = [float(v) if ok else None for v, ok in zip(teacher.log_probs, teacher.mask, strict=True)]
    authors = [a if sampled else None for a, sampled in zip(s.authorship_mask, s.loss_mask, strict=True)]
    tokens = tuple(
        TranscriptToken(*parts) for parts in zip(token_texts, authors, s.log_probs, teacher_log_probs, strict=True)
    )
    about = (prompt, s.prompt.label, s.prompt.task, scored.reward, s.finish_reason, tokens)
    return Transcript(*about, scored.parts, scored.unasked)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl file that this module wrote, without a last line that a kill cut short.

    Raises RunDirError for a broken line elsewhere, naming file and line.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                yield read_row(path, number, line)
    except FileNotFoundError:
        return


def read_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The row of one line; raises RunDirError, naming file and line, for one that this module did not write."""
    try:
        row = parse_json(line, surrogates=True)
        if not isinstance(row, dict):
            raise ValueError("no object")
        if type(row.get("step")) is not int or row["step"] < 0:
            raise ValueError(f"step {row.get('step')!r:.60}")
        if not isinstance(row.get("phase", ""), str):
            raise ValueError(f"phase {row['phase']!r:.60}")
    except ValueError as error:
        raise RunDirError(
            f"{path}:{number}",
            line[:80].decode("utf-8", "replace"),
            f"one JSON object with a `step` ({error})",
            "restore the file, or delete this line",
        ) from None
    return row


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a RunDirError that names `path` and says what to do."""
    try:
        yield
    except RunDirError:
        raise
    except OSError as error:
        raise RunDirError.of_os_error(path, error) from error


def require_same_settings(path: Path, config: RunConfig) -> None:
    """Raise RunDirError, naming the first difference, unless `path` holds the settings of `config` (servers may differ)."""
    old, new = _flat(RunConfig.load(path)), _flat(config)
    for name in sorted(old.keys() | new.keys()):
        if name in _FREE_ON_RESUME or name.startswith(("engine.", "tracking.")):
            continue
        if old.get(name) != new.get(name):
            raise RunDirError(
                name,
                new.get(name),
                f"{old.get(name)!r}, as in {path}",
                "resume with the same setting, or choose another `name`",
            )


class RunWriter:
    """Appends to one run folder; a context manager.

    `resume_step` is the step that will be written next by a resumed run, None for a new run. Rows of steps that will be
    run again are dropped. An evaluation at `resume_step` is of weights that the checkpoint holds: it stays, and writing
    the same (step, phase) again replaces it.

    `tensorboard`: write an event file, too. `trackers` get every row of a step and of an evaluation.

    Raises RunDirError if a new run finds rows of an older one, if a resumed one lacks rows of steps that are done, or if the
    folder cannot be written (full disk, rights).
    """

    def __init__(
        self, run_dir: Path, *, resume_step: int | None, tensorboard: bool = True, trackers: Trackers | None = None
    ) -> None:
        self.run_dir, self._trackers = run_dir, trackers
        self._resumed = resume_step is not None
        self._metrics, self._evals, self._transcripts, self._rewards, self._parts = (
            run_dir / name
            for name in ("metrics.jsonl", "eval.jsonl", "transcripts.jsonl", "rewards.jsonl", "reward_parts.jsonl")
        )
        with disk_errors(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            for path in (self._metrics, self._evals, self._transcripts, self._rewards, self._parts):
                if path.exists() and path.stat().st_size:
                    raise RunDirError(
                        "run folder", str(run_dir), "no rows of an earlier run", "resume it, or choose another `name`"
                    )
        else:
            self._require_past(resume_step)
            _keep_rows(self._metrics, lambda row: row["step"] < resume_step)
            _keep_rows(self._rewards, lambda row: row["step"] < resume_step)
            _keep_rows(self._evals, lambda row: row["step"] <= resume_step)
            _keep_rows(self._parts, lambda row: row["step"] < resume_step + (row.get("phase") == "eval"))
            _keep_rows(self._transcripts, lambda row: row["step"] < resume_step + (row.get("phase") == "eval"))
        last = max((row["step"] for row in read_rows(self._metrics)), default=None)
        self._last_step: int | None = last
        self._seen = {(row["step"], row.get("phase")) for row in read_rows(self._evals)}
        self._files: dict[Path, FileIO] = {}
        self._events = _EventFile(run_dir / "tb", purge_from=resume_step) if tensorboard else None

    def _require_past(self, steps: int) -> None:
        """A row for each step that the checkpoint has done: each was on the disk before the checkpoint was."""
        there = [row["step"] for row in read_rows(self._metrics) if row["step"] < steps]
        if len(there) != steps or there != list(range(len(there))):  # `steps` may be any number
            wrong = next(n for n, step in enumerate([*there, -1]) if step != n)
            raise RunDirError(
                str(self._metrics),
                f"{len(there)} rows, the first that is missing or out of place is that of step {wrong}",
                f"one row for each of the {steps} steps that the checkpoint has done, in order",
                "restore the file, or resume from a checkpoint before it, or start again under another `name`",
            )

    def require_rewards(self) -> None:
        """Raise RunDirError where the rewards of a step are lost that had some: they were on the disk before the checkpoint."""
        kept = {row["step"] for row in read_rows(self._rewards)}
        rewarded = [row["step"] for row in read_rows(self._metrics) if row.get("rollout/reward_mean") is not None]
        if lost := [step for step in rewarded if step not in kept]:
            raise RunDirError(
                str(self._rewards),
                f"no row of step {lost[0]}",
                "rewards of each step in metrics.jsonl that had some",
                "restore the file, or start again under another `name`",
            )

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml. A resumed run must have the settings it was started with, else RunDirError."""
        path = self.run_dir / "config.yaml"
        if self._resumed and path.exists():
            require_same_settings(path, config)
        replace_file(path, config.to_yaml().encode())

    def write_step(self, step: int, row: Row) -> None:
        """Append one training step. Raises AssertionError for another key set, DataError for a NaN, RunDirError."""
        check_row(row, "step")
        assert self._last_step is None or step > self._last_step, f"step {step} after step {self._last_step}"
        self._append(self._metrics, [{"step": step, **row}])
        self._last_step = step
        self._report(step, row)

    def write_rewards(self, step: int, histograms: Sequence[Mapping[str, Any]]) -> None:
        """Append a step's `objective.advantages.reward_histograms`, one row per task tag; the trackers get the
        histograms, too."""
        self._append(self._rewards, [{"step": step, **histogram} for histogram in histograms])
        if self._events is not None:
            self._events.histograms(step, histograms)
        if self._trackers is not None and histograms:
            drawn = {reward_metric(h["task"]): Histogram(tuple(h["counts"]), tuple(h["edges"])) for h in histograms}
            self._trackers.log(step, drawn)

    def write_parts(self, step: int, phase: Literal["train", "eval"], records: Sequence[Mapping[str, Any]]) -> None:
        """Append what `training.metrics.part_means` found of a step; those of an evaluation replace the ones of the same step.

        The trackers get the means, as `rollout/reward_parts/<task>/<part>` or `eval/reward_parts/...`.
        """
        if phase == "eval":
            _keep_rows(self._parts, lambda old: (old["step"], old.get("phase")) != (step, phase), self._files)
        if records:
            self._append(self._parts, [{"step": step, "phase": phase, **record} for record in records])
            room = "rollout" if phase == "train" else "eval"
            self._report(step, {part_metric(room, r["task"], r["part"]): r["mean"] for r in records})

    def write_eval(
        self,
        step: int,
        phase: EvalPhase,
        row: Row,
        right: Mapping[str, Sequence[float | None]] | None = None,
        teachers: EvaluationTeachers | None = None,
        rewards: Sequence[float | None] | None = None,
    ) -> None:
        """Append one evaluation, after `step` updates; the same (step, phase) again replaces the old row.

        `right`: by metric the share of right responses of each held-out prompt, in their order, for paired intervals;
        `teachers`: what the KL to each is made of; `rewards`: of each prompt, where nothing says which were right. The trackers
        get each teacher's KL, where there are several.
        """
        check_row(row, "eval")
        if (step, phase) in self._seen:
            _keep_rows(self._evals, lambda old: (old["step"], old.get("phase")) != (step, phase), self._files)
        beside: dict[str, Any] = {} if right is None else {RIGHT: dict(right)}
        beside |= {} if teachers is None else {TEACHERS: teachers}
        beside |= {} if rewards is None else {REWARDS: list(rewards)}
        self._append(self._evals, [{"step": step, "phase": phase, **row, **beside}])
        self._seen.add((step, phase))
        self._report(step, {**row, **{teacher_metric(name): kl for name, kl in teacher_kls(beside).items()}})

    def write_transcripts(self, step: int, phase: Literal["train", "eval"], transcripts: Sequence[Transcript]) -> None:
        """Append the transcripts of a step. Those of an evaluation replace the ones of the same step.

        Raises DataError for a log-prob or reward that is not finite, RunDirError.
        """
        for t in transcripts:
            _check_finite(t)
        if phase == "eval":
            _keep_rows(self._transcripts, lambda old: (old["step"], old.get("phase")) != (step, phase), self._files)
        self._append(self._transcripts, [{"step": step, "phase": phase, **_as_json(t)} for t in transcripts])

    def close(self) -> None:
        """Close all files; every row is already on the disk."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._events is not None:
            self._events.close()

    def _report(self, step: int, row: Row) -> None:
        if self._events is not None:
            self._events.scalars(step, row)
        if self._trackers is not None:
            self._trackers.log(step, row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _append(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        with disk_errors(path):
            if path not in self._files:
                self._files[path] = path.open("ab", buffering=0)
            file = self._files[path]
            size = os.fstat(file.fileno()).st_size
            try:
                _write_all(file, _lines(rows))
                os.fsync(file.fileno())
            except OSError:
                # No half line may stand before a later row.
                with suppress(OSError):
                    file.truncate(size)
                raise


class _EventFile:
    """A TensorBoard event file, written in this thread: no torch, no tensorflow, and a full disk is seen at once."""

    def __init__(self, folder: Path, *, purge_from: int | None) -> None:
        self.path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with disk_errors(self.path):
            folder.mkdir(exist_ok=True)
            self._file = self.path.open("wb", buffering=0)
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_from is not None:
            # A START mark makes TensorBoard forget events of this and later steps from earlier files.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time.time(), step=purge_from, session_log=start))

    def scalars(self, step: int, row: Row) -> None:
        """One event with all values of the row that exist."""
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in row.items() if value is not None
        ]
        self._write(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values)))

    def histograms(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """One event with a histogram of the rewards of each task."""
        values = [
            summary_pb2.Summary.Value(
                tag=reward_metric(r["task"]),
                histo=summary_pb2.HistogramProto(
                    min=r["min"],
                    max=r["max"],
                    num=r["samples"],
                    sum=r["mean"] * r["samples"],
                    bucket_limit=r["edges"][1:],
                    bucket=r["counts"],
                ),
            )
            for r in records
        ]
        self._write(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values)))

    def close(self) -> None:
        with disk_errors(self.path):
            self._file.close()

    def _write(self, event: event_pb2.Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        with disk_errors(self.path):
            _write_all(self._file, record.getvalue())


def _check_finite(t: Transcript) -> None:
    values = [] if t.reward is None else [("reward", t.reward)]
    values += [("log_prob", k.log_prob) for k in t.tokens]
    values += [("teacher_log_prob", k.teacher_log_prob) for k in t.tokens if k.teacher_log_prob is not None]
    for name, value in values:
        if not math.isfinite(value):
            raise DataError(
                f"transcript of {t.prompt[:40]!r}: {name}", value, "a finite number", "look at the engine's log"
            )


def _as_json(t: Transcript) -> dict[str, Any]:
    tokens = [
        {"text": k.text, "author": k.author, "log_prob": k.log_prob, "teacher_log_prob": k.teacher_log_prob}
        for k in t.tokens
    ]
    head = {"prompt": t.prompt, "label": t.label, "task": t.task, "reward": t.reward, "parts": dict(t.parts)}
    head |= {"unasked": True} if t.unasked else {}
    return {**head, "finish_reason": t.finish_reason, "tokens": tokens}


def _keep_rows(
    path: Path, keep: Callable[[Mapping[str, Any]], bool], open_files: dict[Path, FileIO] | None = None
) -> None:
    """Rewrite a .jsonl file with only the rows to keep; an open handle on it is closed first."""
    if not path.exists():
        return
    rows = list(read_rows(path))
    kept = [row for row in rows if keep(row)]
    whole = path.read_bytes().endswith(b"\n") or not path.stat().st_size
    if len(kept) == len(rows) and whole:
        return
    if open_files is not None and path in open_files:
        open_files.pop(path).close()
    replace_file(path, _lines(kept))


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)


def _write_all(file: FileIO, content: bytes) -> None:
    """Write without a buffer, which would try again at close what a full disk has refused."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file so that a kill leaves either the old or the new one."""
    with disk_errors(path), whole_file(path) as unfinished, unfinished.open("wb", buffering=0) as file:
        _write_all(file, content)


def _flat(config: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: Any) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(f"{prefix}.{key}" if prefix else key, value)
        else:
            flat[prefix] = node

    walk("", config.model_dump(mode="json"))
    return flat
