"""What slime's flags name (the table: docs/slime-reference.md). Each takes slime's objects apart and calls what exists.

Processes: generate, score_sample, reward, log_rollout, log_eval and reward_post_process run in slime's rollout manager;
advantages, data_post_process, before_train_step, loss and megatron_init in every trainer rank. slime and Megatron are imported
inside functions: this module loads without them.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError, EngineError
from slime_tandem.objective.advantages import clip_advantages, group_advantages, reward_histograms
from slime_tandem.objective.divergence import log_probs_of, log_rest_of
from slime_tandem.objective.logprobs import token_log_probs
from slime_tandem.objective.loss import Denominators, kept_by_weights, sequence_sums, tandem_loss, token_kl
from slime_tandem.objective.truncation import Group, Replay, Truncation
from slime_tandem.slime_hooks import adaptive, agreement, passes, runtime, wire
from slime_tandem.slime_hooks.adaptive import AdaptiveCoef
from slime_tandem.slime_hooks.beside import Beside
from slime_tandem.slime_hooks.healing import heal_frozen
from slime_tandem.slime_hooks.kl_tail import KlTail
from slime_tandem.slime_hooks.refused import OUR_REWARD
from slime_tandem.slime_hooks.rewarding import Judges, response_of, task_of
from slime_tandem.slime_hooks.settings import settings
from slime_tandem.slime_hooks.state import STATE, Parked
from slime_tandem.tasks.first_look import looks, why_equal
from slime_tandem.tasks.judging import Verdict, counted, require_some
from slime_tandem.team.own_code import check_extensions
from slime_tandem.team.token_bank import TokenBank
from slime_tandem.training.metrics import (
    kl_by_teacher,
    part_means,
    part_scalars,
    response_metrics,
    rewards_by_task,
    teacher_metrics,
)
from slime_tandem.training.rows import build_rows, takes_part
from slime_tandem.types import FloatArray, ScoredSample

logger = logging.getLogger(__name__)


# ---- rollout manager ----


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """`--custom-generate-function-path`: senior and junior write the response; evaluations are the senior's
    alone, by slime's own generate, and so are samples whose routes through the experts are replayed, which it asks for."""
    if evaluation or (getattr(args, "use_rollout_routing_replay", False) and not settings(args).tandem.enabled):
        from slime.rollout import sglang_rollout

        return await sglang_rollout.generate(args, sample, dict(sampling_params))
    return await _write(args, sample, sampling_params, tandem=settings(args).tandem.enabled, evaluation=False)


