"""Run by test_against_slime.py in slime's Python: what slime and Megatron really do with what our hooks give them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from megatron.core import mpu, parallel_state
from slime.backends.megatron_utils import actor, cp_utils, data, loss
from slime.observability import train_metric_utils
from slime.ray import rollout
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.types import Sample

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError, TeacherScoreError
from slime_tandem.objective.logprobs import token_log_probs
from slime_tandem.objective.loss import LOSS_METRICS, Denominators, tandem_loss
from slime_tandem.slime_hooks import healing, hooks, settings, wire
from slime_tandem.slime_hooks.state import STATE
from slime_tandem.training.rows import TrainRow, build_rows
from slime_tandem.training.trainer import Trainer
from slime_tandem.types import AlignedScores, Candidates, TopLists

VOCABULARY = 40
HOOKS = "slime_tandem.slime_hooks.hooks"


@pytest.fixture(scope="session", autouse=True)
def _world() -> Any:
    """Megatron's parallel state for one process, over gloo."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mpu.initialize_model_parallel(create_gloo_process_groups=True)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config(*overrides: str) -> RunConfig:
    made = RunConfig.load(overrides=["objective.clip_high=0.2", *overrides])
    settings.use(settings.ANY, made)
    return made


def samples(k: int = 0, n: int = 6, lists: bool = False, juniors: bool = False) -> list[Sample]:
    """Responses of 1 to 9 tokens in groups of two, with authors, teacher scores and perhaps candidates.

    Without `juniors` what is not the senior's was inserted, by nobody.
    """
    rng = np.random.default_rng(3)
    out = []
    for i in range(n):
        R, P = int(rng.integers(1, 10)), int(rng.integers(1, 5))
        authors = rng.integers(0, 2, R).tolist()
        tokens = rng.integers(0, VOCABULARY, P + R).tolist()
        sample = Sample(
            index=i + 10, group_index=i // 2, tokens=tokens, response_length=R, reward=float(i % 3), prompt="p",
            loss_mask=authors, rollout_log_probs=(-rng.random(R) * 3).tolist(), status=Sample.Status.COMPLETED,
        )  # fmt: skip
        if juniors:
            response = wire.response_of(sample)
            seniors = tuple(v if a else v - 0.4 for a, v in zip(authors, response.log_probs, strict=True))
            wire.put_response(sample, replace(response, inserted=(), senior_log_probs=seniors), junior_weight=0.0)
        mask = rng.random(R) < 0.8
        candidates = top = None
        if k:
            ids = np.stack([rng.permutation(VOCABULARY)[:k] for _ in range(R)])
            ids[:, -1] = np.where(rng.random(R) < 0.5, -1, ids[:, -1])
            candidates = Candidates(ids, np.log(np.full((R, k), 0.9 / k)), np.zeros((R, k)))
        if lists:
            ids = np.stack([rng.permutation(VOCABULARY)[:4] for _ in range(R)])
            mine = np.log(rng.dirichlet(np.ones(4), R) * 0.9)
            top = TopLists(ids, mine, ids, np.log(rng.dirichlet(np.ones(4), R) * 0.9), mine, mine)
        scores = AlignedScores(
            np.where(mask, -rng.random(R) * 3, 0.0),
            mask,
            {"boundary": int((~mask).sum())},
            candidates=candidates,
            lists=top,
        )
        wire.put_scores(sample, scores)
        out.append(sample)
    return out


