"""Small random pairs of every architecture, and a real SGLang with one of them inside.

The tests that need SGLang run where SLIME_TANDEM_SGLANG_PYTHON names a Python that has it; docs/fused.md says how to make one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.fused import launch
from slime_tandem.engines.fused.launch import PYTHON_ENV, FusedServer, Sglang
from slime_tandem.engines.serve_options import DEFAULT
from slime_tandem.models.hf import load_model, quiet_transformers
from slime_tandem.rollout.boundaries import boundary_ids
from slime_tandem.tokens.token_bytes import TokenBytes
from slime_tandem.types import SENIOR, TandemSample

from ...preloaded import RETRACT, SGLANG, Preloaded

T = TypeVar("T")
VOCAB = 304
BOS, EOS = 0, 1
TEXT = ["the cat sat on the mat and counted: 1 + 2 = 3.\n\nThen it slept.\n\n", "words and more words, naïve café"] * 20


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


CONFIGS = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
PAIRS = {
    "qwen3": ("qwen3", True),
    "qwen2": ("qwen2", False),
    "llama": ("llama", False),
    "qwen3 untied": ("qwen3", False),
    "qwen2 tied": ("qwen2", True),
    "llama tied": ("llama", True),
}
"""Architecture, and whether head and embedding are one matrix."""
SENIOR_SIZE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
JUNIOR_SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_model(
    folder: Path, kind: str, size: dict[str, int], *, tied: bool, seed: int, vocab_size: int = VOCAB
) -> None:
    quiet_transformers()
    sizes: dict[str, Any] = {
        **size,
        "vocab_size": vocab_size,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "tie_word_embeddings": tied,
    }
    if kind == "qwen3":
        sizes["head_dim"] = 16
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind](**sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`<pair>-senior` and `<pair>-junior` of PAIRS, and `...2` of other weights for those of Qwen3."""
    root = tmp_path_factory.mktemp("pairs")
    for seed, (pair, (kind, tied)) in enumerate(PAIRS.items()):
        make_model(root / f"{pair}-senior", kind, SENIOR_SIZE, tied=tied, seed=seed)
        make_model(root / f"{pair}-junior", kind, JUNIOR_SIZE, tied=tied, seed=10 + seed)
        if kind == "qwen3":
            make_model(root / f"{pair}-senior2", kind, SENIOR_SIZE, tied=tied, seed=20 + seed)
            make_model(root / f"{pair}-junior2", kind, JUNIOR_SIZE, tied=tied, seed=30 + seed)
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture(scope="session")
def tokens(folders: dict[str, Path]) -> TokenBytes:
    """The vocabulary that all of them share; ids without bytes are as in any padded vocabulary."""
    tokenizer = make_tokenizer()
    table: list[bytes | None] = [None] * VOCAB
    back = {c: b for b, c in enumerate_bytes()}
    for text, i in tokenizer.get_vocab().items():
        if i > EOS:
            table[i] = bytes(back[c] for c in text)
    return TokenBytes(tuple(table), special=frozenset({BOS, EOS}), eos_ids=frozenset({EOS}))


