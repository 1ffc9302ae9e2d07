"""pass@k against counting by hand, laws of the intervals, and each against scipy or statsmodels where they have it."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.proportion import confint_proportions_2indep

from slime_tandem.report.statistics import (
    LEVEL,
    Z95,
    Ratio,
    bootstrap,
    difference_interval,
    holm,
    mean_interval,
    of_runs,
    paired_interval,
    pass_at_k,
    pass_ks,
    ratio_difference,
    resampled_means,
)

FINITE, COUNTS = st.floats(-10, 10), st.integers(1, 50)


def one(numerator, denominator=None, *, resamples: int = 500, seed: int = 0):  # type: ignore[no-untyped-def]
    ratio = Ratio(
        np.asarray(numerator, np.float64), None if denominator is None else np.asarray(denominator, np.float64)
    )
    return bootstrap({"x": ratio}, resamples=resamples, seed=seed)["x"]


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (8, 0, 8, 0.0),
        (8, 1, 1, 1 / 8),
        (8, 1, 8, 1.0),
        (4, 2, 2, 1 - 1 / 6),  # 1 of the 6 pairs holds none of the two right ones
        (5, 3, 2, 1 - 1 / 10),
        (10, 3, 5, 1 - 21 / 252),
        (3, 2, 2, 1.0),  # fewer wrong ones than k
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(np.array([c]), n, k)[0] == pytest.approx(expected, abs=1e-15)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_one(ncks: tuple[int, int, int]) -> None:
    n, c, k = ncks
    right = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(np.array([c]), n, k)[0] == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_unbiased(k: int) -> None:
    """Its mean over binomial counts is 1 - (1 - p)^k exactly."""
    n, p = 7, 0.3
    weights = np.array([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)])
    assert weights @ pass_at_k(np.arange(n + 1), n, k) == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_stays_exact_for_many_chains() -> None:
    values = pass_at_k(np.arange(1025), 1024, 512)
    assert (np.diff(values) >= 0).all()
    assert values[0] == 0.0
    assert values[1] == 0.5
    assert pass_ks(1024) == tuple(2**i for i in range(11))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.integers(0, 2**62))
def test_the_same_seed_gives_the_same_interval_around_the_mean(values: list[float], seed: int) -> None:
    first, again = (one(values, resamples=100, seed=seed) for _ in range(2))
    assert first == again
    assert first.value == pytest.approx(np.mean(values))
    assert first.low is not None
    assert first.high is not None
    assert min(values) - 1e-12 <= first.low <= first.high <= max(values) + 1e-12


def test_another_seed_gives_another_interval() -> None:
    values = np.random.default_rng(1).normal(size=50)
    assert one(values, seed=1).low != one(values, seed=2).low


@given(st.floats(-1e6, 1e6, allow_subnormal=False), st.integers(1, 40), st.floats(0.001, 1e3))
def test_constant_data_gives_an_interval_of_no_width(value: float, n: int, per: float) -> None:
    mean, ratio = one([value] * n, resamples=100), one([value] * n, [per] * n, resamples=100)
    assert (mean.value, mean.low, mean.high) == (value, value, value)
    assert (ratio.value, ratio.low, ratio.high) == (value / per,) * 3


@given(st.lists(st.floats(0.1, 1), min_size=2, max_size=40))
def test_a_figure_over_itself_is_exactly_one_in_every_resample(values: list[float]) -> None:
    e = one(values, values, resamples=100)
    assert (e.value, e.low, e.high) == (1.0, 1.0, 1.0)


def test_retention_is_paired_by_prompt() -> None:
    """Hand over 0.9 of a score that differs widely between prompts: the ratio's interval knows which belong together."""
    rng = np.random.default_rng(3)
    solo = rng.uniform(0.05, 1.0, size=60)
    handoff = 0.9 * solo
    paired = one(handoff, solo)
    assert paired.low is not None
    assert paired.high is not None
    assert paired.high - paired.low < 1e-12
    assert paired.value == pytest.approx(0.9)
    shuffled = one(handoff, rng.permutation(solo))
    assert shuffled.high is not None
    assert shuffled.low is not None
    assert shuffled.high - shuffled.low > 0.1, "the same numbers without the pairing"


