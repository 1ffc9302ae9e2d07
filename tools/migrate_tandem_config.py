"""Renames legacy field names in configs, run scripts and checkpoint blobs, and reports each change (--write makes it)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_tandem.cli import main


def run(args: argparse.Namespace) -> int:
    from slime_tandem.config.migrate import migrate_file
    from slime_tandem.errors import ConfigError

    reports: list[int] = []
    for path in args.files:
        try:
            changes = migrate_file(path, write=args.write)
        except ConfigError as error:  # the other files get their report
            print(f"error: {error}", file=sys.stderr)
            continue
        reports.append(len(changes))
        for change in changes:
            print(f"{path}: {change}")
    did = "written; the old files are beside them as *.bak" if args.write else "nothing written: add --write"
    total, failed = sum(reports), len(args.files) - len(reports)
    if reports:
        print(f"{total} changes in {len(reports)} files, {did}" if total else f"no legacy name in {len(reports)} files")
    if failed:
        print(f"{failed} of {len(args.files)} files could not be read or changed", file=sys.stderr)
    return 2 if failed else 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="migrate_tandem_config.py", description=__doc__)
    p.add_argument("files", type=Path, nargs="+", metavar="FILE", help="*.yaml, *.json, *.pt, or text such as *.sh")
    p.add_argument("--write", action="store_true", help="replace the files, keeping FILE.bak (none: report only)")
    p.set_defaults(action=run)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
