"""The command line: arguments in, exit code out."""

from slime_tandem.cli.main import add_convert_flags, main

__all__ = ["add_convert_flags", "main"]
