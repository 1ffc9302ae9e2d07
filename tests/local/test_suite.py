"""Suites: what a method list means, what is resumed, what is refused before anything runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from slime_tandem import cli
from slime_tandem.config import RunConfig, Selector
from slime_tandem.errors import ConfigError, RunDirError
from slime_tandem.local import run as run_module
from slime_tandem.local.suite import Suite, parse_methods, parse_seeds, run_suite
from slime_tandem.report.comparison import read_mapping
from slime_tandem.report.metrics import row_keys
from slime_tandem.report.run_folder import RunWriter
from slime_tandem.strategies import STRATEGIES

REPO = Path(__file__).parents[2]
METHODS = "pure_opd:1.0:10 teachability:0.10:20 tip:0.10:30"


def suite(folder: Path, methods: str = METHODS, seeds: str = "0 1", *overrides: str) -> Suite:
    return Suite(folder, parse_methods(methods), parse_seeds(seeds), None, ("objective.reward_coef=0", *overrides))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of runs that were started; each leaves a finished run without a step."""
    names: list[str] = []

    def train(config: RunConfig, *, resume: bool) -> None:
        assert resume
        names.append(config.name)
        with RunWriter(config.run_dir, resume_step=None if not config.run_dir.exists() else 0) as writer:
            writer.write_config(config)
            writer.write_eval(0, "before", dict.fromkeys(row_keys("eval")))
            if len(names) == 4:
                raise KeyboardInterrupt
            writer.write_eval(0, "after", dict.fromkeys(row_keys("eval")))

    monkeypatch.setattr(run_module, "train", train)
    return names


def test_a_half_done_suite_goes_on_where_it_stopped(tmp_path: Path, trained: list[str]) -> None:
    folder = tmp_path / "suite"
    steps = "train.steps=0"
    with pytest.raises(KeyboardInterrupt):
        run_suite(suite(folder, METHODS, "0 1", steps), say=lambda line: None)
    first = ["010-pure_opd-1-seed0", "020-teachability-0.1-seed0", "030-tip-0.1-seed0", "010-pure_opd-1-seed1"]
    assert trained == first, "seed by seed, so that what there is can be compared"
    said: list[str] = []
    run_suite(suite(folder, METHODS, "0 1", steps), say=said.append)
    assert trained[4:] == ["010-pure_opd-1-seed1", "020-teachability-0.1-seed1", "030-tip-0.1-seed1"]
    assert [line.rsplit(": ")[1] for line in said] == ["finished", "finished", "finished", "half", "new", "new"]
    rows = read_mapping(folder)
    assert [(r["idx"], r["method"], r["mask"], r["ratio"], r["seed"]) for r in rows][:3] == [
        ("10", "pure_opd", "full", "1", "0"),
        ("10", "pure_opd", "full", "1", "1"),
        ("20", "teachability", "dlearn_high", "0.1", "0"),
    ]
    run_suite(suite(folder, "random:0.1:40", "0", steps), say=lambda line: None)
    assert len(read_mapping(folder)) == 7, "a method more, the others stay"
    with pytest.raises(RunDirError, match=r"entropy:0.1:40'?: expected random:0.1:40, as in"):
        run_suite(suite(folder, "entropy:0.1:40", "0", steps))
    with pytest.raises(RunDirError, match=r"optimizer\.lr=0\.5: expected 0\.001, as in"):
        run_suite(suite(folder, METHODS, "0", steps, "optimizer.lr=0.5"))
    assert len(trained) == 8


