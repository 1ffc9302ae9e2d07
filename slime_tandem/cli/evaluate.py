"""`slime-tandem eval`: a senior on held-out prompts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from slime_tandem.cli import flags
from slime_tandem.errors import RunDirError
from slime_tandem.files import require_place


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands,
        "eval",
        "A senior on held-out prompts: solo pass@k, handoff robustness, drift from the junior, legibility to it.",
        settings=True,
    )
    parser.add_argument(
        "--handoff-strategy",
        metavar="STRATEGY",
        default=argparse.SUPPRESS,
        help="short for --set eval.handoff_strategy=... (default: that setting)",
    )
    parser.add_argument("--output", metavar="FILE", help="also write the figures as JSON")
    parser.add_argument("--plot", metavar="FILE", help="also draw them, as one self-contained SVG")
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the table and its notes, and write what was asked for."""
    from rich.console import Console

    from slime_tandem.evaluation.run import run_evaluation
    from slime_tandem.evaluation.show import svg, table

    named = getattr(args, "handoff_strategy", None)
    config = flags.load_config(args, {"eval.handoff_strategy": None if named is None else json.dumps(named)})
    for flag, name in (("--output", args.output), ("--plot", args.plot)):
        if name is not None:
            require_place(Path(name), flag)
    evaluation = run_evaluation(config, lambda line: print(line, file=sys.stderr, flush=True))
    Console().print(table(evaluation))
    for note in evaluation.notes:
        print(note)
    _write("--output", args.output, json.dumps(evaluation.to_json(), indent=2, allow_nan=False) + "\n")
    _write("--plot", args.plot, svg(evaluation))
    return 0


def _write(flag: str, name: str | None, text: str) -> None:
    if name is not None:
        try:
            Path(name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunDirError(flag, name, "a writable file", str(error)) from None
