"""A reward of the user's own: what it is given, what it may answer, and what goes wrong without harm to its neighbours."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import RewardConfig, RunConfig, TaskSpec
from slime_tandem.errors import ConfigError, DataError
from slime_tandem.tasks.arguments import OF_A_RESPONSE, OF_BOTH, Parameters, Response, parameters_of
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.judging import PROBLEMS, Verdict, counted, require_some
from slime_tandem.tasks.own_reward import Caller, outcome_of, outcomes_of
from slime_tandem.types import AuthorRun, Message, Prompt, SampleKey, TandemSample

FAST = RewardConfig(own_timeout_s=1.0)
PROMPT = Prompt("t/1", (Message("user", "2 + 2 ="),), "4", "sums", {"spec": 0, "level": 3, "source": "mine"})
SAMPLE = TandemSample(
    SampleKey(0, 0, 0), 0, PROMPT, (1, 2), (5, 6, 7), (1, 1, 0), (-0.1, -0.2, -0.3), "stop", " 4 2",
    (AuthorRun(1, 0, 2, "0"), AuthorRun(0, 2, 3, "0")), inserted=((1, 2),),
)  # fmt: skip
RESPONSE = Response(PROMPT, " 4 2", SAMPLE)

Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Writes a module of rewards, each test's under a name of its own, and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"own_{abs(hash((text, str(tmp_path)))) % 10**12}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def tasks_of(reward: str, limits: RewardConfig = FAST, **more: Any) -> TaskSet:
    return TaskSet([TaskSpec.model_validate({"family": "chain_sum", "reward": reward, **more})], 0, limits)


def verdicts(tasks: TaskSet, *texts: str) -> list[Verdict]:
    (prompt,) = tasks.train_prompts(0, 1)
    return tasks.verdicts([(prompt, text) for text in texts])


# ---- what it is given ----


def test_parameters_are_given_by_name() -> None:
    def everything(prompt, text, label, task, messages, metadata, prompt_ids, response_ids, authorship_mask, loss_mask,
                   log_probs, finish_reason): ...  # fmt: skip

    assert parameters_of(everything, "w", "m:f").of(RESPONSE) == {
        "prompt": PROMPT, "text": " 4 2", "label": "4", "task": "sums",
        "messages": [{"role": "user", "content": "2 + 2 ="}], "metadata": {"level": 3, "source": "mine"},
        "prompt_ids": [1, 2], "response_ids": [5, 6, 7], "authorship_mask": [1, 1, 0], "loss_mask": [1, 0, 1],
        "log_probs": [-0.1, -0.2, -0.3], "finish_reason": "stop",
    }  # fmt: skip
    assert set(everything.__code__.co_varnames) == {*OF_A_RESPONSE, *OF_BOTH}, "all that there are"


def test_columns_defaults_and_other_libraries_names() -> None:
    columns = parameters_of(lambda text, level, other=7: None, "w", "m:f")
    assert columns.of(RESPONSE) == {"text": " 4 2", "level": 3}
    verl = parameters_of(lambda data_source, solution_str, ground_truth, extra_info=None: None, "w", "m:f").of(RESPONSE)
    assert verl == {
        "data_source": "sums", "solution_str": " 4 2", "ground_truth": "4", "extra_info": {"level": 3, "source": "mine"},
    }  # fmt: skip
    everything = parameters_of(lambda **kwargs: None, "w", "m:f").of(RESPONSE)
    assert set(everything) == {*OF_A_RESPONSE, *OF_BOTH, "level", "source"}
    only_text = parameters_of(lambda text: None, "w", "m:f")
    assert only_text.of(Response(PROMPT, "x")) == {"text": "x"}
    ids = parameters_of(lambda response_ids: None, "w", "m:f")
    assert ids.of(Response(PROMPT, "x")) == {"response_ids": None}, "only the text is known"
    with pytest.raises(
        DataError, match=r"parameter of tasks\.0\.reward at prompt t/1='levl'.*columns here: level, source"
    ):
        parameters_of(lambda text, levl: None, "tasks.0.reward", "m:f").of(RESPONSE)


def test_plural_names_take_a_batch() -> None:
    other = Response(Prompt("t/2", (), None, "gcd", {"spec": 0}), "b")
    takes = parameters_of(lambda texts, labels, level, log_probs, none=1: None, "w", "m:f")
    assert takes.batch
    assert takes.of_all([RESPONSE, other]) == {
        "texts": [" 4 2", "b"], "labels": ["4", None], "level": [3, None], "log_probs": [[-0.1, -0.2, -0.3], None],
    }  # fmt: skip
    verl = parameters_of(lambda data_sources, solution_strs, ground_truths, extra_infos: None, "w", "m:f")
    assert verl.of_all([other]) == {
        "data_sources": ["gcd"], "solution_strs": ["b"], "ground_truths": [None], "extra_infos": [{}],
    }  # fmt: skip
    every = parameters_of(lambda texts, **rest: None, "w", "m:f").of_all([RESPONSE, other])
    assert every["tasks"] == ["sums", "gcd"]
    assert every["source"] == ["mine", None]
    with pytest.raises(DataError, match="one of prompts, texts"):
        takes.of_all([other])  # nobody has a level


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda texts, label: None, "'label' beside 'texts'"),
        (lambda: None, "a function that takes the response"),
        (lambda text, /: None, "given by name, not 'text'"),
        (type("NoCall", (), {}), "a class with `__call__`"),
        (math.hypot, "whose parameters have names"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parameters_of(function, "tasks.0.reward", "m:f")


def test_coroutine_functions_are_known_in_every_form() -> None:
    async def later(text: str) -> float:
        return 1.0

    class Called:
        async def __call__(self, text: str) -> float:
            return 1.0

    assert [parameters_of(f, "w", "m:f").waits for f in (later, Called, Called(), lambda text: 0)] == [
        True, True, True, False,
    ]  # fmt: skip
    assert parameters_of(Called, "w", "m:f").needed == ("text",)


def test_a_column_that_no_prompt_has_is_refused_before_anything_starts(tmp_path: Path, module: Module) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "level": 1}\n{"prompt": "b"}\n')
    name = module("def f(text, level): return level\ndef g(text, level=0): return level")
    with pytest.raises(DataError, match=r"parameter of tasks\.0\.reward at prompt jsonl/.*'level'"):
        TaskSet([TaskSpec(family="jsonl", path=str(file), reward=f"{name}:f")], 0)
    TaskSet([TaskSpec(family="jsonl", path=str(file), reward=f"{name}:g")], 0)


# ---- what it may answer ----


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_finite_number_is_a_reward(value: float) -> None:
    for form in (value, np.float64(value), np.array(value), torch.tensor(value, dtype=torch.float64), {"a": value}):
        outcome = outcome_of(form)
        assert outcome["value"] == value or outcome["parts"] == {"a": value}


@pytest.mark.parametrize(
    "answer",
    ["0.5", b"1", None, math.nan, math.inf, -math.inf, [1.0], (), {}, {"a": "1"}, {"a": math.inf}, {1: 1.0}, {"": 1.0},
     {"a b": 1.0}, {"a/b": 1.0}, {"a" * 65: 1.0}, {f"p{i}": 0 for i in range(65)}, 1j, object(), lambda: 1],
)  # fmt: skip
def test_what_is_no_reward(answer: Any) -> None:
    outcome = outcome_of(answer)
    assert outcome["problem"] == "invalid"
    assert 0 < len(outcome["why"]) <= 300


def test_answers_for_a_batch() -> None:
    assert [o["value"] for o in outcomes_of(np.array([1, 2]), 2)] == [1.0, 2.0]
    assert [o["parts"] for o in outcomes_of({"a": torch.tensor([1.0, 2.0]), "b": (0, 1)}, 2)] == [
        {"a": 1.0, "b": 0.0}, {"a": 2.0, "b": 1.0},
    ]  # fmt: skip
    assert outcomes_of([{"a": 1}, None], 2)[1]["problem"] == "invalid"
    for wrong in ([1.0], [1.0, 2.0, 3.0], 1.0, "ab", None, {"a": [1.0]}, {"a": 1.0}, {}):
        outcomes = outcomes_of(wrong, 2)
        assert [o.get("problem") for o in outcomes] == ["invalid", "invalid"], wrong


def test_parts_are_added_up_and_stay_the_same(module: Module) -> None:
    name = module(
        "def f(text):\n"
        "    found = {'correct': float(text == 'yes'), 'brief': 1 / (1 + len(text))}\n"
        "    if text == 'more': found['odd'] = 1.0\n"
        "    if text == 'less': del found['brief']\n"
        "    return 0.5 if text == 'number' else found\n"
    )
    summed = verdicts(tasks_of(f"{name}:f"), "yes", "", "more", "less", "number")
    assert summed[0] == Verdict(1.25, parts={"correct": 1.0, "brief": 0.25})
    assert [v.right for v in summed] == [True, False, False, False, False], (
        "a part called correct decides, brevity does not"
    )
    assert [v.problem for v in summed[2:]] == ["invalid"] * 3
    assert summed[3].why == "parts correct, where the first answer has parts brief, correct"
    assert summed[4].why.startswith("one number, where")
    weighted = tasks_of(f"{name}:f", reward_weights={"correct": 2.0, "brief": -0.5, "none": 0.0})
    (verdict,) = verdicts(weighted, "yes")
    assert verdict.why == "parts brief, correct, where reward_weights has parts brief, correct, none"
    assert verdicts(tasks_of(f"{name}:f", reward_weights={"correct": 2.0, "brief": -0.4}), "yes")[0].reward == 1.9
    assert (
        verdicts(tasks_of(f"{name}:f", reward_weights={"correct": 1e308, "brief": 1e308}), "yes")[0].reward is not None
    )
    huge = module("def f(text): return {'a': 1e308, 'b': 1e308}")
    assert verdicts(tasks_of(f"{huge}:f"), "x")[0].why == "the parts add up to inf"
    with pytest.raises(ConfigError, match="`reward_weights` is for a reward of your own"):
        RunConfig.from_mapping({"tasks": [{"family": "chain_sum", "reward_weights": {"a": 1.0}}]})


# ---- where it runs, and what goes wrong ----

BAD = """
import os, time

