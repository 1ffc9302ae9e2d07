"""The command line: arguments in, exit code out. One file per command; `flags` holds what several of them take."""

from slime_tandem.cli.convert import add_convert_flags
from slime_tandem.cli.main import main

__all__ = ["add_convert_flags", "main"]
