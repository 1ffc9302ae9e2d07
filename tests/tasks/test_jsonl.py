"""Prompt files: their forms, their split into train and held-out prompts, and everything that may be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_tandem.config import TaskSpec
from slime_tandem.errors import DataError
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.jsonl import read_prompts
from slime_tandem.types import Message, Prompt


def write_jsonl(path: Path, rows: list[object]) -> TaskSpec:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return TaskSpec(family="jsonl", path=str(path))


def read_jsonl(path: Path) -> list[Prompt]:
    return list(read_prompts(TaskSpec(family="jsonl", path=str(path))).prompts)


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def test_jsonl_takes_the_forms_of_slime_users(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3 ="}]
    spec = write_jsonl(
        tmp_path / "p.jsonl",
        [
            {"prompt": "1 + 1 =", "label": 2},
            {"prompt": turns, "label": "5", "task": "sums", "metadata": {"level": 1}},
            {"messages": turns[1:], "label": 5.0},
        ],
    )
    prompts = read_jsonl(Path(spec.path or ""))
    assert [p.label for p in prompts] == ["2", "5", "5.0"]
    assert prompts[1].messages == (Message("system", "Be brief."), Message("user", "2 + 3 ="))
    assert (prompts[0].task, prompts[1].task, dict(prompts[1].metadata)) == ("jsonl", "sums", {"level": 1})


def test_jsonl_is_split_cycled_and_scored_by_math_verify(tmp_path: Path) -> None:
    rows = [{"prompt": f"Half of {i}?", "label": f"{i}/2"} for i in range(200)]
    tasks = TaskSet([write_jsonl(tmp_path / "p.jsonl", rows)], seed=0)
    held_out = set(ids(tasks.heldout_prompts(10)))
    train = ids(tasks.train_prompts(0, 150))
    assert len(set(train)) == 150, "no line comes twice before each came once"
    assert len(tasks.train_prompts(0, 500)) == 500
    assert not held_out & set(train)
    prompt = next(p for p in tasks.train_prompts(0, 150) if p.label == "7/2")
    assert tasks.correct(prompt, "that is \\boxed{3.5}")
    assert tasks.correct(prompt, "<answer>7/2</answer>")
    assert tasks.reward(prompt, "\\boxed{4}") == 0.0
    for odd in ("", "\\boxed{}", "\\boxed{\\frac{}{}}", "\\boxed{]]>}", "\\boxed{x = y = }"):
        assert tasks.reward(prompt, odd) == 0.0


def test_math_verify_works_outside_the_main_thread(tmp_path: Path) -> None:
    import threading

    tasks = TaskSet(
        [write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"{i}?", "label": "1/2"} for i in range(30)])], seed=0
    )
    prompt = tasks.train_prompts(0, 1)[0]
    rewards: list[float] = []
    thread = threading.Thread(target=lambda: rewards.append(tasks.reward(prompt, "\\boxed{0.5}")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r":2='\{': expected one JSON object"),
        ("[1]", "a JSON object"),
        ('{"prompt": "a"}', "label=None: expected a non-empty string or a number"),
        ('{"prompt": "a", "label": true}', "label=True"),
        ('{"prompt": "a", "label": NaN}', "NaN is no number of JSON"),
        ('{"prompt": "a", "label": Infinity}', "Infinity is no number of JSON"),
        ('{"prompt": "a", "label": 1e400}', "1e400 is beyond the largest"),
        ('{"prompt": "a", "label": null}', "label=None"),
        ('{"prompt": "a", "label": {"a": 1}}', "label="),
        ('{"prompt": "a", "label": [1, 2]}', "label="),
        ('{"prompt": "a", "label": " "}', "label=' '"),
        ('{"prompt": "", "label": "1"}', "prompt='': expected a non-empty string or a list"),
        ('{"prompt": "a", "messages": [], "label": "1"}', "either `prompt` or `messages`"),
        ('{"label": "1"}', "either `prompt` or `messages`"),
        ('{"messages": "a", "label": "1"}', "messages='a': expected a list of messages"),
        ('{"messages": [{"role": "user"}], "label": "1"}', r"messages\.0=.*`role` and `content`"),
        ('{"messages": [{"role": "bot", "content": "a"}], "label": "1"}', r"messages\.0\.role='bot'"),
        ('{"prompt": "a", "lable": "1"}', "did you mean `label`"),
        ('{"prompt": "a", "label": "1", "task": 3}', "task=3"),
        ('{"prompt": "a", "label": "1", "metadata": 3}', "metadata=3"),
    ],
)
def test_bad_lines_are_named_by_path_and_number(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=says) as caught:
        read_jsonl(path)
    assert f"{path}:2" in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "label", "fine"),
    [
        ("number", "1/2", True),
        ("number", "half", False),
        ("math", "x+1", True),
        ("math", "half", False),
        ("choice", "B", True),
        ("choice", "Berlin", False),
        ("text", "10:00", True),
        (None, "10:00", True),
    ],
)
def test_labels_are_of_the_kind_that_the_task_says(tmp_path: Path, answer: str | None, label: str, fine: bool) -> None:
    spec = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "label": label}]).model_copy(update={"answer": answer})
    if fine:
        assert [p.label for p in TaskSet([spec], 0).listed_prompts] == [label]
        return
    with pytest.raises(DataError, match=f"expected a label that is {answer}, as tasks") as caught:
        TaskSet([spec], 0)
    assert f"{tmp_path / 'p.jsonl'}:1 label" in str(caught.value)


def test_turns_of_tools(tmp_path: Path) -> None:
    """As OpenAI's API writes them: a call without text, and its answer."""
    call = {"type": "function", "id": "c1", "function": {"name": "sum", "arguments": {"x": 1}}}
    turns = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "sum"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": turns, "label": "2", "metadata": {"tools": [{"name": "sum"}]}}))
    (prompt,) = read_jsonl(path)
    assert prompt.messages[1].as_dict() == {**turns[1], "content": ""}
    assert prompt.messages[2].as_dict() == turns[2]
    assert prompt.tools == [{"name": "sum"}]
    path.write_text(json.dumps({"messages": [{**turns[0], "weight": 1}], "label": "2"}))
    with pytest.raises(DataError, match=r"messages\.0=.*at most tool_calls"):
        read_jsonl(path)


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="an existing file"):
        read_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n", encoding="utf-8")
    with pytest.raises(DataError, match="at least one line"):
        read_jsonl(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_jsonl(tmp_path / "binary.jsonl")
