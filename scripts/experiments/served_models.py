"""Which models real SGLang serves on a CPU, and jobs with them: plans, slime's parser, a short run; results/served-models.md.

    python scripts/experiments/served_models.py serve                     # each architecture: served? its log-probs?
    python scripts/experiments/served_models.py jobs                      # each job: plan, dry run, two steps on this machine

Models are tiny and random, of the real architectures, with the families' published vocabularies where a package ships them
(scripts/architectures.py). `--sglang-python` (or SLIME_TANDEM_SGLANG_PYTHON) has SGLang, `scripts/sglang_cpu.sh` makes one;
the dry run asks slime's own parser where SLIME_SOURCES names slime (`scripts/slime/cpu_env.sh`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

import torch  # noqa: E402
from architectures import ARCHITECTURES, make_model  # noqa: E402

from slime_tandem.config import RunConfig  # noqa: E402
from slime_tandem.engines.client import EngineClient  # noqa: E402
from slime_tandem.engines.processes import ServerProcess  # noqa: E402
from slime_tandem.engines.sglang import SglangProcess  # noqa: E402
from slime_tandem.errors import TandemError  # noqa: E402
from slime_tandem.models.hf import load_model  # noqa: E402
from slime_tandem.protocol import GenerateRequest, GenerateResult  # noqa: E402
from slime_tandem.slime_launch.flags import Plan  # noqa: E402
from slime_tandem.slime_launch.plan import launch_plan  # noqa: E402

SGLANG_ARGS = ("--grammar-backend", "none", "--context-length", "1024", "--disable-overlap-schedule")
PROMPT = tuple(range(40, 72))


@dataclass(frozen=True)
class Job:
    """`roles`: architecture and family of each; `settings`: of the configuration; `cluster`: of the plan alone."""

    roles: Mapping[str, tuple[str, str]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)


DENSE = ("qwen3", "qwen3")
JOBS: dict[str, Job] = {
    "seed 002: dense student, teacher with experts, other vocabulary": Job(
        {"senior": DENSE, "teacher": ("qwen3_moe", "deepseek-v3")}, {"tandem": {"enabled": False}}
    ),
    "Mistral junior, junior_tokenizer=any": Job(
        {"senior": DENSE, "junior": ("mistral", "mistral-v3"), "teacher": ("qwen3", "qwen3")},
        {"tandem": {"junior_tokenizer": "any"}},
    ),
    "Gemma teacher": Job({"senior": DENSE, "junior": DENSE, "teacher": ("gemma3_text", "gemma3")}),
    "gpt-oss teacher": Job({"senior": DENSE, "teacher": ("gpt_oss", "gpt-oss")}, {"tandem": {"enabled": False}}),
}


def sglang(folder: Path, python: str, logs: Path) -> SglangProcess:
    return SglangProcess(
        folder, python=python, log_file=logs / f"{folder.name}.log", extra_args=SGLANG_ARGS, start_timeout_s=1800
    )


def generate(url: str, *requests: GenerateRequest) -> list[GenerateResult]:
    async def main() -> list[GenerateResult]:
        async with EngineClient(url, role="teacher", max_retries=0, timeout_s=120.0) as client:
            return await client.generate(requests)

    return asyncio.run(main())


def difference(url: str, folder: Path) -> float:
    """Largest difference of log-probs of a prompt and of a greedy answer, server against transformers, nats."""
    (scored, written) = generate(
        url,
        GenerateRequest("score", PROMPT, max_new_tokens=0, logprob_start_len=0),
        GenerateRequest("write", PROMPT, max_new_tokens=12, temperature=0.0),
    )
    model = load_model(folder, "float32")
    ids = [*PROMPT, *written.output_ids]
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    own = rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    of_prompt = [value for value in scored.input_log_probs if value is not None]
    n = len(PROMPT)
    pairs = [*zip(of_prompt, own[: n - 1], strict=True), *zip(written.output_log_probs, own[n - 1 :], strict=True)]
    return max(abs(a - b) for a, b in pairs)


def why(log: Path, error: TandemError) -> str:
    """The last error in a server's log, in a line."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    marks, chatter = ("Error", "not supported"), ("Traceback", "Warning")
    found = [x.strip() for x in lines if any(m in x for m in marks) and not any(c in x for c in chatter)]
    return (found[-1] if found else error.what)[-240:]


def serve(args: argparse.Namespace, work: Path) -> None:
    print("| architecture | family | SGLang | embedded server |\n|---|---|---|---|")
    for name in args.only or ARCHITECTURES:
        folder = make_model(name, work / name, real=args.real, seed=1)
        row = []
        for server in (
            sglang(folder, args.sglang_python, work),
            ServerProcess(str(folder), log_file=work / f"{name}-embedded.log"),
        ):
            try:
                with server:
                    row.append(f"{difference(server.url, folder):.1e}")
            except TandemError as error:
                row.append(f"no: {why(Path(server.log_file), error)}")
        print(f"| {name} | {ARCHITECTURES[name].family} | {' | '.join(row)} |", flush=True)


def folder_of(role: tuple[str, str], work: Path, real: bool, seed: int) -> Path:
    name, family = role
    return make_model(name, work / f"{name}-{family}-{seed}", real=real, seed=seed, family=family)


