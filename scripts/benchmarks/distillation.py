"""Distillation alone, over seeds: a teacher with another tokenizer, one with the student's, and no teacher.

    python scripts/benchmarks/distillation.py --out runs/distillation      # about 10 minutes on two cores

The student is `builtin:senior`, writing alone (no junior); the task reward has no weight where a teacher teaches. `other
vocabulary` is `builtin:teacher`; `same vocabulary` is trained by the same recipe with the student's tokenizer. `no
teacher` is solo GRPO on the task reward with the same prompts and budget; `start` is what all began with.

KL is that of full distributions on held-out contexts: the start's own answers to 64 held-out questions, the same for
every arm, at the places where both tokenizers cut the text. With two vocabularies the distributions are over the next
byte, or the end of the turn: each side's mass summed over the tokens that begin with that byte, exact at such a place.
With one vocabulary also over all tokens. Accuracy: 256 held-out questions, one sampled answer each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_tandem.config import RunConfig
from slime_tandem.distill.alignment import Aligner
from slime_tandem.local.run import train
from slime_tandem.models.builtin import TASK, Recipe, make_model, resolve_model
from slime_tandem.models.hf import load_model
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.tasks.families import TaskSet
from slime_tandem.team.rollouts import rollout
from slime_tandem.team.roster import Roster
from slime_tandem.team.team import Team
from slime_tandem.types import TandemSample

CONTEXT_PROMPTS = 64
_OUTCOMES = 258  # 256 bytes, the end of the turn, anything else


@dataclass
class Reader:
    """A model with its tokenizer; `outcome` [V] says which of the 258 outcomes a token begins with."""

    model: Any
    tokenizer: ModelTokenizer
    outcome: torch.Tensor

    @classmethod
    def load(cls, folder: Path) -> Reader:
        tokenizer, model = ModelTokenizer.load(folder), load_model(folder, "float32")
        first = [
            256 if i in tokenizer.tokens.eos_ids else data[0] if data else 257
            for i, data in enumerate(tokenizer.tokens.table)
        ]
        rows = model.get_input_embeddings().weight.shape[0]
        return cls(model, tokenizer, torch.tensor([*first, *[257] * (rows - len(first))]))

    @torch.no_grad()
    def distributions(self, prompt: Sequence[int], response: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [R, V] that predict each response token, probabilities [R, 258] of the next byte or end)."""
        logits = self.model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double()
        log_p = torch.log_softmax(logits, -1)
        out = torch.zeros(len(response), _OUTCOMES, dtype=torch.float64)
        out.index_add_(1, self.outcome, log_p.exp())
        return log_p, out


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)


def divergences(student: Reader, teacher: Reader, contexts: Sequence[TandemSample]) -> dict[str, float]:
    """Mean KL(student || teacher), nats: over next bytes, and over tokens where the vocabularies are the same."""
    t = teacher.tokenizer
    aligner = Aligner(student.tokenizer.tokens, t.tokens, end_of_turn=t.end_of_turn)
    by_bytes, by_tokens = [], []
    for sample in contexts:
        text = aligner.write(sample.response_ids, t.encode)
        aligned = aligner.align(text)
        s_log, s_next = student.distributions(sample.prompt_ids, sample.response_ids)
        t_log, t_next = teacher.distributions(t.render(sample.prompt.messages), text.ids)
        at = torch.from_numpy(np.flatnonzero(aligned.teacher_index >= 0))
        partner = torch.from_numpy(aligned.teacher_index)[at]
        by_bytes.append(kl(s_next[at], t_next[partner]))
        if aligner.same_vocabulary:
            by_tokens.append((s_log[at].exp() * (s_log[at] - t_log[partner])).sum(-1))
    out = {"kl_next_byte": float(torch.cat(by_bytes).mean()), "positions": float(sum(len(x) for x in by_bytes))}
    if by_tokens:
        out["kl_tokens"] = float(torch.cat(by_tokens).mean())
    return out


def settings(args: argparse.Namespace, seed: int, arm: str, teacher: Path) -> RunConfig:
    with_teacher = arm != "no teacher"
    return RunConfig.from_mapping(
        {
            "name": f"{arm.replace(' ', '-')}-{seed}",
            "runs_dir": str(args.out / "runs"),
            "seed": seed,
            "models": {"senior": "builtin:senior", "teacher": str(teacher), "cache_dir": str(args.cache)},
            "tasks": [TASK.model_dump()],
            "tandem": {"enabled": False},
            "opd": {"enabled": with_teacher, **({"signal": args.signal} if with_teacher else {})},
            "objective": {"reward_coef": 0.0 if with_teacher else 1.0},
            "train": {"steps": args.steps, "prompts_per_step": 32, "samples_per_prompt": 8},
            "eval": {"prompts": 256},
        }
    )


