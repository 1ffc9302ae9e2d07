from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slime_tandem.errors import ModelError
from slime_tandem.megatron import core
from slime_tandem.megatron.architecture import architecture_of, hf_shapes, load_hf_config
from slime_tandem.megatron.weights import (
    build_model,
    hf_to_megatron,
    inverse_frequencies,
    load_hf_folder,
    load_weights,
    megatron_to_hf,
    transformer_config_from_hf,
)

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_of(kind: str, **changes: Any) -> Any:
    sizes = {
        "vocab_size": 53,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    if kind == "qwen3":
        sizes["head_dim"] = 16  # unlike hidden_size / heads: the projection is wider than the stream
    return CONFIGS[kind](**{**sizes, **changes})


def hf_model(config: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms start at one and biases at zero: a mix-up of equal tensors would not be seen.
                if name.endswith("bias") or parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.mul_(5)
    return model


@pytest.fixture(autouse=True, scope="module")
def _megatron() -> Iterator[None]:
    core.ensure_initialized(0)
    yield
    core.shutdown()


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_equal_transformers(kind: str, tied: bool, kv_heads: int) -> None:
    config = config_of(kind, tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    hf = hf_model(config)
    model = build_model(config)
    load_weights(model, hf.state_dict(), config)
    tokens = torch.randint(0, 53, (3, 21), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = hf(tokens).logits
        found = model(tokens, torch.arange(21).expand(3, -1), None)
    assert expected.std() > 0.3, "a flat model would make this test blind"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_logits_equal_transformers_with_llama3_scaling_past_its_original_length() -> None:
    config = config_of("llama", rope_parameters=LLAMA3_ROPE)
    hf = hf_model(config)
    model = build_model(config)
    load_weights(model, hf.state_dict(), config)
    tokens = torch.randint(0, 53, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, torch.arange(100)[None], None), hf(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 10000.0}, {"rope_type": "default", "rope_theta": 1e6}, LLAMA3_ROPE]
)
def test_inverse_frequencies_are_bitwise_those_of_transformers(rope: dict[str, Any]) -> None:
    config = config_of("llama", rope_parameters=rope)
    assert torch.equal(inverse_frequencies(config), LlamaRotaryEmbedding(config).inv_freq)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_round_trip_bit_for_bit(kind: str, tied: bool, dtype: torch.dtype) -> None:
    config = config_of(kind, tie_word_embeddings=tied)
    weights = {k: v.to(dtype) for k, v in hf_model(config).state_dict().items() if not (tied and k == "lm_head.weight")}
    back = megatron_to_hf(hf_to_megatron(weights, config), config)
    assert back.keys() == weights.keys() == hf_shapes(architecture_of(config)).keys()
    for name, tensor in weights.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], tensor), name
        assert back[name].is_contiguous()
    pointers = [tensor.untyped_storage().data_ptr() for tensor in back.values()]
    assert len(set(pointers)) == len(pointers)


def test_converted_names_are_the_models_own() -> None:
    for kind in CONFIGS:
        config = config_of(kind)
        converted = hf_to_megatron(hf_model(config).state_dict(), config)
        shapes = {name: tuple(p.shape) for name, p in build_model(config).named_parameters()}
        assert {name: tuple(t.shape) for name, t in converted.items()} == shapes


def test_transformer_config() -> None:
    config = transformer_config_from_hf(config_of("qwen3"))
    assert (config.kv_channels, config.num_query_groups, config.qk_layernorm) == (16, 2, True)
    assert (config.add_qkv_bias, config.hidden_dropout, config.attention_dropout) == (False, 0.0, 0.0)
    assert transformer_config_from_hf(config_of("qwen2")).add_qkv_bias


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='yarn'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='linear'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
    ],
)
def test_what_the_model_would_not_do_is_refused(kind: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError, match=field) as caught:
        architecture_of(config_of(kind, **changes))
    assert "Remedy: " in str(caught.value)


def test_another_family_is_refused() -> None:
    from transformers import GPT2Config

    with pytest.raises(ModelError, match=r"config.json model_type='gpt2': expected one of llama, qwen2, qwen3"):
        architecture_of(GPT2Config())


def test_missing_unknown_and_misshapen_weights_are_named() -> None:
    config = config_of("llama")
    weights = hf_model(config).state_dict()
    with pytest.raises(ModelError, match=r"1 missing: model\.norm\.weight"):
        hf_to_megatron({k: v for k, v in weights.items() if k != "model.norm.weight"}, config)
    with pytest.raises(ModelError, match=r"1 unknown: model\.layers\.0\.self_attn\.q_proj\.bias"):
        hf_to_megatron({**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, config)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight=\(54, 32\): expected shape \(53, 32\)"):
        hf_to_megatron({**weights, "model.embed_tokens.weight": torch.zeros(54, 32)}, config)


def test_extra_entries_of_old_checkpoints() -> None:
    config = config_of("llama", tie_word_embeddings=True)
    weights = dict(hf_model(config).state_dict())
    plain = {k: v for k, v in weights.items() if k != "lm_head.weight"}
    extra = {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert hf_to_megatron(extra, config).keys() == hf_to_megatron(plain, config).keys()
    with pytest.raises(ModelError, match=r"tie_word_embeddings=True: expected lm_head\.weight equal"):
        hf_to_megatron({**plain, "lm_head.weight": plain["model.embed_tokens.weight"] + 1}, config)


def test_folder_in_one_file_and_in_shards(tmp_path: Path) -> None:
    model = hf_model(config_of("qwen2"))
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    one, shards = load_hf_folder(tmp_path / "one"), load_hf_folder(tmp_path / "shards")
    assert one.keys() == shards.keys() == model.state_dict().keys()
    assert all(torch.equal(one[k], shards[k]) for k in one)
    assert load_hf_config(tmp_path / "one").model_type == "qwen2"


def test_incomplete_and_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a folder with config\.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="expected a file with one JSON object"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(ModelError, match="no_such_family"):
        load_hf_config(tmp_path)

    with pytest.raises(ModelError, match="Remedy: fetch the weights"):
        load_hf_folder(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickles are not read"):
        load_hf_folder(tmp_path)

    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelError, match="expected a whole safetensors file"):
        load_hf_folder(tmp_path)


def test_damaged_index(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors").keys() == {"a"}
    for text, message in (
        ("[]", "a safetensors index"),
        ("{", "a safetensors index"),
        (json.dumps({"weight_map": {"a": "gone.safetensors"}}), "fetch the shard"),
        (json.dumps({"weight_map": {"a": "../x.safetensors"}}), "a file beside the index"),
        (json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}), "weights that are in the shards"),
    ):
        index.write_text(text)
        with pytest.raises(ModelError, match=message):
            load_hf_folder(tmp_path)
