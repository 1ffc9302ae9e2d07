"""Jobs of one and two cards: side servers in the plan, in the shell's text, and within the card's memory."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.cli import main
from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError
from slime_tandem.slime_launch.cards import CARDS, settings_of
from slime_tandem.slime_launch.plan import launch_plan


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [{"role": "user", "content": "1 + 1 ="}], "label": "2"}\n' * 20)
    return RunConfig.load(
        overrides=[
            f"tasks=[{{family: jsonl, path: {prompts}}}]", "models.senior=qwen3-1.7B", "models.junior=qwen3-0.6B",
            *([] if any("opd.teachers" in o for o in overrides) else ["models.teacher=llama3.2-3B"]),
            "cluster.gpus_per_node=1", "cluster.gpu_memory_gib=139.8", "cluster.mem_fraction=0.3",
            "cluster.side_servers=true", "train.prompts_per_step=4", *overrides,
        ]
    )  # fmt: skip


def test_one_card_is_planned_with_everyone_on_it(tmp_path: Path) -> None:
    made = launch_plan(config(tmp_path), tmp_path / "launch")
    assert [(s.name, s.url, s.gpu) for s in made.sides] == [
        ("junior", "http://127.0.0.1:30100", 0),
        ("teacher", "http://127.0.0.1:30101", 0),
    ]
    assert [g.name for g in made.layout.groups] == ["actor"]
    assert list(made.urls) == [s.url for s in made.sides], "the job waits for them"
    text = made.files[tmp_path / "launch" / "tandem.yaml"]
    assert "junior_url: http://127.0.0.1:30100" in text
    assert "teacher_url: http://127.0.0.1:30101" in text
    # 0.12 of 139.8 GiB each, 2 in reserve, and 12 bytes for each logit of 1,024 positions: 1.74 and 1.47 GiB.
    by_hand = 2 * (0.12 * 139.8 + 2) + (151936 + 128256) * 12 * 1024 / 2**30
    assert f"that GPU: side servers {by_hand:.1f}, trainer " in "\n".join(made.notes)
    assert made.environment["SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK"] == "1"


def test_the_fused_engine_leaves_the_teacher_beside(tmp_path: Path) -> None:
    made = launch_plan(config(tmp_path, "engine.mode=fused"), tmp_path / "launch")
    assert [s.name for s in made.sides] == ["teacher"]
    named = config(tmp_path, "engine.mode=fused", "opd.teachers=[{name: big, model: llama3.2-3B, tp: 1}]")
    made = launch_plan(named, tmp_path / "launch")
    assert [(s.name, s.url) for s in made.sides] == [("big", "http://127.0.0.1:30100")]
    assert "url: http://127.0.0.1:30100" in made.files[tmp_path / "launch" / "tandem.yaml"]


@pytest.mark.parametrize(
    ("overrides", "trains", "writes"),
    [
        (["cluster.gpus_per_node=2"], True, True),
        (["cluster.gpus_per_node=2", "cluster.trainer_gpus=1", "cluster.senior_gpus=1"], False, False),
        (["cluster.gpus_per_node=2", "cluster.colocate=false", "cluster.trainer_gpus=1"], False, True),
    ],
)
def test_two_cards_share_the_last_one(tmp_path: Path, overrides: list[str], trains: bool, writes: bool) -> None:
    made = launch_plan(config(tmp_path, *overrides), tmp_path / "launch")
    assert {s.gpu for s in made.sides} == {1}
    (line,) = [note for note in made.notes if note.startswith("that GPU: ")]
    assert ("trainer 0.0" not in line) == trains
    assert ("senior 0.0" not in line) == writes


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("cluster.gpu_memory_gib=60", "memory of the shared GPU|KV cache of"),
        ("cluster.side_fraction=0.01", "KV cache of (junior|teacher)"),
        ("cluster.mem_fraction=0.8", "memory of the shared GPU"),
    ],
)
def test_what_does_not_fit_on_the_card_is_refused(tmp_path: Path, override: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        launch_plan(config(tmp_path, override), tmp_path / "launch")


def test_several_machines_are_refused_and_no_count_is_below_zero(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="side_servers"):
        launch_plan(config(tmp_path, "cluster.nodes=2"), tmp_path / "launch")
    with pytest.raises(ConfigError, match="0 are left") as error:
        launch_plan(config(tmp_path, "cluster.side_servers=false"), tmp_path / "launch")
    assert " -" not in str(error.value)


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("mode", ["two_servers", "fused"])
def test_every_size_makes_a_plan_that_fits(tmp_path: Path, cards: int, mode: str) -> None:
    made = launch_plan(config(tmp_path, f"engine.mode={mode}", *settings_of(cards)), tmp_path / "launch")
    assert made.layout.gpus_per_node == cards
    assert bool(made.sides) == (cards <= 2)
    assert not any(note.startswith("idle") for note in made.notes)
    with pytest.raises(ConfigError, match="--size=3: expected one of 1, 2, 4, 8"):
        settings_of(3)


def test_a_size_stands_above_the_file_and_below_what_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(config(tmp_path, "cluster.gpus_per_node=8", "cluster.side_servers=false").to_yaml())
    command = ["config", "--check", str(file), "--slime", str(tmp_path / "out"), "--size", "1"]
    assert main([*command, "--set", "cluster.side_port=31000"]) == 0
    said = capsys.readouterr().out
    assert "# 1 x 1 GPUs; the trainer has GPU 0" in said
    assert "SERVER_URLS=(http://127.0.0.1:31000 http://127.0.0.1:31001)" in said


def test_an_engine_that_compiles_is_not_taken_for_dead_and_a_dead_one_is_found_in_a_short_rollout(
    tmp_path: Path,
) -> None:
    def planned(*extra: str) -> Any:
        return launch_plan(config(tmp_path), tmp_path / "launch", extra)

    timeout, wait, limit = (
        "--rollout-health-check-timeout",
        "--rollout-health-check-first-wait",
        "SGLANG_HEALTH_CHECK_TIMEOUT",
    )
    assert timeout not in planned().flags
    assert limit not in planned().environment
    told = planned("--use-fault-tolerance")
    assert told.flags[told.flags.index(timeout) + 1] == told.environment[limit] == "120"
    assert wait not in told.flags, "slime waits that long in every rollout, before it looks"
    own = planned("--use-fault-tolerance", timeout, "59.5", wait, "1")
    assert own.flags.count(timeout) == 1
    assert own.environment[limit] == "60", "SGLang gives up no earlier than slime"
    for bad in ([timeout, "30"], [timeout, "30", wait, "20"], [wait, "soon"], [timeout, "long"]):
        with pytest.raises(ConfigError, match="--rollout-health-check-"):
            planned("--use-fault-tolerance", *bad)


def test_the_text_for_a_shell_starts_each_with_the_jobs_python(tmp_path: Path) -> None:
    text = launch_plan(config(tmp_path), tmp_path / "launch").shell()
    script = f"{text}\nstart() {{ echo \"$@\"; }}\nSLIME_PYTHON='/my python' side_servers"
    said = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[:2] for line in said] == [
        ["junior", "http://127.0.0.1:30100/health"],
        ["teacher", "http://127.0.0.1:30101/health"],
    ]
    assert all("CUDA_VISIBLE_DEVICES=0 /my python -m sglang.launch_server --model-path" in line for line in said)
