"""`slime-tandem doctor`: sanity probes on settings and models."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from slime_tandem.cli import flags
from slime_tandem.cli.exit_codes import DONE, FAULT
from slime_tandem.errors import printable, sentence

if TYPE_CHECKING:
    from slime_tandem.doctor.probes import Finding


def add(commands: flags.Commands) -> None:
    """Declare the command."""
    parser = flags.command(
        commands,
        "doctor",
        "Sanity probes on these settings and models: groups, masks, KL, log-probs of engine and trainer, tokenizers, length. "
        "Exit code 3 if a probe failed (fail, not warn), 0 else.",
        settings=True,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--prompts", type=int, default=4, help="prompts that are answered for the probes")
    parser.add_argument(
        "--length-updates",
        type=int,
        default=8,
        help="updates of the length probe on a throw-away policy; 0: leave it out",
    )
    parser.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    """Print each finding as it comes, or all as JSON; another exit code where one failed."""
    from dataclasses import asdict

    from slime_tandem.doctor.probes import all_passed
    from slime_tandem.doctor.run import run_doctor

    flags.at_least("--prompts", args.prompts)
    flags.at_least("--length-updates", args.length_updates, 0)

    def say(finding: Finding) -> None:
        if not args.json:
            print(printable(f"{finding.status:4}  {finding.name}: {finding.detail}"), flush=True)
            if finding.remedy:
                print(printable(f"      remedy: {sentence(finding.remedy)}"), flush=True)

    config = flags.load_config(args)
    findings = run_doctor(config, say, prompts=args.prompts, length_updates=args.length_updates)
    passed = all_passed(findings)
    if args.json:
        print(json.dumps({"passed": passed, "findings": [asdict(f) for f in findings]}, indent=2, allow_nan=False))
    return DONE if passed else FAULT
