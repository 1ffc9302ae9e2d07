"""Compares the methods of a suite over its seeds: a table, suite.json, suite.svg and suite.html in the suite's folder.

Intervals are of the mean over seeds, Student's t at level 0.95: they say what other seeds would give with the same prompts,
not what other prompts would. Differences are to the method that stands first (lowest idx), paired by seed, over the seeds that
both have finished. A run that is not finished counts as missing and is named. It starts no run.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from jinja2 import Environment
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from rich.table import Table
from rich.text import Text

from slime_tandem import __version__
from slime_tandem.errors import RunDirError, printable
from slime_tandem.files import is_file_name, record_of
from slime_tandem.report.curves import nice_ticks, tick_labels
from slime_tandem.report.dots import DASH, Dot, Panel, document, number
from slime_tandem.report.html import environment, source
from slime_tandem.report.metrics import METRICS, Metric
from slime_tandem.report.run_folder import replace_file
from slime_tandem.report.statistics import Estimate, mean_interval
from slime_tandem.report.summary import load_config, load_files, summarise
from slime_tandem.report.teachers import teacher_metric
from slime_tandem.report.transcripts import passage

MAPPING = "method_mapping.csv"
MAPPING_COLUMNS = ("idx", "method", "mask", "ratio", "seed", "run")
TITLES = {
    "eval/solo_accuracy": "solo accuracy",
    "eval/tandem_accuracy": "tandem accuracy (each run's own handoffs)",
    "eval/handoff_retention": "handoff retention",
    "eval/teacher_kl": "KL to the teacher, sampled tokens (nats)",
    "eval/response_tokens_mean": "response length (tokens)",
}


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over `n` seeds with its 95% interval; None where there are no values, or for the interval of one."""

    value: float | None
    low: float | None
    high: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of what each seed gave.

        >>> Mean.of([0.4, 0.5, 0.6])
        Mean(value=0.5, low=0.2516, high=0.7484, n=3)
        """
        n = len(values)
        if n < 2:
            return cls(values[0] if values else None, None, None, n)
        low, high = mean_interval(values)
        return cls(round(statistics.fmean(values), 12), round(low, 4), round(high, 4), n)


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method: evaluations `after` of its finished seeds, and the difference to the first method, by metric."""

    idx: int
    method: str
    mask: str
    ratio: str
    steps: int
    after: Mapping[str, Mean]
    difference: Mapping[str, Mean]
    per_seed: Mapping[int, Mapping[str, float | None]]
    keep_ratio: float | None
    step_seconds: float | None

    @property
    def label(self) -> str:
        """What it is called in tables."""
        return f"{self.method} {self.ratio}"


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """All methods, and runs that are not finished; `titles`: what each metric is called (a KL to one teacher of several, too).

    `before`: the start that all share (mean over seeds; None where it differs, because it is measured under each method's own
    handoffs).
    """

    name: str
    methods: Sequence[MethodResult]
    before: Mapping[str, float | None]
    eval_prompts: int
    missing: Sequence[str]
    titles: Mapping[str, str]

    @property
    def metrics(self) -> list[str]:
        """Those that any method has."""
        return [name for name in self.titles if any(m.after[name].n for m in self.methods)]


class _MappingRow(BaseModel):
    """A row of method_mapping.csv; names can be shown, `run` is a folder of the suite."""

    model_config = ConfigDict(extra="forbid")

    idx: Annotated[str, Field(pattern="^[0-9]{1,9}$")]
    method: Annotated[str, Field(min_length=1, max_length=200)]
    mask: Annotated[str, Field(min_length=1, max_length=200)]
    ratio: Annotated[str, Field(pattern="^[0-9][0-9.e+-]{0,30}$")]
    seed: Annotated[str, Field(pattern="^[0-9]{1,19}$")]
    run: str

    @field_validator("method", "mask", "run")
    @classmethod
    def _is_a_name(cls, value: str, info: ValidationInfo) -> str:
        if not value.isprintable() or (info.field_name == "run" and not is_file_name(value)):
            raise ValueError("a name")
        return value


def read_mapping(folder: Path) -> list[dict[str, str]]:
    """Rows of method_mapping.csv; raises RunDirError for a folder without one or with a damaged one."""
    path = folder / MAPPING
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunDirError("suite", str(folder), f"a readable {MAPPING} ({error})", "give a suite's folder") from None
    try:
        if list(reader.fieldnames or ()) != list(MAPPING_COLUMNS):
            raise ValueError(f"the head {reader.fieldnames!r:.200}")
        found = [record_of(_MappingRow, row).model_dump() for row in rows]
        if len({row["run"] for row in found}) < len(found):
            raise ValueError("a run that stands twice")
    except ValueError as error:
        expected = f"the columns {', '.join(MAPPING_COLUMNS)}"
        raise RunDirError(str(path), str(error), expected, "restore the file") from None
    return found


