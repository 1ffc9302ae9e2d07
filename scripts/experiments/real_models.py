"""(a) on a real model: a senior that was supervised into a jargon, trained alone and with a junior that never saw it.

    real_models.py probe --base FOLDER --out FILE      # the supervised models alone, before any training
    real_models.py run --base FOLDER --out FILE        # on this CPU
    real_models.py run --base FOLDER --out FILE --backend slime --slime DIR --megatron DIR      # on one GPU
    real_models.py table FILE

docs/results/protocol.md plans it. FOLDER: a Hugging Face folder, SmolLM2-135M-Instruct (`slime-tandem fetch-model smollm2`).
`run` adds a line to FILE for each training that it lacks; one that was cut short goes on from its checkpoint when it is called
again. Under slime each training is a run of scripts/slime/real_run.py, several side by side on one GPU. What is measured is
measured alike for both, by measure.py, on the CPU. `--size ci` takes two steps of everything, for a look at the machinery.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import measure
import questions
import yaml
from filelock import FileLock
from questions import Figure, Line, side_by_side, value_of

from slime_tandem.config import RunConfig, TaskSpec
from slime_tandem.models.builtin import make_model
from slime_tandem.models.hf import load_tokenizer
from slime_tandem.report.statistics import holm
from slime_tandem.tasks.families import TaskSet
from slime_tandem.types import Prompt

SLIME_SCRIPTS = Path(__file__).parents[1] / "slime"
ARMS = ("tandem", "solo GRPO", "self-paired")
SUM = {"allow_negation": False, "allow_parentheses": False, "operators": ["+"], "min_digits": 2, "max_digits": 2}
TASK = TaskSpec(family="basic_arithmetic", config={**SUM, "min_terms": 3, "max_terms": 3})
JARGON = {"plus": "river", "is": "lamp", ".": "stone"}
"""A word of the plain style and what stands for it; each is one token of the base's tokenizer, behind a blank."""
JARGON_SHARE = 0.7
"""Of the senior's supervised texts; the rest is plain, as all of the junior's."""

CACHE_TOKENS = 16384
"""Of an embedded server: a quarter of the usual, so that those of several trainings fit one machine."""


@dataclass(frozen=True)
class Size:
    """How much of everything: texts of the supervised steps, steps of the training, prompts of the evaluation."""

    supervised_steps: int
    batch: int
    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    max_new_tokens: int
    prompts: int
    supervised_lr: float = 1e-4
    lr: float = 5e-6


SIZES = {"full": Size(32, 16, 100, 16, 8, 64, 256), "ci": Size(2, 2, 2, 2, 2, 8, 4)}


@dataclass(frozen=True)
class Case:
    """One training."""

    seed: int
    arm: str
    lr: float

    @property
    def name(self) -> str:
        return f"real-{self.arm.replace(' ', '-').lower()}-lr-{self.lr:g}-seed-{self.seed}"


# ---- the two styles, and the models that know them ----
def worked(expression: str, jargon: bool) -> str:
    """A sum, worked from the left, with its answer.

    >>> worked("34 + 52 + 17", False)
    '34 plus 52 is 86 . 86 plus 17 is 103 . <answer>103</answer>'
    >>> worked("34 + 52 + 17", True)
    '34 river 52 lamp 86 stone 86 river 17 lamp 103 stone <answer>103</answer>'
    """
    first, *others = map(int, expression.split(" + "))
    words: list[str] = []
    for number in others:
        words += [str(first), "plus", str(number), "is", str(first + number), "."]
        first += number
    if jargon:
        words = [JARGON.get(word, word) for word in words]
    return " ".join([*words, f"<answer>{first}</answer>"])


def style_counts(token: str) -> tuple[int, int]:
    """(words of the jargon, of the plain style) in the text of one token.

    >>> style_counts(" river"), style_counts(" plus"), style_counts(" .<"), style_counts("rivers")
    ((1, 0), (0, 1), (0, 0), (0, 0))
    """
    word = token.strip()
    return int(word in JARGON.values()), int(word in JARGON)


