"""Loading: each way in which a folder can be unusable is refused with the folder and a remedy."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
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


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("config.json", {"num_labels": 10**8}, r"config\.json num_labels=100000000: expected 0 to 65536"),
        ("config.json", {"num_hidden_layers": 10**9}, r"config\.json num_hidden_layers=.*expected 1 to 10000"),
        (
            "config.json",
            {"hidden_size": "64"},
            r"config\.json'?: expected a configuration that transformers loads.*mend it",
        ),
        (
            "config.json",
            {"rms_norm_eps": None},
            r"config\.json'?: expected a configuration that transformers loads.*mend it",
        ),
        ("config.json", {"model_type": ["llama"]}, r"config\.json model_type=.*expected a name"),
        ("tokenizer_config.json", {"model_max_length": "x"}, r"tokenizer_config\.json model_max_length='x'"),
        (
            "tokenizer_config.json",
            {"padding_side": "up"},
            r"a tokenizer that transformers loads.*save the tokenizer again",
        ),
    ],
)
def test_a_tokenizer_says_which_file_of_the_folder_is_wrong(
    model_copy: Callable[[str], Path], file: str, change: dict[str, Any], says: str
) -> None:
    """transformers reads config.json, too; "save the tokenizer again" mended none of these."""
    path = model_copy("llama") / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=says):
        load_tokenizer(path.parent)


def test_outputs_are_read_by_name_whatever_the_folder_prefers(model_copy: Callable[[str], Path]) -> None:
    path = model_copy("llama") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"return_dict": False}))
    assert load_model(path.parent)(torch.tensor([[1, 2]])).logits.shape[:2] == (1, 2)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda w: (w * 100).to(torch.int8), "I8"),
        (lambda w: w > 0, "BOOL"),
        (lambda w: w.to(torch.float8_e4m3fn), "F8_E4M3"),
    ],
    ids=["int8", "bool", "fp8"],
)
def test_weights_without_their_scales_are_refused(
    model_copy: Callable[[str], Path], changed: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    folder, name = model_copy("llama"), "model.layers.0.mlp.up_proj.weight"
    weights = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**weights, name: changed(weights[name])}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name}.*{says}"):
        load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_of_a_training_that_diverged_are_refused(model_copy: Callable[[str], Path], value: float) -> None:
    folder, name = model_copy("llama"), "model.layers.0.mlp.up_proj.weight"
    weights = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
    weights[name][3, 5] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"finite weights \({name} has one.*Remedy.*earlier checkpoint"):
        load_model(folder)


def test_masks_of_an_older_folder_are_no_weights(tmp_path: Path) -> None:
    """GPT-NeoX kept its causal mask among the weights, as truth values."""
    config = transformers.GPTNeoXConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    weights, mask = load_file(tmp_path / "model.safetensors"), torch.ones(1, 1, 8, 8, dtype=torch.bool)
    save_file(
        {**weights, "gpt_neox.layers.0.attention.bias": mask}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    assert load_model(tmp_path)(torch.tensor([[1, 2]])).logits.shape == (1, 2, 32)