def summarise_suite(folder: Path) -> SuiteResult:
    """Read every run of a suite; raises RunDirError for a damaged one, and if no run is finished."""
    rows = read_mapping(folder)
    finished: dict[tuple[int, str, str, str], dict[int, Any]] = {}
    starts: dict[str, list[Mapping[str, float | None]]] = {}
    titles = dict(TITLES)
    missing, prompts, steps = [], 0, {}
    for row in rows:
        run = folder / row["run"]
        key = (int(row["idx"]), row["method"], row["mask"], row["ratio"])
        finished.setdefault(key, {})
        summary = summarise(run) if (run / "config.yaml").exists() else None
        if summary is None or not summary["complete"]:
            missing.append(row["run"])
            continue
        prompts, steps[key] = summary["eval_prompts"], load_config(run).train.steps
        part = summary["run"]
        assert part["after"] is not None, "complete"
        keep = [r["selection/keep_ratio"] for r in load_files(run).steps]
        teachers = {teacher_metric(name): ends for name, ends in part["teachers"].items()}
        titles |= {teacher_metric(name): f"KL to the teacher {name} (nats)" for name in part["teachers"]}
        finished[key][int(row["seed"])] = {
            **{name: part["after"][name] for name in TITLES},
            **{name: last for name, (_, last) in teachers.items()},
            "keep_ratio": statistics.fmean(keep) if keep and None not in keep else None,
            "step_s": part["seconds"]["step"],
        }
        if part["before"] is not None:
            first_of = {name: first for name, (first, _) in teachers.items()}
            starts.setdefault(row["seed"], []).append({**part["before"], **first_of})
    if not any(finished.values()):
        raise RunDirError("suite", str(folder), "at least one finished run", "run the suite first")
    first = next(iter(finished.values()))
    methods = []
    for key, seeds in finished.items():
        after = {name: Mean.of([v for s in seeds.values() if (v := s.get(name)) is not None]) for name in titles}
        shared = [s for s in seeds if s in first] if seeds is not first else []
        difference = {
            name: Mean.of(
                [
                    a - b
                    for s in shared
                    if (a := seeds[s].get(name)) is not None and (b := first[s].get(name)) is not None
                ]
            )
            for name in titles
        }
        keeps = [s["keep_ratio"] for s in seeds.values() if s["keep_ratio"] is not None]
        times = [s["step_s"] for s in seeds.values() if s["step_s"] is not None]
        methods.append(
            MethodResult(
                *key,
                steps.get(key, 0),
                after,
                difference,
                seeds,
                statistics.fmean(keeps) if keeps else None,
                statistics.fmean(times) if times else None,
            )
        )
    before = {name: _start([[s.get(name) for s in seed] for seed in starts.values()]) for name in titles}
    return SuiteResult(folder.name, methods, before, prompts, missing, titles)


def _metric(name: str) -> Metric:
    """What is known of it; a KL to one teacher is one."""
    return METRICS.get(name) or METRICS["eval/teacher_kl"]


def _start(seeds: Sequence[Sequence[float | None]]) -> float | None:
    """The mean over seeds of a start that all methods of a seed share, else None."""
    known = [[v for v in seed if v is not None] for seed in seeds]
    if not known or any(not seed or max(seed) - min(seed) > 1e-4 for seed in known):
        return None
    return statistics.fmean(seed[0] for seed in known)


def _text(mean: Mean, *, signed: bool = False, digits: int = 3) -> str:
    if mean.value is None:
        return DASH
    sign = "+" if signed and round(mean.value, digits) else ""  # no change has no sign
    interval = "" if mean.low is None else f" ({mean.low:{sign}.{digits}f} to {mean.high:{sign}.{digits}f})"
    return f"{round(mean.value, digits) + 0.0:{sign}.{digits}f}{interval}"


def caption(suite: SuiteResult) -> str:
    """One sentence on how to read the figures."""
    steps = sorted({m.steps for m in suite.methods if m.per_seed})
    text = (
        f"{' / '.join(map(str, steps))} steps, {suite.eval_prompts} held-out prompts; intervals: 95%, of the mean "
        "over seeds (Student's t), differences paired by seed"
    )
    return text + (f"; not finished: {', '.join(suite.missing)}" if suite.missing else "")


def suite_table(suite: SuiteResult) -> Table:
    """For the terminal: one block of lines per metric."""
    table = Table(
        title=Text(printable(suite.name)), title_justify="left", caption=Text(caption(suite)), caption_justify="left"
    )
    for heading in ("", "mean over seeds (95% interval)", "difference to the first"):
        table.add_column(heading, overflow="fold")
    for name in suite.metrics:
        table.add_row(Text(printable(suite.titles[name]), style="bold"))
        table.add_row("  start", number(suite.before[name]), "")
        digits = 1 if _metric(name).unit == "tokens" else 3
        for m in suite.methods:
            difference = _text(m.difference[name], signed=True, digits=digits)
            table.add_row(Text(f"  {m.label}"), _text(m.after[name], digits=digits), difference)
        table.add_section()
    return table


