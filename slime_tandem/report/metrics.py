"""Every metric name once, with its unit, how it is reduced, which way is better, and what it says.

A row of `metrics.jsonl` holds exactly the `step` names, a row of `eval.jsonl` exactly the `eval` names. A value that
does not exist in a run (no teacher, no junior) is None, never absent, so that readers and plots need no special cases.
`docs/metrics.md` is generated from this table: `python -m slime_tandem.report.metrics > docs/metrics.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from slime_tandem.errors import DataError
from slime_tandem.types import RIGHT_REWARD

Scope = Literal["step", "eval"]
Direction = Literal["up", "down", "none"]
Reduction = Literal[
    "sample mean",
    "group mean",
    "token mean",
    "update mean",
    "ratio of sums",
    "sum over the step",
    "value at the end",
    "worst of the step",
]
Row = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `reduction` says over what the value is taken, `direction` which way is better."""

    name: str
    scope: Scope
    unit: str
    reduction: Reduction
    direction: Direction
    description: str


def _step(name: str, unit: str, reduction: Reduction, direction: Direction, description: str) -> Metric:
    return Metric(name, "step", unit, reduction, direction, description)


def _eval(name: str, unit: str, reduction: Reduction, direction: Direction, description: str) -> Metric:
    return Metric(name, "eval", unit, reduction, direction, description)


