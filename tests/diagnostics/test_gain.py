"""The analysis by hand, by laws, and on made-up gains whose cause is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tandem.diagnostics.gain import (
    MODELS,
    Contexts,
    Fit,
    Resampler,
    analyze,
    gains,
    imbalance,
    load_contexts,
    match,
    matched_difference,
    r_squared_gains,
    regress,
    thirds,
)
from slime_tandem.diagnostics.output import write_report
from slime_tandem.diagnostics.support import check_support
from slime_tandem.diagnostics.topn import top_n
from slime_tandem.errors import ConfigError, DataError

from .conftest import rows, write_bank, write_evaluation


def contexts(n: int = 400, seed: int = 0, sequences: int = 40) -> Contexts:
    rng = np.random.default_rng(seed)
    H, D, C, Ht, position = rng.random((5, n))
    quadrant = np.where(H >= 0.5, np.where(D >= 0.5, 1, 2), np.where(D >= 0.5, 3, 4))
    sequence = np.arange(n) % sequences
    zero = np.zeros(n)
    return Contexts(H, Ht, D, C, position, quadrant, rng.uniform(0.5, 2.0, n), sequence, zero + 5.0, zero)


def with_gain(c: Contexts, gain: Any) -> Contexts:
    return replace(c, kl_after=c.kl_before - gain)


def test_means_and_differences_by_hand() -> None:
    boot = Resampler(np.array([0, 0, 1, 1]), resamples=200)
    y, w = np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 3.0, 1.0, 1.0])
    a = np.array([True, True, False, False])
    assert boot.mean(y, w, a | ~a).value == pytest.approx((1 + 6 + 4 + 8) / 6)
    e = boot.difference(y, w, a, ~a)
    assert e.value == pytest.approx(7 / 4 - 6)
    assert e.low is None, "a resample of one response twice lacks a group, and too often for an interval"
    assert boot.mean(y, w, a & ~a).reason == "no such context"
    even = np.array([True, False, True, False])
    e = boot.difference(y, w, even, ~even)
    assert e.value == pytest.approx(2.5 - 14 / 4)
    # The three resamples that there are: response 0 twice, each once, response 1 twice.
    assert (e.low, e.high) == (pytest.approx(4 - 8), pytest.approx(1 - 2))


def test_relative_gains_have_the_references_form_above_the_floor() -> None:
    before, after = np.array([2.0, 1e-5, 0.5]), np.array([0.5, 1e-6, 1.0])
    assert gains(before, after, "absolute").tolist() == (before - after).tolist()
    assert gains(before, after, "relative").tolist() == ((before - after) / (before + 1e-12)).tolist()
    assert np.isnan(gains(before, after, "relative", 1e-3)).tolist() == [False, True, False]


def test_regression_against_the_formulas() -> None:
    """Coefficients, cluster-robust errors (Liang and Zeger, Stata's factor for few clusters) and R squared by definition."""
    c = contexts(120, sequences=15)
    y = c.D * c.C + np.random.default_rng(1).normal(0, 0.1, 120)
    names = MODELS["C"]
    fit = regress(c, y, names)
    assert isinstance(fit, Fit)
    X = np.column_stack([np.ones(120), *(c.term(n) for n in names)])
    W = np.diag(c.weight)
    bread = np.linalg.inv(X.T @ W @ X)
    beta = bread @ X.T @ W @ y
    residual = y - X @ beta
    scores = [(X.T @ W)[:, c.sequence == g] @ residual[c.sequence == g] for g in range(15)]
    meat = sum(np.outer(s, s) for s in scores)
    n, p, G = 120, X.shape[1], 15
    error = np.sqrt(np.diag(bread @ meat @ bread) * G / (G - 1) * (n - 1) / (n - p))
    from scipy.stats import t

    for i, name in enumerate(("1", *names)):
        e = fit.coefficients[name]
        assert e.value == pytest.approx(beta[i])
        assert e.high == pytest.approx(beta[i] + t.ppf(0.975, G - 1) * error[i])
        assert fit.p_values[name] == pytest.approx(2 * t.sf(abs(beta[i] / error[i]), G - 1))
    mean = np.average(y, weights=c.weight)
    r2 = 1 - (c.weight * residual**2).sum() / (c.weight * (y - mean) ** 2).sum()
    assert fit.r_squared == pytest.approx(r2)
    found = r_squared_gains(c, y, Resampler(c.sequence, 50))
    assert found["R² C"].value == pytest.approx(r2)
    base = regress(c, y, MODELS["base"])
    assert isinstance(base, Fit)
    assert found["R² C - base"].value == pytest.approx(r2 - base.r_squared)


def test_the_cause_of_a_made_up_gain_is_found() -> None:
    c = contexts(2000, sequences=100)
    noise = np.random.default_rng(2).normal(0, 0.05, len(c))
    learnable = regress(c, c.D * c.C + noise, MODELS["parts"])
    assert isinstance(learnable, Fit)
    assert learnable.coefficients["D*C"].value == pytest.approx(1.0, abs=0.05)
    assert learnable.coefficients["D*(1-C)"].value == pytest.approx(0.0, abs=0.05)
    assert learnable.parts_equal is not None
    assert learnable.parts_equal < 1e-6
    by_d = regress(c, c.D + noise, MODELS["parts"])
    assert isinstance(by_d, Fit)
    assert by_d.parts_equal is not None
    assert by_d.parts_equal > 0.01
    boot = Resampler(c.sequence, 200)
    assert (r_squared_gains(c, c.D * c.C + noise, boot)["R² C - base"].low or 0) > 0.3
    # Matching undoes what H does to C: C has no effect of its own here, and the raw difference says it has.
    tied = replace(c, C=np.clip(c.H + np.random.default_rng(3).normal(0, 0.3, len(c)), 0, 1))
    y = tied.H + noise
    a, b = thirds(tied, np.ones(len(c), np.bool_))
    raw = boot.difference(y, tied.weight, a, b).value
    features = np.column_stack([tied.H, tied.D, tied.position])
    found = match(features, a, b, 0.3)
    assert raw is not None
    assert raw > 0.2
    effect = matched_difference(tied, y, found, boot)
    assert effect.value is not None
    assert abs(effect.value) < 0.04
    was, now = imbalance(tied.H, a, b), imbalance(tied.H, found.treated, found.control)
    assert was is not None
    assert now is not None
    assert abs(now) < 0.1 < was


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_order_and_names_of_rows_do_not_matter(seed: int) -> None:
    c = contexts(80, seed % 100, sequences=8)
    y = c.D * c.C + c.H
    order = np.random.default_rng(seed).permutation(80)
    rename = np.random.default_rng(seed + 1).permutation(8)
    fields = {n: getattr(c, n)[order] for n in Contexts.__dataclass_fields__}
    other = Contexts(**fields)
    a, b = (
        regress(c, y, MODELS["parts"]),
        regress(replace(other, sequence=rename[other.sequence]), y[order], MODELS["parts"]),
    )
    assert isinstance(a, Fit)
    assert isinstance(b, Fit)
    for name, e in a.coefficients.items():
        assert b.coefficients[name].low == pytest.approx(e.low, abs=1e-9)
    high, low = thirds(c, c.quadrant == 3)
    again = thirds(other, other.quadrant == 3)
    assert (again[0].tolist(), again[1].tolist()) == (high[order].tolist(), low[order].tolist())


def test_what_cannot_be_told_says_why() -> None:
    c = contexts(60, sequences=5)
    assert regress(c, c.D, MODELS["base"]) == "5 responses for 6 coefficients"
    flat = replace(contexts(60, sequences=30), C=np.ones(60))
    assert "depend on each other" in str(regress(flat, flat.H, MODELS["C"]))
    assert regress(flat, flat.C, MODELS["base"]) == "the gain is the same everywhere"
    assert r_squared_gains(flat, flat.C, Resampler(flat.sequence, 20))["R² C"].value is None
    high, low = thirds(flat, flat.quadrant == 3)
    assert not high.any()
    assert not low.any()
    none = match(np.zeros((3, 1)), np.array([True, True, False]), np.zeros(3, np.bool_))
    assert (len(none.treated), none.unmatched) == (0, 2)
    assert imbalance(flat.C, high, low) is None


def joined(folder: Path, **facts: Any) -> tuple[Path, Path, Path]:
    columns = rows(30, 3)
    rng = np.random.default_rng(0)
    for name in ("H_line", "D_line", "C_line", "Ht"):
        columns[name] = rng.random(90).tolist()
    bank = write_bank(folder / "bank.parquet", columns)
    from slime_tandem.diagnostics.bank import BANK, Bank

    with Bank(bank, BANK) as file:
        banks = file.metadata["banks"]
    before = np.linspace(1.0, 2.0, 90)
    one = write_evaluation(folder / "before.parquet", "before", columns, before, banks)
    # In another order: rows are joined by name.
    turned = {name: values[::-1] for name, values in columns.items()}
    two = write_evaluation(folder / "after.parquet", "after", turned, before[::-1] / 2, banks, **facts)
    return bank, one, two


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_caliper_and_a_floor_that_mean_nothing_are_refused(value: float) -> None:
    with pytest.raises(DataError, match=r"caliper.*at least 0"):
        match(np.zeros((2, 1)), np.array([True, False]), np.array([False, True]), value)
    with pytest.raises(DataError, match=r"min_kl.*nats above 0"):
        analyze(None, {}, resamples=1, seed=0, floor=value, caliper=1.0)  # type: ignore[arg-type]


def test_files_are_joined_by_name_and_reported_whole(tmp_path: Path) -> None:
    bank, one, two = joined(tmp_path)
    c, table, setup = load_contexts(bank, [one, two], "before", "after")
    assert c.kl_after.tolist() == (c.kl_before / 2).tolist()
    assert c.position[:3].tolist() == [1 / 3, 2 / 3, 1.0]
    report = analyze(c, setup, resamples=50, seed=0, floor=1.5, caliper=1.0)
    assert any("have a KL before below 1.5 nats" in note for note in report.notes)
    relative = next(r for r in report.rows if r.section == "relative gain: mean by quadrant" and r.name == "all")
    assert relative.estimate.value == pytest.approx(0.5)
    assert relative.n == int((c.kl_before >= 1.5).sum())
    paths = write_report(report, tmp_path / "out" / "gain")
    assert [p.name for p in paths] == ["gain.csv", "gain.json", "gain.svg"]
    tree = json.loads(paths[1].read_text())
    assert len(tree["results"]) == len(report.rows) == len(paths[0].read_text().splitlines()) - 1
    words = " ".join(ElementTree.fromstring(paths[2].read_text()).itertext())
    assert "KL(teacher || student)" in words
    assert "None" not in words
    assert "p-values" not in words
    methods = ["teachability", "entropy", "random"]
    best = top_n(c, table, methods, 9, setup, resamples=50, seed=0, caliper=1.0)
    chosen = {r.name: r for r in best.rows if r.section == "mean gain of the chosen"}
    assert chosen["teachability"].n == 9
    order = np.argsort(-c.D * c.C)[:9]
    y = c.kl_before - c.kl_after
    assert chosen["teachability"].estimate.value == pytest.approx(np.average(y[order], weights=c.weight[order]))
    with pytest.raises(ConfigError, match="--top-n=90: expected 1 to 89"):
        top_n(c, table, methods, 90, setup, resamples=50, seed=0, caliper=1.0)
    with pytest.raises(DataError, match="selector"):
        top_n(c, table, ["best"], 9, setup, resamples=50, seed=0, caliper=1.0)
    options: dict[str, Any] = {"ks": [1], "ps": [0.5, 0.99], "ratio": 0.1, "resamples": 50, "seed": 0}
    support = check_support(bank, [one, two], "before", "after", **options)
    means = {r.name: r.estimate.value for r in support.rows if r.section == "mean of C"}
    # Teacher's mass on the student's tokens 5 and 6: exp(-1) and exp(-2); the student's first token holds exp(-0.5) = 0.61.
    assert means["mass@2"] == pytest.approx(np.exp(-1) + np.exp(-2))
    assert means["mass@1"] == means["top_p@0.5"] == pytest.approx(np.exp(-1))
    assert means["overlap"] == 0.5
    assert support.notes == ["top_p@0.99: the student's list of 2 ends before it holds 0.99 at 90 of 90 contexts."]
    assert {r.section for r in check_support(bank, [], "before", "after", **options).rows} < {
        r.section for r in support.rows
    }
    with pytest.raises(ConfigError, match="--k=3: expected 1 to 2"):
        check_support(bank, [], "a", "b", **{**options, "ks": [3]})
    with pytest.raises(ConfigError, match=r"--p=1\.0"):
        check_support(bank, [], "a", "b", **{**options, "ps": [1.0]})


def test_evaluations_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    bank, one, two = joined(tmp_path)
    with pytest.raises(DataError, match=r"label='after': expected one of before"):
        load_contexts(bank, [one], "before", "after")
    with pytest.raises(DataError, match="each key once"):
        load_contexts(bank, [one, two, two], "before", "after")
    other = write_bank(tmp_path / "other.parquet", rows(29, 3))
    with pytest.raises(DataError, match="contexts of label before"):
        load_contexts(other, [one, two], "before", "after")
    from slime_tandem.diagnostics.bank import BANK, Bank

    with Bank(bank, BANK) as file:
        banks = file.metadata["banks"]
    short = write_evaluation(tmp_path / "short.parquet", "after", rows(29, 3), np.ones(87), banks)
    with pytest.raises(DataError, match="no evaluation of 3 contexts"):
        load_contexts(bank, [one, short], "before", "after")
    strange = {"after": {"student": {}, "teacher": {"model": "t", "weights": "another"}}}
    foreign = write_evaluation(tmp_path / "foreign.parquet", "after", rows(30, 3), np.ones(90), banks, models=strange)
    with pytest.raises(DataError, match=r"teacher=.*the same weights"):
        load_contexts(bank, [one, foreign], "before", "after")
    bytewise = write_evaluation(
        tmp_path / "b.parquet", "after", rows(30, 3), np.ones(90), banks, comparison="next_byte"
    )
    with pytest.raises(DataError, match="comparison='next_byte'"):
        load_contexts(bank, [one, bytewise], "before", "after")


@pytest.mark.parametrize(("resamples", "seed", "flag"), [(0, 0, "--resamples=0"), (10, -1, "--seed=-1")])
def test_a_bootstrap_that_cannot_be(resamples: int, seed: int, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: expected at least"):
        Resampler(np.zeros(3, np.int64), resamples, seed)
