import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slime_tandem.config import RunConfig
from slime_tandem.errors import RunDirError
from slime_tandem.report.console import final_table
from slime_tandem.report.metrics import row_keys
from slime_tandem.report.statistics import difference_interval, paired_interval
from slime_tandem.report.summary import RunFiles, checked_row, summarise, summary_of, write_summary


def test_a_finished_run_by_hand(make_run):
    s = summarise(make_run(steps=4))
    assert s["complete"] is True
    assert s["run"]["label"] == "tandem + teacher"
    assert s["run"]["before"]["eval/tandem_accuracy"] == 0.25
    assert s["run"]["after"]["eval/tandem_accuracy"] == 0.55
    assert s["run"]["after"]["eval/handoff_retention"] is None
    # Rollouts took 1, 2, 3, 4 s; whole steps 4, 5, 6, 7 s: 5.5 - (2.5 + 0.5 + 2 + 0.25) = 0.25 s are left.
    assert s["run"]["seconds"] == {
        "rollout": 2.5, "scoring": 0.5, "training": 2.0, "sync": 0.25, "other": 0.25, "step": 5.5
    }  # fmt: skip
    assert s["run"]["retries"] == 4
    assert s["control"] is not None
    assert s["control"]["after"]["eval/tandem_accuracy"] == 0.35
    # n = 100: p = 26/102, q = 56/102, both plus one of two; half width 1.96 * sqrt((.18993 + .24760) / 102).
    assert s["verdict"]["low"] == pytest.approx(0.16575, abs=1e-5)
    assert s["verdict"]["high"] == pytest.approx(0.42248, abs=1e-5)
    assert s["verdict"]["learned"] is True
    assert s["verdict"]["text"].startswith(
        "Yes: tandem accuracy on 100 held-out prompts rose from 0.250 to 0.550 (+0.300"
    )


def test_a_run_killed_in_the_middle(make_run):
    run_dir = make_run(steps=4, control=False, finished=False)
    path = run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    s = summarise(run_dir)
    assert s["complete"] is False
    assert s["run"]["steps"] == 3
    assert s["run"]["after"] is None
    assert s["control"] is None
    assert s["verdict"]["learned"] is None
    assert s["verdict"]["text"] == "Not known: 3 of 4 steps done, no evaluation after training."


def test_rows_that_are_lost_before_an_evaluation_are_missed(make_run):
    path = make_run(steps=4, control=False) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for kept, lost in (([], 0), (lines[:2], 2), (lines[1:], 0)):
        path.write_text("".join(kept))
        with pytest.raises(
            RunDirError, match=rf"metrics\.jsonl='no row of step {lost}': expected a row of each of the 4 steps"
        ):
            summarise(path.parent)
    path.unlink()
    with pytest.raises(RunDirError, match="no row of step 0"):
        summarise(path.parent)


def test_an_evaluation_after_any_number_of_steps_takes_no_memory_for_each(make_run):
    """A changed digit: once a list of all lost steps was made, of 10^18 of them."""
    path = make_run(steps=4, control=False) / "eval.jsonl"
    row = {**json.loads(path.read_text().splitlines()[-1]), "step": 10**18}
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    with pytest.raises(RunDirError, match=r"no row of step 4.*each of the 1000000000000000000 steps"):
        summarise(path.parent)


def test_a_run_killed_before_its_first_step(make_run):
    run_dir = make_run(steps=4, control=False, finished=False)
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "eval.jsonl").unlink()
    s = summarise(run_dir)
    assert s["run"]["steps"] == 0
    assert s["run"]["seconds"]["step"] is None
    assert "no evaluation before" in s["verdict"]["text"]


def test_a_run_of_an_earlier_version_has_null_for_later_metrics(make_run):
    run_dir = make_run(steps=4, control=False)
    whole = summarise(run_dir)

    def without(name: str, left_out: Callable[[str], bool]) -> None:
        rows = map(json.loads, (run_dir / name).read_text().splitlines())
        kept = [{key: value for key, value in row.items() if not left_out(key)} for row in rows]
        (run_dir / name).write_text("".join(json.dumps(row) + "\n" for row in kept))

    without("metrics.jsonl", lambda key: key.startswith(("opd/eos", "selection/")))
    without("eval.jsonl", lambda key: key == "right")
    assert summarise(run_dir)["run"]["steps"] == whole["run"]["steps"]
    without("metrics.jsonl", lambda key: key == "time/step_s")
    with pytest.raises(RunDirError, match=r"time/step_s='missing'"):
        summarise(run_dir)


def test_an_after_that_later_steps_follow_does_not_count(make_run):
    run_dir = make_run(steps=4, control=False)
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**last, "step": 5}) + "\n")
    assert summarise(run_dir)["run"]["after"] is None


