"""The experiments' scripts: their plan, their machinery on models that have learnt nothing, their tables by hand."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..waiting import PATIENCE_S

REPO = Path(__file__).parents[2]
Script = Callable[[str], ModuleType]


@pytest.fixture
def questions(script: Script) -> ModuleType:
    return script("questions")


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_arm_is_a_configuration_that_holds(questions: ModuleType, tmp_path: Path) -> None:
    """Also that an arm sets what its name says, and the common settings are common."""
    from slime_tandem.config import RunConfig
    from slime_tandem.models.builtin import make_model
    from slime_tandem.models.tokenizer import ModelTokenizer
    from slime_tandem.rollout.boundaries import BoundaryRecord

    models = {role: tmp_path / role for role in ("senior", "junior", "teacher", "same")}
    # Of `sentence` alone the tokenizer is read.
    recipe = next(questions.cases(["a"], [1])).recipe("ci")
    make_model("senior", recipe, tmp_path, lambda text: None)
    found = {}
    for case in questions.cases(list(questions.QUESTIONS), [1]):
        config = RunConfig.from_mapping(case.settings(models, tmp_path, "toy"))
        assert config.name == case.name
        assert (config.eval.prompts, config.optimizer.lr, config.seed) == (256, 1e-3, 1)
        found[case.question, case.arm] = config
    assert len({c.name for c in found.values()}) == len(found) == 4 + 6 + 16 + 6
    c = found["c", "entropy 0.05"].opd.selection
    assert (c.selector, c.ratio, c.min_keep_per_sample, c.missing_mass) == ("entropy", 0.05, 0, "rest")
    assert found["b", "sampled, spans"].opd.alignment == "chain_rule"
    assert found["b", "top-K, same vocabulary"].models.teacher == str(tmp_path / "same")
    assert found["b", "GRPO"].opd.enabled is False
    assert found["b", "sampled"].objective.reward_coef == 0.0
    sentence = found["a", "sentence"]
    assert sentence.tandem.selection_strategy == "sentence"
    tokens = ModelTokenizer.load(tmp_path / "senior").tokens
    rule = BoundaryRecord.resolve(sentence.tandem, tokens).rule  # which refuses a tokenizer without such a token
    assert (rule.boundary, rule.cap) == (tokens.eos_ids, None), "one author an answer"
    assert found["a", "prob_senior 0.3"].opd.enabled is False
    assert found["d", "tandem + a random tenth"].opd.selection.selector == "random"
    assert found["d", "solo + a tenth"].tandem.enabled is False


def test_runs_are_made_in_the_protocols_order(questions: ModuleType) -> None:
    order = [(c.question, c.arm, c.seed) for c in questions.cases(["a", "b", "c", "d"], [1, 2])]
    assert [q for q, *_ in order] == ["c"] * 8 + ["b"] * 12 + ["a"] * 8 + ["d"] * 12 + ["c"] * 24
    assert order[4] == ("c", "teachability 0.05", 2), "seed 1 of all arms first"
    alone = [c.question for c in questions.cases(["c"], [1])]
    assert alone == ["c"] * 4 + ["b"] * 2 + ["c"] * 12, "what (c) is compared with comes along"


@pytest.mark.usefixtures("in_process")
def test_a_question_is_run_stopped_and_gone_on_with(
    questions: ModuleType,
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One arm of each kind, on models that have learnt nothing: lines, tables, and nothing done twice."""
    data, work = tmp_path / "data", tmp_path / "work"
    common = ("run", "--size", "ci", "--seeds", 1, "--out", data, "--work", work)
    call(questions, monkeypatch, *common, "--question", "b", "--arms", "sampled", "top-K, same vocabulary", "GRPO")
    call(questions, monkeypatch, *common, "--question", "d", "--arms", "tandem + a tenth")
    call(questions, monkeypatch, *common, "--question", "c", "--arms", "random 0.5", "GRPO")
    call(questions, monkeypatch, *common, "--question", "a", "--arms", "sentence")
    done = capsys.readouterr().out.count("done: ")
    assert done == 6
    call(questions, monkeypatch, *common, "--question", "b", "--arms", "sampled", "GRPO")
    assert "done" not in capsys.readouterr().out
    by_arm = {r["arm"]: r for name in "bcd" for r in rows(data / f"question_{name}.jsonl")}
    for line in by_arm.values():
        assert line["steps"] == 2
        assert len(line["right"]["solo"]) == 4
        assert line["solo_accuracy_after"] == line["right"]["solo"].count("1") / 4
    assert by_arm["random 0.5"]["selection/keep_ratio"] == pytest.approx(0.5, abs=0.02)
    assert by_arm["sampled"]["selection/keep_ratio"] == 1.0
    assert by_arm["GRPO"]["selection/keep_ratio"] is None
    assert len(by_arm["tandem + a tenth"]["right"]["tandem"]) == 4
    call(questions, monkeypatch, "table", "c", data)
    shown = capsys.readouterr().out
    assert "| random 0.5 | 1 |" in shown
    assert "| full | 1 |" in shown
    chains = script("eight_chains").evaluated(work / "runs" / "a-sentence-seed-1", 2, 2)
    assert set(script("eight_chains").SHOWN) - {"solo/pass@8", "handoff/pass@8"} < set(chains)
    assert "solo/pass@2" in chains
    assert "solo/pass@4" not in chains, "of two chains"
    counts = script("places").counted(work / "runs" / "a-sentence-seed-1", 2, 3)
    assert sum(answers for _, answers in counts.values()) == 6
    assert set("".join(counts)) <= set("01")


