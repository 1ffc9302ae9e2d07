"""From a configuration to slime's launch, before anything starts: which models it means, and what the fused engine is given.

What the launch then says to slime is in `flags`. Starts nothing; without folders (published sizes) it loads no model either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slime_tandem.config import RunConfig
from slime_tandem.slime_launch.flags import Plan, plan, with_folders
from slime_tandem.slime_launch.sizes import PUBLISHED, architecture, hf_sizes


def launch_plan(config: RunConfig, folder: Path, extra: Sequence[str] = ()) -> Plan:
    """The launch of `config`, whose files go into `folder`, which every node must see; `extra`: further flags of slime.

    Makes the built-in models that the configuration names, and with engine.mode=fused writes the boundary tables into `folder`;
    all other files are the plan's (`Plan.write`). Raises ConfigError for whatever does not fit together, ModelError for a
    missing model or a fused pair that does not fit, TokenizerMismatchError for a junior of another vocabulary that
    `tandem.junior_tokenizer` does not allow.
    """
    config = with_folders(config)
    unread = _models_go_together(config)
    fused = _fused(config, folder) if config.engine.mode == "fused" else None
    launch = plan(config, folder, fused=fused, extra=extra)
    return replace(launch, notes=[*launch.notes, *unread])


def _models_go_together(config: RunConfig) -> list[str]:
    """Hold the tokenizers against each other, as the hooks do once the job has started; a note for each that is not there."""
    models = config.models
    if {models.senior, models.junior, models.teacher, *(t.model for t in config.opd.teachers)} <= PUBLISHED.keys():
        return []
    from slime_tandem.team.roster import check_models, members_of  # torch

    members = members_of(config)
    return [
        f"not compared: the tokenizer of the {role}, no file of it is in {members[role].model}"
        for role in check_models(config, elsewhere=PUBLISHED.__contains__)
        if members[role].model not in PUBLISHED
    ]


def _fused(config: RunConfig, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Environment and flags of the fused engine: of a pair of folders, or of published sizes, by their sizes alone."""
    from slime_tandem.engines.fused.launch import catch_up_of, slime_settings, slime_sizes

    models = config.models
    if {models.senior, models.junior} & PUBLISHED.keys():
        return slime_sizes(hf_sizes(architecture(models.senior)), hf_sizes(architecture(models.junior)))
    from slime_tandem.team.roster import Roster  # torch: not for those who only ask for sizes

    # The teacher, which may be a size, is none of the engine's.
    roster = Roster(config.model_copy(update={"opd": config.opd.model_copy(update={"enabled": False})}))
    return slime_settings(
        roster.folders["senior"],
        roster.folders["junior"],
        roster.fused_tables(),
        folder,
        catch_up_of(config.engine.fused_attention, roster.folders["senior"]),
        config.engine.fused_prefill,
    )
