"""Folders that `datasets` saved, and names of its hub; neither is ever taken for the other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.config import RunConfig, TaskSpec
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.tasks import saved_datasets
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.jsonl import read_prompts

datasets = pytest.importorskip("datasets")

ROWS = [{"question": f"{i} + 1 =", "answer": f"We add.\n#### {i + 1}", "extra": {"level": i % 3}} for i in range(60)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    datasets.disable_progress_bars()
    base = tmp_path_factory.mktemp("saved")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(base / "one"))
    chosen = whole.shuffle(seed=0).select(range(20))  # with a mapping of indices, and in two files
    datasets.DatasetDict({"train": whole, "test": chosen}).save_to_disk(
        str(base / "two"), num_shards={"train": 2, "test": 1}
    )
    datasets.DatasetDict({"train": whole}).save_to_disk(str(base / "only"))
    return {name: base / name for name in ("one", "two", "only")}


def spec(path: Path, **more: Any) -> TaskSpec:
    return TaskSpec(family="jsonl", path=str(path), **more)


def test_a_folder_is_read_as_the_file_would_be(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    expected = read_prompts(spec(file)).prompts
    for path, split in ((folders["one"], None), (folders["two"], "train"), (folders["only"], None)):
        found = read_prompts(spec(path, split=split))
        assert found.prompts == expected
        told = f"{path}{':train' if split else ''}: 60 rows: prompt from question, label from answer (its final answer)"
        assert found.notes[0] == told
    test = read_prompts(spec(folders["two"], split="test")).prompts
    assert len(test) == 20
    assert {p.prompt_id for p in test} < {p.prompt_id for p in expected}


def test_what_a_folder_is_follows_from_its_rows(folders: dict[str, Path], tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(again))
    datasets.Dataset.from_list([*ROWS[:-1], {**ROWS[-1], "answer": "#### 0"}]).save_to_disk(str(other))
    digests = [TaskSet([spec(path)], 0).sources[0].digest for path in (folders["one"], again, other)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("two", {}, r"split of .*two=None: expected one of train, test.*tasks\[\]\.split"),
        ("two", {"split": "tset"}, "did you mean `test`"),
        ("one", {"split": "train"}, "the folder holds one set of rows"),
    ],
)
def test_splits_are_named(folders: dict[str, Path], name: str, more: dict[str, str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_prompts(spec(folders[name], **more))


def test_other_folders_and_broken_ones(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset_dict\.json or dataset_info\.json.*tasks\[\]\.hub"):
        read_prompts(spec(tmp_path))
    shutil.copytree(folders["one"], tmp_path / "cut")
    (arrow,) = (tmp_path / "cut").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(DataError, match="a readable folder of `datasets`"):
        read_prompts(spec(tmp_path / "cut"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "label": 1}\n')
    with pytest.raises(DataError, match="a file has no splits"):
        read_prompts(spec(tmp_path / "a.jsonl", split="train"))


def test_images_are_neither_decoded_nor_taken(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict(
        {"prompt": ["a"], "label": ["b"], "image": [{"bytes": b"no image", "path": None}]}
    )
    rows.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "images"))
    with pytest.raises(DataError, match=r"row 1 image=.*bytes in a column"):
        read_prompts(spec(tmp_path / "images"))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"the library `datasets`.*slime-tandem\[data\]"):
        read_prompts(spec(folders["one"]))


def test_a_version_that_could_run_code_is_not_taken(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(DataError, match=r"datasets='3\.6\.0': expected version 4 or newer, which runs no code"):
        read_prompts(spec(folders["one"]))


def test_a_name_of_the_hub_is_handed_on_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, subset: str | None, *, split: None, revision: str | None) -> Any:
        asked.append((name, subset, split, revision))
        return datasets.DatasetDict(
            {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:9])}
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = TaskSpec(family="jsonl", hub="openai/gsm8k", subset="main", split="test", revision="e53f048")
    found = read_prompts(task)
    assert asked == [("openai/gsm8k", "main", None, "e53f048")]
    assert len(found.prompts) == 9
    assert found.notes[0].startswith("openai/gsm8k@e53f048[main/test]: 9 rows: prompt from question")


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real library, told to be offline, with an empty cache."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"hub='nobody/nothing': .*can be reached.*save_to_disk.*tasks\[\]\.path"):
        read_prompts(TaskSpec(family="jsonl", hub="nobody/nothing"))


def test_a_dataset_of_a_hub_is_read_and_kept_for_when_there_is_no_network(tmp_path: Path) -> None:
    """By the real library, from a stand-in for the hub. A program beside the data is not run."""

    def asked(*more: str) -> dict[str, Any]:
        command = [sys.executable, "-W", "ignore", "-m", "tests.tasks.hub", str(tmp_path), *more]
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {
            "PYTHONPATH": os.pathsep.join(sys.path)
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    found = asked()
    assert found["main"]["labels"] == [str(i + 1) for i in range(20)]
    assert found["main"]["note"].startswith("me/units[main/test]: 20 rows: prompt from question")
    assert len(found["revision"]["labels"]) == 50
    for name, says in (
        ("no split", r"split of me/units=None: expected one of train, test\..*tasks\[\]\.split"),
        ("subset", r"hub='me/units': expected a subset that there is .*\['main'\].*tasks\[\]\.subset"),
        ("coded", r"hub='me/coded': expected data files: code of a dataset is never run"),
        ("nobody", r"hub='me/none': .*DatasetNotFoundError.*check the name and your token"),
    ):
        assert re.search(says, found[name]), found[name]
    again = asked("--offline")
    assert again["main"] == found["main"], "from the cache"
    assert "save_to_disk" in again["nobody"]


def test_a_folder_of_the_hubs_name_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no openai/gsm8k in the folder that you are in.*tasks\[\]\.path"):
        read_prompts(TaskSpec(family="jsonl", hub="openai/gsm8k"))


@pytest.mark.parametrize(
    ("why", "says"),
    [
        (ValueError("Config name is missing. Please pick one among: ['main', 'socratic']"), r"tasks\[\]\.subset"),
        (RuntimeError("Dataset scripts are no longer supported, but found gsm8k.py"), "never run.*Parquet"),
        (OSError("no network"), "OSError: no network"),
    ],
)
def test_what_the_library_says_is_passed_on(why: Exception, says: str) -> None:
    assert re.search(says, str(saved_datasets._unloaded(saved_datasets.HubName("a/b"), why)))


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"path": "a", "hub": "a/b"}, "either `path`"),
        ({}, "either `path`"),
        ({"hub": "./a/b"}, "hub"),
        ({"hub": "gsm8k"}, "hub"),
        ({"path": "a", "subset": "main"}, "`subset` is of a dataset of the hub"),
        ({"path": "a", "revision": "x"}, "`revision` is of a dataset of the hub"),
    ],
)
def test_settings_that_do_not_go_together(task: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig.from_mapping({"tasks": [{"family": "jsonl", **task}]})