_TABLE = (
    _step("rollout/reward_mean", "reward", "sample mean", "up", "task reward of the step's rollouts"),
    *(
        _step(
            f"rollout/reward_p{q:02d}",
            "reward",
            "sample mean",
            "up",
            f"{q}% quantile of the rewards (by task: rewards.jsonl)",
        )
        for q in (5, 25, 50, 75, 95)
    ),
    _step(
        "rollout/reward_worst_task", "reward", "sample mean", "up", "reward_mean of the task tag with the lowest one"
    ),
    _step(
        "rollout/reward_best_task", "reward", "sample mean", "up", "reward_mean of the task tag with the highest one"
    ),
    _step(
        "rollout/accuracy",
        "fraction",
        "sample mean",
        "up",
        f"share of rollouts with a reward of {RIGHT_REWARD:g} or more (a part called `correct` decides, if there is one)",
    ),
    _step("rollout/response_tokens_mean", "tokens", "sample mean", "none", "response length, both authors together"),
    _step("rollout/truncated_fraction", "fraction", "sample mean", "down", "share of responses cut at the length cap"),
    _step("rollout/failed_samples", "samples", "sum over the step", "down", "responses that could not be written"),
    _step(
        "rollout/loop_blocked_s",
        "s",
        "worst of the step",
        "down",
        "slime: longest time that the rollout manager's event loop came too late to its work",
    ),
    _step(
        "rollout/loop_busy_s",
        "s",
        "worst of the step",
        "down",
        "slime: most processor time that this loop's thread took before it could look at its clock again",
    ),
    _step("rollout/loop_cpu_s", "s", "sum over the step", "down", "slime: processor time of that loop's thread"),
    _step(
        "rollout/scoring_exposed_s",
        "s",
        "sum over the step",
        "down",
        "slime: while teachers score and nothing is written any more: what distillation adds to the rollout",
    ),
    _step("rollout/scoring_hidden_s", "s", "sum over the step", "none", "slime: while teachers score beside writing"),
    _step(
        "reward/timeouts",
        "responses",
        "sum over the step",
        "down",
        "responses whose scoring took longer than reward.timeout_s: their reward is 0; of a reward of your own longer than "
        "reward.own_timeout_s: they have none",
    ),
    _step(
        "reward/errors",
        "responses",
        "sum over the step",
        "down",
        "responses whose scoring went past another limit (memory, length, a process that died twice); their reward is 0, of a "
        "reward of your own: they have none",
    ),
    *(
        _step(f"reward/{name}", "responses", "sum over the step", "down", f"responses without a reward: {what}")
        for name, what in (
            ("raised", "your function raised"),
            ("invalid", "it answered no finite number, other parts than before, or not one answer for each of a batch"),
            ("unreachable", "your server gave no answer that can be used, after reward.own_retries repeats"),
        )
    ),
    _step(
        "reward/failed_samples",
        "responses",
        "sum over the step",
        "down",
        "responses without a reward, of any of these kinds: masked in the task reward (reward.on_failed_sample)",
    ),
    _step(
        "rollout/text_markers",
        "markers",
        "sum over the step",
        "down",
        "control tokens typed by users, tools or environments (models.text_markers says what becomes of them)",
    ),
    _step(
        "rollout/skipped_rows",
        "rows",
        "sum over the step",
        "down",
        "bad rows of prompt files that the step's draw left out (tasks[].bad_lines=skip)",
    ),
    _step("tandem/senior_token_fraction", "fraction", "ratio of sums", "none", "sampled tokens that the senior wrote"),
    _step("tandem/junior_token_fraction", "fraction", "ratio of sums", "none", "sampled tokens that the junior wrote"),
    _step("tandem/switches_per_seq", "switches", "sample mean", "none", "changes of author in one response"),
    _step(
        "tandem/tokens_per_sent",
        "tokens",
        "sample mean",
        "none",
        "tokens over changes of author plus one, of each response, as the authors' code has it",
    ),
    _step("tandem/tokens_per_stretch", "tokens", "ratio of sums", "none", "length of a stretch written by one author"),
    _step("tandem/requests_per_token", "requests", "ratio of sums", "down", "engine requests per response token"),
    _step("tandem/discarded_tokens", "tokens", "sum over the step", "down", "generated past a handoff and dropped"),
    _step(
        "tandem/fallback_runs",
        "runs",
        "sum over the step",
        "down",
        "junior runs without an exact form in the senior's vocabulary, written by the senior",
    ),
    _step(
        "opd/teacher_kl",
        "nats",
        "token mean",
        "down",
        "log pi_student - log pi_teacher on aligned senior tokens: a one-sample estimate of KL(student || teacher)",
    ),
    _step("opd/coverage", "fraction", "ratio of sums", "up", "sampled tokens that carry a teacher log-prob"),
    _step(
        "opd/eos_coverage",
        "fraction",
        "sample mean",
        "up",
        "sampled ends of turn that carry a teacher value (stop strings are none)",
    ),
    _step("opd/eos_kl", "nats", "sample mean", "down", "opd/teacher_kl of ends of turn alone"),
    _step(
        "opd/bounded_mass",
        "probability",
        "token mean",
        "down",
        "with opd.selection.depth: how much too large the mass of the other side's entries may be taken, at most",
    ),
    _step("opd/failed_samples", "samples", "sum over the step", "down", "samples whose teacher answer was unusable"),
    _step(
        "opd/unread_roles",
        "samples",
        "sum over the step",
        "down",
        "of these: a message's role that the teacher's template does not show",
    ),
    _step(
        "opd/unread_tools",
        "samples",
        "sum over the step",
        "down",
        "of these: tools or calls of tools that the teacher's template does not show",
    ),
    _step(
        "opd/unread_template",
        "samples",
        "sum over the step",
        "down",
        "of these: the teacher's template refuses the messages, or does not write the turns out",
    ),
    _step(
        "opd/unaligned_special",
        "tokens",
        "sum over the step",
        "down",
        "no teacher value: special token without a counterpart",
    ),
    _step(
        "opd/unaligned_boundary",
        "tokens",
        "sum over the step",
        "down",
        "no teacher value: the two tokenizers cut the text at other places",
    ),
    _step(
        "opd/unaligned_invalid_utf8",
        "tokens",
        "sum over the step",
        "down",
        "no teacher value: the token is a broken piece of a character",
    ),
    _step(
        "opd/unaligned_normalised",
        "tokens",
        "sum over the step",
        "down",
        "no teacher value: the teacher's tokenizer rewrites the character or has no token for it",
    ),
    _step(
        "opd/unaligned_unproven",
        "tokens",
        "sum over the step",
        "down",
        "no teacher value: the teacher's tokens do not spell the text here",
    ),
    _step(
        "opd/unaligned_thinking",
        "tokens",
        "sum over the step",
        "none",
        "no teacher value: thinking kept from the teacher",
    ),
    _step(
        "opd/unaligned_inserted", "tokens", "sum over the step", "none", "no teacher value: text that nobody sampled"
    ),
    _step(
        "selection/keep_ratio",
        "fraction",
        "ratio of sums",
        "none",
        "valid tokens that carry the teacher's signal (opd.selection; 1 without a selection)",
    ),
    _step(
        "selection/valid_tokens", "tokens", "sum over the step", "none", "senior-written tokens that may be selected"
    ),
    _step(
        "selection/masked_tokens",
        "tokens",
        "sum over the step",
        "down",
        "aligned tokens that cannot be scored: none of a side's candidates has a counterpart",
    ),
    _step(
        "selection/unshared_candidates",
        "fraction",
        "ratio of sums",
        "down",
        "entries of both sides' lists whose bytes the other vocabulary has in no token",
    ),
    *(
        _step(
            f"selection/{name}_mean", "fraction", "token mean", "none", f"normalised {name} ({what}) of selected tokens"
        )
        for name, what in (("H", "student's entropy"), ("D", "disagreement"), ("C", "compatibility"))
    ),
    _step(
        "selection/position_mean",
        "fraction",
        "token mean",
        "none",
        "relative position of selected tokens; 0.5: spread evenly",
    ),
    *(
        _step(
            f"selection/position_{i}",
            "fraction",
            "ratio of sums",
            "none",
            f"selected tokens that lie in tenth {i} of their response",
        )
        for i in range(10)
    ),
    _step(
        "selection/end_of_turn",
        "fraction",
        "ratio of sums",
        "none",
        "selected tokens that are ends of turn",
    ),
    _step(
        "selection/end_of_turn_kept",
        "fraction",
        "ratio of sums",
        "none",
        "ends of turn among the tokens that may be selected which are",
    ),
    *(
        _step(
            f"selection/overlap_{name}",
            "fraction",
            "ratio of sums",
            "none",
            f"tokens that selector {name} shares with the one in use, over all that either selects",
        )
        for name in ("dlearn_high", "ca_softor", "entropy", "tip", "divergence", "random")
    ),
    _step("group/zero_variance_fraction", "fraction", "group mean", "down", "groups whose rewards are all equal"),
    _step("group/zero_variance_groups", "groups", "sum over the step", "down", "these groups; they teach nothing"),
    _step("group/clipped_advantages", "fraction", "sample mean", "none", "advantages that clip_advantages changed"),
    _step("train/loss", "1", "update mean", "none", "the whole loss: the five terms below"),
    _step("train/pg_loss", "1", "token mean", "none", "clipped surrogate of the task reward, with its weight"),
    _step(
        "train/opd_loss",
        "1",
        "token mean",
        "none",
        "the distillation signal (clipped surrogate, or divergence), with its weight",
    ),
    _step("train/kl_loss", "nats", "token mean", "none", "KL to the frozen start weights, with its weight"),
    _step(
        "train/entropy_bonus", "nats", "token mean", "none", "entropy with its weight, entropy_coef, taken off the loss"
    ),
    _step(
        "train/junior_kl_loss", "nats", "token mean", "none", "KL from the junior on its own tokens, with lambda_jun"
    ),
    _step("train/kl", "nats", "token mean", "down", "KL to the start weights by kl_estimator, on trained tokens"),
    _step(
        "train/kl_p95",
        "nats",
        "token mean",
        "down",
        "95% quantile of that estimate over the trained tokens of all updates",
    ),
    _step("train/kl_coef", "1", "value at the end", "none", "weight of that KL; adapts with objective.kl_target"),
    _step(
        "train/kl_guard", "updates", "sum over the step", "down", "updates with a KL above twice objective.kl_target"
    ),
    _step("train/updates", "updates", "sum over the step", "none", "optimizer steps (fewer when the guard skips some)"),
    _step(
        "train/empty_updates",
        "updates",
        "sum over the step",
        "down",
        "optimizer steps left out: no token of the mini-batch counts in any term (if all are, the means are null)",
    ),
    _step("train/junior_kl", "nats", "token mean", "down", "estimate of KL(junior || senior) on junior-written tokens"),
    _step(
        "train/rollout_weight_mean",
        "1",
        "token mean",
        "none",
        "importance weight between engine and trainer; 1 without one",
    ),
    _step(
        "train/rollout_weight_cut",
        "fraction",
        "token mean",
        "down",
        "trained tokens whose weight hit rollout_weight_max",
    ),
    _step(
        "train/rollout_masked_tokens",
        "tokens",
        "sum over the step",
        "down",
        "tokens outside the bounds of rollout_weights",
    ),
    _step("train/grad_norm", "1", "update mean", "none", "global gradient norm before clipping"),
    _step("train/clip_fraction", "fraction", "token mean", "none", "trained tokens whose ratio was clipped"),
    _step("train/ratio_mean", "1", "token mean", "none", "pi_trainer / pi_rollout on trained tokens; 1 when in step"),
    _step("train/entropy", "nats", "token mean", "none", "entropy of the senior's full distribution"),
    _step("train/logprob_diff", "nats", "token mean", "down", "|trainer - rollout| log-prob on senior tokens"),
    _step("train/lr", "1", "value at the end", "none", "learning rate"),
    _step("engine/retries", "requests", "sum over the step", "down", "requests repeated after a failure"),
    _step("engine/weight_version", "version", "value at the end", "none", "weights the senior's server answers with"),
    _step("time/rollout_s", "seconds", "sum over the step", "down", "writing the responses"),
    _step("time/scoring_s", "seconds", "sum over the step", "down", "teacher scoring and alignment"),
    _step("time/train_s", "seconds", "sum over the step", "down", "forward, backward and optimizer"),
    _step("time/sync_s", "seconds", "sum over the step", "down", "sending new weights to the senior's server"),
    _step("time/step_s", "seconds", "sum over the step", "down", "the whole step, wall clock"),
    _eval("eval/solo_accuracy", "fraction", "sample mean", "up", "held-out prompts right when the senior writes alone"),
    _eval(
        "eval/tandem_accuracy", "fraction", "sample mean", "up", "held-out prompts right when the junior writes along"
    ),
    _eval(
        "eval/handoff_retention", "ratio", "ratio of sums", "up", "tandem accuracy / solo accuracy; null if solo is 0"
    ),
    _eval(
        "eval/senior_token_fraction",
        "fraction",
        "ratio of sums",
        "none",
        "senior's share of the tandem responses' tokens",
    ),
    _eval("eval/teacher_kl", "nats", "token mean", "down", "opd/teacher_kl on the held-out tandem responses"),
    _eval("eval/coverage", "fraction", "ratio of sums", "up", "opd/coverage on the held-out tandem responses"),
    _eval("eval/response_tokens_mean", "tokens", "sample mean", "none", "length of the held-out tandem responses"),
    _eval(
        "eval/reward_timeouts", "responses", "sum over the step", "down", "reward/timeouts of the held-out responses"
    ),
    _eval("eval/reward_errors", "responses", "sum over the step", "down", "reward/errors of the held-out responses"),
    _eval(
        "eval/reward_failed_samples",
        "responses",
        "sum over the step",
        "down",
        "reward/failed_samples of the held-out responses; accuracies are of the others",
    ),
    _eval("eval/reward_mean", "reward", "sample mean", "up", "reward of the held-out tandem responses"),
)


