"""Flags that several commands and tools share, each declared once, and how their values are read or refused.

Knows argparse and the settings tree. What a command does with its arguments is in the command's own file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping
from functools import cache
from textwrap import shorten
from typing import TYPE_CHECKING, TypeAlias, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from slime_tandem.cli import completion
from slime_tandem.config import ENTRIES, RunConfig, Thinking, choices_of, fields_of
from slime_tandem.config.reference import own_settings, said_of, sections
from slime_tandem.errors import ConfigError

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


_WIDTH = 120
"""Of a line of help that lists sections; the rest of a section's sentence stands in docs/settings.md."""


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown for every flag that has one, the settings list kept as it is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default in (None, False) or action.default == []
        return action.help if nothing else super()._get_help_string(action)


def command(commands: Commands, name: str, text: str, *, settings: bool = False) -> argparse.ArgumentParser:
    """The parser of a new command; `text` describes it in one line.

    `settings`: it takes --config, --set and --model, which `load_config` reads, and its help lists their sections.
    """
    epilog = _sections_help() if settings else None
    parser = commands.add_parser(name, help=text, description=text, formatter_class=_Formatter, epilog=epilog)
    if settings:
        group = parser.add_argument_group("settings")
        add_config(group, "YAML file with settings (none: all defaults)")
        add_set(group, "override settings, e.g. tandem.prob_senior=0.3 (values are YAML)")
        group.add_argument("--model", metavar="FOLDER", help="short for --set models.senior=FOLDER")
    return parser


@cache
def _sections_help() -> str:
    """A line for each section of the settings, and where all of them stand."""
    known = list(sections())
    width = max(len(name) for name, _ in known)
    lines = ["sections of the settings, of the YAML file and behind --set, with how many each has:"]
    for name, section in known:
        count = len(own_settings(section))
        if count:
            said = shorten(said_of(section).partition(". ")[0].rstrip("."), _WIDTH - width - 12, placeholder=" ...")
            lines.append(f"  {name or '(the run)':{width}}  {count:3}  {said}")
    lines += [
        "",
        "every setting of a section, with its default and what it does:",
        "  slime-tandem config --list tandem    (without a name: of all sections; the same as docs/settings.md)",
    ]
    return "\n".join(lines).replace("%", "%%")


def settings_text(section: str = "") -> str:
    """Every setting of a section (of all: "") with its default, what it does, and its values where there is a choice.

    Raises ConfigError for a name that is no section's.
    """
    known = [name for name, _ in sections()]
    wanted = section.removesuffix("[]")
    if wanted and wanted not in {name.removesuffix("[]") for name in known}:
        close = difflib.get_close_matches(section, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "choose one of these"
        raise ConfigError("--list", section, f"a section: {', '.join(name for name in known if name)}", hint)
    lines = []
    for name, default, text in fields_of():
        if not wanted or name.startswith(f"{wanted}.") or name == wanted:
            lines += [f"{name} = {shown(default)}", f"    {text}"]
            if options := choices_of(name):
                lines.append(f"    one of: {', '.join(options)}")
    for where, entry in ENTRIES.items():
        if not wanted or f"{where}[]".startswith(wanted):
            lines.append(f"each entry of `{where}`:")
            for name, default, text in fields_of(entry, f"{where}[]."):
                required = default is PydanticUndefined
                lines += [f"{name} (required)" if required else f"{name} = {shown(default)}", f"    {text}"]
    return "\n".join(lines)


def shown(default: object) -> str:
    """A setting's default as --help shows it: JSON, of nested settings what is not their own default.

    >>> shown(("word", 0.5)), shown(None)
    ('["word", 0.5]', 'null')
    """
    if isinstance(default, tuple):
        return json.dumps([d.model_dump(exclude_defaults=True) if isinstance(d, BaseModel) else d for d in default])
    return json.dumps(default)


def add_config(parser: argparse._ActionsContainer, text: str) -> None:
    """--config FILE, in `args.config`."""
    parser.add_argument("--config", metavar="FILE", help=text)


def add_set(parser: argparse._ActionsContainer, text: str) -> None:
    """--set KEY=VALUE ..., which may stand several times; all in `args.overrides`."""
    action = parser.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", action="extend", nargs="+", default=[], help=text
    )
    vars(action)["completer"] = completion.settings  # argcomplete looks there


def load_config(args: argparse.Namespace, more: Mapping[str, str | None] | None = None) -> RunConfig:
    """The settings of --config, --set and --model; `more`: of a command's own short flags, by setting, None where not given.

    Raises ConfigError.
    """
    given = {"models.senior": None if args.model is None else json.dumps(args.model), **(more or {})}
    short = [f"{name}={value}" for name, value in given.items() if value is not None]
    return RunConfig.load(args.config, [*args.overrides, *short])


def add_cache_dir(parser: argparse.ArgumentParser, text: str = "where built-in checkpoints are") -> None:
    """--cache-dir FOLDER, in `args.cache_dir`."""
    parser.add_argument("--cache-dir", default=".cache/models", help=text)


def add_trust_remote_code(parser: argparse.ArgumentParser, whose: str = "a folder") -> None:
    """--trust-remote-code; `whose` code it is."""
    parser.add_argument("--trust-remote-code", action="store_true", help=f"run Python code that {whose} brings")


def add_dtype(parser: argparse.ArgumentParser, text: str) -> None:
    """--dtype, in `args.dtype`; `text`: of what."""
    parser.add_argument("--dtype", default="float32", choices=choices_of("models.dtype"), help=text)


def add_thinking(parser: argparse.ArgumentParser) -> None:
    """--thinking, in `args.thinking`, as `opd.thinking`."""
    parser.add_argument("--thinking", choices=get_args(Thinking), default="keep", help="how the teacher meets thinking")


def add_api_key_env(parser: argparse.ArgumentParser, text: str) -> None:
    """--api-key-env NAME; `api_key` reads the variable."""
    parser.add_argument("--api-key-env", metavar="NAME", help=text)


def api_key(args: argparse.Namespace) -> str | None:
    """The key in the variable that --api-key-env names, None without the flag; raises ConfigError for one that is not set."""
    name: str | None = args.api_key_env
    if not name:
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError("--api-key-env", name, "a variable that is set", "export it first")
    return key


def at_least(flag: str, value: int, least: int = 1) -> None:
    """Raise ConfigError, which names `flag`, for a value below `least`."""
    if value < least:
        raise ConfigError(flag, value, f"at least {least}", "raise it")
