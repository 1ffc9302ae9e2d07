"""A user's data under slime: its parser takes the flags of a plan, its reader reads the rows that this package reads."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError, DataError, RunDirError
from slime_tandem.slime_launch.flags import plan
from slime_tandem.slime_launch.user_flags import split
from slime_tandem.tasks import jsonl
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.family import is_held_out

from ..slime_sources import REMEDY, VARIABLE

Sized = Callable[..., RunConfig]

PROGRAM = """
import json, sys
from slime.utils.data import Dataset
from slime_tandem.slime_launch.real_parser import ask_hooks, parse
found = {}
for name, flags in json.load(sys.stdin).items():
    args, rest = parse(flags)
    assert not rest, rest
    ask_hooks(args)
    rows = Dataset(
        args.prompt_data, None, None, None, prompt_key=args.input_key, label_key=args.label_key,
        metadata_key=args.metadata_key, tool_key=args.tool_key,
    ).samples
    found[name] = [(row.prompt, row.label, row.metadata) for row in rows], args.rollout_shuffle
json.dump(found, sys.stdout)
"""

GSM8K = [{"question": f"{i} + 1 =", "answer": f"Add.\n#### {i + 1}", "level": i % 3} for i in range(40)]
MINE = [
    {"q": [{"role": "user", "content": f"{i}\u2028?"}], "gold": f"{i}", "info": {"rm_type": "math"}} for i in range(40)
]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def files(folder: Path) -> dict[str, dict[str, Any]]:
    """Tasks on data files of every format."""
    datasets, pq, pa = (pytest.importorskip(name) for name in ("datasets", "pyarrow.parquet", "pyarrow"))
    datasets.disable_progress_bars()
    (folder / "gsm8k.jsonl").write_bytes(lines(GSM8K))
    (folder / "gsm8k.jsonl.gz").write_bytes(gzip.compress(lines(GSM8K)))
    (folder / "gsm8k.json").write_text(json.dumps(GSM8K))
    pq.write_table(pa.Table.from_pylist(GSM8K), folder / "gsm8k.parquet")
    csv = [f'{r["question"]},"{r["answer"]}",{r["level"]}\r\n' for r in GSM8K]
    (folder / "gsm8k.csv").write_text("question,answer,level\r\n" + "".join(csv), newline="")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(GSM8K)}).save_to_disk(str(folder / "saved"))
    (folder / "mine.jsonl").write_bytes(lines(MINE))
    pq.write_table(pa.Table.from_pylist(MINE), folder / "mine.parquet")
    names = ("gsm8k.jsonl", "gsm8k.jsonl.gz", "gsm8k.json", "gsm8k.parquet", "gsm8k.csv")
    named = {"input_key": "q", "label_key": "gold", "metadata_key": "info"}
    return {
        **{name: {"path": str(folder / name)} for name in names},
        "saved": {"path": str(folder / "saved"), "split": "train"},
        **{name: {"path": str(folder / name), **named} for name in ("mine.jsonl", "mine.parquet")},
    }


def test_slime_reads_what_this_package_reads(slime_here: Any, sized: Sized, tmp_path: Path) -> None:
    """Of every format by a plan, which writes JSON lines for it; and of what it can read itself by the same three names."""
    asked: dict[str, list[str]] = {}
    expected: dict[str, Any] = {}
    for name, task in files(tmp_path).items():
        config = sized(tasks=[{"family": "jsonl", **task}], report_to=["tensorboard", "wandb"])
        launch = plan(config, tmp_path / f"plan-{name}")
        launch.write()
        asked[name] = [*launch.flags]
        prompts = list(TaskSet(config.tasks, config.seed).listed_prompts)
        train = [p for p in prompts if not is_held_out(p.messages)]
        assert 30 < len(train) < 40
        more = [{"task": p.task, "prompt_id": p.prompt_id} for p in train]
        expected[name] = [
            [[m.as_dict() for m in p.messages], p.label, {**p.metadata, **own}]
            for p, own in zip(train, more, strict=True)
        ]
        if name.startswith("mine"):  # slime's own command line, without a plan
            keys = ["--input-key", "q", "--label-key", "gold", "--metadata-key", "info"]
            asked[f"own {name}"] = ["--rollout-batch-size", "1", "--prompt-data", task["path"], *keys]
            info = {"rm_type": "math"}
            expected[f"own {name}"] = [[[m.as_dict() for m in p.messages], p.label, info] for p in prompts]
    free = tmp_path / "free.jsonl"
    free.write_bytes(lines([{"prompt": f"Say {i}."} for i in range(40)]))
    config = sized(
        tasks=[{"family": "jsonl", "path": str(free)}], objective={"reward_coef": 0.0}, opd={"enabled": True}
    )
    launch = plan(config, tmp_path / "plan-free")
    launch.write()
    asked["free"] = [*launch.flags]
    done = subprocess.run(
        [slime_here.python, "-W", "ignore", "-c", PROGRAM], input=json.dumps(asked), env=slime_here.environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, rows in expected.items():
        assert found[name][0] == rows, name
        assert found[name][1] == (not name.startswith("own"))
    assert {label for _, label, _ in found["free"][0]} == {None}


def test_a_bad_row_that_is_met_late_leaves_no_file(
    sized: Sized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "CHECKED", 10)
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(GSM8K[:16]) + b"{\n" + lines(GSM8K[16:]))
    launch = plan(sized(tasks=[{"family": "jsonl", "path": str(file)}]), tmp_path / "launch")
    with pytest.raises(DataError, match=rf"{file}:17='\{{': expected one JSON object"):
        launch.write()
    assert not (tmp_path / "launch" / "prompts.jsonl").exists()
    skipping = {"family": "jsonl", "path": str(file), "bad_lines": "skip"}
    plan(sized(tasks=[skipping]), tmp_path / "launch").write()
    assert 30 < (tmp_path / "launch" / "prompts.jsonl").read_text().count("\n") < 40


def test_report_to_is_slimes_flags_and_the_users_own_come_first(
    sized: Sized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)

    def tracked(*extra: str, **settings: Any) -> dict[str, list[str]]:
        flags = split(plan(sized(name="mine", **settings), tmp_path / "launch", extra=extra).flags)
        begins = ("--use-tensorboard", "--use-wandb", "--wandb", "--tb", "--disable-wandb")
        return {name: values for name, values in flags.items() if name.startswith(begins)}

    board = {"--use-tensorboard": [], "--tb-project-name": ["slime_tandem"], "--tb-experiment-name": ["mine"]}
    assert tracked() == board
    assert tracked(report_to="none") == {}
    offline = {"mode": "offline", "entity": "us", "project": "p"}
    ours = {
        "--use-wandb": [], "--wandb-project": ["p"], "--wandb-group": ["mine"], "--disable-wandb-random-suffix": [],
        "--wandb-dir": ["/r/mine"], "--wandb-team": ["us"], "--wandb-mode": ["offline"],
    }  # fmt: skip
    assert tracked(runs_dir="/r", report_to="wandb", tracking=offline) == ours
    theirs = tracked("--wandb-group", "theirs", runs_dir="/r", report_to="wandb", tracking=offline)
    assert theirs == {**ours, "--wandb-group": ["theirs"]}
    assert tracked("--use-wandb", report_to="none") == {"--use-wandb": []}
    with pytest.raises(ConfigError, match=r"report_to=\['trackio'\]: expected tensorboard or wandb: slime's trackers"):
        tracked(report_to="trackio")


def test_tensorboard_writes_into_the_runs_folder(sized: Sized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a local run does; slime's own default lies in whatever folder the job is in."""
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)

    def where(*extra: str, **settings: object) -> str | None:
        config = sized(name="mine", runs_dir=str(tmp_path / "runs"), **settings)
        return plan(config, tmp_path / "launch", extra=list(extra)).environment.get("TENSORBOARD_DIR")

    folder = str(tmp_path / "runs" / "mine" / "tb")
    assert where(report_to="tensorboard") == where("--use-tensorboard", report_to="none") == folder
    assert where(report_to="none") is None
    monkeypatch.setenv("TENSORBOARD_DIR", "/theirs")
    assert where(report_to="tensorboard") is None, "what the user says comes first"


