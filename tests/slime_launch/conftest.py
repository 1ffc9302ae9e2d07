"""Configurations of published sizes: plans need no weights."""

from __future__ import annotations

from typing import Any

import pytest

from slime_tandem.config import RunConfig


@pytest.fixture
def sized():  # type: ignore[no-untyped-def]
    """Builds a RunConfig for slime from published sizes; sections are merged."""

    def make(**changes: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "models": {"senior": "qwen3-4B", "junior": "qwen3-0.6B", "teacher": "llama3.1-8B"},
            "tasks": [{"family": "chain_sum"}],
            "train": {"steps": 1, "prompts_per_step": 6, "samples_per_prompt": 8},
            "sampling": {"max_new_tokens": 1024},
        }
        for name, value in changes.items():
            tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
        return RunConfig.from_mapping(tree)

    return make
