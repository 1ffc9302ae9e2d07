"""The trainable (or frozen) policy: a Megatron GPTModel with AdamW, response-only logits, HF export and checkpoints.

Weights, gradients and optimizer state are float32, so the parameters are their own master weights. One process, one device.
What a checkpoint's folder holds and how it is read safely is `checkpoint.py`'s; when one is written is the run's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slime_tandem.config import OptimizerConfig
from slime_tandem.errors import DataError, TandemError
from slime_tandem.megatron.architecture import architecture_of, load_hf_config
from slime_tandem.megatron.checkpoint import read_state, read_tensors, replacing, unusable, write_checkpoint
from slime_tandem.megatron.core import (
    GPTModel,
    ShardedObject,
    device,
    ensure_initialized,
    make_sharded_optimizer_tensor,
)
from slime_tandem.megatron.weights import StateDict, build_model, load_hf_folder, load_weights, megatron_to_hf

_MOMENTS = ("exp_avg", "exp_avg_sq")
# What a Hugging Face folder needs beside weights and config; the rest (README, other formats' weights) is not copied.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


class MegatronPolicy:
    """A policy on `device`, built by `from_hf`; without an optimizer it only computes logits and its weights are frozen."""

    def __init__(self, model: GPTModel, hf_config: Any, source: Path, optimizer: OptimizerConfig | None) -> None:
        self.model, self.hf_config, self.source, self.settings = model, hf_config, source, optimizer
        self.architecture = architecture_of(hf_config)
        self.device = next(model.parameters()).device
        self.steps = 0
        self.optimizer = None if optimizer is None else _adamw(model, optimizer)
        model.requires_grad_(optimizer is not None)
        model.train(optimizer is not None)

    @classmethod
    def from_hf(
        cls,
        folder: str | Path,
        optimizer: OptimizerConfig | None,
        *,
        trust_remote_code: bool = False,
        threads: int | None = None,
        checkpointed: bool = False,
    ) -> MegatronPolicy:
        """Load a local Hugging Face folder; `optimizer=None` gives a frozen reference policy.

        `threads` sets torch's threads for the whole process; `checkpointed`: gradient checkpointing, equal gradients in less
        memory and more time. Raises ModelError for a folder without a supported config or
        without whole weights.
        """
        source = Path(folder)
        hf_config = load_hf_config(source, trust_remote_code)
        architecture_of(hf_config)
        weights = load_hf_folder(source)
        if threads is not None:
            torch.set_num_threads(threads)
        ensure_initialized(seed=0)
        model = build_model(hf_config, checkpointed=checkpointed)
        load_weights(model, weights, hf_config)
        return cls(model.to(device()), hf_config, source, optimizer)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[B, S, V]` of right-padded `tokens` `[B, S]`; attention is causal, so padding changes no earlier row."""
        return self._output(self._hidden(tokens.to(self.device))).transpose(0, 1)

    def response_logits(self, sequences: Sequence[Sequence[int]], response_lengths: Sequence[int]) -> torch.Tensor:
        """Logits `[T, V]` over the response tokens of a micro-batch, T = sum of `response_lengths`.

        `sequences` are prompt + response ids; row i predicts the i-th response token, sequences in order. The output layer
        runs on these rows alone. Raises DataError for an empty batch, an id outside the vocabulary, or a response that
        leaves no prompt token before it.
        """
        tokens, rows = self._pack(sequences, response_lengths)
        hidden = self._hidden(tokens)
        return self._output(hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows))

    def _pack(
        self, sequences: Sequence[Sequence[int]], response_lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not sequences or len(sequences) != len(response_lengths):
            counts = (len(sequences), len(response_lengths))
            raise DataError("sequences, response_lengths", counts, "equal counts above 0", "check the batch")
        B, S = len(sequences), max(len(sequence) for sequence in sequences)
        tokens = torch.zeros(B, S, dtype=torch.long)
        rows = []
        for b, (sequence, R) in enumerate(zip(sequences, response_lengths, strict=True)):
            if not 0 <= R < len(sequence):
                raise DataError(
                    f"response_lengths[{b}]", R, f"0 to {len(sequence) - 1}", "keep at least one prompt token"
                )
            tokens[b, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
            # Position p of sequence b is row p * B + b of Megatron's [S, B, H]; position p predicts token p + 1.
            rows.append(torch.arange(len(sequence) - R - 1, len(sequence) - 1) * B + b)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.architecture.vocab_size:
            bound = f"ids in [0, {self.architecture.vocab_size})"
            raise DataError("sequences", (low, high), bound, "tokenise with this model's tokenizer")
        return tokens.to(self.device), torch.cat(rows).to(self.device)

    def _hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        # [B, S] -> [S, B, H]: GPTModel.forward (models/gpt/gpt_model.py:478) up to the output layer.
        B, S = tokens.shape
        positions = torch.arange(S, device=tokens.device).expand(B, S)
        embedded = self.model.embedding(input_ids=tokens, position_ids=positions)
        hidden = self.model.decoder(
            hidden_states=embedded, attention_mask=None, rotary_pos_emb=self.model.rotary_pos_emb(S)
        )
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def _output(self, rows: torch.Tensor) -> torch.Tensor:
        tied = self.model.share_embeddings_and_output_weights
        logits, _ = self.model.output_layer(
            rows, weight=self.model.shared_embedding_or_output_weight() if tied else None
        )
        assert isinstance(logits, torch.Tensor)
        return logits

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.model.zero_grad(set_to_none=True)

    def step(self) -> float:
        """Clip, apply one AdamW update at the scheduled learning rate, and return the gradient norm before clipping.

        Raises TandemError, with weights and optimizer state untouched, if the norm is not finite.
        """
        assert self.optimizer is not None, "a frozen policy has no step"
        assert self.settings is not None
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        assert parameters, "no backward pass before step"
        norm_tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = float(norm_tensor)
        if norm != norm or norm in (float("inf"), float("-inf")):
            raise TandemError(
                "gradient norm", norm, "a finite number", "lower optimizer.lr, or look for extreme log-probs"
            )
        torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.grad_clip, norm_tensor)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(self.steps + 1)
        self.optimizer.step()
        self.steps += 1
        return norm

    @property
    def lr(self) -> float:
        """Learning rate of the latest step (before the first: of the first)."""
        return self._rate(max(1, self.steps))

    def _rate(self, step: int) -> float:
        # Of the `step`-th update, counted from 1: linear up to `settings.lr` at step `warmup_steps`, constant after it.
        assert self.settings is not None, "a frozen policy has no learning rate"
        return self.settings.lr * min(1.0, step / max(1, self.settings.warmup_steps))

    def hf_state_dict(self) -> StateDict:
        """A float32 copy of the weights under their Hugging Face names."""
        return megatron_to_hf(dict(self.model.named_parameters()), self.hf_config)

    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder: float32 safetensors, config, and the source folder's tokenizer files.

        Replaces `folder` as a whole: readers never see a half-written one. Raises CheckpointError if it cannot be written,
        leaving an older folder there as it was.
        """
        with replacing(Path(folder)) as partial:
            config = json.loads((self.source / "config.json").read_text(encoding="utf-8"))
            # transformers loads in the dtype written here; the source's may be narrower than these weights.
            config.pop("torch_dtype", None)
            config["dtype"] = "float32"
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name in COMPANIONS:
                if (self.source / name).is_file():
                    shutil.copyfile(self.source / name, partial / name)
            weights = {name: tensor.cpu() for name, tensor in self.hf_state_dict().items()}
            save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})

    def save_checkpoint(self, folder: str | Path, extra: Mapping[str, Any]) -> None:
        """Write weights, optimizer state and `extra` (JSON values); replaces `folder`.

        Raises CheckpointError, leaving an older checkpoint there as it was, if it cannot be written.
        """
        facts = {
            "step": self.steps,
            "trainable": self.optimizer is not None,
            "architecture": self.architecture.as_json(),
            "extra": dict(extra),
        }
        write_checkpoint(Path(folder), self._sharded_state(copied=False), facts)

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Take over weights, optimizer state and step count, and return `extra`; training then goes on bit for bit.

        A frozen policy takes the weights alone. Raises CheckpointError for a folder that is no checkpoint, is damaged, is
        of another architecture, or lacks the optimizer state; the policy is then as it was.
        """
        path = Path(folder)
        state = read_state(path)
        ours, theirs = self.architecture.as_json(), state.architecture
        for field in ours:
            if theirs.get(field) != ours[field]:
                raise unusable(path, f"{field}={theirs.get(field)!r}", f"{field}={ours[field]!r}, as in this model")
        if self.optimizer is not None and not state.trainable:
            raise unusable(path, "no optimizer state in it", "the checkpoint of a trainable policy")
        loaded = read_tensors(path, self._sharded_state(copied=True), set(state.files))
        self._take(loaded, state.step)
        return state.extra

    def _sharded_state(self, *, copied: bool) -> dict[str, Any]:
        # Megatron's own sharded description of its parameters, and of the moments after their parameters. Loading writes
        # into these tensors, so it asks for copies: a damaged file must not leave the live model half overwritten.
        described = described_parameters(self.model)

        def data(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().clone() if copied else tensor.detach()

        state: dict[str, Any] = {
            "model": {n: replace(sharded, data=data(sharded.data)) for n, sharded in described.items()}
        }
        if self.optimizer is not None:
            parameters = dict(self.model.named_parameters())
            state["optimizer"] = {
                moment: {
                    name: make_sharded_optimizer_tensor(
                        sharded, data(self.optimizer.state[parameters[name]][moment]), f"optimizer.state.{moment}"
                    )
                    for name, sharded in described.items()
                }
                for moment in _MOMENTS
            }
        return state

    def _take(self, loaded: Mapping[str, Any], steps: int) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(loaded["model"][name])
                if self.optimizer is not None:
                    for moment in _MOMENTS:
                        self.optimizer.state[parameter][moment].copy_(loaded["optimizer"][moment][name])
                    self.optimizer.state[parameter]["step"].fill_(steps)
        self.steps = steps


def described_parameters(model: GPTModel) -> dict[str, Any]:
    """Megatron's own sharded description of a model's parameters, by their names; loading writes into their `data`.

    `_extra_state` entries are None without Transformer Engine (tensor_parallel/layers.py:1075) and would only put pickled
    objects into the files.
    """
    return {n: sharded for n, sharded in model.sharded_state_dict().items() if not isinstance(sharded, ShardedObject)}


def _adamw(model: GPTModel, settings: OptimizerConfig) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    for parameter in parameters:  # made here, not at the first step, so that a checkpoint always has the same tensors
        state = optimizer.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state.update({moment: torch.zeros_like(parameter) for moment in _MOMENTS})
    return optimizer
