"""Full-vocabulary evaluation: against transformers, in constant memory, and across interruptions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tandem.diagnostics import rescore
from slime_tandem.diagnostics.bank import BANK, EVALUATION, Bank
from slime_tandem.diagnostics.rescore import (
    EvaluationJob,
    divergence,
    entropy,
    evaluate_bank,
    first_outcomes,
    outcome_log_probs,
)
from slime_tandem.errors import DataError, ModelError
from slime_tandem.models.hf import load_model
from slime_tandem.models.tokenizer import ModelTokenizer

from ..waiting import PATIENCE_S
from .test_export import log_probs


def quiet(_: str) -> None:
    pass


@given(st.integers(0, 2**31))
def test_divergences_are_torchs_and_merging_outcomes_never_adds_any(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(3, 40, generator=g).double().mul(4).log_softmax(-1) for _ in range(2))
    want = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    )
    torch.testing.assert_close(divergence(p, q), want)
    torch.testing.assert_close(entropy(p), torch.distributions.Categorical(logits=p).entropy())
    outcomes = torch.randint(0, 258, (40,), generator=g)
    a, b = outcome_log_probs(p, 40, outcomes), outcome_log_probs(q, 40, outcomes)
    torch.testing.assert_close(a.exp().sum(-1), torch.ones(3).double())
    assert (divergence(a, b) <= want + 1e-12).all()
    one = torch.zeros(1, 258).double().index_add(1, outcomes, p[:1].exp())
    torch.testing.assert_close(a[:1].exp(), one)


def test_a_divergence_is_zero_with_itself_and_infinite_where_mass_is_missing() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    assert divergence(p, p).tolist() == [0.0, 0.0]
    assert divergence(p, p.flip(0)).tolist() == [float("inf"), pytest.approx(np.log(2))]
    # Far below float32's smallest number the sums still hold.
    far = outcome_log_probs(torch.tensor([[0.0, -2000.0, -2000.0]]), 3, torch.tensor([1, 2, 2]))
    assert float(far[0, 2]) == pytest.approx(-2000 + np.log(2))
    assert far[0, 3] == -torch.inf


def job(bank: Path, folder: Path, student: Path, teacher: Path, **more: Any) -> EvaluationJob:
    return EvaluationJob(bank, folder / "e.parquet", "before", student, teacher, **more)


def test_values_are_those_of_single_contexts(trio: Any, same_bank: Path, tmp_path: Path) -> None:
    evaluate_bank(job(same_bank, tmp_path, trio.senior, trio.junior), quiet)
    with Bank(tmp_path / "e.parquet", EVALUATION) as e, Bank(same_bank, BANK) as b:
        found, contexts, meta = e.read().to_pylist(), b.read().to_pylist(), e.metadata
    assert meta["models"]["before"]["student"]["model"] == str(trio.senior)
    assert [(r["sample"], r["position"]) for r in found] == [(r["sample"], r["position"]) for r in contexts]
    for got, row in list(zip(found, contexts, strict=True))[::5]:
        s = log_probs(trio.senior, row["prompt_ids"], row["response_ids"], row["position"])
        t = log_probs(trio.junior, row["teacher_prompt_ids"], row["teacher_response_ids"], row["teacher_position"])
        assert got["kl"] == pytest.approx(float((t.exp() * (t - s)).sum()), abs=1e-5)
        assert got["reverse_kl"] == pytest.approx(float((s.exp() * (s - t)).sum()), abs=1e-5)
        assert got["student_entropy"] == pytest.approx(float(-(s.exp() * s).sum()), abs=1e-5)
        assert got["log_prob"] == pytest.approx(row["log_prob"], abs=1e-5)
        assert got["teacher_log_prob"] == pytest.approx(row["teacher_log_prob"], abs=1e-5)
        # D of lists is a part of the whole.
        assert got["kl"] >= 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.csv", "e.json", "e.parquet", "e.svg"]


def test_two_vocabularies_meet_at_bytes(trio: Any, cross_bank: Path, tmp_path: Path) -> None:
    evaluate_bank(job(cross_bank, tmp_path, trio.senior, trio.teacher), quiet)
    with Bank(tmp_path / "e.parquet", EVALUATION) as e, Bank(cross_bank, BANK) as b:
        found, contexts = e.read().to_pylist(), b.read().to_pylist()
    sides = {}
    for role, folder in (("s", trio.senior), ("t", trio.teacher)):
        sides[role] = first_outcomes(ModelTokenizer.load(folder).tokens)
    for got, row in list(zip(found, contexts, strict=True))[::5]:
        s = log_probs(trio.senior, row["prompt_ids"], row["response_ids"], row["position"])
        t = log_probs(trio.teacher, row["teacher_prompt_ids"], row["teacher_response_ids"], row["teacher_position"])
        p, q = (torch.zeros(258).double().index_add(0, sides[r], x.exp()) for r, x in (("s", s), ("t", t)))
        want = torch.special.xlogy(q, q) - torch.special.xlogy(q, p)
        assert got["kl"] == pytest.approx(float(want.sum()), abs=1e-5)
        assert got["log_prob"] == pytest.approx(float(p[sides["s"][row["token"]]].log()), abs=1e-5)
    with pytest.raises(DataError, match=r"--teacher=.*this bank compares two vocabularies"):
        evaluate_bank(job(cross_bank, tmp_path / "x", trio.senior, trio.junior), quiet)


def test_memory_is_bounded_and_does_not_change_values(
    trio: Any, same_bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    plain = rescore.Reader.read

    def spy(self: Any, sequences: Any, at: Any) -> Any:
        kept = {n for positions in at for n in positions}
        rows.append(len(kept) * len(sequences))
        return plain(self, sequences, at)

    monkeypatch.setattr(rescore.Reader, "read", spy)
    size = len(ModelTokenizer.load(trio.senior).tokens.table)
    results = []
    for n, limit in enumerate((1e3, 3 * 8 * size / 2**20)):
        rows.clear()
        evaluate_bank(replace(job(same_bank, tmp_path / str(n), trio.senior, trio.junior), logit_mib=limit), quiet)
        results.append((max(rows), len(rows)))
        with Bank(tmp_path / str(n) / "e.parquet", EVALUATION) as e:
            results.append(e.read().column("kl").to_numpy())
    (most, few), a, (least, many), b = results
    assert most > 3 >= least
    assert many > few
    assert b == pytest.approx(a, abs=1e-5)


def test_a_padded_model_counts_the_tokenizers_ids_alone(trio: Any, same_bank: Path, tmp_path: Path) -> None:
    """Qwen's sizes have 151,936 and 152,064 rows for one tokenizer: padding is no token."""
    model = load_model(trio.junior)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 12)
    model.get_input_embeddings().weight.data[size:] = model.get_input_embeddings().weight.data[7] * 3
    wide = tmp_path / "wide"
    shutil.copytree(trio.junior, wide)
    model.save_pretrained(wide)
    values = []
    for n, teacher in enumerate((trio.junior, wide)):
        evaluate_bank(job(same_bank, tmp_path / str(n), trio.senior, teacher), quiet)
        with Bank(tmp_path / str(n) / "e.parquet", EVALUATION) as e:
            values.append(e.read().column("kl").to_numpy())
    assert values[1] == pytest.approx(values[0], abs=1e-6)


