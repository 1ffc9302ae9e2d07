"""The trainable (or frozen) policy: a Megatron GPTModel with AdamW, response-only logits, HF export and checkpoints.

Weights, gradients and optimizer state are float32, so the parameters are their own master weights. One process, one device.

A checkpoint is a folder in Megatron's `torch_dist` format plus `state.json`, written last:
  metadata.json, common.pt, .metadata, __0_0.distcp   Megatron's: weights, AdamW moments (`optimizer.state.*`), their index
  state.json                                          ours: step count, architecture, the caller's `extra`, a SHA-256 per file
It is made beside its place under a hidden name and renamed, so a folder under its real name is whole.

Pickles: `common.pt` (empty) and the tensors are read by torch with `weights_only=True`; `.metadata` is a plain pickle which
Megatron hands to `pickle.load`. It is read here first by an unpickler that knows only the classes such an index is made of,
and a file that names anything else is refused unread. The digests tell damage, not malice.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from slime_tandem.config import OptimizerConfig
from slime_tandem.errors import CheckpointError, DataError, TandemError
from slime_tandem.megatron.architecture import architecture_of, load_hf_config
from slime_tandem.megatron.core import (
    CheckpointingException,
    GPTModel,
    ShardedObject,
    SynchronousTorchDistSave,
    device,
    dist_checkpointing,
    ensure_initialized,
    make_sharded_optimizer_tensor,
)
from slime_tandem.megatron.torch_dist import IndexUnpickler
from slime_tandem.megatron.weights import StateDict, build_model, load_hf_folder, load_weights, megatron_to_hf

_STATE, _FORMAT = "state.json", "slime_tandem checkpoint 1"
_MEGATRON_FILES = frozenset({"metadata.json", "common.pt", ".metadata"})
_MOMENTS = ("exp_avg", "exp_avg_sq")
_IO_ERRORS = (OSError, RuntimeError, pickle.UnpicklingError)  # RuntimeError: torch's zip files
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
    ) -> MegatronPolicy:
        """Load a local Hugging Face folder; `optimizer=None` gives a frozen reference policy.

        `threads` sets torch's threads for the whole process. Raises ModelError for a folder without a supported config or
        without whole weights.
        """
        source = Path(folder)
        hf_config = load_hf_config(source, trust_remote_code)
        architecture_of(hf_config)
        weights = load_hf_folder(source)
        if threads is not None:
            torch.set_num_threads(threads)
        ensure_initialized(seed=0)
        model = build_model(hf_config)
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
        with _replacing(Path(folder)) as partial:
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
        state: dict[str, Any] = {
            "format": _FORMAT,
            "step": self.steps,
            "trainable": self.optimizer is not None,
            "architecture": self.architecture.as_json(),
            "extra": dict(extra),
        }
        json.dumps(state)
        with _replacing(Path(folder)) as partial:
            dist_checkpointing.save(self._sharded_state(copied=False), str(partial), SynchronousTorchDistSave())
            state["files"] = {path.name: file_sha256(path) for path in sorted(partial.iterdir())}
            (partial / _STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Take over weights, optimizer state and step count, and return `extra`; training then goes on bit for bit.

        A frozen policy takes the weights alone. Raises CheckpointError for a folder that is no checkpoint, is damaged, is
        of another architecture, or lacks the optimizer state; the policy is then as it was.
        """
        path = Path(folder)
        state = _read_state(path)
        ours, theirs = self.architecture.as_json(), state["architecture"]
        for field in ours:
            if theirs.get(field) != ours[field]:
                raise _bad(path, f"{field}={theirs.get(field)!r}", f"{field}={ours[field]!r}, as in this model")
        if self.optimizer is not None and not state["trainable"]:
            raise _bad(path, "no optimizer state in it", "the checkpoint of a trainable policy")
        wanted = self._sharded_state(copied=True)
        _check_index(path, set(state["files"]))
        try:
            loaded = load_sharded(wanted, path)
        except (TorchCheckpointException, CheckpointingException, *_IO_ERRORS) as error:
            raise _bad(path, _reason(error), "the tensors of this model") from error
        self._take(loaded, int(state["step"]))
        extra: dict[str, Any] = state["extra"]
        return extra

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


