"""What a run shows in the terminal: a progress bar while it trains, and the final table.

It computes no metric and writes no file.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from slime_tandem.report.metrics import Row
from slime_tandem.report.summary import DASH, RunPart, Summary, verdict_lines


class TrainProgress:
    """A progress bar with reward, senior fraction, teacher KL (nats) and seconds per step; a context manager.

    On something that is no terminal (a log file, CI) it prints one plain line per step instead. `done` steps of an earlier
    part of a resumed run count as finished.
    """

    def __init__(self, total: int, *, label: str = "train", done: int = 0, console: Console | None = None) -> None:
        self.total, self.label, self.done = total, label, done
        self.console = console or Console()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
                expand=True,
            )
            self._bar.add_task(self.label, total=self.total, completed=self.done, figures="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, row: Row) -> None:
        """One more step is done; `row` are its metrics."""
        self.done += 1
        figures = (
            f"reward {_number(row['rollout/reward_mean'])}  senior {_number(row['tandem/senior_token_fraction'], 2)}  "
            f"KL {_number(row['opd/teacher_kl'], 2)}  {_number(row['time/step_s'], 1)} s/step"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, figures=figures)
        else:
            self.console.print(
                f"{self.label} {self.done}/{self.total}  {figures}", highlight=False, soft_wrap=True, markup=False
            )


def final_table(summary: Summary) -> Table:
    """The run's result, its control beside it: held-out evaluation before and after, and seconds per step."""
    parts = [summary["run"]] + ([summary["control"]] if summary["control"] else [])
    table = Table(
        title=Text(f"{summary['name']}: held-out prompts before → after {summary['run']['steps']} steps"),
        title_justify="left",
        caption=Text("\n".join(verdict_lines(summary))),
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for part in parts:
        table.add_column(part["label"], justify="right", no_wrap=True)
    for name, label in (
        ("eval/solo_accuracy", "solo accuracy"),
        ("eval/tandem_accuracy", "tandem accuracy"),
        ("eval/handoff_retention", "handoff retention"),
        ("eval/senior_token_fraction", "senior fraction"),
        ("eval/teacher_kl", "teacher KL (nats)"),
    ):
        table.add_row(label, *(_change(part, name) for part in parts))
    table.add_section()
    table.add_row("seconds per step", *(Text(_number(part["seconds"]["step"], 2)) for part in parts))
    for key in ("rollout", "scoring", "training", "sync", "other"):
        table.add_row(f"  {key}", *(Text(_number(part["seconds"][key], 2)) for part in parts))
    return table


def _change(part: RunPart, name: str) -> Text:
    before, after = ((part[when] or {}).get(name) for when in ("before", "after"))
    return Text(f"{_number(before)} → {_number(after)}")


def _number(value: float | None, digits: int = 3) -> str:
    return DASH if value is None else f"{value:.{digits}f}"