async def generate_with_junior(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Any:
    """`custom_generate_function_path` of an evaluation set whose responses are to be co-written."""
    return await _write(args, sample, sampling_params, tandem=True, evaluation=evaluation)


async def _write(args: Any, sample: Any, sampling_params: Mapping[str, Any], *, tandem: bool, evaluation: bool) -> Any:
    team = await runtime.current(args)
    with contextlib.nullcontext() if evaluation else _beside().writing():
        await team.write(sample, sampling_params, tandem=tandem, evaluation=evaluation)
    key = (evaluation and getattr(args, "eval_reward_key", None)) or getattr(args, "reward_key", None)
    if key and wire.failure_of(sample) is not None:
        sample.reward = {key: sample.reward}  # slime looks a sample's reward up under its key, this one's, too
    chosen = (
        getattr(sample, "custom_rm_path", None),
        getattr(args, "custom_rm_path", None),
        getattr(args, "rm_type", None),
    )
    finished = sample.status in (type(sample).Status.COMPLETED, type(sample).Status.TRUNCATED)
    if finished and sample.reward is None and not any(chosen) and not getattr(args, "group_rm", False):
        sample.reward = await reward(args, sample)
    return sample


async def reward(args: Any, sample: Any, **_: Any) -> Any:
    """`--custom-rm-path`: what the sample's task names in `tasks[].reward`, else 1.0 if the answer in the response (`<answer>`,
    else a box) is the label, else 0.0.

    What the local runtime gives (a family's own scorer apart); generate uses it where no reward is named. The task is that of
    number `metadata["spec"]`, as in the prompt files of `slime-tandem config --slime`, else the first. It is scored outside of
    the event loop, within the limits of `reward`; one past them gets 0.0 from a built-in scorer and none from the user's, and
    is counted: slime is told 0.0 of it, and it takes no part. With `--group-rm` slime gives a list of samples. With
    `--reward-key` the answer is a mapping. Raises ConfigError and DataError as a `TaskSet`, and DataError for a reward that
    failed where `reward.on_failed_sample` is stop, or where slime's own advantages would count it as 0.
    """
    judges = _judges(settings(args))
    if isinstance(sample, list):
        return await _reward_group(args, sample, judges)
    index = task_of(sample, judges.config)
    if judges.by_label(index) and sample.label is None:
        if _unasked(sample, judges):  # the 0.0 that slime is told stands for none
            wire.put_verdict(sample, Verdict(None))
        return _told(args, Verdict(0.0))
    verdict = await judges.verdict(index, response_of(sample, text_alone=judges.by_label(index)))
    return _kept(args, sample, verdict)


def _unasked(sample: Any, judges: Judges) -> bool:
    """Whether there is no reward to be found: no label to compare with, where nothing is learnt from rewards."""
    by_label = judges.by_label(task_of(sample, judges.config))
    return by_label and sample.label is None and judges.config.objective.reward_coef == 0


async def _reward_group(args: Any, samples: Sequence[Any], judges: Judges) -> list[Any]:
    """Of a whole group (`--group-rm`), in one call of a function of batches; what could not be written keeps what it has."""
    written = [s for s in samples if _unwritten(s) is None]
    indices = [task_of(s, judges.config) for s in written]
    found: dict[int, Any] = {}
    for index in dict.fromkeys(indices):
        mine = [s for s, i in zip(written, indices, strict=True) if i == index]
        if judges.judge(index).own is None:
            values = [await reward(args, s) for s in mine]
        else:
            verdicts = await judges.verdicts(index, [response_of(s, text_alone=False) for s in mine])
            values = [_kept(args, s, verdict) for s, verdict in zip(mine, verdicts, strict=True)]
        found |= {id(s): value for s, value in zip(mine, values, strict=True)}
    return [found.get(id(s), s.reward if s.reward is not None else _told(args, Verdict(0.0))) for s in samples]


def _kept(args: Any, sample: Any, verdict: Verdict) -> Any:
    wire.put_verdict(sample, verdict)
    if verdict.reward is None:
        own_advantages = getattr(args, "custom_reward_post_process_path", None) is None
        if own_advantages or settings(args).reward.on_failed_sample == "stop":
            raise DataError(
                f"reward of sample {sample.index}",
                f"none ({verdict.said})",
                "a number, as slime's own advantages would count it as 0" if own_advantages else "a number",
                "mend tasks[].reward, give it time by reward.own_timeout_s"
                + (", or name our reward_post_process, which leaves it out" if own_advantages else ""),
            )
    return _told(args, verdict)


def _told(args: Any, verdict: Verdict) -> Any:
    """What slime is told: a number, or with `--reward-key` the parts with that number under the key."""
    value = 0.0 if verdict.reward is None else verdict.reward
    keys = [key for name in ("reward_key", "eval_reward_key") if (key := getattr(args, name, None))]
    return {**verdict.parts, **dict.fromkeys(keys, value)} if keys else value


def check_rewards(args: Any, config: RunConfig) -> None:
    """Raise ConfigError for a reward of ours that would fail at its first answer; nothing where slime's own is used."""
    if getattr(args, "rm_type", None) is None and getattr(args, "custom_rm_path", None) in (None, OUR_REWARD):
        for index in range(len(config.tasks)):
            _judges(config).judge(index)


def _judges(config: RunConfig) -> Judges:
    if STATE.manager.judges is None or STATE.manager.judges.config is not config:
        STATE.manager.judges = Judges(config)
    judges: Judges = STATE.manager.judges
    return judges


async def score_sample(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """`--rollout-sample-hook-path`: the teachers score a finished training sample; nothing is asked of an aborted one."""
    status = type(sample).Status
    if not settings(args).opd.enabled or sample.status not in (status.COMPLETED, status.TRUNCATED):
        return
    if evaluation and not _unasked(sample, _judges(settings(args))):  # without a reward the teachers are the evaluation
        return
    team = await runtime.current(args)
    with contextlib.nullcontext() if evaluation else _beside().scoring():
        await team.score(sample)


def _beside() -> Beside:
    if STATE.manager.beside is None:
        STATE.manager.beside = Beside()
    count: Beside = STATE.manager.beside
    return count


def log_rollout(
    rollout_id: int, args: Any, samples: Sequence[Any], rollout_extra_metrics: Any, rollout_time: float
) -> bool:
    """`--custom-rollout-log-function-path`: our metrics of a rollout (docs/metrics.md); False: slime logs its own, too."""
    args.logged_rollout_id = rollout_id  # for slime's contract tests; reward_post_process names it in our log, too
    heal_frozen(args)
    _leave_out(args, samples)  # slime's own log looks at every sample's reward
    written = [s for s in samples if wire.RECORD in (s.metadata or {}) and _unwritten(s) is None]
    if written:
        config = settings(args)
        require_some([wire.verdict_of(s) for s in written], config.reward.on_failed_sample, f"rollout {rollout_id}")
        scored = [_scored(s, args, config) for s in written]
        ends, markers = wire.ends_of(written), wire.markers_of(written)
        by_task = {
            f"rollout/reward_by_task/{row['task']}": row["mean"] for row in reward_histograms(*rewards_by_task(scored))
        }
        metrics = {**response_metrics(scored), "rollout/text_markers": markers, **teacher_metrics(scored, ends)}
        metrics |= kl_by_teacher(scored)
        metrics |= part_scalars("rollout", part_means(scored)) | runtime.take_heartbeats()
        metrics |= _beside().take() if config.opd.enabled else {}
        _report(args, rollout_id, {**metrics, **_past_limits(written), **by_task})
        if rollout_id == 0 and config.objective.reward_coef > 0:
            _warn_if_equal(args, config, scored)
    return False


def _warn_if_equal(args: Any, config: RunConfig, scored: Sequence[ScoredSample]) -> None:
    named = getattr(args, "custom_rm_path", None) or getattr(args, "rm_type", None)
    cause = why_equal(config.tasks, looks(scored), None if named == OUR_REWARD else named)
    if cause is not None:
        logger.warning(cause.warning)


def log_eval(rollout_id: int, args: Any, data: Mapping[str, Any], extra_metrics: Any) -> bool:
    """`--custom-eval-rollout-log-function-path`: who wrote what in co-written evaluation sets; slime logs their rewards."""
    args.logged_eval_rollout_id = rollout_id  # for slime's contract tests alone, which ask whether the hook ran
    for name, found in data.items():
        written = [s for s in found.get("samples") or () if wire.RECORD in (s.metadata or {}) and _unwritten(s) is None]
        if any(failed := [wire.UNREWARDED in (s.metadata or {}) for s in found.get("samples") or ()]):
            where = f"evaluation at rollout {rollout_id}, set {name}"
            require_some([wire.verdict_of(s) for s in found["samples"]], "mask", where)
            if not getattr(args, "log_passrate", False):  # which takes groups of one size
                # slime's mean is over these: one without a reward is no 0
                found["rewards"][:] = [r for r, f in zip(found["rewards"], failed, strict=True) if not f]
        if any(wire.UNREWARDED not in s.metadata for s in written):
            scored = [_scored(s, args, settings(args)) for s in written]
            metrics = {**response_metrics(scored), **_past_limits(written)}
            if any(s.teacher is not None for s in scored):
                metrics |= teacher_metrics(scored, wire.ends_of(written)) | kl_by_teacher(scored)
            metrics |= {k.removeprefix("rollout/"): v for k, v in part_scalars("rollout", part_means(scored)).items()}
            _report(args, rollout_id, {f"eval/{name}/{k}": v for k, v in metrics.items()}, step_key="eval/step")
    # Where no prompt has a reward, slime's own log would show its 0.0 as one.
    samples = [s for found in data.values() for s in found.get("samples") or ()]
    return bool(samples) and all(wire.verdict_of(s).unasked for s in samples)


def reward_post_process(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`: (raw rewards, advantages), group-relative; fills each sample's channels.

    The OPD mask is chosen over all samples at once. A sample that failed (an aborted or empty one, too) or is dropped takes no
    part; slime removes it. Samples without log-probs get their advantages alone. Groups are slime's, and those of one prompt
    where slime names none. Raises EngineError for a failed sample where `sampling.on_failed_sample` is stop, and DataError for
    a reward that is none and for a sample of no group and no prompt.
    """
    config = settings(args)
    _leave_out(args, samples)
    raw = [_reward_of(s, args) for s in samples]
    written = [s for s in samples if _unwritten(s) is None]
    where = f"rollout {getattr(args, 'logged_rollout_id', '?')}"
    require_some([wire.verdict_of(s) for s in written], config.reward.on_failed_sample, where)
    groups = wire.groups_of(written)
    if (
        all(s.rollout_log_probs is None for s in written) and written
    ):  # nothing to carry: a trainer with our loss will say so
        o = config.objective
        rewarded = [(s, g) for s, g in zip(written, groups, strict=True) if not _unrewarded(s)]
        rewards = [_reward_of(s, args) for s, _ in rewarded]
        values, _ = group_advantages(rewards, [g for _, g in rewarded], o.scale_advantages, o.baseline)
        clipped = clip_advantages(values, o.clip_advantages)[0].tolist()
        of = {id(s): value for (s, _), value in zip(rewarded, clipped, strict=True)}
        for s in samples:
            if id(s) not in of:
                s.remove_sample, s.rollout_log_probs = True, None  # slime looks at the first sample's alone
        return raw, [of.get(id(s), 0.0) for s in samples]
    scored = [
        replace(about, sample=replace(about.sample, group_id=group))
        for about, group in zip((_scored(s, args, config) for s in written), groups, strict=True)
    ]
    rollout_id = getattr(args, "logged_rollout_id", None)
    bank, ends = TokenBank.of(config), wire.ends_of(written)
    rows, metrics = build_rows(scored, config, bank=bank, rollout_id=rollout_id, eos_ids=ends)
    kept = [s for s, about in zip(written, scored, strict=True) if takes_part(about, config.opd)]
    width, advantages = wire.width_of(rows), dict.fromkeys(range(len(samples)), 0.0)
    place = {id(s): i for i, s in enumerate(samples)}
    for s in samples:
        setattr(s, wire.CARRIER, torch.zeros(s.response_length, wire.FIXED + 2 * width))
        s.remove_sample = True
    for s, row in zip(kept, rows, strict=True):
        assert tuple(s.tokens) == row.tokens, "rows come in the order of the samples"
        advantages[place[id(s)]] = row.advantage
        setattr(s, wire.CARRIER, wire.pack(row, width, config))
        pulled = np.zeros(len(row.weights)) if row.junior_weights is None else row.junior_weights
        s.loss_mask = ((row.weights > 0) | (row.opd_weights > 0) | (pulled > 0)).astype(int).tolist()
        s.remove_sample = False
    for s in samples:
        # As float32, so that the trainer can compare the two fields token for token.
        s.rollout_log_probs = getattr(s, wire.CARRIER)[:, wire.OLD].tolist()
    total = wire.checksum([getattr(s, wire.CARRIER) for s in samples], [s.index for s in samples])
    logger.info(f"slime_tandem channels sent {rollout_id}: samples {len(samples)} check-sum {total:016x}")
    metrics["rollout/failed_samples"] = float(len(samples) - len(written))
    _report(args, rollout_id, metrics)
    return raw, list(advantages.values())


def _unwritten(sample: Any) -> str | None:
    """Why a sample holds no response to train on; None for one that does."""
    status = type(sample).Status
    if (reason := wire.failure_of(sample)) is not None:
        return reason
    if sample.status in (status.ABORTED, status.FAILED):
        return f"the engine left it {sample.status.value}"
    return None if sample.response_length else "an empty response"


def _leave_out(args: Any, samples: Sequence[Any]) -> None:
    """Make failures of aborted, failed and empty samples, and give them a reward where slime looks for one.

    Raises EngineError, with the first one's reason, where `sampling.on_failed_sample` is stop.
    """
    failed = [(s, reason) for s in samples if wire.failure_of(s) is None and (reason := _unwritten(s)) is not None]
    if failed and settings(args).sampling.on_failed_sample == "stop":
        sample, reason = failed[0]
        raise EngineError(
            "samples that could not be written",
            f"{len(failed)} of {len(samples)}",
            "none, or some with sampling.on_failed_sample=drop_sample",
            "mend what the first one says",
            f"sample {sample.index}: {reason}",
        )
    for sample, reason in failed:
        key = getattr(args, "reward_key", None)
        prompt = sample.tokens[: len(sample.tokens) - sample.response_length] or [0]
        wire.put_failure(sample, reason, prompt, prompt[-1])
        if key:
            sample.reward = {key: sample.reward}


def _reward_of(sample: Any, args: Any) -> float:
    key = getattr(args, "reward_key", None)
    try:
        value = float(sample.reward[key] if key else sample.reward)
    except (TypeError, ValueError, KeyError, IndexError):
        value = math.nan
    if not math.isfinite(value):
        expected = "a finite number" + (f" under {key!r}" if key else "")
        raise DataError(f"reward of sample {sample.index}", sample.reward, expected, "mend the reward function")
    return value


def _past_limits(samples: Sequence[Any]) -> dict[str, float]:
    return counted([wire.verdict_of(s) for s in samples])


def _unrewarded(sample: Any) -> bool:
    """Whether the user's reward failed: the 0.0 that slime sees is none."""
    return wire.UNREWARDED in (sample.metadata or {})


def _scored(sample: Any, args: Any, config: RunConfig) -> ScoredSample:
    teacher, error = wire.scores_of(sample)
    value = 0.0 if sample.reward is None else _reward_of(sample, args)
    unasked = wire.verdict_of(sample).unasked
    reward = None if unasked or _unrewarded(sample) else value
    parts = {} if reward is None else wire.parts_of(sample)
    return ScoredSample(wire.response_of(sample, config.seed), reward, teacher, error, parts, unasked)


def _report(
    args: Any, rollout_id: int | None, metrics: Mapping[str, float | None], step_key: str = "rollout/step"
) -> None:
    """Log what was measured where slime's own metrics go; a name without a value is left out there, as in slime."""
    known = {name: value for name, value in metrics.items() if value is not None}
    logger.info(f"slime_tandem {rollout_id}: {known}")
    if rollout_id is None or not hasattr(args, "use_wandb"):
        return
    from slime.observability import logging_utils
    from slime.observability.metric_utils import compute_rollout_step

    logging_utils.log(args, {**known, step_key: compute_rollout_step(args, rollout_id)}, step_key=step_key)


# ---- trainer ----


def megatron_init(args: Any) -> None:
    """`--custom-megatron-init-path`: check the settings on every trainer rank, before a model is built; log what runs."""
    import megatron.core
    import numpy

    config = settings(args)
    check_extensions(config)
    check_rewards(args, config)
    versions = {"torch": torch.__version__, "megatron.core": megatron.core.__version__, "numpy": numpy.__version__}
    logger.info(f"slime_tandem trainer: {versions}, opd.signal {config.opd.signal if config.opd.enabled else 'none'}")


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """`--custom-advantage-function-path`: take the channels out of their key and put the advantages into slime's.

    slime averages `teacher_log_probs` as [R] for its log; it gets the teacher's own back until training starts.
    """
    channels = wire.carried(rollout_data)
    logger.info(f"slime_tandem channels received: {_received(channels, rollout_data)}")
    nats = None if STATE.trainer.agreement is None else STATE.trainer.agreement.verdict()
    if said := agreement.warning(nats or 0.0):
        logger.warning(f"slime_tandem: {said}")
    config = settings(args)
    if (before := STATE.trainer.parked) is not None and before.channels is not None:
        passes.check_taken(before.steps, len(before.weighted), config.train.epochs_per_step)
    if config.objective.rollout_weights == "masked":
        channels = _bounded(channels, rollout_data["log_probs"], config)
    STATE.trainer.parked = Parked(rollout_data, channels)
    rewards = rollout_data["rewards"]
    rollout_data["advantages"] = [torch.full_like(c[:, 0], r) for c, r in zip(channels, rewards, strict=True)]
    rollout_data["returns"] = list(rollout_data["advantages"])
    rollout_data[wire.CARRIER] = [c[:, wire.TEACHER].contiguous() for c in channels]


def _bounded(channels: Sequence[Tensor], log_probs: Sequence[Tensor], config: RunConfig) -> list[Tensor]:
    """Channels without the weights that `objective.rollout_weights=masked` takes, as `Trainer` takes them from its rows."""
    whole, numbers = torch.cat(list(channels)), _numbered(channels)
    used = (whole[:, wire.WEIGHT] > 0) | (whole[:, wire.OPD_WEIGHT] > 0)
    own = torch.cat(list(log_probs)).to(whole.device)
    keep = kept_by_weights(own, whole[:, wire.OLD], used, config.objective)
    logger.info(f"slime_tandem rollout weights: {int((used & ~keep).sum())} of {int(used.sum())} tokens left out here")
    columns = [wire.WEIGHT, wire.OPD_WEIGHT]
    whole[:, columns] *= keep[:, None]
    if config.opd.selection.denominator != "valid":
        whole[:, wire.OPD_SHARE] = whole[:, wire.OPD_WEIGHT]
    if config.objective.reduction == "token_mean":
        whole[:, wire.SHARE] = whole[:, wire.WEIGHT]
    elif config.objective.reduction == "sequence_mean":
        sums = _sums(len(channels), whole[:, wire.WEIGHT], numbers).clamp(min=1e-8)
        whole[:, wire.SHARE] = whole[:, wire.WEIGHT] / sums[numbers]
    return list(torch.split(whole, [len(c) for c in channels]))


def _received(channels: Sequence[Tensor], rollout_data: Mapping[str, Any]) -> str:
    """The check-sum over all ranks, to be compared with the one that the rollout manager logged, and this rank's memory.

    The memory is what tensors have taken at most since the process began, in bytes: of the steps before this rollout's.
    `retries`: how often the allocator found the card full and gave its cache back, which makes steps several times as long.
    """
    from megatron.core import mpu

    mine = wire.checksum(channels, rollout_data["sample_indices"])
    group = mpu.get_data_parallel_group_gloo(with_context_parallel=True)
    sums: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(sums, (mine, sum(len(c) for c in channels)), group=group)
    total = sum(s for s, _ in sums) % 2**64
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0
    return (
        f"tokens {sum(n for _, n in sums)} check-sum {total:016x} peak {torch.cuda.max_memory_allocated()} bytes, "
        f"{retries} retries"
    )


def data_post_process(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """`--rollout-data-postprocess-path`: scale the weights of each optimizer step by its totals over all ranks."""
    args.rollout_data_postprocess_called = True  # for slime's contract tests alone, which ask whether the hook ran
    parked = STATE.trainer.parked
    if rollout_data:  # slime's contract tests give none; else on every pipeline stage, all take the same steps
        passes.repeat(rollout_data, settings(args).train.epochs_per_step)
    if parked is None or parked.rollout_data is not rollout_data or parked.channels is None:
        # A pipeline stage without the loss, or a rollout without our advantages.
        STATE.trainer.parked = Parked(rollout_data)
        if rollout_data and not _has_the_loss():
            logger.info(f"slime_tandem channels received: {_received(wire.carried(rollout_data), rollout_data)}")
        return
    channels = parked.channels
    ends = torch.tensor(rollout_data["num_microbatches"]).cumsum(0).tolist()
    batches, at = rollout_data["micro_batch_indices"], 0
    for end, rollouts in zip(ends, rollout_data["global_batch_sizes"], strict=True):
        mine = [i for part in batches[at:end] for i in part]
        at = end
        totals = _totals([channels[i] for i in mine], rollouts)
        parked.weighted.append(totals.pg > 0)
        for i in mine:
            channels[i] = wire.normalise(channels[i], totals, settings(args).objective.reduction)


def _has_the_loss() -> bool:
    """Whether this rank is of the pipeline's last stage."""
    from megatron.core import mpu

    return bool(mpu.is_pipeline_last_stage())


def _totals(channels: Sequence[Tensor], rollouts: int) -> wire.StepTotals:
    from megatron.core import mpu

    group = mpu.get_data_parallel_group_gloo(with_context_parallel=True)
    names = wire.StepTotals.COLUMNS
    columns = [c[:, list(names)].double().sum(0).cpu() for c in channels]
    sums = torch.stack(columns).sum(0) if columns else torch.zeros(len(names), dtype=torch.float64)
    torch.distributed.all_reduce(sums, group=group)
    pg, opd, share, junior = sums.tolist()
    return wire.StepTotals(pg, opd, share, junior, rollouts)


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """`--custom-megatron-before-train-step-hook-path`: put the channels back under their key, for the loss.

    Where sampling was truncated, the old policy is found here, by a forward pass before the rollout's first step.
    """
    parked = STATE.trainer.parked
    if parked is None:
        return
    data, config = parked.rollout_data, settings(args)
    if config.sampling.truncates and step_id == 0:
        from slime.backends.megatron_utils.data import get_data_iterator
        from slime.backends.megatron_utils.model import forward_only

        found = forward_only(_both_log_probs, args, model, get_data_iterator(data), data["num_microbatches"])
        if parked.channels is not None:
            for c, full, kept in zip(parked.channels, found["full"], found["kept"], strict=True):
                c[:, wire.OLD] = torch.where(c[:, wire.JUNIOR] > 0, full, kept)
    if parked.channels is None:
        return
    data[wire.CARRIER] = parked.channels
    parked.steps += 1
    if config.objective.kl_target is not None:
        _start_adaptive_step(args, rollout_id, step_id, config, parked)
    if config.objective.kl_coef > 0:
        if STATE.trainer.tail is None:
            STATE.trainer.tail = KlTail(_on_first_rank, partial(_report_tail, args))
        counts = data["num_microbatches"]
        step = rollout_id * len(counts) * config.train.epochs_per_step + step_id
        STATE.trainer.tail.start_step(step, counts[step_id % len(counts)])


def _on_first_rank(values: FloatArray) -> list[FloatArray] | None:
    """Those of all ranks that have tokens of their own, on the rank that slime logs from; None on the others."""
    from megatron.core import mpu

    if mpu.get_tensor_model_parallel_rank() != 0:
        return None  # it has the same tokens as rank 0
    group = mpu.get_data_parallel_group_gloo(with_context_parallel=True)
    ranks = torch.distributed.get_process_group_ranks(group)
    mine = torch.distributed.get_rank() == ranks[0]
    found: list[Any] | None = [None] * len(ranks) if mine else None
    torch.distributed.gather_object(values.astype(np.float32), found, dst=ranks[0], group=group)
    return found


def _report_tail(args: Any, step: int, value: float) -> None:
    logger.info(f"slime_tandem step {step}: train/kl_p95 {value:.6g}")
    if hasattr(args, "use_wandb"):
        from slime.observability import logging_utils

        logging_utils.log(args, {"train/kl_p95": value, "train/step": step}, step_key="train/step")


def _start_adaptive_step(args: Any, rollout_id: int, step_id: int, config: RunConfig, parked: Parked) -> None:
    from megatron.core import mpu

    if (coef := STATE.trainer.coef) is None:
        of_data = mpu.get_data_parallel_rank(with_context_parallel=True)
        first = of_data == 0 and mpu.get_tensor_model_parallel_rank() == 0
        save, load = (None if not (path := getattr(args, name, None)) else Path(path) for name in ("save", "load"))
        keep = save / adaptive.FILE if first and save is not None else None
        coef = STATE.trainer.coef = AdaptiveCoef(config.objective, _over_ranks, keep, first)
        if rollout_id > 0:
            coef.restore(adaptive.kept_coef(load, rollout_id - 1))
    data, of_pass = parked.rollout_data, len(parked.weighted)
    at, last = step_id % of_pass, step_id == of_pass * config.train.epochs_per_step - 1
    batches, rollouts = data["num_microbatches"][at], data["global_batch_sizes"][at]
    coef.start_step(rollout_id, batches, rollouts, last=last, weighted=parked.weighted[at])


def _response_rows(logits: Tensor, where: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(logits [T, V/tp] of this rank's response tokens, as the model gave them, and these tokens [T]).

    slime is asked where they are, by numbers in the place of logits: its slices of logits themselves would each hold a gradient
    of the whole micro-batch.
    """
    from slime.backends.megatron_utils.loss import get_responses

    numbers = torch.arange(logits.shape[1], dtype=torch.float32, device=logits.device)
    found = list(get_responses(numbers[None, :, None], apply_temperature=False, **where))
    places = torch.cat([chunk for chunk, _ in found])[:, 0].long()
    return logits[0].index_select(0, places), torch.cat([tokens for _, tokens in found])


def _both_log_probs(
    logits: Tensor, *, args: Any, with_entropy: bool = False, **lengths: Any
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """What slime's `forward_only` collects of each sample [r]: log-probs of the `full` distribution and of what truncation
    `kept`, nats."""
    sampling = settings(args).sampling
    rows, tokens = _response_rows(logits, {"args": args, **lengths})
    cut, group = Replay(Truncation(sampling.top_k, sampling.top_p, sampling.min_p)), _vocabulary_group()
    found = {
        name: token_log_probs(rows, tokens, sampling.temperature, replay=replay, group=group)[0]
        for name, replay in (("full", None), ("kept", cut))
    }
    return logits.new_empty(0), {name: list(torch.split(values, _sizes(lengths))) for name, values in found.items()}


def _sizes(lengths: Mapping[str, Any]) -> list[int]:
    """Response tokens of each sample on this rank."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    pairs = zip(lengths["total_lengths"], lengths["response_lengths"], strict=True)
    return [len(slice_log_prob_with_cp(torch.empty(R), T, R)) for T, R in pairs]


def _over_ranks(value: float) -> float:
    """The sum over all ranks that have tokens of their own (data and context parallel)."""
    from megatron.core import mpu

    total = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group_gloo(with_context_parallel=True))
    return float(total)


def loss(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """`--custom-loss-function-path`: the loss of the local runtime (objective/loss.py) on one micro-batch.

    `logits` [1, T, V/tp]. The weights are scaled already, so that slime's own sums make means of them; every metric likewise.
    """
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    config = settings(args)
    parts = batch[wire.CARRIER]
    if parts is None or any(c.dim() != 2 for c in parts):
        remedy = "add --custom-megatron-before-train-step-hook-path slime_tandem.slime_hooks.hooks.before_train_step"
        raise DataError(f"batch[{wire.CARRIER!r}]", "no channels", "our channels [R, C]", remedy)
    channels = torch.cat(parts)
    where = {
        "args": args,
        "unconcat_tokens": batch["unconcat_tokens"],
        "total_lengths": batch["total_lengths"],
        "response_lengths": batch["response_lengths"],
    }
    sampling, shards = config.sampling, _vocabulary_group()
    rows = tokens = channels[:0]
    if sampling.truncates or channels.shape[1] > wire.FIXED:
        rows, tokens = _response_rows(logits, where)
    if sampling.truncates:
        cut = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
        replay = Replay(cut, channels[:, wire.JUNIOR] == 0)
        with_bonus = config.objective.entropy_coef > 0
        log_probs, entropy = token_log_probs(
            rows, tokens, sampling.temperature, replay=replay, group=shards, entropy_grad=with_bonus
        )
    else:
        # The entropy has a gradient where --entropy-coef is not 0: objective.entropy_coef is that flag.
        _, found = get_log_probs_and_entropy(logits, with_entropy=True, **where)
        log_probs, entropy = torch.cat(found["log_probs"]), torch.cat(found["entropy"])
    reference = torch.cat(batch["ref_log_probs"]) if batch.get("ref_log_probs") else None
    packed = wire.packed_tokens(channels, torch.cat(batch["advantages"]), reference, config.objective)
    packed = replace(packed, sequences=_numbered(parts))
    if config.objective.rollout_weights != "none":  # slime computed these before the first step of the rollout
        packed = replace(packed, old_log_probs=torch.cat(batch["log_probs"]), rollout_log_probs=packed.old_log_probs)
    if (parked := STATE.trainer.parked) is not None and parked.steps == 1 and not sampling.truncates:
        if STATE.trainer.agreement is None:
            STATE.trainer.agreement = agreement.Agreement()
        counted = (channels[:, wire.JUNIOR] == 0) & (channels[:, wire.WEIGHT] > 0)
        STATE.trainer.agreement.add(log_probs, channels[:, wire.OLD], counted)
    candidates = rest = None
    if packed.candidate_ids is not None:
        candidates, rest = (
            f(rows, packed.candidate_ids, sampling.temperature, shards) for f in (log_probs_of, log_rest_of)
        )
    coef = STATE.trainer.coef
    value, metrics = tandem_loss(
        log_probs,
        entropy,
        packed,
        Denominators(1.0, 1.0, 1.0),
        config.objective,
        config.opd,
        candidates,
        rest,
        kl_coef=None if coef is None else coef.value,
        sums=partial(_sums, len(parts)),
    )
    if coef is not None:
        coef.after_micro_batch(metrics["kl"])
    if (tail := STATE.trainer.tail) is not None and packed.ref_log_probs is not None:
        kl = token_kl(log_probs.detach(), packed, config.objective)[packed.weights > 0]
        tail.after_micro_batch(batch, kl.double().cpu().numpy())
    return value, dict(metrics)


def _numbered(parts: Sequence[Tensor]) -> Tensor:
    """[T] int64: which sample of the micro-batch each token belongs to; the same numbers on every context-parallel rank."""
    lengths = torch.tensor([len(c) for c in parts], device=parts[0].device)
    return torch.arange(len(parts), device=lengths.device).repeat_interleave(lengths)


def _sums(count: int, values: Tensor, sequences: Tensor) -> Tensor:
    """Sums [count] per response, over all context-parallel ranks, which hold parts of the same responses."""
    from megatron.core import mpu

    found = sequence_sums(values, sequences, count)
    if mpu.get_context_parallel_world_size() > 1:
        torch.distributed.all_reduce(found, group=mpu.get_context_parallel_group())
    return found


def _vocabulary_group() -> Group:
    """The ranks that hold parts of the vocabulary; None where it is whole."""
    from megatron.core import mpu

    return mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None
