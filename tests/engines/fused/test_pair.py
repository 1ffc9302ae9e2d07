"""What is refused before a server starts, with the reason; what SGLang is given otherwise."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_tandem.engines.fused import internals, launch, pair
from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.protocol import table_fingerprint

SENIOR: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
JUNIOR = {**SENIOR, "hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "llama"}, "junior.model_type='llama': expected 'qwen3', the senior's family"),
        ({"vocab_size": 99}, "junior.vocab_size=99: expected 100"),
        ({"num_key_value_heads": 1}, "junior.num_key_value_heads=1: expected 2, the senior's: one KV pool"),
        ({"head_dim": 32}, "junior.head_dim=32: expected 16"),
        ({"head_dim": None}, "junior.head_dim=12: expected 16"),
        ({"num_attention_heads": 8}, "junior.num_attention_heads=8: expected at most the senior's 4"),
        ({"use_sliding_window": True, "sliding_window": 8}, "junior.use_sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "junior.quantization_config={'quant_method': 'fp8'}"),
    ],
    ids=str,
)
def test_a_pair_that_does_not_fit_is_refused_with_the_reason(change: dict[str, Any], text: str) -> None:
    pair.require_fitting(SENIOR, JUNIOR)
    with pytest.raises(ModelError) as error:
        pair.require_fitting(SENIOR, {**JUNIOR, **change})
    assert text in str(error.value)
    assert "two servers" in str(error.value)


@pytest.mark.parametrize("role", ["senior", "junior"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn': expected an object or null"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]: expected an object or null"),
        ({"num_attention_heads": 3}, "num_attention_heads='3 for 2 KV heads': expected a multiple"),
    ],
    ids=str,
)
def test_a_config_with_odd_values_is_refused_by_name(role: str, change: dict[str, Any], text: str) -> None:
    configs = {"senior": SENIOR, "junior": JUNIOR}
    configs[role] = {**configs[role], **change}
    with pytest.raises(ModelError, match=rf"{role}\.{text}"):
        pair.require_fitting(configs["senior"], configs["junior"])


@pytest.mark.parametrize("role", ["senior", "junior"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", None), ("vocab_size", "100"), ("num_hidden_layers", None), ("num_hidden_layers", 0),
        ("num_attention_heads", None), ("num_attention_heads", True), ("num_key_value_heads", -2),
        ("head_dim", "16"), ("max_position_embeddings", 1.5),
    ],
)  # fmt: skip
def test_a_config_without_its_sizes_is_refused_by_name(role: str, name: str, value: object) -> None:
    configs = {"senior": SENIOR, "junior": JUNIOR}
    configs[role] = {**configs[role], name: value}
    with pytest.raises(ModelError, match=rf"{role}\.{name}={value!r}: expected a whole number above 0"):
        pair.require_fitting(configs["senior"], configs["junior"])


@pytest.mark.parametrize(
    ("senior", "junior", "limit"),
    [
        ({}, {}, None),
        ({"max_position_embeddings": 512}, {}, None),
        ({"max_position_embeddings": 256}, {"max_position_embeddings": 512}, None),
        ({"max_position_embeddings": 512}, {"max_position_embeddings": 256}, 256),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": 4.0}}, {"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"factor": 4.0, "rope_type": "llama3"}},
         {"max_position_embeddings": 512}, None),
    ],
)  # fmt: skip
def test_a_junior_with_a_shorter_context_bounds_the_engine(
    senior: dict[str, Any], junior: dict[str, Any], limit: int | None
) -> None:
    found = pair.context_length({**SENIOR, **senior}, {**JUNIOR, **junior})
    assert found == limit
    assert launch.default_flags(cuda=True, context=found).get("--context-length") == (limit and str(limit))


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ModelError, match=r"senior\.model_type='gemma3'"):
        pair.require_fitting({**SENIOR, "model_type": "gemma3"}, JUNIOR)


def test_the_override_sizes_the_pool_for_both_models(tmp_path: Path) -> None:
    args = launch.override_args(SENIOR, JUNIOR, junior_folder=tmp_path, tables=tmp_path / "t.npy", tables_sha256="ab")
    assert args["architectures"] == ["TandemQwen3ForCausalLM"]
    assert args["num_hidden_layers"] == len(args["layer_types"]) == 8
    assert args["tandem"]["senior_layers"] == 3
    assert args["tandem"]["junior"]["num_hidden_layers"] == 5
    assert json.loads(json.dumps(args)) == args
    assert args["tandem"]["catch_up"] is None
    files: dict[str, Any] = {"junior_folder": None, "tables": tmp_path / "t.npy", "tables_sha256": "ab"}
    bounds = {"budget": 3}
    assert launch.override_args(SENIOR, JUNIOR, **files, catch_up=bounds)["tandem"]["catch_up"] == bounds
    with pytest.raises(ModelError, match=r"senior\.head_dim=24: expected a power of two"):
        launch.override_args({**SENIOR, "head_dim": 24}, {**JUNIOR, "head_dim": 24}, **files, catch_up={})
    llama = launch.override_args(
        {**SENIOR, "model_type": "llama"}, {**JUNIOR, "model_type": "llama"}, junior_folder=None,
        tables=tmp_path / "t.npy", tables_sha256="ab",
    )  # fmt: skip
    assert "layer_types" not in llama


def test_tables_are_written_as_they_are_named(tmp_path: Path) -> None:
    sets = [frozenset({3, 99}), frozenset({1})]
    digest = launch.write_tables(tmp_path / "t.npy", sets, 100)
    rows = np.load(tmp_path / "t.npy", allow_pickle=False)
    assert rows.shape == (3, 100)
    assert not rows[0].any()
    assert [frozenset(np.flatnonzero(r).tolist()) for r in rows[1:]] == sets
    assert len(digest) == 64
    assert table_fingerprint(sets[0]) != table_fingerprint(sets[1])
    with pytest.raises(ConfigError, match="boundary ids=\\[100\\]"):
        launch.write_tables(tmp_path / "t.npy", [frozenset({100})], 100)


def test_a_missing_python_and_a_python_without_sglang_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.PYTHON_ENV, raising=False)
    with pytest.raises(ConfigError, match=launch.PYTHON_ENV):
        launch.sglang_python()
    with pytest.raises(ConfigError, match="a Python with SGLang"):
        launch.preflight(sys.executable)


def fake_python(folder: Path, answer: str) -> str:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\necho '{answer}'\n")
    file.chmod(0o755)
    return str(file)


def test_an_unknown_version_needs_the_users_word(tmp_path: Path) -> None:
    python = fake_python(tmp_path, json.dumps({"version": "9.9.9", "cuda": False}))
    with pytest.raises(ConfigError, match=r"SGLang version='9\.9\.9'.*allow-unknown-version"):
        launch.preflight(python)
    assert launch.preflight(python, allow_unknown_version=True)["version"] == "9.9.9"
    known = fake_python(tmp_path, json.dumps({"version": internals.KNOWN_VERSIONS[0], "cuda": True}))
    assert launch.preflight(known)["cuda"] is True


def test_the_environment_names_our_models_and_keeps_the_users(tmp_path: Path) -> None:
    env = launch.environment({"A": "1", "PYTHONPATH": "/x"}, cuda=False)
    assert env["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "slime_tandem.engines.fused.models"
    assert env["PYTHONPATH"].split(os.pathsep)[1:] == ["/x"]
    assert (Path(env["PYTHONPATH"].split(os.pathsep)[0]) / "slime_tandem" / "engines").is_dir()
    assert (env["A"], env["SGLANG_USE_CPU_ENGINE"]) == ("1", "1")
    assert "SGLANG_USE_CPU_ENGINE" not in launch.environment({}, cuda=True)


def test_the_list_of_internals_finds_what_has_moved() -> None:
    found = internals.missing(
        (
            ("json", "dumps", ("obj", "skipkeys")),
            ("json", "dumps", ("gone_parameter",)),
            ("json", "gone_function", ()),
            ("no_such_module_at_all", "x", ()),
            ("slime_tandem.protocol", "GenerateRequest", ("rid", "gone_field")),
        )
    )
    assert [text.split(" ")[0] for text in found] == [
        "json.dumps", "json.gone_function", "no_such_module_at_all.x", "slime_tandem.protocol.GenerateRequest",
    ]  # fmt: skip
    assert "gone_parameter" in found[0]
    assert "gone_field" in found[3]
    assert "rid" not in found[3].split("longer")[1]
