"""The update on a real Megatron-core model: what carries gradient, what changes nothing, and that it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError, TandemError
from slime_tandem.megatron.policy import MegatronPolicy
from slime_tandem.objective.logprobs import token_log_probs
from slime_tandem.training.rows import TrainRow
from slime_tandem.training.trainer import Trainer


def config(*overrides: str) -> RunConfig:
    return RunConfig.load(overrides=["optimizer.lr=0.01", "train.threads=1", *overrides])


def policy(trio, cfg: RunConfig) -> MegatronPolicy:  # type: ignore[no-untyped-def]
    return MegatronPolicy.from_hf(trio.senior, cfg.optimizer, threads=1)


def rows_for(p: MegatronPolicy, weights: Sequence[Sequence[float]], opd: Sequence[Sequence[float]]) -> list[TrainRow]:
    """On-policy rows: the behaviour log-probs are the policy's own."""
    rng = np.random.default_rng(0)
    rows = []
    for i, (w, o) in enumerate(zip(weights, opd, strict=True)):
        R = len(w)
        tokens = tuple(int(t) for t in rng.integers(3, 250, 5 + i + R))
        with torch.no_grad():
            old, _ = token_log_probs(p.response_logits([tokens], [R]), torch.tensor(tokens[-R:]))
        rows.append(
            TrainRow(
                tokens,
                i // 2,
                (-1.0) ** i,
                old.double().numpy(),
                np.array(w),
                np.array(o),
                np.full(R, -2.0) * np.array(o),
            )
        )
    return rows


def gradient(trio, cfg: RunConfig, rows: Sequence[TrainRow]) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    p = policy(trio, cfg)
    captured: dict[str, torch.Tensor] = {}

    def step() -> float:
        captured.update({n: q.grad.clone() for n, q in p.model.named_parameters() if q.grad is not None})
        return 0.0

    p.step = step  # type: ignore[method-assign]
    Trainer(cfg, p, None).update(rows)
    return captured


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor] | None = None) -> float:
    return max(float((g - (b[n] if b else 0)).abs().max()) for n, g in a.items())


SENIOR_ONLY = [[1.0, 1.0, 1.0], [1.0, 1.0]]
NONE = [[0.0, 0.0, 0.0], [0.0, 0.0]]


