"""Fixtures for several folders: tiny models with real tokenizers, made on the spot."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from .schedule import (  # noqa: F401 - hooks
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_runtest_logreport,
    pytest_runtest_teardown,
    pytest_runtestloop,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_xdist_make_scheduler,
)
from .slime_sources import SlimeHere

# What a machine is busy with is no fault of an example.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Containers like to set it; every child process would then compile torch and transformers from source again, which takes it
# ten seconds and more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and their children inherit it: tests of Ctrl-C would wait for nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}%EOT%{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def no_open_event_loop() -> Iterator[None]:
    """A file's tests leave no event loop open: garbage collection finds it much later, and another test fails for it."""
    yield
    loop = getattr(getattr(asyncio.get_event_loop_policy(), "_local", None), "_loop", None)
    if loop is not None and not loop.is_closed():
        loop.close()
        raise AssertionError("an event loop of this file's tests is open: close its Runner, or what has one")


@dataclass(frozen=True)
class Trio:
    """Folders of three random models; the teacher has another tokenizer."""

    senior: Path
    junior: Path
    teacher: Path


def make_tokenizer(corpus: list[str], vocab_size: int, eot: str):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [eot, "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eot, pad_token=eot)
    tokenizer.chat_template = TEMPLATE.replace("%EOT%", eot)
    return tokenizer


def make_model(folder: Path, tokenizer, *, seed: int, kind: str = "qwen3") -> Path:  # type: ignore[no-untyped-def]
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))
        # Spread logits a little: a flat model would make every test of log-probs blind.
        model.get_input_embeddings().weight.data.mul_(8)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CORPUS = ["State the answer to the problem: 12 + 34 = and say why. <answer>46</answer> ones carry tens answer"] * 3


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    """Senior and junior share a tokenizer, the teacher has other merges and another end of turn."""
    root = tmp_path_factory.mktemp("trio")
    student = make_tokenizer(CORPUS, 300, "<|end|>")
    other = make_tokenizer([c.replace("answer", "answering the") for c in CORPUS], 280, "<|eot|>")
    return Trio(
        make_model(root / "senior", student, seed=1),
        make_model(root / "junior", student, seed=2),
        make_model(root / "teacher", other, seed=3, kind="llama"),
    )


@pytest.fixture(scope="session")
def side_url(trio: Trio) -> Iterator[Callable[[str], str]]:
    """URL of a server of the trio's junior or teacher, which no run changes; once in a test process, when first asked for."""
    from .in_process import ThreadServer

    urls: dict[str, str] = {}
    with ExitStack() as stack:

        def url(role: str) -> str:
            assert role in ("junior", "teacher")
            if role not in urls:
                urls[role] = stack.enter_context(ThreadServer(getattr(trio, role))).url
            return urls[role]

        yield url


@pytest.fixture(scope="session")
def _preloaded_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from slime_tandem.engines.serve_options import DEFAULT

    from .preloaded import EMBEDDED, Preloaded

    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(DEFAULT.threads)}
    with Preloaded(sys.executable, EMBEDDED, environment, tmp_path_factory.mktemp("preloaded")) as preloaded:
        yield preloaded.python


@pytest.fixture(scope="module")
def forked_servers(_preloaded_python: str) -> Iterator[None]:
    """`sys.executable` starts embedded servers in a fork, for tests that are about runs and not about these starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", _preloaded_python)
        yield


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Model families by name (scripts/families.py): (tokenizer, chat template) of each."""
    from families import FAMILIES, load

    root = tmp_path_factory.mktemp("families")
    return {name: load(name, root) for name in FAMILIES}


@pytest.fixture
def running() -> Iterator[Callable[[Any], Any]]:
    """`running(ThreadServer(folder))`: that server, started, until the test ends."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture(scope="session")
def slime_here() -> SlimeHere:
    """slime's own sources and Python; skips where they are not at hand."""
    return SlimeHere.find()
