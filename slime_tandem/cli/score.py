"""`slime-tandem score`: a teacher's log-probs of the responses in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from slime_tandem.cli import flags
from slime_tandem.config import AlignmentPolicy
from slime_tandem.errors import ConfigError
from slime_tandem.files import parse_json


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands, "score", "A teacher's log-probs of the responses in a JSONL file, at the student's positions."
    )
    parser.add_argument("file", metavar="FILE", help="lines with messages (or prompt) and response_ids (or response)")
    parser.add_argument("--output", required=True, metavar="FILE", help="JSONL to write; appears when all is done")
    parser.add_argument(
        "--student", required=True, metavar="MODEL", help="whose ids the responses are in: folder or builtin:<role>"
    )
    parser.add_argument("--teacher", required=True, metavar="MODEL", help="who scores: folder or builtin:<role>")
    parser.add_argument("--teacher-url", metavar="URL", help="use this running server of it (none: start one)")
    parser.add_argument("--policy", choices=get_args(AlignmentPolicy), default="strict", help="as opd.alignment")
    parser.add_argument("--top-k", type=int, default=0, help="also the teacher's most likely tokens at each position")
    flags.add_thinking(parser)
    parser.add_argument(
        "--template-kwargs", metavar="JSON", default="{}", help="variables of the teacher's chat template"
    )
    parser.add_argument(
        "--student-template-kwargs", metavar="JSON", default="{}", help="variables of the student's chat template"
    )
    flags.add_dtype(parser, "weights of a server started here")
    flags.add_api_key_env(parser, "environment variable with the server's key")
    flags.add_cache_dir(parser)
    flags.add_trust_remote_code(parser)
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Score the file and print how much of it has a value."""
    from slime_tandem.team.score_file import ScoreJob, score_file

    job = ScoreJob(
        Path(args.file),
        Path(args.output),
        args.student,
        args.teacher,
        Path(args.cache_dir),
        teacher_url=args.teacher_url,
        policy=args.policy,
        top_k=args.top_k,
        thinking=args.thinking,
        template_kwargs=_json_object("--template-kwargs", args.template_kwargs),
        student_template_kwargs=_json_object("--student-template-kwargs", args.student_template_kwargs),
        api_key=flags.api_key(args),
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
    )
    result = score_file(job)
    share = "no token" if result.coverage is None else f"{result.coverage:.1%} of the tokens with a value"
    print(f"{args.output}: {result.lines} responses, {result.failed} without scores, {share}")
    return 0


def _json_object(flag: str, text: str) -> dict[str, object]:
    try:
        value = parse_json(text)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ConfigError(flag, text, f"a JSON object ({error})", 'e.g. {"enable_thinking": false}') from None
    return value