def load_sharded(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Megatron's `dist_checkpointing.load`, without the warnings of its own making. Raises what it raises."""
    with warnings.catch_warnings():
        # Megatron still calls torch.distributed.checkpoint.load_state_dict (dist_checkpointing/strategies/torch.py:799).
        warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
        # torch's planner touches its own deprecated ShardedTensor, in which Megatron stacks the layers of a weight.
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    return loaded


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


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place, fsynced, when the block ends; on an error it is removed."""
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}.partial-"
        for path in target.parent.iterdir():
            if path.name.startswith(prefix):  # left over by a killed process
                shutil.rmtree(path)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        partial.chmod(0o755)
        yield partial
        for path in (*partial.iterdir(), partial):
            fsync(path)
        if target.exists():
            old = partial.with_name(f"{partial.name}-old")
            target.rename(old)
            try:
                partial.rename(target)
            except OSError:
                old.rename(target)
                raise
            shutil.rmtree(old)
        else:
            partial.rename(target)
        fsync(target.parent)
    except (TorchCheckpointException, SafetensorError, *_IO_ERRORS) as error:
        raise _unwritable(target, error) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _unwritable(target: Path, error: BaseException) -> CheckpointError:
    for link in _chain(error):
        if os.strerror(errno.ENOSPC) in str(link):
            remedy = "free some space, then run again to resume"
            return CheckpointError(str(target), _reason(link), "room on the disk", remedy)
    return CheckpointError(str(target), _reason(error), "a folder that can be written", "check its parent folder")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it: torch's zip writer hides a full disk behind an error of its own."""
    while error is not None:
        yield error
        if isinstance(error, TorchCheckpointException):
            error = next(iter(error.failures.values()))[0]
        else:
            error = error.__cause__ or error.__context__


def fsync(path: Path) -> None:
    """Make a file or folder, and what it holds, survive a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    if isinstance(error, TorchCheckpointException):  # it wraps one (exception, stack) per rank; here there is one rank
        error = next(iter(error.failures.values()))[0]
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _bad(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}",
        found,
        expected,
        "delete this folder to resume from an older checkpoint, or choose another",
    )


def _read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint whose files are all there and undamaged."""
    if not path.is_dir():
        raise _bad(path, "no such folder", "a checkpoint folder")
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text(encoding="utf-8"))
        found_format, files = state["format"], state["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _bad(
            path, f"unreadable {_STATE} ({_reason(error)})", "a whole checkpoint written by slime_tandem"
        ) from error
    if found_format != _FORMAT or not files.keys() >= _MEGATRON_FILES:
        raise _bad(path, f"format {found_format!r}", f"format {_FORMAT!r}")
    for name, digest in files.items():
        if Path(name).name != name or not (path / name).is_file():
            raise _bad(path, f"no file {name}", "every file that was written")
        if file_sha256(path / name) != digest:
            raise _bad(path, f"damaged file {name}", "files as they were written")
    return state


def _check_index(path: Path, files: set[str]) -> None:
    """Refuse a `.metadata` that is more than an index of tensors in this folder's files."""
    try:
        with (path / ".metadata").open("rb") as file:
            index = IndexUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
        raise _bad(path, f"unsafe or damaged .metadata ({_reason(error)})", "an index of tensors") from error
    if not isinstance(index, Metadata):
        raise _bad(path, f"a {type(index).__name__} in .metadata", "an index of tensors")
    for key, entry in index.state_dict_metadata.items():
        # Entries of other kinds are unpickled without restraint by torch (distributed/checkpoint/default_planner.py:387).
        if not isinstance(entry, TensorStorageMetadata):
            raise _bad(path, f"{type(entry).__name__} for {key} in .metadata", "tensors only")
    for info in index.storage_data.values():
        if info.relative_path not in files:
            raise _bad(path, f".metadata points to {info.relative_path}", "files of this folder")
