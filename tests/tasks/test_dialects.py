"""Data files as their owners write them: formats, columns, bad rows. Each is read, or refused with the reason."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.config import RunConfig, TaskSpec
from slime_tandem.errors import DataError
from slime_tandem.tasks.families import TaskSet
from slime_tandem.tasks.jsonl import PromptFile, read_prompts

USER = {"role": "user", "content": "2 + 2 ="}
GSM8K = {"question": "2 + 2 =", "answer": "2 and 2 are <<2+2=4>>4.\n#### 4"}
WORKED = {"answer": GSM8K["answer"]}
BOX = "$\\boxed{4}$"
VERL = {
    "data_source": "openai/gsm8k", "prompt": [USER], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"split": "train", "index": 0},
}  # fmt: skip
DAPO = {**VERL, "data_source": "math_dapo", "solution": "4", "source_prompt": [USER]}
MATH = {"problem": "2 + 2 =", "solution": "We add.\nSo it is \\boxed{4}.", "level": "Level 1", "type": "Algebra"}
SOLVED = [USER, {"role": "assistant", "content": "It is\n\\boxed{4}"}]
NUMINA = {"source": "cn_k12", "problem": "2 + 2 =", "solution": "Add: $\\boxed{4}$.", "messages": SOLVED}
OPEN_R1 = {
    "problem": "2 + 2 =", "solution": "Add.\nSo 4.", "answer": "4", "problem_type": "Algebra", "uuid": "u",
    "is_reasoning_complete": [True], "generations": ["<think>\n</think>"], "correctness_count": 1, "messages": SOLVED,
}  # fmt: skip
SHAREGPT = {"id": "a_0", "conversations": [{"from": "human", "value": "2 + 2 ="}, {"from": "gpt", "value": "4"}]}
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "sum", "arguments": "{}"}}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Add."}, USER, {"role": "assistant", "tool_calls": [CALL], "content": None},
        {"role": "tool", "tool_call_id": "c1", "content": "4"}, USER, {"role": "assistant", "content": "4"},
    ],
    "tools": TOOLS, "parallel_tool_calls": False,
}  # fmt: skip
MBPP = {"task_id": 11, "text": "Remove a character.", "code": "def f(): pass", "test_list": ["assert f() == 1"]}
MMLU = {"question": "2 + 2 =", "subject": "algebra", "choices": ["3", "4", "5", "6"], "answer": 1}
ARC = {"id": "M_1", "question": "2 + 2 =", "choices": {"text": ["3", "4"], "label": ["A", "B"]}, "answerKey": "B"}
HELLASWAG = {"ctx": "A man adds", "endings": ["two", "four"], "label": "1", "activity_label": "Sums"}
ULTRA = {"prompt": "2 + 2 =", "chosen": SOLVED, "rejected": SOLVED, "score_chosen": 8.0, "score_rejected": 2.0}
SFT = {"messages": [USER, {"role": "assistant", "content": "It is\n\\boxed{4}"}]}


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(*rows: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return bytes(sink.getvalue())


def read(tmp_path: Path, name: str, content: bytes, *, labels: bool = True, **settings: Any) -> PromptFile:
    (tmp_path / name).write_bytes(content)
    return read_prompts(TaskSpec(family="jsonl", path=str(tmp_path / name), **settings), labels=labels)


FILES: list[tuple[str, bytes, dict[str, Any], str, dict[str, Any]]] = [
    ("slime.jsonl", lines({"prompt": "2 + 2 =", "label": "4"}), {}, "prompt from prompt, label from label", {}),
    ("bom.jsonl", b"\xef\xbb\xbf" + lines({"prompt": "2 + 2 =", "label": 4}), {}, "label from label", {}),
    ("gsm8k.jsonl", lines(GSM8K), {}, "from question, label from answer (its final answer)", WORKED),
    ("gsm8k.json", json.dumps([GSM8K], indent=1).encode(), {}, "answer", WORKED),
    ("lines.json", lines(GSM8K, GSM8K), {}, "2 rows", WORKED),
    ("gsm8k.jsonl.gz", gzip.compress(lines(GSM8K)), {}, "answer", WORKED),
    ("gsm8k.json.gz", gzip.compress(json.dumps([GSM8K]).encode()), {}, "answer", WORKED),
    ("gsm8k.parquet", parquet(GSM8K), {}, "answer", WORKED),
    ("excel.csv", b'\xef\xbb\xbfid,question,answer\r\n7,"2 + 2\r\n=",4\r\n', {}, "label from answer", {"id": "7"}),
    ("tabs.tsv", b"question\tanswer\tid\n2 + 2 =\t4\t7\n", {}, "label from answer", {"id": "7"}),
    ("cells.csv.gz", gzip.compress(b'messages,label\n"[{""role"": ""user"", ""content"": ""x""}]",4\n'), {}, "messages", {}),
    ("trl.jsonl", lines({"prompt": [USER], "solution": BOX}), {}, "label from solution (its", {"solution": BOX}),
    ("math.jsonl", lines(MATH), {}, "prompt from problem", {k: MATH[k] for k in ("level", "type", "solution")}),
    ("verl.parquet", parquet(VERL), {}, "reward_model.ground_truth", {k: v for k, v in VERL.items() if k != "prompt"}),
    ("dapo.parquet", parquet(DAPO), {}, "ground_truth", {k: v for k, v in DAPO.items() if k != "prompt"}),
    ("sft.jsonl", lines(SFT), {}, "label from last turn (its final answer)", {"last_turn": "It is\n\\boxed{4}"}),
    ("solved.jsonl", lines({"prompt": "2 + 2 =", "solution": "4"}), {}, "label from solution", {}),
    ("numina.parquet", parquet(NUMINA), {}, "prompt from messages, label from solution (its final answer)",
     {"source": "cn_k12", "problem": "2 + 2 =", "solution": NUMINA["solution"], "last_turn": "It is\n\\boxed{4}"}),
    ("openr1.parquet", parquet(OPEN_R1), {}, "prompt from messages, label from answer",
     {k: v for k, v in OPEN_R1.items() if k not in ("messages", "answer")} | {"last_turn": "It is\n\\boxed{4}"}),
    ("sharegpt.json", json.dumps([SHAREGPT]).encode(), {}, "prompt from conversations, label from last turn",
     {"id": "a_0", "last_turn": "4"}),
    ("openai.jsonl", lines(OPENAI), {}, "prompt from messages, label from last turn",
     {"tools": TOOLS, "parallel_tool_calls": False, "last_turn": "4"}),
    ("alpaca.json", json.dumps([{"instruction": "2 + 2 =", "input": "", "output": "4"}]).encode(),
     {"input_key": "instruction", "label_key": "output"}, "from instruction, label from output", {"input": ""}),
    ("slime.parquet", parquet({"question": "2 + 2 =", "target": "4", "extra": {"rm_type": "math"}}),
     {"input_key": "question", "label_key": "target", "metadata_key": "extra"}, "label from target", {"rm_type": "math"}),
    ("named.jsonl", lines({"q": "x", "a": {"b": 4}, "m": {"k": 1}, "z": [2]}),
     {"input_key": "q", "label_key": "a.b", "metadata_key": "m"}, "from q, label from a.b", {"a": {"b": 4}, "k": 1, "z": [2]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "settings", "told", "metadata"), FILES, ids=[f[0] for f in FILES])
def test_files_in_their_owners_dialects(
    tmp_path: Path, name: str, content: bytes, settings: dict[str, Any], told: str, metadata: dict[str, Any]
) -> None:
    found = read(tmp_path, name, content, **settings)
    assert {p.label for p in found.prompts} == {"4"}
    assert all(p.messages[-1].role == "user" and p.messages[-1].content for p in found.prompts)
    assert dict(found.prompts[0].metadata) == metadata
    assert told in found.notes[0], found.notes


def two_columns(name: str) -> bytes:
    """Parquet with two columns of one name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["4"])], names=[name, name, "label"]), sink)
    return bytes(sink.getvalue())


