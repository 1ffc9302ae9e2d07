"""The loss: by hand, by law, and by finite differences."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_tandem.config import ObjectiveConfig, OpdConfig
from slime_tandem.errors import DataError
from slime_tandem.objective.loss import (
    LOSS_METRICS,
    Denominators,
    PackedTokens,
    clipped_surrogate,
    sequence_sums,
    tandem_loss,
)

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


# ---- surrogates, ratios, reductions, importance weights ----

SEQUENCES = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2])
LENGTH = 9


def full_batch(
    seed: int, objective: ObjectiveConfig, **spread: float
) -> tuple[Tensor, Tensor, PackedTokens, Denominators]:
    """Three responses with one advantage each, an empty fourth, the engine's log-probs, and the junior's of its tokens."""
    log_probs, entropy, batch = random_batch(seed, **spread)
    g = torch.Generator().manual_seed(seed + 1)
    junior = (batch.weights == 0).double()
    batch = dataclasses.replace(
        batch,
        advantages=torch.randn(3, generator=g, dtype=F64)[SEQUENCES],
        sequences=SEQUENCES,
        rollout_log_probs=batch.old_log_probs + 0.4 * torch.randn(12, generator=g, dtype=F64),
        junior_weights=junior,
        junior_log_probs=batch.old_log_probs + torch.randn(12, generator=g, dtype=F64),
    )
    per_response = [float(batch.weights[i == SEQUENCES].sum()) for i in range(4)]
    den = Denominators.over(
        per_response, float(batch.opd_weights.sum()), float(junior.sum()), objective.reduction, LENGTH
    )
    return log_probs, entropy, batch, den


SETTINGS = [
    {"reduction": "sequence_mean"},
    {"reduction": "constant", "dual_clip": 1.6},
    {"ratio": "sequence", "reduction": "sequence_mean", "clip_low": 0.05, "clip_high": 0.05},
    {"rollout_weights": "truncated", "rollout_weight_max": 1.2},
    {"rollout_weights": "masked", "rollout_weight_min": 0.7, "rollout_weight_max": 1.4},
    {"lambda_jun": 0.4, "kl_in": "reward"},
    {"entropy_coef": 0.3, "reduction": "sequence_mean"},
]
STOPPED = [
    {"surrogate": "cispo"},
    {"surrogate": "cispo", "ratio": "sequence", "reduction": "sequence_mean"},
    {"ratio": "sequence", "rollout_weights": "truncated", "rollout_weight_max": 1.2},
]
"""A factor without gradient differs between the tokens of a response: the value has another slope than the update."""
objectives = st.sampled_from([*SETTINGS, *STOPPED]).map(lambda changes: ALL_TERMS.model_copy(update=changes))


def run(case: tuple[Tensor, Tensor, PackedTokens, Denominators], objective: ObjectiveConfig, **kwargs: object):  # type: ignore[no-untyped-def]
    log_probs, entropy, batch, den = case
    x = log_probs.detach().clone().requires_grad_()
    loss, metrics = tandem_loss(x, entropy, batch, den, objective, OPD, **kwargs)  # type: ignore[arg-type]
    loss.backward()
    return loss.item(), x.grad, metrics


@settings(deadline=None, max_examples=40)
@given(seeds, st.sampled_from(SETTINGS).map(lambda changes: ALL_TERMS.model_copy(update=changes)))
def test_every_setting_by_finite_differences(seed: int, objective: ObjectiveConfig) -> None:
    """The ratio of a response has the token-wise gradient of GSPO-token: with one advantage per response, the true one."""
    log_probs, entropy, batch, den = full_batch(seed, objective)
    # Away from the kinks: the clip's edges, for tokens and for responses.
    ratio = log_probs - batch.old_log_probs
    means = torch.stack([(ratio * batch.weights)[i == SEQUENCES].sum() for i in range(3)])
    means = means / torch.stack([batch.weights[i == SEQUENCES].sum() for i in range(3)]).clamp(min=1e-8)
    edges = [
        math.log(e) for e in (1 - objective.clip_low, 1 + objective.clip_high, objective.dual_clip or 1.9, 0.8, 1.28)
    ]
    assume(all(abs(float(v) - e) > 1e-4 for v in (*ratio, *means) for e in edges))

    def f(x: Tensor) -> Tensor:
        return tandem_loss(x, entropy, batch, den, objective, OPD)[0]

    assert torch.autograd.gradcheck(f, (log_probs.requires_grad_(),), eps=1e-6, atol=1e-6)


@laws
@given(seeds, objectives)
def test_any_setting_adds_up_over_micro_batches_of_whole_responses(seed: int, objective: ObjectiveConfig) -> None:
    log_probs, entropy, batch, den = full_batch(seed, objective)
    loss, grad, metrics = run((log_probs, entropy, batch, den), objective)
    parts = []
    for keep in ([2], [0, 1], []):
        i = torch.tensor([t for t in range(12) if int(SEQUENCES[t]) in keep], dtype=torch.long)
        parts.append(run((log_probs[i], entropy[i], take(batch, i), den), objective))
    assert sum(p[0] for p in parts) == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(torch.cat([parts[1][1], parts[0][1]]), grad)
    for name in LOSS_METRICS:
        assert sum(p[2][name] for p in parts) == pytest.approx(metrics[name], abs=1e-12)


@laws
@given(seeds, objectives, st.lists(st.booleans(), min_size=12, max_size=12))
def test_a_response_split_over_ranks_is_whole_with_summed_sums(
    seed: int, objective: ObjectiveConfig, on_second: list[bool]
) -> None:
    """Context parallelism: tokens of one response lie on two ranks; `sums` adds up over them, and nothing else has to."""
    log_probs, entropy, batch, den = full_batch(seed, objective)
    loss, grad, metrics = run((log_probs, entropy, batch, den), objective)
    second = torch.tensor(on_second)
    ranks = [(~second).nonzero().squeeze(-1), second.nonzero().squeeze(-1)]
    exchanged: list[list[Tensor]] = [[], []]  # what each rank gives to the k-th all-reduce
    results = []
    for last in (False, True):
        # Sums that depend on earlier sums would differ in the first pass; the second has the true ones.
        results = []
        for rank, i in enumerate(ranks):
            calls = iter(range(100))

            def sums(values: Tensor, sequences: Tensor, rank: int = rank, calls=calls) -> Tensor:  # type: ignore[no-untyped-def]
                local = sequence_sums(values.detach(), sequences, 3)
                k = next(calls)
                if not last:  # noqa: B023
                    exchanged[rank].append(local)
                    return local
                return exchanged[0][k] + exchanged[1][k]

            results.append(run((log_probs[i], entropy[i], take(batch, i), den), objective, sums=sums))
    assert sum(r[0] for r in results) == pytest.approx(loss, abs=1e-12)
    for i, r in zip(ranks, results, strict=True):
        torch.testing.assert_close(r[1], grad[i])
    for name in LOSS_METRICS:
        assert sum(r[2][name] for r in results) == pytest.approx(metrics[name], abs=1e-12)


@laws
@given(seeds, objectives)
def test_with_any_setting_weightless_tokens_may_hold_anything(seed: int, objective: ObjectiveConfig) -> None:
    case = full_batch(seed, objective)
    log_probs, entropy, batch, den = case
    idle = (batch.weights == 0) & (batch.opd_weights == 0)
    loss, grad, metrics = run(case, objective)
    nan = float("nan")
    other = dataclasses.replace(
        batch,
        old_log_probs=torch.where(idle, nan, batch.old_log_probs),
        rollout_log_probs=torch.where(idle, -1e4, batch.rollout_log_probs),  # type: ignore[arg-type]
        ref_log_probs=torch.where(idle, nan, batch.ref_log_probs),  # type: ignore[arg-type]
        advantages=torch.where(idle, nan, batch.advantages),
        junior_log_probs=torch.where(idle, batch.junior_log_probs, nan),  # type: ignore[arg-type]
    )
    changed = run((log_probs, torch.where(idle, nan, entropy), other, den), objective)
    assert changed[0] == loss
    assert torch.equal(changed[1], grad)
    assert changed[2] == metrics
    if objective.lambda_jun == 0:
        assert (grad[idle] == 0).all()


def test_the_entropy_bonus_by_hand() -> None:
    """Two responses, the junior's token counts nowhere: 0.5 * the mean of 1, 2 and 6, or of the responses' means 1.5 and 6."""
    log_probs = t(-1.0, -1.0, -1.0, -1.0)
    batch = PackedTokens(log_probs, t(0, 0, 0, 0), t(1, 1, 0, 1), t(0, 0, 0, 0), t(0, 0, 0, 0))
    batch = dataclasses.replace(batch, sequences=torch.tensor([0, 0, 0, 1]))
    for reduction, bonus, slopes in (
        ("token_mean", 1.5, [1 / 6, 1 / 6, 0, 1 / 6]),
        ("sequence_mean", 1.875, [1 / 8, 1 / 8, 0, 1 / 4]),
        ("constant", 0.5 * 9 / 20, [1 / 40, 1 / 40, 0, 1 / 40]),
    ):
        objective = ObjectiveConfig(entropy_coef=0.5, reduction=reduction)
        den = Denominators.over([2, 1], 0, 0, objective.reduction, 10)
        entropy = t(1.0, 2.0, float("nan"), 6.0).requires_grad_()
        loss, metrics = tandem_loss(log_probs, entropy, batch, den, objective, NO_OPD)
        loss.backward()
        assert loss.item() == -bonus
        assert metrics["entropy_bonus"] == bonus
        assert entropy.grad is not None
        assert (-entropy.grad).tolist() == pytest.approx(slopes)
    assert run((log_probs, t(1, 2, 3, 6), batch, den), ObjectiveConfig())[2]["entropy_bonus"] == 0.0


def test_reductions_by_hand() -> None:
    """Responses of 3 and 1 tokens, a junior token among them, and an empty one; ratio 1, so that a term is -A."""
    old = t(-1, -1, -1, -1)
    batch = PackedTokens(old, t(2, 2, 2, -1), t(1, 1, 0, 1), t(0, 0, 0, 0), old, sequences=torch.tensor([0, 0, 0, 1]))
    expected = {"token_mean": (-2 - 2 + 1) / 3, "sequence_mean": (-2 + 1) / 2, "constant": (-2 - 2 + 1) / (3 * 8)}
    for reduction, value in expected.items():
        objective = ObjectiveConfig(reduction=reduction)  # type: ignore[arg-type]
        den = Denominators.over([2, 1, 0], 0, 0, objective.reduction, 8)
        loss, _, metrics = loss_and_grad(old, t(4, 4, 9, 1), batch, den, objective, NO_OPD)
        assert loss == pytest.approx(value)
        assert metrics["entropy"] == pytest.approx(3), "metrics are token means with any reduction"


def test_the_dual_clip_bounds_what_a_bad_action_costs() -> None:
    x = t(math.log(9.0), math.log(2.0), math.log(9.0)).requires_grad_()
    out = clipped_surrogate(x.exp(), t(-1, -1, 1), 0.2, 0.28, 3.0)
    assert out.tolist() == pytest.approx([3.0, 2.0, -1.28])
    (g,) = torch.autograd.grad(out.sum(), x)
    assert g.tolist() == pytest.approx([0.0, 2.0, 0.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    """Weight min(ratio, 1 + clip_high) without a gradient of its own, times A, times the gradient of log pi."""
    old = t(-1, -2, -1)
    new = old + t(5.0, 0.1, 1.1).log()
    batch = PackedTokens(old, t(1, 2, -3), t(1, 1, 1), t(0, 0, 0), old)
    objective = ObjectiveConfig(surrogate="cispo")
    loss, grad, metrics = loss_and_grad(new, t(0, 0, 0), batch, Denominators(3, 1), objective, NO_OPD)
    coefficients = [-1.28 * 1, -0.1 * 2, 1.1 * 3]
    assert grad.tolist() == pytest.approx([c / 3 for c in coefficients])
    assert loss == pytest.approx(sum(c * v for c, v in zip(coefficients, new.tolist(), strict=True)) / 3)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3), "no lower bound"


def test_the_ratio_of_a_response_is_its_weighted_geometric_mean() -> None:
    old = t(-1, -1, -1, -1)
    new = old + t(2.0, 0.5, 1.21, 77.0).log()
    batch = PackedTokens(old, t(1, 1, 1, 1), t(1, 1, 2, 0), t(0, 0, 0, 0), old, sequences=torch.tensor([0, 0, 0, 0]))
    objective = ObjectiveConfig(ratio="sequence")
    _, grad, metrics = loss_and_grad(new, t(0, 0, 0, 0), batch, Denominators(4, 1), objective, NO_OPD)
    assert metrics["ratio_mean"] == pytest.approx(1.1)
    assert grad.tolist() == pytest.approx([-1.1 / 4, -1.1 / 4, -2.2 / 4, 0])


@pytest.mark.parametrize(("mode", "weights"), [("truncated", [2.0, 0.25, 1.0]), ("masked", [0.0, 0.0, 1.0])])
def test_importance_weights_by_hand(mode: str, weights: list[float]) -> None:
    """Trainer over engine: 4, 1/4, 1. They scale the reward's term and the distillation's, not the KL."""
    old = t(-1, -1, -1)
    batch = PackedTokens(
        old,
        t(1, 1, 1),
        t(1, 1, 1),
        t(1, 1, 1),
        old - 2,
        ref_log_probs=old - 1,
        rollout_log_probs=old - t(4, 0.25, 1).log(),
    )
    objective = ObjectiveConfig(rollout_weights=mode, kl_coef=1.0)  # type: ignore[arg-type]
    _, _, metrics = loss_and_grad(old, t(0, 0, 0), batch, Denominators(3, 3), objective, OpdConfig(coef=0.5))
    assert metrics["pg_loss"] == pytest.approx(-sum(weights) / 3)
    assert metrics["opd_loss"] == pytest.approx(0.5 * 2 * sum(weights) / 3)
    assert metrics["kl_loss"] == pytest.approx(math.exp(-1))
    assert metrics["rollout_weight_mean"] == pytest.approx(sum(weights) / 3)
    assert metrics["rollout_weight_cut"] == pytest.approx({"truncated": 1, "masked": 2}[mode] / 3)
    assert metrics["logprob_diff"] == pytest.approx(2 * math.log(4) / 3), "trainer against engine, not against itself"


def test_the_pull_toward_the_junior_is_the_kl_that_it_says() -> None:
    """Expectation over what the junior samples: value KL(junior || senior), gradient -junior + senior on the logits."""
    g = torch.Generator().manual_seed(3)
    junior = torch.log_softmax(torch.randn(7, generator=g, dtype=F64), -1)
    logits = torch.randn(7, generator=g, dtype=F64).requires_grad_()
    senior = torch.log_softmax(logits, -1)
    zero = torch.zeros(7, dtype=F64)
    # Each token once, weighted with the junior's probability: the expectation itself.
    batch = PackedTokens(zero, zero, zero, zero, zero, junior_weights=junior.exp(), junior_log_probs=junior)
    objective = ObjectiveConfig(lambda_jun=0.5)
    loss, metrics = tandem_loss(senior, zero, batch, Denominators(1, 1, 1.0), objective, NO_OPD)
    exact = float((junior.exp() * (junior - senior.detach())).sum())
    assert metrics["junior_kl"] == pytest.approx(exact)
    assert loss.item() == pytest.approx(0.5 * exact)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, 0.5 * (senior.detach().exp() - junior.exp()))


def test_the_adapted_coefficient_replaces_the_first_one() -> None:
    log_probs, entropy, batch = random_batch(4)
    den = denominators(batch)
    _, first = tandem_loss(log_probs, entropy, batch, den, ALL_TERMS, OPD)
    _, later = tandem_loss(log_probs, entropy, batch, den, ALL_TERMS, OPD, kl_coef=0.9)
    assert later["kl_loss"] == pytest.approx(3 * first["kl_loss"])
    assert later["kl"] == first["kl"] == pytest.approx(first["kl_loss"] / 0.3)


BAD = [
    ("log_probs", {}, float("nan"), r"log_probs\[0\]=nan"),
    ("log_probs", {}, float("-inf"), r"log_probs\[0\]=-inf"),
    ("old_log_probs", {}, float("-inf"), r"old_log_probs\[0\]=-inf"),
    ("rollout_log_probs", {"rollout_weights": "truncated"}, float("nan"), r"rollout_log_probs\[0\]=nan"),
    ("advantages", {}, float("inf"), r"advantages\[0\]=inf"),
    ("teacher_log_probs", {}, float("nan"), r"teacher_log_probs\[0\]=nan"),
    ("ref_log_probs", {}, float("-inf"), r"ref_log_probs\[0\]=-inf"),
    ("entropy", {}, float("nan"), r"entropy\[0\]=nan"),
    ("log_probs", {}, 800.0, r"loss=.*expected finite terms and ratios"),
]


@pytest.mark.parametrize(("field", "changes", "value", "message"), BAD)
def test_a_value_that_is_no_number_where_it_counts_is_refused(
    field: str, changes: dict[str, object], value: float, message: str
) -> None:
    objective = ALL_TERMS.model_copy(update=changes)
    log_probs, entropy, batch, den = full_batch(7, objective)
    batch = dataclasses.replace(batch, weights=torch.ones(12, dtype=F64), advantages=-batch.advantages.abs())
    inputs = {"log_probs": log_probs.clone(), "entropy": entropy.clone()}
    if field in inputs:
        inputs[field][0] = value
    else:
        changed = getattr(batch, field).clone()
        changed[0] = value
        batch = dataclasses.replace(batch, **{field: changed})
    with pytest.raises(DataError, match=message):
        tandem_loss(inputs["log_probs"], inputs["entropy"], batch, den, objective, OPD)


def test_a_candidate_that_the_policy_does_not_know_is_named() -> None:
    batch = PackedTokens(t(-1.0, -1.0), t(1.0, 1.0), t(0.0, 1.0), t(1.0, 1.0), t(-1.0, -1.0))
    ids = torch.tensor([[-1], [9]])
    batch = dataclasses.replace(batch, candidate_ids=ids, candidate_teacher=t(-1.0, -1.0)[:, None])
    candidates = t(float("nan"), float("nan"))[:, None]  # of the first, which is none, nothing is asked
    opd = OPD.model_copy(update={"signal": "forward_kl"})
    with pytest.raises(DataError, match=r"sum of candidates' log_probs\[1\]=nan.*\(1 are not\).*beyond the vocabulary"):
        tandem_loss(t(-1.0, -1.0), t(0.0, 0.0), batch, denominators(batch), ObjectiveConfig(), opd, candidates)


@pytest.mark.parametrize("change", [{}, {"surrogate": "cispo"}, {"ratio": "sequence"}])
def test_a_ratio_out_of_range_on_a_token_of_the_distillation_alone_is_refused(change: dict[str, str]) -> None:
    """Clipped, its value is finite; its gradient would be 0 * inf."""
    batch = PackedTokens(t(-800.0, -1.0), t(1.0, 1.0), t(0.0, 1.0), t(1.0, 1.0), t(-700.0, -1.0))
    batch = dataclasses.replace(batch, sequences=torch.tensor([0, 0]))
    with pytest.raises(DataError, match=r"loss=.*expected finite terms and ratios"):
        tandem_loss(t(-1.0, -1.0), t(0.0, 0.0), batch, denominators(batch), ObjectiveConfig(**change), OPD)  # type: ignore[arg-type]
