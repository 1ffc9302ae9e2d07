"""The figures by hand, and the KL estimators against exact values of two real (tiny) models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_tandem.evaluation.figures import (
    TITLES,
    Figure,
    drift_figures,
    handoff_figures,
    legibility_figures,
    set_figures,
    solo_figures,
    transfer_figures,
    undefined,
)
from slime_tandem.evaluation.scoring import Reading
from slime_tandem.report.statistics import bootstrap
from slime_tandem.types import AuthorRun, FinishReason, Prompt, SampleKey, TandemSample


def sample(mask: tuple[int, ...], finish: FinishReason = "stop") -> TandemSample:
    n = len(mask)
    run = (AuthorRun(1, 0, n, "v"),)
    return TandemSample(
        SampleKey(0, 0, 0), 0, Prompt("p", (), None, "t"), (0,), (5,) * n, mask, (-1.0,) * n, finish, "", run
    )


def values(figures: list[Figure]) -> dict[str, float | None]:
    estimates = bootstrap({f.name: f.ratio for f in figures}, resamples=100, seed=0)
    return {name: e.value for name, e in estimates.items()}


def test_solo_by_hand() -> None:
    samples = [sample((1, 1)), sample((1,) * 4, "length"), sample((1,) * 3), sample((1,) * 3)]
    got = values(solo_figures(samples, [True, False, False, False], chains=2))
    assert got == {"solo/pass@1": 0.25, "solo/pass@2": 0.5, "solo/response_tokens": 3.0, "solo/truncated": 0.25}


def test_handoff_by_hand() -> None:
    samples = [sample((1, 1, 0, 1)), sample((1, 1)), sample((1, 0)), sample((1, 1, 0, 0))]
    solo = [True, True, False, True]
    got = values(handoff_figures(samples, [False, True, False, True], solo, chains=2))
    assert got == {
        "handoff/pass@1": 0.5,
        "handoff/pass@2": 1.0,
        "handoff/retention@1": pytest.approx(0.5 / 0.75),
        "handoff/difference@1": -0.25,
        "handoff/retention@2": 1.0,
        "handoff/difference@2": 0.0,
        "handoff/chains_with_handoff": 0.75,
        "handoff/per_chain": 1.0,
        "handoff/senior_token_fraction": pytest.approx(8 / 12),
        "handoff/response_tokens": 3.0,
        "handoff/truncated": 0.0,
    }


def test_each_set_and_the_macro_average_by_hand() -> None:
    """One prompt of aime, three of amc: the mean over prompts counts amc three times, the macro average once."""
    right = [True, True, *[False, True], *[False, False], *[False, False]]
    got = values(set_figures("solo", right, ["aime", "amc", "amc", "amc"], chains=2))
    assert got == {
        "solo/aime/pass@1": 1.0,
        "solo/amc/pass@1": pytest.approx(0.5 / 3),
        "solo/macro/pass@1": pytest.approx((1 + 0.5 / 3) / 2),
        "solo/aime/pass@2": 1.0,
        "solo/amc/pass@2": pytest.approx(1 / 3),
        "solo/macro/pass@2": pytest.approx(2 / 3),
    }
    assert set_figures("solo", right, ["amc"] * 4, chains=2) == []


def test_retention_is_undefined_where_solo_is_never_right() -> None:
    samples = [sample((1, 0)), sample((1, 0))]
    got = values(handoff_figures(samples, [True, False], [False, False], chains=1))
    assert got["handoff/retention@1"] is None
    assert got["handoff/difference@1"] == 0.5


def test_drift_by_hand() -> None:
    """Log-ratios 1, 0, -1 over three tokens of two prompts: a mean over tokens, not over responses."""
    senior = [np.array([-1.0, -2.0]), np.array([-3.0])]
    junior = [np.array([-2.0, -2.0]), np.array([-2.0])]
    got = values(drift_figures(senior, junior, 1, part="drift"))
    assert got["drift/k1"] == pytest.approx(0.0)
    assert got["drift/k3"] == pytest.approx((np.exp(-1) + 0.0 + (np.e - 2)) / 3)


def test_drift_from_the_start_is_the_same_under_its_own_name() -> None:
    got = values(drift_figures([np.array([-1.0, -2.0])], [np.array([-2.0, -2.5])], 1, part="start"))
    assert got["start/k1"] == pytest.approx(0.75)
    assert set(got) == {"start/k1", "start/k3"}


def test_transfer_by_hand() -> None:
    """Two prompts, two chains: three of four right from the half, one of four alone; paired by sample."""
    got = values(transfer_figures([True, True, False, True], [False, True, False, False], chains=2))
    assert got == {"transfer/half": 0.75, "transfer/alone": 0.25, "transfer/gain": 0.5}


def test_legibility_by_hand() -> None:
    readings = [
        Reading((0,), (4, 5, 2), np.array([True, True, False]), 5),  # the end of turn is no text
        Reading((0,), (6,), np.array([True]), 2),
        Reading((0,), (2,), np.array([False]), 0),
        Reading((0,), (), np.zeros(0, np.bool_), 0),
    ]
    scores = [np.array([-1.0, -2.0, -9.0]), np.array([-4.0]), np.array([-9.0]), np.zeros(0)]
    got = values(legibility_figures(readings, scores, chains=2))
    assert got == {"legibility/nats_per_token": -7.0 / 3, "legibility/nats_per_byte": -1.0}
    assert set(values(legibility_figures(readings[2:], scores[2:], chains=2)).values()) == {None}


def test_what_could_not_be_measured_keeps_its_names() -> None:
    named = {r.name for part in TITLES for r in undefined(part, "why")}
    assert named == {
        "teacher/k1",
        "solo/pass@1", "handoff/pass@1", "handoff/retention@1", "drift/k1", "drift/k3", "legibility/nats_per_token",
        "legibility/nats_per_byte", "transfer/half", "transfer/alone", "transfer/gain", "start/k1", "start/k3",
    }  # fmt: skip
    assert all(r.estimate.reason == "why" and r.estimate.value is None for r in undefined("drift", "why"))


@pytest.fixture(scope="module")
def distributions(trio):  # type: ignore[no-untyped-def]
    """Log-probs [T, V] of senior and junior in the same 24 contexts, straight from transformers."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[(7 * i) % 290 + 3 for i in range(24)]])
    out = []
    for folder in (trio.senior, trio.junior):
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            out.append(torch.log_softmax(model(ids).logits[0].double(), dim=-1).numpy())
    return out