def tree_of(job: Job, folders: Mapping[str, Path]) -> dict[str, Any]:
    return {
        "models": {role: str(folder) for role, folder in folders.items()},
        "tasks": [{"family": "chain_sum"}],
        "sampling": {"max_new_tokens": 24},
        "train": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2},
        "control": False,
        **{section: dict(values) for section, values in job.settings.items()},
    }


def planned(job: Job, folders: Mapping[str, Path], launch: Path) -> Plan:
    """The launch by slime on a machine of eight GPUs."""
    tree = {**tree_of(job, folders), "cluster": {"trainer_gpus": 4, **job.cluster}}
    return launch_plan(RunConfig.from_mapping(tree), launch)


def dry_run(plan: Plan) -> str:
    """What slime's own parser and our hooks say of a plan."""
    sources = os.environ.get("SLIME_SOURCES")
    if sources is None:
        return "not asked: SLIME_SOURCES is not set"
    plan.write()
    path = [ROOT / "scripts" / "slime" / "shim", ROOT, f"{sources}/slime", f"{sources}/Megatron-LM"]
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, path)), "SLIME_TANDEM_CPU": "1"}
    command = [f"{sources}/venv/bin/python", "-W", "ignore", "-m", "slime_tandem.slime_launch.real_parser", *plan.flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return "taken" if done.returncode == 0 else (done.stdout + done.stderr).strip().splitlines()[-1]


def server_of(folder: Path, python: str, work: Path, stack: ExitStack) -> tuple[str, str]:
    """(URL, what serves there): SGLang, or the embedded server for what SGLang cannot serve on a CPU."""
    try:
        return stack.enter_context(sglang(folder, python, work)).url, "SGLang"
    except TandemError as error:
        print(f"{folder.name}: SGLang: {why(work / f'{folder.name}.log', error)}", file=sys.stderr, flush=True)
        server = ServerProcess(str(folder), log_file=work / f"{folder.name}-embedded.log")
        return stack.enter_context(server).url, "embedded"


def run_here(
    job: Job, folders: Mapping[str, Path], args: argparse.Namespace, work: Path
) -> tuple[dict[str, Any], list[str]]:
    """(metrics of the second of two steps on this machine, who served whom): the senior on the embedded server, which takes new
    weights, the others on SGLang where it can."""
    from slime_tandem.local.run import train

    tree = tree_of(job, folders)
    tree |= {"name": "run", "runs_dir": str(work / "runs"), "eval": {"prompts": 1}, "engine": {"cache_tokens": 8192}}
    tree["train"]["threads"] = 1
    by = []
    with ExitStack() as stack:
        for role in sorted(folders.keys() - {"senior"}):
            tree["engine"][f"{role}_url"], server = server_of(folders[role], args.sglang_python, work, stack)
            by.append(f"{role}: {server}")
        train(RunConfig.from_mapping(tree), overwrite=True)
    rows = [json.loads(line) for line in (work / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    last: dict[str, Any] = rows[-1]
    return last, by


FIGURES = ("opd/coverage", "opd/teacher_kl", "opd/eos_coverage", "tandem/junior_token_fraction", "train/logprob_diff")


def jobs(args: argparse.Namespace, work: Path) -> None:
    print("| job | plan | slime's parser | run | " + " | ".join(f"`{name}`" for name in FIGURES) + " |")
    print("|---" * (4 + len(FIGURES)) + "|")
    for number, (name, job) in enumerate(JOBS.items()):
        if args.only and not any(word in name for word in args.only):
            continue
        place = work / f"job-{number}"
        place.mkdir(exist_ok=True)
        folders = {role: folder_of(what, work, args.real, seed) for seed, (role, what) in enumerate(job.roles.items())}
        plan = planned(job, folders, place / "launch")
        groups = ", ".join(f"{g.name} {g.gpus}" for g in plan.layout.groups)
        said, row, ran = dry_run(plan), {}, "2 steps; "
        try:
            row, by = run_here(job, folders, args, place)
            ran += ", ".join(by)
        except TandemError as error:
            ran = f"no: {error.what}"[:200]
        figures = ["-" if row.get(n) is None else f"{row[n]:.3g}" for n in FIGURES]
        print(f"| {name} | {groups} | {said} | {ran} | {' | '.join(figures)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("serve", "jobs"))
    parser.add_argument("--only", nargs="*", help="architectures by name, or jobs by a word of theirs")
    parser.add_argument("--small", dest="real", action="store_false", help="vocabularies of some hundred tokens")
    parser.add_argument("--sglang-python", default=os.environ.get("SLIME_TANDEM_SGLANG_PYTHON"))
    parser.add_argument("--work", type=Path, help="folder for models and logs, kept; default: one that is removed")
    args = parser.parse_args(argv)
    if args.sglang_python is None:
        parser.error("--sglang-python: export SLIME_TANDEM_SGLANG_PYTHON=$(bash scripts/sglang_cpu.sh)")
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        {"serve": serve, "jobs": jobs}[args.what](args, work)


if __name__ == "__main__":
    main()
