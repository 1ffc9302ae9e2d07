"""What a run shows in the terminal at its end: the final table. It computes no metric and writes no file."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from slime_tandem.errors import printable
from slime_tandem.report.summary import DASH, RunPart, Summary, shown_metrics, verdict_lines


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
    for name in shown_metrics(list(_ROWS), parts):
        table.add_row(_ROWS[name], *(_change(part, name) for part in parts))
        if name == "eval/teacher_kl":
            for teacher in sorted({teacher for part in parts for teacher in part["teachers"]}):
                cells = (part["teachers"].get(teacher, (None, None)) for part in parts)
                table.add_row(Text(printable(f"  {teacher}")), *(_arrow(*cell) for cell in cells))
    table.add_section()
    table.add_row("seconds per step", *(Text(_number(part["seconds"]["step"], 2)) for part in parts))
    for key in ("rollout", "scoring", "training", "sync", "other"):
        table.add_row(f"  {key}", *(Text(_number(part["seconds"][key], 2)) for part in parts))
    return table


_ROWS = {
    "eval/solo_accuracy": "solo accuracy",
    "eval/tandem_accuracy": "tandem accuracy",
    "eval/handoff_retention": "handoff retention",
    "eval/senior_token_fraction": "senior fraction",
    "eval/teacher_kl": "teacher KL (nats)",
    "eval/reward_mean": "reward",
}


def _change(part: RunPart, name: str) -> Text:
    return _arrow(*((part[when] or {}).get(name) for when in ("before", "after")))


def _arrow(before: float | None, after: float | None) -> Text:
    return Text(f"{_number(before)} → {_number(after)}")


def _number(value: float | None, digits: int = 3) -> str:
    return DASH if value is None else f"{value:.{digits}f}"
