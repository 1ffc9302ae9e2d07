"""Models that are only served: their sizes by hand, from folders with a config.json alone, an index, or weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime_tandem.config import ServedModel
from slime_tandem.errors import ConfigError, ModelError
from slime_tandem.slime_launch.served import Served, served

HOW = ServedModel()
TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LINEAR = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {**TINY, "num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 4, "sliding_window": 32},
    "gemma3_text": {**TINY, "num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 8, "sliding_window": 16},
    "gemma3": {
        "text_config": {**TINY, "num_key_value_heads": 2, "intermediate_size": 32, "head_dim": 8, "model_type": "gemma3_text"},
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "qwen3_moe": {
        **TINY, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 32, "moe_intermediate_size": 8, "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        **TINY, "num_key_value_heads": 2, "head_dim": 4, "moe_intermediate_size": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8, **LINEAR,
    },
    "qwen3_5_text": {**TINY, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 32, **LINEAR},
    "qwen3_5": {
        "text_config": {
            **TINY, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 32, **LINEAR, "model_type": "qwen3_5_text",
        },
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
            "num_position_embeddings": 16,
        },
    },
    "gpt_oss": {
        **TINY, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 16,
    },
    "glm4_moe": {
        **TINY, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 32, "moe_intermediate_size": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    },
    "deepseek_v3": {
        **TINY, "intermediate_size": 32, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 12, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    },
}  # fmt: skip
CLASSES = {
    "mistral": "MistralForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration", "gpt_oss": "GptOssForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip
KV = {  # bytes of a token on one GPU: layers x KV heads x head size x (key, value) x 2 bytes
    "mistral": 4 * 2 * 4 * 4, "gemma3_text": 4 * 2 * 8 * 4, "gemma3": 4 * 2 * 8 * 4, "qwen3_moe": 4 * 2 * 4 * 4,
    "qwen3_next": 1 * 2 * 4 * 4, "qwen3_5_text": 1 * 2 * 4 * 4, "qwen3_5": 1 * 2 * 4 * 4, "gpt_oss": 4 * 2 * 4 * 4,
    "glm4_moe": 4 * 2 * 4 * 4, "deepseek_v3": 4 * (12 + 4) * 2,
}  # fmt: skip


def folder_of(path: Path, kind: str, **more: Any) -> Path:
    path.mkdir(exist_ok=True)
    tree = {
        "model_type": kind,
        "architectures": [CLASSES.get(kind, "SomeonesForCausalLM")],
        **CONFIGS.get(kind, {}),
        **more,
    }
    (path / "config.json").write_text(json.dumps(tree))
    return path


def asked(folder: Path, how: ServedModel = HOW) -> Served:
    return served(str(folder), how, field="serving.teacher")


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_architecture_that_a_server_knows_has_a_size(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    folder = folder_of(tmp_path / "model", kind)
    found = asked(folder)
    assert (found.heads, found.max_positions) == (4, 256)
    assert found.kv_per_token(1) == KV[kind]
    assert found.kv_per_token(4) == (KV[kind] if kind == "deepseek_v3" else KV[kind] // 2), (
        "two KV heads, latents are whole"
    )
    whole = AutoModelForImageTextToText if "vision_config" in CONFIGS[kind] else AutoModelForCausalLM
    model = whole.from_config(AutoConfig.from_pretrained(folder))
    assert found.weights == 2 * sum(p.numel() for p in model.parameters())
    assert any("counted from config.json" in note for note in found.notes)
    assert any("text model alone" in note for note in found.notes) == (kind == "qwen3_5_text")
    estimated = {"mistral", "gemma3_text", "gemma3", "gpt_oss"}
    assert any("upper bound" in note for note in found.notes) == (kind in estimated)
    assert (found.kv_share < 1) == (kind in ("qwen3_next", "qwen3_5_text", "qwen3_5"))


def test_weights_are_those_of_the_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "mistral")
    fp8 = torch.zeros(6, 2).to(torch.float8_e4m3fn)
    save_file(
        {"a": torch.zeros(10), "b": torch.zeros(3, 2, dtype=torch.bfloat16), "c": fp8}, folder / "model.safetensors"
    )
    found = asked(folder)
    assert found.weights == 2 * 10 + 2 * 6 + 12, "floating point numbers as served, quantized ones as stored"
    assert not any("weights" in note for note in found.notes)
    assert asked(folder, ServedModel(dtype="float32")).weights == 4 * 16 + 12
    assert any("smaller" in note for note in asked(folder, ServedModel(quantization="fp8")).notes)
    (folder / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match="a whole safetensors file"):
        asked(folder)


def test_an_index_alone_says_how_large_the_weights_are(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "someones_model", num_hidden_layers=2, num_attention_heads=4, hidden_size=16)
    index = {"metadata": {"total_size": 12345}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = asked(folder)
    assert (found.weights, found.kv_per_token(1)) == (12345, 2 * 4 * 4 * 4), "a kind that transformers does not know"
    assert any("index" in note for note in found.notes)
    save_file({"a": torch.zeros(7)}, folder / "model-00001-of-00001.safetensors")
    assert asked(folder).weights == 14
    index["weight_map"] = {"a": "model-00001-of-00001.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors'.* Remedy: fetch the shard"):
        asked(folder)  # half a download is no model


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 0},
        {"text_config": {"vocab_size": -1}},
        {"max_position_embeddings": 0},
    ],
    ids=lambda c: str(c)[:30],
)
def test_a_number_that_is_no_size_is_refused_before_anybody_builds_with_it(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "model", "mistral", **changes)
    with pytest.raises(ModelError, match=r"expected 1 to \d+"):
        asked(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": None}, r"model_type=None: expected .*The checkpoint you are trying to load"),
        ({"num_hidden_layers": "4"}, r"'num_hidden_layers' expected int, got str \(value: '4'\)"),
        ({"layer_types": ["full_attention"]}, r"`num_hidden_layers` \(4\) must be equal"),
        ({"text_config": [1]}, "'list' object has no attribute"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"Missing required keys in `rope_parameters`.*factor"),
        ({"rope_theta": "1e6"}, "unsupported operand"),
        ({"quantization_config": [1]}, "'list' object has no attribute"),
        ({"dtype": "float7"}, "float7"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_a_config_that_transformers_does_not_load_is_refused_with_its_reason(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "a b's", "mistral", **changes)
    with pytest.raises(ModelError, match=said) as caught:
        asked(folder)
    assert "\n" not in str(caught.value)
    assert "set serving.teacher.weights_gib" in str(caught.value)
    assert asked(folder, ServedModel(weights_gib=0.5, kv_bytes_per_token=10)).weights == 2**29, "SGLang may know it"


@pytest.mark.parametrize("names", [None, [], "MistralForCausalLM", [None], [""]], ids=str)
def test_a_config_without_the_names_of_its_classes_is_refused(names: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json architectures=.*: expected names of the model's classes"):
        asked(folder_of(tmp_path / "model", "mistral", architectures=names))


def test_a_latents_size_that_is_no_number_is_none(tmp_path: Path) -> None:
    how = ServedModel(weights_gib=0.5)
    folder = folder_of(tmp_path / "model", "someones_model", num_hidden_layers=4, kv_lora_rank=12, qk_rope_head_dim="x")
    assert asked(folder, how).kv_per_token(1) == 4 * 12 * 2


def test_older_names_of_a_quantization_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "mistral", compression_config={"quant_method": "compressed-tensors"})
    with pytest.raises(ModelError, match=r"compression_config\.quant_method='compressed-tensors': expected weights or"):
        asked(folder)


def test_configs_of_other_shapes(tmp_path: Path) -> None:
    plain = asked(folder_of(tmp_path / "a", "qwen3_moe"))
    # Written by some tools; and a dtype that no tensor of ours has.
    same = folder_of(tmp_path / "b", "qwen3_moe", quantization_config=None, dtype="float8_e4m3fn")
    assert asked(same).weights == plain.weights
    # Of a model with other senses, which transformers loads by another class.
    inner = {**CONFIGS["qwen3_moe"], "model_type": "qwen3_vl_moe_text"}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    nested = asked(folder_of(tmp_path / "c", "qwen3_vl_moe", text_config=inner, vision_config=vision))
    assert nested.weights > plain.weights
    assert (nested.heads, nested.kv_per_token(1)) == (4, KV["qwen3_moe"])


@pytest.mark.parametrize(
    ("config", "missing"), [({}, "weights_gib"), ({"num_hidden_layers": 2}, "weights_gib"), ({}, "kv_bytes_per_token")]
)
def test_what_nobody_tells_is_asked_for(config: dict[str, Any], missing: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "someones_model", **config)
    how = ServedModel(weights_gib=1.0) if missing == "kv_bytes_per_token" else HOW
    with pytest.raises(ModelError, match=rf"set serving\.teacher\.{missing}"):
        asked(folder, how)
    found = asked(folder, ServedModel(weights_gib=0.5, kv_bytes_per_token=100, context_length=77))
    assert (found.weights, found.kv_per_token(8), found.max_positions) == (2**29, 100, 77)


def quantized(path: Path, method: str, **config: Any) -> Path:
    """gpt-oss's form: experts stored in another format, and the config says which."""
    return folder_of(path, "gpt_oss", quantization_config={"quant_method": method}, **config)


