"""Files are checked on read, and are there whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_tandem.diagnostics.bank import BANK, EVALUATION, Bank, top_lists, weights_fingerprint, writing
from slime_tandem.errors import DataError
from slime_tandem.files import whole_file

from .conftest import FACTS, rows, write_bank


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = write_bank(tmp_path / "a.parquet")
    with Bank(path, BANK) as bank:
        assert len(bank) == 6
        table = bank.read()
        assert table.to_pydict() == rows()
        lists = top_lists(table, 3)
    assert lists.student_ids.tolist() == [[5, 6, -1]] * 6
    assert lists.student_on_teacher is not None
    assert lists.student_on_teacher[0].tolist() == [-1.5, -3.0, 0.0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet"]


def changed(name: str, i: int, value: Any) -> dict[str, list[Any]]:
    columns = rows()
    columns[name][i] = value
    return columns


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("sample", "s1", r"each key once.*leave one of them out"),
        ("H", float("nan"), r"H of \(s0, 1\)=nan: expected a finite number"),
        ("weight", float("inf"), "finite"),
        ("weight", 0.0, "weight between"),
        ("D", None, r"D of \(s0, 1\)=None: expected a value"),
        ("quadrant", 0, "quadrant between 1 and 4"),
        ("student_top_ids", [5, 6, 7], "at most K = 2 entries"),
        ("student_top_log_probs", [-0.5], "as many entries as student_top_ids"),
        ("teacher_on_student", [], "as many entries as student_top_ids"),
        ("teacher_top_log_probs", [-0.5, float("nan")], "log-probabilities of at most 0"),
        ("student_on_teacher", [0.5, -1.0], "log-probabilities of at most 0"),
        ("token", 99, "the response's token at that position"),
        ("response_ids", [10], "a position in response_ids"),
        ("teacher_position", -1, "a position in teacher_response_ids"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, column: str, value: Any, words: str) -> None:
    path = write_bank(tmp_path / "a.parquet", changed(column, 0, value))
    with Bank(path, BANK) as bank, pytest.raises(DataError, match=words) as caught:
        bank.read()
    assert str(path) in str(caught.value)


def test_another_version_kind_or_form_is_refused(tmp_path: Path) -> None:
    path = write_bank(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"expected a file of kind fixed-context-evaluation"):
        Bank(path, EVALUATION)
    table = pq.read_table(path)
    meta = table.schema.metadata[b"slime_tandem"]
    cases = [
        (table.replace_schema_metadata({b"slime_tandem": meta.replace(b'"version": 1', b'"version": 2')}), "version=2"),
        (table.replace_schema_metadata({b"slime_tandem": meta.replace(b'"k": 2', b'"q": 2')}), "metadata k"),
        (table.replace_schema_metadata({}), "expected a file of kind"),
        (table.replace_schema_metadata({b"slime_tandem": b"{"}), "expected a file of kind"),
        (table.drop_columns(["C"]), "column C='missing'"),
        (table.set_column(0, "sample", pa.array(range(6))), "column sample='int64'"),
    ]
    for bad, words in cases:
        pq.write_table(bad, tmp_path / "bad.parquet")
        with pytest.raises(DataError, match=words):
            Bank(tmp_path / "bad.parquet", BANK)
    (tmp_path / "text.parquet").write_text("no parquet")
    for name in ("text.parquet", "absent.parquet"):
        with pytest.raises(DataError, match="a Parquet file"):
            Bank(tmp_path / name, BANK)
    empty = write_bank(tmp_path / "empty.parquet", {name: [] for name in BANK.schema.names})
    with Bank(empty, BANK) as bank, pytest.raises(DataError, match="no rows"):
        bank.read()


def test_a_flipped_byte_is_never_read_as_data(tmp_path: Path) -> None:
    path = write_bank(tmp_path / "a.parquet", rows(20))
    whole = path.read_bytes()
    with Bank(path, BANK) as bank:
        good = bank.read()
    said: list[str] = []
    for at in range(4, len(whole) - 8, 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        try:
            with Bank(path, BANK) as bank:
                assert bank.read().equals(good), f"byte {at}: of no meaning for the rows, or refused"
        except DataError as error:
            said.append(str(error))
    assert len(said) > 20
    assert all(str(path) in text for text in said)


def test_duplicates_are_found_across_row_groups(tmp_path: Path) -> None:
    columns = rows(700)
    for name in columns:
        columns[name].append(columns[name][0])
    path = write_bank(tmp_path / "a.parquet", columns)
    assert pq.ParquetFile(path).num_row_groups > 1
    with Bank(path, BANK) as bank, pytest.raises(DataError, match=r"\('s0', 1\): expected each key once"):
        bank.read()


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = write_bank(tmp_path / "a.parquet")
    before = path.read_bytes()

    def half_a_bank() -> None:
        with writing(path, BANK, {"banks": [], **FACTS}) as sink:
            sink.write(pa.table(rows(1), schema=BANK.schema))
            raise RuntimeError

    def half_a_text() -> None:
        with whole_file(tmp_path / "b") as unfinished:
            unfinished.write_text("half")
            raise RuntimeError

    for fails in (half_a_bank, half_a_text):
        with pytest.raises(RuntimeError):
            fails()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_weights_are_told_apart(tmp_path: Path) -> None:
    assert weights_fingerprint(tmp_path) is None
    data = np.random.default_rng(0).bytes(300_000)
    for at in (0, 150_010, 299_999):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (tmp_path / "a.safetensors").write_bytes(data)
    prints = {weights_fingerprint(p.parent) for p in tmp_path.rglob("*.safetensors")}
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [("k", "two"), ("k", 0), ("missing_mass", "magic"), ("normalisation", 1), ("student", "x"), ("banks", None)],
)
def test_metadata_of_the_wrong_type_is_named(tmp_path: Path, name: str, value: Any) -> None:
    path = write_bank(tmp_path / "b.parquet", rows(1), **{name: value})
    with pytest.raises(DataError, match=f"b.parquet, metadata {name}="):
        Bank(path, BANK)