def test_figures_share_their_resamples() -> None:
    x = np.random.default_rng(4).uniform(size=30)
    together = bootstrap({"up": Ratio(x), "down": Ratio(-x)}, resamples=301, seed=5)
    assert together["up"].low == -together["down"].high  # type: ignore[operator]
    assert together["up"] == one(x, resamples=301, seed=5)


def test_a_ratio_is_one_of_sums_not_a_mean_of_ratios() -> None:
    assert one([1, 30], [1, 10]).value == pytest.approx(31 / 11)


@pytest.mark.parametrize("sampler", ["normal", "bernoulli", "ratio"])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(sampler: str) -> None:
    rng = np.random.default_rng(7)
    hits, trials, n = 0, 300, 80
    for seed in range(trials):
        if sampler == "ratio":
            lengths = rng.integers(1, 20, size=n)
            e, truth = one(lengths * rng.normal(2.0, 1.0, size=n), lengths, resamples=300, seed=seed), 2.0
        elif sampler == "normal":
            e, truth = one(rng.normal(3.0, 2.0, size=n), resamples=300, seed=seed), 3.0
        else:
            e, truth = one(rng.random(n) < 0.4, resamples=300, seed=seed), 0.4
        assert e.low is not None
        assert e.high is not None
        hits += e.low <= truth <= e.high
    assert 0.90 < hits / trials < 0.985


def test_the_width_is_that_of_the_normal_approximation() -> None:
    x = np.random.default_rng(8).normal(size=2000)
    e = one(x, resamples=4000)
    assert e.low is not None
    assert e.high is not None
    expected = 2 * NormalDist().inv_cdf(0.975) * x.std() / math.sqrt(len(x))
    assert e.high - e.low == pytest.approx(expected, rel=0.05)


def test_a_zero_denominator_is_said_not_hidden() -> None:
    nothing = one([0.0, 0.0], [0.0, 0.0])
    assert (nothing.value, nothing.low, nothing.high) == (None, None, None)
    assert nothing.reason == "the denominator is 0"
    # One prompt of two decides: a quarter of the resamples leave it out.
    rare = one([0.5, 0.0], [1.0, 0.0], resamples=2000)
    assert rare.value == 0.5
    assert (rare.low, rare.high) == (None, None)
    assert rare.reason is not None
    assert 22.0 < float(rare.reason.split()[5].rstrip("%")) < 28.0


def test_a_rare_zero_denominator_widens_both_ends() -> None:
    """Three of ten prompts count: (7/10)^10 = 2.8% of the resamples have none; eight of ten: practically none."""
    ones = np.ones(10)
    three, eight = (np.arange(10) < m for m in (3, 8))
    assert one(three, three).low is None
    assert one(ones * eight, eight) == one(ones, ones)


def test_blocks_of_resamples_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_tandem.report import statistics

    x = np.random.default_rng(9).normal(size=33)
    whole = one(x)
    monkeypatch.setattr(statistics, "_COUNTS_AT_ONCE", 100)
    blocks = one(x)
    assert (blocks.low, blocks.high) == (pytest.approx(whole.low), pytest.approx(whole.high))


def test_runs_are_resampled_whole_and_their_prompts_within() -> None:
    """Without spread between runs the interval is that of the prompts; without spread within, that of the runs."""
    rng = np.random.default_rng(1)
    within = [(rng.random(400) < 0.5).astype(np.float64)] * 25
    e = of_runs([Ratio(x) for x in within], resamples=2000, seed=0)
    standard = within[0].std() / math.sqrt(400 * 25)
    assert e.low is not None
    assert e.high is not None
    assert (e.high - e.low) / (2 * 1.96) == pytest.approx(standard, rel=0.1)
    between = [np.full(7, x) for x in rng.normal(size=25)]
    e = of_runs([Ratio(x) for x in between], resamples=2000, seed=0)
    means = [x[0] for x in between]
    assert e.value == pytest.approx(np.mean(means))
    assert e.low is not None
    assert e.high is not None
    assert (e.high - e.low) / (2 * 1.96) == pytest.approx(np.std(means) / 5, rel=0.1)


def test_two_runs_by_hand() -> None:
    """Runs of 0 and 1 without spread: a quarter of the resamples is 0, a half 0.5, a quarter 1."""
    e = of_runs([Ratio(np.zeros(3)), Ratio(np.ones(5))], resamples=1000, seed=0)
    assert (e.value, e.low, e.high) == (0.5, 0.0, 1.0)  # each run counts alike, whatever its number of prompts
    assert of_runs([Ratio(np.ones(4))], resamples=100, seed=0).low == 1.0


