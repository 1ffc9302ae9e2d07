"""Made-up banks and evaluations for the pure parts, and real ones of tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from slime_tandem.config import RunConfig
from slime_tandem.diagnostics.bank import BANK, EVALUATION, bank_id, writing
from slime_tandem.diagnostics.export import BankPlan, export_bank
from slime_tandem.models.tokenizer import ModelTokenizer

from ..in_process import ThreadServer

MODEL = {"model": "m", "vocabulary": "v", "weights": "w"}
FACTS: dict[str, Any] = {
    "k": 2,
    "missing_mass": "exact",
    "compatibility": "mass",
    "normalisation": "batch_minmax",
    "comparison": "tokens",
    "student": MODEL,
    "teacher": MODEL,
}


def rows(samples: int = 3, each: int = 2, first: int = 0) -> dict[str, list[Any]]:
    """Columns of a small bank: responses of four tokens, contexts at positions 1, 2, ..."""
    columns: dict[str, list[Any]] = {name: [] for name in BANK.schema.names}
    for s in range(first, first + samples):
        for p in range(1, 1 + each):
            x = (7 * s + 3 * p) % 10 / 10
            row = {
                "sample": f"s{s}", "position": p, "token": 10 + p, "prompt_ids": [1, 2], "response_ids": [10, 11, 12, 13],
                "teacher_prompt_ids": [1], "teacher_response_ids": [10, 11, 12, 13], "teacher_position": p,
                "log_prob": -0.5, "teacher_log_prob": -0.25, "H": x, "Ht": 0.5, "D": 1 + x, "D_reverse": 1.0, "C": 0.75,
                "H_line": x, "D_line": 1.5 - x, "C_line": x * x, "quadrant": 1 + (s + p) % 4, "weight": 1.0,
                "student_top_ids": [5, 6], "student_top_log_probs": [-0.5, -1.5], "teacher_on_student": [-1.0, -2.0],
                "teacher_top_ids": [6, 7], "teacher_top_log_probs": [-0.5, -2.0], "student_on_teacher": [-1.5, -3.0],
            }  # fmt: skip
            for name, value in row.items():
                columns[name].append(value)
    return columns


def write_bank(path: Path, columns: dict[str, list[Any]] | None = None, **facts: Any) -> Path:
    table = pa.table(columns or rows(), schema=BANK.schema)
    with writing(path, BANK, {"banks": [bank_id(table)], **FACTS, **facts}) as sink:
        sink.write(table)
    return path


def write_evaluation(
    path: Path, label: str, columns: dict[str, list[Any]], kl: Any, banks: list[str], **facts: Any
) -> Path:
    n = len(columns["sample"])
    names = ("reverse_kl", "student_entropy", "teacher_entropy", "log_prob", "teacher_log_prob")
    values = {"label": [label] * n, "sample": columns["sample"], "position": columns["position"], "kl": kl}
    table = pa.table({**values, **{name: np.zeros(n) for name in names}}, schema=EVALUATION.schema)
    models = {label: {"student": MODEL, "teacher": MODEL}}
    with writing(path, EVALUATION, {"banks": banks, "comparison": "tokens", "models": models, **facts}) as sink:
        sink.write(table)
    return path


def settings(trio: Any, teacher: Path, folder: Path, *more: str) -> RunConfig:
    models = [f"models.{role}={getattr(trio, role)}" for role in ("senior", "junior")]
    sizes = ["sampling.max_new_tokens=10", "engine.cache_tokens=4096"]
    return RunConfig.load(None, [*models, f"models.teacher={teacher}", f"runs_dir={folder}", *sizes, *more])


@pytest.fixture(scope="session")
def served(trio: Any, side_url: Callable[[str], str]) -> Iterator[list[str]]:
    """Settings that name running servers of senior and teacher; starting some for each test takes long."""
    with ThreadServer(trio.senior) as senior:
        yield [f"engine.senior_url={senior.url}", f"engine.teacher_url={side_url('teacher')}"]


PLAN = BankPlan(sequences=6, per_sequence=5, sampling="uniform", top_k=4)


@pytest.fixture(scope="session")
def same_bank(trio: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six responses of the senior with the junior as teacher: one vocabulary, servers of its own."""
    folder = tmp_path_factory.mktemp("same")
    export_bank(settings(trio, trio.junior, folder), PLAN, folder / "bank.parquet", lambda _: None)
    return folder / "bank.parquet"


@pytest.fixture(scope="session")
def cross_bank(trio: Any, served: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Given responses, and a teacher of another vocabulary."""
    folder = tmp_path_factory.mktemp("cross")
    texts = ["the answer is 46 and why", "ones carry tens, say <answer>3</answer>", "State the problem: 12 + 34 ="]
    student = ModelTokenizer.load(trio.senior)
    lines = [{"id": f"t{i}", "prompt": f"{i} + 1 =", "response_ids": student.encode(t)} for i, t in enumerate(texts)]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plan = BankPlan(per_sequence=20, sampling="quadrant", top_k=4, responses=folder / "in.jsonl")
    export_bank(settings(trio, trio.teacher, folder, *served), plan, folder / "bank.parquet", lambda _: None)
    return folder / "bank.parquet"
