"""A local job with junior, teacher and control, killed at many moments and resumed: is anything lost or different?

    python scripts/benchmarks/kill_resume.py --moments 10 --seed 0
    python scripts/benchmarks/kill_resume.py --every 20 --steps 70 [--sglang PYTHON [--seeded]]

Tiny random models. One job runs undisturbed. Then, per moment, the same job gets SIGKILL when it has written that share of
its rows, and up to a second later, and is resumed until it ends; then the server of each role is killed once in a job that
goes on. Rows of metrics, evaluations and rewards must equal the undisturbed job's (without clocks and retries), the last
checkpoints' weights too, and no process may be left. Exit code 1 if not.

With `--every` one server (senior, junior, teacher in turn) gets SIGKILL every so many steps, at a random moment of a step,
in one job that goes on by itself, beside jobs without faults. Told are the seconds that each death cost, the job's effective
training time (seconds of all steps without faults over those with), and the first rows that differ. `--sglang`: all three are
real SGLang on this CPU, `--seeded` with draws that follow a request's seed (`seeded_sglang`): without it no drawn token of
SGLang's repeats on a CPU, and only counts can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from bench_models import tiny_pair

STEPS = 6
FILES = ("metrics.jsonl", "eval.jsonl", "rewards.jsonl")


def settings(models: dict[str, str], runs: Path) -> dict[str, Any]:
    task = {"family": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
    return {
        "name": "job", "runs_dir": str(runs), "models": models, "control": True, "tasks": [task],
        "sampling": {"max_new_tokens": 24},
        "train": {"steps": STEPS, "prompts_per_step": 4, "samples_per_prompt": 3, "save_every": 1, "threads": 1},
        "eval": {"prompts": 4},
        "engine": {"cache_tokens": 4096, "backoff_s": 0.05},
        "optimizer": {"lr": 0.01},
        "objective": {"kl_coef": 0.1, "kl_target": 0.02, "lambda_jun": 0.1},
    }  # fmt: skip


def start(
    folder: Path,
    models: dict[str, str],
    *flags: str,
    changed: Mapping[str, Mapping[str, Any]] | None = None,
    sglang: str | None = None,
    seeded: bool = False,
) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    wanted = settings(models, folder / "runs")
    for section, values in (changed or {}).items():
        wanted[section] = {**wanted[section], **values}
    if changed:
        wanted["control"] = False
    config.write_text(yaml.safe_dump(wanted), encoding="utf-8")
    command = [sys.executable, "-m", "slime_tandem.cli"]
    if sglang is not None:
        command = [sys.executable, str(Path(__file__).resolve()), "--job", sglang, *(["--seeded"] if seeded else [])]
    with (folder / "log.txt").open("ab") as log:
        command += ["train", "--config", str(config), *flags]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def job(python: str, arguments: list[str], *, seeded: bool) -> int:
    """The command line, with real SGLang in the place of embedded servers."""
    from slime_tandem.cli.main import main as cli
    from slime_tandem.engines.serve_options import ServeOptions
    from slime_tandem.engines.sglang import SglangProcess
    from slime_tandem.team.servers import Servers

    class Seeded(SglangProcess):
        def _environment(self) -> Mapping[str, str]:
            here = {
                "SGLANG_EXTERNAL_MODEL_PACKAGE": "seeded_sglang",
                "PYTHONPATH": str(Path(__file__).resolve().parent),
            }
            return {**super()._environment(), **(here if seeded else {})}

    def process(self: Servers, role: str, key: str) -> SglangProcess:
        log = self.log_dir / f"{role}.log"
        return Seeded(
            self.roster.folders[role], ServeOptions(api_key=key), python=python, log_file=log, start_timeout_s=900
        )

    Servers._process = process  # type: ignore[method-assign,assignment]
    return cli(arguments)


def rows(path: Path) -> list[dict[str, Any]]:
    """Rows without what depends on the clock or on luck with connections."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    told = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "engine/retries"} for row in told]


