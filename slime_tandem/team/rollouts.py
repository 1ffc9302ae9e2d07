"""One rollout of a run: write, reward, score; and what is measured about it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np

from slime_tandem.distill.alignment import UNALIGNED_REASONS
from slime_tandem.errors import EngineError, EngineUnavailableError, TeacherScoreError, WeightVersionError
from slime_tandem.objective.advantages import reward_histograms, reward_quantiles
from slime_tandem.rollout import rollout_ids
from slime_tandem.tasks.families import TaskSet
from slime_tandem.team.team import Team
from slime_tandem.types import AlignedScores, FailedSample, Prompt, SampleKey, ScoredSample, TandemSample

T = TypeVar("T")
_MAX_RESTARTS = 3


def with_revival(team: Team, action: Callable[[], T]) -> T:
    """Run `action`; if a server of the team has died, restart it and run it again.

    A rollout is a pure function of weights, prompts and ids, so doing it again loses and repeats nothing. Raises the
    engine's error if no own server is dead (somebody else's server is down), or after three restarts.
    """
    for _ in range(_MAX_RESTARTS):
        try:
            return action()
        except (EngineUnavailableError, WeightVersionError) as error:
            revived = team.revive()
            if not revived:
                raise
            first = str(error).splitlines()[0]
            print(f"restarted the {' and '.join(revived)} server after: {first}", file=sys.stderr, flush=True)
    return action()


def rollout(
    team: Team,
    tasks: TaskSet,
    prompts: Sequence[Prompt],
    rollout_id: int,
    per_prompt: int,
    *,
    tandem: bool,
    score: bool,
    plain: bool = False,
) -> tuple[list[ScoredSample], dict[str, float]]:
    """(scored samples, measured): `time/rollout_s`, `time/scoring_s`, `rollout/failed_samples`. Samples are in prompt order.

    `tandem=False`: the senior writes alone. `score=False`: no teacher is asked; `plain`: for no more than the sampled tokens'
    log-probs (where responses are not read along), as for an evaluation. Raises EngineError for a sample that
    could not be written, unless `sampling.on_failed_sample` says to drop it, and always when none was written.
    """
    t0 = time.perf_counter()
    on_failed, overlap = team.config.sampling.on_failed_sample, team.config.opd.overlap
    early: dict[SampleKey, AlignedScores | TeacherScoreError | None] = {}
    if score and overlap is not None:
        both = with_revival(
            team, lambda: team.write_and_score(prompts, rollout_id, per_prompt, tandem=tandem, at_once=overlap)
        )
        written = [sample for sample, _ in both]
        early = {sample.key: result for sample, result in both}
    else:
        sampling = team.config.sampling
        if plain:  # nothing is trained on it: what was kept is not asked for
            sampling = sampling.model_copy(update={"truncation_replay": "recompute"})
        written = with_revival(
            team, lambda: team.write(prompts, rollout_id, per_prompt, tandem=tandem, sampling=sampling)
        )
    samples = successful(written, on_failed)
    rewards = [tasks.reward(s.prompt, s.text) for s in samples]
    t1 = time.perf_counter()
    scores: Sequence[AlignedScores | TeacherScoreError | None] = [early.get(s.key) for s in samples]
    if score and overlap is None:
        scores = with_revival(team, lambda: team.score(samples, plain=plain))
    t2 = time.perf_counter()
    scored = [
        ScoredSample(s, r, a, None) if isinstance(a, AlignedScores) else ScoredSample(s, r, None, a)
        for s, r, a in zip(samples, rewards, scores, strict=True)
    ]
    return scored, {
        "time/rollout_s": t1 - t0,
        "time/scoring_s": t2 - t1,
        "rollout/failed_samples": float(len(written) - len(samples)),
    }


def successful(
    written: Sequence[TandemSample | FailedSample], on_failed: Literal["stop", "drop_sample"]
) -> list[TandemSample]:
    """The samples that were written. Raises EngineError if one failed and `on_failed` is `stop`, or if all did."""
    samples = [s for s in written if isinstance(s, TandemSample)]
    failed = [s for s in written if isinstance(s, FailedSample)]
    if failed and (on_failed == "stop" or not samples):
        first = failed[0]
        raise EngineError(
            "samples that could not be written",
            f"{len(failed)} of {len(written)}",
            "none, or some with sampling.on_failed_sample=drop_sample",
            "mend what the first one says",
            f"{first.key}: {first.reason}",
        )
    return samples


def rollout_metrics(scored: Sequence[ScoredSample], tasks: TaskSet, eos_ids: frozenset[int]) -> dict[str, float | None]:
    """`rollout/`, `tandem/` and `opd/` metrics of a rollout (names, units: report/metrics.py). None: nothing to measure.

    `eos_ids` are the senior's ends of turn.
    """
    metrics: dict[str, float | None] = {
        **response_metrics(scored),
        "rollout/accuracy": float(np.mean([tasks.correct(s.sample.prompt, s.sample.text) for s in scored])),
    }
    metrics.update(teacher_metrics(scored, eos_ids))
    return metrics


def response_metrics(scored: Sequence[ScoredSample]) -> dict[str, float | None]:
    """What can be said of responses without their tasks and teachers."""
    samples = [s.sample for s in scored]
    tokens = np.array([len(s.response_ids) for s in samples])
    senior = np.array([s.senior_tokens for s in samples])
    junior = np.array([s.junior_tokens for s in samples])
    total = float(max(senior.sum() + junior.sum(), 1))  # nobody wrote inserted text
    by_task = [h["mean"] for h in reward_histograms([s.reward for s in scored], [s.prompt.task for s in samples])]
    return {
        "rollout/reward_mean": float(np.mean([s.reward for s in scored])),
        **{f"rollout/reward_{name}": v for name, v in reward_quantiles([s.reward for s in scored]).items()},
        "rollout/reward_worst_task": min(by_task),
        "rollout/reward_best_task": max(by_task),
        "rollout/response_tokens_mean": float(tokens.mean()),
        "rollout/truncated_fraction": float(np.mean([s.finish_reason == "length" for s in samples])),
        "tandem/senior_token_fraction": float(senior.sum() / total),
        "tandem/junior_token_fraction": float(junior.sum() / total),
        "tandem/switches_per_seq": float(np.mean([s.switches for s in samples])),
        "tandem/tokens_per_sent": float(total / max(sum(len(s.runs) for s in samples), 1)),
        "tandem/requests_per_token": float(sum(s.requests for s in samples) / total),
        "tandem/discarded_tokens": float(sum(s.discarded_tokens for s in samples)),
        "tandem/fallback_runs": float(sum(len(s.fallback_starts) for s in samples)),
    }


def teacher_metrics(scored: Sequence[ScoredSample], eos_ids: frozenset[int]) -> dict[str, float | None]:
    """`opd/teacher_kl`: mean of log pi_student - log pi_teacher over aligned senior tokens, nats; coverage; what is masked.

    `opd/eos_coverage` and `opd/eos_kl` are the same two of ends of turn alone: without a value there nothing holds the
    length of responses, and a student whose end of turn the teacher does not know writes longer and longer (ms-swift #9526).
    """
    with_teacher = [(s.sample, s.teacher) for s in scored if s.teacher is not None]
    out: dict[str, float | None] = {
        "opd/teacher_kl": None,
        "opd/coverage": None,
        "opd/eos_coverage": None,
        "opd/eos_kl": None,
    }
    out.update(dict.fromkeys(f"opd/unaligned_{reason}" for reason in UNALIGNED_REASONS))
    if not with_teacher:
        return out
    deltas = np.concatenate(
        [
            (np.asarray(s.log_probs) - a.log_probs)[a.mask & (np.asarray(s.authorship_mask) == 1)]
            for s, a in with_teacher
        ]
    )
    out["opd/teacher_kl"] = float(deltas.mean()) if deltas.size else None
    masks = np.concatenate([a.mask[np.asarray(s.loss_mask) == 1] for s, a in with_teacher])
    out["opd/coverage"] = float(masks.mean()) if masks.size else None
    ends = [
        (a.mask[-1], s.log_probs[-1] - a.log_probs[-1])
        for s, a in with_teacher
        if s.response_ids and s.response_ids[-1] in eos_ids
    ]
    if ends:
        out["opd/eos_coverage"] = float(np.mean([known for known, _ in ends]))
        known_ends = [delta for known, delta in ends if known]
        out["opd/eos_kl"] = float(np.mean(known_ends)) if known_ends else None
    for reason in UNALIGNED_REASONS:
        out[f"opd/unaligned_{reason}"] = float(sum(a.unaligned[reason] for _, a in with_teacher))
    return out


def evaluate(
    team: Team, tasks: TaskSet, prompts: Sequence[Prompt], per_prompt: int
) -> tuple[dict[str, float | None], list[ScoredSample]]:
    """(`eval/...` metrics, tandem samples) of the senior's current weights on held-out prompts.

    The same draws every time (a rollout id of its own), so before and after are paired. `eval/handoff_retention` is tandem
    accuracy over solo accuracy, None if solo is 0 or the run has no junior. `eval/teacher_kl` is of the tandem responses
    (of the solo ones without a junior).
    """
    both = "junior" in team.roster.roles
    teacher = bool(team.roster.teacher_specs)
    solo, _ = rollout(
        team, tasks, prompts, rollout_ids.EVALUATION, per_prompt, tandem=False, score=teacher and not both, plain=True
    )
    accuracy = _accuracy(solo, tasks)
    tandem: list[ScoredSample] = solo
    tandem_accuracy: float | None = None
    if both:
        tandem, _ = rollout(
            team, tasks, prompts, rollout_ids.EVALUATION, per_prompt, tandem=True, score=teacher, plain=True
        )
        tandem_accuracy = _accuracy(tandem, tasks)
    kl: Mapping[str, float | None] = teacher_metrics(tandem, team.roster.student.tokens.eos_ids)
    tokens = sum(len(s.sample.response_ids) for s in tandem)
    sampled = sum(s.sample.senior_tokens + s.sample.junior_tokens for s in tandem)
    return {
        "eval/solo_accuracy": accuracy,
        "eval/tandem_accuracy": tandem_accuracy,
        "eval/handoff_retention": tandem_accuracy / accuracy if tandem_accuracy is not None and accuracy else None,
        "eval/senior_token_fraction": sum(s.sample.senior_tokens for s in tandem) / max(sampled, 1),
        "eval/teacher_kl": kl["opd/teacher_kl"],
        "eval/coverage": kl["opd/coverage"],
        "eval/response_tokens_mean": tokens / len(tandem),
    }, tandem


def _accuracy(scored: Sequence[ScoredSample], tasks: TaskSet) -> float:
    return float(np.mean([tasks.correct(s.sample.prompt, s.sample.text) for s in scored]))
