"""Asks slime's own argument parser whether it knows our flags, our hooks whether they would take them, SGLang for the models.

slime itself passes over unknown flags in silence, and a hook refuses what does not go with it when it is first called: behind
the start of engines and trainer. `python -m slime_tandem.slime_launch.real_parser FLAGS` says both before, and starts nothing.
It runs in the environment that trains: PYTHONPATH names slime and Megatron-LM. Exit code 0, or 2 with the flags that no parser
knows, the one that is refused, or the model that this SGLang cannot serve; 3 where slime cannot be imported, with what is
missing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_tandem.config import read_yaml_mapping
from slime_tandem.errors import TandemError
from slime_tandem.slime_hooks import before
from slime_tandem.slime_hooks.refused import KEY, check_flags
from slime_tandem.slime_hooks.settings import build, scores_itself
from slime_tandem.slime_launch.servable import check_architectures


def parse(flags: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(slime's arguments, words that neither Megatron's, slime's nor SGLang's parser takes), as slime 624b824a combines them.

    Raises ImportError. A value of a wrong type ends the program as argparse does, with a message.
    """
    from argparse import ArgumentParser

    slime = importlib.import_module("slime.utils.arguments")
    sglang = importlib.import_module("slime.backends.sglang_utils.arguments")
    megatron = importlib.import_module("megatron.training.arguments")
    parser = ArgumentParser(allow_abbrev=False)
    megatron.add_megatron_arguments(parser)
    slime.get_slime_extra_args_provider()(parser)
    args, rest = parser.parse_known_args(list(flags))
    servers = ArgumentParser(allow_abbrev=False, add_help=False)
    sglang.add_sglang_arguments(servers)
    _, rest = servers.parse_known_args(rest, args)
    modes = argparse.ArgumentParser(allow_abbrev=False, add_help=False)  # parsed before all others (_pre_parse_mode)
    modes.add_argument("--train-backend")
    for flag in ("--debug-rollout-only", "--debug-train-only"):
        modes.add_argument(flag, action="store_true")
    modes.add_argument("--load-debug-rollout-data")
    return args, modes.parse_known_args(rest)[1]


def ask_hooks(args: argparse.Namespace) -> list[str]:
    """Raise the error with which our hooks or SGLang's engines would meet these arguments; else the notes on the models that
    slime serves. Nothing where no file names our settings."""
    file = getattr(args, "custom_config_path", None)
    if file is None or KEY not in (tree := read_yaml_mapping(Path(file))):
        return []
    for name, value in tree.items():  # what slime makes of its arguments before a hook sees them (utils/arguments.py)
        setattr(args, name, value)
    args.use_critic = args.advantage_estimator == "ppo"
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    config = build(args)
    check_flags(args, config)
    before.check_packages(config, our_reward=scores_itself(args))
    before.check_servers(args, config)
    before.check_shared_gpus(args)
    before.check_team(config)
    return check_architectures(config)


def main(flags: Sequence[str]) -> int:
    """See the module."""
    try:
        args, rest = parse(flags)
    except ImportError as error:
        print(f"slime's parser cannot be imported: {error}", file=sys.stderr)
        return 3
    if rest:
        print(f"slime knows nothing of: {' '.join(rest)}", file=sys.stderr)
        return 2
    try:
        for note in ask_hooks(args):
            print(f"note: {note}")
    except TandemError as error:
        print(f"slime_tandem's hooks refuse {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
