"""A process that writes a run with trackers, stops, and goes on with it. W&B and trackio read their environment at import."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from slime_tandem.config import RunConfig
from slime_tandem.objective.advantages import reward_histograms
from slime_tandem.report.metrics import row_keys
from slime_tandem.report.run_folder import RunWriter
from slime_tandem.report.trackers import Trackers, require_trackers


def row(step: int) -> dict[str, float | None]:
    keys = row_keys("step")
    return {name: None if i % 7 == step else step + i / 8 for i, name in enumerate(keys)}


def rewards(step: int) -> list[dict[str, Any]]:
    return reward_histograms([0.0, 1.0, 0.25 * step, 0.5], ["sums", "sums", "sums", "gcd"])


def main(folder: Path) -> None:
    config = RunConfig.from_mapping(
        {"name": "mine", "report_to": ["wandb", "trackio", "tensorboard"], "tracking": {"mode": "offline"}}
    )
    require_trackers(config)
    for first, resume in ((0, None), (2, 2)):  # three steps; a checkpoint after two of them: the third is written again
        with (
            Trackers(config, folder, name="mine") as trackers,
            RunWriter(folder, resume_step=resume, trackers=trackers) as writer,
        ):
            for step in range(first, first + 3):
                writer.write_step(step, row(step))
                writer.write_rewards(step, rewards(step))
            writer.write_eval(first + 3, "during", dict.fromkeys(row_keys("eval"), 0.25))
        assert not any(trackers.lost.values()), trackers.lost


if __name__ == "__main__":
    main(Path(sys.argv[1]))