def contexts_of(config: RunConfig, folder: Path) -> list[TandemSample]:
    """The start's answers to held-out questions that no evaluation of the runs has (the last of a longer list)."""
    tasks = TaskSet(config.tasks, seed=12345)
    plain = config.model_copy(update={"opd": config.opd.model_copy(update={"enabled": False})})
    with Team(Roster(plain), folder) as team:
        scored, _ = rollout(team, tasks, tasks.heldout_prompts(CONTEXT_PROMPTS), 2**61, 1, tandem=False, score=False)
    return [s.sample for s in scored]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/models"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--signal", default="sampled", help="opd.signal of the arms with a teacher")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start = resolve_model("builtin:senior", args.cache)
    teachers = {
        "other vocabulary": resolve_model("builtin:teacher", args.cache),
        "same vocabulary": args.out / "teacher",
    }
    if not (teachers["same vocabulary"] / "measured.json").exists():
        recipe = Recipe(teacher_tokenizer=Recipe().student_tokenizer)
        make_model("teacher", recipe, args.out, lambda line: print(line, file=sys.stderr, flush=True))
    readers = {name: Reader.load(folder) for name, folder in teachers.items()}
    accuracy = {name: json.loads((f / "measured.json").read_text())["accuracy"] for name, f in teachers.items()}
    contexts = contexts_of(settings(args, 0, "no teacher", start), args.out / "logs")
    before = Reader.load(start)
    base = {name: divergences(before, reader, contexts) for name, reader in readers.items()}
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        for arm in ("other vocabulary", "same vocabulary", "no teacher"):
            config = settings(args, seed, arm, teachers.get(arm, teachers["other vocabulary"]))
            train(config, overwrite=True)
            evals = [json.loads(line) for line in (config.run_dir / "eval.jsonl").read_text().splitlines()]
            after = Reader.load(config.run_dir / "senior")
            row: dict[str, Any] = {"seed": seed, "arm": arm}
            row["accuracy"] = [e["eval/solo_accuracy"] for e in evals]
            row["length"] = [e["eval/response_tokens_mean"] for e in evals]
            row["kl"] = {name: divergences(after, reader, contexts) for name, reader in readers.items()}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    (args.out / "distillation.json").write_text(
        json.dumps({"start": base, "teachers": accuracy, "rows": rows}, indent=1)
    )
    show(args, base, accuracy, rows)


def show(
    args: argparse.Namespace,
    base: dict[str, dict[str, float]],
    accuracy: dict[str, float],
    rows: Sequence[dict[str, Any]],
) -> None:
    positions = {name: int(b["positions"]) for name, b in base.items()}
    print(f"signal {args.signal}, {args.steps} steps; teachers' accuracy {accuracy}; positions {positions}\n")
    kinds = ("other vocabulary, next byte", "same vocabulary, next byte", "same vocabulary, tokens")
    print(f"| seed | arm | accuracy | {' | '.join(f'KL to the teacher: {kind}' for kind in kinds)} |")
    print("|---|---|---|---|---|---|")
    o, s = base["other vocabulary"], base["same vocabulary"]

    def cells(after: dict[str, dict[str, float]]) -> list[str]:
        a, b = after["other vocabulary"], after["same vocabulary"]
        pairs = [
            (o["kl_next_byte"], a["kl_next_byte"]),
            (s["kl_next_byte"], b["kl_next_byte"]),
            (s["kl_tokens"], b["kl_tokens"]),
        ]
        return [f"{x:.3f} → {y:.3f}" for x, y in pairs]

    for r in rows:
        first, last = r["accuracy"][0], r["accuracy"][-1]
        print(f"| {r['seed']} | {r['arm']} | {first:.3f} → {last:.3f} | {' | '.join(cells(r['kl']))} |")
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == arm]
        rise = statistics.mean(r["accuracy"][-1] - r["accuracy"][0] for r in mine)
        ratios = [
            statistics.mean(r["kl"][name][key] / base[name][key] for r in mine)
            for name, key in (
                ("other vocabulary", "kl_next_byte"), ("same vocabulary", "kl_next_byte"), ("same vocabulary", "kl_tokens"),
            )
        ]  # fmt: skip
        print(f"| mean | {arm} | {rise:+.3f} | {' | '.join(f'x {x:.2f}' for x in ratios)} |")


if __name__ == "__main__":
    main()
