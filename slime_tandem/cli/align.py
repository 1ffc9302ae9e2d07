"""`slime-tandem align`: how a teacher's tokenizer cuts what a student's writes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_tandem.cli import flags
from slime_tandem.errors import ConfigError, DataError

SAMPLE = """The quick brown fox counts: 12 + 345 = 357, and 3.14159 * 2 = 6.28318.

两个分词器把同一段文字切成不同的词元。🚀 cafe\u0301, שלום, مرحبا

def area(radius: float) -> float:
    return 3.14159 * radius ** 2
"""
"""What is aligned where no FILE is named."""


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands,
        "align",
        "How a teacher's tokenizer cuts what a student's writes: turns, special tokens, coverage, unaligned spans in colour.",
    )
    for role in ("student", "teacher"):
        parser.add_argument(
            f"--{role}",
            required=True,
            metavar="TOKENIZER",
            help="folder, tokenizer.json, tekken.json, *.model, builtin:<role>",
        )
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="text, - for standard input (none: a sample of several kinds)"
    )
    parser.add_argument(
        "--ids", action="store_true", help="FILE holds a JSON list of the student's token ids instead of text"
    )
    parser.add_argument("--limit", type=int, default=400, help="tokens of the text that are shown")
    flags.add_thinking(parser)
    flags.add_cache_dir(parser)
    flags.add_trust_remote_code(parser)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Align the text and print the special tokens, the coverage and the text itself."""
    from rich.console import Console

    from slime_tandem.distill.conversation import aligner_of
    from slime_tandem.distill.show import coloured, coverage_table, reasons_line
    from slime_tandem.distill.teacher import describe_special, read_turn
    from slime_tandem.models.text_tokenizer import load_response, load_text_tokenizer, sample_ids

    flags.at_least("--limit", args.limit)
    if args.ids and args.file is None:
        raise ConfigError("--ids", "without FILE", "a file of ids", "name the file, or - for standard input")
    trust, cache = args.trust_remote_code, Path(args.cache_dir)
    student = load_text_tokenizer(args.student, cache, trust_remote_code=trust)
    teacher = load_text_tokenizer(args.teacher, cache, trust_remote_code=trust)
    text = SAMPLE if args.file is None else _read_text(args.file)
    ids = load_response(text, args.file) if args.ids else sample_ids(student, text)
    if student.chat and teacher.chat:
        aligner, written = read_turn(student.chat, teacher.chat, ids, args.thinking)
    else:
        aligner = aligner_of(student.tokens, teacher.tokens, teacher.markup, args.thinking)
        written = aligner.write(ids, teacher.encode)
    aligned = aligner.align(written)
    console = Console(highlight=False, soft_wrap=True)
    for role, tokenizer in (("student", student), ("teacher", teacher)):
        found = tokenizer.chat.lines() if tokenizer.chat else ["no chat template: ends of turn go by names of tokens"]
        print("\n  ".join([f"turns of the {role}:", *found]))
    print(describe_special(aligner))
    for side in (student, teacher):
        if side.tokens.disproved:
            n = len(side.tokens.disproved)
            print(f"{side.name}: {n} ids are masked, its decoder writes something else than their pieces")
    console.print(coverage_table(aligned, f"{student.name} <- {teacher.name}"))
    console.print(reasons_line(aligned))
    console.print(coloured(ids, aligned, student.show, args.limit))
    return 0


def _read_text(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        text.encode()  # standard input can hold what is no UTF-8 as half surrogate pairs
        return text
    except (OSError, ValueError) as error:  # no UTF-8, or a NUL in the name
        raise DataError("FILE", name, f"a readable UTF-8 text ({error})", "check the path") from None
