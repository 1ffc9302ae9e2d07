"""Two servers of each kind, embedded and real SGLang, a senior and a junior; every test of the folder runs on both kinds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime_tandem.engines.client import EngineClient
from slime_tandem.engines.serve_options import ServeOptions
from slime_tandem.engines.sglang import SglangProcess
from slime_tandem.models.hf import load_model, load_tokenizer
from slime_tandem.protocol import GenerateRequest, GenerateResult

from ..in_process import ThreadServer, ask
from ..preloaded import ON_A_CPU, SGLANG, Preloaded

SGLANG_PYTHON = "SLIME_TANDEM_SGLANG_PYTHON"
KEY = "the-key-of-the-conformance-tests"
"""Both kinds of server demand it."""


@dataclass
class Rig:
    """A senior and a junior server of one kind, and transformers' view of their models."""

    kind: Literal["embedded", "sglang"]
    folders: dict[str, Path]
    servers: dict[str, ThreadServer | SglangProcess]
    references: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    key: str = KEY

    def use(self, what: Callable[[EngineClient], Awaitable[Any]], role: str = "senior") -> Any:
        async def main() -> Any:
            async with EngineClient(self.servers[role].url, role=role, api_key=KEY, max_retries=0) as client:
                return await what(client)

        return asyncio.run(main())

    def generate(self, *requests: GenerateRequest) -> list[GenerateResult]:
        return self.use(lambda client: client.generate(requests))  # type: ignore[no-any-return]

    def http(
        self, path: str, body: Any = None, method: str | None = None, authorization: str = f"Bearer {KEY}"
    ) -> tuple[int, Any]:
        """(status, parsed JSON or text) of one plain request to the senior; POST if there is a body."""
        return ask(self.servers["senior"].url, path, body, method, {"Authorization": authorization})

    def log_probs(self, ids: Sequence[int], temperature: float = 1.0, role: str = "senior") -> np.ndarray:
        """[len(ids), V] by transformers: row i predicts token i + 1."""
        if role not in self.references:
            self.references[role] = load_model(self.folders[role], "float32")
        with torch.no_grad():
            logits = self.references[role](torch.tensor([list(ids)])).logits[0].float()
        return np.asarray(torch.log_softmax(logits / temperature, dim=-1))

    def decode(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.folders["senior"])
        return str(self.tokenizer.decode(list(ids)))


def _untied(like: Path, folder: Path, seed: int) -> Path:
    """A random model with the tokenizer and sizes of `like`, but an output layer of its own: a tied one, untrained, says again
    what it was told last, and no test of stops could see more than one token."""
    config = AutoConfig.from_pretrained(like)
    config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    load_tokenizer(like).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(trio: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("conformance")
    return {role: _untied(trio.senior, root / role, seed) for seed, role in enumerate(("senior", "junior"))}


@pytest.fixture(scope="session", params=["embedded", "sglang"])
def rig(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    if request.param == "embedded":
        with ExitStack() as stack:
            threads = {r: stack.enter_context(ThreadServer(f, max_batch=64, api_key=KEY)) for r, f in folders.items()}
            yield Rig("embedded", folders, dict(threads))
            assert all(server.is_alive() for server in threads.values())
        return
    python = os.environ.get(SGLANG_PYTHON)
    if not python:
        pytest.skip(f"{SGLANG_PYTHON} is not set: export {SGLANG_PYTHON}=$(bash scripts/sglang_cpu.sh)")
    logs = tmp_path_factory.mktemp("sglang-logs")
    options = ServeOptions(api_key=KEY)
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    environment = {**os.environ, **ON_A_CPU, **threads}
    with Preloaded(python, SGLANG, environment, tmp_path_factory.mktemp("preloaded")) as preloaded:
        servers = {
            role: SglangProcess(
                folders[role], options, python=its_python, log_file=logs / f"{role}.log", start_timeout_s=600
            )
            for role, its_python in (("senior", python), ("junior", preloaded.python))  # one as users start it
        }
        try:
            for server in servers.values():
                server.launch()
            for server in servers.values():
                server.wait_ready()
            yield Rig("sglang", folders, dict(servers))
            for role, server in servers.items():
                log = (logs / f"{role}.log").read_text()
                assert server.is_alive(), f"{role}: {log[-4000:]}"
                assert "api_key=***" in log, "SGLang writes its arguments"
                assert KEY not in log
        finally:
            for server in servers.values():
                server.stop(timeout_s=1.0)  # SGLang takes ten seconds over a SIGTERM, and has nothing to save here
