"""Pre-training: worksheets, tokenizers, the cache, and a very small run that yields loadable folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_tandem.errors import ModelError
from slime_tandem.models import builtin
from slime_tandem.models.builtin import (
    TASK,
    Muon,
    Recipe,
    build_tokenizer,
    encode,
    orthogonalised,
    pretrain,
    recipe_from_dict,
    resolve_model,
)
from slime_tandem.models.worksheet import worksheet
from slime_tandem.tasks.families import TaskSet

TASKS = TaskSet([TASK], seed=0)
FULL = Recipe()
TINY = dataclasses.replace(
    FULL,
    junior=dataclasses.replace(FULL.junior, hidden_size=16, intermediate_size=16, steps=2, check_every=1),
    senior=dataclasses.replace(FULL.senior, hidden_size=16, intermediate_size=16, steps=2),
    teacher=dataclasses.replace(FULL.teacher, hidden_size=16, intermediate_size=16, steps=2),
    check_prompts=4,
    final_prompts=4,
)
STUDENT = build_tokenizer(FULL.student_tokenizer, TASKS)
TEACHER = build_tokenizer(FULL.teacher_tokenizer, TASKS)


def expression(prompt: object) -> str:
    return prompt.metadata["entry"]["metadata"]["expression"]  # type: ignore[attr-defined, no-any-return]


def test_worksheets_without_slips_are_right() -> None:
    for prompt in TASKS.train_prompts(0, 300):
        pieces = worksheet(expression(prompt), 0.0, Random(0))
        assert all(right for _, right in pieces)
        assert TASKS.correct(prompt, "".join(text for text, _ in pieces)), expression(prompt)


def test_slips_are_marked_and_cost_accuracy() -> None:
    rng = Random(1)
    correct = {True: 0, False: 0}
    count = {True: 0, False: 0}
    for prompt in TASKS.train_prompts(0, 400):
        pieces = worksheet(expression(prompt), 0.4, rng)
        clean = all(right for _, right in pieces)
        count[clean] += 1
        correct[clean] += TASKS.correct(prompt, "".join(text for text, _ in pieces))
    assert correct[True] == count[True] > 100
    assert correct[False] < 0.1 * count[False], "a slip spoils the answer, but for rare slips that cancel"


def test_the_two_tokenizers_differ_and_round_trip_bytes() -> None:
    assert STUDENT.get_vocab() != TEACHER.get_vocab()
    assert len(STUDENT) != len(TEACHER)
    assert STUDENT.eos_token_id != TEACHER.eos_token_id
    assert STUDENT.eos_token != TEACHER.eos_token
    for text in (" 7+8 =15 ; <answer>85</answer>", "naïve 漢字 🙂\n\t", "  two  spaces "):
        for tokenizer in (STUDENT, TEACHER):
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize("tokenizer", [STUDENT, TEACHER], ids=["student", "teacher"])
def test_digits_stand_alone_and_words_carry_their_space(tokenizer: object) -> None:
    tokens = tokenizer.tokenize(" 4+38 =42 ;")  # type: ignore[attr-defined]
    assert tokens == ["Ġ", "4", "+", "3", "8", "Ġ=", "4", "2", "Ġ;"]


def test_most_response_tokens_but_not_all_have_an_equal_in_the_teachers_tokens() -> None:
    shared = total = 0
    for prompt in TASKS.train_prompts(0, 100):
        text = "".join(piece for piece, _ in worksheet(expression(prompt), 0.0, Random(0)))
        spans = [
            set(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"])
            for tokenizer in (STUDENT, TEACHER)
        ]
        shared, total = shared + len(spans[0] & spans[1]), total + len(spans[0])
    assert 0.85 <= shared / total < 1.0


@pytest.mark.parametrize("tokenizer", [STUDENT, TEACHER], ids=["student", "teacher"])
def test_chat_template_ends_in_the_generation_prompt(tokenizer: object) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)  # type: ignore[attr-defined]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)  # type: ignore[attr-defined]
    assert whole.count(tokenizer.eos_token) == 3  # type: ignore[attr-defined]
    assert asked.startswith(whole)
    assert len(tokenizer(asked[len(whole) :], add_special_tokens=False)["input_ids"]) == 1  # type: ignore[operator]


@pytest.mark.parametrize("role", ["senior", "teacher"])
def test_labels_cover_the_response_and_leave_slips_out_for_the_teacher(role: str) -> None:
    tokenizer = TEACHER if role == "teacher" else STUDENT
    settings = dataclasses.replace(getattr(FULL, role), slip=0.5)
    prompts = TASKS.train_prompts(0, 50)
    slips = 0
    for prompt, (ids, labels) in zip(prompts, encode(tokenizer, prompts, settings, Random(0)), strict=True):
        asked = tokenizer.apply_chat_template(
            [m.as_dict() for m in prompt.messages], add_generation_prompt=True, tokenize=False
        )
        n = len(tokenizer(asked, add_special_tokens=False)["input_ids"])
        assert tokenizer.decode(ids[:n]) == asked
        assert labels[:n] == [-100] * n
        assert ids[-1] == labels[-1] == tokenizer.eos_token_id
        assert all(label in (token, -100) for token, label in zip(ids[n:], labels[n:], strict=True))
        slips += labels[n:].count(-100)
    assert (slips > 0) == (role == "teacher")


def test_training_prompts_are_never_held_out_ones() -> None:
    held_out = {p.prompt_id for p in TASKS.heldout_prompts(FULL.final_prompts)}
    trained = {p.prompt_id for step in range(2, 6) for p in TASKS.train_prompts(step, 512)}
    assert len(trained) > 1500
    assert not held_out & trained


def test_key_follows_the_recipe_and_survives_json() -> None:
    assert Recipe().key == Recipe().key
    keys = {
        Recipe().key,
        TINY.key,
        dataclasses.replace(FULL, senior=dataclasses.replace(FULL.senior, seed=7)).key,
        dataclasses.replace(FULL, teacher_tokenizer=dataclasses.replace(FULL.teacher_tokenizer, vocab_size=380)).key,
    }
    assert len(keys) == 4
    assert recipe_from_dict(json.loads(json.dumps(dataclasses.asdict(TINY)))) == TINY


def test_orthogonalised_brings_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 8, 20, generator=generator)
    values = torch.linalg.svdvals(orthogonalised(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_muon_lowers_a_loss_and_steps_by_its_learning_rate() -> None:
    torch.manual_seed(0)
    tall, wide = torch.nn.Parameter(torch.randn(12, 6)), torch.nn.Parameter(torch.randn(6, 12))
    target = torch.randn(12, 12)
    optimizer = Muon([tall, wide], lr=0.05)

    def loss() -> torch.Tensor:
        return (tall @ wide - target).pow(2).mean()

    before, first = tall.detach().clone(), loss().item()
    for _ in range(60):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if before is not None:
            size = (tall.detach() - before).pow(2).mean().sqrt().item()
            assert 0.5 * 0.2 * 0.05 < size < 1.5 * 0.2 * 0.05 * (12 / 6) ** 0.5
            before = None  # type: ignore[assignment]
    assert loss().item() < 0.5 * first


def test_models_are_made_once_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    senior = resolve_model("builtin:senior", tmp_path, lines.append, TINY)
    assert senior == tmp_path / TINY.key / "senior"
    assert lines[0].startswith("pre-training junior, senior and teacher into ")
    assert {line.split(":")[0] for line in lines[1:]} == set(builtin.ROLES), "and how far each is"
    assert sorted(p.name for p in tmp_path.iterdir()) == [TINY.key, "pretrain.lock"], "nothing temporary is left"

    monkeypatch.setattr(builtin, "_run_workers", lambda *_: pytest.fail("the cache was not used"))
    folders = {role: resolve_model(f"builtin:{role}", tmp_path, recipe=TINY) for role in builtin.ROLES}
    classes = {}
    for role, folder in folders.items():
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        classes[role] = type(model).__name__
        assert model.config.vocab_size == len(tokenizer)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
        assert tokenizer.chat_template
        assert (folder / "model.safetensors").is_file()
    assert classes == {"junior": "Qwen3ForCausalLM", "senior": "Qwen3ForCausalLM", "teacher": "LlamaForCausalLM"}
    same = [(folders[role] / "tokenizer.json").read_bytes() for role in ("junior", "senior", "teacher")]
    assert same[0] == same[1] != same[2]
    record = json.loads((tmp_path / TINY.key / "recipe.json").read_text(encoding="utf-8"))
    assert set(record["models"]) == set(builtin.ROLES)
    assert recipe_from_dict(record["recipe"]) == TINY
    assert all(0.0 <= m["accuracy"] <= 1.0 and m["steps"] in (1, 2) for m in record["models"].values())


def test_the_same_recipe_gives_the_same_weights() -> None:
    settings = dataclasses.replace(TINY.senior, steps=3)
    first, second = (builtin.train(settings, STUDENT, TASKS, 4, lambda line: None)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_failed_worker_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = shutil.which("false")
    assert failing is not None
    monkeypatch.setattr(sys, "executable", failing)
    (tmp_path / ".making-left-over").mkdir()
    with pytest.raises(ModelError, match=r"pretrain=\[1, 1, 1\]: expected exit code 0 of every worker"):
        pretrain(tmp_path, recipe=TINY)
    assert [p.name for p in tmp_path.iterdir()] == ["pretrain.lock"]


def test_names_and_paths(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), tmp_path) == tmp_path
    with pytest.raises(ModelError, match="builtin:junior, builtin:senior, builtin:teacher"):
        resolve_model("builtin:elder", tmp_path)
    with pytest.raises(ModelError, match="a Hugging Face folder or builtin"):
        resolve_model(str(tmp_path / "none"), tmp_path)
