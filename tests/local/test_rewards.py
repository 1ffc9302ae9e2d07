"""Whole runs with rewards of the user's own: parts that are measured, and each way to go wrong in a run that ends well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from slime_tandem.config import RunConfig
from slime_tandem.errors import DataError
from slime_tandem.local.run import train

from ..in_process import ThreadServer
from ..waiting import wait_until

_urls: dict[str, str] = {}


@pytest.fixture(scope="module", autouse=True)
def _shared_servers(trio, side_url, forked_servers) -> Iterator[None]:  # type: ignore[no-untyped-def]
    with ThreadServer(trio.senior) as senior:
        _urls.update(senior_url=senior.url, junior_url=side_url("junior"), teacher_url=side_url("teacher"))
        yield


REWARDS = """
import os, time, zlib

def _bad(text):
    return zlib.crc32(text.encode()) % 4 == 0

def two_parts(text, label, authorship_mask):
    return {"brief": 1 / (1 + len(text.split())), "senior": sum(authorship_mask) / len(authorship_mask)}

def raises(text):
    if _bad(text): raise RuntimeError("bad text")
    return (1 + len(text)) / 100

def hangs(text):
    while _bad(text): pass
    return (1 + len(text)) / 100

async def waits(text):
    import asyncio
    await asyncio.sleep(3600 if _bad(text) else 0)
    return (1 + len(text)) / 100

def nan(text): return float("nan") if _bad(text) else (1 + len(text)) / 100
def inf(text): return float("-inf") if _bad(text) else (1 + len(text)) / 100
def words(text): return "0.5" if _bad(text) else (1 + len(text)) / 100
def keys(text): return {"a": 0.1, "odd": 1.0} if _bad(text) else {"a": (1 + len(text)) / 100}
def kills(text):
    if _bad(text): os._exit(9)
    return (1 + len(text)) / 100

calls = 0

def stuck_once(text):
    # At one call of the first process that comes so far: it says who it is, and does not come back.
    global calls
    calls += 1
    path = os.environ.get("STUCK_AT")
    if path and calls == 50 and not os.path.exists(path):
        with open(path + ".part", "w") as file: file.write(str(os.getpid()))
        os.replace(path + ".part", path)
        time.sleep(600)
    return {"long": len(text) / 100}

def never(text): raise RuntimeError("never")
def wrong_length(texts): return [0.5] * (len(texts) - 1)
def hangs_always(text):
    while True: time.sleep(1)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "run_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "run_rewards"


def config(trio: Any, runs: Path, *named: str, **changes: Any) -> RunConfig:
    """A run with a task for each reward that is named."""
    more = changes.pop("task", {})
    tree: dict[str, Any] = {
        "name": "r",
        "runs_dir": str(runs),
        "tasks": [{"family": "chain_sum", "reward": name, **more} for name in named],
        "models": {role: str(getattr(trio, role)) for role in ("senior", "junior", "teacher")},
        "engine": {"cache_tokens": 4096, **_urls},
        "sampling": {"max_new_tokens": 10},
        "train": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "threads": 1},
        "eval": {"prompts": 12},
        "reward": {"own_timeout_s": 2.0},
        "opd": {"enabled": False},
    }
    for name, value in changes.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return RunConfig.from_mapping(tree)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_reward_of_two_parts(trio: Any, tmp_path: Path, module: str) -> None:
    weights = {"brief": 1.0, "senior": 0.5}
    c = config(trio, tmp_path, f"{module}:two_parts", task={"reward_weights": weights}, opd={"enabled": True})
    summary = train(c)
    steps, parts = rows(c.run_dir / "metrics.jsonl"), rows(c.run_dir / "reward_parts.jsonl")
    assert [(p["step"], p["phase"], p["part"]) for p in parts] == [
        (step, phase, part)
        for step, phase in ((0, "eval"), (0, "train"), (1, "train"), (2, "eval"))
        for part in ("brief", "senior")
    ]
    for step in steps:
        of = {p["part"]: p for p in parts if (p["step"], p["phase"]) == (step["step"], "train")}
        assert step["rollout/reward_mean"] == pytest.approx(sum(weights[name] * p["mean"] for name, p in of.items()))
        assert {p["samples"] for p in of.values()} == {16}
        assert step["reward/failed_samples"] == 0
    shown = rows(c.run_dir / "transcripts.jsonl")[0]
    assert shown["reward"] == pytest.approx(sum(weights[name] * value for name, value in shown["parts"].items()))
    report = (c.run_dir / "report.html").read_text()
    assert "Reward: brief" in report
    assert "Reward: senior" in report
    (c.run_dir / "tb").exists()
    evals = rows(c.run_dir / "eval.jsonl")
    held_out = {p["part"]: p["mean"] for p in parts if (p["step"], p["phase"]) == (2, "eval")}
    assert evals[-1]["eval/reward_mean"] == pytest.approx(sum(weights[k] * v for k, v in held_out.items()))
    assert np.mean(evals[-1]["rewards"]) == pytest.approx(evals[-1]["eval/reward_mean"])
    verdict = summary["verdict"]
    assert verdict["metric"] == "eval/reward_mean", "no part says what is right: an accuracy would be 0 throughout"
    assert "reward on 12 held-out prompts" in verdict["text"]
    assert verdict["low"] < evals[-1]["eval/reward_mean"] - evals[0]["eval/reward_mean"] < verdict["high"]


