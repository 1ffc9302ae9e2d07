"""Whole runs on real servers and a real Megatron-core model: learning, resuming, stopping, surviving."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_tandem.config import RunConfig
from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.sglang_child import API_KEY_ENV
from slime_tandem.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    ModelError,
    RunDirError,
    TandemError,
    TeacherScoreError,
    TokenizerMismatchError,
)
from slime_tandem.local import run as local_run
from slime_tandem.local.run import train
from slime_tandem.rollout.boundaries import BoundaryRecord

from ..forked import Command, Forks
from ..in_process import ThreadServer
from ..waiting import wait_until

BASE: dict[str, Any] = {
    "name": "r",
    "control": True,
    "tasks": [{"family": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}],
    "sampling": {"max_new_tokens": 12},
    "train": {"steps": 4, "prompts_per_step": 2, "samples_per_prompt": 3, "save_every": 1, "threads": 1},
    "eval": {"prompts": 4},
    "engine": {"cache_tokens": 4096, "backoff_s": 0.05, "max_retries": 2},
    "optimizer": {"lr": 0.01},
    # A coefficient that moves at every update: a resumed run must go on with it.
    "objective": {"kl_coef": 0.1, "kl_target": 0.02, "lambda_jun": 0.1},
}


ROLES = ("senior", "junior", "teacher")
_forks: list[Forks] = []
_urls: dict[str, str] = {}
"""Servers that the tests share, as far as they are not about servers. No run changes the junior and the teacher; into the
senior's every run sends its own weights first."""


@pytest.fixture(scope="module", autouse=True)
def _shared_servers(trio, side_url, forked_servers) -> Iterator[None]:  # type: ignore[no-untyped-def]
    with ThreadServer(trio.senior) as senior, Forks() as forks:
        _forks.append(forks)
        _urls.update(senior_url=senior.url, junior_url=side_url("junior"), teacher_url=side_url("teacher"))
        yield
        _urls.clear()
        _forks.clear()


def own(*roles: str) -> dict[str, Any]:
    """The setting of a run that starts the servers of these roles itself."""
    return {"engine": {**BASE["engine"], **{k: v for k, v in _urls.items() if k.removesuffix("_url") not in roles}}}


def settings(trio, runs: Path, **changes: Any) -> dict[str, Any]:  # type: ignore[no-untyped-def]
    models = {role: str(getattr(trio, role)) for role in ROLES}
    return {**BASE, "runs_dir": str(runs), "models": models, **own(), **changes}


_started: list[Command] = []


@pytest.fixture(autouse=True)
def _reap() -> Iterator[None]:
    """A test that fails in the middle leaves no run behind it, for the sake of the tests after it."""
    yield
    while _started:
        process = _started.pop()
        process.send_signal(signal.SIGKILL)
        process.communicate()


def arguments(config: dict[str, Any], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return ["train", "--config", str(path)]


def start(config: dict[str, Any], folder: Path, *flags: str, **how: bool) -> Command:
    _started.append(_forks[0].start(*arguments(config, folder), *flags, folder=folder, **how))
    return _started[-1]


def finish(process: Command) -> None:
    _, err = process.communicate()
    assert process.returncode == 0, err


def rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for_steps(process: Command, run: Path, n: int) -> None:
    def written() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return len(rows(run / "metrics.jsonl")) >= n

    wait_until(written)


def servers_of(run: Path) -> list[int]:
    """Process ids of servers whose command line or log belongs to this run folder, by role: junior, senior, teacher."""
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                logs = os.readlink(proc / "fd" / "1")
                line = (proc / "cmdline").read_bytes()
            except OSError:
                continue
            if b"slime_tandem.engines" in line and logs.startswith(str(run.resolve())):
                found.append((logs, int(proc.name)))
    return [pid for _, pid in sorted(found)]


def comparable(path: Path) -> list[dict[str, Any]]:
    """Rows without what depends on the clock or on luck with connections."""
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "engine/retries"} for r in rows(path)]