def suite_svg(suite: SuiteResult) -> str:
    """Dots and whiskers, a panel per metric; the dashed line is the start."""
    panels = []
    for name in suite.metrics:
        dots = []
        for m in suite.methods:
            mean = m.after[name]
            estimate = Estimate(mean.value, mean.low, mean.high, "fewer than two finished runs" if mean.n < 2 else None)
            dots.append(Dot(m.label, estimate, _metric(name).unit))
        panels.append(Panel(f"{suite.titles[name]}; dashed: the start", dots, suite.before[name]))
    return document(f"{suite.name}: mean over seeds with 95% intervals", panels, (), caption(suite))


_STRIP, _MARGIN = 320.0, 12.0
"""Width of a strip of dots in user units, and what it leaves free on each side."""


def rendered_suite(env: Environment, suite: SuiteResult) -> str:
    """The comparison as HTML: for each metric a row a method, with its mean and interval drawn on a common axis."""
    module: Any = env.get_template("suite_sections.html.j2").module
    view = {
        "name": passage(suite.name, 200),
        "caption": passage(caption(suite), 4000),
        "metrics": [_metric_view(suite, name) for name in suite.metrics],
        "methods": [
            {
                "label": passage(m.label, 200),
                "mask": passage(m.mask, 200),
                "seeds": len(m.per_seed),
                "kept": number(m.keep_ratio),
                "step": DASH if m.step_seconds is None else f"{m.step_seconds:.2f}",
            }
            for m in suite.methods
        ],
    }
    return str(module.suite(view))


def _metric_view(suite: SuiteResult, name: str) -> dict[str, Any]:
    metric, start = _metric(name), suite.before[name]
    digits = 1 if metric.unit == "tokens" else 3
    ends = [v for m in suite.methods for v in (m.after[name].low, m.after[name].value, m.after[name].high)]
    known = [v for v in (*ends, start) if v is not None]
    pad = (max(known) - min(known)) * 0.05 or abs(max(known)) * 0.05 or 0.5
    low, high = min(known) - pad, max(known) + pad

    def at(value: float | None) -> str | None:
        if value is None:
            return None
        return f"{_MARGIN + (value - low) / (high - low) * (_STRIP - 2 * _MARGIN):.1f}"

    ticks = nice_ticks(low, high, 5)
    return {
        "title": passage(suite.titles[name], 200),
        "better": {"up": "higher is better", "down": "lower is better", "none": ""}[metric.direction],
        "width": _STRIP,
        "ticks": [{"at": at(tick), "label": label} for tick, label in zip(ticks, tick_labels(ticks), strict=True)],
        "start": {"at": at(start), "text": number(start) if digits == 3 else _text(Mean.of([start]), digits=1)}
        if start is not None
        else None,
        "rows": [
            {
                "label": passage(m.label, 200),
                "mean": _text(Mean(m.after[name].value, None, None, 1), digits=digits),
                "interval": _interval_text(m.after[name], digits),
                "difference": _text(Mean(m.difference[name].value, None, None, 1), signed=True, digits=digits),
                "of_difference": _interval_text(m.difference[name], digits, signed=True),
                "good": _shown_better(m.difference[name], metric.direction),
                "first": m is suite.methods[0],
                "value": at(m.after[name].value),
                "low": at(m.after[name].low),
                "high": at(m.after[name].high),
            }
            for m in suite.methods
        ],
    }


def _interval_text(mean: Mean, digits: int, *, signed: bool = False) -> str:
    if mean.low is None or mean.high is None:
        return ""
    sign = "+" if signed else ""
    return f"{mean.low:{sign}.{digits}f} to {mean.high:{sign}.{digits}f}"


def _shown_better(difference: Mean, direction: str) -> bool | None:
    """Whether an interval shows a difference to be one for the better; None where it shows none."""
    if (
        difference.low is None
        or difference.high is None
        or direction == "none"
        or difference.low <= 0 <= difference.high
    ):
        return None
    return (difference.low > 0) == (direction == "up")


def write_suite(folder: Path) -> SuiteResult:
    """Summarise and write suite.json, suite.svg and suite.html, each whole or not at all."""
    suite = summarise_suite(folder)
    tree = asdict(suite) | {"caption": caption(suite)}
    replace_file(folder / "suite.json", (json.dumps(tree, indent=2, allow_nan=False) + "\n").encode())
    svg = suite_svg(suite)
    replace_file(folder / "suite.svg", svg.encode())
    env = environment()
    style, part = source(env, "report.css"), Markup(rendered_suite(env, suite))  # noqa: S704 - escaped when rendered
    page = env.get_template("suite.html.j2").render(
        name=passage(suite.name, 200), style=style, part=part, version=__version__
    )
    replace_file(folder / "suite.html", page.encode("utf-8", "replace"))
    return suite