def enumerate_bytes() -> Iterator[tuple[int, str]]:
    """(byte, character) of the byte-level alphabet (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = [b for b in range(256) if b not in plain]
    yield from ((b, chr(b)) for b in plain)
    yield from ((b, chr(256 + i)) for i, b in enumerate(extra))


@pytest.fixture(scope="session")
def tables(tokens: TokenBytes) -> dict[str, frozenset[int]]:
    """Boundary ids by name: `word` and `sentence` by the strategies' own rule, `custom` a user's list."""
    named = {s: boundary_ids(s, tokens.table, tokens.special) for s in ("word", "sentence")}
    assert all(named.values())
    return {**named, "custom": frozenset({7, 8, 9, 40, 300})}


@dataclass
class Reference:
    """Forward passes of transformers for one pair."""

    senior: Any
    junior: Any

    @classmethod
    def load(cls, senior: Path, junior: Path) -> Reference:
        return cls(load_model(senior), load_model(junior))

    def log_probs(self, model: Any, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """[len(ids), V]: row i predicts token i + 1."""
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([list(ids)])).logits[0].float() / (temperature or 1.0), dim=-1)

    def behind(self, model: Any, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """[len(ids)]: the model's log-prob of each of `ids` behind `prompt` and those before it."""
        rows = self.log_probs(model, (*prompt, *ids))[len(prompt) - 1 : -1]
        return [float(row[token]) for row, token in zip(rows, ids, strict=True)]

    def check(self, sample: TandemSample, *, temperature: float = 1.0, top_p: float = 1.0, since: int = 0) -> float:
        """Largest difference between a reported log-prob and the author's own, and of the senior's; fails above 1e-4.

        Also that a greedy token is the author's best, and that a token lies in the author's nucleus.
        """
        ids = sample.prompt_ids + sample.response_ids
        both = [
            self.log_probs(m, ids, temperature)[len(sample.prompt_ids) - 1 : -1] for m in (self.junior, self.senior)
        ]
        worst = 0.0
        for i, (token, author, log_prob) in enumerate(
            zip(sample.response_ids, sample.authorship_mask, sample.log_probs, strict=True)
        ):
            if i < since:
                continue
            row = both[author][i]
            worst = max(worst, abs(float(row[token]) - log_prob))
            if sample.senior_log_probs:
                worst = max(worst, abs(float(both[SENIOR][i][token]) - sample.senior_log_probs[i]))
            if temperature == 0.0:
                assert row[token] > row.max() - 1e-4
            if top_p < 1.0:
                assert row.exp()[row > row[token]].sum() < top_p + 1e-3
        assert worst < 1e-4, f"{worst} at {sample.key}"
        return worst


@dataclass
class Engine:
    """A running fused server and how it was started."""

    name: str
    kind: str
    server: FusedServer
    reference: Reference
    folders: dict[str, Path] = field(default_factory=dict)
    ranks: int = 1

    def folder(self, role: str) -> Path:
        """`senior`, `junior`, or `senior2`, `junior2`: the same architecture, other weights."""
        return self.folders[f"{self.kind}-{role}"]

    def run(self, action: Callable[[EngineClient], Coroutine[Any, Any, T]], **kwargs: Any) -> T:
        async def connected() -> T:
            async with EngineClient(self.server.url, role="fused", **kwargs) as client:
                return await action(client)

        return asyncio.run(connected())

    def log(self) -> str:
        assert self.server.log_file is not None
        return self.server.log_file.read_text(encoding="utf-8", errors="replace")


SERVERS: dict[str, tuple[str, str]] = {
    "qwen3": ("qwen3", "--max-total-tokens 8192 --chunked-prefill-size 64"),
    "small pool, overlap": ("qwen3", "--max-total-tokens 512 --schedule-conservativeness 0.05"),
    "llama, small pool, no overlap": (
        "llama",
        "--max-total-tokens 512 --schedule-conservativeness 0.05 --disable-overlap-schedule",
    ),
    "qwen2, mixed chunks": ("qwen2", "--max-total-tokens 4096 --chunked-prefill-size 32 --enable-mixed-chunk"),
    "qwen3 untied, TP 2": ("qwen3 untied", "--tp-size 2 --max-total-tokens 4096 --chunked-prefill-size 64"),
    "qwen2 tied, TP 2, small pool": (
        "qwen2 tied",
        "--tp-size 2 --max-total-tokens 512 --schedule-conservativeness 0.05",
    ),
    "llama tied, no overlap": ("llama tied", "--max-total-tokens 4096 --disable-overlap-schedule"),
    "catch up": ("qwen3", "--max-total-tokens 8192 --chunked-prefill-size 64"),
    "catch up, TP 2, small pool": (
        "qwen2 tied",
        "--tp-size 2 --max-total-tokens 512 --schedule-conservativeness 0.05",
    ),
    "catch up, retracting": ("llama", "--max-total-tokens 4096"),
    "FlashInfer, mixed chunks": ("qwen2", "--max-total-tokens 4096 --chunked-prefill-size 32 --enable-mixed-chunk"),
    "FlashInfer, catch up, TP 2": ("qwen3", "--tp-size 2 --max-total-tokens 4096 --chunked-prefill-size 64"),
}
"""Name -> (pair, flags). Those that are called FlashInfer prefill by a stand-in for it (flashinfer_stand_in.py); one that
retracts throws a response out every few steps, so that most end soon after they were prefilled again."""
BOUNDS = {"budget": 8, "longest": 6}
"""Of the engines that catch up: so small that few responses at once meet both."""


