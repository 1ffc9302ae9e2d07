"""The comparison of a suite's methods: means and paired differences by hand, files whole, gaps named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages.browser import CONTRAST, OVERFLOW, Browser, Page

from slime_tandem import cli
from slime_tandem.config import RunConfig
from slime_tandem.errors import RunDirError
from slime_tandem.report import comparison
from slime_tandem.report.comparison import MAPPING, Mean, read_mapping, summarise_suite, write_suite
from slime_tandem.report.metrics import row_keys
from slime_tandem.report.run_folder import RunWriter

ACCURACY = {("pure_opd", 0): 0.5, ("pure_opd", 1): 0.75, ("tip", 0): 0.625, ("tip", 1): 1.0, ("<b>", 0): 0.25}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = ["idx,method,mask,ratio,seed,run"]
    for (method, seed), accuracy in ACCURACY.items():
        idx = {"pure_opd": 10, "tip": 20, "<b>": 30}[method]
        name = f"{idx}-seed{seed}"
        lines.append(f"{idx},{method},full,1,{seed},{name}")
        config = RunConfig.load(overrides=[f"name={name}", f"runs_dir={tmp_path}", "train.steps=1", "eval.prompts=8"])
        with RunWriter(config.run_dir, resume_step=None) as writer:
            writer.write_config(config)
            row = dict.fromkeys(row_keys("eval"))
            start = {"eval/solo_accuracy": 0.25 + 0.25 * seed, "eval/teacher_kl": 0.3 if method == "tip" else 0.4}
            writer.write_eval(0, "before", {**row, **start})
            step = {**dict.fromkeys(row_keys("step")), "selection/keep_ratio": 0.5, "time/step_s": 2.0}
            writer.write_step(0, {**step, "opd/failed_samples": 0.0, "engine/retries": 0.0})
            writer.write_eval(1, "after", {**row, "eval/solo_accuracy": accuracy, "eval/teacher_kl": 0.1})
    lines += ["40,random,random,0.1,0,040-random-0.1-seed0"]
    (tmp_path / "method_mapping.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_means_and_differences_by_hand(folder: Path) -> None:
    suite = summarise_suite(folder)
    first, tip, third, none = suite.methods
    accuracy = "eval/solo_accuracy"
    # Two seeds: t(1) = 12.706 times the standard error, 0.125.
    assert first.after[accuracy] == Mean(
        0.625, pytest.approx(0.625 - 1.58825, abs=1e-4), pytest.approx(2.21325, abs=1e-4), 2
    )
    assert first.difference[accuracy].n == 0
    # Paired: +0.125 and +0.25.
    assert tip.difference[accuracy].value == pytest.approx(0.1875)
    assert tip.difference[accuracy].high == pytest.approx(0.1875 + 12.706 * 0.0625, abs=1e-4)
    assert third.difference[accuracy] == Mean(-0.25, None, None, 1), "one seed: paired with its own, no interval"
    assert none.after[accuracy] == Mean(None, None, None, 0)
    assert suite.missing == ["040-random-0.1-seed0"]
    assert suite.metrics == [accuracy, "eval/teacher_kl"], "tandem accuracy exists in no run"
    assert suite.before[accuracy] == pytest.approx((0.25 + 0.5) / 2)
    assert suite.before["eval/teacher_kl"] is None, "no start that all share"
    assert (first.keep_ratio, first.step_seconds, first.steps) == (0.5, 2.0, 1)


def test_equal_seeds_have_an_interval_of_no_width() -> None:
    assert Mean.of([0.5, 0.5, 0.5]) == Mean(0.5, 0.5, 0.5, 3)
    assert Mean.of([]) == Mean(None, None, None, 0)
    assert Mean.of([0.0, 1.0] * 40).low == pytest.approx(0.5 - 1.99045 * 0.5031546 / 80**0.5, abs=1e-4)


def test_report_of_a_suite_prints_and_writes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "tip 1" in out
    assert "+0.188" in out
    tree = json.loads((folder / "suite.json").read_text())
    assert tree["methods"][1]["difference"]["eval/solo_accuracy"]["value"] == pytest.approx(0.1875)
    assert "not finished: 040-random-0.1-seed0" in tree["caption"]
    page = (folder / "suite.html").read_text()
    assert "&lt;b&gt; 1" in page
    assert "<b> 1" not in page
    assert not list(folder.glob("*.new"))


def test_what_is_no_suite_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"expected a readable method_mapping\.csv"):
        read_mapping(tmp_path / "nothing")
    (folder / "method_mapping.csv").write_text("idx,method\n1,tip\n")
    with pytest.raises(RunDirError, match="expected the columns idx, method, mask, ratio, seed, run"):
        write_suite(folder)
    (folder / "method_mapping.csv").write_text("idx,method,mask,ratio,seed,run\n1,tip,tip,0.1,0,x\n")
    with pytest.raises(RunDirError, match="expected at least one finished run"):
        write_suite(folder)
    for seed, run in (("zero", "x"), ("0", "../x"), ("0", "..")):
        (folder / "method_mapping.csv").write_text(f"idx,method,mask,ratio,seed,run\n1,tip,tip,0.1,{seed},{run}\n")
        with pytest.raises(RunDirError, match="restore the file"):
            write_suite(folder)
    assert not (folder / "suite.json").exists()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_suites_page_in_a_browser(folder: Path, browser: Browser, width: int, dark: bool) -> None:
    """In the report's style: dark where asked for, whole on a phone, and no name of a method is obeyed."""
    evil = "<svg/onload=alert(1)><script>alert(2)</script>" + "w" * 120
    mapping = (folder / MAPPING).read_text()
    (folder / MAPPING).write_text(mapping.replace("<b>", evil))
    write_suite(folder)

    async def use(page: Page) -> tuple[object, ...]:
        return (
            await page.run(OVERFLOW),
            [poor for poor in await page.run(CONTRAST) if poor["ratio"] < 4.5],
            await page.run("[document.scripts.length, document.querySelectorAll('.methods .strip circle').length]"),
            await page.run("getComputedStyle(document.body).backgroundColor"),
            page.problems,
        )

    inner, poor, drawn, background, problems = browser.visit(folder / "suite.html", use, width=width, dark=dark)
    assert inner == [width, width]
    assert poor == []
    assert drawn == [0, 6]
    assert (background == "rgb(17, 20, 23)") == dark
    assert problems == []


def test_a_difference_is_coloured_where_its_interval_shows_one(tmp_path: Path) -> None:
    up, none = Mean(0.1, 0.05, 0.15, 3), Mean(0.1, -0.05, 0.25, 3)
    assert comparison._shown_better(up, "up") is True
    assert comparison._shown_better(up, "down") is False
    assert comparison._shown_better(none, "up") is None
    assert comparison._shown_better(Mean(0.1, None, None, 1), "up") is None
    assert comparison._text(Mean(-0.0001, None, None, 1), signed=True) == "0.000"
