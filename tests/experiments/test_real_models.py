"""The experiment on a real model: its machinery on a toy that has learnt nothing, its launches under slime without slime."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ..waiting import PATIENCE_S

REPO = Path(__file__).parents[2]
Script = Callable[[str], ModuleType]


@pytest.fixture
def real(script: Script) -> ModuleType:
    return script("real_models")


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("in_process")
def test_a_toy_is_supervised_trained_measured_and_shown(
    real: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    where = ("--work", tmp_path / "work", "--out", out, "--size", "ci", "--seeds", 1)
    call(real, monkeypatch, "probe", *where)
    for _ in range(2):  # the second has nothing left to do
        call(real, monkeypatch, "run", *where, "--arms", *real.ARMS)
    start, *lines = rows(out)
    assert (start["arm"], start["steps"], start["from_start"]) == ("start", 0, pytest.approx([0.0] * 4, abs=1e-3))
    assert sorted(line["arm"] for line in lines) == sorted(real.ARMS)
    for line in lines:
        assert (line["steps"], line["prompts"], len(line["rewards"])) == (2, 4, 2)
        assert len(line["right"]["solo"]) == len(line["right"]["tandem"]) == len(line["legibility"]) == 4
    models = tmp_path / "work" / "models" / "seed-1"
    assert (models / "self" / "junior").resolve() == models / "senior"
    supervised = json.loads((models / "senior" / "supervised.json").read_text())
    assert (supervised["share"], len(supervised["losses"])) == (real.JARGON_SHARE, 2)
    capsys.readouterr()
    call(real, monkeypatch, "table", out)
    shown = capsys.readouterr().out
    assert "| start | 1 |" in shown
    assert "| self-paired | 1 |" in shown


def test_the_tables_tests_are_those_of_the_protocol(real: ModuleType) -> None:
    def line(seed: int, arm: str, right: str, per_token: float) -> dict[str, Any]:
        return {
            "seed": seed, "arm": arm, "lr": 1e-6, "right": {"solo": "1100", "tandem": right},
            "transfer": {"half": right, "alone": "0000"}, "notation": {"solo": 0.25}, "legibility": [per_token] * 4,
            "text_tokens": [1] * 4, "from_start": [0.0] * 4, "tokens": [1] * 4,
        }  # fmt: skip

    lines = [line(s, "tandem", "1110", -1.0 - s / 10) for s in (1, 2, 3)]
    lines += [line(s, "solo GRPO", "1000", -2.0) for s in (1, 2, 3)]
    shown = real.table(lines)
    assert "| tandem accuracy: tandem less solo GRPO | 3 | +0.500 |" in shown
    assert "| legibility: tandem less solo GRPO | 3 | +0.800 |" in shown
    tested, untested = shown.split("tandem, not tested")
    assert "solo accuracy: tandem" not in tested
    assert "| solo accuracy: tandem less solo GRPO | 3 | +0.000 |" in untested
    assert "| 0.25 |" in tested


class _Slime:
    """In the place of real_run.py and `convert`: notes what it is asked, leaves what they leave."""

    def __init__(self, run: Path) -> None:
        self.run, self.asked = run, list[list[str]]()

    def __call__(self, case: Any, command: list[str], log: Path) -> None:
        self.asked.append(command)
        if "convert" in command:
            return
        for step in (1, 3):
            (self.run / "checkpoints" / f"iter_{step:07d}").mkdir(parents=True)
        (self.run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("3\n")
        for step, reward in enumerate((0.25, 0.5)):
            with (self.run / "train.log").open("a") as file:
                file.write(f"[x] rollout {step}: {{'rollout/reward_mean': {reward}}}\n")


@pytest.mark.parametrize("arm", ["tandem", "solo GRPO", "self-paired"])
def test_a_training_under_slime_is_a_call_of_real_run(
    real: ModuleType, arm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = real.Case(3, arm, 2e-6)
    run, models = tmp_path / "runs" / case.name, tmp_path / "models" / "seed-3"
    slime = _Slime(run)
    monkeypatch.setattr(real, "called", slime)
    size = real.SIZES["ci"]
    ends = real.time.monotonic() + 500
    checkouts = (Path("/slime"), Path("/megatron"))
    place = real.Place(tmp_path, tmp_path, size, "slime", *checkouts, ["--fraction", "0.1"], 0.0, ends)
    real.train_under_slime(case, place, models, run)
    trained, converted = slime.asked
    (run / "checkpoints").mkdir()  # cut between training and its end: it is not trained again
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    real.train_under_slime(case, place, models, run)
    assert slime.asked[2:] == [converted]
    monkeypatch.setattr(sys, "argv", trained[3:])
    monkeypatch.syspath_prepend(REPO / "scripts" / "slime")
    import real_run

    a = real_run.parser().parse_args()
    assert (a.steps, a.lr, a.fraction, a.no_teacher, a.work) == (2, 2e-6, 0.1, True, run)
    assert (a.no_junior, a.fused) == (arm == "solo GRPO", arm != "solo GRPO")
    assert a.models == (models / "self" if arm == "self-paired" else models)
    assert 400 < a.limit < 500
    assert a.extra == ["--seed", "3", "--rollout-seed", "3"]
    assert len(a.prompts.read_text().splitlines()) == 4
    assert converted[-4:] == [str(run / "checkpoints"), str(run / "senior"), "--like", str(models / "senior")]
    assert json.loads((run / "trained.json").read_text()) == {"steps": 2, "rewards": [0.25, 0.5]}
    assert not (run / "checkpoints").exists()


def test_starts_lie_apart_and_none_comes_too_late(
    real: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The limit is that of the moment in which a training begins, which waits for its turn; who has too little left is told."""
    now, waited = [1000.0], list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(real, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(real, "_TURNS", real._Turns())
    size, asked = real.SIZES["ci"], list[list[str]]()
    place = real.Place(tmp_path, tmp_path, size, "slime", Path("/s"), Path("/m"), [], 20.0, 1000.0 + real.LEAST_S + 30)

    def cut(case: Any, command: list[str], log: Path) -> None:
        asked.append(command)
        raise SystemExit("cut")

    monkeypatch.setattr(real, "called", cut)
    for seed in (1, 2, 3):
        with pytest.raises(SystemExit) as error:
            real.train_under_slime(real.Case(seed, "tandem", 2e-6), place, tmp_path, tmp_path / str(seed))
    assert waited == [0.0, 20.0, 20.0]
    limits = [float(command[command.index("--limit") + 1]) for command in asked]
    assert limits == [real.LEAST_S + 10, real.LEAST_S - 10]
    assert "110 s until the limit, not begun. Remedy: call again" in str(error.value)


def test_lines_of_what_still_runs_are_kept_when_another_fails(script: Script, tmp_path: Path) -> None:
    side_by_side = script("questions").side_by_side
    failed, out = threading.Event(), tmp_path / "lines.jsonl"

    def train(case: SimpleNamespace) -> dict[str, Any]:
        if case.name == "bad":
            failed.set()
            raise SystemExit("bad: exit code 124")
        if case.name == "good":
            failed.wait(PATIENCE_S)
            time.sleep(0.3)
        return {"name": case.name}

    class Named(SimpleNamespace):
        __hash__ = object.__hash__

    with pytest.raises(SystemExit, match="bad: exit code 124"):
        side_by_side(2, dict.fromkeys([Named(name=n) for n in ("good", "bad", *"abcdef")], out), train)
    names = [row["name"] for row in rows(out)]
    assert "good" in names
    assert len(names) < 7


def test_a_run_may_have_a_network_of_its_own() -> None:
    """Many runs go side by side then, each with slime's port 15000; who may not make one is told so."""
    code = (
        "import sys; sys.path.insert(0, 'scripts/slime'); import real_run, socket; real_run.own_network()\n"
        "socket.create_server(('127.0.0.1', 15000)); print(open('/proc/net/dev').read().count(':'))"
    )
    with socket.socket() as taken:
        taken.bind(("", 0))
        code = code.replace("15000", str(taken.getsockname()[1]))
        done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode:
        assert "--own-network: expected the right to make a network" in done.stderr
        assert "Remedy: run as root, or one run at a time" in done.stderr
    else:
        assert done.stdout == "1\n", "the loopback alone"


def test_older_checkpoints_go(real: ModuleType, tmp_path: Path) -> None:
    for step in (9, 19):
        (tmp_path / f"iter_{step:07d}").mkdir()
    real.keep_newest(tmp_path)  # nothing says which is whole
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    real.keep_newest(tmp_path)
    assert {p.name for p in tmp_path.glob("iter_*")} == {"iter_0000009"}


def shell(name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(REPO / "scripts" / "experiments" / "real_models.sh"), name],
        env={**os.environ, "DRY_RUN": "1", **variables},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def test_one_command_runs_it_under_slime_from_an_archive() -> None:
    under = {
        "BACKEND": "slime",
        "SLIME_DIR": "/s",
        "MEGATRON_LM_DIR": "/m",
        "SLIME_PYTHON": "py",
        "BASE": "/none",
        "LR": "5e-6",
    }
    done = shell("main", **under, ARCHIVE="/a.whl", OUT="/o.jsonl", LIMIT="500")
    assert done.returncode == 0, done.stderr
    fetched, probed, trained = done.stdout.splitlines()
    assert fetched.strip() == "py -m slime_tandem.cli fetch-model smollm2 --dest /none --archive /a.whl"
    where = (
        "--out /o.jsonl --size full --backend slime --slime /s --megatron /m --base /none --limit 500 --seeds 1 2 3 4 5"
    )
    assert where in probed
    assert where in trained
    assert trained.strip().endswith(r"--arms tandem solo\ GRPO --jobs 4 --lr 5e-6")
    assert "--arms self-paired" in shell("self", **under).stdout
    assert "--seeds 0 --arms tandem solo\\ GRPO --jobs 4 --lr 2e-6 5e-6 1e-5" in shell("pilot", **under).stdout


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("other", {}, "NAME=other: expected pilot, main, self or table"),
        ("main", {"SIZE": "big"}, "SIZE=big: expected full or ci"),
        ("main", {"BACKEND": "gpu"}, "BACKEND=gpu: expected local or slime"),
    ],
)
def test_what_is_wrong_is_named(name: str, variables: dict[str, str], message: str) -> None:
    done = shell(name, PYTHON=sys.executable, **variables)
    assert done.returncode == 2
    assert message in done.stderr