def line(arm: str, seed: int, right: str, **more: object) -> str:
    accuracy = right.count("1") / len(right)
    content = {"question": "b", "arm": arm, "seed": seed, "solo_accuracy_before": 0.0, "solo_accuracy_after": accuracy}
    return json.dumps({**content, "right": {"solo": right, "tandem": None}, **more}) + "\n"


def test_differences_by_hand(questions: ModuleType, tmp_path: Path) -> None:
    """Two seeds, four prompts: the arm is right once more, and twice more. t = 3 with one degree of freedom."""
    text = line("sampled", 1, "1000") + line("sampled", 2, "1000") + line("GRPO", 1, "1010") + line("GRPO", 2, "1011")
    text += line("top-K", 1, "1000") + line("top-K", 2, "0111")
    (tmp_path / "question_b.jsonl").write_text(text)
    ((_, who, found),) = questions.comparisons(tmp_path, "b")
    assert who == "solo"
    (grpo, p_grpo), (lists, p_lists) = found
    assert (grpo.arm, grpo.base, grpo.seeds, grpo.mean) == ("GRPO", "sampled", 2, 0.375)
    assert grpo.p == pytest.approx(2 * (0.5 - math.atan(3) / math.pi))
    half = 12.7062 * 0.125
    assert grpo.student == pytest.approx((0.375 - half, 0.375 + half), abs=1e-3)
    assert grpo.bootstrap.value == 0.375
    assert grpo.bootstrap.low is not None
    assert 0.0 <= grpo.bootstrap.low < 0.375
    assert lists.mean == 0.25
    assert (p_grpo, p_lists) == (pytest.approx(2 * grpo.p), pytest.approx(lists.p)) or p_grpo == p_lists
    assert "| GRPO less sampled | 2 | +0.375 |" in questions.table(tmp_path, "b")


def measured(arm: str, seed: int, solo: str, tandem: str, question: str | None = None) -> dict[str, Any]:
    """A line of measure.py: two tokens an answer, one of them text."""
    n = len(solo)
    content = {"question": question, "seed": seed, "arm": arm, "dose": 0.0, "right": {"solo": solo, "tandem": tandem}}
    accuracies = {"solo_accuracy_after": solo.count("1") / n, "tandem_accuracy_after": tandem.count("1") / n}
    sums = {"legibility": [-1.0 * seed] * n, "from_start": [0.5] * n, "from_junior": [0.25] * n}
    tokens = {"text_tokens": [1] * n, "tokens": [2] * n}
    return content | accuracies | sums | tokens | {"transfer": {"half": tandem, "alone": "0" * n}}


