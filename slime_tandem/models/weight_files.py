"""Which files hold a Hugging Face folder's weights, and whether they hold all that the index promises. Reads headers only."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open

from slime_tandem.errors import ModelError
from slime_tandem.files import is_file_name, read_json, record_of

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Index(BaseModel):
    weight_map: dict[str, str] = Field(min_length=1)
    metadata: dict[str, Any] = Field(default_factory=dict)


def hf_weight_files(path: Path) -> tuple[list[Path], frozenset[str]]:
    """The safetensors files of a Hugging Face folder, and the weights that its index lists (none without an index).

    Raises ModelError for a folder without weights, a damaged index, and a shard that is not there.
    """
    if (path / _WEIGHTS).is_file():
        return [path / _WEIGHTS], frozenset()
    if not (path / _INDEX).is_file():
        remedy = "fetch the weights"
        if list(path.glob("*.bin")):
            remedy = "convert the pickled *.bin with save_pretrained, pickles are not read"
        raise ModelError("model folder", str(path), f"{_WEIGHTS} or {_INDEX} in it", remedy)
    weight_map = _index(path).weight_map
    files = sorted(set(weight_map.values()))
    for file in files:
        _require_shard(path, file)
    return [path / file for file in files], frozenset(weight_map)


def _require_shard(path: Path, file: str) -> None:
    if not is_file_name(file) or not (path / file).is_file():
        raise ModelError(str(path / _INDEX), file, "the name of a file beside the index", "fetch the shard")


def _index(path: Path) -> _Index:
    try:
        return record_of(_Index, read_json(path / _INDEX))
    except (ValueError, OSError) as error:
        raise ModelError(str(path / _INDEX), str(error), "a safetensors index", "fetch it anew") from error


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """`size`: bytes of all weights in memory; `counted`: from the files' headers, not by what the index says of them."""

    size: int
    counted: bool


def stored_bytes(path: Path, of_float: int = 2) -> StoredBytes | None:
    """What a folder's weights take in memory, by the headers of its files; else its index's `total_size`; None without either.

    Plain floating point numbers are counted with `of_float` bytes, whatever they are stored as, quantized ones as stored.
    Raises ModelError for a damaged file, and where some shards are there and others are not.
    """
    files = sorted(path.glob("*.safetensors"))
    if files and ((path / _WEIGHTS).is_file() or not (path / _INDEX).is_file()):
        return StoredBytes(sum(_bytes_of(file, of_float) for file in files), counted=True)
    if not (path / _INDEX).is_file():
        return None
    index = _index(path)
    shards, total = set(index.weight_map.values()), index.metadata.get("total_size")
    if shards & {file.name for file in files}:
        for shard in sorted(shards):
            _require_shard(path, shard)
        return StoredBytes(sum(_bytes_of(path / shard, of_float) for shard in sorted(shards)), counted=True)
    if isinstance(total, (int, float)) and not isinstance(total, bool) and total > 0:
        return StoredBytes(int(total), counted=False)
    return None


_PLAIN = {"F64", "F32", "F16", "BF16"}
_WIDTHS = {"F4": 0.5, "F6_E2M3": 0.75, "F6_E3M2": 0.75, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
"""Bytes of a number in a safetensors file, where it is not one."""


def _bytes_of(file: Path, of_float: int) -> int:
    total = 0.0
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                part = opened.get_slice(name)
                width = of_float if part.get_dtype() in _PLAIN else _WIDTHS.get(part.get_dtype(), 1)
                total += width * math.prod(part.get_shape())
    except (SafetensorError, OSError) as error:
        raise ModelError(str(file), str(error), "a whole safetensors file", "fetch it anew") from error
    return int(total)


def require_listed(path: Path, listed: Collection[str], weights: Collection[str]) -> None:
    """Raise ModelError where the shards lack weights that their index lists."""
    missing = sorted(set(listed) - set(weights))
    if missing:
        raise ModelError(str(path / _INDEX), missing[:3], "weights that are in the shards", "fetch the folder anew")


def require_once(path: Path, name: str, known: Collection[str]) -> None:
    """Raise ModelError where a second shard holds a weight again: which of them counts is nobody's to guess."""
    if name in known:
        raise ModelError(str(path), name, "a weight in one shard only", "fetch the folder anew")


def weight_names(path: Path) -> frozenset[str]:
    """Names of all weights of a folder, from the files' headers. Raises ModelError as the functions above do."""
    files, listed = hf_weight_files(path)
    names: set[str] = set()
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    require_once(file, name, names)
                    names.add(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(str(file), str(error), "a whole safetensors file", "fetch it anew") from error
    require_listed(path, listed, names)
    return frozenset(names)
