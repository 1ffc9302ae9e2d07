"""pass@k, intervals by a bootstrap over prompts, or over runs and prompts, and of differences of shares; Holm's correction.

Every figure of an evaluation is a ratio of two sums over prompts (a mean is one whose denominator counts the prompts).
The prompts are what was sampled, so they are what is resampled: all responses of a prompt move together, and all figures
share the same resamples. A figure that compares two conditions is therefore paired by prompt. It knows no metric's name.

scipy has each method in the plain case, and tests/report/test_statistics.py holds ours to it: pass@k to its `hypergeom`,
`interval` to `scipy.stats.bootstrap` on the same resamples, the intervals of differences to its BCa and to statsmodels. Ours
add what scipy has not: several figures over shared resamples, a denominator that a resample leaves at 0, and figures that
are 0 or 1 on every prompt, of which BCa makes NaN.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slime_tandem.types import FloatArray, IntArray

LEVEL = 0.95
Z95 = 1.959963984540054
"""Two-sided 95% quantile of the standard normal."""
_COUNTS_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure as sums over prompts: `numerator` [N] over `denominator` [N] (None: the mean of the numerator).

    `zero` says in words what a denominator of 0 means.
    """

    numerator: FloatArray
    denominator: FloatArray | None = None
    zero: str = "the denominator is 0"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval, both in the figure's unit. None: not defined, and `reason` says why."""

    value: float | None
    low: float | None
    high: float | None
    reason: str | None = None


def pass_at_k(correct: IntArray, chains: int, k: int) -> FloatArray:
    """Unbiased estimate of pass@k per prompt [N], of `correct` [N] right ones among `chains` independent responses.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1), exact in integers before the division.

    >>> pass_at_k(np.array([0, 1, 2, 3, 4]), chains=4, k=2).round(4).tolist()
    [0.0, 0.5, 0.8333, 1.0, 1.0]
    """
    assert 1 <= k <= chains, "pass@k needs at least k responses"
    assert ((correct >= 0) & (correct <= chains)).all()
    all_sets = math.comb(chains, k)
    return np.array([(all_sets - math.comb(chains - c, k)) / all_sets for c in range(chains + 1)])[correct]


def pass_ks(chains: int) -> tuple[int, ...]:
    """The k that are reported: powers of two up to `chains`, and `chains` itself.

    >>> pass_ks(8), pass_ks(6), pass_ks(1)
    ((1, 2, 4, 8), (1, 2, 4, 6), (1,))
    """
    return tuple(sorted({2**i for i in range(chains.bit_length())} | {chains}))


def bootstrap(ratios: Mapping[str, Ratio], *, resamples: int, seed: int) -> dict[str, Estimate]:
    """Percentile intervals at level 0.95 of several figures over the same prompts, under the same resamples.

    N prompts are drawn with replacement `resamples` times by a generator of `seed`. A resample whose denominator is 0
    counts as outside the interval on both sides; where too many are, the interval is not defined.

    >>> x = np.array([0.0, 1.0, 1.0, 1.0])
    >>> e = bootstrap({"mean": Ratio(x), "same": Ratio(x, x)}, resamples=200, seed=0)
    >>> e["mean"].value, e["same"]
    (0.75, Estimate(value=1.0, low=1.0, high=1.0, reason=None))
    """
    columns = []
    for r in ratios.values():
        numerator = np.ascontiguousarray(r.numerator, np.float64)
        denominator = np.ones_like(numerator) if r.denominator is None else r.denominator
        columns += [numerator, np.ascontiguousarray(denominator, np.float64)]
    means = resampled_means(columns, resamples, seed)
    return {name: interval(means[:, 2 * i], means[:, 2 * i + 1], r.zero) for i, (name, r) in enumerate(ratios.items())}


def resampled_means(columns: Sequence[FloatArray], resamples: int, seed: int) -> FloatArray:
    """Means [1 + B, M] of M columns [N] each, over what was sampled: of the data itself, then of each resample."""
    N = len(columns[0])
    assert N > 0, "nothing to resample"
    parts = [np.array([[c.mean() for c in columns]])]
    rng = np.random.default_rng(seed)
    block = max(1, _COUNTS_AT_ONCE // N)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = rng.integers(N, size=(rows, N)) + np.arange(rows)[:, None] * N
        counts = np.bincount(drawn.ravel(), minlength=rows * N).reshape(rows, N).astype(np.float64)
        # Column by column: equal columns then have equal sums to the last bit, and so a ratio of exactly 1.
        parts.append(np.stack([counts @ c / N for c in columns], axis=1))
    means = np.concatenate(parts)
    for i, c in enumerate(columns):
        if (c == c[0]).all():
            means[:, i] = c[0]  # whatever the rounding of the sums
    return means


def interval(numerator: FloatArray, denominator: FloatArray, zero: str) -> Estimate:
    """Percentile interval of a ratio from both means [1 + B], the first entry being the data; `zero` as in `Ratio`."""
    defined = denominator != 0.0
    if not defined[0]:
        return Estimate(None, None, None, zero)
    values = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=defined)
    value, drawn, known = float(values[0]), values[1:], defined[1:]
    tail = (1.0 - LEVEL) / 2.0
    last = len(drawn) - 1
    # Outward order statistics: with few resamples the interval is rather too wide than too narrow.
    low = np.sort(np.where(known, drawn, -np.inf))[math.floor(tail * last)]
    high = np.sort(np.where(known, drawn, np.inf))[math.ceil((1.0 - tail) * last)]
    if not (np.isfinite(low) and np.isfinite(high)):
        share = 1.0 - float(known.mean())
        return Estimate(value, None, None, f"{zero} in {share:.1%} of the resamples")
    return Estimate(value, float(low), float(high))


