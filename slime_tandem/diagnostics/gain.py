"""What training did at fixed contexts, and what H, D and C know of it beforehand. Pure but for reading the files.

The gain at a context is KL(teacher || student) before minus after, in nats (`absolute`), or over the KL before (`relative`, the
reference's; contexts whose KL before is below a floor have none, and are counted). Contexts of one response are not
independent: regressions have errors clustered by response, and intervals come from a bootstrap over responses. Every figure
weighs a context by the tokens that it stands for (column `weight` of the bank).

H, D, C are the bank's normalised scores, clipped to [0, 1]. The regressions (weighted least squares of the gain):
  base    1, H, D, H*D, position, Ht (the teacher's entropy)
  C       base and C
  parts   base with D*C and D*(1-C) in place of D

It asks no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from scipy.spatial import cKDTree
from statsmodels.regression.linear_model import WLS

from slime_tandem.diagnostics.bank import BANK, EVALUATION, QUADRANTS, Bank, Metadata, lengths_of
from slime_tandem.diagnostics.output import Report, Row, plain
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.report.dots import Scatter
from slime_tandem.report.statistics import Estimate, interval, resampled_means
from slime_tandem.types import BoolArray, FloatArray, IntArray

GainKind = Literal["absolute", "relative"]
_SCALARS = [
    "sample", "position", "H", "Ht", "D", "D_reverse", "C", "H_line", "D_line", "C_line", "quadrant", "weight",
]  # fmt: skip
_EPSILON = 1e-12
"""The reference's, in the denominator of the relative gain."""
_POINTS = 1000
_NESTED = (
    "R² of a model with more columns is never lower, so an interval of R² minus base cannot reach below 0: a column's "
    "coefficient says whether it matters."
)
_TERMS = ("H", "D", "H*D", "position", "Ht")
MODELS: Mapping[str, tuple[str, ...]] = {
    "base": _TERMS,
    "C": (*_TERMS, "C"),
    "parts": ("H", "H*D", "position", "Ht", "D*C", "D*(1-C)"),
}
MATCHED_ON = ("H", "D", "position")


@dataclass(frozen=True)
class Contexts:
    """A bank's contexts with their KL before and after; arrays [N].

    H, Ht, D, C in [0, 1] (D, H, C normalised); `position` relative in the response, 0 first and 1 last; `kl_*` in nats;
    `sequence` numbers the responses; `weight` > 0.
    """

    H: FloatArray
    Ht: FloatArray
    D: FloatArray
    C: FloatArray
    position: FloatArray
    quadrant: npt.NDArray[np.integer]
    weight: FloatArray
    sequence: IntArray
    kl_before: FloatArray
    kl_after: FloatArray

    def __len__(self) -> int:
        return len(self.H)

    def term(self, name: str) -> FloatArray:
        """A column of a regression by name."""
        products = {"H*D": self.H * self.D, "D*C": self.D * self.C, "D*(1-C)": self.D * (1.0 - self.C)}
        found: FloatArray = products[name] if name in products else getattr(self, name)
        return found


def gains(before: FloatArray, after: FloatArray, kind: GainKind, floor: float = 0.0) -> FloatArray:
    """[N], NaN where `kind` is relative and `before` is below `floor` nats.

    >>> gains(np.array([2.0, 0.1]), np.array([1.0, 0.3]), "relative", floor=0.5).round(6).tolist()
    [0.5, nan]
    """
    if kind == "absolute":
        return before - after
    return np.where(before >= floor, (before - after) / (before + _EPSILON), np.nan)