def test_bad_rewards_of_every_kind_in_a_run_that_ends_well(
    trio: Any, tmp_path: Path, module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One response in four: it raises, hangs, waits for ever, is NaN, infinite, text, of other parts, ends its process."""
    bad = ("raises", "hangs", "waits", "nan", "inf", "words", "keys", "kills")
    c = config(trio, tmp_path, *(f"{module}:{name}" for name in bad), reward={"own_timeout_s": 0.5},
               train={"steps": 1, "prompts_per_step": 24}, eval={"prompts": 16})  # fmt: skip
    summary = train(c)
    assert summary["complete"]
    (step,) = rows(c.run_dir / "metrics.jsonl")
    kinds = {name: step[f"reward/{name}"] for name in ("raised", "timeouts", "invalid", "errors", "unreachable")}
    failed = step["reward/failed_samples"]
    assert failed == sum(kinds.values()) < 96 / 2
    assert kinds.pop("unreachable") == 0
    assert all(kinds.values()), kinds
    (by_task,) = rows(c.run_dir / "rewards.jsonl")
    assert by_task["samples"] == 96 - failed, "a failure is no 0 in any mean"
    assert step["rollout/reward_mean"] == pytest.approx(by_task["mean"])
    assert by_task["min"] > 0
    assert step["train/updates"] == 1
    evals = rows(c.run_dir / "eval.jsonl")
    assert evals[0]["eval/reward_failed_samples"] > 0
    assert evals[0]["eval/reward_mean"] > 0
    said = capfd.readouterr().err
    assert "responses have no reward" in said
    assert f"{module}:raises (tasks.0.reward) raised: RuntimeError: bad text" in said
    assert "run: rollout of step 0: " in said


@pytest.mark.parametrize(
    ("reward", "why"),
    [("never", "raised: RuntimeError: never"), ("wrong_length", "answers for"), ("hangs_always", "no answer in time")],
)
def test_a_reward_that_always_fails_is_refused_at_once(
    trio: Any, tmp_path: Path, module: str, reward: str, why: str
) -> None:
    c = config(trio, tmp_path, f"{module}:{reward}", reward={"own_timeout_s": 0.5})
    with pytest.raises(DataError, match=r"'12 of 12': expected a reward for some") as caught:
        train(c)
    phase = "run: evaluation before training, step 0: solo responses to 12 held-out prompts"
    assert caught.value.field == f"responses without a reward ({phase})"
    assert caught.value.detail.startswith(f"{module}:{reward} (tasks.0.reward) ")
    assert why in str(caught.value)


def test_a_failed_reward_stops_a_run_that_says_so(trio: Any, tmp_path: Path, module: str) -> None:
    c = config(trio, tmp_path, f"{module}:raises", reward={"on_failed_sample": "stop"}, eval={"prompts": 40})
    with pytest.raises(DataError, match="expected a reward for each"):
        train(c)


def test_a_server_rewards_a_run(trio: Any, tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                json.dumps({"long": len(body["response"]) / 50, "label": float(body["label"] is None)}).encode()
            )

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        c = config(
            trio, tmp_path, f"http://127.0.0.1:{server.server_port}/", train={"steps": 1}, reward={"own_timeout_s": 30}
        )
        train(c)
        server.shutdown()
    (step,) = rows(c.run_dir / "metrics.jsonl")
    assert step["reward/failed_samples"] == 0
    means = {p["part"]: p["mean"] for p in rows(c.run_dir / "reward_parts.jsonl") if p["phase"] == "train"}
    assert means["label"] == 0.0
    assert step["rollout/reward_mean"] == pytest.approx(means["long"])


def test_a_run_that_is_killed_while_a_reward_is_asked_resumes_to_the_same_rewards(
    trio: Any, tmp_path: Path, module: str
) -> None:
    more: Any = {"train": {"steps": 3, "save_every": 1}, "reward": {"own_timeout_s": 600.0}}
    whole, killed = (config(trio, tmp_path / name, f"{module}:stuck_once", **more) for name in ("whole", "killed"))
    train(whole)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(killed.model_dump(mode="json")))
    stuck = tmp_path / "stuck"
    env = {**os.environ, "STUCK_AT": str(stuck), "PYTHONPATH": os.pathsep.join(sys.path)}  # the module's folder in it
    command = [sys.executable, "-m", "slime_tandem.cli", "train", "--quiet", "--config", str(tmp_path / "config.yaml")]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: stuck.exists() or process.poll() is not None)
        assert process.poll() is None
        assert (killed.run_dir / "checkpoints").is_dir(), "in the middle"
    finally:
        process.kill()
        process.wait()
    worker = Path(f"/proc/{stuck.read_text()}")
    wait_until(lambda: not worker.exists())  # the process that asked it is gone, too
    train(killed, resume=True)
    for name in ("rewards.jsonl", "reward_parts.jsonl"):
        assert rows(killed.run_dir / name) == rows(whole.run_dir / name)
    means = [[row["rollout/reward_mean"] for row in rows(c.run_dir / "metrics.jsonl")] for c in (killed, whole)]
    assert means[0] == means[1]
    assert len(means[0]) == 3
