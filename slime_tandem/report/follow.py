"""A run folder read while it is being written: what is there now, read on from where it was read last.

Only whole lines count, so a half-written one waits for its end. A file that was replaced or cut (a resumed or restarted run
drops rows that it writes again) is read from its start; a folder whose run is gone is empty until the next one. A line that
cannot be used is named among the `problems`, once, and left out: whoever watches a run must not lose it for one line.
It knows no page and no server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slime_tandem.config import RunConfig
from slime_tandem.errors import TandemError, printable
from slime_tandem.files import MOST_JSON
from slime_tandem.report.html import ArmData
from slime_tandem.report.progress import PROGRESS_FILE
from slime_tandem.report.reward_parts import FILE as PARTS_FILE
from slime_tandem.report.reward_parts import checked_parts
from slime_tandem.report.run_folder import read_row
from slime_tandem.report.summary import CONTROL_LABEL, RunFiles, checked_rewards, checked_row, run_label
from slime_tandem.report.transcripts import PHASES, Ends, ends_of

_AT_ONCE = 2**24
"""Bytes of a file that are read at once: memory stays bounded by what is kept, not by what is read."""
MAX_PROBLEMS = 5
_LONGEST = 300


class _Line(NamedTuple):
    step: int
    number: int
    content: bytes


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


class _RawEnds:
    """The lines of transcripts.jsonl that are shown, those of the first and of the last step of each phase.

    Of the others, which may be gigabytes, no more than the head is read. `problem` is told of lines that cannot be used.
    """

    _HEAD = re.compile(rb'\{"step": (\d{1,15}), "phase": "(\w{1,20})"')

    def __init__(self, path: Path, problem: Callable[[str], None]) -> None:
        self._path, self._problem = path, problem
        self.clear()

    def clear(self) -> None:
        """Forget all: the file is another one."""
        self._lines: dict[str, tuple[list[_Line], list[_Line]]] = {phase: ([], []) for phase, _ in PHASES}
        self._read: dict[str, Ends] | None = None

    def add(self, line: bytes, number: int) -> None:
        """One line more, in the order of the file."""
        head = self._HEAD.match(line)
        if head is not None:
            step, phase = int(head[1]), head[2].decode()
        else:
            try:
                row = read_row(self._path, number, line)
            except TandemError as error:
                self._problem(str(error))
                return
            step, phase = row["step"], str(row.get("phase"))
        if phase not in self._lines:
            self._problem(f"{self._path}:{number}: phase {phase[:100]!r}, where {' or '.join(self._lines)} belongs")
            return
        self._read = None
        first, last = self._lines[phase]
        if not first or first[0].step == step:
            first.append(_Line(step, number, line))
            return
        if last and last[0].step != step:
            last.clear()
        last.append(_Line(step, number, line))

    def ends(self) -> dict[str, Ends]:
        """The rows of those lines."""
        if self._read is None:
            self._read = ends_of(self._rows())
        return self._read

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        for line in [line for lines in self._lines.values() for part in lines for line in part]:
            try:
                yield read_row(self._path, line.number, line.content)
            except TandemError as error:
                self._problem(str(error))


class _Arm:
    """The five files of one run in a folder."""

    def __init__(self, folder: Path, problem: Callable[[str], None]) -> None:
        self.folder, self._problem = folder, problem
        self.steps: list[Mapping[str, Any]] = []
        self.evals: list[Mapping[str, Any]] = []
        self.rewards: list[Mapping[str, Any]] = []
        self.parts: list[Mapping[str, Any]] = []
        self._ends = _RawEnds(folder / "transcripts.jsonl", problem)
        self._tails = [
            self._tail(
                "metrics.jsonl", lambda path, row: self.steps.append(checked_row(path, "step", row)), self.steps
            ),
            self._tail("eval.jsonl", lambda path, row: self.evals.append(checked_row(path, "eval", row)), self.evals),
            self._tail(
                "rewards.jsonl", lambda path, row: self.rewards.append(checked_rewards(path, row)), self.rewards
            ),
            self._tail(PARTS_FILE, lambda path, row: self.parts.append(checked_parts(path, row)), self.parts),
            Tail(folder / "transcripts.jsonl", self._ends.add, self._ends.clear),
        ]

    def _tail(self, name: str, add: Callable[[Path, Mapping[str, Any]], None], rows: list[Mapping[str, Any]]) -> Tail:
        path = self.folder / name

        def use(line: bytes, number: int) -> None:
            try:
                add(path, read_row(path, number, line))
            except TandemError as error:
                self._problem(str(error))

        return Tail(path, use, rows.clear)

    def read(self) -> bool:
        """Read what is new of all files; whether there was anything."""
        changed = [tail.read() for tail in self._tails]
        return any(changed)

    def data(self, key: str, label: str) -> ArmData:
        """What was read so far."""
        files = RunFiles(list(self.steps), list(self.evals))
        return ArmData(key, label, files, list(self.rewards), self._ends.ends(), list(self.parts))


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