def load_contexts(
    bank: Path, evaluations: Sequence[Path], before: str, after: str
) -> tuple[Contexts, pa.Table, Metadata]:
    """(contexts, the bank's table, setup), joined on (sample, position).

    Raises DataError where bank and evaluations are not of the same contexts, a context has no evaluation, the teachers
    before and after differ, or a label is not there.
    """
    with Bank(bank, BANK) as file:
        table, meta = file.read(), file.metadata
    frames, models, covered = _read_evaluations(evaluations, meta["comparison"])
    _require_one_teacher_on_all(bank, meta["banks"], models, covered, before, after)
    scalars = table.select(_SCALARS).to_pandas()
    for label, column in ((before, "kl_before"), (after, "kl_after")):
        scalars = _with_kl(scalars, frames, label, column)
    length = lengths_of(table, "response_ids")
    clipped = {name: np.clip(scalars[f"{name}_line"].to_numpy(), 0.0, 1.0) for name in ("H", "D", "C")}
    contexts = Contexts(
        **clipped,
        Ht=scalars["Ht"].to_numpy(),
        position=scalars["position"].to_numpy() / np.maximum(length - 1, 1),
        quadrant=scalars["quadrant"].to_numpy(),
        weight=scalars["weight"].to_numpy(),
        sequence=pd.factorize(scalars["sample"])[0].astype(np.int64),
        kl_before=scalars["kl_before"].to_numpy(),
        kl_after=scalars["kl_after"].to_numpy(),
    )
    setup = {
        "bank": bank.name,
        "contexts": len(contexts),
        "responses": int(contexts.sequence.max()) + 1,
        "before": before,
        "after": after,
        "comparison": meta["comparison"],
        "missing_mass": meta["missing_mass"],
        "compatibility": meta["compatibility"],
        "k": meta["k"],
        "models": {label: models[label] for label in (before, after)},
        "notes": [
            f"The {role} of the bank, whose scores these are, has other weights than that of label {before}."
            for role in ("student", "teacher")
            if meta[role]["weights"] not in (None, models[before][role]["weights"])
        ],
    }
    return contexts, table, setup


def _read_evaluations(evaluations: Sequence[Path], comparison: str) -> tuple[list[Any], Metadata, dict[str, set[str]]]:
    """(data frames, models of each label, banks that each label was evaluated on)."""
    frames: list[Any] = []
    models: Metadata = {}
    covered: dict[str, set[str]] = {}
    for path in evaluations:
        with Bank(path, EVALUATION) as file:
            frame, facts = file.read(["label", "sample", "position", "kl"]).to_pandas(), file.metadata
        frames.append(frame)
        for label, entry in facts["models"].items():
            if models.setdefault(label, entry) != entry:
                raise DataError(
                    f"{path}, label {label}", entry, f"the same models as before: {models[label]}", "rename"
                )
            covered.setdefault(label, set()).update(facts["banks"])
        if facts["comparison"] != comparison:
            remedy = "evaluate this bank"
            raise DataError(f"{path}, comparison", facts["comparison"], f"{comparison}, the bank's", remedy)
    return frames, models, covered


def _require_one_teacher_on_all(
    bank: Path, banks: Sequence[str], models: Metadata, covered: Mapping[str, set[str]], before: str, after: str
) -> None:
    """Refuse labels that are not there, were not evaluated on the whole of the bank, or have different teachers."""
    for label in (before, after):
        if label not in models:
            raise DataError("label", label, f"one of {', '.join(sorted(models))}", "choose one, or evaluate it")
        if covered[label] != set(banks):
            raise DataError(
                f"contexts of label {label}",
                sorted(covered[label]),
                f"those of {bank}: {banks}",
                "evaluate this bank",
            )
    teachers = {models[label]["teacher"]["weights"] for label in (before, after)}
    if len(teachers) > 1:
        remedy = "evaluate both with one teacher"
        raise DataError("teacher", {x: models[x]["teacher"] for x in (before, after)}, "the same weights", remedy)


def _with_kl(scalars: Any, frames: Sequence[Any], label: str, column: str) -> Any:
    """The bank's rows with the KL of a label as `column`; each (sample, position) exactly once."""
    every, key = pd.concat(frames), ["sample", "position"]
    mine = every[every.label == label].drop(columns="label").rename(columns={"kl": column})
    if mine.duplicated(key).any():
        first = tuple(mine[mine.duplicated(key)].iloc[0][key])
        raise DataError(f"({', '.join(key)}) of {label}", first, "each key once", "leave a file out")
    joined = scalars.merge(mine, on=key, how="left", validate="one_to_one")
    missing = joined[joined[column].isna()]
    if len(missing):
        first = tuple(missing.iloc[0][key])
        raise DataError(
            f"label {label}",
            f"no evaluation of {len(missing)} contexts",
            "all of the bank's",
            f"the first is {first}",
        )
    return joined