def test_both_estimators_have_the_exact_kl_as_their_mean(distributions) -> None:  # type: ignore[no-untyped-def]
    """Summed over the whole vocabulary with the senior's probabilities, each gives KL(senior || junior) exactly."""
    p, q = (d.reshape(-1) for d in distributions)
    exact = float(np.exp(p) @ (p - q))
    assert exact > 0.1, "two models that agree would make this blind"
    every_token = drift_figures(
        list(p[:, None]), list(q[:, None]), 1, part="drift"
    )  # as if each were a response of one token
    for figure in every_token:
        assert float(np.exp(p) @ figure.ratio.numerator) == pytest.approx(exact, rel=1e-9), figure.name


def test_sampled_estimates_come_to_the_exact_kl_within_their_error(distributions) -> None:  # type: ignore[no-untyped-def]
    p, q = distributions
    exact = float((np.exp(p) * (p - q)).sum(axis=1).mean())
    rng = np.random.default_rng(0)
    draws = 4000
    tokens = np.stack([rng.choice(p.shape[1], size=draws, p=np.exp(row) / np.exp(row).sum()) for row in p], axis=1)
    at = np.arange(len(p))
    senior, junior = [p[at, row] for row in tokens], [q[at, row] for row in tokens]
    figures = drift_figures(senior, junior, 1, part="drift")
    estimates = bootstrap({f.name: f.ratio for f in figures}, resamples=400, seed=0)
    for name, e in estimates.items():
        assert e.value is not None
        assert e.low is not None
        assert e.high is not None
        assert abs(e.value - exact) < 2 * (e.high - e.low), name
        assert (e.high - e.low) < exact, "narrow enough to tell"
    # Tokens of a truncated distribution would not do: the estimate is then of something else.
    greedy = drift_figures([p.max(axis=1)], [q[at, p.argmax(axis=1)]], 1, part="drift")
    off = float(greedy[0].ratio.numerator[0]) / len(p)
    assert abs(off - exact) > 4 * (estimates["drift/k1"].high - estimates["drift/k1"].low)
