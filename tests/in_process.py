"""The embedded server in a thread of the test process, for tests that want its answers and not its process.

A server process takes seconds to start, nearly all of them imports. What is about processes (starts, kills, ports, logs, keys
in the environment) is tested on `engines.processes.ServerProcess`.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from slime_tandem.engines.embedded.engine_thread import EngineThread
from slime_tandem.engines.embedded.runner import Runner
from slime_tandem.engines.embedded.server import Server, served_model
from slime_tandem.models.hf import load_model, load_tokenizer


class ThreadServer:
    """`embedded.server.serve` for the model folder `model` on a free port, without a process; use as a context manager."""

    def __init__(self, model: Path, *, max_batch: int = 256, cache_tokens: int = 4096) -> None:
        self.model = str(model)
        hf_model, tokenizer = load_model(self.model, "float32"), load_tokenizer(self.model)
        self._runner = Runner(
            hf_model, self._decode, max_batch=max_batch, cache_tokens=cache_tokens, weight_version="default"
        )
        sizes = self._runner.kv
        tokens = min(sizes.context_length, cache_tokens)
        self._facts = served_model(hf_model, tokenizer, tokens, sizes.vocab_size)
        names = dict.fromkeys(("model_path", "tokenizer_path", "served_model_name"), self.model)
        numbers = {"vocab_size": sizes.vocab_size, "context_length": sizes.context_length, "max_total_tokens": tokens}
        self._info = {**names, **numbers, "is_generation": True, "dtype": "float32", "engine": "slime_tandem"}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=f"serves {model}", daemon=True)
        self.url = ""

    def _decode(self, ids: list[list[int]]) -> list[str]:
        return self._facts.decode(ids, False)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        engine = EngineThread(self._runner, lambda path: load_model(path, "float32"), self._ended.set)
        application = Server(engine, self._facts, self._info, api_key=None).application()
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=10.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
            self.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
            self._ready.set()
            await self._ended.wait()
        finally:
            await asyncio.to_thread(engine.stop, 10.0)
            await runner.cleanup()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60), "the thread died"
        return self

    def __exit__(self, *_: Any) -> None:
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def is_alive(self) -> bool:
        """Whether it still answers: a dead engine ends it."""
        return self._thread.is_alive()
