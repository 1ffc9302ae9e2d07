"""The share of the second notation over training, by author, from the transcripts that runs of two_notations.py keep.

    python scripts/experiments/drift.py --work runs/two-notations --out docs/results/data/two_notations_drift.jsonl

Two responses of each step are kept, so that a window of ten steps holds twenty: enough to see a drift, not to measure it. A
line for each run and window; `other` and `common` are counts of signs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import two_notations

from slime_tandem.models.worksheet import notation_by_author
from slime_tandem.report.run_folder import read_rows

WINDOW = 10
AUTHORS = ("junior", "senior")


def windows(run: Path) -> Iterator[dict[str, Any]]:
    """A line for each window and author that wrote a sign."""
    counts: dict[tuple[int, int], list[int]] = {}
    for row in read_rows(run / "transcripts.jsonl"):
        if row["phase"] == "train":
            for author, signs in notation_by_author((t["text"], t["author"]) for t in row["tokens"]).items():
                total = counts.setdefault((row["step"] // WINDOW, author), [0, 0])
                total[0] += signs[0]
                total[1] += signs[1]
    for (window, author), (other, common) in sorted(counts.items()):
        if other + common:
            yield {"first_step": window * WINDOW, "author": AUTHORS[author], "other": other, "common": common}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/two-notations"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lines = []
    for case in two_notations.cases((1, 2, 3, 4, 5), (1, 2, 3)):
        run = args.work / "runs" / case.name
        if (run / "summary.json").exists():
            lines += [json.dumps(dataclasses.asdict(case) | line) + "\n" for line in windows(run)]
    args.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
