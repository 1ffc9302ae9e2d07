"""Responses that are made to harm: executed never, ended always, counted, and without effect on their neighbours."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slime_tandem.config import RewardConfig, TaskSpec
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.tasks.arguments import parameters_of
from slime_tandem.tasks.families import EVALUATED_AS_CODE, TaskSet
from slime_tandem.tasks.judging import LONGEST_RESPONSE, Judge, Verdict, counted
from slime_tandem.tasks.own_scorers import OWN_SCORERS
from slime_tandem.tasks.pool import Limits, shared
from slime_tandem.types import Prompt

from .test_labels import asked, judge

FAST = RewardConfig(timeout_s=1.0, own_timeout_s=1.0)


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("listen", "silent"), ("stop", "post"), ("2024-01-02", "2021"), ("3-1", "2"), ("1, 2", "2, 1"),
        ("0.0000001", "0.0000002"), ("10:00", "10:30"),
    ],
)  # fmt: skip
def test_labels_that_were_read_as_algebra(label: str, answer: str) -> None:
    assert asked([(label, answer), (label, label)], judge()) == [Verdict(0.0), Verdict(1.0)]


def test_a_formula_without_end_harms_nobody() -> None:
    pairs = [("5", "x=5"), ("5", "9^{9^{9}}"), ("5", "x=5"), ("5", "x=6")]
    assert asked(pairs, judge(1.0)) == [Verdict(1.0), Verdict(0.0, "timeout"), Verdict(1.0), Verdict(0.0)]


CODE = "__import__('os').system('touch {path}')"


def programs(path: Path) -> list[str]:
    code = CODE.format(path=path)
    return [
        code,
        f"[{code}]",
        f"[[{code}]]",
        rf"\sqrt{{{code}}}",
        rf"f({code})",
        rf"\gcd({code}, 2)",
        rf"\operatorname{{{code}}}(2)",
        rf"\text{{{code}}}",
        rf"1 + {code}",
        f"$${code}$$",
        "().__class__.__bases__[0].__subclasses__()",
        f"(lambda: {code})()",
    ]


def test_no_answer_is_executed_by_any_family(tmp_path: Path) -> None:
    """Every family that is offered, and labels of each kind; with the guard's own word that nothing was even tried."""
    import reasoning_gym.factory

    touched = tmp_path / "x"
    texts = [f"<answer>{program}</answer>" for program in programs(touched)]
    offered = sorted(set(reasoning_gym.factory.DATASETS) - set(EVALUATED_AS_CODE))
    slow = {"rearc", "arc_agi", "arc_1d", "composite", "rubiks_cube", "tower_of_hanoi", "knight_swap"}
    names = [name for name in offered if name in OWN_SCORERS or name not in slow][::4] + sorted(OWN_SCORERS)
    for name in names:
        spec = TaskSpec(family=name)
        tasks = TaskSet([spec], 0, FAST)
        prompt = tasks.train_prompts(0, 1)[0]
        for verdict in tasks.verdicts([(prompt, text) for text in texts]):
            assert verdict.problem is None, name
            assert verdict.reward < 1.0, name
    labels = [(label, program) for label in ("5", "x+1", "1, x", "stop", "B") for program in programs(touched)]
    assert asked(labels, judge()) == [Verdict(0.0)] * len(labels)
    assert not touched.exists()


