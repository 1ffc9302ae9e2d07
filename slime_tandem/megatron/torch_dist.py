"""Megatron's `torch_dist` folders read and written tensor by tensor, without a model: what conversion of checkpoints stands on.

A folder holds `.metadata` (a pickled index: of every key its size, dtype, chunks and where they lie), `*.distcp` (chunks, each
a `torch.save` of its own), `metadata.json` and `common.pt`. Megatron stacks the layers of a weight under one key with the layer
as first axis, e.g. `decoder.layers.mlp.linear_fc2.weight` [L, H, f]; the two layer norms in front of a linear layer have
Transformer Engine's names (`self_attention.linear_qkv.layer_norm_weight`, `mlp.linear_fc1.layer_norm_weight`) whatever the
layer spec (gpt_layer_specs.py, `sharded_state_dict_keys_map` of the local one). Any tensor and pipeline parallel size loads
from that: a rank reads the part of each key that it holds.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from slime_tandem.errors import CheckpointError
from slime_tandem.megatron.core import save_torch_dist_config
from slime_tandem.megatron.tensor_index import read_index

TRACKER = "latest_checkpointed_iteration.txt"
"""Beside the iterations of a Megatron checkpoint: a number, or `release`."""
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_LAYERS = "decoder.layers."


def dist_key(parameter: str) -> tuple[str, int | None]:
    """Key and layer under which a parameter of the local layer spec lies in a `torch_dist` checkpoint.

    >>> dist_key("decoder.layers.3.pre_mlp_layernorm.weight")
    ('decoder.layers.mlp.linear_fc1.layer_norm_weight', 3)
    >>> dist_key("output_layer.weight")
    ('output_layer.weight', None)
    """
    if not parameter.startswith(_LAYERS):
        return parameter, None
    layer, _, rest = parameter.removeprefix(_LAYERS).partition(".")
    for old, new in _NORMS.items():
        if rest.startswith(old):
            rest = new + rest.removeprefix(old)
    return _LAYERS + rest, int(layer)


def find_torch_dist(folder: Path) -> Path | None:
    """The folder with `.metadata` in a checkpoint: itself, or the iteration that the tracker file names; None for neither."""
    if (folder / ".metadata").is_file():
        return folder
    try:
        named = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    inner = folder / (f"iter_{int(named):07d}" if named.isdecimal() else "release")
    return inner if (inner / ".metadata").is_file() else None


class TorchDistReader:
    """Parameters of a `torch_dist` folder by the names of the local layer spec, one at a time.

    Chunks of any shape are put together, so a checkpoint of any parallel sizes is read; layers may be stacked under one key or
    stand under keys of their own. Raises CheckpointError for no such folder, what `read_index` refuses, holes or damage.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = read_index(folder)
        self._tensors, self._places = index.tensors, index.places
        self.others = index.others
        """Keys of pickled objects (optimizer, random-number and Transformer Engine states), which are not read."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all tensors."""
        return tuple(sorted(self._tensors))

    def _place(self, parameter: str) -> tuple[str, int | None]:
        key, layer = dist_key(parameter)
        if key not in self._tensors and layer is not None:
            key, layer = key.replace(_LAYERS, f"{_LAYERS}{layer}.", 1), None
        if key not in self._tensors:
            raise _bad(self.folder, f"no {dist_key(parameter)[0]}", "a GPT model with the architecture of the config")
        return key, layer

    def __contains__(self, parameter: str) -> bool:
        try:
            self._place(parameter)
        except CheckpointError:
            return False
        return True

    def used_keys(self, parameters: Iterable[str]) -> set[str]:
        """Keys under which these parameters lie; raises CheckpointError for one that is missing."""
        return {self._place(name)[0] for name in parameters}

    def shape(self, parameter: str) -> tuple[int, ...]:
        """Shape of one parameter."""
        key, layer = self._place(parameter)
        size = self._tensors[key].size
        return size if layer is None else size[1:]

    def layers(self, parameter: str) -> int | None:
        """How many layers are stacked under this parameter's key; None where it has a key of its own."""
        key, layer = self._place(parameter)
        return None if layer is None else self._tensors[key].size[0]

    def dtype(self, parameter: str) -> torch.dtype:
        """Dtype of one parameter."""
        return self._tensors[self._place(parameter)[0]].dtype

    def read(self, parameter: str) -> torch.Tensor:
        """One parameter, whole, on the CPU; reads the chunks that it overlaps and no others."""
        key, layer = self._place(parameter)
        entry = self._tensors[key]
        size = entry.size
        if layer is not None and layer >= size[0]:
            raise _bad(self.folder, f"{size[0]} layers of {key}", f"layer {layer}, which the config has")
        low = [0] * len(size) if layer is None else [layer] + [0] * (len(size) - 1)
        high = list(size) if layer is None else [layer + 1, *size[1:]]
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) < math.prod(size):  # before room is made for it
            raise _bad(self.folder, f"chunks that do not cover {key}", "chunks that cover it once")
        out = torch.empty([h - lo for lo, h in zip(low, high, strict=True)], dtype=entry.dtype)
        filled = 0
        for chunk in entry.chunks:
            begin, extent = chunk.offsets, chunk.sizes
            inside = [
                (max(lo, b), min(h, b + e)) for lo, h, b, e in zip(low, high, begin, extent, strict=True)
            ]  # in coordinates of the whole key
            if any(start >= end for start, end in inside):
                continue
            data = self._chunk(key, begin, extent)
            into = tuple(slice(s - lo, e - lo) for (s, e), lo in zip(inside, low, strict=True))
            out[into] = data[tuple(slice(s - b, e - b) for (s, e), b in zip(inside, begin, strict=True))]
            filled += math.prod(e - s for s, e in inside)
        if filled != out.numel():
            raise _bad(self.folder, f"{filled} of {out.numel()} values of {key}", "chunks that cover it once")
        return out if layer is None else out[0]

    def _chunk(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        place = self._places.get((key, offsets))
        if place is None:
            raise _bad(self.folder, f"no place for {key} at {offsets}", "every chunk in the index")
        try:
            with (self.folder / place.file).open("rb") as file:
                file.seek(place.offset)
                data = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes end in whatever torch's readers stumble over
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise _bad(self.folder, f"{place.file}: {why}", "a whole file") from error
        dtype = self._tensors[key].dtype
        if not isinstance(data, torch.Tensor) or tuple(data.shape) != sizes or data.dtype != dtype:
            raise _bad(self.folder, f"something else for {key} in {place.file}", f"a tensor {sizes} of {dtype}")
        return data


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter in a file: where it lies. `shape` is the parameter's own, without the layer axis."""

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    length: int

    def index(self, layers: int) -> tuple[str, tuple[int, ...], ChunkStorageMetadata]:
        """(key, size of the key, chunk of it)."""
        key, layer = dist_key(self.parameter)
        if layer is None:
            chunk = ChunkStorageMetadata(torch.Size([0] * len(self.shape)), torch.Size(self.shape))
            return key, self.shape, chunk
        offsets = torch.Size([layer] + [0] * len(self.shape))
        return key, (layers, *self.shape), ChunkStorageMetadata(offsets, torch.Size((1, *self.shape)))


def write_pieces(path: Path, parameters: Iterable[str], make: Callable[[str], torch.Tensor]) -> list[Piece]:
    """Write one `.distcp` file, fsynced; each parameter is made, written and dropped before the next. Raises OSError."""
    pieces = []
    with path.open("wb") as file:
        for name in parameters:
            tensor = make(name).detach().contiguous()
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if dist_key(name)[1] is not None:
                tensor = tensor[None]
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # torch.save writes the whole storage of a view
            start = file.tell()
            torch.save(tensor, file)
            pieces.append(Piece(name, shape, dtype, start, file.tell() - start))
        file.flush()
        os.fsync(file.fileno())
    return pieces


def finish_folder(folder: Path, files: Mapping[str, list[Piece]], layers: int, common: Mapping[str, Any]) -> None:
    """Write `.metadata`, `metadata.json` and `common.pt` of a folder whose `.distcp` files are there."""
    entries: dict[str, TensorStorageMetadata] = {}
    results = []
    for file, pieces in files.items():
        for piece in pieces:
            key, size, chunk = piece.index(layers)
            properties = TensorProperties(dtype=getattr(torch, piece.dtype))
            entry = entries.setdefault(key, TensorStorageMetadata(properties, torch.Size(size), []))
            at = MetadataIndex(key, chunk.offsets, len(entry.chunks))
            entry.chunks.append(chunk)
            results.append(WriteResult(at, piece.length, _StorageInfo(file, piece.offset, piece.length)))
    FileSystemWriter(folder).finish(Metadata(dict(entries)), [results])
    torch.save(dict(common), folder / "common.pt")
    save_torch_dist_config(folder)


def _bad(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}", found, expected, "check the path, or convert or save the checkpoint again"
    )
