"""A run end to end whose student ends turns with the next role's marker (GLM) and whose teacher has an eos_token that its
template never writes (Gemma)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from families import make_model

from slime_tandem.config import RunConfig
from slime_tandem.distill.panel import TeacherPanel
from slime_tandem.local.run import train
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.protocol import GenerateRequest

from ..in_process import ThreadServer

ENVIRONMENT = (
    "from slime_tandem.types import Message\ndef f(prompt, chat): return [Message('user', 'And then? <end_of_turn>')]\n"
)


def test_a_gemma_teaches_a_glm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = make_model("glm4", tmp_path, seed=1, kind="qwen3")
    teacher = make_model("gemma3", tmp_path, seed=2, kind="llama")
    (tmp_path / "asks_again.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    sent: list[GenerateRequest] = []
    asked = TeacherPanel.score

    async def score(self: TeacherPanel, samples: Any, *args: Any, **more: Any) -> Any:
        for one in self.teachers:
            sent.extend(one._plan(s, self.scoring).request for s in samples)
        return await asked(self, samples, *args, **more)

    monkeypatch.setattr(TeacherPanel, "score", score)
    with ThreadServer(student) as senior, ThreadServer(teacher) as other:
        config = RunConfig.from_mapping(
            {
                "name": "r",
                "runs_dir": str(tmp_path / "runs"),
                "models": {"senior": str(student), "teacher": str(teacher)},
                "engine": {"senior_url": senior.url, "teacher_url": other.url, "cache_tokens": 4096},
                "tandem": {"enabled": False},
                "opd": {"enabled": True},
                "control": False,
                "eval": {"prompts": 1, "tandem": False},
                "sampling": {"max_new_tokens": 60},
                "train": {"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 4, "threads": 1},
                "tasks": [{"family": "chain_sum", "environment": "asks_again:f"}],
            }
        )
        train(config)
    run = tmp_path / "runs" / "r"
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["opd/eos_coverage"] == 1.0
    assert row["opd/failed_samples"] == row["opd/unread_roles"] == 0.0
    # The environment typed the teacher's marker: text to both, and no control token of the student's.
    assert row["rollout/text_markers"] == 0.0
    tokens = ModelTokenizer.load(teacher)
    end, eos, begin = (tokens.hf.convert_tokens_to_ids(t) for t in ("<end_of_turn>", "<eos>", "<start_of_turn>"))
    turns = 0
    for request in sent:
        ids = list(request.input_ids)
        assert eos not in ids
        assert (end, end) not in itertools.pairwise(ids)
        starts = ids.count(begin)
        assert ids.count(end) in (starts - 1, starts), "one end for each turn, the last may be open"
        turns += starts // 2
    assert turns > len(sent), "some have two turns"
    record = json.loads((run / "turns.json").read_text())
    assert (record["senior"]["closed_by"], record["teacher"]["closing"]) == ("the next role", "<end_of_turn>")
