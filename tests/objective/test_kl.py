"""KL estimators against the exact KL of a small vocabulary, summed over all of it."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_tandem.config import KlEstimator, ObjectiveConfig
from slime_tandem.errors import DataError
from slime_tandem.objective.kl import above_guard, adapted_coef, kl_estimate, sampled_kl

V = 7
logits = st.lists(st.floats(-4, 4), min_size=V, max_size=V)


def log_p(values: list[float]) -> Tensor:
    return torch.log_softmax(torch.tensor(values, dtype=torch.float64), -1)


@given(logits, logits)
def test_k1_and_k3_are_unbiased_and_k2_is_the_squared_half(a: list[float], b: list[float]) -> None:
    """E over tokens sampled from pi, exactly: the sum over the vocabulary weighted with pi."""
    pi, ref = log_p(a), log_p(b)
    exact = (pi.exp() * (pi - ref)).sum().item()
    for estimator in ("k1", "k3"):
        expectation = (pi.exp() * kl_estimate(pi, ref, estimator)).sum().item()  # type: ignore[arg-type]
        assert expectation == pytest.approx(exact, abs=1e-12)
    k2 = (pi.exp() * kl_estimate(pi, ref, "k2")).sum().item()
    assert k2 == pytest.approx((pi.exp() * (pi - ref) ** 2).sum().item() / 2, abs=1e-12)


@given(logits, logits)
def test_k2_and_k3_are_never_negative(a: list[float], b: list[float]) -> None:
    for estimator in ("k2", "k3"):
        assert (kl_estimate(log_p(a), log_p(b), estimator) >= 0).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_equal_distributions_have_no_kl(estimator: KlEstimator) -> None:
    x = torch.tensor([-0.1, -3.0, -20.0])
    assert kl_estimate(x, x.clone(), estimator).tolist() == [0.0, 0.0, 0.0]


def test_closed_forms_by_hand() -> None:
    """r = ln 2 and r = -ln 2."""
    pi, ref = torch.tensor([0.5, 0.25]).double().log(), torch.tensor([0.25, 0.5]).double().log()
    r = math.log(2)
    assert kl_estimate(pi, ref, "k1").tolist() == pytest.approx([r, -r])
    assert kl_estimate(pi, ref, "k2").tolist() == pytest.approx([r * r / 2, r * r / 2])
    assert kl_estimate(pi, ref, "k3").tolist() == pytest.approx([0.5 - 1 + r, 2 - 1 - r])


@pytest.mark.parametrize(
    ("estimator", "slope"), [("k1", lambda r: 1.0), ("k2", lambda r: r), ("k3", lambda r: 1 - math.exp(-r))]
)
@pytest.mark.parametrize("r", [-1.5, -0.1, 0.0, 0.4, 2.0])
def test_gradients_by_hand(estimator: KlEstimator, slope: object, r: float) -> None:
    x = torch.tensor([r - 3.0], dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(kl_estimate(x, torch.tensor([-3.0], dtype=torch.float64), estimator).sum(), x)
    assert g.item() == pytest.approx(slope(r), abs=1e-12)  # type: ignore[operator]


@settings(deadline=None, max_examples=25)
@given(logits, logits)
def test_gradients_by_finite_differences(a: list[float], b: list[float]) -> None:
    x = log_p(a).requires_grad_()
    for estimator in get_args(KlEstimator):
        assert torch.autograd.gradcheck(lambda y, e=estimator: kl_estimate(y, log_p(b), e), (x,))


def test_k3_is_accurate_near_zero() -> None:
    """exp(-r) - 1 + r in float32 would be all rounding at r = 1e-3; its value is r^2 / 2."""
    k3 = kl_estimate(torch.tensor([-1.0 + 1e-3]), torch.tensor([-1.0]), "k3").item()
    assert k3 == pytest.approx(5e-7, rel=0.25)
    assert k3 >= 0


ADAPTIVE = ObjectiveConfig(kl_coef=0.1, kl_target=0.05, kl_coef_min=0.05, kl_coef_max=0.3)


@given(st.floats(0.05, 0.3), st.floats(-1, 10))
def test_the_coefficient_follows_the_target_within_its_bounds(coef: float, kl: float) -> None:
    after = adapted_coef(coef, kl, ADAPTIVE)
    assert 0.05 <= after <= 0.3
    if kl > 0.05:
        assert after >= coef
    elif kl < 0.05:
        assert after <= coef
    unbounded = adapted_coef(coef, kl, ADAPTIVE.model_copy(update={"kl_coef_min": 1e-9, "kl_coef_max": 1e9}))
    expected = 2.0 if kl > 0.1 else math.exp(min(max((kl - 0.05) / 0.05, -0.2), 0.2))
    assert unbounded == pytest.approx(coef * expected)


def test_the_guard_stands_at_twice_the_target() -> None:
    assert not above_guard(0.1, ADAPTIVE)
    assert above_guard(0.1001, ADAPTIVE)
    fixed = ObjectiveConfig(kl_coef=0.1)
    assert not above_guard(1e9, fixed)
    assert adapted_coef(0.1, 1e9, fixed) == 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_kl_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(DataError, match="KL per token"):
        adapted_coef(0.1, bad, ADAPTIVE)
    with pytest.raises(DataError, match="KL of a response"):
        sampled_kl(np.array([bad]), np.zeros(1), np.ones(1), "k1")


def test_the_kl_of_a_response_is_a_weighted_sum() -> None:
    pi, ref, weights = np.array([-1.0, -2.0, -3.0]), np.array([-1.5, np.nan, -2.0]), np.array([1.0, 0.0, 0.5])
    assert sampled_kl(pi, ref, weights, "k1") == pytest.approx(0.5 - 0.5)
    assert sampled_kl(pi, ref, weights, "k2") == pytest.approx(0.125 + 0.25)
    assert sampled_kl(np.zeros(0), np.zeros(0), np.zeros(0), "k3") == 0.0


@given(logits, logits)
def test_what_each_estimator_pulls_to_as_a_loss(a: list[float], b: list[float]) -> None:
    """Expected gradient on the logits over the policy's own tokens: nothing, that of KL(pi || ref), that of KL(ref || pi)."""
    ref = log_p(b)
    for estimator in get_args(KlEstimator):
        x = torch.tensor(a, dtype=torch.float64, requires_grad=True)
        pi = torch.log_softmax(x, -1)
        (pulled,) = torch.autograd.grad(
            (pi.detach().exp() * kl_estimate(pi, ref, estimator)).sum(), x, retain_graph=True
        )
        divergence = {
            "k1": 0 * pi.sum(),
            "k2": (pi.exp() * (pi - ref)).sum(),
            "k3": (ref.exp() * (ref - pi)).sum(),
        }[estimator]
        (exact,) = torch.autograd.grad(divergence, x)
        torch.testing.assert_close(pulled, exact, atol=1e-9, rtol=1e-9)