@pytest.fixture(scope="session")
def sglang_python() -> str:
    python = os.environ.get(PYTHON_ENV)
    if not python:
        pytest.skip(f"{PYTHON_ENV} names no Python with SGLang: docs/fused.md, section `SGLang on a CPU`, makes one")
    return python


@pytest.fixture(scope="session")
def preloaded_python(sglang_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Python whose SGLang servers come up in seconds."""
    environment = launch.environment({**os.environ, "OMP_NUM_THREADS": str(DEFAULT.threads)}, cuda=False)
    with Preloaded(sglang_python, SGLANG, environment, tmp_path_factory.mktemp("preloaded")) as preloaded:
        yield preloaded.python


@pytest.fixture(scope="session", autouse=True)
def _asked_once() -> Iterator[None]:
    """What SGLang a Python has does not change: to ask it takes a process that imports torch, for every server anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "preflight", cache(launch.preflight))
        yield


@pytest.fixture(scope="session", params=list(SERVERS))
def engine(
    request: pytest.FixtureRequest,
    preloaded_python: str,
    folders: dict[str, Path],
    tables: dict[str, frozenset[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """One server at a time; pytest groups the tests by it."""
    kind, flags = SERVERS[request.param]
    args = flags.split()
    senior, junior = folders[f"{kind}-senior"], folders[f"{kind}-junior"]
    server = FusedServer(
        senior,
        junior,
        tables=list(tables.values()),
        sglang=Sglang(
            preloaded_python,
            args=("--mem-fraction-static", "0.3", "--log-level", "info", *args),
            catch_up=BOUNDS if "catch up" in request.param else None,
            prefill="auto" if "FlashInfer" in request.param else "triton",
        ),
        log_file=tmp_path_factory.mktemp("log") / "server.log",
    )
    ranks = int(args[args.index("--tp-size") + 1]) if "--tp-size" in args else 1
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        if ranks > 1:  # SGLang wants a NUMA node for each rank or to be told its cores (model_runner.py:2869)
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(cores[r % len(cores)]) for r in range(ranks)))
        if "retracting" in request.param:
            patch.setenv(RETRACT, "1")
        if "FlashInfer" in request.param:
            patch.setattr(launch, "MODEL_PACKAGE", "stand_in_models")
            path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
            patch.setenv("PYTHONPATH", path)
        server.start()
    try:
        yield Engine(request.param, kind, server, Reference.load(senior, junior), folders, ranks)
    finally:
        server.stop(timeout_s=1.0)  # SGLang takes ten seconds over a SIGTERM, and has nothing to save here


@pytest.fixture
def prompts() -> Callable[[int, int, int], list[tuple[int, ...]]]:
    """(how many, length, seed) -> random prompts."""

    def make(count: int, length: int, seed: int) -> list[tuple[int, ...]]:
        rng = np.random.default_rng(seed)
        return [tuple(int(t) for t in rng.integers(2, VOCAB, length)) for _ in range(count)]

    return make


@pytest.fixture
def pair_of(tmp_path: Path) -> Callable[[int], Reference]:
    """Makes `senior` and `junior` in the test's folder, with a vocabulary of that size."""

    def make(vocab_size: int) -> Reference:
        for role, size, seed in (("senior", SENIOR_SIZE, 1), ("junior", JUNIOR_SIZE, 2)):
            make_model(tmp_path / role, "qwen3", size, tied=True, seed=seed, vocab_size=vocab_size)
        return Reference.load(tmp_path / "senior", tmp_path / "junior")

    return make


@pytest.fixture
def copy_folder(tmp_path: Path) -> Callable[[Path], Path]:
    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / f"copy-{folder.name}"))

    return copy