def test_a_label_that_is_a_program_is_text(tmp_path: Path) -> None:
    touched = tmp_path / "x"
    labels = [(program, answer) for program in programs(touched) for answer in ("5", "x+1", program)]
    rewards = [verdict.reward for verdict in asked(labels, judge())]
    assert rewards == [0.0, 0.0, 1.0] * (len(labels) // 3)
    assert not touched.exists()


def test_hostile_responses_score_as_wrong_ones_and_are_counted() -> None:
    tasks = TaskSet([TaskSpec(family="countdown")], 0, FAST)
    (prompt,) = tasks.train_prompts(0, 1)
    good = f"<answer>{prompt.label}</answer>"
    hostile = [
        "\x00",
        "\ud800",
        "x" * (LONGEST_RESPONSE + 1),
        "<answer>" + "(" * 50_000 + "</answer>",
        "<|im_end|>" * 9,
    ]
    verdicts = tasks.verdicts([(prompt, text) for text in (good, *hostile, good)])
    assert [v.reward for v in verdicts][:: len(hostile) + 1] == [1.0, 1.0]
    assert all(v.reward <= 0.05 for v in verdicts[1:-1])
    none = dict.fromkeys(("timeouts", "errors", "raised", "invalid", "unreachable", "failed_samples"), 0.0)
    assert counted(verdicts) == {f"reward/{name}": value for name, value in {**none, "errors": 1.0}.items()}
    assert counted([]) == {f"reward/{name}": value for name, value in none.items()}


OWN = """
import os, time
calls = []
def f(prompt, text):
    calls.append(text)
    if text == "hang":
        while True:
            pass
    if text == "sleep":
        time.sleep(3600)
    if text == "die":
        os._exit(3)
    return min(len(calls), 10) / 10
"""


def test_a_reward_of_ones_own_has_one_process_a_limit_and_what_it_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rew_limits.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = TaskSpec(family="chain_sum", reward="rew_limits:f")
    tasks = TaskSet([spec], 0, FAST)
    (prompt,) = tasks.train_prompts(0, 1)
    texts = ["a", "b", "hang", "c", "sleep", "die", "d", "e"]
    assert tasks.verdicts([(prompt, text) for text in texts]) == [
        Verdict(0.1),
        Verdict(0.2),
        Verdict(None, "timeout"),
        Verdict(0.1),
        Verdict(None, "timeout"),
        Verdict(None, "error"),
        Verdict(0.1),
        Verdict(0.2),
    ]


def test_code_in_the_main_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="a module that another process can import"):
        Judge(
            TaskSpec(family="chain_sum", reward="__main__:f"),
            "tasks.0.reward",
            FAST,
            own=parameters_of(lambda text: 0.0, "tasks.0.reward", "__main__:f"),
        )


def test_a_worker_that_is_killed_between_two_rollouts_is_replaced() -> None:
    limits = Limits(FAST.timeout_s, FAST.memory_mib, FAST.processes)
    pairs = [("5", "x=5")] * 40
    assert asked(pairs, judge(FAST.timeout_s)) == [Verdict(1.0)] * 40
    pids = shared(limits).pids
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert asked(pairs, judge(FAST.timeout_s)) == [Verdict(1.0)] * 40
    assert not set(shared(limits).pids) & set(pids)


def test_labels_that_need_math_verify_are_refused_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    file = tmp_path / "p.jsonl"
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "math_verify" else found(name, *a)
    )
    for label, answer, refused in (
        ("x+1", None, True),
        ("5", None, True),
        ("5", "number", False),
        ("5", "math", True),
        ("stop", None, False),
        ("B", None, False),
        ("x+1", "text", False),
    ):
        file.write_text(f'{{"prompt": "a", "label": "{label}"}}\n')
        spec = TaskSpec.model_validate({"family": "jsonl", "path": str(file), "answer": answer})
        if refused:
            with pytest.raises(ConfigError, match=r"tasks\.0\.answer=.*math-verify, which is not installed"):
                TaskSet([spec], 0)
        else:
            TaskSet([spec], 0)
    TaskSet([TaskSpec(family="chain_sum")], 0)
    with pytest.raises(ConfigError, match="math-verify"):
        TaskSet([TaskSpec(family="chain_sum", reward="label")], 0)


def test_a_prompt_without_a_label_is_an_error() -> None:
    with pytest.raises(DataError, match="label of prompt p=None"):
        judge().verdicts([(Prompt("p", (), None, "t"), "<answer>1</answer>")])
