"""A rollout in which some answers are made to harm: it ends, with the metrics of one in which they are plainly wrong."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.config import RewardConfig, RunConfig
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.pool import Limits, shared
from slime_tandem.team.rollouts import rollout
from slime_tandem.training.metrics import rollout_metrics
from slime_tandem.types import AuthorRun, Prompt, SampleKey, ScoredSample, TandemSample

from ..waiting import wait_until

LIMITS = RewardConfig(timeout_s=1.0)
PER_PROMPT = 10
WRONG = "<answer>no</answer>"
HOSTILE = [
    "<answer>9^{9^{9}}</answer>",  # endless
    "<answer>" + "9" * 2_000_000 + "</answer>",  # huge
    "<answer>[__import__('os').system('touch x')]</answer>",  # code
    "<answer>\x00\ud800</answer>",
    "<answer>4<|im_end|>\n<|im_start|>assistant</answer>",
    "<answer>" + "\\frac{" * 300 + "</answer>",
]
"""One in a hundred of the responses below."""


class Writes:
    """A team whose senior writes the given texts, in the order of the samples."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.config = RunConfig()
        self.revive = list

    def write(self, prompts: Sequence[Prompt], rollout_id: int, per_prompt: int, **_: Any) -> list[TandemSample]:
        return [
            TandemSample(
                SampleKey(0, rollout_id, i), i // per_prompt, prompts[i // per_prompt], (1,), (2,), (1,), (-0.5,), "stop",
                text, (AuthorRun(1, 0, 1, "v"),),
            )
            for i, text in enumerate(self._texts)
        ]  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskSet:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    file.write_text("".join(f'{{"prompt": "{n} + {n} =", "label": "{2 * n}"}}\n' for n in range(80)))
    return TaskSet(RunConfig.from_mapping({"tasks": [{"family": "jsonl", "path": str(file)}]}).tasks, 0, LIMITS)


def rolled(
    tasks: TaskSet, texts: Sequence[str], prompts: Sequence[Prompt]
) -> tuple[list[ScoredSample], dict[str, Any]]:
    team: Any = Writes(texts)
    scored, measured = rollout(team, tasks, prompts, 1, PER_PROMPT, tandem=False, score=False)
    counts = {name: value for name, value in measured.items() if not name.startswith("time/")}
    return scored, {**rollout_metrics(scored, frozenset(), lambda _: 0), **counts}


def honest(prompts: Sequence[Prompt]) -> list[str]:
    """Right by comparing texts, right by mathematics, and wrong, in turns."""
    forms = ("<answer>{}</answer>", "<answer>x = {}</answer>", "<answer>\\frac{{{}}}{{2}}</answer>")
    return [forms[i % 3].format(prompts[i // PER_PROMPT].label) for i in range(len(prompts) * PER_PROMPT)]


def test_one_hostile_answer_in_a_hundred_changes_nothing_but_its_count(tasks: TaskSet) -> None:
    prompts = tasks.train_prompts(0, 60)
    clean, hostile = honest(prompts), honest(prompts)
    for i in range(6):
        clean[100 * i + 7], hostile[100 * i + 7] = WRONG, HOSTILE[i]
    scored, metrics = rolled(tasks, hostile, prompts)
    expected, expected_metrics = rolled(tasks, clean, prompts)
    assert [s.reward for s in scored] == [s.reward for s in expected]
    assert {metrics.pop("reward/timeouts"), metrics.pop("reward/errors")} == {1.0}
    assert {expected_metrics.pop("reward/timeouts"), expected_metrics.pop("reward/errors")} == {0.0}
    assert metrics == expected_metrics
    assert 0.5 < metrics["rollout/accuracy"] < 0.8


@pytest.mark.parametrize("when", ["before", "during"])
def test_workers_that_are_killed_lose_nothing(tasks: TaskSet, when: str) -> None:
    """A call is made again once: each process is killed once, and not the one that takes its place."""
    prompts = tasks.train_prompts(1, 60)
    texts = honest(prompts)
    expected, _ = rolled(tasks, texts, prompts)
    pool, done, killed = shared(Limits(LIMITS.timeout_s, LIMITS.memory_mib, LIMITS.processes)), threading.Event(), []

    def kill(pids: Sequence[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    def kill_one() -> None:
        while not done.is_set() and not killed:
            kill(pool.pids[:1])

    killer = threading.Thread(target=kill_one)
    if when == "before":
        kill(pool.pids)
        for pid in killed:
            wait_until(lambda pid=pid: " Z " in Path(f"/proc/{pid}/stat").read_text())
    else:
        killer.start()
    scored, metrics = rolled(tasks, texts, prompts)
    done.set()
    if when == "during":
        killer.join()
    assert killed
    assert [s.reward for s in scored] == [s.reward for s in expected]
    assert [s.sample.key for s in scored] == [s.sample.key for s in expected]
    assert metrics["reward/errors"] == metrics["reward/timeouts"] == 0.0
