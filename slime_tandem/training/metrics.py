"""What is measured of a step's responses, under the names of report/metrics.py: by the samples, their tasks, their teachers.

Pure: it starts no rollout and writes no file, and knows nothing of the update (`trainer.py` measures that).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slime_tandem.distill.alignment import UNALIGNED_REASONS
from slime_tandem.errors import TeacherScoreError, UnreadRolesError, UnreadTemplateError, UnreadToolsError
from slime_tandem.objective.advantages import reward_histograms, reward_quantiles
from slime_tandem.report.metrics import part_metric
from slime_tandem.report.teachers import EvaluationTeachers, TeacherFigures, kl_of
from slime_tandem.types import SENIOR, BoolArray, FloatArray, ScoredSample, TandemSample


def rollout_metrics(
    scored: Sequence[ScoredSample], eos_ids: frozenset[int], count_markers: Callable[[TandemSample], int]
) -> dict[str, float | None]:
    """`rollout/`, `tandem/` and `opd/` metrics of a rollout (names, units: report/metrics.py). None: nothing to measure.

    `eos_ids` are the senior's ends of turn; `count_markers` finds its control tokens in a sample's untrusted text.
    """
    metrics: dict[str, float | None] = {
        **response_metrics(scored),
        "rollout/loop_blocked_s": None,
        "rollout/loop_busy_s": None,
        "rollout/loop_cpu_s": None,
        "rollout/scoring_exposed_s": None,
        "rollout/scoring_hidden_s": None,
        "rollout/text_markers": float(sum(count_markers(s.sample) for s in scored)),
        "rollout/accuracy": accuracy(scored),
    }
    metrics.update(teacher_metrics(scored, eos_ids))
    return metrics


def accuracy(scored: Sequence[ScoredSample]) -> float | None:
    """The share of right responses among those that have a reward; None where none has."""
    return _mean([float(s.right) for s in scored if s.reward is not None])


def reward_mean(scored: Sequence[ScoredSample]) -> float | None:
    """Of the responses that have a reward; None where none has."""
    return _mean([s.reward for s in scored if s.reward is not None])


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


UNREAD: Mapping[str, type[TeacherScoreError]] = {
    "roles": UnreadRolesError,
    "tools": UnreadToolsError,
    "template": UnreadTemplateError,
}
"""Why a teacher's template does not show a sample, by the names of the metrics."""


def ends_of(sample: TandemSample, eos_ids: frozenset[int]) -> list[int]:
    """Where a model sampled an end of turn."""
    sampled = zip(sample.response_ids, sample.loss_mask, strict=True)
    return [i for i, (token, mask) in enumerate(sampled) if mask and token in eos_ids]


def response_metrics(scored: Sequence[ScoredSample]) -> dict[str, float | None]:
    """What can be said of responses without their tasks and teachers. Rewards are of those that have one; None: none has."""
    samples = [s.sample for s in scored]
    rewards, tags = rewards_by_task(scored)
    tokens = np.array([len(s.response_ids) for s in samples])
    senior = np.array([s.senior_tokens for s in samples])
    junior = np.array([s.junior_tokens for s in samples])
    total = float(max(senior.sum() + junior.sum(), 1))  # nobody wrote inserted text
    by_task = [h["mean"] for h in reward_histograms(rewards, tags)]
    return {
        "rollout/reward_mean": reward_mean(scored),
        **{f"rollout/reward_{name}": v for name, v in reward_quantiles(rewards).items()},
        "rollout/reward_worst_task": min(by_task, default=None),
        "rollout/reward_best_task": max(by_task, default=None),
        "rollout/response_tokens_mean": float(tokens.mean()),
        "rollout/truncated_fraction": float(np.mean([s.finish_reason == "length" for s in samples])),
        "tandem/senior_token_fraction": float(senior.sum() / total),
        "tandem/junior_token_fraction": float(junior.sum() / total),
        "tandem/switches_per_seq": float(np.mean([s.switches for s in samples])),
        "tandem/tokens_per_sent": float(
            np.mean(np.maximum(senior + junior, 1) / np.array([s.switches + 1 for s in samples]))
        ),
        "tandem/tokens_per_stretch": float(total / max(sum(len(s.runs) for s in samples), 1)),
        "tandem/requests_per_token": float(sum(s.requests for s in samples) / total),
        "tandem/discarded_tokens": float(sum(s.discarded_tokens for s in samples)),
        "tandem/fallback_runs": float(sum(len(s.fallback_starts) for s in samples)),
    }


def rewards_by_task(scored: Sequence[ScoredSample]) -> tuple[list[float], list[str]]:
    """(rewards, tags of their tasks) of the responses that have one."""
    found = [(s.reward, s.sample.prompt.task) for s in scored if s.reward is not None]
    return [reward for reward, _ in found], [task for _, task in found]


