"""Distillation without labels, end to end: where there is no reward, the KL to each teacher is what is shown and decided on."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slime_tandem.cli import main
from slime_tandem.config import RunConfig
from slime_tandem.live.page import LivePage
from slime_tandem.local.run import train
from slime_tandem.report.comparison import suite_table, write_suite
from slime_tandem.report.console import final_table
from slime_tandem.report.progress import RunProgress
from slime_tandem.report.summary import Summary

from ..in_process import ThreadServer

OF_REWARDS = ("eval/solo_accuracy", "eval/tandem_accuracy", "eval/handoff_retention", "eval/reward_mean")


@pytest.fixture(scope="module")
def tree(trio: Any, side_url: Any, forked_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Settings of a run of two steps on prompts without labels, under two teachers."""
    folder = tmp_path_factory.mktemp("label-free")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"tell me of {i}"}) + "\n" for i in range(240)))
    with ThreadServer(trio.senior) as senior:
        urls = {"senior_url": senior.url, "junior_url": side_url("junior")}
        teachers = [{"name": name, "model": str(trio.teacher), "url": side_url("teacher")} for name in ("ant", "bee")]
        yield {
            "name": "free",
            "runs_dir": str(folder / "suite"),
            "tasks": [{"family": "jsonl", "path": str(folder / "prompts.jsonl")}],
            "models": {role: str(getattr(trio, role)) for role in ("senior", "junior")},
            "engine": {"cache_tokens": 4096, **urls},
            "sampling": {"max_new_tokens": 16},
            "objective": {"reward_coef": 0, "kl_coef": 0.1},
            "opd": {"teachers": teachers},
            "train": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "threads": 1},
            "eval": {"prompts": 12, "chains": 2},
        }


@pytest.fixture(scope="module")
def ran(tree: Any) -> tuple[Path, Summary, str]:
    """(the run's folder, what came of it, what the screen said)."""
    config = RunConfig.from_mapping(tree)
    screen = Console(file=io.StringIO(), width=200)
    with RunProgress(console=screen) as progress:
        summary = train(config, progress=progress)
    return config.run_dir, summary, screen.file.getvalue()  # type: ignore[attr-defined]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_not_there_is_null_and_nothing_failed(ran: Any) -> None:
    folder, _, _ = ran
    for row in rows(folder / "metrics.jsonl"):
        of_rewards = {n: v for n, v in row.items() if n.startswith(("rollout/reward_", "rollout/accuracy", "group/"))}
        assert set(of_rewards.values()) == {None}, of_rewards
        assert row["reward/failed_samples"] == 0
        assert row["opd/teacher_kl"] is not None
        assert row["train/kl"] is not None, "the KL to the start is no reward's"
        assert row["train/entropy"] > 0
    for row in rows(folder / "eval.jsonl"):
        assert [row[name] for name in OF_REWARDS] == [None] * 4
        assert set(row["right"]["eval/solo_accuracy"]) == {None}
        assert row["eval/reward_failed_samples"] == 0
        whole, by_name = row["teachers"]["all"], row["teachers"]["by_name"]
        assert sum(whole["kl_sums"]) / sum(whole["tokens"]) == pytest.approx(row["eval/teacher_kl"])
        assert by_name["ant"] == by_name["bee"], "one model under two names"
        assert by_name["ant"]["kl_sums"] == pytest.approx(whole["kl_sums"])
        assert whole["coverage"] == pytest.approx(row["eval/coverage"])
    assert (folder / "rewards.jsonl").read_bytes() == b""
    assert {row["reward"] for row in rows(folder / "transcripts.jsonl")} == {None}


