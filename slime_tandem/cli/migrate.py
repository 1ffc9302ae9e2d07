"""`slime-tandem migrate`: old names of the first tandem code base renamed, or its TandemConfig as settings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_tandem.cli import flags
from slime_tandem.cli.exit_codes import DONE, REFUSED


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands,
        "migrate",
        "Rename the first tandem code base's names in configs, run scripts, code and checkpoints, and list what is left.",
    )
    declare(parser)


def declare(parser: argparse.ArgumentParser) -> None:
    """Its arguments and what it does, for `tools/migrate_tandem_config.py`, too."""
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="*.yaml, *.json, *.pt, or text such as *.sh"
    )
    parser.add_argument("--write", action="store_true", help="replace the files, keeping FILE.bak (none: report only)")
    parser.add_argument(
        "--settings",
        action="store_true",
        help="print instead the TandemConfig in the file as settings of slime-tandem (YAML), and what has no place among them",
    )
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Report, or write; with --settings print settings."""
    if args.settings:
        return _settings(args)
    from slime_tandem.config.migrate import migrate_file
    from slime_tandem.errors import ConfigError

    reports: list[int] = []
    left = 0
    for path in args.files:
        try:
            changes, alone = migrate_file(path, write=args.write)
        except ConfigError as error:  # the other files get their report
            print(f"error: {error}", file=sys.stderr)
            continue
        reports.append(len(changes))
        left += len(alone)
        for change in changes:
            print(f"{path}: {change}")
        for place, name in alone:
            print(f"{path}: {place}: {name} left alone, look at it", file=sys.stderr)
    did = "written; the old files are beside them as *.bak" if args.write else "nothing written: add --write"
    total, failed = sum(reports), len(args.files) - len(reports)
    if reports:
        print(f"{total} changes in {len(reports)} files, {did}" if total else f"no legacy name in {len(reports)} files")
    if left:
        print(f"{left} places left alone: they look like old names, and could be anything", file=sys.stderr)
    if failed:
        print(f"{failed} of {len(args.files)} files could not be read or changed", file=sys.stderr)
    return REFUSED if failed else DONE


def _settings(args: argparse.Namespace) -> int:
    from slime_tandem.config.legacy import tandem_settings
    from slime_tandem.config.load import load_yaml
    from slime_tandem.errors import ConfigError
    from slime_tandem.files import read_text

    if len(args.files) > 1 or args.write:
        raise ConfigError("--settings", f"{len(args.files)} files", "one file, without --write", "call it for each")
    path = args.files[0]
    text = read_text(path, "TandemConfig")
    try:
        tree = load_yaml(text)  # JSON is YAML
    except ValueError as error:
        raise ConfigError(str(path), str(error), "JSON or YAML", "correct it first") from None
    found = tandem_settings(tree)
    print(found.to_yaml(), end="")
    for note in found.notes:
        print(note, file=sys.stderr)
    return 0
