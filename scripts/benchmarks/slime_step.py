#!/usr/bin/env python3
"""Seconds and memory of slime's whole step at real size, plain and with this package, each in slime's unmodified train.py.

    slime_step.py --slime SLIME --megatron MEGATRON --tokenizers TOKENIZERS --prompts FILE --work DIR --out FILE.json \
        --sizes senior=qwen3-4b,junior=qwen3-0.6b,teacher=llama-3b --runs plain fused_opd

Every run starts scripts/slime/real_run.py with the same prompts, lengths and samples. The models have random weights
(scale_models.py); the reward is drawn at random (slime's `--rm-type random`), so that every arm has gradients. The table has
medians of the steps behind `--warmup`, the JSON every step. Memory is sampled per process and card (nvidia-smi) and stands
beside the planner's estimate (step_memory.py), CPU seconds of the rollout manager by its process.

plain: slime's own GRPO. tandem_*: with a junior, on a server of its own or fused. opd: a teacher's sampled-token signal.
*_selection: token selection (teachability_entropy, 50 %, lists of 8), exact candidates; *_rest: without exact candidates;
*_deep: bounds out of lists of 64; *_along: the teacher reads each 128 tokens while the next are written. Responses of random
weights all have `--max-tokens`; `--real-run-flags -- --rollout-stop ght` ends one in 400 tokens.
`--profile` records the last step with py-spy and SGLang's and slime's profilers (step_profile.py); no median has it.
Rows are kept in OUT: a later call adds runs, `--max-tokens` and `--out` of another length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
SLIME = REPO / "scripts" / "slime"
sys.path[:0] = [str(REPO), str(SLIME), str(Path(__file__).parent)]

import real_run  # noqa: E402 - beside this file or in scripts/slime, which are no packages
import report  # noqa: E402
from step_memory import Sampler, compared, memory_table  # noqa: E402
from step_profile import StepProfile, slime_flags  # noqa: E402
from step_profile import table as profile_table  # noqa: E402

SELECTS = ["opd.selection.selector=teachability_entropy", "opd.selection.ratio=0.5", "opd.selection.top_k=8"]
SAMPLED = ["opd.selection.selector=pure_opd", "opd.selection.ratio=1.0", "opd.selection.top_k=16"]
REST = [*SELECTS, "opd.selection.missing_mass=rest"]
DEEP = [*SELECTS, "opd.selection.depth=64"]
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "plain": (["--plain"], []),
    "hooks": (["--no-junior", "--no-teacher"], []),
    "opd": (["--no-junior"], SAMPLED),
    "opd_rest": (["--no-junior"], REST),
    "opd_deep": (["--no-junior"], DEEP),
    "opd_selection": (["--no-junior"], SELECTS),
    "tandem_two": (["--no-teacher"], []),
    "tandem_fused": (["--fused", "--no-teacher"], []),
    "fused_opd": (["--fused"], SAMPLED),
    "fused_opd_along": (["--fused"], [*SAMPLED, "opd.read_along=128"]),
    "fused_opd_rest": (["--fused"], REST),
    "fused_opd_deep": (["--fused"], DEEP),
    "fused_opd_selection": (["--fused"], SELECTS),
    "two_opd": ([], SAMPLED),
    "two_opd_selection": ([], SELECTS),
}
"""Flags of real_run.py and settings, by the name of a run."""
PHASES = {
    "rollout s": "perf/rollout_time",
    "advantage s": "perf/compute_advantages_and_returns_time",
    "data s": "perf/data_preprocess_time",
    "train s": "perf/actor_train_time",
    "weights s": "perf/update_weights_time",
    "step s": "perf/step_time",
    "tok/s/GPU": "perf/tokens_per_gpu_per_sec",
    "scoring exposed s": "rollout/scoring_exposed_s",
    "scoring hidden s": "rollout/scoring_hidden_s",
    "loop CPU s": "rollout/loop_cpu_s",
    "loop busy s": "rollout/loop_busy_s",
    "loop blocked s": "rollout/loop_blocked_s",
    "bounded mass": "opd/bounded_mass",
}


def flags_of(command: list[Any]) -> argparse.Namespace:
    """What real_run.py makes of a command that starts it."""
    words = [str(word) for word in command]
    return real_run.parser().parse_args(words[words.index(str(SLIME / "real_run.py")) + 1 :])


def steps_done(log: str) -> int:
    """How many steps' times slime has logged."""
    return log.count("'perf/step_time'")