@dataclass(frozen=True)
class Resampler:
    """A bootstrap over responses: `sequence` [N] numbers them, `resamples` draws by a generator of `seed`."""

    sequence: IntArray
    resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, value, least in (("--resamples", self.resamples, 1), ("--seed", self.seed, 0)):
            if value < least:
                raise ConfigError(flag, value, f"at least {least}", "raise it")

    def means(self, columns: Sequence[FloatArray]) -> FloatArray:
        """Means over responses [1 + B, M] of M columns' [N] sums within each: of the data, then of each resample."""
        responses = int(self.sequence.max()) + 1
        sums = [np.bincount(self.sequence, c, responses).astype(np.float64) for c in columns]
        return resampled_means(sums, self.resamples, self.seed)

    def mean(self, values: FloatArray, weight: FloatArray, chosen: BoolArray) -> Estimate:
        """Weighted mean over the chosen contexts."""
        m = self.means([np.where(chosen, values * weight, 0.0), np.where(chosen, weight, 0.0)])
        return interval(m[:, 0], m[:, 1], "no such context")

    def difference(self, values: FloatArray, weight: FloatArray, a: BoolArray, b: BoolArray) -> Estimate:
        """Weighted mean over `a` minus that over `b`; both move with the same resamples."""
        columns = [np.where(g, v, 0.0) for g in (a, b) for v in (values * weight, weight)]
        m = self.means(columns)
        return interval(m[:, 0] * m[:, 3] - m[:, 2] * m[:, 1], m[:, 1] * m[:, 3], "no context in one of the groups")


@dataclass(frozen=True)
class Fit:
    """A weighted regression: coefficients with cluster-robust 95% intervals and p-values, by name; R squared."""

    coefficients: Mapping[str, Estimate]
    p_values: Mapping[str, float]
    r_squared: float
    parts_equal: float | None = None
    """p-value of the test that D*C and D*(1-C) have one coefficient, where both are in."""


def regress(c: Contexts, y: FloatArray, names: Sequence[str]) -> Fit | str:
    """Weighted least squares of y [N] on 1 and `names`, errors clustered by response (t with responses - 1 degrees of freedom).

    In words why not, where it is not defined: too few responses for the coefficients, or columns that depend on each other.
    """
    X = np.column_stack([np.ones(len(c)), *(c.term(n) for n in names)])
    clusters = len(np.unique(c.sequence))
    if clusters <= X.shape[1]:
        return f"{clusters} responses for {X.shape[1]} coefficients"
    if np.linalg.matrix_rank(X) < X.shape[1]:
        return "the scores depend on each other linearly in this bank"
    if not np.ptp(y):
        return "the gain is the same everywhere"
    fit = WLS(y, X, weights=c.weight).fit(cov_type="cluster", cov_kwds={"groups": c.sequence}, use_t=True)
    ends = fit.conf_int(0.05)
    labels = ("1", *names)
    equal = None
    if {"D*C", "D*(1-C)"} <= set(names):
        contrast = np.zeros((1, X.shape[1]))
        contrast[0, labels.index("D*C")], contrast[0, labels.index("D*(1-C)")] = 1.0, -1.0
        equal = float(np.squeeze(fit.t_test(contrast).pvalue))
    return Fit(
        {n: Estimate(float(fit.params[i]), float(ends[i][0]), float(ends[i][1])) for i, n in enumerate(labels)},
        {n: float(fit.pvalues[i]) for i, n in enumerate(labels)},
        float(fit.rsquared),
        equal,
    )


def r_squared_gains(c: Contexts, y: FloatArray, boot: Resampler) -> dict[str, Estimate]:
    """R squared of each of `MODELS`, and by how much `C` and `parts` exceed `base`, with bootstrap intervals.

    A regression's sums of products add up over responses, so each resample only adds up other ones.
    """
    curves = {}
    for name, terms in MODELS.items():
        X = np.column_stack([np.ones(len(c)), *(c.term(t) for t in terms)])
        p = X.shape[1]
        pairs = np.triu_indices(p)
        w = c.weight
        columns = [w * X[:, i] * X[:, j] for i, j in zip(*pairs, strict=True)]
        columns += [*(w * X[:, i] * y for i in range(p)), w * y * y, w, w * y]
        m = boot.means(columns)
        xx = np.zeros((len(m), p, p))
        xx[:, pairs[0], pairs[1]] = xx[:, pairs[1], pairs[0]] = m[:, : len(pairs[0])]
        xy, (yy, total, sum_y) = m[:, len(pairs[0]) : len(pairs[0]) + p], m[:, -3:].T
        beta = np.einsum("bij,bj->bi", np.linalg.pinv(xx, rcond=1e-10, hermitian=True), xy)
        explained = np.einsum("bi,bi->b", beta, xy)
        spread = yy - sum_y**2 / total
        spread = np.where(spread > 1e-12 * yy, spread, 0.0)
        curves[name] = ((spread - (yy - explained)), spread)
    zero = "the gain is the same everywhere"
    out = {f"R² {name}": interval(top, spread, zero) for name, (top, spread) in curves.items()}
    base = curves["base"]
    for name in ("C", "parts"):
        out[f"R² {name} - base"] = interval(curves[name][0] - base[0], base[1], zero)
    return out