def outcome(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arm in (folder / "runs" / "job", folder / "runs" / "job" / "control"):
        found |= {f"{arm.name}/{name}": rows(arm / name) for name in FILES}
        last = arm / "checkpoints" / f"step-{STEPS:06d}"
        weights = sorted(last.glob("*.distcp"))
        found[f"{arm.name}/weights"] = [hashlib.sha256(p.read_bytes()).hexdigest() for p in weights]
        assert weights, f"{last} holds no weights"
    return found


def children(folder: Path) -> dict[str, int]:
    """Servers whose log lies in this folder, by the name of the log: of several processes the one that leads them."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            log = os.readlink(process / "fd" / "1")
        except OSError:
            continue
        if process.name.isdigit() and log.startswith(str(folder / "runs")):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(process.name)) == int(process.name):
                    found[Path(log).stem] = int(process.name)
    return found


def steps_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "runs" / "job" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def answers_of(folder: Path) -> list[int]:
    """How many rewards each step has."""
    counts: Counter[int] = Counter()
    for row in rows(folder / "runs" / "job" / "rewards.jsonl"):
        counts[row["step"]] += row["samples"]
    return [counts[step] for step in sorted(counts)]


def kill_every(args: argparse.Namespace, root: Path, models: dict[str, str], draw: random.Random) -> int:
    """One job with deaths beside others without; returns how much is wrong."""
    changed = {"train": {"steps": args.steps, "save_every": args.every}}
    how: dict[str, Any] = {"changed": changed, "sglang": args.sglang, "seeded": args.seeded}
    plain = [root / f"plain-{i}" for i in range(args.plain)]
    for folder in plain:
        assert start(folder, models, **how).wait() == 0, (folder / "log.txt").read_text()
    usual = statistics.median(row["time/step_s"] for folder in plain for row in steps_of(folder)[1:])
    print(f"{args.steps} steps without faults, median {usual:.2f} s", flush=True)

    folder = root / "killed"
    running = start(folder, models, **how)
    deaths: list[tuple[int, str]] = []
    roles = itertools.cycle(("senior", "junior", "teacher"))
    for at in range(args.every, args.steps - 1, args.every):
        while len(steps_of(folder)) < at and running.poll() is None:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, usual))
        role, now = next(roles), len(steps_of(folder))
        os.kill(children(folder)[role], signal.SIGKILL)
        deaths.append((now, role))
    code = running.wait()
    told = steps_of(folder)
    for at, role in deaths:
        # The step in which it was missed: a teacher's death while the senior writes is seen when it is asked.
        late = max(told[at : at + 2], key=lambda row: row["time/step_s"])
        print(f"{role} killed in step {at}: step {late['step']} took {late['time/step_s']:.1f} s, "
              f"{late['time/step_s'] - usual:.1f} more; {late['engine/retries']:.0f} asked again", flush=True)  # fmt: skip

    def total(folder: Path) -> float:
        return sum(row["time/step_s"] for row in steps_of(folder)[1:])

    whole = min(map(total, plain))
    lost = (total(folder) - whole) / max(len(deaths), 1)
    print(f"effective training time {whole / total(folder):.3f} ({whole:.1f} of {total(folder):.1f} s); {lost:.1f} s a death: "
          f"0.95 from steps of {0.95 / 0.05 * lost / args.every:.1f} s on")  # fmt: skip

    def first_difference(a: Path, b: Path) -> str:
        mine, other = (rows(f / "runs" / "job" / "metrics.jsonl") for f in (a, b))
        for x, y in zip(mine, other, strict=True):
            if names := sorted(k for k in x.keys() | y.keys() if x.get(k) != y.get(k)):
                return f"from step {x['step']} on, {len(names)} metrics: {', '.join(names[:4])}"
        return "in nothing"

    for other in plain[1:]:
        print(f"two jobs without faults differ {first_difference(plain[0], other)}")
    print(f"the job with deaths differs from one without {first_difference(plain[0], folder)}")
    want = settings(models, root)["train"]["prompts_per_step"] * settings(models, root)["train"]["samples_per_prompt"]
    numbers = [row["step"] for row in told]
    whole_rows = numbers == list(range(args.steps)) and set(answers_of(folder)) == {want}
    print(f"steps {numbers[0]} to {numbers[-1]}, each once: {numbers == list(range(args.steps))}; responses of each: "
          f"{sorted(set(answers_of(folder)))}, {want} wanted; exit {code}; left {children(folder)}")  # fmt: skip
    return int(code != 0) + int(not whole_rows) + len(children(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, help="kill a server every so many steps of one job")
    parser.add_argument("--steps", type=int, default=70, help="with --every: steps of a job")
    parser.add_argument("--plain", type=int, default=2, help="with --every: jobs without faults")
    parser.add_argument("--sglang", metavar="PYTHON", help="with --every: real SGLang by this Python, on the CPU")
    parser.add_argument("--seeded", action="store_true", help="with --sglang: draws follow the requests' seeds")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    root = Path(tempfile.mkdtemp(prefix="kill-resume-")).resolve()
    student = tiny_pair(root / "student", context=256, eos=True)
    teacher = tiny_pair(root / "teacher", context=256, eos=True, vocab_size=300, seed=5)
    models = {"senior": str(student), "junior": str(student.parent / "junior"), "teacher": str(teacher)}

    if args.every is not None:
        wrong = kill_every(args, root, models, draw)
        print(f"{wrong} wrong; {root}")
        return int(wrong > 0)

    began = time.monotonic()
    assert start(root / "plain", models).wait() == 0, (root / "plain" / "log.txt").read_text()
    took = time.monotonic() - began
    want = outcome(root / "plain")
    print(f"undisturbed: {took:.0f} s, {len(want['job/metrics.jsonl'])} + {len(want['control/metrics.jsonl'])} rows")

    wrong = 0

    def judge(name: str, folder: Path, code: int, note: str) -> None:
        nonlocal wrong
        got = outcome(folder) if code == 0 else {}
        different = [key for key in want if got.get(key) != want[key]]
        left = children(folder)
        good = code == 0 and not different and not left
        wrong += not good
        print(
            f"{'same' if good else 'WRONG':6} {name}: exit {code}, {note}; different {different}, left {left}",
            flush=True,
        )

    def progress(folder: Path) -> list[int]:
        return [len(rows(folder / "runs" / "job" / arm / "metrics.jsonl")) for arm in ("", "control")]

    for number in range(args.moments):
        folder = root / f"killed-{number}"
        job = start(folder, models)
        while sum(progress(folder)) < number * 2 * STEPS / args.moments and job.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1.0))
        job.send_signal(signal.SIGKILL)
        job.wait()
        written = progress(folder)
        again = ("--resume",) if (folder / "runs" / "job").exists() else ()
        code = start(folder, models, *again).wait()
        judge(f"SIGKILL after {written[0]} + {written[1]} rows", folder, code, "resumed")

    for role in ("senior", "junior", "teacher"):
        folder = root / f"server-{role}"
        job = start(folder, models)
        after = draw.randrange(1, STEPS - 1)
        while len(rows(folder / "runs" / "job" / "metrics.jsonl")) < after and job.poll() is None:
            time.sleep(0.02)
        found = [pid for name, pid in children(folder).items() if role in name]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        judge(f"the {role}'s server killed after step {after}", folder, job.wait(), f"{len(found)} killed")
    print(f"{wrong} wrong of {args.moments + 3}; {root}")
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        rest = sys.argv[3:]
        seeded = rest[:1] == ["--seeded"]
        sys.exit(job(sys.argv[2], rest[seeded:], seeded=seeded))
    sys.exit(main())
