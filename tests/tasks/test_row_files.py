"""Rows by number: the same rows whatever the way to them, memory that does not grow with the file, another file noticed."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import TaskSpec
from slime_tandem.errors import DataError
from slime_tandem.tasks import jsonl, row_files
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.jsonl import JsonlFamily
from slime_tandem.tasks.row_files import open_rows
from slime_tandem.tasks.shuffles import shuffled

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


def all_rows(path: Path) -> list[Any]:
    rows = open_rows(path)
    return [row for _, row in (rows[i] for i in range(len(rows))) if row is not None]


@given(
    st.lists(st.dictionaries(TEXT, TEXT | st.integers(-9, 9), max_size=3), max_size=6), st.sampled_from(["\n", "\n\n"])
)
def test_json_lines_are_cut_as_their_writer_wrote_them(rows: list[Any], end: str) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)
    for packed in (False, True):
        path = Path(os.environ["PYTEST_TMP"]) / ("a.jsonl.gz" if packed else "a.jsonl")
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        assert all_rows(path) == rows


@given(
    st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6),
    st.sampled_from(["\r\n", "\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.booleans(),
)
def test_csv_is_cut_where_csv_cuts_it(rows: list[tuple[str, str]], end: str, quoting: Any, bom: bool) -> None:
    if quoting == csv.QUOTE_MINIMAL:  # which leaves a bare \r bare, and csv ends a row there
        rows = [(a.replace("\r", ""), b.replace("\r", "")) for a, b in rows]
    text = io.StringIO()
    csv.writer(text, lineterminator=end, quoting=quoting).writerows([("a", "b"), *rows])
    path = Path(os.environ["PYTEST_TMP"]) / "a.csv"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + text.getvalue().encode())
    assert all_rows(path) == [{"a": a, "b": b} for a, b in rows]


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    os.environ["PYTEST_TMP"] = str(tmp_path_factory.mktemp("rows"))
    yield
    del os.environ["PYTEST_TMP"]


def test_rows_of_csv_say_the_line_that_they_begin_in(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'a,b\n"x\ny",1\n\n"u"v,2\nz,3\n')
    rows = open_rows(path)
    found = [rows[i] for i in range(len(rows))]
    assert [where for where, _ in found] == [f"{path}:{n}" for n in (2, 4, 5, 6)]
    assert found[0][1] == {"a": "x\ny", "b": "1"}
    assert found[1][1] is None
    assert isinstance(found[2][1], DataError)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet", "json"])
def test_every_format_gives_the_same_rows_and_says_what_it_is_of(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": f"{i} + 1 =", "label": f"{i + 1}"} for i in range(70)]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=20)
    elif kind == "csv":
        path.write_text("prompt,label\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if kind.endswith("gz") else text)
    assert all_rows(path) == rows
    assert open_rows(path).source == (str(path), path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    tasks = TaskSet([TaskSpec(family="jsonl", path=str(path))], seed=0)
    train, held = tasks.train_prompts(0, 40), tasks.heldout_prompts(4)
    assert not {p.prompt_id for p in train} & {p.prompt_id for p in held}
    assert [p.label for p in train] == [str(int(p.messages[0].content.split()[0]) + 1) for p in train]


def test_the_prompts_of_a_step_follow_from_seed_and_step_in_every_format(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1 =", "label": i + 1} for i in range(300)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    drawn = []
    for name, content in (("a.jsonl", text), ("a.json", json.dumps(rows))):
        (tmp_path / name).write_text(content)
        tasks = TaskSet([TaskSpec(family="jsonl", path=str(tmp_path / name))], seed=3)
        drawn.append([p.prompt_id for p in tasks.train_prompts(5, 20)])
    assert drawn[0] == drawn[1]


@given(st.integers(0, 300), st.text(max_size=5))
def test_a_shuffle_is_a_permutation(count: int, key: str) -> None:
    assert sorted(shuffled(count, key)) == list(range(count))


def test_shuffles_are_even() -> None:
    """Each of the 24 orders of four, within five standard deviations of its share; and no place keeps its number more often."""
    seen: dict[tuple[int, ...], int] = {}
    for i in range(24 * 400):
        order = tuple(shuffled(4, str(i)))
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    assert all(abs(n - 400) < 5 * 400**0.5 for n in seen.values()), seen
    same = sum(list(shuffled(10_000, str(i)))[7] == 7 for i in range(5))
    assert same <= 1


def write(path: Path, count: int, bad: dict[int, str]) -> TaskSpec:
    lines = [bad.get(i, json.dumps({"prompt": f"{i} + 1 =", "label": i + 1})) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return TaskSpec(family="jsonl", path=str(path))


def test_of_a_large_file_some_rows_are_looked_at_and_the_others_when_they_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "CHECKED", 10)
    spec = write(tmp_path / "a.jsonl", 100, {33: '{"prompt": "x"}', 57: ""})
    tasks = TaskSet([spec], 0)
    assert tasks.notes[-1] == f"{spec.path}: 100 rows, one in 10 looked at now, the others when they are drawn"
    with pytest.raises(DataError, match=rf"{spec.path}:34 label=None"):
        tasks.train_prompts(0, 200)  # twice the file
    skipping = TaskSet([spec.model_copy(update={"bad_lines": "skip"})], 0)
    drawn = {p.prompt_id for p in skipping.train_prompts(0, 200)}
    assert skipping.skipped_rows >= 1
    assert len(drawn) == len({p.prompt_id for p in skipping.listed_prompts} - {p.prompt_id for p in held(skipping)})
    early = write(tmp_path / "b.jsonl", 100, {30: '{"prompt": "x"}'})
    with pytest.raises(DataError, match=rf"{early.path}:31 label=None"):
        TaskSet([early], 0)


def held(tasks: TaskSet) -> list[Any]:
    from slime_tandem.tasks.family import is_held_out

    return [p for p in tasks.listed_prompts if is_held_out(p.messages)]


def test_labels_of_rows_that_were_not_looked_at_may_take_mathematics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [json.dumps({"prompt": f"{i}?", "label": "yes"}) for i in range(40)]
    spec = write(tmp_path / "a.jsonl", 40, dict(enumerate(words)))
    assert JsonlFamily(spec, "tasks.0").known_labels == []
    monkeypatch.setattr(jsonl, "CHECKED", 10)
    assert JsonlFamily(spec, "tasks.0").known_labels is None
    assert JsonlFamily(write(tmp_path / "b.jsonl", 40, {0: '{"prompt": "a", "label": "1/2"}'}), "").known_labels == [
        "1/2"
    ]


def test_one_prompt_of_each_tag_and_teacher_is_kept(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i}?", "label": 1, "task": f"t{i % 2}", "metadata": {"teacher": f"m{i % 3}"}} for i in range(30)
    ]
    spec = write(tmp_path / "a.jsonl", 30, dict(enumerate(map(json.dumps, rows))))
    found = {(p.task, p.metadata["teacher"]) for p in TaskSet([spec], 0).tagged_prompts}
    assert found == {(f"t{i}", f"m{j}") for i in range(2) for j in range(3)}


def test_a_file_that_is_written_to_while_it_is_read(tmp_path: Path) -> None:
    spec = write(tmp_path / "a.jsonl", 100, {})
    tasks = TaskSet([spec], 0)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match="the file as it was when the job started"):
        tasks.train_prompts(0, 1)
    text = "".join(json.dumps({"prompt": f"{i}", "label": 1}) + "\n" for i in range(50))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    packed = TaskSet([TaskSpec(family="jsonl", path=str(tmp_path / "b.jsonl.gz"))], 0)
    (tmp_path / "b.jsonl.gz").write_bytes(b"")
    assert packed.train_prompts(0, 3), "what was unpacked is this process's own"


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "MOST_JSON", 50)
    spec = write(tmp_path / "a.jsonl", 3, {1: json.dumps({"prompt": "x" * 60, "label": 1})})
    with pytest.raises(DataError, match=rf"{spec.path}:2=.*at most 50 bytes"):
        TaskSet([spec], 0)


MEMORY = """
import sys
from pathlib import Path
from slime_tandem.config import TaskSpec
from slime_tandem.tasks.families import TaskSet
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
TaskSet([TaskSpec(family="jsonl", path=sys.argv[1])], 0).train_prompts(0, 8)
before = peak()
TaskSet([TaskSpec(family="jsonl", path=sys.argv[2])], 0).train_prompts(0, 8)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """160 MB in 400,000 lines: eight bytes a line and the pieces that are read, not the file."""
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    line = json.dumps({"prompt": "What is it? " * 30, "label": 4}) + "\n"
    for path, count in ((small, 100), (large, 400_000)):
        with path.open("w") as file:
            file.writelines(f'{{"n": {i}, {line[1:]}' for i in range(count))
    assert large.stat().st_size > 150e6
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(small), str(large)], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(done.stdout) < 110, "three pieces of 16 MiB with what is found in them, 50,000 rows' notes"
