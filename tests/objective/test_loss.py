"""The loss: by hand, by law, and by finite differences."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_tandem.config import ObjectiveConfig, OpdConfig
from slime_tandem.objective.loss import LOSS_METRICS, Denominators, PackedTokens, clipped_surrogate, tandem_loss

F64 = torch.float64
ALL_TERMS = ObjectiveConfig(reward_coef=0.7, kl_coef=0.3, kl_estimator="k3")
OPD = OpdConfig(coef=0.5, clip=2.0)
NO_OPD = OpdConfig(enabled=False)
seeds = st.integers(0, 2**31)
laws = settings(deadline=None, max_examples=60)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def random_batch(seed: int, T: int = 12, *, spread: float = 0.3) -> tuple[Tensor, Tensor, PackedTokens]:
    """(log_probs, entropy, batch) of T tokens: about a third junior (weight 0), aligned tokens among the senior's."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(T, generator=g, dtype=F64) * scale

    old = -normal(1.0).abs() - 0.1
    senior = (torch.rand(T, generator=g) < 0.65).double()
    senior[0] = 1.0
    aligned = senior * (torch.rand(T, generator=g) < 0.7).double()
    aligned[0] = 1.0
    batch = PackedTokens(
        old_log_probs=old,
        advantages=normal(1.0),
        weights=senior,
        opd_weights=aligned,
        teacher_log_probs=(old + normal(1.5)) * aligned,
        ref_log_probs=old + normal(0.2),
    )
    return old + normal(spread), normal(1.0).abs(), batch


def denominators(batch: PackedTokens) -> Denominators:
    return Denominators(max(float(batch.weights.sum()), 1e-8), max(float(batch.opd_weights.sum()), 1e-8))


def loss_and_grad(
    log_probs: Tensor,
    entropy: Tensor,
    batch: PackedTokens,
    den: Denominators | None = None,
    objective: ObjectiveConfig = ALL_TERMS,
    opd: OpdConfig = OPD,
) -> tuple[float, Tensor, dict[str, float]]:
    x = log_probs.detach().clone().requires_grad_()
    loss, metrics = tandem_loss(x, entropy, batch, den or denominators(batch), objective, opd)
    loss.backward()
    assert x.grad is not None
    return loss.item(), x.grad, metrics


def take(batch: PackedTokens, index: Tensor) -> PackedTokens:
    return PackedTokens(
        **{
            f.name: None if (value := getattr(batch, f.name)) is None else value[index]
            for f in dataclasses.fields(batch)  # every field is [T, ...]
        }
    )


# ---- by hand ----


def test_the_value_and_gradient_at_ratio_one() -> None:
    """Two senior tokens and a junior one, one aligned: each term is a mean over its own weights."""
    old = t(-1.0, -2.0, -0.5)
    batch = PackedTokens(old, t(3.0, -1.0, 5.0), t(1, 1, 0), t(1, 0, 0), t(-1.5, 0, 0))
    loss, grad, metrics = loss_and_grad(
        old, t(0.2, 0.4, 9.0), batch, Denominators(2, 1), ObjectiveConfig(), OpdConfig()
    )
    # pg: -(3 - 1) / 2 = -1. OPD advantage of token 0: -(-1 - -1.5) = -0.5, so its loss is +0.5.
    assert metrics["pg_loss"] == pytest.approx(-1.0)
    assert metrics["opd_loss"] == pytest.approx(0.5)
    assert loss == metrics["loss"] == pytest.approx(-0.5)
    assert grad.tolist() == pytest.approx([-3.0 / 2 + 0.5, 1.0 / 2, 0.0])
    assert metrics["entropy"] == pytest.approx(0.3), "the junior's token is left out"
    assert (metrics["ratio_mean"], metrics["clip_fraction"], metrics["logprob_diff"], metrics["kl_loss"]) == (
        1,
        0,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside: d(ratio * A)/d log-prob = ratio * A
        (1.5, 2.0, -2.56, 0.0),  # good action, already raised past 1 + clip_high: no more
        (1.5, -2.0, 3.0, 3.0),  # bad action raised: always pushed down
        (0.5, 2.0, -1.0, -1.0),  # good action lowered: always pulled up
        (0.5, -2.0, 1.6, 0.0),  # bad action, already lowered past 1 - clip_low: no more
        (1.25, 2.0, -2.5, -2.5),  # between 1 + clip_low and 1 + clip_high: the clip is asymmetric
        (0.78, -2.0, 1.6, 0.0),
    ],
)
def test_the_asymmetric_clip_by_hand(ratio: float, advantage: float, value: float, slope: float) -> None:
    x = t(math.log(ratio)).requires_grad_()
    out = clipped_surrogate(x.exp(), t(advantage), 0.2, 0.28)
    assert out.item() == pytest.approx(value)
    (g,) = torch.autograd.grad(out.sum(), x)
    assert g.item() == pytest.approx(slope)