def test_runs_of_ratios_by_hand() -> None:
    """One run: 3 over 4 less 1 over 2. Two prompts: each resample holds the first, the second, or both."""
    run = Ratio(np.array([1.0, 2.0]), np.array([2.0, 2.0]))
    other = Ratio(np.array([1.0, 0.0]), np.array([1.0, 1.0]))
    e = of_runs([run], [other], resamples=500, seed=0)
    assert (e.value, e.low, e.high) == (0.25, -0.5, 1.0)
    gone = Ratio(np.array([1.0, 1.0]), np.array([1.0, 0.0]), zero="nothing written")
    e = of_runs([gone], resamples=500, seed=0)
    assert (e.value, e.low, e.high) == (2.0, None, None)
    assert e.reason is not None
    assert e.reason.startswith("nothing written in 2")


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
def test_a_difference_of_means_is_the_mean_of_the_differences(runs: int, prompts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(2, size=(2, runs, prompts)).astype(np.float64)
    both = of_runs([Ratio(x) for x in a], [Ratio(x) for x in b], resamples=50, seed=seed)
    one = of_runs([Ratio(x - y) for x, y in zip(a, b, strict=True)], resamples=50, seed=seed)
    assert [both.value, both.low, both.high] == pytest.approx([one.value, one.low, one.high])


@pytest.mark.parametrize(
    ("raw", "corrected"),
    [
        ([], []),
        ([0.2], [0.2]),
        ([0.01, 0.02, 0.03], [0.03, 0.04, 0.04]),
        ([0.5, 0.001, 0.4], [0.8, 0.003, 0.8]),
        ([0.9, 0.8], [1.0, 1.0]),
    ],
)
def test_holm_by_hand(raw: list[float], corrected: list[float]) -> None:
    assert holm(raw) == pytest.approx(corrected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_no_stricter_than_bonferroni_and_keeps_the_order(raw: list[float]) -> None:
    got = holm(raw)
    for p, q in zip(raw, got, strict=True):
        assert p <= q <= min(1.0, p * len(raw)) + 1e-12
    order = sorted(range(len(raw)), key=raw.__getitem__)
    assert [got[i] for i in order] == sorted(got)


@given(st.integers(1, 64), st.data())
def test_pass_at_k_is_scipys_hypergeometric_tail(chains: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, chains))
    correct = np.arange(chains + 1)
    expected = stats.hypergeom.sf(0, chains, correct, k)
    assert pass_at_k(correct, chains, k) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("ratio", [False, True])
def test_the_interval_is_scipys_on_the_same_resamples(ratio: bool) -> None:
    """With 2001 resamples both quantiles fall on a resample: nothing is interpolated."""
    rng = np.random.default_rng(11)
    x, w = rng.normal(size=60), rng.integers(1, 9, size=60).astype(float) if ratio else np.ones(60)
    mine = bootstrap({"x": Ratio(x, w)}, resamples=2001, seed=3)["x"]
    means = resampled_means([x, w], 2001, 3)[1:]
    drawn = SimpleNamespace(bootstrap_distribution=means[:, 0] / means[:, 1])

    def statistic(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        return a.mean(axis=axis) / b.mean(axis=axis)

    theirs = stats.bootstrap(
        (x, w), statistic, paired=True, vectorized=True, method="percentile", confidence_level=LEVEL, n_resamples=0,
        bootstrap_result=drawn,
    ).confidence_interval  # fmt: skip
    assert (mine.low, mine.high) == (pytest.approx(theirs.low, abs=1e-12), pytest.approx(theirs.high, abs=1e-12))


def test_quantiles_are_scipys() -> None:
    assert stats.norm.ppf(0.5 + LEVEL / 2) == pytest.approx(Z95, abs=1e-12)
    values = [0.4, 0.7, 0.1, 0.9]
    expected = stats.t.interval(LEVEL, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 400), st.data())
def test_the_unpaired_interval_is_statsmodels(n: int, data: st.DataObject) -> None:
    before, after = (data.draw(st.integers(0, n)) for _ in range(2))
    expected = confint_proportions_2indep(after, n, before, n, compare="diff", method="agresti-caffo")
    assert difference_interval(before / n, after / n, n) == pytest.approx(expected, abs=1e-9)


def test_the_paired_interval_by_hand_and_as_scipys_bca() -> None:
    # 10 of 40 prompts gained, 2 lost: (11 - 3) / 42; variance (14 / 42 - (8 / 42)^2) / 42.
    low, high = paired_interval([1.0] * 10 + [-1.0] * 2 + [0.0] * 28)
    half = Z95 * math.sqrt((14 / 42 - (8 / 42) ** 2) / 42)
    assert (low, high) == (pytest.approx(8 / 42 - half), pytest.approx(8 / 42 + half))
    # With many prompts, each of eight responses, the two that are added hardly count.
    rng = np.random.default_rng(5)
    d = (rng.binomial(8, 0.6, size=800) - rng.binomial(8, 0.5, size=800)) / 8
    theirs = stats.bootstrap((d,), np.mean, method="BCa", confidence_level=LEVEL, n_resamples=4000, rng=rng)
    assert paired_interval(d.tolist()) == pytest.approx(tuple(theirs.confidence_interval), abs=3e-3)


@pytest.mark.parametrize("n", [8, 30, 200])
def test_the_paired_interval_covers_the_truth(n: int) -> None:
    rng = np.random.default_rng(n)
    for gained, lost in ((0.1, 0.1), (0.3, 0.05), (0.0, 0.0), (0.5, 0.4)):
        drawn = rng.choice([1.0, -1.0, 0.0], size=(400, n), p=[gained, lost, 1 - gained - lost])
        inside = [low <= gained - lost <= high for low, high in map(paired_interval, drawn.tolist())]
        assert np.mean(inside) > 0.92, (gained, lost)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50))
