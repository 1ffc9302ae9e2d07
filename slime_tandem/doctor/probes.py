"""The probes themselves: each looks at what it is given and says what it found. No processes, no files.

A probe compares what the project computes on the user's settings, models and responses with what must hold whatever these are.
What it cannot decide it skips, with the reason; what is no fault but worth a look is a warning. Which are run, and on what, is
`run.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slime_tandem.config import ObjectiveConfig, OpdConfig, RunConfig, TaskSpec
from slime_tandem.errors import TandemError
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.objective.advantages import group_advantages
from slime_tandem.objective.kl import kl_estimate
from slime_tandem.objective.loss import Denominators, PackedTokens, tandem_loss
from slime_tandem.tasks.first_look import looks, why_equal
from slime_tandem.training.rows import Response, TrainRow
from slime_tandem.training.trainer import Trainer
from slime_tandem.types import SENIOR, FloatArray, Message, ScoredSample, TandemSample

Status = Literal["pass", "warn", "fail", "skip"]
_TEXT = "Sum: 12 + 345 = 357.\n\ndef f(x):\n    return x ** 2  # naïve café, 数字 3.14 🚀"
_OUTSIDE = 0.1  # |ratio - 1| that counts as outside
_KL_ROWS = 64


@dataclass(frozen=True)
class Finding:
    """What one probe says. `remedy` is there where something should be done."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Tolerance:
    """How far two computations of one log-prob may lie apart, nats: on average, and at the 99% quantile of tokens."""

    mean: float
    high: float


FLOAT32, BFLOAT16 = Tolerance(1e-3, 1e-2), Tolerance(0.03, 0.3)


def attempt(name: str, probe: Callable[[], Finding]) -> Finding:
    """The probe's finding; an error that names its own remedy is a finding, too."""
    try:
        return probe()
    except TandemError as error:
        return Finding(name, "fail", error.what, error.remedy)


def group_sums(config: RunConfig) -> Finding:
    """Advantages under the run's own baseline and scale: per group, in any order, and 0 where all rewards are alike."""
    name, objective = "group sums", config.objective
    K = config.train.samples_per_prompt
    if K == 1:
        return Finding(name, "skip", "train.samples_per_prompt=1: no groups to compare within")
    rng = np.random.default_rng(0)
    rewards = np.concatenate([rng.random(3 * K), np.full(K, 0.1)])
    ids = np.repeat([7, 3, 11, 5], K)
    order = rng.permutation(4 * K)
    straight, flat = group_advantages(rewards, ids.tolist(), objective.scale_advantages, objective.baseline)
    shuffled, _ = group_advantages(rewards[order], ids[order].tolist(), objective.scale_advantages, objective.baseline)
    off = float(np.abs(straight[order] - shuffled).max())
    sums = max(abs(float(straight[ids == g].sum())) for g in set(ids.tolist()))
    centred = objective.baseline == "median" or sums < 1e-9 * K
    if off > 1e-9 or not centred or flat != 0.25 or np.abs(straight[3 * K :]).max() != 0:
        return Finding(
            name, "fail", f"sums up to {sums:.2g}, {off:.2g} apart when shuffled", "report this, it is our fault"
        )
    sums_are = "not zero with baseline=median" if objective.baseline == "median" else f"at most {sums:.1g}"
    return Finding(
        name, "pass", f"4 groups of {K}: sums {sums_are}; the same in any order; the group of equal rewards is 0"
    )