def part_means(scored: Sequence[ScoredSample]) -> list[dict[str, Any]]:
    """One record per task tag and named part of a reward, in order: `task`, `part`, `samples`, `mean`, `min`, `max`."""
    values: dict[tuple[str, str], list[float]] = {}
    for s in scored:
        for part, value in s.parts.items():
            values.setdefault((s.sample.prompt.task, part), []).append(value)
    return [
        {"task": task, "part": part, "samples": len(v), "mean": float(np.mean(v)), "min": min(v), "max": max(v)}
        for (task, part), v in sorted(values.items())
    ]


def part_scalars(room: str, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The means of `part_means` under the names that dashboards get; `room`: rollout or eval."""
    return {part_metric(room, r["task"], r["part"]): r["mean"] for r in records}


def teacher_figures(
    scored: Sequence[ScoredSample], prompts: int = 1, per_prompt: int | None = None
) -> EvaluationTeachers | None:
    """What `opd/teacher_kl` of responses is made of, prompt by prompt (`per_prompt` None: as of one), and the same of each
    teacher; None where no teacher has scored."""
    views: dict[str, list[tuple[TandemSample, FloatArray, BoolArray]]] = {}
    whole = [(s.sample, s.teacher.log_probs, s.teacher.mask) for s in scored if s.teacher is not None]
    if not whole:
        return None
    for s in scored:
        for name, view in ({} if s.teacher is None else s.teacher.by_teacher).items():
            views.setdefault(name, []).append((s.sample, *view))
    by_name = {name: _figures(view, prompts, per_prompt) for name, view in sorted(views.items())}
    return {"all": _figures(whole, prompts, per_prompt), "by_name": by_name}


def kl_by_teacher(scored: Sequence[ScoredSample]) -> dict[str, float]:
    """`opd/teacher_kl/<name>` of each teacher, where there are several: of the responses that it has scored."""
    found = teacher_figures(scored)
    by_name = {} if found is None or len(found["by_name"]) < 2 else found["by_name"]
    known = {name: kl_of(figures) for name, figures in by_name.items()}
    return {f"opd/teacher_kl/{name}": kl for name, kl in known.items() if kl is not None}


def _figures(
    views: Sequence[tuple[TandemSample, FloatArray, BoolArray]], prompts: int, per_prompt: int | None
) -> TeacherFigures:
    sums, tokens, covered, sampled = [0.0] * prompts, [0] * prompts, 0, 0
    for sample, log_probs, mask in views:
        at = 0 if per_prompt is None else sample.key.sample_index // per_prompt
        used = mask & (np.asarray(sample.authorship_mask) == SENIOR)
        sums[at] += float((np.asarray(sample.log_probs) - log_probs)[used].sum())
        tokens[at] += int(used.sum())
        written = np.asarray(sample.loss_mask) == 1
        covered, sampled = covered + int(mask[written].sum()), sampled + int(written.sum())
    return {"kl_sums": sums, "tokens": tokens, "coverage": covered / sampled if sampled else None}


def teacher_metrics(scored: Sequence[ScoredSample], eos_ids: frozenset[int]) -> dict[str, float | None]:
    """`opd/teacher_kl`: mean of log pi_student - log pi_teacher over aligned senior tokens, nats; coverage; what is masked.

    `opd/eos_coverage` and `opd/eos_kl` are the same two of sampled ends of turn alone (`eos_ids`; a stop string is none):
    without a value there nothing holds the length of responses, and a student whose end of turn the teacher does not know
    writes longer and longer (ms-swift #9526). `opd/unread_*` count samples that a teacher's template does not show.
    """
    with_teacher = [(s.sample, s.teacher) for s in scored if s.teacher is not None]
    out: dict[str, float | None] = {
        "opd/teacher_kl": None,
        "opd/coverage": None,
        "opd/eos_coverage": None,
        "opd/eos_kl": None,
        "opd/bounded_mass": None,
    }
    out.update(dict.fromkeys(f"opd/unaligned_{reason}" for reason in UNALIGNED_REASONS))
    errors = [s.teacher_error for s in scored if s.teacher_error is not None]
    for name, kind in UNREAD.items():
        count = float(sum(isinstance(error, kind) for error in errors))
        out[f"opd/unread_{name}"] = count if with_teacher or errors else None
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
    bounds = [a.bounded[a.mask] for _, a in with_teacher if a.bounded is not None]
    out["opd/bounded_mass"] = float(np.concatenate(bounds).mean()) if any(map(len, bounds)) else None
    ends = [
        (a.mask[i], s.authorship_mask[i] == SENIOR, s.log_probs[i] - a.log_probs[i])
        for s, a in with_teacher
        for i in ends_of(s, eos_ids)
    ]
    if ends:
        out["opd/eos_coverage"] = float(np.mean([known for known, _, _ in ends]))
        known_ends = [delta for known, own, delta in ends if known and own]
        out["opd/eos_kl"] = float(np.mean(known_ends)) if known_ends else None
    for reason in UNALIGNED_REASONS:
        out[f"opd/unaligned_{reason}"] = float(sum(a.unaligned[reason] for _, a in with_teacher))
    return out