def f(text):
    if text == "raises": raise RuntimeError("no \\x1b[2J such\\nfile")
    if text == "exits": raise SystemExit(3)
    if text == "interrupts": raise KeyboardInterrupt
    if text == "spins":
        while True: pass
    if text == "sleeps": time.sleep(3600)
    if text == "nan": return float("nan")
    if text == "inf": return float("inf")
    if text == "text": return "1.0"
    if text == "none": return None
    if text == "dies": os._exit(3)
    if text == "fills": return "x" * 10**7
    if text == "recursion": return f(text)
    return 0.5

async def later(text):
    import asyncio
    if text == "deaf":
        while True:
            try:
                await asyncio.sleep(3600)
            except BaseException:
                pass
    await asyncio.sleep(3600 if text == "sleeps" else 0.05)
    return f(text)

def batch(texts):
    if texts[0] == "short": return [0.5]
    return [f(text) for text in texts]

async def batch_later(texts):
    import asyncio
    await asyncio.sleep(3600 if "sleeps" in texts else 0)
    return {"a": [f(text) for text in texts]}
"""
FATES = {
    "raises": "raised", "exits": "raised", "interrupts": "raised", "spins": "timeout", "sleeps": "timeout", "nan": "invalid",
    "inf": "invalid", "text": "invalid", "none": "invalid", "dies": "error", "fills": "invalid", "recursion": "raised",
}  # fmt: skip


def test_each_way_to_go_wrong_has_its_kind_and_no_neighbour(module: Module) -> None:
    tasks = tasks_of(f"{module(BAD)}:f")
    texts = [text for bad in FATES for text in ("fine", bad)]
    found = verdicts(tasks, *texts, "fine")
    assert found[::2] == [Verdict(0.5)] * (len(FATES) + 1)
    assert {text: v.problem for text, v in zip(texts[1::2], found[1::2], strict=True)} == FATES
    assert all(v.reward is None and v.why for v in found[1::2])
    assert found[1].why == r"RuntimeError: no \x1b[2J such file", "nothing reaches the terminal as it is"
    kinds = counted(found)
    assert kinds == {
        "reward/timeouts": 2.0, "reward/errors": 1.0, "reward/raised": 4.0, "reward/invalid": 5.0, "reward/unreachable": 0.0,
        "reward/failed_samples": 12.0,
    }  # fmt: skip
    assert set(kinds) == {f"reward/{name}" for name in PROBLEMS.values()} | {"reward/failed_samples"}
    who = f"{tasks.specs[0].reward} (tasks.0.reward)"
    said = str(require_some(found, "mask", "rollout of step 3"))
    assert said.startswith(f"rollout of step 3: 12 of 25 responses have no reward ({who} raised: RuntimeError")
    with pytest.raises(DataError, match=r"\(step 3\)='12 of 25': expected a reward for each"):
        require_some(found, "stop", "step 3")
    with pytest.raises(DataError, match="'2 of 2': expected a reward for some") as caught:
        require_some(
            [*found[1:4:2], Verdict(None)], "mask", "step 3"
        )  # one without a reward to be found is none of them
    assert caught.value.detail.splitlines()[0] == rf"{who} raised: RuntimeError: no \x1b[2J such file", (
        "the first error"
    )
    assert require_some([Verdict(None)] * 3, "stop", "x") is None


def test_async_calls_are_made_at_once_and_fail_alone(module: Module) -> None:
    tasks = tasks_of(f"{module(BAD)}:later")
    t0 = time.monotonic()
    assert verdicts(tasks, *["fine"] * 200) == [Verdict(0.5)] * 200
    one_by_one = 200 * 0.05
    assert time.monotonic() - t0 < one_by_one, "three waves of 64, and the process's start"
    found = verdicts(tasks, "fine", "sleeps", "raises", "nan", "fine")
    assert [v.problem for v in found] == [None, "timeout", "raised", "invalid", None]
    deaf = verdicts(tasks, "fine", "deaf", "dies", "fine")  # what holds its process harms no other
    assert [v.problem for v in deaf] == [None, "timeout", "error", None]


def test_a_batch_is_one_call_and_stands_or_falls_with_it(module: Module) -> None:
    name = module(BAD)
    assert verdicts(tasks_of(f"{name}:batch"), "a", "nan", "b") == [
        Verdict(0.5),
        Verdict(None, "invalid"),
        Verdict(0.5),
    ]
    short = verdicts(tasks_of(f"{name}:batch"), "short", "b")
    assert {v.why for v in short} == {"1 answers for 2 responses"}
    assert [v.problem for v in verdicts(tasks_of(f"{name}:batch"), "a", "raises")] == ["raised", "raised"]
    late = verdicts(tasks_of(f"{name}:batch"), "a", "sleeps")
    assert [v.problem for v in late] == ["timeout", "timeout"]
    assert all(v.why.startswith("no answer ") for v in late)
    later = tasks_of(f"{name}:batch_later")
    assert verdicts(later, "a", "b") == [Verdict(0.5, parts={"a": 0.5})] * 2
    late = verdicts(later, "a", "sleeps")
    assert [v.problem for v in late] == ["timeout", "timeout"]
    assert {v.why for v in late} == {"no answer within 1 s (reward.own_timeout_s)"}


def test_where_nobody_is_answered_in_time_the_rest_is_not_asked(module: Module, tmp_path: Path) -> None:
    name = module(
        f"import time\ndef f(text):\n    open({str(tmp_path / 'calls')!r}, 'a').write('x')\n    time.sleep(3600)"
    )
    found = verdicts(tasks_of(f"{name}:f", RewardConfig(own_timeout_s=0.2)), *map(str, range(200)))
    assert {v.problem for v in found} == {"timeout"}
    assert found[-1].why == "not asked: the 4 before it were all too late"
    assert len((tmp_path / "calls").read_text()) == 4


def test_a_class_is_made_once_and_keeps_what_it_has_loaded(module: Module) -> None:
    name = module(
        "class Judge:\n"
        "    def __init__(self): self.calls = 0\n"
        "    def __call__(self, text):\n"
        "        self.calls += 1\n"
        "        return self.calls\n"
        "class Broken:\n"
        "    def __init__(self): raise OSError('no GPU')\n"
        "    def __call__(self, text): return 1.0\n"
    )
    assert [v.reward for v in verdicts(tasks_of(f"{name}:Judge"), "a", "b", "c")] == [1.0, 2.0, 3.0]
    with pytest.raises(ConfigError, match="no GPU"):
        verdicts(tasks_of(f"{name}:Broken"), "a")


def test_several_processes_call_side_by_side(module: Module) -> None:
    name = module("import os, time\ndef f(text):\n    time.sleep(0.3)\n    return os.getpid()")
    found = verdicts(tasks_of(f"{name}:f", RewardConfig(own_timeout_s=30.0, own_processes=3)), *"abcdefghi")
    assert len({v.reward for v in found}) == 3
    assert os.getpid() not in {v.reward for v in found}


def test_what_a_call_has_started_ends_with_it(module: Module, tmp_path: Path) -> None:
    """A program that a reward runs, say, when the reward is killed over it."""
    pid = tmp_path / "pid"
    name = module(
        "import subprocess, sys\n"
        "def f(text):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"    open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "    child.wait()\n"
    )
    assert verdicts(tasks_of(f"{name}:f"), "a")[0].problem == "timeout"
    child = int(pid.read_text())
    until = time.monotonic() + 60
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_family_of_ones_own_is_scored_alike(module: Module) -> None:
    name = module(
        "from slime_tandem import Message, make_prompt\n"
        "class F:\n"
        "    def __init__(self, spec, where): pass\n"
        "    def stream(self, key):\n"
        "        for i in range(10**9): yield make_prompt('f', [Message('user', f'{key} {i}')], 'x')\n"
        "    async def reward(self, prompt, text, label): return {'same': text == label, 'long': len(text)}\n"
    )
    tasks = TaskSet([TaskSpec(family=f"{name}:F", reward_weights={"same": 1.0, "long": 0.0})], 0, FAST)
    assert verdicts(tasks, "x", "yy") == [
        Verdict(1.0, parts={"same": 1.0, "long": 1.0}), Verdict(0.0, parts={"same": 0.0, "long": 2.0}),
    ]  # fmt: skip


def test_a_caller_answers_in_the_process_as_well() -> None:
    """The same without a process: what the worker makes is a plain object."""
    caller = Caller(lambda text: asyncio.sleep(0, 0.25), batch=False, waits=False, timeout_s=1.0)
    with contextlib.closing(caller):
        assert caller([{"text": "a"}, {}])[0]["value"] == 0.25
        assert caller([{}])[0]["problem"] == "raised"
    assert isinstance(parameters_of(lambda text: 0, "w", "m:f"), Parameters)