def tokenizer(tok: ModelTokenizer, role: str, width: int | None = None) -> Finding:
    """Bytes survive a round trip, prompts have one begin of text, ends of turn agree, the logits cover all ids."""
    name, tokens = f"tokenizer of the {role}", tok.tokens
    spelt = tokens.join(tok.encode(_TEXT))
    prompt = tok.render([Message("user", "probe")])
    if spelt != _TEXT.encode():
        return Finding(
            name, "fail", f"ids of a probe text spell {spelt[:60]!r}...", "take a model whose tokenizer is exact"
        )
    if width is not None and width < len(tokens.table):
        found = f"{len(tokens.table)} ids, but logits for {width}"
        return Finding(name, "fail", found, "resize the model's embeddings, or use its own tokenizer")
    begins = [i for i in prompt[:2] if i in tokens.roles.get("bos", ())]
    if len(begins) == 2:
        remedy = "remove bos_token from the chat template, or add_bos_token from tokenizer_config.json"
        return Finding(name, "fail", f"a prompt begins with {begins[0]} {begins[1]}: two begins of text", remedy)
    ends = sorted(tokens.eos_ids)
    if tok.unlisted_ends:
        found = (
            f"the chat template ends turns with {sorted(tok.unlisted_ends)}, which generation_config.json does not name"
        )
        return Finding(name, "warn", found, "add them to its eos_token_id, or servers of other makes write on there")
    shown = ", ".join(f"{i} {tok.show(i)}" for i in ends)
    return Finding(name, "pass", f"{len(tokens.table)} ids, bytes exact; a turn ends with {shown}")


def end_of_turn(samples: Sequence[TandemSample], cap: int) -> Finding:
    """Whether responses end by themselves."""
    ended = float(np.mean([s.finish_reason == "stop" for s in samples]))
    mean = float(np.mean([len(s.response_ids) for s in samples]))
    detail = f"{ended:.0%} of {len(samples)} responses ended by themselves, {mean:.1f} tokens on average, cap {cap}"
    if ended == 0:
        remedy = "check eos_token_id in generation_config.json and the chat template, or raise sampling.max_new_tokens"
        return Finding("end of turn", "warn", detail, remedy)
    return Finding("end of turn", "pass", detail)


def reward_signal(scored: Sequence[ScoredSample], specs: Sequence[TaskSpec] = ()) -> Finding:
    """Whether some group has something to learn from. All rewards equal is a fault, with its cause (`first_look`)."""
    scored = [s for s in scored if s.reward is not None]  # `rollout` has said why others have none
    rewards, groups = [s.reward or 0.0 for s in scored], [s.sample.group_id for s in scored]
    flat = group_advantages(rewards, groups)[1]
    detail = f"reward {np.mean(rewards):.3f}; {flat:.0%} of {len(set(groups))} groups have equal rewards"
    cause = why_equal(specs, looks(scored)) if specs else None
    if cause is not None:
        return Finding("reward signal", "fail", "\n  ".join([cause.found, *cause.examples]), cause.remedy)
    if flat == 1:
        remedy = (
            "easier or harder tasks, a higher sampling.temperature, a larger train.samples_per_prompt, or --prompts"
        )
        return Finding("reward signal", "warn", detail, remedy)
    return Finding("reward signal", "pass", detail)


def agreement(name: str, ours: FloatArray, theirs: FloatArray, tolerance: Tolerance) -> Finding:
    """Log-probs [n] of the same tokens from trainer and engine, nats."""
    if not len(ours):
        return Finding(name, "skip", "no token to compare")
    distance = np.abs(ours - theirs)
    mean, high = float(distance.mean()), float(np.quantile(distance, 0.99))
    detail = f"|trainer - engine| {mean:.2g} nats on average, {high:.2g} at the 99% quantile of {len(ours)} tokens"
    if not (mean <= tolerance.mean and high <= tolerance.high):
        remedy = "check that both have the same weights, temperature and dtype, and that any truncation is replayed"
        return Finding(name, "fail", detail, remedy)
    return Finding(name, "pass", detail)