@dataclass(frozen=True)
class Matches:
    """Nearest neighbours: `treated` [M] and their `control` [M] (indices; one may serve several), and how many had none."""

    treated: IntArray
    control: IntArray
    unmatched: int


def match(features: FloatArray, treated: BoolArray, control: BoolArray, caliper: float = 0.25) -> Matches:
    """For each treated row of features [N, F] the nearest control row, with replacement.

    Distance: Euclidean over features in units of their standard deviation over both groups. Pairs further apart than
    `caliper` are left out and counted.

    >>> treated = np.array([True, False, True, False])
    >>> m = match(np.array([[0.0], [0.1], [9.0], [1.0]]), treated, ~treated)
    >>> m.treated.tolist(), m.control.tolist(), m.unmatched
    ([0], [1], 1)

    Raises DataError unless the caliper is a number of at least 0.
    """
    if not caliper >= 0:
        raise DataError("caliper", caliper, "a number of standard deviations, at least 0", "e.g. 0.25")
    a, b = np.flatnonzero(treated), np.flatnonzero(control)
    if not len(a) or not len(b):
        return Matches(a[:0], b[:0], len(a))
    spread = features[treated | control].std(axis=0)
    scaled = features / np.where(spread > 0, spread, 1.0)
    distance, nearest = cKDTree(scaled[b]).query(scaled[a])
    near = distance <= caliper
    return Matches(a[near], b[nearest[near]], int((~near).sum()))


def matched_difference(c: Contexts, y: FloatArray, found: Matches, boot: Resampler) -> Estimate:
    """Mean over pairs of y[treated] - y[control], weighted by the treated; intervals resample the treated's responses."""
    full = np.zeros(len(c))
    weight = np.zeros(len(c))
    full[found.treated] = y[found.treated] - y[found.control]
    weight[found.treated] = c.weight[found.treated]
    return boot.mean(full, weight, weight > 0)


