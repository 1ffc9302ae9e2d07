"""Tiny random models with a small byte-level tokenizer, and one running server."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from slime_tandem.engines.embedded.runner import Job, Output, Runner
from slime_tandem.models.hf import load_model, quiet_transformers

from ..in_process import ThreadServer

BOS, EOS = 0, 1
VOCAB = 304
CONTEXT = 256
TEXT = ["the cat sat on the mat and counted: 1 + 2 = 3, then it slept.", "words and more words, naïve café"] * 20


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(folder)


def save_model(folder: Path, config: Any, seed: int) -> None:
    quiet_transformers()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Enough to tell tokens apart; at 0.3 float32 itself is off by 1e-5.
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def tiny_config(kind: str, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": kind == "qwen3",
    }
    if kind == "qwen3":
        return Qwen3Config(**{**sizes, "head_dim": 16, **changes})
    return LlamaConfig(**{**sizes, **changes})


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: llama, other (llama of the same shape, other weights), qwen3."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    for i, (name, kind) in enumerate({"llama": "llama", "other": "llama", "qwen3": "qwen3"}.items()):
        made[name] = root / name
        save_model(made[name], tiny_config(kind), seed=i)
        save_tokenizer(made[name])
    return made


@dataclass
class Reference:
    """Direct forward passes of transformers."""

    model: Any

    def log_probs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[len(ids), V]: row i predicts token i + 1."""
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float() / temperature, dim=-1)


@pytest.fixture(scope="session")
def references(folders: dict[str, Path]) -> dict[str, Reference]:
    return {name: Reference(load_model(folder)) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def server(folders: dict[str, Path]) -> Iterator[ThreadServer]:
    """A running server of the llama model; tests leave its weights as they were."""
    with ThreadServer(folders["llama"], max_batch=32) as running:
        yield running
        assert running.is_alive()


JobFactory = Callable[..., Job]
Run = Callable[[Runner, list[Job]], list[Output]]


@pytest.fixture
def make_job() -> JobFactory:
    """Makes jobs with neutral settings: sampled at temperature 1 with seed 7, no stops, output log-probs only."""

    def make(ids: list[int], max_new_tokens: int, **changes: Any) -> Job:
        settings: dict[str, Any] = {
            "rid": "job",
            "input_ids": np.array(ids, dtype=np.int64),
            "max_new_tokens": max_new_tokens,
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1.0,
            "min_p": 0.0,
            "seed": 7,
            "stop_mask": np.zeros(VOCAB, np.bool_),
            "stop": (),
            "stop_regex": (),
            "return_logprob": True,
            "logprob_start": len(ids),
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
        }
        return Job(**{**settings, **changes})

    return make


@pytest.fixture
def run_jobs() -> Run:
    """Submits jobs as one unit and runs until idle; answers in order."""

    def run(runner: Runner, jobs: list[Job]) -> list[Output]:
        runner.submit(jobs)
        found = {}
        while runner.busy:
            found.update({id(job): output for job, output in runner.step()})
        return [found[id(job)] for job in jobs]

    return run


RunnerFactory = Callable[..., Runner]


@pytest.fixture
def make_runner(folders: dict[str, Path]) -> RunnerFactory:
    """Runners whose tokenizer writes id i as the single letter chr(0x4E00 + i), so that texts are easy to foresee."""

    def make(name: str = "llama", *, max_batch: int = 16, cache_tokens: int = 2048, dtype: str = "float32") -> Runner:
        return Runner(
            load_model(folders[name], dtype),
            lambda lists: ["".join(chr(0x4E00 + i) for i in ids) for ids in lists],
            max_batch=max_batch,
            cache_tokens=cache_tokens,
            weight_version="v0",
        )

    return make


@pytest.fixture
def model_copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a model folder that a test may damage."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folders[name], tmp_path / f"copy-{name}"))

    return copy
