"""tracking: to whom metrics are reported, and under which names there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from slime_tandem.config.section import Section

Reporter = Literal["tensorboard", "wandb", "trackio"]


class TrackingConfig(Section):
    """Names and modes of the trackers in `report_to`. All else is theirs to say, by their own environment variables."""

    project: str | None = Field(
        None,
        min_length=1,
        description="project of the run; null: what WANDB_PROJECT, or TRACKIO_PROJECT, says, else slime_tandem",
    )
    entity: str | None = Field(None, min_length=1, description="W&B's user or team; null: your default there")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="W&B: offline keeps a folder for `wandb sync`; null: what WANDB_MODE says, else online"
    )

    def project_of(self, tracker: Reporter, environment: Mapping[str, str]) -> str:
        """The project at a tracker, in an environment.

        >>> TrackingConfig().project_of("wandb", {"WANDB_PROJECT": "mine"}), TrackingConfig().project_of("trackio", {})
        ('mine', 'slime_tandem')
        """
        return self.project or environment.get(f"{tracker.upper()}_PROJECT") or "slime_tandem"
