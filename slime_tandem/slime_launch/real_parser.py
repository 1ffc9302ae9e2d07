"""Asks slime's own argument parser whether it knows our flags: slime itself passes over unknown ones in silence.

`python -m slime_tandem.slime_launch.real_parser FLAGS` in the environment that trains: PYTHONPATH names slime and Megatron-LM.
Exit code 0, or 2 with the flags that no parser knows; 3 where slime cannot be imported, with what is missing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence


def unknown(flags: Sequence[str]) -> list[str]:
    """Words that neither Megatron's, slime's nor SGLang's parser takes, as slime 624b824a combines them; raises ImportError.

    A value of a wrong type ends the program as argparse does, with a message.
    """
    from argparse import ArgumentParser

    slime = importlib.import_module("slime.utils.arguments")
    sglang = importlib.import_module("slime.backends.sglang_utils.arguments")
    megatron = importlib.import_module("megatron.training.arguments")
    parser = ArgumentParser(allow_abbrev=False)
    megatron.add_megatron_arguments(parser)
    slime.get_slime_extra_args_provider()(parser)
    _, rest = parser.parse_known_args(list(flags))
    servers = ArgumentParser(allow_abbrev=False, add_help=False)
    sglang.add_sglang_arguments(servers)
    _, rest = servers.parse_known_args(rest)
    modes = argparse.ArgumentParser(allow_abbrev=False, add_help=False)  # parsed before all others (_pre_parse_mode)
    modes.add_argument("--train-backend")
    for flag in ("--debug-rollout-only", "--debug-train-only"):
        modes.add_argument(flag, action="store_true")
    modes.add_argument("--load-debug-rollout-data")
    return modes.parse_known_args(rest)[1]


def main(flags: Sequence[str]) -> int:
    """See the module."""
    try:
        rest = unknown(flags)
    except ImportError as error:
        print(f"slime's parser cannot be imported: {error}", file=sys.stderr)
        return 3
    if rest:
        print(f"slime knows nothing of: {' '.join(rest)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