def test_the_verdict_is_the_teachers(ran: Any) -> None:
    folder, summary, _ = ran
    verdict, (before, after) = summary["verdict"], rows(folder / "eval.jsonl")
    assert verdict["metric"] == "eval/teacher_kl"
    assert (verdict["before"], verdict["after"]) == (before["eval/teacher_kl"], after["eval/teacher_kl"])
    assert verdict["low"] <= verdict["after"] - verdict["before"] <= verdict["high"]
    assert verdict["paired"]
    assert verdict["learned"] is (verdict["high"] < 0)
    assert "KL to the teachers on 12 held-out prompts" in verdict["text"]
    assert set(summary["run"]["teachers"]) == {"ant", "bee"}


def without_rewards(text: str) -> None:
    for word in ("accuracy", "reward", "retention", "0.000 → 0.000"):
        assert word not in text.lower(), text


def test_the_screen_shows_neither_reward_nor_accuracy(ran: Any) -> None:
    _, summary, said = ran
    without_rewards(said.replace("reward_coef", "").split("evaluation before training")[1])
    assert "run 2/2  KL " in said
    out = Console(file=io.StringIO(), width=100)
    out.print(final_table(summary))
    table = out.file.getvalue()  # type: ignore[attr-defined]
    without_rewards(table)
    for word in ("teacher KL (nats)", "  ant", "  bee"):
        assert word in table


def test_the_report_and_the_live_page_show_neither(ran: Any) -> None:
    folder, _, _ = ran
    live = LivePage(folder)
    live.refresh()
    for page in ((folder / "report.html").read_text(), live.whole("x")):
        shown = page.split("<main", 1)[1].split('id="h-config"')[0]
        without_rewards(shown)
        for word in ("Teacher KL: ant", "Teacher KL: bee", "Did it learn?"):
            assert word in shown
        assert "✗ wrong" not in page


def test_the_suite_compares_the_kl_to_each_teacher(ran: Any) -> None:
    folder, _, _ = ran
    suite_folder = folder.parent
    (suite_folder / "method_mapping.csv").write_text("idx,method,mask,ratio,seed,run\n1,pure_opd,full,1,0,free\n")
    suite = write_suite(suite_folder)
    assert [name for name in suite.metrics if "kl" in name] == [
        "eval/teacher_kl", "eval/teacher_kl/ant", "eval/teacher_kl/bee",
    ]  # fmt: skip
    assert not set(OF_REWARDS) & set(suite.metrics)
    out = Console(file=io.StringIO(), width=120)
    out.print(suite_table(suite))
    for text in (out.file.getvalue(), (suite_folder / "suite.html").read_text()):  # type: ignore[attr-defined]
        assert "KL to the teacher ant (nats)" in text
        without_rewards(text.split("<body")[-1])


def test_the_doctor_and_eval_know_it_too(tree: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig.from_mapping({**tree, "runs_dir": str(tmp_path)})
    (tmp_path / "free.yaml").write_text(config.to_yaml())
    named = ("--config", str(tmp_path / "free.yaml"))
    assert main(["doctor", *named, "--length-updates", "0", "--json"]) == 0
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert found["reward signal"]["status"] == "skip"
    assert found["reward signal"]["detail"].endswith("4 of 4 responses have none")
    assert "; KL to the teachers " in found["teacher scores"]["detail"]
    assert "(ant " in found["teacher scores"]["detail"]
    out = tmp_path / "eval.json"
    assert main(["eval", *named, "--output", str(out), "--plot", str(tmp_path / "eval.svg")]) == 0
    written = json.loads(out.read_text())
    results = written["results"]
    assert results["teacher/ant/k1"] == results["teacher/bee/k1"]
    assert results["teacher/k1"]["low"] <= results["teacher/k1"]["value"] <= results["teacher/k1"]["high"]
    assert not [name for name in results if "pass@" in name or "transfer" in name or "retention" in name]
    assert any("KL to the teachers is the evaluation" in note for note in written["notes"])
    said = capsys.readouterr().out
    assert "KL(senior || ant), k1" in said
    assert "pass@" not in said
    assert "pass@" not in (tmp_path / "eval.svg").read_text()