def part_metric(room: str, task: str, part: str) -> str:
    """The name of the mean of a reward's named part on dashboards; in reward_parts.jsonl task and part are values.

    >>> part_metric("rollout", "sums", "brief")
    'rollout/reward_parts/sums/brief'
    """
    return f"{room}/reward_parts/{task}/{part}"


def reward_metric(task: str) -> str:
    """The name of the histogram of a task's rewards on dashboards.

    >>> reward_metric("sums")
    'rollout/reward/sums'
    """
    return f"rollout/reward/{task}"


METRICS: Mapping[str, Metric] = MappingProxyType({m.name: m for m in _TABLE})
assert len(METRICS) == len(_TABLE), "a metric name appears twice"


def row_keys(scope: Scope) -> tuple[str, ...]:
    """The names of one kind of row, in the order they are written.

    >>> row_keys("eval")[0]
    'eval/solo_accuracy'
    """
    return tuple(name for name, m in METRICS.items() if m.scope == scope)


def check_row(row: Row, scope: Scope = "step") -> None:
    """Assert that `row` has exactly the names of its kind; refuse values that JSON cannot hold.

    Raises AssertionError for a missing or unknown name (our bug), DataError for a NaN, an infinity or a non-number,
    naming the metric.
    """
    expected = set(row_keys(scope))
    assert row.keys() == expected, (
        f"{scope} row: missing {sorted(expected - row.keys())}, unknown {sorted(row.keys() - expected)}"
    )
    for name, value in row.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(name, value, "a number or None", "convert it with float() before it is logged")
        if not math.isfinite(value):
            raise DataError(
                name,
                value,
                "a finite number",
                "the run has diverged or a mean was taken over nothing: look at the steps before, "
                "lower optimizer.lr, and resume from the last checkpoint",
            )


_BETTER: Mapping[Direction, str] = {"up": "higher", "down": "lower", "none": "-"}


def metrics_markdown() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from `slime_tandem/report/metrics.py`; do not edit by hand:",
        "`python -m slime_tandem.report.metrics > docs/metrics.md`.",
        "",
        "A row holds every name of its table. A value that does not exist in a run (no teacher, no junior) is `null`.",
        "`step` counts from 0; an evaluation's `step` is the number of updates done before it.",
    ]
    for scope, file in (("step", "metrics.jsonl"), ("eval", "eval.jsonl")):
        lines += [
            "",
            f"## `{file}`",
            "",
            "| name | unit | reduction | better | what it says |",
            "|---|---|---|---|---|",
        ]
        for m in METRICS.values():
            if m.scope == scope:
                text = m.description.replace("|", "\\|")
                lines.append(f"| `{m.name}` | {m.unit} | {m.reduction} | {_BETTER[m.direction]} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(metrics_markdown(), end="")