@pytest.mark.parametrize("name", [".", "nowhere", "demo/metrics.jsonl"])
def test_a_folder_that_is_no_run(make_run, name):
    folder = make_run(steps=1).parent
    with pytest.raises(RunDirError, match="expected a folder that `slime-tandem train` wrote"):
        summarise(folder / name)


def test_summary_json_is_the_summary(make_run):
    run_dir = make_run(steps=2)
    summary = write_summary(run_dir)
    assert json.loads((run_dir / "summary.json").read_text()) == summary == summarise(run_dir)


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (1.0, 1.0), (0.4, 0.4)])
def test_no_change_is_never_shown_as_learning(before, after):
    low, high = difference_interval(before, after, 50)
    assert low < 0 < high
    assert low == pytest.approx(-high)


def lines_of(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_final_table_fits_80_columns_and_shows_both_runs(make_run):
    console = Console(file=io.StringIO(), width=80)
    console.print(final_table(summarise(make_run())))
    lines = lines_of(console)
    assert max(map(len, lines)) <= 80
    (tandem,) = (line for line in lines if "│ tandem accuracy  " in line)
    assert "0.250 → 0.550" in tandem
    assert "0.250 → 0.350" in tandem
    (retention,) = (line for line in lines if "handoff retention" in line)
    assert "– → –" in retention
    (scoring,) = (line for line in lines if "scoring" in line)
    assert "0.50" in scoring


def test_the_final_table_of_a_killed_run(make_run):
    console = Console(file=io.StringIO(), width=80)
    console.print(final_table(summarise(make_run(control=False, finished=False))))
    assert "0.250 → –" in "\n".join(lines_of(console))
    assert "Not known" in "\n".join(lines_of(console))


def with_right(run_dir, arm, when, shares):
    """Say in eval.jsonl which prompts were right."""
    path = run_dir / arm / "eval.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["phase"] == when:
            row["right"] = {"eval/tandem_accuracy": shares}
            row["eval/tandem_accuracy"] = sum(s for s in shares if s is not None) / len(shares)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_verdict_is_paired_by_prompt_and_names_the_control(make_run):
    run_dir = make_run()
    half = [1.0] * 50 + [0.0] * 50
    with_right(run_dir, "", "before", half)
    with_right(run_dir, "", "after", [1.0] * 60 + [0.0] * 40)
    with_right(run_dir, "control", "after", [1.0] * 90 + [0.0] * 10)
    verdict = summarise(run_dir)["verdict"]
    assert (verdict["low"], verdict["high"]) == paired_interval([0.0] * 50 + [1.0] * 10 + [0.0] * 40)
    assert verdict["paired"] is True
    assert "(+0.100, 95% interval +0.034 to +0.162, paired by prompt)" in verdict["text"]
    control = verdict["control"]
    assert (control["run"], control["control"], control["better"]) == (0.6, 0.9, "solo control")
    assert control["text"].startswith("The solo control did better: tandem accuracy 0.600 against 0.900 (-0.300, 95% ")
    assert (control["low"], control["high"]) == paired_interval([0.0] * 60 + [-1.0] * 30 + [0.0] * 10)
    with_right(run_dir, "control", "after", [1.0] * 30 + [0.0] * 70)
    assert summarise(run_dir)["verdict"]["control"]["text"].startswith("It did better than the solo control: ")
    with_right(run_dir, "control", "after", [1.0] * 59 + [0.0] * 41)
    assert summarise(run_dir)["verdict"]["control"]["better"] is None
    assert "No difference to the solo control is shown" in summarise(run_dir)["verdict"]["control"]["text"]


def test_prompts_without_a_response_are_in_no_pair(make_run):
    run_dir = make_run(control=False)
    with_right(run_dir, "", "before", [None, *[0.0] * 99])
    with_right(run_dir, "", "after", [1.0, None, *[1.0] * 98])
    verdict = summarise(run_dir)["verdict"]
    assert (verdict["low"], verdict["high"]) == paired_interval([1.0] * 98)
    assert verdict["control"] is None


def test_an_older_run_without_them_is_said_not_to_be_paired(make_run):
    verdict = summarise(make_run())["verdict"]
    assert verdict["paired"] is False
    assert verdict["text"].endswith(", not paired).")
    assert verdict["control"]["text"].startswith(
        "It did better than the solo control: tandem accuracy 0.550 against 0.350"
    )


@pytest.mark.parametrize("wrong", [[1.0], {"eval/tandem_accuracy": 1}, {"eval/tandem_accuracy": [2.0]}, None])
def test_shares_that_are_none_are_refused(make_run, wrong):
    run_dir = make_run(control=False)
    row = json.loads((run_dir / "eval.jsonl").read_text().splitlines()[-1])
    (run_dir / "eval.jsonl").write_text(json.dumps({**row, "right": wrong}) + "\n")
    with pytest.raises(RunDirError, match="expected by metric a list of numbers"):
        summarise(run_dir)


def evaluated(phase: str, step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "phase": phase, **dict.fromkeys(row_keys("eval")), **values}


def of(before: dict[str, Any], after: dict[str, Any]) -> Any:
    steps = [{"step": i, **dict.fromkeys(row_keys("step"))} for i in range(2)]
    config = RunConfig.from_mapping({"train": {"steps": 2}, "eval": {"prompts": 3}})
    rows = (evaluated("before", 0, **before), evaluated("after", 2, **after))
    return summary_of(config, RunFiles(steps, rows), None)["verdict"]


def kl(sums: list[float], tokens: list[int]) -> dict[str, Any]:
    figures = {"kl_sums": sums, "tokens": tokens, "coverage": 1.0}
    value = sum(sums) / sum(tokens) if sum(tokens) else None
    return {"eval/teacher_kl": value, "teachers": {"all": figures, "by_name": {"t": figures}}}


def test_the_verdict_without_a_reward_by_hand() -> None:
    """Every prompt's KL halves: so does each resample's, and the interval lies between the smallest and the largest of them."""
    better = of(kl([2.0, 4.0, 6.0], [10, 10, 10]), kl([1.0, 2.0, 3.0], [10, 10, 10]))
    assert better["text"].startswith(
        "Yes: KL to the teacher on 3 held-out prompts fell from 0.400 to 0.200 (-0.200, 95% interval"
    )
    assert -0.3 <= better["low"] <= -0.2 <= better["high"] <= -0.1
    assert (better["learned"], better["metric"], better["paired"]) == (True, "eval/teacher_kl", True)
    worse = of(kl([1.0, 2.0, 3.0], [10, 10, 10]), kl([2.0, 4.0, 6.0], [10, 10, 10]))
    assert worse["text"].startswith("No, it got worse: KL to the teacher")
    assert worse["learned"] is False
    mixed = of(kl([1.0, 2.0, 3.0], [10, 10, 10]), kl([3.0, 2.0, 1.0], [10, 10, 10]))
    assert mixed["text"].startswith("Not shown: KL to the teacher on 3 held-out prompts stayed at 0.200")
    no_row = of(kl([1.0], [1]) | {"teachers": {}}, kl([1.0], [2]) | {"teachers": {}})
    assert no_row["learned"] is None
    assert "no interval: the rows do not have it prompt by prompt" in no_row["text"]
    nothing = of(kl([0.0], [0]), kl([0.0], [0]))
    assert (nothing["before"], nothing["learned"]) == (None, None)


def test_the_verdict_by_own_rewards_by_hand() -> None:
    """Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt 3, Student's t of two degrees of freedom 4.303."""
    before = {"eval/solo_accuracy": 0.0, "eval/reward_mean": 0.2, "rewards": [0.1, 0.2, 0.3]}
    after = {"eval/solo_accuracy": 0.0, "eval/reward_mean": 0.4, "rewards": [0.2, 0.4, 0.6]}
    verdict = of(before, after)
    assert verdict["metric"] == "eval/reward_mean"
    assert verdict["low"] == pytest.approx(0.2 - 4.303 * 0.1 / 3**0.5, abs=1e-3)
    assert verdict["text"].startswith("Not shown: reward on 3 held-out prompts rose from 0.200 to 0.400")
    assert "no interval: fewer than two prompts" in of(before, {**after, "rewards": [0.2, None, None]})["text"]
    accuracy = {"eval/tandem_accuracy": 0.0}
    old = {k: v for k, v in before.items() if k != "rewards"}
    assert of(old | accuracy, after | accuracy)["metric"] == "eval/tandem_accuracy", "a row of an earlier version"


def test_damaged_figures_of_teachers_are_refused(tmp_path: Path) -> None:
    good = evaluated("before", 0, **kl([1.0], [2]), **{"eval/solo_accuracy": None})
    assert checked_row(tmp_path, "eval", good)
    for broken in (
        {},
        {"all": {}, "by_name": {}},
        {"all": {"kl_sums": [1.0], "tokens": [], "coverage": 1}, "by_name": {}},
        "x",
    ):
        with pytest.raises(RunDirError, match=r"teachers=.*what the KL to `all` teachers"):
            checked_row(tmp_path, "eval", {**good, "teachers": broken})
    with pytest.raises(RunDirError, match=r"rewards=.*a list of finite numbers or null"):
        checked_row(tmp_path, "eval", {**good, "rewards": ["a"]})
