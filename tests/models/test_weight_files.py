"""A folder whose files do not hold what its index promises is refused by name, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime_tandem.errors import ModelError
from slime_tandem.models.weight_files import hf_weight_files, weight_names


def shards(folder: Path, files: dict[str, list[str]], index: dict[str, str]) -> Path:
    folder.mkdir()
    for file, names in files.items():
        save_file({name: torch.zeros(2) for name in names}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_names_of_one_file_and_of_shards(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert weight_names(tmp_path) == {"a", "b"}
    index = {"a": "1.safetensors", "b": "2.safetensors"}
    folder = shards(tmp_path / "s", {"1.safetensors": ["a"], "2.safetensors": ["b"], "other.safetensors": ["c"]}, index)
    assert weight_names(folder) == {"a", "b"}
    assert hf_weight_files(folder) == ([folder / "1.safetensors", folder / "2.safetensors"], frozenset(index))


@pytest.mark.parametrize(
    ("files", "index", "text"),
    [
        ({"1.safetensors": ["a"]}, {"a": "1.safetensors", "b": "2.safetensors"}, "'2.safetensors': expected the name"),
        ({"1.safetensors": ["a"]}, {"a": "../s/1.safetensors"}, "the name of a file beside the index"),
        ({"1.safetensors": ["a"]}, {"a": "1.safetensors", "b": "1.safetensors"}, r"\['b'\]: expected weights that are"),
        (
            {"1.safetensors": ["a", "b"], "2.safetensors": ["b"]},
            {"a": "1.safetensors", "b": "2.safetensors"},
            "'b': expected a weight in one shard only",
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    files: dict[str, list[str]], index: dict[str, str], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=text):
        weight_names(shards(tmp_path / "s", files, index))


def test_no_weights_and_damaged_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="fetch the weights"):
        weight_names(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    with pytest.raises(ModelError, match="expected a whole safetensors file"):
        weight_names(tmp_path)
