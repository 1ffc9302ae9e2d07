"""A local job with junior, teacher and control, killed at many moments and resumed: is anything lost or different?

    python scripts/benchmarks/kill_resume.py --moments 10 --seed 0

Tiny random models. One job runs undisturbed. Then, per moment, the same job gets SIGKILL when it has written that share of
its rows, and up to a second later, and is resumed until it ends; then the server of each role is killed once in a job that
goes on. Rows of metrics, evaluations and rewards must equal the undisturbed job's (without clocks and retries), the last
checkpoints' weights too, and no process may be left. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
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


def start(folder: Path, models: dict[str, str], *flags: str) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings(models, folder / "runs")), encoding="utf-8")
    with (folder / "log.txt").open("ab") as log:
        command = [sys.executable, "-m", "slime_tandem.cli", "train", "--config", str(config), *flags]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


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
    """Servers whose log lies in this folder, by the name of the log."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            log = os.readlink(process / "fd" / "1")
        except OSError:
            continue
        if process.name.isdigit() and log.startswith(str(folder / "runs")):
            found[Path(log).stem] = int(process.name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    root = Path(tempfile.mkdtemp(prefix="kill-resume-")).resolve()
    student = tiny_pair(root / "student", context=256, eos=True)
    teacher = tiny_pair(root / "teacher", context=256, eos=True, vocab_size=300, seed=5)
    models = {"senior": str(student), "junior": str(student.parent / "junior"), "teacher": str(teacher)}

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
    sys.exit(main())