def test_every_method_is_a_run_that_can_be(tmp_path: Path) -> None:
    names = [n for n in get_args(Selector) if n != "full"]
    entries = [f"{n}:0.1:{i}" for i, n in enumerate(names)] + ["full:1:100", "solo_grpo:1:101"]
    entries += [f"tandem_{s}:0.5:{200 + i}" for i, s in enumerate(STRATEGIES)]
    configs = {m.name: c for m, _, c in suite(tmp_path, " ".join(entries), "7").runs()}
    assert configs["q3_lowc"].opd.selection.mask == "q3_lowc"
    assert (configs["entropy"].seed, configs["entropy"].objective.reward_coef) == (7, 0.0)
    solo = configs["solo_grpo"]
    assert (solo.tandem.enabled, solo.eval.tandem, solo.opd.enabled, solo.objective.reward_coef) == (
        False,
        True,
        False,
        1.0,
    )
    assert configs["tandem_sentence"].tandem.selection_strategy == "sentence"
    assert configs["tandem_chunk"].tandem.enabled
    sweep = suite(tmp_path, "tandem_word:0.25:1 tandem_word:0.75:2", "0").runs()
    assert [c.tandem.prob_senior for _, _, c in sweep] == [0.25, 0.75]
    assert len({c.name for _, _, c in sweep}) == 2


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        ("", "at least one method:ratio:idx"),
        ("tip", "METHOD_LIST='tip': expected entries method:ratio:idx"),
        ("pure_opd:0.3", "METHOD_LIST='pure_opd:0.3': expected entries method:ratio:idx"),  # as the published script
        ("tip:0.1:1:2", "METHOD_LIST='tip:0.1': expected a method among"),
        ("pure_opd::10", "entries method:ratio:idx"),
        ("tip:0.1.2:3", "entries method:ratio:idx"),
        ("tip:nan:3", "entries method:ratio:idx"),
        ("teachabilty:0.1:3", "did you mean 'teachability'?"),
        ("tip:0.1:3 random:0.1:3", "an idx of its own for each method"),
        ("tip:0:3", "opd.selection.ratio=0"),
        ("tip:1.5:3", "opd.selection.ratio=1.5"),
        ("my.module:f:2:3", "opd.selection.ratio=2"),
        ("solo_grpo:0.5:3", "solo_grpo:0.5:3': expected the number 1"),
        ("tandem_chunk:0.3:3", "tandem_chunk:0.3:3': expected the number 0.5"),
        ("tandem_word:2:3", "tandem.prob_senior=2"),
    ],
)
def test_bad_method_lists_are_refused_before_anything_runs(tmp_path: Path, methods: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_suite(suite(tmp_path / "s", methods, "0"))
    assert expected in str(caught.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("seeds", ["", "a", "1 1", "-1", "0.5"])
def test_bad_seeds(seeds: str) -> None:
    with pytest.raises(ConfigError, match="SEEDS="):
        parse_seeds(seeds)


def test_a_dry_run_prints_commands_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "s"
    argv = [
        "suite",
        str(folder),
        "--methods",
        "tip:0.1:3",
        "--seeds",
        "5",
        "--set",
        "objective.reward_coef=0",
        "--dry-run",
    ]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "slime-tandem train --set objective.reward_coef=0 opd.enabled=true opd.selection.selector=tip" in out
    assert "seed=5 --resume" in out
    assert not folder.exists()


def called_by_the_script(folder: Path, variables: dict[str, str], *settings: str) -> str:
    """How run_method_suite.sh calls `slime-tandem suite`, with a stand-in for the program."""
    venv = folder / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "slime-tandem"):
        (venv / "bin" / name).write_text('#!/bin/sh\necho "called $*"\n')
        (venv / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["bash", REPO / "scripts/train/run_method_suite.sh", *settings],
        capture_output=True, text=True, cwd=folder,
        env={**os.environ, "OUTPUT_ROOT": "out", "DRY_RUN": "1", "VENV": str(venv), **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("called suite"))


def test_the_script_passes_its_variables_on(tmp_path: Path) -> None:
    variables = {
        "METHOD_LIST": "tip:0.10:30 random:0.10:40", "SEEDS": "3 4", "NUM_ROLLOUT": "5", "OPD_TOPK_METRICS_K": "8",
        "CONFIG": "mine.yaml",
    }  # fmt: skip
    (tmp_path / "mine.yaml").touch()
    called = called_by_the_script(tmp_path, variables, "opd.selection.missing_mass=rest")
    assert f"suite {tmp_path / 'out'} " in called, "relative to the caller's folder"
    assert str(tmp_path / "mine.yaml") in called
    for part in ("--methods tip:0.10:30 random:0.10:40 --seeds 3 4", "--top-k 8", "--backend local", "--dry-run"):
        assert part in called
    assert "--set train.steps=5 opd.selection.missing_mass=rest" in called


def test_the_script_without_settings_passes_no_empty_set(tmp_path: Path) -> None:
    assert "--set" not in called_by_the_script(tmp_path, {"METHOD_LIST": "tip:0.10:30"})


@pytest.mark.parametrize("folder", ["2026", "[x]", "a: b", "it's"])
def test_any_folder_name_and_every_digit_of_a_ratio(folder: str) -> None:
    """Settings travel as YAML text: a name is not read as a number, a number is not rounded."""
    [(_, _, config)] = suite(Path(folder), "tip:0.12345678:10", "0").runs()
    assert config.run_dir.parent == Path(folder)
    assert config.opd.selection.ratio == 0.12345678


PUBLISHED = {
    "pure_opd": "full", "full_opd": "full", "full": "full", "none": "full", "teachability": "dlearn_high",
    "teachability_high": "dlearn_high", "dlearn": "dlearn_high", "dlearn_high": "dlearn_high", "entropy": "entropy",
    "high_entropy": "entropy", "teachability_entropy": "ca_softor", "entropy_teachability": "ca_softor",
    "ta_softor": "ca_softor", "dlearn_entropy": "ca_softor", "teachability_entropy_split": "split_budget_ca",
    "entropy_teachability_split": "split_budget_ca", "ta_split": "split_budget_ca", "tip": "tip", "tip_softor": "tip",
    "q3_highc": "q3_highc", "q3_highC": "q3_highc", "q3": "q3", "divergence": "divergence", "high_d": "divergence",
    "raw_d": "divergence", "random": "random", "compatibility": "compatibility", "high_c": "compatibility",
}  # fmt: skip
"""What TA-OPD's scripts take as a method, and the mask that each stands for there."""


def test_every_published_name_commas_and_a_selector_of_ones_own(tmp_path: Path) -> None:
    entries = ",".join(f"{name}:0.3:{i}" for i, name in enumerate(PUBLISHED))
    runs = suite(tmp_path, f"{entries} my.module:best:0.2:99", "0").runs()
    assert {m.name: c.opd.selection.mask for m, _, c in runs} == PUBLISHED | {"my.module:best": "my.module:best"}
    for method, _, config in runs[:-1]:
        assert config.opd.selection.ratio == (1.0 if PUBLISHED[method.name] == "full" else 0.3), "as published"
    assert runs[-1][2].run_dir.name == "099-my.module.best-0.2-seed0"


def test_settings_of_a_selection_reach_the_methods_that_select(tmp_path: Path) -> None:
    more = ("opd.selection.rules=reference", "opd.selection.missing_mass=fill", "opd.selection.gamma=0.3",
            "opd.selection.mask_seed=7", f"opd.token_bank_dir={tmp_path}/bank")  # fmt: skip
    methods = "pure_opd:1:1 ta_split:0.1:2 tip:0.1:3 random:0.1:4 tandem_word:0.5:5"
    found = {m.name: c for m, _, c in suite(tmp_path / "s", methods, "0", *more).runs()}
    chosen = {name: (s.rules, s.gamma, s.mask_seed) for name, c in found.items() if (s := c.opd.selection)}
    assert chosen["pure_opd"] == chosen["tandem_word"] == ("own", 0.5, 42)
    assert chosen["ta_split"] == ("reference", 0.3, 42)
    assert chosen["random"] == ("reference", 0.5, 7)
    assert found["tip"].opd.token_bank_dir == f"{tmp_path}/bank/003-tip-0.1-seed0"
    assert found["tandem_word"].opd.token_bank_dir is None


def refused_by_the_script(folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", REPO / "scripts/train/run_method_suite.sh"], capture_output=True, text=True, cwd=folder,
        env={**os.environ, "DRY_RUN": "1", "VENV": str(folder / "venv"), **variables},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    return done.stderr


def test_models_and_prompts_of_the_quick_start_are_what_is_trained(tmp_path: Path) -> None:
    for name in ("student", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "train.jsonl").touch()
    variables = {
        "STUDENT_HF": "student", "TEACHER_MODEL": str(tmp_path / "teacher"), "PROMPT_DATA": "train.jsonl", "RULES": "reference",
        "METHOD_LIST": "teachability:0.10:20", "ROLLOUT_BATCH_SIZE": "4", "N_SAMPLES_PER_PROMPT": "4", "GLOBAL_BATCH_SIZE": "8",
        "OPD_COMPAT_PROXY": "prefix_ema", "OPD_TOKEN_BANK_DIR": "bank", "TAG": "mine",
    }  # fmt: skip
    called = called_by_the_script(tmp_path, variables).replace("'", "")
    for part in (
        f"suite {tmp_path}/out/mine ", f"models.senior={tmp_path}/student", f"models.teacher={tmp_path}/teacher",
        f"tasks=[{{family: jsonl, path: {tmp_path}/train.jsonl}}]", "slime_opd.yaml", "train.updates_per_step=2",
        "opd.selection.compatibility=prefix", "opd.selection.rules=reference", f"opd.token_bank_dir={tmp_path}/bank",
        "--backend local",
    ):  # fmt: skip
        assert part in called


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STUDENT_HF": "/no"}, "STUDENT_HF=/no: expected a Hugging Face folder"),
        ({"PROMPT_DATA": "/no"}, "PROMPT_DATA=/no: expected an existing file"),
        ({"STUDENT_TORCH_DIST": "/x", "BACKEND": "local"}, "STUDENT_TORCH_DIST=/x: expected nothing with BACKEND=local"),
        ({"SLIME_DIR": "/no"}, "SLIME_DIR=/no: expected a checkout of slime"),
        ({"OPD_BUDGET_MASK": "tip"}, "OPD_BUDGET_MASK=tip: expected nothing: METHOD_LIST"),
        ({"TEACHER_GPU": "7"}, "TEACHER_GPU=7: expected nothing: the plan"),
        ({"OPD_EXACT_CMASS": "1"}, "OPD_EXACT_CMASS=1: expected 0 with RULES=own"),
        ({"OPD_EXACT_CMASS_OVERFLOW": "error"}, "OPD_EXACT_CMASS_OVERFLOW=error: expected fallback"),
        ({"OPD_COMPAT_PROXY": "cosine"}, "OPD_COMPAT_PROXY=cosine: expected mass, set, bc or prefix_ema"),
        ({"GLOBAL_BATCH_SIZE": "3", "ROLLOUT_BATCH_SIZE": "2", "N_SAMPLES_PER_PROMPT": "2"}, "GLOBAL_BATCH_SIZE=3: expected"),
    ],
)  # fmt: skip
def test_variables_without_an_effect_are_refused(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    assert message in refused_by_the_script(tmp_path, variables)
