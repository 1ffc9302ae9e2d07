"""What a run is doing, said from its first second: on a terminal as a display that moves, elsewhere as plain lines; and in
progress.json of its folder, for the live page.

A run goes through phases (libraries, models, servers, evaluations, the steps of each arm), one at a time; within a step its
parts are shown on a terminal alone. Everything goes to standard error: standard output is for results. It computes no metric,
and imports nothing heavy, since it shows the imports of what is heavy.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slime_tandem.files import parse_json, record_of

PROGRESS_FILE = "progress.json"
_DASH = "–"
State = Literal["running", "done", "stopped", "failed"]


_Time = Annotated[float, Field(ge=0.0, le=1e11)]


class ProgressRecord(BaseModel):
    """A moment of a run, as progress.json has it: `done` of `total` `unit`s of the phase (0 of 0: not counted); times are
    seconds since 1970."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    state: State
    phase: str
    done: int = Field(ge=0, le=2**53)
    total: int = Field(ge=0, le=2**53)
    unit: str
    started: _Time
    since: _Time

    @classmethod
    def read(cls, content: bytes) -> ProgressRecord | None:
        """Of a file's bytes; None for an empty one, and for one that holds anything else."""
        try:
            return record_of(cls, parse_json(content)) if content else None
        except ValueError:
            return None


class RunProgress:
    """Shows the phases of a run; a context manager, which notes in progress.json how the run ended.

    `quiet`: shows nothing but warnings (progress.json is written all the same). `console`: where to (standard error). `clock`
    gives seconds since 1970.
    """

    def __init__(
        self, *, quiet: bool = False, console: Console | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self._clock = clock
        self._started = self._since = self._part_since = clock()
        self._phase, self._done, self._total, self._unit = "", 0, 0, ""
        self._done_before = 0
        self._part, self._shown_figures = "", ""
        self._folder: Path | None = None
        self._spinner = Spinner("dots", style="progress.spinner")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.quiet:
            self._live = Live(
                get_renderable=self._display,
                console=self.console,
                refresh_per_second=8,
                transient=True,
                # What is printed to standard output while it is a pipe must not turn up on the terminal.
                redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        state: State = "done" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        self._write(state)
        self._end_phase("✓" if error is None else "✗")
        if self._live is not None:
            self._live.stop()

    def record_in(self, folder: Path) -> None:
        """Write progress.json in a run's folder from now on."""
        self._folder = folder
        self._write("running")

    def phase(self, text: str, *, total: int = 0, unit: str = "") -> None:
        """Begin a phase, which ends the one before; `total` `unit`s of it are counted by `advance`."""
        self._begin(text, total, unit, 0)

    def advance(self, what: str = "") -> None:
        """One more of the phase's units is done; `what` it was, for a log."""
        self._done += 1
        if what and self._live is None:
            self._line(f"  {what}")
        self._write("running")

    def steps(self, label: str, total: int, done: int) -> None:
        """Begin the steps of an arm, of which `done` are of an earlier part of a resumed run."""
        self._begin(f"{label}: training", total, "step", done)

    def part(self, text: str) -> None:
        """What is under way within the phase; seen on a terminal alone."""
        self._part, self._part_since = text, self._clock()

    def step(self, row: Mapping[str, float | None]) -> None:
        """One more step of the phase `steps` is done; `row` are its metrics."""
        self._done += 1
        self._shown_figures = _figures(row)
        if self._live is None:
            label = self._phase.removesuffix(": training")
            self._line(f"{label} {self._done}/{self._total}  {self._shown_figures}", timed=False)
        self._write("running")

    def say(self, text: str) -> None:
        """A line that is worth keeping, not a warning."""
        if not self.quiet:
            self.warn(text, style="")

    def warn(self, text: str, style: str = "yellow") -> None:
        """A line that is shown in quiet mode, too."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)

    def _begin(self, text: str, total: int, unit: str, done: int) -> None:
        self._end_phase("✓")
        self._phase, self._total, self._unit, self._since = text, total, unit, self._clock()
        self._done = self._done_before = done
        self._part = self._shown_figures = ""
        if self._live is None:
            self._line(text)
        self._write("running")

    def _end_phase(self, mark: str) -> None:
        """On a terminal: leave a line of the phase that is over."""
        if self._live is None or not self._phase:
            return
        count = f" ({self._count()})" if self._total else ""
        took = f"  {duration(self._clock() - self._since)}"
        colour = "green" if mark == "✓" else "red"
        self.console.print(Text.assemble((f"{mark} ", colour), f"{self._phase}{count}", (took, "dim")))
        self._phase = ""

    def _display(self) -> RenderableType:
        """What moves: the phase with its bar; what is under way within it; the figures of the last step."""
        if not self._phase:
            return Text("")
        now = self._clock()
        bar = ProgressBar(self._total, self._done, width=16) if self._total else Text("")
        left = (
            (now - self._since) / (self._done - self._done_before) * (self._total - self._done)
            if self._moves()
            else 0.0
        )
        times = duration(now - self._since) + (f", {duration(left)} left" if left else "")
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, overflow="ellipsis")
        for _ in range(3):
            line.add_column(no_wrap=True)
        line.add_row(self._spinner, Text(self._phase), bar, Text(self._count()), Text(times, style="progress.elapsed"))
        lines: list[RenderableType] = [line]
        if self._part:
            part = Text.assemble(f"  {self._part}", (f"  {duration(now - self._part_since)}", "progress.elapsed"))
            lines.append(_one_line(part))
        if self._shown_figures:
            lines.append(_one_line(Text(f"  {self._shown_figures}", style="dim")))
        return Group(*lines)

    def _moves(self) -> bool:
        return self._unit == "step" and self._done > self._done_before

    def _line(self, text: str, *, timed: bool = True) -> None:
        if not self.quiet:
            when = f"{self._clock() - self._started:7.1f} s  " if timed else ""
            self.console.print(f"{when}{text}", markup=False, highlight=False, soft_wrap=True)

    def _count(self) -> str:
        if not self._total:
            return ""
        return f"{self._unit} {self._done}/{self._total}".strip()

    def _write(self, state: State) -> None:
        if self._folder is None:
            return
        record = ProgressRecord(
            state=state, phase=self._phase, done=self._done, total=self._total, unit=self._unit,
            started=self._started, since=self._since,
        )  # fmt: skip
        unfinished = self._folder / f".{PROGRESS_FILE}.unfinished"
        # What is only shown must not end a run: the disk's refusal is found by what has to be written.
        with contextlib.suppress(OSError):
            unfinished.write_text(record.model_dump_json() + "\n", encoding="utf-8")
            os.replace(unfinished, self._folder / PROGRESS_FILE)


def duration(seconds: float) -> str:
    """Seconds as people read them.

    >>> duration(3.14), duration(75), duration(7325)
    ('3.1 s', '1:15', '2:02:05')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _figures(row: Mapping[str, float | None]) -> str:
    """A step in a line; without a reward the KL to the teacher is what there is to be seen, with all its digits."""
    reward, kl = row["rollout/reward_mean"], row["opd/teacher_kl"]
    shown = [f"KL {_number(kl)}"] if reward is None else [f"reward {_number(reward)}"]
    shown.append(f"senior {_number(row['tandem/senior_token_fraction'], 2)}")
    shown += [] if reward is None else [f"KL {_number(kl, 2)}"]
    return "  ".join([*shown, f"{_number(row['time/step_s'], 1)} s/step"])


def _number(value: float | None, digits: int = 3) -> str:
    return _DASH if value is None else f"{value:.{digits}f}"
