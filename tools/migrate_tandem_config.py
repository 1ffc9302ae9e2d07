"""Renames legacy field names in configs, run scripts and checkpoint blobs, and reports each change (--write makes it)."""

from __future__ import annotations

import argparse
import sys

from slime_tandem.cli import main
from slime_tandem.cli.migrate import declare


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="migrate_tandem_config.py", description=__doc__)
    declare(p)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