def test_clip_fraction_counts_ratios_outside_on_weighted_tokens() -> None:
    old = t(-1, -1, -1, -1)
    new = old + t(1.5, 1.25, 0.5, 9.0).log()
    batch = PackedTokens(old, t(1, 1, 1, 1), t(1, 1, 1, 0), t(0, 0, 0, 0), t(0, 0, 0, 0))
    _, _, metrics = loss_and_grad(new, t(0, 0, 0, 0), batch, Denominators(3, 1e-8), ObjectiveConfig(), NO_OPD)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["ratio_mean"] == pytest.approx((1.5 + 1.25 + 0.5) / 3)


def test_junior_weight_scales_its_tokens() -> None:
    old = t(-1, -1)
    batch = PackedTokens(old, t(2, 2), t(1, 0.25), t(0, 0), t(0, 0))
    _, grad, _ = loss_and_grad(old, t(0, 0), batch, Denominators(1.25, 1e-8), ObjectiveConfig(), NO_OPD)
    assert grad.tolist() == pytest.approx([-2 / 1.25, -0.5 / 1.25])


@pytest.mark.parametrize(("teacher", "sign"), [(-3.0, 1), (-0.2, -1)])
def test_the_teacher_pulls_the_right_way(teacher: float, sign: int) -> None:
    """Descent moves against the gradient: a token that the student likes more than the teacher does is pushed down."""
    old = t(-1.0)
    batch = PackedTokens(old, t(0.0), t(1), t(1), t(teacher))
    _, grad, _ = loss_and_grad(old, t(0), batch, opd=OpdConfig(coef=2.0, clip=None))
    assert grad.item() == pytest.approx(2.0 * (-1.0 - teacher))
    assert math.copysign(1, grad.item()) == sign


def test_the_distillation_advantage_is_clipped_and_detached() -> None:
    old = t(-1.0)
    batch = PackedTokens(old, t(0.0), t(1), t(1), t(-50.0))
    assert loss_and_grad(old, t(0), batch, opd=OpdConfig(clip=10.0))[1].item() == pytest.approx(10.0)
    assert loss_and_grad(old, t(0), batch, opd=OpdConfig(clip=None))[1].item() == pytest.approx(49.0)
    teacher = t(-2.0).requires_grad_()
    batch = PackedTokens(old, t(0.0), t(1), t(1), teacher)
    x = old.clone().requires_grad_()
    tandem_loss(x, t(0), batch, Denominators(1, 1), ObjectiveConfig(), OpdConfig())[0].backward()
    assert teacher.grad is None


def test_switches_and_coefficients() -> None:
    log_probs, entropy, batch = random_batch(5)
    _, _, full = loss_and_grad(log_probs, entropy, batch)
    _, _, without = loss_and_grad(log_probs, entropy, batch, opd=NO_OPD)
    assert without["opd_loss"] == 0.0
    assert without["pg_loss"] == full["pg_loss"]
    _, _, plain = loss_and_grad(log_probs, entropy, batch, objective=ObjectiveConfig(), opd=OpdConfig(clip=2.0))
    assert full["pg_loss"] == pytest.approx(0.7 * plain["pg_loss"])
    assert full["opd_loss"] == pytest.approx(0.5 * plain["opd_loss"])
    assert plain["kl_loss"] == 0.0
    no_ref = dataclasses.replace(batch, ref_log_probs=None)
    assert loss_and_grad(log_probs, entropy, no_ref)[2]["kl_loss"] == 0.0
    assert tuple(full) == LOSS_METRICS
    assert full["loss"] == pytest.approx(full["pg_loss"] + full["opd_loss"] + full["kl_loss"])


