"""The named parts of a reward of the user's own: reads reward_parts.jsonl, and says what the report's table shows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_tandem.errors import RunDirError
from slime_tandem.report.run_folder import read_rows

FILE = "reward_parts.jsonl"
_LARGEST = 1e100

Means = Mapping[tuple[str, str], float]
"""By (task tag, part)."""


def load_parts(run_dir: Path) -> tuple[Mapping[str, Any], ...]:
    """Its rows, one per step, phase, task tag and part; none where the reward has no parts.

    Raises RunDirError for damaged ones.
    """
    path = run_dir / FILE
    return tuple(checked_parts(path, row) for row in read_rows(path))


def checked_parts(path: Path, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row itself; raises RunDirError for a damaged one."""
    names = all(isinstance(row.get(name), str) for name in ("phase", "task", "part"))
    mean = row.get("mean")
    number = isinstance(mean, int | float) and not isinstance(mean, bool) and abs(mean) <= _LARGEST
    if not (names and number):
        found = {name: row.get(name) for name in ("phase", "task", "part", "mean")}
        expected = "phase, task and part, and a finite mean"
        raise RunDirError(f"{path} step {row['step']}", found, expected, "restore the file, or delete this line")
    return row


def before_and_after(rows: Sequence[Mapping[str, Any]]) -> tuple[Means, Means]:
    """Means of the held-out responses at the first and at the last evaluation; the second is empty where there is but one.

    >>> row = {"phase": "eval", "task": "sums", "part": "brief"}
    >>> before_and_after([{**row, "step": 0, "mean": 0.25}, {**row, "step": 4, "mean": 0.5}])
    ({('sums', 'brief'): 0.25}, {('sums', 'brief'): 0.5})
    """
    held_out = [row for row in rows if row["phase"] == "eval"]
    steps = sorted({row["step"] for row in held_out})

    def means(step: int) -> Means:
        return {(row["task"], row["part"]): float(row["mean"]) for row in held_out if row["step"] == step}

    return (means(steps[0]) if steps else {}), (means(steps[-1]) if len(steps) > 1 else {})


def titles(parts: Sequence[tuple[str, str]]) -> list[str]:
    """What (task tag, part) is called in a table: by its task, too, where there are several.

    >>> titles([("sums", "brief"), ("sums", "correct")]), titles([("a", "x"), ("b", "x")])
    (['Reward: brief', 'Reward: correct'], ['Reward: x (a)', 'Reward: x (b)'])
    """
    several = len({task for task, _ in parts}) > 1
    return [f"Reward: {part}" + (f" ({task})" if several else "") for task, part in parts]
