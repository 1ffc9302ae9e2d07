"""Draws the figures of the experiments' pages from their lines: one self-contained SVG each.

    python scripts/experiments/figures.py docs/results/data docs/images

A figure whose lines are not there is not drawn. It computes nothing but means and Student's intervals over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import questions

from slime_tandem.report.dots import Dot, Panel, document
from slime_tandem.report.statistics import Estimate

BLUE, BROWN, GREY, GREEN = "#2563a8", "#b4521e", "#666666", "#2f7d4f"
DOSES = (0.0, 0.01, 0.05, 0.2, 1.0, None)
Row = dict[str, Any]


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean, with Student's interval where there are several."""
    mean, low, high, _ = questions.student(values)
    return Estimate(mean, None, None) if math.isnan(low) else Estimate(mean, low, high)


def dose(name: str) -> Callable[[Path], str | None]:
    """Tandem accuracy after training by the junior's share of the second notation; `name`: the file, runs of one machine."""

    def draw(data: Path) -> str | None:
        rows = lines(data / name)
        seeds = {r["seed"] for r in rows if r["dose"]}
        if not seeds:
            return None
        rows = [r for r in rows if r["seed"] in seeds]
        panels = []
        for title, metric, wanted in (
            ("Tandem accuracy after training", "tandem_accuracy_after", ("tandem + teacher", "solo GRPO")),
            ("Solo accuracy after training", "solo_accuracy_after", ("tandem + teacher", "solo GRPO")),
        ):
            dots = []
            for share in DOSES:
                junior = "the start senior" if share is None else f"junior saw {share:.0%} of it"
                for arm, colour in zip(wanted, (BLUE, BROWN), strict=True):
                    values = [r[metric] for r in rows if r["arm"] == arm and r["dose"] == share]
                    if values:
                        label = f"{junior}, {'main job' if colour == BLUE else 'control'}"
                        dots.append(Dot(label, over_seeds(values), "fraction", colour))
            panels.append(Panel(f"{title} (fraction; blue: with the junior, brown: alone)", dots))
        return document(
            "Two notations: dose and response",
            panels,
            [],
            "means over seeds 1 to 3, Student's 95% interval; 256 held-out prompts",
        )

    return draw


def drift(data: Path) -> str | None:
    """The share of the second notation in training, by author and window of steps, pooled over seeds."""
    rows = [r for r in lines(data / "two_notations_drift.jsonl") if r["dose"] == 0]
    panels = []
    for arm, colour in (("tandem + teacher", BLUE), ("solo GRPO", BROWN)):
        dots = []
        for author in ("senior", "junior"):
            for first in sorted({r["first_step"] for r in rows}):
                mine = [r for r in rows if (r["arm"], r["author"], r["first_step"]) == (arm, author, first)]
                other, common = (sum(r[k] for r in mine) for k in ("other", "common"))
                if other + common:
                    label = f"{author}, steps {first} to {first + 9}"
                    shade = colour if author == "senior" else GREY
                    dots.append(Dot(label, Estimate(other / (other + common), None, None), "fraction", shade))
        if dots:
            panels.append(Panel(f"{arm}: share of the second notation's signs (fraction)", dots))
    seeds = sorted({r["seed"] for r in rows})
    where = f"two kept responses a step, seeds {', '.join(map(str, seeds))} pooled"
    return document("Two notations: drift in training", panels, [], where) if panels else None


def question(letter: str, title: str) -> Callable[[Path], str | None]:
    """The differences of a question's families, with Student's intervals."""

    def draw(data: Path) -> str | None:
        panels = []
        for name, who, found in questions.comparisons(data, letter):
            dots = [
                Dot(f"{d.arm} less {d.base}", Estimate(d.mean, *d.student), "fraction", BLUE if d.mean >= 0 else BROWN)
                for d, _ in found
            ]
            panels.append(Panel(f"{name}: difference in {who} accuracy (fraction)", dots, reference=0.0))
        conditions = "paired by seed; Student's 95% interval over seeds, not corrected; 256 held-out prompts a seed"
        return document(title, panels, [], conditions) if panels else None

    return draw


FIGURES: dict[str, Callable[[Path], str | None]] = {
    "two-notations-dose.svg": dose("two_notations.jsonl"),
    "two-notations-dose-again.svg": dose("two_notations_repeat.jsonl"),
    "two-notations-drift.svg": drift,
    "question-a.svg": question("a", "Where and how often the author changes"),
    "question-b.svg": question("b", "What the teacher says"),
    "question-c.svg": question("c", "Which tokens are taught"),
    "question-d.svg": question("d", "Both together"),
}


def drawn(data: Path, images: Path) -> Iterable[Path]:
    """Writes what can be drawn; the files."""
    for name, draw in FIGURES.items():
        if (svg := draw(data)) is not None:
            (images / name).write_text(svg, encoding="utf-8")
            yield images / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("images", type=Path)
    args = parser.parse_args()
    print(*drawn(args.data, args.images), sep="\n")


if __name__ == "__main__":
    main()