def test_a_launch_that_goes_on_is_the_same_run_of_weights_and_biases(
    sized: Sized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    config = sized(name="mine", runs_dir=str(tmp_path / "runs"), report_to="wandb", tracking={"mode": "offline"})
    first = plan(config, tmp_path / "launch")
    assert not (tmp_path / "runs").exists(), "a plan that is not written leaves nothing"
    first.write()
    made = first.environment["WANDB_RUN_ID"]
    assert json.loads((tmp_path / "runs" / "mine" / "trackers.json").read_text()) == {"run_id": made}
    assert f"export WANDB_RUN_ID={made}\nexport WANDB_RESUME=allow" in first.shell()
    again = plan(config, tmp_path / "launch")
    assert again.environment["WANDB_RUN_ID"] == made
    again.write()
    other = plan(config.model_copy(update={"name": "other"}), tmp_path / "launch")
    assert other.environment["WANDB_RUN_ID"] != made
    assert (
        "WANDB_RUN_ID"
        not in plan(config.model_copy(update={"report_to": ("tensorboard",)}), tmp_path / "l").environment
    )
    monkeypatch.setenv("WANDB_RUN_ID", "theirs")
    assert "WANDB_RUN_ID" not in plan(config, tmp_path / "launch").environment, "what the user says comes first"
    (tmp_path / "runs" / "mine" / "trackers.json").write_text("{")
    monkeypatch.delenv("WANDB_RUN_ID")
    with pytest.raises(RunDirError, match="record of the trackers"):
        plan(config, tmp_path / "launch")


PRIMARY = """
import importlib.util, sys
from argparse import Namespace

spec = importlib.util.spec_from_file_location("wandb_utils", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module._compute_config_for_logging = lambda args: {}
args = Namespace(
    use_wandb=True, wandb_mode="offline", wandb_key=None, wandb_host=None, wandb_team=None, wandb_project="p", wandb_group="g",
    wandb_random_suffix=False, wandb_dir=sys.argv[2], rank=0, wandb_run_id="of the command line",
)
module.init_wandb_primary(args)
import wandb
wandb.log({"rollout/step": 1, "x": 1.0})
wandb.finish()
print(args.wandb_run_id)
"""


def test_slimes_own_primary_takes_the_id_from_the_environment_and_not_from_its_flag(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb")
    source = Path(os.environ.get(VARIABLE, "")) / "slime" / "slime" / "observability" / "wandb_utils.py"
    if VARIABLE not in os.environ or not source.exists():  # the file alone is needed, no environment of slime's
        pytest.skip(f"no slime in {VARIABLE}: {REMEDY}")
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"HOME": str(tmp_path)}
    env |= {"WANDB_RUN_ID": "abcd1234", "WANDB_RESUME": "allow", "WANDB_SILENT": "true"}
    for _ in range(2):  # a launch, and one that goes on
        done = subprocess.run(
            [sys.executable, "-c", PRIMARY, str(source), str(tmp_path)],
            env=env, capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        assert done.stdout.split()[-1] == "abcd1234"
    assert len(list((tmp_path / "wandb").glob("offline-run-*-abcd1234"))) == 2
