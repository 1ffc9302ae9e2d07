"""`slime-tandem score`: log-probs of a file of responses, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_tandem import cli
from slime_tandem.distill.alignment import Aligner
from slime_tandem.errors import DataError, ModelError
from slime_tandem.models.hf import check_served_model, load_model, read_model_config
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.team.score_file import read_responses


def run(trio: Any, source: Path, output: Path, *flags: str) -> int:
    return cli.main(
        [
            "score",
            str(source),
            "--output",
            str(output),
            "--student",
            str(trio.senior),
            "--teacher",
            str(trio.teacher),
            *flags,
        ]
    )


def test_scores_are_those_of_transformers(trio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student, teacher = ModelTokenizer.load(trio.senior), ModelTokenizer.load(trio.teacher)
    ids = [*student.encode("the answer \u4f60"), 999, student.end_of_turn]
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "1 + 1 =", "response": "answer 46 and why"},
        {"messages": [{"role": "user", "content": "say"}], "response_ids": ids},
        {"prompt": "x", "response_ids": []},
        {"prompt": "long", "response": "word " * 300},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert run(trio, source, output, "--top-k", "3") == 0
    assert "4 responses, 1 without scores" in capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", 1, 2, 3]
    assert "at most" in rows[3]["error"]
    assert rows[3]["teacher_log_probs"] is None
    assert (rows[2]["teacher_log_probs"], rows[2]["coverage"]) == ([], 1.0)
    assert rows[1]["response_ids"] == ids
    assert rows[1]["unaligned"]["special"] == 1
    model = load_model(trio.teacher, "float32")
    aligner = Aligner(student.tokens, teacher.tokens, end_of_turn=teacher.end_of_turn)
    text = aligner.write(rows[0]["response_ids"], teacher.encode)
    from slime_tandem.types import Message

    prompt = teacher.render([Message("user", "1 + 1 =")])
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([[*prompt, *text.ids]])).logits[0].float(), -1)
    index = aligner.align(text).teacher_index.tolist()
    assert rows[0]["teacher_log_probs"] == [
        pytest.approx(table[len(prompt) + j - 1, text.ids[j]].item(), abs=1e-4) if j >= 0 else None for j in index
    ]
    assert all(len(ids) <= 3 for ids in rows[0]["candidate_ids"])
    assert rows[0]["candidate_ids"][-1]


BAD = {
    "no object": "[]",
    "broken": "{",
    "unknown key": '{"prompt": "a", "response": "b", "answer": 1}',
    "both prompts": '{"prompt": "a", "messages": [], "response": "b"}',
    "no response": '{"prompt": "a"}',
    "text ids": '{"prompt": "a", "response_ids": ["x"]}',
    "response no text": '{"prompt": "a", "response": 3}',
    "empty prompt": '{"prompt": "", "response": "b"}',
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named_and_nothing_is_written(
    trio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "response": "b"}\n' + BAD[kind] + "\n")
    assert run(trio, source, output) == 2
    assert "in.jsonl:2" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--policy", "chain_rule"), "--policy"),
        (("--template-kwargs", "[1]"), "--template-kwargs"),
        (("--top-k", "-1"), "--top-k"),
        (("--teacher", "nowhere"), "nowhere"),
        (("--teacher-url", "foo"), "--teacher-url"),
        (("--template-kwargs", '{"chat_template": "x"}'), "template_kwargs"),
        (("--api-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE"),
    ],
)
def test_bad_flags_are_named(
    trio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], part: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "response": "b"}\n')
    assert run(trio, source, tmp_path / "out.jsonl", *flags) == 2
    assert part in capsys.readouterr().err


def test_what_is_not_there_is_named(trio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trio, tmp_path / "no.jsonl", tmp_path / "out.jsonl") == 2
    assert "no.jsonl" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("\n")
    assert run(trio, tmp_path / "empty.jsonl", tmp_path / "out.jsonl") == 2
    assert "at least one line" in capsys.readouterr().err
    assert run(trio, tmp_path / "empty.jsonl", tmp_path / "no" / "out.jsonl") == 2
    assert "--output" in capsys.readouterr().err


# ---- slime-tandem align ----


def test_align_shows_map_coverage_and_text(trio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["align", "--student", str(trio.senior), "--teacher", str(trio.teacher)]
    (tmp_path / "t.txt").write_text("the answer is 46 \u4f60")
    assert cli.main([*flags, str(tmp_path / "t.txt")]) == 0
    out = capsys.readouterr().out
    assert "special tokens, student -> teacher:" in out
    assert (
        "turns of the student:\n  starts with '', a turn with '<|assistant|>'\n  a turn is closed by '<|end|>'" in out
    )
    assert "turns of the teacher:" in out
    assert "a turn is closed by '<|eot|>'" in out
    assert "coverage" in out
    assert "digits" in out
    (tmp_path / "ids.json").write_text("[5, 999, 0]")
    assert cli.main([*flags, "--ids", str(tmp_path / "ids.json")]) == 0
    assert " special  1" in capsys.readouterr().out
    same = ["align", "--student", str(trio.senior), "--teacher", str(trio.senior)]
    assert cli.main(same) == 0
    assert "every token has a partner" in capsys.readouterr().out


def test_align_refuses_bad_input(trio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["align", "--student", str(trio.senior), "--teacher", str(trio.teacher)]
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    for more, part in (
        (["--limit", "0"], "--limit"),
        (["--ids"], "--ids"),
        ([str(tmp_path / "bad.txt")], "bad.txt"),
        (["--ids", str(tmp_path / "bad.txt")], "bad.txt"),
    ):
        assert cli.main([*flags, *more]) == 2
        assert part in capsys.readouterr().err


def test_what_json_allows_and_a_line_break_does_not_cut(trio: Any, tmp_path: Path) -> None:
    student = ModelTokenizer.load(trio.senior)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a\u2028b\x85c", "response_ids": [1]}\r\n', encoding="utf-8")
    ((_, sample),) = read_responses(source, student)
    assert sample.prompt.messages[0].content == "a\u2028b\x85c"


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "response": "\\ud800"}',
        '{"prompt": "\\udfff", "response": "4"}',
        '{"id": NaN, "prompt": "a", "response": "4"}',
        '{"prompt": "a", "response_ids": [%s]}' % ("1" * 5000),
    ],
)
def test_what_cannot_be_written_again_is_refused_before_the_work(trio: Any, tmp_path: Path, line: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"in.jsonl:1=.*expected one JSON object"):
        list(read_responses(source, ModelTokenizer.load(trio.senior)))


def test_the_input_and_devices_are_never_replaced(
    trio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "response": "b"}\n')
    os.mkfifo(tmp_path / "pipe")
    assert run(trio, source, source) == 2
    assert run(trio, source, tmp_path / "pipe") == 2
    told = capsys.readouterr().err
    assert "expected another file than FILE" in told
    assert "expected a regular file or none yet" in told
    assert (tmp_path / "pipe").is_fifo()


def test_a_server_of_another_vocabulary_is_refused(trio: Any) -> None:
    config = read_model_config(trio.teacher)
    check_served_model({"vocab_size": config["vocab_size"]}, trio.teacher, "http://x")
    check_served_model({}, trio.teacher, "http://x")
    with pytest.raises(ModelError, match=r"server http://x.*correct the URL"):
        check_served_model({"vocab_size": config["vocab_size"] + 1}, trio.teacher, "http://x")