def imbalance(x: FloatArray, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float | None:
    """Standardised difference of means: over the root of the mean variance; None without spread or rows."""
    if not len(x[a]) or not len(x[b]):
        return None
    spread = float(np.sqrt((x[a].var() + x[b].var()) / 2))
    return float(x[a].mean() - x[b].mean()) / spread if spread > 0 else None


def thirds(c: Contexts, inside: BoolArray) -> tuple[BoolArray, BoolArray]:
    """(high, low): contexts inside whose C is at or above the 67% quantile there, and at or below the 33% one.

    Where both quantiles are one value, ties belong to neither.
    """
    if not inside.any():
        return inside, inside
    values = c.C
    low, high = np.quantile(values[inside], [0.33, 0.67])
    if low == high:
        return inside & (values > high), inside & (values < low)
    return inside & (values >= high), inside & (values <= low)


def analyze(c: Contexts, setup: Metadata, *, resamples: int, seed: int, floor: float, caliper: float) -> Report:
    """The report of `tools/analyze_fixed_context_gain.py`: both kinds of gain, quadrants, regressions, thirds, matching.

    Raises DataError unless `floor` (nats, the least KL before of a relative gain) is above 0, and as `match` for the caliper.
    """
    if not floor > 0:
        raise DataError("min_kl", floor, "nats above 0, which a relative gain is divided by", "e.g. 1e-3")
    rows: list[Row] = []
    notes = [*setup["notes"], _NESTED]
    references: dict[str, float] = {}
    everywhere = np.ones(len(c), np.bool_)
    boot = Resampler(c.sequence, resamples, seed)
    for name, kl in (("before", c.kl_before), ("after", c.kl_after)):
        rows.append(Row("KL(teacher || student)", name, boot.mean(kl, c.weight, everywhere), "nats", len(c)))
    for kind, unit in (("absolute", "nats"), ("relative", "of KL before")):
        y = gains(c.kl_before, c.kl_after, kind, floor)  # type: ignore[arg-type]
        known = ~np.isnan(y)
        if not known.all():
            notes.append(
                f"{int((~known).sum())} of {len(c)} contexts have a KL before below {floor:g} nats: no relative gain."
            )
        if not known.any():
            continue
        part, title = _subset(c, known), f"{kind} gain"
        rows += _one_kind(part, y[known], title, unit, resamples, seed, caliper)
        references |= {r.section: 0.0 for r in rows if r.section.startswith(title)}
    drawn = np.random.default_rng(seed).permutation(len(c))[:_POINTS]
    shown = "" if len(drawn) == len(c) else f", {len(drawn)} of {len(c)} drawn at random"
    scatter = Scatter(
        f"KL(teacher || student) at each context, nats{shown}",
        c.kl_before[drawn],
        c.kl_after[drawn],
        "before",
        "after",
        True,
    )
    title = f"Gain at fixed contexts, {setup['before']} to {setup['after']}"
    facts = {**setup, "resamples": resamples, "seed": seed, "floor": floor, "caliper": caliper}
    details = frozenset(s for s in {r.section for r in rows} if s.endswith(("balance", "p-values")))
    return Report(title, facts, rows, notes, references, details=details, scatters=[scatter])


def _subset(c: Contexts, chosen: BoolArray) -> Contexts:
    sequence = np.unique(c.sequence[chosen], return_inverse=True)[1].astype(np.int64)
    columns = {name: getattr(c, name)[chosen] for name in Contexts.__dataclass_fields__ if name != "sequence"}
    return Contexts(sequence=sequence, **columns)


def _one_kind(
    c: Contexts, y: FloatArray, title: str, unit: str, resamples: int, seed: int, caliper: float
) -> list[Row]:
    boot = Resampler(c.sequence, resamples, seed)
    everywhere = np.ones(len(c), np.bool_)
    rows = [Row(f"{title}: mean by quadrant", "all", boot.mean(y, c.weight, everywhere), unit, len(c))]
    for q in range(1, 5):
        inside = c.quadrant == q
        n = int(inside.sum())
        rows.append(Row(f"{title}: mean by quadrant", QUADRANTS[q], boot.mean(y, c.weight, inside), unit, n))
    sure = c.quadrant == 3
    section = f"{title}: low H, high D, by C"
    high, low = thirds(c, sure)
    rows += [
        Row(section, "high C (upper third)", boot.mean(y, c.weight, high), unit, int(high.sum())),
        Row(section, "low C (lower third)", boot.mean(y, c.weight, low), unit, int(low.sum())),
        Row(section, "high minus low", boot.difference(y, c.weight, high, low), unit),
    ]
    section = f"{title}: matched on H, D, position"
    features = np.column_stack([c.term(name) for name in MATCHED_ON])
    for name, inside in (("all contexts", everywhere), ("low H, high D", sure)):
        a, b = thirds(c, inside)
        found = match(features, a, b, caliper)
        effect = matched_difference(c, y, found, boot)
        rows.append(Row(section, f"high minus low C, {name}", effect, unit, len(found.treated)))
        rows.append(Row(f"{section}, balance", f"{name}: unmatched", plain(float(found.unmatched)), "contexts"))
        for x in (*MATCHED_ON, "C"):
            was, now = imbalance(c.term(x), a, b), imbalance(c.term(x), found.treated, found.control)
            for when, value in (("before matching", was), ("after matching", now)):
                label = f"{name}: {x}, {when}"
                rows.append(Row(f"{section}, balance", label, plain(value, "no spread or no pair"), "std. difference"))
    fractions = r_squared_gains(c, y, boot)
    rows += [Row(f"{title}: R²", name, e, "fraction", len(c)) for name, e in fractions.items()]
    for name, terms in MODELS.items():
        fit = regress(c, y, terms)
        section = f"{title}: coefficients of {name}"
        if isinstance(fit, str):
            rows.append(Row(section, "all", plain(None, fit), unit))
            continue
        rows += [Row(section, term, e, unit) for term, e in fit.coefficients.items()]
        p_values = [Row(f"{section}, p-values", term, plain(p)) for term, p in fit.p_values.items()]
        if fit.parts_equal is not None:
            p_values.append(Row(f"{section}, p-values", "D*C equals D*(1-C)", plain(fit.parts_equal)))
        rows += p_values
    return rows