def damaged(file: bytes) -> bytes:
    """Its footer is whole, its first page is not."""
    return file[:40] + b"\xff" * 20 + file[60:]


REFUSED: list[tuple[str, Callable[[], bytes], dict[str, Any], str]] = [
    ("sharegpt.jsonl", lambda: lines({"conversations": [{"from": "tool", "value": "x"}]}), {}, "conversations.0=.*role"),
    ("one.jsonl", lambda: lines({"conversations": [{"from": "human", "value": "x"}]}), {}, ":1 label=None"),
    ("alpaca.json", lambda: json.dumps([{"instruction": "a", "input": "b", "output": "c"}]).encode(), {}, "join `instruction`"),
    ("mmlu.parquet", lambda: parquet(MMLU), {}, "row 1=.*holds its choices: `choices`.*the right letter"),
    ("arc.parquet", lambda: parquet(ARC), {}, "row 1=.*holds its choices: `choices`"),
    ("hellaswag.jsonl", lambda: lines(HELLASWAG), {}, ":1=.*holds its choices: `endings`"),
    ("mbpp.jsonl", lambda: lines(MBPP), {}, ":1=.*'text'.*tasks..\\.input_key"),
    ("orca.jsonl", lambda: lines({"question": "a", "answer": "We add two and two. " * 15}), {}, "answer=.*`#### 42`"),
    ("ultrafeedback.parquet", lambda: parquet(ULTRA), {}, "label=None.*`rejected` are preferences.*reward_coef=0"),
    ("pairs.jsonl", lambda: lines({"chosen": SOLVED, "rejected": SOLVED}), {}, "no reward of this package learns from pairs"),
    ("two.jsonl", lambda: lines({"prompt": "a", "messages": [USER], "label": 4}), {}, "either `prompt` or `messages`"),
    ("long.jsonl", lambda: lines({"problem": "a", "solution": "One.\nTwo."}), {}, "solution=.*expected an answer: `#### 42`"),
    ("prompts.jsonl", lambda: lines({"prompt": "a", "completion": "b"}), {}, "label=None.*label_key; there are prompt, comp"),
    ("typo.jsonl", lambda: lines({"prompt": "a", "anwser": "4"}), {}, "did you mean `answer`"),
    ("input.jsonl", lambda: lines({"prompt": "a", "label": "4"}), {"input_key": "promt"}, "promt of.*did you mean `prompt`"),
    ("meta.jsonl", lambda: lines({"prompt": "a", "label": "4"}), {"metadata_key": "m"}, "column m of tasks..\\.metadata_key"),
    ("twice.jsonl", lambda: lines({"prompt": "a", "label": 4, "k": 1, "metadata": {"k": 2}}), {}, "key='k'.*rename the column"),
    ("raw.jsonl", lambda: lines({**GSM8K, "metadata": {"answer": 2}}), {}, "key='answer'.*rename the column"),
    ("turn.jsonl", lambda: lines({**SFT, "last_turn": 2}), {}, "last_turn=2: .*rename it"),
    ("spec.jsonl", lambda: lines({"prompt": "a", "label": 4, "spec": 1}), {}, "key='spec'.*rename the column"),
    ("object.json", lambda: json.dumps({"data": [GSM8K]}, indent=1).encode(), {}, "rows are under the key `data`.*jq -c"),
    ("line.json", lambda: json.dumps({"v": 1, "rows": [GSM8K]}).encode(), {}, "rows are under the key `rows`"),
    ("cut.json", lambda: b'{\n"data": [{"a": 1}', {}, ":1='{'.*one JSON object"),
    ("strings.json", lambda: b'["a"]', {}, "entry 1=.*a JSON object"),
    ("broken.json", lambda: b'[{"prompt": "a"', {}, "a JSON list of objects"),
    ("cells.csv", lambda: b"question,answer\na,4,5\n", {}, ":2='3 cells'.*2 cells"),
    ("open.csv", lambda: b'question,answer\na,"4\n', {}, ":2.*a row of CSV"),
    ("head.csv", lambda: b"question,question\na,4\n", {}, ":1=.*each once"),
    ("python.csv", lambda: b"prompt,label\n\"[{'role': 'user', 'content': 'x'}]\",4\n", {}, "messages as JSON"),
    ("latin.csv", lambda: "question,answer\ncaf\xe9,4\n".encode("latin-1"), {}, "UTF-8"),
    ("cut.jsonl.gz", lambda: gzip.compress(lines(*[GSM8K] * 99))[:-9], {}, "a whole file of gzip .*fetch or pack it again"),
    ("none.jsonl.gz", lambda: lines(GSM8K), {}, "whole file of gzip .*not end with .gz"),
    ("none.parquet", lambda: b"PAR1", {}, "a readable Parquet file"),
    ("image.parquet", lambda: parquet({**GSM8K, "image": b"\x89PNG"}), {}, "row 1 image=.*bytes in a column"),
    ("nan.parquet", lambda: parquet({"prompt": "a", "label": float("nan")}), {}, "row 1 label='nan'.*nan is no number"),
    ("null.parquet", lambda: parquet(*({"prompt": text, "label": "4"} for text in ("a", None))), {},
     r"row 2 \(null: prompt\)=\['label'\]"),
    ("twice.parquet", lambda: two_columns("prompt"), {}, "several called prompt.*drop all but one"),
    ("empty.parquet", lambda: b"", {}, "a readable Parquet file"),
    ("cut.parquet", lambda: damaged(parquet(GSM8K)), {}, "a readable Parquet file .*restore"),
    ("packed.jsonl", lambda: gzip.compress(lines(GSM8K)), {}, r"begins as gzip does.*\.gz"),
    ("rows.jsonl", lambda: parquet(GSM8K), {}, r"JSON lines, .*begins as Parquet does.*name it \.parquet"),
    ("sheet.csv", lambda: b"PK\x03\x04", {}, "CSV, .*begins as zip.*save the sheet as CSV"),
    ("wide.jsonl", lambda: lines(GSM8K).decode().encode("utf-16"), {}, "begins as UTF-16.*save the file as UTF-8"),
    ("wide.csv", lambda: "prompt,label\na,4\n".encode("utf-16-be"), {}, ":1=.*UTF-8 text"),
    ("excel.csv", lambda: b"prompt;label\na;4\n", {}, ":1='prompt;label'.*not ';'.*with commas"),
    ("index.csv", lambda: b",prompt,label\n0,a,4\n", {}, "index=False"),
    ("spaces.csv", lambda: b"prompt,label, label\na,4,5\n", {}, "each once"),
    ("null.json", lambda: b"null", {}, ":1='null'.*a JSON object"),
    ("number.json", lambda: b"3", {}, ":1='3'.*a JSON object"),
    ("labels.jsonl", lambda: lines({"prompt": "a", "label": ["1", "2"]}), {}, "label=.*reaches a reward of your own"),
    ("shown.jsonl", lambda: lines({"prompt": "<image> What?", "label": "4", "images": ["a.png"]}), {}, "images=.*text alone"),
    ("parts.jsonl", lambda: lines({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}), {}, "images are not read"),
    ("silent.jsonl", lambda: lines({"messages": [{"role": "user", "content": " "}], "label": 4}), {}, "a turn with text"),
    ("monologue.jsonl", lambda: lines({"messages": [USER | {"role": "assistant"}], "label": 4}), {}, "add the user's turn"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "settings", "says"), REFUSED, ids=[f[0] for f in REFUSED])
