"""Models for benchmarks: folders with the dimensions of published models and no weights, and tiny random pairs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

SIZES = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8},
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "rope_scaling": None, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip


def make_folder(folder: Path, size: str, tokenizer: Path) -> dict[str, Any]:
    """A model folder without weights, with the tokenizer files of another; returns its config."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".bin")) and file.name != "config.json":
            shutil.copy(file, folder / file.name)
    config = {**QWEN3, **SIZES[size], "max_window_layers": SIZES[size]["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return config


def tiny_pair(root: Path, *, context: int, eos: bool, vocab_size: int = 330, seed: int = 0) -> Path:
    """Two tiny random models in `root`, senior and junior, that share a byte-level tokenizer; returns the senior's folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["the cat sat on a mat and then it ran to the old barn\n\nwhere nobody knew"] * 3, trainer
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for number, role in enumerate(("senior", "junior")):
        torch.manual_seed(seed + number)
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=context, eos_token_id=0 if eos else None,
            bos_token_id=None,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(root / role)
        tokenizer.save_pretrained(root / role)
    return root / "senior"