def replay_ratio(ours: FloatArray, theirs: FloatArray, tolerance: Tolerance) -> Finding:
    """Importance ratios trainer / engine [n] before any update: 1, if the trainer replays what the engine did."""
    name = "replay ratio"
    if not len(ours):
        return Finding(name, "skip", "no token to compare")
    ratio = np.exp(ours - theirs)
    mean, outside = float(ratio.mean()), float((np.abs(ratio - 1) > _OUTSIDE).mean())
    detail = f"mean {mean:.4f}; {outside:.1%} of {len(ours)} tokens outside [0.9, 1.1]"
    if not (abs(mean - 1) <= max(tolerance.mean, 0.01) and outside <= (0.01 if tolerance is FLOAT32 else 0.1)):
        remedy = "sample without top_p, top_k and min_p, or set sampling.truncation_replay (docs/objective.md)"
        return Finding(name, "fail", detail, remedy)
    return Finding(name, "pass", detail)


def kl_parity(logits: Tensor, objective: ObjectiveConfig) -> Finding:
    """The estimators on the model's own distributions [T, V], summed over the whole vocabulary, against the exact KL."""
    rows = logits[:_KL_ROWS].double()
    pi, ref = torch.log_softmax(rows, -1), torch.log_softmax(rows / 1.25, -1)
    p = pi.exp()
    exact = float((p * (pi - ref)).sum(-1).mean())
    closed = {"k1": exact, "k2": float((p * (pi - ref) ** 2).sum(-1).mean()) / 2, "k3": exact}
    found = {k: float((p * kl_estimate(pi, ref, k)).sum(-1).mean()) for k in ("k1", "k2", "k3")}
    zero = float(kl_estimate(pi, pi, objective.kl_estimator).abs().max())
    off = max(abs(found[k] - closed[k]) for k in closed)
    detail = f"k1, k2, k3 within {off:.1g} nats of the closed forms on {len(rows)} positions; 0 to itself"
    if not (off <= 1e-6 * max(1.0, exact) and zero == 0):
        return Finding("KL parity", "fail", detail, "the model's logits are not finite, or report this")
    if objective.kl_coef > 0 and objective.kl_in == "loss" and objective.kl_estimator == "k1":
        detail = "as a loss term, k1 has no expected gradient: the KL holds nothing back"
        return Finding("KL parity", "warn", detail, "set objective.kl_estimator=k2 or k3, or objective.kl_in=reward")
    return Finding("KL parity", "pass", detail)


def masking(rows: Sequence[TrainRow], log_probs: Sequence[FloatArray], config: RunConfig) -> Finding:
    """The gradient on each token's log-prob: exactly 0 where nothing is learnt, and blind to what stands there."""
    name = "masking"
    loss, gradient, idle = _loss_and_gradient(rows, log_probs, config)
    wild = [
        replace(row, old_log_probs=np.where((row.weights > 0) | (row.opd_weights > 0), row.old_log_probs, -40.0))
        for row in rows
    ]
    other_loss, other_gradient, _ = _loss_and_gradient(wild, log_probs, config)
    leak = float(gradient[idle].abs().max()) if idle.any() else 0.0
    moved = float((gradient != 0).double().mean())
    detail = f"{int(idle.sum())} of {len(gradient)} tokens carry no weight and no gradient; {moved:.0%} carry some"
    if leak > 0 or loss != other_loss or not torch.equal(gradient, other_gradient):
        return Finding(
            name, "fail", f"tokens without weight have a gradient of up to {leak:.2g}", "report this, it is our fault"
        )
    if moved == 0:
        remedy = "check that the senior writes (tandem.prob_senior) and that rewards differ within groups"
        return Finding(name, "warn", "no token carries a gradient", remedy)
    return Finding(name, "pass", detail)


