"""Published sizes: parameter counts as published, files as generated, flags as slime's own where slime is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.slime_launch.sizes import (
    PUBLISHED,
    architecture,
    model_file,
    model_flags,
    parameters,
    read_model_args,
)
from slime_tandem.slime_launch.user_flags import split

MODELS = Path(__file__).parents[2] / "scripts" / "train" / "models"
BILLIONS = {  # the model cards' numbers
    "qwen3-0.6B": 0.6, "qwen3-1.7B": 1.7, "qwen3-4B": 4.0, "qwen3-8B": 8.2, "qwen3-14B": 14.8, "qwen3-32B": 32.8,
    "qwen2.5-0.5B": 0.49, "qwen2.5-1.5B": 1.54, "qwen2.5-3B": 3.09, "qwen2.5-7B": 7.61, "qwen2.5-14B": 14.7,
    "qwen2.5-32B": 32.5, "qwen2.5-72B": 72.7, "llama3-8B": 8.03, "llama3.1-8B": 8.03, "llama3.1-70B": 70.6,
    "llama3.2-1B": 1.24, "llama3.2-3B": 3.21, "qwen3-30B-A3B": 30.5, "qwen3-235B-A22B": 235.1,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_size_has_the_published_number_of_weights(name: str) -> None:
    assert parameters(PUBLISHED[name]) / 1e9 == pytest.approx(BILLIONS[name], rel=0.015)


def test_files_are_those_of_the_table() -> None:
    assert {path.stem for path in MODELS.glob("*.sh")} == set(PUBLISHED)
    for name in PUBLISHED:
        assert (MODELS / f"{name}.sh").read_text() == model_file(name), "run python -m slime_tandem.slime_launch.sizes"


def test_a_shell_reads_the_flags_back(tmp_path: Path) -> None:
    for name in ("qwen2.5-7B", "llama3.2-3B"):
        assert read_model_args(MODELS / f"{name}.sh") == model_flags(PUBLISHED[name])
    (tmp_path / "none.sh").write_text("OTHER=(1)")
    with pytest.raises(ConfigError, match="a shell file that sets MODEL_ARGS"):
        read_model_args(tmp_path / "none.sh")


def test_the_norms_epsilon_is_told_to_its_last_digit() -> None:
    """SmolLM2's, from a GGUF file; slime refuses a model whose config.json says another number."""
    eps = 9.999999747378752e-06
    flags = model_flags(replace(PUBLISHED["llama3.2-1B"], norm_eps=eps))
    assert float(flags[flags.index("--norm-epsilon") + 1]) == eps


def test_neither_a_folder_nor_a_size() -> None:
    with pytest.raises(ModelError, match=r"qwen3-5B.*published size"):
        architecture("qwen3-5B")


SLIMES_NAMES = {"llama3.1-8B": "llama3.1-8B-Instruct", "llama3.2-3B": "llama3.2-3B-Instruct"}
DIFFERENT = {  # where slime 624b824a's file is not the published config, and what it says
    "qwen2.5-1.5B": {"--rotary-base": ["10000"]},
    "qwen2.5-32B": {"--norm-epsilon": ["1e-5"]},  # the base model's
    "llama3.1-8B": {"--rotary-scaling-factor": ["8.0"], "--rope-scaling-factor": None},
    "llama3.2-3B": {"--rotary-scaling-factor": ["32.0"], "--rope-scaling-factor": None},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_slimes_own_files_say_the_same(name: str, slime_here: Any) -> None:
    file = slime_here.slime / "scripts" / "models" / f"{SLIMES_NAMES.get(name, name)}.sh"
    if not file.exists():
        pytest.skip(f"slime has no {file.name}")

    def plain(words: list[str]) -> dict[str, object]:
        return {
            f: [float(v) if v.replace(".", "").replace("e-", "").isdigit() else v for v in vs]
            for f, vs in split(words).items()
        }

    theirs, ours = plain(read_model_args(file)), plain(model_flags(PUBLISHED[name]))
    if theirs.pop("--position-embedding-type", None) == ["rope"] and theirs.pop("--rotary-percent") == [1.0]:
        theirs["--use-rotary-position-embeddings"] = []  # the same in other words
    for flag, value in DIFFERENT.get(name, {}).items():
        assert theirs.pop(flag, None) == (None if value is None else [float(v) for v in value])
        ours.pop(flag, None)
    for flag in ("--kv-channels", "--max-position-embeddings"):  # slime leaves out what follows from other flags
        if flag not in theirs:
            ours.pop(flag)
    assert theirs == ours