def test_quantized_weights_without_files_are_the_reason_that_is_named(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "model", "mxfp4")
    with pytest.raises(
        ModelError, match=r"quantization_config\.quant_method='mxfp4': expected weights or their index.*weights_gib"
    ):
        asked(folder)
    assert asked(folder, ServedModel(weights_gib=0.5)).weights == 2**29
    index = {"metadata": {"total_size": 999}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert asked(folder).weights == 999


def test_a_quantization_that_no_engine_reads_is_refused_by_name(tmp_path: Path) -> None:
    whole, fp8 = folder_of(tmp_path / "whole", "mistral"), quantized(tmp_path / "fp8", "fp8")
    size = {"weights_gib": 0.5}
    with pytest.raises(
        ConfigError, match=r"serving\.teacher\.quantization='fp9': expected one of SGLang's: auto-round, .*"
    ):
        asked(whole, ServedModel(quantization="fp9"))
    assert any("fp8 makes them smaller" in note for note in asked(whole, ServedModel(quantization="fp8")).notes)
    with pytest.raises(
        ModelError, match=r"quantization_config\.quant_method='hqq': expected a quantization that SGLang"
    ):
        asked(quantized(tmp_path / "hqq", "hqq"), ServedModel(**size))
    with pytest.raises(
        ConfigError, match=r"serving\.teacher\.quantization='mxfp4': expected fp8, by which its weights"
    ):
        asked(fp8, ServedModel(quantization="mxfp4", **size))
    for method, setting in (
        ("fp8", "FP8"),
        ("awq", "awq_marlin"),
        ("compressed-tensors", "w8a8_fp8"),
        ("modelopt", "modelopt_fp4"),
    ):
        folder = quantized(tmp_path / setting, method)
        assert asked(folder, ServedModel(quantization=setting, **size)).weights == 2**29


def test_sglang_knows_every_quantization_of_the_list() -> None:
    from slime_tandem.slime_launch.served import _BY_FILE, _BY_SETTING

    python = os.environ.get("SLIME_TANDEM_SGLANG_PYTHON")
    if not python:
        pytest.skip("SLIME_TANDEM_SGLANG_PYTHON is not set (scripts/sglang_cpu.sh)")
    code = "import json; from sglang.srt import server_args as a; from sglang.srt.layers import quantization as q; "
    code += "print(json.dumps([a.QUANTIZATION_CHOICES, [*q.QUANTIZATION_METHODS]]))"
    done = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    choices, methods = json.loads(done.stdout.splitlines()[-1])
    assert set(choices) >= _BY_SETTING
    elsewhere = {"modelslim", "mxfp_w4a8", "mlx_q4", "mlx_q8"}  # other makers' cards
    assert set(choices) - _BY_SETTING <= elsewhere
    assert set(methods) - elsewhere <= _BY_SETTING | _BY_FILE