def test_files_that_are_refused_say_why_and_where(
    tmp_path: Path, name: str, content: Callable[[], bytes], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=rf"(?s)^{tmp_path / name}.*{says}|path='?{tmp_path / name}.*{says}"):
        read(tmp_path, name, content(), **settings)


def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path: Path) -> None:
    """Opening it would wait for a writer, and there is none."""
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a file: rows are read again.*into a file"):
        read_prompts(TaskSpec(family="jsonl", path=str(tmp_path / "a.jsonl")))


def test_names_of_csv_columns_are_read_without_the_spaces_around_them(tmp_path: Path) -> None:
    assert [p.label for p in read(tmp_path, "a.csv", b"prompt, label\na,4\n").prompts] == ["4"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_bad_rows_are_skipped_and_counted_where_asked_for(tmp_path: Path, name: str) -> None:
    content = {
        "a.jsonl": b'{"prompt": "a", "label": 1}\n{\n\xff\n[1]\n{"prompt": "b"}\n{"prompt": "c", "label": 3}\n',
        "a.csv": b'prompt,label\na,1\nx\n"p"q,2\n,5\nb,\nc,3\n',
    }[name]
    found = read(tmp_path, name, content, bad_lines="skip")
    assert [p.label for p in found.prompts] == ["1", "3"]
    assert (
        f"{tmp_path / name}: 4 bad rows skipped; the first: {tmp_path / name}:{2 if 'json' in name else 3}"
        in found.notes[-1]
    )
    with pytest.raises(DataError, match=r"a\.jsonl:2|a\.csv:3"):
        read(tmp_path, name, content)
    with pytest.raises(DataError, match="label=None"):  # not one good row: the first reason is told
        read(tmp_path, name, lines({"prompt": "a"}) if "json" in name else b"prompt,x\na,1\n", bad_lines="skip")


def test_without_labels_nothing_of_a_row_is_lost(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": {"tests": [1]}}, {"prompt": "c", "solution": "x\ny"}]
    found = read(tmp_path, "a.jsonl", lines(*rows), labels=False).prompts
    assert [p.label for p in found] == [None, None, "x\ny"]
    assert dict(found[1].metadata) == {"answer": {"tests": [1]}, "whole_label": {"tests": [1]}}


def seen(prompt: Any, text: str) -> float:
    return float(prompt.metadata["level"] == "hard")


def test_other_columns_reach_the_reward(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*({"prompt": f"{i}", "level": "hard"} for i in range(30))))
    tasks = TaskSet(
        [TaskSpec(family="jsonl", path=str(tmp_path / "a.jsonl"), reward="tests.tasks.test_dialects:seen")], 0
    )
    prompt = tasks.train_prompts(0, 1)[0]
    assert tasks.reward(prompt, "x") == 1.0
    assert tasks.notes[0].endswith("30 rows: prompt from prompt, no label")


def test_the_settings_of_files_need_a_file() -> None:
    for name, value in {"input_key": "a", "label_key": "a", "metadata_key": "a", "bad_lines": "skip"}.items():
        with pytest.raises(ValueError, match=f"`{name}` is for the rows of family `jsonl`"):
            TaskSpec.model_validate({"family": "chain_sum", name: value})


def test_distillation_needs_no_labels_and_labels_that_are_there_count(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(*({"prompt": f"{i}"} | ({"label": i} if i % 2 else {}) for i in range(60))))
    spec = TaskSpec(family="jsonl", path=str(path))
    with pytest.raises(DataError, match=r":1 label=None.*objective\.reward_coef=0, control=false"):
        TaskSet([spec], 0)
    tasks = TaskSet([spec], 0, labels=False)
    prompts = tasks.train_prompts(0, 40)
    rewards = [v.reward for v in tasks.verdicts([(p, f"<answer>{p.messages[0].content}</answer>") for p in prompts])]
    assert rewards == [None if p.label is None else 1.0 for p in prompts], "without a label there is none"
    assert {None, 1.0} == set(rewards)
    assert not any(v.failed for v in tasks.verdicts([(p, "") for p in prompts]))
    bare = next(p for p in prompts if p.label is None)
    with pytest.raises(DataError, match=r"label of prompt .*give it one"):
        tasks.reward(bare, "4")


def test_who_needs_labels() -> None:
    opd = {"opd": {"enabled": True}}
    for reward, control, needs in ((1.0, False, True), (0.0, True, True), (0.0, False, False)):
        config = RunConfig.from_mapping({"objective": {"reward_coef": reward}, "control": control, **opd})
        assert config.needs_labels is needs


def test_the_instruction_is_appended_to_the_last_turn_of_the_user(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "4"}]
    ask = "End with a number."
    (prompt,) = read(tmp_path, "a.jsonl", lines({"messages": turns, "label": "4"}), instruction=ask).prompts
    assert [m.content for m in prompt.messages] == ["S", "2 + 2 =\nEnd with a number."]
    with pytest.raises(DataError, match="a user's turn"):
        read(tmp_path, "a.jsonl", lines({"messages": turns[:1], "label": "4"}), instruction=ask)


