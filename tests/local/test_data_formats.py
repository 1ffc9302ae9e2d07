"""A run on each format of data: the same rows give the same prompts in the same order with the same rewards."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.config import RunConfig
from slime_tandem.local.run import train

from ..in_process import ThreadServer

ROWS = [{"question": f"{i} + {i} =", "answer": str(2 * i), "level": f"l{i % 3}"} for i in range(60)]
REWARD = """
import zlib

def f(prompt, text):
    "Says what it was given: of another prompt, label, column or text it is another number."
    given = f"{prompt.messages[-1].content}|{prompt.label}|{sorted(prompt.metadata.items())}|{text}"
    return zlib.crc32(given.encode()) % 1000 / 1000
"""


def _table(delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=7)
    return bytes(sink.getvalue())


def _lines() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


FORMATS: dict[str, Callable[[], bytes] | None] = {
    "rows.jsonl": _lines,
    "rows.json": lambda: json.dumps(ROWS).encode(),
    "rows.jsonl.gz": lambda: gzip.compress(_lines()),
    "rows.json.gz": lambda: gzip.compress(json.dumps(ROWS).encode()),
    "rows.csv": lambda: _table(","),
    "rows.csv.gz": lambda: gzip.compress(_table(",")),
    "rows.tsv": lambda: _table("\t"),
    "rows.parquet": _parquet,
    "saved": None,
}
"""What is written under each name; None: a folder that `datasets` saves."""


@pytest.fixture(scope="module")
def run(
    trio: Any, forked_servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], dict[str, Any]]]:
    """What a run of one step on a file has seen and made of it, without its times. One server and one model serve all."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "format_rewards.py").write_text(REWARD)
    with ThreadServer(trio.senior) as senior, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))

        def on(name: str) -> dict[str, Any]:
            make = FORMATS[name]
            if make is None:
                import datasets

                datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / name))
            else:
                (folder / name).write_bytes(make())
            config = RunConfig.from_mapping(
                {
                    "name": name.replace(".", "-"),
                    "runs_dir": str(folder / "runs"),
                    "tasks": [{"family": "jsonl", "path": str(folder / name), "reward": "format_rewards:f"}],
                    "models": {"senior": str(trio.senior)},
                    "tandem": {"enabled": False},
                    "opd": {"enabled": False},
                    "engine": {"cache_tokens": 4096, "senior_url": senior.url},
                    "sampling": {"max_new_tokens": 6},
                    "train": {"steps": 1, "prompts_per_step": 3, "samples_per_prompt": 2, "threads": 1},
                    "eval": {"prompts": 3},
                }
            )
            train(config)
            return seen(config.run_dir)

        yield on


def seen(folder: Path) -> dict[str, Any]:
    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    return {
        "steps": [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows("metrics.jsonl")],
        "evaluations": rows("eval.jsonl"),
        "rewards": rows("rewards.jsonl"),
        "transcripts": rows("transcripts.jsonl"),
    }


@pytest.fixture(scope="module")
def plain(run: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return run("rows.jsonl")


def test_the_rows_are_what_is_trained_on(plain: dict[str, Any]) -> None:
    """What the comparison below compares says something: prompts of the file, rewards that differ."""
    shown = [t for t in plain["transcripts"] if t["phase"] == "train"]
    prompts = {row["question"]: row["answer"] for row in ROWS}
    assert shown
    for transcript in shown:
        assert prompts[transcript["prompt"].split("\n")[0]] == transcript["label"]
    (step,) = plain["steps"]
    assert step["reward/failed_samples"] == 0
    assert step["train/updates"] == 1
    assert plain["rewards"][0]["min"] < plain["rewards"][0]["max"]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "rows.jsonl"])
def test_a_run_on_each_format_is_the_same_run(
    run: Callable[[str], dict[str, Any]], plain: dict[str, Any], name: str
) -> None:
    if name in ("rows.parquet", "saved"):
        pytest.importorskip("datasets")
    assert run(name) == plain