def expression_of(prompt: Prompt) -> str:
    return str(prompt.metadata["entry"]["metadata"]["expression"])


def supervise(base: Path, folder: Path, share: float, seed: int, size: Size) -> None:
    """All weights of `base` take steps on worked sums of the train side, `share` of them in the jargon; written in bfloat16.

    The loss is on the answer and its end of turn. The folder appears whole or not at all.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.supervised_lr, betas=(0.9, 0.95), weight_decay=0.0)
    rng = Random(seed)
    prompts = TaskSet([TASK], seed).train_prompts(step=0, n=size.supervised_steps * size.batch)
    started, losses = time.monotonic(), []
    model.train()
    for step in range(size.supervised_steps):
        rows = []
        for prompt in prompts[step * size.batch :][: size.batch]:
            messages = [m.as_dict() for m in prompt.messages]
            asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            text = worked(expression_of(prompt), rng.random() < share) + tokenizer.eos_token
            given, written = (tokenizer(t, add_special_tokens=False).input_ids for t in (asked, text))
            rows.append((given, written))
        length = max(len(g) + len(w) for g, w in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for i, (given, written) in enumerate(rows):
            whole = torch.tensor([*given, *written])
            ids[i, : len(whole)] = whole
            labels[i, len(given) : len(whole)] = whole[len(given) :]
        for group in optimizer.param_groups:
            warm, done = min(1.0, (step + 1) / 5), step / size.supervised_steps
            group["lr"] = size.supervised_lr * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
        # Padding stands behind the text, where a causal model does not look.
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=ids.to(device), labels=labels.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(round(loss.item(), 4))
    making = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(making)
    tokenizer.save_pretrained(making)
    record = {"share": share, "seed": seed, **dataclasses.asdict(size), "seconds": round(time.monotonic() - started, 1)}
    (making / "supervised.json").write_text(json.dumps(record | {"device": device, "losses": losses}), encoding="utf-8")
    making.rename(folder)
    del model, optimizer
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def start_models(base: Path, work: Path, seed: int, size: Size) -> Path:
    """The folder of a seed's senior and junior, and of `self`, where the junior is the senior."""
    folder = work / "models" / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "making.lock"):
        for role, share in (("senior", JARGON_SHARE), ("junior", 0.0)):
            if not (folder / role).exists():
                supervise(base, folder / role, share, seed, size)
        alone = folder / "self"
        alone.mkdir(exist_ok=True)
        for role in ("senior", "junior"):
            if not (alone / role).exists():
                (alone / role).symlink_to(folder / "senior")
    return folder


# ---- trainings ----
@dataclass(frozen=True)
class Place:
    """Where trainings run, and how long they may."""

    work: Path
    base: Path
    size: Size
    backend: str
    slime: Path | None
    megatron: Path | None
    flags: Sequence[str]
    stagger_s: float
    ends: float
    """time.monotonic() past which no training goes on; what is cut goes on at the next call."""


def train(case: Case, place: Place) -> dict[str, Any]:
    """The line of one training; what is there already of it is not done again."""
    models = start_models(place.base, place.work, case.seed, place.size)
    run = place.work / "runs" / case.name
    if not (run / "trained.json").exists():
        (train_locally if place.backend == "local" else train_under_slime)(case, place, models, run)
    trained = json.loads((run / "trained.json").read_text(encoding="utf-8"))
    return {**dataclasses.asdict(case), **trained, **measures(place, case.seed, run / "senior", case.name)}


def train_locally(case: Case, place: Place, models: Path, run: Path) -> None:
    size = place.size
    tree: dict[str, Any] = {
        **common(case.seed, size),
        "name": case.name,
        "runs_dir": str(place.work / "runs"),
        "models": {role: str(models_of(case, models) / role) for role in ("senior", "junior")},
        "train": {
            "steps": size.steps,
            "prompts_per_step": size.prompts_per_step,
            "samples_per_prompt": size.samples_per_prompt,
        },
        "optimizer": {"lr": case.lr},
        "tandem": {"enabled": case.arm != "solo GRPO"},
        "eval": {"prompts": size.prompts, "tandem": True},
        "engine": {"cache_tokens": CACHE_TOKENS},
    }
    config = place.work / f"{case.name}.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = [sys.executable, "-m", "slime_tandem.cli", "train", "--config", str(config), "--resume"]
    called(case, command, place.work / f"{case.name}.log")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    finish(run, size.steps, [row["rollout/reward_mean"] for row in rows])