@pytest.fixture(scope="module")
def uninterrupted(trio, _shared_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    root = tmp_path_factory.mktemp("uninterrupted")
    command = [
        sys.executable,
        "-W",
        "default::ResourceWarning",
        "-m",
        "slime_tandem.cli",
        *arguments(settings(trio, root / "runs", **own("senior")), root),
    ]
    with (root / "out").open("wb") as out, (root / "err").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
    try:
        wait_until(lambda: _KEYS.look() or process.poll() is not None)
    finally:
        process.kill()
        process.wait()
    stderr = (root / "err").read_text()
    assert process.returncode == 0, stderr
    assert "report.html" in (root / "out").read_text()
    assert "ResourceWarning" not in stderr
    return root / "runs" / "r"


class _Keys:
    """Keys of servers, and the command lines of all processes, as they are seen while a run goes on."""

    def __init__(self) -> None:
        self.found: set[bytes] = set()
        self.command_lines: set[bytes] = set()

    def look(self) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                self.command_lines.add((process / "cmdline").read_bytes())
                for entry in (process / "environ").read_bytes().split(b"\0"):
                    if entry.startswith(f"{API_KEY_ENV}=".encode()):
                        self.found.add(entry.partition(b"=")[2])


_KEYS = _Keys()


def test_the_key_of_a_run_is_in_no_file_and_no_command_line(uninterrupted: Path) -> None:
    """In the environment of the server alone, which its own user can read, and nobody else."""
    keys = {key for key in _KEYS.found if len(key) == 43}  # as `secrets.token_urlsafe(32)` makes them
    assert keys, "the run had a server of its own, with a key"
    assert any(b"embedded.child" in line for line in _KEYS.command_lines)
    files = [path for path in uninterrupted.parents[1].rglob("*") if path.is_file()]
    assert {"config.yaml", "senior.log", "report.html", "metrics.jsonl", "out", "err"} <= {path.name for path in files}
    for key in keys:
        assert not [line for line in _KEYS.command_lines if key in line]
        assert not [path for path in files if key in path.read_bytes()]


def test_a_run_leaves_everything_that_is_promised(uninterrupted: Path) -> None:
    for arm in (uninterrupted, uninterrupted / "control"):
        assert [r["step"] for r in rows(arm / "metrics.jsonl")] == [0, 1, 2, 3]
        assert [(r["step"], r["phase"]) for r in rows(arm / "eval.jsonl")] == [(0, "before"), (4, "after")]
        assert (arm / "checkpoints" / "step-000004").is_dir()
        assert list((arm / "tb").iterdir())
        rewards = rows(arm / "rewards.jsonl")
        assert [(r["step"], r["task"], sum(r["counts"])) for r in rewards] == [(i, "chain_sum", 6) for i in range(4)]
    assert (uninterrupted / "report.html").stat().st_size > 1000
    assert BoundaryRecord.from_json((uninterrupted / "boundaries.json").read_text()).ids, (
        "enough to recompute who wrote what"
    )
    assert RunConfig.load(uninterrupted / "config.yaml").train.steps == 4
    run, control = rows(uninterrupted / "metrics.jsonl"), rows(uninterrupted / "control" / "metrics.jsonl")
    for row in run:
        assert 0 < row["tandem/senior_token_fraction"] < 1
        assert row["train/logprob_diff"] < 1e-4, "the trainer and the engine hold the same weights"
        assert row["opd/failed_samples"] == 0
        assert 0 < row["opd/coverage"] <= 1
        assert row["train/junior_kl"] > 0
    assert len({row["train/kl_coef"] for row in run}) == 4
    for row in control:
        assert row["tandem/senior_token_fraction"] == 1
        assert row["opd/teacher_kl"] is None
        assert row["train/opd_loss"] == 0
    before = [rows(a / "eval.jsonl")[0] for a in (uninterrupted, uninterrupted / "control")]
    assert before[0]["eval/tandem_accuracy"] == before[1]["eval/tandem_accuracy"], "both start from the same weights"
    assert servers_of(uninterrupted) == []


@pytest.mark.parametrize(("arm", "after"), [("", 2), ("control", 1)])
def test_a_killed_run_resumes_to_the_same_metrics(
    trio, uninterrupted: Path, tmp_path: Path, arm: str, after: int
) -> None:  # type: ignore[no-untyped-def]
    config = settings(trio, tmp_path / "runs", **own("senior"))
    run = tmp_path / "runs" / "r"
    process = start(config, tmp_path)
    wait_for_steps(process, run / arm, after)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if arm:  # on another server, and in this process: one less to start
        train(RunConfig.from_mapping(config | own()), resume=True)
    else:
        finish(start(config, tmp_path, "--resume"))
    for part in ("", "control"):
        for name in ("metrics.jsonl", "eval.jsonl", "rewards.jsonl"):
            assert comparable(run / part / name) == comparable(uninterrupted / part / name), f"{part}/{name}"
    wait_until(lambda: servers_of(run) == [])  # the killed run's servers are gone, too


def test_killed_servers_are_restarted_and_nothing_changes(trio, uninterrupted: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """First the teacher's, then the other two at once."""
    config = settings(trio, tmp_path / "runs", control=False, **own(*ROLES))
    run = tmp_path / "runs" / "r"
    process = start(config, tmp_path)
    for step, killed in ((1, slice(2, 3)), (2, slice(0, 2))):
        wait_for_steps(process, run, step)
        for pid in servers_of(run)[killed]:
            os.kill(pid, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 0, err
    lines = [line for line in err.splitlines() if line.startswith("restarted the ")]
    assert lines[0].startswith("restarted the teacher server after: ")
    assert all(any(role in line.partition(" after: ")[0] for line in lines[1:]) for role in ("senior", "junior"))
    assert comparable(run / "metrics.jsonl") == comparable(uninterrupted / "metrics.jsonl")


@pytest.mark.parametrize(
    ("number", "ignores_sigint"),  # as a job that a shell starts in the background
    [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)],
)
def test_an_interrupt_leaves_a_checkpoint_and_no_process(
    trio, tmp_path: Path, number: int, ignores_sigint: bool
) -> None:  # type: ignore[no-untyped-def]
    changes = {"train": {**BASE["train"], "steps": 1000, "save_every": 1000}, "control": False, **own("senior")}
    run = tmp_path / "runs" / "r"
    process = start(settings(trio, tmp_path / "runs", **changes), tmp_path, ignores_sigint=ignores_sigint)
    wait_for_steps(process, run, 2)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "--resume" in err
    steps = len(rows(run / "metrics.jsonl"))
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
    assert (run / "report.html").exists()
    assert servers_of(run) == []


@pytest.mark.parametrize("where", ["update", "send", "write"])
def test_an_interrupt_inside_a_step_waits_until_the_step_is_whole(
    trio, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:  # type: ignore[no-untyped-def]
    from slime_tandem.local import run as module
    from slime_tandem.report.run_folder import RunWriter
    from slime_tandem.team.team import Team
    from slime_tandem.training.trainer import Trainer

    owner, name = {
        "update": (Trainer, "update"),
        "send": (Team, "send_weights"),
        "write": (RunWriter, "write_step"),
    }[where]
    original = getattr(owner, name)
    calls = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = original(*args, **kwargs)
        calls += 1
        # The second update, its weights (the first weights sent are the start's), its row.
        if calls == 2 + (where == "send"):
            signal.raise_signal(signal.SIGINT)
        return result

    config = RunConfig.from_mapping(settings(trio, tmp_path / "runs", control=False))
    config = config.model_copy(update={"train": config.train.model_copy(update={"save_every": 1000})})
    run = tmp_path / "runs" / "r"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            module.train(config)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000002"]
    assert [r["step"] for r in rows(run / "metrics.jsonl")] == [0, 1]
    module.train(config, resume=True)
    assert comparable(run / "metrics.jsonl") == comparable(uninterrupted / "metrics.jsonl")


def test_a_length_reward_makes_length_rise_to_the_cap(trio, running, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from slime_tandem.megatron.policy import MegatronPolicy
    from slime_tandem.tasks.families import TaskSet
    from slime_tandem.team.rollouts import rollout
    from slime_tandem.team.roster import Roster
    from slime_tandem.team.team import Team
    from slime_tandem.training.rows import build_rows
    from slime_tandem.training.trainer import Trainer

    # A constant direction in the residual stream, and an end-of-turn row that likes it: short responses to start with.
    model = AutoModelForCausalLM.from_pretrained(trio.senior)
    tokenizer = AutoTokenizer.from_pretrained(trio.senior)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[:, 0] = 1.0
        table[tokenizer.eos_token_id, 0] = 1.9
    model.save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    cap = 16
    config = RunConfig.from_mapping(
        settings(trio, tmp_path / "runs")
        | {
            "engine": own()["engine"] | {"junior_url": running(ThreadServer(tmp_path / "short")).url},
            "models": {"senior": str(tmp_path / "short"), "junior": str(tmp_path / "short")},
            "objective": {},
            "opd": {"enabled": False},
            "tandem": {"prob_senior": 0.8},
            "sampling": {"max_new_tokens": 24},
            "optimizer": {"lr": 0.02},
        }
    )
    tasks = TaskSet(config.tasks, config.seed)
    lengths = []
    policy = MegatronPolicy.from_hf(tmp_path / "short", config.optimizer, threads=1)
    trainer = Trainer(config, policy, None)
    with Team(Roster(config), tmp_path / "logs") as team:
        team.send_weights(tmp_path / "short", "start")
        for step in range(14):
            scored, _ = rollout(team, tasks, tasks.train_prompts(step, 6), step, 8, tandem=True, score=False)
            scored = [replace(s, reward=float(min(len(s.sample.response_ids), cap))) for s in scored]
            lengths.append(sum(s.reward for s in scored) / len(scored))
            rows, _ = build_rows(scored, config)
            trainer.update(rows)
            policy.save_hf(tmp_path / "weights")
            team.send_weights(tmp_path / "weights", f"v{step}")
    assert lengths[0] < cap / 2, lengths
    assert sum(lengths[4:8]) > sum(lengths[:4]), lengths
    assert max(lengths[-3:]) > 0.9 * cap, lengths


def misuse(trio, tmp_path: Path, changes: dict[str, Any]) -> RunConfig:  # type: ignore[no-untyped-def]
    return RunConfig.from_mapping(settings(trio, tmp_path / "runs", **{**own(*ROLES), **changes}))


def test_a_junior_with_another_tokenizer_is_refused_before_any_server(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    models = {"senior": str(trio.senior), "junior": str(trio.teacher), "teacher": str(trio.teacher)}
    with pytest.raises(TokenizerMismatchError, match=r"models\.junior"):
        train(misuse(trio, tmp_path, {"models": models}))
    assert not (tmp_path / "runs" / "r" / "logs").exists()


def test_a_junior_with_another_tokenizer_co_writes_when_asked_to(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """All of co-writing's options in one run: bytes at handoffs, sessions, small requests, junior tokens with weight, a
    stop string."""
    changes = settings(trio, tmp_path, control=False)
    changes["models"]["junior"] = str(trio.teacher)
    changes["tandem"] = {"junior_tokenizer": "any", "junior_token_loss_weight": 0.25}
    changes["objective"] = {"kl_coef": 0.1}
    changes["engine"] |= {"junior_url": _urls["teacher_url"], "sessions": True, "tokens_per_request": 4}
    changes["sampling"] = {**BASE["sampling"], "stop": ["answer"]}
    changes["train"] = {**BASE["train"], "steps": 2}
    config = RunConfig.from_mapping(changes)
    train(config)
    steps = rows(config.run_dir / "metrics.jsonl")
    assert len(steps) == 2
    for row in steps:
        assert 0 < row["tandem/senior_token_fraction"] < 1
        assert row["tandem/junior_token_fraction"] == pytest.approx(1 - row["tandem/senior_token_fraction"])
        assert row["tandem/fallback_runs"] == row["rollout/failed_samples"] == 0
        assert row["train/ratio_mean"] == pytest.approx(1, abs=1e-3), (
            "also on junior tokens: under the senior that wrote"
        )


def test_a_run_of_two_turns(trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """A tool answers between the turns: nobody is trained on its text, and the teacher reads it in markup of its own."""
    (tmp_path / "my_tools.py").write_text(
        "from slime_tandem.types import Message\n"
        "async def echo(prompt, chat):\n"
        "    return [Message('tool', f'{len(chat[-1].content)} <answer>{prompt.label}</answer>')]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = settings(trio, tmp_path, control=False)
    changes["tasks"] = [{**BASE["tasks"][0], "environment": "my_tools:echo", "max_turns": 3}]
    changes["sampling"] = {"max_new_tokens": 120, "stop": ["e", "a", " ", "n", "t", "1"]}
    changes["train"] = {**BASE["train"], "steps": 1}
    config = RunConfig.from_mapping(changes)
    train(config)
    steps = rows(config.run_dir / "metrics.jsonl")
    assert len(steps) == 1
    for row in steps:
        # What the tool says holds the answer: that the reward is 0 shows that it is not read as the model's.
        assert row["rollout/accuracy"] == row["rollout/failed_samples"] == row["opd/failed_samples"] == 0
        assert row["opd/unaligned_inserted"] > 0
        assert 0 < row["opd/coverage"] <= 1
        assert row["tandem/junior_token_fraction"] == pytest.approx(1 - row["tandem/senior_token_fraction"])
        assert row["train/logprob_diff"] < 1e-3
    for row in rows(config.run_dir / "transcripts.jsonl"):
        text = "".join(token["text"] for token in row["tokens"] if token["author"] is None)
        assert text.count("<|tool|>") == text.count("<|assistant|>") == 2, "three turns"
        assert text.count(f"<answer>{row['label']}</answer>") == 2
        assert all(token["teacher_log_prob"] is None for token in row["tokens"] if token["author"] is None)
        assert any(token["teacher_log_prob"] is not None for token in row["tokens"])


def test_a_senior_that_trains_alone_can_be_evaluated_with_a_junior(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    changes = {"tandem": {"enabled": False}, "opd": {"enabled": False}, "train": {**BASE["train"], "steps": 1}}
    config = RunConfig.from_mapping(
        settings(trio, tmp_path, control=False, eval={"prompts": 4, "tandem": True}, **changes)
    )
    train(config)
    assert rows(config.run_dir / "metrics.jsonl")[0]["tandem/senior_token_fraction"] == 1
    for row in rows(config.run_dir / "eval.jsonl"):
        assert row["eval/tandem_accuracy"] is not None
        assert 0 < row["eval/senior_token_fraction"] < 1


def test_a_prompt_file_that_names_an_unknown_teacher_is_refused_at_the_start(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    line = {"prompt": "1 + 1 =", "label": "2", "metadata": {"teacher": "nobody"}}
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({**line, "prompt": f"{i} + 1 ="}) + "\n" for i in range(40)))
    config = RunConfig.from_mapping(
        settings(trio, tmp_path, control=False, tasks=[{"family": "jsonl", "path": str(tmp_path / "p.jsonl")}])
    )
    with pytest.raises(DataError, match=r"metadata\.teacher .*'nobody': expected names among teacher"):
        train(config)
    assert not (config.run_dir / "config.yaml").exists()


def test_prompts_without_labels_are_distilled(trio, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "p.csv").write_text("question,level\n" + "".join(f"{i} + 1 =,easy\n" for i in range(60)))
    tree = settings(
        trio, tmp_path, control=False, tasks=[{"family": "jsonl", "path": str(tmp_path / "p.csv")}],
        opd={"enabled": True}, objective={"reward_coef": 0.0}, train={**BASE["train"], "steps": 1}, eval={"prompts": 2},
    )  # fmt: skip
    config = RunConfig.from_mapping(tree)
    train(config)
    (row,) = rows(config.run_dir / "metrics.jsonl")
    assert row["rollout/reward_mean"] is None, "there is none, which is no 0"
    assert row["train/grad_norm"] > 0
    told = capsys.readouterr()
    assert "p.csv: 60 rows: prompt from question, no label" in told.err
    assert "p.csv: metadata: level" in told.err
    assert "nothing to learn from" not in told.err


def test_a_first_step_of_equal_rewards_says_why(trio, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i} + 1 =", "label": "no such"}}\n' for i in range(60)))
    task = {"family": "jsonl", "path": str(tmp_path / "p.jsonl"), "instruction": "End with a box."}
    tree = settings(
        trio, tmp_path, control=False, tasks=[task], train={**BASE["train"], "steps": 1}, eval={"prompts": 2}
    )
    train(RunConfig.from_mapping(tree))
    told = " ".join(capsys.readouterr().err.split())
    assert "nothing to learn from: all 6 rewards are 0: 6 of 6 responses have no answer (<answer> or \\boxed{})" in told
    assert told.count("End with a box.'") == 3


def test_several_teachers_and_a_divergence_read_along(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Two teachers by task, one with the student's vocabulary; candidates of both sides; scored while others still write."""
    changes = settings(trio, tmp_path, control=False, **own("teacher"))
    del changes["models"]["teacher"]
    changes["tasks"] = [*BASE["tasks"], {"family": "letter_counting", "config": {"min_words": 1, "max_words": 2}}]
    changes["train"] = {**BASE["train"], "steps": 2, "prompts_per_step": 4}
    changes["opd"] = {
        "signal": "jsd",
        "top_k": 4,
        "support": "union",
        "overlap": 3,
        "position_discount": 0.9,
        "selection": {"selector": "teachability", "ratio": 0.3, "top_k": 6},
        "teachers": [
            {
                "name": "sums",
                "model": str(trio.teacher),
                "tasks": ["chain_sum"],
                "template_kwargs": {"enable_thinking": False},
            },
            {"name": "rest", "model": str(trio.junior)},
        ],
    }
    config = RunConfig.from_mapping(changes)
    train(config)
    steps = rows(config.run_dir / "metrics.jsonl")
    assert len(steps) == 2
    for row in steps:
        assert row["opd/failed_samples"] == 0
        assert row["train/opd_loss"] > 0
        assert 0.5 < row["opd/coverage"] < 1, "one teacher cuts text otherwise"
        assert 0.3 <= row["selection/keep_ratio"] < 0.5, "and one per response at least"
        assert row["selection/overlap_dlearn_high"] == 1
        assert 0 < row["selection/overlap_random"] < 1
        assert sum(row[f"selection/position_{i}"] for i in range(10)) == pytest.approx(1)
        assert all(0 <= row[f"selection/{name}_mean"] <= 1 for name in "HDC")
        assert row["train/logprob_diff"] < 1e-4
    for name in ("teacher-sums", "teacher-rest"):
        assert (config.run_dir / "logs" / f"{name}.log").exists()


def test_a_teacher_whose_context_holds_no_sample_fails_samples_only(trio, running, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Each is counted, and the run goes on without its signal."""
    teacher = Path(shutil.copytree(trio.teacher, tmp_path / "short"))
    tree = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**tree, "max_position_embeddings": 8}))
    changes = settings(trio, tmp_path, control=False, train={**BASE["train"], "steps": 2})
    changes["models"]["teacher"] = str(teacher)
    changes["engine"] |= {"teacher_url": running(ThreadServer(teacher)).url}
    config = RunConfig.from_mapping(changes)
    train(config)
    steps = rows(config.run_dir / "metrics.jsonl")
    assert [row["opd/failed_samples"] for row in steps] == [6, 6]
    assert all(row["opd/teacher_kl"] is None for row in steps)
    assert servers_of(config.run_dir) == []


def test_lists_longer_than_a_vocabulary_are_refused_at_the_start(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    opd = {"selection": {"selector": "tip", "ratio": 0.1, "top_k": 5000}}
    with pytest.raises(
        ConfigError, match=r"opd\.selection\.top_k=5000: expected at most \d+, all tokens of the smallest"
    ):
        train(RunConfig.from_mapping(settings(trio, tmp_path, control=False, opd=opd)))
    assert not (tmp_path / "r" / "logs").exists()


def test_a_task_without_a_teacher_is_refused(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    changes = settings(trio, tmp_path, control=False, **own(*ROLES))
    del changes["models"]["teacher"]
    changes["opd"] = {"teachers": [{"name": "poems", "model": str(trio.teacher), "tasks": ["poem"]}]}
    with pytest.raises(ConfigError, match=r"opd\.teachers=.*expected one for task 'chain_sum'"):
        train(RunConfig.from_mapping(changes))
    assert not (tmp_path / "r" / "logs").exists()


def test_teachers_see_the_same_whether_they_read_along_or_afterwards(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from slime_tandem.tasks.families import TaskSet
    from slime_tandem.team.rollouts import rollout
    from slime_tandem.team.roster import Roster
    from slime_tandem.team.team import Team

    config = RunConfig.from_mapping(settings(trio, tmp_path))
    along = config.model_copy(update={"opd": config.opd.model_copy(update={"overlap": 1})})
    tasks = TaskSet(config.tasks, config.seed)
    with Team(Roster(config), tmp_path / "logs") as team:
        prompts = tasks.train_prompts(0, 3)
        after, _ = rollout(team, tasks, prompts, 0, 3, tandem=True, score=True)
        team.roster.config = along
        early, measured = rollout(team, tasks, prompts, 0, 3, tandem=True, score=True)
    assert measured["rollout/failed_samples"] == 0
    for a, b in zip(after, early, strict=True):
        assert a.sample.response_ids == b.sample.response_ids
        assert a.teacher is not None
        assert b.teacher is not None
        assert a.teacher.log_probs == pytest.approx(b.teacher.log_probs, abs=1e-5)


def test_lists_are_those_of_the_full_distributions(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Both sides' lists and cross-scores against the models themselves, for a junior's tokens, too."""
    import torch

    from slime_tandem.models.hf import load_model
    from slime_tandem.tasks.families import TaskSet
    from slime_tandem.team.roster import Roster
    from slime_tandem.team.team import Team
    from slime_tandem.types import AlignedScores, TandemSample

    opd = {"selection": {"selector": "tip", "ratio": 0.1, "top_k": 5}}
    config = RunConfig.from_mapping(settings(trio, tmp_path, opd=opd))
    models = {role: load_model(getattr(trio, role), "float32") for role in ("senior", "teacher")}

    def full(role: str, prompt: list[int], response: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = models[role](torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, -1)

    with Team(Roster(config), tmp_path / "logs") as team:
        team.send_weights(trio.senior, "start")
        samples = team.write(TaskSet(config.tasks, 0).train_prompts(0, 2), 0, 2, tandem=True)
        teacher = team.panel.teachers[0]
        compared = 0
        for sample, scores in zip(samples, team.score(samples), strict=True):  # type: ignore[arg-type]
            assert isinstance(sample, TandemSample)
            assert isinstance(scores, AlignedScores)
            lists = scores.lists
            assert lists is not None
            text = teacher.aligner.write(sample.response_ids, teacher.encode)
            partner = teacher.aligner.align(text).teacher_index
            s_full = full("senior", list(sample.prompt_ids), list(sample.response_ids))
            t_full = full("teacher", teacher.render(sample.prompt.messages), list(text.ids))
            assert ((lists.student_ids >= 0).any(1) <= scores.mask).all()
            for i in (partner >= 0).nonzero()[0]:
                s, t = s_full[i], t_full[partner[i]]
                for ids, own, cross, student in (
                    (lists.student_ids[i], lists.student_log_probs[i], lists.teacher_on_student[i], True),  # type: ignore[index]
                    (lists.teacher_ids[i], lists.teacher_log_probs[i], lists.student_on_teacher[i], False),  # type: ignore[index]
                ):
                    same = teacher.same_tokens.teacher_of[ids]
                    a, b = (s[ids], t[same]) if student else (t[same], s[ids])
                    assert own[ids >= 0] == pytest.approx(a[ids >= 0].numpy(), abs=1e-4)
                    assert cross[ids >= 0] == pytest.approx(b[ids >= 0].numpy(), abs=1e-4)
                    compared += int((ids >= 0).sum())
                best = s.topk(5).indices.numpy()
                assert set(lists.student_ids[i]) - {-1} <= set(best)
        assert compared > 100


@pytest.mark.parametrize("missing", ["everything", "weights"])
def test_a_model_folder_that_lacks_something_is_refused(trio, tmp_path: Path, missing: str) -> None:  # type: ignore[no-untyped-def]
    import shutil

    folder = tmp_path / "model"
    if missing == "weights":
        shutil.copytree(trio.senior, folder)
        (folder / "model.safetensors").unlink()
    models = {"senior": str(folder), "junior": str(trio.junior), "teacher": str(trio.teacher)}
    with pytest.raises(ModelError) as info:
        train(misuse(trio, tmp_path, {"models": models}))
    assert str(folder) in str(info.value)
    assert "Remedy" in str(info.value)


def test_an_existing_run_is_neither_continued_nor_deleted_unasked(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    config = misuse(trio, tmp_path, {})
    (run / "config.yaml").write_text(config.to_yaml())
    with pytest.raises(RunDirError, match="--resume"):
        train(config)


def test_what_is_refused_overwrites_nothing(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A typo in the data, a model that is not there: the run of before stands as it was, also after a kill in between."""
    config = misuse(trio, tmp_path, {})
    run = config.run_dir
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("the run of before")
    (run / "checkpoints" / "w").write_bytes(b"weights")
    nowhere = {"tasks": [{"family": "jsonl", "path": str(tmp_path / "none.jsonl")}]}
    with pytest.raises(TandemError, match=r"none\.jsonl"):
        train(misuse(trio, tmp_path, nowhere), overwrite=True)
    for name in ("config.yaml", "checkpoints"):  # as a kill leaves it
        (run / ".replaced").mkdir(exist_ok=True)
        (run / name).rename(run / ".replaced" / name)
    with pytest.raises(RunDirError, match="overwrite"):
        train(config)
    assert (run / "config.yaml").read_text() == "the run of before"
    assert (run / "checkpoints" / "w").read_bytes() == b"weights"
    assert not (run / ".replaced").exists()


def test_overwrite_deletes_runs_only(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / "thesis.txt").write_text("mine")
    with pytest.raises(RunDirError, match="--overwrite"):
        train(misuse(trio, tmp_path, {}), overwrite=True)
    assert (run / "thesis.txt").exists()


def test_resuming_with_other_settings_is_refused(trio, uninterrupted: Path) -> None:  # type: ignore[no-untyped-def]
    tree = settings(trio, uninterrupted.parent)
    tree["optimizer"] = {"lr": 0.5}
    with pytest.raises(RunDirError, match=r"optimizer\.lr"):
        train(RunConfig.from_mapping(tree), resume=True)


def test_resuming_where_runs_would_end_elsewhere_is_refused(trio, uninterrupted: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    copy = Path(shutil.copytree(uninterrupted, tmp_path / "r"))
    path = copy / "boundaries.json"
    record = BoundaryRecord.from_json(path.read_text())
    path.write_text(dataclasses.replace(record, ids=record.ids - {min(record.ids)}).to_json())
    with pytest.raises(RunDirError, match=r"boundaries of the run.*resume with the models"):
        train(RunConfig.from_mapping(settings(trio, tmp_path)), resume=True)


# ---- a disk and engines that fail ----


@contextmanager
def disk_of(at: Path, mib: int) -> Iterator[None]:
    """A file system of its own at this place, so small that it can be filled."""
    at.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(at)], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system needs root (tests/cli has a full disk that is made believe)")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(itertools.repeat(bytes(4096)))
    return ballast


@pytest.mark.parametrize("when", ["_save", "_send"])
def test_a_really_full_disk_ends_in_one_sentence_and_the_run_goes_on(
    trio, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:  # type: ignore[no-untyped-def]
    """The disk is full before the checkpoint of the second step is written, or before its weights are."""
    disk, real, calls = tmp_path / "disk", getattr(local_run, when), itertools.count(1)

    def fills(*given: Any) -> Any:
        if next(calls) == {"_save": 2, "_send": 3}[when]:
            fill(disk)
        return real(*given)

    with disk_of(disk, 24):
        config = RunConfig.from_mapping(settings(trio, disk / "runs", control=False))
        with monkeypatch.context() as patch:
            patch.setattr(local_run, when, fills)
            with pytest.raises(TandemError) as caught:
                train(config)
        assert str(disk / "runs" / "r") in str(caught.value)
        assert "space" in caught.value.remedy
        assert "\n" not in str(caught.value)
        with pytest.raises(RunDirError, match=r"No space left.*free space on that disk"):
            train(config, resume=True)  # told at once
        (disk / "ballast").unlink()
        train(config, resume=True)
        for name in ("metrics.jsonl", "eval.jsonl", "rewards.jsonl"):
            assert comparable(disk / "runs" / "r" / name) == comparable(uninterrupted / name), name


def test_a_run_folder_that_turned_read_only_is_told_and_stays_as_it_was(
    trio, uninterrupted: Path, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    disk = tmp_path / "disk"
    with disk_of(disk, 24):
        tree = settings(trio, disk / "runs", control=False)
        train(RunConfig.from_mapping(tree | {"train": {**BASE["train"], "steps": 2}}))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        config = RunConfig.from_mapping(tree)
        for other, resume in ((config, True), (config.model_copy(update={"name": "new"}), False)):
            with pytest.raises(
                RunDirError, match=r"Read-only file system.*check the path and its permissions"
            ) as caught:
                train(other, resume=resume)
            assert str(other.run_dir) in str(caught.value)
            assert "\n" not in str(caught.value)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        train(config, resume=True)
        assert comparable(disk / "runs" / "r" / "metrics.jsonl") == comparable(uninterrupted / "metrics.jsonl")


def lie(monkeypatch: pytest.MonkeyPatch, role: str, field: str) -> None:
    """Answers of one role's server have NaN for every log-prob of a field."""
    real = EngineClient._parse

    def parse(self: EngineClient, path: str, raw: bytes) -> Any:
        answers = real(self, path, raw)
        if self.role == role and path == "/generate":
            for answer in answers if isinstance(answers, list) else [answers]:
                for entry in answer["meta_info"].get(field) or ():
                    entry[0] = float("nan")
        return answers

    monkeypatch.setattr(EngineClient, "_parse", parse)


def test_nan_from_a_teacher_is_masked_and_counted_or_ends_the_run(
    trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    lie(monkeypatch, "teacher", "input_token_logprobs")
    once = {"train": {**BASE["train"], "steps": 1}, "control": False}
    train(RunConfig.from_mapping(settings(trio, tmp_path / "runs", **once)))
    (row,) = rows(tmp_path / "runs" / "r" / "metrics.jsonl")
    assert row["opd/failed_samples"] == 6.0
    assert row["opd/teacher_kl"] is None
    assert row["train/loss"] is not None
    config = RunConfig.from_mapping(settings(trio, tmp_path / "stop", **once, opd={"on_failed_sample": "stop"}))
    with pytest.raises(TandemError, match=r"teacher.*nan: expected a finite"):
        train(config)
    config = RunConfig.from_mapping(settings(trio, tmp_path / "drop", **once, opd={"on_failed_sample": "drop_sample"}))
    with pytest.raises(
        TeacherScoreError, match=r"samples that a teacher has scored='0 of 6'.*\n.*nan: expected a finite"
    ):
        train(config)


@pytest.mark.parametrize("policy", ["stop", "drop_sample"])
def test_nan_from_the_senior_fails_all_samples_and_ends_the_run_in_a_sentence(
    trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:  # type: ignore[no-untyped-def]
    lie(monkeypatch, "senior", "output_token_logprobs")
    tree = settings(trio, tmp_path / "runs", control=False)
    config = RunConfig.from_mapping(tree | {"sampling": {**BASE["sampling"], "on_failed_sample": policy}})
    with pytest.raises(EngineError, match=r"samples that could not be written='4 of 4': ") as caught:
        train(config)
    _, first = str(caught.value).split("\n")
    assert "output_token_logprobs[0]=nan: expected a finite log-prob" in first
    assert not list(tmp_path.glob("**/step-*"))


def test_lost_rows_are_missed_at_resume(trio, uninterrupted: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    copy = Path(shutil.copytree(uninterrupted, tmp_path / "r"))
    config = RunConfig.from_mapping(settings(trio, tmp_path) | {"train": {**BASE["train"], "steps": 5}})
    for name, says in (
        ("metrics.jsonl", "0 rows, .* step 0"),
        ("eval.jsonl", "no row of the evaluation before training"),
        ("rewards.jsonl", "no row of step 0"),
    ):
        content = (copy / name).read_bytes()
        (copy / name).unlink()
        with pytest.raises(RunDirError, match=rf"{name}='{says}"):
            train(config, resume=True)
        (copy / name).write_bytes(content)


def test_distillation_alone_takes_prompts_without_labels_and_misses_another_file(trio, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """From a CSV that has no labels and a bad row, resumed; the teacher's metrics are the evaluation."""
    file = tmp_path / "rows.csv"
    file.write_text("prompt,level\n" + "".join(f"{i} + {i} =,{i % 3}\n" for i in range(10, 60)) + "one,two,three\n")
    tree = settings(trio, tmp_path, control=False)
    tree["tasks"] = [{"family": "jsonl", "path": str(file), "bad_lines": "skip"}]
    tree["objective"] = {"reward_coef": 0.0}
    tree["opd"] = {"enabled": True}
    tree["report_to"] = "none"
    tree["train"] = {**BASE["train"], "steps": 1, "prompts_per_step": 60, "samples_per_prompt": 1}
    train(RunConfig.from_mapping(tree))
    folder = tmp_path / "r"
    (step,) = rows(folder / "metrics.jsonl")
    assert step["rollout/reward_mean"] is None
    assert step["rollout/skipped_rows"] >= 1, "more prompts than the file has: it is met"
    assert step["opd/teacher_kl"] is not None
    assert step["train/grad_norm"] > 0
    assert all(row["eval/teacher_kl"] is not None for row in rows(folder / "eval.jsonl"))
    assert not (folder / "tb").exists()
    tree["train"] = {**tree["train"], "steps": 2}
    train(RunConfig.from_mapping(tree), resume=True)
    assert len(rows(folder / "metrics.jsonl")) == 2
    file.write_text(file.read_text().replace("10 + 10", "10 + 11"))
    tree["train"] = {**tree["train"], "steps": 3}
    with pytest.raises(
        RunDirError, match=rf"tasks\.0\.path='{file}'.*the run was started with: .*SHA-256.*start again"
    ):
        train(RunConfig.from_mapping(tree), resume=True)
    (folder / "data.json").write_text("{")
    with pytest.raises(RunDirError, match=r"record of the data.*restore the file"):
        train(RunConfig.from_mapping(tree), resume=True)


@pytest.mark.parametrize("step", [-5, 3, 2**63, "4", None])
def test_a_checkpoint_whose_step_is_not_its_folders_is_refused(
    trio, uninterrupted: Path, tmp_path: Path, step: object
) -> None:  # type: ignore[no-untyped-def]
    copy = Path(shutil.copytree(uninterrupted, tmp_path / "r"))
    path = max((copy / "checkpoints").iterdir()) / "state.json"
    tree = json.loads(path.read_text())
    tree["extra"]["step"] = step
    path.write_text(json.dumps(tree))
    config = RunConfig.from_mapping(settings(trio, tmp_path) | {"train": {**BASE["train"], "steps": 5}})
    with pytest.raises(
        CheckpointError, match=r"state\.json extra\.step=.*Remedy: delete this folder to resume from an older"
    ):
        train(config, resume=True)


def test_settings_of_a_cluster_are_not_ignored_without_a_word(
    trio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("")
    config = RunConfig.from_mapping(settings(trio, tmp_path, cluster={"nodes": 2, "senior_tp": 4}))
    with pytest.raises(RunDirError, match="--resume"):
        train(config)
    told = "read under slime alone, a local run takes no notice: cluster.nodes=2, cluster.senior_tp=4\n"
    assert capsys.readouterr().err == told