# ---- laws ----


@laws
@given(seeds)
def test_the_gradient_is_exactly_zero_where_nothing_is_learnt(seed: int) -> None:
    log_probs, entropy, batch = random_batch(seed)
    _, grad, _ = loss_and_grad(log_probs, entropy, batch)
    assert (grad[(batch.weights == 0) & (batch.opd_weights == 0)] == 0).all(), "junior tokens"
    only_opd = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages), ref_log_probs=None)
    _, grad, _ = loss_and_grad(log_probs, entropy, only_opd)
    assert (grad[batch.opd_weights == 0] == 0).all(), "unaligned tokens, for the teacher's term"


@laws
@given(seeds)
def test_values_on_masked_tokens_do_not_matter(seed: int) -> None:
    log_probs, entropy, batch = random_batch(seed)
    loss, grad, metrics = loss_and_grad(log_probs, entropy, batch)
    junior = (batch.weights == 0) & (batch.opd_weights == 0)
    other = dataclasses.replace(
        batch,
        old_log_probs=torch.where(junior, batch.old_log_probs - 3, batch.old_log_probs),
        advantages=torch.where(junior, 99.0, batch.advantages),
        teacher_log_probs=torch.where(batch.opd_weights > 0, batch.teacher_log_probs, -4.0),
    )
    changed = loss_and_grad(torch.where(junior, log_probs - 5, log_probs), entropy, other)
    assert changed[0] == loss
    assert torch.equal(changed[1], grad)
    assert changed[2] == metrics


@laws
@given(seeds, st.integers(1, 11))
def test_micro_batches_add_up(seed: int, cut: int) -> None:
    """With the mini-batch's denominators, any split gives the same loss, metrics and gradient."""
    log_probs, entropy, batch = random_batch(seed)
    den = denominators(batch)
    loss, grad, metrics = loss_and_grad(log_probs, entropy, batch, den)
    parts = [torch.arange(0, cut), torch.arange(cut, 12), torch.arange(0)]
    results = [loss_and_grad(log_probs[i], entropy[i], take(batch, i), den) for i in parts]
    assert sum(r[0] for r in results) == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), grad)
    for name in LOSS_METRICS:
        assert sum(r[2][name] for r in results) == pytest.approx(metrics[name], abs=1e-12)