def _loss_and_gradient(
    rows: Sequence[TrainRow], log_probs: Sequence[FloatArray], config: RunConfig
) -> tuple[float, Tensor, Tensor]:
    """(loss, gradient [T] on the log-probs, [T] where no weight is)."""

    def pack(parts: Sequence[FloatArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts))

    x = pack(log_probs).requires_grad_()
    batch = PackedTokens(
        old_log_probs=pack([r.old_log_probs for r in rows]),
        advantages=pack([np.full(r.response_length, r.advantage) for r in rows]),
        weights=pack([r.weights for r in rows]),
        opd_weights=pack([r.opd_weights for r in rows]),
        teacher_log_probs=pack([r.teacher_log_probs for r in rows]),
        sequences=torch.repeat_interleave(torch.tensor([r.response_length for r in rows])),
    )
    objective = config.objective.model_copy(
        update={"kl_in": "loss", "rollout_weights": "none", "lambda_jun": 0.0, "kl_coef": 0.0}
    )
    opd = OpdConfig(enabled=config.opd.enabled, coef=config.opd.coef)
    den = Denominators.over(
        [float(r.weights.sum()) for r in rows],
        sum(r.opd_share for r in rows),
        0.0,
        objective.reduction,
        objective.constant_length or config.sampling.max_new_tokens,
    )
    loss, _ = tandem_loss(x, torch.zeros_like(x), batch, den, objective, opd)
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return loss.item(), x.grad, (batch.weights == 0) & (batch.opd_weights == 0)


def padding(trainer: Trainer, responses: Sequence[Response]) -> Finding:
    """Log-probs of a response computed alone and beside a longer row: padding must change nothing."""
    name = "padding"
    short = min(responses, key=lambda r: len(r.tokens))
    filler = Response(short.tokens + short.tokens[-1:] * 16, 1)
    alone, beside = trainer.own_log_probs([short])[0], trainer.own_log_probs([short, filler])[0]
    off = float(np.abs(alone - beside).max(initial=0.0))
    detail = f"{off:.2g} nats between a response of {short.response_length} tokens alone and beside a longer one"
    if not off <= 1e-3:
        return Finding(name, "fail", detail, "the model's attention sees padding; report this with its architecture")
    return Finding(name, "pass", detail)


def senior_tokens(samples: Sequence[TandemSample], ours: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """(trainer's, engine's) log-probs of all senior-written tokens, one after the other."""
    masks = [(np.asarray(s.authorship_mask) == SENIOR) & (np.asarray(s.loss_mask) == 1) for s in samples]
    own = [values[m] for values, m in zip(ours, masks, strict=True)]
    engine = [np.asarray(s.log_probs)[m] for s, m in zip(samples, masks, strict=True)]
    return np.concatenate(own), np.concatenate(engine)


def length_reward(lengths: Sequence[FloatArray], pulls: Sequence[float], sign: int, cap: int) -> Finding:
    """`lengths`: of the same draws before and (if weights reach the engine) after training on length; `pulls`: per update,
    the sum of advantage times change of log-prob, which must be above 0; `sign` 1: longer is better, -1: shorter."""
    name, wanted = "length reward", "rise" if sign > 0 else "fall"
    wrong = sum(pull <= 0 for pull in pulls)
    remedy = "lower optimizer.lr; if it stays, report this: grouping, masking or centring is off"
    detail = f"{len(pulls)} updates on reward = {'+' if sign > 0 else '-'}min(length, {cap})"
    if wrong > len(pulls) / 3:
        return Finding(name, "fail", f"{detail}: {wrong} moved the wrong way", remedy)
    if len(lengths) < 2:
        return Finding(name, "pass", f"{detail} point the right way; length itself was not measured")
    before, after = lengths
    change = sign * (after - before)
    error = float(change.std() / np.sqrt(len(change)))
    moved = f"{detail}: {before.mean():.1f} to {after.mean():.1f} tokens"
    if change.mean() < -2 * error - 1e-9:
        return Finding(name, "fail", f"{moved}, but it should {wanted}", remedy)
    if change.mean() <= error:
        return Finding(
            name, "pass", f"{moved}: noise, the learning rate is too small to see it {wanted}; the updates point there"
        )
    return Finding(name, "pass", moved)


def all_passed(findings: Sequence[Finding]) -> bool:
    """Whether none failed; warnings and skipped probes are no failures."""
    return all(f.status != "fail" for f in findings)
