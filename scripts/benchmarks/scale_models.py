#!/usr/bin/env python3
"""Model folders of published dimensions with random weights, for benchmarks at real size.

    scale_models.py TOKENIZERS [OUT ROLE=SIZE,ROLE=SIZE~AMOUNT,...]

`TOKENIZERS` holds folders `qwen3` and `llama3`, each with a fast tokenizer and a chat template; without OUT they are made, from
the vocabularies of scripts/fetch_vocabularies.py. A list is for example senior=qwen3-4b,junior=qwen3-0.6b,teacher=llama-3b.
SIZE~AMOUNT, for a role of the senior's own size, makes it from the senior's weights: each matrix plus noise of AMOUNT times its
own standard deviation, so that candidate lists overlap as much as one wants.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "llama-3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "qwen3-tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 16},
    "qwen3-small": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 32},
    "llama-tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8},
}
ROWS = {"qwen3": 151936, "llama": 128256}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def make_tokenizers(out: Path) -> None:
    """Folders qwen3 and llama3 from the cached vocabularies."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import vocabularies
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern, special, _ = vocabularies.RANK_FILES["qwen"]
    names = [name for name, _ in sorted(special.items(), key=lambda item: item[1])]
    qwen = TikTokenConverter(
        vocab_file=str(vocabularies.cache_dir() / "qwen.tiktoken"), pattern=pattern, extra_special_tokens=names
    ).converted()
    for name, backend, template, eos in (
        ("qwen3", qwen, CHATML, "<|im_end|>"),
        ("llama3", Tokenizer.from_file(str(vocabularies.cache_dir() / "llama3.tokenizer.json")), HEADERS, "<|eot_id|>"),
    ):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=eos)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(out / name)


def make_model(tokenizer: Path, folder: Path, size: str, seed: int, senior: Path | None, near: float | None) -> None:
    """One folder, made on the GPU where there is one. Random weights draw an end of turn once in 150,000 tokens."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen3Config

    kind = size.partition("-")[0]
    eos = 151645 if kind == "qwen3" else 128009
    c = SIZES[size]
    common = {
        **c, "vocab_size": ROWS[kind], "num_key_value_heads": 8, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "eos_token_id": eos, "bos_token_id": None, "head_dim": 128,
    }  # fmt: skip
    config = (Qwen3Config if kind == "qwen3" else LlamaConfig)(**common)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    with torch.device(device):
        if near is not None:
            assert senior is not None
            model = AutoModelForCausalLM.from_pretrained(senior, dtype=torch.bfloat16).to(device)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p) * (near * p.float().std()))
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=eos)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tokenizers", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("sizes", nargs="?", default="")
    a = parser.parse_args()
    if a.out is None:
        make_tokenizers(a.tokenizers)
        return
    for seed, item in enumerate(a.sizes.split(",")):
        role, _, size = item.partition("=")
        size, _, near = size.partition("~")
        tokenizer = a.tokenizers / ("qwen3" if size.startswith("qwen3") else "llama3")
        if not (a.out / role / "config.json").exists():
            make_model(tokenizer, a.out / role, size, seed, a.out / "senior", float(near) if near else None)


if __name__ == "__main__":
    main()