def test_tokens_of_the_junior_carry_no_gradient(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config()
    p = policy(trio, cfg)
    mixed = [[1.0, 0.0, 1.0], [0.0, 1.0]]
    rows = rows_for(p, mixed, NONE)
    base = gradient(trio, cfg, rows)
    assert largest(base) > 1e-4
    # A junior token's behaviour log-prob, however wild, must not matter; a senior token's must.
    wild = [replace(r, old_log_probs=np.where(r.weights > 0, r.old_log_probs, -40.0)) for r in rows]
    assert largest(base, gradient(trio, cfg, wild)) == 0.0
    off = [replace(r, old_log_probs=r.old_log_probs + 0.1 * (r.weights > 0)) for r in rows]
    assert largest(base, gradient(trio, cfg, off)) > 1e-5
    assert gradient(trio, cfg, rows_for(p, NONE, NONE)) == {}, "no step at all"


def test_the_distillation_term_has_its_own_mask(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config("objective.reward_coef=0")
    p = policy(trio, cfg)
    assert gradient(trio, cfg, rows_for(p, SENIOR_ONLY, NONE)) == {}, "no term counts these tokens"
    assert largest(gradient(trio, cfg, rows_for(p, SENIOR_ONLY, [[0.0, 1.0, 0.0], [0.0, 0.0]]))) > 1e-4
    assert largest(gradient(trio, cfg, rows_for(p, NONE, [[0.0, 1.0, 0.0], [0.0, 0.0]]))) > 1e-4


def test_the_denominator_of_the_distillation_term_is_the_rows(trio) -> None:  # type: ignore[no-untyped-def]
    """One selected token of five valid ones: its gradient over 5 instead of over 1."""
    cfg = config("objective.reward_coef=0")
    rows = rows_for(policy(trio, cfg), NONE, [[0.0, 1.0, 0.0], [0.0, 0.0]])
    alone = gradient(trio, cfg, rows)
    shared = gradient(trio, cfg, [replace(row, opd_total=float(row.response_length)) for row in rows])
    assert largest(alone) > 1e-4
    assert largest(alone, {name: 5 * g for name, g in shared.items()}) < 1e-6 * max(1.0, largest(alone))


def test_prompt_length_of_others_and_micro_batches_change_nothing(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config()
    rows = rows_for(policy(trio, cfg), [*SENIOR_ONLY, *SENIOR_ONLY], [*SENIOR_ONLY, *SENIOR_ONLY])
    whole = gradient(trio, cfg, rows)
    one_by_one = gradient(trio, config("train.micro_batch_tokens=1"), rows)
    assert largest(whole, one_by_one) < 1e-5 * max(1.0, largest(whole))
    # A row with a long prompt and no weight pads all others in its micro-batch and must not change their gradient.
    filler = replace(rows[0], tokens=tuple(range(3, 120)), weights=np.zeros(3), opd_weights=np.zeros(3))
    assert largest(whole, gradient(trio, cfg, [*rows, filler])) < 1e-5 * max(1.0, largest(whole))


def test_an_update_moves_probability_the_way_the_advantage_points(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config("opd.enabled=false")
    p = policy(trio, cfg)
    rows = rows_for(p, SENIOR_ONLY, NONE)
    metrics = Trainer(cfg, p, None).update(rows)
    assert metrics["train/logprob_diff"] < 1e-5
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/clip_fraction"] == 0.0
    for row in rows:
        R = row.response_length
        with torch.no_grad():
            new, _ = token_log_probs(p.response_logits([row.tokens], [R]), torch.tensor(row.tokens[-R:]))
        assert np.sign(new.numpy().sum() - row.old_log_probs.sum()) == np.sign(row.advantage)


def test_distillation_pulls_the_student_towards_the_teacher(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config("objective.reward_coef=0")
    p = policy(trio, cfg)
    (row,) = rows_for(p, [[1.0]], [[1.0]])
    assert abs(row.old_log_probs[0] + 2.0) > 0.05
    Trainer(cfg, p, None).update([row])
    with torch.no_grad():
        new, _ = token_log_probs(p.response_logits([row.tokens], [1]), torch.tensor(row.tokens[-1:]))
    assert np.sign(float(new[0]) - row.old_log_probs[0]) == np.sign(-2.0 - row.old_log_probs[0])


def test_kl_to_the_start_is_zero_there_and_grows(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config("opd.enabled=false", "objective.kl_coef=0.5")
    p = policy(trio, cfg)
    trainer = Trainer(cfg, p, MegatronPolicy.from_hf(trio.senior, None, threads=1))
    rows = rows_for(p, SENIOR_ONLY, NONE)
    rows = [replace(row, ref_log_probs=row.old_log_probs) for row in rows]
    assert trainer.update(rows)["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert trainer.update(rows)["train/kl_loss"] > 1e-6


def test_several_updates_per_rollout_clip(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config("opd.enabled=false", "train.updates_per_step=2", "optimizer.lr=0.05")
    p = policy(trio, cfg)
    rows = rows_for(p, [*SENIOR_ONLY, *SENIOR_ONLY], [*NONE, *NONE])
    metrics = Trainer(cfg, p, None).update(rows)
    assert metrics["train/logprob_diff"] < 1e-5
    assert p.steps == 2


def test_epochs_pass_over_a_rollout_again(trio) -> None:  # type: ignore[no-untyped-def]
    """Twice is what two updates of the same rows are: the old policy stays the one that sampled."""
    once, twice = (config("opd.enabled=false", f"train.epochs_per_step={n}", "optimizer.lr=0.01") for n in (1, 2))
    a, b = policy(trio, once), policy(trio, twice)
    rows = rows_for(a, SENIOR_ONLY, NONE)
    for _ in range(2):
        Trainer(once, a, None).update(rows)
    metrics = Trainer(twice, b, None).update(rows)
    assert metrics["train/updates"] == b.steps == 2.0
    assert Trainer(once, a, None).own_log_probs(rows)[0] == pytest.approx(
        Trainer(once, b, None).own_log_probs(rows)[0], abs=0
    )


def test_the_entropy_bonus_raises_the_entropy(trio) -> None:  # type: ignore[no-untyped-def]
    """Alone, and without a reward to learn from: what counts are the weights."""
    cfg = config("opd.enabled=false", "objective.entropy_coef=1.0", "optimizer.lr=0.003")
    p = policy(trio, cfg)
    rows = [replace(row, advantage=0.0) for row in rows_for(p, SENIOR_ONLY, NONE)]
    trainer = Trainer(cfg, p, None)
    first, second = trainer.update(rows), trainer.update(rows)
    assert first["train/pg_loss"] == 0.0
    assert first["train/entropy_bonus"] == pytest.approx(first["train/entropy"])
    assert first["train/loss"] == pytest.approx(-first["train/entropy_bonus"])
    assert second["train/entropy"] > first["train/entropy"] + 1e-4
    assert gradient(trio, cfg, rows_for(p, NONE, NONE)) == {}, "junior tokens have no bonus"


def with_reference(rows: Sequence[TrainRow], shift: float = 0.0) -> list[TrainRow]:
    return [replace(row, ref_log_probs=row.old_log_probs - shift) for row in rows]


def trainer_with_kl(trio, *overrides: str) -> tuple[Trainer, list[TrainRow]]:  # type: ignore[no-untyped-def]
    cfg = config("opd.enabled=false", "objective.kl_coef=0.1", "objective.kl_target=0.05", *overrides)
    p = policy(trio, cfg)
    trainer = Trainer(cfg, p, MegatronPolicy.from_hf(trio.senior, None, threads=1))
    return trainer, rows_for(p, [*SENIOR_ONLY, *SENIOR_ONLY], [*NONE, *NONE])


def test_the_start_weights_score_each_sample_once_and_in_order(trio) -> None:  # type: ignore[no-untyped-def]
    trainer, rows = trainer_with_kl(trio)
    samples = [
        SimpleNamespace(
            prompt_ids=r.tokens[: -r.response_length],
            response_ids=r.tokens[-r.response_length :],
            authorship_mask=(1,) * r.response_length,
            kept_ids=(),
        )
        for r in rows
    ]
    reference = trainer.reference_log_probs(samples)  # type: ignore[arg-type]
    assert reference is not None
    for row, scores in zip(rows, reference, strict=True):
        np.testing.assert_allclose(scores, row.old_log_probs, atol=1e-5)
    assert Trainer(config(), trainer.policy, None).reference_log_probs(samples) is None  # type: ignore[arg-type]


def test_the_coefficient_falls_below_the_target_and_rises_above_it(trio) -> None:  # type: ignore[no-untyped-def]
    trainer, rows = trainer_with_kl(trio, "objective.kl_estimator=k1")
    metrics = trainer.update(with_reference(rows))
    assert metrics["train/kl"] == pytest.approx(0.0, abs=1e-5)
    assert trainer.kl_coef == metrics["train/kl_coef"] == pytest.approx(0.1 * np.exp(-0.2))
    trainer, rows = trainer_with_kl(trio, "objective.kl_estimator=k1")
    metrics = trainer.update(with_reference(rows, shift=0.09))
    assert metrics["train/kl"] == pytest.approx(0.09, abs=1e-5)
    assert metrics["train/kl_p95"] == pytest.approx(0.09, abs=1e-4)
    assert trainer.kl_coef == pytest.approx(0.1 * np.exp(0.2))
    assert metrics["train/kl_guard"] == 0.0


@pytest.mark.parametrize(("guard", "updates"), [("double", 2), ("skip_updates", 1), ("stop", 0)])
def test_the_guard_acts_above_twice_the_target(trio, guard: str, updates: int) -> None:  # type: ignore[no-untyped-def]
    trainer, rows = trainer_with_kl(
        trio, f"objective.kl_guard={guard}", "train.updates_per_step=2", "optimizer.lr=1e-6"
    )
    far = with_reference(rows, shift=2.0)
    if guard == "stop":
        with pytest.raises(TandemError, match=r"train/kl=.*twice objective\.kl_target=0\.05"):
            trainer.update(far)
        return
    metrics = trainer.update(far)
    assert metrics["train/updates"] == metrics["train/kl_guard"] == trainer.policy.steps == updates
    assert trainer.kl_coef == pytest.approx(0.1 * 2**updates)


def test_a_coefficient_taken_from_a_checkpoint_goes_on_bit_for_bit(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def learn(trainer: Trainer, rows: Sequence[TrainRow], times: int) -> list[dict[str, float | None]]:
        return [trainer.update(with_reference(rows, 0.02)) for _ in range(times)]

    whole, rows = trainer_with_kl(trio)
    expected = learn(whole, rows, 4)
    assert len({m["train/kl_coef"] for m in expected}) == 4
    first, _ = trainer_with_kl(trio)
    learn(first, rows, 2)
    first.policy.save_checkpoint(tmp_path / "c", {"step": 2, "kl_coef": first.kl_coef})
    second, _ = trainer_with_kl(trio)
    second.kl_coef = second.policy.load_checkpoint(tmp_path / "c")["kl_coef"]
    assert learn(second, rows, 2) == expected[2:]


def test_own_old_log_probs_weigh_the_engines_disagreement(trio) -> None:  # type: ignore[no-untyped-def]
    """The engine is off by a factor of e on one token: its weight is 1/e, or its mask takes it and it is counted."""
    for mode, masked in (("truncated", 0.0), ("masked", 1.0)):
        cfg = config("opd.enabled=false", f"objective.rollout_weights={mode}")
        p = policy(trio, cfg)
        rows = rows_for(p, SENIOR_ONLY, NONE)
        shift = np.zeros(3)
        shift[1] = 1.0
        rows = [replace(rows[0], old_log_probs=rows[0].old_log_probs + shift), rows[1]]
        metrics = Trainer(cfg, p, None).update(rows)
        assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5), "against the trainer's own"
        expected = (4 + np.exp(-1)) / 5 if mode == "truncated" else 1.0
        assert metrics["train/rollout_weight_mean"] == pytest.approx(expected, abs=1e-4)
        assert metrics["train/logprob_diff"] == pytest.approx(1 / 5 if mode == "truncated" else 0.0, abs=1e-4)
        assert metrics["train/rollout_masked_tokens"] == masked


def test_lambda_jun_pulls_the_senior_to_what_the_junior_wrote(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config("opd.enabled=false", "objective.lambda_jun=0.5")
    p = policy(trio, cfg)
    (row,) = rows_for(p, [[0.0]], [[0.0]])
    before = row.old_log_probs
    row = replace(row, junior_weights=np.ones(1), junior_log_probs=before + 1.0)
    metrics = Trainer(cfg, p, None).update([row])
    kl = np.exp(-1.0) - 1 + 1.0
    assert metrics["train/junior_kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["train/junior_kl_loss"] == pytest.approx(0.5 * kl, rel=1e-4)
    with torch.no_grad():
        new, _ = token_log_probs(p.response_logits([row.tokens], [1]), torch.tensor(row.tokens[-1:]))
    assert float(new[0]) > before[0]


def test_an_empty_response_is_a_row_that_teaches_nothing(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config("opd.enabled=false", "objective.reduction=sequence_mean")
    rows = rows_for(policy(trio, cfg), SENIOR_ONLY, NONE)
    nothing = np.zeros(0)
    empty = replace(rows[0], old_log_probs=nothing, weights=nothing, opd_weights=nothing, teacher_log_probs=nothing)
    whole = gradient(trio, cfg, rows)
    assert largest(whole, gradient(trio, cfg, [*rows, empty])) < 1e-5 * max(1.0, largest(whole))
    alone = config("opd.enabled=false", "train.micro_batch_tokens=1")  # a micro-batch of its own
    assert largest(gradient(trio, alone, [*rows, empty])) > 0


@pytest.mark.parametrize(
    "change", ["reduction=sequence_mean", "reduction=constant", "ratio=sequence", "surrogate=cispo"]
)
def test_the_settings_reach_the_loss_and_micro_batches_change_nothing(trio, change: str) -> None:  # type: ignore[no-untyped-def]
    rows = rows_for(policy(trio, config()), [*SENIOR_ONLY, *SENIOR_ONLY], [*NONE, *NONE])
    rng = np.random.default_rng(1)
    rows = [replace(r, old_log_probs=r.old_log_probs + rng.normal(0, 0.5, r.response_length)) for r in rows]
    base = ("opd.enabled=false", f"objective.{change}")
    whole = gradient(trio, config(*base), rows)
    assert largest(whole, gradient(trio, config("opd.enabled=false"), rows)) > 1e-4
    assert largest(whole, gradient(trio, config(*base, "train.micro_batch_tokens=1"), rows)) < 1e-5 * max(
        1, largest(whole)
    )


def test_an_update_without_a_weighted_token_leaves_the_coefficient(trio) -> None:  # type: ignore[no-untyped-def]
    trainer, rows = trainer_with_kl(trio)
    trainer.update([replace(row, weights=np.zeros(row.response_length)) for row in with_reference(rows)])
    assert trainer.kl_coef == 0.1


def masked(rows: Sequence[TrainRow]) -> list[TrainRow]:
    return [replace(r, weights=np.zeros(r.response_length), opd_weights=np.zeros(r.response_length)) for r in rows]


def test_an_update_whose_tokens_are_all_masked_moves_nothing(trio) -> None:  # type: ignore[no-untyped-def]
    """AdamW with momentum would walk on under a zero gradient; the run must go on as if the update had not been."""
    cfg = config("optimizer.warmup_steps=8")
    results = []
    for between in (False, True):
        p = policy(trio, cfg)
        trainer, rows = Trainer(cfg, p, None), rows_for(p, SENIOR_ONLY, SENIOR_ONLY)
        trainer.update(rows)
        if between:
            before = {n: (w.detach().clone(), w.grad) for n, w in p.model.named_parameters()}
            metrics = trainer.update(masked(rows))
            assert (metrics["train/updates"], metrics["train/empty_updates"], p.steps) == (0.0, 1.0, 1)
            assert metrics["train/loss"] is metrics["train/grad_norm"] is metrics["train/logprob_diff"] is None
            for name, w in p.model.named_parameters():
                assert torch.equal(before[name][0], w), name
                assert before[name][1] is w.grad, "gradients are left as they are, too"
        results.append((trainer.update(rows), [w.detach().clone() for w in p.model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1])), "moments and learning rate, too"


def test_an_empty_mini_batch_does_not_count_in_the_means(trio) -> None:  # type: ignore[no-untyped-def]
    rows = rows_for(policy(trio, config()), [*SENIOR_ONLY, *SENIOR_ONLY], [*NONE, *NONE])
    half = ("opd.enabled=false", "train.updates_per_step=2")
    metrics = []
    for cfg, given in ((config("opd.enabled=false"), rows[2:]), (config(*half), [*masked(rows[:2]), *rows[2:]])):
        metrics.append(Trainer(cfg, policy(trio, cfg), None).update(given))
        assert metrics[-1]["train/updates"] == 1.0
    assert metrics[0] | {"train/empty_updates": 1.0} == metrics[1]


def test_an_update_of_no_rows_is_refused(trio) -> None:  # type: ignore[no-untyped-def]
    cfg = config()
    with pytest.raises(DataError, match="rows of an update=0: expected at least one"):
        Trainer(cfg, policy(trio, cfg), None).update([])


def test_a_checkpoints_coefficient_is_taken_where_it_adapts_within_the_new_bounds(trio) -> None:  # type: ignore[no-untyped-def]
    trainer, _ = trainer_with_kl(trio, "objective.kl_coef_max=0.5")
    for state, coef in (({"step": 1}, 0.1), ({"kl_coef": 0.3}, 0.3), ({"kl_coef": 4.0}, 0.5)):
        trainer.restore(state)
        assert trainer.kl_coef == coef
    fixed = config("objective.kl_coef=0.2")
    still = Trainer(fixed, trainer.policy, trainer.policy)
    still.restore({"kl_coef": 4.0})
    assert still.kl_coef == 0.2, "what the resumed run asks for"


@pytest.mark.parametrize("mode", ["truncated", "masked"])
def test_a_log_prob_that_is_no_number_is_not_masked_away(trio, mode: str) -> None:  # type: ignore[no-untyped-def]
    cfg = config("opd.enabled=false", f"objective.rollout_weights={mode}")
    p = policy(trio, cfg)
    row, other = rows_for(p, SENIOR_ONLY, NONE)
    broken = replace(row, old_log_probs=np.where(np.arange(3) == 1, np.nan, row.old_log_probs))
    with pytest.raises(DataError, match=r"log-probs of response token 1=.*nan \(engine\)"):
        Trainer(cfg, p, None).update([broken, other])