@laws
@given(seeds)
def test_the_order_of_tokens_does_not_matter(seed: int) -> None:
    log_probs, entropy, batch = random_batch(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    loss, grad, metrics = loss_and_grad(log_probs, entropy, batch)
    other_loss, other_grad, other_metrics = loss_and_grad(log_probs[order], entropy[order], take(batch, order))
    assert other_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(other_grad, grad[order])
    assert other_metrics == pytest.approx(metrics, abs=1e-12)


@laws
@given(seeds)
def test_the_size_of_one_mask_does_not_change_the_other_terms(seed: int) -> None:
    """Fewer senior tokens must not shrink the teacher's term, nor fewer aligned tokens the reward's."""
    log_probs, entropy, batch = random_batch(seed)
    _, _, metrics = loss_and_grad(log_probs, entropy, batch)
    fewer_aligned = dataclasses.replace(batch, opd_weights=torch.zeros_like(batch.opd_weights))
    assert loss_and_grad(log_probs, entropy, fewer_aligned)[2]["pg_loss"] == metrics["pg_loss"]
    weights = batch.opd_weights.clone()
    only_aligned = dataclasses.replace(batch, weights=weights)
    assert loss_and_grad(log_probs, entropy, only_aligned)[2]["opd_loss"] == metrics["opd_loss"]
    # Doubling every token leaves all means as they are.
    twice = torch.arange(12).repeat(2)
    doubled = loss_and_grad(log_probs[twice], entropy[twice], take(batch, twice))[2]
    assert doubled == pytest.approx(metrics, abs=1e-12)


@laws
@given(seeds, st.sampled_from(["k1", "k2", "k3"]))
def test_gradients_by_finite_differences(seed: int, estimator: str) -> None:
    log_probs, entropy, batch = random_batch(seed)
    objective = ALL_TERMS.model_copy(update={"kl_estimator": estimator})
    edges = t(0.8, 1.28).log()
    near = ((log_probs - batch.old_log_probs)[:, None] - edges).abs() < 1e-4
    log_probs = torch.where(near.any(1), log_probs + 1e-2, log_probs)  # the clip has a kink at its edges

    def f(x: Tensor) -> Tensor:
        return tandem_loss(x, entropy, batch, denominators(batch), objective, OPD)[0]

    assert torch.autograd.gradcheck(f, (log_probs.requires_grad_(),), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("extreme", [200.0, -200.0, 1e4, -1e4])
@pytest.mark.parametrize("clip", [None, 10.0])
def test_extreme_ratios_on_weightless_tokens_give_no_nan(
    dtype: torch.dtype, extreme: float, clip: float | None
) -> None:
    """A junior token may be all but impossible to the senior, the teacher and the start weights."""
    old = torch.tensor([-1.0, -1.0 - abs(extreme)], dtype=dtype)
    new = torch.tensor([-1.0, -1.0 - abs(extreme) + extreme], dtype=dtype)
    zero, first = torch.zeros(2, dtype=dtype), torch.tensor([1.0, 0.0], dtype=dtype)
    far = new - extreme * (1 - first)
    batch = PackedTokens(old, torch.ones(2, dtype=dtype), first, first, zero - first, ref_log_probs=far)
    loss, grad, metrics = loss_and_grad(new, zero, batch, Denominators(1, 1), ALL_TERMS, OpdConfig(clip=clip))
    assert math.isfinite(loss)
    assert all(map(math.isfinite, metrics.values()))
    assert grad[1].item() == 0.0
    assert grad[0].item() != 0.0


def test_the_kl_term_keeps_to_its_own_weights() -> None:
    """An aligned token without policy-gradient weight may be any distance from the start weights."""
    old = torch.tensor([-1.0, -1.0])
    batch = PackedTokens(
        old, torch.ones(2), torch.tensor([1.0, 0.0]), torch.ones(2), old - 1, ref_log_probs=torch.tensor([-1.0, 500.0])
    )
    loss, grad, metrics = loss_and_grad(old, torch.zeros(2), batch)
    assert metrics["kl_loss"] == 0.0
    assert math.isfinite(loss)
    assert torch.isfinite(grad).all()


def test_a_micro_batch_without_weight_is_zero_not_nan() -> None:
    log_probs, entropy, batch = random_batch(1)
    nothing = torch.zeros_like(batch.weights)
    empty = dataclasses.replace(batch, weights=nothing, opd_weights=nothing)
    loss, grad, metrics = loss_and_grad(log_probs, entropy, empty)
    assert loss == 0.0
    assert (grad == 0).all()
    assert set(metrics.values()) == {0.0}


def test_one_step_moves_a_policy_as_the_advantages_say() -> None:
    """From logits to loss: with reward 1 on token 0 and 0 on token 1 of a uniform policy, token 0 gains."""
    logits = torch.zeros(2, 4, dtype=F64, requires_grad=True)
    tokens = torch.tensor([0, 1])
    lp = torch.log_softmax(logits, -1).gather(-1, tokens[:, None]).squeeze(-1)
    batch = PackedTokens(lp.detach(), t(0.5, -0.5), t(1, 1), t(0, 0), t(0, 0))
    loss, _ = tandem_loss(lp, t(0, 0), batch, Denominators(2, 1e-8), ObjectiveConfig(), NO_OPD)
    (g,) = torch.autograd.grad(loss, logits)
    assert g[0, 0] < 0 < g[1, 1]
    torch.testing.assert_close(g.sum(-1), t(0, 0))
