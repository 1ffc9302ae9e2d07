"""Files are put together; what does not belong together, or is there twice, is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slime_tandem.diagnostics.bank import BANK, EVALUATION, Bank
from slime_tandem.diagnostics.merge import merge
from slime_tandem.errors import DataError

from .conftest import rows, write_bank, write_evaluation


def test_banks_and_their_evaluations(tmp_path: Path) -> None:
    first, second = rows(3), rows(2, first=3)
    one, two = write_bank(tmp_path / "1.parquet", first), write_bank(tmp_path / "2.parquet", second)
    report = merge([one, two], tmp_path / "both.parquet")
    assert [r.estimate.value for r in report.rows] == [6, 4, 10]
    with Bank(tmp_path / "both.parquet", BANK) as bank, Bank(one, BANK) as a, Bank(two, BANK) as b:
        assert bank.read(["sample"]).to_pydict()["sample"] == first["sample"] + second["sample"]
        ids = [x.metadata["banks"] for x in (a, b)]
        assert bank.metadata["banks"] == sorted([*ids[0], *ids[1]])
        assert bank.metadata["k"] == 2
    evaluations = [
        write_evaluation(tmp_path / f"{label}{i}.parquet", label, columns, np.ones(len(columns["sample"])), ids[i])
        for label in ("before", "after")
        for i, columns in enumerate((first, second))
    ]
    merge(evaluations, tmp_path / "e.parquet")
    from slime_tandem.diagnostics.gain import load_contexts

    c, _, _ = load_contexts(tmp_path / "both.parquet", [tmp_path / "e.parquet"], "before", "after")
    assert len(c) == 10
    with Bank(tmp_path / "e.parquet", EVALUATION) as file:
        assert set(file.metadata["models"]) == {"before", "after"}


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    one = write_bank(tmp_path / "1.parquet", rows(3))
    overlap = write_bank(tmp_path / "2.parquet", rows(2, first=2))
    cases = [
        (overlap, r"\('s2', 1\): expected a key that .*1\.parquet does not hold"),
        (write_bank(tmp_path / "3.parquet", rows(1, first=9), k=3), "k=3: expected 2, as in"),
        (write_bank(tmp_path / "4.parquet", rows(1, first=9), missing_mass="rest"), "missing_mass='rest'"),
        (
            write_bank(
                tmp_path / "5.parquet", rows(1, first=9), teacher={"model": "x", "vocabulary": "y", "weights": None}
            ),
            "vocabulary of the teacher",
        ),
        (write_evaluation(tmp_path / "6.parquet", "a", rows(1), np.ones(2), []), "kind fixed-context-bank"),
    ]
    for bad, words in cases:
        with pytest.raises(DataError, match=words):
            merge([one, bad], tmp_path / "out.parquet")
    a = write_evaluation(tmp_path / "7.parquet", "a", rows(1), np.ones(2), ["x"])
    b = write_evaluation(
        tmp_path / "8.parquet", "a", rows(1, first=1), np.ones(2), ["x"], models={"a": {"student": {}}}
    )
    with pytest.raises(DataError, match="label a"):
        merge([a, b], tmp_path / "out.parquet")
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]


def test_one_name_is_one_response(tmp_path: Path) -> None:
    """Positions that do not meet hide that the texts differ: contexts of one would be scored in the other's."""
    columns = rows(2)
    halves = [{name: values[at::2] for name, values in columns.items()} for at in (0, 1)]
    one, two = (write_bank(tmp_path / f"{i}.parquet", half) for i, half in enumerate(halves))
    merge([one, two], tmp_path / "both.parquet")
    halves[1]["response_ids"] = [[*ids[:-1], ids[-1] + 1] for ids in halves[1]["response_ids"]]
    other = write_bank(tmp_path / "other.parquet", halves[1])
    with pytest.raises(DataError, match=r"other\.parquet, sample='s0': expected one prompt and one response"):
        merge([one, other], tmp_path / "mixed.parquet")
    assert not (tmp_path / "mixed.parquet").exists()
