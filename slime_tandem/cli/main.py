"""The command line: `slime-tandem COMMAND`; `--help` lists the commands.

Exit codes: `exit_codes`. Of an error that a user can cause or meet there is one message that says what to do
(`SLIME_TANDEM_TRACEBACK=1` adds the traceback); the traceback of a fault of ours follows a line that asks for a report.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence

from slime_tandem import __version__
from slime_tandem.cli import (
    align,
    config,
    convert,
    doctor,
    evaluate,
    migrate,
    models,
    report,
    score,
    serve,
    suite,
    train,
)
from slime_tandem.cli.completion import SHELLS, PrintCompletion, answer_shell
from slime_tandem.cli.exit_codes import INTERNAL, REFUSED, STOPPED, in_words
from slime_tandem.errors import ConfigError, RunDirError, TandemError, printable
from slime_tandem.signals import terminate_as_interrupt

# Idle OpenMP threads must sleep, not spin: several processes share the cores (set before torch is imported).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

COMMANDS = (train, evaluate, doctor, align, score, suite, report, config, migrate, convert, serve, models)
"""A module for each command, in the order of --help: `add` declares it, `run` does it. What is heavy they import in `run`."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="slime-tandem", description="Several language models, one trajectory.", epilog=f"Exit codes: {in_words()}."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print a script that completes commands in a shell",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


def _flush() -> None:
    """Deliver what was printed, here, where a failure is an exit code; at the interpreter's end it would be a traceback."""
    if sys.stdout is None:  # started with a closed standard output
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered has no reader: the interpreter's own flush must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise RunDirError.of_os_error("output", error) from None


def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Entry point of `slime-tandem`; returns the exit code (module docstring). Raises SystemExit for --help and bad flags.

    Another `parser` with a default `action(args) -> exit code` makes another command of it (tools/).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the table's lines are no reason to fail on an ASCII terminal
    parser = parser or build_parser()
    answer_shell(parser)
    command = parser.prog
    try:
        try:
            args = parser.parse_args(argv)
            command = " ".join((parser.prog, *([args.command] if "command" in args else [])))
            with terminate_as_interrupt():
                code: int = args.action(args)
        finally:
            _flush()
        return code
    except BrokenPipeError:
        return INTERNAL
    except (TandemError, OSError) as error:
        if os.environ.get("SLIME_TANDEM_TRACEBACK"):
            traceback.print_exc()
        told = error if isinstance(error, TandemError) else TandemError.of_os_error(error.filename or "output", error)
        print(printable("\n".join((f"{command}: {told}", *getattr(error, "__notes__", ())))), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt as error:
        hint = "; `--resume` goes on from the last checkpoint, if there is one" if command.endswith(" train") else ""
        print(printable("\n".join((f"\n{command}: stopped{hint}", *getattr(error, "__notes__", ())))), file=sys.stderr)
        return STOPPED
    except Exception as error:  # noqa: BLE001 - whatever it is, the next lines say it
        if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "slime_tandem":
            expected, remedy = (
                f"installed for {sys.executable}",
                "install what pyproject.toml names (docs/slime.md, Installing)",
            )
            print(printable(f"{command}: {ConfigError('package', error.name, expected, remedy)}"), file=sys.stderr)
            return REFUSED
        # Ours: said first, then shown whole.
        print(
            f"{command}: internal error ({type(error).__name__}). Please report it with the lines below.",
            file=sys.stderr,
        )
        traceback.print_exc()
        return INTERNAL