def test_what_a_reward_of_ones_own_needs_reaches_it(tmp_path: Path) -> None:
    """MBPP has tests, no label; its prompts are read where somebody else says what an answer is worth."""
    found = read(tmp_path, "mbpp.jsonl", lines(MBPP), labels=False, input_key="text")
    assert dict(found.prompts[0].metadata) == {"task_id": 11, "code": "def f(): pass", "test_list": ["assert f() == 1"]}
    assert read(tmp_path, "ultra.parquet", parquet(ULTRA), labels=False).prompts[0].label is None
    tools = read(tmp_path, "openai.jsonl", lines(OPENAI)).prompts[0]
    assert tools.tools == TOOLS
    assert [m.role for m in tools.messages] == ["system", "user", "assistant", "tool", "user"]


def whole(label: object) -> float:
    return {"['a', 'b']": 1.0, "{'value': 4}": 2.0, "True": 3.0}[str(label)]


def verl(solution_str: str, ground_truth: object) -> float:
    return whole(ground_truth)


@pytest.mark.parametrize("reward", ["whole", "verl"])
@pytest.mark.parametrize("value", [["a", "b"], {"value": 4}, True])
@pytest.mark.parametrize("key", ["label", "answer", "reward_model.ground_truth", "gold"])
def test_a_label_that_is_no_one_answer_reaches_a_reward_of_ones_own_whole(
    tmp_path: Path, key: str, value: object, reward: str
) -> None:
    first, _, rest = key.partition(".")
    row = {first: {"style": "rule", rest: value} if rest else value}
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(*({"prompt": f"{i}"} | row for i in range(30))))
    named = {"label_key": key} if key == "gold" else {}
    spec = TaskSpec(family="jsonl", path=str(path), reward=f"tests.tasks.test_dialects:{reward}", **named)
    tasks = TaskSet([spec], 0)
    assert tasks.notes[0].endswith(f"30 rows: prompt from prompt, label, whole, from {key}")
    assert tasks.reward(tasks.train_prompts(0, 1)[0], "x") == whole(value)
    with pytest.raises(DataError, match=rf"{key}="):  # nothing that answers are compared with
        read(tmp_path, "a.jsonl", path.read_bytes(), **named)


@pytest.mark.parametrize("row", [{"metadata": {"spec": 1}}, {"spec": 1}, {"metadata": {"whole_label": [1]}}])
def test_names_that_this_package_writes_itself_are_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1 key=.*rename the column"):
        read(tmp_path, "a.jsonl", lines({"prompt": "a", "label": "4"} | row))