def test_a_paired_interval_turns_with_its_sign(differences: list[float]) -> None:
    low, high = paired_interval(differences)
    assert low < high
    assert paired_interval([-d for d in differences]) == pytest.approx((-high, -low))


def test_pairs_tell_more_than_shares_where_the_prompts_decide() -> None:
    """Half of the prompts are hard and stay wrong: the changes of the others are seen through them."""
    before = [0.0] * 100 + [1.0] * 80 + [0.0] * 20
    after = [0.0] * 100 + [1.0] * 95 + [0.0] * 5
    paired = paired_interval([b - a for a, b in zip(before, after, strict=True)])
    unpaired = difference_interval(0.4, 0.475, 200)
    assert paired[0] > 0 > unpaired[0]


@given(st.lists(st.tuples(FINITE, COUNTS, FINITE, COUNTS), min_size=2, max_size=12), st.integers(0, 9))
def test_a_difference_of_ratios_is_paired_and_turns_with_its_sides(
    rows: list[tuple[float, int, float, int]], seed: int
) -> None:
    a, m, b, n = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    there = ratio_difference(Ratio(a, m), Ratio(b, n), resamples=400, seed=seed)
    back = ratio_difference(Ratio(b, n), Ratio(a, m), resamples=400, seed=seed)
    assert there.value == pytest.approx(b.sum() / n.sum() - a.sum() / m.sum(), abs=1e-9)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)  # type: ignore[operator]
    same = ratio_difference(Ratio(a, m), Ratio(a, m), resamples=400, seed=seed)
    assert (same.low, same.high) == pytest.approx((0.0, 0.0), abs=1e-9), "no change of any prompt has no width"
    one = bootstrap({"x": Ratio(b - a, m)}, resamples=400, seed=seed)["x"]
    shared = ratio_difference(Ratio(a, m), Ratio(b, m), resamples=400, seed=seed)
    assert (shared.low, shared.high) == pytest.approx((one.low, one.high), abs=1e-9), "over equal counts: the plain one"


def test_a_difference_of_ratios_without_a_denominator_says_so() -> None:
    x, none = np.array([1.0, 2.0]), np.zeros(2)
    assert ratio_difference(Ratio(x, none, "no token"), Ratio(x, x), resamples=50, seed=0).reason == "no token"
    some = ratio_difference(Ratio(x, np.array([0.0, 4.0]), "no token"), Ratio(x, x), resamples=400, seed=0)
    assert some.value == pytest.approx(1.0 - 0.75)
    assert some.low is None
    assert "no token in" in str(some.reason)
