"""Loading: each way in which a folder can be unusable is refused with the folder and a remedy."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tandem.errors import ModelError
from slime_tandem.models.hf import check_model_folder, check_revision, load_model, load_tokenizer


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('a pickle was loaded')",))


def test_a_whole_folder_loads(folders: dict[str, Path]) -> None:
    assert not load_model(folders["llama"]).training
    assert load_model(folders["llama"], "bfloat16").dtype == torch.bfloat16
    assert load_tokenizer(folders["llama"]).eos_token_id == 1


def test_a_loaded_model_does_not_follow_its_file(model_copy: Callable[[str], Path]) -> None:
    folder = model_copy("llama")
    model = load_model(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\x01" * (size // 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_missing_parts_are_named(model_copy: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing.*existing folder.*Remedy"):
        load_model(tmp_path / "nothing")
    folder = model_copy("llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(ModelError, match=r"copy-llama.*safetensors.*Remedy"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"copy-llama.*tokenizer files"):
        load_tokenizer(folder)


def test_damaged_parts_are_refused(model_copy: Callable[[str], Path]) -> None:
    folder = model_copy("llama")
    weights = folder / "model.safetensors"
    whole = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    weights.write_bytes(b"not a safetensors file")
    with pytest.raises(ModelError, match="copy-llama"):
        load_model(folder)
    save_file({k: v for k, v in whole.items() if "layers.1.mlp" not in k}, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp"):
        load_model(folder)
    save_file({**whole, "extra": torch.zeros(1)}, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="unexpected: extra"):
        load_model(folder)
    save_file({**whole, "model.norm.weight": torch.zeros(5)}, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load_model(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(folder)


def test_an_unknown_architecture_or_dtype_is_refused(
    model_copy: Callable[[str], Path], folders: dict[str, Path]
) -> None:
    folder = model_copy("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no-such-thing"}))
    with pytest.raises(ModelError, match="no-such-thing"):
        load_model(folder)
    with pytest.raises(ModelError, match="dtype='float16'"):
        load_model(folders["llama"], "float16")


def test_a_folder_with_what_is_no_file_is_refused_before_it_is_read(model_copy: Callable[[str], Path]) -> None:
    """Reading a pipe, or a device, may never end."""
    folder = model_copy("llama")
    os.mkfifo(folder / "extra.json")
    with pytest.raises(ModelError, match=r"extra\.json.*regular files"):
        check_model_folder(folder)
    (folder / "extra.json").unlink()
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ModelError, match="regular files"):
        check_model_folder(folder)
    with pytest.raises(ModelError, match="existing folder"):
        check_model_folder("x" * 10_000)


def test_a_revision_is_the_snapshot_of_a_cache(tmp_path: Path) -> None:
    cache = tmp_path / "models--who--what"
    (cache / "snapshots" / "abc123").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc123\n")
    link = tmp_path / "model"
    link.symlink_to(cache / "snapshots" / "abc123")
    for folder in (cache / "snapshots" / "abc123", link):
        for revision in (None, "abc123", "main"):
            check_revision(folder, revision)
        with pytest.raises(ModelError, match="revision='def456': expected that of the folder"):
            check_revision(folder, "def456")
    check_revision(tmp_path, None)
    with pytest.raises(ModelError, match="revision='main'"):
        check_revision(tmp_path, "main")
