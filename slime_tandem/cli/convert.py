"""`slime-tandem convert`: a model between a Hugging Face folder and Megatron's torch_dist."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import subprocess
from pathlib import Path

from slime_tandem.cli import flags
from slime_tandem.errors import ConfigError


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    add_convert_flags(
        flags.command(
            commands, "convert", "A model between a Hugging Face folder and Megatron's torch_dist, either way."
        )
    )


def add_convert_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `convert`, which tools/convert_checkpoint.py shares, and its action."""
    parser.add_argument(
        "source", metavar="SOURCE", help="Hugging Face folder, or a torch_dist checkpoint (its --save folder)"
    )
    parser.add_argument("output", metavar="OUTPUT", help="folder to write; a stopped conversion goes on")
    parser.add_argument(
        "--like", metavar="FOLDER", help="towards Hugging Face: folder with the model's config and tokenizer"
    )
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    parser.add_argument("--verify", action="store_true", help="compare log-probs of both sides (holds both models)")
    parser.add_argument("--max-file-gib", type=float, default=4.0, help="largest file that is written")
    parser.add_argument(
        "--model-args",
        metavar="FILE",
        help="mixture of experts: shell file with MODEL_ARGS for slime's converter (SLIME_DIR); not needed for qwen3_moe",
    )
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Convert, or run slime's own converter for a mixture of experts; its exit code is ours."""
    from slime_tandem.megatron.conversion import Job, convert, needs_slime, slime_command, verify
    from slime_tandem.megatron.torch_dist import find_torch_dist
    from slime_tandem.slime_launch.sizes import flags_of_folder, read_model_args

    if not 0 < args.max_file_gib < math.inf:
        raise ConfigError("--max-file-gib", args.max_file_gib, "a finite number above 0", "e.g. 4")
    source, like = Path(args.source), None if args.like is None else Path(args.like)
    job = Job(source, Path(args.output), like, args.force, int(args.max_file_gib * 2**30))
    if needs_slime(job):
        slime = os.environ.get("SLIME_DIR")
        model_args = read_model_args(Path(args.model_args)) if args.model_args else flags_of_folder(source)
        command = slime_command(job, None if slime is None else Path(slime), model_args)
        print(shlex.join(command), flush=True)
        return subprocess.run(command, check=False).returncode  # noqa: S603 - slime's own tool, no shell
    back = find_torch_dist(source) is not None
    hf, dist = convert(job)
    if args.verify:
        verify(hf, dist, by_megatron=not back)
    print(f"written: {job.output}")
    return 0
