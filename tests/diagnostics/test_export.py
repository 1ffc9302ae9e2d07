"""Banks of real responses: scores against transformers, positions by laws, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.config import RunConfig
from slime_tandem.diagnostics.bank import BANK, Bank, top_lists, weights_fingerprint
from slime_tandem.diagnostics.export import choose_positions, export_bank
from slime_tandem.distill.selection import TokenKeys
from slime_tandem.distill.teachability import raw_scores
from slime_tandem.errors import ConfigError, TandemError
from slime_tandem.models.hf import load_model

from .conftest import PLAN, settings


def log_probs(folder: Path, prompt: list[int], response: list[int], position: int) -> torch.Tensor:
    with torch.no_grad():
        logits = load_model(folder)(torch.tensor([[*prompt, *response[:position]]])).logits[0, -1]
    return torch.log_softmax(logits.double(), -1)


def test_a_banks_scores_are_those_of_the_models(trio: Any, same_bank: Path) -> None:
    with Bank(same_bank, BANK) as bank:
        table, meta = bank.read(), bank.metadata
    assert (meta["comparison"], meta["missing_mass"], meta["k"]) == ("tokens", "exact", 4)
    assert meta["teacher"]["weights"] == weights_fingerprint(trio.junior)
    assert len(set(table.column("sample").to_pylist())) == 6
    for row in table.to_pylist()[::7]:
        s = log_probs(trio.senior, row["prompt_ids"], row["response_ids"], row["position"])
        t = log_probs(trio.junior, row["teacher_prompt_ids"], row["teacher_response_ids"], row["teacher_position"])
        assert row["student_top_ids"] == s.topk(4).indices.tolist()
        assert row["teacher_top_ids"] == t.topk(4).indices.tolist()
        union = sorted({*row["student_top_ids"], *row["teacher_top_ids"]})
        p, q = s[union].softmax(-1), t[union].softmax(-1)
        assert row["D"] == pytest.approx(float((q * (q / p).log()).sum()), abs=1e-4)
        assert row["C"] == pytest.approx(float(t.exp()[row["student_top_ids"]].sum()), abs=1e-5)
        h = s.topk(4).values.softmax(-1)
        assert row["H"] == pytest.approx(float(-(h * h.log()).sum()) / np.log(4), abs=1e-4)
        assert row["teacher_log_prob"] == pytest.approx(float(t[row["token"]]), abs=1e-5)
        assert row["log_prob"] == pytest.approx(float(s[row["token"]]), abs=1e-5)
    # The lists that the bank holds give its scores again.
    again = raw_scores(top_lists(table, 4), "exact")
    assert again.divergence == pytest.approx(table.column("D").to_numpy(), abs=1e-6)
    report = json.loads(same_bank.with_suffix(".json").read_text())
    assert report["setup"]["banks"] == meta["banks"]


def test_a_teacher_of_another_vocabulary_reads_its_own_ids(trio: Any, cross_bank: Path) -> None:
    with Bank(cross_bank, BANK) as bank:
        table, meta = bank.read(), bank.metadata
    assert (meta["comparison"], meta["missing_mass"]) == ("next_byte", "rest")
    assert meta["masked_tokens"]["boundary"] > 0
    assert meta["valid_tokens"] == len(table) == pytest.approx(table.column("weight").to_numpy().sum())
    assert set(table.column("sample").to_pylist()) == {"t0", "t1", "t2"}
    for row in table.to_pylist()[::9]:
        t = log_probs(trio.teacher, row["teacher_prompt_ids"], row["teacher_response_ids"], row["teacher_position"])
        token = row["teacher_response_ids"][row["teacher_position"]]
        assert row["teacher_log_prob"] == pytest.approx(float(t[token]), abs=1e-5)
        assert row["teacher_on_student"] == []
    assert raw_scores(top_lists(table, 4), "rest").divergence == pytest.approx(table.column("D").to_numpy(), abs=1e-6)


def test_the_same_command_makes_the_same_bank(trio: Any, served: list[str], tmp_path: Path) -> None:
    """And what it cannot make it refuses, without a file."""
    config = settings(trio, trio.teacher, tmp_path, *served)
    tables = []
    for name in ("a.parquet", "b.parquet"):
        export_bank(config, PLAN, tmp_path / name, lambda _: None)
        with Bank(tmp_path / name, BANK) as bank:
            tables.append(bank.read())
            assert bank.metadata["teacher"]["weights"] is None, "of a server that is not ours nothing is known"
    assert tables[0].equals(tables[1])
    lines = {
        "twice": [{"id": "a", "prompt": "x", "response": "y"}] * 2,
        # The model's context has 256 positions: its server refuses the response.
        "long": [{"prompt": "x", "response_ids": [5] * 300}],
        "nothing": [{"prompt": "x", "response_ids": []}],
    }
    for name, rows in lines.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    before = sorted(tmp_path.iterdir())
    for plan, words in (
        (replace(PLAN, top_k=0), "--top-k=0: expected at least 1"),
        (replace(PLAN, compatibility="prefix"), "--compatibility"),
        (replace(PLAN, responses=tmp_path / "none.jsonl"), "FILE="),
        (replace(PLAN, top_k=290), "--top-k=290: expected at most 280, what the teacher's server can list"),
        (replace(PLAN, missing_mass="exact"), "--missing-mass='exact'"),
        (replace(PLAN, responses=tmp_path / "twice"), "id='a': expected a name of its own"),
        (replace(PLAN, responses=tmp_path / "long"), "at most|max_total_tokens|context"),
        (replace(PLAN, responses=tmp_path / "nothing"), "at least one response that is not empty"),
    ):
        with pytest.raises(TandemError, match=words):
            export_bank(config, plan, tmp_path / "bad.parquet", lambda _: None)
    assert sorted(tmp_path.iterdir()) == before
    two = RunConfig.load(None, ["opd.teachers=[{name: a, model: x}, {name: b, model: y}]"])
    with pytest.raises(ConfigError, match=r"opd\.teachers.*one teacher for a bank"):
        export_bank(two, PLAN, tmp_path / "c.parquet", lambda _: None)
    with pytest.raises(ConfigError, match=r"--output=.*c\.csv': expected a name that ends in \.parquet"):
        export_bank(config, PLAN, tmp_path / "c.csv", lambda _: None)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 6), st.integers(0, 99), st.booleans())
def test_positions_hold_their_budget_and_stand_for_all(lengths: list[int], n: int, seed: int, uniform: bool) -> None:
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    keys = TokenKeys(sequence, np.concatenate([np.arange(k) for k in lengths]))
    quadrant = np.random.default_rng(seed).integers(1, 5, len(sequence)).astype(np.int8)
    how = "uniform" if uniform else "quadrant"
    chosen, weight = choose_positions(quadrant, keys, how, n, seed)
    assert (np.diff(chosen) > 0).all()
    assert (weight >= 1).all()
    stratum = sequence if uniform else quadrant
    sizes = np.bincount(stratum)
    got = np.bincount(stratum[chosen], minlength=len(sizes))
    if uniform:
        assert got.tolist() == np.minimum(sizes, n).tolist()
    else:
        assert len(chosen) == min(n * len(lengths), len(sequence))
        short = (got < sizes) & (sizes > 0)
        assert not short.any() or got[short].min() >= got.max() - 1, "who gives fewer gave all it had"
    assert np.bincount(stratum[chosen], weight, len(sizes)) == pytest.approx(np.where(got > 0, sizes, 0))
    # A token's draw is its own: another order of the batch chooses the same tokens.
    order = np.random.default_rng(seed + 1).permutation(len(sequence))
    other, _ = choose_positions(quadrant[order], TokenKeys(sequence[order], keys.position[order]), how, n, seed)
    assert sorted(order[other].tolist()) == chosen.tolist()
