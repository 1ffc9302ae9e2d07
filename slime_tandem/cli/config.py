"""`slime-tandem config`: settings checked and printed, or what slime must be given for them."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_tandem.cli import flags
from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError
from slime_tandem.extensions import find, is_own


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(commands, "config", "Check settings and print the resolved tree; list what there is to set.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", metavar="FILE", help="YAML file to check")
    what.add_argument(
        "--list",
        metavar="SECTION",
        nargs="?",
        const="",
        help="print every setting of a section, or of all, with its default and what it does",
    )
    flags.add_set(parser, "overrides")
    parser.add_argument(
        "--slime",
        metavar="FOLDER",
        help="print instead what slime's train.py must be given, with a memory estimate; the files it names go into FOLDER",
    )
    parser.add_argument(
        "--size",
        type=int,
        metavar="CARDS",
        help="with --slime: settings for so many GPUs of one machine (1, 2, 4 or 8)",
    )
    parser.add_argument(
        "slime_flags", nargs="*", metavar="-- SLIME_FLAGS", help="with --slime: further flags of slime, checked"
    )
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Print the tree; with --list what there is to set; with --slime write the launch's files and print its shell text."""
    if args.list is not None:
        print(flags.settings_text(args.list))
        return 0
    sized: list[str] = []
    if args.size is not None:
        from slime_tandem.slime_launch.cards import settings_of

        if args.slime is None:
            raise ConfigError("--size", args.size, "a size with --slime FOLDER only", "add --slime")
        sized = settings_of(args.size)
    config = RunConfig.load(args.check, [*sized, *args.overrides])
    if args.slime is None:
        if args.slime_flags:
            raise ConfigError("--", args.slime_flags[0], "flags of slime with --slime FOLDER only", "add --slime")
        _check_names(config)
        _check_models(config)
        print(config.to_yaml(), end="")
        return 0
    from slime_tandem.slime_launch.plan import launch_plan

    launch = launch_plan(config, Path(args.slime), args.slime_flags)
    launch.write()
    print(launch.shell(), end="")
    return 0


def _check_models(config: RunConfig) -> None:
    """Raise for models that do not go together, as far as their folders are on this machine."""
    members = (
        config.models.senior,
        config.models.junior,
        config.models.teacher,
        *(t.model for t in config.opd.teachers),
    )
    if any(Path(model).is_dir() for model in members):
        from slime_tandem.team.roster import check_models  # torch

        check_models(config, elsewhere=lambda _: True)


def _check_names(config: RunConfig) -> None:
    """Raise ConfigError for a name that stands for no code: what a run would say only once it has begun."""
    from slime_tandem.tasks.families import find_family, find_reward

    for i, spec in enumerate(config.tasks):
        find_family(spec.family, f"tasks.{i}.family")
        find_reward(spec, f"tasks.{i}")
        if spec.environment is not None:
            from slime_tandem.team.environments import ENVIRONMENTS

            find(spec.environment, ENVIRONMENTS, f"tasks.{i}.environment")
    for teacher in config.opd.teachers:
        if teacher.scorer is not None:
            find(teacher.scorer, {}, f"opd.teachers, {teacher.name}: scorer")
    if is_own(config.opd.signal) or is_own(config.opd.selection.mask):  # imports torch
        from slime_tandem.team.own_code import check_extensions

        check_extensions(config)
