"""Converts a model between a Hugging Face folder and Megatron's torch_dist, either way: the same as `slime-tandem convert`."""

from __future__ import annotations

import argparse
import sys

from slime_tandem.cli import add_convert_flags, main


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="convert_checkpoint.py", description=__doc__)
    add_convert_flags(p)
    return p


if __name__ == "__main__":
    sys.exit(main(parser=parser()))