def measure(a: argparse.Namespace, name: str) -> dict[str, Any]:
    flags, settings = RUNS[name]
    work = a.work / name
    work.mkdir(parents=True, exist_ok=True)
    settings = [*settings, *a.set]
    command = [
        sys.executable, "-W", "ignore", str(SLIME / "real_run.py"), "--slime", a.slime, "--megatron", a.megatron, "--models",
        a.models, "--prompts", a.prompts, "--work", work, "--steps", a.warmup + a.steps, "--prompts-per-step",
        a.prompts_per_step, "--group", a.group, "--max-tokens", a.max_tokens, "--no-dump",
        *(("--save-interval", a.save_interval) if a.save_interval else ("--no-save",)),
        "--context", a.context, "--tokens-per-gpu", a.tokens_per_gpu, "--pool-tokens", a.pool_tokens, "--rm-type", "random",
        "--fraction", a.fraction, "--side-fraction", a.side_fraction, "--limit", a.limit, "--lr", "1e-6",
        *(("--side-prefill", a.side_prefill) if a.side_prefill else ()), *flags,
        *(("--set", *settings) if settings and "--plain" not in flags else ()), *a.real_run_flags,
    ]  # fmt: skip
    last = a.warmup + a.steps - 1
    on_gpu = "--cpu" not in a.real_run_flags
    if a.profile and on_gpu:  # on a CPU slime's profiler names that twice, and fails
        command += [*(() if "--" in a.real_run_flags else ("--",)), *slime_flags(last, work / "profile")]
    sampler, t0 = Sampler(), time.monotonic()
    profile = StepProfile(work, last, steps_done, sampler.processes, gpu=on_gpu) if a.profile else None
    code = subprocess.run([str(c) for c in command], check=False).returncode
    sampler.stop()
    log = work / "train.log"
    steps, _, (allocated, retries) = report.read(log) if log.exists() else ({}, [], (0, 0))
    counted = range(a.warmup, last if a.profile else last + 1)
    kept = [steps[k] for k in sorted(steps) if k in counted and "perf/step_time" in steps[k]]
    row: dict[str, Any] = {
        "run": name, "code": code, "seconds": round(time.monotonic() - t0), "steps": len(kept),
        "memory_mib": sampler.by_name(), "memory_total_mib": max(sampler.totals.values(), default=0),
        "card_mib": sampler.totals, "memory": compared(flags_of(command), sampler, allocated),
        "retries": retries, "manager_cpu_s": round(sampler.manager_cpu, 1),
        **{head: statistics.median(v) if (v := [s[key] for s in kept if key in s]) else None for head, key in PHASES.items()},
        "first rollout s": steps.get(0, {}).get("perf/rollout_time"),
        **({"profile": profile.result()} if profile else {}),
        "every_step": {k: {n: v for n, v in s.items() if isinstance(v, (int, float))} for k, s in steps.items()},
    }  # fmt: skip
    tokens = a.prompts_per_step * a.group * a.max_tokens
    row["rollout tok/s"] = tokens / row["rollout s"] if row["rollout s"] else None
    # Of the loop's own thread, by the hooks' heartbeat; plain slime has no hook that says it.
    row["manager CPU s per 1e6 tokens"] = row["loop CPU s"] / tokens * 1e6 if row["loop CPU s"] else None
    if code != 0 and log.exists():
        bad = [x for x in log.read_text(errors="replace").splitlines() if "Error" in x or "OutOfMemory" in x]
        print("\n".join(line[:300] for line in bad[-12:]), flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["first rollout s", *PHASES, "rollout tok/s", "manager CPU s per 1e6 tokens"]
    lines = ["| run | steps | " + " | ".join(heads) + " | memory GiB |", "|" + "---|" * (len(heads) + 3)]
    for row in rows:
        cells = ["" if row[h] is None else f"{row[h]:.3g}" for h in heads]
        memory = ", ".join(f"{k} {v / 1024:.1f}" for k, v in sorted(row["memory_mib"].items()))
        total = f"{row['memory_total_mib'] / 1024:.1f} in all"
        full = f"; full {row['retries']} times" if row.get("retries") else ""
        lines.append(f"| {row['run']} | {row['steps']} | " + " | ".join(cells) + f" | {total}: {memory}{full} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("--slime", "--megatron", "--tokenizers", "--prompts", "--work", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--sizes", default="senior=qwen3-4b,junior=qwen3-0.6b,teacher=llama-3b")
    parser.add_argument("--models", type=Path, help="where the models are, or are made (default: WORK/models)")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["plain", "tandem_fused", "fused_opd"])
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them that do not")
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens-per-gpu", type=int, default=4096)
    parser.add_argument("--pool-tokens", type=int, default=65536)
    parser.add_argument("--fraction", type=float, default=0.2)
    parser.add_argument("--side-fraction", type=float, default=0.12)
    parser.add_argument("--side-prefill", type=int, default=2048)
    parser.add_argument("--limit", type=float, default=500.0, help="seconds of a run")
    parser.add_argument(
        "--save-interval",
        type=int,
        help="checkpoints (default: none); called again with more --steps, a run goes on from its last one",
    )
    parser.add_argument("--profile", action="store_true", help="record the last step; needs py-spy on the PATH")
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument(
        "--real-run-flags", nargs=argparse.REMAINDER, default=[], help="more for real_run.py, last of all, e.g. --cpu"
    )
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    a.models = a.models or a.work / "models"
    t0 = time.monotonic()
    models = [sys.executable, Path(__file__).with_name("scale_models.py"), a.tokenizers, a.models, a.sizes]
    subprocess.run([str(c) for c in models], check=True)
    print(f"models made in {time.monotonic() - t0:.0f} s", flush=True)
    rows = json.loads(a.out.read_text()) if a.out.exists() else []
    for name in a.runs:
        row = measure(a, name)
        rows = [r for r in rows if r["run"] != name] + [row]
        a.out.write_text(json.dumps(rows, indent=1))
        print(table([row]), memory_table([row]), sep="\n\n", flush=True)
        if a.profile:
            print(profile_table(name, row["profile"]), flush=True)
    print(table(rows), memory_table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