def ratio_difference(before: Ratio, after: Ratio, *, resamples: int, seed: int) -> Estimate:
    """`after - before`, two ratios of sums over the same prompts, with a percentile interval of a bootstrap over them.

    >>> x, n = np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 2.0])
    >>> e = ratio_difference(Ratio(2 * x, n), Ratio(x, n), resamples=200, seed=0)
    >>> e.value, -1.5 <= e.low <= e.high <= -0.5
    (-1.0, True)
    """
    columns = []
    for ratio in (before, after):
        denominator = np.ones_like(ratio.numerator) if ratio.denominator is None else ratio.denominator
        columns += [np.asarray(ratio.numerator, np.float64), np.asarray(denominator, np.float64)]
    means = resampled_means(columns, resamples, seed)
    a, b, c, d = means.T
    return interval(c * b - a * d, b * d, before.zero)


def of_runs(runs: Sequence[Ratio], less: Sequence[Ratio] = (), *, resamples: int, seed: int) -> Estimate:
    """The mean over runs of each run's figure over its prompts, with a percentile interval of a hierarchical bootstrap.

    `runs`: a figure of each run (a training seed), over prompts of its own. `less`: per run the same figure of another
    condition on the same prompts, which is taken off; both share each resample. Runs are drawn with replacement, then as many
    prompts within each drawn run as it has. With few runs the interval is too narrow: R runs know their own spread with R - 1
    degrees of freedom, and a resample holds some of them twice.

    >>> right = [Ratio(np.array([0.0, 1.0])), Ratio(np.array([1.0, 1.0]))]
    >>> of_runs(right, resamples=100, seed=0).value, of_runs(right, right, resamples=100, seed=0).high
    (0.75, 0.0)
    """
    assert runs, "no run"
    assert all(len(run.numerator) for run in runs), "a run without prompts"
    rng = np.random.default_rng(seed)
    # A resample of a run's prompts is independent of which runs are drawn beside it: one per place.
    drawn = rng.integers(len(runs), size=(resamples, len(runs)))
    figures = np.zeros_like(drawn, np.float64)
    value = []
    for number, (run, *others) in enumerate(zip(runs, less, strict=True) if less else ((run,) for run in runs)):
        N = len(run.numerator)
        assert all(len(other.numerator) == N for other in others), "other prompts"

        def figure(which: IntArray, run: Ratio = run, others: Sequence[Ratio] = others) -> FloatArray:
            return _of_prompts(run, which) - sum(_of_prompts(other, which) for other in others)

        value.append(figure(np.arange(N)[None]))
        places = np.flatnonzero(drawn.ravel() == number)
        block = max(1, _COUNTS_AT_ONCE // N)
        for start in range(0, len(places), block):
            part = places[start : start + block]
            figures.ravel()[part] = figure(rng.integers(N, size=(len(part), N)))
    means = np.concatenate([np.mean(value, axis=0), figures.mean(axis=1)])
    defined = np.isfinite(means)
    return interval(np.where(defined, means, 0.0), defined.astype(np.float64), runs[0].zero)


def _of_prompts(ratio: Ratio, which: IntArray) -> FloatArray:
    """The figure [B] over B lists of prompts `which` [B, N]; nan where its denominator is 0."""
    over: FloatArray = ratio.numerator[which].mean(axis=1)
    if ratio.denominator is None:
        return over
    under: FloatArray = ratio.denominator[which].mean(axis=1)
    values: FloatArray = np.divide(over, under, out=np.full_like(over, np.nan), where=under != 0.0)
    return values


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected together (Holm 1979): the chance of one false alarm among all stays below the level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    out, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p_values[i]))
        out[i] = least
    return out


def difference_interval(before: float, after: float, n: int) -> tuple[float, float]:
    """95% interval of `after - before`, two shares of `n` prompts each that are not the same prompts.

    Agresti and Caffo (2000): one success and one failure added to each side, which keeps it honest at shares of 0 and 1.

    >>> low, high = difference_interval(0.5, 0.75, 100)
    >>> round(low, 3), round(high, 3)
    (0.116, 0.374)
    """
    p, q = ((share * n + 1) / (n + 2) for share in (before, after))
    half = Z95 * math.sqrt((p * (1 - p) + q * (1 - q)) / (n + 2))
    return q - p - half, q - p + half


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean difference of two shares over the same prompts; `differences` [N] in [-1, 1], one a prompt.

    Bonett and Price (2012): one prompt more that changed each way, then Wald's. As with the unpaired one the two keep it
    honest where no prompt changed, or all did. With several responses a prompt the differences are between -1 and 1.

    >>> low, high = paired_interval([1.0] * 30 + [-1.0] * 5 + [0.0] * 65)  # 30 prompts gained, 5 lost, of 100
    >>> round(low, 3), round(high, 3)
    (0.138, 0.352)
    """
    assert differences, "nothing was paired"
    n = len(differences) + 2
    mean = math.fsum(differences) / n
    square = (math.fsum(d * d for d in differences) + 2.0) / n
    half = Z95 * math.sqrt(max(square - mean * mean, 0.0) / n)
    return mean - half, mean + half


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of what a few runs gave, by Student's t; at least two values.

    >>> [round(end, 4) for end in mean_interval([0.4, 0.5, 0.6])]
    [0.2516, 0.7484]
    """
    from scipy.special import stdtrit  # 0.3 s, for suites alone

    n = len(values)
    mean, quantile = statistics.fmean(values), float(stdtrit(n - 1, (1.0 + LEVEL) / 2.0))
    half = quantile * statistics.stdev(values) / math.sqrt(n)
    return mean - half, mean + half
