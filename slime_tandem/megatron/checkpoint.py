"""Checkpoints of a run: written whole, found, and read without trust in what they hold.

A checkpoint is a folder in Megatron's `torch_dist` format plus `state.json`, written last:
  metadata.json, common.pt, .metadata, __0_0.distcp   Megatron's: weights, AdamW moments (`optimizer.state.*`), their index
  state.json                                          ours: step count, architecture, the caller's `extra`, a SHA-256 per file
It is made beside its place under a hidden name and renamed, so a folder under its real name is whole.

Pickles: `common.pt` (empty) and the tensors are read by torch with `weights_only=True`; `.metadata` is a plain pickle which
Megatron hands to `pickle.load`. It is read here first, as data (`tensor_index.py`), and a file with anything that has no place
in an index is refused before Megatron sees it. The digests show damage, not malice.

It knows no model and no optimizer (`policy.py` describes its tensors), nor other people's checkpoints (`torch_dist.py`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from slime_tandem.errors import CheckpointError
from slime_tandem.files import is_file_name, parse_json, record_of
from slime_tandem.megatron.core import SynchronousTorchDistSave, dist_checkpointing
from slime_tandem.megatron.tensor_index import read_index

_STATE, _FORMAT = "state.json", "slime_tandem checkpoint 1"
_STEP = re.compile(r"step-([0-9]{6,})")
_MEGATRON_FILES = frozenset({"metadata.json", "common.pt", ".metadata"})
_IO_ERRORS = (OSError, RuntimeError, pickle.UnpicklingError)  # RuntimeError: torch's zip files


def step_folder(folder: Path, step: int) -> Path:
    """Place of the checkpoint after `step` steps among those of a run.

    >>> step_folder(Path("checkpoints"), 20).name
    'step-000020'
    """
    return folder / f"step-{step:06d}"


def step_of(folder: Path) -> int | None:
    """The steps after which a checkpoint was written, by its folder's name; None for any other folder.

    >>> step_of(Path("checkpoints/step-000020")), step_of(Path("checkpoints/step-old"))
    (20, None)
    """
    named = _STEP.fullmatch(folder.name)
    return int(named[1]) if named else None


def checkpoints_of(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted((p for p in folder.glob("step-*") if step_of(p) is not None), key=lambda p: step_of(p) or 0)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    found = checkpoints_of(folder)
    return found[-1] if found else None


def drop_older(folder: Path, keep: int) -> None:
    """Delete all checkpoints of a run but the newest `keep`. Raises OSError."""
    for old in checkpoints_of(folder)[:-keep]:
        shutil.rmtree(old)


def write_checkpoint(folder: Path, tensors: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Write `tensors` (a sharded state dict of Megatron) and `facts` (JSON values, for `state.json`); replaces `folder`.

    Raises CheckpointError, leaving an older checkpoint there as it was, if it cannot be written.
    """
    state: dict[str, Any] = {"format": _FORMAT, **facts}
    json.dumps(state)
    with replacing(folder) as partial:
        dist_checkpointing.save(tensors, str(partial), SynchronousTorchDistSave())
        state["files"] = {path.name: file_sha256(path) for path in sorted(partial.iterdir())}
        (partial / _STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def read_tensors(folder: Path, wanted: dict[str, Any], files: set[str]) -> dict[str, Any]:
    """The tensors that `wanted` (a sharded state dict) describes, read into its data; `files` are those of `state.json`.

    Raises CheckpointError for an index that is more than one of tensors in these files, or other tensors than wanted.
    """
    _check_index(folder, files)
    try:
        return load_sharded(wanted, folder)
    except (
        TorchCheckpointException,
        Exception,
    ) as error:  # torch's is a BaseException; Megatron's and torch's readers stumble over other things at each damage
        raise unusable(folder, _reason(error), "the tensors of this model") from error


def load_sharded(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Megatron's `dist_checkpointing.load`, without the warnings of its own making. Raises what it raises."""
    with warnings.catch_warnings():
        # Megatron still calls torch.distributed.checkpoint.load_state_dict (dist_checkpointing/strategies/torch.py:799).
        warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
        # torch's planner touches its own deprecated ShardedTensor, in which Megatron stacks the layers of a weight.
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    return loaded


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place, fsynced, when the block ends; on an error it is removed.

    Raises CheckpointError, leaving an older `target` as it was, if it cannot be written.
    """
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
    if disk_is_full(target.parent) or any(os.strerror(errno.ENOSPC) in str(link) for link in _chain(error)):
        remedy = "free some space, then run again to resume"
        return CheckpointError(str(target), os.strerror(errno.ENOSPC), "room on the disk", remedy)
    return CheckpointError(str(target), _reason(error), "a folder that can be written", "check its parent folder")


def disk_is_full(folder: Path) -> bool:
    """Whether nothing more fits beside a folder: torch's and safetensors' writers do not say why they failed."""
    try:
        return shutil.disk_usage(folder).free < 2**14
    except OSError:
        return False


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


def unusable(path: Path, found: str, expected: str) -> CheckpointError:
    """The error for a checkpoint that cannot be resumed from."""
    return CheckpointError(
        f"checkpoint {path}",
        found,
        expected,
        "delete this folder to resume from an older checkpoint, or choose another",
    )


class State(BaseModel):
    """`state.json`. `step`: updates done; `files`: the SHA-256 of every other file; `extra`: the caller's."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal["slime_tandem checkpoint 1"]
    step: int = Field(ge=0)
    trainable: bool
    architecture: dict[str, Any]
    extra: dict[str, Any]
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]

    @field_validator("files")
    @classmethod
    def _are_the_folders(cls, files: dict[str, str]) -> dict[str, str]:
        strange = [name for name in files if not is_file_name(name) or name == _STATE]
        if strange or not files.keys() >= _MEGATRON_FILES:
            raise ValueError(f"names of files of this folder, {', '.join(sorted(_MEGATRON_FILES))} among them")
        return files


def read_state(path: Path) -> State:
    """`state.json` of a checkpoint whose files are all there and undamaged. Raises CheckpointError for any other folder."""
    if not path.is_dir():
        raise unusable(path, "no such folder", "a checkpoint folder")
    try:
        state = record_of(State, parse_json((path / _STATE).read_bytes()))
    except (OSError, ValueError) as error:
        raise unusable(
            path, f"unreadable {_STATE} ({_reason(error)})", "a whole checkpoint written by slime_tandem"
        ) from error
    for name, digest in state.files.items():
        if not (path / name).is_file():
            raise unusable(path, f"no file {name}", "every file that was written")
        if file_sha256(path / name) != digest:
            raise unusable(path, f"damaged file {name}", "files as they were written")
    return state


def _check_index(path: Path, files: set[str]) -> None:
    """Refuse a `.metadata` that is more than an index of tensors in this folder's files."""
    index = read_index(path)
    if index.others:
        # Entries of other kinds are unpickled without restraint by torch (distributed/checkpoint/default_planner.py:387).
        raise unusable(path, f"an object under {index.others[0]} in .metadata", "tensors only")
    for key, entry in index.tensors.items():
        if entry.dtype != torch.float32:
            raise unusable(path, f"{entry.dtype} for {key} in .metadata", "torch.float32")
    for place in index.places.values():
        if place.file not in files:
            raise unusable(path, f".metadata points to {place.file}", "files of this folder")
