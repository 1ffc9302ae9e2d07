"""One of 1 or 4 ranks in slime's Python: by slime's functions with our hooks, loss and gradient are the local trainer's.

`test_against_slime.py` starts them: python real_loss.py RANK WORLD STORE. The whole way is slime's own, with real process
groups: conversion, partitioning, slicing, schedule, log, forward pass, micro-batches, loss function, gradient. The model is a
table of logits by the token before, of which a tensor-parallel rank holds its columns.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from megatron.core import mpu, parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from real_slime import VOCABULARY, arguments, config, manager, samples
from slime.backends.megatron_utils import actor, data, loss, model
from slime.observability import train_metric_utils

from slime_tandem.config import RunConfig
from slime_tandem.objective.loss import LOSS_METRICS
from slime_tandem.slime_hooks import hooks
from slime_tandem.slime_hooks.state import STATE, TrainerState
from slime_tandem.training.rows import build_rows
from slime_tandem.training.trainer import Trainer

N = 8
ONE, FOUR = [(1, 1, 1)], [(2, 2, 1), (1, 2, 2), (2, 1, 2)]
"""Data, context and tensor parallel."""
TWICE = "train.epochs_per_step=2"
JUNIORS = "tandem.junior_token_loss_weight=0.5"
RECOMPUTED = ["opd.enabled=false", "sampling.truncation_replay=recompute"]
CASES: list[tuple[int, list[str]]] = [
    (0, ["objective.scale_advantages=std"]),
    (0, [JUNIORS, "objective.lambda_jun=0.3"]),
    (0, ["opd.selection.selector=teachability_entropy", "opd.selection.ratio=0.5", "opd.selection.top_k=4"]),
    (0, ["objective.reduction=sequence_mean", "objective.ratio=sequence", "objective.dual_clip=3"]),
    (0, ["objective.reduction=constant", "objective.surrogate=cispo", "objective.ratio=sequence"]),
    (0, ["objective.rollout_weights=truncated"]),
    (0, ["objective.rollout_weights=masked", "objective.reduction=sequence_mean", "objective.rollout_weight_max=3.0"]),
    (0, ["objective.kl_coef=0.1", "objective.kl_target=0.5", "objective.reduction=sequence_mean"]),
    (0, [*RECOMPUTED, "sampling.top_p=0.7", "sampling.temperature=0.8"]),
    (0, [*RECOMPUTED, "sampling.top_k=5", "objective.ratio=sequence", "objective.kl_coef=0.1", JUNIORS]),
    (0, ["objective.entropy_coef=0.2", "objective.reduction=sequence_mean", "objective.kl_coef=0.1"]),
    (0, [*RECOMPUTED, "sampling.top_p=0.7", "objective.entropy_coef=0.2", "objective.kl_coef=0.1", TWICE]),
    (0, ["objective.kl_coef=0.1", "objective.kl_target=0.5", TWICE]),
    (0, ["objective.rollout_weights=truncated", TWICE]),
    (3, ["opd.signal=jsd", "opd.top_k=3"]),
    (3, ["opd.signal=reverse_kl", "opd.top_k=3", "opd.position_discount=0.9", "objective.reduction=constant"]),
    (3, ["opd.signal=forward_kl", "opd.top_k=3", "objective.lambda_jun=0.2"]),
]
KEYS = (
    "tokens", "multimodal_train_inputs", "packed_seq_params", "total_lengths", "response_lengths", "loss_masks", "log_probs",
    "ref_log_probs", "values", "advantages", "returns", "rollout_log_probs", "teacher_log_probs", "rollout_mask_sums",
)  # fmt: skip
"""What slime's train step asks of a batch (backends/megatron_utils/model.py, train_one_step)."""


def table(name: str) -> torch.Tensor:
    """Logits [V, V] by the token before: of the policy, of itself before the update, and of the start weights."""
    generator = torch.Generator().manual_seed({"now": 0, "old": 0, "start": 2}[name])
    found = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    return found if name != "old" else found + 0.2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)