def test_arms_of_a_are_measured_alike(questions: ModuleType, tmp_path: Path) -> None:
    """Not by an arm's own rule, which its own lines have; in a fixed order; the trend by hand."""
    own = [line(a, s, "11", question="a") for a in ("chunk", "prob_senior 0.3") for s in (2, 1)]
    (tmp_path / "question_a.jsonl").write_text("".join(own))
    assert questions.lines_of(tmp_path, "a") == {}
    arms = [("chunk", "a", "01"), ("solo GRPO", None, "00"), ("prob_senior 0.7", "a", "00")]
    arms += [("prob_senior 0.3", "a", "11"), ("tandem alone", None, "01"), ("tandem + teacher", None, "11")]
    found = [measured(arm, seed, "11", tandem, question) for arm, question, tandem in arms for seed in (2, 1)]
    (tmp_path / "two_notations_measured.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    lines = questions.lines_of(tmp_path, "a")
    order = ["prob_senior 0.3", "prob_senior 0.5", "prob_senior 0.7", "chunk", "solo GRPO"]
    assert list(lines) == order
    assert all(list(by_seed) == [1, 2] for by_seed in lines.values())
    shown = questions.table(tmp_path, "a")
    assert [row.split(" | ")[0] for row in shown.splitlines()[2:7]] == [f"| {arm}" for arm in order]
    assert "| 0.500, 0.500; mean 0.500 | -0.500, -0.500; mean -0.500 |" in shown.splitlines()[3]
    # 3, 2, 1 in both seeds: one way of 36 is as high.
    assert shown.endswith("Page's trend test, 2 seeds: L = 28, p = 0.0278.")
    fresh = [measured("solo GRPO", seed, "11", "01", None) for seed in (6, 7)]
    (tmp_path / "two_notations_measured.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*found, *fresh]))
    assert questions.table(tmp_path, "a") == shown, "other seeds are asked for by name"
    assert list(questions.lines_of(tmp_path, "a", (6, 7))) == ["solo GRPO"]


def test_the_replication_of_the_trend_is_the_pages(questions: ModuleType) -> None:
    data = Path(questions.__file__).parents[2] / "docs" / "results" / "data" / "seeds_6_to_10"
    shown = questions.table(data, "a", (6, 7, 8, 9, 10))
    assert shown.endswith("Page's trend test, 5 seeds: L = 65, p = 0.0795.")
    page = (data.parents[1] / "question-a-tandem-against-solo.md").read_text(encoding="utf-8")
    cells = [" | ".join(row.split(" | ")[2:]) for row in shown.splitlines()[2:7]]
    assert all(row in page for row in cells)


def test_sentence_stands_beside_solo_grpo_without_a_test(questions: ModuleType, tmp_path: Path) -> None:
    """Its test is the one against words; what the protocol expects it to be like is shown."""
    arms = [("sentence", "a", "01"), ("solo GRPO", None, "00"), ("tandem alone", None, "11")]
    found = [measured(arm, seed, "11", tandem, question) for arm, question, tandem in arms for seed in (1, 2)]
    path = tmp_path / "two_notations_measured.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in found))
    shown = questions.table(tmp_path, "a").splitlines()
    (beside,) = (row for row in shown if row.startswith("| tandem: sentence less solo GRPO | 2 | +0.500 |"))
    assert beside.count("|") == 6, "no p"
    (tested,) = (row for row in shown if row.startswith("| sentence less prob_senior 0.5 | 2 | -0.500 |"))
    assert tested.count("|") == 8
    path.write_text("".join(json.dumps(r) + "\n" for r in found[2:]))
    assert "not tested" not in questions.table(tmp_path, "a")


def test_a_trend_with_ties_counts_them(questions: ModuleType) -> None:
    """Ranks 3, 2, 1 and 3, 1.5, 1.5: of 36 pairs of orders two reach 27.5; scipy cuts to 27, which five of 36 reach."""
    told = questions.falling([[0.3, 0.2, 0.1], [0.3, 0.2, 0.2]])
    assert told.endswith("L = 27.5, p = 0.1389; with its ties over all permutations p = 0.0556.")


def test_all_differences_of_a_question_are_corrected_together(questions: ModuleType, tmp_path: Path) -> None:
    """(d) has two accuracies of one question, and (c) a family for each share."""
    names = {q: {title for title, *_ in questions.families(q)} for q in "abcd"}
    assert {q: len(titles) for q, titles in names.items()} == {"a": 1, "b": 1, "c": 4, "d": 1}
    for arm, right in (("tandem", "10"), ("tandem + a random tenth", "11")):
        with (tmp_path / "question_d.jsonl").open("a") as file:
            for seed, tandem in ((1, right), (2, right[::-1]), (3, "10")):
                row = json.loads(line(arm, seed, right))
                file.write(json.dumps(row | {"right": {"solo": right, "tandem": tandem}}) + "\n")
    (_, _, ((tandem, p_tandem),)), (_, _, ((solo, p_solo),)) = questions.comparisons(tmp_path, "d")
    assert (solo.mean, solo.p, p_solo) == (0.5, 0.0, 0.0)
    assert p_tandem == tandem.p > 0.0, "the larger of two, not doubled as the smaller is"


def test_tables_of_two_notations_with_what_has_run(script: Script) -> None:
    """An arm that has not run is left out; both runs of a case stand side by side."""
    module = script("two_notations")

    def row(arm: str, seed: int, value: float) -> dict[str, Any]:
        metrics = {f"{m}_{when}": value for m in module.METRICS for when in ("before", "after")}
        return {"arm": arm, "seed": seed, "dose": 0.0, "other_notation": value / 2} | metrics

    first = [row(a, s, v) for a, v in (("tandem alone", 0.75), ("solo GRPO", 0.5)) for s in (2, 1)]
    shown = module.table(first)
    assert "| tandem alone less solo GRPO | +0.250" in shown
    assert "solo + teacher" not in shown
    again = [row("solo GRPO", 1, 0.625), row("tandem alone", 1, 0.625), row("solo + teacher", 1, 0.5)]
    both = module.beside(first, again).splitlines()
    assert both[2] == "| solo GRPO | 1 | 0.500 / 0.625 | 0.500 / 0.625 | 0.25 / 0.31 |"
    assert sum("tandem alone less solo GRPO" in row for row in both) == 2
    assert sum(row.startswith(("| solo GRPO | ", "| tandem alone | ")) for row in both) == 2


def test_the_table_of_measures_by_hand(script: Script) -> None:
    rows = [measured("solo GRPO", s, "1111", "0001") for s in (2, 1)]
    rows += [measured("tandem + teacher", s, "1110", "0111") for s in (1, 2)]
    for row in rows[2:]:
        row["legibility"] = [value + 0.5 for value in row["legibility"]]
    rows[3]["legibility"] = [value + 0.5 for value in rows[3]["legibility"]]
    shown = script("measure").table(rows).splitlines()
    assert shown[2].startswith("| tandem + teacher | 1, 2 | -0.500, -1.000; mean -0.750 | 0.250, 0.250; mean 0.250 |")
    (legible,) = (row for row in shown if row.startswith("| legibility: main job less control | 2 | +0.750 |"))
    # t = 3 with one degree of freedom; three tests, of which it is the only one with any spread.
    assert legible.endswith("| 0.205 | 0.410 |")
    (tandem,) = (row for row in shown if row.startswith("| tandem accuracy: main job less control | 2 | +0.500 |"))
    assert tandem.count("|") == 6, "not tested: no p"
    assert not any("notation" in row for row in shown), "not measured, not shown"
    notation = {"solo": 0.5, "tandem_senior": 0.25, "tandem_junior": None}
    with_shares = script("measure").table([row | {"notation": notation} for row in rows])
    assert with_shares.endswith("| solo GRPO | 0.500, 0.500; mean 0.500 | 0.250, 0.250; mean 0.250 |  |")


def test_other_juniors_have_a_table_of_their_own(script: Script) -> None:
    """Means over the seeds that every junior has; 0 % with these alone."""
    module = script("measure")
    notation = {"solo": 0.5, "tandem_senior": 0.25, "tandem_junior": None}
    main = [measured("tandem + teacher", s, "11", "01") | {"notation": notation} for s in (1, 2)]
    assert "junior, seeds" not in module.table(main), "there are no others"
    others = [{**measured("tandem + teacher", 1, "11", "11"), "notation": notation, "dose": d} for d in (0.05, None)]
    shown = module.table(main + others).splitlines()
    assert shown[-5].startswith("| junior, seeds 1 | arm | senior, alone |")
    assert shown[-3:] == [
        "| 0% | tandem + teacher | 0.50 | 0.25 | - | -1.000 | 0.500 | 0.500 |",
        "| 5% | tandem + teacher | 0.50 | 0.25 | - | -1.000 | 1.000 | 1.000 |",
        "| the start senior | tandem + teacher | 0.50 | 0.25 | - | -1.000 | 1.000 | 1.000 |",
    ]
    assert shown[2].startswith("| tandem + teacher | 1, 2 |"), "the other tables are of 0 % alone"
    both = [row | {"seed": s} for row in main[:1] + others[:1] for s in (1, 2)]
    control = [row | {"arm": "solo GRPO", "right": {"solo": "11", "tandem": "00"}} for row in both]
    told = module.table(both + control).splitlines()[-2:]
    assert told[0].startswith("| 0%: main job less control | 2 | +0.500 |")
    assert told[1].startswith("| 5%: main job less control | 2 | +1.000 |")


def test_figures_are_drawn_of_what_is_there(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, images = tmp_path / "data", tmp_path / "images"
    for folder in (data, images):
        folder.mkdir()
    figures = script("figures")
    assert list(figures.drawn(data, images)) == []
    text = "".join(
        line(a, s, r) for a, s, r in (("sampled", 1, "10"), ("sampled", 2, "00"), ("GRPO", 1, "11"), ("GRPO", 2, "01"))
    )
    (data / "question_b.jsonl").write_text(text)
    call(figures, monkeypatch, data, images)
    assert [p.name for p in images.iterdir()] == ["question-b.svg"]
    assert "GRPO less sampled" in (images / "question-b.svg").read_text()


def test_published_figures_are_those_of_the_published_lines(script: Script, tmp_path: Path) -> None:
    """Nobody edits a figure, or a line under it."""
    data, images = REPO / "docs" / "results" / "data", REPO / "docs" / "images"
    for path in script("figures").drawn(data, tmp_path):
        assert path.read_bytes() == (images / path.name).read_bytes(), f"draw {path.name} again"


NAMES = ("tandem_against_solo", "distillation", "chosen_tokens", "both_together")


def shell(name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(REPO / "scripts" / "experiments" / f"{name}.sh")],
        env={**os.environ, "DRY_RUN": "1", **variables},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_on_toys_prints_its_commands(name: str) -> None:
    done = shell(name, BACKEND="local", SIZE="ci", SEEDS="4 5", OUT="/somewhere", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    letter = "abcd"[NAMES.index(name)]
    assert f"questions.py run --question {letter} --size ci --seeds 4 5 --out /somewhere" in done.stdout
    assert f"questions.py table {letter} /somewhere" in done.stdout
    # (a) alone is measured by one rule, from what it is compared with.
    for script in ("two_notations.py run --doses 0 ", "measure.py run --doses 0 --seeds 4 5 "):
        assert (script in done.stdout) == (letter == "a")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SIZE": "huge"}, "SIZE=huge: expected toy or ci"),
        ({"BACKEND": "gpu"}, "BACKEND=gpu: expected local or slime"),
        ({"BACKEND": "slime"}, "STUDENT_HF=: expected the trainable student"),
        (
            {"BACKEND": "slime", "STUDENT_HF": "x", "TEACHER_MODEL": "x"},
            "SAME_TEACHER=: expected a teacher with the student's",
        ),
    ],
)
def test_what_is_missing_is_named(variables: dict[str, str], message: str) -> None:
    done = shell("distillation", **variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Remedy: " in done.stderr
