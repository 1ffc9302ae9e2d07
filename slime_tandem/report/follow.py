"""A run folder read while it is being written: what is there now, read on from where it was read last.

Only whole lines count, so a half-written one waits for its end. A file that was replaced or cut (a resumed or restarted run
drops rows that it writes again) is read from its start; a folder whose run is gone is empty until the next one. A line that
cannot be used is named among the `problems`, once, and left out: whoever watches a run must not lose it for one line.
It knows no page and no server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime_tandem.config import RunConfig
from slime_tandem.errors import TandemError, printable
from slime_tandem.files import MOST_JSON
from slime_tandem.report.html import ArmData
from slime_tandem.report.progress import PROGRESS_FILE
from slime_tandem.report.run_folder import read_row
from slime_tandem.report.summary import CONTROL_LABEL, RunFiles, checked_rewards, checked_row, run_label
from slime_tandem.report.transcripts import Ends, ends_of

_AT_ONCE = 2**24
"""Bytes of a file that are read at once: memory stays bounded by what is kept, not by what is read."""
MAX_PROBLEMS = 5
_LONGEST = 300


class Tail:
    """Hands each new line of a file to `use`; `forget` is called where the file is no longer the one that was read."""

    def __init__(self, path: Path, use: Callable[[bytes, int], None], forget: Callable[[], None]) -> None:
        self.path, self._use, self._forget = path, use, forget
        self._file: tuple[int, int] | None = None
        self._at = self._number = 0
        self._last = b""
        """The end of what was read: a file that was cut and has grown again holds something else there."""

    def read(self) -> bool:
        """Whether anything came or went since the last call. Raises OSError other than for a file that is not there."""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return self._restart(None)

    def _read(self, file: Any) -> bool:
        state = os.fstat(file.fileno())
        name = (state.st_dev, state.st_ino)
        changed = False
        if name != self._file or state.st_size < self._at or not self._same_end(file):
            changed = self._restart(name)
        file.seek(self._at)
        rest = b""
        while part := file.read(_AT_ONCE):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self._number += 1
                self._at += len(line) + 1
                self._last = (line + b"\n")[-64:]
                self._use(line, self._number)
                changed = True
            if len(rest) > MOST_JSON:
                break  # no line is that long: nothing behind it can be read
        return changed

    def _same_end(self, file: Any) -> bool:
        file.seek(self._at - len(self._last))
        return bool(file.read(len(self._last)) == self._last)

    def _restart(self, name: tuple[int, int] | None) -> bool:
        had = self._at > 0
        self._file, self._at, self._number, self._last = name, 0, 0, b""
        if had:
            self._forget()
        return had


class _Arm:
    """The four files of one run in a folder."""

    def __init__(self, folder: Path, problem: Callable[[str], None]) -> None:
        self.folder, self._problem = folder, problem
        self.steps: list[Mapping[str, Any]] = []
        self.evals: list[Mapping[str, Any]] = []
        self.rewards: list[Mapping[str, Any]] = []
        self.ends: dict[str, Ends] = ends_of(())
        self._tails = [
            self._tail(
                "metrics.jsonl", lambda path, row: self.steps.append(checked_row(path, "step", row)), self.steps
            ),
            self._tail("eval.jsonl", lambda path, row: self.evals.append(checked_row(path, "eval", row)), self.evals),
            self._tail(
                "rewards.jsonl", lambda path, row: self.rewards.append(checked_rewards(path, row)), self.rewards
            ),
            self._tail("transcripts.jsonl", self._transcript, None),
        ]

    def _tail(
        self, name: str, add: Callable[[Path, Mapping[str, Any]], None], rows: list[Mapping[str, Any]] | None
    ) -> Tail:
        path = self.folder / name

        def use(line: bytes, number: int) -> None:
            try:
                add(path, read_row(path, number, line))
            except TandemError as error:
                self._problem(str(error))

        def forget() -> None:
            if rows is None:
                self.ends = ends_of(())
            else:
                rows.clear()

        return Tail(path, use, forget)

    def _transcript(self, path: Path, row: Mapping[str, Any]) -> None:
        if row.get("phase") in self.ends:
            self.ends[row["phase"]].add(row)

    def read(self) -> bool:
        """Read what is new of all files; whether there was anything."""
        changed = [tail.read() for tail in self._tails]
        return any(changed)

    def data(self, key: str, label: str) -> ArmData:
        """What was read so far."""
        return ArmData(key, label, RunFiles(list(self.steps), list(self.evals)), list(self.rewards), self.ends)


class RunFollower:
    """What the folder of a run says now; `read` brings it up to date.

    `config` is None while there is no config.yaml (a run that is starting); `problems` are sentences, the latest last.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.config: RunConfig | None = None
        self.progress = b""
        self.problems: list[str] = []
        self._config_file: tuple[int, int, int] | None = None
        self._arms = (_Arm(run_dir, self._problem), _Arm(run_dir / "control", self._problem))

    def read(self) -> bool:
        """Whether anything has changed since the last call. What the disk refuses is a problem, no error."""
        known = len(self.problems), self.problems[-1:]
        try:
            parts = [self._read_config(), self._read_progress(), *[arm.read() for arm in self._arms]]
            changed = any(parts)
        except OSError as error:
            self._problem(f"{error.filename}: {error.strerror}")
            changed = False
        return changed or known != (len(self.problems), self.problems[-1:])

    def arms(self) -> list[ArmData]:
        """The run, and its control where it has written anything."""
        assert self.config is not None, "no run yet"
        run = self._arms[0].data("run", run_label(self.config))
        control = self._arms[1]
        return [run, control.data("control", CONTROL_LABEL)] if control.steps or control.evals else [run]

    def _read_config(self) -> bool:
        path = self.run_dir / "config.yaml"
        try:
            state = path.stat()
            now = (state.st_ino, state.st_size, state.st_mtime_ns)
        except FileNotFoundError:
            now = None
        if now == self._config_file:
            return False
        self._config_file, self.config = now, None
        if now is None:
            self.problems.clear()  # of a run that was deleted
            return True
        try:
            self.config = RunConfig.load(path)
        except TandemError as error:
            self._problem(str(error))
        return True

    def _read_progress(self) -> bool:
        try:
            with (self.run_dir / PROGRESS_FILE).open("rb") as file:
                now = file.read(2**16)
        except FileNotFoundError:
            now = b""
        changed, self.progress = now != self.progress, now
        return changed

    def _problem(self, text: str) -> None:
        told = printable(text)[:_LONGEST]
        if told not in self.problems:
            self.problems[:] = [*self.problems[-(MAX_PROBLEMS - 1) :], told]
