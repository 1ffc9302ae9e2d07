"""Runs end to end with models that are only served: a teacher with experts and another vocabulary, a junior of another family.

`scripts/experiments/served_models.py` does the same on real SGLang, with more of them (docs/results/served-models.md).
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from architectures import make_model

from slime_tandem.config import RunConfig
from slime_tandem.local.run import train

from ..in_process import ThreadServer

JOBS: dict[str, tuple[dict[str, tuple[str, str]], dict[str, Any]]] = {
    "a teacher with experts": (
        {"senior": ("qwen3", "qwen3"), "teacher": ("qwen3_moe", "deepseek-v3")},
        {"tandem": {"enabled": False}, "train": {"epochs_per_step": 2, "gradient_checkpointing": True}},
    ),
    "a Mistral junior": (
        {"senior": ("qwen3", "qwen3"), "junior": ("mistral", "mistral-v3")},
        {"tandem": {"junior_tokenizer": "any"}, "opd": {"enabled": False}, "objective": {"entropy_coef": 0.01}},
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_run_with_models_of_other_architectures(job: str, tmp_path: Path) -> None:
    roles, changes = JOBS[job]
    tree: dict[str, Any] = {
        "name": "r",
        "runs_dir": str(tmp_path / "runs"),
        "tasks": [{"family": "chain_sum"}],
        "sampling": {"max_new_tokens": 16},
        "eval": {"prompts": 1},
        "engine": {"cache_tokens": 4096},
        "control": False,
        **changes,
    }
    tree["train"] = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "threads": 1, **tree.get("train", {})}
    with ExitStack() as stack:
        for seed, (role, (name, family)) in enumerate(roles.items()):
            folder = make_model(name, tmp_path / role, seed=seed, family=family)
            tree.setdefault("models", {})[role] = str(folder)
            tree["engine"][f"{role}_url"] = stack.enter_context(ThreadServer(folder)).url
        train(RunConfig.from_mapping(tree))
    (row,) = [json.loads(line) for line in (tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]
    assert row["train/logprob_diff"] < 1e-4, "the senior's server and its trainer agree"
    if "teacher" in roles:
        assert 0.2 < row["opd/coverage"] < 1.0, "another vocabulary"
        assert row["opd/failed_samples"] == 0
        assert row["train/updates"] == 2, "two passes"
    else:
        assert 0.0 < row["tandem/junior_token_fraction"] < 1.0
        assert row["train/entropy_bonus"] == pytest.approx(0.01 * row["train/entropy"], rel=1e-4)