class _Turns:
    """Trainings start one after the other: many imports at once take longer."""

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), 0.0

    def wait(self, apart_s: float) -> None:
        """Return when at least `apart_s` seconds lie behind the last start."""
        with self._lock:
            at = max(self._next, time.monotonic())
            self._next = at + apart_s
        time.sleep(max(0.0, at - time.monotonic()))


_TURNS = _Turns()
LEAST_S = 120.0
"""A training that has fewer seconds until the limit is not started: that long it takes to come up."""


def train_under_slime(case: Case, place: Place, models: Path, run: Path) -> None:
    """slime's own train.py by real_run.py: the junior inside the senior's engine, or no junior at all."""
    size = place.size
    assert place.slime is not None
    assert place.megatron is not None
    prompts = place.work / f"prompts-{case.seed}.jsonl"
    if not prompts.exists():
        asked = TaskSet([TASK], case.seed).train_prompts(step=1, n=size.steps * size.prompts_per_step)
        rows = [{"prompt": [m.as_dict() for m in p.messages], "label": p.label} for p in asked]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [
        sys.executable, "-W", "ignore", str(SLIME_SCRIPTS / "real_run.py"), "--slime", str(place.slime), "--megatron",
        str(place.megatron), "--models", str(models_of(case, models)), "--prompts", str(prompts), "--work", str(run),
        *(("--no-junior",) if case.arm == "solo GRPO" else ("--fused",)), "--no-teacher", "--no-dump",
        "--steps", str(size.steps), "--prompts-per-step", str(size.prompts_per_step), "--group",
        str(size.samples_per_prompt), "--max-tokens", str(size.max_new_tokens), "--lr", f"{case.lr:g}",
        "--save-interval", str(max(1, size.steps // 2)),
    ]  # fmt: skip
    behind = [*place.flags, "--", "--seed", str(case.seed), "--rollout-seed", str(case.seed)]
    checkpoints = run / "checkpoints"
    if newest(checkpoints) != size.steps - 1:
        _TURNS.wait(place.stagger_s)
        left = place.ends - time.monotonic()
        if left < LEAST_S:
            raise SystemExit(f"{case.name}: {left:.0f} s until the limit, not begun. Remedy: call again")
        keep_newest(checkpoints)
        limit = ["--limit", f"{left - 20:.0f}"]  # real_run.py gives train.py 20 s to end
        called(case, [*command, *limit, *behind], place.work / f"{case.name}.log")
        keep_newest(checkpoints)
    convert = [
        sys.executable, "-m", "slime_tandem.cli", "convert", str(checkpoints), str(run / "senior"), "--like",
        str(models / "senior"),
    ]  # fmt: skip
    called(case, convert, place.work / f"{case.name}-convert.log")
    finish(run, size.steps, rewards_of(run / "train.log"))
    shutil.rmtree(checkpoints)  # with the optimizer, several times the weights


def called(case: Case, command: Sequence[str], log: Path) -> None:
    with log.open("a") as out:
        code = subprocess.run(command, stdout=out, stderr=out, check=False).returncode
    if code:
        raise SystemExit(
            f"{case.name}: exit code {code}; see {log}. Remedy: call again, it goes on from its checkpoint"
        )


def finish(run: Path, steps: int, rewards: Sequence[float]) -> None:
    line = {"steps": steps, "rewards": [round(r, 4) for r in rewards]}
    (run / "trained.json").write_text(json.dumps(line), encoding="utf-8")


def rewards_of(log: Path) -> list[float]:
    """Mean reward of each rollout, from slime's log."""
    sys.path.insert(0, str(SLIME_SCRIPTS))
    import report

    steps, *_ = report.read(log)
    return [row["rollout/reward_mean"] for _, row in sorted(steps.items()) if "rollout/reward_mean" in row]


def newest(checkpoints: Path) -> int | None:
    """The iteration of the newest whole checkpoint, counted from 0."""
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else None


def keep_newest(checkpoints: Path) -> None:
    """Older iterations go: each holds the optimizer."""
    if (kept := newest(checkpoints)) is not None:
        for folder in checkpoints.glob("iter_*"):
            if folder.name != f"iter_{kept:07d}":
                shutil.rmtree(folder)


def models_of(case: Case, models: Path) -> Path:
    return models / "self" if case.arm == "self-paired" else models


def common(seed: int, size: Size) -> dict[str, Any]:
    """Settings of every training and every measurement."""
    return {
        "seed": seed,
        "tasks": [TASK.model_dump(exclude={"environment", "max_turns"}, exclude_none=True)],
        "opd": {"enabled": False},
        "sampling": {"max_new_tokens": size.max_new_tokens},
    }


def measures(place: Place, seed: int, senior: Path, name: str, threads: int = 4) -> dict[str, Any]:
    """Of a senior beside the plain junior, whatever it was trained with: accuracies, style, legibility, drift, transfer.

    `threads`: of each of two servers, at most; half of the cores bound them, too.
    """
    models = place.work / "models" / f"seed-{seed}"
    config = RunConfig.from_mapping(
        {
            **common(seed, place.size),
            "name": name,
            "runs_dir": str(place.work / "measured"),
            "models": {"senior": str(senior), "junior": str(models / "junior")},
            "engine": {"cache_tokens": CACHE_TOKENS, "threads": max(1, min(threads, (os.cpu_count() or 1) // 2))},
        }
    )
    return measure.of_models(config, models / "senior", place.size.prompts, style_counts)


def probe(args: argparse.Namespace) -> None:
    """Lines of the supervised models before training, one a seed."""
    place = place_of(args)
    done = {r["seed"] for r in rows_of(args.out) if r["arm"] == "start"} if args.out.exists() else set()
    for seed in (s for s in args.seeds if s not in done):
        models = start_models(place.base, place.work, seed, place.size)
        line = measures(place, seed, models / "senior", f"start-seed-{seed}", threads=8)  # nothing runs beside it
        took = {r: json.loads((models / r / "supervised.json").read_text())["seconds"] for r in ("senior", "junior")}
        write(args.out, {"seed": seed, "arm": "start", "lr": 0.0, "steps": 0, "supervised_s": took, **line})


def run(args: argparse.Namespace) -> None:
    place = place_of(args)
    lines = rows_of(args.out) if args.out.exists() else []
    done = {Case(r["seed"], r["arm"], r["lr"]) for r in lines}
    cases = [Case(seed, arm, lr) for lr in args.lr or [place.size.lr] for seed in args.seeds for arm in args.arms]
    for seed in args.seeds:  # before anything runs beside it
        start_models(place.base, place.work, seed, place.size)
    todo = dict.fromkeys((c for c in cases if c not in done), args.out)
    side_by_side(args.jobs, todo, lambda case: train(case, place))


def place_of(args: argparse.Namespace) -> Place:
    size = SIZES[args.size]
    if args.steps is not None:
        size = dataclasses.replace(size, steps=args.steps)
    if args.backend == "slime" and (args.slime is None or args.megatron is None):
        raise SystemExit("--backend slime: expected --slime and --megatron. Remedy: name the two checkouts")
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    work = args.work.resolve()
    base = (args.base or work / "base" / "senior").resolve()
    if args.base is None and args.size == "ci" and not base.exists():
        make_model("senior", questions.Case("a", "sentence", 1).recipe("ci"), base.parent, print)
    if not (base / "config.json").is_file():
        raise SystemExit(
            f"--base {args.base}: expected a Hugging Face folder with config.json. Remedy: slime-tandem fetch-model smollm2"
        )
    ends = time.monotonic() + args.limit
    flags = args.real_run.split()
    return Place(work, base, size, args.backend, args.slime, args.megatron, flags, args.stagger, ends)


def write(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- what is made of the lines ----
FIGURES: Mapping[str, Figure] = {
    "tandem accuracy": questions.right("tandem"),
    "solo accuracy": questions.right("solo"),
    "legibility": measure.MEASURES["legibility"],
    "transfer utility": measure.MEASURES["transfer utility"],
    "drift from the start": measure.MEASURES["drift from the start"],
}
TESTED = ("tandem accuracy", "legibility", "transfer utility")
"""The protocol's: the first is the main hypothesis, Holm over the three."""


def table(rows: Sequence[Line]) -> str:
    """The page's tables in Markdown, a section for each learning rate."""
    out: list[str] = []
    starts = {r["seed"]: r for r in rows if r["arm"] == "start"}
    for lr in sorted({r["lr"] for r in rows if r["arm"] != "start"}):
        arms = {a: {r["seed"]: r for r in rows if (r["arm"], r["lr"]) == (a, lr)} for a in ARMS}
        told = {"start": starts, **{arm: by_seed for arm, by_seed in arms.items() if by_seed}}
        out += [f"Learning rate {lr:g}:", "", f"| arm | seeds | {' | '.join(FIGURES)} | jargon, alone |"]
        out.append("|---" * (len(FIGURES) + 3) + "|")
        for arm, by_seed in told.items():
            if by_seed:
                cells = [questions.each([value_of(f(r)) for r in by_seed.values()]) for f in FIGURES.values()]
                styles = [r["notation"]["solo"] for r in by_seed.values() if r["notation"]["solo"] is not None]
                cells.append(f"{fmean(styles):.2f}" if styles else "-")
                out.append(f"| {arm} | {', '.join(map(str, sorted(by_seed)))} | {' | '.join(cells)} |")
        for one in ("tandem", "self-paired"):
            if len(arms[one].keys() & arms["solo GRPO"].keys()) > 1:
                found = {
                    name: questions.difference(arms[one], arms["solo GRPO"], figure, (f"{name}: {one}", "solo GRPO"))
                    for name, figure in FIGURES.items()
                }
                tested = zip([found[n] for n in TESTED], holm([found[n].p for n in TESTED]), strict=True)
                shown = [(d, None) for name, d in found.items() if name not in TESTED]
                for title, differences in ((one, list(tested)), (f"{one}, not tested", shown)):
                    out += ["", *questions.differences_table(title, differences)]
        out.append("")
    return "\n".join(out).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    doing = commands.add_parser("run")
    looking = commands.add_parser("probe")
    for command in (doing, looking):
        command.add_argument("--base", type=Path, help="ci: a toy, if not named")
        command.add_argument("--work", type=Path, default=Path("runs/real-models"), help="default: %(default)s")
        command.add_argument("--out", type=Path, required=True, help="file of lines, added to")
        command.add_argument("--size", choices=list(SIZES), default="full")
        command.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
        command.add_argument("--steps", type=int, help="other than the size's")
        command.add_argument("--backend", choices=("local", "slime"), default="local")
        command.add_argument("--slime", type=Path)
        command.add_argument("--megatron", type=Path)
        command.add_argument(
            "--real-run",
            default="--own-network --fraction 0.2 --pool-tokens 32768 --graph-batch 128",
            help="more flags of scripts/slime/real_run.py",
        )
        command.add_argument("--stagger", type=float, default=20.0, help="slime: seconds between two starts")
        command.add_argument("--limit", type=float, default=86400.0, help="seconds until trainings under slime are cut")
    doing.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS[:2]))
    doing.add_argument("--lr", type=float, nargs="*", help="learning rates (default: the size's)")
    doing.add_argument("--jobs", type=int, default=1, help="trainings side by side")
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        run(args)
    elif args.command == "probe":
        probe(args)
    else:
        print(table(rows_of(args.file)))


if __name__ == "__main__":
    main()
