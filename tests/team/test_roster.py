"""Who takes part, as settings and folders say it; nothing is started for it."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from families import spelt

from slime_tandem.config import RunConfig, SamplingConfig
from slime_tandem.errors import ConfigError, ModelError, TokenizerMismatchError
from slime_tandem.models.tokenizer import ModelTokenizer
from slime_tandem.team.roster import Roster, check_models, members_of
from slime_tandem.types import Message, Prompt

from ..conftest import make_model

PROMPT = Prompt("p", (Message("user", "1+1"),), "2", "t")


def config(trio: Any, **sections: Any) -> RunConfig:
    models = {role: str(getattr(trio, role)) for role in ("senior", "junior", "teacher")}
    return RunConfig.from_mapping({"models": models, "opd": {"enabled": True}, **sections})


@pytest.fixture
def nothing_starts(trio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process and no connection: either would fail the test."""
    for folder in (trio.senior, trio.junior, trio.teacher):
        ModelTokenizer.load(folder)  # a chat template is tried in a process of its own, once

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("a roster starts nothing")

    monkeypatch.setattr(subprocess, "Popen", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)


@pytest.mark.usefixtures("nothing_starts")
def test_a_roster_reads_all_and_starts_nothing(trio: Any) -> None:
    roster = Roster(config(trio, engine={"teacher_url": "http://127.0.0.1:9"}))
    assert roster.roles == ["senior", "junior", "teacher"] == list(roster.folders) == list(roster.tokenizers)
    assert roster.folders["junior"] == trio.junior
    assert roster.members["teacher"].url == "http://127.0.0.1:9"
    assert roster.student is roster.tokenizers["senior"]
    assert roster.tandem_rule.prob_senior < roster.solo_rule.prob_senior == 1.0
    assert roster.tandem_rule.boundary == roster.boundaries.ids
    assert roster.tandem_rule.boundary in roster.fused_tables()
    assert roster.scoring.top_k == 0, "the sampled token's log-prob alone"
    assert roster.api_key() is None


def test_a_response_by_the_senior_alone_has_no_options_of_a_tandem(trio: Any) -> None:
    roster = Roster(config(trio, tandem={"junior_token_loss_weight": 0.5}))
    together = roster.writer_options(PROMPT, roster.tandem_rule, SamplingConfig(), 4)
    alone = roster.writer_options(PROMPT, roster.solo_rule, SamplingConfig())
    assert (together.score_junior, together.tokens_per_request) == (True, 4)
    assert (alone.score_junior, alone.fused, alone.junior_text) == (False, False, None)


def test_variables_of_the_templates_reach_all_that_write(tmp_path: Path) -> None:
    """Senior, a junior with a template of its own, and the student that a teacher knows; not the teacher itself."""
    from families import make_folder
    from transformers import AutoTokenizer

    folders = {}
    for role, family in (("senior", "qwen3"), ("junior", "smollm3"), ("teacher", "qwen3")):
        tokenizer = AutoTokenizer.from_pretrained(make_folder(family, tmp_path / "tokenizers"))
        folders[role] = str(make_model(tmp_path / role, tokenizer, seed=1))
    sections = {"models": {**folders, "template_kwargs": {"enable_thinking": False}}, "opd": {"enabled": True}}
    roster = Roster(RunConfig.from_mapping({**sections, "tandem": {"junior_tokenizer": "any"}}))
    options = roster.writer_options(PROMPT, roster.tandem_rule, SamplingConfig())
    assert options.junior_text is not None
    junior = roster.tokenizers["junior"]
    asked = spelt(junior.tokens, options.junior_text.context([]) or ())
    assert b"Reasoning: /no_think" in asked
    assert asked.endswith(b"<think>\n\n</think>\n")
    written = spelt(roster.student.tokens, roster.student.render(PROMPT.messages))
    assert written.endswith(b"<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert roster.chats["senior"].own_begin == ""
    assert roster.chats["teacher"].turns.opened == "", "it has opd.template_kwargs"


def test_who_takes_part_follows_from_the_settings() -> None:
    def roles(*overrides: str) -> list[str]:
        return list(members_of(RunConfig.load(overrides=overrides)))

    assert roles("opd.enabled=false") == ["senior", "junior"]
    assert roles("opd.enabled=false", "tandem.enabled=false", "eval.tandem=true") == ["senior", "junior"]
    assert roles("tandem.enabled=false", "eval.tandem=false") == ["senior", "teacher"]
    two = 'opd.teachers=[{name: "maths", model: a}, {name: "code", model: b, url: "http://h:1"}]'
    several = members_of(RunConfig.load(overrides=[two]))
    assert list(several)[2:] == ["teacher maths", "teacher code"]
    assert (several["teacher code"].model, several["teacher code"].url) == ("b", "http://h:1")


def test_what_cannot_take_part_is_refused_by_role(trio: Any, tmp_path: Path) -> None:
    models = {role: str(getattr(trio, role)) for role in ("senior", "junior", "teacher")}
    with pytest.raises(ModelError, match=r"models\.junior"):
        Roster(RunConfig.from_mapping({"models": {**models, "junior": str(tmp_path / "none")}}))
    with pytest.raises(ConfigError, match=r"opd\.top_k=100000: .*smallest vocabulary"):
        Roster(config(trio, opd={"enabled": True, "signal": "reverse_kl", "top_k": 100000}))


@pytest.mark.parametrize(("value", "told"), [(None, r"engine\.api_key_env"), ("two words", r"KEY_OF_TEST.*not shown")])
def test_a_key_that_cannot_be_is_refused_and_not_shown(
    trio: Any, monkeypatch: pytest.MonkeyPatch, value: str | None, told: str
) -> None:
    monkeypatch.delenv("KEY_OF_TEST", raising=False)
    roster = Roster(config(trio, engine={"api_key_env": "KEY_OF_TEST"}))
    if value is not None:
        monkeypatch.setenv("KEY_OF_TEST", value)
    with pytest.raises(ConfigError, match=told) as caught:
        roster.api_key()
    assert "two words" not in str(caught.value)
    monkeypatch.setenv("KEY_OF_TEST", "one-word")
    assert roster.api_key() == "one-word"


def test_a_tokenizer_is_read_once_and_again_when_its_folder_changes(trio: Any, tmp_path: Path) -> None:
    folder = tmp_path / "junior"
    shutil.copytree(trio.junior, folder)
    models = {"senior": str(trio.senior), "junior": str(folder), "teacher": str(trio.teacher)}
    settings = RunConfig.from_mapping({"models": models, "opd": {"enabled": False}})
    first, second = Roster(settings), Roster(settings)
    assert first.tokenizers["junior"] is second.tokenizers["junior"]
    assert not check_models(settings)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
    ):
        shutil.copy(trio.teacher / name, folder)
    with pytest.raises(TokenizerMismatchError, match=r"models\.junior"):
        check_models(settings)
