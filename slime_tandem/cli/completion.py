"""Completion for shells by argcomplete: `slime-tandem --print-completion bash`, zsh or fish prints what the shell sources.

The shell then asks the program itself, which knows commands, flags, the values of flags that have a choice, and after --set
the names of settings and, behind `=`, the values of those that have a choice; files where nothing of it fits. What is asked
imports no more than the parser (docs/commands.md has the time it takes).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from slime_tandem.config import RunConfig, choices_of, fields_of

SHELLS = ("bash", "zsh", "fish")
_ASKED = "_ARGCOMPLETE"
"""Of the environment: set by the shell that asks."""


class PrintCompletion(argparse.Action):
    """--print-completion SHELL: prints the script and ends the program, as --version does."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Print the script for the shell `values`."""
        print(completion(parser.prog, values))
        parser.exit()


def completion(program: str, shell: str) -> str:
    """The script that a shell can source."""
    import argcomplete.shell_integration

    return argcomplete.shell_integration.shellcode([program], shell=shell)


def answer_shell(parser: argparse.ArgumentParser) -> None:
    """Where a shell asks for completions, answer it and end the program; else nothing."""
    if _ASKED in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)


def settings(prefix: str, **_: object) -> Iterator[str]:
    """What may follow --set, beginning with `prefix`: names with `=`, and behind it the values where there is a choice.

    >>> list(settings("tandem.prob_s")), list(settings("models.dtype=b"))
    (['tandem.prob_senior='], ['models.dtype=bfloat16'])
    """
    name, equals, value = prefix.partition("=")
    if not equals:
        yield from (f"{field}=" for field, _, _ in fields_of() if field.startswith(prefix))
        return
    defaults = {field: default for field, default, _ in fields_of(RunConfig)}
    values = choices_of(name) if name in defaults else ()
    if isinstance(defaults.get(name), bool):
        values = ("true", "false")
    yield from (f"{name}={v}" for v in values if v.startswith(value))
