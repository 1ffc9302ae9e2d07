import math
from pathlib import Path

import pytest

from slime_tandem.errors import DataError
from slime_tandem.report.metrics import METRICS, check_row, metrics_markdown, row_keys

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_two_kinds_of_row_share_no_name_and_cover_the_table():
    step, evaluation = set(row_keys("step")), set(row_keys("eval"))
    assert not step & evaluation
    assert step | evaluation == set(METRICS)
    assert len(step) == 107
    assert len(evaluation) == 11


@pytest.mark.parametrize("scope", ["step", "eval"])
def test_a_full_row_of_nothing_is_a_row(scope):
    check_row(dict.fromkeys(row_keys(scope)), scope)


def test_a_missing_name_is_our_bug():
    row = dict.fromkeys(row_keys("step"))
    del row["train/loss"]
    with pytest.raises(AssertionError, match="train/loss"):
        check_row(row)


def test_an_unknown_name_is_our_bug():
    with pytest.raises(AssertionError, match="train/los'"):
        check_row({**dict.fromkeys(row_keys("step")), "train/los": 1.0})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0.5", True])
def test_a_value_that_json_cannot_hold_is_refused_by_name(value):
    with pytest.raises(DataError, match=r"^train/grad_norm=.*Remedy"):
        check_row({**dict.fromkeys(row_keys("step")), "train/grad_norm": value})


def test_the_docs_are_this_table():
    assert DOCS.read_text(encoding="utf-8") == metrics_markdown(), (
        "run: python -m slime_tandem.report.metrics > docs/metrics.md"
    )


def test_no_cell_of_the_docs_table_is_split_by_a_bar():
    rows = [line for line in metrics_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS)
    assert {row.replace("\\|", "").count("|") for row in rows} == {6}