class Bigram(torch.nn.Module):
    """A model for slime; its columns are those of this rank."""

    def __init__(self, name: str) -> None:
        super().__init__()
        ranks, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        self.table = torch.nn.Parameter(table(name).chunk(ranks, 1)[rank].clone())
        self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        self.model_type, self.role = None, "actor"

    def set_input_tensor(self, _: Any) -> None:
        """Megatron's schedule calls it."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.table[input_ids]


class Local:
    """The same as a policy of the local trainer, which scores with the weights from before the update."""

    device, lr = torch.device("cpu"), 0.0

    def __init__(self, now: str, scoring: str) -> None:
        self.table, self.scoring = table(now).requires_grad_(), table(scoring)

    def response_logits(self, tokens: Sequence[Sequence[int]], lengths: Sequence[int]) -> torch.Tensor:
        before = torch.tensor([t for ids, R in zip(tokens, lengths, strict=True) for t in ids[len(ids) - R - 1 : -1]])
        return (self.table if torch.is_grad_enabled() else self.scoring)[before]

    def zero_grad(self) -> None:
        """The gradients of all steps are compared together."""

    def step(self) -> float:
        return 0.0


def locally(c: RunConfig, made: list[Any]) -> tuple[dict[str, float | None], torch.Tensor, float]:
    """(metrics, gradient of the table, the KL coefficient afterwards) by the local runtime."""
    policy = Local("now", "old")
    trainer = Trainer(c, policy, Local("start", "start") if c.objective.kl_coef > 0 else None)  # type: ignore[arg-type]
    scored = [hooks._scored(s, None, c) for s in made]
    rows, _ = build_rows(scored, c, trainer.reference_log_probs([s.sample for s in scored]))
    metrics = trainer.update(rows)
    assert policy.table.grad is not None
    return metrics, policy.table.grad, trainer.kl_coef


def by_slime(args: Namespace, c: RunConfig, made: list[Any]) -> tuple[dict[str, float], torch.Tensor]:
    """(metrics as train_one_step reports them, gradient of this rank's columns) over the steps of a rollout."""
    dp, cp = mpu.get_data_parallel_world_size(), mpu.get_context_parallel_world_size()
    boxes: dict[int, Any] = {}
    ray.put = lambda value, **_: boxes.setdefault(len(boxes), value) and len(boxes) - 1
    ray.get = lambda key: dict(boxes[key])
    source = manager(args, dp, cp)
    refs = source._split_train_data_by_dp(source._convert_samples_to_train_data(made))
    box = actor.MegatronTrainRayActor._get_rollout_data(Namespace(args=args), refs)
    forward = (data.get_data_iterator(box), box["num_microbatches"])
    if c.objective.kl_coef > 0:
        box |= model.forward_only(loss.get_log_probs_and_entropy, args, [Bigram("start")], *forward, "ref_")
    if not args.use_rollout_logprobs:
        box |= model.forward_only(loss.get_log_probs_and_entropy, args, [Bigram("old")], *forward)
    loss.compute_advantages_and_returns(args, box)
    # As train_actor holds them: taken before the hook, trained after it.
    (iterator,), counts, sizes = data.get_data_iterator(box), box["num_microbatches"], box["global_batch_sizes"]
    once = sum(sizes)
    hooks.data_post_process(args, 0, box)
    assert sum(box["global_batch_sizes"]) == once, "slime's log divides by it"
    assert sum(sizes) == c.train.epochs_per_step * once
    assert all(t.dim() == 1 for t in box["teacher_log_probs"]), "slime's log averages this key as [R]"
    train_metric_utils.gather_log_data = lambda *a: None
    train_metric_utils.log_rollout_data(0, args, box)
    policy = Bigram("now")
    measured = dict.fromkeys(LOSS_METRICS, 0.0)
    for step, (micro, rollouts) in enumerate(zip(counts, sizes, strict=True)):
        hooks.before_train_step(args, 0, step, [Bigram("old")], None, None)
        logs = []
        for _ in range(micro):
            batch = data.get_batch(iterator, KEYS, args.data_pad_size_multiplier, False)
            one, _, log = loss.loss_function(args, batch, micro, rollouts, policy(batch["tokens"]))
            # Megatron divides by the micro-batches, its gradients are means over the ranks.
            (one / micro / (dp * cp)).backward()
            logs.append(log)
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        found = train_metric_utils.reduce_train_step_metrics(
            logs, calculate_per_token_loss=False, step_global_batch_size=rollouts, cp_size=cp, dp_with_cp_group=group
        )
        for name in measured:
            measured[name] += found[name] / len(counts)
    assert policy.table.grad is not None
    dist.all_reduce(policy.table.grad, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return measured, policy.table.grad


def check(k: int, overrides: list[str], steps: int) -> None:
    c = config(*overrides, f"train.updates_per_step={steps}", "train.prompts_per_step=4")
    made = samples(k, N, lists=any("selector" in o for o in overrides), juniors=True)
    metrics, gradient, coef = locally(c, made)
    args = arguments(N, steps)
    args.use_rollout_logprobs = c.objective.rollout_weights == "none"
    args.rollout_temperature, args.entropy_coef = c.sampling.temperature, c.objective.entropy_coef
    STATE.trainer = TrainerState()
    tails: list[float] = []
    hooks._report_tail = lambda _, step, value: tails.append(value)
    measured, mine = by_slime(args, c, made)
    wanted = gradient.chunk(mpu.get_tensor_model_parallel_world_size(), 1)[mpu.get_tensor_model_parallel_rank()]
    case = (overrides, steps)
    assert gradient.abs().max() > 1e-3, (case, "compares nothing")
    assert torch.allclose(mine, wanted, atol=1e-6, rtol=1e-5), (case, float((mine - wanted).abs().max()))
    for name, value in measured.items():
        expected = metrics[f"train/{name}"]
        if (name == "logprob_diff" and steps > 1) or expected is None:
            continue  # the local runtime reports the first step's; nothing was measured
        assert abs(value - expected) <= 1e-6 + 1e-6 * abs(expected), (case, name, value, expected)
    first = dist.get_rank(mpu.get_data_parallel_group(with_context_parallel=True)) == 0
    if c.objective.kl_coef > 0 and first and mpu.get_tensor_model_parallel_rank() == 0:
        assert len(tails) == steps * c.train.epochs_per_step, (case, tails)
        expected = metrics["train/kl_p95"]
        assert expected is not None
        if steps == c.train.epochs_per_step == 1:  # the local runtime has one of all updates
            assert all(abs(value - expected) <= 1e-5 * (1 + abs(expected)) for value in tails), (case, tails, expected)
    else:
        assert not tails, case
    if c.objective.kl_target is not None:
        assert coef != c.objective.kl_coef
        kept = STATE.trainer.coef
        assert kept is not None
        assert abs(kept.value - coef) <= 1e-6, (case, kept.value, coef)


def main(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for _, cp, tp in ONE if world == 1 else FOUR:
        mpu.initialize_model_parallel(tp, context_parallel_size=cp, create_gloo_process_groups=True)
        for i, (k, overrides) in enumerate(CASES):
            check(k, overrides, 1 + i % 2)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    print("all cases hold")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
