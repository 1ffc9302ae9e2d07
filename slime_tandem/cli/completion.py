"""Completion for shells, made from the parser: `slime-tandem --print-completion bash`, or zsh, which reads bash's.

Commands, flags, the values of flags that have a choice, and after --set the settings' names; files where nothing of it fits.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from slime_tandem.config import fields_of

SHELLS = ("bash", "zsh")
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
_{name}() {{
  local at=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} flag= words= i
  for ((i = 2; i < COMP_CWORD; i++)); do
    case "${{COMP_WORDS[i]}}" in -*) flag=${{COMP_WORDS[i]}} ;; esac
  done
  if ((COMP_CWORD == 1)); then
    words={top}
  elif [[ $at == -* ]]; then
    case "$command" in
{flags}
    esac
  elif [[ $flag == --set ]]; then
    words={settings}
    if type compopt > /dev/null 2>&1; then compopt -o nospace; fi
  else
    case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$at"))
}}
complete -o default -F _{name} {prog}
"""


class PrintCompletion(argparse.Action):
    """--print-completion SHELL: prints the script and ends the program, as --version does."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Print the script for the shell `values`."""
        print(completion(parser, values), end="")
        parser.exit()


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script that bash or zsh can source, for a parser of commands."""
    commands = _commands(parser)
    cases = {
        "flags": [f"      {name}) words={_quoted(_flags(sub))} ;;" for name, sub in commands.items()],
        "values": [
            f"      {shlex.quote(f'{name} {before}')}) words={_quoted(choices)} ;;"
            for name, sub in commands.items()
            for before, choices in _values(name, sub)
        ],
    }
    script = _SCRIPT.format(
        name=parser.prog.replace("-", "_"),
        prog=parser.prog,
        top=_quoted([*commands, *_flags(parser)]),
        settings=_quoted([f"{name}=" for name, _, _ in fields_of()]),
        **{kind: "\n".join(lines) for kind, lines in cases.items()},
    )
    return script if shell == "bash" else _ZSH + script


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [action.option_strings[-1] for action in parser._actions if action.option_strings]


def _values(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Sequence[str]]]:
    """(word before, choices) of each flag that has a choice, and of arguments right behind the command."""
    for action in parser._actions:
        if action.choices:
            for before in action.option_strings or (name,):
                yield before, [str(choice) for choice in action.choices]


def _quoted(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))