CHILD = """
import os, signal, sys
from pathlib import Path
from slime_tandem.diagnostics import rescore
rescore.PART = 2
def die(line):
    if line.startswith("part 1"):
        os.kill(os.getpid(), signal.SIGKILL)
bank, out, student, teacher = map(Path, sys.argv[1:])
rescore.evaluate_bank(rescore.EvaluationJob(bank, out, "before", student, teacher), die)
"""


def test_a_killed_evaluation_goes_on_where_it_was(
    trio: Any, same_bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "killed" / "e.parquet"
    args = [str(x) for x in (same_bank, out, trio.senior, trio.junior)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *args], env=env, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert not out.exists()
    parts = out.with_name(".e.parquet.parts")
    assert sorted(p.name for p in parts.glob("part*")) == ["part-000000.parquet"]
    first = (parts / "part-000000.parquet").stat().st_mtime_ns
    monkeypatch.setattr(rescore, "PART", 2)
    said: list[str] = []
    this = job(same_bank, out.parent, trio.senior, trio.junior)
    with pytest.raises(DataError, match="another job"):
        evaluate_bank(replace(this, label="after"), said.append)

    def once(line: str) -> None:
        said.append(line)
        assert (parts / "part-000000.parquet").stat().st_mtime_ns == first

    evaluate_bank(this, once)
    assert [line.split(":")[0] for line in said] == ["part 2", "part 3"]
    assert not parts.exists()
    evaluate_bank(job(same_bank, tmp_path, trio.senior, trio.junior), quiet)
    with Bank(out, EVALUATION) as a, Bank(tmp_path / "e.parquet", EVALUATION) as b:
        assert a.read().equals(b.read())
    evaluate_bank(this, said.append)
    assert said[-1].endswith("is finished already")
    with pytest.raises(DataError, match="one of this very job"):
        evaluate_bank(replace(this, student=trio.junior), quiet)


def test_models_that_do_not_fit_are_refused(trio: Any, same_bank: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--teacher=.*export a bank with these two models"):
        evaluate_bank(job(same_bank, tmp_path, trio.senior, trio.teacher), quiet)
    with pytest.raises(ModelError, match="--device='nowhere'"):
        evaluate_bank(job(same_bank, tmp_path, trio.senior, trio.junior, device="nowhere"), quiet)
    # Weights that are no numbers are refused on load. Finite ones can still give log-probabilities that are none.
    for name, value, error, expected in (
        ("nan", float("nan"), ModelError, r"expected finite weights \(model\.norm\.weight has one"),
        ("overflow", torch.finfo(torch.float32).max, DataError, r"kl at \(.*=nan: expected a finite number"),
    ):
        broken = tmp_path / name
        shutil.copytree(trio.senior, broken)
        model = load_model(trio.senior)
        model.model.norm.weight.data[:] = value
        model.save_pretrained(broken)
        with pytest.raises(error, match=expected):
            evaluate_bank(job(same_bank, tmp_path / f"{name}_out", broken, trio.junior), quiet)
        assert not (tmp_path / f"{name}_out" / "e.parquet").exists()