def manager(args: Namespace, dp: int, cp: int) -> Any:
    """slime's rollout manager, without its actors: conversion and partitioning are its own functions."""
    cls = rollout.RolloutManager.__ray_metadata__.modified_class
    made = object.__new__(cls)
    made.args = args
    made.custom_reward_post_process_func = hooks.reward_post_process
    made.custom_convert_samples_to_train_data_func = None
    parallel = {"dp_size": dp, "cp_size": cp, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    made.train_parallel_config = parallel
    return made


def arguments(n: int = 6, steps: int = 1) -> Namespace:
    return Namespace(
        reward_key=None, global_batch_size=n // steps, use_dynamic_batch_size=True, max_tokens_per_gpu=24,
        micro_batch_size=None, balance_data=False, balance_by_flops=False, rollout_top_p=1.0, rollout_temperature=1.0,
        log_probs_chunk_size=-1, allgather_cp=False, entropy_coef=0.0, calculate_per_token_loss=False,
        recompute_loss_function=False, loss_type="custom_loss", custom_loss_function_path=f"{HOOKS}.loss",
        custom_advantage_function_path=f"{HOOKS}.advantages", use_rollout_logprobs=True, kl_coef=0.0, use_opd=False,
        normalize_advantages=False, advantage_estimator="grpo", qkv_format="thd", log_multi_turn=False, log_passrate=False,
        log_correct_samples=False, use_wandb=False, use_tensorboard=False, ci_test=False, n_samples_per_prompt=2,
        rollout_batch_size=n // 2, wandb_always_use_train_step=False, data_pad_size_multiplier=8, seq_length=64,
        custom_megatron_before_log_prob_hook_path=None, use_rollout_entropy=False, save=None, load=None, kl_loss_type="k3",
    )  # fmt: skip


def shipped(
    monkeypatch: pytest.MonkeyPatch, args: Namespace, made: list[Sample], dp: int, cp: int
) -> list[dict[str, Any]]:
    """What each of dp x cp trainer ranks holds, by slime's own conversion, partitioning and slicing."""
    boxes: dict[int, Any] = {}
    monkeypatch.setattr(ray, "put", lambda value, **_: boxes.setdefault(len(boxes), value) and len(boxes) - 1)
    monkeypatch.setattr(ray, "get", lambda key: dict(boxes[key]))
    source = manager(args, dp, cp)
    refs = source._split_train_data_by_dp(source._convert_samples_to_train_data(made))
    out = []
    for d in range(dp):
        for c in range(cp):
            place(monkeypatch, dp, d, cp, c)
            box = actor.MegatronTrainRayActor._get_rollout_data(Namespace(args=args), refs)
            out.append(box)
    return out


def place(monkeypatch: pytest.MonkeyPatch, dp: int, d: int, cp: int, c: int) -> None:
    monkeypatch.setattr(mpu, "get_context_parallel_world_size", lambda: cp)
    monkeypatch.setattr(mpu, "get_context_parallel_rank", lambda: c)

    def size(with_context_parallel: bool = False) -> int:
        return dp * cp if with_context_parallel else dp

    monkeypatch.setattr(mpu, "get_data_parallel_world_size", size)
    monkeypatch.setattr(mpu, "get_data_parallel_rank", lambda with_context_parallel=False: d)


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("k", [0, 3])
def test_fields_carry_every_channel_through_conversion_partitioning_and_slicing(
    monkeypatch: pytest.MonkeyPatch, dp: int, cp: int, k: int, caplog: pytest.LogCaptureFixture
) -> None:
    config(*(["opd.signal=reverse_kl", f"opd.top_k={k}"] if k else []))
    made = samples(k)
    ranks = shipped(monkeypatch, arguments(), made, dp, cp)
    sent = {s.index: s.teacher_log_probs for s in made}
    whole = wire.checksum(list(sent.values()), list(sent))
    total = 0
    for i, box in enumerate(ranks):
        place(monkeypatch, dp, i // cp, cp, i % cp)
        channels = wire.carried(box)
        total += wire.checksum(channels, box["sample_indices"])
        for c, index, T, R in zip(
            channels, box["sample_indices"], box["total_lengths"], box["response_lengths"], strict=True
        ):
            assert torch.equal(c, cp_utils.slice_log_prob_with_cp(sent[index], T, R).float())
    assert total % 2**64 == whole
    assert sum(len(c) for box in ranks for c in box[wire.CARRIER]) == sum(s.response_length for s in made)


def test_fields_normalise_rewards_as_slime_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group means are slime's own; with `std` we divide by the population's, slime by the sample's."""
    settings.use(settings.ANY, RunConfig.load(overrides=["opd.enabled=false"]))
    made = samples()
    args = Namespace(
        **{**vars(arguments()), "rewards_normalization": True, "grpo_std_normalization": False}, custom_reward=None
    )
    source = manager(args, 1, 1)
    raw, ours = source._post_process_rewards(made)
    source.custom_reward_post_process_func = None
    theirs_raw, theirs = source._post_process_rewards(made)
    assert raw == theirs_raw
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("group_rm", [False, True])
def test_fields_of_a_reward_of_ones_own_come_from_slimes_own_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, group_rm: bool
) -> None:
    """`async_rm` and `batched_async_rm` call our reward; its parts reach slime's log, and what failed no trainer."""
    (tmp_path / "real_rewards.py").write_text(
        "def parts(text, label):\n"
        "    if text == '3': raise RuntimeError('three')\n"
        "    return {'correct': float(text == label), 'size': len(text)}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = RunConfig.load(overrides=["objective.clip_high=0.2", "opd.enabled=false"]).model_dump()
    weights = {"correct": 1.0, "size": 0.5}
    tree["tasks"] = [{"family": "chain_sum", "reward": "real_rewards:parts", "reward_weights": weights}]
    settings.use(settings.ANY, RunConfig.from_mapping(tree))
    args = Namespace(
        **vars(arguments()), custom_rm_path=f"{HOOKS}.reward", group_rm=group_rm, eval_reward_key=None, rm_type=None,
        custom_reward_post_process_path=f"{HOOKS}.reward_post_process",
    )  # fmt: skip
    made = samples()
    for i, sample in enumerate(made):
        sample.response, sample.label, sample.reward, sample.metadata = str(i), str(i // 2 * 2), None, {"spec": 0}

    async def rewarded() -> list[Any]:
        if group_rm:
            groups = [await batched_async_rm(args, made[i : i + 2]) for i in range(0, len(made), 2)]
            return [value for group in groups for value in group]
        return list(await asyncio.gather(*(async_rm(args, sample) for sample in made)))

    for sample, value in zip(made, asyncio.run(rewarded()), strict=True):
        sample.reward = value
    assert [s.reward for s in made] == [1.5, 0.5, 1.5, 0.0, 1.5, 0.5]
    with caplog.at_level("INFO"):
        for sample in made:
            wire.put_response(sample, wire.response_of(sample), junior_weight=0.0)
            wire.put_ends(sample, frozenset(), 0)
        hooks.log_rollout(7, args, made, {}, 0.1)
    assert "'rollout/reward_parts/slime/correct': 0.6" in caplog.text
    assert "'reward/raised': 1.0" in caplog.text
    assert "'rollout/reward_mean': 1.1" in caplog.text
    (box,) = shipped(monkeypatch, args, made, 1, 1)
    of = dict(zip(box["sample_indices"], box["rewards"], strict=True))
    assert [of[s.index] for s in made] == [0.5, -0.5, 0.0, 0.0, 0.5, -0.5], "alone in its group: nobody to compare with"
    masks = dict(zip(box["sample_indices"], box["loss_masks"], strict=True))
    assert [bool(np.asarray(masks[s.index]).any()) for s in made][3] is False


def logits_of(box: dict[str, Any], seed: int) -> dict[int, torch.Tensor]:
    """[T, V] for each sample: a function of the sample alone, so that every rank sees the same model."""
    out = {}
    for index, T in zip(box["sample_indices"], box["total_lengths"], strict=True):
        generator = torch.Generator().manual_seed(seed + index)
        out[index] = torch.randn(T, VOCABULARY, generator=generator)
    return out


def own_log_probs(row: TrainRow, key: int) -> np.ndarray:
    """[R]: what the trainer's old policy says, some of it far from what the engine said."""
    return row.old_log_probs + np.random.default_rng(key).normal(0, 1.2, row.response_length)


def local_rows(rows: list[TrainRow], keys: list[int], made: RunConfig) -> list[TrainRow]:
    """Rows as the local trainer has them before its first step."""
    if made.objective.rollout_weights == "none":
        return rows
    trainer = Trainer(made, SimpleNamespace(), None)  # type: ignore[arg-type]
    scored = [own_log_probs(*pair) for pair in zip(rows, keys, strict=True)]
    trainer._score = lambda *_: scored  # type: ignore[method-assign, assignment]
    return list(trainer._with_own_log_probs(rows)[0])


def local_loss(
    rows: list[TrainRow], keys: list[int], made: RunConfig
) -> tuple[float, dict[str, float], dict[int, torch.Tensor]]:
    """The local runtime's loss on the same rows and logits, with its gradient to the logits."""
    o = made.objective
    junior = sum(0.0 if r.junior_weights is None else float(r.junior_weights.sum()) for r in rows)
    sums = [float(r.weights.sum()) for r in rows]
    total = Denominators.over(sums, sum(r.opd_share for r in rows), junior, o.reduction, o.constant_length or 0)
    value, gradients, metrics = 0.0, {}, dict.fromkeys(LOSS_METRICS, 0.0)
    for row, key in zip(rows, keys, strict=True):
        generator = torch.Generator().manual_seed(key)
        logits = torch.randn(len(row.tokens), VOCABULARY, generator=generator, requires_grad=True)
        R = row.response_length
        at = logits[len(row.tokens) - R - 1 : -1]
        log_probs, entropy = token_log_probs(at, torch.tensor(row.tokens[-R:]))
        packed = wire.packed_tokens(wire.pack(row, wire.width_of(rows)), torch.full((R,), row.advantage), None, o)
        engine = None if row.rollout_log_probs is None else torch.from_numpy(row.rollout_log_probs).float()
        numbers = torch.zeros(R, dtype=torch.int64)
        packed = replace(packed, reduced=None, sequences=numbers, rollout_log_probs=engine)
        candidates = rest = None
        if packed.candidate_ids is not None:
            candidates = hooks.log_probs_of(at, packed.candidate_ids)
            rest = hooks.log_rest_of(at, packed.candidate_ids)
        one, measured = tandem_loss(log_probs, entropy, packed, total, made.objective, made.opd, candidates, rest)
        one.backward()
        gradients[key] = logits.grad
        value += float(one)
        metrics = {name: metrics[name] + measured[name] for name in metrics}
    return value, metrics, gradients


CASES = [
    ((1, 1), 0, []),
    ((2, 1), 0, ["objective.scale_advantages=std"]),
    ((1, 2), 0, ["tandem.junior_token_loss_weight=0"]),
    ((2, 2), 0, ["opd.selection.selector=teachability_entropy", "opd.selection.ratio=0.5", "opd.selection.top_k=4"]),
    ((1, 1), 3, ["opd.signal=jsd", "opd.top_k=3"]),
    ((1, 2), 3, ["opd.signal=reverse_kl", "opd.top_k=3", "opd.position_discount=0.9"]),
    ((2, 1), 0, ["objective.ratio=sequence", "objective.reduction=sequence_mean"]),
    ((2, 2), 0, ["objective.reduction=sequence_mean", "objective.lambda_jun=0.5"]),
    ((1, 2), 0, ["objective.reduction=constant", "objective.constant_length=7"]),
    ((2, 2), 0, ["objective.rollout_weights=truncated", "objective.rollout_weight_max=1.5"]),
    ((2, 1), 0, ["objective.rollout_weights=masked", "objective.reduction=sequence_mean"]),
    ((1, 2), 3, ["objective.rollout_weights=masked", "opd.signal=jsd", "opd.top_k=3"]),
    ((2, 2), 0, ["objective.reduction=constant", "objective.constant_length=7", "opd.on_failed_sample=drop_sample"]),
    ((2, 1), 3, ["opd.on_failed_sample=drop_sample", "opd.signal=forward_kl", "opd.top_k=3", "objective.ratio=sequence",
                 "objective.reduction=sequence_mean", "objective.lambda_jun=0.5", "tandem.junior_token_loss_weight=0.5"]),
    ((2, 1), 0, ["opd.on_failed_sample=drop_opd", "objective.ratio=sequence", "tandem.junior_token_loss_weight=0.01"]),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "k", "overrides"), CASES)
def test_loss_of_slime_is_the_loss_of_the_local_runtime(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ranks: tuple[int, int],
    k: int,
    overrides: list[str],
) -> None:
    """The whole way: samples, conversion, advantages, post-processing, log, micro-batches, slime's loss function, gradient."""
    words = " ".join(overrides)
    (dp, cp), made = ranks, samples(k, lists="selector" in words, juniors="jun" in words)
    c = config(*overrides)
    if "failed" in words:
        for s in (made[1], made[4]):
            wire.put_scores(s, TeacherScoreError("teacher", "no answer", "one", "ask again"))
    kept = [s for s in made if "drop_sample" not in words or wire.scores_of(s)[0] is not None]
    rows, _ = build_rows([hooks._scored(s, None, c) for s in made], c)
    indices = [s.index for s in kept]
    as_local = local_rows(rows, indices, c)
    expected, measured, gradients = local_loss(as_local, indices, c)
    args = arguments()
    args.use_rollout_logprobs = c.objective.rollout_weights == "none"
    boxes = shipped(monkeypatch, args, made, dp, cp)
    whole = torch.cat([wire.pack(row, wire.width_of(rows), c) for row in as_local]).double().sum(0)
    totals = wire.StepTotals(*whole[list(wire.StepTotals.COLUMNS)].tolist(), args.global_batch_size)
    monkeypatch.setattr(hooks, "_totals", lambda channels, rollouts: totals)  # every rank sees the sum over all
    monkeypatch.setattr(mpu, "get_data_parallel_group", lambda with_context_parallel=False: None)
    value, metrics = 0.0, dict.fromkeys(measured, 0.0)
    STATE.trainer.agreement = None
    found = {s.index: torch.zeros(len(s.tokens), VOCABULARY) for s in made}
    for i, box in enumerate(boxes):
        place(monkeypatch, dp, i // cp, cp, i % cp)
        if not args.use_rollout_logprobs:
            lengths = zip(box["sample_indices"], box["total_lengths"], box["response_lengths"], strict=True)
            box["log_probs"] = [
                cp_utils.slice_log_prob_with_cp(torch.from_numpy(own_log_probs(rows[indices.index(key)], key)), T, R)
                .float()
                for key, T, R in lengths
            ]  # fmt: skip
        loss.compute_advantages_and_returns(args, box)
        hooks.data_post_process(args, 0, box)
        assert all(t.dim() == 1 for t in box[wire.CARRIER]), "slime's log averages this key as [R]"
        monkeypatch.setattr(train_metric_utils, "gather_log_data", lambda *a: None)
        train_metric_utils.log_rollout_data(0, args, box)
        hooks.before_train_step(args, 0, 0, None, None, None)
        (iterator,) = data.get_data_iterator(box)
        leaves = {index: t.requires_grad_() for index, t in logits_of(box, 0).items()}
        for places in box["micro_batch_indices"]:
            keys = [
                "tokens", "multimodal_train_inputs", "packed_seq_params", "total_lengths", "response_lengths", "loss_masks",
                "log_probs", "ref_log_probs", "values", "advantages", "returns", "rollout_log_probs", "teacher_log_probs",
                "rollout_mask_sums",
            ]  # fmt: skip
            batch = data.get_batch(iterator, keys, 8, False)
            mine = [cp_utils.slice_with_cp(leaves[box["sample_indices"][j]], 0.0) for j in places]
            logits = torch.cat(mine)
            logits = torch.nn.functional.pad(logits, (0, 0, 0, batch["tokens"].shape[1] - len(logits)))[None]
            micro = len(box["micro_batch_indices"])
            one, _, log = loss.loss_function(args, batch, micro, args.global_batch_size, logits)
            # Megatron divides by the micro-batches, its gradients are means over the ranks.
            one = one / micro / (dp * cp)
            one.backward()
            value += float(one)
            for name, v in zip(log["keys"], log["values"][1:].tolist(), strict=True):
                metrics[name] += v / args.global_batch_size
        for index, leaf in leaves.items():
            if leaf.grad is not None:
                found[index] += leaf.grad
    if not overrides:
        assert STATE.trainer.agreement.verdict() == pytest.approx(measured["logprob_diff"], rel=1e-4)
        STATE.trainer.agreement.add(torch.zeros(3), torch.tensor([0.0, 0.5, 9.0]), torch.tensor([True, True, False]))
        with caplog.at_level("WARNING"):
            loss.compute_advantages_and_returns(args, shipped(monkeypatch, args, made, dp, cp)[0])
        assert "differ by 0.25 nats" in caplog.text
    assert value == pytest.approx(expected, abs=2e-6, rel=2e-5)
    assert metrics == pytest.approx(measured, abs=2e-5, rel=2e-4)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-3
    assert (measured["junior_kl_loss"] > 1e-3) == ("lambda_jun" in words)
    assert (measured["rollout_weight_cut"] > 1e-3) == ("truncated" in words)
    lost = sum(int((a.weights != b.weights).sum()) for a, b in zip(rows, as_local, strict=True))
    assert (lost > 0) == ("masked" in words)
    for index, gradient in gradients.items():
        assert torch.allclose(found[index], gradient, atol=2e-6, rtol=1e-4)


def test_loss_is_of_the_last_stage_and_the_first_says_what_it_received(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipeline stage without the loss gets the same samples; it logs their check-sum, and keeps no channels for a loss."""
    config()
    args, made = arguments(), samples(0)
    (box,) = shipped(monkeypatch, args, made, 1, 1)
    monkeypatch.setattr(mpu, "is_pipeline_last_stage", lambda *_, **__: False)
    loss.compute_advantages_and_returns(args, box)
    assert "advantages" not in box
    expected = wire.checksum(wire.carried(box), box["sample_indices"])
    with caplog.at_level("INFO"):
        hooks.data_post_process(args, 0, box)
    assert f"check-sum {expected:016x}" in caplog.text
    assert STATE.trainer.parked is not None
    assert STATE.trainer.parked.channels is None


def test_loss_totals_and_check_sum_are_summed_over_ranks() -> None:
    """The collectives themselves, in a world of one."""
    channels = [torch.arange(8.0)[None], torch.arange(8.0)[None] * 0.5]
    assert hooks._totals(channels, 4) == wire.StepTotals(pg=1.5, opd=4.5, share=7.5, junior=9.0, rollouts=4)
    assert hooks._totals([], 4) == wire.StepTotals(0.0, 0.0, 0.0, 0.0, 4)
    assert f"{wire.checksum(channels, [3, 4]):016x}" in hooks._received(channels, {"sample_indices": [3, 4]})


def test_loss_sums_of_responses_are_over_context_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response's tokens on this rank, and those that another rank adds."""
    numbers = hooks._numbered([torch.zeros(2, 8), torch.zeros(0, 8), torch.zeros(1, 8)])
    assert numbers.tolist() == [0, 0, 2]
    values = torch.tensor([1.0, 2.0, 4.0])
    assert hooks._sums(3, values, numbers).tolist() == [3.0, 0.0, 4.0]
    seen: list[Any] = []

    def other_rank(x: torch.Tensor, group: Any) -> None:
        seen.append(group)
        x += torch.tensor([10.0, 20.0, 30.0])

    place(monkeypatch, 1, 0, 2, 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", other_rank)
    assert hooks._sums(3, values, numbers).tolist() == [13.0, 20.0, 34.0]
    assert seen == [mpu.get_context_parallel_group()]


def tiny(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<e>": 0, "u": 1, ":": 2, "a": 3, "b": 4, "?": 5}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", unk_token="?")
    tokenizer.chat_template = "{% for m in messages %}u : {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def source_arguments(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Namespace:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    base = {
        "rollout_global_dataset": True, "prompt_data": str(file), "hf_checkpoint": str(tiny(folder)), "dump_details": None,
        "rollout_max_prompt_len": None, "input_key": "prompt", "multimodal_keys": None, "label_key": "label",
        "metadata_key": "metadata", "tool_key": None, "apply_chat_template": True, "apply_chat_template_kwargs": None,
        "rollout_seed": 1, "rollout_shuffle": True, "n_samples_per_prompt": 2, "buffer_filter_path": None,
        "save": str(folder), "load": str(folder),
    }  # fmt: skip
    return Namespace(**{**base, **changes})


def test_sources_keep_raw_messages_and_are_slimes_in_all_else(tmp_path: Path) -> None:
    from slime.rollout.data_source import RolloutDataSourceWithBuffer

    from slime_tandem.slime_hooks.data_source import MessagesDataSource

    rows = [{"prompt": [{"role": "user", "content": t}], "label": t} for t in ("a", "b", "a b", "b b")]
    rows.append({"prompt": "a a", "label": "x"})
    args = source_arguments(tmp_path, rows)
    settings.use(settings.ANY, RunConfig())
    ours, theirs = MessagesDataSource(args), RolloutDataSourceWithBuffer(args)
    assert len(ours) == len(theirs) == 5
    for _ in range(4):  # over the end of an epoch
        mine, other = ours.get_samples(2), theirs.get_samples(2)
        pairs = [(a, b) for g, h in zip(mine, other, strict=True) for a, b in zip(g, h, strict=True)]
        assert [(a.index, a.group_index, a.prompt, a.label) for a, _ in pairs] == [
            (b.index, b.group_index, b.prompt, b.label) for _, b in pairs
        ]
        for sample, _ in pairs:
            text = sample.prompt.removeprefix("u : ").strip()
            assert [m.content for m in wire.prompt_of(sample).messages] == [text]
    ours.add_samples(mine)
    assert ours.get_buffer_length() == 2
    assert ours.get_samples(1)[0] is mine[0]
    ours.save(3)
    again = MessagesDataSource(args)
    again.load(3)
    theirs.save(3)
    assert again.sample_offset == theirs.sample_offset
    assert again.get_samples(1)[0][0].index == theirs.get_samples(1)[0][0].index
    ours.save(3)  # slime's own source has written over it
    Path(args.prompt_data).write_text(Path(args.prompt_data).read_text().replace("a b", "b a"))
    with pytest.raises(DataError, match=r"--prompt-data=.*the rows that the checkpoint's place was counted in"):
        MessagesDataSource(args).load(3)
    short = MessagesDataSource(source_arguments(tmp_path, rows, rollout_max_prompt_len=3))
    assert len(short) == 2, "slime cannot measure what is not rendered yet; we do"


def test_sources_sample_hook_runs_where_slime_runs_it() -> None:
    config("opd.enabled=false")
    args = Namespace(rollout_sample_hook_path=[f"{HOOKS}.score_sample"])
    sample = Sample(index=0, status=Sample.Status.COMPLETED)
    assert asyncio.run(apply_rollout_sample_hooks(args, sample, evaluation=False)) is sample


@pytest.mark.parametrize("needs_offload", [False, True])
def test_sources_of_frozen_models_are_started_again_by_slimes_own_recover(
    needs_offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime's RolloutManager and RolloutServer are its own; engines are words instead of Ray's actors."""
    started: list[str] = []

    def start(group: Any, cursors: Any = None) -> tuple[list[Any], dict[int, int]]:
        missing = [i for i, engine in enumerate(group.all_engines) if engine is None]
        for i in missing:
            group.all_engines[i] = f"new {group.model_path} {i}"
            started.append(group.all_engines[i])
        group.num_new_engines = len(missing)
        return [], {}

    monkeypatch.setattr(rollout.ServerGroup, "start_engines", start)

    def server(name: str, engines: list[Any], *, frozen: bool) -> Any:
        group = rollout.ServerGroup(
            args=Namespace(num_gpus_per_node=8), pg=None, all_engines=engines, num_gpus_per_engine=1, num_new_engines=0,
            model_path=name, needs_offload=needs_offload and name == "teacher",
        )  # fmt: skip
        return rollout.RolloutServer([group], model_name=name, update_weights=not frozen)

    made = manager(arguments(), 1, 1)
    made._health_monitors = [SimpleNamespace(pause=lambda: started.append("pause"))]
    made.servers = {
        "actor": server("actor", ["a", None], frozen=False),  # slime's own business, before the next weights
        "junior": server("junior", ["j", None], frozen=True),
        "teacher": server("teacher", [None], frozen=True),
        "other": server("other", ["o"], frozen=True),
    }
    healed = ["junior"] if needs_offload else ["junior", "teacher"]
    assert healing.restart_frozen(made) == healed
    assert started == [step for name in healed for step in ("pause", f"new {name} {int(name == 'junior')}")]
    assert made.servers["junior"].engines == ["j", "new junior 1"]
    assert made.servers["actor"].engines == ["a", None]
    assert healing.restart_frozen(made) == []

    def broken(group: Any, cursors: Any = None) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rollout.ServerGroup, "start_engines", broken)
    made.servers["junior"].server_groups[0].all_engines[0] = None
    assert healing.restart_frozen(made) == [], "the rollout manager goes on, and it is tried again"


@pytest.mark.parametrize("tied", [True, False])
def test_spec_has_transformer_engines_names_and_hugging_faces_logits(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime's converters take every parameter both ways; logits of packed sequences are transformers'."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from slime.backends.megatron_utils.hf_to_megatron.common import SafetensorReader
    from slime.backends.megatron_utils.hf_to_megatron.qwen import qwen_hf_tensor
    from slime.backends.megatron_utils.megatron_to_hf.qwen2 import convert_qwen2_to_hf
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from slime_tandem.megatron.weights import build_model, transformer_config_from_hf
    from slime_tandem.slime_hooks.spec import layer_spec

    hf_config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    torch.manual_seed(1)
    hf = Qwen3ForCausalLM(hf_config).eval()
    plain = build_model(hf_config)
    megatron = transformer_config_from_hf(hf_config)
    model = GPTModel(
        config=megatron, transformer_layer_spec=layer_spec(None, megatron), vocab_size=VOCABULARY, max_sequence_length=64,
        share_embeddings_and_output_weights=tied, position_embedding_type="rope",
    )  # fmt: skip
    # Megatron's own table from the plain layer's names to Transformer Engine's.
    renamed = get_gpt_layer_local_spec(
        qk_layernorm=True, normalization="RMSNorm"
    ).submodules.sharded_state_dict_keys_map
    names = dict(model.named_parameters())
    expected = set()
    for name, _ in plain.named_parameters():
        for before, after in renamed.items():
            name = name.replace(f".{before}", f".{after}")
        expected.add(name)
    assert set(names) == expected
    args = Namespace(
        kv_channels=8, hidden_size=32, num_attention_heads=4, num_query_groups=2, swiglu=True, num_layers=2,
        tensor_model_parallel_size=1, untie_embeddings_and_output_weights=not tied,
    )  # fmt: skip
    hf.save_pretrained(tmp_path)
    reader, state = SafetensorReader(tmp_path), hf.state_dict()
    back: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in names.items():
            full = f"module.module.{name}"
            parameter.copy_(qwen_hf_tensor(full, reader, hf_config))
            back |= dict(convert_qwen2_to_hf(args, full, parameter))
    assert back.keys() == {k for k in state if not (tied and k == "lm_head.weight")}
    assert all(torch.equal(back[k], state[k]) for k in back)
    lengths = [5, 1, 7]
    ids = torch.randint(0, VOCABULARY, (sum(lengths),))
    cu = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=7, max_seqlen_kv=7, qkv_format="thd")
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        found = model(ids[None], positions, None, packed_seq_params=packed)
        wanted = torch.cat([hf(part[None]).logits[0] for part in ids.split(lengths)])
    assert torch.allclose(found[0], wanted, atol=2e-5), float((found[0] - wanted).abs().max())


@pytest.mark.parametrize("normalised", [True, False])
def test_spec_with_experts_is_what_slime_converts_and_transformers_computes(
    normalised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's router and dispatcher, our experts: slime converts every parameter both ways; logits and gradients agree."""
    from dataclasses import replace as replaced

    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from slime.backends.megatron_utils.hf_to_megatron.common import SafetensorReader
    from slime.backends.megatron_utils.hf_to_megatron.qwen import qwen_moe_hf_tensor
    from slime.backends.megatron_utils.megatron_to_hf.qwen3moe import convert_qwen3moe_to_hf
    from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from slime_tandem.megatron.weights import transformer_config_from_hf
    from slime_tandem.slime_hooks.spec import layer_spec

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    torch.manual_seed(1)
    hf_config = Qwen3MoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=normalised
    )
    hf = Qwen3MoeForCausalLM(hf_config).eval()
    megatron = replaced(
        transformer_config_from_hf(Qwen3Config(**sizes)), num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=12,
        moe_router_pre_softmax=not normalised, moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32",
        moe_aux_loss_coeff=0.0, moe_router_load_balancing_type="none",
    )  # fmt: skip
    model = GPTModel(
        config=megatron, transformer_layer_spec=layer_spec(None, megatron), vocab_size=VOCABULARY, max_sequence_length=64,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    args = Namespace(kv_channels=8, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    hf.save_pretrained(tmp_path)
    reader = SafetensorReader(tmp_path)
    back: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = f"module.module.{name}"
            parameter.copy_(qwen_moe_hf_tensor(full, reader, hf_config))
            back |= dict(convert_qwen3moe_to_hf(args, full, parameter))
    assert back.keys() == set(reader.weight_map)
    assert all(torch.equal(back[k], reader.get_tensor(k)) for k in back)
    lengths = [5, 1, 7]
    ids = torch.randint(0, VOCABULARY, (sum(lengths),))
    cu = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=7, max_seqlen_kv=7, qkv_format="thd")
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    found = model(ids[None], positions, None, packed_seq_params=packed)
    wanted = torch.cat([hf(part[None]).logits[0] for part in ids.split(lengths)])
    assert torch.allclose(found[0], wanted, atol=2e-5), float((found[0] - wanted).abs().max())
    found[0].square().mean().backward()
    wanted.square().mean().backward()
    grads = [(layer.mlp.router.weight.grad, other.mlp.gate.weight.grad) for layer, other in zip(
        model.decoder.layers, hf.model.layers, strict=True
    )]  # fmt: skip
    assert all(torch.allclose(a, b, atol=1e-6) and a.abs().max() > 1e-5 for a, b in grads)


def test_spec_padding_that_a_rank_cannot_halve_is_named() -> None:
    """slime pads to --data-pad-size-multiplier tokens a rank: an odd one leaves a token that no piece has."""
    from slime_tandem.errors import ConfigError
    from slime_tandem.slime_hooks.spec import CausalAttention

    attention = CausalAttention.__new__(CausalAttention)
    torch.nn.Module.__init__(attention)
    object.__setattr__(attention, "ranks", Namespace(size=lambda: 2, rank=lambda: 0))
    rows = torch.zeros(3, 1, 4)
    with pytest.raises(
        ConfigError, match=r"tokens of a packed sequence=2: expected a multiple of 4.*pad-size-multiplier"
    ):
        next(attention._pieces(rows, rows, rows, [4, 2]))


@pytest.mark.parametrize("lengths", [[5, 7, 6], [3, 3], [4, 9, 1]])
def test_spec_attends_to_all_sequences_in_one_call_as_to_each(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, whether or not the lengths are near enough for the one call by themselves."""
    from slime_tandem.slime_hooks import spec

    attention = spec.CausalAttention(
        SimpleNamespace(kv_channels=4), pg_collection=SimpleNamespace(cp=Namespace(size=lambda: 1))
    )
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    found = []
    for most in (0.0, 10.0):
        monkeypatch.setattr(spec, "_PADDED", most)
        draw = torch.Generator().manual_seed(0)
        parts = [torch.randn(sum(lengths), 1, h, 4, generator=draw, requires_grad=True) for h in (6, 2, 2)]
        out = attention(*parts, packed_seq_params=SimpleNamespace(cu_seqlens_q=starts))
        (out * torch.randn(out.shape, generator=draw)).sum().backward()
        found.append([out.detach(), *(part.grad for part in parts)])
    for each, one in zip(*found, strict=True):
        torch.testing.assert_close(one, each, atol=1e-6, rtol=1e-6)


def test_spec_cut_by_context_or_tensor_is_the_whole_model(tmp_path: Path) -> None:
    """Logits and gradients of two processes; context as slime slices it, tensor with the sequence split."""
    script = Path(__file__).with_name("parallel_spec.py")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for process, out in zip(processes, told, strict=True):
        assert process.returncode == 0, out[-3000:]
        assert "agree with one process" in out
