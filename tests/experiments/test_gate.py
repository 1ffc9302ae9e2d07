"""The gate: an unchanged program passes, a fault is named. Bands by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from slime_tandem.objective import loss
from slime_tandem.training import rows

from ..in_process import ThreadServer
from .conftest import REPO

Script = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def gate(script: Script) -> ModuleType:
    return script("gate")


@pytest.fixture(scope="module")
def run(gate: ModuleType, tmp_path_factory: pytest.TempPathFactory, forked_servers: None) -> Any:
    """Figures of the job, under the program as it is at the time of the call; the servers are the same for all calls."""
    root = tmp_path_factory.mktemp("gate")
    models = gate.make_models(root / "models")
    names = iter(range(100))
    with (
        ThreadServer(models / "senior", cache_tokens=16384) as senior,
        ThreadServer(models / "junior", cache_tokens=16384) as junior,
        ThreadServer(models / "teacher", cache_tokens=16384) as teacher,
    ):
        urls = {"senior_url": senior.url, "junior_url": junior.url, "teacher_url": teacher.url}
        yield lambda: gate.one(models, root / f"runs-{next(names)}", gate.CHECKED_SEED, **urls)


@pytest.fixture(scope="module")
def expected(gate: ModuleType) -> dict[str, list[float]]:
    record = json.loads(gate.BANDS.read_text())
    assert gate.CHECKED_SEED not in record["seeds"], "a band must not be made of what it judges"
    bands: dict[str, list[float]] = record["bands"]
    return bands


def test_an_unchanged_program_moves_nothing(gate: ModuleType, run: Any, expected: Any) -> None:
    assert gate.moved(run(), expected) == []


def _kl_sign(patch: pytest.MonkeyPatch) -> None:
    right = loss.kl_term
    patch.setattr(loss, "kl_term", lambda *a: dataclasses.replace(term := right(*a), values=-term.values))


def _junior_trained(patch: pytest.MonkeyPatch) -> None:
    right = rows._weights
    patch.setattr(rows, "_weights", lambda scored, weight: right(scored, 1.0))


def _teacher_shifted(patch: pytest.MonkeyPatch) -> None:
    right = rows._row

    def shifted(*a: Any) -> Any:
        row = right(*a)
        return dataclasses.replace(row, teacher_log_probs=np.roll(row.teacher_log_probs, 1))

    patch.setattr(rows, "_row", shifted)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (_kl_sign, "train/kl_loss@7"),
        (_junior_trained, "train/ratio_mean@0"),
        (_teacher_shifted, "train/opd_loss@0"),
    ],
)
def test_a_fault_moves_a_figure_that_is_named(
    gate: ModuleType, run: Any, expected: Any, fault: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    lines = gate.moved(run(), expected)
    assert any(line.startswith(f"{named}: ") for line in lines), lines


def test_bands_by_hand(gate: ModuleType) -> None:
    """Two runs 0 and 2: mean 1, spread sqrt 2; the quantile of one degree of freedom for one figure in two at 99.99 %."""
    found = gate.bands([{"a": 0.0, "b": 1.0}, {"a": 2.0, "b": 1.0}])
    quantile = math.tan(math.pi / 2 * (1 - 0.0001 / 2))
    half = quantile * math.sqrt(2) * math.sqrt(1.5)
    assert found["a"] == pytest.approx([1 - half, 1 + half], rel=1e-4)
    assert found["b"] == [1 - 1e-4, 1 + 1e-4], "what did not vary gets the least width"


def test_a_band_holds_each_recorded_run_by_the_others(gate: ModuleType) -> None:
    """Of sixty runs one lies far out: the others do not know of it, and the band is as wide as it takes."""
    values = [float(i % 2) for i in range(59)] + [9.0]
    low, high = gate.bands([{"a": v} for v in values])["a"]
    mean, half = gate.interval(values, 1)
    assert mean + half < 9.0, "Student's interval alone would not hold it"
    far = gate.far_out(values, 59, 1)
    others, theirs = gate.interval(values[:59], 1)
    assert far == pytest.approx((9.0 - others) / theirs)
    assert (low, high) == pytest.approx((mean - far * half, mean + far * half), rel=1e-4)
    assert low < 0.0, "on both sides"


def test_the_bands_are_those_of_the_published_runs(gate: ModuleType) -> None:
    """Nobody edits a band, or a line under it; each recorded run passes."""
    record = json.loads(gate.BANDS.read_text())
    data = REPO / "docs" / "results" / "data" / "gate.jsonl"
    runs = {row["seed"]: row["figures"] for row in map(json.loads, data.read_text().splitlines())}
    assert record["seeds"] == list(runs)
    found = gate.bands(list(runs.values()))
    assert found.keys() == record["bands"].keys()
    for name, (low, high) in record["bands"].items():
        assert found[name] == pytest.approx([low, high], rel=1e-4, abs=1e-6), name
        assert low < high
    assert [seed for seed, figures in runs.items() if gate.moved(figures, found)] == []


def test_a_figure_that_gets_better_leaves_its_band_too(gate: ModuleType, expected: Any) -> None:
    """Both sides of each band, a hair outside and a hair inside."""
    for name, (low, high) in expected.items():
        hair = (high - low) / 1000
        middle = {n: (a + b) / 2 for n, (a, b) in expected.items()}
        for value, outside in ((low - hair, True), (low + hair, False), (high - hair, False), (high + hair, True)):
            told = gate.moved({**middle, name: value}, expected)
            assert [line.split(": ")[0] for line in told] == ([name] if outside else [])


def test_what_moved_is_told_the_farthest_first(gate: ModuleType) -> None:
    bands = {"a": [0.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 1.0], "d": [0.0, 1.0]}
    lines = gate.moved({"a": 1.5, "b": -2.0, "c": 0.5, "e": 0.0}, bands)
    assert lines == ["d: gone", "e: not recorded", "b: -2.0 outside 0 to 1", "a: 1.5 outside 0 to 1"]
    assert gate.moved({"a": None}, {"a": [0.0, 1.0]}) == ["a: None outside 0 to 1"]


def test_each_figure_of_the_job_has_a_band(gate: ModuleType, expected: Any) -> None:
    names = {f"{m}@{s}" for m in gate.STEP_METRICS for s in gate.STEPS}
    names |= {f"{m}@{phase}" for m in gate.EVAL_METRICS for phase in ("before", "after")}
    assert expected.keys() == names
    assert isinstance(gate.BANDS, Path)
