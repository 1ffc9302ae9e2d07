"""Starts what the probes need (models, servers, a few responses) and runs them in order, cheapest first.

Nothing of the user's is changed: a senior's server that is not ours is only asked, and the policy that the length probe
trains is thrown away. What cannot be started is a finding, and the probes that need it are skipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from slime_tandem.config import RunConfig
from slime_tandem.distill.teacher import describe_special
from slime_tandem.doctor import probes
from slime_tandem.doctor.probes import BFLOAT16, FLOAT32, Finding, Tolerance, attempt
from slime_tandem.errors import TandemError
from slime_tandem.megatron.policy import MegatronPolicy
from slime_tandem.protocol import GenerateRequest
from slime_tandem.report.teachers import TEACHERS, kl_of, teacher_kls
from slime_tandem.rollout import rollout_ids
from slime_tandem.tasks.families import TaskSet
from slime_tandem.team.rollouts import rollout
from slime_tandem.team.roster import Roster
from slime_tandem.team.team import Team
from slime_tandem.training.metrics import teacher_figures
from slime_tandem.training.rows import Response, build_rows
from slime_tandem.training.trainer import Trainer
from slime_tandem.types import FloatArray, ScoredSample

Say = Callable[[Finding], None]
_NEVER_SAMPLED = {"bos", "pad", "unk"}


def run_doctor(config: RunConfig, say: Say, *, prompts: int = 4, length_updates: int = 8) -> list[Finding]:
    """All findings, each passed to `say` as it comes. `length_updates` 0: without the length probe."""
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        say(finding)

    add(attempt("group sums", lambda: probes.group_sums(config)))
    if config.sampling.temperature == 0:
        remedy = "set sampling.temperature=1"
        add(
            Finding(
                "sampling", "fail", "sampling.temperature=0: greedy responses have no log-probs to learn from", remedy
            )
        )
        return findings
    try:
        tasks = TaskSet(config.tasks, config.seed, config.reward, labels=config.needs_labels)
        if tasks.notes:
            add(Finding("prompt files", "pass", "; ".join(tasks.notes)))
        roster = Roster(config)
        policy = _policy(config, roster)
        add(Finding("models", "pass", ", ".join(f"{role}: {folder}" for role, folder in roster.folders.items())))
        width = policy.architecture.vocab_size
        add(attempt("tokenizer", lambda: probes.tokenizer(roster.student, "senior", width)))
        for role in roster.roles[1:]:
            add(attempt("tokenizer", lambda role=role: probes.tokenizer(roster.tokenizers[role], role)))  # type: ignore[misc]
        with Team(roster, config.run_dir / "logs") as team:
            ServerProbes(config, team, tasks, policy, add, prompts, length_updates).examine()
    except (TandemError, OSError) as error:
        if not isinstance(error, TandemError):  # a folder that cannot be written, a full disk
            error = TandemError.of_os_error(error.filename or config.run_dir, error)
        add(Finding("models and servers", "fail", error.what, error.remedy))
    return findings


def _policy(config: RunConfig, roster: Roster) -> MegatronPolicy:
    return MegatronPolicy.from_hf(
        roster.folders["senior"],
        config.optimizer,
        trust_remote_code=config.models.trust_remote_code,
        threads=config.train.threads,
        checkpointed=config.train.gradient_checkpointing,
    )


class ServerProbes:
    """The probes that need servers at work, and the responses that they share."""

    def __init__(
        self,
        config: RunConfig,
        team: Team,
        tasks: TaskSet,
        policy: MegatronPolicy,
        add: Say,
        prompts: int,
        updates: int,
    ) -> None:
        self.config, self.team, self.add, self.updates = config, team, add, updates
        self.tasks, self.prompts = tasks, tasks.train_prompts(0, min(prompts, config.train.prompts_per_step))
        self.plain = _plain(config)
        self.trainer = Trainer(self.plain, policy, None)
        # A server that somebody else started may hold any dtype.
        exact = config.models.dtype == "float32" and config.engine.senior_url is None and not team.roster.fused
        self.tolerance: Tolerance = FLOAT32 if exact else BFLOAT16

    def examine(self) -> None:
        """Write a few responses and put every probe to them, the training ones last."""
        config, samples_per = self.config, self.config.train.samples_per_prompt
        opd, tandem = config.opd.enabled, config.tandem.enabled
        scored, _ = rollout(
            self.team, self.tasks, self.prompts, rollout_ids.DOCTOR[0], samples_per, tandem=tandem, score=opd,
            where="the doctor's responses",
        )  # fmt: skip
        samples = [s.sample for s in scored]
        responses = [Response.of(s) for s in samples]
        own = self.trainer.own_log_probs(responses, replayed=True)
        ours, engine = probes.senior_tokens(samples, own)
        self.add(probes.end_of_turn(samples, config.sampling.max_new_tokens))
        if config.objective.reward_coef > 0:
            self.add(probes.reward_signal(scored, config.tasks))
        else:
            without = sum(s.unasked for s in scored)
            what = "rewards are not learnt from" + (
                f"; {without} of {len(scored)} responses have none" if without else ""
            )
            self.add(Finding("reward signal", "skip", f"objective.reward_coef=0: {what}"))
        self.add(probes.agreement("sampled log-probs", ours, engine, self.tolerance))
        self.add(attempt("given log-probs", lambda: self._given(responses)))
        self.add(probes.replay_ratio(ours, engine, self.tolerance))
        self.add(attempt("KL parity", lambda: self._kl(responses)))
        self.add(attempt("masking", lambda: self._masking(scored, own)))
        self.add(attempt("padding", lambda: probes.padding(self.trainer, responses)))
        if opd:
            for finding in self._teachers(scored):
                self.add(finding)
        self.add(attempt("length reward", self._length))

    def _given(self, responses: Sequence[Response]) -> Finding:
        """The engine's log-probs of ids that it is given (how teachers score) against the trainer's."""
        name = "given log-probs"
        if self.config.sampling.temperature != 1.0:
            return Finding(name, "skip", "engines score given ids at temperature 1, the run samples at another")
        scored = [r for r in responses if r.response_length][:4]
        some = list(zip(scored, self.trainer.own_log_probs(scored), strict=True))
        requests = [
            GenerateRequest(
                f"doctor-{i}", r.tokens, max_new_tokens=0, logprob_start_len=len(r.tokens) - r.response_length - 1
            )
            for i, (r, _) in enumerate(some)
        ]
        results = self.team.servers.run(self.team.servers.clients["senior"].generate(requests))
        theirs = [
            np.array([v for v in result.input_log_probs[1:] if v is not None], dtype=np.float64) for result in results
        ]
        short = [i for i, ((r, _), t) in enumerate(zip(some, theirs, strict=True)) if len(t) != r.response_length]
        if short:
            return Finding(
                name, "fail", f"response {short[0]} came back without a log-prob per token", "update the engine"
            )
        empty = [np.zeros(0)]
        return probes.agreement(
            name, np.concatenate([*empty, *(o for _, o in some)]), np.concatenate(empty + theirs), self.tolerance
        )

    def _kl(self, responses: Sequence[Response]) -> Finding:
        some = [r for r in responses if r.response_length][:4]
        if not some:
            return Finding("KL parity", "skip", "only empty responses")
        with torch.no_grad():
            logits = self.trainer.policy.response_logits([r.tokens for r in some], [r.response_length for r in some])
        return probes.kl_parity(logits / self.config.sampling.temperature, self.config.objective)

    def _masking(self, scored: Sequence[ScoredSample], own: Sequence[FloatArray]) -> Finding:
        """With made-up rewards: whether the responses happen to be right is no matter of masks."""
        marked = [replace(s, reward=float(i % 2)) for i, s in enumerate(scored)]
        without_drop = {"opd": self.config.opd.model_copy(update={"on_failed_sample": "drop_opd", "signal": "sampled"})}
        objective = self.config.objective.model_copy(update={"kl_in": "loss", "lambda_jun": 0.0})
        config = self.config.model_copy(update=without_drop | {"objective": objective})
        rows, _ = build_rows(marked, config)
        return probes.masking(rows, own, config)

    def _teachers(self, scored: Sequence[ScoredSample]) -> list[Finding]:
        out = []
        failed = [s.teacher_error for s in scored if s.teacher_error is not None]
        coverage = float(np.mean([s.teacher.coverage for s in scored if s.teacher is not None] or [0.0]))
        detail = f"{coverage:.0%} of the tokens of a response carry a teacher's log-prob{_kl_said(scored)}"
        if failed:
            first = failed[0]
            out.append(Finding("teacher scores", "fail", f"{len(failed)} samples failed: {first.what}", first.remedy))
        elif coverage < 0.5:
            remedy = "slime-tandem align shows what is masked and why; a teacher of a nearer vocabulary covers more"
            out.append(Finding("teacher scores", "warn", detail, remedy))
        else:
            out.append(Finding("teacher scores", "pass", detail))
        for teacher in self.team.panel.teachers:
            name = f"special tokens, {teacher.name}"
            rows = () if teacher.aligner.same_vocabulary else teacher.aligner.special.unmapped
            lost = [row for row in rows if set(row.roles) - _NEVER_SAMPLED]
            if lost:
                names = "; ".join(map(str, lost))
                out.append(Finding(name, "warn", f"no counterpart: {names}", "these are masked where they are sampled"))
            else:
                line = describe_special(teacher.aligner, teacher.name).splitlines()[1:2]
                out.append(Finding(name, "pass", line[0].strip() if line else "the same vocabulary"))
        return out

    def _length(self) -> Finding:
        """GRPO on reward = min(length, cap) makes length rise; where responses fill the cap, on its negative, fall."""
        name, cap = "length reward", self.config.sampling.max_new_tokens
        if self.updates == 0 or self.config.train.samples_per_prompt == 1:
            return Finding(name, "skip", "not asked for" if self.updates == 0 else "needs groups of at least two")
        owns_server = "senior" in self.team.servers.processes
        first = self._write(rollout_ids.DOCTOR[1])
        sign = 1 if _lengths(first).mean() < 0.8 * cap else -1
        pulls: list[float] = []
        scored = first
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "senior"
            for update in range(self.updates if owns_server else 1):
                if update:
                    scored = self._write(rollout_ids.DOCTOR[1 + update])
                pulls += self._learn(scored, sign)
                if owns_server:
                    self.trainer.policy.save_hf(weights)
                    self.team.send_weights(weights, f"doctor-{update}")
            if not pulls:
                return Finding(
                    name, "skip", f"all responses of a group are equally long ({_lengths(first).mean():.0f} tokens)"
                )
            after = [_lengths(self._write(rollout_ids.DOCTOR[1]))] if owns_server else []
        return probes.length_reward([_lengths(first), *after], pulls, sign, cap)

    def _write(self, rollout_id: int) -> list[ScoredSample]:
        per = self.config.train.samples_per_prompt
        scored, _ = rollout(self.team, self.tasks, self.prompts, rollout_id, per, tandem=False, score=False)
        return scored

    def _learn(self, scored: Sequence[ScoredSample], sign: int) -> list[float]:
        """One update; [sum of advantage * change of log-prob], or [] where no group has two lengths."""
        rewarded = [replace(s, reward=float(sign * len(s.sample.response_ids))) for s in scored]
        rows, _ = build_rows(rewarded, self.plain)
        if not any(row.advantage for row in rows):
            return []
        before = self.trainer.own_log_probs(rows, replayed=True)
        self.trainer.update(rows)
        after = self.trainer.own_log_probs(rows, replayed=True)
        return [float(sum(r.advantage * (a - b).sum() for r, a, b in zip(rows, after, before, strict=True)))]


def _kl_said(scored: Sequence[ScoredSample]) -> str:
    """The KL to the teachers, to each where there are several: without a reward it is what a run is judged by."""
    found = teacher_figures(scored)
    if found is None or (kl := kl_of(found["all"])) is None:
        return ""
    of_each = teacher_kls({TEACHERS: found})
    names = ", ".join(f"{name} {value:.3f}" for name, value in of_each.items() if value is not None)
    return f"; KL to the teacher{'s' if names else ''} {kl:.3f} nats" + (f" ({names})" if names else "")


def _lengths(scored: Sequence[ScoredSample]) -> FloatArray:
    return np.array([float(len(s.sample.response_ids)) for s in scored])


def _plain(config: RunConfig) -> RunConfig:
    """The run with the task reward as its only term, written by the senior alone."""
    objective = config.objective.model_copy(
        update={
            "reward_coef": 1.0, "kl_coef": 0.0, "kl_in": "loss", "kl_target": None, "lambda_jun": 0.0,
            "rollout_weights": "none", "reduction": "token_mean",
        }
    )  # fmt: skip
    opd = config.opd.model_copy(update={"enabled": False})
    tandem = config.tandem.model_copy(update={"enabled": False, "junior_token_loss_weight": 0.0})
    train = config.train.model_copy(update={"updates_per_step": 1})
    return config.model_copy(update={"objective": objective, "opd": opd, "tandem": tandem, "train": train})
