"""What trackers get is what the run's folder holds; what they do never reaches the training."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, RunDirError
from slime_tandem.report import trackers as module
from slime_tandem.report.run_folder import read_rows, require_same_settings
from slime_tandem.report.trackers import Named, Trackers, require_trackers
from tests.report import tracked

pytest.importorskip("wandb")
pytest.importorskip("trackio")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a run's folder, trackio's)."""
    folder, database = tmp_path_factory.mktemp("mine"), tmp_path_factory.mktemp("trackio")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TRACKIO"))}
    env |= {"TRACKIO_DIR": str(database), "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(database)}
    subprocess.run([sys.executable, "-m", "tests.report.tracked", str(folder)], check=True, env=env, timeout=120)
    return folder, database


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log behind a header of seven bytes, with W&B's checksum of type and data."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, found = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part = data[at + 7 : at + 7 + length]
        assert checksum == zlib.crc32(part, zlib.crc32(bytes([kind])))
        found = part if kind in (1, 2) else found + part
        if kind in (1, 4):
            yield found
        at += 7 + length


def wandb_run(path: Path) -> tuple[Any, list[dict[str, Any]]]:
    from wandb.proto import wandb_internal_pb2

    about, rows = None, []
    for data in records(path):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "run":
            about = record.run
        if record.WhichOneof("record_type") == "history":
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            rows.append({k: v for k, v in items.items() if not k.startswith("_")})
    return about, rows


def sent(folder: Path) -> list[dict[str, Any]]:
    """What the run wrote in this order, one row over: steps 0 to 2 and an evaluation, then 2 to 4 and another."""
    steps = {row["step"]: row for row in read_rows(folder / "metrics.jsonl")}
    assert list(steps) == [0, 1, 2, 3, 4]
    assert steps[3] == {"step": 3, **tracked.row(3)}
    evals = [{k: v for k, v in row.items() if k != "phase"} for row in read_rows(folder / "eval.jsonl")]
    assert [row["step"] for row in evals] == [5]
    return [steps[0], steps[1], steps[2], {**evals[0], "step": 3}, steps[2], steps[3], steps[4], evals[0]]


def split(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of histograms, rows of metrics)."""
    drawn = [row for row in rows if any(name.startswith("rollout/reward/") for name in row)]
    return drawn, [row for row in rows if row not in drawn]


def histograms(key: str, kind: str) -> list[dict[str, Any]]:
    """What the run wrote of its rewards, in the form of a tracker."""
    return [
        {"step": step}
        | {
            f"rollout/reward/{h['task']}": {key: kind, "values": h["counts"], "bins": h["edges"]}
            for h in tracked.rewards(step)
        }
        for step in (0, 1, 2, 2, 3, 4)
    ]


def test_an_offline_run_of_weights_and_biases_is_read_back(run: tuple[Path, Path]) -> None:
    folder, _ = run
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    (first, rows), (second, more) = map(wandb_run, files)
    drawn, plain = split(rows + more)
    assert plain == sent(folder)
    nested = [
        {f"{name}/{key}": value for name, parts in row.items() if name != "step" for key, value in parts.items()}
        for row in histograms("_type", "histogram")
    ]
    assert [{k: v for k, v in row.items() if k != "step"} for row in drawn] == nested, "W&B keeps their parts by key"
    assert [row["step"] for row in drawn] == [0, 1, 2, 2, 3, 4]
    assert len({frozenset(row) for row in plain}) == 2, "the keys of a step, and those of an evaluation"
    ids = {about.run_id for about in (first, second)}
    assert ids == {json.loads((folder / "trackers.json").read_text())["run_id"]}
    assert (first.project, first.display_name, first.run_group) == ("slime_tandem", "mine", "mine")
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert config["tandem"] == RunConfig().model_dump(mode="json")["tandem"]
    assert "cluster" not in config


def test_a_run_of_trackio_is_read_back(run: tuple[Path, Path]) -> None:
    folder, database = run
    connection = sqlite3.connect(database / "slime_tandem.db")
    try:
        found = list(connection.execute("select run_id, step, metrics from metrics order by id"))
        ((name, config),) = list(connection.execute("select run_name, config from configs"))
    finally:
        connection.close()
    drawn, plain = split([{"step": step, **json.loads(metrics)} for _, step, metrics in found])
    assert plain == sent(folder)
    assert drawn == histograms("_type", "trackio.histogram")
    assert len({run_id for run_id, _, _ in found}) == 1
    assert name == f"mine-{json.loads((folder / 'trackers.json').read_text())['run_id']}"
    assert json.loads(config)["tandem"]["prob_senior"] == 0.5


def test_tensorboard_has_the_same_values(run: tuple[Path, Path]) -> None:
    folder, _ = run
    found: list[dict[str, Any]] = []
    for path in sorted((folder / "tb").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            values = {
                v.tag: tensor_util.make_ndarray(v.tensor).item()
                for v in event.summary.value
                if not v.tag.startswith("rollout/reward/")
            }
            found += [{"step": event.step, **values}] if values else []
    for shown, row in zip(found, sent(folder), strict=True):
        assert shown == pytest.approx({k: v for k, v in row.items() if v is not None})


class Broken:
    """A tracker that refuses every second row, or waits for ever at its end."""

    def __init__(self, named: Named, waits: threading.Event | None = None) -> None:
        self.named, self.waits, self.rows = named, waits, 0

    def log(self, step: int, row: object) -> None:
        self.rows += 1
        if self.rows % 2 == 0:
            raise OSError("no network")

    def finish(self) -> None:
        if self.waits is not None:
            self.waits.wait(20)
        else:
            raise RuntimeError("not saved")


def unopened(named: Named) -> Broken:
    raise SystemExit("no key")


def test_what_fails_is_counted_and_said_and_never_raised(tmp_path: Path) -> None:
    config = RunConfig.from_mapping({"report_to": ["wandb", "trackio"], "tracking": {"mode": "offline"}})
    said: list[str] = []
    openers = {"wandb": unopened, "trackio": Broken}
    with Trackers(config, tmp_path, name="a", say=said.append, openers=openers) as trackers:
        for step in range(5):
            trackers.log(step, {"x": 1.0})
    assert trackers.lost == {"wandb": 5, "trackio": 2}
    told = sorted(said)
    assert told[0].startswith("trackio did not end well (RuntimeError: not saved); training goes on")
    assert told[1].startswith("trackio takes no rows (OSError: no network)")
    assert told[2:4] == [
        "trackio: 2 of 5 rows were not taken; metrics.jsonl has them",
        "wandb takes no rows (SystemExit: no key); training goes on, the run's folder has all rows",
    ]
    assert told[4] == "wandb: 5 of 5 rows were not taken; metrics.jsonl has them"
    assert len(told) == 5


def test_one_that_hangs_is_left(tmp_path: Path) -> None:
    release, said = threading.Event(), list[str]()
    openers = {"wandb": lambda named: Broken(named, release)}
    config = RunConfig.from_mapping({"report_to": "wandb"})
    with Trackers(config, tmp_path, name="a", say=said.append, openers=openers, ends_in_s=0.1) as trackers:
        trackers.log(0, {"x": 1.0})
    release.set()
    assert said == ["wandb has not ended after 0.1 s: 0 rows or more were not sent"]


def test_nothing_is_opened_without_a_row_or_a_tracker(tmp_path: Path) -> None:
    with Trackers(RunConfig.from_mapping({"report_to": "wandb"}), tmp_path, name="a", openers={"wandb": unopened}):
        pass
    with Trackers(RunConfig(), tmp_path, name="a") as trackers:
        trackers.log(0, {})
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_trackers_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text('{"id": 1}')
    config = RunConfig.from_mapping({"report_to": "wandb"})
    with (
        Trackers(config, tmp_path, name="a", openers={"wandb": unopened}) as trackers,
        pytest.raises(RunDirError, match=r"record of the trackers.*or delete it"),
    ):
        trackers.log(0, {})


def test_a_library_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "trackio"):
        with pytest.raises(ConfigError, match=rf"report_to='{name}'.*slime-tandem\[{name}\]'"):
            require_trackers(RunConfig.from_mapping({"report_to": [name]}))
    require_trackers(RunConfig())


def test_online_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(module, "_has_key", lambda: False)
    with pytest.raises(ConfigError, match=r"report_to='wandb'.*WANDB_API_KEY.*tracking\.mode=offline"):
        require_trackers(RunConfig.from_mapping({"report_to": "wandb"}))
    require_trackers(RunConfig.from_mapping({"report_to": "wandb", "tracking": {"mode": "offline"}}))
    monkeypatch.setenv("WANDB_MODE", "offline")
    require_trackers(RunConfig.from_mapping({"report_to": "wandb"}))


@pytest.mark.parametrize(
    ("given", "means"),
    [("wandb", ("wandb",)), ("none", ()), ([], ()), (["wandb", "tensorboard"], ("wandb", "tensorboard"))],
)
def test_report_to_takes_a_name_or_a_list(given: object, means: tuple[str, ...]) -> None:
    assert RunConfig.from_mapping({"report_to": given}).report_to == means


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"report_to": "mlflow"}, "report_to"),
        ({"report_to": ["wandb", "wandb"]}, "each name once"),
        ({"tracking": {"project": "a"}}, r"tracking\.project='a': expected wandb or trackio in report_to"),
        ({"report_to": "trackio", "tracking": {"mode": "offline"}}, r"tracking\.mode='offline': expected wandb in"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig.from_mapping(settings)


def test_a_resumed_run_may_report_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(RunConfig().to_yaml())
    other = RunConfig.from_mapping({"report_to": "wandb", "tracking": {"mode": "offline", "project": "x"}})
    require_same_settings(tmp_path / "config.yaml", other)
