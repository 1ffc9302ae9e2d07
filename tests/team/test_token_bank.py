"""Banks of a rollout's tokens: the published columns, one file a rollout, and what a resumed run does."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from slime_tandem.config import RunConfig
from slime_tandem.errors import ConfigError
from slime_tandem.team.token_bank import TokenBank
from slime_tandem.training.rows import build_rows
from slime_tandem.types import AlignedScores, AuthorRun, Prompt, SampleKey, ScoredSample, TandemSample, TopLists

COLUMNS = [
    "schema_version", "pair_id", "teacher_name", "student_name", "seed", "rollout_id", "sample_index", "group_index",
    "sample_ordinal", "tok_pos", "pos_norm", "prompt_len", "resp_len", "total_len", "truncated", "token_id",
    "student_logp_sampled", "teacher_logp_sampled", "sampled_reverse_kl", "sampled_teacher_adv", "student_top1_id",
    "teacher_top1_id", "student_top1_prob", "teacher_top1_prob", "student_topk_mass", "teacher_topk_mass", "Hs_topk",
    "Ht_topk", "Hs_topk_norm", "Ht_topk_norm", "KLf_union", "KLr_union", "Cmass", "Cmass_topk", "Cmass_true",
    "Cmass_exact", "Coverlap", "CBC", "Cprefix_ema", "reach_t1", "target_in_student_topk", "target_in_teacher_topk",
    "target_student_rank", "target_teacher_rank", "loss_mask_original", "H_norm", "D_norm", "C_norm", "DC_norm",
    "Dlearn", "Dincompat", "tip_score", "ca_softor_score", "split_ca_score", "quadrant", "budget_method",
    "budget_ratio", "budget_score", "budget_keep", "student_top_ids", "student_top_logps", "teacher_top_ids",
    "teacher_top_logps",
]  # fmt: skip


def sample(index: int, rollout: int = 0) -> ScoredSample:
    """Three tokens, the last one not aligned; both sides list two tokens, one of them alike."""
    written = TandemSample(
        SampleKey(0, rollout, index), 7, Prompt("p", (), None, "t"), (1, 2), (5, 6, 9), (1, 1, 1), (-0.5, -1.0, -0.5),
        "length", "", (AuthorRun(1, 0, 3, "v"),),
    )  # fmt: skip
    student, teacher = np.array([[5, 6]] * 3), np.array([[6, 8]] * 3)
    p, q = np.log([[0.6, 0.3]] * 3), np.log([[0.5, 0.4 - 0.1 * index]] * 3)
    student[2], teacher[2] = -1, -1
    mask = np.array([True, True, False])
    scores = AlignedScores(np.where(mask, -0.25, 0.0), mask, {"boundary": 1}, lists=TopLists(student, p, teacher, q))
    return ScoredSample(written, 1.0 - index, scores)


def config(tmp_path: Path, *more: str) -> RunConfig:
    base = [f"runs_dir={tmp_path}", "opd.token_bank_dir=bank", "opd.selection.top_k=2", "seed=3"]
    chosen = ["opd.selection.selector=tip", "opd.selection.ratio=0.25", "opd.selection.rules=reference"]
    return RunConfig.load(overrides=[*base, *chosen, "opd.selection.missing_mass=fill", *more])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_file_for_each_rollout_with_the_published_columns(tmp_path: Path) -> None:
    run = config(tmp_path, "opd.token_bank_pair_id=a-to-b")
    bank = TokenBank.of(run)
    assert bank is not None
    for rollout in (0, 1, 1):  # the second again, as after a resume
        build_rows([sample(0, rollout), sample(1, rollout)], run, bank=bank.write)
    folder = run.run_dir / "bank"
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json", "rollout_000000.csv", "rollout_000001.csv", "summary.csv",
    ]  # fmt: skip
    rows = rows_of(folder / "rollout_000001.csv")
    assert list(rows[0]) == COLUMNS
    assert len(rows) == 6
    one = rows[1]
    assert (one["rollout_id"], one["sample_ordinal"], one["tok_pos"], one["token_id"]) == ("1", "0", "1", "6")
    assert (one["pair_id"], one["truncated"], one["target_student_rank"], one["target_teacher_rank"]) == (
        "a-to-b", "1", "2", "1",
    )  # fmt: skip
    assert float(one["Cmass"]) == pytest.approx(0.5)
    assert float(one["Coverlap"]) == 0.5
    assert float(one["sampled_reverse_kl"]) == -0.75
    assert (rows[2]["loss_mask_original"], rows[2]["budget_keep"], rows[2]["student_top1_id"]) == ("0", "0", "")
    assert math.isnan(float(rows[2]["teacher_logp_sampled"]))
    assert sum(int(row["budget_keep"]) for row in rows) == 2, "one of four, and one more of the other response"
    summary = rows_of(folder / "summary.csv")
    assert [(s["rollout_id"], s["num_tokens"], s["num_valid_tokens"], s["num_kept_tokens"]) for s in summary] == [
        ("0", "6", "4", "2"), ("1", "6", "4", "2"),
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["opd_budget_mask"] == "tip"


def test_without_a_selection_as_json_lines_with_the_lists(tmp_path: Path) -> None:
    run = RunConfig.load(
        overrides=[f"runs_dir={tmp_path}", f"opd.token_bank_dir={tmp_path / 'x'}", "opd.selection.top_k=2",
                   "opd.token_bank_format=jsonl", "opd.token_bank_raw_topk=true"]
    )  # fmt: skip
    bank = TokenBank.of(run)
    assert bank is not None
    rows, _ = build_rows([sample(0)], run, bank=bank.write, rollout_id=12)
    assert rows[0].opd_weights.tolist() == [1.0, 1.0, 0.0]
    written = [json.loads(line) for line in (tmp_path / "x" / "rollout_000012.jsonl").read_text().splitlines()]
    assert [row["budget_keep"] for row in written] == [1, 1, 0]
    assert json.loads(written[0]["teacher_top_ids"]) == [6, 8]
    assert written[0]["budget_method"] == "full"


def test_what_goes_with_it(tmp_path: Path) -> None:
    assert TokenBank.of(RunConfig()) is None
    with pytest.raises(ConfigError, match="token_bank_format"):
        RunConfig.load(overrides=["opd.token_bank_format=jsonl"])
    with pytest.raises(ConfigError, match=r"strict with opd\.token_bank_dir"):
        RunConfig.load(overrides=["opd.token_bank_dir=x", "opd.alignment=even"])
    with pytest.raises(ConfigError, match=r"opd.selection.top_k=4: expected 16 \(the default\)"):
        RunConfig.load(overrides=["opd.selection.top_k=4"])
