"""One rollout of a run: write, reward, score; and an evaluation by two of them. What a step is trained on is not known here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from slime_tandem.errors import (
    EngineError,
    EngineUnavailableError,
    TeacherScoreError,
    WeightVersionError,
    printable,
)
from slime_tandem.report.teachers import EvaluationTeachers
from slime_tandem.rollout import rollout_ids
from slime_tandem.tasks.arguments import Response
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.judging import Verdict, counted, require_some
from slime_tandem.team.team import Team
from slime_tandem.training.metrics import accuracy, reward_mean, teacher_figures, teacher_metrics
from slime_tandem.types import CORRECT, AlignedScores, FailedSample, Prompt, SampleKey, ScoredSample, TandemSample

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
            first = printable(str(error).splitlines()[0])
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
    where: str = "a rollout",
    told: Callable[[str], None] = lambda part: None,
) -> tuple[list[ScoredSample], dict[str, float]]:
    """(scored samples, measured): `time/rollout_s`, `time/scoring_s`, `rollout/failed_samples`, `reward/...`; in prompt order.

    `tandem=False`: the senior writes alone. `score=False`: no teacher is asked; `plain`: for no more than the sampled tokens'
    log-probs (where responses are not read along), as for an evaluation. Raises EngineError for a sample that
    could not be written, unless `sampling.on_failed_sample` says to drop it, and always when none was written; DataError for
    one whose reward failed, unless `reward.on_failed_sample` says to mask it, and always when all did; it says `where` in
    the run that was. `told` hears of each part as it begins.
    """
    t0 = time.perf_counter()
    count = f"{len(prompts) * per_prompt} responses"
    told(f"writing {count}, {'senior and junior' if tandem else 'the senior alone'}")
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
    if any(tasks.is_rewarded(prompt) for prompt in prompts):
        told(f"rewarding {len(samples)} responses")
    verdicts = rewarded(
        tasks.verdicts([Response(s.prompt, s.text, s) for s in samples]), team.config.reward.on_failed_sample, where
    )
    t1 = time.perf_counter()
    scores: Sequence[AlignedScores | TeacherScoreError | None] = [early.get(s.key) for s in samples]
    if score and overlap is None:
        told(f"teachers score {len(samples)} responses")
        scores = with_revival(team, lambda: team.score(samples, plain=plain))
    t2 = time.perf_counter()
    scored = [
        ScoredSample(s, v.reward, a, None, v.parts, v.unasked)
        if isinstance(a, AlignedScores)
        else ScoredSample(s, v.reward, None, a, v.parts, v.unasked)
        for s, v, a in zip(samples, verdicts, scores, strict=True)
    ]
    return scored, {
        "time/rollout_s": t1 - t0,
        "time/scoring_s": t2 - t1,
        "rollout/failed_samples": float(len(written) - len(samples)),
        **counted(verdicts),
    }


def rewarded(verdicts: Sequence[Verdict], on_failed: Literal["mask", "stop"], where: str) -> Sequence[Verdict]:
    """The verdicts themselves, if a rollout may go on with them (`judging.require_some`); what failed is told on the screen."""
    if (said := require_some(verdicts, on_failed, where)) is not None:
        print(said, file=sys.stderr, flush=True)
    return verdicts


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


class Evaluated(NamedTuple):
    """An evaluation: `eval/...` metrics, the samples that can be shown (tandem ones where there is a junior), and by
    metric the share of right responses of each prompt, in their order; None where no response of a prompt has a reward.
    `teachers`: what the KL to each is made of, None without teachers. `rewards`: the mean reward of each prompt, where rewards
    are the user's own numbers that say nothing of right and wrong; else None."""

    metrics: dict[str, float | None]
    samples: list[ScoredSample]
    right: dict[str, list[float | None]]
    teachers: EvaluationTeachers | None
    rewards: list[float | None] | None


def evaluate(
    team: Team,
    tasks: TaskSet,
    prompts: Sequence[Prompt],
    per_prompt: int,
    *,
    when: str = "evaluation",
    told: Callable[[str], None] = lambda part: None,
) -> Evaluated:
    """The senior's current weights on held-out prompts; `when`: what errors call it. `told` hears of each part as it begins.

    The same draws every time (a rollout id of its own), so before and after are paired. `eval/handoff_retention` is tandem
    accuracy over solo accuracy, None if solo is 0 or the run has no junior. `eval/teacher_kl` is of the tandem responses
    (of the solo ones without a junior). Where no response has a reward to be found, accuracies and rewards are None.
    """
    both = "junior" in team.roster.roles
    teacher = bool(team.roster.teacher_specs)
    number = rollout_ids.EVALUATION
    score_solo = teacher and not both
    solo, measured = rollout(
        team, tasks, prompts, number, per_prompt, tandem=False, score=score_solo, plain=True, told=told,
        where=f"{when}: solo responses to {len(prompts)} held-out prompts",
    )  # fmt: skip
    solo_accuracy = accuracy(solo)
    right = {"eval/solo_accuracy": _by_prompt(solo, len(prompts), per_prompt)}
    past_limit = [measured]
    tandem: list[ScoredSample] = solo
    tandem_accuracy: float | None = None
    if both:
        tandem, more = rollout(
            team, tasks, prompts, number, per_prompt, tandem=True, score=teacher, plain=True, told=told,
            where=f"{when}: tandem responses to {len(prompts)} held-out prompts",
        )  # fmt: skip
        tandem_accuracy = accuracy(tandem)
        right["eval/tandem_accuracy"] = _by_prompt(tandem, len(prompts), per_prompt)
        past_limit.append(more)
    kl: Mapping[str, float | None] = teacher_metrics(tandem, team.roster.student.tokens.eos_ids)
    tokens = sum(len(s.sample.response_ids) for s in tandem)
    sampled = sum(s.sample.senior_tokens + s.sample.junior_tokens for s in tandem)
    metrics: dict[str, float | None] = {
        "eval/solo_accuracy": solo_accuracy,
        "eval/tandem_accuracy": tandem_accuracy,
        "eval/handoff_retention": tandem_accuracy / solo_accuracy
        if tandem_accuracy is not None and solo_accuracy
        else None,
        "eval/senior_token_fraction": sum(s.sample.senior_tokens for s in tandem) / max(sampled, 1),
        "eval/teacher_kl": kl["opd/teacher_kl"],
        "eval/coverage": kl["opd/coverage"],
        "eval/response_tokens_mean": tokens / len(tandem),
        "eval/reward_timeouts": sum(m["reward/timeouts"] for m in past_limit),
        "eval/reward_errors": sum(m["reward/errors"] for m in past_limit),
        "eval/reward_failed_samples": sum(m["reward/failed_samples"] for m in past_limit),
        "eval/reward_mean": reward_mean(tandem),
    }
    own = all(tasks.specs[prompt.metadata["spec"]].scored_by_own for prompt in prompts)
    rewards = None
    if own and not any(CORRECT in s.parts for s in (*solo, *tandem)):
        rewards = _by_prompt(tandem, len(prompts), per_prompt, lambda s: s.reward or 0.0)
    return Evaluated(metrics, tandem, right, teacher_figures(tandem, len(prompts), per_prompt), rewards)


def _by_prompt(
    scored: Sequence[ScoredSample],
    prompts: int,
    per_prompt: int,
    value: Callable[[ScoredSample], float] = lambda s: s.right,
) -> list[float | None]:
    answers: list[list[float]] = [[] for _ in range(prompts)]
    for s in scored:
        if s.reward is not None:
            answers[s.sample.key.sample_index // per_prompt].append(value(s))
    return [float(np.mean(a)) if a else None for a in answers]
